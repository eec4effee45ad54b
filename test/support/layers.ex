defmodule FlashAttention.Test.Layers do
  @moduledoc """
  What the rewriter is asked to rewrite when it is asked how long that takes: a norm, attention of two heads under a causal
  mask and two products a layer. All tensors are small, as nothing is computed.
  """

  @compile {:no_warn_undefined, [Nx, Nx.Defn]}

  @doc "Templates of the arguments of `step/2` and of `without_attention/2`."
  def arguments(num_layers), do: [Nx.template({2, 16, 8}, :f32), Nx.template({num_layers, 6, 8, 8}, :f32)]

  @doc "A loss and its gradients by all weights."
  def step(x, w), do: Nx.Defn.value_and_grad(w, &loss(x, &1, fn x, w -> layer(x, w) end))

  @doc "The same without attention."
  def without_attention(x, w), do: Nx.Defn.value_and_grad(w, &loss(x, &1, fn x, w -> products(x, w) end))

  defp loss(x, w, layer) do
    {num_layers, _, _, _} = Nx.shape(w)
    0..(num_layers - 1) |> Enum.reduce(x, &layer.(&2, w[&1])) |> Nx.sin() |> Nx.sum()
  end

  defp layer(x, w) do
    y = Nx.subtract(x, Nx.mean(x, axes: [-1], keep_axes: true))
    y = Nx.multiply(y, Nx.rsqrt(Nx.add(Nx.mean(Nx.multiply(y, y), axes: [-1], keep_axes: true), 1.0e-5)))

    [q, k, v] =
      for n <- 0..2, do: y |> Nx.dot(w[n]) |> Nx.reshape({2, 16, 2, 4}) |> Nx.transpose(axes: [0, 2, 1, 3])

    o = q |> attention(k, v) |> Nx.transpose(axes: [0, 2, 1, 3]) |> Nx.reshape({2, 16, 8})
    products(Nx.add(x, Nx.dot(o, w[3])), w)
  end

  defp products(x, w), do: Nx.add(x, x |> Nx.dot(w[4]) |> Nx.tanh() |> Nx.dot(w[5]))

  defp attention(q, k, v) do
    s = Nx.divide(Nx.dot(q, [3], [0, 1], k, [3], [0, 1]), 2)
    s = Nx.select(Nx.broadcast(Nx.greater_equal(Nx.iota({16, 1}), Nx.iota({1, 16})), s), s, -1.0e9)
    e = Nx.exp(Nx.subtract(s, Nx.reduce_max(s, axes: [3], keep_axes: true)))
    Nx.dot(Nx.divide(e, Nx.sum(e, axes: [3], keep_axes: true)), [3], [0, 1], v, [2], [0, 1])
  end
end
