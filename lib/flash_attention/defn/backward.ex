defmodule FlashAttention.Defn.Backward do
  @moduledoc """
  The block of the backward pass: `dout, q, k, v, o, lse` and the tensors of options, to `dq, dk, dv` and the gradients
  of those that have one.
  """

  @enforce_keys [:opts]
  defstruct [:opts, shapes: [], pass: :backward]

  @typedoc """
  `opts` are those of `FlashAttention.attention/4` without those that are tensors, which are inputs. Inputs and
  outputs of the block are flat; `shapes` are those of the inputs, by name and in their order.
  """
  @type t :: %__MODULE__{opts: keyword, shapes: [{atom, tuple}], pass: :backward}
end
