"""Settings for the whole suite: one thread to a process, as many processes share few cores."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
