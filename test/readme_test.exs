defmodule ReadmeTest do
  # Runs the code blocks of README.md. A block that ends in a line "#=> value" must have that value.
  use ExUnit.Case, async: true

  @readme "README.md"
  @external_resource @readme
  @text File.read!(@readme)

  for {[_, block], index} <- Enum.with_index(Regex.scan(~r/^```elixir\n(.*?)^```/ms, @text), 1) do
    if block =~ "Nx.", do: @tag(:nx)

    test "Elixir block #{index}" do
      {value, _binding} = Code.eval_string(unquote(block), [], file: @readme)

      with [_, expected] <- Regex.run(~r/^#=> (.*)\n\z/m, unquote(block)),
           do: assert(inspect(value) == expected)
    end
  end

  test "has the table of options that the schema writes" do
    assert @text =~ FlashAttention.Options.docs()
  end
end
