defmodule FlashAttention.Training.TextRun do
  @moduledoc """
  The training of a `FlashAttention.Training.ByteModel` on a text, from first step to last, with checkpoints.

  A run is determined by its settings and the text. Step `n` draws its batch and its learning rate from the
  settings and `n` alone, so that a run which was saved and resumed goes on as if nothing had happened, to the
  last bit.

      run = FlashAttention.Training.TextRun.new(text, seqlen: 128, seed: 1)
      run = Enum.reduce(1..100, run, fn _, run -> FlashAttention.Training.TextRun.step(run) end)
      FlashAttention.Training.TextRun.write(run, "a.checkpoint")
  """

  alias FlashAttention.Training
  alias FlashAttention.Training.{ByteModel, Checkpoint, Optimizer, State}

  @enforce_keys [:settings, :text, :model, :stages, :state]
  defstruct @enforce_keys ++ [losses: []]

  @type t :: %__MODULE__{
          settings: map,
          text: binary,
          model: ByteModel.t(),
          stages: Training.Model.t(),
          state: State.t(),
          losses: [float]
        }

  @defaults [num_heads: 8, head_dim: 64, seqlen: 256, batch_size: 4, learning_rate: 0.15, seed: 0]

  # The learning rate rises for so many steps, and then falls as the square root of the steps over the next.
  @warmup_steps 10
  @decay_steps 200

  @doc """
  A run before its first step. Options: `:num_heads`, `:head_dim` and `:seqlen` of the model, `:batch_size`,
  `:learning_rate`, `:seed`, and `:device`. Raises `FlashAttention.Error`.

      iex> run = FlashAttention.Training.TextRun.new("A text of a few bytes.", seqlen: 8, num_heads: 4)
      iex> {run.state.step, run.losses, run.settings.batch_size}
      {0, [], 4}
  """
  @spec new(text :: binary, keyword) :: t
  def new(text, opts \\ []) do
    {device, opts} = Keyword.pop(opts, :device, :auto)
    settings = @defaults |> Keyword.merge(opts) |> Map.new()

    model =
      ByteModel.new([device: device] ++ Keyword.take(Map.to_list(settings), [:num_heads, :head_dim, :seqlen]))

    # Says what is wrong with the text now rather than at the first step.
    ByteModel.batch(model, text, settings.batch_size, settings.seed, 0)

    %__MODULE__{
      settings: Map.put(settings, :text, :erlang.md5(text)),
      text: text,
      model: model,
      stages: ByteModel.stages(model),
      state: Training.init(ByteModel.init(model, settings.seed), Optimizer.adam(beta2: 0.99))
    }
  end

  @doc "One step. Its loss becomes the first of `losses`."
  @spec step(t) :: t
  def step(%__MODULE__{settings: settings, state: state} = run) do
    step = state.step + 1
    batch = ByteModel.batch(run.model, run.text, settings.batch_size, settings.seed, step)
    rate = learning_rate(settings.learning_rate, step)
    {state, loss} = Training.train_step(state, batch, model: run.stages, learning_rate: rate)
    %{run | state: state, losses: [loss | run.losses]}
  end

  # It does not depend on how many steps there will be: a run can always be made longer.
  defp learning_rate(peak, step), do: peak * min(1, step / @warmup_steps) / :math.sqrt(1 + step / @decay_steps)

  @doc "Bytes that a step trains on."
  @spec tokens_per_step(t) :: pos_integer
  def tokens_per_step(run), do: run.settings.batch_size * run.settings.seqlen

  @doc "The mean loss of the last `count` steps, in nats per byte; `nil` before the first step."
  @spec recent_loss(t, pos_integer) :: float | nil
  def recent_loss(%{losses: []}, _count), do: nil

  def recent_loss(run, count) do
    recent = Enum.take(run.losses, count)
    Enum.sum(recent) / length(recent)
  end

  @doc "Text that the model writes, as `FlashAttention.Training.ByteModel.generate/5`."
  @spec sample(t, prompt :: binary, count :: non_neg_integer, keyword) :: binary
  def sample(run, prompt, count, opts \\ []),
    do: ByteModel.generate(run.model, run.state.params, prompt, count, opts)

  @doc "Saves the run."
  @spec write(t, Path.t()) :: :ok | {:error, message :: String.t()}
  def write(run, path), do: Checkpoint.write(path, Map.take(run, [:settings, :state, :losses]))

  @doc """
  The run as it was saved; `:none` where there is no file. `run` is a new run of the same settings and text, and
  another one's checkpoint is an error.
  """
  @spec read(t, Path.t()) :: {:ok, t} | :none | {:error, message :: String.t()}
  def read(run, path) do
    with {:ok, saved} <- Checkpoint.read(path) do
      case Enum.filter(run.settings, fn {key, value} -> saved.settings[key] != value end) do
        [] -> {:ok, struct!(run, saved)}
        [{:text, _hash} | _] -> {:error, "#{path} is of a run on another text"}
        [{key, value} | _] -> {:error, "#{path} is of a run with #{key} #{saved.settings[key]}, not #{value}"}
      end
    end
  end

  @doc """
  The entropy of single bytes in a text, in nats: the least loss that frequencies alone can give.

      iex> Float.round(FlashAttention.Training.TextRun.entropy("abababab"), 6) == Float.round(:math.log(2), 6)
      true
  """
  @spec entropy(binary) :: float
  def entropy(text) do
    counts = for <<byte <- text>>, reduce: %{}, do: (counts -> Map.update(counts, byte, 1, &(&1 + 1)))

    for {_byte, count} <- counts,
        reduce: 0.0,
        do: (sum -> sum - count / byte_size(text) * :math.log(count / byte_size(text)))
  end
end
