"""What a run leaves for the eye: curves and a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aladdin_mpi import units

CURVES = "curves.png"


def draw_curves(lines: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw loss and accuracy against epochs, and accuracy against time, into a PNG.

    Where the workers' models differ, also the variance among them.
    """
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
        rows.append((WAITED, units.percent(summary["wait_fraction"])))
    shown = {key for key, _, _ in ROWS}
    rows += [(name, _shown(value)) for name, value in figures.items() if name not in shown]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"  {label:<{width}}  {value}" for label, value in rows)


def _shown(value: object) -> str:
    return units.number(value) if isinstance(value, (int, float)) else f"{value}"
