"""Recurrent layers and cells: outputs, states and gradients have the bits of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

# Layers take the CPU's ways step by step; their bits are compared.
pytestmark = pytest.mark.usefixtures("unfused")

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
    assert len(mine) == len(theirs)
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=lambda text, i=i: f"#{i}: {text}")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind: str, options: dict[str, object]) -> None:
    all_equal(padded(kind, options, "acc"), padded(kind, options, "cpu"))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_packed_sequences(kind: str, options: dict[str, object]) -> None:
    all_equal(packed(kind, options, "acc"), packed(kind, options, "cpu"))


@pytest.mark.parametrize("run", [padded, packed], ids=["padded", "packed"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_lstm_with_projections(run, bidirectional: bool) -> None:
    options = {"proj_size": 5, "num_layers": 2, "bidirectional": bidirectional}
    all_equal(run("lstm", options, "acc"), run("lstm", options, "cpu"))


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
