"""The host path: what calls cost whose tensors lie in the host's memory. A section of bench/gpu.py's page.

    python3 bench/host.py [--quick] [--library priv/libflash_attention.so] [--elixir "mix run bench/host.exs"]

Transfers: the C library through ctypes, bytes moved both ways over the time of the whole call. States: forward and
backward from Elixir (bench/host.exs), from binaries to binaries, beside plain attention compiled by XLA, forward and
backward, on tensors that lie on the GPU: as XLA compiles it by default, where f32 means TF32 with an error of 4e-4, as
that of our precision "default", and, at seqlen 4096, with its precision "highest". No mask; median of wall-clock times; hidden size
2048, 16,384 tokens (8,192 in f32).
"""
import argparse
import ctypes
import functools
import math
import os
import shlex
import statistics
import subprocess
import sys
import time

import needs

needs.modules("torch")

import torch

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../test/xla"))
import c_library
from c_library import CUDA

HIDDEN = 2048
TOKENS = {"f32": 8192, "bf16": 16384}
ELEMENT = {"f32": 4, "bf16": 2}
Measurements = c_library.structure((ctypes.c_int64, "bytes_to_device bytes_from_device"),
                                   (ctypes.c_double, "kernel_seconds"))


def median_seconds(run, times=7):
    run(), run()
    measured = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        measured.append(time.perf_counter() - begin)
    return statistics.median(measured)


def bus_rates():
    """GB/s {(direction, memory): rate} of single copies of 256 MiB."""
    device = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    rates = {}
    for memory in ("pinned", "pageable"):
        host = torch.ones(256 << 20, dtype=torch.uint8, pin_memory=memory == "pinned")

        def copy(to, source):
            to.copy_(source)
            torch.cuda.synchronize()

        for direction, ends in (("up", (device, host)), ("down", (host, device))):
            rates[direction, memory] = device.numel() / median_seconds(lambda: copy(*ends)) / 1e9
    return rates


def shape_of(type_name, head_dim, seqlen):
    return max(TOKENS[type_name] // seqlen, 1), seqlen, HIDDEN // head_dim, head_dim


class Forward:
    """A forward whose inputs lie in pinned or in pageable memory, and its results where a NIF's do."""

    def __init__(self, library, type_name, shape, memory):
        self.library = library
        self.plan = library.plan("forward", type_name, shape, shape)
        self.tensors, self.measured = c_library.Tensors(), Measurements()
        self.pinned, self.kept = [], []
        batch, seqlen, num_heads, head_dim = shape
        element_bytes = ELEMENT[type_name]
        strides = (seqlen * num_heads * head_dim, num_heads * head_dim, head_dim)
        tensor_bytes = batch * seqlen * num_heads * head_dim * element_bytes
        for name in "qkvo":
            place = self.pageable if memory == "pageable" and name != "o" else self.pin
            setattr(self.tensors, name, c_library.Tensor(place(tensor_bytes), *strides))
        self.tensors.lse = c_library.Tensor(self.pin(batch * num_heads * seqlen * 4), 0, 0, 0)

    def pin(self, size):
        address = ctypes.c_void_p()
        self.library.call("fa_host_alloc", CUDA, ctypes.c_size_t(size), ctypes.byref(address))
        ctypes.memset(address, 0, size)
        self.pinned.append(address)
        return address.value

    def pageable(self, size):
        self.kept.append(ctypes.create_string_buffer(size))
        ctypes.memset(self.kept[-1], 0, size)
        return ctypes.addressof(self.kept[-1])

    def run(self):
        self.library.call("fa_run_anywhere", self.plan, self.tensors, None, self.measured)

    def measure(self):
        """Seconds, seconds of kernels, bytes."""
        seconds = median_seconds(self.run)
        for address in self.pinned:
            self.library.call("fa_host_free", CUDA, address)
        moved = self.measured.bytes_to_device + self.measured.bytes_from_device
        return seconds, self.measured.kernel_seconds, moved


def transfers_table(page, library, rates, quick):
    page.say("\n### Transfers of the forward\n")
    bus = min(rates["up", "pinned"], rates["down", "pinned"])
    page.say("The bus, GB/s: " + ", ".join(f"{rate:.1f} {direction} from {memory} memory"
                                           for (direction, memory), rate in rates.items()) + ".\n")
    page.table("case", "memory of q, k, v", "ms", "of that kernels", "MB moved", "GB/s", "over the bus's")
    for type_name in ("bf16", "f32"):
        for head_dim in (64,) if quick else (64, 128):
            for seqlen in (512, 4096) if quick else (512, 4096, 16384):
                for memory in ("pinned", "pageable"):
                    forward = Forward(library, type_name, shape_of(type_name, head_dim, seqlen), memory)
                    seconds, kernels, moved = forward.measure()
                    rate = moved / seconds / 1e9
                    beside = bus if memory == "pinned" else rates["up", "pageable"]
                    if kernels < moved / bus / 1e9 / 4:  # transfers dominate
                        least = 0.85 if memory == "pinned" else 3
                        page.mark(f"host: {memory} forwards at least {least} times the {memory} bus where transfers "
                                  "dominate", rate >= least * beside)
                    page.say(f"| {type_name} d{head_dim} s{seqlen} | {memory} | {seconds * 1e3:.2f} | "
                             f"{kernels * 1e3:.2f} | {moved / 1e6:.0f} | {rate:.1f} | {rate / beside:.2f} |")


@functools.cache
def xla_ms(type_name, shape, precision):
    """Forward and backward of plain attention on the GPU; infinity where its scores, of which some ten are alive at
    once, do not fit."""
    batch, seqlen, num_heads, _ = shape
    if batch * num_heads * seqlen**2 * ELEMENT[type_name] * 12 > torch.cuda.mem_get_info()[1]:
        return math.inf
    import jax
    import jax.numpy as jnp

    def plain(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[3] ** 0.5
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)

    dtype = jnp.float32 if type_name == "f32" else jnp.bfloat16
    inputs = [jax.random.normal(jax.random.key(i), shape, dtype) for i in range(4)]
    step = jax.jit(lambda q, k, v, dout: (lambda o, pull: (o, pull(dout)))(*jax.vjp(plain, q, k, v)))
    with jax.default_matmul_precision(precision):
        return median_seconds(lambda: jax.block_until_ready(step(*inputs)), times=5) * 1e3


def states_table(page, lines):
    page.say("\n### Forward and backward with states on the device, from binaries to binaries\n")
    page.table("case", "from binaries, ms", "from results, ms", "XLA's plain attention on the GPU, ms", "over ours",
               "XLA's, precision highest, ms", "over ours")
    ours = {tuple(line[1:6]): float(line[6]) for line in lines if line[0] == "states"}
    for type_name, precision, head_dim, seqlen in dict.fromkeys(key[:4] for key in ours):
        times = [ours[type_name, precision, head_dim, seqlen, source] for source in ("binaries", "results")]
        shape = shape_of(type_name, int(head_dim), int(seqlen))
        cells = [f"{x:.2f}" for x in times]
        peers = ("default", "highest") if type_name == "f32" and seqlen == "4096" else ("default",)
        for xla_precision in peers:
            xla = xla_ms(type_name, shape, xla_precision)
            fits = math.isfinite(xla)
            cells += [f"{xla:.2f}" if fits else "too large"]
            cells += [" / ".join(f"{xla / x:.2f}" for x in times) if fits else "-"]
            if seqlen == "4096":
                page.mark(f"host: forward and backward with states from binaries at seqlen 4096, {type_name} at "
                          f"precision {precision}, faster than XLA's at {xla_precision}", xla > times[0])
        cells += ["-", "-"] * (2 - len(peers))
        page.say(f"| {type_name} {precision} d{head_dim} s{seqlen} | " + " | ".join(cells) + " |")


def callers_table(page, lines):
    page.say("\n### Many callers: forwards of bf16 [1, 1024, 16, 64] from Elixir\n")
    page.table("tensors", "processes", "calls a second", "over one process", "fewest and most calls of a process")
    one = {}
    for _, source, count, calls, least, most in (line for line in lines if line[0] == "callers"):
        one.setdefault(source, int(calls))
        ratio = int(calls) / one[source]
        if count == "16":
            page.mark("host: 16 processes together at least 1.5 times one", ratio >= 1.5)
            page.mark("host: of 16 processes none has under half the calls of another", 2 * int(least) >= int(most))
        page.say(f"| {source} | {count} | {calls} | {ratio:.2f} | {least}, {most} |")


def section(page, library, elixir, quick=False):
    page.say("\n## The host path\n")
    page.say(__doc__.split("\n\n")[2].replace("\n", " "))
    transfers_table(page, library, bus_rates(), quick)
    command = shlex.split(elixir) + (["--quick"] if quick else [])
    try:
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return page.say(f"\nSkipped, states and callers: {error}")
    lines = [line.split() for line in output.splitlines() if line.startswith(("states ", "callers "))]
    states_table(page, lines)
    callers_table(page, lines)


class Printed:
    """A page on its own."""

    def say(self, line=""):
        print(line, flush=True)

    def table(self, *columns):
        self.say("| " + " | ".join(columns) + " |")
        self.say("|" + "---|" * len(columns))

    def mark(self, name, met):
        self.say(f"{'met' if met else 'MISSED'}: {name}")


ELIXIR = "mix run bench/host.exs"

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--library", default="priv/libflash_attention.so")
    parser.add_argument("--elixir", default=ELIXIR)
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    section(Printed(), c_library.Library(arguments.library), arguments.elixir, arguments.quick)
