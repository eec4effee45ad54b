defmodule FlashAttention.Rewriter.Visibility do
  @moduledoc false
  # What a predicate over rows i and columns j lets be seen: bounds on j, on i and on j - i, known now or at run time,
  # and what else there is.
  #
  # Whole numbers are sums c + a i + b j + (numbers known at run time), as %{:constant => c, :i => a, :j => b, view => x}.

  alias FlashAttention.Rewriter.{Graph, Terms}

  defstruct lower: [], upper: [], k_begin: [], k_end: [], q_begin: [], q_end: [], others: []

  @typedoc "A whole number that may not be known yet."
  @type number_later :: %{optional(:constant | Terms.view()) => integer}

  @typedoc """
  `lower <= j - i <= upper`, `k_begin <= j < k_end` and `q_begin <= i < q_end`, for each of the numbers in the lists.
  `others` are predicates that say more: `{view, true}`, or `{view, false}` for one that must not hold.
  """
  @type t :: %__MODULE__{
          lower: [number_later],
          upper: [number_later],
          k_begin: [number_later],
          k_end: [number_later],
          q_begin: [number_later],
          q_end: [number_later],
          others: [{Terms.view(), boolean}]
        }

  @doc "What `{view, holds}` for each of the predicates lets be seen, where `row` and `column` are digits."
  def of(terms, predicates, row, column) do
    conditions =
      Enum.flat_map(predicates, fn {view, holds} -> conditions(terms, view, holds, {row, column}) end)

    Enum.reduce(conditions, %__MODULE__{}, &narrow/2)
  end

  # ---- a predicate as conditions that all hold -----------------------------------------------------------

  # {:at_most_0, whole number}, {:never}, or {:other, view, holds}.
  defp conditions(terms, view, holds, axes) do
    view = Terms.strip(terms, view)
    value = Terms.value(terms, view)
    args = for arg <- value.args, value.op in elementwise(), do: Terms.argument(terms, view, arg)

    conditions = conditions(value.op, value, args, holds, {terms, view, axes})

    if conditions == :unknown or Enum.any?(conditions, &outlandish?/1),
      do: [{:other, view, holds}],
      else: conditions
  end

  # What is no bound on i, on j or on j - i, or is known at run time and the same for all of them.
  defp outlandish?({:at_most_0, number}) do
    {axes, rest} = Map.split(number, [:i, :j])

    case {axes[:i] || 0, axes[:j] || 0} do
      {0, 0} -> known(rest) == nil
      coefficients -> coefficients not in [{1, -1}, {-1, 1}, {0, 1}, {0, -1}, {1, 0}, {-1, 0}]
    end
  end

  defp outlandish?(_condition), do: false

  defp elementwise do
    [:logical_and, :logical_or, :logical_not, :select, :multiply, :subtract, :min, :max] ++
      [:equal, :not_equal, :greater, :less, :greater_equal, :less_equal, :bitwise_and, :bitwise_or]
  end

  defp conditions(:constant, %{opts: x}, _args, holds, _context) when is_number(x),
    do: if(x != 0 == holds, do: [], else: [:never])

  # Of 0 and 1; of other numbers they are something else.
  defp conditions(op, value, [a, b], holds, {terms, view, axes}) when op in [:min, :max, :bitwise_and] do
    if predicate?(terms, a) and predicate?(terms, b),
      do:
        conditions(
          %{min: :logical_and, max: :logical_or, bitwise_and: :logical_and}[op],
          value,
          [a, b],
          holds,
          {terms, view, axes}
        ),
      else: :unknown
  end

  defp conditions(op, _value, [a, b], true, context) when op in [:logical_and, :multiply],
    do: both(a, b, true, context)

  defp conditions(op, _value, [a, b], false, context) when op in [:logical_or, :bitwise_or],
    do: both(a, b, false, context)

  # One of the two is a constant.
  defp conditions(op, _value, [a, b], holds, {terms, _view, axes})
       when op in [:logical_and, :logical_or, :multiply, :bitwise_or] do
    neutral = op in [:logical_and, :multiply]

    case {truth(terms, a), truth(terms, b)} do
      {^neutral, _} -> conditions(terms, b, holds, axes)
      {_, ^neutral} -> conditions(terms, a, holds, axes)
      _ -> :unknown
    end
  end

  defp conditions(:logical_not, _value, [a], holds, {terms, _view, axes}),
    do: conditions(terms, a, not holds, axes)

  # 1 - x.
  defp conditions(:subtract, _value, [one, a], holds, {terms, _view, axes}),
    do:
      if(number(terms, one) == 1 and predicate?(terms, a),
        do: conditions(terms, a, not holds, axes),
        else: :unknown
      )

  defp conditions(:select, _value, [p, x, y], holds, {terms, _view, axes}) do
    case {truth(terms, x), truth(terms, y)} do
      {true, false} -> conditions(terms, p, holds, axes)
      {false, true} -> conditions(terms, p, not holds, axes)
      {nil, false} when holds -> conditions(terms, p, true, axes) ++ conditions(terms, x, true, axes)
      {false, nil} when holds -> conditions(terms, p, false, axes) ++ conditions(terms, y, true, axes)
      {nil, true} when not holds -> conditions(terms, p, true, axes) ++ conditions(terms, x, false, axes)
      {true, nil} when not holds -> conditions(terms, p, false, axes) ++ conditions(terms, y, false, axes)
      _ -> :unknown
    end
  end

  defp conditions(op, _value, [a, b], holds, {terms, _view, axes})
       when op in [:equal, :not_equal, :greater, :less, :greater_equal, :less_equal] do
    [x, y] = for {arg, other} <- [{a, b}, {b, a}], do: whole_in(terms, arg, graph_type(terms, other), axes)

    with :unknown <- compare(if(holds, do: op, else: opposite(op)), x, y),
         do: test(op, a, b, holds, terms, axes)
  end

  defp conditions(:tensor, %{opts: numbers, shape: shape}, [], holds, {_terms, view, axes}),
    do: of_table(numbers, shape, view, holds, axes)

  defp conditions(_op, _value, _args, _holds, _context), do: :unknown

  defp both(a, b, holds, {terms, _view, axes}),
    do: conditions(terms, a, holds, axes) ++ conditions(terms, b, holds, axes)

  defp opposite(op) do
    %{
      equal: :not_equal,
      not_equal: :equal,
      greater: :less_equal,
      less_equal: :greater,
      less: :greater_equal,
      greater_equal: :less
    }[op]
  end

  # Of whole numbers.
  defp compare(_op, nil, _b), do: :unknown
  defp compare(_op, _a, nil), do: :unknown
  defp compare(:less_equal, a, b), do: [{:at_most_0, minus(a, b)}]
  defp compare(:less, a, b), do: [{:at_most_0, a |> minus(b) |> plus(%{constant: 1})}]
  defp compare(:greater_equal, a, b), do: compare(:less_equal, b, a)
  defp compare(:greater, a, b), do: compare(:less, b, a)
  defp compare(:equal, a, b), do: compare(:less_equal, a, b) ++ compare(:less_equal, b, a)
  defp compare(:not_equal, _a, _b), do: :unknown

  # Whether a predicate is 1, or is not 0.
  defp test(op, a, b, holds, terms, axes) do
    case {op, predicate?(terms, a) && number(terms, b), predicate?(terms, b) && number(terms, a)} do
      {:equal, x, _} when x == 1 -> conditions(terms, a, holds, axes)
      {:equal, _, y} when y == 1 -> conditions(terms, b, holds, axes)
      {:equal, x, _} when x == 0 -> conditions(terms, a, not holds, axes)
      {:equal, _, y} when y == 0 -> conditions(terms, b, not holds, axes)
      {:not_equal, x, _} when x == 0 -> conditions(terms, a, holds, axes)
      {:not_equal, _, y} when y == 0 -> conditions(terms, b, holds, axes)
      {:not_equal, x, _} when x == 1 -> conditions(terms, a, not holds, axes)
      {:greater, x, _} when is_number(x) and x >= 0 and x < 1 -> conditions(terms, a, holds, axes)
      {:greater_equal, x, _} when is_number(x) and x > 0 and x <= 1 -> conditions(terms, a, holds, axes)
      {:less, _, y} when is_number(y) and y >= 0 and y < 1 -> conditions(terms, b, holds, axes)
      {:less, x, _} when is_number(x) and x > 0 and x <= 1 -> conditions(terms, a, not holds, axes)
      _ -> :unknown
    end
  end

  @doc "Whether a value is 0 or 1 everywhere."
  def predicate?(terms, view) do
    view = Terms.strip(terms, view)
    value = Terms.value(terms, view)

    args =
      for arg <- value.args,
          value.op in [:select, :multiply, :subtract, :min, :max],
          do: Terms.argument(terms, view, arg)

    case {value.op, args} do
      {op, _} when op in [:equal, :not_equal, :greater, :less, :greater_equal, :less_equal] -> true
      {op, _} when op in [:logical_and, :logical_or, :logical_not, :logical_xor] -> true
      {:constant, _} -> value.opts in [0, 1, 0.0, 1.0]
      {:tensor, _} -> Enum.all?(value.opts, &(&1 in [0, 1, 0.0, 1.0]))
      {:select, [_p, x, y]} -> predicate?(terms, x) and predicate?(terms, y)
      {op, [x, y]} when op in [:multiply, :min, :max] -> predicate?(terms, x) and predicate?(terms, y)
      {:subtract, [x, y]} -> number(terms, x) == 1 and predicate?(terms, y)
      _ -> false
    end
  end

  @doc "The number that a view is everywhere; nil where it is no constant."
  def number(terms, view) do
    case Terms.value(terms, Terms.strip(terms, view)) do
      %{op: :constant, opts: x} when is_number(x) -> x
      _ -> nil
    end
  end

  defp truth(terms, view) do
    case number(terms, view) do
      nil -> nil
      x -> x != 0
    end
  end

  # ---- whole numbers -------------------------------------------------------------------------------------

  defp whole(terms, view, axes) do
    view = Terms.resolve(terms, view)
    value = Terms.value(terms, view)

    args =
      for arg <- value.args,
          value.op in [:add, :subtract, :multiply, :negate, :as_type],
          do: Terms.argument(terms, view, arg)

    with true <- exact?(value),
         %{} = number <- whole(value.op, value, args, {terms, view, axes}),
         true <- holds?(value.type, number, axes),
         do: number,
         else: (_ -> nil)
  end

  # What is computed with in another type, or beside one: whole numbers become floating-point ones there.
  defp whole_in(terms, view, {class, _bits} = type, axes) do
    with %{} = number <- whole(terms, view, axes),
         true <- class in [:s, :u] or holds?(type, number, axes),
         do: number,
         else: (_ -> nil)
  end

  # Differences of unsigned numbers go round below 0, numbers of few bits at their end.
  defp exact?(%{op: :constant}), do: true
  defp exact?(%{op: op, type: {:u, _}}) when op in [:subtract, :negate], do: false

  defp exact?(%{op: op, type: {class, bits}, shape: shape}) when class in [:s, :u] and bits < 32,
    do: op not in [:add, :subtract, :multiply, :negate] and Enum.max([0 | Tuple.to_list(shape)]) < 128

  defp exact?(_value), do: true

  # Up to where every whole number is one of the type.
  @whole_numbers %{{:f, 64} => 2 ** 53, {:f, 32} => 2 ** 24, {:f, 16} => 2 ** 11, {:bf, 16} => 2 ** 8}

  # Whether a type holds the number in all rows and columns. What is known at run time only is taken for a number that
  # leaves the sum in an integer, in f32 and in f64: offsets and lengths are places in a sequence, below 2^24 in every loop
  # that generates. Places beyond 2^8 and 2^11, of which types of 16 bits skip some, are usual ones.
  defp holds?({class, bits} = type, number, axes) do
    {lowest, highest} = range(number, axes)

    case class do
      :s ->
        lowest >= -(2 ** (bits - 1)) and highest < 2 ** (bits - 1)

      :u ->
        lowest >= 0 and highest < 2 ** bits

      _ ->
        most = Map.get(@whole_numbers, type, 0)
        lowest >= -most and highest <= most and (bits >= 32 or Enum.all?(Map.keys(number), &is_atom/1))
    end
  end

  # The least and the most that a number is, but for what is known at run time.
  defp range(number, {{_, _, rows}, {_, _, columns}}) do
    ends = for {key, size} <- [i: rows, j: columns], do: Enum.min_max([0, (number[key] || 0) * (size - 1)])
    {lowest, highest} = Enum.unzip(ends)
    constant = number[:constant] || 0
    {constant + Enum.sum(lowest), constant + Enum.sum(highest)}
  end

  # What is made narrower may go round.
  defp whole(:as_type, %{type: {to, bits} = type}, [arg], {terms, _view, axes}) do
    {from, from_bits} = graph_type(terms, arg)

    # Below 0 there is nothing without a sign: it goes round there, too.
    wider? = bits > from_bits and {from, to} != {:s, :u}

    if from in [:s, :u] and (to in [:f, :bf] or wider? or type == {from, from_bits}),
      do: whole(terms, arg, axes)
  end

  defp whole(:constant, %{opts: x}, _args, _context) when is_number(x),
    do: if(trunc(x) == x, do: %{constant: trunc(x)})

  defp whole(:iota, %{opts: [axis: axis]}, _args, {_terms, {_number, indices}, {row, column}})
       when is_integer(axis) do
    case Enum.at(indices, axis) do
      [] -> %{}
      [^row] -> %{i: 1}
      [^column] -> %{j: 1}
      _ -> nil
    end
  end

  defp whole(:add, %{type: type}, [a, b], {terms, _view, axes}) do
    with %{} = a <- whole_in(terms, a, type, axes), %{} = b <- whole_in(terms, b, type, axes), do: plus(a, b)
  end

  defp whole(:subtract, %{type: type}, [a, b], {terms, _view, axes}) do
    with %{} = a <- whole_in(terms, a, type, axes), %{} = b <- whole_in(terms, b, type, axes), do: minus(a, b)
  end

  defp whole(:negate, _value, [a], {terms, _view, axes}),
    do: with(%{} = a <- whole(terms, a, axes), do: minus(%{}, a))

  defp whole(:multiply, %{type: type}, [a, b], {terms, _view, axes}) do
    with %{} = a <- whole_in(terms, a, type, axes), %{} = b <- whole_in(terms, b, type, axes) do
      case {known(a), known(b)} do
        {x, _} when is_integer(x) -> times(b, x)
        {_, x} when is_integer(x) -> times(a, x)
        _ -> nil
      end
    end
  end

  # A whole number that is known at run time, the same in every row and column.
  defp whole(_op, %{type: {class, _}}, _args, {_terms, view, {row, column}}) when class in [:s, :u] do
    names = [elem(row, 0), elem(column, 0)]
    if Enum.any?(Terms.variables(view), &(&1 in names)), do: nil, else: %{view => 1}
  end

  defp whole(_op, _value, _args, _context), do: nil

  @doc "A whole number of `row` and `column`, which are digits, as a sum; nil of what is no such number."
  def position(terms, view, {row, column}), do: whole(terms, view, {row, column})

  @doc "The whole number, where it is known."
  def known(number) when map_size(number) == 0, do: 0
  def known(%{constant: x} = number) when map_size(number) == 1, do: x
  def known(_number), do: nil

  defp plus(a, b), do: Map.merge(a, b, fn _, x, y -> x + y end) |> Map.reject(fn {_, x} -> x == 0 end)
  defp times(a, x), do: a |> Map.new(fn {key, y} -> {key, x * y} end) |> Map.reject(fn {_, y} -> y == 0 end)
  defp minus(a, b), do: plus(a, times(b, -1))

  # ---- conditions to bounds ------------------------------------------------------------------------------

  defp narrow({:other, view, holds}, visibility),
    do: %{visibility | others: Enum.uniq([{view, holds} | visibility.others])}

  # No column is before the first one.
  defp narrow(:never, visibility), do: %{visibility | k_end: [%{} | visibility.k_end]}

  defp narrow({:at_most_0, number}, visibility) do
    {axes, rest} = Map.split(number, [:i, :j])
    below = times(rest, -1)
    beyond = plus(below, %{constant: 1})

    case {axes[:i] || 0, axes[:j] || 0} do
      {1, -1} -> %{visibility | lower: [rest | visibility.lower]}
      {-1, 1} -> %{visibility | upper: [below | visibility.upper]}
      {0, 1} -> %{visibility | k_end: [beyond | visibility.k_end]}
      {0, -1} -> %{visibility | k_begin: [rest | visibility.k_begin]}
      {1, 0} -> %{visibility | q_end: [beyond | visibility.q_end]}
      {-1, 0} -> %{visibility | q_begin: [rest | visibility.q_begin]}
      {0, 0} -> if known(rest) <= 0, do: visibility, else: narrow(:never, visibility)
    end
  end

  # ---- tables --------------------------------------------------------------------------------------------

  # A constant that is a band of the matrix over rows and columns, or a run of columns.
  defp of_table(numbers, shape, {_number, indices}, holds, {row, column}) do
    axes = Enum.zip(indices, strides(shape))

    if Enum.all?(axes, fn {index, _} -> index in [[], [row], [column]] end) do
      stride = fn digit -> for({[^digit], stride} <- axes, do: stride) |> Enum.sum() end
      numbers = List.to_tuple(numbers)
      size = &if stride.(&1) == 0, do: 1, else: elem(&1, 2)

      visible =
        for i <- 0..(size.(row) - 1),
            j <- 0..(size.(column) - 1),
            elem(numbers, i * stride.(row) + j * stride.(column)) != 0 == holds,
            do: {i, j}

      cond do
        stride.(row) == 0 -> run(visible, size.(column))
        stride.(column) == 0 -> :unknown
        true -> band(visible, size.(row), size.(column))
      end
    else
      :unknown
    end
  end

  defp strides(shape) do
    sizes = Tuple.to_list(shape)
    for n <- 1..length(sizes)//1, do: sizes |> Enum.drop(n) |> Enum.product()
  end

  defp run([], _columns), do: [:never]

  defp run(visible, columns) do
    {{_, first}, {_, last}} = {hd(visible), List.last(visible)}

    if length(visible) == last - first + 1,
      do:
        if(first > 0, do: [{:at_most_0, %{constant: first, j: -1}}], else: []) ++
          if(last < columns - 1, do: [{:at_most_0, %{constant: -last, j: 1}}], else: []),
      else: :unknown
  end

  defp band([], _rows, _columns), do: [:never]

  defp band(visible, rows, columns) do
    {lower, upper} = for({i, j} <- visible, do: j - i) |> Enum.min_max()
    inside = for i <- 0..(rows - 1), do: max(0, min(columns - 1, i + upper) - max(0, i + lower) + 1)

    if Enum.sum(inside) == length(visible),
      do: [
        {:at_most_0, plus(%{constant: lower, i: 1, j: -1}, %{})},
        {:at_most_0, plus(%{constant: -upper, i: -1, j: 1}, %{})}
      ],
      else: :unknown
  end

  # ---- what can be told without running ------------------------------------------------------------------

  @doc "Whether it is known that every one of so many rows sees one of so many columns."
  def every_row_sees?(%__MODULE__{others: []} = visibility, rows, columns) do
    [lower, upper, first, last, q_begin, q_end] =
      for {name, pick, otherwise} <- [
            {:lower, &Enum.max/1, -rows},
            {:upper, &Enum.min/1, columns},
            {:k_begin, &Enum.max/1, 0},
            {:k_end, &Enum.min/1, columns},
            {:q_begin, &Enum.max/1, 0},
            {:q_end, &Enum.min/1, rows}
          ] do
        numbers = visibility |> Map.fetch!(name) |> Enum.map(&known/1)
        if nil in numbers, do: nil, else: pick.([otherwise | numbers])
      end

    # How many are seen is concave in the row, so that the first and the last one tell.
    nil not in [lower, upper, first, last, q_begin, q_end] and q_begin <= 0 and q_end >= rows and
      Enum.all?([0, rows - 1], fn i ->
        max(max(first, 0), i + lower) <= min(min(last, columns) - 1, i + upper)
      end)
  end

  def every_row_sees?(_visibility, _rows, _columns), do: false

  @doc "Whether it hides nothing."
  def all?(%__MODULE__{} = visibility), do: visibility == %__MODULE__{}

  @doc "The views of the numbers that are known at run time."
  def views(%__MODULE__{} = visibility) do
    for name <- [:lower, :upper, :k_begin, :k_end, :q_begin, :q_end],
        number <- Map.fetch!(visibility, name),
        {{_, _} = view, _} <- number,
        uniq: true,
        do: view
  end

  defp graph_type(terms, {number, _}), do: Graph.fetch!(terms.graph, number).type
end
