"""The logger `TorchAcc`: its level, where it prints, and what is said once."""

from __future__ import annotations

import logging
import os

import pytest

import torchacc  # noqa: F401  (the logger is set up by the import)
from tests import helpers
from torchacc import logger as log


@pytest.fixture(autouse=True)
def forget_said():
    log.forget_said_for_testing()


def run(code, **env):
    """Standard output and standard error of a process that imports torchacc."""
    prelude = "import logging\nimport torchacc\nfrom torchacc.logger import logger, say_once\n"
    done = helpers.run_python(prelude + code, **env)
    return done.stdout, done.stderr


def test_it_is_a_logger_of_the_standard_library():
    assert log.logger is logging.getLogger("TorchAcc")


@pytest.mark.parametrize(
    ("value", "level"),
    [
        (None, logging.INFO),
        ("", logging.INFO),
        ("debug", logging.DEBUG),
        ("WARNING", logging.WARNING),
        ("Error", logging.ERROR),
    ],
)
def test_the_level_comes_from_the_environment(monkeypatch, value, level):
    if value is None:
        monkeypatch.delenv("ACC_LOG_LEVEL", raising=False)
    else:
        monkeypatch.setenv("ACC_LOG_LEVEL", value)
    assert log.level_from_environment() == level


def test_a_level_that_does_not_exist_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("ACC_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match="ACC_LOG_LEVEL=loud is not allowed.*debug, info"):
        log.level_from_environment()


def test_a_level_that_does_not_exist_stops_the_import():
    code = "import torchacc"
    done = helpers.run_python(code, check=False, fresh=True, ACC_LOG_LEVEL="loud")
    assert done.returncode != 0
    assert "ACC_LOG_LEVEL=loud" in done.stderr and "warning" in done.stderr


def test_records_go_to_standard_error_in_one_line_each():
    out, err = run("logger.info('hello %d', 7); logger.debug('no')", ACC_LOG_LEVEL=None)
    assert out == ""
    (line,) = [line for line in err.splitlines() if "hello" in line]
    assert line.startswith("[") and line.endswith("- INFO] hello 7")
    assert "no" not in [line[-2:] for line in err.splitlines()]


def test_debug_shows_what_info_hides():
    assert "hidden" in run("logger.debug('hidden')", ACC_LOG_LEVEL="debug")[1]
    assert "shown" not in run("logger.info('shown')", ACC_LOG_LEVEL="error")[1]


def test_a_program_with_logging_of_its_own_gets_each_record_once():
    _, err = run("logging.basicConfig(format='MINE %(message)s'); logger.warning('hello')")
    assert [line for line in err.splitlines() if "hello" in line] == ["MINE hello"]


def test_what_is_said_once_is_said_once(caplog):
    assert log.say_once("key", "first") is True
    assert log.say_once("key", "second") is False
    assert log.say_once(("another", 1), "third", level=logging.INFO) is True
    assert [record.getMessage() for record in caplog.records] == ["first", "third"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_what_is_said_once_by_many_threads_is_said_once(caplog):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(lambda _: log.say_once("threads", "hello"), range(200)))
    assert sum(said) == 1 and len(caplog.records) == 1


def test_a_forked_worker_does_not_say_it_again():
    assert log.say_once("forked", "hello")
    child = os.fork()
    if child == 0:
        os._exit(1 if log.say_once("forked", "hello") else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_importing_and_training_say_only_what_is_patched(device):
    """A warning that everybody sees is one that nobody reads."""
    code = """
model, loader = torchacc.accelerate(torch.nn.Linear(2, 2), [torch.ones(1, 2)] * 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in loader:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
torchacc.sync(wait=True)
"""
    out, err = run(code, ACC_LOG_LEVEL=None, CUDA_VISIBLE_DEVICES="")
    (line,) = err.splitlines()
    assert out == "" and "torchacc.unpatch() takes that back" in line
