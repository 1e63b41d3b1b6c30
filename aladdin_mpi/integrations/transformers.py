"""Replacement for Hugging Face's ``Trainer`` that trains with any algorithm.

An existing script changes in its imports, and names an algorithm::

    from aladdin_mpi.integrations.transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", algorithm="aladdin-ahead", num_train_epochs=3)
    trainer = Trainer(model, args, train_dataset=train_set)
    trainer.train()

Everything but the training loop is that of ``transformers``: optimizer, scheduler, losses,
callbacks, evaluation and saving. Arguments that cannot work are refused.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from aladdin_mpi import accelerator
from aladdin_mpi.control.exchange import all_or_none
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.general import AUTO, NEVER
from aladdin_mpi.process import extras
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.run.job import find_job

for _library in ("transformers", "accelerate"):
    extras.need(_library, __name__)

import transformers  # noqa: E402
from transformers.trainer_callback import ExportableState, TrainerState  # noqa: E402
from transformers.trainer_utils import TrainOutput, get_last_checkpoint  # noqa: E402

from aladdin_mpi.integrations.single_process import single_process  # noqa: E402

RUN = "run"
"""Name of the run folder, in ``output_dir``."""
STATE = "transformers"
"""Entry of ``run.state``."""

REFUSED = {
    "auto_find_batch_size": "set per_device_train_batch_size",
    "deepspeed": "train models that fit on one device",
    "enable_jit_checkpoint": "send SIGUSR1 to the job before its time limit",
    "fp16": "use bf16=True",
    "fsdp": "train models that fit on one device",
    "ignore_data_skip": "note that a resumed run continues at the sample",
    "parallelism_config": "train models that fit on one device",
    "push_to_hub": "push the trained model on the first worker, where is_world_process_zero()",
    "restore_callback_states_from_checkpoint": "note that callbacks start again in a resumed run",
    "torch_compile": "train without it",
}
"""Arguments that must not be set, and what to do instead."""
REFUSED_VALUES = {
    "include_num_input_tokens_seen": (("all", "non_padding"), "count tokens in a callback"),
    "lr_scheduler_type": (
        ("reduce_lr_on_plateau", "greedy"),
        "use one that depends only on the steps",
    ),
    "mixed_precision": (("fp16", "fp8"), "set ACCELERATE_MIXED_PRECISION to bf16, or unset it"),
    "train_sampling_strategy": (("batch_rebalance",), "use group_by_length"),
}
"""Values that arguments must not have, and what to do instead."""
OWNED = {
    "accumulate": "gradient_accumulation_steps",
    "algorithm": "algorithm",
    "batch_size": "per_device_train_batch_size",
    "clip": "max_grad_norm",
    "epochs": "num_train_epochs",
    "loader_start_method": "dataloader_multiprocessing_context",
    "loader_workers": "dataloader_num_workers",
    "lr": "learning_rate",
    "lr_schedule": "lr_scheduler_type",
    "optimizer": "optim",
    "resume": "resume_from_checkpoint",
    "run_dir": "output_dir",
    "samples": "num_train_epochs",
    "scheduler": "lr_scheduler_type",
    "seed": "data_seed",
    "steps": "max_steps",
    "tf32": "tf32",
    "warmup_epochs": "warmup_steps",
    "weight_decay": "weight_decay",
}
"""Options of :class:`DataParallel` that follow from other arguments of the Trainer."""


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """Arguments of ``transformers.TrainingArguments``, and those of the run.

    Args:
        algorithm: name of the algorithm.
        run_options: further options of :class:`DataParallel`, such as ``{"servers": 2,
            "aladdin_ahead": {"pi": 2}}``; also as a JSON object, for the command line.

    Raises:
        UserError: an argument that is not supported, or an option that another argument determines.
    """

    algorithm: str = field(default="aladdin-ahead", metadata={"help": "The training algorithm."})
    run_options: dict | str | None = field(  # as transformers declares its own, for its parser
        default=None,
        metadata={"help": "Further options of aladdin_mpi.DataParallel, as a JSON object."},
    )

    def __post_init__(self) -> None:
        given = _parsed(self.run_options)
        options = given if isinstance(given, dict) else {}
        # Before any error, so that one rank reports it and ends the others.
        self._job = find_job({**options, "algorithm": self.algorithm})
        _check_options(given)
        self.run_options = self._options = options
        for name, remedy in REFUSED.items():
            if getattr(self, name, None):  # some versions of transformers lack it
                raise UserError(
                    f"TrainingArguments: {name} is not supported. Leave it out, and {remedy}."
                )
        if self.data_seed is None:
            self.data_seed = self.seed  # on all ranks the same, whatever the script draws
        tf32 = self.tf32
        if self._job.rank < self._job.servers and accelerator.kind() is None:
            # A server needs no GPU, and accepts the precisions of the workers'.
            self.use_cpu, self.tf32 = True, None
        super().__post_init__()
        self.tf32 = tf32
        self._check_values()
        # The state of the optimizer is in the run's checkpoints.
        self.save_only_model = True

    def _check_values(self) -> None:
        for name, (values, remedy) in REFUSED_VALUES.items():
            value = getattr(self, name, None)
            text = getattr(value, "value", value)
            if text in values:
                raise UserError(
                    f"TrainingArguments: {name}={text} is not supported. Instead, {remedy}."
                )
        if getattr(self.accelerator_config, "split_batches", False):
            raise UserError(
                "TrainingArguments: split_batches of accelerator_config is not supported. Leave "
                "it out, and set per_device_train_batch_size to the batch of each worker."
            )

    @cached_property
    def _setup_devices(self) -> torch.device:
        """Return this rank's device; ``transformers`` has no public hook for its choice."""
        wanted = "cpu" if self.use_cpu else self._options.get("device", "auto")
        device = self._job.device(wanted)
        self.distributed_state = single_process(device)
        self._n_gpu = int(device.type != "cpu")
        return device

    @property
    def options(self) -> dict[str, Any]:
        """The further options of the run."""
        return self._options

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.output_dir or "") / RUN

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self._job.workers

    @property
    def process_index(self) -> int:
        """The number of this worker, from 0; servers follow the workers."""
        return self._job.index

    @property
    def local_process_index(self) -> int:
        """The number of this worker on its host, from 0; servers are never 0."""
        return self._job.index_on_host

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Do nothing: every rank does the work itself."""
        yield


def _parsed(given: Any) -> Any:
    """Return a copy of ``run_options``, as a dict if possible."""
    try:
        return json.loads(given) if isinstance(given, str) else dict(given or {})
    except (TypeError, ValueError):
        return given


def _check_options(options: Any) -> None:
    if not isinstance(options, dict):
        raise UserError(
            "TrainingArguments: run_options: expected a dict or a JSON object, got "
            f"""{options!r}; write for example '{{"servers": 2}}'"""
        )
    for name, owner in OWNED.items():
        if name in options:
            raise UserError(
                f"TrainingArguments: run_options: {name} follows from {owner}. Leave it out, and "
                f"set {owner}."
            )


# -- steps and their data -------------------------------------------------------------------------
@dataclass(frozen=True)
class TrainingLength:
    """Length of the training.

    Attributes:
        step: samples of a step of all workers.
        epoch: samples of an epoch.
        steps: steps of the run.
        epochs: length in epochs.
    """

    step: int
    epoch: int
    steps: int
    epochs: float

    @classmethod
    def of(cls, loader: DataLoader[Any], args: TrainingArguments) -> TrainingLength:
        """Return the length of a run over ``loader``, whose batches are steps of a worker.

        Raises:
            UserError: the data have no length, but something is due at the ends of epochs.
        """
        assert loader.batch_size is not None
        step = loader.batch_size * args.world_size
        if not isinstance(loader.dataset, IterableDataset):
            epoch = len(loader.sampler)  # type: ignore[arg-type]
            epoch -= epoch % step if loader.drop_last else 0
        elif _has_length(loader):
            epoch = len(loader) * loader.batch_size
        else:
            _refuse_epochs(args)
            epoch = args.max_steps * step
        epoch = max(1, epoch)  # DataParallel refuses data without samples
        if args.max_steps > 0:
            return cls(step, epoch, args.max_steps, args.max_steps * step / epoch)
        steps = max(1, math.ceil(args.num_train_epochs * epoch / step))
        return cls(step, epoch, steps, args.num_train_epochs)

    def epoch_of(self, step: int) -> int:
        """Return the number of epochs that are complete after ``step`` steps."""
        return math.ceil(self.epochs) if step >= self.steps else step * self.step // self.epoch


def _refuse_epochs(args: TrainingArguments) -> None:
    """Refuse events at the ends of epochs, which are unknown."""
    for name in ("eval_strategy", "save_strategy", "logging_strategy"):
        if getattr(args, name) == "epoch":
            raise UserError(
                f"Trainer: {name}='epoch' requires training data with a length. Use 'steps', or "
                "give the data set a __len__()."
            )


def _has_length(data: Any) -> bool:
    try:
        return len(data) > 0
    except TypeError:
        return False


@dataclass(frozen=True)
class StepCollate:
    """Collate function that divides the samples of a step into batches.

    Attributes:
        collate: makes a batch of samples.
        size: samples of a batch.
    """

    collate: Callable[[list[Any]], Any]
    size: int

    def __call__(self, samples: list[Any]) -> list[Any]:
        """Return the batches of a step."""
        starts = range(0, len(samples), self.size)
        return [self.collate(samples[start : start + self.size]) for start in starts]


def _by_steps(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """Return the data of ``loader`` by steps of a worker: each is a list of ``count`` batches.

    The number of tokens of a step must be known before its first batch is computed.
    """
    # Not the loader itself, which accelerate has replaced by one that moves and divides batches.
    order: dict[str, Any] = {}
    lister: Any = loader
    if not isinstance(loader.dataset, IterableDataset):
        lister = loader.batch_sampler
        if type(lister) is not BatchSampler:
            raise UserError(
                "Trainer: get_train_dataloader(): expected a DataLoader with a batch size, got one "
                f"with {type(lister).__name__}; pass batch_size and, if needed, a sampler"
            )
        order["sampler"] = lister.sampler
    return DataLoader(
        loader.dataset,
        lister.batch_size * count,
        drop_last=lister.drop_last,
        collate_fn=StepCollate(loader.collate_fn, lister.batch_size),
        num_workers=loader.num_workers,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        **order,
    )


# -- the trainer ----------------------------------------------------------------------------------
class Trainer(transformers.Trainer):
    """``transformers.Trainer`` whose training loop is that of a :class:`DataParallel`.

    Every rank makes the same ``Trainer``, with the complete data, and calls :meth:`train`. A step
    is ``gradient_accumulation_steps`` batches of each worker; ``state.global_step`` counts the
    steps of all workers together. On a server's rank, :meth:`train` serves the workers. Afterwards
    every rank has the trained model.

    Attributes:
        run: the run, which :meth:`train` makes.

    Raises:
        UserError: the arguments are not :class:`TrainingArguments` of this module.
    """

    args: TrainingArguments
    model: Any
    current_flos: Any
    run: DataParallel

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if not isinstance(self.args, TrainingArguments):
            raise UserError(
                "Trainer: args: expected aladdin_mpi.integrations.transformers.TrainingArguments, "
                f"got {type(self.args).__module__}.{type(self.args).__name__}; import "
                "TrainingArguments from there too"
            )

    def hyperparameter_search(self, *args: Any, **settings: Any) -> Any:
        """Raise UserError: each trial would need ranks of its own."""
        raise UserError(
            "Trainer: hyperparameter_search() is not supported. Start a job for each trial."
        )

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train; every rank calls it.

        Args:
            resume_from_checkpoint: True resumes the run in ``output_dir`` if it has a checkpoint,
                and otherwise starts it; the path of the last checkpoint in ``output_dir`` likewise.
            trial: must be None.
            ignore_keys_for_eval: see ``transformers.Trainer``.

        Returns:
            The steps, and the mean training loss of all workers, or of this one if the algorithm
            is asynchronous; on a server it is nan.

        Raises:
            UserError: a path of another checkpoint, or arguments that the algorithm does not allow.
        """
        self._resumes = _resumes(resume_from_checkpoint, str(self.args.output_dir))
        output: TrainOutput = super().train(None, trial, ignore_keys_for_eval)
        return output

    # The methods below with a leading underscore and the attributes _tr_loss, _total_loss_scalar,
    # _initial_global_step and _globalstep_last_logged are those of transformers.Trainer, which has
    # no public interface to its loop. tests/integrations compares the results with it.
    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        loader = _by_steps(self.get_train_dataloader(), self.args.gradient_accumulation_steps)
        self._length = length = TrainingLength.of(loader, self.args)
        self._ignored_keys = ignore_keys_for_eval
        run = self._start(loader)
        is_begun = False
        for batches in run.batches(loader):
            if not is_begun:
                self._begin()
                is_begun = True
            if self.control.should_training_stop:
                break
            self._step(batches)
            self._count_steps()
            if self.control.should_training_stop and self.state.global_step < length.steps:
                break
        summary = run.summary  # completes a run whose loop was left
        if not is_begun:
            self._begin()
        if run.is_server:
            self.state.global_step = round(summary.get("steps", length.steps))
            self._tr_loss.fill_(math.nan)
        elif self._in_epoch:  # another worker has ended the run
            self.control.should_training_stop = True
            self._end_epoch()
        samples = length.steps * length.step
        output: TrainOutput = self._finalize_training(trial, samples, self._start_time)
        return output

    def _start(self, loader: DataLoader[Any]) -> DataParallel:
        """Make optimizer, scheduler, state and run."""
        length, args = self._length, self.args
        if self._created_lr_scheduler:
            self.lr_scheduler = None  # it has ended with an earlier train()
        self.create_optimizer_and_scheduler(num_training_steps=length.steps)
        # Only for autocast: as it has one process, accelerate does not wrap the model.
        self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
        callbacks = [*self.callback_handler.callbacks, self.control]
        self.state = TrainerState(
            stateful_callbacks=[
                each  # type: ignore[misc]
                for each in callbacks
                if isinstance(each, ExportableState)
            ],
            train_batch_size=self._train_batch_size,
        )
        self._prepare_state()
        self._losses = torch.zeros(2, device=args.device)
        self._tr_loss = torch.zeros((), device=args.device)
        self._mean_loss = math.nan
        self._total_loss_scalar = 0.0
        self._rate: float | None = None
        self._in_epoch = False
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = loader
        self.run = run = DataParallel(
            self.model, optimizer=self.optimizer, scheduler=self.lr_scheduler, **self._settings()
        )
        all_or_none(run.transport, self._check_algorithm)
        return run

    def _prepare_state(self) -> None:
        self.state.compute_steps(self.args, self._length.steps)
        epochs = math.ceil(self._length.epochs)
        self.state.init_training_references(self, self._length.steps, epochs, None)

    def _settings(self) -> dict[str, Any]:
        """Return the options of the run."""
        args, state, length = self.args, self.state, self._length
        saves, steps = args.save_strategy, state.save_steps
        if saves == "best":
            saves, steps = args.eval_strategy, state.eval_steps
        if saves == "epoch":
            steps = -(-length.epoch // length.step)
        has_checkpoints = saves != "no" and steps > 0
        settings: dict[str, Any] = {
            "algorithm": args.algorithm,
            "steps": length.steps,
            "seed": args.data_seed,
            "clip": args.max_grad_norm or None,
            "run_dir": args.run_dir,
            "resume": AUTO if self._resumes else None,
            "checkpoint_every": f"{steps * length.step}samples" if has_checkpoints else NEVER,
            "eval_every": 0.0,
            "quiet": True,
        }
        if args.logging_strategy == "steps":
            settings["log_every"] = state.logging_steps * length.step
        if args.use_cpu:
            settings["device"] = "cpu"
        if args.tf32 is not None:
            settings["tf32"] = args.tf32
        return {**settings, **args.options}

    def _check_algorithm(self) -> None:
        run = self.run
        algorithm = run.algorithm
        if self.args.load_best_model_at_end and (algorithm.has_servers or not algorithm.lockstep):
            raise UserError(
                "TrainingArguments: load_best_model_at_end requires an algorithm without servers "
                f"whose workers take equal steps, such as ar-sgd ({algorithm.name} is not). Leave "
                "it out, and load state.best_model_checkpoint of the first worker."
            )

    @property
    def _waits(self) -> bool:
        """Whether all workers take their steps together, so that they may wait for each other."""
        return self.run.algorithm.lockstep

    def _begin(self) -> None:
        """Begin the loop, or continue it after the step of the checkpoint."""
        run = self.run
        stored = run.state.get(STATE)
        if stored is not None:
            self.state = TrainerState(**stored["state"])
            self._prepare_state()
            self._losses = stored["losses"].to(self.args.device)
            self._rate = stored["rate"]
        self._start_time = time.time()
        self._initial_global_step = self._globalstep_last_logged = self.state.global_step
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        if run.is_server:
            return
        if self.args.eval_on_start and (self._waits or run.is_first):
            self._evaluate(None, self._ignored_keys, skip_scheduler=True)
        self._begin_epoch()
        self._count_steps()

    def _step(self, batches: list[Any]) -> None:
        """Take a step with this worker's batches."""
        run, handler, args = self.run, self.callback_handler, self.args
        self.control = handler.on_step_begin(args, self.state, self.control)
        batches, items = self.get_batch_samples(iter(batches), len(batches), args.device)
        is_mean = run.algorithm.averages_gradients and args.average_tokens_across_devices
        if items is not None and is_mean and run.workers > 1:
            # The mean over workers of sums divided by this is the mean over all tokens.
            items = run.reduce(items).to(args.device)
        self.current_gradient_accumulation_steps = len(batches)
        loss = torch.zeros((), device=args.device)
        for number, inputs in enumerate(batches, start=1):
            is_last = number == len(batches)
            with nullcontext() if is_last else run.accumulate():
                loss = loss + self.training_step(self.model, inputs, items).float()
            self.current_flos += run.workers * float(self.floating_point_ops(inputs))
            if not is_last:
                self.control = handler.on_substep_end(args, self.state, self.control)
        if torch.isfinite(loss) or not args.logging_nan_inf_filter:
            self._losses += torch.stack([loss, torch.ones_like(loss)])
        self._rate = run.lr
        self.control = handler.on_pre_optimizer_step(args, self.state, self.control)
        # A checkpoint is written in run.step(): the resumed run continues with the lines after it.
        self.store_flos()
        state = dict(vars(self.state))
        run.state[STATE] = {"state": state, "losses": self._losses, "rate": self._rate}
        run.step(loss)
        self.control = handler.on_optimizer_step(args, self.state, self.control)

    def _count_steps(self) -> None:
        """Count the steps of all workers since the last call, with all that follows each."""
        done = min(self.run.samples // self._length.step, self._length.steps)
        while self.state.global_step < done and not self.control.should_training_stop:
            self._count_step()

    def _count_step(self) -> None:
        state, length = self.state, self._length
        epoch = length.epoch_of(state.global_step)
        state.global_step += 1
        state.epoch = min(state.global_step * length.step / length.epoch, length.epochs)
        self.control = self.callback_handler.on_step_end(self.args, state, self.control)
        self._log_save_evaluate()
        if self.control.should_epoch_stop:
            raise UserError(
                "Trainer: a callback has set control.should_epoch_stop, which is not supported. "
                "Set control.should_training_stop to end the run."
            )
        if self.control.should_training_stop or length.epoch_of(state.global_step) > epoch:
            self._end_epoch()
        if not self._in_epoch and not self.control.should_training_stop:
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._in_epoch = True
        self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)

    def _end_epoch(self) -> None:
        self._in_epoch = False
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._log_save_evaluate()
        if self.control.should_training_stop:
            self._settle_losses()

    def _log_save_evaluate(self) -> None:
        """Do what callbacks have requested."""
        run = self.run
        if not (self._waits or run.is_first):
            self.control.should_evaluate = False
        if self.control.should_log:
            self._settle_losses()
        self._maybe_log_save_evaluate(
            self._tr_loss,
            None,
            self.model,
            None,
            self.state.epoch,
            self._ignored_keys,
            self._start_time,
            learning_rate=self._rate,
        )

    def _settle_losses(self) -> None:
        """Set the sum of the losses of the steps since the last log.

        A worker of an asynchronous algorithm has taken more or fewer steps itself.
        """
        run = self.run
        steps = self.state.global_step - self._globalstep_last_logged
        if not steps:
            return
        total, count = (run.reduce(self._losses, "sum") if self._waits else self._losses).tolist()
        self._losses.zero_()
        self._mean_loss = total / count if count else self._mean_loss
        self._tr_loss.fill_(self._mean_loss * steps)

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate the first worker's model there; share the figures if the others wait."""
        run = self.run
        metrics: dict[str, float] = {}
        if run.is_first:
            metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        if self._waits:
            metrics = _from_first(run, metrics)
        if not run.is_first:
            self.log(metrics)
            handler = self.callback_handler
            self.control = handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save on the first worker; the others then note the folder of the best model."""
        run = self.run
        if run.is_first:
            super()._save_checkpoint(model, trial)
        if self._waits:
            run.reduce(0.0)
            if not run.is_first:
                super()._save_checkpoint(model, trial)


def _resumes(checkpoint: str | bool | None, folder: str) -> bool:
    """Return whether to resume the run in ``folder``."""
    if isinstance(checkpoint, (bool, type(None))):
        return bool(checkpoint)
    last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    if last is None or os.path.abspath(checkpoint) != os.path.abspath(last):
        raise UserError(
            f"Trainer: resume_from_checkpoint: expected True, or the last checkpoint in {folder} "
            f"({last or 'none'}), got {checkpoint!r}; a run resumes from its own checkpoint. To "
            "begin with other weights, load them into the model."
        )
    return True


def _from_first(run: DataParallel, value: Any) -> Any:
    """Return the first worker's value of JSON types; every worker calls it."""
    text = json.dumps(value).encode() if run.is_first else b""
    size = int(run.reduce(len(text), "sum"))
    codes = torch.zeros(size)
    codes[: len(text)] = torch.tensor(list(text))
    return json.loads(bytes(int(code) for code in run.reduce(codes, "sum")))
