"""Property tests of the elasticity machine: thousands of schedules, without MPI and without torch.

A failed test names the seed, which replays the schedule (:mod:`.elasticity_schedules`).
``ALADDIN_MPI_SCHEDULES=500`` runs 25 times as many schedules.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass

import pytest

from aladdin_mpi.hooks.standby import standby_coordinator
from aladdin_mpi.run.elasticity import (
    AwaitJoin,
    ElasticityMachine,
    FormGroup,
    GroupRevoked,
    JoinArrived,
    JoinRendezvous,
    JoinTimedOut,
    RanksLost,
    TakeoverPlan,
    WaitForPlace,
    begin,
    next_membership,
    plan_takeover,
)
from tests.run.elasticity_schedules import check_schedule, facts

SCHEDULES = int(os.environ.get("ALADDIN_MPI_SCHEDULES", "20"))
BLOCKS = 20
PER_BLOCK = 10 * SCHEDULES
"""Schedules per test: 20 blocks of 200."""


@pytest.mark.parametrize("block", range(BLOCKS))
def test_elasticity_survives_failures_at_any_moment(block: int) -> None:
    """Surviving ranks reach one decision, and the run ends only if no group can be formed."""
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        check_schedule(seed)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_hanging_ranks_are_excluded(block: int) -> None:
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        check_schedule(seed, hangs=True)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_islands_fail_as_a_whole(block: int) -> None:
    """The surviving islands reach one decision; members of a failed one leave the run."""
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        hangs = seed % 2 == 1
        simulation = check_schedule(seed, hangs, island=2)
        if simulation.ended is None and not hangs:
            assert simulation.surviving == simulation.taking_part, seed


@dataclass
class Segment:
    """A group's segment when it is revoked, and the facts of the remaining ranks."""

    plan: TakeoverPlan
    granted: list[int]
    computed: list[int]


STEP = 4


def segment(seed: int) -> Segment:
    """Draw a segment: every worker has computed some of its leased samples."""
    r = random.Random(seed)
    servers, workers = r.choice([0, 1, 2]), r.randint(2, 5)
    first = begin(servers + workers, servers, 0)
    began_at = 100 * r.randint(0, 3)
    granted, computed = [0] * servers, [0] * servers
    for _ in range(workers):
        leases = [STEP] * r.randint(0, 6)
        granted.append(sum(leases))
        computed.append(STEP * r.randint(0, len(leases)))
    while True:
        lost = set(r.sample(first.ranks, r.randint(1, len(first.ranks) - 1)))
        if set(first.ranks[servers:]) - lost and len(first.ranks) - len(lost) > (servers > 0):
            break
    members = next_membership(first, set(first.ranks) - lost)
    is_stale = r.random() < 0.2
    budget = {
        "opened": began_at - 50 * is_stale,
        "granted": granted,
        "computed": computed,
        "passed_over": r.choice([0, 0, 7]),
    }
    accounting = {"seconds": 1.0, "budget": budget}
    taken = [each // STEP for each in computed[servers:]]
    reported = {
        rank: {
            **facts(rank, first, began_at),
            "computed": computed[rank],
            "taken": taken if rank < servers else None,
            "not_given": [0] * workers if rank < servers else None,
            "keeper": accounting,
        }
        for rank in members.ranks
    }
    return Segment(TakeoverPlan(members, 1, first.ranks, reported), granted, computed)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_sample_is_computed_leased_again_or_counted_as_lost(block: int) -> None:
    """Each leased sample is in exactly one of these states."""
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        drawn = segment(seed)
        plan, budget = drawn.plan, drawn.plan.accounting["budget"]
        by_survivors = sum(drawn.computed[rank] for rank in plan.members.ranks)
        by_lost = sum(drawn.computed[rank] for rank in plan.lost)
        lost = sum(plan.losses(STEP).values())
        assert all(samples >= 0 for samples in plan.losses(STEP).values())
        if budget["opened"] != plan.segment:  # the copy of an earlier segment
            assert (plan.drawn, lost) == (plan.segment + by_survivors, 0), seed
            continue
        granted_again = sum(drawn.granted) - by_survivors - by_lost - lost
        assert granted_again >= 0, seed
        assert plan.drawn == plan.segment + budget["passed_over"] + by_survivors + by_lost + lost


def test_every_gradient_is_applied_or_counted_as_lost() -> None:
    """Gradients that surviving workers have computed and servers have not applied count as lost."""
    for seed in range(PER_BLOCK):
        r, plan = random.Random(seed), segment(seed).plan
        computed, from_failed = r.randint(0, 50), r.randint(0, 10)
        applied = r.randint(0, computed + from_failed)
        assert plan.gradients_lost(computed, from_failed, applied) + applied == (
            computed + from_failed
        )
        assert plan.gradients_lost(computed, from_failed, computed + from_failed + 1) == 0


# -- single rules -----------------------------------------------------------------------
def test_leaders_with_different_memberships_agree() -> None:
    """Rank 0 failed after rank 4 had received its announcement and before rank 1 had."""
    first = begin(5, 1, 2)
    second = next_membership(first, {0, 1, 4})
    assert second.ranks == (0, 1, 4)
    leaders = []
    for rank, members in ((1, first), (4, second)):
        machine = ElasticityMachine(rank, 5, members)
        machine.note_lost({0, 2, 3})
        (join_or_lead, *_) = machine.handle(GroupRevoked(None))
        leader = join_or_lead.leader if isinstance(join_or_lead, JoinRendezvous) else rank
        leaders.append(leader)
    assert leaders == [1, 1]


def test_group_setup_requires_every_member() -> None:
    first = begin(4, 1, 0)
    machine = ElasticityMachine(1, 4, first)
    machine.complete_setup()
    assert [machine.needs(place) for place in range(4)] == [True, False, False, False]
    machine.handle(RanksLost(frozenset({0, 2})))
    machine.handle(GroupRevoked(facts(1, first, 0)))
    (formed,) = [
        each
        for each in machine.handle(JoinArrived(3, first, facts(3, first, 0)))
        if isinstance(each, FormGroup)
    ]
    assert formed.plan.members.ranks == (1, 3)
    assert [machine.needs(place) for place in range(2)] == [True, True]


def test_previous_group_state_is_kept_until_training_starts() -> None:
    """A rank that completed a set-up that others did not falls back to the previous group."""
    first = begin(3, 0, 0)
    second = next_membership(first, {0, 1, 2})
    third = next_membership(second, {0, 1})
    of_first = {rank: facts(rank, first, 10) for rank in (0, 1)}
    newer = {**facts(1, second, 20), "previous": of_first[1]}
    plan = plan_takeover(third, {0: of_first[0], 1: newer})
    assert plan is not None and (plan.number, plan.segment) == (1, 10)
    newer_of_0 = {**facts(0, second, 20), "previous": of_first[0]}
    plan = plan_takeover(third, {0: newer_of_0, 1: newer})
    assert plan is not None and (plan.number, plan.segment) == (2, 20)


def test_rank_in_long_step_is_not_excluded() -> None:
    first = begin(3, 0, 0)
    machine = ElasticityMachine(0, 3, first)
    machine.complete_setup()
    machine.handle(RanksLost(frozenset({2})))
    machine.handle(GroupRevoked(facts(0, first, 0)))
    machine.coming.add(1)
    assert machine.handle(JoinTimedOut(1)) == (AwaitJoin(1),)


def test_spare_rank_waits_until_a_member_fails() -> None:
    machine = ElasticityMachine(2, 3, begin(3, 0, 1))
    assert machine.handle(RanksLost(frozenset())) == (WaitForPlace(machine.members),)
    (join,) = machine.handle(RanksLost(frozenset({1})))
    assert join == JoinRendezvous(0, machine.members, {})


def test_standby_coordinator_is_on_another_host() -> None:
    assert standby_coordinator([0, 1, 2, 3], [0, 0, 1, 1]) == 2
    assert standby_coordinator([0, 1, 3], [0, 0, 1, 1]) == 3
    assert standby_coordinator([0, 1], [0, 0, 1, 1]) == 1
    assert standby_coordinator([0, 1, 2, 3], [0, 0, 0, 0], mates=[1]) == 2
    assert standby_coordinator([0, 1], [0, 0], mates=[1]) is None
    assert standby_coordinator([0], [0, 0]) is None


def test_elasticity_machine_imports_neither_torch_nor_mpi() -> None:
    code = (
        "import sys, aladdin_mpi.run.elasticity\n"
        "print([n for n in sys.modules if n in ('torch', 'mpi4py') or 'transport' in n])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "aladdin" not in run.stdout and "torch" not in run.stdout and "mpi4py" not in run.stdout
