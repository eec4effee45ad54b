/* The core: what is refused and in which words, the option table, shapes, windows, plans and their runs. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../c_src/core/arena.h"
#include "../../c_src/core/integers.h"
#include "../../c_src/core/problem.h"
#include "../../c_src/core/tensors.h"
#include "check.h"
#include "harness.h"

static const fa_device reference = {FA_DEVICE_REFERENCE, 0};

/* f32 b2 sq5 sk7 h4 kv2 d8 */
static fa_problem valid_problem(void) {
  fa_problem p;
  fa_problem_init(&p);
  p.batch = 2, p.seqlen_q = 5, p.seqlen_k = 7, p.num_heads = 4, p.num_kv_heads = 2, p.head_dim = 8;
  return p;
}

/* ---- names ------------------------------------------------------------------------------------------ */

/* Whatever of it is missing. */
static void check_failure(const char *argument, const char *expected, const char *got, const char *message) {
  fa_error error;
  CHECK(fa_fail(&error, FA_STATUS_UNSUPPORTED, argument, expected, got) == FA_STATUS_UNSUPPORTED, "its status");
  CHECK_TEXT(error.message, message);
}

static void test_failures(void) {
  check_failure("k", "head_dim 64", "48", "k: expected head_dim 64, got 48");
  check_failure("k", "head_dim 64", NULL, "k: expected head_dim 64");
  check_failure("k", "", "48", "k: got 48");
  check_failure("", "head_dim 64", "48", "expected head_dim 64, got 48");
  check_failure("k", NULL, NULL, "k");
  check_failure(NULL, NULL, NULL, "");
}

static void test_names(void) {
  CHECK_TEXT(fa_status_name(FA_STATUS_OK), "ok");
  CHECK_TEXT(fa_status_name(FA_STATUS_INVALID_ARGUMENT), "invalid_argument");
  CHECK_TEXT(fa_status_name(FA_STATUS_UNSUPPORTED), "unsupported");
  CHECK_TEXT(fa_status_name(FA_STATUS_NO_DEVICE), "no_device");
  CHECK_TEXT(fa_status_name(FA_STATUS_OUT_OF_MEMORY), "out_of_memory");
  CHECK_TEXT(fa_status_name(FA_STATUS_DEVICE_ERROR), "device_error");
  CHECK_TEXT(fa_status_name((fa_status)99), "unknown");

  static const char *const dtypes[FA_NUM_DTYPES] = {"f32", "f64", "bf16", "f16", "s32", "u32", "u8"};
  static const size_t bytes[FA_NUM_DTYPES] = {4, 8, 2, 2, 4, 4, 1};
  for (int i = 0; i < FA_NUM_DTYPES; i++) {
    CHECK_TEXT(fa_dtype_name((fa_dtype)i), dtypes[i]);
    CHECK(fa_dtype_bytes((fa_dtype)i) == bytes[i], "bytes of %s", dtypes[i]);
  }
  CHECK_TEXT(fa_dtype_name((fa_dtype)-1), "unknown");
  CHECK(fa_dtype_bytes(FA_NUM_DTYPES) == 0, "bytes of an unknown type");

  static const char *const kinds[FA_NUM_DEVICE_KINDS] = {"cpu", "cuda", "reference"};
  for (int i = 0; i < FA_NUM_DEVICE_KINDS; i++) CHECK_TEXT(fa_device_kind_name((fa_device_kind)i), kinds[i]);
  CHECK(!fa_has_own_memory(FA_DEVICE_CPU) && !fa_has_own_memory(FA_NUM_DEVICE_KINDS), "own memory");
  CHECK_TEXT(fa_device_kind_name(FA_NUM_DEVICE_KINDS), "unknown");
  static const char *const passes[FA_NUM_PASSES] = {"forward", "backward", "tangent", "bound"};
  for (int i = 0; i < FA_NUM_PASSES; i++) CHECK_TEXT(fa_pass_name((fa_pass)i), passes[i]);
  static const char *const tensors[FA_NUM_TENSORS] = {"q",
                                                      "k",
                                                      "v",
                                                      "sink",
                                                      "row_sinks",
                                                      "bands",
                                                      "alibi_slopes",
                                                      "bias",
                                                      "dropout_seed",
                                                      "key_lengths",
                                                      "page_table",
                                                      "o",
                                                      "lse",
                                                      "dout",
                                                      "dlse",
                                                      "dq",
                                                      "dk",
                                                      "dv",
                                                      "dsink",
                                                      "drow_sinks",
                                                      "dalibi_slopes",
                                                      "dbias",
                                                      "tangent_q",
                                                      "tangent_k",
                                                      "tangent_v",
                                                      "tangent_sink",
                                                      "tangent_row_sinks",
                                                      "tangent_alibi_slopes",
                                                      "tangent_bias",
                                                      "o_tangent",
                                                      "lse_tangent"};
  for (int i = 0; i < FA_NUM_TENSORS; i++) CHECK_TEXT(fa_tensor_name((fa_tensor_id)i), tensors[i]);
}

/* ---- validation ------------------------------------------------------------------------------------- */

static void check_invalid(const fa_problem *p, const char *argument, const char *expected, const char *got) {
  fa_error error;
  char message[384];
  snprintf(message, sizeof message, "%s: expected %s, got %s", argument, expected, got);
  CHECK(fa_problem_validate(p, &error) == FA_STATUS_INVALID_ARGUMENT, "%s passes", message);
  CHECK(error.status == FA_STATUS_INVALID_ARGUMENT, "status of: %s", message);
  CHECK_TEXT(error.argument, argument);
  CHECK_TEXT(error.expected, expected);
  CHECK_TEXT(error.got, got);
  CHECK_TEXT(error.message, message);
  CHECK(fa_problem_validate(p, NULL) == FA_STATUS_INVALID_ARGUMENT, "without an error: %s", message);
}

/* A valid problem in which one field is not. */
#define CHECK_FIELD(field, value, argument, expected, got) \
  do {                                                     \
    fa_problem p_ = valid_problem();                       \
    p_.field = value;                                      \
    check_invalid(&p_, argument, expected, got);           \
  } while (0)

static void test_validation(void) {
  fa_error error;
  memset(&error, 0xff, sizeof error);
  fa_problem p = valid_problem();
  CHECK(fa_problem_validate(&p, &error) == FA_STATUS_OK, "a valid problem: %s", error.message);
  CHECK(error.status == FA_STATUS_OK && !*error.message, "success leaves an error behind");

  char expected[96];
  snprintf(expected, sizeof expected, "struct_size %zu (fa_problem_init sets it)", sizeof(fa_problem));
  CHECK_FIELD(struct_size, 4, "problem", expected, "4");
  CHECK_FIELD(dtype, (fa_dtype)4, "dtype", "f32, f64, bf16 or f16", "4");
  CHECK_FIELD(batch, -1, "batch", "at least 0", "-1");
  CHECK_FIELD(seqlen_q, -2, "seqlen_q", "at least 0", "-2");
  CHECK_FIELD(seqlen_k, INT64_MIN, "seqlen_k", "at least 0", "-9223372036854775808");
  CHECK_FIELD(num_heads, 0, "num_heads", "at least 1", "0");
  CHECK_FIELD(num_kv_heads, 0, "num_kv_heads", "at least 1", "0");
  CHECK_FIELD(head_dim, 0, "head_dim", "at least 1", "0");
  CHECK_FIELD(num_sinks, -1, "num_sinks", "at least 0", "-1");
  CHECK_FIELD(num_kv_heads, 3, "num_kv_heads", "a divisor of num_heads 4", "3");
  CHECK_FIELD(num_kv_heads, 8, "num_kv_heads", "a divisor of num_heads 4", "8");
  CHECK_FIELD(scale, NAN, "scale", "a number from -1e+30 to 1e+30", "nan");
  CHECK_FIELD(scale, -INFINITY, "scale", "a number from -1e+30 to 1e+30", "-inf");
  CHECK_FIELD(softcap, -1, "softcap", "a number from 0 to 1e+30", "-1");
  CHECK_FIELD(softcap, NAN, "softcap", "a number from 0 to 1e+30", "nan");
  CHECK_FIELD(window_left, -1, "window_left", "a whole number of at least 0, or infinity", "-1");
  CHECK_FIELD(window_right, -7, "window_right", "a whole number of at least 0, or infinity", "-7");
  CHECK_FIELD(precision, 3, "precision", "a number from 0 to 2", "3");
  CHECK_FIELD(deterministic, -1, "deterministic", "a number from 0 to 1", "-1");
}

static void check_overflow(fa_problem p, const char *what) {
  fa_error error;
  CHECK(fa_problem_validate(&p, &error) == FA_STATUS_INVALID_ARGUMENT, "%s does not overflow", what);
  CHECK_TEXT(error.message, "problem: the product of the sizes of a tensor overflows");
}

static void test_overflow(void) {
  const int64_t huge = INT64_C(1) << 62;
  fa_problem p = valid_problem();
  p.seqlen_q = huge;
  check_overflow(p, "seqlen_q");
  p = valid_problem();
  p.seqlen_k = INT64_MAX;
  check_overflow(p, "seqlen_k");
  p = valid_problem();
  p.batch = INT64_C(1) << 31, p.seqlen_q = INT64_C(1) << 31, p.seqlen_k = 0;
  check_overflow(p, "batch * seqlen_q");
  p = valid_problem();
  p.num_sinks = huge;
  check_overflow(p, "num_sinks");
  /* More than 2^31 elements are an ordinary case. An axis of 0 does not forgive the others. */
  fa_error error;
  p = valid_problem();
  p.batch = 1024, p.seqlen_q = 1 << 20, p.seqlen_k = 1 << 20;
  CHECK(fa_problem_validate(&p, &error) == FA_STATUS_OK, "2^33 rows: %s", error.message);
  CHECK(fa_tensor_shape(&p, FA_TENSOR_Q).size_bytes == (INT64_C(1) << 30) * 4 * 8 * 4, "size of a large q");
  p = valid_problem();
  p.batch = 0, p.seqlen_q = huge, p.seqlen_k = huge;
  check_overflow(p, "no batch");
  p = valid_problem();
  p.batch = 0, p.seqlen_q = p.seqlen_k = 1 << 30;
  CHECK(fa_problem_validate(&p, &error) == FA_STATUS_OK, "no batch: %s", error.message);
}

/* ---- options ---------------------------------------------------------------------------------------- */

static void test_option_table(void) {
  static const char *const names[] = {
      "scale",         "window_left",   "window_right",          "softcap",  "dropout", "precision",
      "deterministic", "constant_bias", "constant_alibi_slopes", "inference"};
  const size_t num_names = sizeof names / sizeof *names;
  size_t num_options;
  const fa_option *options = fa_options(&num_options);
  CHECK(num_options == num_names, "%zu options", num_options);
  for (size_t i = 0; i < num_options && i < num_names; i++) {
    CHECK_TEXT(options[i].name, names[i]);
    CHECK(fa_option_find(names[i]) == &options[i], "%s is not found", names[i]);
    CHECK(isfinite(options[i].minimum) && isfinite(options[i].maximum), "%s: bounds", names[i]);
    CHECK(options[i].doc && strlen(options[i].doc) > 20, "%s: no doc", names[i]);
    CHECK((options[i].kind == FA_OPTION_CHOICE) == (options[i].choices != NULL), "%s: choices", names[i]);
  }
  CHECK(fa_option_find("causal") == NULL, "there is no option causal");
  fa_problem p;
  fa_problem_init(&p);
  CHECK(p.scale == 0 && p.softcap == 0 && p.precision == 0 && p.deterministic == 0, "defaults");
  CHECK(p.window_left == FA_UNBOUNDED && p.window_right == FA_UNBOUNDED, "default windows");
}

static void check_number(const char *name, double value, const char *message) {
  fa_problem p = valid_problem(), before = p;
  fa_error error;
  fa_status status = fa_option_set_number(&p, fa_option_find(name), value, &error);
  CHECK(status == FA_STATUS_INVALID_ARGUMENT, "%s = %g passes", name, value);
  CHECK_TEXT(error.message, message);
  CHECK(memcmp(&p, &before, sizeof p) == 0, "%s = %g changes the problem", name, value);
}

static void test_set_options(void) {
  fa_problem p = valid_problem();
  fa_error error;
  fa_option_set_number(&p, fa_option_find("scale"), -0.25, &error);
  CHECK(p.scale == -0.25, "scale is %g", p.scale);
  fa_option_set_number(&p, fa_option_find("window_left"), 12, &error);
  CHECK(p.window_left == 12, "window_left is %lld", (long long)p.window_left);
  fa_option_set_number(&p, fa_option_find("window_left"), INFINITY, &error);
  CHECK(p.window_left == FA_UNBOUNDED, "window_left is %lld", (long long)p.window_left);
  fa_option_set_choice(&p, fa_option_find("precision"), "default", &error);
  CHECK(p.precision == FA_PRECISION_DEFAULT, "precision is %d", p.precision);
  fa_option_set_choice(&p, fa_option_find("deterministic"), "true", &error);
  CHECK(p.deterministic == 1, "deterministic is %d", p.deterministic);

  check_number("window_left", 1.5, "window_left: expected a whole number of at least 0, or infinity, got 1.5");
  check_number("window_right", NAN,
               "window_right: expected a whole number of at least 0, or infinity, got nan");
  check_number("window_right", -INFINITY,
               "window_right: expected a whole number of at least 0, or infinity, got -inf");
  check_number("window_left", 0x1p63,
               "window_left: expected a whole number of at least 0, or infinity, got 9.22337e+18");
  check_number("scale", INFINITY, "scale: expected a number from -1e+30 to 1e+30, got inf");
  check_number("softcap", -0.5, "softcap: expected a number from 0 to 1e+30, got -0.5");
  check_number("precision", 0.5, "precision: expected a number from 0 to 2, got 0.5");

  CHECK(fa_option_set_choice(&p, fa_option_find("precision"), "fast", &error), "precision = fast passes");
  CHECK_TEXT(error.message, "precision: expected one of highest, high, default, got fast");
  CHECK(fa_option_set_choice(&p, fa_option_find("scale"), "large", &error), "scale = large passes");
  CHECK_TEXT(error.message, "scale: expected a number from -1e+30 to 1e+30, got large");
}

static void test_get_options(void) {
  fa_problem p = valid_problem(), copy = valid_problem();
  p.scale = -0.5, p.window_left = 6, p.softcap = 30, p.precision = 1, p.deterministic = 1;
  size_t num_options;
  const fa_option *options = fa_options(&num_options);
  for (size_t i = 0; i < num_options; i++)
    fa_option_set_number(&copy, &options[i], fa_option_get_number(&p, &options[i]), NULL);
  CHECK(memcmp(&p, &copy, sizeof p) == 0, "options that are read and set are not the same");
  CHECK(fa_option_get_number(&p, fa_option_find("window_right")) == INFINITY, "an unbounded length");
}

static void test_format(void) {
  char text[256];
  fa_problem p = valid_problem();
  fa_problem_format(&p, text, sizeof text);
  CHECK_TEXT(text, "f32 b2 sq5 sk7 h4 kv2 d8");
  p.dtype = FA_DTYPE_BF16, p.num_sinks = 3, p.scale = -0.5, p.window_left = 6, p.window_right = 0;
  p.softcap = 30, p.precision = 1, p.deterministic = 1;
  const char *all =
      "bf16 b2 sq5 sk7 h4 kv2 d8 sinks3 scale=-0.5 window_left=6 window_right=0 softcap=30 precision=high "
      "deterministic=true";
  int length = fa_problem_format(&p, text, sizeof text);
  CHECK_TEXT(text, all);
  CHECK(length == (int)strlen(all), "length %d", length);
  CHECK(fa_problem_format(&p, text, 8) == length && strcmp(text, "bf16 b2") == 0, "cut to \"%s\"", text);
  p.origin = (fa_origin){1, 4, 128};
  fa_problem_format(&p, text, sizeof text);
  CHECK(strstr(text, " origin1,4,128") != NULL, "%s", text);
}

/* ---- shapes ----------------------------------------------------------------------------------------- */

static fa_shape shape_of(fa_dtype dtype, int32_t rank, const int64_t *dims) {
  fa_shape shape = {.dtype = dtype, .rank = rank, .size_bytes = -1};
  memcpy(shape.dims, dims, (size_t)rank * sizeof *dims);
  return shape;
}

#define SHAPE(dtype, rank, ...) shape_of(dtype, rank, (const int64_t[]){__VA_ARGS__})

/* Shapes of a valid backward with sinks, one of which a test replaces. */
typedef struct shapes {
  fa_shape all[FA_NUM_TENSORS];
  const fa_shape *given[FA_NUM_TENSORS];
} shapes;

static void valid_shapes(shapes *s, fa_pass pass) {
  fa_problem p = valid_problem();
  p.num_sinks = 3;
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    s->all[id] = fa_tensor_shape(&p, id);
    s->given[id] = fa_tensor_role_in(&p, pass, id) == FA_ROLE_INPUT ? &s->all[id] : NULL;
  }
}

static void check_shape(fa_pass pass, fa_tensor_id id, const fa_shape *shape, const char *message) {
  shapes s;
  fa_problem p;
  fa_error error;
  fa_problem_init(&p);
  valid_shapes(&s, pass);
  s.given[id] = shape;
  CHECK(fa_problem_set_shapes(&p, pass, s.given, &error) == FA_STATUS_INVALID_ARGUMENT, "passes: %s", message);
  CHECK_TEXT(error.message, message);
  CHECK_TEXT(error.argument, fa_tensor_name(id));
}

static void test_set_shapes(void) {
  shapes s;
  fa_problem p;
  fa_error error;
  for (fa_pass pass = 0; pass < FA_NUM_PASSES; pass++) {
    fa_problem_init(&p);
    p.softcap = 2;
    valid_shapes(&s, pass);
    fa_status status = fa_problem_set_shapes(&p, pass, s.given, &error);
    CHECK(status == FA_STATUS_OK, "%s: %s", fa_pass_name(pass), error.message);
    char text[256];
    fa_problem_format(&p, text, sizeof text);
    CHECK_TEXT(text, "f32 b2 sq5 sk7 h4 kv2 d8 sinks3 softcap=2");
  }
  valid_shapes(&s, FA_PASS_TANGENT);
  s.given[FA_TENSOR_SINK] = NULL;
  CHECK(fa_problem_set_shapes(&p, FA_PASS_TANGENT, s.given, &error), "a direction of no sink passes");
  CHECK_TEXT(error.message, "sink: expected a tensor of shape [num_sinks, num_heads], got none");
  s.given[FA_TENSOR_TANGENT_SINK] = NULL;
  CHECK(fa_problem_set_shapes(&p, FA_PASS_TANGENT, s.given, &error) == FA_STATUS_OK && p.num_sinks == 0,
        "without sinks: %s", error.message);

  const fa_pass forward = FA_PASS_FORWARD, backward = FA_PASS_BACKWARD;
  fa_shape shape;
#define CHECK_SHAPE(pass, id, message, ...) (shape = SHAPE(__VA_ARGS__), check_shape(pass, id, &shape, message))
  CHECK_SHAPE(forward, FA_TENSOR_K, "k: expected head_dim 8 as in q, got 48", FA_DTYPE_F32, 4, 2, 7, 2, 48);
  CHECK_SHAPE(forward, FA_TENSOR_K, "k: expected batch 2 as in q, got 3", FA_DTYPE_F32, 4, 3, 7, 2, 8);
  CHECK_SHAPE(forward, FA_TENSOR_V, "v: expected seqlen_k 7 as in k, got 9", FA_DTYPE_F32, 4, 2, 9, 2, 8);
  CHECK_SHAPE(forward, FA_TENSOR_V, "v: expected num_kv_heads 2 as in k, got 4", FA_DTYPE_F32, 4, 2, 7, 4, 8);
  CHECK_SHAPE(forward, FA_TENSOR_V, "v: expected type f32 as in q, got f16", FA_DTYPE_F16, 4, 2, 7, 2, 8);
  CHECK_SHAPE(forward, FA_TENSOR_Q, "q: expected type f32, f64, bf16 or f16, got s32", FA_DTYPE_S32, 4, 2, 5, 4,
              8);
  CHECK_SHAPE(forward, FA_TENSOR_K, "k: expected type f32 as in q, got u8", FA_DTYPE_U8, 4, 2, 7, 2, 8);
  CHECK_SHAPE(forward, FA_TENSOR_SINK, "sink: expected num_heads 4 as in q, got 5", FA_DTYPE_F32, 2, 3, 5);
  CHECK_SHAPE(forward, FA_TENSOR_SINK, "sink: expected type f32, got f64", FA_DTYPE_F64, 2, 3, 4);
  CHECK_SHAPE(forward, FA_TENSOR_SINK, "sink: expected rank 2, [num_sinks, num_heads], got rank 1",
              FA_DTYPE_F32, 1, 4);
  CHECK_SHAPE(forward, FA_TENSOR_Q, "q: expected rank 4, [batch, seqlen_q, num_heads, head_dim], got rank 3",
              FA_DTYPE_F32, 3, 2, 5, 4);
  CHECK_SHAPE(forward, FA_TENSOR_DOUT, "dout: expected none, as it is no input of the forward, got a tensor",
              FA_DTYPE_F32, 4, 2, 5, 4, 8);
  CHECK_SHAPE(backward, FA_TENSOR_O, "o: expected seqlen_q 5 as in q, got 6", FA_DTYPE_F32, 4, 2, 6, 4, 8);
  CHECK_SHAPE(backward, FA_TENSOR_LSE, "lse: expected num_heads 4 as in q, got 2", FA_DTYPE_F32, 3, 2, 2, 5);
  CHECK_SHAPE(backward, FA_TENSOR_LSE, "lse: expected type f32 beside q of its type, got f64", FA_DTYPE_F64, 3,
              2, 4, 5);
  CHECK_SHAPE(backward, FA_TENSOR_DOUT, "dout: expected head_dim 8 as in q, got 7", FA_DTYPE_F32, 4, 2, 5, 4,
              7);
#undef CHECK_SHAPE
  check_shape(forward, FA_TENSOR_V, NULL,
              "v: expected a tensor of shape [batch, seqlen_k, num_kv_heads, head_dim], got none");
  check_shape(backward, FA_TENSOR_LSE, NULL,
              "lse: expected a tensor of shape [batch, num_heads, seqlen_q], got none");

  shape = SHAPE(FA_DTYPE_F32, 4, 2, 7, 2, 8);
  shape.size_bytes = 2 * 7 * 2 * 8 * 4 - 1;
  check_shape(forward, FA_TENSOR_K, &shape, "k: expected 896 bytes for its shape and type, got 895");

  /* What only the whole shows: heads that do not divide, sizes that overflow. */
  valid_shapes(&s, forward);
  s.all[FA_TENSOR_K].dims[2] = s.all[FA_TENSOR_V].dims[2] = 3;
  CHECK(fa_problem_set_shapes(&p, forward, s.given, &error) == FA_STATUS_INVALID_ARGUMENT, "3 heads of 4");
  CHECK_TEXT(error.message, "num_kv_heads: expected a divisor of num_heads 4, got 3");
  valid_shapes(&s, forward);
  s.all[FA_TENSOR_Q].dims[1] = INT64_MAX;
  CHECK(fa_problem_set_shapes(&p, forward, s.given, &error) == FA_STATUS_INVALID_ARGUMENT, "2^63 rows");
  CHECK_TEXT(error.message, "problem: the product of the sizes of a tensor overflows");
  valid_shapes(&s, backward);
  s.all[FA_TENSOR_Q].dims[1] = s.all[FA_TENSOR_O].dims[1] = s.all[FA_TENSOR_DOUT].dims[1] = INT64_MAX;
  s.all[FA_TENSOR_LSE].dims[2] = INT64_MAX;
  CHECK(fa_problem_set_shapes(&p, backward, s.given, &error) == FA_STATUS_INVALID_ARGUMENT, "2^63 rows");
  CHECK_TEXT(error.message, "problem: the product of the sizes of a tensor overflows");
}

static void test_tensors(void) {
  fa_problem p = valid_problem();
  p.num_sinks = 3, p.dtype = FA_DTYPE_F64;
  fa_tensors tensors;
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    CHECK(fa_tensor_at(&tensors, id) == (fa_tensor *)&tensors + id, "fa_tensor_at of %s", fa_tensor_name(id));
  CHECK(fa_tensor_at(&tensors, FA_TENSOR_DQ) == &tensors.dq, "dq");
  fa_tensor k = fa_tensor_contiguous(&p, FA_TENSOR_K, &p);
  CHECK(k.data == &p && k.stride_head == 8 && k.stride_row == 16 && k.stride_batch == 112, "strides of k");
  fa_shape lse = fa_tensor_shape(&p, FA_TENSOR_LSE), sink = fa_tensor_shape(&p, FA_TENSOR_SINK);
  CHECK(lse.dtype == FA_DTYPE_F64 && lse.rank == 3 && lse.dims[1] == 4 && lse.size_bytes == 2 * 4 * 5 * 8,
        "lse");
  CHECK(sink.dtype == FA_DTYPE_F32 && sink.rank == 2 && sink.size_bytes == 3 * 4 * 4, "sink");
  p.num_sinks = 0;
  CHECK(fa_tensor_role_in(&p, FA_PASS_BACKWARD, FA_TENSOR_DSINK) == FA_ROLE_NONE, "dsink without sinks");
  CHECK(fa_tensor_role_in(&p, FA_PASS_BACKWARD, FA_TENSOR_DQ) == FA_ROLE_OUTPUT, "dq");
  CHECK(fa_tensor_role_in(&p, FA_PASS_BACKWARD, FA_TENSOR_LSE) == FA_ROLE_INPUT, "lse of the backward");
  CHECK(fa_tensor_role_in(&p, FA_PASS_FORWARD, FA_TENSOR_DOUT) == FA_ROLE_NONE, "dout of the forward");
}

/* ---- the table ----------------------------------------------------------------------------------------- */

static void test_axes(void) {
  CHECK(fa_axis_of(FA_TENSOR_K, FA_AXIS_SEQLEN_K) == 1 && fa_axis_of(FA_TENSOR_K, FA_AXIS_SEQLEN_Q) == -1, "k");
  CHECK(fa_axis_of(FA_TENSOR_LSE, FA_AXIS_SEQLEN_Q) == 2 && fa_axis_of(FA_TENSOR_SINK, FA_AXIS_BATCH) == -1,
        "lse");
  fa_problem p = valid_problem();
  p.num_sinks = 3, p.num_row_sinks = 2, p.num_bands = 5,
  p.bands_batch = p.alibi_batch = p.bias_batch = p.dlse_batch = p.lengths_batch = p.batch;
  p.bias_heads = p.num_heads, p.bias_rows = p.seqlen_q, p.num_seed_words = 2;
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    const fa_shape shape = fa_tensor_shape(&p, id);
    const char *name = fa_tensor_name(id);
    for (int i = 0; i < shape.rank; i++) {
      const fa_axis axis = fa_axis_at(&p, id, i);
      CHECK(fa_axis_of(id, axis) == i && fa_axis_size(&p, axis) == shape.dims[i], "%s: axis %d", name, i);
      CHECK(fa_varies_along(&p, id, axis), "%s does not vary along %s", name, fa_axes[axis].name);
    }
    CHECK(fa_axis_at(&p, id, shape.rank) == FA_AXIS_NONE, "%s: an axis behind the last", name);
    CHECK(fa_is_strided(id) == (shape.dims[shape.rank - 1] == p.head_dim), "%s is strided", name);
  }
  CHECK(!fa_varies_along(&p, FA_TENSOR_DSINK, FA_AXIS_BATCH), "dsink is a sum over the batch");
}

static void test_partners(void) {
  fa_problem p = valid_problem();
  p.num_sinks = 3;
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    const int partners[] = {fa_tensor_gradient(id), fa_tensor_tangent(id)};
    const fa_shape shape = fa_tensor_shape(&p, id);
    for (int i = 0; i < 2; i++) {
      if (partners[i] < 0) continue;
      const fa_shape partner = fa_tensor_shape(&p, partners[i]);
      CHECK(memcmp(&shape, &partner, sizeof shape) == 0, "%s has not the shape of %s",
            fa_tensor_name(partners[i]), fa_tensor_name(id));
      CHECK(fa_tensor_only_if(partners[i]) == fa_tensor_only_if(id), "%s without %s",
            fa_tensor_name(partners[i]), fa_tensor_name(id));
    }
  }
  CHECK(fa_tensor_gradient(FA_TENSOR_Q) == FA_TENSOR_DQ && fa_tensor_gradient(FA_TENSOR_O) == FA_TENSOR_DOUT &&
            fa_tensor_gradient(FA_TENSOR_SINK) == FA_TENSOR_DSINK && fa_tensor_gradient(FA_TENSOR_LSE) == -1 &&
            fa_tensor_gradient(FA_TENSOR_DQ) == -1,
        "gradients");
  CHECK(fa_tensor_only_if(FA_TENSOR_SINK) == FA_AXIS_NUM_SINKS && !fa_tensor_only_if(FA_TENSOR_Q), "only_if");
}

/* A bias of any of its types, broadcast or not, and what derives from it. */
static void test_bias(void) {
  fa_problem p = valid_problem();
  fa_error error;
  p.bias_batch = 1, p.bias_heads = p.num_heads, p.bias_rows = 1, p.bias_dtype = FA_DTYPE_U8;
  CHECK(fa_problem_validate(&p, &error) == FA_STATUS_OK, "%s", error.message);
  CHECK(fa_tensor_role_in(&p, FA_PASS_FORWARD, FA_TENSOR_BIAS) == FA_ROLE_INPUT, "bias of u8");
  CHECK(fa_tensor_role_in(&p, FA_PASS_BACKWARD, FA_TENSOR_DBIAS) == FA_ROLE_NONE, "dbias of u8");
  CHECK(fa_tensor_role_in(&p, FA_PASS_TANGENT, FA_TENSOR_TANGENT_BIAS) == FA_ROLE_NONE, "tangent_bias of u8");
  p.bias_dtype = FA_DTYPE_F32;
  CHECK(fa_tensor_role_in(&p, FA_PASS_BACKWARD, FA_TENSOR_DBIAS) == FA_ROLE_OUTPUT, "dbias");
  p.constant_bias = 1;
  CHECK(fa_tensor_role_in(&p, FA_PASS_BACKWARD, FA_TENSOR_DBIAS) == FA_ROLE_NONE, "dbias of a constant");
  p.bias_dtype = FA_DTYPE_S32;
  check_invalid(&p, "bias", "type f32 or u8", "s32");
  p.bias_dtype = (fa_dtype)99;
  check_invalid(&p, "bias", "type f32 or u8", "unknown");
  p.bias_dtype = FA_DTYPE_F32, p.bias_rows = 0;
  check_invalid(&p, "bias", "1 or seqlen_q 5", "0");
  p.bias_rows = 3;
  check_invalid(&p, "bias_rows", "1 or seqlen_q 5", "3");
  fa_shape shape = SHAPE(FA_DTYPE_F32, 4, 1, 4, 4, 7);
  check_shape(FA_PASS_FORWARD, FA_TENSOR_BIAS, &shape, "bias: expected bias_rows 5 as in q, or 1, got 4");
  shape = SHAPE(FA_DTYPE_F16, 4, 1, 1, 5, 7);
  check_shape(FA_PASS_FORWARD, FA_TENSOR_BIAS, &shape, "bias: expected type f32 or u8, got f16");
}

/* A dlse goes with the backward alone, and may be one batch for all. */
static void test_dlse(void) {
  fa_problem p = valid_problem();
  CHECK(fa_tensor_role_in(&p, FA_PASS_BACKWARD, FA_TENSOR_DLSE) == FA_ROLE_NONE, "no dlse");
  p.dlse_batch = 1;
  CHECK(fa_tensor_role_in(&p, FA_PASS_BACKWARD, FA_TENSOR_DLSE) == FA_ROLE_INPUT, "dlse of the backward");
  CHECK(fa_tensor_role_in(&p, FA_PASS_BOUND, FA_TENSOR_DLSE) == FA_ROLE_INPUT, "dlse of the bound");
  CHECK(fa_tensor_role_in(&p, FA_PASS_FORWARD, FA_TENSOR_DLSE) == FA_ROLE_NONE, "dlse of the forward");
  CHECK(!fa_is_sum(&p, FA_TENSOR_DLSE) && !fa_varies_along(&p, FA_TENSOR_DLSE, FA_AXIS_BATCH), "dlse of all");
  fa_shape shape = SHAPE(FA_DTYPE_F32, 3, 2, 4, 6);
  check_shape(FA_PASS_BACKWARD, FA_TENSOR_DLSE, &shape, "dlse: expected seqlen_q 5 as in q, got 6");
  check_shape(FA_PASS_FORWARD, FA_TENSOR_DLSE, &shape,
              "dlse: expected none, as it is no input of the forward, got a tensor");
  shape = SHAPE(FA_DTYPE_F64, 3, 2, 4, 5);
  check_shape(FA_PASS_BACKWARD, FA_TENSOR_DLSE, &shape,
              "dlse: expected type f32 beside q of its type, got f64");
}

static void test_elements(void) {
  fa_problem p = valid_problem();
  p.num_sinks = 3, p.alibi_batch = p.batch;
  const fa_cell cell = {.batch = 1, .head = 2, .row = 4, .column = 6, .number = 1};
  CHECK(fa_element_of(&p, FA_TENSOR_SINK, &cell) == 1 * 4 + 2, "the element of sink");
  CHECK(fa_element_of(&p, FA_TENSOR_ALIBI_SLOPES, &cell) == 1 * 4 + 2, "the element of alibi_slopes");
  CHECK(fa_element_of(&p, FA_TENSOR_LSE, &cell) == (1 * 4 + 2) * 5 + 4, "the element of lse");
  p.alibi_batch = 1;
  CHECK(fa_element_of(&p, FA_TENSOR_ALIBI_SLOPES, &cell) == 2, "the element of slopes that broadcast");
  const fa_cell first = fa_cell_of(&p, FA_TENSOR_ALIBI_SLOPES, 2), stat = fa_cell_of(&p, FA_TENSOR_LSE, 34);
  CHECK(first.batch == 0 && first.head == 2, "the cell of slopes that broadcast");
  CHECK(stat.batch == 1 && stat.head == 2 && stat.row == 4 && stat.column == 0, "the cell of lse");
  p.constant_alibi_slopes = 1;
  CHECK(fa_tensor_role_in(&p, FA_PASS_BACKWARD, FA_TENSOR_DALIBI_SLOPES) == FA_ROLE_NONE,
        "dalibi_slopes of constants");
  p.constant_alibi_slopes = 0;
  CHECK(fa_is_sum(&p, FA_TENSOR_DSINK) && fa_is_sum(&p, FA_TENSOR_DALIBI_SLOPES) &&
            !fa_is_sum(&p, FA_TENSOR_DQ) && !fa_is_sum(&p, FA_TENSOR_LSE),
        "sums");
}

static void test_strides(void) {
  fa_problem p = valid_problem();
  fa_tensor q = fa_tensor_contiguous(&p, FA_TENSOR_Q, &p);
  CHECK(q.strides[0] == 160 && q.strides[1] == 32 && q.strides[2] == 8, "strides of q");
  CHECK(fa_is_contiguous(&p, FA_TENSOR_Q, &q) && fa_bytes_spanned(&p, FA_TENSOR_Q, &q) == 2 * 160 * 4, "q");
  q.stride_row = 40; /* 2 batches 160 apart, 5 rows 40 apart, 4 heads 8 apart, of 8 */
  CHECK(!fa_is_contiguous(&p, FA_TENSOR_Q, &q), "q with gaps is contiguous");
  CHECK(fa_bytes_spanned(&p, FA_TENSOR_Q, &q) == (160 + 4 * 40 + 3 * 8 + 8) * 4, "q with gaps");
  fa_tensor lse = {.data = &p, .strides = {12345, 12345, 12345}};
  const fa_tensor strides = fa_tensor_strides(&p, FA_TENSOR_LSE, &lse);
  CHECK(strides.data == &p && strides.strides[0] == 20 && strides.strides[1] == 5, "strides of lse");
  CHECK(fa_is_contiguous(&p, FA_TENSOR_LSE, &lse) && fa_bytes_spanned(&p, FA_TENSOR_LSE, &lse) == 2 * 20 * 4,
        "lse");
  p.batch = 0;
  CHECK(fa_bytes_spanned(&p, FA_TENSOR_Q, &q) == 0, "an empty q");
}

/* ---- sizes ---------------------------------------------------------------------------------------------- */

static void test_integers(void) {
  CHECK(fa_divide_up(7, 3) == 3 && fa_divide_up(6, 3) == 2 && fa_divide_up(0, 3) == 0, "divide_up");
  CHECK(fa_divide_up(INT64_MAX, 2) == INT64_C(1) << 62, "divide_up overflows");
  CHECK(fa_round_up(257, 256) == 512 && fa_round_up(256, 256) == 256, "round_up");
}

static void test_arena(void) {
  fa_arena sizes = {0};
  CHECK(!fa_take(&sizes, 3, 4) && !fa_take(&sizes, 0, 8) && sizes.used == FA_ARENA_ALIGNMENT, "%zu",
        sizes.used);
  char memory[3 * FA_ARENA_ALIGNMENT];
  fa_arena places = {.base = memory};
  CHECK(fa_take(&places, FA_ARENA_ALIGNMENT + 1, 1) == memory, "the first part");
  CHECK(fa_take(&places, 1, 8) == memory + 2 * FA_ARENA_ALIGNMENT, "the second part");
  static const struct {
    int64_t count;
    size_t element_bytes;
  } too_large[] = {{INT64_MAX, 8}, {1, SIZE_MAX}, {1, SIZE_MAX - 255}, {3, SIZE_MAX / 2}};
  for (size_t i = 0; i < sizeof too_large / sizeof *too_large; i++) {
    fa_arena arena = {.used = 512};
    fa_take(&arena, too_large[i].count, too_large[i].element_bytes);
    CHECK(arena.used == SIZE_MAX, "%zu: used %zu", i, arena.used);
    fa_take(&arena, 1, 1);
    CHECK(arena.used == SIZE_MAX, "%zu: used %zu after that", i, arena.used);
  }
}

static const fa_device computing[] = {{FA_DEVICE_CPU, 0}, {FA_DEVICE_REFERENCE, 0}};

/* {0, 4, 2, 10_000_000}: workspaces of such a head_dim would be gigabytes. */
static void test_nothing_to_compute(void) {
  for (int i = 0; i < 2; i++)
    for (fa_pass pass = FA_PASS_FORWARD; pass <= FA_PASS_BACKWARD; pass++) {
      fa_problem p = valid_problem();
      p.batch = 0, p.seqlen_q = p.seqlen_k = 4, p.num_heads = p.num_kv_heads = 2, p.head_dim = 10000000;
      fa_plan plan;
      fa_error error;
      CHECK(fa_plan_init(&plan, &p, pass, computing[i], &error) == FA_STATUS_OK, "%s", error.message);
      CHECK(plan.workspace_bytes == 0, "%zu bytes for nothing", plan.workspace_bytes);
      CHECK(fa_run(&plan, &(fa_tensors){0}, &(fa_execution){0}, &error) == FA_STATUS_OK, "%s", error.message);
      CHECK(fa_run_anywhere(&plan, &(fa_tensors){0}, NULL, NULL, &error) == FA_STATUS_OK, "%s", error.message);
    }
}

/* The largest problems that are valid: one axis after the other takes all that there may be. */
static void test_largest(void) {
  for (int i = 0; i < 2; i++)
    for (fa_pass pass = FA_PASS_FORWARD; pass <= FA_PASS_BACKWARD; pass++)
      for (fa_axis axis = FA_AXIS_BATCH; axis <= FA_AXIS_HEAD_DIM; axis++)
        for (int dtype = 0; dtype < FA_NUM_FLOATS; dtype++) {
          fa_problem p = {0};
          fa_problem_init(&p);
          p.dtype = dtype, p.batch = p.seqlen_q = p.seqlen_k = p.num_heads = p.num_kv_heads = p.head_dim = 1;
          const int64_t most = INT64_C(1) << 53;
          memcpy((char *)&p + fa_axes[axis].offset, &most, sizeof most);
          if (axis == FA_AXIS_NUM_KV_HEADS) p.num_heads = most;
          fa_plan plan;
          fa_error error;
          fa_status status = fa_plan_init(&plan, &p, pass, computing[i], &error);
          const size_t least = axis == FA_AXIS_HEAD_DIM ? (size_t)most : 0;
          CHECK(status == FA_STATUS_OK
                    ? plan.workspace_bytes >= least && plan.workspace_bytes <= PTRDIFF_MAX
                    : status == FA_STATUS_UNSUPPORTED &&
                          strcmp(error.message, "problem: no memory could hold its workspace") == 0,
                "%s of 2^53 in the %s: %s, %zu bytes", fa_axes[axis].name, fa_pass_name(pass), error.message,
                plan.workspace_bytes);
        }
  fa_problem p = valid_problem();
  p.batch = p.seqlen_q = p.seqlen_k = 16, p.num_heads = p.num_kv_heads = 8, p.head_dim = INT64_C(1) << 42;
  fa_plan plan;
  fa_error error;
  CHECK(fa_plan_init(&plan, &p, FA_PASS_FORWARD, computing[0], &error) == FA_STATUS_OK, "%s", error.message);
  CHECK(fa_run_anywhere(&plan, &(fa_tensors){0}, NULL, NULL, &error) != FA_STATUS_OK, "petabytes are found");
}

/* So many keys that 64 bits do not count the bytes of the parts that these are computed in, whatever the
 * instruction set makes of a part. */
static void test_overflowing_workspace(void) {
  for (int log = 19; log < 25; log++) {
    fa_problem p = valid_problem();
    p.batch = 1, p.seqlen_q = 16, p.seqlen_k = INT64_C(1) << 48, p.head_dim = 1;
    p.num_heads = INT64_C(1) << log, p.num_kv_heads = 1;
    fa_plan plan;
    fa_error error;
    CHECK(fa_plan_init(&plan, &p, FA_PASS_FORWARD, computing[0], &error) == FA_STATUS_UNSUPPORTED,
          "a plan of 2^48 keys has %zu bytes", plan.workspace_bytes);
    CHECK_TEXT(error.message, "problem: no memory could hold its workspace");
  }
}

/* ---- options that f32 cannot hold ----------------------------------------------------------------------- */

static double canonical_softcap(fa_dtype dtype, double scale, double softcap) {
  fa_problem p = valid_problem();
  p.dtype = dtype, p.scale = scale, p.softcap = softcap;
  fa_problem_canonicalise(&p);
  return p.softcap;
}

static void test_softcap(void) {
  CHECK(canonical_softcap(FA_DTYPE_F32, 1, 0) == 0 && canonical_softcap(FA_DTYPE_F32, 1, 30) == 30, "softcap");
  static const double scales[] = {0, 1, -1, 1e30, -1e30, 1e-30, 1e-300, 1e-38},
                      softcaps[] = {1e-300, 1e-45, 1e-38, 1e-20, 1, 1e20, 1e30};
  for (size_t i = 0; i < sizeof scales / sizeof *scales; i++)
    for (size_t j = 0; j < sizeof softcaps / sizeof *softcaps; j++) {
      const double softcap = canonical_softcap(FA_DTYPE_BF16, scales[i], softcaps[j]);
      const float factor = (float)((scales[i] == 0 ? 1 / sqrt(8.0) : scales[i]) / softcap);
      CHECK(softcap == 0 || ((float)softcap > 0 && isnormal(factor)), "scale %g, softcap %g: %g", scales[i],
            softcaps[j], softcap);
      CHECK(canonical_softcap(FA_DTYPE_F64, scales[i], softcaps[j]) == softcaps[j], "f64 holds %g",
            softcaps[j]);
    }
  CHECK(canonical_softcap(FA_DTYPE_F32, 1, 1e30) == 1e30, "a large softcap is none");
  CHECK(canonical_softcap(FA_DTYPE_F32, 1e-20, 1e30) == 0, "a softcap that bounds nothing is kept");
}

/* ---- windows ---------------------------------------------------------------------------------------- */

/* The header's rule, in arithmetic that cannot overflow. */
static bool visible(const fa_problem *p, int64_t i, int64_t j) {
  const __int128 diagonal = (__int128)i + p->seqlen_k - p->seqlen_q;
  const bool left = p->window_left == FA_UNBOUNDED || diagonal - p->window_left <= j;
  return left && (p->window_right == FA_UNBOUNDED || j <= diagonal + p->window_right);
}

/* Of all (row, column): whether the canonical ranges hold what the given problem shows, both ways. */
static long wrong_cells(const fa_problem *given, const fa_problem *canonical) {
  long wrong = 0;
  for (int64_t i = 0; i < given->seqlen_q; i++)
    for (int64_t j = 0; j < given->seqlen_k; j++) {
      const fa_band band = fa_problem_band(canonical);
      const fa_range columns = fa_band_columns(band, (fa_range){i, i + 1});
      const fa_range rows = fa_band_rows(band, (fa_range){j, j + 1});
      const bool expected = visible(given, i, j);
      wrong += (columns.begin <= j && j < columns.end) != expected;
      wrong += (rows.begin <= i && i < rows.end) != expected;
      wrong +=
          columns.begin < 0 || columns.end > given->seqlen_k || rows.begin < 0 || rows.end > given->seqlen_q;
    }
  return wrong;
}

static void test_windows(void) {
  static const int64_t windows[] = {0, 1, 2, 3, 4, 5, 6, 7, 100, INT64_C(1) << 62, FA_UNBOUNDED};
  const size_t num_windows = sizeof windows / sizeof *windows;
  for (int64_t seqlen_q = 1; seqlen_q <= 6; seqlen_q++)
    for (int64_t seqlen_k = 1; seqlen_k <= 6; seqlen_k++)
      for (size_t l = 0; l < num_windows; l++)
        for (size_t r = 0; r < num_windows; r++) {
          fa_problem p = valid_problem();
          fa_plan plan;
          p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k, p.window_left = windows[l], p.window_right = windows[r];
          fa_status status = fa_plan_init(&plan, &p, FA_PASS_FORWARD, reference, NULL);
          char text[128];
          fa_problem_format(&p, text, sizeof text);
          CHECK(status == FA_STATUS_OK && wrong_cells(&p, &plan.problem) == 0, "%s: wrong visibility", text);
        }
}

/* ---- plans and runs --------------------------------------------------------------------------------- */

static void check_plan(fa_problem p, fa_pass pass, fa_device device, fa_status status, const char *message) {
  fa_plan plan;
  fa_error error;
  CHECK(fa_plan_init(&plan, &p, pass, device, &error) == status, "not %s: %s", fa_status_name(status), message);
  CHECK_TEXT(error.message, message);
}

static void test_plans(void) {
  fa_problem p = valid_problem();
  fa_plan plan;
  fa_error error;
  CHECK(fa_plan_init(&plan, &p, FA_PASS_FORWARD, reference, &error) == FA_STATUS_OK, "%s", error.message);
  CHECK_TEXT(plan.kernel, "reference/f32");
  CHECK(fabs(plan.problem.scale - 0.35355339059327373) < 1e-15, "scale becomes %.17g", plan.problem.scale);
  CHECK(plan.num_threads == 1 && plan.workspace_bytes > 0, "the reference's plan");

  check_plan(p, (fa_pass)7, reference, FA_STATUS_INVALID_ARGUMENT, "pass: expected a pass of fa_pass, got 7");
  check_plan(p, FA_PASS_FORWARD, (fa_device){FA_DEVICE_REFERENCE, 1}, FA_STATUS_NO_DEVICE,
             "device: expected a reference device from 0 to 0, got 1");
  check_plan(p, FA_PASS_FORWARD, (fa_device){FA_DEVICE_CPU, -1}, FA_STATUS_NO_DEVICE,
             "device: expected a cpu device from 0 to 0, got -1");
  check_plan(p, FA_PASS_FORWARD, (fa_device){(fa_device_kind)9, 0}, FA_STATUS_NO_DEVICE,
             "device: unknown is not part of this build");
  p.head_dim = -3;
  check_plan(p, FA_PASS_FORWARD, reference, FA_STATUS_INVALID_ARGUMENT,
             "head_dim: expected at least 1, got -3");
}

#if defined(__x86_64__)

static void check_kernel(const char *disabled, fa_dtype dtype, const char *kernel) {
  fa_problem p = valid_problem();
  p.dtype = dtype;
  setenv("FLASH_ATTENTION_DISABLE", disabled, 1);
  for (fa_pass pass = FA_PASS_FORWARD; pass <= FA_PASS_BACKWARD; pass++) {
    fa_plan plan;
    fa_error error;
    CHECK(fa_plan_init(&plan, &p, pass, (fa_device){FA_DEVICE_CPU, 0}, &error) == FA_STATUS_OK, "%s",
          error.message);
    CHECK_TEXT(plan.kernel, kernel);
  }
}

/* The best instruction set that the processor has and nobody switched off. */
static void test_instruction_sets(void) {
  __builtin_cpu_init();
  char *before = set_environment("FLASH_ATTENTION_DISABLE", "");
  check_kernel("avx512,avx2", FA_DTYPE_BF16, "cpu/plain/f32");
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    check_kernel("avx512", FA_DTYPE_BF16, "cpu/avx2/f32");
  if (__builtin_cpu_supports("avx512bw")) { /* all of those that have it have the others */
    check_kernel("amx,avx512bf16", FA_DTYPE_BF16, "cpu/avx512/f32");
    check_kernel("", FA_DTYPE_F32, "cpu/avx512/f32");
    check_kernel("", FA_DTYPE_F16, "cpu/avx512/f32");
    check_kernel("", FA_DTYPE_F64, "cpu/avx512/f64");
    const bool has_pairs = __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel");
    const char *without_amx = has_pairs ? "cpu/avx512bf16/bf16" : "cpu/avx512/f32";
    check_kernel("amx", FA_DTYPE_BF16, without_amx);
    fa_device_info info;
    fa_error error;
    unsetenv("FLASH_ATTENTION_DISABLE");
    CHECK(fa_device_get_info((fa_device){FA_DEVICE_CPU, 0}, &info, &error) == FA_STATUS_OK, "%s",
          error.message);
    check_kernel("", FA_DTYPE_BF16, strstr(info.features, "amx") ? "cpu/amx/bf16" : without_amx);
  }
  restore_environment("FLASH_ATTENTION_DISABLE", before);
}

#else

static void test_instruction_sets(void) {}

#endif

static int32_t threads_with(const char *text) {
  fa_device_info info;
  setenv("FLASH_ATTENTION_NUM_THREADS", text, 1);
  if (fa_device_get_info((fa_device){FA_DEVICE_CPU, 0}, &info, NULL)) exit(2);
  return info.num_threads;
}

static void test_threads(void) {
  char *before = set_environment("FLASH_ATTENTION_NUM_THREADS", "");
  CHECK(threads_with("7") == 7 && threads_with("1023") == 1023, "threads that are asked for");
  const int32_t processors = threads_with("");
  static const char *const others[] = {"0", "-3", "1024", "99999999999999999999", "many", "1e3", "1,2"};
  for (size_t i = 0; i < sizeof others / sizeof *others; i++)
    CHECK(threads_with(others[i]) == processors, "%d threads for %s", threads_with(others[i]), others[i]);
  restore_environment("FLASH_ATTENTION_NUM_THREADS", before);
}

static void test_devices(void) {
  static const fa_device_kind kinds[] = {FA_DEVICE_CPU, FA_DEVICE_REFERENCE};
  for (size_t i = 0; i < 2; i++) {
    fa_device_info info;
    fa_error error;
    const char *name = fa_device_kind_name(kinds[i]);
    CHECK(fa_num_devices(kinds[i], &error) == 1, "devices of kind %s", name);
    CHECK(fa_device_get_info((fa_device){kinds[i], 0}, &info, &error) == FA_STATUS_OK, "%s", error.message);
    CHECK(*info.name && info.num_threads >= 1, "%s: info", name);
    CHECK(fa_device_get_info((fa_device){kinds[i], 5}, &info, NULL) == FA_STATUS_NO_DEVICE, "%s 5", name);
  }
}

static void test_runs(void) {
  fa_problem p = valid_problem();
  fa_plan plan;
  fa_error error;
  char expected[128];
  fa_plan_init(&plan, &p, FA_PASS_FORWARD, reference, &error);
  fa_tensors tensors = {0};
  void *buffers[FA_NUM_TENSORS] = {NULL};
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (fa_tensor_role_in(&p, FA_PASS_FORWARD, id) == FA_ROLE_NONE) continue;
    buffers[id] = calloc(1, (size_t)fa_tensor_shape(&p, id).size_bytes);
    *fa_tensor_at(&tensors, id) = fa_tensor_contiguous(&p, id, buffers[id]);
  }
  void *workspace;
  if (posix_memalign(&workspace, 64, plan.workspace_bytes + 64)) exit(2);
  fa_execution execution = {.workspace = workspace, .workspace_bytes = plan.workspace_bytes};
  CHECK(fa_run(&plan, &tensors, &execution, &error) == FA_STATUS_OK, "%s", error.message);
  CHECK(fa_run(&plan, &tensors, &execution, NULL) == FA_STATUS_OK, "a run without an error");

  execution.workspace_bytes--;
  CHECK(fa_run(&plan, &tensors, &execution, &error) == FA_STATUS_INVALID_ARGUMENT, "a short workspace");
  snprintf(expected, sizeof expected, "workspace: expected at least %zu bytes, got %zu", plan.workspace_bytes,
           plan.workspace_bytes - 1);
  CHECK_TEXT(error.message, expected);

  execution.workspace_bytes++;
  execution.workspace = (char *)workspace + 8;
  CHECK(fa_run(&plan, &tensors, &execution, &error) == FA_STATUS_INVALID_ARGUMENT, "a misaligned workspace");
  snprintf(expected, sizeof expected, "workspace: expected an address aligned to 64 bytes, got %p",
           execution.workspace);
  CHECK_TEXT(error.message, expected);
  execution.workspace = NULL;
  CHECK(fa_run(&plan, &tensors, &execution, &error) == FA_STATUS_INVALID_ARGUMENT, "no workspace");

  execution.workspace = workspace;
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (!buffers[id]) continue;
    fa_tensor_at(&tensors, id)->data = NULL;
    CHECK(fa_run(&plan, &tensors, &execution, &error) == FA_STATUS_INVALID_ARGUMENT, "a NULL %s",
          fa_tensor_name(id));
    snprintf(expected, sizeof expected, "%s: expected a pointer, got NULL", fa_tensor_name(id));
    CHECK_TEXT(error.message, expected);
    fa_tensor_at(&tensors, id)->data = buffers[id];
  }

  /* With memory of its own the same call writes the same results. */
  size_t bytes = (size_t)fa_tensor_shape(&p, FA_TENSOR_O).size_bytes;
  void *o = malloc(bytes);
  if (!o) exit(2);
  CHECK(fa_run(&plan, &tensors, &execution, &error) == FA_STATUS_OK, "%s", error.message);
  memcpy(o, tensors.o.data, bytes);
  memset(tensors.o.data, 0xff, bytes);
  CHECK(fa_run_anywhere(&plan, &tensors, NULL, NULL, &error) == FA_STATUS_OK, "%s", error.message);
  CHECK(memcmp(o, tensors.o.data, bytes) == 0, "fa_run_anywhere and fa_run disagree");
  free(o);
  for (int id = 0; id < FA_NUM_TENSORS; id++) free(buffers[id]);
  free(workspace);
}

/* ---- XLA: what is the same with and without it ---------------------------------------------------------- */

static void test_xla(void) {
  fa_error error;
  CHECK(fa_xla_handler("flash_attention_forward", "TPU") == NULL, "a handler for TPUs");
  CHECK(fa_xla_handler("flash_attention", "Host") == NULL, "a handler of another name");
  CHECK(
      !fa_xla_handler("flash_attention_forward", "Host") == !fa_xla_handler("flash_attention_backward", "CUDA"),
      "some handlers are missing");
  CHECK(fa_xla_register(NULL, &error) != FA_STATUS_OK, "NULL is no XLA");
  CHECK_TEXT(error.argument, "api");
}

int main(void) {
  test_failures();
  test_names();
  test_validation();
  test_overflow();
  test_option_table();
  test_set_options();
  test_get_options();
  test_format();
  test_set_shapes();
  test_tensors();
  test_integers();
  test_arena();
  test_nothing_to_compute();
  test_largest();
  test_overflowing_workspace();
  test_softcap();
  test_axes();
  test_partners();
  test_bias();
  test_dlse();
  test_elements();
  test_strides();
  test_windows();
  test_plans();
  test_instruction_sets();
  test_threads();
  test_devices();
  test_runs();
  test_xla();
  return report();
}
