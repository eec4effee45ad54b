if FlashAttention.Defn.supported?() do
  defmodule FlashAttention.Rewriter.Attention do
    @moduledoc false
    # What a match becomes: FlashAttention's own attention, with the tensors of the expression brought to
    # [batch, seqlen, num_heads, head_dim] and the result brought back.

    alias FlashAttention.{Error, Mask, Options}
    alias FlashAttention.Rewriter.{Graph, Index, Visibility}
    alias Nx.Defn.{Expr, Kernel}

    # Whether the library adds a tensor to scores: without that, masks that are no bands stay as they are.
    defp bias?, do: Keyword.has_key?(Options.tensors(), :bias)

    @floats [{:f, 64}, {:f, 32}, {:f, 16}, {:bf, 16}]

    # ---- what the library computes -----------------------------------------------------------------------

    @doc "Whether the library has what a match needs."
    def takes(match, graph, opts) do
      types = for {number, _} <- [match.q, match.k, match.v], do: Graph.fetch!(graph, number).type

      cond do
        Enum.any?(types, &(&1 not in @floats)) ->
          {:refuse, "q, k and v are of types #{Enum.map_join(types, ", ", &Nx.Type.to_string/1)}"}

        not bias?() and (match.biases != [] or match.visibility.others != []) ->
          {:refuse, "needs bias"}

        Enum.any?(match.sinks, fn {number, _} -> Graph.fetch!(graph, number).type == {:f, 64} end) ->
          {:refuse, "its sinks are in f64, and the library's in f32"}

        match.empty_rows == :swallowed and match.gradients != [] ->
          {:refuse, "rows that see nothing have gradients of scores that were rounded away"}

        match.dropout != nil and opts[:dropout] != :resample ->
          {:refuse,
           "its weights are dropped out by bits of the program's own (dropout: :resample takes others)"}

        match.scale == 0 ->
          {:refuse, "its scores are multiplied by 0"}

        not bands_of_batch?(match) ->
          {:refuse, "its mask has ranges of its own for heads"}

        true ->
          plan(match, graph, opts)
      end
    end

    # What is added to scores and swallows them lets their gradients pass, and whatever hid them those of what is added
    # to them later.
    defp slopes_of_empty_rows?(%{empty_rows: :mean, hidden: [%{how: how}], gradients: [_ | _]} = match),
      do: how == :added or swallowed_biases(match) != []

    defp slopes_of_empty_rows?(_match), do: false

    # Biases with their numbers, without the one that slopes stand for.
    defp added(match) do
      {slopes, _} = alibi(match)
      for {bias, n} <- Enum.with_index(match.biases), n != slopes, do: {bias, n}
    end

    # `{number of a bias, its slopes}` where those do: the library counts distances in all of the matrix there, and nobody asks
    # for the gradient of the bias.
    defp alibi(%{visibility: visibility} = match) do
      wanted = for %{of: {:bias, n}} <- match.gradients, do: n
      slopes = for {n, slopes} <- match.slopes, n not in wanted, do: {n, slopes}

      if Visibility.views(visibility) == [] and not match?([{:mask, _}], visible(match, %{})),
        do: List.first(slopes, {nil, nil}),
        else: {nil, nil}
    end

    # The biases that gradients are wanted of and that hidden scores have too.
    defp swallowed_biases(%{hidden: [mask], biases: biases, gradients: gradients}) do
      for {{view, factor}, n} <- Enum.with_index(biases),
          if(mask.how == :added, do: view != mask.shown, else: view in Map.get(mask, :outside, [])),
          Enum.any?(gradients, &(&1.of == {:bias, n})),
          do: {n, view, factor}
    end

    # Of several at once, what tells them from each other.
    defp several({_number, indices}, atoms),
      do: for(index <- indices, {{:sink, _}, _, _} = digit <- Index.refine(index, atoms), do: digit)

    defp num_sinks(match),
      do: Enum.sum(for sink <- match.sinks, do: sink |> several(match.atoms) |> Index.size())

    # Numbers known at run time are those of batches.
    defp bands_of_batch?(match) do
      batch = match.axes.batch

      Enum.all?(Visibility.views(match.visibility), fn {_, indices} ->
        indices |> Enum.concat() |> Index.refine(match.atoms) |> Enum.all?(&(&1 in batch))
      end)
    end

    # The library's own word on what there is, for the device that will compute it: both passes where there are gradients.
    defp plan(match, graph, opts) do
      type = type(for {number, _} <- [match.q, match.k, match.v], do: Graph.fetch!(graph, number).type)
      tensors = for shape <- shapes(match), do: Nx.template(shape, type)
      optional = for {name, shape, type} <- optional(match, type), do: {name, Nx.template(shape, type)}

      options =
        [causal: false, softcap: abs(match.softcap), dropout: rate(match)] ++ own(match, opts) ++ device(opts)

      attention = fn [q, k, v], optional ->
        optional =
          for {name, tensor} <- optional,
              do: {name, if(name == :mask, do: Mask.from_bands(tensor), else: tensor)}

        FlashAttention.attention(q, k, v, optional ++ options)
      end

      Nx.Defn.debug_expr_apply(&differentiated(attention, match, &1), [
        {List.to_tuple(tensors), Map.new(optional)}
      ])

      :ok
    rescue
      error in Error -> {:refuse, Exception.message(error)}
    end

    defp differentiated(attention, %{gradients: []}, {tensors, optional}),
      do: attention.(Tuple.to_list(tensors), optional)

    defp differentiated(attention, _match, {tensors, optional}),
      do: Nx.Defn.grad(tensors, &Nx.sum(attention.(Tuple.to_list(&1), optional)))

    # What is given beside q, k and v, with its shape and type.
    defp optional(match, type) do
      [{batch, rows, heads, _} | [{_, columns, _, _} | _]] = shapes(match)
      bands = if Visibility.views(match.visibility) != [], do: [{:mask, {batch, 1, 6}, {:s, 32}}], else: []
      seed = if match.dropout, do: [{:dropout_seed, {2}, {:u, 32}}], else: []

      slopes = if match?({nil, nil}, alibi(match)), do: [], else: [{:alibi_slopes, {batch, heads}, {:f, 32}}]

      case {added(match), match.visibility.others} do
        {[], []} -> bands ++ seed ++ slopes
        {[], _} -> [{:bias, {batch, heads, rows, columns}, {:u, 8}} | bands ++ seed ++ slopes]
        _ -> [{:bias, {batch, heads, rows, columns}, added_type(type)} | bands ++ seed ++ slopes]
      end
    end

    # A compiler for another device than the one that is here is asked about that.
    defp device(opts), do: if(opts[:kind], do: [device: opts[:kind]], else: [])

    # A program whose attention has no gradients computes none later.
    defp own(match, opts), do: [inference: match.gradients == []] ++ Keyword.get(opts, :attention, [])

    defp shapes(match) do
      %{batch: batch, rows: rows, columns: columns, heads: heads, groups: groups} = match.axes

      [batch, rows, columns, kv_heads, groups] =
        for digits <- [batch, rows, columns, heads, groups], do: Index.size(digits)

      dim = dim(match)
      [{batch, rows, kv_heads * groups, dim}, {batch, columns, kv_heads, dim}, {batch, columns, kv_heads, dim}]
    end

    defp dim(%{axes: axes}), do: max(Index.size(axes.dim), Index.size(axes.values))

    # ---- building ----------------------------------------------------------------------------------------

    @doc """
    The output in the library's layout; and, where there are gradients, those of a stand-in for dout, and that.
    """
    def build(match, inputs, opts) do
      if match.gradients == [],
        do: %{o: attend(inputs, match, opts)},
        else: build_with_gradients(match, inputs, opts)
    end

    defp build_with_gradients(match, inputs, opts) do
      shape = out_shape(match)
      like = Map.fetch!(inputs, :q)
      dout = %{like | shape: shape, names: nils(shape), type: type(inputs), vectorized_axes: []}
      dout = Expr.parameter(dout, 1_000_000)
      wanted = for %{of: of} <- match.gradients, of != :zero, uniq: true, do: of

      {{o, _loss}, gradients} =
        Nx.Defn.Grad.transform(
          List.to_tuple(for name <- wanted, do: Map.fetch!(inputs, name)),
          fn leaves ->
            o = attend(Map.merge(inputs, wanted |> Enum.zip(Tuple.to_list(leaves)) |> Map.new()), match, opts)
            {o, Nx.sum(Nx.multiply(o, dout))}
          end,
          &elem(&1, 1)
        )

      %{o: o, gradients: wanted |> Enum.zip(Tuple.to_list(gradients)) |> Map.new(), dout: dout}
    end

    # The type that is computed in.
    defp type(%{q: q, k: k, v: v}), do: type([q.type, k.type, v.type])
    defp type([type | types]), do: Enum.reduce(types, type, &Nx.Type.merge/2)

    defp out_shape(match) do
      [{batch, rows, heads, _dim} | _] = shapes(match)
      {batch, rows, heads, Index.size(match.axes.values)}
    end

    # [batch, seqlen_q, num_heads, values], from the tensors by name, and the others by number.
    defp attend(inputs, match, opts) do
      %{batch: batch, rows: rows, columns: columns, heads: heads, groups: groups, dim: dim, values: values} =
        match.axes

      type = type(inputs)

      to = fn name, axes ->
        {_, indices} = Map.fetch!(match, name)
        inputs |> Map.fetch!(name) |> lay_out(indices, axes, match.atoms) |> Nx.as_type(type)
      end

      q = :q |> to.([batch, rows, heads ++ groups, dim]) |> times_factors(match, inputs)
      v = to.(:v, [batch, columns, heads, values])

      k = to.(:k, [batch, columns, heads, dim])
      [wide_q, wide_k, wide_v] = for tensor <- [q, k, v], do: widen(tensor, dim(match))

      options =
        [causal: false, scale: scale(match), softcap: abs(match.softcap)] ++
          visible(match, inputs) ++
          bias(match, added(match), inputs, type) ++
          slopes(match, inputs) ++ sink(match, inputs) ++ dropout(match, inputs) ++ own(match, opts)

      {o, lse} = FlashAttention.attention_with_lse(wide_q, wide_k, wide_v, options)

      o
      |> cut([Index.size(batch), Index.size(rows), Index.size(heads ++ groups), Index.size(values)])
      |> empty_rows(lse, {q, k, v}, match, inputs)
      |> times_outer(match, inputs)
    end

    # What weights are multiplied by, the output is.
    defp times_outer(o, match, inputs) do
      %{batch: batch, rows: rows, heads: heads, groups: groups} = match.axes
      {coefficient, outer} = match.outer
      coefficient = made_up(coefficient, match.dropout)
      o = if coefficient == 1, do: o, else: Nx.multiply(o, number_like(coefficient, o))

      Enum.reduce(outer, o, fn {number, indices}, o ->
        factor =
          inputs |> Map.fetch!(number) |> lay_out(indices, [batch, rows, heads ++ groups, []], match.atoms)

        Nx.multiply(o, Nx.as_type(factor, o.type))
      end)
    end

    # What is left after dropout is divided by its share already.
    defp made_up(coefficient, nil), do: coefficient

    defp made_up(coefficient, %{share: share}) do
      coefficient = coefficient * share
      if abs(coefficient - 1) < 1.0e-6, do: 1, else: coefficient
    end

    # The words of the key that the program's own bits were made of.
    defp dropout(%{dropout: nil}, _inputs), do: []

    defp dropout(%{dropout: %{key: key}} = match, inputs) do
      words = for word <- key, do: inputs |> Map.fetch!(word) |> Nx.reshape({}) |> Nx.as_type(:u32)
      [dropout: rate(match), dropout_seed: words |> Nx.stack() |> Kernel.stop_grad()]
    end

    defp rate(%{dropout: nil}), do: 0
    defp rate(%{dropout: %{share: share}}), do: 1 - share

    # softcap * tanh(scale * x / softcap) is what the program has as softcap * tanh(scale * x).
    defp scale(%{softcap: softcap, scale: scale}), do: if(softcap == 0, do: scale, else: scale * softcap)

    # Numbers known at run time are factors of q.
    defp times_factors(q, match, inputs) do
      %{batch: batch, heads: heads, groups: groups} = match.axes

      Enum.reduce(match.factors, q, fn {kind, {number, indices}}, q ->
        factor =
          inputs
          |> Map.fetch!(number)
          |> lay_out(indices, [batch, [], heads ++ groups, []], match.atoms)
          |> Nx.as_type(q.type)

        if kind == :factor, do: Nx.multiply(q, factor), else: Nx.divide(q, factor)
      end)
    end

    defp widen(tensor, dim) do
      case dim - Nx.axis_size(tensor, 3) do
        0 -> tensor
        more -> Nx.pad(tensor, number_like(0, tensor), [{0, 0, 0}, {0, 0, 0}, {0, 0, 0}, {0, more, 0}])
      end
    end

    # A row that sees nothing: what the program makes of it.
    defp empty_rows(o, _lse, _q_k_v, %{empty_rows: kind}, _inputs) when kind in [:none, :swallowed], do: o

    defp empty_rows(o, lse, {q, k, v}, match, inputs) do
      empty =
        lse
        |> Kernel.stop_grad()
        |> Nx.is_infinity()
        |> Nx.transpose(axes: [0, 2, 1])
        |> Nx.new_axis(3)
        |> Nx.broadcast(o.shape)

      mean = v |> Nx.mean(axes: [1], keep_axes: true) |> of_all_heads(o.shape) |> Nx.as_type(o.type)

      instead =
        cond do
          # NaN that depends on the values, so that their gradient is NaN too, and only for such rows.
          match.empty_rows == :nan -> Nx.multiply(mean, Nx.select(empty, Nx.Constants.nan(o.type), 1))
          slopes_of_empty_rows?(match) -> mean |> Nx.broadcast(o.shape) |> Nx.add(slope(q, k, v, match, inputs))
          true -> mean
        end

      Nx.select(empty, Nx.broadcast(instead, o.shape), o)
    end

    # [batch, 1, num_kv_heads, values] for every head.
    defp of_all_heads(tensor, {batch, _rows, num_heads, values}) do
      num_kv_heads = Nx.axis_size(tensor, 2)

      tensor
      |> Nx.new_axis(3)
      |> Nx.broadcast({batch, 1, num_kv_heads, div(num_heads, num_kv_heads), values})
      |> Nx.reshape({batch, 1, num_heads, values})
    end

    # Scores that were swallowed leave their derivative behind, that of a softmax where all scores are one number:
    # do = scale / n dq sum_j k_j (v_j - mean v), and likewise by k. Its value is 0.
    defp slope(q, k, v, match, inputs) do
      {batch, rows, num_heads, dim} = q.shape
      {_, columns, num_kv_heads, values} = v.shape
      type = Nx.Type.merge(q.type, {:f, 32})
      heads_first = fn tensor -> tensor |> Nx.as_type(type) |> Nx.transpose(axes: [0, 2, 1, 3]) end

      centred =
        v
        |> Kernel.stop_grad()
        |> heads_first.()
        |> then(&Nx.subtract(&1, Nx.mean(&1, axes: [2], keep_axes: true)))

      moments = Nx.dot(heads_first.(k), [2], [0, 1], centred, [2], [0, 1])

      of_products =
        q
        |> heads_first.()
        |> Nx.reshape({batch, num_kv_heads, div(num_heads, num_kv_heads) * rows, dim})
        |> Nx.dot([3], [0, 1], moments, [2], [0, 1])
        |> Nx.multiply(number_like(if(hd(match.hidden).how == :added, do: scale(match), else: 0), centred))
        |> Nx.reshape({batch, num_heads, rows, values})

      slope =
        match
        |> swallowed_biases()
        |> Enum.reduce(of_products, &Nx.add(&2, slope_of_bias(&1, centred, match, inputs)))
        |> Nx.divide(number_like(columns, centred))
        |> Nx.transpose(axes: [0, 2, 1, 3])

      slope |> Nx.subtract(Kernel.stop_grad(slope)) |> Nx.as_type(v.type)
    end

    # sum_j db_j (v_j - mean v), for every head.
    defp slope_of_bias({n, {number, indices}, factor}, centred, match, inputs) do
      %{batch: batch, heads: heads, groups: groups, rows: rows, columns: columns} = match.axes
      {batches, num_kv_heads, num_columns, values} = centred.shape
      num_heads = Index.size(heads ++ groups)
      tensor = inputs[{:bias, n}] || Map.fetch!(inputs, number)

      by_head =
        centred
        |> Nx.new_axis(2)
        |> Nx.broadcast({batches, num_kv_heads, div(num_heads, num_kv_heads), num_columns, values})
        |> Nx.reshape({batches, num_heads, num_columns, values})

      tensor
      |> lay_out(indices, [batch, heads ++ groups, rows, columns], match.atoms)
      |> Nx.as_type(centred.type)
      |> Nx.multiply(number_like(factor, centred))
      |> Nx.dot([3], [0, 1], by_head, [2], [0, 1])
    end

    # ---- masks -------------------------------------------------------------------------------------------

    defp visible(match, inputs) do
      %{visibility: visibility} = match
      [{_, rows, _, _}, {_, columns, _, _} | _] = shapes(match)

      bounds =
        for {name, pick, otherwise} <- [
              {:lower, &max/2, -rows},
              {:upper, &min/2, columns},
              {:k_begin, &max/2, 0},
              {:k_end, &min/2, columns},
              {:q_begin, &max/2, 0},
              {:q_end, &min/2, rows}
            ],
            into: %{} do
          {name, bound(Map.fetch!(visibility, name), pick, otherwise, match, inputs)}
        end

      cond do
        Visibility.all?(%{visibility | others: []}) -> []
        Enum.all?(Map.values(bounds), &is_integer/1) -> fixed(bounds, rows, columns)
        true -> [mask: later(bounds)]
      end
    end

    # An integer where all are known, else a tensor of numbers, one a batch.
    defp bound(numbers, pick, otherwise, match, inputs) do
      {known, unknown} = Enum.split_with(numbers, &Visibility.known/1)
      known = known |> Enum.map(&Visibility.known/1) |> Enum.reduce(otherwise, pick)
      pick = if pick.(0, 1) == 1, do: &Nx.max/2, else: &Nx.min/2
      Enum.reduce(unknown, known, &pick.(number(&1, match, inputs), &2))
    end

    defp number(number, match, inputs) do
      Enum.reduce(number, 0, fn
        {:constant, x}, sum ->
          Nx.add(sum, x)

        {{at, indices}, factor}, sum ->
          inputs
          |> Map.fetch!(at)
          |> lay_out(indices, [match.axes.batch], match.atoms)
          |> in_s32()
          |> Nx.multiply(factor)
          |> Nx.add(sum)
      end)
      |> Nx.as_type(:s32)
    end

    # Far beyond any sequence is far enough.
    @far 0x20000000
    defp in_s32(%{type: {:s, bits}} = tensor) when bits > 16,
      do: tensor |> Nx.max(-@far) |> Nx.min(@far) |> Nx.as_type(:s32)

    defp in_s32(%{type: {:u, bits}} = tensor) when bits > 16, do: tensor |> Nx.min(@far) |> Nx.as_type(:s32)
    defp in_s32(tensor), do: Nx.as_type(tensor, :s32)

    defp fixed(%{k_begin: 0, q_begin: 0} = bounds, rows, columns)
         when bounds.k_end == columns and bounds.q_end == rows do
      left = if bounds.lower <= 1 - rows, do: :infinity, else: columns - rows - bounds.lower
      right = if bounds.upper >= columns - 1, do: :infinity, else: bounds.upper - columns + rows

      if left >= 0 and right >= 0,
        do: [window: {left, right}],
        else: [mask: Mask.from_bands([band(bounds)])]
    end

    defp fixed(bounds, _rows, _columns), do: [mask: Mask.from_bands([band(bounds)])]

    # The last row of a band stands beside its last column.
    defp band(%{q_begin: q_begin, q_end: q_end, k_begin: k_begin, k_end: k_end, lower: lower, upper: upper}),
      do: {q_begin, q_end, k_begin, k_end, k_end - q_end - lower, upper - k_end + q_end}

    defp later(%{q_end: q_end, k_end: k_end} = bounds) do
      distance = Nx.subtract(k_end, q_end)

      words =
        [
          bounds.q_begin,
          q_end,
          bounds.k_begin,
          k_end,
          Nx.subtract(distance, bounds.lower),
          Nx.subtract(bounds.upper, distance)
        ]
        |> Enum.map(&Nx.as_type(&1, :s32))

      batch = words |> Enum.map(&Nx.size/1) |> Enum.max()
      words |> Enum.map(&Nx.broadcast(&1, {batch})) |> Nx.stack(axis: 1) |> Nx.new_axis(1) |> Mask.from_bands()
    end

    # [num_sinks, num_heads], or [batch, seqlen_q, num_sinks, num_heads] where rows or batches have their own.
    defp sink(%{sinks: []}, _inputs), do: []

    defp sink(%{axes: %{batch: batch, rows: rows, heads: heads, groups: groups}} = match, inputs) do
      digits =
        for {_, indices} <- match.sinks, index <- indices, digit <- Index.refine(index, match.atoms), do: digit

      of_rows = if Enum.any?(digits, &(&1 in (batch ++ rows))), do: [batch, rows], else: []

      sinks =
        for {{number, indices} = sink, n} <- Enum.with_index(match.sinks),
            do:
              (inputs[{:sink, n}] || Map.fetch!(inputs, number))
              |> lay_out(indices, of_rows ++ [several(sink, match.atoms), heads ++ groups], match.atoms)
              |> Nx.as_type(:f32)

      [sink: Nx.concatenate(sinks, axis: length(of_rows))]
    end

    # What is added to scores, and what no bands say: of the axes that it depends on.
    defp bias(%{visibility: %{others: []}}, [], _inputs, _type), do: []

    defp bias(match, biases, inputs, type) do
      %{batch: batch, heads: heads, groups: groups, rows: rows, columns: columns} = match.axes
      %{visibility: %{others: others}} = match

      used =
        for {{_, indices}, _} <- for({bias, _n} <- biases, do: bias) ++ others,
            index <- indices,
            digit <- Index.refine(index, match.atoms),
            do: digit

      axes =
        for digits <- [batch, heads ++ groups, rows],
            do: if(Enum.any?(digits, &(&1 in used)), do: digits, else: [])

      to = fn tensor, {_, indices} -> lay_out(tensor, indices, axes ++ [columns], match.atoms) end

      visible =
        for {{number, _} = view, holds} <- others do
          seen = inputs |> Map.fetch!(number) |> to.(view) |> Nx.not_equal(0)
          if holds, do: seen, else: Nx.equal(seen, 0)
        end

      added =
        for {{{number, _} = view, factor}, n} <- biases do
          tensor =
            (inputs[{:bias, n}] || Map.fetch!(inputs, number)) |> to.(view) |> Nx.as_type(added_type(type))

          if factor == 1, do: tensor, else: Nx.multiply(tensor, number_like(factor, tensor))
        end

      # Its gradient is as large as the scores are: it is left out where nobody asks for it.
      wanted = Enum.any?(match.gradients, &match?({:bias, _}, &1.of))
      [bias: bias_of(visible, added)] ++ if(biases != [] and not wanted, do: [constant_bias: true], else: [])
    end

    # [batch, num_heads], or [1, num_heads].
    defp slopes(match, inputs) do
      %{batch: batch, heads: heads, groups: groups} = match.axes

      case alibi(match) do
        {nil, nil} ->
          []

        {_n, {coefficient, views}} ->
          used =
            for {_, indices} <- views, index <- indices, digit <- Index.refine(index, match.atoms), do: digit

          batch = if Enum.any?(batch, &(&1 in used)), do: batch, else: []
          shape = {Index.size(batch), Index.size(heads ++ groups)}

          product =
            for {number, indices} <- views, reduce: Nx.broadcast(Nx.tensor(coefficient, type: :f32), shape) do
              product ->
                inputs
                |> Map.fetch!(number)
                |> lay_out(indices, [batch, heads ++ groups], match.atoms)
                |> Nx.as_type(:f32)
                |> Nx.multiply(product)
            end

          # Slopes whose gradient is wanted are a bias: see alibi/1.
          [alibi_slopes: product, constant_alibi_slopes: true]
      end
    end

    # Sums are not rounded to 16 bits.
    defp added_type({:f, 64}), do: {:f, 64}
    defp added_type(_type), do: {:f, 32}

    defp bias_of(visible, []), do: visible |> Enum.reduce(&Nx.logical_and/2) |> Nx.as_type(:u8)
    defp bias_of([], added), do: Enum.reduce(added, &Nx.add/2)

    defp bias_of(visible, added) do
      sum = Enum.reduce(added, &Nx.add/2)
      seen = Enum.reduce(visible, &Nx.logical_and/2)
      Nx.select(seen, sum, Nx.Constants.neg_infinity(sum.type))
    end

    # ---- layouts -----------------------------------------------------------------------------------------

    # A tensor whose axes run along these indices, laid out along these digits, a list of them an axis.
    defp lay_out(tensor, indices, axes, atoms) do
      tensor = Nx.devectorize(tensor, keep_names: false)
      tensor = %{tensor | names: nils(tensor.shape)}
      indices = for index <- indices, do: Index.refine(index, atoms)
      tensor = cut(tensor, Enum.map(indices, &Index.size/1))
      from = Enum.concat(indices)
      to = Enum.concat(axes)
      there = Enum.filter(to, &(&1 in from))
      order = for digit <- there, do: Enum.find_index(from, &(&1 == digit))

      tensor
      |> Nx.reshape(sizes(from))
      |> Nx.transpose(axes: order)
      |> Nx.reshape(List.to_tuple(for {_, _, size} = digit <- to, do: if(digit in from, do: size, else: 1)))
      |> Nx.broadcast(sizes(to))
      |> Nx.reshape(List.to_tuple(Enum.map(axes, &Index.size/1)))
    end

    @doc "A tensor with its axes laid out by `{:axis, n}` in these indices, of such a shape."
    def view(tensor, indices, shape) do
      axes =
        for {size, axis} <- shape |> Tuple.to_list() |> Enum.with_index(),
            do: Index.variable({:axis, axis}, size)

      {:ok, atoms} = Index.atoms(indices ++ axes)
      lay_out(tensor, indices, for(axis <- axes, do: Index.refine(axis, atoms)), atoms)
    end

    # The first elements along each axis; a slice that takes all of them would have a gradient all the same.
    defp cut(tensor, lengths) do
      if Tuple.to_list(tensor.shape) == lengths,
        do: tensor,
        else: Nx.slice(tensor, List.duplicate(0, length(lengths)), lengths)
    end

    defp sizes(digits), do: List.to_tuple(for {_, _, size} <- digits, do: size)
    defp nils(shape), do: List.duplicate(nil, tuple_size(shape))

    @doc "The output in the program's layout."
    def output(match, built) do
      %{batch: batch, rows: rows, heads: heads, groups: groups, values: values} = match.axes
      lay_out(built.o, [batch, rows, heads ++ groups, values], refined(match.out, match), match.atoms)
    end

    defp refined(indices, match), do: for(index <- indices, do: Index.refine(index, match.atoms))

    @doc "The gradient of the output in the library's layout."
    def dout(match, {_number, indices}, built, tensor) do
      %{batch: batch, rows: rows, heads: heads, groups: groups, values: values} = match.axes

      tensor
      |> lay_out(indices, [batch, rows, heads ++ groups, values], match.atoms)
      |> Nx.as_type(built.dout.type)
    end

    @doc "A gradient in the program's layout."
    def gradient(match, gradient, gradients) do
      {_, indices} = leaf(match, gradient.of)
      axes = refined(gradient.indices, match)
      result = gradients |> Map.fetch!(gradient.of) |> lay_out(indices, axes, match.atoms)
      if gradient.factor == 1, do: result, else: Nx.multiply(result, number_like(gradient.factor, result))
    end

    defp leaf(match, {:bias, n}), do: match.biases |> Enum.at(n) |> elem(0)
    defp leaf(match, {:sink, n}), do: Enum.at(match.sinks, n)
    defp leaf(match, name), do: Map.fetch!(match, name)

    defp number_like(number, tensor), do: Nx.tensor(number, type: tensor.type, backend: Nx.BinaryBackend)

    # ---- in words ----------------------------------------------------------------------------------------

    @doc "What a match becomes, in a line."
    def describe(match, graph) do
      [{batch, rows, heads, dim}, {_, columns, kv_heads, _}, _] = shapes(match)
      type = type(for {number, _} <- [match.q, match.k, match.v], do: Graph.fetch!(graph, number).type)

      parts =
        [
          "#{Nx.Type.to_string(type)} batch #{batch}, seqlen #{rows} x #{columns}, heads #{heads}:#{kv_heads}, head_dim #{dim}"
        ] ++
          ["scale #{Float.round(scale(match) / 1, 6)}"] ++
          if(match.factors != [], do: ["a scale known at run time"], else: []) ++
          if(match.sinks != [], do: [sinks_in_words(num_sinks(match))], else: []) ++
          if(match.softcap != 0, do: ["softcap #{abs(match.softcap)}"], else: []) ++
          mask_in_words(match) ++
          bias_in_words(match) ++
          dropout_in_words(match) ++
          gradients_in_words(match) ++
          overflow(match, graph)

      Enum.join(parts, ", ")
    end

    defp sinks_in_words(1), do: "1 sink"
    defp sinks_in_words(count), do: "#{count} sinks"

    defp mask_in_words(%{visibility: visibility} = match) do
      words =
        cond do
          Visibility.all?(%{visibility | others: []}) -> []
          Visibility.views(visibility) != [] -> ["a mask known at run time"]
          true -> visible(match, %{}) |> Enum.map(&in_words/1)
        end

      words ++
        List.wrap(
          %{none: nil, mean: "rows that see nothing give the mean", nan: "rows that see nothing give NaN"}[
            match.empty_rows
          ]
        )
    end

    defp bias_in_words(match) do
      if(match.visibility.others != [], do: ["a mask of single scores"], else: []) ++
        if(added(match) != [], do: ["a bias"], else: []) ++
        if match?({nil, nil}, alibi(match)), do: [], else: ["slopes of distances"]
    end

    defp in_words({:window, {:infinity, 0}}), do: "causal"
    defp in_words({:window, window}), do: "window #{inspect(window)}"
    defp in_words({:mask, mask}), do: "bands #{inspect(mask.numbers.bands)}"

    defp dropout_in_words(%{dropout: nil}), do: []

    defp dropout_in_words(match),
      do: ["dropout #{Float.round(rate(match) / 1, 6)} by other bits of the program's key"]

    defp gradients_in_words(%{gradients: []}), do: []

    defp gradients_in_words(%{gradients: gradients}) do
      names = Enum.map(gradients, &name/1)
      ["with " <> Enum.join(Enum.filter(["dq", "dk", "dv", "dbias", "dsink"], &(&1 in names)), ", ")]
    end

    defp name(%{of: {:bias, _n}}), do: "dbias"
    defp name(%{of: {:sink, _n}}), do: "dsink"
    defp name(%{of: of}), do: "d#{of}"

    # Scores of 16 bits end at 65504, the library's do not.
    defp overflow(match, graph) do
      if Graph.fetch!(graph, elem(match.product, 0)).type == {:f, 16},
        do: ["scores above 65504 overflow in the original"],
        else: []
    end
  end
end
