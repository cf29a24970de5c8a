"""The documents' scripts run to the end, with eager's numbers."""

from __future__ import annotations

import pytest

from tests import helpers
from tests.seeds import extract
from tests.seeds.scripts import (
    Run,
    assert_ran_on,
    assert_same_numbers,
    run_script,
    steps,
    text_of,
)

DOCUMENTS = ("001", "002")  # 003 is 002 once more, without its indentation
FULL_ONLY = pytest.mark.skipif(
    not helpers.FULL, reason="differs from 001 by one line break; ACC_TEST_FULL=1 runs it"
)
# The scripts' own batches in make test-full: a step of ResNet-50 is long.
BATCH, EVERY = (64, 20) if helpers.FULL else (16, 8)


def small(source: str) -> str:
    # One line printed in each of two epochs; ResNet-50 takes images of 32 x 32 as they are.
    return extract.shrink(source, rows=BATCH * EVERY, side=32, epochs=2, batch=BATCH, every=EVERY)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Run:
    """The native script of the first document by eager CPU, in a process without the device."""
    script = tmp_path_factory.mktemp("reference") / "resnet_native.py"
    script.write_text(small(extract.native_script(text_of("001"))))
    return run_script(script, eager=True)


def test_the_scripts_of_the_documents_are_what_we_know():
    for number in DOCUMENTS:
        native = small(extract.native_script(text_of(number)))
        accelerated = small(extract.accelerated_script(text_of(number)))
        # Three lines more (two of them instead of the device lines), one line less in the loop.
        assert "torchacc" not in native
        assert accelerated.count("torchacc") == 2
        assert len(native.split()) > 100
        compile(native, "native", "exec")
        compile(accelerated, "accelerated", "exec")


@pytest.mark.slow
@pytest.mark.parametrize("number", ["001", pytest.param("002", marks=FULL_ONLY)])
def test_the_accelerated_script_of_a_document(device, tmp_path, reference, number):
    script = tmp_path / "resnet_acc.py"
    script.write_text(small(extract.accelerated_script(text_of(number))))
    run = run_script(script)
    assert_ran_on(run, device)
    assert run.report["loader"] == "AsyncLoader"
    assert steps(run) == [(0, EVERY), (1, EVERY)]
    assert_same_numbers(run, reference)


@pytest.mark.slow
def test_the_native_script_by_the_command_run(acc_only, tmp_path, reference):
    """It says "cuda:0", and not a letter of it is changed but for the sizes."""
    script = tmp_path / "resnet_native.py"
    script.write_text(small(extract.native_script(text_of("001"))))
    run = run_script(script, by=("-m", "torchacc", "run"))
    assert_ran_on(run, acc_only)
    assert run.report["loader"] == "DataLoader"
    assert_same_numbers(run, reference)


# --- the extraction ------------------------------------------------------------------------------


def test_the_new_side_of_a_diff():
    diff = "  import time\n+ import torchacc\n- import gone\n\n      for x in y:\n-         a\n+ \n"
    assert extract.new_side(diff) == "import time\nimport torchacc\n\n    for x in y:\n\n"
    with pytest.raises(extract.SeedError, match="line 1"):
        extract.new_side("no margin")


def test_shrinking_replaces_sizes_and_nothing_else():
    source = (
        "batch_size = 64\nlog_steps = 20\n"
        "x = randn(6400, 3, 224, 224)\ny = randint(0, 100, (6400,))\n"
        "for epoch in range(4):\n  z\n"
    )
    assert extract.shrink(source, rows=8, side=16, epochs=1, batch=2, every=5) == (
        "batch_size = 2\nlog_steps = 5\nx = randn(8, 3, 16, 16)\ny = randint(0, 100, (8,))\n"
        "for epoch in range(1):\n  z\n"
    )
    own = extract.shrink(source, rows=8, side=16, epochs=1)
    assert "batch_size = 64\nlog_steps = 20\n" in own
    with pytest.raises(extract.SeedError, match="6400"):
        extract.shrink(source.replace("(6400,)", "(64,)"), rows=8, side=16, epochs=1)


def test_documents_that_are_absent_are_no_error(monkeypatch, tmp_path):
    monkeypatch.setenv("ACC_SEEDS_DIR", str(tmp_path))
    assert extract.folder() == tmp_path
    assert extract.document("001") is None
