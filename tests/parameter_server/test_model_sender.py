"""A server sends its models as soon as possible, whatever other messages arrive."""

from __future__ import annotations

import pytest
import torch

from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.exchange.server import ParameterServer
from aladdin_mpi.exchange.server_mailbox import Header, Kind, new_header
from aladdin_mpi.flat.layout import cut
from aladdin_mpi.transport.base import Transport
from tests import virtual_lab

NUMEL = 1_000_000


def serve(transport: Transport, models: int, exact: bool) -> None:
    """Answer each gradient with several models, the first of which delays the others."""
    wire = DenseWire(torch.float32, torch.device("cpu"))
    layout = cut(NUMEL, 1, 8.0, 8.0)
    server = ParameterServer(transport, layout, torch.zeros(NUMEL), wire, lambda samples: 1.0)
    for arrival in server.gradients():
        for _ in range(models):
            server.values[0] += 1
            server.send_model(arrival.worker, arrival.bucket, exact=exact)


def train(transport: Transport, awaited: int) -> list[float]:
    """Send a gradient, and end only after ``awaited`` models have arrived."""
    models = []
    header = Header(Kind.BUCKETS, gradients=1, samples=1).pack()
    transport.isend(header, 0, Tag.GRADIENT)
    transport.isend(torch.ones(NUMEL), 0, Tag.GRADIENT)
    for _ in range(awaited):
        model = torch.empty(NUMEL)
        transport.wait(transport.irecv(new_header(), 0, Tag.MODEL))
        transport.wait(transport.irecv(model, 0, Tag.MODEL))
        models.append(float(model[0]))
    transport.isend(Header(Kind.END).pack(), 0, Tag.GRADIENT)
    end = transport.irecv(new_header(), 0, Tag.MODEL)
    transport.wait(end)
    assert Header.received(end).kind == Kind.END
    return models


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_server_sends_a_model_without_waiting_for_a_gradient(workers: int, exact: bool) -> None:
    """All workers wait for the second model, so no gradient arrives before it is sent."""

    def main(transport: Transport) -> list[float] | None:
        if transport.rank == 0:
            serve(transport, 2, exact)
            return None
        return train(transport, 2)

    _, *models = virtual_lab.run(1 + workers, main, virtual_lab.lab(1 + workers))
    for first, last in models:
        assert 1 <= first < last <= 2 * workers


def test_newest_model_replaces_models_waiting_to_be_sent() -> None:
    """Of five models, the first is sent at once and the last follows it."""

    def main(transport: Transport) -> list[float] | None:
        if transport.rank == 0:
            serve(transport, 5, exact=True)
            return None
        return train(transport, 2)

    _, models = virtual_lab.run(2, main, virtual_lab.lab(2))
    assert models == [1, 5]
