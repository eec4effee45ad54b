defmodule FlashAttention.Options do
  @moduledoc """
  The options of `FlashAttention`: one schema that checks them and writes their documentation and their typespec.

  `nil` as a value stands for the option's default, so that a wrapper can pass on what it was not given.
  """

  alias FlashAttention.Error

  # One row an option, in the words of NimbleOptions. `default` is a value as a caller would write it; `doc` may lean
  # on the table's columns. An option of type `:tensor` is an input of every pass under its own name, or that in `tensor`, and the backward
  # returns its gradient where the library has one: the row is all that there is to such an option in lib/. `only: :f32`
  # says that it is of that type whatever q's is.
  @schema [
    causal: [
      type: :boolean,
      default: true,
      doc: "Row `i` sees no later column than `i + seqlen_k - seqlen_q`: the last row sees the last column."
    ],
    scale: [
      type: :scale,
      default: nil,
      default_doc: "`1 / sqrt(head_dim)`",
      doc: "Factor of the scores."
    ],
    window: [
      type: :window,
      default: {:infinity, :infinity},
      doc:
        "How many columns before and after its own position a row sees. `causal` makes the second one 0, " <>
          "whatever is given."
    ],
    softcap: [
      type: :softcap,
      default: 0,
      doc: "Scores `s` become `softcap * tanh(s / softcap)`; 0 stands for none."
    ],
    dropout: [
      type: :rate,
      default: 0,
      doc:
        "The share of scores that are dropped after the softmax, rounded to a multiple of 2⁻¹⁶, where `o` makes up for it: " <>
          "which ones, `dropout_seed` says. See `FlashAttention.Dropout`."
    ],
    dropout_seed: [
      type: :tensor,
      default: nil,
      doc: "Two words of 32 bits, u32 `[2]`, a key of `Nx.Random` for instance: what `dropout` drops."
    ],
    sink: [
      type: :tensor,
      only: :f32,
      default: nil,
      doc:
        "Attention sinks `[num_sinks, num_heads]`, f32: scores of columns that every row sees and whose value " <>
          "is 0; or a row's own, `[batch, seqlen_q, num_sinks, num_heads]`. With it, the backward returns `%{sink: dsink}` too."
    ],
    alibi_slopes: [
      type: :tensor,
      only: :f32,
      default: nil,
      doc:
        "ALiBi's slopes `[batch or 1, num_heads]`, f32: a score loses its head's slope times the distance of its column " <>
          "from the one beside its row, `abs(i + seqlen_k - seqlen_q - j)` (in a mask, within each band). With it, the " <>
          "backward returns `%{alibi_slopes: dalibi_slopes}` too, unless with `constant_alibi_slopes`."
    ],
    bias: [
      type: :tensor,
      default: nil,
      doc:
        "Added to the scores, after `softcap`: `[batch or 1, num_heads or 1, seqlen_q or 1, seqlen_k]`, in q's type or f32; " <>
          "-infinity hides. Of u8 it is a mask: 0 hides, and nothing is added. With it, unless of u8 or with " <>
          "`constant_bias`, the backward returns `%{bias: dbias}` too."
    ],
    mask: [
      type: :mask,
      default: nil,
      tensor: :bands,
      doc:
        "Which columns each row sees, as data: packed sequences, lengths, ranges; see `FlashAttention.Mask`. `causal` " <>
          "and `window` hold within each of its bands."
    ],
    dlse: [
      type: :tensor,
      default: nil,
      default_doc: "none",
      doc:
        "Of `backward/7` and `backward/3` alone: the gradient by `lse` where the loss depends on it, " <>
          "`[batch or 1, num_heads, seqlen_q]`, in lse's type."
    ],
    key_lengths: [
      type: :tensor,
      default: nil,
      default_doc: "none",
      doc:
        "How many keys each batch has, `[batch or 1]`, s32: `seqlen_k` of the formulas, as if `k` and `v` ended there. So " <>
          "a cache grows while shapes stay. Not beside `mask`."
    ],
    page_table: [
      type: :tensor,
      default: nil,
      default_doc: "none",
      doc:
        "Where the keys of each batch lie, `[batch, max_pages]`, s32: `k` and `v` are then pages `[num_pages, page_size, " <>
          "num_kv_heads, head_dim]`, `seqlen_k` is `max_pages * page_size`, and key `j` is row `rem(j, page_size)` of page " <>
          "`page_table[b][div(j, page_size)]`. Of the forward alone."
    ],
    device: [
      type: :device,
      default: :auto,
      doc:
        "Where to compute; `:auto` is the first CUDA device where there is one that takes the problem, and else " <>
          "the CPU. Several devices divide the batches or heads of tensors of the host's memory among them; `:all` is every GPU. " <>
          "Only `forward/4`, `forward_with_states/4` and `backward/7` of tensors take several, and where nothing stays on a device."
    ],
    precision: [
      type: {:in, [:highest, :high, :default]},
      default: :highest,
      doc:
        "Arithmetic of the matrix products of f32 tensors, on devices where there is a choice; `:highest` is as " <>
          "accurate as plain f32 arithmetic."
    ],
    deterministic: [
      type: :boolean,
      default: false,
      doc: "Whether the backward must be bitwise repeatable. On the CPU it always is."
    ],
    constant_bias: [
      type: :boolean,
      default: false,
      doc: "Whether the backward leaves out the gradient by a `bias`."
    ],
    constant_alibi_slopes: [
      type: :boolean,
      default: false,
      doc:
        "Whether the backward leaves out the gradient by `alibi_slopes`, which takes time and most models do not train."
    ],
    inference: [
      type: :boolean,
      default: false,
      doc:
        "Whether no backward follows, for whose sake a forward of f32 rounds scores as it does; few rows then take a " <>
          "fraction of the time. Layers of Axon models say so in inference."
    ],
    keep: [
      type: {:in, [:device]},
      default: nil,
      doc:
        "Of `forward_with_states/4` alone: what the backward needs stays on the device, as `FlashAttention.States` " <>
          "in place of `lse`."
    ],
    results: [
      type: {:in, [:host, :device]},
      default: :host,
      doc: "Where results lie. In a GPU's memory they are for later calls; a CPU's is the host's."
    ]
  ]

  @defaults Map.new(@schema, fn {key, row} -> {key, row[:default]} end)
  @kinds [:cpu, :cuda]
  # What the library calls the tensors of options, and the options that they come from: sinks have two names.
  @tensors Enum.flat_map(@schema, fn
             {:sink, _row} -> [sink: :sink, row_sinks: :sink]
             {key, row} -> if row[:type] == :tensor or row[:tensor], do: [{row[:tensor] || key, key}], else: []
           end)

  @typedoc """
  What `parse/2` returns: options as `FlashAttention.Native.run/4` takes them, devices in the order to try, and the
  tensors that were given, by name.
  """
  @type parsed :: %{
          native: [FlashAttention.Native.option()],
          devices: [FlashAttention.Native.device(), ...],
          several: [FlashAttention.Native.device()] | nil,
          tensors: %{optional(atom) => FlashAttention.TensorLike.t() | FlashAttention.Mask.t()},
          keep: :device | nil,
          results: :host | :device
        }

  @doc """
  Checks options, which are among the keys, and translates them for the NIF.

      iex> {:ok, options} = FlashAttention.Options.parse(window: {127, 5}, device: :cpu)
      iex> Keyword.take(options.native, [:window_left, :window_right])
      [window_left: 127, window_right: 0]
      iex> options.devices
      [cpu: 0]

      iex> {:error, error} = FlashAttention.Options.parse(casual: false)
      iex> [error.argument, error.got]
      [:opts, ":casual"]
  """
  @spec parse(keyword, [atom]) :: {:ok, parsed} | {:error, Error.t()}
  def parse(opts, keys \\ keys()) do
    with :ok <- check_keyword(opts), :ok <- check_values(opts, keys) do
      values = values(opts)
      {devices, several} = devices(values.device)

      check_several(
        %{
          native: native(values),
          devices: devices,
          several: several,
          tensors: if(opts == [], do: %{}, else: tensors_of(values)),
          keep: values.keep,
          results: values.results
        },
        keys
      )
    end
  end

  # Of a key that comes twice the first counts, and nil is none.
  defp values(opts) do
    opts
    |> Enum.reverse()
    |> Enum.reduce(@defaults, fn
      {key, nil}, values -> %{values | key => Map.fetch!(@defaults, key)}
      {key, value}, values -> %{values | key => value}
    end)
  end

  defp tensors_of(values),
    do: for({name, key} <- @tensors, tensor = values[key], named?(name, tensor), into: %{}, do: {name, tensor})

  defp named?(:sink, tensor), do: not named?(:row_sinks, tensor)
  defp named?(:row_sinks, tensor), do: match?(%{shape: {_, _, _, _}}, tensor)
  defp named?(_name, _tensor), do: true

  @doc "As `parse/2`, but returns the options or raises."
  @spec parse!(keyword, [atom]) :: parsed
  def parse!(opts, keys \\ keys()) do
    case parse(opts, keys) do
      {:ok, parsed} -> parsed
      {:error, error} -> raise error
    end
  end

  @doc "The names of the options."
  @spec keys() :: [atom]
  def keys, do: Keyword.keys(@schema)

  @doc """
  The tensors that options bring along, as the library names them, and the options.

      iex> Keyword.take(FlashAttention.Options.tensors(), [:sink, :row_sinks, :bands])
      [sink: :sink, row_sinks: :sink, bands: :mask]
  """
  @spec tensors() :: [{atom, atom}]
  def tensors, do: @tensors

  @doc "The options that are tensors of f32 whatever the type of q is."
  @spec f32_tensors() :: [atom]
  def f32_tensors, do: for({key, row} <- @schema, row[:only] == :f32, do: key)

  @doc "The kinds of devices, as the C library names them."
  @spec device_kinds() :: [atom]
  def device_kinds, do: @kinds

  @doc "Whether devices of that kind have memory of their own, beside the host's."
  @spec own_memory?(atom) :: boolean
  def own_memory?(kind), do: kind in found(:own_memory)

  @doc "The options as a Markdown table."
  @spec docs() :: String.t()
  def docs do
    rows =
      for {key, row} <- @schema do
        default = row[:default_doc] || if(row[:default] == nil, do: "none", else: "`#{inspect(row[:default])}`")
        "| `:#{key}` | #{describe(row[:type]).doc} | #{default} | #{row[:doc]} |\n"
      end

    "| option | values | default | meaning |\n|---|---|---|---|\n#{rows}"
  end

  @doc "The options as a typespec, for `unquote/1` inside of one: each may be `nil` too."
  @spec option_typespec() :: Macro.t()
  def option_typespec do
    any_of(for {key, row} <- @schema, do: {key, {:|, [], [describe(row[:type]).spec, nil]}})
  end

  # What lies on a device lies on one, and only calls that have the choice can have several.
  defp check_several(%{several: nil} = parsed, _keys), do: {:ok, parsed}

  defp check_several(%{several: devices, keep: nil, results: :host} = parsed, keys) do
    if :results in keys,
      do: {:ok, parsed},
      else: {:error, Error.invalid(:device, "one device", Error.show(devices))}
  end

  defp check_several(%{several: devices}, _keys),
    do: {:error, Error.invalid(:device, "one device where something stays on it", Error.show(devices))}

  defp check_keyword(opts) do
    if Keyword.keyword?(opts),
      do: :ok,
      else: {:error, Error.invalid(:opts, "a keyword list", Error.show(opts))}
  end

  defp check_values(opts, keys) do
    Enum.find_value(opts, :ok, fn {key, value} ->
      row = if key in keys, do: @schema[key]

      cond do
        row == nil -> {:error, Error.invalid(:opts, "keys among #{Enum.join(keys, ", ")}", inspect(key))}
        value == nil or valid?(row[:type], value) -> nil
        true -> {:error, Error.invalid(key, expected(row[:type], value), Error.show(value))}
      end
    end)
  end

  # ---- types: what is valid, and how errors, documentation and typespecs put it ---------------------------

  defp valid?(:boolean, value), do: is_boolean(value)
  defp valid?(:scale, value), do: is_number(value) and value != 0
  defp valid?(:rate, value), do: is_number(value) and value >= 0 and value <= 1 - 1 / 65_536
  defp valid?(:softcap, value), do: is_number(value) and value >= 0
  defp valid?(:window, {left, right}), do: window_side?(left) and window_side?(right)
  defp valid?(:window, _value), do: false
  # Whether it is a tensor is found out where tensors are.
  defp valid?(:tensor, _value), do: true
  defp valid?(:mask, value), do: is_struct(value, FlashAttention.Mask)
  defp valid?({:in, choices}, value), do: value in choices
  defp valid?(:device, {kind, index}), do: kind in @kinds and is_integer(index) and index >= 0

  defp valid?(:device, [{kind, _index} | _] = devices),
    do:
      not List.improper?(devices) and Enum.uniq(devices) == devices and
        Enum.all?(devices, &(match?({^kind, _}, &1) and valid?(:device, &1)))

  # The reference is the naive implementation that tests measure the others against.
  defp valid?(:device, device), do: device in [:auto, :all, :reference | @kinds]

  defp expected(:scale, %_{}),
    do: describe(:scale).expected <> " (for a tensor: multiply q by it, with scale: 1)"

  defp expected(type, _value), do: describe(type).expected

  defp window_side?(side), do: side == :infinity or (is_integer(side) and side >= 0)

  defp describe(:boolean), do: %{expected: "true or false", doc: "`true`, `false`", spec: quote(do: boolean)}

  defp describe(:scale),
    do: %{expected: "a number other than 0", doc: "number from -1e30 to 1e30, not 0", spec: quote(do: number)}

  defp describe(:rate),
    do: %{expected: "a number from 0 to 1 - 2⁻¹⁶", doc: "number from 0 to 1 - 2⁻¹⁶", spec: quote(do: number)}

  defp describe(:softcap),
    do: %{expected: "a number of at least 0", doc: "number from 0 to 1e30", spec: quote(do: number)}

  defp describe(:window) do
    %{
      expected: "{left, right}, each a whole number of at least 0 or :infinity",
      doc: "`{left, right}`, integers ≥ 0 or `:infinity`",
      spec: quote(do: {non_neg_integer | :infinity, non_neg_integer | :infinity})
    }
  end

  defp describe(:mask),
    do: %{
      expected: "a FlashAttention.Mask",
      doc: "`FlashAttention.Mask`",
      spec: quote(do: FlashAttention.Mask.t())
    }

  defp describe(:tensor), do: %{doc: "tensor", spec: quote(do: FlashAttention.TensorLike.t())}

  defp describe({:in, choices}) do
    %{
      expected: "one of " <> Enum.map_join(choices, ", ", &inspect/1),
      doc: Enum.map_join(choices, ", ", &"`#{inspect(&1)}`"),
      spec: any_of(choices)
    }
  end

  defp describe(:device) do
    names = Enum.map([:auto, :all | @kinds], &inspect/1)
    one = for kind <- @kinds, do: {kind, quote(do: non_neg_integer)}

    %{
      expected: Enum.join(names, ", ") <> ", {kind, index} or a list of those of one kind",
      doc: Enum.map_join(names ++ ["{kind, index}", "[{kind, index}, ...]"], ", ", &"`#{&1}`"),
      spec: any_of([:auto, :all | @kinds] ++ one ++ [quote(do: [{atom, non_neg_integer}])])
    }
  end

  defp any_of(specs), do: specs |> Enum.reverse() |> Enum.reduce(&{:|, [], [&1, &2]})

  # ---- translation to the C library's names --------------------------------------------------------------

  defp native(values) do
    {left, right} = values.window

    [
      # 0 is C's word for the default.
      scale: values.scale || 0,
      window_left: window_length(left),
      window_right: if(values.causal, do: 0, else: window_length(right)),
      softcap: values.softcap,
      dropout: values.dropout,
      precision: values.precision,
      deterministic: values.deterministic,
      constant_bias: values.constant_bias,
      constant_alibi_slopes: values.constant_alibi_slopes,
      inference: values.inference
    ]
  end

  # No sequence is that long, and C's integers are not either.
  defp window_length(side) when is_integer(side) and side > 0x4000_0000_0000_0000, do: :infinity
  defp window_length(side), do: side

  # The devices to try, one after the other; or the first of several, and all of those.
  defp devices([device]), do: {[device], nil}
  defp devices([device | _] = several), do: {[device], several}
  defp devices({kind, index}), do: {[{kind, index}], nil}
  defp devices(:auto), do: {found(:auto), nil}
  defp devices(:all), do: devices(found(:all))
  defp devices(kind), do: {[{kind, 0}], nil}

  # Looking for GPUs takes milliseconds; which there are does not change. There is no device at all until the library
  # is loaded.
  defp found(key), do: :persistent_term.get({__MODULE__, key}, nil) || Map.fetch!(find(), key)

  defp find do
    %{devices: devices, kinds: kinds} = FlashAttention.Native.backend_info()
    own = for %{kind: kind, has_own_memory: true} <- kinds, do: kind
    first = for kind <- own, Enum.any?(devices, &(&1.kind == kind)), do: {kind, 0}
    all = for {kind, 0} <- first, %{kind: ^kind, index: index} <- devices, do: {kind, index}
    found = %{own_memory: own, auto: first ++ [cpu: 0], all: if(all == [], do: [cpu: 0], else: all)}
    if devices != [], do: for({key, value} <- found, do: :persistent_term.put({__MODULE__, key}, value))
    found
  end
end
