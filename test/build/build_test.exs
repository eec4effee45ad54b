defmodule BuildTest do
  # The build as its users meet it: a C program with the installed library, another Mix project.
  use ExUnit.Case, async: true

  @moduletag timeout: 300_000

  setup do
    path = Path.join(System.tmp_dir!(), "build_test_#{System.unique_integer([:positive])}_#{System.pid()}")
    File.mkdir_p!(path)
    on_exit(fn -> File.rm_rf!(path) end)
    {:ok, path: path}
  end

  test "the C program of the README runs with what `make install` puts there", %{path: path} do
    sh("make --silent install PREFIX=#{path} PRIV=#{path}/priv")
    [_, program] = Regex.run(~r/^```c\n(.*?)^```/ms, File.read!("README.md"))
    [_, printed] = Regex.run(~r/printf.*; \/\* (.*) \*\//, program)
    File.write!("#{path}/attention.c", program)

    [_, flags] = Regex.run(~r/^Cflags: (.*)$/m, File.read!("#{path}/lib/pkgconfig/flash_attention.pc"))
    [_, libraries] = Regex.run(~r/^Libs: (.*)$/m, File.read!("#{path}/lib/pkgconfig/flash_attention.pc"))
    cc = System.get_env("CC", "cc")
    sh("#{cc} -Wall -Wextra -Werror #{flags} #{path}/attention.c #{libraries} -o #{path}/attention")
    assert sh("LD_LIBRARY_PATH=#{path}/lib #{path}/attention") == printed <> "\n"
  end

  test "another Mix project can depend on it", %{path: path} do
    File.mkdir_p!("#{path}/lib")

    File.write!("#{path}/mix.exs", """
    defmodule Scratch.MixProject do
      use Mix.Project
      def project, do: [app: :scratch, version: "0.1.0", deps: [{:flash_attention, path: #{inspect(File.cwd!())}}]]
    end
    """)

    File.write!("#{path}/lib/scratch.ex", """
    defmodule Scratch do
      def run do
        one = FlashAttention.Tensor.new(<<1.0::float-32-native>>, :f32, {1, 1, 1, 1})
        IO.inspect(FlashAttention.forward!(one, one, one).data == one.data)
      end
    end
    """)

    # A build of its own, without what this VM was started with.
    output = sh("cd #{path} && env -u MIX_ENV -u MIX_BUILD_PATH -u MAKEFLAGS mix run -e 'Scratch.run()'")
    assert output =~ ~r/^true$/m
    refute output =~ "warning:"
  end

  test "header, Mix project and changelog are of one version" do
    [_, version] = Regex.run(~r/FA_VERSION "(.*)"/, File.read!("c_src/flash_attention.h"))
    assert Mix.Project.config()[:version] == version
    assert File.read!("CHANGELOG.md") =~ "## [#{version}]"
    assert FlashAttention.backend_info().version == version
  end

  defp sh(command) do
    {output, status} = System.cmd("sh", ["-c", command], stderr_to_stdout: true)
    assert status == 0, "#{command}\n#{output}"
    output
  end
end
