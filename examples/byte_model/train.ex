defmodule FlashAttention.Examples.ByteModel.Train do
  @moduledoc """
  The command `mix flash_attention.train`, which documents the options.
  """

  alias FlashAttention.Examples.ByteModel.{Chart, Checkpoint, Progress, TextRun}

  @switches [
    steps: :integer,
    seqlen: :integer,
    batch: :integer,
    heads: :integer,
    head_dim: :integer,
    learning_rate: :float,
    separator: :string,
    seed: :integer,
    device: :string,
    sample: :integer,
    prompt: :string,
    temperature: :float,
    checkpoint: :string,
    checkpoint_interval: :integer,
    resume: :boolean
  ]

  @defaults [steps: 400, sample: 400, temperature: 0.7, checkpoint_interval: 50]
  @run_settings [
    seqlen: :seqlen,
    batch: :batch_size,
    heads: :num_heads,
    head_dim: :head_dim,
    learning_rate: :learning_rate,
    seed: :seed
  ]

  @root Path.expand("../..", __DIR__)

  def run(args) do
    {opts, files} = Mix.FlashAttention.parse!(args, @switches, 1)
    opts = Keyword.merge(@defaults, opts)
    check!(opts)

    Mix.FlashAttention.run!(fn ->
      {name, text} = text(files)
      new = TextRun.new(text, run_settings(opts))
      introduce(new, name)

      new
      |> resume(opts)
      |> train(opts)
      |> show(opts)
    end)
  end

  defp check!(opts) do
    for {key, least} <- [
          steps: 0,
          batch: 1,
          sample: 0,
          checkpoint_interval: 1,
          learning_rate: 0,
          temperature: 0
        ] do
      if opts[key] && opts[key] < least do
        Mix.raise("--#{String.replace(to_string(key), "_", "-")}: expected at least #{least}, got #{opts[key]}")
      end
    end

    if opts[:checkpoint] == "", do: Mix.raise("--checkpoint: expected the path of a file, got an empty one")
  end

  defp run_settings(opts) do
    settings = for {switch, key} <- @run_settings, opts[switch], do: {key, opts[switch]}
    separator = for text <- List.wrap(opts[:separator]), do: {:separator, unescape(text)}
    [device: Mix.FlashAttention.device!(opts[:device])] ++ separator ++ settings
  end

  # A shell makes it hard to write the end of a line.
  defp unescape(text) do
    Macro.unescape_string(text)
  rescue
    ArgumentError -> Mix.raise("--separator: expected text with escapes as in Elixir's strings, got #{text}")
  end

  defp text([file]), do: {file, File.read!(file)}

  defp text([]) do
    files =
      ["README.md", "c_src/**/*.{h,c}", "{lib,examples}/**/*.ex"]
      |> Enum.flat_map(&Path.wildcard(Path.join(@root, &1)))

    {"FlashAttention's own sources", Enum.map_join(files, "\n", &File.read!/1)}
  end

  defp introduce(run, name) do
    %{num_heads: heads, head_dim: head_dim} = run.settings

    Mix.shell().info("""
    Text:  #{name}, #{byte_size(run.text)} bytes#{documents(run)}
    Model: #{heads} heads of #{head_dim}, #{a_step(run)} a step, on #{device(run.model.device)}
    Loss:  #{decimals(:math.log(256))} nats a byte for guessing, #{decimals(TextRun.entropy(run.text))} for the frequencies of bytes alone
    """)
  end

  defp documents(%{documents: nil}), do: ""
  defp documents(%{documents: documents}), do: " in #{tuple_size(documents)} documents"

  defp a_step(%{documents: nil, settings: settings}),
    do: "#{settings.batch_size} windows of #{settings.seqlen} bytes"

  defp a_step(%{settings: %{seqlen: seqlen}} = run),
    do: "#{TextRun.tokens_per_step(run)} bytes of documents, of each #{seqlen} at most,"

  defp device({kind, index}), do: "#{kind}:#{index}"
  defp device(:auto), do: if(FlashAttention.backend_info().cuda, do: "cpu", else: "cuda")
  defp device(kind), do: "#{kind}"

  defp nats(loss), do: "#{decimals(loss)} nats (#{decimals(loss / :math.log(2))} bits a byte)"

  defp decimals(x), do: :erlang.float_to_binary(x, decimals: 2)

  # ---- checkpoints ---------------------------------------------------------------------------------------

  # Without a word about checkpoints, a run that is finished or is not this one's beginning is left behind.
  defp resume(new, opts) do
    steps = opts[:steps]
    asked = opts[:resume] == true or opts[:checkpoint] != nil

    case opts[:resume] != false && TextRun.read(new, checkpoint(opts)) do
      {:ok, %{state: %{step: step}} = saved} when asked or step < steps ->
        Mix.shell().info("Going on from step #{step}, saved in #{checkpoint(opts)}")
        saved

      {:error, message} when asked ->
        Mix.raise("#{message}; --no-resume starts anew, and overwrites it")

      {:error, message} ->
        Mix.shell().info("Starting anew: #{message}")
        new

      _nothing ->
        new
    end
  end

  defp checkpoint(opts),
    do: opts[:checkpoint] || Path.join(Mix.Project.build_path(), "flash_attention.checkpoint")

  defp save!(run, opts) do
    with {:error, message} <- TextRun.write(run, checkpoint(opts)), do: Mix.raise(message)
  end

  # ---- training ------------------------------------------------------------------------------------------

  defp train(%{state: %{step: step}} = run, opts) do
    if step < opts[:steps] do
      with {:error, message} <- Checkpoint.check(checkpoint(opts)), do: Mix.raise(message)
      progress = Progress.new(step, opts[:steps], TextRun.tokens_per_step(run))
      {run, progress} = Enum.reduce((step + 1)..opts[:steps], {run, progress}, &step(&1, &2, opts))
      Progress.finish(progress)
      run
    else
      run
    end
  end

  defp step(step, {run, progress}, opts) do
    run = TextRun.step(run)
    if rem(step, opts[:checkpoint_interval]) == 0 or step == opts[:steps], do: save!(run, opts)
    {run, Progress.step(progress, step, TextRun.recent_loss(run, 20))}
  end

  # ---- what came of it -----------------------------------------------------------------------------------

  defp show(%{losses: []}, _opts), do: :ok

  defp show(run, opts) do
    style = if Progress.terminal?(), do: :braille, else: :plain
    Mix.shell().info("\nLoss, in nats a byte, over steps")
    Mix.shell().info(Chart.render(Enum.reverse(run.losses), width: min(Progress.columns(), 80), style: style))

    Mix.shell().info("\nLast 20 steps: #{nats(TextRun.recent_loss(run, 20))}")
    Mix.shell().info("Saved in #{Path.relative_to_cwd(checkpoint(opts))}")

    if opts[:sample] > 0 do
      sampling = [temperature: opts[:temperature], seed: run.settings.seed]
      prompt = opts[:prompt] || first_line(run.text)
      sample = TextRun.sample(run, prompt, opts[:sample], sampling)
      Mix.shell().info("\nIt writes:\n\n" <> printable(prompt <> sample))
    end
  end

  defp first_line(text), do: text |> binary_part(0, min(byte_size(text), 64)) |> String.split("\n") |> hd()

  # Bytes need not be characters, and what drives a terminal must not reach it: neither its control characters (Cc), nor
  # those that turn the writing around or break lines where none end (Cf, Zl, Zp).
  defp printable(text) do
    for character <- String.codepoints(text), into: "" do
      if character in ["\n", "\t"] or
           (String.valid?(character) and character =~ ~r/[^\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/u),
         do: character,
         else: "?"
    end
  end
end
