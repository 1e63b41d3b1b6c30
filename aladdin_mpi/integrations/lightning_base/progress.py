"""Progress of Lightning's loops and callbacks, for checkpoints and for the other ranks."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from aladdin_mpi.errors import UserError
from aladdin_mpi.session.session import check_plain

Progress = dict[str, Any]


def progress_of(trainer: Any) -> Progress:
    """Return the numbers of epochs and steps, and the states of callbacks and schedulers."""
    return {
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "callbacks": {
            each.state_key: state for each in trainer.callbacks if (state := each.state_dict())
        },
        "schedulers": [each.state_dict() for each in _by_epoch(trainer)],
    }


def _by_epoch(trainer: Any) -> list[Any]:
    """Return the schedulers that Lightning advances; the run restores the others."""
    return [each.scheduler for each in trainer.lr_scheduler_configs if each.interval == "epoch"]


def adopt(trainer: Any, progress: Progress) -> None:
    """Continue with another rank's progress, or an earlier program's."""
    loop = trainer.fit_loop
    for part in (loop.epoch_progress.current, loop.epoch_progress.total):
        part.ready = part.started = part.processed = part.completed = progress["epochs"]
    steps = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    steps.ready = steps.completed = progress["steps"]
    # Loggers number their lines by a private counter, which a checkpoint may set.
    loop.epoch_loop.on_load_checkpoint({"_batches_that_stepped": progress["steps"]})
    for each in trainer.callbacks:
        if each.state_key in progress["callbacks"]:
            each.load_state_dict(progress["callbacks"][each.state_key])
    for scheduler, state in zip(_by_epoch(trainer), progress["schedulers"], strict=False):
        scheduler.load_state_dict(state)


def storable(progress: Progress) -> Progress:
    """Return what a checkpoint can hold, with a warning that names the callbacks left out."""
    callbacks = {}
    for key, state in progress["callbacks"].items():
        try:
            check_plain(state, key)
        except UserError as error:
            rank_zero_warn(f"checkpoints do not contain the state of a callback: {error}")
        else:
            callbacks[key] = state
    return {**progress, "callbacks": callbacks}
