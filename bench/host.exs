# What calls from Elixir cost on the GPU, for bench/host.py: prints one measurement a line, as words.
#
#     states TYPE PRECISION HEAD_DIM SEQLEN SOURCE MILLISECONDS   forward and backward with states on the device
#     callers SOURCE NUM CALLS_PER_SECOND MIN MAX   forwards by so many processes; fewest and most calls of one
#
# SOURCE: "binaries" are ordinary ones, "results" those of an earlier call. --quick: one seqlen.
alias FlashAttention.Tensor

defmodule Bench do
  @hidden 2048

  def tensor(type, shape) do
    {:rand.seed(:exsss, 1), bits = if(type == :f32, do: 32, else: 16)}
    part = for _ <- 1..65_536, into: <<>>, do: number(:rand.normal(), bits)
    bytes = Tuple.product(shape) * div(bits, 8)
    data = :binary.copy(part, div(bytes, byte_size(part)) + 1)
    Tensor.new(:binary.copy(binary_part(data, 0, bytes)), type, shape)
  end

  defp number(x, 32), do: <<x::float-32-native>>
  # bf16: the upper half of an f32.
  defp number(x, 16),
    do: <<x::float-32-big>> |> binary_part(0, 2) |> then(fn <<bits::16>> -> <<bits::16-native>> end)

  def shape(type, head_dim, seqlen) do
    tokens = if type == :f32, do: 8192, else: 16_384
    {max(div(tokens, seqlen), 1), seqlen, div(@hidden, head_dim), head_dim}
  end

  def sources(tensor) do
    # A result is what a caller has who chains calls.
    {:ok, result} = FlashAttention.forward(tensor, tensor, tensor, device: :cuda)
    [{"binaries", tensor}, {"results", result}]
  end

  def states(tensor, precision) do
    opts = [keep: :device, causal: false, device: :cuda, precision: precision]
    {_o, states} = FlashAttention.forward_with_states!(tensor, tensor, tensor, opts)

    gradients = FlashAttention.backward!(tensor, states)
    FlashAttention.release(states)
    gradients
  end

  def median_ms(fun) do
    for(_ <- 1..2, do: fun.())
    times = for _ <- 1..7, do: fun |> :timer.tc() |> elem(0)
    times |> Enum.sort() |> Enum.at(3) |> Kernel./(1000)
  end

  def callers(tensor, count, milliseconds) do
    deadline = System.monotonic_time(:millisecond) + milliseconds
    tasks = for _ <- 1..count, do: Task.async(fn -> call_until(deadline, tensor, 0) end)
    counts = Task.await_many(tasks, 60_000)
    {round(Enum.sum(counts) * 1000 / milliseconds), Enum.min(counts), Enum.max(counts)}
  end

  defp call_until(deadline, tensor, count) do
    {:ok, _o} = FlashAttention.forward(tensor, tensor, tensor, device: :cuda)

    if System.monotonic_time(:millisecond) < deadline,
      do: call_until(deadline, tensor, count + 1),
      else: count + 1
  end
end

seqlens = if "--quick" in System.argv(), do: [4096], else: [512, 1024, 2048, 4096, 8192, 16_384]

for {type, precision} <- [f32: :highest, f32: :default, bf16: :highest],
    head_dim <- [64, 128],
    seqlen <- seqlens do
  tensor = Bench.tensor(type, Bench.shape(type, head_dim, seqlen))

  for {source, tensor} <- Bench.sources(tensor) do
    ms = Bench.median_ms(fn -> Bench.states(tensor, precision) end)
    IO.puts("states #{type} #{precision} #{head_dim} #{seqlen} #{source} #{Float.round(ms, 3)}")
  end
end

for {source, tensor} <- Bench.sources(Bench.tensor(:bf16, {1, 1024, 16, 64})), count <- [1, 16] do
  Bench.callers(tensor, count, 200)
  {calls, least, most} = Bench.callers(tensor, count, 1000)
  IO.puts("callers #{source} #{count} #{calls} #{least} #{most}")
end
