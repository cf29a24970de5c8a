"""NaN, infinities and signed zeros through comparisons and reductions."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0], device=device)
    r = [
        x == x,
        x < 1,
        x.isnan(),
        x.isfinite(),
        x.max(),
        x.nanmean(),
        x.nan_to_num(),
        x.sort().values,
    ]
    r += [1 / x, x.maximum(x.flip(0)), x.fmax(x.flip(0)), x.sign(), x.clamp(-1, 1), x.nansum()]
    return [*r, torch.equal(x, x), torch.allclose(x, x, equal_nan=True)]
