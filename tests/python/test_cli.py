"""`python -m torchacc env`, the cost of the import, and other packages named torchacc."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

import torchacc
from tests import helpers
from torchacc import environment
from torchacc.__main__ import main
from torchacc_device import _foreign

# --- the report ---------------------------------------------------------------------------------


def test_the_report_names_what_a_bug_report_needs(acc_only, monkeypatch, capsys):
    monkeypatch.setenv("ACC_MODE", "eager")
    monkeypatch.setenv("ACC_NO_SUCH_VARIABLE", "1")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    for expected in ("torchacc:", "torch:", "device:", "machine:", "variables:", "ACC_MODE"):
        assert expected in text
    # A misspelt name is pointed out.
    assert re.search(r"not known +ACC_NO_SUCH_VARIABLE$", text, re.MULTILINE)
    assert torchacc.__version__ in text and sys.executable in text
    assert max(map(len, text.splitlines())) < 400


def test_the_report_as_json_holds_the_same(acc_only, capsys):
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torchacc"]["version"] == torchacc.__version__
    assert found["device"]["devices"] >= 1
    assert found["device"]["executor"] in ("host", "cuda")
    assert found["machine"]["cores"] >= 1
    assert found["torchacc"]["other torchacc"] is None
    assert set(found) == set(environment.environment())


def test_values_are_written_for_people():
    text = environment.render(
        {"a": {"yes": True, "long name": None}, "b": {"x": ["p", "q"], "y": []}}
    )
    assert text.splitlines() == [
        "a:",
        "  yes        yes",
        "  long name  -",
        "b:",
        "  x  p, q",
        "  y  -",
    ]


def test_an_empty_section_is_only_a_title():
    assert environment.render({"variables": {}}) == "variables:"


def test_the_module_can_be_run(acc_only):
    done = subprocess.run(
        [sys.executable, "-m", "torchacc", "env"],
        cwd=helpers.ROOT,
        env=helpers.child_env(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torchacc:") and done.stderr == ""


@pytest.mark.parametrize("arguments", [[], ["enviroment"], ["env", "--xml"]])
def test_an_unknown_command_is_refused_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m torchacc" in capsys.readouterr().err


# --- the import ---------------------------------------------------------------------------------


def test_the_public_names_are_there():
    for name in torchacc.__all__:
        assert hasattr(torchacc, name), name
    assert callable(torchacc.accelerate)


def test_importing_brings_no_large_part_of_torch(acc_only):
    """torch.distributed.tensor and the sympy that it needs take as long as half of torch itself."""
    code = """
import sys
before = set(sys.modules)
import torchacc
brought = {name for name in set(sys.modules) - before if name.partition(".")[0] != "torchacc"}
print(*sorted(brought))
"""
    # The prelude of run_python would import the device before.
    done = subprocess.run(
        [sys.executable, "-c", "import torch\n" + code],
        cwd=helpers.ROOT,
        env=helpers.child_env(TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    brought = done.stdout.split()
    large = ("torch.distributed.tensor", "torch._dynamo", "torch._inductor", "sympy", "numpy")
    assert not [name for name in brought if name.startswith(large)]
    assert len(brought) <= 100, brought


# --- other packages of this name ----------------------------------------------------------------


def find_in(folder, prelude=""):
    """What `_foreign.find()` says in a process that has `folder` first on its path."""
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(folder)!r})\n"
        f"{prelude}\n"
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('_foreign', {_foreign.__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['_foreign'] = module\n"
        "spec.loader.exec_module(module)\n"
        "found = module.find()\n"
        "print('none' if found is None else found.message())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=helpers.child_env(),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.strip()


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_our_own_package_is_not_foreign():
    assert _foreign.find() is None


def test_a_foreign_package_is_found_without_importing_it(tmp_path):
    write(tmp_path, {"torchacc/__init__.py": "raise SystemExit('imported')"})
    said = find_in(tmp_path)
    assert str(tmp_path / "torchacc" / "__init__.py") in said
    assert "not this project's package" in said


def test_an_installed_foreign_distribution_is_named(tmp_path):
    write(
        tmp_path,
        {
            "torchacc/__init__.py": "__version__ = '2.3.0'",
            "torchacc-2.3.0.dist-info/METADATA": (
                "Metadata-Version: 2.1\nName: torchacc\nVersion: 2.3.0\n"
            ),
        },
    )
    said = find_in(tmp_path)
    assert "torchacc 2.3.0" in said and "pip uninstall torchacc" in said


def test_a_script_or_folder_of_this_name_is_found(tmp_path):
    script, folder = tmp_path / "script", tmp_path / "folder"
    write(script, {"torchacc.py": "print('hello')"})
    assert str(script / "torchacc.py") in find_in(script)
    write(folder, {"torchacc/notes.txt": ""})
    said = find_in(folder)
    # A folder without __init__.py loses against a real package further down the path.
    assert said == "none"


def test_a_foreign_module_that_is_already_imported_is_found(tmp_path):
    write(tmp_path, {"torchacc/__init__.py": "", "own/torchacc.py": ""})
    assert "torchacc" in find_in(tmp_path, "import torchacc")
    # One without a spec, as some tools put into sys.modules.
    prelude = (
        "import types\nm = types.ModuleType('torchacc')\n"
        "m.__file__ = '/nowhere/torchacc.py'\nsys.modules['torchacc'] = m"
    )
    assert "/nowhere/torchacc.py" in find_in(tmp_path, prelude)
