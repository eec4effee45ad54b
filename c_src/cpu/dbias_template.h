/*
 * Template: dbias, the gradient by the bias, which is the scores' gradient summed over the axes along which the
 * bias broadcasts. Its sums are made in the tensor, or in shared memory where several scores share an element
 * that is too narrow to sum them.
 *
 *     dbias [bias_batch, bias_heads, bias_rows, seqlen_k]
 *
 * Pairs of a sequence and a key/value head may share elements. They add to them pair by pair, so that sums have
 * the same bits for any number of threads: to those of a block of rows and columns one after the other; and
 * where all rows share them each has sums of its own, which are added when it has gone through its rows.
 *
 * Parameters: REAL, T(name), BLOCK (see kernels.c), and scores_template.h.
 */

/* The pairs that share elements of dbias with one, which is the number-th of them: the i-th is first + i *
 * step. */
typedef struct T(bias_group) {
  int64_t first, step, number;
} T(bias_group);

static T(bias_group) T(bias_group_of)(const fa_problem *problem, int64_t pair) {
  const int64_t kv_heads = problem->num_kv_heads, batch = pair / kv_heads, kv_head = pair % kv_heads;
  const bool all_batches = !fa_varies_along(problem, FA_TENSOR_DBIAS, FA_AXIS_BATCH);
  const bool all_heads = !fa_varies_along(problem, FA_TENSOR_DBIAS, FA_AXIS_NUM_HEADS);
  if (!fa_is_sum(problem, FA_TENSOR_DBIAS)) return (T(bias_group)){pair, 0, 0};
  if (all_batches && all_heads) return (T(bias_group)){0, 1, pair};
  if (all_batches) return (T(bias_group)){kv_head, kv_heads, batch};
  if (all_heads) return (T(bias_group)){batch * kv_heads, 1, kv_head};
  return (T(bias_group)){pair, 0, 0};
}

/* Whether there is a row of sums of columns, and of how many of the heads that share these. */
static int64_t T(num_bias_rows)(const fa_problem *problem) {
  if (!fa_is_sum(problem, FA_TENSOR_DBIAS) || fa_varies_along(problem, FA_TENSOR_DBIAS, FA_AXIS_SEQLEN_Q))
    return 0;
  return fa_varies_along(problem, FA_TENSOR_DBIAS, FA_AXIS_NUM_HEADS)
             ? problem->num_heads / problem->num_kv_heads
             : 1;
}

/* Whether several scores share an element of dbias, which is too narrow to sum them. */
static bool T(sums_bias_apart)(const fa_problem *problem) {
  const fa_axis axes[] = {FA_AXIS_BATCH, FA_AXIS_NUM_HEADS, FA_AXIS_SEQLEN_Q};
  bool is_shared = false;
  for (int i = 0; i < 3; i++)
    is_shared |= !fa_varies_along(problem, FA_TENSOR_DBIAS, axes[i]) && fa_axis_size(problem, axes[i]) > 1;
  return is_shared && fa_dtype_bytes(problem->bias_dtype) < sizeof(REAL);
}

/* Some elements of dbias. */
#define BIAS_CHUNK 16384

static int64_t T(num_bias_chunks)(const fa_problem *problem) {
  if (!fa_is_sum(problem, FA_TENSOR_DBIAS)) return 0;
  return fa_divide_up(fa_num_elements(problem, FA_TENSOR_DBIAS), BIAS_CHUNK);
}

static fa_range T(bias_chunk)(const fa_problem *problem, int64_t number) {
  const int64_t begin = number * BIAS_CHUNK;
  return (fa_range){begin, fa_min(begin + BIAS_CHUNK, fa_num_elements(problem, FA_TENSOR_DBIAS))};
}

/* The sums where they are made, and their type. shared is NULL where that is the tensor. */
static void *T(bias_sums)(const fa_cpu_job *job, REAL *shared, fa_dtype *dtype) {
  *dtype = shared ? (sizeof(REAL) == 8 ? FA_DTYPE_F64 : FA_DTYPE_F32) : job->problem->bias_dtype;
  return shared ? (void *)shared : job->tensors->dbias.data;
}

static void T(clear_bias)(const fa_cpu_job *job, REAL *shared, fa_range elements) {
  fa_dtype dtype;
  char *sums = T(bias_sums)(job, shared, &dtype);
  const size_t bytes = fa_dtype_bytes(dtype);
  memset(sums + (size_t)elements.begin * bytes, 0, (size_t)(elements.end - elements.begin) * bytes);
}

static void T(finish_bias)(const fa_cpu_job *job, REAL *shared, fa_range elements) {
  const int64_t count = elements.end - elements.begin;
  const size_t bytes = fa_dtype_bytes(job->problem->bias_dtype);
  memset((char *)job->tensors->dbias.data + (size_t)elements.begin * bytes, 0, (size_t)count * bytes);
  T(add_numbers)
  (job->tensors->dbias.data, job->problem->bias_dtype, elements.begin, count, shared + elements.begin);
}

/* Where the gradient by a tile's scores goes: to the sums of its columns, if all rows share elements; where its
 * sums are made, if vectors can be added there; or else into scratch [BLOCK, BLOCK]. of_columns
 * [T(num_bias_rows)][BLOCK]. */
static T(addends_gradient) T(bias_gradient_of)(const fa_cpu_job *job, REAL *shared, const fa_tile *tile,
                                               REAL *of_columns, REAL *scratch) {
  const int64_t num_rows = T(num_bias_rows)(job->problem);
  if (num_rows > 0) return (T(addends_gradient)){of_columns + tile->head % num_rows * BLOCK, 0, true};
  fa_dtype dtype;
  void *sums = T(bias_sums)(job, shared, &dtype);
  if (!T(is_in_vectors)(job->problem, FA_TENSOR_DBIAS, dtype, tile))
    return (T(addends_gradient)){scratch, BLOCK, false};
  const T(numbers) at = T(numbers_of)(job->problem, FA_TENSOR_DBIAS, tile);
  return (T(addends_gradient)){(REAL *)sums + at.first, at.stride, true};
}

/* Adds rows [rows of the tile][BLOCK] of what its scores' gradient is to dbias. */
static void T(add_bias_gradient)(const fa_cpu_job *job, REAL *shared, const fa_tile *tile, const REAL *from) {
  const T(numbers) at = T(numbers_of)(job->problem, FA_TENSOR_DBIAS, tile);
  fa_dtype dtype;
  void *sums = T(bias_sums)(job, shared, &dtype);
  for (int64_t i = 0; i < tile->rows.end - tile->rows.begin; i++) T(add_numbers)
  (sums, dtype, at.first + i * at.stride, tile->columns.end - tile->columns.begin, from + i * BLOCK);
}
