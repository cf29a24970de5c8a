"""Autocast on acc is CUDA's: the same operators in the same types; hosts multiply in float32."""

from __future__ import annotations

import copy
import re
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.autocast_test_lists import AutocastTestLists, TestAutocast
from torch.utils.checkpoint import checkpoint

from tests import helpers

sys.path.insert(0, str(helpers.ROOT / "scripts"))

from autocast_docs import REFUSED, kernels, macros

pytestmark = pytest.mark.usefixtures("acc_only")

ACC = "acc"
HALF = (torch.float16, torch.bfloat16)
# Tests of torch for CUDA whose operator is cuDNN's or MIOpen's own.
OF_CUDNN = ("cudnn_", "_thnn_fused")


def test_the_operators_are_those_of_cuda() -> None:
    cuda, ours = kernels("AutocastCUDA"), kernels("AutocastPrivateUse1")
    assert len(cuda) > 120 or not hasattr(torch.Tensor, "names")
    # torch 2.13 has no named dimensions, nor the overloads that take them
    assert len([name for name in cuda if not re.search(r"\.\w*([Dd]imname|names)", name)]) >= 119
    cudnn = {name for name in cuda if "cudnn" in name}
    assert cuda - ours == cudnn and len(cudnn) == 3  # called inside of others
    assert ours <= cuda
    assert ours == macros().keys() | {REFUSED}


LISTS = AutocastTestLists("cpu")  # for the names; each test makes its own, on the device
KINDS = {
    # list of the tests: (runs as, module)
    "torch_fp16": (torch.float16, torch),
    "methods_fp16": (torch.float16, None),
    "nn_fp16": (torch.float16, torch._C._nn),
    "linalg_fp16": (torch.float16, torch._C._linalg),
    "torch_fp32": (torch.float32, torch),
    "methods_fp32": (torch.float32, None),
    "nn_fp32": (torch.float32, torch._C._nn),
    "torch_need_autocast_promote": (torch.float32, torch),
}


@pytest.mark.parametrize(
    ("kind", "index"),
    [(kind, i) for kind in KINDS for i in range(len(getattr(LISTS, kind)))],
)
def test_each_runs_in_the_type_that_cuda_takes(kind: str, index: int) -> None:
    torch.manual_seed(0)
    name, arguments, *more = getattr(AutocastTestLists(ACC), kind)[index]
    if name.startswith(OF_CUDNN):
        pytest.skip("cuDNN's own")
    if name == "einsum":  # its entry in the list is not a call
        x = torch.ones(2, 2, device=ACC)
        arguments = ("ij,jk->ik", x, x)
        with torch.autocast(ACC):
            assert torch.einsum(*arguments).dtype == torch.float16
        return
    runs_as, module = KINDS[kind]
    TestAutocast()._run_autocast_outofplace(
        name,
        arguments,
        runs_as,
        ACC,
        module=module,
        add_kwargs=next((each for each in more if isinstance(each, dict)), {}),
        amp_dtype=torch.float16,
    )


# Arguments of operators that torch's lists leave out; a shape stands for a tensor.
SQUARE, ROW, PLANE = torch.Size([3, 3]), torch.Size([1, 2, 4]), torch.Size([1, 2, 4, 4])
BLOCK = torch.Size([1, 2, 4, 4, 4])
LEFT_OUT: dict[str, tuple[Any, ...]] = {
    "scaled_dot_product_attention": (PLANE, PLANE, PLANE),
    "native_layer_norm": (SQUARE, [3], None, None, 1e-5),
    "frobenius_norm.dim": (SQUARE, [0]),
    "nuclear_norm": (SQUARE,),
    "nuclear_norm.dim": (SQUARE, [0, 1]),
    "huber_loss": (SQUARE, SQUARE),
    "linalg_vector_norm": (SQUARE,),
    "linalg_matrix_norm": (SQUARE, 1),  # torch takes no half type for the order 2
    "linalg_matrix_norm.str_ord": (SQUARE,),
    "upsample_nearest1d": (ROW, [6]),
    "_upsample_nearest_exact1d": (ROW, [6]),
    "upsample_linear1d": (ROW, [6], False),
    "upsample_nearest2d": (PLANE, [6, 6]),
    "_upsample_nearest_exact2d": (PLANE, [6, 6]),
    "upsample_bilinear2d": (PLANE, [6, 6], False),
    "_upsample_bilinear2d_aa": (PLANE, [6, 6], False),
    "upsample_bicubic2d": (PLANE, [6, 6], False),
    "_upsample_bicubic2d_aa": (PLANE, [6, 6], False),
    "upsample_nearest3d": (BLOCK, [6, 6, 6]),
    "_upsample_nearest_exact3d": (BLOCK, [6, 6, 6]),
    "upsample_trilinear3d": (BLOCK, [6, 6, 6], False),
}
# They are kernels of GPUs, which nothing calls elsewhere.
ON_GPUS = {"_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_scaled_dot_product_flash_attention"}


def test_every_operator_of_the_macros_is_called() -> None:
    kinds = (*KINDS, "torch_expect_builtin_promote", "methods_expect_builtin_promote")
    listed = {entry[0] for kind in kinds for entry in getattr(LISTS, kind)}
    left = {name for name in macros() if name.partition(".")[0] not in listed}
    assert left - ON_GPUS == LEFT_OUT.keys() and len(macros()) > 110


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_the_lists_leave_out_runs_in_the_type_of_its_macro(name: str) -> None:
    torch.manual_seed(0)
    base, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, base), overload or "default")
    lower = macros()[name] == "LOWER_PRECISION_FP"
    given, runs_as = (torch.float32, torch.float16)[:: 1 if lower else -1]
    arguments = [
        torch.randn(*each).to(ACC, given) if isinstance(each, torch.Size) else each
        for each in LEFT_OUT[name]
    ]
    with torch.autocast(ACC, torch.float16):
        found = operator(*arguments)
    expected = operator(
        *(each.to(runs_as) if isinstance(each, torch.Tensor) else each for each in arguments)
    )
    found, expected = (each[0] if isinstance(each, tuple) else each for each in (found, expected))
    assert found.dtype == runs_as
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["sum", "prod", "cumsum", "cumprod", "softmax", "log_softmax"])
def test_a_dtype_that_the_call_names_is_kept(name: str, dtype: torch.dtype) -> None:
    """The operators that compute in float32 unless they are told otherwise."""
    where = {"sum": [(), (0,)], "prod": [(), (0,)]}.get(name, [(0,)])
    x = torch.linspace(0.5, 1.5, 12).reshape(3, 4).to(ACC, torch.float16)
    for dims in where:
        for call in (getattr(torch, name), getattr(torch.Tensor, name)):
            expected = call(x, *dims, dtype=dtype)
            with torch.autocast(ACC):
                found = call(x, *dims, dtype=dtype)
                unnamed = call(x, *dims)
            assert (found.dtype, unnamed.dtype) == (dtype, torch.float32)
            assert torch.equal(found, expected)


def test_types_are_promoted_as_ever() -> None:
    lists = AutocastTestLists(ACC)
    for module, cases in (
        (torch, lists.torch_expect_builtin_promote),
        (None, lists.methods_expect_builtin_promote),
    ):
        for name, arguments, out_type in cases:
            TestAutocast()._run_autocast_outofplace(
                name,
                arguments,
                torch.float32,
                ACC,
                out_type=out_type,
                module=module,
                amp_dtype=torch.float16,
            )


def test_what_is_unsafe_is_refused() -> None:
    for name, arguments, module in AutocastTestLists(ACC).banned:
        with torch.autocast(ACC), pytest.raises(RuntimeError, match="unsafe under autocast"):
            getattr(module, name)(*arguments)


PRODUCTS: dict[str, Any] = {
    "mm": lambda x, w: x @ w,
    "mm, transposed": lambda x, w: x.t() @ w.t().contiguous().t(),
    "linear": lambda x, w: F.linear(x, w, w[0]),
    "bmm": lambda x, w: torch.bmm(x.expand(3, 64, 64), w.expand(3, 64, 64)),
    "baddbmm": lambda x, w: torch.baddbmm(x, x.expand(2, 64, 64), w.expand(2, 64, 64)),
    "addmm": lambda x, w: torch.addmm(x, x, w, beta=0.5, alpha=2),
    "mv": lambda x, w: x @ w[0],
    "convolution": lambda x, w: F.conv2d(x.view(1, 16, 16, 16), w.view(16, 16, 4, 4), w[0, :16]),
    "conv1d": lambda x, w: F.conv1d(x.view(4, 16, 64), w.view(16, 16, 16), padding=2, groups=1),
    "grouped": lambda x, w: F.conv2d(x.view(1, 16, 16, 16), w.view(64, 4, 4, 4), groups=4),
    "transposed": lambda x, w: F.conv_transpose2d(x.view(1, 16, 16, 16), w.view(16, 16, 4, 4)),
    "attention": lambda x, w: F.scaled_dot_product_attention(
        x.view(1, 4, 16, 64), w.view(1, 4, 16, 64), x.view(1, 4, 16, 64)
    ),
    "causal": lambda x, w: F.scaled_dot_product_attention(
        x.view(1, 4, 16, 64), w.view(1, 4, 16, 64), x.view(1, 4, 16, 64), is_causal=True
    ),
}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_on_hosts_are_as_exact_as_their_type(name: str, dtype: torch.dtype) -> None:
    """Against float64, of the same inputs rounded to the half type: forward and gradients."""
    torch.manual_seed(1)
    values = torch.randn(2, 64, 64)

    def run(device: str, compute: torch.dtype) -> list[torch.Tensor]:
        x, w = (v.to(dtype).to(device, compute).requires_grad_() for v in values.clone())
        y = PRODUCTS[name](x, w)
        y.backward(torch.ones_like(y))
        return [each.detach().cpu().double() for each in (y, x.grad, w.grad)]

    found, exact = run(ACC, dtype), run("cpu", torch.float64)
    unit = torch.finfo(dtype).eps
    for mine, wanted in zip(found, exact, strict=True):
        away = (mine - wanted).norm() / wanted.norm()
        assert away < 1.5 * unit, f"{away} of {unit}"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_wholly_of_the_lower_precision(kind, dtype, packed) -> None:
    """As cuDNN's are under autocast: states too, in training and without gradients."""
    torch.manual_seed(0)
    layer = kind(4, 5, num_layers=2, bidirectional=True, batch_first=True).to(ACC)
    half = copy.deepcopy(layer).to(dtype)
    x = torch.randn(2, 3, 4).to(ACC)

    def run(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        inputs: Any = x
        if packed:
            inputs = nn.utils.rnn.pack_padded_sequence(x, [3, 2], batch_first=True)
        output, states = module(inputs)
        data = output.data if packed else output
        return [data, *(states if isinstance(states, tuple) else (states,))]

    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            with torch.autocast(ACC, dtype):
                found = run(layer, x)
            expected = run(half, x.to(dtype))
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == dtype
            assert torch.equal(one, other)
        if gradients:
            sum(each.float().sum() for each in found).backward()
            sum(each.float().sum() for each in expected).backward()
            for one, other in zip(layer.parameters(), half.parameters(), strict=True):
                torch.testing.assert_close(one.grad.to(dtype), other.grad)


def test_in_place_products_of_half_types() -> None:
    a = torch.randn(8, 8).half()
    x = a.to(ACC)
    x.addmm_(a.to(ACC), a.to(ACC))
    torch.testing.assert_close(x.cpu(), (a.float() + a.float() @ a.float()).half())
    # What is read after a write is what was written.
    y = a.to(ACC)
    first = y @ y
    y.mul_(2)
    second = y @ y
    torch.testing.assert_close(second.cpu(), (4 * first).cpu())


@pytest.mark.usefixtures("recording")
def test_a_weight_is_cast_once_in_a_region() -> None:
    layer = nn.Linear(16, 16).to(ACC)
    x = torch.randn(4, 16, device=ACC)
    helpers.flush()
    with helpers.counting() as counted:
        with torch.autocast(ACC):
            y = layer(layer(layer(x)))
        helpers.flush()
    # Three layers; casts of the weight, of the bias and of the input.
    assert counted["nodes"] == 3 + 3
    assert y.dtype == torch.float16
    with torch.no_grad():
        layer.weight.zero_()
    with torch.autocast(ACC):
        assert torch.equal(layer(x).float().cpu(), layer.bias.half().float().expand(4, 16).cpu())


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_replayed_step_casts_each_parameter_once(dtype: torch.dtype) -> None:
    """However often it is used, forward and backward."""
    shared, last = nn.Linear(16, 16), nn.Linear(16, 4)
    net = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), shared, last).to(ACC)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=True)
    scaler = torch.amp.GradScaler(ACC, init_scale=8.0)
    x = torch.randn(8, 16).to(ACC)
    for _ in range(6):
        with helpers.counting() as counted:
            optimizer.zero_grad()
            with torch.autocast(ACC, dtype):
                y = net(x)
            scaler.scale(y.float().square().mean()).backward()
            scaler.step(optimizer)
        plan = helpers.extension().plan_data(torch.acc.current_device())
        scaler.update()
    assert counted["plans_built"] == 0 and counted["flushes"] == 1
    short = {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    updated = {
        node["writes"][0]: 0 for node in plan["nodes"] if node["op"].startswith("aten::addcdiv_")
    }
    for node in plan["nodes"]:
        found = re.match(rf"aten::copy_\(%\d+:{short}\S*, %(\d+):f32", node["text"])
        if found and int(found[1]) in updated:
            updated[int(found[1])] += 1
    assert list(updated.values()) == [1] * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_again_in_the_same_types(reentrant: bool) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).to(ACC)
    x = torch.randn(4, 8, device=ACC, requires_grad=True)

    def gradients(run: Any) -> list[torch.Tensor]:
        block.zero_grad()
        with torch.autocast(ACC):
            y = run(x)
            assert y.dtype == torch.float16
        y.float().square().sum().backward()
        return [p.grad.clone() for p in block.parameters()]

    plain = gradients(block)
    again = gradients(lambda x: checkpoint(block, x, use_reentrant=reentrant))
    torch.testing.assert_close(again, plain)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_training_follows_float32(dtype: torch.dtype) -> None:
    """100 steps on scanned digits: losses within 2 % of float32's."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)

    def losses(half: bool) -> torch.Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 16, 10),
        ).to(ACC)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler(ACC, enabled=half and dtype == torch.float16)
        found = []
        for i in range(100):
            rows = torch.arange(64 * i, 64 * i + 64) % len(labels)
            with torch.autocast(ACC, dtype, enabled=half):
                loss = F.cross_entropy(net(images[rows].to(ACC)), labels[rows].to(ACC))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            found.append(loss.detach())
        return torch.stack(found).cpu()

    wanted, found = losses(False), losses(True)
    assert wanted[-10:].mean() < 0.2 * wanted[0]
    # Running means, since a batch of 64 is noise: of ten steps, relative to their own size.
    means = [each.unfold(0, 10, 10).mean(1) for each in (found, wanted)]
    assert ((means[0] - means[1]).abs() / means[1]).max() < 0.02
