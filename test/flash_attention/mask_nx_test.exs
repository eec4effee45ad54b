if Code.ensure_loaded?(Nx) do
  defmodule FlashAttention.MaskNxTest do
    use ExUnit.Case, async: true

    alias FlashAttention.Mask

    @moduletag :defn

    # The bands that a definition makes of tensors whose numbers it does not know.
    defp inside(mask, size), do: Nx.Defn.jit(&Mask.Nx.bands(&1, size)).(mask) |> Nx.to_flat_list()
    defp outside(mask, size), do: mask |> Mask.bands(size) |> Mask.Bands.to_tensor() |> then(&numbers/1)

    defp numbers(%{data: data}), do: for(<<x::signed-32-native <- data>>, do: x)

    test "every kind gives the same bands inside of defn as outside" do
      for {mask, size} <- [
            {Mask.packed([3, 0, 2], [2, 1, 4]), {5, 7}},
            {Mask.packed([3, 2]) |> Mask.intersect_window({1, 0}), {5, 5}},
            {Mask.lengths([2, 4]), {3, 4}},
            {Mask.lengths([2, 4], q_lengths: [1, 3], side: :left), {3, 4}},
            {Mask.prefix([0, 2, 9]), {2, 5}},
            {Mask.block_causal(2), {5, 7}},
            {Mask.block_causal([2, 2, 1]), {5, 5}},
            {Mask.ranges([{0, 3}, {3, 4}], [{0, 4}, {1, 2}], [:bi_causal, :full]), {4, 4}},
            {Mask.from_bands([{0, 2, 0, 3, -1, 0}]) |> Mask.intersect_window({:infinity, 3}), {4, 4}}
          ] do
        assert inside(mask, size) == outside(mask, size), inspect(mask)
      end
    end

    test "segments whose ids are tensors, with room for more of them" do
      q = [[5, 5, 1, 2], [3, 3, 3, 3]]
      k = [[1, 5, 5], [4, 3, 3]]

      tensors = Mask.segments(Nx.tensor(q), k_ids: Nx.tensor(k), max_segments: 4)
      bands = Nx.Defn.jit(&Mask.Nx.bands(&1, {4, 3})).(tensors)
      assert Nx.shape(bands) == {2, 4, 6}
      seen = Mask.to_tensor(Mask.from_bands(bands), {4, 3})
      assert seen == Mask.to_tensor(Mask.segments(q, k_ids: k), {4, 3})
    end

    test "contents change, the program does not" do
      bands = Nx.Defn.compile(&Mask.Nx.bands(&1, {5, 5}), [Mask.packed_at(Nx.template({3}, :s32))])

      for lengths <- [[3, 2], [1, 4]],
          mask = Mask.packed(lengths),
          do: assert(bands.(mask) |> Nx.to_flat_list() == outside(mask, {5, 5}))
    end

    test "ids in a tensor without a most number of them are an error" do
      assert_raise FlashAttention.Error, ~r/max_segments/, fn ->
        Mask.Nx.bands(Mask.segments(Nx.tensor([[1]])), {1, 1})
      end
    end
  end
end
