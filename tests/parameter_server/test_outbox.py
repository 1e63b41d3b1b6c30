"""The outbox's state for checkpoints: what was sent last, and what still waits."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from aladdin_mpi.codec.quantised import make_codec
from aladdin_mpi.exchange.worker_mailbox import Outbox
from aladdin_mpi.flat.layout import Layout, cut
from aladdin_mpi.transport.base import Transport

NUMEL, KEPT = 700, 3
CPU = torch.device("cpu")
WIRES = pytest.mark.parametrize(
    ("wire", "dtype"),
    [("fp32", torch.float32), ("fp32", torch.bfloat16), ("int8", torch.float32)],
    ids=str,
)


class Sink:
    """A transport whose sends never end."""

    def isend(self, *_: object, **__: object) -> Any:
        return object()

    def test(self, request: object) -> bool:
        return False


def layout() -> Layout:
    return cut(NUMEL, 1, bucket_mb=0.0012, shard_mb=1.0)


def outbox(wire: str, dtype: torch.dtype) -> Outbox:
    codec = make_codec(wire, layout(), CPU, dtype=dtype)
    transport = cast(Transport, Sink())

    def new_vector() -> torch.Tensor:
        return torch.zeros(NUMEL, dtype=dtype)

    return Outbox(transport, layout(), codec, new_vector, ring=1, keep=KEPT)


def send(box: Outbox, seed: int) -> None:
    g = box.begin(0)
    g.copy_(torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)))
    for bucket in layout().buckets:
        box.put(bucket)
    box.end()


def newest(box: Outbox) -> torch.Tensor:
    values = torch.zeros(NUMEL)
    assert box.newest is not None
    for bucket in layout().buckets:
        box.add(box.newest, bucket, (bucket.of(values), 1 / box.newest.count))
    return values


@WIRES
def test_last_message_is_restored(wire: str, dtype: torch.dtype) -> None:
    assert len(layout().buckets) > 2
    before, after = outbox(wire, dtype), outbox(wire, dtype)
    send(before, 1)
    state = before.state_dict()
    assert state["former"]["count"] == 1
    state["former"]["count"] = 2  # as of a sum
    after.load_state_dict(state)
    assert after.newest is not None and after.newest.count == 2
    assert newest(before).norm() > 10
    torch.testing.assert_close(2 * newest(after), newest(before), rtol=1e-2, atol=1e-2)
    after.load_state_dict({**state, "former": None})
    assert after.newest is None


@WIRES
def test_gradients_that_wait_are_not_in_the_state(wire: str, dtype: torch.dtype) -> None:
    box = outbox(wire, dtype)
    send(box, 1)
    sent = newest(box)
    send(box, 2)
    send(box, 3)  # added to the second
    assert box.coalesced == 1 and not torch.allclose(newest(box), sent, atol=0.1)
    state = box.state_dict()
    assert all(value is None for value in state["codec"].values())
