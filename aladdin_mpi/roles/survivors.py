"""What gradients are divided by when workers have failed."""

from __future__ import annotations

from collections.abc import Callable


def unscaled(workers: int) -> float:
    """Return 1: the learning rate is the same for each number of workers."""
    return 1.0


def divisor(workers: int, survivors: int, lr_scale: Callable[[int], float]) -> float:
    """Return what the gradient of one worker is divided by.

    It weighs as much as in a run of the surviving workers alone: a gradient is divided by their
    number, and the learning rate, which remains that of all workers, is taken back to theirs. With
    the linear scaling rule, the default, that is the number of all workers.

    Args:
        workers: their number when the run, or the present group of ranks, began.
        survivors: how many of them have not failed.
        lr_scale: what the learning rate is multiplied by for a number of workers.
    """
    return survivors * lr_scale(workers) / lr_scale(survivors)
