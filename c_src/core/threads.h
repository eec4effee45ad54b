/*
 * The threads of the library: one pool for the whole process, which every call shares.
 *
 * Not OpenMP, whose run-time library ends the process where it cannot start a thread, keeps a team of threads
 * for every thread that ever called (a VM has many), and lets idle ones spin.
 */
#ifndef FA_CORE_THREADS_H
#define FA_CORE_THREADS_H

#include <stdint.h>

/* The processors that this process may run on. */
int fa_num_processors(void);

/* Calls run_task(context, task, worker) for every task from 0 to num_tasks - 1, on the calling thread and up to
 * num_threads - 1 others, and returns when all have ended. Tasks start in order. worker, from 0 to num_threads
 * - 1, tells the threads of one call apart. Where a thread cannot be started, the others do its work. For
 * awake_microseconds after it the others, giving way to whoever wants to run, look for a next call before they
 * sleep: where one comes soon, as a processor that sleeps takes some 0.1 ms to wake up. */
void fa_parallel_for(int num_threads, int awake_microseconds, int64_t num_tasks,
                     void (*run_task)(void *context, int64_t task, int worker), void *context);

#endif
