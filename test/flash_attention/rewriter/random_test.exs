defmodule FlashAttention.Rewriter.RandomTest do
  # Programs drawn at random: attention in whatever way it may be written, with sinks, dropout and factors of heads, is replaced
  # and stays the same number, and what is nearly attention stays as it is.
  use ExUnit.Case, async: true

  alias FlashAttention.Rewriter
  alias FlashAttention.Test.AttentionPrograms, as: Programs
  alias Nx.Defn.{Composite, Evaluator}

  @moduletag :defn
  @compile {:no_warn_undefined, [Nx, Nx.Constants, Nx.Defn, Nx.Type, Composite, Programs, Rewriter]}

  @programs 2000
  @parts 8
  @near_misses 500
  @broken 120

  # Which programs are inside the forms that the guide documents, the drawing says and not the matcher.
  for part <- 1..@parts do
    test "#{@programs} programs and their gradients, part #{part}: never a wrong number, 99 of 100 documented ones replaced" do
      {documented, others} =
        unquote(part)..@programs//@parts
        |> Enum.map(&Programs.draw/1)
        |> Enum.split_with(&Programs.documented?/1)

      replaced = Enum.count(documented, &replaced?/1)
      assert length(documented) > 0.9 * (length(documented) + length(others))
      assert replaced / length(documented) >= 0.99, "#{replaced} of #{length(documented)} are replaced"
      refute Enum.any?(others, &replaced?/1), "what the guide says stays is replaced"
    end
  end

  # Whether a program is, with the same numbers.
  defp replaced?(%{dropped: nil} = program) do
    tensors = Programs.tensors(program)
    fun = &Programs.value_and_gradients(program, &1)
    {plain, rewritten} = both(fun, tensors)
    assert close?(plain, rewritten), "a wrong number: #{inspect(program)}"
    match?([%{rewritten: true}], Rewriter.explain(fun, [tensors]))
  end

  # It stays; or others are dropped than it would drop, the same ones in both passes.
  defp replaced?(program) do
    tensors = Programs.tensors(program)
    fun = &Programs.value_and_gradients(program, &1)
    {plain, same} = both(fun, tensors)
    assert plain == same
    assert Enum.all?(Rewriter.explain(fun, [tensors]), &(not &1.rewritten))

    resampled = fn fun, tensors -> Nx.Defn.jit_apply(fun, [tensors], compiler: Rewriter, dropout: :resample) end
    rewritten = Composite.flatten_list([resampled.(fun, tensors)])

    if match?([%{rewritten: true}], Rewriter.explain(fun, [tensors], dropout: :resample)) do
      kept = Programs.kept(program, tensors, &resampled.(fn tensors -> Programs.run(program, tensors) end, &1))
      assert Enum.all?(Nx.to_flat_list(kept), &multiple?(&1, program)), inspect(program)
      [wanted] = values(fun, Map.put(tensors, :kept, kept), [Evaluator])
      assert close?(wanted, rewritten), "a wrong number: #{inspect(program)}"
      true
    else
      assert plain == rewritten, "a wrong number: #{inspect(program)}"
      false
    end
  end

  # Of a weight: nothing, or all of it, made up for what is dropped where the program does that; and of a row that sees
  # nothing, in which none is dropped, what is left of it on average.
  defp multiple?(x, program) do
    shares = if program.dropped == :made_up, do: [0, 1, 1 / 0.75], else: [0, 1, 0.75]
    Enum.any?(shares, &(abs(x - &1) <= 1.0e-6))
  end

  for type <- [:f32, :bf16, :f16] do
    test "programs in #{type}: no farther from f64 than they are themselves, twice over" do
      for number <- 1..60 do
        program = Programs.draw(number)
        tensors = Programs.tensors(program, unquote(type))
        fun = &Programs.value_and_gradients(program, &1)
        wide = Composite.traverse(tensors, &if(Nx.Type.float?(&1.type), do: Nx.as_type(&1, :f64), else: &1))
        {exact, _} = both(fun, wide)
        {plain, rewritten} = both(fun, tensors)

        for [exact, plain, rewritten] <- Enum.zip([exact, plain, rewritten]) do
          assert {plain.type, plain.shape} == {rewritten.type, rewritten.shape}
          rounding = 4 * Nx.to_number(Nx.Constants.epsilon(plain.type)) * max(largest(exact), 0.25)
          assert distance(rewritten, exact) <= 2 * distance(plain, exact) + rounding, inspect(program)
        end
      end
    end
  end

  defp largest(x), do: x |> Nx.abs() |> Nx.reduce_max() |> Nx.to_number()
  defp distance(x, y), do: x |> Nx.as_type(:f64) |> Nx.subtract(y) |> largest()

  test "#{@near_misses} near misses" do
    for number <- 1..@near_misses do
      program = Programs.draw(number)
      tensors = Programs.tensors(program)
      {name, fun} = Programs.near_miss(program, number)
      {plain, rewritten} = both(fun, tensors)
      assert plain == rewritten, "#{name}: #{inspect(program)}"
      assert Enum.all?(Rewriter.explain(fun, [tensors]), &(not &1.rewritten)), "#{name}: #{inspect(program)}"
    end
  end

  # Attention is what it is before: the step is named from which on it is not differentiated.
  test "#{@broken} backwards that are not those of their forwards" do
    for number <- 1..@broken do
      program = Programs.draw(number)
      tensors = Programs.tensors(program)
      {place, fun} = Programs.broken(program, number)
      {plain, rewritten} = both(fun, tensors)
      assert plain == rewritten, "#{place}: #{inspect(program)}"
      assert [%{rewritten: false, reason: reason} | more] = Rewriter.explain(fun, [tensors])
      assert Enum.all?(more, &(not &1.rewritten))

      assert reason =~ "its backward is no gradient of it from" or not Programs.documented?(program),
             "#{place}: #{reason}, #{inspect(program)}"
    end
  end

  defp both(fun, tensors), do: fun |> values(tensors, [Evaluator, Rewriter]) |> List.to_tuple()

  defp values(fun, tensors, compilers) do
    for compiler <- compilers,
        do: Composite.flatten_list([Nx.Defn.jit_apply(fun, [tensors], compiler: compiler)])
  end

  # The number and its gradients, in the order of their names; the library's gradients of sinks are in f32.
  @tolerances [value: 1.0e-9, bias: 1.0e-9, k: 1.0e-9, q: 1.0e-9, sink: 1.0e-6, v: 1.0e-9]
  defp close?(plain, rewritten) do
    Enum.zip([plain, rewritten, @tolerances])
    |> Enum.all?(fn {x, y, {_name, tolerance}} ->
      x.type == y.type and x.shape == y.shape and distance(x, y) <= tolerance
    end)
  end
end
