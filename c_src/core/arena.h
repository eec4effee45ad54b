/* One piece of memory handed out in parts, and the one way in which workspaces are laid out: a function that
 * takes the parts from an arena runs twice, without memory to measure and with memory to place, so that the two
 * cannot disagree. */
#ifndef FA_CORE_ARENA_H
#define FA_CORE_ARENA_H

#include <stddef.h>
#include <stdint.h>

/* Every part begins at a multiple of this from the base: no two parts share a cache line or a GPU's memory
 * transaction. */
enum { FA_ARENA_ALIGNMENT = 256 };

/* base NULL: the arena only measures. */
typedef struct fa_arena {
  char *base;
  size_t used; /* SIZE_MAX where the parts are more than memory could ever hold */
} fa_arena;

/* A part of count elements of so many bytes each, or NULL from an arena that measures. */
static inline void *fa_take(fa_arena *arena, int64_t count, size_t element_bytes) {
  void *part = arena->base ? arena->base + arena->used : NULL;
  size_t bytes, end;
  if (__builtin_mul_overflow((uint64_t)count, element_bytes, &bytes) ||
      __builtin_add_overflow(bytes, (size_t)(FA_ARENA_ALIGNMENT - 1), &bytes) ||
      __builtin_add_overflow(arena->used, bytes / FA_ARENA_ALIGNMENT * FA_ARENA_ALIGNMENT, &end))
    end = SIZE_MAX;
  arena->used = end;
  return part;
}

#endif
