"""Time the memory passes along a gradient's path, each against the plain way to write it.

    python -m benchmarks.kernels --save
    python -m benchmarks.kernels --quick

One thread; memory and arithmetic only. The two versions alternate.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from math import isfinite
from statistics import median
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.codec.quantise import (
    WIDTH,
    Scratch,
    add_dequantised,
    message_length,
    quantise,
    steps_of,
)
from aladdin_mpi.flat.layout import BYTES_PER_MB, BYTES_PER_VALUE
from aladdin_mpi.flat.vectors import add_if_finite, is_finite
from aladdin_mpi.optimizers.sgd import MomentumSGD
from aladdin_mpi.process.heap import keep_freed
from benchmarks import harness, quick
from benchmarks.bounds import positive, whole
from benchmarks.machine import machine

Way = Callable[[], object]
NOTES = """\
Medians of alternating single calls on one thread, here against plain. Look: checks that all values
are finite with `aladdin_mpi.flat.vectors.is_finite`; plain: the sum of the values. Look and add: a
received gradient with `add_if_finite`; plain: check it, then add it. Momentum: turns a gradient
into a step with `MomentumSGD.correct`; plain: the same operations on whole vectors. Update: a whole
step with `MomentumSGD.step`, likewise. Quantise: a gradient and the residual of the previous ones
in 8 or 4 bits with `quantise`, likewise. Dequantise and add: that message with `add_dequantised`,
likewise. Vectors are read in turn from more memory than a core's caches hold, as in training."""
QUICK = {"megabytes": [0.5], "repeats": 5}
MEMORY_MB = 256.0
"""Size of the memory from which the vectors are taken in turn."""
LR, MOMENTUM, DECAY = 1e-9, 0.9, 1e-4


class Vectors:
    """Vectors of one size from a large memory, a different one for each call."""

    def __init__(self, megabytes: float) -> None:
        self.numel = int(megabytes * BYTES_PER_MB) // BYTES_PER_VALUE
        count = max(4, int(MEMORY_MB / megabytes))
        self._rows = torch.randn(count, self.numel).mul_(1e-3)
        self._next = 0

    def __len__(self) -> int:
        return len(self._rows)

    def take(self) -> Tensor:
        """Return the least recently used vector."""
        self._next = (self._next + 1) % len(self._rows)
        return self._rows[self._next]


def look(megabytes: float) -> tuple[Way, Way]:
    """Check whether a vector is finite."""
    vectors = Vectors(megabytes)
    return lambda: is_finite(vectors.take()), lambda: isfinite(vectors.take().sum().item())


def look_and_add(megabytes: float) -> tuple[Way, Way]:
    """Check a gradient and add it to a sum."""
    vectors = Vectors(megabytes)
    total = torch.zeros(vectors.numel)

    def apart() -> None:
        message = vectors.take()
        if isfinite(message.sum().item()):
            total.add_(message)

    return lambda: add_if_finite(vectors.take(), total), apart


def momentum(megabytes: float) -> tuple[Way, Way]:
    """Turn a gradient into a step."""
    x, gradient = Vectors(megabytes), Vectors(megabytes)
    sgd = MomentumSGD(x.take(), MOMENTUM, DECAY)
    velocity, everything = torch.zeros(x.numel), slice(0, x.numel)

    def whole() -> None:
        g = gradient.take()
        g.add_(x.take(), alpha=DECAY)
        g.copy_(velocity.mul_(MOMENTUM).add_(g))

    return lambda: sgd.correct(everything, gradient.take(), x.take()), whole


def update(megabytes: float) -> tuple[Way, Way]:
    """Apply a gradient to parameters and leave it unchanged."""
    x, gradient = Vectors(megabytes), Vectors(megabytes)
    sgd = MomentumSGD(x.take(), MOMENTUM, DECAY)
    velocity = torch.zeros(x.numel)

    def whole() -> None:
        parameters = x.take()
        direction = gradient.take().clone()
        direction.add_(parameters, alpha=DECAY)
        direction.copy_(velocity.mul_(MOMENTUM).add_(direction))
        parameters.add_(direction, alpha=-LR)

    return lambda: sgd.step(x.take(), gradient.take(), LR), whole


def quantising(bits: int) -> Callable[[float], tuple[Way, Way]]:
    """Quantise a gradient and keep the residual."""

    def kernel(megabytes: float) -> tuple[Way, Way]:
        gradient = Vectors(megabytes)
        left, scratch = torch.zeros(gradient.numel), Scratch()
        message = torch.empty(message_length(gradient.numel, bits))
        full = gradient.numel - gradient.numel % WIDTH

        def whole() -> tuple[Tensor, Tensor]:
            left.add_(gradient.take())
            blocks = left[:full].view(-1, WIDTH)
            scales = blocks.abs().amax(1, keepdim=True).div_(steps_of(bits))
            steps = (blocks / scales).round_()
            blocks.sub_(steps * scales)
            return scales, _packed(steps.view(-1), bits)

        return lambda: quantise(gradient.take(), left, message, bits, scratch), whole

    return kernel


def dequantising(bits: int) -> Callable[[float], tuple[Way, Way]]:
    """Add a quantised gradient to a sum."""

    def kernel(megabytes: float) -> tuple[Way, Way]:
        total, scratch = Vectors(megabytes), Scratch()
        full = total.numel - total.numel % WIDTH
        messages = torch.zeros(len(total), message_length(total.numel, bits))
        for message in messages:
            quantise(total.take(), torch.zeros(total.numel), message, bits, scratch)
        scales = torch.ones(full // WIDTH, 1)
        packed = torch.ones(len(total), full * bits // 8, dtype=torch.uint8)
        number = count()

        def here() -> None:
            add_dequantised(messages[next(number) % len(total)], total.take(), LR, scratch)

        def whole() -> None:
            values = _unpacked(packed[next(number) % len(total)], bits).view(-1, WIDTH) * scales
            total.take()[:full].add_(values.view(-1), alpha=LR)

        return here, whole

    return kernel


def _packed(steps: Tensor, bits: int) -> Tensor:
    """Pack steps into bytes, two neighbours in one if they fit (plain version)."""
    if bits == 8:
        return steps.to(torch.int8)
    positive = steps.add_(8).to(torch.uint8)
    return positive[::2] | positive[1::2] << 4


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`_packed`."""
    if bits == 8:
        return packed.view(torch.int8).float()
    return torch.stack((packed & 15, packed >> 4), 1).view(-1).float().sub_(8)


KERNELS: dict[str, Callable[[float], tuple[Way, Way]]] = {
    "look": look,
    "look and add": look_and_add,
    "momentum": momentum,
    "update": update,
    "quantise 8": quantising(8),
    "quantise 4": quantising(4),
    "dequantise and add 8": dequantising(8),
    "dequantise and add 4": dequantising(4),
}


def row(kernel: str, megabytes: float, repeats: int) -> dict[str, Any]:
    """Return one row of the table."""
    keep_freed()  # as in training; otherwise the plain version would get new memory in each call
    ways = KERNELS[kernel](megabytes)
    for way in ways * 2:  # touch all memory
        way()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for way, taken in zip(ways, times, strict=True):
            start = time.perf_counter()
            way()
            taken.append(time.perf_counter() - start)
    mine, plain = median(times[0]), median(times[1])
    return {
        "what": kernel,
        "MB": megabytes,
        "here, ms": 1e3 * mine,
        "plain, ms": 1e3 * plain,
        "ratio": mine / plain,
        "median of ratios": median(a / b for a, b in zip(*times, strict=True)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser("kernels", "Time the memory passes along a gradient's path.")
    add = parser.add_argument
    add(
        "--what", nargs="+", choices=list(KERNELS), default=list(KERNELS), help="kernels to measure"
    )
    add("--megabytes", type=positive, nargs="+", default=[0.1, 1.0, 4.0, 16.0, 59.0], help="sizes")
    add("--repeats", type=whole(), default=101, help="number of calls of which the median is taken")
    args = quick.parse(parser, argv, QUICK)
    torch.set_num_threads(1)
    facts = machine()
    table = [row(what, size, args.repeats) for what in args.what for size in args.megabytes]
    found = harness.Findings("Memory passes along a gradient's path", table, NOTES)
    return harness.publish("kernels", argv, args, facts, found)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
