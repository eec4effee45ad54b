defmodule FlashAttention.Distributed.NCCL do
  @moduledoc """
  Tensors from GPU to GPU, by NCCL: `libnccl.so.2`, of 2.14 or later, where the system's loader finds it
  (`LD_LIBRARY_PATH`).

  Each rank has a GPU of its own, be the ranks processes of one node or of several. Tensors in the host's memory are
  copied to the GPU, and results are where q was. Links are made when the group is joined.
  """

  alias FlashAttention.{Error, Native}
  alias FlashAttention.Distributed.{Inbox, Passes, Rows, Transport}

  @behaviour Transport

  @impl true
  def open(%{num_ranks: 1}), do: {:ok, nil}

  def open(group) do
    made = if group.rank == 0, do: Native.link_id(group.device), else: :none
    timeout = if group.timeout == :infinity, do: -1, else: group.timeout

    with {:ok, %{0 => made}} <- Passes.share(group, {1, :link_id}, made),
         {:ok, id} <- native(made),
         {:ok, link} <- native(Native.link_open(group.device, id, group.num_ranks, group.rank, timeout)),
         do: connect(group, link)
  end

  # From here on a rank that is gone, or late, ends the link of all. None can have left before it is done with this.
  defp connect(group, link) do
    with :ok <- Inbox.on_break(group.inbox, fn -> abort(link) end),
         :ok <- Inbox.whole(group.inbox),
         :ok <- Inbox.guard(group.inbox, group.timeout),
         exchanged = first_exchange(group, link),
         :ok <- Inbox.unguard(group.inbox),
         :ok <- told(exchanged, group) do
      {:ok, link}
    else
      {:error, error} ->
        abort(link)
        {:error, error}
    end
  end

  # NCCL connects two ranks when they first exchange something; that takes long.
  defp first_exchange(group, link) do
    others = for rank <- 0..(group.num_ranks - 1), rank != group.rank, do: rank

    with {:ok, given} <- Native.allocate(group.device, 16),
         {:ok, got} <- Native.allocate(group.device, 16),
         transfers =
           for(rank <- others, {way, memory} <- [send: given, receive: got], do: {way, rank, memory, 0, 16}),
         {:ok, exchange} <- Native.link_begin(link, transfers),
         do: Native.link_await(exchange)
  end

  @impl true
  def bring(group, {data, type, shape}) when is_binary(data) do
    with {:ok, memory} <- native(Native.upload(group.device, data)), do: {:ok, {memory, type, shape}}
  end

  def bring(group, {memory, _type, _shape} = tensor) when is_reference(memory) do
    case Native.memory_info(memory) do
      {device, _address, _bytes} when device == group.device -> {:ok, tensor}
      {device, _, _} -> {:error, Error.invalid(:device, inspect(group.device), "memory of #{inspect(device)}")}
      {:error, error} -> {:error, Error.from_native(error)}
    end
  end

  @impl true
  def results, do: :device

  @impl true
  def begin(group, _number, gives, gets, likes) do
    rows = gets |> Enum.flat_map(&elem(&1, 1)) |> Enum.sum()

    with {:ok, tensors} <- allocate_all(group, likes, rows),
         {:ok, exchange} <- exchange(group, gives(gives) ++ gets(gets, tensors)),
         do: {:ok, {exchange, tensors}}
  end

  defp exchange(_group, []), do: {:ok, nil}
  defp exchange(group, transfers), do: group.link |> Native.link_begin(transfers) |> told(group)

  defp allocate_all(group, likes, rows) do
    Enum.reduce_while(likes, {:ok, []}, fn {_data, type, shape}, {:ok, tensors} ->
      shape = put_elem(shape, 1, rows)

      case native(Native.allocate(group.device, elem(shape, 0) * rows * Rows.row_bytes(type, shape))) do
        {:ok, memory} -> {:cont, {:ok, tensors ++ [{memory, type, shape}]}}
        {:error, error} -> {:halt, {:error, error}}
      end
    end)
  end

  # Tensor by tensor, batch by batch, range by range: as the other rank gets them.
  defp gives(gives) do
    List.flatten(
      for {rank, tensors} <- gives, {tensor, ranges} <- tensors, do: transfers(:send, rank, tensor, ranges)
    )
  end

  defp gets(gets, tensors) do
    {transfers, _end} =
      Enum.map_reduce(gets, 0, fn {rank, counts}, at ->
        {ranges, at} = Enum.map_reduce(counts, at, &{{&2, &2 + &1}, &2 + &1})
        {for(tensor <- tensors, do: transfers(:receive, rank, tensor, ranges)), at}
      end)

    List.flatten(transfers)
  end

  defp transfers(way, rank, {memory, type, {batch, seqlen, _, _} = shape}, ranges) do
    row = Rows.row_bytes(type, shape)

    for b <- 0..(batch - 1)//1,
        {first, last} <- ranges,
        do: {way, rank, memory, (b * seqlen + first) * row, (last - first) * row}
  end

  @impl true
  def await(_group, {nil, tensors}), do: {:ok, tensors}

  def await(group, {exchange, tensors}) do
    Inbox.guard(group.inbox, group.timeout)
    awaited = Native.link_await(exchange)
    with :ok <- Inbox.unguard(group.inbox), :ok <- told(awaited, group), do: {:ok, tensors}
  end

  # Where another rank is gone, that is why.
  defp told({:error, error}, group) do
    with :ok <- Inbox.whole(group.inbox), do: {:error, Error.from_native(error)}
  end

  defp told(done, _group), do: done

  @impl true
  def abort(nil), do: :ok

  def abort(link) do
    Native.link_abort(link)
    :ok
  end

  @impl true
  def close(link), do: abort(link)

  defp native({:error, error}), do: {:error, Error.from_native(error)}
  defp native(done), do: done
end
