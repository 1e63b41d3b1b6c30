"""Parts of the comparison: reading runs, calculations, plots and rejected arguments."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.comparison import baseline
from aladdin_mpi.comparison.baseline import Baseline
from aladdin_mpi.comparison.figures import make_rows, read_figures, spread
from aladdin_mpi.comparison.options import read_request
from aladdin_mpi.comparison.plan import plan
from aladdin_mpi.comparison.runner import last_error
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.options.run import SimulateOptions, TrainOptions
from aladdin_mpi.options.toml_file import to_toml
from tests.commands import compare


def result(out: Path) -> dict[str, Any]:
    outcome: dict[str, Any] = json.loads((out / "comparison.json").read_text())
    return outcome


def test_compare_adds_servers_to_equal_numbers_of_workers(tmp_path: Path) -> None:
    words = ["--engine", "mpi", "--algorithms", "all", "--workers", "3", "--", "--servers", "2"]
    runs = plan(read_request(words), tmp_path)
    assert [run.entry.algorithm for run in runs] == list(ALGORITHMS)
    for run in runs:
        algorithm = ALGORITHMS[run.entry.algorithm]
        assert run.ranks == (5 if algorithm.has_servers else 3)


def test_baseline_algorithm_runs_on_one_worker() -> None:
    name = baseline._algorithm(TrainOptions())
    without = [each for each in ALGORITHMS.values() if not each.has_servers]
    assert (not ALGORITHMS[name].has_servers) == bool(without)


def test_baseline_of_other_options_is_measured_again(tmp_path: Path) -> None:
    words = ["--engine", "mpi", "--algorithms", "ar-sgd", "--workers", "2", "--"]
    runs = []
    for size in ("8", "256", "8"):
        run = baseline.measuring_run(read_request([*words, "--batch-size", size]), tmp_path)
        run.write_options(only_set=True)
        runs.append(run.folder)
    assert runs[0] == runs[2] != runs[1]
    assert runs[1].name == f"{runs[0].name}-2"


# -- existing runs ------------------------------------------------------------------------------
def make_run(folder: Path, accuracy: float | None, seconds: float, **options: Any) -> Path:
    """Write a run folder whose accuracy rises by 0.1 each second."""
    folder.mkdir(parents=True)
    settings = SimulateOptions(**{"algorithm": "aladdin", "workers": 2, "epochs": 4.0, **options})
    (folder / "config.toml").write_text(to_toml(settings))
    outcome = {
        "algorithm": settings.algorithm,
        "engine": "virtual",
        "workers": settings.workers,
        "model": "digits",
        "dataset": "digits",
        "seed": settings.seed,
        "samples": 1000,
        "seconds": seconds,
        "samples_per_second": 1000 / seconds,
        "test_accuracy": accuracy,
        "wait_fraction": 0.25,
        "bytes_sent_per_step": 5000.0,
    }
    (folder / "summary.json").write_text(json.dumps(outcome))
    lines = []
    for second in range(1, round(seconds) + 1):
        measured = min(0.1 * second, accuracy or 0.0)
        line = {"kind": "eval", "samples": 100 * second, "seconds": float(second)}
        lines.append(line | {"test_accuracy": round(measured, 3)})
    if accuracy is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_compare_computes_means_and_spreads_of_read_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        make_run(tmp_path / "a0", 0.9, 10, seed=0),
        make_run(tmp_path / "a1", 0.6, 8, seed=1),
        make_run(tmp_path / "a2", 0.3, 6, seed=2),
        make_run(tmp_path / "b0", 0.8, 20, seed=0, aladdin={"pi": 1}),
    ]
    out = tmp_path / "out"
    words = ["--read", *map(str, folders), "--target-accuracy", "0.55", "--out", str(out)]
    assert compare(words) == 0
    first, second = result(out)["rows"]
    assert (first["label"], second["label"]) == ("aladdin, pi 1", "aladdin, pi 4")
    assert first["figures"]["test_accuracy"] == {
        "mean": 0.8, "std": None, "low": 0.8, "high": 0.8, "n": 1,
    }  # fmt: skip
    figures = second["figures"]
    assert figures["test_accuracy"]["mean"] == pytest.approx(0.6)
    assert figures["test_accuracy"]["std"] == pytest.approx(0.3)  # of 0.9, 0.6 and 0.3
    assert (figures["test_accuracy"]["low"], figures["test_accuracy"]["high"]) == (0.3, 0.9)
    assert (figures["seconds"]["mean"], figures["seconds"]["std"]) == (8.0, 2.0)
    # 0.55 is crossed between the fifth and sixth second: the sixth counts, not interpolated.
    assert figures["seconds_to_target"]["mean"] == 6.0
    assert figures["seconds_to_target"]["n"] == 2
    # One worker: 32 samples in 0.1 s.
    assert figures["speed_up"]["low"] == pytest.approx(100 / 320)
    printed = capsys.readouterr().out
    assert re.search(r"2  aladdin, pi 4 +3  0\.6000 \+- 0\.3000", printed)
    assert "6.000 +- 0.000 (2 of 3)" in printed
    assert re.search(r"\bseeds differ\b", printed)
    assert "25.0" in printed


def test_compare_read_writes_nothing_without_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", 0.9, 5)
    before = sorted(tmp_path.rglob("*"))
    assert compare(["--read", str(folder)]) == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_compare_reports_target_never_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [make_run(tmp_path / "a", 0.9, 9), make_run(tmp_path / "b", 0.2, 9, lr=0.5)]
    assert compare(["--read", *map(str, folders), "--target-accuracy", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.count("never") for line in lines if "aladdin, lr" in line] == [0, 1]


def test_rows_of_equal_accuracy_are_sorted_by_time(tmp_path: Path) -> None:
    slow = read_figures(make_run(tmp_path / "a", 0.5, 9), "slow")
    fast = read_figures(make_run(tmp_path / "b", 0.5, 7), "fast")
    none = read_figures(make_run(tmp_path / "c", None, 1), "none")
    rows = make_rows([slow, none, fast], None, None)
    assert [row.label for row in rows] == ["fast", "slow", "none"]
    assert rows[0].figures["speed_up"] is None


def test_spread_of_no_values_is_none_and_of_one_has_no_deviation() -> None:
    assert spread([None, None]) is None
    one = spread([None, 2.0])
    assert one is not None
    assert (one.mean, one.std, one.n) == (2.0, None, 1)


def test_baseline_of_worker_with_jitter_uses_mean_of_log_normal() -> None:
    # The mean of a log-normal factor exp(N(0, s^2)) is exp(s^2 / 2).
    outcome = baseline.from_options(SimulateOptions(jitter=0.5, batch_size=10, compute_time=0.2))
    assert outcome is not None
    assert outcome.samples_per_second == pytest.approx(50 / 1.1331484530668263)
    double = baseline.from_options(SimulateOptions(accumulate=2, batch_size=10, compute_time=0.2))
    assert double == Baseline(100.0, "calculated: a step of 20 samples in 0.2 s")
    assert baseline.from_options(TrainOptions()) is None


def test_compare_reports_coalesced_gradients_and_ideal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        make_run(tmp_path / "a0", 0.9, 10, seed=0, slowdown={0: 10.0}),
        make_run(tmp_path / "b0", 0.8, 20, seed=0, algorithm="bsp", slowdown={0: 10.0}),
    ]
    words = ["--read", *map(str, folders)]
    counted(folders[0], computed=300, coalesced=0)
    assert compare(words) == 0
    assert "coalesced" not in capsys.readouterr().out

    counted(folders[0], computed=300, coalesced=25)
    counted(folders[1], computed=300, coalesced=0)
    out = tmp_path / "out"
    assert compare([*words, "--out", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = [line.split() for line in printed if re.match(r"( |\d)", line)]
    assert [line[-1] for line in lines] == ["(%)", "8.33", "0"]
    aladdin, bsp = result(out)["rows"]
    assert aladdin["figures"]["coalesced_fraction"]["mean"] == 0.0833333333
    assert bsp["figures"]["coalesced_fraction"]["mean"] == 0.0
    assert "coalesced_fraction_mean" in (out / "table.csv").read_text()
    # One worker takes 320 samples/s, the other a tenth of that.
    assert result(out)["ideal_samples_per_second"] == {"aladdin": 352.0, "bsp": 352.0}
    report = (out / "report.md").read_text()
    assert re.search(r": 352 samples/s\b", report)
    assert "- coalesced: " in report


def counted(folder: Path, computed: int, coalesced: int) -> None:
    """Write these counters to a run's summary."""
    outcome = json.loads((folder / "summary.json").read_text())
    outcome |= {"gradients_computed": computed, "gradients_coalesced": coalesced}
    (folder / "summary.json").write_text(json.dumps(outcome))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x\naladdin_mpi: error: --lr: bad\nmore\n", "aladdin_mpi: error: --lr: bad"),
        ("Traceback\n  File\nValueError: no\nraised by rank 1\n\n", "ValueError: no"),
        ("[rank 1] KeyError: 'a'\n----\nprterun has exited\n", "[rank 1] KeyError: 'a'"),
        ("something\n-----\n\n", "something"),
        ("", ""),
    ],
)
def test_last_error_finds_error_line(text: str, line: str) -> None:
    assert last_error(text) == line


# -- rejected arguments ---------------------------------------------------------------------------
@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("--algorithms aladin", "--algorithms: .*'aladin'.*aladdin"),
        ("--algorithm aladdin", "--algorithm: .*--algorithms"),
        ("--epochs 3", r"--epochs: .* --(?!\w)"),
        ("-- --target-accuracy 0.9", r"--target-accuracy: .* --(?!\w)"),
        ("-- --seed 3", "--seed: .*--seeds"),
        ("-- --workers 3", "--workers: .*--workers"),
        ("-- --resume x", "--resume: .*to resume"),
        ("-- --epcohs 3", "--epcohs: .*--epochs"),
        ("-- --lr fast", "--lr: .*'fast'"),
        ("--engine mpi -- --hosts 2", "--hosts: .*aladdin_mpi.train --help"),
        ("--engine mpi --jobs 2", "--jobs 2 .*--engine mpi"),
        ("--seeds 1 2 1", "--seeds: .*1,2,1"),
        ("--mpirun mpirun-{ranks}", "--mpirun requires --engine mpi"),
        ("--baseline-steps 3", "--baseline-steps requires --engine mpi"),
        ("--mpirun mpirun", r"--mpirun: .*\{ranks\}.*'mpirun'"),
        ("--engine mpi --mpirun nosuch-{ranks}", "--mpirun: .*nosuch-5"),
        ("--target-accuracy 90", "--target-accuracy: .* 1, .*'90'"),
        ("--variants pi1", "--variants: .*LABEL=ALGORITHM OPTIONS.*'pi1'"),
        ("--variants a/b=aladdin", "--variants: .*LABEL=.*'a/b=aladdin'"),
        ("--variants a=nosuch", "--variants a: .*'nosuch'"),
        ("--variants a=aladdin,--lr,x", "--variants a: --lr: .*'x'"),
        ("--variants a=aladdin,--seed,1", "--variants a: --seed: "),
        ("--variants a=aladdin a=aladdin", "--variants: .*'a' twice"),
        ("--variants a=bsp,--aladdin-pi,2", "--variants a: --aladdin-pi .*bsp"),
        ("--algorithms bsp asp -- --aladdin-pi 2", "--: --aladdin-pi "),
        ("--algorithms bsp -- --dgc-ratio 0.1", "--dgc-ratio .*--compression"),
        ("-- --servers 5", "--servers: .*5 servers"),
        ("-- --slowdown 9=2", "--slowdown: .*0 to 3.*worker 9"),
        ("--read x --workers 3", "--workers .*--read"),
        ("--read x -- --lr 1", "-- .*--read"),
        ("--read nosuch", "--read: .*'nosuch'"),
    ],
)
def test_compare_rejects_invalid_arguments_by_name(
    words: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Within a word, commas separate like spaces.
    spaced = [w.replace(",", " ") if re.search("=[a-z]+,", w) else w for w in words.split()]
    with pytest.raises(UserError, match=re.compile(cause, re.DOTALL)):
        compare(spaced)
    assert not list(tmp_path.iterdir()), "nothing is written before all is checked"


def test_compare_rejects_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match=rf"--out: .*{tmp_path}\b.*\bthesis\.tex"):
        compare(["--out", str(tmp_path)])
    with pytest.raises(UserError, match=r"--out: .*\bfile .*/thesis\.tex"):
        compare(["--out", str(tmp_path / "thesis.tex")])
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_compare_rejects_being_started_by_mpirun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(UserError, match=r"\bmpirun\b.*--engine mpi"):
        compare(["--out", str(tmp_path / "out")])


def test_compare_help_before_or_after_separator(capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in ((["--help"], "--target-accuracy"), (["--", "--help"], "--bandwidth-g")):
        with pytest.raises(SystemExit) as left:
            compare(words)
        assert left.value.code == 0
        assert expected in capsys.readouterr().out


def test_compare_reads_options_from_config_file(tmp_path: Path) -> None:
    file = tmp_path / "compare.toml"
    variants = "variants = ['a=aladdin --lr-schedule step --lr-steps 1,2', 'b=nosuch']"
    file.write_text(f"seeds = [0, 1]\n{variants}\n")
    # The first variant, including commas, is parsed; the second is reported.
    with pytest.raises(UserError, match=r"--variants b: .*'nosuch'"):
        compare(["--config", str(file), "--out", str(tmp_path / "out")])


@pytest.mark.long
def test_compare_overrides_config_of_runs(tmp_path: Path) -> None:
    """Options that the comparison sets override such a file."""
    stored = make_run(tmp_path / "stored", 0.5, 3, seed=7, lr=0.5)
    out = tmp_path / "out"
    make_run(out / "runs" / "aladdin" / "seed-0", 0.5, 3, seed=0, lr=0.5)
    (out / "comparison.toml").write_text("workers = 2\n")
    words = ["--algorithms", "aladdin", "--workers", "2", "--out", str(out)]
    assert compare([*words, "--", "--config", str(stored / "config.toml")]) == 0
    assert [row["label"] for row in result(out)["rows"]] == ["aladdin"]
    assert os.listdir(out / "runs" / "aladdin") == ["seed-0"]
