"""Sums of values that a codec shortens, and that keep the rest for the next sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aladdin_mpi.allreduce import choose
from aladdin_mpi.allreduce.base import AllReduce
from aladdin_mpi.allreduce.low_rank import LowRank, LowRankAllReduce
from aladdin_mpi.allreduce.quantised import QuantisedAllReduce
from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.codec.quantised import QuantisedCodec
from aladdin_mpi.codec.residual import Residual
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.replica import FlatModel
from aladdin_mpi.options.general import GeneralOptions
from aladdin_mpi.transport.base import Transport

SumCodec = GradientCodec | LowRank


def sum_codec(wire: GradientCodec, replica: FlatModel, options: GeneralOptions) -> SumCodec:
    """Return the codec of sums: ``wire``, unless they are of low rank."""
    if options.compression != "powersgd":
        return wire
    return LowRank(wire.plain, replica.shapes, options.powersgd.rank)


def residual_of(codec: SumCodec) -> Residual | None:
    """Return what a codec leaves out of sums; None: nothing."""
    if isinstance(codec, QuantisedCodec):
        return codec.residual
    return codec if isinstance(codec, LowRank) else None


def make_all_reduce(
    name: str,
    transport: Transport,
    device: torch.device,
    codec: SumCodec,
    buckets: Sequence[Bucket],
) -> AllReduce:
    """Return the all-reduce of ``codec``; every rank calls this with the same arguments.

    Args:
        name: library that adds plain values and factors, as for :func:`choose.make`.
        transport: transport whose ranks take part.
        device: device of the values; "meta" with simulated computation.
        codec: this rank's codec.
        buckets: parts of the flat vector that will be summed, by their indices.

    Raises:
        UserError: the library cannot be used on some rank.
    """
    if isinstance(codec, QuantisedCodec):
        return QuantisedAllReduce(transport, codec, buckets)
    plain = choose.make(name, transport, device, codec.plain.dtype)
    return LowRankAllReduce(plain, codec, buckets) if isinstance(codec, LowRank) else plain
