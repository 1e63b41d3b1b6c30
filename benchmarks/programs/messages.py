"""Measure messages between two ranks, one at a time and in a row, or among all hosts at once.

The last line that rank 0 prints is a JSON list, with one record for every size: seconds for one
message on an idle network, and for each of many in a row. With `--all-at-once` instead: seconds for
a message from every rank to every rank of the other hosts.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

from aladdin_mpi.process import guard
from aladdin_mpi.transport.mpi.engine import MpiTransport  # before MPI, whose start it configures

# isort: split
import torch
from mpi4py import MPI
from torch import Tensor

TAG = 1
TIMEOUT = 60.0


def _send(transport: MpiTransport, buffers: list[Tensor]) -> None:
    peer = 1 - transport.rank
    transport.wait(*[transport.isend(buffer, peer, TAG) for buffer in buffers])


def _receive(transport: MpiTransport, buffers: list[Tensor]) -> None:
    peer = 1 - transport.rank
    transport.wait(*[transport.irecv(buffer, peer, TAG) for buffer in buffers])


def one_way(transport: MpiTransport, nbytes: int) -> float:
    """Return the seconds of one message: half of a round trip."""
    buffers = [torch.zeros(nbytes, dtype=torch.uint8)]
    start = time.perf_counter()
    turns = (_send, _receive) if transport.rank == 0 else (_receive, _send)
    for turn in turns:
        turn(transport, buffers)
    return (time.perf_counter() - start) / 2


def in_a_row(transport: MpiTransport, nbytes: int, count: int) -> float:
    """Return the seconds per message of ``count`` sent together; a short answer ends them."""
    buffers = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(count)]
    answer = [torch.zeros(1, dtype=torch.uint8)]
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    if transport.rank == 0:
        _send(transport, buffers)
        _receive(transport, answer)
    else:
        _receive(transport, buffers)
        _send(transport, answer)
    return (time.perf_counter() - start) / count


def all_at_once(transport: MpiTransport, nbytes: int, count: int) -> float:
    """Return the seconds per message from each rank to each other host, ``count`` in a row."""
    peers = [r for r, host in enumerate(transport.hosts) if host != transport.host]
    given = torch.zeros(nbytes, dtype=torch.uint8)
    taken = [torch.zeros(nbytes, dtype=torch.uint8) for _ in peers]
    transport.wait(transport.ibarrier())
    start = time.perf_counter()
    for _ in range(count):
        receives = [transport.irecv(b, r, TAG) for b, r in zip(taken, peers, strict=True)]
        transport.wait(*receives, *(transport.isend(given, r, TAG) for r in peers))
    transport.wait(transport.ibarrier())
    return (time.perf_counter() - start) / count


def main() -> int:
    """Measure every size; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, nargs="+", required=True, help="sizes of messages")
    parser.add_argument("--count", type=int, default=20, help="messages in a row")
    parser.add_argument(
        "--repeats", type=int, default=9, help="number of measurements of which the median is taken"
    )
    parser.add_argument("--all-at-once", action="store_true", help="among all hosts")
    args = parser.parse_args()
    transport = MpiTransport(timeout=TIMEOUT)
    records = []
    for nbytes in args.bytes:
        if args.all_at_once:
            turns = [all_at_once(transport, nbytes, args.count) for _ in range(args.repeats)]
            records.append({"bytes": nbytes, "each": median(turns)})
            continue
        singles = [one_way(transport, nbytes) for _ in range(1 + args.repeats)][1:]
        of_rows = max(1, args.repeats // 3)
        rows = [in_a_row(transport, nbytes, args.count) for _ in range(1 + of_rows)][1:]
        records.append({"bytes": nbytes, "one": median(singles), "each": median(rows)})
    transport.close()
    if transport.rank == 0:
        print(json.dumps(records), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(guard.run_guarded(main))
