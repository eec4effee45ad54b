/* f32 tensors in half the bytes, for kernels that round them to f16 anyway (FA_PRECISION_DEFAULT): each row of
 * a head as head_dim numbers of f16, scaled by a power of two so that the largest finite one is in
 * [2^14, 2^15), and behind them the f32 that takes the scale away again. What comes back has f16's 11 bits,
 * but for numbers below 2^-28 of their row's largest, which lose some as they do in those kernels. */
#ifndef FA_HOST_PACK_H
#define FA_HOST_PACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Whether rows of so many numbers can be packed here, as fast as copied. */
bool fa_can_pack(int64_t head_dim);

/* Of a row of a head; a multiple of 4. */
size_t fa_packed_bytes(int64_t head_dim);

/* to: num_rows times fa_packed_bytes; from: f32 [num_rows, head_dim]. Neither need be aligned. */
void fa_pack(char *to, const char *from, size_t num_rows, int64_t head_dim);

#endif
