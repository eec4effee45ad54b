#include "pool.h"

#include <stdlib.h>
#include <string.h>

#include "../core/error.h"

void fa_pool_init(fa_pool *pool, fa_source source, size_t limit, size_t idle_limit) {
  memset(pool, 0, sizeof *pool);
  pthread_mutex_init(&pool->mutex, NULL);
  pool->source = source;
  pool->limit = limit;
  pool->idle_limit = idle_limit;
}

/* Sizes with three bits after the leading one: at most an eighth more than asked, and seldom unlike another. */
static size_t block_bytes(size_t bytes) {
  size_t step = 256;
  while (step <= bytes / 16) step *= 2;
  return (bytes + step - 1) & ~(step - 1);
}

/* ---- lists, under the mutex ------------------------------------------------------------------------ */

static fa_block **bucket_of(fa_pool *pool, const void *memory) {
  return &pool->used[((uintptr_t)memory >> 8) % FA_POOL_BUCKETS];
}

static void add_used(fa_pool *pool, fa_block *block) {
  fa_block **bucket = bucket_of(pool, block->memory);
  block->next = *bucket;
  *bucket = block;
}

static fa_block *remove_used(fa_pool *pool, const void *memory) {
  fa_block **link = bucket_of(pool, memory);
  while (*link && (*link)->memory != memory) link = &(*link)->next;
  fa_block *block = *link;
  if (block) *link = block->next;
  return block;
}

static void add_idle(fa_pool *pool, fa_block *block) {
  block->next = pool->newest;
  block->previous = NULL;
  *(pool->newest ? &pool->newest->previous : &pool->oldest) = block;
  pool->newest = block;
  pool->idle_bytes += block->bytes;
}

static void remove_idle(fa_pool *pool, fa_block *block) {
  *(block->previous ? &block->previous->next : &pool->newest) = block->next;
  *(block->next ? &block->next->previous : &pool->oldest) = block->previous;
  pool->idle_bytes -= block->bytes;
}

/* The smallest idle block that wastes no more than a quarter. */
static fa_block *find_idle(const fa_pool *pool, size_t bytes) {
  fa_block *best = NULL;
  for (fa_block *block = pool->newest; block; block = block->next)
    if (block->bytes >= bytes && block->bytes - bytes <= bytes / 4 && (!best || block->bytes < best->bytes))
      best = block;
  return best;
}

/* Takes the oldest idle blocks off their list until at most so many bytes are left there. */
static fa_block *detach_idle(fa_pool *pool, size_t idle_bytes) {
  fa_block *detached = NULL;
  while (pool->idle_bytes > idle_bytes) {
    fa_block *block = pool->oldest;
    remove_idle(pool, block);
    block->next = detached;
    detached = block;
  }
  return detached;
}

/* ---- outside the mutex, as the source may take its time -------------------------------------------- */

static void free_blocks(fa_pool *pool, fa_block *block) {
  while (block) {
    fa_block *next = block->next;
    pool->source.free(pool->source.context, block->memory);
    free(block);
    block = next;
  }
}

void fa_pool_trim(fa_pool *pool, size_t idle_bytes) {
  pthread_mutex_lock(&pool->mutex);
  fa_block *detached = detach_idle(pool, idle_bytes);
  pthread_mutex_unlock(&pool->mutex);
  free_blocks(pool, detached);
}

/* Where the source has too little for the block, once more without idle blocks, and for no more than was asked.
 */
static fa_status ask_source(fa_pool *pool, fa_block *block, size_t bytes, fa_error *error) {
  fa_status status = pool->source.alloc(pool->source.context, block->bytes, &block->memory, error);
  if (status != FA_STATUS_OUT_OF_MEMORY) return status;
  fa_pool_trim(pool, 0);
  block->bytes = bytes;
  return pool->source.alloc(pool->source.context, block->bytes, &block->memory, error);
}

/* What idle blocks leave of a limit. */
static size_t left_of(size_t limit, size_t used_bytes) { return limit > used_bytes ? limit - used_bytes : 0; }

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

fa_status fa_pool_take(fa_pool *pool, size_t bytes, void **memory, fa_error *error) {
  const bool caches = pool->idle_limit > 0;
  const size_t wanted = caches && bytes <= SIZE_MAX / 2 ? block_bytes(bytes) : bytes;
  pthread_mutex_lock(&pool->mutex);
  fa_block *block = caches ? find_idle(pool, wanted) : NULL, *detached = NULL;
  const bool found = block != NULL;
  const size_t left = left_of(pool->limit, pool->used_bytes);
  const bool fits = found || wanted <= left;
  if (found) {
    remove_idle(pool, block);
    add_used(pool, block);
    pool->used_bytes += block->bytes;
  } else if (fits) {
    detached = detach_idle(pool, smaller(pool->idle_limit, left - wanted));
    pool->used_bytes += wanted; /* its place under the limit, before it is there */
  }
  pthread_mutex_unlock(&pool->mutex);
  free_blocks(pool, detached);
  if (found) return *memory = block->memory, fa_succeed(error);
  if (!fits)
    return fa_fail(error, FA_STATUS_OUT_OF_MEMORY, "device", FA_TEXT("%zu bytes of memory", bytes),
                   FA_TEXT("%zu left of a limit of %zu", left, pool->limit));

  fa_status status = FA_STATUS_OUT_OF_MEMORY;
  block = malloc(sizeof *block);
  if (block) {
    block->bytes = wanted;
    status = ask_source(pool, block, bytes, error);
  } else {
    fa_fail_message(error, status, "", "the host's memory is used up");
  }
  pthread_mutex_lock(&pool->mutex);
  pool->used_bytes -= status ? wanted : wanted - block->bytes;
  if (!status) add_used(pool, block);
  pthread_mutex_unlock(&pool->mutex);
  if (status) return free(block), status;
  *memory = block->memory;
  return fa_succeed(error);
}

bool fa_pool_give(fa_pool *pool, void *memory) {
  pthread_mutex_lock(&pool->mutex);
  fa_block *block = remove_used(pool, memory);
  if (block) {
    pool->used_bytes -= block->bytes;
    add_idle(pool, block);
  }
  pthread_mutex_unlock(&pool->mutex);
  return block != NULL;
}

void fa_pool_set_limit(fa_pool *pool, size_t limit) {
  pthread_mutex_lock(&pool->mutex);
  pool->limit = limit;
  fa_block *detached = detach_idle(pool, left_of(limit, pool->used_bytes));
  pthread_mutex_unlock(&pool->mutex);
  free_blocks(pool, detached);
}

void fa_pool_sizes(fa_pool *pool, size_t *used_bytes, size_t *idle_bytes, size_t *limit) {
  pthread_mutex_lock(&pool->mutex);
  *used_bytes = pool->used_bytes;
  *idle_bytes = pool->idle_bytes;
  *limit = pool->limit;
  pthread_mutex_unlock(&pool->mutex);
}
