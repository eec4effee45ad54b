defmodule ErlangTest do
  # The library as Erlang programs meet it: :flash_attention, src/flash_attention.erl.
  use ExUnit.Case, async: true

  import FlashAttention.Test.Tensors

  @atoms %{{:f, 32} => :f32, {:f, 64} => :f64, {:f, 16} => :f16, {:bf, 16} => :bf16}

  defp tuple(%{data: data, type: type, shape: shape}), do: {data, @atoms[type], shape}
  defp map(%{data: data, type: type, shape: shape}), do: %{data: data, type: @atoms[type], shape: shape}

  for type <- [:f32, :f64, :bf16, :f16], form <- [:tuple, :map] do
    test "#{type} as a #{form}: what the Elixir functions give" do
      %{q: q, k: k, v: v, dout: dout, opts: opts} =
        problem(1, unquote(type), {2, 5, 7, 4, 2, 3}, sink: 2, softcap: 3)

      erl = if unquote(form) == :tuple, do: &tuple/1, else: &map/1
      [eq, ek, ev, edout] = Enum.map([q, k, v, dout], erl)
      {o, lse} = FlashAttention.forward_with_states!(q, k, v, opts)
      {dq, dk, dv, %{sink: dsink}} = FlashAttention.backward!(dout, q, k, v, o, lse, opts)

      # As a map and as a proplist; the sink in the other form.
      for options <- [%{sink: map(opts[:sink]), softcap: 3}, [softcap: 3, sink: tuple(opts[:sink])]] do
        assert :flash_attention.forward(eq, ek, ev, options) == {:ok, erl.(o)}
        assert :flash_attention.forward_with_states(eq, ek, ev, options) == {:ok, erl.(o), erl.(lse)}

        assert :flash_attention.backward(edout, eq, ek, ev, erl.(o), erl.(lse), options) ==
                 {:ok, erl.(dq), erl.(dk), erl.(dv), %{sink: erl.(dsink)}}
      end
    end
  end

  test "biases and slopes are tensors too, and have their gradients" do
    options = [alibi_slopes: 1, bias: {:f32, {1, 2, 1, 5}}]
    %{q: q, k: k, v: v, dout: dout, opts: opts} = problem(2, :f32, {1, 4, 5, 2, 1, 3}, options)
    {o, lse} = FlashAttention.forward_with_states!(q, k, v, opts)
    {dq, dk, dv, optional} = FlashAttention.backward!(dout, q, k, v, o, lse, opts)
    given = %{alibi_slopes: tuple(opts[:alibi_slopes]), bias: map(opts[:bias])}
    optional = for {name, gradient} <- optional, into: %{}, do: {name, tuple(gradient)}
    [eq, ek, ev, edout, eo, elses] = Enum.map([q, k, v, dout, o, lse], &tuple/1)
    assert map_size(optional) == 2

    assert :flash_attention.backward(edout, eq, ek, ev, eo, elses, given) ==
             {:ok, tuple(dq), tuple(dk), tuple(dv), optional}

    hidden = <<1, 0, 1, 1, 0>>
    o = FlashAttention.forward!(q, k, v, bias: FlashAttention.Tensor.new(hidden, {:u, 8}, {1, 1, 1, 5}))
    assert :flash_attention.forward(eq, ek, ev, bias: {hidden, :u8, {1, 1, 1, 5}}) == {:ok, tuple(o)}
  end

  test "dropout has its seed, as a tensor, in both passes and in states" do
    %{q: q, k: k, v: v, dout: dout, opts: opts} =
      problem(3, :f32, {1, 9, 11, 2, 2, 3}, dropout: 0.4, dropout_seed: {5, 6}, device: :cpu)

    {o, lse} = FlashAttention.forward_with_states!(q, k, v, opts)
    {dq, dk, dv} = FlashAttention.backward!(dout, q, k, v, o, lse, opts)
    [eq, ek, ev, edout] = Enum.map([q, k, v, dout], &tuple/1)
    given = %{dropout: 0.4, dropout_seed: {<<5::32-native, 6::32-native>>, :u32, {2}}, device: :cpu}
    {:ok, eo, states} = :flash_attention.forward_with_states(eq, ek, ev, Map.put(given, :keep, :device))
    assert eo == tuple(o) and eo != tuple(FlashAttention.forward!(q, k, v, device: :cpu))
    gradients = {:ok, tuple(dq), tuple(dk), tuple(dv)}
    assert :flash_attention.backward(edout, states) == gradients
    assert :flash_attention.backward(edout, eq, ek, ev, eo, tuple(lse), given) == gradients
  end

  test "options have their defaults; atoms of a proplist are true; types are written in two ways" do
    %{q: q} = problem(1, :f32, {1, 5, 5, 2, 2, 3}, [])
    {:ok, o, lse} = :flash_attention.forward_with_states(tuple(q), tuple(q), tuple(q))
    assert {:ok, ^o} = :flash_attention.forward(tuple(q), tuple(q), tuple(q))

    assert {:ok, ^o} =
             :flash_attention.forward(tuple(q), map(q), tuple(q), [:causal, :deterministic, scale: :undefined])

    assert {:ok, ^o} = :flash_attention.forward({q.data, q.type, q.shape}, q, q, %{device: :auto})

    assert {:ok, other} =
             :flash_attention.forward(tuple(q), tuple(q), tuple(q), %{causal: false, window: {:infinity, 1}})

    assert other != o

    assert {:ok, _dq, _dk, _dv} = :flash_attention.backward(o, tuple(q), tuple(q), tuple(q), o, lse)

    cpu = [device: :cpu]
    {:ok, o, lse} = :flash_attention.forward_with_states(tuple(q), tuple(q), tuple(q), cpu)
    {:ok, dq, dk, dv} = :flash_attention.backward(o, tuple(q), tuple(q), tuple(q), o, lse, cpu)

    {:ok, ^o, states} =
      :flash_attention.forward_with_states(tuple(q), tuple(q), tuple(q), keep: :device, device: :cpu)

    assert :flash_attention.backward(o, states) == {:ok, dq, dk, dv}
    assert :flash_attention.backward(o, states, results: :host) == {:ok, dq, dk, dv}
    assert :flash_attention.states_bytes(states) == 0
    assert :flash_attention.release(states) == :ok
    assert :flash_attention.release(o) == :ok
    assert :flash_attention.trim() == :ok
  end

  describe "masks" do
    alias FlashAttention.{Mask, Tensor}

    test "are the functions of FlashAttention.Mask, by name and arguments" do
      %{q: q, k: k, v: v, dout: dout} = problem(1, :f32, {2, 5, 5, 2, 2, 3}, [])
      [eq, ek, ev, edout] = Enum.map([q, k, v, dout], &tuple/1)
      words = for x <- [0, 2, 5], into: <<>>, do: <<x::signed-32-native>>
      cu_seqlens = Tensor.new(words, {:s, 32}, {3})

      for {term, mask} <- [
            {{:packed, [3, 2]}, Mask.packed([3, 2])},
            {{:packed, [3, 2], [1, 4]}, Mask.packed([3, 2], [1, 4])},
            {{:packed_at, [0, 2, 5]}, Mask.packed_at([0, 2, 5])},
            {{:packed_at, {words, {:s, 32}, {3}}}, Mask.packed_at(cu_seqlens)},
            {{:packed_at, %{data: words, type: {:s, 32}, shape: {3}}, [0, 1, 5]},
             Mask.packed_at(cu_seqlens, [0, 1, 5])},
            {{:lengths, [2, 4]}, Mask.lengths([2, 4])},
            {{:lengths, [2, 4], [side: :left, q_lengths: [5, 1]]},
             Mask.lengths([2, 4], side: :left, q_lengths: [5, 1])},
            {{:lengths, [2, 4], %{side: :left}}, Mask.lengths([2, 4], side: :left)},
            {{:prefix, [1, 3]}, Mask.prefix([1, 3])},
            {{:block_causal, 2}, Mask.block_causal(2)},
            {{:segments, [[1, 1, 2, 2, 2], [4, 4, 4, 4, 7]]},
             Mask.segments([[1, 1, 2, 2, 2], [4, 4, 4, 4, 7]])},
            {{:ranges, [{0, 3}, {3, 5}], [{0, 5}, {1, 2}], [:bi_causal, :full]},
             Mask.ranges([{0, 3}, {3, 5}], [{0, 5}, {1, 2}], [:bi_causal, :full])},
            {{:from_bands, [{0, 5, 1, 4, :infinity, 2}]}, Mask.from_bands([{0, 5, 1, 4, :infinity, 2}])},
            {{:intersect_window, {:packed, [3, 2]}, {1, 0}}, Mask.intersect_window(Mask.packed([3, 2]), {1, 0})}
          ] do
        assert :flash_attention.mask(term) == {:ok, mask}
        {o, lse} = FlashAttention.forward_with_states!(q, k, v, mask: mask, causal: false)
        {dq, dk, dv} = FlashAttention.backward!(dout, q, k, v, o, lse, mask: mask, causal: false)

        for given <- [term, mask], options <- [%{mask: given, causal: false}, [causal: false, mask: given]] do
          assert :flash_attention.forward_with_states(eq, ek, ev, options) == {:ok, tuple(o), tuple(lse)}

          assert :flash_attention.backward(edout, eq, ek, ev, tuple(o), tuple(lse), options) ==
                   {:ok, tuple(dq), tuple(dk), tuple(dv)}

          assert {:ok, %{forward: _}} = :flash_attention.plan(eq, ek, ev, options)
        end
      end
    end

    test "that are wrong come back as errors" do
      q = tuple(random(1, :f32, {1, 2, 1, 4}))

      for {term, argument, got} <- [
            {{:packed, [1, -1]}, :q_lengths, "[1, -1]"},
            {{:packed, 5}, :q_lengths, "5"},
            {{:packed}, :mask, "{:packed}"},
            {{:packed, [1], [1], [1]}, :mask, "{:packed, [1], [1], [1]}"},
            {{:area, 1, {1, 1}}, :mask, "{:area, 1, {1, 1}}"},
            {{:lengths, [2], [beside: :left]}, :opts, ":beside"},
            {{:lengths, [2], 5}, :opts, "5"},
            {{:intersect_window, {:none, 1}, {1, 0}}, :mask, "{:none, 1}"},
            {{:intersect_window, {:packed, [2]}, 1}, :window, "1"},
            {{:ranges, [{0, 1}], [{0, 1}], :diagonal}, :types, ":diagonal"}
          ] do
        assert {:error, %{reason: :invalid_argument, argument: ^argument, got: ^got} = error} =
                 :flash_attention.mask(term)

        assert :flash_attention.forward(q, q, q, %{mask: term}) == {:error, error}
        assert :flash_attention.plan(q, q, q, mask: term) == {:error, error}
      end

      assert {:error, %{argument: :mask}} = :flash_attention.mask(:packed)
      assert {:error, %{argument: :mask}} = :flash_attention.forward(q, q, q, mask: :packed)
      assert {:error, %{argument: :bands}} = :flash_attention.forward(q, q, q, mask: {:packed, [3]})
    end
  end

  test "a cache: what the Elixir functions give" do
    %{q: q, k: k, v: v, opts: opts} = problem(4, :f32, {2, 3, 7, 4, 2, 5}, softcap: 3)
    {o, lse} = FlashAttention.forward_with_states!(q, k, v, [device: :cpu] ++ opts)
    options = %{bytes: 10_000, type: :f32, num_kv_heads: 2, head_dim: 5, device: :cpu, page_size: :undefined}
    assert {:ok, cache} = :flash_attention.cache(options)

    assert %{page_size: 16, free_pages: pages, num_pages: pages, device: :cpu} =
             :flash_attention.cache_info(cache)

    assert {:ok, first} = :flash_attention.sequence(cache)
    assert {:ok, second} = :flash_attention.sequence(cache)
    sequences = [first, second]
    assert :flash_attention.append(sequences, tuple(k), map(v)) == :ok
    assert Enum.map(sequences, &:flash_attention.sequence_length/1) == [7, 7]

    for given <- [Map.new(opts), opts] do
      assert :flash_attention.forward(tuple(q), sequences, given) == {:ok, tuple(o)}
      assert :flash_attention.forward_with_states(map(q), sequences, given) == {:ok, map(o), map(lse)}
    end

    assert :flash_attention.forward(tuple(q), sequences) ==
             {:ok, tuple(FlashAttention.forward!(q, k, v, device: :cpu))}

    assert {:ok, _o, _lse} = :flash_attention.forward_with_states(tuple(q), sequences)
    assert {:ok, fork} = :flash_attention.fork(first)
    assert :flash_attention.forward(tuple(q), [fork, second], opts) == {:ok, tuple(o)}
    assert Enum.map([first, second, fork], &:flash_attention.release/1) == [:ok, :ok, :ok]
    assert :flash_attention.sequence_length(fork) == 0
    assert %{free_pages: ^pages} = :flash_attention.cache_info(cache)
    assert {:error, %{argument: :sequence}} = :flash_attention.fork(fork)
    assert {:error, %{argument: :sequences}} = :flash_attention.append(:none, tuple(k), tuple(v))
    assert {:error, %{argument: :cache}} = :flash_attention.sequence(1)
    assert {:error, %{argument: :bytes}} = :flash_attention.cache(%{options | bytes: 0})
    assert {:error, %{argument: :opts}} = :flash_attention.cache(:none)
    assert {:error, %{argument: :opts}} = :flash_attention.cache(Map.put(options, :sink, 1))
  end

  test "what computes here" do
    q = tuple(random(1, :f32, {1, 2, 1, 4}))

    assert {:ok, %{device: :cpu, forward: "cpu/" <> _, backward: "cpu/" <> _}} =
             :flash_attention.plan(q, q, q, device: :cpu)

    assert {:ok, %{device: _}} = :flash_attention.plan(q, q, q)
    assert %{version: version, devices: [%{device: :cpu} | _], cuda: cuda} = :flash_attention.backend_info()
    assert version == FlashAttention.backend_info().version
    assert cuda == :undefined or is_binary(cuda)
  end

  test "what is not there is undefined" do
    assert %{devices: [%{device: :cpu, memory: :undefined, features: [_ | _]} | _]} =
             :flash_attention.backend_info()

    q = tuple(random(1, :f32, {1, 2, 1, 4}))
    options = %{page_table: {<<0::32, 0::32>>, :s32, {1, 2}}, device: :cpu}
    assert {:ok, %{forward: "cpu/" <> _, backward: :undefined}} = :flash_attention.plan(q, q, q, options)
  end

  test "errors are maps" do
    q = tuple(random(1, :f32, {1, 2, 1, 4}))

    assert :flash_attention.forward(q, {binary_part(elem(q, 0), 0, 16), :f32, {1, 2, 1, 2}}, q) ==
             {:error,
              %{
                reason: :invalid_argument,
                argument: :k,
                expected: "head_dim 4 as in q",
                got: "2",
                message: "k: expected head_dim 4 as in q, got 2"
              }}

    for {arguments, argument} <- [
          {[1, q, q], :q},
          {[q, {1, 2}, q], :k},
          {[q, q, %{data: ""}], :v},
          {[q, q, put_elem(q, 1, :s8)], :v},
          {[q, q, q, 5], :opts},
          {[q, q, q, [{:causal, true} | :improper]], :opts},
          {[q, q, q, %{"causal" => true}], :opts},
          {[q, q, q, %{causal: 1}], :causal},
          {[q, q, q, %{sink: 1}], :sink},
          {[q, q, q, [:sink]], :sink}
        ] do
      assert {:error, error} = apply(:flash_attention, :forward, arguments)
      assert %{argument: ^argument, reason: :invalid_argument, message: message} = error

      assert is_binary(message) and
               Enum.sort(Map.keys(error)) == [:argument, :expected, :got, :message, :reason]
    end

    assert {:error, %{argument: :states, message: "states: expected a FlashAttention.States, got :none"}} =
             :flash_attention.backward(q, :none)

    assert {:error, %{argument: :states}} = :flash_attention.states_bytes(:none)
    assert {:error, %{argument: :memory}} = :flash_attention.release(:none)
    assert {:error, %{reason: :no_device}} = :flash_attention.forward(q, q, q, device: {:cuda, 4096})
    no_argument = :flash_attention.forward(q, q, q, window: {1, 2, 3})
    assert {:error, %{expected: expected}} = no_argument
    assert is_binary(expected)
  end

  # The Erlang of the README, as its shell would run it; a comment has the value of the last expression.
  for {block, index} <-
        Enum.with_index(
          Regex.scan(~r/^```erlang\n(.*?)^```/ms, File.read!("README.md"), capture: :all_but_first),
          1
        ) do
    @external_resource "README.md"
    test "Erlang block #{index} of the README" do
      [block] = unquote(block)
      [_, program, expected] = Regex.run(~r/^(.*)\n%=> (.*)\n\z/ms, block)

      {value, _bindings} =
        Enum.reduce(expressions(program), {nil, []}, fn exprs, {_, bindings} -> eval(exprs, bindings) end)

      assert {^value, _} = eval(hd(expressions(expected <> ".")), [])
    end
  end

  defp eval(expressions, bindings) do
    {:value, value, bindings} = :erl_eval.exprs(expressions, bindings)
    {value, bindings}
  end

  # Each up to its dot.
  defp expressions(text) do
    {:ok, tokens, _} = text |> String.to_charlist() |> :erl_scan.string()

    tokens
    |> Enum.chunk_while([], &chunk/2, fn [] -> {:cont, []} end)
    |> Enum.map(fn tokens ->
      {:ok, expressions} = :erl_parse.parse_exprs(tokens)
      expressions
    end)
  end

  defp chunk({:dot, _} = dot, tokens), do: {:cont, Enum.reverse([dot | tokens]), []}
  defp chunk(token, tokens), do: {:cont, [token | tokens]}
end
