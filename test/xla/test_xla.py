"""The custom calls in XLA itself, through JAX: over the case table (test/c/cases.c) forward and gradients of f64 against
JAX's own autodiff, and of other types the bits that the library gives by itself; what refuses bad calls, the registration
and the StableHLO of EXLA, vmap, and on a GPU command buffers.

    python3 test/xla/test_xla.py [--platform cpu|cuda] [--quick] [--library ...] [--harness ...]

Needs JAX; without it says so and tests nothing. HARNESS is the C tests' case table, oracle and tolerance.
"""
import argparse
import collections
import ctypes
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Record a single custom call too; and waste no time on making the reference fast.
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), "--xla_gpu_graph_min_graph_size=1",
                                    "--xla_backend_optimization_level=0"])
try:
    import jax
except ImportError:
    print("test-xla: skipped, JAX is not installed here (pip install jax)")
    sys.exit(0)

import jax.numpy as jnp
import numpy as np

import c_library
from jax_attention import (BACKWARD, FORWARD, PLATFORMS, Attention, attribute, device_events, handler, like, register,
                           transfers)

jax.config.update("jax_enable_x64", True)

TYPES = {"f32": np.float32, "f64": np.float64, "bf16": jnp.bfloat16, "f16": np.float16}
NUMBERS = {**TYPES, "s32": np.int32, "u32": np.uint32, "u8": np.uint8}
QUICK, SPEED = 1, 4  # fa_case_tag
SEED = 1

# ---- what passed -------------------------------------------------------------------------------------------------

passed, failures, lock = 0, [], threading.Lock()


def check(condition, text):
    global passed
    with lock:
        if condition:
            passed += 1
        else:
            failures.append(text)
            print("FAILED:", text, flush=True)


# ---- the C tests' table, oracle and tolerance: see test/c/cases.h, harness.h, tolerance.h ------------------------------

Case = c_library.structure((ctypes.c_char_p, "name"), (ctypes.c_uint, "tags"), (ctypes.c_int, "fill layout"),
                           (c_library.Problem, "problem"))
Values = c_library.structure((ctypes.POINTER(ctypes.c_double), " ".join(c_library.TENSORS)))
Tolerance = c_library.structure((Values, "exact bound"), (ctypes.c_double * len(c_library.TENSORS), "naive"))


class Harness:
    def __init__(self, path):
        functions = ctypes.CDLL(os.path.abspath(path))
        functions.fa_cases.restype = ctypes.POINTER(Case)
        functions.tolerance_new.restype, functions.values_made.restype = Tolerance, Values
        self.functions = functions

    def cases(self, quick):
        count = ctypes.c_size_t()
        table = self.functions.fa_cases(ctypes.byref(count))
        cases = [Case.from_buffer_copy(table[i]) for i in range(count.value)]
        return [case for case in cases if not case.tags & SPEED and (case.tags & QUICK or not quick)]

    def tolerance(self, case):
        """Inputs that tensors of the case's type hold, what the C oracle makes of them in f64, and how far from it
        results may be."""
        return self.functions.tolerance_new(ctypes.byref(case), ctypes.c_uint64(SEED))

    def made(self, case):
        """The same inputs, and what the library makes of them by itself on the CPU."""
        return self.functions.values_made(ctypes.byref(case), ctypes.c_uint64(SEED), c_library.CPU)


class Expected:
    """A case's inputs, and what XLA is to make of them: in bits what the library makes of them by itself, which the C
    tests hold against the oracle, or within their tolerance what is exact."""

    def __init__(self, harness, case, in_bits):
        self.harness, self.case = harness, case
        self.tolerance = None if in_bits else harness.tolerance(case)
        self.values = harness.made(case) if in_bits else self.tolerance.exact

    def __enter__(self):
        return self

    def __exit__(self, *_):
        functions = self.harness.functions
        if self.tolerance:
            functions.tolerance_free(ctypes.byref(self.tolerance))
        else:
            functions.values_free(ctypes.byref(self.values))

    def array(self, name, shape):
        return array_of(self.values, name, shape)

    def check(self, name, got, exact=None):
        """exact: the C oracle's, where it is not given."""
        got, mine = np.asarray(got).astype(np.float64), self.array(name, got.shape)
        type_name = next(x for x, dtype in c_library.DTYPES.items() if dtype == self.case.problem.dtype)
        what = f"{self.case.name.decode()}, {type_name}: {name}"
        if not self.tolerance:
            # XLA's threads make f32 numbers below the smallest normal one 0.
            got, mine = (np.where(np.abs(x) < 2.0**-126, 0, x) for x in (got, mine))
            return check(np.array_equal(got, mine), f"{what}: not the bits that the library gives by itself")
        allowed = 2 * self.tolerance.naive[c_library.TENSORS.index(name)] + array_of(self.tolerance.bound, name, got.shape)
        share = largest_error(got, mine if exact is None else exact, allowed)
        check(share <= 1, f"{what}: the error is {share:.3g} of what is allowed")


def shapes_of(p):
    q, k = (p.batch, p.seqlen_q, p.num_heads, p.head_dim), (p.batch, p.seqlen_k, p.num_kv_heads, p.head_dim)
    sink, bands = (p.num_sinks, p.num_heads), (p.bands_batch, p.num_bands, 6)
    return dict(q=q, k=k, v=k, sink=sink, bands=bands, o=q, lse=(p.batch, p.num_heads, p.seqlen_q), dout=q, dq=q, dk=k, dv=k,
                dsink=sink)


def options_of(p):
    """The options that are not at their default."""
    options = {name: getattr(p, name) for name in ("scale", "softcap", "precision", "deterministic")}
    windows = {name: getattr(p, name) for name in ("window_left", "window_right")}
    return {**{name: value for name, value in options.items() if value != 0},
            **{name: value for name, value in windows.items() if value != c_library.UNBOUNDED}}


def array_of(values, name, shape):
    """A tensor as float64, in the memory of values."""
    return np.ctypeslib.as_array(getattr(values, name), shape) if np.prod(shape) else np.zeros(shape)


# ---- attention in JAX's own operations ------------------------------------------------------------------------------


def visible_in(bands, seqlen_q, seqlen_k, window_left, window_right):
    """[batch or 1, 1, seqlen_q, seqlen_k] of what rows see in bands [batch or 1, num_bands, 6]."""
    i, j = jnp.arange(seqlen_q)[:, None], jnp.arange(seqlen_k)
    words = jnp.moveaxis(bands.astype(jnp.int64 if jax.config.jax_enable_x64 else jnp.int32), 2, 0)
    q_begin, q_end, k_begin, k_end, left, right = words[..., None, None]
    left = left if window_left is None else jnp.minimum(left, window_left)
    right = right if window_right is None else jnp.minimum(right, window_right)
    ahead = j - i + q_end - k_end
    seen = (i >= q_begin) & (i < q_end) & (j >= k_begin) & (j < k_end) & (-ahead <= left) & (ahead <= right)
    return jnp.any(seen, axis=1)[:, None]


def plain(q, k, v, sink, bands=None, scale=0.0, softcap=0.0, window_left=None, window_right=None, **_):
    """(o, lse) by the header's formulas, differentiable everywhere, also where a row sees nothing."""
    (b, seqlen_q, h, d), (_, seqlen_k, num_kv_heads, _) = q.shape, k.shape
    k, v = (jnp.repeat(x, h // num_kv_heads, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (scale or 1 / d**0.5)
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    if bands is None:
        bands = jnp.array([[[0, seqlen_q, 0, seqlen_k, 2**31 - 1, 2**31 - 1]]])
    visible = visible_in(bands, seqlen_q, seqlen_k, window_left, window_right)
    if sink is not None:
        sinks = jnp.broadcast_to(sink.T[None, :, None, :], (b, h, seqlen_q, sink.shape[0]))
        scores = jnp.concatenate([scores, sinks], axis=3)
        visible = jnp.pad(visible, ((0, 0), (0, 0), (0, 0), (0, sink.shape[0])), constant_values=True)
    largest = jnp.max(jnp.where(visible, scores, -jnp.inf), axis=3, keepdims=True, initial=-jnp.inf)
    largest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0))
    exponentials = jnp.where(visible, jnp.exp(jnp.where(visible, scores - largest, 0)), 0)
    total = jnp.sum(exponentials, axis=3, keepdims=True)
    sees = total > 0
    p = exponentials / jnp.where(sees, total, 1)
    lse = jnp.where(sees, largest + jnp.log(jnp.where(sees, total, 1)), -jnp.inf)[..., 0]
    return jnp.einsum("bhqk,bkhd->bqhd", p[..., :seqlen_k], v), lse


def with_gradients(forward):
    """(o, lse, dq, dk, dv, dsink) of a function of q, k, v, sink and bands that gives o and lse."""

    def run(q, k, v, sink, dout, bands=None):
        (o, lse), pull = jax.vjp(lambda *inputs: forward(*inputs, bands), q, k, v, sink)
        return (o, lse, *pull((dout, jnp.zeros_like(lse))))

    return run


OUTPUTS = ("o", "lse", "dq", "dk", "dv", "dsink")


def named(results):
    return {name: np.asarray(x).astype(np.float64) for name, x in zip(OUTPUTS, results) if x is not None}


# ---- the tests ------------------------------------------------------------------------------------------------------


class Tests:
    def __init__(self, args):
        self.args, self.library, self.harness = args, c_library.Library(args.library), Harness(args.harness)
        self.attention = Attention(self.library, args.platform)
        self.device, self.host = jax.devices(args.platform)[0], jax.devices("cpu")[0]
        self.spies = []

    def put(self, x, dtype):
        return jax.device_put(np.asarray(x).astype(dtype), self.device)

    def random(self, *shapes, dtype=np.float32):
        generator = np.random.default_rng(SEED)
        return [self.put(generator.standard_normal(shape), dtype) for shape in shapes]

    def with_lse(self, **options):
        """q, k, v, sink, bands -> o and lse; o differentiates."""

        def run(q, k, v, sink, bands=None):
            lse = self.attention.forward(*map(jax.lax.stop_gradient, (q, k, v, sink)), bands, **options)[1]
            return self.attention(q, k, v, sink, bands, **options), lse

        return run

    # The case table.

    def table(self):
        self.for_all(self.check_case, self.cases())

    @staticmethod
    def for_all(check, cases):
        """On all processors: compiling and the C oracle, which take the time, leave Python to others."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(check, cases))

    def cases(self):
        cases = self.harness.cases(self.args.quick)
        taken = [case for case in cases if not self.has_score_tensors(case)
                 and not case.problem.lengths_batch and (self.takes_bands() or not case.problem.num_bands)]
        left = [case for case in cases if case.problem.num_bands] if not self.takes_bands() else []
        if left:
            print(f"EXCLUDED: {len(left)} cases with bands, which this platform does not take")
        return taken

    def takes_bands(self):
        return self.args.platform == "cpu"

    def check_case(self, case):
        options = options_of(case.problem)
        exact = jax.jit(with_gradients(lambda *inputs: plain(*inputs, **options)))
        run = jax.jit(with_gradients(self.with_lse(**options)))
        for type_name in TYPES:
            if self.args.platform == "cpu" or type_name != "f64":
                self.check_type(case, type_name, exact, run)

    def check_type(self, case, type_name, exact, run):
        p = case.problem
        p.dtype = c_library.DTYPES[type_name]
        in_bits = self.in_bits(p)
        missing = {"sink": not p.num_sinks, "bands": not p.num_bands}
        dtypes = [*[TYPES[type_name]] * 3, np.float32, TYPES[type_name], np.int32]
        with Expected(self.harness, case, in_bits) as expected:
            inputs = [None if missing.get(name) else expected.array(name, shapes_of(p)[name])
                      for name in ("q", "k", "v", "sink", "dout", "bands")]
            got = named(run(*(x if x is None else self.put(x, dtype) for x, dtype in zip(inputs, dtypes))))
            wanted = {} if in_bits else named(exact(*(x if x is None else jax.device_put(x, self.host) for x in inputs)))
            for name in got:
                expected.check(name, got[name], wanted.get(name))

    def in_bits(self, problem):
        """Whether results are compared in bits: not in f64, and not on a GPU, where dq is added up in any order."""
        return self.args.platform == "cpu" and problem.dtype != c_library.DTYPES["f64"]

    # Tensors that act on scores, and gradients by lse, by their names: f64 against the C oracle.

    @staticmethod
    def has_score_tensors(case):
        p = case.problem
        return p.alibi_batch or p.bias_heads or p.num_seed_words or p.dlse_batch or p.num_row_sinks

    def score_tensors(self):
        if self.args.platform != "cpu":
            return print("EXCLUDED: slopes, biases, dropout, gradients by lse and sinks of rows, which this platform does not take")
        self.harness.functions.fa_case_in.restype = Case
        cases = filter(self.has_score_tensors, self.harness.cases(self.args.quick))
        self.for_all(self.check_calls, [self.harness.functions.fa_case_in(ctypes.byref(case), c_library.DTYPES[type_name])
                                        for case in cases for type_name in TYPES])

    def check_calls(self, case):
        p, done = case.problem, {}
        options = {name: getattr(p, name) for name in ("dropout", "constant_bias", "constant_alibi_slopes") if getattr(p, name)}
        with Expected(self.harness, case, self.in_bits(p)) as expected:
            for which in ("forward", "backward"):
                inputs, outputs = (self.library.tensors(which, p, role) for role in ("input", "output"))
                operands = {name: done[name] if name in done else self.put(expected.array(name, shape), NUMBERS[dtype])
                            for name, (dtype, shape) in inputs.items()}
                results = [jax.ShapeDtypeStruct(shape, NUMBERS[dtype]) for dtype, shape in outputs.values()]
                call = jax.jit(lambda x: self.attention.call(which, x, results, {**options_of(p), **options}))
                done.update(zip(outputs, call(operands)))
                for name in outputs:
                    expected.check(name, done[name])

    # vmap.

    def vmap(self):
        q, dout, k, v = self.random((3, 2, 7, 4, 16), (3, 2, 7, 4, 16), (3, 2, 9, 2, 16), (3, 2, 9, 2, 16))
        sink, = self.random((2, 4))
        run = with_gradients(self.with_lse(window_right=0, deterministic=1))
        together = jax.jit(jax.vmap(run, in_axes=(0, 0, 0, None, 0)))(q, k, v, sink, dout)
        for i in range(3):
            alone = jax.jit(run)(q[i], k[i], v[i], sink, dout[i])
            for name, x, y in zip(OUTPUTS, together, alone):
                check(np.array_equal(x[i], y), f"vmap: {name} of element {i} differs from its own call")

    # Masks whose contents change, in one compiled program.

    def masks(self):
        if not self.takes_bands():
            return print("EXCLUDED: masks, as this platform does not take bands")
        q, dout, k, v = self.random((2, 37, 4, 16), (2, 37, 4, 16), (2, 41, 2, 16), (2, 41, 2, 16))
        run = jax.jit(with_gradients(self.with_lse(deterministic=1)))
        expected = jax.jit(with_gradients(plain))
        unbounded = 2**31 - 1
        for bands in ([[0, 20, 0, 30, unbounded, 0], [20, 37, 30, 41, unbounded, unbounded]],
                      [[0, 37, 0, 9, unbounded, unbounded], [9, 37, 9, 41, unbounded, 0]],
                      [[-5, 99, -7, 9, 3, unbounded], [12, 12, 0, 41, unbounded, unbounded]]):
            # What lies outside of the problem is left off.
            inside = np.clip(bands, [0] * 4 + [-unbounded] * 2, [37, 37, 41, 41] + [unbounded] * 2)
            given, inside = (self.put([x], np.int32) for x in (bands, inside))
            for name, x, y in zip(OUTPUTS, run(q, k, v, None, dout, given), expected(q, k, v, None, dout, inside)):
                if x is not None:
                    check(np.allclose(x, y, rtol=1e-3, atol=1e-4, equal_nan=False), f"masks: {name} is another")
        check(run._cache_size() == 1, "masks: one program for all contents")

    # Caches, whose lengths and pages change, in one compiled program.

    def caches(self):
        if not self.takes_bands():
            return print("EXCLUDED: caches, as this platform takes no key lengths")
        q, k, v = self.random((2, 3, 4, 16), (2, 24, 2, 16), (2, 24, 2, 16))

        def attend(q, k, v, **more):
            b, s, h, _ = q.shape
            results = [like(q), jax.ShapeDtypeStruct((b, h, s), np.float32)]
            return self.attention.call("forward", dict(q=q, k=k, v=v, **more), results, dict(window_right=0))[0]

        in_order = jax.jit(lambda q, k, v, lengths: attend(q, k, v, key_lengths=lengths))
        on_pages = jax.jit(lambda q, k, v, table, lengths: attend(q, k, v, page_table=table, key_lengths=lengths))
        for lengths in ([24, 24], [3, 17], [0, 1]):
            o = in_order(q, k, v, self.put(lengths, np.int32))
            for i, length in enumerate(lengths):
                alone = attend(q[i:i + 1], k[i:i + 1, :length], v[i:i + 1, :length]) if length else np.zeros_like(o[i:i + 1])
                check(np.allclose(o[i:i + 1], alone, rtol=1e-5, atol=1e-6), f"caches: a length of {length} is another")
            pages = [x.reshape(6, 8, 2, 16) for x in (k, v)]
            for order in ([0, 1, 2, 3, 4, 5], [5, 1, 3, 0, 4, 2]):
                shuffled = [self.put(np.asarray(x)[np.argsort(order)], np.float32) for x in pages]
                paged = on_pages(q, *shuffled, self.put(np.reshape(order, (2, 3)), np.int32), self.put(lengths, np.int32))
                check(np.array_equal(paged, o), f"caches: pages {order} give other bits")
        check(in_order._cache_size() == 1 and on_pages._cache_size() == 1, "caches: one program each")

    # Bad calls.

    def bad_calls(self):
        q, o = (np.zeros((2, 5, 4, 8), np.float32) for _ in range(2))
        k = np.zeros((2, 6, 2, 8), np.float32)
        lse, sink = np.zeros((2, 4, 5), np.float32), np.zeros((3, 4), np.float32)
        o_and_lse, pages = [o, lse], np.zeros((3, 4, 2, 8), np.float32)
        for expected, which, operands, results, options in [
                ("k: expected head_dim 8 as in q, got 7", FORWARD, [q, k[..., :7], k], o_and_lse, {}),
                ("v: expected a tensor of shape [batch, seqlen_k, num_kv_heads, head_dim], got none",
                 FORWARD, [q, k], o_and_lse, {}),
                ("operands: expected as many as there are names, 3, got 4", FORWARD, [q, k, k, sink], o_and_lse,
                 dict(operands="q,k,v")),
                ("operands: expected their names, as \"q,k,v\", got none", FORWARD, [q, k, k], o_and_lse,
                 dict(operands=None)),
                ("operands: expected names of tensors, got w", FORWARD, [q, k, k], o_and_lse, dict(operands="q,k,w")),
                ("operands: expected names of tensors", FORWARD, [q, k, k], o_and_lse, dict(operands="q,k,")),
                ("operands: expected names of tensors, got q" + 62 * "x", FORWARD, [q, k, k], o_and_lse,
                 dict(operands="q" + 90 * "x")),
                ("operands: expected every name once, got k", FORWARD, [q, k, k], o_and_lse, dict(operands="q,k,k")),
                ("operands: expected a string, got an attribute of another type", FORWARD, [q, k, k], o_and_lse,
                 dict(operands=3)),
                ("dout: expected none, as it is no input of the forward, got a tensor", FORWARD, [q, k, k, q], o_and_lse,
                 dict(operands="q,k,v,dout")),
                ("sink: expected an operand of that name, got a shape alone", FORWARD, [q, k, k], o_and_lse,
                 dict(sink=np.array([3, 4]))),
                ("q: expected rank 4, [batch, seqlen_q, num_heads, head_dim], got rank 5",
                 FORWARD, [q[None], k, k], o_and_lse, {}),
                ("k: expected type f32 as in q, got f16", FORWARD, [q, k.astype(np.float16), k], o_and_lse, {}),
                ("q: expected type f32, f64, bf16 or f16, got s32",
                 FORWARD, [q.astype(np.int32), k, k], o_and_lse, {}),
                ("sink: expected num_heads 4 as in q, got 5", FORWARD, [q, k, k, np.zeros((3, 5), np.float32)],
                 o_and_lse, {}),
                ("lse: expected f32[2, 4, 5], got no such result", FORWARD, [q, k, k], [o], {}),
                ("o: expected f32[2, 5, 4, 8], got f32[2, 6, 2, 8]", FORWARD, [q, k, k], [k, lse], {}),
                ("lse: expected f32[2, 4, 5], got f64[2, 4, 5]", FORWARD, [q, k, k], [o, lse.astype(np.float64)], {}),
                ("workspace: expected u8[n], got another type or rank", FORWARD, [q, k, k], [o, lse, lse], {}),
                ("results: expected at most 3, got 4", FORWARD, [q, k, k], [o, lse, lse, lse], {}),
                ("dsink: expected f32[3, 4], got no such result", BACKWARD, [o, q, k, k, o, lse, sink], [q, k, k], {}),
                ("lse: expected a tensor of shape [batch, num_heads, seqlen_q], got none",
                 BACKWARD, [o, q, k, k, o], [q, k, k], {}),
                ("causal: expected the name of an option or of an operand, got an unknown attribute",
                 FORWARD, [q, k, k], o_and_lse, dict(causal=True)),
                ("window_right: expected a whole number of at least 0, or infinity, got -1",
                 FORWARD, [q, k, k], o_and_lse, dict(window_right=-1)),
                ("softcap: expected a number from 0 to 1e+30, got nan",
                 FORWARD, [q, k, k], o_and_lse, dict(softcap=float("nan"))),
                ("precision: expected one of highest, high, default, got exact",
                 FORWARD, [q, k, k], o_and_lse, dict(precision="exact")),
                ("k: expected head_dim 8 as in q, got 4", FORWARD, [q, k.ravel(), k], o_and_lse,
                 dict(k=np.array([2, 12, 2, 4]))),
                ("k: expected 768 bytes for its shape and type, got 764", FORWARD, [q, k.ravel()[1:], k], o_and_lse,
                 dict(k=np.array([2, 6, 2, 8]))),
                ("k: expected rank 4, [batch, seqlen_k, num_kv_heads, head_dim], got rank 1",
                 FORWARD, [q, k.ravel(), k], o_and_lse, {}),
                ("k: expected a shape, an array of i64, got an attribute of another type",
                 FORWARD, [q, k.ravel(), k], o_and_lse, dict(k=7)),
                ("o: expected f32[2, 5, 4, 8], got f32[319]", FORWARD, [q, k, k], [o.ravel()[1:], lse], {}),
                ("scale: expected an f64, f32, i64, i32, i1 or a string, got an attribute of another type",
                 FORWARD, [q, k, k], o_and_lse, dict(scale=np.arange(2))),
                # What is refused is the pass, and not the shape of dk, which no pass has.
                ("page_table: expected none in the backward, got a tensor", BACKWARD,
                 [o, q, pages, pages, o, lse, np.zeros((2, 2), np.int32)], [q, pages, pages],
                 dict(operands="dout,q,k,v,o,lse,page_table"))]:
            self.expect_error(f"{which}: {expected}", which, operands, results, options)
        # Results that XLA lays over operands, which are read until the end.
        backward, gradients = [o, q, k, k, o, lse], [q, k, k]
        for expected, which, operands, results, aliases in [
                ("o: expected memory of its own, got that of q", FORWARD, [q, k, k], o_and_lse, {0: 0}),
                ("dq: expected memory of its own, got that of dout", BACKWARD, backward, gradients, {0: 0}),
                ("dk: expected memory of its own, got that of k", BACKWARD, backward, gradients, {2: 1}),
                ("dv: expected memory of its own, got that of v", BACKWARD, backward, gradients, {3: 2}),
                ("dq: expected memory of its own, got that of o", BACKWARD, backward, gradients, {4: 0})]:
            self.expect_error(f"{which}: {expected}", which, operands, results, {}, input_output_aliases=aliases)
        if self.args.platform == "cuda":  # f32 needs a workspace
            self.expect_error(f"{FORWARD}: workspace: expected at least", FORWARD, [q, k, k], o_and_lse, {})
            self.expect_error(f"{FORWARD}: dtype: expected f32, bf16 or f16 on CUDA, got f64", FORWARD,
                              [x.astype(np.float64) for x in (q, k, k)], [x.astype(np.float64) for x in o_and_lse], {})

    def expect_error(self, expected, which, operands, results, options, **of_call):
        """Operands have the names of the pass's, in the order of the header, unless the options say so."""
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
        names = {FORWARD: "q,k,v,sink", BACKWARD: "dout,q,k,v,o,lse,sink"}[which].split(",")[:len(operands)]
        attributes = {name: attribute(value) for name, value in {"operands": ",".join(names), **options}.items()
                      if value is not None}
        got = "no error"
        try:
            operands = [self.put(x, x.dtype) for x in operands]
            jax.block_until_ready(jax.jit(lambda *x: jax.ffi.ffi_call(which, shapes, **of_call)(*x, **attributes))(*operands))
        except Exception as error:  # XLA's own kind has no public name
            got = str(error)
        check(expected in got, f"bad call: expected {expected!r}, got {got!r}")

    # Tensors without elements: sinks of which there are none, and batches that lie at one place, being empty.

    def empty(self):
        q, k, v, dout = self.random((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8), (2, 5, 4, 8))
        run = jax.jit(with_gradients(self.with_lse(window_right=0, deterministic=1)))
        for name, x, y in zip(OUTPUTS, run(q, k, v, None, dout), run(q, k, v, self.put(np.zeros((0, 4)), np.float32), dout)):
            check((x is None and y.shape == (0, 4)) or np.array_equal(x, y), f"0 sinks: {name} is another")
        none = run(*(x[:0] for x in (q, k, v)), None, dout[:0])
        check([x.shape[0] for x in none if x is not None and x.ndim > 0] == [0] * 5, "a batch of none has results")
        shapes = [like(x) for x in (q[:0], k[:0], v[:0])]
        operands = [x[:0] for x in (dout, q, k, v, dout)] + [self.put(np.zeros((0, 4, 5)), np.float32)]
        call = jax.ffi.ffi_call(BACKWARD, shapes, input_output_aliases={0: 0, 2: 1, 3: 2})
        check(len(jax.jit(lambda *x: call(*x, operands="dout,q,k,v,o,lse"))(*operands)) == 3, "a batch of none lies over itself")

    # Every way to write an attribute.

    def attributes(self):
        q, k, v = self.random(*3 * [(1, 6, 2, 8)])

        def run(**options):
            return np.asarray(jax.jit(lambda *x: self.attention.forward(*x, **options)[0])(q, k, v))

        unbounded = run()
        for expected, same in [(unbounded, [dict(window_left=c_library.UNBOUNDED), dict(window_left=np.inf),
                                            dict(scale=np.float32(0)), dict(precision="highest")]),
                               (run(window_right=0), [dict(window_right=np.int32(0)), dict(window_right=0.0),
                                                      dict(window_right=0, deterministic=True),
                                                      dict(window_right=0, deterministic="true")]),
                               (run(scale=0.5), [dict(scale=np.float32(0.5)), dict(scale=np.float64(0.5))])]:
            for options in same:
                check(np.array_equal(run(**options), expected), f"attributes: {options} changes the result")
        check(not np.array_equal(run(window_right=0), unbounded), "attributes: window_right changes nothing")
        shapes = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((1, 2, 6), q.dtype)]
        shapes += self.attention.workspace("forward", dict(q=q, k=k, v=v), {})
        turned = jax.jit(lambda *x: jax.ffi.ffi_call(FORWARD, shapes)(*x, operands="v,q,k")[0])(v, q, k)
        check(np.array_equal(turned, unbounded), "attributes: the order of operands changes the result")

    # Command buffers. A call that one has recorded is replayed without its handler.

    def command_buffers(self):
        if self.args.platform != "cuda":
            return
        calls = []
        for target in (FORWARD, BACKWARD):
            self.spy_on(target, target + "_counted", lambda frame: calls.append(target))
        counted = Attention(self.library, self.args.platform, suffix="_counted")
        inputs = self.random((2, 130, 4, 64), (2, 130, 2, 64), (2, 130, 2, 64), (3, 4), (2, 130, 4, 64))
        options = dict(window_right=0, deterministic=1)

        def run(attention):
            return jax.jit(with_gradients(lambda *x: (attention(*(None if y is None else jnp.tanh(y) for y in x), **options), jnp.zeros(()))))

        recorded, alone = run(counted), run(self.attention)(*inputs)
        counts = []
        for _ in range(30):
            before = len(calls)
            results = [np.asarray(x) for x in jax.block_until_ready(recorded(*inputs))]
            counts.append(len(calls) - before)
            for name, x, y in zip(OUTPUTS, results, alone):
                check(np.array_equal(x, y), f"command buffers: {name} differs")
        print("command buffers: handlers called in 30 runs of 2 calls each:", counts)
        check(sum(counts[-10:]) == 0, f"command buffers: the calls are not recorded: {counts}")

    # Nothing but what is asked for crosses between host and device.

    def transfers(self):
        if self.args.platform != "cuda":
            return
        inputs = self.random((2, 130, 4, 64), (2, 130, 2, 64), (2, 130, 2, 64), (3, 4), (2, 130, 4, 64))
        run = jax.jit(with_gradients(self.with_lse(window_right=0)))
        jax.block_until_ready(run(*inputs))
        with jax.transfer_guard("disallow"):
            events = device_events(lambda: [run(*inputs) for _ in range(5)])
        print("transfers: what ran on the device in 5 runs:", dict(collections.Counter(event.name for event in events)))
        check(events and not transfers(events), f"transfers: {transfers(events)}")

    # Registration as for EXLA, and a step in the StableHLO that EXLA makes of it (test/flash_attention/exla_test.exs).

    def exla(self):
        api, error = self.api_of_the_runtime(), c_library.Error()
        register_all = self.library.functions.fa_xla_register
        check(register_all(None, ctypes.byref(error)) != 0 and error.message.startswith(b"api: expected"),
              "fa_xla_register: NULL is taken")
        # JAX registered the same handlers before: the runtime must see that they are the same.
        check(register_all(ctypes.c_void_p(api), ctypes.byref(error)) == 0, f"fa_xla_register: {error.message.decode()}")
        self.exla_step()
        self.exla_rewritten()
        if self.args.platform == "cpu":
            self.exla_while()

    def exla_step(self):
        """A loss and its gradients, amid transposes."""
        inputs = self.random((2, 4, 12, 8), (2, 2, 12, 8), (2, 2, 12, 8), (2, 4), (2, 4, 12, 8))

        def step(q, k, v, sink, weights):
            def loss(q, k, v, sink):
                q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
                o = plain(q, k, v, sink, window_left=5, window_right=0, softcap=3.5)[0]
                return jnp.sum(o.transpose(0, 2, 1, 3) * weights)

            return loss(q, k, v, sink), *jax.grad(loss, (0, 1, 2, 3))(q, k, v, sink)

        text = self.with_workspaces(self.exla_text("exla.mlir"), inputs)
        self.check_exla(text, inputs, step, ("the loss", "dq", "dk", "dv", "dsink"))

    def exla_rewritten(self):
        """A loss of attention that was written plainly, and its gradients, as FlashAttention.Rewriter leaves them."""
        inputs = self.random(*4 * [(2, 3, 12, 8)])

        def step(q, k, v, weights):
            def loss(q, k, v):
                q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
                return jnp.sum(plain(q, k, v, None, window_right=0)[0].transpose(0, 2, 1, 3) * weights)

            return loss(q, k, v), *jax.grad(loss, (0, 1, 2))(q, k, v)

        text = self.with_workspaces(self.exla_text("exla_rewritten.mlir"), inputs)
        self.check_exla(text, inputs, step, ("the rewritten loss", "dq", "dk", "dv"))

    def exla_while(self):
        """Attention three times over in a while, and the gradient through it."""

        def three_times(q, k, v):
            def loss(q):
                for _ in range(3):
                    q = plain(q, k, v, None)[0]
                return jnp.sum(q * q)

            return jax.grad(loss)(q),

        self.check_exla(self.exla_text("exla_while.mlir"), self.random(*3 * [(2, 6, 2, 4)]), three_times, ("dq",))

    def exla_text(self, name):
        with open(os.path.join(os.path.dirname(__file__), name)) as file:
            return file.read()

    def check_exla(self, text, inputs, function, names):
        wanted = jax.jit(function)(*(jax.device_put(np.asarray(x, np.float64), self.host) for x in inputs))
        got = self.run_stablehlo(text, [self.put(np.zeros(8), np.uint8), *inputs])
        for name, x, y in zip(names, got, wanted):
            error = largest_error(x, np.asarray(y))
            check(error <= 1e-5 * np.max(np.abs(y)), f"EXLA's StableHLO: {name} errs by {error:.3g}")

    def api_of_the_runtime(self):
        """XLA_FFI_GetApi() of the runtime that JAX uses: out of a call frame, as it exports no such function."""
        seen = []
        self.spy_on(FORWARD, "spy", lambda frame: seen.append(frame[2]))  # {struct_size, extensions, api, ...}
        return seen[0]

    def spy_on(self, target, name, see):
        """Registers, under that name, a handler that shows its frames to see and hands them on to the target's."""
        real = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(handler(self.library, target, self.args.platform))

        @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
        def spy(frame):
            see(frame)
            return real(frame)

        register(name, ctypes.cast(spy, ctypes.c_void_p).value, self.args.platform)
        self.spies.append(spy)  # XLA keeps its address

    def with_workspaces(self, text, inputs):
        """The text is that of a machine without a GPU. On CUDA each call has one more result."""
        q, k, v, *sink, dout = (x.transpose(0, 2, 1, 3) if x.ndim == 4 else x for x in inputs)
        lse = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), np.float32)
        forward = dict(q=q, k=k, v=v, **({"sink": sink[0]} if sink else {}))
        for which, operands in dict(forward=forward, backward=dict(**forward, dout=dout, o=q, lse=lse)).items():
            for result in self.attention.workspace(which, operands, {}):
                text = re.sub(rf'(%[^=]*) = (.*"flash_attention_{which}".*)\)', rf"\1, %{which} = \2, "
                              rf"tensor<{result.shape[0]}xui8>)", text)
        return text

    def run_stablehlo(self, text, operands):
        from jax._src.interpreters import mlir
        from jax._src.lib import xla_client

        backend = self.device.client
        devices = xla_client.DeviceList((self.device,))
        with mlir.make_ir_context():
            executable = backend.compile_and_load(text, devices, xla_client.CompileOptions())
        return [np.asarray(x[0]) for x in executable.execute_sharded(operands).disassemble_into_single_device_arrays()]


def largest_error(got, wanted, unit=1.0):
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.where(got == wanted, 0, np.abs(got - wanted) / unit)
    return float(np.max(np.where(np.isnan(error), np.inf, error), initial=0))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=PLATFORMS, default="cpu")
    parser.add_argument("--quick", action="store_true", help="the short case table")
    parser.add_argument("--library", default="priv/libflash_attention.so")
    parser.add_argument("--harness", default="build/test/libharness.so")
    tests = Tests(parser.parse_args())
    for test in (tests.exla, tests.vmap, tests.masks, tests.caches, tests.bad_calls, tests.empty, tests.attributes,
                 tests.command_buffers, tests.transfers, tests.table, tests.score_tensors):
        test()
    print(f"{passed} passed, {len(failures)} failed")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
