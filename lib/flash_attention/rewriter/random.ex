defmodule FlashAttention.Rewriter.Random do
  @moduledoc false
  # Numbers that programs draw at random: where bits become numbers from 0 to 1, and which bits they are.

  alias FlashAttention.Rewriter.{Graph, Terms}

  # The exponent of 1 with any bits for the fraction, less 1: how bits are made numbers from 0 to 1.
  @one %{
    {:f, 64} => {12, 0x3FF0000000000000},
    {:f, 32} => {9, 0x3F800000},
    {:f, 16} => {6, 0x3C00},
    {:bf, 16} => {9, 0x3F80}
  }

  @doc "`{:ok, bits}` for a view of numbers that are at least 0 and less than 1, each made of bits; else :error."
  def fraction(terms, view) do
    view = Terms.resolve(terms, view)

    case {Terms.value(terms, view), args(terms, view, [:max, :subtract])} do
      {%{op: :max}, [x, y]} ->
        if Terms.term(terms, y) == %{}, do: fraction(terms, x), else: :error

      {%{op: :subtract, type: type}, [x, y]} ->
        if Terms.term(terms, y) == Terms.constant(1), do: below_exponent(terms, x, type), else: :error

      _ ->
        :error
    end
  end

  defp below_exponent(terms, view, type) do
    with {shift, one} <- @one[type],
         [bits] <- args(terms, view, [:bitcast]),
         [x, y] <- args(terms, bits, [:bitwise_or]),
         true <- whole(terms, y) == one,
         [bits, by] <- args(terms, x, [:right_shift]),
         true <- whole(terms, by) == shift and match?({:u, _}, Terms.value(terms, bits).type) do
      {:ok, bits}
    else
      _ -> :error
    end
  end

  @doc """
  `{:ok, drawn}` for a predicate that holds by chance, for each number drawn on its own from what Nx.Random makes of a
  key: `share`, how often it holds; `below`, whether it does for numbers below a bound, or for those above; `view`, the
  numbers that were drawn; `key`, the values of the key's words.
  """
  def chance(terms, view) do
    view = Terms.strip(terms, view)

    case {Terms.value(terms, view).op, args(terms, view, [:less, :less_equal, :greater, :greater_equal])} do
      {op, [x, y]} when op in [:less, :less_equal] -> drawn(terms, x, y)
      {op, [x, y]} when op in [:greater, :greater_equal] -> drawn(terms, y, x)
      {:logical_not, []} -> complement(terms, view)
      _ -> :error
    end
  end

  defp complement(terms, view) do
    [arg] = args(terms, view, [:logical_not])
    with {:ok, drawn} <- chance(terms, arg), do: {:ok, opposite(drawn)}
  end

  @doc "What holds where that does not."
  def opposite(drawn), do: %{drawn | share: 1 - drawn.share, below: not drawn.below}

  # low < high, where one of them is drawn.
  defp drawn(terms, low, high) do
    with {:error, _} <- {draw(terms, low), high},
         {:error, _} <- {draw(terms, high), low} do
      :error
    else
      {{:ok, drawn}, bound} -> with_share(drawn, Terms.number(terms, bound), bound == high)
    end
  end

  defp with_share(drawn, bound, below?) when is_number(bound) and bound > 0 and bound < 1,
    do: {:ok, Map.merge(drawn, %{share: if(below?, do: bound, else: 1 - bound), below: below?})}

  defp with_share(_drawn, _bound, _below?), do: :error

  defp draw(terms, view) do
    view = Terms.strip(terms, view)

    with {:ok, {bits, _indices}} <- fraction(terms, view),
         {:ok, threefry} <- source(terms.graph, bits),
         {:ok, key} <- key(terms.graph, threefry) do
      {:ok, %{view: view, key: key}}
    else
      _ -> :error
    end
  end

  # What the bits are those of, each of them once.
  defp source(graph, number) do
    case Graph.fetch!(graph, number) do
      %{op: op, args: [arg | _]} when op in [:as_type, :reshape, :transpose, :slice, :left_shift] ->
        source(graph, arg)

      %{op: op, args: args} when op in [:concatenate, :bitwise_or] ->
        with true <- Enum.uniq(args) == args,
             [{:ok, _} = one] <- args |> Enum.map(&source(graph, &1)) |> Enum.uniq(),
             do: one,
             else: (_ -> :error)

      %{op: :elem, args: [tuple], opts: index} when index in [1, 2] ->
        if Graph.fetch!(graph, tuple).op == :threefry, do: {:ok, tuple}, else: :error

      _ ->
        :error
    end
  end

  # Threefry begins with {1, {counter + word, counter + word}, {second word, both, first word}, rotations}.
  defp key(graph, threefry) do
    [_one, first_sum, second_sum, second, _both, first | _rotations] = Graph.fetch!(graph, threefry).args

    if counter?(graph, first_sum, first) and counter?(graph, second_sum, second),
      do: {:ok, [first, second]},
      else: :error
  end

  defp counter?(graph, sum, word) do
    with %{op: :add, args: args} <- Graph.fetch!(graph, sum),
         [counter] <- args -- [word] do
      graph |> Graph.reachable([counter]) |> Enum.all?(&(Graph.fetch!(graph, &1).op in counting()))
    else
      _ -> false
    end
  end

  defp counting, do: [:iota, :reshape, :slice, :concatenate, :constant, :tensor]

  defp args(terms, view, ops) do
    view = Terms.resolve(terms, view)
    value = Terms.value(terms, view)
    if value.op in ops, do: for(arg <- value.args, do: Terms.argument(terms, view, arg)), else: []
  end

  defp whole(terms, view) do
    with %{op: :constant, opts: x} <- Terms.value(terms, Terms.resolve(terms, view)), do: x, else: (_ -> nil)
  end
end
