"""Real and imaginary parts are views of a complex tensor."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.complex(torch.arange(4.0), torch.ones(4)).to(device)
    x.real.mul_(2)
    x.imag[1:].sub_(3)
    y = torch.view_as_real(x)
    y[0, 1] = 8
    return [x, x.conj() * x, x.abs(), y, x.conj().is_conj()]
