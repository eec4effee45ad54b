defmodule FlashAttention.Test.Wrapped do
  @moduledoc "A tensor type of somebody else's, with names for its axes."

  defstruct [:tensor, :names]

  defimpl FlashAttention.TensorLike do
    def to_native(%{tensor: tensor, names: names}, _device),
      do: {:ok, {tensor.data, tensor.type, tensor.shape}, names}

    def from_native(_like, {data, type, shape}, names),
      do: %@for{tensor: FlashAttention.Tensor.new(data, type, shape), names: names}
  end
end
