defmodule FlashAttention.BumblebeeTest do
  # Small models with random parameters: the swapped model against the model itself.
  use ExUnit.Case, async: true

  alias Bumblebee.{Text, Vision}
  alias FlashAttention.Bumblebee, as: Flash
  alias FlashAttention.Dropout
  alias FlashAttention.Test.BumblebeeFamilies, as: Families
  alias FlashAttention.Test.Forwards
  alias Nx.Defn.Evaluator

  @moduletag :bumblebee
  @moduletag :capture_log
  @compile {:no_warn_undefined,
            [
              Axon,
              Axon.Loop,
              Axon.ModelState,
              Axon.MixedPrecision,
              Bumblebee,
              Flash,
              Forwards,
              Nx,
              Nx.Defn,
              Nx.Random
            ] ++
              [Polaris.Optimizers]}

  defp spec(name, more \\ []), do: Families.spec(name, Keyword.put_new(more, :architecture, :base))

  # Both models' outputs from the same parameters, with all hidden states.
  defp outputs(spec, inputs, swap_opts \\ []) do
    model = Bumblebee.build_model(spec)
    opts = [global_layer_options: [output_hidden_states: true]]
    {state, predict} = Families.build(model, inputs, opts)
    {_, predict_swapped} = Families.build(Flash.swap_attention(model, swap_opts), inputs, opts)
    {predict.(state, inputs), predict_swapped.(state, inputs)}
  end

  defp count(model), do: Axon.reduce_nodes(model, 0, &if(&1.op_name == :flash_attention, do: &2 + 1, else: &2))

  # What the library's forwards in the swapped model are told on such inputs; and how many there are.
  defp told(spec, inputs, opts \\ []) do
    {state, predict} = spec |> Bumblebee.build_model() |> Flash.swap_attention() |> Families.build(inputs, opts)
    Nx.Defn.debug_expr(predict).(state, inputs) |> Forwards.options()
  end

  defp forwards(spec, inputs), do: length(told(spec, inputs))

  defp assert_close(original, swapped, tolerance \\ 2.0e-6) do
    pairs = Enum.zip(flatten(original), flatten(swapped))
    assert pairs != []

    for {x, y} <- pairs do
      assert Nx.shape(x) == Nx.shape(y) and Nx.type(x) == Nx.type(y)
      assert Nx.subtract(x, y) |> Nx.abs() |> Nx.reduce_max() |> Nx.to_number() <= tolerance
    end
  end

  defp largest(outputs),
    do: outputs |> flatten() |> Enum.map(&Nx.to_number(Nx.reduce_max(Nx.abs(&1)))) |> Enum.max()

  defp flatten(%{__struct__: Axon.None}), do: []
  defp flatten(%{__struct__: Nx.Tensor} = tensor), do: [tensor]
  defp flatten(tuple) when is_tuple(tuple), do: tuple |> Tuple.to_list() |> flatten()
  defp flatten(list) when is_list(list), do: Enum.flat_map(list, &flatten/1)
  defp flatten(map), do: map |> Map.values() |> flatten()

  @tokens [[3, 7, 1, 4, 9, 2, 8], [5, 6, 2, 2, 1, 0, 3]]

  # No padding, padding behind, and padding in front, where rows see nothing at all.
  @whole [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]
  @behind [[1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0]]
  @in_front [[0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1]]

  for name <- [
        Text.Gpt2,
        Text.Bert,
        Text.Mistral,
        Text.Llama,
        Text.ModernBert,
        Text.Qwen3,
        Text.GptBigCode,
        Text.ClipText
      ] do
    test "#{inspect(name)}: all attention is swapped, and hidden states are the same under every mask" do
      spec = spec(unquote(name))
      assert count(Flash.swap_attention(Bumblebee.build_model(spec))) == 2

      for mask <- [@whole, @behind, @in_front] do
        inputs = %{"input_ids" => Nx.tensor(@tokens), "attention_mask" => Nx.tensor(mask)}
        {original, swapped} = outputs(spec, inputs)
        assert tuple_size(original.hidden_states) >= 3
        assert_close(original, swapped)
        assert forwards(spec, inputs) == 2
        # All of these have their ones in one run.
        {^original, swapped} = outputs(spec, inputs, contiguous_masks: true)
        assert_close(original, swapped)
      end
    end
  end

  test "head masks, and a model without masks" do
    head_mask = Nx.tensor([[1.0, 0.0, 0.5], [0.25, 1.0, 0.0]])
    inputs = %{"input_ids" => Nx.tensor(@tokens), "attention_head_mask" => head_mask}
    {original, swapped} = outputs(spec(Text.Bert), inputs)
    assert_close(original, swapped)
    assert forwards(spec(Text.Bert), inputs) == 2

    pixels = Families.random({2, 8, 8, 3})
    {original, swapped} = outputs(spec(Vision.Vit), %{"pixel_values" => pixels})
    assert_close(original, swapped)
    assert forwards(spec(Vision.Vit), %{"pixel_values" => pixels}) == 2
  end

  test "an encoder and a decoder, with attention across" do
    inputs = %{
      "input_ids" => Nx.tensor(@tokens),
      "attention_mask" => Nx.tensor(@behind),
      "decoder_input_ids" => Nx.tensor([[1, 2, 3], [4, 5, 6]])
    }

    {original, swapped} = outputs(spec(Text.Bart), inputs)
    assert_close(original, swapped)
    assert forwards(spec(Text.Bart), inputs) == 3
  end

  for name <- [Text.Gpt2, Text.Mistral, Text.Bart] do
    test "#{inspect(name)}: generation with a cache writes the same tokens" do
      spec = generator(unquote(name))
      model = Bumblebee.build_model(spec)
      {state, _} = Families.build(model, Families.inputs(spec))

      [original, swapped, contiguous] =
        for model <- [model, Flash.swap_attention(model), Flash.swap_attention(model, contiguous_masks: true)] do
          arguments = [state, Families.prompt(spec)]
          Nx.Defn.jit_apply(Families.generate(model, spec), arguments, compiler: Evaluator)
        end

      assert Nx.shape(original) == {2, 5}
      assert Nx.to_list(original) == Nx.to_list(swapped)
      assert Nx.to_list(original) == Nx.to_list(contiguous)
    end

    test "#{inspect(name)}: a cache is filled by several rows at once and by single ones" do
      spec = generator(unquote(name))
      model = Bumblebee.build_model(spec)
      encoder = %{"input_ids" => Nx.tensor(@tokens), "attention_mask" => Nx.tensor(@behind)}
      {state, _} = Families.build(model, Map.put(encoder, "decoder_input_ids", Nx.tensor(@tokens)))
      swapped = Flash.swap_attention(model)

      # Rows 0 to 2, 3 and 4, then one by one, in a cache of nine.
      for {from, until} <- [{0, 3}, {3, 5}, {5, 6}, {6, 7}], reduce: nil do
        caches ->
          {cache, swapped_cache} = caches || {empty_cache(spec), empty_cache(spec)}
          inputs = cached_inputs(unquote(name), from, until)
          {_, predict} = Axon.build(model, compiler: Evaluator)
          {_, predict_swapped} = Axon.build(swapped, compiler: Evaluator)
          original = predict.(state, Map.put(inputs, "cache", cache))
          flash = predict_swapped.(state, Map.put(inputs, "cache", swapped_cache))

          assert_close(original, flash)

          assert forwards(spec, Map.put(inputs, "cache", cache)) ==
                   if(unquote(name) == Text.Bart, do: 3, else: 2)

          {original.cache, flash.cache}
      end
    end
  end

  defp generator(name), do: Families.spec(name, architecture: Families.generator(name))

  defp empty_cache(spec), do: spec.__struct__.init_cache(spec, 2, 9, %{"input_ids" => Nx.tensor(@tokens)})

  defp cached_inputs(Text.Bart, from, until) do
    %{
      "input_ids" => Nx.tensor(@tokens),
      "attention_mask" => Nx.tensor(@behind),
      "decoder_input_ids" => Nx.tensor(@tokens)[[.., from..(until - 1)]]
    }
  end

  # Padding in front leaves rows without anything to see.
  defp cached_inputs(_name, from, until) do
    %{
      "input_ids" => Nx.tensor(@tokens)[[.., from..(until - 1)]],
      "attention_mask" => Nx.tensor(@in_front)[[.., from..(until - 1)]],
      "position_ids" => Nx.tensor(List.duplicate(Enum.to_list(from..(until - 1)), 2))
    }
  end

  test "relative biases are added, under masks too" do
    inputs = %{"input_ids" => Nx.tensor(@tokens), "decoder_input_ids" => Nx.tensor([[1, 2, 3], [4, 5, 6]])}

    for mask <- [@whole, @behind, @in_front], opts <- [[], [contiguous_masks: true]] do
      inputs = Map.put(inputs, "attention_mask", Nx.tensor(mask))
      {original, swapped} = outputs(spec(Text.T5), inputs, opts)
      # T5 does not scale its scores, and its hidden states are not of size 1.
      assert_close(original, swapped, 2.0e-6 * largest(original))
      assert forwards(spec(Text.T5), inputs) == 3

      {original, swapped} = outputs(spec(Text.MpNet), inputs, opts)
      assert_close(original, swapped)
    end

    pixels = Families.random({2, 8, 8, 3})
    {original, swapped} = outputs(spec(Vision.Swin), %{"pixel_values" => pixels})
    assert_close(original, swapped)
  end

  test "masks of single scores, and masks that are no run" do
    for mask <- [
          Nx.tensor([[1, 0, 1, 1, 0, 1, 0], [0, 1, 0, 1, 1, 1, 1]]),
          Nx.tensor([[1, 0, 1, 1, 0, 1, 0]]) |> Nx.reshape({1, 1, 1, 7}),
          Nx.greater(Families.random({2, 3, 7, 7}, 1), 0),
          Nx.greater(Families.random({1, 1, 7, 7}, 2), 0),
          Nx.greater(Families.random({2, 1, 7, 1}, 3), 0)
        ],
        name <- [Text.Bert, Text.Gpt2] do
      assert_same_attention(%{"mask" => mask, "query" => Families.random({2, 7, 3, 4}, 4)},
        causal: name == Text.Gpt2
      )
    end
  end

  test "a bias of another type gives results of the type that it has in Bumblebee" do
    inputs = %{"query" => Families.random({2, 7, 3, 4}, 4), "bias" => Families.random({2, 3, 7, 7}, 1)}

    for type <- [:f64, :f16, :s64], opts <- [[], [causal: true]] do
      assert_same_attention(update_in(inputs["bias"], &Nx.as_type(&1, type)), opts)
    end
  end

  test "windows that look ahead, anywhere in a cache" do
    for offset <- 0..4, window <- [{2, 1}, {0, 3}, {9, 0}], rows <- [1, 3], causal <- [true, false] do
      inputs = %{
        "query" => Families.random({2, rows, 3, 4}, 4),
        "offset" => Nx.tensor(offset),
        "mask" => Nx.tensor([[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0]])
      }

      assert_same_attention(inputs, window_size: window, causal: causal)
      assert_same_attention(inputs, [window_size: window, causal: causal], contiguous_masks: true)
      assert_same_attention(Map.delete(inputs, "mask"), window_size: window, causal: causal)
    end
  end

  test "rows that stand so far behind the last key that their window shows none" do
    for window <- [{2, 1}, {0, 0}, {5, 2}], causal <- [true, false], opts <- [[], [contiguous_masks: true]] do
      inputs = %{"query" => Families.random({2, 13, 3, 4}, 4)}
      assert_same_attention(inputs, [window_size: window, causal: causal], opts)
    end
  end

  defp assert_same_attention(inputs, opts, swap_opts \\ []) do
    inputs =
      Map.merge(inputs, %{
        "key" => Families.random({2, 7, 3, 4}, 5),
        "value" => Families.random({2, 7, 3, 4}, 6)
      })

    model = attention(inputs, opts)
    swapped = Flash.swap_attention(model, swap_opts)
    assert [%{computed_by: :flash_attention}] = Flash.explain(swapped, inputs)

    [{weights, output}, {swapped_weights, swapped_output}] =
      for model <- [model, swapped] do
        {state, predict} = Families.build(model, inputs)
        predict.(state, inputs)
      end

    assert weights == swapped_weights
    assert_close(output, swapped_output)
  end

  # One attention of Bumblebee's: weights and what comes out.
  defp attention(inputs, opts) do
    [query, key, value] = for input <- ~w(query key value), do: Axon.input(input)
    none = Axon.layer(fn _query, _ -> struct(Axon.None) end, [query])

    optional =
      for input <- ~w(mask head_mask bias offset), do: if(inputs[input], do: Axon.input(input), else: none)

    {output, weights} = apply(Bumblebee.Layers, :attention, [query, key, value] ++ optional ++ [opts])
    Axon.container({weights, output})
  end

  test "forwards are told that no backward follows in inference" do
    inputs = %{"input_ids" => Nx.tensor(@tokens)}

    for {mode, expected} <- [inference: true, train: false] do
      assert [_, _] = told = told(spec(Text.Bert), inputs, mode: mode)
      for opts <- told, do: assert(opts[:inference] == expected)
    end
  end

  test "weights are dropped out in training, by the key that the model keeps" do
    inputs =
      for {name, seed} <- [{"query", 4}, {"key", 5}, {"value", 6}],
          into: %{"mask" => Nx.tensor(@behind)},
          do: {name, Families.random({2, 7, 3, 4}, seed)}

    model = attention(inputs, causal: true, dropout_rate: 0.25)
    swapped = Flash.swap_attention(model)
    {state, predict} = Families.build(model, inputs, mode: :train)
    {same_state, swapped_predict} = Families.build(swapped, inputs, mode: :train)
    assert Map.keys(state.data) == Map.keys(same_state.data)

    # Without dropout, and then with what it drops.
    {_, whole} = Families.build(model, inputs)
    {weights, _output} = whole.(state, inputs)
    [{_name, %{"key" => key}}] = Map.to_list(state.data)
    keep = Dropout.mask(Nx.Random.split(key)[1], 0.25, {2, 3, 7, 7})
    v = Nx.transpose(inputs["value"], axes: [0, 2, 1, 3])
    expected = weights |> Nx.multiply(keep) |> Nx.divide(0.75) |> Nx.dot([3], [0, 1], v, [2], [0, 1])

    result = swapped_predict.(state, inputs)
    {_weights, output} = result.prediction
    assert_close(Nx.transpose(expected, axes: [0, 2, 1, 3]), output)

    # The key goes from step to step as it does in Bumblebee; another one drops others.
    assert result.state == predict.(state, inputs).state
    {_weights, later} = swapped_predict.(%{state | data: result.state}, inputs).prediction
    assert largest(Nx.subtract(output, later)) > 0.1
    # In inference nothing is dropped.
    {_, swapped_whole} = Families.build(swapped, inputs)
    assert_close(whole.(state, inputs), swapped_whole.(state, inputs))
  end

  test "a model with dropout trains, in mixed precision too" do
    spec =
      spec(Text.Gpt2,
        attention_dropout_rate: 0.5,
        dropout_rate: 0.5,
        architecture: :for_causal_language_modeling
      )

    policy = Axon.MixedPrecision.create_policy(compute: {:bf, 16})
    model = spec |> Bumblebee.build_model() |> Flash.swap_attention() |> Axon.nx(& &1.logits)
    inputs = %{"input_ids" => Nx.tensor(@tokens)}
    assert Enum.all?(Flash.explain(model, inputs, mode: :train), &(&1.computed_by == :flash_attention))

    for model <- [model, Axon.MixedPrecision.apply_policy(model, policy)] do
      loss = fn expected, logits -> Nx.mean(Nx.pow(Nx.subtract(logits, expected), 2)) end

      losses =
        for {epochs, optimizer} <- [{1, 0.0}, {8, 0.05}] do
          trained =
            model
            |> Axon.Loop.trainer(loss, Polaris.Optimizers.sgd(learning_rate: optimizer), log: 0)
            |> Axon.Loop.run([{inputs, Nx.broadcast(1.0, {2, 7, 40})}], Axon.ModelState.empty(),
              epochs: epochs,
              compiler: Evaluator
            )

          Nx.to_number(loss.(1.0, Axon.predict(model, trained, inputs)))
        end

      assert [before, later] = losses
      assert later < 0.9 * before
    end
  end

  test "where Bumblebee computes, its own bits drop weights" do
    inputs = of_two_types()
    model = attention(inputs, dropout_rate: 0.25)
    {state, predict} = Families.build(model, inputs, mode: :train)
    {_state, swapped_predict} = Families.build(Flash.swap_attention(model), inputs, mode: :train)
    assert predict.(state, inputs) == swapped_predict.(state, inputs)
  end

  defp of_two_types do
    tensors =
      for {name, seed} <- [{"query", 4}, {"key", 5}, {"value", 6}],
          do: {name, Families.random({2, 7, 3, 4}, seed)}

    tensors |> Map.new() |> Map.update!("value", &Nx.as_type(&1, :f16))
  end

  test "what is no attention of Bumblebee's is left alone" do
    model = Axon.input("x") |> Axon.dense(3)
    assert count(Flash.swap_attention(model)) == 0
  end

  describe "explain" do
    defp ids, do: Nx.template({2, 7}, :s64)
    defp head_mask, do: Nx.template({2, 3}, :f32)

    defp explain(name, inputs, opts \\ []),
      do:
        name
        |> spec(opts[:spec] || [])
        |> Bumblebee.build_model()
        |> Flash.explain(inputs, Keyword.delete(opts, :spec))

    test "names every attention that the library computes" do
      for {name, names} <- [
            {Text.Gpt2, ~w(decoder.blocks.0.self_attention decoder.blocks.1.self_attention)},
            {Text.Bert, ~w(encoder.blocks.0.self_attention encoder.blocks.1.self_attention)},
            {Text.Llama, ~w(decoder.blocks.0.self_attention decoder.blocks.1.self_attention)}
          ] do
        explained = explain(name, %{"input_ids" => ids()})

        assert explained ==
                 for(
                   name <- names,
                   do: %{name: name, swapped: true, computed_by: :flash_attention, reason: nil}
                 )

        assert length(explained) == forwards(spec(name), %{"input_ids" => Nx.tensor(@tokens)})
      end
    end

    test "says why the library does not compute one" do
      decoder = %{"input_ids" => ids(), "decoder_input_ids" => Nx.template({2, 3}, :s64)}

      names = [
        "encoder.blocks.0.self_attention",
        "decoder.blocks.0.self_attention",
        "decoder.blocks.0.cross_attention"
      ]

      assert names ==
               for(
                 %{computed_by: :flash_attention, reason: nil, name: name} <- explain(Text.T5, decoder),
                 do: name
               )

      inputs = of_two_types()
      model = attention(inputs, [])

      assert [%{computed_by: :bumblebee, reason: "q, k and v are of types f32, f32, f16"}] =
               Flash.explain(model, inputs)
    end

    test "takes what swap_attention takes, swapped or not, and leaves nothing behind" do
      model = Bumblebee.build_model(spec(Text.Bert))
      inputs = %{"input_ids" => ids(), "attention_head_mask" => head_mask()}
      explained = Flash.explain(model, inputs)

      for same <- [%{model: model, params: 1}, {:ok, %{model: model}}, Flash.swap_attention(model)],
          do: assert(Flash.explain(same, inputs) == explained)

      assert Process.get(Flash) == nil
      assert Flash.explain(Axon.input("x") |> Axon.dense(3), %{"x" => Nx.template({1, 2}, :f32)}) == []

      for {function, arguments} <- [swap_attention: [Text.Gpt2], explain: [{:error, "no such model"}, inputs]] do
        assert_raise FlashAttention.Error, ~r/^model: expected a model of Bumblebee's, got /, fn ->
          apply(Flash, function, arguments)
        end
      end
    end
  end

  test "weights that are asked for come from Bumblebee" do
    model = Bumblebee.build_model(spec(Text.Bert))
    inputs = %{"input_ids" => Nx.tensor(@tokens), "attention_mask" => Nx.tensor(@behind)}
    opts = [global_layer_options: [output_attentions: true]]
    {state, predict} = Families.build(model, inputs, opts)
    {_, predict_swapped} = Families.build(Flash.swap_attention(model), inputs, opts)
    original = predict.(state, inputs)
    assert {%{shape: {2, 3, 7, 7}}, _} = original.attentions
    assert_close(original, predict_swapped.(state, inputs))
  end

  test "gradients of a loss are the same" do
    everything = Nx.broadcast(1, {2, 7})
    check_gradients(spec(Text.Bert), @behind, everything)
    # Rows that see nothing are left out.
    check_gradients(spec(Text.Llama), @in_front, Nx.tensor(@in_front))
    # That of a relative bias among them.
    check_gradients(spec(Text.MpNet), @behind, everything)
  end

  defp check_gradients(spec, mask, weights) do
    model = Bumblebee.build_model(spec)
    inputs = %{"input_ids" => Nx.tensor(@tokens), "attention_mask" => Nx.tensor(mask)}
    {state, _} = Families.build(model, inputs, mode: :train)
    loss = &(&1.prediction.hidden_state |> Nx.sin() |> Nx.multiply(Nx.new_axis(weights, -1)) |> Nx.sum())

    [original, swapped] =
      for model <- [model, Flash.swap_attention(model)] do
        {_init, predict} = Axon.build(model, mode: :train, compiler: Evaluator)

        gradients = fn data, inputs ->
          Nx.Defn.grad(data, &loss.(predict.(%{state | data: &1}, inputs)))
        end

        Nx.Defn.jit_apply(gradients, [state.data, inputs], compiler: Evaluator)
      end

    assert largest(original) > 0.1
    assert_close(original, swapped, 2.0e-6 * largest(original))
  end

  test "mixed precision stays, and what load_model returns is taken as a whole" do
    policy = Axon.MixedPrecision.create_policy(params: {:bf, 16}, compute: {:bf, 16}, output: {:bf, 16})
    model = Text.Bert |> spec() |> Bumblebee.build_model() |> Axon.MixedPrecision.apply_policy(policy)

    assert %{model: swapped, params: :params, spec: :spec} =
             Flash.swap_attention(%{model: model, params: :params, spec: :spec}, precision: :default)

    assert {:ok, %{model: %{__struct__: Axon}, params: :params}} =
             Flash.swap_attention({:ok, %{model: model, params: :params}})

    inputs = %{"input_ids" => Nx.tensor(@tokens), "attention_mask" => Nx.tensor(@behind)}
    {state, predict} = Families.build(model, inputs)
    {_, predict_swapped} = Families.build(swapped, inputs)
    # Hidden states are of size 1 after their norm, and bf16 has 8 bits.
    assert_close(predict.(state, inputs).hidden_state, predict_swapped.(state, inputs).hidden_state, 0.05)
  end

  test "options are those of attention" do
    model = Bumblebee.build_model(spec(Text.Bert))

    for {opts, message} <- [
          {[causal: true], ~r/^opts: expected keys among device, precision, deterministic, got :causal$/},
          {[contiguous_masks: :left], ~r/^contiguous_masks: expected true or false, got :left$/},
          {5, ~r/^opts: expected a keyword list, got 5$/},
          {[device: :gpu], ~r/^device: expected :auto, :all, :cpu/}
        ],
        do: assert_raise(FlashAttention.Error, message, fn -> Flash.swap_attention(model, opts) end)
  end
end
