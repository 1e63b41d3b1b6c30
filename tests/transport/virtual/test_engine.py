"""The virtual engine: clock, order of events, and timed transfers without data."""

from __future__ import annotations

import pytest
import torch
from greenlet import getcurrent, greenlet

from aladdin_mpi.transport.base import ANY_SOURCE
from aladdin_mpi.transport.virtual.engine import VirtualCluster, VirtualTransport
from aladdin_mpi.transport.virtual.messages import QUANTUM
from tests.conformance import CHECKS, run_all
from tests.virtual_lab import LATENCY, OVERHEAD, PIECE, Main, lab, meta, run


# -- conformance ------------------------------------------------------------------
@pytest.mark.sample(60)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", CHECKS)
def test_virtual_transport_conforms(name: str, size: int) -> None:
    for seed in range(3):
        run(size, CHECKS[name], seed=seed)


def test_virtual_transport_conforms_with_delays_and_pauses() -> None:
    cluster = lab(2, delay_us=300, pauses=[(0, 0.01, 0.05), (2, 0.1, 1.0)])
    run(3, run_all, cluster, seed=7)


def test_virtual_transport_conforms_without_latency() -> None:
    """Everything happens at the same time: only the ordering rules determine the result."""
    cluster = lab(2, latency_us=0, local_latency_us=0, message_overhead_us=0)
    for seed in range(3):
        run(4, run_all, cluster, seed)


# -- in one process ------------------------------------------------------------------
def test_virtual_ranks_synchronise_without_messages() -> None:
    def main(t: VirtualTransport) -> tuple[list[int], float, int]:
        t.sleep(0.1 * t.rank)
        first = t.meet(t.rank)
        return first + t.meet(10 * t.rank), t.now(), t.traffic.messages_sent

    assert run(3, main, lab(2)) == [([0, 1, 2, 0, 10, 20], 0.2, 0)] * 3


def test_failures_or_pauses_disable_message_free_synchronisation() -> None:
    assert all(run(2, lambda t: t.meets, lab(2)))
    for cluster in (lab(2, pauses=[(0, 0.01, 0.05)]), lab(2, failures={1: 100.0})):
        assert not any(run(2, lambda t: t.meets, cluster))


def test_shared_result_is_computed_once() -> None:
    made = []

    def main(t: VirtualTransport) -> object:
        return t.once("key", lambda: made.append(t.rank) or object())  # type: ignore[func-returns-value]

    assert len(set(map(id, run(3, main, lab(2))))) == 1 and len(made) == 1


def test_numbers_arrive_unchanged_and_take_network_time() -> None:
    def main(t: VirtualTransport) -> tuple[tuple[float, ...] | None, int, float]:
        if t.rank == 0:
            sent = t.isend((1, 2.5, 3), 1, 7)
            assert sent.done  # like any short message
            return None, 0, 0.0
        request = t.irecv(torch.empty(5, dtype=torch.float64), 0, 7)
        t.wait(request)
        return request.numbers, request.nbytes, t.now()

    numbers, nbytes, moment = run(2, main, lab(2))[1]
    assert (numbers, nbytes) == ((1.0, 2.5, 3.0), 24)
    assert moment == pytest.approx(OVERHEAD + LATENCY + 24 / 1e9)


def test_message_handler_receives_numbers_as_bytes() -> None:
    found = []

    def main(t: VirtualTransport) -> None:
        t.on_message(3, 80, lambda source, m: found.append(m.view(torch.float64).tolist()))
        t.isend([4, 5.5], 1 - t.rank, 3)
        t.sleep(1.0)

    run(2, main, lab(2))
    assert found == [[4.0, 5.5]] * 2


# -- many ranks --------------------------------------------------------------------
@pytest.mark.parametrize("size", [33, 48, 64])
def test_long_all_reduce_of_many_ranks_takes_few_messages(size: int) -> None:
    """More than 32 ranks use halving and doubling: sums are correct and bit-identical."""
    length = 20_001

    def main(t: VirtualTransport) -> tuple[torch.Tensor, int, int]:
        buffer = torch.randn(length, generator=torch.Generator().manual_seed(t.rank))
        t.wait(t.iallreduce(buffer))
        return buffer, t.traffic.messages_sent, t.traffic.bytes_sent

    cluster = lab(-(-size // 8), placement="block")
    found = run(size, main, cluster)
    terms = [torch.randn(length, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    expected = torch.stack(terms).double().sum(0)
    core = 2 ** (size.bit_length() - 1)
    for rank, (total, messages, nbytes) in enumerate(found):
        assert torch.equal(total, found[0][0])
        torch.testing.assert_close(total.double(), expected, rtol=0, atol=1e-4)
        if rank + core < size:
            continue  # which also take part on behalf of another rank
        assert messages == (1 if rank >= core else 2 * (core.bit_length() - 1))
        if rank < core:
            assert nbytes == pytest.approx(2 * (core - 1) / core * 4 * length, abs=100)


def test_recursive_halving_keeps_most_bytes_within_hosts() -> None:
    """For neighbours on one host: as many bytes leave the host as with a ring."""

    def main(t: VirtualTransport) -> dict[str, list[int]]:
        t.wait(t.iallreduce(meta(8_000_000).view(torch.float32)))
        t.wait(t.ibarrier())
        return t.carried()

    carried = run(64, main, lab(8, placement="block"))[0]
    assert carried is not None
    for host in range(8):
        assert carried["out"][host] == pytest.approx(2 * 7 / 8 * 8_000_000, rel=0.01)
        assert carried["local"][host] == pytest.approx(2 * 7 * 8_000_000, rel=0.01)


# -- the clock --------------------------------------------------------------------
def test_message_and_wait_times_match_hand_computation() -> None:
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


def test_small_send_completes_at_once_and_large_send_on_receipt() -> None:
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


def test_collective_progresses_while_rank_computes() -> None:
    def main(t: VirtualTransport) -> float:
        request = t.iallreduce(torch.ones(1_000_000))
        t.sleep(1.0)
        t.wait(request)
        return t.traffic.waiting

    assert run(4, main) == [0.0] * 4


def test_timeout_is_measured_in_simulated_time() -> None:
    def main(t: VirtualTransport) -> float:
        assert t.wait_any([t.irecv(torch.empty(1), 0, 0)], timeout=2.5) == -1
        return t.now()

    assert run(1, main) == [2.5]


def test_timeout_of_finished_wait_does_not_end_later_wait() -> None:
    def main(t: VirtualTransport) -> float:
        if t.rank == 0:
            assert t.wait_any([t.irecv(torch.empty(1), 1, 0)], timeout=2.0) == 0
            t.wait(t.irecv(torch.empty(1), 1, 0))
            return t.now()
        for _ in range(2):
            t.sleep(1.5)
            t.isend(torch.ones(1), 0, 0)
        return 0.0

    assert 3.0 < run(2, main)[0] < 3.1


def test_start_time_and_reseed_continue_a_run() -> None:
    """Rank 0 lets the others continue; a run started at that time is identical from there."""
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
    """Send from every rank to every rank at the same times; return the arrivals in order."""
    log: list[tuple[int, float]] = []
    t.on_message(1, 8, lambda source, _: log.append((source, t.now())))
    for _ in range(5):
        for rank in range(t.size):
            t.isend(torch.zeros(2), rank, 1)
        t.sleep(0.01)
    t.wait(t.ibarrier())
    return log


def test_seed_determines_interleaving_of_ranks() -> None:
    assert run(6, chatter, seed=5) == run(6, chatter, seed=5)
    runs = [run(6, chatter, seed=seed) for seed in range(5)]
    assert all(runs[0] != other for other in runs[1:])


def test_sum_in_arrival_order_depends_only_on_seed() -> None:
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


def test_message_handler_runs_before_ranks_resume_at_same_time() -> None:
    def main(t: VirtualTransport) -> list[str]:
        log: list[str] = []
        t.on_message(1, 8, lambda source, _: log.append(f"from {source} at {t.now()}"))
        if t.rank == 0:
            t.sleep(1.0)
            log.append(f"woke at {t.now()}")
        else:
            t.sleep(0.5)
            t.isend(torch.zeros(0), 0, 1)
        return log

    half_a_second = lab(2, latency_us=500_000, message_overhead_us=0)
    for seed in range(10):
        assert run(2, main, half_a_second, seed)[0] == ["from 1 at 1.0", "woke at 1.0"]


def test_flooding_worker_does_not_starve_another() -> None:
    """Rank 1 keeps a hundred large messages in flight; rank 3 on the same host gets its share."""

    def main(t: VirtualTransport) -> float:
        buffer = meta(QUANTUM)
        if t.rank == 0:
            receives = [t.irecv(buffer, 1, 0) for _ in range(100)]
            receives += [t.irecv(buffer, 3, 0) for _ in range(10)]
            t.wait(*receives)
        elif t.rank == 1:
            t.wait(*[t.isend(buffer, 0, 0) for _ in range(100)])
        elif t.rank == 3:
            t.wait(*[t.isend(buffer, 0, 0) for _ in range(10)])
        return t.now()

    end = run(4, main)
    assert end[3] < 22 * PIECE
    assert end[1] > 110 * PIECE


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


def test_grad_mode_is_separate_for_each_rank() -> None:
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


# -- timed transfers without data ---------------------------------------------------
@pytest.mark.parametrize("nbytes", [0, 1000, 1_000_000])
def test_meta_tensor_transfers_take_time_of_real_ones(nbytes: int) -> None:
    def main(device: str) -> Main:
        def inner(t: VirtualTransport) -> tuple[float, int, int]:
            send, receive = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in "ab")
            gathered = torch.zeros(nbytes * t.size, dtype=torch.uint8, device=device)
            total = torch.zeros(nbytes, device=device)
            request = t.irecv(receive, (t.rank - 1) % t.size, 0)
            t.wait(t.isend(send, (t.rank + 1) % t.size, 0), request)
            requests = [t.iallreduce(total), t.ibroadcast(send, 1), t.iallgather(send, gathered)]
            t.wait(*requests, t.ialltoall(gathered, torch.zeros_like(gathered)))
            return t.now(), request.nbytes, t.traffic.bytes_received

        return inner

    real, timed = run(3, main("cpu")), run(3, main("meta"))
    assert real == timed
    assert real[0][1] == nbytes


def test_meta_and_real_tensors_can_be_exchanged() -> None:
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
