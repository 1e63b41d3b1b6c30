"""The results of a run as curves and a table."""

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
"""Files of the run folder that require an optional library."""


def not_written() -> str:
    """Return a line on files that will be missing without a library; empty if none will be."""
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
    """A curve: the kind of line in the metrics, and the figures on its axes."""

    kind: str
    x: str
    y: str
    y_label: str
    is_log: bool = False

    def points(self, lines: Lines) -> list[tuple[float, float]]:
        """Return the points with a finite value; on a logarithmic axis, only positive ones."""
        values = [(line[self.x], line.get(self.y)) for line in lines if line["kind"] == self.kind]
        finite = [(x, y) for x, y in values if y is not None and isfinite(y)]
        return [(x, y) for x, y in finite if y > 0 or not self.is_log]


LOSS = Panel("train", "epoch", "loss", "training loss")
VARIANCE = Panel("eval", "epoch", "model_variance", "relative variance among models", is_log=True)
ACCURACIES = tuple(Panel("eval", x, "test_accuracy", "test accuracy") for x in ("epoch", "seconds"))
THROUGHPUT = Panel("train", "seconds", "samples_per_second", "throughput (samples/s)")
LOSSES = tuple(Panel("eval", x, "test_loss", "test loss") for x in ("epoch", "seconds"))
X_LABELS = {"epoch": "epochs", "seconds": "training time (s)"}


def draw_curves(
    lines: Lines, path: Path, title: str, failures: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Draw loss and accuracy against epochs, and accuracy against time, into a PNG file.

    The test loss replaces a missing accuracy. If the workers' models differ, a panel shows the
    variance among them. Figures that were not measured have no panel; without any, or without
    matplotlib, no file is written. If ranks have failed, by the summary's ``failures``, they are
    marked, and the throughput has a panel.
    """
    lost = ranks_lost(failures)
    measured = ACCURACIES if ACCURACIES[0].points(lines) else LOSSES
    panels = (LOSS, *measured, VARIANCE, *[THROUGHPUT] * bool(lost))
    shown = {panel: points for panel in panels if (points := panel.points(lines))}
    if not shown or extras.missing("matplotlib"):
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width = 4.3 * len(shown)
    # By hand: matplotlib draws a figure a second time to lay it out.
    margins = {"left": 0.7 / width, "right": 1 - 0.1 / width, "bottom": 0.13, "top": 0.91}
    figure, axes = pyplot.subplots(
        1,
        len(shown),
        figsize=(width, 3.6),
        squeeze=False,
        gridspec_kw={**margins, "wspace": 0.27},
    )
    for axis, (panel, points) in zip(axes[0], shown.items(), strict=True):
        _draw_panel(axis, panel, points)
        for failure in lost:
            _mark(axis, failure[panel.x], f" rank {failure['rank']}")
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
    """Return those of a summary's failures in which a rank failed or was excluded."""
    return [failure for failure in failures if "samples_lost" in failure]


ROWS = (
    ("algorithm", "algorithm", ""),
    ("engine", "engine", ""),
    ("workers", "workers", ""),
    ("servers", "servers", ""),
    ("model", "model", ""),
    ("dataset", "dataset", ""),
    ("samples", "samples", ""),
    ("seconds", "training time (without evaluation)", "s"),
    ("samples_per_second", "throughput", "samples/s"),
    ("test_accuracy", "test accuracy", ""),
    ("test_loss", "test loss", ""),
    ("gradients_computed", "gradients computed", ""),
    ("gradients_applied", "gradients applied", ""),
    ("images_skipped", "unreadable images", ""),
    ("bytes_sent_per_step", "sent per step and worker", "bytes"),
)
WAITED = "time waiting"
FATES = {"died": "failed", "left out": "excluded"}


def table(summary: Mapping[str, Any], figures: Mapping[str, float]) -> str:
    """Return the summary as a plain-text table, followed by the user's ``figures``."""
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
    fate = FATES.get(failure["what"], failure["what"])
    return (
        f"rank {failure['rank']} (host {failure['host']}) {fate}",
        f"{about}; {console.number(lost)} sample{'s' * (lost != 1)} lost",
    )


def _shown(value: object) -> str:
    return console.number(value) if isinstance(value, (int, float)) else f"{value}"
