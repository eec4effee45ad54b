require FlashAttention.Packages

if FlashAttention.Defn.supported?() do
  defmodule FlashAttention.Rewriter do
    @moduledoc """
    A compiler that finds attention in programs written with Nx, replaces it by this library's, and leaves the rest to
    another compiler.

        Nx.Defn.jit(&MyModel.predict/2, compiler: FlashAttention.Rewriter, inner: EXLA)
    """

    @behaviour Nx.Defn.Compiler

    alias FlashAttention.Rewriter.Expression

    @own [:inner, :report, :weights, :attention]

    @impl true
    def __jit__(key, vars, fun, args_list, opts) do
      {own, inner, opts} = split(opts)
      inner.__jit__(key(key, own), vars, rewriting(fun, own), args_list, opts)
    end

    @impl true
    def __compile__(key, vars, fun, opts) do
      {own, inner, opts} = split(opts)
      inner.__compile__(key(key, own), vars, rewriting(fun, own), opts)
    end

    @impl true
    def __shard_jit__(key, mesh, vars, fun, args_list, opts) do
      {own, inner, opts} = split(opts)
      inner.__shard_jit__(key(key, own), mesh, vars, rewriting(fun, own), args_list, opts)
    end

    @impl true
    def __partitions_options__(opts) do
      {own, inner, opts} = split(opts)
      for opts <- inner.__partitions_options__(opts), do: Keyword.merge(opts, [compiler: __MODULE__] ++ own)
    end

    @impl true
    def __to_backend__(opts) do
      {_own, inner, opts} = split(opts)
      inner.__to_backend__(opts)
    end

    defp split(opts) do
      {own, opts} = Keyword.split(opts, @own)
      {own, own[:inner] || Nx.Defn.Evaluator, Keyword.delete(opts, :compiler)}
    end

    defp key(key, own), do: fn -> {key, own} end

    defp rewriting(fun, own), do: &(&1 |> fun.() |> rewrite(own))

    def rewrite(container, opts \\ []), do: container |> Expression.rewrite(opts) |> elem(0)

    def explain(fun, args, opts \\ []) do
      {_container, found} = fun |> Nx.Defn.debug_expr() |> apply(args) |> Expression.rewrite(opts)
      found
    end
  end
else
  FlashAttention.Packages.stand_in(FlashAttention.Rewriter, "Nx 0.12 or later", [:nx])
end
