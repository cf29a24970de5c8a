"""Many tensors are made and most are dropped."""

import torch


def run(device):
    """Returns what is compared between devices."""
    kept = []
    for i in range(200):
        t = torch.full((3,), float(i), device=device)
        u = t * 2 + 1
        if i % 17 == 0:
            kept.append(u[1:])
        del t
    return [torch.stack(kept), len(kept)]
