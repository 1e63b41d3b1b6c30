"""Calls on behalf of ranks that sleep: as a plain loop of sleeps and calls makes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.cluster import Cluster
from aladdin_mpi.transport.virtual.engine import VirtualCluster, VirtualTransport

MOMENTS = [0.1, 0.1, 0.05, 0.4, 1.0]
PLAIN = Transport.sleep_between
Events = list[tuple[float, int, int]]
CLUSTERS = [
    Cluster(hosts=2),
    Cluster(hosts=2, delay_us=300.0, pauses=((1, 0.05, 0.2), (2, 0.3, 0.5))),
    Cluster(hosts=2, deaths={2: 0.2}),
]


def run(cluster: Cluster, action: Callable[[VirtualTransport, int], None], seed: int) -> Events:
    """What happened when on which rank."""
    events: Events = []

    def main(transport: VirtualTransport) -> None:
        def noted(index: int) -> None:
            events.append((transport.now(), transport.rank, index))
            action(transport, index)
            events.append((transport.now(), transport.rank, ~index))

        for _ in range(3):
            transport.sleep_between([transport.now() + each for each in MOMENTS], noted)
            events.append((transport.now(), transport.rank, 100))

    VirtualCluster(4, cluster, seed).run(main)
    return events


def send(transport: VirtualTransport, index: int) -> None:
    transport.isend(torch.zeros(1 << 20), (transport.rank + 1) % 4, index)


def block(transport: VirtualTransport, index: int) -> None:
    if index % 2 == transport.rank % 2:
        transport.sleep(0.03)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("action", [send, block])
@pytest.mark.parametrize("seed", range(4))
def test_they_are_a_loop_of_sleeps(
    cluster: Cluster,
    action: Callable[[VirtualTransport, int], None],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = run(cluster, action, seed)
    monkeypatch.setattr(VirtualTransport, "sleep_between", PLAIN)
    assert found == run(cluster, action, seed)
    assert len(found) > 60


def test_an_error_is_raised_where_the_rank_sleeps() -> None:
    seen = []

    def main(transport: VirtualTransport) -> None:
        def fail(index: int) -> None:
            if index == 2:
                raise KeyError(transport.rank)

        try:
            transport.sleep_between([1.0, 2.0, 3.0, 4.0], fail)
        except KeyError as error:
            seen.append((transport.now(), transport.rank, error.args))

    VirtualCluster(2, Cluster()).run(main)
    assert sorted(seen) == [(3.0, 0, (0,)), (3.0, 1, (1,))]


def test_an_error_that_nobody_catches_names_the_rank() -> None:
    def main(transport: VirtualTransport) -> None:
        def fail(index: int) -> None:
            assert transport.rank != 1, "on purpose"

        transport.sleep_between([1.0], fail)
        transport.sleep(1.0)

    with pytest.raises(AssertionError, match="on purpose") as caught:
        VirtualCluster(3, Cluster()).run(main)
    assert "raised by rank 1" in caught.value.__notes__


def test_a_rank_that_dies_in_a_call_is_unwound() -> None:
    left = []

    def main(transport: VirtualTransport) -> None:
        try:
            transport.sleep_between([0.1, 1.0], lambda index: transport.sleep(5.0))
        finally:
            left.append((transport.rank, transport.now()))

    VirtualCluster(2, Cluster(deaths={1: 0.5})).run(main)
    assert left == [(1, 0.5), (0, 10.1)]


def test_a_rank_without_gradients_keeps_to_that_in_its_calls() -> None:
    modes = []

    def main(transport: VirtualTransport) -> None:
        with torch.set_grad_enabled(transport.rank == 0):
            transport.sleep_between(
                [0.1, 0.2], lambda index: modes.append((transport.rank, torch.is_grad_enabled()))
            )

    VirtualCluster(2, Cluster()).run(main)
    assert sorted(modes) == [(0, True), (0, True), (1, False), (1, False)]


@pytest.mark.parametrize("cluster", CLUSTERS[:2])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_else_changes_where_idle_calls_are_left_out(cluster: Cluster, seed: int) -> None:
    """Each rank has something to do at every other moment, and sends then."""

    def run_with(leaves_out: bool) -> tuple[Events, int]:
        events: Events = []
        calls = 0

        def main(transport: VirtualTransport) -> None:
            turn = transport.rank

            def act(index: int) -> None:
                nonlocal calls
                calls += 1
                if (index + transport.rank) % 2:
                    transport.isend(torch.zeros(1 << 20), (transport.rank + 1) % 4, 0)

            def is_idle() -> bool:
                nonlocal turn
                turn += 1
                return not (turn - 1) % 2

            for _ in range(2):
                turn = transport.rank
                moments = [transport.now() + each for each in MOMENTS]
                transport.sleep_between(moments, act, is_idle if leaves_out else None)
                events.append((transport.now(), transport.rank, transport.traffic.messages_sent))
                done = transport.irecv(torch.empty(1 << 20), (transport.rank - 1) % 4, 0)
                transport.wait(done)
                events.append((transport.now(), transport.rank, -1))

        VirtualCluster(4, cluster, seed).run(main)
        return events, calls

    (found, few), (expected, all_calls) = run_with(True), run_with(False)
    assert found == expected
    assert all_calls == 2 * 4 * len(MOMENTS) and few < all_calls


def test_an_error_of_who_says_what_is_idle_names_the_rank() -> None:
    def main(transport: VirtualTransport) -> None:
        def fail() -> bool:
            raise KeyError("on purpose")

        transport.sleep_between([1.0], lambda index: None, fail)

    with pytest.raises(KeyError) as caught:
        VirtualCluster(2, Cluster()).run(main)
    assert caught.value.__notes__[0].startswith("raised by rank")
