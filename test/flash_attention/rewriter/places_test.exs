defmodule FlashAttention.Rewriter.PlacesTest do
  # Where a compiler goes in programs that use Axon and Bumblebee: it gets there, its options with it, and the numbers stay.
  # Logs are those of all tests that run at the time: none other does.
  use ExUnit.Case, async: false

  alias FlashAttention.Rewriter
  alias FlashAttention.Test.BumblebeeFamilies, as: Families
  alias Nx.Defn.Evaluator

  import ExUnit.CaptureLog

  @moduletag :axon
  @moduletag :capture_log
  @compile {:no_warn_undefined,
            [Axon, Axon.Activations, Axon.Loop, Axon.ModelState, Bumblebee, Bumblebee.Vision] ++
              [Nx, Nx.Defn, Nx.Random, Nx.Serving, Polaris.Optimizers, Rewriter]}

  @rewriter [compiler: Rewriter, report: :error]

  defp normal(seed, shape), do: Nx.Random.normal(Nx.Random.key(seed), shape: shape, type: :f32) |> elem(0)

  # A layer of attention as guides of Axon have it, between layers with parameters.
  defp model do
    x = Axon.input("x", shape: {nil, 6, 8})

    [Axon.dense(x, 8), Axon.dense(x, 8), Axon.dense(x, 8)]
    |> then(&Axon.layer(fn q, k, v, _opts -> attention(q, k, v) end, &1, name: "attention"))
    |> Axon.dense(1)
  end

  defp attention(q, k, v) do
    s = Nx.divide(Nx.dot(q, [2], [0], k, [2], [0]), 2)
    Nx.dot(Axon.Activations.softmax(s, axis: -1), [2], [0], v, [1], [0])
  end

  defp kernels(state), do: for(n <- 0..3, do: state.data["dense_#{n}"]["kernel"])

  defp assert_close(xs, ys) do
    for {x, y} <- Enum.zip(xs, ys),
        do: assert(x |> Nx.subtract(y) |> Nx.abs() |> Nx.reduce_max() |> Nx.to_number() <= 1.0e-5)
  end

  test "Axon.Loop trains through it" do
    data = for n <- 1..3, do: {normal(n, {2, 6, 8}), normal(10 + n, {2, 6, 1})}

    train = fn opts ->
      model()
      |> Axon.Loop.trainer(:mean_squared_error, Polaris.Optimizers.sgd(learning_rate: 0.1), log: 0, seed: 3)
      |> Axon.Loop.run(data, Axon.ModelState.empty(), [epochs: 2] ++ opts)
      |> kernels()
    end

    plain = train.(compiler: Evaluator)
    {rewritten, log} = with_log(fn -> train.(@rewriter) end)
    assert log =~ "with dq, dk, dv"
    refute log =~ "stays"
    assert_close(plain, rewritten)

    [untrained | _] =
      kernels(elem(Axon.build(model(), seed: 3), 0).(normal(1, {2, 6, 8}), Axon.ModelState.empty()))

    assert Nx.to_number(Nx.all_close(untrained, hd(plain))) == 0
  end

  test "Axon.build, Axon.predict and default options lead to it" do
    x = normal(1, {2, 6, 8})
    {init, plain} = Axon.build(model(), seed: 3)
    state = init.(x, Axon.ModelState.empty())
    expected = plain.(state, x)

    for predict <- [
          fn -> elem(Axon.build(model(), @rewriter), 1).(state, x) end,
          fn -> Axon.predict(model(), state, x, @rewriter) end,
          fn ->
            Nx.Defn.default_options(@rewriter)
            plain.(state, x)
          end
        ] do
      # Default options are those of a process.
      {o, log} = with_log(fn -> predict |> Task.async() |> Task.await(:infinity) end)
      assert log =~ "f32 batch 2, seqlen 6 x 6"
      assert_close([expected], [o])
    end
  end

  @tag :bumblebee
  test "Bumblebee's servings compile through it, at once or when they are first called" do
    spec = Families.spec(Bumblebee.Vision.Vit)
    model = Bumblebee.build_model(spec)
    {state, _predict} = Families.build(model, Families.inputs(spec))
    info = %{model: model, params: state, spec: spec}
    featurizer = Bumblebee.configure(Bumblebee.Vision.VitFeaturizer, size: %{height: 8, width: 8})

    embed = fn opts ->
      info
      |> Bumblebee.Vision.image_embedding(featurizer, opts)
      |> Nx.Serving.run(Nx.iota({8, 8, 3}, type: :u8))
      |> Map.fetch!(:embedding)
    end

    expected = embed.(defn_options: [compiler: Evaluator])

    for more <- [[], [compile: [batch_size: 1]], [preallocate_params: true]] do
      {embedding, log} = with_log(fn -> embed.([defn_options: @rewriter] ++ more) end)
      assert length(String.split(log, "-> f32 batch 1, seqlen 5 x 5, heads 3:3")) == 3
      assert_close([expected], [embedding])
    end
  end
end
