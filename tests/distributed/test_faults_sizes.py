"""Ranks that send something else than another one has room for."""

from __future__ import annotations

import pytest

from tests.distributed.test_faults import reduced

# A process that ends takes its connections with it. No call of the group, which would be compared.
TOGETHER = """
store = dist.distributed_c10d._get_default_store()
store.set(f"over/{RANK}", "1")
store.wait([f"over/{rank}" for rank in range(WORLD)])
"""

pytestmark = pytest.mark.usefixtures("acc_only")

# What each rank of two sends to itself fits: of the sizes between them each knows its own.
ALL_TO_ALL = {
    "all_to_all": """
def exchange(give, take):
    sent = [x[: 1 if rank == RANK else give].clone() for rank in range(WORLD)]
    room = [torch.full((1 if rank == RANK else take,), 7.0, device=device) for rank in range(WORLD)]
    dist.all_to_all(room, sent)
    return torch.cat([part for rank, part in enumerate(room) if rank != RANK])
""",
    "all_to_all_single": """
def exchange(give, take):
    to, of = ([1 if rank == RANK else n for rank in range(WORLD)] for n in (give, take))
    room = torch.full((sum(of),), 7.0, device=device)
    dist.all_to_all_single(room, x[: sum(to)].clone(), of, to)
    return torch.cat([part for rank, part in enumerate(room.split(of)) if rank != RANK])
""",
    "all_to_all_single of rows": """
def exchange(give, take):
    to, of = ([1 if rank == RANK else n for rank in range(WORLD)] for n in (give, take))
    room = torch.full((sum(of), 2), 7.0, device=device)[:, :1]
    dist.all_to_all_single(room, x[: sum(to), None].clone(), of, to)
    parts = [part for rank, part in enumerate(room.split(of)) if rank != RANK]
    return torch.cat(parts).flatten()
""",
}


@pytest.mark.parametrize("call", ALL_TO_ALL)
def test_what_comes_short_in_an_all_to_all_leaves_the_rest(call):
    code = """
for _ in range(3):
    exchange(4, 4).tolist()
report(got=exchange(2 if RANK == 0 else 4, 4).tolist())
"""
    first, second = reduced(ALL_TO_ALL[call] + code + TOGETHER)
    assert first["got"] == [2] * 4
    assert second["got"] == [1, 1, 7, 7]


@pytest.mark.parametrize("room", ["torch.full((4,), v)", "torch.full((4, 2), v)[:, 1]"])
def test_a_message_that_comes_short_leaves_the_rest(room):
    code = """
def receive(v):
    room = ROOM
    dist.recv(room, 0)
    return room.tolist()
torch.set_default_device(device)
if RANK == 0:
    dist.send(x[:4].clone(), 1)
    dist.send(x[:2].clone(), 1)
else:
    report(whole=receive(7.0), short=receive(9.0))
"""
    _, second = reduced(code.replace("ROOM", room) + TOGETHER)
    assert (second["whole"], second["short"]) == ([1] * 4, [1, 1, 9, 9])


def test_a_receive_does_not_wait_for_what_the_rest_of_a_tensor_is():
    """What it begins with may come only behind a collective that the others call later."""
    code = """
room, z = torch.full((4,), 9.0, device=device), torch.ones(1, device=device)
if RANK == 0:
    dist.send(x[:4].clone(), 1)
    dist.send(x[:2].clone(), 1)
    store = dist.distributed_c10d._get_default_store()
    store.wait(["received"])
    dist.all_reduce(z)
else:
    dist.recv(room, 0)
    room.sum().item()
    work = dist.all_reduce(z, async_op=True)
    dist.recv(room.fill_(9.0), 0)
    dist.distributed_c10d._get_default_store().set("received", "1")
    report(room=room.tolist())
report(z=z.item())
"""
    first, second = reduced(code + TOGETHER)
    assert first["z"] == second["z"] == 2
    assert second["room"] == [1, 1, 0, 0]


def test_a_tensor_without_valid_contents_can_be_received():
    code = """
room = x[torch.tensor([5000], device=device)]
said = refused(torch.acc.synchronize)
if RANK == 0:
    dist.send(x[:1].clone(), 1)
else:
    dist.recv(room, 0)
    report(room=room.tolist())
"""
    _, second = reduced(code + TOGETHER)
    assert second["room"] == [1]


@pytest.mark.parametrize("call", list(ALL_TO_ALL)[:2])
@pytest.mark.parametrize(("ranks", "give"), [(2, 5), (2, 3), (4, 5)])
def test_parts_of_an_all_to_all_that_do_not_fit_are_told(call, ranks, give):
    code = """
def unlike():
    exchange(GIVE if RANK == 0 else 4, 4)
    torch.acc.synchronize()
heard(unlike)
""".replace("GIVE", str(give))
    done = reduced(ALL_TO_ALL[call] + code, ranks)
    for rank in done:
        assert rank["kind"] == "DistBackendError"
        assert f"in collective number 1 of the group, {call} at" in rank["text"]
        assert f"rank 0 sends {give} elements to rank " in rank["text"]
        assert "which has room for 4." in rank["text"]
        assert rank["seconds"] < 18


def test_parts_that_are_new_in_a_call_that_is_known_are_compared():
    code = """
def unlike():
    for _ in range(3):
        exchange(4, 4)
    exchange(3, 2)
    torch.acc.synchronize()
heard(unlike)
"""
    for rank in reduced(ALL_TO_ALL["all_to_all"] + code):
        assert "in collective number 4 of the group, all_to_all at" in rank["text"]
        assert "sends 3 elements to rank" in rank["text"]


@pytest.mark.parametrize(("late", "give"), [(0, "6"), (1, "6"), (0, "2"), (1, "2"), (1, "4.half")])
def test_a_message_that_is_no_match_is_told(late, give):
    size, _, kind = give.partition(".")
    code = """
sent = x[: SIZE].clone().to(torch.KIND)
torch.acc.synchronize()
def unlike():
    if RANK == LATE:
        time.sleep(1)
    if RANK == 0:
        dist.send(sent, 1)
    else:
        dist.recv(torch.zeros(4, device=device), 0)
    dist.all_reduce(x)
    x.sum().item()
heard(unlike)
"""
    for name, value in {"SIZE": size, "KIND": kind or "float", "LATE": str(late)}.items():
        code = code.replace(name, value)
    what = f"{size} {'Half' if kind else 'Float'}"
    for rank in reduced(code):
        assert rank["kind"] == "DistBackendError"
        assert (
            f"rank 0 sends {what} to rank 1, which receives 4 Float (message number 1 between "
            "them with tag 0)"
        ) in rank["text"]
        assert rank["seconds"] < 18


def test_messages_that_somebody_receives_from_anybody_are_not_counted():
    code = """
if RANK == 0:
    dist.send(x[:4].clone(), 1)
    dist.send(x[:6].clone(), 1)
else:
    time.sleep(1)
    few, more = (torch.zeros(size, device=device) for size in (4, 6))
    dist.recv(few)
    dist.recv(more, 0)
    report(more=more.tolist())
"""
    _, second = reduced(code + TOGETHER)
    assert second["more"] == [1] * 6


def test_messages_that_are_known_are_not_compared():
    code = """
import torchacc_device
def waits():
    return torchacc_device._C.stats().get("group_waits/a message is new", 0)
met = []
for _ in range(4):
    if RANK == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    met.append(waits())
report(met=met)
"""
    for rank in reduced(code + TOGETHER):
        assert rank["met"] == [1] * 4


def test_parts_that_are_new_each_time_are_compared_at_first():
    code = """
import torchacc_device
for size in range(1, 81):
    exchange(size, size).sum().item()
report(waits=torchacc_device._C.stats()["group_waits/a call is new"])
"""
    for rank in reduced(ALL_TO_ALL["all_to_all"] + code + TOGETHER):
        assert 64 <= rank["waits"] < 70
