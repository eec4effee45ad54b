defmodule FlashAttention.Truth.Arguments do
  @moduledoc false

  # What Truth's functions are given and give back: tensors of any kind as lists of numbers, and numbers as tensors of
  # the same kind again.

  alias FlashAttention.Check.Values
  alias FlashAttention.TensorLike

  @cpu {:cpu, 0}

  # like: what tensors of this kind are made from. numbers is nil of what is not differentiated.
  defstruct [:name, :like, :type, :shape, :names, :numbers]

  # A tensor (see TensorLike), {binary, type, shape}, or a binary alone, which has the type that is named.
  def read(name, value, type) do
    {like, {data, type, shape}, names} = native(name, value, type)

    numbers =
      if is_binary(data) and floating?(type),
        do: data |> Values.decode(type) |> List.to_tuple(),
        else: nil

    %__MODULE__{name: name, like: like, type: type, shape: shape, names: names, numbers: numbers}
  end

  defp native(_name, data, {_, bits} = type) when is_binary(data),
    do: {:binary, {data, type, {div(byte_size(data) * 8, bits)}}, nil}

  defp native(_name, {data, type, shape} = native, _type)
       when is_binary(data) and is_tuple(shape) and is_tuple(type),
       do: {:tuple, native, nil}

  defp native(name, tensor, _type) do
    case TensorLike.to_native(tensor, @cpu) do
      {:ok, native, names} -> {tensor, native, names}
      {:error, expected, got} -> raise ArgumentError, "#{name}: expected #{expected}, got #{got}"
    end
  end

  def floating?({class, _bits}), do: class in [:f, :bf]

  def count(%{shape: shape}), do: Tuple.product(shape)

  # The same kind of tensor, of other numbers; and which numbers it then has, rounded to its type.
  def write(argument, numbers) do
    data = Values.encode(numbers, argument.type)
    {make(argument, data), Values.decode(data, argument.type)}
  end

  defp make(%{like: :binary}, data), do: data
  defp make(%{like: :tuple} = a, data), do: {data, a.type, a.shape}
  defp make(%{like: like} = a, data), do: TensorLike.from_native(like, {data, a.type, a.shape}, a.names)

  # Axes instead of a place in the whole: {1, 0, 2}.
  def index(%{shape: shape}, place) do
    {index, _rest} =
      shape |> Tuple.to_list() |> Enum.reverse() |> Enum.map_reduce(place, &{rem(&2, &1), div(&2, &1)})

    index |> Enum.reverse() |> List.to_tuple()
  end

  # What a function gave: one tensor, a list, or a tuple of them, with or without :ok in front.
  def results(name, result) do
    case result do
      {:ok, one} -> [one]
      {:error, reason} -> raise ArgumentError, "#{name} gave #{inspect({:error, reason})}"
      list when is_list(list) -> list
      {data, {class, _bits}, shape} when is_binary(data) and is_atom(class) and is_tuple(shape) -> [result]
      tuple when is_tuple(tuple) -> tuple |> Tuple.to_list() |> List.delete(:ok)
      one -> [one]
    end
  end
end
