"""The tree obeys its rules, and the checker of the rules finds what breaks them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import layout_rules

ROOT = Path(__file__).resolve().parents[2]
ENV_TABLE = 'const char* names[] = {"ACC_MODE", "ACC_EXECUTOR"};\n'


def make_tree(root: Path, files: dict[str, str]) -> Path:
    """Writes a tree that obeys every rule, and `files` over it."""
    clean = {
        "csrc/base/env.cpp": ENV_TABLE,
        "csrc/base/check.h": "#pragma once\n#include <string>\n",
        "csrc/runtime/backend.h": "#pragma once\n#include <c10/core/Device.h>\n",
        "csrc/runtime/backend_cuda.cpp": "#include <cuda_runtime.h>\n",
        "csrc/runtime/no_cuda.cpp": '#include "csrc/runtime/backend.h"\n',
        "csrc/aten/register.cpp": '#include <torch/library.h>\n#include "lazy/session/session.h"\n',
        "lazy/graph/graph.h": '#pragma once\n#include <vector>\n#include "csrc/base/check.h"\n',
        "lazy/record/recorder.h": '#pragma once\n#include "lazy/graph/graph.h"\n',
        "lazy/passes/dce.h": '#pragma once\n#include "lazy/graph/graph.h"\n',
        "lazy/plan/plan.h": '#pragma once\n#include "lazy/passes/dce.h"\n',
        "lazy/exec/runner.cpp": '#include <ATen/core/Tensor.h>\n#include "lazy/plan/plan.h"\n',
        "lazy/session/session.h": '#pragma once\n#include "lazy/record/recorder.h"\n',
        "tests/cpp/test_graph.cpp": '#include <gtest/gtest.h>\n#include "lazy/graph/graph.h"\n',
        "torchacc_device/csrc/module.cpp": "#include <torch/csrc/utils/pybind.h>\n",
        "torchacc_device/__init__.py": "import os\n\nMODE = os.environ.get('ACC_MODE')\n",
        "torchacc_device/_patches.py": "import torch\n\ntorch.Tensor.data_ptr = None\n",
        "docs/notes.md": "A page about the tree.\n",
    }
    for name, text in {**clean, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def found(root: Path) -> list[tuple[str, int, str]]:
    """What the checker reports, without the texts."""
    return [(v.path, v.line, v.rule) for v in layout_rules.check(root)]


def test_this_tree_obeys_every_rule() -> None:
    violations = layout_rules.check(ROOT)
    assert not violations, "\n" + "\n".join(map(str, violations))


def test_this_tree_is_looked_at() -> None:
    """A walker that skipped everything would call any tree clean."""
    names = {path.relative_to(ROOT).as_posix() for path in layout_rules.source_files(ROOT)}
    for name in (
        "csrc/base/env.cpp",
        "lazy/session/session.h",
        "torchacc/__init__.py",
        "CMakeLists.txt",
    ):
        assert name in names
    assert not any(name.startswith((".venv/", "build/", ".git/")) for name in names)


def test_a_clean_tree_has_no_violation(tmp_path: Path) -> None:
    assert found(make_tree(tmp_path, {})) == []


CPP = "csrc/aten/copy.cpp"
BROKEN: list[tuple[str, str, str, int, str]] = [
    # rule, file, text, line, why it is wrong
    (
        "include",
        "csrc/base/hash.h",
        '#pragma once\n#include "lazy/graph/graph.h"\n',
        2,
        "base sees std",
    ),
    (
        "include",
        "csrc/runtime/guard.cpp",
        '#include "lazy/session/session.h"\n',
        1,
        "runtime knows no graphs",
    ),
    ("include", "lazy/graph/infer.cpp", '#include "csrc/runtime/backend.h"\n', 1, "graph is pure"),
    (
        "include",
        "lazy/passes/cse.cpp",
        '#include "lazy/plan/plan.h"\n',
        1,
        "passes see the left only",
    ),
    (
        "include",
        "lazy/plan/key.cpp",
        '#include "lazy/record/recorder.h"\n',
        1,
        "plan sees no recorder",
    ),
    (
        "include",
        "lazy/exec/queue.h",
        '#pragma once\n\n#include "lazy/passes/dce.h"\n',
        3,
        "exec runs plans",
    ),
    ("include", CPP, '#include "lazy/plan/plan.h"\n', 1, "the edge goes through the session"),
    ("include", "tests/cpp/test_x.cpp", '#include "csrc/runtime/backend.h"\n', 1, "needs torch"),
    ("include-missing", CPP, '#include "csrc/base/nothing.h"\n', 1, "no such file"),
    ("include-root", CPP, '#include "register.h"\n', 1, "relative to the file"),
    ("include-root", CPP, '#include "../base/check.h"\n', 1, "relative to the file"),
    ("include-root", CPP, "#include <csrc/base/check.h>\n", 1, "ours, but in angle brackets"),
    ("folder", "csrc/extra/thing.h", "#pragma once\n", 1, "no row in the table"),
    ("torch-header", "lazy/graph/infer.cpp", "#include <c10/core/ScalarType.h>\n", 1, "pure"),
    ("torch-header", "lazy/plan/key.cpp", "#include <ATen/core/Tensor.h>\n", 1, "pure"),
    ("torch-header", "tests/cpp/test_x.cpp", "#include <ATen/core/Tensor.h>\n", 1, "torch-free"),
    ("heavy-header", CPP, "#include <ATen/ATen.h>\n", 1, "12 s a file"),
    ("heavy-header", CPP, "#include <torch/extension.h>\n", 1, "28 s a file"),
    ("cuda-header", "csrc/runtime/stream.cpp", "#include <cuda_runtime.h>\n", 1, "not a CUDA file"),
    (
        "cuda-header",
        "csrc/runtime/stream.cpp",
        "#include <c10/cuda/CUDAStream.h>\n",
        1,
        "not either",
    ),
    ("cuda-header", "csrc/runtime/no_cuda.cpp", "#include <cuda.h>\n", 1, "the stand-in has none"),
    ("python-header", CPP, "#include <Python.h>\n", 1, "the edge holds no Python"),
    ("python-header", CPP, "#include <torch/csrc/utils/pybind.h>\n", 1, "the edge holds no Python"),
    ("gtest-header", CPP, "#include <gtest/gtest.h>\n", 1, "product code"),
    ("pragma-once", "csrc/base/hash.h", "int f();\n", 1, "no guard"),
    ("using-namespace", "csrc/base/hash.h", "#pragma once\nusing namespace std;\n", 2, "leaks"),
    ("getenv", CPP, '\nauto x = std::getenv("HOME");\n', 2, "the table is the place"),
    ("exit", CPP, "void f() { exit(1); }\n", 1, "ends the process"),
    ("exit", CPP, "void f() { std::abort(); }\n", 1, "ends the process"),
    ("print", CPP, 'void f() { std::cout << "x"; }\n', 1, "prints"),
    ("print", CPP, 'void f() { fprintf(stderr, "x"); }\n', 1, "prints"),
    ("std-hash", CPP, "auto h = std::hash<int>{}(1);\n", 1, "differs by library"),
    ("filesystem", CPP, "bool f() { return std::filesystem::exists({}); }\n", 1, "torch's clash"),
    ("dead-code", CPP, "int a;\n#if 0\nint b;\n#endif\n", 2, "dead"),
    ("cuda-ifdef", CPP, "#ifdef ACC_WITH_CUDA\nint b;\n#endif\n", 1, "two files instead"),
    ("variable", CPP, 'auto s = "set ACC_TURBO to 1";\n', 1, "not in the table"),
    (
        "variable",
        "torchacc/config.py",
        "import os\nX = os.environ['ACC_TURBO']\n",
        2,
        "not in the table",
    ),
    (
        "torch-patch",
        "torchacc/api.py",
        "import torch\ntorch.load = None\n",
        2,
        "not the patch module",
    ),
    (
        "torch-patch",
        "torchacc/api.py",
        "import torch.nn as nn\nnn.Module.to = None\n",
        2,
        "an alias",
    ),
    (
        "torch-patch",
        "torchacc/api.py",
        "from torch import nn\nnn.Module.to = None\n",
        2,
        "an alias",
    ),
    (
        "torch-patch",
        "torchacc/api.py",
        "import torch\nsetattr(torch.nn, 'x', 1)\n",
        2,
        "by setattr",
    ),
    ("torch-patch", "torchacc/api.py", "import torch\na, torch.b = 1, 2\n", 2, "in a tuple"),
    ("exit", "torchacc/api.py", "import sys\nsys.exit(1)\n", 2, "ends the process"),
    ("syntax", "torchacc/api.py", "def f(:\n", 1, "does not parse"),
    ("file-size", CPP, "int a;\n" * 801, 801, "over the limit"),
    ("columns", CPP, "// " + "x" * 98 + "\n", 1, "101 columns"),
    ("file-name", "csrc/aten/CopyKernel.cpp", "int a;\n", 1, "camel case"),
    ("todo", CPP, "// TODO: make it fast\n", 1, "no condition"),
    ("todo", "docs/notes.md", "FIXME later\n", 1, "in a page as well"),
    ("provisional", "docs/notes.md", "\nThis is enough for now.\n", 2, "says nothing"),
    (
        "machine-path",
        "docs/notes.md",
        "Look into /Users/somebody/x for it.\n",
        1,
        "one machine's path",
    ),
]


@pytest.mark.parametrize(
    ("rule", "name", "text", "line"),
    [case[:4] for case in BROKEN],
    ids=[f"{case[0]}-{index}" for index, case in enumerate(BROKEN)],
)
def test_a_broken_rule_is_found(tmp_path: Path, rule: str, name: str, text: str, line: int) -> None:
    make_tree(tmp_path, {name: text})
    assert found(tmp_path) == [(name, line, rule)]


def test_every_rule_has_a_broken_example() -> None:
    """A rule that no example breaks could be one that never fires."""
    source = Path(layout_rules.__file__).read_text()
    known = set(layout_rules.CPP_BANS) | set(layout_rules.TEXT_BANS)
    known |= set(re.findall(r'(?:Violation\([^"]*|wrong\(\s*)"([a-z-]+)"', source))
    assert {"include", "file-size", "torch-patch", "syntax", "getenv"} <= known
    assert {case[0] for case in BROKEN} == known


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (CPP, "// getenv( in a comment, exit( too\nint a;\n"),
        (CPP, 'auto s = "std::cout << exit(1)";\n'),
        (CPP, 'auto s = R"(getenv("HOME"))";\n'),
        (CPP, "/* std::hash\n   #if 0 */ int a;\n"),
        (CPP, "void f(Scope& s) { s.exit(); s->abort(); Scope::exit(); }\n"),
        (CPP, "int n = std::snprintf(nullptr, 0, format);\n"),
        (CPP, "constexpr int big = 1'000'000; // it's\nint exit_code;\n"),
        (CPP, "// TODO(ann): drop this once torch 2.13 is the oldest\n"),
        ("csrc/base/env.cpp", ENV_TABLE + 'auto x = getenv("ACC_MODE");\n'),
        ("csrc/runtime/gil.cpp", "#include <Python.h>\n"),
        ("torchacc/__main__.py", "import sys\n\nsys.exit(0)\n"),
        ("torchacc/api.py", "import torch\n\nweight = torch.ones(1)\nweight.tag = 1\n"),
        ("build/x.cpp", "#include <ATen/ATen.h>\n"),
        ("tests/python/test_x.py", "import torch\n\ntorch.foo = 1\n"),
    ],
)
def test_what_only_looks_like_a_violation_passes(tmp_path: Path, name: str, text: str) -> None:
    make_tree(tmp_path, {name: text})
    assert found(tmp_path) == []


def test_the_command_prints_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tree(tmp_path, {CPP: "void f() { exit(1); }\n"})
    assert layout_rules.main([str(tmp_path)]) == 1
    assert f"{CPP}:1: [exit]" in capsys.readouterr().out
    (tmp_path / CPP).unlink()
    assert layout_rules.main([str(tmp_path)]) == 0
