require FlashAttention.Packages

if Code.ensure_loaded?(Axon) do
  defmodule FlashAttention.Axon do
    @moduledoc """
    Attention as layers of Axon models.

    The layers train with `Axon.Loop` and with anything else that differentiates, on every compiler: see
    `FlashAttention.attention/4`, which they call.

        input = Axon.input("tokens", shape: {nil, nil})

        hidden =
          input
          |> Axon.embedding(256, 64)
          |> FlashAttention.Axon.multi_head_attention(num_heads: 4, head_dim: 16)

    To replace the attention of a Bumblebee model, see `FlashAttention.Bumblebee`.
    """

    alias FlashAttention.{Error, Options}

    @layer_options [:name, :meta]
    @tensors Enum.uniq(Keyword.values(Options.tensors())) -- [:dlse]
    # A mask may be given as it is; a tensor that is given would not be learned.
    @options (Options.keys() -- [:keep, :results, :dlse | @tensors]) ++ [:mask]

    @doc """
    Attention of `query` to `key` and `value`.

    ## Input shapes

      * `query` - `{batch, seqlen_q, num_heads, head_dim}`
      * `key`, `value` - `{batch, seqlen_k, num_kv_heads, head_dim}`, where `num_kv_heads` divides `num_heads`

    ## Output shape

    That of `query`.

    ## Parameter shapes

      * `sink` - `{num_sinks, num_heads}`, where `:num_sinks` is given

    ## Options

    Those of `FlashAttention.attention/4`; attention is causal unless `causal: false` is given. Those that are tensors
    are what another layer gives, and `:mask` is a `FlashAttention.Mask` or a layer that gives one: `mask/3`, or an input
    that is fed with masks. A layer for `:sink` gives each row sinks of its own, `{batch, seqlen_q, num_sinks, num_heads}`. And

      * `:num_sinks` - how many attention sinks each head learns, the same for all rows, 0 by default; they begin at 0
      * `:dropout_rate` - the share of attention weights that are dropped in training, 0 by default; the layer then keeps a
        `key` of `Nx.Random` as its state, as `Axon.dropout/2` does, which begins by `:seed`
      * `:name`, `:meta` - as for every layer of Axon
    """
    @spec attention(Axon.t(), Axon.t(), Axon.t(), keyword) :: Axon.t()
    def attention(%Axon{} = query, %Axon{} = key, %Axon{} = value, opts \\ []) do
      {layer_options, opts} = Keyword.split(opts, @layer_options)
      {num_sinks, opts} = Keyword.pop(opts, :num_sinks, 0)
      {dropout_rate, opts} = Keyword.pop(opts, :dropout_rate, 0)
      {seed, opts} = Keyword.pop_lazy(opts, :seed, fn -> :erlang.system_time() end)
      {nodes, opts} = Enum.split_with(opts, fn {name, value} -> name in @tensors and is_struct(value, Axon) end)
      Options.parse!(opts, @options)
      Options.parse!([dropout: dropout_rate], [:dropout])
      check_sinks!(num_sinks, nodes[:sink])
      parameters = sinks(num_sinks, length(nodes)) ++ key(dropout_rate, seed)
      {names, optional} = Enum.unzip(parameters ++ nodes)

      layer = layer(length(names), &attend(&1, Enum.zip(names, &2), &3[:mode], dropout_rate, opts))
      Axon.layer(layer, [query, key, value | optional], [op_name: :flash_attention] ++ layer_options)
    end

    defp sinks(none, _num_nodes) when none in [0, nil], do: []

    defp sinks(num_sinks, num_nodes) when is_integer(num_sinks) and num_sinks > 0,
      do: [sink: Axon.parameter("sink", template(num_nodes, &sinks_like(&1, num_sinks)), initializer: :zeros)]

    defp sinks(other, _num_nodes),
      do: raise(Error.invalid(:num_sinks, "a whole number of at least 0", Error.show(other)))

    defp sinks_like(query, num_sinks), do: Nx.template({num_sinks, elem(Nx.shape(query), 2)}, :f32)

    defp check_sinks!(num_sinks, layer) do
      if layer && num_sinks not in [0, nil],
        do: raise(Error.invalid(:num_sinks, "0 beside a layer that gives sinks", Error.show(num_sinks)))
    end

    defp key(rate, _seed) when rate in [0, 0.0, nil], do: []

    defp key(_rate, seed) do
      initializer = fn _shape, _type -> Nx.Random.key(seed) end
      [key: Axon.param("key", {2}, type: {:u, 32}, initializer: initializer, kind: :state)]
    end

    # Axon wants a parameter for each input, and gives it the input's template: of shapes it knows tensors' alone, and a mask
    # has none. The last argument, what Axon adds to the options of a layer, must not end up among attention's.
    for count <- 0..(length(@tensors) + 2) do
      optional = Macro.generate_arguments(count, __MODULE__)
      ignored = for _ <- optional, do: quote(do: _)

      defp template(unquote(count), of_query),
        do: fn query, _key, _value, unquote_splicing(ignored) -> of_query.(query) end

      defp layer(unquote(count), attend),
        do: fn q, k, v, unquote_splicing(optional), opts -> attend.([q, k, v], unquote(optional), opts) end
    end

    # Mixed precision makes every parameter and every layer's output a narrow one; these are f32.
    @f32 Options.f32_tensors()

    defp attend(tensors, optional, mode, rate, opts) do
      {key, optional} = Keyword.pop(optional, :key)

      cond do
        mode != :train -> attend(tensors, optional, Keyword.put_new(opts, :inference, true))
        key -> drop(tensors, key, rate, optional, opts)
        true -> attend(tensors, optional, opts)
      end
    end

    defp drop(tensors, key, rate, optional, opts) do
      keys = Nx.Random.split(key)
      o = attend(tensors, optional, [dropout: rate, dropout_seed: keys[1]] ++ opts)
      %Axon.StatefulOutput{output: o, state: %{"key" => keys[0]}}
    end

    defp attend([q, k, v], optional, opts) do
      optional =
        for {name, tensor} <- optional,
            do: {name, if(name in @f32, do: Nx.as_type(tensor, :f32), else: tensor)}

      FlashAttention.attention(q, k, v, optional ++ opts)
    end

    @doc """
    A mask as a layer: what the function makes of the inputs, a `FlashAttention.Mask`.

    `inputs` is a layer or a list of up to three, and the function takes their tensors. The numbers change from batch to
    batch, and the model is compiled once.

        lengths = Axon.input("lengths", shape: {nil})
        mask = FlashAttention.Axon.mask(lengths, &FlashAttention.Mask.lengths(&1, q_lengths: &1))
        FlashAttention.Axon.multi_head_attention(hidden, num_heads: 4, head_dim: 16, mask: mask)

    The options are `:name` and `:meta`, as for every layer of Axon.
    """
    @spec mask(Axon.t() | [Axon.t()], fun, keyword) :: Axon.t()
    def mask(inputs, fun, opts \\ []) do
      inputs = List.wrap(inputs)

      if not Enum.all?(inputs, &is_struct(&1, Axon)),
        do: raise(Error.invalid(:inputs, "layers of Axon", Error.show(inputs)))

      check_options!(opts)
      Axon.layer(mask_layer(length(inputs), fun), inputs, [op_name: :flash_attention_mask] ++ opts)
    end

    defp mask_layer(1, fun) when is_function(fun, 1), do: fn x, _ -> fun.(x) end
    defp mask_layer(2, fun) when is_function(fun, 2), do: fn x, y, _ -> fun.(x, y) end
    defp mask_layer(3, fun) when is_function(fun, 3), do: fn x, y, z, _ -> fun.(x, y, z) end

    defp mask_layer(count, fun),
      do: raise(Error.invalid(:fun, "a function of #{count} inputs, 1 to 3", Error.show(fun)))

    defp check_options!(opts) do
      unknown = if Keyword.keyword?(opts), do: Keyword.keys(opts) -- @layer_options, else: [opts]

      if unknown != [],
        do:
          raise(Error.invalid(:opts, "keys among #{Enum.join(@layer_options, ", ")}", Error.show(hd(unknown))))
    end

    @doc """
    Multi-head attention: projections to queries, keys and values, attention, and a projection of what comes out.

    With `:memory`, keys and values come from there (cross-attention), else from the input (self-attention).

    ## Input shapes

      * `input` - `{batch, seqlen_q, size}`
      * `:memory` - `{batch, seqlen_k, memory_size}`

    ## Output shape

    `{batch, seqlen_q, units}`

    ## Parameters

    Those of four dense layers and, where there are sinks, of `attention/4`, or of a dense layer more. With `name: "block"`
    the layers are called `"block.query"`, `"block.key"`, `"block.value"`, `"block.sinks"`, `"block.attention"` and
    `"block.output"`.

    ## Options

      * `:num_heads`, `:head_dim` - required
      * `:num_kv_heads` - heads of keys and values, `:num_heads` by default; it divides `:num_heads`
      * `:units` - the output's size, `num_heads * head_dim` by default
      * `:memory` - what to attend to, if not the input itself
      * `:row_sinks` - how many attention sinks of its own each row has in each head, 0 by default: a projection of the input
        gives them, as it does queries
      * `:use_bias` (default `true`), `:kernel_initializer`, `:bias_initializer` - of all projections, as for
        `Axon.dense/3`
      * `:name` - the prefix of the layers' names; without it they are called as Axon calls layers

    and those of `attention/4`: `:causal` (default `true`), `:window`, `:scale`, `:softcap`, `:mask`, `:num_sinks`, `:dropout_rate`, …
    """
    @spec multi_head_attention(Axon.t(), keyword) :: Axon.t()
    def multi_head_attention(%Axon{} = input, opts) do
      {dense, opts} = Keyword.split(opts, [:use_bias, :kernel_initializer, :bias_initializer])

      {own, opts} =
        Keyword.split(opts, [:name, :num_heads, :num_kv_heads, :head_dim, :units, :memory, :row_sinks])

      num_heads = size!(own, :num_heads, nil)
      head_dim = size!(own, :head_dim, nil)
      num_kv_heads = size!(own, :num_kv_heads, num_heads)
      units = size!(own, :units, num_heads * head_dim)
      memory = memory!(own[:memory] || input)

      if rem(num_heads, num_kv_heads) != 0,
        do: raise(Error.invalid(:num_kv_heads, "a divisor of num_heads #{num_heads}", "#{num_kv_heads}"))

      name = &if(own[:name], do: "#{own[:name]}.#{&1}")

      [query, key, value] =
        for {source, layer, heads} <- [
              {input, "query", num_heads},
              {memory, "key", num_kv_heads},
              {memory, "value", num_kv_heads}
            ] do
          source
          |> Axon.dense(heads * head_dim, [name: name.(layer)] ++ dense)
          |> Axon.nx(&split_heads(&1, heads, head_dim))
        end

      row_sinks = row_sinks(input, own[:row_sinks], num_heads, [name: name.("sinks")] ++ dense)

      query
      |> attention(key, value, [name: name.("attention")] ++ row_sinks ++ opts)
      |> Axon.nx(&join_heads/1)
      |> Axon.dense(units, [name: name.("output")] ++ dense)
    end

    defp row_sinks(_input, none, _num_heads, _dense) when none in [0, nil], do: []

    defp row_sinks(input, count, num_heads, dense) when is_integer(count) and count > 0 do
      sinks = input |> Axon.dense(count * num_heads, dense) |> Axon.nx(&split_heads(&1, count, num_heads))
      [sink: sinks]
    end

    defp row_sinks(_input, other, _num_heads, _dense),
      do: raise(Error.invalid(:row_sinks, "a whole number of at least 0", Error.show(other)))

    defp size!(opts, name, default) do
      case opts[name] || default do
        size when is_integer(size) and size > 0 -> size
        nil -> raise(Error.invalid(name, "a whole number of at least 1", "none"))
        other -> raise(Error.invalid(name, "a whole number of at least 1", Error.show(other)))
      end
    end

    defp memory!(%Axon{} = memory), do: memory
    defp memory!(other), do: raise(Error.invalid(:memory, "an Axon layer", Error.show(other)))

    defp split_heads(tensor, heads, head_dim),
      do: Nx.reshape(tensor, {Nx.axis_size(tensor, 0), Nx.axis_size(tensor, 1), heads, head_dim})

    defp join_heads(tensor) do
      {batch, seqlen, heads, head_dim} = Nx.shape(tensor)
      Nx.reshape(tensor, {batch, seqlen, heads * head_dim})
    end
  end
else
  FlashAttention.Packages.stand_in(FlashAttention.Axon, "Axon", [:axon])
end
