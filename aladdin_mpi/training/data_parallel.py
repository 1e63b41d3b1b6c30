"""The public interface: one's own training loop, in parallel."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from aladdin_mpi import guard, stop_signal
from aladdin_mpi.algorithms import registry
from aladdin_mpi.budget import Ticket
from aladdin_mpi.errors import SUSPENDED_STATUS, SuspendedError, UserError
from aladdin_mpi.options import RunOptions
from aladdin_mpi.refusals import Reason, Refusal, report
from aladdin_mpi.settings import Setting, Settings, build
from aladdin_mpi.tags import SEALED
from aladdin_mpi.training import heap
from aladdin_mpi.training.auto_resume import settle
from aladdin_mpi.training.datasets import DatasetPair
from aladdin_mpi.training.device import choose_device
from aladdin_mpi.training.evaluation import Evaluate
from aladdin_mpi.training.exchange import agree
from aladdin_mpi.training.loading import BatchSource, describe
from aladdin_mpi.training.loop_watch import LoopWatch
from aladdin_mpi.training.own_optimizer import Factory, resolve, settings_for
from aladdin_mpi.training.own_words import check_effect, in_own_words
from aladdin_mpi.training.placement import tell_placement
from aladdin_mpi.training.rank import Rank
from aladdin_mpi.training.sampler import ShardedStream
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.sealed import SealedTransport


class DataParallel:
    """Trains a module with one of the algorithms, inside the user's own loop.

    Every rank runs the same script::

        run = DataParallel(model, algorithm="aladdin", epochs=5, batch_size=32, lr=0.05)
        for images, labels in run.batches(train_set):
            loss = loss_function(model(images), labels)
            loss.backward()
            run.step(loss)

    A signal SIGUSR1 or SIGUSR2 at any rank, as batch systems send before a time limit, ends
    the loop: the run is saved, and the loop raises
    :class:`aladdin_mpi.errors.SuspendedError`, a ``SystemExit`` of status 75, on every rank.
    With ``run_dir=DIR, resume="auto"`` the program goes on when it is started again, and ends
    with status 0 if the run is complete.

    The loop turns on workers; a server serves inside :meth:`batches`, which gives it
    no batch. After the loop every rank's ``model`` is the trained global model and
    ``summary`` has the run's figures at rank 0. The optimizer is part of the algorithm:
    :meth:`step` makes its step, or sends what it is made of.

    Args:
        module: moved to this rank's ``device``; of one dtype.
        options: as the commands have them; or give them by name as ``settings``.
        optimizer: of torch, made for ``module.parameters()``, with its groups and rates; or a
            function that makes one of a list of parameters; or a name, such as "adamw". None:
            momentum SGD, by ``lr``, ``momentum`` and ``weight_decay``.
        scheduler: of that optimizer; it goes on by one each time that the workers together have
            drawn a batch each, and is not to be stepped in the loop.
        schedule: factor of the learning rates as a function of the samples that all workers
            have drawn, in place of ``lr_schedule`` and ``warmup_epochs``.
        transport: MPI over all ranks by default.
        evaluate: measures a module at rank 0, beside training; returns figures such
            as ``test_accuracy``.
        settings: fields of :class:`aladdin_mpi.options.RunOptions`.

    Raises:
        UserError: bad settings, too few ranks, ranks that disagree, a folder in use.
    """

    _open: DataParallel | None = None
    """The run over MPI that has not ended."""

    def __init__(
        self,
        module: nn.Module,
        options: RunOptions | None = None,
        *,
        optimizer: torch.optim.Optimizer | Factory | str | None = None,
        scheduler: LRScheduler | None = None,
        schedule: Callable[[int], float] | None = None,
        transport: Transport | None = None,
        evaluate: Evaluate | None = None,
        **settings: Any,
    ) -> None:
        self._owns_transport = transport is None
        self._schedule = schedule
        self._is_own_loop = options is None
        self._words = in_own_words if self._is_own_loop else nullcontext
        try:
            with self._words():
                if isinstance(optimizer, str):
                    settings["optimizer"], optimizer = optimizer, None
                self._prepare(module, options, transport, evaluate, settings, optimizer, scheduler)
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        """The run has ended: another one over MPI may begin."""
        self._ended = True
        if DataParallel._open is self:
            DataParallel._open = None

    def _prepare(
        self,
        module: nn.Module,
        options: RunOptions | None,
        transport: Transport | None,
        evaluate: Evaluate | None,
        settings: dict[str, Any],
        optimizer: torch.optim.Optimizer | Factory | None,
        scheduler: LRScheduler | None,
    ) -> None:
        if transport is None:
            _check_alone_over_mpi()
            transport = _over_mpi(float(settings.get("timeout", 1800.0)))
            DataParallel._open = self
        self.transport = transport
        agree(transport, lambda: _check_given(module, evaluate, settings))
        brought = agree(transport, lambda: settings_for(optimizer, self._schedule, settings))
        self.options = _settled(transport, options, {**brought, **settings}, module)
        self.algorithm = agree(transport, self._check)
        if self.options.checksum:
            transport = self.transport = _sealed(transport)
        servers = self.options.servers if self.algorithm.server else 0
        self.is_server = transport.rank < servers
        self.device = agree(
            transport, lambda: choose_device(self.options.device, transport, servers)
        )
        if self.device.type == "cpu":
            heap.keep_freed()
        tell_placement(transport, self.device, servers, self.options.quiet)
        # Timed computing needs no more than the parameters' sizes: they may be on "meta".
        self.module = module if self.options.compute == "timed" else self._placed(module)
        self._optimizer = agree(
            transport, lambda: resolve(self.module, self.options, optimizer, scheduler)
        )
        self._evaluate = evaluate
        self._servers = servers
        self._rank: Rank | None = None
        self._loop: Iterator[Any] | None = None
        self._ended = False
        self._algorithm_side: greenlet | None = None
        self._loop_side: greenlet | None = None
        self._ticket: Ticket | None = None
        self._watch: LoopWatch | None = None
        self._stepped = False
        self.run_dir: Path | None = None
        self.summary: dict[str, Any] = {}
        if self._owns_transport:
            atexit.register(self._check_ended)

    def _placed(self, module: nn.Module) -> nn.Module:
        module = module.to(self.device)
        return (
            module.to(memory_format=torch.channels_last) if self.options.channels_last else module
        )

    def _check(self) -> registry.Algorithm:
        algorithm = registry.find(self.options.algorithm)
        registry.check_ranks(algorithm, self.transport.size, self.options.servers)
        registry.check_compression(algorithm, self.options)
        registry.check_wire(algorithm, self.options)
        registry.check_checksum(algorithm, self.options)
        registry.check_lookahead(algorithm, self.options)
        return algorithm

    @property
    def lr(self) -> float:
        """Learning rate of the current step; for display."""
        return self._ready().rate()

    def batches(self, dataset: Any) -> Iterator[Any]:
        """This worker's batches until the budget is used up, on ``device``.

        Shards of one epoch do not overlap; the last batch of the run may be shorter.

        Args:
            dataset: map-style, items (input, label) as a DataLoader collates them. With
                timed computing only its length is used, and an int will do; batches
                are then None.

        Raises:
            UserError: a second call; or, in the loop, :meth:`step` was left out.
        """
        if self._loop is not None:
            raise UserError(
                "training loop: expected one call of batches(), got a second; for another run "
                "make another DataParallel"
            )
        # Kept here, so that a loop that is left early stays as it is until _check_ended.
        self._loop = self._batches(dataset)
        return self._loop

    def _batches(self, dataset: Any) -> Iterator[Any]:
        with self._words():
            yield from self._run(dataset)

    def _run(self, dataset: Any) -> Iterator[Any]:
        length = agree(self.transport, lambda: _length(dataset, self.options))
        facts = agree(self.transport, lambda: self._facts(dataset, length))
        self._rank = rank = Rank(
            self.transport,
            self.options,
            self.algorithm,
            self.module,
            length,
            facts,
            self._compute,
            self._evaluate,
            self._optimizer,
            self._schedule,
            may_clip=self._is_own_loop,
        )
        self.run_dir = rank.run_dir
        if self.is_server:
            rank.segments.run()
        else:
            yield from self._worker_batches(rank, dataset, length)
        if rank.segments.suspended:
            rank.suspend()
            self._leave()
            raise SuspendedError
        self.summary = rank.finish()
        self._leave()
        if self._owns_transport:
            self.transport.close()
            atexit.unregister(self._check_ended)  # which would hold all vectors until then

    def _facts(self, dataset: Any, length: int) -> dict[str, Any]:
        """What this rank says of its data; a server has no need to read any."""
        if self.is_server or self.options.compute == "timed" or not length:
            return {"length": length}
        return describe(dataset)

    def _check_ended(self) -> None:
        """At the end of the program: no rank goes while others wait for it."""
        if self._rank is not None and self._rank.segments.suspended and self._rank.evaluating:
            # Python cannot end in order while a thread computes.
            guard.leave(SUSPENDED_STATUS)
        if not self._ended:
            guard.end_job(
                UserError(
                    "training loop: the program has ended, or left the loop, before "
                    "run.batches() did, and the other ranks wait; let the loop go on until it "
                    "ends by itself, and end a run early by run.stop()"
                )
            )

    def _worker_batches(self, rank: Rank, dataset: Any, length: int) -> Iterator[Any]:
        source = self._source(rank, dataset, length)
        if self._is_own_loop and self.options.compute == "real":
            self._watch = LoopWatch(self.module)
        try:
            yield from self._turn(rank, source)
        finally:
            if self._watch is not None:
                self._watch.close()

    def _turn(self, rank: Rank, source: BatchSource | None) -> Iterator[Any]:
        self._loop_side = getcurrent()
        self._algorithm_side = algorithm = greenlet(rank.segments.run)
        self._ticket = algorithm.switch()
        while not algorithm.dead:
            assert self._ticket is not None
            self._stepped = False
            if self._watch is not None:
                self._watch.begin()
            if source is None:
                yield None
            else:
                yield tree_map(self._to_device, source.next_batch(self._ticket.size))
            if not self._stepped:
                raise UserError(
                    "training loop: expected one call of step() for each batch, got none; call "
                    "run.step(loss) after loss.backward()"
                )

    def _source(self, rank: Rank, dataset: Any, length: int) -> BatchSource | None:
        if self.options.compute == "timed":
            return None
        options = self.options
        stream = ShardedStream(length, rank.worker.index, rank.worker.count, options.seed)
        stream.position = rank.worker.samples
        return BatchSource(dataset, stream, options.batch_size, options.loader_workers)

    def _to_device(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        if self.options.channels_last and item.dim() == 4:
            item = item.contiguous(memory_format=torch.channels_last)
        return item.to(self.device, non_blocking=True)

    def step(self, loss: Tensor | float | None = None) -> None:
        """The gradients of a batch are there: hand them to the algorithm.

        The parameters change here, and gradients are cleared.

        Args:
            loss: of the batch, for the metrics and for ``max_loss``.

        Raises:
            UserError: called twice for a batch, or without the loss that ``max_loss``
                needs; or the gradients are not where backward has to put them, as after
                ``zero_grad()``.
        """
        with self._words():
            self._step(loss)

    def _step(self, loss: Tensor | float | None) -> None:
        if self._algorithm_side is None or self._stepped:
            raise UserError(
                "training loop: expected step() once for each batch of run.batches(); got a call "
                "without a batch"
            )
        if loss is None and self.options.max_loss is not None and self.options.compute == "real":
            raise UserError(
                "--max-loss: expected the loss of every batch, got a step() without one; call "
                "run.step(loss), or leave --max-loss out"
            )
        if self._watch is not None:
            self._watch.end()
        self._stepped = True
        value = loss.item() if isinstance(loss, Tensor) else loss
        self._loop_side = getcurrent()
        # The algorithm goes on, until it wants the gradient of the next batch.
        self._algorithm_side.parent = self._loop_side
        self._ticket = self._algorithm_side.switch(value)

    def _compute(self, ticket: Ticket) -> float | None:
        """On the algorithm's side: let the user's loop compute a batch, to its step()."""
        assert self._loop_side is not None
        loss: float | None = self._loop_side.switch(ticket)
        return loss

    def clip_grad_norm_(self, max_norm: float) -> None:
        """Clip the gradient of this step, between ``backward()`` and :meth:`step`.

        To the norm over all parameters: of the mean of all workers with ``ar-sgd``, of each
        worker's own otherwise. To be called in every step, the first one included; the
        gradient is then sent when backward is over. As the argument ``clip``.

        Raises:
            UserError: parts of the gradient may have been sent.
        """
        with self._words():
            self._ready().worker.clip_step(max_norm)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in here add to the gradient, and nothing is sent yet."""
        watch = self._ready().worker.watch
        if watch is None:
            yield
            return
        watch.enabled = False
        try:
            yield
        finally:
            watch.enabled = True

    def stop(self) -> None:
        """End the run early: no more samples are granted to any worker.

        The loops go on with what has been granted, and then end by themselves.
        """
        self._ready().worker.stop()

    def _ready(self) -> Rank:
        if self._rank is None:
            raise UserError("training loop: call run.batches(dataset) first")
        return self._rank


def _check_alone_over_mpi() -> None:
    """Two runs at once would share one MPI.

    Raises:
        UserError: another run has not ended yet.
    """
    other = DataParallel._open
    if other is None:
        return
    if other._loop is None:
        agree(other.transport, _refuse_second)
    _refuse_second()


def _refuse_second() -> None:
    raise UserError(
        "DataParallel: expected one run at a time, got a second before the loop of the first has "
        "ended; train several models together as one module, such as nn.ModuleDict"
    )


def _check_given(module: object, evaluate: object, settings: dict[str, Any]) -> None:
    check_effect(settings.keys())
    if not isinstance(module, nn.Module):
        raise UserError(
            f"DataParallel: expected a torch.nn.Module first, got {type(module).__name__}; give "
            "the model itself"
        )
    if evaluate is not None and not callable(evaluate):
        raise UserError(
            "DataParallel: evaluate: expected a function of the module that returns figures by "
            f"name, got {type(evaluate).__name__}"
        )


def _length(dataset: Any, options: RunOptions) -> int:
    """Of what :meth:`DataParallel.batches` was given; raises UserError if it is no data set."""
    if isinstance(dataset, int) and options.compute == "timed":
        return dataset
    if isinstance(dataset, DataLoader):
        raise UserError(
            "batches(): expected a map-style data set, got a DataLoader; give its .dataset, and "
            "DataParallel its batch_size and its num_workers as loader_workers"
        )
    if not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")) or isinstance(
        dataset, DatasetPair
    ):
        raise UserError(
            "batches(): expected a map-style data set, with a length and items by number, got "
            f"{type(dataset).__name__}"
            + ("; give its .train" if isinstance(dataset, DatasetPair) else "")
        )
    return len(dataset)


def _settled(
    transport: Transport, options: RunOptions | None, settings: dict[str, Any], module: nn.Module
) -> RunOptions:
    """The options of the run; for a run that is complete the program ends here."""
    if options is not None:
        agree(transport, lambda: _check_alone(settings))
        return options
    # The commands' defaults name the built-in model and data, which these are not.
    named = {"model": type(module).__name__, "dataset": "own", **settings}
    given: Settings = {(name,): Setting(value, name) for name, value in named.items()}
    asked = agree(transport, lambda: build(RunOptions, given))
    settled = settle(transport, RunOptions, given, asked)
    if settled is None:
        transport.close()
        raise SystemExit(0)
    return settled


def _check_alone(settings: dict[str, Any]) -> None:
    if settings:
        raise UserError(f"options: expected no settings beside them, got {', '.join(settings)}")


def _sealed(transport: Transport) -> Transport:
    """With checksums; rank 0 hears of messages that are damaged."""

    def damaged(source: int, tag: int) -> None:
        report(transport, Refusal(Reason.CHECKSUM, source, value=tag))

    return SealedTransport(transport, SEALED, damaged)


def _over_mpi(timeout: float) -> Transport:
    from aladdin_mpi.transport.mpi import MpiTransport

    guard.install()
    stop_signal.install()
    return MpiTransport(timeout=timeout)
