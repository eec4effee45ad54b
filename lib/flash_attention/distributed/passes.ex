defmodule FlashAttention.Distributed.Passes do
  @moduledoc false
  # One rank's forward and backward: the stages one after the other, while the next one's keys travel. A GPU has its next
  # stage before it is done with one.
  #
  # A problem is %{deal, stages, targets, tensors: %{q:, k:, v:, sink:}, native: options}; tensors are those of Native. In the
  # place of sink there may be row_sinks, those of this rank's rows.

  alias FlashAttention.{Mask, Telemetry}
  alias FlashAttention.Distributed.{Inbox, Ranges, Rows}

  # ---- forward -------------------------------------------------------------------------------------------

  @doc "`{:ok, o, lse}`"
  def forward(group, number, problem) do
    compute = &forward_part(group, problem, &1)

    with {:ok, parts} <-
           each_stage(group, number, problem, compute, fn _stage, _index, part -> {:ok, part} end),
         {:ok, {o, lse}} <- merge(group, problem, Enum.reject(parts, &is_nil/1)),
         do: {:ok, o, lse}
  end

  # The part of one rank alone is all there is, and had the sinks.
  defp merge(_group, %{stages: [_own]}, [part]), do: {:ok, part}

  defp merge(group, problem, parts),
    do: Rows.merge(group, parts, problem.tensors[:sink] || problem.tensors[:row_sinks])

  defp forward_part(group, problem, {stage, index, k, v}) do
    if computes?(stage, index) do
      inputs = problem.tensors |> Map.take(inputs(problem)) |> Map.merge(%{k: k, v: v})
      with {:ok, outputs} <- run(:forward, group, problem, stage, inputs), do: {:ok, {outputs.o, outputs.lse}}
    else
      {:ok, nil}
    end
  end

  # ---- backward ------------------------------------------------------------------------------------------

  @doc """
  `{:ok, %{dq:, dk:, dv:, dsink:}}`, the last of them (or `drow_sinks`) where there are sinks, of this rank's rows alone.

  The backward of a part wants the lse and o of the whole: p and delta are then those of the whole.
  """
  def backward(group, number, problem, states) do
    compute = fn stage -> backward_of(group, problem, states, stage) end

    give = fn stage, index, own ->
      with {:ok, handle} <- give_gradients(group, number, problem, stage, index, own), do: {:ok, {own, handle}}
    end

    with {:ok, parts} <- each_stage(group, number, problem, compute, give),
         {owns, [nil | handles]} = Enum.unzip(parts),
         {:ok, came} <- all(handles, &group.transport.await(group, &1)) do
      finish_gradients(group, problem, states, owns, came)
    end
  end

  defp backward_of(group, problem, states, {stage, index, k, v}) do
    if computes?(stage, index) do
      inputs = problem.tensors |> Map.take(inputs(problem)) |> Map.merge(states)

      with {:ok, inputs, stage, first} <- seen_rows(group, inputs, stage, index),
           {:ok, outputs} <- run(:backward, group, problem, stage, Map.merge(inputs, %{k: k, v: v})),
           do: {:ok, Map.put(outputs, :first_row, first)}
    else
      {:ok, %{}}
    end
  end

  # The rows that see something of other ranks, as a problem of their own, where they lie together and as aligned as the
  # whole: one that kernels without bands may compute.
  defp seen_rows(group, inputs, %{bands: [[_ | _] = bands]} = stage, index) when index > 0 do
    first = bands |> Enum.map(&elem(&1, 0)) |> Enum.min()
    count = (bands |> Enum.map(&elem(&1, 1)) |> Enum.max()) - first

    if Rows.slices?(inputs.q, first, count) do
      with {:ok, lse} <- Rows.slice_lse(group, inputs.lse, first, count) do
        slices =
          for name <- [:q, :dout, :o], into: %{lse: lse}, do: {name, Rows.slice(inputs[name], first, count)}

        {:ok, Map.merge(inputs, slices), %{stage | bands: [moved(bands, -first)]}, first}
      end
    else
      {:ok, inputs, stage, 0}
    end
  end

  defp seen_rows(_group, inputs, stage, _index), do: {:ok, inputs, stage, 0}

  defp moved(bands, rows),
    do:
      for(
        {q_begin, q_end, k_begin, k_end, l, r} <- bands,
        do: {q_begin + rows, q_end + rows, k_begin, k_end, l, r}
      )

  defp give_gradients(_group, _number, _problem, _stage, 0, _own), do: {:ok, nil}

  defp give_gradients(group, number, problem, stage, index, own) do
    {gives, _end} =
      Enum.map_reduce(stage.sources, 0, fn {owner, ranges}, at ->
        rows = for {first, last, at} <- Ranges.placed(ranges, at), do: {at, at + last - first}
        {{owner, [{own.dk, rows}, {own.dv, rows}]}, at + Ranges.count(ranges)}
      end)

    gets = counts(Enum.at(problem.targets, index))

    group.transport.begin(group, {number, :gradients, index}, gives, gets, [
      problem.tensors.k,
      problem.tensors.v
    ])
  end

  # dq is a sum over stages, dk and dv are sums over ranks: this one's first, then in the order in which they came.
  defp finish_gradients(group, problem, states, [%{dk: dk, dv: dv} = own | others], came) do
    came =
      for {tensors, targets} <- Enum.zip(came, tl(problem.targets)),
          do: {tensors, segments(group, problem, targets)}

    [dks, dvs] =
      for index <- [0, 1], do: for({tensors, segments} <- came, do: {Enum.at(tensors, index), segments})

    dqs =
      for %{dq: {_data, _type, shape} = dq, first_row: first} <- others, do: {dq, [{0, first, elem(shape, 1)}]}

    with {:ok, dq} <- Rows.sum(group, own.dq, dqs),
         {:ok, dk} <- Rows.sum(group, dk, dks),
         {:ok, dv} <- Rows.sum(group, dv, dvs),
         {:ok, sinks} <- dsink(group, problem, states, own),
         do: {:ok, Map.merge(sinks, %{dq: dq, dk: dk, dv: dv})}
  end

  defp dsink(_group, %{stages: [_own]}, _states, own), do: {:ok, Map.take(own, [:dsink, :drow_sinks])}

  defp dsink(group, %{tensors: %{sink: sink}}, states, _own) do
    with {:ok, dsink} <- Rows.dsink(group, states, sink), do: {:ok, %{dsink: dsink}}
  end

  defp dsink(group, %{tensors: %{row_sinks: sinks}}, states, _own) do
    with {:ok, drow_sinks} <- Rows.dsink(group, states, sinks), do: {:ok, %{drow_sinks: drow_sinks}}
  end

  defp dsink(_group, _problem, _states, _own), do: {:ok, %{}}

  # Where the rows that other ranks send belong among this rank's columns.
  defp segments(group, problem, targets) do
    {segments, _end} =
      Enum.flat_map_reduce(targets, 0, fn {_rank, ranges}, at ->
        Enum.map_reduce(Ranges.local(ranges, problem.deal.columns[group.rank]), at, fn {first, last}, at ->
          {{at, first, last - first}, at + last - first}
        end)
      end)

    segments
  end

  # ---- stages --------------------------------------------------------------------------------------------

  # The keys of the next stage are on their way while one is computed. `finish` makes a part of what a stage computed, or
  # gives some of it away, in the order of the stages.
  defp each_stage(group, number, problem, compute, finish) do
    call = %{group: group, number: number, problem: problem, compute: compute, finish: finish}

    with {:ok, handle} <- give_keys(group, number, problem, 1),
         do: go_on(call, 0, start(call, 0, problem.tensors.k, problem.tensors.v), handle)
  end

  # The parts of a stage that was started and of those behind it. A rank's own stage gives nothing away, so that the next one
  # is started before it is done: a GPU has no rest between them then.
  defp go_on(call, index, started, handle) do
    {part, next} =
      if index == 0 do
        next = start_next(call, index + 1, handle)
        {finish(call, index, started), next}
      else
        part = finish(call, index, started)
        {part, with({:ok, _part} <- part, do: start_next(call, index + 1, handle))}
      end

    case {part, next} do
      {{:ok, part}, {:ok, nil}} ->
        {:ok, [part]}

      {{:ok, part}, {:ok, {started, handle}}} ->
        with {:ok, parts} <- go_on(call, index + 1, started, handle), do: {:ok, [part | parts]}

      {{:error, error}, {:ok, {started, _handle}}} ->
        wait(started)
        {:error, error}

      {{:error, error}, _next} ->
        {:error, error}

      {_part, {:error, error}} ->
        {:error, error}
    end
  end

  defp start_next(_call, _index, nil), do: {:ok, nil}

  defp start_next(%{group: group} = call, index, handle) do
    with {:ok, [k, v]} <- group.transport.await(group, handle),
         {:ok, next} <- give_keys(group, call.number, call.problem, index + 1),
         do: {:ok, {start(call, index, k, v), next}}
  end

  defp finish(call, index, started) do
    with {:ok, own} <- wait(started), do: call.finish.(Enum.at(call.problem.stages, index), index, own)
  end

  # A GPU's stage is computed beside the calling process, which has transfers to see to; the host's own processors are busy
  # with one.
  defp start(call, index, k, v) do
    compute = fn -> call.compute.({Enum.at(call.problem.stages, index), index, k, v}) end

    if call.group.transport.results() == :device,
      do: {:computing, spawn_monitor(fn -> exit({:computed, compute.()}) end)},
      else: compute.()
  end

  # What fails in that process fails here.
  defp wait({:computing, {_pid, ref}}) do
    case receive(do: ({:DOWN, ^ref, :process, _pid, reason} -> reason)) do
      {:computed, result} -> result
      reason -> exit(reason)
    end
  end

  defp wait(result), do: result

  defp give_keys(group, number, %{tensors: %{k: k, v: v}} = problem, index) do
    case Enum.at(problem.stages, index) do
      nil ->
        {:ok, nil}

      stage ->
        gives =
          for {rank, ranges} <- Enum.at(problem.targets, index),
              local = Ranges.local(ranges, problem.deal.columns[group.rank]),
              do: {rank, [{k, local}, {v, local}]}

        group.transport.begin(group, {number, :keys, index}, gives, counts(stage.sources), [k, v])
    end
  end

  defp counts(ranks),
    do: for({rank, ranges} <- ranks, do: {rank, for({first, last} <- ranges, do: last - first)})

  # A rank's own stage is there for rows that see nothing, too.
  defp computes?(stage, index), do: index == 0 or stage.sources != []

  # A row's sinks count once: at the merge, where there is one.
  defp inputs(%{stages: [_own]}), do: [:q, :sink, :row_sinks]
  defp inputs(_problem), do: [:q]

  defp run(pass, group, problem, stage, %{q: {_, _, q_shape}, k: {_, _, k_shape}} = inputs) do
    {bands, window} = visible(stage.bands, elem(q_shape, 1), elem(k_shape, 1))
    inputs = if bands, do: Map.put(inputs, :bands, bands), else: inputs
    placement = %{results: group.transport.results()}

    with {:ok, outputs, _kept} <-
           Telemetry.run(pass, inputs, problem.native ++ window, group.device, placement),
         do: {:ok, outputs}
  end

  # One band that is the whole problem is no mask: kernels without bands are the faster ones.
  defp visible([[{0, seqlen_q, 0, seqlen_k, left, right}]], seqlen_q, seqlen_k) when left >= 0 and right >= 0,
    do: {nil, [window_left: left, window_right: right]}

  defp visible(bands, _seqlen_q, _seqlen_k) do
    %{data: data, type: type, shape: shape} = Mask.Bands.to_tensor(bands)
    {{data, type, shape}, [window_left: :infinity, window_right: :infinity]}
  end

  # ---- what ranks tell one another -------------------------------------------------------------------------

  @doc "What each rank says, by rank, once all have."
  def share(group, topic, value) do
    others = for {rank, inbox} <- group.peers, rank != group.rank, do: {rank, inbox}
    for {_rank, inbox} <- others, do: Inbox.post(inbox, group.rank, topic, value)

    with {:ok, came} <-
           Inbox.await(group.inbox, for({rank, _inbox} <- others, do: {rank, topic}), group.timeout),
         do:
           {:ok, came |> Map.new(fn {{rank, _topic}, value} -> {rank, value} end) |> Map.put(group.rank, value)}
  end

  defp all(list, fun) do
    Enum.reduce_while(list, {:ok, []}, fn item, {:ok, done} ->
      case fun.(item) do
        {:ok, result} -> {:cont, {:ok, [result | done]}}
        {:error, error} -> {:halt, {:error, error}}
      end
    end)
    |> case do
      {:ok, done} -> {:ok, Enum.reverse(done)}
      {:error, error} -> {:error, error}
    end
  end
end
