defmodule FlashAttention.Examples.ByteModel.Head do
  @moduledoc false

  # o -> loss: the heads side by side are sets of 256 logits. See FlashAttention.Examples.ByteModel.

  alias FlashAttention.Tensor
  alias FlashAttention.Examples.ByteModel
  alias FlashAttention.Examples.ByteModel.{Elements, Embed, OneHot}

  # loss = mean over positions of lse - logit[target]; its gradient by the logits is softmax - one_hot(target),
  # divided by the number of positions.
  def stage(model) do
    slots = slots(model)

    fn _params, o, windows ->
      targets = for window <- Embed.bytes(windows, 3), byte <- window, do: elem(slots, byte)
      share = 1 / length(targets)
      {probabilities, lse} = OneHot.softmax(o, share, model.device)

      losses =
        Enum.zip_with([Elements.to_list(model.type, lse.data), positions(model, o), targets], fn
          [lse, sets, target] -> lse - sum_at(model, sets, target)
        end)

      pullback = fn dloss ->
        dlogits =
          Enum.zip_with(positions(model, probabilities), targets, fn sets, target ->
            for set <- sets, do: Elements.subtract_at(model.type, set, target, share)
          end)

        {%{}, %Tensor{o | data: times(model, IO.iodata_to_binary(dlogits), dloss)}}
      end

      {Enum.sum(losses) * share, pullback}
    end
  end

  # The logits of the last position, a list in the order of the bytes.
  def logits(model, o) do
    sets = o |> then(&positions(model, &1)) |> List.last()
    for slot <- Tuple.to_list(slots(model)), do: sum_at(model, sets, slot)
  end

  # For every position, its sets of logits.
  defp positions(model, %Tensor{data: data}) do
    set_bytes = 256 * Elements.bytes(model.type)

    for position <- Elements.split(data, ByteModel.num_sets(model) * set_bytes),
        do: Elements.split(position, set_bytes)
  end

  defp sum_at(model, sets, slot) do
    for set <- sets, reduce: 0.0, do: (sum -> sum + Elements.at(model.type, set, slot))
  end

  # Where in a set a byte's logit stands, in bytes of memory. Bytes take turns through the heads of a set, so
  # that likely alternatives, as letters are, do not all share the attention of one head.
  defp slots(model) do
    heads = ByteModel.heads_per_set(model)

    for byte <- 0..255 do
      (rem(byte, heads) * model.head_dim + div(byte, heads)) * Elements.bytes(model.type)
    end
    |> List.to_tuple()
  end

  defp times(_model, data, factor) when factor == 1, do: data
  defp times(model, data, factor), do: Elements.scale(model.type, data, factor)
end
