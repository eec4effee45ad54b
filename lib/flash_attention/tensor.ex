defmodule FlashAttention.Tensor do
  @moduledoc """
  A tensor for programs without Nx: a binary, the type of its elements and a shape.

  Elements lie contiguously, the last axis fastest, in the machine's byte order, as in `Nx.to_binary/1`.

  In place of a binary there may be memory of a GPU: `FlashAttention.DeviceMemory`, which `results: :device` gives,
  or the `%Nx.Pointer{kind: :local}` of a tensor that somebody else keeps, there or in the host's memory, for as long
  as this one is used.
  """

  alias FlashAttention.{DeviceMemory, Error, Packages, TensorLike}

  @enforce_keys [:data, :type, :shape]
  defstruct [:data, :type, :shape]

  @typedoc "A pointer is an `Nx.Pointer`."
  @type data ::
          binary | DeviceMemory.t() | %{address: non_neg_integer, kind: :local, data_size: non_neg_integer}

  @type t :: %__MODULE__{data: data, type: FlashAttention.Native.type(), shape: tuple}

  @types [
    f32: {:f, 32},
    f64: {:f, 64},
    bf16: {:bf, 16},
    f16: {:f, 16},
    s32: {:s, 32},
    u32: {:u, 32},
    u8: {:u, 8}
  ]

  @doc """
  A tensor of that binary, type and shape.

  The type is written as Nx writes it: `{:f, 32}` or `:f32`; likewise `f64`, `bf16` and `f16`,
  and for numbers that are not computed with `s32`, `u32` and `u8`. Raises `FlashAttention.Error` where the binary is not as long as type and shape say.

      iex> FlashAttention.Tensor.new(<<1.0::float-32-native, 2.0::float-32-native>>, :f32, {2, 1})
      %FlashAttention.Tensor{
        data: <<1.0::float-32-native, 2.0::float-32-native>>,
        type: {:f, 32},
        shape: {2, 1}
      }

      iex> FlashAttention.Tensor.new(<<0, 0, 0>>, :f16, {2})
      ** (FlashAttention.Error) data: expected 4 bytes for shape {2} of type f16, got 3
  """
  @spec new(data, FlashAttention.Native.type() | :f32 | :f64 | :bf16 | :f16 | :s32 | :u32 | :u8, tuple) :: t
  def new(data, type, shape) do
    {class, bits} = type = type!(type)

    if !shape?(shape),
      do: raise(Error.invalid(:shape, "a tuple of sizes", Error.show(shape)))

    bytes = Enum.product(Tuple.to_list(shape)) * div(bits, 8)

    if size(data) != bytes do
      expected = "#{bytes} bytes for shape #{Error.show(shape)} of type #{class}#{bits}"
      raise Error.invalid(:data, expected, "#{size(data)}")
    end

    %__MODULE__{data: data, type: type, shape: shape}
  end

  for {name, type} <- @types do
    defp type!(type) when type in [unquote(name), unquote(type)], do: unquote(type)
  end

  defp type!(type), do: raise(Error.invalid(:type, "f32, f64, bf16, f16, s32, u32 or u8", Error.show(type)))

  defp size(data) when is_binary(data), do: byte_size(data)
  defp size(%DeviceMemory{bytes: bytes}) when is_integer(bytes), do: bytes
  defp size(%{kind: :local, address: _, data_size: bytes}) when is_integer(bytes), do: bytes
  defp size(data), do: raise(Error.invalid(:data, "a binary", Error.show(data)))

  defp shape?(shape),
    do: is_tuple(shape) and Enum.all?(Tuple.to_list(shape), &(is_integer(&1) and &1 >= 0))

  @doc false
  # What the library reads of a tensor. A tensor's own module says; what it raises says what is wrong with a forged one.
  @spec read(term, FlashAttention.Native.device()) ::
          {:ok, FlashAttention.Native.tensor(), TensorLike.names()}
          | {:error, expected :: String.t(), got :: String.t()}
  def read(tensor, device) do
    with implementation when implementation != nil <- TensorLike.impl_for(tensor),
         {:ok, {_data, _type, shape}, names} = native <- implementation.to_native(tensor, device) do
      if names?(names, shape), do: native, else: {:error, "a name for every axis", Error.show(names)}
    else
      nil -> {:error, "a tensor (Nx.Tensor or FlashAttention.Tensor)", Error.show(tensor) <> if_nx_came_later()}
      {:error, expected, got} -> {:error, expected, got}
    end
  rescue
    error -> {:error, "a tensor that can be read", Error.raised(error)}
  end

  defp if_nx_came_later do
    case Packages.came_later(:nx) do
      nil -> ""
      what_to_run -> " (#{what_to_run})"
    end
  end

  @doc false
  # Whether these can be the names of that shape's axes.
  @spec names?(term, term) :: boolean
  def names?(nil, _shape), do: true

  def names?(names, shape) when length(names) == tuple_size(shape), do: Enum.all?(names, &is_atom/1)
  def names?(_names, _shape), do: false

  defimpl FlashAttention.TensorLike do
    def to_native(%{data: data, type: type, shape: shape}, _device), do: {:ok, {native(data), type, shape}, nil}

    defp native(%DeviceMemory{ref: ref}), do: ref
    defp native(%{kind: :local, address: address, data_size: bytes} = owner), do: {address, bytes, owner}
    defp native(data), do: data

    def from_native(_like, {ref, type, shape}, _names) when is_reference(ref),
      do: %FlashAttention.Tensor{data: DeviceMemory.from_native(ref), type: type, shape: shape}

    def from_native(_like, {data, type, shape}, _names),
      do: %FlashAttention.Tensor{data: data, type: type, shape: shape}
  end
end
