"""Four threads ask what became of collectives, each of which has failed."""

import sys
import threading

import torch
import torch.distributed as dist

import torchacc_device  # noqa: F401

torch.set_num_threads(1)
sys.setswitchinterval(1e-6)
dist.init_process_group("acc", store=dist.HashStore(), rank=0, world_size=1)
nowhere = torch.tensor([5000], device="acc")
at_once = threading.Barrier(4)
refused: list[bool] = []


def ask(work: dist.Work) -> None:
    at_once.wait()
    while not work.is_completed():
        pass
    refused.append(not work.is_success() and work.get_future().done())


for _ in range(20):
    bad = torch.ones(4, device="acc")[nowhere]
    work = dist.all_reduce(bad, async_op=True)
    threads = [threading.Thread(target=ask, args=(work,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
assert refused == [True] * 80, refused
dist.destroy_process_group()
