if FlashAttention.Defn.supported?() do
  defmodule FlashAttention.Test.RecordingCompiler do
    @moduledoc "A compiler that tells the calling process what it was asked, and leaves the work to Nx's own."

    @behaviour Nx.Defn.Compiler

    alias Nx.Defn.Evaluator

    @impl true
    def __jit__(key, vars, fun, args_list, opts), do: __compile__(key, vars, fun, opts).(args_list)

    @impl true
    def __compile__(key, vars, fun, opts) do
      send(self(), {:compiled, key, opts})
      Evaluator.__compile__(key, vars, fun, [])
    end

    @impl true
    def __shard_jit__(key, mesh, _vars, fun, _args_list, opts) do
      send(self(), {:sharded, key, mesh, fun, opts})
      []
    end

    @impl true
    def __partitions_options__(opts), do: for(n <- 0..1, do: Keyword.put(opts, :device_id, n))

    @impl true
    def __to_backend__(opts), do: {Nx.BinaryBackend, opts}
  end
end
