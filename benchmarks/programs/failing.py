"""Run `aladdin_mpi.train` with a rank that kills itself once it has seen enough samples recorded.

    mpirun --with-ft ulfm -n 5 python -m benchmarks.programs.failing RANK SAMPLES METRICS -- OPTIONS

METRICS is the run's metrics.jsonl.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from aladdin_mpi import train

POLL = 0.02


def samples_in(metrics: Path) -> int:
    """Return the number of samples in the last complete line."""
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return int(json.loads(lines[-1])["samples"]) if lines else 0


def _kill_after(samples: int, metrics: Path) -> None:
    while samples_in(metrics) < samples:
        time.sleep(POLL)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Run the command line and return the exit status of training."""
    rank, samples, metrics, dashes, *options = sys.argv[1:]
    assert dashes == "--"
    if os.environ["OMPI_COMM_WORLD_RANK"] == rank:
        arguments = int(samples), Path(metrics)
        threading.Thread(target=_kill_after, args=arguments, daemon=True).start()
    return train.main(options)


if __name__ == "__main__":
    raise SystemExit(main())
