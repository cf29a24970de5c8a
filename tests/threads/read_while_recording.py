"""One thread records writes to tensors that others read, query events about, and drop."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

import torchacc_device  # noqa: F401

VALUES = 40  # that each reader is to see
EVENTS = 20
torch.set_num_threads(1)
sys.setswitchinterval(1e-6)
lock = threading.Lock()
shared = [torch.zeros(8, device="acc")]
stop = threading.Event()


def read() -> list[float]:
    seen = [-1.0]
    while len(seen) <= VALUES and not stop.is_set():
        with lock:
            tensor = shared[-1]
        values = tensor.tolist()
        assert len(set(values)) == 1, values  # a value of one step, never a mixture
        assert values[0] >= seen[-1], (values, seen)
        if values[0] > seen[-1]:
            seen.append(values[0])
    return seen


def query() -> None:
    event = torch.acc.Event()
    for _ in range(EVENTS):
        event.record()
        while not event.query() and not stop.is_set():
            pass


with ThreadPoolExecutor(3) as pool:
    running = [pool.submit(target) for target in (read, read, query)]
    steps = 0
    try:
        while not all(each.done() for each in running):
            fresh = shared[-1] + 1
            fresh.mul_(1.0)
            with lock:
                shared.append(fresh)
                if len(shared) > 3:
                    del shared[0]
            steps += 1
            time.sleep(1e-3)  # plans of few steps, which are the same again and again
    finally:
        stop.set()  # or they would wait for the next step
assert shared[-1].tolist() == [steps] * 8
for seen in [each.result() for each in running][:2]:
    assert len(seen) == VALUES + 1 and seen[-1] <= steps, seen
