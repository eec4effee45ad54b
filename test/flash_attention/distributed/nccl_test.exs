defmodule FlashAttention.Distributed.NCCLTest do
  # Ranks on GPUs, which exchange by NCCL: on a machine with two of them, or more.
  use ExUnit.Case
  @moduletag :cuda
  @moduletag :several_gpus

  import FlashAttention.Test.{Ranks, Tensors}
  alias FlashAttention.Distributed
  alias FlashAttention.Distributed.{Deal, NCCL, Transport}

  defp gpus do
    for %{device: {:cuda, _index} = device} <- FlashAttention.backend_info().devices, do: device
  end

  defp ranks(opts \\ []), do: for(device <- gpus(), do: [device: device] ++ opts)

  for type <- [:f32, :bf16, :f16] do
    test "what GPUs compute together is what one device does, in #{type}" do
      type = unquote(type)

      for {{name, sizes, opts}, seed} <- Enum.with_index(masks()),
          do: check(type, problem(seed, type, sizes, opts), ranks(), name, transport: :nccl)
    end
  end

  test "the same through the host's memory" do
    for {{name, sizes, opts}, seed} <- masks() |> Enum.take(4) |> Enum.with_index(),
        do: check(:bf16, problem(seed, :bf16, sizes, opts), ranks(), name, transport: :messages)
  end

  test "tensors that lie on the GPU stay there, and nothing is left behind" do
    used = fn ->
      for %{device: {:cuda, _}, memory: memory} <- FlashAttention.backend_info().devices, do: memory.used_bytes
    end

    before = used.()
    num_ranks = length(gpus())
    problem = problem(1, :bf16, {1, 512, 512, 4, 2, 64}, sink: 1)
    deal = Distributed.deal({512, 512}, num_ranks)

    {:ok, results} =
      Distributed.run(
        ranks(),
        fn group ->
          {:ok, memory} =
            FlashAttention.Native.upload(group.device, Deal.dispatch(deal, group.rank, problem.q).data)

          shards = for name <- [:k, :v, :dout], do: Deal.dispatch(deal, group.rank, problem[name])
          [k, v, dout] = shards

          q = %{
            Deal.dispatch(deal, group.rank, problem.q)
            | data: FlashAttention.DeviceMemory.from_native(memory)
          }

          {:ok, o, states} = Distributed.forward(group, deal, q, k, v, problem.opts)
          %FlashAttention.DeviceMemory{} = o.data
          {:ok, _dq, _dk, _dv, %{sink: _}} = Distributed.backward(group, dout, states, reduce: :sum)
          {:ok, bytes} = FlashAttention.DeviceMemory.to_binary(o.data)
          byte_size(bytes)
        end,
        transport: :nccl
      )

    assert Enum.sum(results) == byte_size(problem.q.data)
    :erlang.garbage_collect()
    assert used.() == before
  end

  defmodule Mortal do
    @behaviour Transport
    @impl true
    defdelegate open(group), to: NCCL
    @impl true
    defdelegate bring(group, tensor), to: NCCL
    @impl true
    defdelegate results, to: NCCL
    @impl true
    defdelegate abort(link), to: NCCL
    @impl true
    defdelegate close(link), to: NCCL

    @impl true
    def begin(group, number, gives, gets, likes) do
      step()
      NCCL.begin(group, number, gives, gets, likes)
    end

    @impl true
    def await(group, handle) do
      step()
      NCCL.await(group, handle)
    end

    defp step do
      left = Process.get(:steps_left, -1)
      if left == 0, do: Process.exit(self(), :kill)
      Process.put(:steps_left, left - 1)
    end
  end

  test "a rank that is killed at any step is missed by all others" do
    parent = self()
    count = length(gpus())
    deal = Distributed.deal({256, 256}, count)
    problem = problem(1, :bf16, {1, 256, 256, 2, 2, 64}, [])

    for step <- 0..5 do
      victim = rem(step, count)

      refs =
        for {device, rank} <- Enum.with_index(gpus()) do
          {_pid, ref} =
            spawn_monitor(fn ->
              opts = [device: device, transport: :nccl, timeout: 60_000]
              {:ok, group} = Distributed.join({:mortal, parent, step}, rank, count, opts)
              if rank == victim, do: Process.put(:steps_left, step)
              group = %{group | transport: Mortal}
              [q, k, v, dout] = for name <- [:q, :k, :v, :dout], do: Deal.dispatch(deal, rank, problem[name])

              result =
                with {:ok, _o, states} <- Distributed.forward(group, deal, q, k, v, stages: 3),
                     do: Distributed.backward(group, dout, states)

              send(parent, {:result, step, rank, result})
            end)

          ref
        end

      for ref <- refs, do: assert_receive({:DOWN, ^ref, :process, _pid, _reason})

      for rank <- 0..(count - 1), rank != victim do
        assert_receive {:result, ^step, ^rank, result}
        assert {:error, %{reason: :rank_lost, message: message}} = result
        assert message =~ "rank #{victim} is gone: :killed"
      end
    end
  end
end
