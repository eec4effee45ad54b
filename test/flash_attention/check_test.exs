defmodule FlashAttention.CheckTest do
  use ExUnit.Case, async: true

  alias FlashAttention.{Check, Native}
  alias FlashAttention.Check.Values

  doctest FlashAttention.Check

  @device {:cpu, 0}

  defp failures(opts),
    do: for(result <- Check.run([device: :cpu] ++ opts), result.outcome == :failed, do: result)

  # Passes of the tested device with one tensor of one pass changed.
  defp fault(pass, tensor, change) do
    fn
      ^pass, tensors, options, @device ->
        with {:ok, outputs} <- Native.run(pass, tensors, options, @device) do
          {:ok,
           Map.replace_lazy(outputs, tensor, fn {data, type, shape} ->
             {data |> Values.decode(type) |> change.() |> Values.encode(type), type, shape}
           end)}
        end

      other, tensors, options, device ->
        Native.run(other, tensors, options, device)
    end
  end

  defp scaled(factor), do: fn numbers -> Enum.map(numbers, &(&1 * factor)) end

  test "passes on this machine, for every case and type" do
    results = Check.run(device: :cpu)
    assert Check.passed?(results)
    assert Enum.all?(results, &(&1.outcome == :passed))
    assert results |> Enum.map(& &1.case) |> Enum.uniq() == Check.cases()

    assert results |> Enum.map(& &1.check) |> Enum.uniq() |> Enum.sort() == [
             :backward,
             :differences,
             :forward,
             :tangent
           ]

    assert results |> Enum.map(& &1.type) |> Enum.uniq() |> length() == 4
  end

  describe "a wrong gradient is found" do
    for {tensor, input} <- [dq: :q, dk: :k, dv: :v, dsink: :sink] do
      test "by every kind of evidence: #{tensor}" do
        runner = fault(:backward, unquote(tensor), scaled(1.1))
        failures = failures(cases: ["all at once"], runner: runner)

        assert Enum.sort(Enum.uniq(for failure <- failures, do: failure.check)) == [
                 :backward,
                 :differences,
                 :tangent
               ]

        # In every type, f16 and bf16 included, and nothing else.
        assert length(for %{check: :backward} = failure <- failures, uniq: true, do: failure.type) == 4
        assert Enum.uniq(for %{check: :backward} = failure <- failures, do: failure.tensor) == [unquote(tensor)]
        assert [%{tensor: unquote(input)}] = for(%{check: :differences} = failure <- failures, do: failure)
      end
    end

    test "where a single element is" do
      one_element = fn [first | rest] -> [first + 0.05 | rest] end
      failures = failures(cases: ["causal"], runner: fault(:backward, :dk, one_element))
      assert Enum.any?(failures, &(&1.check == :backward and &1.type == {:f, 32}))
      assert Enum.any?(failures, &(&1.check == :differences))
      refute Check.passed?(failures)
    end

    test "in float64, where it is as small as f32's rounding" do
      failures = failures(cases: ["grouped heads"], runner: fault(:backward, :dv, scaled(1 + 1.0e-7)))
      assert Enum.map(failures, &{&1.check, &1.type}) |> Enum.sort() |> Enum.member?({:backward, {:f, 64}})
      assert Enum.any?(failures, &(&1.check == :tangent))
    end
  end

  test "a wrong output is found" do
    for tensor <- [:o, :lse] do
      failures = failures(cases: ["softcap"], runner: fault(:forward, tensor, scaled(1.05)))
      types = for %{check: :forward, tensor: ^tensor, type: type} <- failures, do: type
      assert length(types) == 4
    end
  end

  test "NaN is a failure" do
    nan = fn :forward, tensors, options, @device = device ->
      {:ok, outputs} = Native.run(:forward, tensors, options, device)
      {data, type, shape} = outputs.o
      {:ok, %{outputs | o: {:binary.copy(<<255>>, byte_size(data)), type, shape}}}
    end

    runner = fn pass, tensors, options, device ->
      if pass == :forward and device == @device and match?({_, {:f, 32}, _}, tensors.q),
        do: nan.(pass, tensors, options, device),
        else: Native.run(pass, tensors, options, device)
    end

    failures = failures(cases: ["one key head"], runner: runner)
    assert Enum.any?(failures, &(&1.tensor == :o and &1.error == :infinity))
  end

  test "NaN is a failure in float64, too, of every kind of evidence" do
    for {pass, tensor, checks} <- [
          {:forward, :o, [:backward, :differences, :forward, :tangent]},
          {:backward, :dk, [:backward, :differences, :tangent]}
        ] do
      nan = fn numbers -> Enum.map(numbers, fn _ -> :nan end) end
      failures = failures(cases: ["one key head"], runner: fault(pass, tensor, nan))
      f64 = for %{type: {:f, 64}} = failure <- failures, do: failure
      assert f64 |> Enum.map(& &1.check) |> Enum.uniq() |> Enum.sort() == checks
      assert Enum.all?(f64, &(&1.error == :infinity))
    end
  end

  test "an error of any size is told" do
    garbage = fn numbers -> Enum.map(numbers, fn _ -> 1.0e300 end) end
    runner = fault(:backward, :dq, garbage)

    only_f64 = fn pass, tensors, options, device ->
      if match?({_, {:f, 64}, _}, tensors.q),
        do: runner.(pass, tensors, options, device),
        else: Native.run(pass, tensors, options, device)
    end

    failures = failures(cases: ["causal"], runner: only_f64)
    assert [%{error: error}] = for(%{check: :backward} = failure <- failures, do: failure)
    assert error > 0.9e300
  end

  test "a case that is not there is refused" do
    assert_raise ArgumentError, ~s(cases: expected names of cases/0, got "casual"), fn ->
      Check.run(device: :cpu, cases: ["causal", "casual"])
    end
  end

  test "a type that the device does not take is said to be unsupported, and is no proof" do
    unsupported = fn pass, tensors, options, device ->
      if device == @device and match?({_, {:f, 16}, _}, tensors.q),
        do: {:error, {:unsupported, "q", "", "", "f16"}},
        else: Native.run(pass, tensors, options, device)
    end

    results = Check.run(device: :cpu, cases: ["causal"], runner: unsupported)
    assert [%{type: {:f, 16}}] = Enum.filter(results, &(&1.outcome == :unsupported))
    assert Check.passed?(results)
    refute Check.passed?(Enum.filter(results, &(&1.outcome == :unsupported)))
  end

  test "seeds change the numbers; one seed repeats them" do
    errors = fn seed -> for result <- Check.run(device: :cpu, seed: seed, cases: ["sink"]), do: result.error end
    assert errors.(1) == errors.(1)
    assert errors.(1) != errors.(2)
  end

  test "errors that are no result are raised" do
    broken = fn _pass, _tensors, _options, _device -> {:error, {:device_error, "", "", "", "on fire"}} end
    assert_raise FlashAttention.Error, "on fire", fn -> Check.run(device: :cpu, runner: broken) end
    assert_raise FlashAttention.Error, ~r/^device: expected/, fn -> Check.run(device: :gpu) end
  end

  test "numbers round to the nearest of a type, ties to even" do
    for {type, x, rounded} <- [
          {{:bf, 16}, 1.00390625, 1.0},
          {{:bf, 16}, 1.01171875, 1.015625},
          {{:f, 16}, 1.00048828125, 1.0},
          {{:f, 16}, 1.00146484375, 1.001953125},
          {{:f, 32}, 0.1, 0.10000000149011612},
          {{:f, 64}, 0.1, 0.1}
        ] do
      assert Values.round_to([x, -x], type) == [rounded, -rounded]
    end

    assert Values.decode(<<0xFF800000::32-native, 0x7F800000::32-native, 0x7FC00000::32-native>>, {:f, 32}) ==
             [:neg_infinity, :infinity, :nan]

    for type <- [{:f, 64}, {:f, 32}, {:f, 16}, {:bf, 16}],
        do: assert(Values.round_to([:neg_infinity, :infinity, :nan], type) == [:neg_infinity, :infinity, :nan])

    assert Values.max_difference([:neg_infinity, 1.0], [:neg_infinity, 1.5]) == 0.5
    assert Values.max_difference([:nan, 1.0], [:nan, 1.5]) == :infinity
  end
end
