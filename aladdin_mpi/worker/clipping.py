"""A bound on gradients' norms, and whether buckets may be sent before it is known to hold."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

from torch import Tensor

from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.vectors import clip_norm
from aladdin_mpi.options.algorithms import Clips


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


class Clipping:
    """What gradients are clipped to.

    Args:
        norm: largest L2 norm of a gradient; None: any.
        kind: what it is the norm of: a worker's ``own`` gradient, which is known when backward
            is over; its ``parts``, each bucket's being held to its share, so that they can be
            told of at once; or the ``mean`` of all workers', by the algorithm.
        per_step: whether a step may ask for it while it is computed (:meth:`clip_step`): nothing
            is told early in the first one, nor in later ones if that one is clipped.
        wait_free: nothing else stands against telling of buckets early.
    """

    def __init__(
        self,
        norm: float | None = None,
        kind: Clips = "own",
        per_step: bool = False,
        wait_free: bool = True,
    ) -> None:
        self.norm = norm
        self.kind = kind
        self.is_wait_free = wait_free and not (kind == "own" and norm is not None)
        self._always = norm
        self._awaits_first = per_step and kind == "own"

    @property
    def tells_at_once(self) -> bool:
        """Whether a bucket may be told of as soon as it is complete."""
        return self.is_wait_free and not self._awaits_first

    def begin(self) -> None:
        """A step begins."""
        self.norm = self._always

    def clip_step(self, norm: float) -> None:
        """Clip the gradient of the step that is being computed.

        Raises:
            UserError: parts of it have been sent already.
        """
        if self.kind == "parts" and self.is_wait_free:
            raise UserError(
                "training loop: run.clip_grad_norm_() comes too late for this algorithm, which "
                "sends parts of the gradient during backward(); give clip= to DataParallel instead"
            )
        if self.kind == "own" and self.tells_at_once:
            raise UserError(
                "training loop: expected run.clip_grad_norm_() in the first step too, or not at "
                "all: parts of this gradient may have been sent already; give wait_free=False"
            )
        self.norm = norm

    def clip_part(self, part: Tensor, share: float) -> None:
        """Hold a bucket, which is ``share`` of the gradient, to its share of the norm."""
        if self.norm is not None and self.kind == "parts":
            clip_norm(part, self.norm * sqrt(share))

    def end(self, vector: Tensor, is_computed: bool) -> None:
        """The step's gradient is there; ``is_computed`` unless there were no samples for it."""
        if self.norm is not None and self.kind == "own":
            clip_norm(vector, self.norm)
        if self._awaits_first and is_computed:
            self.is_wait_free = self.is_wait_free and self.norm is None
            self._awaits_first = False
