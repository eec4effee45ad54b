# Writes a training step that knows nothing of this library, and what FlashAttention.Rewriter makes of it, as the StableHLO that
# EXLA emits for the two: plain.mlir and rewritten.mlir in the folder, for bench/rewriter.py, which needs neither Nx nor EXLA.
#
#     mix run bench/rewriter.exs FOLDER [NUM_LAYERS SEQLEN WIDTH]
#
# Needs Nx and EXLA; of EXLA the Elixir half is enough.

defmodule Step do
  @moduledoc false
  # Layers of attention and of two products, each behind a norm or not, in bf16: the mean of the sines of what comes out, and its
  # gradients by all weights. WIDTH / 64 heads of 64.

  @head_dim 64

  def arguments(num_layers, seqlen, width) do
    layer =
      for shape <- List.duplicate({width, width}, 4) ++ [{width, 4 * width}, {4 * width, width}],
          do: template(shape)

    [template({1, seqlen, width}), List.to_tuple(List.flatten(List.duplicate(layer, num_layers)))]
  end

  defp template(shape), do: Nx.template(shape, :bf16)

  def run(x, weights) do
    Nx.Defn.value_and_grad(weights, fn weights ->
      weights
      |> Tuple.to_list()
      |> Enum.chunk_every(6)
      |> Enum.reduce(x, &layer/2)
      |> Nx.as_type(:f32)
      |> Nx.sin()
      |> Nx.mean()
    end)
  end

  defp layer([wq, wk, wv, wo, w1, w2], x) do
    y = norm(x)
    [q, k, v] = for w <- [wq, wk, wv], do: y |> Nx.dot(w) |> heads()

    x =
      q
      |> attention(k, v)
      |> Nx.transpose(axes: [0, 2, 1, 3])
      |> Nx.reshape(Nx.shape(x))
      |> Nx.dot(wo)
      |> Nx.add(x)

    x = Nx.as_type(x, :bf16)
    Nx.add(x, x |> Nx.dot(w1) |> Nx.max(0) |> Nx.dot(w2))
  end

  defp norm(x) do
    d = Nx.subtract(x, Nx.mean(x, axes: [-1], keep_axes: true))
    Nx.multiply(d, Nx.rsqrt(Nx.add(Nx.mean(Nx.multiply(d, d), axes: [-1], keep_axes: true), 1.0e-5)))
  end

  defp heads(x) do
    {batch, seqlen, width} = Nx.shape(x)
    x |> Nx.reshape({batch, seqlen, div(width, @head_dim), @head_dim}) |> Nx.transpose(axes: [0, 2, 1, 3])
  end

  defp attention(q, k, v) do
    seqlen = Nx.axis_size(q, 2)
    s = Nx.divide(Nx.dot(q, [3], [0, 1], k, [3], [0, 1]), :math.sqrt(@head_dim))
    causal = Nx.greater_equal(Nx.iota({seqlen, 1}), Nx.iota({1, seqlen}))
    s = Nx.select(Nx.broadcast(causal, s), s, -1.0e9)
    e = Nx.exp(Nx.subtract(s, Nx.reduce_max(s, axes: [3], keep_axes: true)))
    p = Nx.divide(e, Nx.sum(e, axes: [3], keep_axes: true))
    Nx.dot(p, [3], [0, 1], v, [2], [0, 1])
  end
end

[folder | sizes] = System.argv()
[num_layers, seqlen, width] = if sizes == [], do: [4, 4096, 1024], else: Enum.map(sizes, &String.to_integer/1)

Code.require_file("test/support/start_exla.exs")
arguments = Step.arguments(num_layers, seqlen, width)
File.mkdir_p!(folder)

for {name, function} <- [plain: &Step.run/2, rewritten: &FlashAttention.Rewriter.rewrite(Step.run(&1, &2))] do
  text = EXLA.to_mlir_module(function, arguments, client: :host).mlir_module
  File.write!(Path.join(folder, "#{name}.mlir"), text)
end

for place <- FlashAttention.Rewriter.explain(&Step.run/2, arguments),
    do: IO.puts("#{place.place} -> #{place[:as] || place.reason}")

versions = for app <- [:nx, :exla], do: "#{app} #{Application.spec(app, :vsn)}"

IO.puts(
  "#{folder}/plain.mlir, rewritten.mlir: #{num_layers} layers, seqlen #{seqlen}, width #{width}, by #{Enum.join(versions, ", ")}"
)
