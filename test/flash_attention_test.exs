defmodule FlashAttentionTest do
  use ExUnit.Case, async: true

  import FlashAttention.Test.Tensors
  alias FlashAttention.{Error, Mask}
  alias FlashAttention.Test.{PlainAttention, Wrapped}

  doctest FlashAttention

  # Sizes {batch, seqlen_q, seqlen_k, num_heads, num_kv_heads, head_dim} and options.
  @cases [
    {{1, 1, 1, 1, 1, 1}, []},
    {{2, 13, 13, 3, 3, 5}, []},
    {{1, 7, 19, 4, 2, 9}, [causal: false]},
    {{1, 19, 7, 2, 1, 3}, []},
    {{2, 11, 11, 2, 2, 7}, [scale: -0.37, softcap: 1.3]},
    {{1, 17, 23, 3, 1, 5}, [causal: false, window: {3, 2}]},
    {{1, 17, 17, 2, 2, 5}, [window: {4, 9}]},
    {{1, 9, 14, 2, 1, 6}, [causal: false, window: {:infinity, 1}]},
    {{2, 10, 6, 4, 2, 3}, [sink: 1]},
    {{1, 15, 15, 2, 2, 8}, [sink: 3, softcap: 2, window: {2, 0}]},
    {{2, 9, 13, 4, 2, 5}, [alibi_slopes: 1]},
    {{1, 9, 10, 2, 1, 4}, [alibi_slopes: 1, constant_alibi_slopes: true]},
    {{2, 12, 7, 2, 2, 3}, [alibi_slopes: 2, sink: 1, softcap: 1.5, causal: false]},
    {{2, 7, 11, 4, 2, 5}, [bias: {nil, {1, 4, 7, 11}}]},
    {{2, 9, 9, 2, 1, 3}, [bias: {:f32, {2, 1, 1, 9}}, softcap: 2, causal: false, alibi_slopes: 1]},
    {{1, 8, 13, 3, 3, 4}, [bias: {nil, {1, 1, 8, 13}}, sink: 1, window: {5, 1}, constant_bias: true]},
    {{2, 10, 10, 2, 2, 4}, [bias: {:u8, {2, 1, 1, 10}}]},
    {{1, 6, 9, 2, 1, 3}, [bias: {:u8, {1, 2, 6, 9}}, causal: false, sink: 1]},
    {{2, 11, 19, 4, 2, 3}, [dropout: 0.3, dropout_seed: {7, 0xFFFFFFFF}]},
    {{1, 17, 9, 2, 2, 5},
     [dropout: 0.9, dropout_seed: {0, 1}, bias: {nil, {1, 2, 1, 9}}, causal: false, softcap: 2]}
  ]

  for {{sizes, opts}, index} <- Enum.with_index(@cases), type <- [:f32, :f64, :bf16, :f16] do
    test "#{type} #{inspect(sizes)} #{inspect(opts)}: forward and backward are those of the definition" do
      check_case(unquote(index), unquote(type), unquote(Macro.escape(sizes)), unquote(Macro.escape(opts)))
    end
  end

  defp check_case(seed, type, sizes, opts) do
    %{q: q, k: k, v: v, dout: dout, opts: opts} = problem = problem(seed, type, sizes, opts)

    {:ok, o, lse} = FlashAttention.forward_with_states(q, k, v, opts)
    assert o.shape == q.shape
    assert {:ok, ^o} = FlashAttention.forward(q, k, v, opts)

    naive_opts = [device: :reference] ++ opts
    {naive_o, naive_lse} = FlashAttention.forward_with_states!(q, k, v, naive_opts)
    exact = PlainAttention.forward(q, k, v, opts)
    bounds = bounds(problem)
    assert_accurate(o, exact.o, naive_o, bounds.o)
    assert_accurate(lse, exact.lse, naive_lse, bounds.lse)

    backward = FlashAttention.backward(dout, q, k, v, o, lse, opts)
    assert backward == FlashAttention.backward(dout, q, k, v, o, lse, opts)
    grads = named(backward)
    naive = named(FlashAttention.backward(dout, q, k, v, naive_o, naive_lse, naive_opts))
    exact = PlainAttention.backward(dout, q, k, v, opts)

    optional =
      for name <- [:sink, :alibi_slopes, :bias],
          tensor = opts[name],
          tensor.type != {:u, 8} and opts[:"constant_#{name}"] != true,
          do: {:"d#{name}", tensor}

    assert Enum.sort(Map.keys(grads)) == Enum.sort([:dk, :dq, :dv] ++ Keyword.keys(optional))

    for {name, grad} <- grads,
        do: assert_accurate(grad, exact[name], naive[name], bounds[name])

    assert grads.dq.shape == q.shape and grads.dk.shape == k.shape and grads.dv.shape == v.shape
    for {name, tensor} <- optional, do: assert(grads[name].shape == tensor.shape)
  end

  @range_sets 300
  @types [:full, :causal, :inverse_causal, :bi_causal]

  test "#{@range_sets} random sets of ranges give what their definition says, and the same bits again" do
    for seed <- 1..@range_sets do
      :rand.seed(:exsss, seed)

      sizes =
        {_, rows, columns, _, _, _} =
        Enum.random([{1, 9, 13, 2, 1, 3}, {2, 12, 7, 4, 2, 2}, {1, 1, 5, 3, 3, 4}])

      {q_ranges, k_ranges} = Enum.unzip(ranges(rows, columns))
      mask = Mask.ranges(q_ranges, k_ranges, for(_ <- q_ranges, do: Enum.random(@types)))

      more =
        Enum.random([
          [],
          [sink: 2],
          [softcap: 1.5],
          [window: {3, 2}],
          [alibi_slopes: 1, sink: 1],
          [bias: {nil, {1, 1, rows, columns}}]
        ])

      check_case(
        seed,
        Enum.random([:f32, :f64, :bf16, :f16]),
        sizes,
        [mask: mask, causal: seed in 1..50] ++ more
      )
    end
  end

  # Ranges of rows beside ranges of columns that share no cell: rows are cut, and for each piece columns anew. Some are empty, and
  # some run backwards.
  defp ranges(rows, columns) do
    for q_range <- cut(rows), k_range <- cut(columns), :rand.uniform() < 0.7, do: {q_range, k_range}
  end

  defp cut(length) do
    places = Enum.sort(for _ <- 1..Enum.random(1..3), do: Enum.random(0..length))
    pieces = Enum.zip([0 | places], places)
    if :rand.uniform(5) == 1, do: [{length, 0} | pieces], else: pieces
  end

  defp assert_accurate(tensor, exact, naive, bounds),
    do: assert(share_of_tolerance(to_list(tensor), exact, to_list(naive), bounds) <= 1)

  defp named({:ok, dq, dk, dv}), do: %{dq: dq, dk: dk, dv: dv}

  defp named({:ok, dq, dk, dv, optional}),
    do: for({name, gradient} <- optional, into: %{dq: dq, dk: dk, dv: dv}, do: {:"d#{name}", gradient})

  test "nil options are the defaults" do
    %{q: q, k: k, v: v} = problem(1, :f32, {1, 5, 5, 2, 2, 3}, [])
    nils = for key <- ~w(causal scale window softcap sink device precision deterministic)a, do: {key, nil}
    assert FlashAttention.forward(q, k, v, nils) == FlashAttention.forward(q, k, v)
  end

  test "causal is the default, and bounds a window to the right" do
    %{q: q, k: k, v: v} = problem(2, :f32, {1, 9, 9, 2, 2, 3}, [])
    o = FlashAttention.forward!(q, k, v)
    assert o == FlashAttention.forward!(q, k, v, causal: true)
    assert o == FlashAttention.forward!(q, k, v, causal: false, window: {:infinity, 0})
    assert o == FlashAttention.forward!(q, k, v, causal: true, window: {:infinity, 5})
    refute o == FlashAttention.forward!(q, k, v, causal: false)
  end

  test "a window wider than any integer of C's sees what one without bound sees" do
    %{q: q, k: k, v: v} = problem(2, :f32, {1, 9, 9, 2, 2, 3}, [])
    o = FlashAttention.forward!(q, k, v, causal: false)

    for wide <- [2 ** 62 - 1, 2 ** 62, 2 ** 63 - 1, 2 ** 63, 2 ** 200],
        do: assert(FlashAttention.forward!(q, k, v, causal: false, window: {wide, wide}) == o)
  end

  test "plan names the device and the kernels of both passes" do
    %{q: q, k: k, v: v, opts: opts} = problem(2, :bf16, {1, 9, 9, 2, 2, 3}, sink: 2)
    assert {:ok, plan} = FlashAttention.plan(q, k, v, [device: :cpu] ++ opts)
    assert %{device: :cpu, forward: "cpu/" <> _, backward: "cpu/" <> _} = plan
    assert {:error, %Error{argument: :k}} = FlashAttention.plan(q, q.shape, v)
    assert {:error, %Error{argument: :v}} = FlashAttention.plan(q, k, %{v | shape: {1, 2, 3}})
  end

  test "empty tensors give empty results, and rows without columns zeros" do
    {empty, rows} = {random(1, :f32, {2, 0, 3, 4}), random(2, :f32, {2, 5, 3, 4})}
    assert FlashAttention.forward!(empty, rows, rows) == empty
    {o, lse} = FlashAttention.forward_with_states!(rows, empty, empty)
    assert o.data == <<0::size(8 * 4 * 2 * 5 * 3 * 4)>>
    assert Enum.uniq(to_list(lse)) == [:neg_infinity]
    assert {dq, ^empty, ^empty} = FlashAttention.backward!(rows, rows, empty, empty, o, lse)
    assert dq == o
  end

  test "reruns are bitwise equal" do
    %{q: q, k: k, v: v, dout: dout, opts: opts} = problem(3, :f32, {2, 150, 170, 4, 2, 33}, sink: 2)

    runs =
      for _ <- 1..5 do
        {o, lse} = FlashAttention.forward_with_states!(q, k, v, opts)
        {o, lse, FlashAttention.backward!(dout, q, k, v, o, lse, [deterministic: true] ++ opts)}
      end

    assert [_] = Enum.uniq(runs)
  end

  test "a dlse: gradients are linear in it and dout, from tensors and from states, and are the reference's" do
    {batch, rows, heads} = {2, 9, 4}
    %{q: q, k: k, v: v, dout: dout, opts: opts} = problem(77, :f64, {batch, rows, 6, heads, 2, 5}, sink: 2)
    {o, states} = FlashAttention.forward_with_states!(q, k, v, [keep: :device] ++ opts)
    {^o, lse} = FlashAttention.forward_with_states!(q, k, v, opts)
    still = FlashAttention.Tensor.new(:binary.copy(<<0>>, byte_size(dout.data)), :f64, dout.shape)
    backward = fn dout, opts -> named(FlashAttention.backward(dout, q, k, v, o, lse, opts)) end

    for shape <- [{batch, heads, rows}, {1, heads, rows}] do
      dlse = random(78, :f64, shape)
      both = backward.(dout, [dlse: dlse] ++ opts)
      assert both == named(FlashAttention.backward(dout, states, dlse: dlse))
      reference = backward.(dout, [dlse: dlse, device: :reference] ++ opts)
      {of_o, of_lse} = {backward.(dout, opts), backward.(still, [dlse: dlse] ++ opts)}

      for {name, tensor} <- both, {x, index} <- Enum.with_index(to_list(tensor)) do
        tolerance = if name == :dsink, do: 1.0e-5, else: 1.0e-12
        assert_in_delta x, Enum.at(to_list(reference[name]), index), tolerance

        assert_in_delta x,
                        Enum.at(to_list(of_o[name]), index) + Enum.at(to_list(of_lse[name]), index),
                        tolerance
      end
    end

    assert message(FlashAttention.forward(q, k, v, [dlse: lse] ++ opts)) =~ "got :dlse"
    assert message(FlashAttention.backward(dout, q, k, v, o, lse, [dlse: o] ++ opts)) =~ "dlse: expected rank 3"
  end

  test "sinks of a row's own that are the same for all rows are sinks of all rows, and their gradient is dsink in parts" do
    {batch, rows, heads} = {2, 9, 4}
    %{q: q, k: k, v: v, dout: dout, opts: opts} = problem(79, :f64, {batch, rows, 6, heads, 2, 5}, sink: 3)
    own = %{opts[:sink] | data: :binary.copy(opts[:sink].data, batch * rows), shape: {batch, rows, 3, heads}}
    {:ok, o, lse} = FlashAttention.forward_with_states(q, k, v, opts)
    assert {:ok, ^o, ^lse} = FlashAttention.forward_with_states(q, k, v, sink: own)
    {:ok, dq, dk, dv, %{sink: dsink}} = FlashAttention.backward(dout, q, k, v, o, lse, opts)
    assert {:ok, ^dq, ^dk, ^dv, %{sink: down}} = FlashAttention.backward(dout, q, k, v, o, lse, sink: own)
    assert down.shape == own.shape

    sums = down |> to_list() |> Enum.chunk_every(3 * heads) |> Enum.zip_with(&Enum.sum/1)
    for {x, y} <- Enum.zip(sums, to_list(dsink)), do: assert_in_delta(x, y, 1.0e-5)

    wrong = %{own | shape: {batch, rows + 1, 3, heads}}

    assert message(FlashAttention.forward(q, k, v, sink: wrong)) =~
             "row_sinks: expected seqlen_q 9 as in q, got 10"
  end

  test "sub-binaries that are aligned to nothing" do
    for type <- [:f32, :f64, :bf16, :f16], bits <- [8, 24, 3, 61] do
      %{q: q, k: k, v: v} = problem(4, type, {1, 29, 31, 2, 1, 11}, [])
      shifted = fn tensor -> %{tensor | data: shift(tensor.data, bits)} end
      assert FlashAttention.forward!(shifted.(q), shifted.(k), shifted.(v)) == FlashAttention.forward!(q, k, v)
    end
  end

  defp shift(binary, bits) do
    <<_::size(bits), shifted::binary-size(byte_size(binary)), _::bitstring>> =
      <<0::size(bits), binary::binary, 0::5>>

    shifted
  end

  describe "errors" do
    setup do
      %{q: q, k: k, v: v} = problem(5, :f32, {2, 5, 7, 4, 2, 3}, [])
      {o, lse} = FlashAttention.forward_with_states!(q, k, v)
      %{q: q, k: k, v: v, o: o, lse: lse}
    end

    defp message({:error, %Error{} = error}), do: Exception.message(error)

    test "of tensors name the tensor", %{q: q, k: k, v: v} do
      for {tensors, expected} <- [
            {[5, k, v], "q: expected a tensor (Nx.Tensor or FlashAttention.Tensor), got 5"},
            {[q, nil, v], "k: expected a tensor (Nx.Tensor or FlashAttention.Tensor), got nil"},
            {[q, k, q.data], "v: expected a tensor (Nx.Tensor or FlashAttention.Tensor), got <<"},
            {[%{q | data: :none}, k, v], "q: expected a binary, got none"},
            {[%{q | data: <<1::7>>}, k, v], "q: expected a binary, got <<"},
            {[%{q | data: <<0, 1, 2>>}, k, v], "q: expected 480 bytes for its shape and type, got 3"},
            {[%{q | type: {:u, 8}}, k, v], "q: expected type f32, f64, bf16 or f16, got u8"},
            {[q, k, random(1, :f64, v.shape)], "v: expected type f32 as in q, got f64"},
            {[%{q | shape: [2, 5]}, k, v], "q: expected a shape, a tuple of 64-bit integers, got [2,5]"},
            {[%{q | shape: {5, 1.0}}, k, v], "q: expected a shape, a tuple of 64-bit integers, got {5,1.0"},
            {[%{q | shape: {5}}, k, v],
             "q: expected rank 4, [batch, seqlen_q, num_heads, head_dim], got rank 1"},
            {[%{q | shape: {2, -5, 4, 3}}, k, v], "seqlen_q: expected at least 0, got -5"},
            {[random(1, :f32, {2, 5, 4, 2}), k, v], "k: expected head_dim 2 as in q, got 3"},
            {[random(1, :f32, {1, 5, 4, 3}), k, v], "k: expected batch 1 as in q, got 2"},
            {[q, k, random(1, :f32, {2, 6, 2, 3})], "v: expected seqlen_k 7 as in k, got 6"},
            {[random(1, :f32, {2, 5, 5, 3}), k, v], "num_kv_heads: expected a divisor of num_heads 5, got 2"},
            {[
               %{q | shape: {2 ** 40, 2 ** 20, 4, 3}},
               %{k | shape: {2 ** 40, 7, 2, 3}},
               %{v | shape: {2 ** 40, 7, 2, 3}}
             ], "problem: the product of the sizes of a tensor overflows"},
            {List.duplicate(%{q | data: <<>>, shape: {2 ** 30, 0, 2 ** 40, 1}}, 3),
             "problem: the product of the sizes of a tensor overflows"},
            {[%{q | shape: {2 ** 70, 5, 4, 3}}, k, v],
             "q: expected a shape, a tuple of 64-bit integers, got {#{2 ** 70},5,4,3}"}
          ] do
        assert message(apply(FlashAttention, :forward, tensors)) =~ expected
      end
    end

    test "of the backward's tensors too", %{q: q, k: k, v: v, o: o, lse: lse} do
      assert message(FlashAttention.backward(k, q, k, v, o, lse)) ==
               "dout: expected seqlen_q 5 as in q, got 7"

      assert message(FlashAttention.backward(o, q, k, v, o, o)) ==
               "lse: expected rank 3, [batch, num_heads, seqlen_q], got rank 4"

      assert message(FlashAttention.backward(o, q, k, v, o, convert(lse, :f64))) =~ "lse: expected type f32"
    end

    test "of options name the option", %{q: q, k: k, v: v, o: o, lse: lse} do
      options = Enum.join(FlashAttention.Options.keys() -- [:dlse], ", ")

      for {opts, expected} <- [
            {:causal, "opts: expected a keyword list, got :causal"},
            {[{:causal, true} | :improper], "opts: expected a keyword list, got [{:causal, true} | :improper]"},
            {%{causal: true}, "opts: expected a keyword list, got %{causal: true}"},
            {[casual: true], "opts: expected keys among #{options}, got :casual"},
            {[causal: 1], "causal: expected true or false, got 1"},
            {[scale: "1"], ~s(scale: expected a number other than 0, got "1")},
            {[scale: 0.0], "scale: expected a number other than 0, got 0.0"},
            {[scale: 1.0e31], "scale: expected a number from -1e+30 to 1e+30, got 1e+31"},
            {[scale: 2 ** 2000], "scale: expected a number of 64 bits, got "},
            {[softcap: -1], "softcap: expected a number of at least 0, got -1"},
            {[window: 5],
             "window: expected {left, right}, each a whole number of at least 0 or :infinity, got 5"},
            {[window: {1, -1}], "window: expected {left, right}"},
            {[window: {1, 2.5}], "window: expected {left, right}"},
            {[scale: q],
             "scale: expected a number other than 0 (for a tensor: multiply q by it, with scale: 1), got %Fl"},
            {[sink: 1], "sink: expected a tensor (Nx.Tensor or FlashAttention.Tensor), got 1"},
            {[sink: random(1, :f32, {2, 3})], "sink: expected num_heads 4 as in q, got 3"},
            {[sink: random(1, :bf16, {2, 4})], "sink: expected type f32, got bf16"},
            {[device: :gpu],
             "device: expected :auto, :all, :cpu, :cuda, {kind, index} or a list of those of one kind, got :gpu"},
            {[device: {:cuda, -1}],
             "device: expected :auto, :all, :cpu, :cuda, {kind, index} or a list of those of one kind, got {:cuda, -1}"},
            {[device: {:cuda, 2 ** 40}], "device: expected {kind, index}, got {cuda,#{2 ** 40}}"},
            {[precision: :low], "precision: expected one of :highest, :high, :default, got :low"},
            {[deterministic: 0], "deterministic: expected true or false, got 0"},
            {[keep: true], "keep: expected one of :device, got true"},
            {[results: :gpu], "results: expected one of :host, :device, got :gpu"}
          ] do
        assert message(FlashAttention.forward_with_states(q, k, v, opts)) =~ expected
      end

      # What there is nothing to keep of, or nothing to keep for.
      for result <- [
            FlashAttention.forward(q, k, v, keep: :device),
            FlashAttention.backward(o, q, k, v, o, lse, keep: :device)
          ] do
        assert message(result) =~ ~r/^opts: expected keys among causal, .*, results, got :keep$/
      end
    end

    test "say that there is no such device", %{q: q, k: k, v: v} do
      assert {:error, %Error{reason: :no_device, argument: :device}} =
               FlashAttention.forward(q, k, v, device: {:cuda, 4096})
    end

    test "have their parts, and are raised by the bang variants", %{q: q, k: k, v: v, o: o, lse: lse} do
      assert {:error, error} = FlashAttention.forward(q, o, v)

      assert %Error{reason: :invalid_argument, argument: :v, expected: "seqlen_k 5 as in k", got: "7"} = error

      for {function, arguments} <- [
            forward!: [q, o, v],
            forward_with_states!: [q, o, v],
            backward!: [o, q, o, v, o, lse]
          ] do
        assert ^error = catch_error(apply(FlashAttention, function, arguments))
      end

      refute match?({:error, _}, FlashAttention.forward(q, k, v))
    end
  end

  test "backend_info describes every device, and says why there is no CUDA" do
    info = FlashAttention.backend_info()
    assert [%{device: :cpu, name: name, features: [_ | _]} = cpu | cuda] = info.devices
    assert name != "" and cpu.threads >= 1 and cpu.memory_bytes > 2 ** 20
    assert info.version == Mix.Project.config()[:version]
    assert is_binary(info.cuda) == (cuda == [])
  end

  @tag :cuda
  test "CUDA gives what the CPU gives" do
    %{q: q, k: k, v: v} = problem(6, :f32, {2, 65, 65, 4, 2, 32}, [])

    {on_cpu, on_gpu} =
      {FlashAttention.forward!(q, k, v, device: :cpu), FlashAttention.forward!(q, k, v, device: :cuda)}

    assert max_difference(to_list(on_cpu), to_list(on_gpu)) <= 1.0e-5
  end

  test "tensors of a caller's own type, where q decides what comes out, and the names of axes" do
    %{q: q, k: k, v: v, dout: dout, opts: opts} = problem(7, :f32, {1, 5, 6, 2, 1, 3}, sink: 1)
    {o, lse} = FlashAttention.forward_with_states!(q, k, v, opts)
    {dq, dk, dv, %{sink: dsink}} = FlashAttention.backward!(dout, q, k, v, o, lse, opts)

    wrap = fn tensor, names -> %Wrapped{tensor: tensor, names: names} end
    [wq, wk] = [wrap.(q, [:b, :i, :h, :d]), wrap.(k, [:b, :j, :g, :d])]
    wrapped_opts = [sink: wrap.(opts[:sink], [:t, :h])]

    assert FlashAttention.forward_with_states!(wq, wk, v, wrapped_opts) ==
             {wrap.(o, [:b, :i, :h, :d]), wrap.(lse, [:b, :h, :i])}

    assert FlashAttention.backward!(dout, wq, wk, v, o, lse, wrapped_opts) ==
             {wrap.(dq, [:b, :i, :h, :d]), wrap.(dk, [:b, :j, :g, :d]), wrap.(dv, nil),
              %{sink: wrap.(dsink, [:t, :h])}}

    assert FlashAttention.forward_with_states!(q, wk, v, opts) == {o, lse}
  end

  if not FlashAttention.Defn.supported?() do
    test "what needs a newer Nx says so" do
      one = FlashAttention.Tensor.new(<<1.0::float-32-native>>, :f32, {1, 1, 1, 1})

      for name <- [:attention, :attention_with_lse], opts <- [[], [[]]] do
        assert_raise FlashAttention.Error, ~r/needs Nx 0.12 or later/, fn ->
          apply(FlashAttention, name, [one, one, one] ++ opts)
        end
      end
    end
  end

  if not Code.ensure_loaded?(EXLA) do
    test "registration with EXLA says that it is not there" do
      assert {:error, %FlashAttention.Error{reason: :unsupported}} = FlashAttention.EXLA.register()

      assert_raise FlashAttention.Error,
                   "exla: expected EXLA 0.12 or later, got none",
                   &FlashAttention.EXLA.register!/0
    end

    test "registration with an EXLA that is too old says which one would do" do
      # One without EXLA.CustomCall, in a VM of its own.
      program = """
      defmodule EXLA, do: nil
      :ok = :application.load({:application, :exla, vsn: ~c(0.9.2)})
      {:error, error} = FlashAttention.EXLA.register()
      IO.write(error.message)
      """

      path = FlashAttention |> :code.which() |> Path.dirname()

      assert System.cmd("elixir", ["-pa", path, "-e", program], stderr_to_stdout: true) ==
               {"exla: expected EXLA 0.12 or later, got 0.9.2", 0}
    end
  end
end
