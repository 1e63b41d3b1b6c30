"""Images that could not be read and were skipped: from where it was noticed to rank 0's record."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from aladdin_mpi.control.tags import Tag
from aladdin_mpi.process import console
from aladdin_mpi.transport.base import Transport

Skip = tuple[str, str]
"""The path of an image, and why it cannot be read."""
MOST_BYTES = 1 << 15
"""Of a message: a path of 4,096 bytes, each as JSON may have to write it, and a reason."""
MOST_OF_REASON = 300


class SkippedImages:
    """Those that one process has noticed in a data set; any of its threads may.

    Args:
        known: those noticed when the data set was made.
    """

    def __init__(self, known: Iterable[Skip] = ()) -> None:
        self.known = list(known)
        self._new: deque[Skip] = deque()

    def add(self, path: str, why: str) -> None:
        """Note one, each time that it is met: rank 0 counts it once."""
        self._new.append((path, why))

    def take(self) -> list[Skip]:
        """Those noted since the last call."""
        taken = []
        while self._new:
            taken.append(self._new.popleft())
        return taken


def skips_of(dataset: object) -> SkippedImages | None:
    """Where ``dataset`` notes what it skips, if it does."""
    found = getattr(dataset, "skipped", None)
    return found if isinstance(found, SkippedImages) else None


class SkipRecord:
    """Rank 0's: names each image once, on stderr, and knows how many there are."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._lock = threading.Lock()  # an evaluation's thread adds to it too

    @property
    def paths(self) -> list[str]:
        """The images, sorted."""
        return sorted(self._reasons)

    def add(self, found: Sequence[Skip]) -> None:
        """Take in what has been noticed."""
        with self._lock:
            for path, why in found:
                if path not in self._reasons:
                    self._reasons[path] = why
                    console.say(f"aladdin_mpi: {path}: not a readable image ({why}); skipped")

    def state_dict(self) -> dict[str, str]:
        """For a checkpoint: a run that goes on names and counts none again."""
        return dict(self._reasons)

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Take up a state from :meth:`state_dict`."""
        self._reasons = dict(state)


class SkipReports:
    """Brings what this rank has noticed to rank 0.

    Args:
        skipped: of this rank's data set; None: it skips nothing. All ranks' alike.
        record: at rank 0.
    """

    def __init__(
        self, transport: Transport, skipped: SkippedImages | None, record: SkipRecord | None
    ) -> None:
        self._transport = transport
        self._skipped = skipped
        self._record = record
        if skipped is None:
            return
        transport.exclude_from_traffic(Tag.SKIPPED)
        if record is not None:
            transport.on_message(Tag.SKIPPED, MOST_BYTES, self._collect)

    @property
    def are_possible(self) -> bool:
        """Whether images may be skipped in this run."""
        return self._skipped is not None

    def open(self) -> None:
        """Name those that were known before training; a resumed run's record is there."""
        if self._skipped is not None and self._record is not None:
            self._record.add(self._skipped.known)

    def pass_on(self) -> None:
        """Tell rank 0 what is new. Never waits."""
        found = self._skipped.take() if self._skipped is not None else []
        if self._record is not None:
            self._record.add(found)
            return
        for path, why in found:
            packed = json.dumps([path, why[:MOST_OF_REASON]]).encode()
            self._transport.isend(
                torch.frombuffer(bytearray(packed), dtype=torch.uint8), 0, Tag.SKIPPED
            )

    def _collect(self, source: int, message: Tensor) -> None:
        assert self._record is not None
        path, why = json.loads(message.numpy().tobytes())
        self._record.add([(path, why)])
