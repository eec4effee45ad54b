"""Attention under masks (the tensor `bands`) on this machine's GPU, beside what else takes such masks, in one run.

    python3 bench/masks.py [--quick] [--library priv/libflash_attention.so] [--result bench/results/h200_masks]
                           [--peer MODULE.py]

Needs torch. Peers: torch's varlen_attn (FlashAttention-2 on packed sequences) and flex_attention, compiled, with a mask
function for each kind of mask; figures of FlashAttention-3 and of flex-flash-attention are fixed numbers, whose origin the
page states, but FlashAttention-3's are measured where --peer gives it: a Python file with a class Peer as bench/gpu.py takes
one, and Peer.packed(lengths, causal, q, k, v, dout). Prints a page of Markdown and keeps it in RESULT.md.

TFLOP/s over the visible cells: 4*heads*head_dim operations each forward, 2.5 times as many backward; medians of event timings,
all implementations by turns, the L2 cache flushed before each. Types are bf16.
"""
import argparse
import random
import sys
import time

import needs

needs.modules("numpy", "torch")

import numpy
import torch

import gpu
from gpu import Library, Page, This, attempt, load_peer, median_ms, pair
from c_library import PASSES

INFINITE = 2**31 - 1
TYPE = torch.bfloat16


# ---- masks: bands, and the same as a function of (b, h, i, j) for flex_attention ----------------------------------


def whole(q_begin, q_end, k_begin, k_end):
    return q_begin, q_end, k_begin, k_end, INFINITE, INFINITE


def ends(lengths):
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def packed(lengths):
    """Sequences one behind the other."""
    at = ends(lengths)
    return [whole(x, y, x, y) for x, y in zip(at, at[1:])]


def visible_columns(bands, causal):
    """Of every row of every band: (row, first, last + 1), three arrays."""
    parts = []
    for q_begin, q_end, k_begin, k_end, left, right in bands:
        rows = numpy.arange(q_begin, q_end)
        beside = rows - q_end + k_end
        first = numpy.maximum(k_begin, beside - left)
        last = numpy.minimum(k_end, beside + min(right, 0 if causal else INFINITE) + 1)
        parts.append((rows, first, numpy.maximum(first, last)))
    return [numpy.concatenate(x) for x in zip(*parts)]


def area(bands, causal):
    _rows, first, last = visible_columns(bands, causal)
    return int((last - first).sum())


def packed_function(lengths, causal):
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()
    if causal:
        return lambda b, h, i, j: (document[i] == document[j]) & (i >= j)
    return lambda b, h, i, j: document[i] == document[j]


class Mask:
    """A mask of one batch: name, bands, whether causal holds within them, and the function."""

    def __init__(self, name, bands, function, causal=False, long_ranges=True, published=None):
        self.name, self.bands, self.function, self.causal = name, bands, function, causal
        self.long_ranges, self.published = long_ranges, published


def block_causal(seqlen):
    """Two documents, each of blocks of an eighth, an eighth and a quarter, which see the blocks before them."""
    bands, block_end, document = [], [], []
    for begin in (0, seqlen // 2):
        for first, last in ((0, seqlen // 8), (seqlen // 8, seqlen // 4), (seqlen // 4, seqlen // 2)):
            bands.append(whole(begin + first, begin + last, begin, begin + last))
            block_end += [begin + last] * (last - first)
            document += [begin] * (last - first)
    block_end, document = torch.tensor(block_end).cuda(), torch.tensor(document).cuda()
    published = {2048: "197 / 201", 8192: "528 / 314", 32768: "572 / 363"}
    return Mask("block causal", bands, lambda b, h, i, j: (j >= document[i]) & (j < block_end[i]),
                long_ranges=seqlen >= 4096, published=published.get(seqlen))


def prefix(seqlen):
    length = 3 * seqlen // 10 + 37
    bands = [whole(0, seqlen, 0, length), (length, seqlen, length, seqlen, INFINITE, 0)]
    return Mask("prefix LM", bands, lambda b, h, i, j: (j < length) | (j <= i))


def shared_prefix(seqlen):
    """A question of a quarter, and three answers that see it and themselves."""
    part = seqlen // 4
    bands = [(0, part, 0, part, INFINITE, 0)]
    for answer in (1, 2, 3):
        rows = answer * part, (answer + 1) * part
        bands += [whole(*rows, 0, part), (*rows, *rows, INFINITE, 0)]
    return Mask("shared prefix", bands, lambda b, h, i, j: (j <= i) & ((j < part) | (i // part == j // part)))


def sparse(seqlen):
    """Ranges of rows, each beside two ranges of columns at random places, of random types."""
    dice, least = random.Random(seqlen), 128 if seqlen < 4096 else 512
    bands, row = [], 0
    while row < seqlen:
        rows = min(seqlen - row, dice.randint(least, 2 * least))
        rows = seqlen - row if seqlen - row - rows < least else rows
        places = sorted(dice.sample(range(0, seqlen - 4 * least, 2 * least), 2))
        for place in places:
            begin = place + dice.randint(0, least // 2)
            columns = dice.randint(least, 2 * least - least // 2)
            type_bits = dice.randint(0, 3)
            left = columns - rows if type_bits & 2 else INFINITE
            bands.append((row, row + rows, begin, begin + columns, left, 0 if type_bits & 1 else INFINITE))
        row += rows
    allowed = numpy.zeros((seqlen, seqlen), bool)
    for i, first, last in zip(*visible_columns(bands, False)):
        allowed[i, first:last] = True
    allowed = torch.from_numpy(allowed).cuda()
    return Mask("sparse ranges", bands, lambda b, h, i, j: allowed[i, j], long_ranges=least >= 512)


# ---- implementations, as those of gpu.py ---------------------------------------------------------------------


class Banded(This):
    """bands: a list of bands for all batches, or a list of lists."""

    def __init__(self, library, q, k, v, dout, causal, bands):
        batches = bands if isinstance(bands[0], list) else [bands]
        super().__init__(library, q, k, v, dout, causal,
                         optional=dict(bands=torch.tensor(batches, dtype=torch.int32, device="cuda")))


class Differentiated:
    """An implementation by torch: leaves, and how o comes of them in [batch, seqlen, heads, head_dim]."""

    def __init__(self, attend, q, k, v, dout):
        self.attend, self.dout = attend, dout
        self.leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        self.o = self.forward()

    def forward(self):
        return self.attend(*self.leaves)

    def backward(self):
        return torch.autograd.grad(self.o, self.leaves, self.dout, retain_graph=True)

    def results(self):
        return [x.detach() for x in (self.o, *self.backward())]


def varlen(lengths, causal, q, k, v, dout):
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    at = torch.tensor(ends(lengths), dtype=torch.int32, device="cuda")
    taken = inspect.signature(varlen_attn).parameters
    options = dict(window_size=(-1, 0 if causal else -1)) if "window_size" in taken else dict(is_causal=causal)
    options.update(dict(enable_gqa=True) if "enable_gqa" in taken else {})

    def attend(q, k, v):
        return varlen_attn(q[0], k[0], v[0], at, at, max(lengths), max(lengths), **options)[None]

    return Differentiated(attend, q, k, v, dout)


compiled = None


def flex(function, q, k, v, dout):
    global compiled
    import torch._dynamo
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not compiled:
        torch._dynamo.config.recompile_limit = 64
        # The backward runs many times.
        torch._functorch.config.donated_buffer = False
        compiled = torch.compile(flex_attention)
    seqlen = q.shape[1]
    block_mask = create_block_mask(function, None, None, seqlen, seqlen)

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)

    return Differentiated(attend, q, k, v, dout)


# ---- rows ----------------------------------------------------------------------------------------------------


def inputs(batch, seqlen, heads, kv_heads, head_dim):
    def normal(count):
        return torch.randn(batch, seqlen, count, head_dim, device="cuda", dtype=TYPE)

    return normal(heads), normal(kv_heads), normal(kv_heads), normal(heads)


def times(made, args):
    """{(implementation, pass): milliseconds}"""
    return median_ms({(name, which): getattr(implementation, which)
                      for name, implementation in made.items() if implementation for which in PASSES}, args.budget_ms)


def speeds(measured, cells, heads, head_dim):
    """TFLOP/s; of implementations whose cells are others than the mask's, {name: cells}."""
    return {(name, which): 4 * heads * head_dim * cells[name] * (2.5 if which == "backward" else 1) / ms / 1e9
            for (name, which), ms in measured.items()}


def agree(page, made):
    """The largest difference from a peer, as a part of the largest element: rounding to bf16, or a mistake."""
    ours, others = made.get("this"), [x for name, x in made.items() if name in ("varlen", "flex", "peer") and x]
    if not ours or not others:
        return
    for other in others:
        for x, y in zip(ours.results(), other.results()):
            part = ((x.float() - y.float()).abs().max() / y.float().abs().max()).item()
            page.mark("o, dq, dk and dv differ from a peer's by less than 2 % of their largest element", part < 0.02)


class Packed:
    """A row of packed sequences: 16,384 tokens. flash3: FlashAttention-3's forward and backward on an H200."""

    def __init__(self, heads, kv_heads, head_dim, name, lengths, causal, flash3):
        self.heads, self.kv_heads, self.head_dim, self.lengths, self.causal = heads, kv_heads, head_dim, lengths, causal
        self.flash3 = dict(zip(PASSES, flash3))
        # Its bookkeeping is weak where sequences are short.
        self.factor = 1.15 if max(lengths) <= 512 else 1
        count = f"{heads}" if heads == kv_heads else f"{heads}:{kv_heads}"
        self.name = f"{count} heads d{head_dim}, {name}, {'causal' if causal else 'full'}"

    def row(self, page, library, args):
        bands = packed(self.lengths)
        qkv = inputs(1, sum(self.lengths), self.heads, self.kv_heads, self.head_dim)
        made = {"this": attempt(Banded, library, *qkv, self.causal, bands),
                "varlen": attempt(varlen, self.lengths, self.causal, *qkv)}
        if self.heads == 16:
            made["flex"] = attempt(flex, packed_function(self.lengths, self.causal), *qkv)
        if args.peer:
            made["peer"] = attempt(args.peer.packed, self.lengths, self.causal, *qkv)
        agree(page, made)
        cells = dict.fromkeys(made, area(bands, self.causal))
        measured = speeds(times(made, args), cells, self.heads, self.head_dim)
        flash3 = {which: measured.get(("peer", which), self.flash3[which]) for which in PASSES}
        missed = [f"{which} below {self.factor * flash3[which]:.0f}" for which in PASSES
                  if not page.mark(f"packed {which}: at least FlashAttention-3's figure, 1.15 times it at 32 x 512",
                                   measured.get(("this", which), 0) >= self.factor * flash3[which])]
        cells = [self.name, pair(measured, "this"), pair(measured, "varlen"), pair(measured, "flex"),
                 " / ".join(f"{x:.0f}" for x in flash3.values()), pair(measured, "this", "varlen"),
                 pair(measured, "this", "flex"),
                 " / ".join(f"{measured.get(('this', which), 0) / flash3[which]:.3f}" for which in PASSES),
                 "missed: " + ", ".join(missed) if missed else "met"]
        page.say("| " + " | ".join(cells) + " |")


def packed_rows(args):
    dice = random.Random(16)
    cuts = sorted(dice.sample(range(64, 16384, 64), 15))
    irregular = [y - x + n for x, y, n in zip([0] + cuts, cuts + [16384], [1, -1] * 8)]
    lengths = {"32 x 512": [512] * 32, "8 x 2048": [2048] * 8, "16 random lengths": irregular}
    figures = {  # of FlashAttention-3: forward, backward
        (16, 16, 128, True): ((294, 223), (552, 479), (462, 405)),
        (16, 16, 128, False): ((441, 354), (640, 566), (574, 491)),
        (64, 8, 128, True): ((300, 202), (494, 411), (447, 344)),
        (64, 8, 128, False): ((409, 319), (550, 507), (505, 441)),
        (32, 32, 64, True): ((193, 185), (391, 402), (351, 325)),
        (32, 32, 64, False): ((287, 322), (426, 463), (415, 420)),
    }
    rows = [Packed(*key[:3], name, lengths[name], key[3], flash3)
            for key, row in figures.items() for name, flash3 in zip(lengths, row)]
    return (rows[:3] if args.quick else rows), irregular


def mask_row(page, library, mask, seqlen, args):
    heads, kv_heads, head_dim = 64, 8, 128
    qkv = inputs(1, seqlen, heads, kv_heads, head_dim)
    made = {"this": attempt(Banded, library, *qkv, mask.causal, mask.bands),
            "flex": attempt(flex, mask.function, *qkv), "dense": attempt(This, library, *qkv, False)}
    agree(page, made)
    cells = {name: seqlen**2 if name == "dense" else area(mask.bands, mask.causal) for name in made}
    measured, missed = speeds(times(made, args), cells, heads, head_dim), []
    for which in PASSES:
        ours = measured.get(("this", which), 0)
        if ("flex", which) in measured and not page.mark(f"masks {which}: at least 2 times flex_attention",
                                                         ours >= 2 * measured["flex", which]):
            missed.append(f"{which} below 2 times flex")
        if mask.long_ranges and not page.mark(f"masks {which}: at least 0.9 of our dense speed, ranges of 512 and longer",
                                              ours >= 0.9 * measured["dense", which]):
            missed.append(f"{which} below {0.9 * measured['dense', which]:.0f}")
    part = 100 * cells["this"] / seqlen**2
    cells = [f"{mask.name}, {seqlen}", f"{len(mask.bands)}", f"{part:.0f} %", pair(measured, "this"),
             pair(measured, "dense"), pair(measured, "flex"), mask.published or "-", pair(measured, "this", "flex"),
             pair(measured, "this", "dense"), "missed: " + ", ".join(missed) if missed else "met"]
    page.say("| " + " | ".join(cells) + " |")


def padded_rows(page, library, args):
    """A padded batch takes the time that its area has of the full batch's."""
    batch, seqlen, heads, head_dim = 8, 4096, 16, 128
    dice = random.Random(4096)
    lengths = [dice.randint(1, seqlen) for _ in range(batch)]
    bands = [[whole(0, length, 0, length)] for length in lengths]
    page.say(f"\nLengths {', '.join(map(str, lengths))} in a batch of {batch} x {seqlen}, {heads} heads, d{head_dim}; "
             "milliseconds, forward / backward.\n")
    page.table("", "visible area, of the full batch's", "padded", "full batch", "time, of the full batch's",
               "over area", "marks")
    for causal in (False, True):
        qkv = inputs(batch, seqlen, heads, heads, head_dim)
        made = {"this": attempt(Banded, library, *qkv, causal, bands), "full": attempt(This, library, *qkv, causal)}
        measured = times(made, args)
        share = sum(area(x, causal) for x in bands) / batch / area([whole(0, seqlen, 0, seqlen)], causal)
        compare(page, "causal" if causal else "full", measured, ("this", "full"), share, 1.1,
                "a padded batch: at most 1.1 times (visible area / full area) of the full batch's time", f"{share:.3f}")


def compare(page, name, measured, names, share, most, mark, *cells):
    """A row: how much of the other's time one takes, over the share that it should take."""
    ratios = [measured.get((names[0], which), float("inf")) / measured[names[1], which] for which in PASSES]
    met = [page.mark(f"{which}: {mark}", ratio <= most * share) for which, ratio in zip(PASSES, ratios)]
    shown = [" / ".join(f"{measured.get((one, which), float('nan')):.3f}" for which in PASSES) for one in names]
    cells = [name, *cells, *shown, " / ".join(f"{x:.3f}" for x in ratios)]
    if share != 1:
        cells.append(" / ".join(f"{x / share:.3f}" for x in ratios))
    page.say("| " + " | ".join(cells + ["met" if all(met) else "MISSED"]) + " |")


def one_band_rows(page, library, args):
    """One band that is what the problem has without it."""
    page.say("\nMilliseconds, forward / backward.\n")
    page.table("case", "one band", "no band", "times", "marks")
    cases = [(64, 32, 8, 2048), (64, 32, 1, 16384), (128, 16, 8, 2048), (128, 16, 1, 16384)]
    for head_dim, heads, batch, seqlen in cases[-1:] if args.quick else cases:
        for causal in (True, False):
            qkv = inputs(batch, seqlen, heads, heads, head_dim)
            band = [(0, seqlen, 0, seqlen, INFINITE, 0 if causal else INFINITE)]
            made = {"this": attempt(Banded, library, *qkv, False, band), "none": This(library, *qkv, causal)}
            measured = times(made, args)
            compare(page, f"bf16 d{head_dim} {'causal' if causal else 'full'} {batch} x {seqlen}", measured,
                    ("this", "none"), 1, 1.02, "one band: at most 1.02 times the time without it")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rows, few turns")
    parser.add_argument("--library", default="priv/libflash_attention.so")
    parser.add_argument("--result", help="where to keep the page, without .md")
    parser.add_argument("--peer", type=load_peer, metavar="MODULE.py", help="FlashAttention-3, of packed rows")
    args = parser.parse_args()
    args.budget_ms = 60 if args.quick else 250
    torch.manual_seed(0)
    library, page, name = Library(args.library), Page(), torch.cuda.get_device_name()
    result = args.result or "bench/results/" + name.lower().replace("nvidia ", "").replace(" ", "-") + "_masks"
    began = time.time()

    def section(title):
        print(f"{time.time() - began:.0f} s", file=sys.stderr)
        page.say(f"\n## {title}\n")

    rows, irregular = packed_rows(args)
    page.say(f"# Attention under masks on an {name}\n")
    page.say(f"`make bench-masks{' BENCH_ARGS=--quick' if args.quick else ''}`: torch {torch.__version__}. bf16, TFLOP/s over "
             "the visible cells, forward / backward; how they are measured stands in bench/masks.py.")
    section("Packed sequences, 16,384 tokens")
    flash3 = ("the kernels of its own sources, in this run" if args.peer else
              "its own flash_attn_varlen_func on an H200, measured before, of other random lengths")
    page.say("varlen: torch's varlen_attn (FlashAttention-2). flex: flex_attention, compiled. FlashAttention-3: "
             f"{flash3}. Random lengths here: {', '.join(map(str, irregular))}.\n")
    page.table("case", "this", "varlen", "flex", "FlashAttention-3", "over varlen", "over flex", "over FlashAttention-3",
               "marks")
    for row in rows:
        row.row(page, library, args)

    section("Masks that are no triangle")
    page.say("64 query heads on 8 of keys, d128, one batch. dense: this library without a mask. flex-flash-attention "
             "(MagiAttention's FFA): figures that its authors published, of an H100 and of block causal masks of their own.\n")
    page.table("mask, seqlen", "bands", "visible", "this", "dense", "flex", "flex-flash-attention", "over flex",
               "over dense", "marks")
    for make in (block_causal, prefix, shared_prefix, sparse):
        for seqlen in (8192,) if args.quick else (2048, 8192, 32768):
            mask_row(page, library, make(seqlen), seqlen, args)
            torch.cuda.empty_cache()

    section("A padded batch")
    padded_rows(page, library, args)
    section("One band that changes nothing")
    args.budget_ms *= 4
    one_band_rows(page, library, args)

    section("Marks")
    page.say("How many of the rows meet each.\n")
    for name, verdicts in page.marks.items():
        page.say(f"* {'met' if all(verdicts) else 'MISSED'}, {sum(verdicts)} of {len(verdicts)}: {name}")
    print(f"{time.time() - began:.0f} s in all", file=sys.stderr)
    with open(result + ".md", "w") as file:
        file.write("\n".join(page.lines) + "\n")


if __name__ == "__main__":
    main()
