"""`torchacc.ops`: attention under TorchAcc's names against attention written out in float64."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchacc
from tests import attention, helpers
from torchacc import logger, ops
from torchacc.ops import attend
from torchacc.ops.context_parallel import blocks

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
# Of queries and keys, and options of one(...).
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "plain": (6, 6, {}),
    "causal": (6, 6, {"causal": True}),
    "causal, fewer queries": (3, 7, {"causal": True}),
    "causal, queries that see nothing": (7, 3, {"causal": True}),
    "window": (7, 7, {"window_size": (2, 1)}),
    "window, queries that see nothing": (8, 3, {"window_size": (-1, 1)}),
    "window behind only, fewer queries": (4, 7, {"window_size": (-1, 0)}),
    "window before only": (7, 7, {"window_size": (1, -1)}),
    "causal window": (7, 7, {"causal": True, "window_size": (2, 5)}),
    "window as wide as all": (5, 5, {"window_size": (4, 4)}),
    "slopes": (6, 6, {"slopes": SLOPES, "scale": 0.7}),
    "slopes of each sequence, causal": (
        4,
        6,
        {"slopes": torch.stack((SLOPES, 2 * SLOPES)), "causal": True},
    ),
}
# The largest difference from float64 that results and gradients up to about 4 may have.
ERROR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}


def on(device: str, dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    return [t.to(dtype).to(device).requires_grad_() for t in tensors]


def compare(
    call: Callable[..., Any],
    expected: tuple[Tensor, Tensor],
    exact: tuple[Tensor, ...],
    weights: Tensor,
    device: str,
    dtype: torch.dtype = torch.float32,
) -> None:
    """`call` of the tensors on the device against results and gradients of them in float64."""
    tensors = on(device, dtype, *exact)
    out, lse, *rest = call(*tensors)
    assert rest in ([], [None])
    assert (out.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    found = attention.gradients(out, weights, *tensors)
    wanted = attention.gradients(expected[0], weights, *exact)
    for name, a, b in zip(
        ("out", "lse", "dq", "dk", "dv"), (out, lse, *found), (*expected, *wanted), strict=False
    ):
        torch.testing.assert_close(
            helpers.to_cpu(a).double(), b, rtol=0, atol=ERROR[dtype], msg=lambda m: f"{name}: {m}"
        )


def flash_arguments(options: dict[str, Any], device: str) -> dict[str, Any]:
    renamed = {"slopes": "alibi_slopes", "scale": "softmax_scale"}
    made = {renamed.get(name, name): value for name, value in options.items()}
    return {n: v.float().to(device) if isinstance(v, Tensor) else v for n, v in made.items()}


# --- sequences of one length ------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_attention_written_out(device, case):
    queries, keys, options = CASES[case]
    *exact, weights = attention.inputs(2, queries, keys)
    exact = [t.requires_grad_() for t in exact]
    expected = attention.batched(*exact, **options)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        arguments = flash_arguments(options, q.device.type)
        return ops.flash_attn_xla(q, k, v, **arguments, return_attn_probs=True)

    compare(call, expected, tuple(exact), weights, device)
    if case in ("window", "causal, queries that see nothing", "slopes of each sequence, causal"):
        compare(call, expected, tuple(exact), weights, "cpu")
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            compare(call, expected, tuple(exact), weights, device, dtype)


def test_the_alignment_is_flash_attention_s_own_example(device):
    """Its docstring's tables: 2 queries of 5 keys, and 5 of 2."""
    for queries, keys, table in (
        (2, 5, ["11110", "11111"]),
        (5, 2, ["00", "00", "00", "10", "11"]),
    ):
        q, k = torch.zeros(1, queries, 1, 8), torch.zeros(1, keys, 1, 8)
        v = torch.eye(keys, 8).view(1, keys, 1, 8)
        out = ops.flash_attn_xla(q.to(device), k.to(device), v.to(device), causal=True)
        seen = out[0, :, 0, :keys].cpu() > 0
        assert ["".join(str(int(x)) for x in row) for row in seen] == table


def test_scaled_dot_product_attention_takes_masks_and_scales_as_torch_does(device):
    """TorchAcc's took any mask for a causal one, and no scale."""
    q, k, v, _ = (t.float().transpose(1, 2) for t in attention.inputs(2, 5, 5, kept=4))
    mask = torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) > 0.4
    expected = F.scaled_dot_product_attention(q, k, v, mask, scale=0.3)
    found = ops.scaled_dot_product_attention(
        *(t.to(device) for t in (q, k, v)), mask.to(device), 0.0, False, 0.3
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-6)


def test_dropout_drops_its_share_and_follows_the_seed(device):
    q, k = (torch.zeros(4, 32, 2, 8, device=device) for _ in range(2))
    v = torch.ones(4, 32, 2, 8, device=device)

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return ops.flash_attn_xla(q, k, v, dropout_p=0.25, causal=True).cpu()

    first = drawn(1)
    assert torch.equal(first, drawn(1)) and not torch.equal(first, drawn(2))
    # Each row is the mean of up to 32 values, each 0 or 1 / 0.75.
    assert first.mean().item() == pytest.approx(1, abs=0.1)
    assert first[:, 0].unique().tolist() == pytest.approx([0, 4 / 3])


def test_autocast_regions_decide_the_type(device):
    *exact, _ = attention.inputs(2, 6, 6)
    q, k, v = (t.float().to(device) for t in exact)
    with torch.autocast(device, torch.bfloat16):
        out = ops.flash_attn_xla(q, k, v, alibi_slopes=SLOPES.float().to(device))
        whole = ops.flash_attn_xla(q.double(), k.double(), v.double())
    assert (out.dtype, whole.dtype) == (torch.bfloat16, torch.float64)
    expected, _ = attention.batched(*exact, slopes=SLOPES)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=2e-2)


def test_deterministic_takes_plain_products_where_kernels_are_not(device, monkeypatch):
    q, k, v = (t.float().to(device) for t in attention.inputs(1, 4, 4)[:3])
    expected = ops.flash_attn_xla(q, k, v, deterministic=True)
    asked = []
    real = F.scaled_dot_product_attention

    def noted(*arguments: Any, **options: Any) -> Tensor:
        asked.append(torch.backends.cuda.flash_sdp_enabled())
        return real(*arguments, **options)

    monkeypatch.setattr(attend, "on_host", lambda tensor: False)
    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    found = [ops.flash_attn_xla(q, k, v, deterministic=wanted) for wanted in (True, False)]
    assert asked == [False, True]
    for each in found:
        torch.testing.assert_close(each, expected, rtol=0, atol=1e-6)


# --- padded and packed sequences --------------------------------------------------------------

# Which elements of 7 are no padding: at the end, at the front, both, in between, nothing, all.
KEPT = [[0, 1, 2], [3, 4, 5, 6], [2, 3], [0, 2, 5], [], list(range(7))]
VARLEN = [
    {},
    {"causal": True},
    {"window_size": (1, 1)},
    {"causal": True, "slopes": SLOPES},
]


def mask_of(kept: list[list[int]], length: int) -> Tensor:
    mask = torch.zeros(len(kept), length, dtype=torch.int32)
    for i, columns in enumerate(kept):
        mask[i, columns] = 1
    return mask


@pytest.mark.parametrize("options", VARLEN, ids=["plain", "causal", "window", "slopes"])
def test_padded_sequences_are_those_without_their_padding(device, options):
    *exact, weights = attention.inputs(len(KEPT), 7, 7)
    exact = [t.requires_grad_() for t in exact]
    expected = attention.chosen(*exact, KEPT, KEPT, **options)

    def call(*tensors: Tensor) -> Any:
        arguments = flash_arguments(options, device)
        mask = mask_of(KEPT, 7).to(device)
        # Causal by the name for SPMD programs: it is the same function.
        name = "spmd_flash_attn_varlen_xla" if "causal" in options else "flash_attn_varlen_xla"
        return getattr(ops, name)(*tensors, mask, **arguments, return_attn_probs=True)

    compare(call, expected, tuple(exact), weights, device)
    if options == {}:
        compare(call, expected, tuple(exact), weights, device, torch.float16)


def test_the_last_query_has_the_place_of_the_last_key_that_is_no_padding(device):
    *exact, weights = attention.inputs(len(KEPT), 2, 7)
    exact = [t.requires_grad_() for t in exact]
    expected = attention.chosen(*exact, [[0, 1]] * len(KEPT), KEPT, causal=True)

    def call(*tensors: Tensor) -> Any:
        mask = mask_of(KEPT, 7).bool().to(device)
        return ops.flash_attn_varlen_xla(*tensors, mask, causal=True, return_attn_probs=True)

    compare(call, expected, tuple(exact), weights, device)


def test_packed_tensors_are_their_parts(device):
    *exact, weights = attention.inputs(len(KEPT), 7, 7, kept=4)
    exact = [t.requires_grad_() for t in exact]
    expected = attention.chosen(*exact, KEPT, KEPT, causal=True)

    def call(*tensors: Tensor) -> Any:
        return ops.flash_attn_varlen_qkvpacked_xla(
            torch.stack(tensors, 1),
            mask_of(KEPT, 7).to(device),
            causal=True,
            return_attn_probs=True,
        )

    compare(call, expected, tuple(exact), weights, device)


@pytest.mark.parametrize("options", VARLEN, ids=["plain", "causal", "window", "slopes"])
def test_packed_sequences_see_only_themselves(device, options):
    """Two rows of one tensor, each with its own sequences; TorchAcc takes one."""
    lengths = [[3, 1, 5], [4, 5]]
    *exact, weights = attention.inputs(2, 9, 9)
    exact = [t.requires_grad_() for t in exact]
    expected = torch.zeros_like(exact[0]), torch.zeros(2, 4, 9, dtype=torch.float64)
    for i, row in enumerate(lengths):
        start = 0
        for length in row:
            part = slice(start, start + length)
            out, lse = attention.one(*(t[i, part] for t in exact), **options)
            expected[0][i, part], expected[1][i, :, part] = out, lse
            start += length
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])

    def call(*tensors: Tensor) -> Any:
        return ops.flash_attn_varlen_position_ids_xla(
            *tensors,
            positions.to(device),
            **flash_arguments(options, device),
            return_attn_probs=True,
        )

    compare(call, expected, tuple(exact), weights, device)


def test_steps_with_other_lengths_are_one_plan_and_read_nothing(acc_only, recording, device):
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 48).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(3, 7, 16).to(device)
    losses = []

    def step(number: int) -> None:
        kept = [list(range(1 + (number + row) % 7)) for row in range(3)]
        begins = [0, 1 + number % 6]
        positions = torch.cat([torch.arange(begins[1]), torch.arange(7 - begins[1])])
        q, k, v = layer(x).view(3, 7, 3, 2, 8).unbind(2)
        padded = ops.flash_attn_varlen_xla(q, k, v, mask_of(kept, 7).to(device), causal=True)
        packed = ops.flash_attn_varlen_position_ids_xla(
            q, k, v, positions[None].to(device), window_size=(2, 2)
        )
        local = ops.flash_attn_xla(q, k, v, window_size=(2, 0), dropout_p=0.1)
        optimizer.zero_grad()
        loss = (padded + packed + local).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    for number in range(4):
        step(number)
    with helpers.counting() as counted:
        for number in range(4, 12):
            step(number)
    flushes = {name: counted[name] for name in counted.after if name.startswith("flush_")}
    assert {name: n for name, n in flushes.items() if n and "/" not in name} == {"flush_step": 8}
    assert counted["plans_built"] == 0 and not helpers.fallback_keys(counted.after).keys() - (
        helpers.fallback_keys(counted.before).keys()
    )
    assert len({round(loss.item(), 6) for loss in losses}) > 8, "the lengths had no effect"


# --- what is refused --------------------------------------------------------------------------

Q, K = torch.zeros(2, 5, 4, 8), torch.zeros(2, 5, 3, 8)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "three dimensions": (lambda: ops.flash_attn_xla(Q[0], Q[0], Q[0]), "[5, 4, 8]"),
    "heads": (lambda: ops.flash_attn_xla(Q, K, K), "4 heads of q and 3 of k and v"),
    "batch": (lambda: ops.flash_attn_xla(Q, Q[:1], Q[:1]), "k [1, 5, 4, 8]"),
    "keys without values": (lambda: ops.flash_attn_xla(Q, Q, Q[:, 1:]), "v [2, 4, 4, 8]"),
    "window": (lambda: ops.flash_attn_xla(Q, Q, Q, window_size=(3,)), "window_size = (3,)"),
    "negative window": (
        lambda: ops.flash_attn_xla(Q, Q, Q, window_size=(-2, 1)),
        "window_size = (-2, 1)",
    ),
    "slopes": (
        lambda: ops.flash_attn_xla(Q, Q, Q, alibi_slopes=torch.zeros(3)),
        "alibi_slopes has the shape [3]: should be [heads] or [batch, heads], here [4] or [2, 4]",
    ),
    "dropout": (lambda: ops.flash_attn_xla(Q, Q, Q, dropout_p=1.0), "dropout_p = 1.0"),
    "mask": (
        lambda: ops.flash_attn_varlen_xla(Q, Q, Q, torch.ones(2, 4)),
        "attention_mask has the shape [2, 4]: should be [2, 5]",
    ),
    "cumulated lengths": (
        lambda: ops.flash_attn_varlen_xla(Q, Q, Q, torch.tensor([0, 5, 10])),
        "Cumulated lengths (cu_seqlens) are of TorchAcc's earlier versions",
    ),
    "positions": (
        lambda: ops.flash_attn_varlen_position_ids_xla(Q, Q, Q, torch.zeros(2, 4)),
        "position_ids has the shape [2, 4]: should be [2, 5]",
    ),
    "positions of other keys": (
        lambda: ops.flash_attn_varlen_position_ids_xla(Q, Q[:, 1:], Q[:, 1:], torch.zeros(2, 5)),
        "5 queries and 4 keys",
    ),
    "packed elsewhere": (
        lambda: ops.flash_attn_varlen_qkvpacked_xla(torch.zeros(2, 5, 3, 4, 8), torch.ones(2, 5)),
        "qkv has the shape [2, 5, 3, 4, 8]: should be [batch, 3, seqlen, heads, headdim]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_named(case):
    call, text = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(text)):
        call()


def test_partitions_of_an_spmd_program_are_not_available():
    mask = torch.ones(2, 5)
    with pytest.raises(NotImplementedError, match=r"partition_spec = \('fsdp', None\)"):
        ops.spmd_flash_attn_varlen_xla(Q, Q, Q, mask, partition_spec=("fsdp", None))


def test_a_name_that_there_is_not():
    with pytest.raises(AttributeError, match="no attribute 'flash_attn'"):
        ops.flash_attn
    assert set(ops.__all__) <= set(dir(ops))
    assert all(getattr(ops, name) is not None for name in ops.__all__)


def test_the_package_is_imported_name_by_name(acc_only):
    helpers.run_python(
        "import sys, torchacc\n"
        "assert not [name for name in sys.modules if name.startswith('torchacc.ops.')]\n"
        "torchacc.ops.flash_attn_xla\n"
        "assert 'torchacc.ops.context_parallel' not in sys.modules\n"
        "torchacc.ops.context_parallel.ulysses\n"
    )


# --- switches and Liger -----------------------------------------------------------------------


@pytest.fixture
def forget_said() -> Iterator[None]:
    logger.forget_said_for_testing()
    yield
    logger.forget_said_for_testing()


def test_the_switch_for_attention_is_accepted_and_replaces_nothing(device, caplog, forget_said):
    config = torchacc.Config()
    config.compute.acc_scaled_dot_attn = True
    before = F.scaled_dot_product_attention
    with caplog.at_level("INFO", logger="TorchAcc"):
        for _ in range(2):
            torchacc.accelerate(torch.nn.Linear(2, 2), config=config)
    assert F.scaled_dot_product_attention is before
    assert caplog.text.count("scaled_dot_product_attention stays in place") == 1


def test_liger_s_names_say_once_that_fusion_does_it(caplog, forget_said):
    with caplog.at_level("INFO", logger="TorchAcc"):
        ops.apply_liger_kernel()
        ops.apply_liger_kernel_to_llama(cross_entropy=True, fused_linear_cross_entropy=False)
    assert caplog.text.count("no module is patched") == 1
    for apply in (ops.apply_liger_kernel_to_llama, ops.apply_liger_kernel_to_qwen2):
        with pytest.raises(AssertionError, match=f"{apply.__name__}.* cannot both be True"):
            apply(cross_entropy=True)


# --- blocks of a ring -------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_blocks_put_together_are_the_whole(device, monkeypatch, fused):
    """By the fused kernel of hosts, and by the plain products that stand in for it elsewhere."""
    monkeypatch.setattr(blocks, "on_host", lambda tensor: fused)
    *exact, weights = attention.inputs(2, 6, 6, kept=4)
    exact = [t.requires_grad_() for t in exact]
    expected, lse_expected = attention.batched(*exact, causal=True)
    wanted = attention.gradients(expected, weights, *exact)
    q, k, v, grad = (t.detach().float().to(device).transpose(1, 2) for t in (*exact, weights))
    parts = [slice(0, 3), slice(3, 6)]
    q = q[:, :, parts[1]]
    unseen = torch.full((3, 3), blocks.UNSEEN).triu(1).to(device).view(1, 1, 3, 3)
    kinds = {
        "triangle": blocks.Block(None, True, 8**-0.5),
        "bias": blocks.Block(unseen, False, 8**-0.5),
    }
    for own in kinds.values():
        ways = [blocks.Block(None, False, 8**-0.5), own]
        found = [
            blocks.forward(q, k[:, :, part], v[:, :, part], way)
            for part, way in zip(parts, ways, strict=True)
        ]
        out, lse = blocks.joined(*found[0], *found[1])
        torch.testing.assert_close(
            out.transpose(1, 2).cpu().double(), expected[:, 3:], rtol=0, atol=1e-5
        )
        torch.testing.assert_close(lse.cpu().double(), lse_expected[:, :, 3:], rtol=0, atol=1e-5)
        part_grads = [
            blocks.backward(grad[:, :, 3:], q, k[:, :, part], v[:, :, part], out, lse, way)
            for part, way in zip(parts, ways, strict=True)
        ]
        grad_q = sum(grads[0] for grads in part_grads)
        torch.testing.assert_close(
            grad_q.transpose(1, 2).cpu().double(), wanted[0][:, 3:], rtol=0, atol=1e-5
        )
        # Only the last three queries are here: the others' share is taken out of what is wanted.
        others = attention.gradients(expected[:, :3], weights[:, :3], *exact)
        for index in (1, 2):
            made = torch.cat([grads[index] for grads in part_grads], 2).transpose(1, 2)
            torch.testing.assert_close(
                made.cpu().double(), wanted[index] - others[index], rtol=0, atol=1e-5
            )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_and_its_gradients_are_those_of_a_mask(device):
    """torch refuses devices that it does not know, on the CPU gradients too."""
    from torch.nn.attention import flex_attention as flex

    generator = torch.Generator().manual_seed(3)
    given = [torch.randn(2, 2, 16, 8, generator=generator) for _ in range(3)]
    places = torch.arange(16)
    bias = (places[:, None] - places) * 0.1
    mask = torch.where(places[:, None] >= places, bias, -torch.inf)

    def run(where: str, attend: Callable[..., Tensor]) -> list[Tensor]:
        q, k, v = (t.clone().to(where).requires_grad_() for t in given)
        y = attend(q, k, v)
        y.square().sum().backward()
        return [t.cpu() for t in (y.detach(), q.grad, k.grad, v.grad)]

    def flexible(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks = flex.create_block_mask(
            lambda b, h, i, j: i >= j, None, None, 16, 16, device=device, BLOCK_SIZE=16
        )
        return flex.flex_attention(q, k, v, lambda s, b, h, i, j: s + (i - j) * 0.1, blocks)

    expected = run("cpu", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask))
    torch.testing.assert_close(run(device, flexible), expected, rtol=1e-5, atol=1e-5)


def test_flex_attention_takes_acc_whenever_it_is_imported(acc_only):
    code = """
import sys
from torchacc_device import _patches
name = "torch.nn.attention.flex_attention"
if {before}:
    _patches.undo()
    assert name not in sys.modules
    from torch.nn.attention import flex_attention as flex
    _patches.apply()
else:
    assert name not in sys.modules
    from torch.nn.attention import flex_attention as flex
assert flex._validate_device.__name__ == "_validate_device"
x = torch.ones(2, device=DEVICE)
flex._validate_device(x, x, x)
del sys.modules[name]
import importlib
again = importlib.import_module(name)
assert again is not flex
again._validate_device(x, x, x)
flex = again
_patches.undo()
try:
    flex._validate_device(x, x, x)
except ValueError:
    print("refused")
"""
    for before in (True, False):
        assert helpers.run_python(code.format(before=before)).stdout == "refused\n"
