defmodule FlashAttention.Distributed.Ranges do
  @moduledoc false
  # Lists of ranges {begin, end} of positions: ascending, none empty, none touching the next.

  @type t :: [{non_neg_integer, non_neg_integer}]

  @doc "Ranges in any order, which may overlap, as such a list."
  def union(ranges) do
    ranges
    |> Enum.filter(fn {first, last} -> first < last end)
    |> Enum.sort()
    |> Enum.reduce([], fn
      {first, last}, [{begin, until} | others] when first <= until -> [{begin, max(until, last)} | others]
      range, others -> [range | others]
    end)
    |> Enum.reverse()
  end

  @doc "What both of two such lists have."
  def intersect([{a, b} | as] = one, [{c, d} | cs] = two) do
    rest = if b < d, do: intersect(as, two), else: intersect(one, cs)
    if max(a, c) < min(b, d), do: [{max(a, c), min(b, d)} | rest], else: rest
  end

  def intersect(_one, _two), do: []

  def count(ranges), do: Enum.reduce(ranges, 0, fn {first, last}, sum -> sum + last - first end)

  @doc "Each range with where it begins if they lie one behind the other: `{begin, end, offset}`."
  def placed(ranges, at \\ 0) do
    {placed, _end} = Enum.map_reduce(ranges, at, fn {a, b}, at -> {{a, b, at}, at + b - a} end)
    placed
  end

  @doc "Where parts of those ranges lie if these lie one behind the other."
  def local(parts, ranges) do
    placed = placed(ranges)

    for {a, b} <- parts do
      {begin, _end, at} = Enum.find(placed, fn {begin, until, _at} -> begin <= a and b <= until end)
      {a - begin + at, b - begin + at}
    end
  end
end
