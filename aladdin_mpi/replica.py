"""A model as one flat vector of parameters and one of gradients.

The module's parameters and their ``.grad`` become views into the flat vectors, so
that autograd writes where messages are sent from, and a received model is blended
in by one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from aladdin_mpi.errors import UserError
from aladdin_mpi.layout import Layout

OnBucket = Callable[[int], None]
"""Called with the number of a bucket when all of its gradients are there."""


class Replica:
    """A module's trainable parameters as a flat vector, last layer first.

    The last layer comes first because backward completes it first: bucket 0 is
    then the first that can leave. Frozen parameters stay outside, tied ones are
    in once.

    Args:
        module: on its device already; its parameters' storage is replaced.

    Raises:
        UserError: no trainable parameter, or several dtypes or devices.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: nn.Module | None = module
        self._parameters = [p for p in module.parameters() if p.requires_grad][::-1]
        first = self._one_kind()
        self.numel = sum(p.numel() for p in self._parameters)
        self.parameters = torch.empty(self.numel, dtype=first.dtype, device=first.device)
        self._views: dict[int, list[Tensor]] = {}
        self._bound: list[Tensor] = []
        for parameter, view in zip(self._parameters, self._cut(self.parameters), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view

    def _one_kind(self) -> Tensor:
        if not self._parameters:
            raise UserError("model: expected at least one parameter that requires a gradient")
        kinds = {(p.dtype, p.device) for p in self._parameters}
        if len(kinds) > 1:
            raise UserError(
                "model: expected all trainable parameters on one device with one dtype, got "
                f"{sorted(map(str, kinds))}; use model.to(device, dtype)"
            )
        return self._parameters[0]

    def _cut(self, vector: Tensor) -> Iterator[Tensor]:
        """Views of ``vector`` shaped, and strided, as the parameters."""
        start = 0
        for parameter in self._parameters:
            size, stride = parameter.shape, parameter.stride()
            piece = vector[start : start + parameter.numel()]
            yield piece.as_strided(size, stride, piece.storage_offset())
            start += parameter.numel()

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the trainable parameters, in flat order."""
        return [tuple(p.shape) for p in self._parameters]

    def new_vector(self) -> Tensor:
        """A zeroed flat vector like the parameters."""
        return torch.zeros_like(self.parameters)

    def bind_gradients(self, vector: Tensor) -> None:
        """Let autograd add into ``vector`` from now on."""
        views = self._views.get(vector.data_ptr())
        if views is None:
            views = self._views[vector.data_ptr()] = list(self._cut(vector))
        self._bound = views
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.grad = view

    def check_bound(self) -> None:
        """Raise UserError if the training loop has unbound the gradients."""
        for parameter, view in zip(self._parameters, self._bound, strict=True):
            if parameter.grad is None or parameter.grad.data_ptr() != view.data_ptr():
                raise UserError(
                    "training loop: a parameter's .grad was replaced; do not call "
                    "optimizer.zero_grad() or model.zero_grad(): step() clears the gradients"
                )

    def watch(self, layout: Layout, on_bucket: OnBucket) -> BucketWatch:
        """Call ``on_bucket`` during backward, in order, as buckets are completed."""
        watch = BucketWatch(layout, on_bucket)
        start = 0
        for parameter in self._parameters:
            watch.add(parameter, start, start + parameter.numel())
            start += parameter.numel()
        return watch

    def buffers(self) -> list[Tensor]:
        """What the flat vector leaves out: frozen parameters and the module's buffers."""
        assert self.module is not None
        frozen = [p.detach() for p in self.module.parameters() if not p.requires_grad]
        return frozen + list(self.module.buffers())


class PhantomReplica:
    """Only the sizes of a model, for computing that is timed and not done.

    Its vectors are ``meta`` tensors, which store nothing; what the wire needs of real
    memory belongs to :class:`~aladdin_mpi.compression.dense.DenseWire`.
    """

    module = None

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.parameters = torch.zeros(numel, device="meta")

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """One flat shape."""
        return [(self.numel,)]

    def new_vector(self) -> Tensor:
        """A flat vector like the parameters."""
        return torch.zeros_like(self.parameters)

    def bind_gradients(self, vector: Tensor) -> None:
        """Nothing is calculated."""

    def buffers(self) -> list[Tensor]:
        """None."""
        return []


class BucketWatch:
    """Counts gradients as backward delivers them; tells of completed buckets in order.

    A bucket is told of only after all earlier ones, so that every rank sends in one
    order. Parameters that take no part in a step are found by :meth:`finish`.
    """

    def __init__(self, layout: Layout, on_bucket: OnBucket) -> None:
        self._layout = layout
        self._on_bucket = on_bucket
        self._needed = [0] * len(layout.buckets)
        self._missing: list[int] = []
        self._next = 0
        self.enabled = False

    def add(self, parameter: nn.Parameter, start: int, stop: int) -> None:
        """Watch the parameter that lies at ``[start, stop)``."""
        touched = [b.index for b in self._layout.buckets if b.start < stop and start < b.stop]
        for index in touched:
            self._needed[index] += 1

        def ready(_: Tensor) -> None:
            if self.enabled:
                self._arrived(touched)

        parameter.register_post_accumulate_grad_hook(ready)

    def start(self) -> None:
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
            self._next += 1
            self._on_bucket(self._next - 1)

    def finish(self) -> None:
        """End a step: what has had no gradient counts as zero."""
        self.enabled = False
        self._missing = [0] * len(self._missing)
        self._tell()
