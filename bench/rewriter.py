"""A training step that was written without this library, and what FlashAttention.Rewriter makes of it, in XLA: how long a step
takes and how much memory it needs beside its inputs and results.

    python3 bench/rewriter.py build/rewriter [--platform cuda] [--library priv/libflash_attention.so] [--rounds 10]

The folder has plain.mlir and rewritten.mlir, the StableHLO that EXLA emits for the two (bench/rewriter.exs); here JAX's XLA
compiles and runs both on the same random inputs. Needs jax alone.

A time is the median of rounds, from the call until all results are there, both programs by turns. Temporaries are
XLA's own count of what the compiled program allocates. Marks: at least 3 times as fast, in at most a quarter of the memory,
the same loss and gradients as far as their type goes.
"""
import argparse
import os
import re
import statistics
import sys
import time

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../test/xla"))

import needs

needs.modules("jax")

import jax
import jax.numpy as jnp
import numpy as np

from c_library import Library
from jax_attention import BACKWARD, FORWARD, Attention

TYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32, "f16": jnp.float16}
FASTER, SMALLER = 3, 0.25


def tensors(head):
    """(shape, type) of each tensor in a function's head; that of ui8 is the first, EXLA's own."""
    return [(tuple(int(n) for n in shape.split("x") if n), name)
            for shape, name in re.findall(r"tensor<((?:\d+x)*)(\w+)>", head)]


def with_workspaces(text, attention):
    """The text is that of a machine without a GPU. On CUDA each call has one more result."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        call = re.search(rf'call_target_name = "({FORWARD}|{BACKWARD})"', line)
        if call:
            for result in attention.workspace(*call_of(call[1], line)):
                line = re.sub(r"^(\s*%.*?) = ", rf"\1, %workspace{number} = ", line, count=1)
                line = re.sub(r"\)\s*$", f", tensor<{result.shape[0]}xui8>)", line)
            lines[number] = line
    return "\n".join(lines)


def call_of(target, line):
    """What is asked of a call, its operands as they are named and laid out there, and its options."""
    config = re.search(r"backend_config = \{([^}]*)\}", line)[1]
    names = re.search(r'operands = "([^"]*)"', config)[1].split(",")
    shapes = {name: tuple(int(n) for n in sizes.split(",")) for name, sizes in re.findall(r"(\w+) = array<i64: ([^>]*)>", config)}
    types = [TYPES[name] for _, name in tensors(line[line.rindex(" : ("):line.rindex(") -> ")])]
    operands = {name: jax.ShapeDtypeStruct(shapes[name], type_) for name, type_ in zip(names, types)}
    options = {name: int(number) for name, number in re.findall(r"(window_\w+) = (-?\d+) : i64", config)}
    return target.removeprefix("flash_attention_"), operands, options


class Program:
    """A compiled program and its times."""

    def __init__(self, text, device):
        from jax._src.interpreters import mlir
        from jax._src.lib import xla_client

        begin = time.time()
        with mlir.make_ir_context():
            self.executable = device.client.compile_and_load(text, xla_client.DeviceList((device,)),
                                                             xla_client.CompileOptions())
        self.compiling = time.time() - begin
        self.temporaries = self.executable.get_compiled_memory_stats().temp_size_in_bytes
        self.times = []

    def __call__(self, inputs):
        return jax.block_until_ready(self.executable.execute_sharded(inputs).disassemble_into_single_device_arrays())

    def results(self, inputs):
        return [np.asarray(x[0]).astype(np.float64) for x in self(inputs)]

    def take_time(self, inputs):
        begin = time.perf_counter()
        self(inputs)
        self.times.append(time.perf_counter() - begin)


def random_inputs(head, device):
    """EXLA's run id, what comes in, and weights that keep its size."""
    inputs = []
    for number, (shape, name) in enumerate(tensors(head)):
        if name == "ui8":
            values = np.zeros(shape, np.uint8)
        else:
            values = jax.random.normal(jax.random.PRNGKey(number), shape) * (1 if len(shape) == 3 else shape[0] ** -0.5)
            values = values.astype(TYPES[name])
        inputs.append(jax.device_put(values, device))
    return inputs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--library", default="priv/libflash_attention.so")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()

    device = jax.devices("gpu" if args.platform == "cuda" else "cpu")[0]
    attention = Attention(Library(args.library), args.platform)
    texts = {}
    for name in ("plain", "rewritten"):
        with open(os.path.join(args.folder, f"{name}.mlir")) as file:
            texts[name] = with_workspaces(file.read(), attention)
    calls = texts["rewritten"].count(f'"{FORWARD}"'), texts["rewritten"].count(f'"{BACKWARD}"')
    head = re.search(r"@main\((.*?)\) ->", texts["plain"])[1]
    inputs = random_inputs(head, device)
    programs = {name: Program(text, device) for name, text in texts.items()}
    results = {name: program.results(inputs) for name, program in programs.items()}
    for _ in range(args.rounds):
        for program in programs.values():
            program.take_time(inputs)

    print(f"{device.device_kind}, jax {jax.__version__}: {args.folder}, input {tensors(head)[1]}, calls {calls[0]} + {calls[1]}\n")
    print("| program | ms a step | MiB of temporaries | s to compile |\n|---|---|---|---|")
    for name, program in programs.items():
        print(f"| {name} | {1e3 * statistics.median(program.times):.2f} | {program.temporaries / 2**20:.0f} "
              f"| {program.compiling:.1f} |")
    plain, rewritten = programs["plain"], programs["rewritten"]
    faster = statistics.median(plain.times) / statistics.median(rewritten.times)
    smaller = rewritten.temporaries / plain.temporaries
    print(f"\n{faster:.2f} times as fast (mark {FASTER}), {smaller:.3f} of the memory (mark {SMALLER})")
    print(f"loss {results['plain'][0]:.6g} and {results['rewritten'][0]:.6g}; largest difference of a gradient, of its largest "
          f"element: {max(map(difference, results['plain'][1:], results['rewritten'][1:])):.3g}")


def difference(x, y):
    return float(np.max(np.abs(x - y)) / np.max(np.abs(x)))


if __name__ == "__main__":
    main()
