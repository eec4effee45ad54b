defmodule FlashAttention do
  alias FlashAttention.{
    Cache,
    Defn,
    DeviceMemory,
    Error,
    Mask,
    Native,
    Options,
    States,
    Telemetry,
    Tensor,
    TensorLike
  }

  @options_doc "## Options\n\n#{Options.docs()}"

  @moduledoc """
  Exact attention, forward and backward, in memory that grows linearly with the sequence.

  For every batch `b`, query head `h` and row `i`, with `kv = div(h, div(num_heads, num_kv_heads))`:

      s[i,j] = scale * dot(q[b,i,h], k[b,j,kv])
      s[i,j] = softcap * tanh(s[i,j] / softcap)           where softcap is given
      s[i,j] = s[i,j] + bias[b,h,i,j]                     where there is a bias
      s[i,j] = s[i,j] - alibi_slopes[b,h] * |i + seqlen_k - seqlen_q - j|    where alibi_slopes are given
      s[i,j] = -infinity                                  where column j is not visible from row i
      lse[i] = log(sum_j exp(s[i,j]) + sum_t exp(sink[t,h]))
      o[i]   = sum_j keep[i,j] * exp(s[i,j] - lse[i]) * v[b,j,kv]     keep is 1 without dropout, see `FlashAttention.Dropout`

  The tiled algorithm is FlashAttention-2's (Dao 2023, arXiv 2307.08691): the scores are never stored, and the
  backward computes them again from `lse`.

  ## Tensors

  | tensor                 | shape                                      | type                                   |
  |------------------------|--------------------------------------------|----------------------------------------|
  | `q`, `o`, `dout`, `dq` | `{batch, seqlen_q, num_heads, head_dim}`   | `f32`, `bf16`, `f16`, `f64` (CPU only) |
  | `k`, `v`, `dk`, `dv`   | `{batch, seqlen_k, num_kv_heads, head_dim}`| as `q`                                 |
  | `lse`                  | `{batch, num_heads, seqlen_q}`             | `f32` (`f64` with `f64`)               |
  | `dlse`                 | `{batch or 1, num_heads, seqlen_q}`        | as `lse`                               |
  | `sink`, `dsink`        | `{num_sinks, num_heads}`, or a row's own, `{batch, seqlen_q, num_sinks, num_heads}` | `f32` |
  | `alibi_slopes`, `dalibi_slopes` | `{batch or 1, num_heads}`         | `f32`                                  |
  | `bias`, `dbias`        | `{batch or 1, num_heads or 1, seqlen_q or 1, seqlen_k}` | as `q`, `f32`, or `u8` (0 hides) |
  | `dropout_seed`         | `{2}`                                      | `u32`                                  |
  | `bands` (of a mask)    | `{batch or 1, num_bands, 6}`               | `s32`                                  |
  | `key_lengths`          | `{batch or 1}`                             | `s32`                                  |
  | `page_table`           | `{batch, max_pages}`; `k` and `v` are then `{num_pages, page_size, num_kv_heads, head_dim}` | `s32` |

  `num_kv_heads` divides `num_heads` (grouped-query attention). 16-bit types accumulate in f32. A row that sees
  nothing gives `o` 0 and `lse` -infinity (`log(sum exp(sink))` with sinks), never NaN.

  Tensors are Nx tensors, or `FlashAttention.Tensor` where there is no Nx; anything for which
  `FlashAttention.TensorLike` is implemented will do. Results are like `q`: Nx tensors where `q` is one, on
  Nx's default backend, with the axis names of `q`, `k`, `v` and `sink`.

  These functions compute at once. Inside `defn`, and in Axon models, call `attention/4`.

  ## On a GPU

  Binaries are copied there and back, at the full rate of the bus where they are results of earlier calls, while
  parts of the problem are computed. Less is copied with

    * `keep: :device`: what the forward leaves for the backward stays there (`forward_with_states/4`, `backward/2`);
    * `results: :device`: results stay there as tensors over `FlashAttention.DeviceMemory`, for later calls;
    * tensors that lie there: those of `EXLA.Backend` on CUDA, and any `%Nx.Pointer{kind: :local}` of `Nx.to_pointer/2`
      by `FlashAttention.Tensor.new/3`, are used where they are. With `results: :device` results are like an
      `EXLA.Backend` q, too.

  Such a tensor is read after the work that the default CUDA stream holds when the call is made. EXLA's are complete
  by then; who computes others on another stream waits for that first. Results are complete when the call returns. A
  GPU's memory that runs out is an error that says how much was asked for and is free.

  With `device: [{:cuda, 0}, {:cuda, 1}]`, or `:all` of them, the GPUs divide the batches or heads of a call of `forward/4`,
  `forward_with_states/4` or `backward/7` among them, and each copies over its own bus. For sequences too long for one GPU see
  `FlashAttention.Distributed`.

  `FlashAttention.Telemetry` tells what was moved and how long it took.

  ## Errors

  Whatever is wrong with the arguments comes back as `{:error, %FlashAttention.Error{}}`, which names the
  argument, what was expected and what came. The functions ending in `!` raise it.

  ## Schedulers

  Calls run on dirty schedulers, use as many threads as there are processors (or as the environment variable
  `FLASH_ATTENTION_NUM_THREADS` says) and may be made by any number of processes at once, which share those
  threads. A call whose process is killed runs to its end, and then gives back its memory. Calls on a GPU hold a dirty
  scheduler while it computes, and copy ordinary binaries with up to sixteen threads.

  While a call keeps every processor busy, normal schedulers still answer, on a machine with nothing else to do within some
  10 ms: its threads give way every 0.1 ms. Schedulers that do not spin before they sleep (`+sbwt none` among the VM's flags)
  answer within 5. `make bench-responsiveness` measures it on yours.
  """

  # What each pass takes: States are the forward's to keep, and only the backward has a gradient by lse.
  @forward_options Options.keys() -- [:keep, :dlse]
  @states_options Options.keys() -- [:dlse]
  @backward_options Options.keys() -- [:keep]

  @typedoc "An Nx tensor or a `FlashAttention.Tensor`."
  @type tensor :: TensorLike.t()

  @typedoc "See the table of options in `forward/4`."
  @type option :: unquote(Options.option_typespec())

  @typedoc "The gradients of the optional tensors, by the names of their options: `%{sink: dsink}`."
  @type optional_gradients :: %{optional(atom) => tensor}

  @typedoc "`:cpu`, or a kind of device and which one of them."
  @type device :: :cpu | {atom, non_neg_integer}

  @doc """
  Attention: the output `o`, of `q`'s shape.

  #{@options_doc}

  `nil` as a value stands for the default.

  ## Examples

  Two rows of one head; the first sees only the first column.

      iex> tensor = fn list ->
      ...>   data = for x <- list, into: <<>>, do: <<x::float-32-native>>
      ...>   FlashAttention.Tensor.new(data, {:f, 32}, {1, 2, 1, 1})
      ...> end
      iex> {:ok, o} = FlashAttention.forward(tensor.([0.0, 0.0]), tensor.([1.0, 2.0]), tensor.([3.0, 5.0]))
      iex> for <<x::float-32-native <- o.data>>, do: x
      [3.0, 4.0]
      iex> {:error, error} = FlashAttention.forward(tensor.([0.0, 0.0]), tensor.([1.0, 2.0]), 5)
      iex> error.message
      "v: expected a tensor (Nx.Tensor or FlashAttention.Tensor), got 5"

  ## From a cache

  `forward(q, [sequence, ...], opts)` is attention over the rows of sequences of a `FlashAttention.Cache`, one for each batch
  of `q`, on the cache's device. It takes the options above but for `:mask`, `:key_lengths` and `:page_table`; `seqlen_k`, of
  which a `bias` has columns, is the most pages that one of the sequences has, times the page size.
  """
  @spec forward(tensor, tensor, tensor, [option]) :: {:ok, tensor} | {:error, Error.t()}
  @spec forward(tensor, [Cache.Sequence.t(), ...], [option]) :: {:ok, tensor} | {:error, Error.t()}
  def forward(q, k, v, opts \\ [])

  def forward(q, sequences, opts, []) when is_list(sequences) do
    with {:ok, outputs} <- run_on_sequences(q, sequences, opts), do: {:ok, outputs.o}
  end

  def forward(q, k, v, opts) do
    with {:ok, options} <- Options.parse(opts, @forward_options),
         {:ok, outputs, _states} <- run(:forward, [q: q, k: k, v: v], options),
         do: {:ok, outputs.o}
  end

  @doc """
  As `forward/4`, but returns `o` or raises; `forward!(q, [sequence, ...], opts)` is that from a cache.

      iex> one = FlashAttention.Tensor.new(<<1.0::float-32-native>>, :f32, {1, 1, 1, 1})
      iex> FlashAttention.forward!(one, one, one).data
      <<1.0::float-32-native>>
      iex> FlashAttention.forward!(one, one, one, causal: :yes)
      ** (FlashAttention.Error) causal: expected true or false, got :yes
  """
  @spec forward!(tensor, tensor, tensor, [option]) :: tensor
  @spec forward!(tensor, [Cache.Sequence.t(), ...], [option]) :: tensor
  def forward!(q, k, v, opts \\ []), do: forward(q, k, v, opts) |> unwrap!()

  @doc "As `forward/3` of `q`, sequences of a `FlashAttention.Cache` and no options."
  @spec forward(tensor, [Cache.Sequence.t(), ...]) :: {:ok, tensor} | {:error, Error.t()}
  def forward(q, sequences), do: forward(q, sequences, [], [])

  @doc """
  Attention, and beside `o` what `backward/7` needs: `lse`, the logarithm of each row's sum of exponentials.

  Takes the options of `forward/4`. With `keep: :device` a `FlashAttention.States` comes in place of `lse`: on a GPU,
  what `backward/2` needs stays in its memory, and only `dout` has to be uploaded then. It is given back when the
  states are collected, or at once by `release/1`.

  `forward_with_states(q, [sequence, ...], opts)` is that of `forward/4` from a cache, with `lse`; it does not take `:keep`.

      iex> zero = FlashAttention.Tensor.new(<<0.0::float-64-native>>, :f64, {1, 1, 1, 1})
      iex> sink = FlashAttention.Tensor.new(<<0.0::float-32-native>>, :f32, {1, 1})
      iex> {:ok, _o, lse} = FlashAttention.forward_with_states(zero, zero, zero, sink: sink)
      iex> <<x::float-64-native>> = lse.data
      iex> {lse.shape, Float.round(x, 12) == Float.round(:math.log(2), 12)}
      {{1, 1, 1}, true}

      iex> one = FlashAttention.Tensor.new(<<1.0::float-32-native>>, :f32, {1, 1, 1, 1})
      iex> {:ok, _o, states} = FlashAttention.forward_with_states(one, one, one, keep: :device)
      iex> {:ok, _dq, _dk, dv} = FlashAttention.backward(one, states)
      iex> {dv.data, FlashAttention.release(states)}
      {<<1.0::float-32-native>>, :ok}
  """
  @spec forward_with_states(tensor, tensor, tensor, [option]) ::
          {:ok, tensor, tensor | States.t()} | {:error, Error.t()}
  @spec forward_with_states(tensor, [Cache.Sequence.t(), ...], [option]) ::
          {:ok, tensor, tensor} | {:error, Error.t()}
  def forward_with_states(q, k, v, opts \\ [])

  def forward_with_states(q, sequences, opts, []) when is_list(sequences) do
    with {:ok, outputs} <- run_on_sequences(q, sequences, opts), do: {:ok, outputs.o, outputs.lse}
  end

  def forward_with_states(q, k, v, opts) do
    with {:ok, options} <- Options.parse(opts, @states_options),
         {:ok, outputs, states} <- run(:forward, [q: q, k: k, v: v], options),
         do: {:ok, outputs.o, if(options.keep, do: states, else: outputs.lse)}
  end

  @doc """
  As `forward_with_states/4`, but returns `{o, lse}` or `{o, states}`, or raises. From a cache it is
  `forward_with_states!(q, [sequence, ...], opts)`.

      iex> one = FlashAttention.Tensor.new(<<1.0::float-32-native>>, :f32, {1, 1, 1, 1})
      iex> {o, lse} = FlashAttention.forward_with_states!(one, one, one)
      iex> {o.shape, lse.shape}
      {{1, 1, 1, 1}, {1, 1, 1}}
  """
  @spec forward_with_states!(tensor, tensor, tensor, [option]) :: {tensor, tensor | States.t()}
  @spec forward_with_states!(tensor, [Cache.Sequence.t(), ...], [option]) :: {tensor, tensor}
  def forward_with_states!(q, k, v, opts \\ []), do: forward_with_states(q, k, v, opts) |> unwrap!()

  @doc """
  The gradients `dq`, `dk` and `dv` of a loss whose gradient by `o` is `dout`, and by `lse` `dlse`, if that is given.

  `o` and `lse` come from `forward_with_states/4`, and the options must be those that it was given. With
  `sink: sink`, `%{sink: dsink}` comes as a fifth element; `alibi_slopes` and `bias` likewise.

      delta[i]   = dot(o[i], dout[i]) - dlse[i]
      p[i,j]     = exp(s[i,j] - lse[i])
      ds[i,j]    = p[i,j] * (keep[i,j] * dot(dout[i], v[j]) - delta[i])      (times the derivative of softcap)
      dq[i]      = scale * sum_j ds[i,j] * k[j]
      dk[j]      = scale * sum_i ds[i,j] * q[i]                  (over every head that shares k[j])
      dv[j]      = sum_i keep[i,j] * p[i,j] * dout[i]
      dsink[t,h] = -sum_{b,i} exp(sink[t,h] - lse[i]) * delta[i]     (of rows' own sinks without the sum)
      dalibi_slopes[b,h] = -sum_{i,j} ds[i,j] * |i + seqlen_k - seqlen_q - j|     (without softcap's derivative)
      dbias[b,h,i,j]     = ds[i,j]                                                (likewise; summed where it is 1)

  Takes the options of `forward/4`, and `:dlse`.

      iex> one = FlashAttention.Tensor.new(<<1.0::float-32-native>>, :f32, {1, 1, 1, 1})
      iex> {:ok, o, lse} = FlashAttention.forward_with_states(one, one, one)
      iex> {:ok, dq, _dk, dv} = FlashAttention.backward(one, one, one, one, o, lse)
      iex> {dq.data, dv.data}
      {<<0.0::float-32-native>>, <<1.0::float-32-native>>}
  """
  @spec backward(tensor, tensor, tensor, tensor, tensor, tensor, [option]) ::
          {:ok, tensor, tensor, tensor}
          | {:ok, tensor, tensor, tensor, optional_gradients}
          | {:error, Error.t()}
  def backward(dout, q, k, v, o, lse, opts \\ []) do
    with {:ok, options} <- Options.parse(opts, @backward_options),
         {:ok, outputs, _states} <- run(:backward, [dout: dout, q: q, k: k, v: v, o: o, lse: lse], options),
         do: gradients(outputs)
  end

  @doc """
  The gradients, from what the forward left: `forward_with_states(q, k, v, keep: :device)`.

  The same as `backward/7` on the device and with the options of the forward. Of the options only `:results` and `:dlse` may
  be given. Results are like `dout`. The states may be used any number of times.

      iex> one = FlashAttention.Tensor.new(<<1.0::float-32-native>>, :f32, {1, 1, 1, 1})
      iex> {:ok, _o, states} = FlashAttention.forward_with_states(one, one, one, keep: :device, device: :cpu)
      iex> two = FlashAttention.Tensor.new(<<1.0::float-32-native, 1.0::float-32-native>>, :f32, {1, 2, 1, 1})
      iex> {:error, error} = FlashAttention.backward(two, states)
      iex> error.message
      "dout: expected seqlen_q 1 as in q, got 2"
  """
  @spec backward(tensor, States.t(), [option]) ::
          {:ok, tensor, tensor, tensor}
          | {:ok, tensor, tensor, tensor, optional_gradients}
          | {:error, Error.t()}
  def backward(dout, states, opts \\ []) do
    with :ok <- States.check(states),
         {:ok, options} <- Options.parse(opts, [:results, :dlse]),
         {:ok, tensors, names} <- [dout: dout] |> with_optional(options) |> to_native(states.device),
         tensors = Map.merge(states.tensors, tensors),
         {:ok, outputs, _kept} <-
           Telemetry.run(:backward, tensors, states.native, states.device, placement(options)),
         do: outputs |> from_native(dout, Map.merge(states.names, names)) |> gradients()
  end

  # Of the optional tensors that were given, those that have a gradient.
  defp gradients(%{dq: dq, dk: dk, dv: dv} = outputs) do
    case for {name, key} <- Options.tensors(),
             gradient = outputs[gradient_name(name)],
             into: %{},
             do: {key, gradient} do
      none when none == %{} -> {:ok, dq, dk, dv}
      optional -> {:ok, dq, dk, dv, optional}
    end
  end

  @doc """
  As `backward/7`, but returns `{dq, dk, dv}` or `{dq, dk, dv, %{sink: dsink}}`, or raises.

      iex> one = FlashAttention.Tensor.new(<<1.0::float-32-native>>, :f32, {1, 1, 1, 1})
      iex> {o, lse} = FlashAttention.forward_with_states!(one, one, one)
      iex> {_dq, _dk, dv} = FlashAttention.backward!(one, one, one, one, o, lse)
      iex> dv.data
      <<1.0::float-32-native>>
  """
  @spec backward!(tensor, tensor, tensor, tensor, tensor, tensor, [option]) ::
          {tensor, tensor, tensor} | {tensor, tensor, tensor, optional_gradients}
  def backward!(dout, q, k, v, o, lse, opts \\ []),
    do: backward(dout, q, k, v, o, lse, opts) |> unwrap!()

  @doc "As `backward/3`, but returns `{dq, dk, dv}` or `{dq, dk, dv, %{sink: dsink}}`, or raises."
  @spec backward!(tensor, States.t(), [option]) ::
          {tensor, tensor, tensor} | {tensor, tensor, tensor, optional_gradients}
  def backward!(dout, states, opts \\ []), do: backward(dout, states, opts) |> unwrap!()

  @doc """
  Gives back the GPU's memory that states or a tensor hold, or a sequence's pages of a cache, once the calls that use them are
  done.

  What was released cannot be used again; to release it twice, or what lies in the host's memory, does nothing.

      iex> one = FlashAttention.Tensor.new(<<1.0::float-32-native>>, :f32, {1, 1, 1, 1})
      iex> FlashAttention.release(one)
      :ok
  """
  @spec release(States.t() | Cache.Sequence.t() | Tensor.t() | DeviceMemory.t()) :: :ok | {:error, Error.t()}
  def release(%States{} = states) do
    with {:ok, memories} <- States.memories(states), do: release_all(memories)
  end

  def release(%Cache.Sequence{} = sequence), do: Cache.release(sequence)
  def release(%DeviceMemory{ref: ref}), do: release_all([ref])
  def release(%Tensor{data: %DeviceMemory{} = memory}), do: release(memory)
  def release(%Tensor{}), do: :ok

  def release(other) do
    expected = "a FlashAttention.States, Cache.Sequence, Tensor or DeviceMemory"
    {:error, Error.invalid(:memory, expected, Error.show(other))}
  end

  defp release_all(memories) do
    Enum.find_value(memories, :ok, fn memory ->
      with {:error, error} <- Native.release(memory),
           do: {:error, Error.from_native(error)},
           else: (_held -> nil)
    end)
  end

  @doc """
  Returns the memory that is at hand for later calls to the GPUs' drivers and the system.

  A call takes such memory faster than from them, so this is for when there are to be none for a while.

      iex> FlashAttention.trim()
      :ok
  """
  @spec trim() :: :ok | {:error, Error.t()}
  def trim do
    Enum.find_value(Native.backend_info().devices, :ok, fn device ->
      with {:error, error} <- Native.trim({device.kind, device.index}),
           do: {:error, Error.from_native(error)},
           else: (:ok -> nil)
    end)
  end

  @doc """
  What computes here.

  `devices` are listed with the name that the option `:device` takes, the instruction sets in use or the GPU's
  compute capability, the number of threads of a call (of a GPU: its multiprocessors), memory in bytes (`nil` where it is not
  known), and `page_bytes`, those that `FlashAttention.Cache`s hold now. `cuda` is `nil` where there are CUDA devices, and else says why not.

  Of a GPU `memory` says, in bytes, what of its memory states, tensors and calls hold now (`used_bytes`), what is at
  hand for later ones (`cached_bytes`, see `trim/0`) and what is free; and the same of the host's memory that it
  reads and writes at full rate (`pinned_…`). Results lie there, up to a limit that
  `config :flash_attention, pinned_limit: bytes` sets; unless it does, a quarter of the host's memory, but 4 GiB at
  most. All of it is 0 before the GPU's first call, which looking does not make.

      iex> info = FlashAttention.backend_info()
      iex> %{device: :cpu, name: _, features: [_ | _], threads: threads, memory_bytes: _, page_bytes: _} = hd(info.devices)
      iex> threads > 0
      true
  """
  @spec backend_info() :: %{
          version: String.t(),
          devices: [
            %{
              device: device,
              name: String.t(),
              features: [String.t()],
              threads: pos_integer,
              memory_bytes: pos_integer | nil,
              page_bytes: non_neg_integer,
              memory:
                %{
                  used_bytes: non_neg_integer,
                  cached_bytes: non_neg_integer,
                  free_bytes: non_neg_integer,
                  pinned_used_bytes: non_neg_integer,
                  pinned_cached_bytes: non_neg_integer,
                  pinned_limit_bytes: non_neg_integer
                }
                | nil
            }
          ],
          cuda: String.t() | nil
        }
  def backend_info do
    info = Native.backend_info()
    devices = for device <- info.devices, device.kind != :reference, do: describe(device)
    %{version: info.version, devices: devices, cuda: info.missing[:cuda]}
  end

  @doc """
  Which device and kernels calls with these tensors and options would use.

  `q`, `k`, `v` and `opts` as for `forward_with_states/4`; nothing is computed. `device` is the one that takes them,
  which with `device: :auto` need not be the first. Kernels are named by the backend, the architecture or instruction set, the
  type and, on a GPU, the head_dim that they are made for: `"cuda/sm90/bf16/d128"`. Those for Hopper read 16-bit
  tensors whose memory begins at, and whose rows are, multiples of 16 bytes; others go to the portable ones when they come.
  `backward` is `nil` with a `page_table`, which only the forward takes.

      iex> one = FlashAttention.Tensor.new(<<1.0::float-32-native>>, :f32, {1, 1, 1, 1})
      iex> {:ok, %{device: :cpu, forward: forward}} = FlashAttention.plan(one, one, one, device: :cpu)
      iex> String.ends_with?(forward, "/f32")
      true
  """
  @spec plan(tensor, tensor, tensor, [option]) ::
          {:ok, %{device: device, forward: String.t(), backward: String.t() | nil}}
          | {:error, Error.t()}
  def plan(q, k, v, opts \\ []) do
    with {:ok, options} <- Options.parse(opts, @states_options),
         # What lies on the first device is not copied from there.
         {:ok, tensors, _names} <-
           [q: q, k: k, v: v] |> with_optional(options) |> to_native(hd(options.devices)) do
      shapes = Map.new(tensors, fn {name, {_data, type, shape}} -> {name, {type, shape}} end)
      kernels(shapes, options.native, options.devices)
    end
  end

  defp kernels(shapes, native, [device | others]) do
    with {:ok, outputs, _bytes, forward} <- Native.plan(:forward, shapes, native, device),
         inputs = shapes |> Map.merge(outputs) |> Map.put(:dout, outputs.o),
         {:ok, backward} <- backward_kernel(inputs, native, device) do
      {:ok, %{device: device_name(device), forward: forward, backward: backward}}
    else
      {:error, {:unsupported, _, _, _, _}} when others != [] -> kernels(shapes, native, others)
      {:error, error} -> {:error, Error.from_native(error)}
    end
  end

  # Keys on pages are the forward's alone.
  defp backward_kernel(%{page_table: _}, _native, _device), do: {:ok, nil}

  defp backward_kernel(inputs, native, device) do
    with {:ok, _outputs, _bytes, kernel} <- Native.plan(:backward, inputs, native, device), do: {:ok, kernel}
  end

  # Of a kind without memory of its own there is one: the host.
  defp device_name({kind, _index} = device), do: if(Options.own_memory?(kind), do: device, else: kind)

  defp describe(device) do
    %{
      device: device_name({device.kind, device.index}),
      name: device.name,
      features: String.split(device.features, [" ", ","], trim: true),
      threads: device.num_threads,
      memory_bytes: if(device.memory_bytes > 0, do: device.memory_bytes),
      page_bytes: device.memory.page_bytes,
      memory: if(Options.own_memory?(device.kind), do: Map.delete(device.memory, :page_bytes))
    }
  end

  # ---- inside defn ---------------------------------------------------------------------------------------

  require Defn

  @doc """
  Attention inside `defn`: the output `o`, of `q`'s shape, differentiable in `q`, `k`, `v` and the tensors of options.

  Tensors and options are those of `forward/4`, but for `:keep`, `:results` and `:dlse`; errors are raised, as
  `FlashAttention.Error`. It can be called inside `defn` and outside of it, and needs Nx 0.12 or later. Memory
  grows linearly with the sequence, in the gradient too.

  Vectorized axes count as part of the batch; `sink` has none. Their gradients, and those through `while`, are Nx's, and
  wrong in some releases: `FlashAttention.Defn.gradient_right?/1` tells. `o` has the axis
  names of `q`. The gradient is linear in those of `o` and `lse`, and has a gradient by them, which is computed in f64 on the CPU;
  by the others it has none: asking for that raises.

  On EXLA it is a custom call on the device that the computation runs on, see `FlashAttention.EXLA`. With a
  `:device` other than `:auto`, the default, the library computes there, whatever compiles the rest: on one device, not
  on several.

      defn loss(q, k, v), do: FlashAttention.attention(q, k, v, window: {127, 0}) |> Nx.sum()
      defn gradients(q, k, v), do: grad({q, k, v}, fn {q, k, v} -> loss(q, k, v) end)
  """
  @spec attention(tensor, tensor, tensor, [option]) :: tensor
  Defn.deftransform(attention(q, k, v, opts \\ []))
  def attention(q, k, v, opts), do: q |> Defn.attention_with_lse(k, v, opts) |> elem(0)

  @doc """
  As `attention/4`, but returns `{o, lse}`, both differentiable: a z-loss, or parts that are merged by hand, have their
  gradients from the same call of the backward.
  """
  @spec attention_with_lse(tensor, tensor, tensor, [option]) :: {tensor, tensor}
  Defn.deftransform(attention_with_lse(q, k, v, opts \\ []))
  def attention_with_lse(q, k, v, opts), do: Defn.attention_with_lse(q, k, v, opts)

  # ---- one path for every pass ---------------------------------------------------------------------------

  defp run_on_sequences(q, sequences, opts) do
    with {:ok, options} <- Cache.options(sequences, opts),
         {:ok, outputs, _states} <- run(:forward, [q: q], options),
         do: {:ok, outputs}
  end

  # The outputs, and the states of a forward that keeps them.
  defp run(pass, inputs, %{devices: [device | others]} = options) do
    with {:ok, tensors, names} <- inputs |> with_optional(options) |> to_native(device),
         devices = options.several || device,
         tensors = Map.merge(tensors, Map.take(options, [:sequences])),
         {:ok, outputs, kept} <- Telemetry.run(pass, tensors, options.native, devices, placement(options)) do
      states = %States{tensors: kept, names: names, native: options.native, device: device}
      {:ok, from_native(outputs, inputs[:q], names), states}
    else
      {:error, %Error{reason: :unsupported}} when others != [] ->
        run(pass, inputs, %{options | devices: others})

      {:error, error} ->
        {:error, error}
    end
  end

  # A mask comes last, as the sizes of all others say what becomes of it.
  defp with_optional(inputs, options),
    do: inputs ++ Enum.sort_by(options.tensors, fn {_name, tensor} -> is_struct(tensor, Mask) end)

  defp placement(options), do: %{results: options.results, keep: options.keep == :device}

  defp from_native(outputs, like, names) do
    Map.new(outputs, fn {name, output} ->
      {name, TensorLike.from_native(like, output, axis_names(name, names))}
    end)
  end

  defp to_native(inputs, device) do
    Enum.reduce_while(inputs, {:ok, %{}, %{}}, fn {name, tensor}, {:ok, tensors, names} ->
      case native_tensor(with_sizes(tensor, tensors), device) do
        {:ok, native, axis_names} ->
          {:cont, {:ok, Map.put(tensors, name, native), Map.put(names, name, axis_names)}}

        {:error, expected, got} ->
          {:halt, {:error, Error.invalid(name, expected, got)}}

        # A mask says which of its numbers are wrong.
        {:error, %Error{} = error} ->
          {:halt, {:error, error}}
      end
    end)
  end

  # A mask becomes bands where the sizes of q and k are known.
  defp with_sizes(%Mask{} = mask, %{q: {_, _, q_shape}, k: {_, _, k_shape}} = tensors),
    do: fn -> Mask.to_bands(mask, {seqlen(q_shape), seqlen(k_shape) * pages_a_batch(tensors)}) end

  defp with_sizes(tensor, _tensors), do: tensor

  # Where there is none, the library says what is wrong with the shape.
  defp seqlen(shape), do: if(tuple_size(shape) > 1, do: elem(shape, 1), else: 0)

  defp pages_a_batch(%{page_table: {_, _, table_shape}}), do: seqlen(table_shape)
  defp pages_a_batch(_without), do: 1

  defp native_tensor(bands, device) when is_function(bands, 0) do
    native_tensor(bands.(), device)
  rescue
    error in Error -> {:error, error}
    error -> {:error, "a mask that can be read", Error.raised(error)}
  end

  defp native_tensor(tensor, device), do: Tensor.read(tensor, device)

  # A gradient has the axes of its input. What is as long as q has q's, in the order of the tensor.
  defp axis_names(:o, names), do: names.q

  defp axis_names(:lse, %{q: q}) do
    with [batch, seqlen_q, num_heads, _head_dim] <- q, do: [batch, num_heads, seqlen_q]
  end

  defp axis_names(gradient, names),
    do: Enum.find_value(names, fn {input, names} -> gradient_name(input) == gradient && names end)

  for name <- [:q, :k, :v | Keyword.keys(Options.tensors())] do
    defp gradient_name(unquote(name)), do: unquote(:"d#{name}")
  end

  defp gradient_name(_input_without), do: nil

  defp unwrap!({:error, error}), do: raise(error)
  defp unwrap!({:ok, result}), do: result
  defp unwrap!(results), do: Tuple.delete_at(results, 0)
end
