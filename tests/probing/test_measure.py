"""Measurements of the probe on modelled clusters with known figures, and their interpretation."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.probing import measured_cluster as measuring
from aladdin_mpi.probing.cluster_file import check, figure, rendered
from aladdin_mpi.probing.links import NetworkFigures, measure_network
from aladdin_mpi.probing.measured_cluster import (
    Measured,
    RankSteps,
    lines_of,
    measure,
    sections,
    stragglers,
)
from aladdin_mpi.probing.options import ProbeOptions
from aladdin_mpi.probing.steps import StepTimes, make_task, simplified, time_steps
from aladdin_mpi.transport.base import Transport
from tests.virtual_lab import lab, run

SHAPE = [(0.2, 0.6), (0.7, 0.9)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip measurements that take real time."""
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

    result: Measured = run(size, main, cluster)[0]
    return result


def simulated(measurement: Measured) -> SimulateOptions:
    return check(rendered("test", sections(measurement)), "cluster.toml")


def text(measurement: Measured) -> str:
    return rendered("test", sections(measurement))


UNEQUAL = {1: 2.0, 3: 0.5}


@pytest.mark.long
def test_measure_finds_links_latency_and_steps() -> None:
    cluster = lab(5, placement="block", links=UNEQUAL)
    result = measured(cluster, 10, slow={7: 3.0})
    options = simulated(result)
    assert (options.workers, options.cluster.hosts) == (10, 5)
    assert options.cluster.placement == "workers"
    assert options.cluster.bandwidth_gbit == pytest.approx(8, rel=0.01)
    assert options.cluster.links == pytest.approx(UNEQUAL, rel=0.02)
    # The latency of a short message includes the overhead, which streams of messages separate.
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
    (line,) = stragglers(result)
    assert re.match(r"rank 7 on 3: .*\b3, 0\.6 s\b", line)
    assert result.overlap is not None
    assert result.overlap.moved == pytest.approx(1.0, abs=0.1)


@pytest.mark.long
def test_measured_cluster_file_simulates_same_cluster() -> None:
    """Measuring the cluster of a file reproduces the file."""
    first = simulated(measured(lab(4, placement="block", links={2: 1.0}), 8)).cluster
    again = simulated(measured(first, 8)).cluster
    assert again.bandwidth_gbit == pytest.approx(first.bandwidth_gbit, rel=0.01)
    assert again.links == pytest.approx(first.links, rel=0.02)
    assert again.latency_us == pytest.approx(first.latency_us, rel=0.02)


def test_measure_finds_full_rate_for_all_links_behind_switch() -> None:
    network = measured(lab(4), 4).network
    assert network.together is not None
    assert network.together.value == pytest.approx(1.0, rel=0.02)
    crowded = network.crowded()
    assert crowded is not None
    assert crowded.value == pytest.approx(1.0, rel=0.02)


def test_measure_of_single_rank_has_no_network() -> None:
    result = measured(lab(1), 1)
    written = text(result)
    for key in ("bandwidth-gbit", "latency-us", "local-bandwidth-gbit", "local-latency-us"):
        assert f"# {key}: " in written
        assert f"\n{key}" not in written
    assert re.search(r"\bone rank\b", written)
    assert (simulated(result).workers, simulated(result).compute_time) == (1, 0.2)


def test_measure_of_single_host_has_no_links() -> None:
    result = measured(lab(1), 3)
    written = text(result)
    assert re.search(r"# bandwidth-gbit: .*\bone host\b", written)
    assert simulated(result).cluster.local_bandwidth_gbit == pytest.approx(80, rel=0.05)


def test_measure_without_shared_hosts_has_no_local_links() -> None:
    written = text(measured(lab(2), 2))
    assert re.search(r"# local-bandwidth-gbit: .*\btwo ranks\b", written)
    assert re.search(r"\btwo hosts\b.*\bslower\b", written)


def test_measure_reports_and_excludes_failing_rank() -> None:
    result = measured(lab(2, placement="block"), 4, failing=2)
    cause = re.compile(r"^(# )?rank 2 on 1 .*: ZeroDivisionError: division by zero$")
    assert any(map(cause.match, text(result).splitlines()))
    assert any(map(cause.match, lines_of(result)))
    options = simulated(result)
    assert (options.workers, options.compute_time, options.slowdown) == (4, 0.2, {})


def test_measure_without_any_step_has_no_compute_time() -> None:
    result = measured(lab(1), 1, failing=0)
    assert re.search(r"# compute-time: .*\bno rank\b", text(result))
    assert simulated(result).compute_time == 0.1  # the default


@pytest.mark.long
def test_measured_file_lists_cyclic_ranks_by_number() -> None:
    result = measured(lab(3), 5)
    assert simulated(result).cluster.worker_hosts == (0, 1, 2, 0, 1)
    assert "# host 1: 1, ranks 1, 4\n" in text(result)


def test_measure_names_skipped_pairs_and_links() -> None:
    def main(transport: Transport) -> NetworkFigures:
        has_time = iter([True, False])
        return measure_network(transport, 1.0, lambda: next(has_time))

    network = run(4, main, lab(4, links={3: 2.0}))[0]
    assert list(network.alone) == [(0, 1), (1, 2)]
    assert network.skipped == 10
    result = Measured([0, 1, 2, 3], list("abcd"), network)
    assert re.search(r"^# links of hosts 3 ", text(result), re.MULTILINE)
    assert re.search(r"^# 10 pairs of hosts ", text(result), re.MULTILINE)
    assert simulated(result).cluster.links == {}


def test_stragglers_require_more_than_a_high_median() -> None:
    def rank(*seconds: float) -> RankSteps:
        return RankSteps(figure(seconds), 0.0, 0.3, [])

    usual, busy, slow = rank(0.9, 1.0, 1.4, 1.5), rank(0.9, 1.5, 1.6, 2.0), rank(3.0, 3.1, 3.2)
    steps = {0: usual, 1: usual, 2: usual, 3: busy, 4: slow}
    result = Measured([0] * 5, ["a"], NetworkFigures(1), steps)
    assert list(result.stragglers()) == [4]
    assert len(result.alike()) == 4


@pytest.mark.long
def test_measured_file_reports_shared_network() -> None:
    result = measured(lab(4), 4)
    slow = {pair: 0.5 * rate for pair, rate in result.network.at_once.items()}
    crowded = replace(result, network=replace(result.network, at_once=slow))
    assert re.search(r"\bnetwork\b.*\bis shared\b", text(crowded))
    assert not re.search(r"\bnetwork\b.*\bis shared\b", text(result))


@pytest.mark.parametrize("name", ["digits", "mlp"])
def test_time_steps_times_model(name: str) -> None:
    def main(transport: Transport) -> StepTimes:
        task = make_task(ProbeOptions(model=name, batch_size=4), torch.device("cpu"))
        return time_steps(transport, task, 0.2)

    [measurement] = run(1, main)
    assert len(measurement.seconds) >= 3
    assert all(seconds > 0 for seconds in measurement.seconds)
    assert 0 < measurement.forward < 1
    gradients, times = zip(*measurement.backward, strict=True)
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
def test_simplified_keeps_relevant_points_of_gradient_timing(points: Any, expected: Any) -> None:
    assert simplified(points) == expected
