defmodule Mix.Tasks.FlashAttention.Check do
  @shortdoc "Proves attention and its gradients on this machine"

  @moduledoc """
  Proves attention and its gradients on this machine, and prints a table.

      mix flash_attention.check [--device DEVICE] [--seed N]

  For every type and a set of awkward cases, all outputs are held against the naive float64 implementation, and
  the gradients against central differences and against the derivative of the forward algorithm itself.
  `FlashAttention.Check` says how. The cases have causal masks, windows, scales, softcap, grouped heads and sinks, alone
  and together; what else there is (masks as data, biases, ALiBi, dropout, pages) is left to the library's own tests.

  ## Options

    * `--device` - `auto` (default), `cpu`, `cuda` or `cuda:1`
    * `--seed` - of the random numbers, default 0

  The exit status is 0 where everything passed.
  """

  use Mix.Task

  alias FlashAttention.Check
  alias FlashAttention.Check.Values

  @switches [device: :string, seed: :integer]
  @titles [
    forward: "forward, against float64",
    backward: "backward, against float64",
    differences: "backward, against differences",
    tangent: "backward, against d(forward)"
  ]
  @widths [30, 7, 6, 7, 29]

  @impl true
  def run(args) do
    Mix.Task.run("app.start")
    {opts, []} = Mix.FlashAttention.parse!(args, @switches, 0)
    device = Mix.FlashAttention.device!(opts[:device])
    results = Mix.FlashAttention.run!(fn -> Check.run(device: device, seed: opts[:seed] || 0) end)

    Mix.shell().info(table(results))
    for result <- results, result.outcome == :failed, do: Mix.shell().error(failure(result))

    if !Check.passed?(results), do: exit({:shutdown, 1})
  end

  @doc false
  def table(results) do
    head = line(["check", "type", "cases", "worst", "where"])

    rows =
      for {check, title} <- @titles, type <- results |> Enum.map(& &1.type) |> Enum.uniq() do
        row(title, type, for(result <- results, result.check == check, result.type == type, do: result))
      end

    explanation = "\nworst: the largest error, as a part of what is allowed; beyond 1.00 it is a failure"
    Enum.join([head | Enum.reject(rows, &is_nil/1)] ++ [explanation, summary(results)], "\n")
  end

  defp row(_title, _type, []), do: nil

  defp row(title, type, results) do
    cases = results |> Enum.uniq_by(& &1.case) |> length() |> Integer.to_string()

    case Enum.reject(results, &(&1.outcome == :unsupported)) do
      [] ->
        line([title, name(type), cases, "-", "not supported by #{device(hd(results))}"])

      compared ->
        worst = Enum.max_by(compared, &share/1)
        line([title, name(type), cases, two_digits(share(worst)), "#{worst.tensor}, #{worst.case}"])
    end
  end

  defp line(cells),
    do: Enum.zip_with(cells, @widths, &String.pad_trailing/2) |> Enum.join() |> String.trim_trailing()

  # Atoms come after numbers: an error of :infinity is the worst.
  defp share(result), do: Values.share({result.error, result.allowed})

  defp two_digits(:infinity), do: "inf"
  defp two_digits(share) when share < 1.0e4, do: :erlang.float_to_binary(share, decimals: 2)
  defp two_digits(share), do: :erlang.float_to_binary(share, [{:scientific, 0}])

  defp summary(results) do
    counts = Enum.frequencies_by(results, & &1.outcome)
    devices = results |> Enum.map(&device/1) |> Enum.uniq() |> Enum.join(" and ")

    "#{counts[:passed] || 0} passed, #{counts[:failed] || 0} failed, #{counts[:unsupported] || 0} not supported, on #{devices}"
  end

  defp failure(result) do
    "FAILED: #{result.check} #{name(result.type)}, #{result.tensor} of #{result.case}: " <>
      "error #{short(result.error)}, allowed #{short(result.allowed)}"
  end

  defp short(:infinity), do: "infinity"
  defp short(number), do: :erlang.float_to_binary(number, [{:scientific, 2}])

  defp name({class, bits}), do: "#{class}#{bits}"

  defp device(%{device: {kind, 0}}), do: "#{kind}"
  defp device(%{device: {kind, index}}), do: "#{kind}:#{index}"
end
