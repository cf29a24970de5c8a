"""Gradients travel while the backward goes on, and `torchacc.report` says how much of the time."""

from __future__ import annotations

import statistics

import pytest

import torchacc
from tests.distributed.ranks import GROUP, LEAVE, run_ranks

pytestmark = pytest.mark.usefixtures("acc_only", "recording")

STEPS, FIRST = 12, 4  # the first steps, whose kernels are compiled, are left out
TRAIN = """
import torchacc
from torch.nn.functional import cross_entropy
from benchmarks.models import Gpt
torch.manual_seed(0)
tokens = torch.randint(64, (4, 97), generator=torch.Generator().manual_seed(RANK))
config = torchacc.Config()
config.dist.comm.fusion_threshold = OPTIONS
model = torchacc.accelerate(Gpt(4, 4, 192, 96, 64), config=config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, targets = tokens[:, :-1].to(model.device), tokens[:, 1:].to(model.device)
shares, exchanges = [], []
for _ in range(STEPS):
    before = torchacc.report()
    optimizer.zero_grad()
    cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
    optimizer.step()
    step = torchacc.report(since=before)
    shares.append(step.overlap())
    exchanges.append(step.counters["transfers"])
report(shares=shares, exchanges=exchanges, text=str(step))
"""


def train(bucket: int, **env: str) -> list[dict]:
    code = TRAIN.replace("OPTIONS", str(bucket)).replace("STEPS", str(STEPS))
    return [each.reports for each in run_ranks(code, 2, **env)]


def test_buckets_travel_while_the_backward_goes_on(device):
    """Shares of time, not times: a busy machine makes both the exchange and the backward long."""
    for found in train(1 << 20):
        assert min(found["exchanges"][FIRST:]) >= 6, "several buckets in a step"
        assert statistics.median(found["shares"][FIRST:]) >= 0.5, found["shares"]
        assert "exchanges with other processes" in found["text"]
        assert "under computation" in found["text"]


CONVOLUTIONS = """
from benchmarks.models import resnet18
torch.manual_seed(0)
generator = torch.Generator().manual_seed(RANK)
images = torch.randn(4, 3, 32, 32, generator=generator).to(device)
classes = torch.randint(10, (4,), generator=generator).to(device)
model = DistributedDataParallel(resnet18(True).to(device), bucket_cap_mb=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
shares, exchanges = [], []
for _ in range(STEPS):
    before = torchacc.report()
    optimizer.zero_grad()
    cross_entropy(model(images), classes).backward()
    optimizer.step()
    step = torchacc.report(since=before)
    shares.append(step.overlap())
    exchanges.append(step.counters["transfers"])
report(shares=shares, exchanges=exchanges)
"""


def test_buckets_of_a_residual_network_travel_while_the_backward_goes_on(device):
    """The benchmark's resnet18_cifar with smaller batches, in DistributedDataParallel itself."""
    imports = (
        "import torchacc\nfrom torch.nn.functional import cross_entropy\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
    )
    code = imports + GROUP + CONVOLUTIONS.replace("STEPS", str(STEPS)) + LEAVE
    for found in (each.reports for each in run_ranks(code, 2)):
        assert min(found["exchanges"][FIRST:]) >= 6, "several buckets in a step"
        assert statistics.median(found["shares"][FIRST:]) >= 0.5, found["shares"]


def test_without_the_pass_nothing_is_overlapped(device):
    """The same counters, where every exchange is over before the next operator."""
    for found in train(1 << 20, ACC_SKIP_PASSES="transfers"):
        assert statistics.median(found["shares"][FIRST:]) <= 0.1, found["shares"]


def test_a_step_without_exchanges_says_nothing_of_them(device):
    found = torchacc.report(since=torchacc.report())
    assert found.overlap() is None
    assert "exchanges" not in str(found)


def test_stages_of_a_bucket_wait_while_the_backward_goes_on(device):
    """Between machines of two processes; a stage is recorded when the next bucket is complete."""
    code = TRAIN.replace("OPTIONS", str(1 << 20)).replace("STEPS", str(STEPS))
    code = code.replace(
        "model = ",
        "config.dist.comm.hierarchical = True\nconfig.dist.comm.intra_size = 2\nmodel = ",
    )
    for found in (each.reports for each in run_ranks(code, 4)):
        assert min(found["exchanges"][FIRST:]) >= 18, "three stages of several buckets in a step"
        assert statistics.median(found["shares"][FIRST:]) >= 0.5, found["shares"]


BRINGS_NOTHING = """
from torchacc_device import _C
sent = torch.zeros(1 << 18, device=device)
other = torch.ones(1 << 14, device=device)
found = []
for i in range(4):
    sent.fill_(10.0 * RANK + i + 1)
    parts = [torch.empty_like(sent) for _ in range(2)] if RANK == 0 else None
    scaled = other * 2
    summed = scaled * 3
    dist.all_reduce(summed)
    dist.gather(sent, parts, dst=0)
    sent.zero_()
    beside = scaled + 1
    _C.mark_step()
    values = [part.unique().tolist() for part in parts or []]
    found.append([*values, beside.unique().tolist(), summed.unique().tolist()])
report(found=found)
"""


def test_what_brings_nothing_here_is_waited_for_behind_its_begin(device):
    """A gather to another process: its wait has no byte in common with its begin, but fusion
    brings what stands on both sides of them together."""
    here, there = run_ranks(GROUP + BRINGS_NOTHING + LEAVE, 2)
    rest = [[3.0], [12.0]]
    assert here.reports["found"] == [[[i + 1.0], [i + 11.0], *rest] for i in range(4)]
    assert there.reports["found"] == [rest] * 4
