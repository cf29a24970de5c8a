"""Operators on lists run item by item; values, types and refusals are those of eager CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers import DEVICE, FULL

pytestmark = pytest.mark.usefixtures("acc_only")

CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("add_", (2,)),
    ("add_", ([1.5, 2.5, 3.5],)),
    ("add", ("list",)),
    ("mul_", (0.1,)),
    ("mul", ("list",)),
    ("div_", ([1.1, 2.2, 3.3],)),
    ("div_", (1e300,)),
    ("sub_", (1.0 / 3,)),
    ("sub_", (1,)),
    ("lerp_", ("list", 0.3)),
    ("addcmul_", ("list", "list", 0.7)),
    ("addcdiv_", ("list", "list", [0.1, 0.2, 0.3])),
    ("maximum_", ("list",)),
    ("maximum", ("list",)),
    ("maximum_", (2.5,)),
    ("minimum_", ("list",)),
    ("clamp_max_", (2.5,)),
    ("clamp_min", ("list",)),
    ("pow_", (2,)),
    ("pow_", ([1.5, 2.0, 3.0],)),
    ("pow", ("list",)),
    ("rsqrt", ()),
    ("sqrt", ()),
    ("neg", ()),
    ("zero_", ()),
    ("norm", ()),
    ("norm", (1,)),
    ("norm", (2, torch.float64)),
    ("norm", (float("inf"),)),
]


def make(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(3, 4), (5,), ()]
    return [(torch.rand(shape) * 5 + 1).to(dtype) for shape in shapes]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.int64] + ([torch.float64] if FULL else []),
)
@pytest.mark.parametrize("name, arguments", CALLS, ids=lambda v: str(v))
def test_lists_give_what_eager_gives(
    name: str, arguments: tuple[Any, ...], dtype: torch.dtype
) -> None:
    function = getattr(torch, "_foreach_" + name)

    def call(device: str) -> list[torch.Tensor]:
        lists = [[t.to(device) for t in make(dtype, seed)] for seed in range(3)]
        given = [lists[i + 1] if a == "list" else a for i, a in enumerate(arguments)]
        made = function(lists[0], *given)
        return [t.cpu() for t in (lists[0] if name.endswith("_") else made)]

    try:
        expected = call("cpu")
    except RuntimeError as error:
        with pytest.raises(RuntimeError) as refusal:
            call(DEVICE)
        assert str(error).splitlines()[0] in str(refusal.value)
        return
    for a, b in zip(call(DEVICE), expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("name, arguments", [c for c in CALLS if c[0].endswith("_")], ids=str)
def test_writes_to_lists_are_counted(name: str, arguments: tuple[Any, ...]) -> None:
    # Autograd tells by the count that a tensor it saved is no longer what it was.
    def versions(device: str) -> list[int]:
        lists = [[t.to(device) for t in make(torch.float32, seed)] for seed in range(3)]
        before = [t._version for t in lists[0]]
        for _ in range(3):  # recorded, planned, followed
            given = [lists[i + 1] if a == "list" else a for i, a in enumerate(arguments)]
            getattr(torch, "_foreach_" + name)(lists[0], *given)
            lists[0][0].sum().item()
        return [t._version - old for t, old in zip(lists[0], before, strict=True)]

    assert versions(DEVICE) == versions("cpu") == [3, 3, 3]


def test_writes_that_the_cpu_does_not_count() -> None:
    def versions(device: str) -> list[int]:
        gradients = [torch.ones(3, device=device) for _ in range(2)]
        found, scale = torch.zeros(1, device=device), torch.ones(1, device=device)
        for _ in range(3):
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)
        return [t._version for t in gradients]

    assert versions(DEVICE) == versions("cpu")


def test_backward_after_an_optimizer_has_changed_what_it_needs() -> None:
    def run(device: str) -> None:
        layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)).to(device)
        optimizer = torch.optim.AdamW(layers.parameters(), foreach=True)
        loss = layers(torch.ones(2, 3, device=device)).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        loss.backward()

    for device in ("cpu", DEVICE):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(device)


def test_clipping_by_the_norm_gives_what_eager_gives() -> None:
    """The norm of each gradient is a kernel's, with all others of its kind in one step."""

    def train(device: str) -> tuple[list[torch.Tensor], list[float]]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Linear(48, 48) for _ in range(4)]).to(device)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, foreach=True)
        x = torch.randn(16, 48).to(device)
        norms = []
        for step in range(6):
            optimizer.zero_grad()
            (net(x) * (step + 1)).square().mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5, foreach=True)
            optimizer.step()
            norms.append(norm.item())
        return [p.detach().cpu() for p in net.parameters()], norms

    for mine, right in zip(train(DEVICE), train("cpu"), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


def test_copies_between_devices() -> None:
    """As on CUDA: item by item, from and to the CPU."""
    mine = [torch.zeros(3, device=DEVICE), torch.zeros(2, device=DEVICE)]
    given = [torch.arange(3.0), torch.full((2,), 7.0)]
    back = [torch.empty(3), torch.empty(2)]
    torch._foreach_copy_(mine, given)
    torch._foreach_mul_(mine, 2.0)
    torch._foreach_copy_(back, mine)
    assert [t.tolist() for t in back] == [[0.0, 2.0, 4.0], [14.0, 14.0]]


def test_factors_that_are_read_on_the_cpu() -> None:
    ones = [torch.ones(2, device=DEVICE), torch.ones(2, device=DEVICE)]
    torch._foreach_addcdiv_(ones, ones, ones, torch.tensor([0.5, 2.0]))
    assert [t.tolist() for t in ones] == [[1.5, 1.5], [3.0, 3.0]]
