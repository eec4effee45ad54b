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
