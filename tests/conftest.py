"""Fixtures that every test folder may use.

The device is registered before any test module is imported: PyTorch's own test helpers look at the
name of the PrivateUse1 backend when they are imported.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

# Which kernels run must not depend on how busy the machine is (test_trial.py tests what does).
# PyTorch may load the device, which reads the environment, as soon as it is imported.
os.environ.setdefault("ACC_DETERMINISTIC", "1")

import pytest
import torch

from tests import helpers

try:
    helpers.load_device()
    _missing = ""
except ImportError as error:
    # Tests that need no device (layout, build, documents) run without the extension; the others
    # fail in the fixture `device`, with the reason.
    _missing = str(error)


@pytest.fixture
def device() -> str:
    """The name of the device under test; fails when the extension cannot be imported."""
    if _missing:
        pytest.fail(f"the device cannot be imported ({_missing}); build it with `make develop`")
    return helpers.DEVICE


@pytest.fixture(autouse=True)
def all_kernels_compile() -> Iterator[None]:
    """A kernel that the compiler refuses runs unfused and right: only this shows it."""
    before = 0 if _missing else helpers.stats().get("jit/failed", 0)
    yield
    after = 0 if _missing else helpers.stats().get("jit/failed", 0)
    assert after == before, "kernels could not be compiled; the warning on stderr says why"


@pytest.fixture(autouse=True)
def cuda_is_cuda() -> Iterator[None]:
    """What `torchacc.accelerate` lets act on acc is CUDA's again when a test ends."""
    yield
    if not _missing and helpers.ON_ACC:
        from torchacc_device import _patches

        _patches.undo_as_cuda()


@pytest.fixture(autouse=True)
def no_loop_is_left() -> Iterator[None]:
    """A loop over an AsyncLoader that a test has left, and something still holds, does not say
    where the steps of the next test end: two of them would be one plan.
    """
    yield
    if not _missing and helpers.ON_ACC:
        from torchacc_device import _boundary

        _boundary._thread.loops = _boundary.Loops()


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """The group of this process alone, which `torchacc.accelerate` asks for, ends with the module:
    tests that make one of their own may run behind it.
    """
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def acc_only(device: str) -> str:
    """For tests of something that only acc has: skips in the CPU self check of the harness."""
    if not helpers.ON_ACC:
        pytest.skip("the device under test is the CPU: self check of the harness")
    return device


@pytest.fixture(scope="session")
def recording() -> str:
    """For tests of what is recorded, planned or fused: skips where each operator runs at once."""
    if helpers.ON_ACC and helpers.runs_at_once():
        pytest.skip("ACC_MODE=eager and nofuse run each operator at once")
    return helpers.DEVICE


@pytest.fixture(scope="session")
def capturing(recording: str) -> str:
    """For tests of captured plans."""
    if helpers.ON_ACC and helpers.extension().mode() == "nograph":
        pytest.skip("ACC_MODE=nograph captures nothing")
    return recording


@pytest.fixture
def two_devices(device: str) -> None:
    """For tests whose processes have two with ACC_HOST_DEVICES=2, unless they have GPUs instead."""
    if helpers.on_cuda() and torch.acc.device_count() < 2:
        pytest.skip("needs two devices: this machine has one GPU")


@pytest.fixture
def outlives_wrong_data(device: str) -> None:
    """For tests of errors that depend on data: a kernel that meets one ends the CUDA context, and
    no test behind it would have a device. test_captured_on_cuda.py has one in another process.
    """
    if helpers.on_cuda():
        pytest.skip("wrong data end the CUDA context of the process")


@pytest.fixture
def kernels_of_a_gpu(device: str) -> Iterator[None]:
    """Emulated where there is none: its threads and blocks take turns in either order."""
    helpers.emulate_gpu()
    try:
        yield
    finally:
        helpers.emulate_gpu(on=False)


@pytest.fixture
def plans_of_a_gpu(kernels_of_a_gpu: None) -> Iterator[None]:
    """Plans as they are made for a GPU: captured, too."""
    helpers.extension().capture_plans(True)
    try:
        yield
    finally:
        helpers.extension().capture_plans(None)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One intra-op thread during the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def unfused(device: str) -> Iterator[None]:
    """Without generated kernels during the test: every step is ATen's kernel, bit by bit.

    Plans are dropped before and after.
    """
    if helpers.ON_ACC:
        helpers.extension().skip_passes(helpers.BIT_BY_BIT)
    yield
    if helpers.ON_ACC:
        helpers.extension().skip_passes(os.environ.get("ACC_SKIP_PASSES", ""))


@pytest.fixture
def only_this_frees() -> Iterator[None]:
    """For tests that count memory: what others left in cycles goes before, not in between."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
def workers_left() -> Callable[[], list]:
    """Which worker processes there are that this test has made: those of tests before it end with
    the frames of an error, which held them.
    """
    before = set(torch.multiprocessing.active_children())
    return lambda: [w for w in torch.multiprocessing.active_children() if w not in before]


@pytest.fixture
def clean_flags() -> Iterator[None]:
    """Puts back default dtype, default device and determinism, whatever the test did."""
    dtype = torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(deterministic)


def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Where CUDA's context has ended the tests behind this one need another process (`--after`)."""
    if _missing or not helpers.on_cuda() or node in node.session.items[-1:]:
        return
    if helpers.device_is_lost():
        node.session.shouldfail = f"stopping after {node.nodeid}, which lost the device"


@pytest.hookimpl(trylast=True)  # of the tests that are chosen, in the order in which they run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests up to the one that `--after` names."""
    after = config.getoption("--after")
    if after:
        names = [item.nodeid for item in items]
        if after not in names:
            raise pytest.UsageError(f"--after {after}: no such test among the {len(names)} found")
        del items[: names.index(after) + 1]


def pytest_collection_finish() -> None:
    """From here on collections look at what tests make, not at all that torch and pytest have."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--full`: OpInfo with every dtype and second gradients, as ACC_TEST_FULL=1 does; and
    `--after`, for another process where one has lost the device."""
    parser.addoption("--full", action="store_true", help="OpInfo: every dtype, second gradients")
    parser.addoption("--after", metavar="TEST", help="only the tests behind this one")
