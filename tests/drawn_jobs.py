"""Random runs of ``tests.roles``: sizes, speeds, network and options depend on a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.roles import Job, any_network

DrawOptions = Callable[[random.Random], dict[str, Any]]
"""Draws an algorithm's options."""


def any_served_job(algorithm: str, seed: int, draw_options: DrawOptions) -> Job:
    """Return a run with one to five workers and up to three servers."""
    r = random.Random(seed)
    workers = r.randint(1, 5)
    servers = r.randint(1, min(3, workers))
    options = draw_options(r)
    return Job(
        algorithm,
        workers=workers,
        servers=servers,
        numel=r.randint(9, 60),
        bucket=r.randint(5, 60),
        samples=r.choice([r.randint(1, 9), r.randint(100, 600)]),
        batch=r.randint(1, 4),
        segments=r.randint(1, 3),
        settings={algorithm: options, "wire": r.choice(["fp32", "fp32", "bf16"])},
        slowdown={w: r.uniform(1, 8) for w in range(workers) if r.random() < 0.5},
        jitter=r.choice([0.0, 0.5]),
        cluster=any_network(seed, workers + servers),
        seed=seed,
    )


def any_lockstep_job(algorithm: str, seed: int, draw_settings: DrawOptions = lambda r: {}) -> Job:
    """Return a run without servers, with one to nine workers that step in rounds."""
    r = random.Random(seed)
    workers = r.randint(1, 9)
    settings = {
        "momentum": r.choice([0.0, 0.9]),
        "wait_free": r.random() < 0.7,
        "wire": r.choice(["fp32", "bf16"]),
        **draw_settings(r),
    }
    return Job(
        algorithm,
        workers=workers,
        numel=r.randint(20, 60),
        bucket=r.randint(5, 30),
        samples=r.choice([r.randint(1, 9), r.randint(30, 160)]),
        batch=r.randint(1, 5),
        segments=r.randint(1, 3),
        settings=settings,
        slowdown={0: r.choice([1.0, 8.0])},
        jitter=r.choice([0.0, 0.3]),
        cluster=any_network(seed, workers),
        seed=seed,
    )
