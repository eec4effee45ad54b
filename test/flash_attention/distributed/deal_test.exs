defmodule FlashAttention.Distributed.DealTest do
  use ExUnit.Case, async: true
  doctest FlashAttention.Distributed.Deal

  alias FlashAttention.Distributed.{Bands, Deal, Ranges}
  alias FlashAttention.{Error, Mask, Tensor}

  defp random_lengths(seed, count, total) do
    state = :rand.seed_s(:exsss, seed)

    {ends, _state} = Enum.map_reduce(1..(count - 1), state, fn _, state -> :rand.uniform_s(total, state) end)

    ends = Enum.sort([0, total | ends])
    Enum.zip_with(ends, tl(ends), &(&2 - &1))
  end

  # Sizes, and what rows see: masks of the kinds that training has, causal ones unless they say otherwise.
  defp masks do
    [
      {"causal", {65_536, 65_536}, []},
      {"causal of an odd length", {50_001, 50_001}, []},
      {"full", {65_536, 65_536}, causal: false},
      {"window", {65_536, 65_536}, window: {4096, 0}},
      {"packed, of one length", {65_536, 65_536}, mask: Mask.packed(List.duplicate(2048, 32))},
      {"packed, of random lengths", {65_536, 65_536}, mask: Mask.packed(random_lengths(1, 32, 65_536))},
      {"packed, full", {65_536, 65_536}, causal: false, mask: Mask.packed(random_lengths(2, 20, 65_536))},
      {"block causal", {65_536, 65_536}, causal: false, mask: Mask.block_causal(2048)},
      {"prefix", {65_536, 65_536}, causal: false, mask: Mask.prefix([20_000])},
      {"ranges", {65_536, 65_536},
       causal: false,
       mask:
         Mask.ranges(
           [{0, 9000}, {9000, 40_000}, {40_000, 65_536}],
           [{0, 30_000}, {1000, 60_000}, {20_000, 65_536}],
           [:causal, :bi_causal, :inverse_causal]
         )},
      {"fewer rows than columns", {16_384, 65_536}, []}
    ]
  end

  for num_ranks <- [8, 64] do
    test "#{num_ranks} ranks see as much within 5 %, and have as many rows" do
      num_ranks = unquote(num_ranks)

      for {name, {seqlen_q, _} = size, opts} <- masks() do
        deal = Deal.new(size, num_ranks, opts)
        assert Deal.imbalance(deal) <= 1.05, "#{name}: #{Deal.imbalance(deal)}"
        counts = for {_rank, ranges} <- deal.rows, do: Ranges.count(ranges)
        # Chunks differ by a row.
        most = div(seqlen_q, num_ranks) + 64
        assert Enum.max(counts) <= most and Enum.sum(counts) == seqlen_q, name
      end
    end
  end

  test "areas are those of the mask" do
    for {name, {seqlen_q, seqlen_k} = size, opts} <- masks() do
      deal = Deal.new(size, 8, opts)
      whole = opts[:mask] || Mask.from_bands([{0, seqlen_q, 0, seqlen_k, :infinity, :infinity}])
      area = Mask.area(whole, size, causal: Keyword.get(opts, :causal, true), window: opts[:window])
      assert deal.areas |> Map.values() |> Enum.sum() == area, name
    end
  end

  test "every row and column has one owner; deals of causal attention are zigzag, and those of equal rows whole" do
    for size <- [{0, 0}, {1, 1}, {5, 5}, {64, 64}, {7, 30}, {30, 7}, {129, 129}], num_ranks <- 1..9 do
      deal = Deal.new(size, num_ranks, [])

      for {axis, seqlen} <- [rows: elem(size, 0), columns: elem(size, 1)] do
        positions = for rank <- 0..(num_ranks - 1), x <- positions(deal, rank, axis), do: x
        assert Enum.sort(positions) == Enum.to_list(0..(seqlen - 1)//1)
      end
    end

    assert Deal.new({80, 80}, 4, []).rows == %{
             0 => [{0, 10}, {70, 80}],
             1 => [{10, 20}, {60, 70}],
             2 => [{20, 30}, {50, 60}],
             3 => [{30, 50}]
           }

    assert Deal.new({80, 80}, 2, causal: false).rows == %{0 => [{0, 40}], 1 => [{40, 80}]}
  end

  defp positions(deal, rank, axis),
    do: for(<<x::signed-32-native <- Deal.positions(deal, rank, axis).data>>, do: x)

  test "what was dispatched comes back" do
    whole = Tensor.new(:rand.bytes(3 * 50 * 2 * 4), :f32, {3, 50, 2})

    for num_ranks <- [1, 2, 3, 8], chunk <- [nil, 1, 7] do
      deal = Deal.new({50, 50}, num_ranks, chunk: chunk)
      shards = for rank <- 0..(num_ranks - 1), do: Deal.dispatch(deal, rank, whole)
      assert Deal.undispatch(deal, shards) == whole
    end
  end

  test "a cut of a band has its cells" do
    cells = fn bands ->
      for i <- 0..11, {first, last} <- Mask.Bands.columns(bands, i), j <- first..last, uniq: true, do: {i, j}
    end

    :rand.seed(:exsss, 3)

    for _ <- 1..500 do
      [q_begin, q_end] = Enum.sort([:rand.uniform(13) - 1, :rand.uniform(13) - 1])
      [k_begin, k_end] = Enum.sort([:rand.uniform(13) - 1, :rand.uniform(13) - 1])
      side = fn -> if :rand.uniform(3) == 1, do: :infinity, else: :rand.uniform(15) - 5 end
      band = {q_begin, q_end, k_begin, k_end, side.(), side.()}
      [row, row_end] = Enum.sort([:rand.uniform(13) - 1, :rand.uniform(13) - 1])
      [column, column_end] = Enum.sort([:rand.uniform(13) - 1, :rand.uniform(13) - 1])

      inside =
        for {i, j} <- cells.([band]), i in row..(row_end - 1)//1, j in column..(column_end - 1)//1, do: {i, j}

      cut = Bands.cut(band, {row, row_end}, {column, column_end})
      assert cells.(List.wrap(cut)) == inside
      assert cut == nil == (inside == [])

      # All columns of the range are seen by some row, where a row sees any.
      seen = for {i, j} <- cells.([band]), i in row..(row_end - 1)//1, uniq: true, do: j
      {first, last} = Bands.columns(band, {row, row_end}) || {0, 0}
      assert Enum.all?(seen, &(&1 in first..(last - 1)//1))

      # The same in ranges that lie one behind the other, in whatever order.
      rows = Ranges.placed([{0, 3}, {5, 9}, {10, 12}])
      columns = Ranges.placed([{4, 8}, {0, 2}, {8, 11}])
      local = for {i, j} <- cells.(Bands.local([band], rows, columns)), do: {i, j}

      place = fn placed, x ->
        Enum.find_value(placed, fn {a, b, at} -> if x in a..(b - 1), do: x - a + at end)
      end

      expected = for {i, j} <- cells.([band]), y = place.(rows, i), x = place.(columns, j), do: {y, x}

      assert Enum.sort(local) == Enum.sort(expected)
    end
  end

  test "a zigzag rank's own part of causal attention is causal attention" do
    deal = Deal.new({512, 512}, 4, [])

    for rank <- 0..3 do
      [own | _] = FlashAttention.Distributed.Stages.of(deal, rank, 3)
      assert own.bands == [[{0, 128, 0, 128, :infinity, 0}]]
    end
  end

  test "what cannot be dealt is an error" do
    for {size, num_ranks, opts, message} <- [
          {{4, 4}, 0, [], "num_ranks: expected a whole number of at least 1, got 0"},
          {{-1, 4}, 1, [], "seqlen_q: expected a whole number of at least 0, got -1"},
          {{4, 4}, 1, [chunk: 0], "chunk: expected a whole number of at least 1, got 0"},
          {{4, 4}, 1, [chunks: 1], "opts: expected keys among causal, window, mask, chunk, got :chunks"},
          {{4, 4}, 1, [mask: Mask.packed([5])], "bands: expected q_end from 0 to seqlen_q 4 in band 0, got 5"},
          {4, 1, [], "size: expected {seqlen_q, seqlen_k}, got 4"},
          {{4}, 1, [], "size: expected {seqlen_q, seqlen_k}, got {4}"},
          {{4, 4}, 1, [causal: 1], "causal: expected true or false, got 1"},
          {{4, 4}, 1, [mask: 3], "mask: expected a FlashAttention.Mask, got 3"},
          {{4, 4}, 1, [mask: {4}], "mask: expected a FlashAttention.Mask, got {4}"},
          {{4, 4}, 1, [window: 3], ~r/^window: expected \{left, right\}.*, got 3$/}
        ] do
      assert_raise Error, message, fn -> Deal.new(size, num_ranks, opts) end
    end

    # nil is a default's name, as in other calls.
    assert Deal.new({4, 4}, 2, causal: nil, window: nil, mask: nil, chunk: nil) == Deal.new({4, 4}, 2, [])

    deal = Deal.new({4, 4}, 2, [])
    tensor = Tensor.new(<<0, 0>>, :u8, {1, 2})
    whole = Tensor.new(<<0::32>>, :u8, {1, 4})

    for {fun, message} <- [
          {fn -> Deal.positions(deal, 2) end, "rank: expected 0 to 1, got 2"},
          {fn -> Deal.positions(deal, 0, :keys) end, "axis: expected :rows or :columns, got :keys"},
          {fn -> Deal.dispatch(deal, 0, tensor) end,
           "tensor: expected a second axis of 4 as in the deal, got 2"},
          {fn -> Deal.dispatch(deal, 0, :junk) end, ~r/^tensor: expected a tensor.*, got :junk$/},
          {fn -> Deal.undispatch(deal, [tensor]) end, "shards: expected a list of 2, one of each rank, got 1"},
          {fn -> Deal.undispatch(deal, tensor) end, ~r/^shards: expected a list of 2, one of each rank, got/},
          {fn -> Deal.undispatch(deal, [tensor, whole]) end,
           "shards: expected a second axis of 2 as in the deal, got 4"},
          {fn -> Deal.undispatch(deal, [tensor, Tensor.new(<<0::64>>, :f32, {1, 2})]) end,
           "shards: expected type {:u, 8} as of rank 0, got type {:f, 32}"},
          {fn -> Deal.undispatch(deal, [tensor, Tensor.new(<<0::32>>, :u8, {1, 2, 2})]) end,
           "shards: expected shape {1, :_} as of rank 0, got shape {1, :_, 2}"},
          {fn -> Deal.undispatch(deal, [tensor, tensor], :keys) end,
           "axis: expected :rows or :columns, got :keys"}
        ],
        do: assert_raise(Error, message, fun)
  end
end
