"""Random generators: seeds, states, forks, and that they never wait for the device."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.helpers import extension

pytestmark = pytest.mark.usefixtures("acc_only")


@pytest.fixture(autouse=True)
def same_seed():
    torch.manual_seed(1234)


def draw(n: int = 8, generator: torch.Generator | None = None) -> list[float]:
    return torch.rand(n, device="acc", generator=generator).tolist()


def test_a_seed_repeats_the_stream() -> None:
    torch.manual_seed(7)
    first = draw() + draw()
    torch.manual_seed(7)
    assert draw() + draw() == first
    torch.manual_seed(8)
    assert draw() + draw() != first
    assert len(set(first)) == 16


def test_both_ways_of_seeding_agree() -> None:
    torch.manual_seed(5)
    first = draw()
    torch.acc.manual_seed(5)
    assert draw() == first
    torch.acc.manual_seed_all(5)
    assert draw() == first and torch.acc.initial_seed() == 5


def test_seeding_the_cpu_alone_leaves_acc() -> None:
    torch.acc.manual_seed(5)
    state = torch.acc.get_rng_state()
    torch.default_generator.manual_seed(99)
    assert torch.equal(torch.acc.get_rng_state(), state)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, -(2**63)])
def test_every_seed_that_torch_takes_is_taken(seed: int) -> None:
    torch.manual_seed(seed)
    assert torch.acc.initial_seed() == seed % 2**64
    torch.acc.manual_seed(seed)
    assert torch.acc.initial_seed() == seed % 2**64


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(RuntimeError, match="out of range"):
        torch.acc.manual_seed(seed)


def test_random_seeds_differ() -> None:
    seeds = set()
    for function in (torch.acc.seed, torch.acc.seed_all, torch.seed):
        function()
        seeds.add(torch.acc.initial_seed())
    assert len(seeds) == 3


def test_a_state_is_sixteen_bytes_and_restores() -> None:
    draw(3)
    state = torch.acc.get_rng_state()
    assert state.shape == (16,) and state.dtype == torch.uint8 and state.device.type == "cpu"
    assert int.from_bytes(bytes(state[:8].tolist()), "little") == 1234
    first = draw()
    assert not torch.equal(torch.acc.get_rng_state(), state)
    torch.acc.set_rng_state(state)
    assert draw() == first
    torch.acc.set_rng_state_all([state])
    assert draw() == first
    assert torch.equal(torch.acc.get_rng_state_all()[0], torch.acc.get_rng_state("acc:0"))


def test_a_seed_alone_is_a_state() -> None:
    generator = torch.Generator("acc")
    generator.set_state(torch.tensor([9, 0, 0, 0, 0, 0, 0, 0], dtype=torch.uint8))
    assert generator.initial_seed() == 9 and generator.get_offset() == 0


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        (torch.zeros(16), TypeError, "ByteTensor"),
        (torch.zeros(15, dtype=torch.uint8), RuntimeError, "15 bytes"),
        (torch.zeros(5056, dtype=torch.uint8), RuntimeError, "CPU's generator"),
        (torch.tensor([0] * 8 + [3] + [0] * 7, dtype=torch.uint8), RuntimeError, "multiple of 4"),
    ],
)
def test_a_wrong_state_is_refused(state: torch.Tensor, error: type, text: str) -> None:
    before = torch.acc.get_rng_state()
    with pytest.raises(error, match=text):
        torch.acc.set_rng_state(state)
    assert torch.equal(torch.acc.get_rng_state(), before)


@pytest.mark.usefixtures("recording")
def test_reading_and_setting_states_submits_nothing() -> None:
    """Checkpointing and fork_rng do it in the middle of a step."""
    extension().flush()
    x = torch.ones(2, device="acc")
    before = extension().pending(0)
    assert before > 0
    with torch.random.fork_rng(devices=[0], device_type="acc"):
        torch.acc.manual_seed(3)
    torch.acc.set_rng_state(torch.acc.get_rng_state())
    assert extension().pending(0) == before and x.tolist() == [1.0, 1.0]


def test_fork_rng_restores() -> None:
    state = torch.acc.get_rng_state()
    with torch.random.fork_rng(devices=[0], device_type="acc"):
        torch.manual_seed(1)
        draw()
    assert torch.equal(torch.acc.get_rng_state(), state)


def test_own_generators_are_independent() -> None:
    default = torch.acc.get_rng_state()
    a, b = torch.Generator("acc"), torch.Generator(device="acc:0")
    assert a.device == b.device == torch.device("acc:0")
    a.manual_seed(3)
    b.manual_seed(3)
    assert draw(generator=a) == draw(generator=b)
    b.manual_seed(4)
    assert draw(generator=a) != draw(generator=b)
    assert torch.equal(torch.acc.get_rng_state(), default)


def test_every_random_operator_takes_a_generator() -> None:
    def values(generator: torch.Generator) -> list[torch.Tensor]:
        x = torch.empty(64, device="acc")
        return [
            torch.randn(8, device="acc", generator=generator).cpu(),
            torch.randint(0, 100, (8,), device="acc", generator=generator).cpu(),
            torch.randperm(16, device="acc", generator=generator).cpu(),
            x.uniform_(generator=generator).cpu(),
            x.normal_(generator=generator).cpu(),
            x.bernoulli_(0.5, generator=generator).cpu(),
            x.exponential_(generator=generator).cpu(),
            torch.multinomial(torch.ones(8, device="acc"), 4, generator=generator).cpu(),
        ]

    first = values(torch.Generator("acc").manual_seed(11))
    second = values(torch.Generator("acc").manual_seed(11))
    other = values(torch.Generator("acc").manual_seed(12))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert sum(not torch.equal(a, b) for a, b in zip(first, other, strict=True)) >= 6


def test_a_generator_of_the_cpu_is_refused() -> None:
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(2, device="acc", generator=torch.Generator("cpu")).cpu()


def test_draws_move_the_offset_by_fours() -> None:
    generator = torch.Generator("acc").manual_seed(0)
    assert generator.get_offset() == 0
    draw(1, generator)
    first = generator.get_offset()
    assert first > 0 and first % 4 == 0
    generator.set_offset(first + 4)
    assert generator.get_offset() == first + 4
    with pytest.raises(RuntimeError, match="multiple of 4"):
        generator.set_offset(2)
    torch.acc._set_rng_state_offset(8)
    assert torch.acc._get_rng_state_offset() == 8


def test_draws_do_not_overlap() -> None:
    generator = torch.Generator("acc").manual_seed(0)
    numbers = [value for n in (1, 5, 64, 3, 1000) for value in draw(n, generator)]
    assert len(set(numbers)) > 0.99 * len(numbers)


def test_clones_go_their_own_way() -> None:
    generator = torch.Generator("acc").manual_seed(2)
    draw(4, generator)
    clone = generator.clone_state()
    assert draw(4, generator) == draw(4, clone)
    draw(4, generator)
    assert generator.get_offset() != clone.get_offset()


def test_graphsafe_states_are_shared() -> None:
    generator = torch.Generator("acc").manual_seed(2)
    shared = generator.graphsafe_get_state()
    draw(4, generator)
    assert shared.get_offset() == generator.get_offset() > 0
    other = torch.Generator("acc").manual_seed(9)
    other.graphsafe_set_state(shared)
    assert other.initial_seed() == 2
    with pytest.raises(RuntimeError, match="another device"):
        generator.graphsafe_set_state(torch.Generator("cpu"))


def test_default_generators_are_those_in_use() -> None:
    generators = torch.acc.default_generators
    assert len(generators) == torch.acc.device_count()
    generators[0].manual_seed(77)
    assert torch.acc.initial_seed() == 77
    assert torch.equal(generators[0].get_state(), torch.acc.get_rng_state())


def test_generators_pickle_with_their_state() -> None:
    generator = torch.Generator("acc").manual_seed(5)
    draw(4, generator)
    twin = copy.deepcopy(generator)
    assert twin.device == generator.device
    assert draw(4, twin) == draw(4, generator)


def test_dropout_repeats_under_checkpoint() -> None:
    """Checkpointing draws again what the forward pass drew."""
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(256, device="acc", requires_grad=True)
    y = checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5) * t, x, use_reentrant=False)
    y.sum().backward()
    # y = mask * x * x, so that the gradient is twice the mask that the forward pass had.
    assert torch.equal(x.grad.cpu(), 2 * y.detach().cpu())
