"""Flash attention on a GPU: the operator that acc records there, and CUDA's that it calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only")

ATEN = torch.ops.aten
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> Any:
    """Attention written out, also with fewer heads of keys: the result and logarithms of sums."""
    groups = q.size(1) // k.size(1)
    k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
    scores = q @ k.mT * (q.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of `attend`, by its formula: below autograd there is no other."""
    groups = q.size(1) // k.size(1)
    scale = q.size(-1) ** -0.5 if scale is None else scale
    eye = torch.eye(v.size(2)).expand(*k.shape[:3], -1)
    weights, _ = attend(q, k, eye, is_causal, scale)
    wide_k, wide_v = (each.repeat_interleave(groups, 1) for each in (k, v))
    of_weights = gradient @ wide_v.mT
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
    of_k, of_v = (
        each.unflatten(1, (-1, groups)).sum(2) for each in (of_scores.mT @ q, weights.mT @ gradient)
    )
    return of_scores @ wide_k, of_k, of_v


def by_position(tensor: Tensor) -> Tensor:
    """The same numbers in the memory of [batch, length, heads, size]."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """CUDA's kernels have a stand-in on the CPU, whose results are laid out unlike the operands."""
    made: list[str] = []

    def forward(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        made.append("forward")
        assert dropout_p == 0 and not return_debug_mask
        out, sums = attend(q, k, v, is_causal, scale)
        none = q.new_empty(0)
        return by_position(out), sums.mT.contiguous().mT, none, none, 0, 0, none, none, none

    def backward(
        gradient, q, k, v, out, sums, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, at,
        *, scale=None,
    ):  # fmt: skip
        made.append("backward")
        assert (max_q, max_k, dropout_p) == (q.size(2), k.size(2), 0)
        expected, of_sums = attend(q, k, v, is_causal, scale)
        torch.testing.assert_close((out, sums), (expected, of_sums))
        return tuple(map(by_position, gradients(gradient, q, k, v, is_causal, scale)))

    with library._scoped_library("aten", "IMPL") as kernels:
        kernels.impl("_scaled_dot_product_flash_attention", forward, "CPU")
        kernels.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
        yield made


@pytest.mark.parametrize("is_causal, scale", [(False, None), (True, 0.3)])
@pytest.mark.parametrize("heads", [4, 2], ids=["", "fewer heads of keys"])
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_called_for_cuda_tensors(calls, is_causal, scale, heads, packed):
    """Values, gradients, and the memory that the plan has for them."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, n, 6, 8) for n in (4, heads, heads))
    if packed:  # as of one product for all three
        q = torch.randn(2, 6, 3, 4, 8)[:, :, 1].transpose(1, 2)
    out, sums = ATEN._scaled_dot_product_flash_attention_for_cpu.default.redispatch(
        CUDA, q, k, v, 0.0, is_causal, scale=scale
    )
    expected, of_sums = attend(q, k, v, is_causal, scale)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(sums, of_sums)
    assert out.stride() == torch.empty_like(q).stride() and sums.is_contiguous()
    gradient = torch.randn_like(out)
    found = ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default.redispatch(
        CUDA, gradient, q, k, v, out, sums, 0.0, is_causal, scale=scale
    )
    leaves = [each.detach().requires_grad_() for each in (q, k, v)]
    expected = torch.autograd.grad(attend(*leaves, is_causal, scale)[0], leaves, gradient)
    for mine, theirs, operand in zip(found, expected, (q, k, v), strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.stride() == torch.empty_like(operand).stride()
    assert calls == ["forward", "backward"]


def test_masks_and_dropout_are_none_of_its_business(calls):
    q = torch.randn(1, 2, 3, 8)
    operator = ATEN._scaled_dot_product_flash_attention_for_cpu.default
    with pytest.raises(RuntimeError, match="takes no mask and no dropout"):
        operator.redispatch(CUDA, q, q, q, 0.5)
    with pytest.raises(RuntimeError, match="takes no mask and no dropout"):
        operator.redispatch(CUDA, q, q, q, attn_mask=torch.zeros(3, 3))
    assert not calls


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 64])
@pytest.mark.parametrize("heads", [4, 2], ids=["", "fewer heads of keys"])
def test_a_causal_mask_begins_at_the_first_query_and_key(recording, queries, heads):
    """Flash attention lets the last query have the last key; cuDNN, which is asked first on some
    GPUs, is as torch says.
    """
    torch.manual_seed(3)
    exact = [torch.randn(2, n, *of) for n, of in ((4, (queries, 64)), *[(heads, (96, 64))] * 2)]
    expected, _ = attend(*exact, True, None)
    mine = [each.half().to(recording) for each in exact]
    out = F.scaled_dot_product_attention(*mine, is_causal=True, enable_gqa=heads < 4)
    torch.testing.assert_close(out.float().cpu(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [4, 2], ids=["", "fewer heads of keys"])
@pytest.mark.parametrize("size", [64, 128])
def test_a_gpu_takes_flash_attention(recording, dtype, heads, size):
    if helpers.extension().executor_name() == "host":
        pytest.skip("hosts have flash attention of their own")
    torch.manual_seed(3)
    exact = [torch.randn(2, n, 96, size, dtype=torch.float64) for n in (4, heads, heads)]
    weights = torch.randn(2, 4, 96, size, dtype=torch.float64)
    leaves = [each.clone().requires_grad_() for each in exact]
    expected, _ = attend(*leaves, True, None)
    (expected * weights).sum().backward()
    mine = [each.to(dtype).to(recording).requires_grad_() for each in exact]
    with helpers.counting() as counted:
        out = F.scaled_dot_product_attention(*mine, is_causal=True, enable_gqa=heads < 4)
        (out * weights.to(dtype).to(recording)).sum().backward()
        torch.testing.assert_close(out.double().cpu(), expected.detach(), rtol=2e-2, atol=2e-2)
    assert not [key for key in counted.after if key.startswith("fallback") and counted[key]]
    for one, other in zip(mine, leaves, strict=True):
        torch.testing.assert_close(one.grad.double().cpu(), other.grad, rtol=5e-2, atol=5e-2)
    with torch.profiler.profile() as profile:
        F.scaled_dot_product_attention(*mine, is_causal=True, enable_gqa=heads < 4)
        torch.get_device_module(recording).synchronize()
    names = {event.name for event in profile.events()}
    assert any("flash_attention_for_cpu" in name for name in names), names
