"""Three threads train a model each on one device; the main thread makes and drops tensors."""

import gc
import sys
import threading

import torch

import torchacc_device  # noqa: F401

torch.set_num_threads(1)
sys.setswitchinterval(1e-6)
losses: dict[int, float] = {}


def train(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(16, 8, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    with torch.no_grad():
        model[0].weight.copy_(weight)
        model[2].weight.fill_(0.1)
        for layer in (model[0], model[2]):
            layer.bias.zero_()
    model.to("acc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(4, 8, device="acc")
    for step in range(40):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if step % 7 == 0:
            losses[seed] = loss.item()


threads = [threading.Thread(target=train, args=(seed,)) for seed in (1, 1, 2)]
for thread in threads:
    thread.start()
for _ in range(150):
    a = torch.ones(3, device="acc")
    b = a + 1
    del a
    gc.collect(0)
for thread in threads:
    thread.join()
assert b.tolist() == [2.0, 2.0, 2.0]
assert len(losses) == 2 and all(0 <= loss < 100 for loss in losses.values()), losses
