"""Features of Lightning that cannot work in a run, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import find_algorithm

DECIDED = {
    "epochs": "Trainer(max_epochs=...)",
    "steps": "Trainer(max_steps=...)",
    "samples": "Trainer(max_epochs=...) or Trainer(max_steps=...)",
    "accumulate": "Trainer(accumulate_grad_batches=...)",
    "clip": "Trainer(gradient_clip_val=...)",
    "batch_size": "the training DataLoader",
    "optimizer": "configure_optimizers()",
    "scheduler": "configure_optimizers()",
    "schedule": "a scheduler in configure_optimizers()",
    "evaluate": "validation_step()",
}
"""Arguments of DataParallel, and what determines them here."""
CALLBACKS = {
    "GradientAccumulationScheduler": "set Trainer(accumulate_grad_batches=...)",
    "StochasticWeightAveraging": "average the models of checkpoints after training",
    "Timer": "let the batch system's signal suspend the run, with run_dir= and resume='auto'",
}
"""Unsupported callbacks and their replacements."""
GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings that the Trainer and the module determine.

    Raises:
        UserError: names the first such setting.
    """
    for name, place in DECIDED.items():
        if name in settings:
            raise UserError(
                f"AladdinStrategy: {name} is determined by {place}. Set it there, and leave "
                f"{name} out."
            )
    for name in ("spares", "transport"):
        if name in settings:
            raise UserError(
                f"AladdinStrategy: {name} cannot be combined with Lightning's loops. Leave it out."
            )
    chosen = settings.get("algorithm")
    if chosen is not None and find_algorithm(str(chosen)).bounds_staleness:
        raise UserError(
            f"AladdinStrategy: algorithm={chosen!r} is not supported, because workers wait for "
            f"each other at the ends of epochs, where {chosen} may block one of them. Use asp or "
            "bsp."
        )


def overrides(instance: object, base: str, method: str) -> bool:
    """Return whether the class of ``instance`` overrides a method of its base class ``base``."""
    kind = type(instance)
    found = next((each for each in kind.__mro__ if each.__name__ == base), None)
    return found is not None and getattr(kind, method) is not getattr(found, method)


def changes_gradients(trainer: Any) -> bool:
    """Return whether hooks may use or change the gradients between backward and the step."""
    return any(
        overrides(trainer.lightning_module, "LightningModule", hook)
        or any(overrides(each, "Callback", hook) for each in trainer.callbacks)
        for hook in GRADIENT_HOOKS
    )


def _has_all_parameters(module: Any, strategy: Any) -> bool:
    """Return whether each trainable parameter is in an optimizer."""
    optimized = {
        id(p)
        for each in strategy.optimizers
        for group in each.param_groups
        for p in group["params"]
    }
    return all(id(p) in optimized for p in module.parameters() if p.requires_grad)


def _unsupported(trainer: Any, strategy: Any) -> list[tuple[bool, str]]:
    """Return for each unsupported feature whether it is used, and the message."""
    module, precision = trainer.lightning_module, trainer.precision_plugin
    devices = [each for each in strategy.parallel_devices if each.type == "cpu"]
    return [
        (
            not module.automatic_optimization,
            "automatic_optimization = False: manual optimization is not supported, because the "
            "run makes one step per batch. Let training_step() return the loss, or use "
            "DataParallel in a loop of your own.",
        ),
        (
            len(strategy.optimizers) != 1 or not strategy.optimizers[0].param_groups,
            "configure_optimizers(): expected one optimizer, got "
            f"{len(strategy.optimizers) and 'none'}; put all parameters into groups of one.",
        ),
        (
            overrides(module, "LightningModule", "configure_gradient_clipping"),
            "configure_gradient_clipping() is not supported, because the run clips gradients. "
            "Use Trainer(gradient_clip_val=...).",
        ),
        (
            trainer.gradient_clip_algorithm not in (None, "norm")
            and trainer.gradient_clip_val is not None,
            "Trainer(gradient_clip_algorithm='value') is not supported. Clip by the norm, which "
            "is the default.",
        ),
        (
            bool(trainer.gradient_clip_val) and not _has_all_parameters(module, strategy),
            "Trainer(gradient_clip_val=...) requires an optimizer of all trainable parameters, "
            "because the run clips the gradient of all. Set requires_grad=False for the others.",
        ),
        (
            getattr(precision, "scaler", None) is not None,
            f"Trainer(precision={precision.precision!r}) is not supported, because the loss is "
            "scaled. Use precision='bf16-mixed'.",
        ),
        (
            trainer.val_check_interval != 1.0 or trainer.check_val_every_n_epoch is None,
            "Trainer(val_check_interval=...) is not supported, because workers are in different "
            "places of an epoch. Validate at the ends of epochs, with check_val_every_n_epoch.",
        ),
        (
            bool(trainer.reload_dataloaders_every_n_epochs),
            "Trainer(reload_dataloaders_every_n_epochs=...) is not supported, because a run has "
            "one training loader. Leave it out.",
        ),
        (
            strategy.num_nodes > 1 or len(devices) > 1,
            "Trainer(devices=..., num_nodes=...) is not supported, because mpirun starts the "
            "ranks. Leave both out.",
        ),
        (
            strategy._layer_sync is not None,
            "Trainer(sync_batchnorm=True) is not supported. Leave it out; the run re-estimates "
            "batch-norm statistics at its end.",
        ),
    ]


def check_trainer(trainer: Any, strategy: Any) -> None:
    """Refuse features of the Trainer, its callbacks and the module that cannot work.

    Raises:
        UserError: names the first such feature.
    """
    for is_used, message in _unsupported(trainer, strategy):
        if is_used:
            raise UserError(f"AladdinStrategy: {message}")
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in CALLBACKS:
                raise UserError(
                    f"AladdinStrategy: the callback {kind.__name__} is not supported. Leave it "
                    f"out, and {CALLBACKS[kind.__name__]}."
                )
    check_schedulers(trainer)


def check_schedulers(trainer: Any) -> None:
    """Refuse schedulers that neither the run nor Lightning can advance.

    Raises:
        UserError: names the setting in ``lr_scheduler_config``.
    """
    configs = trainer.strategy.lr_scheduler_configs
    by_step = [config for config in configs if config.interval == "step"]
    for config in by_step:
        name = type(config.scheduler).__name__
        where = f"AladdinStrategy: configure_optimizers(): the scheduler {name}"
        if isinstance(config.scheduler, ReduceLROnPlateau) or config.reduce_on_plateau:
            raise UserError(
                f"{where} with interval='step' requires a metric in every step. Use "
                "interval='epoch'."
            )
        if config.frequency != 1:
            raise UserError(
                f"{where} with interval='step' has frequency={config.frequency}. Use frequency=1, "
                "and make the scheduler slower."
            )
        if len(configs) > 1:
            raise UserError(
                f"{where} with interval='step' cannot be combined with another scheduler. Join "
                "them by torch's SequentialLR or ChainedScheduler."
            )
    if by_step and overrides(trainer.lightning_module, "LightningModule", "lr_scheduler_step"):
        raise UserError(
            "AladdinStrategy: lr_scheduler_step() is not supported with interval='step', because "
            "the run advances the scheduler. Use interval='epoch', or a scheduler of torch."
        )
