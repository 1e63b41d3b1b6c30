"""What the probe finds on modelled clusters, whose figures are known; and what it makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.probing import measure as measuring
from aladdin_mpi.probing.cluster_file import check, figure, rendered
from aladdin_mpi.probing.links import NetworkFigures, measure_network
from aladdin_mpi.probing.measure import Measured, RankSteps, measure
from aladdin_mpi.probing.measured_cluster import sections, stragglers, told
from aladdin_mpi.probing.options import ProbeOptions
from aladdin_mpi.probing.steps import StepTimes, make_task, simplified, time_steps
from aladdin_mpi.transport.base import Transport
from tests.virtual_lab import lab, run

SHAPE = [(0.2, 0.6), (0.7, 0.9)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what takes real time."""
    monkeypatch.setattr(measuring, "memory_bandwidth", lambda seconds: figure([10.0, 11.0, 12.0]))


def steps(seconds: float) -> Callable[[float], StepTimes]:
    return lambda budget: StepTimes([0.9 * seconds, seconds, seconds, 1.1 * seconds], 0.4, SHAPE)


def measured(
    cluster: Cluster,
    size: int,
    slow: dict[int, float] | None = None,
    failing: int | None = None,
    seconds: float = 20.0,
) -> Measured:
    def main(transport: Transport) -> Measured:
        if transport.rank == failing:
            return measure(transport, lambda budget: 1 / 0, seconds, cores=8)  # type: ignore[arg-type, return-value]
        factor = (slow or {}).get(transport.rank, 1.0)
        return measure(transport, steps(0.2 * factor), seconds, cores=8)

    found: Measured = run(size, main, cluster)[0]
    return found


def simulated(found: Measured) -> SimulateOptions:
    return check(rendered("test", sections(found)), "cluster.toml")


def text(found: Measured) -> str:
    return rendered("test", sections(found))


UNEQUAL = {1: 2.0, 3: 0.5}


def test_links_latency_and_steps_are_found() -> None:
    cluster = lab(5, placement="block", links=UNEQUAL)
    found = measured(cluster, 10, slow={7: 3.0})
    options = simulated(found)
    assert (options.workers, options.cluster.hosts) == (10, 5)
    assert options.cluster.placement == "workers"
    assert options.cluster.bandwidth_gbit == pytest.approx(8, rel=0.01)
    assert options.cluster.links == pytest.approx(UNEQUAL, rel=0.02)
    # Of a short message both together; apart they are told by rows of messages.
    latency = options.cluster.latency_us + options.cluster.message_overhead_us
    assert latency == pytest.approx(110, rel=0.02)
    assert options.cluster.message_overhead_us == pytest.approx(10, rel=0.1)
    assert options.cluster.local_bandwidth_gbit == pytest.approx(80, rel=0.05)
    assert options.cluster.local_latency_us == pytest.approx(11, rel=0.05)
    assert options.cluster.memory_gbyte == 11
    assert options.compute_time == pytest.approx(0.2)
    assert options.slowdown == {7: 3.0}
    assert (options.forward_share, options.backward_shape) == (0.4, tuple(SHAPE))
    assert 0.01 < options.jitter < 0.1
    assert stragglers(found) == ["rank 7 on 3: 3 times slower, 0.6 s a step"]
    assert found.overlap is not None
    assert found.overlap.moved == pytest.approx(1.0, abs=0.1)


def test_a_file_of_a_cluster_simulates_as_that_cluster() -> None:
    """What is measured on the cluster of the file is the file."""
    first = simulated(measured(lab(4, placement="block", links={2: 1.0}), 8)).cluster
    again = simulated(measured(first, 8)).cluster
    assert again.bandwidth_gbit == pytest.approx(first.bandwidth_gbit, rel=0.01)
    assert again.links == pytest.approx(first.links, rel=0.02)
    assert again.latency_us == pytest.approx(first.latency_us, rel=0.02)


def test_all_at_once_and_both_ways_are_as_good_as_alone_behind_a_switch() -> None:
    network = measured(lab(4), 4).network
    assert network.together is not None
    assert network.together.value == pytest.approx(1.0, rel=0.02)
    crowded = network.crowded()
    assert crowded is not None
    assert crowded.value == pytest.approx(1.0, rel=0.02)


def test_one_rank_alone() -> None:
    found = measured(lab(1), 1)
    written = text(found)
    for key in ("bandwidth-gbit", "latency-us", "local-bandwidth-gbit", "local-latency-us"):
        assert f"# {key}: not measured: " in written
        assert f"\n{key}" not in written
    assert "not measured, as there is one rank alone" in written
    assert (simulated(found).workers, simulated(found).compute_time) == (1, 0.2)


def test_one_host_alone() -> None:
    found = measured(lab(1), 3)
    written = text(found)
    assert "# bandwidth-gbit: not measured: all ranks are on one host" in written
    assert simulated(found).cluster.local_bandwidth_gbit == pytest.approx(80, rel=0.05)


def test_no_host_has_two_ranks() -> None:
    written = text(measured(lab(2), 2))
    assert "# local-bandwidth-gbit: not measured: no host has two ranks" in written
    assert "two hosts show only the slower of their two links" in written


def test_a_rank_that_cannot_be_measured_is_told_and_left_out() -> None:
    found = measured(lab(2, placement="block"), 4, failing=2)
    assert "# rank 2 on 1 took no step: ZeroDivisionError: division by zero" in text(found)
    assert "rank 2 on 1 took no step: ZeroDivisionError: division by zero" in told(found)
    options = simulated(found)
    assert (options.workers, options.compute_time, options.slowdown) == (4, 0.2, {})


def test_nobody_can_take_a_step() -> None:
    found = measured(lab(1), 1, failing=0)
    assert "# compute-time: not measured: no rank could take a step" in text(found)
    assert simulated(found).compute_time == 0.1  # the default


def test_ranks_dealt_in_turn_are_named_one_by_one() -> None:
    found = measured(lab(3), 5)
    assert simulated(found).cluster.worker_hosts == (0, 1, 2, 0, 1)
    assert "# host 1: 1, ranks 1, 4\n" in text(found)


def test_without_time_for_all_pairs_it_says_what_is_missing() -> None:
    def main(transport: Transport) -> NetworkFigures:
        asked = iter([True, False])
        return measure_network(transport, 1.0, lambda: next(asked))

    network = run(4, main, lab(4, links={3: 2.0}))[0]
    assert list(network.alone) == [(0, 1), (1, 2)]
    assert network.skipped == 10
    found = Measured([0, 1, 2, 3], list("abcd"), network)
    assert "# links of hosts 3 were not measured for want of time\n" in text(found)
    assert "# 10 pairs of hosts were left out for want of time\n" in text(found)
    assert simulated(found).cluster.links == {}


def test_on_a_busy_machine_medians_alone_make_no_straggler() -> None:
    def rank(*seconds: float) -> RankSteps:
        return RankSteps(figure(seconds), 0.0, 0.3, [])

    usual, busy, slow = rank(0.9, 1.0, 1.4, 1.5), rank(0.9, 1.5, 1.6, 2.0), rank(3.0, 3.1, 3.2)
    steps = {0: usual, 1: usual, 2: usual, 3: busy, 4: slow}
    found = Measured([0] * 5, ["a"], NetworkFigures(1), steps)
    assert list(found.stragglers()) == [4]
    assert len(found.alike()) == 4


def test_a_shared_network_is_told_of() -> None:
    found = measured(lab(4), 4)
    slow = {pair: 0.5 * rate for pair, rate in found.network.at_once.items()}
    crowded = replace(found, network=replace(found.network, at_once=slow))
    assert "so the network between hosts is shared" in text(crowded)
    assert "so the network between hosts is shared" not in text(found)


@pytest.mark.parametrize("name", ["digits", "mlp"])
def test_steps_of_a_model_are_taken(name: str) -> None:
    def main(transport: Transport) -> StepTimes:
        task = make_task(ProbeOptions(model=name, batch_size=4), torch.device("cpu"))
        return time_steps(transport, task, 0.2)

    [found] = run(1, main)
    assert len(found.seconds) >= 3
    assert all(seconds > 0 for seconds in found.seconds)
    assert 0 < found.forward < 1
    gradients, times = zip(*found.backward, strict=True)
    assert list(gradients) == sorted(set(gradients))
    assert list(times) == sorted(times)
    assert gradients[0] > 0 and gradients[-1] < 1 and times[-1] <= 1


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], []),
        ([(0.25, 0.25), (0.5, 0.51), (1.0, 1.0)], []),
        ([(0.25, 0.8), (0.5, 0.8), (0.75, 0.9), (1.0, 1.0)], [(0.25, 0.8), (0.5, 0.8)]),
        ([(0.5, 0.6), (0.75, 0.59), (1.0, 0.6)], [(0.5, 0.6), (0.75, 0.6)]),
    ],
)
def test_a_shape_keeps_the_points_that_matter(points: Any, expected: Any) -> None:
    assert simplified(points) == expected
