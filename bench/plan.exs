# What context parallelism costs on more GPUs than there are here: the deals and stages of FlashAttention.Distributed as
# they are, with the times of kernels and links that were measured. `make bench-plan` prints the page.
defmodule Bench.Plan do
  alias FlashAttention.Distributed
  alias FlashAttention.Distributed.{Bands, Ranges, Stages}
  alias FlashAttention.Mask

  @heads 64
  @kv_heads 8
  @dim 128
  # bench/results/h200.md, bf16, head_dim 128, 8,192 tokens and longer; the time that a call takes beside its kernels.
  @forward_flops 706.0e12
  @backward_flops 593.0e12
  @call 40.0e-6
  # Of a GPU, one way: NVLink within eight of them, and a 400 Gbit/s adapter each beyond; what an exchange takes to begin.
  @near 360.0e9
  @far 45.0e9
  @latency 30.0e-6
  @a_node 8
  @stages [2, 4, 8, 16, 31]
  @sampled 12

  def run do
    IO.write("""
    # Context parallelism, planned

    `make bench-plan`. One layer of attention of #{@heads} heads on #{@kv_heads} key heads, head_dim #{@dim}, bf16, batch 1. Deals and stages
    are those that `FlashAttention.Distributed` makes, with the best of #{Enum.join(@stages, ", ")} for `:stages`; times are a model's:

    * kernels take #{round(@forward_flops / 1.0e12)} TFLOP/s forward and #{round(@backward_flops / 1.0e12)} backward over visible cells (h200.md), and #{round(@call * 1.0e6)} us a call;
    * a GPU receives #{round(@near / 1.0e9)} GB/s from the #{@a_node} of its node and #{round(@far / 1.0e9)} GB/s from others, both at once: four fifths and nine
      tenths of what NVLink and an adapter of 400 Gbit/s are sold as; an exchange takes #{round(@latency * 1.0e6)} us more;
    * transfers of a stage begin when the stage before is computed, and take nothing from kernels; the links of no two ranks
      meet; merges and sums, which move a rank's own rows a few times (1 to 2 % at 8,192 tokens a GPU), are left out;
    * efficiency is the kernels' time at a perfect balance, as a part of the slowest rank's time; of #{@sampled} ranks, where there are more.

    MB is what a rank receives forward, at most. Ring and zigzag pass all keys around, gathered keys fetch them first, all three
    #{"(N-1)/N"} of them; Ulysses exchanges q, k, v and o for heads, and so takes at most #{@kv_heads} GPUs without copies of keys. A ring
    of whole parts waits in each step for the rank that sees most. "Both" is forward and backward of this library.

    What it says: eight GPUs of a node hide their transfers from 65,536 causal tokens on. Between nodes keys decide: a GPU needs
    some 4,096 causal tokens of its own to hide them, and many stages, so that little travels before the first. Of packed
    documents few keys travel; with more ranks than documents the chunks of one are on many ranks, whose keys are most of the time.

    | mask | tokens | GPUs | imbalance | stages | MB: this | ring, zigzag, gathered | Ulysses | this | both | zigzag | ring | gathered | Ulysses |
    |---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
    """)

    for mask <- [:causal, :packed],
        tokens <- [8192, 65_536, 262_144, 1_048_576],
        ranks <- [8, 64, 256, 1024],
        div(tokens, ranks) >= 128,
        do: row(mask, tokens, ranks)
  end

  defp options(:causal, _tokens), do: []
  defp options(:packed, tokens), do: [mask: Mask.packed(documents(tokens))]

  # Lengths from 256 on, the same in every run: many short ones and few long ones, 16,384 at most.
  defp documents(tokens) do
    Stream.unfold({:rand.seed_s(:exsss, 5), tokens}, fn
      {_state, 0} ->
        nil

      {state, left} ->
        {x, state} = :rand.uniform_s(state)
        length = min(left, round(256 * :math.pow(64, x)))
        {length, {state, left - length}}
    end)
    |> Enum.to_list()
  end

  defp row(mask, tokens, ranks) do
    deal = Distributed.deal({tokens, tokens}, ranks, options(mask, tokens))
    area = deal.areas |> Map.values() |> Enum.sum()
    sampled = Enum.take_every(0..(ranks - 1), max(1, div(ranks, @sampled)))
    ideal = flops(area) / ranks
    {forward, backward} = {ideal / @forward_flops, 2.5 * ideal / @backward_flops}

    {both, own, stages, plans} =
      for stages <- @stages, stages < ranks or stages == hd(@stages) do
        plans = for rank <- sampled, do: plan(deal, rank, stages)
        own = plans |> Enum.map(&forward_time/1) |> Enum.max()
        {plans |> Enum.map(&(forward_time(&1) + backward_time(&1))) |> Enum.max(), own, stages, plans}
      end
      |> Enum.min()

    received = plans |> Enum.map(&Enum.sum(for {_area, near, far} <- &1, do: near + far)) |> Enum.max()
    whole = (ranks - 1) / ranks * tokens

    cells = [
      mask,
      tokens,
      ranks,
      Float.round(Distributed.Deal.imbalance(deal), 3),
      stages,
      megabytes(received),
      megabytes(whole),
      if(ranks <= @kv_heads, do: round(ulysses_bytes(tokens, ranks) / 1.0e6), else: "-"),
      percent(forward, own),
      percent(forward + backward, both),
      percent(forward, lock_step(area / ranks, tokens, ranks)),
      percent(forward, ring(mask, deal, area, tokens, ranks)),
      percent(forward, gathered(area / ranks, tokens, ranks)),
      if(ranks <= @kv_heads,
        do: percent(forward, forward + @call + 4 * @latency + ulysses_bytes(tokens, ranks) / @near),
        else: "-"
      )
    ]

    IO.puts("| " <> Enum.join(cells, " | ") <> " |")
  end

  # ---- this library --------------------------------------------------------------------------------------

  # Of each stage: its area, and the columns that come from the rank's node and from others.
  defp plan(deal, rank, stages) do
    rows = Ranges.placed(deal.rows[rank])

    for %{sources: sources} <- Stages.of(deal, rank, stages) do
      {near, far} =
        Enum.split_with(sources, fn {owner, _ranges} -> div(owner, @a_node) == div(rank, @a_node) end)

      columns = for {_owner, ranges} <- sources, range <- ranges, do: range
      {stage_area(deal.bands, rows, columns), count(near, rank), count(far, rank)}
    end
  end

  defp count(sources, rank),
    do: Enum.sum(for {owner, ranges} <- sources, owner != rank, do: Ranges.count(ranges))

  defp stage_area(batches, rows, columns) do
    placed = Ranges.placed(Ranges.union(columns))
    for(bands <- batches, band <- Bands.local(bands, rows, placed), do: Mask.Bands.area(band)) |> Enum.sum()
  end

  defp forward_time([{area, _, _} | stages]),
    do: pipeline(@call + flops(area) / @forward_flops, stages, @forward_flops, 1)

  # Keys again, and gradients the other way, which begin when their stage is computed.
  defp backward_time([{area, _, _} | stages]) do
    last = List.last([{0, 0, 0} | stages])
    pipeline(@call + 2.5 * flops(area) / @backward_flops, stages, @backward_flops, 2.5) + transfer(last)
  end

  defp pipeline(own, stages, speed, factor) do
    {time, _began} =
      Enum.reduce(stages, {own, 0.0}, fn {area, _, _} = stage, {done, began} ->
        begin = max(done, began + transfer(stage))
        {begin + if(area > 0, do: @call, else: 0.0) + factor * flops(area) / speed, begin}
      end)

    time
  end

  defp transfer({_area, 0, 0}), do: 0.0
  defp transfer({_area, near, far}), do: @latency + max(bytes(near) / @near, bytes(far) / @far)

  # ---- others --------------------------------------------------------------------------------------------

  # A ring moves as fast as its slowest link: one between nodes, where there are several.
  defp link(ranks), do: if(ranks <= @a_node, do: @near, else: @far)

  # Zigzag, of any mask, as if it were balanced in each step.
  defp lock_step(area, tokens, ranks) do
    step = max(@call + flops(area / ranks) / @forward_flops, @latency + bytes(tokens / ranks) / link(ranks))
    @call + flops(area / ranks) / @forward_flops + (ranks - 1) * step
  end

  # Rank r has part r: in most steps some rank sees all of the part that it got.
  defp ring(:causal, _deal, _area, tokens, ranks) do
    part = tokens / ranks
    step = max(@call + flops(part * part) / @forward_flops, @latency + bytes(part) / link(ranks))
    @call + flops(part * part / 2) / @forward_flops + (ranks - 1) * step
  end

  defp ring(:packed, _deal, area, tokens, ranks), do: lock_step(area / ranks, tokens, ranks)

  defp gathered(area, tokens, ranks) do
    others = tokens * (ranks - 1) / ranks
    near = tokens * (min(ranks, @a_node) - 1) / ranks
    transfer({area, near, others - near}) + @call + flops(area) / @forward_flops
  end

  defp ulysses_bytes(tokens, ranks),
    do: (ranks - 1) / ranks * tokens / ranks * (2 * @heads + 2 * @kv_heads) * @dim * 2

  # ---- units ---------------------------------------------------------------------------------------------

  defp flops(area), do: 4.0 * area * @heads * @dim
  # k and v of so many columns.
  defp bytes(columns), do: columns * @kv_heads * @dim * 2 * 2
  defp megabytes(columns), do: round(bytes(columns) / 1.0e6)
  defp percent(ideal, time), do: "#{round(100 * ideal / time)} %"
end

Bench.Plan.run()
