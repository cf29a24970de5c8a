"""Random training programs, whose repeated steps are captured, beside eager's on the CPU.

    python -m tests.fuzz.trainings PROGRAMS SEED [operators] [refused] [gpu]

A program is a few actions that come again and again, with others in between: steps of two models
that take turns, gradients that are added up, results that are kept and written to, parameters that
change places, states that are loaded, exceptions in the middle. All of it is in double precision,
so that what differs is no rounding. `operators`: without generated kernels.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests import helpers

F = nn.functional
TURNS = 14
# Operators that captures are without where some are to come to nothing, as on a GPU.
REFUSED = "aten::tanh,aten::cumsum,aten::native_batch_norm_backward,aten::lerp_.Scalar"
KEPT = 60  # results, at most: the oldest go first


class Stopped(Exception):
    """What a program of a user raises in the middle of a step."""


class Net(nn.Module):
    """Small, with what training needs: products, normalisation, a buffer that is written."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 3)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(x))


class Run:
    """A program's state on one device. Choices come from `random`, which is alike on all."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self.random = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        made = [Net(width).double() for width in (8, 5)]
        self.models = [each.to(device) for each in made]
        self.kind = self.random.randrange(3)
        self.optimizers = [self.optimizer(each) for each in self.models]
        self.averages = [self.copies(each) for each in self.models]
        self.saved = [copy.deepcopy(each.state_dict()) for each in self.models]
        self.data = torch.randn(64, 6, generator=self.numbers).double().to(device)
        self.labels = torch.randint(0, 3, (64,), generator=self.numbers).to(device)
        self.carried = torch.zeros(6, dtype=torch.double, device=device)
        self.kept: list[Tensor] = []
        self.told: list[tuple[Tensor, int]] = []
        self.read: list[Tensor] = []

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        if self.kind == 0:
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        if self.kind == 1:
            return torch.optim.AdamW(parameters, lr=0.01)
        return torch.optim.SGD(parameters, lr=0.05)

    def copies(self, model: nn.Module) -> list[Tensor]:
        return [p.detach().clone() for p in model.parameters()]

    def keep(self, *tensors: Tensor) -> None:
        self.kept += [each.detach() for each in tensors]
        del self.kept[: max(0, len(self.kept) - KEPT)]

    def one(self) -> Tensor | None:
        return self.random.choice(self.kept) if self.kept else None

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        if self.random.random() < 0.3:
            begin = self.random.randrange(64 - size)
            return self.data[begin : begin + size], self.labels[begin : begin + size]
        x = torch.randn(size, 6, generator=self.numbers).double()
        y = torch.randint(0, 3, (size,), generator=self.numbers)
        return x.to(self.device), y.to(self.device)

    # actions: `which` of the models, `k` a small number

    def train(self, which: int, k: int) -> None:
        model, optimizer = self.models[which], self.optimizers[which]
        x, y = self.batch((4, 8)[k % 2])
        hidden = model.hidden(x + self.carried)
        loss = F.cross_entropy(model.last(hidden), y)
        if k < 6:
            optimizer.zero_grad(set_to_none=k % 3 != 0)
        loss.backward()
        if k % 5 == 4:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if k in (1, 2, 6):
            self.keep(loss)
        if k in (2, 3):
            self.keep(hidden)
        if k in (3, 5):
            self.keep(*(p.grad for p in model.parameters() if p.grad is not None))
        if k == 4:
            self.read.append(loss.detach().cpu())

    def add_up(self, which: int, k: int) -> None:
        x, y = self.batch(4)
        loss = F.cross_entropy(self.models[which](x), y) / 2
        loss.backward()
        if k % 2:
            self.keep(loss)

    def evaluate(self, which: int, k: int) -> None:
        model = self.models[which].eval()
        with torch.no_grad():
            self.keep(model(self.batch((4, 8)[k % 2])[0]))
        model.train()

    def average(self, which: int, k: int) -> None:
        with torch.no_grad():
            for mine, p in zip(self.averages[which], self.models[which].parameters(), strict=True):
                mine.lerp_(p, 0.1 * (1 + k % 3))

    def swap(self, which: int, k: int) -> None:
        for i, p in enumerate(self.models[which].parameters()):
            p.data, self.averages[which][i] = self.averages[which][i], p.data

    def save(self, which: int, k: int) -> None:
        state = self.models[which].state_dict()
        self.saved[which] = state if k % 4 == 3 else copy.deepcopy(state)

    def load(self, which: int, k: int) -> None:
        state = self.saved[which]
        if k % 2:
            state = {name: value.clone() for name, value in state.items()}
            self.models[which].load_state_dict(state, assign=True)
            self.optimizers[which] = self.optimizer(self.models[which])
        else:
            self.models[which].load_state_dict(state)

    def resume(self, which: int, k: int) -> None:
        """The optimizer's state goes through a copy."""
        state = copy.deepcopy(self.optimizers[which].state_dict())
        self.optimizers[which] = self.optimizer(self.models[which])
        self.optimizers[which].load_state_dict(state)

    def rate(self, which: int, k: int) -> None:
        for group in self.optimizers[which].param_groups:
            group["lr"] *= (0.5, 0.9, 1.1, 1.0)[k % 4]

    def carry(self, which: int, k: int) -> None:
        """What a step made is what later ones begin with."""
        weight = self.models[which].first.weight.detach()
        self.carried = torch.tanh(self.carried * 0.5 + weight.mean(0) * (1 + k))
        if k % 2:
            self.keep(self.carried)

    def write(self, which: int, k: int) -> None:
        """To what was kept: all of it, a part, a gradient."""
        found = self.one()
        if found is None:
            return
        if k % 4 == 0:
            found.mul_(0.5)
        elif k % 4 == 1:
            found.zero_()
        elif k % 4 == 2:
            found.reshape(-1)[:1].add_(1.0)
        else:
            for p in self.models[which].parameters():
                if p.grad is not None:
                    p.grad.add_(0.01)

    def derive(self, which: int, k: int) -> None:
        """More of what was kept: a view, a sum, another name, a place that was told."""
        found = self.one()
        if found is None:
            return
        if k % 4 == 0:
            self.kept.append(found.view(-1)[::2])
        elif k % 4 == 1:
            self.keep(found.cumsum(-1) if found.dim() else found * 2)
        elif k % 4 == 2:
            self.kept.append(found.t() if found.dim() == 2 else found)
        else:
            self.told.append((found, found.data_ptr()))

    def gradients(self, which: int, k: int) -> None:
        """Gradients that the program makes, takes away or shares."""
        for p in self.models[which].parameters():
            if k % 3 == 0:
                p.grad = torch.full_like(p, 0.01)
            elif k % 3 == 1:
                p.grad = None
            elif p.grad is not None:
                self.kept.append(p.grad)
                p.grad = p.grad * 2

    def travel(self, which: int, k: int) -> None:
        """The parameters leave the device, and come to other places."""
        model = self.models[which]
        if self.device == "cpu":  # where a way back would change nothing
            model._apply(torch.clone)
        else:
            model.cpu()
        if k % 2:
            with torch.no_grad():
                model.last.bias.add_(0.1)
        model.to(self.device)

    def freeze(self, which: int, k: int) -> None:
        """One layer learns no more, or again."""
        layer = (self.models[which].first, self.models[which].norm)[k % 2]
        for p in layer.parameters():
            p.requires_grad_(not p.requires_grad)

    def stop(self, which: int, k: int) -> None:
        """An exception after the forward, or after the backward, and the program goes on."""
        try:
            x, y = self.batch(8)
            loss = F.cross_entropy(self.models[which](x), y)
            if k % 3 == 0:
                raise Stopped
            loss.backward()
            if k % 3 == 1:
                raise Stopped
            self.keep(loss)
            self.models[which](x[:, :5])  # of the wrong size
        except (Stopped, RuntimeError):
            if k % 2:
                self.optimizers[which].zero_grad()

    def fault(self, which: int, k: int) -> None:
        """A step of its own, whose operator finds a wrong index now and then."""
        if self.device != "cpu":
            helpers.flush()
        index = torch.tensor([3, 99 if k == 7 else k, 5]).to(self.device)
        try:
            made = torch.tanh(self.data.index_select(0, index) * 2)
            if self.device != "cpu":
                helpers.synchronize()
            self.keep(made)
        except (IndexError, RuntimeError):
            self.carried = self.carried * 0.5

    def cut(self, which: int, k: int) -> None:
        """The step ends here; captured work may go."""
        if self.device == "cpu":
            return
        helpers.flush()
        if k == 0:
            torch.acc.empty_cache()

    def starve(self, which: int, k: int) -> None:
        """The step ends here, and one of its allocations fails, or two: it waits, and goes on."""
        if self.device == "cpu":
            return
        extension = helpers.extension()
        extension.fail_allocations(k, 1 + which, 1)
        with contextlib.suppress(torch.OutOfMemoryError):
            helpers.synchronize()
        extension.fail_allocations(0, 0, 0)
        helpers.synchronize()

    def look(self, which: int, k: int) -> None:
        found = self.one()
        if found is not None:
            self.read.append(found.cpu().clone())

    def step(self, which: int, k: int) -> None:
        """Of the optimizer alone."""
        self.optimizers[which].step()
        if k % 2:
            self.optimizers[which].zero_grad(set_to_none=k % 4 == 1)

    def results(self) -> list[Tensor]:
        for each, address in self.told:
            assert each.data_ptr() == address, "an address that was told has changed"
        found = [*self.read, *self.kept, self.carried, *(each for each, _ in self.told)]
        for i, model in enumerate(self.models):
            found += [*model.state_dict().values(), *self.averages[i], *self.saved[i].values()]
            found += [p.grad for p in model.parameters() if p.grad is not None]
            states = self.optimizers[i].state.values()
            found += [v for s in states for v in s.values() if isinstance(v, Tensor)]
        return [each.detach().cpu() for each in found]


Action = tuple[str, int, int]
ACTIONS = {
    "train": 8,
    "add_up": 2,
    "evaluate": 2,
    "average": 2,
    "swap": 1,
    "save": 1,
    "load": 1,
    "resume": 1,
    "rate": 1,
    "carry": 2,
    "write": 2,
    "derive": 2,
    "gradients": 1,
    "travel": 1,
    "freeze": 1,
    "stop": 2,
    "fault": 1,
    "cut": 3,
    "starve": 1,
    "look": 2,
    "step": 1,
}


def program_of(seed: int) -> list[Action]:
    """A few actions that come again, and others in between."""
    chosen = random.Random(seed)

    def action() -> Action:
        (name,) = chosen.choices(list(ACTIONS), list(ACTIONS.values()))
        return name, chosen.randrange(2), chosen.randrange(8)

    repeated = [("train", 0, chosen.randrange(8)), *(action() for _ in range(chosen.randrange(5)))]
    if chosen.random() < 0.7:
        repeated.append(("cut", 0, 1))
    made: list[Action] = []
    for _ in range(TURNS):
        made += repeated
        while chosen.random() < 0.3:
            made.append(action())
    return made


def run(device: str, seed: int, program: list[Action]) -> list[Tensor]:
    state = Run(device, seed)
    for name, which, k in program:
        getattr(state, name)(which, k)
    return state.results()


def difference(mine: list[Tensor], theirs: list[Tensor]) -> str:
    if len(mine) != len(theirs):
        return f"{len(mine)} results instead of {len(theirs)}"
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if a.shape != b.shape or not torch.allclose(a, b, 1e-6, 1e-9, equal_nan=True):
            return f"result {i} of {len(mine)}, {tuple(b.shape)}"
    return ""


def fails(seed: int, program: list[Action]) -> str:
    """What is wrong with a program on the device; empty: nothing."""
    try:
        theirs = run("cpu", seed, program)
    except Exception:
        return ""  # eager refuses it, for example a gradient that has gone
    try:
        mine = run(helpers.DEVICE, seed, program)
    except Exception as error:
        # An operator that has written a part of what it writes is not made once more.
        if "no valid contents" in str(error) and "injected: can't allocate memory" in str(error):
            return ""
        return f"{type(error).__name__}: {str(error)[:300]}"
    return difference(mine, theirs)


def smallest(seed: int, program: list[Action], fails: Callable[..., str]) -> list[Action]:
    """Fewer actions that fail still."""
    size = len(program) // 2
    while size:
        at = 0
        while at < len(program):
            shorter = program[:at] + program[at + size :]
            if fails(seed, shorter):
                program = shorter
            else:
                at += size
        size //= 2
    return program


def search(programs: int, seed: int) -> int:
    """How many of them were run; raises with the smallest program that fails."""
    for each in range(seed, seed + programs):
        program = program_of(each)
        if not (why := fails(each, program)):
            continue
        shortest = smallest(each, program, fails)
        lines = "\n".join(map(str, shortest))
        raise AssertionError(f"seed {each}: {fails(each, shortest) or why}\n{lines}")
    return programs


def main() -> None:
    helpers.load_device()
    extension = helpers.extension()
    extension.capture_plans(True)
    torch.use_deterministic_algorithms(True)  # no trials of kernels
    torch.set_num_threads(1)
    if "operators" in sys.argv:
        extension.skip_passes(helpers.BIT_BY_BIT)
    if "gpu" in sys.argv:
        helpers.emulate_gpu()
    if "refused" in sys.argv:
        extension.refuse_captures(REFUSED)
    count = search(int(sys.argv[1]), int(sys.argv[2]))
    stats = helpers.stats()
    print(f"{count} programs, {stats['captures']} captures, {stats['captures_submitted']} submits")


if __name__ == "__main__":
    main()
