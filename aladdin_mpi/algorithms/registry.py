"""The algorithms by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from aladdin_mpi.algorithms.ad_psgd import AdPsgdWorker
from aladdin_mpi.algorithms.adsp import AdspServer, AdspWorker
from aladdin_mpi.algorithms.aladdin import AladdinServer, AladdinWorker
from aladdin_mpi.algorithms.aladdin_ahead import AheadServer, AheadWorker
from aladdin_mpi.algorithms.ar_sgd import ArSgdWorker
from aladdin_mpi.algorithms.ashl import AshlServer, AshlWorker
from aladdin_mpi.algorithms.asp import AspServer, AspWorker
from aladdin_mpi.algorithms.bsp import BspServer, bsp_worker
from aladdin_mpi.algorithms.easgd import EamsgdWorker, EasgdServer, EasgdWorker
from aladdin_mpi.algorithms.gosgd import GoSgdWorker
from aladdin_mpi.algorithms.local_sgd import LocalSgdWorker
from aladdin_mpi.algorithms.multistep import multistep_layout, multistep_worker, own_places
from aladdin_mpi.algorithms.sgp import SgpWorker
from aladdin_mpi.algorithms.shat import ShatServer, ShatWorker
from aladdin_mpi.algorithms.ssp import SspServer, SspWorker
from aladdin_mpi.compression.codec import GradientCodec
from aladdin_mpi.compression.wires import FEW_BITS, bits_of
from aladdin_mpi.config.algorithm_options import group_of
from aladdin_mpi.errors import UserError
from aladdin_mpi.model.layout import Bucket, Layout
from aladdin_mpi.model.replica import PhantomReplica, Replica
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.optimizers.sgd import MomentumSGD
from aladdin_mpi.parameter_server.just_in_time import fine_layout
from aladdin_mpi.parameter_server.server import ParameterServer
from aladdin_mpi.parameter_server.server_role import Server
from aladdin_mpi.roles.role import TrainingWorker
from aladdin_mpi.roles.worker import Clips, Worker

if TYPE_CHECKING:
    from aladdin_mpi.config.options import RunOptions

MakeWorker = Callable[[Worker, Optimizer, GradientCodec, "RunOptions"], TrainingWorker]
MakeServer = Callable[[ParameterServer, Optimizer, "RunOptions"], Server]
OwnPlaces = Callable[[Replica | PhantomReplica, int, int, "RunOptions"], Tensor]
"""Of the replica, the number of workers, and one of them."""
MakeLayout = Callable[[Replica | PhantomReplica, int, "RunOptions"], Layout]
"""Called with the number of workers too."""


Holder = Literal["servers", "first", "all"]
Optimizers = Literal["any", "by-value", "sgd"]
"""Every one; those that treat each value alike, since models are cut; momentum SGD alone."""


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
        layout: cuts the flat vector where the usual cut will not do.
        compresses: its gradients can be sent compressed.
        few_bits: its gradients and models can be sent in few bits.
        whole_models: models go whole in bf16, which the algorithm can do with.
        auto_wire: what ``--wire auto`` is, at first where it adapts.
        needs_all: whether, with these options, it cannot go on without every worker.
        collective: its gradients or models travel in collectives, which have no checksums.
        optimizers: those that it can do with.
        clips: see :class:`Worker`.
        own_places: where the values lie that a worker's optimizer is of, where not of all.
        on_resize: what the user is told where the number of workers changes.
    """

    name: str
    worker: MakeWorker
    server: MakeServer | None = None
    lockstep: bool = False
    holder: Holder = "servers"
    least_workers: int = 1
    layout: MakeLayout | None = None
    compresses: bool = False
    few_bits: bool = False
    whole_models: bool = True
    auto_wire: str = "fp32"
    needs_all: Callable[[RunOptions], bool] = lambda options: False
    collective: bool = False
    optimizers: Optimizers = "any"
    clips: Clips = "own"
    own_places: OwnPlaces | None = None
    on_resize: str = ""

    def wire(self, options: RunOptions) -> str:
        """The format of what is sent."""
        return self.auto_wire if options.wire == "auto" else options.wire

    def holders(self, bucket: Bucket, ranks: int) -> range:
        """The ranks whose values of a bucket make up the global model's."""
        if self.holder == "servers":
            return range(bucket.server, bucket.server + 1)
        return range(1 if self.holder == "first" else ranks)


def _momentum_sgd(optimizer: Optimizer) -> MomentumSGD:
    """The optimizer of an algorithm that takes no other."""
    assert isinstance(optimizer, MomentumSGD)
    return optimizer


def _always(options: RunOptions) -> bool:
    return True


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            "aladdin",
            lambda worker, opt, wire, options: AladdinWorker(worker, opt, wire, options.aladdin),
            lambda server, opt, options: AladdinServer(server, opt, options.aladdin),
            compresses=True,
            few_bits=True,
            optimizers="by-value",
        ),
        Algorithm(
            "aladdin-ahead",
            lambda worker, opt, wire, options: AheadWorker(
                worker, opt, wire, options.aladdin_ahead, bits_of(options.wire)
            ),
            lambda server, opt, options: AheadServer(server),
            layout=fine_layout,
            few_bits=True,
            whole_models=False,
            auto_wire="int8",
            clips="parts",
            optimizers="by-value",
            on_resize="the workers' tracks begin anew",
        ),
        Algorithm(
            "bsp",
            lambda worker, opt, wire, options: bsp_worker(
                worker, opt, wire, options.bsp, momentum=options.compression != "none"
            ),
            lambda server, opt, options: BspServer(
                server, opt, options.bsp, momentum=options.compression == "none"
            ),
            lockstep=True,
            compresses=True,
            few_bits=True,
            needs_all=lambda options: options.bsp.host_first,
            optimizers="by-value",
        ),
        Algorithm(
            "asp",
            lambda worker, opt, wire, options: AspWorker(worker, opt, wire, options.asp),
            lambda server, opt, options: AspServer(server, opt, options.asp),
            compresses=True,
            few_bits=True,
            optimizers="by-value",
        ),
        Algorithm(
            "shat",
            lambda worker, opt, wire, options: ShatWorker(worker, opt, wire, options.shat),
            lambda server, opt, options: ShatServer(server, opt, options.shat),
            compresses=True,
            few_bits=True,
            optimizers="by-value",
        ),
        Algorithm(
            "ssp",
            lambda worker, opt, wire, options: SspWorker(worker, opt, wire, options.ssp),
            lambda server, opt, options: SspServer(server, opt, options.ssp),
            compresses=True,
            few_bits=True,
            optimizers="by-value",
        ),
        Algorithm(
            "easgd",
            lambda worker, opt, wire, options: EasgdWorker(worker, opt, wire, options.easgd),
            lambda server, opt, options: EasgdServer(server, options.easgd),
            few_bits=True,
            on_resize="what the workers' own models were ahead of the centre is dropped",
        ),
        Algorithm(
            "eamsgd",
            lambda worker, opt, wire, options: EamsgdWorker(
                worker, _momentum_sgd(opt), wire, options.easgd
            ),
            lambda server, opt, options: EasgdServer(server, options.easgd),
            few_bits=True,
            optimizers="sgd",
            on_resize="what the workers' own models were ahead of the centre is dropped",
        ),
        Algorithm(
            "ashl",
            lambda worker, opt, wire, options: AshlWorker(worker, opt, wire, options.ashl),
            lambda server, opt, options: AshlServer(server, options.ashl),
            few_bits=True,
            on_resize="the workers are measured for a new plan",
        ),
        Algorithm(
            "adsp",
            lambda worker, opt, wire, options: AdspWorker(worker, opt, wire),
            lambda server, opt, options: AdspServer(server, options.adsp),
            few_bits=True,
            on_resize="the rate of commits is searched anew",
        ),
        Algorithm(
            "ar-sgd",
            lambda worker, opt, wire, options: ArSgdWorker(worker, opt, wire, options.ar_sgd),
            lockstep=True,
            holder="first",
            compresses=True,
            needs_all=_always,
            collective=True,
            clips="mean",
        ),
        Algorithm(
            "local-sgd",
            lambda worker, opt, wire, options: LocalSgdWorker(worker, opt, wire, options.local_sgd),
            lockstep=True,
            holder="all",
            needs_all=_always,
            collective=True,
        ),
        Algorithm(
            "sgp",
            lambda worker, opt, wire, options: SgpWorker(worker, opt, wire, options.sgp),
            lockstep=True,
            holder="all",
            least_workers=2,
            on_resize="they begin from the weighted mean of all models, with equal weights",
        ),
        Algorithm(
            "osgp",
            lambda worker, opt, wire, options: SgpWorker(
                worker,
                opt,
                wire,
                options.osgp,
                options.osgp.tau,
                add_first=options.osgp.order == "add-first",
            ),
            lockstep=True,
            holder="all",
            least_workers=2,
            on_resize="they begin from the weighted mean of all models, with equal weights",
        ),
        Algorithm(
            "gosgd",
            lambda worker, opt, wire, options: GoSgdWorker(
                worker, opt, wire, options.gosgd, options.seed
            ),
            holder="all",
            least_workers=2,
            on_resize="they begin from the weighted mean of all models, with equal weights",
        ),
        Algorithm(
            "ad-psgd",
            lambda worker, opt, wire, options: AdPsgdWorker(
                worker, opt, wire, options.ad_psgd, options.seed
            ),
            holder="all",
            least_workers=2,
            on_resize="they begin from the mean of all models",
        ),
        Algorithm(
            "multistep",
            multistep_worker,
            lockstep=True,
            holder="first",
            layout=multistep_layout,
            needs_all=_always,
            collective=True,
            optimizers="sgd",
            own_places=own_places,
        ),
    )
}


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


def _place_of_momentum(algorithm: Algorithm, options: RunOptions) -> str:
    """Where the algorithm's options have momentum added; the worker if they do not say."""
    return str(getattr(getattr(options, group_of(algorithm.name), None), "momentum", "worker"))


def check_compression(algorithm: Algorithm, options: RunOptions) -> None:
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
    if algorithm.name == "bsp" and options.bsp.host_first:
        raise UserError(
            f"--compression {options.compression}: expected without --bsp-host-first, which adds "
            "up whole gradients; leave one of the two out"
        )


def check_wire(algorithm: Algorithm, options: RunOptions) -> None:
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
    if algorithm.name == "bsp" and options.bsp.host_first:
        raise UserError(
            f"--wire {options.wire}: expected without --bsp-host-first, which adds up whole "
            "gradients; use --wire bf16, or leave one of the two out"
        )


def check_checksum(algorithm: Algorithm, options: RunOptions) -> None:
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


def check_optimizer(algorithm: Algorithm, options: RunOptions, optimizer: Optimizer) -> None:
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
    steps = options.aladdin.lookahead if algorithm.name == "aladdin" else 0.0
    if steps:
        raise UserError(
            f"--aladdin-lookahead: expected 0 with the optimizer {name}, got {steps:g}: a worker "
            "looks ahead along the momentum of the built-in SGD; leave the option out"
        )


def check_lookahead(algorithm: Algorithm, options: RunOptions) -> None:
    """Check that a worker of ALADDIN that looks ahead has a momentum to do so with.

    Raises:
        UserError: it has none.
    """
    steps = options.aladdin.lookahead if algorithm.name == "aladdin" else 0.0
    if steps and not options.momentum:
        raise UserError(
            f"--aladdin-lookahead: expected 0 with --momentum 0, got {steps:g}: a worker looks "
            "ahead along its momentum; leave the option out, or set --momentum"
        )


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
