defmodule ReadmeTest do
  # Runs the code blocks of README.md, each for itself.
  use ExUnit.Case, async: true

  alias FlashAttention.Test.Document

  @readme "README.md"
  @external_resource @readme
  @text File.read!(@readme)

  for {block, index} <- Enum.with_index(Document.blocks(@text), 1) do
    if block =~ "Nx.", do: @tag(:nx)
    if block =~ "FlashAttention.attention", do: @tag(:defn)
    test("Elixir block #{index}", do: Document.run(unquote(block), @readme))
  end

  test "has the table of options that the schema writes" do
    assert @text =~ FlashAttention.Options.docs()
  end
end
