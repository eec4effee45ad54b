if Code.ensure_loaded?(Nx.Tensor) do
  defimpl FlashAttention.TensorLike, for: Nx.Tensor do
    def to_native(%{data: %module{}}) when module in [Nx.Defn.Expr, Nx.TemplateBackend],
      do: {:error, "a tensor with values", "a #{inspect(module)}, which has none yet"}

    def to_native(%{vectorized_axes: [_ | _] = axes}),
      do:
        {:error, "a tensor without vectorized axes (see Nx.devectorize/2)", "vectorized axes #{inspect(axes)}"}

    def to_native(tensor), do: {:ok, {Nx.to_binary(tensor), tensor.type, tensor.shape}, tensor.names}

    def from_native(_like, {data, type, shape}, names) do
      data |> Nx.from_binary(type) |> Nx.reshape(shape, names: names || List.duplicate(nil, tuple_size(shape)))
    end
  end
end
