"""Scripts that `aladdin_mpi.train` and `aladdin_mpi.simulate` run, with options over theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.process.launcher import LAUNCHED_WORKERS
from tests.commands import SIMULATE, TRAIN, metrics, refusal, summary
from tests.launch import Completed, run_ranks

PROGRAM = Path(__file__).parent / "programs" / "commanded.py"
SHORT = ("--samples", 64, "--bn-batches", 8)


def run(command: tuple[str, ...], ranks: int, *words: object, **how: Any) -> Completed:
    """Run a command with a script, its options and, after --, the script's arguments."""
    return run_ranks(ranks, [*command, str(PROGRAM), *map(str, words)], **how)


def over_mpi(*words: object, **how: Any) -> Completed:
    return run(TRAIN, 3, *words, **how)


def simulated(*words: object, **how: Any) -> Completed:
    return run(SIMULATE, 1, "--workers", 2, *words, **how)


both = pytest.mark.parametrize("command", [over_mpi, simulated])


@both
def test_options_of_the_command_override_those_of_the_script(command: Any, tmp_path: Path) -> None:
    options = [*SHORT, "--easgd-alpha", 0.25, "--run-dir", tmp_path / "run"]
    completed = command(*options, "--", "--width", 5)
    assert "trained easgd, epochs None, samples 64, easgd 3 0.25, width 5\n" in completed.stdout
    made = summary(tmp_path / "run")
    assert (made["algorithm"], made["samples"], made["workers"]) == ("easgd", 64, 2)


@pytest.mark.sample(1)
@both
def test_options_object_is_overridden_too(command: Any) -> None:
    completed = command("--algorithm", "bsp", "--quiet", "--", "--options")
    assert "trained bsp, epochs 1.0, samples None, easgd 3 auto, width 3\n" in completed.stdout
    completed = command("--quiet", "--", "--options")
    assert "trained easgd, epochs 1.0, samples None, easgd 3 auto, width 3\n" in completed.stdout


@pytest.mark.sample(2)
@both
@pytest.mark.parametrize(
    ("option", "value", "holder"),
    [("--lr", 0.5, "optimizer"), ("--optimizer", "sgd", "optimizer"), ("--model", "mlp", "model")],
)
def test_options_that_the_script_determines_are_refused(
    command: Any, option: str, value: object, holder: str
) -> None:
    completed = command(option, value, "--quiet", "--", "--optimizer", check=False)
    message = f"{option} has no effect on this script, whose {holder} determines it."
    assert message in refusal(completed)


@pytest.mark.sample(1)
@both
def test_file_of_a_run_may_override_the_script(command: Any, tmp_path: Path) -> None:
    own = ("--quiet", "--", "--optimizer")
    command(*SHORT, "--easgd-alpha", 0.25, "--run-dir", tmp_path / "a", *own)
    config = tmp_path / "a" / "config.toml"
    completed = command("--config", config, "--overwrite", *own)
    assert "trained easgd, epochs None, samples 64, easgd 3 0.25, width 3\n" in completed.stdout


def test_bad_options_are_refused_once(tmp_path: Path) -> None:
    assert "--taus: no such option" in refusal(over_mpi("--taus", 4, check=False))
    wrong = refusal(over_mpi("--easgd-tau", "x", check=False))
    assert "easgd" in wrong
    assert "'x'" in wrong
    none = run_ranks(3, [*TRAIN, str(tmp_path / "none.py"), "--quiet"], check=False)
    assert f"{tmp_path / 'none.py'}: expected a Python file" in refusal(none)
    assert none.returncode == 2


def test_option_without_effect_is_reported() -> None:
    completed = over_mpi(*SHORT, "--aladdin-pi", 2)
    assert completed.stderr.count("--aladdin-pi has no effect with --algorithm easgd") == 1


@pytest.mark.long
def test_loader_processes_find_the_classes_of_the_script() -> None:
    completed = over_mpi(*SHORT, "--quiet", "--", "--spawn")
    assert "trained easgd" in completed.stdout


@pytest.mark.long
@pytest.mark.long
def test_script_in_any_encoding_of_python_is_simulated(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_bytes(b"\xef\xbb\xbf" + PROGRAM.read_bytes())
    words = [*SIMULATE, str(script), "--workers", "2", "--quiet", *map(str, SHORT)]
    assert "trained easgd" in run_ranks(1, words).stdout


def test_completed_run_is_not_repeated(tmp_path: Path) -> None:
    words = (*SHORT, "--run-dir", tmp_path / "run", "--resume", "auto")
    over_mpi(*words)
    lines = metrics(tmp_path / "run")
    completed = over_mpi(*words)
    assert f"the run in {tmp_path / 'run'} is complete" in completed.stdout
    assert "trained" not in completed.stdout
    assert metrics(tmp_path / "run") == lines


@pytest.mark.sample(1)
@pytest.mark.parametrize("status", [0, 3])
def test_script_determines_the_status(status: int) -> None:
    completed = over_mpi(*SHORT, "--quiet", "--", "--status", status, check=False)
    assert "trained easgd" in completed.stdout
    assert completed.returncode == status


def test_one_process_trains_alone() -> None:
    completed = run(TRAIN, 1, *SHORT, "--quiet")
    assert "trained ar-sgd, epochs None, samples 64" in completed.stdout


def test_other_number_of_workers_than_placed_is_refused() -> None:
    placed = {LAUNCHED_WORKERS: "3"}
    message = refusal(over_mpi(*SHORT, env=placed, check=False))
    assert "easgd would train with 1 servers and 2 workers" in message
    assert "started for 3 workers" in message


def test_servers_are_counted_from_the_options() -> None:
    words = ["--algorithm", "easgd", "--servers", "2", "--", "--servers", "9"]
    completed = run_ranks(1, ["-m", "aladdin_mpi.servers", str(PROGRAM), *words])
    assert completed.stdout.split() == ["2"]
