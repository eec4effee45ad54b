defmodule FlashAttention.Rewriter.Graph do
  @moduledoc """
  Programs as graphs of values, each of which is there once: what the rewriter looks for attention in.

  A value is an operation on other values, with a type and a shape. Two that are written alike are the same value, so
  that equality is that of numbers; arguments have lower numbers than what is made of them. Nothing here knows of Nx:
  a graph can be written and read as text, a line a value, in which the last line names the results.

      iex> text = \"\"\"
      ...> x = parameter(0) :: f32(2, 3)
      ...> y = exp(x) :: f32(2, 3)
      ...> z = sum(y, axes: [1]) :: f32(2)
      ...> result(z, y)
      ...> \"\"\"
      iex> graph = FlashAttention.Rewriter.Graph.parse(text)
      iex> FlashAttention.Rewriter.Graph.fetch!(graph, hd(graph.results)).op
      :sum
      iex> graph |> FlashAttention.Rewriter.Graph.to_text() |> FlashAttention.Rewriter.Graph.parse() == graph
      true

  Operations have Nx's names and meanings; elementwise ones broadcast. Those with parameters:

  | operation | parameters |
  |---|---|
  | `parameter`, `opaque` | what tells it from others |
  | `constant` | a number, `:infinity`, `:neg_infinity` or `:nan` |
  | `tensor` | numbers, in the order of memory |
  | `iota` | `axis` |
  | `transpose`, `broadcast`, `sum`, `reduce_max` | `axes`; those of reductions need not remain |
  | `slice` | `starts` (`nil`: known at run time), `lengths`, `strides` |
  | `pad` | `sizes`: of what is put before, behind and between, for each axis; of a tensor and the number that is put there |
  | `concatenate` | `axis` |
  | `dot` | `contract`, `batch`: axes of the one and of the other operand |
  | `elem` | its place in the tuple |
  | `view` | `indices` into its argument, of which `{:axis, n}` stands for the index along its own axis |

  `threefry` is the loop that makes the bits of `Nx.Random`, of what it begins with.
  """

  @enforce_keys [:values, :numbers, :results]
  defstruct [:values, :numbers, :results]

  @type number_of_value :: non_neg_integer
  @type value :: %{
          op: atom,
          args: [number_of_value],
          opts: term,
          type: {atom, pos_integer},
          shape: tuple
        }
  @type t :: %__MODULE__{
          values: %{number_of_value => value},
          numbers: %{value => number_of_value},
          results: [number_of_value]
        }

  @doc "A graph without values."
  @spec new() :: t
  def new, do: %__MODULE__{values: %{}, numbers: %{}, results: []}

  @doc "The number of a value, which is added unless it is there."
  @spec put(t, value) :: {number_of_value, t}
  def put(%__MODULE__{} = graph, %{op: _, args: _, opts: _, type: _, shape: _} = value) do
    case graph.numbers do
      %{^value => number} ->
        {number, graph}

      numbers ->
        number = map_size(numbers)
        values = Map.put(graph.values, number, value)
        {number, %{graph | values: values, numbers: Map.put(numbers, value, number)}}
    end
  end

  @doc "The value of a number."
  @spec fetch!(t, number_of_value) :: value
  def fetch!(%__MODULE__{values: values}, number), do: Map.fetch!(values, number)

  @doc """
  The values that these are made of, themselves included, where those that `stop` names are not looked into.
  """
  @spec reachable(t, [number_of_value], (number_of_value -> [number_of_value] | nil)) :: MapSet.t()
  def reachable(graph, from, stop \\ fn _number -> nil end), do: reach(from, graph, stop, MapSet.new())

  defp reach([], _graph, _stop, seen), do: seen

  defp reach([number | rest], graph, stop, seen) do
    if MapSet.member?(seen, number),
      do: reach(rest, graph, stop, seen),
      else:
        reach(
          (stop.(number) || fetch!(graph, number).args) ++ rest,
          graph,
          stop,
          MapSet.put(seen, number)
        )
  end

  # ---- text ----------------------------------------------------------------------------------------------

  @doc "A graph from text, which is Elixir's syntax."
  @spec parse(String.t()) :: t
  def parse(text) do
    {graph, _names} =
      text
      |> String.split("\n", trim: true)
      |> Enum.map(&Code.string_to_quoted!/1)
      |> Enum.reduce({new(), %{}}, &parse_line/2)

    graph
  end

  defp parse_line({:result, _, names}, {graph, numbers}),
    do: {%{graph | results: for({name, _, _} <- names, do: Map.fetch!(numbers, name))}, numbers}

  # `::` binds more loosely than `=`.
  defp parse_line({:"::", _, [{:=, _, [{name, _, _}, {op, _, args}]}, type]}, state),
    do: parse_value(name, op, args, type, state)

  defp parse_line({:=, _, [{name, _, _}, {:"::", _, [{op, _, args}, type]}]}, state),
    do: parse_value(name, op, args, type, state)

  defp parse_value(name, op, args, type, {graph, numbers}) do
    {args, opts} = Enum.split_while(args || [], &match?({name, _, nil} when is_atom(name), &1))
    {type, shape} = parse_type(type)
    args = for {arg, _, _} <- args, do: Map.fetch!(numbers, arg)
    opts = if opts != [], do: opts |> hd() |> literal()
    {number, graph} = put(graph, %{op: op, args: args, opts: opts, type: type, shape: shape})
    {graph, Map.put(numbers, name, number)}
  end

  defp literal(quoted) do
    {value, _binding} = Code.eval_quoted(quoted)
    if Keyword.keyword?(value), do: Enum.sort(value), else: value
  end

  defp parse_type({_name, _, sizes} = type),
    do: {element(type), if(is_list(sizes), do: List.to_tuple(sizes), else: {})}

  defp element({name, _, _}) do
    [class, bits] = Regex.run(~r/^(\D+)(\d+)$/, Atom.to_string(name), capture: :all_but_first)
    {String.to_atom(class), String.to_integer(bits)}
  end

  @doc "The graph as text."
  @spec to_text(t) :: String.t()
  def to_text(%__MODULE__{} = graph) do
    lines = for number <- 0..(map_size(graph.values) - 1)//1, do: line(number, fetch!(graph, number))
    Enum.join(lines) <> "result(#{Enum.map_join(graph.results, ", ", &name/1)})\n"
  end

  defp line(number, %{type: {class, bits}} = value) do
    args = Enum.map(value.args, &name/1) ++ if(value.opts == nil, do: [], else: [opts(value.opts)])
    shape = if value.shape == {}, do: "", else: "(#{value.shape |> Tuple.to_list() |> Enum.join(", ")})"
    "#{name(number)} = #{value.op}(#{Enum.join(args, ", ")}) :: #{class}#{bits}#{shape}\n"
  end

  defp opts(opts) do
    text = inspect(opts, limit: :infinity, charlists: :as_lists)
    if Keyword.keyword?(opts) and opts != [], do: text |> String.slice(1..-2//1), else: text
  end

  defp name(number), do: "v#{number}"
end
