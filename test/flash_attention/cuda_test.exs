defmodule FlashAttention.CUDATest do
  use ExUnit.Case, async: true

  import FlashAttention.Test.Tensors
  alias FlashAttention.{Error, Tensor}

  # Without a GPU these are excluded, and test_helper says why.
  @moduletag :cuda

  # Sizes {batch, seqlen_q, seqlen_k, num_heads, num_kv_heads, head_dim} and options.
  @cases [
    {{1, 1, 1, 1, 1, 1}, []},
    {{2, 67, 67, 3, 3, 64}, []},
    {{1, 131, 75, 2, 2, 128}, [causal: false]},
    {{1, 43, 150, 6, 2, 40}, [scale: -0.2]},
    {{1, 35, 37, 1, 1, 256}, [causal: false, softcap: 4]},
    {{2, 90, 61, 4, 1, 24}, [window: {17, 3}, sink: 3]},
    {{1, 140, 141, 2, 1, 19}, [causal: false, window: {5, 9}, softcap: 2.5, sink: 1, scale: 0.7]}
  ]

  for {{sizes, opts}, index} <- Enum.with_index(@cases), type <- [:f32, :bf16, :f16] do
    test "#{type} #{inspect(sizes)} #{inspect(opts)}: as accurate as naive attention in the same type" do
      problem = problem(unquote(index), unquote(type), unquote(Macro.escape(sizes)), unquote(opts))
      naive = both_passes(problem, device: :reference)
      exact = problem |> in_f64() |> both_passes(device: :reference)
      bounds = bounds(problem)

      for opts <- [[], [deterministic: true]],
          {name, tensor} <- both_passes(problem, [device: :cuda] ++ opts) do
        assert Map.take(tensor, [:type, :shape]) == Map.take(naive[name], [:type, :shape])
        share = share_of_tolerance(to_list(tensor), to_list(exact[name]), to_list(naive[name]), bounds[name])
        assert share <= 1, "#{name} #{inspect(opts)}: the error is #{share} of what is allowed"
      end
    end
  end

  test "precisions of f32 are what the documentation says" do
    problem = problem(1, :f32, {1, 150, 150, 2, 2, 64}, [])
    exact = problem |> in_f64() |> both_passes(device: :reference)

    for {precision, bound} <- [highest: 3.0e-6, high: 3.0e-6, default: 3.0e-3],
        {name, tensor} <- both_passes(problem, device: :cuda, precision: precision) do
      exact = to_list(exact[name])
      assert max_difference(to_list(tensor), exact) <= bound * max_difference(exact, zeros(exact)), "#{name}"
    end
  end

  test "deterministic backwards repeat bitwise" do
    problem = problem(2, :f16, {1, 700, 700, 2, 1, 64}, sink: 1)
    runs = for _ <- 1..5, do: both_passes(problem, device: :cuda, deterministic: true)
    assert [_] = Enum.uniq(runs)
  end

  test "many processes at once all get right answers" do
    1..50
    |> Enum.map(fn seed ->
      type = Enum.at([:f32, :bf16, :f16], rem(seed, 3))
      problem = problem(seed, type, {1, rem(seed * 37, 150), 1 + rem(seed * 11, 90), 2, 1, 1 + seed}, [])
      opts = [device: :cuda, deterministic: true]
      {problem, opts, both_passes(problem, opts)}
    end)
    |> Enum.map(fn {problem, opts, expected} ->
      Task.async(fn -> for _ <- 1..5, do: assert(both_passes(problem, opts) == expected) end)
    end)
    |> Task.await_many(:infinity)
  end

  test "backend_info lists the GPU" do
    info = FlashAttention.backend_info()
    assert info.cuda == nil
    assert %{name: name, features: ["sm_" <> _], memory_bytes: bytes} = gpu()
    assert name != "" and bytes > 2 ** 30
  end

  test "device: :auto is the GPU, and the CPU for what the GPU does not take" do
    problem = problem(3, :bf16, {1, 150, 150, 2, 2, 40}, [])
    assert both_passes(problem, deterministic: true) == both_passes(problem, device: :cuda, deterministic: true)
    assert both_passes(problem, device: {:cuda, 0}).o == both_passes(problem, device: :cuda).o

    for {type, head_dim} <- [f64: 8, f32: 257] do
      problem = problem(4, type, {1, 9, 9, 1, 1, head_dim}, [])
      assert both_passes(problem, []) == both_passes(problem, device: :cpu)
    end
  end

  test "errors say what CUDA does not take" do
    count = Enum.count(FlashAttention.backend_info().devices, &(&1.device != :cpu))

    for {type, head_dim, device, reason, message} <- [
          {:f64, 8, :cuda, :unsupported, "dtype: expected f32, bf16 or f16 on CUDA, got f64"},
          {:f32, 257, :cuda, :unsupported, "head_dim: expected at most 256 on this CUDA device, got 257"},
          {:f32, 8, {:cuda, count}, :no_device,
           "device: expected a cuda device from 0 to #{count - 1}, got #{count}"}
        ] do
      %{q: q, k: k, v: v} = problem(5, type, {1, 3, 3, 1, 1, head_dim}, [])
      assert {:error, %Error{} = error} = FlashAttention.forward(q, k, v, device: device)
      assert {error.reason, Exception.message(error)} == {reason, message}
    end
  end

  # The backward sums dq in f32 and in 64 columns, however few there are: 256 bytes of the GPU's memory for a
  # row that has 2 here.
  test "running out of the GPU's memory is an error, and the next call works" do
    heads = 4
    seqlen = div(gpu().memory_bytes, 256 * heads) + 1
    zeros = fn bytes, type, shape -> Tensor.new(:binary.copy(<<0>>, bytes), type, shape) end
    rows = zeros.(2 * heads * seqlen, :bf16, {1, seqlen, heads, 1})
    lse = zeros.(4 * heads * seqlen, :f32, {1, heads, seqlen})
    key = zeros.(2 * heads, :bf16, {1, 1, heads, 1})

    assert {:error, error} = FlashAttention.backward(rows, rows, key, key, rows, lse, device: :cuda)
    assert error.reason == :out_of_memory
    assert Exception.message(error) =~ ~r/^device: expected \d+ bytes of the GPU's memory, got \d+ free of \d+$/

    problem = problem(6, :f32, {1, 5, 5, 1, 1, 8}, [])
    assert %{o: %Tensor{}} = both_passes(problem, device: :cuda)
  end

  defp gpu, do: Enum.find(FlashAttention.backend_info().devices, &(&1.device == {:cuda, 0}))
  defp zeros(list), do: List.duplicate(0.0, length(list))

  defp in_f64(problem) do
    Map.new(problem, fn {name, value} ->
      {name, if(name == :opts, do: value, else: convert(value, :f64))}
    end)
  end

  defp both_passes(%{q: q, k: k, v: v, dout: dout, opts: opts}, more_opts) do
    opts = opts ++ more_opts
    {o, lse} = FlashAttention.forward_with_states!(q, k, v, opts)

    case FlashAttention.backward!(dout, q, k, v, o, lse, opts) do
      {dq, dk, dv} -> %{o: o, lse: lse, dq: dq, dk: dk, dv: dv}
      {dq, dk, dv, %{sink: dsink}} -> %{o: o, lse: lse, dq: dq, dk: dk, dv: dv, dsink: dsink}
    end
  end
end
