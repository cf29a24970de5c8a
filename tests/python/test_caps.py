"""What nobody asks for is submitted when there is too much of it."""

from __future__ import annotations

import pytest

from tests.helpers import run_python

pytestmark = pytest.mark.usefixtures("acc_only", "recording")


def test_too_many_operators_are_submitted() -> None:
    """A loop that reads nothing does not record for ever."""
    run_python(
        """
from torchacc_device import _C
x = torch.zeros(3, device=DEVICE)
for _ in range(100):
    x.add_(1)
    assert _C.pending(0) <= 16
assert _C.stats()["flush_cap"] >= 5, _C.stats()
assert x.tolist() == [100.0] * 3
""",
        ACC_MAX_PENDING="16",
    )


def test_memory_that_only_pending_work_holds_is_given_back() -> None:
    """Batches that the script has let go of do not pile up behind operators nobody reads."""
    run_python(
        """
from torchacc_device import _C
total = torch.zeros((), device=DEVICE)
for i in range(40):
    batch = torch.full((1 << 18,), float(i)).to(DEVICE)  # 1 MiB
    total += batch[::1024].sum()
    del batch
stats = _C.stats()
# Every fourth batch fills the 4 MiB; one more may be on its way.
assert 8 <= stats["flush_cap"] <= 10, stats
assert total.item() == 256 * sum(range(40))
""",
        ACC_MAX_PENDING_MB="4",
    )


def test_memory_that_the_script_holds_too_is_no_reason_to_submit() -> None:
    """Large parameters that pending work reads are not counted, however often they are used."""
    run_python(
        """
from torchacc_device import _C
weight = torch.ones(1 << 21).to(DEVICE)  # 8 MiB
outs = [weight[i] * 2 for i in range(50)]
assert _C.stats()["flush_cap"] == 0, _C.stats()
assert [out.item() for out in outs] == [2.0] * 50
""",
        ACC_MAX_PENDING_MB="4",
    )


@pytest.mark.parametrize(("inflight", "waits"), [("0", 10), ("1", 9), ("64", 0)])
def test_a_step_waits_for_the_one_so_many_before_it(inflight: str, waits: int) -> None:
    """Back-pressure counts steps, not reads, and a boundary with nothing pending is none."""
    run_python(
        f"""
from torchacc_device import _C
x = torch.zeros(3, device=DEVICE)
for i in range(10):
    x.add_(1)
    _C.mark_step()
    _C.mark_step()
    assert x[0].item() == i + 1
assert _C.stats()["step_waits"] == {waits}, _C.stats()
""",
        ACC_MAX_INFLIGHT=inflight,
    )


@pytest.mark.usefixtures("capturing")
def test_what_captured_work_holds_is_not_pending() -> None:
    """Gradients that a capture writes again in each step, and that `zero_grad` lets go of."""
    run_python(
        """
from torchacc_device import _C
model = torch.nn.Linear(1024, 1024).to(DEVICE)  # 4 MiB of gradients
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.ones(8, 1024, device=DEVICE)
for _ in range(12):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
stats = _C.stats()
assert stats["flush_cap"] == 0 and stats["captures_submitted"] > 0, stats
""",
        ACC_HOST_GRAPHS="1",
        ACC_DETERMINISTIC="1",
        ACC_MAX_PENDING_MB="1",
    )
