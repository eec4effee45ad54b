#include "fake_gpu.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "../../c_src/core/error.h"
#include "../../c_src/core/tensors.h"
#include "../../c_src/host/pack.h"
#include "../../c_src/cpu/half.h"

struct fake_settings fake_settings = {SIZE_MAX, SIZE_MAX, -1, -1, FA_STATUS_OK};

/* ---- state, all under one mutex ------------------------------------------------------------------------ */

typedef struct fake_block {
  char *memory;
  size_t bytes;
  int32_t index; /* -1: pinned */
  struct fake_block *next;
} fake_block;

typedef struct fake_event {
  int32_t index;
  long recorded, done; /* how often: enqueued, and reached by its stream */
} fake_event;

typedef enum fake_kind { COPY, UNPACK, RUN, RECORD, WAIT } fake_kind;

typedef struct fake_work {
  fake_kind kind;
  fa_rows to, from;
  size_t row_bytes, num_rows;
  int64_t head_dim;
  fa_plan plan;
  fa_tensors tensors;
  fa_execution execution;
  fake_event *event;
  long target;
  struct fake_work *next;
} fake_work;

typedef struct fake_stream {
  int32_t index; /* -1: the default stream, of all devices */
  fake_work *first, **last;
  bool busy;
  struct fake_stream *next;
} fake_stream;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static fake_block *blocks;
static fake_stream *streams, default_stream = {-1, NULL, &default_stream.first, false, NULL};
static fake_state state;
static bool is_awaited; /* whether a thread waits for an event or a stream, since the last work was done */

fake_state fake_get_state(void) {
  pthread_mutex_lock(&mutex);
  fake_state copy = state;
  pthread_mutex_unlock(&mutex);
  return copy;
}

static fa_status may_fail(int32_t index, fa_error *error) {
  pthread_mutex_lock(&mutex);
  const bool counts = fake_settings.fail_device < 0 || fake_settings.fail_device == index;
  const bool fails = counts && fake_settings.fail_at == 0;
  if (counts && fake_settings.fail_at >= 0) fake_settings.fail_at--;
  pthread_mutex_unlock(&mutex);
  return fails ? fa_fail_message(error, fake_settings.failure, "device", "the fake GPU was told to fail")
               : FA_STATUS_OK;
}

/* ---- memory ------------------------------------------------------------------------------------------- */

static fa_status add_block(int32_t index, size_t bytes, void **memory, fa_error *error) {
  fa_status status = may_fail(index, error);
  if (status) return status;
  size_t *held = index < 0 ? &state.pinned_bytes : &state.device_bytes;
  pthread_mutex_lock(&mutex);
  const size_t there = index < 0 ? fake_settings.pinned_bytes : fake_settings.device_bytes;
  const bool fits = *held <= there && bytes <= there - *held;
  if (fits) {
    fake_block *block = malloc(sizeof *block);
    *block = (fake_block){NULL, bytes, index, blocks};
    if (posix_memalign((void **)&block->memory, 256, bytes)) abort();
    memset(block->memory, 0xff, bytes);
    blocks = block;
    *held += bytes;
    *memory = block->memory;
  }
  pthread_mutex_unlock(&mutex);
  return fits ? FA_STATUS_OK
              : fa_fail(error, FA_STATUS_OUT_OF_MEMORY, "device", FA_TEXT("%zu bytes", bytes), "fewer");
}

static void remove_block(void *memory) {
  pthread_mutex_lock(&mutex);
  fake_block **link = &blocks;
  while ((*link)->memory != memory) link = &(*link)->next;
  fake_block *block = *link;
  *link = block->next;
  *(block->index < 0 ? &state.pinned_bytes : &state.device_bytes) -= block->bytes;
  pthread_mutex_unlock(&mutex);
  free(block->memory);
  free(block);
}

static fa_status alloc(int32_t index, size_t bytes, void **memory, fa_error *error) {
  return add_block(index, bytes, memory, error);
}
static void release(int32_t index, void *memory) {
  (void)index;
  remove_block(memory);
}
static fa_status host_alloc(int32_t index, size_t bytes, void **memory, fa_error *error) {
  pthread_mutex_lock(&mutex);
  state.is_awake[index] = true;
  pthread_mutex_unlock(&mutex);
  return add_block(-1, bytes, memory, error);
}
static void host_free(int32_t index, void *memory) {
  (void)index;
  remove_block(memory);
}

static fa_status available(int32_t index, size_t *free_bytes, size_t *total_bytes, fa_error *error) {
  pthread_mutex_lock(&mutex);
  state.is_awake[index] = true;
  pthread_mutex_unlock(&mutex);
  const fa_status status = may_fail(index, error);
  *free_bytes = *total_bytes = status ? 0 : (size_t)1 << 40;
  return status;
}

static fa_place place_of(int32_t index, const void *memory) {
  for (fake_block *block = blocks; block; block = block->next)
    if ((const char *)memory >= block->memory && (const char *)memory < block->memory + block->bytes)
      return block->index < 0        ? FA_PLACE_PINNED
             : block->index == index ? FA_PLACE_DEVICE
                                     : FA_PLACE_OTHER_DEVICE;
  return FA_PLACE_HOST;
}

static fa_place locate(int32_t index, const void *memory, size_t bytes) {
  pthread_mutex_lock(&mutex);
  const fa_place first = place_of(index, memory), last = place_of(index, (const char *)memory + bytes - 1);
  pthread_mutex_unlock(&mutex);
  return first == last ? first : FA_PLACE_HOST;
}

/* ---- the thread that does the streams' work -------------------------------------------------------------- */

static fake_stream *late; /* the stream that is drawn last, or NULL */

void fake_set_late(void *stream) {
  pthread_mutex_lock(&mutex);
  late = stream;
  pthread_mutex_unlock(&mutex);
}

static bool can_go_on(const fake_stream *stream) {
  const fake_work *work = stream->first;
  return work && !stream->busy && (work->kind != WAIT || work->event->done >= work->target);
}

static bool may_be_drawn(const fake_stream *stream) { return stream != late && can_go_on(stream); }

static fake_stream *draw_stream(unsigned *seed) {
  int num_ready = may_be_drawn(&default_stream);
  for (fake_stream *stream = streams; stream; stream = stream->next) num_ready += may_be_drawn(stream);
  if (num_ready == 0) return late && is_awaited && can_go_on(late) ? late : NULL;
  int drawn = rand_r(seed) % num_ready;
  if (may_be_drawn(&default_stream) && drawn-- == 0) return &default_stream;
  for (fake_stream *stream = streams;; stream = stream->next)
    if (may_be_drawn(stream) && drawn-- == 0) return stream;
}

/* A row of a head. */
static void unpack_row(char *to, const char *from, int64_t head_dim) {
  float unscale;
  memcpy(&unscale, from + head_dim * 2, sizeof unscale);
  for (int64_t d = 0; d < head_dim; d++, to += sizeof(float), from += 2) {
    uint16_t half;
    memcpy(&half, from, sizeof half);
    const float number = fa_f16_to_f32(half) * unscale;
    memcpy(to, &number, sizeof number);
  }
}

static void unpack_rows(const fake_work *work) {
  const size_t bytes = (size_t)work->head_dim * sizeof(float), packed_bytes = fa_packed_bytes(work->head_dim);
  for (size_t row = 0; row < work->num_rows; row++)
    for (size_t i = 0; i < work->row_bytes / bytes; i++)
      unpack_row(work->to.data + row * work->to.pitch + i * bytes,
                 work->from.data + row * work->from.pitch + i * packed_bytes, work->head_dim);
}

static void do_work(const fake_work *work) {
  if (work->kind == COPY)
    for (size_t row = 0; row < work->num_rows; row++)
      memcpy(work->to.data + row * work->to.pitch, work->from.data + row * work->from.pitch, work->row_bytes);
  if (work->kind == UNPACK) unpack_rows(work);
  if (work->kind == RUN)
    fa_backend_of(FA_DEVICE_REFERENCE)->run(&work->plan, &work->tensors, &work->execution, NULL);
}

static bool is_started;

/* A child of fork() has no such thread. Nothing is under way where tests fork. */
static void forget_thread(void) {
  pthread_mutex_init(&mutex, NULL);
  pthread_cond_init(&changed, NULL);
  is_started = false;
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_thread); }

static void *work_on(void *unused) {
  (void)unused;
  unsigned seed = 1;
  pthread_mutex_lock(&mutex);
  for (;;) {
    fake_stream *stream = draw_stream(&seed);
    if (!stream) {
      pthread_cond_wait(&changed, &mutex);
      continue;
    }
    fake_work *work = stream->first;
    stream->busy = true;
    pthread_mutex_unlock(&mutex);
    do_work(work);
    pthread_mutex_lock(&mutex);
    if (work->kind == RECORD) work->event->done++;
    stream->busy = false;
    stream->first = work->next;
    if (!stream->first) stream->last = &stream->first;
    free(work);
    is_awaited = false; /* until those for whom this was not enough have seen it */
    pthread_cond_broadcast(&changed);
  }
  return NULL;
}

/* Under the mutex. */
static void start(void) {
  pthread_t thread;
  if (is_started) return;
  if (pthread_create(&thread, NULL, work_on, NULL)) abort();
  pthread_detach(thread);
  is_started = true;
}

/* Every device writes to pinned memory; only a forward's results are never read by the kernels that make them.
 */
static bool may_use(const fake_work *work, int32_t index, int id) {
  const fa_tensor_role role = fa_tensor_role_in(&work->plan.problem, work->plan.pass, id);
  const fa_place place = place_of(index, fa_tensor_get(&work->tensors, id)->data);
  return role == FA_ROLE_NONE || place == FA_PLACE_DEVICE ||
         (place == FA_PLACE_PINNED && role == FA_ROLE_OUTPUT && work->plan.pass == FA_PASS_FORWARD);
}

static bool is_of_device(const fake_work *work, int32_t index) {
  if (work->kind == RECORD || work->kind == WAIT) return work->event->index == index;
  for (int id = 0; work->kind == RUN && id < FA_NUM_TENSORS; id++)
    if (fa_tensor_get(&work->tensors, id)->data && fa_tensor_shape(&work->plan.problem, id).size_bytes > 0 &&
        !may_use(work, index, id))
      return false;
  return true;
}

static void enqueue(int32_t index, fake_stream *stream, fake_work work) {
  if (!stream) stream = &default_stream;
  fake_work *copy = malloc(sizeof *copy);
  *copy = work;
  copy->next = NULL;
  pthread_mutex_lock(&mutex);
  start();
  state.num_trespasses += (stream->index >= 0 && stream->index != index) || !is_of_device(&work, index);
  if (work.kind == RUN) state.num_runs_of[index]++;
  if (work.kind == RECORD) work.event->recorded++;
  if (work.kind == WAIT) copy->target = work.event->recorded;
  if (work.kind == RUN) state.problems[state.num_runs++ % FAKE_PROBLEMS] = work.plan.problem;
  *stream->last = copy;
  stream->last = &copy->next;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
}

/* ---- streams and events -----------------------------------------------------------------------------------
 */

static fa_status stream_new(int32_t index, void **stream, fa_error *error) {
  fa_status status = may_fail(index, error);
  if (status) return status;
  fake_stream *new = calloc(1, sizeof *new);
  new->index = index;
  new->last = &new->first;
  pthread_mutex_lock(&mutex);
  new->next = streams;
  streams = new;
  state.num_streams++;
  pthread_mutex_unlock(&mutex);
  *stream = new;
  return FA_STATUS_OK;
}

static void stream_free(int32_t index, void *stream) {
  (void)index;
  pthread_mutex_lock(&mutex);
  fake_stream **link = &streams;
  while (*link != stream) link = &(*link)->next;
  *link = (*link)->next;
  state.num_streams--;
  pthread_mutex_unlock(&mutex);
  free(stream);
}

static fa_status event_new(int32_t index, bool timed, void **event, fa_error *error) {
  (void)timed;
  fa_status status = may_fail(index, error);
  if (status) return status;
  fake_event *new = calloc(1, sizeof *new);
  new->index = index;
  *event = new;
  pthread_mutex_lock(&mutex);
  state.num_events++;
  pthread_mutex_unlock(&mutex);
  return FA_STATUS_OK;
}

static void event_free(int32_t index, void *event) {
  (void)index;
  pthread_mutex_lock(&mutex);
  state.num_events--;
  pthread_mutex_unlock(&mutex);
  free(event);
}

static fa_status copy(int32_t index, fa_rows to, fa_rows from, size_t row_bytes, size_t num_rows, void *stream,
                      fa_error *error) {
  fa_status status = may_fail(index, error);
  if (status) return status;
  pthread_mutex_lock(&mutex);
  state.num_copies++;
  state.num_pageable_copies +=
      place_of(index, to.data) == FA_PLACE_HOST || place_of(index, from.data) == FA_PLACE_HOST;
  pthread_mutex_unlock(&mutex);
  enqueue(index, stream,
          (fake_work){.kind = COPY, .to = to, .from = from, .row_bytes = row_bytes, .num_rows = num_rows});
  return FA_STATUS_OK;
}

static fa_status unpack(int32_t index, fa_rows to, fa_rows from, int64_t heads_a_row, int64_t num_rows,
                        int64_t head_dim, void *stream, fa_error *error) {
  fa_status status = may_fail(index, error);
  if (status) return status;
  pthread_mutex_lock(&mutex);
  state.num_unpacked++;
  pthread_mutex_unlock(&mutex);
  enqueue(index, stream,
          (fake_work){.kind = UNPACK,
                      .to = to,
                      .from = from,
                      .row_bytes = (size_t)(heads_a_row * head_dim) * sizeof(float),
                      .num_rows = (size_t)num_rows,
                      .head_dim = head_dim});
  return FA_STATUS_OK;
}

static fa_status record(int32_t index, void *event, void *stream, fa_error *error) {
  fa_status status = may_fail(index, error);
  if (!status) enqueue(index, stream, (fake_work){.kind = RECORD, .event = event});
  return status;
}

static fa_status stream_wait(int32_t index, void *stream, void *event, fa_error *error) {
  fa_status status = may_fail(index, error);
  if (!status) enqueue(index, stream, (fake_work){.kind = WAIT, .event = event});
  return status;
}

/* Under the mutex. */
static void wait_for_change(void) {
  if (!is_awaited) pthread_cond_broadcast(&changed);
  is_awaited = true;
  pthread_cond_wait(&changed, &mutex);
}

static fa_status event_wait(int32_t index, void *event, fa_error *error) {
  fa_status status = may_fail(index, error);
  if (status) return status;
  const fake_event *waited = event;
  pthread_mutex_lock(&mutex);
  while (waited->done < waited->recorded) wait_for_change();
  pthread_mutex_unlock(&mutex);
  return FA_STATUS_OK;
}

static fa_status elapsed(int32_t index, void *begin, void *end, double *seconds, fa_error *error) {
  (void)begin, (void)end;
  *seconds = 1;
  return may_fail(index, error);
}

static fa_status synchronize(int32_t index, void *stream, fa_error *error) {
  (void)index;
  const fake_stream *waited = stream ? stream : &default_stream;
  pthread_mutex_lock(&mutex);
  while (waited->first) wait_for_change();
  pthread_mutex_unlock(&mutex);
  return may_fail(index, error);
}

/* ---- the backend ------------------------------------------------------------------------------------------
 */

static int32_t num_devices(fa_error *error) {
  fa_succeed(error);
  return FAKE_DEVICES;
}

static fa_status device_info(int32_t index, fa_device_info *info, fa_error *error) {
  return fa_backend_of(FA_DEVICE_REFERENCE)->device_info(index, info, error);
}

static fa_status plan(fa_plan *plan, fa_error *error) {
  fa_status status = may_fail(plan->device.index, error);
  return status ? status : fa_backend_of(FA_DEVICE_REFERENCE)->plan(plan, error);
}

static fa_status run(const fa_plan *plan, const fa_tensors *tensors, const fa_execution *execution,
                     fa_error *error) {
  fa_status status = may_fail(plan->device.index, error);
  if (status) return status;
  fake_work work = {.kind = RUN, .plan = *plan, .tensors = *tensors, .execution = *execution};
  work.execution.stream = NULL;
  enqueue(plan->device.index, execution->stream, work);
  return FA_STATUS_OK;
}

static fa_status enter(int32_t index, fa_scope *scope, fa_error *error) {
  *scope = (fa_scope){.outer = index};
  return may_fail(index, error);
}

static void leave(const fa_scope *scope) { (void)scope; }

static const fa_memory_ops memory = {.enter = enter,
                                     .leave = leave,
                                     .alloc = alloc,
                                     .free = release,
                                     .available = available,
                                     .host_alloc = host_alloc,
                                     .host_free = host_free,
                                     .locate = locate,
                                     .stream_new = stream_new,
                                     .stream_free = stream_free,
                                     .event_new = event_new,
                                     .event_free = event_free,
                                     .copy = copy,
                                     .record = record,
                                     .stream_wait = stream_wait,
                                     .event_wait = event_wait,
                                     .elapsed = elapsed,
                                     .synchronize = synchronize};

const fa_backend fake_gpu = {.kind = FA_DEVICE_CUDA,
                             .num_devices = num_devices,
                             .device_info = device_info,
                             .plan = plan,
                             .run = run,
                             .unpack = unpack,
                             .memory = &memory};
