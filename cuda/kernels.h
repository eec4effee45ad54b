/* What the CUDA kernels and the host code that launches them share. Plain C, compiled by nvcc too. */
#ifndef FA_CUDA_KERNELS_H
#define FA_CUDA_KERNELS_H

#include <cuda.h>

#include "../c_src/flash_attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* So many rows of a head share a scale in the copy of an f32 tensor; a multiple of every block_q and block_k.
 */
enum { FA_CUDA_SCALE_ROWS = 128 };

enum { FA_CUDA_NUM_TICKETS = 3 };

/* A tensor as the tensor cores read it: 16-bit elements, strides in elements. Of f32 tensors it is the copy
 * that the split kernel makes, in one or two parts, stride_part apart. */
typedef struct fa_cuda_operand {
  const uint16_t *data;
  int64_t stride_batch, stride_row, stride_head, stride_part;
  int32_t num_cols; /* elements of a row that are there; the others count as 0 */
  int32_t aligned;  /* data and strides are multiples of 16 bytes */
  /* Of a scaled copy: [batch, num_heads, num_scales], the power of two by which FA_CUDA_SCALE_ROWS rows are
   * scaled.
   */
  int32_t *exponents;
  int32_t num_heads, num_scales;
} fa_cuda_operand;

/* Which columns a row sees. Positions and windows fit in 30 bits. */
typedef struct fa_cuda_window {
  int32_t seqlen_q, seqlen_k, left, right;
} fa_cuda_window;

/* What a block of rows or of columns visits: pairs of a band and a block of the other side that the band shows
 * it something of. Bands before first_band and from end_band on show it nothing; of those between, some may. */
typedef struct fa_cuda_block_plan {
  int32_t block; /* its number */
  int32_t first_band, end_band, num_visits;
} fa_cuda_block_plan;

/* How a product q·k becomes a score: factor * f(q·k), factor > 0, where f is one of these. Where a program acts
 * on scores, these are in registers what they are, for every kind: then factor is 1 for the kinds whose scores
 * it would be due, and the program's has its place, if the program adds numbers that are not folded. */
typedef enum fa_cuda_score_form {
  FA_CUDA_SCORE_PLAIN,   /* x */
  FA_CUDA_SCORE_NEGATED, /* -x: the scale is negative */
  FA_CUDA_SCORE_SOFTCAP, /* tanh(inner * x) */
} fa_cuda_score_form;

/* From here on a scale's reciprocal times a shift is finite. */
#define FA_CUDA_LEAST_SCALE 1e-30f

typedef struct fa_cuda_score {
  fa_cuda_score_form form;
  float inner, factor;
} fa_cuda_score;

/* A tensor, or sums, with a number for every score, or for all scores along some axes. Strides are in elements,
 * and 0 along these axes; columns, where they have numbers of their own, follow one another. */
typedef struct fa_cuda_cells {
  void *data; /* NULL: there are none */
  fa_dtype dtype;
  /* The numbers of an even column and the next lie at a multiple of their size; those of four likewise. */
  int32_t in_pairs, in_fours;
  int64_t stride_batch, stride_head, stride_row;
} fa_cuda_cells;

/* A bias that all rows share, as kernels that read by tensor maps have it: a number a key, which the keys
 * kernel makes f32 or, for kernels that fold terms, parts of a product. Blocks of FA_CUDA_KEYS_BLOCK follow one
 * another, with one more behind the last key. Strides count blocks.
 * Of slopes that are folded there are two blocks a head: the slope times a key's place in its block, and the
 * negative of that. */
enum { FA_CUDA_KEYS_BLOCK = 128 };
enum {
  FA_CUDA_KEYS_SHOW = 1, /* some of the block's keys are visible */
  FA_CUDA_KEYS_ADD = 2,  /* to some of these a number other than 0 is added */
  FA_CUDA_KEYS_HIDE = 4, /* some are hidden: their number is -inf */
};
enum { FA_CUDA_TERM_WORDS = 4 };
typedef struct fa_cuda_keys {
  float *addends;  /* of flags +inf and -inf; NULL: there is no such bias, or it is folded */
  uint32_t *terms; /* FA_CUDA_TERM_WORDS a key, see terms.cuh: the parts of what it adds to q·k; or NULL */
  uint8_t *kinds;  /* of each block, the sum of the above; NULL: there is no such bias, or it is slopes */
  /* A bit for each block: whether it shows something. And one number, which is that of the call if a block
   * does not. NULL: nobody asks. */
  uint32_t *shown;
  int32_t *hides;
  int64_t stride_batch, stride_head;
} fa_cuda_keys;

/* A mask with a flag for each score, as kernels that read by tensor maps have it: bits, as an accumulator's
 * lanes want them. Rows and columns are the accumulator's: those of the problem in a forward, and the other way
 * round in a backward. Of each block of 128, 64 or 32 columns a row has four words, of 32 bits, 16 or 8, of
 * which the i-th has those of columns 8n + 2i and the next as its bits 2n and 2n + 1: 1 where the score is
 * shown, 0 where it is hidden or not there. Where nothing is seen they are not written. */
enum { FA_CUDA_FLAG_ROWS = 64, FA_CUDA_SHOWN_ROWS = 32, FA_CUDA_MOST_FLAG_COLUMNS = 128 };
typedef struct fa_cuda_flags {
  void *words; /* [batch or 1, num_heads or 1, num_blocks, num_rows, 4], or NULL */
  /* Of a forward, what FA_CUDA_FLAG_ROWS rows ask for in each block, FA_CUDA_KEYS_SHOW, FA_CUDA_KEYS_HIDE:
   * [batch or 1, num_heads or 1, num_rows / FA_CUDA_FLAG_ROWS, num_blocks]. Of a backward, of each block of
   * flags, which is a row block, and FA_CUDA_MOST_FLAG_COLUMNS keys 1 if something is shown there, and else 0:
   * [batch or 1, num_heads or 1, num_blocks, num_rows / FA_CUDA_SHOWN_ROWS], of which only the first are so
   * many keys', and the rest 0. */
  uint8_t *kinds;
  int64_t stride_batch, stride_head;     /* in rows of blocks */
  int32_t num_rows, num_blocks, columns; /* columns: of a block; the others in whole tiles */
} fa_cuda_flags;

/* What the gradient by the bias is for a kernel: its numbers, or f32 sums for them. */
typedef enum fa_cuda_cell_step {
  FA_CUDA_CELLS_STORE, /* no score shares its number, nor is it visited twice */
  FA_CUDA_CELLS_ADD,   /* no score shares its number, or the numbers are f32 */
  /* Rows share numbers: each of the warps that share a column adds the sums of its rows to sums of its own,
   * stride_row apart. */
  FA_CUDA_CELLS_ADD_ROWS,
} fa_cuda_cell_step;

/* Tensors that have one number for all scores of a head, and so have their gradients. */
typedef enum fa_cuda_head_number {
  FA_CUDA_ALIBI_SLOPES,
  FA_CUDA_NUM_HEAD_NUMBERS,
} fa_cuda_head_number;

/* What acts on scores by their places, in kernels that take it. */
typedef struct fa_cuda_program {
  int32_t is_there;
  float factor; /* of f(q·k), where score.factor does not hold it: see fa_cuda_score */
  fa_cuda_cells of_heads[FA_CUDA_NUM_HEAD_NUMBERS];
  fa_cuda_cells bias; /* [batch or 1, num_heads or 1, rows or 1, seqlen_k] */
  /* What kernels that read by tensor maps take in its place: keys; or flags; or its map, of which a visit's
   * numbers are so many boxes of 128 bytes of each row, or none. */
  fa_cuda_keys keys;
  fa_cuda_flags flags;
  int32_t bias_boxes, bias_box_columns;
  fa_cuda_cells dbias;
  fa_cuda_cell_step dbias_step;
  float *head_sums[FA_CUDA_NUM_HEAD_NUMBERS]; /* [batch, num_heads, num_head_slots], or NULL */
  int32_t num_head_slots;                     /* one for each warp of each column block */
  /* Whether the bias is all batches', so that blocks of a head are begun in all of them before the next head's:
   * it and what is added to its gradient are in cache then. */
  int32_t has_bias_of_batches;
  const uint32_t *dropout_seed;     /* [2] */
  uint32_t dropout_threshold;       /* of 2^16; 0: nothing is dropped */
  float kept_factor, kept_exponent; /* 1 / the share that is not dropped; log2 of half of that */
  int32_t first_batch, first_head;  /* in the whole problem, for dropout */
  int64_t first_row;
  /* Of dropout, the words of core/dropout.h, two of each pair, thus one a row or column; or NULL. */
  uint32_t *row_words;    /* of a backward: [batch, num_heads, padded_rows] */
  uint32_t *column_words; /* of all columns of a column block that begins below seqlen_k */
  int64_t num_row_words, num_column_words;
} fa_cuda_program;

/* What masks turn out to be whose contents the host does not know, for kernels that ask. The first becomes the
 * number of the call if they hide something that the window shows, or flags a block of rows and columns whole;
 * the other if they are not the causal mask either. */
typedef struct fa_cuda_answer {
  int32_t hides, is_not_causal;
} fa_cuda_answer;

/* The argument of every kernel. */
typedef struct fa_cuda_arguments {
  fa_cuda_window window;
  fa_cuda_score score;
  int32_t batch, num_heads, num_kv_heads, head_dim, num_sinks;
  int32_t num_q_blocks, num_k_blocks; /* of block_q rows and block_k columns */
  int32_t padded_rows;                /* num_q_blocks * block_q */
  int32_t in_order;      /* column blocks add to dq one after the other, as a deterministic backward must */
  int32_t heads_at_once; /* blocks of so many heads are begun alternately */
  float scale;
  fa_cuda_operand q, k, v, dout;
  fa_tensor o, dq, dk, dv;                     /* o is an input of the backward */
  fa_tensor q_rows, k_rows, v_rows, dout_rows; /* as the caller gave them */
  float *lse;                                  /* [batch, num_heads, seqlen_q] */
  const float *sink;                           /* [num_sinks, num_heads] */
  float *dsink;
  /* Workspace of the backward. shift is what row_shift makes of lse, or +inf for a row that is not there or
   * sees nothing, so that its exponentials are 0. */
  float *shift, *delta; /* [batch, num_heads, padded_rows] */
  float delta_factor;   /* so many times a row's delta is that */
  float *dq_sum;        /* [num_sums, block_q * bucket], of row blocks in the backward's own order */
  int32_t num_sums;     /* so many row blocks are summed at a time: position p at p % num_sums */
  /* [batch, num_heads, num_q_blocks]: 0 before a row block has a sum; then one more than how many column blocks
   * have added to it. Where these add in order, each has a place: one thread waits until the count has reached
   * it, and one counts on when all additions have been made. A reader of the sum waits for the last count in
   * the same way. */
  int32_t *dq_order;
  /* Backward: how many column blocks, and how many row blocks' ends, have been taken; with bands, also how many
   * row blocks have ended. Forward: how many tiles, after everybody's first; or NULL: each takes those that lie
   * a grid apart. */
  int32_t *tickets;
  /* Becomes `call` where numbers that are not finite may have met hidden cells, and the kernel behind main is
   * to look at what came out. Calls have numbers of their own, so that nobody need make it something else
   * before; if it is the call's by chance, that kernel looks in vain. */
  int32_t *suspect; /* NULL: every row sees every column */
  int32_t call;
  /* Of a forward whose warps mend when they have taken their last tile: [batch, num_heads, padded_rows / 16],
   * which warp of this call has found a NaN in what it wrote of 16 rows, or something else. */
  int64_t *notes;
  /* Of kernels that take bands, which window bounds. The plans lie in the order in which their blocks are
   * begun, or ended: see fa_cuda_plan_order. */
  const int32_t *bands; /* [bands_batch, num_bands, 6], or NULL: the only one is the whole problem */
  int32_t bands_batch, num_bands;
  fa_cuda_block_plan *row_plans;    /* [bands_batch, num_q_blocks] */
  fa_cuda_block_plan *column_plans; /* [bands_batch, num_k_blocks], of the backward */
  /* With bands nobody knows beforehand in which order row blocks will have all of their dq. Where main writes
   * it: [batch * num_heads * num_q_blocks], 1 more than the positions of those that have, one after the other.
   */
  int32_t *ended;
  fa_cuda_program program;
  /* So many blocks of threads share the steps of a column block, each a part of them; in plain kernels each
   * those of as many query heads. Where there are several, dk and dv are f32 workspace, in which the batches of
   * a part follow those of the part before. Of a forward in parts: so many split the column blocks of all rows,
   * and o and lse are such workspace. */
  int32_t num_column_parts;
  bool maps_columns; /* backward: dk and dv are written by their maps */
  /* Of a backward that folds slopes: shift has the slope's part of each row in its row block, and this the same
   * for columns behind the rows. */
  float *shift_behind;
  /* Of a backward with bands: of so many query heads that share keys, one after the other makes the same visit.
   */
  int32_t heads_together;
  int32_t block_k; /* of a backward: the columns of a column block */
  /* Of a backward whose statistics are made beside main: [batch * num_heads * FA_CUDA_DONE_GROUPS + 1], of how
   * many row blocks among each FA_CUDA_DONE_ROWS rows of a head, and of all, they have been; or NULL, where
   * they are there before main begins. */
  int32_t *rows_done;
  /* Of kernels that take bands: so many blocks of a head, of the first plans, are begun in all heads before the
   * late ones are in any, so that multiprocessors end with short ones, and together. NULL: there are no late
   * ones. A backward's are column blocks. */
  const int32_t *num_early;
  /* Where blocks, a forward's of rows and a backward's of columns, are begun in groups of heads that share
   * plans: those of a group that see nothing come last, and if one of them is begun others need not be. */
  bool skips_unseen;
  fa_cuda_answer *answer; /* of kernels that ask; NULL: they need not */
  /* Of f32 whose k and v are copied beside main: [batch * num_kv_heads * FA_CUDA_DONE_GROUPS(seqlen_k) + 1],
   * how many times FA_CUDA_SCALE_ROWS columns, among each FA_CUDA_DONE_ROWS of a head, and of all, have been; a
   * backward's q and dout are with its statistics. NULL: copies are there before main begins. */
  int32_t *columns_done;
  /* Of a backward of few rows: into so many parts the columns are split that all rows of a key/value head see.
   * dq_sum is [batch, num_kv_heads, num_dq_parts, block_q, bucket], or not used where there is one. */
  int32_t num_dq_parts;
} fa_cuda_arguments;

/* The gradient by lse, as lse, for the kernel of a backward that makes delta; NULL: none. Batches are
 * batch_repeats elements closer than those of lse: all of them where one is for all. */
typedef struct fa_cuda_dlse {
  const float *data;
  int64_t batch_repeats;
} fa_cuda_dlse;

/* The second argument of the kernel that mends gradients: those that are sums, as the caller gets them. */
typedef struct fa_cuda_gradients {
  fa_tensor dk, dv;
  fa_cuda_cells dbias, of_heads[FA_CUDA_NUM_HEAD_NUMBERS]; /* data NULL: there are none */
} fa_cuda_gradients;

/* The order of the plans of a side's blocks. */
typedef enum fa_cuda_plan_order {
  FA_CUDA_BY_NUMBER, /* a backward's row blocks; its column blocks where these add to dq in order */
  FA_CUDA_BY_VISITS, /* a forward's: those with the most visits first */
  /* Other column blocks: first those of the bands whose blocks have the most visits, and those of a band
   * together, because what they read, and the dq that they add to, should stay in cache. */
  FA_CUDA_BY_BAND,
} fa_cuda_plan_order;

/* The plan kernel's argument: plans to make of one side's blocks. */
typedef struct fa_cuda_plan_side {
  fa_cuda_block_plan *plans;            /* [bands_batch, num_blocks] */
  int32_t num_blocks, size, other_size; /* of a block, and of one of the other side */
  int32_t of_rows;
  fa_cuda_plan_order order;
  /* NULL, or to become the arguments' num_early; and how many times as many visits as a block the late ones of
   * a head must have, if they are to keep all multiprocessors busy while it is made. */
  int32_t *num_early;
  float late_visits;
} fa_cuda_plan_side;
typedef struct fa_cuda_plans {
  fa_cuda_window window;
  const int32_t *bands; /* [bands_batch, num_bands, 6], or NULL */
  int32_t bands_batch, num_bands, num_sides;
  int32_t *tickets;       /* to become 0, or NULL */
  fa_cuda_answer *answer; /* see fa_cuda_arguments */
  int32_t call;
  const int32_t *key_lengths; /* NULL, or [bands_batch]: the one band of a batch is to be written first */
  fa_cuda_plan_side sides[2];
} fa_cuda_plans;

/* Tensors as tensor maps {head_dim, seqlen, heads, batch}, with boxes of 128 bytes of block_q (q, dout),
 * block_k (k, v) or 16 (out: o or dq; dk, dv) rows: the second argument of the kernels that read by them. Of
 * f32 tensors they are the copies, whose parts are further batches, but the forward's q is the caller's. The
 * bias is {seqlen_k, rows, heads, batch}, with boxes of block_q rows. */
typedef struct fa_cuda_maps {
  CUtensorMap q, k, v, dout, out, bias, dk, dv;
} fa_cuda_maps;

/* Where the keys of a batch end, and on which pages they lie. */
typedef struct fa_cuda_cache {
  const int32_t *key_lengths; /* [lengths_batch], or NULL */
  const int32_t *page_table;  /* [batch, max_pages], or NULL: k and v are [batch, seqlen_k, ...] */
  int32_t lengths_batch, max_pages, num_pages, page_size;
  int32_t box_rows; /* of tensor maps: a column block comes in boxes of so many keys, each on one page */
} fa_cuda_cache;

/* The second argument of the kernels for few rows, whose third are maps of k and v: into how many parts the
 * keys of a unit are split, a unit being up to block_q rows of all query heads of a key/value head, and what
 * the parts leave in the workspace. */
typedef struct fa_cuda_parts {
  int32_t num_parts, rows_a_unit;
  int32_t groups_a_row;  /* of the threads of `merge`, so many share a row, up to one for each part */
  int32_t in_cluster;    /* the parts of a unit merge in a cluster of blocks, and need no workspace */
  int32_t leaves_first;  /* k and v had better be the first to leave the cache */
  float *o;              /* [num_units, num_parts, rows_a_unit, bucket], not divided by their sums */
  struct float2 *states; /* [num_units, num_parts, rows_a_unit]: a reference maximum, the sum of exponentials */
  fa_cuda_cache cache;
} fa_cuda_parts;

/* The split kernel's argument: f32 tensors and the copies to make. */
typedef struct fa_cuda_split {
  fa_tensor from;
  fa_cuda_operand to;
  int32_t seqlen;
} fa_cuda_split;

typedef struct fa_cuda_splits {
  fa_cuda_split tensors[4];
  int32_t num_tensors, num_parts, batch, head_dim;
} fa_cuda_splits;

/* `to` becomes the sum of from over its parts, and over the axes along which `to` has stride 0. */
typedef struct fa_cuda_reduction {
  fa_cuda_cells to;  /* data NULL: there is nothing to do */
  const float *from; /* [num_parts, batch, num_heads, num_rows, num_columns] */
  int32_t num_parts, batch, num_heads, num_rows, num_columns;
} fa_cuda_reduction;
/* Reductions of the same sizes. */
typedef struct fa_cuda_reductions {
  fa_cuda_reduction each[2];
} fa_cuda_reductions;

/* The keys kernel's argument: makes `to` of a bias that all rows share, or of slopes. */
typedef struct fa_cuda_key_reading {
  fa_cuda_cells bias; /* or slopes */
  int32_t of_slopes;
  fa_cuda_keys to;
  float per_scale; /* of terms: what a number is multiplied with to be one of q·k */
  int32_t of_f16;  /* of terms: their elements are f16, or bf16 */
  int32_t bounds;  /* whether finite numbers are read as at most 2^20 */
  int32_t seqlen_k, num_heads, blocks_a_row;
  int64_t num_blocks; /* in all rows: of batches and heads that these tell apart */
  int32_t call;
} fa_cuda_key_reading;

/* The unpack kernel's argument: [num_rows, heads_a_row] rows of heads, pitches in bytes. */
typedef struct fa_cuda_packed {
  char *to;
  const char *from;
  int64_t to_pitch, from_pitch, heads_a_row, num_rows;
  int32_t head_dim;
} fa_cuda_packed;

/* How the elements of a problem meet the tensor cores. */
typedef enum fa_cuda_kind {
  FA_CUDA_BF16,
  FA_CUDA_F16,
  FA_CUDA_F32,        /* f32 as a sum of two f16 */
  FA_CUDA_F32_AS_F16, /* f32 rounded to f16's 11 bits */
  FA_CUDA_NUM_KINDS,
} fa_cuda_kind;

static inline fa_cuda_kind fa_cuda_kind_of(const fa_problem *problem) {
  switch (problem->dtype) {
    case FA_DTYPE_BF16: return FA_CUDA_BF16;
    case FA_DTYPE_F16: return FA_CUDA_F16;
    default: return problem->precision == FA_PRECISION_DEFAULT ? FA_CUDA_F32_AS_F16 : FA_CUDA_F32;
  }
}

/* What a problem may ask of a kernel beyond plain attention. A row of the tables lists what it takes, and the
 * selector goes on to the next row where a problem needs more. */
enum {
  FA_CUDA_NEEDS_WINDOW = 1 << 0,
  FA_CUDA_NEEDS_SOFTCAP = 1 << 1,
  FA_CUDA_NEEDS_SINKS = 1 << 2,
  FA_CUDA_NEEDS_BANDS = 1 << 3,
  FA_CUDA_NEEDS_KEYS = 1 << 4, /* of a program: a bias with a number a key, or a number a score; dropout */
  FA_CUDA_NEEDS_CELLS = 1 << 5,
  FA_CUDA_NEEDS_DROPOUT = 1 << 6,
  /* Beside q of 16 bits a bias of f32 with a number a score; or gradients of 16 bits by such numbers, of which
   * each is added to only where a band shows it. */
  FA_CUDA_NEEDS_SINGLE_CELLS = 1 << 7,
  FA_CUDA_NEEDS_LENGTHS = 1 << 8, /* kernels that take bands take each length as a band */
  FA_CUDA_NEEDS_PAGES = 1 << 9,   /* only kernels for few rows take these */
  /* Of 16-bit types: a scale or softcap with which f32's rounding of a score is an exponent. */
  FA_CUDA_NEEDS_EXTREMES = 1 << 10,
  /* Numbers a key, or slopes, that cannot be parts of q·k: behind a softcap, or a scale far from 1. */
  FA_CUDA_NEEDS_LATE_TERMS = 1 << 11,
  FA_CUDA_NEEDS_SUMS = 1 << 12, /* of a backward: gradients by what a program adds */
  /* Of a forward: slopes where some rows see a part of the columns behind the place beside them. */
  FA_CUDA_NEEDS_SLOPES_BEHIND = 1 << 13,
  FA_CUDA_NEEDS_OTHER_SCALES = 1 << 14,   /* one below FA_CUDA_LEAST_SCALE, thus negative ones too */
  FA_CUDA_NEEDS_FLAGS = 1 << 15,          /* of a program: a mask with a flag a score */
  FA_CUDA_NEEDS_COLUMNS_BEHIND = 1 << 16, /* of a backward: slopes where rows see columns behind their place */
  /* Of each fa_cuda_head_number the bit so far behind this one: kernels that do not know it decline. */
  FA_CUDA_NEEDS_OF_HEADS = 1 << 17,
  FA_CUDA_NEEDS_SLOPES = FA_CUDA_NEEDS_OF_HEADS << FA_CUDA_ALIBI_SLOPES,
  FA_CUDA_NEEDS_ANY_OF_HEADS = (FA_CUDA_NEEDS_OF_HEADS << FA_CUDA_NUM_HEAD_NUMBERS) - FA_CUDA_NEEDS_OF_HEADS,
  FA_CUDA_PROGRAM_NEEDS = FA_CUDA_NEEDS_ANY_OF_HEADS | FA_CUDA_NEEDS_KEYS | FA_CUDA_NEEDS_CELLS |
                          FA_CUDA_NEEDS_DROPOUT | FA_CUDA_NEEDS_FLAGS,
  FA_CUDA_ALL_NEEDS = FA_CUDA_NEEDS_ANY_OF_HEADS | (FA_CUDA_NEEDS_PAGES - 1) | FA_CUDA_NEEDS_EXTREMES |
                      FA_CUDA_NEEDS_LATE_TERMS | FA_CUDA_NEEDS_SUMS | FA_CUDA_NEEDS_SLOPES_BEHIND |
                      FA_CUDA_NEEDS_OTHER_SCALES | FA_CUDA_NEEDS_FLAGS | FA_CUDA_NEEDS_COLUMNS_BEHIND,
  /* What gives scores another form than the usual one. */
  FA_CUDA_FORM_NEEDS = FA_CUDA_NEEDS_SOFTCAP | FA_CUDA_NEEDS_OTHER_SCALES,
  FA_CUDA_PLAIN_NEEDS = FA_CUDA_NEEDS_WINDOW | FA_CUDA_FORM_NEEDS | FA_CUDA_NEEDS_SINKS,
  FA_CUDA_MASK_NEEDS = FA_CUDA_PLAIN_NEEDS | FA_CUDA_NEEDS_BANDS | FA_CUDA_NEEDS_LENGTHS,
  /* Of few rows: what keys in a cache are, and all but what the others are there for. */
  FA_CUDA_CACHE_NEEDS = FA_CUDA_PLAIN_NEEDS | FA_CUDA_NEEDS_LENGTHS | FA_CUDA_NEEDS_PAGES,
  FA_CUDA_FEW_ROWS_NEEDS =
      (FA_CUDA_ALL_NEEDS | FA_CUDA_NEEDS_PAGES) & ~(FA_CUDA_NEEDS_DROPOUT | FA_CUDA_NEEDS_EXTREMES),
};

/* The lanes that share a row in `statistics` and in copies: an eighth of the bucket, or the next power of two.
 */
#define FA_CUDA_STATISTICS_LANES(bucket) ((bucket) <= 64 ? 8 : (bucket) <= 128 ? 16 : 32)

/* A kernel and the shape of its blocks: a row of the tables in forward.cu, backward.cu and their Hopper
 * counterparts. */
typedef struct fa_cuda_kernel {
  const char *name;
  int32_t bucket; /* the largest head_dim that it takes */
  int32_t block_q, block_k, num_threads;
  int32_t shared_bytes;
  int32_t least_columns;  /* not for problems whose rows see fewer, on average, */
  int32_t least_rows;     /* or that have fewer rows a head, */
  int64_t least_scores;   /* or that have fewer scores */
  uint32_t takes;         /* which needs of a problem it serves */
  int32_t row_warps;      /* backward, of one that takes a bias: so many warps share a column of a step */
  bool mapped;            /* main reads by fa_cuda_maps */
  bool persistent;        /* main has at most one block a multiprocessor, which takes one after the other */
  bool begins_early;      /* main waits by itself for the small kernel in front of it */
  bool single_column;     /* only for problems with one column block, which every row sees */
  bool splits_heads;      /* backward: a column block's query heads may be shared out, not only its steps */
  bool leaves_notes;      /* forward: main mends when it has taken all tiles, see fa_cuda_arguments.notes */
  bool folds;             /* main makes numbers a key, or slopes, parts of q·k: fa_cuda_keys.terms */
  bool halves;            /* backward: main has halves of the p that dropout leaves: delta_factor is 2 kept */
  bool skips_hidden_keys; /* main leaves out what keys hide block by block: fa_cuda_keys.shown */
  bool in_parts;          /* forward: keys are split into parts, whose o and lse a merge follows */
  bool asks; /* main takes masks that hide nothing, or are causal, as a plain kernel does: fa_cuda_answer */
  /* backward: only for problems whose rows, of all query heads of a key/value head, are at most block_q; main
   * makes statistics itself, and has a block a part of all columns: num_dq_parts */
  bool few_rows;
  const void *main; /* one block a q block (forward) or k block (backward) of a head */
  const void
      *main_that_mends;   /* forward: main of problems that hide cells. NULL: a kernel behind main mends o */
  const void *statistics; /* backward, fa_cuda_dlse beside the arguments: delta, shift, and what begins at 0 */
  /* What may run beside main, FA_CUDA_BESIDE_THREADS a block: of a forward of f32 the copies of k and v
   * (fa_cuda_arguments, fa_cuda_splits); of a backward the statistics (fa_cuda_arguments, fa_cuda_dlse), of f32
   * with all copies (fa_cuda_splits). What counts is 0 before. NULL: nothing may. */
  const void *beside;
  const void *finish_dq; /* backward: dq_sum to dq; one block of finish_threads a q block. NULL: main does it */
  int32_t finish_threads;
  const void *merge;      /* of a kernel for few rows: FA_CUDA_PARTS_THREADS a block */
  int32_t blocks_per_sm;  /* of a kernel for few rows: blocks that share a multiprocessor */
  int64_t most_key_bytes; /* not for problems whose keys have more, unless this is 0 */
} fa_cuda_kernel;

/* Rows of a kind in order of preference, ended by one whose name is NULL. */
extern const fa_cuda_kernel fa_cuda_forward_bf16[], fa_cuda_backward_bf16[];
extern const fa_cuda_kernel fa_cuda_forward_f16[], fa_cuda_backward_f16[];
extern const fa_cuda_kernel fa_cuda_forward_f32[], fa_cuda_backward_f32[];
extern const fa_cuda_kernel fa_cuda_forward_f32_as_f16[], fa_cuda_backward_f32_as_f16[];

/* The same for compute capability 9.0, of operands that tensor maps can describe. */
extern const fa_cuda_kernel fa_hopper_forward_bf16[], fa_hopper_backward_bf16[];
extern const fa_cuda_kernel fa_hopper_forward_f16[], fa_hopper_backward_f16[];
extern const fa_cuda_kernel fa_hopper_backward_wide_bf16[], fa_hopper_backward_wide_f16[];
extern const fa_cuda_kernel fa_hopper_forward_f32[], fa_hopper_backward_f32[];
extern const fa_cuda_kernel fa_hopper_forward_f32_as_f16[], fa_hopper_backward_f32_as_f16[];

/* The backward of few rows, which is Hopper's, too. */
extern const fa_cuda_kernel fa_cuda_backward_few_bf16[], fa_cuda_backward_few_f16[];

/* The forward of few rows, of every kind. Rows of a bucket are in the order of their block_q. */
extern const fa_cuda_kernel fa_cuda_decode_bf16[], fa_cuda_decode_f16[], fa_cuda_decode_f32[],
    fa_cuda_decode_f32_as_f16[];
extern const fa_cuda_kernel fa_hopper_decode_bf16[], fa_hopper_decode_f16[];

/* Kernels that are the same for every kind. */
enum { FA_CUDA_SMALL_KERNEL_THREADS = 256, FA_CUDA_PLAN_THREADS = 1024, FA_CUDA_PARTS_THREADS = 512 };
/* The fewer, the sooner main may begin; the more, the fewer counts has it to ask. */
enum { FA_CUDA_DONE_ROWS = 512 };
#define FA_CUDA_DONE_GROUPS(padded_rows) (((padded_rows) + FA_CUDA_DONE_ROWS - 1) / FA_CUDA_DONE_ROWS)
/* Of what runs beside main: they have all registers of a multiprocessor. */
enum { FA_CUDA_BESIDE_THREADS = 1024 };
/* fa_cuda_splits; of 8, 16 and 32 lanes a row (FA_CUDA_STATISTICS_LANES), of which a block has
 * FA_CUDA_SPLIT_ROWS; a block a group of rows that share a scale, its y a tensor. */
enum { FA_CUDA_SPLIT_ROWS = 32 };
extern const void *const fa_cuda_split_kernels[];
extern const void *const fa_cuda_plan_kernel;    /* fa_cuda_plans; FA_CUDA_PLAN_THREADS threads, a block a
                                                   batch of bands, its y a side */
extern const void *const fa_cuda_lengths_kernel; /* fa_cuda_plans; writes bands of key_lengths, a thread a
                                                   batch */
extern const void *const fa_cuda_sink_kernel;    /* fa_cuda_arguments, fa_cuda_dlse; a block a sink
                                                         and head: writes dsink */
/* Of each kind: see isolation.cu. */
extern const void *const fa_cuda_look_kernels[FA_CUDA_NUM_KINDS];         /* fa_cuda_arguments */
extern const void *const fa_cuda_mend_forward_kernels[FA_CUDA_NUM_KINDS]; /* fa_cuda_arguments */
extern const void *const fa_cuda_mend_few_kernels[FA_CUDA_NUM_KINDS];     /* fa_cuda_arguments, fa_cuda_cache */
extern const void *const fa_cuda_mend_kernels[FA_CUDA_NUM_KINDS]; /* fa_cuda_arguments, fa_cuda_gradients */
extern const void *const fa_cuda_reduce_heads_kernel;             /* fa_cuda_reduction; a block a number */
/* fa_cuda_reductions; a thread takes a column at a time, or four. FA_CUDA_REDUCE_LANES threads share a row, or
 * fewer where that is short; a block's y is so many rows as these leave threads for, its z a reduction. */
enum { FA_CUDA_REDUCE_LANES = 32 };
extern const void *const fa_cuda_reduce_cells_kernels[2];
extern const void *const fa_cuda_keys_kernel;  /* fa_cuda_key_reading; a warp a block of keys */
extern const void *const fa_cuda_words_kernel; /* fa_cuda_arguments; a thread a pair of words */
/* fa_cuda_arguments, of a forward and of a backward; a warp takes FA_CUDA_FLAG_ROWS rows or
 * FA_CUDA_MOST_FLAG_COLUMNS, of so many columns. */
extern const void *const fa_cuda_flags_kernels[2];
extern const void *const fa_cuda_unpack_kernel; /* fa_cuda_packed; a warp a row of a head, a block's y a row of
                                                  these */

/* The kernel of a type, f32, bf16 or f16, for memory that begins at multiples of 16 bytes, or anywhere. Its
 * argument is fa_sum. */
const void *fa_cuda_sum_kernel(fa_dtype dtype, bool in_vectors);

#ifdef __cplusplus
}
#endif

#endif
