defmodule FlashAttention.TruthTest do
  use ExUnit.Case, async: true

  import FlashAttention.Test.Tensors, only: [random: 3]

  alias FlashAttention.Check.Values
  alias FlashAttention.Truth

  @compile {:no_warn_undefined, Nx}

  doctest FlashAttention.Truth

  # y = x * w, elementwise, and z = sum of x^3, of numbers of any type.
  defp forward([x, w]) do
    {a, b} = {numbers(x), numbers(w)}
    [tensor(x, Enum.zip_with(a, b, &(&1 * &2))), %{tensor(x, [Enum.sum(Enum.map(a, &(&1 ** 3)))]) | shape: {1}}]
  end

  defp backward([x, w], [_y, _z], [dy, dz]) do
    {a, b, dy, [dz]} = {numbers(x), numbers(w), numbers(dy), numbers(dz)}
    dx = Enum.zip_with([a, b, dy], fn [a, b, dy] -> dy * b + 3 * a * a * dz end)
    [tensor(x, dx), tensor(w, Enum.zip_with(a, dy, &(&1 * &2)))]
  end

  defp numbers(%{data: data, type: type}), do: Values.decode(data, type)
  defp tensor(like, numbers), do: %{like | data: Values.encode(numbers, like.type)}

  defp inputs(type), do: [x: random(1, type, {2, 3}), w: random(2, type, {2, 3})]

  # The backward with one element of one of its gradients changed.
  defp spoil(gradients, which, place, change) do
    List.update_at(gradients, which, fn tensor ->
      tensor(tensor, tensor |> numbers() |> List.update_at(place, change))
    end)
  end

  defp outcomes(report), do: for(a <- report.arguments, do: {a.name, a.outcome})

  for type <- [:f64, :f32] do
    test "a right backward passes: #{type}" do
      for seed <- 1..20 do
        report = Truth.check(&forward/1, &backward/3, inputs(unquote(type)), seed: seed, elements: :all)
        assert report.outcome == :passed, Truth.format(report)
        assert Enum.map(report.arguments, & &1.compared) == [8, 8]
      end
    end

    test "an element that is one percent off is found and named: #{type}" do
      wrong = fn inputs, outputs, douts -> backward(inputs, outputs, douts) |> spoil(1, 4, &(&1 * 1.01)) end
      report = Truth.check(&forward/1, wrong, inputs(unquote(type)), elements: :all)
      assert outcomes(report) == [x: :passed, w: :failed]
      assert %{where: {1, 1}} = List.last(report.arguments)
    end
  end

  test "numbers that are not numbers fail" do
    nan = fn inputs, outputs, douts ->
      [x, w] = backward(inputs, outputs, douts)
      <<_first::32, rest::binary>> = x.data
      [%{x | data: <<0x7FC00000::32-native, rest::binary>>}, w]
    end

    report = Truth.check(&forward/1, nan, inputs(:f32), elements: :all)
    assert [%{outcome: :failed, units: :infinity} | _] = report.arguments
    assert Truth.format(report) =~ "infinity"
  end

  test "numbers of an input that are not finite stay as they are, as those of a bias that hides" do
    [q, k, v] = for seed <- 1..3, do: random(seed, :f32, {1, 2, 1, 4})

    bias =
      FlashAttention.Tensor.new(Values.encode([0.5, :neg_infinity, 0.25, -1.0], {:f, 32}), :f32, {1, 1, 2, 2})

    forward = fn [q, k, v, bias] ->
      {:ok, o, lse} = FlashAttention.forward_with_states(q, k, v, causal: false, bias: bias)
      [o, lse]
    end

    backward = fn [q, k, v, bias], [o, lse], [dout, _dlse] ->
      {:ok, dq, dk, dv, %{bias: dbias}} =
        FlashAttention.backward(dout, q, k, v, o, lse, causal: false, bias: bias)

      [dq, dk, dv, dbias]
    end

    report = Truth.check(forward, backward, [q: q, k: k, v: v, bias: bias], loss_of: [0], elements: :all)
    assert report.outcome == :passed, Truth.format(report)
    # Directions and elements: all but the one that cannot be moved.
    assert List.last(report.arguments).compared == 2 + 3
  end

  test "elements may be left out" do
    wrong = fn inputs, outputs, douts -> backward(inputs, outputs, douts) |> spoil(0, 5, &(&1 + 1)) end
    assert Truth.check(&forward/1, wrong, inputs(:f64), elements: :all).outcome == :failed
    opts = [elements: :all, ignore: [x: &(&1 == {1, 2})]]
    assert Truth.check(&forward/1, wrong, inputs(:f64), opts).outcome == :passed
  end

  test "arguments and outputs may have no gradient" do
    only_x = fn inputs, outputs, douts -> backward(inputs, outputs, douts) |> hd() end
    report = Truth.check(&forward/1, only_x, inputs(:f64), differentiable: [:x])
    assert outcomes(report) == [x: :passed]

    without_z = fn inputs, outputs, [dy, dz] ->
      assert numbers(dz) == [0.0]
      backward(inputs, outputs, [dy, dz])
    end

    assert Truth.check(&forward/1, without_z, inputs(:f64), loss_of: [0]).outcome == :passed

    # Integers have none by themselves.
    count = {<<3::32-native>>, {:s, 32}, {}}
    times = fn [x, {<<n::32-native>>, _, _}] -> {:ok, tensor(x, Enum.map(numbers(x), &(&1 * n)))} end
    back = fn [x, {<<n::32-native>>, _, _}], _, [dy] -> {:ok, tensor(x, Enum.map(numbers(dy), &(&1 * n)))} end
    report = Truth.check(times, back, x: random(1, :f32, {3}), count: count)
    assert outcomes(report) == [x: :passed]
  end

  test "a binary has the type that is named, and a tuple its own" do
    square = fn numbers -> Enum.map(numbers, &(&1 * &1)) end
    binary = Values.encode([1.0, -2.0, 0.5], {:f, 64})

    decoded = &Values.decode(&1, {:f, 64})
    forward = fn [x] -> x |> decoded.() |> square.() |> Values.encode({:f, 64}) end

    backward = fn [x], _, [dy] ->
      Values.encode(Enum.zip_with(decoded.(x), decoded.(dy), &(2 * &1 * &2)), {:f, 64})
    end

    assert Truth.check(forward, backward, [binary], type: {:f, 64}).outcome == :passed

    wrap = fn binary -> {binary, {:f, 64}, {3}} end
    of_tuples = fn [{x, _, _}] -> wrap.(forward.([x])) end
    backward_of_tuples = fn [{x, _, _}], _, [{dy, _, _}] -> wrap.(backward.([x], nil, [dy])) end
    assert Truth.check(of_tuples, backward_of_tuples, [wrap.(binary)]).outcome == :passed
  end

  test "where rounding hides the gradient, that is said" do
    report = Truth.check(&forward/1, &backward/3, inputs(:bf16), step: 1.0e-3)
    assert :unresolved in Keyword.values(outcomes(report)) or report.outcome == :failed
    assert report.outcome != :passed
  end

  test "what does not fit is refused by name" do
    assert_raise ArgumentError, "backward: expected 2 gradients, got 3", fn ->
      Truth.check(&forward/1, fn [x, w], _, _ -> [x, w, x] end, inputs(:f32))
    end

    assert_raise ArgumentError, ~r/gradient of w: expected 6 floating numbers, got shape \{3\}/, fn ->
      Truth.check(&forward/1, fn [x, _], _, _ -> [x, random(1, :f32, {3})] end, inputs(:f32))
    end

    assert_raise ArgumentError, ~r/differentiable: .* got :y/, fn ->
      Truth.check(&forward/1, &backward/3, inputs(:f32), differentiable: [:y])
    end

    assert_raise ArgumentError, ~r/forward gave \{:error, :no\}/, fn ->
      Truth.check(fn _ -> {:error, :no} end, &backward/3, inputs(:f32))
    end

    assert_raise ArgumentError, "x: no element is left to look at", fn ->
      Truth.check(&forward/1, &backward/3, inputs(:f32), ignore: [x: fn _ -> true end])
    end

    assert_raise ArgumentError, "elements, directions: expected one of them to be more than 0", fn ->
      Truth.check(&forward/1, &backward/3, inputs(:f32), elements: 0, directions: 0)
    end
  end

  test "assert_gradients raises with the table" do
    assert %{outcome: :passed} = Truth.assert_gradients(&forward/1, &backward/3, inputs(:f64))
    wrong = fn inputs, outputs, douts -> backward(inputs, outputs, douts) |> spoil(0, 0, &(-&1)) end

    assert_raise ExUnit.AssertionError, ~r/x +FAILED +\{0, 0\}/, fn ->
      Truth.assert_gradients(&forward/1, wrong, inputs(:f64), elements: :all)
    end
  end

  @tag :nx
  test "Nx tensors" do
    forward = fn [x, w] -> {Nx.dot(x, w), Nx.sum(Nx.exp(x))} end

    backward = fn [x, w], _outputs, [dy, dz] ->
      {Nx.add(Nx.dot(dy, Nx.transpose(w)), Nx.multiply(dz, Nx.exp(x))), Nx.dot(Nx.transpose(x), dy)}
    end

    x = Nx.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -0.5]], names: [:rows, nil], type: {:f, 64})
    w = Nx.tensor([[0.1, 0.2], [0.3, -0.4], [0.5, 0.6]], type: {:f, 64})
    assert Truth.assert_gradients(forward, backward, x: x, w: w)

    wrong = fn inputs, outputs, douts -> put_elem(backward.(inputs, outputs, douts), 1, Nx.negate(w)) end
    assert [x: :passed, w: :failed] = outcomes(Truth.check(forward, wrong, x: x, w: w))
  end

  # ---- FlashAttention's own passes --------------------------------------------------------------------------

  @options [device: :cpu, causal: true, window: {3, 0}, softcap: 2.0]

  defp attention([q, k, v]) do
    {:ok, o, lse} = FlashAttention.forward_with_states(q, k, v, @options)
    [o, lse]
  end

  defp attention_backward([q, k, v], [o, lse], [dout, _dlse]),
    do: FlashAttention.backward(dout, q, k, v, o, lse, @options)

  defp attention_inputs(type),
    do: [q: random(1, type, {1, 5, 4, 3}), k: random(2, type, {1, 7, 2, 3}), v: random(3, type, {1, 7, 2, 3})]

  for type <- [:f64, :f32] do
    test "FlashAttention's gradients: #{type}" do
      opts = [loss_of: [0], elements: :all]
      Truth.assert_gradients(&attention/1, &attention_backward/3, attention_inputs(unquote(type)), opts)
    end

    test "FlashAttention's backward with another softcap is caught: #{type}" do
      wrong = fn [q, k, v], [o, lse], [dout, _] ->
        FlashAttention.backward(dout, q, k, v, o, lse, Keyword.put(@options, :softcap, 2.2))
      end

      report = Truth.check(&attention/1, wrong, attention_inputs(unquote(type)), loss_of: [0])
      assert {:q, :failed} in outcomes(report)
      assert {:k, :failed} in outcomes(report)
    end
  end

  # Zeros are within what rounding to 16 bits blurs, and yet nobody saw that they are right.
  for type <- [:bf16, :f16] do
    test "a gradient by sinks that is forgotten does not pass: #{type}" do
      inputs = attention_inputs(unquote(type)) ++ [sink: random(4, :f32, {2, 4})]

      forward = fn [q, k, v, sink] ->
        {:ok, o, lse} = FlashAttention.forward_with_states(q, k, v, [sink: sink] ++ @options)
        [o, lse]
      end

      forgets = fn [q, k, v, sink], [o, lse], [dout, _dlse] ->
        {dq, dk, dv, %{sink: dsink}} = FlashAttention.backward!(dout, q, k, v, o, lse, [sink: sink] ++ @options)

        [dq, dk, dv, tensor(dsink, List.duplicate(0.0, 8))]
      end

      for seed <- 1..5 do
        report = Truth.check(forward, forgets, inputs, loss_of: [0], seed: seed, elements: :all)
        assert outcomes(report)[:sink] in [:failed, :unresolved], Truth.format(report)
        assert report.outcome != :passed
      end
    end
  end
end
