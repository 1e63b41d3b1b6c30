"""Reports of unreadable images that any rank skips; rank 0 names and counts them."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.control.tags import Tag
from aladdin_mpi.data.images import Skip, SkippedImages
from aladdin_mpi.process import console
from aladdin_mpi.session.coordinator import Coordinator, RunHook
from aladdin_mpi.transport.base import Transport

MOST_BYTES = 1 << 15
"""Largest message: a path of 4,096 bytes, which JSON may escape, and a reason."""
MOST_OF_REASON = 300


class SkipReports(RunHook):
    """A hook that reports skipped images, if any, to rank 0, which names each once on stderr."""

    def __init__(self, transport: Transport, skipped: SkippedImages | None) -> None:
        self._transport = transport
        self._skipped = skipped
        self._reasons: dict[str, str] = {}
        self._lock = threading.Lock()  # an evaluation's thread adds to it too
        if skipped is not None:
            transport.exclude_from_traffic(Tag.SKIPPED)
            if transport.rank == 0:
                transport.on_message(Tag.SKIPPED, MOST_BYTES, self._collect)

    @property
    def are_possible(self) -> bool:
        """Whether images may be skipped in this run."""
        return self._skipped is not None

    @property
    def paths(self) -> list[str]:
        """The skipped images, sorted; at rank 0."""
        return sorted(self._reasons)

    def on_begin(self, run: Coordinator) -> None:
        """Name images known before training, except those named before a resume."""
        if self._skipped is not None:
            self._add(self._skipped.known)

    def pass_on(self) -> None:
        """Report new skipped images to rank 0, without waiting."""
        skips = self._skipped.take() if self._skipped is not None else []
        if self._transport.rank == 0:
            self._add(skips)
            return
        for path, why in skips:
            message = bytearray(json.dumps([path, why[:MOST_OF_REASON]]).encode())
            data = torch.frombuffer(message, dtype=torch.uint8)
            self._transport.isend(data, 0, Tag.SKIPPED)

    def _collect(self, source: int, message: Tensor) -> None:
        self._add([json.loads(message.numpy().tobytes())])

    def _add(self, skips: Sequence[Skip]) -> None:
        with self._lock:
            for path, why in skips:
                if path not in self._reasons:
                    self._reasons[path] = why
                    console.say(f"aladdin_mpi: {path}: not a readable image ({why}); skipped")

    def state_dict(self) -> dict[str, Any]:
        """Return the skipped images, which a resumed run does not name and count again."""
        return {"skipped": dict(self._reasons)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the skipped images."""
        self._reasons = dict(state.get("skipped", {}))
