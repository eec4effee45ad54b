defmodule FlashAttention.DropoutTest do
  # What FlashAttention.Dropout says is dropped, beside what is; attention under dropout is held against its definition in
  # flash_attention_test.exs.
  use ExUnit.Case, async: true

  alias FlashAttention.{Dropout, Error, Tensor}

  doctest Dropout

  # Scores that are all 0, and the identity as values: o is the mask, over the number of columns and the share that stays.
  defp dropped(seed, rate, {batch, num_heads, seqlen_q, seqlen_k}, opts) do
    zeros = fn shape -> Tensor.new(:binary.copy(<<0>>, 4 * Tuple.product(shape)), :f32, shape) end

    identity =
      for _b <- 1..batch, j <- 1..seqlen_k, _h <- 1..num_heads, x <- 1..seqlen_k, into: <<>> do
        <<if(x == j, do: 1.0, else: 0.0)::float-32-native>>
      end

    shape = {batch, seqlen_k, num_heads, seqlen_k}

    o =
      FlashAttention.forward!(
        zeros.({batch, seqlen_q, num_heads, seqlen_k}),
        zeros.(shape),
        Tensor.new(identity, :f32, shape),
        [causal: false, dropout: rate, dropout_seed: seed] ++ opts
      )

    # [batch, row, head, column] of o, in the mask's order.
    numbers = for <<x::float-32-native <- o.data>>, do: x
    rows = numbers |> Enum.chunk_every(seqlen_k) |> Enum.chunk_every(num_heads) |> Enum.chunk_every(seqlen_q)
    for batch <- rows, head <- Enum.zip_with(batch, & &1), row <- head, x <- row, do: x
  end

  defp seed(x, y), do: Tensor.new(<<x::32-native, y::32-native>>, {:u, 32}, {2})

  @shapes [{1, 1, 1, 1}, {2, 3, 37, 29}, {1, 2, 5, 130}, {3, 1, 70, 17}]

  for device <- [:cpu, :reference], shape <- @shapes, rate <- [0.1, 0.5, 1 - 1 / 65_536] do
    test "#{device} #{inspect(shape)}, #{rate}: the mask is what is dropped" do
      {shape, rate} = unquote(Macro.escape({shape, rate}))
      seed = seed(0xDEADBEEF, 3)
      mask = Dropout.mask(seed, rate, shape)
      share = 1 / ((1 - Dropout.rounded(rate)) * elem(shape, 3))
      kept = dropped(seed, rate, shape, device: unquote(device))

      for {x, <<bit>>} <- Enum.zip(kept, for(<<bit <- mask.data>>, do: <<bit>>)),
          do: assert_in_delta(x, bit * share, 1.0e-5 * share)
    end
  end

  test "seeds, batches, heads, rows and columns have bits of their own, at the rate" do
    shape = {2, 2, 64, 64}
    count = Tuple.product(shape)
    masks = for seed <- [{0, 0}, {1, 0}, {0, 1}], do: Dropout.mask(seed, 0.25, shape).data
    halves = for mask <- masks, do: for(<<head::binary-4096 <- mask>>, do: head)
    heads = List.flatten(halves)
    assert length(Enum.uniq(heads)) == 12

    # Six standard deviations.
    for mask <- masks do
      kept = for(<<bit <- mask>>, do: bit) |> Enum.sum()
      assert abs(kept - 0.75 * count) < 6 * :math.sqrt(count * 0.25 * 0.75)
    end

    for {x, n} <- Enum.with_index(heads), {y, m} <- Enum.with_index(heads), n < m do
      both = Enum.zip_with(:binary.bin_to_list(x), :binary.bin_to_list(y), &(&1 * &2)) |> Enum.sum()
      assert abs(both - 0.5625 * 4096) < 6 * :math.sqrt(4096 * 0.5625 * 0.4375)
    end
  end

  test "a rate is rounded to a multiple of 2^-16, and 0 drops nothing" do
    assert Dropout.mask({5, 6}, 0, {1, 1, 40, 40}).data == :binary.copy(<<1>>, 1600)
    assert Dropout.mask({5, 6}, 0.4999999, {1, 1, 40, 40}) == Dropout.mask({5, 6}, 0.5, {1, 1, 40, 40})
    assert Dropout.mask(seed(5, 6), 0.5, {1, 1, 8, 8}) == Dropout.mask({5, 6}, 0.5, {1, 1, 8, 8})
  end

  test "states remember the seed" do
    q = FlashAttention.Test.Tensors.random(1, :f64, {1, 9, 2, 3})
    opts = [dropout: 0.4, dropout_seed: seed(1, 2), device: :cpu]
    {:ok, o, lse} = FlashAttention.forward_with_states(q, q, q, opts)
    expected = FlashAttention.backward(q, q, q, q, o, lse, opts)
    {:ok, ^o, states} = FlashAttention.forward_with_states(q, q, q, [keep: :device] ++ opts)
    assert FlashAttention.backward(q, states) == expected
    {:ok, other} = FlashAttention.forward(q, q, q, Keyword.put(opts, :dropout_seed, seed(1, 3)))
    assert o != other
  end

  test "what is wrong is said" do
    q = FlashAttention.Test.Tensors.random(1, :f32, {1, 3, 1, 2})

    for {opts, message} <- [
          {[dropout: 0.1], "dropout_seed: expected a tensor of shape [2], as there is dropout, got none"},
          {[dropout: 1, dropout_seed: seed(1, 2)], "dropout: expected a number from 0 to 1 - 2⁻¹⁶, got 1"},
          {[dropout: 0.1, dropout_seed: 5],
           "dropout_seed: expected a tensor (Nx.Tensor or FlashAttention.Tensor), got 5"}
        ] do
      assert {:error, %Error{} = error} = FlashAttention.forward(q, q, q, opts)
      assert Exception.message(error) == message
    end

    for {seed, rate} <- [{5, 0.1}, {q, 0.1}, {{1, 2}, 1}, {{1, 2}, -0.1}, {{1, 2}, :half}],
        do: assert_raise(Error, fn -> Dropout.mask(seed, rate, {1, 1, 1, 1}) end)

    for shape <- [{1, 1}, {1, 1, -1, 2}, {1, 1, 2, 2.0}, [1, 1, 1, 1], :shape] do
      error = assert_raise Error, fn -> Dropout.mask({1, 2}, 0.5, shape) end
      expected = "{batch, num_heads, seqlen_q, seqlen_k}, whole numbers of at least 0"
      assert Exception.message(error) == "shape: expected #{expected}, got #{inspect(shape)}"
    end
  end
end
