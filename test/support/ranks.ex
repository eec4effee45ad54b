defmodule FlashAttention.Test.Ranks do
  @moduledoc "Attention over ranks beside attention on one device, whatever the ranks compute on."

  import ExUnit.Assertions
  import FlashAttention.Test.Tensors
  alias FlashAttention.{Distributed, Mask}
  alias FlashAttention.Distributed.Deal

  @deal_options [:causal, :window, :mask, :chunk]
  @rank_options [:stages, :reduce]
  @f32 :math.pow(2, -24)

  @doc "Names, sizes as `Tensors.problem/4` has them, and options."
  def masks do
    [
      {"causal", {1, 41, 41, 4, 2, 7}, []},
      {"full", {2, 37, 37, 2, 2, 5}, causal: false},
      {"window", {1, 45, 45, 2, 1, 4}, window: {6, 0}},
      {"packed", {1, 44, 44, 4, 1, 6}, mask: Mask.packed([3, 17, 1, 0, 23])},
      {"block causal", {1, 40, 40, 2, 2, 6}, causal: false, mask: Mask.block_causal(9)},
      {"prefix, a length a batch", {2, 30, 30, 2, 2, 4}, causal: false, mask: Mask.prefix([0, 13])},
      {"fewer rows than columns", {1, 13, 50, 4, 2, 5}, []},
      {"more rows than columns", {1, 50, 13, 2, 2, 5}, []},
      {"sink", {1, 40, 40, 4, 2, 6}, sink: 1},
      {"many sinks, softcap, scale", {2, 33, 33, 3, 3, 5}, sink: 8, softcap: 3.0, scale: 0.4},
      {"many small chunks", {1, 43, 43, 2, 1, 3}, chunk: 2, sink: 2},
      {"a stage a rank", {1, 43, 43, 2, 1, 3}, stages: 7},
      {"one stage for all", {1, 43, 43, 2, 1, 3}, stages: 1, sink: 3},
      {"rows that lie as aligned as the whole", {1, 256, 256, 2, 1, 32}, chunk: 32, sink: 1},
      {"fewer rows than ranks", {1, 3, 3, 2, 1, 3}, sink: 1}
    ]
  end

  @doc "The results of all ranks, as whole tensors, and dsink of each; ranks are a number or options of each."
  def on_ranks(problem, ranks, opts \\ [device: :cpu]) do
    run_options = opts
    num_ranks = if is_list(ranks), do: length(ranks), else: ranks
    {deal_options, opts} = Keyword.split(problem.opts, @deal_options)
    {reduce, opts} = Keyword.pop(opts, :reduce, :none)
    deal = Distributed.deal(size(problem), num_ranks, deal_options)

    {:ok, ranks} =
      Distributed.run(
        ranks,
        fn group ->
          shard = fn name, axis -> Deal.dispatch(deal, group.rank, problem[name], axis) end
          [q, dout] = for name <- [:q, :dout], do: shard.(name, :rows)
          [k, v] = for name <- [:k, :v], do: shard.(name, :columns)
          {:ok, o, states} = Distributed.forward(group, deal, q, k, v, opts)
          backward = Distributed.backward(group, dout, states, reduce: reduce)
          [:ok, dq, dk, dv | optional] = Tuple.to_list(backward)
          %{o: o, dq: dq, dk: dk, dv: dv, optional: optional}
        end,
        run_options
      )

    whole = fn name, axis -> Deal.undispatch(deal, for(rank <- ranks, do: rank[name]), axis) end

    %{
      o: whole.(:o, :rows),
      dq: whole.(:dq, :rows),
      dk: whole.(:dk, :columns),
      dv: whole.(:dv, :columns),
      dsinks: for(%{optional: [%{sink: dsink}]} <- ranks, do: dsink)
    }
  end

  defp size(%{q: %{shape: {_, seqlen_q, _, _}}, k: %{shape: {_, seqlen_k, _, _}}}), do: {seqlen_q, seqlen_k}

  defp reference(problem, type) do
    convert = fn tensor -> convert(tensor, type) end
    opts = Keyword.drop(problem.opts, [:chunk | @rank_options]) ++ [device: :reference]
    %{q: q, k: k, v: v, dout: dout} = problem
    [q, k, v, dout] = Enum.map([q, k, v, dout], convert)
    {:ok, o, lse} = FlashAttention.forward_with_states(q, k, v, opts)
    [:ok, dq, dk, dv | optional] = dout |> FlashAttention.backward(q, k, v, o, lse, opts) |> Tuple.to_list()
    dsink = for %{sink: dsink} <- optional, into: %{}, do: {:dsink, to_list(dsink)}
    Map.merge(%{o: to_list(o), dq: to_list(dq), dk: to_list(dk), dv: to_list(dv)}, dsink)
  end

  @doc "Asserts that what ranks compute is what one device does."
  def check(type, problem, ranks, about, opts \\ [device: :cpu]) do
    got = on_ranks(problem, ranks, opts)
    num_ranks = if is_list(ranks), do: length(ranks), else: ranks
    {exact, naive} = {reference(problem, :f64), reference(problem, type)}
    bounds = bounds(%{problem | opts: Keyword.drop(problem.opts, [:chunk | @rank_options])})

    dsinks = Enum.map(got.dsinks, &to_list/1)
    sums = if dsinks == [], do: %{}, else: %{dsink: Enum.zip_with(dsinks, &Enum.sum/1)}
    # Each rank rounds its own sum to f32.
    rounded =
      Enum.zip_with(dsinks, fn numbers -> numbers |> Enum.map(&abs/1) |> Enum.sum() |> Kernel.*(@f32) end)

    bounds = Map.update(bounds, :dsink, [], &Enum.zip_with(&1, rounded, fn x, y -> x + y end))

    numbers = for name <- [:o, :dq, :dk, :dv], into: sums, do: {name, to_list(got[name])}

    for {name, numbers} <- numbers do
      share = share_of_tolerance(numbers, exact[name], naive[name], bounds[name])
      assert share <= 1, "#{inspect(about)}, #{num_ranks} ranks, #{type}, #{name}: #{share} of what is allowed"
    end
  end
end
