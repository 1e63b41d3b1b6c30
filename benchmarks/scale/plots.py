"""Plot the curves."""

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
    """Draw the figures for the available curves; return their files."""
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
    """Draw speedup and share of the ideal over workers: all algorithms, a column per model."""
    usual = [
        f for f in founds if f.curve.gbit == USUAL_LINK and f.curve.servers in (0, USUAL_SERVERS)
    ]
    names = [key for key in WORKLOADS if any(f.curve.workload == key for f in usual)]
    if not names:
        return None
    figure = _figure(6.4 * len(names) + 1.6, 9.2)
    axes = figure.subplots(2, len(names), squeeze=False)
    for (speed, share), key in zip(axes.T, names, strict=True):
        here = [found for found in usual if found.curve.workload == key]
        _speeds(speed, here)
        _shares(share, here)
        about = f"{USUAL_LINK:g} Gbit/s, at most {USUAL_SERVERS} servers"
        speed.set_title(f"{WORKLOADS[key].name}, {about}", fontsize=10)
    right = axes[0][-1]
    right.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, handlelength=3)
    figure.savefig(path, dpi=DPI)
    return path


def _speeds(axis: Any, founds: Sequence[Found]) -> None:
    looks = _looks()
    for found in founds:
        numbers = [n for n, _ in found.points]
        speeds = [point["speed_up"] for _, point in found.points]
        name = found.curve.algorithm
        axis.plot(numbers, speeds, label=name, lw=1.3, ms=3.5, **looks[name])
    numbers = _longest(founds)
    axis.plot(numbers, numbers, color="grey", lw=1, ls=(0, (6, 4)), label="ideal")
    axis.plot(
        numbers,
        [KNEE * n for n in numbers],
        color="grey",
        lw=0.8,
        ls=":",
        label=f"{KNEE:.0%} of it",
    )
    _over_workers(axis, numbers)
    axis.set_yscale("log", base=2)
    axis.set_yticks(numbers, [str(n) for n in numbers], fontsize=8)
    axis.set_ylabel("speedup over one worker")


def _shares(axis: Any, founds: Sequence[Found]) -> None:
    looks = _looks()
    for found in founds:
        numbers, values = zip(*found.efficiencies, strict=True)
        axis.plot(numbers, values, lw=1.3, ms=3.5, **looks[found.curve.algorithm])
        if found.curve.algorithm == "aladdin":
            look = {**looks["aladdin"], "linestyle": "none", "marker": "x"}
            numbers, values = zip(*found.alone, strict=True)
            axis.plot(numbers, values, label="aladdin, gradients sent individually", **look)
    axis.axhline(KNEE, color="grey", lw=0.8, ls=":")
    _over_workers(axis, _longest(founds))
    axis.set_ylim(0, 1.08)
    axis.set_ylabel("share of the ideal")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8, loc="lower left")


def _looks() -> dict[str, dict[str, Any]]:
    return {name: style(place) for place, name in enumerate(all_algorithms())}


def _longest(founds: Sequence[Found]) -> list[int]:
    """Return the numbers of workers of the longest curve."""
    return [n for n, _ in max(founds, key=lambda found: found.points[-1][0]).points]


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
    """Draw the share of the ideal, a panel per algorithm and model, a line per member."""
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
        f"Share of the ideal speedup {title} (aladdin: of gradients sent individually)",
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
        _over_workers(axis, _longest(family))
        axis.legend(frameon=False, fontsize=7, loc="lower left")
    else:
        axis.set_axis_off()
    axis.axhline(KNEE, color="grey", lw=0.8, ls=":")
    axis.set_ylim(0, 1.08)
