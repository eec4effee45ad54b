defmodule FlashAttention.PartsTest do
  use ExUnit.Case, async: true

  import FlashAttention.Test.Tensors
  alias FlashAttention.{Error, Parts, Sink, Tensor}

  doctest FlashAttention.Parts
  doctest FlashAttention.Sink

  @sizes {2, 5, 3, 4}
  @stats {2, 3, 5}

  defp tensor(data, type, shape), do: Tensor.new(data, type, shape)
  defp infinities(count), do: for(_ <- indices(count), into: <<>>, do: <<0xFF800000::32-native>>)
  defp nans(count), do: for(_ <- indices(count), into: <<>>, do: <<0x7FC00000::32-native>>)

  defp part(seed, type), do: {random(seed, type, @sizes), random(seed + 1000, :f32, @stats)}

  # o and lse as [rows of heads] in the order of lse, each o a list.
  defp rows({o, lse}) do
    {batch, seqlen, heads, width} = o.shape
    numbers = o |> to_list() |> Enum.chunk_every(width) |> List.to_tuple()

    os =
      for b <- indices(batch),
          h <- indices(heads),
          i <- indices(seqlen),
          do: elem(numbers, (b * seqlen + i) * heads + h)

    Enum.zip(os, to_list(lse))
  end

  # The formulas, row by row; sinks: a list of them for each row.
  defp expected(parts, sinks) do
    for {row, sinks} <- Enum.zip(Enum.zip(Enum.map(parts, &rows/1)), sinks) do
      row = for {o, lse} <- Tuple.to_list(row), is_number(lse), do: {o, lse}
      total = Enum.sum(Enum.map(row, fn {_o, lse} -> :math.exp(lse) end) ++ Enum.map(sinks, &:math.exp/1))
      o = for d <- 0..3, do: Enum.sum(for {o, lse} <- row, do: :math.exp(lse) / total * Enum.at(o, d))
      {o, if(total == 0, do: :neg_infinity, else: :math.log(total))}
    end
  end

  defp assert_merged(merged, expected, tolerance) do
    for {{o, lse}, {expected_o, expected_lse}} <- Enum.zip(rows(merged), expected) do
      assert max_difference(o, expected_o) <= tolerance
      assert lse == expected_lse or abs(lse - expected_lse) <= 1.0e-5
    end
  end

  defp no_sinks, do: List.duplicate([], 30)

  test "any number of parts of any type, in any order, merge to what the formulas say" do
    for count <- [1, 2, 3, 7, 17, 40], {type, tolerance} <- [f32: 1.0e-6, f16: 1.0e-3, bf16: 1.0e-2] do
      parts = for seed <- 1..count, do: part(seed, type)
      expected = expected(parts, no_sinks())
      assert {%Tensor{}, %Tensor{type: {:f, 32}}} = merged = Parts.merge(parts)
      assert elem(merged, 0).type == elem(hd(parts), 0).type
      assert_merged(merged, expected, tolerance)
      assert_merged(Parts.merge(Enum.reverse(parts)), expected, tolerance)
      assert {%Tensor{type: {:f, 32}}, _lse} = wide = Parts.merge(Enum.shuffle(parts), type: :f32)
      assert_merged(wide, expected, 1.0e-6)
    end
  end

  test "parts that have nothing are not looked at, whatever they hold" do
    nothing = {tensor(nans(120), :f32, @sizes), tensor(infinities(30), :f32, @stats)}
    [one, two] = [part(1, :f32), part(2, :f32)]
    assert Parts.merge([nothing, one, nothing, two]) == Parts.merge([one, two])

    {o, lse} = Parts.merge([nothing, nothing])
    assert o.data == <<0::size(120 * 32)>>
    assert lse.data == infinities(30)

    {[{dout, dlse}], nil} = Parts.gradient(elem(nothing, 0), [nothing], o, lse)
    assert dout.data == <<0::size(120 * 32)>> and dlse.data == <<0::size(30 * 32)>>
  end

  test "sinks of both layouts, large ones too, correct o and lse" do
    {o, lse} = one = part(1, :f32)
    sink = from_list([3.0, -1.0, 20.0, 0.5, 0.5, 0.5], :f32, {2, 3})
    by_head = [[3.0, 0.5], [-1.0, 0.5], [20.0, 0.5]]
    expected = expected([one], for(_b <- 0..1, sinks <- by_head, _i <- 0..4, do: sinks))
    assert_merged(Sink.correct(o, lse, sink), expected, 1.0e-6)

    same = for _row <- 1..10, into: <<>>, do: sink.data
    of_rows = tensor(same, :f32, {2, 5, 2, 3})
    assert Sink.correct(o, lse, of_rows) == Sink.correct(o, lse, sink)

    {o, lse} = Sink.correct(o, lse, sink)
    dout = random(5, :f32, @sizes)
    dsink = to_list(Sink.gradient(dout, o, lse, sink))
    of_rows = Sink.gradient(dout, o, lse, of_rows)
    assert of_rows.shape == {2, 5, 2, 3}
    sums = of_rows |> to_list() |> Enum.chunk_every(6) |> Enum.zip_with(&Enum.sum/1)
    assert max_difference(dsink, sums) < 1.0e-5
    assert Enum.max(Enum.map(dsink, &abs/1)) > 0.1
  end

  test "attention in parts is attention, and its backward takes what was merged" do
    %{q: q, k: k, v: v, dout: dout, opts: [sink: sink]} = problem(3, :f64, {2, 9, 12, 4, 2, 6}, sink: 2)
    sink = %{sink | data: for(<<x::float-32-native <- sink.data>>, into: <<>>, do: <<x + 2::float-32-native>>)}
    {o, lse} = FlashAttention.forward_with_states!(q, k, v, sink: sink, causal: false)

    {dq, dk, dv, %{sink: dsink}} = FlashAttention.backward!(dout, q, k, v, o, lse, sink: sink, causal: false)

    halves = for keys <- [0..6, 7..11], do: {keys(k, keys), keys(v, keys)}
    parts = for {k, v} <- halves, do: FlashAttention.forward_with_states!(q, k, v, causal: false)
    {merged_o, merged_lse} = Parts.merge(parts, sink: sink)
    assert max_difference(to_list(merged_o), to_list(o)) < 1.0e-13
    assert max_difference(to_list(merged_lse), to_list(lse)) < 1.0e-13

    # What the option does at once is the correction of attention without.
    {plain_o, plain_lse} = FlashAttention.forward_with_states!(q, k, v, causal: false)
    {corrected, _lse} = Sink.correct(plain_o, plain_lse, sink)
    assert max_difference(to_list(corrected), to_list(o)) < 1.0e-13

    [{dq1, dk1, dv1}, {dq2, dk2, dv2}] =
      for {k, v} <- halves,
          do: FlashAttention.backward!(dout, q, k, v, merged_o, merged_lse, causal: false)

    sum = Enum.zip_with(to_list(dq1), to_list(dq2), &+/2)
    assert max_difference(sum, to_list(dq)) < 1.0e-12
    assert max_difference(to_list(dk1), to_list(keys(dk, 0..6))) < 1.0e-12
    assert max_difference(to_list(dk2), to_list(keys(dk, 7..11))) < 1.0e-12
    assert max_difference(to_list(dv1), to_list(keys(dv, 0..6))) < 1.0e-12
    assert max_difference(to_list(dv2), to_list(keys(dv, 7..11))) < 1.0e-12
    got = Sink.gradient(dout, merged_o, merged_lse, sink)
    assert max_difference(to_list(got), to_list(dsink)) < 1.0e-5
  end

  # Some rows of [batch, seqlen_k, heads, head_dim].
  defp keys(%{shape: {batch, seqlen, heads, width}} = tensor, range) do
    numbers = tensor |> to_list() |> Enum.chunk_every(heads * width) |> List.to_tuple()
    rows = for b <- indices(batch), j <- range, do: elem(numbers, b * seqlen + j)
    from_list(Enum.concat(rows), :f64, {batch, Enum.count(range), heads, width})
  end

  test "the gradients are those by differences" do
    parts = for seed <- 1..3, do: {random(seed, :f64, {1, 2, 1, 2}), random(seed + 10, :f64, {1, 1, 2})}
    {dout, dlse} = {random(20, :f64, {1, 2, 1, 2}), random(21, :f64, {1, 1, 2})}
    sink = from_list([1.5], :f32, {1, 1})

    loss = fn parts ->
      {o, lse} = Parts.merge(parts, sink: sink)
      dot = fn x, y -> Enum.sum(Enum.zip_with(to_list(x), to_list(y), &*/2)) end
      dot.(o, dout) + dot.(lse, dlse)
    end

    {o, lse} = Parts.merge(parts, sink: sink)
    {gradients, %Tensor{shape: {1, 1}}} = Parts.gradient(dout, parts, o, lse, dlse: dlse, sink: sink)

    for p <- 0..2, side <- 0..1, at <- indices(byte_size(elem(Enum.at(parts, p), side).data) |> div(8)) do
      moved = fn step ->
        List.update_at(parts, p, fn part -> put_elem(part, side, moved(elem(part, side), at, step)) end)
      end

      slope = (loss.(moved.(1.0e-5)) - loss.(moved.(-1.0e-5))) / 2.0e-5
      assert abs(slope - Enum.at(to_list(elem(Enum.at(gradients, p), side)), at)) < 1.0e-8
    end
  end

  defp moved(tensor, at, step),
    do: tensor |> to_list() |> List.update_at(at, &(&1 + step)) |> from_list(:f64, tensor.shape)

  test "more parts than one call takes have their gradients, too" do
    parts = for seed <- 1..40, do: part(seed, :f32)
    {o, lse} = Parts.merge(parts, sink: sink = from_list([1.0, 2.0, 3.0], :f32, {1, 3}))
    {gradients, dsink} = Parts.gradient(random(9, :f32, @sizes), parts, o, lse, sink: sink)
    assert length(gradients) == 40
    {[last], nil} = Parts.gradient(random(9, :f32, @sizes), [List.last(parts)], o, lse)
    assert List.last(gradients) == last
    assert dsink == Sink.gradient(random(9, :f32, @sizes), o, lse, sink)
  end

  test "errors name what is wrong" do
    {o, lse} = one = part(1, :f32)
    other = random(1, :f32, {2, 5, 3, 5})

    for {message, call} <- [
          {"o of part 1: expected f32[2, 5, 3, 4], got f32[2, 5, 3, 5]",
           fn -> Parts.merge([one, {other, lse}]) end},
          {"lse of part 0: expected f32[2, 3, 5], got f32[2, 5, 3, 4]", fn -> Parts.merge([{o, o}]) end},
          {"sink: expected f32[2, 3], got f32[2, 4]", fn -> Sink.correct(o, lse, random(1, :f32, {2, 4})) end},
          {"sink: expected [num_sinks, num_heads] or [batch, seqlen_q, num_sinks, num_heads], got rank 3",
           fn -> Sink.correct(o, lse, random(1, :f32, {1, 2, 3})) end},
          {"parts: expected a list of {o, lse}, got %{}", fn -> Parts.merge(%{}) end},
          {"opts: expected keys among sink, type, device, results, got :dlse",
           fn -> Parts.merge([one], dlse: lse) end},
          {"type: expected f32, f64, bf16 or f16, got :s8", fn -> Parts.merge([one], type: :s8) end},
          {"o of part 0: expected type f64, as the merged o, got f32", fn -> Parts.merge([one], type: :f64) end}
        ] do
      error = assert_raise Error, call
      assert error.message == message
    end
  end

  @tag :cuda
  test "on the GPU in whose memory they are" do
    parts = for seed <- 1..3, do: part(seed, :bf16)
    expected = expected(parts, no_sinks())
    assert_merged(Parts.merge(parts, device: :cuda), expected, 1.0e-2)
    {o, lse} = Parts.merge(parts, device: :cuda, results: :device)
    assert %FlashAttention.DeviceMemory{device: {:cuda, 0}} = o.data
    assert {%Tensor{data: data}, _lse} = Parts.merge([{o, lse}])
    assert is_binary(data)
  end
end
