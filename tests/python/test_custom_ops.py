"""Operators of the user's own on acc tensors: Python, C++ for the CPU, Triton, autograd."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import library, nn

from tests import helpers

# --- registered from Python, with a kernel for the CPU ------------------------------------------


@library.custom_op("acc_test::softclip", mutates_args=(), device_types="cpu")
def softclip(x: torch.Tensor, bound: float) -> torch.Tensor:
    """`bound * tanh(x / bound)`, by NumPy: only memory of the CPU will do."""
    assert x.device.type == "cpu"
    return torch.from_numpy(bound * np.tanh(x.detach().numpy() / bound))


def softclip_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.bound = inputs[1]


def softclip_backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
    (y,) = ctx.saved_tensors
    return g * (1 - (y / ctx.bound) ** 2), None


softclip.register_autograd(softclip_backward, setup_context=softclip_setup)


@library.custom_op("acc_test::softclip_with_fake", mutates_args=(), device_types="cpu")
def softclip_with_fake(x: torch.Tensor, bound: float) -> torch.Tensor:
    """The same, with a shape function as `torch.compile` wants one."""
    return torch.from_numpy(bound * np.tanh(x.detach().numpy() / bound))


softclip_with_fake.register_fake(lambda x, bound: torch.empty_like(x))
softclip_with_fake.register_autograd(softclip_backward, setup_context=softclip_setup)


@library.custom_op("acc_test::anywhere", mutates_args=())
def anywhere(x: torch.Tensor, k: float) -> torch.Tensor:
    """Of torch operators only, for any device: gets the acc tensors themselves."""
    return x.sin() * k + x.new_ones(())


anywhere.register_autograd(
    lambda ctx, g: (g * ctx.saved_tensors[0].cos() * ctx.k, None),
    setup_context=lambda ctx, inputs, output: (
        ctx.save_for_backward(inputs[0]),
        setattr(ctx, "k", inputs[1]),
    )[0],
)


@library.custom_op("acc_test::decay_", mutates_args={"x"}, device_types="cpu")
def decay_(x: torch.Tensor, by: torch.Tensor) -> None:
    """`x -= by * x` in place, by NumPy."""
    x.numpy()[...] -= by.numpy() * x.numpy()


@library.custom_op("acc_test::moments", mutates_args=(), device_types="cpu")
def moments(parts: list[torch.Tensor], shift: torch.Tensor | None) -> list[torch.Tensor]:
    """Sum and sum of squares of all elements; lists and optional tensors go through."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    flat = flat if shift is None else flat - shift
    return [flat.sum(), (flat * flat).sum()]


@library.custom_op("acc_test::positives", mutates_args=(), device_types="cpu")
def positives(x: torch.Tensor) -> torch.Tensor:
    """The positive elements: a shape that depends on the data."""
    return x[x > 0]


# --- in C++, compiled by the test ---------------------------------------------------------------

CPP = r"""
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace {

// x * k + y, by a loop over the CPU's memory.
at::Tensor axpy(const at::Tensor& x, const at::Tensor& y, double k) {
  TORCH_CHECK(x.device().is_cpu() && y.device().is_cpu(), "axpy has a kernel for the CPU only");
  TORCH_CHECK_VALUE(x.sizes() == y.sizes(), "axpy wants equal shapes");
  const at::Tensor a = x.contiguous(), b = y.contiguous();
  at::Tensor out = at::empty_like(a);
  const float* p = a.const_data_ptr<float>();
  const float* q = b.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < out.numel(); ++i) to[i] = p[i] * static_cast<float>(k) + q[i];
  return out;
}

at::Tensor& bump_(at::Tensor& x, const at::Tensor& by) {
  x.add_(by.to(x.dtype()));
  return x;
}

at::Tensor last_half(const at::Tensor& x) {
  return x.narrow(0, x.size(0) / 2, x.size(0) - x.size(0) / 2);
}

at::Tensor& square_out(const at::Tensor& x, at::Tensor& out) {
  out.resize_(x.sizes());
  return at::mul_out(out, x, x);
}

// Differentiated in C++.
struct Cube : public torch::autograd::Function<Cube> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({x});
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("acc_test_cpp::cube", "")
                               .typed<at::Tensor(const at::Tensor&)>();
    return op.call(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const at::Tensor x = ctx->get_saved_variables()[0];
    return {grads[0] * 3 * x * x};
  }
};

at::Tensor cube(const at::Tensor& x) { return x * x * x; }
at::Tensor cube_autograd(const at::Tensor& x) { return Cube::apply(x); }

}  // namespace

TORCH_LIBRARY(acc_test_cpp, m) {
  m.def("axpy(Tensor x, Tensor y, float k) -> Tensor");
  m.def("bump_(Tensor(a!) x, Tensor by) -> Tensor(a!)");
  m.def("last_half(Tensor(a) x) -> Tensor(a)");
  m.def("square.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)");
  m.def("cube(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(acc_test_cpp, CPU, m) {
  m.impl("axpy", axpy);
  m.impl("bump_", bump_);
  m.impl("last_half", last_half);
  m.impl("square.out", square_out);
  m.impl("cube", cube);
}
TORCH_LIBRARY_IMPL(acc_test_cpp, Autograd, m) { m.impl("cube", cube_autograd); }
"""


@pytest.fixture(scope="session")
def cpp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The operators of `CPP`, as `torch.ops.acc_test_cpp`."""
    from torch.utils import cpp_extension

    folder = tmp_path_factory.mktemp("custom_op")
    cpp_extension.load_inline(
        "acc_test_cpp",
        CPP,
        extra_cflags=["-O0"],
        build_directory=str(folder),
        is_python_module=False,
        no_implicit_headers=True,
    )
    ops = torch.ops.acc_test_cpp

    def setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.k = inputs[2]

    library.register_autograd(
        "acc_test_cpp::axpy", lambda ctx, g: (g * ctx.k, g, None), setup_context=setup
    )
    yield ops


# --- what is tested -----------------------------------------------------------------------------


def same(run: Callable[[str], list[torch.Tensor]], device: str) -> None:
    """Runs on both devices and compares."""
    for got, expected in zip(run(device), run("cpu"), strict=True):
        assert got.device.type == torch.device(device).type
        torch.testing.assert_close(got.detach().cpu(), expected.detach())


@pytest.mark.parametrize(
    "op", [softclip, softclip_with_fake, anywhere], ids=lambda op: op._qualname
)
def test_a_python_operator_and_its_gradient(device, op):
    def run(where: str) -> list[torch.Tensor]:
        x = torch.linspace(-3, 3, 12).view(3, 4).to(where).requires_grad_()
        y = op((x * 2).t(), 1.5)  # pending, and not contiguous
        (y * y).sum().backward()
        return [y, x.grad]

    same(run, device)


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("op", [softclip, softclip_with_fake], ids=lambda op: op._qualname)
def test_an_operator_for_the_cpu_runs_at_once_and_splits_the_step(acc_only, op):
    x = torch.ones(4, device=acc_only) * 3
    with helpers.counting() as counted:
        y = op(x, 1.0)
    assert counted["flushes"] == 1 and counted["run_now"] == 1
    assert counted[f"fallback/{op._qualname}"] == 1
    assert y.device.type == "acc"


def test_an_operator_that_writes_its_argument(device):
    def run(where: str) -> list[torch.Tensor]:
        base = torch.arange(12.0).view(3, 4).to(where)
        kept = base + 0  # pending, reads what is written next
        part = base[1:, ::2]  # a view that does not begin where its storage does
        version = part._version
        decay_(part, torch.full((2, 2), 0.5).to(where))
        assert part._version > version
        after = base * 2
        return [base, kept, part, after]

    same(run, device)


def test_autograd_sees_the_write(device):
    def run(where: str) -> list[torch.Tensor]:
        x = torch.ones(3).to(where).requires_grad_()
        y = x * 2
        z = y.sin()  # saves y
        with torch.no_grad():
            decay_(y, torch.full((3,), 0.5).to(where))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()
        return [y]

    same(run, device)


def test_lists_options_and_shapes_that_depend_on_data(device):
    def run(where: str) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 10).to(where)
        parts = [x * 2, x[3:7] + 1]
        return [
            *moments(parts, None),
            *moments(parts, torch.tensor(0.25).to(where)),
            positives(x - 0.2),
        ]

    same(run, device)


def test_an_operator_that_raises_harms_nothing(device):
    @library.custom_op("acc_test::refuses", mutates_args=(), device_types="cpu")
    def refuses(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("not today")

    x = torch.ones(3, device=device) * 2
    y = x + 1
    with pytest.raises(KeyError, match="not today"):
        refuses(x)
    assert (x + y).tolist() == [5.0, 5.0, 5.0]


def test_memory_of_another_device_is_not_taken_for_the_device_s(acc_only):
    """A kernel that leaves a result elsewhere: it is copied, or the error names the operator."""
    code = """
import pytest
from torch import library
from tests import helpers
kernels = library.Library("aten", "IMPL")
def kthvalue(x, k, dim=-1, keepdim=False):
    values = x.sort(dim)[0].select(dim, k - 1).contiguous()
    return values, torch.empty_like(values, dtype=torch.long, device="meta")
kernels.impl("kthvalue", kthvalue, "CPU")
values, indices = torch.kthvalue(torch.rand(4, 4, device=DEVICE), 2, 1)
with pytest.raises(NotImplementedError, match="aten::kthvalue.*copy out of meta"):
    helpers.synchronize()
"""
    helpers.run_python(code, fresh=True)


def test_without_a_kernel_for_the_cpu_the_error_names_the_operator(acc_only):
    library.define("acc_test::nowhere", "(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError, match="acc_test::nowhere"):
        torch.ops.acc_test.nowhere(torch.ones(2, device=acc_only))


def test_a_cpp_operator_and_its_gradient(device, cpp):
    def run(where: str) -> list[torch.Tensor]:
        x = torch.linspace(-2, 2, 12).view(3, 4).to(where).requires_grad_()
        y = torch.ones(4, 3).to(where).requires_grad_()
        z = cpp.axpy((x * 3).t(), y, 0.5)
        z.square().sum().backward()
        return [z, x.grad, y.grad]

    same(run, device)


def test_a_cpp_operator_differentiated_in_cpp(device, cpp):
    def run(where: str) -> list[torch.Tensor]:
        x = torch.linspace(-2, 2, 6).to(where).requires_grad_()
        y = cpp.cube(x + 1)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        g.square().sum().backward()  # and once more
        return [y, g, x.grad]

    same(run, device)


def test_cpp_operators_that_write_share_and_resize(device, cpp):
    def run(where: str) -> list[torch.Tensor]:
        x = torch.arange(8.0).to(where)
        part = x[2:6]
        assert cpp.bump_(part, torch.ones(4, dtype=torch.int64).to(where)) is part
        out = torch.empty(0).to(where)
        made = cpp.square.out(x, out=out)
        assert made is out and out.shape == (8,)
        base = x * 1
        half = cpp.last_half(base)
        half.mul_(3)  # a view: the base sees it
        assert half.storage_offset() == 4
        return [x, out, base, half]

    same(run, device)


def test_an_error_of_a_cpp_operator_is_the_same(device, cpp):
    def message(where: str) -> str:
        with pytest.raises(ValueError) as raised:
            cpp.axpy(torch.ones(2).to(where), torch.ones(3).to(where), 1.0)
        return str(raised.value).partition("\n")[0]

    assert message(device) == message("cpu") == "axpy wants equal shapes"


class Swish(torch.autograd.Function):
    """x * sigmoid(x), with a gradient by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        s = x.sigmoid()
        ctx.save_for_backward(x, s)
        return x * s

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        x, s = ctx.saved_tensors
        return g * (s + x * s * (1 - s))


class Custom(nn.Module):
    """Two layers with one of the user's operators in between."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.between = between
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 6] -> [batch, 2]."""
        return self.last(self.between(self.first(x).tanh() * 2) + 0.5)


def train(device: str, between: Callable[[torch.Tensor], torch.Tensor], steps: int) -> Any:
    """Losses of `steps` training steps, then the parameters; and what the last two counted."""
    torch.manual_seed(3)
    net = Custom(between).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
    batches = torch.randn(steps, 5, 6).to(device)
    losses = []

    def some(part: torch.Tensor) -> None:
        for x in part:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

    some(batches[:-2])
    with helpers.counting() as counted:
        some(batches[-2:])
    return [*losses, *net.parameters()], counted


BETWEEN: dict[str, Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "python": lambda cpp: lambda x: softclip(x, 1.5),
    "python_with_fake": lambda cpp: lambda x: softclip_with_fake(x, 1.5),
    "python_anywhere": lambda cpp: lambda x: anywhere(x, 0.7),
    "cpp": lambda cpp: lambda x: cpp.axpy(x, x.detach() * 2, 0.5),
    "cpp_autograd": lambda cpp: lambda x: cpp.cube(x),
    "function": lambda cpp: Swish.apply,
}


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("kind", BETWEEN)
def test_in_a_training_loop(device, cpp, kind):
    between = BETWEEN[kind](cpp)
    (got, counted), (expected, _) = train(device, between, 8), train("cpu", between, 8)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=2e-5, atol=2e-6)
    if not helpers.ON_ACC:
        return
    # What is around the operator is replayed, with generated kernels.
    at_once = {"python": 1, "python_with_fake": 1, "cpp": 1, "cpp_autograd": 1}.get(kind, 0)
    assert counted["plans_built"] == 0
    assert counted["run_now"] == 2 * at_once
    assert counted["plan_follows"] == counted["flushes"] == 2 * (1 + at_once)
    assert counted["kernel_launches"] > 0


# --- Triton -------------------------------------------------------------------------------------

TRITON = importlib.util.find_spec("triton") is not None
TRITON_OP = """
import torch, triton, torchacc_device
import triton.language as tl
from torch import library

@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)
"""


def run_file(folder: Path, code: str, **env: str | None) -> str:
    """Runs `code` as a file, as Triton wants it, in a fresh interpreter; returns what it prints."""
    file = folder / "program.py"
    file.write_text(code)
    return helpers.run_python(
        f"import runpy; runpy.run_path({str(file)!r})", timeout=240, **env
    ).stdout


# Trained between recorded operators, beside the same in plain PyTorch on the CPU.
TRITON_TRAINS = """
import json
from tests import helpers

@DECORATED("acc_test::double", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    LAUNCHED[(triton.cdiv(x.numel(), 128),)](x, y, x.numel(), BLOCK=128)
    return y

op.register_autograd(lambda ctx, g: op(g.contiguous()))

def train(device, between):
    torch.manual_seed(3)
    weight = torch.randn(8, 100).to(device).requires_grad_()
    told = []
    for x in torch.randn(8, 3, 8).to(device):
        before = helpers.stats()
        y = between((x @ weight).tanh() + 0.5)
        assert y.device.type == device
        loss = (y * y).mean()
        (gradient,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight -= 0.5 * gradient
        told += [y.detach().cpu(), loss.detach().cpu(), gradient.cpu()]
    after = helpers.stats()
    counted = {key: after[key] - before[key] for key in ("flushes", "plan_follows", "plans_built")}
    return [*told, weight.detach().cpu()], counted

(got, counted), (expected, _) = train("acc", op), train("cpu", lambda x: 2 * x)
for a, b in zip(got, expected, strict=True):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
print(json.dumps(counted))
"""


def train_with_triton(folder: Path, way: str, launch: str, **env: str | None) -> None:
    """Steps with a Triton kernel in their middle come out right, and plans are around it.

    `way` registers the operator; `launch` is what it calls the kernel through.
    """
    code = TRITON_OP + TRITON_TRAINS.replace("DECORATED", f"library.{way}")
    counted = json.loads(run_file(folder, code.replace("LAUNCHED", launch), **env))
    if helpers.runs_at_once():
        return
    # it wants the memory in the forward and in the backward, and the results are read
    assert counted == {"flushes": 3, "plan_follows": 3, "plans_built": 0}


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
def test_a_triton_operator_runs_in_tritons_interpreter(acc_only, tmp_path):
    """The host has no other way to run a Triton kernel; the operator is what a GPU would run."""
    train_with_triton(tmp_path, "custom_op", "double", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("way", "launch"),
    [("custom_op", "double"), ("triton_op", "library.wrap_triton(double)")],
)
def test_a_compiled_triton_kernel_runs_between_recorded_operators(acc_only, tmp_path, way, launch):
    """With the memory of acc tensors, in order with what is submitted before and behind it."""
    if helpers.extension().executor_name() != "cuda":
        pytest.skip("Triton compiles for a GPU only")
    train_with_triton(tmp_path, way, launch, TRITON_INTERPRET=None)


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
def test_a_compiled_triton_operator_without_a_gpu_says_so(acc_only, tmp_path):
    if helpers.extension().executor_name() != "host":
        pytest.skip("there is a GPU: the tests above run its kernel")
    code = (
        TRITON_OP
        + """
@library.triton_op("acc_test::double", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    library.wrap_triton(double)[(1,)](x, y, x.numel(), BLOCK=128)
    return y

x = torch.ones(3, device="acc") + 1
try:
    op(x)
except RuntimeError as error:
    print(error)
assert (x * 2).tolist() == [4.0, 4.0, 4.0]
"""
    )
    assert "0 active drivers" in run_file(tmp_path, code, TRITON_INTERPRET=None)
