"""Epochs that an AsyncLoader feeds against the same epochs fed by the plain DataLoader, on acc.

    python benchmarks/loader.py [--threads 1] [--workers 1] [--rounds 15] [--only-pass]
                                [--batches N] [--json FILE] [CASE ...]

Both are in one process, with worker processes of their own that persist, and take turns, each in
every second round before the other. What counts is the ratio of neighbours, in time and in CPU time
of this process (the worker processes do the same for both): what else the machine does disturbs the
first, and hardly the second. With `--only-pass` each epoch has an AsyncLoader of its own, which has
yet to find out how to read. A line of JSON per case with medians, the ratios and their 95 %
intervals, and a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:
    import torch
    from torch import nn

# An AsyncLoader has chosen how it reads after nine passes.
ROWS, WARM_EPOCHS = 32, 10


class Images:
    """Images that are flipped, moved and normalised where they are read."""

    def __init__(self, count: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        self._pixels = torch.randint(0, 256, (count, 3, 40, 40), generator=generator).byte()

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self._pixels[index].roll(index % 5, -1)[:, 4:36, 4:36].float()
        if index % 2:
            image = image.flip(-1)
        return (image - 127.5) / 64.0, index % 10


def convolutional() -> nn.Module:
    """Three convolutions: the device has more to do than who reads."""
    from torch import nn

    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]

    layers = [*block(3, 32), *block(32, 64), *block(64, 64), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64 * 16, 10))


def linear() -> nn.Module:
    """Next to nothing: what the loader costs by itself."""
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))


# What is trained, and how many batches an epoch has.
CASES = {"convolutional": (convolutional, 20), "linear": (linear, 80)}


def measure(
    name: str, workers: int, rounds: int, only_pass: bool, batches: int | None
) -> dict[str, list[tuple[float, float]]]:
    """Seconds per epoch and seconds of CPU time, by loader."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader

    import torchacc

    made, usual = CASES[name]
    batches = batches or usual
    torch.manual_seed(0)
    model = made().to("acc")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def epoch(loader: Iterable[Any]) -> tuple[float, float]:
        torch.acc.synchronize()
        start, cpu_start = time.perf_counter(), time.process_time()
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images.to("acc")), labels.to("acc")).backward()
            optimizer.step()
        torch.acc.synchronize()
        return time.perf_counter() - start, time.process_time() - cpu_start

    def loader() -> DataLoader:
        data = Images(batches * ROWS)
        return DataLoader(data, ROWS, num_workers=workers, persistent_workers=workers > 0)

    loaders = {"plain": loader(), "async": torchacc.AsyncLoader(loader())}
    for each in loaders.values():
        for _ in range(WARM_EPOCHS):
            epoch(each)
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in loaders}
    for index in range(rounds):
        for way in sorted(loaders, reverse=index % 2 == 0):
            if only_pass and way == "async":
                loaders[way] = torchacc.AsyncLoader(loaders[way]._loader)
            times[way].append(epoch(loaders[way]))
    return times


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="loader.py", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(CASES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only-pass", action="store_true", help="a new AsyncLoader per epoch")
    parser.add_argument("--batches", type=int, help="of an epoch; of the case if not given")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    import torch

    import torchacc_device  # noqa: F401
    from benchmarks import report, stats

    torch.set_num_threads(arguments.threads)
    settings = {
        "suite": "loader",
        "cases": list(arguments.cases),
        "threads": arguments.threads,
        "workers": arguments.workers,
        "alternations": arguments.rounds,
        "only_pass": arguments.only_pass,
        "batches": arguments.batches,
        "torch": torch.__version__,
    }
    lines: list[dict[str, Any]] = [report.header(settings, os.environ)]
    print("| case | | plain ms | async ms | times plain's (95 %) |\n|---|---|---|---|---|")
    for name in arguments.cases:
        found = measure(
            name, arguments.workers, arguments.rounds, arguments.only_pass, arguments.batches
        )
        for index, what in enumerate(("time", "cpu_time")):
            plain, ours = ([epoch[index] for epoch in found[way]] for way in ("plain", "async"))
            ratios = [mine / theirs for mine, theirs in zip(ours, plain, strict=True)]
            ratio = stats.speedup(ratios, [1.0] * len(ratios))
            line = {
                "kind": "loader",
                "case": name,
                "what": what,
                "plain_ms": stats.median(plain) * 1e3,
                "async_ms": stats.median(ours) * 1e3,
                "to_plain": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
            }
            lines.append(line)
            print(
                f"| `{name}` | {what} | {line['plain_ms']:.0f} | {line['async_ms']:.0f} | "
                f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) |",
                flush=True,
            )
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
