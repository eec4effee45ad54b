defmodule FlashAttention.Error do
  @moduledoc """
  What went wrong: the argument at fault, what was expected and what came.

      iex> q = FlashAttention.Tensor.new(<<0::size(8 * 4 * 6)>>, :f32, {1, 2, 1, 3})
      iex> k = FlashAttention.Tensor.new(<<0::size(8 * 4 * 4)>>, :f32, {1, 2, 1, 2})
      iex> {:error, error} = FlashAttention.forward(q, k, k)
      iex> {error.reason, error.argument, error.expected, error.got}
      {:invalid_argument, :k, "head_dim 3 as in q", "2"}
      iex> Exception.message(error)
      "k: expected head_dim 3 as in q, got 2"

  ## Reasons

    * `:invalid_argument`: a tensor, shape, type or option that no device could take
    * `:unsupported`: a valid problem that the chosen device does not take, or what this build or the packages
      beside it cannot do
    * `:no_device`: the chosen device is not there, or its driver is not
    * `:out_of_memory`: host or device memory ran out; the next call may succeed
    * `:device_error`: the device reported an error; the message holds its text
    * `:not_loaded`: the native library could not be loaded
    * `:rank_lost`: a rank of a `FlashAttention.Distributed` group ended, left, or did not answer in time

  `argument`, `expected` and `got` are `nil` where they do not apply.
  """

  @type reason ::
          :invalid_argument
          | :unsupported
          | :no_device
          | :out_of_memory
          | :device_error
          | :not_loaded
          | :rank_lost

  @type t :: %__MODULE__{
          reason: reason,
          argument: atom,
          expected: String.t() | nil,
          got: String.t() | nil,
          message: String.t()
        }

  defexception [:reason, :argument, :expected, :got, :message]

  @doc """
  An `:invalid_argument`, in the words of the C library.

      iex> Exception.message(FlashAttention.Error.invalid(:causal, "a boolean", "1"))
      "causal: expected a boolean, got 1"
  """
  @spec invalid(atom, String.t(), String.t()) :: t
  def invalid(argument, expected, got) do
    message = "#{argument}: expected #{expected}, got #{got}"
    from_native({:invalid_argument, Atom.to_string(argument), expected, got, message})
  end

  @doc """
  Any term as an error shows it: `inspect/2` in a length that fits a line.

      iex> FlashAttention.Error.show({:window, Enum.to_list(1..1000)})
      "{:window, [1, 2, 3, 4, 5, 6, ...]}"
  """
  @spec show(term) :: String.t()
  def show(term) do
    shown(term, safe: false)
  rescue
    # A struct without its fields, for one.
    _error -> shown(term, structs: false)
  end

  defp shown(term, opts) do
    text = inspect(term, [limit: 8, printable_limit: 64, width: :infinity] ++ opts)
    if String.length(text) > 200, do: String.slice(text, 0, 200) <> "...", else: text
  end

  @doc false
  # What was raised, as `got`.
  @spec raised(Exception.t()) :: String.t()
  def raised(error), do: "an error: " <> hd(String.split(Exception.message(error), "\n"))

  @doc false
  @spec from_native(FlashAttention.Native.error()) :: t
  def from_native({reason, argument, expected, got, message}) do
    %__MODULE__{
      reason: reason,
      # Arguments are names of tensors, sizes and options: a small closed set.
      argument: if(argument != "", do: String.to_atom(argument)),
      expected: if(expected != "", do: expected),
      got: if(got != "", do: got),
      message: message
    }
  end
end
