defmodule FlashAttention.DeviceTest do
  # Not async: it counts the GPU's memory.
  use ExUnit.Case, async: false

  import FlashAttention.Test.Tensors
  alias FlashAttention.{DeviceMemory, Native, States, Tensor}

  # Without a GPU these are excluded, and test_helper says why.
  @moduletag :cuda

  @gpu {:cuda, 0}

  # {batch, seqlen_q, seqlen_k, num_heads, num_kv_heads, head_dim}: small ones, and ones that are cut into slices.
  @cases [
    {{2, 67, 67, 3, 3, 64}, []},
    {{2, 90, 61, 4, 1, 24}, [window: {17, 3}, sink: 3]},
    {{4, 1021, 1021, 16, 4, 64}, []},
    {{1, 2049, 1900, 32, 32, 72}, [causal: false]}
  ]

  defp forward(problem, opts),
    do: FlashAttention.forward_with_states!(problem.q, problem.k, problem.v, options(problem, opts))

  defp backward(problem, o, lse, opts),
    do: FlashAttention.backward!(problem.dout, problem.q, problem.k, problem.v, o, lse, options(problem, opts))

  defp options(problem, opts), do: problem.opts ++ [device: :cuda, deterministic: true] ++ opts

  # Random numbers in Elixir are slow: large tensors repeat some.
  defp large_problem(seed, type, {batch, seqlen_q, seqlen_k, num_heads, num_kv_heads, head_dim}, opts) do
    part = problem(seed, type, {1, 97, 97, num_heads, num_kv_heads, head_dim}, opts)

    for {name, rows} <- [q: seqlen_q, k: seqlen_k, v: seqlen_k, dout: seqlen_q], into: %{opts: part.opts} do
      %{data: data, shape: {1, 97, heads, head_dim}} = part[name]
      bytes = batch * rows * div(byte_size(data), 97)
      repeated = :binary.copy(data, div(bytes, byte_size(data)) + 1)
      {name, Tensor.new(:binary.copy(binary_part(repeated, 0, bytes)), type, {batch, rows, heads, head_dim})}
    end
  end

  # What is told of a GPU that was used.
  setup_all do
    one = random(1, :f32, {1, 1, 1, 1})
    FlashAttention.forward!(one, one, one, device: :cuda)
    :ok
  end

  defp memory, do: Enum.find(FlashAttention.backend_info().devices, &(&1.device == @gpu)).memory

  # In a process of its own, whose terms are gone with it.
  defp apart(fun) do
    {pid, monitor} = spawn_monitor(fun)
    assert_receive {:DOWN, ^monitor, :process, ^pid, :normal}
  end

  # Terms of a process that ended are collected soon after.
  defp wait_for_memory(expected) do
    if Map.take(memory(), Map.keys(expected)) != expected do
      Process.sleep(10)
      wait_for_memory(expected)
    end
  end

  defp read(%Tensor{data: %DeviceMemory{} = memory} = tensor) do
    {:ok, data} = DeviceMemory.to_binary(memory)
    %{tensor | data: data}
  end

  for {{sizes, opts}, index} <- Enum.with_index(@cases), type <- [:f32, :bf16] do
    test "#{type} #{inspect(sizes)} #{inspect(opts)}: the same bits wherever tensors and results lie" do
      problem = large_problem(unquote(index), unquote(type), unquote(Macro.escape(sizes)), unquote(opts))
      {o, lse} = forward(problem, [])
      gradients = backward(problem, o, lse, [])
      before = memory().used_bytes

      {kept_o, states} = forward(problem, keep: :device)
      assert kept_o == o
      assert memory().used_bytes - before >= States.bytes(states)
      assert FlashAttention.backward!(problem.dout, states) == gradients
      assert FlashAttention.backward!(problem.dout, states) == gradients, "states can be used again"

      on_device = FlashAttention.backward!(problem.dout, states, results: :device)
      assert on_device |> Tuple.to_list() |> Enum.map(&read_all/1) == Tuple.to_list(gradients)

      {o_there, _lse} = forward(problem, results: :device)
      assert read(o_there) == o

      # Everything there: as our memory, and by its address.
      there = forward(%{problem | q: o_there}, results: :device)
      pointer = %{kind: :local, address: o_there.data.address, data_size: o_there.data.bytes}
      by_address = forward(%{problem | q: Tensor.new(pointer, o.type, o.shape)}, results: :device)
      here = forward(%{problem | q: o}, [])

      for {a, b, c} <- Enum.zip([Tuple.to_list(there), Tuple.to_list(by_address), Tuple.to_list(here)]) do
        assert read(a) == c and read(b) == c
      end
    end
  end

  defp read_all(%{sink: dsink}), do: %{sink: read(dsink)}
  defp read_all(tensor), do: read(tensor)

  defp native(%Tensor{data: data, type: type, shape: shape}), do: {data, type, shape}

  test "what lies on the GPU does not cross the bus" do
    %{q: q, k: k, v: v, dout: dout} = large_problem(3, :f32, {1, 301, 301, 2, 2, 64}, [])
    [q, k, v, dout] = Enum.map([q, k, v, dout], &native/1)
    bytes = byte_size(elem(q, 0))
    inputs = %{q: q, k: k, v: v}

    {:ok, outputs, kept, measured} = Native.execute(:forward, inputs, [], @gpu, %{keep: true})
    assert %{bytes_to_device: 3 * bytes, bytes_from_device: bytes} == Map.delete(measured, :kernel_seconds)
    assert measured.kernel_seconds > 0
    assert is_binary(elem(outputs.o, 0)) and is_reference(elem(kept.lse, 0))

    {:ok, _, _, measured} = Native.execute(:backward, Map.put(kept, :dout, dout), [], @gpu, %{})
    assert %{bytes_to_device: bytes, bytes_from_device: 3 * bytes} == Map.delete(measured, :kernel_seconds)

    there = Map.take(kept, [:q, :k, :v])
    {:ok, _, kept_again, measured} = Native.execute(:forward, there, [], @gpu, %{results: :device, keep: true})
    assert %{bytes_to_device: 0, bytes_from_device: 0} == Map.delete(measured, :kernel_seconds)
    assert Map.take(kept_again, [:q, :k, :v]) == there, "what is there is not kept twice"
  end

  describe "memory" do
    setup do
      :erlang.garbage_collect()
      :ok
    end

    test "of states is given back by release, once" do
      problem = large_problem(1, :f32, {1, 500, 500, 2, 2, 64}, [])
      before = memory().used_bytes
      {_o, states} = forward(problem, keep: :device)
      assert memory().used_bytes > before
      assert FlashAttention.release(states) == :ok
      assert memory().used_bytes == before
      assert FlashAttention.release(states) == :ok
      assert {:error, error} = FlashAttention.backward(problem.dout, states)
      assert Exception.message(error) =~ ~r/^\w+: expected memory that is held, got memory that was released$/
    end

    test "of states and results is given back when they are collected" do
      problem = large_problem(1, :f32, {1, 500, 500, 2, 2, 64}, [])
      before = memory()

      apart(fn ->
        {o, states} = forward(problem, keep: :device)
        {there, _lse} = forward(problem, results: :device)
        now = memory()
        true = now.used_bytes > before.used_bytes
        true = now.pinned_used_bytes >= before.pinned_used_bytes + byte_size(o.data)
        Process.put(:held, {o, states, there})
      end)

      wait_for_memory(Map.take(before, [:used_bytes, :pinned_used_bytes]))
    end

    test "of results outlives the call, as binaries do" do
      problem = large_problem(2, :f32, {1, 500, 500, 2, 2, 64}, [])
      {o, _lse} = forward(problem, [])
      copy = :binary.copy(o.data)
      sub = binary_part(o.data, 1000, 5000)
      parent = self()
      apart(fn -> send(parent, {:o, elem(forward(problem, []), 0)}) end)
      assert_receive {:o, %Tensor{data: ^copy}}
      for _ <- 1..20, do: forward(large_problem(3, :f32, {1, 500, 500, 2, 2, 64}, []), [])
      assert o.data == copy
      assert sub == binary_part(copy, 1000, 5000)
    end

    test "of results is ordinary memory beyond the limit" do
      problem = large_problem(1, :f32, {1, 500, 500, 2, 2, 64}, [])
      %{pinned_limit_bytes: limit} = memory()
      {o, lse} = forward(problem, [])
      gradients = backward(problem, o, lse, [])

      try do
        :ok = Native.set_pinned_limit(0)
        before = memory().pinned_used_bytes
        {again, ^lse} = forward(problem, [])
        assert again == o
        assert backward(problem, o, lse, []) == gradients
        # What earlier calls left may be given back meanwhile.
        assert memory().pinned_used_bytes <= before
      after
        Native.set_pinned_limit(limit)
      end
    end

    test "that nobody has is not read" do
      problem = large_problem(1, :f32, {1, 9, 9, 1, 1, 8}, [])
      {there, _lse} = forward(problem, results: :device)
      bytes = there.data.bytes

      for address <- [1, 4096, 2 ** 47 + 4096, 2 ** 63, 2 ** 64 - 4] do
        q = Tensor.new(%{kind: :local, address: address, data_size: bytes}, :f32, {1, 9, 1, 8})
        assert {:error, error} = FlashAttention.forward(q, q, q, device: :cuda)
        assert Exception.message(error) =~ "q: expected a"
      end

      FlashAttention.release(there)
      assert {:error, error} = FlashAttention.forward(there, there, there, device: :cuda)
      assert Exception.message(error) =~ ": expected memory that is held, got memory that was released"
      assert {:error, _} = DeviceMemory.to_binary(there.data)
    end

    test "of a GPU is none of the CPU's" do
      problem = large_problem(1, :f32, {1, 9, 9, 1, 1, 8}, [])
      {there, _lse} = forward(problem, results: :device)
      assert {:error, error} = FlashAttention.forward(there, there, there, device: :cpu)

      assert Exception.message(error) =~
               "q: expected a binary, or memory that cpu 0 can read, got 288 bytes at 0x"
    end
  end

  # Sizes, types, passes and places at random; about every tenth call is refused.
  test "10,000 random calls leave memory as it was" do
    FlashAttention.trim()
    :erlang.garbage_collect()
    {before, binaries} = {memory(), :erlang.memory(:binary)}

    1..8
    |> Enum.map(fn seed -> Task.async(fn -> random_calls(seed, 1250) end) end)
    |> Task.await_many(:infinity)

    wait_for_memory(Map.take(before, [:used_bytes, :pinned_used_bytes]))
    assert :erlang.memory(:binary) - binaries < 2 ** 20
    assert :ok = FlashAttention.trim()
    after_trim = memory()
    assert after_trim.cached_bytes == 0 and after_trim.pinned_cached_bytes == 0
    # Streams and modules that the driver loads at their first use are its own.
    assert before.free_bytes - after_trim.free_bytes < 64 * 2 ** 20
  end

  defp random_calls(seed, count) do
    :rand.seed(:exsss, seed)
    zeros = :binary.copy(<<0>>, 4 * 2 * 400 * 4 * 80)

    for _ <- 1..count do
      type = Enum.random([:f32, :bf16, :f16])

      {batch, rows, heads, head_dim} =
        {Enum.random(1..2), Enum.random(1..400), Enum.random(1..4), Enum.random(1..80)}

      shape = {batch, rows, heads, head_dim}
      bytes = batch * rows * heads * head_dim * if(type == :f32, do: 4, else: 2)
      tensor = Tensor.new(binary_part(zeros, 0, bytes), type, shape)
      bad = if :rand.uniform(10) == 1, do: %{tensor | shape: {batch, rows + 1, heads, head_dim}}, else: tensor
      opts = [device: :cuda, results: Enum.random([:host, :device])]

      with {:ok, _o, states} <- FlashAttention.forward_with_states(tensor, bad, tensor, [keep: :device] ++ opts) do
        if :rand.uniform(2) == 1, do: {:ok, _, _, _} = FlashAttention.backward(tensor, states)
        if :rand.uniform(2) == 1, do: FlashAttention.release(states)
      end
    end
  end

  # What they make together is measured: bench/host.py.
  test "16 processes at once get right answers" do
    problem = large_problem(5, :bf16, {1, 1024, 1024, 8, 8, 64}, [])
    expected = forward(problem, [])

    1..16
    |> Enum.map(fn _ -> Task.async(fn -> for(_ <- 1..20, do: true = forward(problem, []) == expected) end) end)
    |> Task.await_many(:infinity)
  end

  test "each GPU computes, and keeps what is its own" do
    problem = large_problem(6, :f32, {1, 50, 50, 2, 2, 16}, [])
    expected = forward(problem, [])

    for %{device: {:cuda, _} = device} <- FlashAttention.backend_info().devices do
      opts = Keyword.put(options(problem, []), :device, device)
      assert FlashAttention.forward_with_states!(problem.q, problem.k, problem.v, opts) == expected

      {_o, states} =
        FlashAttention.forward_with_states!(problem.q, problem.k, problem.v, [keep: :device] ++ opts)

      assert states.device == device
      # A tensor of another GPU is copied.
      {there, _lse} =
        FlashAttention.forward_with_states!(problem.q, problem.k, problem.v, [results: :device] ++ opts)

      assert FlashAttention.forward!(there, there, there, device: :cuda) ==
               FlashAttention.forward!(read(there), read(there), read(there), device: :cuda)
    end
  end
end
