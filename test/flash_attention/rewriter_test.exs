defmodule FlashAttention.RewriterTest do
  # The compiler around programs, and forms of attention that stand in guides, models and livebooks: found, and the same
  # numbers; or left, and why.
  use ExUnit.Case, async: true

  import ExUnit.CaptureLog

  alias FlashAttention.Rewriter
  alias FlashAttention.Test.{AttentionForms, Forwards, Layers, RecordingCompiler}
  alias Nx.Defn.{Composite, Evaluator, Expr, Kernel}

  @moduletag :defn
  @compile {:no_warn_undefined,
            [
              Nx,
              Nx.Batch,
              Nx.Type,
              Nx.Constants,
              Nx.Defn,
              Nx.Random,
              Nx.Serving,
              Composite,
              Expr,
              Kernel,
              AttentionForms,
              Forwards,
              Layers,
              Rewriter,
              RecordingCompiler
            ]}

  defp normal(seed, shape, type) do
    {tensor, _key} = Nx.Random.normal(Nx.Random.key(seed), shape: shape, type: type)
    tensor
  end

  defp qkv(shape \\ {2, 3, 6, 4}, type \\ :f64), do: for(seed <- 1..3, do: normal(seed, shape, type))

  defp softmax(s) do
    e = Nx.exp(Nx.subtract(s, Nx.reduce_max(s, axes: [-1], keep_axes: true)))
    Nx.divide(e, Nx.sum(e, axes: [-1], keep_axes: true))
  end

  defp plain(q, k, v, change \\ & &1) do
    s = q |> Nx.dot([3], [0, 1], k, [3], [0, 1]) |> Nx.divide(2)
    Nx.dot(softmax(change.(s)), [3], [0, 1], v, [2], [0, 1])
  end

  defp run(fun, args, compiler, opts \\ []),
    do: Composite.flatten_list([Nx.Defn.jit_apply(fun, args, [compiler: compiler] ++ opts)])

  defp distance(x, y),
    do:
      x |> Nx.as_type(:f64) |> Nx.subtract(Nx.as_type(y, :f64)) |> Nx.abs() |> Nx.reduce_max() |> Nx.to_number()

  defp assert_same(fun, args, opts \\ [], tolerance \\ 1.0e-9) do
    [plain, rewritten] =
      for {compiler, opts} <- [{Evaluator, []}, {Rewriter, opts}], do: run(fun, args, compiler, opts)

    for {x, y} <- Enum.zip(plain, rewritten) do
      assert {x.type, x.shape, x.names} == {y.type, y.shape, y.names}
      assert distance(x, y) <= tolerance
    end
  end

  defp found(fun, args, opts \\ []),
    do: for(place <- Rewriter.explain(fun, args, opts), do: place[:as] || place.reason)

  defp told(fun, args),
    do: fun |> Nx.Defn.debug_expr() |> apply(args) |> Rewriter.rewrite() |> Forwards.options()

  defp blocks(fun, args), do: length(told(fun, args))

  describe "the compiler" do
    test "hands its own options to nobody, and all others on" do
      args = qkv()
      opts = [inner: RecordingCompiler, weights: :keep, attention: [device: :cpu], max_concurrency: 3]
      assert [_] = run(&plain/3, args, Rewriter, opts)
      assert_received {:compiled, key, max_concurrency: 3}
      assert is_function(key)
    end

    test "has a key for each function and each of its own options, the same each time" do
      args = qkv()
      fun = &plain/3

      keys =
        for opts <- [[], [], [weights: :keep], [attention: [device: :cpu]]] do
          run(fun, args, Rewriter, [inner: RecordingCompiler] ++ opts)
          assert_received {:compiled, key, []}
          key
        end

      run(fun, args, RecordingCompiler)
      assert_received {:compiled, plain, []}

      assert [first, first | others] = keys
      assert length(Enum.uniq([plain, first | others])) == 4
      # EXLA asks functions where they come from.
      assert :erlang.fun_info(first)[:module] == Rewriter
    end

    test "partitions lead to it again, and backends are the inner compiler's" do
      opts = [inner: RecordingCompiler, weights: :keep, client: :host]

      assert for(opts <- Rewriter.__partitions_options__(opts), do: Enum.sort(opts)) ==
               for(n <- 0..1, do: Enum.sort([compiler: Rewriter, device_id: n] ++ opts))

      assert Rewriter.__to_backend__(opts) == {Nx.BinaryBackend, [client: :host]}
      assert Rewriter.__to_backend__([]) == Nx.default_backend()
    end

    test "shards are the inner compiler's, of a program that is rewritten" do
      args = for tensor <- qkv(), do: Nx.to_template(tensor)
      Rewriter.__shard_jit__(:key, :mesh, args, & &1, [], inner: RecordingCompiler, input_shardings: [])
      assert_received {:sharded, key, :mesh, fun, input_shardings: []}
      assert is_function(key, 0) and is_function(fun, 1)
    end

    test "refuses options that it does not know the values of" do
      for {opts, message} <- [
            {[weights: :drop], "weights: expected :refuse or :keep, got :drop"},
            {[inner: Rewriter], "inner: expected another compiler, got FlashAttention.Rewriter"},
            {[attention: [scale: 1]], "opts: expected keys among device, precision, deterministic, got :scale"}
          ] do
        assert_raise FlashAttention.Error, message, fn -> run(&plain/3, qkv(), Rewriter, opts) end
      end

      assert_raise FlashAttention.Error, ~r/keys among inner/, fn ->
        Rewriter.explain(&plain/3, qkv(), cache: 1)
      end
    end

    test "says what it did, once a compile" do
      log = capture_log(fn -> run(&plain/3, qkv(), Rewriter, report: :error) end)

      assert log =~
               "FlashAttention.Rewriter: dot f64[2, 3, 6, 4] (q from argument 0, k from argument 1, v from argument 2) -> f64 batch 2, seqlen 6 x 6, heads 3:3, head_dim 4, scale 0.5"

      squared = &plain(&1, &2, &3, fn s -> Nx.pow(s, 2) end)
      log = capture_log(fn -> run(squared, qkv(), Rewriter, report: :error) end)
      assert log =~ "dot f64[2, 3, 6, 4] (o from argument 2) stays: pow is done to its scores"
    end

    test "says where scores overflow in the program and not any more" do
      for {type, overflow?} <- [f16: true, bf16: false, f32: false] do
        assert [as] = found(&plain/3, qkv({2, 3, 6, 4}, type))
        assert as =~ "scores above 65504 overflow in the original" == overflow?
      end
    end

    test "says where q, k and v come from, by the keys of what the function was given" do
      fun = fn %{layers: [%{"query" => wq, "key" => wk}, %{"value" => wv}]}, {x} ->
        [q, k, v] = for w <- [wq, wk, wv], do: Nx.dot(x, [3], [0, 1], w, [2], [0, 1])
        plain(q, k, v)
      end

      [x, w, _] = qkv({2, 3, 4, 4})
      params = %{layers: {%{"query" => w, "key" => w}, %{"value" => w}}}
      fun = fn %{layers: layers}, x -> fun.(%{layers: Tuple.to_list(layers)}, x) end

      assert [%{rewritten: true, from: from}] = Rewriter.explain(fun, [params, {x}])
      assert from == %{q: "layers.0.query", k: "layers.0.key", v: "layers.1.value"}
    end

    test "compiles once what is called often, and works in a serving" do
      compiled = Nx.Defn.compile(&plain/3, for(t <- qkv(), do: Nx.to_template(t)), compiler: Rewriter)
      assert distance(apply(compiled, qkv()), apply(&plain/3, qkv())) < 1.0e-12

      serving =
        Nx.Serving.jit(fn %{x: x} -> plain(x, x, x) end, compiler: Rewriter)
        |> then(
          &Nx.Serving.new(
            fn opts -> fn batch -> Nx.Defn.jit_apply(fn %{x: x} -> plain(x, x, x) end, [batch], opts) end end,
            compiler: Rewriter,
            foo: &1
          )
        )
        |> Map.put(:defn_options, compiler: Rewriter)

      [x, _, _] = qkv()
      batch = Nx.Batch.concatenate([%{x: x}])
      assert distance(Nx.Serving.run(serving, batch), plain(x, x, x)) < 1.0e-12
    end
  end

  describe "expressions" do
    test "without attention stay as they are, node for node" do
      fun = fn q, k, v ->
        q |> Nx.dot([3], [0, 1], k, [3], [0, 1]) |> Nx.dot([3], [0, 1], v, [2], [0, 1]) |> Nx.sin()
      end

      expression = apply(Nx.Defn.debug_expr(fun), qkv())
      assert Rewriter.rewrite(expression) == expression
      assert Rewriter.explain(fun, qkv()) == []
    end

    test "keep the nodes around it, and names" do
      fun = fn q, k, v ->
        before = Nx.multiply(v, 3)
        {before, plain(q, k, before) |> Nx.rename([:batch, :head, :row, nil])}
      end

      {before, _} = expression = apply(Nx.Defn.debug_expr(fun), qkv())
      {same, o} = Rewriter.rewrite(expression)
      assert same.data.id == before.data.id
      assert o.names == [:batch, :head, :row, nil]
      assert_same(fun, qkv())
    end

    test "say that no backward follows where they have no gradients" do
      assert [opts] = told(&plain/3, qkv())
      assert opts[:inference] == true
      assert [opts] = told(gradients_of_three(&plain/3), qkv())
      assert opts[:inference] == false
    end

    test "have attention in bodies of while and in branches of cond" do
      defmodule Loops do
        import Nx.Defn

        deftransform(step(q, k, v), do: FlashAttention.RewriterTest.step(q, k, v))

        defn(loop(q, k, v),
          do:
            while {q, k, v, i = 0}, i < 3 do
              {step(q, k, v), k, v, i + 1}
            end
        )

        defn branches(q, k, v) do
          if Nx.sum(q) > 0,
            do: step(q, k, v),
            else: step(v, k, q)
        end
      end

      assert blocks(&Loops.loop/3, qkv()) == 1
      assert_same(&Loops.loop/3, qkv())
      assert blocks(&Loops.branches/3, qkv()) == 2
      assert_same(&Loops.branches/3, qkv())
    end

    test "that are vectorized are found as well" do
      fun = fn q, k, v ->
        [q, k, v] = for t <- [q, k, v], do: Nx.vectorize(t, [:x, :y])
        Nx.dot(softmax(Nx.dot(q, [1], k, [1])), [1], v, [0])
      end

      assert [_] = found(fun, qkv())
      assert blocks(fun, qkv()) == 1
      assert_same(fn q, k, v -> Nx.devectorize(fun.(q, k, v)) end, qkv())
    end

    # Attention that sees what is true of its scores' places.
    defp seeing(see), do: fn q, k, v -> plain(q, k, v, &Nx.select(Nx.broadcast(see.(&1), &1), &1, -1.0e9)) end

    defp places(s, axis, type) do
      shape = {1, 1, 1, 1} |> put_elem(axis, Nx.axis_size(s, axis))
      Nx.iota(shape, axis: axis, type: type)
    end

    defp beyond(type, number, to),
      do: fn s -> for axis <- [2, 3], do: s |> places(axis, type) |> Nx.add(number) |> Nx.as_type(to) end

    test "have masks of positions where their type holds those, and where it does not the mask that they are" do
      for {type, number, to, known?} <- [
            {:s32, 0, :bf16, true},
            {:s32, 251, :bf16, true},
            {:s32, 252, :bf16, false},
            {:s32, 1000, :bf16, false},
            {:s32, 2043, :f16, true},
            {:s32, 2044, :f16, false},
            {:s32, 2 ** 24 - 5, :f32, true},
            {:s32, 2 ** 24 - 4, :f32, false},
            {:s32, 1_000_000_000, :f32, false},
            {:s32, 1_000_000_000, :f64, true},
            # Without a cast: sums are of the type, or go round.
            {:f32, 1.0e9, :f32, false},
            {:bf16, Nx.tensor(1000, type: :bf16), :bf16, false},
            {:s32, 2 ** 31 - 6, :s32, true},
            {:s32, 2 ** 31 - 5, :s32, false}
          ] do
        see = beyond(type, number, to)
        fun = seeing(fn s -> apply(Nx, :greater_equal, see.(s)) end)
        assert {[as], _} = {found(fun, qkv()), {type, number, to}}

        assert {as =~ "causal", as =~ "mask of single scores", type, number, to} ==
                 {known?, not known?, type, number, to}

        assert_same(fun, qkv())
      end
    end

    test "have masks of positions beside numbers of another type, which decides" do
      for {number, type, known?} <- [{100, :bf16, true}, {1000, :bf16, false}, {1000, :f32, true}] do
        # Positions of two axes, of which one is of that type and the other one becomes so.
        fun =
          seeing(fn s ->
            rows = s |> places(2, type) |> Nx.subtract(Nx.tensor(0, type: type))
            columns = s |> places(3, :s32) |> Nx.add(number)
            Nx.greater_equal(rows, Nx.subtract(columns, Nx.tensor(number, type: type)))
          end)

        assert [as] = found(fun, qkv())
        assert as =~ "causal" == known?, inspect({number, type, as})
      end
    end

    test "have masks of distances as long as those have a sign, or never needed one" do
      for {from, to, limit} <- [{:s32, :u64, 100}, {:s32, :u64, 3}, {:s16, :u32, 3}, {:s32, :u32, 3}] do
        fun =
          seeing(fn s ->
            s |> places(2, from) |> Nx.subtract(places(s, 3, from)) |> Nx.as_type(to) |> Nx.less(limit)
          end)

        assert [as] = found(fun, qkv())
        assert as =~ "mask of single scores", inspect({from, to, as})
        assert_same(fun, qkv())
      end
    end

    test "have offsets that only a run knows where a type holds the positions of sequences" do
      for {type, known?} <- [{:s32, true}, {:f32, true}, {:bf16, false}, {:f16, false}] do
        fun = fn q, k, v, offset ->
          see = fn s ->
            rows = s |> places(2, :s32) |> Nx.add(offset) |> Nx.as_type(type)
            columns = s |> places(3, :s32) |> Nx.add(Nx.subtract(offset, 2)) |> Nx.as_type(type)
            Nx.greater_equal(rows, columns)
          end

          seeing(see).(q, k, v)
        end

        for offset <- [4, 1000, 5000] do
          args = qkv() ++ [Nx.tensor(offset, type: :s32)]
          assert [as] = found(fun, args)
          assert as =~ "mask of single scores" != known?, inspect({type, as})
          assert_same(fun, args)
        end
      end
    end

    test "have bounds at the ends of their type, which do not go round" do
      bounds = [2 ** 31 - 1, 2 ** 31 - 2, 3, -3, -(2 ** 31) + 1, -(2 ** 31)]

      for {as, see} <- [
            {"ends of columns", &Nx.less_equal(places(&1, 3, :s32), &2)},
            {"starts of columns", &Nx.greater(places(&1, 3, :s32), &2)},
            {"windows", &Nx.less(Nx.subtract(places(&1, 2, :s32), places(&1, 3, :s32)), &2)},
            {"windows from", &Nx.greater_equal(Nx.subtract(places(&1, 2, :s32), places(&1, 3, :s32)), &2)}
          ] do
        fun = fn q, k, v, bound -> seeing(&see.(&1, bound)).(q, k, v) end
        assert [found] = found(fun, qkv() ++ [Nx.tensor(0, type: :s32)])
        refute found =~ "mask of single scores", as
        for bound <- bounds, do: assert_same(fun, qkv() ++ [Nx.tensor(bound, type: :s32)])
      end
    end

    defp scores(q, k), do: Nx.dot(q, [3], [0, 1], k, [3], [0, 1])
    defp weighted(s, v), do: s |> softmax() |> Nx.dot([3], [0, 1], v, [2], [0, 1])

    # Of each row the square of its length.
    defp squares(x), do: Nx.dot(x, [3], [0, 1, 2], x, [3], [0, 1, 2])

    test "whose scores are a difference of products have the sign of the one that they are" do
      positions = normal(4, {6, 4}, :f64)

      for {name, fun, word} <- [
            {"one minus another",
             fn q, k, v -> q |> scores(k) |> Nx.subtract(scores(q, Nx.sin(k))) |> weighted(v) end, "scale 1.0"},
            {"minus distances",
             fn q, k, v ->
               squares = Nx.add(Nx.new_axis(squares(q), 3), Nx.new_axis(squares(k), 2))
               squares |> Nx.subtract(Nx.multiply(2, scores(q, k))) |> Nx.negate() |> weighted(v)
             end, "scale 2.0"},
            {"what is relative minus them",
             fn q, k, v -> q |> Nx.dot([3], positions, [1]) |> Nx.subtract(scores(q, k)) |> weighted(v) end,
             "scale 1.0"},
            {"them minus what is relative",
             fn q, k, v -> q |> scores(k) |> Nx.subtract(Nx.dot(q, [3], positions, [1])) |> weighted(v) end,
             "scale 1.0"}
          ] do
        for fun <- [fun, gradients_of_three(fun)] do
          assert [as] = found(fun, qkv())
          assert as =~ word, inspect({name, as})
          assert as =~ "a bias"
          assert_same(fun, qkv())
        end
      end
    end

    test "that somebody rounds to 8 bits stay" do
      rounded = fn x, type -> x |> Nx.as_type({:f, 8}) |> Nx.as_type(type) end

      for type <- [:f64, :f32] do
        weights = fn q, k, v ->
          q |> scores(k) |> softmax() |> rounded.(type) |> Nx.dot([3], [0, 1], v, [2], [0, 1])
        end

        before = fn q, k, v -> q |> scores(k) |> rounded.(type) |> weighted(v) end

        args = qkv({2, 3, 6, 4}, type)
        assert found(weights, args) == []
        assert found(before, args) == ["as_type is done to its scores"]
        for fun <- [weights, before], do: assert_same(fun, args, [], 0.0)
      end
    end

    test "that somebody looks into with a hook stay" do
      test = self()

      hooked = fn q, k, v ->
        plain(q, k, v, &Kernel.hook(&1, :scores, fn s -> send(test, {:scores, s.shape}) end))
      end

      assert blocks(hooked, qkv()) == 0
      run(hooked, qkv(), Rewriter)
      assert_received {:scores, {2, 3, 6, 6}}
      named = fn q, k, v -> plain(q, k, v, &Expr.metadata(&1, %{somebody: :else})) end
      assert blocks(named, qkv()) == 0
    end

    test "of this library stay its own" do
      fun = fn q, k, v -> Nx.sum(FlashAttention.attention(q, k, v)) end
      expression = apply(Nx.Defn.debug_expr(fun), qkv())
      assert Rewriter.rewrite(expression) == expression
    end

    test "whose weights are asked for too are computed beside when that is wanted" do
      fun = fn q, k, v ->
        p = softmax(Nx.dot(q, [3], [0, 1], k, [3], [0, 1]))
        {Nx.dot(p, [3], [0, 1], v, [2], [0, 1]), p}
      end

      assert found(fun, qkv()) == ["its scores or weights are a result themselves"]
      assert ["f64" <> _] = found(fun, qkv(), weights: :keep)
      assert_same(fun, qkv(), weights: :keep)
    end

    test "that follow on each other, with gradients through all of them" do
      fun = fn q, k, v ->
        Nx.Defn.value_and_grad({q, k, v}, fn {q, k, v} ->
          q |> plain(k, v) |> plain(v, k) |> plain(k, v, &Nx.multiply(&1, 2)) |> Nx.sin() |> Nx.sum()
        end)
      end

      assert [_, _, _] = found(fun, qkv())
      assert Enum.all?(found(fun, qkv()), &(&1 =~ "with dq"))
      assert_same(fun, qkv())
    end
  end

  describe "sinks" do
    # As columns beside the scores, behind or in front of them or both, which are cut off after the softmax; or as more in
    # its denominator.
    def column(q, k, v, sink, maximum), do: beside(q, k, v, sink, maximum, 0)
    def in_front(q, k, v, sink, maximum), do: beside(q, k, v, sink, maximum, div(Nx.size(sink), 3))
    def on_both_sides(q, k, v, sink, maximum), do: beside(q, k, v, sink, maximum, 1)

    defp beside(q, k, v, sink, maximum, first) do
      {batch, heads, rows, columns} = {2, 3, 6, 6}
      s = q |> Nx.dot([3], [0, 1], k, [3], [0, 1]) |> Nx.multiply(0.5)
      causal = Nx.greater_equal(Nx.iota({rows, 1}), Nx.iota({1, columns}))
      s = Nx.select(Nx.broadcast(causal, s), s, -1.0e9)
      count = div(Nx.size(sink), heads)

      [before, behind] =
        for {from, size} <- [{0, first}, {first, count - first}], do: columns(sink, from, size, {batch, rows})

      s = Nx.concatenate(before ++ [s] ++ behind, axis: 3)
      e = Nx.exp(Nx.subtract(s, maximum.(Nx.reduce_max(s, axes: [3], keep_axes: true))))
      p = Nx.divide(e, Nx.sum(e, axes: [3], keep_axes: true))
      p |> Nx.slice_along_axis(first, columns, axis: 3) |> Nx.dot([3], [0, 1], v, [2], [0, 1])
    end

    defp columns(_sink, _from, 0, _sizes), do: []

    defp columns(sink, from, size, {batch, rows}) do
      some = sink |> Nx.slice_along_axis(from, size, axis: 1) |> Nx.reshape({1, 3, 1, size})
      [Nx.broadcast(some, {batch, 3, rows, size})]
    end

    def denominator(q, k, v, sink, maximum) do
      s = q |> Nx.dot([3], [0, 1], k, [3], [0, 1]) |> Nx.multiply(0.5)
      sink = Nx.reshape(sink, {1, 3, 1, div(Nx.size(sink), 3)})
      largest = Nx.reduce_max(sink, axes: [3], keep_axes: true)
      m = s |> Nx.reduce_max(axes: [3], keep_axes: true) |> Nx.max(largest) |> maximum.()
      e = Nx.exp(Nx.subtract(s, m))
      of_sinks = sink |> Nx.subtract(m) |> Nx.exp() |> Nx.sum(axes: [3], keep_axes: true)
      sum = Nx.add(Nx.sum(e, axes: [3], keep_axes: true), of_sinks)
      e |> Nx.divide(sum) |> Nx.dot([3], [0, 1], v, [2], [0, 1])
    end

    for {form, fun, count} <- [
          {"a column", &__MODULE__.column/5, 1},
          {"a column in front", &__MODULE__.in_front/5, 1},
          {"in the denominator", &__MODULE__.denominator/5, 1},
          {"two columns", &__MODULE__.column/5, 2},
          {"two columns in front", &__MODULE__.in_front/5, 2},
          {"three columns on both sides", &__MODULE__.on_both_sides/5, 3},
          {"two in the denominator", &__MODULE__.denominator/5, 2}
        ],
        {maximum, through} <- [
          "a constant": &Nx.Defn.Kernel.stop_grad/1,
          "differentiated too": &Function.identity/1
        ] do
      test "#{form}, where the maximum is #{maximum}: both passes, with the sink's own gradient" do
        args = qkv() ++ [normal(4, {3, unquote(count)}, :f32)]

        step = fn q, k, v, sink, weights ->
          Nx.Defn.value_and_grad({q, k, v, sink}, fn {q, k, v, sink} ->
            Nx.sum(Nx.multiply(unquote(fun).(q, k, v, sink, unquote(through)), weights))
          end)
        end

        args = args ++ [normal(5, {2, 3, 6, 4}, :f64)]
        assert [as] = found(step, args)
        assert as =~ ~r/#{unquote(count)} sinks?,.* with dq, dk, dv, dsink$/
        [plain, rewritten] = for compiler <- [Evaluator, Rewriter], do: run(step, args, compiler)

        assert_close(plain, rewritten)
      end
    end

    # The library's gradient by sinks is of f32; it is the last one here.
    defp assert_close(plain, rewritten) do
      distances = Enum.zip_with(plain, rewritten, &distance/2)
      assert List.last(distances) <= 1.0e-6
      for distance <- Enum.drop(distances, -1), do: assert(distance <= 1.0e-9)
    end

    test "of rows and batches of their own are those of rows" do
      args = qkv() ++ [normal(4, {2, 3, 6, 2}, :f32)]

      step = fn q, k, v, sink ->
        Nx.Defn.value_and_grad({q, k, v, sink}, fn {q, k, v, sink} ->
          s = Nx.concatenate([q |> Nx.dot([3], [0, 1], k, [3], [0, 1]), sink], axis: 3)
          p = s |> softmax() |> Nx.slice_along_axis(0, 6, axis: 3)
          p |> Nx.dot([3], [0, 1], v, [2], [0, 1]) |> Nx.sin() |> Nx.sum()
        end)
      end

      assert [as] = found(step, args)
      assert as =~ "2 sinks" and as =~ "dsink"
      assert_close(run(step, args, Evaluator), run(step, args, Rewriter))
    end

    test "whose gradient goes on, and is a term of a longer sum" do
      args = qkv() ++ [normal(4, {3, 1}, :f32)]

      changed = fn q, k, v, sink ->
        Nx.Defn.grad(sink, fn sink ->
          o = column(q, k, v, Kernel.custom_grad(sink, [sink], &[Nx.multiply(&1, sink)]), &Kernel.stop_grad/1)
          Nx.sum(Nx.sin(o))
        end)
      end

      more = fn q, k, v, sink ->
        Nx.Defn.grad(sink, fn sink ->
          more = Nx.multiply(Nx.sum(Nx.exp(q), axes: [0, 2, 3]), Nx.exp(sink))
          Nx.add(Nx.sum(Nx.sin(column(q, k, v, sink, &Kernel.stop_grad/1))), Nx.sum(more))
        end)
      end

      for step <- [changed, more] do
        assert [as] = found(step, args)
        assert as =~ "dsink"
        [[plain], [rewritten]] = for compiler <- [Evaluator, Rewriter], do: run(step, args, compiler)
        assert distance(plain, rewritten) <= 1.0e-6 * Nx.to_number(Nx.reduce_max(Nx.abs(plain)))
      end
    end
  end

  describe "dropout" do
    # What stays of weights, and by which numbers from 0 to 1: those of Axon.dropout and of whoever drops by hand.
    @dropped [
      {"made up for", &__MODULE__.made_up/2, &__MODULE__.less/1},
      {"not made up for", &__MODULE__.selected/2, &__MODULE__.not_less/1},
      {"where the weight comes second", &__MODULE__.second/2, &__MODULE__.greater/1},
      {"multiplied", &__MODULE__.multiplied/2, &__MODULE__.at_least/1},
      {"multiplied by what makes up", &__MODULE__.by_factor/2, &__MODULE__.less/1}
    ]

    def made_up(p, kept), do: Nx.select(kept, Nx.divide(p, 0.75), zero(p))
    def selected(p, kept), do: Nx.select(kept, p, zero(p))
    def second(p, kept), do: Nx.select(Nx.logical_not(kept), zero(p), Nx.divide(p, 0.75))
    def multiplied(p, kept), do: p |> Nx.multiply(kept) |> Nx.divide(0.75)
    def by_factor(p, kept), do: Nx.multiply(p, Nx.select(kept, Nx.tensor(1 / 0.75, type: p.type), zero(p)))
    def less(u), do: Nx.less(u, 0.75)
    def not_less(u), do: Nx.logical_not(Nx.less(u, 0.25))
    def greater(u), do: Nx.greater(u, 0.25)
    def at_least(u), do: Nx.greater_equal(u, 0.25)
    defp zero(p), do: Nx.tensor(0, type: p.type)

    defp dropping(drop, kept, change \\ & &1) do
      fn q, k, v, key ->
        p = q |> Nx.dot([3], [0, 1], k, [3], [0, 1]) |> change.() |> softmax()
        p |> drop.(kept.(p, key)) |> Nx.dot([3], [0, 1], v, [2], [0, 1])
      end
    end

    defp drawn(p, key) do
      {u, _key} = Nx.Random.uniform(key, 0, 1, shape: p.shape, type: p.type)
      u
    end

    # Of the words that the program's bits are made of: the second half of its key.
    defp kept_here(shape, key) do
      key |> Nx.Random.split() |> then(& &1[1]) |> FlashAttention.Dropout.mask(0.25, shape)
    end

    defp gradients(fun) do
      fn q, k, v, key ->
        Nx.Defn.value_and_grad({q, k, v}, fn {q, k, v} -> fun.(q, k, v, key) |> Nx.sin() |> Nx.sum() end)
      end
    end

    for {name, drop, kept} <- @dropped, {type, shape} <- [f64: {2, 3, 5, 4}, f32: {1, 3, 5, 4}] do
      test "#{name}, in #{type}: refused, or dropped by other bits, in both passes" do
        [drop, kept] = [unquote(drop), unquote(kept)]
        key = Nx.Random.key(7)
        args = qkv(unquote(Macro.escape(shape)), unquote(type)) ++ [key]
        {batch, heads, rows, _} = unquote(Macro.escape(shape))
        mask = kept_here({batch, heads, rows, rows}, key)
        assert Nx.to_number(Nx.sum(mask)) < Nx.size(mask)

        program = dropping(drop, &kept.(drawn(&1, &2)))
        wanted = dropping(drop, fn _p, _key -> mask end)

        for wrap <- [& &1, &gradients/1] do
          assert [reason] = found(wrap.(program), args)
          assert reason =~ "dropout: :resample"
          assert [as] = found(wrap.(program), args, dropout: :resample)
          assert as =~ "dropout 0.25"

          [plain, rewritten] = [
            run(wrap.(wanted), args, Evaluator),
            run(wrap.(program), args, Rewriter, dropout: :resample)
          ]

          tolerance = %{f64: 1.0e-9, f32: 1.0e-5}[unquote(type)]
          for {x, y} <- Enum.zip(plain, rewritten), do: assert(distance(x, y) <= tolerance)
        end
      end
    end

    test "under masks, with biases and for groups of heads" do
      key = Nx.Random.key(8)
      [q, k, v] = qkv()

      change = fn s ->
        causal = Nx.greater_equal(Nx.iota({6, 1}), Nx.iota({1, 6}))
        s |> Nx.add(Nx.iota({6}, type: :f64)) |> then(&Nx.select(Nx.broadcast(causal, &1), &1, -1.0e9))
      end

      repeated = fn t -> t |> Nx.slice_along_axis(0, 1, axis: 1) |> Nx.broadcast({2, 3, 6, 4}) end
      mask = kept_here({2, 3, 6, 6}, key)

      [program, wanted] =
        for kept <- [&less(drawn(&1, &2)), fn _p, _key -> mask end] do
          gradients(fn q, k, v, key ->
            dropping(&made_up/2, kept, change).(q, repeated.(k), repeated.(v), key)
          end)
        end

      assert [as] = found(program, [q, k, v, key], dropout: :resample)

      for word <- ["heads 3:1", "causal", "slopes of distances", "dropout 0.25", "with dq, dk, dv"],
          do: assert(as =~ word)

      [plain, rewritten] = [
        run(wanted, [q, k, v, key], Evaluator),
        run(program, [q, k, v, key], Rewriter, dropout: :resample)
      ]

      for {x, y} <- Enum.zip(plain, rewritten), do: assert(distance(x, y) <= 1.0e-9)
    end

    test "by bits that are not one of Nx.Random's for each weight stays" do
      args = qkv() ++ [Nx.Random.key(7)]

      few = fn p, key ->
        {u, _key} = Nx.Random.uniform(key, 0, 1, shape: {2, 1, 6, 6}, type: :f64)
        Nx.broadcast(u, p)
      end

      by_hand = fn p, _key -> p |> Nx.shape() |> Nx.iota(type: :f64) |> Nx.sin() |> Nx.abs() end
      twice = fn p, key -> key |> then(&drawn(p[[0..0]], &1)) |> then(&Nx.concatenate([&1, &1])) end

      for {draw, reason} <- [{few, "several at once"}, {by_hand, "dropped out"}, {twice, "dropped out"}] do
        program = dropping(&made_up/2, &less(draw.(&1, &2)))
        assert [found] = found(program, args, dropout: :resample)
        assert found =~ reason
      end

      asked = fn q, k, v, key ->
        p = q |> Nx.dot([3], [0, 1], k, [3], [0, 1]) |> softmax()
        u = drawn(p, key)
        {p |> made_up(less(u)) |> Nx.dot([3], [0, 1], v, [2], [0, 1]), u}
      end

      assert found(asked, args, dropout: :resample) == ["what its weights are dropped by is used elsewhere too"]
    end

    test "of several attentions by one draw stays where they are not dropped alike" do
      args = qkv() ++ [Nx.Random.key(7)]

      two = fn one, other ->
        fn q, k, v, key ->
          [p, turned] = [softmax(scores(q, k)), softmax(scores(k, q))]
          u = drawn(p, key)
          [one, other] = [one.(p, u, key), other.(turned, u, key)]
          {Nx.dot(one, [3], [0, 1], v, [2], [0, 1]), Nx.dot(other, [3], [0, 1], v, [2], [0, 1])}
        end
      end

      kept = fn p, u, _key -> made_up(p, less(u)) end
      others = fn p, u, _key -> Nx.select(less(u), zero(p), p) end
      fewer = fn p, u, _key -> Nx.select(Nx.less(u, 0.5), p, zero(p)) end
      turned = fn p, u, _key -> made_up(p, less(Nx.transpose(u, axes: [0, 1, 3, 2]))) end
      of_other_key = fn p, _u, key -> made_up(p, less(drawn(p, Nx.add(key, 1)))) end

      for other <- [kept, of_other_key],
          do: assert(Enum.all?(found(two.(kept, other), args, dropout: :resample), &(&1 =~ "dropout 0.25")))

      for other <- [others, fewer, turned] do
        assert two.(kept, other) |> found(args, dropout: :resample) |> Enum.sort() ==
                 [
                   "another attention drops other weights by the same draw",
                   "what its weights are dropped by is used elsewhere too"
                 ]
      end
    end

    test "asks for one of two things" do
      message = "dropout: expected :refuse or :resample, got :keep"
      assert_raise FlashAttention.Error, message, fn -> found(&plain/3, qkv(), dropout: :keep) end
    end
  end

  describe "slopes of distances" do
    # The gradient of slopes is made of that of the bias, which then is one.
    test "stay a bias where somebody learns them" do
      fun = fn q, k, v, slopes ->
        bias = Nx.multiply(Nx.reshape(slopes, {1, 3, 1, 1}), Nx.iota({1, 1, 1, 6}))
        causal = Nx.greater_equal(Nx.iota({6, 1}), Nx.iota({1, 6}))
        plain(q, k, v, &Nx.select(Nx.broadcast(causal, &1), Nx.add(&1, bias), -1.0e9))
      end

      args = qkv() ++ [Nx.tensor([0.5, 0.25, 0.125])]
      assert [as] = found(fun, args)
      assert as =~ "slopes of distances"

      learned = fn q, k, v, slopes ->
        Nx.Defn.value_and_grad({q, slopes}, fn {q, slopes} -> Nx.sum(Nx.sin(fun.(q, k, v, slopes))) end)
      end

      assert [as] = found(learned, args)
      assert as =~ "a bias" and as =~ "dbias"
      assert_same(learned, args)
    end
  end

  describe "what it costs" do
    # In reductions, the scheduler's count of calls, and not in seconds.
    defp cost(fun, args) do
      expression = apply(Nx.Defn.debug_expr(fun), args)
      {:reductions, before} = Process.info(self(), :reductions)
      Rewriter.rewrite(expression)
      {:reductions, later} = Process.info(self(), :reductions)
      later - before
    end

    test "grows with the layers, and no faster" do
      [few, many] = for count <- [8, 32], do: cost(&Layers.step/2, Layers.arguments(count))
      assert many < 4.4 * few
    end

    test "is little where there is no attention" do
      no_attention = fn x, w -> Enum.reduce(0..31, x, &Nx.add(&2, Nx.tanh(Nx.dot(&2, w[&1])))) end
      args = [Nx.template({2, 16, 8}, :f32), Nx.template({32, 8, 8}, :f32)]
      assert 50 * cost(no_attention, args) < cost(&Layers.step/2, Layers.arguments(32))
    end
  end

  def step(q, k, v), do: plain(q, k, v)

  # Of any number of arguments, as the function has them.
  defp gradients_of_three(fun) do
    case Function.info(fun, :arity) do
      {:arity, 3} -> fn q, k, v -> gradients_of_three(fun, q, k, v, []) end
      {:arity, 4} -> fn q, k, v, x -> gradients_of_three(fun, q, k, v, [x]) end
      {:arity, 5} -> fn q, k, v, x, y -> gradients_of_three(fun, q, k, v, [x, y]) end
    end
  end

  defp gradients_of_three(fun, q, k, v, rest) do
    Nx.Defn.value_and_grad({q, k, v}, fn {q, k, v} -> fun |> apply([q, k, v | rest]) |> Nx.sin() |> Nx.sum() end)
  end

  # No farther from the numbers of f64 than the program itself in its own type, twice over.
  defp assert_as_accurate(fun, args) do
    wide = for arg <- args, do: if(Nx.Type.float?(arg.type), do: Nx.as_type(arg, :f64), else: arg)

    [exact, plain, rewritten] = [run(fun, wide, Evaluator), run(fun, args, Evaluator), run(fun, args, Rewriter)]

    for [exact, plain, rewritten] <- Enum.zip([exact, plain, rewritten]) do
      assert {plain.type, plain.shape} == {rewritten.type, rewritten.shape}
      largest = exact |> Nx.abs() |> Nx.reduce_max() |> Nx.to_number()
      rounding = plain.type |> Nx.Type.merge_scalar(1.0) |> Nx.Constants.epsilon() |> Nx.to_number()
      assert distance(rewritten, exact) <= 2 * distance(plain, exact) + 2 * rounding * max(largest, 0.5)
    end
  end

  describe "forms" do
    # Each is tested below, one by one, in inference and in training.
    test "are as many as the guide says" do
      guide = File.read!("guides/existing_models.md")

      for {family, names} <- AttentionForms.families() do
        expected = for {name, expected} <- AttentionForms.names(), name in names, do: expected
        trained = Enum.count(expected, &(&1 =~ ~r/^(found|chunks)/))
        inferred = trained + Enum.count(expected, &(&1 =~ ~r/^forward/))
        assert guide =~ "| #{family} | #{inferred} of #{length(names)} | #{trained} of #{length(names)} |"
      end
    end

    test "whose gradients are nothing, as of one key or of scores of 0, are silent about those" do
      [q, _, _] = qkv()
      [_, k, v] = qkv({2, 3, 1, 4})
      step = gradients_of_three(fn q, k, v -> plain(q, k, v) end)
      assert found(step, [q, k, v]) == []
      assert_same(step, [q, k, v])

      nothing =
        gradients_of_three(fn q, k, v -> plain(q, k, v, &Nx.multiply(&1, Nx.tensor(0.0, type: :f64))) end)

      assert found(nothing, qkv()) == []
      assert_same(nothing, qkv())
    end

    test "in blocks of somebody else are found in what those are made of" do
      block = fn q, k, v ->
        Nx.block(%{__struct__: Somebody.FastAttention}, [q, k, v], q, fn _block, q, k, v -> plain(q, k, v) end)
      end

      assert ["f64" <> _] = found(block, qkv())
      assert_same(block, qkv())

      # Nx differentiates what a block is made of beside it: the backward has a forward of its own there.
      assert [backward, forward] = Enum.sort_by(found(gradients_of_three(block), qkv()), &(not (&1 =~ "with")))
      assert backward =~ "with dq, dk, dv" and not (forward =~ "with")
      assert_same(gradients_of_three(block), qkv())
      assert blocks(gradients_of_three(block), qkv()) == 2
    end

    test "in blocks that stay are named once" do
      block = fn q, k, v ->
        struct = %{__struct__: Somebody.FastAttention}
        Nx.block(struct, [q, k, v], q, fn _block, q, k, v -> plain(q, k, v, &Nx.clip(&1, -1, 1)) end)
      end

      assert found(block, qkv()) == ["clip is done to its scores"]
      assert found(gradients_of_three(block), qkv()) == ["clip is done to its scores"]
    end

    test "in blocks that are compiled by others' own, backward alone, and with masks and heads of groups inside" do
      block = fn q, k, v ->
        struct = %{__struct__: Somebody.FastAttention, causal: true}

        Nx.block(struct, [q, k, v], Nx.multiply(q, 2), fn block, q, k, v ->
          hidden = if block.causal, do: -1.0e9, else: 0
          visible = Nx.greater_equal(Nx.iota({6, 1}), Nx.iota({1, 6}))
          repeat = &(&1 |> Nx.new_axis(2) |> Nx.broadcast({2, 3, 2, 6, 4}) |> Nx.reshape({2, 6, 6, 4}))
          hide = &Nx.select(Nx.broadcast(visible, &1), &1, hidden)
          q |> plain(repeat.(k), repeat.(v), hide) |> Nx.multiply(2)
        end)
      end

      args = [normal(1, {2, 6, 6, 4}, :f64) | tl(qkv())]
      found = found(gradients_of_three(block), args)
      assert Enum.any?(found, &(&1 =~ "heads 6:3" and &1 =~ "causal, with dq, dk, dv"))
      assert_same(gradients_of_three(block), args)
    end

    for {name, expected} <- AttentionForms.names() do
      # What is in f64 around it is rounded there.
      @tolerance if name =~ "in f32 inside", do: 1.0e-5, else: 1.0e-9

      test "#{name}: #{expected}" do
        {fun, args} = AttentionForms.form(unquote(name))
        found = found(fun, args)

        case unquote(expected) do
          <<kind::binary-size(5), rest::binary>> when kind in ["found", "forwa"] ->
            assert [as] = found
            assert as =~ "seqlen", "#{as}"

            for word <- rest |> String.trim_leading("rd") |> String.split([": ", ", "], trim: true),
                do: assert(as =~ word)

            assert_same(fun, args, [], @tolerance)

          "chunks: " <> count ->
            assert length(found) == String.to_integer(count) and Enum.all?(found, &(&1 =~ "seqlen"))
            assert_same(fun, args)

          reason ->
            assert Enum.all?(Rewriter.explain(fun, args), &(not &1.rewritten))
            if reason != "silent", do: assert(Enum.any?(found, &(&1 =~ reason)), inspect(found))
        end
      end

      # What is found in inference alone stays in training, forward and all.
      if String.starts_with?(expected, "forward") do
        test "#{name} in training" do
          {fun, args} = AttentionForms.form(unquote(name))
          assert_same(gradients_of_three(fun), args)
        end
      end

      if expected =~ ~r/^(found|forward)/ do
        for type <- [:f32, :bf16], gradients? <- [false, true], expected =~ ~r/^found/ or not gradients? do
          test "#{name} in #{type}#{if gradients?, do: ", with gradients"}" do
            {fun, args} = AttentionForms.form(unquote(name), unquote(type))
            fun = if unquote(gradients?), do: gradients_of_three(fun), else: fun
            assert [as] = found(fun, args)
            assert as =~ "seqlen", as
            assert_as_accurate(fun, args)
          end
        end
      end

      if String.starts_with?(expected, "found") do
        test "#{name}: gradients" do
          {fun, args} = AttentionForms.form(unquote(name))
          {[q, k, v], rest} = Enum.split(args, 3)

          grad = fn q, k, v ->
            Nx.Defn.value_and_grad({q, k, v}, fn {q, k, v} ->
              apply(fun, [q, k, v | rest]) |> Nx.sin() |> Nx.sum()
            end)
          end

          assert [as] = found(grad, [q, k, v])
          assert as =~ "with d"
          assert_same(grad, [q, k, v], [], @tolerance)
        end
      end
    end
  end
end
