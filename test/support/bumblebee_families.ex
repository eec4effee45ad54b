defmodule FlashAttention.Test.BumblebeeFamilies do
  @moduledoc """
  Every family of Bumblebee's models with attention, small and with random parameters: what tests of the swapped model and of
  the rewriter, and the page of results, run.
  """

  alias Bumblebee.{Audio, Multimodal, Text, Vision}
  alias Bumblebee.Text.{Generation, GenerationConfig}
  alias Nx.Defn.Evaluator

  @compile {:no_warn_undefined, [Axon, Axon.ModelState, Bumblebee, Generation, Nx, Nx.Defn, Nx.Random]}

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
  @all [
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
    {Audio.Whisper, @encoder_decoder, :for_conditional_generation, 3},
    {Multimodal.Clip, [], :base, 4},
    {Multimodal.Blip, [], :for_conditional_generation, 6},
    {Multimodal.LayoutLm, @text ++ [max_spatial_positions: 64], :base, 2}
  ]

  @doc "The families, and how many attentions each has."
  def all, do: for({module, _config, _architecture, attentions} <- @all, do: {module, attentions})

  @doc "A family's configuration, of which `more` replaces a part; nothing is dropped out unless that says so."
  def spec(module, more \\ []) do
    {^module, config, architecture, _} = List.keyfind(@all, module, 0)
    {architecture, more} = Keyword.pop(more, :architecture, architecture)
    spec = struct(module, architecture: architecture)
    config = @plain |> Keyword.merge(config) |> Keyword.merge(parts(module, more)) |> Keyword.merge(more)
    Bumblebee.configure(spec, Keyword.take(config, Map.keys(spec)))
  end

  # Models that are made of two.
  defp parts(Multimodal.Clip, more),
    do: [text_spec: spec(Text.ClipText, more), vision_spec: spec(Vision.ClipVision, more)]

  defp parts(Multimodal.Blip, more) do
    text = spec(Text.BlipText, [architecture: :for_causal_language_modeling, encoder_hidden_size: 12] ++ more)
    [text_spec: text, vision_spec: spec(Vision.BlipVision, more)]
  end

  defp parts(_module, _more), do: []

  # Padding behind the first sequence.
  @mask [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]]

  @doc "A batch of two; of texts, with a mask of keys."
  def inputs(%module{} = spec, mask \\ @mask) do
    inputs = for {name, template} <- module.input_template(spec), into: %{}, do: {name, input(name, template)}
    if inputs["input_ids"], do: Map.put(inputs, "attention_mask", Nx.tensor(mask)), else: inputs
  end

  defp input("input_features", _template), do: random({2, 16, 4})

  defp input(_name, %{type: {class, _}, shape: {_, _}}) when class in [:s, :u],
    do: Nx.remainder(Nx.iota({2, 8}), 40)

  defp input(_name, template), do: random(put_elem(template.shape, 0, 2))

  @doc "Normal numbers."
  def random(shape, seed \\ 3), do: Nx.Random.normal(Nx.Random.key(seed), shape: shape) |> elem(0)

  @doc "What is computed from is the output alone: those that are weights keep what they are made of."
  def output(%{logits: logits}), do: logits
  def output(%{hidden_state: hidden_state}), do: hidden_state
  def output(%{logits_per_text: logits}), do: logits

  @doc "A model's state and its function. Options are those of `Axon.build/2`."
  def build(model, inputs, opts \\ []) do
    {init, predict} = Axon.build(model, [compiler: Evaluator, seed: 5] ++ opts)
    {init.(inputs, Axon.ModelState.empty()), predict}
  end

  @doc """
  A function of parameters and inputs that gives a loss and its gradients, by a model's function in training. Weights, one for each row
  of an output that has rows, may leave some out.
  """
  def step(predict, state, weights \\ nil) do
    fn parameters, inputs ->
      Nx.Defn.value_and_grad(parameters, fn parameters ->
        %{prediction: prediction} = predict.(%{state | data: merge(state.data, parameters)}, inputs)
        sines = Nx.sin(output(prediction))

        Nx.mean(
          if(weights && Nx.rank(sines) == 3, do: Nx.multiply(sines, Nx.new_axis(weights, -1)), else: sines)
        )
      end)
    end
  end

  @doc "The parameters that a step differentiates by."
  def parameters(state), do: Axon.ModelState.trainable_parameters(state)

  # A layer may have a state beside its parameters.
  defp merge(data, parameters), do: Map.merge(data, parameters, fn _layer, x, y -> Map.merge(x, y) end)

  @doc "The architecture in which a family writes text, if it does."
  def generator(module) do
    if Code.ensure_loaded?(module) and function_exported?(module, :init_cache, 4),
      do:
        Enum.find([:for_conditional_generation, :for_causal_language_modeling], &(&1 in module.architectures()))
  end

  @doc "A prompt for `generate/2`: of text with padding in front, of sound, of pictures."
  def prompt(%{__struct__: Audio.Whisper} = spec),
    do: %{"input_features" => inputs(spec)["input_features"], "seed" => Nx.tensor([1, 2])}

  def prompt(%{__struct__: Multimodal.Blip} = spec),
    do: %{"pixel_values" => inputs(spec)["pixel_values"], "seed" => Nx.tensor([1, 2])}

  def prompt(_spec) do
    %{
      "input_ids" => Nx.tensor([[3, 5, 7, 9], [2, 4, 6, 8]]),
      "attention_mask" => Nx.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]),
      "seed" => Nx.tensor([1, 2])
    }
  end

  @doc "A function of state and prompt that gives five tokens a sequence."
  def generate(model, spec) do
    config = [max_new_tokens: 5, pad_token_id: 0, bos_token_id: 1, decoder_start_token_id: 1]
    generate = Generation.build_generate(model, spec, struct(GenerationConfig, config))
    &generate.(&1, &2).token_ids
  end
end
