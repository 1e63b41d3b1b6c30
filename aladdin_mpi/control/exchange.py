"""Exchange of small facts outside training, and errors that all ranks agree on."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from typing import Any, TypeVar

import torch
from torch import Tensor

from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import PeerFailedError, RefusedError, UserError, combined
from aladdin_mpi.process.guard import no_exit
from aladdin_mpi.transport.base import Request, Transport, meet, surviving_ranks, wait_ended

T = TypeVar("T")


def gather(transport: Transport, fact: Any) -> list[Any]:
    """Return all ranks' ``fact`` (any JSON value) by rank on rank 0; [] elsewhere.

    The entry of a failed rank is None.
    """
    facts = meet(transport, fact)
    if facts is not None:
        return [] if transport.rank else [fact, *map(_json_copy, facts[1:])]
    if transport.rank:
        transport.wait(*_send(transport, _to_json(fact), 0, Tag.SETUP))
        return []
    received = [fact]
    for rank in range(1, transport.size):
        received.append(None)
        with suppress(PeerFailedError):
            received[rank] = _from_json(_receive(transport, rank, Tag.SETUP))
    return received


def broadcast(transport: Transport, fact: Any) -> Any:
    """Return rank 0's ``fact`` on every surviving rank."""
    facts = meet(transport, None if transport.rank else _json_copy(fact))
    if facts is not None:
        return facts[0] if transport.rank else fact
    return _broadcast(transport, fact)


def _broadcast(transport: Transport, fact: Any) -> Any:
    """Broadcast by messages."""
    if transport.rank:
        return _from_json(_receive(transport, 0, Tag.SETUP))
    message = _to_json(fact)
    for dest in range(1, transport.size):
        with suppress(PeerFailedError):
            transport.wait(*_send(transport, message, dest, Tag.SETUP))
    return fact


def broadcast_tensor(transport: Transport, values: Tensor, root: int) -> None:
    """Copy the CPU tensor ``values`` of rank ``root`` to every surviving rank."""
    if transport.has_collectives and not transport.survives:
        transport.wait(transport.ibroadcast(values, root))
        return
    if root:
        _pass_on(transport, values, root, [0])
    _pass_on(
        transport, values, 0, [rank for rank in surviving_ranks(transport) if rank not in (0, root)]
    )


def allreduce_tensors(transport: Transport, *tensors: Tensor) -> None:
    """Replace each of ``tensors`` by its sum over all surviving ranks, the same ones for all."""
    if transport.has_collectives and not transport.survives:
        for values in tensors:
            transport.wait(transport.iallreduce(values))
        return
    if transport.rank:
        for values in tensors:
            transport.wait(transport.isend(values, 0, Tag.SETUP))
    else:
        for source in surviving_ranks(transport)[1:]:
            # New ones for each rank: an excluded one may still write into its own.
            others = [torch.empty_like(each) for each in tensors]
            with suppress(PeerFailedError):
                for other in others:
                    transport.wait(transport.irecv(other, source, Tag.SETUP))
                for values, other in zip(tensors, others, strict=True):
                    values.add_(other)
    for values in tensors:
        broadcast_tensor(transport, values, 0)


def _pass_on(transport: Transport, values: Tensor, source: int, dests: list[int]) -> None:
    if transport.rank == source:
        wait_ended(transport, [transport.isend(values, dest, Tag.SETUP) for dest in dests])
    elif transport.rank in dests:
        transport.wait(transport.irecv(values, source, Tag.SETUP))


def all_or_none(transport: Transport, attempt: Callable[[], T]) -> T:
    """Return the result of ``attempt`` if it succeeds on every rank; else close the transport.

    Raises:
        UserError: on rank 0: the error, and the ranks concerned if not all.
        RefusedError: on the other ranks.
    """
    result, problem = attempt_all(transport, attempt)
    refuse(transport, problem)
    return result  # type: ignore[return-value]


def refuse(transport: Transport, problem: str) -> None:
    """End the run on every rank because of a problem that all know; "" is none.

    Raises:
        UserError, RefusedError: as :func:`all_or_none`.
    """
    if problem:
        transport.close()
        raise UserError(problem, agreed=True) if transport.rank == 0 else RefusedError


def attempt_all(transport: Transport, attempt: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result of ``attempt``, and on every rank the UserErrors of all ranks, or ""."""
    result: T | None = None
    problem = None
    try:
        with no_exit():
            result = attempt()
    except UserError as error:
        problem = str(error)
    problems = meet(transport, problem)
    if problems is not None and problems.count(None) == len(problems):
        return result, ""
    if problems is None:
        problems = gather(transport, problem)
    # By messages: the other ranks must fail after rank 0, whose error is the informative one.
    return result, _broadcast(transport, combined(problems, transport.size))


def packed(value: Any) -> Tensor:
    """Return the bytes of a value that a checkpoint can hold: tensors, numbers, strings, ..."""
    file = BytesIO()
    torch.save(value, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def unpacked(data: Tensor) -> Any:
    """Return the value of :func:`packed` bytes; its tensors are on the CPU."""
    # The sender's device may not exist here.
    return torch.load(BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)


def send_object(transport: Transport, value: Any, dest: int, tag: int) -> list[Request]:
    """Start to send a value that :func:`packed` accepts."""
    return _send(transport, packed(value), dest, tag)


def receive_object(
    transport: Transport,
    source: int,
    tag: int,
    timeout: float | None = None,
    unless: Callable[[], bool] = lambda: False,
    wake: Request | None = None,
) -> Any:
    """Receive a value sent by :func:`send_object`.

    ``timeout`` in seconds replaces the transport's, for each of its two messages, except if
    ``unless()`` is true when it expires.

    Raises:
        PeerFailedError: ``source`` has failed.
        TimeoutError: it did not arrive in that time, or before ``wake`` ended.
    """
    return unpacked(_receive(transport, source, tag, timeout, unless, wake))


def _to_json(fact: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(fact).encode()), dtype=torch.uint8)


def _from_json(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


def _json_copy(fact: Any) -> Any:
    """Return ``fact`` as other ranks receive it."""
    return fact if fact is None or type(fact) in (str, int) else json.loads(json.dumps(fact))


def _send(transport: Transport, data: Tensor, dest: int, tag: int) -> list[Request]:
    """Start to send the number of bytes, then the bytes."""
    return [transport.isend(part, dest, tag) for part in (torch.tensor([data.numel()]), data)]


def _receive(
    transport: Transport,
    source: int,
    tag: int,
    timeout: float | None = None,
    unless: Callable[[], bool] = lambda: False,
    wake: Request | None = None,
) -> Tensor:
    wakes = [] if wake is None else [wake]

    def receive(buffer: Tensor) -> Tensor:
        request = transport.irecv(buffer, source, tag)
        first = transport.wait_any([request, *wakes], timeout)
        if first < 0 and unless():
            first = transport.wait_any([request, *wakes])
        if first:
            transport.cancel(request)
            if not request.nbytes:  # nothing has arrived since
                raise TimeoutError
        return buffer

    size = receive(torch.zeros(1, dtype=torch.int64))
    return receive(torch.empty(int(size), dtype=torch.uint8))


def barrier(transport: Transport) -> None:
    """Wait until every surviving rank has called it.

    Raises:
        PeerFailedError: rank 0 has failed.
    """
    if not transport.survives:
        transport.wait(transport.ibarrier())
        return
    empty = torch.empty(0, dtype=torch.uint8)
    if transport.rank:
        transport.isend(empty, 0, Tag.BARRIER)
        transport.wait(transport.irecv(empty, 0, Tag.BARRIER))
        return
    others = surviving_ranks(transport)[1:]
    wait_ended(transport, [transport.irecv(empty, rank, Tag.BARRIER) for rank in others])
    for rank in others:
        transport.isend(empty, rank, Tag.BARRIER)
