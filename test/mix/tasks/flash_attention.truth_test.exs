defmodule Mix.Tasks.FlashAttention.TruthTest do
  use ExUnit.Case, async: true

  import ExUnit.CaptureIO

  @moduletag :cxx
  @moduletag :tmp_dir

  @kernels """
  #include <cuda_runtime.h>
  template <typename T, int N>
  __global__ void scale(const T *x, float *y, float factor) {
    extern __shared__ __align__(16) unsigned char bytes[];
    float *tile = reinterpret_cast<float *>(bytes);
    tile[threadIdx.x] = x[threadIdx.x] * factor;
    __syncthreads();
    y[threadIdx.x] = tile[N - 1 - threadIdx.x];
  }
  __global__ void scale_backward(const float *dy, float *dx, float factor, int n) {
    dx[threadIdx.x] = dy[n - 1 - threadIdx.x] * factor;
  }
  """

  @arguments ["--kernel", "scale<float, 4>", "--out", "y", "--block", "4", "--shared", "16"]

  # The task on these kernels; its exit status and everything that it and its programs print.
  defp run(directory, kernels, cases, arguments) do
    source = Path.join(directory, "kernels.cu")
    case_file = Path.join(directory, "cases.exs")
    File.write!(source, kernels)
    File.write!(case_file, inspect(cases, limit: :infinity))
    run([source, "--case", case_file | arguments])
  end

  defp run(arguments) do
    with_io(fn ->
      try do
        Mix.Tasks.FlashAttention.Truth.run(arguments)
        0
      catch
        :exit, {:shutdown, status} -> status
      end
    end)
  end

  defp cases(factor) do
    [
      [
        name: "four",
        arrays: [x: [1, 2, 3, 4], y: 4, dx: 4],
        args: [:x, :y, 2],
        backward: [kernel: "scale_backward", args: [:dy, :dx, factor, 4]],
        gradients: [x: :dx]
      ]
    ]
  end

  test "templates, shared memory of the launch's size and CUDA's headers; what is right agrees", %{
    tmp_dir: directory
  } do
    assert {0, output} = run(directory, @kernels, cases(2), ["--write", directory | @arguments])
    assert output =~ "gradient of x agrees"
    assert File.read!(Path.join(directory, "four/y.f64")) == numbers([8, 6, 4, 2])
  end

  test "a wrong backward fails, by name", %{tmp_dir: directory} do
    assert {1, output} = run(directory, @kernels, cases(3), @arguments)
    assert output =~ "wrong: gradient of x is wrong"
  end

  test "gradients of files, and a race", %{tmp_dir: directory} do
    kernels = String.replace(@kernels, "__syncthreads();", ";")
    File.write!(Path.join(directory, "dx.f64"), numbers([2, 2, 2, 2]))
    arrays = [x: [1, 2, 3, 4], y: 4, dout: [1, 1, 1, 1], given: "dx.f64"]
    c = [arrays: arrays, args: [:x, :y, 2], seeds: [y: :dout], gradients: [x: :given]]

    assert {0, output} = run(directory, @kernels, [c], @arguments)
    assert output =~ "gradient of x agrees"
    assert {1, output} = run(directory, kernels, [c], @arguments)
    assert output =~ ~r/race: bytes\[\d\] is/
  end

  @narrow """
  #include <cuda_bf16.h>
  #include <cuda_fp16.h>
  template <typename T>
  __global__ void square(const T *x, T *y) {
    const float a = x[threadIdx.x];
    y[threadIdx.x] = T(a * a);
  }
  template <typename T>
  __global__ void square_backward(const T *x, const T *dy, T *dx, float factor) {
    const float a = x[threadIdx.x], d = dy[threadIdx.x];
    dx[threadIdx.x] = T(factor * a * d);
  }
  """

  test "half and bf16: what is right agrees, and a wrong factor does not", %{tmp_dir: directory} do
    for type <- ["half", "__nv_bfloat16"], {factor, status} <- [{2, 0}, {1, 1}] do
      c = [
        arrays: [x: {:random, 8}, y: 8, dx: 8],
        args: [:x, :y],
        backward: [kernel: "square_backward<#{type}>", args: [:x, :dy, :dx, factor]],
        gradients: [x: :dx]
      ]

      arguments = ["--kernel", "square<#{type}>", "--out", "y", "--block", "8"]
      assert {^status, output} = run(directory, @narrow, [c], ["--unrounded-halves" | arguments])
      assert output =~ if(status == 0, do: "gradient of x agrees", else: "gradient of x is wrong")

      # The random dy is rounded as the kernel reads it, so dx alone is off.
      assert {^status, _output} = run(directory, @narrow, [c], ["--tolerance", "4.0e-3" | arguments])
      assert {1, _output} = run(directory, @narrow, [c], arguments)
    end
  end

  test "what would be compared with nothing is refused", %{tmp_dir: directory} do
    [c] = cases(2)
    misspelt = fn change -> run(directory, @kernels, [change.(c)], @arguments) end

    assert_raise Mix.Error, ~r/^--case: expected keys among .*gradients.*, got :gradient$/, fn ->
      misspelt.(&Keyword.put(&1, :gradient, &1[:gradients]))
    end

    assert_raise Mix.Error, "--case: expected keys among kernel, args, grid, block, shared, got :arg", fn ->
      misspelt.(&put_in(&1, [:backward, :arg], []))
    end

    assert_raise Mix.Error,
                 "--in: expected gradients of x in four, or --write, as nothing is compared with it",
                 fn ->
                   run(directory, @kernels, [Keyword.delete(c, :gradients)], ["--in", "x" | @arguments])
                 end

    arguments = ["--in", "x", "--write", directory | @arguments]
    assert {0, _output} = run(directory, @kernels, [Keyword.delete(c, :gradients)], arguments)
    assert File.exists?(Path.join(directory, "four/d_x.f64"))
  end

  test "what is wrong with a command is told in a line", %{tmp_dir: directory} do
    assert_raise Mix.Error, "expected a file of kernels", fn -> run([]) end
    assert_raise Mix.Error, "--kernel: expected a value", fn -> run(["x.cu"]) end

    assert_raise Mix.Error, ~r/--case: .* is not there/, fn ->
      run(["x.cu", "--case", "none.exs", "--kernel", "f", "--out", "y"])
    end

    assert_raise Mix.Error, ~r/does not compile.*error/s, fn ->
      run(directory, "int f(", cases(2), @arguments)
    end

    for x <- [nil, -4, {:random, -4}, {:zeros, 1.5}, [1, :nan, 3, 4]] do
      message = "x: expected numbers, a count, {:random, count}, {:zeros, count} or a file, got #{inspect(x)}"

      assert_raise Mix.Error, message, fn ->
        run(directory, @kernels, [[arrays: [x: x, y: 4], args: []]], @arguments)
      end
    end

    file = Path.join(directory, "file")
    File.write!(file, "")

    assert_raise Mix.Error, ~r/could not make directory .*: (not a directory|file already exists)/, fn ->
      run(directory, @kernels, cases(2), ["--write", file | @arguments])
    end
  end

  test "the example" do
    assert {0, output} =
             run(~w(examples/truth/layer_norm.cu --kernel layer_norm_forward --backward layer_norm_backward
                    --in x,gamma,beta --out y --case examples/truth/layer_norm.exs))

    assert length(String.split(output, "agrees")) == 7
  end

  test "the guide's program, and the one in C", %{tmp_dir: directory} do
    guide = File.read!("guides/checking_your_own_kernel.md")

    for {language, file} <- [
          {"cuda", "kernels.cu"},
          {"c\\+\\+", "program.cpp"},
          {"cpp", "library.cpp"},
          {"c", "in_c.c"}
        ] do
      [_, block] = Regex.run(~r/^```#{language}\n(.*?)^```/ms, guide)
      File.write!(Path.join(directory, file), block)
    end

    c = System.get_env("CC") || "cc"
    cxx = System.get_env("CXX") || "c++"
    compile(cxx, ["-std=c++17", "program.cpp", "-o", "program"], directory)
    assert System.cmd(Path.join(directory, "program"), [], cd: directory) == {"", 0}

    compile(cxx, ~w(-std=c++17 -shared -fPIC -fvisibility=hidden library.cpp -o libsoftplus.so), directory)
    compile(c, ~w(in_c.c -o in_c -L. -lsoftplus -lm -Wl,-rpath,.), directory)
    assert System.cmd(Path.join(directory, "in_c"), [], cd: directory) == {"", 0}
  end

  defp compile(compiler, arguments, directory) do
    {output, status} =
      System.cmd(compiler, ["-I", Path.expand("c_src") | arguments], cd: directory, stderr_to_stdout: true)

    assert status == 0, output
  end

  defp numbers(list), do: for(x <- list, into: <<>>, do: <<x::float-64-native>>)
end
