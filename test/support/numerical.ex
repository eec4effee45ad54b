if FlashAttention.Defn.supported?() do
  defmodule FlashAttention.Test.Numerical do
    @moduledoc "Attention called inside defn, by name and under control flow."

    import Nx.Defn

    defn(loss(q, k, v, sink),
      do: Nx.sum(Nx.sin(FlashAttention.attention(q, k, v, window: {3, 0}, sink: sink)))
    )

    defn(gradients(q, k, v, sink),
      do: grad({q, k, v, sink}, fn {q, k, v, sink} -> loss(q, k, v, sink) end)
    )

    defn(with_lse(q, k, v), do: FlashAttention.attention_with_lse(q, k, v))

    @doc "Attention three times over, each time on what came out before; with its gradient by q."
    defn repeated(q, k, v) do
      grad(q, fn q ->
        {_, q, _, _} =
          while {i = 0, q, k, v}, i < 3 do
            {i + 1, FlashAttention.attention(q, k, v, causal: false), k, v}
          end

        # Not Nx.sum(q): its cotangent is an f32, and Nx's gradient of while keeps the type that it begins with.
        Nx.sum(q * q)
      end)
    end

    defn either(q, k, v, pred) do
      grad(q, fn q ->
        o = if pred, do: FlashAttention.attention(q, k, v), else: q * q
        Nx.sum(o * o)
      end)
    end
  end
end
