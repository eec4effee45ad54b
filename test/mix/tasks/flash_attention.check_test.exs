defmodule Mix.Tasks.FlashAttention.CheckTest do
  use ExUnit.Case

  alias Mix.Tasks.FlashAttention.Check

  setup do
    Mix.shell(Mix.Shell.Process)
    on_exit(fn -> Mix.shell(Mix.Shell.IO) end)
  end

  test "prints a line for every check and type" do
    Check.run(["--device", "cpu", "--seed", "1"])
    assert_received {:mix_shell, :info, [table]}

    for check <- ["forward, against float64", "backward, against float64"],
        type <- ~w(f32 f64 bf16 f16),
        do: assert(table =~ ~r/^#{check} +#{type} +13 +0\.\d\d +\w/m)

    for check <- ["backward, against differences", "backward, against d\\(forward\\)"],
        do: assert(table =~ ~r/^#{check} +f64 +13 +0\.\d\d +\w/m)

    assert table =~ ~r/\d+ passed, 0 failed, 0 not supported, on cpu$/
    assert Enum.all?(String.split(table, "\n"), &(String.length(&1) <= 90))
    refute_received {:mix_shell, :error, _}
  end

  test "an error of any size has its place in the table" do
    result = %{check: :forward, case: "causal", type: {:f, 64}, device: {:cpu, 0}, tensor: :o, outcome: :failed}

    for {error, allowed, worst} <- [
          {2.0e-3, 1.0e-6, "2000.00"},
          {3.0e38, 1.0e-7, "3e+45"},
          {1.0e300, 1.0e-15, "inf"},
          {0.5, 0.0, "inf"},
          {:infinity, 1.0e-6, "inf"}
        ] do
      table = Check.table([Map.merge(result, %{error: error, allowed: allowed})])
      assert table =~ ~r/^forward, against float64 +f64 +1 +#{Regex.escape(worst)} *o, causal$/m
    end
  end

  test "refuses what it does not know" do
    for {args, message} <- [
          {["--device", "tpu"], "--device: expected auto, cpu, cuda or cuda:INDEX, got tpu"},
          {["--device", "cuda:x"], "--device: expected auto, cpu, cuda or cuda:INDEX, got cuda:x"},
          {["--seed", "x"], "--seed: expected a whole number, got x"},
          {["--seed"], "--seed: expected a value"},
          {["--fast"], "--fast: expected one of --device, --seed"},
          {["now"], "expected at most 0 arguments, got: now"}
        ] do
      assert_raise Mix.Error, message, fn -> Check.run(args) end
    end
  end

  test "ends with a line where the device is missing" do
    if FlashAttention.backend_info().cuda do
      assert_raise Mix.Error, ~r/^device: /, fn -> Check.run(["--device", "cuda"]) end
    end
  end
end
