"""A user's code that calls sys.exit() in mid-run: an error that says where, on one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.errors import SuspendedError, UserError
from aladdin_mpi.process import guard
from tests.commands import refusal, simulate, train
from tests.launch import needs, run_ranks

MODULE = """
import argparse, os, sys
import torch
from torch import nn

RANK = os.environ.get("OMPI_COMM_WORLD_RANK", "1")

class Data(torch.utils.data.Dataset):
    classes = range(2)
    def __init__(self, last):
        self.last = last
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index > self.last and RANK == "1":
            sys.exit(0)  # here
        return torch.ones(4), index % 2

def data():
    return Data(0), Data(64)

def no_data():
    argparse.ArgumentParser().parse_args(["--help"])

def sound():
    return Data(64), Data(64)

def test_data():
    return Data(64), Data(0)

class Model(nn.Linear):
    def forward(self, x):
        if self.training and RANK == "1":
            raise SystemExit
        return super().forward(x)

def model():
    return Model(4, 2)

def plain():
    return nn.Linear(4, 2)
"""
SHORT = ("--samples", 128, "--batch-size", 4, "--eval-every", 0.1, "--checkpoint-every", "never")
SCRIPT = """
import sys
import torch
from aladdin_mpi import DataParallel
from quits import Data, plain
model = plain()
run = DataParallel(model, algorithm="asp", samples=128, batch_size=4, run_dir=sys.argv[1])
for images, labels in run.batches(Data(int(sys.argv[2]))):
    if sys.argv[3] == "loop":
        sys.exit()
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    run.step(loss)
sys.exit(0)
"""
WHAT = "expected code that goes on or raises an error while the run goes on, got a call of sys.exit"


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    (tmp_path / "quits.py").write_text(MODULE)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def here(modules: Path) -> str:
    return f"{modules}/quits.py, line {MODULE[: MODULE.index('# here')].count(chr(10)) + 1}"


@pytest.mark.parametrize(
    ("data", "model", "place"),
    [
        ("data", "plain", "__getitem__"),
        ("test_data", "plain", "__getitem__"),
        ("no_data", "plain", "no_data"),
        ("sound", "model", "forward"),
    ],
)
def test_in_virtual_time(modules: Path, data: str, model: str, place: str) -> None:
    parts = ("--dataset", f"quits:{data}", "--model", f"quits:{model}", "--workers", 2)
    done = simulate(modules / "run", *parts, *SHORT, check=False, modules=modules)
    told = refusal(done)
    assert f"in {place}: {WHAT}(" in told
    assert f"{modules}/quits.py" in told
    assert done.returncode == 2


@needs("openmpi")
@pytest.mark.parametrize("processes", [0, 1])
def test_over_mpi_one_rank_tells(modules: Path, processes: int) -> None:
    parts = ("--dataset", "quits:data", "--model", "quits:plain", "--algorithm", "asp")
    loaders = ("--loader-workers", processes)
    # The server that loader processes are forked by would outlive a warm rank.
    how: dict[str, Any] = {"check": False, "modules": modules, "is_warm": not processes}
    done = train(3, modules / "run", *parts, *SHORT, *loaders, **how)
    assert f"error (rank 1): {here(modules)}, in __getitem__: {WHAT}(0)" in refusal(done)
    assert done.returncode == 2


@needs("openmpi")
def test_in_a_loop_of_ones_own(modules: Path) -> None:
    args = [str(modules / "script.py"), str(modules / "run"), "0", ""]
    done = run_ranks(3, args, check=False, env={"PYTHONPATH": str(modules)})
    assert f"error (rank 1): {here(modules)}, in __getitem__" in refusal(done)
    assert done.returncode == 2


@pytest.mark.parametrize("where", ["data", "loop", "end"])
def test_in_a_simulated_script(modules: Path, where: str) -> None:
    last = 0 if where == "data" else 64
    words = (modules / "script.py", "--workers", 2, "--", modules / "run", last, where)
    done = simulate(None, *words, check=False, modules=modules)
    if where == "end":
        assert done.returncode == 0, done
        assert (modules / "run" / "summary.json").is_file()
    else:
        assert WHAT in refusal(done)


def test_what_is_no_exit_of_the_users_passes() -> None:
    with pytest.raises(SuspendedError), guard.no_exit():
        raise SuspendedError
    with pytest.raises(ZeroDivisionError), guard.no_exit():
        print(1 / 0)
    here = r"test_exit.py, line \d+, in test_.*sys.exit\('why'\)"
    with pytest.raises(UserError, match=here), guard.no_exit():
        raise SystemExit("why")


def test_a_thread_of_the_users_may_end_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
    run(ValueError("told"))
    assert len(ended) == 1
