defmodule FlashAttention.Rewriter.Joined do
  @moduledoc false
  # What is done in each of several blocks of columns, as one value of all columns that is added to the graph: where blocks
  # are parts of one tensor, that tensor; where they count their columns, a count; else the same operation on what is joined.

  alias FlashAttention.Rewriter.{Graph, Index, Terms, Visibility}

  @doc """
  What is joined so far: `terms` of the graph, and `dots`, the products of the blocks.

  The functions below take with it what is joined: `column`, the variable that runs along blocks; `blocks`, `{start, size}` of each; `names`,
  the variables that each value which is added has an axis of, and their `sizes`.
  """
  def new(terms), do: %{terms: terms, done: %{}, dots: []}

  @doc "The number of a value that is one view in each block, along the columns of all of them; throws `:apart` where there is none."
  def join(state, views, at) do
    views = for view <- views, do: Terms.resolve(state.terms, view)
    key = {views, at.names}

    case state.done do
      %{^key => number} ->
        {number, state}

      _ ->
        {number, state} = joined(state, views, at)
        {number, put_in(state.done[key], number)}
    end
  end

  defp joined(state, [first | _] = views, at) do
    same? = Enum.uniq(views) == [first] and at.column not in Terms.variables(first)

    case {same?, parts(state, views, at)} do
      {true, _} -> seen(state, first, at)
      {false, {:ok, view, state}} -> seen(state, view, at)
      {false, :error} -> by_operation(state, views, at)
    end
  end

  # Consecutive parts of one tensor.
  defp parts(state, views, at) do
    [{arg, starts, {number, indices}} | _] = cuts = for view <- views, do: cut(state.terms, view)
    axis = Enum.find_index(indices, &(match?([{_, 1, _}], &1) and elem(hd(&1), 0) == at.column))

    expected =
      for {start, size} <- at.blocks,
          axis != nil,
          do:
            {arg, List.update_at(starts, axis, &(&1 + start)),
             List.replace_at(indices, axis, [{at.column, 1, size}])}

    if expected != [] and expected == for({arg, starts, {_, indices}} <- cuts, do: {arg, starts, indices}) do
      {cut, state} = cut_out(state, arg, number, starts, axis, at)
      {:ok, {cut, List.replace_at(indices, axis, [{at.column, 1, at.sizes[at.column]}])}, state}
    else
      :error
    end
  end

  defp cut(terms, {number, indices} = view) do
    case Terms.value(terms, view) do
      %{op: :slice, args: [arg], opts: [lengths: _, starts: starts, strides: strides]} ->
        if Enum.all?(strides, &(&1 == 1)), do: {arg, starts, view}, else: whole(number, indices)

      _ ->
        whole(number, indices)
    end
  end

  defp whole(number, indices), do: {number, List.duplicate(0, length(indices)), {number, indices}}

  # What begins at the beginning is seen as it is.
  defp cut_out(state, arg, number, starts, axis, at) do
    if Enum.all?(starts, &(&1 == 0)) do
      {arg, state}
    else
      value = Graph.fetch!(state.terms.graph, number)
      shape = put_elem(value.shape, axis, at.sizes[at.column])
      opts = [lengths: Tuple.to_list(shape), starts: starts, strides: List.duplicate(1, length(starts))]
      put(state, %{value | shape: shape, opts: opts, args: [arg]})
    end
  end

  # A value with an axis for each of the names, of 1 where the view does not depend on it.
  defp seen(state, {number, indices}, at) do
    axes = at.names |> Enum.with_index() |> Map.new()
    names = Index.variables(indices)
    shape = for name <- at.names, do: if(name in names, do: at.sizes[name], else: 1)

    indices =
      for index <- indices,
          do: for({name, divisor, size} <- index, do: {{:axis, axes[name] || throw(:apart)}, divisor, size})

    type = Graph.fetch!(state.terms.graph, number).type
    put(state, %{op: :view, args: [number], opts: [indices: indices], type: type, shape: List.to_tuple(shape)})
  end

  defp put(state, value) do
    {number, graph} = Graph.put(state.terms.graph, value)
    {number, %{state | terms: %{state.terms | graph: graph}}}
  end

  # ---- what is done in each block is done in all ---------------------------------------------------------

  @comparisons [:equal, :not_equal, :greater, :less, :greater_equal, :less_equal]
  @elementwise [:exp, :add, :subtract, :multiply, :divide, :select, :as_type, :negate, :tanh, :max, :min, :clip] ++
                 [:pow, :abs, :logical_and, :logical_or, :logical_not, :sqrt, :remainder | @comparisons]

  defp by_operation(state, views, at) do
    values = for view <- views, do: Terms.value(state.terms, view)

    case Enum.uniq(for value <- values, do: {value.op, value.type, length(value.args)}) do
      [{op, type, _}] -> by_operation(op, type, values, views, state, at)
      _ -> throw(:apart)
    end
  end

  defp by_operation(:constant, _type, [value | _] = values, _views, state, _at) do
    if Enum.all?(values, &(&1.opts == value.opts)), do: put(state, %{value | shape: {}}), else: throw(:apart)
  end

  defp by_operation(:iota, type, values, views, state, at) do
    counted =
      for {%{opts: [axis: axis], shape: shape}, {_, indices}} <- Enum.zip(values, views),
          do: {elem(shape, axis), Enum.at(indices, axis)}

    with [{size, index}] <- Enum.uniq(counted),
         false <- at.column in Index.variables([index]),
         do: count(state, size, index, type, at),
         else: (_ -> throw(:apart))
  end

  defp by_operation(:dot, type, _values, views, state, at), do: product(state, views, type, at)

  # Whole numbers, one of which counts columns from where the block begins.
  defp by_operation(op, type, _values, views, state, at) when op in [:subtract | @comparisons] do
    [ones, others] = operands(state, views)
    [of_ones, of_others] = for views <- [ones, others], do: for(view <- views, do: plus(state.terms, view))

    cond do
      counts?(state, of_others, at) -> shifted(op, type, of_ones, of_others, &Enum.reverse/1, state, at)
      counts?(state, of_ones, at) -> shifted(op, type, of_others, of_ones, & &1, state, at)
      true -> elementwise(state, op, type, [ones, others], at)
    end
  end

  defp by_operation(op, type, values, views, state, at) when op in @elementwise do
    if Enum.all?(values, &(&1.opts == nil)),
      do: elementwise(state, op, type, operands(state, views), at),
      else: throw(:apart)
  end

  defp by_operation(_op, _type, _values, _views, _state, _at), do: throw(:apart)

  # By operand, those of each block.
  defp operands(state, views), do: Enum.zip_with(for(view <- views, do: Terms.args(state.terms, view)), & &1)

  defp elementwise(state, op, type, operands, at) do
    {args, state} = Enum.map_reduce(operands, state, &operand(&2, &1, at))
    shapes = for arg <- args, do: Graph.fetch!(state.terms.graph, arg).shape
    put(state, %{op: op, args: args, opts: nil, type: type, shape: widest(shapes)})
  end

  defp operand(state, views, at) do
    whole = for view <- views, do: plus(state.terms, view)
    if counts?(state, whole, at), do: counted(state, whole, at), else: join(state, views, at)
  end

  defp widest(shapes) do
    shapes
    |> Enum.reject(&(&1 == {}))
    |> Enum.map(&Tuple.to_list/1)
    |> Enum.zip_with(&Enum.max/1)
    |> List.to_tuple()
  end

  # `{view, c}` of a whole number that is what is seen there and c. Those of few bits go round.
  defp plus(terms, view) do
    view = Terms.strip(terms, view)

    with %{op: op, type: {:s, bits}} when op in [:add, :subtract] and bits >= 32 <- Terms.value(terms, view),
         [x, y] = Terms.args(terms, view),
         {rest, c} <- constant(op, x, y, Visibility.number(terms, x), Visibility.number(terms, y)) do
      more(plus(terms, rest), c)
    else
      _ -> {view, 0}
    end
  end

  defp constant(:add, _x, y, c, _d) when is_integer(c), do: {y, c}
  defp constant(:add, x, _y, _c, d) when is_integer(d), do: {x, d}
  defp constant(:subtract, x, _y, _c, d) when is_integer(d), do: {x, -d}
  defp constant(_op, _x, _y, _c, _d), do: nil

  defp more({view, c}, d), do: {view, c + d}

  # Whether each is a count of the columns of its block, and a number.
  defp counts?(state, whole, at) do
    Enum.zip(whole, at.blocks)
    |> Enum.all?(fn {{view, _c}, {_start, size}} ->
      case {Terms.value(state.terms, view), view} do
        {%{op: :iota, type: {:s, bits}, opts: [axis: axis]}, {_, indices}} when bits >= 32 ->
          Enum.at(indices, axis) == [{at.column, 1, size}]

        _ ->
          false
      end
    end)
  end

  # One count of all columns.
  defp counted(state, whole, at) do
    with [c] <- Enum.uniq(for {{_view, c}, {start, _size}} <- Enum.zip(whole, at.blocks), do: c - start) do
      {view, _} = hd(whole)
      type = Terms.value(state.terms, view).type
      all = at.sizes[at.column]
      {count, state} = count(state, all, [{at.column, 1, all}], type, at)
      added(state, count, c, type)
    else
      _ -> throw(:apart)
    end
  end

  defp count(state, size, index, type, at) do
    {iota, state} = put(state, %{op: :iota, args: [], opts: [axis: 0], type: type, shape: {size}})
    seen(state, {iota, [index]}, at)
  end

  defp added(state, number, 0, _type), do: {number, state}

  defp added(state, number, c, type) do
    {constant, state} = put(state, %{op: :constant, args: [], opts: c, type: type, shape: {}})
    shape = Graph.fetch!(state.terms.graph, number).shape
    put(state, %{op: :add, args: [constant, number], opts: nil, type: type, shape: shape})
  end

  # What is on the one side of a comparison, or of a difference, may as well be on the other.
  defp shifted(op, type, others, counts, order, state, at) do
    counts = for {{_, c}, {view, d}} <- Enum.zip(others, counts), do: {view, d - c}
    {other, state} = join(state, for({view, _c} <- others, do: view), at)
    {count, state} = counted(state, counts, at)
    shapes = for number <- [other, count], do: Graph.fetch!(state.terms.graph, number).shape
    put(state, %{op: op, args: order.([count, other]), opts: nil, type: type, shape: widest(shapes)})
  end

  # The product of q, the same in all blocks, and the keys of all of them.
  defp product(state, views, type, at) do
    products = for view <- views, do: Terms.operands(state.terms, view)
    bound = products |> Enum.map(&elem(&1, 1)) |> Enum.uniq()

    {ks, qs} =
      for {operands, _} <- products, operand <- operands, reduce: {[], []} do
        {ks, qs} ->
          if at.column in Terms.variables(operand), do: {[operand | ks], qs}, else: {ks, [operand | qs]}
      end

    if length(bound) > 1 or length(ks) != length(views), do: throw(:apart)
    within = %{at | names: at.names ++ hd(bound), sizes: Map.merge(at.sizes, Terms.sizes(hd(qs)))}
    {q, state} = join(state, Enum.reverse(qs), within)
    {k, state} = join(state, Enum.reverse(ks), within)
    {dot, state} = put(state, dot(state, q, k, length(at.names), type))
    state = %{state | dots: Enum.map(views, &elem(&1, 0)) ++ state.dots}
    seen(state, {dot, dot_indices(state, q, k, at)}, at)
  end

  # Axes that both have are batches; behind the first ones comes what is summed over.
  defp dot(state, q, k, count, type) do
    {batch, free_q, free_k} = axes(state, q, k, count)
    [q_shape, k_shape] = for number <- [q, k], do: Graph.fetch!(state.terms.graph, number).shape
    contract = Enum.to_list(count..(tuple_size(q_shape) - 1)//1)

    shape =
      for {axes, shape} <- [{batch, q_shape}, {free_q, q_shape}, {free_k, k_shape}],
          axis <- axes,
          do: elem(shape, axis)

    opts = [batch: {batch, batch}, contract: {contract, contract}]
    %{op: :dot, args: [q, k], opts: opts, type: type, shape: List.to_tuple(shape)}
  end

  defp axes(state, q, k, count) do
    [q_shape, k_shape] = for number <- [q, k], do: Graph.fetch!(state.terms.graph, number).shape
    {batch, free} = Enum.split_with(0..(count - 1), &(elem(q_shape, &1) > 1 and elem(k_shape, &1) > 1))
    {batch, free, free}
  end

  defp dot_indices(state, q, k, at) do
    {batch, free_q, free_k} = axes(state, q, k, length(at.names))
    [q_indices, k_indices] = for number <- [q, k], do: indices(state, number, at)

    for {axes, indices} <- [{batch, q_indices}, {free_q, q_indices}, {free_k, k_indices}],
        axis <- axes,
        do: Enum.at(indices, axis)
  end

  @doc "The axes of a value by their names."
  def indices(state, number, at) do
    shape = Graph.fetch!(state.terms.graph, number).shape
    for {name, axis} <- Enum.with_index(at.names), do: Index.variable(name, elem(shape, axis))
  end

  @doc "The softmax of a value along its last axis."
  def softmax(state, s) do
    %{type: type, shape: shape} = Graph.fetch!(state.terms.graph, s)
    last = tuple_size(shape) - 1
    row = put_elem(shape, last, 1)

    put_op = fn state, op, args, opts, shape ->
      put(state, %{op: op, args: args, opts: opts, type: type, shape: shape})
    end

    {maximum, state} = put_op.(state, :reduce_max, [s], [axes: [last]], row)
    {below, state} = put_op.(state, :subtract, [s, maximum], nil, shape)
    {e, state} = put_op.(state, :exp, [below], nil, shape)
    {sum, state} = put_op.(state, :sum, [e], [axes: [last]], row)
    put_op.(state, :divide, [e, sum], nil, shape)
  end
end
