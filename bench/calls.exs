# What a small call costs, and where: microseconds of each step of a forward, by turns; medians and the least. On the CPU of f32
# [1, 16, 2, 16], whose steps in the C library are those of `build/bench_cpu --calls`; on a GPU of bf16 [1, 128, 8, 64], from
# binaries and from tensors that lie there.
#
#     mix run bench/calls.exs [cpu | cuda]
alias FlashAttention.{DeviceMemory, Native, Tensor}

defmodule Bench do
  @turns 4000

  def run(kind) do
    {device, type, shape} = problem(kind)

    %{name: name, features: features} =
      Enum.find(FlashAttention.backend_info().devices, &(&1.device in [kind, device])) ||
        raise "there is no device #{kind}"

    IO.puts("#{Enum.join([name | features], ", ")}, OTP #{System.otp_release()}; #{type} #{inspect(shape)}\n")
    IO.puts("| call | median, us | least, us |\n|---|---|---|")
    tensor = Tensor.new(numbers(type, Tuple.product(shape)), type, shape)
    rows(shared(device, tensor) ++ steps(kind, device, tensor))

    if kind == :cuda,
      do: IO.puts("\nOf a forward, the kernels take #{microseconds(kernels(device, tensor))} us.")
  end

  defp problem(:cpu), do: {{:cpu, 0}, :f32, {1, 16, 2, 16}}
  defp problem(:cuda), do: {{:cuda, 0}, :bf16, {1, 128, 8, 64}}

  defp shared(device, tensor) do
    [
      {"an empty function", fn -> :ok end},
      {"`Native.execute` of nothing: refused, on a dirty scheduler",
       fn -> Native.execute(:none, %{}, [], device, %{}) end},
      {"`Native.execute`, a forward", fn -> execute(device, tensor, %{measure: false}) end}
    ]
  end

  defp steps(:cpu, _device, tensor) do
    [
      {"`FlashAttention.forward/4`, causal",
       fn -> {:ok, _} = FlashAttention.forward(tensor, tensor, tensor, device: :cpu) end},
      {"`FlashAttention.forward/4`, no options",
       fn -> {:ok, _} = FlashAttention.forward(tensor, tensor, tensor) end}
    ]
  end

  defp steps(:cuda, device, tensor) do
    {:ok, memory} = Native.upload(device, tensor.data)
    there = %{tensor | data: DeviceMemory.from_native(memory)}
    {:ok, o, lse} = FlashAttention.forward_with_states(tensor, tensor, tensor, device: device)

    {:ok, o_there, states} =
      FlashAttention.forward_with_states(there, there, there, results: :device, keep: :device)

    [
      {"`Native.execute`, a forward there",
       fn -> execute(device, %{tensor | data: memory}, %{results: :device, measure: false}) end},
      {"`FlashAttention.forward/4`", fn -> {:ok, _} = FlashAttention.forward(tensor, tensor, tensor) end},
      {"`FlashAttention.forward/4`, of results of other calls",
       fn -> {:ok, _} = FlashAttention.forward(o, o, o) end},
      {"`FlashAttention.forward/4`, there",
       fn -> {:ok, _} = FlashAttention.forward(there, there, there, results: :device) end},
      {"`FlashAttention.backward/7`",
       fn -> {:ok, _, _, _} = FlashAttention.backward(tensor, tensor, tensor, tensor, o, lse) end},
      {"`FlashAttention.backward/3`, there",
       fn -> {:ok, _, _, _} = FlashAttention.backward(o_there, states, results: :device) end}
    ]
  end

  defp execute(device, %{data: data, type: type, shape: shape}, placement) do
    native = {data, type, shape}
    {:ok, _, _, measured} = Native.execute(:forward, %{q: native, k: native, v: native}, [], device, placement)
    measured
  end

  # In nanoseconds.
  defp kernels(device, tensor) do
    runs = for _ <- 1..500, do: execute(device, tensor, %{}).kernel_seconds
    runs |> Enum.sort() |> Enum.at(250) |> Kernel.*(1.0e9)
  end

  # Each step alone, by turns, in one process.
  defp rows(steps) do
    for _ <- 1..500, {_name, fun} <- steps, do: fun.()
    turns = for _ <- 1..@turns, do: Enum.map(steps, fn {_name, fun} -> nanoseconds(fun) end)

    for {{name, _fun}, times} <- Enum.zip(steps, Enum.zip(turns)) do
      sorted = times |> Tuple.to_list() |> Enum.sort()
      IO.puts("| #{name} | #{microseconds(Enum.at(sorted, div(@turns, 2)))} | #{microseconds(hd(sorted))} |")
    end
  end

  defp nanoseconds(fun) do
    begin = :erlang.monotonic_time(:nanosecond)
    fun.()
    :erlang.monotonic_time(:nanosecond) - begin
  end

  defp microseconds(nanoseconds), do: :erlang.float_to_binary(nanoseconds / 1000, decimals: 1)

  defp numbers(:f32, count), do: for(i <- 1..count, into: <<>>, do: <<:math.sin(i)::float-32-native>>)

  # The upper halves of f32.
  defp numbers(:bf16, count) do
    for i <- 1..count, into: <<>> do
      <<upper::16, _lower::16>> = <<:math.sin(i)::float-32>>
      <<upper::16-native>>
    end
  end
end

Bench.run(if "cuda" in System.argv(), do: :cuda, else: :cpu)
