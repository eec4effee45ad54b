defmodule FlashAttention.Defn do
  @moduledoc """
  Attention as a part of numerical definitions: what stands behind `FlashAttention.attention/4`.

  Each pass is an `Nx.block/4` with a struct of its own, `FlashAttention.Defn.Forward` or
  `FlashAttention.Defn.Backward`. What becomes of it is the compiler's choice:

    * `Nx.Defn.Evaluator`, and any compiler that knows `Nx.runtime_call/4`, runs the block's default function, which
      calls the library. Memory grows linearly with the sequence either way.
    * EXLA emits an XLA custom call instead (see `FlashAttention.EXLA`), and tensors stay on the device.

  A custom gradient around the forward's block leads to the backward's block, so `Nx.Defn.grad/2` and everything
  above it, `Axon.Loop` among others, differentiate through it.
  """

  @supported Code.ensure_loaded?(Nx) and function_exported?(Nx, :block, 4) and
               function_exported?(Nx, :runtime_call, 4)

  @doc "Whether the Nx that this was compiled with has what is needed: `Nx.block/4` and `Nx.runtime_call/4`."
  @spec supported?() :: boolean
  def supported?, do: @supported

  @doc false
  # Defines attention/4 and attention_with_lse/4 in FlashAttention: as transforms, which can be called inside defn too.
  defmacro __using__(_opts) do
    {import, define, implementation} =
      if @supported,
        do: {quote(do: import(Nx.Defn, only: [deftransform: 2])), :deftransform, FlashAttention.Defn.Attention},
        else: {nil, :def, __MODULE__}

    quote do
      unquote(import)

      @doc """
      Attention inside `defn`: the output `o`, of `q`'s shape, differentiable in `q`, `k`, `v` and `sink`.

      Tensors and options are those of `forward/4`, but for `:keep` and `:results`; errors are raised, as
      `FlashAttention.Error`. It can be called inside `defn` and outside of it, and needs Nx 0.12 or later. Memory
      grows linearly with the sequence, in the gradient too.

      Vectorized axes count as part of the batch, with gradients from Nx 0.13 on; `sink` has none. `o` has the axis
      names of `q`. The gradient has no gradient itself: asking for one raises.

      On EXLA it is a custom call on the device that the computation runs on, see `FlashAttention.EXLA`. With a
      `:device` other than `:auto`, the default, the library computes there, whatever compiles the rest.

          defn loss(q, k, v), do: FlashAttention.attention(q, k, v, window: {127, 0}) |> Nx.sum()
          defn gradients(q, k, v), do: grad({q, k, v}, fn {q, k, v} -> loss(q, k, v) end)
      """
      @spec attention(tensor, tensor, tensor, [option]) :: tensor
      unquote(define)(attention(q, k, v, opts \\ [])) do
        {o, _lse} = unquote(implementation).attention_with_lse(q, k, v, opts)
        o
      end

      @doc """
      As `attention/4`, but returns `{o, lse}`.

      `lse` has no gradient: where a loss depends on it, asking for the gradient raises, unless `stop_grad/1` is around
      it.
      """
      @spec attention_with_lse(tensor, tensor, tensor, [option]) :: {tensor, tensor}
      unquote(define)(attention_with_lse(q, k, v, opts \\ [])) do
        unquote(implementation).attention_with_lse(q, k, v, opts)
      end
    end
  end

  @doc false
  # What stands in for FlashAttention.Defn.Attention without Nx.
  def attention_with_lse(_q, _k, _v, _opts) do
    message =
      "FlashAttention.attention needs Nx 0.12 or later: it was not there when flash_attention was compiled"

    raise FlashAttention.Error.from_native({:unsupported, "", "", "", message})
  end
end
