defmodule FlashAttention.CacheTest do
  # Sequences on pages: attention over them is attention over the rows that were appended, whatever happened in between
  # and whoever did it; what is wrong is said; and pages and memory come back.
  use ExUnit.Case, async: true
  import Bitwise
  doctest FlashAttention.Cache

  alias FlashAttention.{Cache, Tensor}

  @heads 4
  @kv_heads 2
  @head_dim 3
  @row_bytes @kv_heads * @head_dim * 4

  defp cache(pages, page_size \\ 4) do
    {:ok, cache} =
      Cache.new(
        bytes: 2 * pages * page_size * @row_bytes,
        type: :f32,
        num_kv_heads: @kv_heads,
        head_dim: @head_dim,
        page_size: page_size,
        device: :cpu
      )

    cache
  end

  defp sequence(cache) do
    {:ok, sequence} = Cache.sequence(cache)
    sequence
  end

  # Rows that a number tells: the same k and v of a row for all who ask.
  defp row(seed, row) do
    for i <- 1..(@kv_heads * @head_dim), into: <<>> do
      <<:math.sin(seed * 7.3 + row * 1.7 + i)::float-32-native>>
    end
  end

  defp rows(seed, first, count), do: for(i <- first..(first + count - 1)//1, into: <<>>, do: row(seed, i))

  defp tensor(binary),
    do: Tensor.new(binary, :f32, {1, div(byte_size(binary), @row_bytes), @kv_heads, @head_dim})

  defp query(batch, rows \\ 1) do
    count = batch * rows * @heads * @head_dim
    data = for i <- 1..count, into: <<>>, do: <<:math.cos(i * 1.0)::float-32-native>>
    Tensor.new(data, :f32, {batch, rows, @heads, @head_dim})
  end

  defp floats(binary), do: for(<<x::float-32-native <- binary>>, do: x)

  defp close?(x, y), do: Enum.zip_with(floats(x), floats(y), &(abs(&1 - &2) < 1.0e-5)) |> Enum.all?()

  # o of each batch of q alone, over the rows k and v of its sequence.
  defp expected(q, contents, opts \\ []) do
    bytes = div(byte_size(q.data), tuple_size(List.to_tuple(contents)))
    {_batch, rows, heads, head_dim} = q.shape

    for {{k, v}, i} <- Enum.with_index(contents), into: <<>> do
      one = Tensor.new(binary_part(q.data, i * bytes, bytes), :f32, {1, rows, heads, head_dim})
      FlashAttention.forward!(one, tensor(k), tensor(v), [device: :cpu] ++ opts).data
    end
  end

  defp free(cache), do: Cache.info(cache).free_pages

  defp message({:error, error}), do: Exception.message(error)

  test "a batch of sequences of different lengths, step by step, with options and states" do
    cache = cache(30)
    sequences = for _ <- 1..3, do: sequence(cache)
    prompts = [5, 0, 9]

    for {sequence, seed, count} <- Enum.zip([sequences, 1..3, prompts]),
        do: :ok = Cache.append(sequence, tensor(rows(seed, 0, count)), tensor(rows(-seed, 0, count)))

    for step <- 0..6 do
      contents =
        for {seed, count} <- Enum.zip(1..3, prompts),
            do: {rows(seed, 0, count + step), rows(-seed, 0, count + step)}

      q = query(3)
      {:ok, o} = FlashAttention.forward(q, sequences)
      assert o.shape == {3, 1, @heads, @head_dim}
      assert close?(o.data, expected(q, contents))
      {:ok, o, lse} = FlashAttention.forward_with_states(q, sequences, window: {3, 0}, softcap: 2.0, scale: 0.7)
      assert close?(o.data, expected(q, contents, window: {3, 0}, softcap: 2.0, scale: 0.7))
      assert lse.shape == {3, @heads, 1}

      [k, v] =
        for sign <- [1, -1] do
          data = for {seed, count} <- Enum.zip(1..3, prompts), into: <<>>, do: row(sign * seed, count + step)
          Tensor.new(data, :f32, {3, 1, @kv_heads, @head_dim})
        end

      :ok = Cache.append(sequences, k, v)
    end

    assert Enum.map(sequences, &Cache.length/1) == [12, 7, 16]
    assert free(cache) == 30 - (3 + 2 + 4)
  end

  test "several new rows beside old ones, causal" do
    cache = cache(10)
    sequence = sequence(cache)
    :ok = Cache.append(sequence, tensor(rows(1, 0, 7)), tensor(rows(2, 0, 7)))
    :ok = Cache.append(sequence, tensor(rows(1, 7, 5)), tensor(rows(2, 7, 5)))
    q = query(1, 5)
    {:ok, o} = FlashAttention.forward(q, [sequence])
    assert close?(o.data, expected(q, [{rows(1, 0, 12), rows(2, 0, 12)}]))
    {:ok, o} = FlashAttention.forward(q, [sequence], causal: false)
    assert close?(o.data, expected(q, [{rows(1, 0, 12), rows(2, 0, 12)}], causal: false))
  end

  test "a full cache changes nothing, and a release makes room" do
    cache = cache(3)
    [a, b] = [sequence(cache), sequence(cache)]
    :ok = Cache.append(a, tensor(rows(1, 0, 6)), tensor(rows(1, 0, 6)))
    five = tensor(rows(2, 0, 5))
    {:error, error} = Cache.append(b, five, five)
    assert {error.reason, error.argument} == {:out_of_memory, :cache}
    assert message({:error, error}) == "cache: expected 2 free pages of 4 rows, got 1"
    assert {Cache.length(a), Cache.length(b), free(cache)} == {6, 0, 1}

    # One of two would fit.
    two = Tensor.new(rows(3, 0, 6), :f32, {2, 3, @kv_heads, @head_dim})
    assert {:error, %{reason: :out_of_memory}} = Cache.append([a, b], two, two)
    assert {Cache.length(a), Cache.length(b), free(cache)} == {6, 0, 1}
    assert FlashAttention.release(a) == :ok
    assert Cache.release(a) == :ok
    :ok = Cache.append(b, five, five)
    q = query(1)
    {:ok, o} = FlashAttention.forward(q, [b])
    assert close?(o.data, expected(q, [{rows(2, 0, 5), rows(2, 0, 5)}]))
  end

  test "what is wrong is said" do
    cache = cache(3)
    sequence = sequence(cache)
    one = tensor(rows(1, 0, 1))
    q = query(1)

    assert message(Cache.new(type: :f32)) == "bytes: expected a whole number from 1 to 2^44 - 1, got nil"
    assert message(Cache.new(bytes: 9, type: :s32)) =~ ~r/^type: expected :f32, :bf16, :f16, :f64, got :s32/
    assert message(Cache.new(size: 1)) =~ ~r/^opts: expected keys among bytes, type, .*, got :size/
    assert message(Cache.new(5)) == "opts: expected a keyword list, got 5"
    layout = [bytes: 1 <<< 50, type: :f32, num_kv_heads: 1, head_dim: 1]
    assert message(Cache.new(layout)) =~ ~r/^bytes: expected a whole number from 1 to 2\^44 - 1/
    assert message(Cache.new(layout |> Keyword.merge(bytes: 128, device: [cpu: 0, cpu: 1]))) =~ ~r/^device: /
    assert message(Cache.sequence(5)) == "cache: expected a FlashAttention.Cache, got 5"

    for wrong <- [5, [], [5], [sequence | 5]] do
      expected = "sequences: expected FlashAttention.Cache.Sequence or a list of at least one, got "
      assert message(Cache.append(wrong, one, one)) == expected <> inspect(wrong)
    end

    assert message(FlashAttention.forward(q, [5])) =~ ~r/^sequences: /
    assert message(FlashAttention.forward(q, [], [])) =~ ~r/^sequences: /
    assert message(Cache.append(sequence, 5, one)) =~ ~r/^k: expected a tensor/

    assert message(Cache.append([sequence, sequence], one, one)) =~
             ~r/^k: expected \[2, rows, 2, 3\], .*, got \[1, 1, 2, 3\]$/

    two = Tensor.new(rows(1, 0, 2), :f32, {2, 1, @kv_heads, @head_dim})

    assert message(Cache.append([sequence, sequence], two, two)) ==
             "sequence: expected each one once, got one of them twice"

    assert message(Cache.append(sequence, one, tensor(rows(1, 0, 2)))) == "v: expected 1 rows as in k, got 2"
    half = Tensor.new(<<0::size(96)>>, :bf16, {1, 1, @kv_heads, @head_dim})
    assert message(Cache.append(sequence, half, half)) == "k: expected type f32 as the cache's, got bf16"
    short = %Tensor{one | data: <<0::32>>}
    assert message(Cache.append(sequence, short, one)) == "k: expected 24 bytes, got 4"
    other = cache(3)

    assert message(Cache.append([sequence, sequence(other)], two, two)) ==
             "sequences: expected those of one cache, got of several"

    assert message(FlashAttention.forward(query(2), [sequence, sequence(other)])) =~
             ~r/^sequences: expected those of one cache/

    assert message(FlashAttention.forward(query(2), [sequence])) ==
             "page_table: expected batch 2 as in q, got 1"

    assert message(FlashAttention.forward(q, [sequence], device: {:cpu, 1})) ==
             "device: expected {:cpu, 0} as the cache's, got {:cpu, 1}"

    for key <- [:mask, :key_lengths, :page_table, :keep, :dlse],
        do: assert(message(FlashAttention.forward(q, [sequence], [{key, 1}])) =~ ~r/^opts: .*, got :#{key}$/)

    assert FlashAttention.Native.execute(:forward, %{sequences: 5, q: 5}, [], {:cpu, 0}, %{}) |> elem(0) ==
             :error

    native = {one.data, one.type, one.shape}

    assert {:error, {:invalid_argument, "k", _, _, _}} =
             FlashAttention.Native.run(
               :forward,
               %{sequences: [sequence.ref], q: native, k: native},
               [],
               {:cpu, 0}
             )

    assert {:ok, _, _, _} =
             FlashAttention.Native.execute(
               :forward,
               %{sequences: [sequence.ref], q: {q.data, q.type, q.shape}},
               [],
               {:cpu, 0},
               %{keep: true}
             )

    for released <- [sequence] do
      :ok = Cache.release(released)

      assert message(FlashAttention.forward(q, [released])) ==
               "sequence: expected one that is held, got one that was released"

      assert message(Cache.append(released, one, one)) =~ ~r/released/
      assert Cache.length(released) == 0
    end
  end

  test "memory is counted while a cache or its sequences are there" do
    test = self()

    {holder, reference} =
      spawn_monitor(fn ->
        # Large, so that other tests' caches do not matter.
        {:ok, cache} = Cache.new(bytes: 1 <<< 28, type: :f32, num_kv_heads: 1, head_dim: 64, device: :cpu)
        sequence = sequence(cache)
        send(test, :held)
        receive do: (:go -> {cache, sequence})
      end)

    assert_receive :held
    page_bytes = fn -> hd(FlashAttention.backend_info().devices).page_bytes end
    assert page_bytes.() >= 1 <<< 28
    send(holder, :go)
    assert_receive {:DOWN, ^reference, :process, _, _}
    wait_until(fn -> page_bytes.() < 1 <<< 28 end)
  end

  # What a process that has ended held is collected soon after.
  defp wait_until(condition) do
    if !condition.() do
      :erlang.garbage_collect()
      Process.sleep(10)
      wait_until(condition)
    end
  end

  # ---- random operations beside a model: sequences are lists of the rows that they should hold ---------------------

  describe "10,000 random operations" do
    test "one after another" do
      :rand.seed(:exsss, {1, 2, 3})
      cache = cache(40, 3)

      state =
        Enum.reduce(1..10_000, %{held: %{}, next: 1, full: 0}, fn step, state ->
          state =
            operate(
              Enum.random([:add, :append, :append, :append, :fork, :release, :collect, :read]),
              cache,
              state
            )

          if rem(step, 500) == 0, do: check_all(state)
          state
        end)

      check_all(state)
      assert state.full > 100
      for {_id, {sequence, _rows}} <- state.held, do: Cache.release(sequence)
      wait_until(fn -> free(cache) == 40 end)
    end

    test "by many processes, of which some are killed" do
      cache = cache(200, 3)
      shared = for seed <- 1..4, do: {seed, sequence(cache)}

      workers =
        for number <- 1..10 do
          spawn_monitor(fn ->
            :rand.seed(:exsss, {number, 5, 6})
            Enum.reduce(1..1000, {number * 1_000_000, []}, fn _, own -> work(cache, shared, own) end)
          end)
        end

      # The last two are killed amid their work.
      for {pid, _reference} <- Enum.take(workers, -2) do
        Process.sleep(20)
        Process.exit(pid, :kill)
      end

      for {pid, reference} <- workers do
        assert_receive {:DOWN, ^reference, :process, ^pid, reason}
        assert reason in [:normal, :killed, :noproc]
      end

      for {seed, sequence} <- shared, do: check_shared(seed, sequence)
      for {_seed, sequence} <- shared, do: Cache.release(sequence)
      wait_until(fn -> free(cache) == 200 end)
    end
  end

  defp operate(:add, cache, state) when map_size(state.held) < 12,
    do: put_in(state.held[state.next], {sequence(cache), []}) |> Map.update!(:next, &(&1 + 1))

  defp operate(_operation, _cache, %{held: held} = state) when held == %{}, do: state

  defp operate(:append, cache, state) do
    count = Enum.random(0..7)
    chosen = Enum.take_random(state.held, Enum.random(1..3))
    new = for {id, {_sequence, rows}} <- chosen, do: {id, for(i <- 1..count//1, do: {id, length(rows) + i})}
    data = for {_id, rows} <- new, {seed, i} <- rows, into: <<>>, do: row(seed, i)
    tensor = Tensor.new(data, :f32, {length(chosen), count, @kv_heads, @head_dim})
    before = free(cache)

    case Cache.append(for({_id, {sequence, _rows}} <- chosen, do: sequence), tensor, tensor) do
      :ok ->
        held = for {id, rows} <- new, into: state.held, do: {id, append_rows(state.held[id], rows)}
        %{state | held: held}

      {:error, error} ->
        assert error.reason == :out_of_memory
        # Collected sequences may give pages back at any time.
        assert free(cache) >= before
        %{state | full: state.full + 1}
    end
  end

  defp operate(:fork, _cache, state) when map_size(state.held) < 12 do
    {_id, {sequence, rows}} = Enum.random(state.held)
    {:ok, fork} = Cache.fork(sequence)
    put_in(state.held[state.next], {fork, rows}) |> Map.update!(:next, &(&1 + 1))
  end

  defp operate(:release, _cache, state) do
    {id, {sequence, _rows}} = Enum.random(state.held)
    :ok = Cache.release(sequence)
    %{state | held: Map.delete(state.held, id)}
  end

  # Nobody has the term any more.
  defp operate(:collect, _cache, state) do
    if :rand.uniform() < 0.1 do
      {id, _} = Enum.random(state.held)
      state = %{state | held: Map.delete(state.held, id)}
      :erlang.garbage_collect()
      state
    else
      state
    end
  end

  defp operate(:read, _cache, state) do
    chosen = state.held |> Map.values() |> Enum.take_random(Enum.random(1..3))
    check(chosen)
    state
  end

  defp operate(_operation, _cache, state), do: state

  defp append_rows({sequence, rows}, new), do: {sequence, rows ++ new}

  defp check_all(%{held: held}) when held == %{}, do: :ok
  defp check_all(state), do: check(Map.values(state.held))

  defp check(chosen) do
    q = query(length(chosen))
    {:ok, o} = FlashAttention.forward(q, for({sequence, _rows} <- chosen, do: sequence))

    contents =
      for {_sequence, rows} <- chosen do
        data = for {seed, i} <- rows, into: <<>>, do: row(seed, i)
        {data, data}
      end

    assert close?(o.data, expected(q, contents))
    for {sequence, rows} <- chosen, do: assert(Cache.length(sequence) == length(rows))
  end

  # A sequence that all append to has equal rows, so that what is read is right at any length.
  defp check_shared(seed, sequence) do
    q = query(1)
    {:ok, o} = FlashAttention.forward(q, [sequence])
    one = row(seed, 0)
    zero = :binary.copy(<<0>>, byte_size(o.data))
    assert o.data == zero or close?(o.data, expected(q, [{one, one}]))
  end

  defp work(cache, shared, {next, own}) do
    {seed, common} = Enum.random(shared)

    case :rand.uniform(7) do
      1 ->
        append_if_room(common, String.duplicate(row(seed, 0), Enum.random(1..4)))
        {next, own}

      2 ->
        check_shared(seed, common)
        {next, own}

      # A fork of what others append to, and is this process's alone from then on.
      3 when length(own) < 4 ->
        {:ok, fork} = Cache.fork(common)
        {next + 1, [{fork, seed, Cache.length(fork), next, 0} | own]}

      4 when own != [] ->
        [{sequence, _, _, _, _} | own] = Enum.shuffle(own)
        if :rand.uniform(2) == 1, do: :ok = Cache.release(sequence)
        {next, own}

      5 when own != [] ->
        {sequence, seed, shared_rows, id, count} = Enum.random(own)
        q = query(1)
        {:ok, o} = FlashAttention.forward(q, [sequence])
        data = String.duplicate(row(seed, 0), shared_rows) <> rows(id, 0, count)
        assert close?(o.data, expected(q, [{data, data}]))
        {next, own}

      6 when own != [] ->
        [{sequence, seed, shared_rows, id, count} | own] = Enum.shuffle(own)
        count = if append_if_room(sequence, row(id, count)), do: count + 1, else: count
        {next, [{sequence, seed, shared_rows, id, count} | own]}

      # All that the cache is full of is given up by and by.
      _ ->
        if free(cache) == 0 do
          for {sequence, _, _, _, _} <- own, do: Cache.release(sequence)
          {next, []}
        else
          {next, own}
        end
    end
  end

  defp append_if_room(sequence, data) do
    case Cache.append(sequence, tensor(data), tensor(data)) do
      :ok -> true
      {:error, %{reason: :out_of_memory}} -> false
    end
  end
end
