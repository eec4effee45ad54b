defmodule FlashAttention.Distributed.Group do
  @moduledoc """
  A rank's membership in a group: what `FlashAttention.Distributed.join/4` gives, for the process that joined.
  """

  @enforce_keys [:name, :rank, :num_ranks, :inbox, :peers, :device, :transport, :timeout]
  @derive {Inspect, only: [:name, :rank, :num_ranks, :device]}
  defstruct [:name, :rank, :num_ranks, :inbox, :peers, :device, :transport, :timeout, :link]

  @typedoc "`inbox`, `peers`, `transport` and `link` are private."
  @type t :: %__MODULE__{
          name: term,
          rank: non_neg_integer,
          num_ranks: pos_integer,
          inbox: pid,
          peers: %{non_neg_integer => pid},
          device: FlashAttention.Native.device(),
          transport: module,
          timeout: timeout,
          link: term
        }
end
