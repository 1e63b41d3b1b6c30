"""How long messages take between two ranks, one at a time and in a row.

The last line that rank 0 prints is a JSON list, with one record for every size: seconds for one
message of an idle network, and for one of many that follow each other.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

from mpi4py import MPI

# isort: split
import torch
from torch import Tensor

from aladdin_mpi import guard
from aladdin_mpi.transport.mpi import MpiTransport

TAG = 1
TIMEOUT = 60.0


def _send(transport: MpiTransport, buffers: list[Tensor]) -> None:
    peer = 1 - transport.rank
    transport.wait_all([transport.isend(buffer, peer, TAG) for buffer in buffers])


def _receive(transport: MpiTransport, buffers: list[Tensor]) -> None:
    peer = 1 - transport.rank
    transport.wait_all([transport.irecv(buffer, peer, TAG) for buffer in buffers])


def one_way(transport: MpiTransport, nbytes: int) -> float:
    """Seconds of one message: half of its way to and fro."""
    buffers = [torch.zeros(nbytes, dtype=torch.uint8)]
    start = time.perf_counter()
    turns = (_send, _receive) if transport.rank == 0 else (_receive, _send)
    for turn in turns:
        turn(transport, buffers)
    return (time.perf_counter() - start) / 2


def in_a_row(transport: MpiTransport, nbytes: int, count: int) -> float:
    """Seconds of each of ``count`` messages, sent at once; a short answer ends them."""
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


def main() -> int:
    """Measure every size; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, nargs="+", required=True, help="sizes of messages")
    parser.add_argument("--count", type=int, default=20, help="messages in a row")
    parser.add_argument("--repeats", type=int, default=9, help="of which medians are taken")
    args = parser.parse_args()
    transport = MpiTransport(timeout=TIMEOUT)
    records = []
    for nbytes in args.bytes:
        singles = [one_way(transport, nbytes) for _ in range(1 + args.repeats)][1:]
        rows = [in_a_row(transport, nbytes, args.count) for _ in range(1 + args.repeats // 3)][1:]
        records.append({"bytes": nbytes, "one": median(singles), "each": median(rows)})
    transport.close()
    if transport.rank == 0:
        print(json.dumps(records), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(guard.run_guarded(main))
