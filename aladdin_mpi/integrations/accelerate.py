"""Replacement for Hugging Face's ``accelerate.Accelerator`` that trains with any algorithm.

An existing script changes in two lines, the import and the length of the run::

    from aladdin_mpi import Accelerator

    accelerator = Accelerator(epochs=3)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

Unsupported attributes raise an error that names them. ``accelerate`` itself is not required.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.gradients import Hooks
from aladdin_mpi.hooks.user_metrics import TAKEN, number_in
from aladdin_mpi.integrations.training import (
    PreparedOptimizer,
    PreparedScheduler,
    Training,
)
from aladdin_mpi.options.general import LENGTHS
from aladdin_mpi.process import console, extras, guard
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.run.job import find_job

DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of each ``mixed_precision``."""
NO_ARGUMENTS = (
    *("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin"),
    *("torch_tp_plugin", "parallelism_config", "dynamo_backend", "dynamo_plugin"),
    "rng_types",
)
"""Arguments of accelerate that must be None."""
NO_EFFECT = ("DistributedDataParallelKwargs", "InitProcessGroupKwargs")
"""``kwargs_handlers`` that configure torch.distributed, which is not used."""
CHECKPOINTS = (
    "The run writes and reads checkpoints itself: pass run_dir=, checkpoint_every= and "
    'resume="auto" to Accelerator.'
)
REMEDIES = {
    "save_iteration": CHECKPOINTS,
    "split_between_processes": "Take every n-th item by process_index and num_processes.",
    "clip_grad_value_": "Use clip_grad_norm_.",
    "save_model": "Save get_state_dict(model) with accelerator.save.",
}


class Accelerator:
    """The part of ``accelerate.Accelerator`` that training scripts use, on a :class:`DataParallel`.

    ``prepare`` may be called several times, in any order. The run begins with the first batch of
    the training data. On a server's rank, iterating over them serves the workers and yields no
    batch; in an endless loop over batches, it then ends the process.

    Methods and arguments without a description are those of accelerate 1.

    Args:
        gradient_accumulation_steps: number of batches per step, inside :meth:`accumulate`. Every
            step has as many: it may cross the end of an epoch.
        mixed_precision: "no", "bf16" or "fp16", for the prepared models' forward passes; None
            reads ``ACCELERATE_MIXED_PRECISION`` ("no" by default).
        split_batches: the batches of the training data are for all workers together.
        cpu: train on the CPU.
        step_scheduler_with_optimizer: False: the script steps prepared schedulers itself.
        settings: of :class:`DataParallel`, including the length (``epochs``, for example). With
            ``accumulate``, the script accumulates gradients by hand, over that many batches.

    Raises:
        UserError: the length is missing, or an argument is not supported.
    """

    def __init__(
        self,
        *,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Iterable[Any] | None = None,
        project_dir: str | Path | None = None,
        project_config: Any = None,
        log_with: Any = None,
        **settings: Any,
    ) -> None:
        if mixed_precision is None:
            mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
        if mixed_precision not in DTYPES:
            raise UserError(
                f"mixed_precision: expected 'no', 'bf16' or 'fp16', got {mixed_precision!r}; use "
                "one of them"
            )
        _refuse_arguments(settings, device_placement, kwargs_handlers or ())
        if not any(settings.get(name) is not None for name in LENGTHS):
            raise UserError(
                "Accelerator requires the length of the run. Pass epochs=, the number of epochs "
                "of your loop, or steps=, its number of optimizer steps."
            )
        if gradient_accumulation_plugin is not None:
            gradient_accumulation_steps = gradient_accumulation_plugin.num_steps
        if cpu:
            settings["device"] = "cpu"
        self.mixed_precision = mixed_precision
        self.split_batches = split_batches or getattr(dataloader_config, "split_batches", False)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.project_dir = getattr(project_config, "project_dir", None) or project_dir
        self.logging_dir = getattr(project_config, "logging_dir", None) or self.project_dir
        self.log_with = log_with
        self.trackers: list[Any] = []
        self.scaler = None  # the run scales losses by itself
        self._clip = settings.get("clip")
        self._warned = self._is_triggered = False
        self._hooks = Hooks()
        # Attributes that a script reads before the run must not depend on other ranks.
        self._job = find_job(settings)
        self._training = Training(self._job, settings, self.split_batches)
        if gradient_accumulation_steps > 1:
            self.gradient_accumulation_steps = gradient_accumulation_steps

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        remedy = REMEDIES.get(
            name, "docs/accelerate.md lists what exists; accelerator.run is the DataParallel."
        )
        raise UserError(f"accelerator.{name} does not exist in aladdin_mpi.Accelerator. {remedy}")

    # -- before the loop --------------------------------------------------------------------
    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of batches of a step that ``accumulate()`` marks."""
        return self._training.accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._training.accumulate(steps)

    def prepare(self, *given: Any, device_placement: Any = None) -> Any:
        """Attach models, an optimizer, loaders and a scheduler to the run; return them in order.

        The first DataLoader of all calls supplies the training data. Of the others, every rank
        receives all batches, and so evaluates all samples. The optimizer decides which models are
        trained.
        """
        prepared = tuple(map(self._prepare, given))
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare(self, each: Any) -> Any:
        training = self._training
        if isinstance(each, PreparedOptimizer | PreparedScheduler):
            return each
        if isinstance(each, nn.Module):
            return self._prepare_model(each)
        if isinstance(each, DataLoader):
            return training.add_loader(each)
        if isinstance(each, torch.optim.Optimizer):
            self._check_not_started("optimizer")
            training.optimizers.append(each)
            return PreparedOptimizer(each, training)
        if isinstance(each, LRScheduler) and self.step_scheduler_with_optimizer:
            self._check_not_started("scheduler")
            training.schedulers.append(each)
            return PreparedScheduler(each, training)
        return each

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        if any(model is each for each in self._training.models):
            return model
        self._training.add_model(model)
        if DTYPES[self.mixed_precision] is not None:
            self._cast_forward(model)
        return model.to(self.device)

    def _cast_forward(self, model: nn.Module) -> None:
        """Run the model's forward pass in autocast, with outputs in float32, like accelerate."""
        entered: list[AbstractContextManager[Any]] = []

        def enter(*_: Any) -> None:
            entered.append(self.autocast())
            entered[-1].__enter__()

        def leave(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            entered.pop().__exit__(None, None, None)
            return tree_map(_in_float32, outputs)

        self._hooks.add(model, model.register_forward_pre_hook, enter)
        self._hooks.add(model, model.register_forward_hook, leave, always_call=True)

    def _check_not_started(self, name: str) -> None:
        if self._training.started is not None:
            raise UserError(
                f"accelerator.prepare: a further {name} was passed after the loop began. Train "
                "one model after the other with an Accelerator each."
            )

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        """Start the trackers of ``log_with`` on the main process; requires ``accelerate``.

        Raises:
            UserError: ``accelerate`` is not installed, or it has no such tracker.
        """
        if self.log_with is None or not self.is_main_process:
            return
        extras.need("accelerate", "Accelerator(log_with=)")
        from aladdin_mpi.integrations.trackers import make_trackers

        where = self.logging_dir, self.device, project_name
        self.trackers = make_trackers(self.log_with, *where, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by its name; elsewhere than on the main process one without effect.

        Raises:
            UserError: no tracker has this name.
        """
        if not self.is_main_process:
            extras.need("accelerate", "accelerator.get_tracker")
            from aladdin_mpi.integrations.trackers import blank

            return blank()
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        raise UserError(
            f"accelerator.get_tracker: {name!r} was not started. Pass it as log_with, and call "
            "init_trackers()."
        )

    # -- in the loop --------------------------------------------------------------------------
    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """Return a context for ``mixed_precision``."""
        dtype = DTYPES[self.mixed_precision]
        if dtype is None:
            return nullcontext()
        is_enabled = getattr(autocast_handler, "enabled", True)
        return torch.autocast(self.device.type, dtype, enabled=is_enabled)

    def backward(self, loss: Tensor, **how: Any) -> None:
        """Run backward from ``loss``, divided by ``gradient_accumulation_steps``.

        Args:
            loss: of the batch.
            how: arguments of ``Tensor.backward``.
        """
        self._training.backward(loss, self.mixed_precision == "fp16", **how)

    def accumulate(self, *models: nn.Module) -> nullcontext[None]:
        """Mark a batch of ``gradient_accumulation_steps``; the run knows which make a step."""
        self._training.is_marked = True
        return nullcontext()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context for all backward passes of a batch except its last."""
        return self._training.begun("no_sync").accumulate()

    @property
    def sync_gradients(self) -> bool:
        """Whether this batch is the last of its step."""
        run = self._training.started
        return run is None or run.completes_step

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip the gradient of the whole step to ``max_norm``; return the present one's norm.

        The norm that is clipped is that of the workers' mean gradient with ``ar-sgd``, and of each
        worker's gradient otherwise; the returned one is of this worker's gradient so far. Call it
        in every step: the gradient is then sent after backward, not during it. If the option
        ``clip`` is set, it clips instead, without that cost.

        Args:
            parameters: all trained parameters.
            max_norm: largest norm.
            norm_type: 2.

        Raises:
            UserError: another ``norm_type``, other parameters, or another norm than ``clip``.
        """
        run = self._training.begun("clip_grad_norm_")
        if norm_type != 2:
            raise UserError(f"norm_type: expected 2, got {norm_type}; leave it out")
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        trained = {each for each in run.module.parameters() if each.requires_grad}
        if {each for each in given if each.requires_grad} != trained:
            raise UserError(
                "accelerator.clip_grad_norm_: expected all trained parameters, got "
                f"{len(given)} tensors, others than the {len(trained)} that are trained; pass "
                "model.parameters()"
            )
        norm = self._norm(given)
        if self._clip is not None and self._clip != max_norm:
            raise UserError(
                f"accelerator.clip_grad_norm_: max_norm {max_norm} cannot be combined with "
                f"clip={self._clip}. Leave clip out."
            )
        if self._clip is None and run.completes_step:
            run.clip_grad_norm_(max_norm)
        return norm

    def _norm(self, parameters: Iterable[Tensor]) -> Tensor:
        norms = [each.grad.norm() for each in parameters if each.grad is not None]
        norm = torch.stack(norms).norm() if norms else torch.zeros(())
        is_scaled = self.mixed_precision == "fp16"
        return norm / self.run.scale(torch.ones_like(norm)) if is_scaled else norm

    def set_trigger(self) -> None:
        """Set the flag that :meth:`check_trigger` reads on all workers."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Return whether any worker has set the flag, and reset it; every worker has to call it."""
        value, self._is_triggered = float(self._is_triggered), False
        run = self._training.begun("check_trigger")
        return bool(value if run.is_server else run.reduce(value, "sum") > 0)

    # -- figures of several ranks -------------------------------------------------------------
    def gather(self, tensor: Any) -> Any:
        """Return the workers' tensors of one training batch, joined along the first dimension.

        In an evaluation, which is the time from a batch of another prepared loader to the next
        training batch, return ``tensor`` unchanged: every rank evaluates all samples.

        Raises:
            UserError: the tensors differ in size.
        """
        return tensor if self._is_complete() else tree_map(self._gather, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the same as :meth:`gather`."""
        return self.gather(input_data)

    def _gather(self, tensor: Any) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise UserError(
                f"accelerator.gather: expected tensors, got {type(tensor).__name__}; convert it "
                "with torch.tensor()"
            )
        sizes = self.run.gather(tensor.numel())
        if sizes.unique().numel() > 1:
            raise UserError(
                f"accelerator.gather: the workers' tensors differ in size: {sizes.int().tolist()} "
                "values. Gather tensors of one size, such as the mean loss."
            )
        return self.run.gather(tensor).to(tensor).reshape(-1, *tensor.shape[1:])

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Return ``tensor`` unchanged in an evaluation, in which every rank has all samples.

        Raises:
            UserError: it was called while training.
        """
        if not self._is_complete():
            raise UserError(
                "accelerator.pad_across_processes is supported in evaluations only. Pad the "
                "tensors to a fixed size."
            )
        return tensor

    def reduce(self, tensor: Any, reduction: str = "sum") -> Any:
        """Return the "sum" or "mean" of the workers' tensors of one training batch.

        In an evaluation, return ``tensor`` unchanged, as :meth:`gather` does.

        Raises:
            UserError: unknown reduction.
        """
        if reduction not in ("sum", "mean", "none"):
            raise UserError(
                f"accelerator.reduce: expected 'sum', 'mean' or 'none' as reduction, got "
                f"{reduction!r}; use one of them"
            )
        if reduction == "none" or self._is_complete():
            return tensor
        how: Any = reduction
        return tree_map(lambda each: self.run.reduce(each, how).to(each), tensor)

    def _is_complete(self) -> bool:
        """Return whether figures of this rank are about all samples, or of no worker."""
        if self._training.is_evaluating or self.num_processes == 1:
            return True
        return self._training.begun("gather, or reduce,").is_server

    def wait_for_everyone(self) -> None:
        """Wait for all ranks before the loop, and for all workers in it.

        With asynchronous algorithms, whose workers have different numbers of batches, do nothing in
        the loop. After the last step, complete the run: the model is then the trained one of all
        workers.
        """
        run = self._training.started
        if run is None:
            self._job.wait()
        elif not run.is_server:
            self._training.complete()
            if not run.is_over and run.algorithm.lockstep:
                run.reduce(0.0)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Execute the block on the main process before the others."""
        with self._first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Execute the block on the main process of each host before the others."""
        with self._first(self.is_local_main_process):
            yield

    @contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        yield
        if is_first:
            self.wait_for_everyone()

    # -- the run and its ranks --------------------------------------------------------------------
    @property
    def run(self) -> DataParallel:
        """The underlying run, which begins now if it has not; every rank has to read it.

        Raises:
            UserError: :meth:`prepare` was not called for model, optimizer and training data.
        """
        return self._training.run

    @property
    def state(self) -> Accelerator:
        """This object, which has the attributes of accelerate's ``AcceleratorState``."""
        return self

    def __repr__(self) -> str:
        return (
            f"Accelerator: {self.distributed_type}, process {self.process_index} of "
            f"{self.num_processes}, device {self.device}, mixed precision {self.mixed_precision}"
        )

    @property
    def device(self) -> torch.device:
        """The device of the model and of the batches."""
        return self._job.device(self._training.settings.get("device", "auto"))

    @property
    def distributed_type(self) -> str:
        """The value of accelerate's ``DistributedType`` for several processes and this device."""
        if self.num_processes == 1:
            return "NO"
        kind = self.device.type
        return f"MULTI_{'GPU' if kind == 'cuda' else kind.upper()}"

    @property
    def use_distributed(self) -> bool:
        """Whether there are several workers."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first worker."""
        run = self._training.started
        return self._job.is_first if run is None else run.is_first

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first worker on its host."""
        return self._job.is_first_of_host

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last worker."""
        return self.process_index == self.num_processes - 1

    @property
    def process_index(self) -> int:
        """The number of this worker; servers have the numbers after those of the workers."""
        return self._job.index

    @property
    def local_process_index(self) -> int:
        """The number of this rank among those on its host, workers first."""
        return self._job.index_on_host

    @property
    def num_processes(self) -> int:
        """The number of workers."""
        return self._job.workers

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function that only the first worker executes."""
        return _only_if(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function that only the first worker on each host executes."""
        return _only_if(lambda: self.is_local_main_process, function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int = 0
    ) -> Callable[..., Any]:
        """Decorate a function that only one worker executes."""
        if function is None:
            return partial(self.on_process, process_index=process_index)
        return _only_if(lambda: self.process_index == process_index, function)

    # -- output -----------------------------------------------------------------------------------
    def print(self, *values: object, **how: Any) -> None:
        """Print on the first worker of each host; ``how`` is passed to Python's ``print``."""
        if self.is_local_main_process and how:
            print(*values, **how)
        elif self.is_local_main_process:
            console.say(" ".join(map(str, values)), sys.stdout)

    def log(
        self, values: dict[str, float], step: int | None = None, log_kwargs: Any = None
    ) -> None:
        """Add figures to the run's metrics, averaged over the workers, and to the trackers.

        The run's metrics ignore ``step``, as they count samples, and omit reserved names, such
        as ``loss``, what is not a number, and what is logged before the loop. Without trackers, a
        warning is printed after the end of the run.
        """
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))
        run = self._training.started
        if run is None or run.is_server:
            return
        if not run.is_over:
            run.log(**_numbers_in(values))
        elif not (self._warned or self.trackers) and self.is_main_process:
            self._warned = True
            guard.warn(["accelerator.log was called after the end of the run, without effect"])

    def unwrap_model(self, model: nn.Module, *options: bool, **others: bool) -> nn.Module:
        """Return ``model`` unchanged: models are not wrapped."""
        return model

    # -- checkpoints ------------------------------------------------------------------------------
    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save the ``state_dict()`` of objects, as of the last step, in the run's checkpoints.

        It may contain tensors, numbers, strings, lists and dicts. Models, optimizers and schedulers
        that were prepared are saved anyway.

        Raises:
            UserError: an object has no state.
        """
        for each in objects:
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise UserError(
                    "accelerator.register_for_checkpointing: expected objects with state_dict() "
                    f"and load_state_dict(), got {type(each).__name__}; leave it out"
                )
        self._training.states.objects += objects

    def save_state(
        self, output_dir: str | Path | None = None, safe_serialization: bool = True, **how: Any
    ) -> str:
        """Request a checkpoint of the run, which :meth:`load_state` finds by ``output_dir``.

        It is written into the run folder (``run_dir``), which contains the last one only, as soon
        as the workers have computed the batches granted so far. Every process has to call this.

        Args:
            output_dir: folder for a file that names the checkpoint; by default ``project_dir``.
            safe_serialization: ignored.
            how: ignored.

        Returns:
            the folder.

        Raises:
            UserError: no folder, or the run has none.
        """
        folder = self._state_folder("save_state", output_dir)
        run = self._training.begun("save_state")
        if not run.is_server:
            self._training.states.save(run, folder)
        return str(folder)

    def load_state(self, input_dir: str | Path | None = None, **how: Any) -> None:
        """Resume the run from the state that was saved last, in ``input_dir``.

        Call it before the loop. The run continues at the sample, so that the loop's first epoch is
        the rest of the one in which the state was saved.

        Raises:
            UserError: the loop has begun, or the folder has no state, or another than the last.
        """
        if self._training.started is not None:
            raise UserError(
                "accelerator.load_state was called after the loop began. Call it before the loop."
            )
        self._training.load(self._state_folder("load_state", input_dir))

    def _state_folder(self, name: str, given: str | Path | None) -> Path:
        folder = given or self.project_dir
        if folder is None:
            raise UserError(
                f"accelerator.{name} requires a folder. Pass it, or project_dir= to Accelerator."
            )
        return Path(folder)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return ``dataloader`` unchanged after :meth:`load_state`, as the run has skipped them.

        Raises:
            UserError: the state of the run was not loaded.
        """
        if num_batches and not self._training.states.is_loaded:
            raise UserError(
                "accelerator.skip_first_batches requires a state loaded by load_state(). Skip "
                "batches in the loop, with continue before backward()."
            )
        return dataloader

    # -- models -----------------------------------------------------------------------------------
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the state of ``model``; after the last step, that of all workers' model."""
        return model.state_dict()

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Save ``obj`` with ``torch.save`` on the first worker.

        Raises:
            UserError: ``safe_serialization`` is set.
        """
        if safe_serialization:
            raise UserError(
                "accelerator.save: safe_serialization=True is not supported. Leave it out, or use "
                "safetensors on the main process."
            )
        if self.is_main_process:
            torch.save(obj, f)

    def end_training(self) -> None:
        """End the run, for all workers if the loop was left before its last epoch."""
        self._training.end()
        for tracker in self.trackers:
            tracker.finish()


def _refuse_arguments(
    settings: dict[str, Any], device_placement: bool, handlers: Iterable[Any]
) -> None:
    """Refuse arguments of accelerate that are not supported; take the others out."""
    wrong = [name for name in NO_ARGUMENTS if settings.pop(name, None) is not None]
    if not device_placement:
        wrong.append("device_placement=False")
    kinds = [type(each).__name__ for each in handlers]
    wrong += [f"kwargs_handlers: {kind}" for kind in kinds if kind not in NO_EFFECT]
    for name in wrong:
        raise UserError(
            f"{name} is not supported by aladdin_mpi.Accelerator. Leave it out "
            "(docs/troubleshooting.md)."
        )


def _only_if(condition: Callable[[], bool], function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if condition() else None

    return call


def _numbers_in(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures that the run can log; accelerate's trackers also take texts and dicts."""
    numbers = {name: number_in(value) for name, value in values.items() if name not in TAKEN}
    return {name: number for name, number in numbers.items() if number is not None}


def _in_float32(value: Any) -> Any:
    is_low = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_low else value
