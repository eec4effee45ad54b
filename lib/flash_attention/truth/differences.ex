defmodule FlashAttention.Truth.Differences do
  @moduledoc false

  # One input's gradient against differences of the loss; FlashAttention.Truth says how and why. A problem has
  #
  #     loss      what the loss is where the input is this tensor
  #     size      what one rounding of every output makes of the loss
  #     argument  the input (Truth.Arguments)
  #     gradient  tuple of numbers

  alias FlashAttention.Check.Values
  alias FlashAttention.Truth.Arguments

  # So many times the noise that is measured, or a rounding of every output, is what noise is taken to be.
  @times_noise 4

  def compare(problem, opts) do
    count = tuple_size(problem.gradient)
    looked_at = looked_at(problem.argument, opts[:ignore])
    {directions, random} = directions(looked_at, count, opts[:directions], seed(opts, problem))
    noise = noise(problem, hd(directions ++ [unit(hd(looked_at))]))
    step = opts[:step] || :math.pow(Values.roundoff(problem.argument.type), 1 / 5)

    compared =
      for(
        {direction, n} <- Enum.with_index(directions),
        do: along(problem, direction, {:direction, n}, step, noise)
      ) ++
        for place <- chosen(problem, looked_at, opts[:elements], random),
            do: along(problem, unit(place), Arguments.index(problem.argument, place), step, noise)

    report(problem, compared, opts[:allowed])
  end

  defp seed(opts, problem),
    do: :rand.seed_s(:exsss, :erlang.phash2({opts[:seed], problem.argument.name, :directions}))

  # ---- where to look -----------------------------------------------------------------------------------------

  # Numbers that are not finite cannot be moved.
  defp looked_at(argument, ignore) do
    ignored = Keyword.get(ignore, argument.name, fn _index -> false end)
    count = tuple_size(argument.numbers)

    places =
      for place <- Enum.take(0..count, count),
          is_float(elem(argument.numbers, place)),
          not ignored.(Arguments.index(argument, place)),
          do: place

    if places == [], do: raise(ArgumentError, "#{argument.name}: no element is left to look at")
    places
  end

  # A direction is a list of {place, number}.
  defp unit(place), do: [{place, 1.0}]

  defp directions(_places, _count, 0, random), do: {[], random}

  defp directions(places, count, num_directions, random) do
    Enum.map_reduce(1..num_directions, random, fn _, random ->
      {numbers, random} = Enum.map_reduce(places, random, fn _, random -> :rand.normal_s(random) end)
      # However many numbers move, together they move about as far as one does along a unit.
      length = :math.sqrt(Enum.sum(Enum.map(numbers, &(&1 * &1))) / min(count, 4))
      {Enum.zip_with(places, numbers, &{&1, &2 / length}), random}
    end)
  end

  # The largest element of the gradient is among them.
  defp chosen(_problem, places, :all, _random), do: places
  defp chosen(_problem, _places, 0, _random), do: []

  defp chosen(problem, places, count, random) do
    {keys, _random} = Enum.map_reduce(places, random, fn place, random -> key(place, random) end)
    largest = Enum.max_by(places, &magnitude(elem(problem.gradient, &1)))
    others = keys |> Enum.sort() |> Enum.map(&elem(&1, 1)) |> Enum.reject(&(&1 == largest))
    Enum.sort([largest | Enum.take(others, count - 1)])
  end

  defp key(place, random) do
    {x, random} = :rand.uniform_s(random)
    {{x, place}, random}
  end

  # Atoms come after numbers: what is not finite is the largest.
  defp magnitude(x) when is_float(x), do: abs(x)
  defp magnitude(x), do: x

  # ---- differences -------------------------------------------------------------------------------------------

  defp along(problem, direction, where, step, noise) do
    [near, middle, far] = for times <- [1, 2, 4], do: difference(problem, direction, times * step)
    expected = extrapolate(near.slope, middle.slope)
    got = extrapolate(near.gradient, middle.gradient)

    # Of (4 D(h) - D(2 h)) / 3, with an error of `noise` in each of the four values.
    rounding = 1.5 * noise / step + Values.roundoff(problem.argument.type) * near.gradient_size
    bar = rounding + distance(expected, extrapolate(middle.slope, far.slope))
    %{where: where, got: got, expected: expected, bar: bar, units: units(got, expected, bar)}
  end

  defp extrapolate(near, far) when is_float(near) and is_float(far), do: (4 * near - far) / 3
  defp extrapolate(_near, _far), do: :nan

  defp distance(x, y) when is_float(x) and is_float(y), do: abs(x - y)
  defp distance(_x, _y), do: 0.0

  defp units(got, expected, _bar) when not is_float(got) or not is_float(expected), do: :infinity
  defp units(got, got, _bar), do: 0.0
  defp units(_got, _expected, bar) when bar == 0, do: :infinity
  defp units(got, expected, bar), do: abs(got - expected) / bar

  # What the loss does between the two points, and what the gradient says that it does, each over 2 h.
  defp difference(problem, direction, step) do
    {ahead, x_ahead} = move(problem.argument, direction, step)
    {behind, x_behind} = move(problem.argument, direction, -step)

    terms =
      for {place, _} <- direction,
          do: term(elem(problem.gradient, place), elem(x_ahead, place), elem(x_behind, place))

    if Enum.all?(terms, &is_float/1) do
      %{
        slope: slope(problem.loss.(ahead), problem.loss.(behind), step),
        gradient: Enum.sum(terms) / (2 * step),
        gradient_size: Enum.sum(Enum.map(terms, &abs/1)) / (2 * step)
      }
    else
      %{slope: slope(problem.loss.(ahead), problem.loss.(behind), step), gradient: :nan, gradient_size: 0.0}
    end
  end

  defp term(gradient, ahead, behind) when is_float(gradient), do: gradient * (ahead - behind)
  defp term(_gradient, _ahead, _behind), do: :nan

  defp slope(ahead, behind, step), do: (ahead - behind) / (2 * step)

  # The tensor at x + step * direction, and its numbers as they are after rounding.
  defp move(argument, direction, step) do
    numbers = argument.numbers |> Tuple.to_list() |> Enum.with_index()
    by_place = Map.new(direction)
    moved = for {x, place} <- numbers, do: moved(x, by_place[place], step)
    {tensor, rounded} = Arguments.write(argument, moved)
    {tensor, List.to_tuple(rounded)}
  end

  defp moved(x, nil, _step), do: x
  defp moved(x, along, step), do: x + step * along

  # ---- noise -------------------------------------------------------------------------------------------------

  # The standard deviation of the loss's rounding errors, of third differences at seven points 2^6 roundings apart.
  defp noise(problem, direction) do
    size = direction |> Enum.map(fn {place, _} -> abs(elem(problem.argument.numbers, place)) end) |> Enum.max()
    step = 64 * Values.roundoff(problem.argument.type) * max(size, 1.0)

    losses =
      for i <- -3..3 do
        {tensor, _} = move(problem.argument, direction, i * step)
        problem.loss.(tensor)
      end

    thirds = losses |> differences() |> differences() |> differences()
    # (3!)^2 / 6! undoes what taking differences adds.
    deviation = :math.sqrt(Enum.sum(Enum.map(thirds, &(&1 * &1))) / length(thirds) / 20)
    @times_noise * max(deviation, problem.size)
  end

  defp differences(numbers), do: Enum.zip_with(tl(numbers), numbers, &(&1 - &2))

  # ---- the report --------------------------------------------------------------------------------------------

  defp report(problem, compared, allowed) do
    worst = worst(compared, allowed)
    # Of both: a gradient of zeros where differences show one is no gradient that was seen to be right.
    largest = compared |> Enum.flat_map(&[abs_or_zero(&1.got), abs_or_zero(&1.expected)]) |> Enum.max()
    sharpest = compared |> Enum.map(& &1.bar) |> Enum.min()

    outcome =
      cond do
        worst.units > allowed -> :failed
        largest > 0 and allowed * sharpest > largest -> :unresolved
        true -> :passed
      end

    Map.merge(worst, %{name: problem.argument.name, outcome: outcome, compared: length(compared)})
  end

  # An element says more than a direction does.
  defp worst(compared, allowed) do
    elements = Enum.reject(compared, &match?({:direction, _}, &1.where))
    failed = Enum.filter(elements, &(&1.units > allowed))
    Enum.max_by(if(failed == [], do: compared, else: failed), &magnitude(&1.units))
  end

  defp abs_or_zero(x) when is_float(x), do: abs(x)
  defp abs_or_zero(_x), do: 0.0
end
