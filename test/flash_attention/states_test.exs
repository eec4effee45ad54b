defmodule FlashAttention.StatesTest do
  # Not async: it replaces a module.
  use ExUnit.Case, async: false

  import FlashAttention.Test.Tensors
  alias FlashAttention.{Native, States, Tensor}

  doctest States

  defp forward(problem, opts),
    do: FlashAttention.forward_with_states!(problem.q, problem.k, problem.v, problem.opts ++ opts)

  defp backward(problem, o, lse, opts),
    do: FlashAttention.backward!(problem.dout, problem.q, problem.k, problem.v, o, lse, problem.opts ++ opts)

  @cases [
    {{2, 9, 7, 4, 2, 5}, []},
    {{1, 3, 12, 2, 2, 8}, [causal: false, softcap: 3, scale: 0.4]},
    {{2, 8, 8, 4, 1, 3}, [window: {2, 1}, sink: 2]}
  ]

  for {{sizes, opts}, index} <- Enum.with_index(@cases), type <- [:f32, :bf16, :f64] do
    test "#{type} #{inspect(sizes)} #{inspect(opts)}: the same gradients as from tensors" do
      problem = problem(unquote(index), unquote(type), unquote(Macro.escape(sizes)), unquote(opts))
      {o, lse} = forward(problem, device: :cpu)
      {kept_o, states} = forward(problem, keep: :device, device: :cpu)
      assert kept_o == o
      expected = backward(problem, o, lse, device: :cpu)
      assert FlashAttention.backward!(problem.dout, states) == expected
      assert FlashAttention.release(states) == :ok

      assert FlashAttention.backward!(problem.dout, states) == expected,
             "on the CPU there is nothing to release"
    end
  end

  describe "errors" do
    setup do
      problem = problem(1, :f32, {1, 3, 3, 1, 1, 2}, [])
      {_o, states} = forward(problem, keep: :device, device: :cpu)
      %{problem: problem, states: states}
    end

    defp message({:error, error}), do: Exception.message(error)

    test "name dout", %{states: states} do
      for {dout, expected} <- [
            {random(1, :f32, {1, 4, 1, 2}), "dout: expected seqlen_q 3 as in q, got 4"},
            {random(1, :f32, {3, 2}),
             "dout: expected rank 4, [batch, seqlen_q, num_heads, head_dim], got rank 2"},
            {random(1, :bf16, {1, 3, 1, 2}), "dout: expected type f32 as in q, got bf16"},
            {1, "dout: expected a tensor (Nx.Tensor or FlashAttention.Tensor), got 1"}
          ],
          do: assert(message(FlashAttention.backward(dout, states)) == expected)
    end

    test "name what are no states", %{problem: problem} do
      assert message(FlashAttention.backward(problem.dout, :states)) ==
               "states: expected a FlashAttention.States, got :states"
    end

    test "refuse options that the states hold", %{problem: problem, states: states} do
      assert message(FlashAttention.backward(problem.dout, states, causal: false)) ==
               "opts: expected keys among results, dlse, got :causal"
    end

    test "say that nothing can be read at an address" do
      pointer = %{kind: :local, address: 0x1000, data_size: 24}

      # Nobody has memory at the first ones. Of a page and what follows it, the page alone is there.
      for address <- [0x1000, 2 ** 63, 2 ** 64 - 24, last_address() - 8] do
        tensor = Tensor.new(%{pointer | address: address}, :f32, {1, 3, 1, 2})

        assert message(FlashAttention.forward(tensor, tensor, tensor, device: :cpu)) ==
                 "q: expected a binary, or memory that cpu 0 can read, got 24 bytes at 0x" <>
                   String.downcase(Integer.to_string(address, 16))
      end

      assert_raise FlashAttention.Error,
                   "data: expected 24 bytes for shape {1, 3, 1, 2} of type f32, got 8",
                   fn ->
                     Tensor.new(%{pointer | data_size: 8}, :f32, {1, 3, 1, 2})
                   end
    end

    test "name where to leave results" do
      one = {<<1.0::float-32-native>>, {:f, 32}, {1, 1, 1, 1}}

      for {placement, expected} <- [
            {:device, "placement: expected a map, got device"},
            {%{results: :gpu}, "results: expected one of host, device, got gpu"},
            {%{keep: 1}, "keep: expected one of false, true, got 1"},
            {%{measure: nil}, "measure: expected one of true, false, got nil"}
          ] do
        assert {:error, {:invalid_argument, _, _, _, ^expected}} =
                 Native.execute(:forward, %{q: one, k: one, v: one}, [], {:cpu, 0}, placement)
      end

      forward = fn placement ->
        Native.execute(:forward, %{q: one, k: one, v: one}, [], {:cpu, 0}, placement)
      end

      assert {:ok, _, _, %{kernel_seconds: seconds}} = forward.(%{measure: true})
      assert seconds > 0
      assert {:ok, _, _, measured} = forward.(%{measure: false})
      assert measured == %{}

      for data <- [1, {1}, {-1, 4, nil}, {1, 2 ** 70, nil}, {0, 4, nil}, make_ref()] do
        bad = put_elem(one, 0, data)

        assert {:error, {:invalid_argument, "k", _, _, _}} =
                 Native.run(:forward, %{q: one, k: bad, v: one}, [], {:cpu, 0})
      end
    end
  end

  # /proc/self/maps, a region of memory a row: addresses, whether it can be read, and the file that lies there.
  defp maps do
    for line <- String.split(File.read!("/proc/self/maps"), "\n", trim: true) do
      [_, from, to, access, offset, file] = Regex.run(~r/^(\w+)-(\w+) (....) (\w+) \S+ \d+ *(.*)$/, line)
      {String.to_integer(from, 16), String.to_integer(to, 16), access, String.to_integer(offset, 16), file}
    end
  end

  # Where a region ends that no other one follows.
  defp last_address do
    maps = maps()
    starts = MapSet.new(maps, &elem(&1, 0))

    Enum.find_value(maps, fn
      {_, to, "r" <> _, _, _} -> to not in starts && to
      _ -> nil
    end)
  end

  test "of the host's memory, an address is as good as a binary" do
    # The VM's program lies there as it lies in its file, which no build replaces meanwhile.
    {address, _to, _access, 0, file} =
      Enum.find(maps(), fn {_, _, access, offset, file} ->
        String.ends_with?(file, "/beam.smp") and offset == 0 and access =~ "r"
      end)

    bytes = binary_part(File.read!(file), 0, 512)

    [there, here] =
      for data <- [%{kind: :local, address: address, data_size: 512}, bytes],
          do: Tensor.new(data, :bf16, {2, 8, 2, 8})

    {o, lse} = FlashAttention.forward_with_states!(here, here, here, device: :cpu)
    assert FlashAttention.forward_with_states!(there, there, there, device: :cpu) == {o, lse}

    {^o, states} = FlashAttention.forward_with_states!(there, here, there, device: :cpu, keep: :device)
    gradients = FlashAttention.backward!(here, here, here, here, o, lse, device: :cpu)

    assert FlashAttention.backward!(there, states) |> Tuple.to_list() |> Enum.map(& &1.data) ==
             gradients |> Tuple.to_list() |> Enum.map(& &1.data)

    # Between elements, too.
    shifted = Tensor.new(%{kind: :local, address: address + 1, data_size: 256}, :bf16, {1, 8, 2, 8})
    same = Tensor.new(binary_part(bytes, 1, 256), :bf16, {1, 8, 2, 8})

    assert FlashAttention.forward!(shifted, shifted, shifted, device: :cpu).data ==
             FlashAttention.forward!(same, same, same, device: :cpu).data
  end

  # The package where it is there, and else one that only tells this process.
  describe "telemetry" do
    @events [[:flash_attention, :run, :start], [:flash_attention, :run, :stop]]

    setup do
      if Code.ensure_loaded?(:telemetry) do
        {:ok, _} = apply(Application, :ensure_all_started, [:telemetry])
        apply(:telemetry, :attach_many, ["states_test", @events, &__MODULE__.tell/4, self()])
        on_exit(fn -> apply(:telemetry, :detach, ["states_test"]) end)
      else
        body =
          quote do:
                  def(execute(event, measurements, metadata),
                    do: send(unquote(__MODULE__), {event, measurements, metadata})
                  )

        Process.register(self(), __MODULE__)
        Module.create(:telemetry, body, Macro.Env.location(__ENV__))

        on_exit(fn ->
          :code.purge(:telemetry)
          :code.delete(:telemetry)
        end)
      end

      :ok
    end

    def tell(event, measurements, metadata, pid), do: send(pid, {event, measurements, metadata})

    test "tells of each pass, and of its error" do
      q = random(1, :bf16, {1, 300, 2, 16})
      begin = System.monotonic_time()
      {_o, states} = FlashAttention.forward_with_states!(q, q, q, device: :cpu, keep: :device)
      assert_received {[:flash_attention, :run, :start], start, metadata}
      assert metadata == %{pass: :forward, device: {:cpu, 0}, type: {:bf, 16}, shape: {1, 300, 2, 16}}
      assert start.monotonic_time >= begin and is_integer(start.system_time)

      assert_received {[:flash_attention, :run, :stop], stop, stop_metadata}
      assert stop_metadata == Map.put(metadata, :error, nil)

      assert Map.take(stop, [:bytes_to_device, :bytes_from_device]) == %{
               bytes_to_device: 0,
               bytes_from_device: 0
             }

      # The VM's clock goes at most 1 % slower or faster than the system's, with which the library measures.
      assert stop.kernel_time > 0
      assert stop.kernel_time <= 1.02 * stop.duration + System.convert_time_unit(1, :millisecond, :native)
      assert stop.duration == stop.monotonic_time - start.monotonic_time

      {:error, error} = FlashAttention.backward(random(1, :bf16, {1, 1, 2, 16}), states)
      assert_received {[:flash_attention, :run, :start], _, %{pass: :backward}}
      assert_received {[:flash_attention, :run, :stop], %{kernel_time: 0}, %{pass: :backward, error: ^error}}
    end
  end
end
