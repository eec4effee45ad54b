defmodule FlashAttention.Parts do
  @moduledoc """
  Attention over some of the keys, merged to attention over all of them.

  Attention over a part of the keys gives `o` and `lse` (`FlashAttention.forward_with_states/4`,
  `FlashAttention.attention_with_lse/4`, or what anybody else computed), and those of several parts `p` merge, with sinks
  where there are any:

      lse[i]     = log(sum_p exp(lse_p[i]) + sum_t exp(sink[t,h]))
      w_p[i]     = exp(lse_p[i] - lse[i])
      o[i]       = sum_p w_p[i] * o_p[i]

  and backward, given `dout` and perhaps `dlse`:

      delta[i]   = dot(o[i], dout[i]) - dlse[i]
      do_p[i]    = w_p[i] * dout[i]
      dlse_p[i]  = w_p[i] * (dot(o_p[i], dout[i]) - delta[i])
      dsink[t,h] = -sum_{b,i} exp(sink[t,h] - lse[i]) * delta[i]

  (Rabe and Staats 2021, arXiv 2112.05682.) A part whose `lse` is -infinity has nothing for the row, whatever its `o` holds
  there; a row for which no part has anything gets `o` 0 and `lse` -infinity, or `log(sum exp(sink))`, never NaN.

  | tensor                | shape                                                    | type                                     |
  |-----------------------|----------------------------------------------------------|------------------------------------------|
  | `o`, `dout`           | `{batch, seqlen_q, num_heads, head_dim}`                 | `f32`, `bf16`, `f16`, mixed; `f64` (CPU) |
  | `lse`, `dlse`         | `{batch, num_heads, seqlen_q}`                           | `f32` (`f64` with `f64`)                 |
  | `sink`, `dsink`       | `{num_sinks, num_heads}`, the same for every row         | `f32`                                    |
  |                       | `{batch, seqlen_q, num_sinks, num_heads}`, a row's own   | `f32`                                    |

  A sink counts once for a row: give it to the merge, or to one of the parts.

  ## The backward of parts

  `FlashAttention.backward/7` of a part's `q`, `k` and `v`, with the **merged** `o` and `lse` in the place of the part's own,
  gives exactly what the part adds to `dq`, and `dk` and `dv` of its keys: a probability is a function of the score and of
  `lse` alone. So parts can be forgotten once they are merged, and neither `do_p` nor `dlse_p` is needed. The options are
  those of the part's forward, without sinks; `dsink` is `FlashAttention.Sink.gradient/5`'s.

      {o_1, lse_1} = FlashAttention.forward_with_states!(q, k_1, v_1, causal: false)
      {o_2, lse_2} = FlashAttention.forward_with_states!(q, k_2, v_2, causal: true)
      {o, lse} = FlashAttention.Parts.merge([{o_1, lse_1}, {o_2, lse_2}])

      {dq_1, dk_1, dv_1} = FlashAttention.backward!(dout, q, k_1, v_1, o, lse, causal: false)
      {dq_2, dk_2, dv_2} = FlashAttention.backward!(dout, q, k_2, v_2, o, lse, causal: true)
      # dq is the sum of dq_1 and dq_2

  ## Options

    * `:sink`: a tensor of either layout
    * `:type`: the type of the merged `o`, `{:f, 32}` or `:f32` for one; by default that of the first part's
    * `:device`: `:auto`, the default, is the GPU in whose memory (`results: :device`) the tensors are, and the CPU for tensors
      of the host: merging moves each number once, which is less than it takes to bring it to a GPU. Or `:cpu`, `:cuda`,
      `{:cuda, n}`
    * `:results`: `:host`, the default, or `:device`

  Inside `defn` these functions take expressions, and are differentiable; `:device` and `:results` are the compiler's choice
  then. Errors are raised, as `FlashAttention.Error`.
  """

  require FlashAttention.Defn
  alias FlashAttention.{Defn, DeviceMemory, Error, Native, Tensor, TensorLike}

  @typedoc "`o` and `lse` of a part."
  @type part :: {TensorLike.t(), TensorLike.t()}

  # Of one call of the library.
  @most 32

  @doc """
  Merges parts, a list of `{o, lse}`, to one `{o, lse}`.

  There may be any number of them. More than 32 are merged by several calls, through an `o` of f32.

      iex> tensor = fn x, shape -> FlashAttention.Tensor.new(<<x::float-32-native>>, :f32, shape) end
      iex> part = fn o, lse -> {tensor.(o, {1, 1, 1, 1}), tensor.(lse, {1, 1, 1})} end
      iex> {o, lse} = FlashAttention.Parts.merge([part.(1.0, 0.0), part.(3.0, 0.0)])
      iex> <<x::float-32-native>> = lse.data
      iex> {o.data, Float.round(x, 6)}
      {<<2.0::float-32-native>>, 0.693147}

      iex> FlashAttention.Parts.merge([])
      ** (FlashAttention.Error) parts: expected a list of {o, lse}, got []
  """
  @spec merge([part], keyword) :: part
  Defn.deftransform(merge(parts, opts \\ []))

  def merge(parts, opts) do
    options = options!(opts, [:sink, :type, :device, :results])
    parts |> parts!() |> merge_in_calls(options)
  end

  defp merge_in_calls(parts, options) when length(parts) > @most do
    {first, rest} = Enum.split(parts, @most)
    {[{o, _lse} | _], type} = {parts, options.type}
    wide = merge_in_calls(first, %{options | type: wide_type(o), sink: nil})
    merge_in_calls([wide | rest], %{options | type: type || type_of(o)})
  end

  defp merge_in_calls(parts, options) do
    if Defn.Parts.symbolic?(flat(parts) ++ [options.sink]),
      do: Defn.Parts.merge(parts, options),
      else: merge_values(parts, options)
  end

  # Tensors of Nx and ours have it; what has not is no tensor, which is found out where it is read.
  defp type_of(tensor), do: if(is_map(tensor), do: Map.get(tensor, :type))

  defp wide_type(o), do: if(type_of(o) == {:f, 64}, do: {:f, 64}, else: {:f, 32})

  defp merge_values([{like, _lse} | _] = parts, options) do
    device = device(options, flat(parts) ++ [options.sink])
    read = read_parts!(parts, device)
    {[{o, _} | _], names} = {Enum.map(read, &elem(&1, 0)), read |> hd() |> elem(1)}
    {_data, type, _shape} = o
    tensors = %{parts: Enum.map(read, &elem(&1, 0)), type: options.type || type}
    merged = native!(:forward, with_sink(tensors, options, device), device, options)
    {TensorLike.from_native(like, merged.o, names), TensorLike.from_native(like, merged.lse, lse_names(names))}
  end

  @doc """
  The gradients of a merge: `{[{do, dlse}], dsink}`, one pair a part, where `o` and `lse` are what they were merged to.

  `dsink` is `nil` without a sink. Takes the options of `merge/2` but for `:type`, and `:dlse`, the gradient by the merged
  `lse` where there is one. Each part's gradients have its types.

      iex> tensor = fn x, shape -> FlashAttention.Tensor.new(<<x::float-32-native>>, :f32, shape) end
      iex> part = fn o, lse -> {tensor.(o, {1, 1, 1, 1}), tensor.(lse, {1, 1, 1})} end
      iex> parts = [part.(1.0, 0.0), part.(3.0, 0.0)]
      iex> {o, lse} = FlashAttention.Parts.merge(parts)
      iex> {[{dout, dlse}, _second], nil} = FlashAttention.Parts.gradient(tensor.(1.0, {1, 1, 1, 1}), parts, o, lse)
      iex> for %{data: <<x::float-32-native>>} <- [dout, dlse], do: Float.round(x, 6)
      [0.5, -0.5]
  """
  @spec gradient(TensorLike.t(), [part], TensorLike.t(), TensorLike.t(), keyword) ::
          {[part], TensorLike.t() | nil}
  Defn.deftransform(gradient(dout, parts, o, lse, opts \\ []))

  def gradient(dout, parts, o, lse, opts) do
    options = options!(opts, [:sink, :dlse, :device, :results])
    if parts != [], do: parts!(parts)
    merged = %{dout: dout, dlse: options.dlse, o: o, lse: lse}

    case Enum.chunk_every(parts, @most) do
      [] ->
        gradient_in_call(merged, [], options)

      [first | rest] ->
        {gradients, dsink} = gradient_in_call(merged, first, options)
        others = for parts <- rest, do: elem(gradient_in_call(merged, parts, %{options | sink: nil}), 0)
        {Enum.concat([gradients | others]), dsink}
    end
  end

  defp gradient_in_call(merged, parts, options) do
    if Defn.Parts.symbolic?(Map.values(merged) ++ flat(parts) ++ [options.sink]),
      do: Defn.Parts.gradient(merged, parts, options),
      else: gradient_of_values(merged, parts, options)
  end

  defp gradient_of_values(merged, parts, options) do
    device = device(options, Map.values(merged) ++ flat(parts) ++ [options.sink])
    given = for {name, tensor} <- merged, tensor != nil, do: {name, tensor}
    tensors = Map.new(given, fn {name, tensor} -> {name, elem(read!(name, tensor, device), 0)} end)
    read = read_parts!(parts, device)
    tensors = tensors |> Map.put(:parts, Enum.map(read, &elem(&1, 0))) |> with_sink(options, device)
    results = native!(:backward, tensors, device, options)

    gradients =
      for {{like, _}, {_, names}, {dout, dlse}} <- Enum.zip([parts, read, results.parts]) do
        {TensorLike.from_native(like, dout, names), TensorLike.from_native(like, dlse, lse_names(names))}
      end

    {gradients, results.dsink && TensorLike.from_native(options.sink, results.dsink, nil)}
  end

  # ---- tensors -----------------------------------------------------------------------------------------------

  defp read!(name, tensor, device) do
    case Tensor.read(tensor, device) do
      {:ok, native, names} -> {native, names}
      {:error, expected, got} -> raise Error.invalid(name, expected, got)
    end
  end

  # Each as the library takes it, and the names of o's axes.
  defp read_parts!(parts, device) do
    for {o, lse} <- parts do
      {o, names} = read!(:o, o, device)
      {lse, _names} = read!(:lse, lse, device)
      {{o, lse}, names}
    end
  end

  defp with_sink(tensors, %{sink: nil}, _device), do: tensors

  defp with_sink(tensors, %{sink: sink}, device),
    do: Map.put(tensors, :sink, elem(read!(:sink, sink, device), 0))

  defp native!(pass, tensors, device, options) do
    case Native.merge(pass, tensors, device, options.results || :host) do
      {:ok, results} -> results
      {:error, error} -> raise Error.from_native(error)
    end
  end

  defp lse_names([batch, seqlen_q, num_heads, _head_dim]), do: [batch, num_heads, seqlen_q]
  defp lse_names(_none), do: nil

  # ---- arguments ---------------------------------------------------------------------------------------------

  defp parts!([_ | _] = parts) do
    if List.improper?(parts) or not Enum.all?(parts, &match?({_o, _lse}, &1)),
      do: raise(Error.invalid(:parts, "a list of {o, lse}", Error.show(parts))),
      else: parts
  end

  defp parts!(other), do: raise(Error.invalid(:parts, "a list of {o, lse}", Error.show(other)))

  defp options!(opts, keys) do
    if not Keyword.keyword?(opts), do: raise(Error.invalid(:opts, "a keyword list", Error.show(opts)))

    case Keyword.keys(opts) -- keys do
      [] -> Map.merge(%{sink: nil, dlse: nil, type: nil, device: nil, results: nil}, checked(opts))
      [key | _] -> raise Error.invalid(:opts, "keys among #{Enum.join(keys, ", ")}", inspect(key))
    end
  end

  defp checked(opts), do: Map.new(opts, fn {key, value} -> {key, checked(key, value)} end)

  @types [f32: {:f, 32}, f64: {:f, 64}, bf16: {:bf, 16}, f16: {:f, 16}]
  for {name, type} <- @types do
    defp checked(:type, type) when type in [unquote(name), unquote(type)], do: unquote(type)
  end

  defp checked(:type, type) when type != nil,
    do: raise(Error.invalid(:type, "f32, f64, bf16 or f16", Error.show(type)))

  defp checked(:results, place) when place not in [nil, :host, :device],
    do: raise(Error.invalid(:results, "one of :host, :device", Error.show(place)))

  defp checked(:device, {kind, index} = device) when kind in [:cpu, :cuda] and is_integer(index) and index >= 0,
    do: device

  defp checked(:device, kind) when kind in [:cpu, :cuda], do: {kind, 0}
  defp checked(:device, device) when device in [nil, :auto], do: nil

  defp checked(:device, other),
    do: raise(Error.invalid(:device, ":auto, :cpu, :cuda or {kind, index}", Error.show(other)))

  defp checked(_key, value), do: value

  defp flat(parts), do: Enum.flat_map(parts, &Tuple.to_list/1)

  defp device(%{device: nil}, tensors), do: Enum.find_value(tensors, {:cpu, 0}, &lies_on/1)
  defp device(%{device: device}, _tensors), do: device

  defp lies_on(%Tensor{data: %DeviceMemory{device: device}}), do: device
  defp lies_on(_tensor), do: nil
end
