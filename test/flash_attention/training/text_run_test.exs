defmodule FlashAttention.Training.TextRunTest do
  use ExUnit.Case, async: true

  alias FlashAttention.Training.{Chart, Checkpoint, TextRun}

  doctest FlashAttention.Training.TextRun
  doctest FlashAttention.Training.Checkpoint
  doctest FlashAttention.Training.Chart

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

    test "that are damaged, cut or something else are refused", %{tmp_dir: dir} do
      path = Path.join(dir, "a.checkpoint")
      :ok = Checkpoint.write(path, Enum.to_list(1..100))
      whole = File.read!(path)

      <<front::binary-size(80), byte, rest::binary>> = whole
      File.write!(path, <<front::binary, Bitwise.bxor(byte, 1), rest::binary>>)
      assert {:error, message} = Checkpoint.read(path)
      assert message =~ "is damaged"

      File.write!(path, binary_part(whole, 0, byte_size(whole) - 1))
      assert {:error, message} = Checkpoint.read(path)
      assert message =~ "is damaged"

      payload = :erlang.term_to_binary(:an_atom) |> String.replace("an_atom", "qzx" <> "jkwv")
      File.write!(path, "flash_attention checkpoint 1\n" <> :erlang.md5(payload) <> payload)
      assert Checkpoint.read(path) == {:error, "#{path} holds what this version does not know"}

      File.write!(path, "")
      assert Checkpoint.read(path) == {:error, "#{path} is not a checkpoint"}
      assert {:error, message} = Checkpoint.read(dir)
      assert message =~ "cannot be read"
    end

    test "are written whole or not at all", %{tmp_dir: dir} do
      path = Path.join([dir, "new", "folder", "a.checkpoint"])
      assert Checkpoint.write(path, :first) == :ok
      assert Checkpoint.write(path, :second) == :ok
      assert Checkpoint.read(path) == {:ok, :second}
      # Nothing is left beside it.
      assert File.ls!(Path.dirname(path)) == ["a.checkpoint"]

      assert {:error, message} = Checkpoint.write(Path.join(path, "below a file"), :third)
      assert message =~ "cannot be written"
      # A folder cannot be replaced by a file: the last moment at which writing can fail.
      folder = Path.join(dir, "folder")
      File.mkdir_p!(Path.join(folder, "full"))
      assert {:error, _} = Checkpoint.write(folder, :fourth)
      assert Enum.sort(File.ls!(dir)) == ["folder", "new"]
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
