# `make bench-responsiveness`: how long a process that wants to run waits for one of the normal schedulers while a call
# keeps every processor busy for more than a second. Prints a page of Markdown: the longest wait of each of so many calls,
# as a distribution, with the VM's flags as they come and with schedulers that do not spin before they sleep.
#
#     mix run bench/responsiveness.exs [NUM_CALLS]
#
# Each row of the table is measured in a VM of its own, which runs this script with the word `measure`.
defmodule Responsiveness do
  @flags [{"as they come", ""}, {"+sbwt none", "+sbwt none +sbwtdcpu none +sbwtdio none"}]

  def main(["measure", num_calls]),
    do: IO.puts(inspect(measure(String.to_integer(num_calls)), limit: :infinity))

  def main([]), do: main(["200"])

  def main([num_calls]) do
    IO.puts("""
    # Normal schedulers during a call on the CPU

    For #{num_calls} calls, each longer than a second on every processor: the longest time that a process bound to one of
    the normal schedulers waited for its turn, in milliseconds. #{cpu()}.

    | flags of the VM | median | p99 | worst |
    |---|---|---|---|\
    """)

    for {name, flags} <- @flags do
      waits = flags |> in_own_vm(num_calls) |> Enum.sort()
      cells = for share <- [0.5, 0.99, 1.0], do: milliseconds(waits, share)
      IO.puts("| #{name} | #{Enum.join(cells, " | ")} |")
    end
  end

  defp cpu do
    %{name: name, features: features, threads: threads} = hd(FlashAttention.backend_info().devices)

    "#{name}, #{Enum.join(List.wrap(features), " ")}, #{threads} threads, #{System.schedulers_online()} schedulers, OTP #{System.otp_release()}"
  end

  defp milliseconds(sorted, share) do
    microseconds = Enum.at(sorted, ceil(share * length(sorted)) - 1)
    :erlang.float_to_binary(microseconds / 1000, decimals: 1)
  end

  defp in_own_vm(flags, num_calls) do
    ebin = Application.app_dir(:flash_attention, "ebin")
    {output, 0} = System.cmd("elixir", ["--erl", flags, "-pa", ebin, __ENV__.file, "measure", num_calls])
    {waits, []} = Code.eval_string(output)
    waits
  end

  # The longest wait of each call, in microseconds. The problem grows until a call takes more than a second.
  defp measure(num_calls, batch \\ 2) do
    tensor =
      FlashAttention.Tensor.new(:binary.copy(<<0>>, 4 * batch * 8192 * 2 * 64), :f32, {batch, 8192, 2, 64})

    {microseconds, _longest} = attempt(tensor)

    if microseconds < 1_000_000,
      do: measure(num_calls, 2 * batch),
      else: for(_ <- 1..num_calls, do: elem(attempt(tensor), 1))
  end

  defp attempt(tensor) do
    tickers = Enum.map(1..System.schedulers_online(), &start_ticker/1)
    start = now()
    FlashAttention.forward!(tensor, tensor, tensor, device: :cpu)
    microseconds = now() - start
    {microseconds, tickers |> Enum.map(&stop_ticker/1) |> Enum.max()}
  end

  # Bound to its scheduler: the others would run it in the place of one that is blocked.
  defp start_ticker(scheduler) do
    {parent, start} = {self(), now()}
    :erlang.spawn_opt(fn -> tick(parent, start, 0) end, [:link, scheduler: scheduler])
  end

  defp stop_ticker(ticker) do
    send(ticker, :stop)
    receive do: ({^ticker, longest} -> longest)
  end

  # Sends the longest time between two of its turns, which are a millisecond apart where nothing is in the way.
  defp tick(parent, last, longest) do
    turn =
      receive do
        :stop -> :last
      after
        1 -> :another
      end

    {time, longest} = {now(), max(longest, now() - last)}
    if turn == :last, do: send(parent, {self(), longest}), else: tick(parent, time, longest)
  end

  defp now, do: System.monotonic_time(:microsecond)
end

Responsiveness.main(System.argv())
