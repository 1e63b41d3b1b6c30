"""What the adviser is made of: candidates, bounds, what a sample teaches, bottlenecks, changes."""

from __future__ import annotations

from typing import Any

import pytest

from aladdin_mpi.advice import bottleneck, candidates, learning, options, report
from aladdin_mpi.advice.candidate_search import CandidateResult
from aladdin_mpi.advice.candidates import Candidate, ClusterTraits
from aladdin_mpi.advice.learning import SampleEfficiency
from aladdin_mpi.advice.report import knee
from aladdin_mpi.advice.timed_run import LinkUse, TimedRun, rate_of
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.options.run import SimulateOptions

GBIT = 1e9 / 8
FOUR = ClusterTraits([1.0] * 8, [2] * 4, [GBIT] * 4, 20.0, 0.1)


def simulated(**changes: Any) -> SimulateOptions:
    return SimulateOptions.model_validate({"workers": 8, "cluster": {"hosts": 4}, **changes})


# -- candidates --------------------------------------------------------------------------
def test_every_algorithm_has_a_candidate_and_its_options_are_the_trainers() -> None:
    for name in candidates.names((), 8):
        for each in (candidates.plain(name, FOUR), *candidates.variants(name, FOUR)):
            assert each.words[:2] == ["--algorithm", name]
            assert (each.servers > 0) == (ALGORITHMS[name].has_servers)
            SimulateOptions.model_validate(
                {
                    "cluster": {"hosts": 4, "placement": each.fields["cluster.placement"]},
                    **{k: v for k, v in each.fields.items() if "." not in k},
                }
            )
    bsp = [each.describe() for each in candidates.variants("bsp", FOUR)]
    assert "bsp, 4 servers spread, int8" in bsp and "bsp, 1 server" in bsp
    assert "bsp, 4 servers spread, node sums" in bsp
    lone = ClusterTraits([1.0] * 4, [1] * 4, [GBIT] * 4, 20.0, 0.1)
    assert not any(each.has_nodes for each in candidates.variants("bsp", lone))


def test_a_bound_is_what_links_and_the_slowest_allow() -> None:
    bsp, asp = (Candidate(name, 1, False) for name in ("bsp", "asp"))
    # Six gradients of 20 MB come to host 0 over 125 MB/s, for eight batches of 0.1 s.
    assert candidates.bound(bsp, FOUR) == pytest.approx(8 * 0.1 / (6 * 20 / 125))
    assert candidates.bound(Candidate("bsp", 4, True), FOUR) == pytest.approx(
        4 * candidates.bound(bsp, FOUR)
    )
    int8 = Candidate("bsp", 1, False, (("wire", "int8"),))
    assert candidates.bound(int8, FOUR) == pytest.approx(4 * candidates.bound(bsp, FOUR))
    slow = ClusterTraits([4.0, *[1.0] * 7], [2] * 4, [100 * GBIT] * 4, 20.0, 0.1)
    assert candidates.bound(bsp, slow) == 2.0 and candidates.bound(asp, slow) == 7.25
    assert candidates.bound(Candidate("aladdin", 1, False), slow) == slow.ideal == 7.25


def test_the_ground_is_read_off_a_cluster() -> None:
    cluster = {"hosts": 4, "placement": "workers", "links": {2: 5.0}}
    on = candidates.ground(simulated(cluster=cluster, slowdown={1: 3.0}), 20.0)
    assert on.on_host == [2, 2, 2, 2] and on.node == 2
    assert on.slowdowns[:3] == [1.0, 3.0, 1.0]
    assert on.links == [10 * GBIT, 10 * GBIT, 5 * GBIT, 10 * GBIT]
    uneven = candidates.ground(simulated(workers=7), 20.0)
    assert sum(uneven.on_host) == 7 and uneven.node == 0


def test_too_few_workers_and_unknown_names() -> None:
    with pytest.raises(UserError, match="--algorithm: expected one of"):
        candidates.names(["alladin"], 8)
    with pytest.raises(UserError, match="--algorithms: expected one for 1 workers, got sgp"):
        candidates.names(["sgp"], 1)


# -- learning ------------------------------------------------------------------------------
def test_the_table_is_read_between_its_numbers() -> None:
    rows = learning.table()["aladdin-ahead"]
    assert learning.measured("bsp", 500) == SampleEfficiency(1.0)
    assert learning.measured("aladdin-ahead", 8).value == rows[8].share
    between = learning.measured("aladdin-ahead", 12)
    assert rows[8].share < between.value < rows[16].share
    assert between.interval is not None and between.is_sure
    assert rows[8].low < between.interval[0] < between.value < between.interval[1] < rows[16].high
    assert "8 workers (2 seeds, 4,688 steps, near convergence) and 16 work" in between.source
    assert learning.measured("asp", 12).interval is None  # of one seed each
    assert not learning.measured("asp", 512).is_sure
    assert learning.measured("osgp", 8).value == learning.table()["osgp"][8].share
    assert not learning.measured("adsp", 8).is_sure


def test_no_sample_efficiency_is_above_one_unless_it_holds_near_convergence() -> None:
    for name, rows in learning.table().items():
        for workers, row in rows.items():
            holds = row.converged and row.seeds > 1 and row.low > 1
            assert row.high <= 1 or holds, (name, workers)
            assert row.low <= row.share <= row.high
    for name in ALGORITHMS:
        for workers in (2, 8, 20, 24, 40, 64, 512):
            share = learning.measured(name, workers)
            assert max(share.value, *(share.interval or (0,))) <= 1
    short = learning.measured("aladdin-ahead", 64)
    assert short.value == 1 and not short.is_sure
    assert short.source == "measured with 64 workers (3 seeds, 98 steps); capped at 1.00"


def test_lead_is_credited_if_it_holds_near_convergence() -> None:
    assert learning.credited([1.2, 1.1], converged=False) == [1.0, 1.0]
    assert learning.credited([1.2, 1.1], converged=True) == [1.2, 1.1]
    assert learning.credited([1.2, 0.9], converged=True) == [1.0, 0.9]
    assert learning.credited([1.2], converged=True) == [1.0]


def test_sample_efficiency_is_shown_with_its_range_over_seeds() -> None:
    shown = report._efficiency
    assert (
        shown(SampleEfficiency(0.93, "measured", interval=(0.911, 0.949))) == "0.93 (0.91 to 0.95)"
    )
    assert shown(SampleEfficiency(0.5, "not measured", is_sure=False)) == "0.50 ?"
    assert (
        shown(SampleEfficiency(1.0, is_sure=False, interval=(1.0, 1.0))) == "1.00 (1.00 to 1.00) ?"
    )


def test_what_a_sample_teaches_is_read_off_two_curves() -> None:
    base = [(float(samples), 2.0 - samples / 100) for samples in range(1, 101)]
    half = [(2 * samples, loss) for samples, loss in base]
    stuck = [(samples, max(loss, 1.5)) for samples, loss in base]
    assert learning.taught(base, base) == 1.0
    assert learning.taught(half, base) == pytest.approx(0.5)
    assert learning.taught(base, half) == pytest.approx(2.0)
    assert learning.taught(stuck, base) == pytest.approx(1.0)  # up to where it got
    crawling = [(samples, 2.0 - samples / 400) for samples, _ in base]
    assert learning.taught(crawling, base) == pytest.approx(0.25)


# -- bottlenecks -----------------------------------------------------------------------------
def timed(waiting: float, *links: LinkUse) -> TimedRun:
    found = tuple(sorted(links, key=lambda link: -link.used)) or (LinkUse(0, "out", 0.1),)
    return TimedRun(1000.0, waiting, found, 1e6)


def test_full_links_are_named_and_doubled() -> None:
    cluster = {"hosts": 4, "bandwidth_gbit": 8.0, "links": {3: 2.0}}
    full = timed(0.4, LinkUse(1, "in", 0.9), LinkUse(3, "in", 0.97), LinkUse(0, "in", 0.3))
    found = bottleneck.find(Candidate("asp", 2, True), full, FOUR, simulated(cluster=cluster))
    assert found.kind == "links" and found.text.startswith("the links of hosts 1 and 3 are full in")
    assert found.relief == {"cluster.links": {3: 4.0, 1: 16.0}}
    everyone = timed(0.4, *(LinkUse(host, way, 0.95) for host in range(4) for way in ("in", "out")))
    found = bottleneck.find(Candidate("ar-sgd", 0, False), everyone, FOUR, simulated())
    assert found.text.startswith("the links of all hosts are full both ways, 95 %")
    assert found.relief == {"cluster.bandwidth_gbit": 20.0}
    served = timed(0.4, LinkUse(0, "in", 0.95))
    found = bottleneck.find(Candidate("asp", 2, False), served, FOUR, simulated())
    assert "the link of host 0 is full inwards" in found.text and "the servers are" in found.text


def test_the_slowest_waiting_and_computing() -> None:
    slow = ClusterTraits([1.0, 3.0, *[1.0] * 6], [2] * 4, [GBIT] * 4, 20.0, 0.1)
    found = bottleneck.find(Candidate("bsp", 1, False), timed(0.6), slow, simulated())
    assert (found.kind, found.relief) == ("slowest", {"slowdown": {}})
    assert found.text == "worker 1, 3 times slower, sets the pace of all"
    found = bottleneck.find(Candidate("asp", 1, False), timed(0.3), slow, simulated())
    assert found.kind == "waiting" and "wait 30 % of the time" in found.text
    found = bottleneck.find(Candidate("aladdin", 1, False), timed(0.0), slow, simulated())
    assert (found.kind, found.relief) == ("computing", {})
    fast = TimedRun(7.4 / 0.1 * 32, 0.2, (LinkUse(0, "in", 0.95),), 1e6)
    found = bottleneck.find(Candidate("aladdin", 1, False), fast, slow, simulated(batch_size=32))
    assert (found.kind, found.relief) == ("computing", {})
    assert found.text.endswith("though the link of host 0 has no room for more")


# -- changes ---------------------------------------------------------------------------------
def test_changes_are_read() -> None:
    base = simulated(slowdown={1: 2.0})
    asked = ["bandwidth=100", "slowdown=0=10", "servers=4", "workers=16", "latency=0", "step=0.5"]
    found = options.changes(asked, base)
    assert found[0].fields == {"cluster.bandwidth_gbit": 100.0}
    assert found[1].fields == {"slowdown": {1: 2.0, 0: 10.0}}
    assert (found[2].servers, found[3].workers) == (4, 16)
    assert options.grown(base, 16)["cluster.hosts"] == 8
    assert options.grown(simulated(slowdown={7: 2.0}), 4)["slowdown"] == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bandwith=100", "expected NAME=VALUE with one of bandwidth"),
        ("bandwidth", "expected NAME=VALUE"),
        ("bandwidth=fast", "expected a number of 1e-09 or more, got 'fast'"),
        ("bandwidth=0", "expected a number"),
        ("servers=1.5", "expected a whole number of 1 or more, got '1.5'"),
        ("slowdown=9=2", "expected a worker from 0 to 7, got 9"),
        ("slowdown=1", "expected a number of 1 or more, got ''"),
    ],
)
def test_bad_changes_are_named(text: str, words: str) -> None:
    with pytest.raises(UserError, match=f"--what-if.*{words}"):
        options.changes([text], simulated())


# -- figures -----------------------------------------------------------------------------------
def test_a_rate_leaves_out_the_start_and_the_end() -> None:
    moments = [*range(10, 110, 10), 300]  # the last samples are drawn after 100 s
    lines = [
        {"kind": "train", "samples": min(100 * (i + 1), 1000), "seconds": float(moment)}
        for i, moment in enumerate(moments)
    ]
    assert rate_of(lines, {"samples": 1000, "samples_per_second": 3.3}) == pytest.approx(10.0)
    assert rate_of(lines[:1], {"samples": 1000, "samples_per_second": 3.3}) == 3.3


def test_an_entry_is_not_above_what_there_can_be() -> None:
    entry = CandidateResult(
        Candidate("aladdin", 1, False), 900.0, SampleEfficiency(1.0), timed(0.0)
    )
    assert entry.rate == 900.0 and entry.between == (810.0, 900.0)
    entry = CandidateResult(
        Candidate("aladdin", 1, False), 2000.0, SampleEfficiency(1.0), timed(0.0)
    )
    assert entry.rate == 1000.0 and entry.between == (900.0, 1100.0)
    entry.long = [timed(0.0), timed(0.0)]
    assert entry.between == (950.0, 1050.0) and not entry.is_strained
    entry.long = [timed(0.0, LinkUse(1, "in", 0.9))]
    assert entry.is_strained


def test_a_knee_is_the_last_that_has_most_of_the_ideal() -> None:
    assert knee([(2, 2.0, 2.0), (4, 3.5, 4.0), (8, 5.0, 8.0)]) == 4
    assert knee([(2, 1.0, 2.0)]) is None
