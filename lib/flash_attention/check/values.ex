defmodule FlashAttention.Check.Values do
  @moduledoc false

  # Numbers of tensors as lists, and as the NIF takes them. Infinities and NaN, which Erlang's floats have not,
  # are the atoms :infinity, :neg_infinity and :nan.

  import Bitwise

  # Unit roundoff: the largest relative error of one rounding to the type.
  @roundoff %{
    {:f, 64} => :math.pow(2, -53),
    {:f, 32} => :math.pow(2, -24),
    {:f, 16} => :math.pow(2, -11),
    {:bf, 16} => :math.pow(2, -8)
  }

  def roundoff(type), do: Map.fetch!(@roundoff, type)

  # The bits of its infinity.
  @infinity %{
    {:f, 64} => 0x7FF0000000000000,
    {:f, 32} => 0x7F800000,
    {:f, 16} => 0x7C00,
    {:bf, 16} => 0x7F80
  }

  def random(count, seed) do
    {numbers, _random} =
      Enum.map_reduce(List.duplicate(nil, count), :rand.seed_s(:exsss, seed), fn _, r -> :rand.normal_s(r) end)

    numbers
  end

  # The nearest numbers that the type has.
  def round_to(numbers, type), do: numbers |> encode(type) |> decode(type)

  def encode(numbers, type), do: for(x <- numbers, into: <<>>, do: element(type, x))

  defp element({_class, bits} = type, x) when is_atom(x), do: <<bits(type, x)::size(bits)-native>>
  defp element({:f, bits}, x), do: <<x::float-size(bits)-native>>

  # The upper half of an f32, rounded to nearest, ties to even.
  defp element({:bf, 16}, x) do
    <<bits::32>> = <<x::float-32>>
    <<div(bits + 0x7FFF + rem(div(bits, 0x10000), 2), 0x10000)::16-native>>
  end

  defp bits(type, :infinity), do: Map.fetch!(@infinity, type)
  defp bits({_class, bits} = type, :neg_infinity), do: 1 <<< (bits - 1) ||| bits(type, :infinity)
  defp bits({_class, bits}, :nan), do: (1 <<< (bits - 1)) - 1

  def decode(binary, {_, bits} = type), do: for(<<x::binary-size(div(bits, 8)) <- binary>>, do: number(type, x))

  defp number({:bf, 16}, <<upper::16-native>>), do: number({:f, 32}, <<upper::16, 0::16>> |> to_native())

  defp number({:f, bits}, binary) do
    case binary do
      <<x::float-size(bits)-native>> -> x
      <<x::size(bits)-native>> -> non_finite(<<x::size(bits)>>)
    end
  end

  defp to_native(<<bits::32>>), do: <<bits::32-native>>

  defp non_finite(<<sign::1, 0x1F::5, 0::10>>), do: infinity(sign)
  defp non_finite(<<sign::1, 0xFF::8, 0::23>>), do: infinity(sign)
  defp non_finite(<<sign::1, 0x7FF::11, 0::52>>), do: infinity(sign)
  defp non_finite(_bits), do: :nan

  defp infinity(0), do: :infinity
  defp infinity(1), do: :neg_infinity

  # The largest difference; :infinity where only one of two numbers is finite, or one is no number.
  def max_difference(xs, ys), do: Enum.zip_with(xs, ys, &difference/2) |> Enum.max(fn -> 0.0 end)

  # Atoms come after numbers, so that :infinity is the largest of differences.
  defp difference(x, y) when is_float(x) and is_float(y), do: abs(x - y)
  defp difference(x, x) when x != :nan, do: 0.0
  defp difference(_x, _y), do: :infinity

  # Of the number whose difference is the largest part of what is allowed there: both.
  def worst_difference(xs, ys, allowed) do
    [xs, ys, allowed]
    |> Enum.zip_with(fn [x, y, allowed] -> {difference(x, y), allowed} end)
    |> Enum.max_by(&share/1, fn -> {0.0, 0.0} end)
  end

  # A difference as a part of what is allowed. Where it is more than 1.0e100 times as much, or where nothing is, a float may
  # not say how much.
  def share({:infinity, _allowed}), do: :infinity
  def share({difference, _allowed}) when difference == 0, do: 0.0
  def share({difference, allowed}) when difference / 1.0e100 >= allowed, do: :infinity
  def share({difference, allowed}), do: difference / allowed

  def dot(xs, ys), do: Enum.zip_with(xs, ys, &(&1 * &2)) |> Enum.sum()

  # What a dot product's rounding errors are relative to.
  def dot_size(xs, ys), do: Enum.zip_with(xs, ys, &abs(&1 * &2)) |> Enum.sum()
end
