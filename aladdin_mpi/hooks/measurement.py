"""Measurements of a model, and the batch-norm statistics that they need."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_map_only

from aladdin_mpi.control.exchange import broadcast, gather
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.flat.gradients import Hooks
from aladdin_mpi.flat.replica import Replica, copy_tensors
from aladdin_mpi.process import guard
from aladdin_mpi.session.context import Context

Figures = Mapping[str, float]
"""Figures for the metrics, such as ``test_accuracy``."""
Evaluate = Callable[[nn.Module], Figures]
"""Measures a model."""
Sums = Mapping[str, float]
"""Sums over a part of the test data."""


@dataclass(frozen=True)
class Measurement:
    """An evaluation that estimates batch-norm statistics itself, and can be divided.

    Attributes:
        prepare: estimates the statistics, with the same result on every rank.
        sums: returns sums over the i-th of n equal parts; called with the module, i and n.
        figures: computes the figures from the sums over all parts.
    """

    prepare: Callable[[nn.Module], None]
    sums: Callable[[nn.Module, int, int], Sums]
    figures: Callable[[Sums], Figures]

    def __call__(self, module: nn.Module) -> Figures:
        """Measure ``module`` as a whole."""
        self.prepare(module)
        return self.figures(self.sums(module, 0, 1))


def added(parts: Iterable[Sums]) -> Sums:
    """Return the total of sums over several parts."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a module's forward pass."""


def copy_buffers(context: Context, source: nn.Module, dest: nn.Module) -> None:
    """Copy the state outside the flat vector between two modules with the model's structure."""
    replica = context.whole
    assert isinstance(replica, Replica)
    copy_tensors(replica.state_outside(source), replica.state_outside(dest))


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """Return the batch norms of ``module`` that have running statistics."""
    return [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


def reestimate_batch_norm(
    module: nn.Module, calls: Iterable[Call], trained: Sequence[bool] | None = None
) -> None:
    """Estimate the running statistics of batch norms again, from their inputs in ``calls``.

    Algorithms do not transmit these statistics, and an average of models has none that fit it. All
    other modules are in eval mode. A model without batch norm costs nothing.

    Args:
        module: the model, whose statistics change.
        calls: arguments of its calls.
        trained: for each of :func:`batch_norms`, whether training changes its statistics; one in
            eval mode keeps its own. None stands for all.
    """
    norms = batch_norms(module)
    if trained is not None:
        norms = list(compress(norms, trained))
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    # Dropout would change the inputs, and use the training's generator.
    with in_eval_mode(module), torch.no_grad():
        for norm in norms:
            norm.train()
            norm.reset_running_stats()
            norm.momentum = None  # the plain mean over all batches
        for args, kwargs in calls:
            module(*args, **kwargs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Put the module into eval mode; its parts have their own modes again afterwards."""
    modes = {each: each.training for each in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for each, mode in modes.items():
            each.training = mode


MOST_BYTES = 128 * 2**20
"""Most bytes of recorded inputs; the first call is recorded whatever its size."""
CHUNK = 2**20
HEAD = 8
"""Header of a chunk: the total number of bytes of its call."""
ARRIVAL = 60.0
"""Seconds that rank 0 waits at the end for calls in flight."""
FIRST_ARRIVAL = 5.0
"""Seconds that the first evaluation waits for the first call."""


class BatchNormRecalibrator:
    """Recalibration of batch norms at rank 0, from the first worker's first training calls.

    For a module without batch norm, nothing is recorded or sent. Batch norms in eval mode, as with
    frozen pretrained statistics, are not changed; if all are, rank 0 receives this fact instead of
    calls. If the module has parts that are stepped separately, each has calls of its own.

    If FSDP has divided the model, the first worker keeps the calls, for its island.
    """

    def __init__(self, context: Context) -> None:
        self._transport = transport = context.transport
        self._replica = context.whole
        self._source = context.servers
        self._keeper = self._source if context.is_sharded else 0
        """The rank with the recorded calls."""
        batches, module = context.options.bn_batches, context.module
        modules = {name: module.get_submodule(name) for name in context.parts or ("",)}
        self._modules = {n: each for n, each in modules.items() if batches and batch_norms(each)}
        self._missing = dict.fromkeys(self._modules, batches)
        """Number of calls of each module that are still to be recorded."""
        self._bytes = self._kept = 0
        self._calls: dict[str, list[Call]] = {name: [] for name in self._modules}
        self._trained: dict[str, tuple[bool, ...]] = {}
        """For each batch norm, whether it was in training mode in the first recorded call."""
        self._frozen: set[str] = set()
        """The modules that were called with all batch norms in eval mode."""
        self._first = Event()
        self._arriving = bytearray()
        self._hooks = Hooks()
        self._is_open = False
        if self._modules:
            transport.exclude_from_traffic(Tag.INPUTS)
            if transport.rank == self._keeper != self._source:
                transport.on_message(Tag.INPUTS, HEAD + CHUNK, self._collect)

    # -- at the first worker ---------------------------------------------------------------
    def open(self) -> None:
        """Start recording calls of the module, unless that has begun."""
        if self._transport.rank == self._source and not self._is_open:
            self._is_open = True
            for name, module in self._modules.items():
                register = module.register_forward_pre_hook
                self._hooks.add(module, register, partial(self._record, name), with_kwargs=True)

    def _record(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        is_local = isinstance(self._replica, Replica) and self._replica.is_local
        if is_local or not (self._missing[name] and torch.is_grad_enabled()):
            return
        trained = tuple(norm.training for norm in batch_norms(module))
        if not any(trained):
            if name not in self._frozen:
                self._frozen.add(name)
                self._hand_over(name, ((), {}), trained)
            return
        # A copy, because the loop may reuse the batch's memory.
        call = tree_map_only(Tensor, lambda x: x.detach().cpu().clone(), (args, kwargs))
        tensors = [each for each in tree_flatten(call)[0] if isinstance(each, Tensor)]
        size = sum(tensor.nbytes for tensor in tensors)
        if self._kept and self._bytes + size > MOST_BYTES:
            self.close()
            return
        if not all(tensor.isfinite().all() for tensor in tensors):
            return  # the gradient is refused, and the statistics would be NaN
        self._kept += 1
        self._hand_over(name, call, trained)
        self._bytes += size
        self._missing[name] -= 1
        if not any(self._missing.values()):
            self.close()

    def _hand_over(self, name: str, call: Call, trained: tuple[bool, ...]) -> None:
        if self._transport.rank == self._keeper:
            self._add(name, call, trained)
            return
        packed = io.BytesIO()
        torch.save((name, call, trained), packed)
        data = torch.frombuffer(bytearray(packed.getvalue()), dtype=torch.uint8)
        head = torch.tensor([len(data)]).view(torch.uint8)
        for start in range(0, len(data), CHUNK):
            frame = torch.cat([head, data[start : start + CHUNK]])
            self._transport.isend(frame, self._keeper, Tag.INPUTS)

    def close(self) -> None:
        """Stop recording."""
        self._hooks.remove()

    # -- at the keeper -----------------------------------------------------------------------
    def _collect(self, source: int, message: Tensor) -> None:
        whole = int(message[:HEAD].clone().view(torch.int64))
        self._arriving += message[HEAD:].numpy().tobytes()
        if len(self._arriving) == whole:
            packed, self._arriving = io.BytesIO(self._arriving), bytearray()
            self._add(*torch.load(packed, weights_only=False))

    def _add(self, name: str, call: Call, trained: tuple[bool, ...]) -> None:
        if any(trained):
            self._trained.setdefault(name, trained)
            self._calls[name].append(call)
        else:
            self._frozen.add(name)
        if all(calls or each in self._frozen for each, calls in self._calls.items()):
            self._first.set()

    def share_calls(self, group: Any) -> None:
        """Give the recorded calls to all ranks of a process group, whose first has them."""
        if self._modules:
            facts: list[Any] = [self._calls, self._trained]
            torch.distributed.broadcast_object_list(facts, group=group, group_src=0)
            self._calls, self._trained = facts
            self._first.set()

    def reestimate(self, module: nn.Module) -> None:
        """Estimate the statistics of ``module``, which may be a copy of the recorded one."""
        if self._modules and not self._first.wait(FIRST_ARRIVAL):
            self._first.set()  # wait only once
        device = next(iter(module.parameters())).device
        for name, recorded in self._calls.items():
            calls = [tree_map_only(Tensor, lambda x: x.to(device), c) for c in recorded.copy()]
            if calls:
                reestimate_batch_norm(module.get_submodule(name), calls, self._trained[name])

    def complete(self) -> None:
        """Wait, on all ranks at the end, until recorded calls have reached the keeper."""
        self.close()
        counts = broadcast(self._transport, gather(self._transport, self._kept))
        if self._transport.rank != self._keeper:
            return
        until = self._transport.now() + ARRIVAL
        kept = counts[self._source] or 0
        while sum(map(len, self._calls.values())) < kept and self._transport.now() < until:
            self._transport.sleep(1e-3)
        for name, calls in self._calls.items():
            if not (calls or name in self._frozen):
                called = f"part {name!r}" if name else "the model"
                guard.warn(
                    [
                        f"batch norm: no training call of {called} was seen, so its statistics are "
                        f"those of one worker's steps; call {called} itself, not only modules of it"
                    ]
                )
