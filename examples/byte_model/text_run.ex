defmodule FlashAttention.Examples.ByteModel.TextRun do
  @moduledoc """
  The training of a `FlashAttention.Examples.ByteModel` on a text, from first step to last, with checkpoints.

  A run is determined by its settings and the text. Step `n` draws its batch and its learning rate from the
  settings and `n` alone, so that a run which was saved and resumed goes on as if nothing had happened, to the
  last bit.

      run = FlashAttention.Examples.ByteModel.TextRun.new(text, seqlen: 128, seed: 1)
      run = Enum.reduce(1..100, run, fn _, run -> FlashAttention.Examples.ByteModel.TextRun.step(run) end)
      FlashAttention.Examples.ByteModel.TextRun.write(run, "a.checkpoint")
  """

  alias FlashAttention.{Error, Tensor, Training}
  alias FlashAttention.Examples.ByteModel
  alias FlashAttention.Examples.ByteModel.Checkpoint
  alias FlashAttention.Training.{Optimizer, State}

  @enforce_keys [:settings, :text, :documents, :model, :stages, :state]
  defstruct @enforce_keys ++ [losses: []]

  @type t :: %__MODULE__{
          settings: map,
          text: binary,
          documents: ByteModel.documents() | nil,
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
  `:learning_rate`, `:seed`, and `:device`. With a `:separator` the text is many documents, of which steps pack as many as
  have room (`FlashAttention.Examples.ByteModel.packed/5`). Raises `FlashAttention.Error`.

      iex> run = FlashAttention.Examples.ByteModel.TextRun.new("A text of a few bytes.", seqlen: 8, num_heads: 4)
      iex> {run.state.step, run.losses, run.settings.batch_size}
      {0, [], 4}
  """
  @spec new(text :: binary, keyword) :: t
  def new(text, opts \\ []) do
    {device, opts} = Keyword.pop(opts, :device, :auto)
    {separator, opts} = Keyword.pop(opts, :separator)
    settings = opts |> Keyword.validate!(@defaults) |> Map.new()
    # As a checkpoint holds it.
    if settings.seed not in -(2 ** 63)..(2 ** 63 - 1),
      do: raise(Error.invalid(:seed, "an integer of 64 bits", Error.show(settings.seed)))

    settings = Map.update!(settings, :learning_rate, &(&1 / 1))

    model =
      ByteModel.new([device: device] ++ Keyword.take(Map.to_list(settings), [:num_heads, :head_dim, :seqlen]))

    run = %__MODULE__{
      settings: Map.put(settings, :text, hash(text, separator)),
      text: text,
      documents: if(separator, do: ByteModel.documents(text, separator)),
      model: model,
      stages: ByteModel.stages(model),
      state: Training.init(ByteModel.init(model, settings.seed), Optimizer.adam(beta2: 0.99))
    }

    # Says what is wrong with the text now rather than at the first step.
    batch(run, 0)
    run
  end

  # The same text in other documents is another text.
  defp hash(text, nil), do: :erlang.md5(text)
  defp hash(text, separator), do: :erlang.md5([:erlang.md5(text), separator])

  defp batch(%{settings: settings, documents: nil} = run, step),
    do: ByteModel.batch(run.model, run.text, settings.batch_size, settings.seed, step)

  defp batch(%{settings: settings} = run, step),
    do: ByteModel.packed(run.model, run.documents, settings.batch_size, settings.seed, step)

  @doc "One step. Its loss becomes the first of `losses`."
  @spec step(t) :: t
  def step(%__MODULE__{settings: settings, state: state} = run) do
    step = state.step + 1
    rate = learning_rate(settings.learning_rate, step)
    {state, loss} = Training.train_step(state, batch(run, step), model: run.stages, learning_rate: rate)
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

  @doc "Text that the model writes, as `FlashAttention.Examples.ByteModel.generate/5`."
  @spec sample(t, prompt :: binary, count :: non_neg_integer, keyword) :: binary
  def sample(run, prompt, count, opts \\ []),
    do: ByteModel.generate(run.model, run.state.params, prompt, count, opts)

  @doc "Saves the run."
  @spec write(t, Path.t()) :: :ok | {:error, message :: String.t()}
  def write(run, path), do: Checkpoint.write(path, arrays(run))

  @doc """
  The run as it was saved; `:none` where there is no file. `run` is a new run of the same settings and text, and
  another one's checkpoint is an error.

  Of the file, numbers alone are taken, under the names and in the types and shapes that this run has them in.
  """
  @spec read(t, Path.t()) :: {:ok, t} | :none | {:error, message :: String.t()}
  def read(run, path) do
    with {:ok, arrays} <- Checkpoint.read(path) do
      with :ok <- same_settings(run, arrays), {:ok, restored} <- restore(run, arrays) do
        {:ok, restored}
      else
        {:other, how} -> {:error, "#{path} is of a run #{how}"}
        :error -> {:error, "#{path} does not hold a run of this model"}
      end
    end
  end

  @doc """
  The entropy of single bytes in a text, in nats: the least loss that frequencies alone can give.

      iex> Float.round(FlashAttention.Examples.ByteModel.TextRun.entropy("abababab"), 6) == Float.round(:math.log(2), 6)
      true
  """
  @spec entropy(binary) :: float
  def entropy(text) do
    counts = for <<byte <- text>>, reduce: %{}, do: (counts -> Map.update(counts, byte, 1, &(&1 + 1)))

    for {_byte, count} <- counts,
        reduce: 0.0,
        do: (sum -> sum - count / byte_size(text) * :math.log(count / byte_size(text)))
  end

  # ---- the run as arrays ---------------------------------------------------------------------------------

  defp arrays(%{state: %{params: params, slots: slots, step: step}} = run) do
    losses = for loss <- run.losses, into: <<>>, do: <<loss::float-64-native>>
    settings = for {key, value} <- run.settings, do: {"settings/#{key}", array(value)}
    params = for {path, tensor} <- leaves(params), do: {name("params", path), array(tensor)}

    slots =
      for {path, data} <- leaves(slots) do
        {type, shape, _data} = slot_like(run, path)
        {name("slots", path), {type, shape, data}}
      end

    Map.new([{"step", array(step)}, {"losses", {:f64, {step}, losses}}] ++ settings ++ params ++ slots)
  end

  defp array(%Tensor{type: {:f, bits}, shape: shape, data: data}), do: {:"f#{bits}", shape, data}
  defp array(number) when is_integer(number), do: {:s64, {}, <<number::64-native>>}
  defp array(number) when is_float(number), do: {:f64, {}, <<number::float-64-native>>}
  defp array(bytes) when is_binary(bytes), do: {:u8, {byte_size(bytes)}, bytes}

  # Adam remembers two numbers of every element.
  defp slot_like(run, path) do
    {type, shape, data} = array(get_in(run.state.params, path))
    {type, Tuple.insert_at(shape, tuple_size(shape), 2), data <> data}
  end

  defp leaves(node) when is_struct(node) or is_binary(node), do: [{[], node}]
  defp leaves(node), do: for({key, value} <- node, {path, leaf} <- leaves(value), do: {[key | path], leaf})

  defp name(kind, path), do: Enum.join([kind | path], "/")

  defp same_settings(run, arrays) do
    Enum.find_value(run.settings, :ok, fn {key, value} ->
      saved = arrays["settings/#{key}"]
      if saved != array(value), do: difference(key, saved, value)
    end)
  end

  defp difference(:text, {:u8, {16}, _hash}, _value), do: {:other, "on another text"}

  defp difference(key, {:s64, {}, <<saved::64-signed-native>>}, value),
    do: {:other, "with #{key} #{saved}, not #{value}"}

  defp difference(key, {:f64, {}, <<saved::float-64-native>>}, value),
    do: {:other, "with #{key} #{saved}, not #{value}"}

  defp difference(_key, _no_setting, _value), do: :error

  defp restore(run, arrays) do
    with {:s64, {}, <<step::64-signed-native>>} when step >= 0 <- arrays["step"],
         {:f64, {^step}, data} <- arrays["losses"],
         losses = for(<<loss::float-64-native <- data>>, do: loss),
         # A number that is not finite ends the list.
         true <- length(losses) == step,
         paths = for({path, _tensor} <- leaves(run.state.params), do: path),
         {:ok, params} <- restore_params(run, arrays, paths),
         {:ok, slots} <- restore_slots(arrays, if(step > 0, do: paths, else: []), run) do
      {:ok, %{run | state: %{run.state | step: step, params: params, slots: slots}, losses: losses}}
    else
      _other -> :error
    end
  end

  defp restore_params(run, arrays, paths) do
    restore(arrays, "params", paths, run.state.params, fn path, array ->
      tensor = get_in(run.state.params, path)
      with {:ok, data} <- data_like(array, array(tensor)), do: {:ok, %{tensor | data: data}}
    end)
  end

  defp restore_slots(arrays, paths, run),
    do: restore(arrays, "slots", paths, %{}, fn path, array -> data_like(array, slot_like(run, path)) end)

  defp restore(arrays, kind, paths, into, decode) do
    Enum.reduce_while(paths, {:ok, into}, fn path, {:ok, done} ->
      case decode.(path, arrays[name(kind, path)]) do
        {:ok, leaf} -> {:cont, {:ok, put_in(done, Enum.map(path, &Access.key(&1, %{})), leaf)}}
        :error -> {:halt, :error}
      end
    end)
  end

  defp data_like({type, shape, data}, {type, shape, _data}), do: {:ok, data}
  defp data_like(_array, _like), do: :error
end
