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
    """Return whether parameters, also frozen ones, are divided among ranks."""
    return any(map(is_divided, module.parameters()))


def reshard(module: nn.Module) -> None:
    """Free the parameters that a forward pass has gathered, if backward has not."""
    kind = _class("torch.distributed.fsdp", "FSDPModule")
    if kind is not None:
        for part in module.modules():
            if isinstance(part, kind):
                part.reshard()


def check_sharding(module: nn.Module, island: int, place: int) -> None:
    """Check that parameters are divided among the ranks of this island, and in no other way.

    Args:
        module: the model.
        island: number of ranks of an island.
        place: of this rank in its island.

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
                f"--island: expected {mesh.size()}, because the model is divided among "
                f"{mesh.size()} ranks, got {island}; pass the same number to "
                "island_mesh() and DataParallel"
            )
        if mesh.get_local_rank() != place:
            raise UserError(
                f"--island: expected this rank at place {mesh.get_local_rank()} of its island, as "
                f"in the model's mesh, got {place}; pass the run's island and servers to "
                "island_mesh()"
            )


def _placed(parameter: Any) -> tuple[Any, Sequence[Any]]:
    """Return a DTensor's mesh and placements."""
    return parameter.device_mesh, parameter.placements


def group_of(module: nn.Module) -> Any:
    """Return the process group of the ranks that have the parts of a model."""
    parameter = next(p for p in module.parameters() if is_divided(p))
    return _placed(parameter)[0].get_group()


def own_class(module: nn.Module) -> type:
    """Return a module's class, without the one that FSDP has derived from it."""
    kind = _class("torch.distributed.fsdp", "FSDPModule")
    kinds = type(module).__mro__
    return next(each for each in kinds if kind is None or not issubclass(each, kind))


def ranges(module: nn.Module, count: int) -> list[list[slice]]:
    """Return for each of ``count`` ranks the parts of the whole flat vector that it has.

    Rank i has the i-th of ``count`` parts of each parameter's rows, by the rule of torch.chunk.
    """
    held: list[list[slice]] = [[] for _ in range(count)]
    first = 0
    for parameter in [p for p in module.parameters() if p.requires_grad][::-1]:
        for number, each in enumerate(held):
            part = _part(parameter, number, count)
            each.append(slice(first + part.start, first + part.stop))
        first += parameter.numel()
    return held


def offset_of(tensor: Tensor) -> int:
    """Return the number of values of a DTensor before this rank's part."""
    mesh, _ = _placed(tensor)
    return _part(tensor, mesh.get_local_rank(), mesh.size()).start


def _part(tensor: Tensor, number: int, count: int) -> slice:
    """Return the values of one of ``count`` ranks."""
    rows = tensor.shape[0]
    width, step = tensor.numel() // max(rows, 1), -(-rows // count)
    return slice(min(number * step, rows) * width, min((number + 1) * step, rows) * width)
