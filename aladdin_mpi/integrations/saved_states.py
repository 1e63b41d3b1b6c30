"""States that a script for accelerate saves and loads, in the checkpoints of its run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aladdin_mpi.errors import UserError
from aladdin_mpi.process import files
from aladdin_mpi.run.data_parallel import DataParallel

FILE = "aladdin_mpi.json"
"""File in a folder of the script, which names the run folder and the number of the state."""
NUMBER, OBJECTS = "accelerate.number", "accelerate.objects"
"""Entries of ``run.state``: the number of the last saved state, and those of ``objects``."""


class SavedStates:
    """States in the run's checkpoints, of which a run folder has one: the last.

    Attributes:
        objects: of the script, whose ``state_dict()`` is part of the state.
        is_loaded: whether the run begins with a saved state.
    """

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.is_loaded = False
        self._number = 0
        self._expected: int | None = None

    def save(self, run: DataParallel, folder: Path) -> None:
        """Request a checkpoint, and note in ``folder`` that it has this state.

        Raises:
            UserError: the run has no folder.
        """
        if run.options.run_dir is None:
            raise UserError(
                "accelerator.save_state requires the folder of the run, which contains its "
                "checkpoints. Pass run_dir= to Accelerator."
            )
        self._number += 1
        self.note(run)
        if run.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            entry = {"run_dir": str(run.run_dir), "number": self._number}
            files.write_whole(folder / FILE, json.dumps(entry).encode())
        run.checkpoint()

    def load(self, folder: Path) -> Path:
        """Return the run folder to be resumed, of a state saved in ``folder``.

        Raises:
            UserError: the folder has no such state.
        """
        try:
            entry = json.loads((folder / FILE).read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"accelerator.load_state: {folder} has no state that accelerator.save_state() of "
                f"aladdin_mpi.Accelerator has saved ({error}); pass a folder that has one"
            ) from error
        self._expected, self.is_loaded = int(entry["number"]), True
        return Path(entry["run_dir"])

    def note(self, run: DataParallel) -> None:
        """Put the present state of the script's objects into that of the run."""
        if self._number or self.objects:
            run.state[NUMBER] = self._number
            run.state[OBJECTS] = [each.state_dict() for each in self.objects]

    def restore(self, run: DataParallel) -> None:
        """Restore the script's objects when the loop of a resumed run begins.

        Raises:
            UserError: the checkpoint has another state than the one to be loaded, or other objects.
        """
        self._number = run.state.get(NUMBER, 0)
        if self._expected not in (None, self._number) and run.is_first:
            raise UserError(
                f"accelerator.load_state: expected state {self._expected} in the checkpoint of the "
                f"run, got state {self._number}. A run folder contains its last checkpoint only; "
                "load the state that was saved last, or leave load_state() out and pass "
                'resume="auto".'
            )
        states = run.state.get(OBJECTS, [])
        if states and len(states) != len(self.objects):
            raise UserError(
                f"accelerator.register_for_checkpointing: the checkpoint has {len(states)} "
                f"objects, got {len(self.objects)}; register the same objects as before"
            )
        for each, state in zip(self.objects, states, strict=False):
            each.load_state_dict(state)
