# Masks inside of numerical definitions: the same bands as FlashAttention.Mask.Bands has of lists, from tensors whose
# numbers are not known yet. How many bands there are is known: it is a shape.
if Code.ensure_loaded?(Nx.Container) do
  defmodule FlashAttention.Mask.Nx do
    @moduledoc false

    alias FlashAttention.{Error, Mask}

    @unbounded 0x7FFFFFFF

    @doc "The bands of a mask, s32 `[batch or 1, num_bands, 6]`, for a problem of that size."
    def bands(%Mask{} = mask, size) do
      numbers = Map.new(mask.numbers, fn {name, numbers} -> {name, tensor(mask.kind, name, numbers)} end)
      mask.kind |> of(numbers, mask.static, size) |> within_window(mask.window)
    end

    @doc "Numbers of a mask as an Nx tensor, s32."
    def tensor(kind, name, %Nx.Tensor{type: type, shape: shape} = numbers) do
      Mask.Bands.check_tensor!(kind, name, type, shape)
      Nx.as_type(numbers, :s32)
    end

    def tensor(kind, name, []),
      do: raise(Error.invalid(Mask.Bands.argument(kind, name), "one number at least", "none"))

    # Bands of a batch, of which there may be none.
    def tensor(_kind, _name, [band | _] = bands) when band == [] or is_tuple(hd(band)), do: of_bands(bands)
    def tensor(kind, name, list) when is_list(list), do: tensor(kind, name, Nx.tensor(list, type: :s32))

    def tensor(kind, name, numbers) do
      {data, type, shape} = Mask.Bands.read!(kind, name, numbers)
      data |> Nx.from_binary(type) |> Nx.reshape(shape) |> Nx.as_type(:s32)
    end

    defp of_bands(bands), do: tensor(:bands, :bands, Mask.Bands.to_tensor(bands))

    # No sequence: Nx has no tensors without elements, and the library wants one band at least.
    defp of(:packed, %{q: %{shape: {1}}, k: %{shape: {1}}}, _static, _size), do: of_bands([[]])

    defp of(:packed, %{q: q, k: k}, _static, _size) do
      {q_begin, q_end} = runs(q)
      {k_begin, k_end} = runs(k)
      stack([q_begin, q_end, k_begin, k_end, @unbounded, @unbounded]) |> Nx.new_axis(0)
    end

    defp of(:lengths, %{k: k} = numbers, [side: side], {seqlen_q, seqlen_k}) do
      rows = if q = numbers[:q], do: range(side, q, seqlen_q), else: [0, seqlen_q]
      stack(rows ++ range(side, k, seqlen_k) ++ [@unbounded, @unbounded]) |> Nx.new_axis(1)
    end

    defp of(:prefix, %{k: lengths}, _static, {seqlen_q, seqlen_k}) do
      lengths = Nx.min(lengths, seqlen_k)
      first = Nx.max(0, Nx.add(lengths, seqlen_q - seqlen_k))
      before = stack([0, seqlen_q, 0, lengths, @unbounded, @unbounded])
      Nx.stack([before, stack([first, seqlen_q, lengths, seqlen_k, @unbounded, 0])], axis: 1)
    end

    defp of(:segments, %{q: q, k: k}, static, _size) do
      most = static[:max_segments] || raise Error.invalid(:max_segments, "a number, of ids in a tensor", "none")
      rank = Nx.cumulative_sum(Nx.pad(changes(q), 0, [{0, 0, 0}, {1, 0, 0}]), axis: 1)
      rows = Nx.equal(Nx.new_axis(rank, 1), Nx.reshape(Nx.iota({most}), {1, most, 1}))
      {q_begin, q_end} = places(rows)
      ids = Nx.reduce_max(Nx.select(rows, Nx.new_axis(q, 1), -@unbounded), axes: [2], keep_axes: true)
      there = Nx.any(rows, axes: [2], keep_axes: true)
      {k_begin, k_end} = places(Nx.logical_and(Nx.equal(Nx.new_axis(k, 1), ids), there))
      stack([q_begin, q_end, k_begin, k_end, @unbounded, @unbounded])
    end

    defp of(:block_causal, numbers, [length: _] = static, size),
      do: Mask.Bands.of(:block_causal, numbers, static, size) |> of_bands()

    defp of(_kind, %{bands: bands}, _static, _size),
      do: if(Nx.rank(bands) == 2, do: Nx.new_axis(bands, 0), else: bands)

    defp range(:right, lengths, _seqlen), do: [0, lengths]
    defp range(:left, lengths, seqlen), do: [Nx.subtract(seqlen, lengths), seqlen]

    # [n + 1] ends as where [n] runs begin and end.
    defp runs(ends), do: {ends[0..-2//1], ends[1..-1//1]}

    defp changes(ids), do: Nx.not_equal(ids[[.., 1..-1//1]], ids[[.., 0..-2//1]]) |> Nx.as_type(:s32)

    # [batch, runs, seqlen] of true in one run: where that begins and ends.
    defp places(rows) do
      first = Nx.argmax(rows, axis: 2, tie_break: :low)
      {Nx.as_type(first, :s32), Nx.add(first, Nx.sum(rows, axes: [2])) |> Nx.as_type(:s32)}
    end

    # Six numbers, of which some are tensors of one shape, along a new last axis.
    defp stack(words) do
      shape = Enum.find_value(words, fn word -> if is_struct(word, Nx.Tensor), do: Nx.shape(word) end)
      words = Enum.map(words, &(&1 |> Nx.as_type(:s32) |> Nx.broadcast(shape)))
      Nx.stack(words, axis: tuple_size(shape))
    end

    defp within_window(bands, {:infinity, :infinity}), do: bands

    defp within_window(bands, {left, right}) do
      most = for side <- [left, right], do: if(side == :infinity, do: @unbounded, else: min(side, @unbounded))
      all = List.duplicate(@unbounded, 4) ++ most
      Nx.min(bands, Nx.tensor(all, type: :s32))
    end
  end

  # A mask may be an argument and a part of a model's inputs: its numbers become tensors.
  defimpl Nx.Container, for: FlashAttention.Mask do
    def traverse(mask, acc, fun) do
      {numbers, acc} =
        mask.numbers
        |> Enum.sort()
        |> Enum.map_reduce(acc, fn {name, numbers}, acc ->
          {tensor, acc} = fun.(tensor(mask.kind, name, numbers), acc)
          {{name, tensor}, acc}
        end)

      {%{mask | numbers: Map.new(numbers)}, acc}
    end

    def reduce(mask, acc, fun),
      do:
        mask.numbers
        |> Enum.sort()
        |> Enum.reduce(acc, fn {name, numbers}, acc -> fun.(tensor(mask.kind, name, numbers), acc) end)

    def serialize(mask), do: {__MODULE__, Enum.sort(mask.numbers), Map.take(mask, [:kind, :static, :window])}
    def deserialize(numbers, rest), do: struct!(FlashAttention.Mask, Map.put(rest, :numbers, Map.new(numbers)))

    # What a transformation made of the numbers passes through.
    defp tensor(kind, name, numbers) when is_list(numbers) or is_struct(numbers, FlashAttention.Tensor),
      do: FlashAttention.Mask.Nx.tensor(kind, name, numbers)

    defp tensor(_kind, _name, numbers), do: numbers
  end
end
