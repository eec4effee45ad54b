defmodule Mix.FlashAttention do
  @moduledoc false

  # What the tasks on the command line share. Whatever is wrong ends the task with one line and exit status 1.

  def parse!(args, switches, max_arguments) do
    case OptionParser.parse(args, strict: switches) do
      {opts, arguments, []} when length(arguments) <= max_arguments ->
        {opts, arguments}

      {_opts, arguments, []} ->
        Mix.raise("expected at most #{max_arguments} arguments, got: #{Enum.join(arguments, " ")}")

      {_opts, _arguments, [{name, nil} | _]} ->
        if known?(name, switches),
          do: Mix.raise("#{name}: expected a value"),
          else: Mix.raise("#{name}: expected one of #{names(switches)}")

      {_opts, _arguments, [{name, value} | _]} ->
        Mix.raise("#{name}: expected #{expected(name, switches)}, got #{value}")
    end
  end

  defp known?(name, switches), do: Enum.any?(switches, fn {key, _type} -> switch(key) == name end)

  defp names(switches), do: Enum.map_join(switches, ", ", fn {key, _type} -> switch(key) end)

  defp expected(name, switches) do
    case Enum.find(switches, fn {key, _type} -> switch(key) == name end) do
      {_key, :integer} -> "a whole number"
      {_key, :float} -> "a number"
      _boolean_or_negated -> "no value"
    end
  end

  defp switch(key), do: "--" <> String.replace(Atom.to_string(key), "_", "-")

  def device!(nil), do: :auto
  def device!(name) when name in ["auto", "cpu", "cuda"], do: String.to_existing_atom(name)

  def device!("cuda:" <> index = name) do
    case Integer.parse(index) do
      {index, ""} when index >= 0 -> {:cuda, index}
      _no_index -> unknown_device!(name)
    end
  end

  def device!(name), do: unknown_device!(name)

  defp unknown_device!(name), do: Mix.raise("--device: expected auto, cpu, cuda or cuda:INDEX, got #{name}")

  # What the library refuses, and numbers that are no longer finite, are told without a stack trace.
  def run!(fun) do
    fun.()
  rescue
    error in [FlashAttention.Error, ArithmeticError, File.Error] -> Mix.raise(Exception.message(error))
  end
end
