# Ranks on two nodes, in a VM that has a name: prints what is right, a line each. distributed_test.exs runs it.
defmodule TwoNodes do
  alias FlashAttention.{Distributed, Tensor}
  alias FlashAttention.Distributed.Deal

  def run(module) do
    # The other node has the code by the same paths, and this module by name.
    paths = Enum.flat_map(:code.get_path(), &[~c"-pa", &1])
    cookie = [~c"-setcookie", Atom.to_charlist(Node.get_cookie())]

    {:ok, peer, node} =
      :peer.start(%{name: :peer.random_name(), host: ~c"127.0.0.1", longnames: true, args: paths ++ cookie})

    {:module, __MODULE__} = :rpc.call(node, :code, :load_binary, [__MODULE__, ~c"two_nodes", module])

    x = Tensor.new(for(i <- 1..640, into: <<>>, do: <<:math.sin(i)::float-64-native>>), :f64, {1, 40, 2, 8})
    compare(x, node)
    lose(x, peer, node)
  end

  defp compare(x, node) do
    deal = Distributed.deal({40, 40}, 3)
    {:ok, shards} = Distributed.run([[], [node: node], [node: node]], rank(deal, x), device: :cpu)
    {:ok, o} = FlashAttention.forward(x, x, x, device: :cpu)
    pairs = Enum.zip(numbers(o), numbers(Deal.undispatch(deal, shards)))
    IO.puts(if Enum.all?(pairs, fn {x, y} -> abs(x - y) < 1.0e-12 end), do: "same", else: "different")
  end

  defp rank(deal, x) do
    fn group ->
      shard = Deal.dispatch(deal, group.rank, x)
      {:ok, o, states} = Distributed.forward(group, deal, shard, shard, shard)
      {:ok, _dq, _dk, _dv} = Distributed.backward(group, shard, states)
      o
    end
  end

  defp numbers(%{data: data}), do: for(<<x::float-64-native <- data>>, do: x)

  # Rank 1 never answers, and then its node goes down.
  defp lose(x, peer, node) do
    deal = Distributed.deal({40, 40}, 2)
    ranks = [[], [node: node]]
    {:error, _ended} = Distributed.run(ranks, losing(deal, x, peer), device: :cpu, timeout: :infinity)
  end

  defp losing(deal, x, peer) do
    fn
      %{rank: 1} ->
        Process.sleep(:infinity)

      group ->
        spawn(fn -> :peer.stop(peer) end)
        shard = Deal.dispatch(deal, 0, x)
        {:error, error} = Distributed.forward(group, deal, shard, shard, shard)
        IO.puts(Exception.message(error))
    end
  end
end
|> then(fn {:module, module, binary, _} -> module.run(binary) end)
