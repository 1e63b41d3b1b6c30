"""The table of knees: one row for each curve, and sentences on what moves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.scale.cases import Curve
from benchmarks.scale.prediction import KNEE, Knee, knee, predicted_knee

SATURATED = 0.9
"""Share of busy time from which a link is the bottleneck."""

Point = Mapping[str, Any]


@dataclass(frozen=True)
class Found:
    """A curve and its points, by number of workers."""

    curve: Curve
    points: Sequence[tuple[int, Point]]

    @property
    def efficiencies(self) -> list[tuple[float, float]]:
        """Return the share of the ideal speedup by number of workers."""
        return [(float(n), point["speed_up"] / n) for n, point in self.points]

    @property
    def alone(self) -> list[tuple[float, float]]:
        """Return the same for gradients that were sent individually, not added to another one.

        Only ALADDIN adds them up, when its ring of messages is full: a worker never waits, and
        the speedup alone would not show that the links are saturated.
        """
        size = self.curve.model.megabytes
        return [
            (float(n), point["speed_up"] / n * point["sent_mb"] / size) for n, point in self.points
        ]

    @property
    def judged(self) -> list[tuple[float, float]]:
        """Return the values that determine the knee."""
        return self.alone if self.curve.algorithm == "aladdin" else self.efficiencies

    @property
    def knee(self) -> Knee:
        """The knee of the speedup; for ALADDIN, of the gradients that are sent individually."""
        return knee(self.judged)

    @property
    def after(self) -> tuple[int, Point]:
        """Return the first point past the knee, or the last one."""
        edge = self.knee
        past = [each for each in self.points if edge.beyond <= 0 and each[0] >= edge.workers]
        return past[0] if past else self.points[-1]


def row(found: Found) -> dict[str, Any]:
    """Return a row of the table."""
    curve = found.curve
    workers, last = found.points[-1]
    at, point = found.after
    return {
        "model": curve.model.name,
        "algorithm": curve.algorithm,
        "link, Gbit/s": curve.gbit,
        "servers": curve.servers or None,
        "knee, workers": str(found.knee),
        "predicted, overlapped": _shown(predicted_knee(curve, overlapped=True)),
        "predicted, not overlapped": _shown(predicted_knee(curve, overlapped=False)),
        "most workers": workers,
        "their speed-up": last["speed_up"],
        "sent by a step, MB": last["sent_mb"],
        "seen at, workers": at,
        "busiest link": f"{point['busiest_link']}: {point['busy']:.0%}",
        "wait fraction": point["wait_fraction"],
        "limit": limit(found),
    }


def _shown(predicted: Knee | None) -> str | None:
    return None if predicted is None else str(predicted)


def limit(found: Found) -> str:
    """Return the bottleneck of a curve past its knee."""
    _, point = found.after
    if found.knee.beyond > 0:
        return "none up to here"
    if point["busy"] >= SATURATED:
        return "link is full"
    return "waits, links not full"


# -- what moves a knee -----------------------------------------------------------------
def servers(number: float) -> str:
    """Return a description of the number of servers."""
    return f"{number:g} server" if number == 1 else f"{number:g} servers"


def _links(gbit: float) -> str:
    return f"{gbit:g} Gbit/s"


def words(founds: Sequence[Found]) -> list[str]:
    """Return sentences on the curves that differ in one setting."""
    return [
        *_moves(founds, "servers", lambda curve: curve.servers, servers),
        *_moves(founds, "link", lambda curve: curve.gbit, _links),
        *_models(founds),
    ]


def _moves(
    founds: Sequence[Found], what: str, of: Callable[[Curve], float], show: Callable[[float], str]
) -> list[str]:
    families: dict[tuple[Any, ...], list[Found]] = {}
    for found in founds:
        curve = found.curve
        rest = curve.servers if what == "link" else curve.gbit
        families.setdefault((curve.algorithm, curve.workload, rest), []).append(found)
    lines = []
    for family in families.values():
        members = sorted(family, key=lambda found: of(found.curve))
        if len(members) > 1 and of(members[0].curve) < of(members[-1].curve):
            knees = ", ".join(f"{show(of(f.curve))}: {f.knee}" for f in members)
            first = members[0].curve
            beside = servers(first.servers) if what == "link" else _links(first.gbit)
            fixed = f", {beside}" if first.servers or what != "link" else ""
            lines.append(f"{first.algorithm}, {first.model.name}{fixed}: {knees}{_factor(members)}")
    return lines


def _factor(members: Sequence[Found]) -> str:
    """Return how far the knee moved, over the curves where it was found."""
    exact = [found.knee.workers for found in members if not found.knee.beyond]
    return f" (moved by {exact[-1] / exact[0]:.1f})" if len(exact) > 1 else ""


def _models(founds: Sequence[Found]) -> list[str]:
    pairs: dict[tuple[Any, ...], list[Found]] = {}
    for found in founds:
        curve = found.curve
        pairs.setdefault((curve.algorithm, curve.gbit, curve.servers), []).append(found)
    lines = []
    for pair in pairs.values():
        if len(pair) == 2 and any(found.knee.beyond <= 0 for found in pair):
            curve = pair[0].curve
            knees = ", ".join(f"{found.curve.model.name}: {found.knee}" for found in pair)
            served = f", {servers(curve.servers)}" if curve.servers else ""
            lines.append(f"{curve.algorithm}, {_links(curve.gbit)}{served}: {knees}")
    return lines


def between(founds: Sequence[Found]) -> str:
    """Return how many of the knees lie between their predictions."""
    judged = inside = 0
    for found in founds:
        bounds = [predicted_knee(found.curve, overlapped) for overlapped in (False, True)]
        if bounds[0] is None or bounds[1] is None or found.knee.beyond:
            continue
        judged += 1
        # Tolerance: a quarter of the distance between two numbers of workers.
        low, high = bounds[0].workers / 2**0.25, bounds[1].workers * 2**0.25
        inside += low <= found.knee.workers <= high
    return (
        f"{inside} of the {judged} knees that were found lie between the two predictions (to a "
        "quarter of an octave)"
    )


def knee_rule() -> str:
    """Return the definition for the notes."""
    return f"at least {KNEE:.0%} of the ideal speedup"
