# Not a file of lib/: it runs before those are compiled.
defmodule Mix.Tasks.Compile.OptionalPackages do
  @moduledoc false
  use Mix.Task.Compiler

  # Without Hex this project lists no dependencies, and Mix shows it none of those that the project has which depends
  # on this one. They are in the same build. With others than the last time everything is compiled anew.
  @impl true
  def run(_args) do
    libraries = Path.join(Mix.Project.build_path(), "lib")

    with {:ok, names} <- File.ls(libraries),
         do: for(name <- names, do: Code.append_path(Path.join([libraries, name, "ebin"])))

    manifest = Path.join(Mix.Project.manifest_path(), "compile.optional_packages")
    found = inspect(for name <- FlashAttention.MixProject.optional(), do: {name, version(name)})
    if File.read(manifest) == {:ok, found}, do: {:noop, []}, else: compile_anew(manifest, found)
  end

  defp compile_anew(manifest, found) do
    Mix.Tasks.Compile.Elixir.clean()
    Enum.each(Mix.Tasks.Compile.Elixir.manifests(), &File.rm/1)
    File.mkdir_p!(Path.dirname(manifest))
    File.write!(manifest, found)
    {:ok, []}
  end

  defp version(name) do
    with file when is_list(file) <- :code.where_is_file(to_charlist("#{name}.app")),
         {:ok, [{:application, ^name, properties}]} <- :file.consult(file),
         do: "#{properties[:vsn]}",
         else: (_ -> nil)
  end
end

defmodule FlashAttention.MixProject do
  use Mix.Project

  @version "0.1.0"

  def project do
    [
      app: :flash_attention,
      version: @version,
      elixir: "~> 1.14",
      # The native library is built after the task that builds it.
      compilers: [:optional_packages] ++ Mix.compilers() ++ [:flash_attention],
      elixirc_paths: ["lib" | if(Mix.env() == :test, do: ["examples", "test/support"], else: [])],
      deps: deps(),
      name: "FlashAttention",
      description: "Exact attention, forward and backward, as a C library with an Elixir API",
      package: package(),
      docs: [
        main: "FlashAttention",
        extras: ["README.md", "CHANGELOG.md", "CONTRIBUTING.md" | Path.wildcard("guides/*.md")]
      ]
    ]
  end

  # These are used where they are there, be they dependencies or on ERL_LIBS.
  @optional [:nx, :exla, :axon, :bumblebee, :telemetry]
  def optional, do: @optional

  def application do
    [
      extra_applications:
        [:logger] ++ if(Mix.env() == :test, do: [:crypto], else: []) ++ Enum.map(@optional, &{&1, :optional}),
      mod: {FlashAttention.Application, []}
    ]
  end

  # A list with Hex packages fails at once where Hex is not installed, and nothing here needs one. Nx 0.7 runs on
  # Elixir 1.14; the newest, and what stands on it, needs 1.17. Only for those who depend on this and have EXLA and
  # Axon do they matter when it is compiled (:prod): `mix deps.get` fetches them, but who works on this need not
  # compile them, nor XLA for them.
  defp deps do
    cond do
      not Code.ensure_loaded?(Hex) -> []
      Version.match?(System.version(), ">= 1.17.0") -> [{:nx, ">= 0.7.0", optional: true} | on_nx()] ++ tools()
      true -> [{:nx, "~> 0.7.0", optional: true}] ++ tools()
    end
  end

  defp on_nx,
    do: [{:axon, ">= 0.7.0", optional: true, only: :prod}, {:exla, ">= 0.7.0", optional: true, only: :prod}]

  defp tools, do: [{:telemetry, "~> 1.0", optional: true}, {:ex_doc, "~> 0.30", only: :dev, runtime: false}]

  # With what README, the guides and `make help` speak of, tests and benchmarks too.
  defp package do
    [
      licenses: ["Apache-2.0"],
      links: %{},
      files:
        ~w(bench c_src cuda examples guides lib src test Makefile mix.exs .formatter.exs .clang-format .ci) ++
          ~w(README.md LICENSE CHANGELOG.md CONTRIBUTING.md)
    ]
  end
end
