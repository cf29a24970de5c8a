"""Non-blocking copies to the device and back."""

import torch


def run(device):
    """Returns what is compared between devices."""
    source = torch.arange(6.0)
    x = source.to(device, non_blocking=True)
    y = x * 2
    source2 = torch.ones(6)
    x.copy_(source2, non_blocking=True)
    source2.zero_()
    z = (x + y).to("cpu", non_blocking=False)
    return [x, y, z]
