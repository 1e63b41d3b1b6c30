"""The rules that `benchmarks.outer` compares, and how their settings are tuned.

A rule has axes: lists of choices, of which one each makes a setting. The plan below is the same for
all rules. The axes are searched one after another, again and again, until no choice on any of them
is better; in the first cell of a task from two settings, averaging and a published one, in another
cell from the result of its `parent`.
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
PEAK, ROUNDS, WIRE = "peak", "rounds", "wire"
WIRES = ("int4", "int2")
OUTER = ((1.0, 0.0), (1.0, 0.5), (0.7, 0.8), (0.7, 0.9))
"""Learning rates and momenta of outer optimizers; the first is averaging."""
STEPS = (4, 6, 8, 12, 16, 24, 32, 48, 64)
MOST_FRAGMENTS = 4
SWEEPS = 5
"""Largest number of searches of all axes."""
PUBLISHED = {
    ROUNDS: "32",
    "outer": "0.9",
    "fragments": f"{MOST_FRAGMENTS}",
}
"""The second start: rounds as long as short runs allow, and the choices of DiLoCo's authors."""
RANKS = (1, 2, 4, 8)
TARGETS = {("gpt", False): 2.5, ("gpt", True): 2.1, ("resnet20", False): 1.7}
"""Losses to which times are measured, by task and whether runs are long."""
LONG = 1000
LADDER = (0.2, 0.1, 0.05, 0.0)
"""Times are also measured to losses that are larger by this much."""
SLOWEST = 200
"""On this link, no rule whose bytes it carries reaches the target of others in 200 steps ..."""
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

    def published(self, task: str) -> Point:
        """Return the second start of the search."""
        point = self.first(task)
        for axis in self.axes:
            for index, choice in enumerate(axis.choices):
                if PUBLISHED.get(axis.name) in choice.values():
                    point[axis.name] = index
        return point

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


def _outer(prefix: str, choices: Sequence[tuple[float, float]] = OUTER) -> Axis:
    return Axis(
        "outer",
        tuple(
            {f"{prefix}-outer-lr": f"{rate:g}", f"{prefix}-outer-momentum": f"{momentum:g}"}
            for rate, momentum in choices
        ),
        ordered=False,
    )


def rules(wires: Sequence[str] = WIRES) -> dict[str, Rule]:
    """Return the rules by name; formats of messages are tuned among ``wires``.

    Servers do not send int2.
    """
    wire = _axis(WIRE, "--wire", wires, ordered=False)
    steps = _axis(ROUNDS, "--diloco-steps", STEPS)
    divisible = _axis(ROUNDS, "--diloco-steps", [n for n in STEPS if n % MOST_FRAGMENTS == 0])
    streams = _axis("fragments", "--diloco-fragments", (1, 2, MOST_FRAGMENTS))
    blends = _axis("blend", "--diloco-blend", (0.5, 0), ordered=False)
    exchanges = _axis(ROUNDS, "--async-diloco-steps", STEPS)
    of_servers = _axis(WIRE, "--wire", [w for w in wires if w != "int2"] or ["int4"], ordered=False)
    # `local-sgd` is run as `diloco`, whose runs it shares: it learns the same, bit for bit. Only
    # evaluations within a round differ, which are of the last averages, not of a worker's model.
    averaging = _outer("--diloco", OUTER[:1])
    ranks = _axis("rank", "--powersgd-rank", RANKS)
    known = (
        Rule(REFERENCE, "ar-sgd"),
        Rule("ar-sgd, int4", "ar-sgd", fixed={"--wire": "int4"}),
        Rule("ar-sgd, powersgd", "ar-sgd", (ranks,), {"--compression": "powersgd"}),
        Rule("aladdin-ahead", "aladdin-ahead"),
        Rule("local-sgd", "diloco", (steps, wire, averaging)),
        Rule("diloco", "diloco", (steps, wire, _outer("--diloco"))),
        Rule(STREAMING, "diloco", (divisible, wire, streams, blends, _outer("--diloco"))),
        Rule("async-diloco", "async-diloco", (exchanges, of_servers, _outer("--async-diloco"))),
        Rule(OURS, OURS),
    )
    return {rule.name: rule for rule in known}


def target(cell: Cell) -> float:
    """Return the lowest loss to which times are measured in a cell."""
    loss = TARGETS.get((cell.task, cell.steps >= LONG), 4.0)
    return loss + ALLOWANCE if cell.link == SLOWEST else loss


def score(aim: Aim, cell: Cell, figures: Mapping[str, Any]) -> tuple[float, ...]:
    """Return a figure of merit, the smaller the better; diverged runs come last.

    Of settings that do not reach the target, those that come closest to it are better, then the
    fastest.
    """
    loss = figures["loss"]
    loss = inf if loss is None or not isfinite(loss) else loss
    if aim == "loss":
        return max(figures["sent"] * cell.link / MARGIN, 1.0), loss
    times = [time_to(figures["curve"], target(cell) + more) for more in LADDER]
    reached = [time for time in times if time is not None]
    return len(LADDER) - len(reached), reached[-1] if reached else inf, loss


def parent(cell: Cell) -> tuple[Cell, Sequence[str]] | None:
    """Return the cell from whose setting the search begins, and the axes to search if not all.

    None: the first cell.
    """
    if cell.steps >= LONG:
        return replace(cell, steps=200), (PEAK,)
    if cell.workers != 8:
        return replace(cell, workers=8, steps=200), (ROUNDS, WIRE, PEAK)
    if cell.speeds not in ("equal", "slow 10"):
        return replace(cell, speeds="slow 10"), ()
    if cell.speeds != "equal":
        return replace(cell, speeds="equal"), ()
    return None if cell.link == 50 else (replace(cell, link=50), ())


def without_slowest(cell: Cell) -> Cell | None:
    """Return a cell with the samples of ``cell`` but without its slow worker, if it has one."""
    if not cell.speeds.startswith("slow"):
        return None
    workers = cell.workers - 1
    return replace(
        cell, workers=workers, speeds="equal", steps=-(-cell.steps * cell.workers // workers)
    )


def tune(rule: Rule, cell: Cell, aim: Aim, figures: Callable[[Run], Mapping[str, Any]]) -> Point:
    """Return a rule's setting in a cell, from runs with seed 0.

    Args:
        rule: the rule.
        cell: the cell.
        aim: the figure that is tuned.
        figures: returns the figures of a run.
    """
    axes, origin = rule.all_axes(cell.task), parent(cell)
    starts = [rule.first(cell.task), rule.published(cell.task)]
    if origin is not None:
        starts = [tune(rule, origin[0], aim, figures)]
        axes = tuple(axis for axis in axes if axis.name in origin[1] or not origin[1])

    def of(point: Point) -> tuple[float, ...]:
        return score(aim, cell, figures(rule.run(cell, point, 0)))

    return min((_search(axes, start, of) for start in starts), key=of)


def _search(axes: Sequence[Axis], point: Point, of: Callable[[Point], tuple[float, ...]]) -> Point:
    """Return a setting such that no other choice on one axis is better."""
    for _ in range(SWEEPS):
        before = point
        for axis in axes:
            point = _climb(axis, point, of) if axis.ordered else _best(axis, point, of)
        if point == before:
            break
    return point


def _best(axis: Axis, point: Point, of: Callable[[Point], tuple[float, ...]]) -> Point:
    return min(({**point, axis.name: index} for index in range(len(axis.choices))), key=of)


def _climb(axis: Axis, point: Point, of: Callable[[Point], tuple[float, ...]]) -> Point:
    """Return the best setting reached by moving along the axis as long as that is better."""
    for way in (1, -1):
        while 0 <= point[axis.name] + way < len(axis.choices):
            moved = {**point, axis.name: point[axis.name] + way}
            if of(moved) >= of(point):
                break
            point = moved
    return point
