# How long FlashAttention.Rewriter takes for training graphs of models of more and more layers, and for one without attention.
# Prints a page of Markdown. Needs Nx.
#
#     mix run bench/rewriter_cost.exs

Code.require_file("test/support/layers.ex")
alias FlashAttention.Test.Layers

row = fn name, function, num_layers ->
  arguments = Layers.arguments(num_layers)
  expression = function |> Nx.Defn.debug_expr() |> apply(arguments)
  found = Enum.count(FlashAttention.Rewriter.explain(function, arguments), & &1.rewritten)
  times = for _ <- 1..5, do: elem(:timer.tc(fn -> FlashAttention.Rewriter.rewrite(expression) end), 0)
  {:reductions, before} = Process.info(self(), :reductions)
  FlashAttention.Rewriter.rewrite(expression)
  {:reductions, later} = Process.info(self(), :reductions)
  calls = Float.round((later - before) / 1.0e6, 2)

  IO.puts(
    "| #{name}, #{num_layers} layers | #{found} | #{Float.round(Enum.min(times) / 1.0e6, 3)} | #{calls} |"
  )
end

IO.puts("# What rewriting costs\n")

versions = "nx #{Application.spec(:nx, :vsn)}, Elixir #{System.version()}"

IO.puts(
  "`make bench-rewriter-cost`: #{versions}. Seconds of FlashAttention.Rewriter.rewrite/1, the least of five, and millions of the\n" <>
    "calls that the VM counts (reductions), which do not depend on the machine.\n"
)

IO.puts("| step | attentions rewritten, with their gradients | s | 10^6 calls |\n|---|---|---|---|")
for num_layers <- [4, 8, 16, 32, 64], do: row.("training", &Layers.step/2, num_layers)
row.("training without attention", &Layers.without_attention/2, 32)
