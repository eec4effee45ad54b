/*
 * Template: dbias, the gradient by the bias, which is the scores' gradient summed over the axes along which the
 * bias broadcasts. Its sums are made in the tensor, or in shared memory where several scores share an element
 * that is too narrow to sum them.
 *
 *     dbias [bias_batch, bias_heads, bias_rows, seqlen_k]
 *
 * Cells of different pairs of a sequence and a key/value head may share elements. They add to a block of
 * columns in turn, so that sums have the same bits for any number of threads: turns are counted block by block,
 * step by step and, within a step, pair by pair, which is the order in which tasks are numbered.
 *
 * Parameters: REAL, T(name), BLOCK (see kernels.c), and scores_template.h.
 */

/* The pairs that share elements of dbias are a group, each with a number in it. */
typedef struct T(bias_group) {
  int64_t group, number, size;
} T(bias_group);

static T(bias_group) T(bias_group_of)(const fa_problem *problem, int64_t pair) {
  const int64_t kv_heads = problem->num_kv_heads, batch = pair / kv_heads, kv_head = pair % kv_heads;
  const bool all_batches = !fa_varies_along(problem, FA_TENSOR_DBIAS, FA_AXIS_BATCH);
  const bool all_heads = !fa_varies_along(problem, FA_TENSOR_DBIAS, FA_AXIS_NUM_HEADS);
  if (all_batches && all_heads) return (T(bias_group)){0, pair, (problem->batch * problem->num_kv_heads)};
  if (all_batches) return (T(bias_group)){kv_head, batch, problem->batch};
  if (all_heads) return (T(bias_group)){batch, kv_head, kv_heads};
  return (T(bias_group)){pair, 0, 1};
}

static int64_t T(num_turns)(const fa_problem *problem) {
  return fa_divide_up(problem->seqlen_k, BLOCK) * (problem->batch * problem->num_kv_heads);
}

static int64_t T(turns_of)(const fa_problem *problem, int64_t group, fa_range columns) {
  return group * fa_divide_up(problem->seqlen_k, BLOCK) + columns.begin / BLOCK;
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

/* Where the gradient by a tile's scores goes: where its sums are made, if vectors can be added there, or else
 * into scratch [BLOCK, BLOCK]. */
static T(addends_gradient)
    T(bias_gradient_of)(const fa_cpu_job *job, REAL *shared, const fa_tile *tile, REAL *scratch) {
  fa_dtype dtype;
  void *sums = T(bias_sums)(job, shared, &dtype);
  if (!T(is_in_vectors)(job->problem, FA_TENSOR_DBIAS, dtype, tile))
    return (T(addends_gradient)){scratch, BLOCK, false};
  const T(numbers) at = T(numbers_of)(job->problem, FA_TENSOR_DBIAS, tile);
  return (T(addends_gradient)){(REAL *)sums + at.first, at.stride, true};
}

/* Adds the gradient by a tile's scores, ds [BLOCK, BLOCK], to dbias, and leaves whatever in its
 * place. */
static void T(add_bias_gradient)(const fa_cpu_job *job, REAL *shared, const fa_tile *tile, REAL *ds) {
  int64_t num_rows = tile->rows.end - tile->rows.begin, num_columns = tile->columns.end - tile->columns.begin;
  const T(numbers) at = T(numbers_of)(job->problem, FA_TENSOR_DBIAS, tile);
  fa_dtype dtype;
  void *sums = T(bias_sums)(job, shared, &dtype);
  for (int64_t i = 1; i < num_rows && at.stride == 0; i++)
    for (int64_t j = 0; j < num_columns; j++) ds[j] += ds[i * BLOCK + j];
  for (int64_t i = 0; i < (at.stride ? num_rows : 1); i++)
    T(add_numbers)(sums, dtype, at.first + i * at.stride, num_columns, ds + i * BLOCK);
}
