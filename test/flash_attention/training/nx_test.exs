if Code.ensure_loaded?(Nx) do
  defmodule FlashAttention.Training.NxTest do
    use ExUnit.Case, async: true

    alias FlashAttention.{Tensor, Training}
    alias FlashAttention.Examples.Policy
    alias FlashAttention.Training.{Optimizer, Parameter}

    @moduletag :nx
    @f64 {:f, 64}

    # The definition in Nx alone, with any sinks.
    defp plain_attention(q, k, v, sink \\ nil) do
      {_, seqlen, heads, head_dim} = Nx.shape(q)
      [q, k, v] = for x <- [q, k, v], do: Nx.transpose(x, axes: [0, 2, 1, 3])
      s = Nx.divide(Nx.dot(q, [3], [0, 1], k, [3], [0, 1]), Nx.sqrt(Nx.tensor(head_dim, type: @f64)))
      {columns, rows} = {Nx.iota({1, 1, 1, seqlen}, axis: 3), Nx.iota({1, 1, seqlen, 1}, axis: 2)}
      weights = Nx.multiply(Nx.exp(s), Nx.less_equal(columns, rows))
      sum = Nx.sum(weights, axes: [3], keep_axes: true)
      sum = if sink, do: Nx.add(sum, Nx.reshape(Nx.sum(Nx.exp(sink), axes: [0]), {1, heads, 1, 1})), else: sum
      Nx.transpose(Nx.dot(Nx.divide(weights, sum), [3], [0, 1], v, [2], [0, 1]), axes: [0, 2, 1, 3])
    end

    defp problem do
      params =
        Policy.init(Nx.Random.key(1), state_size: 5, num_actions: 3, num_heads: 2, head_dim: 7, type: @f64)

      {states, key} = Nx.Random.normal(Nx.Random.key(2), shape: {2, 9, 5}, type: @f64)
      {actions, _key} = Nx.Random.randint(key, 0, 3, shape: {2, 9})
      {params, %{states: states, actions: actions}}
    end

    defp assert_close(left, right, tolerance) when is_struct(left, Nx.Tensor) do
      assert Nx.shape(left) == Nx.shape(right)
      assert Nx.to_number(Nx.reduce_max(Nx.abs(Nx.subtract(left, right)))) < tolerance
      assert Nx.to_number(Nx.reduce_max(Nx.abs(right))) > 100 * tolerance
    end

    defp assert_close(left, right, tolerance) do
      assert Map.keys(left) == Map.keys(right)
      for {key, value} <- left, do: assert_close(value, right[key], tolerance)
    end

    test "gradients are those of the same model with attention in Nx" do
      {params, batch} = problem()
      {loss, gradients} = Training.value_and_gradients(Policy.model(), params, batch)

      {plain_loss, plain_gradients} =
        Nx.Defn.value_and_grad(params, fn params ->
          {q, k, v} = Policy.embed(params, batch)
          Policy.loss(params, plain_attention(q, k, v), batch)
        end)

      assert_in_delta Nx.to_number(loss), Nx.to_number(plain_loss), 1.0e-12
      assert_close(gradients, plain_gradients, 1.0e-12)
    end

    test "sinks, parameters that both stages use, and options" do
      {params, batch} = problem()
      params = Map.put(params, :sink, Nx.tensor([[0.5, -1.0], [0.25, 2.0]], type: {:f, 32}))
      scale = fn params -> Nx.add(1, Nx.sum(params.policy.bias)) end

      embed = fn params, batch ->
        {q, k, v} = Policy.embed(params, batch)
        {q, k, Nx.multiply(v, scale.(params)), %{sink: params.sink}}
      end

      model = FlashAttention.Training.Nx.model(embed, &Policy.loss/3, device: :cpu, causal: true)
      {_loss, gradients} = Training.value_and_gradients(model, params, batch)

      plain =
        Nx.Defn.grad(params, fn params ->
          {q, k, v, %{sink: sink}} = embed.(params, batch)
          Policy.loss(params, plain_attention(q, k, v, Nx.as_type(sink, @f64)), batch)
        end)

      assert_close(Map.delete(gradients, :sink), Map.delete(plain, :sink), 1.0e-12)
      # An f32, whatever the arithmetic.
      assert_close(gradients.sink, plain.sink, 1.0e-8)
    end

    test "attention of 16 bits, whatever the type of the loss" do
      {params, batch} = problem()
      {_loss, exact} = Training.value_and_gradients(Policy.model(), params, batch)

      for {type, roundoff} <- [{{:bf, 16}, 2 ** -8}, {{:f, 16}, 2 ** -11}], loss_type <- [type, {:f, 32}] do
        cast = &Nx.Defn.Composite.traverse(&1, fn x -> Nx.as_type(x, &2) end)
        batch = %{batch | states: cast.(batch.states, type)}
        loss = fn params, o, batch -> Policy.loss(cast.(params, loss_type), cast.(o, loss_type), batch) end
        model = FlashAttention.Training.Nx.model(&Policy.embed/2, loss)
        {_loss, gradients} = Training.value_and_gradients(model, cast.(params, type), batch)

        for {part, leaves} <- exact, {name, expected} <- leaves do
          [error, largest] =
            for x <- [Nx.subtract(cast.(gradients[part][name], @f64), expected), expected],
                do: x |> Nx.abs() |> Nx.reduce_max() |> Nx.to_number()

          # The most that was measured is 9 and 3 times the type's roundoff.
          assert error <= 16 * roundoff * largest
        end
      end
    end

    test "a loss that is no scalar and inputs that are no triple are named" do
      {params, batch} = problem()
      loss = fn params, o, batch -> Nx.broadcast(Policy.loss(params, o, batch), {2, 1}) end
      embed = fn params, batch -> elem(Policy.embed(params, batch), 0) end

      for {model, message} <- [
            {FlashAttention.Training.Nx.model(&Policy.embed/2, loss),
             "loss: expected a scalar, got a tensor of shape {2, 1}"},
            {FlashAttention.Training.Nx.model(embed, &Policy.loss/3),
             ~r/^embed: expected attention's inputs {q, k, v}/}
          ] do
        assert_raise FlashAttention.Error, message, fn -> Training.value_and_gradients(model, params, batch) end
      end
    end

    test "a mask may come with the batch: it is an input without a gradient" do
      {params, batch} = problem()
      lengths = Nx.tensor([0, 4, 9], type: :s32)

      embed = fn params, batch ->
        Tuple.insert_at(Policy.embed(params, batch), 3, %{mask: FlashAttention.Mask.packed_at(batch.lengths)})
      end

      masked = FlashAttention.Training.Nx.model(embed, &Policy.loss/3, device: :cpu)
      {loss, gradients} = Training.value_and_gradients(masked, params, Map.put(batch, :lengths, lengths))
      same = Policy.model(mask: FlashAttention.Mask.packed([4, 5]))
      {expected_loss, expected} = Training.value_and_gradients(same, params, batch)
      assert_in_delta Nx.to_number(loss), Nx.to_number(expected_loss), 1.0e-12
      assert_close(gradients, expected, 1.0e-12)
    end

    test "a pullback is linear in its cotangent" do
      {params, batch} = problem()
      model = Policy.model()
      o = Nx.multiply(elem(Policy.embed(params, batch), 0), 0.5)
      {_loss, pullback} = model.head.(params, o, batch)
      {gradients, dout} = pullback.(1.0)
      {scaled_gradients, scaled_dout} = pullback.(3.0)
      assert_close(Nx.multiply(dout, 3), scaled_dout, 1.0e-12)
      assert_close(Nx.multiply(gradients.policy.kernel, 3), scaled_gradients.policy.kernel, 1.0e-12)
    end

    # The right action is whether the first number of the state before was positive: only attention knows it.
    test "the policy learns, by SGD and by Adam" do
      params =
        Policy.init(Nx.Random.key(1), state_size: 3, num_actions: 2, hidden_size: 16, num_heads: 2, head_dim: 8)

      {states, _key} = Nx.Random.normal(Nx.Random.key(3), shape: {8, 2, 3})
      right = Nx.greater(states[[.., 0..0, 0]], 0)
      batch = %{states: states, actions: Nx.concatenate([right, right], axis: 1)}

      for optimizer <- [Optimizer.sgd(learning_rate: 0.3, momentum: 0.9), Optimizer.adam(learning_rate: 0.03)] do
        {_state, loss} =
          for _step <- 1..40, reduce: {Training.init(params, optimizer), nil} do
            {state, _loss} -> Training.train_step(state, batch, model: Policy.model())
          end

        assert Nx.to_number(loss) < 0.1
      end

      {params, first} = Training.train_step(params, batch, model: Policy.model(), learning_rate: 0.1)
      {_params, second} = Training.train_step(params, batch, model: Policy.model(), learning_rate: 0.1)
      assert Nx.to_number(second) < Nx.to_number(first)
    end

    test "optimizers move Nx tensors as they move plain ones" do
      numbers = fn seed ->
        {x, _} = Nx.Random.normal(Nx.Random.key(seed), shape: {3, 5}, type: @f64)
        x
      end

      plain = fn tensor -> Tensor.new(Nx.to_binary(tensor), @f64, Nx.shape(tensor)) end

      for change <- [{:sgd, 0.1, 0}, {:sgd, 0.1, 0.9}, {:adam, 0.1, 0.9, 0.99, 1.0e-3}] do
        for seed <- 2..4, reduce: {{numbers.(1), nil}, {plain.(numbers.(1)), nil}} do
          {{p, slot}, {plain_p, plain_slot}} ->
            g = numbers.(seed)
            {p, slot} = Parameter.update(p, g, slot, change)
            {plain_p, plain_slot} = Parameter.update(plain_p, plain.(g), plain_slot, change)
            assert_close(p, Nx.reshape(Nx.from_binary(plain_p.data, @f64), {3, 5}), 1.0e-14)
            {{p, slot}, {plain_p, plain_slot}}
        end
      end
    end

    test "optimizers compute in f32 what 16 bits do not hold, and keep the parameter's type" do
      move = fn optimizer, type, gradient_type ->
        [param, gradient] =
          for {numbers, type} <- [{[1.0, 2.0, -3.0], type}, {[0.5, 0.0, -0.25], gradient_type}],
              do: Nx.tensor(numbers, type: type)

        for step <- 1..4, reduce: {%{p: param}, %{}} do
          {params, slots} -> Optimizer.update(optimizer, step, params, %{p: gradient}, slots)
        end
        |> elem(0)
      end

      for optimizer <- [Optimizer.adam(learning_rate: 0.1), Optimizer.sgd(learning_rate: 0.1, momentum: 0.9)],
          {type, most} <- [{{:bf, 16}, 2 ** -4}, {{:f, 16}, 2 ** -7}, {{:f, 32}, 2 ** -16}],
          gradient_type <- [type, {:f, 32}, @f64] do
        %{p: moved} = move.(optimizer, type, gradient_type)
        assert Nx.type(moved) == type
        # Four roundings of numbers below 4, in f32 that of 0.999.
        distance = Nx.subtract(Nx.as_type(moved, @f64), move.(optimizer, @f64, @f64).p)
        assert Nx.to_number(Nx.reduce_max(Nx.abs(distance))) <= most
      end
    end

    test "optimizers refuse gradients of another shape, and whole numbers" do
      param = Nx.tensor([1.0, 2.0, 3.0])

      for {param, gradient, message} <- [
            {param, Nx.tensor(1.0), "gradient: expected the parameter's shape {3}, got {}"},
            {param, Nx.broadcast(1.0, {2, 3}), "gradient: expected the parameter's shape {3}, got {2, 3}"},
            {Nx.tensor([1]), Nx.tensor([1.0]),
             "parameter: expected a type of floating-point numbers, got {:s, 32}"}
          ] do
        update = fn -> Optimizer.update(Optimizer.sgd(), 1, %{p: param}, %{p: gradient}, %{}) end
        assert Exception.message(assert_raise(FlashAttention.Error, update)) == message
      end
    end
  end
end
