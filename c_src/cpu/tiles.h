/* AMX: products of tiles of bf16, 16 rows of 16 operands (pairs of numbers) each, by a unit beside the vector
 * registers. FA_EMULATED_TILES: the same on arrays, for tests on processors that lack it. */
#ifndef FA_CPU_TILES_H
#define FA_CPU_TILES_H

#include <stdint.h>
#include <string.h>

enum { TILE = 16 }; /* rows; and 32-bit numbers or operands of a row */

#if !defined(FA_EMULATED_TILES)

#include <immintrin.h>

/* A thread calls them before its first tile and after its last one, which the system then need not save. */
static inline void tiles_begin(void) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } layout __attribute__((aligned(64))) = {.palette = 1};
  for (int i = 0; i < 8; i++) layout.row_bytes[i] = TILE * 4, layout.rows[i] = TILE;
  _tile_loadconfig(&layout);
}
static inline void tiles_end(void) { _tile_release(); }

#define TILE_ZERO(i)             _tile_zero(i)
#define TILE_LOAD(i, from, step) _tile_loadd(i, from, (size_t)(step)*4)
#define TILE_STORE(i, to, step)  _tile_stored(i, to, (size_t)(step)*4)
#define TILE_MULTIPLY(c, a, b)   _tile_dpbf16ps(c, a, b)

#else

static _Thread_local uint32_t emulated_tiles[8][TILE][TILE];

static inline void tiles_begin(void) {}
static inline void tiles_end(void) {}
static inline void emulated_load(int i, const void *from, int64_t step) {
  for (int r = 0; r < TILE; r++) memcpy(emulated_tiles[i][r], (const uint32_t *)from + r * step, TILE * 4);
}
static inline void emulated_store(int i, void *to, int64_t step) {
  for (int r = 0; r < TILE; r++) memcpy((uint32_t *)to + r * step, emulated_tiles[i][r], TILE * 4);
}
static inline float emulated_number(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
/* Sums of the first numbers' products and of the second ones' apart, which are added to c together. */
static inline void emulated_multiply(int c, int a, int b) {
  for (int r = 0; r < TILE; r++)
    for (int x = 0; x < TILE; x++) {
      float first = 0, second = 0;
      for (int p = 0; p < TILE; p++) {
        const uint32_t left = emulated_tiles[a][r][p], right = emulated_tiles[b][p][x];
        first = __builtin_fmaf(emulated_number(left << 16), emulated_number(right << 16), first);
        second =
            __builtin_fmaf(emulated_number(left & 0xffff0000u), emulated_number(right & 0xffff0000u), second);
      }
      const float sum = emulated_number(emulated_tiles[c][r][x]) + (first + second);
      memcpy(&emulated_tiles[c][r][x], &sum, sizeof sum);
    }
}
#define TILE_ZERO(i)             memset(emulated_tiles[i], 0, sizeof emulated_tiles[i])
#define TILE_LOAD(i, from, step) emulated_load(i, from, step)
#define TILE_STORE(i, to, step)  emulated_store(i, to, step)
#define TILE_MULTIPLY(c, a, b)   emulated_multiply(c, a, b)

#endif

#endif
