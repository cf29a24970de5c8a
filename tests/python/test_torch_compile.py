"""`torch.compile` on acc: the same numbers, the same plans, whatever the backend's name."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import torchacc
from tests import helpers
from torchacc.utils.checkpoint import gradient_checkpoint

pytestmark = pytest.mark.usefixtures("acc_only")


class Block(nn.Sequential):
    """What is checkpointed."""


# What `torch.compile` makes of a function, or None: the function as it is.
Compiler = Callable[[Any], Any] | None


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    import torch._dynamo

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


def graphs() -> int:
    """How many graphs Dynamo has handed to backends since the last reset of its counters."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compared(run: Callable[[Compiler], list[Any]], compiler: Compiler, at_least: int = 1) -> None:
    """`run` gives the same with and without, and `at_least` graphs were compiled."""
    expected = run(None)
    torch._dynamo.utils.counters.clear()
    with helpers.counting() as counted:
        found = run(compiler)
    assert found == expected
    assert graphs() >= at_least
    assert counted["plans_built"] == 0


def training(compiler: Compiler) -> list[float]:
    """A network with dropout, five steps on batches of three sizes."""
    torch.acc.manual_seed_all(0)
    model = nn.Sequential(helpers.small_net("acc"), nn.Dropout(0.5))
    call = model if compiler is None else compiler(model)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        loss = call(helpers.drawn(5 + step % 3, 4, device="acc", seed=step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"backend": "acc"},
        {"mode": "reduce-overhead"},
        {"backend": "acc", "options": {"max_autotune": True}},
        {"fullgraph": True, "dynamic": True, "options": {"triton.cudagraphs": True}},
    ],
    ids=str,
)
def test_a_model_trains_with_the_same_numbers_and_plans(options: dict[str, Any]) -> None:
    compared(training, lambda model: torch.compile(model, **options))


@pytest.mark.usefixtures("unfused")
def test_a_function_with_breaks_that_makes_and_writes_tensors() -> None:
    def run(compiler: Compiler) -> list[Any]:
        total = torch.zeros(3, device="acc")

        def function(x: torch.Tensor, n: int) -> torch.Tensor:
            y = x * 2 + torch.arange(n, device="acc")
            total.add_(y)
            if y.sum().item() > 0:  # a break: Python decides
                y = y - 1
            with torch.autocast("acc", dtype=torch.bfloat16):
                return (y.view(1, n) @ y.view(n, 1)).relu()

        call = function if compiler is None else compiler(function)
        found = [call(helpers.drawn(3, device="acc", seed=seed), 3) for seed in range(3)]
        assert {y.dtype for y in found} == {torch.bfloat16}
        return [*(y.tolist() for y in found), total.tolist()]

    compared(run, torch.compile, at_least=2)


@pytest.mark.usefixtures("unfused")
def test_a_function_that_gets_no_tensor() -> None:
    def run(compiler: Compiler) -> list[Any]:
        def function(n: int) -> torch.Tensor:
            return torch.arange(n, device="acc").float().sqrt().sum()

        call = function if compiler is None else compiler(function)
        return [call(n).item() for n in (3, 4, 5)]

    compared(run, torch.compile)


@pytest.mark.usefixtures("recording", "unfused")
def test_a_step_whose_optimizer_is_compiled_too_is_one_plan() -> None:
    def run(compiler: Compiler) -> list[float]:
        model = helpers.small_net("acc")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        call = step if compiler is None else compiler(step)
        losses = []
        for number in range(6):
            if number == 4:
                flushes = helpers.stats()["flushes"]
            losses.append(call(helpers.drawn(5, 4, device="acc", seed=number)))
        assert helpers.stats()["flushes"] == flushes + 2
        return [loss.item() for loss in losses]

    expected = run(None)
    assert run(torch.compile) == expected


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("whole", [False, True], ids=["model", "step"])
def test_what_is_checkpointed_is_computed_again_in_backward(whole: bool) -> None:
    """Dynamo leaves that to AOTAutograd, which acc does without. Equal plans say that it is."""

    def run(compiler: Compiler) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(3)))
        gradient_checkpoint(model.to("acc"), {"Block"})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        call = model if compiler is None or whole else compiler(model)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = call(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        train = compiler(step) if compiler is not None and whole else step
        losses = [train(helpers.drawn(5, 4, device="acc", seed=seed)) for seed in range(4)]
        return [loss.item() for loss in losses]

    if whole:  # Dynamo reads parameters where it compiles the optimizer, which makes more plans
        assert run(torch.compile) == run(None)
    else:
        compared(run, torch.compile)


@pytest.mark.usefixtures("unfused")
def test_what_checkpointing_keeps_by_a_policy_is_kept() -> None:
    def run(compiler: Compiler) -> list[Any]:
        weight = helpers.drawn(4, 4, device="acc", grad=True)
        context = functools.partial(
            create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
        )

        def body(x: torch.Tensor) -> torch.Tensor:
            return (x @ weight).sin()

        def function(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(body, x, use_reentrant=False, context_fn=context).sum()

        call = function if compiler is None else compiler(function)
        call(helpers.drawn(3, 4, device="acc", grad=True)).backward()
        return weight.grad.tolist()

    compared(run, torch.compile)


def test_the_end_of_a_step_that_is_compiled_is_no_reason_for_a_warning() -> None:
    weight = helpers.drawn(4, 4, device="acc", grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    @torch.compile
    def step(x: torch.Tensor) -> None:
        (x @ weight).sum().backward()
        optimizer.step()
        torchacc.mark_step()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(torch.ones(2, 4, device="acc"))
    assert not [str(each.message) for each in said if "torchacc" in str(each.message)]


def test_graphs_of_the_cpu_stay_inductors(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    seen: list[str] = []

    def noting(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        seen.append(graph.code)
        return graph.forward

    monkeypatch.setattr(compile_fx, "compile_fx", noting)
    function = torch.compile(lambda x: x.sin() + 1)
    assert function(torch.zeros(2, device="acc")).tolist() == [1, 1] and not seen
    assert function(torch.zeros(2)).tolist() == [1, 1] and len(seen) == 1
    # of tensors of both it is acc's: Inductor would have to know acc
    both = torch.compile(lambda x, y: x.sin() + y.to(x.device))
    assert both(torch.zeros(2), torch.ones(2, device="acc")).tolist() == [1, 1] and len(seen) == 1


def test_the_backend_is_listed_once_asked_for() -> None:
    torch.compile(lambda x: x, backend="acc")
    torch.compile(lambda x: x, backend="acc")
    assert torch._dynamo.list_backends().count("acc") == 1
    with pytest.raises(RuntimeError, match="Invalid backend"):
        torch.compile(lambda x: x, backend="akk")


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("gradients", [True, False])
def test_attention_is_compiled_too(gradients: bool) -> None:
    """Which kernel attention takes is asked of the device with fake tensors."""

    def run(compiler: Compiler) -> list[Any]:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        layer.to("acc")
        call = layer if compiler is None else compiler(layer)
        x = helpers.drawn(2, 5, 8, device="acc").requires_grad_(gradients)
        q = helpers.drawn(1, 2, 5, 4, device="acc", seed=1).requires_grad_(gradients)

        def attend(q: Any) -> Any:
            return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

        found = [call(x), (attend if compiler is None else compiler(attend))(q)]
        if gradients:
            sum(each.sum() for each in found).backward()
            found += [x.grad, q.grad]
        return [each.tolist() for each in found]

    with torch.set_grad_enabled(gradients):
        compared(run, torch.compile, at_least=2)


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("options", [{}, {"dynamic": True}], ids=str)
def test_attention_of_several_lengths_is_compiled_too(options: dict[str, Any]) -> None:
    """Dynamo asks with sizes that are symbols, from the second length on or at once."""

    def attend(q: Any, mask: Any) -> Any:
        return nn.functional.scaled_dot_product_attention(q, q, q, mask)

    def run(compiler: Compiler) -> list[Any]:
        call = attend if compiler is None else compiler(attend)
        found = []
        for length in (5, 6, 9):
            q = helpers.drawn(1, 2, length, 4, device="acc", seed=length)
            mask = torch.ones(length, length, device="acc", dtype=torch.bool).tril()
            found.append(call(q, mask).tolist())
        return found

    compared(run, lambda function: torch.compile(function, **options))
