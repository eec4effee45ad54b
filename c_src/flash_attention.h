/*
 * flash_attention.h: exact attention, forward and backward.
 *
 * This is the only public header of libflash_attention. It can be called from C, through an FFI, or from
 * an XLA runtime (see the end); the Erlang NIF of this project is one caller among others.
 *
 * What is computed. For every batch b, query head h and query row i, with the key/value head
 * kv = h / (num_heads / num_kv_heads):
 *
 *     s[i,j]  = scale * dot(q[b,i,h], k[b,j,kv])
 *     s[i,j]  = softcap * tanh(s[i,j] / softcap)         where softcap is not 0
 *     s[i,j] += bias[b,h,i,j]                            where there is a bias
 *     s[i,j] -= alibi_slopes[b,h] * |i + k_end - q_end - j|   where there are alibi_slopes
 *     s[i,j]  = -inf                                     where column j is not visible from row i
 *     lse[i]  = log(sum_j exp(s[i,j]) + sum_t exp(sink[t,h]) + sum_t exp(row_sinks[b,i,t,h]))
 *     p[i,j]  = exp(s[i,j] - lse[i])
 *     o[i]    = sum_j keep[i,j] * p[i,j] * v[b,j,kv]
 *
 * and in the backward pass, given dout = d(loss)/d(o), and dlse = d(loss)/d(lse) where the loss depends on lse:
 *
 *     delta[i]   = dot(o[i], dout[i]) - dlse[i]
 *     dv[j]      = sum_{i,h} keep[i,j] * p[i,j] * dout[i]
 *     ds[i,j]    = p[i,j] * (keep[i,j] * dot(dout[i], v[j]) - delta[i])
 *     dbias[b,h,i,j]     = ds[i,j]
 *     dalibi_slopes[b,h] = -sum_{i,j} ds[i,j] * |i + k_end - q_end - j|
 *     dx[i,j]    = ds[i,j] * scale                               (times the derivative of softcap)
 *     dq[i]      = sum_j dx[i,j] * k[j]
 *     dk[j]      = sum_{i,h} dx[i,j] * q[i]
 *     dsink[t,h] = -sum_{b,i} exp(sink[t,h] - lse[i]) * delta[i]
 *     drow_sinks[b,i,t,h] = -exp(row_sinks[b,i,t,h] - lse[i]) * delta[i]
 *
 * Column j is visible from row i iff
 *
 *     i + seqlen_k - seqlen_q - window_left <= j <= i + seqlen_k - seqlen_q + window_right
 *
 * Causal attention is window_right = 0.
 *
 * Where there are bands, {q_begin, q_end, k_begin, k_end, left, right} each, row i of [q_begin, q_end) sees
 * column j of [k_begin, k_end) iff, in some band of its batch,
 *
 *     i - q_end + k_end - min(left, window_left) <= j <= i - q_end + k_end + min(right, window_right)
 *
 * so that a band's last row stands beside its last column; without them the problem is the one band {0,
 * seqlen_q, 0, seqlen_k, INT32_MAX, INT32_MAX}. Rows and columns of bands may overlap, cells may not: those
 * that do count once for each band. left and right may be negative; INT32_MAX bounds nothing. A band whose end
 * is not after its begin has no cells. fa_run takes bands as they are, clamps them to the problem and reads
 * nothing outside of it, whatever they hold; fa_run_anywhere looks at those in the host's memory, and refuses
 * what lies outside of the problem or shares a cell with another. Only what is visible is computed.
 *
 * A bias is of q's type or f32. One of u8 is a mask: where it is 0 the score is -inf, and where it is anything
 * else nothing is added. Where a bias is -inf the score is -inf whatever q and k hold. What a bias holds in
 * cells that are not visible is not looked at, and dbias is 0 there and wherever the score is -inf. Tiles that
 * a bias hides whole may not be computed. Finite numbers that are large hide as well, but for a row that sees
 * no others; on CUDA, beside 16-bit q, those of a bias with seqlen_q of 1 may count as at most 2^20, gradients
 * of such a row may be 0, and slopes count as at most 2^23 times the scale. dbias is summed in f32 (f64 where
 * dtype is f64), of terms that may be rounded to dtype as those of dk are, then rounded to its type.
 *
 * Where there are key_lengths, the keys of a batch end there: in all formulas its seqlen_k is its length, so
 * that the last row of q stands beside the last key that there is. So a cache grows from step to step while
 * shapes stay. fa_run clamps lengths to [0, seqlen_k], and fa_run_anywhere refuses others that it can look at.
 * What k and v hold behind the length is not read where that saves time, and reaches nothing; dk and dv are 0
 * there. There are no bands beside key_lengths: a band's k_end says the same.
 *
 * Where there is a page_table, k and v are pages, [num_pages, page_size, num_kv_heads, head_dim], and column j
 * of batch b is row j % page_size of page page_table[b, j / page_size]; seqlen_k is max_pages * page_size, and
 * key_lengths say how many of the columns are there. Pages may be shared. A page number that is not from 0 to
 * num_pages - 1 is nowhere looked up: where such columns are visible, their k and v count as 0. Forward alone.
 *
 * The distance that slopes multiply (ALiBi: Press et al. 2022) is that of a cell from the column beside its
 * row: k_end and q_end are those of the cell's band. A tensor broadcasts along an axis where it is 1, and its
 * gradient is then summed over that axis, as all gradients are over the axes that they do not have.
 *
 * keep is 1 without dropout, and otherwise 0 or 1 / (1 - rate), where rate is dropout rounded to a multiple of
 * 2^-16. lse is that of all scores. keep * x is 0 where keep is, whatever x is. What is dropped depends on
 * dropout_seed, b, h, i and j alone, whatever computes it:
 *
 *     words(x, key, n) are n rounds of Philox2x32 (Salmon et al. 2011) on the words x[0], x[1] of 32 bits:
 *         x[0], x[1] = high(x[0] * 0xD256D193) ^ key ^ x[1], low(x[0] * 0xD256D193);  key = key + 0x9E3779B9
 *     pair(n)   = n / 16 * 8 + n % 8
 *     a         = words({b, h}, dropout_seed[0], 10)
 *     z         = words(a, dropout_seed[1], 10)
 *     r         = words({pair(i), z[1]}, z[0], 10)
 *     c         = words({pair(j), dropout_seed[1]}, dropout_seed[0], 10)
 *     w         = words({r[0] ^ c[0], r[1] ^ c[1]}, 0, 2)
 *     keep[i,j] = 0 where the 16 bits from 16 * (i / 8 % 2) on of w[j / 8 % 2] are below rate * 2^16
 *
 * A column whose score is -inf is not there for the row, be it that the mask hides it or that an infinite q or
 * k makes it so. Whatever k and v hold in it, NaN and infinities included, reaches neither the row's o, lse and
 * dq, and whatever the row's q, dout, o and lse hold does not reach the column's dk and dv. So packed batches
 * and caches may hold garbage where nobody looks. A row that so sees nothing gives o = 0 and zero gradients;
 * its lse is -inf, or log(sum exp(sink)) where there are sinks. It never gives NaN. Everything else that is not
 * finite spreads as IEEE arithmetic says. On CUDA results that such numbers meet in a block of rows and columns
 * are made again one by one, which is slow; but a forward whose padding, as bands and lengths say it, holds
 * garbage takes no longer. It does not look, in gradients, at infinite k of which all scores are -inf, and at
 * no infinite q and k where neither mask nor bias hides anything: these may give NaN.
 *
 * What lse can hold. lse is all that the backward knows of a row's softmax, and in f32 it is rounded by up to
 * |lse| * 2^-24: every p of the row is off by that factor, alike for all its columns, and with p dv, dq and dk.
 * So where logits are around 1e3 gradients are good to 6e-5, at 1e4 to 6e-4, at 1e6 to 6e-2. o does not go
 * through lse and is not affected; f64 has 2^-53 in the place of 2^-24. Without softcap and sinks, subtracting
 * from k its mean over the columns keeps lse small and changes nothing else.
 *
 * How to call it, in four steps:
 *
 *     fa_problem problem;
 *     fa_error error;
 *     fa_problem_init(&problem);                               // defaults for every option
 *     problem.dtype = FA_DTYPE_F32;                            // sizes and options: plain fields
 *     problem.batch = 2; ...
 *
 *     fa_plan plan;                                            // which kernel, how much workspace
 *     fa_device cpu = {FA_DEVICE_CPU, 0};
 *     if (fa_plan_init(&plan, &problem, FA_PASS_FORWARD, cpu, &error)) { puts(error.message); ... }
 *
 *     fa_tensors tensors = {0};                                // where the numbers are
 *     tensors.q = fa_tensor_contiguous(&problem, FA_TENSOR_Q, q);
 *     ...
 *     fa_execution execution = {.workspace = malloc(plan.workspace_bytes),
 *                               .workspace_bytes = plan.workspace_bytes};
 *     fa_run(&plan, &tensors, &execution, &error);
 *
 * Thread safety: every function may be called from any thread at any time; between calls the library keeps
 * memory and streams of GPUs at hand, and nothing that changes a result. A plan is immutable once initialised
 * and may be run by several threads at once, each with its own workspace. The library's own threads run on the
 * processors of the process's first thread, as many as its control group's quota is worth, and take no signals.
 * After a fork() the child begins anew: what was allocated on a GPU, and for one, is its parent's alone, as are
 * caches on any device, which another thread of the parent may have been in the middle of changing.
 *
 * The environment. FLASH_ATTENTION_NUM_THREADS, from 1 to 1023, is how many threads a plan for the CPU takes,
 * where it has work for so many; otherwise, and with anything else, it is the number of processors, and fewer
 * for a small problem. FLASH_ATTENTION_DISABLE lists, with commas between, what is not used though it is there:
 * amx, avx512bf16, avx512 (and with it both of these), avx2, and sm90, Hopper's own kernels.
 * FLASH_ATTENTION_CACHE=0 uses no memory of a GPU again (fa_device_alloc).
 *
 * Errors: functions return FA_STATUS_OK (0) or another status, and describe what went wrong in the
 * fa_error that the caller passes (NULL where the text is not wanted). Outputs are unspecified after an
 * error. No function aborts, and none prints.
 *
 * Sizes and strides are int64_t: tensors of more than 2^31 elements are an ordinary case.
 */
#ifndef FLASH_ATTENTION_H
#define FLASH_ATTENTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FA_VERSION "0.1.0"

#if defined(__GNUC__)
#define FA_API       __attribute__((visibility("default")))
#define FA_EXTENSION __extension__ /* C11's structs without a name, of which -pedantic warns in C++ */
#else
#define FA_API
#define FA_EXTENSION
#endif

/* ---------------------------------------------------------------------------------------------------
 * Status and errors
 * ------------------------------------------------------------------------------------------------- */

typedef enum fa_status {
  FA_STATUS_OK = 0,
  FA_STATUS_INVALID_ARGUMENT, /* a size, shape, type or option that no backend could take */
  FA_STATUS_UNSUPPORTED,      /* a valid problem that the chosen backend does not take */
  FA_STATUS_NO_DEVICE,        /* the chosen device is not there, or its driver is not */
  FA_STATUS_OUT_OF_MEMORY,    /* host or device memory ran out; the next call may succeed */
  FA_STATUS_DEVICE_ERROR,     /* the device reported an error; message holds its own text */
} fa_status;

/* What went wrong. Strings are NUL-terminated and cut where too long. */
typedef struct fa_error {
  fa_status status;
  char argument[32];  /* the argument at fault: "k", "softcap", "device"; "" where there is none */
  char expected[160]; /* "head_dim 64 as in q"; "" where it does not apply */
  char got[160];      /* "48" */
  char message[384];  /* all of it in one line: "k: expected head_dim 64 as in q, got 48" */
} fa_error;

/* The name of a status in lower case: "invalid_argument". Never NULL. */
FA_API const char *fa_status_name(fa_status status);

/* Fills error (which may be NULL) and returns status, as the library does itself: for bindings that find fault
 * before the library can. argument, expected and got may be NULL or "". The message becomes "argument: expected
 * <expected>, got <got>", without the parts that are missing. */
FA_API fa_status fa_fail(fa_error *error, fa_status status, const char *argument, const char *expected,
                         const char *got);

/* ---------------------------------------------------------------------------------------------------
 * The problem: what is to be computed. No pointers in it: it can be copied, compared, hashed, printed.
 * ------------------------------------------------------------------------------------------------- */

typedef enum fa_dtype {
  FA_DTYPE_F32 = 0,
  FA_DTYPE_F64, /* CPU only */
  FA_DTYPE_BF16,
  FA_DTYPE_F16,
  FA_NUM_FLOATS, /* those above are types to compute in, those below types of indices and flags */
  FA_DTYPE_S32 = FA_NUM_FLOATS,
  FA_DTYPE_U32,
  FA_DTYPE_U8,
  FA_NUM_DTYPES,
} fa_dtype;

/* "f32", "f64", "bf16", "f16", "s32", "u32", "u8"; and the size of one element in bytes. */
FA_API const char *fa_dtype_name(fa_dtype dtype);
FA_API size_t fa_dtype_bytes(fa_dtype dtype);

/* Arithmetic of the matrix products of f32 tensors, on devices where there is a choice. */
typedef enum fa_precision {
  FA_PRECISION_HIGHEST = 0, /* as accurate as plain f32 arithmetic */
  FA_PRECISION_HIGH,
  FA_PRECISION_DEFAULT, /* CUDA: of numbers rounded to f16's 11 bits */
} fa_precision;

/* A window_left or window_right that bounds nothing. */
#define FA_UNBOUNDED INT64_MAX

/* A batch, a query head and a row of q of a larger problem. */
typedef struct fa_origin {
  int64_t batch, head, row;
} fa_origin;

typedef struct fa_problem {
  size_t struct_size;                /* sizeof(fa_problem): lets the struct grow */
  fa_dtype dtype;                    /* one of the FA_NUM_FLOATS */
  int64_t batch, seqlen_q, seqlen_k; /* 0 is allowed */
  int64_t num_heads, num_kv_heads;   /* num_kv_heads divides num_heads */
  int64_t head_dim;
  int64_t num_sinks, num_row_sinks; /* of sink and of row_sinks; 0: there are none */
  int64_t bands_batch, num_bands;   /* of the tensor bands: 1 or batch, and how many; 0: there is none */
  int64_t alibi_batch;              /* of alibi_slopes: 1 or batch; 0: there are none */
  int64_t bias_batch, bias_heads, bias_rows; /* of bias: 1, or batch, num_heads, seqlen_q; 0: there is none */
  fa_dtype bias_dtype;                       /* dtype, f32 or u8 */
  int64_t num_seed_words;                    /* of dropout_seed: 2; 0: there is none */
  int64_t dlse_batch;                        /* of dlse: 1 or batch; 0: there is none */
  int64_t lengths_batch;                     /* of key_lengths: 1 or batch; 0: there are none */
  int64_t num_pages, page_size;              /* of k and v where there is a page_table, */
  int64_t max_pages; /* and the most that a batch has of them; 0: there is no page_table */
  /* Options; fa_options() lists them with their bounds. */
  double scale;                      /* 0: 1/sqrt(head_dim) */
  int64_t window_left, window_right; /* keys to either side, or FA_UNBOUNDED */
  double softcap;                    /* 0: none */
  double dropout;                    /* the share of scores that are dropped; 0: none */
  int32_t precision;                 /* fa_precision; f32 only */
  int32_t deterministic;             /* 1: the backward is bitwise repeatable */
  int32_t constant_bias;             /* 1: the backward gives no dbias */
  int32_t constant_alibi_slopes;     /* 1: nor dalibi_slopes */
  int32_t inference;                 /* 1: no backward follows, whose rounding the forward must share */
  /* Where this problem lies in the one that the caller asked about, of which fa_run_anywhere runs slices: its
   * first batch, head and row there, by which dropout counts: on CUDA a multiple of 16 rows. Zeros for callers.
   */
  fa_origin origin;
} fa_problem;

/* Sizes 0, dtype f32, every option at its default (no window, no softcap, default scale). */
FA_API void fa_problem_init(fa_problem *problem);

/* FA_STATUS_INVALID_ARGUMENT where a size is negative, a product of sizes overflows, num_kv_heads does not
 * divide num_heads, or an option is out of its bounds. fa_plan_init calls it. */
FA_API fa_status fa_problem_validate(const fa_problem *problem, fa_error *error);

/* The problem on one line, without its options' defaults: "f32 b2 sq100 sk100 h4 kv2 d64 window_right=0".
 * Returns the length that the whole text has, as snprintf does. */
FA_API int fa_problem_format(const fa_problem *problem, char *text, size_t text_bytes);

/* ---------------------------------------------------------------------------------------------------
 * The option table: every option of fa_problem, for bindings to loop over
 * ------------------------------------------------------------------------------------------------- */

typedef enum fa_option_kind {
  FA_OPTION_REAL,   /* double */
  FA_OPTION_LENGTH, /* int64_t, a count or FA_UNBOUNDED */
  FA_OPTION_CHOICE, /* int32_t, an index into choices */
} fa_option_kind;

typedef struct fa_option {
  const char *name;
  fa_option_kind kind;
  size_t offset;              /* of the field in fa_problem */
  double minimum, maximum;    /* bounds, inclusive; always finite */
  double default_value;       /* of a length: FA_UNBOUNDED is written as INFINITY */
  const char *const *choices; /* NULL-terminated, for FA_OPTION_CHOICE */
  const char *doc;            /* one sentence */
} fa_option;

/* The table and, through num_options, its length. */
FA_API const fa_option *fa_options(size_t *num_options);

/* The row of that name, or NULL. */
FA_API const fa_option *fa_option_find(const char *name);

/* An option as a number: INFINITY for FA_UNBOUNDED, the index of a choice. */
FA_API double fa_option_get_number(const fa_problem *problem, const fa_option *option);

/* Sets an option from a number (INFINITY: FA_UNBOUNDED) or, for a choice, from its name. The error names
 * the option, its bounds and what came. */
FA_API fa_status fa_option_set_number(fa_problem *problem, const fa_option *option, double value,
                                      fa_error *error);
FA_API fa_status fa_option_set_choice(fa_problem *problem, const fa_option *option, const char *choice,
                                      fa_error *error);

/* ---------------------------------------------------------------------------------------------------
 * Tensors: where the numbers are
 * ------------------------------------------------------------------------------------------------- */

/*
 *     q, o, dout, dq        [batch, seqlen_q, num_heads, head_dim]      dtype
 *     k, v, dk, dv          [batch, seqlen_k, num_kv_heads, head_dim]   dtype
 *     lse                   [batch, num_heads, seqlen_q]                f32 (f64 where dtype is f64)
 *     dlse                  [batch or 1, num_heads, seqlen_q]           as lse
 *     sink, dsink           [num_sinks, num_heads]                      f32
 *     row_sinks, drow_sinks [batch, seqlen_q, num_row_sinks, num_heads] f32
 *     bands                 [batch or 1, num_bands, 6]                  s32
 *     alibi_slopes, dalibi_slopes   [batch or 1, num_heads]             f32
 *     dropout_seed          [2]                                         u32
 *     bias, dbias           [batch or 1, num_heads or 1, seqlen_q or 1, seqlen_k]   bias_dtype; no dbias of u8
 *     key_lengths           [batch or 1]                                s32
 *     page_table            [batch, max_pages]                          s32
 *     tangent_x, o_tangent, lse_tangent: as x, o and lse
 *
 * Strides are in elements, one for each axis but the last, which is always contiguous, in the order of the
 * shape's axes. Those of [batch, row, head, head_dim] have names, too. Tensors that do not end in head_dim are
 * contiguous as a whole and their strides are ignored. Tensors that are written must not overlap. CUDA takes no
 * dlse of 1 beside row_sinks of several batches.
 */
#define FA_MAX_RANK 4

typedef struct fa_tensor {
  void *data;
  FA_EXTENSION union {
    int64_t strides[FA_MAX_RANK - 1];
    FA_EXTENSION struct { int64_t stride_batch, stride_row, stride_head; };
  };
} fa_tensor;

typedef struct fa_tensors {
  fa_tensor q, k, v, sink, row_sinks, bands, alibi_slopes, bias, dropout_seed, key_lengths, page_table;
  fa_tensor o, lse;
  fa_tensor dout, dlse, dq, dk, dv, dsink, drow_sinks, dalibi_slopes, dbias;
  fa_tensor tangent_q, tangent_k, tangent_v; /* directions, for FA_PASS_TANGENT */
  fa_tensor tangent_sink, tangent_row_sinks, tangent_alibi_slopes, tangent_bias;
  fa_tensor o_tangent, lse_tangent;
} fa_tensors;

typedef enum fa_pass {
  FA_PASS_FORWARD,  /* inputs: q, k, v and what may be left out -> o, lse */
  FA_PASS_BACKWARD, /* dout, o, lse, dlse if there is one, and the inputs -> the gradient by each input that has
                       one */
  FA_PASS_TANGENT,  /* the inputs and a direction for each that has a gradient -> o, lse and their derivatives
                       along it. f64, CPU: the derivative of the forward algorithm itself, to check backwards by
                     */
  FA_PASS_BOUND, /* dout and the inputs -> o, lse and the gradients, which hold no results but how far rounding
                    may take each of their elements, in that type, on any device. Reference: what devices are
                    checked by (c_src/cpu/reference_bound.h) */
  FA_NUM_PASSES,
} fa_pass;

/* Names a member of fa_tensors; the order is theirs. */
typedef enum fa_tensor_id {
  FA_TENSOR_Q = 0,
  FA_TENSOR_K,
  FA_TENSOR_V,
  FA_TENSOR_SINK,
  FA_TENSOR_ROW_SINKS,
  FA_TENSOR_BANDS,
  FA_TENSOR_ALIBI_SLOPES,
  FA_TENSOR_BIAS,
  FA_TENSOR_DROPOUT_SEED,
  FA_TENSOR_KEY_LENGTHS,
  FA_TENSOR_PAGE_TABLE,
  FA_TENSOR_O,
  FA_TENSOR_LSE,
  FA_TENSOR_DOUT,
  FA_TENSOR_DLSE,
  FA_TENSOR_DQ,
  FA_TENSOR_DK,
  FA_TENSOR_DV,
  FA_TENSOR_DSINK,
  FA_TENSOR_DROW_SINKS,
  FA_TENSOR_DALIBI_SLOPES,
  FA_TENSOR_DBIAS,
  FA_TENSOR_TANGENT_Q,
  FA_TENSOR_TANGENT_K,
  FA_TENSOR_TANGENT_V,
  FA_TENSOR_TANGENT_SINK,
  FA_TENSOR_TANGENT_ROW_SINKS,
  FA_TENSOR_TANGENT_ALIBI_SLOPES,
  FA_TENSOR_TANGENT_BIAS,
  FA_TENSOR_O_TANGENT,
  FA_TENSOR_LSE_TANGENT,
  FA_NUM_TENSORS,
} fa_tensor_id;

typedef enum fa_tensor_role {
  FA_ROLE_NONE = 0, /* the pass does not touch it */
  FA_ROLE_INPUT,
  FA_ROLE_OUTPUT,
} fa_tensor_role;

/* What a tensor says of itself. */
typedef struct fa_shape {
  fa_dtype dtype;
  int32_t rank;
  int64_t dims[FA_MAX_RANK];
  int64_t size_bytes; /* of the contiguous data; negative: not known, not checked */
} fa_shape;

FA_API const char *fa_tensor_name(fa_tensor_id id);

/* The tensor of that name, or -1. */
FA_API int fa_tensor_find(const char *name);

FA_API const char *fa_pass_name(fa_pass pass);

/* What a pass of this problem does with a tensor. FA_ROLE_NONE for what is left out, and for its gradient:
 * where num_sinks is 0, there is no sink. Nor is there a gradient by whole numbers, or by what an option calls
 * constant. */
FA_API fa_tensor_role fa_tensor_role_in(const fa_problem *problem, fa_pass pass, fa_tensor_id id);

/* The tensor that holds the gradient by this one (q: dq; o: dout), or -1 where nothing is derived by it. lse
 * has none: dlse may be left out where lse is there. */
FA_API int fa_tensor_gradient(fa_tensor_id id);

/* The shape that the problem gives a tensor, size_bytes included. The problem must be valid. */
FA_API fa_shape fa_tensor_shape(const fa_problem *problem, fa_tensor_id id);

/* The member of tensors that id names. */
FA_API fa_tensor *fa_tensor_at(fa_tensors *tensors, fa_tensor_id id);

/* A tensor of the problem's shape that lies contiguously at data. */
FA_API fa_tensor fa_tensor_contiguous(const fa_problem *problem, fa_tensor_id id, void *data);

/* Fills dtype and sizes of the problem from the shapes of the inputs of the pass, and checks that they agree:
 * each size comes from the first tensor that has it, and a tensor that is left out leaves its own sizes 0.
 * shapes[id] is NULL for a tensor that was not given. The error names
 * the tensor: "k: expected head_dim 64 as in q, got 48". Options are left as they are. */
FA_API fa_status fa_problem_set_shapes(fa_problem *problem, fa_pass pass,
                                       const fa_shape *const shapes[FA_NUM_TENSORS], fa_error *error);

/* ---------------------------------------------------------------------------------------------------
 * Devices
 * ------------------------------------------------------------------------------------------------- */

typedef enum fa_device_kind {
  FA_DEVICE_CPU = 0,
  FA_DEVICE_CUDA,
  FA_DEVICE_REFERENCE, /* a naive implementation on the CPU, O(seqlen^2) time and slow: the oracle. In f64
                          it is exact arithmetic's stand-in; in other types it rounds every intermediate
                          tensor to the type, as unfused attention does, and so gives the error scale that
                          tolerances are made of */
  FA_NUM_DEVICE_KINDS,
} fa_device_kind;

typedef struct fa_device {
  fa_device_kind kind;
  int32_t index;
} fa_device;

typedef struct fa_device_info {
  char name[128];       /* "AMD EPYC", "NVIDIA H200" */
  char features[128];   /* instruction sets in use, or the compute capability */
  int32_t num_threads;  /* threads a call may use; of a GPU: its multiprocessors */
  int64_t memory_bytes; /* 0: not known */
} fa_device_info;

/* "cpu", "cuda", "reference". */
FA_API const char *fa_device_kind_name(fa_device_kind kind);

/* Whether devices of that kind compute in memory of their own, so that tensors have to be brought there and
 * calls are enqueued on a stream; false of a kind that was not built. */
FA_API bool fa_has_own_memory(fa_device_kind kind);

/* How many devices of that kind there are; 0 with a reason in error where a backend was not built, or
 * finds no driver. */
FA_API int32_t fa_num_devices(fa_device_kind kind, fa_error *error);
FA_API fa_status fa_device_get_info(fa_device device, fa_device_info *info, fa_error *error);

/* Memory of a device; of the CPU and the reference it is ordinary memory. Aligned to 64 bytes or more; 0 bytes
 * give NULL. The error of a GPU that has too little says how much was asked for and how much is free.
 *
 * What is given back to a GPU stays at hand for the next fa_device_alloc, so that neither call waits for the
 * device; the device's work on it must be done. fa_memory_trim returns it to the driver, as does an allocation
 * that would fail else. One that finds nothing of its size at hand leaves at most an eighth of the device's
 * memory there, and nothing where the environment says FLASH_ATTENTION_CACHE=0: for tools that look for
 * accesses out of bounds. */
FA_API fa_status fa_device_alloc(fa_device device, size_t bytes, void **memory, fa_error *error);
FA_API fa_status fa_device_free(fa_device device, void *memory, fa_error *error);

/* Memory of the host that a GPU reads and writes at the full rate of its bus (page-locked, or pinned), which is
 * several times that of ordinary memory. Taking it from the system is slow, so it is kept at hand likewise.
 * FA_STATUS_OUT_OF_MEMORY where callers and cache would hold more than fa_set_pinned_limit allows (until then:
 * a quarter of the host's memory, but 4 GiB at most), and FA_STATUS_UNSUPPORTED where the device's memory is
 * the host's; ordinary memory does as well then. */
FA_API fa_status fa_host_alloc(fa_device device, size_t bytes, void **memory, fa_error *error);
FA_API fa_status fa_host_free(fa_device device, void *memory, fa_error *error);
FA_API void fa_set_pinned_limit(size_t bytes);

typedef struct fa_memory_info {
  int64_t used_bytes;   /* of fa_device_alloc: with its callers, calls under way included */
  int64_t cached_bytes; /* given back and at hand */
  int64_t free_bytes;   /* of the device; 0: not known */
  int64_t pinned_used_bytes, pinned_cached_bytes, pinned_limit_bytes; /* of fa_host_alloc, for all devices */
  int64_t page_bytes; /* of caches; part of used_bytes where the device has memory of its own */
} fa_memory_info;

/* What is held of a device's memory, and for it. All but page_bytes is 0 where the device's memory is the
 * host's, and where the device was not used yet: looking does not wake it up. */
FA_API fa_status fa_memory_get_info(fa_device device, fa_memory_info *info, fa_error *error);

/* Returns what is at hand to the driver and the system. */
FA_API fa_status fa_memory_trim(fa_device device, fa_error *error);

/* Where memory lies, seen from a device. */
typedef enum fa_place {
  FA_PLACE_HOST = 0,     /* the host's, or what nobody knows of */
  FA_PLACE_PINNED,       /* the host's, page-locked: the device copies it without the processor's help */
  FA_PLACE_DEVICE,       /* the device's own */
  FA_PLACE_OTHER_DEVICE, /* another device's, which it can copy */
} fa_place;

FA_API fa_place fa_memory_locate(fa_device device, const void *memory, size_t bytes);

/* Copies between the host and the device, either way, or within one of them, after the work that the stream
 * (NULL: the default one) already holds. Done on return. */
FA_API fa_status fa_device_copy(fa_device device, void *to, const void *from, size_t bytes, void *stream,
                                fa_error *error);

/* Waits for the work that the stream holds, and reports an error that it met. */
FA_API fa_status fa_device_synchronize(fa_device device, void *stream, fa_error *error);

/* ---------------------------------------------------------------------------------------------------
 * Plans: how one pass of one problem runs on one device
 * ------------------------------------------------------------------------------------------------- */

/* How to run: what differs from call to call. Zero-initialise, then set what is wanted. */
typedef struct fa_execution {
  void *workspace; /* at least plan.workspace_bytes, 64-byte aligned, on the device */
  size_t workspace_bytes;
  int32_t num_threads; /* CPU: at most so many; 0: the default. Results do not depend on it */
  void *stream;        /* CUDA: a cudaStream_t. The call only enqueues; it does not wait */
} fa_execution;

typedef struct fa_plan {
  fa_problem problem; /* canonical: scale filled in, windows clipped to the sequence */
  fa_pass pass;
  fa_device device;
  const char *kernel;          /* the kernel that will run: "cpu/avx2/f32" */
  size_t workspace_bytes;      /* fa_run needs so much, for up to num_threads threads */
  int32_t num_threads;         /* CPU: the most threads that fa_run will use */
  const void *backend;         /* private */
  const void *config;          /* private: the backend's own choice */
  const struct fa_plan *whole; /* private: the plan of which this runs a slice, or NULL */
} fa_plan;

/* Validates the problem and asks the device's backend how it would run. FA_STATUS_UNSUPPORTED where it
 * would not; the error says why. No memory is allocated: a plan needs no release. */
FA_API fa_status fa_plan_init(fa_plan *plan, const fa_problem *problem, fa_pass pass, fa_device device,
                              fa_error *error);

/* Runs a plan. Every pointer in tensors that the pass reads or writes must be set and lie on the device.
 * On the CPU the results are there on return. Results do not depend on the number of threads. */
FA_API fa_status fa_run(const fa_plan *plan, const fa_tensors *tensors, const fa_execution *execution,
                        fa_error *error);

/* Whether threads that compute on the CPU give way, some ten thousand times a second, to others that yield
 * while they look for work, as the schedulers of Erlang's VM do, which would else wait for 100 ms and more. It
 * takes 2 to 4 % of most passes, and is off until somebody sets it, for the whole process: the NIF does. */
FA_API void fa_set_gives_way(int32_t gives_way);

/* What fa_run_anywhere is told of memory beside its tensors. Zero-initialise, then set what is wanted. */
typedef struct fa_placement {
  /* The caller's memory on the device is read and written after the work that this stream of it holds. CUDA: a
   * cudaStream_t; NULL: the default stream. What writes a tensor on another device must be done. */
  void *stream;
  bool is_settled; /* whether there is no such work, so that the call need not wait for the stream */
  /* Where data is set: memory of the device in which that tensor of the pass ends up as well, contiguous, for a
   * later call, as the backward that follows the forward. The tensor must be contiguous, too. */
  fa_tensors on_device;
} fa_placement;

/* What fa_run_anywhere tells of a call: the bytes that it moved over the bus, and how long its kernels ran. */
typedef struct fa_measurements {
  int64_t bytes_to_device, bytes_from_device;
  double kernel_seconds;
} fa_measurements;

/* Runs a plan on tensors wherever they lie, and waits for the results. Takes the memory that it needs (the
 * workspace; on a GPU room for tensors of the host's memory, too) and gives it back; calls from several threads
 * share the device. placement may be NULL, and so may measurements: a small call takes some microseconds less
 * then.
 *
 * On a GPU, tensors of the device's memory are used where they lie, and never cross the bus. Tensors of the
 * host's memory must be contiguous. They are copied at the bus's full rate from and to memory of fa_host_alloc,
 * and through such memory, by several threads, otherwise. A large problem runs in slices of batch, heads and
 * rows, so that one slice is copied while another is computed. Those threads round the f32 q, k, v and dout of
 * a large problem at FA_PRECISION_DEFAULT, as the kernels would, so that half as much crosses the bus:
 * gradients are then those of the rounded dout, and on_device gets the rounded tensors.
 *
 * Where the device's memory is the host's, tensors are used where they lie, too, and on_device gets copies. */
FA_API fa_status fa_run_anywhere(const fa_plan *plan, const fa_tensors *tensors, const fa_placement *placement,
                                 fa_measurements *measurements, fa_error *error);

/* The same on several devices of the plan's kind: batches, or the heads of a single batch, are divided among
 * them, and each has its own way over the bus. Results are those of one device, bit for bit: nothing that a
 * result sums over is divided, and so a backward of several batches that gives dsink runs on the first device
 * alone. Tensors that lie on a device go to the others from there; what writes them must be done. */
#define FA_MAX_DEVICES 64
FA_API fa_status fa_run_on_devices(const fa_plan *plan, const fa_device *devices, int32_t num_devices,
                                   const fa_tensors *tensors, fa_measurements *measurements, fa_error *error);

/* ---------------------------------------------------------------------------------------------------
 * Caches: keys and values that grow from step to step, on pages of a device's memory
 * ------------------------------------------------------------------------------------------------- */

/*
 * A cache is num_pages pages of page_size rows, each row a k and a v [num_kv_heads, head_dim]. A sequence is
 * rows on pages of one cache. An append writes new rows behind its last, where they stay. A fork begins with
 * the rows of another sequence, and shares their pages until one of both appends to the last of them, which is
 * copied then. A view is sequences as a forward reads them, by k, v, key_lengths and page_table: what happens
 * to the sequences changes nothing in a view.
 *
 * All of these may be called by any number of threads at once, on the same sequences too: each call happens at
 * one time, wholly. Appends to one sequence wait for each other. A sequence is not used any more once it is
 * given to fa_cache_free_sequence.
 */
typedef struct fa_cache fa_cache;
typedef struct fa_cache_sequence fa_cache_sequence;

typedef struct fa_cache_layout {
  fa_dtype dtype; /* f32, bf16, f16 or f64 */
  int64_t num_pages, page_size, num_kv_heads, head_dim;
} fa_cache_layout;

/* Takes 2 * num_pages * page_size * num_kv_heads * head_dim elements of the device's memory. They are given
 * back after fa_cache_free, once the last sequence and the last view are gone, too. */
FA_API fa_status fa_cache_new(fa_device device, const fa_cache_layout *layout, fa_cache **cache,
                              fa_error *error);
FA_API void fa_cache_free(fa_cache *cache);
FA_API fa_device fa_cache_device(const fa_cache *cache);
FA_API fa_cache_layout fa_cache_get_layout(const fa_cache *cache);

/* Pages that no sequence has and no view reads. */
FA_API int64_t fa_cache_num_free_pages(fa_cache *cache);

/* A sequence without rows; and one with the rows of another. */
FA_API fa_status fa_cache_add_sequence(fa_cache *cache, fa_cache_sequence **sequence, fa_error *error);
FA_API fa_status fa_cache_fork(const fa_cache_sequence *sequence, fa_cache_sequence **fork, fa_error *error);

/* Gives the sequence's pages back: false where that was done before. Whatever is done with it later fails, but
 * for the last, which gives back what is left of it, too. Neither waits for anything but other threads'
 * numbers. */
FA_API bool fa_cache_release(fa_cache_sequence *sequence);
FA_API void fa_cache_free_sequence(fa_cache_sequence *sequence);

FA_API fa_cache *fa_cache_of(const fa_cache_sequence *sequence);

/* How many rows it has, -1 where it was released. */
FA_API int64_t fa_cache_length(const fa_cache_sequence *sequence);

/* Appends num_rows rows to each of count different sequences of one cache, from k and v [count, num_rows,
 * num_kv_heads, head_dim], contiguous, of the cache's dtype, in memory of the host or of the device; they are
 * there on return. FA_STATUS_OUT_OF_MEMORY where there are not pages enough for all of them. Where it fails,
 * all sequences are as they were. */
FA_API fa_status fa_cache_append(fa_cache_sequence *const *sequences, int64_t count, const void *k,
                                 const void *v, int64_t num_rows, fa_error *error);

typedef struct fa_cache_view {
  fa_cache *cache;
  const void *k, *v;          /* [num_pages, page_size, num_kv_heads, head_dim], of the device's memory */
  int64_t batch, max_pages;   /* max_pages is at least 1 */
  const int32_t *key_lengths; /* [batch], */
  const int32_t *page_table;  /* [batch, max_pages], of the host's memory; -1 where there is no page */
} fa_cache_view;

/* Of at least one sequence; they may be the same. What is read of the view is read before it ends. */
FA_API fa_status fa_cache_view_begin(fa_cache_sequence *const *sequences, int64_t count, fa_cache_view *view,
                                     fa_error *error);
FA_API void fa_cache_view_end(fa_cache_view *view);

/* ---------------------------------------------------------------------------------------------------
 * Parts: attention over some of the keys, merged to attention over all of them; sinks for any attention
 * ------------------------------------------------------------------------------------------------- */

/*
 * Attention over some of the keys gives o and lse too, and those of several parts, p, merge to attention over
 * all of them, with sinks where there are any (Rabe and Staats 2021, arXiv 2112.05682; of sinks: SandAI's
 * MagiAttention, "FFA with Attention Sink"):
 *
 *     lse[i]     = log(sum_p exp(lse_p[i]) + sum_t exp(sink[t,h]))
 *     w_p[i]     = exp(lse_p[i] - lse[i])
 *     o[i]       = sum_p w_p[i] * o_p[i]
 *
 * and backward, given dout = d(loss)/d(o) and dlse = d(loss)/d(lse):
 *
 *     delta[i]   = dot(o[i], dout[i]) - dlse[i]
 *     do_p[i]    = w_p[i] * dout[i]
 *     dlse_p[i]  = w_p[i] * (dot(o_p[i], dout[i]) - delta[i])
 *     dsink[t,h] = -sum_{b,i} exp(sink[t,h] - lse[i]) * delta[i]
 *
 * A sink of its own for each row, [batch, seqlen_q, num_sinks, num_heads], has its gradient without the sum.
 * One part and sinks are the correction of that attention's o and lse by the sinks; no part, o, lse and dout of
 * an attention with sinks give dsink. A sink counts once for a row: at the merge, or in one of the parts.
 *
 * A part whose lse is -inf has nothing for the row, and what its o holds there is not looked at. A row for
 * which no part has anything gets o = 0, lse = -inf (log(sum exp(sink)) with sinks) and zero gradients.
 * Everything else that is not finite spreads as IEEE arithmetic says.
 *
 * The backward of a part. With the *merged* lse and o (and so the merged delta) in the place of its own,
 * FA_PASS_BACKWARD of a part's q, k and v gives exactly what the part adds to dq, and the dk and dv of its
 * keys: p is a function of the scores and lse alone, and ds of p, v, dout and delta. Parts need not keep an lse
 * of their own for it, and a gradient through the merge, do_p and dlse_p, is needed for parts that compute
 * something else alone. The parts' problems are without sinks then; dsink is fa_merge_backward's.
 */
#define FA_MAX_PARTS 32 /* of one call; of more, merge some of them first, to an f32 o */

/* o and lse of a part, of what parts merge to, or the gradients by them. */
typedef struct fa_part {
  fa_tensor o;    /* [batch, seqlen_q, num_heads, head_dim], with its strides */
  void *lse;      /* [batch, num_heads, seqlen_q], contiguous: f32, f64 where o is f64 */
  fa_dtype dtype; /* of o: f32, bf16 or f16, in any mixture; f64, on the CPU, where all are */
} fa_part;

/* What is merged, and where the numbers are. fa_merge_init, then set what is there. */
typedef struct fa_merge {
  size_t struct_size;                           /* sizeof(fa_merge) */
  int64_t batch, seqlen_q, num_heads, head_dim; /* batch and seqlen_q may be 0 */
  int64_t num_sinks;                            /* 0: none */
  int32_t num_parts, sink_per_row;              /* sink_per_row 1: sink and dsink are of rank 4 */
  fa_part parts[FA_MAX_PARTS], merged;          /* merged may be one of the parts, whose numbers it replaces */
  const float *sink; /* [num_sinks, num_heads], or [batch, seqlen_q, num_sinks, num_heads] */
  /* The backward alone, of which merged is an input. Gradients that are NULL are not computed. */
  fa_part dmerged; /* dout and dlse; its lse may be NULL: 0 */
  fa_part dparts[FA_MAX_PARTS];
  float *dsink;
} fa_merge;

FA_API void fa_merge_init(fa_merge *merge);

/* Fills the sizes from the shape of an o, and of the sink, which may be NULL; and checks the shape of another
 * o, or lse (which is f64 where the first argument's merged.dtype is) against them. The name is for the error.
 */
FA_API fa_status fa_merge_set_shapes(fa_merge *merge, const fa_shape *o, const fa_shape *sink, fa_error *error);
FA_API fa_status fa_merge_check_o(const fa_merge *merge, const char *name, const fa_shape *o, fa_error *error);
FA_API fa_status fa_merge_check_lse(const fa_merge *merge, const char *name, const fa_shape *lse,
                                    fa_error *error);

/* An o, or a gradient by one, of the merge's sizes that lies contiguously at data. */
FA_API fa_tensor fa_merge_contiguous(const fa_merge *merge, void *data);

/* The workspace of the backward: 0 but where it sums dsink over rows. */
FA_API size_t fa_merge_workspace_bytes(const fa_merge *merge);

/* Both run at once on the CPU, by as many threads as execution says, and enqueue on its stream on a GPU. Every
 * pointer must lie on the device. Results do not depend on the number of threads, and are the same each time.
 */
FA_API fa_status fa_merge_forward(const fa_merge *merge, fa_device device, const fa_execution *execution,
                                  fa_error *error);
FA_API fa_status fa_merge_backward(const fa_merge *merge, fa_device device, const fa_execution *execution,
                                   fa_error *error);

/* ---------------------------------------------------------------------------------------------------
 * Ranks: sums of gradients, and exchanges between GPUs
 * ------------------------------------------------------------------------------------------------- */

#define FA_MAX_SUMMANDS 128 /* of one call; more are added in several, with sums that are not rounded */

/* Of keys that several ranks see, each gives a part of dk and dv; of rows that see keys in several parts, each
 * part gives a dq. Their sum is made in f32 (f64 where dtype is), part by part, and rounded once. Each of these
 * has count elements, which lie contiguously on the device. */
typedef struct fa_sum {
  const void *parts[FA_MAX_SUMMANDS];
  int32_t num_parts;    /* may be 0 */
  int32_t is_unrounded; /* 1: total is f32 (f64 where dtype is), for a call that adds more */
  const void *before;   /* the unrounded total of other parts, to which these are added; or NULL */
  void *total;          /* may be before or one of the parts */
  int64_t count;
  fa_dtype dtype; /* of the parts, and the total: f32, bf16, f16, or f64 on the CPU */
} fa_sum;

/* Runs at once on the CPU, and enqueues on the stream of a GPU. */
FA_API fa_status fa_sum_parts(const fa_sum *sum, fa_device device, void *stream, fa_error *error);

/* A link connects one GPU each of num_ranks ranks, be they threads of a process or processes of several
 * machines, by NCCL: libnccl.so.2 is loaded when the first one is made. FA_STATUS_UNSUPPORTED where it is not
 * there, and on devices that have no such links.
 *
 * Rank 0 makes the id and gives it to the others by whatever way there is. */
#define FA_LINK_ID_BYTES 128
typedef struct fa_link fa_link;

FA_API fa_status fa_link_make_id(fa_device device, unsigned char id[FA_LINK_ID_BYTES], fa_error *error);

/* Returns when all ranks have called it, or with an error when they have not within so many milliseconds. */
FA_API fa_status fa_link_new(fa_device device, const unsigned char id[FA_LINK_ID_BYTES], int32_t num_ranks,
                             int32_t rank, int64_t timeout_ms, fa_link **link, fa_error *error);

/* Contiguous memory of the device that goes to a rank, or comes from it. */
typedef struct fa_transfer {
  void *memory;
  size_t bytes;
  int32_t rank;
  bool is_received;
} fa_transfer;

/* Begins transfers, which run beside other work of the device; what they read must be there. The n-th one to a
 * rank meets the n-th one that this rank receives from here, and both must be as long. The exchange is for
 * fa_link_await, once; until then the memory belongs to it. */
typedef struct fa_exchange fa_exchange;
FA_API fa_status fa_link_begin(fa_link *link, const fa_transfer *transfers, int32_t num_transfers,
                               fa_exchange **exchange, fa_error *error);

/* Waits for the exchange's end. After an error the link is good for nothing but being freed. */
FA_API fa_status fa_link_await(fa_link *link, fa_exchange *exchange, fa_error *error);

/* Ends all exchanges, whose ranks may be gone, and returns when none uses its memory any longer: calls under
 * way in other threads return with an error, as later ones do. */
FA_API void fa_link_abort(fa_link *link);

/* Aborts and frees the link, which nobody uses any longer. */
FA_API void fa_link_free(fa_link *link);

/* ---------------------------------------------------------------------------------------------------
 * XLA: the passes as custom calls
 * ------------------------------------------------------------------------------------------------- */

/*
 * Calls of XLA's typed FFI (stablehlo.custom_call with api_version 4), on the platforms "Host" and "CUDA":
 *
 *     flash_attention_forward     q, k, v, ...                  -> o, lse, [workspace]
 *     flash_attention_backward    dout, q, k, v, o, lse, ...    -> dq, dk, dv, ..., [workspace]
 *
 * Operands come in any order, which the attribute operands says, a string of their names: "q,k,v,sink". Those
 * of fa_tensors that the pass reads must be there, but for those that may be left out, and so must results that
 * go with them (dsink with sink); results come in the order of fa_tensor_id. Shapes and types are those of
 * fa_tensors, in row-major layout. A compiler that cannot tell XLA which layout a call wants (EXLA's) gives and
 * takes them flat, of rank 1, which is the one rank that leaves XLA no choice: results are taken flat as they
 * are, and an operand of another rank than its own comes with an attribute of its name that says its shape:
 * q = array<i64: 2, 128, 8, 64>.
 *
 * Every result has memory of its own: one that XLA lays over an operand (output_operand_aliases) is refused, as
 * operands are read until the call ends.
 *
 * workspace is a result that nobody reads, u8[n], where n is at least workspace_bytes of the plan
 * (fa_plan_init) that the device makes of the problem. On CUDA it may be left out only where that is 0: memory
 * that the call took itself would be gone when a command buffer that recorded the call is replayed. On the host
 * it may be left out, and is not used.
 *
 * The other attributes are the options of fa_options() by name, all of them optional: numbers as f64, f32, i64,
 * i32 or i1 (a length of INT64_MAX or of infinity: FA_UNBOUNDED), choices by name or by index. There are no
 * others.
 *
 * Parts, n of them (fa_merge_forward, fa_merge_backward):
 *
 *     flash_attention_merge             o, lse of each part, [sink]                     -> o, lse
 *     flash_attention_merge_backward    dout, dlse, o, lse, o, lse of each part, [sink] -> the gradients by the
 * parts' o and lse, [dsink], [workspace]
 *
 * Operands come in this order; the number of them tells how many parts there are, of a backward perhaps none,
 * and whether there is a sink. Each o has a type of its own. Attributes are the shapes of every o and of the
 * sink where tensors come flat, o = array<i64: 2, 128, 8, 64> and sink, and no others. Results may be flat
 * likewise, and those of a merge may lie where an o and an lse of the parts do, whose numbers they replace. The
 * workspace is wanted on CUDA where dsink is summed over rows: u8[n] of fa_merge_workspace_bytes.
 *
 * On CUDA a call enqueues on XLA's stream and does not wait: it is compatible with command buffers. Whatever is
 * wrong with a call is an error of XLA whose text names the argument: "k: expected head_dim 64 as in q, got
 * 48".
 */

/* Registers the four calls on both platforms with the XLA runtime whose XLA_FFI_GetApi() returned api: once a
 * runtime, before it compiles the first of them. FA_STATUS_UNSUPPORTED where the library was built without
 * XLA's header, or where the runtime does not take them; the error says why. */
FA_API fa_status fa_xla_register(const void *api, fa_error *error);

/* The handler itself, an XLA_FFI_Handler, for runtimes that have their own way to register one (jax.ffi). NULL
 * where there is none of that name and platform, or where the library was built without XLA's header. */
FA_API void *fa_xla_handler(const char *target, const char *platform);

#ifdef __cplusplus
}
#endif

#endif
