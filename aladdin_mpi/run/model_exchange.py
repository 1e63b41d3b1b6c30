"""The model among the ranks, outside training: shared at the start, collected at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aladdin_mpi.control.exchange import allreduce_tensor, broadcast_tensor, gather
from aladdin_mpi.model.replica import Replica
from aladdin_mpi.model.vectors import full
from aladdin_mpi.process import guard
from aladdin_mpi.roles.role import Role
from aladdin_mpi.run.context import Context
from aladdin_mpi.transport.base import Transport

MOST_APART = 1e-3
"""Relative difference of two workers' models that rounding on unlike processors may make."""


def share_model(context: Context) -> None:
    """Everyone begins with rank 0's parameters and buffers; a resumed run has its checkpoint's."""
    if not context.is_real or context.options.resume is not None:
        return
    for tensor in [context.replica.parameters, *context.replica.buffers()]:
        _broadcast(context.transport, tensor)


def share_buffers(context: Context, source: int) -> None:
    """Everybody's module gets those of a rank, or of the next one that lives."""
    living = [rank for rank in context.transport.living if rank >= source]
    for buffer in context.module.buffers():
        _broadcast(context.transport, buffer, living[0])


def _broadcast(transport: Transport, tensor: Tensor, root: int = 0) -> None:
    tensor = tensor.view(-1) if tensor.dim() == 0 else tensor
    staged = tensor.detach().cpu().contiguous()
    broadcast_tensor(transport, staged, root)
    if staged.data_ptr() != tensor.data_ptr():
        tensor.copy_(staged)


def collect_model(context: Context, role: Role, without: Sequence[int] = ()) -> Tensor | None:
    """The global model, flat, at every rank; also put into the replica.

    None with timed computing. The ranks ``without`` hold nothing of it.
    """
    transport, replica = context.transport, context.replica
    if not isinstance(replica, Replica):
        return None
    vector = torch.zeros(replica.numel, dtype=full(replica.parameters.dtype))
    for bucket in context.layout.buckets:
        holders = context.holders(bucket)
        mine, weight = vector[bucket.part], 0.0
        if transport.rank in holders and transport.rank not in without:
            mine.copy_(role.part(bucket))
            weight = role.weight(bucket)
        if len(holders) == 1:
            _broadcast(transport, mine, holders[0])
        else:
            _average(transport, mine, weight)
    context.projections.apply(vector)  # a mean of projected models need not be one
    replica.set(vector)
    return vector


def warn_of_differences(context: Context, own: Tensor, model: Tensor) -> None:
    """Warn if workers that should have the same model do not: the loop has changed some of them.

    Args:
        context: of this rank.
        own: this rank's, at the end of the run.
        model: the one that is kept, of the first worker.
    """
    is_leader = context.transport.rank in context.leaders
    apart = float((own.to(model) - model).norm() / model.norm().clamp_min(1e-12))
    found = gather(context.transport, apart if is_leader else 0.0)
    largest = max((each or 0.0 for each in found), default=0.0)
    if largest > MOST_APART:
        guard.warn(
            [
                f"the workers' models differ by {largest:.1%}, and the first worker's is kept: "
                f"worker {found.index(largest)} has another. What the loop writes into parameters "
                "must be the same on every worker. Register it with run.project()"
            ]
        )


def _average(transport: Transport, values: Tensor, weight: float) -> None:
    """The weighted mean over all ranks that live."""
    weights = torch.tensor([weight], dtype=torch.float64)
    values.mul_(weights.item())
    allreduce_tensor(transport, weights)
    allreduce_tensor(transport, values)
    values.div_(weights.item())
