"""What a training loop of one's own must not do behind the run's back, noticed and refused."""

from __future__ import annotations

from functools import wraps
from operator import is_
from typing import Any, ClassVar

from torch import nn
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.dtypes import VisibleWrites
from aladdin_mpi.run.user_optimizer import UserOptimizer

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
