"""The custom calls under several devices: merges of parts against JAX's own operations, and attention of all devices under
shard_map, over batch, heads and sequence (a ring of ppermute, and gathered keys), with bands for the shards' positions,
large sinks and gradients, against plain attention in float64.

    python3 test/xla/test_shards.py [--library ...] [--platform cpu|cuda]

The devices are eight of the host's, whose collectives are XLA's own, or two, four or eight GPUs. Needs JAX; without it says so
and tests nothing.
"""
import argparse
import functools
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"])
try:
    import jax
except ImportError:
    print("test-xla: skipped, JAX is not installed here (pip install jax)")
    sys.exit(0)

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import c_library
from jax_attention import MERGE, MERGE_BACKWARD, Attention, Parts

jax.config.update("jax_enable_x64", True)

UNBOUNDED = 2**31 - 1
passed, failures = 0, []


def check(condition, text):
    global passed
    if condition:
        passed += 1
    else:
        failures.append(text)
        print("FAILED:", text, flush=True)


def check_near(got, wanted, allowed, text):
    """Beside the largest number that is wanted; -inf is wanted as it is."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    finite = np.isfinite(wanted)
    largest = np.max(np.abs(wanted), initial=0, where=finite)
    with np.errstate(invalid="ignore"):
        error = np.max(np.where(got == wanted, 0, np.nan_to_num(np.abs(got - wanted), nan=np.inf)), initial=0)
    check(error <= allowed * largest, f"{text} errs by {error:.3g} beside {largest:.3g}")


def random(seed, shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


# ---- what is expected ---------------------------------------------------------------------------------------------


def with_sinks(scores, sink):
    """[b, h, q, k + sinks] of scores and sinks of either layout."""
    b, h, s, _ = scores.shape
    sinks = jnp.broadcast_to(sink.T[None, :, None, :], (b, h, s, sink.shape[0])) if sink.ndim == 2 else jnp.einsum("bqth->bhqt", sink)
    return jnp.concatenate([scores, sinks], axis=3)


def plain_merge(parts, sink):
    lse = jnp.stack([lse for _, lse in parts], axis=3)
    every = lse if sink is None else with_sinks(lse, sink)
    largest = jax.lax.stop_gradient(jnp.max(every, axis=3, keepdims=True))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    total = jnp.sum(jnp.exp(every - largest), axis=3, keepdims=True)
    weights = jnp.exp(lse - largest) / jnp.where(total == 0, 1, total)
    o = sum(jnp.einsum("bhq,bqhd->bqhd", weights[..., p], jnp.where(weights[..., p].transpose(0, 2, 1)[..., None] == 0, 0, o))
            for p, (o, _) in enumerate(parts))
    return o, (largest + jnp.log(total))[..., 0]


def plain(q, k, v, sink, causal, window):
    """o by the formulas; row i stands beside column i + seqlen_k - seqlen_q."""
    (_, s, h, d), (_, t, kv, _) = q.shape, k.shape
    k, v = (jnp.repeat(x, h // kv, axis=2) for x in (k, v))
    ahead = jnp.arange(t) - jnp.arange(s)[:, None] - (t - s)
    seen = (ahead <= (0 if causal else t + s)) & (-ahead <= window)
    scores = jnp.where(seen, jnp.einsum("bqhd,bkhd->bhqk", q, k) / d**0.5, -jnp.inf)
    p = jax.nn.softmax(with_sinks(scores, sink), axis=3)[..., :t]
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def gradients_of(attend, dout):
    def run(q, k, v, sink):
        o, pull = jax.vjp(attend, q, k, v, sink)
        return (o, *pull(dout.astype(o.dtype)))

    return run


# ---- merges -------------------------------------------------------------------------------------------------------


def test_merges(parts_of):
    types = [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2), (jnp.float16, 2e-3)]
    if parts_of.platform == "cpu":
        types = [(jnp.float64, 1e-13), *types]
    sizes, stats = (2, 7, 3, 20), (2, 3, 7)
    for count, layout in [(1, (2, 3)), (1, (2, 7, 2, 3)), (2, None), (5, None), (5, (1, 3)), (17, (2, 7, 1, 3))]:
        for dtype, allowed in types:
            stat = jnp.float64 if dtype == jnp.float64 else jnp.float32
            parts = [(random(p, sizes, dtype), random(50 + p, stats, stat).at[:, p % 3, p % 7].set(-jnp.inf))
                     for p in range(count)]
            sink = None if layout is None else 1 + random(7, layout)
            dout, dlse = random(8, sizes, dtype), random(9, stats, stat)

            def run(merge, to=lambda x: x):
                @jax.jit
                def both(parts, sink):
                    merged, pull = jax.vjp(merge, parts, sink)
                    return merged, pull((to(dout), to(dlse)))

                return both(jax.tree.map(to, parts), sink if sink is None else to(sink))

            got = run(parts_of)
            wanted = run(plain_merge, lambda x: x.astype(jnp.float64))
            tree = [jax.tree.leaves(x) for x in (got, wanted)]
            for i, (x, y) in enumerate(zip(*tree)):
                # What reaches the gradient of a lse that is -inf in JAX's own operations is NaN.
                y = np.where(np.isnan(y), 0, y)
                own = max(allowed, 1e-6) if i == len(tree[0]) - 1 and sink is not None else allowed
                check_near(x, y, own, f"merge of {count} parts, sinks {layout}, {np.dtype(dtype).name}: result {i}")


def test_merge_results(parts_of):
    """Results of the right shape alone, and none over an operand but what is merged, over a part."""
    o, other, dout = (random(i, (2, 7, 3, 20)) for i in range(3))
    lse, more, dlse = (random(i, (2, 3, 7)) for i in range(3, 6))
    parts = [o, lse, other, more]

    def call(target, results, operands, aliases=None, **attributes):
        f = jax.ffi.ffi_call(target, [jax.ShapeDtypeStruct(*x) for x in results], input_output_aliases=aliases)
        return jax.block_until_ready(jax.jit(lambda *x: f(*x, **attributes))(*operands))

    def expect_error(expected, *arguments, **named):
        got = "no error"
        try:
            call(*arguments, **named)
        except Exception as error:  # XLA's own kind has no public name
            got = str(error)
        check(expected in got, f"a merge: expected {expected!r}, got {got!r}")

    of_o, of_lse = ((2, 7, 3, 20), np.float32), ((2, 3, 7), np.float32)
    flat_o, flat_lse = ((840,), np.float32), ((42,), np.float32)
    merged = call(MERGE, [of_o, of_lse], parts)
    for x, y in zip(call(MERGE, [flat_o, flat_lse], parts), merged):
        check(np.array_equal(x, np.ravel(y)), "a merge: flat results are others")
    for expected, results, attributes in [
            ("o: expected f32[2, 7, 3, 20], got f32[2, 3, 7, 20]", [((2, 3, 7, 20), np.float32), of_lse], {}),
            ("o: expected f32[2, 7, 3, 20], got f32[14, 60]", [((14, 60), np.float32), of_lse], {}),
            ("lse: expected f32[2, 3, 7], got f32[2, 7, 3]", [of_o, ((2, 7, 3), np.float32)], {}),
            ("lse: expected f32[2, 3, 7], got f32[41]", [of_o, ((41,), np.float32)], {}),
            ("sink: expected an operand of that name, got a shape alone", [of_o, of_lse], dict(sink=np.array([1, 2])))]:
        expect_error(f"{MERGE}: {expected}", MERGE, results, parts, **attributes)
    backward, gradients = [dout, dlse, *merged, *parts], [of_o, of_lse, of_o, of_lse]
    expect_error("the gradient by o: expected f32[2, 7, 3, 20], got f32[20, 3, 7, 2]", MERGE_BACKWARD,
                 [((20, 3, 7, 2), np.float32), *gradients[1:]], backward)
    expect_error("the gradient by lse: expected f32[2, 3, 7], got f32[3, 2, 7]", MERGE_BACKWARD,
                 [*gradients[:3], ((3, 2, 7), np.float32)], backward)

    for aliases in ({0: 0, 1: 1}, {2: 0, 3: 1}, {0: 0}, {1: 1}):
        for x, y in zip(call(MERGE, [of_o, of_lse], parts, aliases), merged):
            check(np.array_equal(x, y), f"a merge over its parts, {aliases}: the result is another")
    expect_error("the gradient by o: expected memory of its own, got that of operand 0", MERGE_BACKWARD, gradients,
                 backward, {0: 0})
    expect_error("the gradient by lse: expected memory of its own, got that of operand 5", MERGE_BACKWARD, gradients,
                 backward, {5: 1})
    # Sinks of rows, whose shape an o may have.
    narrow, flat = random(7, (2, 7, 3, 3)), random(8, (2, 3, 7))
    expect_error("o: expected memory of its own, or a part's, got that of operand 2", MERGE,
                 [((2, 7, 3, 3), np.float32), of_lse], [narrow, flat, random(9, (2, 7, 3, 3))], {2: 0})


# ---- attention of several devices -----------------------------------------------------------------------------------


def mesh_of(*axes):
    """All devices: two along each axis, from the last one on while there are some left, and the first has what is left."""
    devices, sizes = np.array(jax.devices()), []
    left = len(devices)
    for _ in axes[1:]:
        sizes.insert(0, min(left, 2))
        left //= sizes[0]
    return Mesh(devices.reshape(left, *sizes), axes)


def bands_of(num_rows, num_keys, ahead, causal, window):
    """One band of all rows and keys that are here, whose last key stands so far before what the last row stands beside."""
    left, right = (UNBOUNDED if window == UNBOUNDED else window - ahead), ahead if causal else UNBOUNDED
    words = [0, num_rows, 0, num_keys, left, right]
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in words])[None, None]


def gathered(attention, axis, causal, window):
    """Rows of this device, keys of all of them. What comes back to the keys is JAX's: the gather's gradient sums it."""

    def attend(q, k, v, sink):
        k, v = (jax.lax.all_gather(x, axis, axis=1, tiled=True) for x in (k, v))
        # The last row of these stands so far before the last one of all, and with it the last key.
        behind = (jax.lax.axis_size(axis) - 1 - jax.lax.axis_index(axis)) * q.shape[1]
        return attention(q, k, v, sink, bands_of(q.shape[1], k.shape[1], -behind, causal, window))

    return attend


def ring(attention, parts, axis, causal, window):
    """Rows stay, keys travel, parts merge, the sink counts once. Each backward of a part takes what was merged."""

    def bands_at(step, num_rows, num_keys):
        size, here = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
        from_device = (here - step) % size
        ahead = (size - 1 - from_device) * num_keys - (size - 1 - here) * num_rows
        return bands_of(num_rows, num_keys, ahead, causal, window)

    def turn(*tensors):
        size = jax.lax.axis_size(axis)
        return [jax.lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)]) for x in tensors]

    def run(q, k, v, sink):
        found = []
        for step in range(jax.lax.axis_size(axis)):
            found.append(attention.forward(q, k, v, None, bands_at(step, q.shape[1], k.shape[1])))
            k, v = turn(k, v)
        return parts.merge(found, sink)

    @jax.custom_vjp
    def attend(q, k, v, sink):
        return run(q, k, v, sink)[0]

    def forward(q, k, v, sink):
        o, lse = run(q, k, v, sink)
        return o, (q, k, v, sink, o, lse)

    def backward(saved, dout):
        q, k, v, sink, o, lse = saved
        wide = jnp.promote_types(q.dtype, jnp.float32)
        dq, dk, dv = (jnp.zeros(x.shape, wide) for x in (q, k, v))
        for step in range(jax.lax.axis_size(axis)):
            bands = bands_at(step, q.shape[1], k.shape[1])
            more = attention.backward(dout, q, k, v, o, lse, None, bands)
            dq, dk, dv = (x + y for x, y in zip((dq, dk, dv), more[:3]))
            k, v, dk, dv = turn(k, v, dk, dv)  # sums travel with their keys, and are at home in the end
        dsink = parts.backward((dout, jnp.zeros_like(lse)), [], (o, lse), sink)[1]
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dsink

    attend.defvjp(forward, backward)
    return attend


def sharded(attend, mesh, sequence, sink_spec):
    """(o, dq, dk, dv, dsink) of whole tensors, which the mesh's axes share: batch, heads, and perhaps the sequence."""
    rows = P("batch" if "batch" in mesh.axis_names else None, sequence, "heads" if "heads" in mesh.axis_names else None)
    sums = tuple(axis for axis in mesh.axis_names if axis not in jax.tree.leaves(tuple(sink_spec)))

    def local(q, k, v, sink, dout):
        o, dq, dk, dv, dsink = gradients_of(attend, dout)(q, k, v, sink)
        return o, dq, dk, dv, jax.lax.psum(dsink, sums)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(rows, rows, rows, sink_spec, rows),
                                 out_specs=(rows, rows, rows, rows, sink_spec), check_vma=False))


def test_attention(attention, parts):
    heads, line, cube = mesh_of("batch", "heads"), mesh_of("seq"), mesh_of("batch", "heads", "seq")
    full = (jnp.float64, 1e-6) if attention.platform == "cpu" else (jnp.float32, 2e-5)
    for causal, window, dtype, allowed in [(True, UNBOUNDED, jnp.float32, 2e-5), (False, UNBOUNDED, *full),
                                           (True, 21, jnp.float32, 2e-5), (True, UNBOUNDED, jnp.bfloat16, 3e-2)]:
        q, dout = (random(seed, (4, 40, 4, 16), dtype) for seed in (1, 2))
        k, v = (random(seed, (4, 56, 2, 16), dtype) for seed in (3, 4))
        sink = 2 + 2 * jnp.abs(random(5, (3, 4)))  # as large as what rows see
        exact = [x.astype(jnp.float64) for x in (q, k, v, sink)]
        wanted = jax.jit(gradients_of(functools.partial(plain, causal=causal, window=window), dout))(*exact)

        def attend(q, k, v, sink):
            return attention(q, k, v, sink, bands_of(q.shape[1], k.shape[1], 0, causal, window))

        for name, mesh, function, sequence, sink_spec in [
                ("batch and heads", heads, attend, None, P(None, "heads")),
                ("gathered keys", line, gathered(attention, "seq", causal, window), "seq", P()),
                ("batch, heads and gathered keys", cube, gathered(attention, "seq", causal, window), "seq", P(None, "heads")),
                ("a ring", line, ring(attention, parts, "seq", causal, window), "seq", P()),
                ("batch, heads and a ring", cube, ring(attention, parts, "seq", causal, window), "seq", P(None, "heads"))]:
            results = sharded(function, mesh, sequence, sink_spec)(q, k, v, sink, dout)
            for output, x, y in zip(("o", "dq", "dk", "dv", "dsink"), results, wanted):
                check_near(x, y, allowed, f"{name}, causal {causal}, window {window}, {np.dtype(dtype).name}: {output}")
            used = len(results[0].sharding.device_set)
            check(used == len(jax.devices()) > 1, f"{name}: o lies on {used} devices")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="priv/libflash_attention.so")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cpu")
    args = parser.parse_args()
    jax.config.update("jax_platforms", args.platform)
    library = c_library.Library(args.library)
    attention, parts = Attention(library, args.platform), Parts(library, args.platform)
    test_merges(parts)
    test_merge_results(parts)
    test_attention(attention, parts)
    print(f"{passed} passed, {len(failures)} failed")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
