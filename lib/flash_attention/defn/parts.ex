# Merges of parts inside defn: blocks of their own, as those of the passes, and how one leads to the other.
if FlashAttention.Defn.supported?() do
  defmodule FlashAttention.Defn.Merge do
    @moduledoc """
    The block of a merge of parts, or of its gradients: what `FlashAttention.Parts` becomes inside `defn`.

    Inputs are flat, and shapes their own: of a merge the parts' `o` and `lse` by turns, then the sink if there is one; of the
    gradients `dout`, `dlse`, `o` and `lse` first.
    """

    defstruct [:pass, :shapes]
    @type t :: %__MODULE__{pass: :forward | :backward, shapes: [{atom, tuple}]}
  end

  defmodule FlashAttention.Defn.Parts do
    @moduledoc false

    alias FlashAttention.Defn.Merge
    alias FlashAttention.{Error, Options, Parts}
    alias Nx.Defn.{Expr, Kernel}

    @doc false
    # Whether a tensor among these has no value yet.
    def symbolic?(tensors), do: Enum.any?(tensors, &match?(%Nx.Tensor{data: %Expr{}}, &1))

    @doc false
    def merge(parts, %{sink: sink} = options) do
      [{o, lse} | _] = parts = for {o, lse} <- parts, do: {tensor!(:o, o), tensor!(:lse, lse)}
      sinks = if sink, do: [tensor!(:sink, sink)], else: []
      inputs = flatten(parts) ++ sinks
      templates = [Nx.template(o.shape, options.type || o.type), Nx.template(lse.shape, lse.type)]
      [merged_o, merged_lse] = block(:forward, inputs, templates)

      # What a gradient by one of the two adds does not depend on that by the other.
      by_o = fn dout -> backward({like(dout, merged_o), zeros(lse)}, parts, {merged_o, merged_lse}, sinks) end
      by_lse = fn dlse -> backward({zeros(merged_o), like(dlse, lse)}, parts, {merged_o, merged_lse}, sinks) end

      {with_names(Kernel.custom_grad(merged_o, inputs, by_o), o),
       with_names(Kernel.custom_grad(merged_lse, inputs, by_lse), lse)}
    end

    @doc false
    def gradient(%{dout: dout, dlse: dlse, o: o, lse: lse}, parts, %{sink: sink}) do
      lse = tensor!(:lse, lse)
      dlse = if dlse, do: tensor!(:dlse, dlse), else: zeros(lse)
      parts = for {o, lse} <- parts, do: {tensor!(:o, o), tensor!(:lse, lse)}
      sinks = if sink, do: [tensor!(:sink, sink)], else: []
      gradients = backward({tensor!(:dout, dout), dlse}, parts, {tensor!(:o, o), lse}, sinks)
      {of_parts, of_sinks} = Enum.split(gradients, 2 * length(parts))
      {for([dout, dlse] <- Enum.chunk_every(of_parts, 2), do: {dout, dlse}), List.first(of_sinks)}
    end

    # Of the parts' o and lse by turns, and of the sink.
    defp backward({dout, dlse}, parts, {o, lse}, sinks) do
      inputs = [dout, dlse, o, lse] ++ flatten(parts) ++ sinks
      templates = for input <- flatten(parts) ++ sinks, do: Nx.template(input.shape, input.type)
      for gradient <- block(:backward, inputs, templates), do: without_gradient(gradient, inputs)
    end

    defp tensor!(_name, %Nx.Tensor{vectorized_axes: []} = tensor), do: Expr.tensor(tensor)

    defp tensor!(name, %Nx.Tensor{vectorized_axes: axes}),
      do: raise(Error.invalid(name, "a tensor without vectorized axes", inspect(axes)))

    defp tensor!(name, other), do: raise(Error.invalid(name, "an Nx tensor", Error.show(other)))

    defp flatten(parts), do: Enum.flat_map(parts, &Tuple.to_list/1)
    defp zeros(like), do: Nx.broadcast(Expr.tensor(Nx.tensor(0, type: like.type)), like.shape)
    # The cotangent has the type of the loss, and of an output that is not used it may be a scalar.
    defp like(cotangent, output), do: cotangent |> Nx.as_type(output.type) |> Nx.broadcast(output.shape)
    defp with_names(tensor, like), do: Nx.reshape(tensor, tensor.shape, names: like.names)

    # Differentiating through the call of a function would give 0 without a word.
    defp without_gradient(gradient, inputs) do
      Kernel.custom_grad(gradient, inputs, fn _cotangent ->
        message = "FlashAttention.Parts: the gradient of a merge has no gradient itself"
        raise Error.from_native({:unsupported, "", "", "", message})
      end)
    end

    # With one axis, for the reason that attention's blocks have.
    defp block(_pass, _inputs, []), do: []

    defp block(pass, inputs, templates) do
      shapes = for {name, %{shape: shape}} <- Enum.zip(names(pass, length(inputs)), inputs), do: {name, shape}
      bytes = workspace_bytes(pass, shapes)
      workspace = if bytes > 0, do: [Nx.template({bytes}, {:u, 8})], else: []
      flat = for(template <- templates, do: Nx.template({Nx.size(template)}, template.type)) ++ workspace

      results =
        %Merge{pass: pass, shapes: shapes}
        |> Nx.block(
          Enum.map(inputs, &Nx.flatten/1),
          List.to_tuple(flat),
          default(length(inputs), call(pass, shapes, templates, bytes))
        )
        |> Tuple.to_list()

      for {result, template} <- Enum.zip(results, templates), do: Nx.reshape(result, template.shape)
    end

    # XLA allocates outputs and nothing else, so that on a GPU the sum of dsink over rows takes one more.
    defp workspace_bytes(:backward, shapes) do
      if Options.own_memory?(:cuda) and match?({_num_sinks, _num_heads}, shapes[:sink]),
        do: 4 * Enum.product(Tuple.to_list(shapes[:lse])),
        else: 0
    end

    defp workspace_bytes(:forward, _shapes), do: 0

    # The block's default function, of a list of flat tensors.
    defp call(pass, shapes, templates, bytes) do
      fn tensors ->
        tensors = for {{_name, shape}, tensor} <- Enum.zip(shapes, tensors), do: Nx.reshape(tensor, shape)
        keyed = tensors |> Enum.with_index() |> Map.new(fn {tensor, i} -> {i, tensor} end)
        opts = [pass: pass, names: Keyword.keys(shapes), types: Enum.map(templates, & &1.type)]
        results = templates |> List.to_tuple() |> Nx.runtime_call(keyed, opts, &run/2) |> Tuple.to_list()
        workspace = if bytes > 0, do: [Nx.broadcast(Expr.tensor(Nx.u8(0)), {bytes})], else: []
        List.to_tuple(Enum.map(results, &Nx.flatten/1) ++ workspace)
      end
    end

    defp names(:forward, count), do: part_names(count)
    defp names(:backward, count), do: [:dout, :dlse, :o, :lse] ++ part_names(count - 4)

    defp part_names(count) do
      parts = List.duplicate([:part_o, :part_lse], div(count, 2)) |> Enum.concat()
      if rem(count, 2) == 1, do: parts ++ [:sink], else: parts
    end

    # The default function has a parameter for the block, and one for each input.
    for count <- 2..69 do
      inputs = Macro.generate_arguments(count, __MODULE__)
      defp default(unquote(count), call), do: fn _block, unquote_splicing(inputs) -> call.(unquote(inputs)) end
    end

    @doc false
    # The callback of Nx.runtime_call/4: the library, on tensors with values.
    def run(keyed, pass: pass, names: names, types: types) do
      tensors = for {name, i} <- Enum.with_index(names), do: {name, keyed[i]}
      parts = Enum.zip(Keyword.get_values(tensors, :part_o), Keyword.get_values(tensors, :part_lse))
      run_pass(pass, tensors, parts, [sink: tensors[:sink]], types)
    end

    defp run_pass(:forward, _tensors, parts, opts, [type | _]), do: Parts.merge(parts, [type: type] ++ opts)

    defp run_pass(:backward, tensors, parts, opts, _types) do
      opts = [dlse: tensors[:dlse]] ++ opts
      {gradients, dsink} = Parts.gradient(tensors[:dout], parts, tensors[:o], tensors[:lse], opts)
      List.to_tuple(flatten(gradients) ++ if(dsink, do: [dsink], else: []))
    end
  end
else
  defmodule FlashAttention.Defn.Parts do
    @moduledoc false
    def symbolic?(_tensors), do: false
    def merge(_parts, _options), do: :erlang.error(:undef)
    def gradient(_merged, _parts, _options), do: :erlang.error(:undef)
  end
end
