"""Measure how fast rank 0 receives gradients that the other ranks send as fast as they can.

Receivers alternate: ALADDIN's server, which accumulates them; the same with models sent back; a
bare mpi4py loop that discards them; and torch's RPC, whose server accumulates. The last line that
rank 0 prints is a JSON list, with one record for every measurement.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import deque
from collections.abc import Callable

from mpi4py import MPI

# isort: split
import torch
from torch import Tensor

from aladdin_mpi.algorithms.aladdin import AladdinServer
from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.exchange.server import ParameterServer
from aladdin_mpi.exchange.server_mailbox import RECEIVES_AHEAD, Header, Kind, new_header
from aladdin_mpi.exchange.worker_mailbox import ModelInbox
from aladdin_mpi.flat.layout import Layout, cut
from aladdin_mpi.optimizers.sgd import MomentumSGD
from aladdin_mpi.options.algorithms import AladdinOptions
from aladdin_mpi.process import guard
from aladdin_mpi.transport.base import Request
from aladdin_mpi.transport.mpi.engine import MpiTransport
from benchmarks.intake import BARE, PI, RPC
from benchmarks.programs.rpc import RpcIntake

TIMEOUT = 120.0
VALUES_PER_MB = 250_000
WARM_UP = 2
"""Warm-up gradients of each worker, which touch all memory once."""
WIRE = DenseWire(torch.float32, torch.device("cpu"))


class Sender:
    """A worker without computing: it sends gradients from a ring, as ALADDIN's outbox does."""

    def __init__(self, transport: MpiTransport, layout: Layout, ring: int) -> None:
        self._transport = transport
        self._layout = layout
        self._slots = [(torch.ones(layout.numel), list[Request]()) for _ in range(ring)]
        self._parameters = torch.ones(layout.numel)
        self._inbox = ModelInbox(transport, layout, WIRE)

    def run(self, gradients: int) -> None:
        """Send this number of gradients, and blend in rank 0's models."""
        self._inbox.open()
        for turn in range(gradients):
            vector, requests = self._slots[turn % len(self._slots)]
            self._transport.wait(*requests)
            requests[:] = [self._announce(Header(Kind.BUCKETS, gradients=1))]
            requests += [self._send(vector[bucket.part]) for bucket in self._layout.buckets]
            self._inbox.blend_into(self._parameters)
        for _, requests in self._slots:
            self._transport.wait(*requests)
            requests.clear()
        self._transport.wait(self._announce(Header(Kind.END)))
        self._inbox.drain_into(self._parameters)

    def _announce(self, header: Header) -> Request:
        return self._transport.isend(header.pack(), 0, Tag.GRADIENT)

    def _send(self, message: Tensor) -> Request:
        return self._transport.isend(message, 0, Tag.GRADIENT)


class _Line:
    """One worker's messages, received with bare mpi4py: header, buckets, header, buckets, ..."""

    def __init__(self, comm: MPI.Comm, worker: int, layout: Layout) -> None:
        self._comm = comm
        self._worker = worker
        self._sizes = [bucket.numel for bucket in layout.buckets]
        self._free = [torch.ones(layout.largest) for _ in range(RECEIVES_AHEAD)]

    def open(self) -> None:
        self._posted: deque[tuple[MPI.Request, Tensor, bool]] = deque()
        self._turns = itertools.cycle(range(1 + len(self._sizes)))
        for _ in range(RECEIVES_AHEAD):
            self._post()

    @property
    def head(self) -> MPI.Request:
        return self._posted[0][0]

    def _post(self) -> None:
        turn = next(self._turns)
        buffer = self._free.pop() if turn else new_header()
        message = buffer[: self._sizes[turn - 1]] if turn else buffer
        request = self._comm.Irecv([message.numpy(), MPI.BYTE], self._worker, Tag.GRADIENT)
        self._posted.append((request, buffer, turn > 0))

    def drop(self) -> bool:
        """Discard the first message and repost its receive; return whether it was the last."""
        _, buffer, is_bucket = self._posted.popleft()
        if is_bucket:
            self._free.append(buffer)
        elif Header.unpack(buffer.tolist()).kind == Kind.END:
            self._close()
            return True
        self._post()
        return False

    def _close(self) -> None:
        for request, buffer, is_bucket in self._posted:
            request.Cancel()
            request.Wait()
            if is_bucket:
                self._free.append(buffer)


class BareReceiver:
    """The server's receives in the server's order, with mpi4py alone; messages are discarded."""

    def __init__(self, transport: MpiTransport, layout: Layout) -> None:
        # On the senders' communicator: the senders must be the same for every receiver.
        comm = transport._messages
        self._transport = transport
        self._lines = [_Line(comm, worker, layout) for worker in range(1, transport.size)]

    def run(self, gradients: int) -> None:
        """Receive until every worker has reported its end; then answer as the server does."""
        living = list(self._lines)
        for line in living:
            line.open()
        while living:
            line = living[MPI.Request.Waitany([line.head for line in living])]
            if line.drop():
                living.remove(line)
        word, send = Header(Kind.END).pack(), self._transport.isend
        self._transport.wait(
            *[send(word, worker, Tag.MODEL) for worker in range(1, self._transport.size)]
        )


class AladdinReceiver:
    """The server's loop of training."""

    def __init__(self, transport: MpiTransport, layout: Layout, pi: int) -> None:
        parameters = torch.ones(layout.numel)
        server = ParameterServer(transport, layout, parameters, WIRE, lambda samples: 1e-3)
        sgd = MomentumSGD(parameters, momentum=0.9, weight_decay=1e-4)
        self._server = AladdinServer(server, sgd, AladdinOptions.model_validate({"pi": pi}))

    def run(self, gradients: int) -> None:
        """Serve until every worker has reported its end."""
        self._server.run()


def measure(receiver: str, layout: Layout, gradients: int, ring: int) -> float:
    """Return the seconds in which rank 0 receives ``gradients`` of every other rank."""
    if receiver == RPC:
        return measure_rpc(layout, gradients, ring)
    # The bare loop calls MPI all the time and needs no progress thread.
    progress = receiver != BARE or MPI.COMM_WORLD.rank > 0
    transport = MpiTransport(timeout=TIMEOUT, progress=progress)
    run: Callable[[int], None]
    if transport.rank > 0:
        run = Sender(transport, layout, ring).run
    elif receiver == BARE:
        run = BareReceiver(transport, layout).run
    else:
        run = AladdinReceiver(transport, layout, PI[receiver]).run
    for count in (WARM_UP, gradients):
        transport.wait(transport.ibarrier())
        start = time.perf_counter()
        run(count)
        seconds = time.perf_counter() - start
    transport.close()
    return seconds


def measure_rpc(layout: Layout, gradients: int, ring: int) -> float:
    """Return the same with torch's RPC."""
    intake = RpcIntake(layout, ring, TIMEOUT)
    for count in (WARM_UP, gradients):
        intake.prepare(count)
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        intake.run(count)
        seconds = time.perf_counter() - start
    intake.close()
    return seconds


def main() -> int:
    """Measure every receiver with every size of buckets ``--repeats`` times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--bucket-mb", type=float, nargs="+", required=True)
    parser.add_argument("--gradients", type=int, required=True)
    parser.add_argument("--ring", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--receiver", nargs="+", choices=[BARE, *PI, RPC], required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    records = []
    for _, bucket_mb, receiver in itertools.product(
        range(args.repeats), args.bucket_mb, args.receiver
    ):
        numel = int(args.megabytes * VALUES_PER_MB)
        layout = cut(numel, 1, bucket_mb, shard_mb=max(16.0, bucket_mb))
        seconds = measure(receiver, layout, args.gradients, args.ring)
        records.append({"bucket_mb": bucket_mb, "receiver": receiver, "seconds": seconds})
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(records), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(guard.run_guarded(main))
