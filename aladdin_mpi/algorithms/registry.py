"""The algorithms by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aladdin_mpi.algorithms.aladdin import AladdinServer, AladdinWorker
from aladdin_mpi.algorithms.base import Server, TrainingWorker
from aladdin_mpi.algorithms.server import ParameterServer
from aladdin_mpi.algorithms.worker import Worker
from aladdin_mpi.compression.dense import DenseWire
from aladdin_mpi.errors import UserError
from aladdin_mpi.optimizer import MomentumSGD

if TYPE_CHECKING:
    from aladdin_mpi.options import RunOptions

MakeWorker = Callable[[Worker, MomentumSGD, DenseWire, "RunOptions"], TrainingWorker]
MakeServer = Callable[[ParameterServer, MomentumSGD, "RunOptions"], Server]


@dataclass(frozen=True)
class Algorithm:
    """An algorithm's two parts. ``server`` is None where there is none."""

    name: str
    worker: MakeWorker
    server: MakeServer | None


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            "aladdin",
            lambda worker, sgd, wire, options: AladdinWorker(worker, sgd, wire, options.aladdin),
            lambda server, sgd, options: AladdinServer(server, sgd, options.aladdin),
        ),
    )
}


def find(name: str) -> Algorithm:
    """The algorithm called ``name``.

    Raises:
        UserError: there is none.
    """
    if name not in ALGORITHMS:
        raise UserError(
            f"--algorithm: expected one of {', '.join(sorted(ALGORITHMS))}, got {name!r}"
        )
    return ALGORITHMS[name]


def check_ranks(algorithm: Algorithm, size: int, servers: int) -> None:
    """Check that ``size`` ranks are enough, and the servers not too many.

    Raises:
        UserError: with the number of ranks needed.
    """
    if algorithm.server is None:
        return
    workers = size - servers
    if workers < 1:
        raise UserError(
            f"--algorithm {algorithm.name}: expected at least {servers + 1} ranks, for "
            f"--servers {servers} and one worker, got {size}; start it with "
            f"mpirun -np {servers + 1} or more"
        )
    if servers > workers:
        raise UserError(
            f"--servers: expected at most as many servers as workers, got {servers} servers and "
            f"{workers} worker{'s' if workers > 1 else ''}; use --servers {size // 2} or fewer, "
            f"or mpirun -np {2 * servers} or more"
        )
