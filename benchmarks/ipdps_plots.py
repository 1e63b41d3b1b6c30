"""Plot the IPDPS 2021 study's figures 2 and 4: simulated bars, published values as marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.ipdps_paper import ALGORITHMS, NETWORKS, STAGES

Rows = Sequence[Mapping[str, Any]]
_COLOURS = dict(zip(ALGORITHMS, ("C0", "C2", "C1", "C3", "C4"), strict=True))
_SHADES = dict(zip(STAGES, ("C7", "C0", "C2", "C1"), strict=True))


def draw(rows: Rows, folder: Path) -> list[Path]:
    """Write a picture for each figure that has rows; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for figure, groups, bars, colours in (
        (2, "workers", "algorithm", _COLOURS),
        (4, "algorithm", "stage", _SHADES),
    ):
        mine = [row for row in rows if row["figure"] == figure]
        if mine:
            path = folder / f"ipdps-figure-{figure}.png"
            _figure(mine, groups, bars, colours).savefig(path, dpi=110, metadata={"Software": ""})
            written.append(path)
    return written


def _figure(rows: Rows, groups: str, bars: str, colours: Mapping[str, str]) -> Figure:
    """Draw one panel for each network and link, with a common scale."""
    panels = list(dict.fromkeys((row["network"], row["Gbit/s"]) for row in rows))
    figure = Figure(figsize=(6.2 * min(2, len(panels)), 3.6 * -(-len(panels) // 2)))
    axes = figure.subplots(-(-len(panels) // 2), min(2, len(panels)), squeeze=False).flat
    for ax, (network, gbit) in zip(axes, panels, strict=False):
        mine = [row for row in rows if (row["network"], row["Gbit/s"]) == (network, gbit)]
        _panel(ax, mine, groups, bars, colours)
        ax.set_title(f"{NETWORKS[network].name}, {gbit} Gbit/s", fontsize=10)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncol=7, fontsize=8)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    return figure


def _panel(ax: Axes, rows: Rows, groups: str, bars: str, colours: Mapping[str, str]) -> None:
    names = list(dict.fromkeys(row[groups] for row in rows))
    kinds = [kind for kind in colours if any(row[bars] == kind for row in rows)]
    width = 0.8 / len(kinds)
    for place, kind in enumerate(kinds):
        mine = [row for row in rows if row[bars] == kind]
        at = [names.index(row[groups]) + (place - (len(kinds) - 1) / 2) * width for row in mine]
        explained = [row["explained"] for row in mine]
        ax.bar(at, explained, 0.9 * width, color=colours[kind], label=kind)
        outline = [row["links"] for row in mine]
        ax.bar(at, outline, 0.9 * width, fill=False, edgecolor="0.6", linewidth=0.7, zorder=0)
        published = [row["published"] for row in mine]
        ax.plot(at, published, "k_", markersize=9, markeredgewidth=1.8, zorder=3)
    ax.plot([], [], "s", markerfacecolor="none", color="0.6", label="links alone")
    ax.plot([], [], "k_", markersize=9, markeredgewidth=1.8, label="published")
    ax.set_xticks(range(len(names)), [str(name) for name in names])
    ax.set_xlabel(groups)
    ax.set_ylabel("speed-up")
    ax.set_ylim(0, 24.5)
    ax.grid(axis="y", alpha=0.3)
