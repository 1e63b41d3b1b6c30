"""The algorithms by name, what a run has to know of each, and whether one suits its options.

Every file of this folder registers what it has; so may files outside the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal

from aladdin_mpi.compression.codec import GradientCodec
from aladdin_mpi.compression.wires import FEW_BITS
from aladdin_mpi.errors import UserError
from aladdin_mpi.model.layout import Bucket, Layout
from aladdin_mpi.model.replica import PhantomReplica, Replica
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.optimizers.sgd import MomentumSGD
from aladdin_mpi.parameter_server.server import ParameterServer
from aladdin_mpi.parameter_server.server_role import Server
from aladdin_mpi.roles.clipping import Clips
from aladdin_mpi.roles.role import TrainingWorker
from aladdin_mpi.roles.settings import OwnOptions, RunSettings
from aladdin_mpi.roles.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor

MakeWorker = Callable[[Worker, Optimizer, GradientCodec, RunSettings], TrainingWorker]
MakeServer = Callable[[ParameterServer, Optimizer, RunSettings], Server]
OwnPlaces = Callable[[Replica | PhantomReplica, int, int, RunSettings], "Tensor"]
"""Of the replica, the number of workers, and one of them."""
MakeLayout = Callable[[Replica | PhantomReplica, int, RunSettings], Layout]
"""Called with the number of workers too."""

Holder = Literal["servers", "first", "all"]
Optimizers = Literal["any", "by-value", "sgd"]
"""Every one; those that treat each value alike, since models are cut; momentum SGD alone."""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm's two parts and what the run has to know of it.

    Attributes:
        server: None where there is none.
        options: its own, a field of the run's that is named as the algorithm.
        options_of: the algorithm after which that field is named, if that is another.
        lockstep: all workers take the same number of steps, in rounds.
        holder: who holds the global model: the servers, each its buckets; every worker
            the same, of which the first is asked; or all workers, whose weighted mean
            it is (the consensus).
        has_centre: the servers' model is another than the workers', who are only drawn to it.
        least_workers: the smallest number of workers for which it makes sense.
        layout: cuts the flat vector where the usual cut will not do.
        compresses: its gradients can be sent compressed.
        few_bits: its gradients and models can be sent in few bits.
        whole_models: models go whole in bf16, which the algorithm can do with.
        auto_wire: what ``--wire auto`` is, at first where it adapts.
        node_sums: whether a node can be one of its workers.
        needs_all: whether, with these options, it cannot go on without every worker.
        collective: its gradients or models travel in collectives, which have no checksums.
        optimizers: those that it can do with.
        clips: see :class:`Worker`.
        server_steps: the servers' optimizers step along gradients, unless these are compressed;
            where an option ``momentum`` of the algorithm says so, that counts.
        steps_unused: parameters that a batch does not use are stepped with a gradient of zero.
        takes_writes: what a script writes into its model after a step takes part in training, if
            every worker writes the same.
        own_places: where the values lie that a worker's optimizer is of, where not of all.
        check: raises :class:`UserError` for options that do not go together.
        check_optimizer: the same for an optimizer other than the built-in SGD.
        on_resize: what the user is told where the number of workers changes.
    """

    name: str
    worker: MakeWorker
    server: MakeServer | None = None
    options: type[OwnOptions] | None = None
    options_of: str = ""
    lockstep: bool = False
    holder: Holder = "servers"
    has_centre: bool = False
    least_workers: int = 1
    layout: MakeLayout | None = None
    compresses: bool = False
    few_bits: bool = False
    whole_models: bool = True
    auto_wire: str = "fp32"
    node_sums: bool = False
    needs_all: Callable[[RunSettings], bool] = lambda run: False
    collective: bool = False
    optimizers: Optimizers = "any"
    clips: Clips = "own"
    server_steps: bool = False
    steps_unused: bool = False
    takes_writes: bool = False
    own_places: OwnPlaces | None = None
    check: Callable[[RunSettings], None] = lambda run: None
    check_optimizer: Callable[[Optimizer, RunSettings], None] = lambda optimizer, run: None
    on_resize: str = ""

    @property
    def group(self) -> str:
        """The field of the run's options that holds the algorithm's own."""
        return (self.options_of or self.name).replace("-", "_")

    def wire(self, options: RunSettings) -> str:
        """The format of what is sent."""
        return self.auto_wire if options.wire == "auto" else options.wire

    def holders(self, bucket: Bucket, ranks: int) -> range:
        """The ranks whose values of a bucket make up the global model's."""
        if self.holder == "servers":
            return range(bucket.server, bucket.server + 1)
        return range(1 if self.holder == "first" else ranks)


ALGORITHMS: dict[str, Algorithm] = {}
"""Every algorithm that has been registered."""


def register(algorithm: Algorithm) -> Algorithm:
    """Make an algorithm known: from then on its name can be given for ``--algorithm``.

    Raises:
        ValueError: there is another of this name.
    """
    if algorithm.name in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm.name}: expected a new name, got one that is taken")
    ALGORITHMS[algorithm.name] = algorithm
    return algorithm


def find(name: str) -> Algorithm:
    """The algorithm called ``name``.

    Raises:
        UserError: there is none.
    """
    if name not in ALGORITHMS:
        close = get_close_matches(name, ALGORITHMS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(
            f"--algorithm: expected one of {', '.join(sorted(ALGORITHMS))}, got {name!r}{hint}"
        )
    return ALGORITHMS[name]


def _place_of_momentum(algorithm: Algorithm, options: RunSettings) -> str:
    """Where the algorithm's options have momentum added; the worker if they do not say."""
    return str(getattr(getattr(options, algorithm.group, None), "momentum", "worker"))


def _servers_step(algorithm: Algorithm, options: RunSettings) -> bool:
    """Whether the servers' optimizers step along gradients."""
    return algorithm.server_steps or _place_of_momentum(algorithm, options) != "worker"


def marks_unused(algorithm: Algorithm, options: RunSettings) -> bool:
    """Return whether gradients tell other ranks which parameters they do not reach."""
    is_summed = algorithm.holder == "first" or options.node_sums
    return is_summed or _servers_step(algorithm, options)


def steps_unused(algorithm: Algorithm, options: RunSettings) -> bool:
    """Return whether parameters that no worker's batch uses are stepped with a gradient of zero.

    Quantised gradients have no sign of zero, which would mark these parameters for other ranks
    (:mod:`aladdin_mpi.model.unused`).
    """
    is_quantised = algorithm.wire(options) in FEW_BITS
    return algorithm.steps_unused or (is_quantised and _servers_step(algorithm, options))


def check_compression(algorithm: Algorithm, options: RunSettings) -> None:
    """Check that ``--compression`` suits the algorithm and its options.

    Raises:
        UserError: it sends no gradients, or not such as can be compressed.
    """
    if options.compression == "none":
        return
    if not algorithm.compresses:
        able = ", ".join(sorted(a.name for a in ALGORITHMS.values() if a.compresses))
        raise UserError(
            f"--compression {options.compression}: expected an algorithm that sends gradients "
            f"({able}), got {algorithm.name}; leave the option out"
        )
    # Compressed are steps that hold the worker's own momentum.
    place = _place_of_momentum(algorithm, options)
    if place != "worker":
        raise UserError(
            f"--compression {options.compression}: expected --{algorithm.name}-momentum worker, "
            f"got {place}; leave one of the two out"
        )


def check_wire(algorithm: Algorithm, options: RunSettings) -> None:
    """Check that ``--wire`` suits the algorithm and its options.

    Raises:
        UserError: in few bits are only gradients to servers, and their models, and only those
            that are not compressed otherwise.
    """
    if options.wire == "bf16" and not algorithm.whole_models:
        raise UserError(
            f"--wire bf16: expected a wire that keeps the differences of models for "
            f"{algorithm.name}, got one that rounds whole models; use --wire int8, which sends less"
        )
    if options.wire not in FEW_BITS:
        return
    if not algorithm.few_bits:
        able = ", ".join(sorted(a.name for a in ALGORITHMS.values() if a.few_bits))
        raise UserError(
            f"--wire {options.wire}: expected an algorithm that sends gradients to servers "
            f"({able}), got {algorithm.name}; use --wire bf16"
        )
    if options.compression != "none":
        raise UserError(
            f"--wire {options.wire}: expected without --compression {options.compression}, whose "
            "values are few; use --wire bf16, or leave one of the two out"
        )


def check_node_sums(algorithm: Algorithm, options: RunSettings) -> None:
    """Check that ``--node-sums`` suits the algorithm and its options.

    Raises:
        UserError: it has not been shown to, or an option needs each worker's own gradient.
    """
    if not options.node_sums:
        return
    if not algorithm.node_sums:
        able = ", ".join(sorted(a.name for a in ALGORITHMS.values() if a.node_sums))
        raise UserError(
            f"--node-sums: expected an algorithm whose worker can be a node ({able}), got "
            f"{algorithm.name}; leave the option out"
        )
    for flag, is_given, why in (
        ("--max-loss", options.max_loss is not None, "which looks at each worker's loss"),
        (
            f"--compression {options.compression}",
            options.compression != "none" and algorithm.collective,
            f"which {algorithm.name} sends in a collective of all workers",
        ),
        ("--allow-resize", options.allow_resize, "as workers are nodes then"),
    ):
        if is_given:
            raise UserError(
                f"--node-sums: expected without {flag}, {why}; leave one of the two out"
            )


def check_checksum(algorithm: Algorithm, options: RunSettings) -> None:
    """Check that ``--checksum`` suits the algorithm.

    Raises:
        UserError: what it sends goes by collectives.
    """
    if options.checksum and algorithm.collective:
        able = ", ".join(sorted(a.name for a in ALGORITHMS.values() if not a.collective))
        raise UserError(
            f"--checksum: expected an algorithm that sends messages from rank to rank ({able}), "
            f"got {algorithm.name}, whose sums are made by a library; leave the option out"
        )


def check_optimizer(algorithm: Algorithm, options: RunSettings, optimizer: Optimizer) -> None:
    """Check that an optimizer other than the built-in momentum SGD suits the algorithm.

    Raises:
        UserError: the algorithm is made for momentum SGD, or cuts models where the optimizer
            has to see whole parameters.
    """
    if isinstance(optimizer, MomentumSGD):
        return
    name = optimizer.name
    if algorithm.optimizers == "sgd" or options.compression != "none":
        what = algorithm.name if algorithm.optimizers == "sgd" else "--compression dgc"
        raise UserError(
            f"optimizer: expected momentum SGD for {what}, which is made for it, got {name}; give "
            "--momentum and --weight-decay, or take another algorithm, such as ar-sgd"
        )
    if algorithm.optimizers == "by-value" and not optimizer.takes_parts:
        able = ", ".join(sorted(a.name for a in ALGORITHMS.values() if a.optimizers == "any"))
        raise UserError(
            f"optimizer: expected one that treats every value alike for {algorithm.name}, which "
            f"cuts the model into messages, got {name}, whose steps depend on whole parameters; "
            f"take another optimizer, or one of {able}"
        )
    place = _place_of_momentum(algorithm, options)
    if place != "worker":
        raise UserError(
            f"--{algorithm.name}-momentum: expected worker with the optimizer {name}, got {place}; "
            "leave the option out"
        )
    algorithm.check_optimizer(optimizer, options)


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
            f"{workers} worker{'s' if workers > 1 else ''}; with {size} ranks use --servers "
            f"{size // 2} or fewer, or start it with mpirun -np {2 * servers} or more; simulated, "
            f"use --servers {workers} or fewer, or --workers {servers} or more"
        )


def checked(options: RunSettings, size: int) -> Algorithm:
    """The algorithm that the options name, if it and they suit each other and ``size`` ranks.

    Raises:
        UserError: they do not.
    """
    algorithm = find(options.algorithm)
    check_ranks(algorithm, size, options.servers)
    check_compression(algorithm, options)
    check_wire(algorithm, options)
    check_node_sums(algorithm, options)
    check_checksum(algorithm, options)
    algorithm.check(options)
    return algorithm
