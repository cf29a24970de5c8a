"""What NVIDIA's compiler makes of kernels, and what they may not be; needs no GPU.

A kernel is at fault that the compiler refuses or warns of, that keeps other threads from a
multiprocessor, that lies in memory for want of registers, or that reads neighbours one by one.
"""

from __future__ import annotations

import collections
import functools
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import torchacc_device
from tests import helpers

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

# Not warned of: fused operators may make what nobody asked for.
UNUSED = "--diag-suppress=177"

# What a thread may have: 512 of them are on a multiprocessor then. What it may need besides, in
# bytes of memory.
REGISTERS = 128
SPILLED = 160

WIDE = 16  # bytes that an instruction reads at most
BYTES = {"i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}  # others: 1
VALUE = re.compile(r"\bv\d+\b")
DEFINITION = re.compile(r"const \w+ (v\d+) = ")
TAKEN = re.compile(r"Words<(\w+), V> (w\d+);\n(?:if .* recall\(.*\);\nelse )?take<WHOLE>\(\2,")
# Those of several turns, asked for before the first is used.
TURNS = re.compile(r"constexpr int U = (?:WHOLE \? )?(\d+)\b(.*?)(?=constexpr int U|\Z)", re.S)
TOGETHER = re.compile(r"Words<(\w+), V> taken(\d+)\[U\];")
# Those that are copied to a block's memory, which no register waits for.
FETCHED = re.compile(r"fetch<WHOLE, V>\(h(\d+),")
WIDE_LOAD = re.compile(r"\bLDG(?:STS)?\.E(?:\.BYPASS)?\.128\b")


class Kernels(NamedTuple):
    """What NVRTC compiles as one program."""

    preamble: str
    options: list[str]
    texts: list[str]


class Made(NamedTuple):
    """A kernel for an architecture."""

    registers: int
    spilled: int  # bytes
    wide_loads: int
    planned: int  # as many of them, at least: loops are unrolled


@functools.cache
def nvrtc() -> Path:
    """NVIDIA's compiler, which comes with PyTorch's wheels for CUDA."""
    site = Path(torch.__file__).parents[1]
    found = sorted(site.glob("nvidia/*/lib/libnvrtc.so.*")) or pytest.skip(
        "this PyTorch has no CUDA: NVRTC is not installed"
    )
    return found[-1]


def run_compiler(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The program that the package compiles kernels with."""
    program = Path(torchacc_device.__file__).with_name("acc_nvrtc")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def tool(name: str, *arguments: str | Path) -> str:
    """What a program of NVIDIA's that comes with Triton prints."""
    path = Path(torch.__file__).parents[1] / "triton/backends/nvidia/bin" / name
    if not path.exists():
        pytest.skip(f"{name} is not installed; it comes with Triton")
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def kernels_of(step: Callable[[], object]) -> Kernels:
    """All kernels of a step that has run often enough to have them."""
    for _ in range(3):
        kept = step()  # what nobody holds would not be computed
        helpers.flush()
    del kept
    plan = helpers.extension().plan_data(torch.acc.current_device())
    texts = [kernel["cuda_text"] for kernel in plan["kernels"]]
    assert texts
    return Kernels(plan["cuda_preamble"], plan["cuda_options"], texts)


def name_of(text: str) -> str:
    """What a kernel is called."""
    return re.findall(r"__global__ .* (acc_\w+)\(", text)[0]


def planned_loads(text: str) -> int:
    """The loads of 16 bytes that a kernel's text asks for: of V neighbours together."""
    count = 0
    for body in text.split("template <bool WHOLE>"):
        neighbours = [int(number) for number in re.findall(r"constexpr int V = (\d+);", body)]
        needed = without_dead_values(body)
        words = [(element, name, 1) for element, name in TAKEN.findall(body)]
        for turns, loop in TURNS.findall(body):
            words += [(element, f"w{i}", int(turns)) for element, i in TOGETHER.findall(loop)]
        for i in FETCHED.findall(body):
            element = re.findall(rf"(\w+)\* p{i} = ", body)[0]
            words.append((element, f"w{i}", 1))
        for element, name, turns in words:
            if f"{name}.v[e])" in needed:
                count += turns * (neighbours[0] * BYTES.get(element, 1) // WIDE)
    return count


def without_dead_values(body: str) -> str:
    """What a compiler leaves of a function: fused operators may make what nobody asked for.

    Nor does it write what stood there, -(-x) in place; x to the power of 0 asks for no x, nor does
    an integer less itself.
    """
    zeros = re.findall(r"const \w+ (v\d+) = splat_\w+\(0x0p\+0\);", body)
    body = re.sub(rf"\bpow_\(v\d+, ({'|'.join(zeros) or '$'})\)", r"pow_(\1)", body)
    negated = dict(re.findall(r"const \w+ (v\d+) = neg_\((v\d+)\);", body))
    ones = re.findall(r"const I\d+ (v\d+) = splat_I\d+\(1\);", body)
    less = "|".join(value for value, of in negated.items() if of in ones) or "$"
    body = re.sub(rf"(const I\d+ v\d+) = fma_\(({less}), (v\d+), \3\);", r"\1 = nothing();", body)
    read = dict(re.findall(r"const \w+ (v\d+) = from_\w+\((w\d+\.v\[e\])\);", body))
    same = {place: value for value, place in read.items()}
    stays = [
        f"{place} = "
        for place, value in re.findall(r"^(w\d+\.v\[e\]) = to_\w+\((v\d+)\);$", body, re.M)
        if negated.get(negated.get(value, ""), "") == same.get(place)
    ]
    lines = [line for line in body.splitlines() if not line.startswith(tuple(stays))]
    while True:
        uses = collections.Counter(name for line in lines for name in VALUE.findall(line))
        needed = [
            line
            for line in lines
            if not (made := DEFINITION.match(line)) or uses[made[1]] > 1  # the definition is one
        ]
        if len(needed) == len(lines):
            return "\n".join(lines)
        lines = needed


def compile_kernels(kernels: Kernels, architecture: str, folder: Path, *options: str) -> Path:
    """The file that the compiler made; fails with its words, which name the kernel."""
    source, cubin = folder / "kernels.cu", folder / f"{architecture}.cubin"
    named = [f'\n#line 1 "{name_of(text)}"\n{text}' for text in kernels.texts]
    source.write_text(kernels.preamble + "".join(named))
    options = (f"--gpu-architecture={architecture}", UNUSED, *kernels.options, *options)
    done = run_compiler(nvrtc(), source, cubin, *options)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr  # no warning either
    return cubin


@functools.cache
def hasty() -> list[str]:
    """What has NVRTC say its words and make code that is not good, in a tenth of the time.

    Nothing where it is too old to know the option.
    """
    options = ["--Ofast-compile=max"]
    known = run_compiler(nvrtc(), os.devnull, os.devnull, *options).returncode == 0
    return options if known else []


def translate(kernels: Kernels, architecture: str, folder: Path) -> None:
    """Fails as `make` does, in a tenth of the time; but nothing is known of the instructions."""
    compile_kernels(kernels, architecture.replace("sm_", "compute_"), folder, *hasty())


def make(kernels: Kernels, architecture: str, folder: Path) -> dict[str, Made]:
    """Kernels by their names; fails with the compiler's words, which name the kernel."""
    texts = {name_of(text): text for text in kernels.texts}
    cubin = compile_kernels(kernels._replace(texts=list(texts.values())), architecture, folder)
    usage = tool("cuobjdump", "--dump-resource-usage", cubin)
    rows = re.findall(r"Function (acc_\w+):\s+REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
    assert {name for name, *_ in rows} == set(texts)
    code = code_of(cubin)
    return {
        name: Made(
            int(registers),
            int(stack) + int(local),
            len(WIDE_LOAD.findall(code[name])),
            planned_loads(texts[name]),
        )
        for name, registers, stack, local in rows
    }


def code_of(cubin: Path) -> dict[str, str]:
    """The instructions of each kernel."""
    listing = tool("nvdisasm", cubin)
    return dict(re.findall(r"^\.text\.(acc_\w+):\n(.*?)(?=^\.text\.|\Z)", listing, re.M | re.S))


REGISTER = re.compile(r"\bR(\d+)\b")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/ +(@!?U?P\w+)? *([A-Z][A-Z0-9_.]*) *(.*?) *;")


def under_way(code: str) -> list[int]:
    """How many loads of 16 bytes stand together before something needs the first; of each such run.

    In the order in which a thread that takes no branch comes by.
    """
    runs = [0]
    waited: set[int] = set()
    for predicate, name, operands in INSTRUCTION.findall(code):
        first, _, rest = operands.partition(",")
        writes_memory = name.startswith(("ST", "RED", "ATOM"))
        used = {int(number) for number in REGISTER.findall(operands if writes_memory else rest)}
        leaves = name.startswith(("BRA", "EXIT")) and not predicate
        if used & waited or leaves or name.startswith("BAR"):
            runs.append(0)
            waited = set()
        if re.match(r"LDG\.E\.128", name):
            runs[-1] += 1
            number = int(REGISTER.findall(first)[0])
            waited |= set(range(number, number + WIDE // 4))
    return [run for run in runs if run]


def faults(made: dict[str, Made]) -> list[str]:
    """A line for each fault."""
    found = []
    for name, kernel in made.items():
        if kernel.registers > REGISTERS:
            found.append(f"{name}: {kernel.registers} registers of {REGISTERS}")
        if kernel.spilled > SPILLED:
            found.append(f"{name}: {kernel.spilled} bytes of a thread in memory; {SPILLED} may be")
        if kernel.wide_loads < kernel.planned:
            loads = f"{kernel.wide_loads} loads of {WIDE} bytes, {kernel.planned} were planned"
            found.append(f"{name}: {loads}")
    return found
