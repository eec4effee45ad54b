/* Tensors as doubles and as the device sees them, and passes that are run between poison; see harness.h. */
#include "harness.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../c_src/core/tensors.h"
#include "../../c_src/cpu/half.h"
#include "random.h"

/* ---- elements -------------------------------------------------------------------------------------- */

inline double get_element(fa_dtype dtype, const unsigned char *at) {
  double f64;
  float f32;
  uint16_t half;
  int32_t s32;
  uint32_t u32;
  switch (dtype) {
    case FA_DTYPE_U8: return *at;
    case FA_DTYPE_U32: return memcpy(&u32, at, sizeof u32), u32;
    case FA_DTYPE_F64: return memcpy(&f64, at, sizeof f64), f64;
    case FA_DTYPE_BF16: return memcpy(&half, at, sizeof half), fa_bf16_to_f32(half);
    case FA_DTYPE_F16: return memcpy(&half, at, sizeof half), fa_f16_to_f32(half);
    case FA_DTYPE_S32: return memcpy(&s32, at, sizeof s32), s32;
    default: return memcpy(&f32, at, sizeof f32), f32;
  }
}

inline void set_element(fa_dtype dtype, unsigned char *at, double value) {
  const float f32 = (float)value;
  uint16_t half;
  int32_t s32;
  uint32_t u32;
  switch (dtype) {
    case FA_DTYPE_U8: *at = (unsigned char)value; break;
    case FA_DTYPE_U32: u32 = (uint32_t)value, memcpy(at, &u32, sizeof u32); break;
    case FA_DTYPE_F64: memcpy(at, &value, sizeof value); break;
    case FA_DTYPE_BF16: half = fa_f32_to_bf16(f32), memcpy(at, &half, sizeof half); break;
    case FA_DTYPE_F16: half = fa_f32_to_f16(f32), memcpy(at, &half, sizeof half); break;
    case FA_DTYPE_S32: s32 = (int32_t)value, memcpy(at, &s32, sizeof s32); break;
    default: memcpy(at, &f32, sizeof f32); break;
  }
}

#define ALWAYS_INLINE static inline __attribute__((always_inline))

ALWAYS_INLINE void get_each(fa_dtype dtype, size_t element, const unsigned char *from, double *to,
                            int64_t count) {
  for (int64_t i = 0; i < count; i++) to[i] = get_element(dtype, from + (size_t)i * element);
}

ALWAYS_INLINE void set_each(fa_dtype dtype, size_t element, unsigned char *to, const double *from,
                            int64_t count) {
  for (int64_t i = 0; i < count; i++) set_element(dtype, to + (size_t)i * element, from[i]);
}

/* So many elements that lie beside one another, and the other way: a loop for each type of floats, without the
 * choice among them. */
static void get_elements(fa_dtype dtype, const unsigned char *from, double *to, int64_t count) {
  switch (dtype) {
    case FA_DTYPE_F64: get_each(FA_DTYPE_F64, 8, from, to, count); break;
    case FA_DTYPE_F32: get_each(FA_DTYPE_F32, 4, from, to, count); break;
    case FA_DTYPE_BF16: get_each(FA_DTYPE_BF16, 2, from, to, count); break;
    case FA_DTYPE_F16: get_each(FA_DTYPE_F16, 2, from, to, count); break;
    default: get_each(dtype, fa_dtype_bytes(dtype), from, to, count); break;
  }
}

static void set_elements(fa_dtype dtype, unsigned char *to, const double *from, int64_t count) {
  switch (dtype) {
    case FA_DTYPE_F64: set_each(FA_DTYPE_F64, 8, to, from, count); break;
    case FA_DTYPE_F32: set_each(FA_DTYPE_F32, 4, to, from, count); break;
    case FA_DTYPE_BF16: set_each(FA_DTYPE_BF16, 2, to, from, count); break;
    case FA_DTYPE_F16: set_each(FA_DTYPE_F16, 2, to, from, count); break;
    default: set_each(dtype, fa_dtype_bytes(dtype), to, from, count); break;
  }
}

static double round_to_type(fa_dtype dtype, double value) {
  unsigned char cell[8];
  set_element(dtype, cell, value);
  return get_element(dtype, cell);
}

/* ---- values ---------------------------------------------------------------------------------------- */

static void end_without_memory(void) {
  fprintf(stderr, "out of memory\n");
  exit(2);
}

static void *allocate(size_t bytes) {
  void *memory = malloc(bytes ? bytes : 1);
  if (!memory) end_without_memory();
  return memory;
}

int64_t values_count(const fa_problem *problem, fa_tensor_id id) {
  fa_shape shape = fa_tensor_shape(problem, id);
  return shape.size_bytes / (int64_t)fa_dtype_bytes(shape.dtype);
}

fa_values values_new(const fa_problem *problem) {
  fa_values values;
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    const size_t count = (size_t)values_count(problem, id);
    values.data[id] = calloc(count ? count : 1, sizeof(double));
    if (!values.data[id]) end_without_memory();
  }
  return values;
}

fa_values values_copy(const fa_problem *problem, const fa_values *from) {
  fa_values values;
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    const size_t bytes = (size_t)values_count(problem, id) * sizeof(double);
    values.data[id] = memcpy(allocate(bytes), from->data[id], bytes);
  }
  return values;
}

void values_free(fa_values *values) {
  for (int id = 0; id < FA_NUM_TENSORS; id++) free(values->data[id]);
}

/* Large numbers are to upset the scores. f16 has no room for more: its v and dout stay as they are. */
static double amplitude(fa_tensor_id id, fa_dtype dtype, fa_fill fill) {
  bool scores = id == FA_TENSOR_Q || id == FA_TENSOR_K;
  return fill == FILL_LARGE && (scores || dtype != FA_DTYPE_F16) ? 30 : 1;
}

static void fill_rows(double *data, int64_t count, int64_t head_dim, double scale, fa_fill fill,
                      fa_random *random) {
  for (int64_t i = 0; i < count; i += head_dim) {
    double size = fill == FILL_LOGNORMAL ? exp(random_normal(random)) : scale;
    for (int64_t c = 0; c < head_dim; c++) data[i + c] = size * random_normal(random);
  }
}

static void fill_grid(double *data, int64_t count, double size, double step, fa_random *random) {
  for (int64_t i = 0; i < count; i++) data[i] = step * rint(size * random_normal(random) / step);
}

/* Slopes multiply distances: with larger ones rows would see next to nothing. */
static double size_on_grid(int id) {
  return id == FA_TENSOR_ALIBI_SLOPES || id == FA_TENSOR_TANGENT_ALIBI_SLOPES ? 0x1p-4 : 1;
}

/* Bands [bands_batch, num_bands, 6] that share no cell: rectangles into which the problem is cut at random, of
 * which each shows all, a triangle, a strip of itself or nothing. */
static void fill_bands(double *data, const fa_problem *problem, fa_random *random) {
  for (int64_t batch = 0; batch < problem->bands_batch; batch++, data += 6 * problem->num_bands) {
    const double whole[6] = {0, (double)problem->seqlen_q, 0, (double)problem->seqlen_k, INT32_MAX, INT32_MAX};
    memcpy(data, whole, sizeof whole);
    for (int64_t n = 1; n < problem->num_bands; n++) {
      double *cut = data + 6 * random_integer(random, 0, n - 1), *rest = data + 6 * n;
      double *begin = cut + 2 * random_integer(random, 0, 1);
      memcpy(rest, cut, sizeof whole);
      rest[begin - cut] = begin[1] = (double)random_integer(random, (int64_t)begin[0], (int64_t)begin[1]);
    }
    for (double *band = data; band < data + 6 * problem->num_bands; band += 6) {
      const double further = band[3] - band[2] - (band[1] - band[0]);
      const double sides[4][2] = {
          {INT32_MAX, 0},
          {further, INT32_MAX},
          {further, 0},
          {(double)random_integer(random, -9, 90), (double)random_integer(random, -9, 90)}};
      const int64_t kind = random_integer(random, 0, 5);
      if (kind < 4) memcpy(band + 4, sides[kind], sizeof sides[kind]);
      if (kind == 4 && problem->num_bands > 1) band[1] = band[0] - 1;
    }
  }
}

/* A bias hides some scores, and a rectangle of each head, as masks do. */
static void fill_bias(double *data, const fa_problem *problem, fa_random *random) {
  const fa_shape shape = fa_tensor_shape(problem, FA_TENSOR_BIAS);
  const int64_t rows = shape.dims[2], columns = shape.dims[3], heads = shape.dims[0] * shape.dims[1];
  const bool is_flag = shape.dtype == FA_DTYPE_U8;
  for (int64_t head = 0; head < heads; head++) {
    const int64_t first_row = random_integer(random, 0, rows),
                  first_column = random_integer(random, 0, columns);
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j++) {
        const bool hides = random_uniform(random) < 0.05 || (i >= first_row && j >= first_column);
        const double number = 0x1p-6 * rint(0x1p6 * random_normal(random));
        const double shown = is_flag ? (double)random_integer(random, 1, 255) : number;
        *data++ = round_to_type(shape.dtype, hides ? (is_flag ? 0 : -INFINITY) : shown);
      }
  }
}

/* Some batches are full, some empty. */
static void fill_lengths(double *data, const fa_problem *problem, fa_random *random) {
  for (int64_t i = 0; i < problem->lengths_batch; i++) {
    const int64_t kind = random_integer(random, 0, 7);
    data[i] = kind == 0   ? 0
              : kind == 1 ? (double)problem->seqlen_k
                          : (double)random_integer(random, 0, problem->seqlen_k);
  }
}

/* Pages at random, shared between batches, and some numbers that are none. No batch has a page twice while
 * there are others: the bound takes it that what one key's number errs by says nothing of another's. */
static void fill_page_table(double *data, const fa_problem *problem, fa_random *random) {
  static const double none[] = {-1, INT32_MIN, INT32_MAX};
  const int64_t num_pages = problem->num_pages;
  double *pages = allocate((size_t)num_pages * sizeof *pages);
  for (int64_t i = 0; i < num_pages; i++) pages[i] = (double)i;
  for (int64_t i = 0; i < problem->batch * problem->max_pages; i++) {
    data[i] = none[random_integer(random, 0, 2)];
    if (num_pages == 0 || random_integer(random, 0, 9) == 0) continue;
    const int64_t at = i % problem->max_pages % num_pages, from = random_integer(random, at, num_pages - 1);
    data[i] = pages[from], pages[from] = pages[at], pages[at] = data[i];
  }
  free(pages);
}

static bool is_input(const fa_problem *problem, int id, fa_pass pass) {
  return fa_tensor_role_in(problem, pass, id) == FA_ROLE_INPUT;
}

/* Of any of the passes. */
static bool is_computed(const fa_problem *problem, int id) {
  for (int pass = 0; pass < FA_NUM_PASSES; pass++)
    if (fa_tensor_role_in(problem, pass, id) == FA_ROLE_OUTPUT) return true;
  return false;
}

/* Each tensor has a stream of its own: what others are drawn changes nothing. */
static void fill_tensor(fa_values *values, const fa_problem *problem, int id, fa_dtype round_to, fa_fill fill,
                        uint64_t seed) {
  double *const data = values->data[id];
  const int64_t count = values_count(problem, id);
  fa_random random = random_stream(seed, id);
  if (id == FA_TENSOR_BANDS) {
    fill_bands(data, problem, &random);
  } else if (id == FA_TENSOR_DROPOUT_SEED) {
    for (int64_t i = 0; i < count; i++) data[i] = (double)random_integer(&random, 0, UINT32_MAX);
  } else if (id == FA_TENSOR_BIAS) {
    fill_bias(data, problem, &random);
  } else if (id == FA_TENSOR_KEY_LENGTHS) {
    fill_lengths(data, problem, &random);
  } else if (id == FA_TENSOR_PAGE_TABLE) {
    fill_page_table(data, problem, &random);
  } else if (fa_axis_of(id, FA_AXIS_HEAD_DIM) < 0) {
    const double size = size_on_grid(id);
    fill_grid(data, count, size, size * (fa_tensor_tangent(id) < 0 ? 0x1p-6 : 0x1p-10), &random);
  } else {
    fill_rows(data, count, problem->head_dim, amplitude(id, round_to, fill), fill, &random);
    for (int64_t j = 0; j < count; j++) data[j] = round_to_type(round_to, data[j]);
  }
}

void values_fill(fa_values *values, const fa_problem *problem, fa_dtype round_to, fa_fill fill, uint64_t seed) {
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if ((is_input(problem, id, FA_PASS_FORWARD) || is_input(problem, id, FA_PASS_BACKWARD)) &&
        !is_computed(problem, id))
      fill_tensor(values, problem, id, round_to, fill, seed);
}

void values_fill_tangents(fa_values *values, const fa_problem *problem, fa_dtype round_to, fa_fill fill,
                          uint64_t seed) {
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (is_input(problem, id, FA_PASS_TANGENT) && !is_input(problem, id, FA_PASS_FORWARD))
      fill_tensor(values, problem, id, round_to, fill, seed);
}

/* ---- keys on pages ------------------------------------------------------------------------------------- */

fa_problem problem_in_order(const fa_problem *paged) {
  fa_problem plain = *paged;
  plain.num_pages = plain.page_size = plain.max_pages = 0;
  return plain;
}

static void gather_pages(const fa_problem *paged, const double *page_table, const double *from, double *to) {
  const int64_t width = paged->num_kv_heads * paged->head_dim;
  for (int64_t i = 0; i < paged->batch * paged->seqlen_k; i++, to += width) {
    const double page = page_table[i / paged->page_size];
    if (page >= 0 && page < (double)paged->num_pages)
      memcpy(to, from + ((int64_t)page * paged->page_size + i % paged->page_size) * width,
             (size_t)width * sizeof *to);
  }
}

fa_values values_in_order(const fa_problem *paged, const fa_values *values) {
  const fa_problem plain = problem_in_order(paged);
  fa_values result = values_new(&plain);
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (fa_is_paged(paged, id))
      gather_pages(paged, values->data[FA_TENSOR_PAGE_TABLE], values->data[id], result.data[id]);
    else
      memcpy(result.data[id], values->data[id], (size_t)values_count(&plain, id) * sizeof(double));
  return result;
}

/* ---- memory ------------------------------------------------------------------------------------------- */

/* So many bytes of a device, aligned to 64 or more, and of the host. Where the device computes in the host's
 * memory both are the same, unless they are to be apart. */
typedef struct fa_bytes {
  size_t size;
  unsigned char *host, *device;
} fa_bytes;

static fa_bytes bytes_new(fa_device device, size_t size, bool apart) {
  fa_bytes bytes = {.size = size};
  void *memory;
  fa_error error;
  if (fa_device_alloc(device, size, &memory, &error)) {
    printf("FAILED: %s\n", error.message);
    exit(1);
  }
  bytes.device = memory;
  bytes.host = apart || fa_has_own_memory(device.kind) ? allocate(size) : bytes.device;
  return bytes;
}

static void bytes_free(fa_device device, fa_bytes *bytes) {
  if (bytes->host != bytes->device) free(bytes->host);
  fa_device_free(device, bytes->device, NULL);
}

/* From the host to the device. */
static void upload(fa_device device, const fa_bytes *bytes) {
  fa_error error;
  if (bytes->host == bytes->device) return;
  if (fa_device_copy(device, bytes->device, bytes->host, bytes->size, NULL, &error)) {
    printf("FAILED: %s\n", error.message);
    exit(1);
  }
}

static void download(fa_device device, const fa_bytes *bytes) {
  if (bytes->host != bytes->device) fa_device_copy(device, bytes->host, bytes->device, bytes->size, NULL, NULL);
}

/* Whether the device still has what the host has. */
static bool is_untouched(fa_device device, const fa_bytes *bytes) {
  if (!fa_has_own_memory(device.kind)) return memcmp(bytes->device, bytes->host, bytes->size) == 0;
  unsigned char *after = allocate(bytes->size);
  const bool same = fa_device_copy(device, after, bytes->device, bytes->size, NULL, NULL) == FA_STATUS_OK &&
                    memcmp(after, bytes->host, bytes->size) == 0;
  free(after);
  return same;
}

/* ---- images: a tensor as the device sees it ----------------------------------------------------------- */

#define POISON      0xff /* everywhere: a NaN in every type that arithmetic does not give */
#define GUARD_BYTES 64

static void poison(fa_device device, const fa_bytes *bytes) {
  memset(bytes->host, POISON, bytes->size);
  upload(device, bytes);
}

static bool all_poison(const unsigned char *bytes, size_t size) {
  return size == 0 || (bytes[0] == POISON && memcmp(bytes, bytes + 1, size - 1) == 0);
}

/* The index of the first of so many elements that is poison, or their number. */
static int64_t find_poison(const unsigned char *at, size_t element, int64_t count) {
  int64_t i = 0;
  while (i < count && (at[(size_t)i * element] != POISON || !all_poison(at + (size_t)i * element, element)))
    i++;
  return i;
}

/* guard, data, guard. Inputs have no guard behind them, so that the address sanitizer sees a read beyond their
 * end. */
typedef struct tensor_image {
  fa_tensor_role role;
  fa_shape shape;
  fa_tensor tensor; /* with the strides that the device is told */
  int64_t count;    /* of elements */
  int64_t width;    /* so many, from each multiple of it on, lie beside one another */
  size_t front;
  fa_bytes bytes;
  unsigned char *first; /* of an output: the image after the first run, if that is kept */
} tensor_image;

/* Of what may have strides of its own, heads lie apart and rows within them, with gaps between all of them; the
 * last row may come first. */
static fa_tensor laid_out(const fa_problem *problem, fa_tensor_id id, fa_layout layout) {
  fa_tensor tensor = fa_tensor_contiguous(problem, id, NULL);
  fa_shape shape = fa_tensor_shape(problem, id);
  if (layout & LAYOUT_STRIDED && fa_is_strided(id)) {
    const int64_t unit = layout & LAYOUT_ALIGNED ? 16 / (int64_t)fa_dtype_bytes(shape.dtype) : 1;
    tensor.stride_row = shape.dims[3] + 3 * unit;
    tensor.stride_head = shape.dims[1] * tensor.stride_row + 5 * unit;
    tensor.stride_batch = shape.dims[2] * tensor.stride_head + 7 * unit;
    if (layout & LAYOUT_REVERSED) tensor.stride_row = -tensor.stride_row;
  }
  return tensor;
}

/* Where the element of that index in contiguous order lies, in bytes. */
static size_t element_at(const tensor_image *image, int64_t index) {
  const fa_shape *shape = &image->shape;
  const int last = shape->rank - 1;
  int64_t offset = index % shape->dims[last], rest = index / shape->dims[last];
  for (int i = last - 1; i >= 0; i--) {
    offset += rest % shape->dims[i] * image->tensor.strides[i];
    rest /= shape->dims[i];
  }
  return image->front + (size_t)offset * fa_dtype_bytes(shape->dtype);
}

/* Where the inputs are, with their values; outputs are poisoned by every run. */
static tensor_image image_new(const fa_problem *problem, fa_pass pass, fa_tensor_id id, const fa_setup *setup,
                              const double *values) {
  tensor_image image = {.role = fa_tensor_role_in(problem, pass, id),
                        .shape = fa_tensor_shape(problem, id),
                        .tensor = laid_out(problem, id, setup->layout),
                        .count = values_count(problem, id)};
  if (image.role == FA_ROLE_NONE) return image;
  const size_t element = fa_dtype_bytes(image.shape.dtype);
  const bool has_gaps = setup->layout & LAYOUT_STRIDED && fa_is_strided(id);
  image.width = has_gaps ? image.shape.dims[image.shape.rank - 1] : image.count;
  image.front = GUARD_BYTES + (setup->layout & LAYOUT_ALIGNED ? 0 : element);
  const int64_t stride = image.tensor.stride_row;
  const int64_t before = image.count && stride < 0 ? (image.shape.dims[1] - 1) * -stride : 0;
  image.front += (size_t)before * element;
  size_t size =
      image.count ? element_at(&image, image.count - 1) + (size_t)(before + 1) * element : image.front;
  if (image.role == FA_ROLE_OUTPUT) size += GUARD_BYTES;
  image.bytes = bytes_new(setup->device, size, image.role == FA_ROLE_INPUT);
  if (image.role == FA_ROLE_OUTPUT) return image;
  memset(image.bytes.host, POISON, size);
  for (int64_t row = 0; row < image.count; row += image.width)
    set_elements(image.shape.dtype, image.bytes.host + element_at(&image, row), values + row, image.width);
  upload(setup->device, &image.bytes);
  return image;
}

static void image_free(tensor_image *image, fa_device device) {
  if (image->role != FA_ROLE_NONE) bytes_free(device, &image->bytes);
  free(image->first);
}

/* Takes the output's elements out of its image, which must leave nothing but poison. */
static bool read_output(tensor_image *image, double *values, const char *name, char why[512]) {
  const size_t element = fa_dtype_bytes(image->shape.dtype);
  for (int64_t row = 0; row < image->count; row += image->width) {
    unsigned char *at = image->bytes.host + element_at(image, row);
    const int64_t missing = find_poison(at, element, image->width);
    if (missing < image->width) {
      snprintf(why, 512, "%s: element %lld of %lld was not written", name, (long long)(row + missing),
               (long long)image->count);
      return false;
    }
    get_elements(image->shape.dtype, at, values + row, image->width);
    memset(at, POISON, (size_t)image->width * element);
  }
  if (all_poison(image->bytes.host, image->bytes.size)) return true;
  snprintf(why, 512, "%s: something outside its elements was written", name);
  return false;
}

/* ---- running ------------------------------------------------------------------------------------------ */

struct fa_trial {
  fa_plan plan;
  fa_device device;
  fa_tensors tensors;
  tensor_image images[FA_NUM_TENSORS];
  fa_bytes workspace; /* between guards */
};

fa_outcome trial_new(fa_trial **trial, const fa_setup *setup, const fa_problem *problem, fa_pass pass,
                     const fa_values *values, char why[512]) {
  fa_plan plan;
  fa_error error;
  *trial = NULL;
  fa_status status = fa_plan_init(&plan, problem, pass, setup->device, &error);
  if (status) {
    snprintf(why, 512, "%s: %s", fa_status_name(status), error.message);
    return status == FA_STATUS_UNSUPPORTED ? OUTCOME_UNSUPPORTED : OUTCOME_BROKEN;
  }
  fa_trial *t = *trial = allocate(sizeof *t);
  *t = (fa_trial){.plan = plan, .device = setup->device};
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    tensor_image *image = &t->images[id];
    *image = image_new(problem, pass, id, setup, values->data[id]);
    *fa_tensor_at(&t->tensors, id) = image->tensor;
    fa_tensor_at(&t->tensors, id)->data = image->bytes.device ? image->bytes.device + image->front : NULL;
  }
  t->workspace = bytes_new(setup->device, GUARD_BYTES + plan.workspace_bytes + GUARD_BYTES, false);
  return OUTCOME_RAN;
}

fa_outcome trial_plan(fa_trial *t, int32_t num_threads, char why[512]) {
  const fa_problem problem = t->plan.problem;
  const fa_pass pass = t->plan.pass;
  fa_error error;
  char text[16];
  snprintf(text, sizeof text, "%d", num_threads);
  char *before = set_environment("FLASH_ATTENTION_NUM_THREADS", text);
  const fa_status status = fa_plan_init(&t->plan, &problem, pass, t->device, &error);
  restore_environment("FLASH_ATTENTION_NUM_THREADS", before);
  if (status) {
    snprintf(why, 512, "%s: %s", fa_status_name(status), error.message);
    return OUTCOME_BROKEN;
  }
  bytes_free(t->device, &t->workspace);
  t->workspace = bytes_new(t->device, GUARD_BYTES + t->plan.workspace_bytes + GUARD_BYTES, false);
  return OUTCOME_RAN;
}

void trial_free(fa_trial *trial) {
  if (!trial) return;
  for (int id = 0; id < FA_NUM_TENSORS; id++) image_free(&trial->images[id], trial->device);
  bytes_free(trial->device, &trial->workspace);
  free(trial);
}

fa_outcome trial_run(fa_trial *t, int32_t num_threads, char why[512]) {
  fa_error error;
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (t->images[id].role == FA_ROLE_OUTPUT) poison(t->device, &t->images[id].bytes);
  poison(t->device, &t->workspace);
  const fa_execution execution = {.workspace = t->workspace.device + GUARD_BYTES,
                                  .workspace_bytes = t->plan.workspace_bytes,
                                  .num_threads = num_threads};
  const fa_status status = fa_run(&t->plan, &t->tensors, &execution, &error);
  if (status) {
    snprintf(why, 512, "%s: %s", fa_status_name(status), error.message);
    return OUTCOME_BROKEN;
  }
  download(t->device, &t->workspace);
  if (!all_poison(t->workspace.host, GUARD_BYTES) ||
      !all_poison(t->workspace.host + t->workspace.size - GUARD_BYTES, GUARD_BYTES)) {
    snprintf(why, 512, "something outside the workspace was written");
    return OUTCOME_BROKEN;
  }
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    const tensor_image *image = &t->images[id];
    if (image->role == FA_ROLE_OUTPUT) download(t->device, &image->bytes);
    if (image->role == FA_ROLE_INPUT && !is_untouched(t->device, &image->bytes)) {
      snprintf(why, 512, "%s: an input was written", fa_tensor_name(id));
      return OUTCOME_BROKEN;
    }
  }
  return OUTCOME_RAN;
}

void trial_keep(fa_trial *trial) {
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    tensor_image *image = &trial->images[id];
    if (image->role != FA_ROLE_OUTPUT) continue;
    if (!image->first) image->first = allocate(image->bytes.size);
    memcpy(image->first, image->bytes.host, image->bytes.size);
  }
}

bool trial_repeats(const fa_trial *trial, fa_tensor_id id) {
  const tensor_image *image = &trial->images[id];
  return memcmp(image->first, image->bytes.host, image->bytes.size) == 0;
}

fa_outcome trial_read(fa_trial *trial, fa_values *values, char why[512]) {
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (trial->images[id].role == FA_ROLE_OUTPUT &&
        !read_output(&trial->images[id], values->data[id], fa_tensor_name(id), why))
      return OUTCOME_BROKEN;
  return OUTCOME_RAN;
}

fa_outcome run_pass(const fa_setup *setup, const fa_problem *problem, fa_pass pass, fa_values *values,
                    char why[512]) {
  fa_trial *trial;
  fa_outcome outcome = trial_new(&trial, setup, problem, pass, values, why);
  if (outcome == OUTCOME_RAN) outcome = trial_run(trial, setup->num_threads, why);
  if (outcome == OUTCOME_RAN) outcome = trial_read(trial, values, why);
  trial_free(trial);
  return outcome;
}

void must_run(const fa_setup *setup, const fa_problem *problem, fa_pass pass, fa_values *values) {
  char why[512];
  if (run_pass(setup, problem, pass, values, why) == OUTCOME_RAN) return;
  printf("FAILED: %s %s: %s\n", fa_device_kind_name(setup->device.kind), fa_pass_name(pass), why);
  exit(1);
}

char *set_environment(const char *name, const char *text) {
  const char *value = getenv(name);
  char *before = value ? strdup(value) : NULL;
  setenv(name, text, 1);
  return before;
}

void restore_environment(const char *name, char *before) {
  if (before)
    setenv(name, before, 1);
  else
    unsetenv(name);
  free(before);
}

/* ---- comparing ---------------------------------------------------------------------------------------- */

double values_error(const fa_problem *problem, fa_tensor_id id, const fa_values *x, const fa_values *expected) {
  double worst = 0;
  for (int64_t i = values_count(problem, id) - 1; i >= 0; i--) {
    const double got = x->data[id][i], want = expected->data[id][i];
    const double error = got == want ? 0 : fabs(got - want);
    worst = isnan(error) ? INFINITY : fmax(worst, error);
  }
  return worst;
}

bool values_equal(const fa_problem *problem, fa_tensor_id id, const fa_values *x, const fa_values *y) {
  return memcmp(x->data[id], y->data[id], (size_t)values_count(problem, id) * sizeof(double)) == 0;
}
