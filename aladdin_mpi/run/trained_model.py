"""The trained model in the run folder: one file, or parts that any number of ranks can read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor

from aladdin_mpi.control.exchange import barrier
from aladdin_mpi.flat.shards import group_of
from aladdin_mpi.process.files import written_whole
from aladdin_mpi.session.context import Context, joined_parameters, measuring_island

FILE, FOLDER = "model.pt", "model"
UNFINISHED = "model.unfinished"


def join(context: Context) -> dict[str, Tensor]:
    """Return at rank 0 the whole parameters of a sharded model, if it is written as one file.

    Every rank calls it.
    """
    is_file = context.is_real and context.options.model_format == "pt"
    return joined_parameters(context) if is_file else {}


def write(context: Context, joined: dict[str, Tensor], folder: Path) -> None:
    """Write the model at rank 0, unless :func:`write_parts` has done so."""
    if not context.is_real:
        return
    if context.options.model_format == "dcp":
        if not context.is_sharded:
            _write_folder(context, folder, no_dist=True)
            _publish(folder)
        return
    parts = context.module.state_dict()
    state = {n: joined[n] if n in joined else part.cpu() for n, part in parts.items()}
    with written_whole(folder / FILE) as temporary, temporary.open("wb") as file:
        torch.save(state, file)


def write_parts(context: Context, folder: Path) -> None:
    """Write a sharded model by the first island, if its format has parts; every rank calls it."""
    if not context.is_sharded or context.options.model_format != "dcp":
        return
    rank, writers = context.transport.rank, measuring_island(context)
    if rank in writers:
        _write_folder(context, folder, process_group=group_of(context.module))
    if rank == writers[0]:
        _publish(folder)
    barrier(context.transport)


def _write_folder(context: Context, folder: Path, **how: Any) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    with catch_warnings():  # of one rank: that it writes alone
        simplefilter("ignore", UserWarning)
        save(context.module.state_dict(), checkpoint_id=folder / UNFINISHED, **how)


def _publish(folder: Path) -> None:
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    (folder / UNFINISHED).rename(folder / FOLDER)
