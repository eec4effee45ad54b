defmodule FlashAttention.NativeTest do
  # Not async: it loads the NIF again while it is in use.
  use ExUnit.Case, async: false

  import FlashAttention.Test.Tensors
  alias FlashAttention.Native

  doctest Native

  @type_doc "type f32, f64, bf16 or f16"

  defp native(seed, shape, type \\ :f32) do
    tensor = random(seed, type, shape)
    {tensor.data, tensor.type, tensor.shape}
  end

  defp inputs(type \\ :f32) do
    %{q: native(1, {2, 3, 4, 5}, type), k: native(2, {2, 6, 2, 5}, type), v: native(3, {2, 6, 2, 5}, type)}
  end

  defp rejected(pass, tensors, options, device) do
    {:error, {status, argument, expected, got, message}} = Native.run(pass, tensors, options, device)
    assert message == "#{argument}: expected #{expected}, got #{got}"
    {status, message}
  end

  test "numbers of any size come back as values" do
    shapes = for name <- [:q, :k, :v], into: %{}, do: {name, {{:f, 32}, {1, 2, 1, 4}}}

    for name <- [:window_left, :window_right, :softcap],
        value <- [-(2 ** 63), 2 ** 64, 2 ** 1100, -(2 ** 1100)] do
      expected = "#{name}"

      assert {:error, {:invalid_argument, ^expected, _, _, _}} =
               Native.plan(:forward, shapes, [{name, value}], {:cpu, 0})
    end

    assert {:error, {:invalid_argument, "window_left", _, _, _}} =
             Native.plan(:forward, shapes, [window_left: 2 ** 63 - 1], {:cpu, 0})
  end

  test "kinds of devices say whether their memory is their own" do
    assert [
             %{kind: :cpu, has_own_memory: false},
             %{kind: :cuda, has_own_memory: cuda?},
             %{kind: :reference, has_own_memory: false}
           ] = Native.backend_info().kinds

    assert is_boolean(cuda?)
  end

  test "outputs are those of the pass, sinks or none" do
    sinks = %{sink: native(4, {3, 4})}
    {:ok, forward} = Native.run(:forward, Map.merge(inputs(), sinks), [window_right: 0], {:cpu, 0})
    assert Enum.sort(Map.keys(forward)) == [:lse, :o]
    backward = inputs() |> Map.merge(forward) |> Map.put(:dout, native(5, {2, 3, 4, 5}))
    {:ok, grads} = Native.run(:backward, Map.merge(backward, sinks), [window_right: 0], {:cpu, 0})
    assert Enum.sort(Map.keys(grads)) == [:dk, :dq, :dsink, :dv]
    {:ok, grads} = Native.run(:backward, backward, [window_right: 0], {:cpu, 0})
    assert Enum.sort(Map.keys(grads)) == [:dk, :dq, :dv]
  end

  test "the tangent is the derivative along a direction" do
    inputs = inputs(:f64)
    direction = for {name, {_, _, shape}} <- inputs, into: %{}, do: {name, native(hash(name), shape, :f64)}
    tangents = for {name, tensor} <- direction, into: %{}, do: {:"tangent_#{name}", tensor}
    options = [window_left: 2, softcap: 1.5]
    assert {:ok, results} = Native.run(:tangent, Map.merge(inputs, tangents), options, {:cpu, 0})
    assert Enum.sort(Map.keys(results)) == [:lse, :lse_tangent, :o, :o_tangent]

    step = 1.0e-5

    [plus, minus] =
      for sign <- [1, -1] do
        moved = for {name, tensor} <- inputs, into: %{}, do: {name, move(tensor, direction[name], sign * step)}
        {:ok, moved} = Native.run(:forward, moved, options, {:reference, 0})
        moved
      end

    for {name, tangent} <- [o: :o_tangent, lse: :lse_tangent] do
      differences = Enum.zip_with(values(plus[name]), values(minus[name]), &((&1 - &2) / (2 * step)))
      assert max_difference(values(results[tangent]), differences) < 1.0e-8
    end
  end

  defp hash(name), do: :erlang.phash2(name)
  defp values({data, {:f, 64}, _shape}), do: for(<<x::float-64-native <- data>>, do: x)

  defp move({_, type, shape} = tensor, direction, step) do
    moved = Enum.zip_with(values(tensor), values(direction), &(&1 + step * &2))
    {for(x <- moved, into: <<>>, do: <<x::float-64-native>>), type, shape}
  end

  test "wrong terms are named" do
    tensors = inputs()
    device = {:cpu, 0}

    for {arguments, message} <- [
          {[:sideways, tensors, [], device],
           "pass: expected one of forward, backward, tangent, bound, got sideways"},
          {["forward", tensors, [], device],
           "pass: expected one of forward, backward, tangent, bound, got a binary of 7 bytes"},
          {[:forward, [], [], device], "tensors: expected a map, got []"},
          {[:forward, %{tensors | q: 1}, [], device], "q: expected {binary, type, shape}, got 1"},
          {[:forward, Map.put(tensors, :x, 1), [], device], "tensors: expected the name of a tensor, got x"},
          {[:forward, Map.put(tensors, "q", 1), [], device],
           "tensors: expected the name of a tensor, got a binary of 1 bytes"},
          {[:forward, Map.put(tensors, :o, tensors.q), [], device],
           "o: expected none, as it is no input of the forward, got a tensor"},
          {[:forward, put_elem_in(tensors, :k, 0, <<1::5>>), [], device], "k: expected a binary, got <<"},
          {[:forward, put_elem_in(tensors, :k, 1, {:f, 8}), [], device], "k: expected #{@type_doc}, got f8"},
          {[:forward, put_elem_in(tensors, :k, 1, {:bf, 32}), [], device],
           "k: expected #{@type_doc}, got bf32"},
          {[:forward, put_elem_in(tensors, :k, 1, {:f, 32.0}), [], device],
           "k: expected #{@type_doc}, got {f,3.2"},
          {[:forward, put_elem_in(tensors, :k, 2, {}), [], device],
           "k: expected rank 4, [batch, seqlen_k, num_kv_heads, head_dim], got rank 0"},
          {[:forward, put_elem_in(tensors, :k, 2, {1, 2, 3, 4, 5}), [], device], "got rank 5"},
          {[:forward, tensors, :none, device], "options: expected a proper list, got none"},
          {[:forward, tensors, [{:scale, 1} | :tail], device],
           "options: expected a proper list, got [{scale,1}|tail]"},
          {[:forward, tensors, [:scale], device], "options: expected {name, value}, got scale"},
          {[:forward, tensors, [{"scale", 1}], device], "options: expected {name, value}, got {"},
          {[:forward, tensors, [causal: true], device], "options: expected the name of an option, got causal"},
          {[:forward, tensors, [{:größer, 1}], device], "options: expected the name of an option, got "},
          {[:forward, tensors, [{:больше, 1}], device], "options: expected {name, value}, got {"},
          {[:forward, tensors, [scale: "1"], device],
           "scale: expected a number or an atom, got a binary of 1 bytes"},
          {[:forward, tensors, [scale: :infinity], device],
           "scale: expected a number from -1e+30 to 1e+30, got infinity"},
          {[:forward, tensors, [window_left: -1], device],
           "window_left: expected a whole number of at least 0, or infinity, got -1"},
          {[:forward, tensors, [window_left: 1.5], device], "window_left: expected a whole number"},
          {[:forward, tensors, [precision: :low], device],
           "precision: expected one of highest, high, default, got low"},
          {[:forward, tensors, [deterministic: 2], device],
           "deterministic: expected a number from 0 to 1, got 2"},
          {[:forward, tensors, [], :cpu], "device: expected {kind, index}, got cpu"},
          {[:forward, tensors, [], {:tpu, 0}], "device: expected one of cpu, cuda, reference, got tpu"},
          {[:forward, tensors, [], {:cpu, 1}], "device: expected a cpu device from 0 to 0, got 1"}
        ] do
      {_status, text} = apply(__MODULE__, :rejected_call, arguments)
      assert text =~ message
    end
  end

  def rejected_call(pass, tensors, options, device), do: rejected(pass, tensors, options, device)

  defp put_elem_in(tensors, name, position, value),
    do: Map.update!(tensors, name, &put_elem(&1, position, value))

  test "a huge wrong term is neither walked through nor shown" do
    huge = :binary.copy(<<0>>, 50_000_000)
    # A list of 2^200 lists, for whoever walks through it.
    endless = Enum.reduce(1..200, [], fn _, list -> [list, list] end)

    for term <- [[huge, huge], endless, {endless, 1}] do
      assert {:error, {:invalid_argument, "q", _, got, _}} =
               Native.run(:forward, %{q: {term, 1, 1}}, [], {:cpu, 0})

      assert byte_size(got) < 200
    end
  end

  describe "fuzz" do
    @rounds 6000

    test "#{@rounds} random mutations of valid arguments give a result or an error, and the next call works" do
      good = [:forward, Map.put(inputs(), :sink, native(4, {1, 4})), options(), {:cpu, 0}]
      {:ok, expected} = apply(Native, :run, good)

      {outcomes, _rand} =
        Enum.map_reduce(1..@rounds, :rand.seed_s(:exsss, 2026), fn _round, rand ->
          {bad, rand} = mutate_argument(good, rand)
          {again, rand} = :rand.uniform_s(3, rand)
          {bad, rand} = if again == 1, do: mutate_argument(bad, rand), else: {bad, rand}
          {outcome(bad), rand}
        end)

      # The mutations reach far: most are rejected, but some leave the arguments good.
      assert %{ok: ok, error: error} = Enum.frequencies(outcomes)
      assert ok > 100 and error > div(@rounds, 2)
      assert apply(Native, :run, good) == {:ok, expected}
    end

    defp options,
      do: [
        scale: 0.5,
        window_left: 3,
        window_right: :infinity,
        softcap: 0,
        precision: :high,
        deterministic: true
      ]

    defp outcome([pass, tensors, options, device] = arguments) do
      case Native.run(pass, tensors, options, device) do
        {:ok, results} when is_map(results) ->
          :ok

        {:error, {status, argument, expected, got, message}} when is_atom(status) ->
          for text <- [argument, expected, got, message], do: assert(String.valid?(text))
          assert message != ""
          :error
      end
    rescue
      error -> flunk("#{inspect(error)} from #{inspect(arguments, limit: 50)}")
    end

    defp mutate_argument(arguments, rand) do
      {index, rand} = :rand.uniform_s(length(arguments), rand)
      {argument, rand} = mutate(Enum.at(arguments, index - 1), rand)
      {List.replace_at(arguments, index - 1, argument), rand}
    end

    # Walks down to a random subterm and puts something else there.
    defp mutate(term, rand) do
      {stop, rand} = :rand.uniform_s(rand)

      cond do
        stop < 0.15 -> garbage(term, rand)
        is_list(term) and term != [] and List.improper?(term) == false -> mutate_list(term, rand)
        is_tuple(term) and term != {} -> map_result(mutate_list(Tuple.to_list(term), rand), &to_tuple/1)
        is_map(term) and term != %{} -> map_result(mutate_list(Map.to_list(term), rand), &to_map/1)
        true -> garbage(term, rand)
      end
    end

    defp mutate_list(list, rand) do
      {index, rand} = :rand.uniform_s(length(list), rand)
      {kind, rand} = :rand.uniform_s(10, rand)

      case kind do
        1 -> {List.delete_at(list, index - 1), rand}
        2 -> {List.insert_at(list, index, Enum.at(list, index - 1)), rand}
        _ -> map_result(mutate(Enum.at(list, index - 1), rand), &List.replace_at(list, index - 1, &1))
      end
    end

    defp map_result({term, rand}, fun), do: {fun.(term), rand}
    defp to_tuple(list) when is_list(list), do: List.to_tuple(list)

    defp to_map(list), do: Map.new(list, &if(match?({_, _}, &1), do: &1, else: {&1, &1}))

    defp garbage(term, rand) do
      candidates = [
        0,
        1,
        -1,
        2,
        7,
        2 ** 31,
        2 ** 62,
        -(2 ** 63),
        2 ** 63,
        2 ** 64,
        2 ** 200,
        0.0,
        -0.0,
        1.5,
        1.0e308,
        nil,
        true,
        false,
        :infinity,
        :forward,
        :backward,
        :tangent,
        :q,
        :o,
        :lse,
        :f,
        :bf,
        :cpu,
        :cuda,
        :reference,
        :high,
        :"",
        :größer,
        :больше,
        [],
        {},
        %{},
        "",
        <<1::1>>,
        <<0::24>>,
        :binary.copy(<<255>>, 480),
        self(),
        make_ref(),
        &is_list/1,
        [1 | 2],
        {:f, 64},
        {:bf, 16},
        {2, 3, 4, 5},
        {0, 0, 0, 0},
        {2 ** 40, 2 ** 40, 2 ** 40, 2 ** 40},
        {1, 1, 1, 1, 1},
        [scale: 1.0e300],
        [{:scale, 1} | :x],
        List.duplicate({:scale, 1}, 1000),
        %{1 => 2},
        Map.new(1..100, &{&1, &1}),
        [[[[[term]]]]],
        {term, term}
      ]

      {index, rand} = :rand.uniform_s(length(candidates), rand)
      {Enum.at(candidates, index - 1), rand}
    end
  end

  describe "hot code upgrade" do
    test "new code takes the NIF over while calls run in the old" do
      good = [:forward, inputs(), [], {:cpu, 0}]
      expected = apply(Native, :run, good)
      long = %{q: native(1, {1, 700, 4, 64}), k: native(2, {1, 700, 4, 64}), v: native(3, {1, 700, 4, 64})}
      expected_long = Native.run(:forward, long, [], {:reference, 0})

      for version <- 1..3 do
        running = Task.async(fn -> Native.run(:forward, long, [], {:reference, 0}) end)
        wait_until_computing(running.pid)
        assert {:module, Native} = load_version(version)
        assert apply(Native, :version, []) == version
        assert apply(Native, :run, good) == expected
        assert Task.await(running, :infinity) == expected_long
        assert :code.soft_purge(Native)
        assert apply(Native, :run, good) == expected
      end
    after
      {Native, beam, file} = :code.get_object_code(Native)
      :code.purge(Native)
      {:module, Native} = :code.load_binary(Native, file, beam)
    end

    defp wait_until_computing(process) do
      if Process.info(process, :current_function) != {:current_function, {Native, :execute, 5}} do
        :erlang.yield()
        wait_until_computing(process)
      end
    end

    # The module as a new release would bring it: its code with one more function.
    defp load_version(version) do
      {Native, beam, file} = :code.get_object_code(Native)
      {:ok, {Native, [abstract_code: {:raw_abstract_v1, forms}]}} = :beam_lib.chunks(beam, [:abstract_code])
      function = {:function, 1, :version, 0, [{:clause, 1, [], [], [{:integer, 1, version}]}]}
      export = {:attribute, 1, :export, [version: 0]}

      [{:attribute, _, :file, _} = source, {:attribute, _, :module, _} = module | rest] = forms
      forms = [source, module, export] ++ Enum.reject(rest, &match?({:eof, _}, &1)) ++ [function]
      {:ok, Native, beam} = :compile.forms(forms, [:return_errors])
      :code.load_binary(Native, file, beam)
    end
  end

  describe "plan" do
    test "gives the shapes that run gives, and its errors, for terms of any kind" do
      sizes = %{
        q: {2, 5, 4, 3},
        k: {2, 7, 2, 3},
        v: {2, 7, 2, 3},
        sink: {2, 4},
        o: {2, 5, 4, 3},
        lse: {2, 4, 5}
      }

      shapes = for {name, shape} <- sizes, into: %{}, do: {name, {{:f, 32}, shape}}

      tensors =
        for {name, {type, shape}} <- shapes,
            into: %{},
            do: {name, {<<0::size(32 * Tuple.product(shape))>>, type, shape}}

      for {pass, shapes, tensors} <- [
            {:forward, Map.drop(shapes, [:o, :lse]), Map.drop(tensors, [:o, :lse])},
            {:backward, Map.put(shapes, :dout, shapes.q), Map.put(tensors, :dout, tensors.q)}
          ] do
        {:ok, outputs} = Native.run(pass, tensors, [], {:cpu, 0})
        written = for {name, {_data, type, shape}} <- outputs, into: %{}, do: {name, {type, shape}}
        assert {:ok, ^written, _workspace_bytes, "cpu/" <> _} = Native.plan(pass, shapes, [], {:cpu, 0})

        for {name, {{:f, 32}, shape}} <- shapes, name != :q do
          assert {:error, {:invalid_argument, argument, _, _, _}} =
                   Native.plan(
                     pass,
                     %{shapes | name => {{:f, 32}, Tuple.insert_at(shape, 0, 1)}},
                     [],
                     {:cpu, 0}
                   )

          assert argument == Atom.to_string(name)
        end
      end

      for {pass, shapes, options, device} <- [
            {:sideways, shapes, [], {:cpu, 0}},
            {:forward, [], [], {:cpu, 0}},
            {:forward, %{shapes | q: 1}, [], {:cpu, 0}},
            {:forward, %{shapes | q: {{:s, 8}, {1}}}, [], {:cpu, 0}},
            {:forward, %{shapes | q: {{:f, 32}, [1]}}, [], {:cpu, 0}},
            {:forward, Map.delete(shapes, :k), [], {:cpu, 0}},
            {:forward, shapes, [softcap: -1], {:cpu, 0}},
            {:forward, shapes, [], :cpu},
            {:forward, shapes, [], {:cpu, 1}}
          ],
          do: assert({:error, {_, _, _, _, _}} = Native.plan(pass, shapes, options, device))
    end
  end

  test "a library that is built late is loaded late, and its devices are found then" do
    path = Path.join(System.tmp_dir!(), "native_test_#{System.unique_integer([:positive])}_#{System.pid()}")
    on_exit(fn -> File.rm_rf!(path) end)
    File.mkdir_p!("#{path}/flash_attention")
    [ebin, priv] = for name <- ["ebin", "priv"], do: Path.join(Mix.Project.app_path(), name)
    File.cp_r!(ebin, "#{path}/flash_attention/ebin")

    script = """
    one = FlashAttention.Tensor.new(<<1.0::float-32-native>>, :f32, {1, 1, 1, 1})
    auto = fn -> :persistent_term.get({FlashAttention.Options, :auto}, :unknown) end
    {:error, %{reason: :not_loaded}} = FlashAttention.forward(one, one, one)
    :unknown = auto.()
    File.ln_s!(#{inspect(priv)}, "#{path}/flash_attention/priv")
    {:ok, ^one} = FlashAttention.forward(one, one, one)
    true = {:cpu, 0} in auto.()
    """

    args = ["-pa", "#{path}/flash_attention/ebin", "-e", script]
    assert System.cmd("elixir", args, stderr_to_stdout: true) == {"", 0}
  end

  # What has the name of EXLA's library, and an XLA_FFI_GetApi: of an XLA that nothing can be registered with.
  @xla "const void *XLA_FFI_GetApi(void) { static const long api[99]; return api; }"

  test "handlers are registered with the XLA that is loaded under a library's name" do
    path = Path.join(System.tmp_dir!(), "native_test_#{System.unique_integer([:positive])}_#{System.pid()}")
    File.mkdir_p!(path)
    on_exit(fn -> File.rm_rf!(path) end)
    File.write!("#{path}/xla.c", @xla)
    library = "#{path}/libxla_extension.so"
    options = ["-shared", "-fPIC", "-Wl,-soname,libxla_extension.so", "-o", library, "#{path}/xla.c"]
    assert {"", 0} = System.cmd(System.get_env("CC", "cc"), options, stderr_to_stdout: true)

    script =
      ~s|{:error, error} = FlashAttention.Native.register_xla("libxla_extension.so"); IO.write(elem(error, 4))|

    args = ["-pa", Path.join(Mix.Project.app_path(), "ebin"), "-e", script]
    preload = Enum.join(["#{System.get_env("LD_PRELOAD")}", library], " ")
    assert {message, 0} = System.cmd("elixir", args, env: [{"LD_PRELOAD", preload}])
    assert message =~ ~r/^api: expected (XLA's FFI \d+\.\d+, got 0\.0|a build with)/

    for name <- [:name, "", String.duplicate("x", 2000), "libc.so.6", "no\0thing"],
        do: assert({:error, {_, "library", _, _, _}} = Native.register_xla(name))
  end
end
