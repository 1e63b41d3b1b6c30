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
    error = (found - expected).abs() / (1 + expected.abs())
    return float(error[both].max()) if bool(both.any()) else 0.0


def quantised(numel: int, spoiled: float | None, device: torch.device) -> tuple[float, float]:
    """Return the difference of scales and remainders, and the share of other steps."""
    values, left = vectors(numel, 2, device)
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
    sums = values + vectors(numel, 2, device)[1]
    decoded = torch.zeros(numel, device=device)
    fused.add_dequantised(message, decoded, 1.0, quantise.WIDTH)
    return max(scales, difference(left + decoded, sums)), float(apart.float().mean())


def dequantised(numel: int, alpha: float, device: torch.device) -> float:
    """Return the difference of a decoded message; with ``alpha`` 1 it has to be 0."""
    values, left, target = vectors(numel, 3, device)
    message = torch.zeros(quantise.message_length(numel, 8), device=device)
    with_torch(lambda: quantise.quantise(values, left, message, 8, quantise.Scratch()))
    expected = target.clone()
    with_torch(lambda: quantise.add_dequantised(message, expected, alpha, quantise.Scratch()))
    fused.add_dequantised(message, target, alpha, quantise.WIDTH)
    if alpha == 1.0:
        return 0.0 if torch.equal(target, expected) else float("inf")
    return difference(target, expected)


def momentum(numel: int, nesterov: bool, keeps_raw: bool, device: torch.device) -> float:
    """Return the difference of a step of momentum SGD."""
    found = vectors(numel, 4, device)
    expected = [each.clone() for each in found]
    sgd = MomentumSGD(torch.empty(numel, device=device), 0.9, 1e-2, nesterov=nesterov)
    g, x, v, raw = expected
    with_torch(lambda: sgd._to_direction(g, x, v, raw if keeps_raw else None))
    g, x, v, raw = found
    fused.momentum_step(g, x, v, raw if keeps_raw else None, 1e-2, 0.9, nesterov)
    return max(difference(*pair) for pair in zip(found, expected, strict=True))


def advance(numel: int, device: torch.device) -> float:
    """Return the difference of :func:`fused.track_advance`."""
    p, v, raw, mine = vectors(numel, 4, device)
    lr, m, weight, ahead = 0.1, 0.9, 0.05, 0.7
    expected_v = m * v + weight * raw
    expected_p = p + ahead * v - (1 + ahead) * expected_v
    expected_mine = lr * mine
    fused.track_advance(p, v, raw, mine, lr, m, weight, ahead)
    pairs = (p, expected_p), (v, expected_v), (mine, expected_mine)
    return max(difference(*pair) for pair in pairs)


def rebase(numel: int, steps: int, rounds: float, device: torch.device) -> float:
    """Return the difference of :func:`fused.track_rebase`."""
    now, p, v, model, *raws = vectors(numel, 4 + steps, device)
    own = [(raw, 0.1 * number) for number, raw in enumerate(raws, 1)]
    expected_v = (model - now) / rounds if rounds else v.clone()
    expected_model = now.clone() if rounds else model.clone()
    expected_p = now.clone()
    for raw, weight in own:
        expected_v = 0.9 * expected_v + weight * raw
        expected_p = expected_p - expected_v
    expected_p = expected_p - 0.7 * expected_v
    fused.track_rebase(now, p, v, model, own, rounds, 0.9, 0.7)
    pairs = (p, expected_p), (v, expected_v), (model, expected_model)
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
    found = [
        quantised(n, each, device) for n in SIZES for each in (None, float("nan"), float("inf"))
    ]
    yield "quantise", max(error for error, _ in found), TOLERANCE
    yield "quantise: other steps", max(share for _, share in found), OTHER_STEPS
    errors = [dequantised(n, alpha, device) for n in SIZES for alpha in (1.0, -0.25)]
    yield "dequantise", max(errors), TOLERANCE
    flags = (False, True)
    errors = [momentum(n, a, b, device) for n in SIZES for a in flags for b in flags]
    yield "momentum step", max(errors), TOLERANCE
    yield "track: advance", max(advance(n, device) for n in SIZES), TOLERANCE
    errors = [rebase(n, s, r, device) for n in SIZES for s in range(3) for r in (0.0, 1.5)]
    yield "track: rebase", max(errors), TOLERANCE


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
