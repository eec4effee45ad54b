# How long FlashAttention.Rewriter takes for training graphs of models of more and more layers, and for one without attention.
# Prints a page of Markdown. Needs Nx.
#
#     mix run bench/rewriter_cost.exs

defmodule Layers do
  @moduledoc false
  # A norm, attention of two heads under a causal mask, and two products; all the sizes of tensors are small, as nothing is computed.

  def step(x, w) do
    {num_layers, _, _, _} = Nx.shape(w)

    Nx.Defn.value_and_grad(w, fn w ->
      0..(num_layers - 1) |> Enum.reduce(x, &layer(&2, w[&1])) |> Nx.sin() |> Nx.sum()
    end)
  end

  def without_attention(x, w) do
    {num_layers, _, _, _} = Nx.shape(w)
    Nx.Defn.grad(w, fn w -> 0..(num_layers - 1) |> Enum.reduce(x, &products(&2, w[&1])) |> Nx.sum() end)
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

  def arguments(num_layers), do: [Nx.template({2, 16, 8}, :f32), Nx.template({num_layers, 6, 8, 8}, :f32)]
end

row = fn name, function, num_layers ->
  arguments = Layers.arguments(num_layers)
  expression = function |> Nx.Defn.debug_expr() |> apply(arguments)
  found = Enum.count(FlashAttention.Rewriter.explain(function, arguments), & &1.rewritten)
  times = for _ <- 1..5, do: elem(:timer.tc(fn -> FlashAttention.Rewriter.rewrite(expression) end), 0)
  IO.puts("| #{name}, #{num_layers} layers | #{found} | #{Float.round(Enum.min(times) / 1.0e6, 3)} |")
end

IO.puts("# What rewriting costs\n")

versions = "nx #{Application.spec(:nx, :vsn)}, Elixir #{System.version()}"

IO.puts(
  "`make bench-rewriter-cost`: #{versions}. Seconds of FlashAttention.Rewriter.rewrite/1, the least of five.\n"
)

IO.puts("| step | attentions rewritten, with their gradients | s |\n|---|---|---|")
for num_layers <- [4, 8, 16, 32, 64], do: row.("training", &Layers.step/2, num_layers)
row.("training without attention", &Layers.without_attention/2, 32)
