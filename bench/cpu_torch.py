"""This library's CPU attention and PyTorch's by turns, in one process, on cases of `make bench`.

    python3 bench/cpu_torch.py [--library priv/libflash_attention.so] [THREADS ...]

GFLOP/s forward / backward of scaled_dot_product_attention, f32, the median of several runs, counted as bench/cpu.c counts.
"""
import argparse
import os
import statistics
import sys
import time

import needs

needs.modules("torch")

import torch
import torch.nn.functional as F

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../test/xla"))
import c_library

CASES = [(2048, 8, 64, False), (2048, 8, 64, True), (2048, 4, 128, False), (2048, 4, 128, True), (8192, 2, 64, False)]
NUM_ROUNDS = 7


def seconds(run):
    run()  # warms up: a sleeping processor or thread pool takes milliseconds
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ours(library, threads, causal, **tensors):
    """(forward, backward) on [batch, seqlen, num_heads, head_dim] tensors."""
    places = c_library.Tensors()
    for name, x in tensors.items():
        strides = x.stride()[:3] if x.dim() == 4 else (0, 0, 0)
        setattr(places, name, c_library.Tensor(x.data_ptr(), *strides))
    runs = []
    for which in ("forward", "backward"):
        plan = library.plan(which, "f32", tensors["q"].shape, tensors["k"].shape, c_library.CPU,
                            **(dict(window_right=0) if causal else {}))
        workspace = torch.empty(plan.workspace_bytes + 64, dtype=torch.uint8)
        begin = (workspace.data_ptr() + 63) // 64 * 64
        execution = c_library.Execution(begin, plan.workspace_bytes, threads, None)

        def run(plan=plan, execution=execution, kept=(workspace, tensors)):
            library.call("fa_run", plan, places, execution)

        runs.append(run)
    return runs


def torchs(causal, q, k, v, dout):
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in (q, k, v))
    forward = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    out = forward()
    return forward, lambda: torch.autograd.grad(out, (q, k, v), dout.transpose(1, 2), retain_graph=True)


def row(library, threads, seqlen, heads, head_dim, causal):
    torch.set_num_threads(threads)
    q, k, v, dout = (torch.randn(1, seqlen, heads, head_dim) for _ in range(4))
    results = {name: torch.empty_like(q) for name in ("o", "dq", "dk", "dv")}
    implementations = [ours(library, threads, causal, q=q, k=k, v=v, dout=dout, lse=torch.empty(1, heads, seqlen), **results),
                       torchs(causal, q, k, v, dout)]
    times = [[[], []], [[], []]]
    for _ in range(NUM_ROUNDS):
        for i, passes in enumerate(implementations):
            for which, run in enumerate(passes):
                times[i][which].append(seconds(run))
    gflop = 4e-9 * heads * seqlen**2 * head_dim * (0.5 if causal else 1)
    rates = [[factor * gflop / statistics.median(x) for factor, x in zip((1, 2.5), found)] for found in times]
    error = (results["o"] - implementations[1][0]().transpose(1, 2)).abs().max().item()
    assert error < 1e-4, f"o differs by {error}"
    ratios = [x / y for x, y in zip(*rates)]
    return [" / ".join(f"{x:.{digits}f}" for x in values) for values, digits in ((rates[0], 0), (rates[1], 0), (ratios, 2))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("threads", nargs="*", type=int)
    parser.add_argument("--library", default="priv/libflash_attention.so")
    args = parser.parse_args()
    library = c_library.Library(args.library)
    print(f"Beside torch {torch.__version__}, by turns, GFLOP/s forward / backward:\n")
    print("| f32 | threads | ours | torch | ours over torch |\n|---|---|---|---|---|")
    for threads in args.threads or sorted({1, torch.get_num_threads()}):
        for seqlen, heads, head_dim, causal in CASES:
            cells = row(library, threads, seqlen, heads, head_dim, causal)
            name = f"s{seqlen} h{heads} d{head_dim} {'causal' if causal else 'full'}"
            print(f"| {name} | {threads} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
