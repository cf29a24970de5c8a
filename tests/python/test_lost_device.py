"""A device that is lost while nobody looks: whoever waits for it, or reads, is told what to do.

On a GPU work that goes wrong is submitted well, and CUDA tells of it later. Here waits fail as they
do then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only")

ILLEGAL_ADDRESS = 700
MAP_FAILED = 205  # after which a GPU goes on


@pytest.fixture
def lose() -> Iterator[Callable[[int], None]]:
    if helpers.extension().executor_name() != "host":
        pytest.skip("a GPU is lost in test_captured_on_cuda.py")
    yield helpers.extension().fail_waits
    helpers.extension().fail_waits(0)


def _event() -> torch.acc.Event:
    event = torch.acc.Event(enable_timing=True)
    event.record()
    return event


def _steps() -> None:
    """More than may be in flight."""
    for _ in range(8):
        torch.ones(2, device="acc").add_(1)
        helpers.mark_step()


def _collective(x: torch.Tensor) -> Callable[[], bool]:
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("acc", store=store, rank=0, world_size=1)
    return torch.distributed.all_reduce(x.clone(), async_op=True).is_completed


READS: dict[str, Callable[[torch.Tensor], Callable[[], object]]] = {
    "cpu": lambda x: x.cpu,
    "item": lambda x: x[0, 0].item,
    "synchronize": lambda x: torch.acc.synchronize,
    "stream.synchronize": lambda x: torch.acc.Stream().synchronize,
    "stream.query": lambda x: torch.acc.Stream().query,
    "event.synchronize": lambda x: _event().synchronize,
    "event.query": lambda x: _event().query,
    "event.elapsed_time": lambda x: partial(_event().elapsed_time, _event()),
    "the end of a step": lambda x: _steps,
    "a copy from the host": lambda x: partial(torch.ones(3).to, "acc"),
    "is_completed": _collective,
    "an operator that reads": lambda x: x.nonzero,
}


@pytest.mark.parametrize("name", READS)
def test_who_waits_hears_what_to_do(lose, device, name) -> None:
    x = helpers.drawn(4, 4, device=device)
    wait = READS[name](x)
    made = x * 2
    helpers.flush()
    lose(ILLEGAL_ADDRESS)
    with pytest.raises(torch.AcceleratorError) as raised:
        wait()
    assert raised.value.error_code == ILLEGAL_ADDRESS
    message = str(raised.value)
    assert message.count("of no more use to this process") == 1
    assert f"when acc:{x.device.index} was waited for" in message
    if not helpers.runs_at_once() and name != "the end of a step":
        place = re.search(r"Submitted last: \d+ operators, first recorded at (\S+):\d+", message)
        assert place is not None and place[1].endswith("test_lost_device.py"), message
    lose(0)
    assert torch.equal(made.cpu(), 2 * x.cpu())


def test_other_errors_are_left_alone(lose, device) -> None:
    x = torch.ones(2, device=device)
    helpers.flush()
    lose(MAP_FAILED)
    with pytest.raises(torch.AcceleratorError) as raised:
        x.cpu()
    assert raised.value.error_code == MAP_FAILED
    assert "was waited for" not in str(raised.value)
