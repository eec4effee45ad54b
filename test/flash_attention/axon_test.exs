defmodule FlashAttention.AxonTest do
  use ExUnit.Case, async: true

  alias FlashAttention.Test.{Forwards, Transformer}

  @moduletag :axon
  @moduletag :capture_log
  @compile {:no_warn_undefined,
            [
              Axon,
              Axon.Loop,
              Axon.ModelState,
              Axon.MixedPrecision,
              Nx,
              Nx.Defn,
              Nx.Random,
              Polaris.Optimizers,
              FlashAttention.Axon,
              Forwards,
              Transformer
            ]}

  defp run(model, inputs, opts \\ []) do
    {init, predict} = Axon.build(model, [compiler: Nx.Defn.Evaluator, seed: 3] ++ opts)
    state = init.(inputs, Axon.ModelState.empty())
    {predict.(state, inputs), state}
  end

  defp random(seed, shape, type \\ :f32),
    do: Nx.Random.normal(Nx.Random.key(seed), shape: shape, type: type) |> elem(0)

  test "attention is FlashAttention.attention/4 as a layer" do
    [q, k, v] = for name <- ["q", "k", "v"], do: Axon.input(name)
    inputs = %{"q" => random(1, {2, 5, 4, 8}), "k" => random(2, {2, 7, 2, 8}), "v" => random(3, {2, 7, 2, 8})}
    %{"q" => tq, "k" => tk, "v" => tv} = inputs

    for opts <- [[], [num_sinks: 0]] do
      {o, state} = run(FlashAttention.Axon.attention(q, k, v, opts), inputs)
      assert o == FlashAttention.attention(tq, tk, tv)
      assert state.data == %{}
    end

    opts = [causal: false, window: {3, 1}, softcap: 5.0, scale: 0.2]
    {o, _} = run(FlashAttention.Axon.attention(q, k, v, opts ++ [name: "here"]), inputs)
    assert o == FlashAttention.attention(tq, tk, tv, opts)
  end

  test "a layer says that no backward follows in inference, where nobody says otherwise" do
    [q, k, v] = for name <- ["q", "k", "v"], do: Axon.input(name)

    inputs =
      for {name, seed} <- [{"q", 1}, {"k", 2}, {"v", 3}], into: %{}, do: {name, random(seed, {1, 6, 3, 4})}

    for {opts, mode, expected} <- [
          {[], :inference, true},
          {[inference: false], :inference, false},
          {[], :train, nil},
          {[dropout_rate: 0.1], :train, nil},
          {[dropout_rate: 0.1], :inference, true}
        ] do
      {init, predict} = Axon.build(FlashAttention.Axon.attention(q, k, v, opts), mode: mode)
      state = init.(inputs, Axon.ModelState.empty())
      assert [told] = Nx.Defn.debug_expr(predict).(state, inputs) |> Forwards.options()
      assert told[:inference] == expected
    end
  end

  test "sinks are parameters, f32 under mixed precision too" do
    [q, k, v] = for name <- ["q", "k", "v"], do: Axon.input(name)
    model = FlashAttention.Axon.attention(q, k, v, num_sinks: 2, name: "attention")

    inputs =
      for {name, seed} <- [{"q", 1}, {"k", 2}, {"v", 3}], into: %{}, do: {name, random(seed, {1, 6, 3, 4})}

    %{"q" => tq, "k" => tk, "v" => tv} = inputs

    {o, state} = run(model, inputs)
    assert state.data == %{"attention" => %{"sink" => Nx.broadcast(0.0, {2, 3})}}
    assert o == FlashAttention.attention(tq, tk, tv, sink: Nx.broadcast(0.0, {2, 3}))

    policy = Axon.MixedPrecision.create_policy(compute: {:bf, 16}, output: {:bf, 16})
    {o, _} = model |> Axon.MixedPrecision.apply_policy(policy) |> run(inputs)
    assert Nx.type(o) == {:bf, 16}
  end

  test "sinks of a row's own come from another layer, in f32 whatever the precision of the model" do
    [q, k, v, sinks] = for name <- ["q", "k", "v", "sinks"], do: Axon.input(name)
    model = FlashAttention.Axon.attention(q, k, v, sink: Axon.nx(sinks, &Nx.multiply(&1, 2)))
    shapes = %{"q" => {2, 6, 3, 4}, "k" => {2, 6, 3, 4}, "v" => {2, 6, 3, 4}, "sinks" => {2, 6, 2, 3}}
    inputs = for {{name, shape}, seed} <- Enum.with_index(shapes), into: %{}, do: {name, random(seed, shape)}
    %{"q" => tq, "k" => tk, "v" => tv, "sinks" => sinks_of_rows} = inputs
    {o, state} = run(model, inputs)
    assert o == FlashAttention.attention(tq, tk, tv, sink: Nx.multiply(sinks_of_rows, 2))
    assert state.data == %{}

    policy = Axon.MixedPrecision.create_policy(compute: {:bf, 16}, output: {:bf, 16})
    {o, _} = model |> Axon.MixedPrecision.apply_policy(policy) |> run(inputs)
    assert Nx.type(o) == {:bf, 16}

    error =
      assert_raise FlashAttention.Error, fn ->
        FlashAttention.Axon.attention(q, k, v, sink: sinks, num_sinks: 1)
      end

    assert Exception.message(error) == "num_sinks: expected 0 beside a layer that gives sinks, got 1"
  end

  test "multi-head attention projects its input to sinks of each row" do
    opts = [num_heads: 3, head_dim: 4, use_bias: false, name: "block"]
    model = FlashAttention.Axon.multi_head_attention(Axon.input("x"), [row_sinks: 2] ++ opts)
    x = random(1, {2, 5, 7})
    {o, state} = run(model, x)
    assert Nx.shape(state.data["block.sinks"]["kernel"]) == {7, 6}

    [q, k, v, sink] =
      for {layer, shape} <- [
            {"query", {2, 5, 3, 4}},
            {"key", {2, 5, 3, 4}},
            {"value", {2, 5, 3, 4}},
            {"sinks", {2, 5, 2, 3}}
          ],
          do: x |> Nx.dot(state.data["block." <> layer]["kernel"]) |> Nx.reshape(shape)

    attended = FlashAttention.attention(q, k, v, sink: sink) |> Nx.reshape({2, 5, 12})
    expected = Nx.dot(attended, state.data["block.output"]["kernel"])
    assert Nx.to_number(Nx.reduce_max(Nx.abs(Nx.subtract(o, expected)))) < 1.0e-5

    # They are learned: other sinks, another result, and a gradient that says so.
    {_init, predict} = Axon.build(model, compiler: Nx.Defn.Evaluator)

    loss = fn kernel ->
      state.data["block.sinks"]["kernel"] |> put_in(kernel) |> predict.(x) |> Nx.sin() |> Nx.sum()
    end

    gradient = Nx.Defn.grad(state.data["block.sinks"]["kernel"], loss)
    step = random(9, {7, 6})
    slope = gradient |> Nx.multiply(step) |> Nx.sum() |> Nx.to_number()

    at = fn size ->
      state.data["block.sinks"]["kernel"] |> Nx.add(Nx.multiply(step, size)) |> loss.() |> Nx.to_number()
    end

    assert abs(slope) > 1.0e-3
    assert_in_delta (at.(1.0e-2) - at.(-1.0e-2)) / 2.0e-2, slope, 1.0e-2 * abs(slope) + 1.0e-3
  end

  test "slopes of distances come from another layer, in f32 whatever the precision of the model" do
    [q, k, v, slopes] = for name <- ["q", "k", "v", "slopes"], do: Axon.input(name)

    model =
      FlashAttention.Axon.attention(q, k, v, alibi_slopes: Axon.nx(slopes, &Nx.divide(&1, 2)), num_sinks: 1)

    random =
      for {name, seed} <- [{"q", 1}, {"k", 2}, {"v", 3}], into: %{}, do: {name, random(seed, {1, 6, 3, 4})}

    inputs = Map.put(random, "slopes", Nx.tensor([[1.0, 0.25, 2.0]]))
    options = [alibi_slopes: Nx.tensor([[0.5, 0.125, 1.0]]), sink: Nx.broadcast(0.0, {1, 3})]
    {o, _} = run(model, inputs)
    assert o == FlashAttention.attention(random["q"], random["k"], random["v"], options)

    policy = Axon.MixedPrecision.create_policy(compute: {:bf, 16}, output: {:bf, 16})
    {o, _} = model |> Axon.MixedPrecision.apply_policy(policy) |> run(inputs)
    [q, k, v] = for name <- ["q", "k", "v"], do: Nx.as_type(random[name], :bf16)
    assert o == FlashAttention.attention(q, k, v, options)
  end

  test "multi-head attention has the shapes and parameters that its documentation says" do
    input = Axon.input("x")
    memory = Axon.input("memory")

    model =
      FlashAttention.Axon.multi_head_attention(input,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 6,
        units: 10,
        memory: memory,
        causal: false,
        use_bias: false,
        num_sinks: 1,
        name: "block"
      )

    {o, state} = run(model, %{"x" => random(1, {2, 5, 12}), "memory" => random(2, {2, 9, 7})})
    assert Nx.shape(o) == {2, 5, 10}

    shapes =
      for {layer, parameters} <- state.data,
          {name, parameter} <- parameters,
          do: {layer, name, Nx.shape(parameter)}

    assert Enum.sort(shapes) == [
             {"block.attention", "sink", {1, 4}},
             {"block.key", "kernel", {7, 12}},
             {"block.output", "kernel", {24, 10}},
             {"block.query", "kernel", {12, 24}},
             {"block.value", "kernel", {7, 12}}
           ]
  end

  test "several layers without names get names of their own" do
    opts = [num_heads: 2, head_dim: 4]

    model =
      Axon.input("x")
      |> FlashAttention.Axon.multi_head_attention(opts)
      |> FlashAttention.Axon.multi_head_attention(opts)

    {_, state} = run(model, random(1, {1, 3, 5}))
    assert map_size(state.data) == 8
  end

  test "what is missing or wrong is said" do
    x = Axon.input("x")

    for {name, got, opts} <- [
          {:num_heads, "none", [head_dim: 4]},
          {:head_dim, "none", [num_heads: 4]},
          {:num_heads, "0", [num_heads: 0, head_dim: 4]},
          {:head_dim, "2.5", [num_heads: 1, head_dim: 2.5]},
          {:num_kv_heads, "-1", [num_heads: 1, head_dim: 4, num_kv_heads: -1]},
          {:units, ":all", [num_heads: 1, head_dim: 4, units: :all]}
        ] do
      error = assert_raise FlashAttention.Error, fn -> FlashAttention.Axon.multi_head_attention(x, opts) end
      assert Exception.message(error) == "#{name}: expected a whole number of at least 1, got #{got}"
    end

    # Where results lie is the compiler's choice, and a sink that is given would not be learned.
    for {opts, message} <- [
          {[casual: false], "opts: expected keys among causal, "},
          {[sink: Nx.iota({1, 2})], "opts: expected keys among causal, "},
          {[results: :device], "opts: expected keys among causal, "},
          {[window: 3], "window: expected {left, right}"},
          {[num_kv_heads: 3], "num_kv_heads: expected a divisor of num_heads 2, got 3"},
          {[memory: Nx.iota({1, 2, 3})], "memory: expected an Axon layer, got "},
          {[num_sinks: -1], "num_sinks: expected a whole number of at least 0, got -1"},
          {[row_sinks: -1], "row_sinks: expected a whole number of at least 0, got -1"},
          {[row_sinks: 1, num_sinks: 1], "num_sinks: expected 0 beside a layer that gives sinks, got 1"}
        ] do
      build = fn -> FlashAttention.Axon.multi_head_attention(x, [num_heads: 2, head_dim: 4] ++ opts) end
      assert Exception.message(assert_raise(FlashAttention.Error, build)) =~ message
    end
  end

  for {name, opts, steps} <- [
        {"causal", [], 40},
        {"windowed", [window: {4, 0}], 5},
        {"with sinks", [num_sinks: 2], 5}
      ] do
    test "a transformer (#{name}) learns with Axon.Loop exactly as it does with plain attention" do
      batches = Transformer.batches(unquote(steps))
      flash = Transformer.losses(Transformer.model(:flash, unquote(opts)), batches)
      plain = Transformer.losses(Transformer.model(:plain, unquote(opts)), batches)

      assert length(flash) == unquote(steps)
      for {x, y} <- Enum.zip(flash, plain), do: assert_in_delta(x, y, 1.0e-4)
      # And it does learn.
      assert List.last(flash) < hd(flash) * (1 - unquote(steps) / 120)
    end
  end

  test "weights are dropped in training, by a key that the layer keeps" do
    [q, k, v] = for name <- ["q", "k", "v"], do: Axon.input(name)
    opts = [dropout_rate: 0.4, seed: 7, num_sinks: 1, name: "attention"]
    model = FlashAttention.Axon.attention(q, k, v, opts)

    inputs =
      for {name, seed} <- [{"q", 1}, {"k", 2}, {"v", 3}], into: %{}, do: {name, random(seed, {1, 6, 3, 4})}

    options = [sink: Nx.broadcast(0.0, {1, 3})]
    attention = &FlashAttention.attention(inputs["q"], inputs["k"], inputs["v"], options ++ &1)

    {o, state} = run(model, inputs)
    assert o == attention.([])
    key = Nx.Random.key(7)
    assert state.data["attention"]["key"] == key

    {_init, predict} = Axon.build(model, mode: :train, compiler: Nx.Defn.Evaluator)

    for _step <- 1..2, reduce: {state, key} do
      {state, key} ->
        keys = Nx.Random.split(key)
        %{prediction: o, state: next} = predict.(state, inputs)
        assert o == attention.(dropout: 0.4, dropout_seed: keys[1])
        assert next["attention"]["key"] == keys[0]
        {put_in(state.data["attention"]["key"], keys[0]), keys[0]}
    end

    assert_raise FlashAttention.Error, ~r/^dropout: expected a number from 0/, fn ->
      FlashAttention.Axon.attention(q, k, v, dropout_rate: 1)
    end
  end

  describe "masks" do
    alias FlashAttention.Mask

    @attention [num_heads: 2, head_dim: 4, units: 6, name: "attention"]

    defp with_mask(mask, opts \\ []),
      do: FlashAttention.Axon.multi_head_attention(Axon.input("x"), [mask: mask] ++ opts ++ @attention)

    defp predict(model, state, inputs), do: Axon.predict(model, state, inputs, compiler: Nx.Defn.Evaluator)

    defp assert_close(x, y),
      do: assert(Nx.to_number(Nx.reduce_max(Nx.abs(Nx.subtract(x, y)))) < 1.0e-5)

    test "lengths of an input: a padded batch gives what its sequences give alone" do
      mask = FlashAttention.Axon.mask(Axon.input("lengths"), &Mask.lengths/1)
      model = with_mask(mask, causal: false)
      x = random(1, {2, 6, 5})
      {_, state} = run(model, %{"x" => x, "lengths" => Nx.tensor([1, 1])})
      plain = FlashAttention.Axon.multi_head_attention(Axon.input("x"), [causal: false] ++ @attention)
      {_init, predict} = Axon.build(model, compiler: Nx.Defn.Evaluator)

      for lengths <- [[6, 3], [1, 4]] do
        o = predict.(state, %{"x" => x, "lengths" => Nx.tensor(lengths)})

        for {length, b} <- Enum.with_index(lengths) do
          alone = predict(plain, state, %{"x" => x[[b..b, 0..(length - 1)]]})
          assert_close(o[[b..b, 0..(length - 1)]], alone)
        end
      end
    end

    test "packed sequences and segments, of inputs or as they are, forward and backward" do
      x = random(1, {1, 7, 5})
      cu_seqlens = Nx.tensor([0, 4, 7])
      ids = Nx.tensor([[5, 5, 5, 5, 2, 2, 2]])
      inputs = %{"x" => x, "cu_seqlens" => cu_seqlens, "ids" => ids, "mask" => Mask.packed([4, 3])}
      plain = FlashAttention.Axon.multi_head_attention(Axon.input("x"), @attention)
      {_, state} = run(plain, inputs)

      alone =
        Nx.concatenate([predict(plain, state, x[[.., 0..3]]), predict(plain, state, x[[.., 4..6]])], axis: 1)

      for mask <- [
            FlashAttention.Axon.mask(Axon.input("cu_seqlens"), &Mask.packed_at/1, name: "mask"),
            FlashAttention.Axon.mask(Axon.input("ids"), &Mask.segments(&1, max_segments: 3)),
            FlashAttention.Axon.mask(List.duplicate(Axon.input("cu_seqlens"), 2), &Mask.packed_at/2),
            Axon.input("mask"),
            Mask.packed([4, 3])
          ] do
        model = with_mask(mask)
        assert_close(predict(model, state, inputs), alone)

        loss = fn data, model, inputs ->
          {_, predict} = Axon.build(model, compiler: Nx.Defn.Evaluator)
          predict.(%{state | data: data}, inputs) |> Nx.sin() |> Nx.sum()
        end

        gradients = Nx.Defn.grad(state.data, &loss.(&1, model, inputs))

        expected =
          Nx.Defn.grad(state.data, fn data ->
            Nx.add(loss.(data, plain, x[[.., 0..3]]), loss.(data, plain, x[[.., 4..6]]))
          end)

        for {layer, parameters} <- expected, {name, gradient} <- parameters do
          assert Nx.to_number(Nx.sum(Nx.abs(gradient))) > 1.0e-3 or name == "bias"
          assert_close(gradients[layer][name], gradient)
        end
      end
    end

    test "stand beside sinks and a key of the layer's own" do
      mask = FlashAttention.Axon.mask(Axon.input("lengths"), &Mask.lengths/1)
      model = with_mask(mask, causal: false, num_sinks: 3, dropout_rate: 0.4, seed: 7)
      inputs = %{"x" => random(1, {2, 6, 5}), "lengths" => Nx.tensor([6, 3])}
      {whole, state} = run(model, inputs)
      assert %{"sink" => sink, "key" => key} = state.data["attention.attention"]
      assert {Nx.shape(sink), Nx.type(sink)} == {{3, 2}, {:f, 32}}
      assert key == Nx.Random.key(7)

      # What is padding nobody sees, whatever is dropped.
      {_init, predict} = Axon.build(model, mode: :train, compiler: Nx.Defn.Evaluator)
      padded = update_in(inputs["x"], &Nx.put_slice(&1, [1, 3, 0], Nx.broadcast(9.0, {1, 3, 5})))
      [o, same] = for inputs <- [inputs, padded], do: predict.(state, inputs).prediction
      assert_close(o[[1, 0..2]], same[[1, 0..2]])
      assert Nx.to_number(Nx.reduce_max(Nx.abs(Nx.subtract(o, whole)))) > 0.1
    end

    test "keep whole numbers under mixed precision, and train with Axon.Loop" do
      policy = Axon.MixedPrecision.create_policy(params: {:bf, 16}, compute: {:bf, 16}, output: {:bf, 16})
      mask = FlashAttention.Axon.mask(Axon.input("cu_seqlens"), &Mask.packed_at/1)
      model = mask |> with_mask() |> Axon.MixedPrecision.apply_policy(policy)
      inputs = %{"x" => random(1, {1, 600, 5}), "cu_seqlens" => Nx.tensor([0, 299, 600])}
      {o, state} = run(model, inputs)
      assert Nx.type(o) == {:bf, 16}
      alone = predict(model, state, %{"x" => inputs["x"][[.., 299..599]], "cu_seqlens" => Nx.tensor([0, 301])})

      # Where products are made of tiles (AMX), sums round differently at another row: two steps of bf16 between 2 and 4,
      # where the largest numbers are (measured: 2^-7, a row's mean 3.0e-4).
      distance = fn o, rows ->
        Nx.subtract(Nx.as_type(o[[.., rows]], :f64), Nx.as_type(alone, :f64)) |> Nx.abs() |> Nx.reduce_max()
      end

      tolerance = 2 * 2 ** -6
      assert Nx.to_number(distance.(o, 299..599)) <= tolerance

      # 299 is no number of bf16: were it 298 or 300, rows would see others than alone (measured: 0.85 and 2.6), as far
      # off as rows of another place (2.3).
      for other <- [298, 300] do
        wrong = predict(model, state, %{inputs | "cu_seqlens" => Nx.tensor([0, other, 600])})
        assert Nx.to_number(distance.(wrong, 299..599)) > 8 * tolerance
      end

      assert Nx.to_number(distance.(o, 298..598)) > 8 * tolerance

      data =
        for seed <- 1..3, do: {%{inputs | "x" => random(seed, {1, 600, 5})}, Nx.broadcast(1.0, {1, 600, 6})}

      trained =
        with_mask(mask)
        |> Axon.Loop.trainer(:mean_squared_error, Polaris.Optimizers.adam(learning_rate: 0.1), log: 0)
        |> Axon.Loop.run(data, Axon.ModelState.empty(), epochs: 1, compiler: Nx.Defn.Evaluator)

      assert map_size(trained.data) == 4
    end

    test "what is no mask is said" do
      input = Axon.input("lengths")

      for {arguments, message} <- [
            {[5, &Mask.lengths/1], "inputs: expected layers of Axon, got [5]"},
            {[[], &Mask.lengths/1], "fun: expected a function of 0 inputs, 1 to 3, got "},
            {[input, &Mask.packed_at/2], "fun: expected a function of 1 inputs, 1 to 3, got "},
            {[input, &Mask.lengths/1, [side: :left]], "opts: expected keys among name, meta, got :side"}
          ] do
        call = fn -> apply(FlashAttention.Axon, :mask, arguments) end
        assert Exception.message(assert_raise(FlashAttention.Error, call)) =~ message
      end

      assert_raise FlashAttention.Error, ~r/^mask: expected a FlashAttention.Mask/, fn -> with_mask(:packed) end

      assert_raise Axon.CompileError, ~r/mask: expected a FlashAttention.Mask/, fn ->
        run(with_mask(Axon.input("lengths")), %{"x" => random(1, {1, 2, 5}), "lengths" => Nx.tensor([1])})
      end
    end
  end
end
