defmodule FlashAttention.Rewriter.Blocks do
  @moduledoc false
  # Attention that divides by the sum of its exponentials last, and goes through blocks of keys one after the other on the way:
  #
  #     o = (sum_n c_n sum_j exp(s_nj - m_n) v_nj) / (sum_n c_n sum_j exp(s_nj - m_n)),   c_n = exp(m_n - m)
  #
  # Exponentials of differences are quotients of exponentials, so that maxima go, in whatever order they came, and what is
  # left is sum_n W_n / sum_n U_n. Scores and values of the blocks are then written side by side, as values that are added to
  # the graph, which makes of it attention that Forward knows.

  alias FlashAttention.Rewriter.{Forward, Graph, Index, Joined, Terms, Visibility}

  # Further blocks cost more to look at than they may save.
  @most 512

  @doc """
  `{terms, found}`: terms of a graph that holds what the blocks make side by side, and for each number of a value that is
  such attention what `Forward.find/2` gives.
  """
  def find(terms) do
    for {number, %{op: op}} when op in [:divide, :multiply] <- Enum.sort(terms.graph.values),
        last?(terms, number),
        reduce: {terms, []} do
      {terms, found} ->
        case attention(terms, number) do
          :no -> {terms, found}
          {terms, result} -> {terms, [{number, result} | found]}
        end
    end
  end

  # ---- what may be a division by the sum -----------------------------------------------------------------

  @layouts [:transpose, :reshape, :broadcast, :as_type, :slice]

  # Whether products of exponentials are divided by sums of them, or multiplied by what 1 is divided by those.
  defp last?(terms, number) do
    case Graph.fetch!(terms.graph, number) do
      %{op: :divide, args: [x, y]} -> sums?(terms, y) and products?(terms, x)
      %{op: :multiply, args: [x, y]} -> inverse_of?(terms, x, y) or inverse_of?(terms, y, x)
    end
  end

  defp inverse_of?(terms, x, y) do
    case Graph.fetch!(terms.graph, x) do
      %{op: :divide, args: [_one, sums]} -> sums?(terms, sums) and products?(terms, y)
      %{op: op, args: [arg | _]} when op in @layouts -> inverse_of?(terms, arg, y)
      _ -> false
    end
  end

  defp sums?(terms, number) do
    Terms.memo(terms, {:sums, number}, fn ->
      case Graph.fetch!(terms.graph, number) do
        %{op: :sum, args: [arg]} -> Forward.exponential?(terms, arg)
        %{op: op, args: args} when op in [:add, :multiply | @layouts] -> Enum.any?(args, &sums?(terms, &1))
        _ -> false
      end
    end)
  end

  defp products?(terms, number) do
    Terms.memo(terms, {:products_of_exponentials, number}, fn ->
      case Graph.fetch!(terms.graph, number) do
        %{op: :dot, args: args} ->
          Enum.any?(args, &Forward.exponential?(terms, &1))

        %{op: op, args: args} when op in [:add, :multiply, :divide | @layouts] ->
          Enum.any?(args, &products?(terms, &1))

        _ ->
          false
      end
    end)
  end

  # ---- sums of weighted values ---------------------------------------------------------------------------

  defp attention(terms, number) do
    shape = Graph.fetch!(terms.graph, number).shape

    out =
      for {size, axis} <- shape |> Tuple.to_list() |> Enum.with_index(), do: Index.variable({:o, axis}, size)

    with {:ok, blocks} <- blocks(terms, weighted(terms, {number, out})),
         do: side_by_side(terms, number, out, blocks)
  end

  # As Terms.term/2, but that exponentials of sums are products, and products of weights and values are looked into.
  defp weighted(terms, view) do
    view = Terms.strip(terms, view)

    Terms.memo(terms, {:weighted, view}, fn ->
      args = for arg <- Terms.value(terms, view).args, do: Terms.argument(terms, view, arg)
      weighted(Terms.value(terms, view).op, args, view, terms) || Terms.term(terms, view)
    end)
  end

  defp weighted(:add, [x, y], _view, terms), do: Terms.add(weighted(terms, x), weighted(terms, y))
  defp weighted(:multiply, [x, y], _view, terms), do: times(terms, weighted(terms, x), weighted(terms, y))

  defp weighted(:divide, [x, y], _view, terms) do
    divisor = weighted(terms, y)
    if divisor != %{}, do: times(terms, weighted(terms, x), inverse(terms, divisor))
  end

  defp weighted(:exp, [x], _view, terms), do: exponential(terms, Terms.term(terms, x))

  defp weighted(:sum, _args, view, terms) do
    {[arg], bound} = Terms.operands(terms, view)
    Terms.sum(terms, weighted(terms, arg), bound, Terms.sizes(arg))
  end

  defp weighted(:dot, _args, view, terms) do
    {operands, bound} = Terms.operands(terms, view)

    case Enum.split_with(operands, fn {number, _} -> Forward.exponential?(terms, number) end) do
      {[weights], [v]} -> weighted_values(terms, weights, Terms.strip(terms, v), bound)
      _ -> nil
    end
  end

  defp weighted(_op, _args, _view, _terms), do: nil

  # What a sum is that of is kept with it.
  defp weighted_values(terms, weights, v, bound) do
    values = Terms.of_factor(Terms.factor(terms, {:leaf, v}, Terms.variables(v), v))
    sizes = Map.merge(Terms.sizes(weights), Terms.sizes(v))
    sum = Terms.sum(terms, Terms.multiply(terms, weighted(terms, weights), values), bound, sizes)

    for {monomial, _} <- sum,
        {factor, 1} <- monomial,
        match?({:sum, _, _}, Terms.info(terms, factor).structure),
        do: Terms.memo(terms, {:weighted_values, factor}, fn -> {weights, v, Map.keys(values)} end)

    sum
  end

  defp times(terms, x, y),
    do: if(map_size(x) * map_size(y) <= @most, do: Terms.multiply(terms, x, y))

  # What all of a sum is multiplied by is taken out of it first.
  defp inverse(terms, term) do
    [first | others] = for {monomial, _} <- term, do: Map.new(monomial)

    common =
      Enum.reduce(others, first, fn monomial, common ->
        for {factor, power} <- common, monomial[factor] == power, into: %{}, do: {factor, power}
      end)

    out = for {factor, power} <- common, do: {factor, -power}
    out = %{Enum.sort(out) => 1.0}
    Terms.multiply(terms, out, Terms.inverse(terms, Terms.multiply(terms, term, out)))
  end

  # exp(-infinity - x) is 0; a -infinity that a predicate is beside of is that of what is hidden.
  defp exponential(terms, term) do
    infinity = Terms.factor(terms, {:constant, :neg_infinity}, [], nil)

    case for {monomial, x} <- term, List.keymember?(monomial, infinity, 0), do: {monomial, x} do
      [{[{_, 1}], x}] when x > 0 -> %{}
      _ -> %{Enum.sort(for {monomial, x} <- term, do: power(terms, monomial, x)) => 1.0}
    end
  end

  defp power(terms, monomial, x) do
    part = %{monomial => abs(x)}
    structure = {:exponential, Terms.key(terms, part)}
    {Terms.factor(terms, structure, Terms.term_variables(terms, part), nil), if(x > 0, do: 1, else: -1)}
  end

  # ---- sum_n W_n / sum_n U_n -----------------------------------------------------------------------------

  defp blocks(terms, weighted) do
    parts = for {monomial, 1.0} <- weighted, part = part(terms, monomial), do: part

    with true <- parts != [] and length(parts) == map_size(weighted) and length(parts) <= @most,
         [rest] <- parts |> Enum.map(& &1.rest) |> Enum.uniq(),
         {:ok, sums} <- sums(terms, rest),
         true <- Enum.sort(sums) == Enum.sort(for part <- parts, do: part.sum),
         blocks = for(part <- parts, do: scores(terms, part)),
         true <- Enum.all?(blocks) do
      {:ok, blocks}
    else
      _ -> :no
    end
  end

  # W_n, and what it is multiplied by: the sum that it is divided by has its exponentials, without the values.
  defp part(terms, monomial) do
    Enum.find_value(monomial, fn
      {factor, 1} = found ->
        with {:sum, inside, [column]} <- Terms.info(terms, factor).structure,
             {weights, v, [[{value, 1}]]} <- Terms.memo(terms, {:weighted_values, factor}, fn -> nil end),
             true <- {value, 1} in inside do
          exponentials = inside -- [{value, 1}]
          %{weights: weights, v: v, column: column, sum: {exponentials, column}, rest: monomial -- [found]}
        else
          _ -> nil
        end

      _ ->
        nil
    end)
  end

  defp sums(terms, [{factor, -1}]), do: sums_of(terms, [{[{factor, 1}], 1.0}])

  defp sums(terms, [{factor, 1}]) do
    case Terms.info(terms, factor) do
      %{structure: {:inverse, _}, view: term} -> sums_of(terms, Map.to_list(term))
      _ -> :error
    end
  end

  defp sums(_terms, _rest), do: :error

  defp sums_of(terms, monomials) do
    sums =
      for {[{factor, 1}], 1.0} <- monomials,
          {:sum, inside, [column]} <- [Terms.info(terms, factor).structure],
          do: {inside, column}

    if length(sums) == length(monomials), do: {:ok, sums}, else: :error
  end

  # The scores whose exponentials these are, and what is subtracted from them.
  defp scores(terms, %{weights: weights, column: column, sum: {exponentials, _}} = part) do
    with exponential when exponential != nil <- exponential_in(terms, weights, column) do
      [arg] = Terms.args(terms, exponential)

      Enum.find_value(difference(terms, Terms.strip(terms, arg)) ++ [{arg, nil}], fn {s, shift} ->
        if depending(terms, s, column) == exponentials, do: Map.merge(part, %{s: s, shift: shift})
      end)
    end
  end

  defp difference(terms, view) do
    with %{op: :subtract} <- Terms.value(terms, view),
         [s, shift] = Terms.args(terms, view),
         do: [{s, shift}],
         else: (_ -> [])
  end

  # The exponential of scores, as far as it depends on the column.
  defp depending(terms, s, column) do
    for monomial <- terms |> exponential(Terms.term(terms, s)) |> Map.keys(),
        {factor, _} = power <- monomial,
        column in Terms.info(terms, factor).variables,
        do: power
  end

  defp exponential_in(terms, view, column) do
    view = Terms.strip(terms, view)

    cond do
      column not in Terms.variables(view) -> nil
      Terms.value(terms, view).op == :exp -> view
      true -> Enum.find_value(args(terms, view), &exponential_in(terms, &1, column))
    end
  end

  defp args(terms, view) do
    if Forward.passing?(Terms.value(terms, view).op), do: Terms.args(terms, view), else: []
  end

  # Where along the keys a block begins.
  defp start(terms, view, column) do
    view = Terms.resolve(terms, view)

    case {Terms.value(terms, view), args(terms, view)} do
      {%{op: :slice, opts: opts}, _} ->
        opts[:starts] |> Enum.zip(elem(view, 1)) |> Enum.find_value(0, &along(&1, column))

      {_, args} ->
        args |> Enum.map(&start(terms, &1, column)) |> Enum.max(fn -> 0 end)
    end
  end

  defp along({start, [{column, 1, _}]}, column), do: start
  defp along(_start, _column), do: nil

  # ---- side by side --------------------------------------------------------------------------------------

  @apart "its blocks of keys are not parts of the same tensors"

  # The softmax of all scores, and all values. `at` says which variables the axes of what is added to the graph stand for.
  defp side_by_side(terms, number, out, [%{column: column} | _] = blocks) do
    blocks = Enum.sort_by(blocks, &start(terms, &1.v, column))
    sizes = for block <- blocks, do: Terms.sizes(block.weights)[column]
    starts = Enum.scan([0 | sizes], &+/2) |> Enum.take(length(sizes))
    all = for index <- out, {name, 1, size} <- index, into: %{column => Enum.sum(sizes)}, do: {name, size}
    at = %{column: column, blocks: Enum.zip(starts, sizes), names: Index.variables(out) ++ [column], sizes: all}

    {s, state} = Joined.join(Joined.new(terms), for(block <- blocks, do: block.s), at)
    {v, state} = Joined.join(state, for(block <- blocks, do: block.v), at)
    {weights, state} = Joined.softmax(state, s)
    along = %{column => Index.variable(:j, all[column])}

    [{:ok, weights}, {:ok, v}] =
      for number <- [weights, v], do: Terms.substitute({number, Joined.indices(state, number, at)}, along)

    {state.terms, state.terms |> Forward.attention(number, out, weights, v) |> exactly(state, blocks, at)}
  catch
    :apart -> {terms, {:refuse, @apart}}
  end

  # ---- whether blocks are the same to the last row -------------------------------------------------------

  @lost "rows that see nothing of its first block of keys may be NaN"

  # A maximum that is -infinity so far makes NaN of what it is subtracted from, where all of a block is hidden by -infinity;
  # and one that begins with a number may be larger than all that is hidden by another.
  defp exactly({:ok, match}, state, blocks, at) do
    match = %{match | products: Enum.uniq(match.products ++ state.dots)}
    %{type: type} = Terms.value(state.terms, match.scores)
    infinite? = Enum.any?(match.hidden, &(&1.fill == :neg_infinity))
    below = for block <- blocks, block.shift, do: maxima(state.terms, block.shift, blocks, at)

    cond do
      Enum.any?(below, &(:unknown in &1)) and match.hidden != [] ->
        {:refuse, @lost}

      infinite? and not Enum.all?(below, &seen_by_all?(&1, match, at)) ->
        {:refuse, @lost}

      Enum.any?(below, &too_large?(&1, match, type)) ->
        {:refuse, "its maximum begins with a number that scores may be far below"}

      true ->
        {:ok, match}
    end
  end

  defp exactly(other, _state, _blocks, _at), do: other

  # What the largest is taken of: places of blocks, and numbers.
  defp maxima(terms, view, blocks, at) do
    view = Terms.strip(terms, view)

    case {Terms.value(terms, view), args(terms, view)} do
      {%{op: :max}, args} -> Enum.flat_map(args, &maxima(terms, &1, blocks, at))
      {%{op: :constant, opts: number}, _} -> [number]
      {%{op: :reduce_max}, _} -> [block_of(terms, view, blocks, at)]
      _ -> [:unknown]
    end
  end

  defp block_of(terms, view, blocks, at) do
    {[arg], bound} = Terms.operands(terms, view)

    found =
      Enum.find_index(blocks, &(bound == [at.column] and Terms.term(terms, &1.s) == Terms.term(terms, arg)))

    if found, do: {:block, Enum.at(at.blocks, found)}, else: :unknown
  end

  defp seen_by_all?(maxima, match, at) do
    Enum.any?(maxima, &is_number/1) or
      Enum.any?(for {:block, {start, size}} <- maxima, do: seen_by_all?(start, size, match, at))
  end

  defp seen_by_all?(start, size, %{visibility: visibility, axes: axes}, at) do
    [k_begin, k_end] = for bound <- [start, start + size], do: %{constant: bound}
    within = %{visibility | k_begin: [k_begin | visibility.k_begin], k_end: [k_end | visibility.k_end]}
    Visibility.every_row_sees?(within, Index.size(axes.rows), at.sizes[at.column])
  end

  defp too_large?(maxima, match, type) do
    lowest = for %{fill: fill} when is_number(fill) <- match.hidden, match.empty_rows != :none, do: fill

    Enum.any?(maxima, fn number ->
      number in [:infinity, :nan] or
        (is_number(number) and (not Forward.far?(number, type) or Enum.any?(lowest, &(&1 < number))))
    end)
  end
end
