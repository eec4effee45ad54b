defmodule FlashAttention.EXLATest do
  # Attention through EXLA's own compiler, to the StableHLO that XLA gets. Where EXLA's native half is not there,
  # test/support/exla_nif.exs writes the text in its place.
  use ExUnit.Case, async: false

  alias FlashAttention.Test.Numerical
  alias Nx.Defn.{Composite, Evaluator}

  @moduletag :exla
  @compile {:no_warn_undefined,
            [
              EXLA,
              EXLA.Client,
              EXLA.CustomCall,
              EXLA.CustomCall.Spec,
              EXLA.MLIR.Module,
              FlashAttention.Rewriter,
              EXLA.NIF,
              EXLA.Application,
              Nx,
              Nx.Defn,
              Nx.Random,
              Composite,
              Numerical
            ]}

  setup_all do
    Code.require_file("test/support/start_exla.exs")
    {:ok, runs?: function_exported?(EXLA.NIF, :mlir_compile, 7)}
  end

  # A loss and its gradients, with attention amid transposes that XLA would rather do as a change of layout.
  defp step(q, k, v, sink, weights) do
    swap = &Nx.transpose(&1, axes: [0, 2, 1, 3])

    Nx.Defn.value_and_grad({q, k, v, sink}, fn {q, k, v, sink} ->
      o = FlashAttention.attention(swap.(q), swap.(k), swap.(v), window: {5, 0}, softcap: 3.5, sink: sink)
      Nx.sum(Nx.multiply(swap.(o), weights))
    end)
  end

  # Where XLA is not there, `make test-xla` runs the text through the XLA of JAX.
  @write "FLASH_ATTENTION_WRITE_MLIR"
  defp check_through_xla(function, shapes, text, runs?) do
    if runs? do
      {arguments, _key} = Enum.map_reduce(shapes, Nx.Random.key(1), &Nx.Random.normal(&2, shape: &1))

      [through_xla, plain] =
        for compiler <- [EXLA, Evaluator], do: Nx.Defn.jit_apply(function, arguments, compiler: compiler)

      for {x, y} <- Enum.zip(Composite.flatten_list([through_xla]), Composite.flatten_list([plain])),
          do: assert(Nx.to_number(Nx.all_close(Nx.backend_copy(x), y)) == 1)
    else
      stablehlo = stablehlo(function, Enum.map(shapes, &template/1))
      if System.get_env(@write), do: File.write!(text, stablehlo)
      assert stablehlo == File.read!(text), "#{text} is not what EXLA writes now; #{@write}=1 writes it"
    end
  end

  test "a step through XLA, or the text of one", %{runs?: runs?} do
    shapes = [{2, 4, 12, 8}, {2, 2, 12, 8}, {2, 2, 12, 8}, {2, 4}, {2, 4, 12, 8}]
    check_through_xla(&step/5, shapes, "test/xla/exla.mlir", runs?)
  end

  test "merges of parts, and their gradients, are calls too" do
    corrected = fn {o, sink}, lse -> o |> FlashAttention.Sink.correct(lse, sink) |> elem(0) |> Nx.sum() end
    gradients = fn o, lse, sink -> Nx.Defn.grad({o, sink}, &corrected.(&1, lse)) end
    text = stablehlo(gradients, Enum.map([{2, 5, 3, 4}, {2, 3, 5}, {2, 3}], &template/1))
    assert text =~ ~s(call_target_name = "flash_attention_merge",)
    assert text =~ ~s(call_target_name = "flash_attention_merge_backward",)
    assert text =~ "backend_config = {o = array<i64: 2, 5, 3, 4>, sink = array<i64: 2, 3>}"
  end

  # Where a specification of EXLA can say how a call may be shared out, ours is to say it, and the words are to go.
  test "EXLA has no word for a sharding rule, and the documentation says that calls are replicated" do
    fields = EXLA.CustomCall.Spec.__struct__(call_target_name: "none") |> Map.from_struct() |> Map.keys()
    assert Enum.sort(fields) -- [:attributes, :call_target_name, :operand_element_types] == []

    {:docs_v1, _, _, _, %{"en" => doc}, _, _} = Code.fetch_docs(FlashAttention.EXLA)
    assert doc =~ "device computes all of the call"
    assert File.read!("guides/many_devices.md") =~ "Under `EXLA.shard_jit/3` they are replicated"
  end

  test "a loss of o and lse is one call of the backward, with a dlse" do
    loss = fn q, k ->
      {o, lse} = FlashAttention.attention_with_lse(q, k, k)
      Nx.add(Nx.sum(o), Nx.sum(Nx.pow(lse, 2)))
    end

    text = stablehlo(fn q, k -> Nx.Defn.grad(q, &loss.(&1, k)) end, List.duplicate(template({2, 5, 3, 4}), 2))
    assert [_, call] = String.split(text, ~s(operands = "dout,q,k,v,o,lse,dlse"))
    assert call =~ "dlse = array<i64: 2, 3, 5>"
  end

  # As one writes it who has never heard of this library.
  defp plain_step(q, k, v, weights) do
    Nx.Defn.value_and_grad({q, k, v}, fn {q, k, v} ->
      {_, _, rows, dim} = Nx.shape(q)
      s = Nx.divide(Nx.dot(q, [3], [0, 1], k, [3], [0, 1]), :math.sqrt(dim))
      causal = Nx.greater_equal(Nx.iota({rows, 1}), Nx.iota({1, rows}))
      s = Nx.select(Nx.broadcast(causal, s), s, -1.0e9)
      e = Nx.exp(Nx.subtract(s, Nx.reduce_max(s, axes: [3], keep_axes: true)))
      p = Nx.divide(e, Nx.sum(e, axes: [3], keep_axes: true))
      Nx.sum(Nx.multiply(Nx.dot(p, [3], [0, 1], v, [2], [0, 1]), weights))
    end)
  end

  test "a rewritten step through XLA, or the text of one", %{runs?: runs?} do
    shapes = List.duplicate({2, 3, 12, 8}, 4)
    rewritten = fn q, k, v, weights -> FlashAttention.Rewriter.rewrite(plain_step(q, k, v, weights)) end
    check_through_xla(rewritten, shapes, "test/xla/exla_rewritten.mlir", runs?)

    # The same by way of the compiler.
    options = [compiler: FlashAttention.Rewriter, inner: EXLA, module_compilation: :to_mlir, client: :host]

    text =
      try do
        Nx.Defn.compile(&plain_step/4, Enum.map(shapes, &template/1), options)
      catch
        {:mlir_module, ref, _used_inputs, _outputs} ->
          EXLA.MLIR.Module.as_string(struct!(EXLA.MLIR.Module, ref: ref))
      end

    assert [
             {"flash_attention_forward", %{"window_right" => "0 : i64"}, _, _},
             {"flash_attention_backward", _, _, _}
           ] = calls(text)

    refute text =~ "x12x12x"
  end

  @tag :nx_while
  test "a while and the gradient through it through XLA, or the text of them", %{runs?: runs?} do
    check_through_xla(&Numerical.repeated/3, List.duplicate({2, 6, 2, 4}, 3), "test/xla/exla_while.mlir", runs?)
  end

  defp template(shape, type \\ :f32), do: Nx.template(shape, type)

  defp stablehlo(function, arguments, options \\ [client: :host]),
    do: EXLA.to_mlir_module(function, arguments, options).mlir_module

  # The custom calls of attention in a module: target, attributes, types of operands and of results.
  defp calls(text) do
    for line <- String.split(text, "\n"), line =~ "flash_attention", line =~ "custom_call" do
      [target] =
        Regex.run(~r/call_target_name = "(\w+)"|@(flash_attention\w+)/, line, capture: :all_but_first)
        |> Enum.reject(&(&1 == ""))

      assert line =~ "api_version = 4 : i32"
      [config] = Regex.run(~r/backend_config = \{([^}]*)\}/, line, capture: :all_but_first)
      pairs = Regex.scan(~r/(\w+) = (array<[^>]*>|"[^"]*"|[^,]*)/, config, capture: :all_but_first)
      [operands, results] = Regex.run(~r/ : \((.*)\) -> \(?(.*?)\)?$/, line, capture: :all_but_first)

      attributes = Map.new(pairs, &List.to_tuple/1)
      {target, attributes, String.split(operands, ", "), String.split(results, ", ")}
    end
  end

  test "the forward is a custom call on XLA's buffers, with the options that are set" do
    q = template({2, 16, 4, 8}, :bf16)
    k = template({2, 20, 2, 8}, :bf16)
    attention = &FlashAttention.attention(&1, &2, &3, window: {7, 3}, causal: false, scale: 0.25, softcap: 30)

    assert [{"flash_attention_forward", attributes, operands, results}] = calls(stablehlo(attention, [q, k, k]))

    assert attributes == %{
             "operands" => ~s("q,k,v"),
             "q" => "array<i64: 2, 16, 4, 8>",
             "k" => "array<i64: 2, 20, 2, 8>",
             "v" => "array<i64: 2, 20, 2, 8>",
             "scale" => "0.25 : f64",
             "window_left" => "7 : i64",
             "window_right" => "3 : i64",
             "softcap" => "30 : i64",
             "dropout" => "0 : i64",
             "precision" => ~s("highest"),
             "deterministic" => ~s("false"),
             "constant_bias" => ~s("false"),
             "constant_alibi_slopes" => ~s("false"),
             "inference" => ~s("false")
           }

    # One axis, or XLA would lay them out as it likes.
    assert operands == ["tensor<1024xbf16>", "tensor<640xbf16>", "tensor<640xbf16>"]
    assert ["tensor<1024xbf16>", "tensor<128xf32>" | _workspace] = results
  end

  test "every attribute is an option of the C table; without a bound there is none" do
    q = template({1, 4, 1, 8})

    text =
      stablehlo(
        &FlashAttention.attention(&1, &1, &1, causal: false, precision: :default, deterministic: true),
        [q]
      )

    assert [{_, attributes, _, _}] = calls(text)
    assert attributes["precision"] == ~s("default") and attributes["deterministic"] == ~s("true")
    options = for option <- FlashAttention.Native.options(), do: Atom.to_string(option.name)
    inputs = ["q", "k", "v"]

    assert Enum.sort(Map.keys(attributes)) ==
             Enum.sort(["operands" | inputs] ++ (options -- ["window_left", "window_right"]))
  end

  test "the gradient is a second custom call, and nothing else sees the scores" do
    q = template({1, 64, 2, 8})
    sink = template({3, 2})

    gradients = fn q, k, v, sink ->
      Nx.Defn.grad({q, k, v, sink}, fn {q, k, v, sink} ->
        Nx.sum(FlashAttention.attention(q, k, v, sink: sink))
      end)
    end

    text = stablehlo(gradients, [q, q, q, sink])
    assert [forward, backward] = calls(text)
    tensor = "tensor<1024xf32>"
    assert {"flash_attention_forward", _, [_, _, _, "tensor<6xf32>"], _} = forward

    assert {"flash_attention_backward", %{"lse" => "array<i64: 1, 2, 64>", "sink" => "array<i64: 3, 2>"},
            [^tensor, ^tensor, ^tensor, ^tensor, ^tensor, "tensor<128xf32>", "tensor<6xf32>"],
            [^tensor, ^tensor, ^tensor, "tensor<6xf32>" | _workspace]} = backward

    refute text =~ "64x64"
    refute text =~ "callback"
  end

  # The custom call of a forward on a client of that platform, be there one or not.
  defp custom_call(type, platform, index \\ 0) do
    block = %FlashAttention.Defn.Forward{opts: [], shapes: for(name <- [:q, :k, :v], do: {name, {1, 8, 1, 8}})}
    inputs = List.duplicate(template({64}, type), 3)
    EXLA.CustomCall.call(block, nil, inputs, %{platform: platform, default_device_id: index})
  end

  test "what the client's device does not take is an error that says so" do
    f64 = template({1, 8, 1, 8}, :f64)

    assert [{"flash_attention_forward", _, _, ["tensor<64xf64>", "tensor<8xf64>"]}] =
             calls(stablehlo(&FlashAttention.attention(&1, &1, &1), [f64], client: :host))

    error = assert_raise FlashAttention.Error, fn -> custom_call(:f64, :cuda) end
    assert error.message =~ "(device: :cpu computes outside of EXLA, on copies of the tensors)"
  end

  test "it is the client's own device that is asked" do
    assert {:ok, %{call_target_name: "flash_attention_forward"}} = custom_call(:f32, :host)
    assert assert_raise(FlashAttention.Error, fn -> custom_call(:f32, :cuda, 4097) end).reason == :no_device
    assert assert_raise(FlashAttention.Error, fn -> custom_call(:f32, :rocm) end).message =~ ":host or :cuda"
  end

  test "a device that is asked for by name is no custom call, in either pass" do
    q = template({1, 8, 1, 8}, :f64)

    gradient = fn q ->
      Nx.Defn.grad(q, fn q -> Nx.sum(FlashAttention.attention(q, q, q, device: :cpu)) end)
    end

    for client <- [:host, :cuda], Map.has_key?(EXLA.Client.get_supported_platforms(), client) do
      text = stablehlo(gradient, [q], client: client)
      assert calls(text) == []
      assert length(Regex.scan(~r/callback/, text)) >= 2
    end
  end

  test "a missing XLA is an error that says what to do; one that is there takes the calls", %{runs?: runs?} do
    if runs? do
      assert FlashAttention.EXLA.register() == :ok
    else
      :persistent_term.erase(FlashAttention.EXLA)
      assert {:error, %FlashAttention.Error{reason: :unsupported}} = FlashAttention.EXLA.register()
      assert_raise FlashAttention.Error, ~r/XLA/, &FlashAttention.EXLA.register!/0

      assert_raise FlashAttention.Error, ~r/XLA/, fn ->
        stablehlo(&FlashAttention.attention(&1, &1, &1), [template({1, 9, 1, 8})])
      end
    end
  after
    :persistent_term.put(FlashAttention.EXLA, true)
  end
end
