"""Small facts that ranks tell each other outside training, and errors that they agree on."""

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
    """Everyone's ``fact`` (anything that JSON holds) in rank order at rank 0; [] elsewhere.

    None of a rank that has failed.
    """
    facts = meet(transport, fact)
    if facts is not None:
        return [] if transport.rank else [fact, *map(_as_read, facts[1:])]
    if transport.rank:
        _send(transport, _written(fact), 0)
        return []
    return [fact, *(_receive_if_living(transport, rank) for rank in range(1, transport.size))]


def broadcast(transport: Transport, fact: Any) -> Any:
    """Rank 0's ``fact`` at every rank that lives."""
    facts = meet(transport, None if transport.rank else _as_read(fact))
    if facts is not None:
        return facts[0] if transport.rank else fact
    return _broadcast(transport, fact)


def _broadcast(transport: Transport, fact: Any) -> Any:
    """By messages."""
    if transport.rank:
        return _receive(transport, 0)
    message = _written(fact)
    for dest in range(1, transport.size):
        with suppress(PeerFailedError):
            _send(transport, message, dest)
    return fact


def broadcast_tensor(transport: Transport, values: Tensor, root: int) -> None:
    """Copy the CPU tensor ``values`` of rank ``root`` into that of every rank that lives."""
    if not transport.survives:
        transport.wait(transport.ibroadcast(values, root))
        return
    if root:
        _pass_on(transport, values, root, [0])
    _pass_on(
        transport, values, 0, [rank for rank in surviving_ranks(transport) if rank not in (0, root)]
    )


def allreduce_tensor(transport: Transport, values: Tensor) -> None:
    """Replace ``values`` by their sum over all ranks that live."""
    if not transport.survives:
        transport.wait(transport.iallreduce(values))
        return
    if transport.rank:
        transport.wait(transport.isend(values, 0, Tag.SETUP))
    else:
        other = torch.empty_like(values)
        for source in surviving_ranks(transport)[1:]:
            with suppress(PeerFailedError):
                transport.wait(transport.irecv(other, source, Tag.SETUP))
                values.add_(other)
    broadcast_tensor(transport, values, 0)


def _pass_on(transport: Transport, values: Tensor, source: int, dests: list[int]) -> None:
    if transport.rank == source:
        wait_ended(transport, [transport.isend(values, dest, Tag.SETUP) for dest in dests])
    elif transport.rank in dests:
        transport.wait(transport.irecv(values, source, Tag.SETUP))


def all_or_none(transport: Transport, attempt: Callable[[], T]) -> T:
    """Let every rank make an attempt; if one cannot, none goes on.

    Raises:
        UserError: at rank 0, what was wrong, and on which ranks if not on all.
        RefusedError: at the other ranks.
    """
    result: T | None = None
    problem = None
    try:
        with no_exit():
            result = attempt()
    except UserError as error:
        problem = str(error)
    summary = _summary(transport, problem)
    if summary:
        transport.close()
        raise UserError(summary, agreed=True) if transport.rank == 0 else RefusedError
    return result  # type: ignore[return-value]


def _summary(transport: Transport, problem: str | None) -> str:
    """What is wrong, at every rank."""
    problems = meet(transport, problem)
    if problems is None:
        problems = gather(transport, problem)
    elif problems.count(None) == len(problems):
        return ""
    # By messages: the others' errors are to come behind that of rank 0, which says what is wrong.
    found: str = _broadcast(transport, combined(problems, transport.size))
    return found


def packed(value: Any) -> Tensor:
    """As bytes, what a checkpoint can hold: tensors, numbers, strings, lists and dicts."""
    file = BytesIO()
    torch.save(value, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def unpacked(data: Tensor) -> Any:
    """What :func:`packed` has made bytes of."""
    return torch.load(BytesIO(data.numpy().tobytes()), weights_only=True)


def send_object(transport: Transport, value: Any, dest: int, tag: Tag) -> list[Request]:
    """Start to send what :func:`packed` takes."""
    data = packed(value)
    parts = torch.tensor([data.numel()]), data
    return [transport.isend(part, dest, tag) for part in parts]


def receive_object(
    transport: Transport,
    source: int,
    tag: Tag,
    timeout: float | None = None,
    unless: Callable[[], bool] = lambda: False,
) -> Any:
    """What :func:`send_object` has sent.

    ``timeout`` in seconds replaces the transport's own, ``unless`` that is true when it is over.

    Raises:
        PeerFailedError: that rank has died.
        TimeoutError: nothing came in that time.
    """
    size = torch.zeros(1, dtype=torch.int64)
    announced = [transport.irecv(size, source, tag)]
    if transport.wait_any(announced, timeout) < 0:
        if not unless():
            raise TimeoutError
        transport.wait(*announced)
    data = torch.empty(int(size), dtype=torch.uint8)
    transport.wait(transport.irecv(data, source, tag))
    return unpacked(data)


def _written(fact: Any) -> tuple[Tensor, Tensor]:
    """As a message's length, and the message."""
    text = torch.frombuffer(bytearray(json.dumps(fact).encode()), dtype=torch.uint8)
    return torch.tensor([text.numel()]), text


def _as_read(fact: Any) -> Any:
    """What comes of ``fact`` where it is sent."""
    return fact if fact is None or type(fact) in (str, int) else json.loads(json.dumps(fact))


def _send(transport: Transport, message: tuple[Tensor, Tensor], dest: int) -> None:
    requests = [transport.isend(part, dest, Tag.SETUP) for part in message]
    transport.wait(*requests)


def _receive_if_living(transport: Transport, source: int) -> Any:
    try:
        return _receive(transport, source)
    except PeerFailedError:
        return None


def _receive(transport: Transport, source: int) -> Any:
    size = torch.zeros(1, dtype=torch.int64)
    transport.wait(transport.irecv(size, source, Tag.SETUP))
    text = bytearray(int(size))
    room = torch.frombuffer(text, dtype=torch.uint8)
    transport.wait(transport.irecv(room, source, Tag.SETUP))
    return json.loads(text)


def barrier(transport: Transport) -> None:
    """Wait until every rank that lives has come here.

    Raises:
        PeerFailedError: rank 0 has failed.
    """
    if not transport.survives:
        transport.wait(transport.ibarrier())
    elif transport.rank:
        transport.isend(_nothing(), 0, Tag.BARRIER)
        transport.wait(transport.irecv(_nothing(), 0, Tag.BARRIER))
    else:
        _wait_for_all(transport)


def _wait_for_all(transport: Transport) -> None:
    others = surviving_ranks(transport)[1:]
    wait_ended(transport, [transport.irecv(_nothing(), rank, Tag.BARRIER) for rank in others])
    for rank in others:
        transport.isend(_nothing(), rank, Tag.BARRIER)


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)
