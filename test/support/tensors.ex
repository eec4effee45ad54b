defmodule FlashAttention.Test.Tensors do
  @moduledoc "Tensors to test with: random ones, their values as lists, and how far two of them may differ."

  alias FlashAttention.Check.Values
  alias FlashAttention.Tensor

  @types %{f64: {:f, 64}, f32: {:f, 32}, f16: {:f, 16}, bf16: {:bf, 16}}

  @doc "Normally distributed values, the same ones for the same seed."
  def random(seed, type, shape),
    do: shape |> Tuple.to_list() |> Enum.product() |> Values.random(seed) |> from_list(type, shape)

  def from_list(values, type, shape),
    do: Tensor.new(Values.encode(values, Map.fetch!(@types, type)), type, shape)

  @doc "Random inputs of both passes, and options; sink: count in the options becomes that many random sinks."
  def problem(seed, type, {batch, seqlen_q, seqlen_k, num_heads, num_kv_heads, head_dim}, opts) do
    queries = {batch, seqlen_q, num_heads, head_dim}
    keys = {batch, seqlen_k, num_kv_heads, head_dim}
    sinks = if opts[:sink], do: [sink: random(10 * seed + 5, :f32, {opts[:sink], num_heads})], else: []

    %{
      q: random(10 * seed + 1, type, queries),
      k: random(10 * seed + 2, type, keys),
      v: random(10 * seed + 3, type, keys),
      dout: random(10 * seed + 4, type, queries),
      opts: Keyword.merge(opts, sinks)
    }
  end

  @doc "The values of a tensor; an atom where one is no finite number."
  def to_list(%Tensor{data: data, type: type}), do: Values.decode(data, type)

  @doc "The same values in another type; exact where that type is wider."
  def convert(%Tensor{} = tensor, type), do: tensor |> to_list() |> from_list(type, tensor.shape)

  @doc "[0, 1, ..., count - 1]"
  def indices(0), do: []
  def indices(count), do: Enum.to_list(0..(count - 1))

  @doc "The largest absolute difference of two lists; :infinity where only one of two values is finite."
  defdelegate max_difference(xs, ys), to: Values

  @doc "What one rounding to the type can change in the largest of the values."
  def rounding(type, values) do
    largest(values) * Values.roundoff(Map.fetch!(@types, type))
  end

  @doc """
  What rounding leaves of what cancels in a gradient of that name. ds is the difference of two dot products, of v and
  of o with dout, that may be all but equal; dq, dk and dsink are sums of it.
  """
  def cancelling(name, %{q: q, k: k, v: v, dout: dout, opts: opts}) do
    head_dim = elem(q.shape, 3)
    ds = 2 * longest(to_list(dout), head_dim) * longest(to_list(v), head_dim)
    scaled = ds * abs(opts[:scale] || 1 / :math.sqrt(head_dim))

    size =
      case name do
        :dq -> scaled * largest(to_list(k))
        :dk -> scaled * largest(to_list(q))
        :dsink -> ds
        _ -> 0.0
      end

    rounding(if(q.type == {:f, 64}, do: :f64, else: :f32), [size])
  end

  defp largest(xs), do: for(x <- xs, is_float(x), do: abs(x)) |> Enum.max(fn -> 0.0 end)

  # The Euclidean length of the longest of rows of `width` numbers.
  defp longest(xs, width) do
    for(row <- Enum.chunk_every(xs, width), do: row |> Enum.map(&(&1 * &1)) |> Enum.sum())
    |> Enum.max(fn -> 0.0 end)
    |> :math.sqrt()
  end
end
