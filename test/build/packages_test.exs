defmodule PackagesTest do
  # Packages that another project has beside this one, without Hex: they are found when this one is compiled, and where
  # they came later, errors say what to run. A package called nx stands in for Nx.
  use ExUnit.Case, async: true

  @nx """
  defmodule Nx.Tensor do
    defstruct [:data, :type, :shape, names: [nil, nil, nil, nil], vectorized_axes: []]
  end

  defmodule Nx do
    def to_binary(tensor), do: tensor.data
    def from_binary(data, type), do: %Nx.Tensor{data: data, type: type}
    def reshape(tensor, shape, _opts), do: %{tensor | shape: shape}
  end

  defmodule Nx.Defn do
    defmacro defn(call, _body), do: {:def, [], [Macro.prewalk(call, &underscore/1), [do: nil]]}
    defp underscore({name, meta, context}) when is_atom(name) and is_atom(context), do: {:"_\#{name}", meta, context}
    defp underscore(other), do: other
  end
  """

  setup do
    path = Path.join(System.tmp_dir!(), "packages_test_#{System.unique_integer([:positive])}_#{System.pid()}")
    on_exit(fn -> File.rm_rf!(path) end)

    # flash_attention comes first, as in the alphabet.
    project(
      "#{path}/user",
      :user,
      "[{:flash_attention, path: #{inspect(File.cwd!())}}, {:nx, path: \"../nx\"}]"
    )

    project("#{path}/nx", :nx, "[]")
    File.write!("#{path}/nx/lib/nx.ex", @nx)

    File.write!("#{path}/user/lib/user.ex", """
    defmodule User do
      def run do
        one = %Nx.Tensor{data: <<1.0::float-32-native>>, type: {:f, 32}, shape: {1, 1, 1, 1}}
        IO.inspect(FlashAttention.forward(one, one, one))
        IO.inspect(catch_error(&FlashAttention.attention(one, one, one, &1)))
        IO.inspect(catch_error(&FlashAttention.Training.Nx.model(one, one, &1)))
      end

      defp catch_error(fun) do
        fun.([])
      rescue
        error -> Exception.message(error)
      end
    end
    """)

    {:ok, path: path}
  end

  defp project(path, app, deps) do
    File.mkdir_p!("#{path}/lib")

    File.write!("#{path}/mix.exs", """
    defmodule #{Macro.camelize("#{app}")}.MixProject do
      use Mix.Project
      def project, do: [app: :#{app}, version: "0.1.0", deps: #{deps}]
    end
    """)
  end

  test "are found in the build of the project that depends on this one", %{path: path} do
    # Compiled where there is no Nx yet, everything says so once there is.
    mix(path, "deps.compile flash_attention")
    mix(path, "deps.compile nx")
    File.cp!("#{path}/user/lib/user.ex", "#{path}/user.exs")
    first = mix(path, "run --no-compile --no-deps-check --no-start -r ../user.exs -e 'User.run()'")

    what_to_run =
      "flash_attention was compiled without Nx, which is there now: run mix deps.compile flash_attention --force"

    assert first =~ ~r/q: expected a tensor .* \(#{what_to_run}\)/
    assert first =~ "FlashAttention.attention needs Nx 0.12 or later: #{what_to_run}"
    assert first =~ "FlashAttention.Training.Nx needs Nx: #{what_to_run}"

    # Mix looks at path dependencies each time; of others it is told.
    second = mix(path, "run -e 'User.run()'")
    assert second =~ ~r/{:ok,\s+%Nx.Tensor{/
    refute second =~ "was compiled without Nx"
    # This Nx is none that attention/4 can stand on.
    assert second =~ "needs Nx 0.12 or later: it was not there when flash_attention was compiled"

    File.rm_rf!("#{path}/user/_build/dev/lib/flash_attention/.mix")
    assert mix(path, "deps.compile flash_attention --force") =~ "Generated flash_attention app"
    assert mix(path, "run -e 'User.run()'") =~ ~r/{:ok,\s+%Nx.Tensor{/
  end

  # A build of its own, without what this VM was started with.
  defp mix(path, arguments) do
    command = "cd #{path}/user && env -u MIX_ENV -u MIX_BUILD_PATH -u MAKEFLAGS -u ERL_LIBS mix #{arguments}"
    {output, status} = System.cmd("sh", ["-c", command], stderr_to_stdout: true)
    assert status == 0, "#{command}\n#{output}"
    output
  end
end
