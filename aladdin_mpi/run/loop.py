"""The user's loop and the algorithm's, which take turns as greenlets; checks of the former."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from operator import is_
from typing import Any, ClassVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from aladdin_mpi.accelerator import is_accelerator
from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.data.feeds import Source
from aladdin_mpi.errors import LostError, PeerFailedError, UserError
from aladdin_mpi.flat.dtypes import VisibleWrites
from aladdin_mpi.flat.replica import Replica
from aladdin_mpi.process.guard import no_exit
from aladdin_mpi.run.batches import NO_BATCH
from aladdin_mpi.run.rank import Rank
from aladdin_mpi.run.user_optimizer import UserOptimizer
from aladdin_mpi.transport.base import surviving_ranks, wait_ended
from aladdin_mpi.worker.step import SKIPPED, Loss
from aladdin_mpi.worker.worker import Worker


def allreduce(worker: Worker, value: float | Tensor) -> tuple[Tensor, int]:
    """The sum of ``value`` over all workers that live, in fp64, and how many they are.

    Each sends its own to all others, and adds them up in the order of the workers: all have the
    same sum, to the bit. A collective of MPI would need the servers too.

    Raises:
        LostError: the group of ranks comes apart. Those who wait here cannot go on in the next one,
            whose other workers may have to make steps with them before they come here.
    """
    transport = worker.whole
    mine = torch.as_tensor(value, dtype=torch.float64).detach().cpu().reshape(-1).contiguous()
    others = [
        rank
        for rank in surviving_ranks(transport)
        if rank >= worker.servers and rank != transport.rank
    ]
    received = {rank: torch.empty_like(mine) for rank in others}
    receives = {
        rank: transport.irecv(buffer, rank, Tag.AMONG_WORKERS) for rank, buffer in received.items()
    }
    sends = [transport.isend(mine, rank, Tag.AMONG_WORKERS) for rank in others]
    values = {transport.rank: mine}
    for rank, request in receives.items():
        try:
            transport.wait(request)
        except PeerFailedError:
            continue
        values[rank] = received[rank]
    if transport.is_revoked():
        raise LostError("a rank was lost while workers waited for each other in run.reduce()")
    wait_ended(transport, sends)
    total = torch.stack([values[rank] for rank in sorted(values)]).sum(0)
    shape = value.shape if isinstance(value, Tensor) else ()
    return total.reshape(shape), len(values)


class Loop:
    """A worker's batches for the user's loop, and the gradients for the algorithm's.

    Args:
        deliver: puts a batch where the loop wants it.
    """

    def __init__(self, deliver: Callable[[Any], Any]) -> None:
        self.skipping = False
        """The loop has been left: what is granted still is not computed any more."""
        self.has_finished = False
        """Whether the algorithm has come to its end without an error."""
        self.lease: SampleLease | None = None
        self._batch_size = 0
        """Samples of a batch; a step has several batches where gradients are accumulated."""
        self._deliver = deliver
        self._rank: Rank | None = None
        self._source: Source | None = None
        self._watch: LoopWatch | None = None
        self._user_side: greenlet | None = None
        self._algorithm_side: greenlet | None = None
        self._losses: list[float | Tensor | None] = []
        self._stepped = True
        self.is_last = True
        """Whether the present batch completes its lease."""
        self._handed_over = True

    # -- the algorithm's side -------------------------------------------------------------
    def compute(self, lease: SampleLease) -> Loss:
        """Let the user's loop compute a lease's batches, to the last one's step()."""
        assert self._user_side is not None
        loss: Loss = self._user_side.switch(lease)
        return loss

    def note_empty(self, lease: SampleLease) -> None:
        """Let the user's loop end the epochs that are over by this lease, which has no samples.

        The other workers may have come to a later one, and wait at its beginning for this one.
        """
        assert self._user_side is not None
        self._user_side.switch(lease)

    # -- the user's side ------------------------------------------------------------------
    @property
    def is_over(self) -> bool:
        """Whether the algorithm has come to its end."""
        return self._algorithm_side is not None and self._algorithm_side.dead

    @property
    def is_active(self) -> bool:
        """Whether the algorithm waits for the user's loop."""
        return bool(self._algorithm_side) and self.is_in_user_code

    @property
    def is_in_user_code(self) -> bool:
        """Whether the loop has begun, and it is not the algorithm's side that asks."""
        return self._algorithm_side is not None and getcurrent() is not self._algorithm_side

    def follow(self, rank: Rank, source: Source | None) -> None:
        """Go on with this part in the run, and these data; None: there are none."""
        self._rank, self._source = rank, source
        self._batch_size = rank.context.options.batch_size
        if self._watch is not None:
            self._watch.renew()

    def batches(self, train: Callable[[], None], watch: LoopWatch | None) -> Iterator[Any]:
        """The batches, until the budget is used up; None for each where there is no data.

        `NO_BATCH` stands for a lease without samples: see :meth:`note_empty`.

        Args:
            train: the algorithm's side.
            watch: see :class:`LoopWatch`; None: nobody watches.
        """
        self._watch = watch
        self._user_side = getcurrent()

        def train_to_end() -> None:
            train()
            self.has_finished = True

        self._algorithm_side = greenlet(train_to_end)
        self.lease = self._algorithm_side.switch()
        while not self._algorithm_side.dead:
            yield from self._step_of()

    def _step_of(self) -> Iterator[Any]:
        """The batches of one lease."""
        assert self.lease is not None
        left = self.lease.size
        self._handed_over = False
        if not left:
            yield NO_BATCH
            self.note_resumed()
        while left and not self.skipping:
            size = min(left, self._batch_size)
            left -= size
            self._begin(is_last=not left)
            source = self._source
            yield None if source is None else self._deliver(_next(source, size))
            self.note_resumed()
            if not self._stepped and not self.skipping:
                self._check_skipped()
        if not self._handed_over:
            self._hand_over()
        self._stepped = True

    def note_resumed(self) -> None:
        """Check what the user's loop did after its step: it has returned, or has been left.

        Raises:
            UserError: it has changed the model, and the algorithm would lose that.
        """
        if self._watch is not None and self._stepped:
            self._watch.resume()

    def _begin(self, is_last: bool) -> None:
        assert self._rank is not None
        self._stepped, self.is_last = False, is_last
        watch = self._rank.worker.step.watch
        if watch is not None:
            watch.enabled = is_last
        if self._watch is not None:
            self._watch.begin()

    def _check_skipped(self) -> None:
        """A batch that the loop has passed over has no gradient.

        Raises:
            UserError: it has one.
        """
        assert self._rank is not None
        replica = self._rank.context.replica
        if not self._losses and isinstance(replica, Replica) and replica.gradients.has_any():
            raise UserError(
                "training loop: expected one call of step() for each batch, got none; call "
                "run.step(loss) after loss.backward()"
            )

    def step(self, loss: Tensor | float | None) -> None:
        """A batch's gradient is there; the last of a lease lets the algorithm go on."""
        if self._algorithm_side is None or self._stepped:
            raise UserError(
                "training loop: expected step() once for each batch of run.batches(); got a call "
                "without a batch"
            )
        if self._watch is not None:
            self._watch.end()
        self._stepped = True
        self._losses.append(_value(loss))
        if self.is_last:
            self._hand_over()

    def _hand_over(self) -> None:
        """Until the algorithm wants the next gradient."""
        assert self._algorithm_side is not None
        self._handed_over = True
        value: Loss = SKIPPED if not self._losses else _total(self._losses)
        self._losses = []
        self._user_side = getcurrent()
        self._algorithm_side.parent = self._user_side
        self.lease = self._algorithm_side.switch(value)

    # -- loops that do not end by themselves ------------------------------------------------
    def drain(self) -> None:
        """Let the algorithm come to its end; what it is still granted has no gradient."""
        self._leave()
        while self.is_active:
            self._hand_over()

    def abandon(self) -> None:
        """End the algorithm where it is. No other rank may wait for this one."""
        self._leave()
        if self.is_active:
            assert self._algorithm_side is not None
            self._algorithm_side.parent = getcurrent()
            with suppress(Exception):  # of an algorithm that is cut off
                self._algorithm_side.throw(GreenletExit)

    def _leave(self) -> None:
        """Nothing more is computed."""
        self.skipping = self._stepped = True
        if self._source is not None:
            self._source.close()


def _next(source: Source, size: int) -> Any:
    with no_exit():  # the user's data set, transforms and collate_fn
        return source.next_batch(size)


def _value(loss: Tensor | float | None) -> Tensor | float | None:
    """A loss that a device is still computing stays there.

    Raises:
        UserError: it is no number.
    """
    if not isinstance(loss, Tensor):
        return loss
    if loss.numel() != 1:
        raise UserError(
            "training loop: expected one number as the loss in run.step(loss), got a tensor of "
            f"shape {list(loss.shape)}; call run.step(loss.mean())"
        )
    if loss.is_cpu or not is_accelerator(loss.device):
        return loss.item()
    return loss.detach()


def _total(losses: list[float | Tensor | None]) -> float | Tensor | None:
    """Of the parts of a step's loss, as far as they were told."""
    told = [loss for loss in losses if loss is not None]
    return sum(told) if told else None


# -- what the user's loop must not do --------------------------------------------------------------
COUNTS = "counts_for_aladdin_mpi"
"""An attribute of ``GradScaler.scale`` that counts."""


class ScalerWatch:
    """Counts how often a loss is scaled by an enabled ``GradScaler``, in this process."""

    _scaled: ClassVar[int] = 0

    def __init__(self) -> None:
        if not hasattr(GradScaler.scale, COUNTS):
            GradScaler.scale = _counting(GradScaler.scale)  # type: ignore[method-assign]
        self._before = 0

    def begin(self) -> None:
        """A batch is handed out."""
        self._before = ScalerWatch._scaled

    def end(self) -> None:
        """run.step() has been called.

        Raises:
            UserError: a loss was scaled in between.
        """
        if ScalerWatch._scaled != self._before:
            raise UserError(
                "training loop: a GradScaler has scaled the loss, and so the gradients; use "
                "run.scale(loss).backward() in its place, or autocast with bfloat16, which needs "
                "no scale"
            )


def _counting(scale: Any) -> Any:
    """Return ``scale`` with a count of its calls; it stays in place when the run has ended."""

    @wraps(scale)
    def counted(scaler: GradScaler, outputs: Any) -> Any:
        ScalerWatch._scaled += scaler.is_enabled()
        return scale(scaler, outputs)

    setattr(counted, COUNTS, True)
    return counted


KEPT = (
    "the run trains the parameters that the model had when run.batches() began, where they were in "
    "memory: change or load the model before that, and later only write values into it, as "
    "load_state_dict() does without assign=True"
)


class _ModuleParts:
    """The modules and parameters that a module consists of, by the dicts that hold them."""

    def __init__(self, module: nn.Module) -> None:
        self._dicts: list[dict[str, Any]] = []
        for part in module.modules():
            self._dicts += [part._modules, part._parameters]
        self._held = [list(held.values()) for held in self._dicts]

    def are_same(self) -> bool:
        """Whether no dict holds anything new, or anything no more."""
        return all(map(_are_same, self._dicts, self._held))


def _are_same(now: dict[str, Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now.values(), before))


class LoopWatch:
    """Looks at a module's parameters when a batch is handed out, and at its step().

    Args:
        module: whose parameters the run trains; their memory is the run's already.
        own: the script's optimizer; None: the built-in one.
        loses_writes: the algorithm that would lose what the loop writes into trained parameters
            between two steps; empty if that takes part.
    """

    def __init__(
        self, module: nn.Module, own: UserOptimizer | None = None, loses_writes: str = ""
    ) -> None:
        self._loses_writes = loses_writes
        self._module = module
        self._access = None if own is None else own.access
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._trained = [p.requires_grad for p in self._names]
        self._flat = [p for p in self._names if p.requires_grad]
        self._places = [p.data_ptr() for p in self._flat]
        self._parts = _ModuleParts(module)
        self._versions = [p._version for p in self._names]
        self._writes = VisibleWrites(self._names)
        self._scaler = ScalerWatch()
        self._hook = register_optimizer_step_pre_hook(self._refuse_optimizer)

    def renew(self) -> None:
        """The run itself has given the parameters other memory."""
        self._places = [p.data_ptr() for p in self._flat]

    def resume(self) -> None:
        """The loop has done what follows a step.

        Raises:
            UserError: it has written into parameters, which the algorithm would lose.
        """
        if not self._loses_writes:
            return
        for name, parameter in self._written():
            if parameter.requires_grad:
                raise UserError(
                    f"training loop: parameter {name} was written to after run.step(). "
                    f"{self._loses_writes} would lose that: the model that it steps is kept "
                    "elsewhere. Register changes that follow each step, such as clamping "
                    "weights, with run.project(); load weights before run.batches()"
                )

    def _written(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters whose values have changed since the batch was handed out."""
        # One look at all of them first: this is done in every step.
        if [p._version for p in self._names] == self._versions:
            return []
        pairs = zip(self._names.items(), self._versions, strict=True)
        return [(name, p) for (p, name), version in pairs if p._version != version]

    def begin(self) -> None:
        """A batch is handed out."""
        self._versions = [p._version for p in self._names]
        if self._access is not None:
            self._access.begin_batch()
        self._scaler.begin()

    def end(self) -> None:
        """step() has been called.

        Raises:
            UserError: parameters were changed, replaced, frozen or unfrozen meanwhile, gradients
                scaled, or hyperparameters changed too late.
        """
        if self._access is not None:
            self._access.end_batch()
        self._scaler.end()
        for name, _ in self._written():
            raise _changed(name)
        if [p.requires_grad for p in self._names] != self._trained:
            self._refuse_frozen()
        if [p.data_ptr() for p in self._flat] != self._places:
            self._refuse_moved()
        if not self._parts.are_same():
            self._refuse_others()
            self._parts = _ModuleParts(self._module)

    def _refuse_frozen(self) -> None:
        for (parameter, name), trained in zip(self._names.items(), self._trained, strict=True):
            if parameter.requires_grad != trained:
                now = "frozen" if trained else "unfrozen"
                raise UserError(
                    f"training loop: parameter {name} was {now} during the run; set requires_grad "
                    "before DataParallel is made"
                )

    def _refuse_moved(self) -> None:
        for parameter, place in zip(self._flat, self._places, strict=True):
            if parameter.data_ptr() != place:
                raise UserError(
                    f"training loop: the memory of parameter {self._names[parameter]} was replaced "
                    f"during the run, as by .data = or by moving the model; {KEPT}"
                )

    def _refuse_others(self) -> None:
        """Refuse other trained parameters; modules and frozen parameters may be exchanged."""
        known = {p: self._names[p] for p in self._flat}
        now = {p: name for name, p in self._module.named_parameters() if p.requires_grad}
        for parameter, name in now.items():
            if parameter not in known:
                what = "replaced" if name in known.values() else "added"
                raise UserError(
                    f"training loop: parameter {name} was {what} during the run; {KEPT}"
                )
        for parameter, name in known.items():
            if parameter not in now:
                raise UserError(
                    f"training loop: parameter {name} was removed during the run; {KEPT}"
                )

    def close(self) -> None:
        """Watch no longer."""
        self._hook.remove()
        self._writes.close()

    def _refuse_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._names:
                    raise UserError(
                        f"training loop: {type(optimizer).__name__}.step() was called for "
                        f"parameter {self._names[parameter]}; the optimizer is part of the "
                        "algorithm: leave the call out, and give the optimizer to DataParallel"
                    )


def _changed(name: str) -> UserError:
    return UserError(
        f"training loop: parameter {name} was changed between its batch and step(); "
        "the optimizer is part of the algorithm: leave out optimizer.step(); register "
        "other changes that follow each step, such as clamping weights, with "
        "run.project()"
    )
