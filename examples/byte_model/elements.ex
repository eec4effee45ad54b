defmodule FlashAttention.Examples.ByteModel.Elements do
  @moduledoc false

  # Binaries of floats, in the machine's byte order, for the types that training computes in. Offsets are in
  # bytes.

  for bits <- [32, 64] do
    type = {:f, bits}
    float = quote(do: float - size(unquote(bits)) - native)

    def bytes(unquote(type)), do: unquote(div(bits, 8))

    def from_list(unquote(type), list), do: for(x <- list, into: <<>>, do: <<x::unquote(float)>>)

    def to_list(unquote(type), binary) do
      numbers = for <<x::unquote(float) <- binary>>, do: x
      check_finite!(length(numbers) * unquote(div(bits, 8)), binary)
      numbers
    end

    def scale(unquote(type), binary, factor) do
      scaled = for <<x::unquote(float) <- binary>>, into: <<>>, do: <<x * factor::unquote(float)>>
      check_finite!(byte_size(scaled), binary)
      scaled
    end

    def at(unquote(type), binary, offset) do
      <<_::binary-size(offset), x::unquote(float), _::binary>> = binary
      x
    end

    def subtract_at(unquote(type), binary, offset, amount) do
      <<before::binary-size(offset), x::unquote(float), rest::binary>> = binary
      [before, <<x - amount::unquote(float)>> | rest]
    end
  end

  # Erlang's floats are finite: a comprehension ends where a binary holds an infinity or NaN.
  defp check_finite!(bytes, binary) do
    if bytes != byte_size(binary) do
      raise ArithmeticError, "numbers are no longer finite: training has diverged; lower the learning rate"
    end
  end

  def zeros(type, count), do: :binary.copy(<<0>>, count * bytes(type))

  def split(binary, bytes), do: for(<<part::binary-size(bytes) <- binary>>, do: part)
end
