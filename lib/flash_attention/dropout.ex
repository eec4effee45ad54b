defmodule FlashAttention.Dropout do
  @moduledoc """
  What dropout drops: the options `:dropout`, a rate, and `:dropout_seed` of `FlashAttention`.

  With them, probabilities are dropped after the softmax, and what stays is divided by the share that stays on average:

      o[i] = sum_j keep[i,j] * p[i,j] * v[b,j,kv],      keep[i,j] = 0 or 1 / (1 - rate)

  `lse` is that of all scores. Which are dropped depends on the seed, two words of 32 bits, and on batch, head, row and column
  alone: it is the same on every device, in the backward, and however a problem is cut. A seed may be a key of `Nx.Random`; inside
  of `defn` it is a tensor, and changes without a recompile. `mask/3` says it for each score, for whoever wants to
  check.

  The bits are Philox2x32's (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"); how they are counted,
  `c_src/flash_attention.h` writes out.
  """

  import Bitwise
  alias FlashAttention.{Error, Tensor, TensorLike}

  @one 65_536
  @multiplier 0xD256D193
  @weyl 0x9E3779B9
  @word 0xFFFFFFFF

  @doc """
  The scores that stay, of u8 `{batch, num_heads, seqlen_q, seqlen_k}`: 1, and 0 where dropped. For small sizes.

  `seed` is as in the option, or `{word, word}`; the mask is a tensor like it.

      iex> mask = FlashAttention.Dropout.mask({1, 2}, 0.5, {1, 1, 2, 16})
      iex> for <<row::binary-16 <- mask.data>>, do: row |> :binary.bin_to_list() |> Enum.join()
      ["1111000111011101", "1111000011000100"]
  """
  @spec mask(
          FlashAttention.tensor() | {non_neg_integer, non_neg_integer},
          number,
          {non_neg_integer, non_neg_integer, non_neg_integer, non_neg_integer}
        ) :: FlashAttention.tensor()
  def mask(seed, rate, {batch, num_heads, seqlen_q, seqlen_k} = shape) do
    words = words!(seed)
    threshold = threshold!(rate)
    if not Enum.all?(Tuple.to_list(shape), &(is_integer(&1) and &1 >= 0)), do: raise(no_shape(shape))

    columns = for j <- indices(seqlen_k), do: {column(words, j), j}

    data =
      for b <- indices(batch),
          h <- indices(num_heads),
          head = head(words, b, h),
          i <- indices(seqlen_q),
          row = row(head, i),
          {column, j} <- columns,
          into: <<>>,
          do: if(bits(row, column, i, j) >= threshold, do: <<1>>, else: <<0>>)

    case seed do
      {_, _} -> Tensor.new(data, {:u, 8}, shape)
      like -> TensorLike.from_native(like, {data, {:u, 8}, shape}, List.duplicate(nil, 4))
    end
  end

  def mask(_seed, _rate, shape), do: raise(no_shape(shape))

  defp no_shape(shape) do
    expected = "{batch, num_heads, seqlen_q, seqlen_k}, whole numbers of at least 0"
    Error.invalid(:shape, expected, Error.show(shape))
  end

  defp words!({x, y}) when is_integer(x) and is_integer(y), do: {x &&& @word, y &&& @word}

  defp words!(seed) do
    with implementation when implementation != nil <- TensorLike.impl_for(seed),
         {:ok, {<<x::32-native, y::32-native>>, {:u, 32}, {2}}, _names} <-
           implementation.to_native(seed, {:cpu, 0}) do
      {x, y}
    else
      _ -> raise Error.invalid(:seed, "a tensor u32 [2] or two words", Error.show(seed))
    end
  end

  defp threshold!(rate) when is_number(rate) and rate >= 0 and rate <= 1 - 1 / @one,
    do: round_to_even(rate * @one)

  defp threshold!(rate), do: raise(Error.invalid(:rate, "a number from 0 to 1 - 2⁻¹⁶", Error.show(rate)))

  @doc false
  # The rate that is computed with, a multiple of 2^-16.
  def rounded(rate), do: threshold!(rate) / @one

  defp round_to_even(x) do
    whole = trunc(x)

    cond do
      x - whole > 0.5 -> whole + 1
      x - whole < 0.5 -> whole
      true -> whole + rem(whole, 2)
    end
  end

  defp indices(count), do: Enum.to_list(0..(count - 1)//1)

  # The words of a head, of a row of it, and of a column of any.
  defp head({first, second}, b, h), do: {b, h} |> philox(first, 10) |> philox(second, 10)
  defp row({key, word}, i), do: philox({pair(i), word}, key, 10)
  defp column({first, second}, j), do: philox({pair(j), second}, first, 10)

  defp bits({r, s}, {c, d}, i, j) do
    {x, y} = philox({bxor(r, c), bxor(s, d)}, 0, 2)
    word = if (j >>> 3 &&& 1) == 0, do: x, else: y
    word >>> ((i >>> 3 &&& 1) * 16) &&& 0xFFFF
  end

  # Rows, and columns, share their words with those 8 further.
  defp pair(n), do: div(n, 16) * 8 + rem(n, 8)

  defp philox(words, _key, 0), do: words

  defp philox({x, y}, key, rounds) do
    product = x * @multiplier
    philox({bxor(bxor(product >>> 32, key), y), product &&& @word}, key + @weyl &&& @word, rounds - 1)
  end
end
