# Nx itself must be loaded: function_exported?/3 loads nothing.
if Code.ensure_loaded?(Nx) do
  defimpl FlashAttention.TensorLike, for: Nx.Tensor do
    def to_native(%{data: %module{}}, _device) when module in [Nx.Defn.Expr, Nx.TemplateBackend],
      do:
        {:error, "a tensor with values (inside defn, see attention/4)",
         "a #{inspect(module)}, which has none yet"}

    def to_native(%{vectorized_axes: [_ | _] = axes}, _device),
      do:
        {:error, "a tensor without vectorized axes (see Nx.devectorize/2)", "vectorized axes #{inspect(axes)}"}

    # What EXLA holds on that GPU. It is complete: EXLA waits for what it computes.
    if function_exported?(Nx, :to_pointer, 2) do
      def to_native(%{data: %{buffer: %{client_name: :cuda, device_id: index}}} = tensor, {:cuda, index}) do
        pointer = Nx.to_pointer(tensor, mode: :local)
        {:ok, {{pointer.address, pointer.data_size, tensor}, tensor.type, tensor.shape}, tensor.names}
      end
    end

    def to_native(tensor, _device), do: {:ok, {Nx.to_binary(tensor), tensor.type, tensor.shape}, tensor.names}

    # An Nx tensor over our memory would only borrow it, so EXLA makes a copy of its own there, and nothing is left
    # that could be collected too early.
    if function_exported?(Nx, :from_pointer, 5) do
      def from_native(%{data: %backend{buffer: %{client_name: :cuda}}}, {ref, type, shape}, names)
          when is_reference(ref) do
        %{device: {:cuda, index}} = memory = FlashAttention.DeviceMemory.from_native(ref)
        pointer = struct!(Nx.Pointer, kind: :local, address: memory.address, data_size: memory.bytes)
        on = {backend, client: :cuda, device_id: index}
        borrowed = Nx.from_pointer(on, pointer, type, shape, names: names(names, shape))
        copy = Nx.multiply(borrowed, 1)
        FlashAttention.release(memory)
        copy
      end
    end

    def from_native(_like, {ref, _type, _shape} = native, names) when is_reference(ref) do
      like = struct!(FlashAttention.Tensor, data: <<>>, type: nil, shape: nil)
      FlashAttention.TensorLike.from_native(like, native, names)
    end

    def from_native(_like, {data, type, shape}, names),
      do: data |> Nx.from_binary(type) |> Nx.reshape(shape, names: names(names, shape))

    defp names(nil, shape), do: List.duplicate(nil, tuple_size(shape))
    defp names(names, _shape), do: names
  end
end
