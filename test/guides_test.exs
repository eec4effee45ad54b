defmodule GuidesTest do
  # Every guide is a program, from its first block to its last. Not async: one of them chooses the compiler for all.
  use ExUnit.Case, async: false

  alias FlashAttention.Test.Document

  @compile {:no_warn_undefined, Nx.Defn}
  @moduletag :capture_log

  setup do
    if Code.ensure_loaded?(Nx.Defn) do
      chosen = Nx.Defn.default_options()
      on_exit(fn -> Nx.Defn.global_default_options(chosen) end)
    end

    :ok
  end

  @needs %{
    "training" => :nx,
    "axon_and_exla" => :axon,
    "bumblebee" => :bumblebee,
    "decoding" => :axon,
    "existing_models" => :bumblebee,
    "masks" => :axon
  }

  for file <- Path.wildcard("guides/*.md") do
    @external_resource file
    name = Path.basename(file, ".md")
    {with_exla, blocks} = file |> File.read!() |> Document.blocks() |> Enum.split_with(&(&1 =~ "EXLA"))

    @tag @needs[name]
    test "#{name}: #{length(blocks)} blocks", do: run(unquote(blocks), unquote(file))

    if with_exla != [] do
      @tag :exla_native
      test "#{name}: #{length(with_exla)} blocks on EXLA", do: run(unquote(with_exla ++ blocks), unquote(file))
    end
  end

  defp run(blocks, file), do: Enum.reduce(blocks, {[], Code.env_for_eval([])}, &Document.run(&1, file, &2))
end
