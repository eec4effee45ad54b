/* Packing halves the bytes of f32 tensors for kernels that round them to f16 anyway (FA_PRECISION_DEFAULT). A
 * packed row of a head is head_dim numbers of f16, scaled by a power of two so that the largest finite one is
 * in [2^14, 2^15), and behind them the f32 that takes the scale away again. Unpacked numbers have f16's 11
 * bits; those below 2^-28 of their row's largest have fewer, as they have in those kernels. */
#ifndef FA_HOST_PACK_H
#define FA_HOST_PACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Whether this processor packs rows of so many numbers as fast as it copies them. */
bool fa_can_pack(int64_t head_dim);

/* The size of a packed row of a head, a multiple of 4. */
size_t fa_packed_bytes(int64_t head_dim);

/* Packs from, which is f32 [num_rows, head_dim], into num_rows times fa_packed_bytes. Neither need be aligned.
 * Only where fa_can_pack says so. */
void fa_pack(char *to, const char *from, size_t num_rows, int64_t head_dim);

#endif
