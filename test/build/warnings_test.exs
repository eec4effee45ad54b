defmodule WarningsTest do
  # Tests call packages that may not be there. A file that does not name all of their modules compiles without a warning
  # where they are, and with warnings elsewhere, which whoever has them would not notice.
  use ExUnit.Case, async: true

  @optional [:Nx, :EXLA, :Axon, :Polaris, :Bumblebee]

  test "test files name the modules that they call of packages that may not be there" do
    for file <- Path.wildcard("test/**/*_test.exs") ++ Path.wildcard("test/support/*.ex"),
        {:defmodule, _, [_name, [do: body]]} = module <- modules(file),
        calls = called(body, aliases(module)),
        do: assert({file, calls -- named(body, aliases(module))} == {file, []})
  end

  test "test files call no module by unquote, which stands in no list of names" do
    for file <- Path.wildcard("test/**/*_test.exs") ++ Path.wildcard("test/support/*.ex"),
        do: assert({file, unquoted(Code.string_to_quoted!(File.read!(file)))} == {file, []})

    assert unquoted(Code.string_to_quoted!("Nx.add(unquote(m).f(x), y)")) == [:f]
  end

  test "what a file calls, and what it names, is read from it" do
    {:ok, module} =
      Code.string_to_quoted("""
      defmodule X do
        alias Bumblebee.{Audio, Text}
        alias Nx.Defn.Evaluator, as: Plain
        @compile {:no_warn_undefined, [Plain] ++ [Nx]}
        if Code.ensure_loaded?(EXLA), do: def(g, do: EXLA.h())
        def f(x), do: {Text.Bert.g(x), &Plain.h/1, Nx.add(x, 1), Enum.sum([Audio, Plain])}
      end
      """)

    {:defmodule, _, [_name, [do: body]]} = module
    assert called(body, aliases(module)) == [Bumblebee.Text.Bert, Nx, Nx.Defn.Evaluator]
    assert named(body, aliases(module)) == [Nx.Defn.Evaluator, Nx]
  end

  # Those that stand by themselves; others are compiled only where something is there.
  defp modules(file) do
    case Code.string_to_quoted!(File.read!(file)) do
      {:__block__, _, expressions} -> expressions
      expression -> [expression]
    end
    |> Enum.filter(&match?({:defmodule, _, _}, &1))
  end

  # What stands for the first part of a name.
  defp aliases(module) do
    reduce(module, %{}, fn
      {:alias, _, [{{:., _, [{:__aliases__, _, parent}, :{}]}, _, children}]}, acc ->
        for {:__aliases__, _, child} <- children, into: acc, do: {List.last(child), parent ++ child}

      {:alias, _, [{:__aliases__, _, parts}, [as: {:__aliases__, _, [short]}]]}, acc ->
        Map.put(acc, short, parts)

      {:alias, _, [{:__aliases__, _, parts}]}, acc ->
        Map.put(acc, List.last(parts), parts)

      _, acc ->
        acc
    end)
  end

  defp called(body, aliases) do
    body
    |> Macro.prewalk(&if(conditional?(&1), do: nil, else: &1))
    |> reduce([], fn
      {{:., _, [{:__aliases__, _, parts}, name]}, _, _}, acc when name != :{} -> [full(parts, aliases) | acc]
      _, acc -> acc
    end)
    |> Enum.filter(&(hd(&1) in @optional))
    |> Enum.map(&Module.concat/1)
    |> Enum.uniq()
    |> Enum.sort()
  end

  # The functions that are called so.
  defp unquoted(expression) do
    reduce(expression, [], fn
      {{:., _, [{:unquote, _, [_]}, name]}, _, _}, acc when is_atom(name) -> [name | acc]
      _, acc -> acc
    end)
  end

  # What is compiled only where its package is there.
  defp conditional?({:if, _, [{{:., _, [{:__aliases__, _, [:Code]}, :ensure_loaded?]}, _, _} | _]}), do: true
  defp conditional?(_expression), do: false

  defp named(body, aliases) do
    reduce(body, [], fn
      {:@, _, [{:compile, _, [{:no_warn_undefined, modules}]}]}, acc ->
        acc ++ (modules |> reduce([], &alias_parts/2) |> Enum.reverse())

      _, acc ->
        acc
    end)
    |> Enum.map(&Module.concat(full(&1, aliases)))
  end

  defp alias_parts({:__aliases__, _, parts}, acc), do: [parts | acc]
  defp alias_parts(_, acc), do: acc

  defp full([first | rest], aliases), do: Map.get(aliases, first, [first]) ++ rest

  defp reduce(expression, acc, fun) do
    {_, acc} = Macro.prewalk(expression, acc, &{&1, fun.(&1, &2)})
    acc
  end
end
