"""Compares the recorded operators with the reviewed list in tests/python/op_table.txt.

Prints what this torch adds and drops. `--write` makes the list that of this torch: for after a
review, under the torch version that the project is tested with.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "python" / "op_table.txt"
# In the list, and here only where it has a kernel: on processors on which oneDNN multiplies faster.
OF_SOME_PROCESSORS = "acc::linear"


def described() -> list[str]:
    """The recorded operators of this torch: arguments (! written, ~ value) and flags."""
    import torch

    from torchacc_device import _C

    # Copies are the one operator that joins the list at its first use.
    torch.empty(1, device="acc").copy_(torch.empty(1, device="acc"))
    return list(_C.ops())


def version() -> str:
    """The torch version without its build: 2.11.0."""
    import torch

    return torch.__version__.split("+")[0]


def reviewed() -> tuple[str, list[str]]:
    """The torch version of the reviewed list, and its lines."""
    first, *lines = LIST.read_text().splitlines()
    return first.removeprefix("torch "), lines


def of_other_processors() -> list[str]:
    """The reviewed operators that this processor has no kernel for."""
    import torch

    if torch._C._dispatch_has_kernel_for_dispatch_key(OF_SOME_PROCESSORS, "CPU"):
        return []
    return [line for line in reviewed()[1] if line.startswith(f"{OF_SOME_PROCESSORS}(")]


def difference() -> list[str]:
    """What differs from the reviewed list, as `+ added` and `- dropped` lines, by operator."""
    old, new = set(reviewed()[1]), set(described() + of_other_processors())
    changed = [(line, "-") for line in old - new] + [(line, "+") for line in new - old]
    return [f"{sign} {line}" for line, sign in sorted(changed)]


def main() -> int:
    sys.path.insert(0, str(ROOT))
    if "--write" in sys.argv:
        lines = sorted(described() + of_other_processors())
        LIST.write_text("\n".join([f"torch {version()}", *lines, ""]))
        return 0
    found = difference()
    print("\n".join(found) or "nothing differs")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
