"""What a script asks of `DataParallel`, checked, and the options that follow from it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from aladdin_mpi.control.exchange import all_or_none
from aladdin_mpi.errors import ClosedError, UserError
from aladdin_mpi.options.algorithms import find_algorithm
from aladdin_mpi.options.general import OWN_DATA
from aladdin_mpi.options.reader import (
    Setting,
    Settings,
    as_argument,
    build,
    current_name,
    leaves,
    overlay,
)
from aladdin_mpi.options.run import RunOptions, RunRequest, SimulateOptions
from aladdin_mpi.process import guard
from aladdin_mpi.run.resumption import agree_on_resume
from aladdin_mpi.run.script import SimulatedRank
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
"""Options that only the built-in training follows, and what to do in a loop of one's own."""
_ARGUMENTS = {leaf.flag: as_argument(path) for path, leaf in leaves(RunOptions).items()}


def check_effect(given: Collection[str]) -> None:
    """Refuse arguments that would have no effect.

    Raises:
        UserError: names the first of them.
    """
    for name in NO_EFFECT:
        if name in given:
            raise UserError(
                f"{name} has no effect in a custom training loop. Leave it out, and "
                f"{NO_EFFECT[name]}."
            )


@contextmanager
def in_own_words() -> Iterator[None]:
    """Errors from in here name arguments, such as ``max_loss``, and not ``--max-loss``."""
    try:
        yield
    except ClosedError:
        raise
    except UserError as error:
        raise UserError(as_arguments(str(error)), agreed=error.agreed) from error.__cause__


def as_arguments(text: str) -> str:
    """``text`` with each option of the command line as an argument of DataParallel."""
    return re.sub(r"--[a-z][a-z-]*", lambda found: _ARGUMENTS.get(found[0], found[0]), text)


FOR_SEVERAL = ("servers", "wire", "checksum", "compression", "dgc")
"""Settings that mean nothing to one process."""


def check_given(module: object, evaluate: object, settings: dict[str, Any]) -> None:
    """Check the arguments that are no options.

    Raises:
        UserError: one is not what it has to be, or has no effect.
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


def agreed_options(
    transport: Transport, options: RunOptions | None, settings: dict[str, Any], module: nn.Module
) -> RunOptions:
    """The options of the run; for a run that is complete the program ends here."""
    if options is not None:
        all_or_none(transport, lambda: _check_no_settings(settings))
        return options
    request = RunRequest(RunOptions, _named(settings, module), follows=False)
    all_or_none(transport, lambda: request.options)
    agreed = agree_on_resume(transport, request)
    if agreed is None:
        transport.close()
        raise SystemExit(0)
    return agreed


def _named(settings: dict[str, Any], module: nn.Module) -> Settings:
    """Arguments as settings; the commands' defaults name a model and data that these are not."""
    named = {"model": type(module).__name__, "dataset": OWN_DATA, **settings}
    return {
        (current_name(RunOptions, name),): Setting(value, name) for name, value in named.items()
    }


def simulated_options(
    rank: SimulatedRank, settings: dict[str, Any], module: nn.Module
) -> SimulateOptions:
    """The options of a script in virtual time: those typed go over its own."""
    return build(SimulateOptions, overlay(SimulateOptions, _named(settings, module), rank.typed))


def for_one_process(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with which one process trains, for debugging, what was written for several.

    With one worker every algorithm is plain training, and ar-sgd needs no server for it.
    """
    name = settings.get("algorithm", RunOptions.model_fields["algorithm"].default)
    algorithm = find_algorithm(name)
    if not algorithm.has_servers and algorithm.least_workers == 1:
        return settings
    if not settings.get("quiet", False):
        alone = f"one process trains alone, with ar-sgd; to use {name}, run mpirun -np 3 or more"
        guard.warn([alone])
    kept = {name: value for name, value in settings.items() if name not in FOR_SEVERAL}
    return {**kept, "algorithm": "ar-sgd"}


def _check_no_settings(settings: dict[str, Any]) -> None:
    if settings:
        raise UserError(
            f"options cannot be combined with single settings ({', '.join(settings)}). Leave one "
            "of the two out."
        )
