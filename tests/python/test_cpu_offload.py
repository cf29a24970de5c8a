"""Activation offload: the same gradients, less memory of the device, and nothing left behind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests import helpers
from tests.helpers import drawn
from torchacc.utils import cpu_offload
from torchacc.utils.cpu_offload import get_cpu_offload_context

ROWS, WIDTH, LAYERS = 64, 32, 4


class Layer(nn.Module):
    """Saves its input twice, as a view too, results of operators, a mask, and parameters."""

    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x)).tanh()
        return x + self.dropout(self.down(h * h.flip(0))) * x.t().t()


def layers(dropout: float = 0.25) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer(dropout) for _ in range(LAYERS)).to(helpers.DEVICE)


def run(net, x, offload=None):
    for layer in net:
        if offload is None:
            x = layer(x)
        else:
            context, synchronizer = offload
            with context:
                x = layer(x)
            x = synchronizer(x)
    return x


def gradients(net, offload=None):
    net.zero_grad()
    x = drawn(ROWS, WIDTH, device=helpers.DEVICE, grad=True)
    torch.manual_seed(5)
    run(net, x, offload).square().mean().backward()
    return [x.grad.cpu(), *(p.grad.cpu() for p in net.parameters())]


@pytest.mark.parametrize(
    ("count", "ahead", "pinned"), [(1, 1, False), (2, 0, False), (9, 9, False), (2, 1, True)]
)
def test_gradients_are_the_same(device, unfused, monkeypatch, count, ahead, pinned):
    """With pinned memory copies are waited for by events, as on a GPU."""
    if pinned:
        monkeypatch.setattr(cpu_offload, "reads_pinned_memory", lambda device: True)
    net = layers()
    expected = gradients(net)
    offload = get_cpu_offload_context(count, ahead)
    for _ in range(2):
        helpers.assert_same(gradients(net, offload), expected)


def peak(net, offload=None):
    """Bytes above those before a step, at its worst, and what is there after it."""
    x = drawn(ROWS, WIDTH, device=helpers.DEVICE)
    for _ in range(4):
        net.zero_grad(set_to_none=False)
        helpers.synchronize()
        torch.acc.reset_peak_memory_stats()
        before = torch.acc.memory_allocated()
        with helpers.counting() as counted:
            loss = run(net, x, offload).square().mean()
            loss.backward()
            helpers.synchronize()
    most, after = torch.acc.max_memory_allocated() - before, torch.acc.memory_allocated() - before
    return most, after, counted["plans_built"]


@pytest.mark.usefixtures("recording", "unfused", "only_this_frees")
def test_less_of_the_device_is_needed_and_all_of_it_comes_back(acc_only):
    net = layers(dropout=0.0)
    gradients(net)
    whole, _, _ = peak(net)
    part, after, plans = peak(net, get_cpu_offload_context(LAYERS - 1))
    # Of three layers at most two are back at once.
    one_layer = 4 * ROWS * WIDTH * (2 + 3 * 4)
    assert part < whole - 0.9 * one_layer
    assert after <= 1024 and plans == 0


@pytest.fixture
def moved(monkeypatch):
    """How many elements each block has that is offloaded."""
    sizes, offloaded = [], cpu_offload._Block.offload

    def offload_it(block):
        sizes.append(block._there.numel())
        return offloaded(block)

    monkeypatch.setattr(cpu_offload._Block, "offload", offload_it)
    return sizes


def test_what_is_offloaded_goes_to_the_host_whatever_the_default_device(acc_only, monkeypatch):
    places = []
    offload = cpu_offload._Block.offload

    def noting(block):
        size = offload(block)
        places.append(block._host.device.type)
        return size

    monkeypatch.setattr(cpu_offload._Block, "offload", noting)
    net, x = layers(0), drawn(ROWS, WIDTH, device=acc_only)
    with torch.device(acc_only):
        run(net, x, get_cpu_offload_context(LAYERS)).square().mean().backward()
    assert set(places) == {"cpu"}


def test_parameters_stay_and_other_devices_are_left_alone(device, moved):
    net = nn.Linear(8, 8).to(device)
    offload = get_cpu_offload_context()
    run([net], torch.ones(2, 8, device=device), offload).sum().backward()
    assert moved == ([16] if device != "cpu" else [])
    net.cpu()
    run([net], torch.ones(2, 8), offload).sum().backward()
    assert len(moved) == (1 if device != "cpu" else 0)


def test_a_piece_of_a_buffer_stays_and_pieces_of_activations_do_not(acc_only, moved):
    mask = torch.ones(100, 100, device=helpers.DEVICE)
    x = torch.ones(8, 8, device=helpers.DEVICE, requires_grad=True)
    (y,) = run([lambda x: [(x * 2)[:4] * mask[:4, :8]]], x, get_cpu_offload_context())
    assert moved == []
    (y,) = run([lambda x: [(x * 2)[:4].square()]], x, get_cpu_offload_context())
    y.sum().backward()
    assert moved == [64]


def test_a_pass_without_backward_does_not_count_for_the_next(device, caplog):
    net = layers()
    offload = get_cpu_offload_context(1, debug=True)
    x = drawn(ROWS, WIDTH, device=device)
    with caplog.at_level("INFO", logger="TorchAcc"):
        for _ in range(3):
            run(net, x, offload)  # its graph is gone at once
        with torch.no_grad():
            run(net, x, offload)
        run(net, x, offload).sum().backward()
    said = [r.message for r in caplog.records if "are offloaded" in r.message]
    assert len(said) == (4 if device != "cpu" else 0)
    assert all(text.startswith("layer 0: 0.1 MiB") for text in said)


def test_backward_may_run_twice_and_from_the_middle(device, unfused):
    net = layers(0.0)
    x = drawn(ROWS, WIDTH, device=device, grad=True)

    def twice(offload):
        loss = run(net, x, offload).square().sum()
        once = torch.autograd.grad(loss, [x], retain_graph=True)
        return [g.cpu() for g in (*once, *torch.autograd.grad(loss, [x, net[1].up.weight]))]

    helpers.assert_same(twice(get_cpu_offload_context(LAYERS)), twice(None))


def test_layers_may_return_more_than_a_tensor(device):
    context, synchronizer = get_cpu_offload_context()
    x = torch.ones(3, device=device, requires_grad=True)
    with context:
        outputs = {"y": x.exp(), "more": (x.detach(), "text", x * x)}
    got = synchronizer(outputs)
    assert list(got) == ["y", "more"] and got["more"][1] == "text"
    assert got["y"] is not outputs["y"] and got["more"][2] is outputs["more"][2]
    (got["y"].sum() + got["more"][2].sum()).backward()
    torch.testing.assert_close(x.grad.cpu(), torch.full((3,), 2 + torch.e))


def test_a_layer_that_fails_is_forgotten(device, monkeypatch):
    net = layers()
    context, synchronizer = get_cpu_offload_context(1, debug=True)
    x = drawn(ROWS, WIDTH, device=device, grad=True)
    with pytest.raises(ZeroDivisionError), context:
        kept = net[0](x)
        raise ZeroDivisionError
    moved = []
    monkeypatch.setattr(cpu_offload.logger, "info", lambda *text: moved.append(text[1]))
    run(net, x, (context, synchronizer)).sum().backward()
    assert kept is not None and moved == ([0] if device != "cpu" else [])


def test_conjugates_are_what_they_were(device):
    x = torch.tensor([1 + 2j, 3 - 1j])

    def gradient(where, offload):
        z = x.to(where).requires_grad_()
        (y,) = run([lambda z: [(z.conj() * z * z).exp()]], z, offload)
        y.abs().sum().backward()
        return z.grad.cpu()

    mine = gradient(device, get_cpu_offload_context())
    torch.testing.assert_close(mine, gradient("cpu", None))


@pytest.mark.parametrize("inside", [True, False])
def test_a_change_in_place_of_what_backward_needs_is_noticed(device, inside):
    context, synchronizer = get_cpu_offload_context()
    weight = nn.Parameter(torch.ones(3, device=device))
    x = torch.ones(3, device=device, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=r"(?s)shape \(3,\).*in place|modified by an inplace"):
        with context:
            y = (x * weight).exp()
            if inside:
                y += 1
        y = synchronizer(y)
        with torch.no_grad():
            weight += 1
        y.sum().backward()


def test_what_a_layer_returned_may_be_changed_in_place_after_its_end(acc_only):
    x = torch.ones(3, device=helpers.DEVICE, requires_grad=True)
    context, synchronizer = get_cpu_offload_context()
    with context:
        y = (2 * x).exp()
    y = synchronizer(y)
    y *= 3
    (y * y).sum().backward()
    expected = torch.full((3,), 2 * 9 * 2.0 * torch.e**4)
    torch.testing.assert_close(x.grad.cpu(), expected)


def test_tensors_in_wrappers_are_left_alone(acc_only):
    dist.init_process_group("cpu:fake,acc:fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh(helpers.DEVICE, (2,))
        x = torch.ones(2, 3, device=helpers.DEVICE, requires_grad=True)
        context, synchronizer = get_cpu_offload_context()
        with context:
            y = (DTensor.from_local(x, mesh, [Shard(0)]) * 2).exp()
        synchronizer(y).to_local().sum().backward()
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(x.grad.cpu(), torch.full((2, 3), 2 * torch.e**2))


def test_negative_numbers_are_refused(device):
    with pytest.raises(ValueError, match="num_prefetch_layers = -1: should be at least 0"):
        get_cpu_offload_context(num_prefetch_layers=-1)
