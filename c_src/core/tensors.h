/* What the tensor table tells beside what the public header says of tensors. Whoever handles tensors asks it,
 * and names none, so that a new tensor is a member, an identifier and a row: see core/tensors.c. */
#ifndef FA_CORE_TENSORS_H
#define FA_CORE_TENSORS_H

#include "../flash_attention.h"

/* The axes that shapes are made of. */
typedef enum fa_axis {
  FA_AXIS_NONE = 0,
  FA_AXIS_BATCH,
  FA_AXIS_SEQLEN_Q,
  FA_AXIS_SEQLEN_K,
  FA_AXIS_NUM_HEADS,
  FA_AXIS_NUM_KV_HEADS,
  FA_AXIS_HEAD_DIM,
  FA_AXIS_NUM_SINKS,
  FA_AXIS_NUM_ROW_SINKS,
  FA_AXIS_BANDS_BATCH,
  FA_AXIS_NUM_BANDS,
  FA_AXIS_BAND_WORDS,
  FA_AXIS_ALIBI_BATCH,
  FA_AXIS_BIAS_BATCH,
  FA_AXIS_BIAS_HEADS,
  FA_AXIS_BIAS_ROWS,
  FA_AXIS_SEED_WORDS,
  FA_AXIS_DLSE_BATCH,
  FA_AXIS_LENGTHS_BATCH,
  FA_AXIS_NUM_PAGES,
  FA_AXIS_PAGE_SIZE,
  FA_AXIS_MAX_PAGES,
  FA_NUM_AXES,
} fa_axis;

typedef struct fa_axis_row {
  const char *name, *short_name; /* the second for a problem on one line */
  size_t offset;   /* of the axis's size in fa_problem, an int64_t; 0: the size is always minimum */
  int64_t minimum; /* of the size */
  fa_axis along;   /* of an axis that may broadcast: its size is that of this axis, or 1 */
} fa_axis_row;

/* In the order in which errors name them. fa_axes[FA_AXIS_NONE] is no axis. */
extern const fa_axis_row fa_axes[FA_NUM_AXES];

int64_t fa_axis_size(const fa_problem *problem, fa_axis axis);

/* Gives every axis of a part of a problem that runs along another axis, and is as long in the whole, the size
 * that the other axis has in the part. */
void fa_axes_follow(fa_problem *part, const fa_problem *whole);

/* Which axis of the problem a tensor's axis number i runs along, FA_AXIS_NONE from its rank on; and the number
 * of the axis that runs along one, -1 where there is none, of a tensor without pages. An axis that may
 * broadcast runs along its own. */
fa_axis fa_axis_at(const fa_problem *problem, int id, int i);
int fa_axis_of(int id, fa_axis axis);

/* Whether the tensor has elements of its own for every place along the axis: not where it lacks the axis, nor
 * where it broadcasts. An output that does not vary along an axis is a sum over it. */
bool fa_varies_along(const fa_problem *problem, int id, fa_axis axis);

/* Whether the tensor's strides are the caller's choice, as those of rows of heads are. All others lie
 * contiguously as a whole, whatever their strides say. */
bool fa_is_strided(int id);

int64_t fa_num_elements(const fa_problem *problem, int id);

/* The strides that count: those of fa_tensor_contiguous unless the tensor is strided. */
fa_tensor fa_tensor_strides(const fa_problem *problem, int id, const fa_tensor *tensor);

bool fa_is_contiguous(const fa_problem *problem, int id, const fa_tensor *tensor);

/* From the first element to the end of the last; rows may lie anywhere between them. 0 of an empty tensor. */
size_t fa_bytes_spanned(const fa_problem *problem, int id, const fa_tensor *tensor);

/* A score's place, and the number of whatever else is counted there: of a sink. */
typedef struct fa_cell {
  int64_t batch, head, row, column, number;
} fa_cell;

/* The type of fa_tensor_shape. */
fa_dtype fa_tensor_dtype(const fa_problem *problem, int id);

/* The index, in contiguous order, of the element that a tensor without head_dim has for a cell; and a cell of
 * an element, 0 along axes that the tensor does not vary along. */
int64_t fa_element_of(const fa_problem *problem, int id, const fa_cell *cell);
fa_cell fa_cell_of(const fa_problem *problem, int id, int64_t element);

/* Whether the tensor is a gradient without head_dim: a sum over the cells that share an element (dsink). */
bool fa_is_sum(const fa_problem *problem, int id);

/* Whether the tensor lies on pages, which batches find by the page table. */
bool fa_is_paged(const fa_problem *problem, int id);

/* The axis whose size of 0 means that the tensor is left out, or FA_AXIS_NONE where it never is. */
fa_axis fa_tensor_only_if(int id);

/* The tensor that holds the derivative of this one along the tangents (q: tangent_q; o: o_tangent), or -1. */
int fa_tensor_tangent(int id);

/* Whether every tensor that is there has a type that it may have, and has or broadcasts along all of its axes.
 */
fa_status fa_tensors_validate(const fa_problem *problem, fa_error *error);

/* Whether the numbers of an input, which lie contiguously in the host's memory, are such as the tensor may
 * have. */
fa_status fa_tensor_check(const fa_problem *problem, int id, const void *numbers, fa_error *error);

/* fa_tensor_at for those who only look. */
const fa_tensor *fa_tensor_get(const fa_tensors *tensors, int id);

#endif
