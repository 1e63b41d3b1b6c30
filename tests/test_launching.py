"""``aladdin_mpi.launch``: a function on the ranks of a job, from a notebook or a prompt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi import LaunchError, UserError, launch
from tests import launched, warm
from tests.commands import end_of, running
from tests.launch import ROOT, environment, needs, turn
from tests.messages import check_names, naming

pytestmark = needs("openmpi")


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the ranks be started as in other tests: warm, and without a launcher's variables."""
    for name in set(os.environ) - set(environment("openmpi", {})):
        monkeypatch.delenv(name)
    for name, value in environment("openmpi", {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", warm.python())
    with turn():
        yield


def test_launch_returns_result_of_first_worker_and_prints_output(
    prompt: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker, workers, losses = launch(launched.train, [tmp_path / "run"], workers=2, timeout=120)
    assert (worker, workers) == (0, 2)
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert capsys.readouterr().out == "epoch 0\nepoch 1\nepoch 2\n"


def test_launch_raises_error_of_a_rank(prompt: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match=naming("rank 1", "ArithmeticError", "in fail")):
        launch(launched.fail, [1], workers=2, servers=0, timeout=60)
    assert "before the error" in capsys.readouterr().out


def test_launch_refuses_servers_that_the_algorithm_does_not_have(
    prompt: None, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=naming("ar-sgd", "2 workers", "servers=0")):
        launch(launched.train, [tmp_path / "run"], {"algorithm": "ar-sgd"}, workers=1, timeout=60)


def test_launch_reports_a_function_that_ends_its_process(prompt: None) -> None:
    with pytest.raises(LaunchError, match=naming("status 0", "no result")):
        launch(launched.leave, workers=1, servers=0, timeout=60)


@pytest.mark.long
@pytest.mark.parametrize("way", ["time limit", "interrupt"])
def test_launch_leaves_no_process(prompt: None, tmp_path: Path, way: str) -> None:
    mark = f"launch-{os.getpid()}-{way.split()[0]}"
    os.environ["ALADDIN_MPI_TEST"] = mark
    is_interrupt = way == "interrupt"
    seen: list[int] = []

    def interrupt() -> None:
        seen.extend(running(mark))
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(3.0, interrupt)
    if is_interrupt:
        timer.start()
    try:
        with pytest.raises(KeyboardInterrupt if is_interrupt else TimeoutError):
            launch(launched.sleep, [mark], workers=2, timeout=60 if is_interrupt else 2)
    finally:
        timer.cancel()
        del os.environ["ALADDIN_MPI_TEST"]
    assert bool(seen) == is_interrupt
    assert end_of(mark, 20)


# -- refusals ------------------------------------------------------------------------------------
def in_main() -> None:
    """Stand for a function of a notebook."""


def check_refused(function: Callable[..., Any], *names: str, **how: Any) -> None:
    with pytest.raises(UserError, match=naming("launch", *names)):
        launch(function, **how)


def test_launch_refuses_what_ranks_cannot_import(monkeypatch: pytest.MonkeyPatch) -> None:
    check_refused(lambda: None, "top of a module")
    monkeypatch.setattr(in_main, "__module__", "__main__")
    check_refused(in_main, "in_main", "%%writefile")
    check_refused(launched.sleep, "in_main", "%%writefile", args=[in_main])
    check_refused(launched.sleep, "workers", "got 0", workers=0)
    check_refused(launched.sleep, "mpirun: none was not found", mpirun="none")


SESSION = """
def train(): pass

import aladdin_mpi, os
aladdin_mpi.launch(train)
aladdin_mpi.launch(int, ["x"], workers=1, servers=0)
aladdin_mpi.launch(os.path.basename, ["a/result"], workers=1, servers=0)
"""


def test_launch_works_in_an_interactive_session(tmp_path: Path) -> None:
    """A prompt continues after errors, as a notebook does."""
    with turn():
        ended = subprocess.run(
            [sys.executable, "-i", "-q"],
            input=SESSION,
            env=environment("openmpi", {"PYTHONPATH": str(ROOT)}),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
    check_names(ended.stderr, "train is defined in the notebook", "LaunchError: rank 0: ValueError")
    assert ended.stdout == "'result'\n", ended
