"""One thread records writes to tensors that others read, query events about, and drop."""

import sys
import threading

import torch

import torchacc_device  # noqa: F401

torch.set_num_threads(1)
sys.setswitchinterval(1e-6)
lock = threading.Lock()
shared = [torch.zeros(8, device="acc")]
stop = threading.Event()
seen: list[float] = []


def read() -> None:
    while not stop.is_set():
        with lock:
            tensor = shared[-1]
        values = tensor.tolist()
        assert len(set(values)) == 1, values  # a value of one step, never a mixture
        seen.append(values[0])


def query() -> None:
    event = torch.acc.Event()
    while not stop.is_set():
        event.record()
        while not event.query():
            pass


threads = [threading.Thread(target=target) for target in (read, read, query)]
for thread in threads:
    thread.start()
for _ in range(150):
    fresh = shared[-1] + 1
    fresh.mul_(1.0)
    with lock:
        shared.append(fresh)
        if len(shared) > 3:
            del shared[0]
stop.set()
for thread in threads:
    thread.join()
assert shared[-1].tolist() == [150.0] * 8
assert all(0 <= value <= 150 for value in seen)
