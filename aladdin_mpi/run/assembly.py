"""How a rank is put together, from its options and what the user brings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.control.exchange import all_or_none
from aladdin_mpi.control.heartbeats import Heartbeats
from aladdin_mpi.data.images import SkippedImages, SkipRecord, SkipReports
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.exchange.server_replica import ServerReplica, StoredReplicas
from aladdin_mpi.flat.replica import Projection
from aladdin_mpi.flat.vectors import full
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.options.algorithms import Algorithm
from aladdin_mpi.options.run import RESUME_FIELDS, RunOptions, agreed
from aladdin_mpi.process import console, guard
from aladdin_mpi.run import run_folder
from aladdin_mpi.run.building import (
    Computing,
    make_optimizer,
    make_pace,
    make_server,
    make_wire,
    make_worker,
)
from aladdin_mpi.run.checkpoint import CheckpointStore, LocalState
from aladdin_mpi.run.context import Context, make_context, server_count, share_model
from aladdin_mpi.run.coordinator import Coordinator, StandbyCoordinator
from aladdin_mpi.run.divided_evaluation import DividedEvaluation, is_divided
from aladdin_mpi.run.evaluation import Snapshots
from aladdin_mpi.run.failures import record_losses
from aladdin_mpi.run.handshake import check_agreement
from aladdin_mpi.run.measurement import BatchNormRecalibrator, Evaluate, Measurement
from aladdin_mpi.run.plan import Origin, Plan, make_plan
from aladdin_mpi.run.rank import Measuring, Rank
from aladdin_mpi.run.report import not_written
from aladdin_mpi.run.reporter import RunReporter, make_coordinator, open_books
from aladdin_mpi.run.resumption import Resumption, go_on
from aladdin_mpi.run.segments import Segments, Suspension
from aladdin_mpi.run.takeover import Takeover, take_over, tell
from aladdin_mpi.run.user_metrics import UserMetrics
from aladdin_mpi.run.user_optimizer import LearningRate, UserOptimizer
from aladdin_mpi.run.variance import ModelVariance, draw_places
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.worker.role import Role
from aladdin_mpi.worker.step import Loss


@dataclass(frozen=True)
class UserTask:
    """What the user's side brings to a rank.

    Attributes:
        epoch: samples of one epoch.
        data: facts about this rank's data, in which all must agree.
        compute: see :class:`Worker`; ``on_empty`` and ``may_clip`` likewise.
        may_draw: whether computing may draw random numbers.
        evaluate: see :class:`.Evaluator`; None: no evaluations. Unless it is a
            :class:`Measurement`, the module has batch norm's statistics estimated before.
        optimizer: None: momentum SGD.
        schedule: factor of the learning rate by the samples drawn; None: as the options say.
        state: of the user's loop, for checkpoints.
        skipped: where the data set notes images that it skips, if it does.
        origin: of the run.
        project: what the script applies to parameters after each step.
        whole: samples in whose multiples segments of the run end.
    """

    epoch: int
    data: Mapping[str, Any]
    compute: Callable[[SampleLease], Loss]
    on_empty: Callable[[SampleLease], None]
    evaluate: Evaluate | None
    optimizer: UserOptimizer | None
    schedule: Callable[[int], float] | None
    may_clip: bool
    may_draw: bool
    state: dict[str, Any]
    skipped: SkippedImages | None
    origin: Origin
    project: Sequence[Projection] = ()
    whole: int = 1


def assemble(
    transport: Transport,
    options: RunOptions,
    algorithm: Algorithm,
    module: nn.Module,
    task: UserTask,
    takeover: Takeover | None = None,
) -> Rank:
    """Put a rank together, from its checkpoint where the run goes on. Every rank calls it.

    The order is that of what the ranks agree on, one after another. ``module`` is on its device.
    With ``takeover`` the run goes on from what a former group of ranks has left.

    Raises:
        UserError, RefusedError: ranks disagree, or a folder cannot be used.
    """
    seen = _seen(transport, options, algorithm, module, task.evaluate)
    context = make_context(
        transport,
        options,
        algorithm,
        module,
        () if takeover is None else takeover.numbers,
        task.project,
    )
    described = "sgd" if task.optimizer is None else task.optimizer.describe()
    if task.project:
        described += f"; projections: {len(task.project)}"
    parameters, servers = context.replica.describe(), context.servers
    if takeover is None:
        state = _initial_state(task.optimizer, options, algorithm)
        check_agreement(transport, options, parameters, task.data, servers, described, state)
    plan = make_plan(options, task.epoch, task.origin, not transport.models_time, task.whole)
    base = options.lr if task.optimizer is None else 1.0
    lr = LearningRate(options, context.workers, task.epoch, plan.total, base, task.schedule)
    if takeover is None:
        folder = run_folder.open_for(transport, options)
        share_model(context)
    else:
        folder = takeover.open_folder(transport)
    with _on_error(folder.release):
        local = LocalState(context.replica, transport.shares_process, task.state)
        steps = plan.total // plan.schedule_step if takeover is None else None
        optimizer = all_or_none(transport, lambda: make_optimizer(context, task.optimizer, steps))
        record = SkipRecord()
        skips = SkipReports(transport, task.skipped, record if transport.rank == 0 else None)
        role = all_or_none(
            transport, lambda: _role(context, task, plan, lr, local, optimizer, skips)
        )
        with _on_error(role.close):
            coordinator = None
            if transport.rank == 0:
                coordinator = make_coordinator(context, role, plan, lr, record)
            # It outlives this rank, so it must not hold it, with all its vectors.
            guard.remedy = partial(_remedy, folder.path)
            measuring = _measuring(context, role, seen, task.evaluate, skips)
            if takeover is None:
                local.seed(options.seed * 1_000_003 + transport.rank + 1)
            store = CheckpointStore(folder.path)
            segments = _segments(
                context, role, coordinator, local, store, plan, task.origin, described
            )
            means = coordinator.own_figures if coordinator else None
            figures = UserMetrics(transport, means, lambda: segments.over)
            if takeover is not None:
                take_over(context, local, segments, takeover)
            elif options.resume is not None:
                go_on(Resumption(context, role, local, segments, store, task.origin, lr))
            suspension = Suspension(transport, coordinator)
            heartbeats = Heartbeats(transport, options.worker_timeout)
            standby = StandbyCoordinator(transport, coordinator.knowledge if coordinator else None)
            books = None
            if coordinator is not None:
                coordinator.on_report(standby.hear)
                coordinator.on_open(standby.send)
                transport.on_failure(lambda rank: standby.send())
                books = _open(context, role, coordinator, folder.path, skips, measuring, takeover)
                standby.send()
            if seen is not None:
                seen.open()
            return Rank(
                context,
                plan,
                folder,
                optimizer,
                role,
                skips,
                figures,
                measuring,
                segments,
                suspension,
                heartbeats,
                standby,
                _mirrors(context, role),
                books,
            )


def _initial_state(
    optimizer: UserOptimizer | None, options: RunOptions, algorithm: Algorithm
) -> str:
    """Describe the state that the optimizers of all ranks need, if they make the same steps."""
    if optimizer is None or options.resume is not None or algorithm.holder != "first":
        return ""
    return optimizer.describe_state()


@contextmanager
def _on_error(undo: Callable[[], None]) -> Iterator[None]:
    """If a rank cannot be put together, others may use its module and its folder."""
    try:
        yield
    except BaseException:
        undo()
        raise


def _mirrors(context: Context, role: Role) -> StoredReplicas | None:
    """Have servers' states kept a second time, where one of them may be lost."""
    transport, every = context.transport, context.options.mirror_every
    if not every or not context.servers or not transport.is_revoked(without=0):
        return None
    if isinstance(role, ServerAlgorithm) and (
        context.algorithm.has_centre or role.optimizer is not None
    ):
        ServerReplica(transport, role, context.servers, every)
    return StoredReplicas(transport, context.servers)


def _seen(
    transport: Transport,
    options: RunOptions,
    algorithm: Algorithm,
    module: nn.Module,
    evaluate: Evaluate | None,
) -> BatchNormRecalibrator | None:
    if options.compute != "real" or isinstance(evaluate, Measurement):
        return None
    return BatchNormRecalibrator(
        transport, module, server_count(options, algorithm), options.bn_batches
    )


def _role(
    context: Context,
    task: UserTask,
    plan: Plan,
    lr: LearningRate,
    local: LocalState,
    optimizer: Optimizer,
    skips: SkipReports,
) -> Role:
    wire = make_wire(context, optimizer, plan.epoch)
    if context.is_server:
        return make_server(context, optimizer, wire, lr)

    def advance(lease: SampleLease) -> None:
        """A step is complete.

        The schedule goes by the samples that all have drawn: as far as it would in one process,
        and no further with a fast worker. Where the run is so many steps, those are its steps.
        """
        optimizer.advance((lease.start + lease.whole) // plan.schedule_step)
        if context.projections:
            with context.transport.atomic():
                role.worker.project(role.own_model)
        skips.pass_on()

    compute = local.computing(task.compute) if task.may_draw else task.compute
    pace = make_pace(context)
    computing = Computing(compute, pace, task.may_clip, advance, task.on_empty)
    role = make_worker(context, optimizer, wire, lr, computing)
    return role


def _measuring(
    context: Context,
    role: Role,
    seen: BatchNormRecalibrator | None,
    evaluate: Evaluate | None,
    skips: SkipReports,
) -> Measuring:
    if not context.is_real:
        evaluate = None
    elif evaluate is not None and seen is not None:
        evaluate = seen.measured(evaluate)
    transport, layout = context.transport, context.layout
    dtype = full(context.replica.parameters.dtype)
    snapshots = Snapshots(transport, layout, role, context.holders, dtype, context.projections)
    sizes = tuple(prod(shape) for shape in context.replica.shapes)
    places = draw_places(sizes, context.options.seed)
    variance = ModelVariance(
        transport, layout, role, places, context.leaders, context.algorithm.lockstep
    )
    divided = None
    if isinstance(evaluate, Measurement) and is_divided(context, evaluate):
        divided = DividedEvaluation(context, evaluate, skips.pass_on)
    return Measuring(seen, evaluate, divided, snapshots, variance)


def _segments(
    context: Context,
    role: Role,
    coordinator: Coordinator | None,
    local: LocalState,
    store: CheckpointStore,
    plan: Plan,
    origin: Origin,
    optimizer: str,
) -> Segments:
    """What a checkpoint must have in common with the run that resumes it goes into it."""
    facts = agreed(context.options)
    option = {name: facts[name] for name in facts if name not in RESUME_FIELDS}
    failures = coordinator.failures if coordinator else None
    return Segments(
        context.transport,
        role,
        coordinator,
        local,
        store,
        {"option": option, "optimizer": optimizer},
        plan,
        origin,
        lambda: record_losses(context.transport, role, context.servers, failures),
    )


def _open(
    context: Context,
    role: Role,
    coordinator: Coordinator,
    folder: Path,
    skips: SkipReports,
    measuring: Measuring,
    takeover: Takeover | None,
) -> RunReporter:
    """The books of a run that begins or goes on; the user is told how it was set up."""
    if takeover is None and context.options.resume is not None and not coordinator.budget.used_up:
        run_folder.reopen(folder, context.options)
    books = open_books(
        context,
        coordinator,
        folder,
        skips,
        measuring.evaluate,
        measuring.divided,
        measuring.snapshots,
        measuring.variance,
        keeps_all=takeover is not None,
    )
    if takeover is not None:
        if not context.options.quiet:
            tell(context, takeover)
        return books
    texts = [role.describe(), _prospects(context), not_written()]
    if (text := "\n".join(filter(None, texts))) and not context.options.quiet:
        console.say(text, sys.stdout)
    return books


def _prospects(context: Context) -> str:
    """What becomes of the run if a worker dies, where something can be done."""
    if context.transport.models_time or not context.transport.survives:
        return ""
    if context.transport.is_revoked(without=0):
        return "ULFM: if ranks die the others go on"
    if context.needs_all is not None:
        return f"ULFM: is there, but {context.needs_all} needs every worker"
    return "ULFM: if workers die the others go on"


def _remedy(run_dir: Path) -> str:
    if CheckpointStore(run_dir).exists:
        return f"resume with: --resume {run_dir}"
    return f"it has no checkpoint yet: start it again with --overwrite --run-dir {run_dir}"
