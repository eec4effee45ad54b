if Code.ensure_loaded?(Nx) do
  defmodule FlashAttention.Examples.Policy do
    @moduledoc """
    An example of a model made of Nx functions: a policy that attends to the states so far.

        states ──► embedding ──► q, k, v ──► attention ──► o ──► policy head ──► cross entropy with actions

    A batch is `%{states: states, actions: actions}`: states of shape `{batch, seqlen, state_size}`, and the number
    of the action taken in each, of shape `{batch, seqlen}`.

        alias FlashAttention.Training
        alias FlashAttention.Examples.Policy

        params = Policy.init(Nx.Random.key(0), state_size: 10, num_actions: 5)
        state = Training.init(params, Training.Optimizer.adam(learning_rate: 0.01))
        {state, loss} = Training.train_step(state, batch, model: Policy.model())
    """

    import Nx.Defn

    alias FlashAttention.Training.Params

    @doc "The model; options are those of `FlashAttention.forward/4`."
    @spec model(keyword) :: FlashAttention.Training.Model.t()
    def model(attention \\ []), do: FlashAttention.Training.Nx.model(&embed/2, &loss/3, attention)

    @doc """
    Parameters before training. Options: `:state_size` and `:num_actions`, required, `:hidden_size` (default 32),
    `:num_heads` (4), `:head_dim` (16) and `:type` (`{:f, 32}`).
    """
    @spec init(Nx.Tensor.t(), keyword) :: Params.t()
    def init(key, opts) do
      defaults = [:state_size, :num_actions, hidden_size: 32, num_heads: 4, head_dim: 16, type: {:f, 32}]
      opts = Map.new(Keyword.validate!(opts, defaults))
      %{state_size: states, num_actions: actions, hidden_size: hidden, num_heads: heads, head_dim: dim} = opts

      shapes = [
        {states, hidden},
        {hidden, heads, dim},
        {hidden, heads, dim},
        {hidden, heads, dim},
        {heads, dim, actions}
      ]

      {[kernel, query, key_kernel, value, policy], _key} =
        Enum.map_reduce(shapes, key, fn shape, key ->
          # Deviation 1 / sqrt(number of inputs): outputs are about as large as inputs.
          inputs = if tuple_size(shape) == 3 and elem(shape, 0) == heads, do: heads * dim, else: elem(shape, 0)
          Nx.Random.normal(key, 0.0, 1 / :math.sqrt(inputs), shape: shape, type: opts.type)
        end)

      %{
        embedding: %{
          kernel: kernel,
          bias: Nx.broadcast(Nx.tensor(0, type: opts.type), {hidden}),
          query: query,
          key: key_kernel,
          value: value
        },
        policy: %{kernel: policy, bias: Nx.broadcast(Nx.tensor(0, type: opts.type), {actions})}
      }
    end

    @doc "States to `{q, k, v}`, each of shape `{batch, seqlen, num_heads, head_dim}`."
    defn embed(params, batch) do
      %{kernel: kernel, bias: bias, query: query, key: key, value: value} = params.embedding
      hidden = Nx.tanh(Nx.dot(batch.states, kernel) + bias)
      {Nx.dot(hidden, [2], query, [0]), Nx.dot(hidden, [2], key, [0]), Nx.dot(hidden, [2], value, [0])}
    end

    @doc "Attention's output to logits of shape `{batch, seqlen, num_actions}`."
    defn(logits(params, o), do: Nx.dot(o, [2, 3], params.policy.kernel, [0, 1]) + params.policy.bias)

    @doc "The mean cross entropy of the actions, in nats."
    defn loss(params, o, batch) do
      logits = logits(params, o)
      largest = stop_grad(Nx.reduce_max(logits, axes: [2], keep_axes: true))
      normaliser = Nx.log(Nx.sum(Nx.exp(logits - largest), axes: [2], keep_axes: true)) + largest
      # A product with one-hot rows, as Nx 0.12 and 0.13 refuse a batch that is closed over in take_along_axis.
      taken = Nx.new_axis(batch.actions, 2) == Nx.iota({1, 1, Nx.axis_size(logits, 2)}, axis: 2)
      Nx.mean(normaliser - Nx.sum(logits * taken, axes: [2], keep_axes: true))
    end
  end
end
