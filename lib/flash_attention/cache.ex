defmodule FlashAttention.Cache do
  @moduledoc """
  Keys and values that grow from step to step, for processes that generate.

  A cache is a pool of pages in the memory of one device, taken once. A sequence is a term: its rows lie on pages of the
  pool, and the pages go back when the term is collected, or at once by `release/1`. Each step appends the new rows of `k`
  and `v` where they stay, and `FlashAttention.forward/3` takes a list of sequences in place of `k` and `v`:

      {:ok, cache} = FlashAttention.Cache.new(bytes: 4_000_000_000, type: :bf16, num_kv_heads: 8, head_dim: 128)
      {:ok, sequence} = FlashAttention.Cache.sequence(cache)
      :ok = FlashAttention.Cache.append(sequence, k, v)             # {1, rows, 8, 128} each
      {:ok, o} = FlashAttention.forward(q, [sequence])              # {1, seqlen_q, num_heads, 128}

  `q` has a batch for each sequence of the list, in its order; the sequences may have any lengths. The last row of `q`
  stands beside the last row of its sequence, as `causal: true`, the default, wants it: so append first, then attend. A
  sequence without rows gives 0. `fork/1` begins another sequence with the same rows, which shares their pages until one of
  both writes to them: prompts that are alike are kept once.

  | term       | holds                                              | is given back                                     |
  |------------|----------------------------------------------------|---------------------------------------------------|
  | a cache    | the device's memory, `bytes` of it                 | collected, and its last sequence with it          |
  | a sequence | its pages                                          | collected, or `release/1`                         |

  ## Processes

  Any process of the node may use a cache and its sequences, at once. Each call happens wholly, at one time: appends to one
  sequence wait for each other, a forward sees each sequence before or after an append, and the rows that it sees stay as
  they are, whatever others append, fork or release meanwhile. A call whose process is killed runs to its end. Terms
  of other nodes are references without memory.

  ## Errors

  A call that fails changes nothing. Where there are not pages enough for all rows of an append it is `:out_of_memory`:
  release sequences and call again.

  ## Layers

  A model has a cache for every layer, as `k` and `v` differ, and a sequence of each: give each `bytes` divided by the
  number of layers.

  ## Telemetry

  Each append is an event, see `FlashAttention.Telemetry`. `FlashAttention.backend_info/0` tells each device's `page_bytes`,
  and `info/1` a cache's.
  """

  alias FlashAttention.{Error, Native, Options, Telemetry, Tensor}
  alias FlashAttention.Cache.Sequence

  @enforce_keys [:ref, :device, :type, :num_pages, :page_size, :num_kv_heads, :head_dim]
  @derive {Inspect, except: [:ref]}
  defstruct @enforce_keys

  @type t :: %__MODULE__{
          ref: reference,
          device: Native.device(),
          type: Native.type(),
          num_pages: pos_integer,
          page_size: pos_integer,
          num_kv_heads: pos_integer,
          head_dim: pos_integer
        }

  @defaults [page_size: 16, device: :auto]
  @keys [:bytes, :type, :num_kv_heads, :head_dim] ++ Keyword.keys(@defaults)
  @types [f32: {:f, 32}, bf16: {:bf, 16}, f16: {:f, 16}, f64: {:f, 64}]

  # What says where keys lie is the cache's own, and a mask tells of lengths that it does not know.
  @options Options.keys() -- [:keep, :dlse, :key_lengths, :page_table, :mask]

  @doc """
  A cache of at most so many bytes.

    * `:bytes`: of the device's memory, for `k` and `v` together; as many whole pages as fit, taken now
    * `:type`: `:f32`, `:bf16`, `:f16` or `:f64`, of `k`, `v` and `q`
    * `:num_kv_heads`, `:head_dim`: of `k` and `v`
    * `:page_size`: rows on a page, #{@defaults[:page_size]} unless it is given. A small one wastes less on the last page of a
      sequence, a large one is found faster
    * `:device`: as in `FlashAttention.forward/4`, but one; `:auto`, the default, is the first that takes a forward from pages

  Errors: `:invalid_argument`, which names the option; `:no_device`; `:unsupported` where the device takes no forward from
  such pages; `:out_of_memory`.

      iex> {:ok, cache} = FlashAttention.Cache.new(bytes: 1000, type: :f32, num_kv_heads: 1, head_dim: 4, device: :cpu)
      iex> {cache.num_pages, cache.page_size}
      {1, 16}
      iex> {:error, error} = FlashAttention.Cache.new(bytes: 100, type: :f32, num_kv_heads: 1, head_dim: 4)
      iex> error.message
      "bytes: expected at least a page's 512, got 100"
  """
  @spec new(keyword) :: {:ok, t} | {:error, Error.t()}
  def new(opts) do
    with {:ok, opts} <- check(opts),
         {:ok, %{devices: devices, several: nil}} <- Options.parse([device: opts.device], [:device]),
         layout = layout(opts),
         {:ok, device} <- first_device(devices, opts.type, layout),
         {:ok, ref} <- native(Native.cache_new(device, opts.type, layout)) do
      {num_pages, page_size, num_kv_heads, head_dim} = layout

      {:ok,
       %__MODULE__{
         ref: ref,
         device: device,
         type: opts.type,
         num_pages: num_pages,
         page_size: page_size,
         num_kv_heads: num_kv_heads,
         head_dim: head_dim
       }}
    end
  end

  @doc """
  A sequence without rows.

      iex> {:ok, cache} = FlashAttention.Cache.new(bytes: 512, type: :f32, num_kv_heads: 1, head_dim: 4, device: :cpu)
      iex> {:ok, sequence} = FlashAttention.Cache.sequence(cache)
      iex> FlashAttention.Cache.length(sequence)
      0
  """
  @spec sequence(t) :: {:ok, Sequence.t()} | {:error, Error.t()}
  def sequence(%__MODULE__{} = cache) do
    with {:ok, ref} <- native(Native.cache_add_sequence(cache.ref)),
         do: {:ok, %Sequence{ref: ref, cache: cache}}
  end

  def sequence(other), do: {:error, Error.invalid(:cache, "a FlashAttention.Cache", Error.show(other))}

  @doc """
  Appends rows to a sequence, or to each of a list of different sequences of one cache.

  `k` and `v` are tensors `{batch, rows, num_kv_heads, head_dim}` of the cache's type, in the host's memory or the
  device's; `batch` is the number of sequences, 1 of a single one. All of them get their rows, or none does.

  Errors: `:out_of_memory` where the cache has not pages enough; `:invalid_argument`.

      iex> {:ok, cache} = FlashAttention.Cache.new(bytes: 128, type: :f32, num_kv_heads: 1, head_dim: 1, device: :cpu)
      iex> {:ok, sequence} = FlashAttention.Cache.sequence(cache)
      iex> rows = fn count -> FlashAttention.Tensor.new(:binary.copy(<<1.0::float-32-native>>, count), :f32, {1, count, 1, 1}) end
      iex> :ok = FlashAttention.Cache.append(sequence, rows.(10), rows.(10))
      iex> {:error, error} = FlashAttention.Cache.append(sequence, rows.(7), rows.(7))
      iex> {error.reason, error.message, FlashAttention.Cache.length(sequence)}
      {:out_of_memory, "cache: expected 1 free pages of 16 rows, got 0", 10}
  """
  @spec append(Sequence.t() | [Sequence.t(), ...], FlashAttention.tensor(), FlashAttention.tensor()) ::
          :ok | {:error, Error.t()}
  def append(%Sequence{} = sequence, k, v), do: append([sequence], k, v)

  def append(sequences, k, v) do
    with {:ok, cache, refs} <- cache_of(sequences),
         {:ok, k} <- read(:k, k, cache),
         {:ok, v} <- read(:v, v, cache),
         do: Telemetry.append(cache, k, fn -> native(Native.cache_append(refs, k, v)) end)
  end

  @doc """
  Another sequence with the rows of this one, whose pages both share until one of them appends to the last.

      iex> {:ok, cache} = FlashAttention.Cache.new(bytes: 128, type: :f32, num_kv_heads: 1, head_dim: 1, device: :cpu)
      iex> {:ok, sequence} = FlashAttention.Cache.sequence(cache)
      iex> row = FlashAttention.Tensor.new(<<1.0::float-32-native>>, :f32, {1, 1, 1, 1})
      iex> :ok = FlashAttention.Cache.append(sequence, row, row)
      iex> {:ok, fork} = FlashAttention.Cache.fork(sequence)
      iex> {FlashAttention.Cache.length(fork), FlashAttention.Cache.info(cache).free_pages}
      {1, 0}
  """
  @spec fork(Sequence.t()) :: {:ok, Sequence.t()} | {:error, Error.t()}
  def fork(%Sequence{} = sequence) do
    with {:ok, ref} <- native(Native.cache_fork(sequence.ref)), do: {:ok, %{sequence | ref: ref}}
  end

  def fork(other), do: refuse(other)

  @doc "How many rows a sequence has; 0 of one that was released."
  @spec length(Sequence.t()) :: non_neg_integer | {:error, Error.t()}
  def length(%Sequence{} = sequence) do
    with rows when is_integer(rows) <- native(Native.cache_length(sequence.ref)), do: max(rows, 0)
  end

  def length(other), do: refuse(other)

  @doc """
  Gives a sequence's pages back, once the calls that read them are done. To release it twice does nothing.

      iex> {:ok, cache} = FlashAttention.Cache.new(bytes: 128, type: :f32, num_kv_heads: 1, head_dim: 1, device: :cpu)
      iex> {:ok, sequence} = FlashAttention.Cache.sequence(cache)
      iex> FlashAttention.Cache.release(sequence)
      :ok
      iex> {:error, error} = FlashAttention.Cache.fork(sequence)
      iex> error.message
      "sequence: expected one that is held, got one that was released"
  """
  @spec release(Sequence.t()) :: :ok | {:error, Error.t()}
  def release(%Sequence{} = sequence) do
    with held when is_boolean(held) <- native(Native.cache_release(sequence.ref)), do: :ok
  end

  def release(other), do: refuse(other)

  @doc """
  What a cache holds: its `bytes`, and how many pages there are and are free.

      iex> {:ok, cache} = FlashAttention.Cache.new(bytes: 600, type: :f32, num_kv_heads: 1, head_dim: 1, device: :cpu)
      iex> FlashAttention.Cache.info(cache)
      %{bytes: 512, num_pages: 4, free_pages: 4, page_size: 16, device: :cpu}
  """
  @spec info(t) :: map | {:error, Error.t()}
  def info(%__MODULE__{} = cache) do
    with free when is_integer(free) <- native(Native.cache_free_pages(cache.ref)) do
      {kind, _index} = cache.device

      %{
        bytes: cache.num_pages * page_bytes(cache),
        num_pages: cache.num_pages,
        free_pages: free,
        page_size: cache.page_size,
        device: if(Options.own_memory?(kind), do: cache.device, else: kind)
      }
    end
  end

  def info(other), do: {:error, Error.invalid(:cache, "a FlashAttention.Cache", Error.show(other))}

  @doc false
  # The options of a forward over sequences, with what stands for k and v.
  @spec options([Sequence.t()], keyword) :: {:ok, map} | {:error, Error.t()}
  def options(sequences, opts) do
    with {:ok, cache, refs} <- cache_of(sequences),
         {:ok, options} <- Options.parse(opts, @options),
         {:ok, devices} <- on(cache.device, opts[:device], options) do
      {:ok, Map.merge(options, %{devices: devices, several: nil, sequences: refs})}
    end
  end

  defp on(device, nil, _options), do: {:ok, [device]}
  defp on(device, _given, %{devices: [device | _], several: nil}), do: {:ok, [device]}

  defp on(device, given, %{devices: devices, several: nil}) when given in [:auto, :all],
    do: if(device in devices, do: {:ok, [device]}, else: refuse_device(device, given))

  defp on(device, given, _options), do: refuse_device(device, given)

  defp refuse_device(device, given),
    do: {:error, Error.invalid(:device, "#{Error.show(device)} as the cache's", Error.show(given))}

  # ---- what is given -------------------------------------------------------------------------------------------

  defp check(opts) do
    with :ok <- check_keys(opts),
         opts = @defaults |> Keyword.merge(Enum.reject(opts, &match?({_key, nil}, &1))) |> Map.new(),
         {:ok, type} <- type(opts[:type]),
         :ok <- check_sizes(opts) do
      opts = %{opts | type: type}
      bytes = page_bytes(opts)

      if opts.bytes < bytes,
        do: {:error, Error.invalid(:bytes, "at least a page's #{bytes}", "#{opts.bytes}")},
        else: {:ok, opts}
    end
  end

  defp check_keys(opts) do
    cond do
      not Keyword.keyword?(opts) ->
        {:error, Error.invalid(:opts, "a keyword list", Error.show(opts))}

      key = Enum.find(Keyword.keys(opts), &(&1 not in @keys)) ->
        {:error, Error.invalid(:opts, "keys among #{Enum.join(@keys, ", ")}", inspect(key))}

      true ->
        :ok
    end
  end

  for {name, type} <- @types do
    defp type(type) when type in [unquote(name), unquote(Macro.escape(type))],
      do: {:ok, unquote(Macro.escape(type))}
  end

  defp type(other),
    do: {:error, Error.invalid(:type, Enum.map_join(Keyword.keys(@types), ", ", &inspect/1), Error.show(other))}

  # C's integers have 64 bits.
  defp check_sizes(opts) do
    Enum.find_value([:bytes, :num_kv_heads, :head_dim, :page_size], :ok, fn key ->
      size = opts[key]

      if not (is_integer(size) and size > 0 and size < 0x1000_0000_0000),
        do: {:error, Error.invalid(key, "a whole number from 1 to 2^44 - 1", Error.show(size))}
    end)
  end

  # Of k and of v.
  defp page_bytes(%{type: {_class, bits}} = layout),
    do: 2 * layout.page_size * layout.num_kv_heads * layout.head_dim * div(bits, 8)

  defp layout(opts),
    do: {min(div(opts.bytes, page_bytes(opts)), 0x7FFF_FFFF), opts.page_size, opts.num_kv_heads, opts.head_dim}

  # The last one's error is the caller's.
  defp first_device([device | others], type, {num_pages, page_size, num_kv_heads, head_dim} = layout) do
    pages = {type, {num_pages, page_size, num_kv_heads, head_dim}}
    numbers = %{key_lengths: {{:s, 32}, {1}}, page_table: {{:s, 32}, {1, 1}}}
    shapes = Map.merge(numbers, %{q: {type, {1, 1, num_kv_heads, head_dim}}, k: pages, v: pages})

    case Native.plan(:forward, shapes, [window_right: 0], device) do
      {:ok, _outputs, _bytes, _kernel} -> {:ok, device}
      {:error, {:unsupported, _, _, _, _}} when others != [] -> first_device(others, type, layout)
      {:error, error} -> {:error, Error.from_native(error)}
    end
  end

  defp read(argument, tensor, cache) do
    case Tensor.read(tensor, cache.device) do
      {:ok, native, _names} -> {:ok, native}
      {:error, expected, got} -> {:error, Error.invalid(argument, expected, got)}
    end
  end

  # The library says whether they are of one cache.
  defp cache_of([%Sequence{cache: cache} | _] = sequences) do
    if Enum.all?(sequences, &match?(%Sequence{}, &1)),
      do: {:ok, cache, Enum.map(sequences, & &1.ref)},
      else: refuse(sequences)
  rescue
    # An improper list, for one.
    _error -> refuse(sequences)
  end

  defp cache_of(other), do: refuse(other)

  defp refuse(term) do
    expected = "FlashAttention.Cache.Sequence or a list of at least one"
    {:error, Error.invalid(:sequences, expected, Error.show(term))}
  end

  defp native({:error, error}), do: {:error, Error.from_native(error)}
  defp native(result), do: result
end
