"""The MPI engine: conformance with the requirements on every engine, and its specific features."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from aladdin_mpi.errors import TransportError, WaitTimeoutError
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.mpi.engine import MpiTransport
from tests.conformance import CHECKS
from tests.conformance_collectives import LARGE, full
from tests.messages import naming

PATIENCE = 30.0
"""Time limit in seconds for events that take milliseconds."""


@pytest.fixture(scope="module")
def transport() -> Iterator[MpiTransport]:
    transport = MpiTransport(timeout=PATIENCE)
    yield transport
    transport.close()


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_mpi_transport_conforms(
    transport: MpiTransport, check: Callable[[Transport], None]
) -> None:
    transport.wait(transport.ibarrier())
    check(transport)


def happens(condition: Callable[[], bool]) -> bool:
    """Return whether ``condition`` becomes true without calls of the transport by this rank."""
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


def test_large_messages_progress_without_calls(transport: MpiTransport) -> None:
    pass_on(transport, tag=2000)
    transport.wait(transport.ibarrier())


def test_idle_progress_thread_wakes_when_an_operation_is_posted(
    transport: MpiTransport,
) -> None:
    """All ranks are idle, so each is woken by its own operation."""
    for number in range(3):
        transport.wait(transport.ibarrier())
        assert happens(lambda: transport._signals.polls_rarely)
        pass_on(transport, tag=2010 + number)


def pass_on(transport: MpiTransport, tag: int) -> None:
    """Send a large message to the next rank; only the progress thread enters MPI."""
    dest, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    message = torch.empty(4 * LARGE)
    receive = transport.irecv(message, source, tag)
    send = transport.isend(full(4 * LARGE, transport.rank), dest, tag)
    assert happens(lambda: receive.done and send.done)
    assert torch.equal(message, full(4 * LARGE, source))


def test_unmatched_receive_does_not_delay_other_receives() -> None:
    transport = MpiTransport(timeout=PATIENCE, progress=False)
    messages = [torch.empty(3) for _ in range(3)]
    if transport.rank == 1:
        transport.wait(transport.ibarrier())
        for number in range(3):
            transport.wait(transport.isend(full(3, number), 0, 2003))
            time.sleep(0.5 * number)
    elif transport.rank == 0:
        receives = [transport.irecv(messages[0], 1, 2003)]
        transport.wait(transport.ibarrier())
        # Two messages arrive without a poll: the second is matched when its receive is posted. The
        # third is sent after its receive is posted, and is the only one that still completes here.
        time.sleep(0.2)
        for message in messages[1:]:
            receives.append(transport.irecv(message, 1, 2003))
            transport.wait(receives[-1])
        assert receives[0].done
        assert all(torch.equal(message, full(3, n)) for n, message in enumerate(messages))
    else:
        transport.wait(transport.ibarrier())
    transport.close()


def test_message_handlers_run_without_calls(transport: MpiTransport) -> None:
    seen: list[tuple[int, int]] = []

    def take(source: int, message: Tensor) -> None:
        seen.append((source, message.numel()))

    transport.on_message(2001, 64, take)
    transport.wait(transport.ibarrier())
    dest, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    sends = [transport.isend(torch.zeros(n, dtype=torch.uint8), dest, 2001) for n in range(20)]
    assert happens(lambda: len(seen) == 20)
    assert seen == [(source, n) for n in range(20)]
    transport.wait(*sends)


def test_mpi_transport_works_without_a_progress_thread() -> None:
    transport = MpiTransport(timeout=PATIENCE, progress=False)
    CHECKS["exchange_of_large_messages"](transport)
    CHECKS["allreduce"](transport)
    transport.close()


def test_wait_timeout_names_the_awaited_operation() -> None:
    transport = MpiTransport(timeout=0.2)
    source = (transport.rank + 1) % transport.size
    request = transport.irecv(torch.empty(4), source, 2002)
    with pytest.raises(WaitTimeoutError, match=naming("0.2 s", f"receive from rank {source}, ")):
        transport.wait(request)
    transport.cancel(request)
    # The other ranks may be late, so this wait needs a longer timeout.
    transport.timeout = PATIENCE
    transport.wait(transport.ibarrier())
    transport.close()


def test_close_completes_sends_and_cancels_receives() -> None:
    transport = MpiTransport(timeout=PATIENCE)
    dest, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    transport.irecv(torch.empty(4), source, 2003)
    message = torch.empty(LARGE)
    receive = transport.irecv(message, source, 2004)
    transport.isend(full(LARGE, transport.rank), dest, 2004)
    transport.wait(receive)
    transport.close()
    assert torch.equal(message, full(LARGE, source))


def test_close_refuses_to_drop_a_send_that_awaits_its_event() -> None:
    class Never:
        def query(self) -> bool:
            return False

    transport = MpiTransport(timeout=PATIENCE)
    transport.isend(full(4, 0), transport.rank, 2005, after=Never())
    with pytest.raises(TransportError, match="event"):
        transport.close()


def test_send_abandoned_before_its_event_is_never_sent(transport: MpiTransport) -> None:
    happened: list[bool] = []

    class Later:
        def query(self) -> bool:
            return bool(happened)

    dest, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    given_up = transport.isend(full(4, 1), dest, 2007, after=Later())
    transport.abandon(given_up)
    assert given_up.done
    happened.append(True)
    message = torch.empty(4)
    receive = transport.irecv(message, source, 2007)
    transport.wait(receive, transport.isend(full(4, 2), dest, 2007))
    assert torch.equal(message, full(4, 2))


@pytest.mark.parametrize("direction", ["send", "receive"])
def test_non_contiguous_tensor_is_refused(transport: MpiTransport, direction: str) -> None:
    strided = torch.zeros(4, 4).t()
    with pytest.raises(TransportError, match=naming("contiguous", "(4, 4)", "(1, 4)")):
        if direction == "send":
            transport.isend(strided, transport.rank, 2006)
        else:
            transport.irecv(strided, transport.rank, 2006)


def test_hosts_are_numbered_by_name(transport: MpiTransport) -> None:
    hosts = set(zip(transport.hosts, transport.host_names, strict=True))
    assert len(hosts) == len(set(transport.hosts)) == len(set(transport.host_names))
    assert max(transport.hosts) == len(hosts) - 1
