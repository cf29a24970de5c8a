"""Index tensors on the CPU: columns of a matrix, repeated and reversed ones, single numbers."""

import torch


def run(device):
    """Returns what is compared between devices."""
    x = torch.arange(5000.0, device=device).view(-1, 2)
    edges = torch.stack([torch.arange(1200), torch.arange(1200) + 1250], 1)
    read = [x[edges[:, 0]], x[edges[:, 1].flip(0)], x[torch.tensor([7]).expand(3)], x[edges[:5].T]]
    written = torch.zeros(2500, device=device)
    written[edges[:, 0]] = 1
    written.index_put_((edges[::7, 1],), torch.tensor(2.0, device=device), accumulate=True)
    edges.zero_()
    pairs = torch.zeros(4, 3, device=device)
    one = torch.tensor(2)
    two = torch.tensor([0, 1], device=device)
    pairs.index_put_((one, two), torch.ones(2, device=device))
    pairs.index_put_((two, one), torch.ones(2, device=device), accumulate=True)
    one.fill_(0)
    return [*read, written, pairs]
