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

double get_element(fa_dtype dtype, const unsigned char *at) {
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

void set_element(fa_dtype dtype, unsigned char *at, double value) {
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

static double round_to_type(fa_dtype dtype, double value) {
  unsigned char cell[8];
  set_element(dtype, cell, value);
  return get_element(dtype, cell);
}

/* ---- values ---------------------------------------------------------------------------------------- */

static void *allocate(size_t bytes) {
  void *memory = malloc(bytes ? bytes : 1);
  if (!memory) {
    fprintf(stderr, "out of memory\n");
    exit(2);
  }
  return memory;
}

int64_t values_count(const fa_problem *problem, fa_tensor_id id) {
  fa_shape shape = fa_tensor_shape(problem, id);
  return shape.size_bytes / (int64_t)fa_dtype_bytes(shape.dtype);
}

fa_values values_new(const fa_problem *problem) {
  fa_values values;
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    size_t bytes = (size_t)values_count(problem, id) * sizeof(double);
    values.data[id] = allocate(bytes);
    memset(values.data[id], 0, bytes);
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

static bool is_input_alone(const fa_problem *problem, int id) {
  bool is_input = false;
  for (int pass = 0; pass < FA_NUM_PASSES; pass++) {
    if (fa_tensor_role_in(problem, pass, id) == FA_ROLE_OUTPUT) return false;
    is_input |= fa_tensor_role_in(problem, pass, id) == FA_ROLE_INPUT;
  }
  return is_input;
}

void values_fill(fa_values *values, const fa_problem *problem, fa_dtype round_to, fa_fill fill, uint64_t seed) {
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (!is_input_alone(problem, id)) continue;
    const int64_t count = values_count(problem, id);
    fa_random random = random_stream(seed, id);
    if (id == FA_TENSOR_BANDS) {
      fill_bands(values->data[id], problem, &random);
    } else if (id == FA_TENSOR_DROPOUT_SEED) {
      for (int64_t i = 0; i < count; i++) values->data[id][i] = (double)random_integer(&random, 0, UINT32_MAX);
    } else if (id == FA_TENSOR_BIAS) {
      fill_bias(values->data[id], problem, &random);
    } else if (id == FA_TENSOR_KEY_LENGTHS) {
      fill_lengths(values->data[id], problem, &random);
    } else if (fa_axis_of(id, FA_AXIS_HEAD_DIM) < 0) {
      const double size = size_on_grid(id);
      fill_grid(values->data[id], count, size, size * (fa_tensor_tangent(id) < 0 ? 0x1p-6 : 0x1p-10), &random);
    } else {
      fill_rows(values->data[id], count, problem->head_dim, amplitude(id, round_to, fill), fill, &random);
      for (int64_t j = 0; j < count; j++) values->data[id][j] = round_to_type(round_to, values->data[id][j]);
    }
  }
}

/* ---- placement: the device's memory ------------------------------------------------------------------- */

/* Memory of the device, aligned to 64 bytes or more and of that size, with a copy of what is at host. */
static void *place(fa_device device, const void *host, size_t bytes) {
  void *memory;
  fa_error error;
  if (fa_device_alloc(device, bytes, &memory, &error) ||
      fa_device_copy(device, memory, host, bytes, NULL, &error)) {
    printf("FAILED: %s\n", error.message);
    exit(1);
  }
  return memory;
}

/* Copies it back to host and releases it. */
static void fetch(fa_device device, void *host, void *memory, size_t bytes) {
  fa_device_copy(device, host, memory, bytes, NULL, NULL);
  fa_device_free(device, memory, NULL);
}

/* ---- images: a tensor as the device sees it ----------------------------------------------------------- */

#define POISON      0xff /* everywhere: a NaN in every type that arithmetic does not give */
#define GUARD_BYTES 64

/* guard, data, guard. Inputs have no guard behind them, so that the address sanitizer sees a read beyond their
 * end. */
typedef struct tensor_image {
  fa_tensor_role role;
  fa_shape shape;
  fa_tensor tensor; /* with the strides that the device is told */
  size_t front, size;
  unsigned char *host, *device;
} tensor_image;

/* Of what may have strides of its own, heads lie apart and rows within them, with gaps between all of them. */
static fa_tensor laid_out(const fa_problem *problem, fa_tensor_id id, fa_layout layout) {
  fa_tensor tensor = fa_tensor_contiguous(problem, id, NULL);
  fa_shape shape = fa_tensor_shape(problem, id);
  if (layout & LAYOUT_STRIDED && fa_is_strided(id)) {
    const int64_t unit = layout & LAYOUT_ALIGNED ? 16 / (int64_t)fa_dtype_bytes(shape.dtype) : 1;
    tensor.stride_row = shape.dims[3] + 3 * unit;
    tensor.stride_head = shape.dims[1] * tensor.stride_row + 5 * unit;
    tensor.stride_batch = shape.dims[2] * tensor.stride_head + 7 * unit;
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

/* So many elements, from each multiple of it on, lie beside one another. */
static int64_t row_width(const tensor_image *image) { return image->shape.dims[image->shape.rank - 1]; }

static tensor_image image_new(const fa_problem *problem, fa_pass pass, fa_tensor_id id, const fa_setup *setup,
                              const double *values) {
  tensor_image image = {.role = fa_tensor_role_in(problem, pass, id),
                        .shape = fa_tensor_shape(problem, id),
                        .tensor = laid_out(problem, id, setup->layout)};
  if (image.role == FA_ROLE_NONE) return image;
  const size_t element = fa_dtype_bytes(image.shape.dtype);
  const int64_t count = values_count(problem, id);
  image.front = GUARD_BYTES + (setup->layout & LAYOUT_ALIGNED ? 0 : element);
  image.size = count ? element_at(&image, count - 1) + element : image.front;
  if (image.role == FA_ROLE_OUTPUT) image.size += GUARD_BYTES;
  image.host = allocate(image.size);
  memset(image.host, POISON, image.size);
  const int64_t width = row_width(&image);
  for (int64_t row = 0; image.role == FA_ROLE_INPUT && row < count; row += width) {
    unsigned char *at = image.host + element_at(&image, row);
    for (int64_t i = row; i < row + width; i++, at += element) set_element(image.shape.dtype, at, values[i]);
  }
  image.device = place(setup->device, image.host, image.size);
  return image;
}

static bool all_poison(const unsigned char *bytes, size_t size) {
  return size == 0 || (bytes[0] == POISON && memcmp(bytes, bytes + 1, size - 1) == 0);
}

/* Takes the output's elements out of its image, which must leave nothing but poison. */
static bool read_output(tensor_image *image, int64_t count, double *values, const char *name, char why[512]) {
  const size_t element = fa_dtype_bytes(image->shape.dtype);
  const int64_t width = row_width(image);
  unsigned char *at = image->host;
  for (int64_t i = 0; i < count; i++, at += element) {
    if (i % width == 0) at = image->host + element_at(image, i);
    if (all_poison(at, element)) {
      snprintf(why, 512, "%s: element %lld of %lld was not written", name, (long long)i, (long long)count);
      return false;
    }
    values[i] = get_element(image->shape.dtype, at);
    memset(at, POISON, element);
  }
  if (all_poison(image->host, image->size)) return true;
  snprintf(why, 512, "%s: something outside its elements was written", name);
  return false;
}

static bool image_finish(tensor_image *image, fa_device device, int64_t count, double *values, const char *name,
                         char why[512]) {
  bool fine = true;
  if (image->role == FA_ROLE_OUTPUT) {
    fetch(device, image->host, image->device, image->size);
    fine = read_output(image, count, values, name, why);
  } else if (image->role == FA_ROLE_INPUT) {
    unsigned char *after = allocate(image->size);
    fetch(device, after, image->device, image->size);
    fine = memcmp(after, image->host, image->size) == 0;
    if (!fine) snprintf(why, 512, "%s: an input was written", name);
    free(after);
  }
  free(image->host);
  return fine;
}

/* ---- running ------------------------------------------------------------------------------------------ */

/* fa_run in a workspace between guards. */
static fa_status run_in_workspace(const fa_setup *setup, const fa_plan *plan, const fa_tensors *tensors,
                                  bool *guarded, fa_error *error) {
  const size_t size = GUARD_BYTES + plan->workspace_bytes + GUARD_BYTES;
  unsigned char *host = allocate(size);
  memset(host, POISON, size);
  unsigned char *memory = place(setup->device, host, size);
  fa_execution execution = {.workspace = memory + GUARD_BYTES,
                            .workspace_bytes = plan->workspace_bytes,
                            .num_threads = setup->num_threads};
  fa_status status = fa_run(plan, tensors, &execution, error);
  fetch(setup->device, host, memory, size);
  *guarded = all_poison(host, GUARD_BYTES) && all_poison(host + size - GUARD_BYTES, GUARD_BYTES);
  free(host);
  return status;
}

fa_outcome run_pass(const fa_setup *setup, const fa_problem *problem, fa_pass pass, fa_values *values,
                    char why[512]) {
  fa_plan plan;
  fa_error error;
  fa_status status = fa_plan_init(&plan, problem, pass, setup->device, &error);
  if (status) {
    snprintf(why, 512, "%s: %s", fa_status_name(status), error.message);
    return status == FA_STATUS_UNSUPPORTED ? OUTCOME_UNSUPPORTED : OUTCOME_BROKEN;
  }
  tensor_image images[FA_NUM_TENSORS];
  fa_tensors tensors = {0};
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    images[id] = image_new(problem, pass, id, setup, values->data[id]);
    *fa_tensor_at(&tensors, id) = images[id].tensor;
    fa_tensor_at(&tensors, id)->data = images[id].device ? images[id].device + images[id].front : NULL;
  }
  bool guarded;
  status = run_in_workspace(setup, &plan, &tensors, &guarded, &error);
  bool fine = status == FA_STATUS_OK && guarded;
  if (!guarded) snprintf(why, 512, "something outside the workspace was written");
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    char what[512];
    bool good = image_finish(&images[id], setup->device, values_count(problem, id), values->data[id],
                             fa_tensor_name(id), what);
    if (fine && !good) memcpy(why, what, sizeof what);
    fine = fine && good;
  }
  if (status) snprintf(why, 512, "%s: %s", fa_status_name(status), error.message);
  return fine ? OUTCOME_RAN : OUTCOME_BROKEN;
}

void must_run(const fa_setup *setup, const fa_problem *problem, fa_pass pass, fa_values *values) {
  char why[512];
  if (run_pass(setup, problem, pass, values, why) == OUTCOME_RAN) return;
  printf("FAILED: %s %s: %s\n", fa_device_kind_name(setup->device.kind), fa_pass_name(pass), why);
  exit(1);
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
