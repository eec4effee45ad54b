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

  @doc """
  Whether Nx's own gradients are right where attention may stand: through `while`, or of `vectorized` tensors.

  Attention's gradient is right by itself; what leads to it is Nx's. In the releases 0.12.1 and 0.13.1 gradients through
  a `while` whose steps do not commute are wrong, with attention in it or without, and Nx says nothing; in 0.12.1 those of
  vectorized tensors raise, or are wrong. This is tried on the Nx that is loaded, once. Without one it is false.

      iex> is_boolean(FlashAttention.Defn.gradient_right?(:while))
      true
  """
  @spec gradient_right?(:while | :vectorized) :: boolean
  def gradient_right?(what) when what in [:while, :vectorized] do
    with nil <- :persistent_term.get({__MODULE__, what}, nil) do
      probe = FlashAttention.Defn.Probe
      right? = Code.ensure_loaded?(probe) and apply(probe, :right?, [what])
      :persistent_term.put({__MODULE__, what}, right?)
      right?
    end
  end

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
