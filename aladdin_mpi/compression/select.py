"""The values of largest magnitude, without sorting all of them."""

from __future__ import annotations

from math import ceil

from torch import Tensor

from aladdin_mpi.accelerator import is_accelerator

FEWEST = 0.8
"""Of the values wanted: with fewer the threshold is lowered, by this factor."""
ADAPTATIONS = 10
"""How often the threshold is lowered at most."""


def select(values: Tensor, k: int, sample: float, start: int = 0) -> Tensor:
    """Indices (int64) of about the ``k`` largest magnitudes in ``values``, and of no more.

    The threshold comes from a strided sample, as in Lin et al. (ICLR 2018), and is
    lowered until 0.8 k values pass it; of more than k, the k largest are taken. Values
    that are not numbers pass every threshold: kept back, they would never be noticed.

    On an accelerator exactly the k largest, for which the host need not ask how many pass.

    Args:
        values: one-dimensional.
        k: at least 1.
        sample: share of the values in the sample, which expects two of the k at least.
        start: turns the sample, so that it is not the same values every time.
    """
    importance = values.abs()
    numel = importance.numel()
    wanted = max(ceil(numel * sample), ceil(2 * numel / k))
    stride = numel // wanted
    if stride < 2 or is_accelerator(values.device):
        return importance.topk(min(k, numel), sorted=False).indices
    sampled = importance[start % stride :: stride]
    threshold = sampled.topk(ceil(sampled.numel() * k / numel)).values[-1]
    for _ in range(ADAPTATIONS):
        passed = importance.lt(threshold).logical_not_()
        found = int(passed.count_nonzero())
        if found >= FEWEST * k:
            break
        threshold = threshold * FEWEST
    indices = passed.nonzero().view(-1)
    if found > k:
        indices = indices[importance[indices].topk(k, sorted=False).indices]
    return indices
