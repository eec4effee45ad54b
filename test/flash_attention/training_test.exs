defmodule FlashAttention.TrainingTest do
  use ExUnit.Case, async: true

  alias FlashAttention.{Tensor, Training}
  alias FlashAttention.Training.{Model, Optimizer, Parameter, Params}

  doctest FlashAttention.Training
  doctest FlashAttention.Training.Optimizer
  doctest FlashAttention.Training.Params

  defp tensor(list, type \\ {:f, 64}) do
    {:f, bits} = type
    Tensor.new(for(x <- list, into: <<>>, do: <<x::float-size(bits)-native>>), type, {length(list)})
  end

  defp list(%Tensor{type: {:f, bits}, data: data}), do: for(<<x::float-size(bits)-native <- data>>, do: x)

  defp random(count, seed) do
    {list, _} = Enum.map_reduce(1..count, :rand.seed_s(:exsss, seed), fn _, r -> :rand.normal_s(r) end)
    list
  end

  defp assert_close(left, right, tolerance) do
    assert length(left) == length(right)
    for {l, r} <- Enum.zip(left, right), do: assert_in_delta(l, r, tolerance * (1 + abs(r)))
  end

  # q, k and v are parameters, the batch is the loss's gradient by o: the loss is a dot product, and the
  # gradients of the parameters are what attention's backward gives.
  defp bare_model(opts \\ []) do
    %Model{
      attention: opts,
      embed: fn
        %{sink: sink} = p, _dout ->
          {{p.q, p.k, p.v, %{sink: sink}},
           fn {dq, dk, dv, %{sink: dsink}} -> %{q: dq, k: dk, v: dv, sink: dsink} end}

        p, _dout ->
          {{p.q, p.k, p.v}, fn {dq, dk, dv} -> %{q: dq, k: dk, v: dv} end}
      end,
      head: fn _params, o, dout ->
        loss = Enum.zip_with(list(o), list(dout), &(&1 * &2)) |> Enum.sum()
        {loss, fn dloss -> {%{}, %{dout | data: scale(dout, dloss)}} end}
      end
    }
  end

  defp scale(%Tensor{type: {:f, bits}} = tensor, factor),
    do: for(x <- list(tensor), into: <<>>, do: <<x * factor::float-size(bits)-native>>)

  defp bare_problem(extra \\ %{}) do
    shape = {1, 3, 2, 5}
    [q, k, v, dout] = for seed <- 1..4, do: %{tensor(random(30, seed)) | shape: shape}
    {Map.merge(%{q: q, k: k, v: v}, extra), dout}
  end

  describe "value_and_gradients/3" do
    test "chains the pullbacks of the stages" do
      {params, dout} = bare_problem()
      {loss, gradients} = Training.value_and_gradients(bare_model(window: {1, 0}), params, dout)

      {o, lse} = FlashAttention.forward_with_states!(params.q, params.k, params.v, window: {1, 0})
      {dq, dk, dv} = FlashAttention.backward!(dout, params.q, params.k, params.v, o, lse, window: {1, 0})
      assert gradients == %{q: dq, k: dk, v: dv}
      assert_in_delta loss, Enum.zip_with(list(o), list(dout), &(&1 * &2)) |> Enum.sum(), 1.0e-12
    end

    test "passes sinks in, and their gradient out" do
      sink = %{tensor([0.5, -0.25], {:f, 32}) | shape: {1, 2}}
      {params, dout} = bare_problem(%{sink: sink})
      {loss, gradients} = Training.value_and_gradients(bare_model(), params, dout)

      # Steps that f32 represents exactly.
      for {direction, index} <- [{[1.0, 0.0], 0}, {[0.0, 1.0], 1}] do
        moved = fn h ->
          sink = %{sink | data: tensor(Enum.zip_with(list(sink), direction, &(&1 + h * &2)), {:f, 32}).data}
          {loss, _} = Training.value_and_gradients(bare_model(), %{params | sink: sink}, dout)
          loss
        end

        h = :math.pow(2, -12)
        assert_in_delta Enum.at(list(gradients.sink), index), (moved.(h) - moved.(-h)) / (2 * h), 1.0e-6
      end

      assert is_float(loss)
    end

    test "adds up gradients of parameters that both stages use" do
      {params, dout} = bare_problem()
      model = bare_model()
      {_, without} = Training.value_and_gradients(model, params, dout)

      head = fn params, o, batch ->
        {loss, pullback} = model.head.(params, o, batch)
        {loss, fn dloss -> {%{v: params.v}, elem(pullback.(dloss), 1)} end}
      end

      {_, gradients} = Training.value_and_gradients(%{model | head: head}, params, dout)
      assert gradients.q == without.q
      assert_close(list(gradients.v), Enum.zip_with(list(without.v), list(params.v), &(&1 + &2)), 1.0e-15)
    end

    test "names the stage that returns what it should not" do
      {params, dout} = bare_problem()
      model = bare_model()
      q = params.q
      pullback = fn _ -> %{} end

      for {model, message} <- [
            {nil, "model: expected a FlashAttention.Training.Model, got nil"},
            {%{model | embed: fn _, _ -> {{q, q}, pullback} end},
             ~r/^embed: expected attention's inputs {q, k, v} or {q, k, v, %{sink: sink}}, got {%/},
            {%{model | embed: fn _, _ -> {q, pullback} end},
             ~r/^embed: expected attention's inputs {q, k, v} or .*, got %FlashAttention.Tensor{/},
            {%{model | embed: fn _, _ -> {{q, q, q, q}, pullback} end},
             ~r/^embed: expected attention's inputs/},
            {%{model | embed: fn _, _ -> {q, q, q} end},
             ~r/^embed: expected to return {output, pullback}, a function of one argument, got {%/},
            {%{model | head: fn _, _, _ -> 1.0 end},
             "head: expected to return {output, pullback}, a function of one argument, got 1.0"},
            {%{model | head: fn _, o, _ -> {o, pullback} end},
             "loss: expected a number or a scalar, got a tensor of shape {1, 3, 2, 5}"},
            {%{model | head: fn _, _, _ -> {:small, pullback} end},
             "loss: expected a number or a scalar, got :small"}
          ] do
        assert_raise FlashAttention.Error, message, fn -> Training.value_and_gradients(model, params, dout) end
      end
    end

    test "raises attention's errors" do
      {params, dout} = bare_problem()
      wrong = %{params | k: %{params.k | shape: {1, 3, 5, 2}}}

      assert_raise FlashAttention.Error, fn -> Training.value_and_gradients(bare_model(), wrong, dout) end
    end
  end

  describe "train_step/3" do
    test "takes and returns parameters, by gradient descent" do
      {params, dout} = bare_problem()
      {_, gradients} = Training.value_and_gradients(bare_model(), params, dout)
      {new, loss} = Training.train_step(params, dout, model: bare_model(), learning_rate: 0.5)

      for key <- [:q, :k, :v] do
        expected = Enum.zip_with(list(params[key]), list(gradients[key]), &(&1 - 0.5 * &2))
        assert_close(list(new[key]), expected, 1.0e-15)
      end

      {_, after_step} = Training.train_step(new, dout, model: bare_model())
      assert after_step < loss
    end

    test "takes and returns a state, which counts steps and remembers" do
      {params, dout} = bare_problem()
      state = Training.init(params, Optimizer.adam(learning_rate: 0.1))

      {state, losses} =
        Enum.reduce(1..5, {state, []}, fn _, {state, losses} ->
          {state, loss} = Training.train_step(state, dout, model: bare_model())
          {state, [loss | losses]}
        end)

      assert state.step == 5
      assert losses == Enum.sort(losses)
      assert Enum.sort(Map.keys(state.slots)) == [:k, :q, :v]
    end

    test "moves by the learning rate of the step" do
      {params, dout} = bare_problem()
      state = Training.init(params, Optimizer.adam(learning_rate: 0.1))
      {state, _} = Training.train_step(state, dout, model: bare_model(), learning_rate: 0.0)
      assert state.params == params
      assert state.optimizer.learning_rate == 0.1
    end

    test "refuses options that it does not know" do
      {params, dout} = bare_problem()

      for params_or_state <- [params, Training.init(params, Optimizer.sgd())] do
        step = fn -> Training.train_step(params_or_state, dout, model: bare_model(), learning_rte: 0.1) end
        assert Exception.message(assert_raise(ArgumentError, step)) =~ "unknown keys [:learning_rte]"
      end
    end
  end

  describe "optimizers" do
    # Straight from the papers, on lists.
    defp descend(p, gs, rate, momentum) do
      {p, _v} =
        for g <- gs, reduce: {p, List.duplicate(0.0, length(p))} do
          {p, v} ->
            v = Enum.zip_with(v, g, &(momentum * &1 + &2))
            {Enum.zip_with(p, v, &(&1 - rate * &2)), v}
        end

      p
    end

    defp adam(p, gs, rate, b1, b2, epsilon) do
      zeros = List.duplicate(0.0, length(p))

      {p, _m, _v, _t} =
        for g <- gs, reduce: {p, zeros, zeros, 1} do
          {p, m, v, t} ->
            m = Enum.zip_with(m, g, &(b1 * &1 + (1 - b1) * &2))
            v = Enum.zip_with(v, g, &(b2 * &1 + (1 - b2) * &2 * &2))

            p =
              Enum.zip_with([p, m, v], fn [p, m, v] ->
                p - rate * (m / (1 - :math.pow(b1, t))) / (:math.sqrt(v / (1 - :math.pow(b2, t))) + epsilon)
              end)

            {p, m, v, t + 1}
        end

      p
    end

    defp optimize(optimizer, p, gs, type) do
      {params, _slots, _step} =
        for g <- gs, reduce: {%{a: %{b: tensor(p, type)}}, %{}, 1} do
          {params, slots, step} ->
            {params, slots} = Optimizer.update(optimizer, step, params, %{a: %{b: tensor(g, type)}}, slots)
            {params, slots, step + 1}
        end

      list(params.a.b)
    end

    # Lengths below, at and beyond what is worked through as one piece, or in one process.
    for count <- [1, 255, 256, 257, 20_001], {type, tolerance} <- [{{:f, 32}, 1.0e-6}, {{:f, 64}, 1.0e-13}] do
      test "follow their formulas, #{count} elements of #{inspect(type)}" do
        {count, type, tolerance} = unquote(Macro.escape({count, type, tolerance}))
        p = random(count, 1)
        gs = for seed <- 2..4, do: random(count, seed)

        for momentum <- [0, 0.9] do
          optimizer = Optimizer.sgd(learning_rate: 0.1, momentum: momentum)
          assert_close(optimize(optimizer, p, gs, type), descend(p, gs, 0.1, momentum), tolerance)
        end

        optimizer = Optimizer.adam(learning_rate: 0.1, beta1: 0.8, beta2: 0.95, epsilon: 1.0e-3)
        assert_close(optimize(optimizer, p, gs, type), adam(p, gs, 0.1, 0.8, 0.95, 1.0e-3), tolerance)
      end
    end

    test "move a parameter on momentum alone, also where its gradient is 0 at first or later" do
      p = random(600, 1)
      zeros = List.duplicate(0.0, 600)
      gs = [zeros, random(600, 2), zeros]

      for {optimizer, expected} <- [
            {Optimizer.sgd(learning_rate: 0.1, momentum: 0.9), descend(p, gs, 0.1, 0.9)},
            {Optimizer.adam(learning_rate: 0.1), adam(p, gs, 0.1, 0.9, 0.999, 1.0e-8)}
          ] do
        assert_close(optimize(optimizer, p, gs, {:f, 64}), expected, 1.0e-13)
      end
    end

    test "leave parameters without a gradient alone" do
      params = %{a: tensor([1.0]), b: tensor([2.0])}
      {new, slots} = Optimizer.update(Optimizer.sgd(momentum: 0.5), 1, params, %{a: tensor([3.0])}, %{})
      assert new.b == params.b
      assert Map.keys(slots) == [:a]
    end

    test "refuse gradients of another shape or type, and types without arithmetic" do
      p = tensor([1.0, 2.0])

      assert_raise FlashAttention.Error, "gradient: expected the parameter's shape {2}, got {1}", fn ->
        Parameter.update(p, tensor([1.0]), nil, {:sgd, 0.1, 0})
      end

      assert_raise FlashAttention.Error, "gradient: expected the parameter's type {:f, 64}, got {:f, 32}", fn ->
        Parameter.add(p, tensor([1.0, 2.0], {:f, 32}))
      end

      half = Tensor.new(<<0, 0>>, :f16, {1})

      assert_raise FlashAttention.Error, "parameter: expected type {:f, 32} or {:f, 64}, got {:f, 16}", fn ->
        Parameter.update(half, half, nil, {:adam, 0.1, 0.9, 0.99, 1.0e-8})
      end
    end
  end

  test "parameters nest to any depth" do
    one = tensor([1.0])
    sum = Params.add(%{a: %{b: %{c: one}}, d: one}, %{a: %{b: %{c: one}, e: one}})
    assert {list(sum.a.b.c), list(sum.a.e), list(sum.d)} == {[2.0], [1.0], [1.0]}
  end
end
