"""What a run leaves behind: the header and lines of a result file, the tables, the picture.

python benchmarks/report.py FILE ...                prints the tables of result files
python benchmarks/report.py FILE ... --svg PICTURE  and draws them, as one
"""

import argparse
import json
import os
import platform
import subprocess
import sys
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
    """The commit that is measured; "+changes" when files differ from it, but for new results.

    A copy without git cannot tell; REVISION in the environment may.
    """
    try:
        commit = _git("rev-parse", "HEAD")
        differs = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
        return commit + ("+changes" if differs else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("REVISION") or None


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
            "threads",
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
    ratios = _ratios(lines)

    def ratio_text(line: Mapping[str, Any], against: str) -> str:
        ratio = ratios.get((line["threads"], line["case"], line["mode"], against))
        if ratio is None:
            return ""
        return _bracketed(f"{ratio['ratio']:.3f} ({ratio['low']:.3f}..{ratio['high']:.3f})", ratio)

    for line in lines:
        if line["kind"] != "result":
            continue
        case, mode = line["case"], line["mode"]
        spread = f"{_number(line['min_ms'], 3)}..{_number(line['max_ms'], 3)}"
        rows.append(
            (
                case,
                mode,
                line.get("variant") or line.get("why") or "none runs",
                str(line["threads"]),
                str(line["n"]),
                _number(line["median_ms"], 3),
                spread,
                ratio_text(line, "eager"),
                ratio_text(line, "compile"),
                _number(line.get("cpu_ms"), 3),
                _number(line["first_step_s"], 2),
                _number(line["step20_s"], 2),
                _number(line["peak_mib"], 1),
                str(line.get("dropped", "-")),
            )
        )
    return "\n".join([_aligned(rows, 3), *_musts(lines)])


def started(line: Mapping[str, Any]) -> str:
    """A mode that has started, in words."""
    return (
        f"{line['case']}: {line['mode']} ({line['variant']}): first step "
        f"{line['first_step_s']:.2f} s, step 20 after {line['step20_s']:.2f} s, "
        f"then {line['warm_ms']:.3f} ms a step"
    )


def _aligned(rows: Sequence[Sequence[str]], words: int) -> str:
    """The rows as text, the first `words` columns to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


# A requirement is not judged where foreign load spoilt a mode.
_ANSWERS = {True: "holds", False: "MISSED", None: "not judged"}


def _musts(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence per requirement of speed, memory and, on GPUs, the start."""
    text = []
    for line in lines:
        if line["kind"] not in ("ratio", "memory", "start") or line.get("must") is None:
            continue
        if line["kind"] == "start":
            found = f"step 20, {line['cache']} cache, {line['over_eager_s']:.2f} s more <="
        elif line["kind"] == "memory":
            found = f"memory {line['ratio']:.3f} <="
        else:
            interval = f"({line['low']:.3f}..{line['high']:.3f})"
            found = f"speed {line['ratio']:.3f} {interval} >="
        goal = "" if line.get("goal") is None else f", goal {line['goal']:.2f}"
        text.append(
            f"must {_ANSWERS[line['holds']]}: {line['case']} {line['mode']}/{line['against']} "
            f"{found} {line['must']:.2f}{goal}"
            + (f" (threads: {line['threads']})" if "threads" in line else "")
        )
    return text


Ratios = dict[tuple[Any, str, str, str], Mapping[str, Any]]


def _ratios(lines: Sequence[Mapping[str, Any]], kind: str = "ratio") -> Ratios:
    """The lines of a kind by threads, case, mode and the mode that is compared with."""
    # Files from before there were several counts of threads in one have it in the header only.
    common = next((line["threads"] for line in lines if line["kind"] == "header"), None)
    return {
        (line.get("threads", common), line["case"], line["mode"], line["against"]): line
        for line in lines
        if line["kind"] == kind
    }


def _bracketed(text: str, line: Mapping[str, Any]) -> str:
    return text if line.get("valid", True) else f"[{text}]"


def _judged(line: Mapping[str, Any] | None, at_least: bool) -> tuple[str, str]:
    """How a ratio stands, and to which requirement: two cells of the summary."""
    if line is None:
        return "", ""
    ratio = _bracketed(f"{line['ratio']:.2f}", line)
    if line.get("must") is None:
        return ratio, ""
    sign = ">=" if at_least else "<="
    answer = {True: "yes", False: "NO", None: _ANSWERS[None]}[line["holds"]]
    return ratio, f"{sign} {line['must']:.2f} {answer}"


def summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """One row per case, mode of ours and number of threads: what must be, and whether it is.

    Then how programs start, if that was measured.
    """
    ratios, memory = _ratios(lines), _ratios(lines, "memory")
    baselines = ("eager", "eager_tuned", "compile")
    rows = [["case", "mode", "threads"]]
    for name in baselines:
        rows[0] += [f"x {name}", "must"]
    rows[0] += ["goal", "memory", "must"]
    for line in lines:
        if line["kind"] != "result" or line["mode"] in baselines or not line["n"]:
            continue
        key = (line["threads"], line["case"], line["mode"])
        row = [line["case"], line["mode"], str(line["threads"])]
        for name in baselines:
            row += _judged(ratios.get((*key, name)), at_least=True)
        goal = ratios.get((*key, "eager"), {}).get("goal")
        row.append("" if goal is None else f"{goal:.2f}")
        row += _judged(memory.get((*key, "eager")), at_least=False)
        rows.append(row)
    parts = [_aligned(rows, 2)] if len(rows) > 1 else []
    starts = [["case", "mode", "cache", "threads", "what", "n", "seconds", "over eager", "must"]]
    for line in lines:
        if line["kind"] == "startup":
            answer = "yes" if line["holds"] else "NO"
            must = "" if line["must"] is None else f"<= {line['must']:.1f} {answer}"
            over = _number(line["over_eager_s"], 2)
            named = [line[name] for name in ("case", "mode", "cache", "threads", "what", "n")]
            starts.append([*map(str, named), _number(line["seconds"], 2), over, must])
    if len(starts) > 1:
        parts.append(_aligned(starts, 3))
    return "\n\n".join(parts)


def markdown(lines: Sequence[Mapping[str, Any]]) -> str:
    """The tables of docs/performance.md, one per number of threads; bold is what misses a must,
    bracketed what foreign load spoilt.
    """
    ratios, memory = _ratios(lines), _ratios(lines, "memory")
    results = {
        (line["threads"], line["case"], line["mode"]): line
        for line in lines
        if line["kind"] == "result" and line["n"]
    }

    def cell(line: Mapping[str, Any] | None) -> str:
        if line is None:
            return ""
        text = f"{line['ratio']:.2f}"
        if line.get("must") is not None and line["holds"] is False:
            text = f"**{text}**"
        text += f" ({line['low']:.2f} to {line['high']:.2f})" if "low" in line else ""
        return _bracketed(text, line)

    def must(line: Mapping[str, Any] | None) -> str:
        return "" if line is None or line.get("must") is None else f"{line['must']:g}"

    def seconds(key: tuple[Any, str], modes: Sequence[str], what: str, digits: int) -> str:
        found = [results.get((*key, mode)) for mode in modes]
        return ", ".join(_number(line[what], digits) for line in found if line is not None) + " s"

    parts = []
    for threads in dict.fromkeys(key[0] for key in results):
        rows = [
            ["case", "against eager", "must", "against `torch.compile`", "must", "memory", "must"],
            ["---"] * 9,
        ]
        rows[0] += ["first step: eager, acc, compile", "step 20: eager, acc"]
        for key in results:
            case, mode = key[1:]
            if key[0] != threads or mode not in ("acc", "capture"):
                continue
            name = f"`{case}`" + (", with `torchacc.capture`" if mode == "capture" else "")
            eager, tuned, compiled = (
                ratios.get((*key, name)) for name in ("eager", "eager_tuned", "compile")
            )
            peak = memory.get((*key, "eager"))
            row = [name, cell(eager), must(eager), cell(compiled), must(compiled)]
            row += [cell(peak), must(peak)]
            if mode == "acc":
                row.append(seconds(key[:2], ("eager", "acc", "compile"), "first_step_s", 2))
                row.append(seconds(key[:2], ("eager", "acc"), "step20_s", 1))
            rows.append(row + [""] * (9 - len(row)))
            if tuned is not None:
                rows.append([f"`{case}`, eager tuned", cell(tuned), must(tuned), *[""] * 6])
        text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts.append(f"Threads: {threads}\n\n{text}")
    return "\n\n".join(parts)


_COLOURS = {
    "eager": "#7f7f7f",
    "eager_tuned": "#bcbd22",
    "compile": "#1f77b4",
    "acc": "#d62728",
    "capture": "#9467bd",
}


def _caption(lines: Sequence[Mapping[str, Any]], threads: int) -> str:
    """Where and when: from the header, if there is one."""
    parts = [f"{threads} thread{'' if threads == 1 else 's'}"]
    for line in lines:
        if line["kind"] == "header":
            parts += [line["machine"]["cpu"], line["date"][:10]]
        elif line["kind"] == "result" and line.get("versions"):
            return ", ".join([*parts, f"torch {line['versions']['torch']}"])
    return ", ".join(parts)


def svg(lines: Sequence[Mapping[str, Any]]) -> str:
    """A bar chart of the speed of every mode relative to eager, as SVG text.

    Of several numbers of threads the least is drawn.
    """
    results = [line for line in lines if line["kind"] == "result" and line["median_ms"]]
    threads = min((line["threads"] for line in results), default=0)
    medians: dict[str, dict[str, float]] = {}
    for line in results:
        if line["threads"] == threads:
            medians.setdefault(line["case"], {})[line["mode"]] = line["median_ms"]
    groups = {
        case: {mode: modes["eager"] / ms for mode, ms in modes.items()}
        for case, modes in medians.items()
        if "eager" in modes
    }
    longest = max((speed for group in groups.values() for speed in group.values()), default=1.0)
    left, width, row, gap, top = 130, 460, 16, 8, 48
    parts: list[str] = []
    for case, group in groups.items():
        middle = top + row * len(group) / 2 + 4
        parts.append(f'<text x="8" y="{middle:.0f}" font-weight="bold">{escape(case)}</text>')
        for mode, speed in group.items():
            length = width * speed / longest
            colour = _COLOURS.get(mode, "#2ca02c")
            parts.append(
                f'<rect x="{left}" y="{top}" width="{length:.1f}" height="{row - 3}" '
                f'fill="{colour}"/>'
            )
            label = f"{escape(mode)} {speed:.2f}"
            parts.append(f'<text x="{left + length + 6:.1f}" y="{top + 11}">{label}</text>')
            top += row
        top += gap
    one = left + width / longest
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 110}" height="{top}" '
        'font-family="sans-serif" font-size="12" fill="#222222">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        '<text x="8" y="18" font-size="14">Steps per second, relative to eager (1.0)</text>',
        f'<text x="8" y="36" fill="#666666">{escape(_caption(lines, threads))}</text>',
        f'<line x1="{one:.1f}" y1="44" x2="{one:.1f}" y2="{top}" stroke="#999999" '
        'stroke-dasharray="3 3"/>',
    ]
    return "\n".join([*head, *parts, "</svg>\n"])


def read(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The lines of result files, in order. A line gets its file's number of threads.

    Raises ValueError where two runs have a case in a mode, in two files or behind two headers of
    one: what one measured is no ratio to what the other did. But for files with `startup` lines, of
    which only these count where another file has the case.
    """
    lines, homes = [], dict[tuple[Any, ...], tuple[Path, int]]()
    starting = {file for file in files if '"kind": "startup"' in file.read_text()}
    for file in sorted(files, key=starting.__contains__):
        common, run = None, 0
        for text in file.read_text().splitlines():
            line = json.loads(text)
            if line["kind"] == "header":
                common, run = line["threads"], run + 1
            line.setdefault("threads", common)
            if line["kind"] in ("result", "ratio", "memory"):
                key = (line["threads"], line["case"], line["mode"])
                home, at = homes.setdefault(key, (file, run))
                if home != file and file in starting:
                    continue
                if (home, at) != (file, run):
                    raise ValueError(
                        f"[report] {home.name}, run {at}, and {file.name}, run {run}, both have "
                        f"{line['case']} in mode {line['mode']} with {line['threads']} threads. "
                        "Give one of them."
                    )
            lines.append(line)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser("benchmarks/report.py", description="Tables of result files.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument(
        "--markdown", action="store_true", help="print docs/performance.md's tables"
    )
    parser.add_argument("--svg", type=Path, metavar="PICTURE", help="draw a bar chart")
    options = parser.parse_args(arguments)
    lines = read(options.files)
    print(markdown(lines) if options.markdown else f"{table(lines)}\n\n{summary(lines)}")
    if options.svg is not None:
        options.svg.parent.mkdir(parents=True, exist_ok=True)
        options.svg.write_text(svg(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
