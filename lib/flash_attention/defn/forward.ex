defmodule FlashAttention.Defn.Forward do
  @moduledoc "The block of the forward pass: `q, k, v` and the tensors of options, to `o, lse`."

  @enforce_keys [:opts]
  defstruct [:opts, shapes: [], pass: :forward]

  @typedoc """
  `opts` are those of `FlashAttention.attention/4` without those that are tensors, which are inputs. Inputs and
  outputs of the block are flat; `shapes` are those of the inputs, by name and in their order.
  """
  @type t :: %__MODULE__{opts: keyword, shapes: [{atom, tuple}], pass: :forward}
end
