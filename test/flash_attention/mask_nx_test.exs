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
            {Mask.packed([]), {5, 5}},
            {Mask.packed([]) |> Mask.intersect_window({1, 0}), {5, 5}},
            {Mask.from_bands([]), {5, 5}},
            {Mask.from_bands([[], []]), {5, 5}},
            {Mask.ranges([], []), {5, 5}},
            {Mask.segments([[1, 1], [1, 1]], k_ids: [[2, 2], [3, 3]]), {2, 2}},
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

    test "numbers of another type or with other axes, and what is no tensor, have the same error in both" do
      q = Nx.broadcast(Nx.tensor(0.0, type: :f32), {1, 4, 2, 4})

      for {make, message} <- [
            {fn -> Mask.lengths(Nx.tensor([2.9])) end,
             "k_lengths: expected whole numbers, got a tensor of type {:f, 32}"},
            {fn -> Mask.lengths(Nx.tensor([[2]])) end,
             "k_lengths: expected [batch], got a tensor of shape {1, 1}"},
            {fn -> Mask.prefix(Nx.tensor(2.0)) end,
             "lengths: expected whole numbers, got a tensor of type {:f, 32}"},
            {fn -> Mask.packed_at([0, 4], Nx.tensor([0.0, 4.0])) end,
             "cu_seqlens_k: expected whole numbers, got a tensor of type {:f, 32}"},
            {fn -> Mask.segments(Nx.tensor([1, 1, 2, 2]), k_ids: [[1, 1, 2, 2]], max_segments: 2) end,
             "q_ids: expected [batch, seqlen_q], got a tensor of shape {4}"},
            {fn -> Mask.from_bands(5) end, "bands: expected a list, or a tensor of whole numbers, got 5"},
            {fn -> Mask.segments([1, 1, 2, 2]) end, "q_ids: expected a list of ids a batch, got [1, 1, 2, 2]"},
            {fn -> Mask.lengths(:a) end, "k_lengths: expected a list, or a tensor of whole numbers, got :a"}
          ],
          call <- [
            fn -> FlashAttention.forward!(q, q, q, mask: make.(), causal: false, device: :cpu) end,
            fn -> FlashAttention.attention(q, q, q, mask: make.(), causal: false) end,
            fn -> Nx.Defn.jit(&FlashAttention.attention(&1, &1, &1, mask: make.(), causal: false)).(q) end
          ] do
        error = assert_raise FlashAttention.Error, call
        assert Exception.message(error) == message
      end

      # As an argument of a definition, too.
      assert_raise FlashAttention.Error, ~r/^k_lengths: expected whole numbers/, fn ->
        Nx.Defn.jit(&FlashAttention.attention(&1, &1, &1, mask: &2)).(q, Mask.lengths(Nx.tensor([2.9])))
      end

      assert_raise FlashAttention.Error, ~r/^k_lengths: expected one number at least, got none/, fn ->
        FlashAttention.attention(q, q, q, mask: Mask.lengths([]))
      end
    end

    defp attend(q, k, v, mask) do
      [
        FlashAttention.forward!(q, k, v, mask: mask, causal: false, device: :cpu),
        FlashAttention.attention(q, k, v, mask: mask, causal: false),
        Nx.Defn.jit(&FlashAttention.attention(&1, &2, &3, mask: &4, causal: false)).(q, k, v, mask)
      ]
    end

    test "no bands and no sequences show nothing" do
      [q, k, v, _dout] = inputs()

      for mask <- [Mask.from_bands([]), Mask.ranges([], []), Mask.block_causal([]), Mask.packed([])],
          o <- attend(q, k, v, mask),
          do: assert(Nx.to_number(Nx.sum(Nx.abs(o))) == 0.0, inspect(mask))
    end

    test "bands of another rank or type of whole numbers are the same bands" do
      [q, k, v, _dout] = inputs()
      bands = [[0, 3, 0, 4, 2, 1], [3, 7, 2, 7, 9, 9]]
      expected = plain(q, k, v, Mask.from_bands(Enum.map(bands, &List.to_tuple/1)))

      for type <- [:s32, :s64, :u8, :u32],
          numbers <- [bands, [bands], [bands, bands]],
          o <- attend(q, k, v, Mask.from_bands(Nx.tensor(numbers, type: type))),
          do: assert_close(o, expected)
    end

    defp random(seed, shape), do: Nx.Random.normal(Nx.Random.key(seed), shape: shape) |> elem(0)
    defp inputs, do: for(seed <- 1..4, do: random(seed, {2, 7, 2, 4}))

    # Plain attention over what the mask shows; rows that see nothing give 0.
    defp plain(q, k, v, mask, opts \\ []) do
      [q, k, v] = for x <- [q, k, v], do: Nx.transpose(x, axes: [0, 2, 1, 3])
      seen = Mask.to_tensor(mask, {7, 7}, opts)

      seen =
        seen.data
        |> Nx.from_binary(:u8)
        |> Nx.reshape(seen.shape)
        |> Nx.new_axis(1)
        |> Nx.broadcast({2, 2, 7, 7})

      scores = Nx.select(seen, Nx.divide(Nx.dot(q, [3], [0, 1], k, [3], [0, 1]), 2), -1.0e30)

      weights =
        scores
        |> Nx.subtract(Nx.reduce_max(scores, axes: [3], keep_axes: true))
        |> Nx.exp()
        |> Nx.multiply(seen)

      weights = Nx.divide(weights, Nx.max(Nx.sum(weights, axes: [3], keep_axes: true), 1.0e-30))
      Nx.dot(weights, [3], [0, 1], v, [2], [0, 1]) |> Nx.transpose(axes: [0, 2, 1, 3])
    end

    defp assert_close(x, y), do: assert(Nx.to_number(Nx.reduce_max(Nx.abs(Nx.subtract(x, y)))) < 1.0e-5)

    test "one compiled program takes masks of other contents, forward and backward" do
      [q, k, v, dout] = inputs()
      loss = fn attend -> fn {q, k, v} -> Nx.sum(Nx.multiply(attend.(q, k, v), dout)) end end

      ours = fn inputs, mask ->
        Nx.Defn.grad(inputs, loss.(&FlashAttention.attention(&1, &2, &3, mask: mask, causal: false)))
      end

      template = Mask.lengths(Nx.template({2}, :s32), q_lengths: Nx.template({2}, :s32))
      x = Nx.template({2, 7, 2, 4}, :f32)
      compiled = Nx.Defn.compile(ours, [{x, x, x}, template])

      for lengths <- [[3, 7], [1, 0], [5, 2]] do
        mask = Mask.lengths(lengths, q_lengths: lengths)
        gradients = compiled.({q, k, v}, mask)
        expected = Nx.Defn.grad({q, k, v}, loss.(&plain(&1, &2, &3, mask)))
        for {x, y} <- Enum.zip(Tuple.to_list(gradients), Tuple.to_list(expected)), do: assert_close(x, y)
      end
    end

    test "masks of lists hold inside of defn, and eagerly on Nx tensors" do
      [q, k, v, _dout] = inputs()

      for mask <- [
            Mask.packed([3, 4]),
            Mask.prefix([2, 5]),
            Mask.block_causal(3),
            Mask.segments([[1, 1, 2, 2, 2, 9, 9]] |> List.duplicate(2) |> Enum.concat())
          ],
          causal <- [true, false] do
        expected = plain(q, k, v, mask, causal: causal)

        assert_close(
          Nx.Defn.jit(&FlashAttention.attention(&1, &2, &3, mask: mask, causal: causal)).(q, k, v),
          expected
        )

        assert_close(FlashAttention.forward!(q, k, v, mask: mask, causal: causal, device: :cpu), expected)
      end
    end
  end
end
