"""Plans that repeat are captured: work with fixed memory, submitted again (a CUDA graph on a GPU).

Nothing of that may show. The host's work is a list of calls that have the memory and the numbers
of the run that was captured, as the launches in a CUDA graph have, so what is forgotten here would
be forgotten there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread")

F = nn.functional

# The tests that hold as well where each operator is a plan.
OF_ANY_PLANS = ("test_values_are_those_of_the_cpu", "test_numbers_and_addresses_stay")


@pytest.fixture(autouse=True, params=["operators", "kernels", "kernels of a GPU"])
def captured(request, device) -> Iterator[None]:
    """Plans are captured, with generated kernels or without."""
    extension = helpers.extension()
    if extension.mode() != "nofuse":
        request.getfixturevalue("capturing")
    elif request.param != "operators" or request.node.originalname not in OF_ANY_PLANS:
        pytest.skip("ACC_MODE=nofuse runs each operator at once, by itself")
    extension.capture_plans(True)
    if request.param == "kernels of a GPU":
        helpers.emulate_gpu()
    if request.param == "operators":
        extension.skip_passes(helpers.BIT_BY_BIT)
    # Without it kernels would first be tried against what they replace.
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    helpers.emulate_gpu(on=False)
    extension.skip_passes("")
    extension.capture_plans(None)


@pytest.fixture
def failing(device: str) -> None:
    """For tests that let allocations fail, which only those of a host do."""
    if helpers.extension().executor_name() != "host":
        pytest.skip("the allocations that fail are those of the host executor")


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 64, 10),
    ).to(device)


class Batches:
    """The same numbers on every device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, size: int = 8) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 3, 8, 8, generator=self.generator)
        y = torch.randint(0, 10, (size,), generator=self.generator)
        return x.to(self.device), y.to(self.device)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def schedule(device: str) -> list[Tensor]:
    """Learning rates change."""
    model, batch = network(device), Batches(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    losses = []
    for _ in range(12):
        losses.append(step(model, optimizer, *batch()))
        rates.step()
    return losses


def everything_kept(device: str) -> list[Tensor]:
    """Losses, activations and gradients, with evaluation and two sizes of batches in between."""
    model, batch = network(device), Batches(device)
    more = nn.Sequential(nn.Linear(10, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 10))
    model.extend(more.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kept = []
    for i in range(50):
        x, y = batch(4 if i % 3 == 2 else 8)
        made = [x.requires_grad_()]
        for layer in model:
            made.append(layer(made[-1]))
        loss = F.cross_entropy(made[-1], y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept += [*made, x.grad, loss, *(p.grad for p in model.parameters())]
        if i % 4 == 3:
            model.eval()
            with torch.no_grad():
                kept.append(model(x))
            model.train()
    return [each.detach() for each in kept]


def slices_of_resident_data(device: str) -> list[Tensor]:
    model, batch = network(device), Batches(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = batch(64)
    return [
        step(model, optimizer, x[i : i + 8], y[i : i + 8])
        for _ in range(3)
        for i in range(0, 64, 8)
    ]


def two_batches_in_turn(device: str) -> list[Tensor]:
    model, batch = network(device), Batches(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [batch(), batch()]
    return [step(model, optimizer, *batches[i % 2]) for i in range(12)]


def averaged_parameters_swapped_in(device: str) -> list[Tensor]:
    model, batch = network(device), Batches(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    parameters = list(model.parameters())
    averages = [p.detach().clone() for p in parameters]
    results = []
    for i in range(16):
        x, y = batch()
        results.append(step(model, optimizer, x, y))
        with torch.no_grad():
            for average, p in zip(averages, parameters, strict=True):
                average.lerp_(p, 0.1)
            if i % 2:
                trained = [p.data for p in parameters]
                for average, p in zip(averages, parameters, strict=True):
                    p.data = average
                results.append(model(x))
                for each, p in zip(trained, parameters, strict=True):
                    p.data = each
    return results


def state_dict_assigned(device: str) -> list[Tensor]:
    model, batch = network(device), Batches(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for i in range(16):
        if i == 5:
            saved = {name: value.clone() for name, value in model.state_dict().items()}
        if i in (8, 9, 12):
            copies = {name: value.clone() for name, value in saved.items()}
            model.load_state_dict(copies, assign=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses.append(step(model, optimizer, *batch()))
    return losses


def gradients_accumulated(device: str) -> list[Tensor]:
    model, batch = network(device), Batches(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    results = []
    for i in range(90):
        x, y = batch()
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
        results.append(loss.detach())
        if i % 3 == 2:
            optimizer.step()
            results += [p.grad.clone() for p in model.parameters()]
            optimizer.zero_grad(set_to_none=i % 2 == 0)
    return results


def state_carried(device: str) -> list[Tensor]:
    """What a step made is what the next begins with, and the program keeps it too."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(16, 16, generator=generator).to(device)
    hidden = torch.zeros(4, 16, device=device)
    kept = []
    for i in range(12):
        hidden = torch.tanh(hidden @ weight + i * 0.01)
        kept.append(hidden)
        flush(device)
    return kept


def state_carried_and_dropped(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(16, 16, generator=generator).to(device)
    hidden = torch.zeros(4, 16, device=device)
    for i in range(12):
        hidden = torch.tanh((hidden @ weight).relu() @ weight + i * 0.01)
        flush(device)
    return [hidden]


def loss_scaled(device: str) -> list[Tensor]:
    """A number that the program changes by itself."""
    model, batch = network(device), Batches(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for i in range(14):
        scale = 2.0 ** (i // 3)
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        (loss * scale).backward()
        for p in model.parameters():
            p.grad.div_(scale)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def flush(device: str) -> None:
    if device != "cpu":
        helpers.flush()


PROGRAMS: list[Callable[[str], list[Tensor]]] = [
    schedule,
    everything_kept,
    slices_of_resident_data,
    two_batches_in_turn,
    averaged_parameters_swapped_in,
    state_dict_assigned,
    gradients_accumulated,
    state_carried,
    state_carried_and_dropped,
    loss_scaled,
]


def compare(program: Callable[[str], list[Tensor]], device: str) -> None:
    mine = [each.cpu() for each in program(device)]
    theirs = program("cpu")
    assert len(mine) == len(theirs)
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda m, i=i: f"{i}: {m}")


def numbers_are_those_that_are_drawn_anyway(device: str) -> None:
    """Dropout, in a step that is captured and in one that is not."""

    def train() -> list[Tensor]:
        torch.manual_seed(5)
        model, batch = nn.Sequential(network(device), nn.Dropout(0.3)), Batches(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        made = [step(model, optimizer, *batch()) for _ in range(10)]
        return [*made, *(p.detach().clone() for p in model.parameters())]

    # Else cuDNN may add up a gradient of the weights in an order that is another each time.
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        with helpers.counting() as counted:
            mine = [each.cpu() for each in train()]
        assert counted["captures_submitted"] >= 3
        helpers.extension().capture_plans(False)
        with helpers.counting() as counted:
            theirs = [each.cpu() for each in train()]
        assert counted["captures_submitted"] == 0
        helpers.extension().capture_plans(True)
    assert len(set(map(float, mine[:10]))) == 10
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


def an_address_that_was_told_stays(device: str) -> None:
    model, batch = network(device), Batches(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    told = []
    with helpers.counting() as counted:
        for i in range(16):
            step(model, optimizer, *batch())
            gradient = model[0].weight.grad
            if i % 3 == 0:
                told.append((gradient, gradient.data_ptr(), gradient.cpu()))
    assert counted["captures_submitted"] >= 3
    assert counted["captured_again/result"] >= 1
    for gradient, address, value in told:
        assert gradient.data_ptr() == address
        assert torch.equal(gradient.cpu(), value)


TOLD_AND_DRAWN = [numbers_are_those_that_are_drawn_anyway, an_address_that_was_told_stays]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_values_are_those_of_the_cpu(device, program):
    with helpers.counting() as counted:
        compare(program, device)
    assert counted["captures_submitted"] >= 3


@pytest.mark.parametrize("captured", ["operators"], indirect=True)
def test_programs_in_nofuse(device):
    """Each operator is a plan of its own, which is captured."""
    if helpers.extension().executor_name() != "host":
        pytest.skip("gpu_check.py runs this file in that mode")
    helpers.run_python(
        """
import sys
from tests import helpers
sys.path.insert(0, "tests/python")
import test_captured_plans as programs
for each in programs.PROGRAMS:
    before = helpers.stats()["captures_submitted"]
    programs.compare(each, DEVICE)
    assert helpers.stats()["captures_submitted"] - before >= 12, each
for each in programs.TOLD_AND_DRAWN:
    each(DEVICE)
""",
        ACC_MODE="nofuse",
        ACC_HOST_GRAPHS="1",
        ACC_DETERMINISTIC="1",
    )


@pytest.mark.parametrize("program", TOLD_AND_DRAWN, ids=lambda program: program.__name__)
def test_numbers_and_addresses_stay(device, program):
    program(device)


def test_a_loop_is_captured_once(device):
    """Whatever numbers change: one capture for the first they are learnt from, one without them."""
    model, batch = network(device), Batches(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def steps(count: int) -> None:
        for _ in range(count):
            step(model, optimizer, *batch())
            rates.step()
        helpers.flush()

    steps(8)
    with helpers.counting() as counted:
        steps(20)
    assert (counted["captures"], counted["captures_submitted"]) == (0, 20)


@pytest.mark.parametrize("captured", ["kernels", "kernels of a GPU"], indirect=True)
def test_a_step_is_one_launch(device):
    """With a batch from the host, dropout, a schedule, and what is kept of the step before."""
    model, batch = nn.Sequential(network(device), nn.Dropout(0.2)), Batches("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    averages = [p.detach().clone() for p in model.parameters()]

    def steps(count: int) -> None:
        for _ in range(count):
            with torch.no_grad():
                for average, p in zip(averages, model.parameters(), strict=True):
                    average.lerp_(p, 0.01)
            step(model, optimizer, *(t.to(device) for t in batch()))
            rates.step()
        helpers.flush()

    steps(8)
    with helpers.counting() as counted:
        steps(20)
    assert (counted["captures"], counted["captures_submitted"]) == (0, 20)
    assert counted["captured_launches"] == 20


def test_what_always_moves_is_captured_a_few_times(device):
    """Gradients that lie elsewhere at each update: the operators that write them are called."""
    model, batch = network(device), Batches(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kept = []

    def updates(count: int) -> None:
        for _ in range(count):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            helpers.flush()
            for _ in range(2):
                x, y = batch()
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            kept.extend(p.grad for p in model.parameters())  # so the next have another place
            helpers.flush()

    updates(12)
    # What else moves, the batch for one, does so when the heap wants it, and twice at most.
    for _ in range(6):
        with helpers.counting() as counted:
            updates(10)
        if counted["captures"] == 0:
            break
    assert (counted["captures"], counted["captures_submitted"]) == (0, 20)


@pytest.mark.parametrize("n", [8, 16, 24, 32, 40, 48, 64, 96])
def test_arguments_of_kernels_are_not_written_over(device, n):
    """Memory that operators gave back before the first kernel is theirs again in each submission.

    Sizes are those around that of the arguments, whose memory must not be of these.
    """
    w, x = torch.rand(3000).to(device), torch.rand(n, n).to(device)
    results = []
    with helpers.counting() as counted:
        for _ in range(8):
            moved = x[0]
            for _ in range(3):
                moved = moved.sort(-1)[1].float()
            turned = x.roll(1, 0).roll(1, 0)
            results.append(torch.tanh(w) * w.sum() + (moved.sum() + turned.sum()))
            del moved, turned
            helpers.flush()
    assert counted["captures_submitted"] >= 3
    host = w.cpu()
    wanted = torch.tanh(host) * host.sum() + (n * (n - 1) / 2 + x.cpu().sum())
    for result in results:
        torch.testing.assert_close(result.cpu(), wanted)


def test_what_is_shared_stays(device):
    """Memory that another library sees is not written over."""
    x = torch.arange(8.0).to(device)
    shared = []
    with helpers.counting() as counted:
        for i in range(12):
            y = (x * 2 + i).cumsum(0)
            helpers.flush()
            if i % 3 == 0:
                shared.append((torch.from_dlpack(y), i))
    assert counted["captures_submitted"] >= 3
    assert counted["captured_again/result"] >= 2
    for each, i in shared:
        assert torch.equal(each.cpu(), (torch.arange(8.0) * 2 + i).cumsum(0))


@pytest.mark.usefixtures("outlives_wrong_data")
def test_an_error_in_a_captured_step_is_that_of_its_operator(device):
    table = torch.arange(12.0).reshape(4, 3).to(device)
    index = torch.tensor([0, 3, 1]).to(device)
    with helpers.counting() as counted:
        for _ in range(8):
            picked = table.index_select(0, index)
            total = picked.sum()
            helpers.flush()
    assert counted["captures_submitted"] >= 3
    index.fill_(7)
    helpers.flush()
    picked = table.index_select(0, index)
    total = picked.sum()
    with pytest.raises(Exception, match="aten::index_select"):
        total.item()
    index.fill_(2)
    assert table.index_select(0, index).sum().item() == 3 * (6 + 7 + 8)


def test_random_numbers_go_on(device):
    """A step that draws is none of the captured ones, and draws anew."""
    x = torch.ones(64, device=device)
    seen = []
    with helpers.counting() as counted:
        for _ in range(8):
            seen.append(F.dropout(x, 0.5) + torch.rand(64, device=device))
            helpers.flush()
    assert counted["captures_submitted"] >= 3
    values = [each.cpu() for each in seen]
    assert all(not torch.equal(a, b) for i, a in enumerate(values) for b in values[:i])


def test_dropping_captures_leaves_results_alone(device):
    """Work of another plan, which was captured before, goes on beside them."""
    x = torch.ones(64, 64).to(device)

    def other() -> Tensor:
        made = ((x + 1) @ x).relu().cumsum(0)
        helpers.flush()
        return made

    def mine(i: int) -> Tensor:
        made = (x + i).cumsum(0)
        helpers.flush()
        return made

    for _ in range(4):
        other()
    kept = []
    with helpers.counting() as counted:
        for i in range(9):
            kept.append(mine(i))
            assert other()[0, 0].item() == 128
            if i % 4 == 3:
                torch.acc.empty_cache()  # drops what was captured
    assert counted["captures_submitted"] >= 6
    for i, each in enumerate(kept):
        assert torch.equal(each.cpu(), (torch.ones(64, 64) + i).cumsum(0))


def test_without_memory_the_work_waits(device, failing):
    """Nothing is done twice: not when results cannot be moved, nor in the run that is captured."""
    extension = helpers.extension()
    total = torch.zeros(2, device=device)
    x = torch.ones(256, 256).to(device)
    kept = []
    for i in range(8):
        helpers.synchronize()
        torch.acc.empty_cache()
        if i in (1, 4):  # the run that is captured, and one that submits the work
            extension.fail_allocations(0, 1 << 40, 1 << 16)
        total.add_(1)
        kept.append((x * i) @ x)
        try:
            if i in (1, 4):
                with pytest.raises(torch.OutOfMemoryError, match="Out of memory"):
                    helpers.synchronize()
        finally:
            extension.fail_allocations(0, 0, 0)
        helpers.synchronize()
    assert total.tolist() == [8, 8]
    for i, each in enumerate(kept):
        assert each.cpu().eq(256 * i).all()


def test_an_error_for_want_of_memory_names_captured_work(device, failing):
    extension = helpers.extension()
    x = torch.ones(512, 512).to(device)
    for _ in range(6):
        y = ((x * 2) @ x).cumsum(0)
        helpers.synchronize()
    del y
    held = extension.captured_bytes(0)
    assert held >= x.nbytes
    assert f"Captured steps{held >> 10:>16} KiB" in torch.acc.memory_summary()
    assert torch.acc.memory_stats()["captured_bytes.all.current"] == held
    z = (x + 1).cumsum(1)
    extension.fail_allocations(0, 1 << 40, 1 << 16)
    try:
        with pytest.raises(torch.OutOfMemoryError) as raised:
            helpers.synchronize()
    finally:
        extension.fail_allocations(0, 0, 0)
    told = (
        f"Captured steps gave {held >> 20} MiB back; this one and results of theirs that are in "
        "use have 0 MiB."
    )
    assert told in str(raised.value)
    helpers.synchronize()
    assert z[0, 0].item() == 2


@pytest.mark.parametrize("run", [1, 4])
def test_one_failure_in_the_middle(device, failing, run):
    """The second attempt succeeds; the run that was to be captured is none then."""
    extension = helpers.extension()
    total = torch.zeros(8, device=device)
    x = torch.ones(256, 256).to(device)
    for i in range(8):
        helpers.synchronize()
        if i == run:
            extension.fail_allocations(1, 1, 1 << 16)
        total.add_(1)
        y = ((x * 2) @ x).cumsum(0).cumsum(1)
        helpers.synchronize()
        extension.fail_allocations(0, 0, 0)
        assert y[0, 0].item() == 512
    assert total.tolist() == [8] * 8


def test_an_operator_between_the_pieces_finds_no_memory(device, failing, request):
    """Its number changes, so it is called. The work waits, and nothing of it is done twice.

    To drop other captures would free nothing: this one keeps their pool.
    """
    extension = helpers.extension()
    x = torch.ones(64, device=device)
    large = torch.randn(256, 256)
    given = large.to(device)
    total = torch.zeros(8, device=device)

    def step(i: int) -> Tensor:
        total.add_(1)
        made = F.layer_norm(given, (256,), eps=0.1 * i)  # its results are not written in place
        total.add_(x.cumsum(0)[:1])
        return made

    def other() -> None:
        _ = (given + 1).cumsum(0)
        helpers.synchronize()

    for i in range(8):
        other()
        made = step(i)
        helpers.synchronize()
    made = step(8)
    with helpers.counting() as counted:
        extension.fail_allocations(0, 1, 1 << 16)
        try:
            helpers.synchronize()
            failed = False
        except torch.OutOfMemoryError as error:
            failed = True
            assert "aten::native_layer_norm" in str(error)
            assert "goes on at this operator" in str(error)
        finally:
            extension.fail_allocations(0, 0, 0)
    assert counted["captures_submitted"] == 1
    called = "operators" in request.node.name
    assert failed == called
    with helpers.counting() as counted:
        other()
    assert counted["captures_submitted"] == 1
    torch.testing.assert_close(made.cpu(), F.layer_norm(large, (256,), eps=0.8))
    assert total.tolist() == [18] * 8


def test_captured_work_waits_for_memory_wherever_it_is_missing(device, failing):
    """On the host its operators allocate; what was done before is not done again."""
    extension = helpers.extension()
    x = helpers.drawn(32, 32, device=device)
    total = torch.zeros(4, device=device)

    def step() -> tuple[Tensor, Tensor]:
        total.add_(1)
        first, order = (x * 2).sort(-1)  # two results: the operator allocates them
        second = first.cumsum(0).sort(0)[0]
        total.add_(order[0, 0] * 0 + 1)
        return first, second

    for _ in range(5):
        made = step()
        helpers.synchronize()
    expected = [each.cpu() for each in made]
    del made
    made = step()
    extension.fail_allocations(0, 0, x.nbytes)
    helpers.synchronize()
    allocations = extension.allocations_counted()
    assert allocations >= 4
    done, waited = 6, 0
    for k in range(allocations):
        for others_run in (False, True):
            made = step()
            done += 1
            failed = 0
            with helpers.counting() as counted:
                extension.fail_allocations(k, 1 << 40, x.nbytes)
                try:
                    helpers.synchronize()
                except torch.OutOfMemoryError as error:
                    assert "goes on at this operator" in str(error), str(error)
                    failed = 1
                finally:
                    extension.fail_allocations(0, 0, 0)
            waited += failed * counted["captures_submitted"]
            if others_run:
                assert (x[0, 0] * 0 + k).item() == k
            assert total.tolist() == [2 * done] * 4
            assert all(torch.equal(a.cpu(), b) for a, b in zip(made, expected, strict=True))
            for _ in range(3):
                step()
                done += 1
                helpers.synchronize()
    assert waited >= 4


def test_captured_work_that_gets_no_memory_is_given_up(device, failing):
    """What it was to write says so; what it had written is there, and what nobody holds any more
    is not missed."""
    extension = helpers.extension()
    x = helpers.drawn(32, 32, device=device)
    total = torch.zeros(4, device=device)

    def step() -> Tensor:
        total.add_(1)
        made = (x * 2).sort(-1)[0]
        total.add_(1)
        return made

    def find_no_memory() -> None:
        with helpers.counting() as counted:
            extension.fail_allocations(0, 1 << 40, x.nbytes)
            with pytest.raises(torch.OutOfMemoryError, match="aten::sort"):
                helpers.synchronize()
        assert counted["captures_submitted"] == 1

    for _ in range(10):
        made = step()
        helpers.synchronize()
    expected = made.cpu()
    del made  # or it would have to be copied first
    try:
        made = step()
        find_no_memory()
        del made  # so the operator that failed is not needed
        assert total.tolist() == [22] * 4
        extension.fail_allocations(0, 0, 0)
        made = step()
        find_no_memory()
        _ = x + 1  # gives it up
        extension.fail_allocations(0, 0, 0)
        with pytest.raises(RuntimeError, match="no valid contents"):
            made.cpu()
    finally:
        extension.fail_allocations(0, 0, 0)
    total.copy_(torch.zeros(4))
    made.copy_(torch.full((32, 32), 7.0))  # where the captured work has its results
    for i in range(4):
        again = step()
        assert torch.equal(again.cpu(), expected)
        assert total.tolist() == [2 * i + 2] * 4
    assert made.unique().tolist() == [7]


@pytest.mark.usefixtures("outlives_wrong_data")
def test_results_of_a_capture_that_failed(device):
    """They lie in the pool like others, where work that was captured before may write."""
    x = torch.ones(256, 256).to(device)
    index = torch.tensor([0, 3, 1]).to(device)

    def earlier() -> Tensor:
        made = ((x + 1) @ x).cumsum(0).cumsum(1)
        helpers.flush()
        return made

    for _ in range(4):
        earlier()

    def fails() -> tuple[Tensor, Tensor]:
        y = (x * 2).cumsum(0)
        return y, y.index_select(0, index)

    fails()
    helpers.flush()
    index.fill_(999)
    helpers.flush()
    y, z = fails()
    with pytest.raises(Exception, match="index_select"):
        helpers.synchronize()
    del z
    earlier()
    assert torch.equal(y.cpu(), torch.full((256, 256), 2.0).cumsum(0))


def test_captures_come_back_after_their_memory_was_taken(device):
    x = torch.ones(64, 64).to(device)
    for _ in range(20):
        with helpers.counting() as counted:
            for _ in range(12):
                made = (x @ x).cumsum(0)
                helpers.flush()
        torch.acc.empty_cache()
    assert counted["captures_submitted"] == 11
    assert made[0, 0].item() == 64
