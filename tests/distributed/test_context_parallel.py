"""`torchacc.ops.context_parallel`: sequences that are split are attended to as whole ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torchacc
from tests import attention
from tests.distributed.ranks import run_ranks
from tests.distributed.test_mesh import fake_world, leave_world
from torchacc.ops import context_parallel as cp
from torchacc.ops.context_parallel import blocks

pytestmark = pytest.mark.usefixtures("acc_only")

BEGIN = """
import copy
import torchacc
from tests import attention, helpers
from tests.distributed import sequences
from torchacc.ops import context_parallel as cp
torchacc.dist.init_process_group()
device = torchacc.lazy_device()
# No kernels are compiled for what is done once.
helpers.extension().skip_passes(helpers.BIT_BY_BIT)
"""


def test_groups_are_those_of_the_mesh_and_of_the_present_processes(device):
    """c10d's fake group: which ranks, in which order, wherever the topology puts them."""
    getters = (
        cp.get_context_parallel_group,
        cp.get_inter_cp_process_group,
        cp.get_intra_cp_process_group,
    )
    try:
        fake_world(5, 16)
        config = torchacc.Config()
        config.dist.sp.size = 8
        config.dist.topology = ["sp", "dp", "fsdp", "pp", "tp"]
        mesh = config.get_mesh()
        cp.initialize_context_parallel(8, 2)
        found = [dist.get_process_group_ranks(get()) for get in getters]
        assert found == [[1, 3, 5, 7, 9, 11, 13, 15], [1, 5, 9, 13], [5, 7]]
        assert cp.get_context_parallel_group() is mesh.get_sp_proc_group()
        fake_world(5, 8)
        with pytest.raises(RuntimeError, match="no groups yet"):
            cp.get_context_parallel_group()
        cp.initialize_context_parallel(4, 1)
        found = [dist.get_process_group_ranks(get()) for get in getters]
        assert found == [[4, 5, 6, 7], [4, 5, 6, 7], [5]]
        config = torchacc.Config()
        config.dist.sp.size = 4
        assert config.get_mesh().get_sp_proc_group() is cp.get_context_parallel_group()
    finally:
        leave_world()
    with pytest.raises(RuntimeError, match="there is no process group"):
        cp.initialize_context_parallel(1)


def test_a_ring_computes_in_float32_what_autocast_has_cast(device, monkeypatch):
    """By plain products, which a region would cast once more, in forward and in backward."""
    monkeypatch.setattr(blocks, "on_host", lambda tensor: False)
    *whole, weights = (t.float().to(device) for t in attention.inputs(2, 8, 8))

    def found(region: bool, dtype: torch.dtype) -> list[Tensor]:
        tensors = [t.to(dtype).requires_grad_() for t in whole]
        with torch.autocast(device, torch.bfloat16, enabled=region):
            out = cp.ring_attention(*tensors, causal=True)
            return [out, *attention.gradients(out, weights, *tensors)]

    try:
        fake_world(0, 1)
        for a, b in zip(found(True, torch.float32), found(False, torch.bfloat16), strict=True):
            assert torch.equal(a.bfloat16().cpu(), b.cpu())
    finally:
        leave_world()


TWO = (
    BEGIN
    + """
report(early=refused(cp.get_context_parallel_group))
report(sizes=[refused(lambda: cp.initialize_context_parallel(3)),
              refused(lambda: cp.initialize_context_parallel(2, 3))])
config = torchacc.Config()
config.dist.sp.size = 2
mesh = config.get_mesh()
report(other=refused(lambda: cp.initialize_context_parallel(1)))
cp.initialize_context_parallel(2)
group = cp.get_context_parallel_group()
report(same=group is mesh.get_sp_proc_group() and group is cp.get_intra_cp_process_group(),
       alone=dist.get_process_group_ranks(cp.get_inter_cp_process_group()),
       again=refused(lambda: cp.initialize_context_parallel(2)))

ways = {
    "ulysses": lambda *t, **options: cp.ulysses(*t, **options, process_group=group),
    "ring": lambda *t, **options: cp.ring_attention(*t, **options, process_group=group),
}
report(wrong=sequences.like_one_process(ways, group, device))

# Sequences behind each other, and places that only a whole sequence has.
*exact, weights = attention.inputs(2, 8, 8)
exact = [t.requires_grad_() for t in exact]
parts = [slice(0, 3), slice(3, 8)]
positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
expected = torch.cat([attention.batched(*(t[:, part] for t in exact), causal=True)[0]
                      for part in parts], 1)
report(packed=sequences.attempt(
    lambda *t: cp.ulysses(*t, causal=True, position_ids=positions.to(device), process_group=group),
    group, device, exact, weights, expected))
def turned(q, k, v):
    places = torch.arange(q.shape[1], device=q.device).view(1, -1, 1, 1) / 8
    return q * places.to(q.dtype).cos(), k * places.to(q.dtype).sin(), v
expected, _ = attention.batched(*turned(*exact))
report(rope=sequences.attempt(
    lambda *t: cp.ulysses(*t, rope_func=turned, process_group=group),
    group, device, exact, weights, expected))

# Gradients of splits and gathers along any dimension, and their scales.
scales = {}
for name, function in {"split": cp.split_forward_gather_backward,
                       "gather": cp.gather_forward_split_backward}.items():
    for scale in (None, "up", "down"):
        x = torch.arange(8.0).view(2, 4).add(10 * RANK * (name == "gather")).to(device)
        x.requires_grad_()
        y = function(x, -1, group, scale)
        (y * torch.arange(1.0, 1 + y.numel(), device=device).view_as(y)).sum().backward()
        scales[f"{name} {scale}"] = [y.tolist(), x.grad.tolist()]
report(scales=scales)

q = torch.zeros(2, 4, 3, 8, device=device)
lens = torch.tensor([4])
report(
    heads=refused(lambda: cp.ulysses(q, q, q, process_group=group)),
    odd=refused(lambda: cp.split_forward_gather_backward(q, 2, group)),
    word=refused(lambda: cp.gather_forward_split_backward(q, 1, group, "left")),
    dim=refused(lambda: cp.gather_forward_split_backward(q, 4, group)),
    dropout=refused(lambda: cp.ring_attention(q, q, q, dropout_p=0.1, process_group=group)),
    lens=refused(lambda: cp.ring_attention(q, q, q, k_lens=lens, process_group=group)),
    both=refused(lambda: cp.ulysses(q[:, :, :2], q[:, :, :2], q[:, :, :2], k_lens=lens,
                                    position_ids=positions.to(device), process_group=group)),
    groups=refused(lambda: cp.context_parallel_2d(
        q, q, q, intra_process_group=cp.get_inter_cp_process_group())),
)

# Data parallel training takes the mean over those who share a sequence; the scales allow for that.
torch.manual_seed(0)
alone = sequences.Net()
together = torchacc.accelerate(copy.deepcopy(alone), config=config)
report(net=[sequences.trained(alone, "cpu"), sequences.trained(together, device, group)])

# A training step is one plan, exchanges included; other lengths are not another.
def train(attend, steps):
    helpers.extension().skip_passes("")
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 48).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(2, 4, 16).to(device)
    counts, losses = {}, []
    for number in range(steps):
        with helpers.counting() as counted:
            q, k, v = layer(x).view(2, 4, 3, 2, 8).unbind(2)
            lens = torch.tensor([8, 1 + number % 7]).to(device)
            optimizer.zero_grad()
            loss = attend(q, k, v, lens, lens, causal=True, process_group=group).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        if number >= 4:
            for name in counted.after:
                if name.startswith("flush_") and "/" not in name or name == "plans_built":
                    counts[name] = counts.get(name, 0) + counted[name]
    return {name: count for name, count in counts.items() if count}, torch.stack(losses).tolist()
(report_u, losses_u), (report_r, losses_r) = train(cp.ulysses, 8), train(cp.ring_attention, 8)
report(plans=[report_u, report_r], losses=[losses_u, losses_r])
"""
)


def test_sequences_in_two_processes(device):
    done = [each.reports for each in run_ranks(TWO, 2)]
    for rank, found in enumerate(done):
        assert found["wrong"] == {} and found["packed"] is None and found["rope"] is None
        assert found["same"] and found["alone"] == [rank]
        assert found["plans"] == [{"flush_step": 4}] * 2
        first, second = found["losses"]
        assert first == pytest.approx(second, rel=1e-4) and len(set(first)) == len(first)
        one, several = found["net"]
        assert one.keys() == several.keys()
        for name, values in one.items():
            assert several[name] == pytest.approx(values, abs=1e-5), name
        refusals(found)
        scales(rank, found["scales"])


def refusals(found: dict) -> None:
    assert "no groups yet" in found["early"]
    assert "context_parallel_size = 3: should divide" in found["sizes"][0]
    assert "intra_parallel_size = 3: should divide" in found["sizes"][1]
    assert "config.dist.sp.size = 2" in found["other"]
    assert found["again"].startswith("AssertionError") and "called before" in found["again"]
    assert "3 heads of q, 3 of k and v, and 2 processes" in found["heads"]
    assert "3 elements along dimension 2 and 2 processes" in found["odd"]
    assert "grad_scale = 'left'" in found["word"] and "seq_dim = 4" in found["dim"]
    assert found["dropout"].startswith("NotImplementedError") and "0.1" in found["dropout"]
    assert "k_lens has the shape [1]: should be [2]" in found["lens"]
    assert "give one of the two" in found["both"]
    assert "at least one should be of several" in found["groups"]


def scales(rank: int, found: dict) -> None:
    rows = [[0.0, 1, 2, 3], [4, 5, 6, 7]]
    part = [row[2 * rank : 2 * rank + 2] for row in rows]
    assert found["split None"] == [part, [[1, 2, 1, 2], [3, 4, 3, 4]]]
    assert found["split up"][1] == [[2, 4, 2, 4], [6, 8, 6, 8]]
    assert found["split down"][1] == [[0.5, 1, 0.5, 1], [1.5, 2, 1.5, 2]]
    both = [row + [x + 10 for x in row] for row in rows]
    weights = [[1.0, 2, 3, 4], [9, 10, 11, 12]] if rank == 0 else [[5.0, 6, 7, 8], [13, 14, 15, 16]]
    assert found["gather None"] == [both, weights]
    assert found["gather up"][1] == [[2 * x for x in row] for row in weights]
    assert found["gather down"][1] == [[x / 2 for x in row] for row in weights]


FOUR = (
    BEGIN
    + """
cp.initialize_context_parallel(4, 2)
groups = cp.get_context_parallel_group(), cp.get_inter_cp_process_group(), \\
    cp.get_intra_cp_process_group()
report(ranks=[dist.get_process_group_ranks(group) for group in groups])
def both(*t, **options):
    return cp.context_parallel_2d(*t, **options, inter_process_group=groups[1],
                                  intra_process_group=groups[2])
def outer(*t, **options):
    return cp.context_parallel_2d(*t, **options, inter_process_group=groups[0])
def inner(*t, **options):
    return cp.context_parallel_2d(*t, **options, intra_process_group=groups[0])
names = ("plain", "causal, more keys", "slopes of each sequence")
report(wrong=sequences.like_one_process({"2-D": both}, groups[0], device, names),
       alone=sequences.like_one_process({"ring": outer, "ulysses": inner}, groups[0], device,
                                        ("causal", "slopes"), padded=False))
"""
)


def test_sequences_in_two_dimensions(device):
    for rank, each in enumerate(run_ranks(FOUR, 4)):
        assert each.reports["wrong"] == {} and each.reports["alone"] == {}
        pair, place = rank // 2, rank % 2
        assert each.reports["ranks"] == [
            [0, 1, 2, 3],
            [place, place + 2],
            [2 * pair, 2 * pair + 1],
        ]
