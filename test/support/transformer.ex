if Code.ensure_loaded?(Axon) and FlashAttention.Defn.supported?() do
  defmodule FlashAttention.Test.Transformer do
    @moduledoc "A small causal transformer over bytes, with one attention or another, and what it learns from."

    alias FlashAttention.Test.NxAttention

    @vocabulary 8
    @size 12
    @head_dim 3

    @doc "Tokens {batch, seqlen} to logits {batch, seqlen, #{@vocabulary}}. attention: :flash or :plain."
    def model(attention, opts \\ []) do
      embedded = Axon.input("tokens") |> Axon.embedding(@vocabulary, @size, name: "tokens")

      0..1
      |> Enum.reduce(embedded, fn index, x -> block(x, "block_#{index}", attention, opts) end)
      |> Axon.layer_norm(name: "norm")
      |> Axon.dense(@vocabulary, name: "logits")
    end

    defp block(x, name, attention, opts) do
      attended = x |> Axon.layer_norm(name: name <> ".norm") |> attend(name <> ".attention", attention, opts)
      x = Axon.add(x, attended)

      x
      |> Axon.layer_norm(name: name <> ".mlp_norm")
      |> Axon.dense(2 * @size, activation: :gelu, name: name <> ".wide")
      |> Axon.dense(@size, name: name <> ".narrow")
      |> Axon.add(x)
    end

    defp attend(x, name, :flash, opts),
      do:
        FlashAttention.Axon.multi_head_attention(
          x,
          [num_heads: 4, num_kv_heads: 2, head_dim: @head_dim, name: name] ++ opts
        )

    # The same layers by the same names, around attention as one writes it in Nx.
    defp attend(x, name, :plain, opts) do
      [q, k, v] =
        for {layer, heads} <- [{"query", 4}, {"key", 2}, {"value", 2}] do
          x
          |> Axon.dense(heads * @head_dim, name: "#{name}.#{layer}")
          |> Axon.nx(&Nx.reshape(&1, {Nx.axis_size(&1, 0), Nx.axis_size(&1, 1), heads, @head_dim}))
        end

      {sinks, opts} = Keyword.pop(opts, :num_sinks)

      plain =
        &Nx.reshape(NxAttention.attention(&1, &2, &3, &4), {Nx.axis_size(&1, 0), Nx.axis_size(&1, 1), @size})

      attended =
        if sinks do
          sink = Axon.param("sink", fn _, _, _ -> {sinks, 4} end, initializer: :zeros)

          Axon.layer(fn q, k, v, sink, _ -> plain.(q, k, v, [sink: sink] ++ opts) end, [q, k, v, sink],
            name: name <> ".attention"
          )
        else
          Axon.layer(fn q, k, v, _ -> plain.(q, k, v, opts) end, [q, k, v], name: name <> ".attention")
        end

      Axon.dense(attended, @size, name: name <> ".output")
    end

    @doc "Batches of rows in which every token is the sum of the first one and the one before, to be continued."
    def batches(count) do
      for index <- 1..count do
        rows =
          for row <- 1..4 do
            first = rem(7 * index + 3 * row, @vocabulary)
            Enum.scan(0..9, first, fn step, last -> rem(first + last + step, @vocabulary) end)
          end

        tokens = Nx.tensor(rows)
        {tokens[[.., 0..-2//1]], tokens[[.., 1..-1//1]]}
      end
    end

    def loss(expected, logits) do
      Axon.Losses.categorical_cross_entropy(
        Nx.equal(Nx.new_axis(expected, -1), Nx.iota({1, 1, @vocabulary})),
        Axon.Activations.softmax(logits),
        reduction: :mean
      )
    end

    @doc "The losses of training for one pass over the batches, each the mean of all so far."
    def losses(model, batches) do
      # Seeded, so that every model of these layers begins with the same parameters.
      {init, _predict} = Axon.build(model, compiler: Nx.Defn.Evaluator, seed: 7)
      {tokens, _} = hd(batches)
      state = init.(tokens, Axon.ModelState.empty())

      model
      |> Axon.Loop.trainer(
        &loss/2,
        Polaris.Optimizers.adam(learning_rate: 0.01),
        log: 0
      )
      |> Axon.Loop.handle_event(:iteration_completed, fn loop ->
        losses = [Nx.to_number(loop.step_state.loss) | loop.handler_metadata[:losses] || []]
        {:continue, %{loop | handler_metadata: Map.put(loop.handler_metadata, :losses, losses)}}
      end)
      |> Map.put(:output_transform, & &1)
      |> Axon.Loop.run(batches, state, epochs: 1, compiler: Nx.Defn.Evaluator)
      |> then(&Enum.reverse(&1.handler_metadata.losses))
    end
  end
end
