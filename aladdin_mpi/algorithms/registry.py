"""The algorithms by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from aladdin_mpi.algorithms.aladdin import AladdinServer, AladdinWorker
from aladdin_mpi.algorithms.asp import AspServer, AspWorker
from aladdin_mpi.algorithms.base import Server, TrainingWorker
from aladdin_mpi.algorithms.bsp import BspServer, bsp_worker
from aladdin_mpi.algorithms.easgd import EamsgdWorker, EasgdServer, EasgdWorker
from aladdin_mpi.algorithms.server import ParameterServer
from aladdin_mpi.algorithms.shat import ShatServer, ShatWorker
from aladdin_mpi.algorithms.ssp import SspServer, SspWorker
from aladdin_mpi.algorithms.worker import Worker
from aladdin_mpi.compression.dense import DenseWire
from aladdin_mpi.errors import UserError
from aladdin_mpi.layout import Bucket
from aladdin_mpi.optimizer import MomentumSGD

if TYPE_CHECKING:
    from aladdin_mpi.options import RunOptions

MakeWorker = Callable[[Worker, MomentumSGD, DenseWire, "RunOptions"], TrainingWorker]
MakeServer = Callable[[ParameterServer, MomentumSGD, "RunOptions"], Server]


Holder = Literal["servers", "first", "all"]


@dataclass(frozen=True)
class Algorithm:
    """An algorithm's two parts and what the run has to know of it.

    Attributes:
        server: None where there is none.
        lockstep: all workers take the same number of steps, in rounds.
        holder: who holds the global model: the servers, each its buckets; every worker
            the same, of which the first is asked; or all workers, whose weighted mean
            it is (the consensus).
        least_workers: the smallest number of workers for which it makes sense.
    """

    name: str
    worker: MakeWorker
    server: MakeServer | None = None
    lockstep: bool = False
    holder: Holder = "servers"
    least_workers: int = 1

    def holders(self, bucket: Bucket, ranks: int) -> range:
        """The ranks whose values of a bucket make up the global model's."""
        if self.holder == "servers":
            return range(bucket.server, bucket.server + 1)
        return range(1 if self.holder == "first" else ranks)


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            "aladdin",
            lambda worker, sgd, wire, options: AladdinWorker(worker, sgd, wire, options.aladdin),
            lambda server, sgd, options: AladdinServer(server, sgd, options.aladdin),
        ),
        Algorithm(
            "bsp",
            lambda worker, sgd, wire, options: bsp_worker(worker, sgd, wire, options.bsp, False),
            lambda server, sgd, options: BspServer(server, sgd, options.bsp, True),
            lockstep=True,
        ),
        Algorithm(
            "asp",
            lambda worker, sgd, wire, options: AspWorker(worker, sgd, wire, options.asp),
            lambda server, sgd, options: AspServer(server, sgd, options.asp),
        ),
        Algorithm(
            "shat",
            lambda worker, sgd, wire, options: ShatWorker(worker, sgd, wire, options.shat),
            lambda server, sgd, options: ShatServer(server, sgd, options.shat),
        ),
        Algorithm(
            "ssp",
            lambda worker, sgd, wire, options: SspWorker(worker, sgd, wire, options.ssp),
            lambda server, sgd, options: SspServer(server, sgd, options.ssp),
        ),
        Algorithm(
            "easgd",
            lambda worker, sgd, wire, options: EasgdWorker(worker, sgd, wire, options.easgd),
            lambda server, sgd, options: EasgdServer(server, options.easgd),
        ),
        Algorithm(
            "eamsgd",
            lambda worker, sgd, wire, options: EamsgdWorker(worker, sgd, wire, options.easgd),
            lambda server, sgd, options: EasgdServer(server, options.easgd),
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
    servers = servers if algorithm.server else 0
    workers = size - servers
    least = algorithm.least_workers
    if workers < least:
        those = "one worker" if least == 1 else f"{least} workers"
        beside = f", for --servers {servers} and {those}" if servers else ""
        raise UserError(
            f"--algorithm {algorithm.name}: expected at least {servers + least} ranks{beside}, got "
            f"{size}; start it with mpirun -np {servers + least} or more, or simulate it with "
            f"--workers {least} or more"
        )
    if servers > workers:
        raise UserError(
            f"--servers: expected at most as many servers as workers, got {servers} servers and "
            f"{workers} worker{'s' if workers > 1 else ''}; use --servers {size // 2} or fewer, "
            f"or mpirun -np {2 * servers} or more"
        )
