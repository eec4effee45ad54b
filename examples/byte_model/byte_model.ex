defmodule FlashAttention.Examples.ByteModel do
  @moduledoc """
  A language model over bytes that is nothing but attention, in plain Elixir.

  Position `i` of a sequence has read the bytes `..., x[i-2], x[i-1], x[i]` and predicts `x[i+1]`. Tables, one
  row for each of the 256 bytes, give attention's inputs; `|` joins the parts that a head's `head_dim` has:

      q[i] = query.byte[x[i]]   | query.previous[x[i-1]] | phase(i - offset)
      k[j] = key.byte[x[j-1]]   | key.previous[x[j-2]]   | phase(j)
      v[j] = value[x[j]]

  Attention is causal, and each head has one learned sink. The heads of attention's output, side by side, are
  the 256 logits, `num_heads * head_dim = 256`; with a multiple of that, each run of 256 is a full set of
  logits, and the sets are added up. The loss is the mean cross entropy of the next byte, in nats.

  What this can learn through attention:

    * The phases are sines and cosines whose product `phase(i - offset) . phase(j)` is largest at
      `j = i - offset`. Heads of the first set look at the current byte (`offset` 0), those of the next one at
      the byte before it (`offset` 1), and so on: their values become the odds of what follows.
    * `q[i]` is what was just read, and `k[j]` is what was read just before `x[j]`. Where a head learns to let
      them match, it finds the places where the last two bytes have occurred before, and votes for what came
      next then: it copies from the text at hand (an *induction head*).

  ## Almost all arithmetic is attention

  Elementwise loops are slow in Elixir and matrix products are fast in the library, so the rest of the
  model is written as attention as well, with one-hot rows:

    * The softmax over logits is attention of the logits to the rows of the identity matrix: scores are the
      logits themselves, `lse` is the logarithm of their normaliser, and with the identity as values the
      output is the probabilities.
    * Adding up the gradients of equal bytes is attention of each byte to the positions where it stands, at
      a scale that leaves no weight for other positions: the output is the mean of those gradients.
  """

  alias FlashAttention.{Error, Tensor}
  alias FlashAttention.Examples.ByteModel.{Elements, Embed, Head, Writer}
  alias FlashAttention.Training.Model

  @enforce_keys [:num_heads, :head_dim, :seqlen, :type, :device]
  defstruct @enforce_keys

  @typedoc "Sizes, the type of all arithmetic and the device."
  @type t :: %__MODULE__{
          num_heads: pos_integer,
          head_dim: pos_integer,
          seqlen: pos_integer,
          type: {:f, 32 | 64},
          device: :auto | :cpu | :cuda | {:cuda, non_neg_integer}
        }

  @typedoc """
  Windows of text: two bytes of context, bytes to read, `seqlen` of them at most, and the last byte to predict. Windows of
  different lengths are packed: they are one sequence, in which each sees itself alone.
  """
  @type batch :: [binary]

  @typedoc "Texts of their own, each with what comes before and behind it."
  @type documents :: tuple

  @num_bytes 256

  # What a window has beside the bytes that are read: two bytes of context, and the last byte to predict.
  @num_around 3

  # What a text starts after.
  @start "\n\n\n"

  # Deviation of the initial query and key tables, in which random codes keep bytes apart.
  @code_deviation 0.5

  @doc """
  A model of these sizes. Options:

    * `:num_heads`, `:head_dim` - default 8 and 64; their product is a multiple of 256, and `head_dim` a
      divisor of 256 of at least 8
    * `:seqlen` - positions in a window of text; default 256
    * `:type` - `{:f, 32}` (default) or `{:f, 64}`
    * `:device` - as in `FlashAttention.forward/4`

  Raises `FlashAttention.Error`.

      iex> FlashAttention.Examples.ByteModel.new(num_heads: 4).head_dim
      64
      iex> FlashAttention.Examples.ByteModel.new(num_heads: 3)
      ** (FlashAttention.Error) num_heads: expected a multiple of 4, for 256 logits of head_dim 64, got 3
  """
  @spec new(keyword) :: t
  def new(opts \\ []) do
    defaults = [num_heads: 8, head_dim: 64, seqlen: 256, type: {:f, 32}, device: :auto]
    model = struct!(__MODULE__, Keyword.validate!(opts, defaults))

    check!(:head_dim, model.head_dim, "8, 16, 32, 64, 128 or 256", &(&1 in [8, 16, 32, 64, 128, 256]))
    per_set = heads_per_set(model)
    multiple = "a multiple of #{per_set}, for 256 logits of head_dim #{model.head_dim}"
    check!(:num_heads, model.num_heads, multiple, &(is_integer(&1) and &1 > 0 and rem(&1, per_set) == 0))
    check!(:seqlen, model.seqlen, "a whole number of at least 1", &(is_integer(&1) and &1 > 0))
    check!(:type, model.type, "{:f, 32} or {:f, 64}", &(&1 in [{:f, 32}, {:f, 64}]))
    model
  end

  defp check!(argument, value, expected, valid?) do
    if !valid?.(value), do: raise(Error.invalid(argument, expected, Error.show(value)))
  end

  @doc """
  Parameters before training: random codes for the queries and keys, and values and sinks of 0.

  The same seed gives the same parameters.

      iex> alias FlashAttention.Examples.ByteModel
      iex> params = ByteModel.init(ByteModel.new(), 1)
      iex> {params.value.shape, params.query.byte.shape, params.sink.shape}
      {{256, 8, 64}, {256, 8, 24}, {1, 8}}
  """
  @spec init(t, seed :: integer) :: FlashAttention.Training.Params.t()
  def init(model, seed) do
    random = :rand.seed_s(:exsss, seed)
    {query, random} = codes(model, random)
    {key, _random} = codes(model, random)
    value = {@num_bytes, model.num_heads, model.head_dim}

    %{
      query: query,
      key: key,
      value: Tensor.new(Elements.zeros(model.type, Tuple.product(value)), model.type, value),
      sink: Tensor.new(Elements.zeros({:f, 32}, model.num_heads), {:f, 32}, {1, model.num_heads})
    }
  end

  defp codes(model, random) do
    {byte, random} = code(model, random)
    {previous, random} = code(model, random)
    {%{byte: byte, previous: previous}, random}
  end

  defp code(model, random) do
    shape = {@num_bytes, model.num_heads, code_dim(model)}

    {numbers, random} =
      Enum.map_reduce(1..Tuple.product(shape), random, fn _, random ->
        {x, random} = :rand.normal_s(random)
        {x * @code_deviation, random}
      end)

    {Tensor.new(Elements.from_list(model.type, numbers), model.type, shape), random}
  end

  @doc """
  The stages of this model, for `FlashAttention.Training.train_step/3`. Batches are those of `batch/5` and `packed/5`.
  """
  @spec stages(t) :: Model.t()
  def stages(model) do
    %Model{embed: Embed.stage(model), head: Head.stage(model), attention: [device: model.device]}
  end

  @doc """
  The windows of text that step number `step` trains on: drawn at random, and the same whenever text, seed and
  step are the same.

      iex> model = FlashAttention.Examples.ByteModel.new(seqlen: 5)
      iex> [window] = FlashAttention.Examples.ByteModel.batch(model, "abcdefgh", 1, 0, 1)
      iex> window
      "abcdefgh"
  """
  @spec batch(t, text :: binary, batch_size :: pos_integer, seed :: integer, step :: non_neg_integer) :: batch
  def batch(model, text, batch_size, seed, step) do
    bytes = window_bytes(model)
    check!(:text, byte_size(text), "at least #{bytes} bytes, seqlen and 3 more", &(&1 >= bytes))

    {windows, _random} =
      Enum.map_reduce(1..batch_size, :rand.seed_s(:exsss, {seed, step, 0}), fn _, random ->
        {start, random} = :rand.uniform_s(byte_size(text) - bytes + 1, random)
        {binary_part(text, start - 1, bytes), random}
      end)

    windows
  end

  defp window_bytes(model), do: model.seqlen + @num_around

  @doc """
  The texts between separators. Each keeps the separator behind it, so that a model learns where one ends.

      iex> FlashAttention.Examples.ByteModel.documents("one--two----three", "--")
      {"\\n\\n\\none--", "\\n\\n\\ntwo--", "\\n\\n\\nthree--"}
  """
  @spec documents(text :: binary, separator :: binary) :: documents
  def documents(text, separator) do
    check!(:separator, separator, "some bytes", &(is_binary(&1) and &1 != ""))
    parts = for part <- :binary.split(text, separator, [:global]), part != "", do: @start <> part <> separator
    if parts == [], do: raise(Error.invalid(:text, "something between separators", "nothing"))
    List.to_tuple(parts)
  end

  @doc """
  Documents for step number `step`, drawn at random as in `batch/5`, until `batch_size * seqlen` bytes are to be read: of a
  longer one than `seqlen`, a piece, and the last is cut where there is no more room.

      iex> model = FlashAttention.Examples.ByteModel.new(seqlen: 6)
      iex> documents = FlashAttention.Examples.ByteModel.documents("ab.c", ".")
      iex> windows = FlashAttention.Examples.ByteModel.packed(model, documents, 2, 0, 1)
      iex> Enum.sum(for window <- windows, do: byte_size(window) - 3)
      12
  """
  @spec packed(t, documents, batch_size :: pos_integer, seed :: integer, step :: non_neg_integer) :: batch
  def packed(model, documents, batch_size, seed, step),
    do: draw(documents, batch_size * model.seqlen, model.seqlen, :rand.seed_s(:exsss, {seed, step, 0}))

  defp draw(_documents, 0, _most, _random), do: []

  defp draw(documents, room, most, random) do
    {number, random} = :rand.uniform_s(tuple_size(documents), random)
    document = elem(documents, number - 1)
    all = byte_size(document) - @num_around
    count = Enum.min([all, most, room])
    {start, random} = :rand.uniform_s(all - count + 1, random)
    [binary_part(document, start - 1, count + @num_around) | draw(documents, room - count, most, random)]
  end

  @doc """
  `count` bytes that the model writes after the prompt.

  Options: `:temperature` (default 0.7; the lower, the likelier the bytes, and 0 always takes the likeliest) and
  `:seed` (default 0). Keys and values of the last `seqlen` positions are kept, so that a byte costs attention
  of a single row.
  """
  @spec generate(t, FlashAttention.Training.Params.t(), prompt :: binary, count :: non_neg_integer, keyword) ::
          binary
  defdelegate generate(model, params, prompt, count, opts \\ []), to: Writer

  # ---- how a head is laid out ----------------------------------------------------------------------------

  @doc false
  def heads_per_set(model), do: div(@num_bytes, model.head_dim)

  @doc false
  def num_sets(model), do: div(model.num_heads, heads_per_set(model))

  # A quarter of head_dim tells positions, and the codes of two bytes share the rest.
  @doc false
  def phase_dim(model), do: div(model.head_dim, 4)

  @doc false
  def code_dim(model), do: div(model.head_dim - phase_dim(model), 2)
end
