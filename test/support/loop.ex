if FlashAttention.Defn.supported?() do
  defmodule FlashAttention.Test.Loop do
    @moduledoc "A loop of two steps around a function of what is changed, a mask, and what else there is."

    import Nx.Defn

    defn twice(x, mask, args, opts \\ []) do
      {x, _, _, _} =
        while {x, mask, args, i = 0}, i < 2 do
          {step(x, mask, args, opts), mask, args, i + 1}
        end

      x
    end

    deftransformp(step(x, mask, args, opts), do: opts[:step].(x, mask, args))
  end
end
