defmodule FlashAttention.SeveralGPUsTest do
  # Calls that GPUs divide among them, beside one GPU: on a machine with two of them, or more.
  use ExUnit.Case
  @moduletag :cuda
  @moduletag :several_gpus

  import FlashAttention.Test.Tensors

  test "work on the second GPU makes no context on the first" do
    # In a VM of its own, as this one may have used both.
    code = """
    one = FlashAttention.Tensor.new(<<1.0::float-32-native>>, :f32, {1, 1, 1, 1})
    {:ok, _o} = FlashAttention.forward(one, one, one, device: {:cuda, 1})
    {pids, 0} = System.cmd("nvidia-smi", ["-i", "0", "--query-compute-apps=pid", "--format=csv,noheader"])
    IO.write(if String.contains?(pids, System.pid()), do: "both", else: "one")
    """

    paths = Enum.flat_map(:code.get_path(), &["-pa", List.to_string(&1)])
    assert {output, 0} = System.cmd("elixir", paths ++ ["-e", code], stderr_to_stdout: true)
    assert String.ends_with?(output, "one"), output
  end

  test "all GPUs give the bits of one" do
    for type <- [:f32, :bf16],
        {sizes, opts} <- [
          {{4, 1024, 1024, 4, 2, 64}, []},
          {{1, 2048, 2048, 8, 4, 128}, sink: 2},
          {{5, 300, 700, 2, 1, 80}, causal: false},
          {{1, 77, 77, 1, 1, 16}, []}
        ] do
      %{q: q, k: k, v: v, dout: dout, opts: opts} = problem(1, type, sizes, opts)
      one = [device: {:cuda, 0}, deterministic: true] ++ opts
      all = [device: :all, deterministic: true] ++ opts
      {:ok, o, lse} = FlashAttention.forward_with_states(q, k, v, one)
      assert {:ok, ^o, ^lse} = FlashAttention.forward_with_states(q, k, v, all)
      gradients = FlashAttention.backward(dout, q, k, v, o, lse, one)
      assert FlashAttention.backward(dout, q, k, v, o, lse, all) == gradients
    end
  end

  test "what stays on a device stays on one" do
    one = random(1, :f32, {1, 4, 2, 8})

    for opts <- [[keep: :device], [results: :device]] do
      assert {:error, error} = FlashAttention.forward_with_states(one, one, one, [device: :all] ++ opts)
      assert Exception.message(error) =~ "device: expected one device where something stays on it"
    end
  end
end
