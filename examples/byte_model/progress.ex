defmodule FlashAttention.Examples.ByteModel.Progress do
  @moduledoc false

  # How far a run has come: one line that is drawn over in a terminal, and now and then a line elsewhere.

  defstruct [:first, :steps, :tokens_per_step, :started, :drawn, :terminal]

  # Milliseconds between two drawings in a terminal, and lines where there is none.
  @redraw 100
  @lines 10

  def new(first, steps, tokens_per_step) do
    %__MODULE__{
      first: first,
      steps: steps,
      tokens_per_step: tokens_per_step,
      started: now(),
      drawn: now(),
      terminal: terminal?()
    }
  end

  # Drawn with characters that a terminal in another encoding than Unicode would not show.
  def terminal?, do: match?({:ok, _}, :io.columns()) and :io.getopts()[:encoding] == :unicode

  def columns do
    case :io.columns() do
      {:ok, columns} -> columns
      _no_terminal -> 80
    end
  end

  def step(%{terminal: true} = progress, step, loss) do
    if now() - progress.drawn >= @redraw or step == progress.steps do
      IO.write(
        "\r" <>
          (progress |> line(step, loss, min(columns(), 80)) |> String.pad_trailing(min(columns(), 80) - 1))
      )

      %{progress | drawn: now()}
    else
      progress
    end
  end

  def step(progress, step, loss) do
    part = &div(&1 * @lines, progress.steps)
    if part.(step) != part.(step - 1), do: IO.puts(figures(progress, step, loss))
    progress
  end

  def finish(%{terminal: true}), do: IO.write("\n")
  def finish(_progress), do: :ok

  defp line(progress, step, loss, width) do
    figures = figures(progress, step, loss)
    room = max(width - String.length(figures) - 4, 0)
    eighths = div(step * room * 8, progress.steps)
    full = String.duplicate("█", div(eighths, 8))
    part = Enum.at(["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"], rem(eighths, 8))
    "▕" <> String.pad_trailing(full <> part, room) <> "▏ " <> figures
  end

  defp figures(progress, step, loss) do
    seconds = max(now() - progress.started, 1) / 1000
    taken = step - progress.first
    speed = round(taken * progress.tokens_per_step / seconds)
    left = round(seconds / taken * (progress.steps - step))

    "step #{step}/#{progress.steps}  loss #{:erlang.float_to_binary(loss, decimals: 3)}  " <>
      "#{speed} tokens/s  #{div(left, 60)}:#{String.pad_leading("#{rem(left, 60)}", 2, "0")} left"
  end

  defp now, do: System.monotonic_time(:millisecond)
end
