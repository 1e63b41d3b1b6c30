"""Builders of a rank's part in an algorithm: its optimizer, codec and role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch
from torch import Tensor

from aladdin_mpi.algorithms import registry
from aladdin_mpi.algorithms.registry import implementation
from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.codec.dgc import DeepGradientCompression
from aladdin_mpi.codec.quantised import make_codec
from aladdin_mpi.control.budget import SampleClient, SampleLease
from aladdin_mpi.errors import UserError
from aladdin_mpi.exchange.server import ParameterServer
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.flat.lanes import PieceLane
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.optimizers.from_torch import TorchOptimizer
from aladdin_mpi.optimizers.sgd import MomentumSGD, scale_of
from aladdin_mpi.options.checks import marks_unused, steps_unused
from aladdin_mpi.options.general import QUANTISED_BITS, SUM_BITS
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.session.context import Context
from aladdin_mpi.session.user_optimizer import UserOptimizer, check_length
from aladdin_mpi.worker.gradient_pass import Clipping
from aladdin_mpi.worker.island import Island, IslandSampleClient, ReplicatedIsland
from aladdin_mpi.worker.role import ComputingMember, TrainingWorker
from aladdin_mpi.worker.step import Compute, StepTimeModel
from aladdin_mpi.worker.worker import Worker


def momentum_sgd(options: RunOptions, x: Tensor, clip: float | None = None) -> MomentumSGD:
    """Return momentum SGD for the flat parameters ``x``."""
    return MomentumSGD(x, options.momentum, options.weight_decay, options.nesterov, clip)


def make_optimizer(
    context: Context, own: UserOptimizer | None, steps: int | None = None
) -> Optimizer:
    """Return ``own``, or momentum SGD; ``steps`` is the length of a run that starts.

    Raises:
        UserError: the algorithm cannot use it.
    """
    options, x = context.options, context.replica.parameters
    if own is None:
        clip = options.dgc.clip if options.compression == "dgc" else None
        return momentum_sgd(options, x, clip and clip / sqrt(len(context.leaders)))
    if steps is not None:
        check_length(own, steps)
    lane = context.lane if len(context.lanes) > 1 else None
    optimizer = TorchOptimizer(own.given, context.module, x, own.scheduler, own.access, lane)
    registry.check_optimizer(context.algorithm, options, optimizer)
    if len(context.lanes) > 1 and not optimizer.takes_parts:
        raise UserError(
            f"{options.island_flag} cannot be combined with the optimizer {optimizer.name}, which "
            "steps whole parameters: each rank of an island has one of "
            f"{len(context.lanes)} parts. Use an optimizer that treats every value alike, such as "
            "AdamW, or leave the option out."
        )
    return optimizer


def make_wire(context: Context, optimizer: Optimizer, epoch: int) -> GradientCodec:
    """Return the codec of gradients; ``epoch``, in samples, is the unit of a warm-up.

    Raises:
        UserError: float64 would be rounded by default, or cannot be compressed.
    """
    options, x, layout = context.options, context.replica.parameters, context.layout
    moves_bytes = context.transport.needs_memory
    name = context.algorithm.wire(options)
    if options.wire == "auto" and name in QUANTISED_BITS and x.dtype == torch.float64:
        raise UserError(
            f"model: the parameters are float64, which {context.algorithm.name} rounds to {name} "
            "on the wire unless --wire says otherwise. Pass --wire fp32, which sends float64 as "
            f"it is, or --wire {name} to accept the rounding"
        )
    has_low_rank = options.compression == "powersgd"
    if x.dtype == torch.float64 and context.algorithm.all_reduces is not None:
        for option, is_given in (
            (f"--wire {name}", name in SUM_BITS),
            ("--compression powersgd", has_low_rank),
        ):
            if is_given:
                raise UserError(
                    f"{option} requires parameters in float32 or less, and the model's are "
                    "float64. Leave the option out, or call model.float()."
                )
    wire = make_codec(name, layout, x.device, moves_bytes, x.dtype)
    own = implementation(context.algorithm).codec
    if own is not None:
        return own(wire, layout)
    if options.compression != "dgc":
        return wire
    dgc = options.dgc
    velocity = optimizer.velocity if isinstance(optimizer, MomentumSGD) else None
    return DeepGradientCompression(
        wire.plain,
        layout,
        context.replica.shapes,
        lambda samples: dgc.ratio_at(samples, epoch),
        None if context.is_server else velocity,
        dgc.sample,
    )


def make_pace(context: Context) -> StepTimeModel:
    """Return the model of this rank's step times."""
    options, index = context.options, context.number
    is_modelled = options.compute == "timed" or context.transport.models_time
    seconds = options.compute_time if is_modelled else None
    if seconds is not None and context.parts:
        seconds /= len(context.parts)  # a batch takes the same time, with a step for each part
    return StepTimeModel(
        seconds,
        options.slowdown.get(index, 1.0),
        options.jitter,
        seed=options.seed * 1_000_003 + index,
        forward=options.forward_share,
        backward=options.backward_shape,
    )


def make_server(
    context: Context,
    optimizer: Optimizer,
    wire: GradientCodec,
    lr: Callable[[int], float],
    kind: type[ParameterServer] = ParameterServer,
) -> ServerAlgorithm:
    """Return the algorithm's server role; ``lr`` is the learning rate as a function of samples."""
    code = implementation(context.algorithm)
    if code.server is None:
        raise ValueError(f"{context.algorithm.name} has no servers")
    options, replica = context.options, context.replica
    server = kind(
        context.among,
        context.layout,
        replica.parameters,
        wire,
        lr,
        len(optimizer.settings()),
        replica.sizes,
        context.projections,
        partial(scale_of, options.lr_scaling),
        None if code.arriving is None else code.arriving(wire, context.layout),
        context.transport,
        [] if context.lane is None else context.islands.workers(context.lane.number),
    )
    return code.server(server, optimizer, options)


@dataclass(frozen=True)
class Computing:
    """Parameters of a worker's computation, see :class:`Worker`."""

    compute: Compute
    pace: StepTimeModel
    may_clip: bool = False
    after_step: Callable[[SampleLease], None] = lambda lease: None
    on_empty: Callable[[SampleLease], None] = lambda lease: None


def make_island(context: Context, marks: bool) -> Island | None:
    """Return this rank's island; None if it is a worker by itself. See :class:`.Island`."""
    transport, ranks, whole = context.transport, context.island, context.whole
    if len(ranks) == 1:
        return None
    lanes = [lane for lane in context.lanes if isinstance(lane, PieceLane)]
    if not lanes:
        return Island(transport, ranks, len(ranks), whole, context.layout, context.leaders)
    x = context.replica.parameters
    return ReplicatedIsland(transport, ranks, lanes, whole, x, marks, context.leaders)


def make_worker(
    context: Context,
    optimizer: Optimizer,
    wire: GradientCodec,
    lr: Callable[[int], float],
    computing: Computing,
) -> TrainingWorker:
    """Return the algorithm's worker role; ``lr`` is the learning rate as a function of samples."""
    options, algorithm, transport = context.options, context.algorithm, context.transport
    marks, only_computes = marks_unused(algorithm, options), context.lane is None
    island = make_island(context, marks)
    is_first = island is None or island.is_first
    draws = SampleClient(transport, context.unit)
    if not is_first:
        draws = IslandSampleClient(transport, context.island[0], context.unit)
    worker = Worker(
        context.among,
        context.layout,
        context.replica,
        computing.compute,
        computing.pace,
        options.step_size,
        lr,
        Clipping(
            None if only_computes else options.clip,
            "own" if options.compression == "dgc" else algorithm.clips,
            computing.may_clip,
            options.wait_free and options.max_loss is None and not context.parts,
        ),
        algorithm.lockstep,
        options.max_loss,
        # Without a torch optimizer the rate is the schedule's, which rank 0 knows.
        lambda lr: lr * optimizer.rate if isinstance(optimizer, TorchOptimizer) else None,
        computing.after_step,
        computing.on_empty,
        transport,
        context.servers,
        island,
        draws,
        marks,
        steps_unused(algorithm, options),
        context.projections.apply if context.projections else None,
        partial(scale_of, options.lr_scaling),
    )
    if only_computes:
        return ComputingMember(worker, optimizer)
    return implementation(algorithm).worker(worker, optimizer, wire, options)
