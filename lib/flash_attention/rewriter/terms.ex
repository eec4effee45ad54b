defmodule FlashAttention.Rewriter.Terms do
  @moduledoc false
  # What an element of a value is, in one normal form: a sum of products of factors. Layouts are gone, as a view (a value
  # and an index for each of its axes) is followed through transposes, reshapes and broadcasts to where numbers are
  # made; the order of sums and products, divisions, and where constants stand are gone, as terms are multiplied out.
  #
  # A term is %{monomial => coefficient}; a monomial a sorted list of {factor, power}; a factor the number of a
  # structure whose parts are terms. Equal numbers are equal functions of the variables in them. Conversions between
  # floating-point types do not show: they are rounding.

  alias FlashAttention.Rewriter.{Graph, Index, Random}

  @enforce_keys [:graph, :table]
  defstruct [:graph, :table]

  @type view :: {Graph.number_of_value(), [Index.t()]}
  @type factor :: non_neg_integer
  @type monomial :: [{factor, integer}]
  @type t :: %{monomial => float}

  # Sums that are multiplied out further stay as they are.
  @most_monomials 40
  @near 1.0e-9

  @functions [:exp, :tanh, :log, :sqrt, :rsqrt, :equal, :not_equal, :greater, :greater_equal, :less_equal] ++
               [:logical_and, :logical_or, :logical_not, :max, :min, :abs, :sigmoid]

  @doc "Keeps what is found out about a graph while `fun` runs."
  def with_terms(graph, fun) do
    table = :ets.new(__MODULE__, [:private, :set])

    try do
      fun.(%__MODULE__{graph: graph, table: table})
    after
      :ets.delete(table)
    end
  end

  @doc "What `fun` returned for the key when it was asked first."
  def memo(%{table: table}, key, fun) do
    case :ets.lookup(table, key) do
      [{_, found}] ->
        found

      [] ->
        found = fun.()
        :ets.insert(table, {key, found})
        found
    end
  end

  # ---- views ---------------------------------------------------------------------------------------------

  @doc "The value at a view."
  def value(terms, {number, _indices}), do: Graph.fetch!(terms.graph, number)

  @doc "A view of where the numbers are: through what only moves them."
  @spec resolve(struct, view) :: view
  def resolve(terms, {_number, indices} = view) do
    value = value(terms, view)

    case moved(value.op, value, indices, terms) do
      {:ok, view} -> resolve(terms, view)
      :error -> view
    end
  end

  defp moved(:transpose, %{args: [arg], opts: [axes: axes]}, indices, _terms) do
    at = axes |> Enum.zip(indices) |> Map.new()
    {:ok, {arg, for(axis <- 0..(length(axes) - 1)//1, do: at[axis])}}
  end

  defp moved(:reshape, %{args: [arg], shape: shape}, indices, terms) do
    with {:ok, indices} <- Index.reshape(indices, shape, Graph.fetch!(terms.graph, arg).shape),
         do: {:ok, {arg, indices}}
  end

  defp moved(:broadcast, %{args: [arg], shape: shape, opts: [axes: axes]}, indices, terms) do
    from = Graph.fetch!(terms.graph, arg).shape
    at = for axis <- axes, do: Enum.at(indices, axis)
    {:ok, {arg, along(at, Tuple.to_list(from), for(axis <- axes, do: elem(shape, axis)))}}
  end

  defp moved(:slice, %{args: [arg | _], opts: opts}, indices, _terms) do
    if Enum.all?(opts[:starts], &(&1 == 0)) and Enum.all?(opts[:strides], &(&1 == 1)),
      do: {:ok, {arg, indices}},
      else: :error
  end

  defp moved(:view, %{args: [arg], opts: [indices: wanted]}, indices, _terms) do
    at = for {index, axis} <- Enum.with_index(indices), into: %{}, do: {{:axis, axis}, index}
    substitute({arg, wanted}, at)
  end

  # What stands before all others, where only that is looked at; or the part that the index is within.
  defp moved(:concatenate, %{args: args, opts: [axis: axis]}, indices, terms) do
    sizes = for arg <- args, do: elem(Graph.fetch!(terms.graph, arg).shape, axis)
    parts = Enum.zip(args, Enum.scan([0 | sizes], &+/2) |> Enum.zip(sizes))
    part(Enum.at(indices, axis), parts, indices, axis)
  end

  # What there was before.
  defp moved(:pad, %{args: [arg, _filling], opts: [sizes: sizes]}, indices, terms) do
    case for {size, axis} <- Enum.with_index(sizes), size != {0, 0, 0}, do: {axis, size} do
      [] ->
        {:ok, {arg, indices}}

      [{axis, {before, later, 0}}] when before >= 0 and later >= 0 ->
        size = elem(Graph.fetch!(terms.graph, arg).shape, axis)
        part(Enum.at(indices, axis), [{arg, {before, size}}], indices, axis)

      _ ->
        :error
    end
  end

  defp moved(_op, _value, _indices, _terms), do: :error

  # Of parts of an axis, `{value, {from, size}}`, the one that the index is within.
  defp part(index, parts, indices, axis) do
    {from, along} = Index.inside(index) || {0, index}
    within? = Index.inside(index) != nil

    Enum.find_value(parts, :error, fn {arg, {first, size}} ->
      fits? =
        if within?,
          do: Index.size(along) == size or along == [],
          else: Index.size(along) <= size

      if from == first and fits?, do: {:ok, {arg, List.replace_at(indices, axis, along)}}
    end)
  end

  # An axis of 1 that became longer has one element for all.
  defp along(indices, from, to) do
    Enum.zip_with([indices, from, to], fn
      [_index, 1, size] when size != 1 -> []
      [index, _, _] -> index
    end)
  end

  @doc "The argument of an elementwise operation, as broadcasting aligns them: at the last axis."
  @spec argument(struct, view, Graph.number_of_value()) :: view
  def argument(terms, {number, indices}, arg) do
    from = Tuple.to_list(Graph.fetch!(terms.graph, arg).shape)
    to = Tuple.to_list(Graph.fetch!(terms.graph, number).shape)
    skipped = length(to) - length(from)
    {arg, along(Enum.drop(indices, skipped), from, Enum.drop(to, skipped))}
  end

  @doc "As `resolve/2`, and through conversions that keep numbers but for rounding."
  @spec strip(struct, view) :: view
  def strip(terms, view) do
    {_number, indices} = view = resolve(terms, view)

    case value(terms, view) do
      %{op: :as_type, args: [arg], type: type} ->
        if keeps?(Graph.fetch!(terms.graph, arg).type, type), do: strip(terms, {arg, indices}), else: view

      _ ->
        view
    end
  end

  # Of 8 bits next to nothing is left: that is somebody's quantization.
  defp keeps?({from, _}, {to, bits}) when to in [:f, :bf] and bits > 8, do: from in [:f, :bf, :u, :s]
  defp keeps?({class, from}, {class, to}), do: to >= from
  defp keeps?({:u, from}, {:s, to}), do: to > from
  defp keeps?(_from, _to), do: false

  @doc "The variables that a view depends on."
  def variables({_number, indices}), do: Index.variables(indices)

  @doc "The views that a reduction or a product runs over, with new variables for the axes that vanish."
  @spec operands(struct, view) :: {[view], [term]}
  def operands(terms, {number, indices}) do
    %{op: op, args: args, opts: opts} = Graph.fetch!(terms.graph, number)
    shapes = for arg <- args, do: Graph.fetch!(terms.graph, arg).shape
    depth = depth(indices)
    operands(op, args, opts, shapes, indices, &{:bound, depth, &1})
  end

  defp operands(:dot, [a, b], opts, [a_shape, b_shape], indices, name) do
    {a_contract, b_contract} = opts[:contract]
    {a_batch, b_batch} = opts[:batch]
    bound = for {axis, n} <- Enum.with_index(a_contract), do: Index.variable(name.(n), elem(a_shape, axis))
    {batch, free} = Enum.split(indices, length(a_batch))
    a_free = Enum.to_list(0..(tuple_size(a_shape) - 1)//1) -- (a_contract ++ a_batch)
    b_free = Enum.to_list(0..(tuple_size(b_shape) - 1)//1) -- (b_contract ++ b_batch)
    {a_indices, b_indices} = Enum.split(free, length(a_free))

    place = fn batch_axes, contract_axes, free_axes, free_indices ->
      (Enum.zip(batch_axes, batch) ++ Enum.zip(contract_axes, bound) ++ Enum.zip(free_axes, free_indices))
      |> Enum.sort()
      |> Enum.map(&elem(&1, 1))
    end

    views = [
      {a, place.(a_batch, a_contract, a_free, a_indices)},
      {b, place.(b_batch, b_contract, b_free, b_indices)}
    ]

    {views, Index.variables(bound)}
  end

  defp operands(reduce, [arg], [axes: axes], [shape], indices, name) when reduce in [:sum, :reduce_max] do
    rank = tuple_size(shape)
    # Axes that were reduced may remain, of size 1.
    kept =
      if length(indices) == rank,
        do: Enum.to_list(0..(rank - 1)//1),
        else: Enum.to_list(0..(rank - 1)//1) -- axes

    at = kept |> Enum.zip(indices) |> Map.new()

    bound =
      for {axis, n} <- Enum.with_index(axes), into: %{}, do: {axis, Index.variable(name.(n), elem(shape, axis))}

    indices = for axis <- 0..(rank - 1)//1, do: bound[axis] || at[axis]
    {[{arg, indices}], bound |> Map.values() |> Index.variables()}
  end

  # One more than that of the variables that are bound further out.
  defp depth(indices) do
    for({:bound, depth, _} <- Index.variables(indices), do: depth) |> Enum.max(fn -> 0 end) |> Kernel.+(1)
  end

  @doc "The view with other indices in place of variables."
  @spec substitute(view, map) :: {:ok, view} | :error
  def substitute({number, indices}, map) do
    indices = Enum.map(indices, &Index.substitute(&1, map))
    if :error in indices, do: :error, else: {:ok, {number, Enum.map(indices, &elem(&1, 1))}}
  end

  @doc "A view of that part of tensors that stand side by side along a variable, from a place on."
  def within({number, indices}, name, from, size) do
    {number,
     for index <- indices do
       with true <- match?([{^name, 1, _}], index),
            {:ok, index} <- Index.within([{name, 1, size}], from, size),
            do: index,
            else: (_ -> index)
     end}
  end

  # ---- factors -------------------------------------------------------------------------------------------

  @doc "The number of a factor, by its structure; `info` says of which view it is and on which variables it depends."
  def factor(terms, structure, variables, view) do
    memo(terms, {:number, structure}, fn ->
      number = :ets.update_counter(terms.table, :factors, 1, {:factors, 0})
      info = %{structure: structure, variables: Enum.sort(variables), view: view}
      :ets.insert(terms.table, {{:factor, number}, info})
      number
    end)
  end

  @doc "What is known of a factor."
  def info(terms, factor) do
    [{_, info}] = :ets.lookup(terms.table, {:factor, factor})
    info
  end

  @doc "The number of a term: that of equal terms is the same."
  def key(terms, term) do
    sorted = for {monomial, coefficient} <- Enum.sort(term), do: {monomial, rounded(coefficient)}
    memo(terms, {:key, sorted}, fn -> :ets.update_counter(terms.table, :keys, 1, {:keys, 0}) end)
  end

  # Ten digits: constants that were computed in another order are the same.
  defp rounded(x) when x == 0, do: 0.0

  defp rounded(x), do: "~.9e" |> :io_lib.format([x / 1]) |> List.to_string()

  # ---- arithmetic of terms -------------------------------------------------------------------------------

  def constant(x) when x == 0, do: %{}
  def constant(x), do: %{[] => x / 1}

  def of_factor(factor), do: %{[{factor, 1}] => 1.0}

  def add(one, other) do
    Map.merge(one, other, fn _monomial, x, y ->
      if abs(x + y) <= @near * max(abs(x), abs(y)), do: 0.0, else: x + y
    end)
    |> Map.reject(fn {_monomial, coefficient} -> coefficient == 0 end)
  end

  def scale(term, factor), do: for({monomial, x} <- term, factor != 0, into: %{}, do: {monomial, x * factor})

  def subtract(one, other), do: add(one, scale(other, -1.0))

  def multiply(terms, one, other) do
    for {m, x} <- one, {n, y} <- other, reduce: %{} do
      product -> add(product, reduced(terms, times(terms, m, n), x * y))
    end
  end

  # A sum by which is divided, in the product, is what the others leave of 1: so that the sum of what was divided is 1.
  defp reduced(terms, monomial, x) do
    inverses =
      for {factor, power} <- monomial,
          power > 0,
          %{structure: {:inverse, _}, view: term} <- [info(terms, factor)],
          {lead, c} <- Enum.take(for({[{sum, 1}], _} = one <- Enum.sort(term), sum?(terms, sum), do: one), 1),
          [{sum, 1}] = lead,
          {_sum, times} <- [List.keyfind(monomial, sum, 0)],
          times > 0,
          others = Map.delete(term, lead),
          # Where the others have it too, this would not end.
          not Enum.any?(others, fn {other, _} -> List.keymember?(other, sum, 0) end),
          do: {factor, lead, others, c}

    case inverses do
      [] ->
        %{monomial => x}

      [{factor, [{sum, 1}], others, c} | _] ->
        without_sum = times(terms, monomial, [{sum, -1}])
        alone = times(terms, without_sum, [{factor, -1}])

        terms
        |> reduced(alone, x / c)
        |> subtract(multiply(terms, %{without_sum => x / c}, others))
    end
  end

  defp sum?(terms, factor), do: match?({:sum, _, _}, info(terms, factor).structure)

  # A predicate is 0 or 1, and its own square.
  defp times(terms, m, n) do
    Enum.reduce(n, Map.new(m), fn {factor, power}, powers ->
      Map.update(powers, factor, power, &(&1 + power))
    end)
    |> Enum.reject(fn {_factor, power} -> power == 0 end)
    |> Enum.map(fn {factor, power} ->
      if power > 1 and match?({:predicate, _}, info(terms, factor).structure),
        do: {factor, 1},
        else: {factor, power}
    end)
    |> Enum.sort()
  end

  @doc "1 divided by a term."
  def inverse(terms, term) do
    case Map.to_list(term) do
      [{monomial, x}] ->
        %{Enum.map(monomial, fn {factor, power} -> {factor, -power} end) => 1 / x}

      _ ->
        variables = term_variables(terms, term)
        of_factor(factor(terms, {:inverse, key(terms, term)}, variables, term))
    end
  end

  @doc "The variables that a term depends on."
  def term_variables(terms, term) do
    for {monomial, _} <- term,
        {factor, _} <- monomial,
        name <- info(terms, factor).variables,
        uniq: true,
        do: name
  end

  @doc "The sum of a term over values of variables, whose names are `bound` with their sizes."
  def sum(terms, term, bound, sizes) do
    Enum.reduce(term, %{}, fn {monomial, x}, sum ->
      {inside, outside} =
        Enum.split_with(monomial, fn {factor, _} -> Enum.any?(info(terms, factor).variables, &(&1 in bound)) end)

      variables = for {factor, _} <- inside, name <- info(terms, factor).variables, uniq: true, do: name
      {summed, free} = Enum.split_with(bound, &(&1 in variables))
      x = Enum.reduce(free, x, &(&2 * sizes[&1]))

      summed_factor =
        if summed == [],
          do: [],
          else: [{factor(terms, {:sum, inside, summed}, variables -- bound, nil), 1}]

      add(sum, reduced(terms, times(terms, outside, summed_factor), x))
    end)
  end

  # ---- the term of a view --------------------------------------------------------------------------------

  # The sizes of tensors that stand side by side along a variable, below elementwise operations; [] where none do.
  @few [:exp, :subtract, :multiply, :divide, :add, :negate, :select]
  defp parts(terms, view, name) do
    {_number, indices} = view = strip(terms, view)

    memo(terms, {:parts, view, name}, fn ->
      case value(terms, view) do
        %{op: :concatenate, args: args, opts: [axis: axis]} ->
          if match?([{^name, 1, _}], Enum.at(indices, axis)),
            do: for(arg <- args, do: elem(Graph.fetch!(terms.graph, arg).shape, axis)),
            else: []

        %{op: op} when op in @few ->
          Enum.find_value(args(terms, view), [], fn arg -> with [] <- parts(terms, arg, name), do: nil end)

        _ ->
          []
      end
    end)
  end

  @doc "The normal form of the element at a view."
  @spec term(struct, view) :: t
  def term(terms, view) do
    view = strip(terms, view)

    memo(terms, {:term, view}, fn ->
      term = view_as_term(terms, view)
      if map_size(term) > @most_monomials, do: leaf(terms, view), else: term
    end)
  end

  # Erlang has no infinite numbers: where coefficients would be, nothing is known of the view.
  defp view_as_term(terms, view) do
    value = value(terms, view)
    of(value.op, value, view, terms)
  rescue
    ArithmeticError -> leaf(terms, view)
  end

  @doc "The number, other than 0, that a view is everywhere; nil of any other."
  def number(terms, view) do
    case term(terms, view) do
      %{[] => x} = term when map_size(term) == 1 -> x
      _ -> nil
    end
  end

  @doc "The arguments of an elementwise operation."
  @spec args(struct, view) :: [view]
  def args(terms, view), do: for(arg <- value(terms, view).args, do: argument(terms, view, arg))

  defp terms_of_args(terms, view), do: for(arg <- args(terms, view), do: term(terms, arg))

  defp of(:constant, %{opts: x}, _view, _terms) when is_number(x), do: constant(x)
  defp of(:constant, %{opts: name}, _view, terms), do: of_factor(factor(terms, {:constant, name}, [], nil))
  defp of(:negate, _value, view, terms), do: terms |> terms_of_args(view) |> hd() |> scale(-1.0)

  defp of(:add, value, view, terms) do
    [one, other] = args(terms, view)

    cond do
      lost?(terms, value, one, other) -> term(terms, one)
      lost?(terms, value, other, one) -> term(terms, other)
      true -> add(term(terms, one), term(terms, other))
    end
  end

  defp of(:subtract, _value, view, terms) do
    [one, other] = terms_of_args(terms, view)
    subtract(one, other)
  end

  defp of(:multiply, _value, view, terms) do
    [one, other] = terms_of_args(terms, view)
    product(terms, one, other, view)
  end

  defp of(:divide, _value, view, terms) do
    [one, other] = terms_of_args(terms, view)
    if other == %{}, do: leaf(terms, view), else: product(terms, one, inverse(terms, other), view)
  end

  defp of(:pow, _value, view, terms) do
    case terms_of_args(terms, view) do
      [base, %{[] => 2.0} = two] when map_size(two) == 1 -> product(terms, base, base, view)
      _ -> function(:pow, view, terms)
    end
  end

  # p * x + (1 - p) * y.
  defp of(:select, _value, view, terms) do
    [predicate, x, y] = args(terms, view)
    predicate = predicate(terms, predicate)
    [x, y] = for branch <- [x, y], do: term(terms, branch)
    add(product(terms, predicate, x, view), subtract(y, product(terms, predicate, y, view)))
  end

  # Along tensors that stand side by side it is the sum of their sums.
  defp of(:sum, _value, view, terms) do
    {[arg], bound} = operands(terms, view)

    with [name] <- bound, [_ | _] = parts <- parts(terms, arg, name) do
      for {size, last} <- Enum.zip(parts, Enum.scan(parts, &+/2)), reduce: %{} do
        sum ->
          there = term(terms, within(arg, name, last - size, size))
          add(sum, sum(terms, there, [name], %{name => size}))
      end
    else
      _ -> sum(terms, term(terms, arg), bound, sizes(arg))
    end
  end

  defp of(:reduce_max, _value, view, terms) do
    {[arg], bound} = operands(terms, view)
    structure = {:max, key(terms, term(terms, arg)), bound}
    of_factor(factor(terms, structure, variables(view), view))
  end

  # Where it is within what was filled in, that.
  defp of(:pad, %{args: [_arg, filling], opts: [sizes: sizes], shape: shape}, {_, indices} = view, terms) do
    filled? =
      Enum.zip([sizes, Tuple.to_list(shape), indices])
      |> Enum.any?(fn {{before, later, _}, size, index} ->
        {from, along} = Index.inside(index) || {0, index}
        from + Index.size(along) <= before or from >= size - later
      end)

    if filled?, do: term(terms, {filling, []}), else: leaf(terms, view)
  end

  # What is cut out of tensors that stand side by side is one of them.
  defp of(:slice, value, view, terms) do
    with {:ok, shifted} <- shifted(value, view),
         true <- beside?(terms, shifted),
         do: term(terms, shifted),
         else: (_ -> leaf(terms, view))
  end

  # Dropout at a rate of 0 keeps what is less than 1 of numbers that all are.
  defp of(:less, _value, view, terms) do
    [x, y] = args(terms, view)

    bound = number(terms, y)

    if is_float(bound) and bound >= 1 and Random.fraction(terms, x) != :error,
      do: constant(1),
      else: function(:less, view, terms)
  end

  # What is multiplied is known by where its numbers are, and not looked into.
  defp of(:dot, _value, view, terms) do
    {operands, bound} = operands(terms, view)
    operands = for operand <- operands, do: strip(terms, operand)
    names = for operand <- operands, name <- variables(operand), uniq: true, do: name
    of_factor(factor(terms, {:dot, Enum.sort(operands)}, names -- bound, view))
  end

  defp of(op, _value, view, terms) when op in @functions,
    do: function(op, view, terms)

  defp of(_op, _value, view, terms), do: leaf(terms, view)

  @doc "The view of what a slice is cut out of; :error where that is not known, or mixes digits."
  @spec cut(struct, view) :: {:ok, view} | :error
  def cut(terms, view), do: shifted(value(terms, view), view)

  defp shifted(%{op: :slice, args: [arg], opts: opts, shape: shape}, {_number, indices}) do
    sizes = Tuple.to_list(shape)

    [opts[:starts], opts[:strides], sizes, indices]
    |> Enum.zip_with(fn
      [0, 1, _size, index] -> {:ok, index}
      [start, 1, size, index] when is_integer(start) -> Index.within(index, start, size)
      _ -> :error
    end)
    |> Enum.reduce({:ok, []}, fn
      {:ok, index}, {:ok, indices} -> {:ok, [index | indices]}
      _, _ -> :error
    end)
    |> then(&with {:ok, indices} <- &1, do: {:ok, {arg, Enum.reverse(indices)}})
  end

  defp shifted(_value, _view), do: :error

  # Whether each tensor that a view is made of is seen whole where the view is within something longer.
  defp beside?(terms, view) do
    {_number, indices} = view = strip(terms, view)

    memo(terms, {:beside, view}, fn ->
      value = value(terms, view)

      cond do
        Enum.all?(indices, &(Index.inside(&1) == nil)) -> true
        value.op == :pad -> of(:pad, value, view, terms) == %{}
        value.op in @few or value.op in @functions -> terms |> args(view) |> Enum.all?(&beside?(terms, &1))
        true -> false
      end
    end)
  end

  defp product(terms, one, other, view) do
    if map_size(one) * map_size(other) > @most_monomials,
      do: leaf(terms, view),
      else: multiply(terms, one, other)
  end

  defp function(op, view, terms) do
    args = terms_of_args(terms, view)
    variables = for term <- args, name <- term_variables(terms, term), uniq: true, do: name
    of_factor(factor(terms, {op, Enum.map(args, &key(terms, &1))}, variables, view))
  end

  defp leaf(terms, view), do: of_factor(factor(terms, {:leaf, view}, variables(view), view))

  @doc "The predicate of a select as a factor that is 0 or 1."
  def predicate(terms, view) do
    case term(terms, view) do
      constant when constant == %{} -> constant
      %{[] => x} = constant when map_size(constant) == 1 and x != 0 -> constant(1)
      term -> of_factor(factor(terms, {:predicate, key(terms, term)}, term_variables(terms, term), view))
    end
  end

  @doc "The sizes of the variables of a view, of which it has the most significant digits."
  def sizes({_number, indices}) do
    for index <- indices, {name, divisor, size} <- index, reduce: %{} do
      sizes -> Map.update(sizes, Index.of_variable(name), divisor * size, &max(&1, divisor * size))
    end
  end

  # What is added to a sum that is at least 1 and vanishes in rounding: in that type the sum is what it was.
  defp lost?(terms, %{type: type}, sum, added) do
    with x when is_float(x) <- number(terms, added),
         true <- x > 0 and x < least(type),
         {_number, _indices} = sum <- strip(terms, sum),
         %{op: :sum} <- value(terms, sum),
         {[arg], _bound} <- operands(terms, sum),
         exponential = strip(terms, arg),
         %{op: :exp, args: [arg]} <- value(terms, exponential) do
      terms |> term(argument(terms, exponential, arg)) |> Enum.any?(&less_maximum?(terms, &1))
    else
      _ -> false
    end
  end

  # Half of what separates 1 from the next number.
  defp least({:f, 32}), do: :math.pow(2, -24)
  defp least({:f, 16}), do: :math.pow(2, -11)
  defp least({:bf, 16}), do: :math.pow(2, -8)
  defp least(_type), do: 0

  defp less_maximum?(terms, {[{factor, 1}], -1.0}), do: match?({:max, _, _}, info(terms, factor).structure)
  defp less_maximum?(_terms, _monomial), do: false
end
