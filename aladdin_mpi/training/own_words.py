"""Errors about options, in the words of a program that gives them as arguments."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from pydantic import BaseModel

from aladdin_mpi.errors import UserError
from aladdin_mpi.options import RunOptions

NO_EFFECT = {
    "precision": "put forward and loss into torch.autocast",
    "data_dir": "give batches() the data set",
    "download": "give batches() the data set",
    "cache": "give batches() the data set",
}
"""Options that only the built-in training follows, and what to do in a loop of one's own."""


def check_effect(given: Collection[str]) -> None:
    """Refuse arguments that would have no effect.

    Raises:
        UserError: names the first of them.
    """
    for name in NO_EFFECT:
        if name in given:
            raise UserError(
                f"{name}: expected only for the built-in training, got it for a loop of your own, "
                f"where it has no effect; leave it out, and {NO_EFFECT[name]}"
            )


@contextmanager
def in_own_words() -> Iterator[None]:
    """Errors from in here name arguments, such as ``max_loss``, and not ``--max-loss``."""
    try:
        yield
    except UserError as error:
        raise UserError(as_arguments(str(error)), agreed=error.agreed) from error.__cause__


def as_arguments(text: str) -> str:
    """``text`` with each option of the command line as an argument of DataParallel."""
    return re.sub(r"--([a-z][a-z0-9-]*)", lambda found: _argument(found[1], found[0]), text)


def _argument(flag: str, otherwise: str) -> str:
    name = flag.replace("-", "_")
    if name in RunOptions.model_fields:
        return name
    for group, field in RunOptions.model_fields.items():
        kind = field.annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            continue
        own = name.removeprefix(f"{group}_")
        if own != name and own in kind.model_fields:
            return f"{group}={{{own!r}: ...}}"
    return otherwise
