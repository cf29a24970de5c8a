"""The device itself: names, indices, the current device, properties, executors, refusals."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import torchacc_device
from tests.helpers import ROOT, extension, run_beside, run_python

pytestmark = pytest.mark.usefixtures("acc_only")


def test_the_module_is_part_of_torch() -> None:
    import torch.acc.amp
    import torch.acc.random

    assert torch.acc is sys.modules["torch.acc"]
    assert torch.get_device_module("acc") is torch.acc
    assert issubclass(torch.acc.amp.GradScaler, torch.amp.GradScaler)
    missing = [name for name in torch.acc.__all__ if not hasattr(torch.acc, name)]
    assert not missing


def test_tensors_say_where_they_are() -> None:
    x = torch.ones(2, device="acc")
    assert str(x.device) == "acc:0"
    assert x.device == torch.device("acc", 0)
    assert x.get_device() == 0
    assert x.is_acc and not x.cpu().is_acc
    assert torch.device("acc").index is None
    assert x.untyped_storage().device == x.device
    assert x.untyped_storage().is_acc


def test_tensors_modules_storages_and_packed_sequences_have_the_method() -> None:
    x = torch.arange(4.0)
    assert x.acc().device.type == "acc"
    assert torch.nn.Linear(2, 2).acc().weight.device.type == "acc"
    assert x.untyped_storage().acc().device.type == "acc"
    packed = torch.nn.utils.rnn.pack_sequence([x, x[:2]])
    assert packed.acc().data.device.type == "acc"
    assert torch.equal(packed.acc().data.cpu(), packed.data)


def test_module_to_keeps_the_parameters() -> None:
    layer = torch.nn.Linear(2, 2)
    weight = layer.weight
    layer.to("acc")
    assert layer.weight is weight and weight.device.type == "acc"


def test_the_current_device_is_a_device() -> None:
    assert torch.acc.is_available()
    assert torch.acc.device_count() >= 1
    assert torch.acc.current_device() == 0
    torch.acc.set_device("acc:0")
    torch.acc.set_device(-1)
    assert torch.acc.current_device() == 0


def test_contexts_restore_the_current_device() -> None:
    x = torch.ones(1, device="acc:0")
    with torch.acc.device(None), torch.acc.device(-1), torch.acc.device("acc"):
        assert torch.acc.current_device() == 0
    with torch.acc.device_of(x), torch.acc.device_of(x.cpu()):
        assert torch.acc.current_device() == 0


@pytest.mark.parametrize("wrong", ["cuda:0", "cpu", torch.device("meta")])
def test_devices_of_other_types_are_refused(wrong: str | torch.device) -> None:
    for function in (torch.acc.synchronize, torch.acc.get_device_name, torch.acc.memory_allocated):
        with pytest.raises(ValueError, match="expected an acc device"):
            function(wrong)


def test_set_device_wants_an_index() -> None:
    with pytest.raises(ValueError, match="with an index"):
        torch.acc.set_device("acc")


def test_an_index_that_is_not_there_is_named() -> None:
    count = torch.acc.device_count()
    for function in (torch.acc.set_device, torch.acc.synchronize, torch.acc.get_device_name):
        with pytest.raises(RuntimeError, match=rf"no device acc:{count}: this process has {count}"):
            function(count)
    assert torch.acc.current_device() == 0
    with pytest.raises(RuntimeError, match="device"):
        torch.empty(1, device=f"acc:{count}")


def test_properties_describe_the_machine() -> None:
    found = torch.acc.get_device_properties()
    assert found.name == torch.acc.get_device_name(0) != ""
    assert found.total_memory > 1 << 20
    assert found.multi_processor_count >= 1
    assert (found.major, found.minor) == torch.acc.get_device_capability("acc:0")
    host = extension().executor_name() == "host"
    assert (torch.acc.get_device_capability() == (0, 0)) == host


def test_every_dtype_that_autocast_may_use_works() -> None:
    x = torch.ones(2, 2, device="acc")
    for dtype in torch.acc.get_amp_supported_dtype():
        with torch.autocast("acc", dtype=dtype):
            assert (x @ x).dtype == dtype
    assert torch.acc.is_bf16_supported()
    assert isinstance(torch.acc.is_bf16_supported(including_emulation=False), bool)


def test_peer_access_is_between_two_devices() -> None:
    assert not torch.acc.can_device_access_peer(0, 0)
    with pytest.raises(ValueError, match="no device acc:99"):
        torch.acc.can_device_access_peer(0, 99)


def test_importing_and_initialising_again_changes_nothing() -> None:
    before = torch.acc
    importlib.reload(torchacc_device)
    torch.acc.init()
    torch.acc._lazy_init()
    called = []
    torch.acc._lazy_call(lambda: called.append(1))
    assert torch.acc is before and called == [1]
    torch.ones(1, device="acc")
    assert torch.acc.is_initialized()


def test_importing_alone_does_not_use_the_device() -> None:
    run_python("assert not torch.acc.is_initialized() and not torch.cuda.is_initialized()")


SEVERAL = """
import threading
assert torch.acc.can_device_access_peer(0, 1)
with torch.acc.device(1):
    assert torch.acc.current_device() == 1
    x = torch.arange(3.0, device="acc")
    assert x.device.index == 1
    with torch.acc.device_of(torch.ones(1, device="acc:0")):
        assert torch.acc.current_device() == 0
    assert torch.acc.current_device() == 1
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.acc.current_device()))
    thread.start(); thread.join()
    assert seen == [0], seen
assert torch.acc.current_device() == 0
y = (x + 1).to("acc:0") * 2
assert y.device.index == 0 and y.tolist() == [2.0, 4.0, 6.0]
try:
    x + y
except RuntimeError as error:
    assert "acc:1" in str(error) and "acc:0" in str(error), error
else:
    raise AssertionError("operands on two devices were accepted")
torch.acc.set_device(1)
assert torch.empty(1, device="acc").device.index == 1
w = torch.ones(2, device="acc:1", requires_grad=True)
(w * 3).sum().backward()
assert w.grad.device.index == 1 and w.grad.tolist() == [3.0, 3.0]
print("done")
"""


def test_two_devices_are_kept_apart(two_devices) -> None:
    out = run_python(SEVERAL, ACC_HOST_DEVICES="2").stdout
    assert "done" in out


def test_each_local_rank_has_a_host_device() -> None:
    code = "print(torch.acc.device_count())"
    host = {"ACC_EXECUTOR": "host"}
    assert run_python(code, LOCAL_WORLD_SIZE="3", **host).stdout.strip() == "3"
    done = run_python(code, LOCAL_WORLD_SIZE="2", ACC_HOST_DEVICES="4", **host)
    assert done.stdout.strip() == "4"


def test_a_wrong_variable_is_told_at_import() -> None:
    done = run_python("", check=False, fresh=True, ACC_EXECUTOR="gpu")
    assert done.returncode != 0
    assert "ACC_EXECUTOR=gpu is not allowed" in done.stderr
    assert "auto, cuda, host" in done.stderr


def test_the_cuda_executor_without_a_gpu_is_an_error_with_a_reason() -> None:
    code = "print(torch.acc.device_count())"
    done = run_python(code, check=False, fresh=True, ACC_EXECUTOR="cuda")
    if done.returncode == 0:
        assert int(done.stdout) >= 1  # there is a GPU
        return
    last = done.stderr.strip().splitlines()[-1]
    assert "ImportError: [ACC_EXECUTOR=cuda] there is no usable NVIDIA GPU" in last
    assert "Unset ACC_EXECUTOR" in last


def test_the_host_executor_can_always_be_chosen() -> None:
    code = "print(torch.acc.get_device_name(), (torch.ones(2, device='acc') + 1).tolist())"
    done = run_python(code, ACC_EXECUTOR="host")
    assert "host executor" in done.stdout and "[2.0, 2.0]" in done.stdout


@pytest.mark.parametrize("executor", ["auto", "cuda"])
def test_gpus_that_are_hidden_are_not_there(executor: str) -> None:
    """CUDA_VISIBLE_DEVICES="" is a wish: nothing is said, unless a GPU is asked for."""
    code = "print(torch.acc.get_device_name(), (torch.ones(2, device='acc') + 1).tolist())"
    env = {"ACC_EXECUTOR": executor, "CUDA_VISIBLE_DEVICES": ""}
    done = run_python(code, check=False, fresh=True, **env)
    if executor == "auto":
        assert done.returncode == 0, done.stderr
        assert "host executor" in done.stdout and "[2.0, 2.0]" in done.stdout
        assert "NVIDIA" not in done.stderr
    else:
        assert done.returncode != 0
        assert "CUDA_VISIBLE_DEVICES hides all" in done.stderr


GPU = {
    "present": True,
    "driver_version": "550.54.15",
    "built_with_cuda": True,
    "cuda_version": 13000,
    "devices": 0,
    "none_visible": False,
    "error": "CUDA driver version is insufficient for CUDA runtime version",
    "capabilities": [],
    "architectures": "",
}
TORCH = (
    "  - CUDA Runtime 13.0\n  - NVCC architecture flags: -gencode;arch=compute_75,code=sm_75;"
    "-gencode;arch=compute_90a,code=sm_90a;-gencode;arch=compute_120,code=[sm_120,compute_120]\n"
    "  - CuDNN 91.9\n"
)
OLD = {"devices": 1, "capabilities": [61], "architectures": TORCH}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["550.54.15", "CUDA 13.0 needs 580", "Update the driver"]),
        ({"built_with_cuda": False}, ["550.54.15", "built without CUDA", "make develop"]),
        ({"driver_version": "590.1", "error": "boom"}, ["590.1", "boom", "nvidia-smi"]),
        ({"driver_version": ""}, ["unknown version", "580"]),
        ({"cuda_version": 12060}, ["CUDA 12.6 needs 525", "nvidia-smi"]),
        (
            OLD,
            [
                "GPU 0 is sm_61",
                "for sm_75, sm_90a, sm_120, compute_120",
                "Install a build of torch",
            ],
        ),
        ({**OLD, "capabilities": [80, 70]}, ["GPU 0 is sm_80, GPU 1 is sm_70", "Install a"]),
        ({**OLD, "capabilities": [100]}, ["sm_100"]),
        ({**OLD, "capabilities": [61, 90]}, ["GPU 0 is sm_61", "only GPU 1 visible"]),
    ],
)
def test_an_unusable_gpu_is_explained(changes: dict[str, object], words: list[str]) -> None:
    text, beside = extension().unusable_gpu(**{**GPU, **changes})
    assert all(word in text for word in words), text
    assert beside == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"present": False},
        {"devices": 1},
        {"none_visible": True},
        {**OLD, "architectures": ""},  # nobody knows
        *({**OLD, "capabilities": [each]} for each in (75, 90, 120, 121)),
        {**OLD, "capabilities": [75, 90]},
    ],
)
def test_a_machine_without_that_problem_is_not_warned(changes: dict[str, object]) -> None:
    assert extension().unusable_gpu(**{**GPU, **changes}) == ("", "")


def test_a_gpu_behind_the_first_that_is_unusable_is_named() -> None:
    changes = {"devices": 3, "capabilities": [90, 61, 120]}
    problem, beside = extension().unusable_gpu(**{**GPU, **OLD, **changes})
    assert problem == ""
    assert all(word in beside for word in ["GPU 1 is sm_61,", "only GPU 0, GPU 2 visible"]), beside


# --- other torch, no build --------------------------------------------------------------------


def import_copy(folder: Path, build_info: str | None) -> subprocess.CompletedProcess[str]:
    """Imports a copy of the package that has `build_info` and a broken native module."""
    package = folder / "torchacc_device"
    package.mkdir()
    for path in (ROOT / "torchacc_device").glob("*.py"):
        if path.name != "_build_info.py":
            shutil.copy(path, package)
    (package / "_C.py").write_text("raise SystemError('the native module was loaded')\n")
    if build_info is not None:
        (package / "_build_info.py").write_text(build_info)
    return run_beside(folder, "import torchacc_device")


def build_info(**changes: object) -> str:
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    facts = {"TORCH_VERSION": torch.__version__, "CUDA": None, "VERSION": "1", "PYTHON_TAG": tag}
    return "".join(f"{name} = {value!r}\n" for name, value in {**facts, **changes}.items())


def test_another_torch_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    done = import_copy(tmp_path, build_info(TORCH_VERSION="2.0.9"))
    assert "ImportError: [torchacc_device] built against torch 2.0.9" in done.stderr
    assert torch.__version__ in done.stderr
    assert "the native module was loaded" not in done.stderr


def test_another_python_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    done = import_copy(tmp_path, build_info(PYTHON_TAG="cp39"))
    assert "ImportError: [torchacc_device] built for Python cp39" in done.stderr
    assert "the native module was loaded" not in done.stderr


def test_the_right_torch_loads_the_native_module(tmp_path: Path) -> None:
    """The check of the two tests above: without a mismatch the copy gets that far."""
    assert "the native module was loaded" in import_copy(tmp_path, build_info()).stderr


def test_a_tree_that_was_not_built_says_how(tmp_path: Path) -> None:
    done = import_copy(tmp_path, None)
    assert "ImportError: [torchacc_device] not built: run `make develop`" in done.stderr


def test_threads_start_on_the_first_device() -> None:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.acc.current_device()))
    thread.start()
    thread.join()
    assert seen == [0]


def test_what_the_module_lacks_says_why() -> None:
    assert not hasattr(torch.acc, "utilization")
    with pytest.raises(AttributeError, match="no attribute 'utilization': ask the driver"):
        torch.acc.utilization()
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'$"):
        torch.acc.no_such_name()


def test_captured_work_of_two_devices_has_pools_of_its_own(two_devices, capturing):
    run_python(
        """
from torchacc_device import _C
x = [torch.ones(256, 256).to(f"{DEVICE}:{i}") for i in range(2)]
def work():
    made = ((x[0] + 1) @ x[0]).cumsum(0).cumsum(1)
    _C.flush()
for _ in range(6):
    work()
kept = []
for i in range(6):
    kept.append((x[1] * i).cumsum(0))
    _C.flush()
work()
work()
for i, each in enumerate(kept):
    assert torch.equal(each.cpu(), torch.full((256, 256), float(i)).cumsum(0)), i
assert _C.stats()["captures_submitted"] >= 8
""",
        ACC_HOST_GRAPHS="1",
        ACC_HOST_DEVICES="2",
        ACC_DETERMINISTIC="1",
    )
