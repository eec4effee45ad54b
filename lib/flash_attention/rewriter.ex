require FlashAttention.Packages

if FlashAttention.Defn.supported?() do
  defmodule FlashAttention.Rewriter do
    @moduledoc """
    Attention in programs that somebody else wrote: a compiler that finds it in what Nx traced, forward and backward,
    puts this library's in its place, and leaves the rest to another compiler.

        Nx.Defn.jit(&MyModel.predict/2, compiler: FlashAttention.Rewriter, inner: EXLA)

    It goes wherever a compiler goes: `Nx.Defn.default_options(compiler: FlashAttention.Rewriter, inner: EXLA)`, the options of
    `Axon.build/2`, `Axon.Loop.run/4`, `Nx.Serving`, Bumblebee's servings. Inputs, outputs, types, names and parameters stay
    what they are; memory grows linearly with the sequence instead of with its square.

    ## Options

    | option | default | meaning |
    |---|---|---|
    | `:inner` | `Nx.Defn.Evaluator` | The compiler that runs the rewritten program. |
    | `:report` | `false` | A line a place for every compile, to Logger: `true` at level `:info`, or a level. |
    | `:weights` | `:refuse` | What happens where weights or scores are asked for elsewhere too: `:keep` computes them a second time, for those who asked. |
    | `:dropout` | `:refuse` | What becomes of attention whose weights are dropped out: `:resample` drops others than the program would, as often. |
    | `:attention` | `[]` | `:device`, `:precision` and `:deterministic` of `FlashAttention.attention/4`. |

    All others are the inner compiler's. `Nx.Defn.Evaluator` traces a function anew at each call, so that it is rewritten anew, too:
    `Nx.Defn.compile/3` does it once.

    ## What is found

    `softmax(program(q k)) v`, where the program is any order of

      * a scale: a constant by which q, k or scores are multiplied or divided, or a scalar known at run time
      * a softcap: `c * tanh(s / c)`
      * masks, by `select` on either branch, or added: causal, windows, ranges of keys, lengths and offsets known at run time,
        constants of any origin (`Nx.tril/2`, a table) that are one of these become windows and bands; any other
        a mask of single scores
      * biases, also under a mask; those that are a number of each head times the distance of row and column (ALiBi) become slopes
      * attention sinks, one or several, as further columns of the softmax on either side of it or in its denominator; those of heads,
        and those of rows of their own

      * blocks of keys one after the other, unrolled, with the maximum and the sums so far, in inference

    in any layout, with any batch axes, with k and v repeated for groups of heads (they are not, then); the softmax with or without
    the row's maximum, by division or by a reciprocal, in another precision than the products, and weights times a factor a head. The gradients
    of all of these by q, k, v, biases and sinks are found in the same way: whatever multiplies out to the formula is the formula.

    ## What is not

    What is not the same function stays as it is: nothing is replaced that only looks like attention, no constant is taken for another.
    `explain/3` says of each place why. A row that sees nothing is what the program makes of it: the mean of the values where
    hidden scores are a finite number, NaN where they are -infinity, with the gradients of that. A finite number of -9000 or less (-30000
    in f16) is taken to hide: scores are assumed to stay well above it. Where such a number is added, a row that it hides whole keeps its
    scores as they were; a program in bf16 rounds them away first (-1.0e4 has neighbours 64 apart there), and gives another row.

    Three rows are not the program's. One whose bias, known at run time, is -infinity everywhere gives 0, and gradients of 0, where the
    program gives NaN. One that an added mask of -infinity hides whole is NaN as in the program, but adds 0 to the gradients of q and k,
    where the program makes NaN of them. One whose scores are all large, as by a bias in f32, known at run time, of -1.0e9 everywhere, has
    the program's result, but not its gradients: an f32 cannot hold the largest score plus log n, which the backward takes weights from.

    Which weights are dropped out are the program's own bits, s² of them, so attention with dropout stays. With `dropout: :resample`
    weights are dropped by `FlashAttention.Dropout` instead: at the same rate, seeded by the key that the program's bits were made
    of, so that a run can be repeated and each step and layer drops others, in the backward the same as in the forward. It is found where
    bits are those of `Nx.Random`, one for each weight, as in `Axon.dropout/2`; what is made of other bits stays, and of attentions by one draw
    those that do not drop the same weights as the first. Weights of a row that sees nothing are not dropped then: the row is what it
    would be on average.
    """

    @behaviour Nx.Defn.Compiler

    alias FlashAttention.{Error, Options}
    alias FlashAttention.Rewriter.Expression
    require Logger

    @own [:inner, :report, :weights, :dropout, :attention]

    @typedoc """
    A place where attention is: how it ends, after the kind of Axon's layer that it is in; and what it became, or why it stays.

    `from` says where its tensors come from: for q, k and v, or the result `o` of what stays, the keys that lead to the nearest
    tensor in what the function was given, such as `data.decoder.blocks.0.self_attention.query.kernel`; nothing inside of loops. Nx keeps
    no lines of source in its expressions.
    """
    @type place ::
            %{place: String.t(), from: map, rewritten: true, as: String.t()}
            | %{place: String.t(), from: map, rewritten: false, reason: String.t()}

    @doc """
    The expression with attention replaced: a tensor, or a container of tensors, as `Nx.Defn.debug_expr/2` returns it.

    Nodes that nothing was done to keep their ids. Takes the options `:weights`, `:dropout` and `:attention`.
    """
    @spec rewrite(Nx.Container.t(), keyword) :: Nx.Container.t()
    def rewrite(expression, opts \\ []), do: expression |> Expression.rewrite(check!(opts)) |> elem(0)

    @doc """
    What would become of a function that is called with these arguments, which may be templates: a list of places.

        FlashAttention.Rewriter.explain(&MyModel.predict/2, [params, inputs])
        #=> [%{place: "custom: dot f32[1, 12, 512, 64]", rewritten: true, as: "f32 batch 1, seqlen 512 x 512, ..., causal"}]

    Nothing is computed.
    """
    @spec explain(fun, [term], keyword) :: [place]
    def explain(fun, args, opts \\ []) do
      {own, _inner, _opts} = opts |> Keyword.delete(:client) |> check!() |> Keyword.merge(opts) |> split!()
      {expression, names} = traced(fun, args)
      {_expression, places} = Expression.rewrite(expression, [names: names] ++ own)
      places
    end

    # The expression, and how the function's arguments are called in it.
    defp traced(fun, args) do
      key = {__MODULE__, make_ref()}

      expression =
        args
        |> length()
        |> of_arity(fn traced ->
          Process.put(key, Expression.names(traced))
          apply(fun, traced)
        end)
        |> Nx.Defn.debug_expr_apply(args)

      {expression, Process.delete(key)}
    end

    for arity <- 0..16 do
      arguments = Macro.generate_arguments(arity, __MODULE__)
      defp of_arity(unquote(arity), fun), do: fn unquote_splicing(arguments) -> fun.(unquote(arguments)) end
    end

    # ---- the compiler ------------------------------------------------------------------------------------

    @impl true
    def __jit__(key, vars, fun, args_list, opts) do
      {own, inner, opts} = split!(opts)
      inner.__jit__(key(key, own), vars, rewriting(fun, own), args_list, opts)
    end

    @impl true
    def __compile__(key, vars, fun, opts) do
      {own, inner, opts} = split!(opts)
      inner.__compile__(key(key, own), vars, rewriting(fun, own), opts)
    end

    @impl true
    def __shard_jit__(key, mesh, vars, fun, args_list, opts) do
      {own, inner, opts} = split!(opts)
      inner.__shard_jit__(key(key, own), mesh, vars, rewriting(fun, own), args_list, opts)
    end

    # What comes back are options of Nx.Defn, for each partition: they must lead here again.
    @impl true
    def __partitions_options__(opts) do
      {own, inner, opts} = split!(opts)

      for opts <- inner.__partitions_options__(opts),
          do: Keyword.merge(opts, [compiler: __MODULE__] ++ Keyword.take(own, @own))
    end

    @impl true
    def __to_backend__(opts) do
      {_own, inner, opts} = split!(opts)
      inner.__to_backend__(opts)
    end

    # Own options, the inner compiler, and its own. It matters to what there is to put in a place on which device that
    # computes.
    defp split!(opts) do
      {own, opts} = opts |> Keyword.delete(:compiler) |> Keyword.split(@own)
      inner = check!(own)[:inner] || Nx.Defn.Evaluator
      {own ++ kind(inner, opts), inner, opts}
    end

    @compile {:no_warn_undefined, EXLA.Client}
    defp kind(EXLA, opts) do
      case EXLA.Client.fetch!(opts[:client] || EXLA.Client.default_name()).platform do
        :host -> [kind: :cpu]
        platform -> [kind: platform]
      end
    end

    defp kind(_inner, _opts), do: []

    # What compilers keep of a function they keep under its key. A program that was rewritten is another one, and so is
    # one that was rewritten with other options. Keys are functions: compilers ask where they come from.
    defp key(key, own), do: fn -> {key, own} end

    defp rewriting(fun, own) do
      fn vars ->
        {expression, places} = vars |> fun.() |> Expression.rewrite([names: Expression.names(vars)] ++ own)
        report(places, own[:report])
        expression
      end
    end

    defp report(_places, off) when off in [nil, false], do: :ok
    defp report(places, true), do: report(places, :info)
    defp report(places, level), do: for(place <- places, do: Logger.log(level, fn -> line(place) end))

    defp line(%{rewritten: true} = place), do: "FlashAttention.Rewriter: #{where(place)} -> #{place.as}"
    defp line(place), do: "FlashAttention.Rewriter: #{where(place)} stays: #{place.reason}"

    defp where(%{place: place, from: from}) when from == %{}, do: place

    defp where(%{place: place, from: from}) do
      words = for name <- [:q, :k, :v, :o], found = from[name], do: "#{name} from #{found}"
      "#{place} (#{Enum.join(words, ", ")})"
    end

    # ---- options -----------------------------------------------------------------------------------------

    defp check!(opts) do
      unknown = Keyword.keys(opts) -- @own

      if unknown != [],
        do: raise(Error.invalid(:opts, "keys among #{Enum.join(@own, ", ")}", inspect(hd(unknown))))

      if opts[:weights] not in [nil, :refuse, :keep],
        do: raise(Error.invalid(:weights, ":refuse or :keep", inspect(opts[:weights])))

      if opts[:dropout] not in [nil, :refuse, :resample],
        do: raise(Error.invalid(:dropout, ":refuse or :resample", inspect(opts[:dropout])))

      if opts[:inner] == __MODULE__,
        do: raise(Error.invalid(:inner, "another compiler", inspect(__MODULE__)))

      Options.parse!(opts[:attention] || [], [:device, :precision, :deterministic])
      opts
    end
  end
else
  FlashAttention.Packages.stand_in(FlashAttention.Rewriter, "Nx 0.12 or later", [:nx])
end
