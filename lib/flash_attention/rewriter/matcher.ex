defmodule FlashAttention.Rewriter.Matcher do
  @moduledoc false
  # Every attention of a graph: all forwards first, then the gradients of each, then whether what they were made of is
  # still asked for by somebody else.

  alias FlashAttention.Rewriter.{Backward, Blocks, Forward, Graph, Terms}

  @doc """
  `{graph, matches, refusals}`: the graph, with what was added to it to see attention in it; what can be replaced; and
  `{number, reason}` for what looks like attention and stays.

  `takes` says of a match in that graph whether the library computes it: `:ok`, or `{:refuse, reason}`. With `weights: :keep`
  products that others use too are computed for them beside.
  """
  def run(graph, takes, opts \\ []) do
    dots = for {number, %{op: :dot}} <- Enum.sort(graph.values), do: number

    if dots == [],
      do: {graph, [], []},
      else: Terms.with_terms(graph, &run(&1, dots, takes, opts))
  end

  defp run(terms, dots, takes, opts) do
    found = for number <- dots, result = Forward.find(terms, number), result != :no, do: {number, result}
    {%{graph: graph} = terms, in_blocks} = Blocks.find(terms)
    found = found ++ in_blocks
    matches = Backward.find(terms, for({_number, {:ok, match}} <- found, do: match), dots)
    # What somebody's block is made of is there for its gradients alone, and is looked at on its own.
    live = Graph.reachable(graph, graph.results)
    refused = for {number, {:refuse, reason}} <- found, number in live, do: {number, reason}
    {matches, refused} = taken(matches, &takes.(&1, graph), refused)
    {matches, refused} = dropped_alike(matches, refused)
    {matches, unused} = settle(terms, matches, [], opts[:weights] == :keep)
    {graph, matches, Enum.sort(refused ++ unused)}
  end

  defp taken(matches, takes, refused) do
    answers = for match <- matches, do: {match, takes.(match)}

    {for({match, :ok} <- answers, do: match),
     refused ++ for({match, {:refuse, reason}} <- answers, do: {match.output, reason})}
  end

  # The library's bits are a key's and the size's: of one key the same for all, whichever of the program's numbers each has.
  defp dropped_alike(matches, refused) do
    first = for %{dropout: %{key: key}} = match <- Enum.reverse(matches), into: %{}, do: {key, match}

    {alike, others} =
      Enum.split_with(matches, fn
        %{dropout: nil} -> true
        %{dropout: %{key: key}} = match -> Forward.dropped(match) == Forward.dropped(first[key])
      end)

    reason = "another attention drops other weights by the same draw"
    {alike, refused ++ for(match <- others, do: {match.output, reason})}
  end

  # Refuses what is still used, until nothing is.
  defp settle(%{graph: graph} = terms, matches, refused, keep?) do
    stops = for match <- matches, {number, inputs} <- replaced(match), into: %{}, do: {number, inputs}
    live = Graph.reachable(graph, graph.results, &stops[&1])

    {matches, unreached} =
      Enum.split_with(matches, &Enum.any?(replaced(&1), fn {number, _} -> number in live end))

    {used, free} =
      Enum.split_with(matches, fn match ->
        drawn?(match, live) or
          (not keep? and
             (Enum.any?(match.products, &(&1 in live)) or Enum.any?(match.gradients, &used?(&1, live))))
      end)

    # An attention that only the scores of another one need is reached again once that one stays.
    case used do
      [] ->
        {matches, refused}

      _ ->
        settle(
          terms,
          free ++ unreached,
          refused ++ Enum.map(used, &{&1.output, user(terms, &1, live, stops)}),
          keep?
        )
    end
  end

  # What is computed beside would be dropped by other bits.
  defp drawn?(%{dropout: nil}, _live), do: false
  defp drawn?(%{dropout: %{view: {number, _}}}, live), do: number in live

  defp used?(%{inner: inner}, live), do: Enum.any?(inner, &(&1 in live))

  # What a match replaces, and what that is then made of.
  defp replaced(match) do
    inputs = inputs(match)

    [
      {match.output, inputs}
      | for(gradient <- match.gradients, do: {gradient.output, [elem(gradient.dout, 0) | inputs]})
    ]
  end

  @doc "The values that a match is computed from."
  def inputs(match), do: for({number, _indices} <- Forward.views(match), uniq: true, do: number)

  # Names the first that needs what would be gone; of what should be a gradient, where it begins to be none.
  defp user(%{graph: graph} = terms, match, live, stops) do
    dots = for number <- Enum.sort(live), Graph.fetch!(graph, number).op == :dot, do: number

    cond do
      match.dropout != nil and not Enum.any?(match.products, &(&1 in live)) ->
        "what its weights are dropped by is used elsewhere too"

      wrong = Backward.wrong(terms, match, dots) ->
        "its backward is no gradient of it from #{describe(graph, wrong)} on"

      true ->
        user_of_scores(graph, match, live, stops)
    end
  end

  defp user_of_scores(graph, match, live, stops) do
    above =
      above(graph, match.products, [
        match.output | for(g <- match.gradients, n <- g.inner ++ [g.output], do: n)
      ])

    needed = fn arg -> arg in above and not is_map_key(stops, arg) end
    others = Enum.reject(live, &(&1 in above or is_map_key(stops, &1)))

    case others |> Enum.sort() |> Enum.find(&Enum.any?(Graph.fetch!(graph, &1).args, needed)) do
      nil -> "its scores or weights are a result themselves"
      number -> "its scores or weights are used by #{describe(graph, number)} too"
    end
  end

  # What leads from the products to the outputs.
  defp above(graph, products, outputs) do
    first = Enum.min(products)
    below = Graph.reachable(graph, outputs, &if(&1 <= first, do: [], else: nil))

    below
    |> Enum.sort()
    |> Enum.reduce(MapSet.new(products), fn number, above ->
      if Enum.any?(Graph.fetch!(graph, number).args, &(&1 in above)),
        do: MapSet.put(above, number),
        else: above
    end)
  end

  @doc "A value in words."
  def describe(graph, number) do
    %{op: op, type: {class, bits}, shape: shape} = Graph.fetch!(graph, number)
    "#{op} #{class}#{bits}#{inspect(Tuple.to_list(shape), charlists: :as_lists)}"
  end
end
