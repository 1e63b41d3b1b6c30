"""Checks of the arguments of `DataParallel`, and the options that result from them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aladdin_mpi.control.exchange import all_or_none
from aladdin_mpi.errors import ClosedError, UserError
from aladdin_mpi.flat.parts import outside_parts
from aladdin_mpi.flat.shards import is_sharded, own_class
from aladdin_mpi.options.algorithms import Algorithm, find_algorithm
from aladdin_mpi.options.checks import steps_unused
from aladdin_mpi.options.fields import current_name, leaves
from aladdin_mpi.options.general import OWN_DATA
from aladdin_mpi.options.run import RunOptions, RunRequest, SimulateOptions, warnings
from aladdin_mpi.options.settings import Setting, Settings, as_argument, as_values, build, overlay
from aladdin_mpi.process import guard
from aladdin_mpi.run.resumption import agree_on_resume
from aladdin_mpi.run.script import SimulatedRank, typed_options
from aladdin_mpi.session.user_optimizer import IN_THE_OPTIMIZER, IN_THE_SCHEDULE
from aladdin_mpi.transport.base import Transport

NO_EFFECT = {
    "precision": "put forward and loss into torch.autocast",
    "stage": "copy the data beforehand",
    "data_dir": "pass the data set to batches()",
    "download": "pass the data set to batches()",
    "cache": "pass the data set to batches()",
    "image_size": "pass images of that size to batches()",
    "augment": "pass batches() a data set that augments its samples",
    "corrupt_images": "pass batches() a data set that skips unreadable images",
    "shuffle_buffer": "pass it to load_dataset()",
    "check_images": "check the images beforehand",
    "evaluate_on": "note that rank 0 calls evaluate() with a module on its CPU",
}
"""Options of the built-in training alone, and what a custom training loop does instead."""
_ARGUMENTS = {leaf.flag: as_argument(path) for path, leaf in leaves(RunOptions).items()}


def check_effect(given: Collection[str]) -> None:
    """Refuse arguments that have no effect in a custom training loop.

    Raises:
        UserError: names the first such argument.
    """
    for name in NO_EFFECT:
        if name in given:
            raise UserError(
                f"{name} has no effect in a custom training loop. Leave it out, and "
                f"{NO_EFFECT[name]}."
            )


@contextmanager
def naming_arguments() -> Iterator[None]:
    """Make errors raised inside name arguments, such as ``max_loss``, instead of ``--max-loss``."""
    try:
        yield
    except ClosedError:
        raise
    except UserError as error:
        raise UserError(as_arguments(str(error)), agreed=error.agreed) from error.__cause__


def as_arguments(text: str) -> str:
    """Replace each command-line option in ``text`` by the argument of DataParallel."""
    text = re.sub(r"--resume (/\S*)", r"resume='\1'", text)
    text = re.sub(r"\badd --(overwrite|allow-resize)\b", r"pass --\1=True", text)
    return re.sub(r"--[a-z][a-z-]*", lambda match: _ARGUMENTS.get(match[0], match[0]), text)


PARALLEL_ONLY = ("servers", "wire", "checksum", "compression", "dgc", "powersgd")
"""Settings that have no meaning for a single process."""
GROUPING = ("island", "node_sums", "node_size")
"""Settings that group workers; with any algorithm, one process is a group by itself."""


def check_given(module: object, evaluate: object, settings: dict[str, Any]) -> None:
    """Check the arguments that are not options.

    Raises:
        UserError: an argument has the wrong type, or no effect.
    """
    check_effect(settings.keys())
    if not isinstance(module, nn.Module):
        raise UserError(
            f"DataParallel: expected a torch.nn.Module first, got {type(module).__name__}; pass "
            "the model itself"
        )
    if evaluate is not None and not callable(evaluate):
        raise UserError(
            "DataParallel: evaluate: expected a function of the module that returns figures by "
            f"name, got {type(evaluate).__name__}; pass the function itself"
        )


def check_default_device() -> None:
    """Check that new tensors are on the CPU, as messages are.

    Raises:
        UserError: they are on another device.
    """
    find = getattr(torch, "get_default_device", None)  # torch below 2.3 lacks it
    if find is not None and find().type != "cpu":
        raise UserError(
            f"DataParallel requires the CPU as torch's default device, got {find()}. Remove "
            "torch.set_default_device(): DataParallel moves the model to run.device, and batches "
            "to the same device."
        )


def check_memory_format(module: nn.Module, options: RunOptions) -> None:
    """Check that the memory of a model's parameters can be laid out as the options say.

    Raises:
        UserError: FSDP has divided them.
    """
    if options.channels_last and is_sharded(module):
        raise UserError(
            "--channels-last requires whole parameters, and those of this model are divided by "
            "fully_shard. Leave one out."
        )


def check_parts(
    module: nn.Module, parts: Sequence[str], algorithm: Algorithm, options: RunOptions
) -> None:
    """Check that the parts of ``module`` can be stepped one after another.

    Raises:
        UserError: they do not divide the module, or a step would change other parts too.
    """
    if not parts:
        return
    outside_parts(module, parts)
    if options.accumulate > 1:
        raise UserError(
            "parts cannot be combined with --accumulate: each part is stepped in every batch. "
            "Leave --accumulate out, and use a larger batch."
        )
    if steps_unused(algorithm, options):
        option = f"--wire {options.wire}" if options.compression == "none" else "--compression"
        name, remedy = f"{algorithm.name} with {option}", f"Leave {option} out"
        if algorithm.steps_unused:
            name, remedy = algorithm.name, "Use another algorithm"
        raise UserError(
            f"parts requires steps that change one part only, but {name} also steps parameters "
            f"without a gradient. {remedy}."
        )


def agreed_options(
    transport: Transport, options: RunOptions | None, settings: dict[str, Any], module: nn.Module
) -> RunOptions:
    """Return the options of the run; exit the program if the run is complete already."""
    if options is not None:
        all_or_none(transport, lambda: _check_no_settings(settings))
        return options
    request = RunRequest(RunOptions, _named(settings, module), follows=False)
    all_or_none(transport, lambda: request.options)
    agreed = agree_on_resume(transport, request)
    if agreed is None:
        transport.close()
        raise SystemExit(0)
    if transport.rank == 0:
        guard.warn(warnings(agreed, typed_options() or {}))
    folders = {"run_dir": agreed.run_dir, "resume": agreed.resume}
    # The script may change its current folder before the run begins.
    return agreed.model_copy(
        update={name: Path(path).absolute() for name, path in folders.items() if path}
    )


def _named(settings: dict[str, Any], module: nn.Module) -> Settings:
    """Return arguments as settings, with names for the model and data of the script."""
    named = {"model": own_class(module).__name__, "dataset": OWN_DATA, **settings}
    return {
        (current_name(RunOptions, name),): Setting(value, name) for name, value in named.items()
    }


def overridden(
    options: RunOptions | None,
    settings: dict[str, Any],
    typed: Settings,
    optimizer: object,
    schedule: object,
) -> dict[str, Any]:
    """Return the arguments of a script that a command runs, with the command's options over them.

    A file of options may contain some that the script's objects determine; they are ignored.

    Args:
        options: of the script; None if they are in ``settings``.
        settings: of the script.
        typed: on the command line, or in a file that it names.
        optimizer: of the script, if it is an object.
        schedule: of the script.

    Raises:
        UserError: an option on the command line is one that the script's objects determine.
    """
    if options is not None:
        _check_no_settings(settings)
        settings = options.model_dump(exclude_unset=True)
    objects = _determined(optimizer, schedule)
    upper: Settings = {}
    for path, setting in typed.items():
        holder = objects.get(path[0])
        if holder is not None and setting.origin.startswith("--"):
            raise UserError(
                f"{setting.origin} has no effect on this script, whose {holder} determines it. "
                "Leave it out."
            )
        if holder is None and path[0] in RunOptions.model_fields:
            upper[path] = setting
    own: Settings = {
        (current_name(RunOptions, name),): Setting(value, name) for name, value in settings.items()
    }
    return as_values(overlay(RunOptions, own, upper))


def _determined(optimizer: object, schedule: object) -> dict[str, str]:
    """Return the options that objects of the script determine, with the name of the object."""
    names = dict.fromkeys(NO_EFFECT, "training loop") | {"model": "model", "dataset": "data set"}
    if optimizer is not None:
        names |= dict.fromkeys(("optimizer", "optimizer_options", *IN_THE_OPTIMIZER), "optimizer")
    if schedule is not None:
        names |= dict.fromkeys(IN_THE_SCHEDULE, "schedule")
    return names


def simulated_options(
    rank: SimulatedRank, settings: dict[str, Any], module: nn.Module
) -> SimulateOptions:
    """Return the options of a simulated script.

    Args:
        rank: with the options of the command, of which only those of the cluster are used.
        settings: of the run, already overridden by those of the command.
        module: the model.
    """
    own = RunOptions.model_fields
    of_cluster = {path: setting for path, setting in rank.typed.items() if path[0] not in own}
    return build(SimulateOptions, _named(settings, module) | of_cluster)


def for_one_process(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings for one process, to debug a script that is written for several.

    With one worker, every algorithm is plain training; ar-sgd needs no server for it.
    """
    name = settings.get("algorithm", RunOptions.model_fields["algorithm"].default)
    algorithm = find_algorithm(name)
    settings = {name: value for name, value in settings.items() if name not in GROUPING}
    if not algorithm.has_servers and algorithm.least_workers == 1:
        return settings
    if not settings.get("quiet", False):
        alone = f"one process trains alone, with ar-sgd; to use {name}, run mpirun -np 3 or more"
        guard.warn([alone])
    kept = {name: value for name, value in settings.items() if name not in PARALLEL_ONLY}
    return {**kept, "algorithm": "ar-sgd"}


def _check_no_settings(settings: dict[str, Any]) -> None:
    if settings:
        raise UserError(
            f"options cannot be combined with single settings ({', '.join(settings)}). Leave one "
            "of the two out."
        )
