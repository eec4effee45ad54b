defmodule FlashAttention.MaskAttentionTest do
  # Attention under masks, beside what each of its parts gives alone.
  use ExUnit.Case, async: true

  alias FlashAttention.{Error, Mask, Tensor}

  @heads 2
  @dim 5

  defp tensor(seed, seqlen) do
    state = :rand.seed_s(:exsss, seed)

    {numbers, _state} =
      Enum.map_reduce(1..(seqlen * @heads * @dim), state, fn _, state -> :rand.normal_s(state) end)

    Tensor.new(for(x <- numbers, into: <<>>, do: <<x::float-64-native>>), :f64, {1, seqlen, @heads, @dim})
  end

  # Some rows of a tensor [1, seqlen, heads, dim].
  defp rows(%Tensor{data: data}, first, count) do
    row = @heads * @dim * 8
    Tensor.new(binary_part(data, first * row, count * row), :f64, {1, count, @heads, @dim})
  end

  defp numbers(%Tensor{data: data}), do: for(<<x::float-64-native <- data>>, do: x)

  defp close?(x, y),
    do: Enum.zip_with(numbers(x), y |> Enum.flat_map(&numbers/1), &abs(&1 - &2)) |> Enum.all?(&(&1 < 1.0e-12))

  defp inputs(seqlen), do: for(seed <- 1..4, do: tensor(seed, seqlen))

  test "packed sequences give what each gives alone, forward and backward" do
    [q, k, v, dout] = inputs(9)
    opts = [device: :cpu, mask: Mask.packed([4, 5])]
    {:ok, o, lse} = FlashAttention.forward_with_states(q, k, v, opts)
    {:ok, dq, dk, dv} = FlashAttention.backward(dout, q, k, v, o, lse, opts)

    alone =
      for {first, count} <- [{0, 4}, {4, 5}] do
        [q, k, v, dout] = for x <- [q, k, v, dout], do: rows(x, first, count)
        {:ok, o, lse} = FlashAttention.forward_with_states(q, k, v, device: :cpu)
        {:ok, dq, dk, dv} = FlashAttention.backward(dout, q, k, v, o, lse, device: :cpu)
        [o, dq, dk, dv]
      end

    for {whole, parts} <- Enum.zip([o, dq, dk, dv], Enum.zip_with(alone, & &1)),
        do: assert(close?(whole, parts))
  end

  test "causal and windows hold within a mask; a mask that is one band changes nothing" do
    [q, k, v, _dout] = inputs(7)
    {:ok, plain} = FlashAttention.forward(q, k, v, device: :cpu, window: {3, 1})
    whole = Mask.from_bands([{0, 7, 0, 7, :infinity, :infinity}])
    {:ok, ^plain} = FlashAttention.forward(q, k, v, device: :cpu, window: {3, 1}, mask: whole)
    narrow = Mask.intersect_window(whole, {3, 1})
    {:ok, ^plain} = FlashAttention.forward(q, k, v, device: :cpu, mask: narrow)
  end

  test "states remember their mask" do
    [q, k, v, dout] = inputs(6)
    opts = [device: :cpu, mask: Mask.packed([2, 4])]
    {:ok, o, lse} = FlashAttention.forward_with_states(q, k, v, opts)
    expected = FlashAttention.backward(dout, q, k, v, o, lse, opts)
    {:ok, ^o, states} = FlashAttention.forward_with_states(q, k, v, [keep: :device] ++ opts)
    assert FlashAttention.backward(dout, states) == expected
  end

  test "what does not fit names the band" do
    [q, k, v, _dout] = inputs(5)

    for {mask, message} <- [
          {Mask.packed([3, 3]), "bands: expected q_end from 0 to seqlen_q 5 in band 1, got 6"},
          {Mask.from_bands([{0, 5, 0, 5, 0, 0}, {1, 2, 0, 2, 0, 0}]),
           "bands: expected bands that share no cell, got band 0 and band 1"},
          {Mask.lengths([1, 2]), "bands: expected bands_batch 1 as in q, or 1, got 2"},
          {:packed, "mask: expected a FlashAttention.Mask, got :packed"}
        ] do
      assert {:error, %Error{} = error} = FlashAttention.forward(q, k, v, device: :cpu, mask: mask)
      assert Exception.message(error) == message
    end
  end

  test "masks that no function here made come back as errors" do
    [q, k, v, _dout] = inputs(3)

    for numbers <- [5, nil, %{}, %{q: [0, 3]}, %{q: 5, k: [0, 3]}, %{bands: []}, %{bands: [[{1, 2}]]}],
        kind <- [:packed, :lengths, :prefix, :bands, :segments, :none] do
      mask = struct!(Mask, kind: kind, numbers: numbers)

      assert {:error, %Error{}} = FlashAttention.forward(q, k, v, device: :cpu, mask: mask),
             inspect({kind, numbers})
    end

    assert {:error, %Error{argument: :bands}} =
             FlashAttention.forward(q, k, v, device: :cpu, mask: Mask.lengths([]))
  end

  test "nothing to see is 0" do
    [q, k, v, _dout] = inputs(3)
    {:ok, o, lse} = FlashAttention.forward_with_states(q, k, v, device: :cpu, mask: Mask.packed([]))
    assert Enum.all?(numbers(o), &(&1 == 0.0))
    assert lse.data == :binary.copy(<<0, 0, 0, 0, 0, 0, 0xF0, 0xFF>>, 6)
  end
end
