"""Integer arithmetic, shifts, division and modulo."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.tensor([-7, -1, 0, 3, 9], device=device)
    r = [x // 2, x % 3, x << 2, x >> 1, x & 6, x | 1, x ^ 5, ~x, -x, x.abs(), x.sign(), x**2]
    r += [
        torch.div(x, 2, rounding_mode="trunc"),
        x.remainder(4),
        x.fmod(4),
        x.float() // 2,
        x.bincount() if x.min() >= 0 else x.clamp(0).bincount(),
    ]
    r += [x.to(torch.int8) * 30, x.to(torch.uint8), x.bool().logical_xor(x > 0), x.cumprod(0)]
    return r
