"""``sleep_between`` of the virtual engine equals a plain loop of sleeps and calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.base import Request, sleep_and_call
from aladdin_mpi.transport.virtual.engine import VirtualCluster, VirtualTransport

MOMENTS = [0.1, 0.1, 0.05, 0.4, 1.0]
MANY = [0.001, 0.002, 0.011, 0.012, 0.013, 0.0135, 0.1, 0.05, 0.4]
Events = list[tuple[float, int, int]]
CLUSTERS = [
    Cluster(hosts=2),
    Cluster(hosts=2, delay_us=300.0, pauses=((1, 0.05, 0.2), (2, 0.3, 0.5))),
    Cluster(hosts=2, failures={2: 0.2}),
]


def run(cluster: Cluster, action: Callable[[VirtualTransport, int], None], seed: int) -> Events:
    """Return the events of all ranks, with their times."""
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


@pytest.mark.sample(8)
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("action", [send, block])
@pytest.mark.parametrize("seed", range(4))
def test_sleep_between_equals_loop_of_sleeps_and_calls(
    cluster: Cluster,
    action: Callable[[VirtualTransport, int], None],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = run(cluster, action, seed)
    monkeypatch.setattr(VirtualTransport, "sleep_between", sleep_and_call)
    assert found == run(cluster, action, seed)
    assert len(found) > 60


def test_error_in_call_is_raised_in_sleeping_rank() -> None:
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


def test_uncaught_error_in_call_names_rank() -> None:
    def main(transport: VirtualTransport) -> None:
        def fail(index: int) -> None:
            assert transport.rank != 1, "on purpose"

        transport.sleep_between([1.0], fail)
        transport.sleep(1.0)

    with pytest.raises(AssertionError, match="on purpose") as caught:
        VirtualCluster(3, Cluster()).run(main)
    assert "raised by rank 1" in caught.value.__notes__


def test_rank_failing_in_call_is_unwound() -> None:
    left = []

    def main(transport: VirtualTransport) -> None:
        try:
            transport.sleep_between([0.1, 1.0], lambda index: transport.sleep(5.0))
        finally:
            left.append((transport.rank, transport.now()))

    VirtualCluster(2, Cluster(failures={1: 0.5})).run(main)
    assert left == [(1, 0.5), (0, 10.1)]


def test_calls_keep_grad_mode_of_their_rank() -> None:
    modes = []

    def main(transport: VirtualTransport) -> None:
        with torch.set_grad_enabled(transport.rank == 0):
            transport.sleep_between(
                [0.1, 0.2], lambda index: modes.append((transport.rank, torch.is_grad_enabled()))
            )

    VirtualCluster(2, Cluster()).run(main)
    assert sorted(modes) == [(0, True), (0, True), (1, False), (1, False)]


@pytest.mark.parametrize("pauses", [(), ((1, 0.05, 0.2), (2, 0.3, 0.5))])
@pytest.mark.parametrize("seed", range(3))
def test_skipping_idle_calls_does_not_change_events(
    pauses: tuple[tuple[int, float, float], ...], seed: int
) -> None:
    """Each rank sends as soon as its last message has been sent."""

    def run_with(leaves_out: bool) -> tuple[Events, int]:
        events: Events = []
        calls = 0

        def main(transport: VirtualTransport) -> None:
            sends: list[Request] = []

            def act(index: int) -> None:
                nonlocal calls
                calls += 1
                if not sends or transport.test(sends[-1]):
                    values = torch.zeros((1 + transport.rank) << 20, device="meta")
                    sends.append(transport.isend(values, (transport.rank + 1) % 4, 0))
                    events.append((transport.now(), transport.rank, index))

            def idle_until() -> Sequence[Request] | None:
                return None if not sends or sends[-1].done else sends[-1:]

            receives = [
                transport.irecv(torch.empty(1 << 22, device="meta"), (transport.rank - 1) % 4, 0)
                for _ in range(3 * len(MANY))
            ]
            for _ in range(3):
                own = 1 + transport.rank / 100  # no simultaneous events in random order
                moments = [transport.now() + own * each for each in MANY]
                transport.sleep_between(moments, act, idle_until if leaves_out else None)
                events.append((transport.now(), transport.rank, -1))
            for receive in receives:
                transport.cancel(receive)

        VirtualCluster(4, Cluster(hosts=2, pauses=pauses), seed).run(main)
        return events, calls

    (found, few), (expected, all_calls) = run_with(True), run_with(False)
    assert sorted(found) == sorted(expected)
    assert all_calls == 3 * 4 * len(MANY) and few < all_calls


def test_idle_rank_is_not_called() -> None:
    calls: list[int] = []

    def main(transport: VirtualTransport) -> None:
        transport.sleep_between([0.1, 0.5, 2.0], calls.append, lambda: ())
        assert transport.now() == 2.0

    VirtualCluster(2, Cluster()).run(main)
    assert not calls


def test_call_that_outlasts_schedule_skips_remaining_calls() -> None:
    """Rank 1 receives the message at 3 s, so rank 0 is idle before that, and again afterwards."""

    def main(transport: VirtualTransport) -> None:
        if transport.rank:
            transport.sleep(0.15)
            transport.wait(transport.irecv(torch.empty(1 << 20), 0, 0))
            return
        send = transport.isend(torch.zeros(1 << 20), 1, 0)
        calls: list[tuple[int, float]] = []

        def act(index: int) -> None:
            calls.append((index, transport.now()))
            transport.sleep(5.0)

        def idle_until() -> Sequence[Request] | None:
            if not send.done:
                return [send]
            return () if calls else None

        transport.sleep_between([0.1, 0.5, 1.0, 2.0], act, idle_until)
        assert calls == [(1, 0.5)] and transport.now() == 5.5

    VirtualCluster(2, Cluster()).run(main)


def test_error_in_idle_report_names_rank() -> None:
    def main(transport: VirtualTransport) -> None:
        def fail() -> Sequence[Request] | None:
            raise KeyError("on purpose")

        transport.sleep_between([1.0], lambda index: None, fail)

    with pytest.raises(KeyError) as caught:
        VirtualCluster(2, Cluster()).run(main)
    assert caught.value.__notes__[0].startswith("raised by rank")
