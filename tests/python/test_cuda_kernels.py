"""The kernels of training steps compile for every GPU generation: NVRTC needs no GPU.

What they compute is compared with the host's kernels in tests/cpp/test_cuda_kernels.cpp, and with
the CPU where programs run with them (tests/programs, tests/python/test_captured_plans.py).
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchacc_device
from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread")

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


class Program(NamedTuple):
    """What NVRTC compiles."""

    text: str
    options: list[str]


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


def compiled(source: Program, architecture: str, folder: Path) -> Path:
    """The cubin of a program; fails with the compiler's words."""
    text, cubin = folder / "kernels.cu", folder / f"{architecture}.cubin"
    text.write_text(source.text)
    options = [f"--gpu-architecture={architecture}", *source.options]
    done = run_compiler(nvrtc(), text, cubin, *options)
    assert (done.returncode, done.stderr) == (0, "")  # no warning either
    return cubin


def program_of(step: Callable[[], object]) -> Program:
    """All kernels of a step that has run often enough to have them, as one program."""
    for _ in range(3):
        kept = step()  # what nobody holds would not be computed
        helpers.flush()
    del kept
    plan = helpers.extension().plan_data(torch.acc.current_device())
    texts = [kernel["cuda_text"] for kernel in plan["kernels"]]
    assert texts
    return Program(plan["cuda_preamble"] + "".join(texts), plan["cuda_options"])


def triton_tool(name: str, *arguments: str | Path) -> str:
    """What a program of NVIDIA's that comes with Triton prints."""
    tool = Path(torch.__file__).parents[1] / "triton/backends/nvidia/bin" / name
    if not tool.exists():
        pytest.skip(f"{name} is not installed; it comes with Triton")
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def transformer() -> Callable[[], None]:
    model = nn.Sequential(
        nn.Embedding(50, 64),
        nn.TransformerEncoderLayer(64, 4, 128, batch_first=True),
        nn.RMSNorm(64),
        nn.GroupNorm(4, 12),
        nn.Linear(64, 50),
    ).to(helpers.DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(50, (4, 12)).to(helpers.DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def convolutional(dtype: torch.dtype) -> Callable[[], None]:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 8, 3),
        nn.InstanceNorm2d(8, affine=True), nn.GELU(), nn.Flatten(), nn.LazyLinear(10),
    ).to(helpers.DEVICE)  # fmt: skip
    images = torch.randn(4, 3, 12, 12).to(helpers.DEVICE)
    model(images)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        with torch.autocast(helpers.DEVICE, dtype=dtype):
            loss = model(images).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def large_maps() -> Callable[[], Tensor]:
    """Batch normalisation in parts, of both layouts."""
    maps = torch.randn(8, 16, 64, 64).to(helpers.DEVICE)
    last = maps.to(memory_format=torch.channels_last)
    norm = nn.BatchNorm2d(16).to(helpers.DEVICE)

    def step() -> Tensor:
        loss = (norm(maps).relu() * norm(last).sigmoid()).mean()
        norm.zero_grad()
        loss.backward()
        return norm.weight.grad

    return step


def drawing() -> Callable[[], Tensor]:
    x = torch.randn(500, 60).to(helpers.DEVICE)

    def step() -> Tensor:
        noise = torch.randn_like(x) * torch.rand_like(x) + torch.empty_like(x).exponential_()
        picked = torch.randint(0, 2**40, x.shape, device=x.device) % 7
        return F.dropout(x + noise).sum(1) + picked.sum(1)

    return step


def assorted() -> Callable[[], Tensor]:
    doubles = torch.rand(7, 33, dtype=torch.float64).to(helpers.DEVICE)
    numbers = torch.arange(7 * 33).reshape(7, 33).to(helpers.DEVICE)

    def step() -> Tensor:
        made = (doubles.exp() + doubles.t().contiguous().t().sqrt()) / (numbers + 1)
        picked = torch.where((numbers % 2 == 0) & (made > 1), made, -made)
        return picked.to(torch.bfloat16).sum(0) + numbers.amax(1).max().half()

    return step


STEPS: dict[str, Callable[[], Callable[[], object]]] = {
    "transformer": transformer,
    "convolutional, bfloat16": lambda: convolutional(torch.bfloat16),
    "convolutional, float16": lambda: convolutional(torch.float16),
    "assorted types": assorted,
    "large maps": large_maps,
    "random numbers": drawing,
}


# What a thread may have: 512 of them are on a multiprocessor then. What it may need besides, in
# bytes of memory; and how many kernels of a step may need any: of the 22 of a transformer's step, 2
# do on sm_90, 6 on sm_100 and sm_120.
REGISTERS = 128
SPILLED = 160
SPILLING = 8


@pytest.mark.parametrize("name", STEPS)
def test_kernels_compile_for_every_generation(name, tmp_path):
    source = program_of(STEPS[name]())
    cubins = [compiled(source, architecture, tmp_path) for architecture in ARCHITECTURES]
    for cubin in cubins:
        usage = triton_tool("cuobjdump", "--dump-resource-usage", cubin)
        kernels = re.findall(r"Function (acc_\w+):\s+REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
        assert len(kernels) == source.text.count("__global__")
        for kernel, registers, stack, local in kernels:
            assert int(registers) <= REGISTERS, f"{kernel} on {cubin.stem}"
            assert int(stack) + int(local) <= SPILLED, f"{kernel} on {cubin.stem}"
        assert sum(int(stack) > 0 for _, _, stack, _ in kernels) <= SPILLING, cubin.stem


def test_the_compiler_says_what_is_wrong(tmp_path):
    assert re.fullmatch(
        r"NVRTC \d+\.\d+, .*libnvrtc.*, \d+ bytes\n", run_compiler(nvrtc(), "--version").stdout
    )
    text = tmp_path / "wrong.cu"
    text.write_text("__global__ void f() { undeclared = 1; }")
    wrong = [
        ((nvrtc(), text, tmp_path / "cubin"), '"undeclared" is undefined'),
        ((nvrtc(), text, tmp_path / "cubin", "--gpu-architecture=sm_1"), "invalid value"),
        ((nvrtc(), tmp_path / "none", tmp_path / "cubin"), "cannot be read"),
        (("libnvrtc.so.1", text, tmp_path / "cubin"), "libnvrtc.so.1: cannot open"),
        (("libc.so.6", text, tmp_path / "cubin"), "nvrtcCreateProgram"),
        ((nvrtc(),), "LIBRARY SOURCE RESULT"),
    ]
    for arguments, words in wrong:
        done = run_compiler(*arguments)
        assert done.returncode == 1
        assert words in done.stderr
    text.write_text("__global__ void f() {}")
    done = run_compiler(nvrtc(), text, tmp_path / "no folder" / "cubin")
    assert (done.returncode, "cannot be written" in done.stderr) == (1, True)


def test_neighbours_are_read_at_once(tmp_path):
    """16 bytes per instruction, of float32 and of half types."""
    for dtype in (torch.float32, torch.float16):
        a, b = (torch.randn(5000).to(helpers.DEVICE, dtype) for _ in range(2))
        source = program_of(lambda a=a, b=b: (a * b + a).tanh())
        listing = triton_tool("nvdisasm", compiled(source, "sm_90", tmp_path))
        assert len(re.findall(r"LDG\.E\.128", listing)) >= 2
        assert re.search(r"STG\.E\.128", listing)
