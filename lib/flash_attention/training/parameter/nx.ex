if Code.ensure_loaded?(Nx.Tensor) do
  defimpl FlashAttention.Training.Parameter, for: Nx.Tensor do
    def add(left, right), do: Nx.add(left, right)

    def update(parameter, gradient, slot, change) do
      [rule | numbers] = Tuple.to_list(change)
      # In the parameter's own type, and as arguments: what changes from step to step is not compiled anew.
      numbers = for number <- numbers, do: Nx.tensor(number, type: parameter.type)
      move(rule, parameter, gradient, slot, numbers)
    end

    defp move(:sgd, parameter, gradient, slot, numbers) do
      slot = slot || Nx.multiply(gradient, 0)
      Nx.Defn.jit_apply(&sgd/5, [parameter, gradient, slot | numbers])
    end

    defp move(:adam, parameter, gradient, slot, numbers) do
      {m, v} = slot || {Nx.multiply(gradient, 0), Nx.multiply(gradient, 0)}
      Nx.Defn.jit_apply(&adam/8, [parameter, gradient, m, v | numbers])
    end

    defp sgd(p, g, v, rate, momentum) do
      v = Nx.add(Nx.multiply(momentum, v), g)
      {Nx.subtract(p, Nx.multiply(rate, v)), v}
    end

    defp adam(p, g, m, v, rate, beta1, beta2, epsilon) do
      m = Nx.add(g, Nx.multiply(beta1, Nx.subtract(m, g)))
      square = Nx.multiply(g, g)
      v = Nx.add(square, Nx.multiply(beta2, Nx.subtract(v, square)))
      step = Nx.divide(Nx.multiply(rate, m), Nx.add(Nx.sqrt(v), epsilon))
      {Nx.subtract(p, step), {m, v}}
    end
  end
end
