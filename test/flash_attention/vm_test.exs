defmodule FlashAttention.VMTest do
  # Not async: it measures the VM as a whole.
  use ExUnit.Case, async: false

  import FlashAttention.Test.Tensors
  alias FlashAttention.{Native, Tensor}

  # How long such processes wait is measured: make bench-responsiveness.
  test "every normal scheduler runs processes while a call computes" do
    caller = Task.async(fn -> call_until_told() end)

    1..System.schedulers_online()
    |> Enum.map(fn scheduler ->
      parent = self()
      # Bound to its scheduler: the others would run it in the place of one that is blocked.
      :erlang.spawn_opt(fn -> send(parent, {self(), turns(caller.pid, 0)}) end, [:link, scheduler: scheduler])
    end)
    |> Enum.each(fn process -> receive do: ({^process, num_turns} -> assert(num_turns == 1000)) end)

    send(caller.pid, :enough)
    Task.await(caller, :infinity)
  end

  defp call_until_told do
    tensor = tensor(1024, 4, 64)
    {:ok, _o} = FlashAttention.forward(tensor, tensor, tensor, device: :cpu)

    receive do
      :enough -> :ok
    after
      0 -> call_until_told()
    end
  end

  # Counts the turns that a process gets during the caller's calls. A process that runs on a normal scheduler says what it
  # does only between its own turns.
  defp turns(_caller, 1000), do: 1000

  defp turns(caller, count) do
    :erlang.yield()
    turns(caller, count + if(computes?(caller), do: 1, else: 0))
  end

  defp computes?(process),
    do: Process.info(process, :current_function) == {:current_function, {Native, :execute, 5}}

  # Of each function what calls it, and whether it may compute or wait for a driver.
  test "whatever computes or may wait for a driver runs on dirty schedulers, and nothing else does" do
    one = {<<1.0::float-32-native>>, {:f, 32}, {1, 1, 1, 1}}
    qkv = %{q: one, k: one, v: one}
    shapes = Map.new(qkv, fn {name, {_data, type, shape}} -> {name, {type, shape}} end)

    for {function, arguments, dirty?} <- [
          {:execute, [:forward, qkv, [], {:cpu, 0}, %{}], true},
          {:plan, [:forward, shapes, [], {:cpu, 0}], true},
          {:backend_info, [], true},
          {:read, [make_ref()], true},
          {:trim, [{:cpu, 0}], true},
          {:set_pinned_limit, [-1], true},
          {:register_xla, ["no such library"], true},
          {:options, [], false},
          {:memory_info, [make_ref()], false},
          {:release, [make_ref()], false}
        ] do
      assert runs_dirty?(function, arguments) == dirty?, "#{function}"
    end
  end

  # The VM tells of every turn of a traced process on which scheduler it was; dirty ones have number 0.
  defp runs_dirty?(function, arguments) do
    {process, monitor} =
      spawn_monitor(fn ->
        receive do: (:go -> apply(Native, function, arguments))
      end)

    1 = :erlang.trace(process, true, [:running, :scheduler_id])
    send(process, :go)
    assert_receive {:DOWN, ^monitor, :process, ^process, _reason}
    delivered = :erlang.trace_delivered(process)
    assert_receive {:trace_delivered, ^process, ^delivered}
    turn = {Native, function, length(arguments)}
    dirty? = received?({:trace, process, :in, turn, 0})
    drop_traces(process)
    dirty?
  end

  defp received?(message) do
    receive do
      ^message -> true
    after
      0 -> false
    end
  end

  defp drop_traces(process) do
    receive do
      {:trace, ^process, _, _, _} -> drop_traces(process)
    after
      0 -> :ok
    end
  end

  # With one scheduler for calls, so that none has threads to start later.
  test "running out of memory is an error, and the next call works" do
    assert run_script("out_of_memory.exs", "+SDcpu 1:1") ==
             "out_of_memory: o: expected 268435456 bytes of memory, got none\n"
  end

  defp run_script(name, erl_flags) do
    args = ["--erl", erl_flags, "-pa", Application.app_dir(:flash_attention, "ebin"), "test/support/#{name}"]
    {output, exit_status} = System.cmd("elixir", args, stderr_to_stdout: true)
    assert {output, exit_status} == {output, 0}
    output
  end

  test "100 processes at once all get right answers" do
    1..100
    |> Enum.map(fn seed ->
      shape = {1, 1 + rem(seed * 37, 100), 2, 1 + rem(seed * 11, 70)}
      tensor = random(seed, Enum.at([:f32, :bf16, :f64], rem(seed, 3)), shape)
      opts = [softcap: rem(seed, 4), window: {rem(seed, 50), :infinity}]
      {tensor, opts, both_passes(tensor, opts)}
    end)
    |> Enum.map(fn {tensor, opts, expected} ->
      Task.async(fn -> for _ <- 1..3, do: assert(both_passes(tensor, opts) == expected) end)
    end)
    |> Task.await_many(:infinity)
  end

  test "killing callers while they compute leaks nothing" do
    # 1 MiB a tensor: were results or workspaces of the killed lost, it would be more than 100 MiB.
    tensor = tensor(1024, 4, 64)
    # On a GPU too it is the same to the bit only when deterministic.
    expected = both_passes(tensor, deterministic: true)
    kill_callers(tensor, 20)
    {binary, resident} = {:erlang.memory(:binary), resident_bytes()}

    kill_callers(tensor, 100)

    assert :erlang.memory(:binary) - binary < 10 * 2 ** 20
    assert resident_bytes() - resident < 50 * 2 ** 20
    assert both_passes(tensor, deterministic: true) == expected
  end

  defp kill_callers(tensor, count) do
    for _ <- 1..count do
      {caller, monitor} = spawn_monitor(fn -> Enum.each(Stream.cycle([tensor]), &both_passes(&1, [])) end)
      wait_until(fn -> computes?(caller) end)
      Process.exit(caller, :kill)
      assert_receive {:DOWN, ^monitor, :process, ^caller, :killed}
    end

    # The calls of the killed end on their schedulers: wait until each of those is free.
    1..:erlang.system_info(:dirty_cpu_schedulers_online)
    |> Enum.map(fn _ -> Task.async(fn -> both_passes(tensor, []) end) end)
    |> Task.await_many(:infinity)

    :erlang.garbage_collect()
  end

  defp wait_until(condition) do
    if !condition.() do
      :erlang.yield()
      wait_until(condition)
    end
  end

  test "repeated calls, good and bad, leak nothing" do
    tensor = tensor(512, 4, 64)
    bad = %{tensor | shape: {1, 512, 4, 63}}

    # Each time 250 MiB of results.
    calls = fn ->
      for _ <- 1..100 do
        both_passes(tensor, [])
        assert {:error, _} = FlashAttention.forward(tensor, bad, tensor)
      end

      :erlang.garbage_collect()
    end

    calls.()
    resident = resident_bytes()
    calls.()
    assert resident_bytes() - resident < 50 * 2 ** 20
  end

  defp tensor(seqlen, num_heads, head_dim) do
    row = random(1, :f32, {num_heads, head_dim}).data
    Tensor.new(:binary.copy(row, seqlen), :f32, {1, seqlen, num_heads, head_dim})
  end

  defp both_passes(tensor, opts) do
    {o, lse} = FlashAttention.forward_with_states!(tensor, tensor, tensor, opts)
    {o, lse, FlashAttention.backward!(o, tensor, tensor, tensor, o, lse, opts)}
  end

  defp resident_bytes do
    [_, kilobytes] = Regex.run(~r/VmRSS:\s+(\d+) kB/, File.read!("/proc/#{System.pid()}/status"))
    String.to_integer(kilobytes) * 1024
  end
end
