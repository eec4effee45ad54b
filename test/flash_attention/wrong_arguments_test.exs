defmodule FlashAttention.WrongArgumentsTest do
  # Whatever is passed to a public function comes back as a value; the functions that raise by contract raise
  # FlashAttention.Error and nothing else.
  use ExUnit.Case, async: true

  import FlashAttention.Test.Tensors
  alias FlashAttention.{DeviceMemory, Error, Native, Options, States, Tensor}

  @compile {:no_warn_undefined, Nx}
  @rounds 12_000

  # What each function is called with where nothing is wrong.
  defp calls(good) do
    %{q: q, lse: lse, o: o, states: states, opts: opts} = good
    native = %{q: {q.data, q.type, q.shape}, k: {q.data, q.type, q.shape}, v: {q.data, q.type, q.shape}}
    shapes = Map.new(native, fn {name, {_data, type, shape}} -> {name, {type, shape}} end)
    memory = %DeviceMemory{ref: make_ref(), device: {:cuda, 0}, address: 0, bytes: 8}

    part = {{o.data, o.type, o.shape}, {lse.data, lse.type, lse.shape}}

    [
      {FlashAttention, :forward, [q, q, q, opts]},
      {FlashAttention, :forward!, [q, q, q, opts]},
      {FlashAttention, :forward_with_states, [q, q, q, [keep: :device] ++ opts]},
      {FlashAttention, :forward_with_states!, [q, q, q, opts]},
      {FlashAttention, :backward, [q, q, q, q, o, lse, opts]},
      {FlashAttention, :backward!, [q, q, q, q, o, lse, opts]},
      {FlashAttention, :backward, [q, states, [results: :host]]},
      {FlashAttention, :backward!, [q, states]},
      {FlashAttention, :plan, [q, q, q, opts]},
      {FlashAttention, :release, [states]},
      {FlashAttention, :release, [%{q | data: memory}]},
      {FlashAttention, :attention, [q, q, q, opts]},
      {FlashAttention, :attention_with_lse, [q, q, q, opts]},
      {FlashAttention.Parts, :merge, [[{o, lse}, {q, lse}], [sink: opts[:sink], type: :bf16, device: :cpu]]},
      {FlashAttention.Parts, :gradient,
       [q, [{o, lse}], o, lse, [sink: opts[:sink], dlse: lse, results: :host]]},
      {FlashAttention.Sink, :correct, [o, lse, opts[:sink], [device: :cpu]]},
      {FlashAttention.Sink, :gradient, [q, o, lse, opts[:sink], []]},
      {States, :bytes, [states]},
      {DeviceMemory, :to_binary, [memory]},
      {Tensor, :new, [q.data, q.type, q.shape]},
      {Options, :parse, [opts]},
      {Options, :parse!, [opts]},
      {Native, :execute, [:forward, native, [softcap: 2], {:cpu, 0}, %{keep: true}]},
      {Native, :plan, [:forward, shapes, [softcap: 2], {:cpu, 0}]},
      {Native, :merge, [:forward, %{parts: [part, part], type: {:f, 16}}, {:cpu, 0}, :host]},
      {Native, :merge,
       [
         :backward,
         %{parts: [part], o: elem(part, 0), lse: elem(part, 1), dout: elem(part, 0)},
         {:cpu, 0},
         :device
       ]},
      {Native, :memory_info, [make_ref()]},
      {Native, :release, [make_ref()]},
      {Native, :read, [make_ref()]},
      {Native, :trim, [{:cpu, 0}]},
      {Native, :register_xla, ["libnone.so"]}
    ]
  end

  setup_all do
    %{q: q, opts: opts} = problem(1, :f32, {1, 3, 3, 2, 2, 4}, sink: 1, softcap: 2, window: {2, 0}, scale: 0.5)
    opts = [device: :cpu, deterministic: true, precision: :high] ++ opts
    {o, lse} = FlashAttention.forward_with_states!(q, q, q, opts)
    {_o, states} = FlashAttention.forward_with_states!(q, q, q, [keep: :device] ++ opts)
    %{good: %{q: q, o: o, lse: lse, states: states, opts: opts}}
  end

  test "#{@rounds} calls with something wrong in them", %{good: good} do
    calls = calls(good)
    garbage = garbage(good)

    {outcomes, _rand} =
      Enum.map_reduce(1..@rounds, :rand.seed_s(:exsss, 15), fn _round, rand ->
        {{module, function, arguments}, rand} = pick(calls, rand)
        {bad, rand} = spoil(arguments, garbage, rand)
        {again, rand} = :rand.uniform_s(3, rand)
        {bad, rand} = if again == 1, do: spoil(bad, garbage, rand), else: {bad, rand}
        {outcome(module, function, bad), rand}
      end)

    # Most are refused, and some garbage leaves a call what it was.
    assert %{ok: ok, error: error} = Enum.frequencies(outcomes)
    assert ok > 100 and error > div(@rounds, 2)
  end

  defp outcome(module, function, arguments) do
    case apply(module, function, arguments) do
      {:error, %Error{} = error} when module != Native -> well_formed(error)
      {:error, {reason, _, _, _, _} = error} when module == Native and is_atom(reason) -> well_formed(error)
      {:error, other} -> flunk("#{inspect(other)} from #{show(module, function, arguments)}")
      _result -> :ok
    end
  rescue
    error in Error ->
      if raises?(function), do: well_formed(error), else: flunk_with(error, module, function, arguments)

    error ->
      flunk_with(error, module, function, arguments)
  end

  defp raises?(function),
    do:
      function in [:new, :attention, :attention_with_lse, :merge, :gradient, :correct] or
        String.ends_with?("#{function}", "!")

  defp flunk_with(error, module, function, arguments),
    do: flunk("#{Exception.message(error)}\nfrom #{show(module, function, arguments)}")

  defp show(module, function, arguments),
    do: "#{inspect(module)}.#{function} #{inspect(arguments, structs: false, limit: 60)}"

  defp well_formed(error) do
    message = if is_tuple(error), do: elem(error, 4), else: Exception.message(error)
    assert String.valid?(message) and message != "" and byte_size(message) < 2000
    :error
  end

  # ---- what is wrong: a subterm of the arguments is replaced, left out or repeated ------------------------

  defp pick(list, rand) do
    {index, rand} = :rand.uniform_s(length(list), rand)
    {Enum.at(list, index - 1), rand}
  end

  defp spoil(arguments, garbage, rand) do
    {index, rand} = :rand.uniform_s(length(arguments), rand)
    {bad, rand} = spoil_term(Enum.at(arguments, index - 1), garbage, rand)
    {List.replace_at(arguments, index - 1, bad), rand}
  end

  defp spoil_term(term, garbage, rand) do
    {stop, rand} = :rand.uniform_s(rand)

    cond do
      stop < 0.3 -> pick(garbage, rand)
      is_map(term) and map_size(term) > 0 -> spoil_map(term, garbage, rand)
      is_tuple(term) and term != {} -> spoil_tuple(term, garbage, rand)
      is_list(term) and term != [] and not List.improper?(term) -> spoil_list(term, garbage, rand)
      true -> pick(garbage, rand)
    end
  end

  defp spoil_map(map, garbage, rand) do
    {key, rand} = pick(Map.keys(map), rand)
    {left_out, rand} = :rand.uniform_s(4, rand)
    {bad, rand} = spoil_term(Map.fetch!(map, key), garbage, rand)
    {if(left_out == 1, do: Map.delete(map, key), else: Map.put(map, key, bad)), rand}
  end

  defp spoil_tuple(tuple, garbage, rand) do
    {list, rand} = spoil_list(Tuple.to_list(tuple), garbage, rand)
    {if(List.improper?(list), do: tuple, else: List.to_tuple(list)), rand}
  end

  defp spoil_list(list, garbage, rand) do
    {index, rand} = :rand.uniform_s(length(list), rand)
    {kind, rand} = :rand.uniform_s(8, rand)
    {bad, rand} = spoil_term(Enum.at(list, index - 1), garbage, rand)

    case kind do
      1 -> {List.delete_at(list, index - 1), rand}
      2 -> {List.insert_at(list, index, Enum.at(list, index - 1)), rand}
      3 -> {list ++ :improper, rand}
      _ -> {List.replace_at(list, index - 1, bad), rand}
    end
  end

  defp garbage(%{q: q, states: states}) do
    [nil, true, :atom, "", "text", <<1::5>>, <<0::24>>, [], {}, %{}, [1 | 2], [[[]]], {1}, self(), make_ref()] ++
      [
        0,
        1,
        -1,
        3,
        2 ** 31,
        2 ** 62,
        2 ** 63 - 1,
        2 ** 63,
        2 ** 64,
        -(2 ** 80),
        2 ** 3000,
        0.0,
        -0.0,
        1.5,
        1.0e308
      ] ++
      [&is_list/1, fn -> :called end, 1..3, ~r/a/, MapSet.new([1]), Date.utc_today(), %{1 => 2}] ++
      [:infinity, :auto, :cpu, :cuda, :device, :host, {:cpu, 0}, {:cuda, 0}, {:cuda, 2 ** 70}, {:infinity, 0}] ++
      [
        {2 ** 63 - 1, 0},
        {0, 2 ** 200},
        {2 ** 40, 2 ** 40, 2 ** 40, 2 ** 40},
        {1, 3, 2, 4},
        {0, 0, 0, 0},
        {:f, 64}
      ] ++
      [
        [causal: false],
        [{:causal, true} | :x],
        [softcap: q],
        [scale: q],
        [sink: %{__struct__: Tensor}],
        q,
        states
      ] ++
      for(
        module <- [Tensor, States, DeviceMemory, Error, Range, Nx.Tensor, Nope, "Nope", nil],
        do: %{__struct__: module}
      ) ++
      [
        %{q | data: %{kind: :local, address: 4096, data_size: 96}},
        %{q | data: %{kind: :local, address: :here, data_size: "96"}},
        %{q | data: %{__struct__: DeviceMemory, ref: make_ref()}},
        %{q | data: {1, 96, nil}},
        %{states | tensors: %{q: 1}},
        %{states | tensors: %{q: {make_ref(), {:f, 32}, {1, 3, 2, 4}}}},
        %{states | tensors: %{__struct__: Range}},
        %{states | names: %{q: [:a | :b]}},
        %{states | names: %{x: [:a]}},
        %{states | native: [scale: :x]},
        %{states | device: {:tpu, 0}}
      ] ++ nx_garbage()
  end

  defp nx_garbage do
    if Code.ensure_loaded?(Nx) do
      good = Nx.broadcast(Nx.tensor(1.0, type: :f32), {1, 3, 2, 4})

      [good, %{good | data: nil}, %{good | shape: {3}}, %{good | type: :none}, %{good | names: [:a]}] ++
        [Map.delete(good, :vectorized_axes), Nx.template({1, 3, 2, 4}, :f32), Nx.vectorize(good, :x)]
    else
      []
    end
  end

  # ---- one by one ---------------------------------------------------------------------------------------

  test "forged and dead states are named", %{good: %{q: q, states: states}} do
    for forged <- [
          %{__struct__: States},
          %{states | tensors: %{}},
          %{states | tensors: :none},
          %{states | names: %{q: [:one]}},
          %{states | names: %{__struct__: nil}},
          %{states | device: :cpu}
        ] do
      for result <- [FlashAttention.backward(q, forged), FlashAttention.release(forged), States.bytes(forged)] do
        assert {:error, %Error{argument: :states, expected: "a FlashAttention.States"}} = result
      end
    end

    # References of a VM that is gone are references to nothing.
    dead = %{states | tensors: Map.new(states.tensors, fn {name, {_, t, s}} -> {name, {make_ref(), t, s}} end)}
    assert {:error, %Error{reason: :invalid_argument}} = FlashAttention.backward(q, dead)
    assert {:error, %Error{argument: :memory}} = FlashAttention.release(dead)
    assert {:error, %Error{argument: :memory}} = States.bytes(dead)
  end

  test "a tensor that its own module cannot read says why", %{good: %{q: q}} do
    assert {:error, %Error{argument: :k, expected: "a tensor that can be read", got: "an error: " <> _}} =
             FlashAttention.forward(q, %{__struct__: Tensor}, q)
  end

  test "an error shows what came in a line, whatever it is" do
    for term <- [%{__struct__: Tensor}, %{__struct__: Nope}, 2 ** 5000, :binary.copy("x", 5000), [1 | 2]] do
      text = Error.show(term)
      assert String.valid?(text) and String.length(text) <= 203
    end
  end
end
