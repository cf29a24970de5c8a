"""torch.profiler: what was recorded, plans, their steps and kernels, with the program's lines."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from tests import helpers

CPU = [ProfilerActivity.CPU]
PLAN = re.compile(r"acc: plan ([0-9a-f]{8}) \((\d+) steps, (\d+) operators\)")
FUSED = re.compile(r"acc: fused: [\w., ]+ \((\d+) operators\)")
STEP = re.compile(r"acc: (aten|acc)::\w+|acc: fused: .*")
THIS = Path(__file__).name


class Net(nn.Module):
    """Two layers in a list, with a function of its own in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 8] -> [batch, 4]."""
        x = self.layers[0](x)
        x = x.sigmoid() * x  # gate
        return self.layers[1](x)


def trainer(device: str) -> Callable[[], torch.Tensor]:
    """A function that does one training step."""
    torch.manual_seed(0)
    net = Net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
    x = torch.randn(5, 8).to(device)

    def step() -> torch.Tensor:
        loss = net(x).square().mean()  # loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # update
        return loss

    return step


def line_of(mark: str, where: object) -> int:
    """The line of this file that ends with the comment `mark` in the source of `where`."""
    lines, first = inspect.getsourcelines(where)  # type: ignore[arg-type]
    return next(first + i for i, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}"))


def steady(device: str) -> Callable[[], torch.Tensor]:
    """A training step whose plan is there and fused."""
    step = trainer(device)
    for _ in range(4):
        step()
    return step


def events(seen: profile, folder: Path) -> list[dict[str, Any]]:
    """The ranges of an exported trace."""
    path = folder / "trace.json"
    seen.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def named(found: list[dict[str, Any]], pattern: re.Pattern[str] | str) -> list[dict[str, Any]]:
    """The events whose whole name matches, in order of time."""
    matching = [event for event in found if re.fullmatch(pattern, event["name"])]
    return sorted(matching, key=lambda event: event["ts"])


def inside(outer: dict[str, Any], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the events that lie within `outer`, in the same thread."""
    slack = 0.002  # microseconds; times are rounded to nanoseconds
    return [
        event
        for event in found
        if event is not outer
        and event["tid"] == outer["tid"]
        and event["ts"] >= outer["ts"] - slack
        and event["ts"] + event["dur"] <= outer["ts"] + outer["dur"] + slack
    ]


@pytest.mark.usefixtures("recording")
def test_a_replayed_step_is_a_range_with_its_steps_in_it(acc_only, tmp_path):
    step = steady(acc_only)
    with profile(activities=CPU) as seen, helpers.counting() as counted:
        step()
        step()
    found = events(seen, tmp_path)
    plans = named(found, PLAN)
    assert len(plans) == 2 == counted["plan_follows"]
    assert plans[0]["name"] == plans[1]["name"]
    n_steps, n_operators = map(int, PLAN.fullmatch(plans[0]["name"]).groups()[1:])
    for plan in plans:
        steps = inside(plan, named(found, STEP))
        assert len(steps) == n_steps
        kernels = [FUSED.fullmatch(event["name"]) for event in steps]
        fused = [int(kernel[1]) for kernel in kernels if kernel is not None]
        assert fused and max(fused) > 1
        assert sum(fused) + kernels.count(None) == n_operators
        names = [event["name"] for event in steps]
        assert "acc: aten::addmm" in names
        assert any("sigmoid" in name and "mul" in name for name in names if "fused" in name)
        # The update of all parameters is one kernel; its name does not grow with it.
        update = max(names, key=lambda name: int((FUSED.fullmatch(name) or [0, 0])[1]))
        assert "sqrt" in update and "..." in update
        # One after the other, and each within the place that recorded it.
        steps.sort(key=lambda event: event["ts"])
        for before, after in zip(steps, steps[1:], strict=False):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.002
        places = inside(plan, named(found, r"acc: at .*"))
        assert all(any(s in inside(place, steps) for place in places) for s in steps)


@pytest.mark.usefixtures("recording")
def test_steps_lie_within_the_line_that_recorded_them(acc_only, tmp_path):
    step = steady(acc_only)
    with profile(activities=CPU) as seen:
        step()
    found = events(seen, tmp_path)
    places = named(found, r"acc: at .*")
    gate = line_of("gate", Net.forward)
    assert any(f"{THIS}:{gate} in forward" in place["name"] for place in places)
    # an operator of the backward pass has the line of its forward operator
    assert any(f"{THIS}:{gate + 1} in forward, AddmmBackward0" in place["name"] for place in places)
    assert not any("[" in place["name"] for place in places)  # nobody asked for modules
    sigmoid = next(e for e in named(found, FUSED) if "sigmoid" in e["name"] and "mul" in e["name"])
    around = [place for place in places if sigmoid in inside(place, [sigmoid])]
    assert len(around) == 1 and f":{gate} in forward" in around[0]["name"]
    assert around[0]["cat"] == "user_annotation" and sigmoid["cat"] == "cpu_op"


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("asked", [{"with_modules": True}, {"with_stack": True}])
def test_modules_are_named_by_the_way_to_them(acc_only, tmp_path, asked):
    step = steady(acc_only)
    with profile(activities=CPU, **asked) as seen, helpers.counting() as counted:
        step()
    assert counted["plan_follows"] == 1  # asking changes nothing in what runs
    names = [place["name"] for place in named(events(seen, tmp_path), r"acc: at .*")]
    assert any(name.endswith("in forward [Net.layers.0]") for name in names)
    assert any(name.endswith("in forward [Net.layers.1]") for name in names)
    gate = line_of("gate", Net.forward)
    assert any(f"{THIS}:{gate} in forward [Net]" in name for name in names)
    loss = line_of("loss", trainer)
    assert any(f"{THIS}:{loss} in step" in name and "[" not in name for name in names)
    update = line_of("update", trainer)
    assert f"acc: at {THIS}:{update} in step" in names
    # Backward has the line and the module of the forward operator.
    assert any(re.search(r"in forward \[Net\.layers\.1\], AddmmBackward0", name) for name in names)
    assert any(re.search(rf"{THIS}:{gate} in forward \[Net\], \w*Backward0", n) for n in names)


def test_operators_count_once_as_on_the_cpu(acc_only):
    # The CPU's list operators call others in turn, which the device's do not.
    products = ("aten::addmm", "aten::mm")

    def operators(device: str) -> tuple[Counter[str], int]:
        step = steady(device)
        with profile(activities=CPU, record_shapes=True, with_flops=True) as seen:
            for _ in range(3):
                step()
        table = seen.key_averages()
        calls = Counter({row.key: row.count for row in table if row.key.startswith("aten::")})
        return calls, sum(row.flops for row in table if row.key.endswith(products))

    on_acc, flops = operators(acc_only)
    on_cpu, cpu_flops = operators("cpu")
    for name in ("addmm", "mm", "sigmoid", "_foreach_addcdiv_"):
        assert on_acc[f"aten::{name}"] == on_cpu[f"aten::{name}"] > 0, name
    assert flops == cpu_flops > 0


def test_what_was_asked_on_the_way_is_no_operator(acc_only):
    # Shapes and types never met before: the Meta kernel and the kernel's types are asked.
    with profile(activities=CPU) as seen:
        x = torch.ones(3, 7, 11, device=acc_only, dtype=torch.float16)
        y = torch.lerp(x, x, 0.25)
    del y
    calls = Counter(event.name for event in seen.events())
    assert calls["aten::lerp"] == 1
    assert calls["aten::empty"] + calls["aten::empty_strided"] == calls["aten::ones"] == 1


@pytest.mark.usefixtures("recording")
def test_tables_make_sense(acc_only):
    step = steady(acc_only)
    with profile(activities=CPU) as seen:
        with record_function("my loop"):
            for _ in range(3):
                step()
    table = {row.key: row for row in seen.key_averages()}
    plans = [row for key, row in table.items() if PLAN.fullmatch(key)]
    assert len(plans) == 1 and plans[0].count == 3
    products = table["acc: aten::addmm"]
    assert products.count == 6  # three times two layers
    inner = [row for key, row in table.items() if STEP.fullmatch(key)]
    assert sum(row.self_cpu_time_total for row in inner) <= plans[0].cpu_time_total
    assert plans[0].cpu_time_total <= table["my loop"].cpu_time_total
    text = seen.key_averages().table(sort_by="cpu_time_total", max_name_column_width=100)
    assert "acc: fused: " in text and "acc: plan " in text and "aten::addmm" in text


@pytest.mark.usefixtures("recording")
def test_recorded_operators_have_shapes_sequence_and_stack(device, tmp_path):
    step = steady(device)
    with profile(activities=CPU, record_shapes=True, with_stack=True) as seen:
        step()
    found = events(seen, tmp_path)
    addmm = named(found, "aten::addmm")
    assert [e["args"]["Input Dims"][1] for e in addmm] == [[5, 8], [5, 16]]
    forward = [e["args"]["Sequence number"] for e in addmm]
    backward = [e["args"]["Sequence number"] for e in named(found, "AddmmBackward0")]
    assert sorted(forward) == sorted(backward)  # how the viewer draws arrows from one to the other
    frames = named(found, r".*test_profiler\.py\(\d+\): forward")
    assert frames and inside(frames[0], addmm)
    assert named(found, r"nn\.Module: Linear_\d")


@pytest.mark.usefixtures("recording")
def test_steps_tell_shapes_to_who_asks(acc_only, tmp_path):
    step = steady(acc_only)
    with profile(activities=CPU, record_shapes=True) as seen:
        step()
    found = events(seen, tmp_path)
    dims = [event["args"]["Input Dims"] for event in named(found, "acc: aten::addmm")]
    assert [d[1] for d in dims] == [[5, 8], [5, 16]]
    gate = next(e for e in named(found, FUSED) if "sigmoid" in e["name"] and "mul" in e["name"])
    assert "aten::sigmoid" in gate["args"]["operators"]
    assert gate["args"]["elements"] >= 5 * 16 and gate["args"]["launches"] >= 1


@pytest.mark.usefixtures("recording")
def test_a_schedule_with_its_handler(acc_only, tmp_path):
    step = trainer(acc_only)
    traces: list[int] = []

    def ready(seen: profile) -> None:
        traces.append(len(named(events(seen, tmp_path), PLAN)))

    with profile(
        activities=CPU,
        schedule=schedule(wait=1, warmup=1, active=2, repeat=2),
        on_trace_ready=ready,
    ) as seen:
        for _ in range(8):
            step()
            seen.step()
    assert traces == [2, 2]


@pytest.mark.usefixtures("recording")
def test_the_first_run_shows_what_it_costs(acc_only, tmp_path):
    def run() -> None:
        x = torch.full((3, 5, 7), 2.0, device=acc_only)
        (x.sqrt() * 3 + x.exp()).tolist()

    with profile(activities=CPU) as seen:
        for _ in range(3):
            run()
    found = events(seen, tmp_path)
    assert len(named(found, "acc: build a plan")) == 1
    assert len(named(found, "acc: wait for compiled kernels")) <= 1
    assert len(named(found, PLAN)) == 3


def test_memory_is_profiled(acc_only):
    step = steady(acc_only)
    with profile(activities=CPU, profile_memory=True, record_shapes=True) as seen:
        step()
        kept = torch.ones(1024, device=acc_only) * 2
        assert kept.sum().item() == 2048.0
    table = {row.key: row for row in seen.key_averages()}
    assert any(row.self_cpu_memory_usage > 0 for row in table.values())
    assert seen.key_averages().table(sort_by="self_cpu_memory_usage", row_limit=5)


@pytest.mark.usefixtures("recording")
def test_a_failing_step_closes_its_ranges(acc_only, tmp_path):
    table = torch.arange(12.0, device=acc_only).view(4, 3)
    bad = torch.tensor([1, 9], device=acc_only)
    with profile(activities=CPU) as seen:
        with pytest.raises(IndexError):
            torch.index_select(table, 0, bad).sum().item()
        assert (table + 1).sum().item() == 78.0
    plans = named(events(seen, tmp_path), PLAN)
    assert len(plans) == 2
    assert plans[0]["ts"] + plans[0]["dur"] <= plans[1]["ts"]


def test_profiling_changes_no_result(unfused, device):
    plain, watched = trainer(device), trainer(device)
    expected = [plain().item() for _ in range(5)]
    with profile(activities=CPU, with_stack=True, record_shapes=True, profile_memory=True):
        got = [watched().item() for _ in range(5)]
    assert got == expected


@pytest.mark.usefixtures("recording")
def test_the_activity_of_the_device(acc_only, tmp_path):
    # torch counts it among what is supported, so it is in the default.
    assert ProfilerActivity.PrivateUse1 in torch.profiler.supported_activities()
    step = steady(acc_only)
    with profile() as seen:
        step()
    found = events(seen, tmp_path)
    assert len(named(found, PLAN)) == 1
    # Without the CPU's there is nothing: the host executor's kernels run on the CPU.
    with profile(activities=[ProfilerActivity.PrivateUse1]) as seen:
        step()
    assert len(seen.events()) == 0


@pytest.mark.usefixtures("recording")
def test_times_of_the_device_by_the_older_profiler(acc_only, capfd):
    x = torch.ones(64, 64, device=acc_only)
    (x @ x).sum().item()
    with torch.autograd.profiler.profile(use_device="acc") as seen:
        (x @ x).sum().item()
    rows = {row.key: row for row in seen.key_averages()}
    plan = next(row for key, row in rows.items() if PLAN.fullmatch(key))
    assert 0 < plan.device_time_total
    assert plan.device_time_total == pytest.approx(plan.cpu_time_total, rel=0.5, abs=200)
    assert "RecordFunction" not in capfd.readouterr().err  # torch prints failing callbacks there


def test_captured_work_is_a_range(acc_only, capturing, tmp_path):
    """And what is called between its pieces. On a host they are calls, which are seen as well."""
    extension = helpers.extension()
    extension.capture_plans(True)
    extension.skip_passes(helpers.BIT_BY_BIT)
    try:
        x = torch.randn(32, 32).to(acc_only)

        def step(i: int) -> torch.Tensor:
            made = nn.functional.layer_norm(x.cumsum(0), (32,), eps=0.1 * i)  # norm
            return made.cumsum(1)

        for i in range(5):
            made = step(i)
            helpers.flush()
        with profile(activities=CPU) as seen, helpers.counting() as counted:
            made = step(6)
            helpers.flush()
        assert counted["captured_launches"] == 2
    finally:
        extension.skip_passes("")
        extension.capture_plans(None)
    del made
    found = events(seen, tmp_path)
    (plan,) = named(found, PLAN)
    within = inside(plan, found)
    pieces = named(within, r"acc: captured work \(1 steps\)")
    (norm,) = named(within, "acc: aten::native_layer_norm")
    assert len(pieces) == 2
    assert pieces[0]["ts"] < norm["ts"] < pieces[1]["ts"]
    places = named(within, r"acc: at .*")
    norm_line = f"{THIS}:{line_of('norm', test_captured_work_is_a_range)}"
    assert any(norm_line in place["name"] and inside(place, [norm]) for place in places)
    calls = named(within, "acc: aten::cumsum")
    assert len(calls) == (2 if extension.executor_name() == "host" else 0)
