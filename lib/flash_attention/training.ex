defmodule FlashAttention.Training do
  @moduledoc """
  Training through attention, with gradients chained by hand.

  Automatic differentiation does not see into a native call. It need not: a training step is three stages,
  each of which can say what its own gradient is.

      params, batch ──► embed ──► q, k, v ──► attention ──► o ──► head ──► loss
      gradients     ◄── embed ◄── dq, dk, dv ◄── attention ◄── dout ◄── head ◄── 1

  A stage returns its output and a *pullback*: a function from the gradient of the loss by that output to the
  gradients of the loss by what went in. `FlashAttention.Training.Model` says what the stages look like. They
  can come from anywhere: `FlashAttention.Training.Nx` makes them of Nx functions by automatic differentiation,
  and `examples/byte_model` is a language model in plain Elixir.

      model = %FlashAttention.Training.Model{embed: embed, head: head, attention: [window: {255, 0}]}

      # Plain gradient descent has no state: parameters in, parameters out.
      {params, loss} = FlashAttention.Training.train_step(params, batch, model: model, learning_rate: 0.1)

      # Momentum and Adam remember: a state goes in and comes out.
      state = FlashAttention.Training.init(params, FlashAttention.Training.Optimizer.adam())
      {state, loss} = FlashAttention.Training.train_step(state, batch, model: model)
      state.params

  Parameters are nested maps whose leaves implement `FlashAttention.Training.Parameter`:
  `FlashAttention.Tensor`, and `Nx.Tensor` where Nx is there.
  """

  alias FlashAttention.Error
  alias FlashAttention.Training.{Model, Optimizer, Params, State}

  @doc """
  The state of a training run before its first step.

      iex> alias FlashAttention.Training.Optimizer
      iex> state = FlashAttention.Training.init(%{}, Optimizer.adam(learning_rate: 0.1))
      iex> {state.step, state.optimizer.learning_rate}
      {0, 0.1}
  """
  @spec init(Params.t(), Optimizer.t()) :: State.t()
  def init(params, optimizer), do: %State{params: params, optimizer: optimizer}

  @doc """
  One step: the loss of the batch, and parameters moved against its gradients.

  Takes parameters and returns `{parameters, loss}`, or takes a `FlashAttention.Training.State` and returns
  `{state, loss}`. The loss is as the head gave it, before the step. Attention's errors are raised, as
  `FlashAttention.Error`.

  ## Options

    * `:model` - the `FlashAttention.Training.Model`, required
    * `:learning_rate` - default: the state optimizer's, and `1.0e-4` for plain parameters, which are moved by
      gradient descent without momentum
  """
  @spec train_step(Params.t(), term, keyword) :: {Params.t(), loss :: term}
  @spec train_step(State.t(), term, keyword) :: {State.t(), loss :: term}
  def train_step(params_or_state, batch, opts)

  def train_step(%State{} = state, batch, opts) do
    opts = Keyword.validate!(opts, [:model, :learning_rate])
    {loss, gradients} = value_and_gradients(opts[:model], state.params, batch)
    step = state.step + 1
    optimizer = struct!(state.optimizer, Keyword.take(opts, [:learning_rate]))
    {params, slots} = Optimizer.update(optimizer, step, state.params, gradients, state.slots)
    {%{state | params: params, slots: slots, step: step}, loss}
  end

  def train_step(params, batch, opts) do
    {state, loss} = params |> init(Optimizer.sgd(learning_rate: 1.0e-4)) |> train_step(batch, opts)
    {state.params, loss}
  end

  @doc """
  The loss of a batch and its gradients, which are nested as the parameters are.

  What both the embedding and the head use gets the sum of their gradients; what neither uses gets none.
  """
  @spec value_and_gradients(Model.t(), Params.t(), term) :: {loss :: term, gradients :: Params.t()}
  def value_and_gradients(%Model{} = model, params, batch) do
    {inputs, embed_pullback} = model.embed.(params, batch) |> stage!(:embed)
    {o, states} = forward(inputs, model.attention)

    try do
      {loss, head_pullback} = model.head.(params, o, batch) |> stage!(:head)
      check_loss!(loss)
      {head_gradients, dout} = head_pullback.(1.0)
      embed_gradients = dout |> FlashAttention.backward!(states) |> embed_pullback.()
      {loss, Params.add(embed_gradients, head_gradients)}
    after
      # Not when the collector gets to it: the next step wants the memory.
      FlashAttention.release(states)
    end
  end

  def value_and_gradients(model, _params, _batch),
    do: raise(Error.invalid(:model, "a FlashAttention.Training.Model", Error.show(model)))

  defp stage!({_output, pullback} = stage, _name) when is_function(pullback, 1), do: stage

  defp stage!(other, name),
    do:
      raise(Error.invalid(name, "to return {output, pullback}, a function of one argument", Error.show(other)))

  # Whatever kind of tensor it is, it has a shape.
  defp check_loss!(loss) when is_number(loss), do: :ok
  defp check_loss!(%{shape: {}}), do: :ok

  defp check_loss!(%{shape: shape}),
    do: raise(Error.invalid(:loss, "a number or a scalar", "a tensor of shape #{Error.show(shape)}"))

  defp check_loss!(loss), do: raise(Error.invalid(:loss, "a number or a scalar", Error.show(loss)))

  @doc """
  Attention as a stage: `{q, k, v}` or `{q, k, v, optional}`, a map as `%{sink: sink}`, to `{o, pullback}`.

  The pullback takes `dout` and returns what goes with the inputs: `{dq, dk, dv}`, or `{dq, dk, dv, gradients}` where
  `sink`, `bias` or `alibi_slopes` have gradients, as `%{sink: dsink}`; as often as it is called. The options are those
  of `FlashAttention.forward/4`, of which `:device` names one device here.

      iex> one = FlashAttention.Tensor.new(<<1.0::float-32-native>>, :f32, {1, 1, 1, 1})
      iex> {o, pullback} = FlashAttention.Training.attention({one, one, one})
      iex> {_dq, _dk, dv} = pullback.(one)
      iex> {o == one, dv == one}
      {true, true}
  """
  @spec attention(Model.attention_inputs(), keyword) :: {tensor, (tensor -> Model.attention_inputs())}
        when tensor: FlashAttention.tensor()
  def attention(inputs, opts \\ []) do
    {o, states} = forward(inputs, opts)
    {o, &FlashAttention.backward!(&1, states)}
  end

  # What the backward needs stays on the device: of a step, dout alone is uploaded again.
  defp forward({q, k, v}, opts),
    do: FlashAttention.forward_with_states!(q, k, v, Keyword.put(opts, :keep, :device))

  defp forward({q, k, v, optional}, opts) when is_map(optional) and not is_struct(optional),
    do: forward({q, k, v}, Map.to_list(optional) ++ opts)

  defp forward(other, _opts),
    do:
      raise(
        Error.invalid(:embed, "attention's inputs {q, k, v} or {q, k, v, %{sink: sink}}", Error.show(other))
      )
end
