"""Fourier transforms there and back, with a gradient."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(8.0, device=device).requires_grad_()
    f = torch.fft.rfft(x)
    back = torch.fft.irfft(f, n=8)
    g = torch.fft.fft2(x.view(2, 4))
    (f.abs().pow(2).sum() + g.real.sum()).backward()
    return [f, back, g, x.grad, torch.fft.fftshift(x.detach())]
