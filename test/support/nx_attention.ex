if Code.ensure_loaded?(Nx) do
  defmodule FlashAttention.Test.NxAttention do
    @moduledoc """
    Attention as one writes it in Nx, with every score in memory: what attention inside defn is compared with, and
    what Nx differentiates for the comparison.
    """

    @doc "The formulas of FlashAttention's documentation, row by row; returns {o, lse}."
    def attention_with_lse(q, k, v, opts \\ []) do
      {batch, seqlen_q, num_heads, head_dim} = Nx.shape(q)
      {_, seqlen_k, num_kv_heads, _} = Nx.shape(k)
      type = Nx.type(q)

      # [batch, num_kv_heads, group, rows, ...]
      split = {batch, seqlen_q, num_kv_heads, div(num_heads, num_kv_heads), head_dim}
      rows = q |> Nx.reshape(split, names: nils(5)) |> Nx.transpose(axes: [0, 2, 3, 1, 4])
      [keys, values] = for t <- [k, v], do: t |> Nx.rename(nils(4)) |> Nx.transpose(axes: [0, 2, 1, 3])

      s =
        rows |> Nx.dot([4], [0, 1], keys, [3], [0, 1]) |> Nx.multiply(opts[:scale] || 1 / :math.sqrt(head_dim))

      s = if cap = opts[:softcap], do: Nx.multiply(Nx.tanh(Nx.divide(s, cap)), cap), else: s
      s = if slopes = opts[:alibi_slopes], do: Nx.subtract(s, distances(slopes, s)), else: s
      s = if bias = opts[:bias], do: biased(s, bias), else: s
      # Nx's gradient of a maximum with -infinity in it is NaN, so what is not visible is merely out of reach.
      s = Nx.select(Nx.broadcast(visible(seqlen_q, seqlen_k, opts), s), s, Nx.tensor(-1.0e30, type: type))

      s = if opts[:sink], do: Nx.concatenate([s, sinks(opts[:sink], s)], axis: 4), else: s
      largest = Nx.reduce_max(s, axes: [4], keep_axes: true) |> Nx.Defn.Kernel.stop_grad()
      weights = Nx.exp(Nx.subtract(s, largest))
      sum = Nx.sum(weights, axes: [4], keep_axes: true)
      p = Nx.divide(weights, sum)[[.., .., .., .., 0..(seqlen_k - 1)]]
      o = Nx.dot(p, [4], [0, 1], values, [2], [0, 1])
      lse = Nx.add(Nx.log(sum), largest)

      {o |> Nx.transpose(axes: [0, 3, 1, 2, 4]) |> Nx.reshape(Nx.shape(q)),
       Nx.reshape(lse, {batch, num_heads, seqlen_q})}
    end

    def attention(q, k, v, opts \\ []), do: attention_with_lse(q, k, v, opts) |> elem(0)

    defp nils(count), do: List.duplicate(nil, count)

    defp biased(s, bias) do
      {_, num_kv_heads, group, _, _} = Nx.shape(s)
      {batch, heads, rows, columns} = Nx.shape(bias)
      {kv, group} = if heads == 1, do: {1, 1}, else: {num_kv_heads, group}
      cells = Nx.reshape(bias, {batch, kv, group, rows, columns})

      if Nx.type(bias) == {:u, 8},
        do: Nx.select(Nx.broadcast(cells, s), s, Nx.tensor(-1.0e30, type: Nx.type(s))),
        else: Nx.add(s, Nx.as_type(cells, Nx.type(s)))
    end

    # [batch, num_kv_heads, group, seqlen_q, seqlen_k]
    defp distances(slopes, s) do
      {_, num_kv_heads, group, seqlen_q, seqlen_k} = Nx.shape(s)

      slopes =
        slopes |> Nx.as_type(Nx.type(s)) |> Nx.reshape({Nx.axis_size(slopes, 0), num_kv_heads, group, 1, 1})

      row = Nx.add(Nx.iota({seqlen_q, seqlen_k}, axis: 0), seqlen_k - seqlen_q)
      Nx.multiply(slopes, Nx.abs(Nx.subtract(row, Nx.iota({seqlen_q, seqlen_k}, axis: 1))))
    end

    # Sinks of every row, or a row's own, as further scores.
    defp sinks(sink, s) do
      {batch, num_kv_heads, group, seqlen_q, _} = Nx.shape(s)
      sink = Nx.as_type(sink, Nx.type(s))

      case Nx.shape(sink) do
        {num_sinks, _} ->
          sink
          |> Nx.transpose()
          |> Nx.reshape({1, num_kv_heads, group, 1, num_sinks})
          |> Nx.broadcast({batch, num_kv_heads, group, seqlen_q, num_sinks})

        {_, _, num_sinks, _} ->
          sink
          |> Nx.transpose(axes: [0, 3, 1, 2])
          |> Nx.reshape({batch, num_kv_heads, group, seqlen_q, num_sinks})
      end
    end

    defp visible(seqlen_q, seqlen_k, opts) do
      {left, right} = opts[:window] || {:infinity, :infinity}
      right = if Keyword.get(opts, :causal, true), do: 0, else: right
      row = Nx.add(Nx.iota({seqlen_q, seqlen_k}, axis: 0), seqlen_k - seqlen_q)
      column = Nx.iota({seqlen_q, seqlen_k}, axis: 1)

      for {distance, size} <- [{Nx.subtract(row, column), left}, {Nx.subtract(column, row), right}],
          size != :infinity,
          reduce: Nx.broadcast(Nx.u8(1), {seqlen_q, seqlen_k}) do
        visible -> Nx.logical_and(visible, Nx.less_equal(distance, size))
      end
    end
  end
end
