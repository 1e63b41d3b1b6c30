"""Any torch optimizer on parts of a flat vector, with its groups, kernels and scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from aladdin_mpi.accelerator import is_accelerator
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.lanes import Lane
from aladdin_mpi.flat.replica import places
from aladdin_mpi.flat.unused import Unused
from aladdin_mpi.optimizers.base import Inherited, Optimizer, without_parts
from aladdin_mpi.optimizers.part import (
    OptimizerPart,
    PartPiece,
    Place,
    same_kind,
    states_of_parameters,
    states_of_rows,
)
from aladdin_mpi.optimizers.script_access import (
    ScriptAccess,
    Segment,
    States,
    alike,
    hyperparameters,
    initial_state,
    numbers,
    numeric_names,
    plain,
    portable,
    write_numbers,
)

STEPS = 3
LARGEST = 5
"""Largest dimension of test tensors."""
RATE = 0.01
TOLERANCE = 1e-4
"""Relative tolerance of a step: kernels for other shapes may round differently."""
ROW = 1 << 18
"""Largest number of values of a row on a CPU.

The optimizer makes about ten passes over a row, its gradient, state and temporary tensors, which
then stay in the cache: AdamW's step of 4.3 million values takes 8.6 ms in such rows, and 10.1 ms
with the tensors of a layer of 1,024 x 1,024."""


def treats_values_alike(given: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer steps each value separately, wherever a tensor is cut.

    Tested with the settings and dimensions of its groups.

    Raises:
        UserError: its step() fails, for example because it requires a closure.
    """
    # A few small shapes, one for each group and number of dimensions of the parameters.
    shapes = sorted(
        {
            (number, tuple(min(size, LARGEST) for size in parameter.shape))
            for number, group in enumerate(given.param_groups)
            for parameter in group["params"]
            if parameter.numel()
        }
    )
    if not shapes:
        return True
    starts = [
        torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for seed, (_, shape) in enumerate(shapes)
    ]
    try:
        together = _steps(given, shapes, starts)
    except Exception as error:
        raise UserError(
            "optimizer: expected one whose step() needs only gradients, got "
            f"{type(given).__name__}, which failed: {type(error).__name__}: {error}; use another "
            "optimizer"
        ) from error
    try:
        cut = [_steps_in_pieces(given, shape, x) for shape, x in zip(shapes, starts, strict=True)]
    except Exception:  # for example, an optimizer that accepts only matrices
        return False
    return all(
        bool((a - b).abs().max() <= TOLERANCE * (a - start).abs().max() + 1e-12)
        for a, b, start in zip(together, cut, starts, strict=True)
    )


def _steps(
    given: torch.optim.Optimizer,
    shapes: list[tuple[int, tuple[int, ...]]],
    starts: list[Tensor],
) -> list[Tensor]:
    """Return the result of some steps with all tensors in one optimizer."""
    leaves = [torch.nn.Parameter(start.clone()) for start in starts]
    groups: dict[int, dict[str, Any]] = {}
    for leaf, (number, _) in zip(leaves, shapes, strict=True):
        fresh = {**portable(given.param_groups[number]), "lr": RATE, "params": []}
        groups.setdefault(number, fresh)["params"].append(leaf)
    optimizer = same_kind(given, list(groups.values()))
    for step in range(STEPS):
        for leaf in leaves:
            # A different gradient for every step, whatever the other tensors.
            leaf.grad = torch.sin(leaf.detach() * (step + 2)) + 0.1
        optimizer.step()
    return [leaf.detach() for leaf in leaves]


def _steps_in_pieces(
    given: torch.optim.Optimizer, shape: tuple[int, tuple[int, ...]], start: Tensor
) -> Tensor:
    """Return the result of the same steps for one tensor, cut into two rows of values."""
    flat = start.flatten()
    pieces = [piece for piece in flat.tensor_split([max(1, len(flat) // 3)]) if piece.numel()]
    ends = [_steps(given, [(shape[0], (len(piece),))], [piece])[0] for piece in pieces]
    return torch.cat(ends).view(start.shape)


class TorchOptimizer(Optimizer):
    """Steps of an optimizer that a user has made for a module's parameters.

    An optimizer that treats every value alike, which is tested, gets a part as one row of values
    for each of its groups, regardless of the parameters' boundaries; any other gets the whole
    vector, as parameters in their shapes. ``given`` itself makes no steps: its groups'
    hyperparameters are read at every step. The direction is ``x - x'``, where x' is the result of
    the step, and includes the groups' learning rates.

    Args:
        given: optimizer for parameters of ``module``.
        module: module whose trainable parameters form the flat vector.
        like: the flat vector.
        scheduler: scheduler of ``given``; it advances with every step of any worker.
        access: the script's access to ``given``.
        lane: the part of the module's parameters that forms the flat vector; None: all.
    """

    def __init__(
        self,
        given: torch.optim.Optimizer,
        module: nn.Module,
        like: Tensor,
        scheduler: LRScheduler | None = None,
        access: ScriptAccess | None = None,
        lane: Lane | None = None,
    ) -> None:
        self.given = given
        self.name = type(given).__name__
        self.scheduler = scheduler
        self.takes_parts = treats_values_alike(given)
        self._like = like
        self._lane = lane
        self._places = places(module)
        self._owned = _owned(given, self._places, lane)
        self._numeric = numeric_names(given)
        self._parts: dict[tuple[int, int], OptimizerPart] = {}
        self._inherited = Inherited()
        self._scratch = like.new_empty(0)
        self._steps = 0
        self._scheduled = scheduler.last_epoch if scheduler is not None else 0
        self._access = access or ScriptAccess()
        self._access.follow(self._parameter_states, like.dtype)

    @property
    def momentum(self) -> float:  # type: ignore[override]
        """Momentum of the first group."""
        group = hyperparameters(self.given.param_groups[0])
        return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))

    @property
    def lookahead(self) -> float:  # type: ignore[override]
        """Rounds to look ahead: more if the momentum is an average of gradients, not a sum."""
        return 3.0 if "betas" in self.given.param_groups[0] else 1.0

    @property
    def rate(self) -> float:
        """Learning rate of the first group."""
        return float(self.given.param_groups[0]["lr"])

    # -- steps ----------------------------------------------------------------------------
    def correct(
        self,
        part: slice,
        gradient: Tensor,
        x: Tensor,
        unused: Unused = (),
        workers: float = 1.0,
    ) -> None:
        """Compute the direction from a step of a copy."""
        if gradient.is_meta:
            return
        moved = self._copy(x)
        self._part(part).step(moved, gradient, unused)
        torch.sub(x, moved, out=gradient)
        if workers > 1:
            self._part(part).normalise_by_mean(gradient, x, workers)
            for each in unused:
                gradient[each].zero_()

    def descend(
        self,
        part: slice,
        gradient: Tensor,
        x: Tensor,
        lr: float,
        factor: float = 1.0,
        unused: Unused = (),
    ) -> None:
        """Step ``x`` with the user's optimizer."""
        if gradient.is_meta:
            return
        if factor != 1.0:
            gradient.mul_(factor)
        before = x if lr == 1.0 else self._copy(x)
        self._part(part).step(x, gradient, unused)
        if lr != 1.0:
            torch.lerp(before, x, lr, out=x)

    def correct_and_descend(
        self, part: slice, gradient: Tensor, x: Tensor, lr: float, unused: Unused = ()
    ) -> None:
        """Step ``x``, and compute the direction from its change."""
        if gradient.is_meta:
            return
        before = self._copy(x)
        self._part(part).step(x, gradient, unused)
        torch.sub(before, x, out=gradient)
        if lr != 1.0:
            torch.lerp(before, x, lr, out=x)

    def step(self, x: Tensor, gradient: Tensor, lr: float, unused: Unused = ()) -> None:
        """Step the whole vector."""
        self.descend(slice(0, x.numel()), gradient, x, lr, unused=unused)

    def mix(self, part: slice, movement: Tensor, x: Tensor, lr: float, weight: float) -> None:
        """Mix into the first moments of the part that contains ``part``."""
        for (start, stop), each in self._parts.items():
            if start <= part.start and part.stop <= stop and not movement.is_meta:
                each.mix(slice(part.start - start, part.stop - start), movement, x, lr, weight)

    def _copy(self, x: Tensor) -> Tensor:
        """Return a copy of ``x``, valid until the next call."""
        if self._scratch.numel() < x.numel():
            self._scratch = torch.empty_like(x)
        return self._scratch[: x.numel()].copy_(x)

    def _part(self, part: slice) -> OptimizerPart:
        self._access.note_use()
        key = part.start, part.stop
        if key not in self._parts:
            new = self._new_part(part)
            new.inherit(self._inherited, part.start)
            self._parts[key] = self._with_short_rows(new)
        return self._parts[key]

    def _new_part(self, part: slice) -> OptimizerPart:
        return self._rows(part) if self.takes_parts else self._shaped(part)

    def _with_short_rows(self, part: OptimizerPart) -> OptimizerPart:
        """Return the part; on a CPU, its rows are cut."""
        if self.takes_parts and not is_accelerator(self._like.device):
            part.split(range(ROW, part.pieces[-1].stop if part.pieces else 0, ROW))
        return part

    def _rows(self, part: slice) -> OptimizerPart:
        """Return a part with one piece for each run of values in one group."""
        pieces: list[PartPiece] = []
        segments: list[list[Segment]] = []
        for where, group, parameter in self._owned:
            start, stop = max(where.start, part.start), min(where.stop, part.stop)
            if start >= stop:
                continue
            held = self._segments(parameter, slice(start, stop))
            begins, last = start - part.start, pieces[-1] if pieces else None
            follows = last is not None and (last.group, last.stop) == (group, begins)
            if follows and alike(self.given, segments[-1][0].parameter, parameter):
                pieces[-1] = replace(pieces[-1], numel=stop - part.start - pieces[-1].start)
                segments[-1] += held
            else:
                pieces.append(PartPiece(group, begins, stop - start))
                segments.append(held)
        states = [initial_state(self.given, each) for each in segments]
        return OptimizerPart(self.given, pieces, self._like, states)

    def _segments(self, parameter: nn.Parameter, part: slice) -> list[Segment]:
        """Return the values of a parameter that form a part of the vector."""
        origin = self._places[parameter].start
        held = [part] if self._lane is None else self._lane.widen(part)
        return [Segment(parameter, each.start - origin, each.stop - origin) for each in held]

    def _shaped(self, part: slice) -> OptimizerPart:
        """Return a part with one piece for each parameter; ``part`` is the whole vector."""
        if (part.start, part.stop) != (0, self._like.numel()):
            raise AssertionError(f"{self.name} takes the whole vector, got {part}")
        pieces, states = [], []
        for where, group, parameter in self._owned:
            shape, stride = tuple(parameter.shape), parameter.stride()
            pieces.append(PartPiece(group, where.start, parameter.numel(), shape, stride))
            states.append(deepcopy(self.given.state.get(parameter, {})))
        return OptimizerPart(self.given, pieces, self._like, states)

    # -- hyperparameters ------------------------------------------------------------------
    def settings(self) -> tuple[float, ...]:
        """Return the numeric hyperparameters of all groups."""
        self._access.note_use()
        return numbers(self.given, self._numeric)

    def adopt(self, settings: tuple[float, ...]) -> None:
        """Write another rank's hyperparameters into the groups."""
        if settings:
            write_numbers(self.given, settings, self._numeric)

    def advance(self, steps: int) -> None:
        """Step the scheduler up to ``steps`` times in total.

        Raises:
            UserError: the training loop has stepped it too.
        """
        if self.scheduler is None:
            return
        if self.scheduler.last_epoch != self._scheduled:
            raise UserError(
                "training loop: scheduler.step() was called. Leave the call out, because "
                "run.step() advances the scheduler that was passed to the run."
            )
        # Otherwise the scheduler warns that the optimizer has not made a step.
        self.given._opt_called = True  # type: ignore[attr-defined]
        for _ in range(self._steps, steps):
            self.scheduler.step()
        self._steps = max(self._steps, steps)
        self._scheduled = self.scheduler.last_epoch

    # -- checkpoints ----------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the states of all parts, the groups' hyperparameters, and the scheduler's."""
        return {
            "parts": [
                {"start": start, "stop": stop, "state": part.state_dict()}
                for (start, stop), part in self._parts.items()
            ],
            "groups": [hyperparameters(group) for group in self.given.param_groups],
            "steps": self._steps,
            "scheduler": None if self.scheduler is None else plain(self.scheduler.state_dict()),
            "inherited": self._inherited.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        self._load_common(state)
        self._access.note_use()
        for saved in state["parts"]:
            new = self._new_part(slice(saved["start"], saved["stop"]))
            new.load_state_dict(saved["state"])
            self._parts[saved["start"], saved["stop"]] = self._with_short_rows(new)
        self._inherited.load_state_dict(state.get("inherited", []))

    def inherit(self, state: dict[str, Any], parts: Sequence[slice] = ()) -> None:
        """Restore a state that was cut differently; parts get theirs at their first use."""
        if not self.takes_parts:
            self.load_state_dict(state)
            return
        self._load_common(state)
        state = {**state, "parts": [self._numbered(part) for part in state["parts"]]}
        for saved in without_parts(state)["inherited"]:
            self._inherited.add(saved["start"], saved["stop"], saved["state"])
        if parts:
            self._inherited.keep(parts)

    def _numbered(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a part's state with the numbers of its pieces, absent in earlier versions."""
        if "numbers" in saved["state"]:
            return saved
        part = self._rows(slice(saved["start"], saved["stop"]))
        part.load_state_dict(saved["state"])
        return {**saved, "state": part.state_dict()}

    def joined(
        self, states: Sequence[dict[str, Any] | None], parts: Sequence[Sequence[slice]]
    ) -> dict[str, Any] | None:
        """Return the concatenated parts, with the first server's hyperparameters."""
        known = [state for state in states if state is not None]
        if not known:
            return None
        names = ("parts", "inherited")
        return {**known[0], **{n: [each for s in known for each in s.get(n, ())] for n in names}}

    def state_of(self, part: slice) -> dict[str, Any]:
        """Return the state with one part only."""
        state, place = self.state_dict(), (part.start, part.stop)
        parts = [each for each in state["parts"] if (each["start"], each["stop"]) == place]
        return {**state, "parts": parts, "inherited": []}

    def put_part(
        self, whole: dict[str, Any] | None, state: dict[str, Any], part: slice, like: Tensor
    ) -> dict[str, Any] | None:
        """Append the part's state to the parts of ``whole``."""
        parts = [] if whole is None else whole["parts"]
        return {**(whole or state), "parts": [*parts, *state["parts"]]}

    def _parameter_states(self) -> States | None:
        """Return copies of the parameters' states; None if other ranks have some of them."""
        if self._lane is not None:
            return None
        if self.takes_parts:
            parts = [(start, part) for (start, _), part in self._parts.items()]
            return states_of_rows(self._owned, parts, self._inherited.state_dict())
        return next((states_of_parameters(self._owned, p) for p in self._parts.values()), None)

    def close(self) -> None:
        """Close the script's access to the optimizer."""
        self._access.close()

    def _load_common(self, state: dict[str, Any]) -> None:
        """Restore everything except the states of the parts."""
        for group, saved in zip(self.given.param_groups, state["groups"], strict=True):
            group.update(saved)
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
            self._scheduled = self.scheduler.last_epoch
            self._steps = state["steps"]


def _owned(
    given: torch.optim.Optimizer, whole: dict[nn.Parameter, slice], lane: Lane | None
) -> list[Place]:
    """Return the places of the optimizer's parameters in the flat vector, in flat order."""
    group_of = {
        parameter: number
        for number, group in enumerate(given.param_groups)
        for parameter in group["params"]
    }
    return [
        (where if lane is None else lane.narrow(where), group_of[parameter], parameter)
        for parameter, where in whole.items()
        if parameter in group_of
    ]
