defmodule FlashAttention.States do
  @moduledoc """
  What the forward left for the backward: `forward_with_states(q, k, v, keep: :device)` returns it, and
  `FlashAttention.backward/2` takes it.

  On a GPU q, k, v, o, lse and the sinks lie in its memory, `bytes` of them, until the term is collected or given
  to `FlashAttention.release/1`. The collector sees a small term and may take its time, so release what is large.
  On the CPU the states are the tensors themselves.
  """

  alias FlashAttention.{Native, TensorLike}

  @enforce_keys [:tensors, :names, :native, :device]
  @derive {Inspect, only: [:device]}
  defstruct [:tensors, :names, :native, :device]

  @typedoc "`tensors`, their axes' `names` and the options in `native` are private."
  @type t :: %__MODULE__{
          tensors: Native.tensors(),
          names: %{atom => TensorLike.names()},
          native: [Native.option()],
          device: Native.device()
        }

  @doc """
  How many bytes of a device's memory the states hold; those of released ones too.

      iex> one = FlashAttention.Tensor.new(<<1.0::float-32-native>>, :f32, {1, 1, 1, 1})
      iex> {:ok, _o, states} = FlashAttention.forward_with_states(one, one, one, keep: :device, device: :cpu)
      iex> FlashAttention.States.bytes(states)
      0
  """
  @spec bytes(t) :: non_neg_integer
  def bytes(%__MODULE__{} = states) do
    states |> memories() |> Enum.map(&elem(Native.memory_info(&1), 2)) |> Enum.sum()
  end

  @doc false
  @spec memories(t) :: [Native.memory()]
  def memories(%__MODULE__{tensors: tensors}),
    do: for({_name, {ref, _type, _shape}} <- tensors, is_reference(ref), do: ref)
end
