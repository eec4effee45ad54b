"""PyTorch's CPU attention on the cases of `make bench`, where torch is installed.

    python3 bench/cpu_torch.py [THREADS ...]

GFLOP/s forward and backward of scaled_dot_product_attention, f32, the median of several runs, counted as bench/cpu.c counts.
"""
import statistics
import sys
import time

import torch
import torch.nn.functional as F


def median_seconds(run, repeats=7):
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main():
    thread_counts = [int(arg) for arg in sys.argv[1:]] or [1, torch.get_num_threads()]
    print("| torch, f32 | " + " | ".join(f"{n} threads, forward / backward" for n in thread_counts) + " |")
    print("|---|" + "---|" * len(thread_counts))
    for seqlen, heads, head_dim, causal in [
        (2048, 8, 64, False),
        (2048, 8, 64, True),
        (2048, 4, 128, False),
        (2048, 4, 128, True),
        (8192, 2, 64, False),
    ]:
        row = [f"s{seqlen} h{heads} d{head_dim} {'causal' if causal else 'full'}"]
        for threads in thread_counts:
            torch.set_num_threads(threads)
            q, k, v = (torch.randn(1, seqlen, heads, head_dim).transpose(1, 2).requires_grad_() for _ in range(3))
            run = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            out = run()
            dout = torch.randn_like(out)
            gflop = 4e-9 * heads * seqlen**2 * head_dim * (0.5 if causal else 1)
            forward = gflop / median_seconds(run)
            backward = 2.5 * gflop / median_seconds(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
            row.append(f"{forward:.0f} / {backward:.0f}")
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
