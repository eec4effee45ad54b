defmodule FlashAttention.DeviceMemory do
  @moduledoc """
  Memory of a GPU: the `data` of a tensor that lies there, as `results: :device` gives.

  It is given back when the term is collected, or at once by `FlashAttention.release/1`. `address` and `bytes` are
  what `Nx.from_pointer/5` wants of a `%Nx.Pointer{kind: :local}`; such a tensor only borrows the memory, and must
  not be used after this term is gone.
  """

  alias FlashAttention.{Error, Native}

  @enforce_keys [:ref, :device, :address, :bytes]
  defstruct [:ref, :device, :address, :bytes]

  @type t :: %__MODULE__{
          ref: Native.memory(),
          device: Native.device(),
          address: non_neg_integer,
          bytes: non_neg_integer
        }

  @doc "What the memory holds, as a binary; or why it cannot be read."
  @spec to_binary(t) :: {:ok, binary} | {:error, Error.t()}
  def to_binary(%__MODULE__{ref: ref}) do
    with {:error, error} <- Native.read(ref), do: {:error, Error.from_native(error)}
  end

  def to_binary(other), do: {:error, Error.invalid(:memory, "a FlashAttention.DeviceMemory", Error.show(other))}

  @doc false
  @spec from_native(Native.memory()) :: t
  def from_native(ref) do
    {device, address, bytes} = Native.memory_info(ref)
    %__MODULE__{ref: ref, device: device, address: address, bytes: bytes}
  end
end
