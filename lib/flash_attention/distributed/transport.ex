defmodule FlashAttention.Distributed.Transport do
  @moduledoc """
  How tensors get from rank to rank: a behaviour with two implementations.

    * `FlashAttention.Distributed.Messages` carries them as binaries in messages of Erlang, within a node and between
      nodes. Where ranks compute on GPUs, tensors go through the host's memory.
    * `FlashAttention.Distributed.NCCL` carries them between the memories of GPUs.

  Tensors are those of `FlashAttention.Native`, `[batch, seqlen, heads, head_dim]`. Every rank makes the same sequence of
  exchanges, with what it gives matching what others get. A rank that fails ends the exchanges of all (`abort/1`).
  """

  alias FlashAttention.{Error, Native}
  alias FlashAttention.Distributed.{Group, Ranges}

  @typedoc "To a rank: these ranges of the rows of each tensor."
  @type give :: {non_neg_integer, [{Native.tensor(), Ranges.t()}]}

  @typedoc "From a rank: of each tensor ranges of so many rows, as that rank gives them."
  @type get :: {non_neg_integer, [pos_integer]}

  @doc "Connects the ranks. What it returns is `group.link` from then on."
  @callback open(Group.t()) :: {:ok, link :: term} | {:error, Error.t()}

  @doc "Where the transport wants a tensor to lie, which is a binary or memory of a device, and results of passes: the tensor there."
  @callback bring(Group.t(), Native.tensor()) :: {:ok, Native.tensor()} | {:error, Error.t()}

  @doc "Where passes leave their results for the transport."
  @callback results() :: :host | :device

  @doc """
  Begins an exchange, and does not wait for it. The number tells a call's exchanges apart. `likes` are tensors of the types
  and shapes of those that come, but for the number of rows.
  """
  @callback begin(Group.t(), number :: term, [give], [get], likes :: [Native.tensor()]) ::
              {:ok, handle :: term} | {:error, Error.t()}

  @doc "The tensors that came, of each the rows of all ranks behind one another, in the order in which they were named."
  @callback await(Group.t(), handle :: term) :: {:ok, [Native.tensor()]} | {:error, Error.t()}

  @doc "Ends every exchange that is under way, from any process: a rank is gone."
  @callback abort(link :: term) :: :ok

  @doc "Gives back what the link holds."
  @callback close(link :: term) :: :ok
end
