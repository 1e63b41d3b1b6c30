"""Transfer times of the simulated network, compared with hand computations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from aladdin_mpi.options.cluster import Cluster, Pauses
from aladdin_mpi.transport.virtual.fiber import VirtualClock
from aladdin_mpi.transport.virtual.messages import PIECES, QUANTUM, Message
from aladdin_mpi.transport.virtual.network import EXPRESS, Network
from tests.virtual_lab import LATENCY, OVERHEAD, PIECE, lab

Send = tuple[float, int, int, int] | tuple[float, int, int, int, int]
"""Time, source, dest, bytes, and the tag if it is not 0."""
Arrival = tuple[float, int, int, int]
"""Time, source, dest, bytes."""


def arrivals(cluster: Cluster, size: int, sends: Sequence[Send], seed: int = 0) -> list[Arrival]:
    """Return the arrivals in order."""
    clock = VirtualClock(seed, 0.0)
    found: list[Arrival] = []
    network = Network(
        cluster,
        size,
        clock,
        lambda m: found.append((clock.now, m.source, m.dest, m.nbytes)),
    )
    for time, source, dest, nbytes, *tag in sends:
        message = Message(source, dest, tag[0] if tag else 0, nbytes, None, None)
        clock.at(time, network.send, message)
    clock.run()
    return found


def times(found: list[Arrival]) -> dict[tuple[int, int], float]:
    """Return the time of the last arrival of each pair."""
    return {(source, dest): time for time, source, dest, _ in found}


@pytest.mark.parametrize("nbytes", [0, 1, 1_000_000, QUANTUM, QUANTUM + 1, 100_000_000])
def test_message_on_idle_network_crosses_both_links_concurrently(nbytes: int) -> None:
    [(time, *_)] = arrivals(lab(2), 2, [(0.0, 0, 1, nbytes)])
    assert time == pytest.approx(OVERHEAD + LATENCY + nbytes / 1e9)


def test_carried_bytes_exclude_queued_bytes() -> None:
    """With two senders to one host, messages in its inbound queue have not been carried yet."""
    clock = VirtualClock(0, 0.0)
    network = Network(lab(3), 3, clock, lambda message: None)
    for source in (1, 2):
        network.send(Message(source, 0, 0, QUANTUM, None, None))
    found = []
    clock.at(2 * OVERHEAD + LATENCY + 0.5 * PIECE, lambda _: found.append(network.carried()), None)
    clock.at(1.0, lambda _: found.append(network.carried()), None)
    clock.run()
    middle, end = found
    assert middle["in"][0] == pytest.approx(QUANTUM / 2, rel=0.02)
    assert end == {"out": [0, QUANTUM, QUANTUM], "in": [2 * QUANTUM, 0, 0], "local": [0, 0, 0]}


@pytest.mark.parametrize("pair", [(0, 2), (0, 0)])
def test_local_path_is_faster_than_link(pair: tuple[int, int]) -> None:
    [(time, *_)] = arrivals(lab(2), 4, [(0.0, *pair, 1_000_000)])
    assert time == pytest.approx(OVERHEAD + 1e-6 + 1e-4)


def test_link_directions_and_local_path_are_independent() -> None:
    sends = [(0.0, 0, 1, 10**6), (0.0, 1, 0, 10**6), (0.0, 0, 2, 10**6), (0.0, 1, 3, 10**6)]
    found = times(arrivals(lab(2), 4, sends))
    assert found[0, 1] == found[1, 0] == pytest.approx(OVERHEAD + LATENCY + 1e-3)
    assert found[0, 2] == found[1, 3] == pytest.approx(OVERHEAD + 1e-6 + 1e-4)


def test_flows_to_one_host_share_its_inbound_link() -> None:
    sends = [(0.0, rank, 0, 2 * QUANTUM) for rank in (1, 2, 3)]
    found = arrivals(lab(4), 4, sends)
    first_pieces = LATENCY + 3 * (PIECE + OVERHEAD)
    expected = [first_pieces + PIECE, first_pieces + 2 * PIECE, first_pieces + 3 * PIECE]
    assert [time for time, *_ in found] == pytest.approx(expected)


def test_flows_from_one_host_share_its_outbound_link() -> None:
    """Ranks 0 and 3 share a host; their messages go to two other hosts."""
    sends = [(0.0, 0, 1, 3 * QUANTUM), (1e-6, 3, 2, 3 * QUANTUM)]
    found = times(arrivals(lab(3), 6, sends))
    # On the link: 0, 3, 0, 3, 0, 3.
    assert found[0, 1] == pytest.approx(LATENCY + 2 * OVERHEAD + 5 * PIECE)
    assert found[3, 2] == pytest.approx(LATENCY + 2 * OVERHEAD + 6 * PIECE)


@pytest.mark.parametrize("longer", [0.25, 1, 3])
def test_small_message_waits_for_at_most_one_piece_of_another_flow(longer: float) -> None:
    nbytes = int(longer * PIECES * QUANTUM)
    piece = PIECE * max(1.0, longer)
    sends = [(0.0, 0, 1, nbytes), (1e-6, 2, 3, 10_000)]
    found = times(arrivals(lab(2), 4, sends))
    assert found[2, 3] == pytest.approx(LATENCY + (piece + OVERHEAD) + (OVERHEAD + 1e-5))
    assert found[0, 1] == pytest.approx(LATENCY + 2 * OVERHEAD + 1e-5 + nbytes / 1e9)


@pytest.mark.parametrize("pair", [(2, 3), (0, 1)])
def test_short_message_with_another_tag_overtakes_bulk_data(pair: tuple[int, int]) -> None:
    sends = [(0.0, 0, 1, 25 * QUANTUM, 0), (1e-3, *pair, EXPRESS, 1)]
    found = arrivals(lab(2), 4, sends)
    assert found[0][0] == pytest.approx(1e-3 + LATENCY + OVERHEAD + EXPRESS / 1e9)
    assert found[1][0] == pytest.approx(LATENCY + OVERHEAD + 25 * PIECE)


def test_short_messages_take_turns_on_a_link_that_they_occupy_for_long() -> None:
    slow = Cluster(hosts=2, bandwidth_gbit=8e-3, latency_us=0, message_overhead_us=0)
    found = arrivals(slow, 2, [(0.0, 0, 1, EXPRESS, tag) for tag in range(3)])
    assert [time for time, *_ in found] == pytest.approx([4.096e-3, 8.192e-3, 12.288e-3])
    tiny = arrivals(slow, 2, [(0.0, 0, 1, EXPRESS, 0), (1e-4, 0, 1, 100, 1)])
    assert tiny[0] == pytest.approx((2e-4, 0, 1, 100))  # 0.1 ms: it overtakes


def test_short_message_with_same_tag_keeps_its_order() -> None:
    sends = [(0.0, 0, 1, 25 * QUANTUM, 0), (1e-3, 0, 1, 8, 0), (2e-3, 0, 1, 9, 0)]
    found = arrivals(lab(2), 2, sends)
    assert [nbytes for *_, nbytes in found] == [25 * QUANTUM, 8, 9]
    assert found[2][0] == pytest.approx(LATENCY + OVERHEAD + 25 * PIECE)


def test_messages_of_one_flow_are_delivered_in_order() -> None:
    sends = [(0.0, 0, 1, 25 * QUANTUM), (1e-6, 0, 1, 10_000)]
    found = arrivals(lab(2), 2, sends)
    assert [nbytes for *_, nbytes in found] == [25 * QUANTUM, 10_000]
    assert found[1][0] == pytest.approx(LATENCY + 2 * OVERHEAD + 25 * PIECE + 1e-5)


@pytest.mark.parametrize("pair", [(0, 1), (1, 0)])
@pytest.mark.parametrize("nbytes", [100, QUANTUM, 40 * QUANTUM + 1])
def test_slower_of_two_links_limits_rate(pair: tuple[int, int], nbytes: int) -> None:
    """The link of host 1 has a quarter of the rate of the others."""
    [(time, *_)] = arrivals(lab(3, links={1: 2}), 3, [(0.0, *pair, nbytes)])
    assert time == pytest.approx(OVERHEAD + LATENCY + 4 * nbytes / 1e9)


def test_flow_to_slow_host_leaves_remaining_bandwidth_to_other_flows() -> None:
    sends = [(0.0, 0, 1, 20 * QUANTUM), (0.0, 0, 2, 60 * QUANTUM)]
    found = times(arrivals(lab(3, links={1: 2}, message_overhead_us=0), 3, sends))
    # A quarter of the outbound link is used for the slow host, three quarters for the other one.
    assert found[0, 1] == pytest.approx(LATENCY + 80 * PIECE, abs=5 * PIECE)
    assert found[0, 2] == pytest.approx(LATENCY + 80 * PIECE, abs=5 * PIECE)


def test_slow_senders_share_fast_inbound_link_only_when_saturated() -> None:
    slow = {1: 2, 2: 2, 3: 2, 4: 4, 5: 4}
    sends = [(0.0, rank, 0, 40 * QUANTUM) for rank in slow]
    cluster = lab(6, links=slow, message_overhead_us=0)
    two = times(arrivals(cluster, 6, sends[:2]))
    assert two[1, 0] == two[2, 0] == pytest.approx(LATENCY + 160 * PIECE)
    five = arrivals(cluster, 6, sends)  # 3 * 1/4 and 2 * 1/2 of the inbound link
    assert five[-1][0] == pytest.approx(LATENCY + 200 * PIECE, rel=0.05)


def test_later_message_does_not_exceed_rate_of_slow_link() -> None:
    """A later message starts when the receiver has finished the previous pieces."""
    sends = [(0.0, 0, 1, QUANTUM), (1.5 * PIECE, 0, 1, QUANTUM)]
    found = arrivals(lab(2, links={1: 2}, message_overhead_us=0), 2, sends)
    assert [time for time, *_ in found] == pytest.approx([LATENCY + 4 * PIECE, LATENCY + 8 * PIECE])


def test_explicit_equal_links_match_default_links() -> None:
    sends = [(1e-5 * i, i % 7, (3 * i + 1) % 7, 1000 * i**2) for i in range(60)]
    named = lab(4, links=dict.fromkeys(range(4), 8.0))
    assert arrivals(named, 7, sends) == arrivals(lab(4), 7, sends)


def test_unequal_links_preserve_order_per_pair_and_lose_no_message() -> None:
    cluster = lab(4, links={0: 1, 1: 30, 3: 3})
    sends = [(1e-4 * (i // 9), i % 4, (i + 1 + i % 3) % 4, 20_000 * (i % 23)) for i in range(300)]
    found = arrivals(cluster, 4, sends)
    assert len(found) == 300
    for pair in {send[1:3] for send in sends}:
        own = [nbytes for _, source, dest, nbytes in found if (source, dest) == pair]
        assert own == [nbytes for *_, source, dest, nbytes in sends if (source, dest) == pair]
    # No link exceeds its rate.
    for host, gbit in ((0, 1), (1, 30), (2, 8), (3, 3)):
        carried = sum(nbytes for _, _, dest, nbytes in found if dest == host)
        last = max(time for time, _, dest, _ in found if dest == host)
        assert last > carried * 8e-9 / gbit


def test_link_is_never_idle_while_messages_wait() -> None:
    """Messages of many sizes and pairs from one host take the sum of their times."""
    sends = [(0.0, 4 * (i % 5), 1 + i % 3, 5000 + 700_001 * i * (i % 4)) for i in range(40)]
    last = arrivals(lab(4), 20, sends)[-1][0]
    busy = sum(OVERHEAD + nbytes / 1e9 for *_, nbytes in sends)
    assert last == pytest.approx(LATENCY + busy)


def test_link_serves_flows_equally() -> None:
    """Five ranks of one host saturate their link: each gets a fifth at any time."""
    sends = [(0.0, 2 * rank, 1, QUANTUM) for _ in range(20) for rank in range(5)]
    found = arrivals(lab(2), 10, sends)
    for turn in range(20):
        sources = [source for _, source, *_ in found[5 * turn : 5 * turn + 5]]
        assert sorted(sources) == [0, 2, 4, 6, 8]


def test_order_of_simultaneous_messages_depends_only_on_seed() -> None:
    sends = [(0.0, 2 * rank, 1, 1000) for rank in range(6)]

    def order(seed: int) -> list[int]:
        return [source for _, source, *_ in arrivals(lab(2), 12, sends, seed)]

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(10)}) > 5


def test_random_delay_preserves_order_within_pair() -> None:
    cluster = lab(2, delay_us=5000)
    sends = [(1e-5 * i, 2 * (i % 4), 1, i) for i in range(200)]
    found = arrivals(cluster, 8, sends)
    numbers = [nbytes for *_, nbytes in found]
    assert numbers != sorted(numbers)
    for source in (0, 2, 4, 6):
        own = [nbytes for _, s, _, nbytes in found if s == source]
        assert own == sorted(own)
        assert len(own) == 50
    late = [time - 1e-5 * nbytes for time, *_, nbytes in found]
    assert 0.003 < sum(late) / len(late) < 0.05
    assert found == arrivals(cluster, 8, sends)
    assert found != arrivals(cluster, 8, sends, seed=1)


def test_delayed_message_never_overtakes_its_predecessor() -> None:
    cluster = lab(2, delay_us=5000)
    together = 0
    for seed in range(40):
        (first, *_), (second, *_) = arrivals(cluster, 2, [(0.0, 0, 1, 1), (1e-6, 0, 1, 1)], seed)
        together += first == second
    assert 8 < together < 32


def test_messages_of_paused_rank_are_held() -> None:
    cluster = lab(2, pauses=[(0, 0.001, 1.0)])
    sends = [(0.002, 0, 1, 10**4), (0.002, 1, 0, 1000), (0.002, 2, 3, 1000), (0.002, 0, 1, 20_000)]
    found = arrivals(cluster, 4, sends)
    idle = OVERHEAD + LATENCY
    assert times(found)[2, 3] == pytest.approx(0.002 + idle + 1e-6)
    assert times(found)[1, 0] == pytest.approx(1.001)
    assert times(found)[0, 1] == pytest.approx(1.001 + idle + OVERHEAD + 3e-5)
    assert len(found) == 4


def test_pause_during_message_delays_its_next_piece() -> None:
    cluster = lab(2, pauses=[(0, PIECE / 2, 1.0)])
    [(time, *_)] = arrivals(cluster, 2, [(0.0, 0, 1, 2 * QUANTUM)])
    assert time == pytest.approx(PIECE / 2 + 1.0 + LATENCY + PIECE)


def test_pauses_extend_compute_time() -> None:
    pauses = Pauses([(5.0, 6.0), (1.0, 2.0), (1.5, 3.0)])
    assert pauses.spans == [(1.0, 3.0), (5.0, 6.0)]
    assert pauses.stretched(0.0, 0.5) == 0.5
    assert pauses.stretched(0.0, 1.0) == 3.0
    assert pauses.stretched(0.0, 1.5) == 3.5
    assert pauses.stretched(2.0, 1.0) == 4.0
    assert pauses.stretched(0.5, 3.0) == 6.5
    assert pauses.resumed(2.9) == 3.0
    assert pauses.resumed(3.0) == 3.0


def test_cyclic_and_block_placement_assign_ranks_to_hosts() -> None:
    assert [Cluster(hosts=3).host_of(r, 7) for r in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    block = Cluster(hosts=3, placement="block")
    assert [block.host_of(r, 7) for r in range(7)] == [0, 0, 0, 1, 1, 1, 2]


def test_worker_placement_keeps_servers_on_first_host() -> None:
    workers = Cluster(hosts=2, placement="workers").placed(servers=2)
    assert [workers.host_of(r, 6) for r in range(6)] == [0, 0, 0, 0, 1, 1]
    named = Cluster(hosts=3, worker_hosts=(2, 0, 1)).placed(servers=1)
    assert [named.host_of(r, 4) for r in range(4)] == [0, 2, 0, 1]


def test_cluster_parses_text_values_and_rejects_invalid_ones() -> None:
    cluster = Cluster.model_validate({"pauses": ["3:10:2.5"], "failures": {"2": "1.5"}})
    assert cluster.pauses == ((3, 10.0, 2.5),)
    assert cluster.failures == {2: 1.5}
    for bad in (
        {"hosts": 0},
        {"bandwidth_gbit": 0},
        {"latency_us": -1},
        {"latency_us": float("nan")},
        {"failures": {-1: 2.0}},
        {"pauses": ["3:10"]},
        {"bandwith_gbit": 3},
        {"links": {0: 0}},
        {"links": {1: 5}},
        {"hosts": 2, "worker_hosts": [0, 2]},
    ):
        with pytest.raises(ValidationError):
            Cluster.model_validate(bad)
