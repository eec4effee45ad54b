defmodule FlashAttention.Test.Tensors do
  @moduledoc "Tensors to test with: random ones, their values as lists, and how far two of them may differ."

  alias FlashAttention.Check.Values
  alias FlashAttention.{Mask, Native, Options, Tensor}

  @types %{f64: {:f, 64}, f32: {:f, 32}, f16: {:f, 16}, bf16: {:bf, 16}}

  @doc "Normally distributed values, the same ones for the same seed."
  def random(seed, type, shape),
    do: shape |> Tuple.to_list() |> Enum.product() |> Values.random(seed) |> from_list(type, shape)

  # Of u8, a third is hidden.
  defp bias(seed, :u8, shape) do
    values = seed |> random(:f64, shape) |> to_list()
    Tensor.new(for(x <- values, into: <<>>, do: <<if(x > -0.4, do: 1, else: 0)>>), {:u, 8}, shape)
  end

  defp bias(seed, type, shape), do: random(seed, type, shape)

  def from_list(values, type, shape),
    do: Tensor.new(Values.encode(values, Map.fetch!(@types, type)), type, shape)

  @doc """
  Random inputs of both passes, and options, of which these become random tensors: `sink: count`,
  `alibi_slopes: batch`, `bias: {type, shape}`, whose type `nil` stands for that of q, and `dropout_seed: {word, word}`.
  """
  def problem(seed, type, {batch, seqlen_q, seqlen_k, num_heads, num_kv_heads, head_dim}, opts) do
    queries = {batch, seqlen_q, num_heads, head_dim}
    keys = {batch, seqlen_k, num_kv_heads, head_dim}

    optional =
      for {name, place} <- [sink: 5, alibi_slopes: 6],
          size = opts[name],
          do: {name, random(10 * seed + place, :f32, {size, num_heads})}

    dropout =
      for {x, y} <- List.wrap(opts[:dropout_seed]),
          do: {:dropout_seed, Tensor.new(<<x::32-native, y::32-native>>, {:u, 32}, {2})}

    bias =
      for {bias_type, shape} <- List.wrap(opts[:bias]),
          do: {:bias, bias(10 * seed + 7, bias_type || type, shape)}

    %{
      q: random(10 * seed + 1, type, queries),
      k: random(10 * seed + 2, type, keys),
      v: random(10 * seed + 3, type, keys),
      dout: random(10 * seed + 4, type, queries),
      opts: Keyword.merge(opts, optional ++ bias ++ dropout)
    }
  end

  @doc "The values of a tensor; an atom where one is no finite number."
  def to_list(%Tensor{data: data, type: {:u, 8}}), do: :binary.bin_to_list(data)
  def to_list(%Tensor{data: data, type: type}), do: Values.decode(data, type)

  @doc "The same values in another type; exact where that type is wider."
  def convert(%Tensor{} = tensor, type), do: tensor |> to_list() |> from_list(type, tensor.shape)

  @doc "[0, 1, ..., count - 1]"
  def indices(0), do: []
  def indices(count), do: Enum.to_list(0..(count - 1))

  @doc "The largest absolute difference of two lists; :infinity where only one of two values is finite."
  defdelegate max_difference(xs, ys), to: Values

  @doc "How far rounding may take each number of each result, by the results' names: see `FlashAttention.Native`."
  def bounds(%{q: q, k: k, v: v, dout: dout, opts: opts}) do
    {:ok, options} = Options.parse(opts)
    inputs = Map.merge(%{q: q, k: k, v: v, dout: dout}, options.tensors)
    size = {elem(q.shape, 1), elem(k.shape, 1)}
    tensors = for {name, x} <- inputs, into: %{}, do: {name, native(x, size)}
    {:ok, bounds} = Native.run(:bound, tensors, options.native, {:reference, 0})
    for {name, {data, type, _shape}} <- bounds, into: %{}, do: {name, Values.decode(data, type)}
  end

  defp native(%Mask{} = mask, size), do: mask |> Mask.to_bands(size) |> native(size)
  defp native(x, _size), do: {x.data, x.type, x.shape}

  @doc """
  The largest error of a list, as a part of what is allowed: twice the error of a naive run in the same type, and
  the bound of the number.
  """
  def share_of_tolerance(got, exact, naive, bounds) do
    naive_error = max_difference(naive, exact)
    {error, allowed} = Values.worst_difference(got, exact, for(bound <- bounds, do: 2 * naive_error + bound))
    if error == 0, do: 0.0, else: error / allowed
  end
end
