defmodule FlashAttention.Examples.ByteModel.Writer do
  @moduledoc false

  # Text from a trained model, byte by byte. See FlashAttention.Examples.ByteModel.generate/5.

  alias FlashAttention.Tensor
  alias FlashAttention.Examples.ByteModel.{Embed, Head}

  # The next position, the query of the last one, and keys and values, newest first, of all that are kept.
  defstruct position: 0, q: nil, keys: [], values: []

  def generate(model, params, prompt, count, opts) do
    opts = Keyword.validate!(opts, temperature: 0.7, seed: 0)
    stage = %{model: model, tables: Embed.tables(model, params), sink: params.sink}

    # A text starts after blank lines.
    {context, memory} =
      for <<byte <- "\n" <> prompt>>, reduce: {[?\n, ?\n, ?\n], %__MODULE__{}} do
        {[previous, second, _], memory} -> read(stage, [byte, previous, second], memory)
      end

    write(stage, context, memory, count, opts[:temperature], :rand.seed_s(:exsss, opts[:seed]), [])
  end

  defp write(_stage, _context, _memory, 0, _temperature, _random, written),
    do: written |> Enum.reverse() |> :erlang.list_to_binary()

  defp write(stage, [previous, second, _], memory, count, temperature, random, written) do
    {byte, random} = stage |> logits(memory) |> sample(temperature, random)
    {context, memory} = read(stage, [byte, previous, second], memory)
    write(stage, context, memory, count - 1, temperature, random, [byte | written])
  end

  # context: the byte at the next position, and the two before it
  defp read(%{model: model} = stage, context, memory) do
    phases = Embed.phases(model, memory.position..memory.position)
    windows = for byte <- context, do: [[byte]]
    {q, k, v, _sinks} = Embed.inputs(model, stage.tables, stage.sink, windows, phases)

    {context,
     %__MODULE__{
       position: memory.position + 1,
       q: q,
       keys: Enum.take([k.data | memory.keys], model.seqlen),
       values: Enum.take([v.data | memory.values], model.seqlen)
     }}
  end

  # Every kept position is visible, and phases say where it is, so that their order does not matter.
  defp logits(%{model: model} = stage, memory) do
    shape = {1, length(memory.keys), model.num_heads, model.head_dim}

    [k, v] =
      for rows <- [memory.keys, memory.values], do: Tensor.new(IO.iodata_to_binary(rows), model.type, shape)

    o = FlashAttention.forward!(memory.q, k, v, causal: false, sink: stage.sink, device: model.device)
    Head.logits(model, o)
  end

  defp sample(logits, temperature, random) when temperature == 0 do
    {_logit, byte} = logits |> Enum.with_index() |> Enum.max_by(fn {logit, _byte} -> logit end)
    {byte, random}
  end

  defp sample(logits, temperature, random) do
    top = Enum.max(logits)
    weights = for logit <- logits, do: :math.exp((logit - top) / temperature)
    {uniform, random} = :rand.uniform_s(random)
    {pick(weights, uniform * Enum.sum(weights), 0), random}
  end

  # Rounding may leave a little when all weights are spent: then it is the last byte's.
  defp pick([weight | rest], left, byte) when left >= weight and rest != [],
    do: pick(rest, left - weight, byte + 1)

  defp pick(_weights, _left, byte), do: byte
end
