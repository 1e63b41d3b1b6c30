"""The results of a run for people: curves and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from aladdin_mpi.hooks.recorder import TENSORBOARD
from aladdin_mpi.process import console, extras
from aladdin_mpi.process.files import written_whole

CURVES = "curves.png"
WRITTEN_BY = {"tensorboard": f"{TENSORBOARD}/", "matplotlib": CURVES}
"""What the run folder has only if a library is installed."""


def not_written() -> str:
    """A line that says what the run folder will lack and how to get it; empty if nothing."""
    libraries = extras.missing(*WRITTEN_BY)
    if not libraries:
        return ""
    files = ", ".join(WRITTEN_BY[name] for name in libraries)
    return (
        f"not written: {files}; not installed: {', '.join(libraries)}; {extras.command(libraries)}"
    )


Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Panel:
    """A curve of its own: the kind of line, and which figures of it are the axes."""

    kind: str
    x: str
    y: str
    y_label: str
    is_log: bool = False

    def points(self, lines: Lines) -> list[tuple[float, float]]:
        """The points with a finite figure; on a logarithmic axis one above 0."""
        found = [line for line in lines if line["kind"] == self.kind]
        values = [(line[self.x], line.get(self.y)) for line in found]
        finite = [(x, y) for x, y in values if y is not None and isfinite(y)]
        return [(x, y) for x, y in finite if y > 0 or not self.is_log]


LOSS = Panel("train", "epoch", "loss", "training loss")
VARIANCE = Panel("eval", "epoch", "model_variance", "relative variance among models", is_log=True)
ACCURACIES = tuple(Panel("eval", x, "test_accuracy", "test accuracy") for x in ("epoch", "seconds"))
THROUGHPUT = Panel("train", "seconds", "samples_per_second", "samples/s")
LOSSES = tuple(Panel("eval", x, "test_loss", "test loss") for x in ("epoch", "seconds"))
X_LABELS = {"epoch": "epochs", "seconds": "training time, s"}


def draw_curves(
    lines: Lines, path: Path, title: str, failures: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Draw loss and accuracy against epochs, and accuracy against time, into a PNG.

    Without accuracy it is the test loss, and if the workers' models differ also the variance
    among them. What was not measured has no panel; if nothing was, or without matplotlib, there is
    no picture. Ranks that failed, by the summary's ``failures``, are marked, and then the
    throughput has a panel.
    """
    deaths = ranks_lost(failures)
    measured = ACCURACIES if ACCURACIES[0].points(lines) else LOSSES
    panels = (LOSS, *measured, VARIANCE, *[THROUGHPUT] * bool(deaths))
    shown = {panel: points for panel in panels if (points := panel.points(lines))}
    if not shown or extras.missing("matplotlib"):
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width = 4.3 * len(shown)
    figure, axes = pyplot.subplots(
        1, len(shown), figsize=(width, 3.6), constrained_layout=True, squeeze=False
    )
    for axis, (panel, points) in zip(axes[0], shown.items(), strict=True):
        _draw_panel(axis, panel, points)
        for death in deaths:
            _mark(axis, death[panel.x], f" rank {death['rank']}")
    figure.suptitle(title, fontsize=10)
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=110)
    pyplot.close(figure)


def _draw_panel(axis: Any, panel: Panel, points: Sequence[tuple[float, float]]) -> None:
    marker = "o" if len(points) < 60 else None
    axis.plot([x for x, _ in points], [y for _, y in points], marker=marker, ms=3)
    axis.set_xlabel(X_LABELS[panel.x])
    axis.set_ylabel(panel.y_label)
    axis.xaxis.set_major_formatter("{x:,.10g}")
    if panel.is_log:
        axis.set_yscale("log")
    axis.grid(alpha=0.3)


def _mark(axis: Any, x: float, text: str) -> None:
    axis.axvline(x, color="C3", linestyle="--", linewidth=1)
    top = axis.get_xaxis_transform()
    axis.text(x, 0.98, text, transform=top, color="C3", fontsize=8, va="top")


def ranks_lost(failures: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of a summary's failures that are the end of a rank."""
    return [failure for failure in failures if "samples_lost" in failure]


ROWS = (
    ("algorithm", "algorithm", ""),
    ("engine", "engine", ""),
    ("workers", "workers", ""),
    ("servers", "servers", ""),
    ("model", "model", ""),
    ("dataset", "data set", ""),
    ("samples", "samples", ""),
    ("seconds", "training time, without evaluations and checkpoints", "s"),
    ("samples_per_second", "throughput of all workers", "samples/s"),
    ("test_accuracy", "test accuracy", ""),
    ("test_loss", "test loss", ""),
    ("gradients_computed", "gradients computed", ""),
    ("gradients_applied", "gradients applied", ""),
    ("images_skipped", "images that could not be read", ""),
    ("bytes_sent_per_step", "sent by a worker for a step", "bytes"),
)
WAITED = "share of their time that workers waited"


def table(summary: Mapping[str, Any], figures: Mapping[str, float]) -> str:
    """The summary as a table of plain text, and below it ``figures`` of the user's own."""
    rows = [
        (label, f"{_shown(summary[key])} {unit}".rstrip())
        for key, label, unit in ROWS
        if summary.get(key) is not None
    ]
    if summary.get("wait_fraction") is not None:
        rows.append((WAITED, console.percent(summary["wait_fraction"])))
    rows += [_failure_row(failure) for failure in ranks_lost(summary.get("failures", ()))]
    shown = {key for key, _, _ in ROWS}
    rows += [(name, _shown(value)) for name, value in figures.items() if name not in shown]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"  {label:<{width}}  {value}" for label, value in rows)


def _failure_row(failure: Mapping[str, Any]) -> tuple[str, str]:
    lost, at = failure["samples_lost"], console.number(failure["samples"])
    about = f"at sample {at}, after {console.number(failure['seconds'])} s"
    return (
        "rank {rank} (host {host}) {what}".format(**failure),
        f"{about}; {console.number(lost)} sample{'s' * (lost != 1)} lost",
    )


def _shown(value: object) -> str:
    return console.number(value) if isinstance(value, (int, float)) else f"{value}"
