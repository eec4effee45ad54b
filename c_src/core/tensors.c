/* The axis table and the tensor table, and everything that is derived from them alone. */
#include "tensors.h"

#include <string.h>

#include "bands.h"
#include "error.h"
#include "problem.h"

/* The first fields are named in rows here, for clang to know that the rest is left out on purpose. */
#define SIZE(size, letters, ...) \
  { .name = #size, .short_name = letters, .offset = offsetof(fa_problem, size), __VA_ARGS__ }
const fa_axis_row fa_axes[FA_NUM_AXES] = {
    [FA_AXIS_BATCH] = SIZE(batch, "b", 0),
    [FA_AXIS_SEQLEN_Q] = SIZE(seqlen_q, "sq", 0),
    [FA_AXIS_SEQLEN_K] = SIZE(seqlen_k, "sk", 0),
    [FA_AXIS_NUM_HEADS] = SIZE(num_heads, "h", 1),
    [FA_AXIS_NUM_KV_HEADS] = SIZE(num_kv_heads, "kv", 1),
    [FA_AXIS_HEAD_DIM] = SIZE(head_dim, "d", 1),
    [FA_AXIS_NUM_SINKS] = SIZE(num_sinks, "sinks", 0),
    [FA_AXIS_NUM_ROW_SINKS] = SIZE(num_row_sinks, "rowsinks", 0),
    [FA_AXIS_BANDS_BATCH] = SIZE(bands_batch, "bands", 0, FA_AXIS_BATCH),
    [FA_AXIS_NUM_BANDS] = SIZE(num_bands, "x", 0),
    [FA_AXIS_BAND_WORDS] = {.name = "q_begin, q_end, k_begin, k_end, left, right:", .minimum = 6},
    [FA_AXIS_ALIBI_BATCH] = SIZE(alibi_batch, "alibi", 0, FA_AXIS_BATCH),
    [FA_AXIS_BIAS_BATCH] = SIZE(bias_batch, "bias", 0, FA_AXIS_BATCH),
    [FA_AXIS_BIAS_HEADS] = SIZE(bias_heads, "x", 0, FA_AXIS_NUM_HEADS),
    [FA_AXIS_BIAS_ROWS] = SIZE(bias_rows, "x", 0, FA_AXIS_SEQLEN_Q),
    [FA_AXIS_SEED_WORDS] = SIZE(num_seed_words, "seed", 0),
    [FA_AXIS_DLSE_BATCH] = SIZE(dlse_batch, "dlse", 0, FA_AXIS_BATCH),
    [FA_AXIS_LENGTHS_BATCH] = SIZE(lengths_batch, "lengths", 0, FA_AXIS_BATCH),
    [FA_AXIS_NUM_PAGES] = SIZE(num_pages, "pages", 0),
    [FA_AXIS_PAGE_SIZE] = SIZE(page_size, "page", 0),
    [FA_AXIS_MAX_PAGES] = SIZE(max_pages, "table", 0),
};
#undef SIZE

/* The types that a tensor may have: a set of these, and of types by name. */
#define AS_Q       (1u << 30)
#define STAT       (1u << 31) /* f32, or f64 where q is f64 */
#define TYPE(name) (1u << FA_DTYPE_##name)

#define QUERY_SHAPE  {FA_AXIS_BATCH, FA_AXIS_SEQLEN_Q, FA_AXIS_NUM_HEADS, FA_AXIS_HEAD_DIM}, AS_Q
#define KEY_SHAPE    {FA_AXIS_BATCH, FA_AXIS_SEQLEN_K, FA_AXIS_NUM_KV_HEADS, FA_AXIS_HEAD_DIM}, AS_Q
#define ROW_SHAPE    {FA_AXIS_BATCH, FA_AXIS_NUM_HEADS, FA_AXIS_SEQLEN_Q}, STAT
#define DLSE_SHAPE   {FA_AXIS_DLSE_BATCH, FA_AXIS_NUM_HEADS, FA_AXIS_SEQLEN_Q}, STAT
#define SINK_SHAPE   {FA_AXIS_NUM_SINKS, FA_AXIS_NUM_HEADS}, TYPE(F32)
#define OWN_SINKS    {FA_AXIS_BATCH, FA_AXIS_SEQLEN_Q, FA_AXIS_NUM_ROW_SINKS, FA_AXIS_NUM_HEADS}, TYPE(F32)
#define BAND_SHAPE   {FA_AXIS_BANDS_BATCH, FA_AXIS_NUM_BANDS, FA_AXIS_BAND_WORDS}, TYPE(S32)
#define SLOPES_SHAPE {FA_AXIS_ALIBI_BATCH, FA_AXIS_NUM_HEADS}, TYPE(F32)
#define BIAS_SHAPE \
  {FA_AXIS_BIAS_BATCH, FA_AXIS_BIAS_HEADS, FA_AXIS_BIAS_ROWS, FA_AXIS_SEQLEN_K}, AS_Q | TYPE(F32) | TYPE(U8)
#define LENGTHS_SHAPE {FA_AXIS_LENGTHS_BATCH}, TYPE(S32)
#define PAGES_SHAPE   {FA_AXIS_BATCH, FA_AXIS_MAX_PAGES}, TYPE(S32)
#define ON_PAGES      .paged = {FA_AXIS_NUM_PAGES, FA_AXIS_PAGE_SIZE}
#define IF_BANDS      .only_if = FA_AXIS_NUM_BANDS
#define IF_SEED       .only_if = FA_AXIS_SEED_WORDS
#define IF_BIAS       .only_if = FA_AXIS_BIAS_HEADS, .dtype_offset = offsetof(fa_problem, bias_dtype)
#define IF_SLOPES     .only_if = FA_AXIS_ALIBI_BATCH
#define IF_DLSE       .only_if = FA_AXIS_DLSE_BATCH
#define IF_LENGTHS    .only_if = FA_AXIS_LENGTHS_BATCH
#define IF_PAGES      .only_if = FA_AXIS_MAX_PAGES

/* One row a tensor. A new one that users may leave out has a field in fa_problem for each size that is its own,
 * a row in fa_axes for each of these (an axis that may broadcast is one of its own, `along` another), and names
 * one of them in only_if. */
static const struct tensor_row {
  const char *name;
  size_t offset;                       /* in fa_tensors */
  fa_axis axes[FA_MAX_RANK];           /* its shape, up to the first FA_AXIS_NONE */
  unsigned types;                      /* of several, the problem keeps the actual one at dtype_offset */
  fa_tensor_role roles[FA_PASS_BOUND]; /* forward, backward, tangent */
  fa_axis only_if;                     /* left out where this axis is 0 */
  fa_axis paged[2];                    /* what takes the place of its first axes where there is a page table */
  fa_tensor_id gradient, tangent;      /* what holds them; 0, which is q and neither, stands for none */
  size_t dtype_offset;                 /* of a fa_dtype in fa_problem */
  size_t unless;                       /* of an int32_t in fa_problem: left out where that is not 0 */
  fa_status (*check)(const fa_problem *, const void *numbers,
                     fa_error *); /* what else numbers must be, or NULL */
} rows[FA_NUM_TENSORS] = {
#define ROW(id, member, ...) \
  [FA_TENSOR_##id] = {.name = #member, .offset = offsetof(fa_tensors, member), __VA_ARGS__}
#define DERIVATIVES(id) .gradient = FA_TENSOR_D##id, .tangent = FA_TENSOR_TANGENT_##id
#define IN              FA_ROLE_INPUT
#define OUT             FA_ROLE_OUTPUT
/* A tensor that is there where a size is not 0, its gradient and its tangent. */
#define DIFFERENTIATED(id, name, size, ...)                                   \
  ROW(id, name, __VA_ARGS__, {IN, IN, IN}, .only_if = size, DERIVATIVES(id)), \
      ROW(D##id, d##name, __VA_ARGS__, {0, OUT, 0}, .only_if = size),         \
      ROW(TANGENT_##id, tangent_##name, __VA_ARGS__, {0, 0, IN}, .only_if = size)
    ROW(Q, q, QUERY_SHAPE, {IN, IN, IN}, DERIVATIVES(Q)),
    ROW(K, k, KEY_SHAPE, {IN, IN, IN}, DERIVATIVES(K), ON_PAGES),
    ROW(V, v, KEY_SHAPE, {IN, IN, IN}, DERIVATIVES(V), ON_PAGES),
    DIFFERENTIATED(SINK, sink, FA_AXIS_NUM_SINKS, SINK_SHAPE),
    DIFFERENTIATED(ROW_SINKS, row_sinks, FA_AXIS_NUM_ROW_SINKS, OWN_SINKS),
    ROW(BANDS, bands, BAND_SHAPE, {IN, IN, IN}, IF_BANDS, .check = fa_bands_check),
    ROW(ALIBI_SLOPES, alibi_slopes, SLOPES_SHAPE, {IN, IN, IN}, IF_SLOPES, DERIVATIVES(ALIBI_SLOPES)),
    ROW(BIAS, bias, BIAS_SHAPE, {IN, IN, IN}, IF_BIAS, DERIVATIVES(BIAS)),
    ROW(DROPOUT_SEED, dropout_seed, {FA_AXIS_SEED_WORDS}, TYPE(U32), {IN, IN, IN}, IF_SEED),
    ROW(KEY_LENGTHS, key_lengths, LENGTHS_SHAPE, {IN, IN, IN}, IF_LENGTHS, .check = fa_key_lengths_check),
    ROW(PAGE_TABLE, page_table, PAGES_SHAPE, {IN, IN, IN}, IF_PAGES),
    ROW(O, o, QUERY_SHAPE, {OUT, IN, OUT}, .gradient = FA_TENSOR_DOUT, .tangent = FA_TENSOR_O_TANGENT),
    ROW(LSE, lse, ROW_SHAPE, {OUT, IN, OUT}, .tangent = FA_TENSOR_LSE_TANGENT),
    ROW(DOUT, dout, QUERY_SHAPE, {0, IN, 0}),
    ROW(DLSE, dlse, DLSE_SHAPE, {0, IN, 0}, IF_DLSE),
    ROW(DQ, dq, QUERY_SHAPE, {0, OUT, 0}),
    ROW(DK, dk, KEY_SHAPE, {0, OUT, 0}),
    ROW(DV, dv, KEY_SHAPE, {0, OUT, 0}),
    ROW(DALIBI_SLOPES, dalibi_slopes, SLOPES_SHAPE, {0, OUT, 0}, IF_SLOPES,
        .unless = offsetof(fa_problem, constant_alibi_slopes)),
    ROW(DBIAS, dbias, BIAS_SHAPE, {0, OUT, 0}, IF_BIAS, .unless = offsetof(fa_problem, constant_bias)),
    ROW(TANGENT_Q, tangent_q, QUERY_SHAPE, {0, 0, IN}),
    ROW(TANGENT_K, tangent_k, KEY_SHAPE, {0, 0, IN}),
    ROW(TANGENT_V, tangent_v, KEY_SHAPE, {0, 0, IN}),
    ROW(TANGENT_ALIBI_SLOPES, tangent_alibi_slopes, SLOPES_SHAPE, {0, 0, IN}, IF_SLOPES),
    ROW(TANGENT_BIAS, tangent_bias, BIAS_SHAPE, {0, 0, IN}, IF_BIAS),
    ROW(O_TANGENT, o_tangent, QUERY_SHAPE, {0, 0, OUT}),
    ROW(LSE_TANGENT, lse_tangent, ROW_SHAPE, {0, 0, OUT}),
#undef ROW
#undef DIFFERENTIATED
#undef DERIVATIVES
#undef IN
#undef OUT
};

static const char *const pass_names[FA_NUM_PASSES] = {"forward", "backward", "tangent", "bound"};

const char *fa_tensor_name(fa_tensor_id id) { return (unsigned)id < FA_NUM_TENSORS ? rows[id].name : ""; }

int fa_tensor_find(const char *name) {
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (strcmp(rows[id].name, name) == 0) return id;
  return -1;
}

const char *fa_pass_name(fa_pass pass) { return (unsigned)pass < FA_NUM_PASSES ? pass_names[pass] : ""; }

/* ---- axes ------------------------------------------------------------------------------------------------ */

int64_t fa_axis_size(const fa_problem *problem, fa_axis axis) {
  int64_t size = fa_axes[axis].minimum;
  if (fa_axes[axis].offset) memcpy(&size, (const char *)problem + fa_axes[axis].offset, sizeof size);
  return size;
}

static void set_axis_size(fa_problem *problem, fa_axis axis, int64_t size) {
  if (fa_axes[axis].offset) memcpy((char *)problem + fa_axes[axis].offset, &size, sizeof size);
}

static fa_axis axis_run_along(fa_axis axis) { return fa_axes[axis].along ? fa_axes[axis].along : axis; }

bool fa_is_paged(const fa_problem *problem, int id) { return problem->max_pages > 0 && rows[id].paged[0]; }

/* The tensor's axis number i, FA_AXIS_NONE from its rank on. */
static fa_axis own_axis(const fa_problem *problem, int id, int i) {
  return i >= FA_MAX_RANK                    ? FA_AXIS_NONE
         : i < 2 && fa_is_paged(problem, id) ? rows[id].paged[i]
                                             : rows[id].axes[i];
}

fa_axis fa_axis_at(const fa_problem *problem, int id, int i) {
  return axis_run_along(own_axis(problem, id, i));
}

int fa_axis_of(int id, fa_axis axis) {
  for (int i = 0; i < FA_MAX_RANK; i++)
    if (axis_run_along(rows[id].axes[i]) == axis) return i;
  return -1;
}

void fa_axes_follow(fa_problem *part, const fa_problem *whole) {
  for (fa_axis axis = 0; axis < FA_NUM_AXES; axis++) {
    const fa_axis along = fa_axes[axis].along;
    if (along && fa_axis_size(whole, axis) == fa_axis_size(whole, along))
      set_axis_size(part, axis, fa_axis_size(part, along));
  }
}

static bool broadcasts(const fa_problem *problem, fa_axis axis) {
  return fa_axes[axis].along && fa_axis_size(problem, axis) == 1;
}

bool fa_varies_along(const fa_problem *problem, int id, fa_axis axis) {
  for (int i = 0; i < FA_MAX_RANK; i++)
    if (fa_axis_at(problem, id, i) == axis) return !broadcasts(problem, own_axis(problem, id, i));
  return false;
}

/* ---- tensors --------------------------------------------------------------------------------------------- */

fa_axis fa_tensor_only_if(int id) { return rows[id].only_if; }

int fa_tensor_gradient(fa_tensor_id id) { return rows[id].gradient ? (int)rows[id].gradient : -1; }

int fa_tensor_tangent(int id) { return rows[id].tangent ? (int)rows[id].tangent : -1; }

/* The bound is of the forward and the backward at once. */
static fa_tensor_role role_of(const struct tensor_row *row, fa_pass pass) {
  if (pass != FA_PASS_BOUND) return row->roles[pass];
  return row->roles[FA_PASS_FORWARD] ? row->roles[FA_PASS_FORWARD] : row->roles[FA_PASS_BACKWARD];
}

fa_status fa_tensor_check(const fa_problem *problem, int id, const void *numbers, fa_error *error) {
  return rows[id].check ? rows[id].check(problem, numbers, error) : FA_STATUS_OK;
}

static int rank_of(const struct tensor_row *row) {
  int rank = 0;
  while (rank < FA_MAX_RANK && row->axes[rank]) rank++;
  return rank;
}

static bool may_have(const fa_problem *problem, const struct tensor_row *row, fa_dtype dtype) {
  if ((unsigned)dtype >= FA_NUM_DTYPES) return false;
  return (row->types & AS_Q && dtype == problem->dtype) ||
         (row->types & STAT && dtype == fa_problem_stat_dtype(problem)) || (row->types >> dtype & 1);
}

static fa_dtype dtype_of(const fa_problem *problem, const struct tensor_row *row) {
  fa_dtype dtype = 0;
  if (row->dtype_offset)
    memcpy(&dtype, (const char *)problem + row->dtype_offset, sizeof dtype);
  else
    while (dtype < FA_NUM_DTYPES && !may_have(problem, row, dtype)) dtype++;
  return dtype;
}

/* Whether the problem has the tensor. Nothing is derived by whole numbers. */
static bool is_there(const fa_problem *problem, const struct tensor_row *row) {
  int32_t unless = 0;
  if (row->unless) memcpy(&unless, (const char *)problem + row->unless, sizeof unless);
  if (unless || (row->only_if && fa_axis_size(problem, row->only_if) == 0)) return false;
  return role_of(row, FA_PASS_FORWARD) || dtype_of(problem, row) < FA_NUM_FLOATS;
}

fa_tensor_role fa_tensor_role_in(const fa_problem *problem, fa_pass pass, fa_tensor_id id) {
  return is_there(problem, &rows[id]) ? role_of(&rows[id], pass) : FA_ROLE_NONE;
}

fa_dtype fa_tensor_dtype(const fa_problem *problem, int id) { return dtype_of(problem, &rows[id]); }

fa_shape fa_tensor_shape(const fa_problem *problem, fa_tensor_id id) {
  const struct tensor_row *row = &rows[id];
  fa_shape shape = {.dtype = dtype_of(problem, row), .rank = rank_of(row)};
  shape.size_bytes = (int64_t)fa_dtype_bytes(shape.dtype);
  for (int i = 0; i < shape.rank; i++) {
    shape.dims[i] = fa_axis_size(problem, own_axis(problem, id, i));
    shape.size_bytes *= shape.dims[i];
  }
  return shape;
}

const fa_tensor *fa_tensor_get(const fa_tensors *tensors, int id) {
  return (const fa_tensor *)((const char *)tensors + rows[id].offset);
}

fa_tensor *fa_tensor_at(fa_tensors *tensors, fa_tensor_id id) {
  return (fa_tensor *)fa_tensor_get(tensors, id);
}

fa_tensor fa_tensor_contiguous(const fa_problem *problem, fa_tensor_id id, void *data) {
  fa_tensor tensor = {.data = data};
  const fa_shape shape = fa_tensor_shape(problem, id);
  int64_t stride = 1;
  for (int i = shape.rank - 1; i >= 0; i--) {
    if (i < shape.rank - 1) tensor.strides[i] = broadcasts(problem, own_axis(problem, id, i)) ? 0 : stride;
    stride *= shape.dims[i];
  }
  return tensor;
}

bool fa_is_strided(int id) { return fa_axis_of(id, FA_AXIS_HEAD_DIM) >= 0; }

int64_t fa_num_elements(const fa_problem *problem, int id) {
  const fa_shape shape = fa_tensor_shape(problem, id);
  return shape.size_bytes / (int64_t)fa_dtype_bytes(shape.dtype);
}

fa_tensor fa_tensor_strides(const fa_problem *problem, int id, const fa_tensor *tensor) {
  return fa_is_strided(id) ? *tensor : fa_tensor_contiguous(problem, id, tensor->data);
}

bool fa_is_contiguous(const fa_problem *problem, int id, const fa_tensor *tensor) {
  const fa_tensor wanted = fa_tensor_contiguous(problem, id, NULL);
  return !fa_is_strided(id) || memcmp(tensor->strides, wanted.strides, sizeof wanted.strides) == 0;
}

size_t fa_bytes_spanned(const fa_problem *problem, int id, const fa_tensor *tensor) {
  const fa_shape shape = fa_tensor_shape(problem, id);
  const fa_tensor strides = fa_tensor_strides(problem, id, tensor);
  if (shape.size_bytes == 0) return 0;
  int64_t end = shape.dims[shape.rank - 1];
  for (int i = 0; i < shape.rank - 1; i++) end += (shape.dims[i] - 1) * strides.strides[i];
  return (size_t)end * fa_dtype_bytes(shape.dtype);
}

/* ---- elements of cells ------------------------------------------------------------------------------------
 */

static int64_t *place_along(fa_cell *cell, fa_axis axis) {
  switch (axis) {
    case FA_AXIS_BATCH: return &cell->batch;
    case FA_AXIS_NUM_HEADS: return &cell->head;
    case FA_AXIS_SEQLEN_Q: return &cell->row;
    case FA_AXIS_SEQLEN_K: return &cell->column;
    default: return &cell->number;
  }
}

int64_t fa_element_of(const fa_problem *problem, int id, const fa_cell *cell) {
  fa_cell at = *cell;
  int64_t element = 0;
  for (int i = 0; fa_axis_at(problem, id, i); i++) {
    element *= fa_axis_size(problem, own_axis(problem, id, i));
    if (!broadcasts(problem, own_axis(problem, id, i)))
      element += *place_along(&at, fa_axis_at(problem, id, i));
  }
  return element;
}

fa_cell fa_cell_of(const fa_problem *problem, int id, int64_t element) {
  fa_cell cell = {0};
  for (int i = rank_of(&rows[id]) - 1; i >= 0; i--) {
    const int64_t size = fa_axis_size(problem, own_axis(problem, id, i));
    *place_along(&cell, fa_axis_at(problem, id, i)) = element % size;
    element /= size;
  }
  return cell;
}

bool fa_is_sum(const fa_problem *problem, int id) {
  return fa_tensor_role_in(problem, FA_PASS_BACKWARD, id) == FA_ROLE_OUTPUT && !fa_is_strided(id);
}

/* ---- shapes that are given ------------------------------------------------------------------------------- */

/* "[batch, seqlen_q, num_heads, head_dim]" */
static const char *axes_text(char *text, size_t text_bytes, const fa_problem *problem, int id) {
  size_t used = 0;
  for (int i = 0; i < rank_of(&rows[id]) && used < text_bytes; i++) {
    const fa_axis_row *axis = &fa_axes[own_axis(problem, id, i)];
    used += strlen(axis->offset ? fa_text(text + used, text_bytes - used, "%s%s%s", i ? ", " : "[", axis->name,
                                          axis->along ? " or 1" : "")
                                : fa_text(text + used, text_bytes - used, "%s%lld", i ? ", " : "[",
                                          (long long)axis->minimum));
  }
  fa_text(text + used, text_bytes - used, "]");
  return text;
}

/* "type f32 as in q", "type f32 or u8" */
static const char *types_text(char *text, size_t text_bytes, const fa_problem *problem,
                              const struct tensor_row *row) {
  size_t used = strlen(fa_text(text, text_bytes, "type"));
  for (int dtype = 0, count = 0; dtype < FA_NUM_DTYPES && used < text_bytes; dtype++)
    if (may_have(problem, row, dtype))
      used +=
          strlen(fa_text(text + used, text_bytes - used, "%s %s", count++ ? " or" : "", fa_dtype_name(dtype)));
  fa_text(text + used, text_bytes - used, "%s",
          row->types == AS_Q   ? " as in q"
          : row->types == STAT ? " beside q of its type"
                               : "");
  return text;
}

static fa_status fail_missing(const fa_problem *problem, int id, fa_error *error) {
  return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, rows[id].name,
                 FA_TEXT("a tensor of shape %s", axes_text((char[96]){0}, 96, problem, id)), "none");
}

fa_status fa_tensors_validate(const fa_problem *problem, fa_error *error) {
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    const struct tensor_row *row = &rows[id];
    if (!row->only_if || !is_there(problem, row)) continue;
    if (!may_have(problem, row, dtype_of(problem, row)))
      return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, row->name, types_text((char[96]){0}, 96, problem, row),
                     fa_dtype_name(dtype_of(problem, row)));
    for (int i = 0; i < rank_of(row); i++) {
      const fa_axis along = fa_axis_at(problem, id, i);
      if (fa_axis_size(problem, own_axis(problem, id, i)) == 0 && fa_axis_size(problem, along) > 0)
        return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, row->name,
                       FA_TEXT("1 or %s %lld", fa_axes[along].name, (long long)fa_axis_size(problem, along)),
                       "0");
    }
  }
  return FA_STATUS_OK;
}

/* Shapes on their way into a problem. */
typedef struct reading {
  fa_problem *problem;
  int axis_source[FA_NUM_AXES], dtype_source; /* the tensor that a size or the type came from, or -1 */
  fa_error *error;
} reading;

static fa_status read_dtype(reading *r, int id, fa_dtype dtype) {
  const struct tensor_row *row = &rows[id];
  if (row->types & AS_Q && r->dtype_source < 0) {
    r->dtype_source = id, r->problem->dtype = dtype;
    if (dtype >= FA_NUM_FLOATS)
      return fa_fail(r->error, FA_STATUS_INVALID_ARGUMENT, row->name, "type f32, f64, bf16 or f16",
                     fa_dtype_name(dtype));
  }
  if (!may_have(r->problem, row, dtype))
    return fa_fail(r->error, FA_STATUS_INVALID_ARGUMENT, row->name,
                   types_text((char[96]){0}, 96, r->problem, row), fa_dtype_name(dtype));
  if (row->dtype_offset) memcpy((char *)r->problem + row->dtype_offset, &dtype, sizeof dtype);
  return FA_STATUS_OK;
}

/* An axis agrees with itself in another tensor, and one that may broadcast, unless it is 1, with what it runs
 * along. */
static fa_status read_size(reading *r, int id, fa_axis axis, int64_t size) {
  const bool is_known = r->axis_source[axis] >= 0;
  const fa_axis other = is_known ? axis : axis_run_along(axis);
  const bool is_bound = r->axis_source[other] >= 0 && (is_known || size != 1);
  if (is_bound && size != fa_axis_size(r->problem, other))
    return fa_fail(r->error, FA_STATUS_INVALID_ARGUMENT, rows[id].name,
                   FA_TEXT("%s %lld as in %s%s", fa_axes[axis].name, (long long)fa_axis_size(r->problem, other),
                           rows[r->axis_source[other]].name, is_known ? "" : ", or 1"),
                   FA_TEXT("%lld", (long long)size));
  if (!fa_axes[axis].offset && size != fa_axes[axis].minimum)
    return fa_fail(r->error, FA_STATUS_INVALID_ARGUMENT, rows[id].name,
                   FA_TEXT("%s %lld", fa_axes[axis].name, (long long)fa_axes[axis].minimum),
                   FA_TEXT("%lld", (long long)size));
  if (!is_known) r->axis_source[axis] = id;
  set_axis_size(r->problem, axis, size);
  return FA_STATUS_OK;
}

static fa_status read_shape(reading *r, int id, const fa_shape *shape) {
  const struct tensor_row *row = &rows[id];
  if (shape->rank != rank_of(row))
    return fa_fail(r->error, FA_STATUS_INVALID_ARGUMENT, row->name,
                   FA_TEXT("rank %d, %s", rank_of(row), axes_text((char[96]){0}, 96, r->problem, id)),
                   FA_TEXT("rank %d", shape->rank));
  fa_status status = read_dtype(r, id, shape->dtype);
  for (int i = 0; !status && i < shape->rank; i++)
    status = read_size(r, id, own_axis(r->problem, id, i), shape->dims[i]);
  return status;
}

static fa_status check_bytes(const fa_problem *problem, int id, const fa_shape *given, fa_error *error) {
  const int64_t bytes = fa_tensor_shape(problem, id).size_bytes;
  if (given->size_bytes < 0 || given->size_bytes == bytes) return FA_STATUS_OK;
  return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, rows[id].name,
                 FA_TEXT("%lld bytes for its shape and type", (long long)bytes),
                 FA_TEXT("%lld", (long long)given->size_bytes));
}

/* A page table says what the axes of keys are, and how many there are. */
static void read_pages(reading *r, const fa_shape *page_table, const fa_shape *k) {
  int64_t num_keys;
  if (page_table->rank != 2) return;
  r->problem->max_pages = page_table->dims[1];
  if (!k || k->rank != 4 || __builtin_mul_overflow(page_table->dims[1], k->dims[1], &num_keys)) return;
  r->problem->seqlen_k = num_keys;
  r->axis_source[FA_AXIS_SEQLEN_K] = FA_TENSOR_PAGE_TABLE;
}

fa_status fa_problem_set_shapes(fa_problem *problem, fa_pass pass, const fa_shape *const shapes[FA_NUM_TENSORS],
                                fa_error *error) {
  reading r = {.problem = problem, .dtype_source = -1, .error = error};
  for (int axis = 0; axis < FA_NUM_AXES; axis++) {
    r.axis_source[axis] = -1;
    set_axis_size(problem, axis, 0);
  }
  if (shapes[FA_TENSOR_PAGE_TABLE]) read_pages(&r, shapes[FA_TENSOR_PAGE_TABLE], shapes[FA_TENSOR_K]);
  fa_status status = FA_STATUS_OK;
  for (int id = 0; !status && id < FA_NUM_TENSORS; id++) {
    const bool is_wanted = role_of(&rows[id], pass) == FA_ROLE_INPUT;
    if (shapes[id] && !is_wanted)
      status = fa_fail(error, FA_STATUS_INVALID_ARGUMENT, rows[id].name,
                       FA_TEXT("none, as it is no input of the %s", fa_pass_name(pass)), "a tensor");
    else if (shapes[id])
      status = read_shape(&r, id, shapes[id]);
    else if (is_wanted && !rows[id].only_if)
      status = fail_missing(problem, id, error);
  }
  /* A tensor that may be left out is needed where another has brought its axis along. */
  for (int id = 0; !status && id < FA_NUM_TENSORS; id++)
    if (!shapes[id] && fa_tensor_role_in(problem, pass, id) == FA_ROLE_INPUT)
      status = fail_missing(problem, id, error);
  if (!status) status = fa_problem_validate(problem, error);
  for (int id = 0; !status && id < FA_NUM_TENSORS; id++)
    if (shapes[id]) status = check_bytes(problem, id, shapes[id], error);
  return status ? status : fa_succeed(error);
}
