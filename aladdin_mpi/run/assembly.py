"""Assembly of a rank from its options and the user's inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.control.exchange import all_or_none
from aladdin_mpi.control.heartbeats import Heartbeats
from aladdin_mpi.control.tags import COORDINATOR
from aladdin_mpi.data.images import SkippedImages
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.exchange.server_replica import ServerReplica, StoredReplicas
from aladdin_mpi.flat.replica import Projection
from aladdin_mpi.hooks.checkpoints import Checkpoints, CheckpointStore
from aladdin_mpi.hooks.evaluation import Evaluations
from aladdin_mpi.hooks.island_evaluation import IslandEvaluations
from aladdin_mpi.hooks.measurement import Evaluate
from aladdin_mpi.hooks.quorum import Quorum
from aladdin_mpi.hooks.recorder import Metrics
from aladdin_mpi.hooks.skip_reports import SkipReports
from aladdin_mpi.hooks.standby import Standby
from aladdin_mpi.hooks.suspension import Suspension
from aladdin_mpi.hooks.training_log import TrainingLog
from aladdin_mpi.hooks.user_metrics import UserMetrics
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.optimizers.sgd import LearningRate
from aladdin_mpi.options.algorithms import Algorithm
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.process import console, guard
from aladdin_mpi.process.files import shown
from aladdin_mpi.run import run_folder
from aladdin_mpi.run.handover import Handover
from aladdin_mpi.run.handshake import check_agreement
from aladdin_mpi.run.rank import Rank
from aladdin_mpi.run.report import not_written
from aladdin_mpi.run.run_folder import OpenFolder
from aladdin_mpi.run.takeover import Takeover, print_takeover, take_over
from aladdin_mpi.session.building import (
    Computing,
    make_optimizer,
    make_pace,
    make_server,
    make_wire,
    make_worker,
)
from aladdin_mpi.session.context import Context, make_context, share_model
from aladdin_mpi.session.coordinator import Coordinator, RunHook
from aladdin_mpi.session.islands import fail_together
from aladdin_mpi.session.plan import Origin, Plan, make_plan
from aladdin_mpi.session.session import LocalState, Session
from aladdin_mpi.session.user_optimizer import UserOptimizer
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.worker.role import Role
from aladdin_mpi.worker.step import Loss


@dataclass(frozen=True)
class UserTask:
    """The user's inputs of a rank.

    Attributes:
        epoch: samples of one epoch.
        data: facts about this rank's data, in which all must agree.
        compute: see :class:`Worker`; ``on_empty`` and ``may_clip`` likewise.
        may_draw: whether computing may draw random numbers.
        evaluate: see :class:`.Evaluations`.
        optimizer: the user's; None for momentum SGD.
        schedule: factor of the learning rate by samples drawn; None for the options' schedule.
        state: of the user's loop, for checkpoints.
        skipped: the dataset's record of skipped images, if it skips any.
        origin: of the run.
        project: projections that the script applies to parameters after each step.
        uncut: samples of a batch, if none may be cut; 0: the last ones of a segment may be.
        parts: names of the submodules that each batch steps one after another.
        is_sized: whether the data have a length, which a resumed run must keep.
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
    uncut: int = 0
    parts: Sequence[str] = ()
    is_sized: bool = True


def assemble(
    transport: Transport,
    options: RunOptions,
    algorithm: Algorithm,
    module: nn.Module,
    task: UserTask,
    takeover: Takeover | None = None,
    others: Sequence[RunHook] = (),
) -> Rank:
    """Build a rank, from its checkpoint if the run is resumed. Every rank calls it.

    All ranks must take these steps in the same order. ``module`` is on its device. With
    ``takeover``, the run continues from the state of a former group of ranks. ``others`` are hooks
    of the caller.

    Raises:
        UserError, RefusedError: ranks disagree, or a folder cannot be used.
    """
    numbers = () if takeover is None else takeover.numbers
    context = make_context(
        transport, options, algorithm, module, numbers, task.project, task.parts, task.uncut
    )
    if takeover is None:
        state = ""
        if task.optimizer is not None and options.resume is None and algorithm.holder == "first":
            state = task.optimizer.describe_state()  # all ranks make the same steps
        model, servers = context.whole.describe(), context.servers
        check_agreement(transport, options, model, task.data, servers, _described(task), state)
    plan = make_plan(options, task.epoch, task.origin, not transport.models_time, task.uncut)
    base = options.lr if task.optimizer is None else 1.0
    lr = LearningRate(options, context.workers, task.epoch, plan.total, base, task.schedule)
    if takeover is None:
        folder = run_folder.open_for(transport, options)
        share_model(context)
    else:
        folder = takeover.open_folder(transport)
    # The next group needs a former one's lock again, if a failure ends the set-up of this one.
    is_kept = takeover is not None and takeover.locked_folder is folder
    with nullcontext() if is_kept else _on_error(folder.release):
        return _assemble_in(folder, context, task, plan, lr, takeover, others)


def _described(task: UserTask) -> str:
    described = "sgd" if task.optimizer is None else task.optimizer.describe()
    described += ", projected" if task.project else ""
    return f"{described}, parts {', '.join(task.parts)}" if task.parts else described


def _assemble_in(
    folder: OpenFolder,
    context: Context,
    task: UserTask,
    plan: Plan,
    lr: LearningRate,
    takeover: Takeover | None,
    others: Sequence[RunHook],
) -> Rank:
    """Build a rank in the run's folder."""
    transport, options = context.transport, context.options
    local = LocalState(context, task.state)
    steps = plan.total // plan.schedule_step if takeover is None else None
    optimizer = all_or_none(transport, lambda: make_optimizer(context, task.optimizer, steps))
    skips = SkipReports(transport, task.skipped)
    with ExitStack() as undo:

        def make_role() -> Role:
            role = _role(context, task, plan, lr, local, optimizer, skips)
            undo.callback(role.close)  # also if another rank cannot make its role, or fails
            return role

        role = all_or_none(transport, make_role)
        # The remedy outlives this rank, so it must not hold a reference to it and its vectors.
        guard.remedy = partial(_remedy, folder.path)
        first = transport.rank == 0
        metrics = Metrics(folder.path) if first else None
        log = None
        if metrics is not None:
            log = TrainingLog(metrics, plan, options.progress, options.quiet, takeover is not None)
        mates = [] if context.servers else context.islands.mates(COORDINATOR)
        user_metrics, standby = UserMetrics(transport), Standby(transport, mates)
        kind = IslandEvaluations if context.is_sharded else Evaluations
        evaluations = kind(context, plan, role, metrics, task.evaluate, skips.pass_on)
        checkpoints = Checkpoints(
            context, plan, _described(task), plan.epoch if task.is_sized else None, folder.path
        )
        hooks: list[RunHook] = [skips, user_metrics]
        hooks += [log] if log is not None else []
        if context.is_sharded:  # an evaluation that fails must not cost the segment before it
            hooks += [standby, checkpoints, evaluations]
        else:
            hooks += [evaluations, standby, checkpoints]
        hooks += [Suspension(transport), Quorum(transport, options.min_workers), *others]
        if first and not transport.models_time:
            hooks.append(Handover(folder.path))
        rate = _rate_of(lr, optimizer)
        coordinator = Coordinator(context, role, plan, rate, hooks) if first else None
        session = Session(context, plan, role, local, coordinator, hooks, task.origin)
        if takeover is None:
            local.seed(_own_seed(options.seed, transport.rank))
            if options.resume is not None:
                checkpoints.resume(session, lr)
        else:
            if takeover.mine is None:  # a spare rank, or one of another job
                number = takeover.plan.members.number
                local.seed(_own_seed(options.seed, takeover.base.rank, number))
            take_over(session, takeover)
        fail_together(transport, context.islands)  # after others have noted the failure itself
        group = 1 if takeover is None else takeover.plan.members.number
        claim = partial(run_folder.claim, folder.path, group)
        heartbeats = Heartbeats(transport, options.worker_timeout, claim)
        if coordinator is not None:
            _begin(context, role, coordinator, folder.path, takeover)
        replicas = _replicas(context, role)
        parts = evaluations, user_metrics, skips, standby, log, replicas
        undo.pop_all()
        return Rank(session, folder, optimizer, heartbeats, *parts)


def _own_seed(seed: int, rank: int, group: int = 1) -> int:
    """Return a rank's initial random state, which differs from all others' of the run."""
    return seed * 1_000_003 + (group - 1) * 10_007 + rank + 1


def _rate_of(lr: LearningRate, optimizer: Optimizer) -> Callable[[int], float]:
    """Return the learning rate as a function of samples, including the optimizer's own."""
    return lambda samples: lr(samples) * optimizer.rate


@contextmanager
def _on_error(undo: Callable[[], None]) -> Iterator[None]:
    """Call ``undo`` on an error, so that others can use the rank's folder."""
    try:
        yield
    except BaseException:
        undo()
        raise


def _replicas(context: Context, role: Role) -> StoredReplicas | None:
    """Replicate the servers' states, if the run can survive the failure of a server."""
    transport, every = context.transport, context.options.replicate_every
    can_replace = context.islands.size == 1 and transport.is_revoked(without=0)
    if not every or not context.servers or not can_replace:
        return None
    if isinstance(role, ServerAlgorithm) and (
        context.algorithm.has_centre or role.optimizer is not None
    ):
        ServerReplica(transport, role, context.servers, every)
    return StoredReplicas(transport, context.servers)


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
        """Project the parameters after a step, and advance the schedule after a batch.

        The schedule follows the samples drawn by all workers, as in one process, so that a fast
        worker does not advance it further. With ``--steps`` it follows the steps of the run.
        """
        if role.worker.ends_batch:
            optimizer.advance((lease.start + lease.whole) // plan.schedule_step)
        if context.projections:
            with context.transport.atomic():
                role.project()
        skips.pass_on()

    compute = local.computing(task.compute) if task.may_draw else task.compute
    computing = Computing(compute, make_pace(context), task.may_clip, advance, task.on_empty)
    role = make_worker(context, optimizer, wire, lr, computing)
    return role


def _begin(
    context: Context,
    role: Role,
    coordinator: Coordinator,
    folder: Path,
    takeover: Takeover | None,
) -> None:
    """Begin or resume the run at rank 0, and print its set-up."""
    if takeover is None and context.options.resume is not None and not coordinator.budget.used_up:
        run_folder.reopen(folder, context.options)
    coordinator.begin()
    if context.options.quiet:
        return
    if takeover is not None:
        print_takeover(context, takeover)
        return
    texts = [role.describe(), _fault_tolerance(context), not_written()]
    if text := "\n".join(filter(None, texts)):
        console.say(text, sys.stdout)


def _fault_tolerance(context: Context) -> str:
    """Describe the effect of a rank's failure if MPI has ULFM; else return an empty string."""
    if context.transport.models_time or not context.transport.survives:
        return ""
    if context.transport.is_revoked(without=0):
        return "ULFM: if ranks fail, the surviving ranks continue"
    if context.needs_all is not None:
        return f"ULFM: available, but {context.needs_all} needs every worker"
    return "ULFM: if workers fail, the surviving ranks continue"


def _remedy(run_dir: Path) -> str:
    if CheckpointStore(run_dir).exists:
        return f"resume with: --resume {shown(run_dir)}"
    return f"no checkpoint exists yet: restart with --overwrite --run-dir {shown(run_dir)}"
