defmodule FlashAttention.PartsDefnTest do
  # Merges inside defn, against the formulas in Nx's own operations.
  use ExUnit.Case, async: true

  alias FlashAttention.{Error, Parts, Sink}

  @moduletag :defn
  @compile {:no_warn_undefined, [Nx, Nx.Defn, Nx.Random]}

  defp random(seed, shape, type \\ :f64) do
    {x, _key} = Nx.Random.normal(Nx.Random.key(seed), shape: shape, type: :f64)
    Nx.as_type(x, type)
  end

  defp parts(count, type \\ :f64) do
    stat = if type == :f64, do: :f64, else: :f32

    for p <- 1..count,
        do: {random(p, {2, 5, 3, 4}, type), random(p + 50, {2, 3, 5}, stat)}
  end

  defp plain(parts, sink) do
    lse = Nx.stack(for {_o, lse} <- parts, do: lse)
    sinks = sinks(sink)
    total = Nx.add(Nx.sum(Nx.exp(lse), axes: [0]), Nx.sum(Nx.exp(sinks), axes: [0]))
    weight = fn lse -> Nx.divide(Nx.exp(lse), total) |> Nx.transpose(axes: [0, 2, 1]) |> Nx.new_axis(3) end
    o = for {o, lse} <- parts, do: Nx.multiply(weight.(lse), o)
    {Enum.reduce(o, &Nx.add/2), Nx.log(total)}
  end

  # [num_sinks, batch, num_heads, seqlen_q]
  defp sinks(sink) do
    sink = Nx.as_type(sink, :f64)

    case Nx.rank(sink) do
      2 -> sink |> Nx.reshape({:auto, 1, 3, 1}) |> Nx.broadcast({Nx.axis_size(sink, 0), 2, 3, 5})
      4 -> Nx.transpose(sink, axes: [2, 0, 3, 1])
    end
  end

  defp loss(merge, tensors, count, {dout, dlse}) do
    {parts, sink} = Enum.split(Tuple.to_list(tensors), 2 * count)
    {o, lse} = merge.(for([o, lse] <- Enum.chunk_every(parts, 2), do: {o, lse}), hd(sink))
    Nx.add(Nx.sum(Nx.multiply(o, dout)), Nx.sum(Nx.multiply(lse, dlse)))
  end

  defp distance(x, y), do: Nx.subtract(x, y) |> Nx.abs() |> Nx.reduce_max() |> Nx.to_number()

  for {count, layout} <- [{1, {2, 3}}, {2, {2, 5, 1, 3}}, {5, {2, 3}}] do
    test "#{count} parts with sinks of #{inspect(layout)}: values and gradients" do
      {count, layout} = {unquote(count), unquote(Macro.escape(layout))}
      parts = parts(count)
      sink = random(7, layout, :f32)
      cotangents = {random(8, {2, 5, 3, 4}), random(9, {2, 3, 5})}
      tensors = List.to_tuple(Enum.flat_map(parts, &Tuple.to_list/1) ++ [sink])
      ours = fn parts, sink -> Parts.merge(parts, sink: sink) end

      [got, expected] =
        for merge <- [ours, &plain/2] do
          function = fn tensors -> Nx.Defn.value_and_grad(tensors, &loss(merge, &1, count, cotangents)) end
          {value, gradients} = Nx.Defn.jit_apply(function, [tensors], compiler: Nx.Defn.Evaluator)
          [value | Tuple.to_list(gradients)]
        end

      for {x, y} <- Enum.zip(got, expected) do
        assert Nx.shape(x) == Nx.shape(y)
        assert distance(x, y) < if(Nx.type(x) == {:f, 32}, do: 1.0e-5, else: 1.0e-12)
      end

      # Outside of defn, on tensors with values, it is the same.
      {o, lse} = Parts.merge(parts, sink: sink)
      {plain_o, plain_lse} = plain(parts, sink)
      assert distance(o, plain_o) < 1.0e-12 and distance(lse, plain_lse) < 1.0e-12
    end
  end

  test "gradients of q, k and v through parts of one attention and their merge are those of the whole" do
    [q, k, v, dout] = for seed <- 1..4, do: random(seed, {2, 6, 2, 4})
    {sink, dlse} = {random(5, {2, 2}, :f32), random(6, {2, 2, 6})}
    half = fn x, first -> Nx.slice_along_axis(x, first, 3, axis: 1) end

    # The last rows see all of the first keys, the first rows none of the last.
    in_parts = fn q, k, v, sink ->
      parts =
        for {first, window} <- [{0, {:infinity, 3}}, {3, {:infinity, 0}}],
            do:
              FlashAttention.attention_with_lse(q, half.(k, first), half.(v, first),
                causal: false,
                window: window
              )

      Parts.merge(parts, sink: sink)
    end

    whole = fn q, k, v, sink -> FlashAttention.attention_with_lse(q, k, v, sink: sink) end

    [got, expected] =
      for attention <- [in_parts, whole] do
        loss = fn {q, k, v, sink} ->
          {o, lse} = attention.(q, k, v, sink)
          Nx.add(Nx.sum(Nx.multiply(o, dout)), Nx.sum(Nx.multiply(lse, dlse)))
        end

        {value, gradients} = Nx.Defn.jit_apply(&Nx.Defn.value_and_grad(&1, loss), [{q, k, v, sink}])
        [value | Tuple.to_list(gradients)]
      end

    for {x, y} <- Enum.zip(got, expected),
        do: assert(distance(x, y) < if(Nx.type(x) == {:f, 32}, do: 1.0e-5, else: 1.0e-12))
  end

  test "Sink.gradient and Parts.gradient inside defn" do
    [{o, lse}] = parts(1, :f32)
    {dout, sink} = {random(8, {2, 5, 3, 4}, :f32), random(7, {2, 3}, :f32)}
    {o, lse} = Sink.correct(o, lse, sink)
    expected = Sink.gradient(dout, o, lse, sink)
    jit = fn function, arguments -> Nx.Defn.jit_apply(function, arguments, compiler: Nx.Defn.Evaluator) end
    assert distance(jit.(&Sink.gradient/4, [dout, o, lse, sink]), expected) == 0
    {[{do_p, _dlse}], nil} = Parts.gradient(dout, [{o, lse}], o, lse)

    got =
      jit.(
        fn dout, o, lse -> Parts.gradient(dout, [{o, lse}], o, lse) |> elem(0) |> hd() |> elem(0) end,
        [dout, o, lse]
      )

    assert distance(got, do_p) == 0
  end

  test "the gradient of a gradient, and vectorized tensors, are refused" do
    [{o, lse}] = parts(1)

    twice = fn o ->
      Nx.Defn.grad(o, fn o ->
        Nx.sum(Nx.Defn.grad(o, fn o -> Parts.merge([{o, lse}]) |> elem(0) |> Nx.pow(2) |> Nx.sum() end))
      end)
    end

    assert_raise Error, ~r/no gradient itself/, fn -> Nx.Defn.jit_apply(twice, [o]) end

    assert_raise Error, ~r/without vectorized axes/, fn ->
      Nx.Defn.jit_apply(fn o -> Parts.merge([{Nx.vectorize(o, :x), lse}]) |> elem(0) end, [o])
    end
  end
end
