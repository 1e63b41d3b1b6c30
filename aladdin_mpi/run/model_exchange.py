"""The model among the ranks, outside training: shared at the start, collected at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aladdin_mpi.control.exchange import allreduce_tensor, broadcast_tensor
from aladdin_mpi.model.replica import Replica
from aladdin_mpi.model.vectors import full
from aladdin_mpi.roles.role import Role
from aladdin_mpi.run.context import Context
from aladdin_mpi.transport.base import Transport


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
    replica.set(vector)
    return vector


def _average(transport: Transport, values: Tensor, weight: float) -> None:
    """The weighted mean over all ranks that live."""
    weights = torch.tensor([weight], dtype=torch.float64)
    values.mul_(weights.item())
    allreduce_tensor(transport, weights)
    allreduce_tensor(transport, values)
    values.div_(weights.item())
