"""Trains a small ResNet on scanned digits: first as PyTorch does it, then accelerated by torchacc.

    python examples/quickstart.py

The data are scikit-learn's `digits`, 1,797 scanned digits, upscaled to 32x32; every fifth is held
out. Both runs start from the same weights and see the same batches. The plain run has a process of
its own, in which the device `acc` is not even registered. What torchacc needs are the lines marked
with an arrow (<--) in `main`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

EPOCHS = 8
BATCH = 32
LEARNING_RATE = 0.1
WANTED_ACCURACY = 97.0
FIRST_STEPS = 20
RESULT = "RESULT "


def make_data() -> tuple[Any, Any]:
    """Loaders of the training and the held-out images: (n, 1, 32, 32) float32, labels int64."""
    import torch
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    images = torch.nn.functional.interpolate(images, size=32, mode="bilinear", align_corners=False)
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    training = TensorDataset(images[~held_out], labels[~held_out])
    testing = TensorDataset(images[held_out], labels[held_out])
    return (
        DataLoader(training, batch_size=BATCH, shuffle=True),
        DataLoader(testing, batch_size=4 * BATCH),
    )


def make_model() -> Any:
    """A ResNet of three stages with 16, 32 and 64 channels and two blocks in each."""
    import torch
    from torch import nn

    def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
            nn.BatchNorm2d(outputs),
        )

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.first = convolution(inputs, outputs, 3, stride)
            self.second = convolution(outputs, outputs, 3)
            same = inputs == outputs and stride == 1
            self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.first(x))
            return torch.relu(self.second(y) + self.shortcut(x))

    layers: list[nn.Module] = [convolution(1, 16, 3), nn.ReLU()]
    channels = 16
    for outputs, stride in ((16, 1), (32, 2), (64, 2)):
        layers += [Block(channels, outputs, stride), Block(outputs, outputs, 1)]
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def train(
    name: str, model: Any, loader: Any, testing: Iterable[Any], device: Any
) -> dict[str, Any]:
    """An ordinary training loop, the same for both runs; returns what the table shows."""
    import torch

    steps = EPOCHS * len(loader)
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LEARNING_RATE, momentum=0.9, weight_decay=5e-4
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)

    losses: list[float] = []
    images, seconds, first_steps = 0, 0.0, 0.0
    memory = PeakMemory(device)
    start = time.perf_counter()
    for epoch in range(1, EPOCHS + 1):
        model.train()
        epoch_start = time.perf_counter()
        total = torch.zeros((), device=device)
        for step, (inputs, labels) in enumerate(loader, 1):
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach() * len(labels)
            if epoch == 1 and step == FIRST_STEPS:
                loss.item()
                first_steps = time.perf_counter() - start
        count = len(loader.dataset)
        losses.append(total.item() / count)
        epoch_seconds = time.perf_counter() - epoch_start
        if epoch > 1:  # the first epoch warms up
            images, seconds = images + count, seconds + epoch_seconds
        print(
            f"{name}: epoch {epoch}/{EPOCHS}  loss {losses[-1]:.4f}  "
            f"{count / epoch_seconds:,.0f} images/s",
            flush=True,
        )

    model.eval()
    right = tested = 0
    with torch.no_grad():
        for inputs, labels in testing:
            inputs, labels = inputs.to(device), labels.to(device)
            right += int((model(inputs).argmax(dim=1) == labels).sum())
            tested += len(labels)
    return {
        "losses": losses,
        "images_per_second": images / seconds,
        "first_steps": first_steps,
        "peak_mib": memory.peak_mib(),
        "accuracy": 100 * right / tested,
        "threads": torch.get_num_threads(),
    }


class PeakMemory:
    """Memory of the training at its highest, above the level before the first step, in MiB.

    On a GPU the device's allocator knows; elsewhere the kernel knows the process's highest level.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self._gpu: Any = torch.cuda if torch.cuda.is_available() else None
        if self._gpu is not None:
            self._gpu = torch.get_device_module(device)
            self._gpu.reset_peak_memory_stats()
            self._before = self._gpu.memory_allocated()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the highest level starts here
        except OSError:
            pass  # a sandbox may forbid it: then the highest level since the start counts
        self._before = self._level("VmRSS")

    def peak_mib(self) -> float:
        if self._gpu is not None:
            return (self._gpu.max_memory_allocated() - self._before) / 2**20
        return (self._level("VmHWM") - self._before) / 2**20

    @staticmethod
    def _level(key: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/self/status has no {key}")


def main() -> dict[str, Any]:
    """The accelerated run."""
    import torch

    import torchacc  # <--

    torch.manual_seed(0)
    loader, testing = make_data()
    model = make_model()
    model, loader = torchacc.accelerate(model, loader)  # <--
    device = model.device  # <--
    result = train("acc", model, loader, torchacc.AsyncLoader(testing, device), device)
    result["where"] = str(device)
    return result


def main_eager() -> dict[str, Any]:
    """The plain run, on the GPU if there is one."""
    import torch

    if hasattr(torch, "acc"):
        raise RuntimeError("the device acc is registered in the process of the plain run")
    torch.manual_seed(0)
    loader, testing = make_data()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = make_model().to(device)
    result = train("eager", model, loader, testing, device)
    result["where"] = str(device)
    return result


def run_eager() -> dict[str, Any]:
    """`main_eager` in a process of its own; passes its progress on."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, os.path.abspath(__file__), "--eager"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    result = None
    for line in process.stdout:
        if line.startswith(RESULT):
            result = json.loads(line[len(RESULT) :])
        else:
            print(line, end="", flush=True)
    status = process.wait()
    if status != 0 or result is None:
        sys.exit(f"quickstart: the plain run failed with exit status {status}; see above.")
    return result


def print_table(eager: dict[str, Any], acc: dict[str, Any]) -> None:
    rows = [("", f"eager ({eager['where']})", f"torchacc ({acc['where']})")]
    for epoch, pair in enumerate(zip(eager["losses"], acc["losses"], strict=True), 1):
        rows.append((f"loss after epoch {epoch}", *(f"{loss:.4f}" for loss in pair)))
    formats = (
        ("images/s", "images_per_second", "{:,.0f}"),
        (f"time to step {FIRST_STEPS}", "first_steps", "{:.2f} s"),
        ("peak memory", "peak_mib", "{:,.1f} MiB"),
        ("held-out accuracy", "accuracy", "{:.1f} %"),
    )
    for title, key, form in formats:
        rows.append((title, form.format(eager[key]), form.format(acc[key])))
    print()
    for title, left, right in rows:
        print(f"{title:<20}{left:>18}{right:>20}")
    print(
        f"\n{acc['threads']} threads; images/s without the first epoch; memory above the level "
        "before the first step"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eager", action="store_true", help="only the plain run, as JSON")
    if parser.parse_args().eager:
        print(RESULT + json.dumps(main_eager()))
        sys.exit(0)
    # Asked here, because the plain run takes a while and needs neither.
    for package in ("torchacc", "torchacc_device", "sklearn"):
        if importlib.util.find_spec(package) is None:
            sys.exit(
                f"quickstart: {package} cannot be imported by {sys.executable}. "
                "`make quickstart` sets everything up; after `make develop`, run this with "
                "PYTHONPATH=. (and with scikit-learn installed)."
            )
    plain = run_eager()
    accelerated = main()
    print_table(plain, accelerated)
    print(f"accuracy: {accelerated['accuracy']:.1f} %")
    if accelerated["accuracy"] < WANTED_ACCURACY:
        sys.exit(f"quickstart: that is below the {WANTED_ACCURACY:.0f} % that it should reach.")
