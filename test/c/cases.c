#include "cases.h"

#include "random.h"

#define DEFAULTS                                                                                    \
  .struct_size = sizeof(fa_problem), .batch = 1, .num_heads = 1, .num_kv_heads = 1, .head_dim = 16, \
  .window_left = FA_UNBOUNDED, .window_right = FA_UNBOUNDED

/* A row: fields of fa_problem by name, on top of the defaults. */
#define ROW(label, ...)                                 \
  {                                                     \
    .name = label, .problem = { DEFAULTS, __VA_ARGS__ } \
  }
#define TAGGED(label, tag, ...)                                      \
  {                                                                  \
    .name = label, .tags = tag, .problem = { DEFAULTS, __VA_ARGS__ } \
  }
#define FILLED(label, with, ...)                                      \
  {                                                                   \
    .name = label, .fill = with, .problem = { DEFAULTS, __VA_ARGS__ } \
  }
#define LAID_OUT(label, tag, how, ...)                                              \
  {                                                                                 \
    .name = label, .tags = tag, .layout = how, .problem = { DEFAULTS, __VA_ARGS__ } \
  }
#define STRIDED(label, tag, ...)  LAID_OUT(label, tag, LAYOUT_STRIDED, __VA_ARGS__)
#define REVERSED(label, tag, ...) LAID_OUT(label, tag, LAYOUT_STRIDED | LAYOUT_REVERSED, __VA_ARGS__)

#define LENGTHS(q, k)  .seqlen_q = q, .seqlen_k = k
#define HEADS(h, kv)   .num_heads = h, .num_kv_heads = kv
#define WINDOW(l, r)   .window_left = l, .window_right = r
#define CAUSAL         .window_right = 0
#define BANDS(n)       .bands_batch = 1, .num_bands = n
#define ALIBI(b)       .alibi_batch = b
#define CONSTANT(b)    ALIBI(b), .constant_alibi_slopes = 1
#define BIAS(b, h, s)  .bias_batch = b, .bias_heads = h, .bias_rows = s
#define DROPOUT(r)     .dropout = r, .num_seed_words = 2
#define DLSE(b)        .dlse_batch = b
#define ROW_SINKS(n)   .num_row_sinks = n
#define MASK(b, h, s)  BIAS(b, h, s), .bias_dtype = FA_DTYPE_U8
#define KEY_LENGTHS(b) .lengths_batch = b

/* Every head_dim: a causal one with grouped heads, and one of a few rows. */
#define HEAD_DIM(d)                                                     \
  ROW("head_dim", LENGTHS(37, 53), HEADS(2, 1), .head_dim = d, CAUSAL), \
      ROW("head_dim, few rows", LENGTHS(5, 11), .batch = 2, .head_dim = d)

/* Lengths around the sizes that tiles have, met by rows and by columns; of a head_dim that Hopper's tensor maps
 * take, and of one that they do not. */
#define EDGES(n, d)                                                                \
  ROW("edge", LENGTHS(n, n), .head_dim = d, CAUSAL),                               \
      ROW("edge of rows", LENGTHS(n, 29), .head_dim = d, WINDOW(FA_UNBOUNDED, 3)), \
      ROW("edge of columns", LENGTHS(23, n), .head_dim = d)
#define EDGE(n) EDGES(n, 20), EDGES(n, 24)

/* Several tiles of the wide head_dims, whose tiles are the smallest. */
#define WIDE(d)                                                                                            \
  ROW("wide", LENGTHS(261, 197), .head_dim = d),                                                           \
      ROW("wide, causal", LENGTHS(259, 270), .head_dim = d, CAUSAL),                                       \
      ROW("wide, everything", LENGTHS(197, 261), HEADS(4, 2), .head_dim = d, WINDOW(90, 20), .softcap = 5, \
          .num_sinks = 2)

/* The rows' fields override DEFAULTS: that is what they are for. */
#pragma GCC diagnostic ignored "-Woverride-init"
#ifdef __clang__
#pragma GCC diagnostic ignored "-Winitializer-overrides"
#endif

static const fa_case cases[] = {
    /* Small enough to follow by hand, and to differentiate element by element. */
    TAGGED("one", CASE_TINY | CASE_QUICK, LENGTHS(1, 1), .head_dim = 1),
    TAGGED("one key", CASE_TINY, LENGTHS(4, 1), .head_dim = 3),
    TAGGED("one query", CASE_TINY | CASE_QUICK, LENGTHS(1, 9), .head_dim = 7, CAUSAL),
    TAGGED("tiny", CASE_TINY, LENGTHS(5, 6), .batch = 2, .head_dim = 3),
    TAGGED("tiny, causal", CASE_TINY, LENGTHS(5, 5), .head_dim = 2, CAUSAL),
    TAGGED("tiny, causal, hidden rows", CASE_TINY | CASE_QUICK, LENGTHS(7, 4), .head_dim = 3, CAUSAL),
    TAGGED("tiny, grouped heads", CASE_TINY, LENGTHS(4, 5), HEADS(6, 2), .head_dim = 2),
    TAGGED("tiny, one kv head", CASE_TINY, LENGTHS(3, 4), HEADS(4, 1), .head_dim = 3, CAUSAL),
    TAGGED("tiny, window", CASE_TINY, LENGTHS(7, 8), .head_dim = 3, WINDOW(2, 1)),
    TAGGED("tiny, scale", CASE_TINY, LENGTHS(4, 5), .head_dim = 3, .scale = -0.7),
    TAGGED("tiny, softcap", CASE_TINY | CASE_QUICK, LENGTHS(4, 6), .head_dim = 4, .softcap = 1.3, .scale = 2),
    TAGGED("tiny, sinks", CASE_TINY, LENGTHS(4, 6), .batch = 2, HEADS(2, 2), .head_dim = 3, .num_sinks = 2),
    TAGGED("tiny, everything", CASE_TINY | CASE_QUICK, LENGTHS(8, 5), .batch = 2, HEADS(4, 2), .head_dim = 3,
           WINDOW(1, 0), .softcap = 2, .scale = 1.1, .num_sinks = 3),

    TAGGED("tiny, bands", CASE_TINY | CASE_QUICK, LENGTHS(7, 9), .batch = 2, HEADS(4, 2), .head_dim = 3,
           .num_sinks = 1, .bands_batch = 2, .num_bands = 3),

    TAGGED("tiny, alibi", CASE_TINY | CASE_QUICK, LENGTHS(6, 8), .batch = 2, HEADS(2, 1), .head_dim = 3,
           ALIBI(2), .softcap = 3, .num_sinks = 1),
    TAGGED("tiny, alibi, bands", CASE_TINY, LENGTHS(7, 9), .batch = 2, HEADS(2, 2), .head_dim = 3, ALIBI(1),
           .bands_batch = 2, .num_bands = 4),

    TAGGED("tiny, bias", CASE_TINY | CASE_QUICK, LENGTHS(5, 6), .batch = 2, HEADS(2, 1), .head_dim = 3,
           BIAS(2, 2, 5)),
    TAGGED("tiny, bias of all batches and heads", CASE_TINY, LENGTHS(4, 6), .batch = 2, HEADS(4, 2),
           .head_dim = 2, BIAS(1, 1, 4), .softcap = 2),
    TAGGED("tiny, bias of keys", CASE_TINY | CASE_QUICK, LENGTHS(7, 5), .batch = 2, HEADS(2, 2), .head_dim = 3,
           BIAS(2, 1, 1), CAUSAL, .num_sinks = 1),
    TAGGED("tiny, mask of u8", CASE_TINY | CASE_QUICK, LENGTHS(6, 7), .batch = 2, HEADS(2, 2), .head_dim = 3,
           MASK(2, 1, 6)),
    TAGGED("tiny, bias, alibi, bands", CASE_TINY, LENGTHS(7, 9), .batch = 2, HEADS(2, 2), .head_dim = 3,
           ALIBI(1), BIAS(1, 2, 7), .bands_batch = 2, .num_bands = 3),
    TAGGED("tiny, lengths", CASE_TINY | CASE_QUICK, LENGTHS(3, 9), .batch = 3, HEADS(4, 2), .head_dim = 3,
           KEY_LENGTHS(3), CAUSAL, .num_sinks = 1),

    TAGGED("tiny, dropout", CASE_TINY | CASE_QUICK, LENGTHS(9, 11), .batch = 2, HEADS(4, 2), .head_dim = 3,
           DROPOUT(0.3), .num_sinks = 1),
    TAGGED("tiny, dropout, softcap, bias", CASE_TINY, LENGTHS(10, 12), .batch = 2, HEADS(2, 2), .head_dim = 2,
           DROPOUT(0.5), .softcap = 2, BIAS(1, 2, 10), CAUSAL),

    TAGGED("tiny, dlse", CASE_TINY | CASE_QUICK, LENGTHS(5, 6), .batch = 2, HEADS(2, 1), .head_dim = 3,
           DLSE(2)),
    TAGGED("tiny, dlse, sinks, hidden rows", CASE_TINY | CASE_QUICK, LENGTHS(9, 4), .batch = 2, HEADS(2, 2),
           .head_dim = 3, DLSE(1), CAUSAL, .num_sinks = 2),
    TAGGED("tiny, dlse, everything", CASE_TINY, LENGTHS(8, 9), .batch = 2, HEADS(2, 2), .head_dim = 3, DLSE(2),
           .softcap = 2, ALIBI(1), BIAS(1, 2, 8), DROPOUT(0.3), .bands_batch = 2, .num_bands = 3,
           .num_sinks = 1),

    TAGGED("tiny, row sinks", CASE_TINY | CASE_QUICK, LENGTHS(5, 6), .batch = 2, HEADS(2, 1), .head_dim = 3,
           ROW_SINKS(2)),
    TAGGED("tiny, row sinks, both, dlse, hidden rows", CASE_TINY | CASE_QUICK, LENGTHS(7, 4), .batch = 2,
           HEADS(2, 2), .head_dim = 3, ROW_SINKS(1), .num_sinks = 2, CAUSAL, DLSE(2)),
    TAGGED("tiny, row sinks, everything", CASE_TINY, LENGTHS(8, 9), .batch = 2, HEADS(2, 2), .head_dim = 3,
           ROW_SINKS(3), .softcap = 2, ALIBI(1), BIAS(1, 2, 8), DROPOUT(0.3), .bands_batch = 2, .num_bands = 3),

    /* Nothing to do, or nothing to see. */
    TAGGED("no batch", CASE_QUICK, LENGTHS(3, 4), .batch = 0, .num_sinks = 1),
    TAGGED("no queries", CASE_QUICK, LENGTHS(0, 4), .num_sinks = 2),
    TAGGED("no keys", CASE_QUICK, LENGTHS(5, 0)),
    TAGGED("no keys, sinks", CASE_QUICK, LENGTHS(5, 0), .num_sinks = 3),
    TAGGED("no queries, no keys", CASE_QUICK, LENGTHS(0, 0)),
    ROW("every row but the last hidden", LENGTHS(67, 1), CAUSAL),

    HEAD_DIM(1),
    HEAD_DIM(2),
    HEAD_DIM(7),
    HEAD_DIM(8),
    HEAD_DIM(16),
    HEAD_DIM(31),
    HEAD_DIM(32),
    HEAD_DIM(40),
    HEAD_DIM(48),
    HEAD_DIM(64),
    HEAD_DIM(72),
    HEAD_DIM(80),
    HEAD_DIM(96),
    HEAD_DIM(128),
    HEAD_DIM(160),
    HEAD_DIM(192),
    HEAD_DIM(256),

    EDGE(15),
    EDGE(16),
    EDGE(17),
    EDGE(47),
    EDGE(48),
    EDGE(49),
    EDGE(63),
    EDGE(64),
    EDGE(65),
    EDGE(95),
    EDGE(96),
    EDGE(97),
    EDGE(127),
    EDGE(128),
    EDGE(129),
    EDGE(191),
    EDGE(192),
    EDGE(193),
    EDGE(255),
    EDGE(256),
    EDGE(257),
    EDGE(385),

    WIDE(64),
    WIDE(104),
    WIDE(128),
    WIDE(160),
    WIDE(200),
    WIDE(256),

    /* Masks, over several tiles. */
    ROW("causal, more queries", LENGTHS(211, 103), CAUSAL),
    ROW("causal, more keys", LENGTHS(103, 211), CAUSAL),
    ROW("left", LENGTHS(141, 163), .window_left = 37),
    ROW("left, nothing before", LENGTHS(141, 141), .window_left = 0),
    ROW("right", LENGTHS(141, 119), .window_right = 29),
    ROW("right, more queries", LENGTHS(230, 90), .window_right = 11),
    TAGGED("window", CASE_QUICK, LENGTHS(173, 167), WINDOW(19, 23)),
    ROW("window, sliding and causal", LENGTHS(203, 203), WINDOW(31, 0)),
    ROW("window of one", LENGTHS(131, 131), WINDOW(0, 0)),
    ROW("window, first rows hidden", LENGTHS(187, 97), WINDOW(13, 5)),
    ROW("window, one tile apart", LENGTHS(110, 300), WINDOW(7, 9)),
    ROW("window wider than all", LENGTHS(59, 61), WINDOW(1000, 1000)),

    /* Bands: see harness.c. */
    ROW("one band", LENGTHS(141, 163), BANDS(1)),
    TAGGED("bands", CASE_QUICK, LENGTHS(173, 167), BANDS(4)),
    ROW("bands, causal", LENGTHS(301, 301), HEADS(4, 2), .head_dim = 24, BANDS(5), CAUSAL),
    ROW("bands, a window", LENGTHS(259, 311), .head_dim = 40, BANDS(7), WINDOW(31, 11)),
    TAGGED("bands of batches", CASE_QUICK, LENGTHS(205, 133), .batch = 3, HEADS(2, 1), .head_dim = 24,
           .bands_batch = 3, .num_bands = 6, CAUSAL),
    ROW("bands, sinks", LENGTHS(230, 97), .batch = 2, HEADS(2, 2), .head_dim = 72, BANDS(9), .num_sinks = 2),
    ROW("many bands", LENGTHS(399, 407), HEADS(2, 2), .head_dim = 16, BANDS(300)),
    ROW("more bands than rows", LENGTHS(30, 61), .head_dim = 8, BANDS(200)),
    ROW("bands, wide", LENGTHS(197, 261), HEADS(2, 1), .head_dim = 160, BANDS(4), .softcap = 5),
    ROW("bands, wider", LENGTHS(201, 190), HEADS(2, 1), .head_dim = 256, BANDS(3), CAUSAL),
    STRIDED("bands, everything, strided", CASE_QUICK, LENGTHS(237, 267), .batch = 2, HEADS(4, 2),
            .head_dim = 80, .bands_batch = 2, .num_bands = 5, WINDOW(61, 7), .softcap = 4, .scale = -0.6,
            .num_sinks = 2, .deterministic = 1),
    /* So many that who reads them where there are none does not find them in the memory behind. */
    TAGGED("bands, no batch", CASE_QUICK, LENGTHS(3, 4), .batch = 0, .bands_batch = 0, .num_bands = 100,
           .num_sinks = 1),
    ROW("bands, long", LENGTHS(701, 733), HEADS(2, 1), .head_dim = 64, BANDS(6), CAUSAL),
    ROW("bands, d128", LENGTHS(530, 517), HEADS(2, 1), .head_dim = 128, BANDS(6)),
    ROW("bands, shared columns", LENGTHS(790, 260), HEADS(16, 1), .head_dim = 64, BANDS(5)),
    ROW("bands, shared columns, d128", LENGTHS(530, 270), .batch = 2, HEADS(32, 2), .head_dim = 128,
        .bands_batch = 2, .num_bands = 3, CAUSAL),
    ROW("bands, d256", LENGTHS(333, 410), .head_dim = 256, BANDS(7), .num_sinks = 1),
    /* Blocks of short bands, which a GPU begins late: columns of a backward, rows of a forward. */
    TAGGED("bands, late ones", CASE_QUICK, LENGTHS(195, 640), HEADS(6, 6), .head_dim = 8, BANDS(9)),
    TAGGED("bands, late rows", CASE_QUICK, LENGTHS(700, 200), HEADS(9, 9), .head_dim = 8, BANDS(9)),
    ROW("bands, late ones of many heads", LENGTHS(400, 500), HEADS(144, 144), .head_dim = 8, BANDS(20)),
    /* More row blocks than a GPU has multiprocessors. */
    ROW("bands, very many heads", LENGTHS(300, 250), .batch = 2, HEADS(72, 36), .head_dim = 16,
        .bands_batch = 2, .num_bands = 9, CAUSAL),

    /* Few rows and many keys: kernels share the rows of a group out otherwise, and split the keys. */
    TAGGED("few rows: one", CASE_QUICK, LENGTHS(1, 1301), .batch = 2, HEADS(8, 2), .head_dim = 24),
    ROW("few rows: one, d128", LENGTHS(1, 3001), HEADS(4, 1), .head_dim = 128),
    ROW("few rows: one, d64, many keys", LENGTHS(1, 9001), .head_dim = 64),
    ROW("few rows: one, d256, many keys", LENGTHS(1, 4003), HEADS(2, 1), .head_dim = 256),
    TAGGED("few rows: many parts, window", CASE_QUICK, LENGTHS(2, 4801), .head_dim = 200, WINDOW(4001, 0),
           .num_sinks = 2),
    ROW("few rows: every head apart", LENGTHS(1, 517), .batch = 3, HEADS(5, 5), .head_dim = 128),
    ROW("few rows: group of 24", LENGTHS(1, 811), HEADS(24, 1), .head_dim = 40),
    ROW("few rows: group of 40", LENGTHS(1, 405), HEADS(80, 2), .head_dim = 64),
    ROW("few rows: group of 64", LENGTHS(1, 203), HEADS(64, 1), .head_dim = 256),
    ROW("few rows: 12, causal", LENGTHS(3, 701), HEADS(8, 2), .head_dim = 80, CAUSAL),
    ROW("few rows: 20, causal", LENGTHS(5, 1003), HEADS(8, 2), .head_dim = 64, CAUSAL),
    ROW("few rows: 35, window", LENGTHS(7, 611), HEADS(10, 2), .head_dim = 72, WINDOW(100, 3)),
    ROW("few rows: 64", LENGTHS(16, 301), HEADS(4, 1), .head_dim = 128, CAUSAL),
    ROW("few rows: 66", LENGTHS(22, 211), HEADS(3, 1), .head_dim = 128, CAUSAL),
    ROW("few rows: 32, wide", LENGTHS(8, 199), HEADS(4, 1), .head_dim = 256, CAUSAL),
    ROW("few rows: window", LENGTHS(1, 2003), HEADS(4, 2), .head_dim = 48, WINDOW(130, 0)),
    ROW("few rows: softcap", LENGTHS(2, 1501), HEADS(6, 3), .head_dim = 96, .softcap = 5, .scale = -0.4),
    TAGGED("few rows: everything", CASE_QUICK, LENGTHS(6, 907), .batch = 2, HEADS(6, 2), .head_dim = 104,
           WINDOW(500, 1), .softcap = 7, .num_sinks = 3),
    ROW("few rows: more than keys", LENGTHS(31, 7), HEADS(2, 1), .head_dim = 64, CAUSAL),
    ROW("few tiles", LENGTHS(70, 4099), HEADS(2, 1), .head_dim = 8),
    ROW("few tiles, causal, sinks", LENGTHS(133, 4211), .head_dim = 16, CAUSAL, .num_sinks = 1),
    ROW("few tiles, window", LENGTHS(90, 4211), HEADS(2, 2), .head_dim = 16, WINDOW(50, 9)),
    FILLED("few rows: large", FILL_LARGE, LENGTHS(1, 1103), HEADS(4, 1), .head_dim = 64),
    FILLED("few rows: large, d256", FILL_LARGE, LENGTHS(3, 500), HEADS(2, 1), .head_dim = 256),
    FILLED("few rows: lognormal", FILL_LOGNORMAL, LENGTHS(2, 1300), HEADS(2, 1), .head_dim = 128, CAUSAL),
    STRIDED("few rows: strided", CASE_QUICK, LENGTHS(1, 1201), .batch = 2, HEADS(4, 2), .head_dim = 56),
    REVERSED("few rows: reversed", CASE_QUICK, LENGTHS(1, 1201), .batch = 2, HEADS(4, 2), .head_dim = 56),

    /* The same in a backward, where all rows of a group see the same: 16, 32 and 64 of them at most. */
    TAGGED("few rows, all see all: 15, sinks", CASE_QUICK, LENGTHS(5, 333), .batch = 2, HEADS(6, 2),
           .head_dim = 96, .num_sinks = 2, DLSE(2)),
    TAGGED("few rows, all see all: 27", CASE_QUICK, LENGTHS(9, 277), .batch = 3, HEADS(6, 2), .head_dim = 52),
    TAGGED("few rows, all see all: 61, lengths", CASE_QUICK, LENGTHS(61, 201), .batch = 5, .head_dim = 64,
           KEY_LENGTHS(5), .num_sinks = 1),
    TAGGED("few rows, all see all: 30, lengths", CASE_QUICK, LENGTHS(10, 190), .batch = 4, HEADS(3, 1),
           .head_dim = 128, KEY_LENGTHS(4), .softcap = 3),
    ROW("few rows, all see all: 29, d128", LENGTHS(29, 419), HEADS(3, 3), .head_dim = 120, .scale = -0.1),
    ROW("few rows, all see all: few keys", LENGTHS(16, 13), .batch = 5, HEADS(4, 4), .head_dim = 128),
    ROW("few rows, all see all: one of very many batches", LENGTHS(1, 40), .batch = 330, HEADS(4, 1),
        .head_dim = 24),
    /* Some rows see scores far below 0 alone, beside which a key that is not there would weigh infinitely. */
    FILLED("few rows, all see all: large, three keys", FILL_LARGE, LENGTHS(14, 3), .batch = 3, HEADS(4, 2),
           .head_dim = 64),
    STRIDED("few rows, all see all: strided", CASE_QUICK, LENGTHS(14, 301), .batch = 2, HEADS(4, 2),
            .head_dim = 64),
    REVERSED("few rows, all see all: reversed", CASE_QUICK, LENGTHS(7, 301), .batch = 2, HEADS(8, 4),
             .head_dim = 128, KEY_LENGTHS(2)),

    /* Many rows beside few keys. */
    TAGGED("one column block", CASE_QUICK, LENGTHS(2113, 77), HEADS(2, 1), .head_dim = 128, .num_sinks = 1),
    ROW("one column block, window", LENGTHS(2060, 100), .batch = 2, .head_dim = 96, WINDOW(60, 2055)),
    STRIDED("one column block, strided", 0, LENGTHS(2050, 128), HEADS(2, 2), .head_dim = 112),

    /* More rows than those, against more keys than their tiles keep a GPU busy with. */
    TAGGED("key parts, sinks", CASE_QUICK, LENGTHS(70, 2101), HEADS(2, 1), .head_dim = 64, CAUSAL,
           .num_sinks = 2),
    ROW("key parts, d128", LENGTHS(131, 2305), HEADS(2, 1), .head_dim = 128, CAUSAL),
    ROW("key parts, window", LENGTHS(200, 2201), .head_dim = 72, WINDOW(1900, 3), .softcap = 5),
    ROW("key parts, d40", LENGTHS(129, 4099), .batch = 2, .head_dim = 40),

    /* Few keys and many rows: column blocks that leave most of a GPU idle share their rows out over blocks of
     * threads, and heads of a group with them. */
    TAGGED("few keys", CASE_QUICK, LENGTHS(1601, 77), .head_dim = 64),
    TAGGED("few keys, hidden rows", CASE_QUICK, LENGTHS(1207, 99), .head_dim = 128, WINDOW(FA_UNBOUNDED, 900)),
    ROW("few keys, one", LENGTHS(2003, 1), .head_dim = 40),
    ROW("few keys, d128", LENGTHS(1511, 128), .head_dim = 128),
    ROW("few keys, d256", LENGTHS(811, 61), HEADS(2, 1), .head_dim = 256),
    ROW("few keys, two heads of each", LENGTHS(451, 137), .batch = 2, HEADS(4, 2), .head_dim = 80),
    ROW("few keys, group of 7", LENGTHS(403, 121), HEADS(7, 1), .head_dim = 72),
    ROW("few keys, group of 16, causal", LENGTHS(151, 127), HEADS(16, 1), .head_dim = 128, CAUSAL),
    TAGGED("heads shared out", CASE_QUICK, LENGTHS(411, 261), HEADS(16, 1), .head_dim = 104, CAUSAL),
    ROW("heads shared out, d64", LENGTHS(283, 277), HEADS(24, 1), .head_dim = 64, CAUSAL),
    ROW("heads shared out, d64, in order", LENGTHS(281, 275), .batch = 2, HEADS(16, 2), .head_dim = 56,
        WINDOW(300, 7), .softcap = 20, .deterministic = 1),
    ROW("heads shared out, in order", LENGTHS(409, 303), HEADS(24, 1), .head_dim = 128, WINDOW(300, 7),
        .num_sinks = 1, .deterministic = 1),
    ROW("few keys, window", LENGTHS(1403, 120), .head_dim = 72, WINDOW(590, 33)),
    TAGGED("few keys, everything", CASE_QUICK, LENGTHS(705, 113), HEADS(3, 1), .head_dim = 104, WINDOW(70, 509),
           .softcap = 5, .scale = -0.6, .num_sinks = 2, DLSE(1)),
    ROW("few keys, bands", LENGTHS(907, 125), HEADS(2, 1), .head_dim = 64, BANDS(5)),
    ROW("few keys, lengths", LENGTHS(707, 125), HEADS(2, 1), .head_dim = 128, KEY_LENGTHS(1)),
    ROW("few keys, mask and dropout", LENGTHS(903, 90), HEADS(2, 1), .head_dim = 64, MASK(1, 1, 1),
        DROPOUT(0.25)),
    FILLED("few keys: large", FILL_LARGE, LENGTHS(1503, 88), .head_dim = 64),
    STRIDED("few keys: strided", CASE_QUICK, LENGTHS(1201, 67), HEADS(4, 1), .head_dim = 56),

    /* Keys that end before the tensor does. */
    TAGGED("lengths", CASE_QUICK, LENGTHS(133, 167), .batch = 5, HEADS(2, 1), .head_dim = 24, KEY_LENGTHS(5)),
    TAGGED("lengths, causal", CASE_QUICK, LENGTHS(205, 301), .batch = 4, HEADS(4, 2), .head_dim = 40,
           KEY_LENGTHS(4), CAUSAL),
    ROW("lengths, a window", LENGTHS(259, 311), .batch = 3, HEADS(2, 2), .head_dim = 72, KEY_LENGTHS(3),
        WINDOW(77, 11), .num_sinks = 2),
    ROW("lengths, one for all", LENGTHS(101, 190), .batch = 2, HEADS(2, 1), .head_dim = 160, KEY_LENGTHS(1),
        CAUSAL, .softcap = 5),
    ROW("lengths, wide", LENGTHS(201, 290), .batch = 2, HEADS(2, 1), .head_dim = 256, KEY_LENGTHS(2), CAUSAL),
    ROW("lengths, alibi", LENGTHS(141, 163), .batch = 2, HEADS(3, 1), ALIBI(2), KEY_LENGTHS(2)),
    TAGGED("lengths, no keys", CASE_QUICK, LENGTHS(5, 0), .batch = 2, KEY_LENGTHS(2)),
    STRIDED("lengths, everything, strided", CASE_QUICK, LENGTHS(137, 267), .batch = 3, HEADS(4, 2),
            .head_dim = 80, KEY_LENGTHS(3), WINDOW(161, 7), .softcap = 4, .scale = -0.6, .num_sinks = 2,
            .deterministic = 1),
    ROW("few rows: lengths", LENGTHS(1, 1503), .batch = 9, HEADS(8, 2), .head_dim = 64, KEY_LENGTHS(9)),
    ROW("few rows: lengths, causal", LENGTHS(5, 907), .batch = 6, HEADS(6, 2), .head_dim = 128, KEY_LENGTHS(6),
        CAUSAL, .num_sinks = 1),
    ROW("few rows: lengths, many parts", LENGTHS(2, 4203), .batch = 2, .head_dim = 256, KEY_LENGTHS(2),
        WINDOW(3501, 0)),
    TAGGED("few rows: parts of shared keys", CASE_QUICK, LENGTHS(3, 901), HEADS(8, 1), .head_dim = 128, CAUSAL),
    TAGGED("few rows: parts, everything", CASE_QUICK, LENGTHS(4, 1205), HEADS(15, 5), .head_dim = 200,
           WINDOW(1111, 0), .softcap = 6, .scale = -0.5, .num_sinks = 2),
    ROW("few rows: parts, a short window", LENGTHS(11, 2101), .batch = 2, HEADS(10, 2), .head_dim = 80,
        WINDOW(333, 0)),
    TAGGED("few rows: bias of keys", CASE_QUICK, LENGTHS(2, 901), .batch = 2, HEADS(6, 2), .head_dim = 64,
           BIAS(2, 6, 1), CAUSAL),
    ROW("few rows: bias", LENGTHS(3, 702), .batch = 2, HEADS(8, 2), .head_dim = 128, BIAS(2, 8, 3)),
    ROW("few rows: bias, lengths", LENGTHS(1, 907), .batch = 4, HEADS(4, 4), .head_dim = 40, BIAS(1, 4, 1),
        KEY_LENGTHS(4)),
    TAGGED("few rows: mask of keys", CASE_QUICK, LENGTHS(1, 1203), .batch = 3, HEADS(4, 1), .head_dim = 40,
           MASK(3, 1, 1)),
    ROW("few rows: mask of scores", LENGTHS(4, 600), HEADS(6, 2), .head_dim = 72, MASK(1, 6, 4), .softcap = 4),
    TAGGED("few rows: alibi, lengths", CASE_QUICK, LENGTHS(2, 805), .batch = 3, HEADS(6, 3), .head_dim = 64,
           ALIBI(3), KEY_LENGTHS(3), CAUSAL),
    ROW("few rows: alibi, no mask", LENGTHS(7, 611), HEADS(10, 2), .head_dim = 72, ALIBI(1)),
    TAGGED("few rows: bands", CASE_QUICK, LENGTHS(3, 907), .batch = 2, HEADS(4, 1), .head_dim = 96,
           .bands_batch = 2, .num_bands = 3),
    ROW("few rows: bands, causal", LENGTHS(16, 501), HEADS(4, 1), .head_dim = 128, BANDS(5), CAUSAL,
        .num_sinks = 1),
    ROW("few rows: more bands than they look at", LENGTHS(5, 811), HEADS(4, 1), .head_dim = 64, BANDS(9)),
    ROW("few rows: a band, alibi", LENGTHS(2, 1100), .batch = 2, HEADS(8, 2), .head_dim = 128, .bands_batch = 2,
        .num_bands = 1, ALIBI(1), CAUSAL),
    TAGGED("few rows: all that is added", CASE_QUICK, LENGTHS(5, 777), .batch = 2, HEADS(6, 2), .head_dim = 200,
           BIAS(1, 6, 5), ALIBI(2), KEY_LENGTHS(2), WINDOW(600, 0), .softcap = 5, .scale = -0.4,
           .num_sinks = 2),
    ROW("few rows: bias, wide", LENGTHS(33, 450), HEADS(2, 1), .head_dim = 256, BIAS(1, 2, 33), CAUSAL),
    TAGGED("few rows: bias from an odd column on", CASE_QUICK, LENGTHS(3, 1104), .batch = 2, HEADS(4, 2),
           .head_dim = 48, BIAS(1, 4, 3), KEY_LENGTHS(2), WINDOW(300, 0)),
    ROW("few rows: mask from an odd column on", LENGTHS(1, 1200), HEADS(4, 1), .head_dim = 128, MASK(1, 1, 1),
        WINDOW(334, 0)),
    STRIDED("few rows: lengths, strided", CASE_QUICK, LENGTHS(3, 1201), .batch = 3, HEADS(4, 2), .head_dim = 56,
            KEY_LENGTHS(3), CAUSAL),

    /* Heads. */
    ROW("grouped heads", LENGTHS(71, 83), .batch = 2, HEADS(6, 3), .head_dim = 24),
    TAGGED("one kv head", CASE_QUICK, LENGTHS(99, 101), HEADS(5, 1), .head_dim = 24, CAUSAL),
    ROW("many heads", LENGTHS(13, 19), .batch = 3, HEADS(8, 8), CAUSAL),
    /* More than a GPU has multiprocessors, and several blocks of rows in each. */
    ROW("very many heads", LENGTHS(270, 70), HEADS(144, 144), .head_dim = 8),
    ROW("very many heads, causal", LENGTHS(133, 40), .batch = 4, HEADS(36, 36), .head_dim = 72, CAUSAL),
    TAGGED("very many heads, few rows", CASE_QUICK, LENGTHS(5, 9), .batch = 7, HEADS(60, 20), .head_dim = 8,
           WINDOW(3, 0)),
    ROW("very many heads, window", LENGTHS(300, 250), HEADS(140, 140), .head_dim = 16, WINDOW(90, 30)),

    /* Scores. */
    ROW("scale", LENGTHS(77, 69), .scale = 0.31),
    ROW("scale, negative", LENGTHS(77, 69), .scale = -0.2, CAUSAL),
    ROW("softcap", LENGTHS(91, 87), .softcap = 3.5),
    TAGGED("softcap, causal", CASE_QUICK, LENGTHS(91, 103), .softcap = 15, .scale = 1, CAUSAL),
    ROW("softcap, tight", LENGTHS(57, 62), .softcap = 0.4, .scale = 1),

    /* Slopes of distances. */
    ROW("alibi", LENGTHS(141, 163), HEADS(3, 1), ALIBI(1)),
    TAGGED("alibi, causal", CASE_QUICK, LENGTHS(173, 167), .batch = 2, HEADS(4, 2), .head_dim = 24, ALIBI(2),
           CAUSAL),
    ROW("alibi, a window", LENGTHS(211, 301), .batch = 2, HEADS(2, 2), .head_dim = 72, ALIBI(1),
        WINDOW(77, 21)),
    ROW("alibi, bands", LENGTHS(259, 311), .batch = 2, HEADS(2, 1), .head_dim = 40, .bands_batch = 2,
        .num_bands = 5, ALIBI(2)),
    ROW("alibi, softcap, sinks, hidden rows", LENGTHS(230, 97), HEADS(2, 2), .head_dim = 128, ALIBI(1), CAUSAL,
        .softcap = 5, .num_sinks = 2),
    TAGGED("alibi, constant", CASE_QUICK, LENGTHS(19, 37), HEADS(2, 1), .head_dim = 8, CONSTANT(1),
           .num_sinks = 1),
    ROW("alibi, constant, heads shared out", LENGTHS(260, 190), HEADS(8, 1), .head_dim = 128, CONSTANT(1),
        CAUSAL),
    TAGGED("alibi, no keys", CASE_QUICK, LENGTHS(5, 0), ALIBI(1)),
    TAGGED("alibi, no batch", CASE_QUICK, LENGTHS(3, 4), .batch = 0, ALIBI(1)),
    FILLED("alibi, large", FILL_LARGE, LENGTHS(75, 101), .head_dim = 64, ALIBI(1)),
    /* Of distance 0, so that there is no gradient by slopes. */
    TAGGED("alibi, a column a row, sinks", CASE_QUICK, LENGTHS(176, 193), HEADS(2, 2), .head_dim = 96, ALIBI(1),
           WINDOW(0, 0), .num_sinks = 4),
    ROW("alibi, a column a row, d64, sinks", LENGTHS(193, 176), .head_dim = 64, ALIBI(1), WINDOW(0, 0),
        .num_sinks = 1),
    STRIDED("alibi, everything, strided", CASE_QUICK, LENGTHS(237, 267), .batch = 2, HEADS(4, 2),
            .head_dim = 80, .bands_batch = 2, .num_bands = 4, ALIBI(2), WINDOW(61, 7), .softcap = 4,
            .scale = -0.6, .num_sinks = 2, .deterministic = 1),

    /* Of as many columns as some kernels are for alone, whose references may lag far behind. */
    TAGGED("long, causal", CASE_QUICK, LENGTHS(140, 2060), HEADS(2, 1), .head_dim = 128, CAUSAL),
    FILLED("long, large", FILL_LARGE, LENGTHS(130, 1100), HEADS(2, 2), .head_dim = 100),
    ROW("long, a window, softcap, sinks", LENGTHS(300, 2200), .batch = 2, HEADS(2, 1), .head_dim = 128,
        WINDOW(1200, 50), .softcap = 9, .num_sinks = 2),

    /* Biases of every shape, and masks. */
    TAGGED("bias", CASE_QUICK, LENGTHS(141, 163), .batch = 2, HEADS(4, 2), .head_dim = 24, BIAS(2, 4, 141)),
    TAGGED("bias, f32", CASE_QUICK | CASE_F32_BIAS, LENGTHS(130, 205), .batch = 2, HEADS(2, 1), .head_dim = 64,
           BIAS(1, 2, 130), CAUSAL),
    TAGGED("bias, f32, of each batch", CASE_F32_BIAS, LENGTHS(257, 93), .batch = 3, HEADS(2, 2), .head_dim = 40,
           BIAS(3, 1, 257)),
    TAGGED("bias of all batches and heads", CASE_QUICK, LENGTHS(211, 173), .batch = 3, HEADS(4, 2),
           .head_dim = 16, BIAS(1, 1, 211), WINDOW(90, 15)),
    TAGGED("bias of keys", CASE_QUICK, LENGTHS(205, 230), .batch = 2, HEADS(3, 3), .head_dim = 72,
           BIAS(2, 1, 1)),
    ROW("bias of keys and heads", LENGTHS(300, 119), .batch = 2, HEADS(4, 1), .head_dim = 32, BIAS(1, 4, 1),
        CAUSAL),
    TAGGED("bias of all keys", CASE_F32_BIAS, LENGTHS(99, 301), .batch = 2, HEADS(2, 2), .head_dim = 8,
           BIAS(1, 1, 1)),
    ROW("bias, sinks, softcap", LENGTHS(133, 270), HEADS(2, 2), .head_dim = 128, BIAS(1, 2, 133),
        .num_sinks = 2, .softcap = 4),
    ROW("bias, bands", LENGTHS(259, 311), .batch = 2, HEADS(2, 1), .head_dim = 40, BIAS(1, 2, 259), BANDS(6)),
    ROW("bias, constant", LENGTHS(85, 101), .batch = 2, HEADS(2, 2), .head_dim = 48, BIAS(1, 2, 85),
        .constant_bias = 1),
    ROW("bias, wide", LENGTHS(101, 190), .batch = 2, HEADS(2, 1), .head_dim = 200, BIAS(1, 2, 101), CAUSAL),
    ROW("bias, long", LENGTHS(530, 517), .batch = 2, HEADS(2, 2), .head_dim = 64, BIAS(1, 2, 530), CAUSAL),
    FILLED("bias, large", FILL_LARGE, LENGTHS(75, 101), .head_dim = 64, BIAS(1, 1, 75)),
    TAGGED("bias, no keys", CASE_QUICK, LENGTHS(5, 0), .batch = 2, BIAS(2, 1, 5)),
    TAGGED("bias, no batch", CASE_QUICK, LENGTHS(3, 4), .batch = 0, HEADS(2, 2), BIAS(1, 2, 3)),
    TAGGED("bias, no queries", CASE_QUICK, LENGTHS(0, 5), .batch = 2, BIAS(2, 1, 1)),
    TAGGED("mask of u8", CASE_QUICK, LENGTHS(301, 267), .batch = 2, HEADS(2, 1), .head_dim = 40,
           MASK(2, 1, 301)),
    TAGGED("mask of keys", CASE_QUICK, LENGTHS(230, 397), .batch = 3, HEADS(4, 2), .head_dim = 64,
           MASK(3, 1, 1)),
    ROW("mask of heads, causal, sinks", LENGTHS(211, 203), .batch = 2, HEADS(2, 2), .head_dim = 96,
        MASK(1, 2, 211), CAUSAL, .num_sinks = 1),
    /* Of rows that are multiples of 16 bytes, so that Hopper's kernels copy boxes of them. */
    TAGGED("bias in boxes", CASE_QUICK, LENGTHS(301, 272), .batch = 2, HEADS(4, 2), .head_dim = 64,
           BIAS(1, 4, 301), CAUSAL),
    ROW("bias in boxes, alibi", LENGTHS(141, 328), .batch = 2, HEADS(2, 1), .head_dim = 128, BIAS(2, 1, 141),
        ALIBI(1)),
    ROW("bias in boxes, bands", LENGTHS(259, 312), .batch = 2, HEADS(2, 1), .head_dim = 40, BIAS(1, 2, 259),
        BANDS(6), .num_sinks = 1),
    ROW("bias in boxes, wide, dropout", LENGTHS(101, 192), HEADS(2, 1), .head_dim = 200, BIAS(1, 2, 101),
        DROPOUT(0.1)),
    TAGGED("bias of keys in boxes", CASE_QUICK | CASE_F32_BIAS, LENGTHS(99, 304), .batch = 2, HEADS(2, 2),
           .head_dim = 96, BIAS(2, 1, 1)),
    TAGGED("mask in boxes", CASE_QUICK, LENGTHS(201, 288), .batch = 2, HEADS(2, 1), .head_dim = 128,
           MASK(2, 1, 201)),
    ROW("mask in boxes, wide", LENGTHS(130, 208), HEADS(2, 1), .head_dim = 256, MASK(1, 1, 130), CAUSAL),
    /* Of many blocks, of which some are hidden whole, or shown whole. */
    TAGGED("mask of scores, long", CASE_QUICK, LENGTHS(523, 700), .batch = 2, HEADS(4, 2), .head_dim = 64,
           MASK(2, 1, 523)),
    TAGGED("mask of scores, long, causal", CASE_QUICK, LENGTHS(391, 649), .batch = 2, HEADS(2, 1),
           .head_dim = 128, MASK(1, 2, 391), CAUSAL, .num_sinks = 1),
    ROW("mask of scores, a window", LENGTHS(411, 500), .batch = 2, HEADS(2, 1), .head_dim = 128,
        MASK(2, 1, 411), WINDOW(200, 140), .deterministic = 1),
    /* Of more row blocks, in one head and in all of a group, than a backward finds at a time. */
    TAGGED("mask of scores, many rows", CASE_QUICK, LENGTHS(2200, 270), HEADS(2, 2), .head_dim = 128,
           MASK(1, 2, 2200)),
    TAGGED("mask of scores, many heads", CASE_QUICK, LENGTHS(600, 240), HEADS(8, 1), .head_dim = 64,
           MASK(1, 8, 600), CAUSAL),
    ROW("mask of scores, bands", LENGTHS(359, 411), .batch = 2, HEADS(2, 1), .head_dim = 64, .bands_batch = 2,
        .num_bands = 4, MASK(2, 2, 359)),
    ROW("mask of scores, bands", LENGTHS(311, 359), HEADS(2, 2), .head_dim = 96, BANDS(3), MASK(1, 1, 311)),
    TAGGED("mask of scores, lengths", CASE_QUICK, LENGTHS(141, 363), .batch = 3, HEADS(2, 1), .head_dim = 128,
           MASK(1, 1, 141), KEY_LENGTHS(3), CAUSAL),
    /* Of blocks that are hidden from some of a tile's rows alone. */
    TAGGED("mask of half a tile", CASE_QUICK, LENGTHS(128, 111), .head_dim = 192, MASK(1, 1, 128)),
    ROW("mask of scores, wide, causal", LENGTHS(290, 301), .batch = 2, HEADS(4, 2), .head_dim = 256,
        MASK(2, 4, 290), CAUSAL, .num_sinks = 1),
    TAGGED("mask of scores, softcap", CASE_QUICK, LENGTHS(270, 301), HEADS(2, 1), .head_dim = 64,
           MASK(1, 2, 270), .softcap = 3),
    ROW("mask of scores, negative scale", LENGTHS(203, 330), HEADS(2, 1), .head_dim = 128, MASK(1, 2, 203),
        .scale = -0.2),
    TAGGED("mask of scores, alibi", CASE_QUICK, LENGTHS(301, 333), HEADS(2, 1), .head_dim = 128,
           MASK(1, 1, 301), ALIBI(1)),
    TAGGED("mask of scores, dropout", CASE_QUICK, LENGTHS(301, 270), .batch = 2, HEADS(2, 1), .head_dim = 64,
           MASK(2, 1, 301), DROPOUT(0.2), CAUSAL),
    ROW("mask of scores, dropout, wide", LENGTHS(160, 333), HEADS(2, 1), .head_dim = 256, MASK(1, 2, 160),
        DROPOUT(0.1)),
    FILLED("mask of scores, large", FILL_LARGE, LENGTHS(175, 301), HEADS(2, 2), .head_dim = 128,
           MASK(1, 1, 175)),
    TAGGED("mask of keys in boxes", CASE_QUICK, LENGTHS(230, 400), .batch = 3, HEADS(4, 2), .head_dim = 64,
           MASK(3, 1, 1), WINDOW(90, 15)),
    /* Of many blocks of keys, some of which are hidden whole, and far from the diagonal. */
    TAGGED("mask of keys, long", CASE_QUICK, LENGTHS(150, 1030), .batch = 6, .head_dim = 64, MASK(6, 1, 1)),
    ROW("mask of keys, long, causal", LENGTHS(531, 720), .batch = 4, HEADS(2, 1), .head_dim = 128,
        MASK(4, 2, 1), CAUSAL),
    TAGGED("bias of keys, long", CASE_QUICK, LENGTHS(130, 900), .batch = 4, HEADS(2, 1), .head_dim = 128,
           BIAS(1, 2, 1)),
    ROW("bias of keys, wide", LENGTHS(70, 401), .batch = 2, HEADS(2, 1), .head_dim = 256, BIAS(2, 1, 1)),
    TAGGED("alibi, long", CASE_QUICK, LENGTHS(520, 777), HEADS(2, 2), .head_dim = 64, ALIBI(1)),
    ROW("alibi, long, causal, bias of keys", LENGTHS(590, 590), HEADS(2, 1), .head_dim = 128, ALIBI(1),
        BIAS(1, 1, 1), CAUSAL),
    /* Terms of keys and slopes as parts of q·k, and those that cannot be. */
    TAGGED("bias of keys, negative scale", CASE_QUICK, LENGTHS(141, 395), HEADS(2, 1), .head_dim = 64,
           BIAS(1, 2, 1), .scale = -0.3, CAUSAL),
    ROW("alibi, negative scale", LENGTHS(300, 410), HEADS(4, 2), .head_dim = 128, ALIBI(1), .scale = -0.2,
        WINDOW(200, 170)),
    /* With visits to the left of the diagonal, to its right, and on it. */
    TAGGED("alibi, constant, long", CASE_QUICK, LENGTHS(391, 520), HEADS(2, 1), .head_dim = 64, CONSTANT(1)),
    TAGGED("alibi, constant, long, causal", CASE_QUICK, LENGTHS(260, 590), HEADS(2, 1), .head_dim = 128,
           CONSTANT(1), CAUSAL),
    TAGGED("alibi, constant, small bands", CASE_QUICK, LENGTHS(70, 150), HEADS(2, 1), .head_dim = 64, BANDS(3),
           CONSTANT(1)),
    ROW("alibi, constant, long", LENGTHS(520, 300), HEADS(2, 1), .head_dim = 128, CONSTANT(1), .num_sinks = 1),
    ROW("alibi, constant, long, causal", LENGTHS(403, 350), .batch = 2, HEADS(2, 2), .head_dim = 56,
        CONSTANT(2), CAUSAL, .deterministic = 1),
    ROW("alibi, constant, a window", LENGTHS(411, 500), HEADS(2, 1), .head_dim = 128, CONSTANT(1),
        WINDOW(200, 140), .scale = -0.3),
    ROW("alibi, constant, bands", LENGTHS(359, 411), .batch = 2, HEADS(2, 1), .head_dim = 64, .bands_batch = 2,
        .num_bands = 5, CONSTANT(2)),
    ROW("alibi, constant, bands", LENGTHS(359, 311), .batch = 2, HEADS(2, 1), .head_dim = 128, .bands_batch = 1,
        .num_bands = 4, CONSTANT(1), .num_sinks = 1),
    ROW("alibi, constant, lengths", LENGTHS(141, 363), .batch = 2, HEADS(2, 1), .head_dim = 128, CONSTANT(2),
        KEY_LENGTHS(2), CAUSAL),
    FILLED("alibi, constant, large", FILL_LARGE, LENGTHS(175, 301), .head_dim = 64, CONSTANT(1)),
    TAGGED("mask of keys, alibi", CASE_QUICK, LENGTHS(205, 333), .batch = 2, HEADS(4, 2), .head_dim = 64,
           MASK(2, 1, 1), ALIBI(2), .num_sinks = 1),
    FILLED("bias of keys, large", FILL_LARGE, LENGTHS(175, 301), HEADS(2, 2), .head_dim = 128, BIAS(1, 1, 1)),
    FILLED("alibi, bias of keys, large", FILL_LARGE, LENGTHS(275, 201), .head_dim = 56, ALIBI(1),
           BIAS(1, 1, 1)),
    ROW("bias of keys, alibi, softcap", LENGTHS(133, 270), HEADS(2, 1), .head_dim = 64, BIAS(1, 1, 1), ALIBI(1),
        .softcap = 3),
    TAGGED("bias of keys, a scale near 0", CASE_QUICK, LENGTHS(99, 200), .head_dim = 64, BIAS(1, 1, 1),
           ALIBI(1), .scale = 3e-4),
    ROW("bias of keys, a larger scale", LENGTHS(70, 143), .head_dim = 128, BIAS(1, 1, 1), .scale = 1),
    STRIDED("bias, everything, strided", CASE_QUICK | CASE_F32_BIAS, LENGTHS(237, 267), .batch = 2, HEADS(4, 2),
            .head_dim = 80, .bands_batch = 2, .num_bands = 3, ALIBI(1), BIAS(1, 4, 237), WINDOW(101, 37),
            .softcap = 4, .scale = -0.6, .num_sinks = 2, .deterministic = 1),

    /* Dropout. */
    TAGGED("dropout", CASE_QUICK, LENGTHS(141, 163), .batch = 2, HEADS(3, 3), .head_dim = 24, DROPOUT(0.1)),
    TAGGED("dropout, causal", CASE_QUICK, LENGTHS(173, 167), .batch = 2, HEADS(4, 2), .head_dim = 64,
           DROPOUT(0.25), CAUSAL),
    ROW("dropout, heads shared out", LENGTHS(260, 190), HEADS(8, 1), .head_dim = 128, DROPOUT(0.2), CAUSAL),
    ROW("dropout, most", LENGTHS(211, 130), HEADS(2, 1), .head_dim = 40, DROPOUT(0.99)),
    ROW("dropout, next to none", LENGTHS(97, 230), HEADS(2, 2), .head_dim = 128, DROPOUT(0x1p-16)),
    ROW("dropout, a seed alone", LENGTHS(49, 51), .num_seed_words = 2),
    ROW("dropout, a window, softcap", LENGTHS(259, 301), HEADS(2, 1), .head_dim = 72, DROPOUT(0.2),
        WINDOW(77, 21), .softcap = 5),
    ROW("dropout, alibi, bands", LENGTHS(301, 259), .batch = 2, HEADS(2, 2), .head_dim = 32, .bands_batch = 2,
        .num_bands = 5, ALIBI(1), DROPOUT(0.1)),
    ROW("dropout, bias, sinks", LENGTHS(203, 211), .batch = 2, HEADS(4, 1), .head_dim = 16, BIAS(1, 4, 203),
        DROPOUT(0.4), .num_sinks = 2),
    ROW("dropout, mask of keys", LENGTHS(97, 330), .batch = 2, HEADS(2, 2), .head_dim = 96, MASK(2, 1, 1),
        DROPOUT(0.1)),
    TAGGED("dropout, bias of keys", CASE_QUICK, LENGTHS(201, 360), .batch = 3, HEADS(2, 1), .head_dim = 64,
           BIAS(3, 1, 1), DROPOUT(0.1)),
    ROW("dropout, alibi, mask of keys", LENGTHS(330, 270), .batch = 2, HEADS(2, 2), .head_dim = 128, ALIBI(1),
        MASK(2, 1, 1), DROPOUT(0.3)),
    ROW("dropout, bias in boxes", LENGTHS(201, 272), .batch = 2, HEADS(2, 1), .head_dim = 64, BIAS(1, 2, 201),
        DROPOUT(0.1)),
    ROW("dropout, wide", LENGTHS(130, 141), HEADS(2, 1), .head_dim = 256, DROPOUT(0.1), CAUSAL),
    ROW("dropout, long", LENGTHS(530, 517), HEADS(2, 2), .head_dim = 64, DROPOUT(0.1), CAUSAL),
    STRIDED("dropout, everything, strided", CASE_QUICK, LENGTHS(237, 267), .batch = 2, HEADS(4, 2),
            .head_dim = 80, .bands_batch = 2, .num_bands = 3, ALIBI(2), BIAS(1, 4, 237), DROPOUT(0.15),
            WINDOW(101, 37), .softcap = 4, .scale = -0.6, .num_sinks = 2, .deterministic = 1),

    /* Of many column blocks that rows see whole, behind and before others. */
    ROW("runs", LENGTHS(140, 1100), HEADS(2, 1), .head_dim = 128),
    ROW("runs, causal", LENGTHS(210, 1190), HEADS(2, 1), .head_dim = 128, CAUSAL, .num_sinks = 1),
    ROW("runs, a window", LENGTHS(330, 1300), HEADS(1, 1), .head_dim = 120, WINDOW(700, 50)),
    ROW("runs, bias of keys", LENGTHS(150, 800), .batch = 2, HEADS(1, 1), .head_dim = 128, BIAS(2, 1, 1),
        .constant_bias = 1),
    ROW("runs, bias of keys, a window", LENGTHS(200, 900), HEADS(2, 1), .head_dim = 96, BIAS(1, 2, 1),
        WINDOW(500, 30), .constant_bias = 1),
    ROW("long runs", LENGTHS(70, 4250), HEADS(1, 1), .head_dim = 128),
    ROW("long runs, causal", LENGTHS(70, 8300), .head_dim = 128, CAUSAL),
    ROW("long runs, a window", LENGTHS(70, 8400), .head_dim = 128, WINDOW(4100, 33)),
    FILLED("long runs, large", FILL_LARGE, LENGTHS(40, 4200), .head_dim = 128),

    /* Sinks. */
    ROW("1 sink", LENGTHS(81, 75), HEADS(2, 2), .num_sinks = 1),
    ROW("3 sinks", LENGTHS(81, 75), .batch = 2, HEADS(4, 2), .num_sinks = 3, CAUSAL),
    ROW("8 sinks", LENGTHS(33, 118), HEADS(3, 1), .num_sinks = 8),
    TAGGED("sinks, hidden rows", CASE_QUICK, LENGTHS(121, 45), HEADS(2, 1), .num_sinks = 3, CAUSAL),
    ROW("sinks, window, hidden rows", LENGTHS(139, 73), HEADS(2, 2), .num_sinks = 1, WINDOW(9, 4)),

    TAGGED("row sinks", CASE_QUICK, LENGTHS(141, 163), .batch = 2, HEADS(4, 2), .head_dim = 24, ROW_SINKS(2)),
    TAGGED("row sinks, hidden rows", CASE_QUICK, LENGTHS(211, 103), HEADS(2, 1), .head_dim = 64, ROW_SINKS(1),
           CAUSAL),
    ROW("row sinks, sinks, bands", LENGTHS(301, 259), .batch = 2, HEADS(2, 2), .head_dim = 32, .bands_batch = 2,
        .num_bands = 5, ROW_SINKS(3), .num_sinks = 2),
    ROW("row sinks, wide", LENGTHS(130, 141), HEADS(2, 1), .head_dim = 200, ROW_SINKS(1), DLSE(1), CAUSAL),
    FILLED("row sinks, large", FILL_LARGE, LENGTHS(75, 101), .batch = 2, HEADS(2, 1), .head_dim = 64,
           ROW_SINKS(2)),
    STRIDED("row sinks, strided", CASE_QUICK, LENGTHS(137, 167), .batch = 2, HEADS(4, 2), .head_dim = 80,
            ROW_SINKS(2), .num_sinks = 1, WINDOW(61, 7), .softcap = 4, .scale = -0.6, .deterministic = 1,
            DLSE(2)),
    TAGGED("row sinks, no keys", CASE_QUICK, LENGTHS(5, 0), .batch = 2, ROW_SINKS(3)),
    TAGGED("row sinks, no queries", CASE_QUICK, LENGTHS(0, 4), ROW_SINKS(1)),

    /* Losses that depend on lse. */
    TAGGED("dlse", CASE_QUICK, LENGTHS(141, 163), .batch = 3, HEADS(4, 2), .head_dim = 24, DLSE(3)),
    TAGGED("dlse, sinks, hidden rows", CASE_QUICK, LENGTHS(211, 103), .batch = 2, HEADS(2, 1), .head_dim = 64,
           DLSE(1), CAUSAL, .num_sinks = 2),
    ROW("dlse, window, softcap", LENGTHS(259, 301), HEADS(2, 2), .head_dim = 128, DLSE(1), WINDOW(77, 21),
        .softcap = 5),
    ROW("dlse, bands", LENGTHS(301, 259), .batch = 2, HEADS(2, 2), .head_dim = 32, .bands_batch = 2,
        .num_bands = 5, DLSE(2), .num_sinks = 1),
    ROW("dlse, wide", LENGTHS(130, 141), HEADS(2, 1), .head_dim = 200, DLSE(1), CAUSAL),
    FILLED("dlse, large", FILL_LARGE, LENGTHS(75, 101), .batch = 2, HEADS(2, 1), .head_dim = 64, DLSE(2)),
    STRIDED("dlse, everything, strided", CASE_QUICK, LENGTHS(237, 267), .batch = 2, HEADS(4, 2), .head_dim = 80,
            DLSE(2), .bands_batch = 2, .num_bands = 3, ALIBI(2), BIAS(1, 4, 237), DROPOUT(0.15),
            WINDOW(101, 37), .softcap = 4, .scale = -0.6, .num_sinks = 2, .deterministic = 1),
    TAGGED("dlse, no keys, sinks", CASE_QUICK, LENGTHS(5, 0), .batch = 2, DLSE(2), .num_sinks = 3),
    TAGGED("dlse, no batch", CASE_QUICK, LENGTHS(3, 4), .batch = 0, DLSE(1)),

    /* Data that is not nice, where the order of sums and the size of numbers show. */
    FILLED("large", FILL_LARGE, LENGTHS(75, 101), .head_dim = 64),
    FILLED("large, causal", FILL_LARGE, LENGTHS(111, 98), .head_dim = 40, CAUSAL),
    FILLED("large, softcap", FILL_LARGE, LENGTHS(75, 101), .head_dim = 32, .softcap = 20),
    /* dp is delta, and the softcap is reached: both factors of a gradient are 0, and err. (In f32 these
     * softcaps times their reciprocals are not 1.) */
    FILLED("large, softcap, a column a row", FILL_LARGE, LENGTHS(140, 140), HEADS(2, 1), .head_dim = 2,
           WINDOW(0, 0), .softcap = 3.7),
    FILLED("large, softcap, a column a row, d64", FILL_LARGE, LENGTHS(140, 140), HEADS(2, 1), .head_dim = 64,
           WINDOW(0, 0), .softcap = 47),
    /* o is v, of which in f32 the smallest are beside others that set their scale. */
    FILLED("lognormal, a column a row", FILL_LOGNORMAL, LENGTHS(500, 500), .head_dim = 128, WINDOW(0, 0)),
    FILLED("large, sinks", FILL_LARGE, LENGTHS(50, 75), HEADS(2, 1), .head_dim = 32, .num_sinks = 2),
    FILLED("lognormal", FILL_LOGNORMAL, LENGTHS(103, 90), .head_dim = 64),
    FILLED("lognormal, causal", FILL_LOGNORMAL, LENGTHS(103, 131), HEADS(2, 1), .head_dim = 48, CAUSAL),

    /* Strides. */
    STRIDED("strided", CASE_QUICK, LENGTHS(45, 51), .batch = 2, HEADS(4, 2), .head_dim = 19),
    STRIDED("strided, causal", 0, LENGTHS(130, 105), .batch = 2, HEADS(2, 2), .head_dim = 64, CAUSAL),
    STRIDED("strided, one query", 0, LENGTHS(1, 77), .batch = 3, HEADS(3, 1), .head_dim = 33, CAUSAL),
    REVERSED("reversed", CASE_QUICK, LENGTHS(137, 141), .batch = 2, HEADS(4, 2), .head_dim = 40, CAUSAL),
    REVERSED("reversed, d128", 0, LENGTHS(201, 133), HEADS(2, 1), .head_dim = 128, BANDS(3), .num_sinks = 1),

    /* All at once. */
    ROW("everything", LENGTHS(123, 167), .batch = 2, HEADS(4, 2), .head_dim = 80, WINDOW(61, 7), .softcap = 9,
        .scale = 0.4, .num_sinks = 3),
    STRIDED("everything, strided", CASE_QUICK, LENGTHS(117, 67), .batch = 2, HEADS(6, 2), .head_dim = 40,
            WINDOW(25, 0), .softcap = 4, .scale = -0.6, .num_sinks = 2, .deterministic = 1),
    /* Enough blocks that threads of the CPU's backward wait for each other, for the thread sanitizer to see. */
    TAGGED("several hands", CASE_QUICK, LENGTHS(530, 520), .head_dim = 3, CAUSAL),
    ROW("long rows", LENGTHS(3, 1301), .head_dim = 24),
    ROW("long columns", LENGTHS(1301, 3), .head_dim = 24),
    ROW("long, windowed", LENGTHS(701, 733), .head_dim = 32, WINDOW(40, 0)),
    TAGGED("long, window on both sides", CASE_QUICK, LENGTHS(530, 701), HEADS(4, 2), .head_dim = 64,
           WINDOW(150, 70)),
    ROW("long, window, hidden rows", LENGTHS(701, 300), HEADS(2, 2), .head_dim = 64, .num_sinks = 1,
        WINDOW(100, 20)),

    /* Few rows of up to eight heads that share keys: the CPU's forward has products of all of them at once,
     * where there are tasks enough. */
    TAGGED("heads at once", CASE_QUICK, LENGTHS(2, 2100), .batch = 3, HEADS(28, 4), .head_dim = 8, CAUSAL),
    ROW("heads at once, everything", LENGTHS(3, 2100), .batch = 4, HEADS(15, 3), .head_dim = 40,
        WINDOW(1500, 1), BIAS(4, 15, 3), ALIBI(1), DROPOUT(0.2), .softcap = 7, .num_sinks = 2),
    STRIDED("heads at once, several rows", 0, LENGTHS(9, 2100), .batch = 6, HEADS(8, 2), .head_dim = 24,
            KEY_LENGTHS(6)),

    /* Few columns: the CPU's backward cuts rows into spans. */
    TAGGED("spans", CASE_QUICK, LENGTHS(1100, 70), HEADS(2, 1), .head_dim = 24, CAUSAL, DLSE(1),
           .num_sinks = 1),
    ROW("spans, bias", LENGTHS(2053, 131), .batch = 2, .head_dim = 24, BIAS(1, 1, 2053), ALIBI(1)),
    ROW("no spans, keys", LENGTHS(1041, 131), .batch = 2, .head_dim = 40, BIAS(2, 1, 1), ALIBI(2),
        DROPOUT(0.3)),
    STRIDED("spans, bands", 0, LENGTHS(530, 390), HEADS(4, 1), .head_dim = 72, BANDS(5), .softcap = 6),
    STRIDED("spans, window", 0, LENGTHS(613, 250), .batch = 2, HEADS(6, 1), .head_dim = 136, WINDOW(40, 9),
            KEY_LENGTHS(2)),

    /* For benchmarks. */
    TAGGED("d64", CASE_SPEED, LENGTHS(2048, 2048), HEADS(8, 8), .head_dim = 64),
    TAGGED("d64 causal", CASE_SPEED, LENGTHS(2048, 2048), HEADS(8, 8), .head_dim = 64, CAUSAL),
    TAGGED("d128", CASE_SPEED, LENGTHS(2048, 2048), HEADS(8, 8), .head_dim = 128),
    TAGGED("d128 causal", CASE_SPEED, LENGTHS(2048, 2048), HEADS(8, 8), .head_dim = 128, CAUSAL),
    TAGGED("d128 grouped", CASE_SPEED, LENGTHS(2048, 2048), HEADS(8, 2), .head_dim = 128, CAUSAL),
    TAGGED("d128 window", CASE_SPEED, LENGTHS(4096, 4096), HEADS(8, 8), .head_dim = 128, WINDOW(512, 0)),
    TAGGED("d128 short", CASE_SPEED, LENGTHS(300, 300), .batch = 4, HEADS(8, 8), .head_dim = 128),
    TAGGED("d64 long", CASE_SPEED, LENGTHS(65536, 65536), .head_dim = 64),
};

const fa_case *fa_cases(size_t *num_cases) {
  *num_cases = sizeof cases / sizeof *cases;
  return cases;
}

fa_case fa_case_in(const fa_case *c, fa_dtype dtype) {
  fa_case result = *c;
  result.problem.dtype = dtype;
  if (c->problem.bias_heads > 0 && c->problem.bias_dtype != FA_DTYPE_U8)
    result.problem.bias_dtype = c->tags & CASE_F32_BIAS ? FA_DTYPE_F32 : dtype;
  return result;
}

static int64_t random_small_length(fa_random *random) {
  double kind = random_uniform(random);
  if (kind < 0.01) return 0;
  if (kind < 0.35) return random_integer(random, 1, 9);
  if (kind < 0.80) return random_integer(random, 10, 70);
  if (kind < 0.95) return 16 * random_integer(random, 1, 13) + random_integer(random, -1, 1);
  return random_integer(random, 200, 420);
}

/* Half of those that have grown are multiples of growth. */
static int64_t random_length(fa_random *random, int64_t growth) {
  const int64_t length = random_small_length(random) * growth;
  if (growth == 1 || length == 0 || random_uniform(random) < 0.5) return length;
  return length - random_integer(random, 1, growth - 1);
}

static int64_t random_head_dim(fa_random *random) {
  static const int64_t usual[] = {8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 256};
  double kind = random_uniform(random);
  if (kind < 0.25) return random_integer(random, 1, 9);
  if (kind < 0.70) return usual[random_integer(random, 0, sizeof usual / sizeof *usual - 1)];
  return random_integer(random, 1, 256);
}

static int64_t random_window(fa_random *random, int64_t length) {
  double kind = random_uniform(random);
  if (kind < 0.45) return FA_UNBOUNDED;
  if (kind < 0.60) return 0;
  if (kind < 0.80) return random_integer(random, 1, 9);
  return random_integer(random, 0, length + 5);
}

/* So many batches, or heads, are left of a problem; tensors that have something for each, too. */
static void keep_batches(fa_problem *p, int64_t batch) {
  int64_t *const lengths[] = {&p->bands_batch, &p->alibi_batch, &p->bias_batch, &p->dlse_batch,
                              &p->lengths_batch};
  for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
    if (*lengths[i] > 1) *lengths[i] = batch;
  p->batch = batch;
}
static void keep_kv_heads(fa_problem *p, int64_t num_kv_heads) {
  p->num_heads = p->num_heads / p->num_kv_heads * num_kv_heads;
  p->num_kv_heads = num_kv_heads;
  if (p->bias_heads > 1) p->bias_heads = p->num_heads;
}

/* What a random case may have beside its sizes and its window, and how often a small one has it. */
enum {
  SCALE,
  SOFTCAP,
  SINKS,
  DETERMINISTIC,
  BANDS_OF_ROWS,
  SLOPES,
  BIAS_OR_MASK,
  DROPPED,
  SINKS_OF_ROWS,
  DLSE_OF_ROWS,
  LENGTHS_OF_KEYS,
  OTHER_FILL,
  GAPS,
  NUM_OPTIONS
};
static const double shares[NUM_OPTIONS] = {0.3, 0.25, 0.3, 0.2, 0.25, 0.2, 0.2, 0.2, 0.15, 0.2, 0.2, 0.3, 0.3};

static void add_option(fa_case *c, int option, fa_random *random) {
  static const fa_dtype types[] = {FA_DTYPE_F32, FA_DTYPE_U8};
  fa_problem *p = &c->problem;
  int64_t kind;
  switch (option) {
    case SCALE: p->scale = random_normal(random) / sqrt((double)p->head_dim); break;
    case SOFTCAP: p->softcap = exp(random_normal(random) + 1); break;
    case SINKS: p->num_sinks = random_integer(random, 1, 4); break;
    case DETERMINISTIC: p->deterministic = 1; break;
    case BANDS_OF_ROWS:
      p->num_bands = random_integer(random, 1, 12);
      p->bands_batch = random_uniform(random) < 0.5 ? 1 : p->batch;
      p->lengths_batch = 0; /* which have no place beside bands */
      break;
    case SLOPES:
      p->alibi_batch = random_uniform(random) < 0.5 ? 1 : p->batch;
      p->constant_alibi_slopes = random_uniform(random) < 0.5;
      break;
    case BIAS_OR_MASK:
      kind = random_integer(random, 0, 2);
      p->bias_dtype = kind == 2 ? p->dtype : types[kind];
      p->bias_batch = random_uniform(random) < 0.5 ? 1 : p->batch;
      p->bias_heads = random_uniform(random) < 0.5 ? 1 : p->num_heads;
      p->bias_rows = random_uniform(random) < 0.4 ? 1 : p->seqlen_q;
      p->constant_bias = random_uniform(random) < 0.2;
      break;
    case DROPPED:
      p->num_seed_words = 2;
      p->dropout = random_uniform(random) < 0.9 ? 0.6 * random_uniform(random) : 0;
      break;
    case SINKS_OF_ROWS: p->num_row_sinks = random_integer(random, 1, 3); break;
    case DLSE_OF_ROWS: p->dlse_batch = random_uniform(random) < 0.5 ? 1 : p->batch; break;
    case LENGTHS_OF_KEYS: p->lengths_batch = random_uniform(random) < 0.3 ? 1 : p->batch; break;
    case OTHER_FILL: c->fill = (fa_fill)random_integer(random, FILL_LARGE, FILL_LOGNORMAL); break;
    case GAPS: c->layout = LAYOUT_STRIDED; break;
  }
}

static void add_options(fa_case *c, fa_random *random) {
  for (int option = 0; option < NUM_OPTIONS; option++) {
    if (option == LENGTHS_OF_KEYS && c->problem.num_bands > 0) continue;
    if (random_uniform(random) < shares[option]) add_option(c, option, random);
  }
}

bool fa_case_may_be_rounded(const fa_case *c) {
  return c->problem.dtype == FA_DTYPE_F32 && c->fill == FILL_NORMAL;
}

/* A GPU has kernels for few options at a time, and for f32 that is rounded. */
static void add_few_options(fa_case *c, fa_random *random) {
  static const int64_t head_dims[] = {64, 128};
  fa_problem *p = &c->problem;
  if (random_uniform(random) < 0.7) p->window_left = FA_UNBOUNDED;
  if (random_uniform(random) < 0.7) p->window_right = random_uniform(random) < 0.5 ? 0 : FA_UNBOUNDED;
  if (random_uniform(random) < 0.6) p->head_dim = head_dims[random_integer(random, 0, 1)];
  for (int64_t left = random_integer(random, 0, 4); left > 0; left--) {
    const int option = (int)random_integer(random, 0, NUM_OPTIONS - 1);
    if (option != LENGTHS_OF_KEYS || p->num_bands == 0) add_option(c, option, random);
  }
  if (fa_case_may_be_rounded(c) && random_uniform(random) < 0.5) p->precision = FA_PRECISION_DEFAULT;
}

fa_case fa_case_random(uint64_t seed, uint64_t index, int64_t growth) {
  fa_random stream = random_stream(seed, index), *random = &stream;
  fa_case result = {.name = "random"};
  fa_problem *p = &result.problem;
  fa_problem_init(p);
  p->dtype = (fa_dtype)random_integer(random, 0, FA_NUM_FLOATS - 1);
  p->batch = random_uniform(random) < 0.01 ? 0 : random_integer(random, 1, 2 + growth);
  p->seqlen_q = random_length(random, growth);
  p->seqlen_k = random_uniform(random) < 0.3 ? p->seqlen_q : random_length(random, growth);
  p->num_kv_heads = random_integer(random, 1, 2 + growth);
  p->num_heads = p->num_kv_heads * (random_uniform(random) < 0.5 ? 1 : random_integer(random, 2, 4));
  p->head_dim = random_head_dim(random);
  p->window_left = random_window(random, p->seqlen_k);
  p->window_right = random_window(random, p->seqlen_q);
  if (growth > 1 && random_uniform(random) < 0.8)
    add_few_options(&result, random);
  else
    add_options(&result, random);
  /* What the reference has to do stays small: batches, heads, then lengths give way; where they have grown, in
   * any order. */
  const double most = 800000.0 * (double)(growth * growth * growth);
  while ((double)(p->batch * p->num_heads * p->seqlen_q * p->seqlen_k * p->head_dim) > most) {
    const bool keeps_heads = growth > 1 && random_uniform(random) < 0.7;
    if (p->batch > 1 && !keeps_heads) {
      keep_batches(p, p->batch - 1);
    } else if (p->num_kv_heads > 1 && !keeps_heads) {
      keep_kv_heads(p, p->num_kv_heads - 1);
    } else {
      if (p->bias_rows > 1) p->bias_rows = p->bias_rows * 4 / 5;
      p->seqlen_q = p->seqlen_q * 4 / 5;
      p->seqlen_k = p->seqlen_k * 6 / 7;
    }
  }
  /* Some kernels copy a bias by boxes where its rows are multiples of 16 bytes. */
  if (p->bias_heads > 0 && random_uniform(random) < 0.5) p->seqlen_k = (p->seqlen_k + 15) / 16 * 16;
  return result;
}

bool fa_case_put_on_pages(fa_case *c, uint64_t seed, uint64_t index) {
  static const int64_t sizes[] = {1, 2, 3, 8, 16, 17, 32, 48, 64, 100, 128, 256};
  static const int64_t most_rows[] = {1, 4, 16, 80};
  fa_random stream = random_stream(seed, ~index), *random = &stream;
  fa_problem *p = &c->problem;
  if (p->batch == 0 || p->seqlen_q == 0 || p->seqlen_k == 0) return false;
  const int64_t rows = random_integer(random, 1, most_rows[random_integer(random, 0, 3)]);
  const int64_t more = rows < p->seqlen_q ? p->seqlen_q / rows : 1;
  const int64_t num_keys = p->seqlen_k * random_integer(random, 1, more < 16 ? more : 16);
  if (rows < p->seqlen_q) p->seqlen_q = rows;
  if (p->bias_rows > 1) p->bias_rows = p->seqlen_q;
  p->page_size = sizes[random_integer(random, 0, sizeof sizes / sizeof *sizes - 1)];
  if (p->page_size > num_keys) p->page_size = num_keys;
  p->max_pages = num_keys / p->page_size;
  p->num_pages = random_integer(random, p->max_pages, 2 * p->max_pages + 1);
  p->seqlen_k = p->max_pages * p->page_size;
  if (p->num_bands == 0 && random_uniform(random) < 0.6) p->lengths_batch = p->batch;
  /* With dropout a GPU has no kernel that finds pages. */
  if (random_uniform(random) < 0.8) p->dropout = 0, p->num_seed_words = 0;
  return true;
}
