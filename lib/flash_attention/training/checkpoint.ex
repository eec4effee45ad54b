defmodule FlashAttention.Training.Checkpoint do
  @moduledoc """
  Terms in files that are either whole or refused.

  A file is the line `flash_attention checkpoint 1`, the MD5 of what follows, and the term in Erlang's
  external format.
  """

  @magic "flash_attention checkpoint 1\n"

  @doc """
  Writes a term. Whoever reads the path, at whatever moment, finds the old file or the new one: the new one is
  written beside it, brought to disk, and then takes its name.
  """
  @spec write(Path.t(), term) :: :ok | {:error, message :: String.t()}
  def write(path, term) do
    payload = :erlang.term_to_binary(term)
    unfinished = "#{path}.#{System.pid()}.tmp"

    with :ok <- File.mkdir_p(Path.dirname(path)),
         {:ok, file} <- :file.open(unfinished, [:write, :raw, :binary]),
         :ok <- write_and_close(file, [@magic, :erlang.md5(payload), payload]),
         :ok <- File.rename(unfinished, path) do
      :ok
    else
      {:error, reason} ->
        File.rm(unfinished)
        {:error, "#{path} cannot be written: #{:file.format_error(reason)}"}
    end
  end

  defp write_and_close(file, contents) do
    with :ok <- :file.write(file, contents), do: :file.sync(file)
  after
    :file.close(file)
  end

  @doc """
  The term in a file; `:none` where there is no file.

      iex> path = Path.join(System.tmp_dir!(), "doctest-#{System.pid()}.checkpoint")
      iex> FlashAttention.Training.Checkpoint.read(path)
      :none
      iex> FlashAttention.Training.Checkpoint.write(path, %{step: 7})
      :ok
      iex> FlashAttention.Training.Checkpoint.read(path)
      {:ok, %{step: 7}}
      iex> File.write!(path, "something else")
      iex> {:error, message} = FlashAttention.Training.Checkpoint.read(path)
      iex> message == path <> " is not a checkpoint"
      true
      iex> File.rm!(path)
      :ok
  """
  @spec read(Path.t()) :: {:ok, term} | :none | {:error, message :: String.t()}
  def read(path) do
    case File.read(path) do
      {:ok, <<@magic, hash::binary-size(16), payload::binary>>} ->
        if :erlang.md5(payload) == hash,
          do: term(path, payload),
          else:
            {:error, "#{path} is damaged: its contents do not have the checksum that they were written with"}

      {:ok, _other} ->
        {:error, "#{path} is not a checkpoint"}

      {:error, :enoent} ->
        :none

      {:error, reason} ->
        {:error, "#{path} cannot be read: #{:file.format_error(reason)}"}
    end
  end

  # Atoms that are not there yet are not made: they would stay for good.
  defp term(path, payload) do
    {:ok, :erlang.binary_to_term(payload, [:safe])}
  rescue
    ArgumentError -> {:error, "#{path} holds what this version does not know"}
  end
end
