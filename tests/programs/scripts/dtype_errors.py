"""Wrong dtypes are refused where they are used, with PyTorch's own words."""

import torch


def run(device):
    """Returns what is compared between devices."""
    texts = []
    a = torch.ones(2, 2, device=device)
    for call in (
        lambda: a @ a.long(),
        lambda: a.bitwise_and(1),
        lambda: torch.nn.functional.embedding(a, a),
        lambda: a.long().mean(),
    ):
        try:
            call().cpu()
            texts.append("no error")
        except (RuntimeError, TypeError) as error:
            texts.append(type(error).__name__)
    return [*texts, a + 1]
