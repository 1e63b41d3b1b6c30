"""What becomes of memory that the process has freed."""

from __future__ import annotations

import ctypes
import os
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's <malloc.h>."""
LARGEST = 1 << 30
"""Bytes: of blocks that are taken from the heap, and of free memory at its end that is kept."""
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables by which a user decides about it."""


@cache
def keep_freed() -> bool:
    """Let glibc keep large blocks that are freed; whether it does so from now on.

    By itself it gives them back to the system, which hands out zeroed pages in their place, one
    fault for every 4 KB, in each step for all activations and gradients. A GPU's memory is kept
    by torch itself. Where one of `CHOSEN` is set, or the C library is not glibc, nothing changes.
    """
    if any(name in os.environ for name in CHOSEN):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all([mallopt(name, LARGEST) for name in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD)])
