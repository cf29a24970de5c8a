"""no_grad, enable_grad and inference_mode in turn."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.ones(2, device=device, requires_grad=True)
    with torch.no_grad():
        a = x * 2
        with torch.enable_grad():
            b = x * 3
    with torch.inference_mode():
        c = x * 4
        c.add_(1)
    b.sum().backward()
    return [a, b, c, x.grad, a.requires_grad, b.requires_grad, c.is_inference()]
