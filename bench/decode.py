"""Decoding on this machine's GPU: a few rows of q beside a long cache of k and v, next to torch's kernels.

    python3 bench/decode.py [--quick] [--library priv/libflash_attention.so] [--result bench/results/h200_decode]

Needs torch. Calls the C library through ctypes on torch's tensors and stream; peers are the backends of torch's
scaled_dot_product_attention. Prints a page of Markdown and keeps it in RESULT.md.

Microseconds: the median of event timings, every implementation in turn, the L2 cache flushed before each.
GB/s: bytes of k and v over that time. Inputs are normal, [batch, seqlen, heads, head_dim].
"""
import argparse
import os
import random
import statistics

import needs

needs.modules("torch")

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu import TYPES, Library, Page, attempt

# batch, seqlen_k, num_heads, num_kv_heads, head_dim: microseconds to reach
MARKS = {
    (1, 1024, 32, 8, 128): 9.5,
    (1, 4096, 32, 8, 128): 13.5,
    (1, 32768, 32, 8, 128): 42,
    (1, 131072, 32, 8, 128): 132,
    (8, 4096, 32, 8, 128): 42,
    (32, 4096, 32, 8, 128): 130,
    (8, 32768, 32, 8, 128): 252,
    (128, 1024, 32, 8, 128): 132,
    (16, 8192, 64, 8, 64): 78,
    (8, 8192, 16, 16, 128): 129,
}
OTHERS = [(1, 1024, 8, 1, 128), (3, 5000, 24, 8, 80), (4, 10000, 16, 1, 64), (2, 8192, 16, 4, 256)]


def lengths_of(q, k):
    """All keys there are."""
    return dict(key_lengths=torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device="cuda"))


class This:
    """inputs: further ones, such as lengths."""

    def __init__(self, library, q, k, v, inputs={}, **options):
        b, s, h, _ = q.shape
        self.o = torch.empty_like(q)
        outputs = dict(o=self.o, lse=torch.empty(b, h, s, device="cuda"))
        self.forward = library.prepare("forward", dict(q=q, k=k, v=v, **inputs), outputs, window_right=0, **options)

    def result(self):
        self.forward()
        return self.o


class Paged:
    """The same keys on pages in random order, with lengths."""

    def __init__(self, library, q, k, v, page_size):
        b, s, h, _ = q.shape
        num_pages = b * k.shape[1] // page_size
        order = torch.randperm(num_pages, device="cuda")
        table = torch.empty_like(order)
        table[order] = torch.arange(num_pages, device="cuda")
        pages = lambda x: x.reshape(num_pages, page_size, *x.shape[2:])[order].contiguous()
        inputs = dict(q=q, k=pages(k), v=pages(v), page_table=table.reshape(b, -1).to(torch.int32), **lengths_of(q, k))
        self.o = torch.empty_like(q)
        outputs = dict(o=self.o, lse=torch.empty(b, h, s, device="cuda"))
        self.forward = library.prepare("forward", inputs, outputs, window_right=0)

    def result(self):
        self.forward()
        return self.o


class Torch:
    BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}

    def __init__(self, name, q, k, v):
        self.backend, self.inputs = self.BACKENDS[name], [x.transpose(1, 2) for x in (q, k, v)]
        self.forward()

    def forward(self):
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(*self.inputs, enable_gqa=True)

    def result(self):
        return self.forward().transpose(1, 2)


def inputs_of(case, seqlen_q=1, type_name="bf16"):
    batch, seqlen_k, num_heads, num_kv_heads, head_dim = case
    make = lambda s, h: torch.randn(batch, s, h, head_dim, device="cuda", dtype=TYPES[type_name])
    return make(seqlen_q, num_heads), make(seqlen_k, num_kv_heads), make(seqlen_k, num_kv_heads)


def error_of(result, q, k, v):
    """||x - exact|| / ||exact|| of the first batch, one row."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x[:1].double().transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    exact = (torch.softmax(q @ k.transpose(2, 3) / q.shape[3]**0.5, -1) @ v).transpose(1, 2)
    return ((result[:1].double() - exact).norm() / exact.norm()).item()


def name_of(case):
    batch, seqlen_k, num_heads, num_kv_heads, head_dim = case
    return f"{batch} x {seqlen_k}, {num_heads}:{num_kv_heads}, d{head_dim}"


def microseconds(runs, num_turns):
    """{name: median}. All take turns, in another order each time: what ran before costs some their first microseconds.
    The GPU is kept busy first, so that no launch waits for Python."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = {name: [] for name in runs}
    for run in runs.values():
        run()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for _ in range(num_turns):
        for name, run in random.sample([*runs.items()], len(runs)):
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            events[0].record()
            run()
            events[1].record()
            times[name].append(events)
    torch.cuda.synchronize()
    return {name: statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in of) for name, of in times.items()}


def number(times, name, form="{:.1f}"):
    return form.format(times[name]) if name in times else "-"


def one_row(page, library, args):
    page.say("## One row of q (bf16)\n")
    page.table("batch x keys, heads", "this, us", "GB/s", "with lengths", "cuDNN", "flash", "this over cuDNN", "reach", "error")
    for case in [*MARKS, *([] if args.quick else OTHERS)]:
        inputs = inputs_of(case)
        made = {"this": This(library, *inputs), "lengths": This(library, *inputs, lengths_of(*inputs[:2]))}
        for name in Torch.BACKENDS:
            made[name] = attempt(Torch, name, *inputs)
        runs = {name: x.forward for name, x in made.items() if x}
        times = microseconds(runs, args.turns)
        size = 2 * inputs[1].numel() * inputs[1].element_size()
        ratio = f"{times['cudnn'] / times['this']:.2f}" if "cudnn" in times else "-"
        error = error_of(made["this"].result(), *inputs) if size < 2e8 else None
        page.say(f"| {name_of(case)} | {times['this']:.1f} | {size / times['this'] / 1e3:.0f} | {times['lengths']:.1f} | {number(times, 'cudnn')} "
                 f"| {number(times, 'flash')} | {ratio} | {MARKS.get(case, '-')} | "
                 f"{'-' if error is None else f'{error:.1e}'} |")


def more_rows(page, library, args):
    page.say("\n## More rows of q: times one row\n")
    sizes = (1, 2, 4, 8, 16)
    page.table("batch x keys, heads", *[f"{s} rows" for s in sizes])
    for case in [(1, 4096, 32, 8, 128), (8, 4096, 32, 8, 128), (32, 4096, 32, 8, 128)]:
        made = {s: This(library, *inputs_of(case, s)) for s in sizes}
        times = microseconds({s: x.forward for s, x in made.items()}, args.turns)
        page.say(f"| {name_of(case)} | {times[1]:.1f} us | " +
                 " | ".join(f"{times[s] / times[1]:.2f}" for s in sizes[1:]) + " |")


def pages(page, library, args):
    page.say("\n## Pages, with lengths: times contiguous keys with lengths\n")
    sizes = (1, 16, 64, 256)
    page.table("batch x keys, heads", "contiguous", *[f"pages of {s}" for s in sizes], "same bits from 16 on")
    for case in [(1, 4096, 32, 8, 128), (8, 4096, 32, 8, 128), (32, 4096, 32, 8, 128), (16, 8192, 64, 8, 64)]:
        inputs = inputs_of(case)
        made = {0: This(library, *inputs, lengths_of(*inputs[:2])), **{s: Paged(library, *inputs, s) for s in sizes}}
        times = microseconds({s: x.forward for s, x in made.items()}, args.turns)
        same = all(torch.equal(made[0].result(), made[s].result()) for s in sizes if s >= 16)
        page.say(f"| {name_of(case)} | {times[0]:.1f} us | " +
                 " | ".join(f"{times[s] / times[0]:.3f}" for s in sizes) + f" | {'yes' if same else 'NO'} |")


def additions(q, k):
    """What may be added to scores, or say which keys are seen: name, and tensors. A tenth of flags are 0, and paddings take
    an eighth of the keys on average."""
    b, s, h, _ = q.shape
    keys = k.shape[1]
    flags = (torch.rand(b, 1, 1, keys, device="cuda") > 0.1).to(torch.uint8)
    begins = torch.randint(0, keys // 4, (b,), device="cuda")
    bands = torch.stack([torch.tensor([0, s, begin, keys, 2**31 - 1, 2**31 - 1], device="cuda") for begin in begins.tolist()])
    slopes = 2.0 ** -torch.linspace(0.25, 8, h, device="cuda")[None]
    return {"u8 [b, 1, 1, s]": dict(bias=flags),
            "bias [1, h, 1, s]": dict(bias=torch.randn(1, h, 1, keys, device="cuda", dtype=q.dtype)),
            "ALiBi": dict(alibi_slopes=slopes),
            "padding on the left": dict(bands=bands[:, None].to(torch.int32).contiguous())}


def added(page, library, args):
    page.say("\n## What is added to the scores of one row: times one row\n")
    cases = [(1, 4096, 32, 8, 128), (8, 4096, 32, 8, 128), (32, 4096, 32, 8, 128)]
    page.table("batch x keys, heads", "nothing", *additions(*inputs_of(cases[0])[:2]))
    for case in cases:
        inputs = inputs_of(case)
        made = {"nothing": This(library, *inputs)}
        made |= {name: This(library, *inputs, more) for name, more in additions(*inputs[:2]).items()}
        times = microseconds({name: x.forward for name, x in made.items()}, args.turns)
        page.say(f"| {name_of(case)} | {times['nothing']:.1f} us | " +
                 " | ".join(f"{times[name] / times['nothing']:.2f}" for name in [*made][1:]) + " |")


def other_types(page, library, args):
    page.say("\n## Other types, with lengths\n")
    page.table("batch x keys, heads", "type", "us", "GB/s", "16 rows, us")
    for case in [(1, 4096, 32, 8, 128), (8, 4096, 32, 8, 128)]:
        for type_name, options in (("f16", {}), ("f32", {}), ("f32", {"precision": 2})):
            inputs = {rows: inputs_of(case, rows, type_name) for rows in (1, 16)}
            times = microseconds({rows: This(library, *x, lengths_of(*x[:2]), **options).forward
                                  for rows, x in inputs.items()}, args.turns)
            size = 2 * inputs[1][1].numel() * inputs[1][1].element_size()
            page.say(f"| {name_of(case)} | {type_name}{' default' if options else ''} | {times[1]:.1f} | "
                     f"{size / times[1] / 1e3:.0f} | {times[16]:.1f} |")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", default="priv/libflash_attention.so")
    parser.add_argument("--result", default="bench/results/h200_decode")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--turns", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    library, page = Library(args.library), Page()
    page.say(f"# Decoding on {torch.cuda.get_device_name()}\n")
    page.say(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}. " + " ".join(__doc__.split("\n\n")[-1].split()) + "\n")
    one_row(page, library, args)
    more_rows(page, library, args)
    pages(page, library, args)
    added(page, library, args)
    if not args.quick:
        other_types(page, library, args)
    os.makedirs(os.path.dirname(args.result) or ".", exist_ok=True)
    with open(args.result + ".md", "w") as file:
        file.write("\n".join(page.lines) + "\n")


if __name__ == "__main__":
    main()
