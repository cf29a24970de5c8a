"""`torchacc.graph`: each format tells the plan that ran, and nothing but it; ACC_DUMP=passes."""

from __future__ import annotations

import copy
import itertools
import json
import re
import threading
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchacc
from tests import helpers
from torchacc.graph_view import _TIMED, _WARM_UP, dot, html, svg, text
from torchacc.graph_view.plan import PLACES, lanes, lifetime, placed, size_text, time_text

SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "input", "br", "link", "img", "hr"}
FORMATS = (".html", ".dot", ".svg", ".txt")


class Block(nn.Module):
    """A transformer block with a classifier behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.out = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, 32] -> [batch, 10]."""
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.out(x.mean(1))


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10)), torch.randn(16, 32)


def conv() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 10)), torch.randn(4, 3, 16, 16)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    return Block(), torch.randn(4, 6, 32)


def training_step(
    made: tuple[nn.Module, torch.Tensor], device: str, read_loss: bool = False
) -> Callable[[], None]:
    """A function of one training step; with `read_loss` the step is two plans."""
    model, data = made[0].to(device), made[1].to(device)
    labels = torch.arange(len(data), device=device) % 10
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), labels)
        loss.backward()
        if read_loss:
            loss.item()
        optimizer.step()

    return step


@pytest.fixture(scope="module", params=[mlp, conv, transformer], ids=lambda make: make.__name__)
def shown(request, tmp_path_factory, recording) -> tuple[dict[str, Any], dict[str, str]]:
    """The plan of a training step that has its kernels, and its text in each format."""
    if not helpers.ON_ACC:
        pytest.skip("the device under test is the CPU: it has no plans")
    step = training_step(request.param(), helpers.load_device())
    for _ in range(2):
        step()
    with torchacc.profile_plans():
        step()
    plan = helpers.extension().plan_data(torch.acc.current_device())
    folder = tmp_path_factory.mktemp("plans")
    files = {}
    for suffix in FORMATS:
        path = folder / f"step{suffix}"
        torchacc.graph(path)
        files[suffix] = path.read_text(encoding="utf-8")
    return plan, files


class Page(HTMLParser):
    """The page with its elements balanced, its texts, and the data that it carries."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: dict[str, str] = {}  # of elements -> text
        self.loaded: list[str] = []  # what the page asks for
        self._id: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.loaded += [str(found[name]) for name in ("src", "href") if name in found]
        if tag not in VOID:
            self.open.append(tag)
            self._id.append(found.get("id") or tag)
            self.ids.setdefault(self._id[-1], "")

    def handle_endtag(self, tag: str) -> None:
        # the end of these may be left out in HTML; this page does not
        assert self.open and self.open[-1] == tag, f"</{tag}> within {self.open}"
        self.open.pop()
        self._id.pop()

    def handle_data(self, data: str) -> None:
        for name in self._id:
            self.ids[name] += data


def carried(page: str) -> dict[str, Any]:
    """The data of the page, as its script reads them."""
    return json.loads(Page(page).ids["plan"])


# --- what the plan says -------------------------------------------------------------------------


@pytest.mark.usefixtures("recording")
def test_each_operator_runs_in_one_step(shown):
    plan, _ = shown
    inside = [node for step in plan["steps"] for node in step["nodes"]]
    assert sorted(inside) == list(range(len(plan["nodes"])))
    for index, step in enumerate(plan["steps"]):
        assert all(plan["nodes"][node]["step"] == index for node in step["nodes"])
        assert len(step["nodes"]) == 1 or step["kernel"] is not None


@pytest.mark.usefixtures("recording")
def test_steps_and_launches_are_those_that_run(acc_only):
    step = training_step(mlp(), acc_only)
    for _ in range(3):
        step()
    with helpers.counting() as counted:
        step()
    plan = helpers.extension().plan_data(torch.acc.current_device())
    assert counted["steps"] == len(plan["steps"])
    assert counted["kernel_launches"] == sum(step["launches"] for step in plan["steps"]) > 0


@pytest.mark.usefixtures("recording")
def test_a_fused_step_holds_what_the_optimizer_does_to_all_parameters(acc_only):
    step = training_step(mlp(), acc_only)
    for _ in range(3):
        step()
    plan = helpers.extension().plan_data(torch.acc.current_device())
    # Weights, and biases with the sums that are their gradients.
    updates = [
        s
        for s in plan["steps"]
        if any(plan["nodes"][n]["op"].startswith("aten::addcdiv") for n in s["nodes"])
    ]
    assert sum(s["launches"] for s in updates) == 4 and len(updates) <= 2


@pytest.mark.usefixtures("recording")
def test_a_source_line_is_told_for_forward_backward_and_optimizer(shown):
    plan, _ = shown
    own = {node["line"] for node in plan["nodes"] if node["file"] == __file__}
    source = Path(__file__).read_text().splitlines()
    assert any("optimizer.step()" in source[line - 1] for line in own)
    assert any("F.cross_entropy" in source[line - 1] for line in own)
    # An operator of the backward pass has the line of its forward operator.
    backward = [node for node in plan["nodes"] if node["autograd"]]
    assert backward
    assert [node["autograd"] for node in backward if node["file"] != __file__] == []
    for node in backward:
        if node["autograd"] == "NllLossBackward0":
            assert "F.cross_entropy" in source[node["line"] - 1]


@pytest.mark.usefixtures("recording")
def test_an_operator_without_gradient_does_not_lend_its_line_to_the_one_before_it(acc_only):
    """It has no node of autograd, so the last one is still that of an operator that was followed,
    and is not looked at."""
    model, data = mlp()
    model.to(acc_only)
    data, labels = data.to(acc_only), torch.arange(len(data), device=acc_only) % 10
    hits = []

    def step(count: bool) -> None:
        out = model(data)
        loss = F.cross_entropy(out, labels) * 3
        loss.item()
        if count:
            hits.append((loss.detach() * 2, out.argmax(1)))
        loss.backward()
        torchacc.sync()

    for count in (False, False, False, True):
        step(count)
    nodes = helpers.extension().plan_data(torch.acc.current_device())["nodes"]
    of_loss = [node for node in nodes if node["autograd"] in ("MulBackward0", "NllLossBackward0")]
    assert len(of_loss) > 1
    assert {node["file"] for node in of_loss} <= {"", __file__}
    assert {line_at(node) for node in of_loss} <= {"", "loss = F.cross_entropy(out, labels) * 3"}


def line_at(node: dict[str, Any]) -> str:
    """The line of this file that an operator comes from; "" where that is not known."""
    return node["file"] and Path(node["file"]).read_text().splitlines()[node["line"] - 1].strip()


def backward_lines(step: Callable[[], object]) -> set[tuple[str, str]]:
    """Node of autograd and line of the operators that the backward pass of a first step records."""
    step()
    torchacc.sync()
    nodes = helpers.extension().plan_data(torch.acc.current_device())["nodes"]
    return {(node["autograd"], line_at(node)) for node in nodes if node["autograd"]}


@pytest.mark.usefixtures("recording")
def test_a_line_is_the_programs_not_pythons(acc_only):
    x = torch.ones(4, 3, device=acc_only)
    torchacc.sync()
    kept = copy.deepcopy([x, (x,)])
    torchacc.sync()
    nodes = helpers.extension().plan_data(torch.acc.current_device())["nodes"]
    assert kept and {line_at(node) for node in nodes} == {"kept = copy.deepcopy([x, (x,)])"}


@pytest.mark.usefixtures("recording")
def test_a_view_in_a_loop_has_its_own_line(acc_only):
    x = torch.ones(4, 3, device=acc_only, requires_grad=True)
    torchacc.sync()

    def step() -> None:
        h = torch.zeros(4, device=acc_only)
        for t in range(3):
            part = x[:, t]
            h = (h + part).sin()
        h.sum().backward()

    assert backward_lines(step) == {
        ("SelectBackward0", "part = x[:, t]"),
        ("SinBackward0", "h = (h + part).sin()"),
    }


class Twice(torch.autograd.Function):
    """2 x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.mul(2)


@pytest.mark.usefixtures("recording")
def test_python_within_the_backward_pass_has_its_own_line(acc_only):
    """A forward that is computed again, a hook, a Function's backward."""
    x = torch.ones(4, 3, device=acc_only, requires_grad=True)
    torchacc.sync()

    def again(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return y.tanh()

    def step() -> None:
        y = checkpoint(again, x, use_reentrant=False)
        z = Twice.apply(y)
        z.register_hook(lambda grad: grad.clamp(max=3))
        z.sum().backward()

    found = backward_lines(step)
    assert ("ExpBackward0", "y = x.exp()") in found
    assert ("TanhBackward0", "return y.tanh()") in found
    assert ("TwiceBackward", "return grad.mul(2)") in found
    assert {line for _, line in found} >= {"z.register_hook(lambda grad: grad.clamp(max=3))"}


@pytest.mark.usefixtures("recording")
def test_places_are_found_in_threads_with_functions_of_their_own(acc_only):
    """Names of such functions take the interpreter lock, and so does each forward operator."""

    results = []

    def work(seed: int) -> None:
        for size in range(1, 150):  # each another plan
            x = torch.ones(size, 1 + seed, device=acc_only, requires_grad=True)
            y = Twice.apply(x)
            torch.zeros_like(y)  # has no node of its own: the last is that of the function
            y.sum().backward()
            results.append((x.grad == 2).all().item())

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert len(results) == 3 * 149 and all(results)


@pytest.mark.usefixtures("recording")
def test_lifetimes_span_every_use(shown):
    plan, _ = shown
    for index, buffer in enumerate(plan["buffers"]):
        touching = {
            node["step"] for node in plan["nodes"] if index in node["reads"] + node["writes"]
        }
        if buffer["place"] == "none" or not touching:
            continue
        first, last = lifetime(plan, buffer)
        # A kernel keeps in registers what it made itself, so it may touch less than its operators.
        assert first <= buffer["first"] <= buffer["last"] <= last
        assert {buffer["first"], buffer["last"]} <= touching
        if buffer["output"]:
            assert last == len(plan["steps"]) - 1


@pytest.mark.usefixtures("recording")
def test_what_lives_together_does_not_overlap(shown):
    plan, _ = shown
    found = lanes(plan)
    assert set(found) == set(placed(plan))
    for i, one in found.items():
        for j, other in found.items():
            a, b = plan["buffers"][i], plan["buffers"][j]
            if j <= i or a["place"] != b["place"]:
                continue
            (first, last), (begin, end) = lifetime(plan, a), lifetime(plan, b)
            if last < begin or end < first:
                continue
            assert one.row != other.row
            if a["bytes"] and b["bytes"]:
                assert one.at + a["bytes"] <= other.at or other.at + b["bytes"] <= one.at


@pytest.mark.usefixtures("recording")
def test_the_peak_is_the_most_that_is_held(shown):
    plan, _ = shown
    held = []
    for index in range(len(plan["steps"])):
        alive = plan["arena_bytes"]
        for buffer in plan["buffers"]:
            first, last = lifetime(plan, buffer)
            if buffer["place"] in ("own", "adopted") and first <= index <= last:
                alive += buffer["bytes"]
        held.append(alive)
    assert held == [step["held_bytes"] for step in plan["steps"]]
    assert plan["peak_bytes"] == max(held)


# --- the formats --------------------------------------------------------------------------------


@pytest.mark.usefixtures("recording")
def test_the_page_carries_every_operator_step_and_buffer(shown):
    plan, files = shown
    data = carried(files[".html"])
    assert [node[2] for node in data["nodes"]] == [node["text"] for node in plan["nodes"]]
    assert [data["ops"][node[0]] for node in data["nodes"]] == [n["op"] for n in plan["nodes"]]
    for node, told in zip(plan["nodes"], data["nodes"], strict=True):
        place = [node["file"], node["line"], node["function"], node["autograd"]]
        assert data["places"][told[1]] == place
    assert [step[0] for step in data["steps"]] == [step["nodes"] for step in plan["steps"]]
    assert [step[1] for step in data["steps"]] == [step["kernel"] for step in plan["steps"]]
    assert all(step[3] > 0 for step in data["steps"])
    for buffer, told in zip(plan["buffers"], data["buffers"], strict=True):
        assert told[:2] == [buffer["place"], buffer["bytes"]]
        assert len(told) == 2 or tuple(told[2:4]) == lifetime(plan, buffer)


@pytest.mark.usefixtures("recording")
def test_the_page_is_sound_needs_nothing_and_explains_itself(shown):
    plan, files = shown
    page = Page(files[".html"])
    assert page.loaded == []
    assert not re.findall(r"\bimport\s*\(|\bfetch\s*\(|@import|url\(", files[".html"])
    assert "one step of your program" in page.ids["h1"]
    assert f"{len(plan['nodes'])} operators run" in page.ids["summary"]
    for word in ("operator", "fused", "given", "arena", "own", "adopted"):
        assert word in page.ids["legend"]
    for name in re.findall(r'byId\("(\w+)"\)', page.ids["script"]):
        assert name in page.ids or f'id="{name}"' in files[".html"]


@pytest.mark.usefixtures("recording")
def test_the_picture_is_sound_and_tells_every_operator(shown):
    plan, files = shown
    root = ElementTree.fromstring(files[".svg"])
    assert root.tag == f"{SVG}svg"
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    for node in plan["nodes"]:
        assert node["text"] in titles
    assert len([t for t in titles if t.startswith("%") and "steps" in t]) == len(placed(plan))
    words = {element.text for element in root.iter(f"{SVG}text")}
    assert "line of the program" in words and any("arena" in (word or "") for word in words)
    tops = {place for place in words if place in PLACES}
    assert tops == {plan["buffers"][index]["place"] for index in placed(plan)}


@pytest.mark.usefixtures("recording")
def test_the_graphviz_graph_is_sound_and_groups_what_is_fused(shown):
    plan, files = shown
    bare = re.sub(r'"(?:\\.|[^"\\])*"', '""', files[".dot"])
    assert bare.count('"') % 2 == 0 and bare.count("{") == bare.count("}")
    declared = set(re.findall(r"^ +([nb]\d+) \[", bare, re.MULTILINE))
    assert {f"n{i}" for i in range(len(plan["nodes"]))} <= declared
    edges = re.findall(r"^ +(\w+) -> (\w+) \[", bare, re.MULTILINE)
    assert edges and all(a in declared and b in declared for a, b in edges)
    clusters = {
        int(index): [int(node) for node in re.findall(r"^ +n(\d+) \[", body, re.MULTILINE)]
        for index, body in re.findall(r"subgraph cluster_(\d+) \{(.*?)\n  \}", bare, re.DOTALL)
    }
    fused = {i: s["nodes"] for i, s in enumerate(plan["steps"]) if s["kernel"] is not None}
    assert clusters == fused


@pytest.mark.usefixtures("recording")
def test_the_text_tells_every_operator_and_buffer(shown):
    plan, files = shown
    lines = files[".txt"].splitlines()
    for node in plan["nodes"]:
        assert any(node["text"] in line for line in lines)
    for index in placed(plan):
        assert any(re.match(rf"  %{index} +{plan['buffers'][index]['place']}", x) for x in lines)


@pytest.mark.usefixtures("recording")
def test_names_from_the_program_cannot_leave_their_place(shown):
    plan, _ = shown
    evil = '</script><script>alert("&")</script>\\'
    given = {"file": f"/x/{evil}.py", "function": evil, "autograd": evil}
    nodes = [{**node, **given} for node in plan["nodes"]]
    changed = {**plan, "nodes": nodes}
    page = html.render(changed)
    assert carried(page)["places"][0][2:] == [evil, evil]
    assert len(re.findall("<script", page)) == 2
    root = ElementTree.fromstring(svg.render(changed))
    assert any(f"{evil}, {evil}" in (element.text or "") for element in root.iter(f"{SVG}text"))
    bare = re.sub(r'"(?:\\.|[^"\\])*"', '""', dot.render(changed))
    assert "alert" not in bare
    assert f"{evil}, {evil}" in text.render(changed)


@pytest.mark.usefixtures("recording")
def test_a_swin_transformer_fits_on_a_small_page(acc_only, tmp_path):
    models = pytest.importorskip("torchvision.models")
    made = models.swin_t(num_classes=10), torch.randn(1, 3, 64, 64)
    step = training_step(made, acc_only)
    for suffix in FORMATS:
        torchacc.graph(tmp_path / f"swin{suffix}", step=step)
    data = carried((tmp_path / "swin.html").read_text(encoding="utf-8"))
    assert len(data["nodes"]) > 1000
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert len(sizes) == len(FORMATS) and max(sizes.values()) < 2_000_000, sizes


# --- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step.pdf", "step", "step.html.gz"])
def test_another_suffix_is_an_error_before_anything_runs(acc_only, tmp_path, name):
    calls = []
    with pytest.raises(ValueError, match=r"no format\. Use one of: \.html, \.dot, \.svg, \.txt"):
        torchacc.graph(tmp_path / name, step=lambda: calls.append(1))
    assert not calls and not list(tmp_path.iterdir())


@pytest.mark.usefixtures("recording")
def test_a_folder_that_is_not_there_is_an_error(acc_only, tmp_path):
    (torch.ones(3, device=acc_only) + 1).sum().item()
    with pytest.raises(FileNotFoundError):
        torchacc.graph(tmp_path / "nowhere" / "step.html")


@pytest.mark.usefixtures("recording")
def test_without_a_plan_the_error_says_what_to_do():
    if not helpers.ON_ACC:
        pytest.skip("the device under test is the CPU: it has no plans")
    done = helpers.run_python(
        "import torchacc\n"
        "for wait in (0, 2):\n"
        "    kept = [torch.ones(2, device=DEVICE) for _ in range(wait)]\n"
        "    try:\n"
        "        torchacc.graph('/nowhere/step.html')\n"
        "    except RuntimeError as error:\n"
        "        print(error)\n"
    )
    first, second = done.stdout.splitlines()
    assert first == (
        "[graph] no plan has run on acc:0; 0 recorded operators wait. Run a step first, or submit"
        " what was recorded with torchacc.sync()."
    )
    assert "2 recorded operators wait" in second


@pytest.mark.usefixtures("recording")
def test_times_are_taken_only_when_asked_for(acc_only, tmp_path):
    helpers.extension().release_memory(torch.acc.current_device())  # and with it timed plans
    step = training_step(mlp(), acc_only)
    for _ in range(3):
        step()
    data = helpers.extension().plan_data
    device = torch.acc.current_device()
    assert all(s["seconds"] is None for s in data(device)["steps"])
    torchacc.graph(tmp_path / "step.txt")
    assert "profile_plans" in (tmp_path / "step.txt").read_text()
    with torchacc.profile_plans():
        step()
        with torchacc.profile_plans():
            step()
        step()
    step()
    plan = data(device)
    assert plan["timed_runs"] == 3
    assert all(s["seconds"] > 0 for s in plan["steps"])
    torchacc.graph(tmp_path / "step.txt")
    assert "in 3 timed runs" in (tmp_path / "step.txt").read_text()


@pytest.mark.usefixtures("recording")
def test_a_failing_step_switches_timing_off(acc_only, tmp_path):
    calls = []

    def step() -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyError("x")

    with pytest.raises(KeyError):
        torchacc.graph(tmp_path / "step.txt", step=step)
    x = torch.ones(7, 3, device=acc_only)
    for _ in range(2):
        (x * 2).sum().item()
    plan = helpers.extension().plan_data(torch.acc.current_device())
    assert plan["timed_runs"] == 0


@pytest.mark.usefixtures("recording")
def test_a_step_that_runs_no_plan_does_not_show_an_older_one(acc_only, recording, tmp_path):
    (torch.ones(4, device=acc_only) + 1).tolist()

    @torchacc.eager()
    def at_once() -> None:
        (torch.ones(4, device=acc_only) + 1).tolist()

    for step in (lambda: None, at_once):
        pending = torch.ones(4, device=acc_only) + 2  # submitted before `step`
        with pytest.raises(RuntimeError, match=r"no plan has run on acc:0; step recorded nothing"):
            torchacc.graph(tmp_path / "step.txt", step=step)
    assert not list(tmp_path.iterdir()) and pending.tolist() == [3.0] * 4


@pytest.mark.usefixtures("recording")
def test_what_ran_before_under_a_programs_own_timing_is_not_shown(acc_only, tmp_path):
    x = torch.ones(8, device=acc_only)
    with torchacc.profile_plans():
        x.sin().exp().cumsum(0).tanh().sum().item()
        torchacc.graph(tmp_path / "step.txt", step=lambda: (x * 2).tolist())
    text = (tmp_path / "step.txt").read_text()
    assert "mul" in text and "cumsum" not in text


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize(("at", "large"), [(1, True), (_TIMED, False)], ids=["first", "last"])
def test_a_plan_that_others_have_followed_is_no_loop_of_theirs(acc_only, tmp_path, at, large):
    """Of those that are timed one is another plan, larger or not."""
    x, calls, kept = torch.ones(8 + at, device=acc_only), itertools.count(1 - _WARM_UP), []

    def step():
        y = x * 2 + 1
        if (next(calls) == at) == large:
            y = y.exp().cumsum(0)
        kept.append(y)

    torchacc.graph(tmp_path / "step.txt", step=step)
    text = (tmp_path / "step.txt").read_text()
    assert "cumsum" in text and "plans in turn" not in text


@pytest.mark.usefixtures("recording")
def test_a_step_of_several_plans_shows_the_largest(acc_only, tmp_path):
    step = training_step(mlp(), acc_only, read_loss=True)
    torchacc.graph(tmp_path / "step.html", step=step)
    data = carried((tmp_path / "step.html").read_text())
    assert any(op.startswith("aten::addmm") for op in data["ops"])
    last = helpers.extension().plan_data(torch.acc.current_device())
    assert not any(node["op"].startswith("aten::addmm") for node in last["nodes"])
    assert len(last["loop"]) == 2 and last["ended_by"] == "flush_step"
    torchacc.graph(tmp_path / "step.txt")
    assert "runs 2 plans in turn" in (tmp_path / "step.txt").read_text()


@pytest.mark.usefixtures("recording")
def test_the_first_run_says_that_kernels_are_coming(acc_only, tmp_path):
    x = torch.randn(311, 17, device=acc_only)
    torchacc.sync()
    for expected in (True, False):
        ((x * 3).tanh() + x).sum().item()
        torchacc.graph(tmp_path / "step.txt")
        written = (tmp_path / "step.txt").read_text()
        assert ("without generated kernels" in written) == expected


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("eager", "without plans. Unset it."), ("nofuse", "STEPS, in order"), ("nograph", "kernel 0")],
)
def test_other_modes_show_what_they_have(tmp_path, mode, expected):
    if not helpers.ON_ACC:
        pytest.skip("the device under test is the CPU: it has no plans")
    path = tmp_path / "step.txt"
    done = helpers.run_python(
        "import torchacc\n"
        "x = torch.ones(100, 100, device=DEVICE)\n"
        "torchacc.sync()\n"
        "try:\n"
        f"    torchacc.graph({str(path)!r}, step=lambda: ((x * 2).tanh() + x).tolist())\n"
        f"    print(open({str(path)!r}).read())\n"
        "except RuntimeError as error:\n"
        "    print(error)\n",
        ACC_MODE=mode,
    )
    assert expected in done.stdout


@pytest.mark.parametrize(
    ("n", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 30, "3.0 GiB")],
)
def test_sizes_are_written_for_people(n, expected):
    assert size_text(n) == expected


def test_times_are_written_for_people():
    assert [time_text(s) for s in (None, 2.5e-6, 0.0123, 1.5)] == [
        "-",
        "2.5 us",
        "12.3 ms",
        "1.50 s",
    ]


# --- ACC_DUMP=passes ---------------------------------------------------------------------------


@pytest.mark.usefixtures("recording")
def test_the_dump_tells_the_graph_before_and_after_each_pass():
    if not helpers.ON_ACC:
        pytest.skip("the device under test is the CPU: it has no passes")
    done = helpers.run_python(
        "x = torch.randn(100, 50, device=DEVICE)\n"
        "torch.acc.synchronize()\n"
        "unused = x.cos()\n"
        "del unused\n"
        "print(((x * 3).tanh() + x).sum().item())\n",
        ACC_DUMP="passes",
    )
    parts = re.split(r"^== (.+)\n", done.stderr, flags=re.MULTILINE)
    told = list(zip(parts[1::2], parts[2::2], strict=True))
    names = "recorded dce lists split cse copies rows widen layout products accumulate fuse".split()
    names += ["recompute", "batch"]
    names[1:] = [f"after {name}" for name in names[1:]]
    assert [name for name, _ in told[-len(names) :]] == names
    graphs = dict(told[-len(names) :])
    assert "aten::cos" in graphs["recorded"] and "aten::cos" not in graphs["after dce"]
    (inside,) = re.findall(
        r"^kernel 0 \{\n(.*?)^\}", graphs["after batch"], re.DOTALL | re.MULTILINE
    )
    assert [re.search(r"aten::(\w+)", line)[1] for line in inside.splitlines()] == [
        "mul",
        "tanh",
        "add",
        "sum",
    ]
