defmodule FlashAttention.Training.Model do
  @moduledoc """
  What surrounds attention: the stage before it and the stage after it, and attention's own options.

    * `embed` - parameters and a batch to `{q, k, v}`, or to `{q, k, v, optional}`, a map of attention's options that
      parameters or the batch make: `%{sink: sink, mask: mask}`. Its pullback takes the gradients in the same form, the
      map with those of `sink`, `bias` and `alibi_slopes`, as the backward returns them, and left out where there are none,
      and returns those of the parameters.
    * `head` - parameters, attention's output and a batch to the loss. Its pullback takes the gradient by the
      loss, a number, and returns `{gradients of the parameters, gradient of attention's output}`.
    * `attention` - options of `FlashAttention.forward/4`; `:device` is one device, as what the backward needs stays on it

  Gradients of parameters are nested as the parameters are; a parameter that a stage does not use is left out.
  Batches are whatever the two stages make of them.
  """

  alias FlashAttention.Training.Params

  @enforce_keys [:embed, :head]
  defstruct [:embed, :head, attention: []]

  @type tensor :: FlashAttention.tensor()

  @typedoc "Attention's inputs, or the gradients by them."
  @type attention_inputs :: {tensor, tensor, tensor} | {tensor, tensor, tensor, optional :: map}

  @type embed ::
          (Params.t(), batch :: term -> {attention_inputs, (attention_inputs -> gradients :: Params.t())})

  @type head ::
          (Params.t(), o :: tensor, batch :: term ->
             {loss :: term, (number -> {gradients :: Params.t(), dout :: tensor})})

  @type t :: %__MODULE__{embed: embed, head: head, attention: keyword}
end
