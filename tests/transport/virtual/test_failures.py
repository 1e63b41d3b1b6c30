"""The virtual engine when ranks raise errors, fail or pause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from greenlet import greenlet

from aladdin_mpi.errors import PeerFailedError, TransportError, UserError
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.base import ANY_SOURCE, Request
from aladdin_mpi.transport.virtual.engine import DeadlockError, VirtualCluster, VirtualTransport
from aladdin_mpi.transport.virtual.messages import QUANTUM
from tests.virtual_lab import LATENCY, OVERHEAD, PIECE, Main, lab, meta, run


# -- errors reported to ranks --------------------------------------------------------
def test_deadlock_names_every_rank_and_what_it_waits_for() -> None:
    def main(t: VirtualTransport) -> None:
        if t.rank == 0:
            t.wait(t.irecv(torch.empty(10), 1, 7))
        elif t.rank == 1:
            t.wait_any([t.irecv(torch.empty(1), ANY_SOURCE, tag) for tag in range(20)])
        elif t.rank == 2:
            t.wait(t.ibarrier())

    with pytest.raises(DeadlockError) as caught:
        run(4, main)
    text = str(caught.value)
    assert "rank 0 waits for <receive of up to 40 bytes from rank 1, tag 7: pending>" in text
    assert "rank 1 waits for <receive of up to 4 bytes from any rank, tag 0: pending>" in text
    assert "and 16 more" in text
    assert "rank 2 waits for <barrier: pending>" in text
    assert "rank 3" not in text


def test_deadlock_names_operations_of_request_set() -> None:
    def main(t: VirtualTransport) -> None:
        if t.rank == 0:
            awaited = t.wait_set()
            for tag in range(6):
                awaited.put(tag, t.irecv(torch.empty(1), 1, tag))
            awaited.wait()

    with pytest.raises(DeadlockError, match="from rank 1, tag 3: pending> and 2 more"):
        run(2, main)


def test_request_set_raises_failure_of_peer_in_order() -> None:
    def main(t: VirtualTransport) -> list[object]:
        if t.rank:
            t.wait(t.isend(torch.ones(1), 0, 0))
            t.sleep(10.0)
            return []
        awaited = t.wait_set()
        for rank in (1, 2):
            awaited.put(rank, t.irecv(torch.empty(1), rank, 0))
        found: list[object] = []
        for _ in range(2):
            name = awaited.wait()
            assert name is not None
            found.append(name)
            awaited.put(name, t.irecv(torch.empty(1), name, 0))
        with pytest.raises(PeerFailedError) as caught:
            awaited.wait()
        return [*sorted(map(str, found)), caught.value.rank, t.now()]

    assert run(3, main, lab(2, failures={1: 3.0}))[0] == ["1", "2", 1, 3.0]


def test_unmatched_large_send_is_a_deadlock() -> None:
    def main(t: VirtualTransport) -> None:
        if t.rank == 0:
            t.wait(t.isend(meta(100_000), 1, 3))

    with pytest.raises(DeadlockError, match="send of 100000 bytes to rank 1, tag 3"):
        run(2, main)


def test_exception_on_one_rank_ends_run_and_unwinds_other_ranks() -> None:
    unwound: list[int] = []

    def main(t: VirtualTransport) -> None:
        if t.rank == 2:
            t.sleep(1.0)
            raise KeyError("broken")
        try:
            t.wait(t.ibarrier())
        finally:
            unwound.append(t.rank)

    with pytest.raises(KeyError, match="broken") as caught:
        run(4, main)
    assert caught.value.__notes__ == ["raised by rank 2"]
    assert unwound == [0, 1, 3]


def test_exception_in_handler_names_its_rank() -> None:
    def main(t: VirtualTransport) -> None:
        t.on_message(0, 8, lambda source, _: [][source])
        if t.rank == 0:
            t.isend(torch.zeros(1), 1, 0)
        t.sleep(1.0)

    with pytest.raises(IndexError) as caught:
        run(2, main)
    assert caught.value.__notes__ == ["raised by rank 1"]


@pytest.mark.parametrize("handled", [False, True])
def test_message_longer_than_receive_buffer_is_an_error(handled: bool) -> None:
    def main(t: VirtualTransport) -> None:
        if t.rank == 0:
            t.isend(torch.zeros(5), 1, 4)
        elif handled:
            t.on_message(4, 12, lambda source, message: None)
            t.sleep(1.0)
        else:
            t.wait(t.irecv(torch.zeros(3), 0, 4))

    with pytest.raises(TransportError) as caught:
        run(2, main)
    assert "20 bytes from rank 0 with tag 4 does not fit the receive of 12 bytes on rank 1" in str(
        caught.value
    )


def test_wait_in_message_handler_is_an_error() -> None:
    def main(t: VirtualTransport) -> None:
        t.on_message(0, 8, lambda source, _: t.sleep(1.0))
        t.isend(torch.zeros(1), t.rank, 0)
        t.sleep(1.0)

    with pytest.raises(TransportError, match="rank 0: sleep inside a message handler"):
        run(1, main)


def backward(t: VirtualTransport) -> None:
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: t.sleep(1.0))
    x.sum().backward()


def inside(context: Callable[[VirtualTransport], Any]) -> Main:
    def main(t: VirtualTransport) -> None:
        with context(t):
            t.wait(t.irecv(torch.empty(1), 0, 0))

    return main


@pytest.mark.parametrize(
    ("main", "text"),
    [
        (inside(lambda t: t.atomic()), r"wait inside atomic\(\)"),
        (inside(lambda t: torch.inference_mode()), "wait inside torch.inference_mode"),
        (inside(lambda t: torch.autocast("cpu")), "wait inside torch.autocast"),
        (backward, "sleep inside a backward pass"),
    ],
)
def test_shared_computation_must_not_switch_ranks(main: Main, text: str) -> None:
    with pytest.raises(TransportError, match=f"rank 0: {text}"):
        run(1, main)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda t: t.isend(torch.ones(1), 2, 0), "rank from 0 to 1, got 2"),
        (lambda t: t.irecv(torch.ones(1), -2, 0), "rank from 0 to 1, got -2"),
        (lambda t: t.isend(torch.ones(1), 1, -1), "tag of 0 or more, got -1"),
        (lambda t: t.isend(torch.ones(4, 4).T[1:], 1, 0), "contiguous tensor"),
        (lambda t: t.sleep(-1.0), "got -1.0"),
        (lambda t: t.sleep(float("nan")), "got nan"),
        (lambda t: t.wait_any([]), "one request or more"),
        (lambda t: t.iallgather(torch.ones(2), torch.ones(3)), "expected gathered of 16 bytes"),
        (lambda t: t.ialltoall(torch.ones(2), torch.ones(4)), "got 8 and 16 bytes"),
    ],
)
def test_virtual_transport_rejects_invalid_arguments(call: Main, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        run(2, call)


def test_virtual_cluster_rejects_ranks_out_of_range() -> None:
    with pytest.raises(UserError, match="size: expected 1 rank or more, got 0"):
        VirtualCluster(0, Cluster())
    with pytest.raises(UserError, match="failures: expected ranks from 0 to 3, got 4"):
        VirtualCluster(4, Cluster(failures={4: 1.0}))
    with pytest.raises(UserError, match="pauses: expected ranks from 0 to 3, got 9"):
        VirtualCluster(4, Cluster(pauses=((9, 1.0, 1.0),)))


# -- failures and pauses -------------------------------------------------------------
def outcome(t: VirtualTransport, request: Request) -> str:
    try:
        t.wait(request)
    except PeerFailedError as error:
        with pytest.raises(PeerFailedError):
            t.test(request)
        assert request.failed == error.rank == 1
        return f"failed at {t.now():g}"
    return f"done at {t.now():g}"


def test_failure_ends_operations_with_failed_rank_only() -> None:
    def main(t: VirtualTransport) -> list[str]:
        if t.rank == 1:
            t.isend(torch.full((4,), 8.0), 0, 0)
            buffer = torch.full((50_000,), 8.0)
            t.isend(buffer, 0, 1)
            try:
                t.sleep(10.0)
            finally:
                buffer.zero_()
        if t.rank == 2:
            t.sleep(3.0)
            t.isend(torch.ones(1), 0, 2)
            return []
        anyone = t.irecv(torch.empty(1), ANY_SOURCE, 2)
        pending = [
            t.irecv(torch.empty(1), 1, 5),
            t.isend(meta(100_000), 1, 6),
            t.ibarrier(),
        ]
        log = [outcome(t, request) for request in pending]
        assert t.failed == {1}
        small, large = torch.empty(4), torch.empty(50_000)
        future = [
            t.irecv(small, 1, 0),  # has arrived in full before the failure
            t.irecv(large, 1, 1),
            t.irecv(torch.empty(1), 1, 5),
            t.isend(torch.ones(1), 1, 6),
            t.iallreduce(torch.ones(5)),
        ]
        log += [outcome(t, request) for request in future]
        assert small[0] == 8 and large[-1] == 8
        return [*log, outcome(t, anyone)]

    results = run(3, main, lab(3, failures={1: 2.0}))
    assert results[1] is None
    lost, done = "failed at 2", "done at 2"
    assert results[0][:-1] == [lost] * 3 + [done] * 2 + [lost] * 3
    assert results[0][-1] == "done at 3.00011"


def test_failure_during_collective_fails_it() -> None:
    def main(t: VirtualTransport) -> list[str]:
        requests = [t.ibroadcast(meta(100 * QUANTUM), 0), t.iallreduce(torch.ones(1_000_000))]
        log = [outcome(t, request) for request in requests]
        t.sleep(1.0)
        return log

    results = run(2, main, lab(2, failures={1: 0.001}))
    assert results == [["failed at 0.001"] * 2, None]


def test_message_interrupted_by_failure_is_dropped_and_frees_link() -> None:
    """Rank 1 fails during its message; rank 3 on the same host has the link to itself."""

    def main(t: VirtualTransport) -> tuple[str, float]:
        if t.rank == 1:
            t.wait(t.isend(meta(16 * QUANTUM), 0, 0))
        if t.rank == 3:
            t.wait(t.isend(meta(10 * QUANTUM), 0, 0))
        if t.rank:
            return "", 0.0
        cut, whole = t.irecv(meta(16 * QUANTUM), 1, 0), t.irecv(meta(10 * QUANTUM), 3, 0)
        text = outcome(t, cut)
        t.wait(whole)
        return text, t.now()

    # Until the failure at 3.5 pieces the two alternate, then eight or nine pieces remain.
    text, end = run(4, main, lab(2, failures={1: 3.5 * PIECE}))[0]
    assert text == f"failed at {3.5 * PIECE:g}"
    assert end == pytest.approx(LATENCY + 2 * OVERHEAD + 12 * PIECE)


def test_killing_a_rank_unwinds_its_nested_greenlets() -> None:
    unwound: list[str] = []

    def main(t: VirtualTransport) -> None:
        if t.rank == 1:
            t.sleep(5.0)
            return

        def inner() -> None:
            try:
                t.sleep(10.0)
            finally:
                unwound.append("inner")

        try:
            greenlet(inner).switch()
        finally:
            unwound.append("outer")
            t.isend(torch.ones(1), 1, 0)

    run(2, main, lab(2, failures={0: 1.0}))
    assert sorted(unwound) == ["inner", "outer"]


def test_failure_of_finished_rank_changes_nothing() -> None:
    def main(t: VirtualTransport) -> frozenset[int]:
        if t.rank == 0:
            t.sleep(2.0)
        return t.failed

    assert run(2, main, lab(2, failures={1: 1.0})) == [frozenset(), frozenset()]


def test_failures_before_resume_point_are_ignored() -> None:
    """All ranks take part again, as over MPI; a later failure still happens."""
    cluster = lab(3, failures={1: 1.0, 2: 5.05})

    def main(t: VirtualTransport) -> frozenset[int]:
        t.sleep(0.1)
        return t.failed

    found = VirtualCluster(3, cluster, start_time=5.0).run(main)
    assert found == [frozenset({2}), frozenset({2}), None]


def test_failure_ends_rank_that_catches_all_exceptions() -> None:
    def main(t: VirtualTransport) -> str:
        if t.rank == 0:
            t.sleep(5.0)
            return "survived"
        try:
            t.sleep(5.0)
        except BaseException:
            t.isend(torch.ones(1), 0, 0)
        return "not ended"

    assert run(2, main, lab(2, failures={1: 1.0})) == ["survived", None]


def test_pause_stops_computing_and_collectives() -> None:
    def main(t: VirtualTransport) -> tuple[float, float]:
        t.sleep(0.5)
        computed = t.now()
        t.wait(t.ibarrier())
        return computed, t.now()

    results = run(3, main, lab(3, pauses=[(1, 0.2, 2.0)]))
    assert [computed for computed, _ in results] == [0.5, 2.5, 0.5]
    assert all(2.5 < end < 2.501 for _, end in results)


def test_send_fails_if_its_event_follows_failure_of_destination() -> None:
    class Noon:
        def __init__(self, t: VirtualTransport) -> None:
            self.t = t

        def query(self) -> bool:
            return self.t.now() >= 1.5

    def main(t: VirtualTransport) -> str:
        if t.rank == 1:
            t.sleep(9.0)
        return outcome(t, t.isend(torch.ones(1), 1, 0, after=Noon(t)))

    assert run(2, main, lab(2, failures={1: 1.0})) == ["failed at 1", None]
    assert run(2, main, lab(2, failures={1: 2.0})) == ["done at 1.5", None]


def test_server_continues_without_failed_worker() -> None:
    rounds, size = 5, 5

    def main(t: VirtualTransport) -> list[int]:
        if t.rank:
            for _ in range(rounds):
                t.sleep(1.0)
                t.wait(t.isend(meta(1000), 0, 0))
            return []
        counts = [0] * size
        receives = {rank: t.irecv(meta(1000), rank, 0) for rank in range(1, size)}
        while receives:
            ranks = list(receives)
            try:
                rank = ranks[t.wait_any(list(receives.values()))]
            except PeerFailedError as error:
                del receives[error.rank]
                continue
            counts[rank] += 1
            if counts[rank] == rounds:
                del receives[rank]
            else:
                receives[rank] = t.irecv(meta(1000), rank, 0)
        return counts

    for seed in range(5):
        assert run(size, main, lab(2, failures={3: 2.5}), seed)[0] == [0, 5, 5, 2, 5]


def test_close_cancels_posted_operations() -> None:
    def main(t: VirtualTransport) -> bool:
        buffer = torch.zeros(1)
        request = t.irecv(buffer, 1 - t.rank, 0)
        t.close()
        t.isend(torch.ones(1), 1 - t.rank, 0)
        t.sleep(1.0)
        return request.done and buffer.item() == 0

    assert run(2, main) == [True, True]


def test_rank_with_too_long_pause_is_excluded() -> None:
    """Rank 2's pause is shorter than the allowed silence, rank 1's is longer."""
    met: list[tuple[int, float]] = []

    def main(t: VirtualTransport) -> str:
        assert t.survives
        t.on_failure(lambda rank: met.append((rank, t.now())))
        t.sleep(20.0)
        return f"{sorted(t.failed)} {sorted(t.excluded)} at {t.now():g}"

    cluster = lab(3, pauses=[(1, 1.0, 5.0), (2, 1.0, 3.5)])
    results = VirtualCluster(3, cluster, silence=4.0).run(main)
    assert results == ["[1] [1] at 20", None, "[1] [1] at 23.5"]
    assert met == [(1, 5.0), (1, 5.0)]


def test_pausing_rank_is_not_excluded_without_limit() -> None:
    def main(t: VirtualTransport) -> tuple[bool, frozenset[int]]:
        t.sleep(20.0)
        return t.survives, t.excluded

    results = VirtualCluster(2, lab(2, pauses=[(1, 1.0, 500.0)])).run(main)
    assert results == [(False, frozenset()), (False, frozenset())]
