defmodule FlashAttention.Test.PlainAttention do
  @moduledoc """
  Attention as its definition reads, in f64 on lists: what the library's results are compared with.

  Takes tensors and the options of `FlashAttention.forward/4`; returns flat lists by name.
  """

  import FlashAttention.Test.Tensors, only: [indices: 1, to_list: 1]
  alias FlashAttention.{Dropout, Mask}

  def forward(q, k, v, opts) do
    {problem, rows} = rows(q, k, v, opts)
    {batch, seqlen_q, num_heads, _head_dim} = problem.shape

    %{
      o: Enum.flat_map(keys(q), &rows[&1].o),
      lse: for(b <- indices(batch), h <- indices(num_heads), i <- indices(seqlen_q), do: rows[{b, i, h}].lse)
    }
  end

  def backward(dout, q, k, v, opts) do
    {problem, rows} = rows(q, k, v, opts)
    douts = vectors(dout)

    # One map of sums for everything; each visible pair of row and column adds to three vectors.
    sums =
      for {{b, i, h} = at, row} <- rows, reduce: %{} do
        sums ->
          dout = douts[at]
          delta = dot(row.o, dout)

          sums =
            for {sink, t} <- Enum.with_index(row.sinks), reduce: sums do
              sums -> add(sums, {:dsink, {t, h}}, [-:math.exp(sink - row.lse) * delta])
            end

          for {j, s} <- row.scores, reduce: sums do
            sums ->
              column = {b, j, div(h, problem.group)}
              p = :math.exp(s.sum - row.lse)
              gradient = p * (s.keep * dot(dout, problem.v[column]) - delta)
              ds = gradient * softcap_derivative(s.capped, problem.softcap)

              sums
              |> add({:dalibi_slopes, {problem.slope_batch.(b), h}}, [-gradient * s.distance])
              |> add({:dbias, problem.bias_place.({b, h, i, j})}, [gradient])
              |> add({:dq, at}, scaled(problem.k[column], problem.scale * ds))
              |> add({:dk, column}, scaled(problem.q[at], problem.scale * ds))
              |> add({:dv, column}, scaled(dout, s.keep * p))
          end
      end

    {_, _, num_heads, head_dim} = problem.shape
    zero = List.duplicate(0.0, head_dim)
    of_heads = fn count -> for t <- indices(count), h <- indices(num_heads), do: {t, h} end

    %{
      dq: Enum.flat_map(keys(q), &Map.get(sums, {:dq, &1}, zero)),
      dk: Enum.flat_map(keys(k), &Map.get(sums, {:dk, &1}, zero)),
      dv: Enum.flat_map(keys(v), &Map.get(sums, {:dv, &1}, zero)),
      dsink: Enum.flat_map(of_heads.(problem.num_sinks), &Map.get(sums, {:dsink, &1}, [0.0])),
      dalibi_slopes: Enum.flat_map(of_heads.(problem.num_slopes), &Map.get(sums, {:dalibi_slopes, &1}, [0.0])),
      dbias: Enum.flat_map(places(opts[:bias]), &Map.get(sums, {:dbias, &1}, [0.0]))
    }
  end

  # Of every row: its visible scores, its sinks, lse and o.
  defp rows(q, k, v, opts) do
    {batch, seqlen_q, num_heads, head_dim} = q.shape
    {_, seqlen_k, num_kv_heads, _} = k.shape
    {left, right} = opts[:window] || {:infinity, :infinity}
    right = if Keyword.get(opts, :causal, true), do: 0, else: right

    bands =
      if mask = opts[:mask],
        do: Mask.bands(mask, {seqlen_q, seqlen_k}),
        else: [[{0, seqlen_q, 0, seqlen_k, :infinity, :infinity}]]

    problem = %{
      shape: q.shape,
      q: vectors(q),
      k: vectors(k),
      v: vectors(v),
      group: div(num_heads, num_kv_heads),
      scale: opts[:scale] || 1 / :math.sqrt(head_dim),
      softcap: opts[:softcap] || 0,
      sinks: if(opts[:sink], do: opts[:sink] |> to_list() |> Enum.chunk_every(num_heads), else: []),
      num_sinks: if(opts[:sink], do: elem(opts[:sink].shape, 0), else: 0),
      slopes: if(opts[:alibi_slopes], do: opts[:alibi_slopes] |> to_list() |> Enum.chunk_every(num_heads)),
      num_slopes: if(opts[:alibi_slopes], do: elem(opts[:alibi_slopes].shape, 0), else: 0),
      bias:
        opts[:bias] |> places() |> Enum.zip(if(opts[:bias], do: to_list(opts[:bias]), else: [])) |> Map.new(),
      hides?: match?(%{type: {:u, 8}}, opts[:bias]),
      bias_place: bias_place(opts[:bias]),
      keep: keep(opts, {batch, num_heads, seqlen_q, seqlen_k}),
      slope_batch: if(match?(%{shape: {1, _}}, opts[:alibi_slopes]), do: fn _b -> 0 end, else: & &1)
    }

    rows =
      for b <- indices(batch), i <- indices(seqlen_q), h <- indices(num_heads), into: %{} do
        visible = visible(Enum.at(bands, min(b, length(bands) - 1)), i, {left, right})
        hidden? = fn {j, _} -> problem.hides? and problem.bias[problem.bias_place.({b, h, i, j})] == 0 end
        {{b, i, h}, row(problem, {b, i, h}, Enum.reject(visible, hidden?), head_dim)}
      end

    {problem, rows}
  end

  # Columns that a row sees, with their distance from the one beside it. Every number is less than :infinity.
  defp visible(bands, i, {window_left, window_right}) do
    for {q_begin, q_end, k_begin, k_end, left, right} <- bands,
        i >= q_begin and i < q_end,
        diagonal = i - q_end + k_end,
        j <- Enum.to_list(k_begin..(k_end - 1)//1),
        diagonal - j <= min(left, window_left) and j - diagonal <= min(right, window_right),
        do: {j, abs(diagonal - j)}
  end

  defp places(nil), do: []

  defp places(%{shape: {batch, heads, rows, columns}}),
    do:
      for(b <- indices(batch), h <- indices(heads), i <- indices(rows), j <- indices(columns), do: {b, h, i, j})

  # Where the bias of a cell lies, whose first three axes may be 1.
  defp bias_place(nil), do: fn _cell -> nil end

  defp bias_place(%{shape: {batch, heads, rows, _}}),
    do: fn {b, h, i, j} -> {min(b, batch - 1), min(h, heads - 1), min(i, rows - 1), j} end

  # What dropout multiplies a cell's probability by.
  defp keep(opts, shape) do
    if seed = opts[:dropout_seed] do
      mask = Dropout.mask(seed, opts[:dropout], shape)
      kept = mask |> places() |> Enum.zip(to_list(mask)) |> Map.new()
      fn cell -> kept[cell] / (1 - Dropout.rounded(opts[:dropout])) end
    else
      fn _cell -> 1.0 end
    end
  end

  defp row(problem, {b, i, h} = at, visible, head_dim) do
    kv = div(h, problem.group)

    scores =
      for {j, distance} <- visible do
        s = problem.scale * dot(problem.q[at], problem.k[{b, j, kv}])
        capped = if problem.softcap == 0, do: s, else: problem.softcap * :math.tanh(s / problem.softcap)

        slope =
          if problem.slopes, do: problem.slopes |> Enum.at(problem.slope_batch.(b)) |> Enum.at(h), else: 0.0

        bias = if problem.hides?, do: 0.0, else: Map.get(problem.bias, problem.bias_place.({b, h, i, j}), 0.0)
        keep = problem.keep.({b, h, i, j})
        {j, %{capped: capped, distance: distance, keep: keep, sum: capped + bias - slope * distance}}
      end

    sinks = Enum.map(problem.sinks, &Enum.at(&1, h))
    lse = log_sum_exp(Enum.map(scores, fn {_j, s} -> s.sum end) ++ sinks)

    o =
      for {j, s} <- scores, reduce: List.duplicate(0.0, head_dim) do
        o -> plus(o, scaled(problem.v[{b, j, kv}], s.keep * :math.exp(s.sum - lse)))
      end

    %{scores: scores, sinks: sinks, lse: lse, o: o}
  end

  defp log_sum_exp([]), do: :neg_infinity

  defp log_sum_exp(scores) do
    largest = Enum.max(scores)
    largest + :math.log(scores |> Enum.map(&:math.exp(&1 - largest)) |> Enum.sum())
  end

  defp softcap_derivative(_s, softcap) when softcap == 0, do: 1.0
  defp softcap_derivative(s, softcap), do: 1 - s * s / (softcap * softcap)

  # %{{batch, row, head} => [head_dim values]}
  defp vectors(%{shape: {_, _, _, head_dim}} = tensor),
    do: tensor |> keys() |> Enum.zip(tensor |> to_list() |> Enum.chunk_every(head_dim)) |> Map.new()

  defp keys(%{shape: {batch, seqlen, heads, _}}),
    do: for(b <- indices(batch), i <- indices(seqlen), h <- indices(heads), do: {b, i, h})

  defp add(sums, key, vector), do: Map.update(sums, key, vector, &plus(&1, vector))
  defp plus(xs, ys), do: Enum.zip_with(xs, ys, &(&1 + &2))
  defp scaled(xs, factor), do: Enum.map(xs, &(&1 * factor))
  defp dot(xs, ys), do: Enum.zip_reduce(xs, ys, 0.0, &(&1 * &2 + &3))
end
