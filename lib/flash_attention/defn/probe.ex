# Whether gradients that are Nx's own are right: tried on the Nx that is loaded, as the number of a release does not
# tell what a state between two of them does.
if FlashAttention.Defn.supported?() do
  defmodule FlashAttention.Defn.Probe do
    @moduledoc false

    import Nx.Defn

    @doc false
    # Two numbers, each of which takes from the other: what comes out depends on the order of the steps.
    defn through_while(a, b) do
      grad(a, fn a ->
        {_, a, _} =
          while {i = 0, a, b}, i < 3 do
            {i + 1, a * b, a + b}
          end

        a
      end)
    end

    defn(unrolled(a, b), do: grad(a, fn a -> a * b * (a + b) * (a * b + a + b) end))

    @doc false
    def right?(:while) do
      numbers = for number <- [1.5, 0.5], do: Nx.tensor(number, backend: Nx.BinaryBackend)
      [got, expected] = for function <- [&through_while/2, &unrolled/2], do: number(function, numbers)
      abs(got - expected) < 1.0e-3
    end

    def right?(:vectorized) do
      x = Nx.vectorize(Nx.tensor([[1.0, 2.0], [3.0, 4.0]], backend: Nx.BinaryBackend), :i)
      sum = fn x -> x |> Nx.Defn.grad(&cubes/1) |> Nx.devectorize() |> Nx.sum() end
      abs(number(sum, [x]) - 3 * 30) < 1.0e-3
    rescue
      # So it is in Nx 0.12: what was vectorized is no longer.
      ArgumentError -> false
    end

    # The sum of cubes, on the way that attention takes: without vectorized axes inside of a custom gradient.
    defp cubes(x) do
      flat = Nx.revectorize(x, [], target_shape: {4})

      square =
        Nx.Defn.Kernel.custom_grad(Nx.multiply(flat, flat), [flat], &[Nx.multiply(&1, Nx.multiply(2, flat))])

      square |> Nx.revectorize([i: 2], target_shape: {2}) |> Nx.multiply(x) |> Nx.sum()
    end

    defp number(function, arguments) do
      opts = [compiler: Nx.Defn.Evaluator, on_conflict: :force]
      function |> Nx.Defn.jit_apply(arguments, opts) |> Nx.to_number()
    end
  end
end
