defmodule FlashAttention.EXLA do
  @moduledoc """
  Attention as an XLA custom call: what `FlashAttention.attention/4` becomes when EXLA compiles it.

  Nothing is to be done for it: EXLA 0.12 and later ask, through the protocol `EXLA.CustomCall`, what the blocks of
  `FlashAttention.Defn` are. On the clients `:host` and `:cuda` they are the custom calls
  `flash_attention_forward` and `flash_attention_backward`, which compute on XLA's own buffers and, on a GPU, on its
  stream: nothing is copied between host and device. The calls are registered with XLA before the first of them is
  compiled.

  Merges of parts (`FlashAttention.Parts`) are the calls `flash_attention_merge` and `flash_attention_merge_backward`
  likewise.

  Under `EXLA.shard_jit/3` XLA does not know how these calls may be shared out: it gathers their operands, and every
  device computes all of the call. That is right, and saves nothing. The EXLA at hand has no word for a sharding rule.
  For batches and heads on several devices see the guide "Many GPUs, many machines".

  Where that cannot be, compiling raises and says why: a client of another kind, a problem that the client's device
  does not take (`f64` or a head_dim over 256 on a GPU), or calls that cannot be registered, see `register/0`. With a
  `:device` other than `:auto` attention is no custom call: the library computes it outside of XLA, on the device
  that is named and on copies of the tensors.
  """

  alias FlashAttention.{Error, Native, Options, Packages}

  # As EXLA loads it.
  @library if(match?({:unix, :darwin}, :os.type()), do: "libxla_extension.dylib", else: "libxla_extension.so")

  @doc """
  Registers the custom calls with EXLA's XLA; `:ok` where they are already.

  The error says what is missing: EXLA, a newer EXLA (0.12 is the first with `EXLA.CustomCall`), or a build of this
  library with XLA's header (`XLA_FFI_INCLUDE`).
  """
  @spec register() :: :ok | {:error, Error.t()}
  def register do
    if :persistent_term.get(__MODULE__, false) do
      :ok
    else
      with :ok <- find_exla(), :ok <- Native.register_xla(@library) do
        :persistent_term.put(__MODULE__, true)
      else
        {:error, error} -> {:error, Error.from_native(error)}
      end
    end
  end

  @doc "As `register/0`, but returns `:ok` or raises."
  @spec register!() :: :ok
  def register! do
    with {:error, error} <- register(), do: raise(error)
  end

  # Its NIF brings XLA along.
  defp find_exla do
    cond do
      not Code.ensure_loaded?(EXLA) ->
        missing("EXLA 0.12 or later", "none")

      not Code.ensure_loaded?(EXLA.CustomCall) ->
        missing("EXLA 0.12 or later", "#{Application.spec(:exla, :vsn)}")

      not Code.ensure_loaded?(EXLA.NIF) ->
        missing("an EXLA whose NIF is loaded", "one whose NIF is not")

      what_to_run = Packages.came_later(:exla) ->
        {:error, {:unsupported, "exla", "", "", what_to_run}}

      true ->
        :ok
    end
  end

  defp missing(expected, got),
    do: {:error, {:unsupported, "exla", expected, got, "exla: expected #{expected}, got #{got}"}}

  @doc false
  # The custom call that a block becomes on a client: its target, and its attributes as MLIR writes them.
  def custom_call!(%{pass: pass, opts: opts, shapes: shapes}, inputs, client) do
    options = Options.parse!(opts)
    typed = for {{name, shape}, tensor} <- Enum.zip(shapes, inputs), into: %{}, do: {name, {tensor.type, shape}}

    with :ok <- register(),
         {:ok, device} <- device(client),
         {:ok, _outputs, _workspace_bytes, _kernel} <- Native.plan(pass, typed, options.native, device) do
      {"flash_attention_#{pass}", [{"operands", operands(shapes)} | attributes(shapes ++ options.native)]}
    else
      {:error, %Error{} = error} -> raise elsewhere(error)
      {:error, error} -> raise error |> Error.from_native() |> elsewhere()
    end
  end

  @doc false
  # The same of a merge of parts: its operands go without names, all o have one shape.
  def merge_call!(%{pass: pass, shapes: shapes}, client) do
    with :ok <- register(), {:ok, _device} <- device(client) do
      o = shapes[:o] || shapes[:part_o]
      sink = if shapes[:sink], do: [sink: shapes[:sink]], else: []

      {if(pass == :forward, do: "flash_attention_merge", else: "flash_attention_merge_backward"),
       attributes([o: o] ++ sink)}
    else
      {:error, %Error{} = error} -> raise elsewhere(error)
      {:error, error} -> raise error |> Error.from_native() |> elsewhere()
    end
  end

  # The device that the client computes on unless it is told otherwise.
  defp device(%{platform: :host}), do: {:ok, {:cpu, 0}}

  defp device(%{platform: platform, default_device_id: index}) do
    if platform in Options.device_kinds(),
      do: {:ok, {platform, index}},
      else: missing("a client of platform :host or :cuda", inspect(platform))
  end

  defp elsewhere(error),
    do: %{error | message: "#{error.message} (device: :cpu computes outside of EXLA, on copies of the tensors)"}

  defp operands(shapes), do: ~s("#{Enum.map_join(shapes, ",", &elem(&1, 0))}")

  # The shapes that the flat inputs stand for, and the options. An option that is not there has its default; a
  # length, no bound.
  defp attributes(values),
    do: for({name, value} <- values, value != :infinity, do: {Atom.to_string(name), mlir(value)})

  defp mlir(value) when is_float(value), do: "#{value} : f64"
  defp mlir(value) when is_integer(value), do: "#{value} : i64"
  defp mlir(choice) when is_atom(choice), do: ~s("#{choice}")
  defp mlir(shape) when is_tuple(shape), do: "array<i64: #{shape |> Tuple.to_list() |> Enum.join(", ")}>"
end

if Code.ensure_loaded?(EXLA.CustomCall) and FlashAttention.Defn.supported?() do
  defimpl EXLA.CustomCall, for: [FlashAttention.Defn.Forward, FlashAttention.Defn.Backward] do
    def call(block, _outputs, inputs, client) do
      {target, attributes} = FlashAttention.EXLA.custom_call!(block, inputs, client)
      {:ok, %EXLA.CustomCall.Spec{call_target_name: target, attributes: attributes}}
    end
  end

  defimpl EXLA.CustomCall, for: FlashAttention.Defn.Merge do
    def call(block, _outputs, _inputs, client) do
      {target, attributes} = FlashAttention.EXLA.merge_call!(block, client)
      {:ok, %EXLA.CustomCall.Spec{call_target_name: target, attributes: attributes}}
    end
  end
end
