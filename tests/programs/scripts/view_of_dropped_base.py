"""A view outlives every name of its base."""

import torch


def run(device):
    """Returns what is compared between devices."""

    def part():
        base = torch.arange(100.0, device=device)
        base.mul_(2)
        return base[10:20].view(2, 5)

    v = part()
    junk = [torch.full((100,), 9.0, device=device) for _ in range(4)]
    v[0] += 1
    return [v, v._base is None, sum(j.sum() for j in junk)]
