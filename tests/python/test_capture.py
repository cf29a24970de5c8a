"""A captured step computes what the step computes, or says why it cannot."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchacc
from tests import helpers
from tests.python.captured import (
    ACC,
    Lstm,
    Trained,
    adamw,
    batches,
    make_conv,
    make_dropout,
    make_mlp,
    sgd,
)
from torchacc_device import _C

pytestmark = [
    pytest.mark.usefixtures("acc_only"),
    pytest.mark.skipif(_C.mode() in ("eager", "nofuse"), reason="nothing is recorded as a whole"),
]


CASES: dict[str, tuple[Callable[[], nn.Module], Any, tuple[int, ...]]] = {
    "mlp_sgd": (make_mlp, sgd, (5, 8)),
    "mlp_adamw": (make_mlp, adamw, (5, 8)),
    "dropout": (make_dropout, sgd, (5, 8)),
    "conv_bn": (make_conv, sgd, (4, 3, 8, 8)),
    "lstm": (Lstm, adamw, (4, 6, 8)),
}


def run(name: str, captured: bool, set_to_none: bool = True) -> tuple[list[float], list[Any]]:
    """30 steps: their losses, and all values at the end."""
    make, optimizer, shape = CASES[name]
    trained = Trained(make(), optimizer, set_to_none=set_to_none)
    step = torchacc.capture(trained.step) if captured else trained.step
    data = [(x.to(ACC), y.to(ACC)) for x, y in batches(30, *shape)]
    if name == "lstm":
        data = [(x, y[:1].expand(6, 4).contiguous()) for x, y in data]
    torchacc.sync()  # a step is what it is: the data is not made in the first one
    torch.manual_seed(3)
    losses = [step(x, y) for x, y in data]
    if captured:
        assert step.replays == 27
    return [loss.item() for loss in losses], [*trained.values(), torch.acc.get_rng_state()]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", list(CASES))
def test_training_is_bit_equal(name: str, set_to_none: bool) -> None:
    run(name, False, set_to_none)  # the first run of a plan is not fused, which rounds otherwise
    losses, values = run(name, False, set_to_none)
    captured_losses, captured_values = run(name, True, set_to_none)
    assert captured_losses == losses
    assert len(set(losses)) > 20
    assert len(captured_values) == len(values)
    for ours, theirs in zip(captured_values, values, strict=True):
        assert torch.equal(ours, theirs)


def test_a_replay_runs_none_of_the_steps_python() -> None:
    trained = Trained(make_mlp(), adamw)
    calls: list[torch.Tensor] = []

    class Counted(nn.Module):
        """The network, with a note of each call."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """[batch, 8] -> [batch, 4]."""
            calls.append(x)
            return net(x)

    net, trained.model = trained.model, Counted()
    step = torchacc.capture(trained.step)
    for x, y in batches(10, 5, 8):
        step(x.to(ACC), y.to(ACC))
    assert step.replays == 7 and len(calls) == 3


def test_inference_is_bit_equal_and_keeps_results(unfused: None) -> None:
    """Results of earlier calls are not overwritten, with grad mode on as well."""
    model = make_conv().to(ACC).eval()
    step = torchacc.capture(model)
    data = [x.to(ACC) for x, _ in batches(8, 4, 3, 8, 8)]
    results = [step(x) for x in data]
    for x, result in zip(data, results, strict=True):
        assert torch.equal(result.cpu(), model(x).cpu())
        assert not result.requires_grad


def test_modes_within_the_function() -> None:
    """Settings around a replay do nothing: those of the recorded calls hold."""
    model = make_mlp().to(ACC)

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast(ACC, dtype=torch.bfloat16):
            return model(x)

    step = torchacc.capture(fn)
    for x, _ in batches(5, 5, 8):
        result = step(x.to(ACC))
        assert result.dtype == torch.bfloat16
        assert torch.equal(result.cpu(), fn(x.to(ACC)).cpu())
    with torch.no_grad():
        plain = torchacc.capture(model)
        for x, _ in batches(5, 5, 8):
            result = plain(x.to(ACC))
            assert not result.requires_grad
    # What autocast keeps between calls is gone when its block ends.
    with torch.autocast(ACC, dtype=torch.bfloat16):
        around = torchacc.capture(model)
        for x, _ in batches(5, 5, 8):
            around(x.to(ACC))
    with pytest.raises(RuntimeError, match=r"is gone"):
        around(x.to(ACC))


def replaying(optimizer: Callable[..., torch.optim.Optimizer]) -> Callable[[], object]:
    """A captured training step that has been replayed a few times, with its batch."""
    step = torchacc.capture(Trained(make_mlp(), optimizer).step)
    x, y = (each.to(ACC) for each in batches(1, 5, 8)[0])
    for _ in range(5):
        step(x, y)
    torch.acc.synchronize()
    return lambda: step(x, y)


def test_a_replay_records_nothing_and_builds_nothing() -> None:
    step = replaying(adamw)
    with helpers.counting() as counted:
        for _ in range(10):
            step()
    for name in ("nodes", "nodes_followed", "plans_built", "plans_widened", "memo_misses"):
        assert counted[name] == 0, name
    assert counted["flushes"] == 10


def test_memory_does_not_grow() -> None:
    step = replaying(sgd)
    before = torch.acc.memory_allocated()
    gc.collect()
    objects = len(gc.get_objects())
    for _ in range(200):
        step()
    torch.acc.synchronize()
    assert torch.acc.memory_allocated() <= before
    gc.collect()
    assert len(gc.get_objects()) < objects + 50


def test_cpu_arguments_structures_and_results() -> None:
    """Nested arguments; an argument, None, numbers, views and nested dicts as results."""

    def fn(batch: dict[str, Any], factor: float, *, bias: torch.Tensor) -> Any:
        a, b = batch["pair"]
        total = a * factor + b
        return {"sum": total, "same": a, "none": None, "n": 3, "rows": (total[0], [total.t()]),
                "view": b[1:]}  # fmt: skip

    step = torchacc.capture(fn)
    for i in range(6):
        a, b = torch.full((2, 3), float(i)), torch.ones(2, 3, device=ACC) * i
        out = step({"pair": [a, b]}, 2.0, bias=b)
        assert out["same"] is a
        assert out["none"] is None and out["n"] == 3
        assert out["sum"].tolist() == [[3.0 * i] * 3] * 2
        assert out["rows"][0].tolist() == [3.0 * i] * 3
        assert out["rows"][1][0].shape == (3, 2)
        assert out["view"].is_contiguous() and out["view"].tolist() == [[float(i)] * 3]
        assert out["view"].data_ptr() == b[1:].data_ptr()
        out["rows"][0].zero_()
        assert out["sum"][0].tolist() == [0.0] * 3  # still views of each other
    assert step.replays == 3


def test_the_output_of_a_call_is_the_input_of_the_next() -> None:
    step = torchacc.capture(lambda x: x * 2 + 1)
    x, expected = torch.zeros(3, device=ACC), 0.0
    kept = []
    for _ in range(8):
        x = step(x)
        kept.append(x)
        expected = expected * 2 + 1
    assert x.tolist() == [expected] * 3
    assert [each[0].item() for each in kept] == [1, 3, 7, 15, 31, 63, 127, 255]


def test_state_that_is_replaced_at_each_call() -> None:
    """A hidden state: what one call leaves is what the next one reads."""

    class Counter:
        hidden = torch.zeros(2, device=ACC)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.hidden = self.hidden + x
            return self.hidden * 10

    counter = Counter()
    step = torchacc.capture(counter)
    one = torch.ones(2, device=ACC)
    results = [step(one) for _ in range(7)]
    assert [each[0].item() for each in results] == [10.0 * i for i in range(1, 8)]
    assert counter.hidden.tolist() == [7.0, 7.0]


@pytest.mark.parametrize("given", [False, True], ids=["kept", "given"])
def test_state_that_is_made_before_the_last_one_is_read(given: bool) -> None:
    """What a call leaves takes the place of what it reads, also when it is made first."""
    state = {"last": torch.zeros(2, device=ACC)}

    def fn(x: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
        made = x * 2
        result = made + (state["last"] if last is None else last)
        state["last"] = made
        return result

    step = torchacc.capture(fn)
    expected = torch.zeros(2)
    for i in range(7):
        x = torch.full((2,), float(i))
        result = step(x.to(ACC), state["last"] if given else None)
        assert torch.equal(result.cpu(), x * 2 + expected)
        expected = x * 2


def test_a_result_that_is_left_behind_as_well() -> None:
    """`self.last = loss; return loss`: the result of a call is not overwritten by the next."""
    kept: dict[str, torch.Tensor] = {}

    def fn(x: torch.Tensor) -> torch.Tensor:
        kept["last"] = x + 1
        return kept["last"]

    step = torchacc.capture(fn)
    results = [step(torch.full((2,), float(i), device=ACC)) for i in range(6)]
    assert [each[0].item() for each in results] == [1, 2, 3, 4, 5, 6]
    assert kept["last"].tolist() == [6.0, 6.0]
    kept["last"].zero_()
    assert results[-1].tolist() == [6.0, 6.0]


def test_gradients_accumulate() -> None:
    """A step without zero_grad: the gradients are state."""
    model = make_mlp().to(ACC)

    def fn(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    step = torchacc.capture(fn)
    x = torch.ones(2, 8, device=ACC)
    for _ in range(6):
        step(x)
    once = torch.autograd.grad(model(x).sum(), model[2].bias)[0]
    assert torch.equal(model[2].bias.grad.cpu(), once.cpu() * 6)
    model.zero_grad(set_to_none=True)
    with pytest.raises(RuntimeError, match=r"gradient of parameter .* is None"):
        step(x)


def test_in_place_arguments_and_versions() -> None:
    """Arguments are written where they are, and autograd notices writes."""
    weight = torch.ones(3, device=ACC, requires_grad=True)

    def fn(x: torch.Tensor) -> None:
        x.add_(1)
        with torch.no_grad():
            weight.mul_(2)

    step = torchacc.capture(fn)
    x = torch.zeros(3, device=ACC)
    for _ in range(4):
        step(x)
    assert x.tolist() == [4.0] * 3 and weight.tolist() == [16.0] * 3
    squared = weight * weight
    versions = weight._version, x._version
    step(x)
    assert (weight._version, x._version) > versions and x._version > versions[1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()
    view = torch.zeros(6, device=ACC)
    step(view[3:])
    assert view.tolist() == [0.0] * 3 + [1.0] * 3


def test_pending_work_comes_first() -> None:
    step = torchacc.capture(lambda x: x * 2)
    x = torch.ones(3, device=ACC)
    for _ in range(4):
        x.add_(1)
        result = step(x)
    assert result.tolist() == [10.0] * 3
    made = torch.ones(3, device=ACC) * 7
    assert step(made).tolist() == [14.0] * 3
    assert step(torch.empty(3, device=ACC)).shape == (3,)


def test_empty_cache_eviction_and_other_plans() -> None:
    trained, plain, before = (Trained(make_mlp(), sgd) for _ in range(3))
    step = torchacc.capture(trained.step)
    x, y = (each.to(ACC) for each in batches(1, 5, 8)[0])
    for _ in range(3):
        before.step(x, y).item()  # the first run of a plan is not fused, which rounds otherwise
    for i in range(8):
        ours, theirs = step(x, y).item(), plain.step(x, y).item()
        assert ours == theirs
        torch.acc.empty_cache()
        if i == 5:
            _C.release_memory(0)
            torch.ones(1 << 16, device=ACC).add_(1).sum().item()


def test_threads() -> None:
    step = torchacc.capture(lambda x: (x @ x).relu() + 1)
    x = torch.eye(32, device=ACC)
    for _ in range(4):
        expected = step(x).cpu()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                assert torch.equal(step(x).cpu(), expected)
                (x + 1).sum().item()
        except BaseException as error:  # handed to the test
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_random_draws_between_replays() -> None:
    """Replays and other draws share one stream, as without capture."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + torch.rand_like(x)

    def draws(step: Callable[..., torch.Tensor]) -> list[list[float]]:
        torch.manual_seed(5)
        x = torch.ones(16, device=ACC)
        found = []
        for _ in range(6):
            found += [step(x).tolist(), torch.randn(3, device=ACC).tolist()]
        state = torch.acc.get_rng_state()
        torch.acc.set_rng_state(state)
        return [*found, step(x).tolist()]

    assert draws(fn) == draws(torchacc.capture(fn))


def test_checkpointing_and_own_generators(unfused: None) -> None:
    from torch.utils.checkpoint import checkpoint

    def grads(captured: bool) -> list[Any]:
        model = make_dropout().to(ACC)
        generator = torch.Generator(ACC).manual_seed(9)

        def fn(x: torch.Tensor) -> torch.Tensor:
            model.zero_grad()
            noise = torch.rand(x.shape, device=ACC, generator=generator)
            loss = checkpoint(model, x + noise, use_reentrant=False).sum()
            loss.backward()
            return loss

        torch.manual_seed(2)
        step = torchacc.capture(fn) if captured else fn
        losses = [step(torch.ones(5, 8, device=ACC)) for _ in range(7)]
        return [each.item() for each in losses] + [p.grad.tolist() for p in model.parameters()]

    assert grads(True) == grads(False)


@pytest.mark.parametrize("mode", ["full", "eager", "nofuse"])
def test_arguments_and_results_do_not_depend_on_the_mode(mode: str) -> None:
    helpers.run_python(
        """
import torchacc
weight = torch.ones(3, device=DEVICE, requires_grad=True)
step = torchacc.capture(lambda x, y: (weight * x, x, {"y": y}))
for i in range(4):
    x = torch.full((3,), float(i))
    product, same, rest = step(x, y="y")
    assert product.tolist() == [float(i)] * 3 and not product.requires_grad
    assert same is x and rest == {"y": "y"}
try:
    torchacc.capture(lambda x: x.add_(1))(torch.zeros(3))
except RuntimeError as error:
    assert "the function writes args[0], which is on the CPU" in str(error)
else:
    raise AssertionError("accepted")
""",
        ACC_MODE=mode,
    )
