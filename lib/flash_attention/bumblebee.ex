require FlashAttention.Packages

if Code.ensure_loaded?(Axon) and FlashAttention.Defn.supported?() do
  defmodule FlashAttention.Bumblebee do
    @moduledoc """
    FlashAttention in the models of Bumblebee: their attention is replaced in the graph, and nothing else.

        {:ok, model_info} = Bumblebee.load_model({:hf, "openai-community/gpt2"})
        model_info = FlashAttention.Bumblebee.swap_attention(model_info)

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

      * with a relative attention bias (T5) or masks of single scores (`{batch, num_heads, seqlen_q, seqlen_k}`)
      * with a window that looks ahead and a sequence that is not aligned with its keys
      * in training mode, where attention weights are dropped out; configure the model with
        `attention_dropout_rate: 0.0` to train with FlashAttention
      * with tensors of different types, or a head_dim that does not fit 256 with the columns of the mask

    Attention weights that a model is asked for (`output_attentions`) are computed by Bumblebee, beside.
    """

    alias FlashAttention.Options

    # A masked key's score is 2^20 times scale below what it would be: exp of it is 0 exactly, and the numbers
    # themselves are exact in every type and small enough to cost other columns no precision.
    @far 1024

    @max_head_dim 256

    @doc """
    Replaces attention in an `Axon` model built by Bumblebee, or in what `Bumblebee.load_model/2` returned.

    Options are `:device`, `:precision` and `:deterministic` of `FlashAttention.attention/4`; the model says the rest.
    A model without attention comes back as it is.
    """
    @spec swap_attention(Axon.t() | %{model: Axon.t()}, keyword) :: Axon.t() | map
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

    def swap_attention(%{model: %Axon{} = model} = model_info, opts),
      do: %{model_info | model: swap_attention(model, opts)}

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

            drops? = layer_opts[:mode] == :train and dropout_rate > 0

            if drops? or not exact?(tensors, model),
              do: node.op.(weights, value, layer_opts),
              else: tensors |> given() |> attend(model, opts)
          end,
          inputs ++ [weights, value],
          op_name: :flash_attention
        )

      %{layer | nodes: Map.update!(layer.nodes, layer.output, &%{&1 | policy: node.policy})}
    end

    # ---- what can be done exactly ------------------------------------------------------------------------

    defp exact?(%{q: q, k: k, v: v, key_mask: key_mask, bias: bias} = tensors, model) do
      head_dim = Nx.axis_size(q, 3) + if(none?(key_mask) and aligned?(tensors), do: 0, else: columns(q))

      none?(bias) and key_mask_of_keys?(key_mask) and placed?(tensors, window(model)) and
        match?({class, _} when class in [:f, :bf], q.type) and q.type == k.type and q.type == v.type and
        head_dim <= @max_head_dim
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
