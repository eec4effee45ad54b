if Code.ensure_loaded?(Nx) and FlashAttention.Defn.supported?() do
  defmodule FlashAttention.Test.Forwards do
    @moduledoc "The forwards in a program, and what they are told."

    alias Nx.Defn.{Composite, Tree}

    @doc "The options of each of the library's forwards that the expressions are made of, once."
    def options(expressions), do: expressions |> Composite.reduce({MapSet.new(), []}, &collect/2) |> elem(1)

    defp collect(%{data: %{id: id, op: op, args: args}} = node, {seen, found}) do
      if id in seen do
        {seen, found}
      else
        own =
          case {op, args} do
            {:block, [%FlashAttention.Defn.Forward{opts: opts} | _]} -> [opts]
            _ -> []
          end

        {_, acc} = Tree.apply_args(node, :all, {MapSet.put(seen, id), own ++ found}, &{&1, collect(&1, &2)})
        acc
      end
    end
  end
end
