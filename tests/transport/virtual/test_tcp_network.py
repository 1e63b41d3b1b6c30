"""Messages that share links as over TCP: by hand what does not depend on chance, else by seeds."""

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
"""That a link needs for it."""


def ends(
    cluster: Cluster,
    size: int,
    sends: Sequence[tuple[float, int, int, int]],
    seed: int = 0,
    network_class: type[Network] = TcpNetwork,
) -> list[float]:
    """When each of the messages (time, source, dest, bytes) has come, in their order."""
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
def test_a_message_alone_takes_what_it_does_on_an_even_network(
    nbytes: int, pair: tuple[int, int]
) -> None:
    for seed in SEEDS:
        sends = [(0.0, *pair, nbytes)]
        [even] = ends(lab(2), 4, sends, seed, Network)
        # Its pieces have another size, and the next starts when one gets through.
        assert ends(lab(2), 4, sends, seed) == [pytest.approx(even, rel=1e-6)]


def test_waiting_messages_end_together_and_later_ones_after_them() -> None:
    first = [(0.0, 0, 1, LONG)]
    together = [(1e-4 * turn, 0, 1, LONG) for turn in (1, 2, 3)]
    later = [(SECONDS * 1.5, 0, 1, LONG)]
    for seed in SEEDS:
        alone, *burst, last = ends(lab(2), 2, [*first, *together, *later], seed)
        assert alone == pytest.approx(LATENCY + OVERHEAD + SECONDS, rel=0.01)
        assert max(burst) - min(burst) < 3 * 3 * QUANTUM / 1e9
        assert max(burst) == pytest.approx(4 * SECONDS, rel=0.01)
        assert last == pytest.approx(5 * SECONDS, rel=0.01)


def test_no_more_go_together_than_receives_are_posted() -> None:
    found = ends(lab(2), 2, [(0.0, 0, 1, LONG)] * (1 + 2 * MOST))
    second, third = sorted(found)[1 : 1 + MOST], sorted(found)[1 + MOST :]
    assert max(second) == pytest.approx((1 + MOST) * SECONDS, rel=0.05)
    assert min(third) > 1.5 * max(second)


def test_flows_share_a_link_unevenly_and_fill_it_all_the_same() -> None:
    """Three hosts send to one, and one to three: in each case the link is busy all the time."""
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


def test_message_blocked_at_full_link_frees_its_own_link() -> None:
    """Ranks 1 to 3 fill host 0's link in; rank 1's message to host 4 hardly waits for that."""
    crowd_in = [(0.0, rank, 0, 4 * LONG) for rank in (1, 2, 3)]
    own = (1e-3, 1, 4, LONG)
    found = {
        kind: fmean(ends(lab(5), 5, [*crowd_in, own], seed, kind)[-1] for seed in SEEDS)
        for kind in (Network, TcpNetwork)
    }
    assert found[TcpNetwork] < 0.9 * found[Network]


def test_the_end_of_a_burst_is_lost_now_and_then_on_a_crowded_link() -> None:
    sends = [(0.0, rank, 0, LONG) for rank in range(1, 6)]
    late = bursts = 0
    for seed in range(400):
        found = ends(lab(6), 6, sends, seed)
        late += sum(end > RETRANSMISSION_SECONDS for end in found)
        bursts += len(found)
    assert 0.2 * STALLS < late / bursts < 2 * STALLS
    # Alone nothing is lost.
    assert all(ends(lab(2), 2, [(0.0, 0, 1, LONG)], seed)[0] < 0.1 for seed in range(400))


def test_a_seed_is_one_course_of_events() -> None:
    sends = [(0.0, rank, 0, LONG) for rank in (1, 2, 3)]
    assert ends(lab(4), 4, sends, 3) == ends(lab(4), 4, sends, 3) != ends(lab(4), 4, sends, 4)


def test_ranks_that_all_send_at_once_in_a_cluster_with_tcp() -> None:
    """By the option; against the same ranks where links are shared evenly."""
    spreads = {}
    for sharing in ("even", "tcp"):
        cluster = Cluster(hosts=4, placement="block", bandwidth_gbit=1.0, sharing=sharing)
        records = VirtualCluster(len(RANKS), cluster).run(lambda t: crowd(t, 3))[0]
        assert records is not None and len(records) == 3 * len(CASES)
        spreads[sharing] = fmean(
            record["ends"][-1] / record["ends"][2] for record in records if record["count"] == 1
        )
    assert spreads["even"] < 1.2 < spreads["tcp"]
