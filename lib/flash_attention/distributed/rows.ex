defmodule FlashAttention.Distributed.Rows do
  @moduledoc false
  # Rows of tensors [batch, seqlen, heads, head_dim], as the NIF has them: {data, type, shape}. What is computed with them is
  # computed where the group's transport leaves tensors.

  alias FlashAttention.{Error, Native}

  @doc "Some rows of each batch of a tensor in the host's memory: a list of pieces of that memory a batch."
  def take({data, type, {batch, seqlen, _, _} = shape}, ranges) do
    row = row_bytes(type, shape)

    for b <- 0..(batch - 1)//1,
        do:
          for({first, last} <- ranges, do: binary_part(data, (b * seqlen + first) * row, (last - first) * row))
  end

  @doc "A tensor like that one of the rows that several gave, so many of each batch, one behind the other."
  def join(taken, {_data, type, shape}, seqlen),
    do: {taken |> Enum.zip_with(& &1) |> IO.iodata_to_binary(), type, put_elem(shape, 1, seqlen)}

  @doc "Whether so many rows are fewer than all, and can be read where they are, as well aligned as the whole."
  def slices?({_data, type, {batch, seqlen, _, _} = shape}, first, count),
    do: batch == 1 and count < seqlen and rem(first * row_bytes(type, shape), 256) == 0

  @doc "Some rows of a tensor of one batch, without copying them."
  def slice({data, type, shape}, first, count) do
    row = row_bytes(type, shape)
    {part_of(data, first * row, count * row), type, put_elem(shape, 1, count)}
  end

  defp part_of(data, first, bytes) when is_binary(data), do: binary_part(data, first, bytes)

  defp part_of(memory, first, bytes) do
    {_device, address, _all} = Native.memory_info(memory)
    {address + first, bytes, memory}
  end

  @doc "The same rows of an lse `[1, heads, seqlen]`: a copy, as they do not lie together."
  def slice_lse(group, {data, type, {1, heads, seqlen}}, first, count) do
    rows = {{data, type, {heads, seqlen}}, [{first, 0, count}]}

    with {:ok, {data, _type, _shape}} <- told(Native.sum([rows], {type, {heads, count}}, device(group))),
         do: {:ok, {data, type, {1, heads, count}}}
  end

  def row_bytes({_class, bits}, {_batch, _seqlen, heads, head_dim}), do: heads * head_dim * div(bits, 8)

  @doc "The sum of a tensor and of segments of others: `FlashAttention.Native.sum/3`."
  def sum(_group, first, []), do: {:ok, first}

  def sum(group, {_data, type, shape} = first, parts) do
    all = [{0, 0, elem(shape, 1)}]
    told(Native.sum([{first, all} | parts], {type, shape}, device(group)))
  end

  @doc "Attention over all columns, of attention over some of them each: `{o, lse}` of `[{o, lse}]`, with sinks if any."
  def merge(group, [{{_data, type, _shape}, _lse} | _] = parts, sink) do
    tensors = with_sink(%{parts: parts, type: type}, sink)

    with {:ok, %{o: o, lse: lse}} <-
           told(Native.merge(:forward, tensors, device(group), group.transport.results())),
         do: {:ok, {o, lse}}
  end

  @doc "The gradient of the sinks, a sum over rows of `%{dout:, o:, lse:}`."
  def dsink(group, states, sink) do
    tensors = states |> Map.put(:parts, []) |> with_sink(sink)

    with {:ok, %{dsink: dsink}} <-
           told(Native.merge(:backward, tensors, device(group), group.transport.results())),
         do: {:ok, dsink}
  end

  defp with_sink(tensors, nil), do: tensors
  defp with_sink(tensors, sink), do: Map.put(tensors, :sink, sink)

  defp device(group), do: if(group.transport.results() == :device, do: group.device, else: {:cpu, 0})

  defp told({:error, error}), do: {:error, Error.from_native(error)}
  defp told(done), do: done
end
