# What stands in for EXLA's native half where EXLA's Elixir half is there alone: it writes the StableHLO that it is
# told to build, in MLIR's generic form, and cannot run any.
defmodule EXLA.NIF do
  @moduledoc false

  def start_log_sink(_pid), do: :ok
  def get_supported_platforms, do: %{host: 1, cuda: 1}
  def get_host_client, do: make_ref()
  def get_gpu_client(_memory_fraction, _preallocate), do: make_ref()
  def get_device_count(_client), do: 1
  def callback_server_pid_size, do: 8

  def mlir_new_thread_pool(_size), do: make_ref()
  def mlir_new_context(_pool), do: make_ref()

  # A module is its functions. A function is its head, a counter, and the blocks that are open: the innermost first,
  # each with its head and its operations, the last one first.
  def mlir_new_module(_context), do: start(%{functions: []})

  def mlir_create_function(module, name, argument_types, result_types, public?) do
    arguments = for {type, index} <- Enum.with_index(argument_types), do: {"%arg#{index}", type}
    visibility = if public?, do: "public", else: "private"
    results = Enum.join(result_types, ", ")
    head = "  func.func #{visibility} @#{name}(#{declare(arguments)}) -> (#{results}) {"
    function = start(%{arguments: arguments, count: 0, blocks: [{head, []}]})
    Agent.update(module, &%{&1 | functions: [function | &1.functions]})
    function
  end

  def mlir_get_function_arguments(function), do: Agent.get(function, & &1.arguments)

  def mlir_op(function, name, operands, result_types, attributes, regions) do
    Agent.get_and_update(function, fn %{count: count, blocks: [{head, operations} | blocks]} = state ->
      results = for {type, index} <- Enum.with_index(result_types), do: {"%#{count + index}", type}
      operation = operation(name, operands, results, attributes, regions)
      {results, %{state | count: count + length(results), blocks: [{head, [operation | operations]} | blocks]}}
    end)
  end

  def mlir_push_region(function, argument_types) do
    Agent.get_and_update(function, fn %{count: count, blocks: blocks} = state ->
      arguments = for {type, index} <- Enum.with_index(argument_types), do: {"%#{count + index}", type}
      region = start(%{text: nil})
      head = {region, "^block#{count}(#{declare(arguments)}):"}
      {{region, arguments}, %{state | count: count + length(arguments), blocks: [{head, []} | blocks]}}
    end)
  end

  def mlir_pop_region(function) do
    Agent.update(function, fn %{blocks: [{{region, head}, operations} | blocks]} = state ->
      Agent.update(region, fn _ -> %{text: Enum.join([head | Enum.reverse(operations)], "\n")} end)
      %{state | blocks: blocks}
    end)
  end

  def mlir_get_typespec({_name, "tensor<" <> type}) do
    {type, dims} = type |> String.trim_trailing(">") |> String.split("x") |> List.pop_at(-1)
    shape = dims |> Enum.map(&String.to_integer/1) |> List.to_tuple()

    [class, bits] =
      if type == "i1", do: ["pred", "8"], else: Regex.run(~r/^(\D+)(\d+)$/, type, capture: :all_but_first)

    class = %{"i" => :s, "ui" => :u, "f" => :f, "bf" => :bf, "pred" => :pred}[class]
    EXLA.Typespec.tensor({class, String.to_integer(bits)}, shape)
  end

  def mlir_module_to_string(module) do
    functions =
      for function <- module |> Agent.get(& &1.functions) |> Enum.reverse() do
        %{blocks: [{head, operations}]} = Agent.get(function, & &1)
        Enum.join([head | Enum.reverse(operations)] ++ ["  }\n"], "\n")
      end

    "module {\n#{functions}}\n"
  end

  defp operation(name, operands, results, attributes, regions) do
    names = Enum.map_join(results, ", ", &elem(&1, 0))
    attributes = Enum.map_join(attributes, ", ", fn {key, text} -> "#{key} = #{text}" end)
    regions = Enum.map_join(regions, ", ", fn region -> "{\n#{Agent.get(region, & &1.text)}\n}" end)

    "    " <>
      if(results == [], do: "", else: "#{names} = ") <>
      ~s("#{name}"\(#{Enum.map_join(operands, ", ", &elem(&1, 0))}\)) <>
      if(regions == "", do: "", else: " (#{regions})") <>
      if(attributes == "", do: "", else: " {#{attributes}}") <>
      " : (#{types(operands)}) -> (#{types(results)})"
  end

  defp declare(arguments), do: Enum.map_join(arguments, ", ", fn {name, type} -> "#{name}: #{type}" end)
  defp types(values), do: Enum.map_join(values, ", ", &elem(&1, 1))

  defp start(state) do
    {:ok, agent} = Agent.start(fn -> state end)
    agent
  end
end
