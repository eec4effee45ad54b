defmodule FlashAttention.Rewriter.Index do
  @moduledoc false
  # Where in a tensor an element stands, as a function of variables. An index is a list of digits, the most significant
  # one first; a digit {variable, divisor, size} is rem(div(variable, divisor), size). The empty index is 0.
  #
  # Transposes, broadcasts and reshapes only change which index stands at which axis. Written this way they are gone,
  # and two programs that lay out the same tensors differently are the same program.

  @type digit :: {variable :: term, divisor :: pos_integer, size :: pos_integer}
  @type t :: [digit]

  @doc "A variable as an index."
  @spec variable(term, pos_integer) :: t
  def variable(_name, 1), do: []
  def variable(name, size), do: [{name, 1, size}]

  @doc "How many values it takes."
  @spec size(t) :: pos_integer
  def size(index), do: Enum.reduce(index, 1, fn {_, _, size}, product -> product * size end)

  @doc "The variables in indices."
  @spec variables([t]) :: [term]
  def variables(indices),
    do: for(index <- indices, {digit, _, _} <- index, name = of_variable(digit), uniq: true, do: name)

  @doc "What a digit's variable runs along: what is within a longer axis, from a place on, along another variable, or none."
  def of_variable({:within, _from, variable}), do: variable
  def of_variable(variable), do: variable

  @doc "The index, along that much of a longer axis, from a place on; :error where it does not run along all of it."
  @spec within(t, non_neg_integer, pos_integer) :: {:ok, t} | :error
  def within([], from, 1), do: {:ok, [{{:within, from, nil}, 1, 1}]}

  def within([{variable, 1, size}], from, size) when not is_tuple(variable) or elem(variable, 0) != :within,
    do: {:ok, [{{:within, from, variable}, 1, size}]}

  def within(_index, _from, _size), do: :error

  @doc "What of a longer axis an index is within: `{from, index along that}`, or nil."
  @spec inside(t) :: {non_neg_integer, t} | nil
  def inside([{{:within, from, nil}, 1, 1}]), do: {from, []}
  def inside([{{:within, from, name}, 1, size}]), do: {from, variable(name, size)}
  def inside(_index), do: nil

  @doc "Indices into a tensor of the one shape as indices into the same memory of the other; :error where they mix digits."
  @spec reshape([t], tuple, tuple) :: {:ok, [t]} | :error
  def reshape(indices, from, to) do
    if Enum.zip(indices, Tuple.to_list(from)) |> Enum.all?(fn {index, axis} -> size(index) in [axis, 1] end),
      do: split(pad(indices, from), Tuple.to_list(to)),
      else: :error
  end

  # An axis that is longer than the index that runs along it stands at 0.
  defp pad(indices, shape) do
    Enum.zip(indices, Tuple.to_list(shape))
    |> Enum.flat_map(fn {index, axis} ->
      if size(index) == axis, do: index, else: [{:zero, 1, axis}]
    end)
  end

  @doc "The digits of one long index as indices of these sizes."
  @spec split(t, [pos_integer]) :: {:ok, [t]} | :error
  def split(digits, sizes) do
    sizes
    |> Enum.reverse()
    |> Enum.reduce_while({[], Enum.reverse(digits)}, fn size, {indices, rest} ->
      case take(rest, size, []) do
        {:ok, index, rest} -> {:cont, {[zero(index) | indices], rest}}
        :error -> {:halt, :error}
      end
    end)
    |> case do
      {indices, []} -> {:ok, indices}
      _ -> :error
    end
  end

  # From the least significant digit on.
  defp take(rest, 1, index), do: {:ok, merge(index), rest}
  defp take([], _size, _index), do: :error

  defp take([{variable, divisor, size} = digit | rest], wanted, index) do
    cond do
      rem(wanted, size) == 0 ->
        take(rest, div(wanted, size), [digit | index])

      rem(size, wanted) == 0 ->
        high = {variable, divisor * wanted, div(size, wanted)}
        {:ok, merge([{variable, divisor, wanted} | index]), [high | rest]}

      true ->
        :error
    end
  end

  defp zero(index), do: Enum.reject(index, &match?({:zero, _, _}, &1))

  @doc "Neighbouring digits of one variable as one digit."
  @spec merge(t) :: t
  def merge(digits) do
    List.foldr(digits, [], fn
      {variable, divisor, size}, [{variable, low, low_size} | rest] when divisor == low * low_size ->
        [{variable, low, size * low_size} | rest]

      digit, rest ->
        [digit | rest]
    end)
  end

  @doc "The index with other indices in place of variables; those that the map does not name stay."
  @spec substitute(t, %{optional(term) => t}) :: {:ok, t} | :error
  def substitute(index, map) do
    Enum.reduce_while(index, {:ok, []}, fn
      {{:within, from, name}, 1, size} = digit, {:ok, digits} ->
        case map do
          %{^name => replacement} ->
            with {:ok, index} <- within(replacement, from, size),
                 do: {:cont, {:ok, digits ++ index}},
                 else: (:error -> {:halt, :error})

          %{} ->
            {:cont, {:ok, digits ++ [digit]}}
        end

      {variable, divisor, size} = digit, {:ok, digits} ->
        with %{^variable => replacement} <- map,
             whole = size(replacement),
             true <- rem(whole, divisor * size) == 0 || :error,
             {:ok, [_high, middle, _low]} <- split(replacement, [div(whole, divisor * size), size, divisor]) do
          {:cont, {:ok, digits ++ middle}}
        else
          %{} -> {:cont, {:ok, digits ++ [digit]}}
          :error -> {:halt, :error}
        end
    end)
    |> case do
      {:ok, digits} -> {:ok, merge(digits)}
      :error -> :error
    end
  end

  @doc """
  The coarsest digits that every index is made of, for each variable, the most significant first; :error where indices
  cut a variable in ways that do not fit together.
  """
  @spec atoms([t]) :: {:ok, %{optional(term) => t}} | :error
  def atoms(indices) do
    cuts =
      for index <- indices, {variable, divisor, size} <- index, reduce: %{} do
        cuts -> Map.update(cuts, variable, [divisor, divisor * size], &[divisor, divisor * size | &1])
      end

    atoms =
      for {variable, cuts} <- cuts, into: %{}, do: {variable, cut(variable, Enum.uniq(cuts) |> Enum.sort())}

    if Enum.any?(atoms, fn {_, digits} -> digits == :error end), do: :error, else: {:ok, atoms}
  end

  defp cut(variable, cuts) do
    pairs = Enum.zip(cuts, tl(cuts))

    if Enum.all?(pairs, fn {low, high} -> rem(high, low) == 0 end),
      do: pairs |> Enum.map(fn {low, high} -> {variable, low, div(high, low)} end) |> Enum.reverse(),
      else: :error
  end

  @doc "An index as atoms."
  @spec refine(t, %{optional(term) => t}) :: t
  def refine(index, atoms) do
    for {variable, divisor, size} <- index,
        {_, low, _} = atom <- Map.get(atoms, variable, [{variable, divisor, size}]),
        low >= divisor and low < divisor * size,
        do: atom
  end
end
