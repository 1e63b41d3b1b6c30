"""The default folder of a run is unique, even if runs begin within the same second."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.run import run_folder
from aladdin_mpi.run.data_parallel import DataParallel
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
