defmodule FlashAttention.TensorTest do
  use ExUnit.Case, async: true

  alias FlashAttention.{Error, Tensor}

  doctest FlashAttention.Tensor
  doctest FlashAttention.TensorLike
  doctest FlashAttention.Error

  test "types are written in two ways" do
    for {name, type, bytes} <- [
          {:f32, {:f, 32}, 4},
          {:f64, {:f, 64}, 8},
          {:bf16, {:bf, 16}, 2},
          {:f16, {:f, 16}, 2}
        ] do
      data = :binary.copy(<<0>>, 6 * bytes)
      assert %Tensor{type: ^type} = tensor = Tensor.new(data, name, {2, 3})
      assert Tensor.new(data, type, {2, 3}) == tensor
    end
  end

  test "empty and scalar shapes" do
    assert %Tensor{shape: {0, 7}} = Tensor.new(<<>>, :f32, {0, 7})
    assert %Tensor{shape: {}} = Tensor.new(<<0::32>>, :f32, {})
  end

  test "errors name the argument" do
    for {arguments, message} <- [
          {[<<>>, :f8, {0}], "type: expected f32, f64, bf16, f16, s32, u32 or u8, got :f8"},
          {[<<>>, {:s, 64}, {0}], "type: expected f32, f64, bf16, f16, s32, u32 or u8, got {:s, 64}"},
          {[<<>>, :f32, [0]], "shape: expected a tuple of sizes, got [0]"},
          {[<<>>, :f32, {0, -1}], "shape: expected a tuple of sizes, got {0, -1}"},
          {[<<>>, :f32, {0, 1.5}], "shape: expected a tuple of sizes, got {0, 1.5}"},
          {[[0], :f32, {1}], "data: expected a binary, got [0]"},
          {[<<0::31>>, :f32, {1}], "data: expected a binary, got <<0, 0, 0, 0::size(7)>>"},
          {[<<0::24>>, :f32, {1}], "data: expected 4 bytes for shape {1} of type f32, got 3"},
          {[<<0::40>>, :bf16, {1, 2}], "data: expected 4 bytes for shape {1, 2} of type bf16, got 5"}
        ] do
      assert_raise Error, message, fn -> apply(Tensor, :new, arguments) end
    end
  end
end
