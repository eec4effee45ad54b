defmodule Mix.Tasks.FlashAttention.TrainTest do
  use ExUnit.Case

  import ExUnit.CaptureIO

  alias Mix.Tasks.FlashAttention.Train

  @moduletag :tmp_dir
  @small ~w(--seqlen 16 --batch 2 --heads 4 --device cpu)

  setup %{tmp_dir: dir} do
    file = Path.join(dir, "text")
    File.write!(file, String.duplicate("the quick brown fox jumps over the lazy dog. ", 4))
    %{text: file, checkpoint: Path.join(dir, "checkpoint")}
  end

  defp train(args), do: capture_io(fn -> Train.run(args) end)

  test "shows progress, the curve, the loss and a sample", %{text: file, checkpoint: checkpoint} do
    output = train([file | @small] ++ ~w(--steps 12 --sample 30 --prompt the --checkpoint #{checkpoint}))
    assert output =~ "Text:  #{file}, 180 bytes"
    assert output =~ ~r|step 12/12  loss \d\.\d{3}  \d+ tokens/s  0:00 left|
    assert output =~ "Loss, in nats a byte, over steps\n 5.55 |"
    assert output =~ ~r/Last 20 steps: \d\.\d\d nats/
    assert [_, sample] = String.split(output, "It writes:\n\n")
    assert String.starts_with?(sample, "the")
    assert String.length(sample) == 3 + 30 + 1
  end

  test "packs documents where the text has separators", %{tmp_dir: dir, checkpoint: checkpoint} do
    text = Path.join(dir, "documents")
    File.write!(text, "a first one\n\nand another, which is longer\n\nthe last\n")
    output = train([text | @small] ++ ~w(--steps 3 --sample 0 --checkpoint #{checkpoint} --separator \\n\\n))
    assert output =~ "Text:  #{text}, 52 bytes in 3 documents"
    assert output =~ "32 bytes of documents, of each 16 at most, a step, on cpu"
    assert output =~ "step 3/3"
    assert_raise Mix.Error, ~r/separator/, fn -> train([text | @small] ++ ["--separator", ""]) end
  end

  # ESC begins a terminal's commands, BEL rings, the others delete, return, turn the writing around, break the line.
  test "control characters of a text reach no terminal", %{tmp_dir: dir, checkpoint: checkpoint} do
    text = Path.join(dir, "controls")
    File.write!(text, String.duplicate("\e]0;title\a\b\d\r\f\v\u009b31m\u202e\u2028\u200b\0\xff ä\tß\n", 12))
    output = train([text | @small] ++ ~w(--steps 2 --sample 40 --temperature 0.9 --checkpoint #{checkpoint}))
    assert [_, sample] = String.split(output, "It writes:\n\n")
    assert sample =~ ~r/^\?\]0;title\?+31m\?+ ä\tß/
    refute String.replace(output, ["\n", "\t"], "") =~ ~r/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/u
  end

  test "resumed, prints what an uninterrupted run prints", %{text: file, checkpoint: checkpoint, tmp_dir: dir} do
    args = [file | @small] ++ ~w(--sample 40 --checkpoint-interval 2)

    ending = fn output ->
      output |> String.split("Loss, in nats") |> List.last() |> String.replace(~r/Saved in .*/, "")
    end

    whole = train(args ++ ["--steps", "6", "--checkpoint", Path.join(dir, "whole")])
    train(args ++ ["--steps", "4", "--checkpoint", checkpoint])
    resumed = train(args ++ ["--steps", "6", "--checkpoint", checkpoint])

    assert resumed =~ "Going on from step 4"
    assert ending.(resumed) == ending.(whole)
    assert File.read!(checkpoint) == File.read!(Path.join(dir, "whole"))

    # It is finished: nothing is trained any more, unless it is started anew.
    again = train(args ++ ["--steps", "6", "--checkpoint", checkpoint])
    refute again =~ "tokens/s"
    assert ending.(again) == ending.(whole)
    anew = train(args ++ ["--steps", "6", "--checkpoint", checkpoint, "--no-resume"])
    assert anew =~ "tokens/s"
    assert ending.(anew) == ending.(whole)
  end

  test "killed, loses at most what came after the last checkpoint", %{text: file, checkpoint: checkpoint} do
    args = [file | @small] ++ ~w(--steps 100000 --checkpoint-interval 3 --checkpoint #{checkpoint})

    port =
      Port.open({:spawn_executable, System.find_executable("mix")}, [
        :binary,
        :stderr_to_stdout,
        args: ["flash_attention.train" | args],
        env: [{~c"MIX_ENV", ~c"test"}]
      ])

    {:os_pid, pid} = Port.info(port, :os_pid)
    wait_for_file(checkpoint)
    System.cmd("kill", ["-9", "#{pid}"])

    {:ok, %{"step" => {:s64, {}, <<step::64-native>>}}} =
      FlashAttention.Examples.ByteModel.Checkpoint.read(checkpoint)

    assert step >= 3 and rem(step, 3) == 0

    output = train([file | @small] ++ ~w(--steps #{step + 2} --sample 0 --checkpoint #{checkpoint}))
    assert output =~ "Going on from step #{step}"
  end

  defp wait_for_file(path) do
    if !File.exists?(path) do
      Process.sleep(20)
      wait_for_file(path)
    end
  end

  test "trains on the project's own sources where no file is named", %{checkpoint: checkpoint} do
    output = train(@small ++ ~w(--steps 1 --sample 0 --checkpoint #{checkpoint}))
    assert output =~ ~r/Text:  FlashAttention's own sources, \d{6,} bytes/
    refute output =~ "It writes"
  end

  test "errors are one line", %{text: file, checkpoint: checkpoint, tmp_dir: dir} do
    File.write!(checkpoint, "no")

    for {args, message} <- [
          {["--steps", "many"], "--steps: expected a whole number, got many"},
          {["--steps", "-1"], "--steps: expected at least 0, got -1"},
          {["--batch", "0"], "--batch: expected at least 1, got 0"},
          {["--heads", "3"], "num_heads: expected a multiple of 4, for 256 logits of head_dim 64, got 3"},
          {["--head-dim", "12"], "head_dim: expected 8, 16, 32, 64, 128 or 256, got 12"},
          {["--learning-rate", "high"], "--learning-rate: expected a number, got high"},
          {["--separator", "\\x"], "--separator: expected text with escapes as in Elixir's strings, got \\x"},
          {["--device", "gpu"], "--device: expected auto, cpu, cuda or cuda:INDEX, got gpu"},
          {["--seqlen", "180"], "text: expected at least 183 bytes, seqlen and 3 more, got 180"},
          {["--checkpoint", checkpoint],
           "#{checkpoint} is not a checkpoint of this version; --no-resume starts anew, and overwrites it"},
          {["--checkpoint", ""], "--checkpoint: expected the path of a file, got an empty one"},
          {["another"], "expected at most 1 arguments, got: #{file} another"}
        ] do
      assert_raise Mix.Error, message, fn -> train([file | @small] ++ args) end
    end

    # Before the first step, not when the first checkpoint is due.
    for path <- [dir, Path.join(file, "below")] do
      assert_raise Mix.Error, ~r/^#{Regex.escape(path)} cannot be written: /, fn ->
        train([file | @small] ++ ["--steps", "100000", "--no-resume", "--checkpoint", path])
      end
    end

    missing = Path.join(dir, "missing")
    assert_raise Mix.Error, ~r/could not read file .*missing/, fn -> train([missing]) end
  end
end
