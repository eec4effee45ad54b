defmodule FlashAttention.Training.State do
  @moduledoc """
  A training run between two steps: parameters, the optimizer with what it remembers of every parameter
  (`slots`), and the number of steps taken.
  """

  alias FlashAttention.Training.{Optimizer, Params}

  @enforce_keys [:params, :optimizer]
  defstruct [:params, :optimizer, slots: %{}, step: 0]

  @type t :: %__MODULE__{
          params: Params.t(),
          optimizer: Optimizer.t(),
          slots: map,
          step: non_neg_integer
        }
end
