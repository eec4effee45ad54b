defmodule FlashAttention.Examples.ByteModel.Chart do
  @moduledoc """
  A curve drawn with characters.
  """

  import Bitwise

  # Bits of a braille character's dots, which lie two wide and four high.
  @braille 0x2800
  @dots {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}}

  @doc """
  The numbers, first to last, as a curve over its axes: `width` columns wide and `height` + 2 rows high.

  Where there are more numbers than columns, each column shows the mean of its share. Options: `:width` (default
  80), `:height` (12), and `:style` (`:braille`, with a grid of 2 by 4 dots in each character, or `:plain`).

      iex> chart = FlashAttention.Examples.ByteModel.Chart.render([4.0, 2.0, 1.0, 1.0], width: 15, height: 3, style: :plain)
      iex> String.split(chart, "\\n")
      [
        " 4.00 |**",
        "      |  **",
        " 1.00 |    ****",
        "      +--------",
        "       1      4"
      ]
  """
  @spec render([number, ...], keyword) :: String.t()
  def render(numbers, opts \\ []) do
    opts = Keyword.validate!(opts, width: 80, height: 12, style: :braille)
    {style, height, columns} = {opts[:style], opts[:height], opts[:width] - 7}
    {dots_wide, dots_high} = if style == :braille, do: {2, 4}, else: {1, 1}
    places = resample(numbers, columns * dots_wide)
    {low, high} = Enum.min_max(places)

    cells =
      for {x, y} <- dots(places, low, high, height * dots_high), reduce: %{} do
        cells ->
          dot = @dots |> elem(rem(y, dots_high)) |> elem(rem(x, dots_wide))
          Map.update(cells, {div(x, dots_wide), div(y, dots_high)}, dot, &(&1 ||| dot))
      end

    curve =
      for row <- 0..(height - 1) do
        line = for column <- 0..(columns - 1), do: character(style, cells[{column, row}])
        String.trim_trailing(margin(row, height, low, high) <> axis(style, :side) <> Enum.join(line))
      end

    floor = "      " <> axis(style, :corner) <> String.duplicate(axis(style, :floor), columns)
    last = String.pad_leading("#{length(numbers)}", columns - 1)
    Enum.join(curve ++ [floor, "       1" <> last], "\n")
  end

  # As many numbers as there are places: means where there are more, repeated where there are fewer.
  defp resample(numbers, places) do
    numbers = List.to_tuple(numbers)
    count = tuple_size(numbers)

    for place <- 0..(places - 1) do
      first = div(place * count, places)
      last = max(first, div((place + 1) * count, places) - 1)
      Enum.sum(for i <- first..last, do: elem(numbers, i)) / (last - first + 1)
    end
  end

  # {x, y} of the curve's dots, y from the top; a step from one place to the next is filled.
  defp dots(places, low, high, rows) do
    heights =
      for number <- places,
          do: if(high > low, do: round((high - number) / (high - low) * (rows - 1)), else: rows - 1)

    for {{from, to}, x} <- [hd(heights) | heights] |> Enum.zip(heights) |> Enum.with_index(),
        y <- step(from, to),
        do: {x, y}
  end

  defp step(from, to) when from < to, do: (from + 1)..to
  defp step(from, to) when from > to, do: (from - 1)..to//-1
  defp step(to, to), do: [to]

  defp margin(row, height, low, high) do
    label =
      if row in [0, height - 1],
        do: :erlang.float_to_binary(if(row == 0, do: high, else: low), decimals: 2),
        else: ""

    String.pad_leading(label, 5) <> " "
  end

  defp character(_style, nil), do: " "
  defp character(:plain, _dot), do: "*"
  defp character(:braille, dots), do: <<@braille + dots::utf8>>

  defp axis(:plain, part), do: %{side: "|", corner: "+", floor: "-"}[part]
  defp axis(:braille, part), do: %{side: "│", corner: "└", floor: "─"}[part]
end
