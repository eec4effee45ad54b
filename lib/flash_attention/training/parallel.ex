defmodule FlashAttention.Training.Parallel do
  @moduledoc false

  # Results in the order of the list, each element's in a process of its own; a list of one stays in this one.
  def flat_map([one], fun), do: fun.(one)

  def flat_map(list, fun) do
    list
    |> Task.async_stream(fun, timeout: :infinity)
    |> Enum.flat_map(fn {:ok, results} -> results end)
  end
end
