defmodule FlashAttention.Distributed.Rows do
  @moduledoc false
  # Rows of tensors [batch, seqlen, heads, head_dim] in the host's memory, as the NIF has them: {data, type, shape}.

  alias FlashAttention.Check.Values

  @doc "Some rows of each batch: a list of pieces of the tensor's memory a batch."
  def take({data, type, {batch, seqlen, _, _} = shape}, ranges) do
    row = row_bytes(type, shape)

    for b <- batches(batch),
        do:
          for({first, last} <- ranges, do: binary_part(data, (b * seqlen + first) * row, (last - first) * row))
  end

  @doc "A tensor like that one of the rows that several gave, one behind the other in each batch."
  def join([], {_data, type, shape}), do: {<<>>, type, put_elem(shape, 1, 0)}

  def join(taken, {_data, type, shape}) do
    data = taken |> Enum.zip_with(& &1) |> IO.iodata_to_binary()
    seqlen = div(byte_size(data), max(1, elem(shape, 0) * row_bytes(type, shape)))
    {data, type, put_elem(shape, 1, seqlen)}
  end

  @doc """
  The sum of parts, as a tensor of that type and shape: of each part some rows, `{its first row, the sum's, how many}`.

  Rows that no part has are 0. Parts are added in their order, in f32 (f64 where the type is), and the sum is rounded once.
  """
  def sum({_data, type, {batch, seqlen, heads, head_dim}}, parts) do
    row = heads * head_dim
    zero = List.duplicate(0.0, row)

    sums =
      for {{data, type, {_, part_seqlen, _, _}}, segments} <- parts,
          part = data |> Values.decode(type) |> Enum.chunk_every(row) |> List.to_tuple(),
          b <- batches(batch),
          {from, to, count} <- segments,
          i <- batches(count),
          reduce: %{} do
        sums ->
          numbers = elem(part, b * part_seqlen + from + i)
          Map.update(sums, {b, to + i}, numbers, &Enum.zip_with(&1, numbers, fn x, y -> x + y end))
      end

    data =
      for b <- batches(batch),
          i <- batches(seqlen),
          into: <<>>,
          do: Values.encode(Map.get(sums, {b, i}, zero), type)

    {data, type, {batch, seqlen, heads, head_dim}}
  end

  @doc "Attention over all columns, of attention over some of them each: `{o, lse}` of `[{o, lse}]`, with sinks if any."
  def merge([{{_, type, shape}, {_, lse_type, lse_shape}} | _] = parts, sink) do
    {batch, seqlen, heads, head_dim} = shape
    lses = for {_o, {data, type, _}} <- parts, do: data |> Values.decode(type) |> List.to_tuple()

    os =
      for {{data, type, _}, _lse} <- parts,
          do: data |> Values.decode(type) |> Enum.chunk_every(head_dim) |> List.to_tuple()

    sinks = sinks(sink, heads)

    lse =
      for b <- batches(batch), h <- batches(heads), i <- batches(seqlen), at = (b * heads + h) * seqlen + i do
        log_sum_exp(for lse <- Enum.map(lses, &elem(&1, at)) ++ sinks[h], lse != :neg_infinity, do: lse)
      end

    all = List.to_tuple(lse)

    o =
      for b <- batches(batch), i <- batches(seqlen), h <- batches(heads), into: <<>> do
        at = (b * heads + h) * seqlen + i

        for {o, lses} <- Enum.zip(os, lses),
            elem(lses, at) != :neg_infinity,
            reduce: List.duplicate(0.0, head_dim) do
          sum ->
            weight = :math.exp(elem(lses, at) - elem(all, at))
            Enum.zip_with(sum, elem(o, (b * seqlen + i) * heads + h), &(&1 + weight * &2))
        end
        |> Values.encode(type)
      end

    {{o, type, shape}, {encode_lse(lse, lse_type), lse_type, lse_shape}}
  end

  @doc "`dsink[t,h] = -sum_{b,i} exp(sink[t,h] - lse[b,h,i]) * dot(o[b,i,h], dout[b,i,h])`"
  def dsink(
        {dout, type, {batch, seqlen, heads, head_dim}},
        {o, type, _},
        {lse, lse_type, _},
        {_, _, sinks} = sink
      ) do
    [dout, o] = for x <- [dout, o], do: x |> Values.decode(type) |> Enum.chunk_every(head_dim)
    lse = lse |> Values.decode(lse_type) |> List.to_tuple()
    deltas = [dout, o] |> Enum.zip_with(fn [x, y] -> Values.dot(x, y) end) |> List.to_tuple()
    scores = sinks(sink, heads)

    sums =
      for t <- batches(elem(sinks, 0)), h <- batches(heads) do
        for b <- batches(batch), i <- batches(seqlen), reduce: 0.0 do
          sum ->
            p = :math.exp(Enum.at(scores[h], t) - elem(lse, (b * heads + h) * seqlen + i))
            sum - p * elem(deltas, (b * seqlen + i) * heads + h)
        end
      end

    {Values.encode(sums, {:f, 32}), {:f, 32}, sinks}
  end

  # The sinks of each head.
  defp sinks(nil, heads), do: Map.new(batches(heads), &{&1, []})

  defp sinks({data, type, {_count, heads}}, heads) do
    rows = data |> Values.decode(type) |> Enum.chunk_every(heads)
    Map.new(batches(heads), fn h -> {h, Enum.map(rows, &Enum.at(&1, h))} end)
  end

  defp log_sum_exp([]), do: :neg_infinity

  defp log_sum_exp(numbers) do
    most = Enum.max(numbers)
    most + :math.log(Enum.reduce(numbers, 0.0, &(&2 + :math.exp(&1 - most))))
  end

  defp encode_lse(numbers, {:f, bits} = type) do
    infinity = if bits == 32, do: <<0xFF800000::32-native>>, else: <<0xFFF0000000000000::64-native>>
    for x <- numbers, into: <<>>, do: if(x == :neg_infinity, do: infinity, else: Values.encode([x], type))
  end

  defp batches(count), do: 0..(count - 1)//1
  def row_bytes({_class, bits}, {_batch, _seqlen, heads, head_dim}), do: heads * head_dim * div(bits, 8)
end
