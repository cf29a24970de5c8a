"""Documentation that is generated is up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_environment_table_is_the_one_in_the_code() -> None:
    """`python scripts/environment_docs.py` was run after the last change of the table."""
    command = [sys.executable, str(ROOT / "scripts" / "environment_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"run scripts/environment_docs.py\n{done.stderr}"


def test_every_document_that_the_readme_names_exists() -> None:
    """The README points at no page that is not there."""
    text = (ROOT / "README.md").read_text()
    named = {part.split("`")[0] for part in text.split("`docs/")[1:]}
    assert named
    for name in named:
        assert (ROOT / "docs" / name).exists(), name
