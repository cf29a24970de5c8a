"""Documentation that is generated is up to date."""

from __future__ import annotations

import argparse
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import helpers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import api_docs  # noqa: E402
import autocast_docs  # noqa: E402
from api_cases import Case  # noqa: E402
from api_table import DIFFERS, NOT_OFFERED, WORKS, Option, Row  # noqa: E402


def test_the_environment_table_is_the_one_in_the_code() -> None:
    """`python scripts/environment_docs.py` was run after the last change of the table."""
    command = [sys.executable, str(ROOT / "scripts" / "environment_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"run scripts/environment_docs.py\n{done.stderr}"


def test_the_table_of_the_api_is_borne_out_by_the_code(device: str, monkeypatch) -> None:
    """`python scripts/api_docs.py` was run after the last change of a public name."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    page, faults = api_docs.text()
    assert not faults, "scripts/api_table.py:\n" + "\n".join(faults)
    assert page == api_docs.DOCUMENT.read_text(), "run scripts/api_docs.py"


@pytest.mark.usefixtures("acc_only")
def test_the_table_of_autocast_is_the_one_that_is_registered(monkeypatch) -> None:
    """`python scripts/autocast_docs.py` was run under this torch; what differs is told."""
    page, faults = autocast_docs.text()
    assert not faults
    assert page == autocast_docs.DOCUMENT.read_text(), "run scripts/autocast_docs.py"
    listed = autocast_docs.macros()
    listed["sinus"] = listed.pop("exp")
    monkeypatch.setattr(autocast_docs, "macros", lambda: listed)
    assert autocast_docs.text()[1] == [
        "sinus: listed, and acc has no kernel for it",
        "sinus: listed, and CUDA has no kernel for it",
        "exp: registered, and not listed",
    ]


@pytest.mark.parametrize(
    ("documented", "told"),
    [
        ("(a, b=1, *args, c=2, **kwargs)", ""),
        ("(a)", ""),
        ("(a, b=[1])", "b has the default 1, not [1]"),
        ("(b=1)", "b is not parameter 1; a has to be given"),
        ("(a, d)", "it has no parameter d"),
        ("(a, b=1, c=2)", "c is not parameter 3"),
    ],
)
def test_signatures_are_held_against_the_documented_ones(documented: str, told: str) -> None:
    def there(a, b=1, *args, c=2, **kwargs):
        """What there is."""

    found = api_docs.mismatches(
        api_docs.documented(documented), list(inspect.signature(there).parameters.values())
    )
    assert "; ".join(found) == told


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (Row("sync", "(wait=False)"), None),
        (Row("sync", "(wait=True)"), "sync(wait=True): wait has the default False, not True"),
        (Row("sink"), "sink is said to work, and is not there"),
        (Row("sync", "", NOT_OFFERED, "why"), "sync is called not offered, and is there"),
        (Row("sink", "", NOT_OFFERED), "sink is not offered, and there is no reason"),
        (Row("__version__", "()"), "__version__ cannot be called"),
        (Row("dist.Mesh.stage_to_global", "(stage_id)"), None),
        (Row("GlobalContext.config"), None),
        (Row("GlobalContext.nothing"), "GlobalContext.nothing is said to work, and is not there"),
        (Row("sync", "(wait=True)", DIFFERS, "`await` is False"), "sync: not said of wait"),
        (Row("sync", "(wait=True)", DIFFERS, "`wait` is False"), None),
        (Row("sync", "(wait, other)", DIFFERS, "`wait` is False"), "sync: not said of other"),
        (Row("tiacc_training.tiacc_init", "(params=None)"), None),
        (
            Row("tiacc_training.tiacc_init", "(params=1)"),
            "tiacc_training.tiacc_init(params=1): params has the default None, not 1",
        ),
        (Row("tiacc_training.sync"), "tiacc_training.sync is said to work, and is not there"),
        (Row("dist.nothing.at_all"), "dist.nothing.at_all is said to work, and is not there"),
    ],
)
def test_a_row_that_is_not_so_is_told(device: str, row: Row, told: str | None) -> None:
    assert api_docs.wrong(row, api_docs.find(row.name)) == told


def test_a_name_that_a_version_may_have_is_settled_by_the_code(device: str) -> None:
    for verdict, there, away in (
        (WORKS, (WORKS, ""), (NOT_OFFERED, "why")),
        (DIFFERS, (DIFFERS, "why"), (NOT_OFFERED, "not in this version")),
    ):
        assert (
            api_docs.settled(Row("sync", "()", verdict, "why"), api_docs.find("sync"))[2:] == there
        )
        missing = api_docs.find("sink")
        assert api_docs.settled(Row("sink", "()", verdict, "why"), missing)[2:] == away


def test_options_of_a_command_are_held_against_its_help(device: str) -> None:
    faults: list[str] = []
    rows = list(api_docs.command_table(faults, "xlarun", ("--nproc_per_node", "--nothing")))
    assert faults == ["xlarun (tiacc_training.launcher:xlarun) does not take --nothing"]
    assert "| `xlarun --nproc_per_node --nothing` | works |" in rows
    assert "not offered" in list(api_docs.command_table(faults, "nothing", ()))[2]


def test_options_of_a_module_are_held_against_its_help() -> None:
    faults: list[str] = []
    name = "tiacc_training.tools.img2tfrecord"
    rows = list(api_docs.module_table(faults, [(name, ("--img_dir", "--nothing"))]))
    assert faults == [f"python -m {name} does not take --nothing"]
    assert rows[2:] == [f"| `python -m {name} --img_dir --nothing` | works |"]


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (Option("--count", 1), ""),
        (Option("--count", 2), "--count has the default 1, not 2"),
        (Option("--count", 2, DIFFERS, "why"), "--count has the default 1, not 2"),
        (Option("--count", 2, DIFFERS, "the default is `1`, since"), ""),
        (
            Option("--count", 2, WORKS, "the default is `1`, since"),
            "--count has the default 1, not 2",
        ),
        (Option("--count", 2, DIFFERS, "the default is `3`"), "--count has the default 1, not 2"),
        (Option("--count", 1, DIFFERS, "the default is `1`"), "--count has the default 1, not 1"),
    ],
)
def test_defaults_of_a_command_are_held_against_it(device: str, option: Option, told: str) -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--count", default=1)

    faults: list[str] = []
    (row,) = list(api_docs.default_table(faults, add, [option]))[2:]
    assert row == f"| `--count` | `{option.default}` | {api_docs.cell(*option[2:])} |"
    assert "; ".join(faults) == told


def _raises(kind: type[BaseException]) -> Callable[[object], object]:
    def call(_: object) -> object:
        raise kind

    return call


# What a case is told to be, and what is wrong with it in a row that works, and in one that differs.
@pytest.mark.parametrize(
    ("case", "said", "works", "differs"),
    [
        (Case("0", ValueError, _raises(ValueError)), "0: `ValueError`", 0, 0),
        (Case("0", RuntimeError, _raises(NotImplementedError)), "0: `RuntimeError`", 0, 0),
        (Case("0", ValueError, _raises(ValueError), "so"), "0: `ValueError`", 1, 1),
        (Case("0", ValueError, _raises(TypeError)), "0: `TypeError`, not `ValueError` ()", 2, 1),
        (
            Case("0", ValueError, _raises(TypeError), "so"),
            "0: `TypeError`, not `ValueError` (so)",
            1,
            0,
        ),
        (Case("0", ValueError, lambda _: 1, "so"), "0: no error, not `ValueError` (so)", 1, 0),
        (Case("0", SystemExit, _raises(SystemExit)), "0: `SystemExit`", 0, 0),
        (Case("0", 8, lambda _: 8), "0: `8`", 0, 0),
        (Case("0", 8, lambda _: 9), "0: `9`, not `8` ()", 2, 1),
        (Case("0", 8, _raises(ValueError), "so"), "0: `ValueError`, not `8` (so)", 1, 0),
    ],
)
def test_cases_are_held_against_the_code(
    device: str, case: Case, said: str, works: int, differs: int
) -> None:
    for verdict, count in ((WORKS, works), (DIFFERS, differs)):
        faults: list[str] = []
        assert api_docs.told(faults, "name", verdict, [case]) == [said]
        assert len(faults) == count and all(fault.startswith("name") for fault in faults)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dist.Mesh", AssertionError),
        ("memory.gc_cls", AssertionError),
        ("dist.fsdp.wrap_layer_cls", AssertionError),
    ],
)
def test_a_row_that_works_raises_what_is_documented(device: str, name: str, kind: type) -> None:
    faults: list[str] = []
    api_docs.judged(faults, Row(name))
    assert any(f"{name} is said to work" in f and f"not `{kind.__name__}`" in f for f in faults)


def test_cases_belong_to_rows_and_rows_to_cases(device: str, monkeypatch) -> None:
    monkeypatch.setattr(api_docs, "CASES", {"sink": (), "llm": ()})
    faults = api_docs.text()[1]
    assert {
        "sink has cases, and no row that offers it",
        "llm has cases, and no row that offers it",
        "memory.gc_cls differs, and it is not said how",
        "no case shows the default of the variable ACC_LOG_LEVEL",
    } <= {*faults}


def test_scripts_that_are_not_offered_are_not_there() -> None:
    faults: list[str] = []
    rows = [Row("README.md", "", NOT_OFFERED, "why"), Row("tools/sink.py"), Row("README.md")]
    assert list(api_docs.script_table(faults, rows))[2] == "| `README.md` | not offered: why |"
    assert [fault.split()[2] for fault in faults] == ["README.md", "tools/sink.py"]


def test_errors_are_those_that_docstrings_of_ours_name() -> None:
    def in_a_section() -> None:
        """What it does.

        Raises:
            TypeError: another type,
                however made.
            OSError: no file.
        """

    def in_a_sentence() -> None:
        """What it does. Raises
        ValueError for less than 1.

        This is about something else.
        """

    def in_none() -> None:
        """What it does when another raises."""

    kinds = in_a_section, in_a_sentence, in_none
    for each in kinds:
        each.__module__ = "torchacc.kinds"
    assert [api_docs.errors(each) for each in kinds] == [
        "`TypeError`: another type, however made. `OSError`: no file.",
        "`ValueError` for less than 1.",
        "",
    ]
    in_a_section.__module__ = "torch.kinds"
    assert api_docs.errors(in_a_section) == ""


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("dist.tp.size", "`0`: should be at least 1"),
        ("memory.gc_cnt", "`-1`: should be at least 0"),
        ("dist.comm.compression", "`'another'`: should be 'fp16', 'bf16' or None"),
        ("dist.fsdp.use_spmd", ""),  # refused, and no ValueError
        ("compute.fp16", ""),  # may be both of what there is to try
    ],
)
def test_a_value_that_an_option_must_not_have_is_found(device: str, path: str, told: str) -> None:
    assert api_docs.refusal(path) == told


@pytest.mark.parametrize(
    ("option", "refused"),
    [
        (Option("compute.fp16", False), False),
        (Option("memory.gc", False), False),  # it asks for gc_cls, and is offered
        (Option("dist.fsdp.use_spmd", False), True),
        (Option("backend", "lazy"), True),
        (Option("memory.gc_cnt", None), False),  # nothing to try
    ],
)
def test_an_option_that_is_refused_is_told_from_one_that_works(
    device: str, option: Option, refused: bool
) -> None:
    assert api_docs.is_refused(option) == refused


BEFORE = """
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = torch.nn.CrossEntropyLoss()
train_loader = [(torch.randn(4, 8), torch.tensor([0, 1, 2, 0])) for _ in range(6)]
"""


@pytest.mark.usefixtures("acc_only", "recording")
def test_the_programs_of_the_readme_run() -> None:
    """Both in one: the second calls the body of the first one's loop."""
    text = (ROOT / "README.md").read_text()
    loop, scopes = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    body = loop.partition("# batches arrive on the device\n")[2]
    assert "optimizer.step()" in body
    done = helpers.run_python(f"{BEFORE}{loop}def train_step(inputs, labels):\n{body}{scopes}")
    assert "ended by optimizer.step(), mark_step()" in done.stdout
    assert "the first plan" in done.stdout
    assert "values compared: as ATen's" in done.stdout


def test_the_readme_begins_with_what_has_run_on_no_gpu() -> None:
    """As long as no results are a GPU's."""
    results = [file.read_text() for file in (ROOT / "benchmarks/results").glob("*.jsonl")]
    assert any('"executor": "host"' in text for text in results)
    measured = any('"executor": "cuda"' in text for text in results)
    first = (ROOT / "README.md").read_text().splitlines()[:5]
    said = any(line.startswith("**CUDA path: not yet run on a GPU.**") for line in first)
    assert said != measured


def test_every_document_that_the_readme_names_exists() -> None:
    """The README points at no page that is not there."""
    text = (ROOT / "README.md").read_text()
    named = {part.split("`")[0] for part in text.split("`docs/")[1:]}
    assert named
    for name in named:
        assert (ROOT / "docs" / name).exists(), name


def test_options_without_effect_say_so(device: str) -> None:
    """Those that `accelerate` logs as such, or that are there for TorchAcc's programs."""
    told = dict(
        re.findall(r"^\| `(compute\.\w+)` .* \| ([^|]*) \|$", api_docs.DOCUMENT.read_text(), re.M)
    )
    silent = {name for name, verdict in told.items() if "without effect" in verdict}
    assert silent == {"compute.acc_scaled_dot_attn", "compute.disable_kernel_patches"}


def test_names_without_effect_say_so(device: str) -> None:
    """Those that are there for TorchAcc's programs, and change nothing."""
    told = dict(
        re.findall(r"^\| `([\w.]+)[^|]*` \|.*\| ([^|]*) \|$", api_docs.DOCUMENT.read_text(), re.M)
    )
    silent = {name for name, verdict in told.items() if verdict.startswith("differs: without")}
    assert silent == {
        "mark_dynamic",
        "ops.apply_liger_kernel",
        "ops.apply_liger_kernel_to_llama",
        "ops.apply_liger_kernel_to_qwen2",
        "patch_qwen_model",
        "utils.decompose.replace_decompose",
        "utils.patch.patch_fa",
        "utils.patch.patch_llama",
        "utils.patch.patch_qwen",
    }
    assert told["ops.spmd_flash_attn_varlen_xla"].startswith("differs: refuses `partition_spec`")


def test_errors_of_what_raises_its_own_are_on_the_page(device: str) -> None:
    """Each has an error of its own in its code, which its docstring names."""
    raising = (
        "dist.Mesh.stage_to_global",
        "dist.ParallelModule.forward_backward",
        "dist.PipelineParallel",
        "dist.PipelineParallel.forward_backward",
        "dist.state_dict_utils.consolidate_and_reshard_fsdp_checkpoint",
        "dist.tp.mark_sharding",
    )
    told = api_docs.DOCUMENT.read_text().partition("## Errors")[2]
    assert [name for name in raising if f"| `{name}` |" not in told] == []
