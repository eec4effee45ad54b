defmodule FlashAttention.Rewriter.BumblebeeTest do
  # Every family of Bumblebee's models with attention, small and with random parameters: how many attentions are found, and
  # that outputs, tokens and gradients stay what they are.
  use ExUnit.Case, async: true

  alias Bumblebee.{Audio, Text, Vision}
  alias Bumblebee.Text.{Generation, GenerationConfig}
  alias FlashAttention.Rewriter
  alias Nx.Defn.{Composite, Evaluator}

  @moduletag :bumblebee
  @moduletag :capture_log
  @compile {:no_warn_undefined,
            [Axon, Axon.ModelState, Bumblebee, Composite, Generation, Nx, Nx.Defn, Nx.Random, Nx.Type, Rewriter]}

  @text [
    vocab_size: 40,
    max_positions: 16,
    hidden_size: 24,
    num_blocks: 2,
    num_attention_heads: 3,
    intermediate_size: 16,
    embedding_size: 8,
    encoder_hidden_size: 24,
    num_key_value_heads: 1,
    attention_head_size: 8,
    attention_window_size: 3,
    local_attention_window: 4
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
    intermediate_size: 16,
    encoder_max_positions: 8,
    decoder_max_positions: 16,
    feature_size: 4
  ]

  @image [
    image_size: 8,
    patch_size: 4,
    hidden_size: 12,
    num_blocks: 2,
    num_attention_heads: 3,
    intermediate_size: 16
  ]

  @swin [
    image_size: 8,
    patch_size: 1,
    embedding_size: 12,
    window_size: 4,
    num_blocks: [2, 1],
    num_attention_heads: [3, 3]
  ]

  # Nothing is dropped out, and an activation that every version of Axon has.
  @plain [dropout_rate: 0.0, attention_dropout_rate: 0.0, activation: :gelu]

  # Module, configuration, architecture, attentions.
  @families [
    {Text.Albert, @text, :base, 2},
    {Text.Bert, @text, :base, 2},
    {Text.BlipText, @text, :base, 2},
    {Text.ClipText, @text, :base, 2},
    {Text.Distilbert, @text, :base, 2},
    {Text.Gemma, @text, :for_causal_language_modeling, 2},
    {Text.Gemma3Text, @text, :for_causal_language_modeling, 2},
    {Text.Gpt2, @text, :for_causal_language_modeling, 2},
    {Text.GptBigCode, @text, :for_causal_language_modeling, 2},
    {Text.GptNeoX, @text, :for_causal_language_modeling, 2},
    {Text.Llama, @text, :for_causal_language_modeling, 2},
    {Text.Mistral, @text, :for_causal_language_modeling, 2},
    {Text.ModernBert, @text, :base, 2},
    {Text.ModernBertDecoder, @text, :for_causal_language_modeling, 2},
    {Text.MpNet, @text, :base, 2},
    {Text.NomicBert, @text, :base, 2},
    {Text.Phi, @text, :for_causal_language_modeling, 2},
    {Text.Phi3, @text, :for_causal_language_modeling, 2},
    {Text.Qwen3, @text, :for_causal_language_modeling, 2},
    {Text.Roberta, @text, :base, 2},
    {Text.SmolLm3, @text, :for_causal_language_modeling, 2},
    {Text.Bart, @encoder_decoder, :for_conditional_generation, 3},
    {Text.Blenderbot, @encoder_decoder, :for_conditional_generation, 3},
    {Text.M2m100, @encoder_decoder, :for_conditional_generation, 3},
    {Text.Mbart, @encoder_decoder, :for_conditional_generation, 3},
    {Text.T5, @encoder_decoder, :for_conditional_generation, 3},
    {Vision.Vit, @image, :base, 2},
    {Vision.Deit, @image, :base, 2},
    {Vision.DinoV2, @image, :base, 2},
    {Vision.Swin, @swin, :base, 3},
    {Vision.ClipVision, @image, :base, 2},
    {Vision.BlipVision, @image, :base, 2},
    {Audio.Whisper, @encoder_decoder, :for_conditional_generation, 3}
  ]

  defp spec(module, config, architecture) do
    spec = struct(module, architecture: architecture)
    Bumblebee.configure(spec, Keyword.take(config ++ @plain, Map.keys(spec)))
  end

  # Tokens with padding behind the first sequence.
  @mask [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]]

  defp inputs(module, spec, mask \\ @mask) do
    inputs = for {name, template} <- module.input_template(spec), into: %{}, do: {name, input(name, template)}
    in_f64(if inputs["input_ids"], do: Map.put(inputs, "attention_mask", Nx.tensor(mask)), else: inputs)
  end

  defp in_f64(container),
    do: Composite.traverse(container, &if(Nx.Type.float?(Nx.type(&1)), do: Nx.as_type(&1, :f64), else: &1))

  defp input("input_features", _template), do: random({2, 16, 4})

  defp input(_name, %{type: {class, _}, shape: {_, _}}) when class in [:s, :u],
    do: Nx.remainder(Nx.iota({2, 8}), 40)

  defp input(_name, template), do: random(put_elem(template.shape, 0, 2))

  defp random(shape) do
    {tensor, _key} = Nx.Random.normal(Nx.Random.key(3), shape: shape)
    tensor
  end

  # What is computed from is the output alone: those that are weights keep what they are made of.
  defp output(%{logits: logits}), do: logits
  defp output(%{hidden_state: hidden_state}), do: hidden_state

  defp predict(model, inputs, mode, cast \\ &in_f64/1) do
    {init, predict} = Axon.build(model, compiler: Evaluator, mode: mode, seed: 5)
    {inputs |> init.(Axon.ModelState.empty()) |> cast.(), predict}
  end

  # In f64, where rounding hides nothing.
  defp close?(x, y) do
    largest = x |> Nx.abs() |> Nx.reduce_max() |> Nx.to_number()
    x |> Nx.subtract(y) |> Nx.abs() |> Nx.reduce_max() |> Nx.to_number() <= 1.0e-12 * max(largest, 1.0)
  end

  defp assert_close(fun, args) do
    [plain, rewritten] =
      for compiler <- [Evaluator, Rewriter],
          do: Composite.flatten_list([Nx.Defn.jit_apply(fun, args, compiler: compiler)])

    for {x, y} <- Enum.zip(plain, rewritten), Nx.Type.float?(x.type), do: assert(close?(x, y))
  end

  for {module, config, architecture, attentions} <- @families do
    test "#{inspect(module)}: #{attentions} attentions, in inference and in training" do
      spec = spec(unquote(module), unquote(Macro.escape(config)), unquote(architecture))
      model = Bumblebee.build_model(spec)
      inputs = inputs(unquote(module), spec)

      {state, predict} = predict(model, inputs, :inference)
      infer = fn state, inputs -> output(predict.(state, inputs)) end
      places = Rewriter.explain(infer, [state, inputs])
      assert length(places) == unquote(attentions)
      assert Enum.all?(places, & &1.rewritten), inspect(places)
      assert_close(infer, [state, inputs])

      {state, step} = training_step(model, inputs)
      places = Rewriter.explain(step, [state, inputs])
      assert length(places) == unquote(attentions)
      assert Enum.all?(places, &(&1.rewritten and &1.as =~ "with dq, dk, dv")), inspect(places)
      assert_close(step, [state, inputs])
    end

    test "#{inspect(module)}: its attention with dropout, in training" do
      spec = unquote(module) |> struct(architecture: unquote(architecture))
      config = Keyword.put(unquote(Macro.escape(config)), :activation, :gelu)
      config = config ++ [dropout_rate: 0.1, attention_dropout_rate: 0.2]
      spec = Bumblebee.configure(spec, Keyword.take(config, Map.keys(spec)))
      inputs = inputs(unquote(module), spec)
      {state, step} = spec |> Bumblebee.build_model() |> training_step(inputs)
      places = Rewriter.explain(step, [state, inputs], dropout: :resample)
      assert length(places) == unquote(attentions)
      assert Enum.all?(places, &(&1.rewritten and &1.as =~ "with dq, dk, dv")), inspect(places)

      if Enum.any?(places, &(&1.as =~ "dropout")) do
        refused = Rewriter.explain(step, [state, inputs])
        assert Enum.any?(refused, &(&1[:reason] =~ "dropout: :resample"))

        [first, again] =
          for _ <- 1..2,
              do: Nx.Defn.jit_apply(step, [state, inputs], compiler: Rewriter, dropout: :resample) |> elem(0)

        assert first == again
        assert Nx.to_number(first) |> abs() <= 1
      end
    end
  end

  # The mean of sines, and its gradients by what is trained.
  defp training_step(model, inputs) do
    {state, predict} = predict(model, inputs, :train)

    step = fn parameters, inputs ->
      Nx.Defn.value_and_grad(parameters, fn parameters ->
        trained = %{state | data: Map.merge(state.data, parameters)}
        Nx.mean(Nx.sin(output(predict.(trained, inputs).prediction)))
      end)
    end

    {Axon.ModelState.trainable_parameters(state), step}
  end

  test "rows that see nothing are what they are in Bumblebee" do
    spec = spec(Text.Gpt2, @text, :for_causal_language_modeling)
    model = Bumblebee.build_model(spec)
    inputs = inputs(Text.Gpt2, spec, [[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])
    {state, predict} = predict(model, inputs, :inference)
    assert_close(fn state, inputs -> output(predict.(state, inputs)) end, [state, inputs])
  end

  test "weights that are outputs stay, and are computed beside where that is wanted" do
    spec = spec(Text.Bart, @encoder_decoder, :base)
    inputs = inputs(Text.Bart, spec)
    {state, predict} = predict(Bumblebee.build_model(spec), inputs, :inference)
    assert [_, _, _] = places = Rewriter.explain(predict, [state, inputs])
    assert Enum.all?(places, &(&1[:reason] == "its scores or weights are a result themselves"))
    assert [%{rewritten: true}, _, _] = Rewriter.explain(predict, [state, inputs], weights: :keep)
  end

  for {module, config, architecture, _} <- @families,
      module in [Text.Gpt2, Text.Llama, Text.Mistral, Text.Bart, Text.T5] do
    test "#{inspect(module)}: generation writes the same tokens" do
      spec = spec(unquote(module), unquote(Macro.escape(config)), unquote(architecture))
      model = Bumblebee.build_model(spec)

      prompt = %{
        "input_ids" => Nx.tensor([[3, 5, 7, 9], [2, 4, 6, 8]]),
        "attention_mask" => Nx.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
      }

      {state, _predict} =
        predict(model, Map.put(prompt, "decoder_input_ids", prompt["input_ids"]), :inference, & &1)

      config =
        struct(GenerationConfig, max_new_tokens: 5, pad_token_id: 0, bos_token_id: 1, decoder_start_token_id: 1)

      generate = Generation.build_generate(model, spec, config)
      inputs = Map.put(prompt, "seed", Nx.tensor([1, 2]))

      [original, rewritten] =
        for compiler <- [Evaluator, Rewriter],
            do: Nx.to_list(Nx.Defn.jit_apply(generate, [state, inputs], compiler: compiler).token_ids)

      assert original == rewritten
      places = Rewriter.explain(generate, [state, inputs])
      assert length(places) >= 3 and Enum.all?(places, & &1.rewritten)
    end
  end
end
