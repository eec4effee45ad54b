defmodule FlashAttention.Distributed.Deal do
  @moduledoc """
  Which rows and columns of attention each rank of a group has: `FlashAttention.Distributed.deal/3`.

  Time follows the visible area, memory and everything else in a model follow the number of rows. So rows are cut into
  chunks of one length, of which each rank gets as many as any other, and those that together see about as much: the
  largest first, each to the rank that sees least so far (the greedy deal of MagiAttention, arXiv 2505.13211), then
  exchanges between the ranks that see most and least. Where neighbours can stay together, as those of packed documents,
  they do, so that fewer columns travel. Chunks are as long as that balance allows: one a rank where all rows see as
  much, two a rank of causal attention, where the deal is the one known as zigzag.

      causal, 4 ranks, 8 chunks:  0 1 2 3 3 2 1 0

  Columns are dealt as the rows are where there are as many of them, as tokens have both; otherwise each rank has one
  part of them, as long as any other.

  Each tensor of a rank, a shard, has its positions one behind the other in ascending order; `positions/3` tells them,
  for rotary embeddings and whatever else depends on where a token stands.
  """

  alias FlashAttention.{Error, Mask, Options, Tensor, TensorLike}
  alias FlashAttention.Distributed.{Bands, Ranges}

  @enforce_keys [:size, :num_ranks, :bands, :rows, :columns, :areas]
  @derive {Inspect, only: [:size, :num_ranks]}
  defstruct [:size, :num_ranks, :bands, :rows, :columns, :areas]

  @typedoc """
  `rows` and `columns` are the ranges `{begin, end}` of each rank, `areas` how many cells it sees, in all batches that
  the mask tells apart. `bands` is private.
  """
  @type t :: %__MODULE__{
          size: Mask.size(),
          num_ranks: pos_integer,
          bands: [[FlashAttention.Mask.Bands.band()]],
          rows: %{non_neg_integer => Ranges.t()},
          columns: %{non_neg_integer => Ranges.t()},
          areas: %{non_neg_integer => non_neg_integer}
        }

  @typedoc "`:rows` of q, o, dout and dq; `:columns` of k, v, dk and dv."
  @type axis :: :rows | :columns

  # No chunk is shorter where the rows suffice: kernels' tiles are 128 rows.
  @shortest 128
  @most_chunks 64
  # With longer chunks kernels run better than they would for a balance closer than that.
  @goal 1.04

  @doc false
  def new({seqlen_q, seqlen_k} = size, num_ranks, opts) do
    check_count!(:seqlen_q, seqlen_q, 0)
    check_count!(:seqlen_k, seqlen_k, 0)
    check_count!(:num_ranks, num_ranks, 1)
    opts = check_keys!(opts)
    bands = bands(size, opts)
    {rows, areas} = deal_rows(bands, seqlen_q, num_ranks, opts[:chunk])
    columns = if seqlen_q == seqlen_k, do: rows, else: parts(seqlen_k, num_ranks)
    %__MODULE__{size: size, num_ranks: num_ranks, bands: bands, rows: rows, columns: columns, areas: areas}
  end

  def new(size, _num_ranks, _opts),
    do: raise(Error.invalid(:size, "{seqlen_q, seqlen_k}", Error.show(size)))

  @doc """
  How much more than the average the rank sees that sees most: 1.0 is a perfect balance.

      iex> deal = FlashAttention.Distributed.deal({64, 64}, 4)
      iex> FlashAttention.Distributed.Deal.imbalance(deal)
      1.0
  """
  @spec imbalance(t) :: float
  def imbalance(%__MODULE__{areas: areas, num_ranks: num_ranks}) do
    case areas |> Map.values() |> Enum.sum() do
      0 -> 1.0
      area -> Enum.max(Map.values(areas)) * num_ranks / area
    end
  end

  @doc """
  The positions of a rank's rows or columns: s32 `[rows]`, in the order that its shards have them.

      iex> deal = FlashAttention.Distributed.deal({8, 8}, 2)
      iex> for <<x::signed-32-native <- FlashAttention.Distributed.Deal.positions(deal, 0).data>>, do: x
      [0, 1, 6, 7]
  """
  @spec positions(t, non_neg_integer, axis) :: Tensor.t()
  def positions(%__MODULE__{} = deal, rank, axis \\ :rows) do
    ranges = ranges!(deal, rank, axis)
    data = for {first, last} <- ranges, x <- first..(last - 1)//1, into: <<>>, do: <<x::signed-32-native>>
    Tensor.new(data, {:s, 32}, {Ranges.count(ranges)})
  end

  @doc """
  A rank's part of a whole tensor `[batch, seqlen, ...]`, such as q, or the embeddings of tokens.

      iex> deal = FlashAttention.Distributed.deal({4, 4}, 2)
      iex> whole = FlashAttention.Tensor.new(<<0, 1, 2, 3>>, :u8, {1, 4})
      iex> FlashAttention.Distributed.Deal.dispatch(deal, 0, whole).data
      <<0, 3>>
  """
  @spec dispatch(t, non_neg_integer, TensorLike.t(), axis) :: TensorLike.t()
  def dispatch(%__MODULE__{} = deal, rank, tensor, axis \\ :rows) do
    ranges = ranges!(deal, rank, axis)
    {{data, type, shape}, names} = read!(tensor, :tensor)
    check_seqlen!(:tensor, shape, seqlen(deal, axis))
    shard = {rows_of(data, type, shape, ranges), type, put_elem(shape, 1, Ranges.count(ranges))}
    TensorLike.from_native(tensor, shard, names)
  end

  @doc """
  The whole tensor of the shards of all ranks, in the order of the ranks: what `dispatch/4` cut.

      iex> deal = FlashAttention.Distributed.deal({4, 4}, 2)
      iex> shards = for data <- [<<0, 3>>, <<1, 2>>], do: FlashAttention.Tensor.new(data, :u8, {1, 2})
      iex> FlashAttention.Distributed.Deal.undispatch(deal, shards).data
      <<0, 1, 2, 3>>
  """
  @spec undispatch(t, [TensorLike.t()], axis) :: TensorLike.t()
  def undispatch(%__MODULE__{} = deal, shards, axis \\ :rows) do
    check_number!(shards, deal.num_ranks)
    first = hd(shards)
    {{_data, type, like}, names} = read!(first, :shards)

    pieces =
      for {shard, rank} <- Enum.with_index(shards) do
        ranges = ranges!(deal, rank, axis)
        {{data, own_type, shape}, _names} = read!(shard, :shards)
        check_seqlen!(:shards, shape, Ranges.count(ranges))
        check_like!({own_type, shape}, {type, like})
        row = row_bytes(type, shape)

        for batch <- batches(shape), {first, last, at} <- Ranges.placed(ranges) do
          {{batch, first}, binary_part(data, (batch * elem(shape, 1) + at) * row, (last - first) * row)}
        end
      end

    data =
      pieces |> Enum.concat() |> Enum.sort_by(&elem(&1, 0)) |> Enum.map(&elem(&1, 1)) |> IO.iodata_to_binary()

    TensorLike.from_native(first, {data, type, put_elem(like, 1, seqlen(deal, axis))}, names)
  end

  @doc false
  # What a rank's shard holds, and the names of its axes, or what is wrong with it.
  def read_shard(deal, rank, shard, axis) do
    {{_data, _type, shape} = native, names} = read!(shard, :shard)
    check_seqlen!(:shard, shape, deal |> ranges!(rank, axis) |> Ranges.count())
    {:ok, native, names}
  rescue
    error in Error -> {:error, error}
  end

  @doc false
  # What a rank needs of another's columns, or of its own.
  def needed(%__MODULE__{} = deal, rank, owner), do: deal |> seen(rank) |> Ranges.intersect(deal.columns[owner])

  @doc false
  def seen(%__MODULE__{bands: bands, rows: rows}, rank), do: seen_by(bands, rows[rank])

  defp seen_by(bands, ranges) do
    for(batch <- bands, band <- batch, range <- ranges, columns = Bands.columns(band, range), do: columns)
    |> Ranges.union()
  end

  @doc false
  def ranges!(deal, rank, axis) when axis in [:rows, :columns] do
    case Map.fetch!(deal, axis) do
      %{^rank => ranges} -> ranges
      _ -> raise Error.invalid(:rank, "0 to #{deal.num_ranks - 1}", Error.show(rank))
    end
  end

  def ranges!(_deal, _rank, axis), do: raise(Error.invalid(:axis, ":rows or :columns", Error.show(axis)))

  # ---- dealing -------------------------------------------------------------------------------------------

  defp deal_rows(bands, seqlen, num_ranks, nil) do
    shortest = min(@shortest, max(1, div(seqlen, 2 * num_ranks)))

    Stream.iterate(1, &(2 * &1))
    |> Stream.take_while(&(&1 == 1 or (&1 <= @most_chunks and seqlen >= shortest * num_ranks * &1)))
    |> Enum.reduce_while(nil, fn chunks_a_rank, best ->
      dealt = deal_chunks(bands, equal_chunks(seqlen, num_ranks * chunks_a_rank), num_ranks)
      best = Enum.min_by(Enum.reject([best, dealt], &is_nil/1), &most(elem(&1, 1)))
      {if(balanced?(elem(best, 1)), do: :halt, else: :cont), best}
    end)
  end

  defp deal_rows(bands, seqlen, num_ranks, chunk) do
    check_count!(:chunk, chunk, 1)
    deal_chunks(bands, {div(seqlen + chunk - 1, chunk), &min(&1 * chunk, seqlen), &div(&1, chunk)}, num_ranks)
  end

  defp most(areas), do: areas |> Map.values() |> Enum.max()
  defp balanced?(areas), do: most(areas) * map_size(areas) <= @goal * Enum.sum(Map.values(areas))

  # How many chunks, where each begins, and which one a row is in. Chunks differ by one row at most.
  defp equal_chunks(seqlen, count),
    do: {count, &div(&1 * seqlen, count), &(div((&1 + 1) * count + seqlen - 1, max(1, seqlen)) - 1)}

  defp parts(seqlen, num_ranks) do
    {_count, begin, _chunk_of} = equal_chunks(seqlen, num_ranks)
    Map.new(0..(num_ranks - 1), &{&1, Ranges.union([{begin.(&1), begin.(&1 + 1)}])})
  end

  # Two deals: the greedy one, and one that leaves neighbours together as far as exchanges between ranks allow. Of those
  # that are balanced the one for which fewer columns travel.
  defp deal_chunks(bands, {count, begin, _chunk_of} = chunks, num_ranks) do
    areas = chunk_areas(bands, chunks)
    numbers = Enum.map(0..(count - 1)//1, &{Map.get(areas, &1, 0), &1})

    [greedy(numbers, num_ranks), contiguous(numbers, num_ranks)]
    |> Enum.map(fn hands -> hands |> exchange(16 * num_ranks) |> dealt(begin) end)
    |> Enum.min_by(fn {rows, areas} = dealt ->
      if balanced?(areas), do: {0, travelling(bands, rows)}, else: {1, most(elem(dealt, 1))}
    end)
  end

  defp dealt(hands, begin) do
    {Map.new(hands, fn {rank, {_total, hand}} ->
       {rank, Ranges.union(for {_area, number} <- hand, do: {begin.(number), begin.(number + 1)})}
     end), Map.new(hands, fn {rank, {total, _hand}} -> {rank, total} end)}
  end

  # How many columns ranks see that would not be theirs, were columns dealt as rows are.
  defp travelling(bands, rows) do
    for {_rank, ranges} <- rows, seen = seen_by(bands, ranges), reduce: 0 do
      sum -> sum + Ranges.count(seen) - Ranges.count(Ranges.intersect(seen, ranges))
    end
  end

  defp chunk_areas(batches, {_count, begin, chunk_of}) do
    for bands <- batches,
        {q_begin, q_end, k_begin, k_end, _left, _right} = band when q_begin < q_end and k_begin < k_end <-
          bands,
        number <- chunk_of.(q_begin)..chunk_of.(q_end - 1)//1,
        cut = Bands.cut(band, {begin.(number), begin.(number + 1)}, {k_begin, k_end}),
        reduce: %{} do
      areas -> Map.update(areas, number, Mask.Bands.area(cut), &(&1 + Mask.Bands.area(cut)))
    end
  end

  # The largest chunk first, each to the rank that sees least so far and may have another one.
  defp greedy(chunks, num_ranks) do
    {few, more} = {div(length(chunks), num_ranks), rem(length(chunks), num_ranks)}
    ranks = :gb_sets.from_list(for rank <- 0..(num_ranks - 1), do: {0, rank})
    hands = Map.new(0..(num_ranks - 1), &{&1, []})

    {hands, _ranks, _more} =
      chunks
      |> Enum.sort_by(fn {area, number} -> {-area, number} end)
      |> Enum.reduce({hands, ranks, more}, fn {area, _number} = chunk, {hands, ranks, more} ->
        {{seen, rank}, others} = take_rank(ranks, hands, few, more)
        hand = [chunk | hands[rank]]
        more = if length(hand) > few, do: more - 1, else: more
        full? = length(hand) > few
        ranks = if full?, do: others, else: :gb_sets.add({seen + area, rank}, others)
        {Map.put(hands, rank, hand), ranks, more}
      end)

    Map.new(hands, fn {rank, hand} -> {rank, {total(hand), hand}} end)
  end

  defp contiguous(chunks, num_ranks) do
    count = length(chunks)
    chunks = List.to_tuple(chunks)

    Map.new(0..(num_ranks - 1), fn rank ->
      hand =
        for number <- div(rank * count, num_ranks)..(div((rank + 1) * count, num_ranks) - 1)//1,
            do: elem(chunks, number)

      {rank, {total(hand), hand}}
    end)
  end

  defp total(hand), do: Enum.reduce(hand, 0, fn {area, _number}, sum -> sum + area end)

  # A rank with its share takes one more only where there are more chunks than shares.
  defp take_rank(ranks, hands, few, more) do
    {{_seen, rank} = taken, others} = :gb_sets.take_smallest(ranks)

    if length(hands[rank]) < few or more > 0,
      do: {taken, others},
      else: take_rank(others, hands, few, more)
  end

  # Exchanges chunks between the ranks that see most and least, as long as that brings them together.
  defp exchange(hands, 0), do: hands

  defp exchange(hands, times) do
    {most, {large, hand}} = Enum.max_by(hands, fn {_rank, {total, _hand}} -> total end)
    {least, {small, other}} = Enum.min_by(hands, fn {_rank, {total, _hand}} -> total end)
    gap = large - small

    best =
      for({a, _} = one <- hand, {b, _} = two <- other, a > b, do: {abs(gap - 2 * (a - b)), a - b, one, two})
      |> Enum.min(fn -> nil end)

    case best do
      {left, moved, one, two} when left < gap ->
        hands
        |> Map.put(most, {large - moved, [two | List.delete(hand, one)]})
        |> Map.put(least, {small + moved, [one | List.delete(other, two)]})
        |> exchange(times - 1)

      _ ->
        hands
    end
  end

  # ---- tensors -------------------------------------------------------------------------------------------

  @doc false
  def seqlen(%__MODULE__{size: {seqlen_q, _seqlen_k}}, :rows), do: seqlen_q
  def seqlen(%__MODULE__{size: {_seqlen_q, seqlen_k}}, :columns), do: seqlen_k

  defp read!(tensor, argument) do
    case Tensor.read(tensor, {:cpu, 0}) do
      {:ok, {data, _type, shape} = native, names} when is_binary(data) and tuple_size(shape) > 1 ->
        {native, names}

      {:ok, _native, _names} ->
        raise Error.invalid(argument, "a tensor in the host's memory", Error.show(tensor))

      {:error, expected, got} ->
        raise Error.invalid(argument, expected, got)
    end
  end

  defp check_seqlen!(argument, shape, seqlen) do
    if elem(shape, 1) != seqlen,
      do: raise(Error.invalid(argument, "a second axis of #{seqlen} as in the deal", "#{elem(shape, 1)}"))
  end

  defp check_number!(shards, num_ranks) do
    got = if is_list(shards), do: length(shards), else: Error.show(shards)

    if got != num_ranks,
      do: raise(Error.invalid(:shards, "a list of #{num_ranks}, one of each rank", "#{got}"))
  end

  # Shards differ in their rows alone.
  defp check_like!({type, shape}, {first_type, first_shape}) do
    for {what, got, expected} <- [
          {"type", type, first_type},
          {"shape", put_elem(shape, 1, :_), put_elem(first_shape, 1, :_)}
        ],
        got != expected,
        do:
          raise(Error.invalid(:shards, "#{what} #{inspect(expected)} as of rank 0", "#{what} #{inspect(got)}"))
  end

  defp rows_of(data, type, shape, ranges) do
    row = row_bytes(type, shape)

    for(
      batch <- batches(shape),
      {first, last} <- ranges,
      do: binary_part(data, (batch * elem(shape, 1) + first) * row, (last - first) * row)
    )
    |> IO.iodata_to_binary()
  end

  defp batches(shape), do: 0..(elem(shape, 0) - 1)//1

  defp row_bytes({_class, bits}, shape) do
    [_batch, _seqlen | others] = Tuple.to_list(shape)
    Enum.product(others) * div(bits, 8)
  end

  # ---- options -------------------------------------------------------------------------------------------

  defp check_keys!(opts) do
    keys = [:causal, :window, :mask, :chunk]
    unknown = if Keyword.keyword?(opts), do: Keyword.keys(opts) -- keys, else: [opts]

    if unknown != [],
      do: raise(Error.invalid(:opts, "keys among #{Enum.join(keys, ", ")}", Error.show(hd(unknown))))

    case opts |> Keyword.delete(:chunk) |> Options.parse(keys -- [:chunk]) do
      {:ok, _options} -> opts
      {:error, error} -> raise error
    end
  end

  defp check_count!(name, count, least) do
    if not (is_integer(count) and count >= least),
      do: raise(Error.invalid(name, "a whole number of at least #{least}", Error.show(count)))
  end

  defp bands({seqlen_q, seqlen_k} = size, opts) do
    window = opts[:window] || {:infinity, :infinity}
    mask = opts[:mask] || Mask.from_bands([{0, seqlen_q, 0, seqlen_k, :infinity, :infinity}])
    mask = Mask.intersect_window(mask, window)
    mask = if opts[:causal] != false, do: Mask.intersect_window(mask, {:infinity, 0}), else: mask
    batches = Mask.bands(mask, size)
    for bands <- batches, {band, index} <- Enum.with_index(bands), do: check_band!(band, index, size)
    batches
  end

  defp check_band!({q_begin, q_end, k_begin, k_end, _left, _right}, index, {seqlen_q, seqlen_k}) do
    for {name, value, seqlen_name, seqlen} <- [
          {:q_begin, q_begin, :seqlen_q, seqlen_q},
          {:q_end, q_end, :seqlen_q, seqlen_q},
          {:k_begin, k_begin, :seqlen_k, seqlen_k},
          {:k_end, k_end, :seqlen_k, seqlen_k}
        ],
        value not in 0..seqlen,
        do:
          raise(
            Error.invalid(:bands, "#{name} from 0 to #{seqlen_name} #{seqlen} in band #{index}", "#{value}")
          )
  end
end
