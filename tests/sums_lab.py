"""Requirements on sums with a residual, over MPI and in simulation; every rank runs them."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from aladdin_mpi.allreduce.low_rank import LowRank
from aladdin_mpi.allreduce.with_residual import SumCodec, make_all_reduce
from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.codec.quantised import make_codec
from aladdin_mpi.flat.layout import Layout, between_parameters, cut
from aladdin_mpi.transport.base import Transport

SHAPES = ((7,), (40, 30), (1, 500), (), (16, 3, 5, 5), (3, 2), (2,))
"""Vectors, a matrix, a kernel, and matrices that are sent whole."""
CPU = torch.device("cpu")


def layout_of(bucket: int = 900) -> Layout:
    """Return buckets of about this many values, which contain whole tensors."""
    numels = [prod(shape) for shape in SHAPES]
    layout = cut(sum(numels), 0, (bucket + 0.5) * 4e-6, 64.0)
    return between_parameters(layout, numels)


def codec_of(
    kind: str, layout: Layout, device: torch.device = CPU, moves_bytes: bool = True, rank: int = 2
) -> SumCodec:
    """Return the codec of a ``--wire``, or of ``powersgd`` with this rank."""
    if kind == "powersgd":
        return LowRank(DenseWire(torch.float32, device, moves_bytes), SHAPES, rank)
    return make_codec(kind, layout, device, moves_bytes)


def summands(transport: Transport, turn: int, numel: int) -> Tensor:
    random = torch.Generator().manual_seed(1000 * turn + transport.rank)
    return torch.randn(numel, generator=random) + 0.3


def conserves_values(transport: Transport, kind: str, turns: int = 6) -> float:
    """Check that sums are equal on all ranks, and with all residuals the sum of all summands.

    Ranks are out of step. Returns the norm of all residuals, relative to that of one summand.
    """
    layout = layout_of()
    codec = codec_of(kind, layout, moves_bytes=transport.needs_memory)
    reducer = make_all_reduce("auto", transport, CPU, codec, layout.buckets)
    given, applied = torch.zeros(2, layout.numel, dtype=torch.float64)
    for turn in range(turns):
        flat = summands(transport, turn, layout.numel)
        given += flat
        pending = []
        for bucket in layout.buckets:
            transport.sleep(0.002 * ((transport.rank + bucket.index + turn) % 3))
            pending.append(reducer.start(bucket.of(flat), bucket.index))
        for bucket, one in zip(layout.buckets, pending, strict=True):
            total = one.wait()
            applied[bucket.part] += total
            first = total.clone()
            transport.wait(transport.ibroadcast(first, 0))
            assert torch.equal(total, first)
    left = codec.state_dict()["left"].double()
    norm = float(left.norm() / flat.norm())
    transport.wait(transport.iallreduce(given), transport.iallreduce(left))
    torch.testing.assert_close(applied + left, given, rtol=1e-5, atol=1e-4)
    reducer.close()
    return norm
