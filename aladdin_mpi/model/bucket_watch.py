"""Which buckets of a gradient backward has completed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from aladdin_mpi.accelerator import is_accelerator
from aladdin_mpi.errors import UserError
from aladdin_mpi.model.bound_gradients import BoundGradients
from aladdin_mpi.model.layout import Layout

OnBucket = Callable[[int], None]
"""Called with the number of a bucket when all of its gradients are there."""

LARGE = 1 << 16
"""Values of a gradient that is copied as it comes, while the cache has it: 256 KB of float32.

Smaller ones, and all on a GPU, wait for their bucket: one call for all of them. Of a ResNet-56's
step of 97 ms on a core, a call for each of its 170 parameters took 4 ms.
"""


class BucketWatch:
    """Counts gradients as backward delivers them; tells of completed buckets in order.

    A bucket is told of only after all earlier ones, so that every rank sends in one
    order. Parameters that take no part in a step are found by :meth:`finish`.

    Args:
        layout: the buckets.
        on_bucket: is told.
        gradients: they are taken before anybody is told of them.
        parameters: in flat order.
    """

    def __init__(
        self,
        layout: Layout,
        on_bucket: OnBucket,
        gradients: BoundGradients,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self._on_bucket = on_bucket
        self._gradients = gradients
        self._waiting: list[list[int]] = [[] for _ in layout.buckets]
        self._needed = [0] * len(layout.buckets)
        self._missing: list[int] = []
        self._next = 0
        self._touched: list[list[int]] = []
        self._hooks: list[RemovableHandle] = []
        self.enabled = False
        start = 0
        for parameter in parameters:
            self._add(parameter, layout, start)
            start += parameter.numel()

    def _add(self, parameter: nn.Parameter, layout: Layout, start: int) -> None:
        """Watch the parameter that lies at ``start``."""
        number, stop = self._gradients.numbers[parameter], start + parameter.numel()
        touched = [b.index for b in layout.buckets if b.start < stop and start < b.stop]
        for index in touched:
            self._needed[index] += 1
        self._touched.append(touched)
        waits = bool(touched) and (parameter.numel() < LARGE or is_accelerator(parameter.device))
        if waits:
            self._waiting[touched[0]].append(number)

        def arrived(_: Tensor) -> None:
            if not (waits and self.enabled and self._gradients.is_missing(number)):
                self._gradients.take(number)
            if self.enabled:
                self._arrived(touched)

        self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))

    def deliver(self, parameter: nn.Parameter) -> None:
        """The gradient of ``parameter`` is there. To be called where autograd has no part in it."""
        self._gradients.deliver(parameter)
        if self.enabled:
            self._arrived(self._touched[self._gradients.numbers[parameter]])

    def begin(self) -> None:
        """Begin a step."""
        self._missing = list(self._needed)
        self._next = 0
        self.enabled = True

    def _arrived(self, touched: list[int]) -> None:
        for index in touched:
            self._missing[index] -= 1
            if self._missing[index] < 0:
                raise UserError(
                    "training loop: a second backward() before step(); for several backward "
                    "passes in a step put all but the last into `with run.accumulate():`"
                )
        self._tell()

    def _tell(self) -> None:
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._gradients.take_missing(self._waiting[self._next])
            self._next += 1
            self._on_bucket(self._next - 1)

    def end(self) -> None:
        """End a step: what has had no gradient counts as zero."""
        self.enabled = False
        self._missing = [0] * len(self._missing)
        self._tell()

    def close(self) -> None:
        """Watch no longer.

        Python's collector sees no cycle through a parameter's hook: without this all vectors of a
        run would be kept for as long as the process lives.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
