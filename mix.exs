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
      elixirc_paths: if(Mix.env() == :test, do: ["lib", "test/support"], else: ["lib"]),
      deps: deps(),
      name: "FlashAttention",
      description: "Exact attention, forward and backward, as a C library with an Elixir API",
      package: package(),
      docs: [main: "FlashAttention", extras: ["README.md", "CHANGELOG.md"]]
    ]
  end

  # These are used where they are there, be they dependencies or on ERL_LIBS.
  @optional [:nx, :exla, :axon, :bumblebee]
  def application, do: [extra_applications: [:logger] ++ Enum.map(@optional, &{&1, :optional})]

  # A list with Hex packages fails at once where Hex is not installed, and nothing here needs one.
  defp deps do
    if Code.ensure_loaded?(Hex) do
      [
        # The newest Nx needs Elixir 1.17, 0.7 runs on 1.14.
        {:nx, if(Version.match?(System.version(), ">= 1.17.0"), do: ">= 0.7.0", else: "~> 0.7.0"),
         optional: true},
        {:ex_doc, "~> 0.30", only: :dev, runtime: false}
      ]
    else
      []
    end
  end

  defp package do
    [
      licenses: ["Apache-2.0"],
      links: %{},
      files: ~w(c_src cuda lib Makefile mix.exs .formatter.exs README.md LICENSE CHANGELOG.md)
    ]
  end
end
