defmodule FlashAttention.Distributed do
  @moduledoc """
  Exact attention over many ranks, for sequences that one device has no room or no time for: context parallelism.

  A rank is a process with a device of its own: any number of processes of one node or of several connected nodes.
  Each holds a part of the rows (`FlashAttention.Distributed.Deal`), computes attention of its rows over the columns
  of all, and gets the gradients of its own.

      FlashAttention.Distributed.run(4, fn group ->
        deal = FlashAttention.Distributed.deal({65_536, 65_536}, 4)
        [q, k, v] = my_shards(deal, group.rank)
        {:ok, o, states} = FlashAttention.Distributed.forward(group, deal, q, k, v, sink: sink)
        {:ok, dq, dk, dv, %{sink: dsink}} = FlashAttention.Distributed.backward(group, dout(o), states, reduce: :sum)
      end)

  Every rank makes the same calls in the same order, with options and a deal that are the same for all.

  ## What is computed

  A rank computes in stages: its rows beside its own columns, then beside those of some other ranks, whose keys travel
  while the stage before is computed. Only those keys travel that some row of the rank sees. A stage is
  `(o_p, lse_p)`, attention over its columns alone, and stages merge to attention over all of them:

      lse = log(sum_p exp(lse_p) + sum_t exp(sink[t]))
      o   = sum_p exp(lse_p - lse) * o_p

  The backward computes the same stages from the merged `lse` and `o`, and sends `dk` and `dv` to the ranks whose
  columns they belong to, which sum them. Sums are made in one order and are the same in every run.

  Sinks are the same on all ranks. The rank that owns a row applies them, at the merge alone, so that they count once.
  `dsink` is the sum over a rank's own rows; `reduce: :sum` or `:avg` makes it one over all.

  ## What goes wrong

  Every rank is told. Where a rank passes another shape, type, option or deal, all get the same error, and the group
  goes on. Where a rank ends, fails or does not answer in time, all get an error with the reason `:rank_lost` or that
  rank's own, and the group is broken: later calls give the same error, and the ranks that are left may join a new one.
  """

  alias FlashAttention.{Error, Native, Options, Tensor, TensorLike}
  alias FlashAttention.Distributed.{Deal, Group, Inbox, Messages, NCCL, Passes, Ranges, Stages, States}

  @transports %{messages: Messages, nccl: NCCL}
  @timeout 60_000

  @typedoc "See `FlashAttention`."
  @type tensor :: TensorLike.t()

  # ---- groups --------------------------------------------------------------------------------------------

  @doc """
  Joins a group, and waits until all of its ranks have: each calls this with the same name and number of ranks.

  The calling process is the rank, until it ends or leaves. Ranks find one another by `:global`, so their nodes must be
  connected (`Node.connect/1`). Options:

    * `:device` - as in `FlashAttention.forward/4`, but one device; the default is `:auto`
    * `:transport` - `:messages`, the default, or `:nccl`, between GPUs; see `FlashAttention.Distributed.Transport`
    * `:timeout` - how many milliseconds any wait for another rank may take, here and in later calls; default
      60,000. It has to be longer than a rank computes in one stage. `:infinity` waits until a rank is gone.

        iex> {:ok, group} = FlashAttention.Distributed.join(:alone, 0, 1)
        iex> FlashAttention.Distributed.leave(group)
        :ok
  """
  @spec join(term, non_neg_integer, pos_integer, keyword) :: {:ok, Group.t()} | {:error, Error.t()}
  def join(name, rank, num_ranks, opts \\ []) do
    with :ok <- check_rank(rank, num_ranks),
         {:ok, group} <- new_group(name, rank, num_ranks, opts),
         {:ok, inbox} <- start_inbox(name, rank, num_ranks) do
      with {:ok, peers} <- Inbox.meet(inbox, group.timeout),
           group = %{group | inbox: inbox, peers: peers},
           {:ok, 1} <- Inbox.next_call(inbox),
           {:ok, nil} <-
             agree(group, 1, {:ok, [num_ranks: num_ranks, transport: inspect(group.transport)], nil}),
           {:ok, link} <- open(group),
           :ok <- Inbox.on_break(inbox, fn -> group.transport.abort(link) end) do
        {:ok, %{group | link: link}}
      else
        {:error, error} ->
          Inbox.leave(inbox, rank, %{})
          {:error, error}
      end
    end
  end

  # Others may be waiting for what this rank did not get to.
  defp open(group),
    do: with({:error, error} <- group.transport.open(group), do: Inbox.break(group.inbox, error))

  defp check_rank(rank, num_ranks) do
    cond do
      not (is_integer(num_ranks) and num_ranks > 0) ->
        {:error, Error.invalid(:num_ranks, "a whole number of at least 1", Error.show(num_ranks))}

      rank not in 0..(num_ranks - 1) ->
        {:error, Error.invalid(:rank, "0 to #{num_ranks - 1}", Error.show(rank))}

      true ->
        :ok
    end
  end

  defp new_group(name, rank, num_ranks, opts) do
    with :ok <- check_keys(opts, [:device, :transport, :timeout]),
         {:ok, %{devices: [device | _]}} <- Options.parse(Keyword.take(opts, [:device]), [:device]),
         {:ok, transport} <- one_of(:transport, opts[:transport] || :messages, @transports),
         {:ok, timeout} <- check_timeout(opts[:timeout] || @timeout) do
      {:ok,
       %Group{
         name: name,
         rank: rank,
         num_ranks: num_ranks,
         inbox: nil,
         peers: %{},
         device: device,
         transport: transport,
         timeout: timeout
       }}
    end
  end

  defp check_timeout(timeout) when timeout == :infinity or timeout in 1..0xFFFF_FFFF,
    do: {:ok, timeout}

  defp check_timeout(timeout),
    do:
      {:error,
       Error.invalid(:timeout, "milliseconds, above 0 and below 2^32, or :infinity", Error.show(timeout))}

  defp one_of(name, key, choices) do
    case choices do
      %{^key => choice} -> {:ok, choice}
      _ -> {:error, Error.invalid(name, Enum.map_join(Map.keys(choices), " or ", &inspect/1), Error.show(key))}
    end
  end

  defp start_inbox(name, rank, num_ranks) do
    case Inbox.start(name, rank, num_ranks) do
      {:ok, inbox} ->
        {:ok, inbox}

      {:error, _taken} ->
        {:error, Error.invalid(:rank, "one that nobody has joined as", "#{rank} of #{Error.show(name)}")}
    end
  end

  @doc "Leaves a group. The other ranks' calls end with an error from then on."
  @spec leave(Group.t()) :: :ok
  def leave(%Group{} = group) do
    Inbox.leave(group.inbox, group.rank, group.peers)
    group.transport.close(group.link)
  end

  @doc """
  Runs a function as each rank of a new group, and returns what each of them returned, in the order of the ranks.

  Ranks are processes of their own: so many of this node, or one for each of a list of options of `join/4`, where `:node`
  says where it is to be (its code must be there). Where a rank ends otherwise, the others are told by their calls, and the
  first such end is the error. The options of all ranks come last.

      iex> FlashAttention.Distributed.run(3, fn group -> group.rank * 10 end)
      {:ok, [0, 10, 20]}
  """
  @spec run(pos_integer | [keyword], (Group.t() -> result), keyword) :: {:ok, [result]} | {:error, Error.t()}
        when result: term
  def run(ranks, fun, opts \\ [])
  def run(count, fun, opts) when is_integer(count) and count > 0, do: run(List.duplicate([], count), fun, opts)

  def run(ranks, fun, opts) do
    cond do
      not (is_list(ranks) and ranks != [] and Enum.all?(ranks, &Keyword.keyword?/1)) ->
        expected = "a whole number of at least 1, or a list of options of each rank"
        {:error, Error.invalid(:ranks, expected, Error.show(ranks))}

      not is_function(fun, 1) ->
        {:error, Error.invalid(:fun, "a function of the group", Error.show(fun))}

      not Keyword.keyword?(opts) ->
        {:error, Error.invalid(:opts, "a keyword list", Error.show(opts))}

      true ->
        run_ranks(ranks, fun, opts)
    end
  end

  defp run_ranks(ranks, fun, opts) do
    name = {node(), make_ref()}
    count = length(ranks)

    spawned =
      for {own, rank} <- Enum.with_index(ranks) do
        {node, own} = opts |> Keyword.merge(own) |> Keyword.pop(:node, node())
        {_pid, ref} = Node.spawn_monitor(node, __MODULE__, :run_rank, [name, rank, count, fun, own])
        {rank, ref}
      end

    ends =
      for {rank, ref} <- spawned, do: {rank, receive(do: ({:DOWN, ^ref, :process, _pid, reason} -> reason))}

    # A rank that failed by itself says more than one that was told of another's end.
    case for {rank, reason} <- ends, not match?({:rank_returned, _}, reason), do: {rank, reason} do
      [] -> {:ok, for({_rank, {:rank_returned, result}} <- ends, do: result)}
      failed -> {:error, failed |> Enum.sort_by(&told?/1) |> hd() |> end_error()}
    end
  end

  @doc false
  def run_rank(name, rank, count, fun, opts) do
    case join(name, rank, count, opts) do
      {:ok, group} ->
        result = fun.(group)
        leave(group)
        exit({:rank_returned, result})

      {:error, error} ->
        exit({:rank_failed, error})
    end
  end

  defp told?({_rank, {:rank_failed, error}}), do: error.reason == :rank_lost
  defp told?({_rank, _reason}), do: false

  defp end_error({_rank, {:rank_failed, error}}), do: error
  defp end_error({rank, reason}), do: Inbox.lost("rank #{rank} ended: #{Error.show(reason)}")

  # ---- deals ---------------------------------------------------------------------------------------------

  @doc """
  Deals the rows and columns of attention of a size `{seqlen_q, seqlen_k}` to so many ranks.

  Options: `:causal`, `:window` and `:mask` as in `FlashAttention.forward/4`, and

    * `:chunk` - deal chunks of so many rows, in place of the length that `FlashAttention.Distributed.Deal` finds

  Raises `FlashAttention.Error`.

      iex> deal = FlashAttention.Distributed.deal({16, 16}, 2)
      iex> {deal.rows, deal.areas}
      {%{0 => [{0, 4}, {12, 16}], 1 => [{4, 12}]}, %{0 => 68, 1 => 68}}
  """
  @spec deal(FlashAttention.Mask.size(), pos_integer, keyword) :: Deal.t()
  def deal(size, num_ranks, opts \\ []), do: Deal.new(size, num_ranks, opts)

  @doc "The whole tensor of all ranks' shards, on each of them: `FlashAttention.Distributed.Deal.undispatch/3`."
  @spec gather(Group.t(), Deal.t(), tensor, Deal.axis()) :: {:ok, tensor} | {:error, Error.t()}
  def gather(%Group{} = group, %Deal{} = deal, shard, axis \\ :rows) do
    call(group, fn -> gather_problem(group, deal, shard, axis) end, fn number, {native, names} ->
      with {:ok, shards} <- Passes.share(group, {number, :shards}, native) do
        shards =
          for rank <- 0..(group.num_ranks - 1),
              {data, type, shape} = shards[rank],
              do: Tensor.new(data, type, shape)

        whole = Deal.undispatch(deal, shards, axis)
        {:ok, TensorLike.from_native(shard, {whole.data, whole.type, whole.shape}, names)}
      end
    end)
  end

  defp gather_problem(group, deal, shard, axis) do
    with :ok <- check_deal(group, deal),
         {:ok, _axis} <- one_of(:axis, axis, %{rows: :rows, columns: :columns}),
         # What a tensor holds may be its node's own: others get it as a binary.
         {:ok, {_data, type, shape} = native, names} <- Deal.read_shard(deal, group.rank, shard, axis) do
      {:ok,
       [
         call: "gather",
         deal: "number #{hash(deal)}",
         axis: axis,
         shard: "type #{inspect(type)}",
         shard: "shape #{inspect(put_elem(shape, 1, :_))}"
       ], {native, names}}
    end
  end

  # ---- passes --------------------------------------------------------------------------------------------

  @doc """
  Attention of a rank's rows: `o`, like its q, and what `backward/4` needs.

  `q` is the rank's shard of rows `{batch, rows, num_heads, head_dim}`, `k` and `v` are its shards of columns, both as the
  deal says (`FlashAttention.Distributed.Deal.dispatch/4`). Options: `:scale`, `:softcap`, `:sink`, `:precision` and
  `:deterministic` of `FlashAttention.forward/4`; what rows see is the deal's, and sinks of a row's own are those of the
  rank's rows. And

    * `:stages` - in how many stages at most the columns of other ranks come: more of them overlap better and hold fewer
      columns at a time, fewer are larger problems; 1 to 31, default 4, which suits one node; over several nodes 16 and
      more hide more of the transfers (`make bench-plan`)
  """
  @spec forward(Group.t(), Deal.t(), tensor, tensor, tensor, keyword) ::
          {:ok, tensor, States.t()} | {:error, Error.t()}
  def forward(%Group{} = group, %Deal{} = deal, q, k, v, opts \\ []) do
    call(group, fn -> forward_problem(group, deal, q, k, v, opts) end, fn number, problem ->
      with {:ok, o, lse} <- Passes.forward(group, number, problem),
           {:ok, result} <- deliver(o, problem.on_host) do
        states = %States{deal: deal, number: number, problem: problem, o: o, lse: lse}
        {:ok, {TensorLike.from_native(q, result, problem.names.q), states}}
      end
    end)
    |> case do
      {:ok, {o, states}} -> {:ok, o, states}
      {:error, error} -> {:error, error}
    end
  end

  @doc """
  The gradients of a rank's shards, from the gradient of its rows of `o` and what its forward left.

  Options:

    * `:reduce` - what becomes of `dsink`, which is a sum over rows (unless sinks are a row's own): `:none`, the rank's own rows' (the default, where
      whoever trains sums the gradients of parameters anyway), `:sum` over all ranks, or `:avg`, that divided by their number
  """
  @spec backward(Group.t(), tensor, States.t(), keyword) ::
          {:ok, tensor, tensor, tensor}
          | {:ok, tensor, tensor, tensor, %{sink: tensor}}
          | {:error, Error.t()}
  def backward(%Group{} = group, dout, %States{problem: problem} = states, opts \\ []) do
    reduce = if Keyword.keyword?(opts), do: opts[:reduce] || :none

    call(group, fn -> backward_problem(group, dout, states, opts, reduce) end, fn number, dout ->
      with {:ok, gradients} <-
             Passes.backward(group, number, problem, %{dout: dout, o: states.o, lse: states.lse}),
           {:ok, gradients} <- reduce_sink(group, number, gradients, reduce),
           do: deliver_all(gradients, problem.on_host)
    end)
    |> case do
      {:ok, gradients} -> gradients(gradients, dout, problem.names)
      {:error, error} -> {:error, error}
    end
  end

  defp gradients(gradients, like, names) do
    [dq, dk, dv] =
      for name <- [:q, :k, :v], do: TensorLike.from_native(like, gradients[:"d#{name}"], names[name])

    case gradients do
      %{dsink: dsink} -> {:ok, dq, dk, dv, %{sink: TensorLike.from_native(like, dsink, names.sink)}}
      %{drow_sinks: own} -> {:ok, dq, dk, dv, %{sink: TensorLike.from_native(like, own, names.row_sinks)}}
      _ -> {:ok, dq, dk, dv}
    end
  end

  # Results lie where q did.
  defp deliver({memory, type, shape}, true) when is_reference(memory) do
    case Native.read(memory) do
      {:ok, data} -> {:ok, {data, type, shape}}
      {:error, error} -> {:error, Error.from_native(error)}
    end
  end

  defp deliver(tensor, _on_host), do: {:ok, tensor}

  defp deliver_all(tensors, on_host) do
    Enum.reduce_while(tensors, {:ok, %{}}, fn {name, tensor}, {:ok, delivered} ->
      case deliver(tensor, on_host) do
        {:ok, tensor} -> {:cont, {:ok, Map.put(delivered, name, tensor)}}
        {:error, error} -> {:halt, {:error, error}}
      end
    end)
  end

  # Every rank adds the same numbers in the same order.
  defp reduce_sink(group, number, %{dsink: dsink} = gradients, reduce) when reduce != :none do
    with {:ok, {data, type, shape}} <- deliver(dsink, true),
         {:ok, shares} <- Passes.share(group, {number, :dsink}, data) do
      sums = 0..(group.num_ranks - 1) |> Enum.map(&floats(shares[&1])) |> Enum.zip_with(&Enum.sum/1)
      divisor = if reduce == :avg, do: group.num_ranks, else: 1
      data = for sum <- sums, into: <<>>, do: <<sum / divisor::float-32-native>>
      {:ok, %{gradients | dsink: {data, type, shape}}}
    end
  end

  defp reduce_sink(_group, _number, gradients, _reduce), do: {:ok, gradients}

  defp floats(data), do: for(<<x::float-32-native <- data>>, do: x)

  # ---- what a rank was given -----------------------------------------------------------------------------

  @forward_options [:scale, :softcap, :sink, :precision, :deterministic]

  defp forward_problem(group, deal, q, k, v, opts) do
    {own, opts} = if Keyword.keyword?(opts), do: Keyword.split(opts, [:stages]), else: {[], opts}
    num_stages = own[:stages] || 4

    with :ok <- check_deal(group, deal),
         :ok <- check_stages(num_stages),
         {:ok, options} <- Options.parse(opts, @forward_options),
         {:ok, tensors, names, on_host} <- read(group, [q: q, k: k, v: v] ++ Map.to_list(options.tensors)),
         :ok <- check_rows(tensors.q, :q, deal, group.rank, :rows),
         :ok <- check_rows(tensors.k, :k, deal, group.rank, :columns),
         :ok <- check_batch(tensors.q, deal),
         native = Keyword.drop(options.native, [:window_left, :window_right]),
         :ok <- check_plan(group, tensors, native) do
      problem = %{
        rank: group.rank,
        deal: deal,
        stages: Stages.of(deal, group.rank, num_stages),
        targets: Stages.targets(deal, group.rank, num_stages),
        tensors: tensors,
        names: names,
        on_host: on_host,
        native: native
      }

      {:ok,
       [call: "forward", deal: "number #{hash(deal)}", stages: num_stages] ++
         describe(tensors) ++ native, problem}
    end
  end

  defp backward_problem(group, dout, states, opts, reduce) do
    with :ok <- check_keys(opts, [:reduce]),
         {:ok, _reduce} <- one_of(:reduce, reduce, %{none: :none, sum: :sum, avg: :avg}),
         :ok <- check_deal(group, states.deal),
         :ok <- check_states(group, states.problem.rank),
         {:ok, %{dout: dout}, _names, _on_host} <- read(group, dout: dout),
         :ok <- check_like(dout, states.problem.tensors.q) do
      {:ok, [call: "backward", states: "those of call #{states.number}", reduce: reduce], dout}
    end
  end

  # What all ranks must have in common.
  defp describe(tensors) do
    {_data, {class, bits}, {batch, _rows, num_heads, head_dim}} = tensors.q
    {_data, _type, {_batch, _columns, num_kv_heads, _head_dim}} = tensors.k

    sink =
      case tensors do
        %{sink: {data, _type, shape}} when is_binary(data) -> "#{inspect(shape)} of number #{hash(data)}"
        %{sink: {_memory, _type, shape}} -> inspect(shape)
        %{row_sinks: {_data, _type, {_, _, num_sinks, _}}} -> "#{num_sinks} of each row"
        _ -> "none"
      end

    [
      q: "type #{class}#{bits}",
      q: "batch #{batch}",
      q: "num_heads #{num_heads}",
      q: "head_dim #{head_dim}",
      k: "num_kv_heads #{num_kv_heads}",
      sink: sink
    ]
  end

  defp hash(term), do: :erlang.phash2(term, 0x1_0000_0000)

  # The tensors where the transport wants them, the names of their axes, and whether the first one was the host's.
  defp read(group, [{first, _} | _] = tensors) do
    Enum.reduce_while(tensors, {:ok, %{}, %{}, true}, fn {name, tensor}, {:ok, read, names, on_host} ->
      with implementation when implementation != nil <- TensorLike.impl_for(tensor),
           {:ok, {data, _, _} = native, axis_names} <- implementation.to_native(tensor, group.device),
           :ok <- check_place(data),
           {:ok, native} <- group.transport.bring(group, native) do
        on_host = if name == first, do: is_binary(data), else: on_host
        {:cont, {:ok, Map.put(read, name, native), Map.put(names, name, axis_names), on_host}}
      else
        nil -> {:halt, {:error, Error.invalid(name, "a tensor", Error.show(tensor))}}
        {:error, %Error{} = error} -> {:halt, {:error, error}}
        {:error, expected, got} -> {:halt, {:error, Error.invalid(name, expected, got)}}
      end
    end)
  end

  # What a transport can bring: a binary, or the reference of a FlashAttention.DeviceMemory.
  defp check_place(data) when is_binary(data) or is_reference(data), do: :ok

  defp check_place(_pointer),
    do: {:error, Error.invalid(:tensor, "a binary or a FlashAttention.DeviceMemory", "a pointer")}

  defp check_deal(%{num_ranks: num_ranks}, %Deal{num_ranks: num_ranks}), do: :ok

  defp check_deal(group, deal),
    do:
      {:error,
       Error.invalid(:deal, "one for #{group.num_ranks} ranks as in the group", "one for #{deal.num_ranks}")}

  # Of another group they may be, but not of another's rows.
  defp check_states(%{rank: rank}, rank), do: :ok

  defp check_states(group, rank),
    do: {:error, Error.invalid(:states, "those of rank #{group.rank}", "those of rank #{rank}")}

  # One merge takes 32 parts.
  defp check_stages(num) when num in 1..31, do: :ok
  defp check_stages(num), do: {:error, Error.invalid(:stages, "a whole number from 1 to 31", Error.show(num))}

  defp check_rows({_data, _type, shape}, name, deal, rank, axis) do
    count = deal |> Deal.ranges!(rank, axis) |> Ranges.count()

    cond do
      tuple_size(shape) != 4 -> {:error, Error.invalid(name, "4 axes", Error.show(shape))}
      elem(shape, 1) == count -> :ok
      true -> {:error, Error.invalid(name, "#{count} #{axis} as in the deal", "#{elem(shape, 1)}")}
    end
  end

  defp check_batch({_data, _type, shape}, %{bands: batches}) do
    if length(batches) in [1, elem(shape, 0)],
      do: :ok,
      else: {:error, Error.invalid(:q, "batch #{length(batches)} as in the deal's mask", "#{elem(shape, 0)}")}
  end

  defp check_like({_data, type, shape}, {_, type, shape}), do: :ok

  defp check_like({_data, type, shape}, {_, like, like_shape}),
    do: {:error, Error.invalid(:dout, "#{inspect({like, like_shape})} as q", inspect({type, shape}))}

  # The library says what is wrong with shapes, types and options, and whether the device takes them.
  defp check_plan(group, tensors, native) do
    shapes = Map.new(tensors, fn {name, {_data, type, shape}} -> {name, {type, shape}} end)

    case Native.plan(:forward, shapes, native, group.device) do
      {:ok, _outputs, _bytes, _kernel} -> :ok
      {:error, error} -> {:error, Error.from_native(error)}
    end
  end

  defp check_keys(opts, keys) do
    unknown = if Keyword.keyword?(opts), do: Keyword.keys(opts) -- keys, else: [opts]

    if unknown == [],
      do: :ok,
      else: {:error, Error.invalid(:opts, "keys among #{Enum.join(keys, ", ")}", Error.show(hd(unknown)))}
  end

  # ---- a call of all ranks -------------------------------------------------------------------------------

  # What a rank was given is looked at first, and ranks compare it. From then on an error ends the call for all of them, and
  # the group: what had been exchanged until then differs from rank to rank.
  defp call(group, prepare, compute) do
    with {:ok, number} <- Inbox.next_call(group.inbox) do
      try do
        with {:ok, problem} <- agree(group, number, prepare.()),
             do: finish(group, number, compute.(number, problem))
      catch
        kind, reason ->
          Inbox.break(group.inbox, Inbox.lost("rank #{group.rank} failed: #{Error.show(reason)}"))
          :erlang.raise(kind, reason, __STACKTRACE__)
      after
        Inbox.tidy(group.inbox)
      end
    end
  end

  # No rank returns before all have their results.
  defp finish(group, number, {:ok, result}),
    do: with({:ok, _all} <- Passes.share(group, {number, :done}, :done), do: {:ok, result})

  defp finish(group, _number, {:error, %Error{reason: :rank_lost} = error}), do: Inbox.break(group.inbox, error)
  defp finish(group, _number, {:error, error}), do: Inbox.break(group.inbox, of_rank(error, group.rank))

  defp agree(group, number, prepared) do
    {said, problem} =
      case prepared do
        {:ok, what, problem} -> {{:ok, what}, problem}
        {:error, error} -> {{:error, error}, nil}
      end

    with {:ok, said} <- Passes.share(group, {number, :agree}, said), :ok <- verdict(said), do: {:ok, problem}
  end

  # The same on every rank.
  defp verdict(said) when map_size(said) == 1 do
    with {:ok, _what} <- said |> Map.values() |> hd(), do: :ok
  end

  defp verdict(%{0 => first} = said) do
    Enum.find_value(Enum.sort(said), :ok, fn
      {rank, {:error, error}} -> {:error, of_rank(error, rank)}
      {rank, {:ok, what}} -> with({:ok, like} <- first, do: difference(what, like, rank), else: (_error -> nil))
    end)
  end

  defp difference(what, what, _rank), do: nil

  defp difference(what, like, rank) do
    case Enum.find(Enum.zip(what, like), fn {own, other} -> own != other end) do
      {{name, own}, {name, other}} ->
        {:error, Error.invalid(name, "#{text(other)} as on rank 0", "#{text(own)} on rank #{rank}")}

      _ ->
        {:error, Error.invalid(:call, "the same calls as on rank 0", "others on rank #{rank}")}
    end
  end

  defp text(text) when is_binary(text), do: text
  defp text(other), do: Error.show(other)

  # Of several ranks an error says which.
  defp of_rank(error, rank), do: %{error | message: "rank #{rank}: " <> error.message}
end
