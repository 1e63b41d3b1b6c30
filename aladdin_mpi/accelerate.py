"""Replacement for Hugging Face's ``accelerate.Accelerator`` that trains with any algorithm.

An existing script changes in two lines, the import and the length of the run::

    from aladdin_mpi import Accelerator

    accelerator = Accelerator(algorithm="aladdin-ahead", epochs=3)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

Unsupported attributes raise an error that names them. ``accelerate`` itself is not required.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.general import LENGTHS
from aladdin_mpi.process import console
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.run.job import find_job
from aladdin_mpi.run.training_data import Epoch


class Accelerator:
    """The part of ``accelerate.Accelerator`` that training loops use, on a :class:`DataParallel`.

    On a server's rank, iterating over the loader serves the workers and yields no batch.

    Args:
        gradient_accumulation_steps: number of batches per step.
        mixed_precision: "no", or None to read ``ACCELERATE_MIXED_PRECISION`` ("no" by default).
            For low precision, run forward and loss under ``torch.autocast``.
        settings: of :class:`DataParallel`, including the length (``epochs``, for example).

    Raises:
        UserError: the length is missing, or ``mixed_precision`` is not "no".
    """

    def __init__(
        self,
        gradient_accumulation_steps: int = 1,
        mixed_precision: str | None = None,
        **settings: Any,
    ) -> None:
        if mixed_precision is None:
            mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
        if mixed_precision != "no":
            raise UserError(
                f"mixed_precision: expected 'no', got {mixed_precision!r}; put the forward pass "
                "and the loss into torch.autocast(device, torch.bfloat16)"
            )
        if not any(name in settings for name in LENGTHS):
            raise UserError(
                "Accelerator requires the length of the run. Pass epochs=, the number of epochs "
                "of your loop."
            )
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self._settings = settings
        self._run: DataParallel | None = None
        self._loader: PreparedLoader | None = None
        self._loss: Tensor | None = None
        # Attributes that a script reads before prepare() must not depend on other ranks.
        self._job = find_job(settings)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UserError(
            f"accelerator.{name} does not exist in aladdin_mpi.Accelerator. Use run_dir=, "
            "checkpoint_every= and resume= for checkpoints, and the methods of DataParallel for "
            "the rest (docs/troubleshooting.md)."
        )

    # -- before the loop --------------------------------------------------------------------
    def prepare(self, *given: Any) -> Any:
        """Attach model, optimizer, loader and scheduler to the run, and return them in order.

        The first DataLoader supplies the training data. Others are returned unchanged: every rank
        evaluates all of their samples.

        Raises:
            UserError: a model, an optimizer or a loader is missing, or there are two models.
        """
        if self._run is None:
            self._start(given)
        assert self._loader is not None
        wrapped = [self._wrapped(each) for each in given]
        return wrapped[0] if len(wrapped) == 1 else tuple(wrapped)

    def _start(self, given: Iterable[Any]) -> None:
        model = _one(given, nn.Module, "model", "put several into one nn.ModuleList")
        optimizer = _one(given, torch.optim.Optimizer, "optimizer", "call prepare() once, with all")
        loaders = [each for each in given if isinstance(each, DataLoader)]
        schedulers = [each for each in given if isinstance(each, LRScheduler)]
        if not loaders:
            raise UserError(
                "accelerator.prepare requires a DataLoader to train with. Call prepare() once, "
                "with model, optimizer, loader and scheduler."
            )
        self._run = DataParallel(
            model,
            optimizer=optimizer,
            scheduler=schedulers[0] if schedulers else None,
            accumulate=self.gradient_accumulation_steps,
            **self._settings,
        )
        self._loader = PreparedLoader(self._run, loaders[0])

    def _wrapped(self, each: Any) -> Any:
        assert self._loader is not None
        if each is self._loader.loader:
            return self._loader
        if isinstance(each, torch.optim.Optimizer):
            return PreparedOptimizer(each, self)
        return PreparedScheduler(each) if isinstance(each, LRScheduler) else each

    # -- in the loop --------------------------------------------------------------------------
    def backward(self, loss: Tensor) -> None:
        """Run backward from ``loss``, divided by ``gradient_accumulation_steps``."""
        self._loss = loss / self.gradient_accumulation_steps
        self._loss.backward()

    def step(self) -> None:
        """Hand the gradients of a batch to the run, as a prepared ``optimizer.step()`` does."""
        self.run.step(self._loss)
        self._loss = None

    def accumulate(self, *models: nn.Module) -> nullcontext[None]:
        """Return a context that does nothing: the run knows which batches make a step."""
        return nullcontext()

    @property
    def sync_gradients(self) -> bool:
        """Whether this batch is the last of its step."""
        return self.run.completes_step

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> None:
        """Clip the gradient of this step to ``max_norm``, over all trained parameters.

        Raises:
            UserError: ``norm_type`` is not 2.
        """
        if norm_type != 2:
            raise UserError(f"norm_type: expected 2, got {norm_type}; leave it out")
        if self.sync_gradients:
            self.run.clip_grad_norm_(max_norm)

    # -- the run and its ranks --------------------------------------------------------------------
    @property
    def run(self) -> DataParallel:
        """The underlying run.

        Raises:
            UserError: :meth:`prepare` has not been called.
        """
        if self._run is None:
            raise UserError(
                "accelerator: prepare() was not called. Call accelerator.prepare(model, "
                "optimizer, loader) first."
            )
        return self._run

    @property
    def device(self) -> torch.device:
        """The device of the model and of the batches."""
        if self._run is None:
            return self._job.device(self._settings.get("device", "auto"))
        return self._run.device

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first worker."""
        return self._job.is_first if self._run is None else self._run.is_first

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first worker on its host."""
        return self._job.is_first_of_host

    @property
    def num_processes(self) -> int:
        """The number of workers."""
        return self._job.workers if self._run is None else self._run.workers

    def print(self, *values: object, **how: Any) -> None:
        """Print on the first worker of each host; ``how`` is passed to Python's ``print``."""
        if self.is_local_main_process and how:
            print(*values, **how)
        elif self.is_local_main_process:
            console.say(" ".join(map(str, values)), sys.stdout)

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        """Add figures to the run's metrics; ``step`` is ignored, as the run counts its samples."""
        if not self.run.is_server:
            self.run.log(**values)

    def reduce(self, tensor: Tensor, reduction: str = "mean") -> Tensor:
        """Return the "mean" or "sum" over all workers; on a server, ``tensor`` itself."""
        if self.run.is_server:
            return tensor
        return self.run.reduce(tensor, "sum" if reduction == "sum" else "mean").to(tensor)

    def wait_for_everyone(self) -> None:
        """Wait for all workers; return at once after the end of the run, which has synchronised."""
        if not self.run.is_server and not self.run.is_over:
            self.run.reduce(0.0)

    def gather_for_metrics(self, values: Any) -> Any:
        """Return ``values`` unchanged: every rank evaluates all samples."""
        return values

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return ``model`` unchanged: models are not wrapped."""
        return model

    def save(self, values: Any, path: str | Path) -> None:
        """Save ``values`` with ``torch.save`` on the first worker."""
        if self.is_main_process:
            torch.save(values, path)

    def end_training(self) -> None:
        """End the run for all workers if the loop was left before its last epoch."""
        if self._loader is not None:
            self._loader.close()


class PreparedLoader:
    """A DataLoader that yields one epoch of the run per iteration over it."""

    def __init__(self, run: DataParallel, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self._run = run
        self._epochs: Iterator[Epoch] | None = None
        self._next: Epoch | None = None
        self._requested = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Return a worker's batches per epoch if all workers are equally fast."""
        whole, rest = divmod(len(self.loader), self._run.workers)
        return whole + bool(rest and not self.loader.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch; none for epochs completed before a resume."""
        if self._epochs is None:
            self._epochs = self._run.epochs(self.loader)
            self._next = next(self._epochs, None)
        number, self._requested = self._requested, self._requested + 1
        epoch = self._next
        if epoch is None or int(epoch) > number:
            return
        try:
            yield from epoch
        finally:
            self._next = next(self._epochs, None)

    def close(self) -> None:
        """Leave the run's epochs, which ends the run for all workers."""
        self._next = self._epochs = None
        _ = self._run.summary


class PreparedOptimizer:
    """An optimizer whose ``step()`` is the run's; everything else is the wrapped optimizer's."""

    def __init__(self, optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> None:
        self.optimizer = optimizer
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self) -> None:
        """Hand the gradients of the batch to the run."""
        self._accelerator.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the run clears the gradients."""


class PreparedScheduler:
    """A scheduler that the run steps; everything else is the wrapped scheduler's."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def step(self) -> None:
        """Do nothing: the run advances the scheduler."""


def _one(given: Iterable[Any], kind: type, name: str, remedy: str) -> Any:
    matches = [each for each in given if isinstance(each, kind)]
    if len(matches) != 1:
        raise UserError(f"accelerator.prepare: expected one {name}, got {len(matches)}; {remedy}")
    return matches[0]
