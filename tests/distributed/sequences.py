"""What test_context_parallel.py runs on each rank: attention over sequences that are split.

Every process has whole q, k and v, splits them, calls, and gathers the result: what it finds, and
the gradients of the whole tensors, are those of one process. Names of cases that are not are
returned with their differences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests import attention
from torchacc import ops
from torchacc.ops import context_parallel as cp

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
LENGTHS = torch.tensor([8, 3], dtype=torch.int32)

# Heads of keys, keys, and options of attention.one(...).
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "plain": (4, 8, {}),
    "causal": (2, 8, {"causal": True, "scale": 0.6}),
    "causal, more keys": (1, 12, {"causal": True}),
    "causal, fewer keys": (4, 4, {"causal": True}),
    "window": (4, 8, {"window_size": (2, 1)}),
    "window that ends before other parts": (4, 8, {"window_size": (0, 0)}),
    "slopes": (2, 8, {"slopes": SLOPES, "causal": True}),
    "slopes of each sequence": (4, 8, {"slopes": torch.stack((SLOPES, 2 * SLOPES))}),
}


def attempt(
    call: Callable[..., Tensor],
    group: Any,
    device: Any,
    exact: list[Tensor],
    weights: Tensor,
    expected: Tensor,
    dtype: torch.dtype = torch.float32,
    error: float = 1e-5,
) -> str | None:
    """How the result or a gradient differs from what is expected, if one does."""
    tensors = [t.detach().to(dtype).to(device) for t in exact]
    # Elements of a head do not lie next to each other in memory, as in a part of a wider product.
    tensors[0] = tensors[0].mT.contiguous().mT
    tensors = [t.requires_grad_() for t in tensors]
    parts = [cp.split_forward_gather_backward(t, 1, group) for t in tensors]
    out = cp.gather_forward_split_backward(call(*parts), 1, group)
    found = [out.detach(), *attention.gradients(out, weights, *tensors)]
    wanted = [expected, *attention.gradients(expected, weights, *exact)]
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        apart = (a.cpu().double() - b).abs().max().item()
        if a.dtype != dtype or not apart <= error:
            return f"{name} differs by {apart}, as {a.dtype}"
    return None


def like_one_process(
    ways: dict[str, Callable[..., Tensor]],
    group: Any,
    device: Any,
    names: tuple[str, ...] = tuple(CASES),
    padded: bool = True,
) -> dict[str, str]:
    """`ways`: functions of q, k, v and options; the cases `names` by each of them.

    `padded`: padded sequences, and another type, too.
    """
    wrong: dict[str, str | None] = {}
    for name in names:
        kept, keys, options = CASES[name]
        *exact, weights = attention.inputs(2, 8, keys, kept=kept)
        exact = [t.requires_grad_() for t in exact]
        expected, _ = attention.batched(*exact, **options)
        arguments = flash_arguments(options, device)
        for way, function in ways.items():
            wrong[f"{way}, {name}"] = attempt(
                lambda *t, f=function, a=arguments: f(*t, **a),
                group,
                device,
                exact,
                weights,
                expected,
            )
    if padded:
        wrong |= _padded(ways, group, device)
    return {name: text for name, text in wrong.items() if text is not None}


def _padded(
    ways: dict[str, Callable[..., Tensor]], group: Any, device: Any
) -> dict[str, str | None]:
    wrong: dict[str, str | None] = {}
    *exact, weights = attention.inputs(2, 8, 8)
    exact = [t.requires_grad_() for t in exact]
    rows = [list(range(int(length))) for length in LENGTHS]
    whole = [list(range(8))] * 2
    for of_q, of_k, lens in (
        (rows, rows, {"q_lens": LENGTHS, "k_lens": LENGTHS}),
        (whole, rows, {"k_lens": LENGTHS}),
    ):
        expected, _ = attention.chosen(*exact, of_q, of_k, causal=True)
        for way, function in ways.items():
            wrong[f"{way}, {', '.join(lens)}"] = attempt(
                lambda *t, f=function, lens=lens: f(*t, **lens, causal=True),
                group,
                device,
                exact,
                weights,
                expected,
            )
    expected, _ = attention.batched(*exact, causal=True)
    for way, function in ways.items():
        wrong[f"{way}, bfloat16"] = attempt(
            lambda *t, f=function: f(*t, causal=True),
            group,
            device,
            exact,
            weights,
            expected,
            torch.bfloat16,
            6e-2,
        )
    return wrong


class Net(nn.Module):
    """Whole outside and split between `first` and `last`, or without a group whole everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 16), nn.Linear(16, 48), nn.Linear(16, 1)

    def forward(self, x: Tensor, group: Any = None) -> Tensor:
        x = self.first(x)
        if group is not None:
            x = cp.split_forward_gather_backward(x, 1, group, "down")
        q, k, v = self.middle(x).unflatten(-1, (3, 2, 8)).unbind(2)
        if group is not None:
            out = cp.ulysses(q, k, v, causal=True, process_group=group)
            out = cp.gather_forward_split_backward(out, 1, group, "up")
        else:
            out = ops.flash_attn_xla(q, k, v, causal=True)
        return self.last(out.flatten(2))


def trained(model: nn.Module, device: Any, group: Any = None) -> dict[str, list[float]]:
    """Its parameters after some steps on the same whole sequences."""
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(2, 8, n, generator=generator).to(device) for n in (3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(4):
        optimizer.zero_grad()
        (model(x, group) - y).square().mean().backward()
        optimizer.step()
    return {name: value.flatten().tolist() for name, value in model.state_dict().items()}


def flash_arguments(options: dict[str, Any], device: Any) -> dict[str, Any]:
    renamed = {"slopes": "alibi_slopes", "scale": "softmax_scale"}
    made = {renamed.get(name, name): value for name, value in options.items()}
    return {n: v.float().to(device) if isinstance(v, Tensor) else v for n, v in made.items()}
