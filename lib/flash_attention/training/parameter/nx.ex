if Code.ensure_loaded?(Nx.Tensor) do
  defimpl FlashAttention.Training.Parameter, for: Nx.Tensor do
    alias FlashAttention.Error

    def add(left, right), do: Nx.add(left, right)

    # 16 bits hold neither Adam's 0.999 nor its 1.0e-8: a step is computed in f32 at least, slots stay in that, and the
    # parameter, whatever its gradient's type, in its own.
    def update(parameter, gradient, slot, change) do
      check_like!(parameter, gradient)
      type = Nx.Type.merge(parameter.type, {:f, 32})
      [rule | numbers] = Tuple.to_list(change)
      # As arguments: what changes from step to step is not compiled anew.
      numbers = for number <- numbers, do: Nx.tensor(number, type: type)
      {moved, slot} = move(rule, parameter, Nx.as_type(gradient, type), slot, numbers)
      {Nx.as_type(moved, parameter.type), slot}
    end

    defp check_like!(parameter, gradient) do
      if Nx.shape(parameter) != Nx.shape(gradient) do
        expected = "the parameter's shape #{Error.show(Nx.shape(parameter))}"
        raise Error.invalid(:gradient, expected, Error.show(Nx.shape(gradient)))
      end

      if Nx.Type.integer?(parameter.type),
        do: raise(Error.invalid(:parameter, "a type of floating-point numbers", Error.show(parameter.type)))
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
