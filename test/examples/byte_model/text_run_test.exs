defmodule FlashAttention.Examples.ByteModel.TextRunTest do
  use ExUnit.Case, async: true

  alias FlashAttention.Examples.ByteModel.{Chart, Checkpoint, TextRun}

  doctest FlashAttention.Examples.ByteModel.TextRun
  doctest FlashAttention.Examples.ByteModel.Checkpoint
  doctest FlashAttention.Examples.ByteModel.Chart

  @moduletag :tmp_dir

  @text String.duplicate("she sells sea shells by the sea shore, ", 5)
  @settings [num_heads: 4, seqlen: 17, batch_size: 2, seed: 3]

  defp steps(run, count), do: Enum.reduce(List.duplicate(nil, count), run, fn _, run -> TextRun.step(run) end)

  test "a run that is saved and resumed is the run that was never interrupted, bit for bit", %{tmp_dir: dir} do
    path = Path.join(dir, "a.checkpoint")
    whole = @text |> TextRun.new(@settings) |> steps(7)

    assert @text |> TextRun.new(@settings) |> steps(3) |> TextRun.write(path) == :ok
    {:ok, resumed} = @text |> TextRun.new(@settings) |> TextRun.read(path)
    assert resumed.state.step == 3
    resumed = steps(resumed, 4)

    assert resumed.state == whole.state
    assert resumed.losses == whole.losses
    assert length(whole.losses) == 7
    assert TextRun.sample(resumed, "sea", 20) == TextRun.sample(whole, "sea", 20)
    # Not because nothing happens.
    assert whole.state.params != TextRun.new(@text, @settings).state.params
    assert hd(whole.losses) < List.last(whole.losses)
  end

  test "a text of documents is trained in packed steps, and is another text by another separator", %{
    tmp_dir: dir
  } do
    path = Path.join(dir, "a.checkpoint")
    new = &TextRun.new(@text, [separator: &1] ++ @settings)
    assert tuple_size(new.(", ").documents) == 5
    run = steps(new.(", "), 6)
    assert hd(run.losses) < List.last(run.losses)
    assert new.(", ") |> steps(2) |> TextRun.write(path) == :ok
    {:ok, resumed} = TextRun.read(new.(", "), path)
    assert steps(resumed, 4).state == run.state
    assert run.losses != steps(TextRun.new(@text, @settings), 6).losses

    for other <- [new.(" "), TextRun.new(@text, @settings)],
        do: assert(TextRun.read(other, path) == {:error, "#{path} is of a run on another text"})
  end

  test "another seed is another run" do
    one = @text |> TextRun.new(@settings) |> steps(2)
    other = @text |> TextRun.new(Keyword.put(@settings, :seed, 4)) |> steps(2)
    assert one.losses != other.losses
  end

  test "a run whose numbers are no longer finite ends with an error" do
    run = TextRun.new(@text, @settings)

    nan = fn tensor ->
      %{tensor | data: :binary.copy(<<0x7FC00000::32-native>>, div(byte_size(tensor.data), 4))}
    end

    run = put_in(run.state.params, Map.update!(run.state.params, :value, nan))
    assert_raise ArithmeticError, ~r/no longer finite/, fn -> TextRun.step(run) end
  end

  describe "checkpoints" do
    test "of another run or text are refused, and say why", %{tmp_dir: dir} do
      path = Path.join(dir, "a.checkpoint")
      :ok = @text |> TextRun.new(@settings) |> TextRun.write(path)

      assert TextRun.read(TextRun.new(@text <> "!", @settings), path) ==
               {:error, "#{path} is of a run on another text"}

      assert TextRun.read(TextRun.new(@text, Keyword.put(@settings, :seqlen, 18)), path) ==
               {:error, "#{path} is of a run with seqlen 17, not 18"}
    end

    # An envelope that holds, around anything.
    defp seal(path, payload) do
      magic = "flash_attention checkpoint 2, #{:erlang.system_info(:endian)} endian\n"
      File.write!(path, [magic, <<byte_size(payload)::64-native>>, :erlang.md5(payload), payload])
    end

    # The first version's envelope, whose payload was a term.
    defp seal_term(path, payload),
      do: File.write!(path, ["flash_attention checkpoint 1\n", :erlang.md5(payload), payload])

    test "are never decoded as terms: no functions, no atoms, no compressed gigabytes", %{tmp_dir: dir} do
      path = Path.join(dir, "a.checkpoint")
      run = TextRun.new(@text, @settings)
      stages = %{run.stages | embed: fn _params, _batch -> raise "run from a file" end}
      harmful = Map.put(Map.take(run, [:settings, :state, :losses]), :stages, stages)
      compressed = :erlang.term_to_binary(:binary.copy(<<0>>, 10_000_000), compressed: 9)

      for payload <- [:erlang.term_to_binary(harmful), :erlang.term_to_binary(7), compressed] do
        seal_term(path, payload)
        assert TextRun.read(run, path) == {:error, "#{path} is not a checkpoint of this version"}
        seal(path, payload)
        assert TextRun.read(run, path) == {:error, "#{path} holds what this version does not know"}
      end
    end

    test "give a run numbers of its own types and shapes, and nothing else", %{tmp_dir: dir} do
      path = Path.join(dir, "a.checkpoint")
      new = TextRun.new(@text, @settings)
      run = steps(new, 2)
      :ok = TextRun.write(run, path)
      {:ok, arrays} = Checkpoint.read(path)
      assert TextRun.read(new, path) == {:ok, run}

      # More of a file than the run has a place for changes nothing.
      :ok = Checkpoint.write(path, Map.put(arrays, "stages", {:u8, {3}, "fun"}))
      assert TextRun.read(new, path) == {:ok, run}

      for name <- Map.keys(arrays), bad <- [nil, {:u8, {3}, "bad"}, {:f64, {0}, ""}] do
        changed = if bad, do: Map.put(arrays, name, bad), else: Map.delete(arrays, name)
        :ok = Checkpoint.write(path, changed)
        assert TextRun.read(new, path) == {:error, "#{path} does not hold a run of this model"}, "#{name}"
      end

      for {name, bad} <- [
            {"step", {:s64, {}, <<-1::64-native>>}},
            {"step", {:s64, {}, <<3::64-native>>}},
            {"losses", {:f64, {2}, <<0::64, 0x7FF8000000000000::64-native>>}},
            {"params/sink", {:f32, {4, 1}, <<0::128>>}}
          ] do
        :ok = Checkpoint.write(path, Map.put(arrays, name, bad))
        assert TextRun.read(new, path) == {:error, "#{path} does not hold a run of this model"}, "#{name}"
      end
    end

    test "that are damaged, cut or something else are refused in one line", %{tmp_dir: dir} do
      path = Path.join(dir, "a.checkpoint")

      :ok =
        Checkpoint.write(path, %{"a" => {:u8, {2, 50}, :binary.copy("x", 100)}, "b" => {:s64, {}, <<0::64>>}})

      whole = File.read!(path)

      damaged =
        {:error,
         "#{path} is damaged: its contents do not have the size and checksum that they were written with"}

      <<front::binary-size(80), byte, rest::binary>> = whole
      File.write!(path, <<front::binary, Bitwise.bxor(byte, 1), rest::binary>>)
      assert Checkpoint.read(path) == damaged

      for bytes <- [byte_size(whole) - 1, byte_size(whole) - 134, 60] do
        File.write!(path, binary_part(whole, 0, bytes))
        assert Checkpoint.read(path) == damaged
      end

      File.write!(path, whole <> "more")
      assert Checkpoint.read(path) == damaged

      for contents <- ["", "no", String.duplicate("no", 100)] do
        File.write!(path, contents)
        assert Checkpoint.read(path) == {:error, "#{path} is not a checkpoint of this version"}
      end

      # Every payload that a good one can be cut or changed to is refused or read, and none raises.
      {:ok, arrays} = seal_and_read(path, payload = binary_part(whole, byte_size(whole) - 134, 134))
      assert Map.keys(arrays) == ["a", "b"]

      for at <- 0..(byte_size(payload) - 1), byte <- [0, 1, 2, 127, 255] do
        <<front::binary-size(at), _, rest::binary>> = payload
        assert {outcome, _} = seal_and_read(path, <<front::binary, byte, rest::binary>>)
        assert outcome in [:ok, :error]
        assert {outcome, _} = seal_and_read(path, front)
        assert outcome in [:ok, :error]
      end

      assert Checkpoint.read(dir) == {:error, "#{dir} is not a checkpoint of this version"}
      assert Checkpoint.read(Path.join(dir, String.duplicate("x", 300))) |> elem(1) =~ "cannot be read"
    end

    defp seal_and_read(path, payload) do
      seal(path, payload)
      Checkpoint.read(path)
    end

    @array %{"a" => {:u8, {1}, "1"}}

    test "are written whole or not at all", %{tmp_dir: dir} do
      path = Path.join([dir, "new", "folder", "a.checkpoint"])
      assert Checkpoint.write(path, @array) == :ok
      assert Checkpoint.write(path, %{"b" => {:u8, {1}, "2"}}) == :ok
      assert Checkpoint.read(path) == {:ok, %{"b" => {:u8, {1}, "2"}}}
      # Nothing is left beside it.
      assert File.ls!(Path.dirname(path)) == ["a.checkpoint"]

      assert {:error, message} = Checkpoint.write(Path.join(path, "below a file"), @array)
      assert message =~ "cannot be written"
      # A folder cannot be replaced by a file: the last moment at which writing can fail.
      folder = Path.join(dir, "folder")
      File.mkdir_p!(Path.join(folder, "full"))
      assert {:error, _} = Checkpoint.write(folder, @array)
      assert Enum.sort(File.ls!(dir)) == ["folder", "new"]
    end

    test "are never written through links that were planted in the folder", %{tmp_dir: dir} do
      [path, precious] = for name <- ["a.checkpoint", "precious"], do: Path.join(dir, name)
      File.write!(precious, "precious")
      # Where the unfinished file was, before it had a name that nobody knows.
      planted = "#{path}.#{System.pid()}.tmp"
      for link <- [path, planted], do: File.ln_s!(precious, link)

      assert Checkpoint.write(path, @array) == :ok
      assert File.read!(precious) == "precious"
      assert File.lstat!(path).type == :regular
      assert File.read_link!(planted) == precious

      assert Checkpoint.write_new(planted, "new") == {:error, :eexist}
      assert File.read!(precious) == "precious"
      assert File.read_link!(planted) == precious

      names = for _ <- 1..10, do: Checkpoint.unfinished(path)
      assert length(Enum.uniq(names)) == 10
      assert Enum.all?(names, &(Path.dirname(&1) == dir))
    end
  end

  describe "a chart" do
    test "has the size that is asked for, whatever it shows" do
      for numbers <- [[1.5], [2, 1], Enum.to_list(1..99)], style <- [:braille, :plain], width <- [20, 80] do
        rows = numbers |> Chart.render(width: width, height: 5, style: style) |> String.split("\n")
        assert length(rows) == 7
        assert Enum.all?(rows, &(String.length(&1) <= width))
        assert String.length(Enum.at(rows, 5)) == width
      end
    end

    test "falls where numbers fall, dot by dot" do
      assert Chart.render([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], width: 11, height: 2) |> String.split("\n") ==
               [" 8.00 │⠑⢄", " 1.00 │  ⠑⢄", "      └────", "       1  8"]
    end

    test "shows the mean of what shares a column" do
      plain = fn numbers -> Chart.render(numbers, width: 9, height: 2, style: :plain) |> String.split("\n") end
      assert plain.([4.0, 2.0, 1.0, 1.0]) == [" 3.00 |*", " 1.00 | *", "      +--", "       14"]
    end
  end
end
