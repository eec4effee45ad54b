defmodule Dependencies do
  @moduledoc """
  Checks that the arrows between the layers of this project point one way only:

      FlashAttention (lib/) -> c_src/nif, c_src/xla -> public header -> c_src/host | c_src/cpu | cuda/ -> c_src/core

  `make check-deps` runs it. C is checked twice, by what the sources include and by what the objects link to;
  Elixir by the modules that its syntax trees name, so that documentation may name anything.
  """

  # Which layers the files of a layer may include, and their objects link to. "api" is the public header.
  @layers %{
    "api" => ~w(api),
    "core" => ~w(core api),
    "host" => ~w(host core api),
    "cpu" => ~w(cpu core api),
    "cuda" => ~w(cuda core api),
    "nif" => ~w(nif api),
    "xla" => ~w(xla api)
  }

  # The one file that lists the backends.
  @backend_table "core/backends"

  # Headers of others, and the layers that may include them.
  defp foreign_headers do
    [
      {~r/^(erl_|ei\.h)/, ~w(nif)},
      {~r/^(cuda|cublas|cooperative_groups|mma\.h|nv)/, ~w(cuda)},
      {~r/^xla\//, ~w(xla)},
      {~r/^pthread\.h/, ~w(core host cuda)}
    ]
  end

  # Elixir modules, and the files of lib/ that may name them. Of the rewriter these are the compiler and the two ends
  # at Nx's expressions; its graph and its matcher know nothing of Nx.
  defp modules do
    [
      {:Nx,
       ~r{(^|[/_])(nx|defn|exla|axon|bumblebee|packages)(\.ex$|/)|/rewriter(/attention|/expression)?\.ex$}},
      {:EXLA, ~r{/(exla|packages|defn/attention|rewriter)\.ex$|/(exla|packages|defn/attention)/}},
      {:Axon, ~r{/(axon|bumblebee|packages)(\.ex$|/)}},
      {:Bumblebee, ~r{/(bumblebee|packages)(\.ex$|/)}},
      {:Mix, ~r{^mix/}},
      {:Native, ~r{^flash_attention(\.ex$|/(?!training))}},
      {:Training, ~r{^flash_attention/training(\.ex$|/)}},
      {:Examples, ~r{^mix/}},
      {:Check, ~r{^(flash_attention/(check|truth)(\.ex$|/)|mix/)}}
    ]
  end

  @doc "The whole check, as a command: prints what is wrong, and exits with 1 if something is."
  def main([root, build]) do
    root = Path.expand(root)
    library = Path.join(build, "libflash_attention.so")

    case violations(root, build, library) do
      [] ->
        IO.puts(
          "check-deps: #{length(c_files(root))} C and #{length(elixir_files(root))} Elixir files, " <>
            "#{length(objects(build))} objects: dependencies point one way"
        )

      violations ->
        Enum.each(violations, &IO.puts(:stderr, "check-deps: #{&1}"))
        System.halt(1)
    end
  end

  @doc "What is wrong, one line each, in a source tree and in the objects and the library made from it."
  def violations(root, build, library) do
    objects = for object <- objects(build), do: {object, defined(object), undefined(object)}

    include_violations(root) ++
      object_violations(objects) ++
      library_violations(root, objects, library) ++
      module_violations(root)
  end

  # ---- what sources include ------------------------------------------------------------------------

  defp include_violations(root) do
    for file <- c_files(root), {kind, header} <- includes(file), reduce: [] do
      found -> found ++ include_violation(root, file, kind, header)
    end
  end

  defp include_violation(root, file, :ours, header) do
    target = file |> Path.dirname() |> Path.join(header) |> Path.expand()
    from = layer(root, file)

    if layer(root, target) in @layers[from],
      do: [],
      else: ["#{relative(root, file)} includes #{header}: #{from} may not see it"]
  end

  defp include_violation(root, file, :system, header) do
    for {pattern, owners} <- foreign_headers(), header =~ pattern, layer(root, file) not in owners do
      "#{relative(root, file)} includes <#{header}>: only #{Enum.join(owners, " and ")} may"
    end
  end

  defp includes(file) do
    for [_, mark, header] <-
          Regex.scan(~r/^\s*#\s*include\s*(["<])([^">]+)[">]/m, File.read!(file)) do
      {if(mark == "<", do: :system, else: :ours), header}
    end
  end

  defp c_files(root) do
    Path.wildcard(Path.join(root, "c_src/**/*.{c,h}")) ++
      Path.wildcard(Path.join(root, "cuda/**/*.{cu,cuh,c,h}"))
  end

  defp layer(root, file) do
    case root |> relative(file) |> Path.split() do
      ["cuda" | _] -> "cuda"
      ["c_src", "flash_attention.h"] -> "api"
      ["c_src", layer | _] -> layer
      _ -> "outside"
    end
  end

  defp relative(root, file), do: Path.relative_to(file, root)

  # ---- what objects link to ------------------------------------------------------------------------

  # objects: each with the symbols that it defines, and those that it needs.
  defp object_violations(objects) do
    owners = for {object, defined, _} <- objects, symbol <- defined, into: %{}, do: {symbol, object}

    for {object, _, undefined} <- objects,
        object_name(object) != @backend_table,
        symbol <- undefined,
        owner = owners[symbol],
        object_layer(owner) not in @layers[object_layer(object)],
        not through_api?(object, owner) do
      "#{object_name(object)}.o uses #{symbol} of #{object_layer(owner)}"
    end
  end

  # What nif and xla link to is the public header's functions, which core, host and xla define.
  defp through_api?(object, owner),
    do: object_layer(object) in ~w(nif xla) and object_layer(owner) in ~w(core host xla)

  defp library_violations(root, objects, library) do
    declared = declared(root)
    exported = nm(["-D", "--defined-only", library])
    bridges = Enum.filter(objects, fn {object, _, _} -> object_layer(object) in ~w(nif xla) end)
    known = Enum.flat_map(bridges, fn {_, defined, _} -> defined end) ++ declared

    Enum.map(exported -- declared, &"the library exports #{&1}, which the public header lacks") ++
      Enum.map(declared -- exported, &"the public header declares #{&1}, which is not exported") ++
      for symbol <- nm(["-D", "--undefined-only", library]), symbol =~ ~r/^(enif_|cuda[A-Z]|cu[A-Z])/ do
        "the library needs #{symbol} to load"
      end ++
      for {object, _, undefined} <- bridges, "fa_" <> _ = symbol <- undefined, symbol not in known do
        "#{object_name(object)}.o uses #{symbol}, which the public header lacks"
      end
  end

  defp declared(root) do
    header = File.read!(Path.join(root, "c_src/flash_attention.h"))
    for [_, name] <- Regex.scan(~r/^FA_API\s[^;(]*\b(fa_\w+)\(/m, header), do: name
  end

  defp objects(build), do: Path.wildcard(Path.join(build, "{core,host,cpu,cuda,nif,xla}/*.o"))

  defp object_layer(object), do: object |> Path.dirname() |> Path.basename()

  defp object_name(object), do: Path.join(object_layer(object), Path.basename(object, ".o"))

  defp defined(object), do: nm(["-g", "--defined-only", object])

  defp undefined(object), do: nm(["-g", "--undefined-only", object])

  defp nm(arguments) do
    {text, 0} = System.cmd("nm", ["-P" | arguments])
    for line <- String.split(text, "\n", trim: true), do: line |> String.split() |> hd()
  end

  # ---- what Elixir names ---------------------------------------------------------------------------

  defp module_violations(root) do
    for file <- elixir_files(root),
        path = Path.relative_to(file, Path.join(root, "lib")),
        names = names(file),
        {module, allowed} <- modules(),
        not (path =~ allowed),
        module in names do
      "lib/#{path} names #{module}: only files like #{inspect(allowed.source)} may"
    end
  end

  defp elixir_files(root), do: Path.wildcard(Path.join(root, "lib/**/*.ex"))

  # The first name of every alias, after FlashAttention.
  defp names(file) do
    {_, names} =
      file
      |> File.read!()
      |> Code.string_to_quoted!()
      |> Macro.prewalk([], fn
        {:__aliases__, _, [:FlashAttention, name | _]} = ast, names -> {ast, [name | names]}
        {:__aliases__, _, [name | _]} = ast, names -> {ast, [name | names]}
        ast, names -> {ast, names}
      end)

    names
  end
end
