defmodule FlashAttention.Sink do
  @moduledoc """
  A learnable sink for any attention.

  Sinks are scores that every row sees, whose values are 0. They change `o` and `lse` of an attention without them by a
  factor a row, so that whatever computed these need know nothing of sinks:

      lse'[i]    = log(exp(lse[i]) + sum_t exp(sink[t,h]))
      o'[i]      = exp(lse[i] - lse'[i]) * o[i]
      dsink[t,h] = -sum_{b,i} exp(sink[t,h] - lse'[i]) * dot(o'[i], dout[i])

  (SandAI, "FFA with Attention Sink", of MagiAttention's extensions; the formulas are those of `FlashAttention.Parts` with one
  part.) `sink` is `{num_sinks, num_heads}`, the same for every row, or `{batch, seqlen_q, num_sinks, num_heads}`, whose
  gradient is a row's own then, without the sum. Tensors, options and errors are those of `FlashAttention.Parts`.

  A backward that only needs `lse` and `o`, as flash attention's, takes the corrected ones as they are:

      {o, lse} = FlashAttention.forward_with_states!(q, k, v)
      {o, lse} = FlashAttention.Sink.correct(o, lse, sink)

      {dq, dk, dv} = FlashAttention.backward!(dout, q, k, v, o, lse)
      dsink = FlashAttention.Sink.gradient(dout, o, lse, sink)

  For attention of this library the option `:sink` does the same at once. Over several ranks or parts a sink counts once for a
  row: correct what was merged, and sum `dsink` over the ranks.
  """

  require FlashAttention.Defn
  alias FlashAttention.{Defn, Parts, TensorLike}

  @doc """
  `{o, lse}` of an attention without sinks, with them.

      iex> tensor = fn x, shape -> FlashAttention.Tensor.new(<<x::float-32-native>>, :f32, shape) end
      iex> {o, lse} = FlashAttention.Sink.correct(tensor.(3.0, {1, 1, 1, 1}), tensor.(0.0, {1, 1, 1}), tensor.(0.0, {1, 1}))
      iex> <<x::float-32-native>> = lse.data
      iex> {o.data, Float.round(x, 6)}
      {<<1.5::float-32-native>>, 0.693147}
  """
  @spec correct(TensorLike.t(), TensorLike.t(), TensorLike.t(), keyword) :: {TensorLike.t(), TensorLike.t()}
  Defn.deftransform(correct(o, lse, sink, opts \\ []))
  def correct(o, lse, sink, opts), do: Parts.merge([{o, lse}], [sink: sink] ++ opts)

  @doc """
  The gradient by the sink, of its shape, from the corrected `o` and `lse`.

      iex> tensor = fn x, shape -> FlashAttention.Tensor.new(<<x::float-32-native>>, :f32, shape) end
      iex> {one, sink} = {tensor.(1.0, {1, 1, 1, 1}), tensor.(0.0, {1, 1})}
      iex> {o, lse} = FlashAttention.Sink.correct(one, tensor.(0.0, {1, 1, 1}), sink)
      iex> <<x::float-32-native>> = FlashAttention.Sink.gradient(one, o, lse, sink).data
      iex> Float.round(x, 6)
      -0.25
  """
  @spec gradient(TensorLike.t(), TensorLike.t(), TensorLike.t(), TensorLike.t(), keyword) :: TensorLike.t()
  Defn.deftransform(gradient(dout, o, lse, sink, opts \\ []))

  def gradient(dout, o, lse, sink, opts) do
    {[], dsink} = Parts.gradient(dout, [], o, lse, [sink: sink] ++ opts)
    dsink
  end
end
