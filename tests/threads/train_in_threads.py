"""Three threads train a model each on one device; the main thread makes and drops tensors."""

import gc
import math
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

import torchacc_device  # noqa: F401

SEEDS = (1, 1, 2)
torch.set_num_threads(1)
sys.setswitchinterval(1e-6)


def train(seed: int, device: str) -> list[float]:
    """The losses that were read, the last one among them."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(16, 8, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    with torch.no_grad():
        model[0].weight.copy_(weight)
        model[2].weight.fill_(0.1)
        for layer in (model[0], model[2]):
            layer.bias.zero_()
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-4)
    x = torch.ones(4, 8, device=device)
    losses = []
    for step in range(40):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if step % 7 == 0 or step == 39:
            losses.append(loss.item())
    return losses


with ThreadPoolExecutor(len(SEEDS)) as pool:
    trainings = [pool.submit(train, seed, "acc") for seed in SEEDS]
    for _ in range(150):
        a = torch.ones(3, device="acc")
        b = a + 1
        del a
        gc.collect(0)
assert b.tolist() == [2.0, 2.0, 2.0]
for seed, training in zip(SEEDS, trainings, strict=True):
    losses, expected = training.result(), train(seed, "cpu")
    assert all(map(lambda x, y: math.isclose(x, y, rel_tol=1e-3), losses, expected)), losses
