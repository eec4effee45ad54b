Code.require_file("dependencies.exs", __DIR__)

defmodule DependenciesTest do
  # Builds a tree of the project's layers in miniature, plants one violation at a time, and looks for exactly
  # that violation.
  use ExUnit.Case, async: true

  @clean %{
    "c_src/flash_attention.h" => "#define FA_API\nFA_API int fa_run(int x);\n",
    "c_src/core/core.h" => "int fa_core(int x);\n",
    "c_src/core/dispatch.c" =>
      ~s(#include <pthread.h>\n#include "../flash_attention.h"\n#include "core.h"\n) <>
        "int fa_backend(int); int fa_core(int x) { return x; }\n" <>
        "FA_API int fa_run(int x) { return fa_backend(x); }\n",
    "c_src/core/backends.c" => "int fa_cpu(int); int fa_backend(int x) { return fa_cpu(x); }\n",
    "c_src/host/host.h" => "int fa_stage(int x);\n",
    "c_src/host/host.c" =>
      ~s(#include <pthread.h>\n#include "../core/core.h"\n#include "host.h"\n) <>
        "int fa_stage(int x) { return fa_core(x); }\n",
    "c_src/cpu/cpu.c" => ~s(#include "../core/core.h"\nint fa_cpu(int x\) { return fa_core(x\); }\n),
    "cuda/kernel.cu" => "#include <cuda_runtime.h>\n",
    "c_src/nif/nif.c" => ~s(#include "../flash_attention.h"\nint load(void\) { return fa_run(1\); }\n),
    "lib/flash_attention.ex" =>
      "defmodule FlashAttention do\n  # Nx\n  def f, do: FlashAttention.Native.run()\nend\n",
    "lib/flash_attention/tensor/nx.ex" => "if Code.ensure_loaded?(Nx), do: Nx\n"
  }

  @exports "{ global: fa_run; local: *; };"

  test "a clean tree has no violations" do
    assert violations(%{}) == []
  end

  for {name, file, extra, expected} <- [
        {"core that includes a backend", "c_src/core/dispatch.c", ~s(#if 0\n#include "../cpu/cpu.c"\n#endif\n),
         "c_src/core/dispatch.c includes ../cpu/cpu.c: core may not see it"},
        {"core that includes what moves numbers", "c_src/core/dispatch.c", ~s(#include "../host/host.h"\n),
         "c_src/core/dispatch.c includes ../host/host.h: core may not see it"},
        {"a backend that includes what moves numbers", "c_src/cpu/cpu.c", ~s(#include "../host/host.h"\n),
         "c_src/cpu/cpu.c includes ../host/host.h: cpu may not see it"},
        {"core that calls what moves numbers", "c_src/core/dispatch.c",
         "int fa_stage(int); int fa_push(int x) { return fa_stage(x); }\n",
         "core/dispatch.o uses fa_stage of host"},
        {"a backend that includes another", "c_src/cpu/cpu.c",
         ~s(#if 0\n#  include "../../cuda/kernel.cu"\n#endif\n),
         "c_src/cpu/cpu.c includes ../../cuda/kernel.cu: cpu may not see it"},
        {"a NIF that includes core's private header", "c_src/nif/nif.c", ~s(#include "../core/core.h"\n),
         "c_src/nif/nif.c includes ../core/core.h: nif may not see it"},
        {"a public header that includes something", "c_src/flash_attention.h", ~s(#include "core/core.h"\n),
         "c_src/flash_attention.h includes core/core.h: api may not see it"},
        {"CUDA's header outside cuda/", "c_src/cpu/cpu.c", "#if 0\n#include <cuda_runtime.h>\n#endif\n",
         "c_src/cpu/cpu.c includes <cuda_runtime.h>: only cuda may"},
        {"Erlang's header in CUDA", "cuda/kernel.cu", "#include <erl_nif.h>\n",
         "cuda/kernel.cu includes <erl_nif.h>: only nif may"},
        {"XLA's header outside c_src/xla", "c_src/nif/nif.c", "#if 0\n#include <xla/ffi/api/c_api.h>\n#endif\n",
         "c_src/nif/nif.c includes <xla/ffi/api/c_api.h>: only xla may"},
        {"core that calls a backend behind the table", "c_src/core/dispatch.c",
         "int fa_cpu(int); int fa_peek(int x) { return fa_cpu(x); }\n", "core/dispatch.o uses fa_cpu of cpu"},
        {"a NIF that calls past the public header", "c_src/nif/nif.c",
         "int fa_core(int); int fa_peek(void) { return fa_core(1); }\n",
         "nif/nif.o uses fa_core, which the public header lacks"},
        {"a declaration that nothing exports", "c_src/flash_attention.h", "FA_API int fa_more(int x);\n",
         "the public header declares fa_more, which is not exported"},
        {"a library that needs the VM", "c_src/core/dispatch.c",
         "int enif_self(int); int fa_self(int x) { return enif_self(x); }\n",
         "the library needs enif_self to load"},
        {"Nx in the facade", "lib/flash_attention.ex", "Code.ensure_loaded?(Nx)\n",
         "lib/flash_attention.ex names Nx: only files like \"(^|[/_])(nx|defn|exla|axon|bumblebee|packages)(\\\\.ex$|/)|" <>
           "/rewriter(/attention|/expression)?\\\\.ex$\" may"},
        {"Mix outside its tasks", "lib/flash_attention.ex", "Mix.env()\n",
         "lib/flash_attention.ex names Mix: only files like \"^mix/\" may"}
      ] do
    test "finds #{name}" do
      assert violations(%{unquote(file) => @clean[unquote(file)] <> unquote(extra)}) == [unquote(expected)]
    end
  end

  test "finds a symbol exported without a declaration" do
    assert violations(%{}, "{ global: fa_run; fa_core; local: *; };") ==
             ["the library exports fa_core, which the public header lacks"]
  end

  # Writes the tree with some files replaced, compiles every C file of it, and checks it.
  defp violations(changes, exports \\ @exports) do
    root =
      Path.join(System.tmp_dir!(), "dependencies_test_#{System.unique_integer([:positive])}_#{System.pid()}")

    on_exit(fn -> File.rm_rf!(root) end)

    for {path, text} <- Map.merge(@clean, changes) do
      path = Path.join(root, path)
      File.mkdir_p!(Path.dirname(path))
      File.write!(path, text)
    end

    build = Path.join(root, "build")
    objects = for source <- Path.wildcard(Path.join(root, "c_src/*/*.c")), do: compile(source, build)
    map = Path.join(root, "exports")
    File.write!(map, exports)
    library = Path.join(root, "library.so")
    inside = Enum.reject(objects, &(&1 =~ "/nif/"))
    cc(["-shared", "-o", library, "-Wl,--version-script=#{map}" | inside])
    Dependencies.violations(root, build, library)
  end

  defp compile(source, build) do
    [name, layer | _] = source |> Path.split() |> Enum.reverse()
    object = Path.join([build, layer, Path.rootname(name) <> ".o"])
    File.mkdir_p!(Path.dirname(object))
    cc(["-fPIC", "-w", "-c", source, "-o", object])
    object
  end

  defp cc(arguments) do
    {text, status} = System.cmd(System.get_env("CC", "cc"), arguments, stderr_to_stdout: true)
    assert status == 0, text
  end
end
