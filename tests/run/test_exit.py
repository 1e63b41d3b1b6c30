"""User code that calls sys.exit() during a run: one rank reports an error that names the place."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.errors import SuspendedError, UserError
from aladdin_mpi.process import guard
from tests.commands import refusal, simulate, train
from tests.launch import needs
from tests.messages import check_names
from tests.run.program_runs import HERE, PROGRAMS, program, run_program, run_script

SHORT = ("--samples", 128, "--batch-size", 4, "--eval-every", 0.1, "--checkpoint-every", "never")
SOURCE = PROGRAMS / "quitting.py"
LINE = next(
    number for number, line in enumerate(SOURCE.read_text().splitlines(), 1) if "# here" in line
)
"""Line number of the data set's ``sys.exit(0)``."""


@pytest.mark.parametrize(
    ("data", "model", "place"),
    [
        ("quitting_data", "plain_model", "__getitem__"),
        ("quitting_test_data", "plain_model", "__getitem__"),
        ("no_data", "plain_model", "no_data"),
        ("complete_data", "quitting_model", "forward"),
    ],
)
def test_sys_exit_in_user_code_is_refused_in_simulation(
    tmp_path: Path, data: str, model: str, place: str
) -> None:
    parts = ("--dataset", f"quitting:{data}", "--model", f"quitting:{model}", "--workers", 2)
    completed = simulate(tmp_path / "run", *parts, *SHORT, check=False, modules=PROGRAMS)
    check_names(refusal(completed), f"{SOURCE}, line ", f"in {place}: ", "sys.exit(")
    assert completed.returncode == 2


@needs("openmpi")
@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.long)])
def test_sys_exit_over_mpi_is_reported_by_one_rank(tmp_path: Path, processes: int) -> None:
    parts = ("--dataset", "quitting:quitting_data", "--model", "quitting:plain_model")
    options = (*parts, "--algorithm", "asp", *SHORT, "--loader-workers", processes)
    # The server process that forks loader processes would outlive a warm rank.
    how: dict[str, Any] = {"check": False, "modules": PROGRAMS, "is_warm": not processes}
    completed = train(3, tmp_path / "run", *options, **how)
    place = f"error (rank 1): {SOURCE}, line {LINE}, in __getitem__: "
    check_names(refusal(completed), place, "sys.exit(0)")
    assert completed.returncode == 2


@pytest.mark.long
@needs("openmpi")
def test_sys_exit_in_a_custom_loop_is_refused(tmp_path: Path) -> None:
    completed = run_program(tmp_path, "quitting_loop", tmp_path / "run", 0, "data", check=False)
    check_names(refusal(completed), f"error (rank 1): {SOURCE}, line {LINE}, in __getitem__")
    assert completed.returncode == 2


FAILING_LOOP = """import torch
from aladdin_mpi import DataParallel

model = torch.nn.Linear(2, 1)
run = DataParallel(model, algorithm="ar-sgd", steps=3, batch_size=4, quiet=True)
for batch in run.batches(torch.ones(24, 2)):
    {statement}
"""


@needs("openmpi")
def test_error_of_all_ranks_is_reported_by_one(tmp_path: Path) -> None:
    text = FAILING_LOOP.format(statement="run.step(part='left')")
    completed = run_script(tmp_path, text, ranks=2, check=False)
    check_names(refusal(completed), "error (rank 0)", "run.step(part='left')")
    text = FAILING_LOOP.format(statement="raise ValueError('of the script')")
    completed = run_script(tmp_path, text, ranks=2, check=False)
    assert re.findall(r"^\[rank (\d)\] ValueError: of the script$", completed.stderr, re.M) == ["0"]
    assert completed.stderr.count("Traceback") == 1


@pytest.mark.parametrize("place", ["data", "loop", "end"])
def test_sys_exit_in_a_simulated_script_is_refused_until_the_run_ends(
    tmp_path: Path, place: str
) -> None:
    last = 0 if place == "data" else 64
    script = (program("quitting_loop"), "--workers", 2, "--", tmp_path / "run", last, place)
    completed = simulate(None, *script, check=False, env=HERE)
    if place == "end":
        assert completed.returncode == 0, completed
        assert (tmp_path / "run" / "summary.json").is_file()
    else:
        source = SOURCE if place == "data" else program("quitting_loop")
        check_names(refusal(completed), f"{source}, line ", "sys.exit(")


def test_exit_guard_does_not_catch_other_exceptions() -> None:
    with pytest.raises(SuspendedError), guard.no_exit():
        raise SuspendedError
    with pytest.raises(ZeroDivisionError), guard.no_exit():
        print(1 / 0)
    here = r"test_exit.py, line \d+, in test_.*sys.exit\('why'\)"
    with pytest.raises(UserError, match=here), guard.no_exit():
        raise SystemExit("why")


def test_sys_exit_in_a_user_thread_does_not_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[BaseException] = []
    monkeypatch.setattr(guard, "end_job", ended.append)
    monkeypatch.setattr(threading, "excepthook", guard._end_in_thread)

    def run(error: BaseException) -> None:
        def fail() -> None:
            raise error

        target: Callable[[], None] = fail
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()

    run(SystemExit(0))
    assert not ended
    run(ValueError("reported"))
    assert len(ended) == 1
