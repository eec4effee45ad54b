defmodule FlashAttention.OptionsTest do
  use ExUnit.Case, async: true

  alias FlashAttention.{Native, Options}

  doctest Options

  test "the schema is that of the C library" do
    {:ok, %{native: defaults}} = Options.parse(causal: false)
    table = Native.options()

    assert Enum.map(table, & &1.name) == Keyword.keys(defaults)

    for row <- table do
      default = defaults[row.name]
      if row.kind == :choice, do: assert(default == Enum.at(row.choices, trunc(row.default)))
      if row.kind != :choice, do: assert(default == row.default)
    end
  end

  test "the schema takes the choices that the C library has, and no others" do
    for %{kind: :choice, name: name, choices: choices} <- Native.options() do
      for choice <- choices do
        assert {:ok, options} = Options.parse([{name, choice}])
        assert options.native[name] == choice
      end

      assert {:error, _} = Options.parse([{name, :no_such_choice}])
    end
  end

  test "kinds of devices are those of the C library" do
    %{devices: devices, missing: missing} = Native.backend_info()
    kinds = Enum.uniq(Enum.map(devices, & &1.kind) ++ Map.keys(missing)) -- [:reference]

    for kind <- kinds do
      assert {:ok, %{devices: [{^kind, 0}]}} = Options.parse(device: kind)
      assert {:ok, %{devices: [{^kind, 3}]}} = Options.parse(device: {kind, 3})
      assert Options.docs() =~ "`#{inspect(kind)}`"
    end

    assert {:error, error} = Options.parse(device: :none_of_them)

    assert error.expected ==
             Enum.map_join([:auto, :all | Enum.sort(kinds)], ", ", &inspect/1) <>
               ", {kind, index} or a list of those of one kind"
  end

  test "the typespec has every option, with the choices that it takes" do
    {:ok, types} = Code.Typespec.fetch_types(FlashAttention)

    [spec] =
      for {:type, {:option, _, []} = type} <- types,
          do: type |> Code.Typespec.type_to_quoted() |> Macro.to_string()

    for key <- Options.keys(), do: assert(spec =~ ~r/{:#{key},\s/)
    assert spec =~ ":highest | :high | :default"
    assert spec =~ "{:cuda, non_neg_integer()}"
  end

  # Only where EXLA is are they written anew: FLASH_ATTENTION_WRITE_MLIR=1 mix test test/flash_attention/exla_test.exs.
  test "the texts of test-xla hold every option" do
    {:ok, %{native: options}} = Options.parse([])

    for text <- ~w(exla exla_rewritten exla_while),
        [call] <- Regex.scan(~r/{operands = [^}]*}/, File.read!("test/xla/#{text}.mlir")) do
      # A length without a bound is left out.
      missing = for {name, value} <- options, value != :infinity, not (call =~ " #{name} = "), do: name
      assert {text, missing -- [:window_right]} == {text, []}
    end
  end

  test "of repeated options the first one counts, as in Keyword" do
    assert {:ok, %{native: native}} = Options.parse(scale: 1, scale: 2)
    assert native[:scale] == 1
  end

  test "the documentation has a row for every option" do
    {:docs_v1, _, _, _, _, _, docs} = Code.fetch_docs(FlashAttention)
    {_, _, _, %{"en" => forward}, _} = List.keyfind(docs, {:function, :forward, 4}, 0)
    assert forward =~ Options.docs()

    for key <- ~w(causal scale window softcap sink device precision deterministic) do
      assert Options.docs() =~ "| `:#{key}` |"
    end
  end

  test "several devices are for calls that leave nothing on them" do
    two = [{:cuda, 0}, {:cuda, 1}]
    assert {:ok, %{devices: [{:cuda, 0}], several: ^two}} = Options.parse(device: two)
    assert {:ok, %{devices: [{:cuda, 1}], several: nil}} = Options.parse(device: [{:cuda, 1}])
    assert {:ok, %{devices: [_first | _]}} = Options.parse(device: :all)

    for opts <- [[device: two, keep: :device], [device: two, results: :device]] do
      assert {:error, error} = Options.parse(opts)
      assert error.argument == :device and error.expected == "one device where something stays on it"
    end

    assert {:error, %{expected: "one device"}} = Options.parse([device: two], [:device])

    for wrong <- [[], [:cuda], [{:cuda, 0}, {:cuda, 0}], [{:cuda, 0}, {:cpu, 0}], [{:cuda, 0} | {:cuda, 1}]] do
      assert {:error, %{argument: :device}} = Options.parse(device: wrong)
    end
  end
end
