defmodule Mix.Tasks.Compile.FlashAttention do
  @shortdoc "Builds the C library and its NIF"
  @moduledoc """
  Builds the C library and its NIF by calling `make`, as the last step of `mix compile`.

  What is built lands in the `priv` folder below `MIX_APP_PATH`, which is set to the application's build
  path. The environment variable `MAKE` names another `make`; every variable that the Makefile describes can
  be set in the environment too.
  """
  use Mix.Task.Compiler

  @impl true
  def run(_args) do
    make = System.get_env("MAKE", "make")
    args = ["--silent", "--jobs=#{System.schedulers_online()}", "native"]

    if !System.find_executable(make), do: Mix.raise("flash_attention: #{make} is not installed")

    case System.cmd(make, args, env: env(), into: IO.stream(), stderr_to_stdout: true) do
      {_output, 0} ->
        # priv did not exist when Mix linked the folders of the application.
        Mix.Project.build_structure()
        {:ok, []}

      {_output, exit_status} ->
        Mix.raise("flash_attention: #{make} failed with exit status #{exit_status}, see above")
    end
  end

  defp env do
    erts = "erts-#{:erlang.system_info(:version)}"

    [
      {"MIX_APP_PATH", Mix.Project.app_path()},
      {"ERTS_INCLUDE_DIR", Path.join([:code.root_dir(), erts, "include"])}
    ]
  end
end
