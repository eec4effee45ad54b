defmodule FlashAttention.Test.Tensors do
  @moduledoc "Tensors to test with: random ones, their values as lists, and how far two of them may differ."

  alias FlashAttention.Tensor

  @significand_bits %{f64: 53, f32: 24, f16: 11, bf16: 8}

  @doc "Normally distributed values, the same ones for the same seed."
  def random(seed, type, shape) do
    {values, _state} =
      Enum.map_reduce(indices(Enum.product(Tuple.to_list(shape))), :rand.seed_s(:exsss, seed), fn _i, state ->
        :rand.normal_s(state)
      end)

    from_list(values, type, shape)
  end

  def from_list(values, type, shape),
    do: Tensor.new(for(x <- values, into: <<>>, do: encode(type, x)), type, shape)

  @doc "The values of a tensor; an atom where one is no finite number."
  def to_list(%Tensor{data: data, type: {class, bits}}) do
    for <<bytes::binary-size(div(bits, 8)) <- data>>, do: decode({class, bits}, bytes)
  end

  @doc "The same values in another type; exact where that type is wider."
  def convert(%Tensor{} = tensor, type), do: tensor |> to_list() |> from_list(type, tensor.shape)

  @doc "[0, 1, ..., count - 1]"
  def indices(0), do: []
  def indices(count), do: Enum.to_list(0..(count - 1))

  @doc "The largest absolute difference of two lists; :infinity where only one of two values is finite."
  def max_difference(xs, ys) do
    Enum.zip(xs, ys)
    |> Enum.map(fn
      {x, x} -> 0.0
      {x, y} when is_float(x) and is_float(y) -> abs(x - y)
      {_x, _y} -> :infinity
    end)
    |> Enum.max(fn -> 0.0 end)
  end

  @doc "What one rounding to the type can change in the largest of the values."
  def rounding(type, values) do
    largest = values |> Enum.filter(&is_float/1) |> Enum.map(&abs/1) |> Enum.max(fn -> 0.0 end)
    largest * :math.pow(2, -Map.fetch!(@significand_bits, type))
  end

  @doc """
  What rounding leaves of what cancels in a gradient of that name. ds is the difference of two dot products, of v and
  of o with dout, that may be all but equal; dq, dk and dsink are sums of it.
  """
  def cancelling(name, %{q: q, k: k, v: v, dout: dout, opts: opts}) do
    head_dim = elem(q.shape, 3)
    ds = 2 * longest_row(dout, head_dim) * longest_row(v, head_dim)
    scaled = ds * abs(opts[:scale] || 1 / :math.sqrt(head_dim))

    size =
      case name do
        :dq -> scaled * max_magnitude(to_list(k))
        :dk -> scaled * max_magnitude(to_list(q))
        :dsink -> ds
        _ -> 0.0
      end

    rounding(if(q.type == {:f, 64}, do: :f64, else: :f32), [size])
  end

  defp longest_row(tensor, head_dim) do
    squares =
      for row <- tensor |> to_list() |> Enum.chunk_every(head_dim), do: Enum.sum(Enum.map(row, &(&1 * &1)))

    squares |> Enum.max(fn -> 0.0 end) |> :math.sqrt()
  end

  defp max_magnitude(values), do: values |> Enum.map(&abs/1) |> Enum.max(fn -> 0.0 end)

  defp encode(:f64, x), do: <<x::float-64-native>>
  defp encode(:f32, x), do: <<x::float-32-native>>
  defp encode(:f16, x), do: <<x::float-16-native>>

  # The upper half of an f32, rounded to nearest, ties to even.
  defp encode(:bf16, x) do
    <<bits::32>> = <<x::float-32>>
    <<div(bits + 0x7FFF + rem(div(bits, 0x10000), 2), 0x10000)::16-native>>
  end

  defp decode({:bf, 16}, <<upper::16-native>>), do: decode({:f, 32}, <<upper * 0x10000::32-native>>)

  defp decode({:f, bits}, bytes) do
    case bytes do
      <<x::float-size(bits)-native>> -> x
      <<x::size(bits)-native>> -> non_finite(<<x::size(bits)>>)
    end
  end

  defp non_finite(<<sign::1, 0x1F::5, 0::10>>), do: infinity(sign)
  defp non_finite(<<sign::1, 0xFF::8, 0::23>>), do: infinity(sign)
  defp non_finite(<<sign::1, 0x7FF::11, 0::52>>), do: infinity(sign)
  defp non_finite(_bits), do: :nan

  defp infinity(0), do: :infinity
  defp infinity(1), do: :neg_infinity
end
