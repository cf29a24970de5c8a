"""What `torchacc.accelerate` costs on top of a loop that was written for acc by hand.

    python benchmarks/overhead.py [--threads 1] [--pairs 9] [--json FILE] [CASE ...]

By hand: `model.to("acc")`, a plain DataLoader, and `.to("acc")` for each batch. The two ways run in
processes of their own, in pairs whose order alternates; each times whole epochs after two that are
not timed, and gives the best. A line of JSON per case with the median over the pairs of the ratio
of their times (by the clock, and of the processor), and a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Batches of an epoch, and timed epochs.
CASES = {"mlp": (200, 4), "resnet18_cifar": (8, 3)}
WAYS = ("hand", "accelerate")
WARM_EPOCHS, MUST = 2, 1.02


def _made(case: str) -> tuple[Any, Any, Any]:
    """A model, an optimizer's class and a data set on the CPU."""
    import torch
    from torch.utils.data import TensorDataset

    from benchmarks import models

    torch.manual_seed(0)
    count = CASES[case][0]
    if case == "mlp":
        inputs, labels = torch.randn(count * 64, 256), torch.randint(0, 256, (count * 64,))
        return models.mlp(3, 256), torch.optim.AdamW, TensorDataset(inputs, labels)
    inputs, labels = torch.randn(count * 16, 3, 32, 32), torch.randint(0, 10, (count * 16,))
    return models.resnet18(True), torch.optim.SGD, TensorDataset(inputs, labels)


def _batches(loader: Iterable[Any], way: str) -> Iterator[Any]:
    for x, y in loader:
        yield (x.to("acc"), y.to("acc")) if way == "hand" else (x, y)


def measure(case: str, way: str, threads: int) -> dict[str, float]:
    """The best epoch of this process in seconds, by the clock and of the processor."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    import torchacc_device  # noqa: F401

    torch.set_num_threads(threads)
    model, optimizer_class, data = _made(case)
    loader: Any = DataLoader(data, batch_size=64 if case == "mlp" else 16, shuffle=True)
    if way == "hand":
        model.to("acc")
    else:
        import torchacc

        model, loader = torchacc.accelerate(model, loader)
    criterion = nn.CrossEntropyLoss()
    optimizer = optimizer_class(model.parameters(), lr=1e-4)
    walls, processors = [], []
    for _ in range(WARM_EPOCHS + CASES[case][1]):
        torch.acc.synchronize()
        wall, processor = time.perf_counter(), time.process_time()
        for x, y in _batches(loader, way):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        torch.acc.synchronize()
        walls.append(time.perf_counter() - wall)
        processors.append(time.process_time() - processor)
    return {"seconds": min(walls[WARM_EPOCHS:]), "cpu_seconds": min(processors[WARM_EPOCHS:])}


def _in_a_process(case: str, way: str, threads: int) -> dict[str, float]:
    command = [sys.executable, __file__, case, "--threads", str(threads), "--way", way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"[overhead] {case}, {way}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(case: str, threads: int, pairs: int) -> dict[str, Any]:
    """The line of a case."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for index in range(pairs):
        for way in WAYS if index % 2 == 0 else reversed(WAYS):
            found[way].append(_in_a_process(case, way, threads))
    line: dict[str, Any] = {"kind": "overhead", "case": case, "pairs": pairs, "must": MUST}
    for what, name in (("seconds", "ratio"), ("cpu_seconds", "cpu_ratio")):
        ratios = [b[what] / a[what] for a, b in zip(*found.values(), strict=True)]
        line[name] = statistics.median(ratios)
        line[f"{name}_low"], line[f"{name}_high"] = min(ratios), max(ratios)
    for way, runs in found.items():
        line[f"{way}_seconds"] = statistics.median(run["seconds"] for run in runs)
    return line


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="overhead.py", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(CASES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", choices=WAYS, help="of one process: measure, and print the times")
    arguments = parser.parse_args(argv)
    unknown = [case for case in arguments.cases if case not in CASES]
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    if arguments.way:
        print(json.dumps(measure(arguments.cases[0], arguments.way, arguments.threads)))
        return 0
    import torch

    from benchmarks import report

    settings = {
        "suite": "overhead",
        "cases": list(arguments.cases),
        "threads": arguments.threads,
        "alternations": arguments.pairs,
        "torch": torch.__version__,
    }
    lines = [report.header(settings, os.environ)]
    print("| case | by hand, s | accelerate, s | ratio | of the processor |\n|---|---|---|---|---|")
    for case in arguments.cases:
        line = compare(case, arguments.threads, arguments.pairs)
        lines.append(line)
        times = " | ".join(f"{line[f'{way}_seconds']:.3f}" for way in WAYS)
        print(f"| `{case}` | {times} | {line['ratio']:.3f} | {line['cpu_ratio']:.3f} |", flush=True)
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
