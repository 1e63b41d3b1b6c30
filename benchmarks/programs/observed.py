"""Run `aladdin_mpi.train` while every rank records its resources at intervals.

    mpirun -n 5 python -m benchmarks.programs.observed FOLDER SECONDS -- OPTIONS OF TRAIN

Each rank appends a line of JSON to FOLDER/rank-R.jsonl: its process, its bytes of memory, and its
numbers of MPI requests, abandoned requests, file descriptors and threads.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from aladdin_mpi import train
from aladdin_mpi.transport.mpi import engine

PAGE = os.sysconf("SC_PAGE_SIZE")


class ObservedTransport(engine.MpiTransport):
    """Records the rank's resources until it is closed."""

    folder: Path
    every: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        threading.Thread(target=self._observe, daemon=True).start()

    def _observe(self) -> None:
        path = self.folder / f"rank-{self.rank}.jsonl"
        while not self._polling.closed:
            with path.open("a") as file:
                file.write(json.dumps(self._held()) + "\n")
            time.sleep(self.every)

    def _held(self) -> dict[str, float]:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
        return {
            "time": time.time(),
            "pid": os.getpid(),
            "resident": resident,
            "requests": len(self._requests._pending),
            "abandoned": len(self._requests._abandoned),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
        }


def main() -> int:
    """Run the command line and return the exit status of training."""
    folder, every, dashes, *options = sys.argv[1:]
    assert dashes == "--"
    ObservedTransport.folder, ObservedTransport.every = Path(folder), float(every)
    engine.MpiTransport = ObservedTransport  # type: ignore[misc]
    return train.main(options)


if __name__ == "__main__":
    raise SystemExit(main())
