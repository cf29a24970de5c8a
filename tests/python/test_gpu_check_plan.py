"""The nine minutes of benchmarks/gpu_check.sh on a GPU, by the clock alone: what it reaches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import BAD, NOT_RUN, OK
from tests.python.test_gpu_check import check_for

pytestmark = pytest.mark.usefixtures("acc_only")

# Seconds that commands are thought to take on an H200 with 16 cores (docs/gpu.md), by what they
# have in them, the first that fits.
COMMANDS_S = {
    "nvidia-smi": 1,
    "scripts/native.py develop": 80,
    "gpu_probe.py env": 8,
    "gpu_probe.py copies": 8,
    "gpu_probe.py steps resnet50_16": 40,
    "gpu_probe.py steps gpt2_4": 40,
    "gpu_probe.py steps": 14,
    "gpu_probe.py trace": 10,
    "gpu_probe.py epilogues": 8,
    "gpu_probe.py gradients": 10,
    "gpu_probe.py kernels": 22,
    "gpu_ranks.py": 10,
    "tests/opinfo/survey.py": 20,
    "-m gpu -k": 40,
    "-m gpu": 80,
    f"tests/programs -k {gpu_check.FEW_PROGRAMS}": 18,
    "tests/programs": 100,
    f"test_plans.py -k {gpu_check.FEW_MODELS}": 16,
    "tests/models": 80,
    "ACC_MODE=nofuse": 12,
    "-m pytest": 200,  # all files of the executor
}
# Of benchmarks, by mode; acc's start with warm caches is one more, where it is measured.
MODES_S = {"eager": 6, "acc": 8, "graph": 7, "compile": 25}
COMPILE_S = {"mlp_small": 15, "lstm": 10}  # on a host half of the others', and hardly any
SEED_S = {"eager": 12, "acc": 18, "graph": 13, "compile": 60}
WARM_S = {"seed": 14}


class Planned:
    """A call on such a machine, or one that takes `slower` times as long, by the clock alone.

    `measured` are the benchmarks that came to their end, in order: case and modes, without
    torch.compile where its time was over.
    """

    def __init__(self, monkeypatch, out: Path, slower: float, only: str = "") -> None:
        self.slower, self.now = slower, 1000.0
        self.measured: list[tuple[str, str]] = []
        self.began: dict[str, float] = {}  # the seconds that were left for a part
        monkeypatch.setattr(gpu_check, "tool_of", lambda name: f"/bin/{name}")
        monkeypatch.setattr(gpu_check, "installed", lambda name: True)
        monkeypatch.setattr(gpu_check.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(gpu_check.Check, "run", self.run)
        monkeypatch.setattr(gpu_check.Check, "is_built", lambda check: True)
        monkeypatch.setattr(gpu_check, "PARTS", {k: self.part(k) for k in gpu_check.PARTS})
        self.check = check_for(out, dry=False)
        gpu_check.run_parts(self.check, only, "")
        assert self.now <= 1000.0 + gpu_check.LIMIT_S

    def part(self, name: str) -> tuple[float, Callable[[gpu_check.Check], None]]:
        share_s, part = gpu_check.PARTS[name]

        def run(check: gpu_check.Check) -> None:
            self.began[name] = check.left_s
            part(check)

        return share_s, run

    def run(self, command, limit_s, *, partial=False, **env) -> tuple[int | None, list[str]]:
        left_s = self.check.left_s
        if left_s < gpu_check.LEAST_S:
            raise gpu_check.OutOfTime
        words = [*(f"{name}={value}" for name, value in env.items()), *map(str, command)]
        text = " ".join(words)
        if "--case" in words:
            takes = self.benchmark(words, min(limit_s, left_s))
        else:
            takes = self.slower * next(s for key, s in COMMANDS_S.items() if key in text)
        self.now += min(takes, limit_s, left_s)
        said = ["tests/python/test_it.py::test_it PASSED", 'ROW ["it", "ok", "said"]']
        if takes <= min(limit_s, left_s):
            return 0, said
        if left_s < limit_s and not partial:
            raise gpu_check.OutOfTime
        return None, said[:1]

    def benchmark(self, words: list[str], left_s: float) -> float:
        """What run.py takes, which ends torch.compile by itself."""
        case, modes, own_s = (
            words[words.index(f"--{name}") + 1] for name in ("case", "modes", "limit-s")
        )
        seconds = SEED_S if case == "seed" else {**MODES_S, "compile": COMPILE_S.get(case, 25)}
        takes = 4 + sum(seconds[mode] for mode in modes.split(","))
        if "acc" in modes.split(",") and "--no-warm-start" not in words:
            takes += WARM_S.get(case, 6)
        takes *= self.slower
        others = takes - self.slower * seconds["compile"]
        if "compile" in modes and takes > float(own_s):
            takes, modes = max(float(own_s), others), modes.replace(",compile", "")
        if "--json" in words:
            with Path(words[words.index("--json") + 1]).open(
                "a" if "--append" in words else "w"
            ) as file:
                file.writelines(f"{case} {mode}\n" for mode in modes.split(","))
        if takes <= left_s:
            self.measured.append((case, modes))
        return takes

    def reached(self, part: str) -> list[str]:
        """The rows of a part that came to their end and are well."""
        return [row.what for row in self.check.rows if (row.part, row.status) == (part, OK)]


GROUPS = ["marked gpu", "20 operators", "programs", "models", "captured, nofuse"]


@pytest.mark.parametrize("slower", [1.0, 1.25])
def test_nine_minutes_hold_what_a_reader_wants_first(tmp_path, monkeypatch, slower):
    """Whether it works, then how fast it is beside eager and a captured step, then tests."""
    plan = Planned(monkeypatch, tmp_path, slower)
    assert list(plan.began) == [name for name, (share, _) in gpu_check.PARTS.items() if share]
    order = list(plan.began)
    assert order.index("steps") < order.index("numerics") < order.index("bench")
    assert order[-1] == "tests"
    for name in ("steps", "numerics", "bench", "kernels", "ranks", "tests"):
        assert plan.began[name] >= gpu_check.PARTS[name][0]
        assert plan.reached(name)
    cut = {row.part for row in plan.check.rows if row.status == NOT_RUN}
    assert cut == {"bench", "tests"}
    seed = [("seed", "eager,compile,graph,acc"), ("seed", "eager,graph,acc")][slower > 1.0]
    wanted = [seed, *((case, "eager,graph,acc") for case in gpu_check.LAUNCH_BOUND)]
    if slower == 1.0:  # and one of the four beside torch.compile, and all groups of tests
        assert plan.measured == [*wanted, ("mlp_small", "eager,compile")]
        assert plan.reached("tests") == GROUPS
    else:
        assert plan.measured == wanted[:4]
        assert plan.reached("tests") == GROUPS[1:3]
        (marked,) = [row for row in plan.check.rows if row.what == GROUPS[0]]
        assert marked.said.startswith("the time was over after tests/python/test_it.py::test_it")


@pytest.mark.parametrize("slower", [0.5, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("only", ["", "tests", "bench", "steps"])
def test_what_is_slow_is_not_wrong(tmp_path, monkeypatch, slower, only):
    plan = Planned(monkeypatch, tmp_path, slower, only)
    wrong = [row for row in plan.check.rows if row.status == BAD]
    if slower > 1.25:  # nothing tells a case that takes so long from one that hangs
        wrong = [row for row in wrong if "being slow or in a mode that hangs" not in row.said]
    assert wrong == []


def test_a_part_by_itself_reaches_all_that_it_has(tmp_path, monkeypatch):
    """What the call without a part has no time for."""
    plan = Planned(monkeypatch, tmp_path / "tests", 1.0, "tests")
    assert plan.reached("tests") == [*GROUPS, "of the executor"]
    assert all(row.status == OK for row in plan.check.rows)
    plan = Planned(monkeypatch, tmp_path / "bench", 1.0, "bench")
    assert plan.measured == [(case, modes) for _, case, modes in gpu_check.SHARING]
    assert plan.measured[-1] == ("gpt2_dropout", "eager,acc")


def test_replays_of_many_parameters_are_timed(tmp_path, monkeypatch):
    """As many as GPT-2 and ResNet-50 have: it is them that a step's end has to look at."""
    ran = []
    run = Planned.run

    def noted(plan, command, *arguments, **options):
        ran.append(list(command)[2:])
        return run(plan, command, *arguments, **options)

    monkeypatch.setattr(Planned, "run", noted)
    plan = Planned(monkeypatch, tmp_path, 1.0, "steps")
    assert all(row.status == OK for row in plan.check.rows)
    for case in ("resnet50_16", "gpt2_4"):
        assert ["steps", case] in ran


@pytest.mark.parametrize("only", ["", "bench"])
def test_few_files_hold_what_all_benchmarks_have_measured(tmp_path, monkeypatch, only):
    """However fast a machine is: whoever lends one may return eight files. Those of other calls
    stay."""
    (tmp_path / "bench.jsonl").write_text("of an earlier call\n")
    (tmp_path / "seed.jsonl").write_text("of --only bench:seed\n")
    plan = Planned(monkeypatch, tmp_path, 0.1, only)
    assert plan.measured == [(case, modes) for _, case, modes in gpu_check.SHARING]
    files = {file.name for file in tmp_path.iterdir() if file.is_file()}
    assert files == {"table.txt", "bench.jsonl", "bench-compile.jsonl", "seed.jsonl"}  # and log.txt
    assert (tmp_path / "seed.jsonl").read_text() == "of --only bench:seed\n"
    found = [
        sorted((tmp_path / f"{name}.jsonl").read_text().splitlines())
        for name in ("bench", "bench-compile")
    ]
    assert all(len(set(lines)) == len(lines) for lines in found)  # no mode of a case twice
    expected = [f"{case} {mode}" for case, modes in plan.measured for mode in modes.split(",")]
    assert sorted(found[0] + found[1]) == sorted(expected)
