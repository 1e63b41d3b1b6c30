"""The package's own kernels against torch's operations on the same vectors.

Runs under mpirun with one rank. Without a GPU, ``TRITON_INTERPRET=1`` runs them in Triton's
interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from aladdin_mpi.codec import quantise
from aladdin_mpi.codec.quantise import SMALLEST
from aladdin_mpi.flat import fused
from aladdin_mpi.optimizers.sgd import MomentumSGD
from benchmarks.gpu_check import rows
from benchmarks.gpu_check.device import is_test_device
from benchmarks.gpu_check.rows import SKIP, Row

PART = "equality"
SIZES = (SMALLEST, 255, 256, 257, 3089)
TOLERANCE = 1e-6
"""Largest difference: a rounding error, since torch may fuse a product and a sum."""
ROUNDED = 3e-2
"""Largest difference with vectors in bf16, to which Triton's interpreter rounds towards zero."""
OTHER_STEPS = 1e-3
"""Largest share of quantised values that are a step apart: at ties the division decides."""


def vectors(numel: int, count: int, device: torch.device) -> list[Tensor]:
    """Return vectors of random numbers, the same in every call."""
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator).to(device) for _ in range(count)]


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to ``1 + |expected|``.

    Infinity if a value is finite in only one of them.
    """
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return float("inf")
    both = found.isfinite()
    error = (found - expected).float().abs() / (1 + expected.float().abs())
    return float(error[both].max()) if bool(both.any()) else 0.0


def quantised(
    numel: int, spoiled: float | None, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Return the difference of scales and remainders in ``dtype``, and the share of other steps."""
    values, left = vectors(numel, 2, device)
    left = left.to(dtype)
    first = left.float().clone()
    if spoiled is not None:
        values[numel // 2] = spoiled
    length = quantise.message_length(numel, 8)
    message, expected = (torch.full((length,), 7.0, device=device) for _ in range(2))
    expected_left = left.clone()
    with_torch(lambda: quantise.quantise(values, expected_left, expected, 8, quantise.Scratch()))
    fused.quantise(values, left, message, quantise.steps_of(8), quantise.WIDTH, quantise.TINY)
    blocks = -(-numel // quantise.WIDTH)
    apart = message[blocks:].view(torch.int8) != expected[blocks:].view(torch.int8)
    scales = difference(message[:blocks], expected[:blocks])
    if spoiled is not None:
        return max(scales, 0.0 if bool(left.isfinite().all()) else float("inf")), 0.0
    sums = values + first
    decoded = torch.zeros(numel, device=device)
    fused.add_dequantised(message, decoded, 1.0, quantise.WIDTH)
    return max(scales, difference(left + decoded, sums)), float(apart.float().mean())


def dequantised(numel: int, alpha: float, dtype: torch.dtype, device: torch.device) -> float:
    """Return the difference of a decoded message in ``dtype``; in fp32 with ``alpha`` 1 it is 0."""
    values, left, target = vectors(numel, 3, device)
    target = target.to(dtype)
    message = torch.zeros(quantise.message_length(numel, 8), device=device)
    with_torch(lambda: quantise.quantise(values, left, message, 8, quantise.Scratch()))
    expected = target.clone()
    with_torch(lambda: quantise.add_dequantised(message, expected, alpha, quantise.Scratch()))
    fused.add_dequantised(message, target, alpha, quantise.WIDTH)
    if alpha == 1.0 and dtype == torch.float32:
        return 0.0 if torch.equal(target, expected) else float("inf")
    return difference(target, expected)


def momentum(numel: int, nesterov: bool, device: torch.device) -> float:
    """Return the difference of a step of momentum SGD."""
    found = vectors(numel, 3, device)
    expected = [each.clone() for each in found]
    sgd = MomentumSGD(torch.empty(numel, device=device), 0.9, 1e-2, nesterov=nesterov)
    with_torch(lambda: sgd._to_direction(*expected))
    g, x, v = found
    fused.momentum_step(g, x, v, 1e-2, 0.9, nesterov)
    return max(difference(*pair) for pair in zip(found, expected, strict=True))


def advance(numel: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the difference of :func:`fused.track_advance`, with a velocity in ``dtype``."""
    p, v, step = vectors(numel, 3, device)
    v = v.to(dtype)
    m, weight, ahead = 0.9, 0.05, 0.7
    expected_v = (m * v.float() + weight * step).to(dtype).float()
    expected_p = p + ahead * v.float() - (1 + ahead) * expected_v
    fused.track_advance(p, v, step, m, weight, ahead)
    pairs = (p, expected_p), (v, expected_v)
    return max(difference(*pair) for pair in pairs)


def take_model(numel: int, rounds: float, dtype: torch.dtype, device: torch.device) -> float:
    """Return the difference of :func:`fused.track_model`, with a velocity in ``dtype``."""
    now, p, v, model = vectors(numel, 4, device)
    v = v.to(dtype)
    expected_v = (model - now) / rounds if rounds else v.clone()
    expected_model = now.clone() if rounds else model.clone()
    fused.track_model(now, p, v, model, rounds)
    pairs = (p, now), (v, expected_v), (model, expected_model)
    return max(difference(*pair) for pair in pairs)


def with_torch(action: Callable[[], None]) -> None:
    """Call ``action`` while callers of the kernels use torch's operations."""
    before, fused.enabled = fused.enabled, False
    try:
        action()
    finally:
        fused.enabled = before


def results(device: torch.device) -> Iterator[tuple[str, float, float]]:
    """Yield for each kernel its name, its largest difference and the bound."""
    errors = [momentum(n, nesterov, device) for n in SIZES for nesterov in (False, True)]
    yield "momentum step", max(errors), TOLERANCE
    for dtype, bound in ((torch.float32, TOLERANCE), (torch.bfloat16, ROUNDED)):
        name = f", {dtype}".replace("torch.", "")
        spoiled = (None, float("nan"), float("inf"))
        found = [quantised(n, each, dtype, device) for n in SIZES for each in spoiled]
        yield f"quantise{name}", max(error for error, _ in found), bound
        yield f"quantise{name}: other steps", max(share for _, share in found), OTHER_STEPS
        errors = [dequantised(n, alpha, dtype, device) for n in SIZES for alpha in (1.0, -0.25)]
        yield f"dequantise{name}", max(errors), bound
        yield f"track: advance{name}", max(advance(n, dtype, device) for n in SIZES), bound
        errors = [take_model(n, rounds, dtype, device) for n in SIZES for rounds in (0.0, 1.5)]
        yield f"track: model{name}", max(errors), bound


def main() -> None:
    """Print a row for each kernel."""
    if is_test_device() and "TRITON_INTERPRET" not in os.environ:
        rows.print_row(Row(PART, "fused kernels", SKIP, note="needs a GPU"))
        return
    device = torch.device("cpu" if is_test_device() else "cuda")
    if device.type == "cuda" and not fused.is_usable(torch.zeros(8, device=device)):
        rows.report(PART, "fused kernels", False, note="Triton cannot compile them here")
        return
    for name, error, bound in results(device):
        figures = f"difference from torch's operations {error:.1e}"
        rows.report(PART, f"fused {name}", error <= bound, figures, f"at most {bound:g}")


if __name__ == "__main__":
    main()
