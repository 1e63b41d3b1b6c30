"""The folder of a run: its name, its configuration, and files that it must not replace."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.options.toml_file import read_toml
from aladdin_mpi.run import run_folder
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.session.plan import Origin, make_plan
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster


@pytest.fixture
def same_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return runs below ``tmp_path`` that all begin within the same second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda *form: "20260101-000000")


@pytest.mark.usefixtures("same_second")
def test_runs_started_in_the_same_second_have_separate_folders() -> None:
    def main(transport: Transport) -> None:
        model = nn.Linear(2, 1)
        run = DataParallel(model, transport=transport, algorithm="ar-sgd", samples=8, quiet=True)
        for batch in run.batches(torch.ones(8, 2)):
            run.step(model(batch).sum().backward())

    for _ in range(3):
        VirtualCluster(2, Cluster(hosts=1), 0).run(main)
    names = sorted(folder.name for folder in Path("runs").iterdir())
    (stem,) = {re.sub(r"-\d$", "", name) for name in names[1:]}
    assert names == [stem, f"{stem}-2", f"{stem}-3"]
    assert all((Path("runs") / name / "summary.json").exists() for name in names)


@pytest.mark.usefixtures("same_second")
def test_concurrent_processes_get_separate_run_folders() -> None:
    context = multiprocessing.get_context("fork")
    start, made = context.Barrier(4), context.SimpleQueue()

    def make() -> None:
        start.wait(60)
        for _ in range(20):
            made.put(str(run_folder.make_new(RunOptions())))

    processes = [context.Process(target=make) for _ in range(4)]
    for process in processes:
        process.start()
    names = [made.get() for _ in range(80)]
    for process in processes:
        process.join(60)
    assert len({*names}) == 80


def test_tensorboard_files_of_others_are_kept(tmp_path: Path) -> None:
    events = tmp_path / "tensorboard" / "events.out.mine"
    events.parent.mkdir()
    events.write_text("mine")
    with pytest.raises(UserError, match=r"--run-dir: .*holds .*tensorboard.*--overwrite"):
        run_folder.prepare(tmp_path, RunOptions())
    assert events.read_text() == "mine"
    run_folder.prepare(tmp_path, RunOptions(overwrite=True)).release()
    assert not events.exists()


def test_configuration_begins_with_a_command_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["-c", "import sys\nprint(sys.argv[1:])", "it's", "two\nlines\\", "größe", "a b"]
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, *words])
    run_folder.prepare(tmp_path, RunOptions()).release()
    file = tmp_path / "config.toml"
    assert read_toml(RunOptions, file, "--config")[("algorithm",)].value == RunOptions().algorithm
    command = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# python ")
    printed = subprocess.check_output(["bash", "-c", f"{sys.executable} {command}"], text=True)
    assert printed == f"{words[2:]}\n"


@pytest.mark.parametrize(("interval", "samples"), [(0.0, 0), (1e-9, 1), (0.5, 32)])
def test_short_intervals_are_not_rounded_to_never(interval: float, samples: int) -> None:
    given = {"eval_every": interval, "checkpoint_every": f"{interval}epochs" if interval else None}
    options = RunOptions.model_validate(given)
    plan = make_plan(options, 64, Origin(2, 1, (), None, (2, 1)), over_mpi=False)
    assert (plan.eval_every, plan.checkpoint_every) == (samples, samples)
