// Empty tables, while Hopper's kernels are not emulated.
#include "../../cuda/kernels.h"

#define NONE(name) extern "C" const fa_cuda_kernel name[] = {{}};
NONE(fa_hopper_forward_bf16)
NONE(fa_hopper_backward_bf16)
NONE(fa_hopper_forward_f16)
NONE(fa_hopper_backward_f16)
NONE(fa_hopper_backward_wide_bf16)
NONE(fa_hopper_backward_wide_f16)
NONE(fa_hopper_forward_f32)
NONE(fa_hopper_backward_f32)
NONE(fa_hopper_forward_f32_as_f16)
NONE(fa_hopper_backward_f32_as_f16)
