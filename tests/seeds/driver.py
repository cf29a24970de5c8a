"""Runs one script unchanged, as `python driver.py SCRIPT [ARGUMENT...]`, and reports on it.

Seeds torch before, notes when each line was printed, and prints a last line with what is known
afterwards: REPORT and a JSON object.
"""

import builtins
import io
import json
import os
import runpy
import sys
import time

import torch

if os.environ.get("ACC_TEST_REGISTER") == "1" and not hasattr(torch, "acc"):
    import torchacc_device  # noqa: F401  (where the package is not installed, nothing autoloads it)

printed = []
plain_print = builtins.print


def noting_print(*values, **options):
    # The loss in the line was read before this call: the work of its window is done.
    printed.append(time.time())
    # In one piece: under torchrun several processes write to one pipe.
    line = io.StringIO()
    plain_print(*values, **options, file=line)
    sys.stdout.write(line.getvalue())
    sys.stdout.flush()


# Which types convolutions and linear layers gave, by their class.
types = {}


def noting_type(module, inputs, output):
    if isinstance(module, (torch.nn.Conv2d, torch.nn.Linear)):
        types.setdefault(type(module).__name__, set()).add(str(output.dtype))


if os.environ.get("ACC_TEST_TYPES") == "1":
    torch.nn.modules.module.register_module_forward_hook(noting_type)

torch.manual_seed(0)
sys.argv = sys.argv[1:]
builtins.print = noting_print
names = runpy.run_path(sys.argv[0], run_name="__main__")
builtins.print = plain_print

parameters = list(names["model"].parameters())
norm = torch.stack([p.detach().double().norm() for p in parameters]).norm().item()
plugin = sys.modules.get("torchacc_device")
report = {
    "device": str(names["device"]),
    "parameters": sorted({str(p.device) for p in parameters}),
    "gradients": sum(p.grad is not None for p in parameters) == len(parameters),
    "norm": norm,
    "printed": printed,
    "transfers": 0 if plugin is None else plugin._C.stats()["transfers"],
    "kernels": 0 if plugin is None else plugin._C.stats()["kernel_launches"],
    "loader": type(names["train_loader"]).__name__,
    "types": {kind: sorted(found) for kind, found in types.items()},
}
if scaler := names.get("scaler"):
    began = getattr(scaler, "_init_scale", None)  # only where it is enabled
    report["scaler"] = [scaler.is_enabled(), began, scaler.get_scale()]
sys.stdout.write("REPORT " + json.dumps(report) + "\n")
