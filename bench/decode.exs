# Decoding from Elixir with a FlashAttention.Cache: one step of attention, and stacks of layers as a model has them.
# Prints a page of Markdown.
#
#     mix run bench/decode.exs [cpu | cuda] [--quick]
alias FlashAttention.{Cache, Native, Tensor}

defmodule Bench.Decode do
  @heads 32
  @kv_heads 8
  @head_dim 128
  @layers 32
  @page_size 64

  def run(kind, quick?) do
    device = {kind, 0}
    info = Enum.find(FlashAttention.backend_info().devices, &(&1.device in [kind, device]))
    if !info, do: raise("there is no device #{kind}")

    IO.write("""
    # Decoding from Elixir on #{info.name}

    #{info.threads} #{if kind == :cpu, do: "threads, #{Enum.join(info.features, " ")}", else: "multiprocessors"}. bf16, #{@heads} heads on #{@kv_heads} key heads, head_dim #{@head_dim}, one row of q a sequence, pages of
    #{@page_size}. Times are medians; q comes from a binary and o goes to one. Over the kernel: what a call takes beside it.

    ## One step

    | sequences x keys | forward, us | GB/s | over the kernel, us | append, us |
    |---|--:|--:|--:|--:|
    """)

    cases = if quick?, do: [{1, 1024}], else: [{1, 1024}, {1, 4096}, {1, 32_768}, {8, 4096}]
    for {batch, keys} <- cases, do: one_step(device, batch, keys)

    IO.write("""

    ## #{@layers} layers

    A token is an append and a forward in each layer, for each sequence; nothing else of a model.

    | sequences x keys | a step, ms | tokens/s |
    |---|--:|--:|
    """)

    for {batch, keys} <- if(quick?, do: [{1, 256}], else: [{1, 1024}, {1, 4096}, {8, 1024}]),
        do: stack(device, batch, keys)
  end

  defp one_step(device, batch, keys) do
    cache = cache(device, batch, keys + 100)
    sequences = fill(cache, batch, keys)
    q = tensor({batch, 1, @heads, @head_dim})
    row = tensor({batch, 1, @kv_heads, @head_dim})
    forward = median(fn -> step(q, sequences, device, false) end)
    kernel = median_kernel(fn -> step(q, sequences, device, true) end)
    append = median(fn -> :ok = Cache.append(sequences, row, row) end)
    bytes = 2 * batch * keys * @kv_heads * @head_dim * 2
    over = if kernel > 0, do: us(forward - kernel), else: "-"

    IO.puts(
      "| #{batch} x #{keys} | #{us(forward)} | #{Float.round(bytes / forward / 1000, 1)} | #{over} | #{us(append)} |"
    )

    Enum.each(sequences, &Cache.release/1)
  end

  # As FlashAttention.forward/3 calls where nobody listens to telemetry, but for `measure`.
  defp step(q, sequences, device, measure) do
    tensors = %{q: {q.data, q.type, q.shape}, sequences: Enum.map(sequences, & &1.ref)}

    {:ok, _o, _kept, measured} =
      Native.execute(:forward, tensors, [window_right: 0], device, %{measure: measure})

    measured
  end

  defp stack(device, batch, keys) do
    layers = for _ <- 1..@layers, do: fill(cache(device, batch, keys + 100), batch, keys)
    q = tensor({batch, 1, @heads, @head_dim})
    row = tensor({batch, 1, @kv_heads, @head_dim})

    microseconds =
      median(fn ->
        for sequences <- layers do
          :ok = Cache.append(sequences, row, row)
          {:ok, _o} = FlashAttention.forward(q, sequences)
        end
      end)

    milliseconds = Float.round(microseconds / 1000, 2)
    IO.puts("| #{batch} x #{keys} | #{milliseconds} | #{Float.round(batch * 1.0e6 / microseconds, 1)} |")
    for sequences <- layers, sequence <- sequences, do: Cache.release(sequence)
  end

  defp cache(device, batch, keys) do
    page = 2 * @page_size * @kv_heads * @head_dim * 2
    bytes = page * batch * (div(keys, @page_size) + 1)

    {:ok, cache} =
      Cache.new(
        bytes: bytes,
        type: :bf16,
        num_kv_heads: @kv_heads,
        head_dim: @head_dim,
        page_size: @page_size,
        device: device
      )

    cache
  end

  defp fill(cache, batch, keys) do
    rows = tensor({1, keys, @kv_heads, @head_dim})

    for _ <- 1..batch do
      {:ok, sequence} = Cache.sequence(cache)
      :ok = Cache.append(sequence, rows, rows)
      sequence
    end
  end

  # Numbers around 1, as bf16.
  defp tensor(shape) do
    :rand.seed(:exsss, 1)
    part = for _ <- 1..32_768, into: <<>>, do: <<0x3F00 + :rand.uniform(255)::16-native>>
    bytes = 2 * Tuple.product(shape)
    data = :binary.copy(part, div(bytes, byte_size(part)) + 1)
    Tensor.new(:binary.copy(binary_part(data, 0, bytes)), :bf16, shape)
  end

  @runs 41

  # In microseconds.
  defp median(fun), do: median_of(fn -> elem(:timer.tc(fun), 0) end) |> max(1)
  defp median_kernel(step), do: median_of(fn -> step.().kernel_seconds * 1.0e6 end)

  defp median_of(measure) do
    for _ <- 1..10, do: measure.()
    runs = for _ <- 1..@runs, do: measure.()
    runs |> Enum.sort() |> Enum.at(div(@runs, 2))
  end

  defp us(microseconds), do: Float.round(microseconds * 1.0, 1)
end

kind = if "cuda" in System.argv(), do: :cuda, else: :cpu
Bench.Decode.run(kind, "--quick" in System.argv())
