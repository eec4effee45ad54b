defmodule FlashAttention.Rewriter.Slopes do
  @moduledoc false
  # ALiBi: a bias that is a number of each head times the distance of column and row.

  alias FlashAttention.Rewriter.{Graph, Index, Terms, Visibility}

  @doc """
  `{coefficient, views}`, whose product are slopes `m` that make a bias the same as `- m |i + columns - rows - j|`; nil of
  any other.

  Where a row sees no column beyond its own, `m j` is that, but for what is the same in all of a row, which a softmax does
  not see, unless there are sinks.
  """
  def of(terms, match, {view, factor}) do
    with [row] <- Index.merge(match.axes.rows),
         [column] <- Index.merge(match.axes.columns),
         true <- match.empty_rows != :swallowed,
         {:ok, coefficient, position, views} <- split(terms, view, {row, column}),
         true <- Enum.all?(views, &of_heads?(&1, match)),
         slope when slope != nil <- slope(position, elem(column, 2) - elem(row, 2), match) do
      {factor * coefficient * slope, views}
    else
      _ -> nil
    end
  end

  defp of_heads?({_number, indices}, %{axes: axes} = match) do
    digits = indices |> Enum.concat() |> Index.refine(match.atoms)
    Enum.all?(digits, &(&1 in (axes.batch ++ axes.heads ++ axes.groups)))
  end

  # A product as a constant, a whole number of row and column or its absolute value, and what depends on neither.
  defp split(terms, view, axes) do
    view = Terms.strip(terms, view)

    case Visibility.position(terms, view, axes) do
      nil -> split(Terms.value(terms, view).op, args(terms, view), terms, axes)
      position -> {:ok, 1, {:line, position}, []}
    end
  end

  defp split(:negate, [x], terms, axes), do: times(split(terms, x, axes), -1)

  defp split(:abs, [x], terms, axes) do
    with position when position != nil <- Visibility.position(terms, x, axes),
         do: {:ok, 1, {:distance, position}, []},
         else: (_ -> :error)
  end

  defp split(:multiply, [x, y], terms, {row, column} = axes) do
    changing = [elem(row, 0), elem(column, 0)]

    case {Terms.number(terms, x), Terms.number(terms, y)} do
      {c, nil} when c != nil -> times(split(terms, y, axes), c)
      {nil, c} when c != nil -> times(split(terms, x, axes), c)
      _ -> with :error <- beside(terms, x, y, axes, changing), do: beside(terms, y, x, axes, changing)
    end
  end

  defp split(:divide, [x, y], terms, axes) do
    case Terms.number(terms, y) do
      c when c in [nil, 0.0] -> :error
      c -> times(split(terms, x, axes), 1 / c)
    end
  end

  defp split(_op, _args, _terms, _axes), do: :error

  defp beside(terms, x, factor, axes, changing) do
    factor = Terms.strip(terms, factor)

    with false <- Enum.any?(Terms.variables(factor), &(&1 in changing)),
         {:ok, c, position, views} <- split(terms, x, axes),
         do: {:ok, c, position, [factor | views]},
         else: (_ -> :error)
  end

  defp times({:ok, c, position, views}, factor), do: {:ok, c * factor, position, views}
  defp times(:error, _factor), do: :error

  defp args(terms, view) do
    value = Terms.value(terms, view)

    if value.op in [:negate, :abs, :multiply, :divide],
      do: for(arg <- value.args, do: Terms.argument(terms, view, arg)),
      else: []
  end

  # What a slope of 1 makes of it, or nil: `shift` is columns less rows.
  defp slope({:distance, position}, shift, _match) do
    constant = Map.get(position, :constant, 0)

    case Map.delete(position, :constant) do
      %{i: 1, j: -1} = only when map_size(only) == 2 and constant == shift -> -1
      %{i: -1, j: 1} = only when map_size(only) == 2 and constant == -shift -> -1
      _ -> nil
    end
  end

  defp slope({:line, position}, shift, match) do
    {known, later} = Map.split(position, [:constant, :i, :j])
    j = Map.get(known, :j, 0)
    same? = {Map.get(known, :i, 0), Map.get(known, :constant, 0)} == {-j, -j * shift}
    if later == %{} and j != 0 and causal?(match, shift) and (same? or match.sinks == []), do: j
  end

  defp causal?(%{visibility: %{upper: upper}}, shift) do
    Enum.any?(upper, fn bound ->
      known = Visibility.known(bound)
      known != nil and known <= shift
    end)
  end

  @doc "Whether all of the numbers that slopes are made of are those of 32 bits."
  def in_f32?({coefficient, views}, graph) do
    <<rounded::float-32>> = <<coefficient::float-32>>

    rounded == coefficient and
      Enum.all?(views, fn {number, _} ->
        Graph.fetch!(graph, number).type not in [{:f, 64}, {:s, 64}, {:u, 64}]
      end)
  end
end
