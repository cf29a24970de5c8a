"""Out of memory at every place where a step asks for some.

Afterwards each tensor holds what eager would have made, or says that it has no valid contents;
nothing is ever written twice, and everything else goes on. The allocations that fail are those of
PyTorch's CPU allocator, which serves the host executor and the kernels it calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import drawn, extension

pytestmark = pytest.mark.usefixtures(
    "acc_only", "failing_host", "one_thread", "no_boundary", "recording"
)

FOR_EVER = 1 << 40
SETTLED = 4  # runs after which a plan has its kernels
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd lists": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "adamw lists": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
}


@pytest.fixture
def failing_host(acc_only: str) -> None:
    """On a GPU these allocations succeed; what runs out there is in test_captured_on_cuda.py."""
    if extension().executor_name() != "host":
        pytest.skip("the allocations that fail are those of the host executor")


@pytest.fixture
def no_boundary() -> Iterator[None]:
    """The tests say when a step is submitted, not the end of `optimizer.step`."""
    from torchacc_device import _boundary

    _boundary.uninstall()
    yield
    _boundary.install()


@contextmanager
def failing(after: int, times: int = FOR_EVER, at_least: int = 0) -> Iterator[None]:
    """Lets `after` allocations of so many bytes pass and the next `times` fail."""
    extension().fail_allocations(after, times, at_least)
    try:
        yield
    finally:
        extension().fail_allocations(0, 0)


def test_a_step_that_is_tried_again_has_what_it_got(device):
    """The first of its two results, where there was no memory for the second."""
    x = drawn(1 << 18, device=device)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2 + 1
        return y, y > 1.5

    for _ in range(SETTLED):
        kept = step()
        extension().flush()
    kept = step()
    with failing(1, 1, at_least=1 << 17):
        extension().flush()
        assert extension().allocations_counted() == 3  # and not the first result once more
    assert torch.equal(kept[0].cpu(), x.cpu() * 2 + 1)
    assert torch.equal(kept[1].cpu(), kept[0].cpu() > 1.5)


class Training:
    """A small network with batch norm, trained one step at a time; `tensors` is all it has."""

    def __init__(self, optimizer: str, device: str) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(3, 4),
            torch.nn.BatchNorm1d(4),
            torch.nn.PReLU(4),  # ATen's in all modes, with memory that ATen allocates
            torch.nn.Tanh(),
            torch.nn.PReLU(4),
            torch.nn.Linear(4, 2),
        ).to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.data = torch.arange(15.0).reshape(5, 3).to(device) / 7
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.model(self.data).square().mean()
        loss.backward()
        self.losses.append(loss.detach())
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"loss {i}": loss for i, loss in enumerate(self.losses)}
        found["data"] = self.data
        for name, tensor in self.model.state_dict().items():
            found[name] = tensor
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad
            for key, value in self.optimizer.state[parameter].items():
                found[f"{key} of {name}"] = value
        return found


Contents = dict[str, list[float] | None]


def contents(tensors: dict[str, torch.Tensor]) -> Contents:
    """What each tensor holds; None for those that say that they hold nothing."""
    found: Contents = {}
    for name, tensor in tensors.items():
        try:
            found[name] = tensor.cpu().flatten().tolist()
        except RuntimeError as error:
            text = str(error)
            assert "no valid contents" in text and "aten::" in text and " at " in text, text
            assert "copy_" in text, "the error does not say what to do"
            found[name] = None
    return found


def after_steps(optimizer: str, steps: int) -> Contents:
    """What eager has after some steps."""
    training = Training(optimizer, "cpu")
    for _ in range(steps):
        training.step()
    return contents(training.tensors())


def ready(optimizer: str, device: str, cold: bool) -> Training:
    """A training after its first step, with the second one recorded; `cold`: without its plan."""
    if cold:
        extension().release_memory(0)
    training = Training(optimizer, device)
    training.step()
    extension().flush()
    training.step()
    assert extension().pending(0) > 10
    return training


def count_allocations(optimizer: str, device: str, cold: bool) -> int:
    for _ in range(SETTLED):
        ready(optimizer, device, False)
        extension().flush()
    ready(optimizer, device, cold)
    extension().fail_allocations(0, 0)
    extension().flush()
    return extension().allocations_counted()


@pytest.fixture(params=["unfused", "fused"])
def kernels(request, acc_only) -> bool:
    """Whether generated kernels run. Without them results are eager's, bit by bit."""
    if request.param == "unfused":
        request.getfixturevalue("unfused")
    return request.param == "fused"


def undisturbed(optimizer: str, device: str, kernels: bool, cold: bool, steps: int) -> Contents:
    """What training has after some steps: eager's, or with kernels that of the device itself."""
    if not kernels:
        return after_steps(optimizer, steps)
    for _ in range(SETTLED):
        training = ready(optimizer, device, cold)
        for _ in range(steps - 2):
            extension().flush()
            training.step()
        found = contents(training.tensors())
    return found


@pytest.mark.parametrize("cold", [True, False], ids=["first run", "replay"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_failure_at_every_allocation_of_a_step(acc_only, kernels, optimizer, cold):
    """The failed step is tried again where that is safe; else what it may have touched says so."""
    allocations = count_allocations(optimizer, acc_only, cold)
    expected = undisturbed(optimizer, acc_only, kernels, cold, 2)
    assert allocations > (5 if kernels and not cold else 10)
    outcomes = {"exact": 0, "poisoned": 0}
    for k in range(allocations):
        bystander = torch.ones(3, device=acc_only) * 2
        extension().flush()
        training = ready(optimizer, acc_only, cold)
        error = None
        with failing(k, 1):
            try:
                extension().flush()
            except torch.OutOfMemoryError as raised:
                error = raised
        found = contents(training.tensors())
        wrong = [n for n, v in found.items() if v is not None and v != expected[n]]
        assert not wrong, f"allocation {k}: {sorted(wrong)} are not what they should be"
        lost = [name for name, value in found.items() if value is None]
        assert bool(lost) == (error is not None), f"allocation {k}: {error}, lost {lost}"
        outcomes["poisoned" if lost else "exact"] += 1
        assert found["data"] is not None
        assert (bystander + 1).tolist() == [3.0] * 3
        assert (torch.ones(2, device=acc_only) + 1).tolist() == [2.0] * 2
    assert outcomes["exact"] > (3 if kernels else 10), outcomes
    # With kernels little allocates behind a write.
    assert kernels or outcomes["poisoned"] > 0, outcomes


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_memory_comes_back_after_the_failure(acc_only, kernels, optimizer):
    """Work that waits for memory goes on at the failed operator; none runs twice."""
    waited = 0
    allocations = count_allocations(optimizer, acc_only, False)
    two, three = (undisturbed(optimizer, acc_only, kernels, False, n) for n in (2, 3))
    for k in range(allocations):
        training = ready(optimizer, acc_only, False)
        with failing(k):
            with pytest.raises(torch.OutOfMemoryError, match=r"aten::.* at .*MiB") as caught:
                extension().flush()
            waits = "goes on at this operator" in str(caught.value)
            if waits:
                # Asking again, and asking who has the memory, changes nothing.
                with pytest.raises(torch.OutOfMemoryError):
                    extension().flush()
                assert torch.acc.memory_allocated() > 0
                torch.acc.empty_cache()
        if waits:
            waited += 1
            training.step()
        found = contents(training.tensors())
        expected = three if waits else two
        wrong = {n for n, v in found.items() if v != expected[n] and (v is not None or waits)}
        assert not wrong, f"allocation {k}: {wrong}"
    assert waited > (3 if kernels else 10)


def _joined(device: str) -> Callable[[], torch.Tensor]:
    """Products with one weight: the rows are put below each other."""
    inputs = [drawn(4, 64, device=device, seed=i) for i in range(6)]
    weight = drawn(64, 64, device=device, seed=9)
    return lambda: torch.stack([(x @ weight).relu() for x in inputs])


def _channels_last(device: str) -> Callable[[], torch.Tensor]:
    """A network whose layout changes, with what its training leaves behind."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1),
        torch.nn.BatchNorm2d(32),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 32, 3, padding=1),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, foreach=False)
    images = drawn(4, 3, 32, 32, device=device)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = model(images).square().mean()
        loss.backward()
        optimizer.step()
        return torch.cat([loss.detach()[None], *[p.grad.flatten() for p in model.parameters()]])

    return step


def _recomputed(device: str) -> Callable[[], torch.Tensor]:
    """Activations that are held at the peak are computed again."""
    weights = [drawn(64, 64, device=device, seed=i).mul_(0.1).requires_grad_() for i in range(5)]
    x = drawn(256, 64, device=device)

    def step() -> torch.Tensor:
        y = x
        for weight in weights:
            y = y @ weight
            y = y * torch.sigmoid(1.702 * y)
        return torch.cat([g.flatten() for g in torch.autograd.grad(y.square().sum(), weights)])

    return step


@pytest.mark.parametrize("make", [_joined, _channels_last, _recomputed])
def test_work_goes_on_whose_program_is_not_what_was_recorded(acc_only, make):
    """Passes have added buffers to it."""
    step = make(acc_only)
    for _ in range(SETTLED):
        result = step()
        extension().flush()
    expected = result.cpu()
    plan = extension().plan_data(0)
    assert len(plan["buffers"]) > plan["recorded"], "no pass has added a buffer"
    extension().fail_allocations(0, 0)
    result = step()
    extension().flush()
    waited = 0
    for k in range(extension().allocations_counted()):
        result = step()
        with failing(k):
            try:
                extension().flush()
            except torch.OutOfMemoryError as error:
                waited += "goes on at this operator" in str(error)
        assert torch.equal(result.cpu(), expected), f"allocation {k}"
    assert waited > 0


def test_memory_that_does_not_come_back(acc_only):
    """The next recorded operator gives the work up; it and everything else go on."""
    before, after = torch.ones(300, device=acc_only), torch.ones(300, device=acc_only)
    read_only = torch.arange(3.0, device=acc_only)
    extension().flush()
    made = read_only + 1
    before.add_(1)
    outer = torch.outer(before, before)
    after.mul_(outer[0, 0])
    used = made * after[0]
    with failing(0, at_least=100_000):
        with pytest.raises(torch.OutOfMemoryError, match=r"goes on at this operator"):
            extension().flush()
        # What is complete can be read, what is not says why.
        assert read_only.tolist() == [0.0, 1.0, 2.0] and made.tolist() == [1.0, 2.0, 3.0]
        assert before[0].item() == 2.0
        for waits in (outer[0, 0], after[0], used[0]):
            with pytest.raises(torch.OutOfMemoryError):
                waits.item()
        # Recorded without an error, but the work that waited is given up.
        doubled = read_only * 2
        assert doubled.tolist() == [0.0, 2.0, 4.0]
        for lost in (outer, after, used):
            with pytest.raises(RuntimeError, match="no valid contents"):
                lost.view(-1)[0].item()
            with pytest.raises(RuntimeError, match="no valid contents"):
                lost + 1
    assert before.tolist() == [2.0] * 300 and made.tolist() == [1.0, 2.0, 3.0]
    after.copy_(before)
    assert (after + 1).tolist() == [3.0] * 300


def test_who_reads_what_is_complete_hears_first_that_memory_ran_out(acc_only):
    """Else the next operator would give the work up, and nobody was ever told."""
    source, small = torch.ones(300, device=acc_only), torch.ones(3, device=acc_only)
    extension().flush()
    total = small + 1
    outer = torch.outer(source, source)
    with failing(0, at_least=100_000):
        with pytest.raises(torch.OutOfMemoryError, match=r"aten::outer|aten::mul"):
            total.tolist()
        assert total.tolist() == [2.0] * 3
    doubled = small * 2
    assert outer.sum().item() == 90_000.0 and doubled.tolist() == [2.0] * 3


@pytest.mark.usefixtures("only_this_frees")
def test_complete_results_of_work_that_waits_count_once_and_can_be_freed(acc_only):
    large, source = torch.ones(1 << 23, device=acc_only), torch.ones(3000, device=acc_only)
    extension().flush()
    before = torch.acc.memory_allocated()
    first, second = large * 2, large + 1
    outer = torch.outer(source, source) + second[0]

    def resident() -> int:
        torch.acc.empty_cache()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with failing(0, at_least=35_900_000):
        with pytest.raises(torch.OutOfMemoryError):
            extension().flush()
        assert torch.acc.memory_allocated() - before == 2 * large.nbytes
        held = resident()
        del first  # nothing that is left to do reads it
        assert torch.acc.memory_allocated() - before == large.nbytes
        assert held - resident() > large.nbytes // 2
        assert second[-1].item() == 2.0
        del outer, second
        assert (source + 1).sum().item() == 6000.0
    assert torch.acc.memory_allocated() == before


def test_what_was_deleted_to_free_memory_is_not_made(acc_only):
    """The rest of the work goes on although the memory that was missing is still missing."""
    source, counter = torch.ones(300, device=acc_only), torch.zeros(3, device=acc_only)
    extension().flush()
    outer = torch.outer(source, source)
    total = outer.sum()
    counter.add_(1)
    with failing(0, at_least=100_000):
        with pytest.raises(torch.OutOfMemoryError):
            total.item()
        del outer, total
        assert (counter + 1).tolist() == [2.0] * 3
        assert counter.tolist() == [1.0] * 3


def test_a_kernel_that_is_half_needed_has_memory_for_the_rest(acc_only):
    """It reads what an operator that is left out would have made."""
    torch.manual_seed(0)
    a, b = (torch.randn(64, 64, device=acc_only) for _ in range(2))
    w = torch.full((64,), 0.25, device=acc_only)
    extension().flush()

    def run():
        first, second = F.prelu(a, w), F.prelu(b, w)  # results that the operator allocates
        return (first * 2).tanh(), (second * 2).tanh()

    for _ in range(2):
        expected = [y.cpu() for y in run()]
    y1, y2 = run()  # fused for the first time
    with failing(0, at_least=16384):
        with pytest.raises(torch.OutOfMemoryError):
            y1.cpu()
        del y2
    torch.testing.assert_close(y1.cpu(), expected[0])


def test_a_checkpoint_makes_a_model_usable_again(acc_only, unfused):
    """After a failure in the middle of an update: load the state and go on as eager would."""
    saved = Training("sgd lists", "cpu")
    saved.step()
    state, updates = saved.model.state_dict(), saved.optimizer.state_dict()
    allocations = count_allocations("sgd lists", acc_only, False)
    poisoned = 0
    for k in range(allocations):
        training = ready("sgd lists", acc_only, False)
        with failing(k, 1):
            try:
                extension().flush()
            except torch.OutOfMemoryError:
                poisoned += 1
        training.model.load_state_dict(state)
        training.optimizer.load_state_dict(updates)
        training.losses.clear()
        training.optimizer.zero_grad()
        training.step()
        eager = Training("sgd lists", "cpu")
        eager.model.load_state_dict(state)
        eager.optimizer.load_state_dict(updates)
        eager.step()
        assert contents(training.tensors()) == contents(eager.tensors()), k
    assert poisoned > 0


def test_part_of_a_tensor_does_not_make_it_usable(acc_only):
    """Writing a view of lost contents leaves the rest lost, and a failed copy changes nothing."""
    table = torch.ones(4, 2, device=acc_only)
    target = torch.zeros(4, device=acc_only)
    extension().flush()
    target += torch.nn.functional.embedding(torch.tensor([9], device=acc_only), table)[0, 0]
    with pytest.raises(IndexError):
        extension().flush()
    for part in (lambda: target[1:].copy_(torch.ones(3)), lambda: target[0].fill_(1)):
        with pytest.raises(RuntimeError, match="no valid contents"):
            part()
    with pytest.raises(RuntimeError):
        target.copy_(torch.ones(7))
    with pytest.raises(RuntimeError, match="no valid contents"):
        target.tolist()
    target.copy_(torch.ones(4))
    assert target.tolist() == [1.0] * 4


def test_a_resize_that_finds_no_memory_keeps_the_contents(acc_only):
    tensor = torch.arange(4.0, device=acc_only)
    extension().flush()
    with failing(0), pytest.raises(RuntimeError, match="memory"):
        tensor.untyped_storage().resize_(64)
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_full_trace_is_submitted_before_the_next_operator(acc_only):
    """An operator that raises because older ones found no memory was not recorded itself."""
    from tests.helpers import run_python

    run_python(
        """
from torchacc_device import _C
counter = torch.zeros(1, device=DEVICE)
a = torch.ones(300, device=DEVICE)
_C.flush()
products = [torch.outer(a, a) for _ in range(6)]
_C.fail_allocations(0, 1 << 40, 100_000)
try:
    for _ in range(4):
        counter.add_(1)
except torch.OutOfMemoryError:
    done = _
else:
    raise SystemExit("the cap was not reached")
finally:
    _C.fail_allocations(0, 0)
assert counter.item() == done, (counter.item(), done)
assert [p.sum().item() for p in products] == [90_000.0] * 6
""",
        ACC_MAX_PENDING="8",
    )
