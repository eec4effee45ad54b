#include <string.h>

#include "error.h"
#include "problem.h"

/* The axes that shapes are made of. */
typedef enum axis { BATCH, SEQLEN_Q, SEQLEN_K, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_SINKS, NUM_AXES } axis;

static const struct {
  const char *name;
  size_t offset;
} axes[NUM_AXES] = {
    [BATCH] = {"batch", offsetof(fa_problem, batch)},
    [SEQLEN_Q] = {"seqlen_q", offsetof(fa_problem, seqlen_q)},
    [SEQLEN_K] = {"seqlen_k", offsetof(fa_problem, seqlen_k)},
    [NUM_HEADS] = {"num_heads", offsetof(fa_problem, num_heads)},
    [NUM_KV_HEADS] = {"num_kv_heads", offsetof(fa_problem, num_kv_heads)},
    [HEAD_DIM] = {"head_dim", offsetof(fa_problem, head_dim)},
    [NUM_SINKS] = {"num_sinks", offsetof(fa_problem, num_sinks)},
};

typedef enum type_rule { AS_Q, STAT, F32 } type_rule; /* STAT: f32, or f64 where q is f64 */

#define QUERY_SHAPE 4, {BATCH, SEQLEN_Q, NUM_HEADS, HEAD_DIM}, AS_Q
#define KEY_SHAPE   4, {BATCH, SEQLEN_K, NUM_KV_HEADS, HEAD_DIM}, AS_Q
#define ROW_SHAPE   3, {BATCH, NUM_HEADS, SEQLEN_Q}, STAT
#define SINK_SHAPE  2, {NUM_SINKS, NUM_HEADS}, F32

/* One row a tensor: its shape, its type, and what each pass does with it. */
static const struct tensor_row {
  const char *name;
  size_t offset;
  int32_t rank;
  axis dims[FA_MAX_RANK];
  type_rule type;
  fa_tensor_role roles[FA_NUM_PASSES]; /* forward, backward, tangent */
} rows[FA_NUM_TENSORS] = {
#define IN  FA_ROLE_INPUT
#define OUT FA_ROLE_OUTPUT
    [FA_TENSOR_Q] = {"q", offsetof(fa_tensors, q), QUERY_SHAPE, {IN, IN, IN}},
    [FA_TENSOR_K] = {"k", offsetof(fa_tensors, k), KEY_SHAPE, {IN, IN, IN}},
    [FA_TENSOR_V] = {"v", offsetof(fa_tensors, v), KEY_SHAPE, {IN, IN, IN}},
    [FA_TENSOR_SINK] = {"sink", offsetof(fa_tensors, sink), SINK_SHAPE, {IN, IN, IN}},
    [FA_TENSOR_O] = {"o", offsetof(fa_tensors, o), QUERY_SHAPE, {OUT, IN, OUT}},
    [FA_TENSOR_LSE] = {"lse", offsetof(fa_tensors, lse), ROW_SHAPE, {OUT, IN, OUT}},
    [FA_TENSOR_DOUT] = {"dout", offsetof(fa_tensors, dout), QUERY_SHAPE, {0, IN, 0}},
    [FA_TENSOR_DQ] = {"dq", offsetof(fa_tensors, dq), QUERY_SHAPE, {0, OUT, 0}},
    [FA_TENSOR_DK] = {"dk", offsetof(fa_tensors, dk), KEY_SHAPE, {0, OUT, 0}},
    [FA_TENSOR_DV] = {"dv", offsetof(fa_tensors, dv), KEY_SHAPE, {0, OUT, 0}},
    [FA_TENSOR_DSINK] = {"dsink", offsetof(fa_tensors, dsink), SINK_SHAPE, {0, OUT, 0}},
    [FA_TENSOR_TANGENT_Q] = {"tangent_q", offsetof(fa_tensors, tangent_q), QUERY_SHAPE, {0, 0, IN}},
    [FA_TENSOR_TANGENT_K] = {"tangent_k", offsetof(fa_tensors, tangent_k), KEY_SHAPE, {0, 0, IN}},
    [FA_TENSOR_TANGENT_V] = {"tangent_v", offsetof(fa_tensors, tangent_v), KEY_SHAPE, {0, 0, IN}},
    [FA_TENSOR_TANGENT_SINK] = {"tangent_sink", offsetof(fa_tensors, tangent_sink), SINK_SHAPE, {0, 0, IN}},
    [FA_TENSOR_O_TANGENT] = {"o_tangent", offsetof(fa_tensors, o_tangent), QUERY_SHAPE, {0, 0, OUT}},
    [FA_TENSOR_LSE_TANGENT] = {"lse_tangent", offsetof(fa_tensors, lse_tangent), ROW_SHAPE, {0, 0, OUT}},
#undef IN
#undef OUT
};

static const char *const pass_names[FA_NUM_PASSES] = {"forward", "backward", "tangent"};

const char *fa_tensor_name(fa_tensor_id id) { return (unsigned)id < FA_NUM_TENSORS ? rows[id].name : ""; }

const char *fa_pass_name(fa_pass pass) { return (unsigned)pass < FA_NUM_PASSES ? pass_names[pass] : ""; }

static bool is_sink_shaped(fa_tensor_id id) { return rows[id].dims[0] == NUM_SINKS; }

fa_tensor_role fa_tensor_role_in(const fa_problem *problem, fa_pass pass, fa_tensor_id id) {
  return is_sink_shaped(id) && problem->num_sinks == 0 ? FA_ROLE_NONE : rows[id].roles[pass];
}

static int64_t axis_size(const fa_problem *problem, axis axis) {
  int64_t size;
  memcpy(&size, (const char *)problem + axes[axis].offset, sizeof size);
  return size;
}

static fa_dtype dtype_of(const fa_problem *problem, type_rule rule) {
  return rule == AS_Q ? problem->dtype : rule == STAT ? fa_problem_stat_dtype(problem) : FA_DTYPE_F32;
}

fa_shape fa_tensor_shape(const fa_problem *problem, fa_tensor_id id) {
  const struct tensor_row *row = &rows[id];
  fa_shape shape = {.dtype = dtype_of(problem, row->type), .rank = row->rank};
  shape.size_bytes = (int64_t)fa_dtype_bytes(shape.dtype);
  for (int i = 0; i < row->rank; i++) {
    shape.dims[i] = axis_size(problem, row->dims[i]);
    shape.size_bytes *= shape.dims[i];
  }
  return shape;
}

fa_tensor *fa_tensor_at(fa_tensors *tensors, fa_tensor_id id) {
  return (fa_tensor *)((char *)tensors + rows[id].offset);
}

fa_tensor fa_tensor_contiguous(const fa_problem *problem, fa_tensor_id id, void *data) {
  fa_tensor tensor = {.data = data};
  fa_shape shape = fa_tensor_shape(problem, id);
  if (shape.rank == 4) {
    tensor.stride_head = shape.dims[3];
    tensor.stride_row = shape.dims[2] * tensor.stride_head;
    tensor.stride_batch = shape.dims[1] * tensor.stride_row;
  }
  return tensor;
}

/* "[batch, seqlen_q, num_heads, head_dim]" */
static const char *axes_text(char *text, size_t text_bytes, const struct tensor_row *row) {
  size_t used = 0;
  for (int i = 0; i < row->rank && used < text_bytes; i++)
    used += strlen(fa_text(text + used, text_bytes - used, "%s%s", i ? ", " : "[", axes[row->dims[i]].name));
  fa_text(text + used, text_bytes - used, "]");
  return text;
}

fa_status fa_problem_set_shapes(fa_problem *problem, fa_pass pass, const fa_shape *const shapes[FA_NUM_TENSORS],
                                fa_error *error) {
  int sources[NUM_AXES]; /* the tensor that an axis has its size from */
  for (int i = 0; i < NUM_AXES; i++) sources[i] = -1;
  problem->num_sinks =
      shapes[FA_TENSOR_SINK] && shapes[FA_TENSOR_SINK]->rank == 2 ? shapes[FA_TENSOR_SINK]->dims[0] : 0;

  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    const struct tensor_row *row = &rows[id];
    const fa_shape *shape = shapes[id];
    bool wanted = row->roles[pass] == FA_ROLE_INPUT;
    bool optional = id == FA_TENSOR_SINK || (is_sink_shaped(id) && problem->num_sinks == 0);
    if (!shape) {
      if (wanted && !optional)
        return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, row->name,
                       FA_TEXT("a tensor of shape %s", axes_text((char[96]){0}, 96, row)), "none");
      continue;
    }
    if (!wanted)
      return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, row->name,
                     FA_TEXT("none, as it is no input of the %s", fa_pass_name(pass)), "a tensor");
    if (shape->rank != row->rank)
      return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, row->name,
                     FA_TEXT("rank %d, %s", row->rank, axes_text((char[96]){0}, 96, row)),
                     FA_TEXT("rank %d", shape->rank));
    if (id == FA_TENSOR_Q) problem->dtype = shape->dtype;
    fa_dtype dtype = dtype_of(problem, row->type);
    if (shape->dtype != dtype)
      return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, row->name,
                     FA_TEXT(row->type == AS_Q   ? "type %s as in q"
                             : row->type == STAT ? "type %s beside q of its type"
                                                 : "type %s",
                             fa_dtype_name(dtype)),
                     fa_dtype_name(shape->dtype));
    for (int i = 0; i < row->rank; i++) {
      axis axis = row->dims[i];
      if (sources[axis] < 0) {
        sources[axis] = id;
        memcpy((char *)problem + axes[axis].offset, &shape->dims[i], sizeof shape->dims[i]);
      } else if (shape->dims[i] != axis_size(problem, axis)) {
        return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, row->name,
                       FA_TEXT("%s %lld as in %s", axes[axis].name, (long long)axis_size(problem, axis),
                               rows[sources[axis]].name),
                       FA_TEXT("%lld", (long long)shape->dims[i]));
      }
    }
  }
  fa_status status = fa_problem_validate(problem, error);
  if (status) return status;
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (!shapes[id] || shapes[id]->size_bytes < 0) continue;
    fa_shape shape = fa_tensor_shape(problem, id);
    if (shapes[id]->size_bytes != shape.size_bytes)
      return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, rows[id].name,
                     FA_TEXT("%lld bytes for its shape and type", (long long)shape.size_bytes),
                     FA_TEXT("%lld", (long long)shapes[id]->size_bytes));
  }
  return fa_succeed(error);
}
