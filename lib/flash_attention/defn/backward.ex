defmodule FlashAttention.Defn.Backward do
  @moduledoc "The block of the backward pass: `dout, q, k, v, o, lse` and `sink` if any, to `dq, dk, dv` and `dsink`."

  @enforce_keys [:opts]
  defstruct [:opts, shapes: [], pass: :backward]

  @typedoc """
  `opts` are those of `FlashAttention.attention/4` without `:sink`, which is an input. Inputs and outputs of the block
  are flat; `shapes` are those of the inputs, by name and in their order.
  """
  @type t :: %__MODULE__{opts: keyword, shapes: [{atom, tuple}], pass: :backward}
end
