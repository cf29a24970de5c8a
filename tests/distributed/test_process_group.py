"""What c10d asks of a process group and its works beside collectives, on acc."""

from __future__ import annotations

import pytest

from tests import helpers
from tests.distributed.ranks import run_to_end

pytestmark = pytest.mark.usefixtures("acc_only")

BEGIN = """
import datetime, threading, time
dist.init_process_group("acc", timeout=datetime.timedelta(seconds=60))
torch.acc.set_device(RANK % torch.acc.device_count())
device = torch.device(DEVICE, torch.acc.current_device())
group = dist.group.WORLD
backend = group._get_backend(device)
store = dist.distributed_c10d._get_default_store()
other = 1 - RANK
def seconds(count):
    return datetime.timedelta(seconds=count)
def mine(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), device=device).view(shape) * 10**RANK
"""
END = """
dist.destroy_process_group()
"""

WORKS = """
# Rank 1 has called, and rank 0 has not.
x, y = mine(3), torch.zeros(3, device=device)
if RANK == 1:
    works = [dist.gather(x, None, 0, async_op=True), dist.all_reduce(x, async_op=True)]
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        dist.broadcast(x, 0)
    works.append(manager.works[0])
    report(early=[work.is_completed() for work in works])
    report(late=refused(lambda: works[1].wait(seconds(0.05))), success=works[1].is_success())
    received = dist.irecv(y, 0)
    report(nothing=refused(lambda: received.wait(seconds(0.05))))
    store.set("asked", "1")
    report(waited=[work.wait(seconds(60)) for work in [*works, received]])
    report(over=[work.is_completed() for work in works], y=y.tolist())
else:
    store.wait(["asked"])
    parts = [torch.zeros(3, device=device) for _ in range(2)]
    dist.gather(x, parts, 0)
    dist.all_reduce(x)
    with dist._coalescing_manager(device=device):
        dist.broadcast(x, 0)
    dist.send(x, 1)
    report(parts=[part.tolist() for part in parts])
report(x=x.tolist())

# How they end, by futures.
first, second = torch.zeros(3, device=device), torch.zeros(3, device=device)
ops = [dist.P2POp(dist.irecv, first, other), dist.P2POp(dist.isend, mine(3), other)]
(both,) = dist.batch_isend_irecv(ops)
single = dist.irecv(second, other, tag=3)
dist.send(mine(3), other, tag=3)
reduced = dist.all_reduce(mine(3), async_op=True)
reduced.block_current_stream()
report(outcomes=[work.get_future_result().wait() for work in (both, single, reduced)])
report(values=[work.get_future().wait()[0].tolist() for work in (both, single, reduced)])
anybody = dist.irecv(y)
dist.send(mine(3), other)
anybody.wait()
report(source=anybody._source_rank())

# What has failed says so, without being polled; what was sent before has not.
x = mine(3)
sent = dist.isend(x, other)
dist.recv(y, other)
torch.acc.synchronize()
bad = mine(3)[torch.tensor([5000], device=device)]
works = [dist.all_reduce(bad, async_op=True)]
parts = None if RANK else [torch.zeros(1, device=device) for _ in range(2)]
works.append(dist.gather(bad, parts, 0, async_op=True))
before = works[0].is_success()
x.copy_(bad)
refused(torch.acc.synchronize)
report(failed=[before, works[0].is_success(), works[0].is_completed()])
report(x_after=refused(x.tolist), sent=sent.is_success())
report(why=refused(lambda: works[0].wait(seconds(60))))
x = mine(1)
dist.all_reduce(x)
report(after=x.item())
"""


def test_works_say_what_has_become_of_them():
    first, second = (rank.reports for rank in run_to_end(BEGIN + WORKS + END, 2))
    assert second["early"] == [False] * 3 and second["success"]
    assert "ALLREDUCE is not over after the 50 ms" in second["late"]
    assert "RECV is not over after the 50 ms" in second["nothing"]
    assert second["waited"] == [True] * 4 and second["over"] == [True] * 3
    assert first["parts"] == [[1, 2, 3], [10, 20, 30]]
    assert first["x"] == second["x"] == second["y"] == [11, 22, 33]
    for number, rank in enumerate((first, second)):
        received = [value * 10 ** (1 - number) for value in (1, 2, 3)]
        assert rank["outcomes"] == [0] * 3
        assert rank["values"] == [received, received, [11, 22, 33]]
        assert rank["source"] == 1 - number
        assert rank["failed"] == [True, False, True]
        assert "index 5000 is out of bounds" in rank["x_after"] and rank["sent"]
        assert "index 5000 is out of bounds" in rank["why"]
        assert rank["after"] == 11


MONITORED = """
x = mine(3)
if RANK == 1:
    work = dist.all_reduce(x, async_op=True)
    def ask():
        time.sleep(1)  # the step waits for rank 0 by then
        report(success=work.is_success())
        store.set("asked", "1")
    thread = threading.Thread(target=ask)
    thread.start()
    report(x=x.tolist())
    thread.join()
else:
    store.wait(["asked"], seconds(100))
    dist.all_reduce(x)
    report(x=x.tolist())
"""


def test_a_thread_that_asks_for_success_does_not_wait_for_the_step():
    first, second = (rank.reports for rank in run_to_end(BEGIN + MONITORED + END, 2))
    assert second["success"] and first["x"] == second["x"] == [11, 22, 33]


PENDING = """
y = torch.zeros(3, device=device)
if RANK == 0:
    dist.isend(mine(3), 1)
    group.set_timeout(seconds(1))
    report(said=refused(group._wait_for_pending_works))
    group.set_timeout(seconds(60))
    store.set("receive", "1")
    group._wait_for_pending_works()
else:
    store.wait(["receive"], seconds(60))
    dist.recv(y, 0)
    report(y=y.tolist())

with dist._coalescing_manager(device=device, async_ops=True) as manager:
    dist.broadcast(mine(3)[torch.tensor([5000], device=device)], 0)
    refused(torch.acc.synchronize)
    good = mine(1)
    dist.broadcast(good, 0)
report(good=good.item(), all=manager.works[0].is_success())
"""


def test_what_fails_among_several_is_told():
    if helpers.extension().executor_name() != "host":
        pytest.skip("a GPU begins what a manager has at its end, and sends are NCCL's")
    first, second = (rank.reports for rank in run_to_end(BEGIN + PENDING + END, 2))
    assert "the others have not received 1 sends of this group within 1000 ms" in first["said"]
    assert second["y"] == [1, 2, 3]
    for rank in (first, second):
        assert rank["good"] == 1 and rank["all"] is False


GROUP = """
counted = backend._get_sequence_number_for_group
before = counted()
dist.all_reduce(mine(2))
dist.barrier()
group.allreduce_coalesced([mine(2), mine(3)]).wait()
report(counted=counted() - before, error=str(backend.get_error()))

a, b = mine(2), mine(3)
lists = [[torch.zeros(2, device=device), torch.zeros(3, device=device)] for _ in range(2)]
group.allgather_coalesced(lists, [a, b]).wait()
report(gathered=[[part.tolist() for part in each] for each in lists])
wide = [torch.zeros(4, device=device), torch.zeros(6, device=device)]
group.allgather_into_tensor_coalesced(wide, [a, b]).wait()
report(into=[each.tolist() for each in wide])
parts = [torch.zeros(2, device=device), torch.zeros(3, device=device)]
group.reduce_scatter_tensor_coalesced(parts, wide).wait()
report(scattered=[each.tolist() for each in parts])
both = [mine(2), mine(3)]
dist.all_reduce_coalesced(both)
report(summed=[each.tolist() for each in both])

x = mine(2)
dist.all_reduce(x)
group._wait_for_pending_works()
report(x=x.tolist())
report(
    hook=refused(lambda: group._register_on_completion_hook(print)),
    timing=refused(group._enable_collectives_timing),
    duration=refused(dist.all_reduce(x, async_op=True)._get_duration),
    allocates=backend.supports_tensor_alloc(device),
    allocator=refused(lambda: backend.mem_allocator),
    splits=backend.supports_splitting,
)
"""


def test_groups_count_gather_together_and_refuse_what_they_have_not():
    for number, rank in enumerate(run_to_end(BEGIN + GROUP + END, 2)):
        found = rank.reports
        assert found["counted"] == 3 and found["error"] == "ErrorType.SUCCESS"
        assert found["gathered"] == [[[1, 2], [1, 2, 3]], [[10, 20], [10, 20, 30]]]
        assert found["into"] == [[1, 2, 10, 20], [1, 2, 3, 10, 20, 30]]
        both = ([2, 4], [2, 4, 6]) if number == 0 else ([20, 40], [20, 40, 60])
        assert found["scattered"] == list(both)
        assert found["summed"] == [[11, 22], [11, 22, 33]] and found["x"] == [11, 22]
        assert "Only ProcessGrouppNCCL supports onCompletion hook" in found["hook"]
        assert found["timing"] == "accepted"
        assert "getDuration" in found["duration"]
        assert found["allocates"] is False and found["splits"] is False
        assert "does not support getMemAllocator" in found["allocator"]


MIXED = """
ops = dist.ReduceOp
half = dist._make_nccl_premul_sum(0.5)
def numbers(count=1):
    return torch.full((count,), 1.0 + RANK, device=device)
def counts(count=1, dtype=torch.int32):
    return torch.full((count,), 3 + 2 * RANK, dtype=dtype, device=device)
def reduced(*tensors, op=ops.AVG):
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor, op)
    return [tensor.item() for tensor in tensors]
def scattered(*tensors, op=ops.AVG):
    outputs = [tensor.new_empty(1) for tensor in tensors]
    with dist._coalescing_manager():
        for output, tensor in zip(outputs, tensors, strict=True):
            dist.reduce_scatter_tensor(output, tensor, op)
    return [output.item() for output in outputs]
report(reduced=[reduced(numbers(), counts()), reduced(counts(), numbers())])
report(scattered=[scattered(numbers(2), counts(2)), scattered(counts(2), numbers(2))])
report(halved=[reduced(numbers(), numbers().half(), op=half),
               scattered(numbers(2).half(), numbers(2), op=half)])
kept = numbers()
report(refused=[
    refused(lambda: reduced(kept, counts(), op=half)),
    refused(lambda: scattered(numbers(2), counts(2), op=half)),
    refused(lambda: scattered(numbers(2), counts(2, torch.int16))),
    refused(lambda: scattered(counts(2), numbers(2), op=ops.BAND)),
])
report(kept=kept.item(), after=reduced(numbers()))
"""


def test_tensors_of_several_types_are_reduced_each_as_its_own():
    """An average of integers is divided behind the sum, one of others before it."""
    for number, rank in enumerate(run_to_end(BEGIN + MIXED + END, 2)):
        found = rank.reports
        assert found["reduced"] == found["scattered"] == [[1.5, 4], [4, 1.5]]
        assert found["halved"] == [[1.5, 1.5]] * 2
        reduced, scattered, short, bitwise = found["refused"]
        for text in (reduced, scattered):
            assert text.startswith("TypeError: ") and "floating point numbers, got Int" in text
        assert "does not take Short" in short
        assert "bitwise operations take integers, got Float" in bitwise
        assert found["kept"] == 1 + number and found["after"] == [1.5]


def test_collectives_on_several_devices_of_a_process_begin_in_the_order_of_their_calls():
    """Each device has a trace of its own, and what is read first is not what was called first."""
    code = """
first = torch.full((3,), 1.0 + RANK, device=device)
second = torch.full((3,), 10.0 * (1 + RANK), device=DEVICE + ":0")
dist.all_reduce(first)
dist.all_reduce(second)
report(devices=str(first.device), second=second.tolist(), first=first.tolist())
"""
    ranks = run_to_end(BEGIN + code + END, 2)
    assert [rank.reports["devices"] for rank in ranks] == ["acc:0", "acc:1"]
    for rank in ranks:
        assert rank.reports["first"] == [3.0] * 3 and rank.reports["second"] == [30.0] * 3


def test_a_group_on_one_device_does_not_wait_for_another_group_on_another():
    """Rank 1 comes to what rank 0 has called first only behind the result of the second."""
    code = """
groups = [dist.new_group([0, 1], timeout=seconds(60)) for _ in range(2)]
one, two = (torch.ones(3, device=f"{DEVICE}:{index}") for index in range(2))
def first():
    dist.all_reduce(two, group=groups[1], async_op=True)
def second():
    dist.all_reduce(one, group=groups[0])
    report(one=one.tolist())
for each in (first, second) if RANK == 0 else (second, first):
    each()
report(two=two.tolist())
"""
    for rank in run_to_end(BEGIN + code + END, 2):
        assert rank.reports == {"one": [2.0] * 3, "two": [2.0] * 3}


DEBUGGED = """
import torchacc
report(kind=type(backend).__name__)
group.set_timeout(seconds(50))
report(left=backend.transport.options._timeout.total_seconds())
report(met=[each.decode() for each in torchacc.dist.rendezvous("here", str(RANK).encode())])
some = dist.new_group([0, 1])
x = mine(3)
dist.all_reduce(x, group=some)
dist.destroy_process_group()
report(x=x.tolist())
"""


def test_at_torchs_highest_level_of_debugging_a_group_is_what_it_is_otherwise():
    """torch puts one of its own around each group then, which has collectives and no more."""
    for rank in run_to_end(BEGIN + DEBUGGED, 2, TORCH_DISTRIBUTED_DEBUG="DETAIL"):
        assert rank.reports == {
            "kind": "ProcessGroupACC",
            "left": 50.0,
            "met": ["0", "1"],
            "x": [11.0, 22.0, 33.0],
        }


TIMED = """
import warnings
warnings.simplefilter("error")
two = dist.new_group([0, 1], backend="cpu:gloo,acc:acc")
set_timeout = dist.distributed_c10d._set_pg_timeout
for each, count in ((None, 3), (two, 4)):
    set_timeout(seconds(count), each)
def left(group, kind):
    found = group._get_backend(torch.device(kind))
    found = found.transport if kind == "acc" else found
    return found.options._timeout.total_seconds()
report(left=[left(group, "acc"), left(two, "acc"), left(two, "cpu")])
set_timeout(seconds(60))
one = dist.new_group([1])
report(outside=refused(lambda: set_timeout(seconds(1), one)))
set_timeout(seconds(1))
y = torch.zeros(3, device=device)
if RANK == 0:
    began = time.monotonic()
    report(late=refused(lambda: (dist.all_reduce(y), torch.acc.synchronize())))
    report(waited=time.monotonic() - began)
    store.set("told", "1")
else:
    store.wait(["told"])
"""


def test_the_timeout_of_a_group_is_set_by_torchs_function():
    """It looks for Gloo on the CPU and NCCL on CUDA, and warned that it does nothing."""
    ranks = run_to_end(BEGIN + TIMED + "os._exit(0)\n", 2)
    for number, rank in enumerate(ranks):
        assert rank.reports["left"] == [3.0, 4.0, 4.0]
        assert number == 1 or rank.reports["outside"].startswith("ValueError")
    assert ranks[0].reports["late"] != "accepted" and ranks[0].reports["waited"] < 20


OWN_TIMEOUTS = """
from torch._C import _distributed_c10d as c10d
def asked(kind):
    options = getattr(c10d, kind + "Options")()
    options.timeout = datetime.timedelta(milliseconds=300)
    return options
def one():
    return [mine(4)]
def two():
    return [mine(4), mine(4)]
def at_root(lists):
    return [lists] if RANK == 0 else []
calls = {
    "all_reduce": lambda each: each.allreduce(one(), asked("Allreduce")),
    "broadcast": lambda each: each.broadcast(one(), asked("Broadcast")),
    "reduce": lambda each: each.reduce(one(), asked("Reduce")),
    "all_gather": lambda each: each.allgather([two()], one(), asked("Allgather")),
    "all_gather_into": lambda each: each._allgather_base(mine(8), mine(4), asked("Allgather")),
    "gather": lambda each: each.gather(at_root(two()), one(), asked("Gather")),
    "scatter": lambda each: each.scatter(one(), at_root(two()), asked("Scatter")),
    "reduce_scatter": lambda each: each.reduce_scatter(one(), [two()], asked("ReduceScatter")),
    "reduce_scatter_into": lambda each: each._reduce_scatter_base(
        mine(4), mine(8), asked("ReduceScatter")),
    "all_to_all": lambda each: each.alltoall(two(), two(), asked("AllToAll")),
    "all_to_all_single": lambda each: each.alltoall_base(
        mine(8), mine(8), [], [], asked("AllToAll")),
}
# Without one of its own a call would wait for longer than the test.
groups = [dist.new_group([0, 1], timeout=seconds(3600)) for _ in calls]
# Half of them by each rank, to which the other one does not come.
for each, (name, call) in list(zip(groups, calls.items()))[RANK::2]:
    report(**{name: refused(lambda: (call(each), torch.acc.synchronize()))})
store.set(f"told {RANK}", "1")
store.wait([f"told {other}"])
"""


def test_a_collective_may_have_a_timeout_of_its_own():
    first, second = run_to_end(BEGIN + OWN_TIMEOUTS + "os._exit(0)\n", 2)
    said = first.reports | second.reports
    assert len(said) == 11
    for name, text in said.items():
        assert text.startswith("DistBackendError"), name
        # Of two parts that are late together one is told of the other's end.
        assert "Timed out waiting 300ms for" in text or "Application timeout" in text, name
        assert f"collective number 1 of the group, {name} " in text


SET_LATER = """
groups = [group, dist.new_group([0, 1])]
for each in groups:
    each.set_timeout(datetime.timedelta(milliseconds=300))
y = torch.zeros(3, device=device)
if RANK == 0:
    report(received=refused(lambda: dist.recv(y, 1)))
    dist.isend(y, 1, groups[1])
    groups[1].set_timeout(seconds(60))
    report(sent=refused(groups[1]._wait_for_pending_works))
    store.set("told", "1")
else:
    store.wait(["told"])
"""


def test_a_timeout_that_is_set_later_is_that_of_sends_and_receives():
    """Gloo looks for these at the one that the group was made with."""
    first = run_to_end(BEGIN + SET_LATER + "os._exit(0)\n", 2)[0]
    assert "Timed out waiting 300ms for recv" in first.reports["received"]
    assert "Timed out waiting 300ms for send" in first.reports["sent"]
