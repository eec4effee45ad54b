defmodule FlashAttention.Mask do
  @moduledoc """
  Which columns (keys) each row (query) sees, as data: the option `:mask` of `FlashAttention`.

  A mask is a list of bands. A band `{q_begin, q_end, k_begin, k_end, left, right}` lets row `i` of `q_begin..q_end-1`
  see column `j` of `k_begin..k_end-1` if and only if

      i - q_end + k_end - left <= j <= i - q_end + k_end + right

  so that the band's last row stands beside its last column, as in a problem without a mask, which is the one band
  `{0, seqlen_q, 0, seqlen_k, left, right}`. Rows and columns of bands may overlap, their cells may not. A row that no
  band covers gives 0. Only what is visible is computed: time follows `area/2`.

  The options `:causal` and `:window` hold within each band too, and the narrower wins. `:causal` is true unless told
  otherwise, which is right for `packed/1`; masks that say themselves what is to be seen (`prefix/1`,
  `block_causal/1`, `ranges/3`) want `causal: false`.

      iex> FlashAttention.Mask.packed([3, 2])
      #FlashAttention.Mask<packed, 5 x 5
      ███··
      ███··
      ███··
      ···██
      ···██
      >

  Numbers are lists outside of `defn`, and may be tensors there and inside of it: then contents may change from step
  to step without a recompile.
  """

  alias FlashAttention.{Error, Tensor, TensorLike}
  alias FlashAttention.Mask.Bands

  @enforce_keys [:kind, :numbers]
  defstruct [:kind, :numbers, static: [], window: {:infinity, :infinity}]

  @typedoc "Lists of whole numbers, or tensors of them (`Nx.Tensor`, or `FlashAttention.Tensor` of type s32)."
  @type numbers :: list | FlashAttention.TensorLike.t()

  @typedoc "`{seqlen_q, seqlen_k}`"
  @type size :: {non_neg_integer, non_neg_integer}

  @type t :: %__MODULE__{
          kind: :packed | :lengths | :prefix | :block_causal | :segments | :ranges | :bands,
          numbers: %{optional(atom) => numbers},
          static: keyword,
          window: {non_neg_integer | :infinity, non_neg_integer | :infinity}
        }

  # ---- masks ---------------------------------------------------------------------------------------------

  @doc """
  Sequences of these lengths, one behind the other, each of which sees itself alone.

      iex> FlashAttention.Mask.bands(FlashAttention.Mask.packed([3, 2]), {5, 5})
      [[{0, 3, 0, 3, :infinity, :infinity}, {3, 5, 3, 5, :infinity, :infinity}]]
  """
  @spec packed([non_neg_integer]) :: t
  def packed(lengths), do: packed(lengths, lengths)

  @doc "As `packed/1`, of rows and columns of different lengths."
  @spec packed([non_neg_integer], [non_neg_integer]) :: t
  def packed(q_lengths, k_lengths) do
    check_lengths!(:q_lengths, q_lengths)
    check_lengths!(:k_lengths, k_lengths)
    check_same!(:k_lengths, q_lengths, k_lengths)
    packed_at(ends(q_lengths), ends(k_lengths))
  end

  @doc """
  As `packed/2`, by where sequences begin and end: `[num_sequences + 1]` numbers, which may be a tensor.

  These are the `cu_seqlens` of other libraries: sequence `n` has the rows from number `n` to number `n + 1`.
  """
  @spec packed_at(numbers, numbers | nil) :: t
  def packed_at(cu_seqlens_q, cu_seqlens_k \\ nil) do
    numbers = %{q: cu_seqlens_q, k: cu_seqlens_k || cu_seqlens_q}
    for name <- [:q, :k], do: check_numbers!(:"cu_seqlens_#{name}", numbers[name], &check_ascending!/2)
    %__MODULE__{kind: :packed, numbers: numbers}
  end

  @doc """
  Padded batches: batch `b` has `k_lengths[b]` columns, and the others are padding that nobody sees.

  Options:

    * `:q_lengths` - likewise for rows; without them every row is one
    * `:side` - `:right`, where the padding lies (the sequence comes first), or `:left`

  Causal attention is aligned to the sequences' ends.

      iex> FlashAttention.Mask.lengths([2, 3], q_lengths: [2, 3])
      #FlashAttention.Mask<lengths, 3 x 3, batch 0 of 2
      ██·
      ██·
      ···
      >
  """
  @spec lengths(numbers, q_lengths: numbers, side: :right | :left) :: t
  def lengths(k_lengths, opts \\ []) do
    opts = check_options!(opts, [:q_lengths, :side])
    side = Keyword.get(opts, :side, :right)
    if side not in [:right, :left], do: raise(Error.invalid(:side, ":right or :left", Error.show(side)))

    numbers = if q_lengths = opts[:q_lengths], do: %{k: k_lengths, q: q_lengths}, else: %{k: k_lengths}
    for {name, lengths} <- numbers, do: check_numbers!(:"#{name}_lengths", lengths, &check_lengths!/2)
    if is_list(numbers[:q]) and is_list(numbers.k), do: check_same!(:q_lengths, numbers.k, numbers.q)
    %__MODULE__{kind: :lengths, numbers: numbers, static: [side: side]}
  end

  @doc """
  Prefix language models: every row of batch `b` sees the first `lengths[b]` columns, and beyond them no later one
  than its own. Wants `causal: false`.

      iex> FlashAttention.Mask.prefix([2])
      #FlashAttention.Mask<prefix, 4 x 4
      ██··
      ██··
      ███·
      ████
      >
  """
  @spec prefix(numbers) :: t
  def prefix(lengths) do
    check_numbers!(:lengths, lengths, &check_lengths!/2)
    %__MODULE__{kind: :prefix, numbers: %{k: lengths}}
  end

  @doc """
  Blocks of rows, each of which sees its own block and those before it: blocks of one length, or of those given.
  Wants `causal: false`.

      iex> FlashAttention.Mask.block_causal([2, 1])
      #FlashAttention.Mask<block_causal, 3 x 3
      ██·
      ██·
      ███
      >
  """
  @spec block_causal(pos_integer | [non_neg_integer]) :: t
  def block_causal(length) when is_integer(length) and length > 0,
    do: %__MODULE__{kind: :block_causal, numbers: %{}, static: [length: length]}

  def block_causal(lengths) when is_list(lengths) do
    check_lengths!(:lengths, lengths)
    {rows, _end} = Enum.map_reduce(lengths, 0, &{{&2, &2 + &1, 0, &2 + &1, :infinity, :infinity}, &2 + &1})
    %{from_bands(rows) | kind: :block_causal}
  end

  def block_causal(lengths),
    do: raise(Error.invalid(:lengths, "a block's length above 0, or a list of lengths", Error.show(lengths)))

  @doc """
  Rows see the columns whose id is theirs: `q_ids` are `[batch, seqlen_q]`, `k_ids` `[batch, seqlen_k]` (the same
  unless given). An id stands in one run, as in packed sequences; which one does not matter.

  Of tensors inside of `defn`, how many ids a batch may have must be said: `max_segments: 8`.

      iex> FlashAttention.Mask.segments([[7, 7, 1, 1, 1]])
      #FlashAttention.Mask<segments, 5 x 5
      ██···
      ██···
      ··███
      ··███
      ··███
      >
  """
  @spec segments(numbers, k_ids: numbers, max_segments: pos_integer) :: t
  def segments(q_ids, opts \\ []) do
    opts = check_options!(opts, [:k_ids, :max_segments])
    k_ids = opts[:k_ids] || q_ids
    for {name, ids} <- [q_ids: q_ids, k_ids: k_ids], do: check_numbers!(name, ids, &check_ids!/2)

    if is_list(q_ids) and is_list(k_ids) do
      %{from_bands(Bands.of_segments(q_ids, k_ids)) | kind: :segments}
    else
      %__MODULE__{kind: :segments, numbers: %{q: q_ids, k: k_ids}, static: Keyword.take(opts, [:max_segments])}
    end
  end

  @typedoc "What the rows of a range see of the columns beside it."
  @type range_type :: :full | :causal | :inverse_causal | :bi_causal

  @doc """
  Ranges of rows and the ranges of columns that they see, `{begin, end}` each, of a type each, or one for all.

  With `q_len` and `k_len` the ranges' lengths, as bands:

  | type | `left`, `right` | row `i`, column `j` of the ranges |
  |---|---|---|
  | `:full` | `:infinity`, `:infinity` | all |
  | `:causal` | `:infinity`, 0 | `j <= i + k_len - q_len` |
  | `:inverse_causal` | `k_len - q_len`, `:infinity` | `j >= i` |
  | `:bi_causal` | `k_len - q_len`, 0 | `i <= j <= i + k_len - q_len` |

  Wants `causal: false`.

      iex> FlashAttention.Mask.ranges([{0, 3}, {3, 4}], [{0, 4}, {1, 2}], [:bi_causal, :full])
      #FlashAttention.Mask<ranges, 4 x 4
      ██··
      ·██·
      ··██
      ·█··
      >
  """
  @spec ranges([{integer, integer}], [{integer, integer}], range_type | [range_type]) :: t
  def ranges(q_ranges, k_ranges, types \\ :full) do
    for {name, list} <- [q_ranges: q_ranges, k_ranges: k_ranges], do: check_ranges!(name, list)
    check_same!(:k_ranges, q_ranges, k_ranges)
    types = if is_list(types), do: types, else: List.duplicate(types, length(q_ranges))
    check_same!(:types, q_ranges, types)
    bands = Enum.zip_with([q_ranges, k_ranges, types], fn [q, k, type] -> Bands.of_range(q, k, type) end)
    %{from_bands(bands) | kind: :ranges}
  end

  @doc """
  Bands as they are: `[num_bands]` or `[batch, num_bands]` tuples of six, where `left` and `right` may be `:infinity`,
  or a tensor `[num_bands, 6]` or `[batch or 1, num_bands, 6]`.
  """
  @spec from_bands(numbers) :: t
  def from_bands(bands) when is_list(bands),
    do: %__MODULE__{kind: :bands, numbers: %{bands: Bands.of_lists(bands)}}

  def from_bands(bands) do
    check_tensor!(:bands, bands)
    %__MODULE__{kind: :bands, numbers: %{bands: bands}}
  end

  @doc """
  What both the mask and a window of `{left, right}` columns around each row's own show, within each band.

      iex> FlashAttention.Mask.packed([3, 2]) |> FlashAttention.Mask.intersect_window({1, 0})
      #FlashAttention.Mask<packed, 5 x 5
      █····
      ██···
      ·██··
      ···█·
      ···██
      >
  """
  @spec intersect_window(t, {non_neg_integer | :infinity, non_neg_integer | :infinity}) :: t
  def intersect_window(%__MODULE__{window: {left, right}} = mask, {new_left, new_right} = window) do
    if not Enum.all?([new_left, new_right], &(&1 == :infinity or (is_integer(&1) and &1 >= 0))),
      do: raise(no_window(window))

    %{mask | window: {min(left, new_left), min(right, new_right)}}
  end

  def intersect_window(%__MODULE__{}, other), do: raise(no_window(other))

  defp no_window(other) do
    expected = "{left, right}, each a whole number of at least 0 or :infinity"
    Error.invalid(:window, expected, Error.show(other))
  end

  # ---- what a mask shows ---------------------------------------------------------------------------------

  @doc """
  The bands of a mask of lists, for a problem of that size: a list a batch, or one for all batches.

      iex> mask = FlashAttention.Mask.prefix([2])
      iex> FlashAttention.Mask.bands(mask, {4, 4})
      [[{0, 4, 0, 2, :infinity, :infinity}, {2, 4, 2, 4, :infinity, 0}]]
  """
  @spec bands(t, size) :: [[Bands.band()]]
  def bands(%__MODULE__{} = mask, size) do
    mask.kind
    |> Bands.of(
      Map.new(mask.numbers, fn {name, numbers} -> {name, Bands.to_lists(mask.kind, name, numbers)} end),
      mask.static,
      size
    )
    |> Enum.map(fn bands -> Enum.map(bands, &Bands.within_window(&1, mask.window)) end)
  end

  @doc false
  # A mask as the library takes it: a tensor [batch or 1, num_bands, 6] of s32.
  def to_bands(%__MODULE__{kind: :bands, numbers: %{bands: bands}, window: {:infinity, :infinity}} = mask, size)
      when not is_list(bands) do
    # Of another rank or type they are brought there, as inside of defn.
    case bands do
      %{type: {class, bits}, shape: shape}
      when class in [:s, :u] and (tuple_size(shape) == 2 or {class, bits} != {:s, 32}) ->
        mask |> bands(size) |> Bands.to_tensor()

      _ ->
        bands
    end
  end

  def to_bands(%__MODULE__{} = mask, size), do: mask |> bands(size) |> Bands.to_tensor()

  @doc """
  How many cells are visible, in all batches that the mask tells apart.

  Options: `:causal` (here false unless given) and `:window`, as a call would have them.

      iex> FlashAttention.Mask.area(FlashAttention.Mask.packed([3, 2]), {5, 5})
      13
      iex> FlashAttention.Mask.area(FlashAttention.Mask.packed([3, 2]), {5, 5}, causal: true)
      9
  """
  @spec area(t, size, keyword) :: non_neg_integer
  def area(%__MODULE__{} = mask, size, opts \\ []) do
    for(bands <- mask |> narrowed(opts) |> bands(size), band <- bands, do: Bands.area(band)) |> Enum.sum()
  end

  @doc """
  The mask as `[batch or 1, seqlen_q, seqlen_k]` of u8, 1 where a column is visible: for small sizes.

  Takes the options of `area/3`.

      iex> FlashAttention.Mask.to_tensor(FlashAttention.Mask.packed([1, 1]), {2, 2})
      %FlashAttention.Tensor{data: <<1, 0, 0, 1>>, type: {:u, 8}, shape: {1, 2, 2}}
  """
  @spec to_tensor(t, size, keyword) :: Tensor.t()
  def to_tensor(%__MODULE__{} = mask, {seqlen_q, seqlen_k} = size, opts \\ []) do
    batches = mask |> narrowed(opts) |> bands(size)

    data =
      for bands <- batches,
          row <- rows(seqlen_q),
          seen = Bands.columns(bands, row),
          j <- rows(seqlen_k),
          into: <<>> do
        if Enum.any?(seen, fn {first, last} -> j in first..last//1 end), do: <<1>>, else: <<0>>
      end

    Tensor.new(data, {:u, 8}, {length(batches), seqlen_q, seqlen_k})
  end

  defp rows(count), do: Enum.to_list(0..(count - 1)//1)

  defp narrowed(mask, opts) do
    opts = check_options!(opts, [:causal, :window])
    mask = intersect_window(mask, opts[:window] || {:infinity, :infinity})
    if opts[:causal], do: intersect_window(mask, {:infinity, 0}), else: mask
  end

  # ---- checks --------------------------------------------------------------------------------------------

  defp ends(lengths), do: [0 | Enum.scan(lengths, &(&1 + &2))]

  defp check_numbers!(name, list, check!) when is_list(list), do: check!.(name, list)

  defp check_numbers!(name, numbers, _check!), do: check_tensor!(name, numbers)

  # What a tensor holds and which shape it has is seen when its numbers are asked for.
  defp check_tensor!(name, numbers) do
    if TensorLike.impl_for(numbers) == nil,
      do: raise(Error.invalid(name, "a list, or a tensor of whole numbers", Error.show(numbers)))
  end

  defp check_ids!(name, batches) do
    if not Enum.all?(batches, &is_list/1),
      do: raise(Error.invalid(name, "a list of ids a batch", Error.show(batches)))
  end

  defp check_lengths!(name, list) do
    if not (is_list(list) and Enum.all?(list, &(is_integer(&1) and &1 >= 0))),
      do: raise(Error.invalid(name, "a list of whole numbers of at least 0", Error.show(list)))
  end

  defp check_ascending!(name, [0 | _] = list) do
    check_lengths!(name, list)

    if Enum.sort(list) != list,
      do: raise(Error.invalid(name, "numbers that do not fall", Error.show(list)))
  end

  defp check_ascending!(name, list),
    do: raise(Error.invalid(name, "a list that begins with 0", Error.show(list)))

  defp check_same!(name, like, list) do
    if length(like) != length(list),
      do: raise(Error.invalid(name, "#{length(like)} of them", "#{length(list)}"))
  end

  defp check_ranges!(name, list) do
    if not (is_list(list) and Enum.all?(list, &match?({x, y} when is_integer(x) and is_integer(y), &1))),
      do: raise(Error.invalid(name, "a list of {begin, end}", Error.show(list)))
  end

  defp check_options!(opts, keys) do
    unknown = if Keyword.keyword?(opts), do: Keyword.keys(opts) -- keys, else: [opts]

    if unknown != [],
      do: raise(Error.invalid(:opts, "keys among #{Enum.join(keys, ", ")}", Error.show(hd(unknown))))

    opts
  end

  defimpl Inspect do
    alias FlashAttention.Mask.Bands

    # A picture, unless that would be large or needs sizes that the mask does not tell.
    @largest 40

    def inspect(mask, _opts) do
      case Bands.size(mask) do
        {seqlen_q, seqlen_k} = size when seqlen_q <= @largest and seqlen_k <= @largest ->
          picture(mask, size)

        _ ->
          "#FlashAttention.Mask<#{mask.kind}>"
      end
    end

    defp picture(mask, {seqlen_q, seqlen_k} = size) do
      %{data: data, shape: {batches, _, _}} = FlashAttention.Mask.to_tensor(mask, size)
      batch = if batches > 1, do: ", batch 0 of #{batches}"

      rows =
        for row <- 0..(seqlen_q - 1)//1 do
          cells = binary_part(data, row * seqlen_k, seqlen_k)
          [for(<<cell <- cells>>, do: if(cell == 1, do: "█", else: "·")), "\n"]
        end

      IO.iodata_to_binary([
        "#FlashAttention.Mask<#{mask.kind}, #{seqlen_q} x #{seqlen_k}#{batch}\n",
        rows,
        ">"
      ])
    end
  end
end
