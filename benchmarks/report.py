"""What a run leaves behind: the header and lines of a result file, the table, the picture."""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
_PREFIXES = ("ACC_", "OMP_", "KMP_", "GOMP_", "MKL_", "MALLOC_", "TORCHINDUCTOR_", "PYTORCH_")


def machine() -> dict[str, Any]:
    """Processor, memory, kernel and C library of this machine; no names of hosts or paths."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory_kib / 2**20, 1),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
    }


def revision() -> str | None:
    """The commit that is measured, with "+changes" when files differ from it."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return result.stdout.strip()


def header(settings: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The first line of a result file. Values that hold a path are left out."""
    chosen = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(_PREFIXES) and "/" not in value
    }
    return {
        "kind": "header",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "revision": revision(),
        **settings,
        "environment": chosen,
    }


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """The table of a run, from its JSON lines: one row per case and mode, then every must."""
    rows = [
        (
            "case",
            "mode",
            "variant",
            "n",
            "median ms",
            "min..max",
            "x eager (95 %)",
            "x compile (95 %)",
            "cpu ms",
            "first s",
            "step20 s",
            "peak MiB",
            "dropped",
        )
    ]
    ratios = {(r["case"], r["mode"], r["against"]): r for r in lines if r["kind"] == "ratio"}

    def ratio_text(case: str, mode: str, against: str) -> str:
        ratio = ratios.get((case, mode, against))
        if ratio is None:
            return ""
        return f"{ratio['ratio']:.3f} ({ratio['low']:.3f}..{ratio['high']:.3f})"

    for line in lines:
        if line["kind"] != "result":
            continue
        case, mode = line["case"], line["mode"]
        spread = f"{_number(line['min_ms'], 3)}..{_number(line['max_ms'], 3)}"
        rows.append(
            (
                case,
                mode,
                line.get("variant") or "none runs",
                str(line["n"]),
                _number(line["median_ms"], 3),
                spread,
                ratio_text(case, mode, "eager"),
                ratio_text(case, mode, "compile"),
                _number(line.get("cpu_ms"), 3),
                _number(line["first_step_s"], 2),
                _number(line["step20_s"], 2),
                _number(line["peak_mib"], 1),
                str(line.get("dropped", "-")),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = [
        "  ".join(
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    for line in lines:
        if line.get("must") is None:
            continue
        at_least = line["kind"] == "ratio"
        interval = f" ({line['low']:.3f}..{line['high']:.3f})" if at_least else ""
        text.append(
            f"must {'holds' if line['holds'] else 'MISSED'}: {line['case']} "
            f"{line['mode']}/{line['against']} {'speed' if at_least else 'memory'} "
            f"{line['ratio']:.3f}{interval} {'>=' if at_least else '<='} {line['must']:.2f}"
        )
    return "\n".join(text)


_COLOURS = {
    "eager": "#7f7f7f",
    "eager_tuned": "#bcbd22",
    "compile": "#1f77b4",
    "acc": "#d62728",
    "capture": "#9467bd",
}


def svg(lines: Sequence[Mapping[str, Any]]) -> str:
    """A bar chart of the speed of every mode relative to eager (1.0), as SVG text."""
    medians: dict[str, dict[str, float]] = {}
    for line in lines:
        if line["kind"] == "result" and line["median_ms"]:
            medians.setdefault(line["case"], {})[line["mode"]] = line["median_ms"]
    bars = [
        (case, mode, modes["eager"] / milliseconds)
        for case, modes in medians.items()
        if "eager" in modes
        for mode, milliseconds in modes.items()
    ]
    longest = max((speed for _, _, speed in bars), default=1.0)
    left, width, row = 170, 420, 18
    height = row * len(bars) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 90}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        '<text x="8" y="18">speed relative to eager (1.0), median of windows</text>',
    ]
    previous = None
    for index, (case, mode, speed) in enumerate(bars):
        top = 30 + row * index
        if case != previous:
            parts.append(f'<text x="8" y="{top + 12}">{escape(case)}</text>')
            previous = case
        length = width * speed / longest
        colour = _COLOURS.get(mode, "#2ca02c")
        parts.append(
            f'<rect x="{left}" y="{top}" width="{length:.1f}" height="{row - 4}" fill="{colour}"/>'
        )
        label = f"{escape(mode)} {speed:.2f}"
        parts.append(f'<text x="{left + length + 6:.1f}" y="{top + 12}">{label}</text>')
    parts.append("</svg>\n")
    return "\n".join(parts)
