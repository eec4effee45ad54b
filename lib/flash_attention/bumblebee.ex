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

    Causal masks, windows, scales, masks of keys (`{batch, seqlen_k}`, padding on either side), head masks, and the
    offset into a cache of fixed size.

    A mask of keys costs a few columns: queries get a column of ones and keys one that is far below 0 where they are
    masked, so that head_dim grows to the next multiple of 8. Rows that see nothing at all give what they give in
    Bumblebee, the mean of all values. Their gradients by queries and keys are 0, on which a mean does not depend, where
    Bumblebee has those of scores that were rounded away; a loss that leaves padding out sees neither.

    ## What is left alone

    Where the same numbers are not to be had, Bumblebee's own layers compute:

      * with a relative attention bias (T5, MPNet, Swin) or masks of single scores (`{batch, num_heads, seqlen_q, seqlen_k}`)
      * with a window that looks ahead and a sequence that is not aligned with its keys
      * in training mode, where attention weights are dropped out; configure the model with
        `attention_dropout_rate: 0.0` to train with FlashAttention
      * with tensors of different types, or a head_dim that does not fit 256 with the columns of the mask

    `explain/3` tells of each attention which of the two computes it, and why.

    Attention weights that a model is asked for (`output_attentions`) are computed by Bumblebee, beside.
    """

    alias FlashAttention.{Error, Options}

    # A masked key's score is 2^20 times scale below what it would be: exp of it is 0 exactly, and the numbers
    # themselves are exact in every type and small enough to cost other columns no precision.
    @far 1024

    @max_head_dim 256

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

    Options are `:device`, `:precision` and `:deterministic` of `FlashAttention.attention/4`; the model says the rest.
    A model without attention comes back as it is.
    """
    @spec swap_attention(model, keyword) :: model
    def swap_attention(model, opts \\ [])

    def swap_attention(%Axon{nodes: nodes} = model, opts) do
      Options.parse!(opts, [:device, :precision, :deterministic])

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
      inputs = Enum.map(parents, &%Axon{output: &1, nodes: weights.nodes})

      layer =
        Axon.layer(
          fn query, key, key_mask, head_mask, bias, offset, weights, value, layer_opts ->
            tensors = %{
              q: query,
              k: key,
              v: value,
              key_mask: key_mask,
              head_mask: head_mask,
              bias: bias,
              offset: offset
            }

            dropout_rate = if layer_opts[:mode] == :train, do: dropout_rate, else: 0

            if tensors |> obstacle(model, dropout_rate) |> note(node),
              do: node.op.(weights, value, layer_opts),
              else: tensors |> given() |> attend(model, opts)
          end,
          inputs ++ [weights, value],
          op_name: :flash_attention
        )

      %{layer | nodes: Map.update!(layer.nodes, layer.output, &%{&1 | policy: node.policy})}
    end

    # ---- what can be done exactly ------------------------------------------------------------------------

    # Why Bumblebee's layers must compute; nil where they need not.
    defp obstacle(%{q: q, k: k, v: v, key_mask: key_mask} = tensors, model, dropout_rate) do
      columns = if none?(key_mask) and aligned?(tensors), do: 0, else: columns(q)
      types = Enum.map([q, k, v], &Nx.type/1)

      cond do
        dropout_rate > 0 ->
          "its weights are dropped out in training, at a rate of #{dropout_rate}"

        not none?(tensors.bias) ->
          "a bias is added to its scores, #{inspect(Nx.shape(tensors.bias))}"

        not key_mask_of_keys?(key_mask) ->
          "its mask is one of single scores, #{inspect(Nx.shape(key_mask))}"

        not placed?(tensors, window(model)) ->
          "its window looks ahead where rows are not aligned with keys"

        match?([_, _ | _], Enum.uniq(types)) or not match?([{class, _} | _] when class in [:f, :bf], types) ->
          "q, k and v are of types #{Enum.map_join(types, ", ", &Nx.Type.to_string/1)}"

        Nx.axis_size(q, 3) + columns > @max_head_dim ->
          "head_dim is #{Nx.axis_size(q, 3)}, with #{columns} more for a mask; #{@max_head_dim} is the most"

        true ->
          nil
      end
    end

    # See place/2.
    defp placed?(_tensors, {:infinity, :infinity}), do: true

    defp placed?(%{q: q, k: k} = tensors, {_left, right}) do
      {rows, keys} = {Nx.axis_size(q, 1), Nx.axis_size(k, 1)}
      aligned?(tensors) or rows == 1 or (right == 0 and rows <= keys)
    end

    defp none?(tensor), do: is_struct(tensor, Axon.None)

    # Masks of rank 4 may be masks of keys too: {batch, 1, 1, seqlen_k}.
    defp key_mask_of_keys?(%Axon.None{}), do: true
    defp key_mask_of_keys?(%{shape: {_batch, _seqlen_k}}), do: true
    defp key_mask_of_keys?(%{shape: {_batch, 1, 1, _seqlen_k}}), do: true
    defp key_mask_of_keys?(_mask), do: false

    # Whether the last row is that of the last key, as FlashAttention has it.
    defp aligned?(%{q: q, k: k, offset: offset}),
      do: none?(offset) and Nx.axis_size(q, 1) == Nx.axis_size(k, 1)

    # ---- attention ---------------------------------------------------------------------------------------

    # Tensors by name, nil where there is none. mask is {batch, seqlen_k}; offset nil where the rows are aligned.
    defp given(tensors) do
      aligned? = aligned?(tensors)
      tensors = Map.new(tensors, fn {name, tensor} -> {name, if(!none?(tensor), do: tensor)} end)
      {key_mask, tensors} = Map.pop!(tensors, :key_mask)
      mask = key_mask && Nx.not_equal(Nx.reshape(key_mask, {:auto, Nx.axis_size(tensors.k, 1)}), 0)
      Map.merge(tensors, %{mask: mask, offset: if(!aligned?, do: tensors.offset || 0)})
    end

    defp attend(%{q: q, v: v, head_mask: head_mask} = tensors, model, opts) do
      mean = Nx.mean(v, axes: [1], keep_axes: true)
      {tensors, visibility} = place(tensors, window(model))
      scale = model[:scale] || 1 / :math.sqrt(Nx.axis_size(q, 3))
      opts = [causal: false, window: visibility, scale: scale] ++ opts

      o = attend_masked(tensors, opts, visibility, mean)
      if head_mask, do: Nx.multiply(o, Nx.reshape(head_mask, {1, 1, :auto, 1})), else: o
    end

    defp window(model) do
      {left, right} = model[:window_size] || {:infinity, :infinity}
      {left, if(model[:causal], do: 0, else: right)}
    end

    # Brings the last row to the last key, and returns the window that then remains. Row i stands at offset + i.
    defp place(%{offset: nil} = tensors, window), do: {tensors, window}
    defp place(tensors, {:infinity, :infinity} = window), do: {tensors, window}

    # One row: what it sees is a mask of keys.
    defp place(%{q: %{shape: {_, 1, _, _}}, k: k, offset: offset} = tensors, {left, right}) do
      distance = Nx.subtract(Nx.iota({1, Nx.axis_size(k, 1)}, axis: 1), offset)
      behind = if left != :infinity, do: Nx.greater_equal(distance, -left)
      ahead = if right != :infinity, do: Nx.less_equal(distance, right)
      {mask(tensors, both(behind, ahead)), {:infinity, :infinity}}
    end

    # Causal: keys behind the last row are never seen. They go round to the front, and are masked there.
    defp place(%{q: q, k: k, offset: offset} = tensors, {_left, 0} = window) do
      {rows, keys} = {Nx.axis_size(q, 1), Nx.axis_size(k, 1)}
      positions = Nx.iota({keys})
      ends = Nx.add(offset, rows)
      turned = Nx.remainder(Nx.add(positions, ends), keys)
      turn = &(&1 && Nx.take(&1, turned, axis: 1))
      tensors = %{tensors | k: turn.(k), v: turn.(tensors.v), mask: turn.(tensors.mask)}
      {mask(tensors, Nx.reshape(Nx.greater_equal(positions, Nx.subtract(keys, ends)), {1, keys})), window}
    end

    defp mask(%{mask: mask} = tensors, more), do: %{tensors | mask: both(mask, more)}

    defp both(nil, mask), do: mask
    defp both(mask, nil), do: mask
    defp both(one, other), do: Nx.logical_and(one, other)

    defp attend_masked(%{q: q, k: k, v: v, mask: nil}, opts, _window, _mean),
      do: FlashAttention.attention(q, k, v, opts)

    defp attend_masked(%{q: q, k: k, v: v, mask: mask}, opts, window, mean) do
      far = mask |> Nx.select(0, -@far) |> Nx.new_axis(-1) |> Nx.new_axis(-1)
      o = FlashAttention.attention(widen(q, @far), widen(k, far), widen(v, 0), opts)
      o = o[[.., .., .., 0..(Nx.axis_size(q, 3) - 1)]]

      visible = mask |> visible_keys(Nx.axis_size(q, 1), window) |> Nx.new_axis(-1) |> Nx.new_axis(-1)
      Nx.select(Nx.broadcast(Nx.greater(visible, 0), o), o, Nx.broadcast(mean, o))
    end

    # How many columns make head_dim the multiple of 8 that has room for one more.
    defp columns(tensor), do: 8 - rem(Nx.axis_size(tensor, 3), 8)

    # Columns behind those of the tensor: the given one, and zeros.
    defp widen(tensor, column) do
      first = tensor |> Nx.shape() |> put_elem(3, columns(tensor)) |> Nx.iota(axis: 3) |> Nx.equal(0)
      Nx.concatenate([tensor, Nx.as_type(Nx.multiply(first, column), Nx.type(tensor))], axis: 3)
    end

    # {batch, seqlen_q}: how many keys that are not masked each row sees.
    defp visible_keys(mask, rows, {left, right}) do
      keys = Nx.axis_size(mask, 1)
      sums = mask |> Nx.as_type(:s32) |> Nx.cumulative_sum(axis: 1) |> Nx.pad(0, [{0, 0, 0}, {1, 0, 0}])
      position = Nx.add(Nx.iota({rows}), keys - rows)

      until =
        if right == :infinity,
          do: Nx.broadcast(keys, {rows}),
          else: position |> Nx.add(right + 1) |> Nx.clip(0, keys)

      from =
        if left == :infinity,
          do: Nx.broadcast(0, {rows}),
          else: position |> Nx.subtract(left) |> Nx.clip(0, keys)

      Nx.subtract(Nx.take(sums, until, axis: 1), Nx.take(sums, from, axis: 1))
    end
  end
else
  FlashAttention.Packages.stand_in(FlashAttention.Bumblebee, "Axon, Bumblebee and Nx 0.12 or later", [
    :nx,
    :axon
  ])
end
