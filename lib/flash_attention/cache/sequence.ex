defmodule FlashAttention.Cache.Sequence do
  @moduledoc """
  Rows of `k` and `v` on pages of a `FlashAttention.Cache`: what `FlashAttention.forward/3` takes a list of.

  The pages go back to the cache when the term is collected. The collector sees a small term and may take its time, so
  `FlashAttention.Cache.release/1` what is long.
  """

  alias FlashAttention.Cache

  @enforce_keys [:ref, :cache]
  @derive {Inspect, only: []}
  defstruct [:ref, :cache]

  @type t :: %__MODULE__{ref: reference, cache: Cache.t()}
end
