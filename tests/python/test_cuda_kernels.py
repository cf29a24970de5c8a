"""The kernels of training steps compile for every GPU generation: NVRTC needs no GPU.

tests/gpu_kernels does the same with all kernels that the tests made. What they compute is compared
with the host's kernels in tests/cpp/test_cuda_kernels.cpp, and with the CPU where programs run with
them (tests/programs, tests/python/test_captured_plans.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import helpers, nvidia

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread", "recording")


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


def many_results() -> Callable[[], list[Tensor]]:
    x = torch.randn(200, 4).to(helpers.DEVICE)
    return lambda: [x * i for i in range(2, 50)]


def many_columns() -> Callable[[], object]:
    """Parts of a batch, of which a layer's bias has the sum of the gradients."""
    parts = [torch.randn(16, 64).to(helpers.DEVICE) for _ in range(8)]
    made = [torch.randn(16, 64).to(helpers.DEVICE).tanh() for _ in range(8)]

    def step() -> object:
        copies = [part.clone() for part in parts]
        gradients = [torch.ops.aten.tanh_backward(*each) for each in zip(copies, made, strict=True)]
        return copies, gradients, sum(gradient.sum(0) for gradient in gradients) / 8

    return step


def many_drawn() -> Callable[[], object]:
    """More numbers of an element than one kernel draws."""
    x = torch.randn(1000).to(helpers.DEVICE)
    return lambda: ([F.dropout(x, i / 14) for i in range(1, 13)], torch.rand_like(x))


STEPS: dict[str, Callable[[], Callable[[], object]]] = {
    "transformer": transformer,
    "convolutional, bfloat16": lambda: convolutional(torch.bfloat16),
    "assorted types": assorted,
    "large maps": large_maps,
    "random numbers": drawing,
    "many results": many_results,
    "many columns": many_columns,
    "many random numbers": many_drawn,
}
if helpers.FULL:
    STEPS["convolutional, float16"] = lambda: convolutional(torch.float16)


# Kernels of a step that need memory for want of registers: of the 22 of a transformer's step, 2 do
# on sm_90, 6 on sm_100 and sm_120.
SPILLING = 8


@pytest.mark.parametrize("name", STEPS)
def test_kernels_compile_for_every_generation(name, tmp_path):
    """Each step for one of them, which is all of them once; for all with `make test-full`."""
    kernels = nvidia.kernels_of(STEPS[name]())
    every = 1 if helpers.FULL else len(nvidia.ARCHITECTURES)
    for architecture in nvidia.ARCHITECTURES[list(STEPS).index(name) % every :: every]:
        made = nvidia.make(kernels, architecture, tmp_path)
        assert not nvidia.faults(made), architecture
        assert sum(kernel.spilled > 0 for kernel in made.values()) <= SPILLING, architecture


def test_the_compiler_says_what_is_wrong(tmp_path):
    assert re.fullmatch(
        r"NVRTC \d+\.\d+, .*libnvrtc.*, \d+ bytes\n",
        nvidia.run_compiler(nvidia.nvrtc(), "--version").stdout,
    )
    text = tmp_path / "wrong.cu"
    text.write_text("__global__ void f() { undeclared = 1; }")
    wrong = [
        ((nvidia.nvrtc(), text, tmp_path / "cubin"), '"undeclared" is undefined'),
        ((nvidia.nvrtc(), text, tmp_path / "cubin", "--gpu-architecture=sm_1"), "invalid value"),
        ((nvidia.nvrtc(), tmp_path / "none", tmp_path / "cubin"), "cannot be read"),
        (("libnvrtc.so.1", text, tmp_path / "cubin"), "libnvrtc.so.1: cannot open"),
        (("libc.so.6", text, tmp_path / "cubin"), "nvrtcCreateProgram"),
        ((nvidia.nvrtc(),), "LIBRARY SOURCE RESULT"),
    ]
    for arguments, words in wrong:
        done = nvidia.run_compiler(*arguments)
        assert done.returncode == 1
        assert words in done.stderr
    text.write_text("__global__ void f() {}")
    done = nvidia.run_compiler(nvidia.nvrtc(), text, tmp_path / "no folder" / "cubin")
    assert (done.returncode, "cannot be written" in done.stderr) == (1, True)


def added(dtype: torch.dtype = torch.float32) -> nvidia.Kernels:
    """A kernel of two tensors."""
    a, b = (torch.randn(5000).to(helpers.DEVICE, dtype) for _ in range(2))
    return nvidia.kernels_of(lambda: (a * b + a).tanh())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_neighbours_are_read_at_once(dtype, tmp_path):
    """16 bytes per instruction, of float32 and of half types."""
    (kernel,) = nvidia.make(added(dtype), "sm_90", tmp_path).values()
    assert kernel.planned == 2
    assert kernel.wide_loads >= 2


@pytest.mark.parametrize(
    ("step", "dtype"),
    [
        (lambda x: x.neg_().neg_(), torch.float32),
        (lambda x: -((-x) ** 0), torch.float32),
        (lambda x: -(x - x), torch.int64),
    ],
    ids=["stays", "is_one", "is_zero"],
)
def test_what_nothing_depends_on_is_not_read(tmp_path, step, dtype):
    x = torch.randn(5000).to(helpers.DEVICE, dtype)
    kernels = nvidia.kernels_of(lambda: step(x))
    (kernel,) = nvidia.make(kernels, "sm_90", tmp_path).values()
    assert (kernel.wide_loads, kernel.planned) == (0, 0)


# Numbers that one thread has at the same time; where each is, is known to the compiler or is not.
MANY = """
extern "C" __global__ void acc_{name}(float* numbers, int calls, int stage) {{
  float many[200];
  #pragma unroll
  for (int i = 0; i < 200; ++i) many[i] = numbers[i];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 200; ++i) numbers[i] = many[{index}];
}}
"""


def test_faults_of_kernels_are_seen(tmp_path):
    good = added()
    (text,) = good.texts
    assert not nvidia.faults(nvidia.make(good, "sm_90", tmp_path))

    undefined = good._replace(texts=[text.replace("tanh_(", "tan_h(")])
    doubtful = good._replace(texts=[text + "__device__ int doubtful() {}\n"])
    for compiler in (nvidia.make, nvidia.translate):
        compiler(good, "sm_90", tmp_path)
        with pytest.raises(AssertionError, match=rf'{nvidia.name_of(text)}.*"tan_h" is undefined'):
            compiler(undefined, "sm_90", tmp_path)
        with pytest.raises(
            AssertionError, match=rf"{nvidia.name_of(text)}.*warning.*missing return"
        ):
            compiler(doubtful, "sm_90", tmp_path)

    unaligned = good._replace(preamble=re.sub(r"alignas\(.*\) Words", "Words", good.preamble))
    many = [MANY.format(name="known", index="199 - i"), MANY.format(name="not", index="i % calls")]
    for planted, words in [
        (unaligned, ["0 loads of 16 bytes, 2 were planned"]),
        (good._replace(texts=many), ["registers of 128", "800 bytes of a thread in memory"]),
    ]:
        found = sorted(nvidia.faults(nvidia.make(planted, "sm_90", tmp_path)))
        assert len(found) == len(words)
        assert all(word in fault for word, fault in zip(words, found, strict=True)), found


def test_texts_are_kept_where_they_are_wanted(tmp_path):
    code = "x = torch.ones(9, device=DEVICE)\nfor _ in range(3): print((x * x + 1).tolist())"
    for directory, refused in [(tmp_path, False), (tmp_path / "none", True)]:
        done = helpers.run_python(code, ACC_KERNEL_TEXTS=str(directory))
        assert ("Set ACC_KERNEL_TEXTS to a directory of your own" in done.stderr) == refused
    (kept,) = tmp_path.iterdir()
    assert kept.name == nvidia.name_of(kept.read_text()) + ".cu"
