defmodule FlashAttention.Defn.Forward do
  @moduledoc "The block of the forward pass: `q, k, v` and `sink` if any, to `o, lse`."

  @enforce_keys [:opts]
  defstruct [:opts, pass: :forward]

  @typedoc "`opts` are those of `FlashAttention.attention/4` without `:sink`, which is an input."
  @type t :: %__MODULE__{opts: keyword, pass: :forward}
end
