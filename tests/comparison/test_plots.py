"""Plots: no empty panels, no hidden curves, and the ideal throughput."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from aladdin_mpi.comparison import baseline, plots
from aladdin_mpi.comparison.baseline import Baseline
from aladdin_mpi.comparison.figures import Evaluation, RunFigures, make_rows
from aladdin_mpi.comparison.plots import DASH, Part, parts
from aladdin_mpi.options.run import SimulateOptions, TrainOptions
from aladdin_mpi.run.report import draw_curves, table

ONE = Baseline(100.0, "measured")


# -- a run's curves ---------------------------------------------------------------------------
def panels(path: Path) -> int:
    """Return the number of panels in a plot of curves, each 4.3 inches wide."""
    return round(imread(path).shape[1] / (4.3 * 110))


def line(kind: str, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "epoch": 1.0, "seconds": 2.0, **values}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([line("train", loss=2.0)], 1),
        ([line("train", loss=None), line("eval", test_accuracy=0.5)], 2),
        ([line("train", loss=2.0), line("eval", test_loss=2.0, model_variance=0.0)], 3),
        ([line("train", loss=2.0), line("eval", test_accuracy=0.5, test_loss=2.0)], 3),
        ([line("train", loss=math.nan), line("eval", test_accuracy=0.5, model_variance=0.1)], 3),
        ([line("train", loss=2.0), line("eval", test_accuracy=None, model_variance=0.1)], 2),
    ],
)
def test_curves_have_no_panel_for_missing_figures(
    tmp_path: Path, lines: list[dict[str, Any]], expected: int
) -> None:
    draw_curves(lines, tmp_path / "curves.png", "title")
    assert panels(tmp_path / "curves.png") == expected


def test_curves_without_figures_are_not_drawn(tmp_path: Path) -> None:
    draw_curves([line("train", loss=None)], tmp_path / "curves.png", "title")
    assert not list(tmp_path.iterdir())


FAILURE = {
    "rank": 3,
    "host": "node07",
    "what": "died",
    "samples": 768,
    "epoch": 1.5,
    "seconds": 2.5,
    "samples_lost": 64,
}


def test_failed_ranks_are_shown_in_curves_and_table(tmp_path: Path) -> None:
    lines = [
        {**line("train", loss=2.0, samples_per_second=100.0 - n), "seconds": 2.0 + n}
        for n in range(3)
    ]
    refusal = {"rank": 2, "what": "gradient refused", "count": 1, "first": "NaN"}
    draw_curves(lines, tmp_path / "curves.png", "title", [refusal])
    assert panels(tmp_path / "curves.png") == 1
    draw_curves(lines, tmp_path / "curves.png", "title", [refusal, FAILURE])
    assert panels(tmp_path / "curves.png") == 2
    (row,) = [
        row for row in table({"failures": [refusal, FAILURE]}, {}).splitlines() if row.strip()
    ]
    name, facts = row.split("  ")[1:]
    assert name.startswith("rank 3 (host node07) ")
    assert re.search(r"\b768\b.*\b2\.5 s\b.*\b64 samples\b", facts)


# -- plots of a comparison ----------------------------------------------------------------------
def run(
    label: str, values: Sequence[tuple[float, float | None]], rate: float = 100.0
) -> RunFigures:
    """Return a run with these accuracies and variances, one second apart."""
    result = [
        Evaluation(64 * n, float(n), a, model_variance=v)
        for n, (a, v) in enumerate(values, start=1)
    ]
    summary = {"algorithm": label, "seed": 0, "samples_per_second": rate}
    return RunFigures(label, Path(label), summary, result)


def draw(runs: list[RunFigures], out: Path, **ideals: float) -> list[str]:
    return plots.draw(runs, make_rows(runs, None, None), out, "title", None, ideals)


RISING = [(1 - 0.8**n, 0.0) for n in range(12)]


def test_plot_without_figures_is_omitted(tmp_path: Path) -> None:
    accuracies = ["accuracy-time.png", "accuracy-samples.png"]
    cases: list[tuple[list[tuple[float, float | None]], list[str]]] = [
        ([(math.nan, None)], []),
        ([(0.5, 0.0), (0.6, None)], accuracies),
        ([(0.5, 0.1)], [*accuracies, plots.VARIANCE_SAMPLES]),
    ]
    for number, (values, expected) in enumerate(cases):
        out = tmp_path / str(number)
        out.mkdir()
        names = draw([run("a", values), run("b", values)], out)
        assert names == [*expected, plots.THROUGHPUT]
        assert sorted(path.name for path in out.iterdir()) == sorted(names)


def seen(path: Path, colour: str) -> int:
    """Count the pixels of a colour in the plot, without the legend."""
    picture = imread(path)[:, :, :3]
    picture = picture[:, : int(0.78 * picture.shape[1])]
    return int((np.abs(picture - to_rgb(colour)).max(axis=2) < 0.02).sum())


def test_coinciding_curves_are_all_visible(tmp_path: Path) -> None:
    draw([run(str(place), RISING) for place in range(len(plots.COLOURS))], tmp_path)
    result = [seen(tmp_path / "accuracy-samples.png", colour) for colour in plots.COLOURS]
    # A curve that another covers keeps a few pixels at its markers.
    assert min(result) > 60, result


def test_curve_parts_split_only_coinciding_sections() -> None:
    x = np.linspace(0, 400, 30)
    low, high = np.stack([x, 0.1 * x], axis=1), np.stack([x, 300 - 0.1 * x], axis=1)
    half = high + np.where(np.arange(30)[:, None] < 10, [0.0, 30.0], 0.0)
    near, gap = low + np.array([0.0, 1.0]), np.where(x[:, None] < 50, np.nan, high)
    result = parts([low, high, near, half, gap])
    assert result == [Part(0, 2), Part(0, 3), Part(1, 2), Part(1, 3), Part(2, 3)]


@pytest.mark.parametrize("count", [2, 3, 16])
def test_dashes_of_coinciding_curves_alternate(count: int) -> None:
    """At each position, exactly one of the curves has its dash."""
    way = np.arange(0.5, count * DASH)
    shown = []
    for place in range(count):
        part = Part(place, count)
        start, (on, off) = part.line("-")["ls"]
        moved = (way / part.width + start) % (on + off)
        shown.append(moved < on)
    assert (np.sum(shown, axis=0) == 1).all()
    widths = {Part(place, count).width for place in range(count)}
    assert len(widths) == 2


@pytest.mark.parametrize(("count", "points"), [(2, 7), (16, 7), (16, 40), (1, 1), (1, 1000)])
def test_markers_of_coinciding_curves_differ_in_place_or_size(count: int, points: int) -> None:
    taken = []
    for place in range(count):
        look = Part(place, count).markers(points)
        marked = range(points)[look["markevery"]]
        assert marked, "each has a marker"
        taken += [(point, look["ms"]) for point in marked]
    assert len(set(taken)) == len(taken)


def test_curve_styles_differ_without_colour() -> None:
    looks = [plots.style(place) for place in range(32)]
    assert len({(look["linestyle"], look["marker"]) for look in looks}) == 32


# -- ideal throughput -----------------------------------------------------------------------------
def test_ideal_is_sum_of_worker_speeds() -> None:
    slow = TrainOptions(slowdown={0: 10.0, 2: 2.0})
    runs = [("equal", TrainOptions(), 4), ("slow", slow, 4)]
    assert baseline.ideals(runs, ONE) == pytest.approx({"equal": 400.0, "slow": 260.0})
    assert baseline.ideals(runs, None) == {}
    # In simulations the options determine a worker's rate, unless the user sets it.
    modelled = SimulateOptions(batch_size=8, compute_time=0.1, slowdown={1: 4.0})
    assert baseline.ideals([("a", modelled, 2)], ONE) == pytest.approx({"a": 100.0})
    assert baseline.ideals([("a", modelled, 2)], Baseline(20.0, baseline.GIVEN)) == pytest.approx(
        {"a": 25.0}
    )


def test_throughput_bars_show_ideals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.update({path.name: figure}))
    runs = [run("fast", RISING, 300.0), run("slow", RISING, 40.0), run("none", RISING, 20.0)]
    draw(runs, tmp_path, fast=400.0, slow=260.0)
    (axis,) = drawn[plots.THROUGHPUT].axes
    marks = [line.get_segments()[0].tolist() for line in axis.collections]
    assert marks == [[[260.0, 0.5], [260.0, 1.5]], [[400.0, 1.5], [400.0, 2.5]]]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["none", "slow", "fast"]
    assert axis.get_xlim()[1] > 400
