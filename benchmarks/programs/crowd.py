"""Measure the arrival of messages that eight ranks on four hosts send at the same time.

Each rank sends to the first rank of every other host. Rank 0 prints a JSON list with a record for
every size and repetition: the arrival times of its messages in seconds, and the last one of each
sender.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from aladdin_mpi.control.exchange import gather
from aladdin_mpi.process import guard
from aladdin_mpi.transport.base import Transport

RANKS = (0, 0, 1, 1, 2, 2, 3, 3)
"""The host of each rank, ..."""
TAKERS = (0, 2, 4, 6)
"""... and the ranks that receive messages."""
CASES = ((2_350_000, 1), (3_500_000, 4))
"""Bytes of a message, and the number of messages sent together from one rank to another: a model's
part in one bucket, and in four."""
TAG = 1
REST = 0.05
"""Seconds before a repetition, so that it does not overlap with the previous one."""
GAP = 0.0005
"""Seconds between two messages to one rank, as between two buckets that a worker pushes."""
TIMEOUT = 60.0


def crowd(transport: Transport, repeats: int) -> list[dict[str, Any]]:
    """Return the records on rank 0."""
    records = []
    for nbytes, count in CASES:
        for _ in range(repeats):
            found = gather(transport, _once(transport, nbytes, count))
            ends = [each for mine in found for each in mine]
            if transport.rank == 0:
                records.append({"bytes": nbytes, "count": count, **_summary(ends)})
    return records


def _once(transport: Transport, nbytes: int, count: int) -> list[tuple[int, float]]:
    """Return the sender and the arrival time of each message to this rank."""
    rank, host = transport.rank, RANKS[transport.rank]
    takes = rank in TAKERS
    sources = [s for s in range(len(RANKS)) if RANKS[s] != host and takes]
    receives = [
        (source, transport.irecv(torch.empty(nbytes, dtype=torch.uint8), source, TAG))
        for source in sources
        for _ in range(count)
    ]
    transport.wait(transport.ibarrier())
    transport.sleep(REST)
    transport.wait(transport.ibarrier())
    start = transport.now()
    given = torch.zeros(nbytes, dtype=torch.uint8)
    dests = [d for d in TAKERS if RANKS[d] != host]
    sends = []
    for turn in range(count):
        if turn:
            transport.sleep(GAP)
        sends += [transport.isend(given, dest, TAG) for dest in dests]
    ends = []
    while receives:
        index = transport.wait_any([receive for _, receive in receives])
        source, _ = receives.pop(index)
        ends.append((source, transport.now() - start))
    transport.wait(*sends)
    return ends


def _summary(ends: Sequence[tuple[int, float]]) -> dict[str, list[float]]:
    last: dict[int, float] = defaultdict(float)
    for source, seconds in ends:
        last[source] = max(last[source], seconds)
    return {"ends": sorted(seconds for _, seconds in ends), "senders": sorted(last.values())}


def main() -> int:
    """Run over MPI; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    from aladdin_mpi.transport.mpi.engine import MpiTransport  # not needed in the simulator

    transport = MpiTransport(timeout=TIMEOUT)
    records = crowd(transport, args.repeats)
    transport.close()
    if transport.rank == 0:
        print(json.dumps(records), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(guard.run_guarded(main))
