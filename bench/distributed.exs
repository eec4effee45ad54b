# Attention over the GPUs of this machine, a rank each, beside one GPU's own kernel: a page of Markdown. `make
# bench-distributed` runs it. BENCH_ARGS: --ranks 2 --lengths 16384,65536 --heads 16 --repeats 5 --stages 4 --transport nccl
defmodule Bench.Distributed do
  import Bitwise
  alias FlashAttention.{DeviceMemory, Distributed, Mask, Native, Tensor}
  alias FlashAttention.Distributed.{Messages, NCCL, Ranges, Stages, Transport}

  @dim 128
  @dtype {:bf, 16}

  # The transport with a clock: how long a rank waits for what the computation did not hide.
  defmodule Timed do
    @behaviour Transport
    def real, do: :persistent_term.get(__MODULE__)

    @impl true
    def open(group), do: real().open(group)
    @impl true
    def bring(group, tensor), do: real().bring(group, tensor)
    @impl true
    def results, do: real().results()
    @impl true
    def begin(group, number, gives, gets, likes),
      do: clock(:begin, fn -> real().begin(group, number, gives, gets, likes) end)

    @impl true
    def await(group, handle), do: clock(:await, fn -> real().await(group, handle) end)
    @impl true
    def abort(link), do: real().abort(link)
    @impl true
    def close(link), do: real().close(link)

    defp clock(name, fun) do
      {microseconds, result} = :timer.tc(fun)
      Process.put({:spent, name}, Process.get({:spent, name}, 0) + microseconds)
      result
    end

    def reset, do: for(name <- [:begin, :await], do: Process.put({:spent, name}, 0))
    def spent, do: for(name <- [:begin, :await], do: Process.get({:spent, name}, 0)) |> Enum.sum()
  end

  def run(args) do
    {opts, []} =
      OptionParser.parse!(args,
        strict: [
          ranks: :integer,
          lengths: :string,
          heads: :integer,
          repeats: :integer,
          stages: :integer,
          transport: :string,
          masks: :string
        ]
      )

    gpus = for %{device: {:cuda, _} = device} <- FlashAttention.backend_info().devices, do: device
    count = opts[:ranks] || length(gpus)

    if count > length(gpus) or count < 1,
      do: raise("#{count} ranks want as many GPUs, and there are #{length(gpus)}")

    for seed <- 1..4, do: normal_numbers(seed)
    lengths = for text <- String.split(opts[:lengths] || "16384,65536,262144", ","), do: String.to_integer(text)
    masks = String.split(opts[:masks] || "causal,full,packed,causal with sinks", ",")
    transport = String.to_existing_atom(opts[:transport] || "nccl")
    :persistent_term.put(Timed, if(transport == :nccl, do: NCCL, else: Messages))
    heads = opts[:heads] || 16

    IO.write("""
    # Attention over #{count} GPUs

    bf16, #{heads} heads, head_dim #{@dim}, batch 1; tensors lie on the GPUs, transport #{transport}, #{opts[:stages] || 4} stages at
    most. TFLOP/s of each GPU count 4 (backward: 10) operations for a visible cell, head and element of head_dim. "One GPU"
    is the plain call on the whole problem. "Kept" is the first as a part of the second; "waiting" is the share of the
    time in which the slowest rank waited for transfers; "MB in" is what the rank with most columns to get receives.

    | mask | tokens | pass | ms | TFLOP/s a GPU | one GPU | kept | waiting | MB in |
    |---|--:|---|--:|--:|--:|--:|--:|--:|
    """)

    rows(masks, lengths, gpus, count, heads, transport, opts)
    if transport == :nccl, do: host_path(Enum.take(gpus, count), heads, opts[:repeats] || 5)
  end

  # Tensors of the host's memory, which one GPU computes or all of them divide.
  defp host_path(gpus, heads, repeats) do
    IO.write("""

    bf16, #{heads} heads, head_dim #{@dim}, 2,048 tokens, full, results of earlier calls in the host's memory:

    | batch | pass | one GPU, ms | #{length(gpus)} GPUs, ms | times as fast |
    |--:|---|--:|--:|--:|
    """)

    for batch <- [8, 32], do: host_rows(batch, gpus, heads, repeats)
  end

  defp host_rows(batch, gpus, heads, repeats) do
    plain = tensor(:host, 1, batch * 2048, heads)
    x = %{plain | shape: {batch, 2048, heads, @dim}}
    # What a call gave lies in memory that GPUs read at full rate.
    {:ok, x} = FlashAttention.forward(x, x, x, causal: false, device: hd(gpus))
    {:ok, o, lse} = FlashAttention.forward_with_states(x, x, x, causal: false, device: hd(gpus))

    for {pass, call} <- [
          {"forward",
           fn device -> {:ok, _o} = FlashAttention.forward(x, x, x, causal: false, device: device) end},
          {"backward",
           fn device ->
             {:ok, _, _, _} = FlashAttention.backward(x, x, x, x, o, lse, causal: false, device: device)
           end}
        ] do
      [one, all] =
        for device <- [hd(gpus), gpus], do: repeats |> best(fn -> call.(device) end) |> elem(0) |> elem(0)

      IO.puts(
        "| #{batch} | #{pass} | #{Float.round(one * 1000, 2)} | #{Float.round(all * 1000, 2)} | #{Float.round(one / all, 2)} |"
      )
    end
  end

  defp rows(masks, lengths, gpus, count, heads, transport, opts) do
    for mask <- masks, length <- lengths, do: row(mask, length, Enum.take(gpus, count), heads, transport, opts)
  end

  defp deal_options("full", _length), do: [causal: false]
  defp deal_options("packed", length), do: [mask: Mask.packed(documents(length))]
  defp deal_options(_causal, _length), do: []

  # Sixteen documents, of which the longest has a quarter of the tokens.
  defp documents(length) do
    parts = [16, 1, 3, 7, 2, 5, 1, 8, 4, 2, 1, 6, 3, 2, 1, 2]
    unit = div(length, Enum.sum(parts))
    [first | others] = Enum.map(parts, &(&1 * unit))
    [first + length - unit * Enum.sum(parts) | others]
  end

  defp sinks("causal with sinks", heads),
    do: [sink: Tensor.new(:binary.copy(<<2.0::float-32-native>>, heads), :f32, {1, heads})]

  defp sinks(_mask, _heads), do: []

  defp row(mask, length, gpus, heads, transport, opts) do
    deal = Distributed.deal({length, length}, length(gpus), deal_options(mask, length))
    repeats = opts[:repeats] || 5

    ranks = for device <- gpus, do: [device: device]

    {:ok, measured} =
      Distributed.run(
        ranks,
        fn group ->
          group = %{group | transport: Timed}
          rows = deal.rows[group.rank] |> Ranges.count()
          [q, k, v, dout] = for seed <- 1..4, do: tensor(group.device, seed, rows, heads)
          call = [stages: opts[:stages] || 4] ++ sinks(mask, heads)

          forward = fn ->
            {:ok, _o, states} = Distributed.forward(group, deal, q, k, v, call)
            states
          end

          {forward_time, states} = best(repeats, forward)

          backward = fn ->
            :ok = group |> Distributed.backward(dout, states) |> elem(0)
          end

          {backward_time, _done} = best(repeats, backward)
          {forward_time, backward_time}
        end,
        transport: transport,
        timeout: 120_000
      )

    {alone_forward, alone_backward} = alone(hd(gpus), mask, length, heads, repeats)
    area = deal.areas |> Map.values() |> Enum.sum()
    megabytes = megabytes(deal, heads, opts[:stages] || 4)

    for {pass, operations, times, alone} <- [
          {"forward", 4, Enum.map(measured, &elem(&1, 0)), alone_forward},
          {"backward", 10, Enum.map(measured, &elem(&1, 1)), alone_backward}
        ] do
      {seconds, waited} = Enum.max(times)
      total = operations * area * heads * @dim / 1.0e12
      own = total / seconds / length(gpus)
      single = if alone, do: total / alone

      IO.puts(
        "| #{mask} | #{length} | #{pass} | #{round(seconds * 1.0e6) / 1000} | #{round(own)} | " <>
          "#{if single, do: round(single), else: "-"} | #{if single, do: Float.round(own / single, 2), else: "-"} | " <>
          "#{round(100 * waited / seconds)} % | #{megabytes} |"
      )
    end
  end

  # k and v, of the rank that gets most.
  defp megabytes(deal, heads, stages) do
    for rank <- 0..(deal.num_ranks - 1) do
      for(
        stage <- tl(Stages.of(deal, rank, stages)),
        {_owner, ranges} <- stage.sources,
        do: Ranges.count(ranges)
      )
      |> Enum.sum()
    end
    |> Enum.max()
    |> then(&round(&1 * heads * @dim * 2 * 2 / 1.0e6))
  end

  # The plain call on the whole problem, where one GPU has room for it.
  defp alone(device, mask, length, heads, repeats) do
    [q, k, v, dout] = for seed <- 1..4, do: tensor(device, seed, length, heads)
    opts = [device: device] ++ Keyword.delete(deal_options(mask, length), :chunk) ++ sinks(mask, heads)

    forward = fn ->
      {:ok, _o, states} = FlashAttention.forward_with_states(q, k, v, [keep: :device, results: :device] ++ opts)
      states
    end

    {{seconds, _waited}, states} = best(repeats, forward)

    backward = fn -> :ok = dout |> FlashAttention.backward(states, results: :device) |> elem(0) end
    {{backward_seconds, _waited}, _done} = best(repeats, backward)
    for x <- [q, k, v, dout], do: FlashAttention.release(x)
    {seconds, backward_seconds}
  end

  # The shortest of some calls after one that is not counted, with what it waited; and what the last one gave.
  defp best(repeats, fun) do
    fun.()

    {times, last} =
      Enum.map_reduce(1..repeats, nil, fn _, _last ->
        # What the call before left on the GPU is given back.
        :erlang.garbage_collect()
        Timed.reset()
        {microseconds, result} = :timer.tc(fun)
        {{microseconds / 1.0e6, Timed.spent() / 1.0e6}, result}
      end)

    {Enum.min(times), last}
  end

  # Normally distributed numbers, 2^18 of them over and over.
  defp tensor(device, seed, rows, heads) do
    some = normal_numbers(seed)
    bytes = rows * heads * @dim * 2
    data = some |> :binary.copy(div(bytes, byte_size(some)) + 1) |> binary_part(0, bytes)
    on_device(device, data, rows, heads)
  end

  # Drawn once for each seed.
  defp normal_numbers(seed) do
    key = {__MODULE__, seed}

    with nil <- :persistent_term.get(key, nil) do
      :rand.seed(:exsss, seed)
      numbers = for _ <- 1..(1 <<< 18), into: <<>>, do: bf16(:rand.normal())
      :persistent_term.put(key, numbers)
      numbers
    end
  end

  defp on_device(:host, data, rows, heads), do: Tensor.new(data, @dtype, {1, rows, heads, @dim})

  defp on_device(device, data, rows, heads) do
    {:ok, memory} = Native.upload(device, data)
    Tensor.new(DeviceMemory.from_native(memory), @dtype, {1, rows, heads, @dim})
  end

  defp bf16(x) do
    <<upper::16, _lower::16>> = <<x::float-32>>
    <<upper::16-native>>
  end
end

Bench.Distributed.run(System.argv())
