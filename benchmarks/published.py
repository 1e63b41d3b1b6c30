"""Published values of the ALADDIN study: Ko, Choi, Jei, Lee, Kim; CIKM 2021.

Speedups over one worker, with ResNet-50 and VGG-16 on CIFAR-10, four machines of two GPUs each.
Its SGP overlaps communication with one step, which is `osgp` here; `sgp` waits in every step.
"""

from __future__ import annotations

SLOWDOWNS = (1.0, 2.0, 10.0, 100.0)
"""Slowdown factors of one worker in table 3: HO, HE0, HE1 and HE2."""

_TABLE_3 = {
    ("resnet50", "aladdin"): (6.70, 6.30, 5.95, 5.87),
    ("vgg16", "aladdin"): (6.18, 5.74, 5.49, 5.41),
    ("resnet50", "ar-sgd"): (5.40, 3.22, 0.71, 0.08),
    ("vgg16", "ar-sgd"): (2.03, 1.46, 0.62, 0.07),
    ("resnet50", "osgp"): (6.00, 5.21, 4.83, 1.93),
    ("vgg16", "osgp"): (4.64, 4.15, 3.81, 1.89),
}

WORKERS = (2, 4, 8)
"""Numbers of workers in figure 5."""

_FIGURE_5 = {
    ("resnet50", "ar-sgd"): (1.82, 3.36, 5.40),
    ("resnet50", "asp"): (1.60, 3.25, 5.83),
    ("resnet50", "easgd"): (1.55, 3.30, 5.90),
    ("resnet50", "osgp"): (1.68, 3.35, 6.00),
    ("resnet50", "aladdin"): (1.71, 3.57, 6.70),
    ("vgg16", "ar-sgd"): (1.45, 1.62, 2.03),
    ("vgg16", "asp"): (1.03, 1.61, 2.56),
    ("vgg16", "easgd"): (1.30, 1.86, 3.59),
    ("vgg16", "osgp"): (1.34, 2.54, 4.64),
    ("vgg16", "aladdin"): (1.73, 3.30, 6.18),
}

PERIODS = (1, 2, 4)
"""Update periods pi in figure 8b, with eight workers."""

_FIGURE_8B = {
    "resnet50": (5.90, 6.40, 6.70),
    "vgg16": (3.60, 5.55, 6.18),
}


def with_straggler(workload: str, algorithm: str, slowdown: float) -> float | None:
    """Return table 3's speedup of eight workers of which one is slower; None: not published."""
    figures = _TABLE_3.get((workload, algorithm))
    if figures is None or slowdown not in SLOWDOWNS:
        return None
    return figures[SLOWDOWNS.index(slowdown)]


def with_workers(workload: str, algorithm: str, workers: int) -> float | None:
    """Return figure 5's value, read off its vector graphics; None: not published."""
    figures = _FIGURE_5.get((workload, algorithm))
    if figures is None or workers not in WORKERS:
        return None
    return figures[WORKERS.index(workers)]


def with_period(workload: str, pi: int) -> float | None:
    """Return figure 8b's speedup of ALADDIN at an update period; None: not published."""
    if pi not in PERIODS or workload not in _FIGURE_8B:
        return None
    return _FIGURE_8B[workload][PERIODS.index(pi)]
