"""Values that are sent in two messages, their size and their bytes."""

from __future__ import annotations

import pytest
import torch

from aladdin_mpi.control.exchange import packed, receive_object, send_object
from aladdin_mpi.transport.virtual.engine import VirtualTransport
from tests.virtual_lab import run

TAG, GIVE_UP = 5, 6
LATE = 0.5


@pytest.mark.parametrize("announced", [False, True])
def test_receiver_stops_waiting_for_a_sender_that_hangs(announced: bool) -> None:
    """Also if the sender hangs between the two messages."""

    def main(transport: VirtualTransport) -> float:
        if transport.rank == 0:
            if announced:
                transport.isend(torch.tensor([packed("value").numel()]), 1, TAG)
            transport.sleep(LATE)
            transport.isend(torch.zeros(1, dtype=torch.uint8), 1, GIVE_UP)
            transport.sleep(LATE)
            return 0.0
        wake = transport.irecv(torch.empty(0, dtype=torch.uint8), 1, TAG)
        transport.on_message(GIVE_UP, 1, lambda source, message: transport.abandon(wake))
        with pytest.raises(TimeoutError):
            receive_object(transport, 0, TAG, wake=wake)
        return transport.now()

    assert run(2, main)[1] == pytest.approx(LATE, rel=0.01)


@pytest.mark.parametrize(("patience", "arrives"), [(0.1, False), (1.0, True)])
def test_timeout_applies_to_each_message(patience: float, arrives: bool) -> None:
    def main(transport: VirtualTransport) -> object:
        if transport.rank == 0:
            value = packed("value")
            for part in torch.tensor([value.numel()]), value:
                transport.sleep(LATE)
                transport.wait(transport.isend(part, 1, TAG))
            return None
        try:
            return receive_object(transport, 0, TAG, timeout=patience)
        except TimeoutError:
            return None

    assert run(2, main)[1] == ("value" if arrives else None)


def test_sender_that_is_known_to_be_late_is_waited_for() -> None:
    def main(transport: VirtualTransport) -> object:
        if transport.rank == 0:
            transport.sleep(LATE)
            transport.wait(*send_object(transport, "value", 1, TAG))
            return None
        return receive_object(transport, 0, TAG, timeout=0.1, unless=lambda: True)

    assert run(2, main)[1] == "value"
