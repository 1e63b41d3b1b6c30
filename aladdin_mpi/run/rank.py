"""One rank of a run, put together from its options."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aladdin_mpi.algorithms import registry
from aladdin_mpi.algorithms.registry import Algorithm
from aladdin_mpi.compression.codec import GradientCodec
from aladdin_mpi.compression.dgc import DeepGradientCompression
from aladdin_mpi.compression.wires import make_codec
from aladdin_mpi.config.options import RESUME_FIELDS, RunOptions, agreed, check_workers
from aladdin_mpi.control.budget import Ticket
from aladdin_mpi.control.exchange import (
    agree,
    allreduce_tensor,
    broadcast,
    broadcast_tensor,
    gather,
)
from aladdin_mpi.control.heartbeats import Heartbeats
from aladdin_mpi.data.sampler import Period
from aladdin_mpi.data.skipped import SkippedImages, SkipReports
from aladdin_mpi.errors import SUSPENDED_STATUS, UserError
from aladdin_mpi.model.layout import Bucket, Layout, cut
from aladdin_mpi.model.replica import PhantomReplica, Replica, outline
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.optimizers.from_torch import TorchOptimizer
from aladdin_mpi.optimizers.sgd import MomentumSGD
from aladdin_mpi.parameter_server.server import ParameterServer
from aladdin_mpi.parameter_server.server_role import Server
from aladdin_mpi.process import console, guard
from aladdin_mpi.roles.role import Role
from aladdin_mpi.roles.worker import Loss, Pace, Worker
from aladdin_mpi.run import run_folder, run_lock
from aladdin_mpi.run.checkpoint import CheckpointStore
from aladdin_mpi.run.coordinator import Coordinator, Plan
from aladdin_mpi.run.evaluation import Evaluate, Evaluator, Measurement, Snapshots
from aladdin_mpi.run.failures import Failures, settle
from aladdin_mpi.run.handshake import check_agreement
from aladdin_mpi.run.local_state import LocalState
from aladdin_mpi.run.origin import Origin, samples_of
from aladdin_mpi.run.own_figures import OwnFigures
from aladdin_mpi.run.own_optimizer import OwnOptimizer
from aladdin_mpi.run.progress import Progress
from aladdin_mpi.run.recorder import Metrics
from aladdin_mpi.run.report import not_written
from aladdin_mpi.run.resizing import Assembly, share, tell
from aladdin_mpi.run.run_lock import RunLock
from aladdin_mpi.run.schedule import LearningRate
from aladdin_mpi.run.seen_inputs import SeenInputs
from aladdin_mpi.run.segments import Segments
from aladdin_mpi.run.summary import summarise
from aladdin_mpi.run.suspension import Suspension
from aladdin_mpi.run.variance import ModelVariance, draw_places
from aladdin_mpi.transport.base import Transport

CHECKPOINT_SECONDS = 600.0
"""Between checkpoints, if nobody says otherwise."""


class Rank:
    """Worker or server, with its replica, its segments and, at rank 0, the coordinator.

    Args:
        module: on its device.
        epoch: samples of one epoch.
        data: facts about this rank's data, in which all must agree.
        optimizer: None: momentum SGD.
        schedule: factor of the learning rate by the samples drawn; None: as the options say.
        may_clip: see :class:`Worker`.
        state: of the user's loop, for checkpoints.
        skipped: where the data set notes images that it skips, if it does.
        origin: of the run; None: it begins.
        compute: see :class:`Worker`.
        evaluate: see :class:`Evaluator`; None: no evaluations. Unless it is a
            :class:`Measurement`, the module has batch norm's statistics estimated before.

    Raises:
        UserError, RefusedError: ranks disagree, or a folder cannot be used.
    """

    def __init__(
        self,
        transport: Transport,
        options: RunOptions,
        algorithm: Algorithm,
        module: nn.Module,
        epoch: int,
        data: Mapping[str, Any],
        compute: Callable[[Ticket], Loss],
        evaluate: Evaluate | None,
        optimizer: OwnOptimizer | None = None,
        schedule: Callable[[int], float] | None = None,
        may_clip: bool = False,
        state: dict[str, Any] | None = None,
        skipped: SkippedImages | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.transport = transport
        self.options = options
        self.algorithm = algorithm
        self.module = module
        servers = options.servers if algorithm.server else 0
        self.seen = self._seen(servers, evaluate)
        self.evaluate = self._evaluation(evaluate)
        self.replica = agree(transport, self._replica)
        self.layout = self._layout(servers, transport.size - servers)
        agree(transport, self._check)
        self._described = "sgd" if optimizer is None else optimizer.describe()
        check_agreement(transport, options, self.replica.shapes, data, servers, self._described)
        self.worker_count = transport.size - servers
        self.origin = origin or Origin(self.worker_count, servers)
        self.plan = _plan(options, epoch, self.origin, not transport.models_time)
        base = options.lr if optimizer is None else 1.0
        self.lr = LearningRate(options, self.worker_count, epoch, self.plan.total, base, schedule)
        self.run_dir = self._folder()
        self._share_model()
        self.local = LocalState(self.replica, transport.shares_process, state)
        self.optimizer = agree(transport, lambda: self._optimizer(optimizer))
        self.role = agree(transport, lambda: self._role(compute, may_clip))
        self.coordinator = self._coordinator() if transport.rank == 0 else None
        means = self.coordinator.own_figures if self.coordinator else None
        self.figures = OwnFigures(transport, means, lambda: self.segments.over)
        self.skips = SkipReports(
            transport, skipped, self.coordinator.skips if self.coordinator else None
        )
        self._watch()
        done = self.coordinator.evaluate_copy if self.coordinator else _nobody
        self.snapshots = Snapshots(transport, self.layout, self.role, self._holders, done)
        self.variance = self._variance()
        if self.coordinator is not None:
            self.coordinator.snapshots, self.coordinator.variance = self.snapshots, self.variance
        self._start()

    # -- parts ----------------------------------------------------------------
    def _seen(self, servers: int, evaluate: Evaluate | None) -> SeenInputs | None:
        if self.options.compute != "real" or isinstance(evaluate, Measurement):
            return None
        return SeenInputs(self.transport, self.module, servers, self.options.bn_batches)

    def _evaluation(self, evaluate: Evaluate | None) -> Evaluate | None:
        if evaluate is None or self.options.compute != "real":
            return None
        return evaluate if self.seen is None else self.seen.measured(evaluate)

    def _replica(self) -> Replica | PhantomReplica:
        if self.options.compute == "real":
            return Replica(self.module)
        numel = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
        return PhantomReplica(numel, outline(self.module))

    def _layout(self, servers: int, workers: int) -> Layout:
        options = self.options.model_copy(update={"servers": max(1, servers)})
        if self.algorithm.layout is not None:
            return self.algorithm.layout(self.replica, workers, options)
        return cut(
            self.replica.numel,
            servers,
            options.bucket_mb,
            options.shard_mb,
            options.sharding,
            self.replica.layers,
        )

    def _check(self) -> None:
        servers = self.layout.servers
        check_workers(self.options, self.transport.size - servers)
        owners = {bucket.server for bucket in self.layout.buckets}
        if servers and len(owners) < servers:
            layers = ", of which no layer is split" if self.options.sharding == "layer" else ""
            raise UserError(
                f"--servers: expected at most {len(owners)} for a model of "
                f"{self.replica.numel} parameters{layers}, got {servers}; use fewer"
            )

    def _folder(self) -> Path:
        options = self.options
        given = options.resume or options.run_dir
        name = str(given or Path("runs") / run_folder.default_name(options))
        folder = Path(broadcast(self.transport, name))
        self.lock = agree(self.transport, lambda: self._take(folder))
        agree(self.transport, lambda: run_folder.check_seen(folder))
        return folder

    def _take(self, folder: Path) -> RunLock | None:
        if self.transport.rank > 0:
            return None
        if self.options.resume is None:
            return run_folder.prepare(folder, self.options)
        return run_lock.take(folder)

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must have in common with the run that resumes it."""
        facts = agreed(self.options)
        option = {name: facts[name] for name in facts if name not in RESUME_FIELDS}
        return {"option": option, "optimizer": self._described}

    def _share_model(self) -> None:
        """Everyone begins with rank 0's parameters and buffers."""
        if self.options.compute != "real" or self.options.resume is not None:
            return
        for tensor in [self.replica.parameters, *self.replica.buffers()]:
            self._broadcast(tensor.view(-1) if tensor.dim() == 0 else tensor)

    def _watch(self) -> None:
        """Have rank 0 keep record of failures; what to do when training cannot go on."""
        if self.coordinator is not None:
            options = self.options
            needed = options.algorithm if self.algorithm.needs_all(options) else None
            coordinator = self.coordinator
            coordinator.failures = Failures(
                self.transport,
                coordinator.budget,
                self.layout.servers,
                needed,
                coordinator.moment,
                options.worker_timeout,
            )
        # It outlives this rank, so it must not hold it, with all its vectors.
        guard.remedy = partial(_remedy, self.run_dir)

    def _broadcast(self, tensor: Tensor, root: int = 0) -> None:
        staged = tensor.detach().cpu().contiguous()
        broadcast_tensor(self.transport, staged, root)
        if staged.data_ptr() != tensor.data_ptr():
            tensor.copy_(staged)

    def _holders(self, bucket: Bucket) -> range:
        return self.algorithm.holders(bucket, self.transport.size)

    def _optimizer(self, own: OwnOptimizer | None) -> Optimizer:
        options, x = self.options, self.replica.parameters
        if own is None:
            sgd = MomentumSGD(x, options.momentum, options.weight_decay, options.nesterov)
            if options.compression != "none" and options.dgc.clip is not None:
                sgd.clip = options.dgc.clip / sqrt(self.worker_count)
            return sgd
        optimizer = TorchOptimizer(own.given, self.module, x, own.scheduler)
        registry.check_optimizer(self.algorithm, options, optimizer)
        return optimizer

    def _role(self, compute: Callable[[Ticket], Loss], may_clip: bool) -> Role:
        algorithm, options, x = self.algorithm, self.options, self.replica.parameters
        optimizer = self.optimizer
        wire = self._codec(optimizer)
        self.server: ParameterServer | None = None
        if self.transport.rank < self.layout.servers:
            assert algorithm.server is not None
            notes = len(optimizer.settings())
            self.server = ParameterServer(self.transport, self.layout, x, wire, self.lr, notes)
            return algorithm.server(self.server, optimizer, options)
        self.worker = Worker(
            self.transport,
            self.layout,
            self.replica,
            self.local.computing(compute),
            self._pace(),
            options.step_size,
            self.lr,
            options.wait_free,
            algorithm.lockstep,
            options.max_loss,
            options.clip,
            "own" if options.compression != "none" else algorithm.clips,
            may_clip,
        )
        self.worker.after_step = self._advance
        if isinstance(optimizer, TorchOptimizer):
            self.worker.rate = self.rate
        return algorithm.worker(self.worker, optimizer, wire, options)

    def _advance(self) -> None:
        """A step is complete.

        The schedule goes by the samples that all have drawn: as far as it would in one process,
        and no further with a fast worker. Where the run is so many steps, those are its steps.
        """
        ticket = self.worker.ticket
        self.optimizer.advance((ticket.start + ticket.whole) // self.plan.schedule_step)
        self.skips.pass_on()

    def rate(self) -> float:
        """The learning rate of a worker's present step; that of the first group."""
        return self.worker.lr * self.optimizer.rate

    def _codec(self, optimizer: Optimizer) -> GradientCodec:
        """How gradients are written for the wire."""
        options, x = self.options, self.replica.parameters
        moves_bytes = self.transport.needs_memory
        wire = make_codec(self.algorithm.wire(options), self.layout, x.device, moves_bytes)
        if options.compression == "none":
            return wire
        dgc, epoch = options.dgc, self.plan.epoch
        velocity = optimizer.velocity if isinstance(optimizer, MomentumSGD) else None
        return DeepGradientCompression(
            wire.plain,
            self.layout,
            self.replica.shapes,
            lambda samples: dgc.ratio_at(samples, epoch),
            velocity if self.transport.rank >= self.layout.servers else None,
            dgc.sample,
        )

    def _pace(self) -> Pace:
        options = self.options
        index = self.transport.rank - self.layout.servers
        modelled = options.compute == "timed" or self.transport.models_time
        return Pace(
            options.compute_time if modelled else None,
            options.slowdown.get(index, 1.0),
            options.jitter,
            seed=options.seed * 1_000_003 + index,
        )

    def _coordinator(self) -> Coordinator:
        workers = self.worker_count
        lockstep = workers if self.algorithm.lockstep else 0
        return Coordinator(self.transport, self.plan, self.lr, workers, self.server, lockstep)

    def _variance(self) -> ModelVariance:
        sizes = [prod(shape) for shape in self.replica.shapes]
        return ModelVariance(
            self.transport,
            self.layout,
            self.role,
            draw_places(sizes, self.options.seed),
            self.algorithm.lockstep,
            self.coordinator.take_variance if self.coordinator else _nobody_asks,
        )

    # -- start and end -----------------------------------------------------------
    def _start(self) -> None:
        """Seed, restore, and open the books."""
        self.local.seed(self.options.seed * 1_000_003 + self.transport.rank + 1)
        self.segments = Segments(
            self.transport,
            self.role,
            self.coordinator,
            self.local,
            CheckpointStore(self.run_dir),
            self._identity(),
            self.plan.total,
            self._settle,
        )
        if self.options.resume is not None:
            self._go_on()
        self.segments.manifest = self.origin.as_json(self.plan.schedule_step)
        self.suspension = Suspension(self.transport, self.coordinator)
        self.heartbeats = Heartbeats(self.transport, self.options.worker_timeout)
        if self.coordinator is not None:
            if self.options.resume is not None and not self.coordinator.budget.used_up:
                run_folder.reopen(self.run_dir, self.options)
            self._open_books(self.coordinator)
            texts = [self.role.describe(), self._prospects(), not_written()]
            if (text := "\n".join(filter(None, texts))) and not self.options.quiet:
                console.say(text, sys.stdout)
        if self.seen is not None:
            self.seen.open()

    def _go_on(self) -> None:
        """From the last checkpoint."""
        before = self.origin.workers, self.origin.servers
        if self.options.allow_resize and before != (self.worker_count, self.layout.servers):
            with self.segments.uncounted():
                self._resize()
            return
        state = agree(self.transport, lambda: self.segments.load(self.options.allow_resize))
        self.segments.restore(state)
        with self.segments.uncounted():
            self._revive(state is None)

    def _resize(self) -> None:
        """From a checkpoint of other numbers of workers and servers."""
        transport, origin, store = self.transport, self.origin, CheckpointStore(self.run_dir)
        first = transport.rank == 0
        state = agree(transport, lambda: self.segments.load(resizes=True) if first else None)
        layout = self._layout(origin.servers, origin.workers)
        parts = Assembly(store, self.algorithm, self.options, origin, layout, self.replica)
        former = agree(transport, lambda: parts.former(self.worker_count) if first else None)
        former = share(transport, former)
        self.segments.resize(state, former)
        agree(transport, lambda: self._take_local(store))
        taken = (None if each is None else int(each["samples"]) for each in former.counts)
        past = (*origin.past, Period(tuple(taken)))
        self.origin = Origin(self.worker_count, self.layout.servers, past, origin.schedule_step)
        if first and not self.options.quiet:
            tell(self.algorithm, origin, self.origin, self.lr)

    def _take_local(self, store: CheckpointStore) -> None:
        """What the former worker of this number had of its own; a new one has buffers alone."""
        worker = self.transport.rank - self.layout.servers
        if worker < 0:
            return
        own = worker < self.origin.workers
        part = store.part(self.origin.servers + (worker if own else 0))
        if part is not None and own:
            self.local.load_state_dict(part["local"])
        elif part is not None:
            self.local.share_buffers(part["local"])

    def _prospects(self) -> str:
        """What becomes of the run if a worker dies, where something can be done."""
        if self.transport.models_time or not self.transport.survives:
            return ""
        if self.algorithm.needs_all(self.options):
            return f"ULFM: is there, but {self.options.algorithm} needs every worker"
        return "ULFM: if workers die the others go on"

    def _settle(self) -> None:
        failures = self.coordinator.failures if self.coordinator else None
        settle(self.transport, self.role, self.layout.servers, failures)

    def _revive(self, is_new: bool) -> None:
        """Give the global model to workers that had failed when the checkpoint was written."""
        new = broadcast(self.transport, gather(self.transport, is_new))
        common = broadcast(self.transport, self.role.common())
        if is_new:
            self.role.join(common)
        if not any(new) or self.options.compute != "real":
            return
        mine = self.replica.parameters.clone()
        self._final_model(without=[rank for rank, was_lost in enumerate(new) if was_lost])
        if not is_new:
            self.replica.parameters.copy_(mine)

    def _open_books(self, coordinator: Coordinator) -> None:
        drawn = coordinator.budget.drawn
        self.skips.open()
        # Before what follows, which takes seconds.
        coordinator.progress = Progress(
            self.plan.total,
            drawn,
            coordinator.seconds,
            coordinator.state,
            self.options.progress,
            self.options.quiet,
        )
        coordinator.metrics = Metrics(self.run_dir, drawn)
        coordinator.make_up_for_evaluation()
        if self.evaluate is not None:
            coordinator.evaluator = Evaluator(
                self.module, self._measured, coordinator.evaluated, not self.transport.models_time
            )

    def _measured(self, module: nn.Module) -> Mapping[str, float]:
        assert self.evaluate is not None
        figures = self.evaluate(module)
        self.skips.pass_on()  # rank 0 reads images too
        return figures

    def suspend(self) -> None:
        """A signal has ended the run, which is saved: close the books and go."""
        self.suspension.close()
        if self.coordinator is not None:
            assert self.coordinator.metrics is not None and self.coordinator.progress is not None
            self.coordinator.progress.close(self.coordinator.budget.drawn, self.coordinator.seconds)
            self.coordinator.metrics.close()
            name = signal.Signals(self.segments.suspended).name
            console.say(
                f"aladdin_mpi: stopped by {name} at sample {self.coordinator.budget.drawn} of "
                f"{self.plan.total}; resume with: --resume {self.run_dir}"
            )
        self.heartbeats.close()
        self.role.close()
        self._release()
        self.transport.close(SUSPENDED_STATUS)

    @property
    def evaluating(self) -> bool:
        """Whether an evaluation goes on in a thread of its own."""
        evaluator = self.coordinator.evaluator if self.coordinator else None
        return evaluator is not None and evaluator.busy

    def finish(self) -> dict[str, Any]:
        """Complete the model everywhere, measure it, write the books; the summary at rank 0."""
        self.suspension.close()
        waiting = self.transport.traffic.waiting  # what follows is not training
        if isinstance(self.role, Server):
            self.role.finish()
        variance = self.variance.at_end() if self.options.compute == "real" else None
        model = self._final_model()
        if self.seen is not None:
            self.seen.complete()
            self._take_buffers_of(self.layout.servers)
        summary = summarise(self, model, waiting, variance)
        if self.seen is not None:
            self._take_buffers_of(0)
        self.heartbeats.close()
        self.role.close()
        self._release()
        return summary

    def _take_buffers_of(self, source: int) -> None:
        """Everybody's module gets those of a rank, or of the next one that lives."""
        living = [rank for rank in self.transport.living if rank >= source]
        for buffer in self.module.buffers():
            self._broadcast(buffer.view(-1) if buffer.dim() == 0 else buffer, living[0])

    def _release(self) -> None:
        if self.lock is not None:
            self.lock.release()

    def _final_model(self, without: Sequence[int] = ()) -> Tensor | None:
        """The global model, flat, at every rank; also put into the replica.

        The ranks ``without`` hold nothing of it.
        """
        if self.options.compute != "real":
            return None
        vector = torch.zeros(self.replica.numel)
        for bucket in self.layout.buckets:
            holders = self._holders(bucket)
            mine, weight = vector[bucket.part], 0.0
            if self.transport.rank in holders and self.transport.rank not in without:
                mine.copy_(self.role.part(bucket))
                weight = self.role.weight(bucket)
            if len(holders) == 1:
                self._broadcast(mine, holders[0])
            else:
                self._average(mine, weight)
        assert isinstance(self.replica, Replica)
        self.replica.set(vector)
        return vector

    def _average(self, values: Tensor, weight: float) -> None:
        """The weighted mean over all ranks that live."""
        weights = torch.tensor([weight], dtype=torch.float64)
        values.mul_(weights.item())
        allreduce_tensor(self.transport, weights)
        allreduce_tensor(self.transport, values)
        values.div_(weights.item())


def _plan(options: RunOptions, epoch: int, origin: Origin, over_mpi: bool) -> Plan:
    total = samples_of(options, epoch, origin.first_workers)
    assert total is not None
    step = options.step_size * origin.first_workers
    every = options.checkpoint_every
    by_samples = by_seconds = 0.0
    if every is None and over_mpi:
        by_seconds = CHECKPOINT_SECONDS
    if every is not None:
        by_samples = every.samples or (every.epochs or 0) * epoch
        by_seconds = every.seconds or 0.0
    return Plan(
        total=total,
        epoch=epoch,
        step=step,
        schedule_step=origin.schedule_step
        or (options.step_size if options.steps is None else step),
        log_every=options.log_every or epoch,
        eval_every=round(options.eval_every * epoch),
        checkpoint_every=round(by_samples),
        checkpoint_seconds=by_seconds,
    )


def _nobody(vector: Tensor) -> None:
    """Only rank 0 asks for copies."""


def _nobody_asks(samples: int, variance: float | None) -> None:
    """Nor does anybody else ask for the variance."""


def _remedy(run_dir: Path) -> str:
    if CheckpointStore(run_dir).exists:
        return f"resume with: --resume {run_dir}"
    return f"it has no checkpoint yet: start it again with --overwrite --run-dir {run_dir}"
