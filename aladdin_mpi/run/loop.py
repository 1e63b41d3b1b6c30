"""The user's loop and the algorithm's, which alternate as greenlets; checks of the user's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from math import inf
from operator import is_
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from aladdin_mpi.accelerator import is_accelerator
from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.data.feeds import Source
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.dtypes import VisibleWrites
from aladdin_mpi.flat.replica import Replica
from aladdin_mpi.flat.shards import reshard
from aladdin_mpi.process.guard import no_exit
from aladdin_mpi.run.rank import Rank
from aladdin_mpi.run.training_data import NO_BATCH
from aladdin_mpi.session.user_optimizer import UserOptimizer
from aladdin_mpi.worker.step import SKIPPED, Loss


class Loop:
    """Exchange between two loops: batches for the user's, gradients for the algorithm's.

    Args:
        deliver: puts a batch on the device.
        parts: names of the parts of the module that each batch steps, in this order; empty: one
            step of the whole module.

    Attributes:
        skip_to: leases before this sample of the run are not computed; inf: the loop was left.
        has_finished: the algorithm has ended without an error.
        number: of the present batch in its lease, from 0.
        is_last: the present batch completes its lease.
    """

    def __init__(self, deliver: Callable[[Any], Any], parts: Sequence[str] = ()) -> None:
        self.skip_to = 0.0
        self.has_finished = False
        self.is_last = True
        self.number = 0
        self.lease: SampleLease | None = None
        self._batch_size = 0
        """Samples of a batch; an accumulated step has several batches."""
        self._deliver = deliver
        self._parts = parts
        self._turn = 0
        """Number of the part whose gradient the algorithm waits for."""
        self._rank: Rank | None = None
        self._source: Source | None = None
        self._watch: LoopWatch | None = None
        self._user_side: greenlet | None = None
        self._algorithm_side: greenlet | None = None
        self._losses: list[float | Tensor | None] = []
        self._remaining = 0
        """Samples of the lease in batches after the present one."""
        self._size = 0
        """Samples of the present batch."""
        self._stepped = self._handed_over = True
        """Whether the batch has all its steps, and the algorithm has left its lease."""

    # -- the algorithm's side -------------------------------------------------------------
    def compute(self, lease: SampleLease) -> Loss:
        """Let the user's loop compute a lease's batches, up to the last one's step()."""
        assert self._user_side is not None
        loss: Loss = self._user_side.switch(lease)
        return loss

    def note_empty(self, lease: SampleLease) -> None:
        """Let the user's loop end the epochs before this lease, which has no samples.

        The other workers may be in a later epoch, and wait at its beginning for this one.
        """
        self.compute(lease)

    # -- the user's side ------------------------------------------------------------------
    @property
    def is_over(self) -> bool:
        """Whether the algorithm has ended."""
        return self._algorithm_side is not None and self._algorithm_side.dead

    @property
    def is_active(self) -> bool:
        """Whether the algorithm waits for the user's loop."""
        return bool(self._algorithm_side) and self.is_in_user_code

    @property
    def is_in_user_code(self) -> bool:
        """Whether the loop has begun, and the caller is not on the algorithm's side."""
        return self._algorithm_side is not None and getcurrent() is not self._algorithm_side

    def follow(self, rank: Rank, source: Source | None) -> None:
        """Continue with this part in the run and these data; ``source`` is None without data."""
        self._rank, self._source = rank, source
        self._batch_size = rank.context.options.batch_size
        if self._watch is not None:
            self._watch.renew()

    def batches(self, train: Callable[[], None], watch: LoopWatch | None) -> Iterator[Any]:
        """Yield the batches until the budget is used up; each is None if there are no data.

        `NO_BATCH` stands for a lease without samples, as in :meth:`note_empty`, and follows a lease
        that is not computed.

        Args:
            train: the algorithm's loop.
            watch: checks of the user's loop.
        """
        self._watch = watch
        self._user_side = getcurrent()

        def train_to_end() -> None:
            train()
            self.has_finished = True

        self._algorithm_side = greenlet(train_to_end)
        self.lease = self._algorithm_side.switch()
        while not self._algorithm_side.dead:
            yield from self._batches_of_lease()

    def _batches_of_lease(self) -> Iterator[Any]:
        lease = self.lease
        assert lease is not None
        self._remaining = lease.size
        self._handed_over = False
        self.number = -1
        if not lease.size:
            yield NO_BATCH
            self.note_resumed()
        while self._remaining and lease.start >= self.skip_to:
            self._size = min(self._remaining, self._batch_size)
            self._remaining -= self._size
            self._begin(is_last=not self._remaining)
            batch = None
            if self._source is not None:
                with no_exit():  # the user's dataset, transforms and collate_fn
                    batch = self._source.next_batch(self._size)
                batch = self._deliver(batch)
            yield batch
            self._end_local()
            self.note_resumed()
            if not self._stepped and self.skip_to < inf:
                self._check_skipped()
        self._leave_out(self._remaining)
        while not self._handed_over:
            self._hand_over()
        self._stepped = True
        if lease.start < self.skip_to:
            yield NO_BATCH
            self.note_resumed()

    def _leave_out(self, samples: int) -> None:
        """Note samples that this worker was granted and does not compute."""
        if samples:
            assert self._rank is not None
            self._rank.worker.left_out += samples

    def note_resumed(self) -> None:
        """Check the model when control returns from the user's loop after a step.

        Raises:
            UserError: the loop has changed the model, and the algorithm would lose the change.
        """
        if self._watch is not None and self._stepped:
            self._watch.resume()

    def _begin(self, is_last: bool) -> None:
        assert self._rank is not None
        self._stepped, self.is_last = False, is_last
        self.number += 1
        watch = self._rank.worker.step.watch
        if watch is not None:
            watch.enabled = is_last
        if self._watch is not None:
            self._watch.begin()

    def _check_skipped(self) -> None:
        """Check that a batch without a step() has no gradient."""
        replica = self._replica
        if replica is None:
            return
        if self._is_abandoned:
            replica.gradients.set_aside()
        elif not self._losses and replica.gradients.has_any():
            part = f", part={self._parts[self._turn]!r}" if self._parts else ""
            raise UserError(
                f"training loop: step() was not called for a batch. Call run.step(loss{part}) "
                "after loss.backward()."
            )

    @property
    def _replica(self) -> Replica | None:
        """The model; None without values."""
        replica = None if self._rank is None else self._rank.context.whole
        return replica if isinstance(replica, Replica) else None

    @property
    def _is_abandoned(self) -> bool:
        """Whether the algorithm has left the lease before all parts of its batch were stepped.

        A failure of another rank has ended the group, and the algorithm waits for the gradient of
        another batch. Further steps of this one have no effect.
        """
        return self._handed_over and not self._stepped

    def step(self, loss: Tensor | float | None, part: str | None = None) -> None:
        """Take the gradient of a batch, or of a part of the model.

        After the last batch of a lease, and after each part, continue the algorithm.
        """
        if self._algorithm_side is None or self._stepped:
            raise UserError(
                "training loop: step() was called without a batch. Call it once for each batch "
                "of run.batches(), or with parts= once for each part of a batch."
            )
        self._end_local()
        if self._is_abandoned:
            return
        self._check_part(part)
        if self._watch is not None:
            self._watch.end()
        is_last_part = self._turn >= len(self._parts) - 1
        self._stepped = is_last_part
        self._losses.append(_value(loss))
        if self.is_last:
            self._hand_over()
        if not is_last_part and self._watch is not None:
            self._watch.begin()

    def _check_part(self, part: str | None) -> None:
        """Check that ``part`` is the one to be stepped now.

        Raises:
            UserError: it is not, or there are no parts.
        """
        expected = self._parts[self._turn] if self._parts else None
        if part == expected:
            return
        if not self._parts:
            raise UserError(
                f"training loop: run.step(part={part!r}) requires parts. Pass parts=[...], the "
                "names of the model's submodules that are stepped separately, to DataParallel, or "
                "leave part out."
            )
        raise UserError(
            f"training loop: expected run.step(loss, part={expected!r}), got part={part!r}; "
            f"call it once for each part of a batch, in the order of parts={list(self._parts)}"
        )

    @contextmanager
    def local(self) -> Iterator[None]:
        """Keep the gradients and changes of parameters made inside from the algorithm."""
        replica = self._replica
        if replica is None:
            yield
            return
        if self._watch is not None:
            self._watch.refuse_writes()
        try:
            with replica.local():
                yield
        finally:
            if self._watch is not None:
                self._watch.note_writes()

    def _end_local(self) -> None:
        """Drop the changes of parameters made in :meth:`local`."""
        if self._replica is not None:
            self._replica.attach()

    def _hand_over(self) -> None:
        """Continue the algorithm until it needs the next gradient."""
        assert self._algorithm_side is not None
        loss: Loss = SKIPPED
        if self._losses:
            known = [each for each in self._losses if each is not None]
            loss = sum(known) if known else None
            self._losses = []
        self._user_side = getcurrent()
        self._algorithm_side.parent = self._user_side
        self.lease = self._algorithm_side.switch(loss)
        assert self._rank is not None
        self._turn = 0 if self._algorithm_side.dead else self._rank.worker.turn
        self._handed_over = not self._turn

    # -- loops that do not end by themselves ------------------------------------------------
    def drain(self) -> None:
        """Run the algorithm to its end; further leases have no gradient."""
        if self.is_active:
            self._leave_out(self._uncomputed)
        self._leave()
        while self.is_active:
            self._hand_over()
            if self.is_active and self._handed_over:
                assert self.lease is not None
                self._leave_out(self.lease.size)

    @property
    def _uncomputed(self) -> int:
        """The samples of the lease whose batches have no complete step."""
        if self._handed_over:
            return 0 if self.lease is None else self.lease.size
        return self._remaining + (0 if self._stepped else self._size)

    def abandon(self) -> None:
        """Abort the algorithm. No other rank may wait for this one."""
        self._leave()
        if self.is_active:
            assert self._algorithm_side is not None
            self._algorithm_side.parent = getcurrent()
            with suppress(Exception):  # raised by the aborted algorithm
                self._algorithm_side.throw(GreenletExit)

    def _leave(self) -> None:
        self._end_local()
        self.skip_to, self._stepped = inf, True
        if self._source is not None:
            self._source.close()


def _value(loss: Tensor | float | None) -> Tensor | float | None:
    """Return the loss as a number, or as a tensor if it is on an accelerator."""
    if not isinstance(loss, Tensor):
        return loss
    if loss.numel() != 1:
        raise UserError(
            "training loop: expected one number as the loss in run.step(loss), got a tensor of "
            f"shape {list(loss.shape)}; call run.step(loss.mean())"
        )
    is_on_host = loss.is_cpu or not is_accelerator(loss.device)
    return loss.item() if is_on_host else loss.detach()


# -- checks of the user's loop ---------------------------------------------------------------------
class _ScaledLosses:
    """Counts the losses that enabled ``GradScaler`` objects scale while loops are watched."""

    def __init__(self) -> None:
        self.count = 0
        self._watches = 0
        self._original: Any = None

    def watch(self) -> None:
        """Count from now on."""
        self._watches += 1
        if self._watches > 1:
            return
        self._original = scale = GradScaler.scale

        @wraps(scale)
        def counted(scaler: GradScaler, outputs: Any) -> Any:
            self.count += scaler.is_enabled()
            return scale(scaler, outputs)

        replacement: Any = counted
        GradScaler.scale = replacement  # type: ignore[method-assign]

    def unwatch(self) -> None:
        """Restore ``GradScaler.scale`` once no loop is watched."""
        self._watches -= 1
        if not self._watches:
            GradScaler.scale = self._original  # type: ignore[method-assign]


_scaled = _ScaledLosses()


KEPT = (
    "the run trains the parameters that the model had when run.batches() began, in their memory "
    "at that time: change or load the model before that, and afterwards only write values into "
    "it, as load_state_dict() does without assign=True (docs/troubleshooting.md)"
)


class _ModuleParts:
    """The submodules and parameters of a module, by the dicts that hold them."""

    def __init__(self, module: nn.Module) -> None:
        self._dicts: list[dict[str, Any]] = []
        for part in module.modules():
            self._dicts += [part._modules, part._parameters]
        self._held = [list(held.values()) for held in self._dicts]

    def are_same(self) -> bool:
        """Return whether each dict still holds the same objects."""
        return all(
            len(now) == len(before) and all(map(is_, now.values(), before))
            for now, before in zip(self._dicts, self._held, strict=True)
        )


def _differing(
    parameters: Iterable[nn.Parameter], before: Sequence[int], now: Sequence[int]
) -> list[nn.Parameter]:
    """Return the parameters whose entries in ``before`` and ``now`` differ; fast if none does."""
    if before == now:
        return []
    return [p for p, was, value in zip(parameters, before, now, strict=True) if was != value]


class LoopWatch:
    """Checks of a module's parameters between handing out a batch and its step().

    Args:
        module: the trained module, whose parameters are in the run's memory.
        own: the script's optimizer; None for the built-in one.
        loses_writes: name of the algorithm, if it loses writes to trained parameters between two
            steps; else empty.
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
        _scaled.watch()
        self._scaled_before = 0
        self._hook = register_optimizer_step_pre_hook(self._refuse_optimizer)

    def renew(self) -> None:
        """Accept the parameters' present memory, after the run itself has moved them."""
        self._places = [p.data_ptr() for p in self._flat]

    def resume(self) -> None:
        """Refuse writes to parameters after the step, which the algorithm would lose.

        Raises:
            UserError: names the first such parameter.
        """
        if not self._loses_writes:
            return
        for parameter in self._written():
            if parameter.requires_grad:
                raise UserError(
                    f"training loop: parameter {self._names[parameter]} was written to after "
                    f"run.step(). {self._loses_writes} would lose that, because the model that "
                    "it updates is stored elsewhere. Register changes that follow each step, "
                    "such as clamping weights, with run.project(); load weights before "
                    "run.batches() (docs/troubleshooting.md)"
                )

    def _written(self) -> list[nn.Parameter]:
        """Return the parameters whose values have changed since the batch was handed out."""
        return _differing(self._names, self._versions, [p._version for p in self._names])

    def begin(self) -> None:
        """Note the parameters as a batch is handed out."""
        self.note_writes()
        if self._access is not None:
            self._access.begin_batch()
        self._scaled_before = _scaled.count

    def note_writes(self) -> None:
        """Accept the parameters' present values."""
        self._versions = [p._version for p in self._names]

    def refuse_writes(self) -> None:
        """Refuse writes to parameters since the batch was handed out.

        Raises:
            UserError: names the first such parameter.
        """
        for parameter in self._written():
            raise UserError(
                f"training loop: parameter {self._names[parameter]} was changed between its batch "
                "and step(). Leave out optimizer.step(), because the optimizer is part of the "
                "algorithm. Register other changes that follow each step, such as clamping "
                "weights, with run.project(); put those of one batch's backward passes, such as "
                "SAM's, into `with run.local():`"
            )

    def end(self) -> None:
        """Check the parameters at step().

        Raises:
            UserError: parameters were changed, replaced, frozen or unfrozen since the batch was
                handed out, gradients scaled, or hyperparameters changed too late.
        """
        if self._access is not None:
            self._access.end_batch()
        if self._scaled_before != _scaled.count:
            raise UserError(
                "training loop: a GradScaler has scaled the loss, and so the gradients. Use "
                "run.scale(loss).backward() instead, or autocast with bfloat16, which needs no "
                "scaling."
            )
        names = self._names
        self.refuse_writes()
        for parameter in _differing(names, self._trained, [p.requires_grad for p in names]):
            raise UserError(
                f"training loop: parameter {names[parameter]} was "
                f"{'unfrozen' if parameter.requires_grad else 'frozen'} during the run. Set "
                "requires_grad before DataParallel is made."
            )
        for parameter in _differing(self._flat, self._places, [p.data_ptr() for p in self._flat]):
            raise UserError(
                f"training loop: the memory of parameter {names[parameter]} was replaced during "
                f"the run, as by .data = or by moving the model; {KEPT}"
            )
        if not self._parts.are_same():
            reshard(self._module)
            self._refuse_others()
            self._parts = _ModuleParts(self._module)

    def _refuse_others(self) -> None:
        """Refuse changes of the set of trained parameters; other parts may be replaced."""
        known = {p: self._names[p] for p in self._flat}
        now = {p: name for name, p in self._module.named_parameters() if p.requires_grad}
        changes = [
            (name, "replaced" if name in known.values() else "added")
            for parameter, name in now.items()
            if parameter not in known
        ]
        changes += [(name, "removed") for parameter, name in known.items() if parameter not in now]
        for name, what in changes:
            raise UserError(f"training loop: parameter {name} was {what} during the run; {KEPT}")

    def close(self) -> None:
        """Stop watching."""
        self._hook.remove()
        _scaled.unwatch()
        self._writes.close()

    def _refuse_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._names:
                    raise UserError(
                        f"training loop: {type(optimizer).__name__}.step() was called for "
                        f"parameter {self._names[parameter]}. Leave the call out, because the "
                        "optimizer is part of the algorithm, and pass the optimizer to "
                        "DataParallel."
                    )
