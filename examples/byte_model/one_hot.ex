defmodule FlashAttention.Examples.ByteModel.OneHot do
  @moduledoc false

  # Attention to one-hot rows: arithmetic over 256 bytes that would be slow as loops in Elixir.
  #
  # A row may hold several sets of 256 elements; a one-hot row repeats itself for each set.

  alias FlashAttention.Tensor
  alias FlashAttention.Examples.ByteModel.Elements

  @num_bytes 256

  # A score so much above 0 that exp leaves nothing of a score of 0, in f32 and in f64.
  @certain 1000

  # The softmax over the sum of the sets of each row: probabilities times `factor`, repeated for each set, and
  # the logarithms of the normalisers. logits has as many rows as its first two axes say.
  #
  # Scores of a row against the identity are the logits themselves; with the identity as values, too, the
  # weights of the softmax come out as they are.
  def softmax(%Tensor{} = logits, factor, device) do
    {rows, sets} = rows_and_sets(logits)
    shape = {1, @num_bytes, 1, sets * @num_bytes}
    identity = fn diagonal -> tensor(logits.type, shape, one_hot(logits.type, sets, diagonal)) end

    FlashAttention.forward_with_states!(
      %Tensor{logits | shape: {1, rows, 1, sets * @num_bytes}},
      identity.(1.0),
      identity.(factor),
      causal: false,
      scale: 1,
      device: device
    )
  end

  # For every byte in the list, the mean of the rows at its places, and their number: %{byte => {mean, number}}.
  #
  # The one-hot row of a byte attends to those of all places, with all its weight on those that are equal.
  def means(%Tensor{type: type} = rows, bytes, device) do
    {count, sets} = rows_and_sets(rows)
    numbers = Enum.frequencies(bytes)
    met = Map.keys(numbers)
    one_hot = type |> one_hot(sets, 1.0) |> List.to_tuple()

    lookup = fn bytes ->
      tensor(type, {1, length(bytes), sets, @num_bytes}, for(byte <- bytes, do: elem(one_hot, byte)))
    end

    means =
      FlashAttention.forward!(lookup.(met), lookup.(bytes), %Tensor{rows | shape: {1, count, sets, @num_bytes}},
        causal: false,
        scale: @certain,
        device: device
      )

    row_bytes = sets * @num_bytes * Elements.bytes(type)

    Enum.zip_with(met, Elements.split(means.data, row_bytes), &{&1, {&2, numbers[&1]}})
    |> Map.new()
  end

  defp rows_and_sets(%Tensor{shape: {batch, seqlen, num_heads, head_dim}}),
    do: {batch * seqlen, div(num_heads * head_dim, @num_bytes)}

  # The rows of the identity matrix times `diagonal`, each repeated for every set.
  defp one_hot(type, sets, diagonal) do
    one = Elements.from_list(type, [diagonal])

    for byte <- 0..(@num_bytes - 1) do
      set = [Elements.zeros(type, byte), one, Elements.zeros(type, @num_bytes - 1 - byte)]
      List.duplicate(set, sets) |> IO.iodata_to_binary()
    end
  end

  defp tensor(type, shape, rows), do: Tensor.new(IO.iodata_to_binary(rows), type, shape)
end
