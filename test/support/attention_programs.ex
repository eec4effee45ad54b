if FlashAttention.Defn.supported?() do
  defmodule FlashAttention.Test.AttentionPrograms do
    @moduledoc """
    Attention as people write it, drawn at random: any order of axes, any place for the scale, any way to hide and to
    normalise, with detours on the way that change nothing. And near misses, which look like it and are not.

    Tensors go about with the labels of their axes: `{tensor, [:b, :h, :i, :d]}`.
    """

    import Nx.Defn.Kernel, only: [custom_grad: 3, stop_grad: 1]

    @patterns [:table_of_numbers, :like_numbers]

    @doc "The choices of the program with that number."
    def draw(number) do
      :rand.seed(:exsss, {number, 19, 2})
      rows = pick([1, 3, 4, 5])
      columns = pick([rows, rows, rows + 2, 4, 6]) |> max(2)
      mask = mask(rows, columns)
      batch = pick([[], [:b], [:b, :h], [:b, :h], [:b, :h], [:c, :b, :h]])

      %{
        number: number,
        batch: batch,
        sizes: %{i: rows, j: columns, d: pick([2, 3, 4]), e: pick([2, 3, 4]), b: 2, c: 2, h: pick([2, 3, 4])},
        group: if(:h in batch, do: pick([1, 1, 2]), else: 1),
        scale: pick([:none, :multiply, :divide, :on_q, :on_k, :both, :runtime, :twice]),
        softcap: pick([nil, nil, nil, 2.5]),
        mask: mask,
        mask_form: pick([:select, :select, :inverted, :add, :subtract]),
        mask_first: pick([false, false, true]),
        # Masks that may leave nothing of a row hide by what swallows every score, so that what is left is no rounding.
        fill: if(mask in @patterns, do: :min_finite, else: pick([:infinity, -1.0e9, :min_finite])),
        softmax: pick([:divide, :divide, :reciprocal, :right_reciprocal, :naive, :twice]),
        maximum: pick([:stop_grad, :plain]),
        detours: pick([0, 0.1, 0.3]),
        weights_first: pick([true, true, false]),
        bias: if(bias?(), do: pick([nil, nil, [:i, :j], [:h, :i, :j], [:b, :j], [:j]])),
        seed: :rand.uniform(1_000_000),
        # Further columns of the softmax behind or in front of the scores, or more in its denominator.
        sinks:
          pick([
            nil,
            nil,
            nil,
            nil,
            nil,
            {:behind, 1},
            {:behind, 2},
            {:in_front, 1},
            {:denominator, 1},
            {:denominator, 3}
          ]),
        head_mask: :h in batch and pick([true, false, false, false]),
        dropped: pick([nil, nil, nil, nil, nil, nil, nil, nil, :made_up, :multiplied]),
        # Which of rows and columns are two axes of what q, k and v are cut out of, as in windows of images.
        cut: pick([[], [], [], [], [:i], [:j], [:i, :j]])
      }
      |> then(&if(&1.dropped, do: %{&1 | cut: []}, else: &1))
    end

    # A row that sees nothing is another matter: see the tests of those.
    defp mask(rows, columns) do
      pick(
        [:none, :none, :length, :runtime_length, :first, :second_on] ++
          if(bias?(), do: @patterns, else: []) ++
          if(rows <= columns,
            do: [:causal, :causal, :causal, :window, :tril, :table, :both, :not_later, :offset],
            else: []
          )
      )
    end

    defp pick(list), do: Enum.at(list, :rand.uniform(length(list)) - 1)

    @doc "Tensors for it, by name, f64 unless another type is given; sinks are f32."
    def tensors(program, type \\ :f64) do
      %{sizes: sizes, batch: batch} = program
      sizes = Map.put(sizes, :g, program.group) |> Map.put(:hk, div(sizes.h, gcd(program.group, sizes.h)))
      kv = kv_batch(program)
      shape = fn labels -> labels |> Enum.map(&size(sizes, &1)) |> List.to_tuple() end
      key = Nx.Random.key(program.seed)
      {q, key} = Nx.Random.normal(key, shape: shape.(stored(program, 1, batch ++ [:i, :d])), type: type)
      {k, key} = Nx.Random.normal(key, shape: shape.(stored(program, 2, kv ++ [:j, :d])), type: type)
      {v, key} = Nx.Random.normal(key, shape: shape.(stored(program, 3, kv ++ [:j, :e])), type: type)
      {bias, key} = Nx.Random.normal(key, shape: shape.(order(program, 4, bias_labels(program))), type: type)
      {sink, key} = Nx.Random.normal(key, shape: sink_shape(program, shape), type: :f32)
      {heads, key} = Nx.Random.uniform(key, shape: shape.(Enum.filter(batch, &(&1 == :h))), type: type)

      %{
        q: q,
        k: k,
        v: v,
        bias: bias,
        sink: sink,
        heads: heads,
        key: key,
        number: Nx.tensor(0.75, type: type),
        length: Nx.tensor(max(sizes.j - 1, 1), type: :s32)
      }
    end

    # A number of each head and sink.
    defp sink_shape(%{sinks: nil}, _shape), do: {}

    defp sink_shape(%{sinks: {_, count}, batch: batch}, shape) do
      heads = shape.(Enum.filter(batch, &(&1 == :h)))
      Tuple.insert_at(heads, tuple_size(heads), count)
    end

    defp gcd(group, heads), do: if(rem(heads, group) == 0, do: group, else: 1)
    defp grouped?(program), do: program.group > 1 and rem(program.sizes.h, program.group) == 0

    defp kv_batch(program),
      do: if(grouped?(program), do: List.delete(program.batch, :h) ++ [:hk], else: program.batch)

    # Of the axes that the program has.
    defp bias_labels(%{bias: nil}), do: []
    defp bias_labels(%{bias: labels, batch: batch}), do: Enum.filter(labels, &(&1 in ([:i, :j] ++ batch)))

    # The axes of an input, in an order of its own.
    defp order(program, salt, labels) do
      :rand.seed(:exsss, {program.seed, salt, 5})
      Enum.shuffle(labels)
    end

    # Those of q, k and v, of which rows and columns may be two, that need not be side by side.
    defp stored(program, salt, labels), do: order(program, salt, Enum.flat_map(labels, &parts(program, &1)))

    defp parts(%{cut: cut, sizes: sizes}, label),
      do: if(label in cut and rem(sizes[label], 2) == 0, do: [{label, :high}, {label, :low}], else: [label])

    defp size(_sizes, {_label, :high}), do: 2
    defp size(sizes, {label, :low}), do: div(sizes[label], 2)
    defp size(sizes, label), do: sizes[label]

    # A tensor as it is stored, with each of these axes as one.
    defp whole(tensor, program, salt, labels) do
      shuffled = order(program, salt, labels)
      {tensor, _} = to({tensor, stored(program, salt, labels)}, Enum.flat_map(shuffled, &parts(program, &1)))

      {sizes, []} =
        Enum.map_reduce(shuffled, Tuple.to_list(Nx.shape(tensor)), fn label, sizes ->
          {of_label, others} = Enum.split(sizes, length(parts(program, label)))
          {Enum.product(of_label), others}
        end)

      {Nx.reshape(tensor, List.to_tuple(sizes)), shuffled}
    end

    @doc """
    The program itself, on what `tensors/2` gave. `change` may do something to what it is given by name.

    Where there is `:kept` among the tensors, weights are multiplied by that instead of being dropped out; its axes are those of the
    output, with columns last.
    """
    def run(program, tensors, change \\ fn _name, tensor -> tensor end) do
      :rand.seed(:exsss, {program.seed, 7, 7})
      %{batch: batch, sizes: sizes} = program
      %{q: q, k: k, v: v, bias: bias, number: number, length: length} = tensors
      kv = kv_batch(program)
      c = 1 / :math.sqrt(sizes.d)

      q = whole(q, program, 1, batch ++ [:i, :d])
      k = whole(k, program, 2, kv ++ [:j, :d])
      v = whole(v, program, 3, kv ++ [:j, :e])
      :rand.seed(:exsss, {program.seed, 7, 7})
      [k, v] = for t <- [k, v], do: if(grouped?(program), do: repeat(t, program), else: t)

      q =
        q
        |> detour(program)
        |> on(program.scale, [:on_q], &Nx.multiply(&1, c))
        |> on(program.scale, [:both], &Nx.multiply(&1, :math.sqrt(c)))

      k =
        k
        |> detour(program)
        |> on(program.scale, [:on_k], &Nx.divide(&1, :math.sqrt(sizes.d)))
        |> on(program.scale, [:both], &Nx.multiply(&1, :math.sqrt(c)))

      {v, v_labels} = detour(v, program)
      v = {change.(:v, v), v_labels}

      s = q |> product(k, :d, batch) |> detour(program) |> with_change(change, :product)
      scaled = fn s -> s |> scale(program.scale, c, number) |> detour(program) end

      capped = fn s ->
        if program.softcap,
          do: on_tensor(s, &Nx.multiply(Nx.tanh(Nx.divide(&1, program.softcap)), program.softcap)),
          else: s
      end

      masked = fn s -> s |> hide(program, length) |> detour(program) end

      s =
        if program.mask_first and program.softcap == nil,
          do: s |> masked.() |> scaled.() |> biased(program, bias),
          else: s |> scaled.() |> capped.() |> biased(program, bias) |> masked.()

      s = with_change(s, change, :scores)
      p = s |> softmax(program, tensors.sink, change) |> detour(program) |> with_change(change, :weights)
      p = p |> of_heads(program, tensors.heads) |> drop(program, tensors)
      {o, labels} = if program.weights_first, do: product(p, v, :j, batch), else: product(v, p, :j, batch)
      {o, labels} = detour({o, labels}, program)
      {o, _labels} = to({o, labels}, batch ++ [:i, :e])
      o
    end

    @doc "A number and its gradients by q, k, v, the bias and sinks."
    def value_and_gradients(program, tensors, change \\ fn _name, tensor -> tensor end) do
      Nx.Defn.value_and_grad(Map.take(tensors, [:q, :k, :v, :bias, :sink]), fn learned ->
        Nx.sum(Nx.sin(Nx.add(run(program, Map.merge(tensors, learned), change), 0.3)))
      end)
    end

    @doc "Which weights a function drops that runs the program on tensors: what it makes of values of 1 of each column, by the weights."
    def kept(program, tensors, run) do
      columns = program.sizes.j
      at = program |> order(3, kv_batch(program) ++ [:j, :e]) |> Enum.find_index(&(&1 == :j))

      weights = fn run ->
        for column <- 0..(columns - 1) do
          one = Nx.equal(Nx.iota(Nx.shape(tensors.v), axis: at), column) |> Nx.as_type(Nx.type(tensors.v))
          o = run.(%{tensors | v: one})
          Nx.slice_along_axis(o, 0, 1, axis: -1)
        end
        |> Nx.concatenate(axis: -1)
      end

      plain = &Nx.Defn.jit_apply(fn tensors -> run(%{program | dropped: nil}, tensors) end, [&1])
      [dropped, whole] = for run <- [run, plain], do: weights.(run)
      none = Nx.equal(whole, 0)
      Nx.select(none, 0, Nx.divide(dropped, Nx.select(none, 1, whole)))
    end

    @doc """
    Whether the guide "Existing models" says of such a program that it is replaced in training, by the choices that it was drawn
    with alone: it is, but for two kinds of hidden scores that "What stays" there names.
    """
    def documented?(program),
      do: not scaled_after_hiding?(program) and (program.sinks != nil or not swallowed?(program))

    # Hidden scores that are multiplied by a number known at run time: it may make them visible.
    defp scaled_after_hiding?(program), do: masked_first?(program) and program.scale == :runtime

    # Rows that may see nothing, as masks are known at run time, where what hides is added, and gradients pass.
    defp swallowed?(%{mask: mask, fill: fill} = program) do
      later? = mask in ([:runtime_length, :offset] ++ @patterns)
      added? = program.mask_form in [:add, :subtract] and (fill == -1.0e9 or program.softcap != nil)
      biased? = masked_first?(program) and program.bias != nil and fill == -1.0e9
      later? and fill != :infinity and (added? or biased?)
    end

    defp masked_first?(program),
      do: program.mask_first and program.softcap == nil and program.mask != :none

    defp bias?, do: Keyword.has_key?(FlashAttention.Options.tensors(), :bias)

    # ---- near misses -------------------------------------------------------------------------------------

    @near [
      {"weights are a result", :weights, :result},
      {"scores are a result", :scores, :result},
      {"the product is a result", :product, :result},
      {"exponentials are a result", :exponentials, :result},
      {"weights squared", :weights, &__MODULE__.square/1},
      {"weights and a little more", :weights, &__MODULE__.more/1},
      {"the sum and 1", :sum, &__MODULE__.one_more/1},
      {"other exponentials in the sum", :exponentials, &__MODULE__.square/1},
      {"the cosine of scores", :scores, &__MODULE__.cosine/1},
      {"scores that are cut off", :scores, &__MODULE__.clip/1},
      {"scores squared", :product, &__MODULE__.square/1},
      {"weights dropped out", :weights, &__MODULE__.drop/1},
      {"weights in whole numbers", :weights, &__MODULE__.whole/1},
      {"the sum cut off", :sum, &__MODULE__.clip/1},
      {"weights sorted", :weights, &__MODULE__.sort/1},
      {"weights turned round", :weights, &__MODULE__.reverse/1}
    ]

    @doc "`{name, function of the tensors}`: the program with something done to it that is not attention any more."
    def near_miss(program, number) do
      program = %{program | dropped: nil}
      {name, where, how} = Enum.at(@near, rem(number, length(@near)))
      {name, fn tensors -> changed(program, tensors, where, how) end}
    end

    defp changed(program, tensors, where, :result) do
      {:ok, kept} = Agent.start_link(fn -> nil end)

      o =
        run(program, tensors, fn name, tensor ->
          if name == where, do: Agent.update(kept, fn _ -> tensor end)
          tensor
        end)

      result = {o, Agent.get(kept, & &1)}
      Agent.stop(kept)
      result
    end

    defp changed(program, tensors, where, how),
      do: run(program, tensors, &if(&1 == where, do: how.(&2), else: &2))

    def square(x), do: Nx.multiply(x, x)
    def more(x), do: Nx.add(x, 1.0e-3)
    def one_more(x), do: Nx.add(x, 1)
    def cosine(x), do: Nx.cos(x)
    def clip(x), do: Nx.clip(x, -1.5, 1.5)
    def whole(x), do: x |> Nx.multiply(8) |> Nx.round() |> Nx.divide(8)
    def sort(x), do: Nx.sort(x, axis: -1)
    def reverse(x), do: Nx.reverse(x)

    def drop(x),
      do: Nx.select(Nx.less(Nx.remainder(Nx.iota(Nx.shape(x)), 5), 3), x, Nx.tensor(0, type: Nx.type(x)))

    @broken [
      weights: &__MODULE__.exp/2,
      exponentials: &__MODULE__.sin/2,
      product: &__MODULE__.add/2,
      sum: &__MODULE__.multiply/2
    ]

    @doc "`{place, function of the tensors}`: the program and its gradients, with one that is none on the way, at that place."
    def broken(program, number) do
      program = %{program | dropped: nil}
      {place, how} = Enum.at(@broken, rem(number, length(@broken)))

      change = fn name, x ->
        if name == place, do: custom_grad(x, [x], fn g -> [how.(g, x)] end), else: x
      end

      {place, &value_and_gradients(program, &1, change)}
    end

    def exp(g, _x), do: Nx.multiply(g, Nx.exp(g))
    def sin(g, _x), do: Nx.sin(g)
    def add(g, x), do: Nx.add(g, x)
    def multiply(g, x), do: Nx.multiply(g, x)

    # ---- the parts ---------------------------------------------------------------------------------------

    defp on_tensor({tensor, labels}, fun), do: {fun.(tensor), labels}
    defp on(t, choice, choices, fun), do: if(choice in choices, do: on_tensor(t, fun), else: t)
    defp with_change({tensor, labels}, change, name), do: {change.(name, tensor), labels}

    @doc "A tensor with its axes in that order."
    def to({tensor, labels}, wanted) do
      axes = for label <- wanted, do: Enum.find_index(labels, &(&1 == label))
      {Nx.transpose(tensor, axes: axes), wanted}
    end

    # k and v of few heads for many.
    defp repeat({tensor, labels}, program) do
      at = Enum.find_index(labels, &(&1 == :hk))
      shape = Nx.shape(tensor)
      long = shape |> Tuple.insert_at(at + 1, program.group)

      repeated =
        tensor
        |> Nx.new_axis(at + 1)
        |> Nx.broadcast(long)
        |> Nx.reshape(put_elem(shape, at, elem(shape, at) * program.group))

      {repeated, List.replace_at(labels, at, :h)}
    end

    # Batches come first, as Nx.dot wants them, and what else there is in any order.
    defp product({_, x_labels} = x, {_, y_labels} = y, contract, batch) do
      batch = Enum.shuffle(batch)
      count = length(batch)
      [x, y] = for {_, labels} = t <- [x, y], do: to(t, batch ++ Enum.shuffle(labels -- batch))

      [{x, x_labels}, {y, y_labels}] =
        if :rand.uniform() < 0.7 and x_labels != y_labels, do: [x, y], else: [y, x]

      axes = Enum.to_list(0..(count - 1)//1)
      at = fn labels -> Enum.find_index(labels, &(&1 == contract)) end

      if batch != [] and :rand.uniform() < 0.2 do
        folded(x, x_labels, y, y_labels, contract, batch)
      else
        o = Nx.dot(x, [at.(x_labels)], axes, y, [at.(y_labels)], axes)
        {o, batch ++ ((x_labels -- batch) -- [contract]) ++ ((y_labels -- batch) -- [contract])}
      end
    end

    # All batches as one.
    defp folded(x, x_labels, y, y_labels, contract, batch) do
      count = length(batch)
      fold = fn t -> Nx.reshape(t, List.to_tuple([:auto | Enum.drop(Tuple.to_list(Nx.shape(t)), count)])) end
      at = fn labels -> Enum.find_index(labels, &(&1 == contract)) - count + 1 end
      o = Nx.dot(fold.(x), [at.(x_labels)], [0], fold.(y), [at.(y_labels)], [0])
      sizes = x |> Nx.shape() |> Tuple.to_list() |> Enum.take(count)
      o = Nx.reshape(o, List.to_tuple(sizes ++ tl(Tuple.to_list(Nx.shape(o)))))
      {o, batch ++ ((x_labels -- batch) -- [contract]) ++ ((y_labels -- batch) -- [contract])}
    end

    defp scale(s, :multiply, c, _number), do: on_tensor(s, &Nx.multiply(&1, c))
    defp scale(s, :divide, c, _number), do: on_tensor(s, &Nx.divide(&1, 1 / c))
    defp scale(s, :runtime, _c, number), do: on_tensor(s, &Nx.multiply(&1, number))
    defp scale(s, :twice, c, _number), do: on_tensor(s, &(&1 |> Nx.multiply(2 * c) |> Nx.divide(2)))
    defp scale(s, _choice, _c, _number), do: s

    defp biased(s, %{bias: nil}, _bias), do: s

    defp biased({s, labels}, program, bias) do
      {bias, there} =
        {bias, order(program, 4, bias_labels(program))}
        |> to(Enum.filter(labels, &(&1 in bias_labels(program))))

      shape =
        for {label, size} <- Enum.zip(labels, Tuple.to_list(Nx.shape(s))),
            do: if(label in there, do: size, else: 1)

      {Nx.add(s, Nx.reshape(bias, List.to_tuple(shape))), labels}
    end

    # ---- masks -------------------------------------------------------------------------------------------

    defp hide(s, %{mask: :none}, _length), do: s

    defp hide({s, labels}, program, length) do
      visible = visible(program.mask, labels, Nx.shape(s), program.sizes, length)
      fill = fill(program, s)
      full = Nx.broadcast(visible, Nx.shape(s))

      hidden =
        case program.mask_form do
          :select -> Nx.select(full, s, fill)
          :inverted -> Nx.select(Nx.logical_not(full), fill, s)
          :add -> Nx.add(s, Nx.select(visible, Nx.tensor(0, type: Nx.type(s)), fill))
          :subtract -> Nx.add(s, Nx.select(Nx.equal(visible, 0), fill, Nx.tensor(0, type: Nx.type(s))))
        end

      {hidden, labels}
    end

    defp fill(%{fill: :infinity}, s), do: Nx.Constants.neg_infinity(Nx.type(s))
    defp fill(%{fill: :min_finite}, s), do: Nx.divide(Nx.Constants.min_finite(Nx.type(s)), 4)
    defp fill(%{fill: number}, s), do: Nx.tensor(number, type: Nx.type(s))

    # Along the axes of rows and columns.
    defp visible(mask, labels, shape, sizes, length) do
      [i, j] = for label <- [:i, :j], do: label |> counting(labels, shape)
      shift = sizes.j - sizes.i

      case mask do
        :causal ->
          Nx.greater_equal(Nx.add(i, shift), j)

        :not_later ->
          Nx.logical_not(Nx.less(i, Nx.subtract(j, shift)))

        :window ->
          Nx.logical_and(
            Nx.less_equal(Nx.subtract(Nx.add(i, shift), j), 1),
            Nx.greater_equal(Nx.add(i, shift), j)
          )

        :both ->
          Nx.logical_and(
            Nx.less(j, sizes.j),
            Nx.less_equal(Nx.abs(Nx.subtract(0, 0)) |> Nx.add(j), Nx.add(i, shift))
          )

        :length ->
          Nx.less(j, max(sizes.j - 1, 1))

        :table_of_numbers ->
          Nx.less(Nx.remainder(Nx.add(Nx.multiply(i, 3), Nx.multiply(j, length)), 4), 2)

        :like_numbers ->
          Nx.equal(Nx.remainder(i, 2), Nx.remainder(j, 2))

        :runtime_length ->
          Nx.less(j, length)

        :offset ->
          Nx.greater_equal(Nx.add(i, Nx.subtract(length, sizes.j - 1 - shift)), j)

        :first ->
          Nx.less_equal(j, sizes.j - 2)

        :second_on ->
          Nx.greater_equal(j, 1)

        :tril ->
          Nx.broadcast(Nx.u8(1), {sizes.i, sizes.j}) |> Nx.tril(k: shift) |> placed(labels, sizes)

        :table ->
          table(sizes, shift) |> placed(labels, sizes) |> Nx.greater(0)
      end
    end

    defp counting(label, labels, shape) do
      at = Enum.find_index(labels, &(&1 == label))

      sizes =
        for {size, axis} <- shape |> Tuple.to_list() |> Enum.with_index(), do: if(axis == at, do: size, else: 1)

      Nx.iota(List.to_tuple(sizes), axis: at)
    end

    defp table(sizes, shift) do
      numbers =
        for i <- 0..(sizes.i - 1), do: for(j <- 0..(sizes.j - 1), do: if(j <= i + shift, do: 1.0, else: 0.0))

      Nx.tensor(numbers, backend: Nx.BinaryBackend)
    end

    # {rows, columns} where those axes are.
    defp placed(matrix, labels, sizes) do
      [i, j] = for label <- [:i, :j], do: Enum.find_index(labels, &(&1 == label))
      matrix = if i < j, do: matrix, else: Nx.transpose(matrix)
      shape = for label <- labels, do: if(label in [:i, :j], do: sizes[label], else: 1)
      Nx.reshape(matrix, List.to_tuple(shape))
    end

    # ---- softmax -----------------------------------------------------------------------------------------

    defp softmax({s, labels}, %{sinks: nil} = program, _sink, change) do
      axis = Enum.find_index(labels, &(&1 == :j))
      {normalised(s, axis, largest(s, axis), & &1, program, change), labels}
    end

    defp softmax({s, labels}, %{sinks: {:denominator, count}} = program, sink, change) do
      axis = Enum.find_index(labels, &(&1 == :j))
      sink = beside(sink, labels, count, program)
      maximum = Nx.max(largest(s, axis), largest(sink, axis))

      shifted =
        &if(naive?(program), do: Nx.as_type(&1, Nx.type(s)), else: Nx.subtract(&1, through(maximum, program)))

      more = fn sum -> Nx.add(sum, sink |> shifted.() |> Nx.exp() |> Nx.sum(axes: [axis], keep_axes: true)) end
      {normalised(s, axis, maximum, more, program, change), labels}
    end

    defp softmax({s, labels}, %{sinks: {side, count}} = program, sink, change) do
      axis = Enum.find_index(labels, &(&1 == :j))
      columns = Nx.axis_size(s, axis)
      sink = sink |> beside(labels, count, program) |> Nx.broadcast(put_elem(Nx.shape(s), axis, count))
      {parts, from} = if side == :behind, do: {[s, sink], 0}, else: {[sink, s], count}
      all = Nx.concatenate(parts, axis: axis)
      p = normalised(all, axis, largest(all, axis), & &1, program, change)
      {Nx.slice_along_axis(p, from, columns, axis: axis), labels}
    end

    # Sinks of heads with the axes of scores, along the columns.
    defp beside(sink, labels, count, program) do
      shape = for label <- labels, do: %{h: program.sizes.h, j: count}[label] || 1

      heads_first =
        if Enum.find_index(labels, &(&1 == :h)) < Enum.find_index(labels, &(&1 == :j)),
          do: sink,
          else: Nx.transpose(sink)

      Nx.reshape(heads_first, List.to_tuple(shape))
    end

    defp largest(s, axis), do: Nx.reduce_max(s, axes: [axis], keep_axes: true)
    defp through(maximum, program), do: if(program.maximum == :stop_grad, do: stop_grad(maximum), else: maximum)

    defp naive?(program),
      do: program.softmax == :naive and program.mask_first == false and program.fill != :min_finite

    defp normalised(s, axis, maximum, more, program, change) do
      exp = fn -> Nx.exp(if naive?(program), do: s, else: Nx.subtract(s, through(maximum, program))) end
      e = exp.()

      sum = fn e ->
        change.(:exponentials, e)
        |> Nx.sum(axes: [axis], keep_axes: true)
        |> more.()
        |> then(&change.(:sum, &1))
      end

      case program.softmax do
        :reciprocal -> Nx.multiply(Nx.divide(1, sum.(e)), e)
        :right_reciprocal -> Nx.multiply(e, Nx.divide(1, sum.(e)))
        :twice -> Nx.divide(e, sum.(exp.()))
        _ -> Nx.divide(e, sum.(e))
      end
    end

    # ---- what is done to weights ---------------------------------------------------------------------------

    defp of_heads(p, %{head_mask: false}, _heads), do: p

    defp of_heads({p, labels}, _program, heads) do
      shape = for label <- labels, do: if(label == :h, do: Nx.axis_size(heads, 0), else: 1)
      {Nx.multiply(p, Nx.reshape(heads, List.to_tuple(shape))), labels}
    end

    @share 0.75

    defp drop(p, %{dropped: nil}, _tensors), do: p

    defp drop({p, labels}, %{batch: batch}, %{kept: kept}) do
      {kept, _} = to({kept, batch ++ [:i, :j]}, labels)
      {Nx.multiply(p, kept), labels}
    end

    # The same numbers in all types.
    defp drop({p, labels}, %{dropped: dropped}, %{key: key}) do
      {numbers, _key} = Nx.Random.uniform(key, shape: Nx.shape(p), type: :f32)
      kept = Nx.less(numbers, @share)

      case dropped do
        :made_up -> {Nx.select(kept, Nx.divide(p, @share), Nx.tensor(0, type: Nx.type(p))), labels}
        :multiplied -> {Nx.multiply(p, kept), labels}
      end
    end

    # ---- detours -----------------------------------------------------------------------------------------

    defp detour({tensor, labels} = t, program) do
      if :rand.uniform() >= program.detours do
        t
      else
        case :rand.uniform(6) do
          1 -> t |> to(Enum.shuffle(labels))
          2 -> {tensor |> Nx.flatten() |> Nx.reshape(Nx.shape(tensor)), labels}
          3 -> {Nx.negate(Nx.negate(tensor)), labels}
          4 -> {tensor |> Nx.new_axis(1) |> Nx.squeeze(axes: [1]), labels}
          5 -> {tensor |> Nx.multiply(4) |> Nx.divide(4.0), labels}
          6 -> {tensor |> Nx.transpose() |> Nx.transpose(), labels}
        end
      end
    end
  end
end
