# Starts EXLA for whoever compiles through it, with what stands in for its native half where that is not there.
if Code.ensure_loaded?(EXLA.NIF) do
  {:ok, _} = Application.ensure_all_started(:exla)
else
  Code.require_file("exla_nif.exs", __DIR__)
  {:ok, _} = Application.ensure_all_started(:nimble_pool)
  {:ok, _} = EXLA.Application.start(:normal, [])
  # There is no XLA to register the calls with.
  :persistent_term.put(FlashAttention.EXLA, true)
end
