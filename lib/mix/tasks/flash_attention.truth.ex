defmodule Mix.Tasks.FlashAttention.Truth do
  @shortdoc "Holds a backward kernel against the derivative of its forward kernel"

  @moduledoc """
  Runs kernels written in CUDA C++ on the CPU, with numbers that remember how they came about: the exact gradient of
  the forward *as it is written* is held against what the backward computes, and races, accesses out of bounds,
  barriers that not every thread reaches and reads of what nobody wrote are named. Needs a C++ compiler, no GPU.

      mix flash_attention.truth kernels.cu --kernel forward --in q,k,v --out o --grid 4 --block 64 --case cases.exs

  The file is compiled as it stands; `c_src/flash_attention_truth.h` says what it may contain.

  ## Options

  The file, `--kernel`, `--out` and `--case` are required.

    * `--kernel NAME` - the forward kernel, or a plain function; with its template arguments: `"forward<float, 64>"`
    * `--backward NAME` - the backward kernel, where the cases do not name it
    * `--in NAMES` - the arrays whose gradients are wanted, default those that a case has gradients of; one of which it
      has none is for `--write`
    * `--out NAMES` - the arrays that the loss depends on
    * `--grid X,Y,Z`, `--block X,Y,Z`, `--shared BYTES` - of launches for which a case says nothing else
    * `--case FILE` - the cases, in Elixir
    * `--tolerance T` - how far two arrays may be apart, relative to the largest number, default 1.0e-6
    * `--write DIRECTORY` - writes the outputs and gradients there, as DIRECTORY/CASE/q.f64 and d_q.f64
    * `--seed N` - of random numbers, default 0
    * `--f32` - rounds every value to f32
    * `--early-return` - threads may leave before the others' barriers
    * `--unrounded-halves` - rounds no `half` and `__nv_bfloat16`: a gradient that a kernel stores in them is then as
      close to the exact one as any, where it would be as far as they round

  The compiler is `$CXX`, or `c++`. The exit status is 0 where nothing was found and everything agrees.

  ## Cases

  The file gives a list of keyword lists:

      [
        [
          name: "two rows",
          arrays: [
            x: [1.0, 2.0, -1.0],            # numbers
            gamma: {:random, 3},            # so many, normally distributed
            bias: "bias.f32",               # of a file: .f32, .f64 or .txt
            y: 3,                           # so many that nobody has written
            dgamma: {:zeros, 3}
          ],
          args: [:x, :gamma, :bias, :y, 3, 1.0e-5],
          grid: 1, block: {32, 2}, shared: 0,
          backward: [kernel: "backward", args: [:x, :gamma, :dy, :dgamma, 3], block: 32],
          gradients: [gamma: :dgamma]       # the gradient of gamma must be what is in dgamma
        ]
      ]

  `args` are the kernel's arguments: names of arrays, and numbers. `d(loss)/d(y)` is in the array `dy`, random where
  the case has no such array; another one is named with `seeds: [y: :dout]`. `backward` may be a list of launches, and
  may be left out: then the gradients are those of arrays that come from files.
  """

  use Mix.Task

  alias FlashAttention.Check.Values

  @switches [
    kernel: :string,
    backward: :string,
    in: :string,
    out: :string,
    grid: :string,
    block: :string,
    shared: :integer,
    case: :string,
    tolerance: :float,
    write: :string,
    seed: :integer,
    f32: :boolean,
    early_return: :boolean,
    unrounded_halves: :boolean
  ]

  @header Path.expand("../../../c_src/flash_attention_truth.h", __DIR__)

  # The header stands for these, which a machine without CUDA lacks.
  @cuda_headers ~w(cuda.h cuda_runtime.h cuda_runtime_api.h cuda_fp16.h cuda_bf16.h device_launch_parameters.h)

  @impl true
  def run(args) do
    Mix.Task.run("compile")

    case Mix.FlashAttention.parse!(args, @switches, 1) do
      {opts, [source]} -> Mix.FlashAttention.run!(fn -> check(Path.expand(source), opts) end)
      {_opts, []} -> Mix.raise("expected a file of kernels")
    end
  end

  defp check(source, opts) do
    for option <- [:kernel, :out, :case], !opts[option], do: Mix.raise("--#{option}: expected a value")
    cases = read_cases(opts[:case])

    directory =
      Path.join(
        System.tmp_dir!(),
        "flash_attention_truth_#{System.unique_integer([:positive])}_#{System.pid()}"
      )

    File.mkdir_p!(directory)

    try do
      program = compile!(source, kernels(cases, opts), directory)
      statuses = for {c, i} <- Enum.with_index(cases), do: run_case(program, c, i, directory, opts)
      if Enum.any?(statuses, &(&1 != 0)), do: exit({:shutdown, 1})
    after
      File.rm_rf!(directory)
    end
  end

  defp read_cases(path) do
    if !File.regular?(path), do: Mix.raise("--case: #{path} is not there")
    {cases, _bindings} = Code.eval_file(path)

    if not (is_list(cases) and cases != [] and Enum.all?(cases, &Keyword.keyword?/1)),
      do: Mix.raise("--case: expected #{path} to give a list of keyword lists")

    Enum.each(cases, &check_keys!/1)
    for c <- cases, {name, what} <- c[:arrays] || [], do: check_array!(name, what)
    cases
  end

  @launch_keys [:kernel, :args, :grid, :block, :shared]
  @case_keys [:name, :arrays, :backward, :gradients, :seeds] ++ (@launch_keys -- [:kernel])

  # What is misspelt would be compared with nothing, and agree.
  defp check_keys!(c) do
    for {given, keys} <- [{c, @case_keys} | Enum.map(launches(c[:backward]), &{&1, @launch_keys})],
        key <- Keyword.keys(given) -- keys,
        do: Mix.raise("--case: expected keys among #{Enum.join(keys, ", ")}, got #{inspect(key)}")
  end

  defp check_array!(name, what) do
    if not array?(what),
      do:
        Mix.raise(
          "#{name}: expected numbers, a count, {:random, count}, {:zeros, count} or a file, got #{inspect(what)}"
        )
  end

  defp array?({how, count}) when how in [:random, :zeros], do: is_integer(count) and count >= 0
  defp array?(numbers) when is_list(numbers), do: Enum.all?(numbers, &is_number/1)
  defp array?(what), do: is_binary(what) or (is_integer(what) and what >= 0)

  # ---- the program -------------------------------------------------------------------------------------------

  defp kernels(cases, opts) do
    backward = for c <- cases, launch <- launches(c[:backward]), do: launch[:kernel] || opts[:backward]

    if nil in backward,
      do: Mix.raise("--backward: expected a kernel's name, since a case has arguments for one")

    Enum.uniq([opts[:kernel] | backward])
  end

  defp launches(nil), do: []
  defp launches(launch), do: if(Keyword.keyword?(launch), do: [launch], else: launch)

  defp compile!(source, kernels, directory) do
    if !File.regular?(source), do: Mix.raise("#{source} is not there")
    for header <- @cuda_headers, do: File.write!(Path.join(directory, header), "")
    main = Path.join(directory, "main.cpp")
    File.write!(main, main(source, kernels))
    program = Path.join(directory, "truth")

    compiler =
      System.find_executable(System.get_env("CXX") || "c++") || Mix.raise("no C++ compiler: c++ or $CXX")

    flags = ~w(-std=c++17 -O1 -fsanitize=bounds) ++ optional_flags(compiler, directory)

    places = ["-I", directory, "-I", Path.dirname(@header), "-I", Path.dirname(source)]

    case System.cmd(compiler, flags ++ places ++ ["-o", program, main], stderr_to_stdout: true) do
      {_warnings, 0} -> program
      {errors, _status} -> Mix.raise("#{source} does not compile:\n\n" <> errors)
    end
  end

  # GCC has the first from 12 on; Clang has the second, which keeps its own handler of indices out of bounds away.
  defp optional_flags(compiler, directory) do
    empty = Path.join(directory, "cuda.h")

    for flag <- ["-ftrivial-auto-var-init=pattern", "-fno-sanitize-link-runtime"],
        {_output, 0} <- [
          System.cmd(compiler, [flag, "-x", "c++", "-fsyntax-only", empty], stderr_to_stdout: true)
        ],
        do: flag
  end

  defp main(source, kernels) do
    """
    #define TRUTH_FLOAT
    #include "flash_attention_truth.h"
    #{source |> File.read!() |> dynamic_shared() |> Enum.join("\n")}
    #include "#{source}"
    TRUTH_MAIN(#{Enum.join(kernels, ", ")})
    """
  end

  # extern __shared__ __align__(16) unsigned char tile[];
  defp dynamic_shared(code) do
    ~r/extern\s+__shared__\s+(?:(?:__align__|alignas)\s*\(\s*\w+\s*\)\s*)*([\w:]+(?:\s+\w+)*?)\s+(\w+)\s*\[\s*\]/
    |> Regex.scan(code, capture: :all_but_first)
    |> Enum.uniq_by(&List.last/1)
    |> Enum.map(fn [type, name] -> "TRUTH_DYNAMIC_SHARED(#{type}, #{name});" end)
  end

  # ---- a case ------------------------------------------------------------------------------------------------

  defp run_case(program, c, index, directory, opts) do
    c = with_seeds(c, names(opts[:out]))
    name = c[:name] || "case #{index + 1}"
    Mix.shell().info(name)
    inputs = if opts[:in], do: names(opts[:in]), else: Keyword.keys(c[:gradients] || [])

    for input <- inputs,
        !c[:gradients][input],
        !opts[:write],
        do:
          Mix.raise(
            "--in: expected gradients of #{input} in #{name}, or --write, as nothing is compared with it"
          )

    arguments =
      Enum.flat_map(c[:arrays], fn {array, what} ->
        ["--array", "#{array}=" <> array(what, array, index, directory, opts)]
      end) ++
        ["--forward", launch([kernel: opts[:kernel]] ++ c, opts)] ++
        Enum.flat_map(c[:seeds], fn {output, seed} -> ["--seed", "#{output}=#{seed}"] end) ++
        Enum.flat_map(launches(c[:backward]), &["--backward", launch(&1 ++ [kernel: opts[:backward]], opts)]) ++
        Enum.flat_map(inputs, &["--gradient", gradient(&1, c[:gradients][&1])]) ++
        switches(opts, name)

    {_output, status} = System.cmd(program, arguments, into: IO.stream(), stderr_to_stdout: true)
    status
  end

  defp names(list), do: list |> String.split(",", trim: true) |> Enum.map(&String.to_atom/1)

  # d(loss)/d(output) of every output, in an array of the case, or a random one as long as the output.
  defp with_seeds(c, outputs) do
    seeds = for output <- outputs, do: {output, c[:seeds][output] || :"d#{output}"}

    random =
      for {output, seed} <- seeds, not Keyword.has_key?(c[:arrays] || [], seed) do
        {seed, {:random, count(c[:arrays][output]) || Mix.raise("#{seed}: expected an array of that name")}}
      end

    c |> Keyword.put(:seeds, seeds) |> Keyword.update(:arrays, random, &(&1 ++ random))
  end

  defp count(count) when is_integer(count), do: count
  defp count({_how, count}) when is_integer(count), do: count
  defp count(_other), do: nil

  defp array(count, _name, _index, _directory, _opts) when is_integer(count), do: "#{count}"
  defp array({:zeros, count}, _name, _index, _directory, _opts), do: "#{count}:0"

  defp array(path, _name, _index, _directory, opts) when is_binary(path),
    do: Path.expand(path, Path.dirname(opts[:case]))

  defp array({:random, count}, name, index, directory, opts),
    do: count |> Values.random(:erlang.phash2({opts[:seed] || 0, index, name})) |> write(name, index, directory)

  defp array(numbers, name, index, directory, _opts), do: write(numbers, name, index, directory)

  defp write(numbers, name, index, directory) do
    path = Path.join(directory, "#{index}_#{name}.f64")
    File.write!(path, Values.encode(Enum.map(numbers, &(&1 * 1.0)), {:f, 64}))
    path
  end

  # A plain function has neither grid nor block: one of each is right for it, too.
  defp launch(c, opts) do
    kernel = c[:kernel] |> String.replace(" ", "")
    grid = sizes(c[:grid] || opts[:grid] || 1)
    block = sizes(c[:block] || opts[:block] || 1)

    "#{kernel} grid=#{grid} block=#{block} shared=#{c[:shared] || opts[:shared] || 0} args=#{Enum.join(c[:args] || [], ",")}"
  end

  defp sizes(sizes) when is_tuple(sizes), do: sizes |> Tuple.to_list() |> Enum.join(",")
  defp sizes(sizes), do: "#{sizes}"

  defp gradient(input, nil), do: "#{input}"
  defp gradient(input, array), do: "#{input}=#{array}"

  defp switches(opts, name) do
    Enum.flat_map(opts, fn
      {:tolerance, tolerance} -> ["--tolerance", "#{tolerance}"]
      {:f32, true} -> ["--f32"]
      {:early_return, true} -> ["--early-return"]
      {:unrounded_halves, true} -> ["--unrounded-halves"]
      {:write, directory} -> ["--write", directory |> Path.join(name) |> tap(&File.mkdir_p!/1)]
      _other -> []
    end)
  end
end
