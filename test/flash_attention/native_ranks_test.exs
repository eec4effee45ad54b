defmodule FlashAttention.NativeRanksTest do
  # What ranks need of the NIF beside the passes: memory, sums, links.
  use ExUnit.Case, async: true

  alias FlashAttention.Check.Values
  alias FlashAttention.Native

  @cpu {:cpu, 0}

  defp tensor(numbers, type, shape), do: {Values.encode(numbers, type), type, shape}

  test "sums of segments, in every type, are rounded once" do
    for type <- [{:f, 64}, {:f, 32}, {:bf, 16}, {:f, 16}], seed <- 1..20 do
      :rand.seed(:exsss, seed)
      sum_type = if type == {:f, 64}, do: type, else: {:f, 32}
      {batch, seqlen, row} = {:rand.uniform(3), :rand.uniform(9), {:rand.uniform(3), :rand.uniform(4)}}
      shape = fn seqlen -> {batch, seqlen, elem(row, 0), elem(row, 1)} end
      count = elem(row, 0) * elem(row, 1)

      draw = fn seqlen ->
        Values.random(batch * seqlen * count, :rand.uniform(100_000)) |> Values.round_to(type)
      end

      # More parts than are added at once, and none at all.
      num_parts = Enum.at([3, 0, 1, 40], rem(seed, 4))

      parts =
        for _ <- 1..num_parts//1 do
          length = :rand.uniform(seqlen)

          segments =
            if num_parts > 3,
              do: List.duplicate({0, 0, length}, 8),
              else: for(_ <- 1..2, do: segment(length, seqlen))

          {draw.(length), length, segments}
        end

      expected =
        for {numbers, length, segments} <- parts,
            {from, to, rows} <- segments,
            b <- 0..(batch - 1),
            i <- 0..(rows - 1)//1,
            x <- 0..(count - 1),
            reduce: Map.new(0..(batch * seqlen * count - 1), &{&1, 0.0}) do
          sums ->
            number = Enum.at(numbers, (b * length + from + i) * count + x)
            Map.update!(sums, (b * seqlen + to + i) * count + x, &hd(Values.round_to([&1 + number], sum_type)))
        end

      {:ok, {data, ^type, _shape}} =
        Native.sum(
          for({numbers, length, segments} <- parts, do: {tensor(numbers, type, shape.(length)), segments}),
          {type, shape.(seqlen)},
          @cpu
        )

      exact = for i <- 0..(batch * seqlen * count - 1), do: expected[i]
      assert Values.decode(data, type) == Values.round_to(exact, type)
    end
  end

  defp segment(length, seqlen) do
    {from, to} = {:rand.uniform(length) - 1, :rand.uniform(seqlen) - 1}
    {from, to, :rand.uniform(min(length - from, seqlen - to) + 1) - 1}
  end

  test "what cannot be summed is an error" do
    data = <<0, 0, 0, 0, 0, 0, 0, 0>>
    one = {data, {:f, 32}, {1, 2, 1, 1}}
    huge = 0x7FFFFFFFFFFFFFFF

    for {like, parts, device} <- [
          {:one, [], @cpu},
          {{data, {:f, 32}, {2}}, [], @cpu},
          {{data, {:f, 32}, {1, -2, 1}}, [], @cpu},
          {{data, {:f, 32}, {huge, huge, huge, huge}}, [], @cpu},
          {{data, {:f, 32}, {0, huge, huge, 2}}, [], @cpu},
          {{data, {:f, 32}, {0, 1, 0x4000000000000000, 4}}, [], @cpu},
          {{data, {:f, 32}, {1, 2, 1, 1, 1}}, [], @cpu},
          {{data, {:s, 32}, {1, 2, 1, 1}}, [], @cpu},
          {one, :parts, @cpu},
          {one, [], {:tpu, 0}},
          {one, [:part], @cpu},
          {one, [{one, :segments}], @cpu},
          {one, [{{data, {:f, 32}, {1, huge, 1, 1}}, [{huge - 1, 0, 1}]}], @cpu},
          {one, [{{data, {:f, 32}, {1, 3, 1, 1}}, []}], @cpu},
          {one, [{one, [{0, 0, 3}]}], @cpu},
          {one, [{one, [{0, 1, 2}]}], @cpu},
          {one, [{one, [{-1, 0, 1}]}], @cpu},
          {one, [{one, [{0, 0}]}], @cpu},
          {one, [{one, [{0x7FFFFFFFFFFFFFFF, 0, 0x7FFFFFFFFFFFFFFF}]}], @cpu},
          {one, [{tensor([1.0], {:f, 64}, {1, 1, 1, 1}), []}], @cpu},
          {one, [{tensor([1.0, 2.0], {:f, 32}, {1, 1, 2, 1}), []}], @cpu},
          {one, [{{<<0, 0>>, {:f, 32}, {1, 2, 1, 1}}, []}], @cpu},
          {one, [], {:reference, 0}}
        ] do
      like = with {_data, type, shape} <- like, do: {type, shape}
      assert {:error, {reason, _argument, _expected, _got, _message}} = Native.sum(parts, like, device)
      assert reason in [:invalid_argument, :unsupported, :no_device]
    end
  end

  test "a sum of nothing takes no time, however many batches have nothing" do
    for shape <- [{0x10000000000, 0, 1, 1}, {0x10000000000, 3, 0}] do
      part = {<<>>, {:f, 32}, shape}
      count = elem(shape, 1)
      assert {:ok, {<<>>, {:f, 32}, ^shape}} = Native.sum([{part, [{0, 0, count}]}], {{:f, 32}, shape}, @cpu)
    end
  end

  test "memory that cannot be had, links that do not connect" do
    for result <- [
          Native.allocate(:none, 1),
          Native.allocate(@cpu, 0xFFFFFFFFFFFFFF),
          Native.upload(@cpu, :data),
          Native.upload(@cpu, {0, 8, nil}),
          Native.link_id(@cpu),
          Native.link_open(@cpu, <<0::1024>>, 2, 0, 10),
          Native.link_open(@cpu, <<>>, 2, 0, 10),
          Native.link_begin(:link, []),
          Native.link_await(:exchange),
          Native.link_abort(make_ref())
        ],
        do: assert(match?({:error, {_reason, _, _, _, _}}, result), inspect(result))

    {:ok, memory} = Native.upload(@cpu, "rows")
    {:ok, copy} = Native.upload(@cpu, memory)
    assert Native.read(copy) == {:ok, "rows"}
    assert Native.release(memory) and Native.release(copy)
    assert {:error, _released} = Native.upload(@cpu, memory)
  end
end
