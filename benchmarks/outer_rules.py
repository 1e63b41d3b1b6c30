"""The rules that `benchmarks.outer` compares, and how their settings are tuned.

A rule has axes: lists of choices, of which one each makes a setting. The plan below is the same for
all rules. In the first cell of a task, every axis is searched once, in the order of the rule, by
itself. In other cells only the axes in `RETUNED` are, from the setting of the cell named there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Any, Literal

from benchmarks.outer_cells import Cell, Run, time_to

OURS = "aladdin-local"
STREAMING = "streaming diloco"
AVERAGING = ("diloco", "local-sgd")
DILOCO = ("diloco", STREAMING, "async-diloco")
"""The rules with which the first bar compares `OURS`."""
REFERENCE = "ar-sgd"
"""Sends whole gradients; it shows what a sample can teach."""
RATES = {
    "gpt": (1e-3, 1.5e-3, 2e-3, 3e-3, 4e-3, 6e-3, 8e-3, 1.2e-2, 1.6e-2, 2.4e-2),
    "resnet20": (0.0125, 0.0175, 0.025, 0.035, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28),
}
FIRST_RATE = 4
"""Index of the rate with which the search begins; it ends where both neighbours are worse."""
PEAK, ROUNDS = "peak", "rounds"
WIRES = ("int4", "int2", "fp32")
OUTER = ((1.0, 0.0), (1.0, 0.5), (0.7, 0.8), (0.7, 0.9))
"""Learning rates and momenta of outer optimizers; the first is averaging."""
STEPS = (4, 8, 16, 32, 64)
RANKS = (1, 2, 4, 8)
TARGETS = {("gpt", 200): 2.5, ("gpt", 1000): 2.1, ("resnet20", 200): 1.7, ("resnet20", 1000): 1.0}
"""Losses to which times are measured, by task and steps."""
SLOWEST = 200
"""On this link, no rule whose bytes it carries reaches the loss of others in 200 steps ..."""
ALLOWANCE = 0.1
"""... so that times are measured to a loss that is larger by this much."""
MARGIN = 1.1
"""Bytes of a setting relative to the link's up to which it counts as one that the link carries."""

Aim = Literal["time", "loss"]
"""The figure that is tuned: the time to the target, or the loss at equal samples.

For the loss, only settings whose bytes the link carries are compared, since the loss alone would
always be best with most bytes."""
Choice = Mapping[str, str]
Point = Mapping[str, int]
"""The index of the chosen value on every axis."""


@dataclass(frozen=True)
class Axis:
    """Choices of options; if they are ``ordered``, the search stops at the first worse one."""

    name: str
    choices: tuple[Choice, ...]
    ordered: bool = True
    first: int = 0


@dataclass(frozen=True)
class Rule:
    """An algorithm with fixed options and axes, in the order in which they are tuned."""

    name: str
    algorithm: str
    axes: tuple[Axis, ...] = ()
    fixed: Choice = field(default_factory=dict)

    def all_axes(self, task: str) -> tuple[Axis, ...]:
        """Return the axes and, last, that of the peak rate."""
        rates = tuple({PEAK: f"{rate:g}"} for rate in RATES[task])
        return (*self.axes, Axis(PEAK, rates, first=FIRST_RATE))

    def first(self, task: str) -> dict[str, int]:
        """Return the setting with which the search begins."""
        return {axis.name: axis.first for axis in self.all_axes(task)}

    def run(self, cell: Cell, point: Point, seed: int) -> Run:
        """Return a run with a setting."""
        options = dict(self.fixed)
        for axis in self.all_axes(cell.task):
            options |= axis.choices[point[axis.name]]
        peak = float(options.pop(PEAK))
        if "--diloco-fragments" in options:
            options["--diloco-overlap"] = _overlap(options)
        return Run(cell, self.algorithm, tuple(options.items()), peak, seed)


def _overlap(options: Choice) -> str:
    """Return the largest possible overlap: all steps between two fragments.

    With one fragment and blend 0, a step has to follow before the next fragment is sent.
    """
    steps, number = int(options["--diloco-steps"]), int(options["--diloco-fragments"])
    return str(steps // number - (number == 1 and float(options["--diloco-blend"]) == 0))


def _axis(name: str, option: str, values: Sequence[object], ordered: bool = True) -> Axis:
    return Axis(name, tuple({option: str(value)} for value in values), ordered)


def _outer(prefix: str) -> Axis:
    return Axis(
        "outer",
        tuple(
            {f"{prefix}-outer-lr": f"{rate:g}", f"{prefix}-outer-momentum": f"{momentum:g}"}
            for rate, momentum in OUTER
        ),
        ordered=False,
    )


def rules(wires: Sequence[str] = WIRES) -> dict[str, Rule]:
    """Return the rules by name; formats of messages are tuned among ``wires``.

    Servers do not send int2.
    """
    wire = _axis("wire", "--wire", wires, ordered=False)
    steps = _axis(ROUNDS, "--diloco-steps", STEPS)
    streams = _axis("fragments", "--diloco-fragments", (1, 2, 4))
    blends = _axis("blend", "--diloco-blend", (0.5, 0), ordered=False)
    exchanges = _axis(ROUNDS, "--async-diloco-steps", STEPS)
    of_servers = _axis(
        "wire", "--wire", [w for w in wires if w != "int2"] or ["int4"], ordered=False
    )
    ranks = _axis(ROUNDS, "--powersgd-rank", RANKS)
    known = (
        Rule(REFERENCE, "ar-sgd"),
        Rule("ar-sgd, int4", "ar-sgd", fixed={"--wire": "int4"}),
        Rule("ar-sgd, powersgd", "ar-sgd", (ranks,), {"--compression": "powersgd"}),
        Rule("aladdin-ahead", "aladdin-ahead"),
        Rule("local-sgd", "local-sgd", (_axis(ROUNDS, "--local-sgd-steps", STEPS), wire)),
        Rule("diloco", "diloco", (steps, wire, _outer("--diloco"))),
        Rule(STREAMING, "diloco", (steps, wire, streams, blends, _outer("--diloco"))),
        Rule("async-diloco", "async-diloco", (exchanges, of_servers, _outer("--async-diloco"))),
        Rule(OURS, OURS),
    )
    return {rule.name: rule for rule in known}


def target(cell: Cell) -> float:
    """Return the loss to which times are measured in a cell."""
    loss = TARGETS.get((cell.task, cell.steps), 4.0)
    return loss + ALLOWANCE if cell.link == SLOWEST else loss


def score(aim: Aim, cell: Cell, figures: Mapping[str, Any]) -> tuple[float, float]:
    """Return a figure of merit, the smaller the better; diverged runs come last."""
    loss = figures["loss"]
    loss = inf if loss is None or not isfinite(loss) else loss
    if aim == "loss":
        return max(figures["sent"] * cell.link / MARGIN, 1.0), loss
    reached = time_to(figures["curve"], target(cell))
    return inf if reached is None else reached, loss


def parent(cell: Cell) -> tuple[Cell, tuple[str, ...]] | None:
    """Return the cell whose setting is used, and the axes that are tuned again; None: the first.

    Tuning with other numbers of workers, and for each pattern of speeds, is out of reach.
    """
    if cell.workers != 8:
        return replace(cell, workers=8), ()
    if cell.speeds not in ("equal", "slow 10"):
        return replace(cell, speeds="slow 10"), ()
    if cell.speeds != "equal":
        return replace(cell, speeds="equal"), (ROUNDS, PEAK)
    if cell.link != 50:
        return replace(cell, link=50), (ROUNDS, PEAK)
    return None if cell.steps == 200 else (replace(cell, steps=200), (PEAK,))


def tune(rule: Rule, cell: Cell, aim: Aim, figures: Callable[[Run], Mapping[str, Any]]) -> Point:
    """Return a rule's setting in a cell, from runs with seed 0.

    Args:
        rule: the rule.
        cell: the cell.
        aim: the figure that is tuned.
        figures: returns the figures of a run.
    """
    axes, origin = rule.all_axes(cell.task), parent(cell)
    point: Point = rule.first(cell.task)
    if origin is not None:
        point = tune(rule, origin[0], aim, figures)
        axes = tuple(axis for axis in axes if axis.name in origin[1])

    def of(point: Point) -> tuple[float, float]:
        return score(aim, cell, figures(rule.run(cell, point, 0)))

    for axis in axes:
        point = _climb(axis, point, of) if axis.ordered else _best(axis, point, of)
    return point


def _best(axis: Axis, point: Point, of: Callable[[Point], tuple[float, float]]) -> Point:
    return min(({**point, axis.name: index} for index in range(len(axis.choices))), key=of)


def _climb(axis: Axis, point: Point, of: Callable[[Point], tuple[float, float]]) -> Point:
    """Return the best setting reached by moving along the axis as long as that is better."""
    for way in (1, -1):
        while 0 <= point[axis.name] + way < len(axis.choices):
            moved = {**point, axis.name: point[axis.name] + way}
            if of(moved) >= of(point):
                break
            point = moved
    return point
