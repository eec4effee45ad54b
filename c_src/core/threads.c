/* The pool: threads that wait for jobs, and the jobs that they may join. */
#include "threads.h"

#include <fenv.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <sys/resource.h>
#include <unistd.h>

#include "../flash_attention.h"
#include "clock.h"
#include "processors.h"

#define MAX_THREADS               1024
#define CALLER_AWAKE_MICROSECONDS 100

pthread_mutex_t fa_threads_mutex = PTHREAD_MUTEX_INITIALIZER;

atomic_bool fa_gives_way;
void fa_set_gives_way(int32_t gives_way) { atomic_store(&fa_gives_way, gives_way != 0); }

/* Guarded by the mutex; jobs are those that may be joined. */
static struct {
  pthread_cond_t job_came;
  fa_parallel *jobs;
  pthread_t threads[MAX_THREADS];
  int num_threads;
  atomic_long num_calls; /* for threads, ever; read without the mutex, too */
#if defined(__linux__)
  cpu_set_t processors; /* of all threads */
#endif
} pool = {.job_came = PTHREAD_COND_INITIALIZER};

static bool run_next_task(fa_parallel *job, int worker) {
  const int64_t task = atomic_fetch_add(&job->next_task, 1);
  if (task >= job->num_tasks) return false;
  job->run_task(job->context, task, worker);
  return true;
}

static void run_tasks(fa_parallel *job, int worker) {
  while (run_next_task(job, worker)) continue;
}

/* Callers may flush denormals to 0, as XLA's threads do, or round otherwise. Tasks compute the same on every
 * thread. */
static void run_callers_tasks(fa_parallel *job) {
  fenv_t callers;
  fegetenv(&callers);
  fesetenv(FE_DFL_ENV);
  run_tasks(job, 0);
  fesetenv(&callers);
}

/* How many threads of the pool would join the job now. */
static int num_missing(const fa_parallel *job) {
  int num_sharing = 0;
  for (const fa_parallel *other = pool.jobs; other; other = other->next) num_sharing += other->is_divided;
  const int most = job->is_divided ? job->num_threads / num_sharing : job->num_threads;
  const int missing = most - 1 - job->num_active;
  return missing < job->num_wanted ? missing : job->num_wanted;
}

/* The job with the fewest threads of the pool among those that want more. */
static fa_parallel *find_job(void) {
  fa_parallel *found = NULL;
  for (fa_parallel *job = pool.jobs; job; job = job->next)
    if ((!found || job->num_active < found->num_active) && num_missing(job) > 0) found = job;
  return found;
}

static void wake_threads(int count) {
  if (count > 0) atomic_fetch_add(&pool.num_calls, 1);
  for (int i = 0; i < count; i++) pthread_cond_signal(&pool.job_came);
}

/* Awake at first, without the mutex, and then asleep. */
static void wait_for_job(int awake_microseconds) {
  const long seen = atomic_load(&pool.num_calls);
  if (awake_microseconds > 0) {
    const int64_t until = fa_nanoseconds() + awake_microseconds * INT64_C(1000);
    pthread_mutex_unlock(&fa_threads_mutex);
    while (atomic_load(&pool.num_calls) == seen && fa_nanoseconds() < until) sched_yield();
    pthread_mutex_lock(&fa_threads_mutex);
  }
  if (atomic_load(&pool.num_calls) == seen) pthread_cond_wait(&pool.job_came, &fa_threads_mutex);
}

/* A thread begins with the priority of the caller that started it. Where this may not be raised again, it
 * stays. */
static void take_process_priority(void) {
#if defined(__linux__)
  const int policy = sched_getscheduler(getpid());
  const bool is_ordinary = policy == SCHED_OTHER || policy == SCHED_BATCH || policy == SCHED_IDLE;
  sched_setscheduler(0, is_ordinary ? policy : SCHED_OTHER, &(struct sched_param){0});
  setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, (id_t)getpid()));
#endif
}

static void *thread_main(void *unused) {
  (void)unused;
  take_process_priority();
  fesetenv(FE_DFL_ENV);       /* it begins with that of the caller that started it, too */
  int awake_microseconds = 0; /* after the last fa_parallel */
  pthread_mutex_lock(&fa_threads_mutex);
  for (;;) {
    fa_parallel *job = find_job();
    if (!job) {
      wait_for_job(awake_microseconds);
      awake_microseconds = 0;
      continue;
    }
    awake_microseconds = job->awake_microseconds;
    job->num_wanted--;
    job->num_active++;
    int worker = ++job->num_joined;
    pthread_mutex_unlock(&fa_threads_mutex);
    run_tasks(job, worker);
    pthread_mutex_lock(&fa_threads_mutex);
    if (--job->num_active == 0) pthread_cond_signal(&job->all_left);
  }
  return NULL;
}

/* After a fork the child has the memory of the threads, but not the threads, and of the mutex, which another
 * thread may have held. */
static void forget_threads(void) {
  pthread_mutex_init(&fa_threads_mutex, NULL);
  pthread_cond_init(&pool.job_came, NULL);
  pool.jobs = NULL;
  pool.num_threads = 0;
}

/* When the library is loaded: later, a fork could come first. */
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_threads); }

/* A thread would run for good where the caller that started it may: it runs where the process may. */
static void set_processors(pthread_t thread) {
#if defined(__linux__)
  if (CPU_COUNT(&pool.processors) > 0) pthread_setaffinity_np(thread, sizeof pool.processors, &pool.processors);
#else
  (void)thread;
#endif
}

static void follow_process(void) {
#if defined(__linux__)
  cpu_set_t now;
  if (!fa_get_processors(&now) || CPU_EQUAL(&now, &pool.processors)) return;
  pool.processors = now;
  for (int i = 0; i < pool.num_threads; i++) set_processors(pool.threads[i]);
#endif
}

/* Grows the pool; a thread that cannot be started is done without. Signals are for the host program's threads.
 */
static void start_threads(int num_threads) {
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  while (pool.num_threads < num_threads && pool.num_threads < MAX_THREADS) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, thread_main, NULL) != 0) break;
    pthread_detach(thread);
    set_processors(thread);
    pool.threads[pool.num_threads++] = thread;
  }
  pthread_sigmask(SIG_SETMASK, &old, NULL);
}

static void offer(fa_parallel *job) {
  pthread_mutex_lock(&fa_threads_mutex);
  follow_process();
  job->next = pool.jobs;
  pool.jobs = job;
  const int missing = num_missing(job);
  if (pool.num_threads < missing) start_threads(missing);
  wake_threads(missing);
  pthread_mutex_unlock(&fa_threads_mutex);
}

/* Each thread that is at work has one task left. Whoever sleeps until they have ended takes longer to wake up
 * than most of these take, so the caller stays awake for a while, without the mutex. */
static void wait_awake(fa_parallel *job) {
  const int64_t until = fa_nanoseconds() + CALLER_AWAKE_MICROSECONDS * INT64_C(1000);
  pthread_mutex_unlock(&fa_threads_mutex);
  while (atomic_load(&job->num_active) > 0 && fa_nanoseconds() < until) sched_yield();
  pthread_mutex_lock(&fa_threads_mutex);
}

static void withdraw(fa_parallel *job) {
  pthread_mutex_lock(&fa_threads_mutex);
  fa_parallel **link = &pool.jobs;
  while (*link != job) link = &(*link)->next;
  *link = job->next;
  if (job->is_divided)
    for (fa_parallel *other = pool.jobs; other; other = other->next)
      if (other->is_divided) wake_threads(num_missing(other));
  if (job->num_active > 0) wait_awake(job);
  while (job->num_active > 0) pthread_cond_wait(&job->all_left, &fa_threads_mutex);
  pthread_mutex_unlock(&fa_threads_mutex);
}

static void begin(fa_parallel *parallel) {
  if (parallel->num_threads > parallel->num_tasks) parallel->num_threads = (int)parallel->num_tasks;
  parallel->num_wanted = parallel->num_threads - 1;
  parallel->is_shared = parallel->num_wanted > 0;
  pthread_cond_init(&parallel->all_left, NULL);
  if (parallel->is_shared) offer(parallel);
}

void fa_parallel_begin(fa_parallel *parallel, int num_threads, int awake_microseconds, int64_t num_tasks,
                       void (*run_task)(void *context, int64_t task, int worker), void *context) {
  *parallel = (fa_parallel){.run_task = run_task,
                            .context = context,
                            .num_tasks = num_tasks,
                            .awake_microseconds = awake_microseconds,
                            .num_threads = num_threads};
  begin(parallel);
}

bool fa_parallel_help(fa_parallel *parallel) { return run_next_task(parallel, 0); }

void fa_parallel_end(fa_parallel *parallel) {
  run_callers_tasks(parallel);
  if (parallel->is_shared) withdraw(parallel);
}

void fa_parallel_for(int num_threads, int awake_microseconds, int64_t num_tasks,
                     void (*run_task)(void *context, int64_t task, int worker), void *context) {
  fa_parallel parallel;
  fa_parallel_begin(&parallel, num_threads, awake_microseconds, num_tasks, run_task, context);
  fa_parallel_end(&parallel);
}

void fa_parallel_share(int num_threads, int awake_microseconds, int64_t num_tasks,
                       void (*run_task)(void *context, int64_t task, int worker), void *context) {
  fa_parallel parallel = {.run_task = run_task,
                          .context = context,
                          .num_tasks = num_tasks,
                          .awake_microseconds = awake_microseconds,
                          .num_threads = num_threads,
                          .is_divided = true};
  begin(&parallel);
  fa_parallel_end(&parallel);
}
