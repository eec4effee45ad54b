defmodule FlashAttention.Check do
  @moduledoc """
  Proves on this machine that what is computed is attention, and that the gradients are its gradients.

  Each kind of evidence stands on something that the code under test did not make:

    * `:forward`, `:backward` - every output against the naive float64 implementation. Allowed is twice the
      error that the naive implementation has in the type itself, plus what rounding may do to that number in any
      correct program (`:bound` of `FlashAttention.Native`; derived in `c_src/cpu/reference_bound.h`).
    * `:differences` - gradients against central differences of the forward in float64, along random
      directions, for each input by itself.
    * `:tangent` - gradients against the derivative of the tiled forward algorithm itself, which the CPU takes
      by complex steps through the same source: `<o_tangent, dout>` must be the sum of `<gradient, direction>`.

  The last two need float64; a device without it has them done on the CPU. `mix flash_attention.check` prints
  the results.
  """

  alias FlashAttention.Check.{Cases, Values}
  alias FlashAttention.{Error, Native, Options}

  @types [{:f, 32}, {:f, 64}, {:bf, 16}, {:f, 16}]
  @reference {:reference, 0}
  @f64 {:f, 64}

  # For the fourth-order central difference: its own error is of the order of the step's fourth power, a fifteenth of
  # how far the difference of twice the step lies from it, and what rounding adds of the order of 2^-53 / step. Sinks
  # are f32; they and their directions are multiples of 1/16, so that such steps move them without rounding.
  @step :math.pow(2, -8)
  @sink_grid 16
  @differences_tolerance 1.0e-8
  @tangent_tolerance 1.0e-12

  @typedoc """
  One comparison. `error` is a distance and passes up to `allowed`; `tensor` is what was compared, an input's
  name where its gradient was. `outcome` is `:unsupported` where the device does not take the type.
  """
  @type result :: %{
          check: :forward | :backward | :differences | :tangent,
          case: String.t(),
          type: Native.type(),
          device: Native.device(),
          tensor: atom,
          error: float | :infinity,
          allowed: float,
          outcome: :passed | :failed | :unsupported
        }

  @doc """
  Runs every check and returns every comparison.

  ## Options

    * `:device` - as in `FlashAttention.forward/4`, default `:auto`
    * `:seed` - of the random numbers, default 0
    * `:cases` - names of cases, default all (`cases/0`)
    * `:runner` - what runs a pass, default `&FlashAttention.Native.run/4`

  Raises `FlashAttention.Error` where a pass cannot run at all.

      iex> results = FlashAttention.Check.run(device: :cpu, cases: ["head_dim 1"])
      iex> Enum.uniq(for result <- results, do: result.outcome)
      [:passed]
  """
  @spec run(keyword) :: [result]
  def run(opts \\ []) do
    opts = Keyword.validate!(opts, device: :auto, seed: 0, cases: cases(), runner: &Native.run/4)
    device = device!(opts[:device])

    cases = for c <- chosen!(opts[:cases]), do: Map.put(c, :seed, opts[:seed])
    f64_device = if elem(device, 0) == :cuda, do: {:cpu, 0}, else: device

    Enum.flat_map(cases, fn c ->
      Enum.flat_map(@types, &against_reference(c, &1, device, opts[:runner])) ++
        against_differences(c, f64_device, opts[:runner]) ++ against_tangent(c, f64_device, opts[:runner])
    end)
  end

  @doc "The names of the cases."
  @spec cases() :: [String.t()]
  def cases, do: for(c <- Cases.all(), do: c.name)

  @doc "Whether nothing failed, and something passed."
  @spec passed?([result]) :: boolean
  def passed?(results),
    do: Enum.all?(results, &(&1.outcome != :failed)) and Enum.any?(results, &(&1.outcome == :passed))

  defp device!(device) do
    case Options.parse([device: device], [:device]) do
      {:ok, options} -> hd(options.devices)
      {:error, error} -> raise error
    end
  end

  # What is misspelt would be left out, and prove nothing.
  defp chosen!(names) do
    unknown = Enum.find(names, &(&1 not in cases()))
    if unknown, do: raise(ArgumentError, "cases: expected names of cases/0, got #{inspect(unknown)}")
    for c <- Cases.all(), c.name in names, do: c
  end

  # ---- against the naive implementation ------------------------------------------------------------------

  defp against_reference(c, type, device, runner) do
    inputs = rounded_inputs(c, type)

    case compute(c, inputs, type, device, runner) do
      {:ok, tested} ->
        {:ok, exact} = compute(c, inputs, @f64, @reference, &Native.run/4)
        {:ok, naive} = compute(c, inputs, type, @reference, &Native.run/4)
        {:ok, bounds} = pass(:bound, c, encode(c, inputs, type), @reference, &Native.run/4)
        bounds = decode(bounds)

        for {check, tensors} <- [forward: [:o, :lse], backward: [:dq, :dk, :dv, :dsink]],
            tensor <- tensors,
            Map.has_key?(exact, tensor) do
          naive_error = Values.max_difference(naive[tensor], exact[tensor])
          allowed = for bound <- bounds[tensor], do: 2 * naive_error + bound
          {error, allowed} = Values.worst_difference(tested[tensor], exact[tensor], allowed)
          result(c, check, type, device, tensor, error, allowed)
        end

      :unsupported ->
        [%{result(c, :forward, type, device, :o, :infinity, 0.0) | outcome: :unsupported}]
    end
  end

  defp rounded_inputs(c, type) do
    for {name, numbers} <- inputs(c), into: %{} do
      {name, Values.round_to(numbers, input_type(name, type))}
    end
  end

  # ---- against derivatives of the forward ----------------------------------------------------------------

  defp against_differences(c, device, runner) do
    inputs = inputs(c)
    {:ok, values} = compute(c, inputs, @f64, device, runner)

    for {input, direction} <- directions(c) do
      loss = fn step ->
        moved = Map.update!(inputs, input, &Enum.zip_with(&1, direction, fn x, t -> x + step * t end))
        {:ok, outputs} = pass(:forward, c, encode(c, Map.delete(moved, :dout), @f64), device, runner)
        Values.dot(decode(outputs).o, inputs.dout)
      end

      compare(c, :differences, device, input, fn ->
        [near, far, farthest] = for n <- [1, 2, 4], do: loss.(n * @step) - loss.(-n * @step)
        slope = (8 * near - far) / (12 * @step)
        slope_of_twice_the_step = (8 * far - farthest) / (24 * @step)
        gradient = values[gradient(input)]
        size = Values.dot_size(values.o, inputs.dout) + Values.dot_size(gradient, direction)
        allowed = @differences_tolerance * size + abs(slope_of_twice_the_step - slope)
        {abs(Values.dot(gradient, direction) - slope), allowed}
      end)
    end
  end

  defp against_tangent(c, device, runner) do
    inputs = inputs(c)
    directions = directions(c)
    {:ok, values} = compute(c, inputs, @f64, device, runner)

    tangents = for {input, tensor} <- encode(c, directions, @f64), into: %{}, do: {:"tangent_#{input}", tensor}
    tensors = c |> encode(Map.delete(inputs, :dout), @f64) |> Map.merge(tangents)
    {:ok, outputs} = pass(:tangent, c, tensors, {:cpu, 0}, runner)
    o_tangent = decode(outputs).o_tangent

    result =
      compare(c, :tangent, device, :o, fn ->
        along = for {input, direction} <- directions, do: Values.dot(values[gradient(input)], direction)
        error = abs(Enum.sum(along) - Values.dot(o_tangent, inputs.dout))

        # dsink is an f32, whatever the arithmetic.
        allowed =
          for {input, direction} <- directions,
              reduce: @tangent_tolerance * Values.dot_size(o_tangent, inputs.dout) do
            allowed ->
              relative = max(@tangent_tolerance, Values.roundoff(input_type(input, @f64)))
              allowed + relative * Values.dot_size(values[gradient(input)], direction)
          end

        {error, allowed}
      end)

    [result]
  end

  # Error and allowed, as the function gives them. What is not finite is an atom, which no arithmetic takes, or overflows
  # there.
  defp compare(c, check, device, tensor, fun) do
    {error, allowed} = fun.()
    result(c, check, @f64, device, tensor, error, allowed)
  rescue
    ArithmeticError -> result(c, check, @f64, device, tensor, :infinity, 0.0)
  end

  defp gradient(input), do: :"d#{input}"

  # ---- numbers in and out --------------------------------------------------------------------------------

  defp inputs(c), do: random_numbers(c, Cases.shapes(c), :input)

  defp directions(c), do: random_numbers(c, Map.delete(Cases.shapes(c), :dout), :direction)

  defp random_numbers(c, shapes, what) do
    Map.new(shapes, fn {name, shape} ->
      numbers = Values.random(Tuple.product(shape), :erlang.phash2({c.seed, c.name, name, what}))
      {name, if(name == :sink, do: Enum.map(numbers, &(round(&1 * @sink_grid) / @sink_grid)), else: numbers)}
    end)
  end

  # The forward's outputs and the backward's, which starts from what this forward gave.
  defp compute(c, inputs, type, device, runner) do
    {dout, tensors} = c |> encode(inputs, type) |> Map.pop!(:dout)

    with {:ok, states} <- pass(:forward, c, tensors, device, runner),
         tensors = tensors |> Map.merge(states) |> Map.put(:dout, dout),
         {:ok, gradients} <- pass(:backward, c, tensors, device, runner) do
      {:ok, states |> Map.merge(gradients) |> decode()}
    end
  end

  defp pass(pass, c, tensors, device, runner) do
    case runner.(pass, tensors, c.options, device) do
      {:ok, outputs} -> {:ok, outputs}
      {:error, {:unsupported, _, _, _, _}} -> :unsupported
      {:error, error} -> raise Error.from_native(error)
    end
  end

  defp encode(c, numbers, type) do
    shapes = Cases.shapes(c)

    for {name, numbers} <- numbers, into: %{} do
      type = input_type(name, type)
      {name, {Values.encode(numbers, type), type, shapes[name]}}
    end
  end

  defp decode(tensors),
    do: for({name, {data, type, _shape}} <- tensors, into: %{}, do: {name, Values.decode(data, type)})

  defp input_type(:sink, _type), do: {:f, 32}
  defp input_type(_name, type), do: type

  defp result(c, check, type, device, tensor, error, allowed) do
    %{
      check: check,
      case: c.name,
      type: type,
      device: device,
      tensor: tensor,
      error: error,
      allowed: allowed,
      outcome: if(error <= allowed, do: :passed, else: :failed)
    }
  end
end
