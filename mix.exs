defmodule FlashAttention.MixProject do
  use Mix.Project

  @version "0.1.0"

  def project do
    [
      app: :flash_attention,
      version: @version,
      elixir: "~> 1.14",
      # The native library is built after the task that builds it.
      compilers: Mix.compilers() ++ [:flash_attention],
      elixirc_paths: ["lib" | if(Mix.env() == :test, do: ["examples", "test/support"], else: [])],
      deps: deps(),
      name: "FlashAttention",
      description: "Exact attention, forward and backward, as a C library with an Elixir API",
      package: package(),
      docs: [main: "FlashAttention", extras: ["README.md", "CHANGELOG.md" | Path.wildcard("guides/*.md")]]
    ]
  end

  # These are used where they are there, be they dependencies or on ERL_LIBS.
  @optional [:nx, :exla, :axon, :bumblebee, :telemetry]
  def application do
    [
      extra_applications:
        [:logger] ++ if(Mix.env() == :test, do: [:crypto], else: []) ++ Enum.map(@optional, &{&1, :optional}),
      mod: {FlashAttention.Application, []}
    ]
  end

  # A list with Hex packages fails at once where Hex is not installed, and nothing here needs one. Nx 0.7 runs on
  # Elixir 1.14; the newest, and what stands on it, needs 1.17. Only for those who depend on this and have EXLA and
  # Axon do they matter when it is compiled (:prod): working on it should not bring XLA along.
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

  defp package do
    [
      licenses: ["Apache-2.0"],
      links: %{},
      files: ~w(c_src cuda examples guides lib Makefile mix.exs .formatter.exs README.md LICENSE CHANGELOG.md)
    ]
  end
end
