"""Recurrent layers and cells: outputs, states and gradients have the bits of the CPU.

On a GPU, or on an emulated one, they are close, and no layer cuts a step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from tests import helpers

# Layers take the CPU's ways step by step; their bits are compared.
bit_by_bit = pytest.mark.usefixtures("unfused")
# The largest difference from the CPU's results, which are up to about 4, that those of CUDA's
# operators may have; gradients are sums over steps.
ERROR = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 8e-2, torch.float16: 1e-2}


LAYERS = {
    "lstm": torch.nn.LSTM,
    "gru": torch.nn.GRU,
    "tanh": torch.nn.RNN,
    "relu": lambda *sizes, **options: torch.nn.RNN(*sizes, nonlinearity="relu", **options),
}
OPTIONS: list[dict[str, object]] = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"batch_first": True, "num_layers": 2},
    {"bias": False, "bidirectional": True},
    {"dtype": torch.float64, "bidirectional": True},
    {"dtype": torch.bfloat16, "bidirectional": True, "num_layers": 2},
    {"dtype": torch.bfloat16, "bias": False},
    {"dtype": torch.float16},
]


def gradients(module: torch.nn.Module, results: list[torch.Tensor]) -> list[torch.Tensor]:
    sum(result.square().sum() for result in results).backward()
    return [p.grad.cpu() for p in module.parameters()]


def flat(result: object) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in flat(part)]


def padded(kind: str, options: dict[str, object], device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer = LAYERS[kind](7, 12, **options)
    x = torch.randn(4, 4, 7, dtype=options.get("dtype", torch.float32)).to(device)
    x.requires_grad_()
    layer.to(device)
    results = flat(layer(x))
    made = gradients(layer, results)
    return [*(r.detach().cpu() for r in results), *made, x.grad.cpu()]


def packed(kind: str, options: dict[str, object], device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer = LAYERS[kind](7, 12, **options).to(device)
    dtype = options.get("dtype", torch.float32)
    sequences = [torch.randn(n, 7, dtype=dtype).to(device).requires_grad_() for n in (2, 5, 5, 1)]
    output, state = layer(pack_sequence(sequences, enforce_sorted=False))
    results = [pad_packed_sequence(output)[0], *flat(state)]
    made = gradients(layer, results)
    return [*(r.detach().cpu() for r in results), *made, *(s.grad.cpu() for s in sequences)]


def all_equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    if helpers.kernels_of_a_gpu():  # where an LSTM is not oneDNN's, either
        return all_close(mine, theirs)
    return compare(mine, theirs, lambda dtype: 0.0)


def all_close(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    compare(mine, theirs, ERROR.__getitem__)


def compare(
    mine: list[torch.Tensor],
    theirs: list[torch.Tensor],
    error: Callable[[torch.dtype], float],
) -> None:
    assert len(mine) == len(theirs)
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        most = error(b.dtype)
        torch.testing.assert_close(a, b, rtol=most, atol=most, msg=lambda s, i=i: f"#{i}: {s}")


@bit_by_bit
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind: str, options: dict[str, object]) -> None:
    all_equal(padded(kind, options, "acc"), padded(kind, options, "cpu"))


@bit_by_bit
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_packed_sequences(kind: str, options: dict[str, object]) -> None:
    all_equal(packed(kind, options, "acc"), packed(kind, options, "cpu"))


@bit_by_bit
@pytest.mark.parametrize("run", [padded, packed], ids=["padded", "packed"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_lstm_with_projections(run, bidirectional: bool) -> None:
    options = {"proj_size": 5, "num_layers": 2, "bidirectional": bidirectional}
    all_equal(run("lstm", options, "acc"), run("lstm", options, "cpu"))


@bit_by_bit
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", [torch.nn.LSTMCell, torch.nn.GRUCell, torch.nn.RNNCell])
def test_cells(cell: type[torch.nn.Module], bias: bool) -> None:
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = cell(7, 12, bias=bias)
        x = torch.randn(3, 4, 7).to(device)
        module.to(device)
        state = None
        for step in x:
            state = module(step, state)
        results = flat(state)
        made = gradients(module, results)
        return [*(r.detach().cpu() for r in results), *made]

    all_equal(run("acc"), run("cpu"))


def test_dropout_between_layers_draws_and_keeps_the_rest() -> None:
    torch.manual_seed(0)
    layer = torch.nn.GRU(6, 64, num_layers=2, dropout=0.5).to("acc")
    x = torch.randn(3, 2, 6, device="acc")
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


@pytest.mark.parametrize("kind", LAYERS)
def test_no_step_is_refused(kind: str) -> None:
    with pytest.raises(RuntimeError, match="sequence length to be larger than 0"):
        LAYERS[kind](3, 4).to("acc")(torch.ones(0, 2, 3, device="acc"))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_states_and_parameters_for_other_layers_are_refused(kind: str, bidirectional: bool) -> None:
    """ATen reads beyond what it is given, or says so."""
    layer = LAYERS[kind](4, 5, 2, bidirectional=bidirectional).to("acc")
    operator = torch._VF.lstm if kind == "lstm" else getattr(torch._VF, layer.mode.lower())
    x = torch.ones(3, 2, 4, device="acc")
    runs = 4 if bidirectional else 2

    def run(states: int, weights: list[torch.Tensor], cells: int = runs) -> object:
        h, c = (torch.zeros(n, 2, 5, device="acc") for n in (states, cells))
        hx = (h, c) if kind == "lstm" else h
        return operator(x, hx, weights, True, 2, 0.0, False, bidirectional, False)

    weights = list(layer._flat_weights)
    run(runs, weights)
    for states in (0, 1, runs + 1):
        with pytest.raises(RuntimeError, match="hidden states for"):
            run(states, weights)
        if kind == "lstm":
            with pytest.raises(RuntimeError, match="hidden states for"):
                run(runs, weights, cells=states)
    for wrong in ([], weights[:1], weights[:runs], weights[:-1], weights + weights[4:]):
        with pytest.raises(RuntimeError, match="incorrect number of RNN parameters"):
            run(runs, wrong)


@pytest.mark.parametrize("kind", LAYERS)
def test_sizes_that_do_not_fit_are_refused(kind: str) -> None:
    """A state of one row would be broadcast, and oneDNN reads beyond it."""
    layer = LAYERS[kind](4, 5, bidirectional=True).to("acc")
    operator = torch._VF.lstm if kind == "lstm" else getattr(torch._VF, layer.mode.lower())

    def run(x: tuple[int, ...], h: tuple[int, ...], c: tuple[int, ...] = (2, 3, 5)) -> object:
        states = [torch.zeros(*sizes, device="acc") for sizes in (h, c)]
        hx = states if kind == "lstm" else states[0]
        weights = layer._flat_weights
        return operator(torch.ones(*x, device="acc"), hx, weights, True, 1, 0.0, False, True, False)

    run((2, 3, 4), (2, 3, 5))
    with pytest.raises(RuntimeError, match="input has inconsistent input_size: got 1 expected 4"):
        run((2, 3, 1), (2, 3, 5))
    with pytest.raises(RuntimeError, match="size 3 doesn't match hidden0 batch size 1"):
        run((2, 3, 4), (2, 1, 5))
    with pytest.raises(RuntimeError, match="hidden0 has inconsistent hidden_size: got 1, expec"):
        run((2, 3, 4), (2, 3, 1))
    if kind == "lstm":
        with pytest.raises(RuntimeError, match="size 3 doesn't match hidden1 batch size 1"):
            run((2, 3, 4), (2, 3, 5), (2, 1, 5))
        with pytest.raises(RuntimeError, match="hidden1 has inconsistent hidden_size: got 1, exp"):
            run((2, 3, 4), (2, 3, 5), (2, 3, 1))


@pytest.mark.parametrize("cell", [torch.nn.LSTMCell, torch.nn.GRUCell, torch.nn.RNNCell])
def test_cells_refuse_what_those_of_the_cpu_refuse(cell: type[torch.nn.Module]) -> None:
    sizes = [((1, 3), (4, 4)), ((4, 3), (1, 4)), ((4, 2), (4, 4)), ((4, 3), (4, 5))]
    for x, h in sizes:
        said = []
        for device in ("cpu", "acc"):
            state = torch.zeros(*h, device=device)
            hx = (state, state) if cell is torch.nn.LSTMCell else state
            with pytest.raises(RuntimeError) as error:
                cell(3, 4).to(device)(torch.zeros(*x, device=device), hx)
            said.append(str(error.value).split("\n")[0])
        assert said[0] in said[1]


# --- on a GPU -----------------------------------------------------------------------------------

# What ends a step, and nothing else: each other reason would cut a layer in two.
ENDS = {"flush_step"}


class Cells(torch.nn.Module):
    """A cell by hand, over the steps."""

    def __init__(self, cell: type[torch.nn.Module]) -> None:
        super().__init__()
        self.cell = cell(12, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        state = None
        for step in x:
            state = self.cell(step, state)
        return (state[0] if isinstance(state, tuple) else state,)


def packed_layer(layer: torch.nn.Module) -> torch.nn.Module:
    class Packed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.layer(pack_sequence([x[:, 0], x[:3, 1], x[:3, 2]]))[0].data,)

    return Packed()


NETWORKS: dict[str, Callable[[], torch.nn.Module]] = {
    "LSTM": lambda: torch.nn.LSTM(12, 16),
    "GRU": lambda: torch.nn.GRU(12, 16),
    "RNN": lambda: torch.nn.RNN(12, 16),
    "RNN of ReLU": lambda: torch.nn.RNN(12, 16, nonlinearity="relu"),
    "two layers, both ways": lambda: torch.nn.GRU(12, 16, num_layers=2, bidirectional=True),
    "LSTM, two layers, both ways": lambda: torch.nn.LSTM(12, 16, 2, bidirectional=True),
    "LSTM with projections": lambda: torch.nn.LSTM(12, 16, proj_size=8),
    "packed LSTM": lambda: packed_layer(torch.nn.LSTM(12, 16)),
    "packed GRU": lambda: packed_layer(torch.nn.GRU(12, 16, bidirectional=True)),
    "LSTMCell": lambda: Cells(torch.nn.LSTMCell),
    "GRUCell": lambda: Cells(torch.nn.GRUCell),
    "RNNCell": lambda: Cells(torch.nn.RNNCell),
}


def trained(name: str, device: str, steps: int) -> tuple[list[torch.Tensor], set[str], set[str]]:
    """Losses and parameters, why work was submitted, and what ran at once; but for the first step,
    which makes the optimizer's state."""
    torch.manual_seed(0)
    model = NETWORKS[name]()
    batches = torch.randn(steps, 5, 3, 12).to(device)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []

    def step(x: torch.Tensor) -> None:
        loss = model(x)[0].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    step(batches[0])
    helpers.flush()
    with helpers.counting() as counted:
        for x in batches[1:]:
            step(x)
    ends = {key for key in counted.after if key.startswith("flush_") and "/" not in key}
    direct = {key for key in counted.after if key.startswith("fallback") and counted[key]}
    results = [*losses, *(p.detach() for p in model.parameters())]
    return [r.cpu() for r in results], {key for key in ends if counted[key]}, direct


@pytest.mark.usefixtures("acc_only", "recording", "one_thread", "plans_of_a_gpu")
@pytest.mark.parametrize("name", NETWORKS)
def test_a_training_step_is_not_cut_on_a_gpu(name: str) -> None:
    """ATen's cells for GPUs run at once, a GRU's at least: a cut at each."""
    with helpers.counting() as counted:
        mine, ends, direct = trained(name, "acc", 6)
    assert counted["kernels/prepared for a device"] > 0 and counted["captures_submitted"] > 0
    assert ends == ENDS and direct == set()
    if helpers.extension().executor_name() == "cuda":
        nodes = helpers.extension().plan_data(torch.acc.current_device())["nodes"]
        made_by_cells = name.startswith("packed") or name.endswith(("Cell", "projections"))
        assert made_by_cells != ("acc::cudnn_rnn" in {node["op"] for node in nodes})
    all_close(mine, trained(name, "cpu", 6)[0])


READ_IN_BETWEEN = """
import torch
from tests import helpers

helpers.extension().capture_plans(True)


def train(device):
    torch.manual_seed(0)
    layer = torch.nn.LSTM(8, 8)
    batches = torch.randn(12, 6, 4, 8).to(device)
    layer.to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses = []
    for x in batches:
        loss = layer(x)[0].square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [torch.tensor(losses), *(p.detach().cpu() for p in layer.parameters())]


with helpers.counting() as counted:
    mine = train("acc")
assert counted["captures_submitted"] > 0
for a, b in zip(mine, train("cpu"), strict=True):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
"""


@pytest.mark.usefixtures("acc_only", "capturing")
def test_the_backward_of_another_plan_has_what_the_forward_left() -> None:
    """oneDNN's layers leave a workspace of a size that only they know. In a process of its own: it
    would read what is not there."""
    helpers.run_python(READ_IN_BETWEEN)
