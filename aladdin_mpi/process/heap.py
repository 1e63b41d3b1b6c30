"""What becomes of memory that the process has freed."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's <malloc.h>."""
LARGEST = 1 << 30
"""Bytes: of blocks that are taken from the heap, and of free memory at its end that is kept."""
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables by which a user decides about it."""

SELDOM = (20_000, 20, 100)
"""In place of Python's (700, 10, 10): see `gc.set_threshold`."""


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Let Python look for dead cycles of objects less often meanwhile.

    For many objects that all live on, of which every look passes over more: with a thousand
    simulated ranks, which leave hardly a cycle behind, that takes a fifth of the time.
    """
    merged = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*merged)


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
