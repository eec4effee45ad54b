defmodule FlashAttention.Rewriter.XLATableTest do
  # The programs that XLA's own rewriter was tested on, row by row and in its names, as programs of Nx of small sizes: what
  # it took, what it refused, and where it was wrong. Its limits of sizes and ranks are not here.
  use ExUnit.Case, async: true

  alias FlashAttention.{Options, Rewriter}
  alias FlashAttention.Test.Loop
  alias Nx.Defn.{Composite, Evaluator}

  @moduletag :defn
  @compile {:no_warn_undefined, [Nx, Nx.Constants, Nx.Random, Nx.Defn, Nx.Type, Composite, Loop, Rewriter]}

  @bias Keyword.has_key?(Options.tensors(), :bias)
  @needs_bias if @bias, do: :found, else: "needs bias"

  # What becomes of a row, and how it is written: the type, the steps of a score, what is done with weights and results.
  @rows [
    {"BF16Bmm1SoftmaxBmm2Pattern_bmm1_rhs_contracting_dim_not_most_minor", :found, type: :bf16, turned: [:k]},
    {"BF16Bmm1SoftmaxBmm2Pattern_large_head_dim", :found, type: :bf16, head_dim: 72},
    {"BF16Bmm1SoftmaxBmm2Pattern_bmm1_lhs_contracting_dim_not_most_minor", :found, type: :bf16, turned: [:q]},
    {"BF16Bmm1SoftmaxBmm2Pattern_bmm2_non_contracting_dim_not_most_minor", :found, type: :bf16, turned: [:v]},
    {"BF16Bmm1CombinedMaskBiasSoftmaxBmm2", @needs_bias,
     type: :bf16, score: [:added_mask, :bias], swapped: true, inside: :f32},
    {"F16Bmm1UnfusedSoftmaxBmm2", :found, type: :f16},
    {"BF16Bmm1ConvertedMaskAddedAfterFirstGemmSoftmaxBmm2", @needs_bias,
     type: :bf16, score: [:added_mask], inside: :f32},
    {"BF16Bmm1Bmm2Pattern_bmm1_contracting_dim_not_equal_64", :silent, softmax: false},
    {"BF16Bmm1Bmm2Pattern_bmm2_rhs_non_contracting_dim_not_equal_64", :silent, softmax: false, turned: [:v]},
    {"BF16Bmm1Bmm2PatternUncanonicalized_bmm1_contracting_dim_not_equal_64", :silent,
     softmax: false, swapped: true},
    {"BF16Bmm1BiasSoftmaxDropoutBmm2", :resampled,
     type: :bf16, score: [:bias], dropout: :multiplied, swapped: true},
    {"BF16Bmm1ScaleBiasSoftmaxDropoutForm2Bmm2", :resampled,
     type: :bf16, score: [:scale, :bias], dropout: :selected},
    {"BF16TrainingBmm1Bmm2", :silent, softmax: false, training: true},
    {"BF16MiniT5xTest", @needs_bias,
     type: :bf16, score: [:segments], on_q: true, training: true, swapped: true},
    {"ActivationHasMoreThan1UserShouldNotLower", "a result themselves", result: :weights},
    {"F16InvalidTrainingBmm1ScaleBiasMaskSoftmaxBmm2ShouldNotBeLowered", "no gradient of it from multiply",
     score: [:scale, :causal], wrong: true},
    {"F16InvalidTrainingBmm1ScaleBiasMaskSoftmaxDropoutBmm2ShouldNotLower", :left,
     score: [:scale, :causal], wrong: true, dropout: :selected},
    {"F16TrainingBmm1ScaleBiasSoftmaxBmm2QTranspose", @needs_bias,
     score: [:scale, :bias], training: true, turned: [:q]},
    {"F16Bmm1UnfusedSoftmaxBmm2IncorrectBmm1NumUsers", "used by", result: :negated_product},
    {"F16Bmm1UnfusedSoftmaxBmm2IncorrectSoftmaxNumUsers", "used by", result: :negated_difference},
    {"F16TrainingBmm1ScaleBiasSoftmaxBmm2IncorrectSoftmaxBwdNumUsers", "used by",
     score: [:scale], result: :negated_quotient},
    {"F16Bmm1SoftmaxBmm2IncorrectRank", :found, rank: 5, score: [:scale]},
    {"F16TrainingBmm2Grad1IncorrectPattern", "used by negate", score: [:scale], result: :negated_ds},
    {"FlashAttentionBF16TrainingBmm1CausalMaskSoftmaxBmm2Pattern", :found,
     type: :bf16, score: [:scale, :causal], training: true},
    {"FlashAttentionBF16TrainingBmm1BiasSoftmaxBmm2Pattern", @needs_bias,
     type: :bf16, score: [:scale, :bias], training: true},
    {"FlashAttentionBF16TrainingBmm1SoftmaxBmm2Pattern", :found, type: :bf16, score: [:scale], training: true},
    {"FlashAttentionBF16TrainingGPT3_5B", @needs_bias, score: [:scale, :carried_mask], in_while: true},
    {"BF16TrainingBmm2CanonicalizationRestoreFwdGraph", "no gradient of it from multiply",
     score: [:scale, :causal], wrong: true, swapped: true},
    {"BF16Bmm1BiasSoftmaxBmm2PatternDbias", @needs_bias, score: [:bias], training: :bias, swapped: true},
    {"F16TrainingBmm1ScaleBiasSoftmaxBmm2NonContractingDimNotDivisibleBy64", @needs_bias,
     score: [:scale, :bias], training: true},
    {"HeadDimNotMultipleOf64", @needs_bias, head_dim: 5, score: [:bias], training: true, swapped: true},
    {"BF16Bmm1Bmm2Pattern", :silent, softmax: false},
    {"BF16Bmm1Bmm2UncanonicalizedPattern", :silent, softmax: false, swapped: true},
    {"BF16Bmm1Bmm2Pattern_bmm1_rhs_contracting_dim_not_most_minor", :silent, softmax: false, turned: [:k]},
    {"BF16Bmm1Bmm2Pattern_bmm1_lhs_contracting_dim_not_most_minor", :silent, softmax: false, turned: [:q]},
    {"BF16Bmm1Bmm2Pattern_bmm2_non_contracting_dim_not_most_minor", :silent, softmax: false, turned: [:v]},
    {"F16Bmm1Bmm2Pattern", :silent, softmax: false, type: :f16},
    {"BF16Bmm1Bmm2Pattern_bmm1_non_contracting_dim_larger_than_512", :silent, softmax: false, type: :bf16},
    {"BF16TrainingBmm1ScaleBiasSoftmaxDropoutBmm2", :resampled,
     score: [:scale, :bias], dropout: :multiplied, training: true},
    {"F16TrainingBmm1ScaleBiasSoftmaxDropoutBmm2", :resampled,
     score: [:scale, :bias], dropout: :multiplied, training: true},
    {"F16TrainingBmm1ScaleBiasSoftmaxDropoutBmm2WithTransposeFusion", :resampled,
     score: [:scale, :bias], dropout: :multiplied, training: true, swapped: true},
    {"BF16TrainingBmm1ScaleBiasSoftmaxDropoutBmm2DbiasShouldHaveUserShape", :resampled,
     score: [:scale, :bias], dropout: :multiplied, training: :bias},
    {"ShouldLowerToFlashAttention", :found, score: [:scale], inside: :f32, type: :f16},
    {"BF16Bmm1ScaleMaskSoftmaxBmm2Pattern", @needs_bias, score: [:scale, :mask]},
    {"BF16Bmm1ScaleBiasMaskSoftmaxBmm2Pattern", @needs_bias, score: [:scale, :bias, :mask]},
    {"BF16Bmm1ScaleBiasNonConstantMaskSoftmaxBmm2Pattern", @needs_bias, score: [:scale, :bias, :compared_mask]},
    {"F16Bmm1ScaleBiasMaskSoftmaxDropoutBmm2", :resampled, score: [:scale, :bias, :mask], dropout: :selected},
    {"F16Bmm1UnfusedSoftmaxWithConvertF32ToReduceMaxBmm2", @needs_bias,
     type: :f16, score: [:scale, :bias, :mask], inside: :f32},
    {"BF16Bmm1UnfusedScaleMaskBiasSoftmaxBmm2", @needs_bias,
     type: :bf16, score: [:scale, :added_mask, :bias], swapped: true},
    {"BF16TrainingBmm1ScaleBiasMaskSoftmaxDropoutBmm2", :resampled,
     score: [:scale, :bias, :mask], dropout: :selected, training: true},
    {"F16TrainingBmm1ScaleBiasMaskSoftmaxDropoutBmm2", :resampled,
     score: [:scale, :bias, :mask], dropout: :multiplied, training: true},
    {"F16TrainingBmm1ScaleBiasMaskSoftmaxBmm2", @needs_bias, score: [:scale, :bias, :mask], training: true},
    {"FlashAttentionBF16TrainingBmm1ScaleMaskSoftmaxBmm2Pattern", @needs_bias,
     score: [:scale, :mask], training: true},
    {"Miscompile", :found, type: :f16, score: [:scale, :causal_infinity], inside: :f32},
    {"FlashAttentionF16Bmm1BiasSoftmaxBmm2PatternCrossAttention", @needs_bias, score: [:bias], columns: 7}
  ]

  test "has all of them" do
    assert length(@rows) == 55
    assert length(Enum.uniq_by(@rows, &elem(&1, 0))) == 55
  end

  # In the type that the row has there, too, and with gradients where the row has none.
  for {name, expected, opts} <- @rows,
      type <- Enum.uniq([opts[:type] || :f64, :f64, :f32, :bf16]),
      gradients <-
        if(expected == :found and not Keyword.has_key?(opts, :training), do: [nil, true], else: [nil]) do
    test "#{name} in #{type}#{if gradients, do: ", with gradients"}" do
      opts =
        Keyword.merge(
          unquote(opts),
          [type: unquote(type)] ++ if(unquote(gradients), do: [training: true], else: [])
        )

      args = args(opts)
      fun = &program(&1, opts)
      places = Rewriter.explain(fun, [args])

      case unquote(expected) do
        :found -> assert [%{rewritten: true}] = places
        :silent -> assert places == []
        :left -> assert places != [] and Enum.all?(places, &(not &1.rewritten))
        :resampled -> assert_resampled(fun, args, places)
        reason -> assert Enum.any?(places, &(not &1.rewritten and &1.reason =~ reason)), inspect(places)
      end

      assert_as_accurate(fun, args)
    end
  end

  # Dropout is the program's own, unless that is asked for: then the same bits drop in both passes, as often.
  defp assert_resampled(fun, args, places) do
    assert Enum.any?(places, &(not &1.rewritten and &1.reason =~ "dropout: :resample"))
    assert [%{rewritten: true, as: as}] = Rewriter.explain(fun, [args], dropout: :resample)
    assert as =~ "dropout 0.2"
    [once, again] = for _ <- 1..2, do: run(fun, args, Rewriter, dropout: :resample)
    assert once == again
  end

  # No farther from the numbers of f64 than the program itself in its own type, twice over.
  defp assert_as_accurate(fun, args) do
    wide = Composite.traverse(args, &if(Nx.Type.float?(Nx.type(&1)), do: Nx.as_type(&1, :f64), else: &1))

    [exact, plain, rewritten] =
      for {args, compiler} <- [{wide, Evaluator}, {args, Evaluator}, {args, Rewriter}],
          do: run(fun, args, compiler)

    for [exact, plain, rewritten] <- Enum.zip([exact, plain, rewritten]) do
      assert {plain.type, plain.shape} == {rewritten.type, rewritten.shape}
      largest = exact |> Nx.abs() |> Nx.reduce_max() |> Nx.to_number()
      rounding = plain.type |> Nx.Constants.epsilon() |> Nx.to_number()
      assert distance(rewritten, exact) <= 2 * distance(plain, exact) + 2 * rounding * largest
    end
  end

  defp run(fun, args, compiler, opts \\ []),
    do: Composite.flatten_list([Nx.Defn.jit_apply(fun, [args], [compiler: compiler] ++ opts)])

  defp distance(x, y),
    do: x |> Nx.as_type(:f64) |> Nx.subtract(y) |> Nx.abs() |> Nx.reduce_max() |> Nx.to_number()

  # ---- the programs --------------------------------------------------------------------------------------

  defp args(opts) do
    type = opts[:type] || :f64
    batch = if opts[:rank] == 5, do: [2, 2, 3], else: [2, 3]
    {rows, columns, dim} = {6, opts[:columns] || 6, opts[:head_dim] || 4}

    normal = fn seed, shape ->
      {tensor, _key} = Nx.Random.normal(Nx.Random.key(seed), shape: List.to_tuple(shape), type: type)
      tensor
    end

    sized = fn seed, name, [long, short] ->
      normal.(seed, batch ++ if(name in (opts[:turned] || []), do: [short, long], else: [long, short]))
    end

    %{
      q: sized.(1, :q, [rows, dim]),
      k: sized.(2, :k, [columns, dim]),
      v: sized.(3, :v, [columns, dim]),
      bias: normal.(4, [1, 3, rows, columns]),
      mask: Nx.less(Nx.remainder(Nx.iota({2, 1, rows, columns}), 5), 3),
      key: Nx.Random.key(5),
      ids: Nx.tensor([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 2]])
    }
  end

  defp program(args, opts) do
    cond do
      opts[:in_while] -> in_while(args, opts)
      opts[:wrong] || opts[:result] == :negated_ds -> by_hand(args, opts)
      opts[:training] == :bias -> Nx.Defn.value_and_grad(args.bias, &loss(%{args | bias: &1}, opts))
      opts[:training] -> gradients(args, opts)
      true -> forward(args, opts)
    end
  end

  defp loss(args, opts), do: args |> forward(opts) |> Nx.sin() |> Nx.sum()

  defp gradients(args, opts) do
    Nx.Defn.value_and_grad({args.q, args.k, args.v}, fn {q, k, v} -> loss(%{args | q: q, k: k, v: v}, opts) end)
  end

  defp forward(args, opts) do
    %{s: s, product: product, v: v} = scores(args, opts)
    {p, difference, quotient} = if opts[:softmax] == false, do: {s, s, s}, else: softmax(s, opts)
    o = p |> drop(opts[:dropout], args) |> values(v, opts)

    case opts[:result] do
      nil -> o
      :weights -> {o, p}
      :negated_product -> {o, Nx.negate(product)}
      :negated_difference -> {o, Nx.negate(difference)}
      :negated_quotient -> {o, Nx.negate(quotient)}
    end
  end

  defp scores(args, opts) do
    last = tuple_size(Nx.shape(args.q)) - 1
    batch = Enum.to_list(0..(last - 2))
    turned = opts[:turned] || []
    q = if opts[:on_q], do: Nx.multiply(args.q, 0.5), else: args.q
    along = fn name -> if name in turned, do: last - 1, else: last end
    product = Nx.dot(q, [along.(:q)], batch, args.k, [along.(:k)], batch)
    s = Enum.reduce(opts[:score] || [], product, &step(&1, &2, args))

    %{
      s: s,
      product: product,
      v: if(:v in turned, do: Nx.transpose(args.v, axes: batch ++ [last, last - 1]), else: args.v)
    }
  end

  defp step(:scale, s, _args), do: Nx.multiply(s, 0.5)
  defp step(:bias, s, args), do: Nx.add(s, args.bias)
  defp step(:mask, s, args), do: Nx.select(Nx.broadcast(args.mask, s), s, far(s))
  defp step(:carried_mask, s, args), do: step(:mask, s, args)
  defp step(:added_mask, s, args), do: Nx.add(s, Nx.select(Nx.greater(args.mask, 0), zero(s), far(s)))
  defp step(:compared_mask, s, args), do: Nx.select(Nx.broadcast(Nx.not_equal(args.mask, 0), s), s, far(s))
  defp step(:causal, s, _args), do: Nx.select(Nx.broadcast(causal(s), s), s, far(s))

  defp step(:causal_infinity, s, _args),
    do: Nx.select(Nx.broadcast(causal(s), s), s, Nx.Constants.neg_infinity(Nx.type(s)))

  defp step(:segments, s, args) do
    same = Nx.equal(Nx.reshape(args.ids, {2, 1, 6, 1}), Nx.reshape(args.ids, {2, 1, 1, 6}))
    Nx.add(s, Nx.select(Nx.logical_and(same, causal(s)), zero(s), far(s)))
  end

  defp causal(s), do: Nx.greater_equal(Nx.iota({Nx.axis_size(s, -2), 1}), Nx.iota({1, Nx.axis_size(s, -1)}))
  defp zero(s), do: Nx.tensor(0, type: Nx.type(s))
  defp far(s), do: Nx.divide(Nx.Constants.min_finite(Nx.type(s)), 2)

  defp softmax(s, opts) do
    type = Nx.type(s)
    s = if opts[:inside], do: Nx.as_type(s, Nx.Type.merge(type, {:f, 32})), else: s
    difference = Nx.subtract(s, Nx.reduce_max(s, axes: [-1], keep_axes: true))
    e = Nx.exp(difference)
    p = Nx.divide(e, Nx.sum(e, axes: [-1], keep_axes: true))
    {Nx.as_type(p, type), difference, p}
  end

  defp drop(p, nil, _args), do: p

  defp drop(p, :selected, args),
    do: Nx.select(kept(p, args), Nx.multiply(p, Nx.tensor(1.25, type: Nx.type(p))), zero(p))

  defp drop(p, :multiplied, args),
    do: Nx.multiply(p, Nx.select(kept(p, args), Nx.tensor(1.25, type: Nx.type(p)), zero(p)))

  # The same numbers in all types, so that what is dropped does not depend on that.
  defp kept(p, args) do
    {numbers, _key} = Nx.Random.uniform(args.key, shape: Nx.shape(p), type: :f32)
    Nx.less(numbers, 0.8)
  end

  defp values(p, v, opts) do
    last = tuple_size(Nx.shape(p)) - 1
    batch = Enum.to_list(0..(last - 2))

    if opts[:swapped],
      do: Nx.dot(v, [last - 1], batch, p, [last], batch) |> Nx.transpose(axes: batch ++ [last, last - 1]),
      else: Nx.dot(p, [last], batch, v, [last - 1], batch)
  end

  # A backward that is written out, with the negation left out of it, or with ds asked for.
  defp by_hand(args, opts) do
    %{s: s, v: v} = scores(args, opts)
    e = Nx.exp(Nx.subtract(s, Nx.reduce_max(s, axes: [-1], keep_axes: true)))
    l = Nx.sum(e, axes: [-1], keep_axes: true)
    p = Nx.divide(e, l)
    o = values(drop(p, opts[:dropout], args), v, opts)
    dout = Nx.cos(o)
    dp = Nx.dot(dout, [3], [0, 1], v, [3], [0, 1])

    sum =
      dp
      |> Nx.multiply(e)
      |> Nx.multiply(Nx.divide(1, Nx.multiply(l, l)))
      |> Nx.sum(axes: [-1], keep_axes: true)

    sum = if opts[:wrong], do: sum, else: Nx.negate(sum)
    ds = dp |> Nx.divide(l) |> Nx.add(sum) |> Nx.multiply(e) |> Nx.multiply(0.5)
    dq = Nx.dot(ds, [3], [0, 1], args.k, [2], [0, 1])
    dk = Nx.dot(ds, [2], [0, 1], args.q, [2], [0, 1])
    dv = Nx.dot(p, [2], [0, 1], dout, [2], [0, 1])
    if opts[:result], do: {o, dq, dk, dv, Nx.negate(ds)}, else: {o, dq, dk, dv}
  end

  # The mask is made outside of the loop that attention is in.
  defp in_while(args, opts) do
    step = fn q, mask, args -> forward(%{args | q: q, mask: mask}, opts) end
    Loop.twice(args.q, args.mask, args, step: step)
  end
end
