"""Arithmetic on flat vectors in one pass over a GPU's memory, if Triton can compile it.

torch runs one kernel and one memory pass for each operation. These functions use one kernel
each, which halves a worker's kernel launches in a step of aladdin-ahead (docs/gpus.md). If
:func:`is_usable` returns False, their callers use torch's operations.
"""

from __future__ import annotations

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


def is_usable(*vectors: Tensor) -> bool:
    """Return whether the kernels apply: ``vectors`` are contiguous, fp32 and on an NVIDIA GPU."""
    return (
        enabled
        and all(each.is_cuda and each.numel() <= LARGEST for each in vectors)
        and all(each.dtype == torch.float32 and each.is_contiguous() for each in vectors)
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
    raw: Tensor | None,
    decay: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """Compute ``u <- g + decay x; v <- momentum v + u; g <- v``, with Nesterov ``u + momentum v``.

    ``u`` is stored in ``raw``.
    """
    arguments = g, x, v, g if raw is None else raw, g.numel(), decay, momentum
    settings = {"NESTEROV": nesterov, "KEEPS_RAW": raw is not None, "BLOCK": BLOCK}
    _launch("momentum_step", _programs(g), *arguments, **settings)


def track_advance(
    p: Tensor,
    v: Tensor,
    raw: Tensor,
    mine: Tensor,
    lr: float,
    momentum: float,
    weight: float,
    ahead: float,
) -> None:
    """Compute :meth:`aladdin_mpi.exchange.global_model.GlobalModelPredictor.advance`.

    ``mine <- lr mine; p <- p + ahead v; v <- momentum v + weight raw; p <- p - (1 + ahead) v``.
    """
    arguments = p, v, raw, mine, p.numel(), lr, momentum, weight, ahead
    _launch("track_advance", _programs(p), *arguments, BLOCK=BLOCK)


def track_rebase(
    now: Tensor,
    p: Tensor,
    v: Tensor,
    model: Tensor,
    own: list[tuple[Tensor, float]],
    rounds: float,
    momentum: float,
    ahead: float,
) -> None:
    """Compute :meth:`aladdin_mpi.exchange.global_model.GlobalModelPredictor.rebase`.

    ``v <- (model - now) / rounds; model <- now`` if ``rounds > 0``; then ``p <- now``, for each own
    step ``v <- momentum v + weight raw; p <- p - v``, and last ``p <- p - ahead v``.

    Args:
        now: the values that arrived.
        p: parameters.
        v: velocity of the global model.
        model: the values that arrived last before ``now``.
        own: raw direction and weight of the steps that ``now`` does not contain, oldest first.
        rounds: number of rounds between ``model`` and ``now``.
        momentum: momentum of the global model.
        ahead: rounds to look ahead, as a factor of ``v``.
    """
    numel, programs = p.numel(), _programs(p)
    settings = {"HAS_MOVED": rounds > 0, "LOOKS_AHEAD": not own, "BLOCK": BLOCK}
    _launch("track_model", programs, now, p, v, model, numel, rounds, ahead, **settings)
    for number, (raw, weight) in enumerate(own, 1):
        settings = {"LOOKS_AHEAD": number == len(own), "BLOCK": BLOCK}
        _launch("track_own", programs, p, v, raw, numel, momentum, weight, ahead, **settings)


def _programs(vector: Tensor) -> int:
    return -(-vector.numel() // BLOCK)


def _launch(name: str, programs: int, *arguments: Any, **settings: Any) -> None:
    from aladdin_mpi.flat import kernels  # imports Triton, which is optional

    kernel: Any = getattr(kernels, name)
    accelerator.enter(arguments[0].device)  # Triton uses the thread's device, not the vectors'
    kernel[(programs,)](*arguments, enable_fp_fusion=False, **settings)
