"""``run.reduce()`` and the number of a worker, in simulated loops with workers of unequal speed."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from aladdin_mpi.allreduce.surviving import Sums, SurvivingSums
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.launch import ROOT, needs
from tests.messages import check_names, naming
from tests.run.program_runs import run_program

WORKERS, BATCH, EPOCH = 3, 4, 24
DATA = TensorDataset(torch.randn(EPOCH, 2, generator=torch.Generator().manual_seed(0)))
SYNCHRONOUS = sorted(name for name, each in ALGORITHMS.items() if each.lockstep)
Loop = Callable[[DataParallel, Callable[[Tensor], None]], None]


def run_loop(folder: Path, algorithm: str, loop: Loop, **settings: Any) -> None:
    """Run ``loop(run, step)`` on three workers, of which the first is five times slower."""
    servers = int(ALGORITHMS[algorithm].has_servers)

    def main(transport: Transport) -> None:
        torch.manual_seed(0)
        # multistep requires a first layer whose activations are smaller than its gradients.
        model = nn.Sequential(nn.Linear(2, 32), nn.Linear(32, 1))
        run = DataParallel(
            model,
            transport=transport,
            algorithm=algorithm,
            batch_size=BATCH,
            compute_time=0.01,
            jitter=0.5,
            slowdown={0: 5.0},
            run_dir=folder / "run",
            quiet=True,
            **{"samples": 2 * EPOCH, **settings},
        )

        def step(inputs: Tensor) -> None:
            loss = model(inputs).square().mean()
            loss.backward()
            run.step(loss)

        loop(run, step)

    VirtualCluster(servers + WORKERS, Cluster(hosts=2), 0).run(main)


def batches_of(run: DataParallel, by_epochs: bool) -> Iterator[Tensor]:
    """Yield the inputs of all batches, of a loop by epochs or of a single one."""
    for epoch in run.epochs(DATA) if by_epochs else [run.batches(DATA)]:
        for (inputs,) in epoch:
            yield inputs


@pytest.mark.parametrize("algorithm", SYNCHRONOUS)
def test_sums_between_batches_are_bit_identical_on_all_workers(
    tmp_path: Path, algorithm: str
) -> None:
    """Before and after a step, of numbers and of tensors, in synchronous algorithms."""
    sums: dict[int, list[float]] = defaultdict(list)
    means: dict[int, list[Tensor]] = defaultdict(list)

    def loop(run: DataParallel, step: Callable[[Tensor], None]) -> None:
        for number, inputs in enumerate(batches_of(run, by_epochs=True)):
            sums[run.worker].append(run.reduce(1 / (7 + run.worker + number), "sum").item())
            step(inputs)
            if number % 2:
                means[run.worker].append(run.reduce(inputs.sum(0) / 3))

    run_loop(tmp_path, algorithm, loop)
    expected = [sum(1 / (7 + worker + number) for worker in range(WORKERS)) for number in range(4)]
    assert sums[0] == pytest.approx(expected, rel=1e-15)
    assert sums[0] == sums[1] == sums[2]
    assert all(means[0][0].shape == (2,) for _ in means)
    assert all(map(torch.equal, means[0] + means[0], means[1] + means[2]))


def test_gather_returns_numbers_and_tensors_of_all_workers(tmp_path: Path) -> None:
    gathered: list[tuple[list[float], list[list[int]]]] = []

    def loop(run: DataParallel, step: Callable[[Tensor], None]) -> None:
        for inputs in batches_of(run, by_epochs=True):
            step(inputs)
            numbers = run.gather(run.worker / 7)
            rows = run.gather(torch.tensor([run.worker, 5]))
            gathered.append((numbers.tolist(), rows.int().tolist()))

    run_loop(tmp_path, "ar-sgd", loop)
    numbers = [worker / 7 for worker in range(WORKERS)]
    rows = [[worker, 5] for worker in range(WORKERS)]
    assert gathered
    assert all(each == (numbers, rows) for each in gathered)


def test_documented_algorithms_are_those_in_rounds() -> None:
    text = (ROOT / "docs" / "your-script.md").read_text()
    (row,) = re.findall(r"^\| `([\w -]+)` \| yes \| yes \|$", text, re.M)
    assert sorted(row.split()) == SYNCHRONOUS


def test_workers_are_numbered_before_and_in_the_loop(tmp_path: Path) -> None:
    places = []

    def loop(run: DataParallel, step: Callable[[Tensor], None]) -> None:
        before = (run.worker, run.workers)
        for inputs in batches_of(run, by_epochs=False):
            assert (run.worker, run.workers) == before
            step(inputs)
        places.append(before)

    run_loop(tmp_path, "asp", loop)
    assert sorted(places) == [(-1, 3), (0, 3), (1, 3), (2, 3)]


# -- refusals ------------------------------------------------------------------------------------
def check_refused(folder: Path, algorithm: str, loop: Loop, *names: str, **settings: Any) -> None:
    """Check that the run ends with an error that contains ``names``; a deadlock has another."""
    with pytest.raises(UserError, match=naming("run.reduce()", *names)):
        run_loop(folder, algorithm, loop, **settings)


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - set(SYNCHRONOUS) - {"ssp"}))
@pytest.mark.parametrize("by_epochs", [True, False])
def test_asynchronous_algorithm_refuses_sums_between_batches(
    tmp_path: Path, algorithm: str, by_epochs: bool
) -> None:
    def loop(run: DataParallel, step: Callable[[Tensor], None]) -> None:
        for inputs in batches_of(run, by_epochs):
            step(inputs)
            run.reduce(1.0)

    check_refused(tmp_path, algorithm, loop, algorithm, "run.epochs()", "run.log()")


def test_ssp_refuses_all_sums(tmp_path: Path) -> None:
    def loop(run: DataParallel, step: Callable[[Tensor], None]) -> None:
        for epoch in run.epochs(DATA):
            for (inputs,) in epoch:
                step(inputs)
            run.reduce(1.0)

    check_refused(tmp_path, "ssp", loop, "ssp", "evaluate=")


@pytest.mark.parametrize(
    ("algorithm", "place"),
    [
        ("ar-sgd", "before"),
        ("ar-sgd", "after"),
        ("ar-sgd", "end"),
        ("ar-sgd", "last end"),
        ("bsp", "before"),
        ("asp", "end"),
        ("asp", "last end"),
        ("gosgd", "end"),
    ],
)
def test_call_on_one_worker_only_is_an_error(tmp_path: Path, algorithm: str, place: str) -> None:
    """Instead of a deadlock."""

    def loop(run: DataParallel, step: Callable[[Tensor], None]) -> None:
        def call(here: str) -> None:
            if here == place and run.is_first:
                run.reduce(1.0)

        for epoch in run.epochs(DATA):
            for (inputs,) in epoch:
                call("before")
                step(inputs)
                call("after")
            call("end" if int(epoch) < 1 else "last end")

    check_refused(tmp_path, algorithm, loop, "worker", "has not called it", "run.is_first")


def test_call_on_one_worker_after_the_last_step_is_an_error(tmp_path: Path) -> None:
    def loop(run: DataParallel, step: Callable[[Tensor], None]) -> None:
        for number, inputs in enumerate(batches_of(run, by_epochs=False)):
            step(inputs)
            if run.is_first and number == 2 * EPOCH // (WORKERS * BATCH) - 1:
                run.reduce(1.0)

    check_refused(tmp_path, "ar-sgd", loop, "has not called it", "run.is_first")


def test_calls_at_different_places_are_an_error(tmp_path: Path) -> None:
    def loop(run: DataParallel, step: Callable[[Tensor], None]) -> None:
        for inputs in batches_of(run, by_epochs=False):
            if run.worker == 1:
                run.reduce(1.0)
            step(inputs)
            if run.worker != 1:
                run.reduce(1.0)

    check_refused(tmp_path, "ar-sgd", loop, "before the run.step()", "after the run.step()")


def test_call_that_waits_for_a_worker_that_left_its_loop_is_an_error(tmp_path: Path) -> None:
    def loop(run: DataParallel, step: Callable[[Tensor], None]) -> None:
        for inputs in batches_of(run, by_epochs=False):
            step(inputs)
            if run.worker == 1:
                break
            run.reduce(1.0)
        assert run.summary is not None

    check_refused(tmp_path, "ar-sgd", loop, "worker 1", "after its loop")


@pytest.mark.parametrize("by_epochs", [True, False])
def test_worker_without_a_batch_in_the_last_round_is_an_error(
    tmp_path: Path, by_epochs: bool
) -> None:
    """Its part would be missing from the sum."""

    def loop(run: DataParallel, step: Callable[[Tensor], None]) -> None:
        for inputs in batches_of(run, by_epochs):
            step(inputs)
            run.reduce(1.0)

    samples = WORKERS * BATCH + 1
    check_refused(tmp_path, "ar-sgd", loop, "without a batch", "sample 12", samples=samples)


def test_tensors_of_different_lengths_are_an_error(tmp_path: Path) -> None:
    def loop(run: DataParallel, step: Callable[[Tensor], None]) -> None:
        for inputs in batches_of(run, by_epochs=False):
            run.reduce(torch.ones(2 + run.is_first))
            step(inputs)

    check_refused(tmp_path, "ar-sgd", loop, "values", "one shape")


@pytest.mark.parametrize(
    ("algorithm", "place", "is_alone", "names"),
    [
        ("aladdin-ahead", "batch", False, ["between two batches", "aladdin-ahead"]),
        ("ssp", "end", False, ["ssp", "waits in run.gather()"]),
        ("asp", "end", True, ["worker", "has not called it"]),
        ("ar-sgd", "end", False, ["2 values", "one shape"]),
    ],
)
def test_errors_of_gather_name_it(
    tmp_path: Path, algorithm: str, place: str, is_alone: bool, names: list[str]
) -> None:
    """``is_alone``: only the first worker calls it."""

    def loop(run: DataParallel, step: Callable[[Tensor], None]) -> None:
        def gather(here: str) -> None:
            if here == place and (run.is_first or not is_alone):
                run.gather(torch.ones(1 if run.is_first else 2))

        for epoch in run.epochs(DATA):
            for (inputs,) in epoch:
                step(inputs)
                gather("batch")
            gather("end")

    with pytest.raises(UserError, match=naming("run.gather()", *names)) as caught:
        run_loop(tmp_path, algorithm, loop)
    assert "run.reduce()" not in str(caught.value)


def test_sums_after_a_left_epoch_count_as_its_end(tmp_path: Path) -> None:
    """With asynchronous algorithms too, in any form of the inner loop."""
    ends = []

    def loop(run: DataParallel, step: Callable[[Tensor], None]) -> None:
        for epoch in run.epochs(DATA):
            for number, (inputs,) in enumerate(epoch):
                step(inputs)
                if number == 1:
                    break
            ends.append((int(epoch), run.reduce(run.worker, "sum").item()))

    run_loop(tmp_path, "asp", loop)
    assert sorted(ends) == [(0, 3.0)] * WORKERS + [(1, 3.0)] * WORKERS


@needs("openmpi")
def test_evaluation_is_shared_over_mpi(tmp_path: Path) -> None:
    """By workers of unequal speed. At its end, only one of them calls run.reduce()."""
    completed = run_program(tmp_path, "shared_evaluation", check=False)
    lines = re.findall(r"^worker (\d) of 3: (\[.*\])$", completed.stdout, re.M)
    assert sorted(worker for worker, _ in lines) == ["0", "1", "2"], completed
    ((sums,),) = [{sums for _, sums in lines}]
    assert json.loads(sums)[::2] == [55.0] * 6
    assert completed.returncode != 0 and "after the loop" not in completed.stdout
    check_names(completed.stderr, "run.reduce()", "has not called it", "run.is_first")


@pytest.mark.parametrize(("by", "wire"), [("mpi", "fp32"), ("ring", "fp32"), ("auto", "bf16")])
def test_rank_that_fails_during_a_sum_does_not_block_a_reduction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, wire: str
) -> None:
    """Workers that have the step's sums wait in run.reduce() for those that must repeat it."""
    ended: list[tuple[int, float]] = []
    finish = SurvivingSums.finish

    def noted(self: SurvivingSums) -> Sums:
        step, result = self._steps, finish(self)
        ended.append((step, self._transport.now()))
        return result

    def job(name: str, at: float) -> list[int | None]:
        def main(transport: Transport) -> int:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(2, 60), nn.Linear(60, 1))
            run = DataParallel(
                model,
                transport=transport,
                algorithm="ar-sgd",
                ar_sgd={"allreduce": by},
                wire=wire,
                samples=4 * BATCH * 6,
                batch_size=BATCH,
                compute_time=1.0,
                run_dir=tmp_path / name,
                quiet=True,
            )
            calls = 0
            for inputs in batches_of(run, by_epochs=True):
                loss = model(inputs).square().mean()
                loss.backward()
                run.step(loss)
                workers = run.reduce(1.0, "sum").item()
                assert workers in (3, 4)
                calls += 1
            return calls

        cluster = Cluster(hosts=4, bandwidth_gbit=1e-3, latency_us=1e3, failures={3: at})
        return VirtualCluster(4, cluster, 0).run(main)

    monkeypatch.setattr(SurvivingSums, "finish", noted)
    assert job("unharmed", 1e6) == [6] * 4
    times = [time for step, time in ended if step == 2]
    first, last = min(times), max(times)
    for number in range(-2, 8):
        at = first + number / 7 * max(last - first, 1e-3)
        *others, failed = job(str(number), at)
        assert failed is None and len(set(others)) == 1 and others[0] in (7, 8), at
