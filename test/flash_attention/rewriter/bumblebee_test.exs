defmodule FlashAttention.Rewriter.BumblebeeTest do
  # Every family of Bumblebee's models with attention, small and with random parameters: how many attentions are found, and
  # that outputs, tokens and gradients stay what they are.
  use ExUnit.Case, async: true

  alias Bumblebee.Text
  alias FlashAttention.Rewriter
  alias FlashAttention.Test.BumblebeeFamilies, as: Families
  alias Nx.Defn.{Composite, Evaluator}

  @moduletag :bumblebee
  @moduletag :capture_log
  @compile {:no_warn_undefined, [Axon, Axon.ModelState, Bumblebee, Composite, Nx, Nx.Defn, Nx.Type, Rewriter]}

  # In f64, where rounding hides nothing.
  defp in_f64(container),
    do: Composite.traverse(container, &if(Nx.Type.float?(Nx.type(&1)), do: Nx.as_type(&1, :f64), else: &1))

  defp build(model, inputs, mode) do
    {state, predict} = Families.build(model, inputs, mode: mode)
    {in_f64(state), predict}
  end

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

  for {module, attentions} <- Families.all() do
    test "#{inspect(module)}: #{attentions} attentions, in inference and in training" do
      spec = Families.spec(unquote(module))
      model = Bumblebee.build_model(spec)
      inputs = in_f64(Families.inputs(spec))

      {state, predict} = build(model, inputs, :inference)
      infer = fn state, inputs -> Families.output(predict.(state, inputs)) end
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
      spec = Families.spec(unquote(module), dropout_rate: 0.1, attention_dropout_rate: 0.2)
      inputs = in_f64(Families.inputs(spec))
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

  # Their convolutions take too long here to be computed: what is found is asked for.
  @pictures [sample_size: 8, hidden_sizes: [32, 32], depth: 1]
  @unet [
          down_block_types: [:cross_attention_down_block, :down_block],
          up_block_types: [:up_block, :cross_attention_up_block],
          cross_attention_size: 12
        ] ++ @pictures

  for {module, config, attentions} <- [
        {Bumblebee.Diffusion.UNet2DConditional, @unet, 8},
        {Bumblebee.Diffusion.VaeKl,
         [down_block_types: [:down_block, :down_block], up_block_types: [:up_block, :up_block]] ++ @pictures, 2}
      ] do
    test "#{inspect(module)}: #{attentions} attentions are found, in inference and in training" do
      module = unquote(module)
      spec = Bumblebee.configure(struct(module, architecture: :base), unquote(config))

      inputs =
        for {name, template} <- module.input_template(spec), into: %{} do
          # Of more than one word.
          {name, if(name == "encoder_hidden_state", do: Nx.template({1, 5, 12}, :f32), else: template)}
        end

      model = Bumblebee.build_model(spec)

      for {mode, expected} <- [inference: ~r/seqlen/, train: ~r/with dq, dk, dv/] do
        {init, predict} = Axon.build(model, mode: mode)

        state =
          Nx.Defn.debug_expr(init).(inputs, Axon.ModelState.empty()) |> Composite.traverse(&Nx.to_template/1)

        places = Rewriter.explain(of_mode(mode, predict, state), [state.data, inputs])
        assert length(places) == unquote(attentions)
        assert Enum.all?(places, &(&1.rewritten and &1.as =~ expected)), inspect(places)
      end
    end
  end

  defp of_mode(:inference, predict, state),
    do: fn data, inputs -> predict.(%{state | data: data}, inputs).sample end

  defp of_mode(:train, predict, state) do
    fn data, inputs ->
      Nx.Defn.grad(data, fn data ->
        Nx.sum(Nx.sin(predict.(%{state | data: data}, inputs).prediction.sample))
      end)
    end
  end

  # The mean of sines, and its gradients by what is trained.
  defp training_step(model, inputs) do
    {state, predict} = build(model, inputs, :train)
    {Families.parameters(state), Families.step(predict, state)}
  end

  test "rows that see nothing are what they are in Bumblebee" do
    spec = Families.spec(Text.Gpt2)
    model = Bumblebee.build_model(spec)
    inputs = Families.inputs(spec, [[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])
    {state, predict} = build(model, inputs, :inference)
    assert_close(fn state, inputs -> Families.output(predict.(state, inputs)) end, [state, inputs])
  end

  test "weights that are outputs stay, and are computed beside where that is wanted" do
    spec = Families.spec(Text.Bart, architecture: :base)
    inputs = in_f64(Families.inputs(spec))
    {state, predict} = build(Bumblebee.build_model(spec), inputs, :inference)
    assert [_, _, _] = places = Rewriter.explain(predict, [state, inputs])
    assert Enum.all?(places, &(&1[:reason] == "its scores or weights are a result themselves"))
    assert [%{rewritten: true}, _, _] = Rewriter.explain(predict, [state, inputs], weights: :keep)
  end

  for {module, _attentions} <- Families.all(), Families.generator(module) != nil do
    test "#{inspect(module)}: generation writes the same tokens" do
      spec = Families.spec(unquote(module), architecture: Families.generator(unquote(module)))
      model = Bumblebee.build_model(spec)
      {state, _predict} = Families.build(model, Families.inputs(spec))
      generate = Families.generate(model, spec)

      [original, rewritten] =
        for compiler <- [Evaluator, Rewriter],
            do: Nx.to_list(Nx.Defn.jit_apply(generate, [state, Families.prompt(spec)], compiler: compiler))

      assert original == rewritten
      places = Rewriter.explain(generate, [state, Families.prompt(spec)])
      assert length(places) >= 3 and Enum.all?(places, & &1.rewritten)
    end
  end
end
