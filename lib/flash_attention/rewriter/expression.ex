if FlashAttention.Defn.supported?() do
  defmodule FlashAttention.Rewriter.Expression do
    @moduledoc false
    # The two ends of the rewriter that know Nx: an expression's scope as a graph, and what was found put back into it.
    # Nodes that nothing was done to stay as they are, with their ids.

    alias FlashAttention.Rewriter.{Attention, Graph, Matcher}
    alias Nx.Defn.{Composite, Expr, Tree}
    alias Nx.Tensor, as: T

    # What names a tensor and does not change it. Anything else in a metadata may be somebody's.
    @transparent [:stop_grad, :custom_grad, :inspect, :logits, :axon_layer, Nx.Defn.Grad]

    @same [:add, :subtract, :multiply, :divide, :pow, :remainder, :max, :min, :quotient, :atan2, :select, :clip] ++
            [:equal, :not_equal, :greater, :less, :less_equal, :greater_equal, :bitwise_and, :bitwise_or] ++
            [:logical_and, :logical_or, :logical_xor, :exp, :tanh, :log, :sqrt, :rsqrt, :negate, :abs, :sigmoid] ++
            [:as_type, :is_nan, :is_infinity, :sign, :floor, :ceil, :round, :erf, :log1p, :expm1, :sin, :cos] ++
            [:bitcast, :right_shift, :left_shift]

    # Results may differ from call to call, or have effects.
    @unique [
      :while,
      :cond,
      :fun,
      :hook,
      :token,
      :attach_token,
      :runtime_call,
      :io_call,
      :reduce,
      :window_reduce,
      :optional
    ]

    @doc "The expression with attention replaced, and a list of what was found."
    def rewrite(container, opts),
      do: Nx.with_default_backend({Expr, []}, fn -> rewrite_scope(container, opts) end)

    @doc "An expression's outermost scope as a graph."
    def graph(container), do: container |> scope() |> elem(0) |> Map.fetch!(:graph)

    defp rewrite_scope(container, opts) do
      {roots, numbers} = scope(container)
      {graph, matches, refused} = Matcher.run(roots.graph, &Attention.takes(&1, &2, opts), opts)
      roots = %{roots | graph: graph}
      {scopes, container} = put_back(container, roots, numbers, matches, opts)
      {container, report(roots, matches, refused, opts[:names] || %{}) ++ scopes}
    end

    # ---- to a graph --------------------------------------------------------------------------------------

    # tensors: for each value a tensor of the expression; numbers: of nodes, by their ids.
    defp scope(container) do
      state = %{graph: Graph.new(), tensors: %{}, labels: %{}, numbers: %{}}

      {results, state} =
        Composite.reduce(container, {[], state}, fn tensor, {results, state} ->
          {number, state} = number(tensor, state)
          {[number | results], state}
        end)

      {%{state | graph: %{state.graph | results: Enum.reverse(results)}}, state.numbers}
    end

    defp number(%T{data: %Expr{id: id}} = tensor, state) do
      case state.numbers do
        %{^id => number} ->
          {number, state}

        _ ->
          {number, state} = add(Nx.devectorize(tensor), state)
          {number, put_in(state.numbers[id], number)}
      end
    end

    defp add(%T{data: %Expr{op: :metadata, args: [%T{} = inner, metadata]}} = tensor, state) do
      if Enum.all?(Map.keys(metadata), &(&1 in @transparent)) do
        {number, state} = number(inner, state)
        {number, label(state, number, metadata)}
      else
        put(state, tensor, :opaque, [inner], {:metadata, tensor.data.id})
      end
    end

    defp add(%T{data: %Expr{op: op, args: args}} = tensor, state), do: node(op, args, tensor, state)

    defp label(state, number, %{axon_layer: name}),
      do: %{state | labels: Map.put_new(state.labels, number, name)}

    defp label(state, _number, _metadata), do: state

    defp node(:parameter, [index], tensor, state),
      do: put(state, tensor, :parameter, [], {index, tensor.data.context})

    defp node(:constant, [number], tensor, state),
      do: put(state, tensor, :constant, [], in_range(number, tensor.type))

    # A table that was broadcast before it came here is the smaller one, broadcast.
    defp node(:tensor, [numbers], tensor, state) do
      case table?(numbers) and first(numbers) do
        false -> put(state, tensor, :opaque, [], tensor.data.id)
        ^numbers -> put(state, tensor, :tensor, [], Nx.to_flat_list(numbers))
        first -> put(state, tensor, :broadcast, [Expr.tensor(first)], axes: behind(numbers, first))
      end
    end

    # Without an axis it counts in the order of memory.
    defp node(:iota, [nil], tensor, state),
      do:
        put(
          state,
          tensor,
          :reshape,
          [Nx.iota({Nx.size(tensor)}, axis: 0, type: tensor.type, backend: Expr)],
          nil
        )

    defp node(:iota, [axis], tensor, state), do: put(state, tensor, :iota, [], axis: axis)
    defp node(:squeeze, [inner, _axes], tensor, state), do: put(state, tensor, :reshape, [inner], nil)
    defp node(:reshape, [inner], tensor, state), do: put(state, tensor, :reshape, [inner], nil)
    defp node(:transpose, [inner, axes], tensor, state), do: put(state, tensor, :transpose, [inner], axes: axes)

    defp node(:broadcast, [inner, _shape, axes], tensor, state),
      do: put(state, tensor, :broadcast, [inner], axes: axes)

    defp node(reduction, [inner, opts], tensor, state) when reduction in [:sum, :reduce_max] do
      axes = opts[:axes] || Nx.axes(Nx.devectorize(inner))
      put(state, tensor, reduction, [inner], axes: axes)
    end

    defp node(:dot, [a, a_contract, a_batch, b, b_contract, b_batch], tensor, state),
      do: put(state, tensor, :dot, [a, b], batch: {a_batch, b_batch}, contract: {a_contract, b_contract})

    defp node(:concatenate, [tensors, axis], tensor, state),
      do: put(state, tensor, :concatenate, tensors, axis: axis)

    defp node(:pad, [inner, filling, sizes], tensor, state),
      do: put(state, tensor, :pad, [inner, filling], sizes: sizes)

    # Into a constant: what there is, with that around it.
    defp node(:put_slice, [%T{data: %Expr{op: :constant}} = filling, starts, inner], tensor, state) do
      known = for start <- starts, do: known_start(start)

      sizes =
        for {start, size, whole} when start != nil <-
              Enum.zip([known, Tuple.to_list(inner.shape), Tuple.to_list(tensor.shape)]),
            do: {start, whole - start - size, 0}

      if nil in known do
        later = for start <- starts, known_start(start) == nil, do: start
        put(state, tensor, :put_slice, [filling, inner | later], starts: known)
      else
        put(state, tensor, :pad, [inner, filling], sizes: sizes)
      end
    end

    defp node(:slice, [inner, starts, lengths, strides], tensor, state) do
      later = for start <- starts, known_start(start) == nil, do: start
      starts = Enum.map(starts, &known_start/1)
      put(state, tensor, :slice, [inner | later], lengths: lengths, starts: starts, strides: strides)
    end

    defp node(:block, [%Nx.Block.LogicalNot{}, [inner], _expr, _fun], tensor, state),
      do: put(state, tensor, :logical_not, [inner], nil)

    # What gradients that Nx made of somebody's block are those of: it differentiates what the block is made of, beside it.
    # The block is a value of its own all the same, as a compiler may have its own for it.
    defp node(:block, [struct, in_args, _expr, fun], tensor, state) do
      state =
        if nx?(struct) or own?(struct) do
          state
        else
          fun
          |> apply([struct | in_args])
          |> Composite.reduce(state, fn tensor, state -> tensor |> number(state) |> elem(1) end)
        end

      other(:block, tensor, state)
    end

    defp node(op, args, tensor, state) when op in @same, do: put(state, tensor, op, args, nil)

    # The bits that Nx.Random makes are a function of what goes in.
    defp node(:while, [initial, _arg, condition, body], tensor, state) do
      initial = Composite.flatten_list([initial])

      if threefry?(initial, {condition, body}),
        do: put(state, tensor, :threefry, initial, nil),
        else: put(state, tensor, :while, initial, tensor.data.id)
    end

    defp node(:elem, [tuple, index], tensor, state), do: put(state, tensor, :elem, [tuple], index)

    defp node(op, _args, tensor, state), do: other(op, tensor, state)

    defp other(op, tensor, state) do
      {rest, inner} = Tree.apply_args(tensor, :scope, [], fn arg, inner -> {:tensor, [arg | inner]} end)
      inner = Enum.filter(inner, &is_struct(&1.data, Expr))
      inner = if op == :fun, do: [], else: Enum.reverse(inner)
      opts = if op in @unique, do: tensor.data.id, else: without_functions(op, rest)
      put(state, tensor, op, inner, opts)
    end

    # Whether a while is that of Nx.Random in the version that is here.
    defp threefry?([_one, %T{type: {:u, 32}, shape: {_} = shape}, %T{type: {:u, 32}} | _] = initial, scopes)
         when length(initial) == 8 do
      templates = [Nx.template({2, elem(shape, 0)}, :u32), Nx.template({2}, :u32)]
      bits = Nx.Defn.debug_expr_apply(&Nx.Random.threefry2x32_20_concat/2, templates)
      %T{data: %Expr{op: :concatenate, args: [[%T{data: %Expr{op: :elem, args: [loop, _]}} | _], _]}} = bits
      [_initial, _arg, condition, body] = loop.data.args
      written(scopes) == written({condition, body})
    end

    defp threefry?(_initial, _scopes), do: false

    # What a scope does, whichever nodes it is made of, with the bodies of its loops.
    defp written(container) do
      {%{graph: graph, tensors: tensors}, _numbers} = scope(container)

      values =
        for {number, value} <- graph.values, do: {number, %{value | opts: written(value, tensors[number])}}

      {graph.results, Map.new(values)}
    end

    defp written(%{op: :parameter, opts: {index, _context}}, _tensor), do: index
    defp written(%{op: :while}, %T{data: %Expr{args: [_, _, condition, body]}}), do: written({condition, body})
    defp written(%{opts: opts}, _tensor), do: opts

    # nil where it is known at run time.
    defp known_start(start) when is_integer(start), do: start
    defp known_start(%T{data: %Expr{op: :constant, args: [start]}}), do: start
    defp known_start(_start), do: nil

    # Of a block, the expression and the function that made it say nothing beyond its struct and its arguments.
    defp without_functions(:block, [struct, in_args, _expr, _fun]), do: {struct, in_args}
    defp without_functions(_op, rest), do: rest

    defp put(state, tensor, op, inner, opts) do
      {args, state} = Enum.map_reduce(inner, state, &number/2)
      value = %{op: op, args: args, opts: opts, type: tensor.type, shape: tensor.shape}
      {number, graph} = Graph.put(state.graph, value)
      {number, %{state | graph: graph, tensors: Map.put_new(state.tensors, number, tensor)}}
    end

    # What stands at each place of the first axes, where that is the same everywhere.
    defp first(%T{shape: shape} = numbers) when tuple_size(shape) > 1 do
      [one | others] = for row <- 0..(elem(shape, 0) - 1), do: numbers[row]
      if Enum.all?(others, &(Nx.to_binary(&1) == Nx.to_binary(one))), do: first(one), else: numbers
    end

    defp first(numbers), do: numbers

    defp behind(numbers, first), do: numbers |> Nx.axes() |> Enum.take(-Nx.rank(first))

    # Constants are of any size until a compiler makes them numbers of their type.
    @largest %{{:f, 16} => 65_504, {:bf, 16} => 3.39e38, {:f, 32} => 3.4029e38}
    defp in_range(number, type) when is_number(number) do
      largest = @largest[type]

      cond do
        largest == nil or abs(number) <= largest -> number
        number > 0 -> :infinity
        true -> :neg_infinity
      end
    end

    defp in_range(number, _type), do: number

    # Weights that a model closed over are constants too, and nobody wants them as a list.
    @largest_table 4_194_304
    defp table?(%T{type: {class, _}} = tensor) when class in [:u, :s, :f, :bf] do
      Nx.size(tensor) <= @largest_table and
        tensor
        |> Nx.to_binary(limit: 64)
        |> Nx.from_binary(tensor.type, backend: Nx.BinaryBackend)
        |> Nx.to_flat_list()
        |> Enum.uniq()
        |> length() <= 2
    end

    defp table?(_tensor), do: false

    # ---- back to an expression ---------------------------------------------------------------------------

    defp put_back(container, roots, numbers, matches, opts) do
      outputs = for match <- matches, {number, role} <- roles(match), into: %{}, do: {number, {match, role}}

      state = %{
        outputs: outputs,
        graph: roots.graph,
        tensors: roots.tensors,
        numbers: numbers,
        done: %{},
        built: %{},
        found: [],
        opts: opts
      }

      {container, state} = Composite.traverse(container, state, &rebuild/2)
      {state.found, container}
    end

    defp roles(match),
      do: [{match.output, :o} | for(gradient <- match.gradients, do: {gradient.output, gradient})]

    defp rebuild(%T{data: %Expr{id: id}} = tensor, state) do
      case state.done do
        %{^id => data} ->
          {%{tensor | data: data}, state}

        _ ->
          {data, state} = rebuild_node(tensor, state)
          {%{tensor | data: data}, %{state | done: Map.put(state.done, id, data)}}
      end
    end

    defp rebuild_node(%T{data: data} = tensor, state) do
      case state.outputs[state.numbers[data.id]] do
        nil -> rebuild_args(Nx.devectorize(tensor), state)
        {_match, %{of: :zero}} -> {Nx.broadcast(Nx.tensor(0, type: tensor.type), tensor.shape).data, state}
        {match, role} -> replace(Nx.devectorize(tensor), match, role, state)
      end
    end

    defp rebuild_args(%T{data: %Expr{op: op} = data} = tensor, state) do
      {args, state} = inside(op, tensor, state)
      if same?(args, data.args), do: {data, state}, else: {Tree.put_args(tensor, args).data, state}
    end

    # Bodies are scopes of their own.
    defp inside(:while, tensor, state) do
      {[initial, arg, condition, body], state} = Tree.apply_args(tensor, :scope, state, &rebuild/2)
      {{condition, body}, state} = own_scope({condition, body}, state)
      {[initial, arg, condition, body], state}
    end

    defp inside(:fun, %T{data: %{args: [args, body, mfa]}}, state) do
      {body, state} = own_scope(body, state)
      {[args, body, mfa], state}
    end

    defp inside(:block, %T{data: %{args: [struct | _]}} = tensor, state) do
      {[struct_, in_args, body, fun], state} =
        with_lists(tensor, state, fn tensor, state -> Tree.apply_args(tensor, :scope, state, &rebuild/2) end)

      {body, state} = if own?(struct), do: {body, state}, else: own_scope(body, state)
      {[struct_, in_args, body, fun], state}
    end

    defp inside(_op, tensor, state), do: Tree.apply_args(tensor, :scope, state, &rebuild/2)

    # Options may stand among the arguments of a block.
    defp with_lists(%T{data: %{args: [struct, in_args, body, fun]} = data} = tensor, state, apply_args) do
      {tensors, lists} = Enum.split_while(in_args, &(not is_list(&1)))
      tensor = %{tensor | data: %{data | args: [struct, tensors, body, fun]}}
      {[struct, tensors, body, fun], state} = apply_args.(tensor, state)
      {[struct, tensors ++ lists, body, fun], state}
    end

    defp own?(%module{}), do: match?("Elixir.FlashAttention." <> _, Atom.to_string(module))
    defp nx?(%module{}), do: match?("Elixir.Nx." <> _, Atom.to_string(module))

    defp own_scope(container, state) do
      {rewritten, found} = rewrite_scope(container, state.opts)
      {rewritten, %{state | found: state.found ++ found}}
    end

    # Whether arguments are the same nodes, wherever they stand.
    defp same?(one, other), do: ids(one) == ids(other)

    defp ids(%T{data: %Expr{id: id}}), do: id
    defp ids(tuple) when is_tuple(tuple), do: tuple |> Tuple.to_list() |> Enum.map(&ids/1)
    defp ids(list) when is_list(list), do: Enum.map(list, &ids/1)
    defp ids(other), do: other

    # ---- what comes in the place of attention ------------------------------------------------------------

    defp replace(tensor, match, role, state) do
      {built, state} = built(match, state)
      {result, state} = result(role, match, built, state)
      result = result |> Nx.as_type(tensor.type) |> Nx.reshape(tensor.shape)
      {Expr.tensor(result).data, state}
    end

    defp built(%{output: output} = match, state) do
      case state.built do
        %{^output => built} ->
          {built, state}

        _ ->
          {inputs, state} =
            Enum.map_reduce(Matcher.inputs(match), state, fn number, state ->
              {tensor, state} = input(number, state)
              {{number, tensor}, state}
            end)

          built = Attention.build(match, named(match, Map.new(inputs)), state.opts)
          built = Map.put(built, :inputs, for({_number, tensor} <- inputs, do: tensor))
          {built, %{state | built: Map.put(state.built, output, built)}}
      end
    end

    # What was added to the graph is made of what was there.
    defp input(number, state) do
      case state.tensors do
        %{^number => tensor} ->
          rebuild(tensor, state)

        _ ->
          value = Graph.fetch!(state.graph, number)
          {args, state} = Enum.map_reduce(value.args, state, &input/2)
          {value.op |> made(args, value) |> Nx.as_type(value.type), state}
      end
    end

    defp made(:slice, [tensor], %{opts: opts}), do: Nx.slice(tensor, opts[:starts], opts[:lengths])

    defp made(:view, [tensor], %{opts: [indices: indices], shape: shape}),
      do: Attention.view(tensor, indices, shape)

    defp made(:iota, [], %{opts: [axis: axis], shape: shape}), do: Nx.iota(shape, axis: axis)
    defp made(:constant, [], %{opts: number, type: type}), do: Expr.constant(Nx.template({}, type), number, [])
    defp made(:as_type, [tensor], %{type: type}), do: Nx.as_type(tensor, type)

    defp made(op, tensors, %{shape: shape}),
      do: apply(Nx, op, for(tensor <- tensors, do: Nx.broadcast(tensor, shape)))

    # The tensors that gradients may be wanted of go by name too.
    defp named(match, inputs) do
      leaves =
        [q: match.q, k: match.k, v: match.v] ++
          for({{view, _factor}, n} <- Enum.with_index(match.biases), do: {{:bias, n}, view}) ++
          for {view, n} <- Enum.with_index(match.sinks), do: {{:sink, n}, view}

      for {name, {number, _indices}} <- leaves, into: inputs, do: {name, Map.fetch!(inputs, number)}
    end

    defp result(:o, match, built, state), do: {Attention.output(match, built), state}

    defp result(gradient, match, built, state) do
      {gradients, state} = gradients(match, gradient.dout, built, state)
      {Attention.gradient(match, gradient, gradients), state}
    end

    # Of one dout all at once, so that they are one backward.
    defp gradients(match, {number, _indices} = dout, built, state) do
      key = {match.output, dout}

      case state.built do
        %{^key => gradients} ->
          {gradients, state}

        _ ->
          {tensor, state} = rebuild(Map.fetch!(state.tensors, number), state)
          tensor = Attention.dout(match, dout, built, tensor)
          gradients = substitute(built.gradients, built.dout.data.id, tensor, built.inputs)
          {gradients, %{state | built: Map.put(state.built, key, gradients)}}
      end
    end

    # Expressions with a tensor in the place of a node, which is nowhere below these inputs.
    defp substitute(container, id, replacement, inputs) do
      done =
        for tensor <- inputs, into: %{id => Expr.tensor(replacement).data}, do: {tensor.data.id, tensor.data}

      {container, _done} = Composite.traverse(container, done, &substitute_in/2)
      container
    end

    defp substitute_in(%T{data: %Expr{id: id} = data} = tensor, done) do
      case done do
        %{^id => data} ->
          {%{tensor | data: data}, done}

        _ ->
          {args, done} = Tree.apply_args(Nx.devectorize(tensor), :scope, done, &substitute_in/2)
          new = if same?(args, data.args), do: data, else: Tree.put_args(tensor, args).data
          {%{tensor | data: new}, Map.put(done, id, new)}
      end
    end

    # ---- what is said of it ------------------------------------------------------------------------------

    defp report(roots, matches, refused, names) do
      named = for {id, name} <- names, number = roots.numbers[id], into: %{}, do: {number, name}

      rewritten =
        for match <- matches do
          tensors = for name <- [:q, :k, :v], do: {name, match |> Map.fetch!(name) |> elem(0)}

          roots
          |> said(match.output, tensors, named)
          |> Map.merge(%{rewritten: true, as: Attention.describe(match, roots.graph)})
        end

      left =
        for {number, reason} <- refused,
            do: roots |> said(number, [o: number], named) |> Map.merge(%{rewritten: false, reason: reason})

      (rewritten ++ left) |> Enum.sort_by(& &1.at) |> Enum.map(&Map.delete(&1, :at))
    end

    defp said(roots, number, tensors, named) do
      from =
        for {name, number} <- tensors,
            found = nearest(roots.graph, [number], named, MapSet.new()),
            do: {name, found}

      %{at: number, place: place(roots, number), from: Map.new(from)}
    end

    # The name of what the function was given that is the fewest steps away, of several the one with the most keys.
    defp nearest(_graph, [], _named, _seen), do: nil
    defp nearest(_graph, _numbers, named, _seen) when named == %{}, do: nil

    defp nearest(graph, numbers, named, seen) do
      found = for number <- numbers, name = named[number], do: name

      with nil <- Enum.max_by(found, &length(String.split(&1, ".")), fn -> nil end) do
        seen = MapSet.union(seen, MapSet.new(numbers))

        args =
          for number <- numbers, arg <- Graph.fetch!(graph, number).args, arg not in seen, uniq: true, do: arg

        nearest(graph, args, named, seen)
      end
    end

    @doc "The names of the tensors in what a function is given, by their ids: the keys that lead to them."
    def names(arguments) do
      for {argument, n} <- Enum.with_index(arguments), entry <- names(argument, []), into: %{} do
        case entry do
          {id, []} -> {id, "argument #{n}"}
          {id, keys} -> {id, Enum.join(keys, ".")}
        end
      end
    end

    defp names(%T{data: %Expr{id: id}}, keys), do: [{id, Enum.reverse(keys)}]
    defp names(%_{} = struct, keys), do: struct |> Map.from_struct() |> names(keys)
    defp names(%{} = map, keys), do: Enum.flat_map(map, fn {key, value} -> names(value, [key(key) | keys]) end)
    defp names(tuple, keys) when is_tuple(tuple), do: tuple |> Tuple.to_list() |> names(keys)

    defp names([_ | _] = list, keys),
      do: list |> Enum.with_index() |> Enum.flat_map(fn {value, n} -> names(value, ["#{n}" | keys]) end)

    defp names(_other, _keys), do: []

    defp key(key) when is_binary(key) or is_atom(key), do: to_string(key)
    defp key(key), do: inspect(key)

    # A name that Axon gave to what it is in, and the product that it ends with.
    defp place(roots, number) do
      layer = roots.labels |> Enum.filter(fn {at, _} -> at >= number end) |> Enum.min(fn -> nil end)
      name = if layer, do: "#{elem(layer, 1)}: "
      "#{name}#{Matcher.describe(roots.graph, number)}"
    end
  end
end
