"""The custom calls in jitted XLA programs on this machine's GPU, beside the raw kernels, XLA's unfused
attention and cuDNN's fused one.

    python3 bench/xla.py [--quick] [--types bf16,f32] [--library priv/libflash_attention.so] [--result bench/results/h200_xla.md]

Needs torch and jax. Prints a page of Markdown and keeps it in RESULT.

TFLOP/s as in bench/gpu.py: operations of the pass over the time of one call. Forward gives o; both, the forward and the
backward, gives o and the gradients by q, k and v. Raw: the kernels enqueued through ctypes on torch's stream. XLA: the
same kernels in a program that jax.jit makes. plain: unfused attention of ordinary operations, compiled by XLA with its
defaults. cuDNN: jax.nn.dot_product_attention with implementation="cudnn", fused, where it takes the case; else its cell
says why not.
A time is that on the device, by the profiler, of NUM_CALLS calls enqueued one after another, from the beginning of the
first kernel to the end of the last with all that lies between, divided by their number. All take turns, as a GPU
that gets hot gets slow; the median counts.
"""
import argparse
import collections
import itertools
import os
import re
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import needs

needs.modules("jax", "torch")

import jax
import torch

from gpu import Case, Library, Page, This
from jax_attention import Attention, device_events, forward_and_backward, transfers, unfused

NUM_CALLS = 5
FACTORS = {"forward": 1, "both": 3.5}
INPUTS = {"forward": 3, "both": 4}
OTHERS = ("plain", "cuDNN")
MARK = 0.97


class Programs:
    """One case: its tensors, which torch and JAX share, and the compiled programs by (name, which)."""

    def __init__(self, case, precision, library, attention, with_plain):
        self.name = f"{case} {precision}" if case.type_name == "f32" else str(case)
        self.case, self.tensors = case, case.inputs()
        self.raw = This(library, *self.tensors, case.causal, precision=precision)
        self.arrays = [jax.dlpack.from_dlpack(x) for x in self.tensors]
        options = dict(precision=precision, **(dict(window_right=0) if case.causal else {}))
        attends = {"XLA": lambda q, k, v: attention(q, k, v, **options)}
        if with_plain:
            attends["plain"] = unfused(case.causal)
        self.compiled, self.refusals = {}, {}
        for name, attend in attends.items():
            self.compile(name, attend)
        try:
            self.compile("cuDNN", lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=case.causal,
                                                                               implementation="cudnn"))
            self.run_compiled("cuDNN")
        except Exception as error:  # whatever XLA and cuDNN raise: the page says it
            self.refusals["cuDNN"] = (str(error).strip().splitlines() or [repr(error)])[0].replace("|", "/")[:100]
            for which in FACTORS:
                self.compiled.pop(("cuDNN", which), None)

    def compile(self, name, attend):
        self.compiled[name, "forward"] = jax.jit(attend).lower(*self.arrays[:3]).compile()
        self.compiled[name, "both"] = jax.jit(forward_and_backward(attend)).lower(*self.arrays).compile()

    def run_compiled(self, name):
        for which, count in INPUTS.items():
            jax.block_until_ready(self.compiled[name, which](*self.arrays[:count]))

    def run_raw(self, which):
        self.raw.forward()
        if which == "both":
            self.raw.backward()

    def runs(self):
        """{(name, which): (call, wait)}"""
        runs = {}
        for which, count in INPUTS.items():
            runs["raw", which] = lambda which=which: self.run_raw(which), lambda _: torch.cuda.synchronize()
            for name in ("XLA", *OTHERS):
                if (name, which) in self.compiled:
                    program, inputs = self.compiled[name, which], self.arrays[:count]
                    runs[name, which] = (lambda program=program, inputs=inputs: program(*inputs),
                                         jax.block_until_ready)
        return runs

    def profile(self, num_rounds):
        """{(name, which): microseconds of a call, round by round}, and all that the device did."""
        runs = self.runs()
        turns = [key for which in FACTORS for name in ("XLA", *OTHERS) if (name, which) in runs
                 for key in (("raw", which), (name, which))]  # torch's stream and XLA's by turns
        for call, wait in runs.values():
            wait(call())

        def take_turns():
            for call, wait in (runs[key] for _ in range(num_rounds) for key in turns):
                wait([call() for _ in range(NUM_CALLS)][-1])

        with jax.transfer_guard("disallow"):
            events = device_events(take_turns)
        bursts = [list(burst) for _, burst in
                  itertools.groupby(events, key=lambda event: event.stream == events[0].stream)]
        assert len(bursts) == num_rounds * len(turns), "the profile is not complete"
        times = {key: [] for key in turns}
        for key, burst in zip(itertools.cycle(turns), bursts):
            times[key].append((burst[-1].begin + burst[-1].duration - burst[0].begin) / NUM_CALLS)
        return times, events

    def mebibytes(self, name, which):
        """What the program takes beside its inputs: results and temporary buffers."""
        memory = self.compiled[name, which].memory_analysis()
        return (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 2**20

    def agrees(self):
        """Whether the program gives the raw kernels' results; those of the backward differ in the order of sums."""
        results = [torch.from_dlpack(x) for x in self.compiled["XLA", "both"](*self.arrays)]
        return all(torch.allclose(x.float(), y.float(), rtol=0, atol=1e-2 * y.float().abs().max().item())
                   for x, y in zip(results, self.raw.results()))


def pair(values, digits=0):
    return " / ".join(f"{x:.{digits}f}" for x in values)


def row(page, programs, num_rounds):
    """Says how fast the programs are; returns what the device did."""
    times, events = programs.profile(num_rounds)
    speed = {key: FACTORS[key[1]] * programs.case.operations / statistics.median(found) / 1e6
             for key, found in times.items()}
    ratios = [speed["XLA", which] / speed["raw", which] for which in FACTORS]
    for which, ratio in zip(FACTORS, ratios):
        page.mark(f"{which} through XLA: at least {MARK} of the raw kernels' speed", ratio >= MARK)
    page.mark("the programs give the raw kernels' results", programs.agrees())
    page.mark("zero bytes between host and device", not transfers(events))
    cells = [programs.name, pair(speed["raw", which] for which in FACTORS),
             pair(speed["XLA", which] for which in FACTORS), pair(ratios, 3)]
    for name in OTHERS:
        if (name, "both") in speed:
            cells += [pair(speed[name, which] for which in FACTORS),
                      pair((speed["XLA", which] / speed[name, which] for which in FACTORS), 2)]
        else:
            cells += [programs.refusals.get(name, "-"), "-"]
    for name in ("XLA", *OTHERS):
        cells.append(pair(programs.mebibytes(name, which) for which in FACTORS) if (name, "both") in speed else "-")
    page.say("| " + " | ".join(cells) + " |")
    return events


def name_kernels(page, name, events):
    counts = collections.Counter(re.sub(r"^void |<.*|\(.*", "", event.name) for event in events)
    page.say(f"\nWhat the device did for {name}, by turns, under `jax.transfer_guard(\"disallow\")`: "
             + ", ".join(f"{count} `{kernel}`" for kernel, count in counts.items()) + ".")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="head_dim 128 and seqlen 2048 alone, few turns")
    parser.add_argument("--types", default="bf16,f32")
    parser.add_argument("--library", default="priv/libflash_attention.so")
    parser.add_argument("--result", default="bench/results/h200_xla.md")
    args = parser.parse_args()
    library, page = Library(args.library), Page()
    attention = Attention(library, "cuda")
    cases = [(Case(type_name, d, causal, seqlen), precision)
             for type_name, precision in (("bf16", "highest"), ("f32", "highest"), ("f32", "default"))
             if type_name in args.types.split(",")
             for d in ((128,) if args.quick or precision == "default" else (64, 128)) for causal in (False, True)
             for seqlen in ((2048,) if args.quick or precision == "default" else (2048, 8192))]

    page.say(f"# Attention in XLA programs on an {torch.cuda.get_device_name()}\n")
    page.say(f"`python3 {' '.join(sys.argv)}`: jax {jax.__version__}, torch "
             f"{torch.__version__}. TFLOP/s, forward / both; how they are measured stands in bench/xla.py. plain is "
             "XLA's own unfused attention, in f32 with TF32 as is its default: its arithmetic is that of precision "
             "default here, while highest is as accurate as f32. MiB: results and temporary memory of the "
             "program. cuDNN is jax.nn.dot_product_attention, implementation=\"cudnn\".\n")
    page.table("case", "raw", "XLA", "XLA over raw", "plain", "XLA over plain", "cuDNN", "XLA over cuDNN", "MiB, XLA",
               "MiB, plain", "MiB, cuDNN")
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda case: Programs(*case, library, attention, case[0].seqlen <= 2048), cases))
    for programs in made:
        events = row(page, programs, 3 if args.quick else 7)
    name_kernels(page, made[-1].name, events)

    page.say("\n## Marks\n\nHow many of the rows meet each.\n")
    for name, verdicts in page.marks.items():
        page.say(f"* {'met' if all(verdicts) else 'MISSED'}, {sum(verdicts)} of {len(verdicts)}: {name}")
    with open(args.result, "w") as file:
        file.write("\n".join(page.lines) + "\n")


if __name__ == "__main__":
    main()
