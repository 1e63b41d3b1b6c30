"""Errors about options, in the words of a program that gives them as arguments."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from aladdin_mpi.errors import ClosedError, UserError
from aladdin_mpi.options.fields import leaves
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.options.settings import as_argument

NO_EFFECT = {
    "precision": "put forward and loss into torch.autocast",
    "stage": "copy the data before",
    "data_dir": "give batches() the data set",
    "download": "give batches() the data set",
    "cache": "give batches() the data set",
    "image_size": "give batches() images of that size",
    "augment": "give batches() a data set that augments its samples",
    "corrupt_images": "give batches() a data set that does it",
    "shuffle_buffer": "give load_dataset() one",
    "check_images": "look at the images before",
    "evaluate_on": "rank 0 calls evaluate(), with a module on its CPU",
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
                f"{name}: expected only for the built-in training, got it for a loop of your own, "
                f"where it has no effect; leave it out, and {NO_EFFECT[name]}"
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
