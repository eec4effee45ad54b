defmodule FlashAttention.Training.Params do
  @moduledoc """
  Nested maps of parameters, and of their gradients.

  A map is a node; everything else, structs included, is a leaf.
  """

  alias FlashAttention.Training.Parameter

  @type t :: %{optional(term) => t | Parameter.t()}

  defguardp is_node(term) when is_map(term) and not is_struct(term)

  @doc """
  The sum of two maps. A leaf that is in only one of them is taken as it is.

      iex> one = FlashAttention.Tensor.new(<<1.0::float-32-native>>, :f32, {1})
      iex> sum = FlashAttention.Training.Params.add(%{a: one, b: %{c: one}}, %{b: %{c: one}})
      iex> {sum.a.data, sum.b.c.data}
      {<<1.0::float-32-native>>, <<2.0::float-32-native>>}
  """
  @spec add(t, t) :: t
  def add(left, right) when is_node(left) and is_node(right),
    do: Map.merge(left, right, fn _key, left, right -> add(left, right) end)

  def add(left, right), do: Parameter.add(left, right)

  @doc """
  Calls `update` with every parameter that has a gradient, its gradient and its slot (`nil` the first time);
  returns the parameters and slots that come back as `{parameter, slot}`. Others stay as they are.

      iex> FlashAttention.Training.Params.update(%{a: 1, b: %{c: 2}}, %{b: %{c: 10}}, %{}, fn p, g, nil ->
      ...>   {p + g, :seen}
      ...> end)
      {%{a: 1, b: %{c: 12}}, %{b: %{c: :seen}}}
  """
  @spec update(t, t, slots :: map, (leaf, leaf, slot | nil -> {leaf, slot})) :: {t, slots :: map}
        when leaf: term, slot: term
  def update(params, gradients, slots, update) do
    Enum.reduce(gradients, {params, slots}, fn {key, gradient}, {params, slots} ->
      {param, slot} = update_at(Map.fetch!(params, key), gradient, slots[key], update)
      {Map.put(params, key, param), Map.put(slots, key, slot)}
    end)
  end

  defp update_at(params, gradients, slots, update) when is_node(gradients),
    do: update(params, gradients, slots || %{}, update)

  defp update_at(param, gradient, slot, update), do: update.(param, gradient, slot)
end
