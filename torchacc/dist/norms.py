"""Norms of gradients some of which are split over processes.

torch.distributed.tensor is imported on use: with what it needs it takes as long as half of torch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all together, a scalar; 0 without any.

    DTensors may be of several meshes, which torch's own function does not take. All processes of
    these meshes have to call it.
    """
    from torch.distributed.tensor import DTensor

    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack(whole)) if whole else torch.zeros(())


def scale_gradients_(parameters: Iterable[Parameter], max_norm: float, norm: Tensor) -> None:
    """Scales gradients whose norm is `norm` so that it is at most `max_norm`, as torch does."""
    from torch.distributed.tensor import DTensor

    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)
