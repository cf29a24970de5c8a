"""What the test folders share: the device under test, its counters, copies, comparisons, children.

`ACC_TEST_DEVICE` chooses the device under test: `acc` (the default) or `cpu`. With `cpu` every
harness compares the CPU with itself, which checks the harness and needs no built extension.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.template import Template

ROOT = Path(__file__).resolve().parent.parent
DEVICE = os.environ.get("ACC_TEST_DEVICE", "acc")
ON_ACC = DEVICE != "cpu"
FULL = os.environ.get("ACC_TEST_FULL", "0") not in ("", "0")
# The whole process stands for one with a GPU, as far as plans and kernels go.
EMULATED = ON_ACC and os.environ.get("ACC_TEST_EMULATOR", "0") not in ("", "0")

# cuDNN's float32 is float32 wherever tests compare: TF32, PyTorch's default for convolutions and
# recurrent layers, keeps ten bits of what it multiplies. Each process of the tests comes by here;
# with PyTorch's own test helpers imported the flag itself cannot be set.
torch.backends.cudnn.set_flags(_allow_tf32=False)

MODES = ("eager", "nofuse", "nograph", "full")  # of ACC_MODE


# The passes that change last bits, for ACC_SKIP_PASSES: without them every step is ATen's kernels.
BIT_BY_BIT = "widen,fuse,rows,products,epilogues,accumulate,layout"


def load_device() -> str:
    """Registers the device under test and returns its name. Harmless when called twice.

    Raises ImportError when the extension was not built and the device is `acc`.
    """
    if ON_ACC:
        import torchacc_device  # noqa: F401
    if EMULATED:
        _emulate_from_now_on()
    return DEVICE


def extension() -> Any:
    """The extension module `torchacc_device._C`."""
    load_device()
    from torchacc_device import _C

    return _C


# --- counters ---------------------------------------------------------------------------------


def on_cuda() -> bool:
    """Whether the operators of the device under test run on a GPU."""
    return ON_ACC and extension().executor_name() == "cuda"


@functools.cache
def bit_equal() -> bool:
    """Whether operators are to give the CPU's bits: ATen's CUDA kernels do not."""
    return not on_cuda()


def stats() -> dict[str, int]:
    """A snapshot of the counters; empty when the device under test is the CPU."""
    return dict(extension().stats()) if ON_ACC else {}


def fallback_keys(counters: dict[str, int]) -> dict[str, int]:
    """The counters of operators that went through the fallback, by operator name."""
    found = {}
    for key, value in counters.items():
        for mark in ("fallback:", "fallback/"):
            if key.startswith(mark):
                found[key[len(mark) :]] = value
    return found


class Counted:
    """What was counted between entering and leaving `counting()`."""

    def __init__(self) -> None:
        self.before: dict[str, int] = {}
        self.after: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        return self.after.get(name, 0) - self.before.get(name, 0)


@contextmanager
def counting() -> Iterator[Counted]:
    """Counts what happens inside: `with counting() as c: ...`, then `c["plans_built"]`."""
    counted = Counted()
    counted.before = stats()
    try:
        yield counted
    finally:
        counted.after = stats()


def flush() -> None:
    """Submits what was recorded on the device under test."""
    if ON_ACC:
        extension().flush()


@contextmanager
def without_passes(names: str) -> Iterator[None]:
    """Plans that are made meanwhile are made without the passes `names`, separated by commas."""
    extension().skip_passes(names)
    try:
        yield
    finally:
        extension().skip_passes(os.environ.get("ACC_SKIP_PASSES", ""))


def runs_at_once() -> bool:
    """Whether each operator runs by itself: there are no steps, and no kernels of several."""
    return bool(extension().mode() in ("eager", "nofuse"))


def compile_together(programs: Sequence[Callable[[], object]]) -> None:
    """Makes the kernels of `programs`, which return what they compute, by one run of the compiler.

    A run for each kernel takes ten times as long. They are the kernels that each program has by
    itself, if no two share a tensor: nothing is computed for several or merged here.
    """
    if not ON_ACC or runs_at_once():
        return
    failed = stats().get("jit/failed", 0)
    with without_passes("cse,batch"):
        for _ in range(2):  # the second run waits for them
            kept = [program() for program in programs]
            flush()
            del kept
    assert stats().get("jit/failed", 0) == failed, "kernels could not be compiled"


def kernels_of_a_gpu() -> bool:
    """Whether kernels of plans are those of a GPU, be it an emulated one."""
    return ON_ACC and (_emulating or extension().executor_name() != "host")


def emulate_gpu(on: bool = True) -> None:
    """Kernels of plans are those of a GPU from now on, run by the emulator; or not.

    Where there is a GPU they are, and there is nothing to emulate; with ACC_TEST_EMULATOR, too.
    """
    if EMULATED or extension().executor_name() != "host":
        return
    _use_kernels(_emulator() if on else "")


_emulating = False


def _use_kernels(path: str) -> None:
    global _emulating
    from torchacc_device import _C

    _C.emulate_gpu(path)
    _emulating = path != ""


@functools.cache
def _emulate_from_now_on() -> None:
    from torchacc_device import _C

    if _C.executor_name() == "host":
        _use_kernels(_emulator())


def _emulator() -> str:
    """The library that runs kernels of a GPU."""
    built = ROOT.glob(f"build/cp*-torch{torch.__version__.replace('+', '-')}-*/module")
    found = [folder / "libacc_emulator.so" for folder in built]
    found = [path for path in found if path.exists() and not path.parts[-3].endswith("-thread")]
    assert found, "the emulator is not built: make develop"
    return str(max(found, key=lambda path: path.stat().st_mtime))


def synchronize() -> None:
    """Waits for all work of the device under test; raises the device's sticky error if any."""
    if ON_ACC:
        torch.accelerator.synchronize()


def device_is_lost() -> bool:
    """Whether CUDA refuses this process everything from now on, as after an index out of bounds.

    Waits for all work; what goes wrong in a step that was recorded before is forgotten.
    """
    for _ in range(2):  # the second time no step is left
        try:
            synchronize()
        except torch.AcceleratorError as error:
            return "of no more use to this process" in str(error)
        except Exception:  # whatever an operator raises
            continue
        break
    return False


def mark_step() -> None:
    """Marks the end of a step on the device under test."""
    if ON_ACC:
        extension().mark_step()


# --- copies that keep the geometry ------------------------------------------------------------


def tree_map(fn: Callable[[Any], Any], value: Any) -> Any:
    """Applies `fn` to every leaf of nested lists, tuples (named ones too), dicts and slices."""
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, (tuple, list)):
        made = [tree_map(fn, v) for v in value]
        if isinstance(value, list):
            return made
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    if isinstance(value, dict):
        return {k: tree_map(fn, v) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(tree_map(fn, v) for v in (value.start, value.stop, value.step)))
    return fn(value)


def leaves(value: Any) -> list[Any]:
    """The leaves of nested lists, tuples and dicts, in order."""
    found: list[Any] = []

    def add(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    tree_map(add, value)
    return found


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors among the leaves."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def _dense(t: torch.Tensor) -> bool:
    """Whether the elements of `t` fill a block of memory without gap or overlap."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def clone_to(t: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """A detached copy of `t` on `device` with the same sizes, strides, offset and requires_grad.

    A strided tensor gets its own storage that holds the elements of the source's storage up to the
    last one that `t` uses. Conjugate and negative bits are kept. Other layouts go through `.to()`;
    meta tensors stay on meta.
    """
    source = t.detach()
    if source.device.type == "meta":
        return source.clone().requires_grad_(t.requires_grad)
    if source.layout != torch.strided or source.is_quantized or source.is_nested:
        return source.clone().to(device).requires_grad_(t.requires_grad)
    if source.is_conj():
        made = clone_to(source.conj(), device).conj()
    elif source.is_neg():
        made = clone_to(source._neg_view(), device)._neg_view()
    elif source.storage_offset() == 0 and source.numel() > 0 and _dense(source):
        made = torch.empty_strided(
            source.shape, source.stride(), dtype=source.dtype, device=device
        ).copy_(source)
    else:
        reach = 0
        if source.numel() > 0:
            reach = source.storage_offset() + 1
            for stride, size in zip(source.stride(), source.shape, strict=True):
                reach += stride * (size - 1)
        flat = torch.empty(reach, dtype=source.dtype, device=device)
        if reach:
            flat.copy_(source.as_strided((reach,), (1,), 0))
        made = flat.as_strided(source.shape, source.stride(), min(source.storage_offset(), reach))
    made = made.detach()
    return made.requires_grad_() if t.requires_grad else made


def copy_tree(value: Any, device: str | torch.device) -> Any:
    """A deep copy of nested containers with every tensor on `device`, as `clone_to` does.

    A tensor that occurs twice is copied once. `torch.device("cpu")` becomes `device`; strings are
    left alone. Other leaves are shared.
    """
    seen: dict[int, torch.Tensor] = {}

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in seen:
                seen[id(leaf)] = clone_to(leaf, device)
            return seen[id(leaf)]
        if isinstance(leaf, torch.device):
            return torch.device(device)
        return leaf

    return tree_map(one, value)


# --- comparisons ------------------------------------------------------------------------------

_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def to_cpu(t: torch.Tensor) -> torch.Tensor:
    """The values of `t` on the CPU, detached; of any layout."""
    t = t.detach()
    return t.cpu() if t.device.type != "cpu" else t


def _plain(t: torch.Tensor) -> torch.Tensor:
    t = t.resolve_conj().resolve_neg()
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.contiguous()


def value_difference(actual: torch.Tensor, expected: torch.Tensor) -> tuple[str, str] | None:
    """How the values of two CPU tensors of equal dtype and shape differ, bit by bit.

    Every NaN equals every NaN. Returns None, or a kind and a text: `close` when all elements agree
    to 1e-5 relative (1e-2 for 16-bit floats), else `value`. Where operators do not give the CPU's
    bits, what is close is no difference.
    """
    if actual.numel() == 0:
        return None
    a, e = _plain(actual), _plain(expected)
    word = _WORD.get(a.element_size())
    if word is None or a.dtype == torch.bool:
        same = a == e
    else:
        same = a.view(word) == e.view(word)
    if bool(same.all()):
        return None
    if not a.is_floating_point():
        index = int((~same).flatten().nonzero()[0])
        return "value", (
            f"{int((~same).sum())} of {a.numel()} elements, first at {index}: "
            f"{a.flatten()[index].item()!r} instead of {e.flatten()[index].item()!r}"
        )
    same |= a.isnan() & e.isnan()
    wrong = (~same).flatten()
    if not bool(wrong.any()):
        return None
    af, ef = a.flatten()[wrong].double(), e.flatten()[wrong].double()
    finite = af.isfinite() & ef.isfinite()
    distance = (af - ef).abs()
    relative = distance / ef.abs().clamp_min(torch.finfo(a.dtype).tiny)
    limit = 1e-2 if a.element_size() == 2 else 1e-5
    scale = float(e.double().nan_to_num(0, 0, 0).abs().max())
    near = bool(finite.all()) and bool(((relative <= limit) | (distance <= limit * scale)).all())
    text = (
        f"{int(wrong.sum())} of {a.numel()} elements, first {af[0].item()!r} instead of "
        f"{ef[0].item()!r}, largest difference {float(distance.max()):.3g}"
    )
    if near and not bit_equal():
        return None
    return ("close" if near else "value"), text


def tensor_differences(
    actual: torch.Tensor, expected: torch.Tensor, *, values: bool = True, strides: bool = True
) -> list[tuple[str, str]]:
    """How `actual` (any device) differs from `expected` (CPU): pairs of kind and text.

    Kinds: layout, dtype, shape, stride, value, close.
    """
    found: list[tuple[str, str]] = []
    if actual.dtype != expected.dtype:
        found.append(("dtype", f"{actual.dtype} instead of {expected.dtype}"))
    if actual.layout != expected.layout:
        return [*found, ("layout", f"{actual.layout} instead of {expected.layout}")]
    if actual.shape != expected.shape:
        return [*found, ("shape", f"{tuple(actual.shape)} instead of {tuple(expected.shape)}")]
    if actual.layout != torch.strided:
        if values and not found:
            found += _sparse_differences(actual, expected)
        return found
    if strides and expected.numel() > 0 and not actual.is_nested:
        # The stride of a dimension of one element means nothing.
        sizes = expected.shape
        mine = [s for s, n in zip(actual.stride(), sizes, strict=True) if n != 1]
        theirs = [s for s, n in zip(expected.stride(), sizes, strict=True) if n != 1]
        if mine != theirs:
            found.append(("stride", f"{actual.stride()} instead of {expected.stride()}"))
    if values and actual.dtype == expected.dtype:
        if actual.is_quantized:
            actual, expected = actual.dequantize(), expected.dequantize()
        difference = value_difference(to_cpu(actual), to_cpu(expected))
        if difference:
            found.append(difference)
    return found


def _sparse_differences(actual: torch.Tensor, expected: torch.Tensor) -> list[tuple[str, str]]:
    if expected.layout == torch.sparse_coo:
        parts = ("_indices", "_values")
    elif expected.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = ("crow_indices", "col_indices", "values")
    elif expected.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = ("ccol_indices", "row_indices", "values")
    else:  # an opaque layout (oneDNN) has no parts to compare
        return tensor_differences(to_cpu(actual).to_dense(), to_cpu(expected).to_dense())
    actual, expected = to_cpu(actual), to_cpu(expected)
    found = []
    for part in parts:
        for kind, text in tensor_differences(getattr(actual, part)(), getattr(expected, part)()):
            found.append((kind, f"{part.strip('_')}: {text}"))
    return found


def differences(
    actual: Any, expected: Any, *, values: bool = True, strides: bool = True
) -> list[tuple[str, str]]:
    """How two results (nested containers of tensors and numbers) differ: pairs of kind and text.

    Besides the kinds of `tensor_differences`: `type` for unlike containers or leaves.
    """
    a_leaves, e_leaves = leaves(actual), leaves(expected)
    if len(a_leaves) != len(e_leaves):
        return [("type", f"{len(a_leaves)} results instead of {len(e_leaves)}")]
    found: list[tuple[str, str]] = []
    for i, (a, e) in enumerate(zip(a_leaves, e_leaves, strict=True)):
        where = f"result {i}: " if len(e_leaves) > 1 else ""
        if isinstance(e, torch.Tensor) != isinstance(a, torch.Tensor):
            found.append(("type", f"{where}{type(a).__name__} instead of {type(e).__name__}"))
        elif isinstance(e, torch.Tensor):
            for kind, text in tensor_differences(a, e, values=values, strides=strides):
                found.append((kind, where + text))
        elif type(a) is not type(e):
            found.append(("type", f"{where}{type(a).__name__} instead of {type(e).__name__}"))
        elif values and a != e and not (a != a and e != e):
            found.append(("value", f"{where}{a!r} instead of {e!r}"))
    return found


def assert_same(actual: Any, expected: Any, *, strides: bool = True, what: str = "") -> None:
    """Fails with every difference between two results named; bit equality is asked for."""
    found = differences(actual, expected, strides=strides)
    if found:
        lines = "\n".join(f"  {kind}: {text}" for kind, text in found)
        raise AssertionError(f"{what or 'results'} differ from the CPU's:\n{lines}")


def same(fn: Callable[[str], Any], device: str) -> None:
    """Runs `fn` on the CPU and on the device and asks for equal results."""
    expected = fn("cpu")
    assert_same(fn(device), expected)


def drawn(*shape: int, device: str, seed: int = 0, grad: bool = False) -> torch.Tensor:
    """Normal values, the same on every device."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
    return made.requires_grad_(grad)


def state_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, in the module's order."""
    return [*model.parameters(), *model.buffers()]


def small_net(device: str) -> torch.nn.Sequential:
    """A two-layer network with fixed weights."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(
        device
    )


# --- child processes --------------------------------------------------------------------------


def child_env(**changes: str | None) -> dict[str, str]:
    """The environment for a child process: this one, the repository on its path, and `changes`.

    A value of None takes the variable out.
    """
    env = dict(os.environ)
    paths = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def run_beside(folder: Path, code: str, **env: str | None) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh interpreter that finds this project in `folder` and nowhere else.

    An installation of the project in the interpreter running the tests would be found too, so the
    child reads no `site-packages` but a folder of links to everything else that is in there.
    """
    others = folder / "others"
    others.mkdir(exist_ok=True)
    for entry in (Path(path) for path in sys.path):
        if entry.name not in ("site-packages", "dist-packages") or not entry.is_dir():
            continue
        for child in entry.iterdir():
            ours = re.match(r"(__editable__)?_*(acc_torch|torchacc)", child.name)
            link = others / child.name
            if not ours and not link.is_symlink():
                link.symlink_to(child)
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=folder,
        env=child_env(**{**env, "PYTHONPATH": os.pathsep.join((str(folder), str(others)))}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@functools.cache
def template() -> Template:
    """The process that children come from, started when first asked for."""
    return Template(child_env(), str(ROOT))


def python_command(code: str) -> list[str]:
    """The command that runs `code` with `DEVICE` and `torch` defined and the device registered."""
    # A job in the background of a shell ignores interrupts, and so would its children.
    prelude = (
        "import signal, torch\nfrom tests.helpers import DEVICE, load_device\nload_device()\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    )
    return [sys.executable, "-c", prelude + code]


def run_python(
    code: str,
    *,
    timeout: float = 300,
    check: bool = True,
    fresh: bool = False,
    **env: str | None,
) -> subprocess.CompletedProcess[str]:
    """Runs `code` in an interpreter of its own, the repository's root as its working directory.

    It has imported torch already (tests/template.py) unless it is to be `fresh`. See
    `python_command` for what the code finds. With `check` a non-zero exit status fails the test
    with the child's output. `env` changes the child's environment.
    """
    command, environ = python_command(code), child_env(**env)
    if not fresh and template().can_run(environ):
        done = template().run(command[-1], environ, timeout)
    else:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    if check and done.returncode != 0:
        raise AssertionError(
            f"the child process ended with status {done.returncode}\n"
            f"--- stdout\n{done.stdout[-4000:]}\n--- stderr\n{done.stderr[-4000:]}"
        )
    return done
