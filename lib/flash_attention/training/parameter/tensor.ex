defimpl FlashAttention.Training.Parameter, for: FlashAttention.Tensor do
  # Elements are worked through in pieces of 1 KiB or 2 KiB. Adam remembers m and v of an element side by
  # side, so that its slot is one binary of pairs.
  #
  # A piece whose gradient is 0 and which remembers nothing but 0 stays as it is under every rule: this skips
  # the rows of a token table that were never met, without changing a bit of the result.
  #
  # Pieces are independent of each other, and so are spread over the schedulers.

  alias FlashAttention.{Error, Tensor}

  @piece 256

  def add(left, right) do
    check_like!(left, right)
    pieces = [split(left.data, left), split(right.data, right)]
    join(left, each_piece(pieces, fn [l, r] -> sum(left.type, l, r, <<>>) end))
  end

  def update(parameter, gradient, slot, {:sgd, rate, momentum}) when momentum == 0 do
    check_like!(parameter, gradient)
    zeros = zeros(parameter, 1)

    new =
      each_piece([split(parameter.data, parameter), split(gradient.data, parameter)], fn
        [p, ^zeros] -> p
        [p, g] -> descend(parameter.type, p, g, rate, <<>>)
      end)

    {join(parameter, new), slot}
  end

  def update(parameter, gradient, slot, {:sgd, rate, momentum}) do
    remember(parameter, gradient, slot, 1, &momentum(parameter.type, &1, &2, &3, rate, momentum, <<>>, <<>>))
  end

  def update(parameter, gradient, slot, {:adam, rate, beta1, beta2, epsilon}) do
    constants = {rate, beta1, beta2, epsilon}
    remember(parameter, gradient, slot, 2, &adam(parameter.type, &1, &2, &3, constants, <<>>, <<>>))
  end

  # The rules that remember `width` numbers of every element.
  defp remember(parameter, gradient, slot, width, rule) do
    check_like!(parameter, gradient)
    slot = slot || :binary.copy(<<0>>, width * byte_size(parameter.data))
    {no_gradient, no_memory} = {zeros(parameter, 1), zeros(parameter, width)}

    {new, slots} =
      [split(parameter.data, parameter), split(gradient.data, parameter), split(slot, parameter, width)]
      |> each_piece(fn
        [p, ^no_gradient, ^no_memory] -> {p, no_memory}
        [p, g, s] -> rule.(p, g, s)
      end)
      |> Enum.unzip()

    {join(parameter, new), IO.iodata_to_binary(slots)}
  end

  # ---- element by element, for both types ----------------------------------------------------------------

  for bits <- [32, 64] do
    float = quote(do: float - size(unquote(bits)) - native)
    type = {:f, bits}

    defp sum(unquote(type), <<l::unquote(float), ls::binary>>, <<r::unquote(float), rs::binary>>, acc),
      do: sum(unquote(type), ls, rs, <<acc::binary, l + r::unquote(float)>>)

    defp descend(
           unquote(type),
           <<p::unquote(float), ps::binary>>,
           <<g::unquote(float), gs::binary>>,
           rate,
           acc
         ),
         do: descend(unquote(type), ps, gs, rate, <<acc::binary, p - rate * g::unquote(float)>>)

    defp momentum(
           unquote(type),
           <<p::unquote(float), ps::binary>>,
           <<g::unquote(float), gs::binary>>,
           <<v::unquote(float), vs::binary>>,
           rate,
           momentum,
           new,
           slot
         ) do
      v = momentum * v + g
      new = <<new::binary, p - rate * v::unquote(float)>>
      momentum(unquote(type), ps, gs, vs, rate, momentum, new, <<slot::binary, v::unquote(float)>>)
    end

    defp adam(
           unquote(type),
           <<p::unquote(float), ps::binary>>,
           <<g::unquote(float), gs::binary>>,
           <<m::unquote(float), v::unquote(float), s::binary>>,
           {rate, beta1, beta2, epsilon} = constants,
           new,
           slot
         ) do
      m = g + beta1 * (m - g)
      v = g * g + beta2 * (v - g * g)
      new = <<new::binary, p - rate * m / (:math.sqrt(v) + epsilon)::unquote(float)>>
      adam(unquote(type), ps, gs, s, constants, new, <<slot::binary, m::unquote(float), v::unquote(float)>>)
    end
  end

  defp sum(_type, <<>>, <<>>, acc), do: acc
  defp descend(_type, <<>>, <<>>, _rate, acc), do: acc
  defp momentum(_type, <<>>, <<>>, <<>>, _rate, _momentum, new, slot), do: {new, slot}
  defp adam(_type, <<>>, <<>>, <<>>, _constants, new, slot), do: {new, slot}

  # ---- pieces --------------------------------------------------------------------------------------------

  defp zeros(%{type: {:f, bits}}, width), do: :binary.copy(<<0>>, width * @piece * div(bits, 8))

  defp split(data, %{type: {:f, bits}}, width \\ 1), do: split_every(data, width * @piece * div(bits, 8))

  defp split_every(data, bytes) do
    case data do
      <<piece::binary-size(bytes), rest::binary>> -> [piece | split_every(rest, bytes)]
      <<>> -> []
      last -> [last]
    end
  end

  defp each_piece(columns, fun) do
    pieces = Enum.zip_with(columns, & &1)
    share = max(64, ceil(length(pieces) / System.schedulers_online()))

    case Enum.chunk_every(pieces, share) do
      [pieces] ->
        Enum.map(pieces, fun)

      shares ->
        shares
        |> Task.async_stream(fn pieces -> Enum.map(pieces, fun) end, timeout: :infinity)
        |> Enum.flat_map(fn {:ok, results} -> results end)
    end
  end

  defp join(parameter, pieces), do: %Tensor{parameter | data: IO.iodata_to_binary(pieces)}

  defp check_like!(%{type: {:f, bits}} = parameter, gradient) when bits in [32, 64] do
    for field <- [:type, :shape], Map.get(parameter, field) != Map.get(gradient, field) do
      expected = "the parameter's #{field} #{Error.show(Map.get(parameter, field))}"
      raise Error.invalid(:gradient, expected, Error.show(Map.get(gradient, field)))
    end
  end

  defp check_like!(parameter, _gradient),
    do: raise(Error.invalid(:parameter, "type {:f, 32} or {:f, 64}", Error.show(parameter.type)))
end
