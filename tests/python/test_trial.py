"""Never slower than unfused: slow kernels are put aside, a slow compiler is not waited for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only")

# Makes each call of a kernel spin for some tens of milliseconds first.
SLOW_KERNELS = r"""#!/bin/sh
for last; do :; done
case "$1" in --version) exec g++ --version;; esac
for each; do
  if [ -f "$each" ] && grep -q 'long end)' "$each" 2>/dev/null; then
    sed -i 's/long end) {$/& for (volatile int spin = 0; spin < 10000000; ++spin) {}/' "$each"
  fi
done
exec g++ "$@"
"""

# Compiles once the file `go` is there.
LATE_KERNELS = """#!/bin/sh
case "$1" in --version) exec g++ --version;; esac
while [ ! -e "{folder}/go" ]; do sleep 0.02; done
exec g++ "$@"
"""

# A program of one plan with one kernel. `run` says how often kernels were launched.
PROGRAM = """
import pathlib, time
x = torch.linspace(-1, 1, 1000, device=DEVICE)
helpers.synchronize()
results = []
def run():
    before = helpers.stats()["kernel_launches"]
    y = (x * 2 + 1) * x - x
    helpers.flush()
    results.append(y.cpu())
    assert torch.equal(results[-1], results[0])
    return helpers.stats()["kernel_launches"] - before
def run_until_fused():
    for _ in range(3000):
        if run():
            return
        time.sleep(0.02)
    raise AssertionError("the kernels never came")
"""

# The launches from the first run with kernels on.
RUNS = (
    PROGRAM
    + """
run_until_fused()
launches = [1] + [run() for _ in range(29)]
put_aside = [key for key in helpers.stats() if key.startswith("kernel_put_aside/")]
print(json.dumps([launches, put_aside]))
"""
)


GXX = '#!/bin/sh\nexec g++ "$@"\n'


def _run(folder: Path, compiler: str, body: str, **env: str) -> tuple[Any, str]:
    """What a program prints last, and its warnings; its kernels come from a compiler of ours."""
    folder.chmod(0o700)
    script = folder / "compiler"
    script.write_text(compiler.replace("{folder}", str(folder)))
    script.chmod(0o755)
    done = helpers.run_python(
        "import json\nfrom tests import helpers\n" + body,
        ACC_CACHE_DIR=str(folder / "cache"),
        ACC_CXX=str(script),
        **({"ACC_MODE": "full", "ACC_DETERMINISTIC": "0"} | env),
    )
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_kernels_slower_than_what_they_replace_are_put_aside_once(tmp_path):
    tells = "import torchacc\nprint(json.dumps([launches, put_aside, str(torchacc.report())]))"
    (launches, put_aside, report), errors = _run(tmp_path, SLOW_KERNELS, RUNS + tells)
    assert re.search(r"slower than operators\W+1\n", report)
    assert re.search(r"run without their kernels, not there yet\W+[1-9]", report)
    # In turn, ten times each.
    assert launches == [1, 0] * 10 + [0] * 10
    assert len(put_aside) == 1
    told = [line for line in errors.splitlines() if "slower as generated kernels" in line]
    assert len(told) == 1
    assert put_aside[0].removeprefix("kernel_put_aside/") in told[0]
    assert "aten::mul.Tensor" in told[0] and " ms instead of " in told[0]


TIMES = """
seconds = [step["seconds"] for step in helpers.extension().plan_data(0)["steps"]]
print(json.dumps([launches, put_aside, seconds]))
"""


def test_kernels_that_are_fast_stay(tmp_path):
    """The plan keeps the times that told so, for torchacc.graph."""
    body = RUNS.replace("1000,", "1_000_000,") + TIMES
    (launches, put_aside, seconds), errors = _run(tmp_path, GXX, body)
    assert len(seconds) == 1 and 0 < seconds[0] < 1
    assert launches[:6] == [1, 0] * 3 and launches[-10:] == [1] * 10
    assert put_aside == [] and "slower" not in errors


# A plan without kernels: a group norm, whose backward is made of two parts, which the plan's plain
# form does not do. Either of these takes a while, or fails.
GROUP_NORM = """
import os, time, torchacc
from torch import library
from torch._decomp.decompositions import native_group_norm_backward
slow, fails = os.environ["SLOW"], []
def backward(*args):
    whole = all(args[-1])
    if whole and fails:
        raise RuntimeError(fails.pop())
    if whole == (slow == "whole"):
        time.sleep(0.05)
    return native_group_norm_backward(*args)
kernels = library.Library("aten", "IMPL")
kernels.impl("native_group_norm_backward", backward, "CPU")
x, g = torch.randn(2, 4, 6, 10).to(DEVICE)
x.requires_grad_()
w, b = (torch.randn(6).to(DEVICE).requires_grad_() for _ in range(2))
helpers.synchronize()
made, steps = [], []
def gradients():
    y = torch.nn.functional.group_norm(x, 3, w, b)
    return torch.autograd.grad(y, (x, w, b), g)
def run(step=gradients):
    before = helpers.stats()
    grads = step()
    helpers.flush()
    steps.append(helpers.stats()["steps"] - before["steps"])
    made.append([t.cpu() for t in grads])
def tell():
    pairs = [(a, b) for grads in made for a, b in zip(grads, made[0])]
    close = all(torch.allclose(a, b, 1e-5, 1e-5) for a, b in pairs)
    report = str(torchacc.report())
    print(json.dumps([steps, helpers.stats()["plans_put_aside"], close, report]))
"""
NORM = GROUP_NORM + "for _ in range(30): run()\ntell()"
PARTS, WHOLE = 3, 2  # steps of the two forms


def test_a_plan_slower_than_its_operators_is_put_aside_once(tmp_path):
    (steps, put_aside, close, report), errors = _run(
        tmp_path, GXX, NORM, ACC_SKIP_PASSES="fuse", SLOW="parts"
    )
    # From the third run on in turn, ten times each.
    assert steps == [PARTS] * 2 + [PARTS, WHOLE] * 10 + [WHOLE] * 8
    assert put_aside == 1 and close
    assert re.search(r"slower than operators one by one\W+1\n", report)
    told = [line for line in errors.splitlines() if "is how it runs from now on" in line]
    assert len(told) == 1
    assert re.search(r"\[plan\] a step of 2 operators, .*<string>:\d+.* took [\d.]+ ms", told[0])


@pytest.mark.parametrize("slow, deterministic", [("whole", "0"), ("parts", "1")])
def test_a_plan_that_is_fast_stays_and_so_does_one_whose_bits_must(tmp_path, slow, deterministic):
    (steps, put_aside, close, _), errors = _run(
        tmp_path, GXX, NORM, ACC_SKIP_PASSES="fuse", SLOW=slow, ACC_DETERMINISTIC=deterministic
    )
    compared = [PARTS, WHOLE] * 3 if deterministic == "0" else []
    assert steps == ([PARTS] * 2 + compared + [PARTS] * 28)[:30]
    assert put_aside == 0 and close and "[plan]" not in errors


def test_a_plain_form_that_fails_is_not_tried_again(tmp_path):
    body = """
for _ in range(3): run()
fails.append("no more of these")
try:
    run()
except RuntimeError as error:
    assert "no more of these" in str(error)
for _ in range(26): run()
tell()
"""
    (steps, put_aside, close, _), _ = _run(
        tmp_path, GXX, GROUP_NORM + body, ACC_SKIP_PASSES="fuse", SLOW="parts"
    )
    assert steps == [PARTS] * 29 and put_aside == 0 and close


def test_a_plan_that_is_made_again_meanwhile_begins_anew(tmp_path):
    """Somebody keeps what it has not kept before."""
    body = """
kept = []
def keeping():
    y = torch.nn.functional.group_norm(x, 3, w, b)
    kept.append(y)
    return torch.autograd.grad(y, (x, w, b), g)
for _ in range(6): run()
for _ in range(24): run(keeping)
assert all(torch.equal(y.cpu(), kept[0].cpu()) for y in kept)
tell()
"""
    (steps, put_aside, close, _), _ = _run(
        tmp_path, GXX, GROUP_NORM + body, ACC_SKIP_PASSES="fuse", SLOW="parts"
    )
    assert steps[:6] == [PARTS] * 2 + [PARTS, WHOLE] * 2
    assert steps[-1] == WHOLE and put_aside == 1 and close


@pytest.mark.parametrize("graphs", ["0", "1"])
def test_captured_steps_and_captured_work_take_the_faster_form(tmp_path, graphs):
    body = """
step = torchacc.capture(gradients)
for _ in range(40): run(step)
assert step.replays == 37
tell()
"""
    (steps, put_aside, close, _), errors = _run(
        tmp_path,
        GXX,
        GROUP_NORM + body,
        ACC_SKIP_PASSES="fuse",
        ACC_HOST_GRAPHS=graphs,
        SLOW="parts",
    )
    assert steps[0] == PARTS and steps[-10:] == [WHOLE] * 10
    assert put_aside == 1 and close and errors.count("is how it runs from now on") == 1


ALIKE = [
    {"ACC_DETERMINISTIC": "1"},
    {"WORLD_SIZE": "2"},
    {"BEFORE": "torch.use_deterministic_algorithms(True)"},
    {"BEFORE": "helpers.extension().run_alike()"},
]


@pytest.mark.parametrize("env", ALIKE, ids=lambda env: next(iter(env.values())))
def test_where_bits_must_not_depend_on_time_kernels_stay(tmp_path, env):
    before = env.get("BEFORE", "")
    rest = {key: value for key, value in env.items() if key != "BEFORE"}
    (launches, put_aside), errors = _run(tmp_path, SLOW_KERNELS, before + RUNS, **rest)
    assert launches == [1] * 30
    assert put_aside == [] and "slower" not in errors


TWO_RANKS = (
    PROGRAM
    + """
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3, device=DEVICE))], lr=0.1)
run_until_fused()
alone = [run() for _ in range(25)]
dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
optimizer.step()
print(json.dumps([alone, [run() for _ in range(25)]]))
"""
)


def test_a_process_group_makes_plans_anew_without_measuring(tmp_path):
    (alone, together), _ = _run(tmp_path, SLOW_KERNELS, TWO_RANKS)
    assert alone[-3:] == [0, 0, 0]  # put aside by time
    assert together == [1] * 25


# Updates by gradients as an all-reduce makes them: the same in all processes.
UPDATES = """
import os
g = torch.Generator().manual_seed(0)
def drawn(n, dtype=torch.float32):
    return torch.randn(n, generator=g).to(DEVICE, dtype)
def update(groups, reading):
    optimizer = torch.optim.RMSprop([p for group in groups for p in group], lr=1e-2)
    before = helpers.stats()
    for step in range(12):
        optimizer.zero_grad()
        loss = (x * 2).tanh().sum()
        for group in groups:
            for p in group:
                p.grad = drawn(p.numel(), p.dtype) * 1.5
        reads = os.environ["READS"] if step in reading else ""
        if reads == "loss":
            loss.item()
        norms = [torch.nn.utils.clip_grad_norm_(group, 1.0) for group in groups]
        if reads == "norm":
            for norm in norms:
                norm.item()
        norm = norms = None  # what nobody sees is not stored, and not rounded for that
        optimizer.step()
    return [helpers.stats()[key] - before[key] for key in ("kernel_launches", "flushes")]
x = drawn(4096).view(64, 64)
whole = [[torch.nn.Parameter(drawn(4096))]]
halves = [[torch.nn.Parameter(drawn(n, torch.bfloat16)) for n in sizes]
          for sizes in ((4096, 100), (500, 30))]
counts = update(whole, (0, 8))
update(halves, (0, 3, 6, 9))
made = [p.tolist() for group in (*whole, *halves) for p in group]
print(json.dumps([counts, made]))
"""


@pytest.fixture(scope="module")
def of_other_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a rank does that reads nothing."""
    folder = tmp_path_factory.mktemp("ranks")
    return _run(folder, GXX, UPDATES, WORLD_SIZE="2", READS="")[0]


@pytest.mark.parametrize("reads", ["loss", "norm"])
def test_a_rank_that_reads_alone_makes_the_same_updates(of_other_ranks, tmp_path, reads):
    """Its step is cut in two there, and the second part is a plan that no other rank has."""
    (launches, flushes), others = of_other_ranks
    ((reading, more), own), _ = _run(tmp_path, GXX, UPDATES, WORLD_SIZE="2", READS=reads)
    assert launches > 24
    assert more == flushes + 2
    assert reading == launches + 2  # what the cut leaves alone in a plan is a kernel, too
    assert own == others


def test_a_slow_compiler_is_not_waited_for_long(tmp_path):
    # Before `go` nothing is compiled: were it waited for without limit, nothing would come after.
    body = f"""{PROGRAM}
early = [run() for _ in range(10)]
late = helpers.stats().get("jit/late")
pathlib.Path({str(tmp_path)!r}, "go").touch()
run_until_fused()
print(json.dumps([early, late]))
"""
    (early, late), _ = _run(tmp_path, LATE_KERNELS, body)
    assert early == [0] * 10
    assert late == 1


def test_where_bits_must_not_depend_on_time_the_compiler_is_waited_for(tmp_path):
    # The compiler takes longer than anybody is patient for.
    slow = '#!/bin/sh\ncase "$1" in --version) exec g++ --version;; esac\nsleep 2\nexec g++ "$@"\n'
    body = PROGRAM + "print(json.dumps([run() for _ in range(5)]))"
    launches, _ = _run(tmp_path, slow, body, ACC_DETERMINISTIC="1")
    assert launches == [0, 0, 1, 1, 1]


SLOW_UPLOADS = """
helpers.extension().capture_plans(CAPTURED)
helpers.extension().slow_uploads(100_000)
"""


@pytest.mark.parametrize("captured", [True, False])
def test_an_upload_that_captured_work_does_not_repeat_is_not_the_kernels_time(tmp_path, captured):
    """Captured work uploads the arguments of all its kernels at once. Other runs upload them for
    each kernel, and it is the slower for that."""
    body = SLOW_UPLOADS.replace("CAPTURED", str(captured))
    body += RUNS.replace("1000,", "1_000_000,") + TIMES
    (launches, put_aside, seconds), errors = _run(tmp_path, GXX, body)
    assert len(put_aside) == (0 if captured else 1)
    assert ("slower as generated kernels" in errors) == (not captured)
    if captured:
        assert len(seconds) == 1 and 0 < seconds[0] < 1
