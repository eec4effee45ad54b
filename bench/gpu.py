"""The CUDA backend beside what a user would otherwise pick, on this machine's GPU and in one run.

    python3 bench/gpu.py [--quick] [--xla] [--library priv/libflash_attention.so] [--result bench/results/h200]
                         [--sustained [SECONDS]] [--peer MODULE.py]

Needs torch (and jax for --xla, matplotlib for the picture). Calls the C library through ctypes on torch's tensors
and stream; peers are the backends of torch's scaled_dot_product_attention and, with --xla, the attention that XLA
compiles from plain operations. Prints a page of Markdown, keeps it in RESULT.md and draws RESULT.svg.

--sustained makes another page, RESULT_sustained.md: each implementation alone for SECONDS (3) on a hot card, with its
clock and energy (bench/sustained.py). --peer names a Python file with one more implementation of 16-bit cases, for
instance FlashAttention-3: a class Peer, made of (q, k, v, dout, causal), with forward() and backward() that enqueue
the passes. Without it FlashAttention-3 is known by ratios to cuDNN that were measured once.

TFLOP/s: the median of event timings, every implementation in turn, the L2 cache flushed before each. The forward
counts 4*b*h*s*s*d operations, half of that under a causal mask, the backward 2.5 times as many. Hidden size 2048;
16,384 tokens in 16-bit types, 8,192 in f32. Inputs are normal, [batch, seqlen, heads, head_dim].
"""
import argparse
import importlib.util
import os
import statistics
import sys

import needs

needs.modules("torch")

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.append(os.path.join(os.path.dirname(__file__), "../test/xla"))
import c_library
from c_library import PASSES

import host
import sustained

HIDDEN = 2048
FLOATS = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
TYPES = {**FLOATS, "s32": torch.int32, "u8": torch.uint8, "u32": torch.uint32}
PRECISIONS = {"highest": 0, "high": 1, "default": 2}

class Library(c_library.Library):
    def prepare(self, which, inputs, outputs, **options):
        """A function that enqueues the pass on torch's current stream and keeps the tensors for as long as it is
        kept."""
        names = {dtype: name for name, dtype in TYPES.items()}
        plan = self.plan_inputs(which, {name: (names[x.dtype], x.shape) for name, x in inputs.items()}, **options)
        places, tensors = c_library.Tensors(), {**inputs, **outputs}
        for name, x in tensors.items():
            strides = x.stride()[:3] if x.dim() == 4 else (0, 0, 0)
            setattr(places, name, c_library.Tensor(x.data_ptr(), *strides))
        workspace = torch.empty(plan.workspace_bytes + 1, dtype=torch.uint8, device="cuda")

        def run(kept=tensors):
            stream = torch.cuda.current_stream().cuda_stream
            execution = c_library.Execution(workspace.data_ptr(), plan.workspace_bytes, 0, stream)
            self.call("fa_run", plan, places, execution)

        return run


# ---- implementations: what runs a forward, a backward, and gives (o, dq, dk, dv) --------------------------------


class This:
    """optional: tensors of options, by name; differentiated: those that the backward gives gradients by. Options are
    those of fa_options()."""

    def __init__(self, library, q, k, v, dout, causal, optional={}, differentiated=(), **options):
        b, s, h, _ = q.shape
        inputs = dict(q=q, k=k, v=v, **optional)
        results = dict(o=torch.empty_like(q), lse=torch.empty(b, h, s, device="cuda"))
        gradients = dict(dq=torch.empty_like(q), dk=torch.empty_like(k), dv=torch.empty_like(v))
        gradients.update({"d" + name: torch.empty_like(optional[name]) for name in differentiated})
        options.update({"window_right": 0} if causal else {})
        self.forward = library.prepare("forward", inputs, results, **options)
        self.backward = library.prepare("backward", dict(dout=dout, **inputs, **results), gradients, **options)
        self.forward()  # the backward reads o and lse
        self.outputs = (results["o"], *gradients.values())

    def results(self):
        self.forward()
        self.backward()
        return self.outputs


class Torch:
    BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
                "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}

    def __init__(self, name, q, k, v, dout, causal):
        self.backend, self.causal, self.dout = self.BACKENDS[name], causal, dout.transpose(1, 2)
        self.leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        self.o = self.forward()

    def forward(self):
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(*self.leaves, is_causal=self.causal)

    def backward(self):
        return torch.autograd.grad(self.o, self.leaves, self.dout, retain_graph=True)

    def results(self):
        return [x.detach().transpose(1, 2) for x in (self.o, *self.backward())]


class Xla:
    """Plain operations, compiled; its backward computes the forward too."""

    def __init__(self, q, k, v, dout, causal):
        import jax
        from jax_attention import forward_and_backward, unfused

        inputs = [jax.dlpack.from_dlpack(x) for x in (q, k, v, dout)]
        forward = jax.jit(unfused(causal))
        both = jax.jit(forward_and_backward(unfused(causal)))
        self.forward = lambda: jax.block_until_ready(forward(*inputs[:3]))
        self.forward_backward = lambda: jax.block_until_ready(both(*inputs))


def load_peer(path):
    """The class Peer of a Python file, or None."""
    if not path:
        return None
    spec = importlib.util.spec_from_file_location("peer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Peer


told = set()


def attempt(make, *arguments):
    """None where an implementation does not take the case, or is not in this torch; the first time it is said why."""
    try:
        return make(*arguments)
    except (RuntimeError, ImportError) as error:
        reason = f"{make.__name__}: {str(error).strip().splitlines()[0]}"
        if reason not in told:
            print(reason, file=sys.stderr)
        told.add(reason)
        return None


# ---- measuring -----------------------------------------------------------------------------------------------


def median_ms(runs, budget_ms):
    """{name: milliseconds}. All take turns, so that what drifts drifts for all of them."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def turn():
        events = {}
        for name, run in runs.items():
            events[name] = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            events[name][0].record()
            run()
            events[name][1].record()
        return events

    def elapsed(events):
        torch.cuda.synchronize()
        return {name: begin.elapsed_time(end) for name, (begin, end) in events.items()}

    elapsed(turn())
    num_turns = min(100, max(7, int(budget_ms / sum(elapsed(turn()).values()))))
    turns = [turn() for _ in range(num_turns)]
    times = [elapsed(events) for events in turns]
    return {name: statistics.median(time[name] for time in times) for name in runs}


class Case:
    def __init__(self, type_name, head_dim, causal, seqlen):
        self.type_name, self.head_dim, self.causal, self.seqlen = type_name, head_dim, causal, seqlen
        self.batch = max(1, (8192 if type_name == "f32" else 16384) // seqlen)
        self.num_heads = HIDDEN // head_dim
        self.operations = 4 * self.batch * self.num_heads * seqlen**2 * head_dim * (0.5 if causal else 1)

    def __str__(self):
        return f"{self.type_name} d{self.head_dim} {'causal' if self.causal else 'full'} s{self.seqlen}"

    def inputs(self):
        shape = self.batch, self.seqlen, self.num_heads, self.head_dim
        return [torch.randn(shape, device="cuda", dtype=TYPES[self.type_name]) for _ in range(4)]

    def measure(self, library, args):
        """{(implementation, pass): TFLOP/s}"""
        inputs, f32 = self.inputs(), self.type_name == "f32"
        made = {"deterministic": This(library, *inputs, self.causal, deterministic=1)}
        for name, precision in PRECISIONS.items() if f32 else [("this", 0)]:
            made[name] = This(library, *inputs, self.causal, precision=precision)
        for name in ("efficient", "math") if f32 else ("flash", "cudnn"):
            made[name] = attempt(Torch, name, *inputs, self.causal)
        if args.peer and not f32:
            made["peer"] = attempt(args.peer, *inputs, self.causal)
        runs = {}
        for name, implementation in made.items():
            if implementation and name != "deterministic":
                runs[name, "forward"] = implementation.forward
            if implementation:
                runs[name, "backward"] = implementation.backward
        if args.xla and self.seqlen <= 4096:
            xla = Xla(*inputs, self.causal)
            runs["xla", "forward"], runs["xla", "both"] = xla.forward, xla.forward_backward
        factors = {"forward": 1, "backward": 2.5, "both": 3.5}
        times = median_ms(runs, args.budget_ms)
        return {key: factors[key[1]] * self.operations / ms / 1e9 for key, ms in times.items()}


def errors(case, library):
    """{implementation: {tensor: (max |x - exact| / max |exact|, ||x - exact|| / ||exact||)}}"""
    torch.manual_seed(0)
    inputs = case.inputs()
    q, k, v, dout = (x.double().transpose(1, 2).requires_grad_() for x in inputs)
    scores = q @ k.transpose(2, 3) / case.head_dim**0.5
    if case.causal:
        hidden = torch.ones(case.seqlen, case.seqlen, dtype=torch.bool, device="cuda").triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    o = torch.softmax(scores, -1) @ v
    exact = [x.detach().transpose(1, 2) for x in (o, *torch.autograd.grad(o, (q, k, v), dout))]
    f32 = case.type_name == "f32"
    made = {name: This(library, *inputs, case.causal, precision=precision)
            for name, precision in (PRECISIONS.items() if f32 else [("this", 0)])}
    for name in ("efficient", "math") if f32 else ("flash", "cudnn", "math"):
        made[name] = attempt(Torch, name, *inputs, case.causal)

    def error(x, y):
        difference = x.double() - y
        return (difference.abs().max() / y.abs().max()).item(), (difference.norm() / y.norm()).item()

    return {name: dict(zip(("o", "dq", "dk", "dv"), map(error, implementation.results(), exact)))
            for name, implementation in made.items() if implementation}


def runs_in_a_graph(library):
    """Whether a CUDA graph captures forward and backward, which it would not with an allocation or a wait in
    them, and its replay leaves the same bits."""
    case = Case("f32", 64, True, 2048)
    this = This(library, *case.inputs(), case.causal, deterministic=1)
    expected = [x.clone() for x in this.results()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        this.results()
    for x in this.outputs:
        x.fill_(torch.nan)
    graph.replay()
    return all(torch.equal(x, y) for x, y in zip(this.outputs, expected))


# ---- the page ------------------------------------------------------------------------------------------------


class Page:
    def __init__(self):
        self.lines, self.marks = [], {}

    def say(self, line=""):
        print(line, flush=True)
        self.lines.append(line)

    def table(self, *columns):
        self.say("| " + " | ".join(columns) + " |")
        self.say("|" + "---|" * len(columns))

    def mark(self, name, met):
        """Counts one row's verdict of a mark; returns whether it was met."""
        self.marks.setdefault(name, []).append(met)
        return met

    def verdicts(self):
        """A line a mark: how many of its rows met it."""
        for name, verdicts in self.marks.items():
            self.say(f"* {'met' if all(verdicts) else 'MISSED'}, {sum(verdicts)} of {len(verdicts)}: {name}")

    def keep(self, path):
        with open(path, "w") as file:
            file.write("\n".join(self.lines) + "\n")


def pair(measured, name, other=None):
    """ "forward / backward" of an implementation, or how many times that of the other it is."""
    if (name, "backward") not in measured or (other and (other, "backward") not in measured):
        return "-"
    if other:
        return " / ".join(f"{measured[name, x] / measured[other, x]:.3f}" for x in ("forward", "backward"))
    return " / ".join(f"{measured[name, x]:.0f}" for x in ("forward", "backward"))


# FlashAttention-3 over cuDNN on an H200, measured beside each other with its own sources (0251105a): by head_dim and
# causal, forward and backward at seqlen 512, 2048, 8192, 16384. What counts is the better of the two.
SEQLENS = (512, 2048, 8192, 16384)
SUSTAINED_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
FLASH3_OVER_CUDNN = {
    (64, False): {"forward": (0.87, 1.07, 1.11, 1.16), "backward": (1.21, 1.16, 1.18, 1.13)},
    (64, True): {"forward": (0.86, 1.06, 1.14, 1.16), "backward": (1.17, 1.25, 1.27, 1.22)},
    (128, False): {"forward": (0.98, 1.08, 1.11, 1.13), "backward": (1.05, 1.08, 1.12, 1.12)},
    (128, True): {"forward": (0.92, 1.11, 1.18, 1.15), "backward": (1.06, 1.17, 1.15, 1.13)},
}


def marks_of(case, measured):
    """What a row is to reach: (pass, of whose speed, how many times that, what to call it). Where a peer was measured
    it stands for FlashAttention-3, without the ratios."""
    if case.type_name == "f32":
        if case.head_dim > 128:
            return []
        marks = [(which, "efficient", 2, "at least 2 times efficient") for which in PASSES]
        return marks + [(which, "efficient", times, f"at least {times} times efficient from seqlen 2048 on")
                        for which, times in (("forward", 4), ("backward", 3.5)) if case.seqlen >= 2048]
    marks = [(which, peer, 1, f"at least 1 times {peer}") for which in PASSES for peer in ("flash", "cudnn")]
    if ("peer", "forward") in measured:
        return marks + [(which, peer, 1, "at least the better of cuDNN and the peer")
                        for which in PASSES for peer in ("cudnn", "peer")]
    flash3 = FLASH3_OVER_CUDNN.get((case.head_dim, case.causal), {})
    return marks + [(which, "cudnn", 0.95 * max(1, ratios[SEQLENS.index(case.seqlen)]),
                     "at least 0.95 of the better of cuDNN and FlashAttention-3") for which, ratios in flash3.items()]


def speed_row(page, case, measured, args):
    f32 = case.type_name == "f32"
    this, peer, other = ("highest", "efficient", "math") if f32 else ("this", "flash", "cudnn")
    missed = [f"{which} below {times:.3g} {whose}" for which, whose, times, name in marks_of(case, measured)
              if (whose, which) in measured and
              not page.mark(f"{case.type_name} {which}: {name}", measured[this, which] >= times * measured[whose, which])]
    slower = measured[this, "backward"] / measured["deterministic", "backward"]
    for most, name in ((1.25, "at most 1.25 times the fast one's time"), (1 / 0.85, "at least 0.85 of the fast one's speed")):
        if not page.mark(f"deterministic backward: {name}", slower <= most):
            missed.append(f"deterministic above {most:.3g}")
    cells = [str(case), pair(measured, this), f"{slower:.2f}"]
    if f32:
        cells += [pair(measured, "high"), pair(measured, "default")]
    elif args.peer:
        cells += [pair(measured, "peer"), pair(measured, this, "peer")]
    cells += [pair(measured, peer), pair(measured, other), pair(measured, this, peer), pair(measured, this, other)]
    if ("xla", "both") in measured:
        cells.append(f"{measured['xla', 'forward']:.0f} / {measured['xla', 'both']:.0f}")
    page.say("| " + " | ".join(cells + ["missed: " + ", ".join(missed) if missed else "met"]) + " |")


def speed_table(page, cases, library, args):
    f32 = cases[0].type_name == "f32"
    xla = ["XLA, forward / both"] if args.xla else []
    if f32:
        page.table("case", "highest", "deterministic, times its time", "high", "default", "efficient", "math",
                   "highest over efficient", "over math", *xla, "marks")
    else:
        peer = ["peer", "over peer"] if args.peer else []
        page.table("case", "this", "deterministic, times its time", *peer, "FLASH", "cuDNN", "over FLASH", "over cuDNN", *xla,
                   "marks")
    table = {}
    for case in cases:
        table[str(case)] = case.measure(library, args)
        speed_row(page, case, table[str(case)], args)
        torch.cuda.empty_cache()
    page.say()
    return table


def error_table(page, cases, library):
    page.table("case", "", *(f"{tensor}{norm}" for norm in (" max", " norm") for tensor in ("o", "dq", "dk", "dv")))
    for case in cases:
        found = errors(case, library)
        for name, tensors in found.items():
            cells = [f"{tensors[tensor][norm]:.1e}" for norm in (0, 1) for tensor in tensors]
            page.say("| " + " | ".join([str(case), name] + cells) + " |")
        if "highest" in found and "efficient" in found:
            for tensor, (largest, norm) in found["highest"].items():
                peer = found["efficient"][tensor]
                page.mark("f32 highest: no larger error than efficient's, norm", norm <= peer[1])
                page.mark("f32 highest: no larger error than efficient's, max", largest <= peer[0])
        torch.cuda.empty_cache()
    page.say()


def draw(path, table, cases):
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "0", "font.family": "DejaVu Sans",
                         "font.size": 8, "lines.markersize": 3})
    styles = {"this": "C3-o", "highest": "C3-o", "deterministic": "C3:", "flash": "C0-s", "cudnn": "C2-^",
              "efficient": "C0-s", "math": "C7-v", "default": "C1--"}
    columns = [(d, causal) for d in (64, 128) for causal in (False, True)]
    rows = [(type_name, which) for type_name in ("bf16", "f32") for which in PASSES]
    figure, axes = plt.subplots(len(rows), len(columns), figsize=(11, 9), squeeze=False)
    for i, (type_name, which) in enumerate(rows):
        for j, (d, causal) in enumerate(columns):
            axis, shown = axes[i][j], [case for case in cases if (case.type_name, case.head_dim, case.causal) ==
                                       (type_name, d, causal)]
            for name, style in styles.items():
                points = [(case.seqlen, table[str(case)][name, which]) for case in shown
                          if (name, which) in table[str(case)]]
                if points:
                    axis.plot(*zip(*points), style, linewidth=1, label=name)
            axis.set_xscale("log", base=2)
            axis.set_xticks([case.seqlen for case in shown], [str(case.seqlen) for case in shown], minor=False)
            axis.set_ylim(bottom=0)
            axis.set_title(f"{type_name} d{d} {'causal' if causal else 'full'} {which}", fontsize=8)
        axes[i][0].set_ylabel("TFLOP/s")
        axes[i][-1].legend(fontsize=6)
    for axis in axes[-1]:
        axis.set_xlabel("seqlen")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def sustained_page(args, library, gpu, result):
    """RESULT_sustained.md."""
    page = Page()
    page.say(f"# Attention that an {gpu} keeps up\n")
    quick = " --quick" if args.quick else ""
    page.say(f"`make bench-gpu BENCH_ARGS='--sustained {args.sustained:g}{quick}'`: torch {torch.__version__}, cuDNN "
             f"{torch.backends.cudnn.version()}; bf16, hidden size 2048, 16,384 tokens.\n")

    def implementations(case):
        inputs = case.inputs()
        made = {"this": This(library, *inputs, case.causal), "cudnn": attempt(Torch, "cudnn", *inputs, case.causal)}
        if args.peer:
            made["peer"] = attempt(args.peer, *inputs, case.causal)
        return {name: (one.forward, one.backward) for name, one in made.items() if one}

    seqlens = (2048, 16384) if args.quick else SUSTAINED_SEQLENS
    cases = [Case("bf16", d, causal, s) for d in (64, 128) for causal in (False, True) for s in seqlens]
    sustained.section(page, cases, implementations, args.sustained)
    page.verdicts()
    page.keep(result + "_sustained.md")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few cases, few turns")
    parser.add_argument("--elixir", default=host.ELIXIR, help="runs bench/host.exs")
    parser.add_argument("--xla", action="store_true", help="XLA's attention too, up to seqlen 4,096")
    parser.add_argument("--library", default="priv/libflash_attention.so")
    parser.add_argument("--result", help="where to keep the page and the picture, without .md and .svg")
    parser.add_argument("--sustained", type=float, nargs="?", const=3.0, metavar="SECONDS",
                        help="only the page of what the card keeps up")
    parser.add_argument("--peer", type=load_peer, metavar="MODULE.py", help="one more implementation of 16-bit cases")
    args = parser.parse_args()
    args.budget_ms = 100 if args.quick else 700
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    torch.backends.cuda.matmul.allow_tf32 = False
    library, page, gpu = Library(args.library), Page(), torch.cuda.get_device_name()
    result = args.result or "bench/results/" + gpu.lower().replace("nvidia ", "").replace(" ", "-")

    if args.sustained:
        return sustained_page(args, library, gpu, result)

    def cases(type_name, longest):
        seqlens = [2048] if args.quick else [s for s in SEQLENS if s <= longest]
        listed = [Case(type_name, d, causal, s) for d in (64, 128) for causal in (False, True) for s in seqlens]
        return listed + [Case(type_name, 256, causal, seqlens[-1] if args.quick else 8192) for causal in (False, True)]

    page.say(f"# Attention on an {gpu}\n")
    page.say(f"`make bench-gpu{' BENCH_ARGS=--quick' if args.quick else ''}`: torch {torch.__version__}, cuDNN "
             f"{torch.backends.cudnn.version()}. TFLOP/s, forward / backward; how they are measured stands in "
             "bench/gpu.py. FLASH (FlashAttention-2), cuDNN, efficient and math are the backends of torch's "
             "scaled_dot_product_attention; f32 without TF32.\n")
    table, listed = {}, []
    for type_name, longest in (("bf16", 16384), ("f16", 16384), ("f32", 8192)):
        listed += cases(type_name, longest)
        table.update(speed_table(page, cases(type_name, longest), library, args))

    page.say("## Errors\n")
    page.say("Against f64 on the GPU. max: max |x - exact| / max |exact|; norm: ‖x - exact‖ / ‖exact‖.\n")
    error_table(page, [Case(type_name, d, causal, 2048) for type_name in FLOATS for d in (64, 128)
                       for causal in (False, True) if type_name == "f32" or d == 128], library)

    host.section(page, library, args.elixir, args.quick)

    page.say("\n## Marks\n\nHow many of the rows, tensors or checks meet each.\n")
    page.mark("forward and backward run in a CUDA graph", runs_in_a_graph(library))
    million = (1, 1 << 20, 1, 64)
    half = (1, 1 << 19, 1, 64)
    for type_name in FLOATS:
        for which in PASSES:
            full, part = (library.plan(which, type_name, shape, shape).workspace_bytes for shape in (million, half))
            page.mark(f"workspace in O(seqlen): the {type_name} {which} of 1,048,576 rows, head_dim 64, takes "
                      f"{full >> 20} MiB", full <= 2 * part)
    megabytes = os.path.getsize(library.path) / 1e6
    page.mark(f"the library: under 30 MB ({megabytes:.1f} MB)", megabytes < 30)
    page.verdicts()

    page.say(f"\n![TFLOP/s by seqlen]({os.path.basename(result)}.svg)")
    page.keep(result + ".md")
    draw(result + ".svg", table, listed)


if __name__ == "__main__":
    main()
