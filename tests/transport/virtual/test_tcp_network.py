"""Links shared as by TCP: hand computations for deterministic results, otherwise many seeds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import pytest

from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from aladdin_mpi.transport.virtual.fiber import VirtualClock
from aladdin_mpi.transport.virtual.messages import QUANTUM, Message
from aladdin_mpi.transport.virtual.network import (
    MOST,
    RETRANSMISSION_SECONDS,
    STALLS,
    Network,
    TcpNetwork,
)
from benchmarks.programs.crowd import CASES, RANKS, crowd
from tests.virtual_lab import LATENCY, OVERHEAD, lab

SEEDS = range(40)
LONG = 20 * QUANTUM
SECONDS = LONG / 1e9
"""Time that a link needs for ``LONG`` bytes."""


def ends(
    cluster: Cluster,
    size: int,
    sends: Sequence[tuple[float, int, int, int]],
    seed: int = 0,
    network_class: type[Network] = TcpNetwork,
) -> list[float]:
    """Return the arrival times of the messages (time, source, dest, bytes), in their order."""
    clock = VirtualClock(seed, 0.0)
    messages = [Message(s, d, tag, n, None, None) for tag, (_, s, d, n) in enumerate(sends)]
    found = [0.0] * len(sends)

    def note(message: Message) -> None:
        found[message.tag] = clock.now

    network = network_class(cluster, size, clock, note)
    for (time, *_), message in zip(sends, messages, strict=True):
        clock.at(time, network.send, message)
    clock.run()
    assert all(found)
    return found


@pytest.mark.parametrize("pair", [(0, 1), (0, 2)])
@pytest.mark.parametrize("nbytes", [1, 1_000_000, LONG])
def test_single_message_takes_same_time_as_with_even_sharing(
    nbytes: int, pair: tuple[int, int]
) -> None:
    for seed in SEEDS:
        sends = [(0.0, *pair, nbytes)]
        [even] = ends(lab(2), 4, sends, seed, Network)
        # Pieces have another size, and the next starts when one arrives.
        assert ends(lab(2), 4, sends, seed) == [pytest.approx(even, rel=1e-6)]


def test_queued_messages_finish_together_before_later_ones() -> None:
    first = [(0.0, 0, 1, LONG)]
    together = [(1e-4 * turn, 0, 1, LONG) for turn in (1, 2, 3)]
    later = [(SECONDS * 1.5, 0, 1, LONG)]
    for seed in SEEDS:
        alone, *burst, last = ends(lab(2), 2, [*first, *together, *later], seed)
        assert alone == pytest.approx(LATENCY + OVERHEAD + SECONDS, rel=0.01)
        assert max(burst) - min(burst) < 3 * 3 * QUANTUM / 1e9
        assert max(burst) == pytest.approx(4 * SECONDS, rel=0.01)
        assert last == pytest.approx(5 * SECONDS, rel=0.01)


def test_concurrent_messages_are_limited_by_posted_receives() -> None:
    found = ends(lab(2), 2, [(0.0, 0, 1, LONG)] * (1 + 2 * MOST))
    second, third = sorted(found)[1 : 1 + MOST], sorted(found)[1 + MOST :]
    assert max(second) == pytest.approx((1 + MOST) * SECONDS, rel=0.05)
    assert min(third) > 1.5 * max(second)


def test_flows_share_link_unevenly_but_saturate_it() -> None:
    """Three hosts send to one, and one to three: in each case the link is always busy."""
    for sends in ([(0.0, r, 0, LONG) for r in (1, 2, 3)], [(0.0, 0, r, LONG) for r in (1, 2, 3)]):
        firsts = []
        for seed in SEEDS:
            found = sorted(ends(lab(4), 4, sends, seed))
            if found[-1] < 0.9 * RETRANSMISSION_SECONDS:  # no end was lost
                assert found[-1] == pytest.approx(3 * SECONDS, rel=0.06)
                firsts.append(found[0] / found[-1])
        assert len(firsts) > 30
        assert 0.6 < fmean(firsts) < 0.95, "an even network: 1"
        assert max(firsts) - min(firsts) > 0.1


def test_message_blocked_at_saturated_link_releases_its_outbound_link() -> None:
    """Ranks 1 to 3 saturate host 0's inbound link; rank 1's message to host 4 is hardly delayed."""
    crowd_in = [(0.0, rank, 0, 4 * LONG) for rank in (1, 2, 3)]
    own = (1e-3, 1, 4, LONG)
    found = {
        kind: fmean(ends(lab(5), 5, [*crowd_in, own], seed, kind)[-1] for seed in SEEDS)
        for kind in (Network, TcpNetwork)
    }
    assert found[TcpNetwork] < 0.9 * found[Network]


def test_congested_link_occasionally_loses_end_of_burst() -> None:
    sends = [(0.0, rank, 0, LONG) for rank in range(1, 6)]
    late = bursts = 0
    for seed in range(400):
        found = ends(lab(6), 6, sends, seed)
        late += sum(end > RETRANSMISSION_SECONDS for end in found)
        bursts += len(found)
    assert 0.2 * STALLS < late / bursts < 2 * STALLS
    # A single message loses nothing.
    assert all(ends(lab(2), 2, [(0.0, 0, 1, LONG)], seed)[0] < 0.1 for seed in range(400))


def test_tcp_network_is_deterministic_for_a_seed() -> None:
    sends = [(0.0, rank, 0, LONG) for rank in (1, 2, 3)]
    assert ends(lab(4), 4, sends, 3) == ends(lab(4), 4, sends, 3) != ends(lab(4), 4, sends, 4)


def test_tcp_sharing_spreads_finish_times_of_simultaneous_sends() -> None:
    """Selected by the option, and compared with the same ranks on evenly shared links."""
    spreads = {}
    for sharing in ("even", "tcp"):
        cluster = Cluster(hosts=4, placement="block", bandwidth_gbit=1.0, sharing=sharing)
        records = VirtualCluster(len(RANKS), cluster).run(lambda t: crowd(t, 3))[0]
        assert records is not None and len(records) == 3 * len(CASES)
        spreads[sharing] = fmean(
            record["ends"][-1] / record["ends"][2] for record in records if record["count"] == 1
        )
    assert spreads["even"] < 1.2 < spreads["tcp"]
