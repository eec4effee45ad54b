/* Memory that is slow to take, kept at hand: a cache of blocks between callers and a source.
 *
 * Callers give blocks back where nothing may wait, as in destructors of a VM. So whatever holds the mutex does
 * a bounded number of steps: used blocks are found by a hash of their address, idle ones by their size, and
 * blocks on their way to the source leave the pool a few at a time. */
#ifndef FA_HOST_POOL_H
#define FA_HOST_POOL_H

#include <pthread.h>

#include "../flash_attention.h"

enum {
  FA_POOL_BUCKET_BITS = 12, /* 32,768 blocks are 8 a bucket */
  FA_POOL_BUCKETS = 1 << FA_POOL_BUCKET_BITS,
  FA_POOL_SIZE_CLASSES = 432 /* of idle blocks: eight in every power of two */
};

typedef struct fa_block {
  void *memory;
  size_t bytes;
  struct fa_block *next, *previous;              /* in its bucket of used blocks, or in the list of idle ones */
  struct fa_block *next_of_size, *prior_of_size; /* in the list of idle ones of its size class */
} fa_block;

/* Where the memory comes from: slow, and thread-safe. */
typedef struct fa_source {
  fa_status (*alloc)(const void *context, size_t bytes, void **memory, fa_error *error);
  void (*free)(const void *context, void *memory);
  const void *context;
} fa_source;

/* Zero-initialise, then call fa_pool_init. */
typedef struct fa_pool {
  pthread_mutex_t mutex;
  fa_source source;
  size_t limit;      /* of used and idle bytes */
  size_t idle_limit; /* of idle bytes alone; 0: every block is the source's, of exactly the size asked for */
  size_t used_bytes, idle_bytes;
  fa_block *used[FA_POOL_BUCKETS];
  fa_block *newest, *oldest; /* idle */
  fa_block *idle[FA_POOL_SIZE_CLASSES];
} fa_pool;

void fa_pool_init(fa_pool *pool, fa_source source, size_t limit, size_t idle_limit);

/* A block of at least so many bytes: an idle one of about that size, or the source's. Where the source has none
 * left, idle blocks go back to it first. */
fa_status fa_pool_take(fa_pool *pool, size_t bytes, void **memory, fa_error *error);

/* Makes a block idle. Never calls the source: it may be called where nothing may wait. False where the pool
 * does not know the block. */
bool fa_pool_give(fa_pool *pool, void *memory);

/* Whether so many bytes from there on are a used block's, which begins there. */
bool fa_pool_holds(fa_pool *pool, const void *memory, size_t bytes);

/* Returns the idle blocks given longest ago to the source until at most so many idle bytes are left. */
void fa_pool_trim(fa_pool *pool, size_t idle_bytes);

void fa_pool_set_limit(fa_pool *pool, size_t limit);
void fa_pool_sizes(fa_pool *pool, size_t *used_bytes, size_t *idle_bytes, size_t *limit);

#endif
