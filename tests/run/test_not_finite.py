"""JSON cannot represent non-finite figures, so files contain null."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.advice.learning import curve, taught
from aladdin_mpi.comparison.figures import read_figures
from aladdin_mpi.errors import UserError
from aladdin_mpi.hooks.recorder import METRICS, Metrics, read_metrics
from aladdin_mpi.process import files
from aladdin_mpi.run.report import draw_curves
from tests.commands import compare, simulate
from tests.messages import naming


def strictly(text: str) -> Any:
    """Parse JSON as strictly as other programs."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_non_finite_figures_are_written_as_null_and_read_from_older_files() -> None:
    text = files.written({"a": [1.5, nan], "b": (inf, {"c": -inf}), "d": "NaN", "e": None})
    assert strictly(text) == {"a": [1.5, None], "b": [None, {"c": None}], "d": "NaN", "e": None}
    assert files.read('{"a": NaN, "b": [-Infinity, 1.0]}') == {"a": None, "b": [None, 1.0]}


def test_diverged_run_can_be_resumed_and_compared(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    common = ("--workers", 2, "--lr", 1e30, "--log-every", 64, "--checkpoint-every", 64)
    completed = simulate(run, *common, "--samples", 256, "--eval-every", 0.05)
    assert "test loss" in completed.stdout
    simulate(None, "--resume", run, "--samples", 320)
    summary = strictly((run / "summary.json").read_text())
    assert summary["test_loss"] is None
    lines = [strictly(line) for line in (run / METRICS).read_text().splitlines()]
    assert any(line["kind"] == "train" and line["loss"] is None for line in lines)
    assert compare(["--read", str(run), "--out", str(out)]) == 0
    strictly((out / "comparison.json").read_text())
    assert read_figures(run, "").value("test_loss") is None
    assert all(loss < inf for _, loss in curve(run))


def test_curve_without_finite_figures_is_not_drawn(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.open(0)
    metrics.append("train", {"samples": 1, "epoch": 1.0, "loss": nan})
    metrics.close()
    again = Metrics(tmp_path)
    again.open(1)
    again.close()
    for lines in (metrics.lines, again.lines):
        draw_curves(lines, tmp_path / "curves.png", "")
    assert not (tmp_path / "curves.png").exists()
    assert curve(tmp_path) == []
    assert taught([], [(1.0, 2.0), (2.0, 1.0)]) == 0.0


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["a folder", "no text"])
def test_unreadable_metrics_are_refused_by_name(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / METRICS
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(UserError, match=naming(str(path))):
        read_metrics(tmp_path)


def test_reading_metrics_stops_at_an_invalid_line(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"kind": "eval", "samples": 1}\n5\n{"kind": "eval"}\n')
    assert read_metrics(tmp_path) == [{"kind": "eval", "samples": 1}]
