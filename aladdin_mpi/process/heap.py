"""Memory that the process has freed: how often it is searched for, and whether it is kept."""

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
"""Bytes of blocks taken from the heap, and of free memory kept at its end."""
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables by which a user decides about it."""
SELDOM = (20_000, 20, 100)
"""In place of Python's (700, 10, 10): see `gc.set_threshold`."""


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Let Python collect cycles less often in the block.

    With a thousand simulated ranks, whose many objects live on, that saves a fifth of the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@cache
def keep_freed() -> bool:
    """Let glibc keep large freed blocks; return whether it does so from now on.

    Otherwise the system replaces them by zeroed pages, with one fault for every 4 KB, in each step
    for all activations and gradients. torch keeps a GPU's memory itself. If one of `CHOSEN` is
    set, or the C library is not glibc, nothing changes.
    """
    if any(name in os.environ for name in CHOSEN):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all([mallopt(name, LARGEST) for name in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD)])
