"""Attention whose scores are changed by their places, on this machine's GPU: a bias and the gradient by it, masks of
single scores and of keys, ALiBi, dropout, beside torch's kernels and beside the same problem without them, in one run.

    python3 bench/scores.py [--quick] [--library priv/libflash_attention.so] [--result bench/results/h200_scores]

Needs torch, whose scaled_dot_product_attention has the peers: of a bias cuDNN and the memory-efficient kernel, which
alone has a gradient by it, and of dropout FlashAttention-2 and cuDNN. They take no bias beside a causal mask, so that
there their bias holds the mask. Prints a page of Markdown and keeps it in RESULT.md.

Medians of event timings, all implementations by turns, the L2 cache flushed before each. TFLOP/s count what a problem
without any of this counts: 4*b*h*s*s*d operations forward, half of that under a causal mask, 2.5 times as many
backward. bf16, and at the end f32, hidden size 2048, inputs normal, [batch, seqlen, heads, head_dim].
"""
import argparse
import sys
import time

import needs

needs.modules("torch")

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from gpu import HIDDEN, Library, Page, This, Torch, attempt, median_ms, pair
from c_library import PASSES

BATCH, SEQLEN, RATE = 8, 2048, 0.1


class Peer:
    """One of torch's kernels with a bias [1, heads, seqlen, seqlen] or dropout."""

    def __init__(self, backend, q, k, v, dout, causal, bias=None, dbias=False, dropout=0.0):
        self.backend, self.dropout, self.dout = Torch.BACKENDS[backend], dropout, dout.transpose(1, 2)
        self.leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        self.causal, self.bias = causal, bias
        if bias is not None:
            hidden = torch.ones(bias.shape[2:], dtype=torch.bool, device="cuda").triu(1)
            self.bias = (bias.masked_fill(hidden, -torch.inf) if causal else bias).detach().clone()
            self.bias.requires_grad_(dbias)
            self.causal = False
        self.differentiated = self.leaves + ([self.bias] if dbias else [])
        self.o = self.forward()

    def forward(self):
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(*self.leaves, attn_mask=self.bias, dropout_p=self.dropout,
                                                  is_causal=self.causal)

    def backward(self):
        return torch.autograd.grad(self.o, self.differentiated, self.dout, retain_graph=True)

    def results(self):
        gradients = self.backward()
        return [x.detach().transpose(1, 2) for x in (self.o, *gradients[:3])] + list(gradients[3:])


class Case:
    def __init__(self, head_dim, causal, dtype):
        self.head_dim, self.causal, self.heads, self.dtype = head_dim, causal, HIDDEN // head_dim, dtype
        self.operations = 4 * BATCH * self.heads * SEQLEN**2 * head_dim * (0.5 if causal else 1)

    def __str__(self):
        return f"d{self.head_dim} {'causal' if self.causal else 'full'}"

    def inputs(self):
        shape = BATCH, SEQLEN, self.heads, self.head_dim
        return [self.normal(*shape) for _ in range(4)]

    def normal(self, *shape):
        return torch.randn(shape, device="cuda", dtype=self.dtype)

    def milliseconds(self, made, budget_ms):
        """{(implementation, pass): milliseconds}"""
        return median_ms({(name, which): getattr(one, which)
                          for name, one in made.items() if one for which in PASSES}, budget_ms)

    def speeds(self, measured):
        """TFLOP/s of such a dictionary."""
        return {(name, which): self.operations * (2.5 if which == "backward" else 1) / ms / 1e9
                for (name, which), ms in measured.items()}


def flags(*shape):
    """One in ten hides, at random, so that no block is hidden whole."""
    return (torch.rand(shape, device="cuda") >= 0.1).to(torch.uint8)


def agree(page, ours, other, name):
    """Whether the largest difference from a peer, as a part of the largest element, is rounding to bf16."""
    if not ours or not other:
        return
    ours.forward()
    ours.backward()
    for x, y in zip(ours.outputs, other.results()):
        part = ((x.float() - y.float()).abs().max() / y.float().abs().max()).item()
        if not page.mark(f"{name}: less than 2 % of the largest element from the peer's", part < 0.02):
            print(f"{name}: {part:.3g} from the peer's", file=sys.stderr)


def verdict(missed):
    return "missed: " + ", ".join(missed) if missed else "met"


def missed_marks(page, measured, marks):
    """marks: (pass, whose speed, how many times that, what to call it); of those that were measured, which are missed."""
    return [f"{which} below {times:g} {whose}" for which, whose, times, name in marks if (whose, which) in measured and
            not page.mark(name, measured.get(("this", which), 0) >= times * measured[whose, which])]


def bias_row(page, library, case, args):
    qkv, bias = case.inputs(), case.normal(1, case.heads, SEQLEN, SEQLEN)
    made = {"this": attempt(lambda: This(library, *qkv, case.causal, dict(bias=bias), constant_bias=1)),
            "dbias": attempt(lambda: This(library, *qkv, case.causal, dict(bias=bias), ["bias"])),
            "cudnn": attempt(Peer, "cudnn", *qkv, case.causal, bias),
            "efficient": attempt(Peer, "efficient", *qkv, case.causal, bias),
            "efficient dbias": attempt(Peer, "efficient", *qkv, case.causal, bias, True),
            "none": This(library, *qkv, case.causal)}
    agree(page, made["this"], made["cudnn"] or made["efficient"], "o, dq, dk and dv with a bias")
    agree(page, made["dbias"], made["efficient dbias"], "o, dq, dk, dv and dbias")
    times = case.milliseconds(made, args.budget_ms)
    measured = case.speeds(times)
    missed = missed_marks(page, measured, [
        (which, "cudnn", least, f"bias without a gradient, {which}: at least {least} times cuDNN")
        for which, least in zip(PASSES, (1.25, 1.2))])
    both = {name: sum(times.get((name, which), float("nan")) for which in PASSES) for name in made}
    ratio = both["efficient dbias"] / both["dbias"]
    if not page.mark("bias with its gradient, both passes: at least 3 times efficient", ratio >= 3):
        missed.append("with dbias below 3 efficient")
    page.say("| " + " | ".join([
        str(case), pair(measured, "this"), pair(measured, "cudnn"), pair(measured, "efficient"), pair(measured, "none"),
        pair(measured, "this", "cudnn"), pair(measured, "dbias"), pair(measured, "efficient dbias"), f"{ratio:.2f}",
        verdict(missed)]) + " |")


def padding(batch):
    """Of padded batches: each hides from some key in its second half on."""
    ends = torch.randint(SEQLEN // 2, SEQLEN + 1, (batch, 1, 1, 1), device="cuda")
    return (torch.arange(SEQLEN, device="cuda") < ends).to(torch.uint8)


def documents(batch):
    """Of packed batches: rows see their own document, of 300 on average."""
    number = torch.cumsum(torch.rand(batch, SEQLEN, device="cuda") < 1 / 300, 1)
    return (number[:, None, :, None] == number[:, None, None]).to(torch.uint8)


# What leaves nearly all of the work as it is: name, and how much longer it may take.
def cheap(case):
    slopes = 2.0 ** -torch.linspace(0.25, 8, case.heads, device="cuda")[None]
    return {"bias [b, 1, 1, s]": (1.08, dict(bias=case.normal(BATCH, 1, 1, SEQLEN)), (), dict(constant_bias=1)),
            "the same, with dbias": (None, dict(bias=case.normal(BATCH, 1, 1, SEQLEN)), ["bias"], {}),
            "u8 [b, 1, 1, s]": (1.08, dict(bias=flags(BATCH, 1, 1, SEQLEN)), (), {}),
            "u8 [b, 1, 1, s], padding": (1.08, dict(bias=padding(BATCH)), (), {}),
            "u8 [b, 1, s, s]": (1.08, dict(bias=flags(BATCH, 1, SEQLEN, SEQLEN)), (), {}),
            "u8 [b, 1, s, s], documents": (None, dict(bias=documents(BATCH)), (), {}),
            "ALiBi": (1.12, dict(alibi_slopes=slopes), (), dict(constant_alibi_slopes=1)),
            "ALiBi, with dalibi_slopes": (1.12, dict(alibi_slopes=slopes), ["alibi_slopes"], {})}


def cheap_rows(page, library, case, args):
    rows_of_added(page, library, case, args, case.inputs(), cheap(case))


def dropout_seed():
    return torch.tensor([17, 4], dtype=torch.int32, device="cuda").view(torch.uint32)


# Everything, of f32, which has no marks here, and beside it the only kernel of torch that takes f32.
def f32_rows(page, library, case, args):
    qkv, bias = case.inputs(), case.normal(1, case.heads, SEQLEN, SEQLEN)
    added = {"bias [1, h, s, s]": (None, dict(bias=bias), (), dict(constant_bias=1)),
             "bias, with dbias": (None, dict(bias=bias), ["bias"], {}),
             f"dropout {RATE}": (None, dict(dropout_seed=dropout_seed()), (), dict(dropout=RATE)),
             **{name: (None, *rest) for name, (_, *rest) in cheap(case).items()}}
    peers = {"bias [1, h, s, s]": attempt(Peer, "efficient", *qkv, case.causal, bias),
             "bias, with dbias": attempt(Peer, "efficient", *qkv, case.causal, bias, True),
             f"dropout {RATE}": attempt(lambda: Peer("efficient", *qkv, case.causal, dropout=RATE))}
    rows_of_added(page, library, case, args, qkv, added, peers)


# A row for each. peers: by name, whose times are the last column, in the place of marks.
def rows_of_added(page, library, case, args, qkv, added, peers=None):
    def milliseconds(name, digits=3):
        return " / ".join(f"{times.get((name, which), float('nan')):.{digits}f}" for which in PASSES)

    made = {f"efficient {name}": peer for name, peer in (peers or {}).items()}
    for name, (_, optional, differentiated, options) in added.items():
        made[name] = attempt(lambda: This(library, *qkv, case.causal, optional, differentiated, **options))
    made["none"] = This(library, *qkv, case.causal)
    times = case.milliseconds(made, args.budget_ms)
    for name, (most, *_) in added.items():
        ratios = {which: times.get((name, which), float("inf")) / times["none", which] for which in PASSES}
        missed = [which for which in PASSES if most and not page.mark(
            f"{name}, {which}: at most {most} times the time of none", ratios[which] <= most)]
        if peers:
            last = milliseconds(f"efficient {name}", 2) if name in peers else "-"
        else:
            last = verdict(missed) if most else "-"
        page.say("| " + " | ".join([
            f"{case} {name}", milliseconds(name), milliseconds("none"),
            " / ".join(f"{ratio:.3f}" for ratio in ratios.values()), last]) + " |")


def dropout_row(page, library, case, args):
    qkv = case.inputs()
    made = {"this": attempt(lambda: This(library, *qkv, case.causal, dict(dropout_seed=dropout_seed()), dropout=RATE)),
            "flash": attempt(lambda: Peer("flash", *qkv, case.causal, dropout=RATE)),
            "cudnn": attempt(lambda: Peer("cudnn", *qkv, case.causal, dropout=RATE)),
            "none": This(library, *qkv, case.causal)}
    measured = case.speeds(case.milliseconds(made, args.budget_ms))
    missed = missed_marks(page, measured, [
        (which, peer, 1.3, f"dropout {which}: at least 1.3 times the better peer")
        for which in PASSES for peer in ("flash", "cudnn")])
    page.say("| " + " | ".join([
        str(case), pair(measured, "this"), pair(measured, "flash"), pair(measured, "cudnn"), pair(measured, "none"),
        pair(measured, "this", "flash"), pair(measured, "this", "cudnn"), pair(measured, "this", "none"),
        verdict(missed)]) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few turns")
    parser.add_argument("--library", default="priv/libflash_attention.so")
    parser.add_argument("--result", help="where to keep the page, without .md")
    args = parser.parse_args()
    args.budget_ms = 150 if args.quick else 700
    torch.manual_seed(0)
    library, page, name = Library(args.library), Page(), torch.cuda.get_device_name()
    result = args.result or "bench/results/" + name.lower().replace("nvidia ", "").replace(" ", "-") + "_scores"
    began = time.time()

    def section(title, text, columns, row, dtype=torch.bfloat16):
        page.say(f"\n## {title}\n\n{text}\n")
        page.table(*columns)
        for head_dim in (64, 128):
            for causal in (False, True):
                row(page, library, Case(head_dim, causal, dtype), args)
                torch.cuda.empty_cache()
        print(f"{time.time() - began:.0f} s", file=sys.stderr)

    page.say(f"# Scores changed by their places on an {name}\n")
    page.say(f"`make bench-scores{' BENCH_ARGS=--quick' if args.quick else ''}`: torch {torch.__version__}, cuDNN "
             f"{torch.backends.cudnn.version()}. bf16, batch {BATCH}, seqlen {SEQLEN}, hidden size {HIDDEN}; TFLOP/s, forward / "
             "backward; how they are measured stands in bench/scores.py.")
    section("A bias [1, heads, seqlen, seqlen]",
            "this, cuDNN, efficient: without a gradient by the bias. none: this without a bias. dbias: with that gradient, and "
            "how many times as fast as efficient both passes together are.",
            ("case", "this", "cuDNN", "efficient", "none", "over cuDNN", "dbias", "efficient, dbias", "both, over efficient",
             "marks"), bias_row)
    section("What costs little",
            "Milliseconds. One in ten flags of u8 hides, at random, or, as padding, the last quarter on average, or all of other "
            "documents than a row's own, which has 300 tokens on average.",
            ("case", "with it", "none", "times", "marks"), cheap_rows)
    section(f"Dropout, rate {RATE}", "none: this without dropout.",
            ("case", "this", "FLASH", "cuDNN", "none", "over FLASH", "over cuDNN", "over none", "marks"), dropout_row)
    section("f32", "Milliseconds, precision \"highest\". efficient: torch's memory-efficient kernel with the same.",
            ("case", "with it", "none", "times", "efficient"), f32_rows, torch.float32)
    page.say("\n## Marks\n\nHow many of the rows meet each.\n")
    page.verdicts()
    page.keep(result + ".md")


if __name__ == "__main__":
    main()
