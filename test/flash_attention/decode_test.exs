defmodule FlashAttention.DecodeTest do
  # Caches whose keys end before their tensor does, or lie on pages: the same as tensors of the keys that there are.
  use ExUnit.Case, async: true

  alias FlashAttention.Tensor

  @heads {4, 2}
  @head_dim 3

  defp numbers(count, seed), do: for(i <- 1..count//1, do: :math.sin(i * 0.7 + seed))

  defp f32(numbers, shape),
    do: Tensor.new(for(x <- numbers, into: <<>>, do: <<x::float-32-native>>), :f32, shape)

  defp s32(numbers, shape),
    do: Tensor.new(for(x <- numbers, into: <<>>, do: <<x::32-signed-native>>), :s32, shape)

  defp floats(tensor), do: for(<<x::float-32-native <- tensor.data>>, do: x)

  defp query(batch, rows) do
    {heads, _} = @heads
    f32(numbers(batch * rows * heads * @head_dim, 1), {batch, rows, heads, @head_dim})
  end

  defp keys(count, seed) do
    {_, kv_heads} = @heads
    Enum.chunk_every(numbers(count * kv_heads * @head_dim, seed), kv_heads * @head_dim)
  end

  defp tensor_of(rows, batch) do
    {_, kv_heads} = @heads
    f32(List.flatten(rows), {batch, div(length(rows), batch), kv_heads, @head_dim})
  end

  defp close(x, y), do: Enum.zip_with(floats(x), floats(y), &(abs(&1 - &2) < 1.0e-5)) |> Enum.all?()

  test "keys end at key_lengths, causal masks with them, forward and backward" do
    {k, v} = {keys(9, 2), keys(9, 5)}
    q = query(1, 2)

    for length <- 1..9 do
      opts = [key_lengths: s32([length], {1})]
      {:ok, o, lse} = FlashAttention.forward_with_states(q, tensor_of(k, 1), tensor_of(v, 1), opts)
      [k_there, v_there] = for rows <- [k, v], do: rows |> Enum.take(length) |> tensor_of(1)
      {:ok, expected, expected_lse} = FlashAttention.forward_with_states(q, k_there, v_there)
      assert close(o, expected) and close(lse, expected_lse)

      {:ok, dq, dk, dv} = FlashAttention.backward(q, q, tensor_of(k, 1), tensor_of(v, 1), o, lse, opts)

      {:ok, dq_there, dk_there, dv_there} =
        FlashAttention.backward(q, q, k_there, v_there, expected, expected_lse)

      assert close(dq, dq_there)

      for {gradient, there} <- [{dk, dk_there}, {dv, dv_there}] do
        {seen, hidden} = gradient |> floats() |> Enum.split(length(floats(there)))
        assert Enum.zip_with(seen, floats(there), &(abs(&1 - &2) < 1.0e-5)) |> Enum.all?()
        assert Enum.all?(hidden, &(&1 == 0))
      end
    end
  end

  test "keys on pages" do
    {k, v} = {keys(5 * 4, 2), keys(5 * 4, 5)}
    table = [[3, 0, 4], [1, 3, 2]]
    pages = fn rows -> rows |> Enum.chunk_every(4) |> Enum.map(&List.flatten/1) end
    paged = fn rows -> f32(List.flatten(rows), {5, 4, elem(@heads, 1), @head_dim}) end
    in_order = fn rows -> for batch <- table, page <- batch, do: Enum.at(pages.(rows), page) end
    contiguous = fn rows -> f32(List.flatten(in_order.(rows)), {2, 12, elem(@heads, 1), @head_dim}) end
    q = query(2, 3)
    lengths = s32([12, 7], {2})

    {:ok, o} =
      FlashAttention.forward(q, paged.(k), paged.(v),
        page_table: s32(List.flatten(table), {2, 3}),
        key_lengths: lengths
      )

    {:ok, expected} = FlashAttention.forward(q, contiguous.(k), contiguous.(v), key_lengths: lengths)
    assert o == expected

    mask = FlashAttention.Mask.lengths([12, 7])
    table = s32(List.flatten(table), {2, 3})
    {:ok, masked} = FlashAttention.forward(q, paged.(k), paged.(v), page_table: table, mask: mask)
    assert Enum.zip_with(floats(masked), floats(o), &(abs(&1 - &2) < 1.0e-6)) |> Enum.all?()

    assert {:error, error} =
             FlashAttention.forward(q, contiguous.(k), contiguous.(v), key_lengths: lengths, mask: mask)

    assert Exception.message(error) ==
             "key_lengths: expected none beside bands, whose k_end says the same, got both"
  end

  test "what is wrong is said" do
    {q, k} = {query(1, 1), tensor_of(keys(4, 2), 1)}
    message = fn opts -> q |> FlashAttention.forward(k, k, opts) |> elem(1) |> Exception.message() end
    assert message.(key_lengths: s32([5], {1})) == "key_lengths: expected 0 to seqlen_k 4 in batch 0, got 5"
    assert message.(key_lengths: f32([1.0], {1})) =~ ~r/^key_lengths: expected type s32/
    assert message.(page_table: s32([0, 0], {2, 1})) == "page_table: expected batch 1 as in q, got 2"

    table = [page_table: s32([0], {1, 1}), device: :cpu]
    {:ok, o, lse} = FlashAttention.forward_with_states(q, k, k, table)
    assert {:error, error} = FlashAttention.backward(o, q, k, k, o, lse, table)
    assert Exception.message(error) == "page_table: expected none in the backward, got a tensor"
    assert {:ok, %{device: :cpu, forward: "cpu/" <> _, backward: nil}} = FlashAttention.plan(q, k, k, table)
  end

  if Code.ensure_loaded?(Nx) do
    describe "in defn" do
      @describetag :defn

      defp nx(%{data: data, shape: shape}, type \\ :f32), do: data |> Nx.from_binary(type) |> Nx.reshape(shape)

      test "one program serves all lengths, with gradients" do
        [q, k, v] =
          for tensor <- [query(1, 2), tensor_of(keys(9, 2), 1), tensor_of(keys(9, 5), 1)], do: nx(tensor)

        loss = fn {q, k, v}, opts -> q |> FlashAttention.attention(k, v, opts) |> Nx.multiply(q) |> Nx.sum() end

        step =
          Nx.Defn.jit(fn tensors, lengths ->
            Nx.Defn.value_and_grad(tensors, &loss.(&1, key_lengths: lengths))
          end)

        for length <- [1, 4, 9] do
          {value, {dq, dk, dv}} = step.({q, k, v}, Nx.tensor([length], type: :s32))
          there = &Nx.slice_along_axis(&1, 0, length, axis: 1)

          {expected, {dq_there, dk_there, dv_there}} =
            Nx.Defn.jit_apply(&Nx.Defn.value_and_grad(&1, fn x -> loss.(x, []) end), [{q, there.(k), there.(v)}])

          for {x, y} <- [{value, expected}, {dq, dq_there}, {there.(dk), dk_there}, {there.(dv), dv_there}],
              do: assert(Nx.to_number(Nx.all_close(x, y, atol: 1.0e-5)) == 1)
        end
      end

      test "keys on pages" do
        {q, k} = {nx(query(1, 1)), nx(f32(List.flatten(keys(8, 2)), {4, 2, 2, 3}))}
        table = Nx.tensor([[2, 0, 3]], type: :s32)
        attention = fn q, k, table -> FlashAttention.attention(q, k, k, page_table: table) end
        in_order = k |> Nx.take(Nx.squeeze(table)) |> Nx.reshape({1, 6, 2, 3})

        assert Nx.Defn.jit_apply(attention, [q, k, table]) |> Nx.to_binary() ==
                 Nx.Defn.jit_apply(&FlashAttention.attention/3, [q, in_order, in_order]) |> Nx.to_binary()

        mask = FlashAttention.Mask.lengths([5])
        there = in_order[[.., 0..4]]

        assert FlashAttention.attention(q, k, k, page_table: table, mask: mask) |> Nx.to_binary() ==
                 FlashAttention.attention(q, there, there) |> Nx.to_binary()
      end
    end
  end
end
