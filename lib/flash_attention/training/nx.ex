require FlashAttention.Packages

if Code.ensure_loaded?(Nx) do
  defmodule FlashAttention.Training.Nx do
    @moduledoc """
    Stages made of Nx functions: their pullbacks come from `Nx.Defn`.

    The functions around attention are ordinary numerical functions; attention itself runs in the library.

        embed = fn params, batch -> {q, k, v} end
        head = fn params, o, batch -> loss end

        model = FlashAttention.Training.Nx.model(embed, head, causal: true)
        {params, loss} = FlashAttention.Training.train_step(params, batch, model: model, learning_rate: 0.1)

    `examples/policy.ex` is an example. Parameters are nested maps of `Nx.Tensor`; batches are
    tensors, or maps or tuples of tensors. `Nx.Defn`'s default compiler compiles the functions.
    """

    alias FlashAttention.Error
    alias FlashAttention.Training.Model
    alias Nx.Defn

    @doc """
    The model whose embedding is `embed.(params, batch)`, giving `{q, k, v}` or `{q, k, v, optional}` (a map of `sink`,
    `bias` and `alibi_slopes`, through which the parameters have gradients, and of a mask), and whose loss is
    `head.(params, o, batch)`, a scalar.

    Both may use any of the parameters. The options are those of `FlashAttention.forward/4`, of which `:device` names one
    device here.
    """
    @spec model(fun, fun, keyword) :: Model.t()
    def model(embed, head, attention \\ []),
      do: %Model{embed: embed(embed), head: head(head), attention: attention}

    # The pullback of cotangents is the gradient of the outputs' dot product with them.
    defp embed(embed) do
      pullback = fn params, batch, cotangents ->
        Defn.grad(params, fn params -> dot(embed.(params, batch), cotangents) end)
      end

      fn params, batch ->
        {Defn.jit_apply(embed, [params, batch]), &Defn.jit_apply(pullback, [params, batch, &1])}
      end
    end

    defp head(head) do
      value_and_grad = fn params, o, batch ->
        {loss, {gradients, dout}} =
          Defn.value_and_grad({params, o}, fn {params, o} -> params |> head.(o, batch) |> check_loss!() end)

        # Nx gives it the type of the loss, and attention takes that of o.
        {loss, {gradients, Nx.as_type(dout, Nx.type(o))}}
      end

      fn params, o, batch ->
        {loss, gradients} = Defn.jit_apply(value_and_grad, [params, o, batch])
        {loss, fn dloss -> if dloss == 1, do: gradients, else: scale(gradients, dloss) end}
      end
    end

    defp check_loss!(loss) do
      if !is_number(loss) and Nx.shape(loss) != {},
        do: raise(Error.invalid(:loss, "a scalar", "a tensor of shape #{Error.show(Nx.shape(loss))}"))

      loss
    end

    defp dot({q, k, v}, {dq, dk, dv}), do: dot(q, dq) |> Nx.add(dot(k, dk)) |> Nx.add(dot(v, dv))

    defp dot({q, k, v, optional}, {dq, dk, dv, gradients}) do
      Enum.reduce(gradients, dot({q, k, v}, {dq, dk, dv}), fn {name, gradient}, sum ->
        Nx.add(sum, dot(optional[name], gradient))
      end)
    end

    # Of a mask there is no gradient.
    defp dot({q, k, v, _optional}, {_dq, _dk, _dv} = gradients), do: dot({q, k, v}, gradients)

    defp dot(x, y), do: Nx.sum(Nx.multiply(x, y))

    defp scale({gradients, dout}, factor), do: {scale(gradients, factor), scale(dout, factor)}
    defp scale(%Nx.Tensor{} = tensor, factor), do: Nx.multiply(tensor, factor)
    defp scale(gradients, factor), do: Map.new(gradients, fn {key, value} -> {key, scale(value, factor)} end)
  end
else
  FlashAttention.Packages.stand_in(FlashAttention.Training.Nx, "Nx", [:nx])
end
