"""out= writes into given tensors and views of them."""

import torch


def run(device):
    """Returns what is compared between devices."""
    a = torch.arange(6.0, device=device).view(2, 3)
    out = torch.zeros(3, 3, device=device)
    torch.mm(a.t(), a, out=out)
    row = torch.zeros(2, 6, device=device)
    torch.add(a, 1, out=row[:, ::2])
    values, indices = torch.empty(2, device=device), torch.empty(2, dtype=torch.long, device=device)
    torch.max(a, 1, out=(values, indices))
    return [out, row, values, indices]
