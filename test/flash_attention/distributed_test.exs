defmodule FlashAttention.DistributedTest do
  # Attention over ranks beside attention on one device, and what goes wrong with ranks.
  use ExUnit.Case, async: true
  doctest FlashAttention.Distributed

  import FlashAttention.Test.{Ranks, Tensors}
  alias FlashAttention.{Distributed, Error, Mask}
  alias FlashAttention.Distributed.{Deal, Group, Inbox}

  # ---- random bands ----------------------------------------------------------------------------------------

  # Rows in a few ranges, each beside a few ranges of columns that share none.
  defp random_mask(random, {seqlen_q, seqlen_k}) do
    for rows <- ranges(random, seqlen_q), columns <- ranges(random, seqlen_k), draw(random, 3) > 0 do
      side = fn -> if draw(random, 2) == 0, do: :infinity, else: draw(random, seqlen_k) - 3 end
      {elem(rows, 0), elem(rows, 1), elem(columns, 0), elem(columns, 1), side.(), side.()}
    end
    |> case do
      [] -> Mask.from_bands([{0, 1, 0, 1, 0, 0}])
      bands -> Mask.from_bands(bands)
    end
  end

  defp ranges(random, length) do
    ends = Enum.sort([0, length | for(_ <- 1..3, do: draw(random, length + 1))])
    ends |> Enum.zip(tl(ends)) |> Enum.filter(fn {first, last} -> first < last end)
  end

  # A generator that remembers, for the test process alone.
  defp draw(_random, count), do: :rand.uniform(count) - 1

  for type <- [:f64, :f32, :bf16, :f16] do
    test "what 1 to 8 ranks compute is what one device does, in #{type}" do
      type = unquote(type)

      for {{name, sizes, opts}, seed} <- Enum.with_index(masks()), num_ranks <- [1, 2, 3, 4, 8] do
        check(type, problem(seed, type, sizes, opts), num_ranks, name)
      end
    end
  end

  test "5, 6 and 7 ranks" do
    for num_ranks <- 5..7,
        {name, sizes, opts} <- Enum.take(masks(), 4),
        do: check(:f32, problem(num_ranks, :f32, sizes, opts), num_ranks, name)
  end

  test "200 random masks, numbers of ranks and chunks" do
    :rand.seed(:exsss, 22)

    for number <- 1..200 do
      size = {1 + draw(nil, 40), 1 + draw(nil, 40)}
      num_ranks = 1 + draw(nil, 8)
      mask = random_mask(nil, size)
      chunk = Enum.at([nil, 1, 3, 8], draw(nil, 4))
      sinks = if draw(nil, 2) == 0, do: [sink: 1 + draw(nil, 3)], else: []
      opts = [mask: mask, causal: false, chunk: chunk, stages: 1 + draw(nil, 4)] ++ sinks
      problem = problem(number, :f64, {1, elem(size, 0), elem(size, 1), 2, 1, 3}, opts)
      check(:f64, problem, num_ranks, {number, mask.numbers, size, chunk})
    end
  end

  test "large sinks count once, whatever the number of ranks" do
    # A sink as large as all columns together: applied twice, or never, it would change what is far above rounding.
    for num_ranks <- 1..4 do
      problem = problem(1, :f64, {1, 24, 24, 2, 2, 4}, sink: 1)
      sink = from_list([4.0, 5.0], :f32, {1, 2})
      check(:f64, %{problem | opts: [sink: sink]}, num_ranks, "large sinks")
    end
  end

  test "sinks of a row's own are dealt with the rows, and give those of the whole, in one stage and in several" do
    # Of the second, ranks compute the rows that see others' columns by themselves.
    for sizes <- [{2, 24, 4}, {1, 64, 16}], do: check_row_sinks(sizes)
  end

  defp check_row_sinks({batch, seqlen, head_dim}) do
    problem = problem(2, :f64, {batch, seqlen, seqlen, 2, 2, head_dim}, [])
    sinks = random(5, :f32, {batch, seqlen, 2, 2})
    opts = [sink: sinks, device: :cpu]
    {:ok, o, lse} = FlashAttention.forward_with_states(problem.q, problem.k, problem.v, opts)

    {:ok, dq, _dk, _dv, %{sink: down}} =
      FlashAttention.backward(problem.dout, problem.q, problem.k, problem.v, o, lse, opts)

    for num_ranks <- 1..3 do
      deal = Distributed.deal({seqlen, seqlen}, num_ranks)

      {:ok, shards} =
        Distributed.run(
          num_ranks,
          fn group ->
            [q, k, v, dout, sink] =
              for x <- [problem.q, problem.k, problem.v, problem.dout, sinks],
                  do: Deal.dispatch(deal, group.rank, x)

            {:ok, o, states} = Distributed.forward(group, deal, q, k, v, sink: sink)
            {:ok, dq, _dk, _dv, %{sink: down}} = Distributed.backward(group, dout, states, reduce: :sum)
            [o, dq, down]
          end,
          device: :cpu
        )

      for {whole, parts} <- Enum.zip([o, dq, down], Enum.zip_with(shards, & &1)) do
        for {x, y} <- Enum.zip(to_list(Deal.undispatch(deal, parts)), to_list(whole)),
            do: assert_in_delta(x, y, 1.0e-6)
      end
    end
  end

  test "dsink is reduced as it was asked for" do
    problem = problem(3, :f32, {1, 32, 32, 2, 2, 4}, sink: 2)

    [own, sum, avg] =
      for reduce <- [:none, :sum, :avg] do
        for dsink <- on_ranks(%{problem | opts: [reduce: reduce] ++ problem.opts}, 4).dsinks, do: to_list(dsink)
      end

    assert length(Enum.uniq(own)) == 4
    assert [sums] = Enum.uniq(sum)
    assert [avgs] = Enum.uniq(avg)
    for {x, y} <- Enum.zip(sums, Enum.zip_with(own, &Enum.sum/1)), do: assert_in_delta(x, y, 1.0e-5)
    for {x, y} <- Enum.zip(sums, avgs), do: assert_in_delta(x, 4 * y, 1.0e-6)
  end

  test "one rank gives the bits of a plain call, and every run gives the same" do
    problem = problem(4, :bf16, {1, 50, 50, 4, 2, 16}, sink: 1)
    plain = [device: :cpu] ++ problem.opts
    {:ok, o, lse} = FlashAttention.forward_with_states(problem.q, problem.k, problem.v, plain)

    {:ok, dq, dk, dv, %{sink: dsink}} =
      FlashAttention.backward(problem.dout, problem.q, problem.k, problem.v, o, lse, plain)

    assert %{o: ^o, dq: ^dq, dk: ^dk, dv: ^dv, dsinks: [^dsink]} = on_ranks(problem, 1)
    assert on_ranks(problem, 3) == on_ranks(problem, 3)
  end

  # ---- keys travel only where they are seen ----------------------------------------------------------------

  test "keys go to ranks whose rows see them, and to no others" do
    # Two documents of which each rank has one: nothing travels.
    deal = Distributed.deal({32, 32}, 2, mask: Mask.packed([16, 16]))
    assert [[], []] = FlashAttention.Distributed.Stages.targets(deal, 0, 4)

    # A window reaches one rank back.
    deal = Distributed.deal({64, 64}, 4, window: {4, 0}, chunk: 16)

    sent =
      for rank <- 0..3,
          targets <- FlashAttention.Distributed.Stages.targets(deal, rank, 4),
          t <- targets,
          do: {rank, t}

    assert length(sent) == 3
    assert Enum.all?(sent, fn {_rank, {_target, [{first, last}]}} -> last - first == 4 end)
  end

  test "what all ranks have is gathered on each of them" do
    whole = random(1, :f32, {2, 21, 3})
    deal = Distributed.deal({21, 21}, 3)

    {:ok, gathered} =
      Distributed.run(3, fn group ->
        {:ok, gathered} = Distributed.gather(group, deal, Deal.dispatch(deal, group.rank, whole))
        gathered
      end)

    assert gathered == [whole, whole, whole]
  end

  # ---- what goes wrong -------------------------------------------------------------------------------------

  # What each rank's call gives where one of them does something else.
  defp errors(num_ranks, fun) do
    problem = problem(1, :f32, {1, 24, 24, 2, 2, 4}, sink: 1)
    deal = Distributed.deal({24, 24}, num_ranks)

    {:ok, results} =
      Distributed.run(
        num_ranks,
        fn group ->
          shard =
            for {name, x} <- Map.take(problem, [:q, :k, :v, :dout]),
                into: %{},
                do: {name, Deal.dispatch(deal, group.rank, x)}

          shard |> Map.merge(%{group: group, deal: deal, opts: problem.opts}) |> fun.()
        end,
        device: :cpu
      )

    results
  end

  defp forward(s, opts \\ []),
    do: Distributed.forward(s.group, s.deal, s.q, s.k, s.v, Keyword.merge(s.opts, opts))

  test "a rank with another shape, type, option or deal: the same error on every rank, and the group goes on" do
    half = fn tensor -> tensor |> to_list() |> from_list(:f16, tensor.shape) end
    wider = fn %{shape: {b, s, h, d}} -> random(9, :f32, {b, s, 2 * h, d}) end

    for {change, message} <- [
          {fn s -> %{s | opts: [softcap: 2.0] ++ s.opts} end,
           "softcap: expected 0 as on rank 0, got 2.0 on rank 2"},
          {fn s -> %{s | opts: [scale: 0.5] ++ s.opts} end,
           "scale: expected 0 as on rank 0, got 0.5 on rank 2"},
          {fn s -> %{s | opts: [stages: 2] ++ s.opts} end, "stages: expected 4 as on rank 0, got 2 on rank 2"},
          {fn s -> %{s | q: half.(s.q), k: half.(s.k), v: half.(s.v)} end,
           "q: expected type f32 as on rank 0, got type f16 on rank 2"},
          {fn s -> %{s | q: wider.(s.q), opts: []} end,
           "q: expected num_heads 2 as on rank 0, got num_heads 4 on rank 2"},
          {fn s -> %{s | q: random(1, :f32, {1, 3, 2, 4})} end,
           "rank 2: q: expected 8 rows as in the deal, got 3"},
          {fn s -> %{s | k: 5} end, "rank 2: k: expected a tensor, got 5"},
          {fn s -> %{s | opts: [casual: true]} end, ~r/^rank 2: opts: expected keys among .*, got :casual$/},
          {fn s -> %{s | opts: []} end, ~r/^sink: expected .* as on rank 0, got none on rank 2$/},
          {fn s -> %{s | deal: Distributed.deal({24, 24}, 3, chunk: 2)} end,
           ~r/^deal: expected number .* on rank 2$/},
          {fn s -> %{s | deal: Distributed.deal({24, 24}, 2)} end,
           "rank 2: deal: expected one for 3 ranks as in the group, got one for 2"}
        ] do
      results =
        errors(3, fn s ->
          {:error, error} = forward(if(s.group.rank == 2, do: change.(s), else: s))
          {:ok, _o, _states} = forward(s)
          Exception.message(error)
        end)

      assert [same, same, same] = results
      if is_binary(message), do: assert(same == message), else: assert(same =~ message)
    end
  end

  test "a rank that gathers something else: the same error on every rank, and the group goes on" do
    rows = fn s, count -> %{s | q: random(1, :f32, {1, count, 2, 4})} end

    for {change, message} <- [
          {&rows.(&1, 7), "rank 2: shard: expected a second axis of 8 as in the deal, got 7"},
          {&%{&1 | q: :junk}, ~r/^rank 2: shard: expected a tensor.*, got :junk$/},
          {&%{&1 | q: random(1, :f64, {1, 8, 2, 4})},
           "shard: expected type {:f, 32} as on rank 0, got type {:f, 64} on rank 2"},
          {&%{&1 | q: random(1, :f32, {1, 8, 4, 2})},
           "shard: expected shape {1, :_, 2, 4} as on rank 0, got shape {1, :_, 4, 2} on rank 2"},
          {&%{&1 | deal: Distributed.deal({24, 24}, 3, chunk: 2)},
           ~r/^deal: expected number .* as on rank 0, got number .* on rank 2$/},
          {&%{&1 | deal: Distributed.deal({24, 24}, 2)},
           "rank 2: deal: expected one for 3 ranks as in the group, got one for 2"},
          {&Map.put(&1, :axis, :heads), "rank 2: axis: expected :columns or :rows, got :heads"},
          {&Map.put(&1, :axis, :columns), "axis: expected :rows as on rank 0, got :columns on rank 2"}
        ] do
      gather = fn s -> Distributed.gather(s.group, s.deal, s.q, Map.get(s, :axis, :rows)) end

      results =
        errors(3, fn s ->
          {:error, error} = gather.(if(s.group.rank == 2, do: change.(s), else: s))
          {:ok, whole} = gather.(s)
          {Exception.message(error), whole}
        end)

      q = problem(1, :f32, {1, 24, 24, 2, 2, 4}, sink: 1).q
      assert [{same, ^q}, {same, ^q}, {same, ^q}] = results
      if is_binary(message), do: assert(same == message), else: assert(same =~ message)
    end
  end

  test "a batch of none is attention of none, of any number of ranks" do
    for num_ranks <- 1..3, opts <- [[], [mask: Mask.packed([5, 11])], [sink: 1]] do
      problem = problem(1, :f32, {0, 16, 16, 2, 2, 4}, opts)
      results = on_ranks(problem, num_ranks)
      for name <- [:o, :dq, :dk, :dv], do: assert(%{data: <<>>, shape: {0, 16, 2, 4}} = results[name])
    end
  end

  test "a rank with another call" do
    [same, same] =
      errors(2, fn s ->
        {:ok, _o, states} = forward(s)
        result = if s.group.rank == 0, do: forward(s), else: Distributed.backward(s.group, s.dout, states)
        {:error, error} = result
        Exception.message(error)
      end)

    assert same == "call: expected forward as on rank 0, got backward on rank 1"
  end

  test "a rank whose computation fails: its error on every rank" do
    results =
      errors(3, fn s ->
        # That bands overlap is found by who computes them: the last rank.
        mask = Mask.from_bands([{0, 24, 0, 24, :infinity, :infinity}, {20, 24, 0, 24, :infinity, 0}])
        s = %{s | deal: Distributed.deal({24, 24}, 3, mask: mask, causal: false, chunk: 8)}
        {:error, error} = forward(s)
        {:error, again} = forward(s)
        assert again == error
        Exception.message(error)
      end)

    assert [same, same, same] = results
    assert same =~ ~r/^rank \d: bands: expected bands that share no cell/
  end

  test "wrong arguments of a run" do
    for {arguments, message} <- [
          {[0, & &1], "ranks: expected a whole number of at least 1, or a list of options of each rank, got 0"},
          {[[], & &1],
           "ranks: expected a whole number of at least 1, or a list of options of each rank, got []"},
          {[[1], & &1],
           "ranks: expected a whole number of at least 1, or a list of options of each rank, got [1]"},
          {[1, fn -> nil end], ~r/^fun: expected a function of the group, got #Function/},
          {[1, & &1, 5], "opts: expected a keyword list, got 5"}
        ] do
      assert {:error, %Error{} = error} = apply(Distributed, :run, arguments)
      text = Exception.message(error)
      if is_binary(message), do: assert(text == message), else: assert(text =~ message)
    end
  end

  test "wrong arguments of a group" do
    for {arguments, message} <- [
          {[:a, 2, 2], "rank: expected 0 to 1, got 2"},
          {[:a, 0, 0], "num_ranks: expected a whole number of at least 1, got 0"},
          {[:a, 0, 1, [devices: 1]], "opts: expected keys among device, transport, timeout, got :devices"},
          {[:a, 0, 1, [transport: :pigeons]], "transport: expected :messages or :nccl, got :pigeons"},
          {[:a, 0, 1, [timeout: 0]],
           "timeout: expected milliseconds, above 0 and below 2^32, or :infinity, got 0"},
          {[:a, 0, 1, [timeout: 0x100000000]],
           "timeout: expected milliseconds, above 0 and below 2^32, or :infinity, got 4294967296"},
          {[:a, 0, 1, [device: :tpu]],
           "device: expected :auto, :all, :cpu, :cuda, {kind, index} or a list of those of one kind, got :tpu"}
        ] do
      assert {:error, %Error{} = error} = apply(Distributed, :join, arguments)
      assert Exception.message(error) == message
    end

    {:ok, group} = Distributed.join(:taken, 0, 1)
    assert {:error, error} = Distributed.join(:taken, 0, 1)
    assert Exception.message(error) == "rank: expected one that nobody has joined as, got 0 of :taken"

    assert {:error, error} =
             Task.await(Task.async(fn -> Distributed.gather(group, Distributed.deal({1, 1}, 1), nil) end))

    assert Exception.message(error) =~ "group: expected a call from the rank's own process"
    assert Distributed.leave(group) == :ok
    assert {:error, %Error{reason: :rank_lost}} = Distributed.gather(group, Distributed.deal({1, 1}, 1), nil)
  end

  test "who never comes is missed" do
    assert {:error, error} = Distributed.join(:lonely, 0, 3, timeout: 50)
    assert Exception.message(error) == "ranks 1, 2: nothing came within 50 ms"
    # And the name is free again.
    assert {:error, %Error{reason: :rank_lost}} = Distributed.join(:lonely, 0, 3, timeout: 50)
  end

  test "who does not answer is missed by all, and hangs nobody" do
    parent = self()

    ranks =
      for rank <- 0..2 do
        spawn_monitor(fn ->
          {:ok, group} = Distributed.join({:slow, parent}, rank, 3, device: :cpu)
          group = %{group | timeout: 300}
          deal = Distributed.deal({6, 6}, 3)
          x = Deal.dispatch(deal, rank, random(1, :f32, {1, 6, 1, 2}))
          if rank == 1, do: Process.sleep(:infinity)
          {:error, error} = Distributed.forward(group, deal, x, x, x)
          send(parent, {rank, Exception.message(error)})
        end)
      end

    # Of the two that call one may be late, too.
    for rank <- [0, 2] do
      assert_receive {^rank, message}
      assert message =~ ~r/^ranks? (0, )?1(, 2)?: nothing came within 300 ms$/
    end

    for {pid, _ref} <- ranks, do: Process.exit(pid, :kill)
  end

  # Two ranks, each a process with its rows of x; what fun makes is sent here, and they stay until the test ends.
  defp two_ranks(fun) do
    parent = self()
    deal = Distributed.deal({4, 4}, 2)

    for rank <- 0..1 do
      spawn_link(fn ->
        x = Deal.dispatch(deal, rank, random(1, :f32, {1, 4, 1, 2}))
        send(parent, {rank, fun.(parent, rank, &Distributed.forward(&1, deal, x, x, x))})
        Process.sleep(:infinity)
      end)
    end
  end

  test "who joins by a name again meets those who do so, too, and not what they leave" do
    two_ranks(fn parent, rank, forward ->
      join = fn -> Distributed.join({:again, parent}, rank, 2, device: :cpu) end
      {:ok, group} = join.()
      {:ok, _o, _states} = forward.(group)
      # The other one's group is still there when rank 0 joins.
      if rank == 1, do: Process.sleep(200)
      :ok = Distributed.leave(group)
      {:ok, group} = join.()
      elem(forward.(group), 0)
    end)

    for rank <- 0..1, do: assert_receive({^rank, :ok})
  end

  test "states of another group are taken of this rank alone" do
    two_ranks(fn parent, rank, forward ->
      {:ok, group} = Distributed.join({:states, parent}, rank, 2, device: :cpu)
      {:ok, swapped} = Distributed.join({:swapped, parent}, 1 - rank, 2, device: :cpu)
      {:ok, o, states} = forward.(group)
      {:error, error} = Distributed.backward(swapped, o, states)
      # The group goes on.
      {Exception.message(error), elem(Distributed.backward(group, o, states), 0)}
    end)

    for rank <- 0..1 do
      assert_receive {^rank, {message, :ok}}
      # Both say what the first of them says.
      assert message =~ ~r/states: expected those of rank (0, got those of rank 1|1, got those of rank 0)/
    end
  end

  test "what comes for a broken group is not kept" do
    {:ok, group} = Distributed.join({:broken, self()}, 0, 1, device: :cpu)
    {:error, _} = Inbox.break(group.inbox, Inbox.lost("a rank is gone"))
    Inbox.post(group.inbox, 0, {1, :keys}, "keys")
    assert :sys.get_state(group.inbox).post == %{}
    assert Distributed.leave(group) == :ok
  end

  @tag :epmd
  test "ranks of several nodes; a node that goes down" do
    name = "flash_attention_#{System.pid()}@127.0.0.1"
    paths = Enum.flat_map(:code.get_path(), &["-pa", List.to_string(&1)])
    arguments = ["--name", name] ++ paths ++ ["test/support/two_nodes.exs"]
    assert {output, 0} = System.cmd("elixir", arguments, stderr_to_stdout: true)
    assert output =~ "same\n"
    assert output =~ "rank 1 is gone: its node does not answer\n"
  end

  # ---- a rank that dies, in every stage ----------------------------------------------------------------------

  # A transport that ends the rank at one of its steps, and counts them.
  defmodule Mortal do
    alias FlashAttention.Distributed.{Messages, Transport}
    @behaviour Transport

    @impl true
    defdelegate open(group), to: Messages
    @impl true
    defdelegate bring(group, tensor), to: Messages
    @impl true
    defdelegate results, to: Messages
    @impl true
    defdelegate abort(link), to: Messages
    @impl true
    defdelegate close(link), to: Messages

    @impl true
    def begin(group, number, gives, gets, likes) do
      step()
      Messages.begin(group, number, gives, gets, likes)
    end

    @impl true
    def await(group, handle) do
      step()
      Messages.await(group, handle)
    end

    def step do
      left = Process.get(:steps_left, -1)
      if left == 0, do: Process.exit(self(), :kill)
      Process.put(:steps_left, left - 1)
    end
  end

  # Both passes of four ranks, one of which ends at a step of it: what the others got. Nobody hangs.
  defp with_death(step, victim) do
    parent = self()
    deal = Distributed.deal({32, 32}, 4)
    problem = problem(1, :f32, {1, 32, 32, 2, 2, 4}, [])

    ranks =
      for rank <- 0..3 do
        {_pid, ref} =
          spawn_monitor(fn ->
            {:ok, group} = Distributed.join({:mortal, parent, step}, rank, 4, device: :cpu, timeout: :infinity)
            group = %{group | transport: Mortal}
            send(parent, {:inbox, group.inbox})
            if rank == victim, do: Process.put(:steps_left, step)
            [q, k, v, dout] = for name <- [:q, :k, :v, :dout], do: Deal.dispatch(deal, rank, problem[name])

            result =
              with {:ok, _o, states} <- Distributed.forward(group, deal, q, k, v, stages: 3),
                   do: Distributed.backward(group, dout, states)

            send(parent, {:result, step, rank, result, Process.get(:steps_left)})
            {:message_queue_len, 0} = Process.info(self(), :message_queue_len)
          end)

        ref
      end

    for ref <- ranks, do: assert_receive({:DOWN, ^ref, :process, _pid, _reason})

    results =
      for rank <- 0..3, rank != victim do
        assert_receive {:result, ^step, ^rank, result, _steps}
        result
      end

    died? =
      not match?(
        {:messages, [_ | _]},
        {:messages, for({:result, ^step, ^victim, _, _} = m <- messages(), do: m)}
      )

    {died?, results}
  end

  defp messages, do: self() |> Process.info(:messages) |> elem(1)

  test "a rank that is killed at any step is missed by all others, and nothing of the group is left" do
    outcomes =
      for step <- 0..40 do
        {died?, results} = with_death(step, rem(step, 4))

        if died?,
          do: assert(Enum.all?(results, &killed?(&1, rem(step, 4)))),
          else: assert(Enum.all?(results, &(elem(&1, 0) == :ok)))

        died?
      end

    # Three stages forward and backward: the keys of each are given and taken twice, the gradients once.
    assert Enum.count(outcomes, & &1) == 18

    for {:inbox, inbox} <- messages() do
      ref = Process.monitor(inbox)
      assert_receive {:DOWN, ^ref, :process, ^inbox, _reason}
    end
  end

  defp killed?({:error, error}, victim),
    do: error.reason == :rank_lost and Exception.message(error) == "rank #{victim} is gone: :killed"

  defp killed?(_result, _victim), do: false

  test "a rank that raises ends the calls of all, and says so" do
    assert {:error, error} =
             Distributed.run(3, fn group ->
               if group.rank == 1, do: exit(:out_of_patience)
               deal = Distributed.deal({6, 6}, 3)
               x = Deal.dispatch(deal, group.rank, random(1, :f32, {1, 6, 1, 2}))
               {:error, error} = Distributed.forward(group, deal, x, x, x)
               error
             end)

    assert Exception.message(error) == "rank 1 ended: :out_of_patience"
  end

  test "what a rank leaves behind: no keys of others in its inbox" do
    results =
      errors(3, fn s ->
        {:ok, _o, states} = forward(s)
        {:ok, _dq, _dk, _dv, _optional} = Distributed.backward(s.group, s.dout, states)
        %Group{inbox: inbox} = s.group
        post = :sys.get_state(inbox).post
        :ok = Inbox.tidy(inbox)
        for {{_rank, topic}, _value} <- post, do: elem(topic, 1)
      end)

    # What came already is at most another rank's next call, of which there is none.
    assert List.flatten(results) == []
  end
end
