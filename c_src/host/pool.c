/* The pool: who uses which block, which blocks are idle, and how much of both there may be. */
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

/* The largest of those sizes that a block holds, numbered. */
static int size_class(size_t bytes) {
  if (bytes < 4096) return (int)(bytes / 256);
  const int exponent = 63 - __builtin_clzll(bytes);
  return 16 + (exponent - 12) * 8 + (int)(bytes >> (exponent - 3) & 7);
}

/* ---- lists, under the mutex ------------------------------------------------------------------------ */

/* Addresses of a device's blocks differ in few bits, none of them low: the product's upper bits depend on all.
 */
static fa_block **bucket_of(fa_pool *pool, const void *memory) {
  const uint64_t mixed = (uint64_t)(uintptr_t)memory * UINT64_C(0x9e3779b97f4a7c15);
  return &pool->used[mixed >> (64 - FA_POOL_BUCKET_BITS)];
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
  fa_block **first = &pool->idle[size_class(block->bytes)];
  block->next = pool->newest;
  block->next_of_size = *first;
  block->previous = block->prior_of_size = NULL;
  *(pool->newest ? &pool->newest->previous : &pool->oldest) = block;
  if (*first) (*first)->prior_of_size = block;
  pool->newest = *first = block;
  pool->idle_bytes += block->bytes;
}

static void remove_idle(fa_pool *pool, fa_block *block) {
  fa_block **first = &pool->idle[size_class(block->bytes)];
  *(block->previous ? &block->previous->next : &pool->newest) = block->next;
  *(block->next ? &block->next->previous : &pool->oldest) = block->previous;
  *(block->prior_of_size ? &block->prior_of_size->next_of_size : first) = block->next_of_size;
  if (block->next_of_size) block->next_of_size->prior_of_size = block->prior_of_size;
  pool->idle_bytes -= block->bytes;
}

/* An idle block of the smallest class that wastes no more than a quarter. */
static fa_block *find_idle(const fa_pool *pool, size_t bytes) {
  const size_t most = bytes <= SIZE_MAX / 2 ? bytes + bytes / 4 : bytes;
  for (int class = size_class(bytes); class <= size_class(most); class ++) {
    fa_block *block = pool->idle[class];
    if (block && block->bytes >= bytes && block->bytes <= most) return block;
  }
  return NULL;
}

/* What used blocks leave of the limit. */
static size_t bytes_left(const fa_pool *pool) {
  return pool->limit > pool->used_bytes ? pool->limit - pool->used_bytes : 0;
}

/* The oldest idle blocks, off their lists, but no more of them than may keep others waiting, nor than leave so
 * many bytes idle, or as many as the limit allows. */
static fa_block *detach_some(fa_pool *pool, size_t idle_bytes) {
  enum { MOST = 64 };
  fa_block *detached = NULL;
  const size_t left = bytes_left(pool), most_idle = idle_bytes < left ? idle_bytes : left;
  for (int i = 0; i < MOST && pool->idle_bytes > most_idle; i++) {
    fa_block *block = pool->oldest;
    remove_idle(pool, block);
    block->next = detached;
    detached = block;
  }
  return detached;
}

/* ---- outside the mutex, as the source may take its time -------------------------------------------- */

static bool free_blocks(fa_pool *pool, fa_block *block) {
  const bool are_there = block != NULL;
  while (block) {
    fa_block *next = block->next;
    pool->source.free(pool->source.context, block->memory);
    free(block);
    block = next;
  }
  return are_there;
}

static bool trim_some(fa_pool *pool, size_t idle_bytes) {
  pthread_mutex_lock(&pool->mutex);
  fa_block *detached = detach_some(pool, idle_bytes);
  pthread_mutex_unlock(&pool->mutex);
  return free_blocks(pool, detached);
}

void fa_pool_trim(fa_pool *pool, size_t idle_bytes) {
  while (trim_some(pool, idle_bytes)) continue;
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

/* An idle block for so many bytes, now used; or NULL, with *left what was left of the limit for a block of the
 * source, which has its place under the limit before it is there. */
static fa_block *take_idle(fa_pool *pool, size_t bytes, size_t *left) {
  pthread_mutex_lock(&pool->mutex);
  fa_block *block = pool->idle_limit > 0 ? find_idle(pool, bytes) : NULL;
  *left = bytes_left(pool);
  if (block && block->bytes <= *left) {
    remove_idle(pool, block);
    add_used(pool, block);
    pool->used_bytes += block->bytes;
  } else {
    block = NULL; /* another caller has its place, and is about to free it */
    if (bytes <= *left) pool->used_bytes += bytes;
  }
  pthread_mutex_unlock(&pool->mutex);
  return block;
}

/* A block of the source, whose place under the limit was taken for so many bytes. */
static fa_status take_new(fa_pool *pool, size_t place_bytes, size_t bytes, fa_block **taken, fa_error *error) {
  fa_pool_trim(pool, pool->idle_limit);
  fa_block *block = malloc(sizeof *block);
  fa_status status = FA_STATUS_OUT_OF_MEMORY;
  if (block) {
    block->bytes = place_bytes;
    status = ask_source(pool, block, bytes, error);
  } else {
    fa_fail_message(error, status, "", "the host's memory is used up");
  }
  pthread_mutex_lock(&pool->mutex);
  pool->used_bytes -= status ? place_bytes : place_bytes - block->bytes;
  if (!status) add_used(pool, block);
  pthread_mutex_unlock(&pool->mutex);
  *taken = block;
  if (status) free(block);
  return status;
}

fa_status fa_pool_take(fa_pool *pool, size_t bytes, void **memory, fa_error *error) {
  const size_t wanted = pool->idle_limit > 0 && bytes <= SIZE_MAX / 2 ? block_bytes(bytes) : bytes;
  size_t left;
  fa_block *block = take_idle(pool, wanted, &left);
  if (!block && wanted > left)
    return fa_fail(error, FA_STATUS_OUT_OF_MEMORY, "device", FA_TEXT("%zu bytes of memory", bytes),
                   FA_TEXT("%zu left of a limit of %zu", left, pool->limit));
  const fa_status status = block ? FA_STATUS_OK : take_new(pool, wanted, bytes, &block, error);
  if (status) return status;
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

bool fa_pool_holds(fa_pool *pool, const void *memory, size_t bytes) {
  pthread_mutex_lock(&pool->mutex);
  const fa_block *block = *bucket_of(pool, memory);
  while (block && block->memory != memory) block = block->next;
  const bool holds = block && bytes <= block->bytes;
  pthread_mutex_unlock(&pool->mutex);
  return holds;
}

void fa_pool_set_limit(fa_pool *pool, size_t limit) {
  pthread_mutex_lock(&pool->mutex);
  pool->limit = limit;
  pthread_mutex_unlock(&pool->mutex);
  fa_pool_trim(pool, SIZE_MAX);
}

void fa_pool_sizes(fa_pool *pool, size_t *used_bytes, size_t *idle_bytes, size_t *limit) {
  pthread_mutex_lock(&pool->mutex);
  *used_bytes = pool->used_bytes;
  *idle_bytes = pool->idle_bytes;
  *limit = pool->limit;
  pthread_mutex_unlock(&pool->mutex);
}
