defmodule FlashAttention.MaskTest do
  use ExUnit.Case, async: true

  alias FlashAttention.{Error, Mask, Tensor}

  doctest FlashAttention.Mask

  # The definition, cell by cell.
  defp visible?({q_begin, q_end, k_begin, k_end, left, right}, i, j) do
    diagonal = i - q_end + k_end

    i >= q_begin and i < q_end and j >= k_begin and j < k_end and
      (left == :infinity or j >= diagonal - left) and (right == :infinity or j <= diagonal + right)
  end

  defp cells(mask, {seqlen_q, seqlen_k} = size, opts \\ []) do
    %Tensor{data: data, shape: {batches, ^seqlen_q, ^seqlen_k}} = Mask.to_tensor(mask, size, opts)

    for batch <- 0..(batches - 1)//1 do
      for i <- 0..(seqlen_q - 1)//1,
          j <- 0..(seqlen_k - 1)//1,
          one?(data, (batch * seqlen_q + i) * seqlen_k + j),
          do: {i, j}
    end
  end

  defp one?(data, at), do: :binary.at(data, at) == 1

  defp all(rows, columns, seen?), do: for(i <- rows, j <- columns, seen?.(i, j), do: {i, j})

  test "bands of any kind show the cells of their definition, and area counts them" do
    :rand.seed(:exsss, 7)

    for _ <- 1..300 do
      number = fn -> :rand.uniform(12) - 3 end
      side = fn -> Enum.random([:infinity, number.() - 2, number.()]) end
      band = {number.(), number.(), number.(), number.(), side.(), side.()}
      {q_begin, q_end, k_begin, k_end, _, _} = band
      expected = for i <- -3..12, j <- -3..12, visible?(band, i, j), do: {i, j}
      assert Mask.area(Mask.from_bands([band]), {12, 12}) == length(expected), inspect(band)

      if Enum.min([q_begin, q_end, k_begin, k_end]) >= 0,
        do: assert(cells(Mask.from_bands([band]), {12, 12}) == [expected], inspect(band))
    end
  end

  test "packed sequences see themselves; causal and windows hold within each" do
    mask = Mask.packed([3, 0, 2], [2, 1, 4])
    sequence = fn i -> if i < 3, do: 0, else: 2 end
    column = fn j -> Enum.at([0, 0, 1, 2, 2, 2, 2], j) end
    assert cells(mask, {5, 7}) == [all(0..4, 0..6, &(sequence.(&1) == column.(&2)))]
    assert {2, 6} not in hd(cells(mask, {5, 7})) and {4, 6} in hd(cells(mask, {5, 7}, causal: true))
    # Rows 3 and 4 are the last two of the last sequence's, beside columns 5 and 6.
    assert cells(mask, {5, 7}, causal: true, window: {1, 5}) ==
             [[{1, 0}, {2, 0}, {2, 1}, {3, 4}, {3, 5}, {4, 5}, {4, 6}]]

    assert cells(Mask.packed_at([0, 3, 3, 5], [0, 2, 3, 7]), {5, 7}) == cells(mask, {5, 7})
  end

  test "padding lies on either side, and causal attention is aligned to the sequences' ends" do
    assert cells(Mask.lengths([2, 0]), {3, 4}) == [all(0..2, 0..1, fn _, _ -> true end), []]

    assert cells(Mask.lengths([2, 4], q_lengths: [1, 3], side: :left), {3, 4}) ==
             [[{2, 2}, {2, 3}], all(0..2, 0..3, fn _, _ -> true end)]

    assert cells(Mask.lengths([2], q_lengths: [3]), {4, 4}, causal: true) == [[{1, 0}, {2, 0}, {2, 1}]]
  end

  test "prefixes and blocks" do
    for prefix <- 0..5,
        do: assert(cells(Mask.prefix([prefix]), {5, 5}) == [all(0..4, 0..4, &(&2 < prefix or &2 <= &1))])

    # Two rows behind three columns: row 0 stands beside column 3.
    assert cells(Mask.prefix([1]), {2, 5}) == [all(0..1, 0..4, &(&2 < 1 or &2 <= &1 + 3))]
    assert cells(Mask.block_causal(2), {5, 5}) == [all(0..4, 0..4, &(div(&2, 2) <= div(&1, 2)))]
    assert cells(Mask.block_causal([2, 2, 1]), {5, 5}) == cells(Mask.block_causal(2), {5, 5})
  end

  test "segments, in any order, also of other columns" do
    ids = [[5, 5, 1, 2], [3, 3, 3, 3]]
    seen? = fn list -> &(Enum.at(list, &1) == Enum.at(list, &2)) end
    assert cells(Mask.segments(ids), {4, 4}) == Enum.map(ids, &all(0..3, 0..3, seen?.(&1)))
    assert cells(Mask.segments([[1, 2, 2]], k_ids: [[2, 0, 1]]), {3, 3}) == [[{0, 2}, {1, 0}, {2, 0}]]
    assert {:error, %Error{argument: :q_ids}} = rescued(fn -> Mask.segments([[1, 2, 1]]) end)
  end

  test "ranges of the four types" do
    types = [:full, :causal, :inverse_causal, :bi_causal]

    for type <- types, rows <- [3, 5], columns <- [3, 5] do
      seen? = fn i, j ->
        (type in [:full, :inverse_causal] or j <= i + columns - rows) and (type in [:full, :causal] or j >= i)
      end

      expected = all(0..(rows - 1), 0..(columns - 1), seen?) |> Enum.map(fn {i, j} -> {i + 1, j + 2} end)
      assert cells(Mask.ranges([{1, rows + 1}], [{2, columns + 2}], type), {7, 8}) == [expected]
    end
  end

  test "tensors of numbers say the same as lists" do
    tensor = fn list, shape ->
      Tensor.new(for(x <- List.flatten(list), into: <<>>, do: <<x::signed-32-native>>), :s32, shape)
    end

    assert cells(Mask.packed_at(tensor.([0, 3, 5], {3})), {5, 5}) == cells(Mask.packed([3, 2]), {5, 5})
    assert cells(Mask.lengths(tensor.([1, 2], {2})), {3, 3}) == cells(Mask.lengths([1, 2]), {3, 3})
    bands = [{0, 2, 0, 3, 1, 0}, {2, 3, 0, 1, -1, :infinity}]
    words = Mask.Bands.to_tensor([bands])
    assert words.shape == {1, 2, 6}
    assert cells(Mask.from_bands(words), {3, 3}) == cells(Mask.from_bands(bands), {3, 3})
  end

  test "what is wrong is said, with the band's number" do
    for {make, argument, words} <- [
          {fn -> Mask.packed([1, -1]) end, :q_lengths, "whole numbers"},
          {fn -> Mask.packed([1], [1, 2]) end, :k_lengths, "1 of them"},
          {fn -> Mask.packed_at([1, 2]) end, :cu_seqlens_q, "begins with 0"},
          {fn -> Mask.packed_at([0, 3, 2]) end, :cu_seqlens_q, "fall"},
          {fn -> Mask.lengths([1], side: :up) end, :side, ":left"},
          {fn -> Mask.lengths([1], sides: :left) end, :opts, "side"},
          {fn -> Mask.lengths([1], q_lengths: [1, 2]) end, :q_lengths, "1 of them"},
          {fn -> Mask.block_causal(0) end, :lengths, "above 0"},
          {fn -> Mask.ranges([{0, 1}], [{0, 1}], :half) end, :types, ":bi_causal"},
          {fn -> Mask.ranges([{0, 1}], [0], :full) end, :k_ranges, "{begin, end}"},
          {fn -> Mask.from_bands([{0, 1, 0, 1, 0, 0}, {0, 1}]) end, :bands, "band 1"},
          {fn -> Mask.from_bands([[{0, 1, 0, 1, 0, 0}], []]) end, :bands, "every batch"},
          {fn -> Mask.intersect_window(Mask.packed([1]), {-1, 0}) end, :window, "at least 0"},
          {fn -> Mask.packed_at(5) end, :cu_seqlens_q, "a list, or a tensor of whole numbers, got 5"},
          {fn -> Mask.packed_at([0, 1], :a) end, :cu_seqlens_k, "a list, or a tensor"},
          {fn -> Mask.lengths(:a) end, :k_lengths, "a list, or a tensor of whole numbers, got :a"},
          {fn -> Mask.lengths(nil) end, :k_lengths, "a list, or a tensor"},
          {fn -> Mask.lengths([1], q_lengths: 1) end, :q_lengths, "a list, or a tensor"},
          {fn -> Mask.prefix("x") end, :lengths, ~s(a list, or a tensor of whole numbers, got "x")},
          {fn -> Mask.segments(:x) end, :q_ids, "a list, or a tensor"},
          {fn -> Mask.segments([[1]], k_ids: 1) end, :k_ids, "a list, or a tensor"},
          {fn -> Mask.segments([1, 1, 2, 2]) end, :q_ids, "a list of ids a batch, got [1, 1, 2, 2]"},
          {fn -> Mask.segments([[1]], k_ids: [1]) end, :k_ids, "a list of ids a batch, got [1]"},
          {fn -> Mask.from_bands(5) end, :bands, "a list, or a tensor of whole numbers, got 5"}
        ] do
      assert {:error, %Error{argument: ^argument} = error} = rescued(make)
      assert Exception.message(error) =~ words
    end
  end

  test "tensors of another type or with other axes are named when their numbers are asked for" do
    tensor = fn type, shape -> Tensor.new(:binary.copy(<<0::32>>, Tuple.product(shape)), type, shape) end

    for {mask, message} <- [
          {Mask.lengths(tensor.(:f32, {2})),
           "k_lengths: expected whole numbers, got a tensor of type {:f, 32}"},
          {Mask.lengths([1], q_lengths: tensor.(:s32, {1, 1})),
           "q_lengths: expected [batch], got a tensor of shape {1, 1}"},
          {Mask.packed_at(tensor.(:s32, {})),
           "cu_seqlens_k: expected [num_sequences + 1], got a tensor of shape {}"},
          {Mask.prefix(tensor.(:s32, {1, 1})), "lengths: expected [batch], got a tensor of shape {1, 1}"},
          {Mask.segments(tensor.(:s32, {3}), k_ids: [[1]]),
           "q_ids: expected [batch, seqlen_q], got a tensor of shape {3}"},
          {Mask.from_bands(tensor.(:s32, {6})),
           "bands: expected [num_bands, 6] or [batch or 1, num_bands, 6], got a tensor of shape {6}"},
          {Mask.from_bands(tensor.(:f32, {1, 6})),
           "bands: expected whole numbers, got a tensor of type {:f, 32}"}
        ] do
      assert {:error, error} = rescued(fn -> Mask.bands(mask, {3, 3}) end)
      assert Exception.message(error) == message
    end
  end

  test "a picture where it is small and known" do
    assert inspect(Mask.packed([1, 2])) == "#FlashAttention.Mask<packed, 3 x 3\n█··\n·██\n·██\n>"
    assert inspect(Mask.packed([100])) == "#FlashAttention.Mask<packed>"
    assert inspect(Mask.block_causal(2)) == "#FlashAttention.Mask<block_causal>"
  end

  defp rescued(fun) do
    {:ok, fun.()}
  rescue
    error in Error -> {:error, error}
  end
end
