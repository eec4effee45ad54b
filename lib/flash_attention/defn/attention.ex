if FlashAttention.Defn.supported?() do
  defmodule FlashAttention.Defn.Attention do
    @moduledoc false

    alias FlashAttention.Defn.{Backward, Forward}
    require Logger

    alias FlashAttention.{Error, Mask, Native, Options, Packages}
    alias Nx.Defn.{Expr, Kernel}

    @doc false
    def attention_with_lse(q, k, v, opts) do
      {inputs, opts} = check!([q: q, k: k, v: v], opts)

      # Every vectorized axis is a part of the batch.
      [q | _] = tensors = Nx.broadcast_vectors([inputs[:q], inputs[:k], inputs[:v]])
      {_q_k_v, optional} = Enum.split(inputs, 3)
      tensors = Enum.map(tensors ++ Keyword.values(optional), &flatten/1)
      inputs = inputs |> Keyword.keys() |> Enum.zip(tensors)
      plan!(:forward, inputs, opts)
      {o, lse} = forward(inputs, opts)

      [batch, seqlen_q, num_heads, _head_dim] = q.names
      {batches, rows, heads, _} = q.shape

      {Nx.revectorize(o, q.vectorized_axes, target_shape: q.shape, target_names: q.names),
       Nx.revectorize(lse, q.vectorized_axes,
         target_shape: {batches, heads, rows},
         target_names: [batch, num_heads, seqlen_q]
       )}
    end

    # ---- what is given: tensors by name, those of options last, and the other options -------------------------

    # By the library's names; with the options that bring them along.
    @optional Options.tensors()
    @optional_names Keyword.keys(@optional)

    # Where results lie, and what is kept, is the compiler's choice; gradients by lse are Nx's to bring.
    defp check!(inputs, opts) do
      tensors = Options.parse!(opts, Options.keys() -- [:keep, :results, :dlse]).tensors
      inputs = for {name, tensor} <- inputs, do: {name, tensor!(name, tensor)}
      size = {seqlen(inputs[:q]), seqlen(inputs[:k]) * pages_a_batch(tensors[:page_table])}

      optional =
        for name <- @optional_names, tensor = tensors[name], do: {name, tensor!(name, numbers(tensor, size))}

      {inputs ++ optional, Keyword.drop(opts, Keyword.values(@optional))}
    end

    # Where there is none, the library says what is wrong with the shape.
    defp seqlen(%{shape: shape}), do: if(tuple_size(shape) > 1, do: elem(shape, 1), else: 0)

    # Where k is pages, its axis 1 is a page's.
    defp pages_a_batch(%{shape: {_batch, max_pages}}), do: max_pages
    defp pages_a_batch(_none), do: 1

    defp numbers(%Mask{} = mask, size), do: Mask.Nx.bands(mask, size)
    defp numbers(tensor, _size), do: tensor

    defp tensor!(name, %Nx.Tensor{vectorized_axes: [_ | _] = axes}) when name in @optional_names,
      do: raise(Error.invalid(name, "a tensor without vectorized axes", inspect(axes)))

    defp tensor!(_name, %Nx.Tensor{} = tensor), do: tensor
    defp tensor!(name, other), do: raise(Error.invalid(name, "an Nx tensor", Error.show(other)))

    # Without names, and with vectorized axes folded into the first one.
    defp flatten(%{shape: {}} = tensor), do: Nx.devectorize(tensor, keep_names: false)

    defp flatten(%{vectorized_axes: axes, shape: shape} = tensor) do
      batch = Enum.product([elem(shape, 0) | Keyword.values(axes)])
      Nx.revectorize(tensor, [], target_shape: put_elem(shape, 0, batch))
    end

    # ---- what the library says of a pass -----------------------------------------------------------------

    # In this order where they are one after another.
    @outputs [:o, :lse, :dq, :dk, :dv] ++ for(name <- @optional_names, do: :"d#{name}")

    # Templates of what a pass writes, and the bytes of workspace that it takes on a GPU; or the library's own error.
    defp plan!(pass, inputs, opts) do
      %{devices: devices, native: native} = Options.parse!(opts)

      shapes = for {name, tensor} <- inputs, into: %{}, do: {name, {tensor.type, tensor.shape}}
      plans = for {kind, _index} = device <- devices, do: {kind, Native.plan(pass, shapes, native, device)}

      case for({kind, {:ok, outputs, workspace_bytes, _kernel}} <- plans, do: {kind, outputs, workspace_bytes}) do
        [{_kind, outputs, _bytes} | _] = taken ->
          {for(name <- @outputs, {type, shape} <- [outputs[name]], do: Nx.template(shape, type)),
           Enum.find_value(taken, 0, fn {kind, _outputs, bytes} -> Options.own_memory?(kind) && bytes end)}

        # As in FlashAttention, a device that does not take the problem leaves it to the next one: the last one tells.
        [] ->
          {_kind, {:error, error}} = List.last(plans)
          raise Error.from_native(error)
      end
    end

    # ---- the passes, and how one leads to the other ------------------------------------------------------

    defp forward(inputs, opts) do
      if Enum.any?(inputs, fn {_name, tensor} -> is_struct(tensor.data, Expr) end),
        do: differentiable_forward(for({name, tensor} <- inputs, do: {name, Expr.tensor(tensor)}), opts),
        else: %Forward{opts: opts} |> block(inputs) |> List.to_tuple()
    end

    # The custom gradient is around the block: Nx differentiates what is inside of one.
    # One gradient for both outputs, so that a loss of both takes one call of the backward.
    defp differentiable_forward(inputs, opts) do
      {_o, _lse} = outputs = %Forward{opts: opts} |> block(inputs) |> List.to_tuple()
      Kernel.custom_grad(outputs, Keyword.values(inputs), &backward(&1, inputs, outputs, opts))
    end

    defp backward({dout, dlse}, inputs, {o, lse}, opts) do
      {q_k_v, optional} = Enum.split(inputs, 3)
      dout = like(dout, o)
      dlse = if zero?(dlse), do: [], else: [dlse: like(dlse, lse)]
      gradients = block(%Backward{opts: opts}, [dout: dout] ++ q_k_v ++ [o: o, lse: lse] ++ optional ++ dlse)

      {gradients, []} =
        Enum.map_reduce(inputs, gradients, fn {name, input}, gradients ->
          if has_gradient?(name, input, opts) do
            [gradient | gradients] = gradients
            {linear(gradient, name, [dout | Keyword.values(dlse)], inputs, opts), gradients}
          else
            {Nx.broadcast(Expr.tensor(Nx.u8(0)), input.shape), gradients}
          end
        end)

      gradients
    end

    # The cotangent has the type of the loss, and of an output that is not used it is a scalar.
    defp like(cotangent, output), do: cotangent |> Nx.as_type(output.type) |> Nx.broadcast(output.shape)

    defp zero?(%{data: %Expr{op: :constant, args: [number]}}), do: number == 0
    defp zero?(_cotangent), do: false

    # Whole numbers are not computed with.
    @constant [bias: :constant_bias, alibi_slopes: :constant_alibi_slopes]
    defp has_gradient?(name, %{type: {class, _bits}}, opts),
      do: class not in [:s, :u] and opts[@constant[name]] != true

    # A gradient is linear in dout and dlse, and what these add to it is the derivative of o and lse along the direction
    # in which the gradient's input moves. In the inputs it is not, and their gradient is not there: should it be asked
    # for, the way to it leads through their stand-ins.
    defp linear(gradient, name, cotangents, inputs, opts) do
      reason = "the gradient of attention has no gradient itself, but by those of o and lse"
      stand_ins = for {_name, input} <- inputs, do: without_gradient(input, [input], reason)

      Kernel.custom_grad(gradient, cotangents ++ stand_ins, fn cotangent ->
        direction = like(cotangent, gradient)

        derivatives =
          for derivative <- derivatives(direction, name, inputs, opts),
              do: without_gradient(derivative, [direction], "its third derivative is not there")

        Enum.take(derivatives, length(cotangents)) ++
          for(input <- stand_ins, do: Nx.broadcast(Expr.tensor(Nx.u8(0)), input.shape))
      end)
    end

    # Of o and of lse.
    defp derivatives(direction, name, inputs, opts) do
      {templates, _bytes} = plan!(:forward, inputs, opts)
      tensors = Map.new([direction: direction] ++ inputs)
      types = Enum.map(templates, & &1.type)
      opts = [along: name, types: types, opts: opts]
      templates |> List.to_tuple() |> Nx.runtime_call(tensors, opts, &derivative/2) |> Tuple.to_list()
    end

    @doc false
    # The callback: the derivatives of o and lse where one input moves. The library has them in f64 on the CPU.
    def derivative(%{direction: direction} = tensors, along: along, types: types, opts: opts) do
      inputs =
        tensors |> Map.delete(:direction) |> Map.new(fn {name, tensor} -> {name, in_f64(name, tensor)} end)

      directions =
        for {name, {data, {class, _bits} = type, shape}} <- inputs, class not in [:s, :u], into: %{} do
          still = {:binary.copy(<<0>>, byte_size(data)), type, shape}
          {:"tangent_#{name}", if(name == along, do: in_f64(name, direction), else: still)}
        end

      case Native.run(:tangent, Map.merge(inputs, directions), Options.parse!(opts).native, {:cpu, 0}) do
        {:ok, %{o_tangent: o, lse_tangent: lse}} ->
          for(
            {{data, f64, shape}, type} <- Enum.zip([o, lse], types),
            do: data |> Nx.from_binary(f64) |> Nx.reshape(shape) |> Nx.as_type(type)
          )
          |> List.to_tuple()

        {:error, error} ->
          raise Error.from_native(error)
      end
    end

    # A bias may be f32 beside tensors of f64, and no narrower.
    defp in_f64(:bias, %{type: {_class, 16}} = tensor), do: in_f64(:bias, Nx.as_type(tensor, :f32))

    defp in_f64(name, tensor) do
      tensor = if name in @optional_names, do: tensor, else: Nx.as_type(tensor, :f64)
      {Nx.to_binary(tensor), tensor.type, tensor.shape}
    end

    # Differentiating through the call of a function would give 0 without a word.
    defp without_gradient(tensor, inputs, reason) do
      Kernel.custom_grad(tensor, inputs, fn _cotangent ->
        raise Error.from_native({:unsupported, "", "", "", "FlashAttention.attention: #{reason}"})
      end)
    end

    # A device that was asked for by name computes through the library; without one, the compiler may know better.
    defp block(%{pass: pass, opts: opts} = block, inputs) do
      {outputs, _bytes} = plan = plan!(pass, inputs, opts)

      results =
        if opts[:device] in [nil, :auto],
          do: flat_block(block, inputs, plan),
          else: call(block, inputs, plan)

      for {result, output} <- results |> Tuple.to_list() |> Enum.zip(outputs),
          do: Nx.reshape(result, output.shape)
    end

    # With one axis: XLA lays out the tensors of a custom call as it likes where nobody says how they should be, and
    # EXLA does not. One axis leaves it no choice.
    defp flat_block(block, inputs, {outputs, _bytes} = plan) do
      shapes = for {name, tensor} <- inputs, do: {name, tensor.shape}

      default = fn tensors ->
        inputs = for {{name, shape}, tensor} <- Enum.zip(shapes, tensors), do: {name, Nx.reshape(tensor, shape)}
        for_tuple(call(block, inputs, plan), &Nx.flatten/1)
      end

      warn_if_exla_came_later()
      templates = for_tuple(List.to_tuple(outputs), &Nx.template({Nx.size(&1)}, &1.type))
      tensors = Enum.map(Keyword.values(inputs), &Nx.flatten/1)
      Nx.block(%{block | shapes: shapes}, tensors, templates, default(length(inputs), default))
    end

    # EXLA would run the default function, on copies of the tensors, and nobody would know.
    defp warn_if_exla_came_later do
      with true <- :erlang.module_loaded(EXLA),
           what_to_run when what_to_run != nil <- Packages.came_later(:exla),
           false <- :persistent_term.get({__MODULE__, :warned}, false) do
        :persistent_term.put({__MODULE__, :warned}, true)
        Logger.warning(what_to_run <> "; until then EXLA does not know the custom calls of attention")
      end
    end

    defp for_tuple(tuple, fun), do: tuple |> Tuple.to_list() |> Enum.map(fun) |> List.to_tuple()

    # The default function has a parameter for the block, and one for each input.
    for count <- 3..(6 + length(@optional)) do
      inputs = Macro.generate_arguments(count, __MODULE__)
      defp default(unquote(count), call), do: fn _block, unquote_splicing(inputs) -> call.(unquote(inputs)) end
    end

    # What it returns is what the block returns. An expression may become a custom call of XLA, which allocates
    # outputs and nothing else: there the workspace is one more output, which nobody reads.
    defp call(block, [{_name, first} | _] = inputs, {outputs, bytes}) do
      results = Nx.runtime_call(List.to_tuple(outputs), Map.new(inputs), [block: block], &run/2)

      if bytes > 0 and is_struct(first.data, Expr),
        do: Tuple.insert_at(results, length(outputs), Nx.broadcast(Expr.tensor(Nx.u8(0)), {bytes})),
        else: results
    end

    @doc false
    # The callback of Nx.runtime_call/4: the eager API, on tensors with values.
    def run(tensors, block: %{pass: pass, opts: opts}) do
      {optional, tensors} = Map.split(tensors, @optional_names)
      run_pass(pass, tensors, for({name, tensor} <- optional, do: option(name, tensor)) ++ opts)
    end

    defp option(:bands, bands), do: {:mask, Mask.from_bands(bands)}
    defp option(name, tensor), do: {@optional[name], tensor}

    defp run_pass(:forward, %{q: q, k: k, v: v}, opts), do: FlashAttention.forward_with_states!(q, k, v, opts)

    defp run_pass(:backward, %{dout: dout, q: q, k: k, v: v, o: o, lse: lse}, opts) do
      case FlashAttention.backward!(dout, q, k, v, o, lse, opts) do
        {dq, dk, dv, optional} ->
          keys = Enum.uniq(Keyword.values(@optional))
          List.to_tuple([dq, dk, dv] ++ for(key <- keys, gradient = optional[key], do: gradient))

        gradients ->
          gradients
      end
    end
  end
end
