defmodule FlashAttention.Examples.ByteModel.Embed do
  @moduledoc false

  # Bytes -> q, k, v: rows of tables, put side by side. See FlashAttention.Examples.ByteModel.

  alias FlashAttention.{Mask, Tensor}
  alias FlashAttention.Examples.ByteModel
  alias FlashAttention.Examples.ByteModel.{Elements, OneHot}

  # The score that a head's position of interest has over others before anything is learned: exp(6) = 403 is
  # heard among a few hundred positions, and a learned match can outbid it.
  @phase_score 6.0

  def stage(model) do
    phases = phases(model, 0..(model.seqlen - 1))

    fn params, windows ->
      contexts = for start <- [2, 1, 0], do: bytes(windows, start)
      {inputs(model, tables(model, params), params.sink, contexts, phases), &pullback(model, contexts, &1)}
    end
  end

  # For every window, the list of its bytes from `start`, as many as it has positions.
  def bytes(windows, start),
    do: for(window <- windows, do: window |> binary_part(start, byte_size(window) - 3) |> :binary.bin_to_list())

  # Tables as tuples of rows, one for each byte; those that are put together head by head as lists of heads.
  def tables(model, params) do
    %{
      query: {head_rows(model, params.query.byte), head_rows(model, params.query.previous)},
      key: {head_rows(model, params.key.byte), head_rows(model, params.key.previous)},
      value: params.value |> rows() |> List.to_tuple()
    }
  end

  defp rows(%Tensor{data: data, shape: shape}), do: Elements.split(data, div(byte_size(data), elem(shape, 0)))

  defp head_rows(model, table) do
    heads = for row <- rows(table), do: Elements.split(row, div(byte_size(row), model.num_heads))
    List.to_tuple(heads)
  end

  # contexts: the bytes that were read at a position, one and two before it, each a list of windows, each a
  # list of bytes. phases: those of the positions of a window.
  def inputs(model, tables, sink, [byte, previous, second], phases) do
    q = coded(tables.query, byte, previous, phases.query)
    k = coded(tables.key, previous, second, phases.key)
    v = for window <- byte, byte <- window, do: elem(tables.value, byte)

    {batch, seqlen, mask} = byte |> Enum.map(&length/1) |> layout()
    shape = {batch, seqlen, model.num_heads, model.head_dim}
    [q, k, v] = for rows <- [q, k, v], do: Tensor.new(IO.iodata_to_binary(rows), model.type, shape)
    {q, k, v, Map.put(mask, :sink, sink)}
  end

  # Windows of one length are a batch; others are packed one behind the other, and a mask keeps them apart.
  defp layout(lengths) do
    case Enum.uniq(lengths) do
      [seqlen] -> {length(lengths), seqlen, %{}}
      _different -> {1, Enum.sum(lengths), %{mask: Mask.packed(lengths)}}
    end
  end

  # For every position and head: code of the byte | code of the byte before | phase.
  defp coded({byte_rows, previous_rows}, byte, previous, phases) do
    for {byte, previous} <- Enum.zip(byte, previous) do
      Enum.zip_with([byte, previous, phases], fn [byte, previous, phase] ->
        weave(elem(byte_rows, byte), elem(previous_rows, previous), phase)
      end)
    end
  end

  defp weave([a | as], [b | bs], [c | cs]), do: [a, b, c | weave(as, bs, cs)]
  defp weave([], [], []), do: []

  # For every position, the phases of all heads. The product of two phases that are d positions apart is
  # @phase_score * (mean of cos(frequency * d)) after attention's scale: frequencies are multiples of the
  # golden ratio, spread evenly over all turns, so that they agree at d = 0 alone.
  def phases(model, positions) do
    count = div(ByteModel.phase_dim(model), 2)
    frequencies = for r <- 1..count, do: :math.pi() * frac(r * (:math.sqrt(5) - 1) / 2)
    amplitude = :math.sqrt(@phase_score * :math.sqrt(model.head_dim) / count)

    phase = fn position ->
      turns = for f <- frequencies, x <- [:math.cos(f * position), :math.sin(f * position)], do: amplitude * x
      Elements.from_list(model.type, turns)
    end

    per_set = ByteModel.heads_per_set(model)

    %{
      query: for(i <- positions, do: for(h <- 0..(model.num_heads - 1), do: phase.(i - div(h, per_set)))),
      key: for(j <- positions, do: List.duplicate(phase.(j), model.num_heads))
    }
  end

  defp frac(x), do: x - Float.floor(x)

  defp pullback(model, [byte, previous, second], {dq, dk, dv, %{sink: dsink}}) do
    code = ByteModel.code_dim(model)

    %{
      query: %{
        byte: scatter_add(model, dq, byte, {0, code}),
        previous: scatter_add(model, dq, previous, {code, code})
      },
      key: %{
        byte: scatter_add(model, dk, previous, {0, code}),
        previous: scatter_add(model, dk, second, {code, code})
      },
      value: scatter_add(model, dv, byte, {0, model.head_dim}),
      sink: dsink
    }
  end

  # The reverse of looking rows up: for every byte, the sum of the rows of the positions where it stands, and
  # of each head's row the `count` elements from `first`.
  defp scatter_add(model, rows, windows, {first, count}) do
    element = Elements.bytes(model.type)
    means = OneHot.means(rows, Enum.concat(windows), model.device)
    nothing = Elements.zeros(model.type, model.num_heads * count)

    data =
      for byte <- 0..255 do
        case means do
          %{^byte => {mean, occurrences}} ->
            heads = Elements.split(mean, model.head_dim * element)
            parts = for head <- heads, do: binary_part(head, first * element, count * element)
            Elements.scale(model.type, IO.iodata_to_binary(parts), occurrences)

          _never_met ->
            nothing
        end
      end

    Tensor.new(IO.iodata_to_binary(data), model.type, {256, model.num_heads, count})
  end
end
