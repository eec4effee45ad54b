defmodule FlashAttention.Telemetry do
  @moduledoc """
  Events of `:telemetry`, where that package is loaded; nothing where it is not.

  Each pass that runs on a device gives two, `[:flash_attention, :run, :start]` and `[:flash_attention, :run, :stop]`:

  | event  | measurements |
  |--------|--------------|
  | start  | `monotonic_time`, `system_time` |
  | stop   | `monotonic_time`, `duration`, `kernel_time`, `bytes_to_device`, `bytes_from_device` |

  Times are in native units (`System.convert_time_unit/3`). `kernel_time` is how long the device computed; bytes are
  those that crossed the bus, 0 on the CPU. Metadata of both: `pass` (`:forward` or `:backward`), `device` (such as
  `{:cuda, 0}`, or a list of several), `type` and `shape` of q, and `error` of the second: `nil`, or the `FlashAttention.Error`, with
  which `kernel_time` and bytes are 0. Where `device: :auto` goes on to another device, that one has events of its own.

  Each append to a `FlashAttention.Cache` gives `[:flash_attention, :cache, :append]` when it is done: measurements are
  `duration`, `rows` (of all its sequences; 0 on an error), and `free_pages` that are left; metadata `device`, `type`, `shape` of
  k, and `error`: `nil`, or the `FlashAttention.Error`, whose `reason` is `:out_of_memory` where the cache was full.

      :telemetry.attach("log", [:flash_attention, :run, :stop], fn _event, measurements, metadata, _config ->
        IO.inspect({metadata.pass, metadata.device, measurements.bytes_to_device})
      end, nil)
  """

  alias FlashAttention.{Error, Native}

  @compile {:no_warn_undefined, :telemetry}
  @nothing_measured %{bytes_to_device: 0, bytes_from_device: 0, kernel_seconds: 0.0}

  @doc false
  @spec run(
          Native.pass(),
          Native.tensors(),
          [Native.option()],
          Native.device() | [Native.device()],
          Native.placement()
        ) ::
          {:ok, Native.tensors(), Native.tensors()} | {:error, Error.t()}
  def run(pass, tensors, options, device, placement) do
    tells = listened?()
    metadata = if tells, do: metadata(pass, tensors, device)
    begin = if tells, do: start(metadata)

    {measurements, result} =
      case Native.execute(pass, tensors, options, device, Map.put(placement, :measure, tells)) do
        {:ok, outputs, kept, measurements} -> {measurements, {:ok, outputs, kept}}
        {:error, error} -> {@nothing_measured, {:error, Error.from_native(error)}}
      end

    if tells, do: stop(begin, measurements, metadata, error_of(result))
    result
  end

  @doc false
  @spec append(FlashAttention.Cache.t(), Native.tensor(), (() -> :ok | {:error, Error.t()})) ::
          :ok | {:error, Error.t()}
  def append(cache, {_data, type, shape}, append) do
    begin = System.monotonic_time()
    result = append.()

    if listened?() do
      error = error_of(result)
      [batch, rows | _] = Tuple.to_list(shape) ++ [0, 0]

      measurements = %{
        duration: System.monotonic_time() - begin,
        rows: if(error, do: 0, else: batch * rows),
        free_pages: Native.cache_free_pages(cache.ref)
      }

      :telemetry.execute(
        [:flash_attention, :cache, :append],
        measurements,
        %{device: cache.device, type: type, shape: shape, error: error}
      )
    end

    result
  end

  defp error_of({:error, error}), do: error
  defp error_of(_result), do: nil

  defp metadata(pass, tensors, device) do
    {_data, type, shape} = tensors.q
    %{pass: pass, device: device, type: type, shape: shape}
  end

  defp start(metadata) do
    now = System.monotonic_time()
    execute(:start, %{monotonic_time: now, system_time: System.system_time()}, metadata)
    now
  end

  defp stop(begin, measured, metadata, error) do
    now = System.monotonic_time()

    measurements = %{
      monotonic_time: now,
      duration: now - begin,
      kernel_time: System.convert_time_unit(round(measured.kernel_seconds * 1.0e9), :nanosecond, :native),
      bytes_to_device: measured.bytes_to_device,
      bytes_from_device: measured.bytes_from_device
    }

    execute(:stop, measurements, Map.put(metadata, :error, error))
  end

  defp execute(event, measurements, metadata) do
    :telemetry.execute([:flash_attention, :run, event], measurements, metadata)
  end

  # A package that is not loaded has not been started, and has no handlers.
  defp listened?, do: :erlang.function_exported(:telemetry, :execute, 3)
end
