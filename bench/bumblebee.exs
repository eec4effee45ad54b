# Every family of Bumblebee's models, swapped and not: in inference, generation and a step of training. `make bench-bumblebee`
# prints the page, where Nx, Axon and Bumblebee are compiled (ERL_LIBS).
defmodule Bench.Bumblebee do
  alias FlashAttention.Bumblebee, as: Flash
  alias FlashAttention.Test.BumblebeeFamilies, as: Families
  alias Nx.Defn.{Composite, Evaluator}

  @compile {:no_warn_undefined, [Bumblebee, Composite, Flash, Nx, Nx.Defn]}

  def run do
    IO.write("""
    # Bumblebee's families, swapped

    `ERL_LIBS=~/compiled make bench-bumblebee`. Every family of Bumblebee #{version(:bumblebee)} with attention, in a tiny configuration with
    random parameters, swapped by `FlashAttention.Bumblebee.swap_attention/1` and not: Nx #{version(:nx)}, its evaluator, Axon #{version(:axon)},
    on the CPU, f32, a batch of two, of which one is padded.

    * Attentions: how many the model has, and how many the library computes of them in inference and in training, there with
      weights dropped out at a rate of 0.1 (`explain/3`).
    * Inference: the largest difference of logits or hidden states, as a part of the largest of these.
    * Generation: five greedy tokens with a cache, after a prompt with padding in front of one sequence.
    * Training: a step without dropout, whose bits are not Bumblebee's; the loss is the mean sine of what inference compares,
      without padding. The largest difference of the loss, as a part of 1, and of gradients, as a part of the largest.

    Left with Bumblebee's layers: none of these. Not run: models of `Bumblebee.Diffusion`, which take minutes here.

    | model | attentions | inference | generation | loss | gradients |
    |---|---|---|---|---|---|
    """)

    for {module, attentions} <- Families.all(), do: IO.puts(line(module, attentions))
  end

  defp version(app) do
    Application.load(app)
    Application.spec(app, :vsn)
  end

  defp line(module, attentions) do
    spec = Families.spec(module)
    inputs = Families.inputs(spec)
    computed = computed(spec, inputs, :inference)
    trained = computed(Families.spec(module, attention_dropout_rate: 0.1), inputs, :train)
    {loss, gradients} = training(spec, inputs)

    cells = [
      "#{attentions}, #{computed}, #{trained}",
      inference(spec, inputs),
      generation(module),
      loss,
      gradients
    ]

    "| #{inspect(module) |> String.replace("Bumblebee.", "")} | #{Enum.join(cells, " | ")} |"
  end

  defp computed(spec, inputs, mode) do
    explained = spec |> Bumblebee.build_model() |> Flash.explain(inputs, mode: mode)
    Enum.count(explained, &(&1.computed_by == :flash_attention))
  end

  # What a function of a model gives for it and for the swapped one.
  defp both(spec, fun) do
    model = Bumblebee.build_model(spec)
    for model <- [model, Flash.swap_attention(model)], do: fun.(model)
  end

  defp inference(spec, inputs) do
    both(spec, fn model ->
      {state, predict} = Families.build(model, inputs)
      Families.output(predict.(state, inputs))
    end)
    |> difference()
  end

  defp training(spec, inputs) do
    [{loss, gradients}, {swapped_loss, swapped_gradients}] =
      both(spec, fn model ->
        {state, predict} = Families.build(model, inputs, mode: :train)
        arguments = [Families.parameters(state), inputs]
        step = Families.step(predict, state, inputs["attention_mask"])
        Nx.Defn.jit_apply(step, arguments, compiler: Evaluator)
      end)

    {show(abs(Nx.to_number(loss) - Nx.to_number(swapped_loss))), difference([gradients, swapped_gradients])}
  end

  defp generation(module) do
    if architecture = Families.generator(module) do
      spec = Families.spec(module, architecture: architecture)
      {state, _predict} = Families.build(Bumblebee.build_model(spec), Families.inputs(spec))

      [original, swapped] =
        both(spec, fn model ->
          arguments = [state, Families.prompt(spec)]
          Nx.to_list(Nx.Defn.jit_apply(Families.generate(model, spec), arguments, compiler: Evaluator))
        end)

      if original == swapped, do: "same", else: "OTHER TOKENS"
    end
  end

  defp difference(containers) do
    [original, swapped] = Enum.map(containers, &Composite.flatten_list([&1]))
    differences = for {x, y} <- Enum.zip(original, swapped), do: largest(Nx.subtract(x, y))
    show(Enum.max(differences) / Enum.max(Enum.map(original, &largest/1)))
  end

  defp largest(tensor), do: tensor |> Nx.abs() |> Nx.reduce_max() |> Nx.to_number()

  defp show(number), do: :io_lib.format("~.2e", [number * 1.0]) |> IO.iodata_to_binary()
end

Bench.Bumblebee.run()
