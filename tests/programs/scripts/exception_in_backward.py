"""An exception in a backward hook: the graph is dropped, the next step works."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.ones(3, device=device, requires_grad=True)

    def fail(g):
        raise ValueError("stop here")

    y = x * 2
    y.register_hook(fail)
    try:
        y.sum().backward()
        text = "no error"
    except ValueError as error:
        text = str(error)
    (x * 5).sum().backward()
    return [text, x.grad, y]
