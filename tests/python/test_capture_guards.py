"""What a replay would do wrong unseen: it follows what changed, or says what it cannot follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchacc
from tests.python.captured import ACC
from torchacc_device import _C

pytestmark = [
    pytest.mark.usefixtures("acc_only"),
    pytest.mark.skipif(_C.mode() in ("eager", "nofuse"), reason="nothing is recorded as a whole"),
]


def refused(fn: Callable[..., Any], *args: Any, match: str) -> None:
    step = torchacc.capture(fn)
    step(*args)
    step(*args)
    with pytest.raises(RuntimeError, match=match):
        step(*args)


# --- random numbers -------------------------------------------------------------------------------


def normal(x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.empty_like(x).normal_(0, n)


def uniform(x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.empty_like(x).uniform_(0, n)


def dropout(x: torch.Tensor, n: int) -> torch.Tensor:
    return F.dropout(x, n / 8)


@pytest.mark.parametrize("draw", [normal, uniform, dropout])
def test_numbers_of_draws_that_change(draw: Callable[..., torch.Tensor]) -> None:
    """Where a random operator draws may differ, and nothing else of it."""
    calls = [0]

    def fn(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return draw(x, calls[0])

    x = torch.ones(8, device=ACC)
    refused(
        fn, x, match=rf"in {draw.__name__}.*the number '.*' was .* in call 2 and is .* in call 3"
    )


def forked(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng([0], device_type=ACC):
        torch.manual_seed(7)
        return x + torch.rand_like(x)


def forked_unseeded(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng([0], device_type=ACC):
        return x + torch.rand_like(x)


def put_back(x: torch.Tensor) -> torch.Tensor:
    first = torch.rand_like(x)
    state = torch.acc.get_rng_state()
    torch.manual_seed(7)
    second = torch.rand_like(x)
    torch.acc.set_rng_state(state)
    return first + second * torch.rand_like(x)


def seeded(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    return x + torch.rand_like(x)


def seeded_last(x: torch.Tensor) -> torch.Tensor:
    noise = torch.rand_like(x)
    torch.manual_seed(7)
    return x + noise


def seeded_only(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    return x + 1


def own_generator(x: torch.Tensor) -> torch.Tensor:
    own = torch.Generator(ACC)
    other = torch.Generator(ACC).manual_seed(3)
    return x + torch.rand(16, device=ACC, generator=own) * torch.rand(
        16, device=ACC, generator=other
    )


@pytest.mark.parametrize("first", [0, 4], ids=["from the first call", "between replays"])
@pytest.mark.parametrize(
    "fn", [forked, forked_unseeded, put_back, seeded, seeded_last, seeded_only, own_generator]
)
def test_generators_that_the_function_sets(fn: Callable[..., torch.Tensor], first: int) -> None:
    """Other draws of the program come from where they would have."""

    def draws(step: Callable[..., torch.Tensor]) -> list[list[float]]:
        torch.manual_seed(5)
        x = torch.ones(16, device=ACC)
        found = []
        for i in range(8):
            found.append(step(x).tolist())
            if i >= first:
                found.append(torch.rand(3, device=ACC).tolist())
        return found

    assert draws(fn) == draws(torchacc.capture(fn))


def test_generators_that_are_seeded_otherwise_each_time() -> None:
    calls = [0]

    def fn(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        torch.manual_seed(calls[0])
        return x + 1

    refused(fn, torch.ones(2, device=ACC), match=r"ended call 2 at seed 2.* and call 3 at seed 3")
