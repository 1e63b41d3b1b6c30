"""Models whose parameters are divided among the ranks of an island, by torch's FSDP2.

``fully_shard`` makes each parameter a DTensor: the i-th rank of a mesh has the i-th part of its
rows, and gathers the others before each use. What torch calls the local tensor of all parameters
forms the rank's lane.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aladdin_mpi.errors import UserError


def _class(module: str, name: str) -> Any:
    """Return a class of torch; None if its module was not imported, so that it has no objects."""
    loaded = sys.modules.get(module)
    return None if loaded is None else getattr(loaded, name, None)


def is_divided(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    kind = _class("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(tensor, kind)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that this rank has, in the same memory; else ``tensor``."""
    if not is_divided(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]  # of a DTensor
        return part


def is_sharded(module: nn.Module) -> bool:
    """Return whether trainable parameters are divided among ranks."""
    return any(is_divided(p) for p in module.parameters() if p.requires_grad)


def reshard(module: nn.Module) -> None:
    """Free the parameters that a forward pass has gathered, if backward has not."""
    kind = _class("torch.distributed.fsdp", "FSDPModule")
    if kind is not None:
        for part in module.modules():
            if isinstance(part, kind):
                part.reshard()


def check_sharding(module: nn.Module, island: int, place: int, given: str) -> None:
    """Check that parameters are divided among the ranks of this island, and in no other way.

    Args:
        module: the model.
        island: number of ranks of an island.
        place: of this rank in its island.
        given: the option that has set ``island``.

    Raises:
        UserError: names the first parameter that is not.
    """
    how = "fully_shard(model, mesh=aladdin_mpi.island_mesh(...))"
    for name, parameter in module.named_parameters():
        if not is_divided(parameter):
            if parameter.requires_grad:
                raise UserError(
                    "model: expected all trainable parameters divided by FSDP, got "
                    f"{name}, which each rank has as a whole; wrap the whole model too: {how}"
                )
            continue
        mesh, placements = _placed(parameter)
        if mesh.ndim != 1 or not placements[0].is_shard(0):
            raise UserError(
                f"model: expected parameters divided by {how} alone, along their first dimension, "
                f"got {name} with {', '.join(map(str, placements))} on a mesh of shape "
                f"{tuple(mesh.shape)}; leave out tensor parallelism and HSDP: more islands "
                "replicate the model"
            )
        if mesh.size() != island:
            raise UserError(
                f"island: expected {mesh.size()}, because the model is divided among "
                f"{mesh.size()} ranks, got {given or island}; pass the same number to "
                "island_mesh() and DataParallel"
            )
        if mesh.get_local_rank() != place:
            raise UserError(
                f"island: expected this rank at place {mesh.get_local_rank()} of its island, as in "
                f"the model's mesh, got {place}; pass the run's island and servers to "
                "island_mesh()"
            )


def _placed(parameter: Any) -> tuple[Any, Sequence[Any]]:
    """Return a DTensor's mesh and placements."""
    return parameter.device_mesh, parameter.placements


def ranges(module: nn.Module, count: int) -> list[list[slice]]:
    """Return for each of ``count`` ranks the parts of the whole flat vector that it has.

    Rank i has the i-th of ``count`` parts of each parameter's rows, by the rule of torch.chunk.
    """
    held: list[list[slice]] = [[] for _ in range(count)]
    first = 0
    for parameter in [p for p in module.parameters() if p.requires_grad][::-1]:
        rows = parameter.shape[0]
        width, step = parameter.numel() // max(rows, 1), -(-rows // count)
        for number, each in enumerate(held):
            start, stop = min(number * step, rows), min((number + 1) * step, rows)
            each.append(slice(first + start * width, first + stop * width))
        first += parameter.numel()
    return held
