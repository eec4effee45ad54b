defmodule FlashAttention.States do
  @moduledoc """
  What the forward left for the backward: `forward_with_states(q, k, v, keep: :device)` returns it, and
  `FlashAttention.backward/2` takes it.

  On a GPU q, k, v, o, lse and the sinks lie in its memory, `bytes` of them, until the term is collected or given
  to `FlashAttention.release/1`. The collector sees a small term and may take its time, so release what is large.
  On the CPU the states are the tensors themselves.
  """

  alias FlashAttention.{Error, Native, Tensor, TensorLike}

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
      iex> {:error, error} = FlashAttention.States.bytes(:none)
      iex> error.message
      "states: expected a FlashAttention.States, got :none"
  """
  @spec bytes(t) :: non_neg_integer | {:error, Error.t()}
  def bytes(states) do
    with {:ok, memories} <- memories(states) do
      Enum.reduce_while(memories, 0, fn memory, sum ->
        case Native.memory_info(memory) do
          {_device, _address, bytes} -> {:cont, sum + bytes}
          {:error, error} -> {:halt, {:error, Error.from_native(error)}}
        end
      end)
    end
  end

  @doc false
  @spec memories(t) :: {:ok, [Native.memory()]} | {:error, Error.t()}
  def memories(states) do
    with :ok <- check(states),
         do: {:ok, for({_name, {ref, _type, _shape}} <- states.tensors, is_reference(ref), do: ref)}
  end

  @doc false
  # Whether a forward can have made the term. What is wrong inside of its tensors is the library's to say.
  @spec check(term) :: :ok | {:error, Error.t()}
  def check(%__MODULE__{tensors: tensors, names: names, native: _, device: {_kind, _index}} = states)
      when is_map(tensors) and is_map(names) and not is_struct(tensors) and not is_struct(names) do
    tensors = Map.to_list(tensors)

    if List.keymember?(tensors, :q, 0) and Enum.all?(tensors, &native_tensor?/1) and
         Enum.all?(Map.to_list(names), &names_of?(&1, tensors)),
       do: :ok,
       else: refuse(states)
  end

  def check(other), do: refuse(other)

  defp refuse(term), do: {:error, Error.invalid(:states, "a FlashAttention.States", Error.show(term))}

  defp native_tensor?({name, {_data, _type, shape}}), do: is_atom(name) and is_tuple(shape)
  defp native_tensor?(_other), do: false

  defp names_of?({name, names}, tensors) do
    case List.keyfind(tensors, name, 0) do
      {^name, {_data, _type, shape}} -> Tensor.names?(names, shape)
      nil -> false
    end
  end
end
