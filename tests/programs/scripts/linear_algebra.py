"""Products, decompositions and solves."""

import torch


def run(device):
    """Returns what is compared between devices."""
    torch.manual_seed(0)
    a = torch.randn(4, 4).to(device)
    s = a @ a.T + 4 * torch.eye(4, device=device)
    values, vectors = torch.linalg.eigh(s)
    u, sv, vh = torch.linalg.svd(a)
    r = [
        torch.linalg.inv(s),
        torch.linalg.cholesky(s),
        torch.linalg.solve(s, a),
        torch.linalg.det(s),
    ]
    r += [
        values,
        vectors.abs(),
        sv,
        torch.einsum("ij,kj->ik", a, s),
        torch.baddbmm(a[None], s[None], s[None]),
    ]
    return [
        *r,
        torch.linalg.norm(a, ord=2),
        torch.linalg.matrix_power(s, 3),
        a.trace(),
        torch.outer(a[0], a[1]),
    ]
