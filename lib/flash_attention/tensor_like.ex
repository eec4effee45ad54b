defprotocol FlashAttention.TensorLike do
  @moduledoc """
  What `FlashAttention` takes as a tensor: `FlashAttention.Tensor`, and `Nx.Tensor` where Nx is there.

  Implement it for a tensor type of your own and it can be passed to every function of `FlashAttention`.
  Results are made like `q`.
  """

  @typedoc "Names of the axes as Nx has them; `nil` where the tensor's type knows of none."
  @type names :: [atom] | nil

  @doc """
  The tensor as data, type and shape, and the names of its axes; or why it has none, as an error names it.

  The data are a binary, or the `ref` of a `FlashAttention.DeviceMemory`. Where the elements lie in the memory of the device,
  which is the one that will compute, they may be `{address, bytes, tensor}`.

      iex> tensor = FlashAttention.Tensor.new(<<1.0::float-32-native>>, :f32, {1})
      iex> FlashAttention.TensorLike.to_native(tensor, {:cpu, 0})
      {:ok, {<<1.0::float-32-native>>, {:f, 32}, {1}}, nil}
  """
  @spec to_native(t, FlashAttention.Native.device()) ::
          {:ok, FlashAttention.Native.tensor(), names} | {:error, expected :: String.t(), got :: String.t()}
  def to_native(tensor, device)

  @doc """
  A tensor of the same kind as the first one, of that data, type, shape and names.

  The data are a reference to a device's memory where `results: :device` was asked for, and else a binary.

      iex> like = FlashAttention.Tensor.new(<<>>, :f32, {0})
      iex> FlashAttention.TensorLike.from_native(like, {<<2.0::float-64-native>>, {:f, 64}, {1}}, nil)
      %FlashAttention.Tensor{data: <<2.0::float-64-native>>, type: {:f, 64}, shape: {1}}
  """
  @spec from_native(t, FlashAttention.Native.tensor(), names) :: t
  def from_native(like, native, names)
end
