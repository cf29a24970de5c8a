"""The rules of the tree: who may include whom, how long files get, what is banned where.

`python tests/layout_rules.py [ROOT]` prints every violation and exits 1 if there is one.
`check(root)` returns them. A rule that has an exception names it here, in a table, with the reason.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# --- who may include whom ---------------------------------------------------------------------
# A folder (or a single file) -> what its files may include of ours: folders or single headers. The
# longest match decides. Every folder may include itself. The order is the order of processing:
# each stage sees what lies to its left.
INCLUDES: dict[str, tuple[str, ...]] = {
    "csrc/base": (),
    "csrc/runtime": ("csrc/base",),
    "lazy/graph": ("csrc/base",),
    "lazy/record": ("csrc/base", "csrc/runtime", "lazy/graph"),
    "lazy/passes": ("csrc/base", "lazy/graph", "kernels/codegen/kernel_spec.h"),
    "lazy/plan": ("csrc/base", "lazy/graph", "lazy/passes", "kernels/codegen/kernel_spec.h"),
    "lazy/exec": (
        "csrc/base",
        "csrc/runtime",
        "lazy/graph",
        "lazy/plan",
        "lazy/passes/lower.h",
        "kernels/codegen",
        "kernels/jit",
        "kernels/library",
        "kernels/device",
    ),
    "lazy/session": ("csrc/base", "csrc/runtime", "lazy", "kernels"),
    "lazy/capture": (
        "csrc/base",
        "csrc/runtime",
        "lazy/graph",
        "lazy/record",
        "lazy/plan",
        "lazy/session/session.h",
        "lazy/session/replay.h",
    ),
    "kernels/codegen": ("csrc/base", "lazy/graph"),
    "kernels/jit": ("csrc/base",),
    "kernels/library": ("csrc/base", "csrc/runtime", "lazy/graph"),
    "kernels/device": ("csrc/base", "csrc/runtime", "kernels/codegen", "kernels/jit"),
    "csrc/aten": (
        "csrc/base",
        "csrc/runtime",
        "lazy/graph",
        "lazy/record",
        "lazy/session/session.h",
        "lazy/session/strict.h",
    ),
    "distributed": (
        "csrc/base",
        "csrc/runtime",
        "lazy/record/source.h",
        "lazy/record/watch.h",
        "lazy/session/session.h",
        "lazy/session/strict.h",
    ),
    "torchacc_device/csrc": (
        "csrc/base",
        "csrc/runtime",
        "csrc/aten",
        "lazy/graph/formula.h",
        "lazy/record",
        "lazy/session/explain.h",
        "lazy/session/reasons.h",
        "lazy/session/session.h",
        "lazy/session/strict.h",
        "lazy/session/verify.h",
        "lazy/plan/describe.h",
        "lazy/capture/step.h",
        "kernels/device",
        "kernels/jit/compile.h",
        "distributed",
    ),
    # torch-free on purpose, but for three headers of CUDA's: these run under the sanitizers
    "tests/cpp": (
        "csrc/base",
        "csrc/runtime/cuda_draws.h",
        "csrc/runtime/cuda_pools.h",
        "csrc/runtime/cuda_warnings.h",
        "lazy/graph",
        "lazy/passes",
        "lazy/plan",
        "kernels/codegen",
        "kernels/jit",
        "kernels/library/cuda_products.h",
        "tests/cuda_emulator",
    ),
    "tests/cuda_emulator": (
        "csrc/base",
        "kernels/codegen",
        "kernels/device",
        "kernels/jit",
        "tests/cpp",
    ),
}
# Folders whose files may include headers of torch (ATen, c10, torch).
SEES_TORCH = (
    "csrc/runtime",
    "csrc/aten",
    "lazy/record",
    "lazy/exec",
    "lazy/session",
    "lazy/capture",
    "kernels/library",
    "kernels/device",
    "distributed",
    "torchacc_device/csrc",
)
# Python and pybind11: the binding, and the two places that hold the GIL or read the Python stack.
SEES_PYTHON = ("torchacc_device/csrc", "csrc/runtime/gil", "lazy/record/source")
SEES_GTEST = ("tests/cpp",)
# NVIDIA headers: only files that a build without CUDA leaves out (see CMakeLists.txt).
CUDA_FILE = re.compile(r"(^|/)(cuda_[^/]*|[^/]*_cuda)\.(cpp|h)$")
STAND_IN_FILE = re.compile(r"(^|/)no_[^/]*\.cpp$")
CUDA_HEADER = re.compile(
    r"^(cuda|cublas|cudnn|cusparse|cusolver|curand|cufft|nccl|nvrtc|nvJitLink|nvtx|nv/|cub/|thrust/"
    r"|c10/cuda/|ATen/cuda/|ATen/cudnn/|ATen/native/cuda/|torch/csrc/cuda/)"
)
TORCH_HEADER = re.compile(r"^(ATen|c10|torch|caffe2)/")
PYTHON_HEADER = re.compile(r"^(Python\.h|pybind11/|torch/csrc/(utils|autograd/python|Exceptions))")
# They pull in all of torch: 12 to 28 seconds for each file that includes them.
HEAVY_HEADERS = (
    "ATen/ATen.h",
    "ATen/Functions.h",
    "torch/all.h",
    "torch/extension.h",
    "torch/torch.h",
)

# --- sizes and names --------------------------------------------------------------------------
MAX_LINES = 800
MAX_COLUMNS = 100
SOURCE_SUFFIXES = {".cpp", ".h", ".py", ".sh", ".cmake"}
CPP_SUFFIXES = {".cpp", ".h"}
TEXT_SUFFIXES = SOURCE_SUFFIXES | {".md", ".toml", ".txt", ".yml", ".yaml"}
SKIPPED_FOLDERS = {".git", ".venv", "build", "__pycache__", ".hypothesis"}
SKIPPED_IN_ROOT = {"dist"}  # wheels
PRODUCT = (
    "csrc",
    "lazy",
    "kernels",
    "distributed",
    "torchacc_device",
    "torchacc",
    "tiacc_training",
)

# --- bans -------------------------------------------------------------------------------------
# rule -> (pattern over code without comments and strings, files that may, what to do instead)
CPP_BANS: dict[str, tuple[re.Pattern[str], tuple[str, ...], str]] = {
    "getenv": (
        re.compile(r"\b(secure_getenv|getenv|setenv|putenv)\s*\("),
        ("csrc/base/env.cpp",),
        "add the variable to the table in csrc/base/env.cpp and call its getter",
    ),
    "exit": (
        re.compile(
            r"(?<![\w.>:])(?:std::|::)?(?:exit|_exit|_Exit|quick_exit|abort|terminate)\s*\("
        ),
        # what c10d calls giving up communication
        ("distributed/process_group.h", "distributed/work.h"),
        "throw: the process belongs to the user",
    ),
    "print": (
        re.compile(r"\bstd::(cout|cerr|clog)\b|\b(printf|fprintf|puts|fputs)\s*\("),
        # the dump that ACC_DUMP asks for; a program
        ("lazy/session/planning.cpp", "kernels/jit/nvrtc_main.cpp"),
        "return a string, or warn through the logger",
    ),
    "std-hash": (
        re.compile(r"\bstd::hash\b"),
        (),
        "use base::Hasher, which gives the same value in every process",
    ),
    "filesystem": (
        re.compile(r"\bstd::filesystem\b"),
        (),
        "use POSIX: libtorch_cpu exports its own, older std::filesystem, and the two crash",
    ),
    "dead-code": (re.compile(r"^\s*#\s*if\s+0\b", re.MULTILINE), (), "remove it"),
    "cuda-ifdef": (
        re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif)\b.*\b(\w*_)?CUDA\b", re.MULTILINE),
        (),
        "put the two sides into x_cuda.cpp and no_cuda.cpp",
    ),
}
# The one module that assigns attributes of torch.
PATCH_MODULES = ("torchacc_device/_patches.py",)
MAY_END_PROCESS = ("torchacc/__main__.py",)
# Variables that are read by the build and by the tests, not by the library.
OTHER_VARIABLES = {
    "ACC_CUDA",
    "ACC_SEEDS_DIR",
    "ACC_TEST_DEVICE",
    "ACC_TEST_EMULATOR",
    "ACC_TEST_FULL",
    "ACC_TEST_RESULTS",
}
ENV_TABLE = "csrc/base/env.cpp"
# These two hold the patterns themselves.
HOLDS_PATTERNS = ("tests/layout_rules.py", "tests/python/test_layout.py")
TODO_WITH_CONDITION = re.compile(r"TODO\([^)]+\): .*\b(when|once|until|after|as soon as)\b")
TEXT_BANS: dict[str, tuple[re.Pattern[str], str]] = {
    "todo": (
        re.compile(r"\b(TODO|FIXME|XXX|HACK)\b"),
        "write `TODO(name): what, when which condition holds`, or do it",
    ),
    "provisional": (re.compile(r"\bfor now\b", re.IGNORECASE), "say what is, or open an issue"),
    "machine-path": (
        re.compile(r"(?<![\w.])/(root|Users|home/\w+)/"),
        "no path of one machine belongs into the tree",
    ),
}


@dataclass(frozen=True, order=True)
class Violation:
    """One broken rule: where, which, and what to do."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: [{self.rule}] {self.text}"


def check(root: Path) -> list[Violation]:
    """Every violation in the tree under `root`, sorted by file and line."""
    files = sorted(source_files(root))
    variables = known_variables(root)
    found: list[Violation] = []
    for path in files:
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8", errors="replace")
        found += check_shape(name, text)
        if name not in HOLDS_PATTERNS:
            found += check_text(name, text)
        if path.suffix in CPP_SUFFIXES and (
            name.startswith(PRODUCT) or name.startswith("tests/cpp")
        ):
            found += check_cpp(name, text, root, variables)
        if path.suffix == ".py" and name.startswith(PRODUCT):
            found += check_python(name, text, variables)
    return sorted(found)


def source_files(root: Path) -> Iterator[Path]:
    """The text files of the tree; build outputs, environments and caches are left out."""
    yield from files_in(root, SKIPPED_FOLDERS | SKIPPED_IN_ROOT)


def files_in(folder: Path, skipped: set[str]) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            if path.name not in skipped and not path.name.endswith(".egg-info"):
                yield from files_in(path, SKIPPED_FOLDERS)
        elif path.suffix in TEXT_SUFFIXES or path.name == "Makefile":
            yield path


def known_variables(root: Path) -> set[str]:
    """The names in the environment table, and those that only build and tests read."""
    table = root / ENV_TABLE
    names = re.findall(r'"(ACC_[A-Z0-9_]+)"', table.read_text()) if table.is_file() else []
    return OTHER_VARIABLES | set(names)


def check_shape(name: str, text: str) -> Iterator[Violation]:
    """Length in lines and columns, and the file's name."""
    suffix = Path(name).suffix
    lines = text.splitlines()
    if suffix in SOURCE_SUFFIXES and len(lines) > MAX_LINES:
        advice = f"{len(lines)} lines; the limit is {MAX_LINES}. Split it by what it does"
        yield Violation(name, len(lines), "file-size", advice)
    if suffix in CPP_SUFFIXES or suffix == ".py":
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_COLUMNS:
                yield Violation(name, number, "columns", f"{len(line)} columns of {MAX_COLUMNS}")
        if not re.fullmatch(r"[a-z0-9_]+\.(cpp|h|py)", Path(name).name):
            yield Violation(name, 1, "file-name", "file names are snake_case")


def check_text(name: str, text: str) -> Iterator[Violation]:
    """Words that no file may contain."""
    for number, line in enumerate(text.splitlines(), 1):
        for rule, (pattern, advice) in TEXT_BANS.items():
            if pattern.search(line) and not (rule == "todo" and TODO_WITH_CONDITION.search(line)):
                yield Violation(name, number, rule, advice)


def longest(table: tuple[str, ...] | dict[str, tuple[str, ...]], name: str) -> str | None:
    """The longest entry that is `name`, a folder of it, or (with no slash after) its beginning."""
    fits = [entry for entry in table if name == entry or name.startswith(entry + "/")]
    return max(fits, key=len, default=None)


def begins(table: tuple[str, ...], name: str) -> bool:
    """Whether `name` lies in a folder of the table, or is a file that the table names."""
    return any(re.match(re.escape(entry) + r"(/|\.\w+$)", name) for entry in table)


def check_cpp(name: str, text: str, root: Path, variables: set[str]) -> Iterator[Violation]:
    """Includes, bans and header hygiene of one C++ file."""
    code, strings = strip_cpp(text)
    if longest(INCLUDES, name) is None:
        advice = "this folder is in no row of INCLUDES: give it one, or move the file"
        yield Violation(name, 1, "folder", advice)
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*(["<])([^">]+)[">]', line)
        if match:
            yield from check_include(name, number, match[2], match[1] == '"', root)
    if name.endswith(".h"):
        if not re.search(r"^#pragma once$", text, re.MULTILINE):
            yield Violation(name, 1, "pragma-once", "a header begins with #pragma once")
        for match in re.finditer(r"^\s*using\s+namespace\b", code, re.MULTILINE):
            advice = "a header opens no namespace for those who include it"
            yield Violation(name, line_of(code, match), "using-namespace", advice)
    if name.startswith(PRODUCT):
        for rule, (pattern, allowed, advice) in CPP_BANS.items():
            if name not in allowed:
                for match in pattern.finditer(code):
                    yield Violation(name, line_of(code, match), rule, advice)
        for number, literal in strings:
            yield from check_variables(name, number, literal, variables)


def line_of(text: str, match: re.Match[str]) -> int:
    """The line on which the first word of a match stands."""
    start = match.start() + len(match[0]) - len(match[0].lstrip())
    return text.count("\n", 0, start) + 1


def check_include(
    name: str, number: int, header: str, quoted: bool, root: Path
) -> Iterator[Violation]:
    """One include line against the tables above."""

    def wrong(rule: str, text: str) -> Violation:
        return Violation(name, number, rule, f"{header}: {text}")

    ours = (*PRODUCT, "tests")
    if header.split("/")[0] in ours or (quoted and not TORCH_HEADER.match(header)):
        if header.startswith(".") or header.split("/")[0] not in ours or not quoted:
            yield wrong(
                "include-root", 'our headers are included from the root: "csrc/base/check.h"'
            )
            return
        if not (root / header).is_file():
            yield wrong("include-missing", "there is no such file")
        row = longest(INCLUDES, name)
        allowed = (*INCLUDES.get(row or "", ()), row or name)
        if not any(header == entry or header.startswith(entry + "/") for entry in allowed):
            yield wrong("include", f"{row} may include {', '.join(allowed)}")
        return
    if header in HEAVY_HEADERS:
        yield wrong("heavy-header", "include the smallest headers that do")
    if CUDA_HEADER.match(header):
        if not CUDA_FILE.search(name) or STAND_IN_FILE.search(name):
            yield wrong("cuda-header", "NVIDIA headers are for files named *_cuda.* and cuda_*.*")
    elif PYTHON_HEADER.match(header):
        if not begins(SEES_PYTHON, name):
            yield wrong("python-header", f"Python is seen by {', '.join(SEES_PYTHON)}")
    if TORCH_HEADER.match(header) and not begins(SEES_TORCH, name):
        yield wrong("torch-header", f"torch is seen by {', '.join(SEES_TORCH)}")
    if header.startswith(("gtest/", "gmock/")) and not begins(SEES_GTEST, name):
        yield wrong("gtest-header", "GoogleTest is for tests/cpp")


def check_variables(name: str, number: int, literal: str, known: set[str]) -> Iterator[Violation]:
    """Every ACC_* name in a string is one that exists."""
    for variable in re.findall(r"\bACC_[A-Z0-9_]*[A-Z0-9]\b", literal):
        if variable not in known:
            advice = f"{variable} is not in the table of {ENV_TABLE}"
            yield Violation(name, number, "variable", advice)


CPP_TOKEN = re.compile(
    r"""//[^\n]*
      | /\*.*?\*/
      | R"(?P<mark>[^(\s]*)\((?P<raw>.*?)\)(?P=mark)"
      | "(?P<text>(?:\\.|[^"\\\n])*)"
      | (?<![\w])'(?:\\.|[^'\\\n])+'
    """,
    re.DOTALL | re.VERBOSE,
)


def strip_cpp(text: str) -> tuple[str, list[tuple[int, str]]]:
    """The code with comments and literals blanked (lines kept), and the string literals."""
    strings: list[tuple[int, str]] = []

    def blank(match: re.Match[str]) -> str:
        literal = match["raw"] if match["raw"] is not None else match["text"]
        if literal is not None:
            strings.append((text.count("\n", 0, match.start()) + 1, literal))
        return "\n" * match[0].count("\n") or " "

    return CPP_TOKEN.sub(blank, text), strings


def check_python(name: str, text: str, variables: set[str]) -> Iterator[Violation]:
    """Assignments to torch, process ends and unknown variables in one module of the product."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield Violation(name, error.lineno or 1, "syntax", str(error.msg))
        return
    names = torch_names(tree)
    for node in ast.walk(tree):
        if name not in PATCH_MODULES:
            for target in assigned(node):
                if root_name(target) in names:
                    advice = f"attributes of torch are assigned in {PATCH_MODULES[0]} only"
                    yield Violation(name, node.lineno, "torch-patch", advice)
        if isinstance(node, ast.Call) and name not in MAY_END_PROCESS:
            if ast.unparse(node.func) in ("sys.exit", "os._exit", "exit", "quit", "os.abort"):
                yield Violation(name, node.lineno, "exit", "raise: the process belongs to the user")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from check_variables(name, node.lineno, node.value, variables)


def torch_names(tree: ast.AST) -> set[str]:
    """Every name that this module binds to torch or to a part of it."""
    names = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch" and alias.asname:
                    names.add(alias.asname)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            if (node.module or "").split(".")[0] == "torch":
                names |= {alias.asname or alias.name for alias in node.names}
    return names


def assigned(node: ast.AST) -> list[ast.expr]:
    """The objects whose attributes a statement sets: by =, +=, del or setattr."""
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
        return node.args[:1]
    flat = [part for target in targets for part in (getattr(target, "elts", None) or [target])]
    return [target.value for target in flat if isinstance(target, ast.Attribute)]


def root_name(expression: ast.expr) -> str | None:
    """`torch` for torch.nn.Module; None for what does not begin with a name."""
    while isinstance(expression, ast.Attribute):
        expression = expression.value
    return expression.id if isinstance(expression, ast.Name) else None


def main(argv: list[str]) -> int:
    root = Path(argv[0]) if argv else Path(__file__).resolve().parent.parent
    violations = check(root)
    for violation in violations:
        print(violation)
    print(f"layout: {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
