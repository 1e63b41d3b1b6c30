"""Comparisons of a user's training script, and of runs that measure a loss."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.comparison.options import read_request
from aladdin_mpi.comparison.plan import NOT_RESUMED, plan
from aladdin_mpi.errors import UserError
from tests.commands import compare, summary
from tests.comparison.test_compare import run
from tests.launch import ROOT, Completed, needs

pytestmark = pytest.mark.usefixtures("warm_python")

PROGRAM = Path(__file__).parent / "programs" / "regression.py"
SHORT = ("--epochs", "1")


def words(out: Path, *own: str, runs: tuple[str, ...] = SHORT, script: tuple[str, ...] = ()) -> Any:
    """Return the command line of a comparison of two algorithms."""
    first = [str(PROGRAM), "--algorithms", "bsp", "ar-sgd", "--workers", "2", "--out", str(out)]
    return [*first, *own, "--", *runs, *(["--", *script] if script else [])]


def result(out: Path) -> Any:
    return json.loads((out / "comparison.json").read_text())


def whole_words(out: Path) -> Any:
    return words(out, "--seeds", "0", "1", "--target-loss", "12", script=("--rate", "0.02"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Completed]:
    out = tmp_path_factory.mktemp("scripts") / "whole"
    return out, run(whole_words(out))


# -- in simulation --------------------------------------------------------------------------------
def test_script_is_trained_with_the_options_of_the_comparison(
    whole: tuple[Path, Completed],
) -> None:
    for algorithm in ("bsp", "ar-sgd"):
        for seed in (0, 1):
            made = summary(whole[0] / "runs" / algorithm / f"seed-{seed}")
            assert (made["algorithm"], made["seed"], made["workers"]) == (algorithm, seed, 2)
            assert (made["engine"], made["samples"], made["model"]) == ("virtual", 96, "Linear")
    assert not (ROOT / "own").exists(), "the script's run folder is overridden"
    assert "preparing the data" not in whole[1].stdout
    log = (whole[0] / "runs" / "bsp" / "seed-0" / "output.log").read_text()
    assert log.count("preparing the data\n") == 1 + 2 + 2  # once alone, and on every rank


def test_losses_are_compared_if_there_is_no_accuracy(whole: tuple[Path, Completed]) -> None:
    rows = result(whole[0])["rows"]
    losses = [row["figures"]["test_loss"]["mean"] for row in rows]
    assert losses == sorted(losses)
    assert all("test_accuracy" not in row["figures"] for row in rows)
    assert {"loss-time.png", "loss-samples.png"} < {path.name for path in whole[0].iterdir()}
    assert "accuracy" not in whole[1].stdout
    heading = whole[1].stdout.splitlines()[2].split()
    assert heading[:4] == ["algorithm", "runs", "loss", "time"]
    assert "Linear on data of a script, 2 workers, simulated" in whole[1].stdout


def test_time_to_a_loss_is_that_of_the_first_evaluation_below_it(
    whole: tuple[Path, Completed],
) -> None:
    assert result(whole[0])["target_loss"] == 12
    assert result(whole[0])["target_accuracy"] is None
    for each in result(whole[0])["runs"]:
        below = [e["seconds"] for e in each["evaluations"] if e["loss"] <= 12]
        assert each["seconds_to_target"] == (below[0] if below else None)
    times = [each["seconds_to_target"] for each in result(whole[0])["runs"]]
    assert any(times)
    assert "time to loss 12 (s)" in whole[1].stdout


def test_baseline_has_the_batch_size_of_the_script(whole: tuple[Path, Completed]) -> None:
    assert "80 samples/s, calculated: a step of 8 samples in 0.1 s" in whole[1].stdout


@pytest.mark.long
def test_rerun_keeps_finished_runs(whole: tuple[Path, Completed]) -> None:
    before = (whole[0] / "table.csv").read_text()
    assert compare(whole_words(whole[0])) == 0
    assert (whole[0] / "table.csv").read_text() == before


def test_other_script_or_options_are_refused(whole: tuple[Path, Completed], tmp_path: Path) -> None:
    other = [*whole_words(whole[0])[:-1], "0.03"]
    with pytest.raises(UserError, match=r"--out: .*script_arguments: .*0\.02.*0\.03"):
        compare(other)
    with pytest.raises(UserError, match=r"--out: .*script: .*regression\.py and .*other\.py"):
        compare([str(tmp_path / "other.py"), *whole_words(whole[0])[1:]])
    longer = words(whole[0], runs=("--epochs", "3"), script=("--rate", "0.02"))
    with pytest.raises(UserError, match=r"--out: .*bsp.seed-0.*epochs: 1\.0 and 3\.0"):
        compare(longer)


@pytest.mark.long
def test_figures_that_were_not_measured_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = Path("comparisons") / "virtual-regression"
    own = ["--algorithms", "bsp", "--workers", "2", "--", *SHORT, "--", "--unmeasured"]
    assert compare([str(PROGRAM), *own]) == 0
    report = (out / "report.md").read_text()
    assert "No test_accuracy or test_loss was measured" in report
    assert "| loss |" not in report
    assert not list(out.glob("*-time.png"))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("runs", "cause"),
    [
        (("--lr", "0.1"), "--lr has no effect on this script, whose optimizer"),
        (("--slowdown", "5=2"), "worker 5"),
        (("--compute", "timed"), "Leave out --compute timed"),
    ],
)
def test_invalid_options_are_refused_before_the_first_run(
    runs: tuple[str, ...], cause: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=cause):
        compare(words(tmp_path / "out", runs=runs))
    assert not list(tmp_path.iterdir())


def test_scripts_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    def refused(text: str, *more: str) -> str:
        (tmp_path / "train.py").write_text(text)
        with pytest.raises(UserError) as error:
            compare([str(tmp_path / "train.py"), "--out", str(tmp_path / "out"), *more])
        return str(error.value)

    assert "train.py makes no DataParallel" in refused("import sys; sys.exit(0)")
    assert "train.py ended its process before" in refused("import os; os._exit(0)")
    assert "train.py failed before its DataParallel: KeyError: 'x'" in refused("{}['x']")
    (tmp_path / "train.py").unlink()
    with pytest.raises(UserError, match=r"train.py: expected a Python file"):
        compare([str(tmp_path / "train.py")])
    with pytest.raises(UserError, match="arguments of the script require a script"):
        compare(["--script-arguments", "x"])
    with pytest.raises(UserError, match=r"SCRIPT.py cannot be combined with --read"):
        compare([str(tmp_path / "train.py"), "--read", "x"])


def test_error_in_the_script_ends_the_comparison(tmp_path: Path) -> None:
    outcome = run(words(tmp_path / "out", script=("--rats",)), check=False)
    assert outcome.returncode == 2
    assert outcome.stderr.count("error: unrecognized arguments: --rats") == 1
    assert not list(tmp_path.iterdir())


def test_interrupt_before_the_first_run_is_reported_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, time; os.kill(os.getppid(), 2); time.sleep(0.5)")
    outcome = run([str(script), "--out", str(tmp_path / "out")], check=False)
    assert outcome.returncode == 130
    line = "aladdin_mpi: stopped by SIGINT; rerun the same command to resume"
    assert outcome.stderr.splitlines() == [line]


# -- over MPI -------------------------------------------------------------------------------------
MPI = ("--engine", "mpi", "--baseline-steps", "4")


def test_script_over_mpi_has_its_servers(tmp_path: Path) -> None:
    out = tmp_path / "out"
    bsp, ar_sgd = plan(read_request(words(out, *MPI, script=("--rate", "0.02"))), out)
    assert (bsp.ranks, ar_sgd.ranks) == (4, 2)
    own = [str(PROGRAM), *SHORT, "--algorithm", "bsp", "--seed", "0", "--run-dir", str(bsp.folder)]
    assert bsp.start_words() == [*own, *NOT_RESUMED, "--", "--rate", "0.02"]


@pytest.mark.long
@pytest.mark.slow
@needs("openmpi")
def test_script_is_compared_and_resumed_over_mpi(tmp_path: Path) -> None:
    out = Path(os.path.relpath(tmp_path / "out", ROOT))  # the script changes its folder
    command = words(out, *MPI, script=("--folder", str(tmp_path)))
    outcome = run(command)
    out = tmp_path / "out"
    for label, servers in (("bsp", 2), ("ar-sgd", 0)):
        made = summary(out / "runs" / label / "seed-0")
        assert (made["engine"], made["workers"], made["servers"]) == ("mpi", 2, servers)
        assert made["test_loss"] is not None
    (folder,) = (out / "baseline").iterdir()
    alone = summary(folder)
    assert (alone["workers"], alone["samples"]) == (1, 4 * 8)
    assert f"{alone['samples_per_second']:,.6g} samples/s, measured: " in outcome.stdout
    (out / "runs" / "bsp" / "seed-0" / "summary.json").unlink()
    again = run(command)
    assert "2 already finished" in again.stderr
    assert "bsp, seed 0: resumes from its checkpoint" in again.stderr
    log = (out / "runs" / "bsp" / "seed-0" / "output.log").read_text()
    assert "--resume auto" in log
    assert summary(out / "runs" / "bsp" / "seed-0")["samples"] == 96


def test_lightning_script_is_planned_over_mpi(tmp_path: Path) -> None:
    script = ROOT / "examples" / "parallel" / "lightning_digits.py"
    given = [str(script), "--engine", "mpi", "--algorithms", "bsp", "--out", str(tmp_path / "out")]
    (only,) = plan(read_request(given), tmp_path / "out")
    assert only.ranks == 5
