"""Comparisons from the command line: tables, reports, resuming, failed runs."""

from __future__ import annotations

import csv
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.comparison import plots
from aladdin_mpi.comparison.options import read_request
from aladdin_mpi.comparison.plan import plan
from aladdin_mpi.errors import UserError
from aladdin_mpi.hooks.recorder import rounded
from tests import warm
from tests.commands import compare, end_of, metrics, summary
from tests.launch import ROOT, Completed, environment, needs

pytestmark = pytest.mark.usefixtures("warm_python")

SMALL = ["--epochs", "2", "--eval-every", "0.5", "--checkpoint-every", "0.25epochs"]
LABELS = ["aladdin", "pi1"]
FILES = ["report.md", "table.csv", "comparison.json", "comparison.toml"]
PICTURES = [
    "accuracy-time.png", "accuracy-samples.png", plots.VARIANCE_SAMPLES, plots.THROUGHPUT,
]  # fmt: skip


def command(out: Path, *options: str, seeds: str = "0,1", run: Sequence[str] = SMALL) -> list[str]:
    """Return the options of an algorithm and a variant of it, with two workers."""
    words = ["--algorithms", "aladdin", "--variants", "pi1=aladdin --aladdin-pi 1"]
    words += ["--seeds", seeds, "--workers", "2", "--target-accuracy", "0.5"]
    return [*words, "--out", str(out), *options, "--", *run]


def start(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start the command in a child process, with its output in ``log``."""
    with log.open("wb") as file:
        return subprocess.Popen(
            [warm.python(), "-m", "aladdin_mpi.compare", *words],
            env=environment("openmpi", {}),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def run(words: Sequence[str], check: bool = True) -> Completed:
    begin = time.monotonic()
    outcome = subprocess.run(
        [warm.python(), "-m", "aladdin_mpi.compare", *words],
        env=environment("openmpi", {}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=280,
    )
    completed = Completed(
        outcome.returncode, outcome.stdout, outcome.stderr, time.monotonic() - begin
    )
    assert not check or outcome.returncode == 0, completed
    return completed


def result(out: Path) -> dict[str, Any]:
    outcome: dict[str, Any] = json.loads((out / "comparison.json").read_text())
    return outcome


def ends(out: Path) -> dict[Path, int]:
    """Return the end time of each finished run."""
    return {path: path.stat().st_mtime_ns for path in sorted(out.glob("runs/*/*/summary.json"))}


# -- complete comparison in simulation ---------------------------------------------------------
@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Completed]:
    out = tmp_path_factory.mktemp("compare") / "whole"
    return out, run(command(out, "--jobs", "2"))


def test_compare_writes_report_tables_and_plots(whole: tuple[Path, Completed]) -> None:
    out, outcome = whole
    assert not [name for name in FILES + PICTURES if not (out / name).is_file()]
    assert not list(out.glob("*tmp*"))
    for name in PICTURES:
        assert (out / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert f"]({name})" in (out / "report.md").read_text()
    assert str(out / "report.md") in outcome.stdout
    assert not re.findall(r"[^\n\x20-\x7e]", outcome.stdout + outcome.stderr)


def test_compare_figures_match_runs(whole: tuple[Path, Completed]) -> None:
    outcome = result(whole[0])
    assert sorted(row["label"] for row in outcome["rows"]) == LABELS
    for row in outcome["rows"]:
        runs = [summary(whole[0] / "runs" / row["label"] / f"seed-{seed}") for seed in (0, 1)]
        assert {each["seed"] for each in runs} == {0, 1}
        assert {each["workers"] for each in runs} == {2}
        for key in ("test_accuracy", "seconds", "samples_per_second", "wait_fraction"):
            values = [each[key] for each in runs]
            assert row["figures"][key]["mean"] == pytest.approx(statistics.fmean(values))
            assert row["figures"][key]["std"] == pytest.approx(statistics.stdev(values))
            assert row["figures"][key]["n"] == 2
        # In simulated time, one worker takes exactly 32 samples in 0.1 s.
        throughput = row["figures"]["samples_per_second"]["mean"]
        assert row["figures"]["speed_up"]["mean"] == pytest.approx(throughput / 320)
    accuracies = [row["figures"]["test_accuracy"]["mean"] for row in outcome["rows"]]
    assert accuracies == sorted(accuracies, reverse=True)


def test_compare_figures_are_rounded(whole: tuple[Path, Completed]) -> None:
    written = [result(whole[0])]
    for folder in sorted(whole[0].glob("runs/*/*")):
        written += [summary(folder), *metrics(folder)]
    assert len(written) > 4 * 5
    assert written == rounded(written)
    assert re.search(r"seconds_mean.*\n.*,\d+\.\d{1,9},", (whole[0] / "table.csv").read_text())


def test_compare_variants_have_their_options(whole: tuple[Path, Completed]) -> None:
    for label, pi in (("aladdin", "pi = 4"), ("pi1", "pi = 1")):
        assert pi in (whole[0] / "runs" / label / "seed-0" / "config.toml").read_text()
    report = (whole[0] / "report.md").read_text()
    assert "`--epochs 2 --eval-every 0.5" in report
    assert "- pi1: `--aladdin-pi 1`" in report


def test_compare_report_has_machine_command_and_baseline(whole: tuple[Path, Completed]) -> None:
    report = (whole[0] / "report.md").read_text()
    assert f"- python: {'.'.join(map(str, sys.version_info[:3]))}" in report
    assert "python -m aladdin_mpi.compare --algorithms aladdin --variants 'pi1=aladdin" in report
    assert re.search(r"\b320 samples/s \(.*\b32 samples\b.*\b0\.1 s\b", report)
    assert "n = 2" in report
    assert re.search(r"\bfirst evaluation\b", report)


def test_compare_logs_each_run_and_remaining_time(whole: tuple[Path, Completed]) -> None:
    lines = whole[1].stderr.splitlines()
    assert sum(line.endswith(": started") for line in lines) == 4
    ended = [line for line in lines if re.search(r"accuracy 0\.\d{4}, .* samples/s; took \d", line)]
    assert len(ended) == 4
    assert sum("about" in line and "left" in line for line in ended) == 3
    assert "\n100 %  " in (whole[0] / "runs" / "pi1" / "seed-1" / "output.log").read_text()


def test_compare_csv_contains_table_rows(whole: tuple[Path, Completed]) -> None:
    rows = list(csv.DictReader((whole[0] / "table.csv").read_text().splitlines()))
    expected = result(whole[0])["rows"]
    assert [row["label"] for row in rows] == [row["label"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        for part in ("mean", "std", "low", "high"):
            assert float(row[f"seconds_{part}"]) == other["figures"]["seconds"][part]


@pytest.mark.long
def test_compare_skips_finished_runs(whole: tuple[Path, Completed]) -> None:
    before, rows = ends(whole[0]), result(whole[0])["rows"]
    again = run(command(whole[0], "--jobs", "2"))
    assert re.search(r"\b4 already finished\b", again.stderr)
    assert "started" not in again.stderr
    assert ends(whole[0]) == before
    assert result(whole[0])["rows"] == rows
    assert again.stdout == whole[1].stdout


def test_compare_resumes_or_restarts_each_run(
    whole: tuple[Path, Completed], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole[0] / "runs", out / "runs")
    first, second, third, fourth = plan(read_request(command(out)), out)
    for each in (second, third):
        (each.folder / "summary.json").unlink()
    shutil.rmtree(third.folder / "checkpoint")
    shutil.rmtree(fourth.folder)
    assert [each.finished for each in (first, second, third, fourth)] == [True, *[False] * 3]
    assert second.start_words() == ["--resume", str(second.folder)]
    asked = [*SMALL, "--algorithm", "aladdin", "--seed", "1", "--workers", "2", "--run-dir"]
    assert third.start_words() == [*asked, str(third.folder), "--overwrite"]
    asked.insert(len(SMALL), "--aladdin-pi")
    asked.insert(len(SMALL) + 1, "1")
    assert fourth.start_words() == [*asked, str(fourth.folder)]


def test_compare_names_changed_options(whole: tuple[Path, Completed]) -> None:
    before = ends(whole[0])
    changed = [*SMALL, "--lr", "0.02"]
    with pytest.raises(UserError, match=r"--out: .*aladdin.seed-0\b.*\blr: 0\.01 and 0\.02"):
        compare(command(whole[0], run=changed))
    with pytest.raises(UserError, match=r"--out: .*\bworkers: 2 and 3"):
        compare(["--workers", "3", "--out", str(whole[0])])
    assert ends(whole[0]) == before


def wait_for(there: Callable[[], bool], log: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 240
    while not there():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)


def measured(out: Path, seed: int) -> list[Any]:
    """Return the figures of the runs with a seed, without their folders."""
    runs = [each for each in result(out)["runs"] if each["seed"] == seed]
    return [
        [run["label"], [[e["samples"], e["accuracy"]] for e in run["evaluations"]], run["seconds"]]
        for run in runs
    ]


@pytest.mark.long
@pytest.mark.slow
def test_compare_resumes_after_being_stopped_and_killed(
    whole: tuple[Path, Completed], tmp_path: Path
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    words = command(out, seeds="0")
    process = start(words, log)
    wait_for(lambda: "[2/2] pi1, seed 0: started" in log.read_text(), log, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in log.read_text()
    assert end_of(str(out), 0), "a stopped comparison ends its runs first"
    first = ends(out)
    assert [path.parent.parent.name for path in first] == ["aladdin"]

    process = start(words, log)
    checkpoints = out / "runs" / "pi1" / "seed-0" / "checkpoint"
    wait_for(lambda: any(checkpoints.glob("samples-*")), log, process)
    process.kill()
    process.wait()
    # Immediately: the run of the killed comparison may not have ended yet.
    outcome = run(words)
    assert end_of(str(out), 5)
    # Unless this test was held up for so long that the run could end before the kill.
    if not re.search(r"\b2 already finished\b", outcome.stderr):
        assert re.search(r"\b1 already finished\b", outcome.stderr)
        assert re.search(r"\[2/2\] pi1, seed 0: .*\bcheckpoint\b", outcome.stderr)
    assert ends(out).items() > first.items()
    # A resumed simulation is bit-identical to the uninterrupted one.
    assert measured(out, seed=0) == measured(whole[0], seed=0)


def test_compare_continues_after_failed_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    timed = ["--compute", "timed", "--model", "size:1", "--samples", "640"]
    words = ["--variants", "good=aladdin", "bad=aladdin --model size:none", "--out", str(out)]
    outcome = run([*words, "--target-accuracy", "0.9", "--", *timed], check=False)
    assert outcome.returncode == 1
    error = re.compile(r"bad, seed 0: .*\bstatus 2\b.*aladdin_mpi: error: --model size:none: ")
    for text in (outcome.stderr, (out / "report.md").read_text()):
        assert error.search(text)
        assert str(out / "runs" / "bad" / "seed-0" / "output.log") in text
    assert [row["label"] for row in result(out)["rows"]] == ["good"]
    # Timed computing measures no accuracy, so there are no such columns or plots.
    assert "accuracy" not in outcome.stdout
    assert not (out / "accuracy-time.png").exists()
    assert (out / plots.THROUGHPUT).is_file()
    # Nor does the run have an empty plot.
    assert not (out / "runs" / "good" / "seed-0" / "curves.png").exists()


# -- over MPI ---------------------------------------------------------------------------------
@pytest.mark.slow
@needs("openmpi")
def test_compare_runs_over_mpi(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--engine", "mpi", "--algorithms", "aladdin", "--workers", "2", "--out", str(out)]
    words += ["--baseline-steps", "10", "--", "--epochs", "1", "--batch-size", "16"]
    outcome = run(words)
    (row,) = result(out)["rows"]
    run_summary = summary(out / "runs" / "aladdin" / "seed-0")
    assert (run_summary["engine"], run_summary["workers"], run_summary["servers"]) == ("mpi", 2, 1)
    assert row["figures"]["samples_per_second"]["mean"] == run_summary["samples_per_second"]
    (folder,) = (out / "baseline").iterdir()
    alone = summary(folder)
    assert (alone["workers"], alone["samples"]) == (1, 160)
    assert row["figures"]["speed_up"]["mean"] == pytest.approx(
        run_summary["samples_per_second"] / alone["samples_per_second"]
    )
    assert "with 1 worker" in result(out)["baseline"]["source"]
    assert "[2/2] aladdin, seed 0" in outcome.stderr


@needs("openmpi")
def test_compare_checks_mpirun_before_running(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--engine", "mpi", "--algorithms", "aladdin", "--out", str(out)]
    outcome = run([*words, "--mpirun", "mpirun --no-such-option -np {ranks}"], check=False)
    assert outcome.returncode == 2
    assert re.search(r"--mpirun: .*\b5 ranks\b", outcome.stderr)
    assert not out.exists()
