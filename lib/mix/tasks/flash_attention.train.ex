defmodule Mix.Tasks.FlashAttention.Train do
  @shortdoc "Trains a small language model through attention's forward and backward"

  @moduledoc """
  Trains a byte-level language model through attention's forward and backward, and shows what it learned.

      mix flash_attention.train [FILE] [options]

  FILE is any text; by default it is FlashAttention's own sources and documentation. The model and all that trains it
  are an example, `examples/byte_model`, and no part of the library: this task compiles and runs it.

  ## Options

    * `--steps` - default 400
    * `--seqlen` - bytes in a window of text, default 256
    * `--batch` - windows in a step, default 4
    * `--separator` - what stands between the documents of a text, such as `"\\n\\n"`. A step packs as many as have room in
      `--batch` windows, one behind the other, each of which sees itself alone; of a longer one than `--seqlen`, a piece
    * `--heads` and `--head-dim` - default 8 and 64; their product is a multiple of 256
    * `--learning-rate` - default 0.15
    * `--seed` - of everything random, default 0
    * `--device` - `auto` (default), `cpu`, `cuda` or `cuda:1`
    * `--sample` - bytes to write when finished, default 400; 0 for none
    * `--prompt` - what the sample goes on from, default the text's first line
    * `--temperature` - of the sample, default 0.7; 0 always takes the likeliest byte
    * `--checkpoint` - where to save the run, default a file in Mix's build folder
    * `--checkpoint-interval` - steps from one saving to the next, default 50; it is also saved when finished
    * `--resume`, `--no-resume` - whether to go on from the checkpoint. By default, a run that `--checkpoint` names
      goes on, and so does one in Mix's build folder if it is unfinished and of the same settings and text

  An interrupted run loses at most what came after its last checkpoint. Resumed, with the same settings and
  text, it gives what it would have given, bit for bit; `--steps` may be larger.
  """

  use Mix.Task

  @program FlashAttention.Examples.ByteModel.Train
  @sources Path.expand("../../../examples/byte_model/*.ex", __DIR__)

  @impl true
  def run(args) do
    Mix.Task.run("app.start")
    if !Code.ensure_loaded?(@program), do: load()
    apply(@program, :run, [args])
  end

  defp load do
    # The example takes random names from it, and Mix may hide what a project does not name.
    if function_exported?(Mix, :ensure_application!, 1), do: apply(Mix, :ensure_application!, [:crypto])
    {:ok, _modules, _warnings} = @sources |> Path.wildcard() |> Kernel.ParallelCompiler.require()
  end
end
