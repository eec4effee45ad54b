defmodule FlashAttention.Distributed.States do
  @moduledoc """
  What a rank's forward left for its backward: `FlashAttention.Distributed.forward/6` returns it. It holds the rank's
  own q, k, v, o and lse, and the deal; keys of other ranks travel again.
  """

  @enforce_keys [:deal, :number, :problem, :o, :lse]
  @derive {Inspect, only: [:deal]}
  defstruct [:deal, :number, :problem, :o, :lse]

  @typedoc "Private, but for `deal`."
  @type t :: %__MODULE__{
          deal: FlashAttention.Distributed.Deal.t(),
          number: pos_integer,
          problem: map,
          o: FlashAttention.Native.tensor(),
          lse: FlashAttention.Native.tensor()
        }
end
