defmodule FlashAttention.Mask.Bands do
  @moduledoc false
  # The bands of masks whose numbers are lists: how each kind of mask becomes bands, and what bands show.

  alias FlashAttention.{Error, Tensor}

  @typedoc "See `FlashAttention.Mask`."
  @type band ::
          {q_begin :: integer, q_end :: integer, k_begin :: integer, k_end :: integer, left :: side,
           right :: side}
  @type side :: integer | :infinity

  # ---- from kinds of masks -------------------------------------------------------------------------------

  @doc "A list of bands a batch, or one for all."
  def of(:packed, %{q: q, k: k}, _static, _size), do: [Enum.zip_with([q, tl(q), k, tl(k)], &whole/1)]

  def of(:lengths, %{k: k_lengths} = numbers, [side: side], {seqlen_q, seqlen_k}) do
    q_lengths = numbers[:q] || List.duplicate(seqlen_q, length(k_lengths))

    Enum.zip_with([q_lengths, k_lengths], fn [q, k] ->
      [whole(range(side, q, seqlen_q) ++ range(side, k, seqlen_k))]
    end)
  end

  def of(:prefix, %{k: lengths}, _static, {seqlen_q, seqlen_k}) do
    for length <- lengths do
      length = min(length, seqlen_k)
      first = max(0, length + seqlen_q - seqlen_k)
      [whole([0, seqlen_q, 0, length]), {first, seqlen_q, length, seqlen_k, :infinity, 0}]
    end
  end

  def of(:block_causal, _numbers, [length: length], {seqlen_q, seqlen_k}) do
    shift = seqlen_k - seqlen_q

    [
      for begin <- Enum.take_every(0..(seqlen_q - 1)//1, length) do
        last = min(begin + length, seqlen_q)
        whole([begin, last, 0, max(0, last + shift)])
      end
    ]
  end

  def of(:segments, %{q: q_ids, k: k_ids}, _static, _size), do: of_segments(q_ids, k_ids)
  # A tensor [num_bands, 6] is one for all batches.
  def of(_kind, %{bands: [[number | _] | _] = bands}, _static, _size) when is_integer(number),
    do: [Enum.map(bands, &List.to_tuple/1)]

  def of(_kind, %{bands: bands}, _static, _size), do: bands

  defp range(:right, length, _seqlen), do: [0, length]
  defp range(:left, length, seqlen), do: [seqlen - length, seqlen]

  defp whole([q_begin, q_end, k_begin, k_end]), do: {q_begin, q_end, k_begin, k_end, :infinity, :infinity}

  @doc "A range of rows beside a range of columns."
  def of_range({q_begin, q_end}, {k_begin, k_end}, type) do
    difference = k_end - k_begin - (q_end - q_begin)

    {left, right} =
      case type do
        :full -> {:infinity, :infinity}
        :causal -> {:infinity, 0}
        :inverse_causal -> {difference, :infinity}
        :bi_causal -> {difference, 0}
        _ -> raise Error.invalid(:types, ":full, :causal, :inverse_causal or :bi_causal", Error.show(type))
      end

    {q_begin, q_end, k_begin, k_end, left, right}
  end

  @doc "Ids a batch, each in one run; batches with fewer ids than others get empty bands."
  def of_segments(q_ids, k_ids) do
    if length(q_ids) != length(k_ids),
      do: raise(Error.invalid(:k_ids, "#{length(q_ids)} batches as in q_ids", "#{length(k_ids)}"))

    batches = Enum.zip_with([q_ids, k_ids], fn [q, k] -> of_ids(runs(:q_ids, q), runs(:k_ids, k)) end)
    most = batches |> Enum.map(&length/1) |> Enum.max(fn -> 0 end)
    Enum.map(batches, &(&1 ++ List.duplicate(whole([0, 0, 0, 0]), most - length(&1))))
  end

  defp of_ids(q_runs, k_runs) do
    columns = Map.new(k_runs)
    for {id, rows} <- q_runs, beside = columns[id], do: whole(rows ++ beside)
  end

  # Ids with where their run begins and ends.
  defp runs(name, ids) do
    {runs, _end} =
      ids
      |> Enum.chunk_by(& &1)
      |> Enum.map_reduce(0, fn [id | _] = run, at -> {{id, [at, at + length(run)]}, at + length(run)} end)

    if length(Enum.uniq_by(runs, &elem(&1, 0))) != length(runs),
      do: raise(Error.invalid(name, "each id in one run", Error.show(ids)))

    runs
  end

  @doc "Bands as a caller wrote them: a list of them, or one a batch."
  def of_lists(bands) do
    batches = if Enum.all?(bands, &is_list/1) and bands != [], do: bands, else: [bands]

    for {batch, index} <- Enum.with_index(batches), {band, number} <- Enum.with_index(batch), not band?(band) do
      name = if length(batches) > 1, do: "of batch #{index}, band #{number}", else: "band #{number}"
      raise Error.invalid(:bands, "#{name}: {q_begin, q_end, k_begin, k_end, left, right}", Error.show(band))
    end

    if batches |> Enum.map(&length/1) |> Enum.uniq() |> length() > 1,
      do: raise(Error.invalid(:bands, "as many bands in every batch", Error.show(Enum.map(batches, &length/1))))

    batches
  end

  defp band?({q_begin, q_end, k_begin, k_end, left, right}),
    do: Enum.all?([q_begin, q_end, k_begin, k_end], &is_integer/1) and Enum.all?([left, right], &side?/1)

  defp band?(_band), do: false

  defp side?(side), do: side == :infinity or is_integer(side)

  # What the numbers of a kind are called where it is made, and which axes they have as tensors.
  @tensors %{
    {:packed, :q} => {:cu_seqlens_q, ["[num_sequences + 1]"]},
    {:packed, :k} => {:cu_seqlens_k, ["[num_sequences + 1]"]},
    {:lengths, :q} => {:q_lengths, ["[batch]"]},
    {:lengths, :k} => {:k_lengths, ["[batch]"]},
    {:prefix, :k} => {:lengths, ["[batch]"]},
    {:segments, :q} => {:q_ids, ["[batch, seqlen_q]"]},
    {:segments, :k} => {:k_ids, ["[batch, seqlen_k]"]}
  }
  @bands {:bands, ["[num_bands, 6]", "[batch or 1, num_bands, 6]"]}

  @doc "What the numbers of a mask of that kind are called in its function."
  def argument(kind, name), do: elem(Map.get(@tensors, {kind, name}, @bands), 0)

  @doc "Raises unless the numbers of a mask, as a tensor of that type and shape, are whole and have their axes."
  def check_tensor!(kind, name, type, shape) do
    {argument, axes} = Map.get(@tensors, {kind, name}, @bands)

    if not match?({class, _bits} when class in [:s, :u], type),
      do: raise(Error.invalid(argument, "whole numbers", "a tensor of type #{Error.show(type)}"))

    if tuple_size(shape) not in Enum.map(axes, &length(String.split(&1, ","))),
      do: raise(Error.invalid(argument, Enum.join(axes, " or "), "a tensor of shape #{Error.show(shape)}"))
  end

  @doc "The data, the type and the shape of numbers of a mask that are a tensor."
  def read!(kind, name, tensor) do
    case Tensor.read(tensor, {:cpu, 0}) do
      {:ok, {data, type, shape}, _names} when is_binary(data) ->
        check_tensor!(kind, name, type, shape)
        {data, type, shape}

      {:ok, _elsewhere, _names} ->
        raise Error.invalid(argument(kind, name), "a tensor in the host's memory", Error.show(tensor))

      {:error, expected, got} ->
        raise Error.invalid(argument(kind, name), expected, got)
    end
  end

  @doc "Numbers as lists: a tensor's elements, nested as its shape says."
  def to_lists(_kind, _name, list) when is_list(list), do: list

  def to_lists(kind, name, tensor) do
    {data, {class, bits}, shape} = read!(kind, name, tensor)
    data |> integers(class, bits) |> nest(Tuple.to_list(shape)) |> as_bands(tuple_size(shape))
  end

  defp integers(data, :s, bits), do: for(<<x::integer-signed-native-size(bits) <- data>>, do: x)
  defp integers(data, :u, bits), do: for(<<x::integer-unsigned-native-size(bits) <- data>>, do: x)

  defp nest(numbers, [_count]), do: numbers

  defp nest(numbers, [_count | shape]),
    do: numbers |> Enum.chunk_every(Enum.product(shape)) |> Enum.map(&nest(&1, shape))

  defp as_bands(lists, 3), do: Enum.map(lists, fn batch -> Enum.map(batch, &List.to_tuple/1) end)
  defp as_bands(lists, _rank), do: lists

  # ---- what bands show -----------------------------------------------------------------------------------

  @doc "The band with no more to either side than a window shows."
  def within_window({q_begin, q_end, k_begin, k_end, left, right}, {window_left, window_right}),
    do: {q_begin, q_end, k_begin, k_end, min(left, window_left), min(right, window_right)}

  @doc "First and last columns that a row sees, of each band that shows it some."
  def columns(bands, row) do
    for {q_begin, q_end, k_begin, k_end, left, right} <- bands,
        row >= q_begin and row < q_end,
        diagonal = row - q_end + k_end,
        first = if(left == :infinity, do: k_begin, else: max(k_begin, diagonal - left)),
        last = if(right == :infinity, do: k_end - 1, else: min(k_end - 1, diagonal + right)),
        first <= last,
        do: {first, last}
  end

  @doc "How many cells a band has."
  def area({q_begin, q_end, k_begin, k_end, left, right}) do
    {rows, columns} = {max(0, q_end - q_begin), max(0, k_end - k_begin)}
    # Row r of the band, counted from 0, has columns up to r + reach(side).
    shift = columns - rows
    upper = if right == :infinity, do: rows * columns, else: below(rows, columns, shift + right)
    lower = if left == :infinity, do: 0, else: below(rows, columns, shift - left - 1)
    max(0, upper - lower)
  end

  # Cells [r, c] of rows x columns with c <= r + reach: row r has min(columns, max(0, r + reach + 1)).
  defp below(rows, columns, reach) do
    first = min(rows, max(0, -reach))
    full = min(rows, max(first, columns - reach - 1))
    rising = full - first
    (rising * (first + full - 1 + 2 * (reach + 1))) |> div(2) |> Kernel.+((rows - full) * columns)
  end

  @doc "The smallest problem that has room for the mask, for a picture; nil where only a call can tell."
  def size(%{numbers: numbers} = mask) do
    cond do
      not Enum.all?(numbers, fn {_name, list} -> is_list(list) end) ->
        nil

      mask.kind == :packed ->
        {List.last(numbers.q), List.last(numbers.k)}

      mask.kind == :lengths ->
        {Enum.max(numbers[:q] || numbers.k, fn -> 0 end), Enum.max(numbers.k, fn -> 0 end)}

      mask.kind == :prefix ->
        numbers.k |> Enum.max(fn -> 0 end) |> then(&{&1 + 2, &1 + 2})

      numbers[:bands] ->
        numbers.bands |> Enum.concat() |> ends()

      true ->
        nil
    end
  end

  defp ends(bands), do: {bands |> Enum.map(&elem(&1, 1)) |> most(), bands |> Enum.map(&elem(&1, 3)) |> most()}
  defp most(numbers), do: Enum.max(numbers, fn -> 0 end)

  @doc "As the library takes them: a tensor s32 [batches, num_bands, 6]."
  def to_tensor(batches) do
    # The library wants one band at least.
    [first | _] =
      batches = if hd(batches) == [], do: Enum.map(batches, fn [] -> [{0, 0, 0, 0, 0, 0}] end), else: batches

    data =
      for bands <- batches,
          band <- bands,
          x <- Tuple.to_list(band),
          into: <<>>,
          do: <<word(x)::signed-32-native>>

    Tensor.new(data, {:s, 32}, {length(batches), length(first), 6})
  end

  @unbounded 0x7FFFFFFF
  defp word(:infinity), do: @unbounded
  defp word(number), do: number |> max(-@unbounded - 1) |> min(@unbounded)
end
