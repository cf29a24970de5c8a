"""Memory statistics, addresses of tensors that are not computed, the patched pointer readers."""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
import sys
import threading

import pytest
import torch

from tests.helpers import ROOT, child_env, extension, run_python

pytestmark = pytest.mark.usefixtures("acc_only", "only_this_frees")

MIB = 1 << 20


def on_host() -> bool:
    return extension().executor_name() == "host"


def test_tensors_are_counted_while_they_live() -> None:
    before = torch.acc.memory_allocated()
    x = torch.ones(4 * MIB // 4, device="acc")
    assert torch.acc.memory_allocated() - before == 4 * MIB
    y = x[:100]
    del x
    assert torch.acc.memory_allocated() - before == 4 * MIB
    del y
    assert torch.acc.memory_allocated() == before


@pytest.mark.usefixtures("recording")
def test_recorded_work_is_counted_as_an_eager_device_would() -> None:
    before = torch.acc.memory_allocated()
    x = torch.ones(MIB // 4, device="acc")
    y = x + 1
    assert extension().pending(0) > 0
    assert torch.acc.memory_allocated() - before == 2 * MIB
    assert y[0].item() == 2.0


def test_a_tensor_that_nothing_was_written_to_takes_nothing() -> None:
    before = torch.acc.memory_allocated()
    x = torch.empty(MIB, device="acc")
    assert torch.acc.memory_allocated() == before
    assert x.shape == (MIB,)


def test_the_peak_is_kept_until_it_is_reset() -> None:
    torch.acc.reset_peak_memory_stats()
    base = torch.acc.max_memory_allocated()
    x = torch.ones(8 * MIB // 4, device="acc")
    torch.acc.synchronize()
    del x
    assert torch.acc.max_memory_allocated() - base >= 8 * MIB
    torch.acc.reset_peak_memory_stats()
    assert torch.acc.max_memory_allocated() == torch.acc.memory_allocated()
    torch.acc.reset_max_memory_allocated()
    assert torch.acc.max_memory_reserved() >= torch.acc.memory_reserved()


def test_totals_are_kept_until_they_are_reset() -> None:
    torch.acc.reset_accumulated_memory_stats()
    x = torch.ones(MIB // 4, device="acc")
    torch.acc.synchronize()
    del x
    stats = torch.acc.memory_stats()
    assert stats["allocated_bytes.all.allocated"] >= MIB
    assert stats["allocated_bytes.all.freed"] >= MIB
    assert stats["allocation.all.allocated"] >= 1
    torch.acc.reset_accumulated_memory_stats()
    assert torch.acc.memory_stats()["allocated_bytes.all.freed"] == 0


def test_the_accelerator_api_says_the_same() -> None:
    x = torch.ones(MIB, device="acc")
    stats = torch.acc.memory_stats()
    del stats["captured_bytes.all.current"]  # which torch has no name for
    assert stats == dict(torch.accelerator.memory_stats())
    assert torch.accelerator.memory_allocated() == torch.acc.memory_allocated() >= 4 * MIB
    stats = extension().memory_stats(0)
    assert stats["allocated_bytes.all.current"] == torch.acc.memory_allocated(x.device)
    assert set(stats) <= set(torch.acc.memory_stats())


def test_free_and_total_memory_are_sane() -> None:
    free, total = torch.acc.mem_get_info()
    assert 0 < free <= total <= torch.acc.get_device_properties().total_memory * 1.01


def test_the_summary_prints_the_numbers() -> None:
    x = torch.ones(3 * MIB // 4, device="acc")
    text = torch.acc.memory_summary()
    number, unit = re.search(r"^Allocated memory +(\d+) (\w+)", text, re.MULTILINE).groups()
    unit_size = {"KiB": 1 << 10, "MiB": 1 << 20}[unit]
    assert 0 <= torch.acc.memory_allocated() - int(number) * unit_size < unit_size
    assert len(torch.acc.memory_summary("acc:0", abbreviated=True)) < len(text)
    assert x.numel() > 0


def test_empty_cache_keeps_tensors() -> None:
    x = torch.arange(1000.0, device="acc")
    y = (x * 2).sum()
    torch.acc.empty_cache()
    assert y.item() == 999000.0 and x[-1].item() == 999.0
    torch.acc.empty_cache()
    assert (x + 1)[0].item() == 1.0


def test_the_device_without_an_index_is_the_current_one() -> None:
    assert torch.acc.memory_allocated("acc") == torch.acc.memory_allocated(0)
    with pytest.raises(RuntimeError, match="no device acc:99"):
        torch.acc.memory_allocated(99)


# --- addresses --------------------------------------------------------------------------------


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.usefixtures("recording")
def test_pending_storages_have_addresses_of_their_own() -> None:
    extension().flush()
    tensors = [torch.ones(n, device="acc") for n in (1, 2, 1000, 1000, 7)]
    before = extension().pending(0)
    assert before > 0
    addresses = [address(x) for x in tensors]
    assert len(set(addresses)) == 5 and 0 not in addresses
    assert all(extension().is_reserved(a) for a in addresses)
    assert address(tensors[2][5:]) == addresses[2]
    assert extension().pending(0) == before, "UntypedStorage.data_ptr must not submit anything"


def test_ranges_of_pending_storages_do_not_overlap() -> None:
    extension().flush()
    tensors = [torch.ones(n, device="acc") for n in (1, 4097, 3, 100_000, 2)]
    spans = sorted((address(x), address(x) + x.numel() * 4) for x in tensors)
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))


def test_threads_get_different_addresses() -> None:
    kept: list[list[torch.Tensor]] = [[] for _ in range(4)]

    def make(mine: list[torch.Tensor]) -> None:
        mine.extend(torch.empty(1 + i % 700, device="acc") for i in range(1000))

    threads = [threading.Thread(target=make, args=(mine,)) for mine in kept]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    addresses = {address(x) for mine in kept for x in mine}
    assert len(addresses) == 4000 and 0 not in addresses


def test_an_empty_storage_has_no_address() -> None:
    assert address(torch.empty(0, device="acc")) == 0
    assert torch.empty(0, device="acc").data_ptr() == 0
    assert address(torch.ones(3, 0, device="acc")) == 0


@pytest.mark.usefixtures("recording")
def test_the_address_of_a_tensor_is_real() -> None:
    x = torch.arange(10.0, device="acc") * 2
    assert extension().is_reserved(address(x))
    pointer = x.data_ptr()
    assert not extension().is_reserved(pointer)
    assert x[3:].data_ptr() == pointer + 12
    if on_host():
        assert list((ctypes.c_float * 10).from_address(pointer)) == [2.0 * i for i in range(10)]
    x.add_(1)
    assert x.data_ptr() == pointer, "a storage whose address was seen stays where it is"
    if on_host():
        assert (ctypes.c_float * 10).from_address(pointer)[9] == 19.0


def test_addresses_of_parameters_and_views_agree() -> None:
    weight = torch.nn.Linear(4, 4, device="acc").weight
    assert weight.data_ptr() == weight.detach().data_ptr() == weight.view(-1).data_ptr()
    assert weight.data_ptr() == weight.t().data_ptr() != 0


def test_tensors_of_the_cpu_keep_their_addresses() -> None:
    x = torch.arange(4.0)
    assert list((ctypes.c_float * 4).from_address(x.data_ptr())) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_wrappers_are_left_to_torch() -> None:
    """They have no memory of their own; the original decides."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.ones(3, device="acc")
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    assert fake.device.type == "acc"
    try:
        fake.data_ptr()
    except RuntimeError:
        pass

    def inner(t: torch.Tensor) -> torch.Tensor:
        with pytest.raises(RuntimeError):
            t.data_ptr()
        return t * 2

    assert torch.vmap(inner)(x).tolist() == [2.0] * 3


@pytest.mark.usefixtures("recording")
def test_reading_a_pending_address_faults() -> None:
    if not on_host():
        pytest.skip("on the CUDA executor no host address is involved")
    code = """
import ctypes, faulthandler
import torch, torchacc_device
faulthandler.disable()
x = torch.ones(4, device="acc")
ctypes.string_at(x.untyped_storage().data_ptr(), 4)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=child_env(),
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == -signal.SIGSEGV


LIMITED = """
import resource
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (6 << 30), resource.RLIM_INFINITY))
x = torch.ones(1000, device="acc")
y = x * 2
a, b = (t.untyped_storage().data_ptr() for t in (x, y))
assert a != b and a and b
assert y.tolist() == [2.0] * 1000
# The range is handed out many times over, also to storages as large as itself.
from torchacc_device import _C
for nbytes in [1 << 28] * 100 + [1 << 32]:
    p = torch.empty(nbytes, dtype=torch.uint8, device="acc").untyped_storage().data_ptr()
    assert _C.is_reserved(p)
assert (y + x).tolist() == [3.0] * 1000
"""


def test_a_refused_reservation_takes_a_smaller_one_and_says_so() -> None:
    done = run_python(LIMITED, ACC_EXECUTOR="host")
    text = done.stdout + done.stderr
    assert text.count("ulimit -v") == 1, text
    assert "instead of 2^44" in text


# --- the patched functions --------------------------------------------------------------------


@pytest.mark.usefixtures("recording")
def test_what_is_patched_is_listed_and_can_be_undone() -> None:
    from torchacc_device import _patches

    # An earlier test may have had a reason for what is patched later.
    assert set(_patches.LIST) <= set(_patches.applied())
    assert set(_patches.LIST) == {
        "torch.Tensor.data_ptr",
        "torch.Tensor.__dlpack__",
        "torch.Tensor.__dlpack_device__",
        "torch.Tensor.__dlpack_c_exchange_api__",
        "torch._C._to_dlpack",
        "torch._C._to_dlpack_versioned",
        "torch._C._from_dlpack",
        "torch.utils.dlpack.to_dlpack",
        "torch.to_dlpack",
        "torch.UntypedStorage._write_file",
        "torch.UntypedStorage._set_from_file",
        "torch.UntypedStorage._share_fd_cpu_",
        "torch.UntypedStorage._share_filename_cpu_",
        "torch.UntypedStorage._share_cuda_",
        "torch.cuda.amp.common.amp_definitely_not_available",
        "torch._meta_registrations.device_hint",
        "torch._TorchCompileWrapper.__init__",
        "torch._TorchCompileInductorWrapper.__call__",
        "torch.GradScaler.scale",
        "torch.GradScaler.update",
        "torch.GradScaler._maybe_opt_step",
        "torch.GradScaler._unscale_grads_",
        "torch.GradScaler._check_scale_growth_tracker",
        "torch.GradScaler.load_state_dict",
        "torch.distributed.distributed_c10d._new_process_group_helper",
        "torch.distributed.distributed_c10d._create_process_group_wrapper",
        "torch.distributed.distributed_c10d._set_pg_timeout",
        "torch.distributed.init_process_group",
        "torch.distributed.distributed_c10d.init_process_group",
        "torch.distributed.monitored_barrier",
        "torch.distributed.distributed_c10d.monitored_barrier",
        "torch.distributed.split_group",
        "torch.distributed.distributed_c10d.split_group",
        "torch.distributed.device_mesh.split_group",
    }
    assert set(_patches.LATER) == {
        "torch.DistributedDataParallel.__init__",
        "torch.nn.attention.flex_attention._validate_device",
        "torch.OffsetBasedRNGTracker._distribute_region",
        "torch.ShardedGradScaler.update",
    }
    try:
        _patches.undo()
        _patches.undo()
        assert _patches.applied() == ()
        assert torch.Tensor.data_ptr is torch._C.TensorBase.data_ptr
        x = torch.ones(3, device="acc")
        assert extension().is_reserved(x.data_ptr()), "the original does not submit"
    finally:
        _patches.apply()
        _patches.apply()
    assert set(_patches.applied()) - set(_patches.LATER) == set(_patches.LIST)
    assert not extension().is_reserved(torch.ones(3, device="acc").data_ptr())
    assert torch.Tensor.data_ptr.__name__ == "data_ptr"


def test_a_copy_on_write_clone_never_reads_the_address() -> None:
    """torch's default copies bytes from the address: a fault, or on a GPU somebody else's data."""
    x = torch.ones(3, device="acc")
    try:
        y = torch._lazy_clone(x)
    except (RuntimeError, NotImplementedError):
        pass
    else:
        y.add_(1)
        assert y.tolist() == [2.0] * 3
    assert x.tolist() == [1.0] * 3


def test_storages_are_read_and_written_by_element() -> None:
    storage = (torch.ones(4, dtype=torch.uint8, device="acc") * 3).untyped_storage()
    assert storage[1] == 3
    storage[1] = 7
    assert storage.tolist() == [3, 7, 3, 3]
    storage.fill_(1)
    assert storage.tolist() == [1] * 4


HEAP = """
import torch, torchacc_device
from torchacc_device import _C

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def step():
    x = torch.ones(16 << 20, device="acc")
    return (torch.exp(x) + torch.sin(x)).sum().item()

step()
kept = resident()
torch.acc.empty_cache()
assert kept - resident() >= 64 << 20, "freed blocks stay until empty_cache"
before = resident()
step()
again = resident()
step()
assert resident() - again < 16 << 20, "the next step uses them again"
# Tensors of the CPU are not ours: their memory goes back at once.
x = torch.ones(32 << 20)
assert resident() - again >= 120 << 20  # 128, less what the compiler's threads gave back
del x
assert resident() - again < 16 << 20
# A thread that is not executing never gets blocks of the heap, and may free those of a thread
# that is.
import threading
y = torch.ones(1 << 20, device="acc") + 1
_C.flush()
box = [y]
del y
worker = threading.Thread(target=box.clear)
worker.start()
worker.join()
assert step() == step()
"""


@pytest.mark.skipif(not on_host(), reason="the heap belongs to the host executor")
def test_memory_of_the_host_executor_is_kept_between_steps() -> None:
    run_python(HEAP, ACC_HOST_GRAPHS=None, ACC_TEST_EMULATOR=None)  # captures have pools


FORKED = """
import os, torch, torchacc_device
x = torch.ones(1 << 20, device="acc") + 1
x.sum().item()
child = os.fork()
if child == 0:
    y = torch.empty(1 << 20)
    del x, y
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert x[5].item() == 2.0
"""


@pytest.mark.skipif(not on_host(), reason="the heap belongs to the host executor")
def test_a_forked_child_may_drop_tensors_of_the_heap() -> None:
    run_python(FORKED)


def test_the_peak_counts_what_a_step_makes_on_the_way() -> None:
    if not on_host():
        pytest.skip("on a GPU the caching allocator counts")
    x = torch.ones(1 << 20, device="acc")  # 4 MiB
    torch.acc.synchronize()
    torch.acc.reset_peak_memory_stats()
    level = torch.acc.memory_allocated()
    parts = [x * i for i in range(6)]
    total = torch.stack(parts).sum()
    del parts
    assert total.item() == 15 << 20
    assert torch.acc.max_memory_allocated() - level >= 6 * (4 << 20)
    assert torch.acc.memory_allocated() - level == total.untyped_storage().nbytes()
