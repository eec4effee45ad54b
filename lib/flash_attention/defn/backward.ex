defmodule FlashAttention.Defn.Backward do
  @moduledoc "The block of the backward pass: `dout, q, k, v, o, lse` and `sink` if any, to `dq, dk, dv` and `dsink`."

  @enforce_keys [:opts]
  defstruct [:opts, pass: :backward]

  @typedoc "`opts` are those of `FlashAttention.attention/4` without `:sink`, which is an input."
  @type t :: %__MODULE__{opts: keyword, pass: :backward}
end
