"""Attention of unusual shapes on this machine's GPU, beside the fastest of what a user would otherwise pick, in one run.

    python3 bench/corners.py [--sweep] [--quick] [--library priv/libflash_attention.so] [--result bench/results/h200_corners]
                             [--peer MODULE.py]

Needs torch. Peers are the backends of torch's scaled_dot_product_attention that take the case, and with --peer one more
implementation of 16-bit cases (see bench/gpu.py). Prints a page of Markdown and keeps it in RESULT.md.

Rows are TFLOP/s as in bench/gpu.py: 4*b*h*seqlen_q*seqlen_k*d operations forward, half of that under a causal mask, 2.5 times
as many backward; medians of event timings, all implementations by turns, the L2 cache flushed before each. What counts is the
best other. --sweep goes through heads per key head, seqlen_q and seqlen_k, and head_dims as well, and lists every point that is
below 0.9 of the best; --quick takes fewer points and turns.
"""
import argparse
import math
import time
import warnings

import needs

needs.modules("torch")

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

import gpu
from gpu import TYPES, Library, Page, This, attempt, load_peer, median_ms
from c_library import PASSES

FACTORS = {"forward": 1, "backward": 2.5}
MOST_OPERATIONS = 2e12  # of a point of the sweep


class Torch(gpu.Torch):
    """Query heads may share keys."""

    def forward(self):
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(*self.leaves, is_causal=self.causal,
                                                  enable_gqa=self.leaves[0].shape[1] != self.leaves[1].shape[1])


class Case:
    def __init__(self, batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, causal=False, type_name="bf16", times=1.0):
        self.q, self.k = (batch, seqlen_q, heads, head_dim), (batch, seqlen_k, kv_heads, head_dim)
        self.causal, self.type_name, self.times = causal, type_name, times
        self.operations = 4 * math.prod(self.q) * seqlen_k * (0.5 if causal else 1)

    def __str__(self):
        (b, s, h, d), (_, t, g, _) = self.q, self.k
        return (f"{self.type_name} d{d} {'causal' if self.causal else 'full'} {b} x {s if s == t else f'{s}:{t}'}, "
                f"{h if h == g else f'{h}:{g}'} heads")

    def milliseconds(self, library, args):
        """{pass: {implementation: milliseconds}}"""
        q, k, v, dout = inputs = [torch.randn(shape, device="cuda", dtype=TYPES[self.type_name])
                                  for shape in (self.q, self.k, self.k, self.q)]
        made = {"this": This(library, *inputs, self.causal)}
        for name in ("flash", "cudnn", "efficient"):
            if not (self.causal and q.shape[1] != k.shape[1]):  # torch has its mask at another corner
                made[name] = attempt(Torch, name, *inputs, self.causal)
        if args.peer and self.type_name != "f32":
            made["peer"] = attempt(args.peer, *inputs, self.causal)
        runs = {(name, which): getattr(implementation, which)
                for name, implementation in made.items() if implementation for which in PASSES}
        runs = {key: run for key, run in runs.items() if key[0] == "this" or attempt(run) is not None}
        measured = median_ms(runs, args.budget_ms)
        return {which: {name: ms for (name, x), ms in measured.items() if x == which} for which in PASSES}

    def speed(self, which, ms):
        return FACTORS[which] * self.operations / ms / 1e9


def best_of(times):
    """The name of the best other, or None."""
    return min((name for name in times if name != "this"), key=times.get, default=None)


def ratio(times):
    """Our speed over that of the best other."""
    best = best_of(times)
    return times[best] / times["this"] if best else math.inf


# ---- rows ----------------------------------------------------------------------------------------------------


def rows():
    """Those that were slow; those that were ahead, by 1.05; small ones."""
    hidden = lambda d: max(1, 2048 // d)
    square = lambda d, **options: Case(4, 4096, 4096, hidden(d), hidden(d), d, **options)
    return [
        Case(4, 4096, 4096, 16, 1, 128, causal=True), Case(1, 32768, 128, 16, 16, 128), Case(1, 4096, 77, 32, 32, 64),
        Case(8, 4096, 77, 10, 10, 64), Case(1, 128, 32768, 16, 16, 128), square(160, causal=True), square(192),
        square(192, causal=True), square(72), Case(2, 8192, 8192, 32, 8, 128, causal=True),
        Case(8, 2048, 2048, 32, 8, 128, causal=True), square(256, type_name="f32", times=2.5),
        square(32, times=1.05), square(80, times=1.05), square(96, times=1.05), square(112, times=1.05),
        square(224, times=1.05), Case(16, 1000, 1000, 16, 16, 128), Case(1, 128, 128, 8, 8, 64),
    ]


def rows_section(page, library, args):
    names = ["this", "flash", "cudnn", "efficient"] + (["peer"] if args.peer else [])
    page.say("\n## Rows\n")
    page.say("TFLOP/s, forward / backward; our times in microseconds.\n")
    page.table("case", *names, "over the best", "microseconds", "marks")
    for case in rows():
        times = case.milliseconds(library, args)
        speeds = [" / ".join(f"{case.speed(which, times[which][name]):.0f}" if name in times[which] else "-"
                             for which in PASSES) for name in names]
        ratios = {which: ratio(times[which]) for which in PASSES}
        missed = [f"{which} below {case.times:g} {best_of(times[which])}" for which in PASSES
                  if not page.mark(f"{case.type_name} {which}: at least {case.times:g} of the best other",
                                   ratios[which] >= case.times)]
        page.say("| " + " | ".join([str(case), *speeds, " / ".join(f"{x:.3f}" for x in ratios.values()),
                                    " / ".join(f"{1e3 * times[which]['this']:.1f}" for which in PASSES),
                                    "missed: " + ", ".join(missed) if missed else "met"]) + " |")
        torch.cuda.empty_cache()


# ---- the sweep -------------------------------------------------------------------------------------------------


def points(quick):
    seqlens = (1, 16, 128, 1024, 8192, 65536) if quick else (1, 16, 77, 256, 1024, 4096, 16384, 65536)
    for head_dim in (128,) if quick else (64, 128):
        for s in seqlens:
            yield from (Case(1, s, t, 16, 16, head_dim) for t in seqlens)
    for group in (1, 2, 4, 8, 16, 32):
        for head_dim, causal in ((128, True),) if quick else ((64, False), (64, True), (128, False), (128, True)):
            for s in (2048,) if quick else (512, 2048, 8192):
                yield Case(max(1, 8192 // s), s, s, 32, 32 // group, head_dim, causal)
    for head_dim in range(16 if quick else 8, 257, 16 if quick else 8):
        for causal in (True,) if quick else (False, True):
            yield Case(4, 2048, 2048, 2048 // head_dim, 2048 // head_dim, head_dim, causal)


def sweep_section(page, library, args):
    began, count, below = time.time(), 0, 0
    page.say("\n## Sweep\n")
    page.say("Points below 0.9 of the best other; microseconds.\n")
    page.table("case", "pass", "this", "best other", "its", "of its speed")
    args.budget_ms /= 4
    for case in points(args.quick):
        if case.operations > MOST_OPERATIONS:
            continue
        for which, times in case.milliseconds(library, args).items():
            count += 1
            if ratio(times) < 0.9:
                below += 1
                best = best_of(times)
                cells = [str(case), which, f"{1e3 * times['this']:.1f}", best, f"{1e3 * times[best]:.1f}", f"{ratio(times):.2f}"]
                page.say("| " + " | ".join(cells) + " |")
    page.say(f"\n{below} of {count}, in {time.time() - began:.0f} s.")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="go through sizes, too")
    parser.add_argument("--quick", action="store_true", help="fewer points, fewer turns")
    parser.add_argument("--library", default="priv/libflash_attention.so")
    parser.add_argument("--result", help="where to keep the page, without .md")
    parser.add_argument("--peer", type=load_peer, metavar="MODULE.py", help="one more implementation of 16-bit cases")
    args = parser.parse_args()
    args.budget_ms = 100 if args.quick else 250
    warnings.simplefilter("ignore")  # torch says of each case which backends do not take it
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    library, page, name = Library(args.library), Page(), torch.cuda.get_device_name()
    result = args.result or "bench/results/" + name.lower().replace("nvidia ", "").replace(" ", "-") + "_corners"

    page.say(f"# The corners of attention on an {name}\n")
    options = "".join(f" --{x}" for x in ("sweep", "quick") if getattr(args, x))
    page.say(f"`make bench-corners{f' BENCH_ARGS={options.strip()!r}' if options else ''}`: torch {torch.__version__}, cuDNN "
             f"{torch.backends.cudnn.version()}; how rows are measured stands in bench/corners.py. flash (FlashAttention-2), "
             "cudnn and efficient are backends of torch's scaled_dot_product_attention.")
    rows_section(page, library, args)
    if args.sweep:
        sweep_section(page, library, args)
    page.say("\n## Marks\n")
    page.verdicts()
    page.keep(result + ".md")


if __name__ == "__main__":
    main()
