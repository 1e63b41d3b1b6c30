"""The strategy by which Lightning's ``Trainer`` trains in a run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import Metric

from aladdin_mpi.errors import UserError
from aladdin_mpi.integrations.lightning_base.batches import RunEpochs, RunLoader, first_batches
from aladdin_mpi.integrations.lightning_base.checks import (
    changes_gradients,
    check_settings,
    check_trainer,
)
from aladdin_mpi.integrations.lightning_base.exchange import WorkerExchange
from aladdin_mpi.integrations.lightning_base.progress import adopt, progress_of, storable
from aladdin_mpi.integrations.training import ManagedScheduler
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.run.job import everyones, find_job
from aladdin_mpi.run.script import simulated_rank

if TYPE_CHECKING:
    from lightning.pytorch.strategies import SingleDeviceStrategy as Base
else:
    Base = object

BATCH_END, EPOCH_END = "on_train_batch_end", "on_advance_end"
ACCUMULATES = "_should_accumulate"
"""Private method of Lightning's loop, which counts batches; the run's last step may have fewer."""


def _of_batches(
    hook: Callable[..., None], otherwise: Callable[..., None] = lambda *_: None
) -> Callable[..., None]:
    """Return the hook, with ``otherwise`` in its place if the batch is None."""

    @wraps(hook)
    def call(*arguments: Any) -> None:
        *_, batch, _ = arguments
        (hook if batch is not None else otherwise)(*arguments)

    return call


class RunStep:
    """An optimizer whose ``step()`` is the run's; everything else is the given optimizer's."""

    def __init__(self, optimizer: Any, run: DataParallel) -> None:
        self._optimizer = optimizer
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: Callable[[], Tensor | None]) -> Tensor | None:
        """Compute a batch's gradient by ``closure``, and hand it to the run."""
        loss = closure()
        if loss is not None:  # otherwise training_step() skips the batch
            self._run.step(loss)
        return loss


class SharedPlateau(ManagedScheduler):
    """A ReduceLROnPlateau that all workers step with the mean of their metrics."""

    def __init__(self, scheduler: Any, mean: Callable[[str, Tensor], Tensor]) -> None:
        super().__init__(scheduler)
        self._mean = mean

    def step(self, metrics: Any = None) -> None:
        """Step the scheduler; every worker calls this at the same ends of epochs."""
        scheduler: Any = self.scheduler
        scheduler.step(self._mean("ReduceLROnPlateau", torch.as_tensor(metrics)))


class RunStrategy(Base):
    """Base class of the strategies; the derived ones are strategies of one of the packages.

    ``fit()`` has three phases. During set-up all ranks take the same steps, and communicate by
    collectives over all of them. The run lasts from ``on_train_start()`` to ``on_train_end()``;
    in validation, its workers exchange figures. After the run, ranks are independent.
    """

    environment: Callable[[], Any]
    """Makes the cluster environment of one process in the derived class's package.

    Without it, Lightning would start MPI itself, or compare its arguments with Slurm's variables.
    """

    def __init__(self, **settings: Any) -> None:
        simulated = simulated_rank()
        if simulated is not None and not simulated.is_for_mpi:
            raise UserError(
                "AladdinStrategy: Lightning cannot be simulated, because its ranks cannot share a "
                "process. Simulate a loop of your own, or a built-in model."
            )
        super().__init__()
        self._settings = settings
        self._job = job = find_job(settings)
        check_settings(settings)  # after find_job(), by which only one rank reports an error
        self.world_size = job.workers
        self.global_rank = job.index
        self.local_rank = list(job.hosts[: job.rank]).count(job.host)
        self.node_rank = job.host
        rank_zero_only.rank = self.global_rank
        # Lightning's connector writes these three if they exist.
        self.num_nodes = 1
        self.parallel_devices: list[torch.device] = []
        self._layer_sync: object = None
        self.cluster_environment = type(self).environment()
        # Lightning combines figures only if this is true, but then it divides loaders too.
        self.is_distributed = False
        self._is_setting_up = False
        self._run: DataParallel | None = None
        self._kept: tuple[Any, int, int | None] | None = None
        self._metrics: list[tuple[Metric, Any]] = []

    # -- places ---------------------------------------------------------------------------------
    @property
    def run(self) -> DataParallel:
        """The run of the present or the last ``fit()``.

        Raises:
            UserError: ``fit()`` has not begun to train.
        """
        if self._run is None:
            raise UserError(
                "AladdinStrategy.run: training has not begun. Use it in hooks after "
                "on_train_start()."
            )
        return self._run

    @property
    def _is_on_cpu(self) -> bool:
        return all(each.type == "cpu" for each in self.parallel_devices)

    @property
    def root_device(self) -> torch.device:
        """The device of the model and of the batches on this rank."""
        return self._job.device(self._settings.get("device", "cpu" if self._is_on_cpu else "auto"))

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first worker."""
        return self.global_rank == 0

    @property
    def handles_gradient_accumulation(self) -> bool:
        """True: the run accumulates, and has to take every batch's gradient."""
        return True

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # -- set-up ---------------------------------------------------------------------------------
    def connect(self, model: Any) -> None:
        """Begin ``fit()``, or another of the Trainer's functions, with ``model``."""
        super().connect(model)
        self._is_setting_up = self._trainer.state.fn == "fit"
        self._loader: RunLoader | None = None
        if self._is_setting_up:
            model.log = partial(_log, weakref.ref(self), weakref.ref(model))

    def setup_environment(self) -> None:
        """Prepare the device; a server's is the CPU, whatever the Trainer's accelerator."""
        if self._is_on_cpu == (self.root_device.type == "cpu"):
            super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Make the optimizer and the schedulers, and check that a run supports everything."""
        super().setup(trainer)
        if self._is_setting_up:
            check_trainer(trainer, self)

    def process_dataloader(self, dataloader: object) -> object:
        """Replace the training loader by one that yields the run's epochs."""
        trainer = self._trainer
        if not self._is_setting_up or not trainer.training:
            return dataloader
        if self._loader is not None:
            raise UserError(
                "AladdinStrategy: expected one training loader, got several; put their data into "
                "one data set"
            )
        self._loader = RunLoader(dataloader, self._batches_of(dataloader), self._batches)
        return self._loader

    def _batches_of(self, loader: Any) -> int:
        """Return the number of batches of an epoch, or of a run without epochs."""
        try:
            return len(loader)
        except (TypeError, NotImplementedError):
            trainer = self._trainer
            if trainer.max_steps < 0 or trainer.max_epochs >= 0:
                raise UserError(
                    "AladdinStrategy: the training loader has no length. Set "
                    "Trainer(max_steps=...) without max_epochs."
                ) from None
            if any(config.interval == "epoch" for config in self.lr_scheduler_configs):
                raise UserError(
                    "AladdinStrategy: a scheduler with interval='epoch' requires a training "
                    "loader with a length. Use interval='step'."
                ) from None
            return int(trainer.max_steps * trainer.accumulate_grad_batches * self.world_size)

    def load_checkpoint(self, *arguments: Any, **how: Any) -> dict[str, Any]:
        """Load a checkpoint to evaluate it.

        Raises:
            UserError: in ``fit()``.
        """
        if self._is_setting_up:
            raise UserError(
                "AladdinStrategy: trainer.fit(ckpt_path=...) is not supported, because Lightning's "
                "checkpoints do not contain the run. Pass run_dir= and resume='auto' to "
                "AladdinStrategy, and leave ckpt_path out; to start from trained weights, use "
                "load_from_checkpoint()."
            )
        return super().load_checkpoint(*arguments, **how)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an empty state: the run's checkpoints contain it, from all ranks that step."""
        return {}

    # -- the run --------------------------------------------------------------------------------
    def on_train_start(self) -> None:
        """Begin the run; a server serves until its end."""
        trainer, loader = self._trainer, self._loader
        loop = trainer.fit_loop
        assert loader is not None
        self._is_setting_up = self._ends_within_epoch = self._completes_step = False
        self._last_step: int | None = None
        self._expected = -(-loop.max_batches // self.world_size)
        data = loader.loader
        if loop.max_batches < len(loader):
            data = first_batches(data, loop.max_batches)
        self._run = run = DataParallel(self.lightning_module, **self._arguments(trainer))
        self._kept = trainer.gradient_clip_val, loop.max_steps, loop.min_steps
        trainer.gradient_clip_val, loop.epoch_loop.max_steps = None, -1
        self._epochs = epochs = RunEpochs(run, data, self._end_epoch)
        if epochs.number is None:
            loop.max_batches = 0  # ends the loop
            return
        self._exchange = WorkerExchange(run)
        self._agree_at_ends_of_epochs()
        loop.epoch_loop.__dict__[ACCUMULATES] = lambda: not self._completes_step
        self._skip_hooks_of_empty_batches()
        self._replace_schedulers()
        self._begin_metrics()
        saved = run.state.get("lightning", {"steps": 0, "callbacks": {}, "schedulers": []})
        if epochs.number or saved["steps"]:
            adopt(trainer, {**saved, "epochs": epochs.number})

    def _agree_at_ends_of_epochs(self) -> None:
        """Let Lightning's loops end after the same epoch if it is to stop early on any worker.

        A strategy has no hook after those of callbacks, which decide this.
        """
        trainer, loop = self._trainer, self._trainer.fit_loop
        end_epoch = loop.on_advance_end

        def end_and_agree() -> None:
            end_epoch()
            if self._is_running:
                self._epochs.leave()  # if a hook has ended Lightning's epoch
            if self._is_running and self._any(trainer.should_stop and loop._can_stop_early):
                trainer.should_stop, loop.epoch_loop.min_steps = True, None

        loop.__dict__[EPOCH_END] = end_and_agree

    def _any(self, wants: bool) -> bool:
        """Return whether any worker wants to stop after this epoch; they wait for each other."""
        return bool(self._exchange.gather("end of an epoch", torch.tensor(wants)).any())

    def _skip_hooks_of_empty_batches(self) -> None:
        """Let hooks see no batch that is None, which only ends an epoch; see `RunEpochs`."""
        loop = self._trainer.fit_loop.epoch_loop

        def note_empty(outputs: Any, batch: Any, index: int) -> None:
            if batch is None and not loop._should_accumulate():
                loop._batches_that_stepped -= 1  # Lightning counts it after its hooks

        module = self.lightning_module
        module.__dict__[BATCH_END] = _of_batches(module.on_train_batch_end, note_empty)
        for callback in self._trainer.callbacks:
            callback.__dict__[BATCH_END] = _of_batches(callback.on_train_batch_end)

    def _arguments(self, trainer: Any) -> dict[str, Any]:
        """Return the arguments of DataParallel."""
        schedulers = [c.scheduler for c in self.lr_scheduler_configs if c.interval == "step"]
        arguments = {
            "optimizer": self.optimizers[0],
            "scheduler": schedulers[0] if schedulers else None,
            "accumulate": trainer.accumulate_grad_batches,
            **self._length(trainer),
        }
        if trainer.gradient_clip_val:
            arguments["clip"] = float(trainer.gradient_clip_val)
        if changes_gradients(trainer):
            arguments["wait_free"] = False
        if self._is_on_cpu:
            arguments["device"] = "cpu"
        return {**arguments, **self._settings}

    def _length(self, trainer: Any) -> dict[str, int]:
        """Return the length of the run, which ends with its epochs or its steps."""
        epochs, steps, loop = trainer.max_epochs, trainer.max_steps, trainer.fit_loop
        if steps < 0 and epochs < 0:
            raise UserError(
                "AladdinStrategy: Trainer(max_epochs=-1) has no end. Set max_epochs or max_steps."
            )
        of_worker = steps * trainer.accumulate_grad_batches
        batches, in_epochs = of_worker * self.world_size, epochs * loop.max_batches
        if steps < 0 or 0 <= in_epochs <= batches:
            is_by_step = any(config.interval == "step" for config in self.lr_scheduler_configs)
            if is_by_step and 0 <= of_worker < in_epochs:
                raise UserError(
                    f"AladdinStrategy: Trainer(max_steps={steps}) cannot be combined with "
                    f"max_epochs={epochs} and a scheduler with interval='step': {self.world_size} "
                    "workers reach max_epochs first, but the scheduler would end after max_steps "
                    "of any worker. Leave max_steps out."
                )
            return {"epochs": epochs}
        self._last_step, self._ends_within_epoch = steps, batches % loop.max_batches != 0
        return {"steps": steps}

    def _replace_schedulers(self) -> None:
        """Let the run advance a scheduler of steps, and all workers share a metric's."""
        for config in self.lr_scheduler_configs:
            scheduler: Any = config.scheduler
            if config.interval == "step":
                config.scheduler = ManagedScheduler(scheduler)
            elif isinstance(scheduler, ReduceLROnPlateau):
                config.scheduler = SharedPlateau(scheduler, self._mean)

    def _mean(self, purpose: str, value: Tensor) -> Tensor:
        return self._exchange.reduce(purpose, value, "mean") if self._is_running else value

    def _batches(self) -> Iterator[Any]:
        """Yield the batches of Lightning's next epoch."""
        self.run.state["lightning"] = storable(progress_of(self._trainer))
        yield from self._epochs.batches()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Keep the epoch open: whether this batch is its last is known after the step."""
        self._completes_step = self.run.completes_step
        loop = self._trainer.fit_loop
        # The fetcher, which is private, stops at the loader's length; a fast worker gets more.
        loop._data_fetcher.done = False
        progress = loop.epoch_loop.batch_progress
        progress.is_last_batch = False
        self._end_after(max(self._expected, progress.current.ready + 1))

    def _end_after(self, batches: int) -> None:
        """Let Lightning's epoch end, and validation begin, after this many batches."""
        self._trainer.fit_loop.max_batches = self._trainer.val_check_batch = batches

    def _end_epoch(self, batches: int) -> None:
        """End Lightning's epoch after this many batches; after ``max_steps``, end its loop."""
        if not self._is_running and self._last_step is not None:
            loop = self._trainer.fit_loop
            loop.epoch_loop.max_steps = min(self._last_step, self.run.state["lightning"]["steps"])
            if self._ends_within_epoch:  # like Lightning, which does not validate then
                return
        self._end_after(batches)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **how: Any
    ) -> Any:
        """Compute a batch's gradient, hand it to the run, and fetch the next batch."""
        run = self.run
        step = RunStep(optimizer, run)
        if self._completes_step:
            run.state["lightning"]["steps"] = self._trainer.global_step + 1
            output = self.precision_plugin.optimizer_step(
                step, model=model or self.lightning_module, closure=closure, **how
            )
        else:
            output = step.step(closure)
        self._epochs.fetch()
        return output

    def on_validation_start(self) -> None:
        """End the epoch on all workers, if a hook has ended it on this one."""
        if self._is_running and self._trainer.state.fn == "fit":
            self._epochs.leave()

    def on_train_end(self) -> None:
        """End the run, if Lightning's loop has ended before it, and share the results."""
        run = self.run
        if self._is_running:
            run.__exit__(None, None, None)  # as after leaving the loop by break
        self._share_results()

    def _share_results(self) -> None:
        """Give all ranks the first worker's callback states, metrics and counters."""
        assert self._run is not None
        if self._run.transport.failed:  # collectives need all ranks
            return
        trainer = self._trainer
        held = [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]
        mine = (progress_of(trainer), held) if self.is_global_zero else None
        mine = apply_to_collection(mine, Tensor, Tensor.cpu)  # for ranks without this device
        progress, metrics = everyones(mine)[self._job.servers]
        if not self.is_global_zero:
            adopt(trainer, progress)
            for own, theirs in zip(held, metrics, strict=True):
                own.update(theirs)

    def on_exception(self, exception: BaseException) -> None:
        """Close the run in one process; with several, the error ends the job."""
        if self._is_running and len(self._job.hosts) == 1:
            self.run.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self) -> None:
        """Restore the Trainer's arguments and the module."""
        module, trainer = self.lightning_module, self._trainer
        if self._run is not None and self._kept is not None:
            loop = trainer.fit_loop.epoch_loop
            trainer.gradient_clip_val, loop.max_steps, loop.min_steps = self._kept
            self._kept = None
            self._end_metrics()
        module.__dict__.pop("log", None)
        trainer.fit_loop.__dict__.pop(EPOCH_END, None)
        trainer.fit_loop.epoch_loop.__dict__.pop(ACCUMULATES, None)
        for each in (module, *trainer.callbacks):
            each.__dict__.pop(BATCH_END, None)
        self._is_setting_up = False
        super().teardown()

    # -- exchanges ------------------------------------------------------------------------------
    @property
    def _is_running(self) -> bool:
        return self._run is not None and not self._run.is_over

    @property
    def validates(self) -> bool:
        """Whether this is a validation in ``fit()``, or its sanity check before the run."""
        trainer = self._trainer
        return trainer.state.fn == "fit" and (trainer.validating or trainer.sanity_checking)

    @property
    def exchanges(self) -> bool:
        """Whether the workers exchange figures at present: in validation during ``fit()``."""
        return self._is_running and self.world_size > 1 and self.validates

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, or another operation, over all workers in validation.

        Otherwise ``tensor``: in training, workers are in different places of their loops.
        """
        if not self.exchanges:
            return tensor
        operation = "mean" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()
        purpose = "strategy.reduce()"
        if isinstance(group, str):  # by _log(): each worker's sum is over all samples
            purpose = f"self.log({group!r}, ...)"
            operation = "mean" if operation == "sum" else operation
        return self._exchange.reduce(purpose, torch.as_tensor(tensor), operation)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the workers' tensors, stacked, in validation; outside of ``fit()``, ``tensor``.

        Raises:
            UserError: in training.
        """
        if self.exchanges:
            return self._exchange.gather("all_gather()", tensor).to(tensor)
        if self._is_running and self.world_size > 1:
            raise UserError(
                "AladdinStrategy: all_gather() was called in training, where workers are in "
                "different places of their loops. Call it in validation, or leave it out."
            )
        return tensor

    def barrier(self, *arguments: Any, **how: Any) -> None:
        """Wait for all ranks before the run; do nothing otherwise."""
        if self._is_setting_up:
            everyones(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the first worker's object before the run; otherwise ``obj``."""
        return everyones(obj)[self._job.servers + src] if self._is_setting_up else obj

    # -- metrics --------------------------------------------------------------------------------
    def _begin_metrics(self) -> None:
        """Let the module's torchmetrics combine their states over the workers in validation."""
        me = weakref.ref(self)
        assert self.lightning_module is not None
        for each in self.lightning_module.modules():
            if isinstance(each, Metric) and each.dist_sync_fn is None:
                self._metrics.append((each, each.distributed_available_fn))
                each.dist_sync_fn = partial(_gather_state, me)
                each.distributed_available_fn = partial(_exchanges, me)

    def _end_metrics(self) -> None:
        for each, available in self._metrics:
            each.dist_sync_fn, each.distributed_available_fn = None, available
        self._metrics.clear()


# Functions of a weak reference, as the module may be copied while it holds them.
def _log(
    strategy: weakref.ref[RunStrategy],
    module: weakref.ref[Any],
    name: str,
    value: Any,
    *arguments: Any,
    **how: Any,
) -> None:
    """Log a figure by the module's class; in validation, combine it over the workers."""
    owner = strategy()
    logged: Any = module()
    if owner is None or not owner.validates or how.get("rank_zero_only"):
        type(logged).log(logged, name, value, *arguments, **how)
        return
    # The group reaches reduce(), which compares the figures of the workers by it.
    # log_dict() passes the defaults of both.
    how |= {"sync_dist": True, "sync_dist_group": how.get("sync_dist_group") or name}
    owner.is_distributed = owner.world_size > 1
    try:
        type(logged).log(logged, name, value, *arguments, **how)
    finally:
        owner.is_distributed = False


def _exchanges(strategy: weakref.ref[RunStrategy]) -> bool:
    owner = strategy()
    return owner is not None and owner.exchanges


def _gather_state(
    strategy: weakref.ref[RunStrategy], state: Tensor, group: Any = None
) -> list[Tensor]:
    owner = strategy()
    assert owner is not None
    return list(owner._exchange.gather("a torchmetrics metric", state).to(state))
