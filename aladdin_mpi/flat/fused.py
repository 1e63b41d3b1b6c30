"""Arithmetic on flat vectors in one pass over a GPU's memory, if Triton can compile it.

torch runs one kernel and one memory pass for each operation. These functions use one kernel
each, which halves a worker's kernel launches in a step of aladdin-ahead (docs/gpus.md). If
:func:`is_usable` returns False, their callers use torch's operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi import accelerator

BLOCK = 1024
"""Values processed by one program of an elementwise kernel."""
ROWS = 4
"""Blocks of quantised values processed by one program."""
LARGEST = 2**31 - BLOCK
"""Largest number of values of a vector; the kernels use 32-bit indices."""
enabled = True
"""Set to False to compare with torch's operations."""


def is_usable(*vectors: Tensor, rounded: Sequence[Tensor] = ()) -> bool:
    """Return whether the kernels apply: all vectors are contiguous and on an NVIDIA GPU.

    ``vectors`` have to be in fp32, those that are ``rounded`` may be in bf16.
    """
    everything = (*vectors, *rounded)
    return (
        enabled
        and all(each.is_cuda and each.numel() <= LARGEST for each in everything)
        and all(each.is_contiguous() for each in everything)
        and all(each.dtype == torch.float32 for each in vectors)
        and all(each.dtype in (torch.float32, torch.bfloat16) for each in rounded)
        and _compiles()
    )


@cache
def _compiles() -> bool:
    """Return whether a kernel compiles: Triton or its C compiler may be missing."""
    if torch.version.hip is not None:
        return False
    try:
        target = torch.zeros(256, device="cuda")
        message = torch.zeros(65, device="cuda")
        add_dequantised(message, target, 1.0, 256)
    except Exception:  # Triton's errors have no common base class
        return False
    return True


def quantise(
    values: Tensor, left: Tensor, message: Tensor, steps: int, width: int, tiny: float
) -> None:
    """Quantise with 8 bits, as :func:`aladdin_mpi.codec.quantise.quantise` does.

    ``steps`` is the number of steps on either side of zero, ``width`` the number of values of a
    block and ``tiny`` the smallest divisor.
    """
    numel = values.numel()
    blocks = -(-numel // width)
    packed = message[blocks:].view(torch.int8)
    arguments = values, left, message, packed, numel, packed.numel(), 1 / steps, tiny
    _launch("quantise", -(-blocks // ROWS), *arguments, WIDTH=width, ROWS=ROWS)


def add_dequantised(message: Tensor, target: Tensor, alpha: float, width: int) -> None:
    """Add 8-bit values, as :func:`aladdin_mpi.codec.quantise.add_dequantised` does."""
    numel = target.numel()
    blocks = -(-numel // width)
    packed = message[blocks:].view(torch.int8)
    rows = -(-blocks // ROWS)
    _launch("add_dequantised", rows, target, message, packed, numel, alpha, WIDTH=width, ROWS=ROWS)


def momentum_step(
    g: Tensor,
    x: Tensor,
    v: Tensor,
    decay: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """Compute ``u <- g + decay x; v <- momentum v + u; g <- v``, or ``u + momentum v``."""
    arguments = g, x, v, g.numel(), decay, momentum
    settings = {"NESTEROV": nesterov, "BLOCK": BLOCK}
    _launch("momentum_step", _programs(g), *arguments, **settings)


def track_advance(
    p: Tensor,
    v: Tensor,
    step: Tensor,
    momentum: float,
    weight: float,
    ahead: float,
) -> None:
    """Compute :meth:`aladdin_mpi.exchange.global_model.GlobalModelPredictor.advance`.

    ``p <- p + ahead v; v <- momentum v + weight step; p <- p - (1 + ahead) v``.
    """
    arguments = p, v, step, p.numel(), momentum, weight, ahead
    _launch("track_advance", _programs(p), *arguments, BLOCK=BLOCK)


def track_model(now: Tensor, p: Tensor, v: Tensor, model: Tensor, rounds: float) -> None:
    """Compute ``v <- (model - now) / rounds; model <- now`` if ``rounds > 0``; then ``p <- now``.

    Args:
        now: the values that arrived.
        p: parameters.
        v: velocity of the global model.
        model: the values that arrived last before ``now``.
        rounds: number of rounds between ``model`` and ``now``.
    """
    settings = {"HAS_MOVED": rounds > 0, "BLOCK": BLOCK}
    _launch("track_model", _programs(p), now, p, v, model, p.numel(), rounds, **settings)


def _programs(vector: Tensor) -> int:
    return -(-vector.numel() // BLOCK)


def _launch(name: str, programs: int, *arguments: Any, **settings: Any) -> None:
    from aladdin_mpi.flat import kernels  # imports Triton, which is optional

    kernel: Any = getattr(kernels, name)
    accelerator.enter(arguments[0].device)  # Triton uses the thread's device, not the vectors'
    kernel[(programs,)](*arguments, enable_fp_fusion=False, **settings)
