"""The public interface: data parallelism for custom training loops."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from aladdin_mpi.accelerator import configure
from aladdin_mpi.algorithms.registry import implementation
from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.control.exchange import all_or_none
from aladdin_mpi.control.refusals import Reason, Refusal, report
from aladdin_mpi.control.tags import SEALED
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.parts import uncompiled
from aladdin_mpi.flat.replica import Projection
from aladdin_mpi.flat.shards import is_sharded
from aladdin_mpi.flat.vectors import check_module
from aladdin_mpi.hooks.checkpoints import find_origin
from aladdin_mpi.hooks.measurement import Evaluate, Measurement
from aladdin_mpi.hooks.user_metrics import EVALUATED, numbers_of
from aladdin_mpi.options.algorithms import Algorithm
from aladdin_mpi.options.checks import checked_algorithm
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.process import console, guard, heap
from aladdin_mpi.run.api_options import (
    agreed_options,
    check_default_device,
    check_given,
    check_memory_format,
    check_parts,
    for_one_process,
    naming_arguments,
    overridden,
    simulated_options,
)
from aladdin_mpi.run.assembly import UserTask, assemble
from aladdin_mpi.run.elastic_runner import ElasticRunner
from aladdin_mpi.run.ending import Ending, end_other_run
from aladdin_mpi.run.handshake import with_bucket_size
from aladdin_mpi.run.job import TIMEOUT, check_launched, choose_device, start_mpi
from aladdin_mpi.run.loop import Loop, LoopWatch
from aladdin_mpi.run.placement import bind_to_near, print_placement
from aladdin_mpi.run.rank import Rank
from aladdin_mpi.run.reductions import AFTER_LOOP, Place, Reductions
from aladdin_mpi.run.script import OptionsResolved, simulated_rank, typed_options
from aladdin_mpi.run.takeover import LoopProgress, Takeover
from aladdin_mpi.run.training_data import (
    NO_BATCH,
    Batches,
    Delivery,
    Epoch,
    TrainingData,
    evaluation_share,
    prepare,
)
from aladdin_mpi.session.coordinator import RunHook
from aladdin_mpi.session.user_optimizer import OptimizerInput, resolve, settings_for
from aladdin_mpi.transport.base import Transport, once
from aladdin_mpi.transport.checksums import ChecksumTransport
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker


def _with_numbers(evaluate: Evaluate | None) -> Evaluate | None:
    """Return a script's ``evaluate`` such that its figures can be written."""
    if evaluate is None or isinstance(evaluate, Measurement):
        return evaluate
    return lambda module: numbers_of(evaluate(module), "evaluate", EVALUATED)


class DataParallel:
    """Data-parallel training of a module, inside the user's training loop.

    Every rank runs the same script::

        run = DataParallel(model, algorithm="aladdin-ahead", epochs=5, batch_size=32, lr=0.05)
        for images, labels in run.batches(train_set):
            loss = loss_function(model(images), labels)
            loss.backward()
            run.step(loss)

    Only workers iterate. A server serves inside :meth:`batches`, which yields no batch there.
    After the loop, every rank's ``model`` is the trained global model, and ``summary`` has the
    run's figures at rank 0. The optimizer is part of the algorithm: :meth:`step` makes the
    optimizer's step, or sends the gradient for it.

    Set the length by one of ``epochs``, ``samples`` and ``steps``; a step is ``batch_size`` times
    ``accumulate`` samples of every worker.

    Checkpoints contain each worker's ``state``, a dict of tensors, numbers, strings, lists and
    dicts, as of the last :meth:`step`. It is restored when the loop of a resumed run begins.

    SIGUSR1 or SIGUSR2 at any rank, which batch systems send before a time limit, ends the loop:
    the run is saved, and the loop raises :class:`aladdin_mpi.errors.SuspendedError`, a
    ``SystemExit`` with status 75, on every rank. With ``run_dir=DIR, resume="auto"``, the program
    resumes when it is started again, and exits with status 0 if the run is complete. With
    ``allow_resize=True``, the number of ranks may change: all workers then begin from the global
    model, and a new one with an empty ``state``.

    Args:
        module: the model, which is moved to this rank's ``device``. Parameters of several dtypes
            are stepped in the widest of them, and rounded from it before each step.
        options: as for the commands; or pass them by name as ``settings``.
        optimizer: a torch optimizer for ``module.parameters()``, with its groups and rates;
            several of the same class, as for the parts of a GAN; a function that makes one for a
            list of parameters; or a name, such as "adamw". None: momentum SGD, with ``lr``,
            ``momentum`` and ``weight_decay``.
        scheduler: of that optimizer; do not step it in the loop. It advances by one with each step
            of any worker, so that it ends where it would in one process. With ``steps``, it
            advances once per step of the run.
        schedule: factor of the learning rates as a function of the samples drawn by all workers,
            instead of ``lr_schedule`` and ``warmup_epochs``.
        transport: MPI over all ranks by default.
        evaluate: measures a module at rank 0, while training continues; returns figures such
            as ``test_accuracy``.
        parts: names of submodules that each batch steps one after another, such as a GAN's models
            in an ``nn.ModuleDict``; pass them to :meth:`step`. Together they contain all trainable
            parameters. Algorithms count each part's step and gradient as one; the length of the
            run and schedules count batches.
        settings: fields of :class:`aladdin_mpi.options.run.RunOptions`.

    Raises:
        UserError: invalid settings, too few ranks, ranks that disagree, a folder in use.
    """

    options: RunOptions

    def __init__(
        self,
        module: nn.Module,
        options: RunOptions | None = None,
        *,
        optimizer: OptimizerInput | str | None = None,
        scheduler: LRScheduler | None = None,
        schedule: Callable[[int], float] | None = None,
        transport: Transport | None = None,
        evaluate: Evaluate | None = None,
        parts: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self._schedule = schedule
        self._parts = parts
        typed = typed_options() if transport is None else None
        self._is_custom_loop = options is None or typed is not None
        self._error_wording = naming_arguments if self._is_custom_loop else nullcontext
        self._ending = Ending(self._error_wording)
        try:
            if isinstance(optimizer, str):
                settings["optimizer"], optimizer = optimizer, None
            if typed is not None:
                settings = overridden(options, settings, typed, optimizer, schedule)
                options = None
            self._given = settings
            with self._error_wording():
                self._prepare(module, options, transport, evaluate, settings, optimizer, scheduler)
        except BaseException:
            self._ending.fail()
            raise

    def _prepare(
        self,
        module: nn.Module,
        options: RunOptions | None,
        transport: Transport | None,
        evaluate: Evaluate | None,
        settings: dict[str, Any],
        optimizer: OptimizerInput | None,
        scheduler: LRScheduler | None,
    ) -> None:
        def requested() -> dict[str, Any]:
            return {**settings_for(optimizer, self._schedule, settings), **settings}

        simulated = simulated_rank() if transport is None else None
        if simulated is not None:
            self._ending.simulate(simulated)
            if simulated.transport is None:
                raise OptionsResolved(simulated_options(simulated, requested(), module))
            transport = simulated.transport
        elif transport is None:
            end_other_run()
            check_default_device()
            timeout = float(settings.get("timeout", TIMEOUT))
            start_mpi(timeout)
            from aladdin_mpi.transport.mpi.engine import MpiTransport

            transport = MpiTransport(timeout=timeout)
            self._ending.own(transport)
        self.transport = transport
        all_or_none(transport, lambda: check_given(module, evaluate, settings))
        module = uncompiled(module)
        given = all_or_none(transport, requested)
        if simulated is not None:
            self.options = simulated_options(simulated, given, module)
        else:
            if self._is_custom_loop and transport.size == 1:
                given = all_or_none(transport, lambda: for_one_process(given))
            self.options = agreed_options(transport, options, given, module)
        self._place()
        # With timed computing, only the parameters' sizes matter: they may be on "meta".
        is_real = self.options.compute == "real"
        all_or_none(transport, lambda: self._check(module, needs_values=is_real))
        all_or_none(
            transport, lambda: check_parts(module, self._parts, self.algorithm, self.options)
        )
        all_or_none(transport, lambda: check_memory_format(module, self.options))
        if is_real:
            module = module.to(self.device)
            if self.options.channels_last:
                module = module.to(memory_format=torch.channels_last)
        self.module = module
        self._optimizer = all_or_none(
            transport, lambda: resolve(module, self.options, optimizer, scheduler)
        )
        self._evaluate = _with_numbers(evaluate)
        self._runner: ElasticRunner | None = None
        self._deliver = Delivery(self.device, self.options.channels_last)
        self._loop = Loop(self._deliver, self._parts)
        self._by_epochs = False
        self._epoch: Epoch | None = None
        self._projections: list[Projection] = []
        self._progress = LoopProgress()
        self._reductions = Reductions(self._progress)
        self.run_dir: Path | None = None
        self.state: dict[str, Any] = {}

    def _place(self) -> None:
        """Determine this rank's role and device, and prepare its process for the device."""
        transport, options = self.transport, self.options
        self.algorithm = all_or_none(transport, lambda: _checked(options, transport))
        servers = self._servers = options.servers if self.algorithm.has_servers else 0
        self.is_server = transport.rank < servers
        self.device = all_or_none(
            transport, lambda: choose_device(options.device, transport, servers)
        )
        self.options = options = with_bucket_size(transport, options, self.device)
        if self.device.type == "cpu":
            heap.keep_freed()
        configure(self.device, options.tf32, options.cudnn_benchmark)
        may_bind = options.bind_cores == "auto"
        bind_to_near(transport, self.device if may_bind else torch.device("cpu"))
        was_chosen = options.device != "auto" or options.compute == "timed"
        print_placement(transport, self.device, servers, options.quiet, was_chosen, options.spares)

    def _check(self, module: nn.Module, needs_values: bool) -> None:
        if needs_values:
            check_module(module, needs_values)
            return

        def check() -> nn.Module:
            check_module(module, needs_values)
            return module  # keeps its id() from being reused

        # All ranks of a simulation may share a module if only its sizes are needed.
        once(self.transport, ("checked", id(module)), check)

    @property
    def _rank(self) -> Rank | None:
        return None if self._runner is None else self._runner.rank

    @property
    def lr(self) -> float:
        """The learning rate of the current step, for display."""
        return self._ready().rate()

    @property
    def samples(self) -> int:
        """The samples of all workers before this worker's current step.

        After the last step it is the length of the run. A server has no such position.
        """
        return self._ready().worker.lease.start

    @property
    def is_first(self) -> bool:
        """Whether this is the first worker, which prints or writes what is needed only once."""
        return self.transport.rank == self._servers

    @property
    def worker(self) -> int:
        """This worker's number, from 0, in the present group of ranks.

        -1 on a server and on an unused spare rank. They read no data, so that an index of -1 may
        stand for any worker's part.
        """
        number = self.transport.rank - self._servers
        return number if 0 <= number < self.workers else -1

    @property
    def workers(self) -> int:
        """The number of workers in the present group of ranks; known before the loop."""
        spares = self.options.spares if self._rank is None else 0
        return self.transport.size - self._servers - spares

    @property
    def groups(self) -> int:
        """The number of groups of ranks so far: one, and one for each that was revoked."""
        return 1 if self._runner is None else self._runner.members.number

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, so that every rank has the trained model."""
        return self._ending.has_ended

    @property
    def completes_step(self) -> bool:
        """Whether this batch is the last one of its step, as with ``accumulate`` above 1."""
        return self._loop.is_last

    @property
    def has_batches(self) -> bool:
        """Whether this worker has further steps to make in the run."""
        return not (self.is_server or self.is_over or self._ending.is_due)

    @property
    def epoch_count(self) -> int:
        """The number of epochs of a run whose loop has begun; the last may be shorter."""
        plan = self._ready().session.plan
        return -(-plan.total // plan.epoch)

    def print(self, *values: object) -> None:
        """Print on the first worker only."""
        if self.is_first:
            console.say(" ".join(map(str, values)), sys.stdout)

    @property
    def summary(self) -> dict[str, Any]:
        """The run's figures, at rank 0, available after the loop or this rank's last step."""
        self._ending.finish_left()
        self._ending.check_open()
        return self._ending.summary

    def end_with_script(self, end_loop: Callable[[], None]) -> None:
        """Call ``end_loop``, which must end the loop, if the script ends before the loop does."""
        self._ending.end_loop = end_loop

    def batches(self, data: Any, sharded: bool = False) -> Batches:
        """Return this worker's batches until the budget is used up, on ``device``.

        Each sample of an epoch goes to one worker. ``break`` ends the run for all workers;
        ``continue`` before ``backward()`` skips a batch, whose gradient is then zero.

        Args:
            data: a map-style dataset, whose batches are made by torch's ``default_collate`` in an
                order that depends on ``seed``; a DataLoader, whose arguments apply; an
                IterableDataset or an iterable of batches, which is read again in every epoch; or
                an iterator over batches, which must last for the run. With timed computing only
                the length is used, and an int suffices; batches are then None.
            sharded: the iterable yields different batches on each worker already. By default,
                each of n workers takes every n-th batch.

        Raises:
            UserError: a second call, or data that cannot be distributed to workers; or, in the
                loop, :meth:`step` was not called.
        """
        if self._ending.batches is not None:
            raise UserError(
                "training loop: run.batches() was called a second time. For another run make "
                "another DataParallel."
            )
        # The ending needs them to complete a loop that is left early.
        ending = self._ending
        ending.batches = self._run(data, sharded)
        return Batches(ending.batches, ending.note_left, ending.check_open, self._note_batch)

    def epochs(self, data: Any, sharded: bool = False) -> Iterator[Epoch]:
        """Yield the batches by epochs: ``for epoch in run.epochs(data): for batch in epoch: ...``.

        An epoch ends when all workers together have drawn as many samples as the data have.
        Every worker reaches the end of every epoch; servers see no epoch. ``break`` in an epoch
        ends it for all workers. ``epoch`` is also its number, from 0; save ``int(epoch)``.

        Args:
            data: see :meth:`batches`.
            sharded: see :meth:`batches`.
        """
        self._by_epochs = True
        batches = self.batches(data, sharded)
        batches.fetch()
        if self._rank is None or self.is_server:
            return
        session, loop = self._ready().session, self._loop
        plan = session.plan
        first = self._progress.first_epoch
        if first is None:  # the same for all workers, even if their first batches are in others
            first = session.began_at // plan.epoch

        def is_past(end: int) -> bool:
            position = plan.total if loop.lease is None else loop.lease.start
            return (not batches.fetched and loop.is_over) or position >= end

        for number in range(first, self.epoch_count):
            self._progress.epoch = number
            self._reductions.move(Place(number))
            end = (number + 1) * plan.epoch
            self._ending.check_open()
            epoch = self._epoch = Epoch(
                number,
                batches,
                partial(is_past, end),
                self._reductions.end_epoch,
                partial(self._skip_to, end),
            )
            try:
                yield epoch
            except GeneratorExit:  # the loop over the epochs was left
                self._ending.note_left()
                raise
            if self._ready().session.is_interrupted:
                break
            epoch.complete()
        self._reductions.move(AFTER_LOOP)
        loop.skip_to = inf
        for _ in batches:
            pass

    def _skip_to(self, sample: int) -> None:
        """Skip the samples of the run before number ``sample``, on all workers."""
        self._ready().worker.pass_over(sample)
        self._loop.skip_to = sample

    def _run(self, data: Any, sharded: bool) -> Generator[Any, None, None]:
        with self._error_wording():
            yield from self._train(data, sharded)

    def _train(self, data: Any, sharded: bool) -> Iterator[Any]:
        origin = find_origin(self.transport, self.options, self.algorithm)
        prepared = all_or_none(
            self.transport,
            lambda: prepare(data, sharded, self.options, self._given, self._is_custom_loop, origin),
        )
        facts = all_or_none(self.transport, lambda: prepared.facts(self.is_server))
        self.options, feed = prepared.options, prepared.feed
        task = UserTask(
            prepared.length,
            facts,
            self._loop.compute,
            self._loop.note_empty if self._by_epochs else self._pass_round,
            self._evaluate,
            self._optimizer,
            self._schedule,
            may_clip=self._is_custom_loop,
            may_draw=self._is_custom_loop or self.options.compute == "real",
            state=self.state,
            skipped=None if feed is None else feed.skipped,
            origin=origin,
            project=tuple(self._projections),
            uncut=prepared.uncut,
            parts=self._parts,
            is_sized=prepared.is_sized,
        )
        runner = self._runner = ElasticRunner(
            self.transport,
            self.options,
            self.algorithm,
            _sealed if self.options.checksum else lambda transport: transport,
            partial(self._assemble, task),
            partial(self._follow, prepared),
            lambda: self._ending.is_concluding or not self._loop.is_in_user_code,
            self._progress,
            is_sharded(self.module),
        )
        self._ending.of(self.module, self._loop, runner)
        if not runner.begin():
            self._ending.release()
            return
        caveat = "" if feed is None else feed.caveat
        if self.options.resume is not None and caveat and self.transport.rank == 0:
            guard.warn([caveat])
        self._progress.has_begun = True
        if self.is_server:
            runner.run()
        else:
            yield from self._worker_batches(runner)
        self._ending.conclude()

    def _assemble(
        self,
        task: UserTask,
        transport: Transport,
        options: RunOptions,
        takeover: Takeover | None,
        hooks: Sequence[RunHook],
    ) -> Rank:
        if takeover is not None:
            task = replace(task, origin=takeover.origin)
            self._progress.take_over(takeover.progress, takeover.mine is None)
            if self.algorithm.has_servers and transport.rank < options.servers:
                self._serve_on_cpu()
        self.transport = transport
        hooks = [*hooks, self._ending]
        return assemble(transport, options, self.algorithm, self.module, task, takeover, hooks)

    def _serve_on_cpu(self) -> None:
        """Move the model to the CPU, which servers use, after this rank was a worker or a spare."""
        if not is_sharded(self.module):
            self.module.cpu()
            self.device = torch.device("cpu")

    def _follow(self, data: TrainingData, rank: Rank) -> None:
        """Train with ``rank``, this rank's place in a new group."""
        self.run_dir = rank.folder.path
        self._servers = rank.context.servers
        self.is_server = rank.context.is_server
        if not self.is_server:
            role = rank.session.role
            assert isinstance(role, TrainingWorker)
            self._reductions.connect(rank.worker, self.algorithm, role.assist)
            self._loop.follow(rank, data.source(rank.worker, rank.session.origin.past))

    def _worker_batches(self, runner: ElasticRunner) -> Iterator[Any]:
        watch = None
        if self._is_custom_loop and self.options.compute == "real":
            context = self._ready().context
            takes_writes = self.algorithm.takes_writes and context.islands.size == 1
            takes_writes = takes_writes or self.transport.size == 1
            takes_writes = takes_writes and not context.is_sharded
            loses_writes = "" if takes_writes else self.algorithm.name
            watch = LoopWatch(self.module, self._optimizer, loses_writes)
        with closing(watch) if watch is not None else nullcontext():
            try:
                yield from self._loop.batches(runner.run, watch)
                if self._by_epochs and not self.is_server:
                    yield NO_BATCH  # ends the last epoch before the run is completed
                    if watch is not None:
                        watch.resume()
            except GeneratorExit:  # the loop was left; after an error, others wait for its report
                self._reductions.move(AFTER_LOOP)
                raise
        self._reductions.move(AFTER_LOOP)

    def _pass_round(self, lease: SampleLease) -> None:
        self._reductions.move_within(lease.start, inf)

    def _note_batch(self, batch: Any) -> None:
        self._note_place(inf if batch is NO_BATCH else 2 * self._loop.number)

    def _note_place(self, part: float) -> None:
        """Note the place in the present round's step that the loop has reached."""
        if self._loop.lease is not None:
            self._reductions.move_within(self._loop.lease.start, part)

    # -- the end ----------------------------------------------------------------------------
    def close(self) -> None:
        """Abandon the run if its loop has not ended; do nothing otherwise.

        Training, evaluation and output stop. The hooks are removed from the model, which keeps
        this worker's parameters; another ``DataParallel`` may follow. An existing checkpoint can
        be resumed. To end a run early and keep its results, leave the loop with ``break`` instead.

        With several ranks, one worker is enough to close a run whose loop has begun. It waits for
        the others to finish their granted steps; their loops then raise
        :class:`aladdin_mpi.errors.ClosedError`. Before the loop, every rank has to call this.

        ``with DataParallel(...) as run:`` closes the run if an error leaves the block. Without an
        error, it completes the run, as after ``break``.

        Raises:
            UserError: the algorithm has failed on this rank, and the others wait for it.
        """
        with self._error_wording():
            self._ending.close()

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is None:
            self._ending.finish()
        else:
            self._ending.close_after(error)

    def step(self, loss: Tensor | float | None = None, part: str | None = None) -> None:
        """Hand the gradients of a batch to the algorithm.

        This updates the parameters and clears the gradients.

        With ``parts``, call it for each of them in that order. It updates the parameters of this
        part, and drops gradients of others. The last parts may be left out of a batch.

        Args:
            loss: of the batch, for the metrics, which have that of the last part with one, and for
                ``max_loss``.
            part: one of ``parts``, if the run has any.

        Raises:
            UserError: called twice for a batch, for another part than the next, or without the loss
                that ``max_loss`` requires; or gradients were moved from the memory that backward
                must use, as by ``zero_grad()``.
        """
        try:
            if self._ending.was_closed:
                self._ending.check_open()
            options = self.options
            if loss is None and options.max_loss is not None and options.compute == "real":
                raise UserError(
                    "--max-loss requires the loss of every batch, but step() was called without "
                    "one. Call run.step(loss), or leave --max-loss out."
                )
            self._note_place(2 * self._loop.number + 1)
            self._loop.step(loss, part)
        except UserError:
            with self._error_wording():
                raise

    def project(self, function: Projection) -> None:
        """Register a change of the parameters after each step, on the ranks that make the step.

        Use it for operations that follow ``optimizer.step()``: clamping or renormalising weights,
        or masking pruned ones. ``function(name, values)`` receives the name of each trainable
        parameter and a tensor of its shape, which it changes in place. Workers and servers call it
        after their steps, and it is applied to each model that is evaluated. It must be the same
        on every rank, depend on this parameter alone, and be a projection: applying it twice must
        have the same result as applying it once.

        Args:
            function: called under ``torch.no_grad()``.

        Raises:
            UserError: the loop has begun.
        """
        if self._ending.batches is not None:
            raise UserError(
                "training loop: run.project() was called after the loop began. Call it before "
                "run.batches()."
            )
        self._projections.append(function)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss for ``backward()`` with float16; replaces a GradScaler.

        In float16, small gradients underflow to zero. The loss is multiplied by a factor that all
        workers share, and the gradients are divided by it before they are used. If a gradient
        overflows, it is skipped, and the factor is halved for all workers.

        Args:
            loss: of the batch, as it is passed to :meth:`step`.

        Raises:
            UserError: the parameters are in float16.
        """
        with self._error_wording():
            worker = self._ready().worker
            if worker.parameters.dtype == torch.float16:
                raise UserError(
                    "run.scale(): the parameters are float16, in which small gradients become zero "
                    "when they are divided by the scale. Keep parameters in float32, and compute "
                    "in float16 with torch.autocast()."
                )
            return worker.current.scale_loss(loss)

    def clip_grad_norm_(self, max_norm: float) -> None:
        """Clip the gradient of this step, between ``backward()`` and :meth:`step`.

        The norm is over all parameters: that of the workers' mean with ``ar-sgd``, and of each
        worker's own gradient otherwise. Call it in every step, including the first; the gradient
        is then sent after backward, not during it. The argument ``clip`` has the same effect.

        Raises:
            UserError: parts of the gradient may have been sent.
        """
        with self._error_wording():
            self._ready().worker.current.clip_to(max_norm)

    # -- metrics and control ----------------------------------------------------------------
    def log(self, **figures: float) -> None:
        """Add figures to the metrics. Each line of metrics has their means over all workers.

        Raises:
            UserError: a figure is not a number.
        """
        with self._error_wording():
            rank = self._ready()
            rank.user_metrics.send(figures, is_late=rank.session.over)

    def evaluation_batches(self, data: Any, sharded: bool = False) -> Iterator[Any]:
        """Return this worker's share of one pass over evaluation data, on ``device``.

        Each batch goes to one worker: worker w of n gets the batches w, w + n, and so on, which
        are those of one process. No sample is repeated or left out, so that sums by
        :meth:`reduce` are exact. A server gets none; one process gets all::

            for inputs, labels in run.evaluation_batches(test_loader):
                correct += (model(inputs).argmax(1) == labels).sum()
            accuracy = run.reduce(correct, "sum") / len(test_set)

        An order or an augmentation that is drawn at random is the same in every pass, for any
        number of workers. If a worker fails during a pass, its share is missing from this one.

        Args:
            data: as for :meth:`batches`; a data set has batches of ``batch_size``.
            sharded: the iterable yields different batches on each worker already.

        Raises:
            UserError: the run has ended, or the data cannot be distributed.
        """
        self._check_together("evaluation_batches")
        if self.is_server:
            return iter(())
        with self._error_wording():
            if self._ready().context.is_sharded:
                raise UserError(
                    "run.evaluation_batches() requires whole models, as workers get different "
                    "numbers of batches, and FSDP has divided this model. Pass evaluate= to "
                    "DataParallel, or all data to every worker."
                )
            share = evaluation_share(data, sharded, self._ready().worker, self.options)
        return map(self._deliver, share)

    def reduce(self, value: float | Tensor, how: Literal["mean", "sum"] = "mean") -> Tensor:
        """Return the mean or the sum of a number, or a tensor, over all surviving workers.

        Every worker must call it equally often and at the same places, and waits for the others.
        The result has the same bits on all workers. At the ends of :meth:`epochs`, all algorithms
        except ``ssp`` support it. Between two batches, it requires an algorithm whose workers all
        make the same number of steps.

        Raises:
            UserError: the run has ended, the algorithm does not support the call, or another
                worker has not made it.
        """
        self._check_together("reduce")
        if self.is_server:  # a worker may have become one
            return torch.as_tensor(value, dtype=torch.float64)
        with self._error_wording():
            self._ready()
            total, count = self._reductions.sum(value)
        return total / count if how == "mean" else total

    def gather(self, value: float | Tensor) -> Tensor:
        """Return the values of all surviving workers, stacked in their order, in float64.

        The conditions are those of :meth:`reduce`; a server has only its own tensor.
        """
        self._check_together("gather")
        value = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
        if self.is_server:  # a worker may have become one
            return value[None]
        with self._error_wording():
            self._ready()
            return self._reductions.rows(value, "run.gather()").reshape(-1, *value.shape)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate the gradients of backward passes inside, without sending them yet."""
        watch = self._ready().worker.step.watch
        if watch is None:
            yield
            return
        before, watch.enabled = watch.enabled, False
        try:
            yield
        finally:
            watch.enabled = before

    @contextmanager
    def local(self) -> Iterator[None]:
        """Keep gradients, and changes of parameters, of passes inside to this worker and batch.

        Backward passes inside leave their gradients in ``.grad``, which is cleared at the end.
        Parameters that are changed inside keep these values until :meth:`step`, whose gradient is
        applied to the original ones. SAM, for example, computes its perturbation inside, and the
        gradient at the perturbed parameters afterwards.

        Raises:
            UserError: the algorithm exchanges values of its own in these passes.
        """
        with self._error_wording():
            self._ready()
            if implementation(self.algorithm).updates_parts:
                raise UserError(
                    f"run.local() requires passes without communication, but {self.algorithm.name} "
                    "exchanges activations in each. Use ar-sgd."
                )
            with self._loop.local():
                yield

    def checkpoint(self) -> None:
        """Request a checkpoint of the run, in addition to those of ``checkpoint_every``.

        It is written once the workers have computed the samples that were granted so far, during
        later calls of :meth:`step`. Only the first worker's call has an effect.

        Raises:
            UserError: the loop has not begun.
        """
        worker = self._ready().worker
        if self.is_first:
            worker.end_segment()

    def stop(self) -> None:
        """End the run early: no more samples are granted to any worker.

        The loops finish the samples that have been granted, and then end by themselves.
        """
        self._ready()
        self._ending.request_end(Worker.stop)

    def _check_together(self, name: str) -> None:
        """Prepare for a method that the workers call together.

        Raises:
            UserError: the run has ended.
        """
        if self.is_over:
            raise UserError(
                f"training loop: run.{name}() was called after the run ended. Call it at the ends "
                "of run.epochs(), or measure on one rank: all ranks have the same model now."
            )
        if self._epoch is not None and self._epoch.is_left:
            self._epoch.complete()  # other workers may wait for this one in a step

    def _ready(self) -> Rank:
        self._ending.check_open()
        if self._rank is None:
            raise UserError(
                "training loop: run.batches() was not called. Call run.batches(dataset) first."
            )
        return self._rank


def _checked(options: RunOptions, transport: Transport) -> Algorithm:
    """Return the run's algorithm after checking the options against the number of ranks."""
    if options.spares and not transport.survives:
        raise UserError(
            "--spares requires an MPI that survives failures. Start with mpirun --with-ft ulfm "
            "(Open MPI 5), or leave --spares out."
        )
    ranks = transport.size - options.spares
    algorithm = checked_algorithm(options, ranks)
    check_launched(algorithm, options, ranks)
    return algorithm


def _sealed(transport: Transport) -> Transport:
    """Return the transport with checksums; damaged messages are reported to rank 0."""

    def damaged(source: int, tag: int) -> None:
        report(transport, Refusal(Reason.CHECKSUM, source, value=tag))

    return ChecksumTransport(transport, SEALED, damaged)
