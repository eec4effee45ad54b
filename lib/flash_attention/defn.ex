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
  # The head of a function that can be called inside defn too; its body follows as an ordinary def.
  defmacro deftransform(head) do
    if @supported do
      quote do
        require Nx.Defn
        Nx.Defn.deftransform(unquote(head))
      end
    else
      quote do: def(unquote(head))
    end
  end

  @doc false
  def attention_with_lse(q, k, v, opts)

  if @supported do
    defdelegate attention_with_lse(q, k, v, opts), to: FlashAttention.Defn.Attention
  else
    # By apply, as callers need not be told by the compiler that this never returns.
    def attention_with_lse(_q, _k, _v, _opts) do
      error = FlashAttention.Packages.missing("FlashAttention.attention", "Nx 0.12 or later", [:nx])
      apply(:erlang, :error, [error])
    end
  end
end
