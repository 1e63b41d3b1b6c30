"""Simulating a large cluster by a representative part of it."""

from __future__ import annotations

from typing import Any

import pytest

from aladdin_mpi.advice import options as asked
from aladdin_mpi.advice.candidate_search import CHECK, LONG, CandidateSearch
from aladdin_mpi.advice.candidates import MANY, Candidate, ReducedCluster, ground, smaller
from aladdin_mpi.advice.learning import SampleEfficiency
from aladdin_mpi.advice.options import AdviceRequest
from aladdin_mpi.advice.timed_run import LinkUse, TimedRun

AHEAD = Candidate("aladdin-ahead", 32, True)


def request(words: str, **fields: Any) -> AdviceRequest:
    return asked.read(["--describe", words, "--model", "size:10"]).on(fields)


def part(words: str, **fields: Any) -> ReducedCluster | None:
    whole = request(words, **fields)
    return smaller(whole, ground(whole, 10.0))


def test_smaller_cluster_keeps_workers_per_host_and_share_of_servers() -> None:
    small = part("128 nodes x 4 GPUs, 25 Gbit/s, step 0.18 s")
    assert small is not None
    assert (small.ground.workers, small.ground.hosts) == (MANY, 32)
    assert small.ground.links == small.whole.links[:32]
    result = small.candidate(AHEAD)
    assert result is not None and result.servers == 8 and result.spread
    assert small.candidate(Candidate("bsp", 1, False)) is None
    assert small.growth(AHEAD) == 16 and small.growth(Candidate("sgp", 0, False)) == 4
    used = TimedRun(1000.0, 0.1, (LinkUse(1, "in", 0.9), LinkUse(0, "out", 0.5)), 1e6)
    scaled = small.scaled(AHEAD, used)
    assert scaled.rate == pytest.approx(4000.0) and scaled.waiting == 0.1
    assert [(link.host, link.way) for link in scaled.links[:4]] == [(n, "in") for n in range(4, 8)]
    assert len(scaled.links) == 8


def test_smaller_cluster_keeps_hosts_of_every_kind() -> None:
    slow = {worker: 3.0 for worker in range(400, 404)}
    small = part(
        "128 nodes x 4 GPUs, 25 Gbit/s, step 0.18 s", slowdown=slow, **{"cluster.links": {7: 5.0}}
    )
    assert small is not None
    assert small.ground.hosts == 34 and small.ground.workers == 136
    assert sorted(small.ground.slowdowns)[-5:] == [1.0, 3.0, 3.0, 3.0, 3.0]
    assert min(small.ground.links) == 5e9 / 8
    place = small.stands_for[7]
    assert small.ground.links[place] == 5e9 / 8 and small.stands_for.count(place) == 1
    # All workers wait for the slow ones, so the rate per worker is the same in both clusters.
    used = TimedRun(1000.0, 0.1, (), 1e6)
    assert small.scaled(Candidate("ar-sgd", 0, False), used).rate == pytest.approx(512e3 / 136)
    ideal = (508 + 4 / 3) / (132 + 4 / 3)
    assert small.scaled(AHEAD, used).rate == pytest.approx(1000 * ideal)


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("32 nodes x 4 GPUs, step 0.18 s", {}),
        ("1 node x 512 GPUs, step 0.18 s", {}),
        ("64 nodes x 4 GPUs, step 0.18 s", {"cluster.links": {n: 5.0 + n for n in range(64)}}),
        ("64 nodes x 4 GPUs, step 0.18 s", {"cluster.pauses": ((3, 1.0, 1.0),)}),
    ],
)
def test_smaller_cluster_is_none_for_small_or_irregular_clusters(
    words: str, fields: dict[str, Any]
) -> None:
    assert part(words, **fields) is None


def test_search_time_grows_with_cluster_size() -> None:
    few, many = request("8 nodes, step 0.18 s"), request("128 nodes x 4 GPUs, step 0.18 s")
    assert few.seconds(8) < many.seconds(512) <= 600
    assert asked.read(["--describe", "8 nodes, step 1 s", "--seconds", "7"]).seconds(512) == 7


@pytest.mark.long
def test_smaller_cluster_predicts_rates_of_whole_cluster() -> None:
    """The best candidates also run on all hosts; their rates are scaled by the difference."""
    whole = asked.read(
        [
            *("--describe", "48 nodes x 4 GPUs, 10 Gbit/s, step 0.18 s", "--model", "size:10"),
            *("--algorithms", "ar-sgd", "sgp", "--jobs", "1", "--quiet"),
        ]
    )
    on = ground(whole, 10.0)
    race = CandidateSearch(
        whole, on, "size:10", lambda candidate: SampleEfficiency(1.0), lambda *told: None
    )
    assert race.part is not None and race.part.workers == 96
    first, second = race.run(["ar-sgd", "sgp"])[:2]
    for entry in (first, second):
        assert entry.growth is not None and entry.growth == pytest.approx(1.0, abs=0.1)
        assert 0.5 * entry.bound < entry.rate <= entry.bound
        assert len(entry.timed.links if entry.timed else ()) == 2 * 48
    assert CHECK < LONG
