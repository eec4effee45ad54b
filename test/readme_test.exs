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

  test "links, and those of the other documents, lead to files of the package" do
    packaged = Mix.Project.config()[:package][:files]
    pages = Enum.flat_map(~w(*.md guides/*.md bench/results/*.md), &Path.wildcard/1)

    links =
      for page <- pages,
          [link] <- Regex.scan(~r/\]\(([^)#]+)(?:#[^)]*)?\)/, File.read!(page), capture: :all_but_first),
          not String.contains?(link, "://"),
          do: {page, page |> Path.dirname() |> Path.join(link) |> Path.expand() |> Path.relative_to_cwd()}

    assert length(links) > 50
    assert for({page, path} <- links, not File.exists?(path), do: {page, path}) == []
    assert for({page, path} <- links, hd(Path.split(path)) not in packaged, do: {page, path}) == []
  end

  test "has the table of options that the schema writes" do
    assert @text =~ FlashAttention.Options.docs()
  end
end
