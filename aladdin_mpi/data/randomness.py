"""Random numbers that are a function of what they are for.

Every number is a hash of (seed, purpose, epoch, sample), so that it does not depend on
which rank or process asks, nor on how many numbers were drawn before. The hash is the
finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
generators, OOPSLA 2014). It is written out here, and not left to a library, so that a
run that is resumed after an upgrade sees the same samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

SHUFFLING = 1
"""Purpose: the order of the samples in an epoch."""
AUGMENTATION = 2
"""Purpose: the augmentation of a sample in an epoch."""
SYNTHESIS = 3
"""Purpose: the contents of a synthetic data set."""

_MASK = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(values: UInt64Array) -> UInt64Array:
    """Map 64-bit values one to one onto 64-bit values that look random."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def sample_keys(
    seed: int, purpose: int, epochs: npt.NDArray[Any] | int, indices: npt.NDArray[Any]
) -> UInt64Array:
    """Return one 64-bit random number for each (epoch, index).

    Args:
        seed: any integer.
        purpose: one of the constants of this module.
        epochs: one epoch for all, or one for each of ``indices``.
        indices: sample numbers, shape (n,).

    Within one epoch different indices have different numbers.
    """
    state = np.array([seed & _MASK], dtype=np.uint64)
    state = _mix(state * _GOLDEN + np.uint64(purpose))
    state = _mix(state + np.atleast_1d(np.asarray(epochs)).astype(np.uint64) * _GOLDEN)
    return _mix(state + indices.astype(np.uint64) * _GOLDEN)


def order_key(seed: int, epoch: int) -> int:
    """Return the number by which the order of an epoch is drawn."""
    return int(sample_keys(seed, SHUFFLING, epoch, np.zeros(1, dtype=np.int64))[0])


def bounded(keys: UInt64Array, field: int, bound: int) -> npt.NDArray[np.int64]:
    """Return integers in [0, ``bound``) from the ``field``-th 16 bits (0 to 3) of each key."""
    bits = (keys >> np.uint64(16 * field)) & np.uint64(0xFFFF)
    return ((bits * np.uint64(bound)) >> np.uint64(16)).astype(np.int64)
