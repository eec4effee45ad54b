require FlashAttention.Packages

if Code.ensure_loaded?(Axon) and FlashAttention.Defn.supported?() do
  defmodule FlashAttention.Bumblebee do
    @moduledoc """
    FlashAttention in the models of Bumblebee: their attention is replaced in the graph, and nothing else.

        {:ok, model_info} =
          {:hf, "openai-community/gpt2"} |> Bumblebee.load_model() |> FlashAttention.Bumblebee.swap_attention()

    Parameters, inputs and outputs stay as they are: servings, generation with a cache and training work on the
    swapped model as on the original, and give the same numbers but for rounding, in memory that grows linearly with
    the sequence.

    ## What is done

    Causal masks, windows, scales, relative attention biases (T5, MPNet, Swin), masks of keys (`{batch, seqlen_k}`, padding on
    either side) and of single scores (`{batch, num_heads, seqlen_q, seqlen_k}`, of which all but the last may be 1), head masks,
    and the offset into a cache of fixed size, of which only what is filled is read (`key_lengths`).

    Attention weights that are dropped out in training (`FlashAttention.Dropout`), at the model's rate: by the key that the model's
    state keeps for that layer, which changes from step to step as it does in Bumblebee. The bits are others than those that Bumblebee
    draws from that key, and losses so the same on average.

    A mask of keys is a bias of u8, which costs one number a column; on Hopper GPUs 128 neighbouring keys that it hides
    are left out, in a forward of 16-bit types as far as they stand before all that it shows or behind, as padding does,
    and of a mask of single scores blocks of queries and keys. Where a model's masks
    are known to have their ones in one run, as padding on one side leaves them, `contiguous_masks: true` makes bands
    of them (`FlashAttention.Mask`), and what is padding is not computed at all.

    Rows that see nothing at all give what they give in Bumblebee, the mean of all values. Their gradients by queries and keys
    are 0, on which a mean does not depend, where Bumblebee has those of scores that were rounded away; a loss that leaves padding
    out sees neither.

    ## What is left alone

    Where the same numbers are not to be had, Bumblebee's own layers compute:

      * with tensors of different types
      * with what the first device of `:device` does not take

    `explain/3` tells of each attention which of the two computes it, and why.

    Attention weights that a model is asked for (`output_attentions`) are computed by Bumblebee, beside; in training, with what
    Bumblebee drops of them.
    """

    import Nx.Defn, only: [defnp: 2, deftransformp: 2]

    alias FlashAttention.{Error, Mask, Native, Options}

    @unbounded 0x7FFFFFFF

    @typedoc "An `Axon` model built by Bumblebee, or what `Bumblebee.load_model/2` returned."
    @type model :: Axon.t() | %{model: Axon.t()} | {:ok, %{model: Axon.t()}}

    @typedoc """
    What became of an attention: its `name` in the model; whether it was `swapped`; who computes it, `nil` where nobody
    does, as the model makes no use of it with such inputs; and why the library does not, where it does not.
    """
    @type attention :: %{
            name: String.t(),
            swapped: boolean,
            computed_by: :flash_attention | :bumblebee | nil,
            reason: String.t() | nil
          }

    @doc """
    Replaces attention in a model of Bumblebee; what comes in decides what comes out.

    Options are `:device`, `:precision` and `:deterministic` of `FlashAttention.attention/4`, the model says the rest; and
    `:contiguous_masks` (default false), whether masks of keys are known to have their ones in one run.
    A model without attention comes back as it is.
    """
    @spec swap_attention(model, keyword) :: model
    def swap_attention(model, opts \\ [])

    def swap_attention(%Axon{nodes: nodes} = model, opts) do
      check!(opts)

      Axon.rewrite_nodes(model, fn node ->
        case find(node, nodes) do
          {:ok, weights, dropout_rate} -> &rewrite(&1, &2, node, weights, dropout_rate, opts)
          :error -> :skip
        end
      end)
    end

    def swap_attention({:ok, model_info}, opts), do: {:ok, swap_attention(model_info, opts)}

    def swap_attention(%{model: %Axon{} = model} = model_info, opts),
      do: %{model_info | model: swap_attention(model, opts)}

    def swap_attention(other, _opts),
      do: raise(Error.invalid(:model, "a model of Bumblebee's", Error.show(other)))

    @options [:device, :precision, :deterministic]

    defp check!(opts) do
      # What is no keyword list, the library says.
      {own, opts} = if Keyword.keyword?(opts), do: Keyword.split(opts, [:contiguous_masks]), else: {[], opts}
      contiguous = Keyword.get(own, :contiguous_masks, false)

      if not is_boolean(contiguous),
        do: raise(Error.invalid(:contiguous_masks, "true or false", Error.show(contiguous)))

      Options.parse!(opts, @options)
    end

    @doc """
    What `swap_attention/2` makes of a model, for inputs of such shapes: every attention in it, in the order of the layers.

    `inputs` are the model's by name, as tensors or templates; nothing is computed. With `mode: :train` it is training that
    is asked about, in which weights may be dropped out. The model may have been swapped or not.

        FlashAttention.Bumblebee.explain(model_info, %{"input_ids" => Nx.template({1, 512}, :s64)})
        #=> [%{name: "decoder.blocks.0.self_attention", swapped: true, computed_by: :flash_attention, reason: nil}, ...]
    """
    @spec explain(model, %{String.t() => Nx.Tensor.t()}, keyword) :: [attention]
    def explain(model, inputs, opts \\ [])
    def explain({:ok, model_info}, inputs, opts), do: explain(model_info, inputs, opts)
    def explain(%{model: %Axon{} = model}, inputs, opts), do: explain(model, inputs, opts)

    def explain(%Axon{} = model, inputs, opts) do
      opts = Keyword.validate!(opts, mode: :inference)
      swapped = swap_attention(model)
      decisions = decisions(fn -> Axon.get_output_shape(swapped, inputs, opts) end)

      swapped
      |> Axon.reduce_nodes([], &[&1 | &2])
      |> Enum.filter(&(&1.op_name == :flash_attention or bumblebee?(&1, "attention_output_impl", 3)))
      |> Enum.with_index(&attention(&1, &2, swapped.nodes, decisions))
    end

    def explain(other, _inputs, _opts),
      do: raise(Error.invalid(:model, "a model of Bumblebee's", Error.show(other)))

    defp attention(%{op_name: :flash_attention, id: id} = node, index, nodes, decisions) do
      {computed_by, reason} =
        case decisions do
          %{^id => nil} -> {:flash_attention, nil}
          %{^id => reason} -> {:bumblebee, reason}
          _ -> {nil, "the model makes no use of it with these inputs"}
        end

      %{name: name(node, index, nodes), swapped: true, computed_by: computed_by, reason: reason}
    end

    defp attention(node, index, nodes, _decisions) do
      reason = "its layers are not connected as Bumblebee's attention is known to be"
      %{name: name(node, index, nodes), swapped: false, computed_by: :bumblebee, reason: reason}
    end

    # Bumblebee names the projections: what is before ".query" is the attention's name.
    defp name(node, index, nodes) do
      projection = Enum.find_value(ancestors([node], nodes), &projection/1)
      projection || "attention #{index}"
    end

    defp projection(%{op_name: op_name, name: name}) do
      name = if is_function(name, 2), do: name.(op_name, %{}), else: name
      with [_, name] <- Regex.run(~r/^(.+)\.(?:query|key|value)\b/, "#{name}"), do: name
    end

    # Nearest first.
    defp ancestors(nodes, all) do
      Stream.unfold({nodes, MapSet.new()}, fn
        {[], _seen} ->
          nil

        {[node | rest], seen} ->
          parents = Enum.reject(node.parent, &(&1 in seen))
          {node, {rest ++ Enum.map(parents, &all[&1]), MapSet.union(seen, MapSet.new(parents))}}
      end)
    end

    # Why a layer does not compute, or nil, by its node: layers note it when the model is traced, which is in this process.
    defp decisions(trace) do
      Process.put(__MODULE__, %{})
      trace.()
      Process.get(__MODULE__)
    after
      Process.delete(__MODULE__)
    end

    defp note(reason, node) do
      if noted = Process.get(__MODULE__), do: Process.put(__MODULE__, Map.put(noted, node.id, reason))
      reason
    end

    # ---- the graph: weights (query, key, masks) -> dropout -> output (weights, value) ------------------------

    defp find(%{parent: [dropped, _value]} = node, nodes) do
      with true <- bumblebee?(node, "attention_output_impl", 3),
           {weights, dropout_rate} = skip_dropout(nodes[dropped], nodes),
           true <- bumblebee?(weights, "attention_weights_impl", 7),
           6 <- length(weights.parent) do
        {:ok, weights, dropout_rate}
      else
        _ -> :error
      end
    end

    defp find(_node, _nodes), do: :error

    defp skip_dropout(%{op_name: :dropout, parent: [weights | _], opts: opts}, nodes),
      do: {nodes[weights], opts[:rate]}

    defp skip_dropout(weights, _nodes), do: {weights, 0.0}

    defp bumblebee?(%{op: op}, name, arity) when is_function(op, arity) do
      {:module, module} = Function.info(op, :module)
      {:name, function} = Function.info(op, :name)
      module == Bumblebee.Layers and Atom.to_string(function) =~ name
    end

    defp bumblebee?(_node, _name, _arity), do: false

    # The weights stay an input, for where Bumblebee's own layers compute; what nobody uses is not computed.
    defp rewrite([weights, value], _output, node, %{parent: parents, opts: model}, dropout_rate, opts) do
      {weights, dropout_key} = if dropout_rate > 0, do: with_key(weights), else: {weights, weights}
      inputs = Enum.map(parents, &%Axon{output: &1, nodes: weights.nodes})

      layer =
        Axon.layer(
          fn query, key, key_mask, head_mask, bias, offset, weights, value, dropout_key, layer_opts ->
            tensors = %{
              q: query,
              k: key,
              v: value,
              key_mask: key_mask,
              head_mask: head_mask,
              bias: bias,
              offset: offset
            }

            mode = layer_opts[:mode]
            opts = [inference: mode != :train] ++ dropout(dropout_key, dropout_rate, mode) ++ opts

            case prepare(tensors, model, opts) do
              {:ok, options} ->
                note(nil, node)
                attend(tensors, model, options)

              {:error, reason} ->
                note(reason, node)
                node.op.(weights, value, layer_opts)
            end
          end,
          inputs ++ [weights, value, dropout_key],
          op_name: :flash_attention
        )

      %{layer | nodes: Map.update!(layer.nodes, layer.output, &%{&1 | policy: node.policy})}
    end

    # A layer that drops weights keeps a key, under its name, in the model's state. Now it hands on that key, to us and to what
    # stands in its place and drops weights as it did. In inference Axon leaves it out, and hands on weights.
    defp with_key(%{output: id, nodes: nodes}) do
      %{parent: [weights], opts: opts, policy: policy} = node = nodes[id]
      key = System.unique_integer([:positive, :monotonic])
      nodes = Map.put(nodes, key, %{node | id: key, op: &next_key/3})
      inputs = [%Axon{output: weights, nodes: nodes}, %Axon{output: key, nodes: nodes}]
      %{output: drop, nodes: nodes} = Axon.layer(&drop/3, inputs, opts)
      {drop, nodes} = Map.pop!(nodes, drop)
      nodes = %{nodes | id => %{drop | id: id, policy: policy}}
      {%Axon{output: id, nodes: nodes}, %Axon{output: key, nodes: nodes}}
    end

    # Axon draws from one half of a key, and keeps the other.
    defp next_key(_weights, key, _opts),
      do: %Axon.StatefulOutput{output: key, state: %{"key" => Nx.Random.split(key)[0]}}

    defp drop(weights, key, opts) do
      if opts[:mode] == :train, do: Axon.Layers.dropout(weights, key, opts).output, else: weights
    end

    defp dropout(_weights, rate, mode) when rate == 0 or mode != :train, do: []
    defp dropout(key, rate, :train), do: [dropout: rate, dropout_seed: Nx.Random.split(key)[1]]

    # ---- what can be done exactly ------------------------------------------------------------------------

    # The options of attention, or why Bumblebee's layers must compute.
    defp prepare(%{q: q, k: k, v: v} = tensors, model, opts) do
      types = Enum.map([q, k, v], &Nx.type/1)

      cond do
        not match?([{class, _}] when class in [:f, :bf], Enum.uniq(types)) ->
          {:error, "q, k and v are of types #{Enum.map_join(types, ", ", &Nx.Type.to_string/1)}"}

        name = Enum.find([:key_mask, :bias], &(not of_scores?(tensors[&1], q, k))) ->
          {:error, "its #{name} is #{inspect(Nx.shape(tensors[name]))}"}

        true ->
          first_taken([q: q, k: k, v: v], choices(tensors, model, opts))
      end
    end

    # Of options that say the same, those that the device takes; or what it has against the last.
    defp first_taken(tensors, [options | others]) do
      case declined(tensors, options) do
        nil -> {:ok, options}
        _reason when others != [] -> first_taken(tensors, others)
        reason -> {:error, reason}
      end
    end

    # {batch, seqlen_k}, or {batch, num_heads, seqlen_q, seqlen_k} where each axis may be 1.
    defp of_scores?(%Axon.None{}, _q, _k), do: true

    defp of_scores?(%{shape: shape}, %{shape: {batch, rows, heads, _}}, %{shape: {_, keys, _, _}}) do
      sizes = if tuple_size(shape) == 2, do: [batch, keys], else: [batch, heads, rows, keys]

      length(sizes) == tuple_size(shape) and
        shape |> Tuple.to_list() |> Enum.zip(sizes) |> Enum.all?(fn {x, size} -> x in [1, size] end)
    end

    # What the first device has against it, in either pass.
    defp declined(tensors, options) do
      {optional, _others} = Keyword.split(options, [:bias, :mask, :key_lengths, :dropout_seed])

      shapes =
        for {name, x} <- tensors ++ Enum.map(optional, &tensor/1),
            into: %{},
            do: {name, {Nx.type(x), Nx.shape(x)}}

      %{devices: [device | _], native: native} = Options.parse!(options)

      with {:ok, outputs, _bytes, _kernel} <- Native.plan(:forward, shapes, native, device),
           inputs = shapes |> Map.merge(outputs) |> Map.put(:dout, outputs.o),
           {:ok, _gradients, _bytes, _kernel} <- Native.plan(:backward, inputs, native, device) do
        nil
      else
        {:error, {_reason, _argument, _expected, _got, message}} -> message
      end
    end

    defp tensor({:mask, %Mask{numbers: %{bands: bands}}}), do: {:bands, bands}
    defp tensor(other), do: other

    # ---- attention ---------------------------------------------------------------------------------------

    defp attend(%{q: q, k: k, v: v} = tensors, model, options) do
      {o, lse} = FlashAttention.attention_with_lse(q, k, v, options)

      o =
        cond do
          none?(tensors.key_mask) and not beyond?(q, k, window(model)) -> o
          none?(tensors.offset) -> or_mean(nothing?(lse, o), o, v)
          true -> or_mean_if_any(nothing?(lse, o), o, v)
        end

      # Weights take the bias's type where that is the wider, and so does what is made of them.
      o = if none?(tensors.bias), do: o, else: Nx.as_type(o, Nx.Type.merge(o.type, tensors.bias.type))

      if none?(tensors.head_mask), do: o, else: Nx.multiply(o, Nx.reshape(tensors.head_mask, {1, 1, :auto, 1}))
    end

    # Whether the window of the last row begins behind the last key.
    defp beyond?(_q, _k, {:infinity, _right}), do: false
    defp beyond?(q, k, {left, _right}), do: Nx.axis_size(q, 1) > Nx.axis_size(k, 1) + left

    # Which elements of o are of rows that see nothing.
    defp nothing?(lse, o) do
      nothing = lse |> Nx.Defn.Kernel.stop_grad() |> Nx.equal(Nx.Constants.neg_infinity(Nx.type(lse)))
      nothing |> Nx.transpose(axes: [0, 2, 1]) |> Nx.new_axis(-1) |> Nx.broadcast(Nx.shape(o))
    end

    # What such rows give in Bumblebee.
    defp or_mean(nothing, o, v),
      do: Nx.select(nothing, Nx.broadcast(Nx.mean(v, axes: [1], keep_axes: true), Nx.shape(o)), o)

    # The mean runs over all of a cache, of which little may be filled: so only where some row wants it.
    defnp or_mean_if_any(nothing, o, v) do
      if Nx.any(nothing), do: mean_of_cache(nothing, o, v), else: o
    end

    deftransformp(mean_of_cache(nothing, o, v), do: or_mean(nothing, o, v))

    # The options of attention, and others that say the same.
    defp choices(%{q: q, k: k} = tensors, model, opts) do
      {contiguous, opts} = Keyword.pop(opts, :contiguous_masks, false)
      mask = cells(tensors.key_mask, k, &Nx.not_equal(&1, 0))
      bias = cells(tensors.bias, k, &as_bias(&1, q))
      run = if contiguous, do: run(mask)
      scale = model[:scale] || 1 / :math.sqrt(Nx.axis_size(q, 3))

      for visibility <- visibility(tensors, window(model), run) do
        [causal: false, scale: scale] ++ visibility ++ bias(bias, if(run, do: nil, else: mask)) ++ opts
      end
    end

    # As a tensor of rank 4 with all columns.
    defp cells(%Axon.None{}, _k, _fun), do: nil

    defp cells(tensor, k, fun) do
      tensor = fun.(tensor)
      tensor = if Nx.rank(tensor) == 2, do: tensor |> Nx.new_axis(1) |> Nx.new_axis(1), else: tensor
      Nx.broadcast(tensor, tensor |> Nx.shape() |> put_elem(3, Nx.axis_size(k, 1)))
    end

    defp as_bias(bias, q), do: if(Nx.type(bias) == {:f, 32}, do: bias, else: Nx.as_type(bias, Nx.type(q)))

    defp bias(nil, nil), do: []
    defp bias(nil, mask), do: [bias: mask]
    defp bias(bias, nil), do: [bias: bias]

    defp bias(bias, mask) do
      shape =
        Enum.zip_with(Tuple.to_list(Nx.shape(bias)), Tuple.to_list(Nx.shape(mask)), &max/2) |> List.to_tuple()

      hidden = Nx.Constants.neg_infinity(Nx.type(bias))
      [bias: Nx.select(Nx.broadcast(mask, shape), Nx.broadcast(bias, shape), Nx.broadcast(hidden, shape))]
    end

    # Where the ones of a mask of keys begin and end.
    defp run(%{shape: {batch, 1, 1, keys}} = mask) do
      mask = Nx.reshape(mask, {batch, keys})
      first = Nx.argmax(mask, axis: 1, tie_break: :low)
      {first, Nx.add(first, Nx.sum(mask, axes: [1]))}
    end

    defp run(_none), do: nil

    defp window(model) do
      {left, right} = model[:window_size] || {:infinity, :infinity}
      {left, if(model[:causal], do: 0, else: right)}
    end

    # What the window shows of the keys from first to last - 1, or of all. Row i stands at offset + i. The first choice
    # costs least.
    defp visibility(%{q: q, k: k} = tensors, window, run) do
      {rows, keys} = {Nx.axis_size(q, 1), Nx.axis_size(k, 1)}
      aligned? = window == {:infinity, :infinity} or (none?(tensors.offset) and rows == keys)

      if run == nil and aligned? do
        [[window: window]]
      else
        offset = if none?(tensors.offset), do: 0, else: tensors.offset
        {first, last} = run || {0, keys}
        filled(tensors, window, run) ++ [[mask: Mask.from_bands(band(rows, first, last, offset, window))]]
      end
    end

    # Behind the last row a cache is not filled yet, and nothing there is seen: keys end beside that row.
    defp filled(%{q: q, k: k, offset: %Nx.Tensor{} = offset}, {left, 0}, nil) do
      lengths = offset |> Nx.add(Nx.axis_size(q, 1)) |> Nx.min(Nx.axis_size(k, 1))
      [[window: {left, 0}, key_lengths: lengths |> Nx.as_type(:s32) |> Nx.reshape({:auto})]]
    end

    defp filled(_tensors, _window, _run), do: []

    # The band's last row stands beside its last column, and so its window is further to the left than the model's.
    defp band(rows, first, last, offset, {left, right}) do
      shift = last |> Nx.subtract(rows) |> Nx.subtract(offset)
      left = if left == :infinity, do: @unbounded, else: Nx.add(left, shift)
      right = if right == :infinity, do: @unbounded, else: Nx.subtract(right, shift)
      count = Enum.max(for x <- [first, shift], is_struct(x, Nx.Tensor), do: Nx.size(x))

      [0, rows, first, last, left, right]
      |> Enum.map(&(&1 |> Nx.as_type(:s32) |> Nx.reshape({:auto}) |> Nx.broadcast({count})))
      |> Nx.stack(axis: 1)
      |> Nx.new_axis(1)
    end

    defp none?(tensor), do: is_struct(tensor, Axon.None)
  end
else
  FlashAttention.Packages.stand_in(FlashAttention.Bumblebee, "Axon, Bumblebee and Nx 0.12 or later", [
    :nx,
    :axon
  ])
end
