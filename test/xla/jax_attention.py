"""The library's XLA custom calls in JAX: attention(q, k, v, sink, bands) with gradients. Shapes, types and options are those
of c_src/flash_attention.h."""
import collections
import ctypes
import glob
import gzip
import json
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import c_library

FORWARD, BACKWARD = "flash_attention_forward", "flash_attention_backward"
MERGE, MERGE_BACKWARD = "flash_attention_merge", "flash_attention_merge_backward"
PLATFORMS = {"cpu": "Host", "cuda": "CUDA"}  # XLA's names of JAX's platforms


def capsule(pointer):
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(pointer, None, None)


def handler(library, target, platform):
    """The address of a handler."""
    library.functions.fa_xla_handler.restype = ctypes.c_void_p
    return library.functions.fa_xla_handler(target.encode(), PLATFORMS[platform].encode())


def register(name, pointer, platform):
    """Gives JAX a handler under a name. Its own name of "Host" is cpu here, but that of CUDA is as XLA's."""
    jax.ffi.register_ffi_target(name, capsule(pointer), platform={"cuda": "CUDA"}.get(platform, platform))


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def type_name(x):
    return {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int32": "s32"}[str(x.dtype)]


def attribute(value):
    """Python's numbers as the attributes' own types."""
    return {float: np.float64, int: np.int64}.get(type(value), lambda x: x)(value)


class Attention:
    def __init__(self, library, platform, suffix=""):
        """With a suffix to the targets' names, they are registered by somebody else."""
        self.library, self.platform, self.suffix = library, platform, suffix
        for target in (FORWARD, BACKWARD) if not suffix else ():
            register(target, handler(library, target, platform), platform)

    def call(self, which, operands, results, options):
        operands = {name: x for name, x in operands.items() if x is not None}
        results = [*results, *self.workspace(which, operands, options)]
        attributes = {name: attribute(value) for name, value in options.items()}
        target = f"flash_attention_{which}{self.suffix}"
        return jax.ffi.ffi_call(target, results, vmap_method="sequential")(*operands.values(), operands=",".join(operands), **attributes)

    def workspace(self, which, operands, options):
        """The result that is the call's workspace, on CUDA, where it needs one."""
        if self.platform != "cuda":
            return []
        inputs = {name: (type_name(x), x.shape) for name, x in operands.items()}
        num_bytes = self.library.plan_inputs(which, inputs, **options).workspace_bytes
        return [jax.ShapeDtypeStruct((num_bytes,), np.uint8)] if num_bytes else []

    def forward(self, q, k, v, sink=None, bands=None, **options):
        """(o, lse)"""
        b, s, h, _ = q.shape
        lse = jax.ShapeDtypeStruct((b, h, s), np.float64 if q.dtype == np.float64 else np.float32)
        return self.call("forward", dict(q=q, k=k, v=v, sink=sink, bands=bands), [like(q), lse], options)[:2]

    def backward(self, dout, q, k, v, o, lse, sink=None, bands=None, **options):
        """(dq, dk, dv, dsink); dsink is None where sink is."""
        operands = dict(dout=dout, q=q, k=k, v=v, o=o, lse=lse, sink=sink, bands=bands)
        results = [like(x) for x in (q, k, v, sink) if x is not None]
        gradients = self.call("backward", operands, results, options)
        return (*gradients[:3], None if sink is None else gradients[3])

    def __call__(self, q, k, v, sink=None, bands=None, **options):
        """o, with gradients by q, k, v and sink."""

        @jax.custom_vjp
        def attend(q, k, v, sink, bands):
            return self.forward(q, k, v, sink, bands, **options)[0]

        def forward(q, k, v, sink, bands):
            o, lse = self.forward(q, k, v, sink, bands, **options)
            return o, (q, k, v, o, lse, sink, bands)

        attend.defvjp(forward, lambda saved, dout: (*self.backward(dout, *saved, **options), None))
        return attend(q, k, v, sink, bands)


class Parts:
    """Merges of parts: a list of (o, lse), and sinks of either layout or None."""

    def __init__(self, library, platform):
        self.library, self.platform = library, platform
        for target in (MERGE, MERGE_BACKWARD):
            register(target, handler(library, target, platform), platform)

    def merge(self, parts, sink=None, dtype=None):
        """(o, lse), o of that type or of the first part's."""
        o, lse = parts[0]
        operands = [*(x for part in parts for x in part), *([] if sink is None else [sink])]
        return jax.ffi.ffi_call(MERGE, [jax.ShapeDtypeStruct(o.shape, dtype or o.dtype), like(lse)])(*operands)

    def backward(self, cotangents, parts, merged, sink=None):
        """([(do, dlse) of each part], dsink or None)"""
        sinks = [] if sink is None else [sink]
        inputs = [x for part in parts for x in part]
        # Where dsink is summed over rows, the workspace has a number for each of them.
        shared = self.platform == "cuda" and sinks and sink.ndim == 2
        workspace = [jax.ShapeDtypeStruct((4 * merged[1].size,), np.uint8)] if shared else []
        results = jax.ffi.ffi_call(MERGE_BACKWARD, [*map(like, inputs + sinks), *workspace])(*cotangents, *merged, *inputs, *sinks)
        pairs = [(results[i], results[i + 1]) for i in range(0, len(inputs), 2)]
        return pairs, results[len(inputs)] if sinks else None

    def __call__(self, parts, sink=None):
        """(o, lse), with gradients by the parts and the sink."""

        @jax.custom_vjp
        def merge(parts, sink):
            return tuple(self.merge(parts, sink))

        def forward(parts, sink):
            merged = tuple(self.merge(parts, sink))
            return merged, (parts, merged, sink)

        def backward(saved, cotangents):
            pairs, dsink = self.backward(cotangents, *saved)
            return pairs, dsink

        merge.defvjp(forward, backward)
        return merge(parts, sink)


# ---- for benchmarks ---------------------------------------------------------------------------------------------


def unfused(causal):
    """Attention of ordinary operations: what XLA makes without the custom calls."""

    def attend(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[3] ** 0.5
        if causal:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)

    return attend


def forward_and_backward(attend):
    def run(q, k, v, dout):
        o, pull = jax.vjp(attend, q, k, v)
        return o, *pull(dout)

    return run


# ---- what a program does on the device --------------------------------------------------------------------------


Event = collections.namedtuple("Event", "name begin duration stream")


def device_events(run):
    """(name, begin, duration, stream) of each kernel and copy of the GPU in a profile of run(), in their order; times
    are in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            jax.block_until_ready(run())
        path, = glob.glob(f"{folder}/**/perfetto_trace.json.gz", recursive=True)
        events = json.load(gzip.open(path))["traceEvents"]
    devices = {event["pid"] for event in events
               if event.get("name") == "process_name" and "/device:GPU" in event["args"]["name"]}
    return sorted((Event(event["name"], event["ts"], event["dur"], event["tid"]) for event in events
                   if event.get("ph") == "X" and event["pid"] in devices), key=lambda event: event.begin)


def transfers(events):
    """Those that cross between host and device."""
    return [event for event in events if "H2D" in event.name or "D2H" in event.name]
