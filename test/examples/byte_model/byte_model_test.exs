defmodule FlashAttention.Examples.ByteModelTest do
  use ExUnit.Case, async: true

  alias FlashAttention.{Tensor, Training}
  alias FlashAttention.Examples.ByteModel
  alias FlashAttention.Training.{Optimizer, Parameter, Params}

  doctest FlashAttention.Examples.ByteModel

  @f64 {:f, 64}

  defp list(%Tensor{type: {:f, bits}, data: data}), do: for(<<x::float-size(bits)-native <- data>>, do: x)

  # Multiples of 1/8 between -1 and 1, so that sinks, which are f32, move by small powers of 2 without rounding.
  defp random_like(%Tensor{type: {:f, bits}} = tensor, seed) do
    {numbers, _} =
      Enum.map_reduce(list(tensor), :rand.seed_s(:exsss, seed), fn _, random ->
        {n, random} = :rand.uniform_s(17, random)
        {(n - 9) / 8, random}
      end)

    %{tensor | data: for(x <- numbers, into: <<>>, do: <<x::float-size(bits)-native>>)}
  end

  defp random_like(params, seed),
    do: Map.new(params, fn {key, value} -> {key, random_like(value, :erlang.phash2({seed, key}))} end)

  defp moved(params, direction, h) do
    {params, _slots} = Params.update(params, direction, %{}, &Parameter.update(&1, &2, &3, {:sgd, -h, 0}))
    params
  end

  defp dot(params, others) when is_struct(params),
    do: Enum.zip_with(list(params), list(others), &(&1 * &2)) |> Enum.sum()

  defp dot(params, others), do: Enum.map(params, fn {key, value} -> dot(value, others[key]) end) |> Enum.sum()

  # Forward alone.
  defp loss(stages, params, batch) do
    {inputs, _pullback} = stages.embed.(params, batch)
    {o, _pullback} = Training.attention(inputs, stages.attention)
    {loss, _pullback} = stages.head.(params, o, batch)
    loss
  end

  # One path to every table, so that each has its own gradient checked.
  @paths [[:query, :byte], [:query, :previous], [:key, :byte], [:key, :previous], [:value], [:sink]]

  for {heads, head_dim} <- [{4, 64}, {8, 64}, {1, 256}, {16, 16}, {64, 8}] do
    test "gradients agree with central differences, #{heads} heads of #{head_dim}" do
      model = ByteModel.new(num_heads: unquote(heads), head_dim: unquote(head_dim), seqlen: 5, type: @f64)
      stages = ByteModel.stages(model)
      params = model |> ByteModel.init(1) |> random_like(7)
      batch = ["abacabaa", "hello ba", <<0, 255, 0, 1, 255, 0, 255, 128>>]
      {_loss, gradients} = Training.value_and_gradients(stages, params, batch)
      h = :math.pow(2, -13)

      for path <- @paths do
        direction = params |> get_in(path) |> random_like(:erlang.phash2(path))

        loss = fn h ->
          loss(stages, moved(params, put_in_new(path, direction), h), batch)
        end

        slope = (loss.(h) - loss.(-h)) / (2 * h)
        assert abs(slope) > 1.0e-5, "#{inspect(path)}: nothing to compare"
        assert_in_delta dot(get_in(gradients, path), direction), slope, 1.0e-6 * (1 + abs(slope)), inspect(path)
      end
    end
  end

  defp put_in_new([key], value), do: %{key => value}
  defp put_in_new([key | path], value), do: %{key => put_in_new(path, value)}

  test "before training, every byte is equally likely" do
    model = ByteModel.new(seqlen: 6)
    loss = loss(ByteModel.stages(model), ByteModel.init(model, 3), ["abcdefghi"])
    assert_in_delta loss, :math.log(256), 1.0e-6
  end

  test "the loss is the cross entropy of the next byte: generation has the same odds" do
    # With one position, the loss is -log of the odds of the last byte.
    model = ByteModel.new(num_heads: 4, seqlen: 1, type: @f64)
    params = model |> ByteModel.init(1) |> random_like(5)
    stages = ByteModel.stages(model)

    likelihood = fn byte ->
      :math.exp(-loss(stages, params, [<<"\n\na", byte>>]))
    end

    likelihoods = for byte <- 0..255, do: likelihood.(byte)
    assert_in_delta Enum.sum(likelihoods), 1.0, 1.0e-9

    # A window of a single position has no way to see further, and neither has its generation.
    <<written>> = ByteModel.generate(model, params, "a", 1, temperature: 0)
    assert_in_delta Enum.at(likelihoods, written), Enum.max(likelihoods), 1.0e-12
  end

  test "generation agrees with the loss over a longer text" do
    model = ByteModel.new(num_heads: 8, head_dim: 64, seqlen: 9, type: @f64)
    params = model |> ByteModel.init(1) |> random_like(5)
    written = ByteModel.generate(model, params, "abc", 6, temperature: 0)
    text = "\n\n\nabc" <> written

    # No other last byte is likelier than the one that was written.
    window = binary_part(text, 0, 12)
    stages = ByteModel.stages(model)

    for byte <- Enum.take_every(0..255, 5), <<byte>> != binary_part(window, 11, 1) do
      assert loss(stages, params, [window]) <= loss(stages, params, [binary_part(window, 0, 11) <> <<byte>>])
    end
  end

  test "generation depends on its seed alone, and goes on beyond seqlen" do
    model = ByteModel.new(num_heads: 4, seqlen: 7)
    params = model |> ByteModel.init(1) |> random_like(2)
    one = ByteModel.generate(model, params, "the", 40, seed: 1)
    assert byte_size(one) == 40
    assert one == ByteModel.generate(model, params, "the", 40, seed: 1)
    assert one != ByteModel.generate(model, params, "the", 40, seed: 2)
    assert ByteModel.generate(model, params, "", 0) == ""
  end

  test "batches depend on seed and step, and hold windows of the text" do
    model = ByteModel.new(seqlen: 10)
    text = for n <- 0..255, into: <<>>, do: <<n>>
    batch = ByteModel.batch(model, text, 5, 1, 1)
    assert batch == ByteModel.batch(model, text, 5, 1, 1)
    assert batch != ByteModel.batch(model, text, 5, 1, 2)
    assert batch != ByteModel.batch(model, text, 5, 2, 1)
    assert length(batch) == 5
    for window <- batch, do: assert(byte_size(window) == 13 and :binary.match(text, window) != :nomatch)

    # The first and the last window can both be drawn.
    firsts =
      for step <- 1..200,
          <<first, _::binary>> <- ByteModel.batch(model, binary_part(text, 0, 15), 1, 0, step),
          do: first

    assert Enum.sort(Enum.uniq(firsts)) == [0, 1, 2]
  end

  test "documents are packed until there is no more room, whole or in pieces" do
    model = ByteModel.new(seqlen: 10)
    long = for n <- 97..122, into: <<>>, do: <<n>>
    documents = ByteModel.documents("\n\none\n\n" <> long <> "\n\n\n\nthree!", "\n\n")
    assert documents == {"\n\n\none\n\n", "\n\n\n" <> long <> "\n\n", "\n\n\nthree!\n\n"}
    batch = ByteModel.packed(model, documents, 4, 1, 1)
    assert batch == ByteModel.packed(model, documents, 4, 1, 1)
    assert batch != ByteModel.packed(model, documents, 4, 1, 2)

    windows =
      for step <- 1..100 do
        windows = ByteModel.packed(model, documents, 4, 0, step)
        assert Enum.sum(for window <- windows, do: byte_size(window) - 3) == 40
        {last, whole} = List.pop_at(windows, -1)

        for window <- whole,
            do: assert(window in Tuple.to_list(documents) or byte_size(window) == 13, inspect(window))

        for window <- windows,
            do: assert(Enum.any?(Tuple.to_list(documents), &(:binary.match(&1, window) != :nomatch)))

        [last | whole]
      end

    # All pieces can be drawn, and the last is cut.
    pieces = for [_last | whole] <- windows, window <- whole, byte_size(window) == 13, uniq: true, do: window
    assert length(pieces) == 19
    assert Enum.any?(windows, fn [last | _] -> byte_size(last) < 8 end)
  end

  test "windows of different lengths are packed, and each is alone with itself" do
    model = ByteModel.new(num_heads: 8, seqlen: 9, type: @f64)
    stages = ByteModel.stages(model)
    params = model |> ByteModel.init(1) |> random_like(7)
    windows = ["abacabaa", "\n\n\nhello ba", <<0, 255, 0, 128>>, "\n\n\nhello ba"]
    {{q, _, _, _}, _pullback} = stages.embed.(params, windows)
    assert q.shape == {1, 5 + 8 + 1 + 8, 8, 64}
    {packed, gradients} = Training.value_and_gradients(stages, params, windows)

    alone =
      for window <- windows do
        {loss, gradients} = Training.value_and_gradients(stages, params, [window])
        {(byte_size(window) - 3) / 22, loss, gradients}
      end

    assert_in_delta packed, Enum.sum(for {share, loss, _} <- alone, do: share * loss), 1.0e-12

    for path <- @paths do
      sums =
        for(
          {share, _loss, gradients} <- alone,
          do: gradients |> get_in(path) |> list() |> Enum.map(&(&1 * share))
        )
        |> Enum.zip_with(&Enum.sum/1)

      for {x, y} <- Enum.zip(list(get_in(gradients, path)), sums),
          do: assert_in_delta(x, y, 1.0e-7 * (1 + abs(y)))
    end
  end

  test "errors name the argument" do
    for {opts, message} <- [
          {[head_dim: 60], "head_dim: expected 8, 16, 32, 64, 128 or 256, got 60"},
          {[num_heads: 0], "num_heads: expected a multiple of 4, for 256 logits of head_dim 64, got 0"},
          {[seqlen: 0], "seqlen: expected a whole number of at least 1, got 0"},
          {[type: {:f, 16}], "type: expected {:f, 32} or {:f, 64}, got {:f, 16}"}
        ] do
      assert_raise FlashAttention.Error, message, fn -> ByteModel.new(opts) end
    end

    assert_raise FlashAttention.Error, "text: expected at least 13 bytes, seqlen and 3 more, got 12", fn ->
      ByteModel.batch(ByteModel.new(seqlen: 10), "123456789012", 1, 0, 1)
    end

    for {text, separator, message} <- [
          {"a", "", ~s(separator: expected some bytes, got "")},
          {"....", ".", "text: expected something between separators, got nothing"}
        ],
        do: assert_raise(FlashAttention.Error, message, fn -> ByteModel.documents(text, separator) end)
  end

  # What follows "#" is new in every line and comes back at its end: only attention to the place where it was
  # first written can know it.
  test "learns to copy from what it has read" do
    model = ByteModel.new(num_heads: 4, seqlen: 48)
    stages = ByteModel.stages(model)
    adam = Optimizer.adam(learning_rate: 0.15, beta2: 0.99)

    {state, loss} =
      for step <- 1..40, reduce: {Training.init(ByteModel.init(model, 1), adam), nil} do
        {state, _} ->
          Training.train_step(state, ByteModel.batch(model, copies(step), 4, 1, step), model: stages)
      end

    assert state.step == 40
    assert loss < 0.9 * copies_entropy()
  end

  # Sequences of 8 letters of 16, each written 4 times.
  defp copies(seed) do
    {words, _} =
      Enum.map_reduce(1..64, :rand.seed_s(:exsss, {seed, 0, 0}), fn _, random ->
        {word, random} = Enum.map_reduce(1..8, random, fn _, random -> :rand.uniform_s(16, random) end)
        {:binary.copy(<<"#", :erlang.list_to_binary(Enum.map(word, &(&1 + ?a - 1)))::binary>>, 4), random}
      end)

    Enum.join(words)
  end

  # Without looking back further than the line, letters are as likely as each other: 8 of 9 bytes cost log 16.
  defp copies_entropy, do: 8 / 9 * :math.log(16)
end
