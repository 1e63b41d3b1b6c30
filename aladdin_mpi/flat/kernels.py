"""Triton kernels of :mod:`aladdin_mpi.flat.fused`: each is one pass over flat vectors.

Vectors are in fp32; residuals, velocities and the targets of messages may be in bf16.

Importing this module imports Triton. Compilation must not fuse products and sums
(``enable_fp_fusion=False``): decoded models have to be bit-identical on CPU and GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantise(
    values,
    left,
    scales,
    packed,
    numel,
    padded,
    inverse_steps,
    tiny,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Quantise ``left + values`` in steps of the block's scale; ``left`` keeps the error."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = at < numel
    rest = tl.load(left + at, inside, 0.0).to(tl.float32) + tl.load(values + at, inside, 0.0)
    scale = tl.max(tl.abs(rest), 1) * inverse_steps
    # tl.max ignores NaN.
    is_nan = tl.max((rest != rest).to(tl.int32), 1) > 0
    scale = tl.where(is_nan, float("nan"), scale)
    steps = rest * (1.0 / tl.maximum(scale, tiny))[:, None]
    steps = (steps + 12582912.0) - 12582912.0  # rounds to the nearest, ties to even
    is_finite = (scale - scale) == 0.0
    rest = tl.where(is_finite[:, None], rest - steps * scale[:, None], 0.0)
    tl.store(left + at, rest, inside)
    tl.store(packed + at, steps.to(tl.int8), at < padded)
    tl.store(scales + row, scale, row * WIDTH < numel)


@triton.jit
def add_dequantised(target, scales, packed, numel, alpha, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Compute ``target <- target + alpha steps scale``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = at < numel
    steps = tl.load(packed + at, inside, 0).to(tl.float32)
    scale = tl.load(scales + row, row * WIDTH < numel, 0.0)
    product = steps * scale[:, None]
    before = tl.load(target + at, inside, 0.0).to(tl.float32)
    tl.store(target + at, before + alpha * product, inside)


@triton.jit
def momentum_step(
    g,
    x,
    v,
    numel,
    decay,
    momentum,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute ``u <- g + decay x; v <- momentum v + u; g <- v``, or ``u + momentum v``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    gradient = tl.load(g + at, inside, 0.0) + decay * tl.load(x + at, inside, 0.0)
    velocity = momentum * tl.load(v + at, inside, 0.0) + gradient
    tl.store(v + at, velocity, inside)
    if NESTEROV:
        velocity = gradient + momentum * velocity
    tl.store(g + at, velocity, inside)


@triton.jit
def track_advance(p, v, step, numel, momentum, weight, ahead, BLOCK: tl.constexpr):
    """Move ``p`` to the point of the next gradient."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    velocity = tl.load(v + at, inside, 0.0).to(tl.float32)
    position = tl.load(p + at, inside, 0.0) + ahead * velocity
    velocity = momentum * velocity + weight * tl.load(step + at, inside, 0.0)
    velocity = velocity.to(v.dtype.element_ty).to(tl.float32)  # as it is stored
    tl.store(v + at, velocity, inside)
    tl.store(p + at, position - (1.0 + ahead) * velocity, inside)


@triton.jit
def track_model(now, p, v, model, numel, rounds, HAS_MOVED: tl.constexpr, BLOCK: tl.constexpr):
    """Compute ``v <- (model - now) / rounds; model <- now; p <- now``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    new = tl.load(now + at, inside, 0.0)
    if HAS_MOVED:
        tl.store(v + at, (tl.load(model + at, inside, 0.0) - new) / rounds, inside)
        tl.store(model + at, new, inside)
    tl.store(p + at, new, inside)
