defmodule FlashAttention.Rewriter.Backward do
  @moduledoc false
  # The gradients of attention: each product of something with what is made of a forward's scores is held against
  #
  #     dv = p dout                dq = ds k                dk = ds q
  #     ds = (p (dout v) - p sum_j p (dout v)) * (derivative of the score's program)
  #     dsink = - sum_i p_sink sum_j p (dout v)
  #
  # as terms, in which it does not matter how they were written, nor that the row's maximum was differentiated too: its
  # share is a term that is 0. Where k and v were repeated for groups of heads, gradients are sums over the group.

  alias FlashAttention.Rewriter.{Graph, Index, Terms}

  @passing [:add, :subtract, :multiply, :divide, :select, :negate, :exp, :tanh, :pow, :as_type, :max, :min] ++
             [:transpose, :reshape, :broadcast, :slice, :concatenate]

  @doc "The matches with the gradients that are found."
  def find(_terms, [], _dots), do: []

  def find(terms, matches, dots) do
    by_product = Enum.group_by(matches, &elem(&1.product, 0))
    taken = Map.keys(by_product) ++ for(match <- matches, do: match.output)
    candidates = candidates(terms, dots -- taken)

    gradients =
      for candidate <- candidates,
          product <- products(terms, candidate, by_product),
          match <- by_product[product],
          {:ok, gradient} <- [gradient(terms, match, candidate)],
          do: {match.output, gradient}

    added = of_biases(terms, by_product) ++ of_sinks(terms, matches)
    gradients = Enum.group_by(gradients ++ added, &elem(&1, 0), &elem(&1, 1))
    for match <- matches, do: %{match | gradients: with_zeros(terms, match, gradients[match.output] || [])}
  end

  # The share that the maximum of scores and sinks has in a sink's gradient is nothing, and stands by itself.
  defp with_zeros(terms, %{sinks: [_ | _]} = match, [%{dout: dout} | _] = gradients) do
    gradients ++
      for {number, %{op: :sum}} <- Enum.sort(terms.graph.values),
          number > elem(match.product, 0),
          Terms.term(terms, fresh(terms, number)) == %{},
          do: %{output: number, of: :zero, indices: [], factor: 1, dout: dout, inner: []}
  end

  defp with_zeros(_terms, _match, gradients), do: gradients

  # ---- gradients of what is added to scores: sums of the scores' own, or those ----------------------------

  # What stands beside sinks is cut out.
  @scores [:add, :subtract, :multiply, :divide, :select, :negate, :as_type, :sum, :slice]

  defp of_biases(terms, by_product) do
    if Enum.any?(by_product, fn {_, matches} -> Enum.any?(matches, &(&1.biases != [])) end) do
      for {number, %{op: op}} when op in @scores <- Enum.sort(terms.graph.values),
          candidate = below_sum(terms, fresh(terms, number), number),
          product <- below(terms, candidate.dot, by_product),
          match <- by_product[product],
          {{_view, factor} = bias, n} <- Enum.with_index(match.biases),
          {:ok, gradient} <- [of_bias(terms, match, candidate, bias, {:bias, n}, factor)],
          do: {match.output, gradient}
    else
      []
    end
  end

  defp of_bias(terms, match, candidate, _bias, name, factor) do
    with {:ok, product} <- descend(terms, candidate.view, elem(match.product, 0)),
         {:ok, names} <- unify(elem(product, 1), elem(match.product, 1), %{}),
         {:ok, scores} <- Terms.substitute(candidate.view, names),
         term = terms |> Terms.term(scores) |> unmasked(terms, match),
         {:ok, dp, dout} <- dp(terms, match, term),
         {:ok, ratio} <- ratio(term, terms |> dz(match, dp) |> Terms.scale(factor) |> unmasked(terms, match)),
         do: found(match, Map.put(candidate, :names, names), name, ratio, dout, [elem(dp, 0)])
  end

  # ---- gradients of sinks: sums over rows of what the sink's own exponential is a factor of ----------------

  defp of_sinks(terms, matches) do
    of_sinks? = Enum.any?(matches, &(&1.sinks != []))

    candidates =
      if of_sinks?, do: terms |> of_exponentials() |> Enum.group_by(&elem(&1, 0), &elem(&1, 1)), else: %{}

    for match <- matches,
        {{number, _} = exponential, n} <- Enum.with_index(match.sink_exponentials),
        candidate <- Map.get(candidates, number, []),
        candidate.output > elem(match.product, 0),
        {:ok, gradient} <- [of_sink(terms, match, candidate, exponential, {:sink, n})],
        do: {match.output, gradient}
  end

  # By the numbers of the exponentials that are factors of them.
  defp of_exponentials(terms) do
    for {number, %{op: op}} when op in @scores <- Enum.sort(terms.graph.values),
        candidate <- terms |> below_sum(fresh(terms, number), number) |> with_factors(terms),
        {monomial, _} <- term_of(terms, candidate),
        {factor, 1} <- monomial,
        %{structure: {:exp, _}, view: {exponential, _}} <- [Terms.info(terms, factor)],
        uniq: true,
        do: {exponential, candidate}
  end

  # What a sum is multiplied by may as well be a factor of what is summed.
  defp with_factors(%{view: view} = candidate, terms) do
    pairs =
      with %{op: :multiply} <- Terms.value(terms, view),
           [x, y] = Terms.args(terms, view),
           do: [{x, y}, {y, x}],
           else: (_ -> [])

    within =
      for {sum, factor} <- pairs,
          view <- summed(terms, sum),
          do: Map.merge(candidate, %{view: view, times: factor})

    [Map.put(candidate, :times, nil) | within]
  end

  # What is summed, sum below sum.
  defp summed(terms, view) do
    view = Terms.strip(terms, view)

    case Terms.value(terms, view) do
      %{op: :sum} ->
        {[arg], _bound} = Terms.operands(terms, view)
        [arg | summed(terms, arg)]

      _ ->
        []
    end
  end

  defp term_of(terms, %{view: view, times: nil}), do: Terms.term(terms, view)

  defp term_of(terms, %{view: view, times: factor}),
    do: Terms.multiply(terms, Terms.term(terms, view), Terms.term(terms, factor))

  defp of_sink(terms, match, candidate, {number, indices} = exponential, name) do
    term = term_of(terms, candidate)

    with {:ok, there} <- factor_at(terms, term, number),
         {:ok, names} <- of_weights(terms, match, term),
         {there, indices} = of_sinks_alone(there, indices, names),
         {:ok, names} <- unify(there, indices, names),
         {:ok, substituted} <- named(terms, candidate, names),
         term = terms |> term_of(substituted) |> unmasked(terms, match),
         {:ok, dp, dout} <- dp_in_sums(terms, match, term),
         probability = of_sink_alone(terms, match, exponential),
         target = Terms.multiply(terms, probability, sum_of_products(terms, match, dp)),
         {:ok, ratio} <- ratio(term, target |> Terms.scale(-1.0) |> unmasked(terms, match)),
         do: found(match, Map.put(candidate, :names, names), name, ratio, dout, [elem(dp, 0)])
  end

  # What names say already need not be that of a sink, which may not depend on it.
  defp of_sinks_alone(there, indices, names) when names == %{}, do: {there, indices}

  defp of_sinks_alone(there, indices, _names) do
    Enum.zip(there, indices)
    |> Enum.filter(fn {_, index} -> Enum.any?(Index.variables([index]), &match?({:sink, _}, &1)) end)
    |> Enum.unzip()
  end

  # The names of rows and batches, which a sink alone may not have, by the exponentials that are summed.
  defp of_weights(terms, %{exponential: {number, indices}}, term) do
    sums =
      for {monomial, _} <- term,
          {factor, _} <- monomial,
          {:sum, inside, _} <- [Terms.info(terms, factor).structure],
          do: inside

    found = for inside <- sums, {:ok, there} <- [factor_at(terms, %{inside => 1.0}, number)], do: there
    if found == [], do: {:ok, %{}}, else: found |> hd() |> unify(indices, %{})
  end

  defp named(_terms, candidate, names) do
    with {:ok, view} <- Terms.substitute(candidate.view, names),
         {:ok, factor} <- if(candidate.times, do: Terms.substitute(candidate.times, names), else: {:ok, nil}),
         do: {:ok, %{candidate | view: view, times: factor}}
  end

  defp of_sink_alone(terms, match, sink) do
    exponential = Terms.term(terms, match.exponential)

    match.probability
    |> then(&Terms.multiply(terms, &1, Terms.inverse(terms, exponential)))
    |> then(&Terms.multiply(terms, &1, Terms.term(terms, sink)))
  end

  # The indices of that value where it is a factor.
  defp factor_at(terms, term, number) do
    Enum.find_value(term, :error, fn {monomial, _} ->
      Enum.find_value(monomial, fn {factor, _} ->
        with %{view: {^number, indices}} <- Terms.info(terms, factor), do: {:ok, indices}, else: (_ -> nil)
      end)
    end)
  end

  # The product of dout and v in sums over the columns, as it is in one of them.
  defp dp_in_sums(terms, match, term) do
    views =
      for {monomial, _} <- term,
          {factor, 1} <- monomial,
          {:sum, inside, [_column]} <- [Terms.info(terms, factor).structure],
          {inner, 1} <- inside,
          %{structure: {:dot, _}, view: view} <- [Terms.info(terms, inner)],
          do: view

    Enum.find_value(views, :error, fn view ->
      with {:ok, _view, dout, names} <- dout(terms, match, view),
           {:ok, dp} <- Terms.substitute(view, names),
           do: {:ok, dp, dout},
           else: (_ -> nil)
    end)
  end

  # ---- what may be a gradient: products, and sums of products ---------------------------------------------

  defp candidates(terms, dots) do
    sums =
      for {number, %{op: :sum}} <- Enum.sort(terms.graph.values),
          candidate = below_sum(terms, fresh(terms, number), number),
          candidate.dot in dots,
          do: candidate

    sums ++
      for dot <- dots,
          do: %{output: dot, indices: elem(fresh(terms, dot), 1), view: fresh(terms, dot), dot: dot}
  end

  defp below_sum(terms, view, output), do: below_sum(terms, view, output, elem(view, 1))

  defp below_sum(terms, view, output, indices) do
    view = Terms.resolve(terms, view)

    case Terms.value(terms, view) do
      %{op: :sum} ->
        {[arg], _bound} = Terms.operands(terms, view)
        below_sum(terms, arg, output, indices)

      _ ->
        %{output: output, indices: indices, view: view, dot: elem(view, 0)}
    end
  end

  defp fresh(terms, number) do
    shape = Graph.fetch!(terms.graph, number).shape |> Tuple.to_list() |> Enum.with_index()
    {number, for({size, axis} <- shape, do: Index.variable({:g, axis}, size))}
  end

  # The products of forwards that lie below either operand, on ways through elementwise operations and layouts.
  defp products(terms, %{dot: dot}, by_product) do
    for arg <- Graph.fetch!(terms.graph, dot).args,
        product <- below(terms, arg, by_product),
        uniq: true,
        do: product
  end

  defp below(terms, number, by_product) do
    Terms.memo(terms, {:products, number}, fn ->
      value = Graph.fetch!(terms.graph, number)

      cond do
        is_map_key(by_product, number) ->
          [number]

        value.op in [:pad | @passing] ->
          for(arg <- value.args, product <- below(terms, arg, by_product), uniq: true, do: product)

        true ->
          []
      end
    end)
  end

  # ---- one of them ---------------------------------------------------------------------------------------

  defp gradient(terms, match, candidate) do
    {[one, other], _bound} = Terms.operands(terms, candidate.view)

    with :error <- gradient(terms, match, candidate, one, other),
         do: gradient(terms, match, candidate, other, one)
  end

  # Of scores or weights and the tensor that they are multiplied by.
  defp gradient(terms, match, candidate, scores, tensor) do
    with {:ok, found} <- descend(terms, scores, elem(match.product, 0)),
         {:ok, names} <- unify(elem(found, 1), elem(match.product, 1), %{}),
         {:ok, scores} <- Terms.substitute(scores, names),
         {:ok, tensor} <- Terms.substitute(tensor, names) do
      term = terms |> Terms.term(scores) |> unmasked(terms, match)
      candidate = Map.put(candidate, :names, names)

      with :error <- dv(terms, match, candidate, term, Terms.resolve(terms, tensor)),
           do: dscores(terms, match, candidate, term, Terms.strip(terms, tensor))
    end
  end

  # The way from a view down to a product.
  defp descend(terms, view, product) do
    view = Terms.strip(terms, view)
    value = Terms.value(terms, view)

    cond do
      elem(view, 0) == product ->
        {:ok, view}

      value.op in @passing ->
        Enum.find_value(args(terms, view), :error, fn {number, _} = arg ->
          if product in Terms.memo(terms, {:products, number}, fn -> [] end) do
            with :error <- descend(terms, arg, product), do: nil
          end
        end)

      true ->
        :error
    end
  end

  # What moves numbers in a way that views do not follow leads nowhere.
  @moving [:transpose, :reshape, :broadcast, :slice]
  defp args(terms, view) do
    case {Terms.cut(terms, view), Terms.value(terms, view)} do
      {{:ok, view}, _} -> [view]
      {:error, %{op: op}} when op in @moving -> []
      _ -> Terms.args(terms, view)
    end
  end

  # dv = p dout, with v's own axes; or e (dout / l), where the sum is divided by last.
  defp dv(terms, match, candidate, term, dout) do
    with {:ok, factor, dout} <- weighted(terms, match, term, dout),
         {:ok, names} <- rest(candidate, match.axes.values),
         {:ok, dout} <- Terms.substitute(dout, names),
         do: found(match, %{candidate | names: names}, :v, factor, dout, [])
  end

  defp weighted(terms, match, term, dout) do
    [weights, exponential] =
      for view <- [match.weights, match.exponential], do: unmasked(Terms.term(terms, view), terms, match)

    with :error <- with({:ok, factor} <- ratio(term, weights), do: {:ok, factor, dout}),
         {:ok, factor} <- ratio(term, exponential),
         {:ok, dout} <- undivided(terms, match, dout),
         do: {:ok, factor, dout}
  end

  # What is divided by the sum of the exponentials.
  defp undivided(terms, match, view) do
    view = Terms.strip(terms, view)
    exponential = Terms.term(terms, match.exponential)
    sum = Terms.multiply(terms, exponential, Terms.inverse(terms, match.probability))

    with %{op: :divide} <- Terms.value(terms, view),
         [dout, divisor] = Terms.args(terms, view),
         true <- Terms.term(terms, divisor) == sum,
         do: {:ok, Terms.resolve(terms, dout)},
         else: (_ -> :error)
  end

  # What no product of the forward has are the axes of the values, whichever of them is which: dout has them likewise.
  defp rest(%{indices: indices, names: names}, values) do
    sizes = Terms.sizes({nil, indices})
    unnamed = for name <- Index.variables(indices), not is_map_key(names, name), do: {name, sizes[name]}

    case {unnamed, for({_, _, size} <- values, do: size)} do
      {[], _} ->
        {:ok, names}

      {[{name, _}], _} ->
        {:ok, Map.put(names, name, values)}

      {several, sizes} ->
        if Enum.map(several, &elem(&1, 1)) == sizes, do: {:ok, one_by_one(names, several, values)}, else: :error
    end
  end

  defp one_by_one(names, several, values),
    do: for({{name, _}, digit} <- Enum.zip(several, values), into: names, do: {name, [digit]})

  # dq = ds k and dk = ds q.
  defp dscores(terms, match, candidate, term, tensor) do
    Enum.find_value([q: match.k, k: match.q], :error, fn {of, leaf} ->
      leaf = Terms.strip(terms, leaf)

      with true <- elem(leaf, 0) == elem(tensor, 0),
           {:ok, names} <- unify(elem(tensor, 1), elem(leaf, 1), candidate.names),
           {:ok, factor, dout, inner} <- of_target(terms, match, term),
           {:ok, _gradient} = found <- found(match, %{candidate | names: names}, of, factor, dout, inner) do
        found
      else
        _ -> nil
      end
    end)
  end

  # Gradients are those of tensors as they are: along all of their axes, and no other.
  defp found(match, candidate, of, factor, dout, inner) do
    {:ok, {_, indices}} = Terms.substitute({candidate.output, candidate.indices}, candidate.names)
    {_, own} = leaf(match, of)

    [got, wanted] =
      for indices <- [indices, own], do: indices |> Enum.concat() |> Index.refine(match.atoms) |> Enum.sort()

    if got == wanted,
      do:
        {:ok,
         %{
           output: candidate.output,
           of: of,
           indices: indices,
           factor: factor,
           dout: dout,
           inner: inner ++ below_output(candidate)
         }},
      else: :error
  end

  defp leaf(match, {:bias, n}), do: match.biases |> Enum.at(n) |> elem(0)
  defp leaf(match, {:sink, n}), do: Enum.at(match.sinks, n)
  defp leaf(match, name), do: Map.fetch!(match, name)

  defp below_output(%{output: output, dot: dot}), do: if(output == dot, do: [], else: [dot])

  # ---- what the derivative by the product of q and k is --------------------------------------------------

  # Which multiple of the derivative it is.
  defp of_target(terms, match, term) do
    Enum.find_value([&target/3, &target_last/3], :error, fn target ->
      with {:ok, target, dout, inner} <- target.(terms, match, term),
           {:ok, factor} <- ratio(term, target),
           do: {:ok, factor, dout, inner},
           else: (_ -> nil)
    end)
  end

  # Where the sum is divided by last, dout is divided by it: e ((dout / l) v) - e sum (dout / l) o, over what o has in a row.
  defp target_last(terms, match, term) do
    with {:ok, dp, divided} <- dp(terms, match, term),
         {:ok, dout} <- undivided(terms, match, divided),
         [{name, 1, size}] <- match.axes.values,
         bound = {:bound, 1, 0},
         {:ok, o} <- Terms.substitute({match.output, match.out}, %{name => [{bound, 1, size}]}),
         {:ok, divided} <- Terms.substitute(divided, %{name => [{bound, 1, size}]}) do
      products = Terms.multiply(terms, Terms.term(terms, divided), Terms.term(terms, o))
      sum = Terms.sum(terms, products, [bound], %{bound => size})

      dz =
        Terms.multiply(terms, Terms.term(terms, match.exponential), Terms.subtract(Terms.term(terms, dp), sum))

      {:ok, dz |> through(terms, match.steps) |> unmasked(terms, match), dout, [elem(dp, 0)]}
    end
  end

  # Once through all of the program; with a bias, also down to that.
  defp target(terms, match, term) do
    with {:ok, dp, dout} <- dp(terms, match, term) do
      {:ok, terms |> dz(match, dp) |> through(terms, match.steps) |> unmasked(terms, match), dout,
       [elem(dp, 0)]}
    end
  end

  # The derivative by what the softmax is taken of: w (dout v) - p sum_j w (dout v), where w is p times what weights are
  # multiplied by, and what keeps some of them.
  defp dz(terms, match, dp) do
    w = Terms.term(terms, match.weights)
    sum = sum_of_products(terms, match, dp)

    Terms.subtract(
      Terms.multiply(terms, w, Terms.term(terms, dp)),
      Terms.multiply(terms, match.probability, sum)
    )
  end

  # sum_j w (dout v).
  defp sum_of_products(terms, match, dp) do
    {:ok, w_there} = Terms.substitute(match.weights, at_bound(match))
    {:ok, dp_there} = Terms.substitute(dp, at_bound(match))
    bound = {:bound, 1, 0}
    products = Terms.multiply(terms, Terms.term(terms, w_there), Terms.term(terms, dp_there))
    Terms.sum(terms, products, [bound], %{bound => Index.size(match.axes.columns)})
  end

  defp at_bound(match),
    do: %{j: for({:j, divisor, size} <- match.axes.columns, do: {{:bound, 1, 0}, divisor, size})}

  # The derivative of the program.
  defp through(dz, terms, steps) do
    Enum.reduce(steps, dz, fn
      {:scale, c}, dz -> Terms.scale(dz, c)
      {:factor, view}, dz -> Terms.multiply(terms, dz, Terms.term(terms, view))
      {:divisor, view}, dz -> Terms.multiply(terms, dz, Terms.inverse(terms, Terms.term(terms, view)))
      {:tanh, view}, dz -> Terms.multiply(terms, dz, one_minus_square(terms, Terms.term(terms, view)))
      _mask_or_bias, dz -> dz
    end)
  end

  defp one_minus_square(terms, x), do: Terms.subtract(Terms.constant(1), Terms.multiply(terms, x, x))

  # The product of dout and v in a term: its view, and dout's.
  defp dp(terms, match, term) do
    factors = for {monomial, _} <- term, {factor, 1} <- monomial, uniq: true, do: Terms.info(terms, factor)

    Enum.find_value(factors, :error, fn
      %{structure: {:dot, _}, view: view} ->
        with {:ok, dp, dout, _names} <- dout(terms, match, view), do: {:ok, dp, dout}

      _ ->
        nil
    end)
  end

  defp dout(terms, match, view) do
    {[one, other], _bound} = Terms.operands(terms, view)
    v = Terms.strip(terms, match.v)

    Enum.find_value([{one, other}, {other, one}], fn {dout, values} ->
      values = Terms.strip(terms, values)

      with true <- elem(values, 0) == elem(v, 0),
           {:ok, names} <- unify(elem(values, 1), elem(v, 1), %{}),
           {:ok, dout} <- Terms.substitute(dout, names) do
        {:ok, view, Terms.resolve(terms, dout), names}
      else
        _ -> nil
      end
    end)
  end

  # What is hidden has no weight: a predicate that hides it again changes nothing, and one that shows nothing else
  # leaves nothing.
  defp unmasked(term, terms, match) do
    predicates =
      for %{predicates: predicates} <- match.hidden,
          {view, holds} <- predicates,
          [[{factor, 1}]] <- [terms |> Terms.predicate(view) |> Map.keys()],
          into: %{},
          do: {factor, holds}

    [{[{exponential, 1}], _}] = terms |> Terms.term(match.exponential) |> Map.to_list()

    Enum.reduce(term, %{}, fn {monomial, x}, kept ->
      hiding =
        if List.keymember?(monomial, exponential, 0),
          do: Enum.filter(monomial, fn {factor, _} -> is_map_key(predicates, factor) end),
          else: []

      if Enum.all?(hiding, fn {factor, _} -> predicates[factor] end),
        do: Terms.add(kept, %{(monomial -- hiding) => x}),
        else: kept
    end)
  end

  # The number that the one is the other times.
  defp ratio(one, other) do
    with true <- map_size(one) > 0 and Map.keys(one) == Map.keys(other),
         [ratio | ratios] = for({monomial, x} <- one, do: x / other[monomial]),
         true <- Enum.all?(ratios, &(abs(&1 - ratio) <= 1.0e-6 * abs(ratio))) do
      {:ok, ratio}
    else
      _ -> :error
    end
  end

  # ---- what is wrong with what should be a gradient --------------------------------------------------------

  @doc """
  The number of the value from which on one of these products is no gradient of a match, although it is of the scores or weights
  and of what a gradient would be of; nil where none is.
  """
  def wrong(terms, match, dots) do
    found = for gradient <- match.gradients, number <- [gradient.output | gradient.inner], do: number
    product = elem(match.product, 0)

    Enum.find_value(dots -- found, fn dot ->
      if product in products(terms, %{dot: dot}, %{product => [match]}) do
        {[one, other], bound} = Terms.operands(terms, fresh(terms, dot))
        wrong(terms, match, one, other, bound) || wrong(terms, match, other, one, bound)
      end
    end)
  end

  defp wrong(terms, match, scores, tensor, bound) do
    with {:ok, found} <- descend(terms, scores, elem(match.product, 0)),
         {:ok, names} <- unify(elem(found, 1), elem(match.product, 1), %{}),
         {:ok, scores} <- Terms.substitute(scores, names),
         {:ok, expected} <-
           expected(terms, match, scores, Terms.strip(terms, tensor), Enum.map(bound, &names[&1])),
         do: blame(terms, match, scores, Terms.scale(expected, multiple(terms, match, scores, expected))),
         else: (_ -> nil)
  end

  # Of a multiple of the loss it is that multiple, as what has no sum over columns in it says.
  defp multiple(terms, match, scores, expected) do
    term = terms |> Terms.term(scores) |> unmasked(terms, match)

    Enum.find_value(expected, 1.0, fn {monomial, x} ->
      if term[monomial] && not Enum.any?(monomial, &sum_above?(terms, &1)), do: term[monomial] / x
    end)
  end

  defp sum_above?(terms, {factor, power}),
    do: power > 0 and match?({:sum, _, _}, Terms.info(terms, factor).structure)

  # Summed over columns with k, or over rows with q or the gradient of the output.
  defp expected(terms, match, scores, {number, _}, [summed]) do
    term = terms |> Terms.term(scores) |> unmasked(terms, match)
    [q, k] = for leaf <- [match.q, match.k], do: elem(Terms.strip(terms, leaf), 0)
    over = %{columns: Index.merge(match.axes.columns), rows: Index.merge(match.axes.rows)}

    cond do
      summed == over.columns and number == k -> of_scores(terms, match, term)
      summed == over.rows and number == q -> of_scores(terms, match, term)
      summed == over.rows -> {:ok, unmasked(Terms.term(terms, match.weights), terms, match)}
      true -> :error
    end
  end

  defp expected(_terms, _match, _scores, _tensor, _summed), do: :error

  # Without dout and v in it, it is something else from the beginning.
  defp of_scores(terms, match, term) do
    with {:ok, target, _dout, _inner} <- target(terms, match, term),
         do: {:ok, target},
         else: (:error -> {:ok, %{}})
  end

  # The value deepest down that is not what it should be for all above to be right.
  defp blame(terms, match, view, expected) do
    view = Terms.strip(terms, view)
    term = terms |> Terms.term(view) |> unmasked(terms, match)
    op = Terms.value(terms, view).op

    cond do
      expected != %{} and Map.keys(term) == Map.keys(expected) and part?(term, expected) -> nil
      # A product, and what the forward has too, is what it is: it is for what is done with it.
      op == :dot or forward?(terms, match, elem(view, 0)) -> nil
      op not in [:sum | @passing] -> elem(view, 0)
      expected == %{} -> (op == :multiply && scaled(terms, match, view)) || elem(view, 0)
      true -> step_below(op, terms, match, view, expected) || elem(view, 0)
    end
  end

  defp step_below(:sum, terms, match, view, expected) do
    {[arg], bound} = Terms.operands(terms, view)

    with false <- :j in Terms.variables(view),
         [{monomial, x}] <- Map.to_list(expected),
         [{factor, 1}] <- Enum.filter(monomial, &summed?(terms, &1, bound)) do
      {:sum, inside, _} = Terms.info(terms, factor).structure
      outside = %{List.delete(monomial, {factor, 1}) => x}
      blame(terms, match, arg, Terms.multiply(terms, %{inside => 1.0}, outside))
    else
      _ -> nil
    end
  end

  defp step_below(:negate, terms, match, view, expected),
    do: blame(terms, match, arg(terms, view, 0), Terms.scale(expected, -1.0))

  defp step_below(:divide, terms, match, view, expected) do
    divisor = Terms.term(terms, arg(terms, view, 1))
    blame(terms, match, arg(terms, view, 0), Terms.multiply(terms, expected, divisor))
  end

  # A factor of the forward's own is right, unless all of the other is right but for a factor.
  defp step_below(:multiply, terms, match, view, expected) do
    [x, y] = Terms.args(terms, view)

    Enum.find_value([{x, y}, {y, x}], fn {factor, other} ->
      term = Terms.term(terms, factor)

      if map_size(term) == 1 and own?(terms, match, term) do
        expected = Terms.multiply(terms, expected, Terms.inverse(terms, term))
        unless multiple?(terms, Terms.term(terms, other), expected), do: blame(terms, match, other, expected)
      end
    end)
  end

  # What the one has of it, the other need not have.
  defp step_below(op, terms, match, view, expected) when op in [:add, :subtract] do
    [x, y] = Terms.args(terms, view)
    sign = if op == :add, do: 1.0, else: -1.0
    [x_term, y_term] = for arg <- [x, y], do: terms |> Terms.term(arg) |> unmasked(terms, match)
    y_term = Terms.scale(y_term, sign)

    cond do
      part?(x_term, expected) -> blame(terms, match, y, expected |> Terms.subtract(x_term) |> Terms.scale(sign))
      part?(y_term, expected) -> blame(terms, match, x, Terms.subtract(expected, y_term))
      of_maximum?(terms, y_term) -> blame(terms, match, x, expected)
      true -> nil
    end
  end

  defp step_below(:select, terms, match, view, expected) do
    [_predicate | branches] = Terms.args(terms, view)

    case Enum.reject(branches, &(Terms.term(terms, &1) == %{})) do
      [shown] -> blame(terms, match, shown, expected)
      _ -> nil
    end
  end

  defp step_below(_op, _terms, _match, _view, _expected), do: nil

  defp forward?(terms, match, number) do
    number in Terms.memo(terms, {:made_of, match.output}, fn -> Graph.reachable(terms.graph, [match.output]) end)
  end

  defp scaled(terms, match, view) do
    [x, y] = Terms.args(terms, view)
    other = if Terms.number(terms, x), do: y, else: if(Terms.number(terms, y), do: x)
    if other, do: blame(terms, match, other, %{})
  end

  # Whether a sum is the other one times a factor.
  defp multiple?(terms, one, other) do
    [one, other] = for sum <- [one, other], do: by_each(terms, sum)
    map_size(hd(one ++ [%{}])) > 1 and Enum.any?(one, &(&1 in other))
  end

  # A sum divided by each of what is added in it.
  defp by_each(terms, sum) do
    for {monomial, x} <- sum do
      each = Terms.multiply(terms, sum, Terms.inverse(terms, %{monomial => x}))
      Map.new(each, fn {monomial, x} -> {monomial, Float.round(x, 6)} end)
    end
  end

  defp arg(terms, view, n), do: terms |> Terms.args(view) |> Enum.at(n)

  defp part?(term, whole),
    do: term != %{} and Enum.all?(term, fn {monomial, x} -> near?(whole[monomial], x) end)

  defp near?(x, y), do: x != nil and abs(x - y) <= 1.0e-6 * abs(x)

  defp summed?(terms, {factor, power}, bound),
    do: power == 1 and match?({:sum, _, ^bound}, Terms.info(terms, factor).structure)

  # Whether it is made without the gradient of the output.
  defp own?(terms, match, term),
    do: dp(terms, match, term) == :error and dp_in_sums(terms, match, term) == :error

  # The share of the maximum is nothing only where the rest is right.
  defp of_maximum?(terms, term) do
    Enum.any?(term, fn {monomial, _} ->
      Enum.any?(monomial, fn {factor, _} -> match?({:equal, _}, Terms.info(terms, factor).structure) end)
    end)
  end

  # ---- names ---------------------------------------------------------------------------------------------

  # The names of variables that make the one tuple of indices the other, beside those that are known.
  defp unify(indices, others, names) do
    pairs =
      Enum.zip(indices, others)
      |> Enum.reduce_while([], fn {index, other}, pairs ->
        case pair(Enum.reverse(index), Enum.reverse(other), []) do
          {:ok, more} -> {:cont, more ++ pairs}
          :error -> {:halt, :error}
        end
      end)

    if pairs == :error, do: :error, else: names(pairs, names)
  end

  # Digits of equal sizes, from the least significant one on.
  defp pair([], [], pairs), do: {:ok, pairs}

  # Within longer axes from the same place on, which the first ones of an axis are from 0 on.
  defp pair([{{:within, from, name}, 1, size}], [{{:within, from, other}, 1, size}], pairs)
       when name != nil and other != nil,
       do: {:ok, [{{name, 1, size}, {other, 1, size}} | pairs]}

  defp pair([{name, 1, size}], [{{:within, 0, other}, 1, size}], pairs)
       when not is_tuple(name) or elem(name, 0) != :within,
       do: {:ok, [{{name, 1, size}, {other, 1, size}} | pairs]}

  defp pair([], [{{:within, 0, _}, 1, 1}], pairs), do: {:ok, pairs}

  defp pair([{name, low, size} | rest], [{other, other_low, other_size} | others], pairs) do
    common = min(size, other_size)

    if rem(size, common) == 0 and rem(other_size, common) == 0 do
      more = fn name, low, size ->
        if size == common, do: [], else: [{name, low * common, div(size, common)}]
      end

      pairs = [{{name, low, common}, {other, other_low, common}} | pairs]
      pair(more.(name, low, size) ++ rest, more.(other, other_low, other_size) ++ others, pairs)
    else
      :error
    end
  end

  defp pair(_index, _other, _pairs), do: :error

  # A variable of the forward's stands for itself.
  defp names(pairs, names) do
    {same, new} = Enum.split_with(pairs, fn {{name, _, _}, {_, _, _}} -> forward?(name) end)

    named =
      new
      |> Enum.uniq()
      |> Enum.group_by(fn {{name, _, _}, _} -> name end)
      |> Map.new(fn {name, pairs} -> {name, pairs |> Enum.sort_by(fn {{_, low, _}, _} -> -low end)} end)

    if Enum.all?(same, fn {one, other} -> one == other end) and
         Enum.all?(named, fn {_, pairs} -> whole?(pairs) end) do
      named = Map.new(named, fn {name, pairs} -> {name, Index.merge(for {_, digit} <- pairs, do: digit)} end)
      {:ok, Map.merge(names, named)}
    else
      :error
    end
  end

  defp forward?({:o, _}), do: true
  defp forward?({:sink, _}), do: true
  defp forward?(:j), do: true
  defp forward?(_name), do: false

  # The digits follow on each other, from 1 on.
  defp whole?(pairs) do
    pairs
    |> Enum.reverse()
    |> Enum.reduce(1, fn {{_, low, size}, _}, next -> if low == next, do: low * size end)
    |> is_integer()
  end
end
