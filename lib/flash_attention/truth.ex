defmodule FlashAttention.Truth do
  @moduledoc """
  Holds a backward function against differences of its forward, for any pair that Elixir can call: a NIF, a
  port, Nx code, or plain Elixir.

      iex> alias FlashAttention.{Tensor, Truth}
      iex> numbers = fn list -> for x <- list, into: <<>>, do: <<x::float-64-native>> end
      iex> decode = fn %{data: data} -> for <<x::float-64-native <- data>>, do: x end
      iex> square = fn [x] -> %{x | data: numbers.(for a <- decode.(x), do: a * a)} end
      iex> backward = fn [x], [_y], [dy] ->
      ...>   [%{x | data: numbers.(Enum.zip_with(decode.(x), decode.(dy), fn a, d -> 2 * a * d end))}]
      ...> end
      iex> x = Tensor.new(numbers.([0.5, -1.0, 3.0]), :f64, {3})
      iex> Truth.check(square, backward, [x: x]).outcome
      :passed

  ## What is compared

  The loss is the sum of `dout * output` over all outputs, with random `dout`. Along random directions, and
  along single elements, central differences of the loss are taken with three step sizes in a row, h, 2 h and
  4 h. With D(h) = (loss(x + h d) - loss(x - h d)) / 2 h, Richardson's extrapolation R(h) = (4 D(h) - D(2 h))
  / 3 has no error of second order (Richardson 1911), and R(h) - R(2 h) says how large those are that it has.
  The points are rounded to the arguments' type, the forward computes in that type, and the gradient is held
  against what the rounded points are apart.

  Rounding blurs a difference. How much is measured: the loss is computed at seven points so near to each
  other that a smooth function is a straight line there, and third differences leave the noise (Moré and Wild
  2011). An error is told in units of what noise and the two step sizes explain; 1.0 is what they may do, and
  `:allowed` is where failure begins. Where that is more than the gradient itself, nothing can be said of it:
  `:unresolved`. This happens with 16-bit types; check those functions in `f32` or `f64`.

  For kernels in CUDA C++ there is the exact derivative of the algorithm, too: `mix flash_attention.truth`.
  """

  alias FlashAttention.Check.Values
  alias FlashAttention.Truth.{Arguments, Differences}

  @typedoc "A tensor (`FlashAttention.TensorLike`), `{binary, type, shape}`, or a binary of `opts[:type]`."
  @type tensor :: FlashAttention.TensorLike.t() | {binary, FlashAttention.Native.type(), tuple} | binary

  @typedoc """
  The worst of what was compared for an argument.

    * `where` - the element's index, or `{:direction, n}`
    * `got`, `expected` - the gradient that the backward gave, `:nan` where it is not finite, and the difference quotient
    * `units` - their distance, in units of `bar`, which is what rounding and the step size explain
    * `outcome` - `:failed` where `units` is more than allowed
  """
  @type argument :: %{
          name: atom,
          outcome: :passed | :failed | :unresolved,
          where: tuple,
          got: float | :nan,
          expected: float,
          bar: float,
          units: float | :infinity,
          compared: pos_integer
        }

  @type report :: %{outcome: :passed | :failed | :unresolved, seed: integer, arguments: [argument]}

  @doc """
  Compares and reports.

  `inputs` is a list of tensors, or a keyword list where they have names. `forward` gets the tensors as a list and
  gives one output, or a list or tuple of outputs; `backward` gets the inputs, the outputs and the gradients
  of the outputs as three lists and gives the inputs' gradients: a list or tuple of as many as there are
  inputs, or as there are differentiable ones. `{:ok, ...}` is taken as well.

  ## Options

    * `:differentiable` - names (or positions) of the inputs that have gradients, default all of floating types
    * `:loss_of` - positions of the outputs that the loss depends on, default all; the others' gradients are zeros
    * `:ignore` - elements not to look at, as `[k: fn index -> boolean end]`; the index is a tuple
    * `:elements` - how many elements of each input are looked at one by one, default 16, or `:all`
    * `:directions` - how many directions besides, default 2; not 0 where `:elements` is
    * `:step` - of the smallest difference, default the fifth root of the type's roundoff
    * `:allowed` - default 2.0
    * `:seed` - of directions, elements and the outputs' gradients, default 0
    * `:type` - of binaries, default `{:f, 32}`

  Raises `ArgumentError` where the functions give what does not fit, and where there is nothing to look at.
  """
  @spec check(([tensor] -> term), ([tensor], [tensor], [tensor] -> term), [tensor] | keyword(tensor), keyword) ::
          report
  def check(forward, backward, inputs, opts \\ []) do
    opts =
      Keyword.validate!(opts, [
        :differentiable,
        :loss_of,
        :step,
        ignore: [],
        elements: 16,
        directions: 2,
        allowed: 2.0,
        seed: 0,
        type: {:f, 32}
      ])

    if opts[:elements] == 0 and opts[:directions] == 0,
      do: raise(ArgumentError, "elements, directions: expected one of them to be more than 0")

    named = named(inputs)
    arguments = for {name, value} <- named, do: Arguments.read(name, value, opts[:type])
    values = Keyword.values(named)
    outputs = call_forward(forward, values, opts)
    douts = douts(outputs, opts)

    gradients =
      backward.(values, for({tensor, _} <- outputs, do: tensor), for({tensor, _} <- douts, do: tensor))
      |> gradients(arguments, differentiable(arguments, opts[:differentiable]), opts)

    loss = fn values -> forward |> call_forward(values, opts) |> loss(douts) end
    size = size(outputs, douts)

    reports =
      for {argument, gradient} <- gradients do
        at = Enum.find_index(arguments, &(&1.name == argument.name))

        problem = %{
          loss: &loss.(List.replace_at(values, at, &1)),
          size: size,
          argument: argument,
          gradient: gradient
        }

        Differences.compare(problem, opts)
      end

    %{outcome: overall(reports), seed: opts[:seed], arguments: reports}
  end

  @doc """
  As `check/4`, for ExUnit: raises where it did not pass, with `format/1` as the message; else returns the
  report.
  """
  @spec assert_gradients(function, function, [tensor] | keyword(tensor), keyword) :: report
  def assert_gradients(forward, backward, inputs, opts \\ []) do
    report = check(forward, backward, inputs, opts)
    if report.outcome != :passed, do: raise(assertion_error(), message: "\n\n" <> format(report))
    report
  end

  # ExUnit is there in tests only.
  defp assertion_error, do: Enum.find([ExUnit.AssertionError, RuntimeError], &Code.ensure_loaded?/1)

  @doc """
  The report as a table: a line for each argument, with its worst element.

      iex> worst = %{name: :q, outcome: :failed, where: {0, 2}, got: 1.0, expected: 2.0, bar: 0.01, units: 100.0, compared: 18}
      iex> FlashAttention.Truth.format(%{outcome: :failed, seed: 0, arguments: [worst]})
      \"\"\"
      gradient   outcome    worst at        got          difference   explained    units
      q          FAILED     {0, 2}          1.0000e+00   2.0000e+00   1.0e-02      100.00
      failed, seed 0; 1 unit is what rounding and the step size explain\\
      \"\"\"
  """
  @spec format(report) :: String.t()
  def format(report) do
    head = line(["gradient", "outcome", "worst at", "got", "difference", "explained", "units"])

    rows =
      for a <- report.arguments do
        outcome = if a.outcome == :passed, do: "passed", else: String.upcase("#{a.outcome}")

        line([
          "#{a.name}",
          outcome,
          inspect(a.where),
          short(a.got, 4),
          short(a.expected, 4),
          short(a.bar, 1),
          units(a.units)
        ])
      end

    last = "#{report.outcome}, seed #{report.seed}; 1 unit is what rounding and the step size explain"
    Enum.join([head | rows] ++ [last], "\n")
  end

  defp line(cells),
    do:
      Enum.zip_with(cells, [11, 11, 16, 13, 13, 13, 8], &String.pad_trailing/2)
      |> Enum.join()
      |> String.trim_trailing()

  defp short(number, digits) when is_float(number), do: :erlang.float_to_binary(number, [{:scientific, digits}])
  defp short(other, _digits), do: "#{other}"

  defp units(:infinity), do: "infinity"
  defp units(units), do: :erlang.float_to_binary(units, decimals: 2)

  defp overall(reports) do
    outcomes = Enum.map(reports, & &1.outcome)
    Enum.find([:failed, :unresolved], :passed, &(&1 in outcomes))
  end

  # ---- what the functions are given, and what they give ----------------------------------------------------

  defp named(inputs) do
    if Keyword.keyword?(inputs),
      do: inputs,
      else: inputs |> Enum.with_index() |> Enum.map(fn {value, i} -> {:"input #{i}", value} end)
  end

  defp differentiable(arguments, nil), do: for(%{numbers: numbers} = a <- arguments, numbers, do: a.name)

  defp differentiable(arguments, wanted) do
    for name <- wanted do
      argument =
        if is_integer(name), do: Enum.at(arguments, name), else: Enum.find(arguments, &(&1.name == name))

      if is_nil(argument) or is_nil(argument.numbers),
        do: raise(ArgumentError, "differentiable: expected names of floating inputs, got #{inspect(name)}")

      argument.name
    end
  end

  defp call_forward(forward, values, opts) do
    for {value, i} <- "forward" |> Arguments.results(forward.(values)) |> Enum.with_index(),
        do: {value, Arguments.read(:"output #{i}", value, opts[:type])}
  end

  # An element of an output that is not finite, as the lse of a row that sees nothing, is not in the loss.
  defp douts(outputs, opts) do
    for {{_tensor, output}, i} <- Enum.with_index(outputs) do
      in_loss = output.numbers != nil and (is_nil(opts[:loss_of]) or i in opts[:loss_of])
      random = Values.random(Arguments.count(output), :erlang.phash2({opts[:seed], :dout, i}))

      numbers =
        Enum.zip_with(
          random,
          Tuple.to_list(output.numbers || {}),
          &if(in_loss and is_float(&2), do: &1, else: 0.0)
        )

      if output.numbers, do: Arguments.write(output, numbers), else: {nil, []}
    end
  end

  defp loss(outputs, douts) do
    Enum.zip_with(outputs, douts, fn {_, output}, {_, dout} ->
      dot(dout, Tuple.to_list(output.numbers || {}))
    end)
    |> Enum.sum()
  end

  # The loss's size where its terms' errors have nothing to do with each other.
  defp size(outputs, douts) do
    for {{_, output}, {_, dout}} <- Enum.zip(outputs, douts), output.numbers do
      squares =
        Enum.zip_with(dout, Tuple.to_list(output.numbers), fn d, x -> if d == 0, do: 0.0, else: (d * x) ** 2 end)

      Values.roundoff(output.type) * :math.sqrt(Enum.sum(squares))
    end
    |> Enum.sum()
  end

  defp dot(dout, numbers),
    do: Enum.zip_with(dout, numbers, fn d, x -> if d == 0, do: 0.0, else: d * x end) |> Enum.sum()

  defp gradients(result, arguments, names, opts) do
    given = Arguments.results("backward", result)

    paired =
      cond do
        length(given) == length(arguments) -> Enum.zip(arguments, given)
        length(given) == length(names) -> Enum.zip(Enum.filter(arguments, &(&1.name in names)), given)
        true -> raise ArgumentError, "backward: expected #{length(arguments)} gradients, got #{length(given)}"
      end

    for {argument, tensor} <- paired, argument.name in names do
      gradient = Arguments.read(:"gradient of #{argument.name}", tensor, opts[:type])

      if is_nil(gradient.numbers) or tuple_size(gradient.numbers) != tuple_size(argument.numbers) do
        raise ArgumentError,
              "#{gradient.name}: expected #{tuple_size(argument.numbers)} floating numbers, got shape #{inspect(gradient.shape)} of type #{inspect(gradient.type)}"
      end

      {argument, gradient.numbers}
    end
  end
end
