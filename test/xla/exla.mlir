module {
  func.func public @main(%arg0: tensor<8xui8>, %arg1: tensor<2x4x12x8xf32>, %arg2: tensor<2x2x12x8xf32>, %arg3: tensor<2x2x12x8xf32>, %arg4: tensor<2x4xf32>, %arg5: tensor<2x4x12x8xf32>) -> (tensor<f32>, tensor<2x4x12x8xf32>, tensor<2x2x12x8xf32>, tensor<2x2x12x8xf32>, tensor<2x4xf32>) {
    %0 = "stablehlo.transpose"(%arg1) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<2x4x12x8xf32>) -> (tensor<2x12x4x8xf32>)
    %1 = "stablehlo.transpose"(%arg2) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<2x2x12x8xf32>) -> (tensor<2x12x2x8xf32>)
    %2 = "stablehlo.transpose"(%arg3) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<2x2x12x8xf32>) -> (tensor<2x12x2x8xf32>)
    %3, %4 = "stablehlo.custom_call"(%0, %1, %2, %arg4) {backend_config = {scale = 0 : i64, window_left = 5 : i64, window_right = 0 : i64, softcap = 3.5 : f64, precision = "highest", deterministic = "false"}, call_target_name = "flash_attention_forward", api_version = 4 : i32} : (tensor<2x12x4x8xf32>, tensor<2x12x2x8xf32>, tensor<2x12x2x8xf32>, tensor<2x4xf32>) -> (tensor<2x12x4x8xf32>, tensor<2x4x12xf32>)
    %5 = "stablehlo.transpose"(%3) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<2x12x4x8xf32>) -> (tensor<2x4x12x8xf32>)
    %6 = "stablehlo.multiply"(%5, %arg5) : (tensor<2x4x12x8xf32>, tensor<2x4x12x8xf32>) -> (tensor<2x4x12x8xf32>)
    %7 = "stablehlo.constant"() {value = dense<0x00000000> : tensor<f32>} : () -> (tensor<f32>)
    %11 = "stablehlo.reduce"(%6, %7) ({
^block8(%8: tensor<f32>, %9: tensor<f32>):
    %10 = "stablehlo.add"(%9, %8) : (tensor<f32>, tensor<f32>) -> (tensor<f32>)
    "stablehlo.return"(%10) : (tensor<f32>) -> ()
}) {dimensions = array<i64: 0, 1, 2, 3>} : (tensor<2x4x12x8xf32>, tensor<f32>) -> (tensor<f32>)
    %12 = "stablehlo.transpose"(%arg5) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<2x4x12x8xf32>) -> (tensor<2x12x4x8xf32>)
    %13, %14, %15, %16 = "stablehlo.custom_call"(%12, %0, %1, %2, %3, %4, %arg4) {backend_config = {scale = 0 : i64, window_left = 5 : i64, window_right = 0 : i64, softcap = 3.5 : f64, precision = "highest", deterministic = "false"}, call_target_name = "flash_attention_backward", api_version = 4 : i32} : (tensor<2x12x4x8xf32>, tensor<2x12x4x8xf32>, tensor<2x12x2x8xf32>, tensor<2x12x2x8xf32>, tensor<2x12x4x8xf32>, tensor<2x4x12xf32>, tensor<2x4xf32>) -> (tensor<2x12x4x8xf32>, tensor<2x12x2x8xf32>, tensor<2x12x2x8xf32>, tensor<2x4xf32>)
    %17 = "stablehlo.transpose"(%13) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<2x12x4x8xf32>) -> (tensor<2x4x12x8xf32>)
    %18 = "stablehlo.transpose"(%14) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<2x12x2x8xf32>) -> (tensor<2x2x12x8xf32>)
    %19 = "stablehlo.transpose"(%15) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<2x12x2x8xf32>) -> (tensor<2x2x12x8xf32>)
    "func.return"(%11, %17, %18, %19, %16) : (tensor<f32>, tensor<2x4x12x8xf32>, tensor<2x2x12x8xf32>, tensor<2x2x12x8xf32>, tensor<2x4xf32>) -> ()
  }
}
