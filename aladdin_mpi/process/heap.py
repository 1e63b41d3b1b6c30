"""Freed memory of the process: garbage collection, and memory kept by the C library."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Constants of glibc's <malloc.h>."""
LARGEST = 1 << 30
"""Largest block on the heap, and most free memory kept at its end, in bytes."""
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables with which users configure the allocator."""
SELDOM = (20_000, 20, 100)
"""Thresholds for `gc.set_threshold`, instead of Python's (700, 10, 10)."""


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Let Python collect cycles less often within the block.

    With a thousand simulated ranks, whose objects are long-lived, this saves a fifth of the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@cache
def keep_freed() -> bool:
    """Let glibc keep large freed blocks, and return whether it does.

    Otherwise the system replaces them by zeroed pages in each step, for all activations and
    gradients, with a page fault per 4 KB. torch itself keeps a GPU's memory. Nothing changes if one
    of `CHOSEN` is set, or if the C library is not glibc.
    """
    if any(name in os.environ for name in CHOSEN):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all([mallopt(name, LARGEST) for name in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD)])
