"""Run ``aladdin_mpi.train`` with a staging copy that pauses for ``DELAY`` seconds at each file."""

from __future__ import annotations

import os
import sys
import time

from aladdin_mpi import train
from aladdin_mpi.data.preparation import DiskCopy

progress = DiskCopy._progress


def slow(self: DiskCopy) -> None:
    progress(self)
    time.sleep(float(os.environ["DELAY"]) if self.copied else 0)


DiskCopy._progress = slow  # type: ignore[method-assign]
sys.exit(train.main())
