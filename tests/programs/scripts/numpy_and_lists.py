"""Ways to the host: numpy, tolist, item, float, len, iteration, in."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(6.0, device=device).view(2, 3)
    n = x.cpu().numpy() + 1
    back = torch.from_numpy(n).to(device)
    rows = [r.sum().item() for r in x]
    return [
        back,
        x.tolist(),
        rows,
        len(x),
        float(x[1, 2]),
        4.0 in x,
        [int(v) for v in x[0]],
        f"{x[0, 1]:.2f}",
    ]
