defmodule BuildTest do
  # The build as its users meet it: in a folder with a space, from another Mix project, beside another build, in a VM that
  # runs, with the installed library in a C program.
  use ExUnit.Case, async: true

  # Without what this VM was started with.
  @bare "env -u MIX_ENV -u MIX_BUILD_PATH -u MAKEFLAGS"

  setup do
    path = Path.join(System.tmp_dir!(), "build test #{System.unique_integer([:positive])} #{System.pid()}")
    File.mkdir_p!(path)
    on_exit(fn -> File.rm_rf!(path) end)
    {:ok, path: path}
  end

  describe "make install" do
    test "puts what the README's C program needs below a prefix with spaces, for everyone to read", %{
      path: path
    } do
      sh("umask 077; make --silent install PREFIX='#{path}/a prefix' PRIV='#{path}/a priv'")
      prefix = "#{path}/a prefix"
      pc = File.read!("#{prefix}/lib/pkgconfig/flash_attention.pc")

      for file <- Path.wildcard("#{prefix}/**"), do: assert(readable_by_others?(file), file)
      assert readable_by_others?(prefix)

      [_, program] = Regex.run(~r/^```c\n(.*?)^```/ms, File.read!("README.md"))
      [_, printed] = Regex.run(~r/printf.*; \/\* (.*) \*\//, program)
      File.write!("#{path}/attention.c", program)

      [_, flags] = Regex.run(~r/^Cflags: (.*)$/m, pc)
      [_, libraries] = Regex.run(~r/^Libs: (.*)$/m, pc)
      cc = System.get_env("CC", "cc")
      sh("cd '#{path}' && #{cc} -Wall -Wextra -Werror #{flags} attention.c #{libraries} -o attention")
      assert sh("LD_LIBRARY_PATH='#{prefix}/lib' '#{path}/attention'") == printed <> "\n"
    end

    defp readable_by_others?(file) do
      %{mode: mode, type: type} = File.stat!(file)
      wanted = if type == :directory, do: 0o055, else: 0o044
      Bitwise.band(mode, wanted) == wanted
    end
  end

  test "a checkout and a project that depends on it, and trains its demo, can lie in folders with spaces", %{
    path: path
  } do
    checkout = copy_checkout("#{path}/a checkout")
    project = project("#{path}/a project", checkout)
    output = sh("cd '#{project}' && #{@bare} mix run -e 'Scratch.run()'")
    assert output =~ ~r/^true$/m
    refute output =~ "warning:"

    tiny = "--steps 2 --seqlen 16 --batch 1 --heads 4 --sample 0"
    output = sh("cd '#{project}' && #{@bare} mix flash_attention.train #{tiny}")
    assert output =~ ~r/^Saved in _build/m
    # Nothing was made beside them.
    assert Enum.sort(File.ls!(path)) == ["a checkout", "a project"]
  end

  # The tree without what was made from it, but for the objects, which are up to date there too.
  defp copy_checkout(checkout) do
    build = System.get_env("BUILD", "build")
    File.mkdir_p!("#{checkout}/#{build}")
    made = [build | ~w(_build cover deps doc priv tmp .git)]
    copied = for name <- File.ls!(".") -- made, do: "'#{name}'"
    sh("cp -Rp #{Enum.join(copied, " ")} '#{checkout}/'")

    sh(
      "cp -Rp #{build}/*.flags #{build}/core #{build}/host #{build}/cpu #{build}/nif #{build}/xla '#{checkout}/#{build}/'"
    )

    if File.dir?("#{build}/cuda"), do: sh("cp -Rp #{build}/cuda '#{checkout}/#{build}/'")
    checkout
  end

  defp project(path, dependency) do
    File.mkdir_p!("#{path}/lib")

    File.write!("#{path}/mix.exs", """
    defmodule Scratch.MixProject do
      use Mix.Project
      def project, do: [app: :scratch, version: "0.1.0", deps: [{:flash_attention, path: #{inspect(dependency)}}]]
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

    path
  end

  test "a BUILD with spaces is refused in a line, before anything is written or removed", %{path: path} do
    File.cp!("Makefile", "#{path}/Makefile")
    for folder <- ["a", "build", "a build", "priv"], do: File.mkdir_p!("#{path}/#{folder}/kept")
    before = Path.wildcard("#{path}/**")

    for goal <- ["native", "clean", "install", "all"] do
      assert {output, 2} =
               run("make -C '#{path}' --no-print-directory #{goal} BUILD='a build' PREFIX='#{path}/prefix'")

      assert output =~ ~r/\A\S*: \*\*\* BUILD: expected a path without spaces, got 'a build'\.  Stop\.\n\z/
      assert Path.wildcard("#{path}/**") == before
    end
  end

  test "make clean removes a PRIV with spaces, and not what its words name", %{path: path} do
    File.cp!("Makefile", "#{path}/Makefile")
    for folder <- ["it's a priv", "it's", "a", "priv", "build"], do: File.mkdir_p!("#{path}/#{folder}")
    sh(~s(make -C '#{path}' clean PRIV="it's a priv"))
    assert Enum.sort(File.ls!(path)) == ["Makefile", "a", "it's", "priv"]
  end

  for compiler <- ["g++", "clang++"], System.find_executable(compiler) do
    test "#{compiler} takes the header without a warning, in pedantic C++, too", %{path: path} do
      File.write!("#{path}/header.cpp", "#include <flash_attention.h>\n")
      pedantic = "-std=c++11 -Wall -Wextra -pedantic -Werror"
      sh("#{unquote(compiler)} #{pedantic} -Ic_src -fsyntax-only '#{path}/header.cpp'")
    end
  end

  if System.find_executable("clang") do
    test "clang compiles it without a warning", %{path: path} do
      sh("cp -Rp Makefile c_src '#{path}/'")
      # What is compiled fast will do.
      File.write!("#{path}/cc", "#!/bin/sh\nexec clang \"$@\" -O0\n")
      File.chmod!("#{path}/cc", 0o755)
      sh("make --silent -C '#{path}' -j2 native CC=./cc FA_CUDA=0 WERROR=1 BUILD=build PRIV=priv")
    end
  end

  # A compiler that only says how it was called, and which release it is.
  @nvcc """
  #!/bin/sh
  if [ "$1" = --version ]; then echo "Cuda compilation tools, release ${RELEASE-13.0}, V13.0.88"; exit; fi
  echo "$0 $*" >> "$(dirname "$0")/calls"
  while [ "$1" != -o ]; do shift; done
  touch "$2"
  """

  test "other flags, architectures, compilers and homes of CUDA rebuild its objects", %{path: path} do
    File.cp!("Makefile", "#{path}/Makefile")
    File.mkdir_p!("#{path}/cuda")
    File.write!("#{path}/cuda/auxiliary.cu", "")

    for nvcc <- ["nvcc", "nvcc2"] do
      File.write!("#{path}/#{nvcc}", @nvcc)
      File.chmod!("#{path}/#{nvcc}", 0o755)
    end

    calls = fn variables ->
      sh(
        "cd '#{path}' && make build/cuda/auxiliary.o BUILD=build FA_LOCKED=1 FA_CUDA=1 CUDA_HOME=/one NVCC=./nvcc #{variables}"
      )

      "#{path}/calls" |> File.read!() |> String.split("\n", trim: true) |> length()
    end

    assert calls.("") == 1
    assert calls.("") == 1

    [
      "NVCCFLAGS=-lineinfo",
      "NVCCFLAGS='-lineinfo -DTWO'",
      "CUDA_ARCHS=-arch=sm_90",
      "NVCC=./nvcc2",
      "CUDA_HOME='/another one'"
    ]
    |> Enum.with_index(2)
    |> Enum.each(fn {variables, count} ->
      assert calls.(variables) == count, variables
      assert calls.(variables) == count, variables
    end)
  end

  test "GPUs' code is compressed where every driver of nvcc's release can read it", %{path: path} do
    File.cp!("Makefile", "#{path}/Makefile")
    File.write!("#{path}/nvcc", @nvcc)
    File.chmod!("#{path}/nvcc", 0o755)

    for {release, compresses?} <- [
          {"11.8", false},
          {"12.9", false},
          {"13.0", true},
          {"20.1", true},
          {"", false}
        ] do
      build = "build-#{release}"
      File.mkdir_p!("#{path}/cuda")
      File.write!("#{path}/cuda/auxiliary.cu", "")

      sh(
        "cd '#{path}' && RELEASE=#{release} make #{build}/cuda/auxiliary.o BUILD=#{build} FA_LOCKED=1 FA_CUDA=1 " <>
          "CUDA_HOME=/one NVCC=./nvcc"
      )

      call = "#{path}/calls" |> File.read!() |> String.split("\n", trim: true) |> List.last()
      assert call =~ "cuda/auxiliary.cu"
      assert call =~ "--compress-mode=size" == compresses?, release
    end
  end

  # A Mix whose packages are missing.
  @mix """
  #!/bin/sh
  echo "mix $*" >> "$(dirname "$0")/calls"
  [ "$1" != deps.loadpaths ]
  """

  test "make fetches packages only where it may, and says so first", %{path: path} do
    File.write!("#{path}/mix", @mix)
    File.chmod!("#{path}/mix", 0o755)

    make = fn variables ->
      run("env -u FA_INSTALL PATH=\"#{path}:$PATH\" make elixir PRIV='#{path}/priv' #{variables} 2>&1")
    end

    calls = fn -> File.read!("#{path}/calls") end

    assert {output, 2} = make.("FA_INSTALL=0")
    assert output =~ "make elixir needs the packages that mix.exs names. To fetch them: mix deps.get\n"
    refute calls.() =~ "deps.get"

    assert {output, 0} = make.("")

    assert output =~
             "make elixir fetches the packages that mix.exs names, with mix deps.get (FA_INSTALL=0 to forbid that)"

    assert calls.() =~ ~r/deps.get\nmix compile/
  end

  if System.find_executable("flock") do
    test "two builds of one tree take turns", %{path: path} do
      lock = Path.join(System.get_env("BUILD", "build"), "lock")
      sh("make --silent native PRIV='#{path}/priv'")
      holder = open("exec flock #{lock} sh -c 'echo held; read line'")
      assert_receive {^holder, {:data, "held\n"}}

      builder = open("make --silent native PRIV='#{path}/priv'")
      assert_receive {^builder, said}
      assert {:data, "  waiting for another make that builds in" <> _} = said

      Port.command(holder, "\n")
      assert_receive {^holder, {:exit_status, 0}}
      assert_receive {^builder, {:exit_status, 0}}
    end

    defp open(command),
      do:
        Port.open({:spawn_executable, "/bin/sh"}, [
          :binary,
          :exit_status,
          :stderr_to_stdout,
          args: ["-c", command]
        ])
  end

  # What a later version may change: the layout of the structs, and a name in the library's tables.
  @later [
    {"c_src/flash_attention.h", ~s(FA_VERSION "), ~s(FA_VERSION "1)},
    {"c_src/flash_attention.h", "typedef struct fa_problem {\n",
     "typedef struct fa_problem {\n  int64_t added[5];\n"},
    {"c_src/core/options.c", ~s({"softcap", ), ~s({"softcup", )}
  ]

  test "a running VM that is given a later version runs all of it, library and NIF", %{path: path} do
    version = FlashAttention.backend_info().version
    [old, new] = for name <- ["old", "new"], do: "#{path}/#{name}/flash_attention"
    File.mkdir_p!(new)
    sh("make --silent native PRIV='#{old}/priv'")
    sh("cp -Rp Makefile c_src '#{path}/'")
    for {file, from, to} <- @later, do: change("#{path}/#{file}", from, to)
    # What is compiled fast will do.
    File.write!("#{path}/cc", "#!/bin/sh\nexec #{System.get_env("CC", "cc")} \"$@\" -O0\n")
    File.chmod!("#{path}/cc", 0o755)
    sh("make --silent -C '#{path}' -j2 native CC=./cc FA_CUDA=0 PRIV='#{new}/priv'")
    for app <- [old, new], do: File.cp_r!(Path.join(Mix.Project.app_path(), "ebin"), "#{app}/ebin")

    script = """
    alias FlashAttention.Native
    two = {<<1.0::float-32-native, 3.0::float-32-native>>, {:f, 32}, {1, 2, 1, 1}}
    run = fn -> apply(Native, :run, [:forward, %{q: two, k: two, v: two}, [window_right: 0], {:cpu, 0}]) end
    softcap = fn -> Enum.find(~w(softcap softcup)a, &(&1 in Enum.map(Native.options(), fn option -> option.name end))) end
    {:ok, %{o: {_, _, {1, 2, 1, 1}}} = expected} = run.()
    before = {Native.backend_info().version, softcap.()}
    true = :code.replace_path(:flash_attention, ~c"\#{new}/ebin")
    {:module, Native} = :code.load_file(Native)
    {:ok, ^expected} = run.()
    IO.inspect({before, {Native.backend_info().version, softcap.()}})
    true = :code.soft_purge(Native)
    {:ok, ^expected} = run.()
    """

    File.write!("#{path}/upgrade.exs", String.replace(script, "\#{new}", new))
    output = sh("elixir -pa '#{old}/ebin' '#{path}/upgrade.exs'")
    assert output == inspect({{version, :softcap}, {"1" <> version, :softcup}}) <> "\n"
  end

  defp change(file, from, to) do
    text = File.read!(file)
    assert length(String.split(text, from)) > 1, "#{file} has no #{from}"
    File.write!(file, String.replace(text, from, to))
  end

  test "header, Mix project and changelog are of one version" do
    [_, version] = Regex.run(~r/FA_VERSION "(.*)"/, File.read!("c_src/flash_attention.h"))
    assert Mix.Project.config()[:version] == version
    assert File.read!("CHANGELOG.md") =~ "## [#{version}]"
    assert FlashAttention.backend_info().version == version
  end

  defp sh(command) do
    {output, status} = run(command)
    assert status == 0, "#{command}\n#{output}"
    output
  end

  defp run(command), do: System.cmd("sh", ["-c", command], stderr_to_stdout: true)
end
