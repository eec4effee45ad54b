/*
 * Template: rows of tensors, in and out, as REAL, and the layouts that products read them in.
 *
 * Parameters: REAL, T(name), IS_COMPLEX, MR, NR, BLOCK; see kernels.c.
 */

/* The rows of one head of a sequence, in one tensor. */
typedef struct T(rows) {
  char *data;
  int64_t stride_bytes;
  fa_dtype dtype;
#if IS_COMPLEX
  char *tangent;
  int64_t tangent_stride_bytes;
#else
  const fa_sequence *on_pages; /* the sequence whose pages these are rows of, or NULL */
  int64_t page_bytes;          /* from one page to the next */
#endif
} T(rows);

INLINE char *T(first_row)(const fa_tensor *tensor, size_t element_bytes, const fa_sequence *sequence,
                          int64_t head) {
  return (char *)tensor->data +
         (sequence->batch * tensor->stride_batch + head * tensor->stride_head) * (int64_t)element_bytes;
}

#if IS_COMPLEX

/* A direction is followed for a step so small that its square vanishes beside 1, and the imaginary part,
 * divided by the step, is the derivative to full precision (Squire and Trapp 1998). A power of two: exact. */
#define STEP 0x1p-330

static T(rows) T(rows_of)(const fa_cpu_job *job, fa_tensor_id id, const fa_sequence *sequence, int64_t head) {
  const fa_tensor *value = fa_tensor_get(job->tensors, id);
  const fa_tensor *tangent = fa_tensor_get(job->tensors, fa_tensor_tangent(id));
  return (T(rows)){T(first_row)(value, 8, sequence, head), value->stride_row * 8, job->problem->dtype,
                   T(first_row)(tangent, 8, sequence, head), tangent->stride_row * 8};
}

INLINE const REAL *T(load_row)(T(rows) from, int64_t row, int64_t count, REAL *buffer) {
  const double *value = (const double *)(from.data + row * from.stride_bytes);
  const double *tangent = (const double *)(from.tangent + row * from.tangent_stride_bytes);
  for (int64_t i = 0; i < count; i++) buffer[i] = CMPLX(value[i], tangent[i] * STEP);
  return buffer;
}

INLINE void T(store_row)(T(rows) to, int64_t row, int64_t count, const REAL *values) {
  double *value = (double *)(to.data + row * to.stride_bytes);
  double *tangent = (double *)(to.tangent + row * to.tangent_stride_bytes);
  for (int64_t i = 0; i < count; i++) value[i] = creal(values[i]), tangent[i] = cimag(values[i]) / STEP;
}

/* What a tensor without head_dim, of that type, holds from an element on; of u8: what a flag adds to a score.
 * Nobody differentiates by flags. */
static void T(load_numbers)(const fa_cpu_job *job, fa_tensor_id id, fa_dtype dtype, int64_t element,
                            int64_t count, REAL *to) {
  const char *values = fa_tensor_get(job->tensors, id)->data;
  const char *tangents = fa_tensor_get(job->tensors, fa_tensor_tangent(id))->data;
  for (int64_t i = element; i < element + count; i++, to++) {
    if (dtype == FA_DTYPE_U8)
      *to = values[i] ? 0 : -INFINITY;
    else if (dtype == FA_DTYPE_F32)
      *to = CMPLX(((const float *)values)[i], (double)((const float *)tangents)[i] * STEP);
    else
      *to = CMPLX(((const double *)values)[i], ((const double *)tangents)[i] * STEP);
  }
}

INLINE void T(store_lse)(const fa_cpu_job *job, int64_t i, REAL lse) {
  ((double *)job->tensors->lse.data)[i] = creal(lse);
  ((double *)job->tensors->lse_tangent.data)[i] = cimag(lse) / STEP;
}

#else

static T(rows) T(rows_of)(const fa_cpu_job *job, fa_tensor_id id, const fa_sequence *sequence, int64_t head) {
  const fa_tensor *tensor = fa_tensor_get(job->tensors, id);
  const int64_t element_bytes = (int64_t)fa_dtype_bytes(job->problem->dtype);
  const bool is_paged = fa_is_paged(job->problem, id);
  char *data = is_paged ? (char *)tensor->data + head * tensor->stride_head * element_bytes
                        : T(first_row)(tensor, (size_t)element_bytes, sequence, head);
  return (T(rows)){data, tensor->stride_row * element_bytes, job->problem->dtype, is_paged ? sequence : NULL,
                   tensor->stride_batch * element_bytes};
}

/* Whether rows may be on pages that are not there. */
INLINE bool T(has_gaps)(T(rows) from) { return from.on_pages; }

/* Where rows begin; NULL where they are on a page that is not there. */
INLINE void T(rows_at)(T(rows) from, int64_t row, int64_t count, const char **at) {
  if (!from.on_pages)
    for (int64_t n = 0; n < count; n++) at[n] = from.data + (row + n) * from.stride_bytes;
  for (int64_t n = 0; from.on_pages && n < count;) {
    const int64_t page_size = from.on_pages->page_size;
    const fa_page_row first =
        fa_page_row_of(from.on_pages->pages, page_size, from.on_pages->num_pages, row + n);
    const char *page = first.page < 0 ? NULL : from.data + first.page * from.page_bytes;
    for (int64_t i = first.row; i < page_size && n < count; i++, n++)
      at[n] = page ? page + i * from.stride_bytes : NULL;
  }
}

INLINE const char *T(row_at)(T(rows) from, int64_t row) {
  const char *at;
  T(rows_at)(from, row, 1, &at);
  return at;
}

/* Whether the processor has instructions for vectors of f16. */
#define CONVERTS_F16 (IS_F32 && VECTOR_BYTES >= 32)

#if CONVERTS_F16
INLINE T(vec) T(load_f16)(const uint16_t *from) {
#if VECTOR_BYTES == 64
  return (T(vec))_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#else
  return (T(vec))_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#endif
}

INLINE void T(store_f16)(uint16_t *to, T(vec) x) {
#if VECTOR_BYTES == 64
  _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#else
  _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#endif
}
#endif

/* f16 to REAL and back. */
static void T(from_f16)(const uint16_t *halves, int64_t count, REAL *to) {
  int64_t i = 0;
#if CONVERTS_F16
  for (; i + LANES <= count; i += LANES) T(store)(to + i, T(load_f16)(halves + i));
#endif
  for (; i < count; i++) to[i] = fa_f16_to_f32(halves[i]);
}

static void T(to_f16)(const REAL *from, int64_t count, uint16_t *halves) {
  int64_t i = 0;
#if CONVERTS_F16
  for (; i + LANES <= count; i += LANES) T(store_f16)(halves + i, T(load)(from + i));
#endif
  for (; i < count; i++) halves[i] = fa_f32_to_f16((float)from[i]);
}

/* LANES numbers of a row of that type, from a column on. Of a conversion of vectors of bf16 compilers make more
 * than there is to it. */
INLINE T(vec) T(load_typed)(const char *row, int64_t column, fa_dtype dtype) {
#if IS_F32
  const uint16_t *half = (const uint16_t *)row + column;
  if (dtype == FA_DTYPE_BF16) {
#if VECTOR_BYTES == 64
    const __m512i upper = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)half));
#elif VECTOR_BYTES == 32
    const __m256i upper = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)half));
#else
    T(mask) upper = {0};
    for (int v = 0; v < LANES; v++) upper[v] = half[v];
#endif
    return (T(vec))((T(mask))upper << 16);
  }
  if (dtype == FA_DTYPE_F16) {
#if CONVERTS_F16
    return T(load_f16)(half);
#else
    REAL lanes[LANES];
    T(from_f16)(half, LANES, lanes);
    return T(load)(lanes);
#endif
  }
#endif
  (void)dtype;
  return T(load)((const REAL *)row + column);
}

/* What T(rows_at) found, as REAL: in place where it is that already, else in buffer. */
INLINE const REAL *T(read_row)(const char *row, fa_dtype dtype, int64_t count, REAL *buffer) {
  const uint16_t *half = (const uint16_t *)row;
  if (!row) {
    memset(buffer, 0, (size_t)count * sizeof *buffer);
  } else if (dtype == FA_DTYPE_BF16) {
    for (int64_t i = 0; i < count; i++) buffer[i] = fa_bf16_to_f32(half[i]);
  } else if (dtype == FA_DTYPE_F16) {
    T(from_f16)(half, count, buffer);
  } else {
    return (const REAL *)row;
  }
  return buffer;
}

INLINE const REAL *T(load_row)(T(rows) from, int64_t row, int64_t count, REAL *buffer) {
  return T(read_row)(T(row_at)(from, row), from.dtype, count, buffer);
}

INLINE void T(store_row)(T(rows) to, int64_t row, int64_t count, const REAL *values) {
  char *data = to.data + row * to.stride_bytes;
  uint16_t *half = (uint16_t *)data;
  if (to.dtype == FA_DTYPE_BF16) {
    for (int64_t i = 0; i < count; i++) half[i] = fa_f32_to_bf16((float)values[i]);
  } else if (to.dtype == FA_DTYPE_F16) {
    T(to_f16)(values, count, half);
  } else {
    memcpy(data, values, (size_t)count * sizeof *values);
  }
}

static void T(load_numbers)(const fa_cpu_job *job, fa_tensor_id id, fa_dtype dtype, int64_t element,
                            int64_t count, REAL *to) {
  const char *values =
      (const char *)fa_tensor_get(job->tensors, id)->data + element * (int64_t)fa_dtype_bytes(dtype);
  const uint16_t *halves = (const uint16_t *)values;
  switch (dtype) {
    case FA_DTYPE_BF16:
      for (int64_t i = 0; i < count; i++) to[i] = fa_bf16_to_f32(halves[i]);
      break;
    case FA_DTYPE_F16: T(from_f16)(halves, count, to); break;
    case FA_DTYPE_U8:
      for (int64_t i = 0; i < count; i++) to[i] = values[i] ? 0 : -INFINITY;
      break;
    case FA_DTYPE_F32:
      for (int64_t i = 0; i < count; i++) to[i] = ((const float *)values)[i];
      break;
    default: memcpy(to, values, (size_t)count * sizeof *to); /* f64, where REAL is that, too */
  }
}

/* Adds to what a tensor without head_dim, of floats, holds from an element on. */
static void T(add_numbers)(void *data, fa_dtype dtype, int64_t element, int64_t count, const REAL *from) {
  char *values = (char *)data + element * (int64_t)fa_dtype_bytes(dtype);
  uint16_t *halves = (uint16_t *)values;
  switch (dtype) {
    case FA_DTYPE_BF16:
      for (int64_t i = 0; i < count; i++)
        halves[i] = fa_f32_to_bf16(fa_bf16_to_f32(halves[i]) + (float)from[i]);
      break;
    case FA_DTYPE_F16:
      for (int64_t i = 0; i < count; i++) halves[i] = fa_f32_to_f16(fa_f16_to_f32(halves[i]) + (float)from[i]);
      break;
    case FA_DTYPE_F32:
      for (int64_t i = 0; i < count; i++) ((float *)values)[i] += (float)from[i];
      break;
    default:
      for (int64_t i = 0; i < count; i++) ((double *)values)[i] += (double)from[i];
  }
}

INLINE void T(store_lse)(const fa_cpu_job *job, int64_t i, REAL lse) {
  ((REAL *)job->tensors->lse.data)[i] = lse;
}

#endif

static REAL T(number_at)(const fa_cpu_job *job, fa_tensor_id id, const fa_cell *cell) {
  REAL number;
  T(load_numbers)
  (job, id, fa_tensor_dtype(job->problem, id), fa_element_of(job->problem, id, cell), 1, &number);
  return number;
}

/* The sink of that number: of those of all rows, then of the row's own. */
static REAL T(sink)(const fa_cpu_job *job, fa_cell cell) {
  const int64_t own = cell.number - job->problem->num_sinks;
  if (own < 0) return T(number_at)(job, FA_TENSOR_SINK, &cell);
  cell.number = own;
  return T(number_at)(job, FA_TENSOR_ROW_SINKS, &cell);
}

/* The three layouts below hold a block of rows, `count` of them, of `columns` numbers, as operands of products
 * (vector_template.h). In the first and the last these are numbers of a row, in the second of a column. */

#if PAIRS

/* Numbers of a row from a column on, as they lie in memory, zeros past the last of count; 2 LANES at most. */
INLINE __m512i T(load_halves)(const char *row, int64_t column, int64_t count) {
  const __mmask32 mask = count >= 2 * LANES ? ~(__mmask32)0 : ((__mmask32)1 << count) - 1;
  return row ? _mm512_maskz_loadu_epi16(mask, row + 2 * column) : _mm512_setzero_si512();
}

/* to[count rounded up to MR][operands of columns], zeros past the last row. */
static void T(pack_rows)(T(rows) from, fa_range block, int64_t columns, T(operand) * to) {
  const int64_t count = block.end - block.begin, operands = T(operands)(columns);
  for (int64_t r = 0; r < count; r++, to += operands) {
    const char *row = T(row_at)(from, block.begin + r);
    to[operands - 1] = 0;
    if (row)
      memcpy(to, row, (size_t)columns * 2);
    else
      memset(to, 0, (size_t)operands * sizeof *to);
  }
  memset(to, 0, (size_t)((fa_round_up(count, MR) - count) * operands) * sizeof *to);
}

/* to[columns / NR][operands of BLOCK][NR]: panels whose columns are the tensor's columns, zeros past the last
 * one and, where the number of rows is odd, past the last row. */
static void T(pack_panels)(T(rows) from, fa_range block, int64_t columns, T(operand) * to, REAL *buffer) {
  (void)buffer;
  _Static_assert(NR == 2 * LANES, "a vector of halves is a row of a panel");
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38,
                                       6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(LANES));
  for (int64_t r = block.begin; r < block.end; r += 2) {
    const char *first = T(row_at)(from, r), *second = r + 1 < block.end ? T(row_at)(from, r + 1) : NULL;
    T(operand) *pairs = to + (r - block.begin) / 2 * NR;
    for (int64_t x = 0; x < columns; x += NR, pairs += T(operands)(BLOCK) * NR) {
      const __m512i a = T(load_halves)(first, x, columns - x), b = T(load_halves)(second, x, columns - x);
      _mm512_storeu_si512(pairs, _mm512_permutex2var_epi16(a, low, b));
      _mm512_storeu_si512(pairs + LANES, _mm512_permutex2var_epi16(a, high, b));
    }
  }
}

/* to[count / NR][operands of columns][NR]: panels whose columns are the tensor's rows, zeros past the last one.
 */
static void T(pack_transposed)(T(rows) from, fa_range block, int64_t columns, T(operand) * to, REAL *buffer) {
  (void)buffer;
  const int64_t count = block.end - block.begin, operands = T(operands)(columns);
  for (int64_t r = 0; r < fa_round_up(count, NR); r += LANES)
    for (int64_t p = 0; p < operands; p += LANES) {
      T(vec) square[LANES];
      for (int v = 0; v < LANES; v++) {
        const char *row = r + v < count ? T(row_at)(from, block.begin + r + v) : NULL;
        square[v] = (T(vec))T(load_halves)(row, 2 * p, columns - 2 * p);
      }
      T(transpose)(square);
      T(operand) *lanes = to + r / NR * operands * NR + p * NR + r % NR;
      for (int v = 0; v < LANES && p + v < operands; v++) *(T(vec) *)(lanes + v * NR) = square[v];
    }
}

#else

/* to[count rounded up to MR][columns], zeros past the last row. */
static void T(pack_rows)(T(rows) from, fa_range block, int64_t columns, REAL *to) {
  int64_t count = block.end - block.begin;
  for (int64_t r = 0; r < count; r++, to += columns) {
    const REAL *row = T(load_row)(from, block.begin + r, columns, to);
    if (row != to) memcpy(to, row, (size_t)columns * sizeof *to);
  }
  memset(to, 0, (size_t)((fa_round_up(count, MR) - count) * columns) * sizeof *to);
}

/* to[columns / NR][BLOCK][NR]: panels whose columns are the tensor's columns, zeros past the last one. */
static void T(pack_panels)(T(rows) from, fa_range block, int64_t columns, REAL *to, REAL *buffer) {
  for (int64_t r = 0; r < block.end - block.begin; r++) {
    const REAL *row = T(load_row)(from, block.begin + r, columns, buffer);
    int64_t x = 0;
    for (; x + NR <= columns; x += NR) memcpy(to + x * BLOCK + r * NR, row + x, NR * sizeof *to);
    for (int64_t i = 0; x < columns && i < NR; i++)
      to[x * BLOCK + r * NR + i] = x + i < columns ? row[x + i] : 0;
  }
}

#if !IS_COMPLEX

/* LANES numbers of a row, from a column on. */
INLINE T(vec) T(load_lanes)(T(rows) from, int64_t row, int64_t column) {
  const char *data = T(row_at)(from, row);
  return data ? T(load_typed)(data, column, from.dtype) : T(splat)(0);
}

/* A part of the next layout: LANES rows become to[columns][NR]. Of the columns the first whole vectors, whose
 * number is returned. */
static int64_t T(transpose_rows)(T(rows) from, int64_t row, int64_t columns, REAL *to) {
  int64_t p = 0;
  for (; p + LANES <= columns; p += LANES) {
    T(vec) square[LANES];
    for (int v = 0; v < LANES; v++) square[v] = T(load_lanes)(from, row + v, p);
    T(transpose)(square);
    for (int v = 0; v < LANES; v++) *(T(vec) *)(to + (p + v) * NR) = square[v];
  }
  return p;
}

#else

static int64_t T(transpose_rows)(T(rows) from, int64_t row, int64_t columns, REAL *to) {
  (void)from, (void)row, (void)columns, (void)to;
  return 0;
}

#endif

/* to[count / NR][columns][NR]: panels whose columns are the tensor's rows, zeros past the last one. */
static void T(pack_transposed)(T(rows) from, fa_range block, int64_t columns, REAL *to, REAL *buffer) {
  const int64_t count = block.end - block.begin;
  int64_t done = 0; /* columns of these LANES rows */
  for (int64_t r = 0; r < fa_round_up(count, NR); r++) {
    if (r % LANES == 0)
      done = r + LANES <= count
                 ? T(transpose_rows)(from, block.begin + r, columns, to + r / NR * columns * NR + r % NR)
                 : 0;
    if (done == columns) continue;
    const REAL *row = r < count ? T(load_row)(from, block.begin + r, columns, buffer) : NULL;
    REAL *lane = to + r / NR * columns * NR + r % NR;
    for (int64_t p = done; p < columns; p++) lane[p * NR] = row ? row[p] : 0;
  }
}

#endif
