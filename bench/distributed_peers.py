"""Attention over several GPUs by others, beside bench/distributed.exs: torch's ring (context_parallel) and Ulysses' exchange of
rows for heads around torch's own kernels, and this library's kernels in JAX's shard_map. What does not run here is said, and
why. Each peer has a process of its own, which is ended when it takes too long: ranks that wait for one another may hang.

    python3 bench/distributed_peers.py [--ranks 2] [--lengths 16384,65536] [--heads 16] [--repeats 5] [--platform cuda|cpu]
                                       [--library priv/libflash_attention.so] [--peers ulysses,ring,jax] [--timeout 120]
"""

import argparse
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

DIM = 128


def area(causal, length):
    return length * (length + 1) // 2 if causal else length * length


def row(peer, causal, length, args, forward, both):
    """One line a pass; the backward is what both passes take less the forward."""
    for name, operations, seconds in (("forward", 4, forward), ("backward", 10, both - forward)):
        each = operations * area(causal, length) * args.heads * DIM / max(seconds, 1e-9) / args.ranks / 1e12
        print(f"| {peer} | {'causal' if causal else 'full'} | {length} | {name} | {seconds * 1e3:.3f} | {each:.0f} |", flush=True)


def best(repeats, run):
    run()
    return min(run() for _ in range(repeats))


def not_run(peer, why):
    """Why is a text, or an error. An assertion may have none, but a place."""
    text = str(why).strip()
    if not text:
        at = traceback.extract_tb(why.__traceback__)[-1]
        text = f"{type(why).__name__} in {at.filename}, line {at.lineno}: {at.line}"
    print(f"{peer} did not run here: {text.splitlines()[0]}", flush=True)


# ---- torch: a process a GPU --------------------------------------------------------------------------------------------------


def ulysses(q, k, v, causal):
    """q, k, v [1, rows, heads, dim] of this rank: all rows of some heads, and back."""
    import torch
    import torch.distributed as dist

    size = dist.get_world_size()

    def exchange(x):
        got = torch.empty_like(x)
        dist.all_to_all_single(got, x)
        return got

    def to_heads(x):
        _, rows, heads, dim = x.shape
        parts = x.reshape(rows, size, heads // size, dim).transpose(0, 1).contiguous()
        return exchange(parts).reshape(1, size * rows, heads // size, dim)

    def to_rows(x):
        _, rows, heads, dim = x.shape
        parts = exchange(x.reshape(size, rows // size, heads, dim).contiguous())
        return parts.transpose(0, 1).reshape(1, rows // size, size * heads, dim)

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(context, x, there, back):
            context.back = back
            return there(x)

        @staticmethod
        def backward(context, gradient):
            return context.back(gradient.contiguous()), None, None

    whole = [Exchange.apply(x, to_heads, to_rows).transpose(1, 2) for x in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=causal)
    return Exchange.apply(o.transpose(1, 2).contiguous(), to_rows, to_heads)


def timed(args, attend, inputs, dout):
    """The slowest rank's seconds of the forward, and of both passes."""
    import torch
    import torch.distributed as dist

    def once(with_backward):
        dist.barrier()
        synchronize = torch.cuda.synchronize if args.platform == "cuda" else lambda: None
        synchronize()
        began = time.perf_counter()
        o = attend(*inputs)
        if with_backward:
            torch.autograd.grad(o, inputs, dout)
        synchronize()
        spent = torch.tensor([time.perf_counter() - began], device=dout.device)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        return spent.item()

    return [best(args.repeats, functools.partial(once, which)) for which in (False, True)]


def ring_of(args, mesh, causal, shape, draw):
    """torch's own context parallelism of tensors [1, heads, rows, dim], which it cuts itself."""
    import torch
    from torch.distributed.tensor.experimental import context_parallel

    whole = [draw(shape) for _ in range(3)]
    with context_parallel(mesh, buffers=whole, buffer_seq_dims=[2] * 3, no_restore_buffers=set(whole)):
        # Those that it cuts must not want gradients yet.
        inputs = [x.detach().requires_grad_() for x in whole]
        attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=causal)
        return timed(args, attend, inputs, torch.ones_like(inputs[0]))


def torch_worker(rank, args, peer, store):
    import torch
    import torch.distributed as dist

    cuda = args.platform == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    torch.manual_seed(rank)
    draw = lambda shape: torch.randn(shape, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    for causal in (True, False):
        for length in args.lengths:
            try:
                if peer == "ulysses":
                    inputs = [draw((1, length // args.ranks, args.heads, DIM)).requires_grad_() for _ in range(3)]
                    seconds = timed(args, functools.partial(ulysses, causal=causal), inputs, torch.ones_like(inputs[0]))
                else:
                    mesh = dist.device_mesh.init_device_mesh(args.platform, (args.ranks,))
                    seconds = ring_of(args, mesh, causal, (1, args.heads, length, DIM), draw)
            except Exception as error:  # any of torch's: said, and the others run
                if rank == 0:
                    not_run(f"torch's {peer}", error)
                dist.destroy_process_group()
                return
            if rank == 0:
                row(f"torch, {peer}", causal, length, args, *seconds)
    dist.destroy_process_group()


def run_torch(args, peer):
    try:
        import torch.multiprocessing as multiprocessing

        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(torch_worker, (args, peer, os.path.join(folder, "store")), nprocs=args.ranks)
    except Exception as error:
        not_run(f"torch's {peer}", error)


# ---- JAX: shard_map around this library's calls ------------------------------------------------------------------------------


def run_jax(args):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "test" / "xla"))
    try:
        import jax
        import jax.numpy as jnp
        import test_shards as shards

        jax.config.update("jax_platforms", args.platform)  # the tests' devices are the host's
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

        if len(jax.devices()) < args.ranks:
            raise RuntimeError(f"{args.ranks} ranks want as many devices, JAX has {len(jax.devices())}")
        library = shards.c_library.Library(args.library)
        attention, parts = (what(library, args.platform) for what in (shards.Attention, shards.Parts))
        mesh = Mesh(np.array(jax.devices()[: args.ranks]), ("seq",))
        rows = NamedSharding(mesh, P(None, "seq"))
        dtype = jnp.bfloat16 if args.platform == "cuda" else jnp.float32
        sink = jnp.full((1, args.heads), 2.0, jnp.float32)
        for name, make in (("ring", functools.partial(shards.ring, attention, parts)), ("gathered keys", functools.partial(shards.gathered, attention))):
            for causal in (True, False):
                for length in args.lengths:
                    keys = jax.random.split(jax.random.PRNGKey(1), 4)
                    q, k, v, dout = (jax.device_put(jax.random.normal(key, (1, length, args.heads, DIM), dtype), rows) for key in keys)
                    attend = make("seq", causal, shards.UNBOUNDED)
                    spec = P(None, "seq")
                    forward = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(spec, spec, spec, P()), out_specs=spec, check_vma=False))
                    both = shards.sharded(attend, mesh, "seq", P())

                    def once(run, *inputs):
                        began = time.perf_counter()
                        jax.block_until_ready(run(*inputs))
                        return time.perf_counter() - began

                    seconds = (best(args.repeats, functools.partial(once, forward, q, k, v, sink)),
                               best(args.repeats, functools.partial(once, both, q, k, v, sink, dout)))
                    row(f"this library in JAX, {name}, a sink", causal, length, args, *seconds)
    except Exception as error:
        not_run("JAX", error)


def run_apart(peer, seconds):
    """Runs this program for one peer. What that started ends with it: they are a session of their own."""
    process = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--peers", peer, "--alone"], start_new_session=True)
    try:
        if process.wait(seconds) != 0:
            not_run(peer, f"its process ended with {process.returncode}")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        not_run(peer, f"it took longer than {seconds:.0f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lengths", default="16384,65536", type=lambda text: [int(x) for x in text.split(",")])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--library", default="priv/libflash_attention.so")
    parser.add_argument("--peers", default="ulysses,ring,jax", type=lambda text: text.split(","))
    parser.add_argument("--timeout", type=float, default=120, help="seconds that each peer may take")
    parser.add_argument("--alone", action="store_true", help="run the one peer in this process, without a heading")
    args = parser.parse_args()
    if args.alone:
        run_jax(args) if args.peers == ["jax"] else run_torch(args, args.peers[0])
        return
    print(f"\n## Beside it\n\n`bench/distributed_peers.py`: {args.ranks} ranks, {args.heads} heads, head_dim {DIM}. The backward is both passes less the forward.\n")
    print("| peer | mask | tokens | pass | ms | TFLOP/s a GPU |\n|---|---|--:|---|--:|--:|", flush=True)
    for peer in args.peers:
        run_apart(peer, args.timeout)


if __name__ == "__main__":
    main()
