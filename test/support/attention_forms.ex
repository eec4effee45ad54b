defmodule FlashAttention.Test.AttentionForms do
  @moduledoc """
  Attention as it stands in models, guides and livebooks, and what looks like it: `{name, what becomes of it}`.

  What is found says which words its description has; what is not, the reason, or `"silent"` where it is no attention.
  """

  def names, do: for({name, expected, _fun, _args} <- forms(), do: {name, expected})

  @doc "The function of that form and its arguments, in that type where it is not one of the form itself."
  def form(name, type \\ {:f, 64}) do
    Process.put(__MODULE__, type)
    {_, _, fun, args} = Enum.find(forms(), fn {other, _, _, _} -> other == name end)
    {fun, args.()}
  end

  # What the form that was asked for last is in.
  defp type, do: Process.get(__MODULE__, {:f, 64})

  @families [
    {"Bumblebee's layer", ~r/^Bumblebee/},
    {"Axon's guides", ~r/^Axon/},
    {"exphil, Edifice", ~r/^(exphil|Edifice)/},
    {"livebooks and courses", ~r/^livebook/}
  ]

  @doc "Forms by where they are from: `{family, names}`, with those that stay."
  def families,
    do: for({family, pattern} <- @families, do: {family, for({name, _} <- names(), name =~ pattern, do: name)})

  @compile {:no_warn_undefined, [Nx, Nx.Constants, Nx.Random, Nx.Defn.Kernel, Nx.Defn.Expr]}

  defp normal(seed, shape, type) do
    {tensor, _key} = Nx.Random.normal(Nx.Random.key(seed), shape: shape, type: type)
    tensor
  end

  defp three(shape), do: fn -> for(seed <- 1..3, do: normal(seed, shape, type())) end
  defp with_more(args, more), do: fn -> args.() ++ more.() end

  defp stable(s, axis \\ -1) do
    m = s |> Nx.reduce_max(axes: [axis], keep_axes: true) |> Nx.Defn.Kernel.stop_grad()
    e = Nx.exp(Nx.subtract(s, m))
    {e, Nx.sum(e, axes: [axis], keep_axes: true)}
  end

  defp softmax(s, axis \\ -1) do
    {e, sum} = stable(s, axis)
    Nx.divide(e, sum)
  end

  # Axon.Activations.softmax.
  defp reciprocal(s) do
    {e, sum} = stable(s)
    s |> then(fn _ -> Nx.multiply(Nx.divide(1, sum), e) end) |> Nx.Defn.Expr.metadata(%{logits: s})
  end

  defp scores(q, k), do: Nx.dot(q, [3], [0, 1], k, [3], [0, 1])
  defp values(p, v), do: Nx.dot(p, [3], [0, 1], v, [2], [0, 1])
  defp c(number), do: Nx.tensor(number, type: type())

  defp causal(rows, columns, shift \\ 0),
    do: Nx.greater_equal(Nx.add(Nx.iota({rows, 1}), shift), Nx.iota({1, columns}))

  defp all(mask, s), do: Nx.broadcast(mask, Nx.shape(s))
  defp hide(s, mask, fill), do: Nx.select(all(mask, s), s, fill)

  # Bumblebee's attention: [batch, seqlen, heads, head_dim].
  defp bumblebee(q, k, v, mask) do
    [q, k, v] = for t <- [q, k, v], do: Nx.transpose(t, axes: [0, 2, 1, 3])
    s = Nx.multiply(scores(q, k), 1 / :math.sqrt(Nx.axis_size(q, 3)))
    mask = Nx.logical_and(Nx.broadcast(1, {1, 1, 1, 1}), mask |> Nx.new_axis(0) |> Nx.new_axis(0))
    bias = Nx.select(mask, c(0.0), Nx.Constants.min_finite(type()))
    s |> Nx.add(bias) |> reciprocal() |> values(v) |> Nx.transpose(axes: [0, 2, 1, 3])
  end

  # Blocks of keys one after the other, with the maximum and the sum so far.
  defp online(q, k, v, scores, start \\ Nx.Constants.neg_infinity(type())) do
    {_m, sum, o} =
      Enum.reduce(0..1, {start, c(0.0), c(0.0)}, fn n, {m, sum, o} ->
        [k, v] = for t <- [k, v], do: Nx.slice_along_axis(t, 3 * n, 3, axis: 2)
        s = scores.(scores(q, k), 3 * n)
        largest = s |> Nx.reduce_max(axes: [3], keep_axes: true) |> Nx.max(m)
        e = Nx.exp(Nx.subtract(s, largest))
        correction = Nx.exp(Nx.subtract(m, largest))
        sum = Nx.add(Nx.multiply(sum, correction), Nx.sum(e, axes: [3], keep_axes: true))
        {largest, sum, Nx.add(Nx.multiply(o, correction), values(e, v))}
      end)

    Nx.divide(o, sum)
  end

  # As Edifice has it: of rank 3, in blocks of four keys and what is left, with maxima that have no axis of columns.
  defp memory_efficient(q, k, v) do
    {batch, rows, _dim} = Nx.shape(q)
    columns = Nx.axis_size(k, 1)
    infinity = Nx.Constants.neg_infinity(type())

    start =
      {Nx.broadcast(infinity, {batch, rows}), Nx.broadcast(c(0.0), {batch, rows}), Nx.broadcast(c(0.0), q)}

    {_m, sum, o} =
      Enum.reduce(0..div(columns - 1, 4), start, fn n, {m, sum, o} ->
        size = min(4, columns - 4 * n)
        [k, v] = for t <- [k, v], do: Nx.slice_along_axis(t, 4 * n, size, axis: 1)
        s = Nx.divide(Nx.dot(q, [2], [0], k, [2], [0]), 2)
        visible = Nx.greater_equal(Nx.iota({rows, 1}), Nx.add(Nx.iota({1, size}), 4 * n))
        s = Nx.select(all(Nx.new_axis(visible, 0), s), s, all(infinity, s))
        largest = Nx.max(m, Nx.reduce_max(s, axes: [2]))
        correction = Nx.exp(Nx.subtract(m, largest))
        e = Nx.exp(Nx.subtract(s, Nx.new_axis(largest, 2)))
        sum = Nx.add(Nx.multiply(sum, correction), Nx.sum(e, axes: [2]))
        o = Nx.add(Nx.multiply(o, Nx.new_axis(correction, 2)), Nx.dot(e, [2], [0], v, [1], [0]))
        {largest, sum, o}
      end)

    Nx.divide(o, Nx.new_axis(sum, 2))
  end

  # Two halves, each with its maximum and its sum, put together.
  defp halves(q, k, v, values_from \\ [0, 3]) do
    [{m, l, o}, {n, r, p}] =
      for {of_k, of_v} <- Enum.zip([0, 3], values_from) do
        [k, v] = for {t, from} <- [{k, of_k}, {v, of_v}], do: Nx.slice_along_axis(t, from, 3, axis: 2)
        s = scores(q, k)
        m = Nx.reduce_max(s, axes: [3], keep_axes: true)
        {e, l} = {Nx.exp(Nx.subtract(s, m)), Nx.exp(Nx.subtract(s, m)) |> Nx.sum(axes: [3], keep_axes: true)}
        {m, l, Nx.divide(values(e, v), l)}
      end

    largest = Nx.max(m, n)
    [l, r] = for {m, l} <- [{m, l}, {n, r}], do: Nx.multiply(l, Nx.exp(Nx.subtract(m, largest)))
    Nx.divide(Nx.add(Nx.multiply(o, l), Nx.multiply(p, r)), Nx.add(l, r))
  end

  defp repeat(t, times) do
    {b, s, h, d} = Nx.shape(t)
    t |> Nx.new_axis(3) |> Nx.broadcast({b, s, h, times, d}) |> Nx.reshape({b, s, h * times, d})
  end

  # Edifice's Swin: windows of 2 x 2 are cut out of images of 4 x 4 behind the projections, [batch, 16, heads * 3].
  defp windows(q, k, v, change) do
    [q, k, v] =
      for t <- [q, k, v] do
        t
        |> Nx.reshape({2, 2, 2, 2, 2, 6})
        |> Nx.transpose(axes: [0, 1, 3, 2, 4, 5])
        |> Nx.reshape({8, 4, 2, 3})
        |> Nx.transpose(axes: [0, 2, 1, 3])
      end

    scores(q, k)
    |> Nx.multiply(0.5)
    |> change.()
    |> softmax()
    |> values(v)
    |> Nx.transpose(axes: [0, 2, 1, 3])
    |> Nx.reshape({2, 2, 2, 2, 2, 6})
    |> Nx.transpose(axes: [0, 1, 3, 2, 4, 5])
    |> Nx.reshape({2, 16, 6})
  end

  # Where the library adds no tensor to scores, what would need one stays.
  defp needs_bias(expected),
    do: if(Keyword.has_key?(FlashAttention.Options.tensors(), :bias), do: expected, else: "needs bias")

  defp forms do
    four = three({2, 3, 6, 4})
    bshd = three({2, 6, 3, 4})
    flat = three({2, 6, 4})
    two = three({6, 4})

    [
      # ---- F1: Bumblebee
      {"Bumblebee, causal", "found: causal", &bumblebee(&1, &2, &3, causal(6, 6)), bshd},
      {"Bumblebee, everything visible", "found", &bumblebee(&1, &2, &3, Nx.broadcast(1, {1, 1})), bshd},
      {"Bumblebee, a window", "found: window {2, 0}",
       fn q, k, v ->
         distance = Nx.subtract(Nx.iota({6, 1}), Nx.iota({1, 6}))
         bumblebee(q, k, v, Nx.logical_and(Nx.greater_equal(2, distance), Nx.greater_equal(distance, 0)))
       end, bshd},
      {"Bumblebee, grouped heads", "found: heads 4:2, causal",
       fn q, k, v -> bumblebee(q, repeat(k, 2), repeat(v, 2), causal(6, 6)) end,
       fn ->
         [normal(1, {2, 6, 4, 4}, type()), normal(2, {2, 6, 2, 4}, type()), normal(3, {2, 6, 2, 4}, type())]
       end},
      {"Bumblebee, a cache of fixed size", "found: a mask known at run time",
       fn q, k, v, offset -> bumblebee(q, k, v, causal(2, 6, offset)) end,
       fn ->
         [
           normal(1, {2, 2, 3, 4}, type()),
           normal(2, {2, 6, 3, 4}, type()),
           normal(3, {2, 6, 3, 4}, type()),
           Nx.tensor(3)
         ]
       end},
      {"Bumblebee, a mask of keys", needs_bias("found: mean, a mask of single scores"),
       fn q, k, v, mask -> bumblebee(q, k, v, Nx.reshape(mask, {1, 6})) end,
       with_more(bshd, fn -> [Nx.tensor([1, 1, 0, 1, 1, 1])] end)},
      # ---- F2, F3: Axon
      {"Axon's softmax", "found",
       fn q, k, v -> scores(q, k) |> Nx.multiply(0.5) |> reciprocal() |> values(v) end, four},
      # ---- F4: rank 3, f32 inside, no stop_grad
      {"exphil, rank 3, -1.0e9", "found: causal",
       fn q, k, v ->
         s = Nx.divide(Nx.dot(q, [2], [0], k, [2], [0]), 2.0)
         s = hide(s, causal(6, 6), -1.0e9)
         e = Nx.exp(Nx.subtract(s, Nx.reduce_max(s, axes: [-1], keep_axes: true)))
         Nx.dot(Nx.divide(e, Nx.sum(e, axes: [-1], keep_axes: true)), [2], [0], v, [1], [0])
       end, flat},
      {"a little more in the sum, in f64", "silent",
       fn q, k, v ->
         {e, sum} = stable(scores(q, k))
         values(Nx.divide(e, Nx.add(sum, 1.0e-8)), v)
       end, four},
      {"exphil, slices of one dense", "found: causal",
       fn qkv, _k, _v ->
         [q, k, v] =
           for n <- 0..2, do: qkv |> Nx.slice_along_axis(n * 12, 12, axis: 2) |> Nx.reshape({2, 6, 3, 4})

         bumblebee(q, k, v, causal(6, 6))
       end, three({2, 6, 36})},
      {"exphil, a table as a mask", "found: causal",
       fn q, k, v ->
         table = for i <- 0..5, do: for(j <- 0..5, do: if(j <= i, do: 1, else: 0))
         scores(q, k) |> hide(Nx.tensor(table, backend: Nx.BinaryBackend), -1.0e9) |> softmax() |> values(v)
       end, four},
      {"exphil, a table that is added", "found: causal",
       fn q, k, v ->
         table = for i <- 0..5, do: for(j <- 0..5, do: if(j <= i, do: 0.0, else: -1.0e9))

         scores(q, k)
         |> Nx.add(Nx.tensor(table, type: type(), backend: Nx.BinaryBackend))
         |> softmax()
         |> values(v)
       end, four},
      {"slopes of distances", needs_bias("found: a bias"),
       fn q, k, v ->
         distance = Nx.subtract(Nx.iota({1, 6}), Nx.iota({6, 1}))
         scores(q, k) |> Nx.add(Nx.multiply(distance, 0.25)) |> softmax() |> values(v)
       end, four},
      {"exphil, ALiBi, causal", "found: causal, slopes of distances",
       fn q, k, v, slopes ->
         distance = Nx.subtract(Nx.iota({1, 6}), Nx.iota({6, 1}))
         bias = Nx.multiply(Nx.reshape(slopes, {1, 3, 1, 1}), distance)

         scores(q, k)
         |> Nx.multiply(0.5)
         |> Nx.add(bias)
         |> hide(causal(6, 6), -1.0e9)
         |> softmax()
         |> values(v)
       end, with_more(four, fn -> [Nx.tensor([0.5, 0.25, 0.125])] end)},
      {"ALiBi of columns alone, causal, more of them than rows", "found: causal, slopes of distances",
       fn q, k, v, slopes ->
         bias = Nx.multiply(Nx.reshape(slopes, {1, 3, 1, 1}), Nx.iota({1, 1, 1, 6}))
         scores(q, k) |> Nx.add(bias) |> hide(causal(4, 6, 2), -1.0e9) |> softmax() |> values(v)
       end,
       fn ->
         [normal(1, {2, 3, 4, 4}, type()), normal(2, {2, 3, 6, 4}, type()), normal(3, {2, 3, 6, 4}, type())] ++
           [Nx.tensor([0.5, 0.25, 0.125])]
       end},
      {"ALiBi on both sides", "found: slopes of distances",
       fn q, k, v, slopes ->
         distance = Nx.abs(Nx.subtract(Nx.iota({6, 1}), Nx.iota({1, 6})))
         bias = Nx.multiply(distance, Nx.negate(Nx.reshape(slopes, {3, 1, 1})))
         scores(q, k) |> Nx.add(bias) |> softmax() |> values(v)
       end, with_more(four, fn -> [Nx.tensor([0.5, 0.25, 0.125])] end)},
      {"slopes that rows see beyond", "found: a bias",
       fn q, k, v, slopes ->
         bias = Nx.multiply(Nx.reshape(slopes, {1, 3, 1, 1}), Nx.iota({1, 1, 1, 6}))
         scores(q, k) |> Nx.add(bias) |> hide(causal(6, 6, 1), -1.0e9) |> softmax() |> values(v)
       end, with_more(four, fn -> [Nx.tensor([0.5, 0.25, 0.125])] end)},
      {"distances from another diagonal", "found: a bias",
       fn q, k, v, slopes ->
         distance = Nx.abs(Nx.subtract(Nx.iota({6, 1}), Nx.add(1, Nx.iota({1, 6}))))
         bias = Nx.multiply(distance, Nx.reshape(slopes, {3, 1, 1}))
         scores(q, k) |> Nx.add(bias) |> softmax() |> values(v)
       end, with_more(four, fn -> [Nx.tensor([0.5, 0.25, 0.125])] end)},
      {"squares of distances", "found: a bias",
       fn q, k, v, slopes ->
         distance = Nx.subtract(Nx.iota({6, 1}), Nx.iota({1, 6}))
         bias = Nx.multiply(Nx.multiply(distance, distance), Nx.reshape(slopes, {3, 1, 1}))
         scores(q, k) |> Nx.add(bias) |> hide(causal(6, 6), -1.0e9) |> softmax() |> values(v)
       end, with_more(four, fn -> [Nx.tensor([0.5, 0.25, 0.125])] end)},
      {"slopes in f64", "found: a bias",
       fn q, k, v, slopes ->
         bias = Nx.multiply(Nx.reshape(slopes, {1, 3, 1, 1}), Nx.iota({1, 1, 1, 6}))
         scores(q, k) |> Nx.add(bias) |> hide(causal(6, 6), -1.0e9) |> softmax() |> values(v)
       end, with_more(four, fn -> [c([0.5, 0.3, 0.1])] end)},
      {"exphil, in f32 inside, a little more in the sum", "found: causal",
       fn q, k, v ->
         s = scores(q, k) |> Nx.divide(2.0) |> hide(causal(6, 6), -1.0e9) |> Nx.as_type(:f32)
         e = Nx.exp(Nx.subtract(s, Nx.reduce_max(s, axes: [-1], keep_axes: true)))
         p = Nx.divide(e, Nx.add(Nx.sum(e, axes: [-1], keep_axes: true), 1.0e-8))
         p |> Nx.as_type(type()) |> values(v)
       end, four},
      {"exphil, grouped heads by reshapes", "found: heads 4:2",
       fn q, k, v ->
         more = fn t ->
           t |> Nx.reshape({2, 2, 1, 6, 4}) |> Nx.broadcast({2, 2, 2, 6, 4}) |> Nx.reshape({2, 4, 6, 4})
         end

         s = scores(q, more.(k)) |> Nx.multiply(0.5)
         s |> softmax() |> values(more.(v))
       end,
       fn ->
         [normal(1, {2, 4, 6, 4}, type()), normal(2, {2, 2, 6, 4}, type()), normal(3, {2, 2, 6, 4}, type())]
       end},
      {"exphil, chunks of queries", "chunks: 2",
       fn q, k, v ->
         for n <- 0..1 do
           rows = Nx.slice_along_axis(q, 3 * n, 3, axis: 2)
           scores(rows, k) |> hide(causal(3, 6, 3 * n), -1.0e9) |> softmax() |> values(v)
         end
         |> Nx.concatenate(axis: 2)
       end, four},
      {"Edifice, windows of images, under a bias", needs_bias("found: seqlen 4 x 4, a bias"),
       fn q, k, v, bias -> windows(q, k, v, &Nx.add(&1, bias)) end,
       with_more(three({2, 16, 6}), fn -> [normal(7, {1, 2, 4, 4}, type())] end)},
      {"windows of images, causal", "found: seqlen 4 x 4, heads 2:2, causal",
       fn q, k, v -> windows(q, k, v, &hide(&1, causal(4, 4), -1.0e9)) end, three({2, 16, 6})},
      {"windows of images, with slopes", needs_bias("found: seqlen 4 x 4, slopes of distances"),
       fn q, k, v, slopes ->
         distance = Nx.abs(Nx.subtract(Nx.iota({4, 1}), Nx.iota({1, 4})))
         windows(q, k, v, &Nx.subtract(&1, Nx.multiply(distance, Nx.reshape(slopes, {2, 1, 1}))))
       end, with_more(three({2, 16, 6}), fn -> [Nx.tensor([0.5, 0.25])] end)},
      # ---- blocks of keys, and sums that are divided by last
      {"exphil, blocks of keys, one after the other", "forward", &online(&1, &2, &3, fn s, _from -> s end),
       four},
      {"Edifice, blocks of keys of several sizes, causal", "forward: causal, scale 0.5", &memory_efficient/3,
       flat},
      {"Edifice, blocks of keys of slices of one dense", "forward: causal",
       fn qkv, _k, _v ->
         [q, k, v] = for n <- 0..2, do: Nx.slice_along_axis(qkv, 4 * n, 4, axis: 2)
         memory_efficient(q, k, v)
       end, three({2, 6, 12})},
      {"blocks of keys, each divided by its sum", "forward", &halves/3, four},
      {"blocks of keys with masks, biases and scales of their own", "forward: a bias, a mask of single scores",
       fn q, k, v, bias, mask ->
         online(q, k, v, fn s, from ->
           bias = Nx.slice_along_axis(bias, from, 3, axis: 2)
           mask = Nx.slice_along_axis(mask, from, 3, axis: 0)
           s |> Nx.multiply(0.5) |> Nx.add(bias) |> hide(Nx.greater(mask, 0), -1.0e9)
         end)
       end, with_more(four, fn -> [normal(7, {3, 6, 6}, type()), Nx.tensor([1, 0, 1, 0, 1, 1])] end)},
      {"blocks of keys, lengths and softcap", "forward: softcap 3.0, a mask known at run time",
       fn q, k, v, lengths ->
         online(q, k, v, fn s, from ->
           visible = Nx.less(Nx.add(Nx.iota({1, 1, 1, 3}), from), Nx.reshape(lengths, {2, 1, 1, 1}))
           s |> Nx.divide(3) |> Nx.tanh() |> Nx.multiply(3) |> hide(visible, -1.0e9)
         end)
       end, with_more(four, fn -> [Nx.tensor([4, 2])] end)},
      {"blocks of keys, rows that see nothing", "forward: mean",
       fn q, k, v -> online(q, k, v, &hide(&1, causal(6, 3, -2 - &2), -1.0e9)) end, four},
      {"blocks of keys, a maximum that begins with what hides", "forward: causal",
       fn q, k, v -> online(q, k, v, &hide(&1, causal(6, 3, -&2), -1.0e9), c(-1.0e9)) end, four},
      {"blocks of keys, rows that see nothing of the first by -infinity", "may be NaN",
       fn q, k, v ->
         online(q, k, v, fn s, from ->
           behind = Nx.less_equal(Nx.iota({6, 1}), Nx.add(Nx.iota({1, 3}), from))
           hide(s, behind, Nx.Constants.neg_infinity(type()))
         end)
       end, four},
      {"blocks of keys, a maximum that begins with 0", "begins with a number",
       fn q, k, v -> online(q, k, v, fn s, _from -> s end, c(0.0)) end, four},
      {"blocks of keys beside others' values", "not parts of the same", &halves(&1, &2, &3, [3, 0]), four},
      {"livebook, the sum divided by last", "found: causal, scale 0.5",
       fn q, k, v ->
         {e, sum} = q |> scores(k) |> Nx.divide(2) |> hide(causal(6, 6), -1.0e9) |> stable()
         Nx.divide(values(e, v), sum)
       end, four},
      {"the sum divided by last, of a maximum that is differentiated", "forward",
       fn q, k, v ->
         s = scores(q, k)
         e = Nx.exp(Nx.subtract(s, Nx.reduce_max(s, axes: [3], keep_axes: true)))
         Nx.divide(values(e, v), Nx.sum(e, axes: [3], keep_axes: true))
       end, four},
      {"livebook, a mask cut out of an argument", "found: a mask of single scores",
       fn q, k, v, mask ->
         mask = mask |> Nx.slice([0, 0], [6, 6]) |> Nx.greater(0.0)
         s = scores(q, k)
         Nx.select(all(mask, s), Nx.Constants.neg_infinity(type()), s) |> Nx.divide(2) |> softmax() |> values(v)
       end, with_more(four, fn -> [Nx.triu(Nx.broadcast(c(1.0), {8, 8}), k: 1)] end)},
      {"livebook, k and v of a batch of one", "found",
       fn q, k, v -> Nx.dot(softmax(Nx.divide(Nx.dot(q, [2], k, [1]), 2)), [2], v, [0]) end,
       fn -> [normal(1, {2, 6, 4}, type()), normal(2, {6, 4}, type()), normal(3, {6, 4}, type())] end},
      {"livebook, weights under the mask, by their sum", "silent",
       fn q, k, v ->
         p = softmax(scores(q, k)) |> Nx.multiply(causal(6, 6))
         values(Nx.divide(p, Nx.sum(p, axes: [-1], keep_axes: true)), v)
       end, four},
      {"Axon, causal, its softmax", "found: causal",
       fn q, k, v ->
         scores(q, k) |> Nx.multiply(0.5) |> hide(causal(6, 6), -1.0e9) |> reciprocal() |> values(v)
       end, four},
      # ---- F5: livebooks
      {"livebook, rank 2", "found",
       fn q, k, v -> Nx.dot(softmax(Nx.divide(Nx.dot(q, [1], [], k, [1], []), 2)), v) end, two},
      {"livebook, rank 2, k transposed", "found",
       fn q, k, v -> Nx.dot(softmax(Nx.dot(q, Nx.transpose(k))), v) end, two},
      {"livebook, the fill where the mask is 1", "found: causal",
       fn q, k, v ->
         mask = Nx.greater(Nx.triu(Nx.broadcast(1, {6, 6}), k: 1), 0)
         s = scores(q, k)
         Nx.select(all(mask, s), Nx.Constants.neg_infinity(type()), s) |> softmax() |> values(v)
       end, four},
      {"livebook, the mask before the scale", "found: causal, scale 0.25",
       fn q, k, v -> scores(q, k) |> hide(causal(6, 6), -1.0e9) |> Nx.divide(4) |> softmax() |> values(v) end,
       four},
      {"livebook, tril", "found: causal",
       fn q, k, v ->
         scores(q, k) |> hide(Nx.tril(Nx.broadcast(1, {6, 6})), -1.0e9) |> softmax() |> values(v)
       end, four},
      {"livebook, no maximum", "found",
       fn q, k, v ->
         s = scores(q, k)
         values(Nx.divide(Nx.exp(s), Nx.sum(Nx.exp(s), axes: [-1], keep_axes: true)), v)
       end, four},
      {"livebook, a scale that is an argument", "found: a scale known at run time",
       fn q, k, v, scale -> scores(q, k) |> Nx.multiply(scale) |> softmax() |> values(v) end,
       with_more(four, fn -> [c(0.3)] end)},
      {"livebook, a scale on q", "found: scale 1.0",
       fn q, k, v -> q |> Nx.multiply(0.5) |> scores(k) |> softmax() |> values(v) end, four},
      {"livebook, a power of head_dim", "found: scale 0.5",
       fn q, k, v -> scores(q, k) |> Nx.divide(Nx.pow(Nx.axis_size(q, 3), 0.5)) |> softmax() |> values(v) end,
       four},
      {"livebook, roots on q and k", "found",
       fn q, k, v ->
         q |> Nx.divide(:math.sqrt(2)) |> scores(Nx.divide(k, :math.sqrt(2))) |> softmax() |> values(v)
       end, four},
      {"a negated product, subtracted", "found",
       fn q, k, v -> Nx.subtract(0, scores(q, Nx.negate(k))) |> softmax() |> values(v) end, four},
      {"livebook, own dropout by other bits", "dropped out",
       fn q, k, v ->
         p = softmax(scores(q, k))
         values(Nx.select(Nx.less(Nx.remainder(Nx.iota({2, 3, 6, 6}), 5), 1), 0.0, p), v)
       end, four},
      {"lengths that are arguments", "found: a mask known at run time",
       fn q, k, v, lengths ->
         mask = Nx.less(Nx.iota({1, 1, 1, 6}), Nx.reshape(lengths, {2, 1, 1, 1}))
         scores(q, k) |> hide(mask, -1.0e9) |> softmax() |> values(v)
       end, with_more(four, fn -> [Nx.tensor([4, 0])] end)},
      {"lengths and causal, -infinity", "found: a mask known at run time, NaN",
       fn q, k, v, lengths ->
         mask = Nx.logical_and(Nx.less(Nx.iota({1, 1, 1, 6}), Nx.reshape(lengths, {2, 1, 1, 1})), causal(6, 6))
         scores(q, k) |> hide(mask, Nx.Constants.neg_infinity(type())) |> softmax() |> values(v)
       end, with_more(four, fn -> [Nx.tensor([4, 5])] end)},
      {"documents", needs_bias("found: a mask of single scores"),
       fn q, k, v, ids ->
         mask = Nx.equal(Nx.reshape(ids, {1, 1, 6, 1}), Nx.reshape(ids, {1, 1, 1, 6}))
         scores(q, k) |> hide(mask, -1.0e9) |> softmax() |> values(v)
       end, with_more(four, fn -> [Nx.tensor([1, 1, 2, 2, 2, 3])] end)},
      {"a softcap", "found: softcap 3.0",
       fn q, k, v -> scores(q, k) |> Nx.divide(3) |> Nx.tanh() |> Nx.multiply(3) |> softmax() |> values(v) end,
       four},
      {"rows that see nothing", "found: mean",
       fn q, k, v -> scores(q, k) |> hide(causal(6, 6, -2), -1.0e9) |> softmax() |> values(v) end, four},
      {"rows that see nothing, by what is added", "found: mean",
       fn q, k, v ->
         hidden = Nx.select(causal(6, 6, -2), c(0.0), Nx.Constants.min_finite(type()))
         scores(q, k) |> Nx.multiply(0.5) |> Nx.add(hidden) |> softmax() |> values(v)
       end, four},
      {"rows that see nothing, grouped, by what is added", "found: heads 4:2, mean",
       fn q, k, v, mask ->
         bumblebee(q, repeat(k, 2), repeat(v, 2), Nx.logical_and(Nx.reshape(mask, {1, 6}), causal(6, 6)))
       end,
       fn ->
         [
           normal(1, {2, 6, 4, 4}, type()),
           normal(2, {2, 6, 2, 4}, type()),
           normal(3, {2, 6, 2, 4}, type()),
           Nx.tensor([0, 0, 1, 0, 1, 1])
         ]
       end},
      {"one row of queries", "found", fn q, k, v -> scores(q, k) |> softmax() |> values(v) end,
       fn ->
         [normal(1, {2, 3, 1, 4}, type()), normal(2, {2, 3, 6, 4}, type()), normal(3, {2, 3, 6, 4}, type())]
       end},
      {"values of another size", "found: head_dim 7", fn q, k, v -> scores(q, k) |> softmax() |> values(v) end,
       fn ->
         [normal(1, {2, 3, 6, 4}, type()), normal(2, {2, 3, 5, 4}, type()), normal(3, {2, 3, 5, 7}, type())]
       end},
      {"values of two axes", "found: head_dim 6",
       fn q, k, v -> Nx.dot(softmax(Nx.dot(q, [2], [0], k, [2], [0])), [2], [0], v, [1], [0]) end,
       fn -> [normal(1, {2, 5, 4}, type()), normal(2, {2, 6, 4}, type()), normal(3, {2, 6, 3, 2}, type())] end},
      {"values of two axes alike", "found: head_dim 9",
       fn q, k, v ->
         v = Nx.transpose(v, axes: [3, 0, 2, 1])

         Nx.dot(softmax(Nx.dot(q, [2], [0], k, [2], [0])), [2], [0], Nx.transpose(v, axes: [1, 0, 2, 3]), [3], [
           0
         ])
       end,
       fn -> [normal(1, {2, 5, 4}, type()), normal(2, {2, 6, 4}, type()), normal(3, {2, 6, 3, 3}, type())] end},
      {"keys of all batches", "found", fn q, k, v -> Nx.dot(softmax(Nx.dot(q, [3], k, [1])), [3], v, [0]) end,
       fn -> [normal(1, {2, 3, 6, 4}, type()), normal(2, {5, 4}, type()), normal(3, {5, 4}, type())] end},
      {"weights of heads that are switched off", "found",
       fn q, k, v, heads ->
         scores(q, k) |> reciprocal() |> Nx.multiply(Nx.reshape(heads, {1, 3, 1, 1})) |> values(v)
       end, with_more(four, fn -> [c([1.0, 0.0, 0.5])] end)},
      {"weights of rows that are switched off", "found",
       fn q, k, v ->
         p = softmax(scores(q, k))
         values(Nx.select(all(Nx.less(Nx.iota({6, 1}), 4), p), p, c(0.0)), v)
       end, four},
      {"weights of rows that are switched off, by what runs along the columns, too", "found",
       fn q, k, v ->
         rows = Nx.logical_and(Nx.less(Nx.iota({6, 1}), 4), Nx.broadcast(1, {6, 6}))
         p = softmax(scores(q, k))
         values(Nx.multiply(p, rows), v)
       end, four},
      {"weights times their sum, by that and what their rows say", "silent",
       fn q, k, v ->
         {e, sum} = stable(scores(q, k))
         more = Nx.multiply(sum, Nx.add(0.5, Nx.iota({6, 1}, type: type())))
         values(Nx.divide(Nx.multiply(e, sum), more), v)
       end, four},
      {"a bias of positions", needs_bias("found: a bias, scale 0.5"),
       fn q, k, v, bias -> scores(q, k) |> Nx.multiply(0.5) |> Nx.add(bias) |> reciprocal() |> values(v) end,
       with_more(four, fn -> [normal(7, {1, 3, 6, 6}, type())] end)},
      {"a bias of positions under a mask of keys", needs_bias("found: a bias, a mask of single scores"),
       fn q, k, v, bias, mask ->
         mask = Nx.reshape(mask, {2, 1, 1, 6})
         s = scores(q, k)

         bias =
           Nx.select(
             Nx.broadcast(mask, {2, 3, 6, 6}),
             Nx.broadcast(bias, {2, 3, 6, 6}),
             Nx.Constants.min_finite(type())
           )

         s |> Nx.add(bias) |> reciprocal() |> values(v)
       end,
       with_more(four, fn ->
         [normal(7, {1, 3, 6, 6}, type()), Nx.tensor([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 0, 1]])]
       end)},
      # ---- F6: sinks
      {"a sink in the denominator", "found: 1 sink",
       fn q, k, v, sink ->
         s = scores(q, k)
         sink = Nx.reshape(sink, {1, 3, 1, 1})
         m = s |> Nx.reduce_max(axes: [3], keep_axes: true) |> Nx.max(sink) |> Nx.Defn.Kernel.stop_grad()
         e = Nx.exp(Nx.subtract(s, m))
         values(Nx.divide(e, Nx.add(Nx.sum(e, axes: [3], keep_axes: true), Nx.exp(Nx.subtract(sink, m)))), v)
       end, with_more(four, fn -> [Nx.tensor([0.3, -0.2, 1.0])] end)},
      {"a sink in f64", "in f32",
       fn q, k, v, sink ->
         column = sink |> Nx.reshape({1, 3, 1, 1}) |> Nx.broadcast({2, 3, 6, 1})

         Nx.concatenate([scores(q, k), column], axis: 3)
         |> softmax()
         |> Nx.slice_along_axis(0, 6, axis: 3)
         |> values(v)
       end, with_more(four, fn -> [c([0.3, -0.2, 1.0])] end)},
      {"a sink as a column, causal", "found: 1 sink, causal",
       fn q, k, v, sink ->
         s = scores(q, k) |> hide(causal(6, 6), -1.0e9)
         column = sink |> Nx.reshape({1, 3, 1, 1}) |> Nx.broadcast({2, 3, 6, 1})
         Nx.concatenate([s, column], axis: 3) |> softmax() |> Nx.slice_along_axis(0, 6, axis: 3) |> values(v)
       end, with_more(four, fn -> [Nx.tensor([0.3, -0.2, 1.0])] end)},
      # ---- what looks like it
      {"all axes transposed", "silent",
       fn q, k, v -> Nx.dot(softmax(Nx.dot(q, Nx.transpose(k))), [1, 2], v, [1, 0]) end, three({4, 4, 4})},
      {"a softmax of columns", "silent", fn q, k, v -> Nx.dot(softmax(Nx.dot(q, [1], k, [1]), 0), v) end, two},
      {"sigmoid attention", "silent", fn q, k, v -> scores(q, k) |> Nx.sigmoid() |> values(v) end, four},
      {"retention", "silent", fn q, k, v -> scores(q, k) |> Nx.multiply(causal(6, 6)) |> values(v) end, four},
      {"linear attention", "silent", fn q, k, v -> scores(q, k) |> values(v) end, four},
      {"talking heads", "not those of the same batches",
       fn q, k, v ->
         mix = Nx.iota({3, 3}, type: type())
         scores(q, k) |> Nx.dot([1], mix, [0]) |> Nx.transpose(axes: [0, 3, 1, 2]) |> softmax() |> values(v)
       end, four},
      {"softmax and one", "silent",
       fn q, k, v ->
         {e, sum} = stable(scores(q, k))
         values(Nx.divide(e, Nx.add(sum, 1)), v)
       end, four},
      {"softpick", "silent",
       fn q, k, v ->
         e = Nx.subtract(Nx.exp(scores(q, k)), 1)
         values(Nx.divide(Nx.max(e, 0), Nx.sum(Nx.abs(e), axes: [-1], keep_axes: true)), v)
       end, four},
      {"scores scaled by their row", "multiplied by",
       fn q, k, v ->
         n = Nx.log(Nx.add(2, Nx.iota({6, 1}, type: type())))
         scores(q, k) |> Nx.multiply(n) |> softmax() |> values(v)
       end, four},
      {"cosine attention", "found",
       fn q, k, v ->
         unit = fn t -> Nx.divide(t, Nx.sqrt(Nx.sum(Nx.multiply(t, t), axes: [-1], keep_axes: true))) end
         unit.(q) |> scores(unit.(k)) |> softmax() |> values(v)
       end, four},
      {"exponentials of values", "found", fn q, k, v -> scores(q, k) |> softmax() |> values(Nx.exp(v)) end,
       four},
      {"the largest scores only", needs_bias("a result themselves"),
       fn q, k, v ->
         s = scores(q, k)
         least = Nx.sort(s, axis: 3) |> Nx.slice_along_axis(3, 1, axis: 3)
         s |> then(&Nx.select(Nx.greater_equal(&1, least), &1, -1.0e9)) |> softmax() |> values(v)
       end, four},
      {"a softcap after the mask", "tanh is taken of more",
       fn q, k, v ->
         scores(q, k)
         |> hide(causal(6, 6), -1.0e9)
         |> Nx.divide(3)
         |> Nx.tanh()
         |> Nx.multiply(3)
         |> softmax()
         |> values(v)
       end, four},
      {"hidden scores of 0", "does not hide",
       fn q, k, v -> scores(q, k) |> hide(causal(6, 6), 0.0) |> softmax() |> values(v) end, four},
      {"a mask that is multiplied", "multiplied by",
       fn q, k, v -> scores(q, k) |> Nx.multiply(causal(6, 6)) |> softmax() |> values(v) end, four}
    ]
  end
end
