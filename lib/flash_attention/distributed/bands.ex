defmodule FlashAttention.Distributed.Bands do
  @moduledoc false
  # The bands of a mask as a part of its rows and columns sees them.

  alias FlashAttention.Mask.Bands

  @doc """
  The cells of a band in a range of rows and one of columns, as a band; nil where there are none.

  A band's last row stands beside its last column. Where the new last row is another, what is to the left and to the
  right of it moves by as many columns, and where the last column is, by as many the other way.
  """
  def cut({q_begin, q_end, k_begin, k_end, left, right}, {row, row_end}, {column, column_end}) do
    {new_q_end, new_k_end} = {min(q_end, row_end), min(k_end, column_end)}
    {new_q_begin, new_k_begin} = {max(q_begin, row), max(k_begin, column)}
    shift = new_q_end - q_end - (new_k_end - k_end)
    band = {new_q_begin, new_q_end, new_k_begin, new_k_end, plus(left, -shift), plus(right, shift)}
    if new_q_begin < new_q_end and new_k_begin < new_k_end and Bands.area(band) > 0, do: band
  end

  defp plus(:infinity, _columns), do: :infinity
  defp plus(side, columns), do: side + columns

  @doc "The columns that a range of rows sees of a band, in one range: those between its first row's and its last row's."
  def columns({q_begin, q_end, k_begin, k_end, left, right}, {row, row_end}) do
    {first_row, last_row} = {max(q_begin, row), min(q_end, row_end) - 1}
    first = if left == :infinity, do: k_begin, else: max(k_begin, first_row - q_end + k_end - left)
    last = if right == :infinity, do: k_end, else: min(k_end, last_row - q_end + k_end + right + 1)
    if first_row <= last_row and first < last, do: {first, last}
  end

  @doc """
  The bands of rows and columns that lie one behind the other: ranges as `Ranges.placed/2` gives them.

  As few bands as that: what is wholly visible joins what lies beside or below it.
  """
  def local(bands, rows, columns) do
    for {row, row_end, row_at} <- rows,
        band <- bands,
        seen = columns(band, {row, row_end}),
        {column, column_end, column_at} <- columns,
        column < elem(seen, 1) and elem(seen, 0) < column_end,
        cut = cut(band, {row, row_end}, {column, column_end}) do
      {q_begin, q_end, k_begin, k_end, left, right} = cut
      {down, across} = {row_at - row, column_at - column}
      loosened({q_begin + down, q_end + down, k_begin + across, k_end + across, left, right})
    end
    |> Enum.sort()
    |> join(&beside/2)
    |> Enum.sort_by(fn {q_begin, _q_end, k_begin, _k_end, _left, _right} -> {k_begin, q_begin} end)
    |> join(&below/2)
    |> Enum.sort()
  end

  # A side that hides nothing is without bound.
  defp loosened({q_begin, q_end, k_begin, k_end, left, right}) do
    left = if left >= k_end - k_begin - 1, do: :infinity, else: left
    right = if right >= q_end - q_begin - 1, do: :infinity, else: right
    {q_begin, q_end, k_begin, k_end, left, right}
  end

  # Joins neighbours of a list where that gives one band.
  defp join([band, next | others], joined) do
    case joined.(band, next) do
      nil -> [band | join([next | others], joined)]
      both -> join([both | others], joined)
    end
  end

  defp join(bands, _joined), do: bands

  # The first one hides nothing to its right, the second nothing to its left, and neither edge would go on into the other.
  defp beside(
         {q_begin, q_end, first, middle, left, :infinity},
         {q_begin, q_end, middle, last, :infinity, right}
       )
       when left >= -1 and (right == :infinity or q_begin - q_end + last + right >= middle - 1),
       do: {q_begin, q_end, first, last, plus(left, last - middle), right}

  defp beside(_band, _next), do: nil

  # Both hide nothing to their left, and the right edge of the second goes on where that of the first ends.
  defp below(
         {first, middle, k_begin, k_end, :infinity, :infinity},
         {middle, last, k_begin, k_end, :infinity, :infinity}
       ),
       do: {first, last, k_begin, k_end, :infinity, :infinity}

  defp below(
         {first, middle, k_begin, k_middle, :infinity, right},
         {middle, last, k_begin, k_end, :infinity, next_right}
       )
       when right != :infinity and next_right != :infinity and
              k_end - last + next_right == k_middle - middle + right and
              (right <= 0 or k_middle == k_end),
       do: {first, last, k_begin, k_end, :infinity, next_right}

  defp below(_band, _next), do: nil
end
