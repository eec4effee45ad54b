defmodule FlashAttention.Test.Document do
  @moduledoc """
  Documents whose Elixir blocks are programs: one that ends in a line `#=> value` must have that value, of which further lines
  begin with `#   `.
  """

  import ExUnit.Assertions

  @doc "The Elixir blocks of a document."
  def blocks(text), do: for([_, block] <- Regex.scan(~r/^```elixir\n(.*?)^```/ms, text), do: block)

  @doc "Runs a block with the variables and aliases of what ran before; returns them with its own."
  def run(block, file, {binding, env} \\ {[], Code.env_for_eval([])}) do
    {value, binding, env} =
      block |> Code.string_to_quoted!(file: file) |> Code.eval_quoted_with_env(binding, env)

    with [_, expected] <- Regex.run(~r/^#=> (.*(?:\n#   .*)*)\n\z/m, block),
         do: assert(inspect(value) == String.replace(expected, "\n#   ", "\n"))

    {binding, env}
  end
end
