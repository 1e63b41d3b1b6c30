"""What a run leaves for the eye: curves and a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aladdin_mpi import extras
from aladdin_mpi.training.recorder import TENSORBOARD

CURVES = "curves.png"
WRITTEN_BY = {"tensorboard": f"{TENSORBOARD}/", "matplotlib": CURVES}
"""What the run folder has only where a library is installed."""


def not_written() -> str:
    """A line that says what the run folder will lack and how to get it; empty if nothing."""
    libraries = extras.missing(*WRITTEN_BY)
    if not libraries:
        return ""
    files = ", ".join(WRITTEN_BY[name] for name in libraries)
    return (
        f"not written: {files}; not installed: {', '.join(libraries)}; {extras.command(libraries)}"
    )


def draw_curves(lines: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw loss and accuracy against epochs, and accuracy against time, into a PNG.

    Where the workers' models differ, also the variance among them. Without matplotlib nothing
    is drawn.
    """
    if extras.missing("matplotlib"):
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    train = [line for line in lines if line["kind"] == "train"]
    measured = [line for line in lines if line["kind"] == "eval" and "test_accuracy" in line]
    varied = [line for line in lines if line["kind"] == "eval" and line.get("model_variance")]
    count = 4 if varied else 3
    figure, axes = pyplot.subplots(1, count, figsize=(4.3 * count, 3.6), constrained_layout=True)
    _curve(axes[0], train, "epoch", "loss", "epochs", "training loss")
    _curve(axes[1], measured, "epoch", "test_accuracy", "epochs", "test accuracy")
    _curve(axes[2], measured, "seconds", "test_accuracy", "training time, s", "test accuracy")
    if varied:
        _curve(axes[3], varied, "epoch", "model_variance", "epochs", "variance among models")
        axes[3].set_yscale("log")
    figure.suptitle(title)
    temporary = path.with_name("curves.tmp.png")
    figure.savefig(temporary, dpi=110)
    pyplot.close(figure)
    temporary.replace(path)


def _curve(
    axis: Any, lines: list[dict[str, Any]], x: str, y: str, x_label: str, y_label: str
) -> None:
    marker = "o" if len(lines) < 60 else None
    axis.plot([line[x] for line in lines], [line[y] for line in lines], marker=marker, ms=3)
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    axis.grid(alpha=0.3)


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
    ("wait_fraction", "share of their time that workers waited", ""),
    ("bytes_sent_per_step", "sent by a worker for a step", "bytes"),
)


def table(summary: Mapping[str, Any]) -> str:
    """The summary as a table of plain text."""
    rows = []
    for key, label, unit in ROWS:
        value = summary.get(key)
        if value is None:
            continue
        rows.append((label, f"{_short(value)} {unit}".rstrip()))
    rows += [(name, _short(value)) for name, value in summary.get("own", {}).items()]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"  {label:<{width}}  {value}" for label, value in rows)


def _short(value: object) -> str:
    if isinstance(value, (int, float)) and value >= 1e4:
        return f"{value:,.0f}"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value}"
