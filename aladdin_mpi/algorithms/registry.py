"""Registry of implementations by algorithm name: every module of this package adds its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.errors import UserError
from aladdin_mpi.exchange.server import ParameterServer
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.flat.layout import Layout
from aladdin_mpi.flat.replica import PhantomReplica, Replica
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.optimizers.sgd import MomentumSGD
from aladdin_mpi.options.algorithms import ALGORITHMS, Algorithm, declare
from aladdin_mpi.options.checks import place_of_momentum
from aladdin_mpi.options.general import GeneralOptions
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker

MakeWorker = Callable[[Worker, Optimizer, GradientCodec, GeneralOptions], TrainingWorker]
MakeServer = Callable[[ParameterServer, Optimizer, GeneralOptions], ServerAlgorithm]
MakeLayout = Callable[[Replica | PhantomReplica, int, GeneralOptions], Layout]
"""Function of the replica, the number of workers and the options."""
MakeCodec = Callable[[GradientCodec, Layout], GradientCodec]
"""Function of the codec of ``--wire``."""
CheckOptimizer = Callable[[Optimizer, GeneralOptions], None]


@dataclass(frozen=True)
class Implementation:
    """The code of an algorithm.

    Attributes:
        worker: makes the role of a worker.
        server: makes the role of a server; None if the algorithm has none.
        layout: cuts the flat vector, if the default layout does not suit.
        codec: makes the codec of messages, if it is not that of ``--wire``.
        arriving: makes the codec by which servers read messages, if it differs.
        updates_parts: each worker updates only a part of each layer.
        check_optimizer: raises :class:`UserError` for an optimizer other than the built-in
            SGD that does not suit the options.
    """

    worker: MakeWorker
    server: MakeServer | None = None
    layout: MakeLayout | None = None
    codec: MakeCodec | None = None
    arriving: MakeCodec | None = None
    updates_parts: bool = False
    check_optimizer: CheckOptimizer = lambda optimizer, run: None


_IMPLEMENTATIONS: dict[str, Implementation] = {}


def register(
    algorithm: Algorithm,
    *,
    worker: MakeWorker,
    server: MakeServer | None = None,
    layout: MakeLayout | None = None,
    codec: MakeCodec | None = None,
    arriving: MakeCodec | None = None,
    updates_parts: bool = False,
    check_optimizer: CheckOptimizer = lambda optimizer, run: None,
) -> None:
    """Register the code of ``algorithm``, and declare it if necessary.

    Raises:
        ValueError: its name is taken, or it has servers but no code for them.
    """
    if ALGORITHMS.get(algorithm.name) is not algorithm:
        declare(algorithm)
    if algorithm.has_servers != (server is not None):
        raise ValueError(f"algorithm {algorithm.name}: has_servers requires server, and vice versa")
    _IMPLEMENTATIONS[algorithm.name] = Implementation(
        worker, server, layout, codec, arriving, updates_parts, check_optimizer
    )


def implementation(algorithm: Algorithm) -> Implementation:
    """Return the code of a registered algorithm."""
    return _IMPLEMENTATIONS[algorithm.name]


def check_optimizer(algorithm: Algorithm, options: GeneralOptions, optimizer: Optimizer) -> None:
    """Check that an optimizer other than the built-in momentum SGD suits the algorithm.

    Raises:
        UserError: the algorithm is made for momentum SGD, or cuts models where the optimizer
            has to see whole parameters.
    """
    if isinstance(optimizer, MomentumSGD):
        return
    name = optimizer.name
    if algorithm.optimizers == "sgd" or options.compression == "dgc":
        what, remedy = "--compression dgc", "leave --compression out"
        if algorithm.optimizers == "sgd":
            what, remedy = algorithm.name, "another algorithm, such as ar-sgd"
        raise UserError(
            f"optimizer: {what} requires the built-in momentum SGD; this run uses another "
            f"optimizer ({name}). Use --momentum and --weight-decay instead, or {remedy}."
        )
    if algorithm.optimizers == "by-value" and not optimizer.takes_parts:
        able = ", ".join(sorted(a.name for a in ALGORITHMS.values() if a.optimizers == "any"))
        raise UserError(
            f"optimizer: {algorithm.name} requires an optimizer that treats every value alike, "
            f"because it cuts the model into messages; steps of {name} depend on whole "
            f"parameters. Use another optimizer, or one of {able}."
        )
    place = place_of_momentum(algorithm, options)
    if place != "worker":
        raise UserError(
            f"--{algorithm.name}-momentum: {place} requires the built-in SGD; this run uses "
            f"another optimizer ({name}). Leave the option out."
        )
    implementation(algorithm).check_optimizer(optimizer, options)
