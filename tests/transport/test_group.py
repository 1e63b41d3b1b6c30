"""Groups of ranks have separate messages, and every wait ends when a rank is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aladdin_mpi.allreduce.compressed import InOrder
from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.checksums import ChecksumTransport
from aladdin_mpi.transport.group import Group, RankLostError
from aladdin_mpi.transport.virtual.engine import VirtualCluster

SIZE = 5
TAG = 7
NEEDED = 0


def run(main: Callable[[Transport], Any], failures: dict[int, float] | None = None) -> list[Any]:
    return VirtualCluster(SIZE, Cluster(hosts=SIZE, failures=failures or {4: 1e9}), 0).run(main)


def group_of(
    transport: Transport, number: int = 1, needed: int = NEEDED, may_raise: bool = True
) -> Group:
    return Group(
        transport, range(SIZE), number, lambda rank: rank == needed, may_raise=lambda: may_raise
    )


def test_group_is_revoked_when_required_rank_fails() -> None:
    def main(transport: Transport) -> tuple[int, float] | None:
        group = group_of(transport)
        if group.rank == NEEDED:
            group.sleep(10.0)
            return None
        other = 1 + group.rank % (SIZE - 1)  # runs, but never sends
        request = group.irecv(torch.empty(1), other, TAG)
        with pytest.raises(RankLostError) as caught:
            group.wait(request)
        with pytest.raises(RankLostError):
            group.wait(group.irecv(torch.empty(1), other, TAG))
        assert group.is_revoked()
        return caught.value.rank, group.now()

    result = run(main, {NEEDED: 2.0})
    assert result[1:] == [(NEEDED, 2.0)] * (SIZE - 1)


def test_failure_of_optional_rank_ends_only_its_own_waits() -> None:
    def main(transport: Transport) -> str:
        group = group_of(transport)
        if group.rank == 3:
            group.sleep(10.0)
        with pytest.raises(PeerFailedError, match="rank 3"):
            group.wait(group.irecv(torch.empty(1), 3, TAG))
        assert not group.is_revoked()
        return "continued"

    assert run(main, {3: 2.0}).count("continued") == SIZE - 1


@pytest.mark.parametrize("checksums", [False, True])
def test_group_wait_ends_without_error_in_user_code(checksums: bool) -> None:
    def main(transport: Transport) -> int | None:
        group: Transport = group_of(transport, may_raise=False)
        if checksums:
            group = ChecksumTransport(group, {TAG}, lambda source, tag: None)
        if group.rank == NEEDED:
            group.sleep(10.0)
            return None
        requests = [group.irecv(torch.empty(1), NEEDED, TAG), group.irecv(torch.empty(1), 1, TAG)]
        first = group.wait_any(requests)
        assert group.test(requests[0])
        assert group.wait_any(requests[1:]) == 0  # the other rank runs, but never sends
        return first

    assert set(run(main, {NEEDED: 2.0})[1:]) == {0}


def test_queued_collective_ends_without_error_in_user_code() -> None:
    """It cannot start: those before it never end, as the group is revoked."""

    def main(transport: Transport) -> bool | None:
        group = group_of(transport, number=2, may_raise=False)
        if group.rank == NEEDED:
            group.sleep(10.0)
            return None
        order, mine, all_of_them = InOrder(group), torch.empty(10), torch.empty(10 * SIZE)
        queued = [order.put(lambda: group.iallgather(mine, all_of_them), None) for _ in range(9)]
        return order.wait(queued[-1])

    assert run(main, {NEEDED: 2.0})[1:] == [False] * (SIZE - 1)


def test_group_ignores_messages_of_previous_group() -> None:
    def main(transport: Transport) -> tuple[float, list[float]]:
        merged, heard = group_of(transport), list[float]()
        merged.on_message(TAG + 1, 4, lambda _, message: heard.append(message.numel()))
        if merged.rank == 1:
            for tag in (TAG, TAG + 1):
                merged.isend(torch.ones(1), 2, tag)
            merged.isend(torch.ones(1 << 20), 2, TAG)  # stays in transit
        merged.leave()
        group = group_of(transport, 2)
        if group.rank == 1:
            group.isend(torch.full((1,), 5.0), 2, TAG)
        value = torch.zeros(1)
        if group.rank == 2:
            group.wait(group.irecv(value, 1, TAG))
        group.sleep(1.0)
        return value.item(), heard

    assert run(main)[2] == (5.0, [])


@pytest.mark.parametrize("length", [1, 7, 40_000])
def test_group_collectives_run_among_its_members(length: int) -> None:
    members = [1, 3, 4]

    def main(transport: Transport) -> dict[str, Any] | None:
        if transport.rank not in members:
            return None
        group = Group(transport, members, 2, lambda rank: False)
        group.sleep(0.001 * group.rank)
        mine = torch.arange(length, dtype=torch.float32) + 10 * group.rank
        summed, gathered = mine.clone(), torch.empty(3 * length)
        received = torch.empty(3)
        told = torch.full((2,), float(group.rank))
        group.wait(
            group.iallreduce(summed),
            group.iallgather(mine, gathered),
            group.ialltoall(torch.tensor([1.0, 2.0, 3.0]) + group.rank, received),
            group.ibroadcast(told, 2),
            group.ibarrier(),
        )
        return {"sum": summed, "all": gathered, "each": received, "told": told}

    result = [each for each in run(main) if each is not None]
    numbers = torch.arange(length, dtype=torch.float32)
    for place, each in enumerate(result):
        assert torch.equal(each["sum"], 3 * numbers + 30)
        assert torch.equal(each["all"], torch.cat([numbers + 10 * rank for rank in range(3)]))
        assert each["each"].tolist() == [1.0 + place + rank for rank in range(3)]
        assert each["told"].tolist() == [2.0, 2.0]


def test_group_ranks_are_numbered_by_position() -> None:
    def main(transport: Transport) -> tuple[int, list[int], int] | None:
        if transport.rank in (0, 4):
            return None
        group = Group(transport, [3, 1, 2], 1, lambda rank: False)
        lost: list[int] = []
        group.on_failure(lost.append)
        group.sleep(5.0)
        return group.rank, lost, group.original_ranks[0]

    assert run(main, {2: 2.0, 4: 1.0})[1] == (1, [2], 3)
