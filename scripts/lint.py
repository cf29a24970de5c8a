"""clang-format, ruff and the layout rules on everything; clang-tidy on what changed.

lint.py [--fix]     --fix rewrites instead of complaining, and skips clang-tidy
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import native

ROOT = native.ROOT
CPP_FOLDERS = ("csrc", "lazy", "kernels", "distributed", "torchacc_device/csrc", "tests/cpp")


def cpp_files() -> list[str]:
    """Every C++ file of ours, relative to the root."""
    found = [path for folder in CPP_FOLDERS for path in (ROOT / folder).rglob("*")]
    return sorted(str(p.relative_to(ROOT)) for p in found if p.suffix in (".cpp", ".h"))


def changed_files() -> set[str]:
    """What differs from the last commit, new files included; nothing outside a checkout."""
    names: set[str] = set()
    for arguments in (["diff", "--name-only", "HEAD"], ["ls-files", "-o", "--exclude-standard"]):
        git = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        names |= set(git.stdout.splitlines())
    return names


def tidy_command() -> list[str] | None:
    """clang-tidy on the changed sources that the last build compiled, or None for none of them."""
    # Several files are compiled as one: clang-tidy takes that command for each of them.
    databases = sorted((ROOT / "build").glob("cp*/compile_commands.json"))
    databases = [path for path in databases if not path.parent.name.endswith("-thread")]
    sources = sorted(changed_files() & {name for name in cpp_files() if name.endswith(".cpp")})
    sources = [name for name in sources if not name.startswith("tests/")]
    tidy = native.find_tool("clang-tidy")
    if not databases or not sources or tidy is None:
        return None
    newest = max(databases, key=lambda path: path.stat().st_mtime).parent
    # the precompiled header is g++'s: clang says so and reads its text instead
    return [tidy, "-p", str(newest), "--quiet", "--extra-arg=-Wno-everything", *sources]


def main(argv: list[str]) -> int:
    fix = "--fix" in argv
    clang_format = native.find_tool("clang-format") or "clang-format"
    ruff = native.find_tool("ruff") or "ruff"
    style = ["-i"] if fix else ["--dry-run", "-Werror"]
    commands = []
    if cpp_files():
        commands.append([clang_format, *style, *cpp_files()])
    commands.append([ruff, "check", "--quiet", *(["--fix"] if fix else []), "."])
    commands.append([ruff, "format", "--quiet", *([] if fix else ["--check"]), "."])
    commands.append([sys.executable, str(Path("tests") / "layout_rules.py")])
    tidy = None if fix else tidy_command()
    if tidy is not None:
        commands.append(tidy)
    failed = []
    for command in commands:
        name = Path(command[0]).name
        print(f"== {name} {command[1] if name == 'ruff' else ''}", flush=True)
        if subprocess.run(command, cwd=ROOT).returncode != 0:
            failed.append(name)
    print(f"lint: {'failed: ' + ', '.join(failed) if failed else 'clean'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
