defmodule FlashAttention.Rewriter.Forward do
  @moduledoc false
  # Attention that ends in a product: softmax(program(q k)) v, from the product back to q and k.
  #
  # The elements of the result are written with the variables {:o, axis}, one an axis of the result, and :j, the columns
  # that it sums over. Which of them are batches, heads, rows follows from what q, k and v depend on.

  alias FlashAttention.Rewriter.{Graph, Index, Random, Slopes, Terms, Visibility}

  defstruct [
    :output,
    :out,
    :q,
    :k,
    :v,
    :scores,
    :product,
    :exponential,
    :weights,
    :axes,
    :atoms,
    :probability,
    :dropout,
    scale: 1.0,
    softcap: 0,
    factors: [],
    biases: [],
    visibility: %Visibility{},
    hidden: [],
    empty_rows: :none,
    outer: [],
    sinks: [],
    sink_exponentials: [],
    products: [],
    slopes: %{},
    steps: [],
    gradients: [],
    label: nil
  ]

  @doc """
  `{:ok, match}` for attention that ends in the product with that number, `{:refuse, reason}` for what looks like it,
  or `:no`.
  """
  def find(terms, number) do
    out =
      for {size, axis} <- Graph.fetch!(terms.graph, number).shape |> Tuple.to_list() |> Enum.with_index(),
          do: Index.variable({:o, axis}, size)

    {operands, bound} = Terms.operands(terms, {number, out})

    with [column] <- bound,
         rename = %{column => [{:j, 1, size_of(operands, column)}]},
         [one, other] = for(operand <- operands, do: elem(Terms.substitute(operand, rename), 1)) do
      with :no <- attention(terms, number, out, one, other), do: attention(terms, number, out, other, one)
    else
      _ -> :no
    end
  end

  @doc "The same for a value whose elements at `out` are sums of products of weights and values over `:j`."
  def attention(terms, number, out, weights, v),
    do: from_weights(terms, weights, v, %__MODULE__{output: number, out: out})

  defp size_of(operands, name), do: operands |> Enum.map(&Terms.sizes/1) |> Enum.find_value(& &1[name])

  # What weights are multiplied by that does not depend on the column: a number, and tensors.
  defp outer(terms, {coefficient, factors}) do
    views = for factor <- factors, do: tensor(terms, factor)

    if nil in views,
      do: {:refuse, "its weights are multiplied by what is no tensor"},
      else: {:ok, {coefficient, views}}
  end

  # The view of a factor; nil of what has none. A predicate stands for 0 or 1, whatever number its tensor has.
  defp tensor(terms, {factor, 1}) do
    case Terms.info(terms, factor) do
      %{structure: {:predicate, _}, view: view} = info ->
        if Visibility.predicate?(terms, view), do: own_view(info)

      %{view: {_, _}} = info ->
        own_view(info)

      _ ->
        nil
    end
  end

  defp tensor(_terms, _factor), do: nil

  # Along axes that a tensor has, and a factor that is made of it does not depend on, its first elements are all.
  defp own_view(%{view: {number, indices}, variables: variables}) do
    own =
      for index <- indices,
          do: Enum.filter(index, fn {name, _, _} -> Index.of_variable(name) in [nil | variables] end)

    if Enum.all?(Enum.zip(own, indices), fn {own, index} -> own in [[], index] end), do: {number, own}
  end

  @dropped "its weights are dropped out, or hidden after the softmax"

  # ---- softmax -------------------------------------------------------------------------------------------

  defp from_weights(terms, weights, v, match) do
    if exponential?(terms, elem(weights, 0)) do
      weights = Terms.strip(terms, weights)

      with {:ok, softmax} <- softmax(terms, Terms.term(terms, weights)),
           {:ok, outer} <- outer(terms, softmax.outer),
           {:ok, scores, sinks} <- scores(terms, softmax.exponential, softmax.sinks) do
        match = %{
          match
          | weights: weights,
            exponential: softmax.exponential,
            probability: softmax.probability,
            dropout: softmax.dropout,
            outer: outer,
            sinks: sinks,
            sink_exponentials: if(sinks == [], do: [], else: softmax.sinks),
            v: Terms.resolve(terms, v)
        }

        from_scores(terms, scores, match)
      end
    else
      :no
    end
  end

  @doc "Whether there is an exponential in it, on a way through elementwise operations and layouts."
  def exponential?(terms, number) do
    Terms.memo(terms, {:exponential, number}, fn ->
      case Graph.fetch!(terms.graph, number) do
        %{op: :exp} ->
          true

        %{op: op, args: args}
        when op in [:multiply, :divide, :as_type, :select, :add, :negate] or
               op in [:transpose, :reshape, :broadcast, :slice, :view] ->
          Enum.any?(args, &exponential?(terms, &1))

        _ ->
          false
      end
    end)
  end

  # e / sum e, times what does not depend on the column, and what drops some of it: all of it, or all but what is dropped.
  defp softmax(terms, weights) do
    found = for {monomial, coefficient} <- weights, do: {softmax_in(terms, monomial), coefficient}

    case Enum.sort_by(found, &match?({{:ok, %{kept: [_]}}, _}, &1)) do
      [] -> :no
      [{{:ok, %{kept: []} = softmax}, c}] -> whole(softmax, c, nil)
      [{{:ok, %{kept: [kept]} = softmax}, c}] -> dropped(terms, softmax, c, kept, & &1)
      [{{:ok, %{kept: []} = one}, c}, {{:ok, other}, d}] when c == -d -> less(terms, one, other, c)
      [{other, _}] -> other
      _ -> if Enum.all?(found, fn {found, _} -> found != :no end), do: {:refuse, @dropped}, else: :no
    end
  end

  defp less(terms, softmax, %{kept: [kept]} = other, c) do
    if %{other | kept: []} == softmax,
      do: dropped(terms, softmax, c, kept, &Random.opposite/1),
      else: {:refuse, @dropped}
  end

  defp less(_terms, _softmax, _other, _c), do: {:refuse, @dropped}

  defp dropped(terms, softmax, c, kept, stays) do
    case Random.chance(terms, Terms.info(terms, kept).view) do
      {:ok, drawn} -> whole(softmax, c, stays.(drawn))
      :error -> {:refuse, why_not_alone(terms, kept)}
    end
  end

  defp whole(softmax, c, dropout),
    do: {:ok, softmax |> Map.put(:dropout, dropout) |> Map.update!(:outer, &{c, &1})}

  defp softmax_in(terms, monomial) do
    {inside, outside} = Enum.split_with(monomial, fn {factor, _} -> depends?(terms, factor, :j) end)

    with [{exponential, 1} = e] <- Enum.filter(inside, fn {factor, _} -> exp?(terms, factor) end),
         view = Terms.info(terms, exponential).view,
         true <- leads_to_product?(terms, view),
         {[sum | _], outer} <- Enum.split_with(outside, &sum_of(terms, &1, view)) do
      case inside -- [e] do
        others when others == [] or (length(others) == 1 and elem(hd(others), 1) == 1) ->
          {:ok,
           %{
             exponential: view,
             sinks: sum_of(terms, sum, view),
             outer: outer,
             probability: %{Enum.sort([e, sum]) => 1.0},
             kept: for({factor, 1} <- others, do: factor)
           }}

        [{other, _} | _] ->
          {:refuse, why_not_alone(terms, other)}
      end
    else
      _ -> :no
    end
  end

  defp why_not_alone(terms, factor) do
    if match?({:predicate, _}, Terms.info(terms, factor).structure),
      do: @dropped,
      else: "its weights are multiplied by others before they meet the values"
  end

  defp exp?(terms, factor), do: match?({:exp, _}, Terms.info(terms, factor).structure)
  defp depends?(terms, factor, name), do: name in Terms.info(terms, factor).variables

  # Of a factor that is the inverse of the sum of these exponentials over the columns, what else is in that sum; nil of
  # any other.
  defp sum_of(terms, {factor, power}, view) do
    case {power, Terms.info(terms, factor)} do
      {-1, %{structure: {:sum, _, _}}} -> if sum_over_columns?(terms, [{factor, 1}], view), do: []
      {1, %{structure: {:inverse, _}, view: term}} -> sum_and_sinks(terms, Map.to_list(term), view)
      _ -> nil
    end
  end

  # Every one once, or the sum of several, each of which a variable then stands for.
  defp sum_and_sinks(terms, term, view) do
    {sums, others} = Enum.split_with(term, fn {monomial, _} -> sum_over_columns?(terms, monomial, view) end)

    exponentials =
      for {{[{factor, 1}], 1.0}, n} <- Enum.with_index(others), sink = sink(terms, factor, {:sink, n}), do: sink

    if match?([{_, 1.0}], sums) and length(exponentials) == length(others), do: exponentials
  end

  defp sink(terms, factor, name) do
    case Terms.info(terms, factor) do
      %{structure: {:exp, _}, view: view} ->
        view

      %{structure: {:sum, [{summed, 1}], [bound]}} ->
        with true <- exp?(terms, summed),
             %{view: view} = Terms.info(terms, summed),
             size when is_integer(size) <- Terms.sizes(view)[bound],
             {:ok, view} <- Terms.substitute(view, %{bound => Index.variable(name, size)}),
             do: view,
             else: (_ -> nil)

      _ ->
        nil
    end
  end

  defp sum_over_columns?(terms, [{factor, 1}], view) do
    with {:sum, [{summed, 1}], [bound]} <- Terms.info(terms, factor).structure,
         {:ok, other} <- Terms.substitute(view, %{:j => [{bound, 1, column_size(view)}]}) do
      Terms.term(terms, other) == Terms.of_factor(summed)
    else
      _ -> false
    end
  end

  defp sum_over_columns?(_terms, _monomial, _view), do: false

  defp column_size(view), do: Terms.sizes(view)[:j] || 0

  # Whether a way through elementwise operations leads to a product: what does not is no attention at all.
  defp leads_to_product?(terms, {number, _indices}), do: product_below?(terms, number)

  @passing [
             :exp,
             :add,
             :subtract,
             :multiply,
             :divide,
             :select,
             :as_type,
             :negate,
             :tanh,
             :max,
             :min,
             :clip,
             :pow
           ] ++
             [:transpose, :reshape, :broadcast, :slice, :view, :abs, :sigmoid, :log, :sqrt, :concatenate]

  @doc "Whether scores may go through that operation."
  def passing?(op), do: op in @passing

  defp product_below?(terms, number) do
    Terms.memo(terms, {:product, number}, fn ->
      case Graph.fetch!(terms.graph, number) do
        %{op: :dot} -> true
        %{op: op, args: args} when op in @passing -> Enum.any?(args, &product_below?(terms, &1))
        _ -> false
      end
    end)
  end

  # ---- scores: what the exponential is taken of, without the row's maximum -------------------------------

  defp scores(terms, exponential, []) do
    with {scores, shift} <- difference(terms, exponential),
         true <- maximum?(terms, shift, scores),
         do: {:ok, scores, []},
         else: (_ -> {:ok, argument(terms, exponential), []})
  end

  # Sinks are scores of columns that every row sees: less what is subtracted from all scores, or as they are.
  defp scores(terms, exponential, sinks) do
    with {scores, shift} <- difference(terms, exponential),
         true <- largest_of_all?(terms, shift, scores),
         {:ok, sinks} <- shifted_sinks(terms, sinks, shift) do
      {:ok, scores, sinks}
    else
      _ -> unshifted(terms, exponential, sinks)
    end
  end

  # A sink has no share of the maximum then, and no product of its own.
  defp unshifted(terms, exponential, sinks) do
    sinks = for sink <- sinks, do: argument(terms, sink)
    scores = argument(terms, exponential)
    others = for {number, _} <- [scores | sinks], do: number

    if Enum.any?(others, &maximum_below?(terms, &1)),
      do: {:refuse, "the sum of its exponentials has others in it"},
      else: {:ok, scores, sinks}
  end

  defp maximum_below?(terms, number) do
    Terms.memo(terms, {:maximum, number}, fn ->
      case Graph.fetch!(terms.graph, number) do
        %{op: :reduce_max} -> true
        %{op: op, args: args} when op in @passing -> Enum.any?(args, &maximum_below?(terms, &1))
        _ -> false
      end
    end)
  end

  defp argument(terms, exponential) do
    [arg] = Terms.value(terms, exponential).args
    Terms.strip(terms, Terms.argument(terms, exponential, arg))
  end

  # What an exponential is taken of, as a difference.
  defp difference(terms, exponential) do
    arg = argument(terms, exponential)

    with %{op: :subtract, args: [scores, shift]} <- Terms.value(terms, arg),
         do: {Terms.argument(terms, arg, scores), Terms.argument(terms, arg, shift)},
         else: (_ -> nil)
  end

  defp shifted_sinks(terms, sinks, shift) do
    sinks = for sink <- sinks, do: difference(terms, sink)

    if Enum.all?(sinks, &(&1 != nil and Terms.term(terms, elem(&1, 1)) == Terms.term(terms, shift))),
      do: {:ok, for({sink, _} <- sinks, do: Terms.strip(terms, sink))},
      else: :error
  end

  # The maximum of scores and sinks, side by side or one after the other.
  defp largest_of_all?(terms, shift, scores) do
    shift = Terms.strip(terms, shift)
    value = Terms.value(terms, shift)

    case value.op do
      :max -> Enum.any?(value.args, &maximum?(terms, Terms.argument(terms, shift, &1), scores))
      :reduce_max -> maximum_beside?(terms, shift, scores)
      _ -> false
    end
  end

  defp maximum_beside?(terms, view, scores) do
    with {[arg], [bound]} <- Terms.operands(terms, view),
         columns = column_size(scores),
         first = Terms.within(arg, bound, first_column(scores), columns),
         {:ok, other} <- Terms.substitute(scores, %{:j => [{bound, 1, columns}]}) do
      Terms.term(terms, first) == Terms.term(terms, other)
    else
      _ -> false
    end
  end

  # Where among what stands beside each other the columns begin.
  defp first_column({_number, indices}),
    do: Enum.find_value(indices, 0, &with({from, [{:j, 1, _}]} <- Index.inside(&1), do: from))

  # Whether a view is the maximum of the scores over the columns.
  defp maximum?(terms, view, scores) do
    view = Terms.strip(terms, view)

    with %{op: :reduce_max} <- Terms.value(terms, view),
         {[arg], [bound]} <- Terms.operands(terms, view),
         {:ok, other} <- Terms.substitute(scores, %{:j => [{bound, 1, column_size(scores)}]}) do
      Terms.term(terms, arg) == Terms.term(terms, other)
    else
      _ -> false
    end
  end

  defp from_scores(terms, scores, match) do
    if leads_to_product?(terms, scores) do
      with {:ok, steps, product} <- peel(terms, scores),
           match = %{match | scores: scores, product: product, products: [elem(product, 0)]},
           {:ok, match} <- operands(terms, product, match),
           {:ok, match} <- axes(terms, match, steps),
           {:ok, match} <- fold(terms, Enum.reverse(steps), %{match | steps: steps}),
           {:ok, match} <- visibility(terms, match),
           {:ok, match} <- atoms(match),
           {:ok, match} <- slopes(terms, match),
           do: every_weight?(match)
    else
      :no
    end
  end

  # ---- the program of a score, from the outside in -------------------------------------------------------

  defp peel(terms, view) do
    view = Terms.strip(terms, view)
    value = Terms.value(terms, view)
    args = if value.op in @passing, do: Enum.map(value.args, &Terms.argument(terms, view, &1)), else: []
    peel(value.op, args, terms, view)
  end

  defp peel(:dot, _args, _terms, view), do: {:ok, [], view}
  defp peel(:negate, [x], terms, _view), do: step({:scale, -1.0}, terms, x)
  defp peel(:tanh, [x], terms, view), do: step({:tanh, view}, terms, x)

  defp peel(:multiply, [x, y], terms, _view) do
    case {Terms.number(terms, x), Terms.number(terms, y)} do
      {c, _} when is_float(c) -> step({:scale, c}, terms, y)
      {_, c} when is_float(c) -> step({:scale, c}, terms, x)
      _ -> either(terms, x, y, &step({:factor, &1}, terms, &2), "its scores are multiplied by other scores")
    end
  end

  defp peel(:divide, [x, y], terms, _view) do
    case Terms.number(terms, y) do
      c when is_float(c) and c != 0.0 ->
        step({:scale, 1 / c}, terms, x)

      _ ->
        if outer?(terms, y),
          do: step({:divisor, y}, terms, x),
          else: {:refuse, "its scores are divided by #{describe(terms, y)}"}
    end
  end

  defp peel(:add, [x, y], terms, _view),
    do: either(terms, x, y, &step({:bias, &1, 1.0}, terms, &2), "its scores are a sum of products")

  defp peel(:subtract, [x, y], terms, _view) do
    case {product_below?(terms, elem(x, 0)), product_below?(terms, elem(y, 0))} do
      {true, false} ->
        step({:bias, y, -1.0}, terms, x)

      {false, true} ->
        subtracted(terms, x, y)

      _ ->
        with(
          {:refuse, _} <- first_of_difference(terms, x, y),
          do: {:refuse, "its scores are a sum of products"}
        )
    end
  end

  defp peel(:select, [predicate, x, y], terms, _view) do
    case {fill(terms, x), fill(terms, y)} do
      {nil, nil} -> {:refuse, "hidden scores are not filled with one number"}
      {nil, fill} -> step({:mask, predicate, true, fill}, terms, x)
      {fill, nil} -> step({:mask, predicate, false, fill}, terms, y)
      _ -> {:refuse, "its scores are constants"}
    end
  end

  defp peel(op, _args, _terms, _view), do: {:refuse, "#{op} is done to its scores"}

  defp step(step, terms, view) do
    with {:ok, steps, product} <- peel(terms, view), do: {:ok, [step | steps], product}
  end

  # The scores are the operand that leads to a product, and where both do, the one that leads to q and k.
  defp either(terms, x, y, step, reason) do
    case {product_below?(terms, elem(x, 0)), product_below?(terms, elem(y, 0))} do
      {true, false} -> step.(y, x)
      {false, true} -> step.(x, y)
      _ -> with({:refuse, _} <- first(terms, x, y, step), do: {:refuse, reason})
    end
  end

  defp first(terms, x, y, step) do
    with {:ok, _, product} = found <- step.(y, x), {:ok, _} <- operands(terms, product, %__MODULE__{}) do
      found
    else
      _ ->
        with {:ok, _, product} = found <- step.(x, y),
             {:ok, _} <- operands(terms, product, %__MODULE__{}),
             do: found
    end
  end

  # What is subtracted is the scores, which change their sign.
  defp subtracted(terms, x, y) do
    with {:ok, steps, product} <- step({:scale, -1.0}, terms, y) do
      if Terms.term(terms, x) == %{},
        do: {:ok, steps, product},
        else: {:ok, [{:bias, x, 1.0} | steps], product}
    end
  end

  defp first_of_difference(terms, x, y) do
    with {:ok, _, product} = found <- step({:bias, y, -1.0}, terms, x),
         {:ok, _} <- operands(terms, product, %__MODULE__{}) do
      found
    else
      _ ->
        with {:ok, _, product} = found <- subtracted(terms, x, y),
             {:ok, _} <- operands(terms, product, %__MODULE__{}),
             do: found
    end
  end

  defp fill(terms, view) do
    case Terms.value(terms, Terms.strip(terms, view)) do
      %{op: :constant, opts: fill} -> fill
      _ -> Terms.number(terms, view)
    end
  end

  # A number of each batch or head.
  defp outer?(terms, view), do: :j not in Terms.variables(Terms.strip(terms, view))

  defp describe(terms, view), do: "#{Terms.value(terms, Terms.strip(terms, view)).op}"

  # ---- q and k, and what the axes are --------------------------------------------------------------------

  defp operands(terms, product, match) do
    {operands, bound} = Terms.operands(terms, product)
    operands = for operand <- operands, do: Terms.resolve(terms, operand)

    case Enum.split_with(operands, &(:j in Terms.variables(&1))) do
      {[k], [q]} -> {:ok, %{match | q: q, k: k, axes: %{dim: bound}}}
      {[_, _], _} -> {:refuse, "rows and columns of its scores are not those of two tensors"}
      _ -> {:refuse, "its scores do not depend on the keys"}
    end
  end

  # Digits of the result by what depends on them.
  defp axes(terms, %{q: q, k: k, v: v} = match, steps) do
    digits = for index <- match.out, digit <- index, do: digit
    [in_q, in_k, in_v] = for view <- [q, k, v], do: digits_of(view)
    {:ok, atoms} = Index.atoms(for(view <- [q, k, v], index <- elem(view, 1), do: index) ++ match.out)
    out = digits |> Index.refine(atoms)
    refined = for set <- [in_q, in_k, in_v], do: Index.refine(set, atoms)
    [in_q, in_k, in_v] = refined

    {rows_and_groups, rest} = Enum.split_with(out, &(&1 in in_q and &1 not in in_k and &1 not in in_v))
    {dims, shared} = Enum.split_with(rest, &(&1 in in_v and &1 not in in_q and &1 not in in_k))
    order = product_order(match.product, atoms)
    rows = row(terms, steps, Enum.sort_by(rows_and_groups, &position(order, &1)), match.product, atoms)

    cond do
      :j not in Terms.variables(v) ->
        {:refuse, "the values do not depend on the keys"}

      Enum.any?(shared, &(&1 not in in_q and &1 in in_k != &1 in in_v)) ->
        {:refuse, "its keys and its values are not those of the same batches"}

      Enum.any?(shared, &(&1 not in in_q and &1 not in in_k and &1 not in in_v)) ->
        {:refuse, "its result has an axis that is in none of q, k and v"}

      true ->
        groups = rows_and_groups -- rows
        shared = Enum.sort_by(shared, &position(order, &1))
        {batch, heads} = Enum.split_with(shared, &(&1 in first_batch(match.product, atoms, rows, shared)))

        axes = %{batch: batch, heads: heads, groups: Enum.sort_by(groups, &position(order, &1)), rows: rows}
        {:ok, %{match | axes: Map.merge(match.axes, Map.put(axes, :values, dims))}}
    end
  rescue
    MatchError -> {:refuse, "its axes are split in ways that do not fit together"}
  end

  # What counts as the batch: the first axis of the scores that is none of rows and columns, where there are more, also of
  # size 1; of a single one that is made of several, the first of those.
  defp first_batch({_number, indices}, atoms, rows, shared) do
    axes = for index <- indices, do: Index.refine(index, atoms)

    case Enum.reject(axes, fn digits -> Enum.any?(digits, &(&1 in rows or elem(&1, 0) == :j)) end) do
      [first, _ | _] -> first
      _ -> Enum.take(shared, 1)
    end
  end

  defp digits_of({_number, indices}), do: Enum.concat(indices)

  # Axes of the scores in their order, as the program has them.
  defp product_order({_number, indices}, atoms), do: indices |> Enum.concat() |> Index.refine(atoms)
  defp position(order, digit), do: Enum.find_index(order, &(&1 == digit)) || length(order)

  # Rows are what masks count; unless one does, what is next to the columns, with what it is one axis of the scores with,
  # where nothing that is added to them takes these apart.
  defp row(terms, steps, candidates, product, atoms) when length(candidates) > 1 do
    views = for step <- steps, view <- views_of(step), do: Terms.strip(terms, view)
    counted = for view <- views, digit <- counted(terms, view), do: digit
    last = List.last(candidates)
    axis = product |> elem(1) |> Enum.map(&Index.refine(&1, atoms)) |> Enum.find([], &(last in &1))
    together = Enum.filter(candidates, &(&1 in axis))

    whole? =
      match?([_], Index.merge(together)) and
        Enum.all?(views, fn view ->
          length(together -- Index.refine(digits_of(view), atoms)) in [0, length(together)]
        end)

    case Enum.find(candidates, &(&1 in counted)) do
      nil -> if whole?, do: together, else: [last]
      counted -> [counted]
    end
  end

  defp row(_terms, _steps, candidates, _product, _atoms), do: candidates

  defp views_of({:mask, view, _, _}), do: [view]
  defp views_of({:bias, view, _}), do: [view]
  defp views_of(_step), do: []

  # Digits along which a predicate counts.
  defp counted(terms, view) do
    {_number, indices} = view = Terms.strip(terms, view)

    case Terms.value(terms, view) do
      %{op: :iota, opts: [axis: axis]} -> Enum.at(indices, axis)
      %{op: :tensor} -> Enum.concat(indices)
      %{op: op} when op in [:parameter, :opaque, :dot, :constant, :slice, :sum, :reduce_max, :concatenate] -> []
      %{args: args} -> Enum.flat_map(args, &counted(terms, Terms.argument(terms, view, &1)))
    end
  end

  # ---- the program from the inside out -------------------------------------------------------------------

  defp fold(_terms, [], match), do: {:ok, match}

  defp fold(terms, [step | steps], match) do
    with {:ok, match} <- apply_step(step, terms, match), do: fold(terms, steps, match)
  end

  defp apply_step({:scale, c}, _terms, match), do: {:ok, scaled(match, c)}

  defp apply_step({kind, view}, terms, match) when kind in [:factor, :divisor] do
    view = Terms.resolve(terms, view)
    changing = Index.variables([match.axes.rows]) ++ [:j]

    cond do
      Enum.any?(Terms.variables(view), &(&1 in changing)) ->
        {:refuse, "its scores are multiplied by #{describe(terms, view)}"}

      match.softcap != 0 or match.biases != [] or match.hidden != [] ->
        {:refuse, "a number known at run time scales more than the product of q and k"}

      true ->
        {:ok, %{match | factors: [{kind, view} | match.factors]}}
    end
  end

  defp apply_step({:tanh, _view}, _terms, %{softcap: 0, biases: [], hidden: []} = match),
    do: {:ok, %{match | softcap: 1.0}}

  defp apply_step({:tanh, _view}, _terms, _match),
    do: {:refuse, "tanh is taken of more than the product of q and k"}

  defp apply_step({:bias, view, sign}, terms, match), do: bias(terms, Terms.strip(terms, view), sign, match)

  defp apply_step({:mask, view, holds, fill}, terms, match),
    do: hide(terms, [{view, holds}], fill, :replaced, match)

  # A positive factor leaves what is hidden hidden.
  defp scaled(match, c) do
    match =
      if match.softcap == 0, do: %{match | scale: match.scale * c}, else: %{match | softcap: match.softcap * c}

    biases = for {view, sign} <- match.biases, do: {view, sign * c}
    hidden = for mask <- match.hidden, do: scaled_mask(mask, c)
    %{match | biases: biases, hidden: hidden}
  end

  defp scaled_mask(mask, c) do
    mask = %{mask | fill: mask.fill |> scaled_fill(c) |> rounded(mask.type)}
    if mask[:bias], do: Map.update!(mask, :bias, fn {view, sign} -> {view, sign * c} end), else: mask
  end

  defp scaled_fill(:neg_infinity, c) when c < 0, do: :infinity
  defp scaled_fill(:infinity, c) when c < 0, do: :neg_infinity
  defp scaled_fill(fill, _c) when is_atom(fill), do: fill
  # Erlang has no infinite numbers, which products in f64 may be.
  defp scaled_fill(fill, c) when abs(c) > 1 and abs(fill) > 1.7976931348623157e308 / abs(c),
    do: if(fill > 0 == c > 0, do: :infinity, else: :neg_infinity)

  defp scaled_fill(fill, c), do: fill * c

  # From where on numbers are rounded to infinity: half a step beyond the largest that is finite.
  @infinite %{{:f, 16} => 65520, {:bf, 16} => 2 ** 128 - 2 ** 119, {:f, 32} => 2 ** 128 - 2 ** 103}

  # Of a fill that is infinite a row that sees nothing makes NaN, and no mean.
  defp rounded(fill, type) when is_number(fill) and is_map_key(@infinite, type) do
    cond do
      fill >= @infinite[type] -> :infinity
      fill <= -@infinite[type] -> :neg_infinity
      true -> fill
    end
  end

  defp rounded(fill, _type), do: fill

  # What is added is a mask where it is one of two numbers, of which one is 0.
  # What is added and hides is a mask, and what it adds where it does not hide is a bias.
  defp bias(terms, view, sign, match) do
    with {:ok, predicates, fill, shown} <- additive_mask(terms, view, sign),
         {:ok, %{hidden: [mask | hidden]} = match} <- hide(terms, predicates, fill, :added, match) do
      match = %{match | hidden: [Map.merge(mask, %{bias: {view, sign}, shown: shown}) | hidden]}
      if shown, do: {:ok, with_bias(match, shown, sign)}, else: {:ok, match}
    else
      _ -> {:ok, with_bias(match, view, sign)}
    end
  end

  # Scores that are hidden already have it too.
  defp with_bias(match, view, sign) do
    hidden = for mask <- match.hidden, do: Map.update(mask, :outside, [view], &[view | &1])
    %{match | biases: [{view, sign} | match.biases], hidden: hidden}
  end

  # {:ok, predicates that show, what is added where they do not, what is added where they do}: nil stands for 0.
  defp additive_mask(terms, view, factor) do
    view = Terms.strip(terms, view)
    value = Terms.value(terms, view)
    args = if value.op in @passing, do: Enum.map(value.args, &Terms.argument(terms, view, &1)), else: []
    additive_mask(value.op, value, args, view, factor, terms)
  end

  defp additive_mask(:select, value, [predicate, x, y], _view, factor, terms) do
    case {fill(terms, x), fill(terms, y)} do
      {zero, fill} when zero == 0 and fill != nil -> {:ok, [{predicate, true}], scaled_fill(fill, factor), nil}
      {fill, zero} when zero == 0 and fill != nil -> {:ok, [{predicate, false}], scaled_fill(fill, factor), nil}
      {nil, fill} when fill != nil -> shown(terms, {predicate, true}, scaled_fill(fill, factor), x, value.type)
      {fill, nil} when fill != nil -> shown(terms, {predicate, false}, scaled_fill(fill, factor), y, value.type)
      _ -> :error
    end
  end

  defp additive_mask(:multiply, _value, [x, y], _view, factor, terms) do
    case {Terms.number(terms, x), Terms.number(terms, y)} do
      {c, _} when is_float(c) -> zero_or(terms, y, factor * c)
      {_, c} when is_float(c) -> zero_or(terms, x, factor * c)
      _ -> :error
    end
  end

  defp additive_mask(:negate, _value, [x], _view, factor, terms), do: additive_mask(terms, x, -factor)

  defp additive_mask(:tensor, value, [], view, factor, _terms) do
    with [_, _] = two <- Enum.uniq(value.opts), true <- Enum.any?(two, &(&1 == 0)) do
      {:ok, [{view, false}], scaled_fill(Enum.find(two, &(&1 != 0)), factor), nil}
    else
      _ -> :error
    end
  end

  defp additive_mask(_op, _value, _args, _view, _factor, _terms), do: :error

  # The rest is a bias, where hidden scores are hidden.
  defp shown(terms, predicate, fill, rest, type),
    do: if(far?(fill, type), do: {:ok, [predicate], fill, Terms.strip(terms, rest)}, else: :error)

  # A number times what is 0 or 1.
  defp zero_or(terms, view, fill) do
    with true <- Visibility.predicate?(terms, view) do
      {:ok, [{view, false}], fill, nil}
    else
      false -> additive_mask(terms, view, fill)
    end
  end

  defp hide(terms, predicates, fill, how, match) do
    type = Graph.fetch!(terms.graph, elem(match.scores, 0)).type
    fill = rounded(fill, type)

    if far?(fill, type),
      do:
        {:ok, %{match | hidden: [%{predicates: predicates, fill: fill, how: how, type: type} | match.hidden]}},
      else: {:refuse, "hidden scores are filled with #{inspect(fill)}, which does not hide them"}
  end

  @doc "Whether the exponential of what is so far below any score is exactly 0."
  def far?(:neg_infinity, _type), do: true
  def far?(fill, _type) when is_atom(fill), do: false
  def far?(fill, {:f, 16}), do: fill <= -3.0e4
  def far?(fill, _type), do: fill <= -9.0e3

  # ---- masks ---------------------------------------------------------------------------------------------

  defp visibility(_terms, %{hidden: []} = match), do: {:ok, match}

  defp visibility(terms, match) do
    # Other factors may have moved the fill since.
    if Enum.all?(match.hidden, &far?(&1.fill, &1.type)) do
      predicates = for mask <- match.hidden, predicate <- mask.predicates, do: predicate
      [row, column] = [one_digit(Index.merge(match.axes.rows)), {:j, 1, column_size(match.weights)}]
      visibility = Visibility.of(terms, predicates, row, column)
      rows = Index.size(match.axes.rows)

      match = %{match | visibility: visibility}

      if Visibility.every_row_sees?(visibility, rows, elem(column, 2)),
        do: {:ok, match},
        else: empty_rows(terms, match)
    else
      {:refuse, "a factor makes hidden scores visible"}
    end
  end

  defp one_digit([digit]), do: digit
  defp one_digit(_digits), do: {:no_row, 1, 1}

  @several "several numbers that hide may leave a row that sees nothing"

  # A row that sees nothing: softmax of one number everywhere is the mean, of -infinity NaN. Where it is that of hidden
  # scores themselves, what is added stays what is added; also under a softcap, whose slope such rows pass on.
  defp empty_rows(terms, match) do
    {added, replaced} = Enum.split_with(match.hidden, &(&1.how == :added))

    cond do
      # The sinks take all.
      match.sinks != [] ->
        {:ok, match}

      match.empty_rows == :swallowed ->
        {:refuse, @several}

      Enum.all?(match.hidden, &(&1.fill == :neg_infinity)) ->
        {:ok, %{match | empty_rows: :nan}}

      match?([_], match.hidden) and Enum.all?(match.hidden, &even?/1) and (added == [] or match.softcap == 0) ->
        {:ok, %{match | empty_rows: :mean}}

      added != [] ->
        shown = for %{shown: shown, bias: {_, sign}} when shown != nil <- added, do: {shown, sign}
        biases = for(%{bias: bias} <- added, do: bias) ++ (match.biases -- shown)
        match = %{match | hidden: replaced, biases: biases, visibility: %Visibility{}, empty_rows: :swallowed}
        visibility(terms, match)

      true ->
        {:refuse, @several}
    end
  end

  # Whether hidden scores are all one number, as what is added swallows them.
  defp even?(%{how: :replaced} = mask) when not is_map_key(mask, :outside), do: true
  defp even?(%{fill: :neg_infinity}), do: true
  defp even?(%{fill: fill, type: {:f, 64}}), do: fill <= -1.0e17
  defp even?(%{type: {:f, 16}}), do: false
  defp even?(%{fill: fill, type: {:bf, 16}}), do: fill <= -1.0e4
  defp even?(%{fill: fill}), do: fill <= -9.9e8

  # ---- digits --------------------------------------------------------------------------------------------

  @doc "Views of all that a match is computed from."
  def views(match) do
    {_coefficient, outer} = match.outer

    [match.q, match.k, match.v] ++
      outer ++
      match.sinks ++
      for({_kind, view} <- match.factors, do: view) ++
      for({_n, {_coefficient, slopes}} <- match.slopes, view <- slopes, do: view) ++
      if(match.dropout, do: for(word <- match.dropout.key, do: {word, []}), else: []) ++
      Visibility.views(match.visibility) ++
      for({view, _} <- match.visibility.others ++ match.biases, do: view)
  end

  # All indices that the tensors of the match are laid out by.
  defp atoms(match) do
    views = views(match) ++ if(match.dropout, do: [match.dropout.view], else: [])
    indices = match.out ++ for(view <- views, index <- elem(view, 1), do: index)

    case Index.atoms(indices) do
      {:ok, atoms} ->
        {dim, axes} = Map.pop!(match.axes, :dim)
        axes = Map.new(axes, fn {name, digits} -> {name, Index.refine(digits, atoms)} end)
        dim = Enum.flat_map(dim, &Map.fetch!(atoms, &1))
        {:ok, %{match | atoms: atoms, axes: Map.merge(axes, %{dim: dim, columns: Map.fetch!(atoms, :j)})}}

      :error ->
        {:refuse, "its axes are split in ways that do not fit together"}
    end
  end

  # Of biases by their number, the slopes of those that are distances.
  defp slopes(terms, match) do
    wide? = Graph.fetch!(terms.graph, elem(match.scores, 0)).type == {:f, 64}

    slopes =
      for {bias, n} <- Enum.with_index(match.biases),
          slopes = Slopes.of(terms, match, bias),
          not wide? or Slopes.in_f32?(slopes, terms.graph),
          into: %{},
          do: {n, slopes}

    {:ok, %{match | slopes: slopes}}
  end

  # Whether a number was drawn for each weight, where weights are dropped.
  defp every_weight?(%{dropout: nil} = match), do: {:ok, match}

  defp every_weight?(%{dropout: %{view: view}} = match) do
    drawn = view |> digits_of() |> Index.refine(match.atoms)

    if Enum.sort(drawn) == Enum.sort(weight_digits(match)),
      do: {:ok, match},
      else: {:refuse, "its weights are dropped out several at once"}
  end

  defp weight_digits(%{axes: axes}),
    do: Enum.concat([axes.batch, axes.heads, axes.groups, axes.rows, axes.columns])

  @doc "Which weights are dropped by which numbers: of one key the same ones where this is the same."
  def dropped(%{dropout: %{view: {number, indices}, share: share, below: below}} = match) do
    weights = weight_digits(match)
    at = for index <- indices, do: index |> Index.refine(match.atoms) |> Enum.map(&position(weights, &1))
    {number, at, for({_name, _stride, size} <- weights, do: size), share, below}
  end
end
