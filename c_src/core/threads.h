/*
 * The threads of the library: one pool for the whole process, which every call shares.
 *
 * Not OpenMP, whose run-time library ends the process where it cannot start a thread, keeps a team of threads
 * for every thread that ever called (a VM has many), and lets idle ones spin.
 *
 * They are the process's, not the first caller's: they run on the processors of its first thread, at its
 * priority, and take no signals.
 */
#ifndef FA_CORE_THREADS_H
#define FA_CORE_THREADS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Guards the pool. It is here for a test that forks while it is held. */
extern pthread_mutex_t fa_threads_mutex;

/* See fa_set_gives_way; tasks look at it. */
extern atomic_bool fa_gives_way;

/* Tasks under way; its caller keeps it where it is until they have ended. */
typedef struct fa_parallel {
  void (*run_task)(void *context, int64_t task, int worker);
  void *context;
  int64_t num_tasks;
  _Atomic int64_t next_task;
  int awake_microseconds;
  int num_threads;       /* at most, the caller among them */
  int num_wanted;        /* threads of the pool that may still join */
  int num_joined;        /* that did, ever: the last one's worker number */
  atomic_int num_active; /* that are at work now; read without the mutex, too */
  bool is_shared;        /* with threads of the pool */
  bool is_divided;       /* see fa_parallel_share */
  pthread_cond_t all_left;
  struct fa_parallel *next;
} fa_parallel;

/* Has run_task(context, task, worker) called for every task from 0 to num_tasks - 1 by up to num_threads - 1
 * threads, while the caller does something else, or helps. Tasks start in order. worker, from 0 (the caller) to
 * num_threads - 1, tells the threads apart. Where a thread cannot be started, the others do its work. For
 * awake_microseconds after it the others, giving way to whoever wants to run, look for a next call before they
 * sleep: where one comes soon, as a processor that sleeps takes some 0.1 ms to wake up. */
void fa_parallel_begin(fa_parallel *parallel, int num_threads, int awake_microseconds, int64_t num_tasks,
                       void (*run_task)(void *context, int64_t task, int worker), void *context);

/* The caller runs the next task; false: all have started. */
bool fa_parallel_help(fa_parallel *parallel);

/* Returns when all tasks have ended; the caller helps. */
void fa_parallel_end(fa_parallel *parallel);

/* From beginning to end. */
void fa_parallel_for(int num_threads, int awake_microseconds, int64_t num_tasks,
                     void (*run_task)(void *context, int64_t task, int worker), void *context);

/* The same for tasks that keep processors busy: of n that are under way at a time, threads join each only up to
 * num_threads / n. When one ends, the others get more. */
void fa_parallel_share(int num_threads, int awake_microseconds, int64_t num_tasks,
                       void (*run_task)(void *context, int64_t task, int worker), void *context);

#endif
