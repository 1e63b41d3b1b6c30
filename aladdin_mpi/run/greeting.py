"""The first words of a command, before what takes seconds: reading options, importing torch."""

from __future__ import annotations

from collections.abc import Sequence

from aladdin_mpi.options.settings import Settings
from aladdin_mpi.process import console

SILENT = ("-h", "--help", "--version", "--quiet")
FILES = ("--config", "--resume")
"""What they name has to be read first: it may ask for silence as well."""


class Greeting:
    """Says once that the program has begun, unless it is to be quiet.

    Args:
        text: what is said.
        words: the command line; it need not have been checked.
    """

    def __init__(self, text: str, words: Sequence[str]) -> None:
        self._text = text
        self._said = False
        if not any(word.startswith((*SILENT, *FILES)) for word in words):
            self._say()

    def settings_read(self, settings: Settings) -> None:
        """Say it now if it has not been said; the settings need not have been checked."""
        quiet = settings.get(("quiet",))
        if not self._said and not (quiet and quiet.value):
            self._say()

    def _say(self) -> None:
        self._said = True
        console.say(f"aladdin_mpi: {self._text}")
