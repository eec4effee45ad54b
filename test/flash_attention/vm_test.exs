defmodule FlashAttention.VMTest do
  # Not async: it measures the VM as a whole.
  use ExUnit.Case, async: false

  import FlashAttention.Test.Tensors
  alias FlashAttention.Tensor

  # In a VM of its own with the default flags: its schedulers spin while they wait. See "Schedulers" in the
  # documentation of FlashAttention.
  test "during a call of more than a second normal schedulers answer within 10 ms" do
    assert {microseconds, "\n"} = "responsiveness.exs" |> run_script("") |> Integer.parse()
    assert microseconds <= 10_000
  end

  test "running out of memory is an error, and the next call works" do
    assert run_script("out_of_memory.exs", "") ==
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
    |> Task.await_many(60_000)
  end

  test "killing callers while they compute leaks nothing" do
    # 1 MiB a tensor: were results or workspaces of the killed lost, it would be more than 100 MiB.
    tensor = tensor(1024, 4, 64)
    # On a GPU too it is the same to the bit only when deterministic.
    expected = both_passes(tensor, deterministic: true)
    kill_callers(tensor, 20)
    {binary, resident} = {:erlang.memory(:binary), resident_bytes()}

    assert kill_callers(tensor, 100) > 50

    assert :erlang.memory(:binary) - binary < 10 * 2 ** 20
    assert resident_bytes() - resident < 50 * 2 ** 20
    assert both_passes(tensor, deterministic: true) == expected
  end

  # How many of the callers were computing when they were killed.
  defp kill_callers(tensor, count) do
    computing_at_death =
      for _ <- 1..count do
        parent = self()

        {caller, monitor} =
          spawn_monitor(fn ->
            send(parent, {:calling, self()})
            for _ <- 1..1000, do: both_passes(tensor, [])
          end)

        assert_receive {:calling, ^caller}, 5_000
        Process.sleep(:rand.uniform(10))
        computing = Process.info(caller, :current_function)
        Process.exit(caller, :kill)
        assert_receive {:DOWN, ^monitor, :process, ^caller, :killed}, 5_000
        computing == {:current_function, {FlashAttention.Native, :execute, 5}}
      end

    # The calls of the killed end on their schedulers: wait until each of those is free.
    1..:erlang.system_info(:dirty_cpu_schedulers_online)
    |> Enum.map(fn _ -> Task.async(fn -> both_passes(tensor, []) end) end)
    |> Task.await_many(60_000)

    :erlang.garbage_collect()
    Enum.count(computing_at_death, & &1)
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
