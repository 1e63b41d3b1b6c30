"""Membership of the next group after ranks have failed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from unittest.mock import Mock

import pytest

from aladdin_mpi.errors import LostError, PeerFailedError
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.run import elasticity_driver
from aladdin_mpi.run.elasticity import (
    ElasticityMachine,
    FormGroup,
    GroupRevoked,
    Membership,
    RankFacts,
    WaitForPlace,
    begin,
    next_membership,
)
from aladdin_mpi.run.elasticity_driver import ElasticityDriver
from aladdin_mpi.transport.base import Request, Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.messages import naming

SERVERS, SPARES, SIZE = 2, 2, 8


@pytest.mark.parametrize(
    ("lost", "servers", "workers", "spares"),
    [
        ({3}, (0, 1), (2, 4, 5, 6), (7,)),  # a spare takes a worker's place
        ({0}, (1, 6), (2, 3, 4, 5), (7,)),  # and a server's
        ({0, 1}, (6, 7), (2, 3, 4, 5), ()),
        ({0, 1, 6, 7}, (2,), (3, 4, 5), ()),  # without spares, a worker becomes a server
        ({0, 3, 4, 7}, (1,), (2, 5, 6), ()),  # workers first, as long as a server remains
        ({6, 7}, (0, 1), (2, 3, 4, 5), ()),
    ],
)
def test_spares_and_workers_replace_failed_servers_and_workers(
    lost: set[int], servers: tuple[int, ...], workers: tuple[int, ...], spares: tuple[int, ...]
) -> None:
    before = begin(SIZE, SERVERS, SPARES)
    after = next_membership(before, set(range(SIZE)) - lost)
    assert after.ranks[: after.servers] == servers
    assert after.ranks[after.servers :] == workers
    assert (after.spares, after.number) == (spares, 2)


def test_vacant_roles_are_filled_by_remaining_spares() -> None:
    before = Membership(4, (1, 2), 1, (5,), (2, 2))
    after = next_membership(before, {1, 2, 5})
    assert (after.ranks, after.servers) == ((1, 2, 5), 1)


@pytest.mark.parametrize("lost", [{2, 3, 4, 5, 6, 7}, {0, 1, 2, 3, 4, 6, 7}])
def test_too_few_surviving_ranks_raise_error(lost: set[int]) -> None:
    with pytest.raises(LostError, match=naming("too few", f"{min(lost)}, ")):
        next_membership(begin(SIZE, SERVERS, SPARES), set(range(SIZE)) - lost)


def test_next_coordinator_is_lowest_surviving_rank_without_servers() -> None:
    after = next_membership(begin(4, 0, 0), {1, 3})
    assert (after.ranks, after.servers) == ((1, 3), 0)


@pytest.mark.parametrize("seed", range(20))
def test_surviving_ranks_agree_on_the_next_group_despite_further_failures(seed: int) -> None:
    """Also if the first rank of the next group fails while it announces the members."""
    latency = 1e-3
    moments = {0: 0.0, 1: 1e-9 + latency * (0.5 + seed / 4), 5: latency * seed / 5}
    cluster = Cluster(hosts=SIZE, latency_us=1e6 * latency, failures=moments)

    before = begin(SIZE, SERVERS, SPARES)

    def facts_of(rank: int) -> RankFacts:
        if rank in before.spares:
            return {"rank": rank}
        part = {"group": 1, "ranks": [*before.ranks], "origin": {"servers": SERVERS}}
        return {"rank": rank, "keeper": {}, **part}

    def agree(transport: Transport) -> FormGroup | WaitForPlace:
        machine = ElasticityMachine(transport.rank, SIZE, before)
        driver = ElasticityDriver(transport, machine)
        transport.sleep(1e-6 * transport.rank)
        decision = driver.decide(GroupRevoked(facts_of(transport.rank)))
        for pause in (0.0, 1.0):
            transport.sleep(pause)
            while set(machine.members.ranks) & transport.failed:  # detected at the first message
                decision = driver.decide(driver.lost() if machine.is_spare else GroupRevoked(None))
        assert isinstance(decision, FormGroup | WaitForPlace)
        return decision

    outcomes = VirtualCluster(SIZE, cluster, seed).run(agree)
    decisions = [each for each in outcomes if each is not None]
    assert len(decisions) == SIZE - len(moments)
    plans = [each.plan for each in decisions if isinstance(each, FormGroup)]
    spares = [each.members for each in decisions if isinstance(each, WaitForPlace)]
    assert {*spares, *(plan.members for plan in plans)} == {plans[0].members}
    assert not set(moments) & set(plans[0].members.ranks)
    for rank in plans[0].members.ranks:
        assert plans[0].facts[rank]["rank"] == rank


def test_rendezvous_restarts_if_an_operation_detects_leader_failure_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = begin(3, 1, 0)
    facts = {
        rank: {
            "rank": rank,
            "keeper": {},
            "group": 1,
            "ranks": [0, 1, 2],
            "origin": {"servers": 1},
        }
        for rank in (1, 2)
    }
    leaders = []

    def receive(base: Transport, leader: int, tag: int, wake: Request | None) -> dict[str, Any]:
        leaders.append(leader)
        if leader == 0:
            raise PeerFailedError(0, "host")
        return {"members": asdict(next_membership(before, {1, 2})), "facts": facts}

    monkeypatch.setattr(elasticity_driver, "send_object", lambda *_: [])
    monkeypatch.setattr(elasticity_driver, "receive_object", receive)
    base = Mock(rank=2, size=3, failed=frozenset(), excluded=frozenset())
    driver = ElasticityDriver(base, ElasticityMachine(2, 3, before))
    decision = driver.decide(GroupRevoked(facts[2]))
    assert leaders == [0, 1]
    assert isinstance(decision, FormGroup)
