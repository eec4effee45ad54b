defmodule FlashAttention.Examples.ByteModel.Checkpoint do
  @moduledoc """
  Named arrays of numbers in files that are either whole or refused.

  A file is a line that names the format and the machine's byte order, the number of bytes that follow the checksum, that
  checksum (MD5), and the arrays one after another:

      size of the name (16 bits) | name | code of the type (8) | rank (8) | dims (64 each) | elements

  Nothing of a file is decoded as an Erlang term, so that it can hold neither functions nor atoms, and reading takes no
  more memory than the file has bytes.
  """

  @magic "flash_attention checkpoint 2, #{:erlang.system_info(:endian)} endian\n"
  @codes %{s64: 1, f64: 2, f32: 3, u8: 4}
  @types Map.new(@codes, fn {type, code} -> {code, type} end)
  @element_bytes %{s64: 8, f64: 8, f32: 4, u8: 1}

  @typedoc "The type of the elements, the shape, and the elements, in native byte order."
  @type array :: {:s64 | :f64 | :f32 | :u8, shape :: tuple, data :: binary}

  @doc """
  Writes arrays by name. Whoever reads the path, at whatever moment, finds the old file or the new one: the new one is
  written beside it, brought to disk, and then takes its name.

  The file beside it has a name that nobody knows beforehand, and must be new: a link that was planted in the folder
  is neither followed nor, at the path itself, written through.
  """
  @spec write(Path.t(), %{String.t() => array}) :: :ok | {:error, message :: String.t()}
  def write(path, arrays) do
    payload = for {name, array} <- Enum.sort(arrays), into: <<>>, do: encode(name, array)
    unfinished = unfinished(path)

    with :ok <- File.mkdir_p(Path.dirname(path)),
         :ok <-
           write_new(unfinished, [@magic, <<byte_size(payload)::64-native>>, :erlang.md5(payload), payload]),
         :ok <- rename(unfinished, path) do
      :ok
    else
      {:error, reason} -> cannot_write(path, reason)
    end
  end

  @doc "Whether `write/2` may write the path, for who would learn it late otherwise. Makes the folder."
  @spec check(Path.t()) :: :ok | {:error, message :: String.t()}
  def check(path) do
    unfinished = unfinished(path)

    with :ok <- File.mkdir_p(Path.dirname(path)),
         :ok <- if(File.dir?(path), do: {:error, :eisdir}, else: :ok),
         :ok <- write_new(unfinished, []),
         :ok <- File.rm(unfinished) do
      :ok
    else
      {:error, reason} -> cannot_write(path, reason)
    end
  end

  defp cannot_write(path, reason), do: {:error, "#{path} cannot be written: #{:file.format_error(reason)}"}

  @doc false
  def unfinished(path) do
    random = Base.url_encode64(:crypto.strong_rand_bytes(12))
    Path.join(Path.dirname(path), ".#{Path.basename(path)}.#{random}.tmp")
  end

  @doc false
  def write_new(path, contents) do
    with {:ok, file} <- :file.open(path, [:write, :raw, :binary, :exclusive]),
         {:error, reason} <- write_and_close(file, contents) do
      File.rm(path)
      {:error, reason}
    end
  end

  defp write_and_close(file, contents) do
    with :ok <- :file.write(file, contents), do: :file.sync(file)
  after
    :file.close(file)
  end

  defp rename(unfinished, path) do
    with {:error, reason} <- File.rename(unfinished, path) do
      File.rm(unfinished)
      {:error, reason}
    end
  end

  defp encode(name, {type, shape, data}) do
    dims = for dim <- Tuple.to_list(shape), into: <<>>, do: <<dim::64-native>>

    <<byte_size(name)::16-native, name::binary, @codes[type]::8, tuple_size(shape)::8, dims::binary,
      data::binary>>
  end

  @doc """
  The arrays in a file; `:none` where there is no file.

      iex> path = Path.join(System.tmp_dir!(), "doctest-#{System.pid()}.checkpoint")
      iex> FlashAttention.Examples.ByteModel.Checkpoint.read(path)
      :none
      iex> FlashAttention.Examples.ByteModel.Checkpoint.write(path, %{"step" => {:s64, {}, <<7::64-native>>}})
      :ok
      iex> FlashAttention.Examples.ByteModel.Checkpoint.read(path)
      {:ok, %{"step" => {:s64, {}, <<7::64-native>>}}}
      iex> File.write!(path, "something else")
      iex> {:error, message} = FlashAttention.Examples.ByteModel.Checkpoint.read(path)
      iex> message == path <> " is not a checkpoint of this version"
      true
      iex> File.rm!(path)
      :ok
  """
  @spec read(Path.t()) :: {:ok, %{String.t() => array}} | :none | {:error, message :: String.t()}
  def read(path) do
    with {:ok, %{type: :regular, size: size}} <- File.stat(path),
         {:ok, payload} <- File.open(path, [:read, :raw, :binary], &read_payload(&1, size)) do
      decode_file(path, payload)
    else
      {:ok, _no_regular_file} -> decode_file(path, :foreign)
      {:error, :enoent} -> :none
      {:error, reason} -> {:error, "#{path} cannot be read: #{:file.format_error(reason)}"}
    end
  end

  # What is no checkpoint, or is cut, is not read any further.
  defp read_payload(file, file_bytes) do
    head_bytes = byte_size(@magic) + 8 + 16

    case :file.read(file, head_bytes) do
      {:ok, <<@magic, bytes::64-native, hash::binary-size(16)>>} when head_bytes + bytes == file_bytes ->
        with {:ok, payload} <- read_all(file, bytes),
             do: if(:erlang.md5(payload) == hash, do: payload, else: :damaged)

      {:ok, <<@magic, _rest::binary>>} ->
        :damaged

      {:error, reason} ->
        {:error, reason}

      _other ->
        :foreign
    end
  end

  defp read_all(_file, 0), do: {:ok, <<>>}
  defp read_all(file, bytes), do: with(:eof <- :file.read(file, bytes), do: {:ok, <<>>})

  defp decode_file(path, :foreign), do: {:error, "#{path} is not a checkpoint of this version"}

  defp decode_file(path, :damaged),
    do:
      {:error, "#{path} is damaged: its contents do not have the size and checksum that they were written with"}

  defp decode_file(path, {:error, reason}),
    do: {:error, "#{path} cannot be read: #{:file.format_error(reason)}"}

  defp decode_file(path, payload) do
    with :error <- decode(payload, %{}), do: {:error, "#{path} holds what this version does not know"}
  end

  defp decode(<<>>, arrays), do: {:ok, arrays}

  defp decode(<<size::16-native, name::binary-size(size), code::8, rank::8, rest::binary>>, arrays)
       when is_map_key(@types, code) and not is_map_key(arrays, name) and byte_size(rest) >= 8 * rank do
    <<dims::binary-size(8 * rank), rest::binary>> = rest
    shape = List.to_tuple(for <<dim::64-native <- dims>>, do: dim)
    type = @types[code]
    bytes = Tuple.product(shape) * @element_bytes[type]

    if bytes <= byte_size(rest) do
      <<data::binary-size(bytes), rest::binary>> = rest
      decode(rest, Map.put(arrays, name, {type, shape, data}))
    else
      :error
    end
  end

  defp decode(_cut, _arrays), do: :error
end
