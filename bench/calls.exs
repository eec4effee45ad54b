# What a small call costs on the CPU, and where: microseconds of each step of a forward of f32 [1, 16, 2, 16], by turns; medians
# and the least. The C library's own steps are those of `build/bench_cpu --calls`.
#
#     mix run bench/calls.exs
alias FlashAttention.{Native, Tensor}

defmodule Bench do
  @turns 4000

  # Each step alone, by turns, in one process.
  def rows(steps) do
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
end

shape = {1, 16, 2, 16}
data = for(i <- 1..Tuple.product(shape), into: <<>>, do: <<:math.sin(i)::float-32-native>>)
tensor = Tensor.new(data, :f32, shape)
native = {data, {:f, 32}, shape}
tensors = %{q: native, k: native, v: native}

%{devices: [%{name: name, features: features} | _]} = FlashAttention.backend_info()
IO.puts("#{name}, #{Enum.join(features, " ")}, OTP #{System.otp_release()}; f32 #{inspect(shape)}\n")
IO.puts("| call | median, us | least, us |\n|---|---|---|")

Bench.rows([
  {"an empty function", fn -> :ok end},
  {"`Native.execute` of nothing: refused, on a dirty scheduler",
   fn -> Native.execute(:none, %{}, [], {:cpu, 0}, %{}) end},
  {"`Native.execute`, a forward",
   fn -> {:ok, _, _, _} = Native.execute(:forward, tensors, [], {:cpu, 0}, %{}) end},
  {"`FlashAttention.forward/4`, causal",
   fn -> {:ok, _} = FlashAttention.forward(tensor, tensor, tensor, device: :cpu) end},
  {"`FlashAttention.forward/4`, no options",
   fn -> {:ok, _} = FlashAttention.forward(tensor, tensor, tensor) end}
])
