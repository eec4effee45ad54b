defmodule FlashAttention.Application do
  @moduledoc false
  use Application

  alias FlashAttention.{Error, Native}

  # Where the library is not built, calls say so.
  @impl true
  def start(_type, _args) do
    with limit when limit != nil <- Application.get_env(:flash_attention, :pinned_limit),
         {:error, {:invalid_argument, _, _, _, _} = error} <- Native.set_pinned_limit(limit),
         do: raise(Error.from_native(error))

    Supervisor.start_link([], strategy: :one_for_one)
  end
end
