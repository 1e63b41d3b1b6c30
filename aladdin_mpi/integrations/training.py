"""The run behind an accelerator, and the objects that ``prepare`` returns."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from aladdin_mpi.errors import ServedError, UserError
from aladdin_mpi.flat.gradients import Hooks
from aladdin_mpi.integrations.saved_states import SavedStates
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.run.job import Job
from aladdin_mpi.run.training_data import Delivery, Epoch


class Training:
    """A run that begins when the script first iterates over its training data.

    Before that, models, optimizers, schedulers and loaders are added in any order. A step is
    ``settings["accumulate"]`` batches. The script may step after the last of them, as scripts do
    that accumulate by hand, or after each, inside ``accelerator.accumulate()``.

    Args:
        job: this rank's place in the job.
        settings: of :class:`DataParallel`.
        split_batches: batches of the training data are for all workers together.

    Attributes:
        accumulation_steps: batches of a step that ``accelerator.accumulate()`` marks; 1: none.
        states: saved and loaded by the script.
        is_evaluating: the latest batch was of data other than the training data.
        is_marked: ``accelerator.accumulate()`` was called for this batch.
        is_computed: this batch had a backward pass or a step.
    """

    def __init__(self, job: Job, settings: dict[str, Any], split_batches: bool) -> None:
        self.job = job
        self.settings = settings
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[LRScheduler] = []
        self.loader: TrainingLoader | None = None
        self.is_evaluating = self.is_marked = self.is_computed = False
        self.started: DataParallel | None = None
        self.states = SavedStates()
        self._split_batches = split_batches
        self.accumulation_steps = 1
        self._loss: Tensor | None = None
        self._batches = self._steps = self._scheduler_steps = 0
        self._hooks = Hooks()
        self._until_start = Hooks()

    # -- the beginning ----------------------------------------------------------------------
    def accumulate(self, steps: int) -> None:
        """Let ``accelerator.accumulate()`` mark the batches of a step, of which it has ``steps``.

        Raises:
            UserError: the loop has begun, or the script accumulates by itself.
        """
        if self.started is not None:
            raise UserError(
                "accelerator.gradient_accumulation_steps was changed after the loop began. Set it "
                "before the loop."
            )
        if "accumulate" in self.settings and self.accumulation_steps == 1:
            raise UserError(
                "gradient_accumulation_steps cannot be combined with accumulate, which is for "
                "scripts that accumulate gradients by themselves. Leave one of the two out."
            )
        self.settings["accumulate"] = self.accumulation_steps = steps

    @property
    def _accumulates(self) -> bool:
        return self.accumulation_steps > 1

    @property
    def _accumulate(self) -> int:
        """The number of batches of a step."""
        return int(self.settings.get("accumulate", 1))

    def add_model(self, model: nn.Module) -> None:
        """Add a model of the script."""
        self.models.append(model)
        if self.states.is_loaded:
            self._guard(model)

    def load(self, folder: Path) -> None:
        """Resume the run of a state saved in ``folder``; its models come with the first batch."""
        self.settings["resume"] = self.states.load(folder)
        for each in self.models:
            self._guard(each)

    def _guard(self, model: nn.Module) -> None:
        """Refuse uses of a model before the loop, when it has its initial values."""

        def refuse(*_: Any) -> None:
            raise UserError(
                "accelerator.load_state: the state is loaded when the loop begins, and a model was "
                "used before. Use it after the first batch of the loop. To evaluate a trained "
                "model only, load it from the run folder (model.pt) with torch.load()."
            )

        self._until_start.add(model, model.register_forward_pre_hook, refuse)
        self._until_start.add(model, model.register_state_dict_pre_hook, refuse, refuse)

    def add_loader(self, loader: DataLoader[Any]) -> TrainingLoader | EvaluationLoader:
        """Return the prepared loader; the first one supplies the training data."""
        if self.loader is not None:
            return self.loader if loader is self.loader.given else EvaluationLoader(loader, self)
        self.loader = TrainingLoader(loader, self, self._split_batches)
        return self.loader

    @property
    def run(self) -> DataParallel:
        """The run, which begins now if it has not; every rank has to call this.

        Raises:
            UserError: model, optimizer or training data were not prepared.
        """
        if self.started is None:
            self.started = self._start()
        return self.started

    def begun(self, caller: str) -> DataParallel:
        """Return the run for a method of the accelerator, ``caller``.

        Raises:
            UserError: the run has not begun.
        """
        if self.started is None:
            raise UserError(
                f"accelerator.{caller} was called before the loop. Call it for batches of the "
                "first DataLoader that was prepared, which supplies the training data."
            )
        return self.started

    def _start(self) -> DataParallel:
        if self.loader is None or not self.models or not self.optimizers:
            raise UserError(
                "accelerator.prepare() was not called with a model, an optimizer and a DataLoader "
                "to train with. Prepare all three, in one call or several, before the loop."
            )
        if len(self.optimizers) > 1 or len(self.schedulers) > 1:
            raise UserError(
                "accelerator.prepare: expected one optimizer and at most one scheduler, got "
                f"{len(self.optimizers)} and {len(self.schedulers)}; put all parameters into the "
                "groups of one optimizer, or use DataParallel, which takes several"
            )
        self._until_start.remove()
        scheduler = self.schedulers[0] if self.schedulers else None
        settings = {**self.settings, **self._scheduled_length(scheduler)}
        models = self._trained_models()
        model = models[0] if len(models) == 1 else nn.ModuleList(models)
        run = DataParallel(model, optimizer=self.optimizers[0], scheduler=scheduler, **settings)
        run.end_with_script(self.end)
        # Afterwards a model is the trained one of all workers, which a script may save.
        for each in models:
            self._hooks.add(
                each,
                each.register_state_dict_pre_hook,
                lambda *_: self.complete(),
                before_copy=self.complete,
            )
        return run

    def _trained_models(self) -> list[nn.Module]:
        """Return the prepared models whose parameters the optimizer has."""
        trained = {p for group in self.optimizers[0].param_groups for p in group["params"]}
        models = [each for each in self.models if not trained.isdisjoint(each.parameters())]
        if not models:
            raise UserError(
                "accelerator.prepare: the optimizer has no parameter of a prepared model. Pass "
                "the model that it trains to prepare() too."
            )
        return models

    def _scheduled_length(self, scheduler: LRScheduler | None) -> dict[str, Any]:
        """Return the length with which the run advances the scheduler as accelerate does.

        With ``steps``, a run advances it once per step of all workers, otherwise once per step of
        any worker. Accelerate advances it once per step of any worker, or once per step of all if
        they split each batch.
        """
        if scheduler is None or self._split_batches == ("steps" in self.settings):
            return {}
        if self._split_batches:
            raise UserError(
                "split_batches=True with a prepared scheduler requires the length in steps. Pass "
                "steps= instead of epochs= or samples=."
            )
        assert self.loader is not None
        default = RunOptions.model_fields["batch_size"].default
        loader = self.loader.loader
        batch = loader.batch_size or self.settings.get("batch_size")
        batch = batch or getattr(loader.batch_sampler, "batch_size", None) or default
        samples = self.settings["steps"] * self._accumulate * batch * self.job.workers
        return {"steps": None, "samples": samples}

    # -- batches and steps --------------------------------------------------------------------
    def begin_batch(self) -> None:
        """Note a batch of the training data."""
        self.is_evaluating = self.is_marked = self.is_computed = False
        self._batches += 1

    def end_batch(self) -> None:
        """End a batch when the loop requests the next one: one without a step accumulates.

        Raises:
            UserError: the batch should have ended in a step.
        """
        if self._loss is None:
            return
        if self.run.completes_step:
            raise UserError(
                "accelerator: optimizer.step() was not called after backward(), in steps of "
                f"accumulate={self._accumulate} batches. If the script accumulates gradients by "
                "itself, pass Accelerator(accumulate=K) with its number of batches per step, or "
                "use accelerator.accumulate(model). Skip batches before backward()."
            )
        self._take_step()

    def backward(self, loss: Tensor, scales: bool, **how: Any) -> None:
        """Run backward; ``scales`` the loss for float16, and ``how`` is passed to ``backward``."""
        self.is_computed = True
        if self._accumulates:
            loss = loss / self._accumulate
        (self.run.scale(loss) if scales else loss).backward(**how)
        value = loss.detach()
        self._loss = value if self._loss is None else self._loss + value

    def step(self) -> None:
        """Hand the gradients of a batch to the run.

        Raises:
            UserError: the script steps too early, or never steps its prepared scheduler.
        """
        run = self.begun("prepare(optimizer).step")
        self.is_computed = True
        if self._accumulates and not self.is_marked:
            raise UserError(
                f"gradient_accumulation_steps={self._accumulate} requires "
                "`with accelerator.accumulate(model):` around each batch. If the script "
                "accumulates gradients by itself, pass Accelerator(accumulate=K) instead."
            )
        completes = run.completes_step
        if not (self._accumulates or completes):
            raise UserError(
                f"accelerator: optimizer.step() was called after batch {self._batches}, but steps "
                f"of accumulate={self._accumulate} batches were requested. Step after the last of "
                f"them, as with `if (step + 1) % {self._accumulate} == 0`, or use "
                "accelerator.accumulate(model)."
            )
        if completes:
            self._check_scheduler(self._scheduler_steps or not self._steps)
            self._steps += 1
            self._scheduler_steps = 0
        self._take_step()

    def _take_step(self) -> None:
        loss, self._loss = self._loss, None
        if self.states.objects:
            self.states.note(self.run)
        self.run.step(loss)

    def step_scheduler(self) -> None:
        """Note a step of the prepared scheduler, which the run makes itself."""
        if self.started is not None and self.started.completes_step:
            self._scheduler_steps += 1
            self._check_scheduler(self._scheduler_steps == 1)

    def _check_scheduler(self, is_stepped_once: object) -> None:
        if self.schedulers and not is_stepped_once:
            raise UserError(
                "accelerator: a prepared scheduler advances with every step, but the script does "
                "not call its step() once for each optimizer.step(). Leave a scheduler that "
                "advances by epochs out of prepare()."
            )

    # -- the end --------------------------------------------------------------------------------
    def complete(self) -> None:
        """Complete the run if this worker has made its last step, so that its model is final."""
        run = self.started
        if run is not None and not (run.is_server or run.is_over or run.has_batches):
            _ = run.summary

    def end(self) -> None:
        """End the run for all workers."""
        if self.started is None:
            return
        if self.loader is not None:
            self.loader.close()
        _ = self.started.summary


_NOTHING = object()


def _copied(batch: Any) -> Any:
    """Return a batch that remains as it is if the script takes items out of ``batch``."""
    return copy.copy(batch) if isinstance(batch, Mapping | list) else batch


class TrainingLoader:
    """A DataLoader that yields one epoch of the run per iteration over it.

    Args:
        given: the script's loader.
        training: the run.
        split_batches: the loader's batches are for all workers together.
    """

    def __init__(self, given: DataLoader[Any], training: Training, split_batches: bool) -> None:
        self.given = given
        self.loader = _split(given, training.job.workers) if split_batches else given
        self._training = training
        self._epochs: Iterator[Epoch] | None = None
        self._epoch: Epoch | None = None
        self._requested = 0
        self._unused: Any = _NOTHING
        self._error: UserError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Return a worker's batches per epoch if all workers are equally fast."""
        whole, rest = divmod(len(self.loader), self._training.job.workers)
        return whole + bool(rest and not self.loader.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the run calls ``set_epoch()`` of the data set and of the samplers."""

    def __iter__(self) -> EpochBatches:
        """Return an iterator over the batches of the next epoch."""
        return EpochBatches(self._epoch_batches(), self._training)

    def _epoch_batches(self) -> Iterator[Any]:
        """Yield the batches of the next epoch; none for epochs completed before a resume.

        A first batch that the script only looks at, as with ``next(iter(loader))``, is yielded
        again.
        """
        if self._error is not None:
            raise self._error
        run = self._training.run
        if self._epochs is None:
            self._epochs = run.epochs(self.loader)
            self._epoch = next(self._epochs, None)
            self._training.states.restore(run)
            if self._training.states.is_loaded and self._epoch is not None:
                self._requested = int(self._epoch)  # the script skips the epochs before
        number, self._requested = self._requested, self._requested + 1
        if number >= run.epoch_count:
            self._refuse(run)
        if self._epoch is None or int(self._epoch) > number:
            return
        is_first = True
        try:
            for batch in self._batches():
                kept = _copied(batch) if is_first else None
                self._training.begin_batch()
                yield batch
                self._training.end_batch()
                is_first = False
        except GeneratorExit:  # the epoch was left
            if is_first and not self._training.is_computed:
                self._unused, self._requested = kept, number
                raise
            try:
                self._advance()
            except UserError as error:  # Python ignores it while it closes a generator
                self._error = error
            raise
        self._advance()

    def _batches(self) -> Iterator[Any]:
        """Yield the unused batch, if any, and the remaining ones of the epoch."""
        if self._unused is not _NOTHING:
            batch, self._unused = self._unused, _NOTHING
            yield batch
        while self._epoch is not None and (batch := next(self._epoch, _NOTHING)) is not _NOTHING:
            yield batch

    def _advance(self) -> None:
        """End the epoch; the last one stays open for figures of the script."""
        if self._epochs is not None:
            self._epoch = next(self._epochs, None) if self._training.run.has_batches else None

    def _refuse(self, run: DataParallel) -> None:
        """Refuse an epoch beyond the end of the run; let servers leave endless loops."""
        if run.is_server:
            sys.exit()
        raise UserError(
            f"accelerator: the run has ended after {run.epoch_count} epochs, but the loop begins "
            "another one. Pass the length of the loop to Accelerator, as epochs= or steps=. Loops "
            "over a number of steps need a synchronous algorithm, such as ar-sgd."
        )

    def close(self) -> None:
        """Leave the run's epochs."""
        self._epoch = None
        self._epochs = iter(())


class EpochBatches(Iterator[Any]):
    """The batches of an epoch, whose end a server can tell from a missing batch."""

    def __init__(self, batches: Iterator[Any], training: Training) -> None:
        self._batches = batches
        self._training = training

    def __next__(self) -> Any:
        batch = next(self._batches, _NOTHING)
        if batch is not _NOTHING:
            return batch
        raise ServedError if self._training.run.is_server else StopIteration


class EvaluationLoader:
    """A DataLoader of which every rank has all batches, on its device."""

    def __init__(self, loader: DataLoader[Any], training: Training) -> None:
        self.loader = loader
        self._training = training

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        device = self._training.job.device(self._training.settings.get("device", "auto"))
        deliver = Delivery(device, channels_last=False)
        for batch in self.loader:
            self._training.is_evaluating = True
            yield deliver(batch)


class PreparedOptimizer(torch.optim.Optimizer):
    """An optimizer whose ``step()`` is the run's; everything else is the wrapped optimizer's.

    A torch scheduler can be made of it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, training: Training) -> None:
        # Optimizer's own constructor would create groups.
        self.optimizer = optimizer
        self._training = training

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Hand the gradients of the batch to the run.

        Raises:
            UserError: ``closure`` is given.
        """
        if closure is not None:
            raise UserError("optimizer.step: closures are not supported. Leave the closure out.")
        self._training.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the run clears the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state before the loop."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group before the loop."""
        self.optimizer.add_param_group(param_group)

    def __repr__(self) -> str:
        return repr(self.optimizer)


class ManagedScheduler:
    """A scheduler that the run advances; everything else is the wrapped scheduler's."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def step(self) -> None:
        """Do nothing: the run advances the scheduler."""


class PreparedScheduler(ManagedScheduler):
    """A scheduler of a script for accelerate."""

    def __init__(self, scheduler: LRScheduler, training: Training) -> None:
        super().__init__(scheduler)
        self._training = training

    def step(self) -> None:
        """Do nothing but check: the run advances the scheduler."""
        self._training.step_scheduler()


KEPT_ARGUMENTS = (
    *("num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers", "in_order"),
)
"""Arguments of a DataLoader that do not depend on the size of its batches."""


def _split(loader: DataLoader[Any], workers: int) -> DataLoader[Any]:
    """Return the loader with a worker's part of its batches."""
    if workers == 1:
        return loader
    size, rest = divmod(loader.batch_size or 0, workers)
    if rest or not size or type(loader) is not DataLoader:
        raise UserError(
            f"split_batches=True requires a DataLoader with a batch_size that {workers} workers "
            f"can divide, got {type(loader).__name__} with {loader.batch_size}; change its "
            "batch_size, or leave split_batches out"
        )
    sampler = None if isinstance(loader.dataset, IterableDataset) else loader.sampler
    kept = {name: getattr(loader, name) for name in KEPT_ARGUMENTS if hasattr(loader, name)}
    return DataLoader(loader.dataset, size, sampler=sampler, **kept)
