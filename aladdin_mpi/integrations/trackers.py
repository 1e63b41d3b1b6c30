"""Trackers of the package ``accelerate``, such as TensorBoard's, on the first worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, filter_trackers

from aladdin_mpi.errors import UserError
from aladdin_mpi.integrations.single_process import single_process


def make_trackers(
    log_with: Any,
    logging_dir: str | Path | None,
    device: torch.device,
    project_name: str,
    config: dict[str, Any] | None,
    init_kwargs: dict[str, Any] | None,
) -> list[GeneralTracker]:
    """Return started trackers; the arguments are those of ``accelerate.Accelerator``.

    Raises:
        UserError: a tracker is unknown, not installed, or requires ``logging_dir``.
    """
    single_process(device)
    try:
        chosen = filter_trackers(log_with, logging_dir)
    except ValueError as error:
        raise UserError(f"Accelerator: log_with: {error}; pass another one") from error
    given = log_with if isinstance(log_with, list | tuple) else [log_with]
    for each in given:
        if str(each) not in ("all", *map(str, chosen)):  # accelerate omits it
            raise UserError(
                f"Accelerator: log_with: the library of {each} is not installed; install it, or "
                "leave it out"
            )
    made = [_made(each, logging_dir, project_name, init_kwargs or {}) for each in chosen]
    for tracker in made:
        tracker.main_process_only = False  # made on the main process only
        tracker.start()
        if config is not None:
            tracker.store_init_configuration(config)
    return made


def _made(
    chosen: Any, logging_dir: str | Path | None, project_name: str, init_kwargs: dict[str, Any]
) -> GeneralTracker:
    if isinstance(chosen, GeneralTracker):
        return chosen
    kind = LOGGER_TYPE_TO_CLASS[str(chosen)]
    folder = [logging_dir] if kind.requires_logging_directory else []
    return kind(project_name, *folder, **init_kwargs.get(str(chosen), {}))


def blank() -> GeneralTracker:
    """Return the tracker of other processes, which does nothing."""
    return GeneralTracker(_blank=True)
