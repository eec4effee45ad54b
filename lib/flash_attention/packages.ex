defmodule FlashAttention.Packages do
  @moduledoc false
  # The packages that are used where they are there. Which of them there are is decided when this project is compiled;
  # here stands which there were, and what to say where one came later.

  alias FlashAttention.Error

  @modules [nx: Nx, axon: Axon, exla: EXLA, bumblebee: Bumblebee]
  @compiled for {name, module} <- @modules, Code.ensure_loaded?(module), do: name
  @command "mix deps.compile flash_attention --force"

  @doc "What to run, if the package is there and was not when this was compiled; else nil."
  @spec came_later(atom) :: String.t() | nil
  def came_later(name) do
    module = Keyword.fetch!(@modules, name)

    if not Enum.member?(@compiled, name) and Code.ensure_loaded?(module),
      do: "flash_attention was compiled without #{inspect(module)}, which is there now: run #{@command}"
  end

  @doc "That something needs packages, one of which was not there when this was compiled."
  @spec missing(String.t(), String.t(), [atom]) :: Error.t()
  def missing(what, needs, names) do
    why = Enum.find_value(names, &came_later/1) || "it was not there when flash_attention was compiled"
    Error.from_native({:unsupported, "", "", "", "#{what} needs #{needs}: #{why}"})
  end

  @doc "A module in the place of one that needs packages: whatever is called there raises, and says why."
  defmacro stand_in(module, needs, names) do
    quote do
      defmodule unquote(module) do
        @moduledoc false
        def unquote(:"$handle_undefined_function")(_function, _arguments),
          do: raise(FlashAttention.Packages.missing(inspect(__MODULE__), unquote(needs), unquote(names)))
      end
    end
  end
end
