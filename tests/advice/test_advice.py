"""The adviser's parts: candidates, bounds, sample efficiency, bottlenecks, changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.advice import (
    advising,
    bottleneck,
    candidate_search,
    candidates,
    learning,
    memory,
    options,
    report,
)
from aladdin_mpi.advice.candidate_search import CandidateResult, CandidateSearch
from aladdin_mpi.advice.candidates import Candidate, ClusterTraits
from aladdin_mpi.advice.learning import SampleEfficiency
from aladdin_mpi.advice.report import knee
from aladdin_mpi.advice.tables import read_table
from aladdin_mpi.advice.timed_run import LinkUse, TimedRun, rate_of, waiting_of
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.options.run import SimulateOptions
from benchmarks.gpu_check import memory as gpu_memory
from tests.messages import naming

GBIT = 1e9 / 8
FOUR = ClusterTraits([1.0] * 8, [2] * 4, [GBIT] * 4, 20.0, 0.1)


def simulated(**changes: Any) -> SimulateOptions:
    return SimulateOptions.model_validate({"workers": 8, "cluster": {"hosts": 4}, **changes})


# -- candidates --------------------------------------------------------------------------
def test_every_algorithm_has_candidates_with_valid_options() -> None:
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
    assert "bsp, 4 servers spread, an island per node" in bsp
    lone = ClusterTraits([1.0] * 4, [1] * 4, [GBIT] * 4, 20.0, 0.1)
    assert not any(each.has_islands for each in candidates.variants("bsp", lone))


def test_candidate_bound_follows_links_and_slowest_worker() -> None:
    bsp, asp = (Candidate(name, 1, False) for name in ("bsp", "asp"))
    # Six gradients of 20 MB arrive at host 0 over 125 MB/s, for eight batches of 0.1 s.
    assert candidates.bound(bsp, FOUR) == pytest.approx(8 * 0.1 / (6 * 20 / 125))
    assert candidates.bound(Candidate("bsp", 4, True), FOUR) == pytest.approx(
        4 * candidates.bound(bsp, FOUR)
    )
    int8 = Candidate("bsp", 1, False, (("wire", "int8"),))
    assert candidates.bound(int8, FOUR) == pytest.approx(4 * candidates.bound(bsp, FOUR))
    slow = ClusterTraits([4.0, *[1.0] * 7], [2] * 4, [100 * GBIT] * 4, 20.0, 0.1)
    assert candidates.bound(bsp, slow) == 2.0 and candidates.bound(asp, slow) == 7.25
    assert candidates.bound(Candidate("aladdin", 1, False), slow) == slow.ideal == 7.25


def test_candidate_bounds_use_hosts_links_and_slowdowns_of_cluster() -> None:
    request = options.read(["--describe", "4 nodes x 2 GPUs, step 0.1 s"])
    changed = request.on({"cluster.links": {2: 5.0}, "slowdown": {1: 3.0}})
    on = candidates.ground(changed, 20.0)
    assert on.on_host == [2, 2, 2, 2] and on.node == 2
    assert on.slowdowns[:3] == [1.0, 3.0, 1.0]
    assert on.links == [10 * GBIT, 10 * GBIT, 5 * GBIT, 10 * GBIT]
    uneven = candidates.ground(request.on({"workers": 7}), 20.0)
    assert sum(uneven.on_host) == 7 and uneven.node == 0


def test_candidate_rounds_are_the_shortest_that_links_carry() -> None:
    # A ring carries 2 * 7/8 * 20 MB of fp32 per sum over 0.125 GB/s: 2.8 steps, in int2 0.18.
    ring = 2 * 7 / 8 * 20e6 / GBIT / 0.1
    assert candidates.link_steps(Candidate("diloco", 0, False), FOUR) == pytest.approx(ring)
    assert candidates.plain("diloco", FOUR).rounds == candidates.ROUNDS[0]
    slow = replace(FOUR, links=[GBIT / 50] * 4)
    first = candidates.plain("diloco", slow)
    assert first.rounds == 16  # 8.75 steps in int2
    assert [each.rounds for each in candidates.variants("diloco", slow)] == [32, 64]
    assert "--diloco-steps 16 --diloco-outer-lr 1 --diloco-outer-momentum 0" in first.key
    assert candidates.plain("async-diloco", replace(FOUR, links=[1.0] * 4)).rounds == 64


def test_link_steps_follow_busiest_link() -> None:
    one = Candidate("aladdin-local", 1, False)
    # Host 0 receives six gradients of 0.16 s each; every other host sends two.
    assert candidates.link_steps(one, FOUR) == pytest.approx(6 * 0.16 / 0.1)
    slow = replace(FOUR, links=[10 * GBIT, GBIT, GBIT, GBIT / 10])
    assert candidates.link_steps(one, slow) == pytest.approx(2 * 1.6 / 0.1)
    spread = Candidate("aladdin-local", 4, True)
    assert candidates.link_steps(spread, FOUR) == pytest.approx(1.5 * 0.16 / 0.1)
    alone = ClusterTraits([1.0] * 4, [4], [GBIT], 20.0, 0.1)
    for each in (one, Candidate("ar-sgd", 0, False)):
        assert candidates.link_steps(each, alone) == 0


def test_candidate_names_reject_unknown_algorithm_and_too_few_workers() -> None:
    with pytest.raises(UserError, match=r"--algorithms: .*'alladin'"):
        candidates.names(["alladin"], 8)
    with pytest.raises(UserError, match=r"--algorithms: .*\b1 workers\b.*\bsgp\b"):
        candidates.names(["sgp"], 1)


# -- sample efficiency ---------------------------------------------------------------------
def test_measured_sample_efficiency_interpolates_table() -> None:
    rows = learning.table()["aladdin-ahead"]
    assert learning.measured("bsp", 500) == SampleEfficiency(1.0)
    assert learning.measured("aladdin-ahead", 8).value == rows[8].share
    between = learning.measured("aladdin-ahead", 12)
    assert rows[8].share < between.value < rows[16].share
    assert between.interval is not None and between.is_sure
    assert rows[8].low < between.interval[0] < between.value < between.interval[1] < rows[16].high
    assert re.search(r"\b8 workers \(2 seeds, 4,688 steps\b.*\b16 workers", between.source)
    assert learning.measured("asp", 12).interval is None  # one seed each
    assert not learning.measured("asp", 512).is_sure
    assert learning.measured("osgp", 8).value == learning.table()["osgp"][8].share
    assert not learning.measured("adsp", 8).is_sure


def test_sample_efficiency_above_one_requires_near_convergence() -> None:
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
    assert re.search(r"\b64 workers \(3 seeds, 98 steps\).*\b1\.00$", short.source)


def test_sample_efficiency_lead_counts_only_near_convergence() -> None:
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


def test_sample_efficiency_is_computed_from_two_loss_curves() -> None:
    base = [(float(samples), 2.0 - samples / 100) for samples in range(1, 101)]
    half = [(2 * samples, loss) for samples, loss in base]
    stuck = [(samples, max(loss, 1.5)) for samples, loss in base]
    assert learning.taught(base, base) == 1.0
    assert learning.taught(half, base) == pytest.approx(0.5)
    assert learning.taught(base, half) == pytest.approx(2.0)
    assert learning.taught(stuck, base) == pytest.approx(1.0)  # up to its last loss
    crawling = [(samples, 2.0 - samples / 400) for samples, _ in base]
    assert learning.taught(crawling, base) == pytest.approx(0.25)


def test_sample_efficiency_over_slow_links_is_that_of_the_setting() -> None:
    rows = learning.slow_links()
    fast = replace(FOUR, links=[100 * GBIT] * 4)
    ahead = candidates.plain("aladdin-ahead", fast)
    assert learning.efficiency(ahead, fast) == learning.measured("aladdin-ahead", 8)
    # Four servers: each host receives and sends 1.5 gradients.
    slow = replace(FOUR, links=[1.5 * 20e6 / (50 * 0.1)] * 4)
    for name in candidates.ADAPTIVE:
        found = learning.efficiency(candidates.plain(name, slow), slow)
        assert found.value == pytest.approx(rows[name][50].share) and found.is_sure
    diloco = candidates.plain("diloco", fast)
    assert learning.efficiency(diloco, fast).value == rows["diloco"][8].share
    sixteen = Candidate("diloco", 0, False, (("diloco.steps", 16),))
    assert (
        rows["diloco"][8].share
        > learning.efficiency(sixteen, fast).value
        > rows["diloco"][32].share
    )
    int4 = Candidate("ar-sgd", 0, False, (("wire", "int4"),))
    assert learning.efficiency(int4, fast).value == rows["ar-sgd int4"][1].share
    assert learning.efficiency(candidates.REFERENCE, slow) == SampleEfficiency(1.0)
    adsp = Candidate("adsp", 4, True)
    assert learning.efficiency(adsp, fast) == learning.UNMEASURED
    assert learning.efficiency(adsp, slow) == learning.UNMEASURED_SLOW
    gossip = Candidate("ad-psgd", 0, False)
    assert learning.efficiency(gossip, fast) == learning.measured("ad-psgd", 8)
    assert learning.efficiency(gossip, slow) == learning.UNMEASURED_SLOW


def test_sample_efficiency_over_slow_links_is_an_estimate_for_other_numbers_of_workers() -> None:
    many = ClusterTraits([1.0] * 64, [1] * 64, [GBIT] * 64, 20.0, 0.1)
    assert not learning.efficiency(candidates.plain("diloco", many), many).is_sure


def test_sample_efficiency_falls_gradually_as_links_saturate() -> None:
    each = []
    for megabytes in (1.0, 2.0, 4.0, 6.0, 6.5, 10.0, 20.0):
        on = ClusterTraits([1.0] * 8, [1] * 9, [GBIT] * 9, megabytes, 0.1)
        each.append(learning.efficiency(Candidate("aladdin-ahead", 1, False), on))
    values = [efficiency.value for efficiency in each]
    assert values == sorted(values, reverse=True)
    assert all(after > 0.5 * before for before, after in pairwise(values))
    assert not each[3].is_sure


@pytest.mark.parametrize("megabytes", [0.01, 1.0, 10.0, 100.0])
def test_every_candidate_has_a_sample_efficiency_on_any_links(megabytes: float) -> None:
    on = replace(FOUR, megabytes=megabytes)
    for name in candidates.names((), 8):
        for each in (candidates.plain(name, on), *candidates.variants(name, on)):
            assert 0 < learning.efficiency(each, on).value < 2


def test_pilot_is_converted_to_longer_rounds() -> None:
    slow = replace(FOUR, links=[GBIT / 50] * 4)
    first, *others = candidates.plain("diloco", slow), *candidates.variants("diloco", slow)
    piloted = SampleEfficiency(0.4, "pilot of 60 steps, 1 seed")
    assert learning.in_rounds_of(piloted, first, slow) == piloted
    table = learning.efficiency(first, slow).value
    for each in others:
        converted = learning.in_rounds_of(piloted, each, slow)
        expected = 0.4 * learning.efficiency(each, slow).value / table
        assert converted.value == pytest.approx(expected) and converted.value < 0.4
        assert not converted.is_sure and f"{first.rounds} steps per round" in converted.source


# -- bottlenecks -----------------------------------------------------------------------------
def timed(waiting: float, *links: LinkUse) -> TimedRun:
    result = tuple(sorted(links, key=lambda link: -link.used)) or (LinkUse(0, "out", 0.1),)
    return TimedRun(1000.0, waiting, result, 1e6)


def test_bottleneck_names_saturated_links_and_doubles_them() -> None:
    cluster = {"hosts": 4, "bandwidth_gbit": 8.0, "links": {3: 2.0}}
    full = timed(0.4, LinkUse(1, "in", 0.9), LinkUse(3, "in", 0.97), LinkUse(0, "in", 0.3))
    result = bottleneck.find(Candidate("asp", 2, True), full, FOUR, simulated(cluster=cluster))
    assert result.kind == "links" and re.search(r"\bhosts 1 and 3\b", result.text)
    assert result.relief == {"cluster.links": {3: 4.0, 1: 16.0}}
    everyone = timed(0.4, *(LinkUse(host, way, 0.95) for host in range(4) for way in ("in", "out")))
    result = bottleneck.find(Candidate("ar-sgd", 0, False), everyone, FOUR, simulated())
    assert re.search(r"\ball hosts\b.*\bboth directions\b.* 95 %", result.text)
    assert result.relief == {"cluster.bandwidth_gbit": 20.0}
    served = timed(0.4, LinkUse(0, "in", 0.95))
    result = bottleneck.find(Candidate("asp", 2, False), served, FOUR, simulated())
    assert re.search(r"\blink of host 0\b.*\binbound\b.*\bservers\b", result.text)
    result = bottleneck.find(Candidate("asp", 2, True), served, FOUR, simulated())
    assert "servers" not in result.text


def test_bottleneck_names_slowest_worker_waiting_or_computing() -> None:
    slow = ClusterTraits([1.0, 3.0, *[1.0] * 6], [2] * 4, [GBIT] * 4, 20.0, 0.1)
    result = bottleneck.find(Candidate("bsp", 1, False), timed(0.6), slow, simulated())
    assert (result.kind, result.relief) == ("slowest", {"slowdown": {}})
    assert re.match(r"worker 1\b.*\b3\b", result.text)
    result = bottleneck.find(Candidate("asp", 1, False), timed(0.3), slow, simulated())
    assert result.kind == "waiting" and "30 %" in result.text
    result = bottleneck.find(Candidate("aladdin", 1, False), timed(0.0), slow, simulated())
    assert (result.kind, result.relief) == ("computing", {})
    fast = TimedRun(7.4 / 0.1 * 32, 0.2, (LinkUse(0, "in", 0.95),), 1e6)
    result = bottleneck.find(Candidate("aladdin", 1, False), fast, slow, simulated(batch_size=32))
    assert (result.kind, result.relief) == ("computing", {})
    assert re.search(r"\blink of host 0\b", result.text)


# -- changes ---------------------------------------------------------------------------------
def test_what_if_changes_are_parsed() -> None:
    base = simulated(slowdown={1: 2.0})
    asked = ["bandwidth=100", "slowdown=0=10", "servers=4", "workers=16", "latency=0", "step=0.5"]
    result = [options.parse_change(text, base) for text in asked]
    assert result[0].fields == {"cluster.bandwidth_gbit": 100.0}
    assert result[1].fields == {"slowdown": {1: 2.0, 0: 10.0}}
    assert (result[2].servers, result[3].workers) == (4, 16)
    assert options.grown(base, 16)["cluster.hosts"] == 8
    assert options.grown(simulated(slowdown={7: 2.0}), 4)["slowdown"] == {}


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("bandwith=100", "NAME=VALUE.*bandwidth"),
        ("bandwidth", "NAME=VALUE"),
        ("bandwidth=fast", "1e-09 or more.*'fast'"),
        ("bandwidth=0", "number.*'0'"),
        ("servers=1.5", r"whole number.*'1\.5'"),
        ("slowdown=9=2", "0 to 7.*9"),
        ("slowdown=1", "1 or more.*''"),
    ],
)
def test_invalid_what_if_change_names_option_and_value(text: str, cause: str) -> None:
    with pytest.raises(UserError, match=f"--what-if.*{cause}"):
        options.parse_change(text, simulated())


class InThisProcess:
    """A pool that runs calls at once."""

    def __init__(self, count: int) -> None:
        pass

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    def close(self) -> None:
        pass


def test_error_of_the_simulation_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(candidate_search, "Processes", InThisProcess)
    model = ["--model", "size:4e-6", "--algorithms", "bsp", "--quiet"]
    file = tmp_path / "cluster.toml"
    file.write_text("hosts = 2\nworkers = 2\ncompute-time = 0.1\nfailures = {9 = 1.0}\n")
    with pytest.raises(UserError, match=r"^bsp, .*cannot be simulated: failures: .* 0 to 2, got 9"):
        advising.advise(options.read(["--cluster", str(file), *model]))
    request = options.read(["--describe", "2 nodes, step 0.1 s", *model])
    on = candidates.ground(request, 4e-6)
    search = CandidateSearch(request, on, "size:4e-6", lambda _: SampleEfficiency(1.0), print)
    one = Candidate("bsp", 1, False)
    trials = {"servers=1": one, "servers=2": replace(one, servers=2)}
    results = search.try_out({name: (each, request) for name, each in trials.items()}, steps=5)
    tried = [(options.Change(name, {}), results[name], "") for name in trials]
    entry = CandidateResult(one, 900.0, SampleEfficiency(1.0), short=timed(0.0))
    none = bottleneck.Bottleneck("computing", "", {}, "")
    advice = report.Advice(request, on, [entry], none, None, tried)
    refusal = "--servers: expected at most 1 for a model of 1 parameters, got 2"
    (text,) = report._changes(advice)
    assert re.search(rf"servers=1: \d.* samples/s .*\n- servers=2: .*simulated: {refusal}", text)
    first, second = report.as_data(advice)["what_if"]
    assert first["samples_per_second"] > 0 and "not_run" not in first
    assert second["samples_per_second"] is None and second["not_run"].startswith(refusal)


# -- figures -----------------------------------------------------------------------------------
def test_rate_of_excludes_start_and_end() -> None:
    moments = [*range(10, 110, 10), 300]  # the last samples are leased after 100 s
    lines = [
        {"kind": "train", "samples": min(100 * (i + 1), 1000), "seconds": float(moment)}
        for i, moment in enumerate(moments)
    ]
    assert rate_of(lines, {"samples": 1000, "samples_per_second": 3.3}) == pytest.approx(10.0)
    assert rate_of(lines[:1], {"samples": 1000, "samples_per_second": 3.3}) == 3.3


def test_waiting_excludes_start_and_end() -> None:
    """All wait for half of the first ten seconds, for a tenth afterwards, and at the end."""
    lines = [
        {
            "kind": "train",
            "samples": 100 * (place + 1),
            "seconds": 10.0 * (place + 1),
            "wait_fraction": (5 + place) / (10 * (place + 1)),
        }
        for place in range(10)
    ]
    assert waiting_of(lines, {"samples": 1000, "wait_fraction": 0.4}) == pytest.approx(0.1)
    assert waiting_of(lines[:1], {"samples": 1000, "wait_fraction": 0.4}) == 0.4


def test_variants_are_judged_by_their_own_sample_efficiency(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = options.read(["--describe", "4 nodes x 8 GPUs, 1 Gbit/s, step 0.2 s"])
    on = candidates.ground(request, 100.0)

    def share(candidate: Candidate) -> SampleEfficiency:
        return SampleEfficiency(1.0 if candidate.has_islands else 0.1)

    search = CandidateSearch(request, on, "size:100", share, lambda *_: None)
    search._entry(candidates.plain("aladdin-ahead", on)).short = timed(0.0)
    search._entry(candidates.plain("ar-sgd", on)).short = timed(0.0)
    tried: list[Candidate] = []
    monkeypatch.setattr(search, "_first", lambda chosen, pool: tried.extend(chosen))
    search._second(None)  # type: ignore[arg-type]
    assert any(each.algorithm == "aladdin-ahead" and each.has_islands for each in tried)


def test_timed_runs_have_several_exchanges() -> None:
    request = options.read(["--describe", "4 nodes x 1 GPU, 1 Gbit/s, step 0.1 s"])
    on = candidates.ground(request, 100.0)
    search = CandidateSearch(request, on, "size:100", lambda _: SampleEfficiency(1.0), print)
    for name, period in (("local-sgd", 8), ("diloco", 8), ("ashl", 13)):
        run = search.options(candidates.plain(name, on), 10)
        assert run.samples is not None and run.samples >= 4 * period * run.workers * run.batch_size


def test_entry_rate_is_capped_at_bound() -> None:
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


def test_scaling_knee_is_last_point_near_ideal() -> None:
    assert knee([(2, 2.0, 2.0), (4, 3.5, 4.0), (8, 5.0, 8.0)]) == 4
    assert knee([(2, 1.0, 2.0)]) is None


# -- memory and traffic -------------------------------------------------------------------
def test_memory_of_workers_is_that_of_the_gpu_guide() -> None:
    found = {
        (name, "" if wire == memory.DEFAULT else wire): models
        for name, of in memory.table().items()
        for wire, models in of.items()
    }
    text = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text(encoding="utf-8")
    guide = gpu_memory.guide_table(text)
    guide["aladdin-ahead", ""] = guide.pop(("aladdin-ahead", "int8"))
    for extra in ("DGC", "--node-sums", "--island 2"):
        guide = {key: models for key, models in guide.items() if key[1] != extra}
    assert found == guide


def test_memory_of_unmeasured_candidate_is_unknown() -> None:
    assert memory.worker_models(Candidate("bsp", 1, False), 4) == (3.0, 2.1)
    assert memory.worker_models(Candidate("bsp", 1, False, (("wire", "int8"),)), 4) == (5.1, 1.4)
    assert memory.worker_models(Candidate("shat", 1, False), 4) is None
    least = {
        ("shat", ""): 2.0,  # parameters and a gradient
        ("sgp", "bf16"): 3.0,  # as in fp32
        ("diloco", "int2"): 7.0,  # as with int4
        ("bsp", "int8"): 5.1,
    }
    for (name, wire), models in least.items():
        wires = (("wire", wire),) if wire else ()
        assert memory.least_models(Candidate(name, 0, False, wires), 4) == models
    assert memory.worker_models(Candidate("bsp", 1, False, (("island", "node"),)), 2) == (3.5, 4.05)


def test_memory_of_servers_grows_with_workers_and_is_divided_among_servers() -> None:
    of_one, of_more, of_two = (
        memory.server_models(Candidate("asp", servers, False), workers)
        for servers, workers in ((1, 2), (1, 4), (2, 4))
    )
    assert of_one is not None and of_more is not None and of_two is not None
    assert of_one < of_more
    of_all = read_table("server_memory.toml")["asp"]["undivided"]
    assert of_two - of_all == pytest.approx((of_more - of_all) / 2)
    assert memory.server_models(Candidate("ar-sgd", 0, False), 4) is None
    assert memory.server_models(Candidate("asp", 1, False, (("wire", "int8"),)), 4) is None


NODES = ["--describe", "2 nodes with 2 workers, 25 Gbit/s, step 0.2 s", "--model", "size:40"]


@pytest.mark.long
def test_candidates_without_enough_gpu_memory_are_left_out() -> None:
    """40 MB: aladdin-ahead needs 0.21 GB, in an island of two 0.18 GB, ar-sgd 0.14 GB."""
    words = ["--algorithms", "aladdin-ahead,ar-sgd", "--gpu-memory", "0.19", "--seconds", "30"]
    data = report.as_data(advising.advise(options.read([*NODES, *words, "--quiet"])))
    whys = {str(each["options"]): each.get("not_run") for each in data["candidates"]}
    large = {name for name, why in whys.items() if why == "needs more than --gpu-memory"}
    assert large == {each for each in whys if "aladdin-ahead" in each and "island" not in each}
    assert large and data["worker_memory_in_models"][0] * 0.04 <= 0.19


def test_gpus_without_memory_for_any_candidate_are_refused() -> None:
    words = ["--algorithms", "bsp", "--gpu-memory", "0.04", "--quiet"]
    with pytest.raises(UserError, match=naming("--gpu-memory", "fully_shard", "0.12 GB")):
        advising.advise(options.read([*NODES, *words]))


@pytest.mark.parametrize("words", [["--pilot", "300"], ["--lr", "0.1"]])
def test_options_of_training_require_a_trainable_model(words: list[str]) -> None:
    with pytest.raises(UserError, match=rf"^{words[0]} requires .* not size:40\. .*--model"):
        options.read([*NODES, *words])


# -- candidates without a simulation -----------------------------------------------------------
def test_faster_algorithms_without_time_are_named_with_the_recommendation() -> None:
    def entry(name: str, bound: float, timed: TimedRun | None, why_not: str) -> CandidateResult:
        candidate = Candidate(name, 1, False)
        return CandidateResult(
            candidate, bound, SampleEfficiency(1.0), short=timed, why_not=why_not
        )

    run = TimedRun(100.0, 0.0, (), 0.0)
    entries = [
        entry("bsp", 200.0, run, ""),
        entry("aladdin", 300.0, None, "no time"),
        entry("asp", 90.0, None, "no time"),  # cannot be faster
        entry("bsp", 300.0, None, "no time"),  # another variant has been simulated
        entry("ssp", 300.0, None, "cannot win"),
    ]
    assert report.untried_algorithms(entries) == ["aladdin"]
