defmodule FlashAttention.Distributed.Messages do
  @moduledoc """
  Tensors as binaries in messages of Erlang: the transport of CPUs, and of GPUs that no NCCL connects.

  Within a node nothing is copied on the way. Between nodes messages take the nodes' connection, which should be a fast one
  (`inet_tls` or plain, and a network of its own where keys are long). What of a tensor lies on a GPU is read once a call.
  """

  alias FlashAttention.{Error, Native}
  alias FlashAttention.Distributed.{Inbox, Rows, Transport}

  @behaviour Transport

  @impl true
  def open(_group), do: {:ok, nil}

  @impl true
  def bring(_group, {data, _type, _shape} = tensor) when is_binary(data), do: {:ok, tensor}

  def bring(_group, {ref, type, shape}) when is_reference(ref) do
    case Native.read(ref) do
      {:ok, data} -> {:ok, {data, type, shape}}
      {:error, error} -> {:error, Error.from_native(error)}
    end
  end

  @impl true
  def results, do: :host

  @impl true
  def begin(group, number, gives, gets, likes) do
    for {rank, tensors} <- gives do
      taken = for {tensor, ranges} <- tensors, do: Rows.take(tensor, ranges)
      Inbox.post(group.peers[rank], group.rank, number, taken, :long)
    end

    seqlen = for({_rank, counts} <- gets, count <- counts, do: count) |> Enum.sum()
    {:ok, {for({rank, _counts} <- gets, do: {rank, number}), likes, seqlen}}
  end

  @impl true
  def await(group, {keys, likes, seqlen}) do
    with {:ok, came} <- Inbox.await(group.inbox, keys, group.timeout) do
      taken = Enum.map(keys, &came[&1])

      {:ok,
       for(
         {like, index} <- Enum.with_index(likes),
         do: taken |> Enum.map(&Enum.at(&1, index)) |> Rows.join(like, seqlen)
       )}
    end
  end

  @impl true
  def abort(_link), do: :ok

  @impl true
  def close(_link), do: :ok
end
