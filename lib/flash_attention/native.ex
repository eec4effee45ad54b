defmodule FlashAttention.Native do
  @moduledoc """
  The NIF: passes of attention on plain binaries.

  This is what `FlashAttention` stands on, and what programs use that want the passes as the C library has
  them. Tensors are `{binary, type, shape}`; names of tensors, options and devices are those of the C header
  (`c_src/flash_attention.h`), where causal attention is `window_right: 0`.

      iex> one = {<<1.0::float-32-native>>, {:f, 32}, {1, 1, 1, 1}}
      iex> {:ok, results} = FlashAttention.Native.run(:forward, %{q: one, k: one, v: one}, [], {:cpu, 0})
      iex> results.o
      {<<1.0::float-32-native>>, {:f, 32}, {1, 1, 1, 1}}

  The bodies of the functions here run only where the library was not there when this module was loaded. They
  try again, as it may have been built since, and else report why it is not there.
  """

  @on_load :load

  @typedoc """
  `:forward`, `:backward`, `:tangent`, the derivative of the forward along a direction, or `:bound`, how far rounding may
  take results.
  """
  @type pass :: :forward | :backward | :tangent | :bound

  @typedoc """
  `{:f, 32}`, `{:f, 64}`, `{:bf, 16}` or `{:f, 16}`, as Nx writes types; and `{:s, 32}`, `{:u, 32}` or `{:u, 8}` for
  numbers that are not computed with.
  """
  @type type :: {:f | :bf | :s | :u, 8 | 16 | 32 | 64}

  @typedoc "Contiguous elements in native byte order, their type, and the sizes of the axes."
  @type tensor :: {data, type, tuple}

  @typedoc """
  Where the elements are: in a binary; in memory of a device, to which the reference belongs (see `execute/5`); or at
  an address that the device can read, with the number of bytes there and a term that keeps them alive.
  """
  @type data :: binary | memory | {address :: non_neg_integer, bytes :: non_neg_integer, owner :: term}

  @typedoc "Memory of a device. It is given back when the term is collected, or by `release/1`."
  @type memory :: reference

  @typedoc "Tensors by the names of the C header: `:q`, `:lse`, `:dout`, `:tangent_q`, …"
  @type tensors :: %{optional(atom) => tensor}

  @typedoc "The types and sizes of tensors, by the same names."
  @type shapes :: %{optional(atom) => {type, tuple}}

  @typedoc "A number, `:infinity` for a window without bound, or a choice: `:high`, `true`."
  @type option :: {atom, number | :infinity | atom}

  @typedoc """
  A kind of device, `backend_info/0` lists them, and which one of that kind. `:reference` is the naive implementation that
  the others are measured against.
  """
  @type device :: {kind :: atom, non_neg_integer}

  @typedoc """
  Where to leave what a pass makes, each of them optional: `results: :device` leaves outputs in the device's memory,
  `keep: true` keeps there what the backward will want. With `measure: false` nothing is measured, and a small call on a
  GPU takes some microseconds less.
  """
  @type placement :: %{
          optional(:results) => :host | :device,
          optional(:keep) => boolean,
          optional(:measure) => boolean
        }

  @typedoc "What a pass moved over the bus, and how long its kernels ran; nothing where it was not to be measured."
  @type measurements :: %{
          optional(:bytes_to_device) => non_neg_integer,
          optional(:bytes_from_device) => non_neg_integer,
          optional(:kernel_seconds) => float
        }

  @typedoc "What `FlashAttention.Error` is made of: `{status, argument, expected, got, message}`."
  @type error :: {atom, String.t(), String.t(), String.t(), String.t()}

  @doc """
  Runs one pass on a dirty scheduler.

  Inputs and outputs of the passes:

  | pass        | inputs                                       | outputs                       |
  |-------------|----------------------------------------------|-------------------------------|
  | `:forward`  | q, k, v, and sink if any                     | o, lse                        |
  | `:backward` | dout, q, k, v, o, lse, and sink if any       | dq, dk, dv, and dsink if any  |
  | `:tangent`  | q, k, v, sink if any, and tangent_* of each  | o, lse, o_tangent, lse_tangent|
  | `:bound`    | dout, q, k, v, and sink if any               | those of forward and backward |

  What `:bound` writes is no result but how far rounding may take each of its numbers, on any device; it runs on
  `{:reference, 0}` alone.

  Whatever is passed, the result is `{:ok, outputs}` or `{:error, error}`.

      iex> FlashAttention.Native.run(:forward, %{}, [], {:cpu, 0})
      {:error, {:invalid_argument, "q", "a tensor of shape [batch, seqlen_q, num_heads, head_dim]", "none",
        "q: expected a tensor of shape [batch, seqlen_q, num_heads, head_dim], got none"}}
  """
  @spec run(pass, tensors, [option], device) :: {:ok, tensors} | {:error, error}
  def run(pass, tensors, options, device) do
    with {:ok, outputs, _kept, _measurements} <- execute(pass, tensors, options, device, %{measure: false}),
         do: {:ok, outputs}
  end

  @doc """
  As `run/4`, with a say in where results stay.

  Returns what the pass gave, with `keep: true` what it keeps for `:backward` (inputs and outputs by name, for a
  pass with `dout` beside them), and what was measured. On a CPU everything is a binary, whatever is asked for. Several
  devices of one kind divide the batches or heads; nothing stays on them.

      iex> one = {<<1.0::float-32-native>>, {:f, 32}, {1, 1, 1, 1}}
      iex> {:ok, _outputs, kept, measurements} =
      ...>   FlashAttention.Native.execute(:forward, %{q: one, k: one, v: one}, [], {:cpu, 0}, %{keep: true})
      iex> {Enum.sort(Map.keys(kept)), kept.q == one, measurements.bytes_to_device}
      {[:k, :lse, :o, :q, :v], true, 0}
  """
  @spec execute(pass, tensors, [option], device | [device, ...], placement) ::
          {:ok, tensors, kept :: tensors, measurements} | {:error, error}
  def execute(pass, tensors, options, device, placement),
    do: once_loaded(:execute, [pass, tensors, options, device, placement])

  @doc """
  What a pass would write, from the types and shapes of its inputs, how many bytes of workspace it takes on the
  device, and which kernel would run: whether `execute/5` would take them, without data.

      iex> shapes = for name <- [:q, :k, :v], into: %{}, do: {name, {{:bf, 16}, {2, 9, 4, 64}}}
      iex> {:ok, outputs, _workspace_bytes, "cpu/" <> _} = FlashAttention.Native.plan(:forward, shapes, [], {:cpu, 0})
      iex> outputs
      %{o: {{:bf, 16}, {2, 9, 4, 64}}, lse: {{:f, 32}, {2, 4, 9}}}
  """
  @spec plan(pass, shapes, [option], device) ::
          {:ok, shapes, workspace_bytes :: non_neg_integer, kernel :: String.t()} | {:error, error}
  def plan(pass, shapes, options, device), do: once_loaded(:plan, [pass, shapes, options, device])

  @doc """
  Merges parts of attention, or gives the gradients of that: what stands behind `FlashAttention.Parts`.

  `:forward` takes `%{parts: [{o, lse}], type: type}` and perhaps a `sink`, and gives `%{o: o, lse: lse}`, `o` of that type.
  `:backward` takes `%{dout: dout, o: o, lse: lse, parts: [{o, lse}]}`, perhaps `dlse` and a `sink`, and gives
  `%{parts: [{dout, dlse}], dsink: dsink}`; there may be no part. On a GPU, binaries are copied there and back.

      iex> part = {{<<3.0::float-32-native>>, {:f, 32}, {1, 1, 1, 1}}, {<<0.0::float-32-native>>, {:f, 32}, {1, 1, 1}}}
      iex> {:ok, %{o: o}} = FlashAttention.Native.merge(:forward, %{parts: [part, part], type: {:f, 32}}, {:cpu, 0}, :host)
      iex> o
      {<<3.0::float-32-native>>, {:f, 32}, {1, 1, 1, 1}}
  """
  @spec merge(:forward | :backward, map, device, :host | :device) :: {:ok, map} | {:error, error}
  def merge(pass, tensors, device, results), do: once_loaded(:merge, [pass, tensors, device, results])

  @doc "The library's version, the kinds of devices, the devices that it finds, and why it finds none of the others."
  @spec backend_info() :: %{
          version: String.t(),
          kinds: [map],
          devices: [map],
          missing: %{optional(atom) => String.t()}
        }
  def backend_info do
    case load_nif() do
      :ok -> apply(__MODULE__, :backend_info, [])
      {:error, message} -> %{version: "", kinds: [], devices: [], missing: %{cpu: message, cuda: message}}
    end
  end

  @doc """
  The library's table of options: name, kind, bounds, default, choices and a sentence of each.

      iex> for option <- FlashAttention.Native.options(), option.kind == :length, do: option.name
      [:window_left, :window_right]
  """
  @spec options() :: [map]
  def options do
    case load_nif() do
      :ok -> apply(__MODULE__, :options, [])
      {:error, _message} -> []
    end
  end

  @doc """
  The device, address and size in bytes of a device's memory, also of what was released.

      iex> FlashAttention.Native.memory_info(:none)
      {:error, {:invalid_argument, "memory", "a reference to a device's memory", "none",
        "memory: expected a reference to a device's memory, got none"}}
  """
  @spec memory_info(memory) :: {device, address :: non_neg_integer, bytes :: non_neg_integer} | {:error, error}
  def memory_info(memory), do: once_loaded(:memory_info, [memory])

  @doc "Gives a device's memory back, once the calls that use it are done. False where that was done before."
  @spec release(memory) :: boolean | {:error, error}
  def release(memory), do: once_loaded(:release, [memory])

  @doc "What a device's memory holds."
  @spec read(memory) :: {:ok, binary} | {:error, error}
  def read(memory), do: once_loaded(:read, [memory])

  @doc """
  Returns memory that is at hand for later calls to the device's driver and to the system.

      iex> FlashAttention.Native.trim({:cpu, 0})
      :ok
  """
  @spec trim(device) :: :ok | {:error, error}
  def trim(device), do: once_loaded(:trim, [device])

  @doc """
  Lets the memory of binaries that the GPU reads and writes at full rate be at most so much.

      iex> FlashAttention.Native.set_pinned_limit(-1)
      {:error, {:invalid_argument, "pinned_limit", "a number of bytes", "-1",
        "pinned_limit: expected a number of bytes, got -1"}}
  """
  @spec set_pinned_limit(non_neg_integer) :: :ok | {:error, error}
  def set_pinned_limit(bytes), do: once_loaded(:set_pinned_limit, [bytes])

  @doc """
  Memory of a device, which is the host's own where the device has none.

      iex> {:ok, memory} = FlashAttention.Native.allocate({:cpu, 0}, 16)
      iex> {{:cpu, 0}, _address, 16} = FlashAttention.Native.memory_info(memory)
      iex> FlashAttention.Native.allocate({:cpu, 0}, -1)
      {:error, {:invalid_argument, "bytes", "a number of bytes", "-1", "bytes: expected a number of bytes, got -1"}}
  """
  @spec allocate(device, non_neg_integer) :: {:ok, memory} | {:error, error}
  def allocate(device, bytes), do: once_loaded(:allocate, [device, bytes])

  @doc """
  A device's memory with what a binary, or memory of that device, holds.

      iex> {:ok, memory} = FlashAttention.Native.upload({:cpu, 0}, "1234")
      iex> FlashAttention.Native.read(memory)
      {:ok, "1234"}
  """
  @spec upload(device, binary | memory) :: {:ok, memory} | {:error, error}
  def upload(device, data), do: once_loaded(:upload, [device, data])

  @doc """
  The sum of rows of tensors, of a type and shape that are given, on the device, where all of them lie.

  Tensors are `[batch, seqlen, ...]`, alike but for `seqlen`. Of each part there are segments `{from, to, count}`: so
  many of its rows from that one on, in each batch, are added to those of the sum from there on. What nothing is added
  to is 0. The sum is made in f32 (f64 of f64), in the order of the parts, and rounded once.

      iex> tensor = fn numbers ->
      ...>   {for(x <- numbers, into: <<>>, do: <<x::float-32-native>>), {:f, 32}, {1, length(numbers)}}
      ...> end
      iex> parts = [{tensor.([1.0, 2.0]), [{0, 0, 2}]}, {tensor.([10.0, 20.0]), [{1, 0, 1}, {0, 2, 1}]}]
      iex> {:ok, sum} = FlashAttention.Native.sum(parts, {{:f, 32}, {1, 4}}, {:cpu, 0})
      iex> sum == tensor.([21.0, 2.0, 10.0, 0.0])
      true
  """
  @spec sum(
          [{tensor, [{non_neg_integer, non_neg_integer, non_neg_integer}]}],
          {type, shape :: tuple},
          device
        ) :: {:ok, tensor} | {:error, error}
  def sum(parts, type_and_shape, device), do: once_loaded(:sum, [parts, type_and_shape, device])

  @typedoc "A device's link to those of other ranks, see `link_open/5`, and an exchange over it."
  @type link :: reference
  @type exchange :: reference

  @doc """
  What rank 0 makes and tells the others, so that all can open a link.

      iex> {:error, {:unsupported, "device", _expected, "cpu", _message}} = FlashAttention.Native.link_id({:cpu, 0})
  """
  @spec link_id(device) :: {:ok, binary} | {:error, error}
  def link_id(device), do: once_loaded(:link_id, [device])

  @doc """
  Links a GPU to those of other ranks, by NCCL; returns when all of them have called it, or an error after so many
  milliseconds.

  Somebody aborts each link in the end (`link_abort/1`): only then is it given back, together with the term.
  """
  @spec link_open(device, id :: binary, pos_integer, rank :: non_neg_integer, milliseconds :: integer) ::
          {:ok, link} | {:error, error}
  def link_open(device, id, num_ranks, rank, milliseconds),
    do: once_loaded(:link_open, [device, id, num_ranks, rank, milliseconds])

  @doc """
  Begins transfers between the link's device and other ranks': parts of memories of that device. The n-th one sent to a
  rank is the n-th that it receives from here.
  """
  @spec link_begin(link, [
          {:send | :receive, rank :: non_neg_integer, memory, offset :: non_neg_integer,
           bytes :: non_neg_integer}
        ]) :: {:ok, exchange} | {:error, error}
  def link_begin(link, transfers), do: once_loaded(:link_begin, [link, transfers])

  @doc "Waits for an exchange to end."
  @spec link_await(exchange) :: :ok | {:error, error}
  def link_await(exchange), do: once_loaded(:link_await, [exchange])

  @doc "Ends a link and what is under way on it, from any process."
  @spec link_abort(link) :: :ok | {:error, error}
  def link_abort(link), do: once_loaded(:link_abort, [link])

  @typedoc "A cache of keys and values on pages, and a sequence of one, see `FlashAttention.Cache`. Both go when collected."
  @type cache :: reference
  @type sequence :: reference

  @doc """
  A cache, in memory of a device: `{num_pages, page_size, num_kv_heads, head_dim}` of `k`, and of `v`.

  `execute/5` takes a list of its sequences as `:sequences` among the tensors, in place of `k`, `v`, `key_lengths` and
  `page_table`.

      iex> {:ok, cache} = FlashAttention.Native.cache_new({:cpu, 0}, {:f, 32}, {2, 4, 1, 1})
      iex> {:ok, sequence} = FlashAttention.Native.cache_add_sequence(cache)
      iex> one = {<<1.0::float-32-native>>, {:f, 32}, {1, 1, 1, 1}}
      iex> :ok = FlashAttention.Native.cache_append([sequence], one, one)
      iex> {:ok, %{o: o}} = FlashAttention.Native.run(:forward, %{q: one, sequences: [sequence]}, [], {:cpu, 0})
      iex> o == one
      true
  """
  @spec cache_new(device, type, tuple) :: {:ok, cache} | {:error, error}
  def cache_new(device, type, shape), do: once_loaded(:cache_new, [device, type, shape])

  @doc "How many pages of a cache no sequence has and no call reads."
  @spec cache_free_pages(cache) :: non_neg_integer | {:error, error}
  def cache_free_pages(cache), do: once_loaded(:cache_free_pages, [cache])

  @doc "A sequence of a cache, without rows."
  @spec cache_add_sequence(cache) :: {:ok, sequence} | {:error, error}
  def cache_add_sequence(cache), do: once_loaded(:cache_add_sequence, [cache])

  @doc "A sequence with the rows of another."
  @spec cache_fork(sequence) :: {:ok, sequence} | {:error, error}
  def cache_fork(sequence), do: once_loaded(:cache_fork, [sequence])

  @doc "How many rows a sequence has, -1 where it was released."
  @spec cache_length(sequence) :: integer | {:error, error}
  def cache_length(sequence), do: once_loaded(:cache_length, [sequence])

  @doc "Appends the rows of each batch of `k` and `v` to a sequence each, or none."
  @spec cache_append([sequence, ...], tensor, tensor) :: :ok | {:error, error}
  def cache_append(sequences, k, v), do: once_loaded(:cache_append, [sequences, k, v])

  @doc "Gives a sequence's pages back, once the calls that use them are done. False where that was done before."
  @spec cache_release(sequence) :: boolean | {:error, error}
  def cache_release(sequence), do: once_loaded(:cache_release, [sequence])

  @doc """
  Registers the passes and merges of parts with the XLA that is loaded in this VM as the library of that name, as the custom
  calls `flash_attention_forward`, `flash_attention_backward`, `flash_attention_merge` and `flash_attention_merge_backward`.
  The C header says what they take.

  Once, before the first of them is compiled. EXLA loads XLA as `libxla_extension.so` when its NIF is loaded:

      iex> FlashAttention.Native.register_xla("libnot_loaded.so")
      {:error, {:unsupported, "library", "an XLA runtime that is loaded", "libnot_loaded.so",
        "library: expected an XLA runtime that is loaded, got libnot_loaded.so"}}
  """
  @spec register_xla(library :: String.t()) :: :ok | {:error, error}
  def register_xla(library), do: once_loaded(:register_xla, [library])

  @doc false
  def load do
    load_nif()
    :ok
  end

  defp once_loaded(function, arguments) do
    case load_nif() do
      :ok -> apply(__MODULE__, function, arguments)
      {:error, message} -> {:error, {:not_loaded, "", "", "", message}}
    end
  end

  defp load_nif do
    path = Path.join(priv_dir(), "flash_attention_nif")

    case :erlang.load_nif(String.to_charlist(path), 0) do
      :ok -> :ok
      {:error, {_reason, text}} -> {:error, "#{path}.so is not loaded: #{text} (mix compile builds it)"}
    end
  end

  defp priv_dir do
    case :code.priv_dir(:flash_attention) do
      {:error, :bad_name} -> Path.expand("../priv", Path.dirname(:code.which(__MODULE__)))
      priv_dir -> List.to_string(priv_dir)
    end
  end
end
