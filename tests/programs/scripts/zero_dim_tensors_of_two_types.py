"""Tensors without dimensions have one weight, those of the CPU too: the wider type decides."""

import torch


def run(device):
    """Returns what is compared between devices."""
    tenth = torch.tensor(0.1, device=device) * 1
    here, there = (torch.tensor(0.1, dtype=torch.float64, device=d) for d in (device, "cpu"))
    compared = [tenth == here, tenth == there, tenth < there, there >= tenth, tenth == 0.1]
    row = torch.full((3,), 0.1, device=device) * 1
    compared += [row == here, row == there]
    whole = torch.tensor(7, dtype=torch.int32, device=device) + 0
    compared += [whole == torch.tensor(7 + (1 << 32)), whole < torch.tensor(1 << 40)]
    written = []
    for big in (torch.tensor(1e40, dtype=torch.float64, device=d) for d in (device, "cpu")):
        small = torch.tensor(1e-30, device=device) * 1
        small.mul_(big)
        rows = torch.full((3,), 1e-30, device=device) * 1
        rows.mul_(big)
        written += [small, rows]
    totals = [torch.zeros((), device=device), torch.ones((), device=device)]
    torch._foreach_copy_(totals, [torch.tensor(3.0), torch.tensor(4.0, dtype=torch.float64)])
    torch._foreach_mul_(totals, [torch.tensor(2.0), torch.tensor(0.5)])
    return [*compared, *written, *totals]
