defmodule FlashAttention.BumblebeeTest do
  # Small models with random parameters: the swapped model against the model itself.
  use ExUnit.Case, async: true

  alias Bumblebee.Text.{Generation, GenerationConfig}
  alias FlashAttention.Bumblebee, as: Flash
  alias Nx.Defn.{Composite, Evaluator, Tree}

  @moduletag :bumblebee
  @moduletag :capture_log
  @compile {:no_warn_undefined,
            [Axon, Axon.ModelState, Axon.MixedPrecision, Bumblebee, Flash, Generation, Composite, Tree] ++
              [Nx, Nx.Defn, Nx.Random]}

  @text [
    vocab_size: 40,
    max_positions: 16,
    hidden_size: 12,
    num_blocks: 2,
    num_attention_heads: 3,
    intermediate_size: 16
  ]

  @encoder_decoder [
    vocab_size: 40,
    max_positions: 16,
    hidden_size: 12,
    attention_head_size: 4,
    encoder_num_blocks: 1,
    decoder_num_blocks: 1,
    encoder_num_attention_heads: 3,
    decoder_num_attention_heads: 3,
    encoder_intermediate_size: 16,
    decoder_intermediate_size: 16,
    intermediate_size: 16
  ]

  @image [
    image_size: 8,
    patch_size: 4,
    hidden_size: 12,
    num_blocks: 1,
    num_attention_heads: 3,
    intermediate_size: 16
  ]

  @swin [
    image_size: 8,
    patch_size: 1,
    embedding_size: 12,
    window_size: 4,
    num_blocks: [1, 1],
    num_attention_heads: [3, 3]
  ]

  @specs %{
    gpt2: {Bumblebee.Text.Gpt2, @text},
    bert: {Bumblebee.Text.Bert, @text},
    llama: {Bumblebee.Text.Llama, @text ++ [num_key_value_heads: 1]},
    mistral: {Bumblebee.Text.Mistral, @text ++ [num_key_value_heads: 1, attention_window_size: 3]},
    modernbert: {Bumblebee.Text.ModernBert, @text ++ [local_attention_window: 4]},
    qwen3: {Bumblebee.Text.Qwen3, @text ++ [num_key_value_heads: 3, attention_head_size: 4]},
    gpt_big_code: {Bumblebee.Text.GptBigCode, @text},
    clip_text: {Bumblebee.Text.ClipText, @text},
    t5: {Bumblebee.Text.T5, @encoder_decoder},
    bart: {Bumblebee.Text.Bart, @encoder_decoder},
    vit: {Bumblebee.Vision.Vit, @image},
    mpnet: {Bumblebee.Text.MpNet, Keyword.put(@text, :num_blocks, 1)},
    swin: {Bumblebee.Vision.Swin, @swin}
  }

  defp spec(name, more \\ []) do
    {module, config} = @specs[name]
    {architecture, more} = Keyword.pop(more, :architecture, :base)
    spec = struct(module, architecture: architecture)
    Bumblebee.configure(spec, Keyword.take(config, Map.keys(spec)) ++ more)
  end

  defp init(model, inputs, opts \\ []) do
    {init, predict} = Axon.build(model, [compiler: Evaluator, seed: 5] ++ opts)
    {init.(inputs, Axon.ModelState.empty()), predict}
  end

  # Both models' outputs from the same parameters, with all hidden states.
  defp outputs(spec, inputs, swap_opts \\ []) do
    model = Bumblebee.build_model(spec)
    opts = [global_layer_options: [output_hidden_states: true]]
    {state, predict} = init(model, inputs, opts)
    {_, predict_swapped} = init(Flash.swap_attention(model, swap_opts), inputs, opts)
    {predict.(state, inputs), predict_swapped.(state, inputs)}
  end

  defp count(model), do: Axon.reduce_nodes(model, 0, &if(&1.op_name == :flash_attention, do: &2 + 1, else: &2))

  # How many of the library's forwards the swapped model computes on such inputs.
  defp forwards(spec, inputs, opts \\ []) do
    {state, predict} = spec |> Bumblebee.build_model() |> Flash.swap_attention() |> init(inputs, opts)
    outputs = Nx.Defn.debug_expr(predict).(state, inputs)
    {_seen, forwards} = Composite.reduce(outputs, {MapSet.new(), 0}, &count_forwards/2)
    forwards
  end

  defp count_forwards(%{data: %{id: id, op: op, args: args}} = tensor, {seen, count} = acc) do
    if id in seen do
      acc
    else
      forward? = op == :block and is_struct(hd(args), FlashAttention.Defn.Forward)
      acc = {MapSet.put(seen, id), if(forward?, do: count + 1, else: count)}
      {_, acc} = Tree.apply_args(tensor, :all, acc, &{&1, count_forwards(&1, &2)})
      acc
    end
  end

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

  for name <- [:gpt2, :bert, :mistral, :llama, :modernbert, :qwen3, :gpt_big_code, :clip_text] do
    test "#{name}: all attention is swapped, and hidden states are the same under every mask" do
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
    {original, swapped} = outputs(spec(:bert), inputs)
    assert_close(original, swapped)
    assert forwards(spec(:bert), inputs) == 2

    {pixels, _} = Nx.Random.normal(Nx.Random.key(1), shape: {2, 8, 8, 3})
    {original, swapped} = outputs(spec(:vit), %{"pixel_values" => pixels})
    assert_close(original, swapped)
    assert forwards(spec(:vit), %{"pixel_values" => pixels}) == 1
  end

  test "an encoder and a decoder, with attention across" do
    inputs = %{
      "input_ids" => Nx.tensor(@tokens),
      "attention_mask" => Nx.tensor(@behind),
      "decoder_input_ids" => Nx.tensor([[1, 2, 3], [4, 5, 6]])
    }

    {original, swapped} = outputs(spec(:bart), inputs)
    assert_close(original, swapped)
    assert forwards(spec(:bart), inputs) == 3
  end

  for name <- [:gpt2, :mistral, :bart] do
    test "#{name}: generation with a cache writes the same tokens" do
      spec = generator(unquote(name))
      model = Bumblebee.build_model(spec)
      tokens = %{"input_ids" => Nx.tensor([[3, 7, 1, 4], [5, 6, 2, 8]])}
      {state, _} = init(model, Map.put(tokens, "decoder_input_ids", Nx.tensor([[1], [1]])))

      config =
        struct(GenerationConfig, max_new_tokens: 5, pad_token_id: 0, bos_token_id: 1, decoder_start_token_id: 1)

      inputs =
        Map.merge(tokens, %{
          "attention_mask" => Nx.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]),
          "seed" => Nx.tensor([1, 2], type: :s64)
        })

      [original, swapped, contiguous] =
        for model <- [model, Flash.swap_attention(model), Flash.swap_attention(model, contiguous_masks: true)] do
          generate = Generation.build_generate(model, spec, config)
          Nx.Defn.jit_apply(generate, [state, inputs], compiler: Evaluator).token_ids
        end

      assert Nx.shape(original) == {2, 5}
      assert Nx.to_list(original) == Nx.to_list(swapped)
      assert Nx.to_list(original) == Nx.to_list(contiguous)
    end

    test "#{name}: a cache is filled by several rows at once and by single ones" do
      spec = generator(unquote(name))
      model = Bumblebee.build_model(spec)
      encoder = %{"input_ids" => Nx.tensor(@tokens), "attention_mask" => Nx.tensor(@behind)}
      {state, _} = init(model, Map.put(encoder, "decoder_input_ids", Nx.tensor(@tokens)))
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
          assert forwards(spec, Map.put(inputs, "cache", cache)) == if(unquote(name) == :bart, do: 3, else: 2)
          {original.cache, flash.cache}
      end
    end
  end

  defp generator(:bart), do: spec(:bart, architecture: :for_conditional_generation)
  defp generator(name), do: spec(name, architecture: :for_causal_language_modeling)

  defp empty_cache(spec), do: spec.__struct__.init_cache(spec, 2, 9, %{"input_ids" => Nx.tensor(@tokens)})

  defp cached_inputs(:bart, from, until) do
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
      {original, swapped} = outputs(spec(:t5), inputs, opts)
      # T5 does not scale its scores, and its hidden states are not of size 1.
      assert_close(original, swapped, 2.0e-6 * largest(original))
      assert forwards(spec(:t5), inputs) == 3

      {original, swapped} = outputs(spec(:mpnet), inputs, opts)
      assert_close(original, swapped)
    end

    {pixels, _} = Nx.Random.normal(Nx.Random.key(1), shape: {2, 8, 8, 3})
    {original, swapped} = outputs(spec(:swin), %{"pixel_values" => pixels})
    assert_close(original, swapped)
  end

  test "masks of single scores, and masks that are no run" do
    for mask <- [
          Nx.tensor([[1, 0, 1, 1, 0, 1, 0], [0, 1, 0, 1, 1, 1, 1]]),
          Nx.tensor([[1, 0, 1, 1, 0, 1, 0]]) |> Nx.reshape({1, 1, 1, 7}),
          Nx.greater(random(1, {2, 3, 7, 7}), 0),
          Nx.greater(random(2, {1, 1, 7, 7}), 0),
          Nx.greater(random(3, {2, 1, 7, 1}), 0)
        ],
        name <- [:bert, :gpt2] do
      assert_same_attention(%{"mask" => mask, "query" => random(4, {2, 7, 3, 4})}, causal: name == :gpt2)
    end
  end

  test "windows that look ahead, anywhere in a cache" do
    for offset <- 0..4, window <- [{2, 1}, {0, 3}, {9, 0}], rows <- [1, 3], causal <- [true, false] do
      inputs = %{
        "query" => random(4, {2, rows, 3, 4}),
        "offset" => Nx.tensor(offset),
        "mask" => Nx.tensor([[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0]])
      }

      assert_same_attention(inputs, window_size: window, causal: causal)
      assert_same_attention(inputs, [window_size: window, causal: causal], contiguous_masks: true)
      assert_same_attention(Map.delete(inputs, "mask"), window_size: window, causal: causal)
    end
  end

  # One attention of Bumblebee's: weights and what comes out.
  defp assert_same_attention(inputs, opts, swap_opts \\ []) do
    inputs = Map.merge(inputs, %{"key" => random(5, {2, 7, 3, 4}), "value" => random(6, {2, 7, 3, 4})})
    [query, key, value] = for input <- ~w(query key value), do: Axon.input(input)
    none = Axon.layer(fn _query, _ -> struct(Axon.None) end, [query])
    [mask, offset] = for input <- ~w(mask offset), do: if(inputs[input], do: Axon.input(input), else: none)
    arguments = [query, key, value, mask, none, none, offset, opts]
    {output, weights} = apply(Bumblebee.Layers, :attention, arguments)
    model = Axon.container({weights, output})
    swapped = Flash.swap_attention(model, swap_opts)
    assert [%{computed_by: :flash_attention}] = Flash.explain(swapped, inputs)

    [{weights, output}, {swapped_weights, swapped_output}] =
      for model <- [model, swapped] do
        {state, predict} = init(model, inputs)
        predict.(state, inputs)
      end

    assert weights == swapped_weights
    assert_close(output, swapped_output)
  end

  defp random(seed, shape), do: Nx.Random.normal(Nx.Random.key(seed), shape: shape) |> elem(0)

  test "what cannot be done exactly is left alone" do
    # Weights are dropped in training mode.
    inputs = %{"input_ids" => Nx.tensor(@tokens)}
    dropout = spec(:bert, attention_dropout_rate: 0.5)
    assert forwards(dropout, inputs, mode: :train) == 0
    assert forwards(dropout, inputs) == 2
    assert forwards(spec(:bert, attention_dropout_rate: 0.0), inputs, mode: :train) == 2

    # No attention of Bumblebee's.
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
            gpt2: ~w(decoder.blocks.0.self_attention decoder.blocks.1.self_attention),
            bert: ~w(encoder.blocks.0.self_attention encoder.blocks.1.self_attention),
            llama: ~w(decoder.blocks.0.self_attention decoder.blocks.1.self_attention)
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
               for(%{computed_by: :flash_attention, reason: nil, name: name} <- explain(:t5, decoder), do: name)

      assert [%{reason: "its weights are dropped out in training, at a rate of 0.5"}, _] =
               explain(:bert, %{"input_ids" => ids()}, mode: :train, spec: [attention_dropout_rate: 0.5])

      assert [%{reason: nil}, _] = explain(:bert, %{"input_ids" => ids()}, spec: [attention_dropout_rate: 0.5])
    end

    test "takes what swap_attention takes, swapped or not, and leaves nothing behind" do
      model = Bumblebee.build_model(spec(:bert))
      inputs = %{"input_ids" => ids(), "attention_head_mask" => head_mask()}
      explained = Flash.explain(model, inputs)

      for same <- [%{model: model, params: 1}, {:ok, %{model: model}}, Flash.swap_attention(model)],
          do: assert(Flash.explain(same, inputs) == explained)

      assert Process.get(Flash) == nil
      assert Flash.explain(Axon.input("x") |> Axon.dense(3), %{"x" => Nx.template({1, 2}, :f32)}) == []

      for {function, arguments} <- [swap_attention: [:gpt2], explain: [{:error, "no such model"}, inputs]] do
        assert_raise FlashAttention.Error, ~r/^model: expected a model of Bumblebee's, got /, fn ->
          apply(Flash, function, arguments)
        end
      end
    end
  end

  test "weights that are asked for come from Bumblebee" do
    model = Bumblebee.build_model(spec(:bert))
    inputs = %{"input_ids" => Nx.tensor(@tokens), "attention_mask" => Nx.tensor(@behind)}
    opts = [global_layer_options: [output_attentions: true]]
    {state, predict} = init(model, inputs, opts)
    {_, predict_swapped} = init(Flash.swap_attention(model), inputs, opts)
    original = predict.(state, inputs)
    assert {%{shape: {2, 3, 7, 7}}, _} = original.attentions
    assert_close(original, predict_swapped.(state, inputs))
  end

  test "gradients of a loss are the same" do
    everything = Nx.broadcast(1, {2, 7})
    check_gradients(spec(:bert, attention_dropout_rate: 0.0, dropout_rate: 0.0), @behind, everything)
    # Rows that see nothing are left out.
    check_gradients(spec(:llama), @in_front, Nx.tensor(@in_front))
    # That of a relative bias among them.
    no_dropout = [attention_dropout_rate: 0.0, dropout_rate: 0.0]
    check_gradients(spec(:mpnet, no_dropout), @behind, everything)
  end

  defp check_gradients(spec, mask, weights) do
    model = Bumblebee.build_model(spec)
    inputs = %{"input_ids" => Nx.tensor(@tokens), "attention_mask" => Nx.tensor(mask)}
    {state, _} = init(model, inputs, mode: :train)
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
    model = :bert |> spec() |> Bumblebee.build_model() |> Axon.MixedPrecision.apply_policy(policy)

    assert %{model: swapped, params: :params, spec: :spec} =
             Flash.swap_attention(%{model: model, params: :params, spec: :spec}, precision: :default)

    assert {:ok, %{model: %{__struct__: Axon}, params: :params}} =
             Flash.swap_attention({:ok, %{model: model, params: :params}})

    inputs = %{"input_ids" => Nx.tensor(@tokens), "attention_mask" => Nx.tensor(@behind)}
    {state, predict} = init(model, inputs)
    {_, predict_swapped} = init(swapped, inputs)
    # Hidden states are of size 1 after their norm, and bf16 has 8 bits.
    assert_close(predict.(state, inputs).hidden_state, predict_swapped.(state, inputs).hidden_state, 0.05)
  end

  test "options are those of attention" do
    model = Bumblebee.build_model(spec(:bert))

    for {opts, message} <- [
          {[causal: true], ~r/^opts: expected keys among device, precision, deterministic, got :causal$/},
          {[contiguous_masks: :left], ~r/^contiguous_masks: expected true or false, got :left$/},
          {5, ~r/^opts: expected a keyword list, got 5$/},
          {[device: :gpu], ~r/^device: expected :auto, :all, :cpu/}
        ],
        do: assert_raise(FlashAttention.Error, message, fn -> Flash.swap_attention(model, opts) end)
  end
end
