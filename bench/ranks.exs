# What ranks cost on this machine's processors: one rank of FlashAttention.Distributed beside a plain call, and several
# ranks beside one. `make bench-ranks` prints the page. BENCH_ARGS: --length 16384 --heads 2 --dim 64 --pairs 7 --ranks 2
defmodule Bench.Ranks do
  alias FlashAttention.Distributed
  alias FlashAttention.Distributed.Ranges
  alias FlashAttention.Tensor

  @strict [length: :integer, heads: :integer, dim: :integer, pairs: :integer, ranks: :integer]
  @defaults [length: 16_384, heads: 2, dim: 64, pairs: 7, ranks: 2]

  def run(args) do
    {given, []} = OptionParser.parse!(args, strict: @strict)
    opts = @defaults |> Keyword.merge(given) |> Map.new()
    [%{name: name, features: features, threads: threads} | _] = FlashAttention.backend_info().devices

    IO.write("""
    # Ranks on processors

    `make bench-ranks`: #{name} (#{Enum.join(features, ", ")}), #{threads} threads. f32, #{opts.length} causal tokens, #{opts.heads} heads, head_dim #{opts.dim};
    all ranks are processes of one VM, which share its threads. Calls alternate, #{opts.pairs} pairs after one that does not count:
    "times" is the median of the pairs' quotients, the second time by the first, with the least and the most beside it, as the
    machine may be busy with something else; the milliseconds are medians too.

    | pass | | ms | | ms | times | least | most |
    |---|---|--:|---|--:|--:|--:|--:|
    """)

    rows("plain call", &plain/1, "1 rank", &ranks(&1, 1), opts)
    rows("1 rank", &ranks(&1, 1), "#{opts.ranks} ranks", &ranks(&1, opts.ranks), opts)
  end

  defp rows(first_name, first, second_name, second, opts) do
    [_warm | pairs] = for _ <- 0..opts.pairs, do: {with_processors(first, opts), with_processors(second, opts)}

    for {pass, index} <- [{"forward", 0}, {"backward", 1}, {"both, processors' time", 2}] do
      times = for {x, y} <- pairs, do: {elem(x, index), elem(y, index)}
      {ours, theirs} = Enum.unzip(times)
      quotients = for {x, y} <- times, do: y / x

      cells = [
        pass,
        first_name,
        milliseconds(ours),
        second_name,
        milliseconds(theirs),
        Float.round(median(quotients), 3),
        Float.round(Enum.min(quotients), 3),
        Float.round(Enum.max(quotients), 3)
      ]

      IO.puts("| " <> Enum.join(cells, " | ") <> " |")
    end
  end

  # The third is the time of all processors that all of it took, which another process's work does not lengthen by itself.
  defp with_processors(call, opts) do
    {before, _} = :erlang.statistics(:runtime)
    {forward, backward} = call.(opts)
    {now, _} = :erlang.statistics(:runtime)
    {forward, backward, 1000 * (now - before)}
  end

  defp milliseconds(times), do: round(median(times) / 1000)
  defp median(list), do: list |> Enum.sort() |> Enum.at(div(length(list), 2))

  # {microseconds of the forward, of the backward}
  defp plain(opts) do
    [q, k, v, dout] = for seed <- 1..4, do: tensor(seed, opts.length, opts)
    {forward, {:ok, o, lse}} = :timer.tc(fn -> FlashAttention.forward_with_states(q, k, v, device: :cpu) end)

    {backward, {:ok, _, _, _}} =
      :timer.tc(fn -> FlashAttention.backward(dout, q, k, v, o, lse, device: :cpu) end)

    {forward, backward}
  end

  # The slowest rank's. All begin a pass together: else one that was done with its forward early would count what the others
  # still had to do of theirs as its backward's.
  defp ranks(opts, count) do
    deal = Distributed.deal({opts.length, opts.length}, count)
    [forward, backward] = for _pass <- 1..2, do: spawn_link(fn -> gather(count) end)

    {:ok, times} =
      Distributed.run(List.duplicate([device: :cpu], count), fn group ->
        rows = Ranges.count(deal.rows[group.rank])
        [q, k, v, dout] = for seed <- 1..4, do: tensor(seed, rows, opts)
        meet(forward)
        {forward, {:ok, _o, states}} = :timer.tc(fn -> Distributed.forward(group, deal, q, k, v) end)
        meet(backward)
        {backward, {:ok, _, _, _}} = :timer.tc(fn -> Distributed.backward(group, dout, states) end)
        {forward, backward}
      end)

    {times |> Enum.map(&elem(&1, 0)) |> Enum.max(), times |> Enum.map(&elem(&1, 1)) |> Enum.max()}
  end

  defp gather(count) do
    ranks = for _rank <- 1..count, do: receive(do: ({:here, rank} -> rank))
    for rank <- ranks, do: send(rank, :all_here)
  end

  defp meet(gathering) do
    send(gathering, {:here, self()})
    receive(do: (:all_here -> :ok))
  end

  # Normally distributed numbers, some thousands of them over and over.
  defp tensor(seed, rows, opts) do
    {some, _} = Enum.map_reduce(1..4096, :rand.seed_s(:exsss, seed), fn _, state -> :rand.normal_s(state) end)
    some = for x <- some, into: <<>>, do: <<x::float-32-native>>
    bytes = rows * opts.heads * opts.dim * 4
    data = some |> :binary.copy(div(bytes, byte_size(some)) + 1) |> binary_part(0, bytes)
    Tensor.new(data, :f32, {1, rows, opts.heads, opts.dim})
  end
end

Bench.Ranks.run(System.argv())
