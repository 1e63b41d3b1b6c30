"""The virtual engine: its clock, its order of events, and what goes wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from greenlet import getcurrent, greenlet

from aladdin_mpi.errors import UserError
from aladdin_mpi.transport.base import ANY_SOURCE, PeerFailedError, Request, TransportError
from aladdin_mpi.transport.cluster import Cluster
from aladdin_mpi.transport.virtual import DeadlockError, VirtualCluster, VirtualTransport
from tests.conformance import CHECKS, run_all
from tests.test_network import LATENCY, OVERHEAD, PIECE, QUANTUM, lab

Main = Callable[[VirtualTransport], Any]


def run(size: int, main: Main, cluster: Cluster | None = None, seed: int = 0) -> list[Any]:
    return VirtualCluster(size, cluster or lab(2), seed).run(main)


def meta(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


# -- conformance ------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", CHECKS)
def test_conformance(name: str, size: int) -> None:
    for seed in range(3):
        run(size, CHECKS[name], seed=seed)


def test_conformance_under_delays_and_pauses() -> None:
    cluster = lab(2, delay_us=300, pauses=[(0, 0.01, 0.05), (2, 0.1, 1.0)])
    run(3, run_all, cluster, seed=7)


def test_conformance_without_latency() -> None:
    """Everything at one time: only the rules of order hold things together."""
    cluster = lab(2, latency_us=0, local_latency_us=0, message_overhead_us=0)
    for seed in range(3):
        run(4, run_all, cluster, seed)


# -- the clock --------------------------------------------------------------------
def test_time_of_a_message_and_of_a_wait() -> None:
    def main(t: VirtualTransport) -> tuple[float, float]:
        if t.rank == 0:
            t.sleep(0.5)
            send = t.isend(torch.ones(250_000), 1, 0)
            t.wait(send)
        else:
            t.wait(t.irecv(torch.empty(250_000), 0, 0))
        return t.now(), t.traffic.waiting

    (end0, waiting0), (end1, waiting1) = run(2, main)
    duration = OVERHEAD + LATENCY + 1e-3
    assert end0 == end1 == pytest.approx(0.5 + duration)
    assert waiting0 == pytest.approx(duration)
    assert waiting1 == pytest.approx(0.5 + duration)


def test_send_is_done_at_once_when_small_and_on_receipt_when_large() -> None:
    def main(t: VirtualTransport) -> float:
        if t.rank == 0:
            small, large = torch.ones(16_384), torch.ones(16_385)
            requests = [t.isend(small, 1, 0), t.isend(large, 1, 0)]
            assert t.test(requests[0]) and not t.test(requests[1])
            small.fill_(2)
            t.wait(requests[1])
            return t.now()
        t.sleep(1.0)
        buffer = torch.empty(16_384)
        t.wait(t.irecv(buffer, 0, 0))
        assert buffer[0] == 1
        t.wait(t.irecv(torch.empty(16_385), 0, 0))
        return t.now()

    assert run(2, main) == [1.0, 1.0]


def test_large_message_is_read_when_it_is_received() -> None:
    def main(t: VirtualTransport) -> float:
        buffer = torch.zeros(QUANTUM // 4)
        if t.rank == 0:
            request = t.isend(buffer, 1, 0)
            t.sleep(PIECE / 2)
            buffer.fill_(1)
            t.wait(request)
        else:
            t.wait(t.irecv(buffer, 0, 0))
        return buffer.sum().item()

    assert run(2, main)[1] == QUANTUM // 4


def test_ring_allreduce_takes_the_time_of_the_ring() -> None:
    size, length = 4, 1_000_000

    def main(t: VirtualTransport) -> float:
        t.wait(t.iallreduce(torch.ones(length)))
        return t.now()

    step = OVERHEAD + LATENCY + 4 * length / size / 1e9
    assert run(size, main, lab(4)) == pytest.approx([2 * (size - 1) * step] * size)


def test_collective_moves_on_while_its_rank_computes() -> None:
    def main(t: VirtualTransport) -> float:
        request = t.iallreduce(torch.ones(1_000_000))
        t.sleep(1.0)
        t.wait(request)
        return t.traffic.waiting

    assert run(4, main) == [0.0] * 4


def test_timeout_is_virtual_time() -> None:
    def main(t: VirtualTransport) -> float:
        assert t.wait_any([t.irecv(torch.empty(1), 0, 0)], timeout=2.5) == -1
        return t.now()

    assert run(1, main) == [2.5]


def test_start_time_and_reseed_continue_a_run() -> None:
    """Rank 0 tells the others to go on; a run started at that point is the same from there."""
    cluster = lab(2, delay_us=200)

    def rest(t: VirtualTransport) -> list[tuple[int, float]]:
        if t.rank == 0:
            t.reseed(42)
            for rank in range(1, t.size):
                t.isend(torch.zeros(1), rank, 0)
            return gather(t)
        t.wait(t.irecv(torch.empty(1), 0, 0))
        for _ in range(10):
            t.isend(torch.zeros(100), 0, 1)
            t.sleep(1e-4)
        return []

    def gather(t: VirtualTransport) -> list[tuple[int, float]]:
        log = []
        for _ in range(10 * (t.size - 1)):
            request = t.irecv(torch.empty(100), ANY_SOURCE, 1)
            t.wait(request)
            log.append((request.source, t.now()))
        return log

    def whole(t: VirtualTransport) -> tuple[float, list[tuple[int, float]]]:
        t.wait(t.ibarrier())
        t.sleep(1.0 if t.rank == 0 else 0.1)
        return t.now(), rest(t)

    start, log = run(5, whole, cluster, seed=3)[0]
    resumed = VirtualCluster(5, cluster, seed=3, start_time=start).run(rest)
    assert resumed[0] == log
    assert len(log) == 40


# -- order and determinism --------------------------------------------------------
def chatter(t: VirtualTransport) -> list[tuple[int, float]]:
    """Everyone sends to everyone at the same times; return what came when."""
    log: list[tuple[int, float]] = []
    t.on_message(1, 8, lambda source, _: log.append((source, t.now())))
    for _ in range(5):
        for rank in range(t.size):
            t.isend(torch.zeros(2), rank, 1)
        t.sleep(0.01)
    t.wait(t.ibarrier())
    return log


def test_one_seed_is_one_interleaving() -> None:
    assert run(6, chatter, seed=5) == run(6, chatter, seed=5)
    runs = [run(6, chatter, seed=seed) for seed in range(5)]
    assert all(runs[0] != other for other in runs[1:])


def test_floating_point_sum_in_order_of_arrival_depends_on_the_seed_alone() -> None:
    def main(t: VirtualTransport) -> bytes:
        total, buffer = torch.zeros(1000), torch.randn(1000, generator=generator(t.rank))
        if t.rank:
            t.wait(t.isend(buffer, 0, 0))
            return b""
        for _ in range(t.size - 1):
            t.wait(t.irecv(buffer, ANY_SOURCE, 0))
            total += buffer
        return total.numpy().tobytes()

    results = [run(8, main, lab(8), seed)[0] for seed in range(6)]
    assert results == [run(8, main, lab(8), seed)[0] for seed in range(6)]
    assert len(set(results)) > 1


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_handler_runs_before_any_rank_goes_on_at_that_time() -> None:
    def main(t: VirtualTransport) -> list[str]:
        log: list[str] = []
        t.on_message(1, 8, lambda source, _: log.append(f"from {source}"))
        if t.rank == 0:
            t.sleep(1.0)
            log.append("woke")
        else:
            t.sleep(1.0 - OVERHEAD - LATENCY)
            t.isend(torch.zeros(0), 0, 1)
        return log

    free = lab(2, bandwidth_gbit=1e6)
    for seed in range(10):
        assert run(2, main, free, seed)[0] == ["from 1", "woke"]


def test_flood_of_one_worker_does_not_starve_another() -> None:
    """Rank 1 keeps a hundred large messages in flight; rank 3, beside it, gets its share."""

    def main(t: VirtualTransport) -> float:
        buffer = meta(QUANTUM)
        if t.rank == 0:
            receives = [t.irecv(buffer, 1, 0) for _ in range(100)]
            receives += [t.irecv(buffer, 3, 0) for _ in range(10)]
            t.wait_all(receives)
        elif t.rank == 1:
            t.wait_all([t.isend(buffer, 0, 0) for _ in range(100)])
        elif t.rank == 3:
            t.wait_all([t.isend(buffer, 0, 0) for _ in range(10)])
        return t.now()

    end = run(4, main)
    assert end[3] < 22 * PIECE
    assert end[1] > 110 * PIECE


# -- what ranks are told ------------------------------------------------------------
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


def test_unmatched_large_send_is_a_deadlock() -> None:
    def main(t: VirtualTransport) -> None:
        if t.rank == 0:
            t.wait(t.isend(meta(100_000), 1, 3))

    with pytest.raises(DeadlockError, match="send of 100000 bytes to rank 1, tag 3"):
        run(2, main)


def test_exception_of_one_rank_ends_the_run_and_unwinds_the_others() -> None:
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


def test_exception_of_a_handler_names_its_rank() -> None:
    def main(t: VirtualTransport) -> None:
        t.on_message(0, 8, lambda source, _: [][source])
        if t.rank == 0:
            t.isend(torch.zeros(1), 1, 0)
        t.sleep(1.0)

    with pytest.raises(IndexError) as caught:
        run(2, main)
    assert caught.value.__notes__ == ["raised by rank 1"]


@pytest.mark.parametrize("handled", [False, True])
def test_message_longer_than_its_receive(handled: bool) -> None:
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


def test_handlers_must_not_wait() -> None:
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
def test_no_switch_inside_what_all_ranks_share(main: Main, text: str) -> None:
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
def test_bad_arguments(call: Main, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        run(2, call)


def test_bad_clusters() -> None:
    with pytest.raises(UserError, match="size: expected 1 rank or more, got 0"):
        VirtualCluster(0, Cluster())
    with pytest.raises(UserError, match="deaths: expected ranks from 0 to 3, got 4"):
        VirtualCluster(4, Cluster(deaths={4: 1.0}))
    with pytest.raises(UserError, match="pauses: expected ranks from 0 to 3, got 9"):
        VirtualCluster(4, Cluster(pauses=((9, 1.0, 1.0),)))


# -- greenlets and torch ------------------------------------------------------------
def test_rank_is_resumed_in_the_greenlet_in_which_it_blocked() -> None:
    def main(t: VirtualTransport) -> list[float]:
        log: list[float] = []
        outer = getcurrent()

        def producer() -> None:
            here = getcurrent()
            for _ in range(3):
                t.sleep(0.1 * (t.rank + 1))
                assert getcurrent() is here
                outer.switch(t.now())

        inner = greenlet(producer)
        for _ in range(3):
            log.append(inner.switch())
            t.sleep(1.0)
        inner.switch()
        return log

    results = run(3, main)
    for rank, log in enumerate(results):
        step = 0.1 * (rank + 1)
        assert log == pytest.approx([step, 2 * step + 1, 3 * step + 2])


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

    run(2, main, lab(2, deaths={0: 1.0}))
    assert sorted(unwound) == ["inner", "outer"]


def test_gradient_mode_belongs_to_the_rank() -> None:
    def main(t: VirtualTransport) -> list[bool]:
        modes = []
        for _ in range(3):
            if t.rank % 2:
                with torch.no_grad():
                    t.sleep(0.1)
                    modes.append(torch.is_grad_enabled())
            else:
                t.sleep(0.1)
                modes.append(torch.is_grad_enabled())
        return modes

    assert run(4, main) == [[True] * 3, [False] * 3] * 2
    assert torch.is_grad_enabled()


def test_parameters_can_be_sent_and_received() -> None:
    def main(t: VirtualTransport) -> float:
        parameter = torch.nn.Parameter(torch.full((3, 2), float(t.rank)))
        if t.rank == 0:
            t.wait(t.irecv(parameter, 1, 0))
        else:
            t.wait(t.isend(parameter, 0, 0))
        assert parameter.requires_grad
        return parameter.sum().item()

    assert run(2, main) == [6.0, 6.0]


# -- sizes without data -----------------------------------------------------------
@pytest.mark.parametrize("nbytes", [0, 1000, 1_000_000])
def test_meta_tensors_take_the_time_of_real_ones(nbytes: int) -> None:
    def main(device: str) -> Main:
        def inner(t: VirtualTransport) -> tuple[float, int, int]:
            send, receive = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in "ab")
            gathered = torch.zeros(nbytes * t.size, dtype=torch.uint8, device=device)
            total = torch.zeros(nbytes, device=device)
            request = t.irecv(receive, (t.rank - 1) % t.size, 0)
            t.wait_all([t.isend(send, (t.rank + 1) % t.size, 0), request])
            requests = [t.iallreduce(total), t.ibroadcast(send, 1), t.iallgather(send, gathered)]
            t.wait_all([*requests, t.ialltoall(gathered, torch.zeros_like(gathered))])
            return t.now(), request.nbytes, t.traffic.bytes_received

        return inner

    real, timed = run(3, main("cpu")), run(3, main("meta"))
    assert real == timed
    assert real[0][1] == nbytes


def test_meta_and_real_ends_mix() -> None:
    def main(t: VirtualTransport) -> list[float]:
        seen: list[str] = []
        t.on_message(9, 100, lambda source, message: seen.append(str(message.device)))
        real = torch.ones(4)
        request = t.irecv(real if t.rank else meta(16), 1 - t.rank, 0)
        t.isend(meta(16) if t.rank == 0 else torch.zeros(4), 1 - t.rank, 0)
        t.isend(meta(50) if t.rank == 0 else torch.zeros(4), 1 - t.rank, 9)
        t.wait(request)
        t.sleep(1.0)
        assert request.nbytes == 16
        assert seen == (["meta"] if t.rank else ["cpu"])
        return real.tolist()

    assert run(2, main) == [[1.0] * 4] * 2


# -- death and pause ----------------------------------------------------------------
def outcome(t: VirtualTransport, request: Request) -> str:
    try:
        t.wait(request)
    except PeerFailedError as error:
        with pytest.raises(PeerFailedError):
            t.test(request)
        assert request.failed == error.rank == 1
        return f"failed at {t.now():g}"
    return f"done at {t.now():g}"


def test_death_ends_what_names_the_dead_and_spares_the_rest() -> None:
    def main(t: VirtualTransport) -> list[str]:
        if t.rank == 1:
            t.isend(torch.full((4,), 8.0), 0, 0)
            t.isend(torch.full((50_000,), 8.0), 0, 1)
            t.sleep(10.0)
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
            t.irecv(small, 1, 0),  # has arrived in full before the death
            t.irecv(large, 1, 1),
            t.irecv(torch.empty(1), 1, 5),
            t.isend(torch.ones(1), 1, 6),
            t.iallreduce(torch.ones(5)),
        ]
        log += [outcome(t, request) for request in future]
        assert small[0] == 8 and large[-1] == 8
        return [*log, outcome(t, anyone)]

    results = run(3, main, lab(3, deaths={1: 2.0}))
    assert results[1] is None
    lost, done = "failed at 2", "done at 2"
    assert results[0][:-1] == [lost] * 3 + [done] * 2 + [lost] * 3
    assert results[0][-1] == "done at 3.00011"


def test_message_cut_by_death_vanishes_and_frees_the_link() -> None:
    """Rank 1 dies in the middle of its message; rank 3, beside it, has the link to itself."""

    def main(t: VirtualTransport) -> tuple[str, float]:
        if t.rank == 1:
            t.wait(t.isend(meta(100 * QUANTUM), 0, 0))
        if t.rank == 3:
            t.wait(t.isend(meta(10 * QUANTUM), 0, 0))
        if t.rank:
            return "", 0.0
        cut, whole = t.irecv(meta(100 * QUANTUM), 1, 0), t.irecv(meta(10 * QUANTUM), 3, 0)
        text = outcome(t, cut)
        t.wait(whole)
        return text, t.now()

    # Until the death at 3.5 pieces the two take turns, then there are eight or nine left.
    text, end = run(4, main, lab(2, deaths={1: 3.5 * PIECE}))[0]
    assert text == f"failed at {3.5 * PIECE:g}"
    assert end == pytest.approx(12 * PIECE, rel=0.01)


def test_death_of_a_finished_rank_changes_nothing() -> None:
    def main(t: VirtualTransport) -> frozenset[int]:
        if t.rank == 0:
            t.sleep(2.0)
        return t.failed

    assert run(2, main, lab(2, deaths={1: 1.0})) == [frozenset(), frozenset()]


def test_rank_that_died_before_the_start_stays_dead() -> None:
    cluster = lab(2, deaths={1: 1.0})

    def main(t: VirtualTransport) -> frozenset[int]:
        t.sleep(0.1)
        return t.failed

    assert VirtualCluster(2, cluster, start_time=5.0).run(main) == [frozenset({1}), None]


def test_death_does_not_depend_on_cooperation() -> None:
    """A rank that catches everything is dead all the same."""

    def main(t: VirtualTransport) -> str:
        if t.rank == 0:
            t.sleep(5.0)
            return "alive"
        try:
            t.sleep(5.0)
        except BaseException:
            t.isend(torch.ones(1), 0, 0)
        return "undead"

    assert run(2, main, lab(2, deaths={1: 1.0})) == ["alive", None]


def test_pause_stops_computing_and_collectives() -> None:
    def main(t: VirtualTransport) -> tuple[float, float]:
        t.sleep(0.5)
        computed = t.now()
        t.wait(t.ibarrier())
        return computed, t.now()

    results = run(3, main, lab(3, pauses=[(1, 0.2, 2.0)]))
    assert [computed for computed, _ in results] == [0.5, 2.5, 0.5]
    assert all(2.5 < end < 2.501 for _, end in results)


def test_send_whose_event_comes_after_the_death_of_its_dest() -> None:
    class Noon:
        def __init__(self, t: VirtualTransport) -> None:
            self.t = t

        def query(self) -> bool:
            return self.t.now() >= 1.5

    def main(t: VirtualTransport) -> str:
        if t.rank == 1:
            t.sleep(9.0)
        return outcome(t, t.isend(torch.ones(1), 1, 0, after=Noon(t)))

    assert run(2, main, lab(2, deaths={1: 1.0})) == ["failed at 1", None]
    assert run(2, main, lab(2, deaths={1: 2.0})) == ["done at 1.5", None]


def test_server_goes_on_without_a_dead_worker() -> None:
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
        assert run(size, main, lab(2, deaths={3: 2.5}), seed)[0] == [0, 5, 5, 2, 5]


def test_close_cancels_what_is_posted() -> None:
    def main(t: VirtualTransport) -> bool:
        buffer = torch.zeros(1)
        request = t.irecv(buffer, 1 - t.rank, 0)
        t.close()
        t.isend(torch.ones(1), 1 - t.rank, 0)
        t.sleep(1.0)
        return request.done and buffer.item() == 0

    assert run(2, main) == [True, True]
