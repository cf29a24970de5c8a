"""What the program puts in the place of something that a captured step knows, or adds beside it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchacc
from tests.python.captured import ACC, Trained, batches, captured, make_mlp, ones, sgd
from torchacc_device import _C, _boundary

pytestmark = [
    pytest.mark.usefixtures("acc_only"),
    pytest.mark.skipif(_C.mode() in ("eager", "nofuse"), reason="nothing is recorded as a whole"),
]


def pair() -> list[nn.Linear]:
    return [nn.Linear(4, 1).to(ACC) for _ in range(2)]


NET: nn.Module | None = None


def test_modules_that_variables_name_while_the_old_ones_live() -> None:
    nets, x = pair(), ones()
    net = nets[0]
    step = captured(lambda x: net(x), x)
    net = nets[1]
    with pytest.raises(RuntimeError, match=r"the variable 'net' of the function is another object"):
        step(x)
    net = nets[0]
    assert step(x).equal(nets[0](x))
    global NET
    NET = nets[0]
    step = captured(lambda x: NET(x), x)
    try:
        NET = nets[1]
        with pytest.raises(RuntimeError, match=r"the variable 'NET' of the function is another"):
            step(x)
    finally:
        NET = None


def test_optimizers_that_variables_name_while_the_old_ones_live() -> None:
    model, x = make_mlp().to(ACC), torch.ones(2, 8, device=ACC)
    optimizers = [sgd(model.parameters()) for _ in range(2)]
    optimizer = optimizers[0]

    def fn(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    step = captured(fn, x)
    optimizer = optimizers[1]
    with pytest.raises(RuntimeError, match=r"the variable 'optimizer' of the function is another"):
        step(x)


def test_tensors_that_variables_name_while_the_old_ones_live() -> None:
    """In a variable, a container and an attribute, of modules and other objects."""
    x = torch.ones(3, device=ACC)
    masks = [torch.full((3,), float(i), device=ACC) for i in range(2)]

    class Masking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = masks[0]
            self.inner = {"all": [masks[0]]}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.mask + self.inner["all"][0]

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x - self.mask

    masking = Masking()
    for fn in (lambda x: masking(x), masking.step):
        step = captured(fn, x)
        masking.mask = masks[1]
        with pytest.raises(RuntimeError, match=r"'mask' of .* is another object"):
            step(x)
        masking.mask = masks[0]
        step(x)
    step = captured(lambda x: masking(x), x)
    masking.inner["all"][0] = masks[1]
    with pytest.raises(RuntimeError, match=r"'inner' of a Masking\['all'\]\[0\] is another object"):
        step(x)
    state = {"mask": masks[0]}
    step = captured(lambda x: x + state["mask"], x)
    state["mask"] = masks[1]
    with pytest.raises(RuntimeError, match=r"the variable 'state' of the function\['mask'\] is an"):
        step(x)
    state = {"mask": masks[0], "more": 1}  # another one with the same tensor
    step(x)
    mask = masks[0]
    step = captured(lambda x: x + mask, x)
    mask = masks[0][:]  # which is the same one to the step
    assert step(x).tolist() == [1.0] * 3
    mask = masks[1]
    with pytest.raises(RuntimeError, match=r"the variable 'mask' of the function is another obj"):
        step(x)


def test_tensors_in_the_place_of_others_that_require_gradients() -> None:
    """The same memory, but replays compute no gradient for it."""
    x = torch.ones(3, device=ACC)
    mask = torch.ones(3, device=ACC)
    step = captured(lambda x: x * mask, x)
    first, mask = mask, mask.detach()
    step(x)
    for other in (mask.detach().requires_grad_(), first.requires_grad_()):
        mask = other
        with pytest.raises(RuntimeError, match=r"requires_grad of the variable 'mask' .* is True"):
            step(x)


def test_entries_that_are_added() -> None:
    """Where all of a container is used, more of it would be."""
    nets, x = [nn.Linear(4, 4).to(ACC) for _ in range(2)], ones()

    def fn(x: torch.Tensor) -> torch.Tensor:
        for net in nets:
            x = net(x)
        return x

    step = captured(fn, x)
    nets.append(nets[0])
    with pytest.raises(RuntimeError, match=r"entries of the variable 'nets' .* have 3 entries and"):
        step(x)
    nets.pop()
    step(x)
    named = {"first": nets[0]}
    of_dict = captured(lambda x: sum(net(x) for net in named.values()), x)
    named["second"] = nets[1]
    with pytest.raises(RuntimeError, match=r"entries of the variable 'named' .* have 2 entries"):
        of_dict(x)
    nets[0], nets[1] = nets[1], nets[0]
    with pytest.raises(RuntimeError, match=r"the variable 'nets' of the function\[0\] is another"):
        step(x)


def test_what_is_guarded_is_not_held() -> None:
    """Neither the modules and tensors that variables name, nor optimizers and their state."""
    trained = Trained(make_mlp(), sgd)
    mask = torch.ones(4, device=ACC)
    kept = {"net": nn.Linear(4, 4).to(ACC), "mask": mask}
    x, y = (each.to(ACC) for each in batches(1, 5, 8)[0])

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return trained.step(x, y) + kept["net"](kept["mask"]).sum()

    step = captured(fn, x, y)
    momentum = trained.optimizer.state[trained.model[0].weight]["momentum_buffer"]
    gone = [weakref.ref(each) for each in (momentum, trained.optimizer, kept["net"], mask)]
    del momentum, mask
    kept.clear()
    del trained.optimizer
    gc.collect()
    assert [each() for each in gone] == [None] * 4
    with pytest.raises(RuntimeError, match="is gone"):
        step(x, y)


def test_parameters_can_be_swapped() -> None:
    """As `Module.to` may do, where nothing refers to them weakly."""
    model, x = nn.Linear(4, 4).to(ACC).requires_grad_(False), ones()
    step = captured(lambda x: model(x), x)
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.ones(4, 4, device=ACC)))
    with pytest.raises(RuntimeError, match="parameter 'weight' of a Linear has another storage"):
        step(x)


def test_parameters_that_are_trained_cannot_be_swapped() -> None:
    """As long as the step is there, which refers weakly to what it writes."""
    trained, x, y = Trained(make_mlp(), sgd), *(b.to(ACC) for b in batches(1, 5, 8)[0])
    step = captured(trained.step, x, y)
    weight = trained.model[0].weight
    other = nn.Parameter(torch.ones_like(weight))
    with pytest.raises(RuntimeError, match="weakrefs"):
        torch.utils.swap_tensors(weight, other)
    step(x, y)
    assert step.replays == 2
    del step
    gc.collect()
    torch.utils.swap_tensors(weight, other)
    assert weight.equal(torch.ones_like(weight))


def test_loops_that_rebind_what_the_step_does_not_use() -> None:
    """An ordinary one: it is replayed."""

    class Loop:
        def __init__(self) -> None:
            self.trained = Trained(make_mlp(), sgd)
            self.other = Trained(make_mlp(), sgd)
            self.schedule = torch.optim.lr_scheduler.StepLR(self.other.optimizer, 1, 0.5)
            self.average = {k: v.clone() for k, v in self.trained.model.state_dict().items()}
            self.losses: list[Any] = []
            self.batch: Any = None
            self.best: Any = None
            self.seen = 0
            self.scores = torch.zeros(1)

        def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.seen += len(x)
            loss = self.trained.step(x, y)
            self.losses.append(loss.detach())
            assert self.batch is not None and self.best is self.best
            assert self.scores.shape == (1,) and len(self.losses) > 0
            with torch.no_grad():
                for key, value in self.trained.model.state_dict().items():
                    self.average[key].lerp_(value, 0.1)
            return loss

    loop = Loop()
    step = torchacc.capture(loop.step)
    history = []
    for i, (x, y) in enumerate(batches(8, 5, 8)):
        loop.batch = (x, y)
        loss = step(x, y)
        loop.losses.append(loss)
        history.append(loss.item())
        loop.best = {k: v.clone() for k, v in loop.trained.model.state_dict().items()}
        loop.scores = torch.full((1,), float(i))
        loop.other.step(x.to(ACC), y.to(ACC))
        loop.schedule.step()
        loop.trained.model.eval()
        with torch.no_grad():
            loop.trained.model(x.to(ACC))
        loop.trained.model.train()
    assert step.replays == 5
    assert len(set(history)) == 8


# --- what is not on the device --------------------------------------------------------------------


def test_tensors_on_the_cpu_that_the_function_knows() -> None:
    """They are constants: what they hold may not change, by whatever is written or rebound."""
    x = torch.ones(2, device=ACC)
    weights, scale = torch.tensor([1.0, 2.0]), torch.tensor(1.0)
    step = captured(lambda x: x * weights.to(ACC) / scale, x)
    weights[0] = 6.0
    with pytest.raises(RuntimeError, match=r"'weights' of the function is tensor\(\[6\., 2\.\]\)"):
        step(x)
    weights[0] = 1.0
    assert step(x).tolist() == [1.0, 2.0]
    scale.fill_(2.0)
    with pytest.raises(RuntimeError, match=r"'scale' of the function is tensor\(2\.\) and was"):
        step(x)
    scale = torch.tensor(1.0)
    step(x)
    weights.numpy()[1] = 3.0
    with pytest.raises(RuntimeError, match=r"'weights' of the function is tensor\(\[1\., 3\.\]\)"):
        step(x)
    weights = [1.0, 2.0]
    with pytest.raises(RuntimeError, match=r"'weights' of the function is \[1\.0, 2\.0\] and"):
        step(x)


def test_large_tensors_on_the_cpu() -> None:
    """Up to 1 MiB they are compared where they were written, and above that not copied."""
    x = torch.ones(2, device=ACC)
    table = torch.zeros(1 << 18)
    data = torch.zeros((1 << 18) + 1)
    array = np.zeros((1 << 17) + 1)
    step = captured(lambda x: x + table[:2].to(ACC) + data[:2].to(ACC) + len(array), x)
    table[0] = 0.0
    step(x)
    table[9] = 1.0
    with pytest.raises(RuntimeError, match=r"the variable 'table' of the function is tensor"):
        step(x)
    table[9] = 0.0
    table.data = torch.ones(1 << 18)
    with pytest.raises(RuntimeError, match=r"the variable 'table' of the function is tensor"):
        step(x)
    table.data = torch.zeros(1 << 18)
    array[0] = 5.0
    step(x)
    data[0] = 0.0
    with pytest.raises(RuntimeError, match=r"'data' .* was written .* 1048580 bytes it is too"):
        step(x)
    step = captured(lambda x: x + data[:2].to(ACC), x)
    data = data.clone()
    with pytest.raises(RuntimeError, match=r"'data' of the function is another object"):
        step(x)


def test_tensors_on_the_cpu_that_change_all_the_time() -> None:
    """Calls with different ones computed the same."""
    x = torch.ones(2, device=ACC)
    seen, table = torch.zeros(1), torch.zeros(1 << 19)
    step = torchacc.capture(lambda x: x * seen.numel() + table.dim())
    for _ in range(6):
        step(x)
        seen += 1
        table[0] += 1
    assert step.replays == 3


def test_data_sets_that_the_function_indexes() -> None:
    """Of more than 1 MiB in all nothing is copied, and entries may be replaced."""
    x = torch.ones(2, device=ACC)
    data = [(torch.zeros(1 << 17), i) for i in range(3)]
    small = [(torch.zeros(2), i) for i in range(3)]
    step = captured(lambda x: x * len(data) + small[0][0].to(ACC), x)
    data[0][0][0] = 1.0
    data[1] = (torch.ones(1 << 17), 1)
    step(x)
    small[1] = (torch.ones(2), 1)
    with pytest.raises(
        RuntimeError, match=r"'small' of the function\[1\]\[0\] is tensor\(\[1\., 1"
    ):
        step(x)


def test_sparse_tensors_on_the_cpu_are_left_alone() -> None:
    x = torch.ones(2, device=ACC)
    known = [torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(), torch.empty(2, device="meta")]
    step = captured(lambda x: x * len(known), x)
    known[0] = torch.eye(3).to_sparse()
    assert step(x).tolist() == [3.0, 3.0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_on_the_cpu_are_left_alone() -> None:
    """Those of layout strided have no size, and one that nobody uses is met all the same."""
    x = torch.ones(2, device=ACC)
    known = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    step = captured(lambda x: x * known.size(0), x)
    known = torch.nested.nested_tensor([torch.ones(2), torch.ones(4)])
    assert step(x).tolist() == [2.0, 2.0]


def test_arrays_that_the_function_knows() -> None:
    x = torch.ones(2, device=ACC)
    weights = np.array([1.0, 2.0], dtype=np.float32)
    step = captured(lambda x: x * torch.from_numpy(weights).to(ACC), x)
    weights = weights.copy()
    step(x)
    weights[0] = 6.0
    with pytest.raises(RuntimeError, match=r"'weights' of the function is array\(\[6\., 2\.\]"):
        step(x)


class Shifted(nn.Module):
    """Keeps its number on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def test_buffers_on_the_cpu() -> None:
    x, shifted = torch.ones(2, device=ACC), Shifted()
    step = captured(lambda x: shifted(x), x)
    shifted.shift.fill_(2.0)
    with pytest.raises(RuntimeError, match=r"buffer 'shift' of a Shifted is tensor\(2\.\) and was"):
        step(x)


# --- members of modules ---------------------------------------------------------------------------


def test_members_that_are_added() -> None:
    x = ones()
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU()).to(ACC)
    step = captured(lambda x: model(x), x)
    model[0].bias = nn.Parameter(torch.ones(4, device=ACC))
    with pytest.raises(RuntimeError, match=r"parameter 'bias' of a Linear is another object"):
        step(x)
    model[0].bias = None
    step(x)
    model.append(nn.ReLU())
    with pytest.raises(RuntimeError, match=r"the modules of a Sequential have 3 entries and had 2"):
        step(x)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.factors = nn.ParameterList([torch.ones(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        for factor in self.factors:
            x = x * factor
        return x


@pytest.mark.parametrize("name", ["layers", "factors"])
def test_lists_of_modules_and_parameters_that_grow(name: str) -> None:
    x, model = ones(), Layers().to(ACC)
    step = captured(lambda x: model(x), x)
    more = nn.Linear(4, 4) if name == "layers" else nn.Parameter(torch.ones(4))
    getattr(model, name).append(more.to(ACC))
    with pytest.raises(RuntimeError, match=r"s of a (Module|Parameter)List have 2 entries and had"):
        step(x)


def test_parameters_outside_of_modules() -> None:
    x = torch.ones(4, device=ACC)
    weights = [torch.zeros(4, device=ACC, requires_grad=True) for _ in range(2)]

    def fn(x: torch.Tensor) -> torch.Tensor:
        loss = ((weights[0] + weights[1] - x) ** 2).sum()
        loss.backward()
        with torch.no_grad():
            for each in weights:
                if each.grad is not None:
                    each -= 0.1 * each.grad
                    each.grad = None
        return loss

    step = captured(fn, x)
    weights[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"requires_grad of .* is False and was True"):
        step(x)
    weights[0].requires_grad_(True)
    step(x)
    weights[0].data = torch.zeros(4, device=ACC)
    with pytest.raises(RuntimeError, match="has another storage than at capture"):
        step(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight, flat: setattr(weight, "data", flat[4:].view(2, 2)),
        lambda weight, flat: setattr(weight, "data", weight.data.t()),
        lambda weight, flat: setattr(weight, "data", flat[:2].expand(2, 2)),
    ],
    ids=["offset", "transposed", "expanded"],
)
def test_where_parameters_lie_in_their_storage(change: Callable[..., None]) -> None:
    flat = torch.arange(8.0, device=ACC)
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(flat[:4].view(2, 2))
    x = torch.ones(1, 2, device=ACC)
    step = captured(lambda x: model(x), x)
    change(model.weight, flat)
    with pytest.raises(RuntimeError, match=r"parameter 'weight' of a Linear lies otherwise"):
        step(x)


def test_modes_of_scripted_modules() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)).to(ACC)
    scripted = torch.jit.script(module)
    x = ones()
    step = captured(lambda x: scripted(x), x)
    next(scripted.children()).eval()
    with pytest.raises(RuntimeError, match=r"the mode of a .*'training'\) is False and was True"):
        step(x)
    scripted.train()
    step(x)
    scripted.eval()
    with pytest.raises(RuntimeError, match=r"the mode of a .*'training'\) is False and was True"):
        step(x)


# --- optimizers -----------------------------------------------------------------------------------


def test_optimizers_that_do_not_step_are_free() -> None:
    trained, x, y = Trained(make_mlp(), sgd), *(b.to(ACC) for b in batches(1, 5, 8)[0])
    other = torch.optim.SGD(trained.model.parameters(), lr=0.5, momentum=0.5)
    trained.other = other
    F.mse_loss(trained.model(x), y).backward()
    other.step()
    step = captured(trained.step, x, y)
    other.param_groups[0]["lr"] = 0.25
    step(x, y)
    state = weakref.ref(other.state[trained.model[0].weight]["momentum_buffer"])
    del trained.other, other
    gc.collect()
    assert state() is None
    step(x, y)
    trained.optimizer.param_groups[0]["lr"] = 0.25
    with pytest.raises(RuntimeError, match=r"'lr' of SGD is 0\.25"):
        step(x, y)


def test_optimizers_of_programs_that_mark_their_steps_themselves() -> None:
    """Nobody notices there which of them step."""
    trained, x, y = Trained(make_mlp(), sgd), *(b.to(ACC) for b in batches(1, 5, 8)[0])
    _boundary.uninstall()
    try:
        step = captured(trained.step, x, y)
    finally:
        _boundary.install()
    trained.optimizer.param_groups[0]["lr"] = 0.25
    with pytest.raises(RuntimeError, match=r"'lr' of SGD is 0\.25"):
        step(x, y)
