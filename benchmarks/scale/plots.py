"""The curves for the eye."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aladdin_mpi.comparison.plots import style
from benchmarks.scale.cases import (
    OVER_LINKS,
    OVER_SERVERS,
    USUAL_LINK,
    USUAL_SERVERS,
    WORKLOADS,
    Curve,
    all_algorithms,
)
from benchmarks.scale.prediction import KNEE
from benchmarks.scale.table import Found

DPI = 110
ALGORITHMS, SERVERS, LINKS = "algorithms.png", "servers.png", "links.png"


def draw(founds: Sequence[Found], folder: Path) -> list[Path]:
    """Draw the pictures that there are curves for; returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [_algorithms(founds, folder / ALGORITHMS)]
    paths.append(
        _families(
            [f for f in founds if f.curve.gbit == USUAL_LINK],
            OVER_SERVERS,
            lambda curve: f"{curve.servers} server{'s' if curve.servers > 1 else ''}",
            lambda curve: curve.servers,
            f"by servers, links of {USUAL_LINK:g} Gbit/s",
            folder / SERVERS,
        )
    )
    paths.append(
        _families(
            [f for f in founds if f.curve.servers in (0, USUAL_SERVERS)],
            OVER_LINKS,
            lambda curve: f"{curve.gbit:g} Gbit/s",
            lambda curve: curve.gbit,
            f"by link, at most {USUAL_SERVERS} servers",
            folder / LINKS,
        )
    )
    return [path for path in paths if path is not None]


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), constrained_layout=True)
    FigureCanvasAgg(figure)
    return figure


def _algorithms(founds: Sequence[Found], path: Path) -> Path | None:
    """Speed-up over workers, all algorithms, a panel for each model."""
    usual = [
        f for f in founds if f.curve.gbit == USUAL_LINK and f.curve.servers in (0, USUAL_SERVERS)
    ]
    names = [key for key in WORKLOADS if any(f.curve.workload == key for f in usual)]
    if not names:
        return None
    figure = _figure(6.4 * len(names) + 1.6, 5.4)
    looks = {name: style(place) for place, name in enumerate(all_algorithms())}
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    for axis, key in zip(axes, names, strict=True):
        here = [found for found in usual if found.curve.workload == key]
        for found in here:
            look = looks[found.curve.algorithm]
            numbers = [n for n, _ in found.points]
            speeds = [point["speed_up"] for _, point in found.points]
            axis.plot(numbers, speeds, label=found.curve.algorithm, lw=1.4, ms=3.5, **look)
        longest = max(here, key=lambda found: found.points[-1][0])
        numbers = [n for n, _ in longest.points]
        axis.plot(numbers, numbers, color="grey", lw=1, ls=(0, (6, 4)), label="ideal")
        axis.plot(numbers, [KNEE * n for n in numbers], color="grey", lw=0.8, ls=":")
        _over_workers(axis, numbers)
        axis.set_yscale("log", base=2)
        axis.set_ylabel("speed-up over one worker")
        axis.set_title(
            f"{WORKLOADS[key].name}, {USUAL_LINK:g} Gbit/s, at most {USUAL_SERVERS} servers; "
            f"dotted: {KNEE:.0%} of ideal",
            fontsize=9,
        )
    axes[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, handlelength=3)
    figure.savefig(path, dpi=DPI)
    return path


def _over_workers(axis: Any, numbers: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(numbers, [str(n) for n in numbers], fontsize=8)
    axis.set_xlabel("workers")
    axis.grid(alpha=0.3)


def _families(
    founds: Sequence[Found],
    names: Sequence[str],
    label: Callable[[Curve], str],
    place: Callable[[Curve], float],
    title: str,
    path: Path,
) -> Path | None:
    """Share of the ideal, a panel for each algorithm and model, a line for each member."""
    families = {
        (key, name): [f for f in founds if (f.curve.workload, f.curve.algorithm) == (key, name)]
        for key in WORKLOADS
        for name in names
    }
    shown = [key for key in WORKLOADS if any(families[key, name] for name in names)]
    if all(len(family) < 2 for family in families.values()):
        return None
    figure = _figure(3.4 * len(names) + 0.6, 3.1 * len(shown) + 0.4)
    axes = figure.subplots(len(shown), len(names), squeeze=False, sharey=True)
    for line, key in zip(axes, shown, strict=True):
        for axis, name in zip(line, names, strict=True):
            _family(axis, families[key, name], label, place)
            axis.set_title(f"{name}, {WORKLOADS[key].name}", fontsize=9)
        line[0].set_ylabel("share of the ideal")
    figure.suptitle(
        f"Share of the ideal speed-up {title} (aladdin: of gradients sent by themselves)",
        fontsize=10,
    )
    figure.savefig(path, dpi=DPI)
    return path


def _family(
    axis: Any, family: Sequence[Found], label: Callable[[Curve], str], place: Callable[..., float]
) -> None:
    for turn, found in enumerate(sorted(family, key=lambda f: place(f.curve))):
        numbers, values = zip(*found.judged, strict=True)
        axis.plot(numbers, values, label=label(found.curve), lw=1.5, ms=3.5, **style(turn))
    if family:
        longest = max(family, key=lambda found: found.points[-1][0])
        _over_workers(axis, [n for n, _ in longest.points])
        axis.legend(frameon=False, fontsize=7, loc="lower left")
    axis.axhline(KNEE, color="grey", lw=0.8, ls=":")
    axis.set_ylim(0, 1.08)
