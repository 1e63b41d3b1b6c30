"""Benchmark of convergence: evaluation of the runs' files."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.comparison import plan
from aladdin_mpi.comparison.options import read_request
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import find_algorithm
from aladdin_mpi.options.run import SimulateOptions
from benchmarks import convergence
from benchmarks.learning import bars, evaluations, stands
from benchmarks.learning import parts as convergence_parts
from benchmarks.learning.part import slug
from benchmarks.learning.race import draw_race, race_rows
from benchmarks.learning.samples import ratio
from tests.launch import ROOT


def line(samples: int, seconds: float, accuracy: float) -> dict[str, Any]:
    return {"kind": "eval", "samples": samples, "seconds": seconds, "test_accuracy": accuracy}


def test_accuracy_at_time_is_that_of_last_evaluation() -> None:
    run = [line(100, 1.0, 0.2), line(200, 2.0, 0.5), line(300, 3.0, 0.6)]
    assert evaluations.accuracy_at(run, 2.9) == 50
    assert evaluations.accuracy_at(run, 0.5) is None
    assert evaluations.half_time([run, [line(100, 2.0, 0.1), line(200, 4.0, 0.5)]]) == 2.0


def test_target_crossing_lies_between_evaluations() -> None:
    run = [line(100, 1.0, 0.2), line(200, 2.0, 0.5), line(300, 4.0, 0.6)]
    assert evaluations.crossing(run, 0.55) == pytest.approx((2.0, 3.0, 4.0))
    assert evaluations.crossing(run, 0.2) == (1.0, 1.0, 1.0)
    assert evaluations.crossing(run, 0.61) is None
    again = [line(100, 3.0, 0.5), line(200, 5.0, 0.6)]
    assert evaluations.to_target([run, again], 0.55) == pytest.approx((2.5, 3.5, 4.5))
    assert evaluations.to_target([run, again[:1]], 0.55) is None


def settled(*words: str) -> argparse.Namespace:
    """Return parsed arguments with a folder that need not exist."""
    return convergence._arguments(["--data-dir", "images", "--kept-only", *words])


@pytest.mark.long
def test_convergence_parts_place_peers_in_blocks() -> None:
    """With cyclic placement, each hop of a ring would leave its host."""
    args = settled()
    for part in convergence_parts.parts(args):
        for run in plan.plan(read_request(part.command(args, Path("out"))[3:]), Path("out")):
            served = find_algorithm(run.entry.algorithm).has_servers
            options = run.options
            assert isinstance(options, SimulateOptions)
            assert options.cluster.placement == ("cyclic" if served else "block"), run.title


def test_convergence_thresholds_are_checked() -> None:
    sync = {"part": "vgg", "algorithm": "ar-sgd", "accuracy": "80.00 ± 0.10", "faster": 1.0}
    ours = {"part": "vgg", "algorithm": "aladdin", "accuracy": "79.75", "faster": 2.6}
    assert bars.missed([sync, ours]) == []
    (text,) = bars.missed([sync, {**ours, "accuracy": "79.50"}])
    assert "0.50 points" in text
    (text,) = bars.missed([sync, {**ours, "faster": 2.4}])
    assert "2.40" in text
    (text,) = bars.missed([sync, {**ours, "faster": None}])
    assert "never" in text


def test_convergence_thresholds_of_aladdin_ahead_are_checked() -> None:
    base = {"part": "ahead, 8 workers", "algorithm": "ar-sgd, nesterov", "accuracy": "70.00 ± 0.10"}
    ours = {"part": "ahead, 8 workers", "algorithm": "aladdin-ahead", "accuracy": "69.75"}
    assert bars.missed([base, {**ours, "samples to loss": "1.05, 0.97"}]) == []
    (text,) = bars.missed([base, {**ours, "samples to loss": "1.05, never"}])
    assert "1.05 and never" in text
    below = {**ours, "accuracy": "69.60", "samples to loss": "1.00, 1.00"}
    (text,) = bars.missed([base, below])
    assert "0.40 points" in text


def test_convergence_thresholds_with_slow_worker_are_checked() -> None:
    alike = {"part": "ahead, 8 workers", "algorithm": "aladdin-ahead", "accuracy": "70.00"}
    slow = {**alike, "part": "slow 10", "accuracy": "69.60", "faster": 6.1}
    assert bars.missed([alike, slow]) == []
    (text,) = bars.missed([alike, {**slow, "faster": 5.9}])
    assert "5.90" in text
    (text,) = bars.missed([alike, {**slow, "accuracy": "69.40"}])
    assert "0.60 points" in text
    # Only the time with a worker ten times slower has a threshold.
    assert bars.missed([alike, {**slow, "part": "slow 2", "faster": 1.5}]) == []


def test_convergence_thresholds_with_vgg_timing_are_checked() -> None:
    first: dict[str, Any] = {"part": "ahead, vgg", "algorithm": "aladdin-ahead"}
    first |= {"faster": 1.25, "speed-up": 7.99, "to target, s": 400.0}
    other = {"part": "vgg", "algorithm": "osgp", "to target, s": 401.0}
    assert bars.missed([first, other]) == []
    (text,) = bars.missed([first, {**other, "to target, s": 399.0}])
    assert re.search(r"\bosgp\b.*\baladdin-ahead\b", text)
    slower, less = bars.missed([{**first, "faster": 1.1, "speed-up": 7.5}, other])
    assert "1.10" in slower and "7.50" in less


def test_race_plot_orders_algorithms_by_race_with_slow_worker(tmp_path: Path) -> None:
    times = {"a": (10.0, 200.0), "b": (20.0, 30.0), "c": (15.0, None)}
    table = [
        {"part": part, "algorithm": name, "target": 65.0, "to target, s": times[name][turn]}
        for turn, part in enumerate(("race", "race, slow 10"))
        for name in times
    ]
    assert list(race_rows(table)) == ["b", "a", "c"]
    draw_race(table, tmp_path / "race.png")
    assert (tmp_path / "race.png").stat().st_size > 5_000
    draw_race([{**row, "part": "vgg"} for row in table], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_sample_ratio_compares_loss_curves() -> None:
    """Straight lines from 4 to 0, the second with half the slope."""

    def lines(pace: float) -> list[dict[str, Any]]:
        return [{"samples": 100 * i, "loss": 4 - pace * (i - 0.5)} for i in range(1, 41)]

    base, slow = [lines(0.1), lines(0.1)], [lines(0.05), lines(0.05)]
    assert ratio(base, base, 0.5) == pytest.approx(1, abs=0.01)
    assert ratio(slow, base, 0.25) == pytest.approx(2, abs=0.01)
    assert ratio(slow, base, 0.7) is None
    # With two seeds, the mean curve is used, not the mean of two times.
    assert ratio([lines(0.05), lines(0.15)], base, 0.5) == pytest.approx(1, abs=0.01)


def test_convergence_rejects_folder_without_images(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--data-dir: .*train/CLASS"):
        convergence.main(["--data-dir", str(tmp_path)])


def test_convergence_quick_pass_keeps_options_of_command_line() -> None:
    args = convergence._arguments(["--quick", "--parts", "ablation", "--epochs", "1"])
    assert (args.parts, args.epochs, args.workers) == (["ablation"], 1.0, 4)
    assert convergence._arguments(["--quick"]).parts == ["vgg"]


def test_substitute_gradient_takes_its_share_of_a_step() -> None:
    """The share is the same for the small network and the original, at 10 Gbit/s."""
    for stand in stands.STANDS.values():
        words = stand.options()
        gbit = float(words[words.index("--bandwidth-gbit") + 1])
        assert stand.megabytes / gbit == pytest.approx(stand.original_mb / 10)


def test_convergence_parts_are_valid_comparisons() -> None:
    """`aladdin_mpi.compare` accepts each part's command and names its runs as the table does."""
    args = settled("--lr", "0.01")
    outcome = convergence_parts.parts(args)
    names = [part.name for part in outcome]
    assert len(set(names)) == len(names)
    ahead = [name for name in names if name.startswith("ahead, ")]
    assert ahead == [*(f"ahead, {n} workers" for n in (8, 16, 24, 64)), "ahead, vgg"]
    alone = {part.name for part in outcome if part.seeds == 1}
    assert alone.isdisjoint(ahead) and "race, slow 10" in alone
    for part in outcome:
        words = part.command(args, Path("out"))
        runs = plan.plan(read_request(words[3:]), Path("out"))
        labels = [slug(label) for label in part.labels]
        assert [run.entry.label for run in runs] == part.seeds * labels
        assert {run.seed for run in runs} == set(range(part.seeds))


def test_seeds_option_sets_least_seeds_of_parts() -> None:
    parts = {part.name: part for part in convergence_parts.parts(settled("--seeds", "2"))}
    assert (parts["spread"].seeds, parts["resnet"].seeds) == (3, 2)
    parts = {part.name: part for part in convergence_parts.parts(settled("--seeds", "5"))}
    assert (parts["spread"].seeds, parts["resnet"].seeds) == (5, 5)


@pytest.mark.long
def test_convergence_quick_pass_runs_and_is_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.convergence", "--quick", "--save", str(tmp_path)]
    command += ["--out", str(tmp_path / "runs")]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    result = json.loads((tmp_path / "convergence.json").read_text())
    rows = {row["algorithm"]: row for row in result["rows"]}
    assert set(rows) == set(convergence_parts.VGG_RUNS)
    assert rows["ar-sgd"]["accuracy"] == rows[convergence_parts.AT_THE_END]["accuracy"]
    assert rows["ar-sgd"]["faster"] == 1
    assert all(float(row["accuracy"]) > 50 for row in rows.values())
    assert all(row["epochs"] == 1 for row in rows.values())
    assert (tmp_path / "convergence.png").stat().st_size > 10_000
    shutil.rmtree(tmp_path / "runs" / "vgg" / "runs" / "sgp")
    again = [*command, "--kept-only"]
    completed = subprocess.run(again, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert completed.returncode == 0 and "started" not in completed.stderr, (
        completed.stdout + completed.stderr
    )
    kept = json.loads((tmp_path / "convergence.json").read_text())["rows"]
    assert kept == [row for row in result["rows"] if row["algorithm"] != "sgp"]
