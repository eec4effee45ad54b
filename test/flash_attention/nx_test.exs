defmodule FlashAttention.NxTest do
  use ExUnit.Case, async: true

  import FlashAttention.Test.Tensors, only: [random: 3]

  @moduletag :nx
  @compile {:no_warn_undefined, [Nx, Nx.Defn]}

  defp nx(tensor, names \\ nil) do
    names = names || List.duplicate(nil, tuple_size(tensor.shape))
    tensor.data |> Nx.from_binary(tensor.type) |> Nx.reshape(tensor.shape, names: names)
  end

  defp problem(type, opts \\ []) do
    {q, k, v} = {random(1, type, {2, 7, 4, 5}), random(2, type, {2, 9, 2, 5}), random(3, type, {2, 9, 2, 5})}
    {o, lse} = FlashAttention.forward_with_states!(q, k, v, opts)
    %{q: q, k: k, v: v, o: o, lse: lse}
  end

  test "Nx in, Nx out, with the same numbers as without Nx" do
    for type <- [:f32, :f64, :bf16, :f16] do
      sink = random(4, :f32, {3, 4})
      %{q: q, k: k, v: v, o: o, lse: lse} = problem(type, sink: sink)
      assert {:ok, nx_o, nx_lse} = FlashAttention.forward_with_states(nx(q), nx(k), nx(v), sink: nx(sink))
      assert {nx_o, nx_lse} == {nx(o), nx(lse)}
      assert FlashAttention.forward!(nx(q), nx(k), nx(v), sink: nx(sink)) == nx(o)

      {dq, dk, dv, %{sink: dsink}} = FlashAttention.backward!(q, q, k, v, o, lse, sink: sink)

      assert FlashAttention.backward!(nx(q), nx(q), nx(k), nx(v), nx_o, nx_lse, sink: nx(sink)) ==
               {nx(dq), nx(dk), nx(dv), %{sink: nx(dsink)}}
    end
  end

  test "what q is decides what comes out" do
    %{q: q, k: k, v: v, o: o} = problem(:f32)
    assert FlashAttention.forward!(nx(q), k, nx(v)) == nx(o)
    assert FlashAttention.forward!(q, nx(k), nx(v)) == o
  end

  test "axes keep their names" do
    %{q: q, k: k, v: v} = problem(:f32)
    named_q = nx(q, [:batch, :row, :head, :dim])
    named_k = nx(k, [:batch, :column, :group, nil])
    {o, lse} = FlashAttention.forward_with_states!(named_q, named_k, nx(v))
    assert Nx.names(o) == [:batch, :row, :head, :dim]
    assert Nx.names(lse) == [:batch, :head, :row]
    {dq, dk, dv} = FlashAttention.backward!(o, named_q, named_k, nx(v), o, lse)
    assert Enum.map([dq, dk, dv], &Nx.names/1) == [Nx.names(o), Nx.names(named_k), [nil, nil, nil, nil]]
  end

  test "attention written in Nx gives the same" do
    %{q: q, k: k, v: v} = problem(:f64)
    # [batch, seqlen, heads, dim] to [batch, heads, seqlen, dim]; two query heads share a key head.
    rows = fn t -> t |> nx() |> Nx.transpose(axes: [0, 2, 1, 3]) end

    repeated = fn t ->
      t |> rows.() |> Nx.new_axis(2) |> Nx.tile([1, 1, 2, 1, 1]) |> Nx.reshape({2, 4, 9, 5})
    end

    scores =
      rows.(q) |> Nx.dot([3], [0, 1], repeated.(k), [3], [0, 1]) |> Nx.divide(Nx.sqrt(Nx.tensor(5, type: :f64)))

    visible = Nx.greater_equal(Nx.add(Nx.iota({7, 1}), 2), Nx.iota({1, 9}))
    masked = Nx.select(Nx.broadcast(visible, {2, 4, 7, 9}), scores, -1.0e30)
    exp = Nx.exp(Nx.subtract(masked, Nx.reduce_max(masked, axes: [3], keep_axes: true)))
    p = Nx.divide(exp, Nx.sum(exp, axes: [3], keep_axes: true))
    expected = p |> Nx.dot([3], [0, 1], repeated.(v), [2], [0, 1]) |> Nx.transpose(axes: [0, 2, 1, 3])

    difference =
      FlashAttention.forward!(nx(q), nx(k), nx(v)) |> Nx.subtract(expected) |> Nx.abs() |> Nx.reduce_max()

    assert Nx.to_number(difference) < 1.0e-14
  end

  test "types that there is no kernel for, vectorized axes and expressions are errors" do
    %{q: q, k: k, v: v} = problem(:f32)
    message = fn {:error, error} -> Exception.message(error) end

    assert message.(FlashAttention.forward(Nx.as_type(nx(q), :s32), nx(k), nx(v))) ==
             "q: expected type f32, f64, bf16 or f16, got s32"

    vectorized = nx(k) |> Nx.reshape({2, 9, 2, 5}) |> Nx.vectorize(:x)

    assert message.(FlashAttention.forward(nx(q), vectorized, nx(v))) ==
             "k: expected a tensor without vectorized axes (see Nx.devectorize/2), got vectorized axes [x: 2]"

    traced = Nx.Defn.debug_expr(fn t -> send(self(), message.(FlashAttention.forward(t, t, t))) && t end)
    traced.(nx(q))

    assert_received "q: expected a tensor with values (inside defn, see attention/4), got a Nx.Defn.Expr, which has none yet"

    assert message.(FlashAttention.forward(nx(q), nx(k), Nx.template({2, 9, 2, 5}, :f32))) =~
             "v: expected a tensor with values"
  end

  test "states from Nx give what tensors give" do
    %{q: q, k: k, v: v, o: o, lse: lse} = problem(:f32)
    names = [:batch, :rows, :heads, nil]

    {nx_o, states} =
      FlashAttention.forward_with_states!(nx(q, names), nx(k), nx(v), keep: :device, device: :cpu)

    assert nx_o == nx(o, names)
    {dq, dk, dv} = FlashAttention.backward!(q, q, k, v, o, lse)
    assert FlashAttention.backward!(nx(q), states) == {nx(dq, names), nx(dk), nx(dv)}
    assert FlashAttention.backward!(q, states) == {dq, dk, dv}, "results are like dout"
  end

  defmodule OnGPU do
    @moduledoc "What a tensor of EXLA's on a GPU looks like from outside, with three numbers at address 4096."
    defstruct buffer: %{client_name: :cuda, device_id: 1}
    def to_pointer(_tensor, mode: :local), do: %{address: 4096, data_size: 12}

    def to_binary(_tensor, _count) do
      send(self(), :copied)
      "in the host's memory"
    end
  end

  @tag :defn
  test "a tensor of EXLA is passed by its address to the GPU that it lies on, and by its values to others" do
    tensor = %{Nx.template({3}, :f32, names: [:x]) | data: %OnGPU{}}
    to_native = &FlashAttention.TensorLike.to_native(tensor, &1)
    assert to_native.({:cuda, 1}) == {:ok, {{4096, 12, tensor}, {:f, 32}, {3}}, [:x]}
    values = {:ok, {"in the host's memory", {:f, 32}, {3}}, [:x]}
    assert to_native.({:cuda, 0}) == values
    assert_received :copied
    assert to_native.({:cpu, 0}) == values
    assert_received :copied

    # There is no such GPU, or a vector is no q; to say so takes no values.
    assert {:error, _} = FlashAttention.plan(tensor, tensor, tensor, device: {:cuda, 1})
    refute_received :copied
  end
end
