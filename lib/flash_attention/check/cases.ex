defmodule FlashAttention.Check.Cases do
  @moduledoc false

  # What is checked: awkward sizes, causal masks, windows, scales, softcap, grouped heads and sinks, alone and together.
  # q and k are shapes {batch, seqlen, heads, head_dim}; options are the C library's.

  @causal [window_right: 0]

  def all do
    [
      %{name: "causal", q: {2, 67, 2, 40}, k: {2, 67, 2, 40}, options: @causal},
      %{name: "every column", q: {1, 33, 3, 31}, k: {1, 71, 3, 31}, options: []},
      %{name: "one row, one column", q: {1, 1, 1, 64}, k: {1, 1, 1, 64}, options: @causal},
      %{name: "head_dim 1", q: {1, 19, 2, 1}, k: {1, 19, 2, 1}, options: @causal},
      %{name: "head_dim 129", q: {1, 21, 1, 129}, k: {1, 35, 1, 129}, options: @causal},
      %{name: "window", q: {1, 83, 2, 24}, k: {1, 83, 2, 24}, options: [window_left: 17, window_right: 5]},
      %{name: "rows that see nothing", q: {1, 57, 2, 17}, k: {1, 23, 2, 17}, options: @causal},
      %{name: "grouped heads", q: {2, 37, 6, 20}, k: {2, 53, 2, 20}, options: @causal},
      %{name: "one key head", q: {1, 29, 5, 33}, k: {1, 41, 1, 33}, options: []},
      %{name: "scale", q: {1, 47, 2, 16}, k: {1, 47, 2, 16}, options: [scale: -0.4] ++ @causal},
      %{name: "softcap", q: {1, 43, 2, 48}, k: {1, 59, 2, 48}, options: [softcap: 1.5] ++ @causal},
      %{name: "sink", q: {1, 61, 3, 24}, k: {1, 61, 3, 24}, sinks: 1, options: @causal},
      %{
        name: "all at once",
        q: {2, 49, 4, 23},
        k: {2, 38, 2, 23},
        sinks: 3,
        options: [scale: 0.3, softcap: 2.0, window_left: 9, window_right: 4]
      }
    ]
  end

  # The shapes of what goes in; dout is the loss's gradient by o.
  def shapes(%{q: q, k: k} = check_case) do
    shapes = %{q: q, k: k, v: k, dout: q}
    if check_case[:sinks], do: Map.put(shapes, :sink, {check_case.sinks, elem(q, 2)}), else: shapes
  end
end
