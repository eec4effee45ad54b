defmodule FlashAttention.DefnTest do
  use ExUnit.Case, async: true

  alias FlashAttention.Options
  alias FlashAttention.Test.{Numerical, NxAttention, Tensors}

  @moduletag :defn
  doctest FlashAttention.Defn

  @compile {:no_warn_undefined,
            [
              Nx,
              Nx.Defn,
              Nx.Defn.Composite,
              Nx.Defn.Tree,
              Nx.Defn.Kernel,
              Numerical,
              NxAttention,
              FlashAttention.Defn.Probe
            ]}

  # {batch, seqlen_q, seqlen_k, num_heads, num_kv_heads, head_dim}, options, of which some become tensors.
  @problems [
    {{2, 7, 7, 2, 2, 5}, []},
    {{1, 9, 9, 3, 1, 8}, [causal: false]},
    {{2, 5, 11, 4, 2, 6}, [scale: 0.3]},
    {{2, 13, 13, 2, 1, 4}, [window: {3, 0}, softcap: 2.0]},
    {{1, 6, 9, 4, 2, 7}, [causal: false, window: {4, 1}, sink: 2]},
    {{3, 8, 8, 2, 2, 3}, [sink: 1, softcap: 1.5, deterministic: true]},
    {{2, 7, 9, 4, 2, 3}, [alibi_slopes: 2, window: {3, 2}, causal: false]},
    {{2, 9, 6, 2, 1, 4}, [alibi_slopes: 1, sink: 1]},
    {{2, 7, 9, 4, 2, 3}, [bias: {nil, {1, 4, 7, 9}}]},
    {{2, 6, 6, 2, 2, 3}, [bias: {:f32, {2, 1, 1, 6}}, causal: false, softcap: 2.0]}
  ]

  # Options that are tensors.
  @optional [:sink, :alibi_slopes, :bias]

  defp nx(%{data: data, type: type, shape: shape}), do: data |> Nx.from_binary(type) |> Nx.reshape(shape)

  defp problem(index, type \\ :f64) do
    {sizes, opts} = Enum.at(@problems, index)
    problem = Tensors.problem(index + 1, type, sizes, opts)
    optional = for name <- @optional, tensor = problem.opts[name], do: nx(tensor)
    {[nx(problem.q), nx(problem.k), nx(problem.v)] ++ optional, nx(problem.dout), opts}
  end

  # The tensors behind q, k and v are of the options that are said to be tensors, of which the first one counts.
  defp with_optional([q, k, v | tensors], opts) do
    names = for name <- @optional, opts[name], do: name
    [q, k, v, Enum.zip(names, tensors) ++ opts]
  end

  defp outputs(module, tensors, opts) do
    attention = fn tensors ->
      apply(module, :attention_with_lse, with_optional(Tuple.to_list(tensors), opts))
    end

    Nx.Defn.jit_apply(attention, [List.to_tuple(tensors)])
  end

  # The dot product with dout: its gradient by the tensors is the backward.
  defp loss(module, tensors, dout, opts),
    do: module |> apply(:attention, with_optional(tensors, opts)) |> Nx.multiply(dout) |> Nx.sum()

  defp gradients(module, tensors, dout, opts) do
    grad = fn tensors, dout -> Nx.Defn.grad(tensors, &loss(module, Tuple.to_list(&1), dout, opts)) end
    Nx.Defn.jit_apply(grad, [List.to_tuple(tensors), dout]) |> Tuple.to_list()
  end

  defp distance(x, y), do: Nx.subtract(x, y) |> Nx.abs() |> Nx.reduce_max() |> Nx.to_number()

  # The sink and its gradient are f32.
  defp assert_close(x, y, tolerance) do
    assert Nx.shape(x) == Nx.shape(y)
    assert distance(x, y) <= if(Nx.type(x) == {:f, 32}, do: max(tolerance, 1.0e-6), else: tolerance)
  end

  for {{sizes, opts}, index} <- Enum.with_index(@problems) do
    test "#{inspect(sizes)} #{inspect(opts)}: outputs and gradients are those of attention written in Nx" do
      {tensors, dout, opts} = problem(unquote(index))

      {o, lse} = outputs(FlashAttention, tensors, opts)
      {plain_o, plain_lse} = outputs(NxAttention, tensors, opts)
      assert_close(o, plain_o, 1.0e-13)
      assert_close(lse, plain_lse, 1.0e-13)

      ours = gradients(FlashAttention, tensors, dout, opts)
      plain = gradients(NxAttention, tensors, dout, opts)
      for {x, y} <- Enum.zip(ours, plain), do: assert_close(x, y, 1.0e-12)
    end
  end

  test "sinks of a row's own: outputs and gradients are those of attention written in Nx" do
    {[q, k, v], dout, opts} = problem(0)
    {batch, rows, heads, _dim} = Nx.shape(q)
    sinks = nx(Tensors.random(99, :f32, {batch, rows, 2, heads}))

    loss = fn module, {q, k, v, sinks}, dout ->
      {o, lse} = module.attention_with_lse(q, k, v, [sink: sinks] ++ opts)
      Nx.add(Nx.sum(Nx.multiply(o, dout)), Nx.sum(Nx.sin(lse)))
    end

    [ours, plain] =
      for module <- [FlashAttention, NxAttention] do
        fun = fn tensors, dout -> Nx.Defn.value_and_grad(tensors, &loss.(module, &1, dout)) end
        {value, gradients} = Nx.Defn.jit_apply(fun, [{q, k, v, sinks}, dout])
        [value | Tuple.to_list(gradients)]
      end

    for {x, y} <- Enum.zip(ours, plain), do: assert_close(x, y, 1.0e-12)
  end

  test "outside of defn it computes at once, with the numbers of the eager functions" do
    for type <- [:f32, :f64, :bf16, :f16] do
      {[q, k, v, sink], _dout, opts} = problem(4, type)
      {o, lse} = FlashAttention.attention_with_lse(q, k, v, [sink: sink] ++ opts)
      assert {o, lse} == FlashAttention.forward_with_states!(q, k, v, [sink: sink] ++ opts)
      assert FlashAttention.attention(q, k, v, [sink: sink] ++ opts) == o
    end
  end

  test "gradients are the library's own backward, in every type" do
    for type <- [:f32, :bf16, :f16] do
      {[q, k, v, sink] = tensors, dout, opts} = problem(4, type)
      {o, lse} = FlashAttention.forward_with_states!(q, k, v, [sink: sink] ++ opts)
      {dq, dk, dv, %{sink: dsink}} = FlashAttention.backward!(dout, q, k, v, o, lse, [sink: sink] ++ opts)
      assert gradients(FlashAttention, tensors, dout, opts) == [dq, dk, dv, dsink]
    end
  end

  test "the gradient of a loss in another type, and of one that uses few elements" do
    {tensors, _dout, opts} = problem(0, :bf16)

    # The loss is in f32, attention in the type of the tensors. As accurate as unfused attention in bf16.
    dq = fn module, [q, k, v] ->
      Nx.Defn.grad(q, &(module.attention(&1, k, v, opts) |> Nx.as_type(:f32) |> Nx.sum()))
    end

    exact = dq.(NxAttention, Enum.map(tensors, &Nx.as_type(&1, :f64)))
    assert Nx.type(dq.(FlashAttention, tensors)) == {:bf, 16}
    assert distance(dq.(FlashAttention, tensors), exact) <= 2 * distance(dq.(NxAttention, tensors), exact)

    {[q, k, v], _dout, opts} = problem(0)
    corner = fn module -> fn q -> module.attention(q, k, v, opts)[[0, 3, 1, 2]] end end
    assert_close(Nx.Defn.grad(q, corner.(FlashAttention)), Nx.Defn.grad(q, corner.(NxAttention)), 1.0e-13)
  end

  test "inside defn, with what comes before and after differentiated too" do
    {[q, k, v], dout, _opts} = problem(3)
    weight = Nx.iota({4, 4}, type: :f64) |> Nx.divide(7)

    network = fn module ->
      fn weight, {q, k, v, dout} ->
        Nx.Defn.value_and_grad(weight, fn weight ->
          o = module.attention(Nx.dot(q, [3], weight, [0]), k, Nx.sin(v), window: {3, 0})
          Nx.sum(Nx.multiply(Nx.tanh(o), dout))
        end)
      end
    end

    {value, gradient} = Nx.Defn.jit_apply(network.(FlashAttention), [weight, {q, k, v, dout}])
    {plain_value, plain_gradient} = Nx.Defn.jit_apply(network.(NxAttention), [weight, {q, k, v, dout}])
    assert_close(value, plain_value, 1.0e-12)
    assert_close(gradient, plain_gradient, 1.0e-12)
  end

  test "a tensor that is given several times gets the sum of its gradients" do
    {[q | _], dout, _opts} = problem(0)
    loss = fn module -> fn x -> Nx.sum(Nx.multiply(module.attention(x, x, x), dout)) end end
    assert_close(Nx.Defn.grad(q, loss.(FlashAttention)), Nx.Defn.grad(q, loss.(NxAttention)), 1.0e-12)
  end

  @tag :nx_while
  test "inside while" do
    {[q, k, v, _sink], _dout, _opts} = problem(5)
    attend = &NxAttention.attention(&1, k, v, causal: false)
    three = Nx.Defn.grad(q, &Nx.sum(Nx.pow(attend.(attend.(attend.(&1))), 2)))
    assert_close(Numerical.repeated(q, k, v), three, 1.0e-12)
  end

  test "gradients of Nx's own are known to be right or wrong, for good" do
    for what <- [:while, :vectorized] do
      assert is_boolean(FlashAttention.Defn.gradient_right?(what))
      assert FlashAttention.Defn.gradient_right?(what) == FlashAttention.Defn.Probe.right?(what)
    end
  end

  test "inside defn and cond" do
    {[q, k, v, sink], _dout, _opts} = problem(5)

    loss = fn {q, k, v, sink} ->
      NxAttention.attention(q, k, v, window: {3, 0}, sink: sink) |> Nx.sin() |> Nx.sum()
    end

    plain = Nx.Defn.grad({q, k, v, sink}, loss) |> Tuple.to_list()
    ours = Numerical.gradients(q, k, v, sink) |> Tuple.to_list()
    for {x, y} <- Enum.zip(ours, plain), do: assert_close(x, y, 1.0e-12)

    assert Numerical.with_lse(q, k, v) == FlashAttention.attention_with_lse(q, k, v)

    taken = Nx.Defn.grad(q, &Nx.sum(Nx.pow(NxAttention.attention(&1, k, v), 2)))
    assert_close(Numerical.either(q, k, v, 1), taken, 1.0e-12)
    assert_close(Numerical.either(q, k, v, 0), Nx.multiply(4, Nx.pow(q, 3)), 1.0e-12)
  end

  test "a device by name: the same numbers, from the device that is asked for" do
    {[q, k, v, sink], dout, opts} = problem(4)

    plain = Keyword.delete(opts, :sink)

    {o, lse} =
      Nx.Defn.jit_apply(&FlashAttention.attention_with_lse(&1, &2, &3, [device: :cpu] ++ plain), [q, k, v])

    assert {o, lse} == FlashAttention.forward_with_states!(q, k, v, plain)

    tensors = [q, k, v, sink]

    assert gradients(FlashAttention, tensors, dout, [device: :cpu] ++ opts) ==
             gradients(FlashAttention, tensors, dout, opts)

    # The naive one rounds differently.
    f32 = Enum.map([q, k, v], &Nx.as_type(&1, :f32))

    assert apply(FlashAttention, :attention, f32 ++ [[device: :reference]]) !=
             apply(FlashAttention, :attention, f32)

    assert_raise FlashAttention.Error, ~r/device/, fn ->
      FlashAttention.attention(q, k, v, device: {:cuda, 999})
    end
  end

  test "axes keep their names" do
    {[q, k, v], _dout, opts} = problem(0, :f32)
    q = Nx.rename(q, [:batch, :row, :head, :dim])
    k = Nx.rename(k, [:batch, :column, :group, nil])

    for attention <- [
          &FlashAttention.attention_with_lse/4,
          &Nx.Defn.jit_apply(fn q, k, v -> FlashAttention.attention_with_lse(q, k, v, &4) end, [&1, &2, &3])
        ] do
      {o, lse} = attention.(q, k, v, opts)
      assert Nx.names(o) == [:batch, :row, :head, :dim]
      assert Nx.names(lse) == [:batch, :head, :row]
    end

    {dq, dk} = Nx.Defn.grad({q, k}, fn {q, k} -> Nx.sum(FlashAttention.attention(q, k, v, opts)) end)
    assert {Nx.names(dq), Nx.names(dk)} == {Nx.names(q), Nx.names(k)}
  end

  # Twice the batch: one half is the other one upside down.
  defp halves(tensor), do: Nx.stack([tensor, Nx.reverse(tensor)]) |> Nx.vectorize(:half)

  test "vectorized axes are a part of the batch" do
    {[q, k, v, sink], _dout, opts} = problem(5)
    [vq, vk, vv] = Enum.map([q, k, v], &halves/1)

    {o, lse} = FlashAttention.attention_with_lse(vq, vk, vv, [sink: sink] ++ opts)
    assert o.vectorized_axes == [half: 2] and lse.vectorized_axes == [half: 2]
    {first, first_lse} = FlashAttention.attention_with_lse(q, k, v, [sink: sink] ++ opts)
    assert Nx.devectorize(o)[0] |> Nx.rename(nil_names(4)) == first
    assert Nx.devectorize(lse)[0] |> Nx.rename(nil_names(3)) == first_lse

    # One tensor with vectorized axes is enough.
    mixed = FlashAttention.attention(vq, k, v, [sink: sink] ++ opts)
    assert Nx.devectorize(mixed)[0] |> Nx.rename(nil_names(4)) == first
  end

  test "options that are tensors of a batch stand beside a batch that is vectorized axes" do
    t = fn seed, shape -> Nx.sin(Nx.add(Nx.iota(shape, type: :f64), seed)) end
    {q, k, bias} = {t.(1, {3, 2, 4, 2, 4}), t.(2, {2, 4, 2, 4}), t.(3, {6, 1, 4, 4})}
    key_lengths = Nx.tensor([1, 3, 4, 2, 0, 4], type: :s32)
    opts = [bias: bias, key_lengths: key_lengths]
    {o, lse} = FlashAttention.attention_with_lse(Nx.vectorize(q, :n), k, k, opts)

    for n <- 0..2 do
      opts = [bias: bias[(2 * n)..(2 * n + 1)], key_lengths: key_lengths[(2 * n)..(2 * n + 1)]]
      {alone, alone_lse} = FlashAttention.attention_with_lse(q[n], k, k, opts)
      assert Nx.devectorize(o)[n] |> Nx.rename(nil_names(4)) == alone
      assert Nx.devectorize(lse)[n] |> Nx.rename(nil_names(3)) == alone_lse
    end

    # The batch without its vectorized axes is not the batch.
    assert_raise FlashAttention.Error, ~r/^key_lengths: /, fn ->
      FlashAttention.attention(Nx.vectorize(q, :n), k, k, key_lengths: key_lengths[0..1])
    end
  end

  @tag :nx_vectorized
  test "vectorized axes have gradients" do
    {[q, k, v, sink], dout, opts} = problem(5)
    [vq, vk, vv, vdout] = Enum.map([q, k, v, dout], &halves/1)

    gradients = fn module, {q, k, v}, dout ->
      Nx.Defn.grad({q, k, v}, fn {q, k, v} ->
        q |> module.attention(k, v, [sink: sink] ++ opts) |> Nx.multiply(dout) |> Nx.sum()
      end)
    end

    upper = gradients.(NxAttention, {q, k, v}, dout)
    lower = gradients.(NxAttention, {Nx.reverse(q), Nx.reverse(k), Nx.reverse(v)}, Nx.reverse(dout))
    vectorized = gradients.(FlashAttention, {vq, vk, vv}, vdout) |> Tuple.to_list()

    for {gradient, index} <- Enum.with_index(vectorized) do
      assert gradient.vectorized_axes == [half: 2]
      flat = gradient |> Nx.devectorize() |> Nx.rename(nil_names(5))
      assert_close(flat, Nx.stack([elem(upper, index), elem(lower, index)]), 1.0e-12)
    end
  end

  defp nil_names(rank), do: List.duplicate(nil, rank)

  test "the gradient has no gradient, and says so" do
    {[q, k, v], _dout, _opts} = problem(0)
    first = fn q -> Nx.Defn.grad(q, fn q -> Nx.sum(FlashAttention.attention(q, k, v)) end) end

    assert_raise FlashAttention.Error, ~r/gradient of attention has no gradient itself/, fn ->
      Nx.Defn.grad(q, fn q -> Nx.sum(Nx.multiply(first.(q), q)) end)
    end

    # What does not go through the first gradient is fine.
    assert Nx.shape(Nx.Defn.grad(q, fn q -> Nx.sum(Nx.multiply(Nx.Defn.Kernel.stop_grad(first.(q)), q)) end)) ==
             Nx.shape(q)
  end

  test "the gradient has a gradient by that of the output, as attention written in Nx has" do
    for index <- [0, 4], type <- [:f64, :f32] do
      {tensors, dout, opts} = problem(index, type)
      weights = for tensor <- tensors, do: Nx.sin(Nx.iota(Nx.shape(tensor), type: Nx.type(tensor)))
      arguments = [List.to_tuple(tensors), List.to_tuple(weights), dout]

      # How much each gradient adds to a loss, and the gradient of that by the cotangent of o.
      [ours, plain] =
        for module <- [FlashAttention, NxAttention] do
          Nx.Defn.jit_apply(&by_dout(module, &1, &2, &3, opts), arguments)
        end

      assert Nx.type(ours) == Nx.type(dout)
      assert_close(ours, plain, if(type == :f64, do: 1.0e-6, else: 1.0e-5))
    end
  end

  defp by_dout(module, tensors, weights, dout, opts) do
    Nx.Defn.grad(dout, fn dout ->
      Nx.Defn.grad(tensors, &loss(module, Tuple.to_list(&1), dout, opts))
      |> Tuple.to_list()
      |> Enum.zip_with(Tuple.to_list(weights), &Nx.sum(Nx.multiply(&1, &2)))
      |> Enum.reduce(&Nx.add/2)
    end)
  end

  # A z-loss beside a loss of o.
  defp loss_of_both(module, tensors, dout, opts) do
    {o, lse} = apply(module, :attention_with_lse, with_optional(tensors, opts))
    Nx.add(Nx.sum(Nx.multiply(o, dout)), Nx.mean(Nx.multiply(lse, lse)))
  end

  for index <- 0..(length(@problems) - 1) do
    test "a loss of o and lse has the gradients of attention written in Nx, problem #{index}" do
      {tensors, dout, opts} = problem(unquote(index))
      tensors = List.to_tuple(tensors)

      gradients = fn module, loss ->
        fun = fn tensors, dout -> Nx.Defn.grad(tensors, &loss.(module, Tuple.to_list(&1), dout, opts)) end
        Nx.Defn.jit_apply(fun, [tensors, dout]) |> Tuple.to_list()
      end

      of_lse = fn module, tensors, _dout, opts ->
        {_o, lse} = apply(module, :attention_with_lse, with_optional(tensors, opts))
        Nx.sum(Nx.sin(lse))
      end

      for loss <- [&loss_of_both/4, of_lse],
          {ours, plain} <- Enum.zip(gradients.(FlashAttention, loss), gradients.(NxAttention, loss)),
          do: assert_close(ours, plain, 1.0e-11)
    end
  end

  test "a loss of o and lse takes one backward, which without lse has no dlse" do
    {[q, k, v], dout, opts} = problem(0)

    blocks = fn loss ->
      expr = Nx.Defn.debug_expr(fn q -> Nx.Defn.grad(q, loss) end).(q)
      for %{pass: :backward, shapes: shapes} <- blocks_of(expr), do: Keyword.keys(shapes)
    end

    assert [with_dlse] = blocks.(&loss_of_both(FlashAttention, [&1, k, v], dout, opts))
    assert [without] = blocks.(&loss(FlashAttention, [&1, k, v], dout, opts))
    assert with_dlse -- without == [:dlse]

    stopped = fn q ->
      {o, lse} = FlashAttention.attention_with_lse(q, k, v, opts)
      Nx.add(Nx.sum(o), Nx.sum(Nx.Defn.Kernel.stop_grad(lse)))
    end

    assert Nx.Defn.grad(q, stopped) == Nx.Defn.grad(q, &Nx.sum(FlashAttention.attention(&1, k, v, opts)))
  end

  test "the gradient by dlse of a gradient is the derivative of lse" do
    {tensors, dout, opts} = problem(4)
    tensors = List.to_tuple(tensors)
    {_o, lse} = outputs(FlashAttention, Tuple.to_list(tensors), opts)

    by_dlse = fn module ->
      fun = fn dlse, tensors, dout ->
        Nx.Defn.grad(dlse, fn dlse ->
          loss = fn tensors ->
            {o, lse} = apply(module, :attention_with_lse, with_optional(Tuple.to_list(tensors), opts))
            Nx.add(Nx.sum(Nx.multiply(o, dout)), Nx.sum(Nx.multiply(lse, dlse)))
          end

          {dq, dk, dv, _dsink} = Nx.Defn.grad(tensors, loss)
          Nx.add(Nx.sum(Nx.sin(dq)), Nx.add(Nx.sum(Nx.cos(dk)), Nx.sum(dv)))
        end)
      end

      Nx.Defn.jit_apply(fun, [Nx.sin(lse), tensors, dout])
    end

    assert_close(by_dlse.(FlashAttention), by_dlse.(NxAttention), 1.0e-9)
  end

  test "errors come when the expression is built, in the library's words" do
    t = fn shape, type -> Nx.broadcast(Nx.tensor(0, type: type), shape) end
    q = t.({1, 4, 2, 8}, :f32)

    for {k, v, opts, message} <- [
          {t.({1, 4, 2, 6}, :f32), q, [], "k: expected head_dim 8 as in q, got 6"},
          {t.({1, 4, 2, 8}, :bf16), q, [], "k: expected type f32 as in q, got bf16"},
          {q, t.({4, 2, 8}, :f32), [],
           "v: expected rank 4, [batch, seqlen_k, num_kv_heads, head_dim], got rank 3"},
          {q, 5, [], "v: expected an Nx tensor, got 5"},
          {t.({}, :f32), q, [], "k: expected rank 4, [batch, seqlen_k, num_kv_heads, head_dim], got rank 0"},
          {t.({4}, :f32), q, [], "k: expected rank 4, [batch, seqlen_k, num_kv_heads, head_dim], got rank 1"},
          {q, q, [results: :device],
           "opts: expected keys among #{Enum.join(Options.keys() -- [:keep, :results, :dlse], ", ")}, got :results"},
          {q, q, [causal: 1], "causal: expected true or false, got 1"},
          {q, q, [sink: t.({3, 5}, :f32)], "sink: expected num_heads 2 as in q, got 5"},
          {q, q, [sink: Nx.vectorize(t.({3, 1, 2}, :f32), :x)],
           "sink: expected a tensor without vectorized axes, got [x: 3]"}
        ] do
      for call <- [
            fn -> FlashAttention.attention(q, k, v, opts) end,
            fn -> Nx.Defn.jit_apply(fn q -> FlashAttention.attention(q, k, v, opts) end, [q]) end
          ] do
        error = assert_raise FlashAttention.Error, call
        assert Exception.message(error) =~ message
      end
    end

    # A vectorized axis is a part of the batch, and stands for it where there is none.
    k = t.({1, 4, 2, 8}, :f32)

    for {q, rank} <- [{t.({}, :f32), 0}, {t.({4}, :f32), 1}, {Nx.vectorize(t.({2}, :f32), :x), 1}] do
      error = assert_raise FlashAttention.Error, fn -> FlashAttention.attention(q, k, k) end
      message = "q: expected rank 4, [batch, seqlen_q, num_heads, head_dim], got rank #{rank}"
      assert Exception.message(error) == message
    end
  end

  test "an expression holds no scores: its tensors are inputs, outputs and what the loss makes of them" do
    {[q, k, v], dout, opts} = problem(2)
    grad = fn tensors -> Nx.Defn.grad(tensors, &loss(FlashAttention, Tuple.to_list(&1), dout, opts)) end
    {_, sizes} = Nx.Defn.debug_expr(grad).({q, k, v}) |> Nx.Defn.Composite.reduce({%{}, []}, &collect/2)
    assert Enum.max(sizes) <= Enum.max(Enum.map([q, k, v], &Nx.size/1))
  end

  # The structs of an expression's blocks, each once.
  defp blocks_of(expr) do
    {_, blocks} = Nx.Defn.Composite.reduce(expr, {%{}, []}, &collect_blocks/2)
    blocks
  end

  defp collect_blocks(%{data: %{id: id, op: op, args: args}} = tensor, {seen, blocks}) do
    if Map.has_key?(seen, id) do
      {seen, blocks}
    else
      acc = {Map.put(seen, id, true), if(op == :block, do: [hd(args) | blocks], else: blocks)}
      {_, acc} = Nx.Defn.Tree.apply_args(tensor, acc, fn arg, acc -> {arg, collect_blocks(arg, acc)} end)
      acc
    end
  end

  defp collect(%{data: %{id: id}} = tensor, {seen, sizes}) do
    if Map.has_key?(seen, id) do
      {seen, sizes}
    else
      # Bytes are the workspace that XLA would give a GPU.
      counts? = not match?({class, _} when class in [:tuple, :u], tensor.type)
      acc = {Map.put(seen, id, true), if(counts?, do: [Nx.size(tensor) | sizes], else: sizes)}
      {_, acc} = Nx.Defn.Tree.apply_args(tensor, acc, fn arg, acc -> {arg, collect(arg, acc)} end)
      acc
    end
  end
end
