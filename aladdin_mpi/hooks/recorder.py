"""What rank 0 writes during training: metrics.jsonl and TensorBoard."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from math import floor, isfinite, log10
from pathlib import Path
from typing import Any

from aladdin_mpi.errors import UserError
from aladdin_mpi.process import extras, files
from aladdin_mpi.process.files import append, check_own_folder, write_whole

DIGITS = 9
"""Significant digits of a figure: as many as tell any two numbers of fp32 apart, ..."""
DECIMALS = 6
"""... and at least so many decimals, so that of large ones, such as a date, nothing is lost."""
SECONDS_DECIMALS = 6
SECONDS_DIGITS = 4
"""Of moments and durations at least, for those of modelled runs that last some microseconds."""
MEASURED_DIGITS = 7
MEASURED = frozenset({"samples_per_second", "bytes_sent_per_step"})
"""Quotients, of which digits far behind the point say nothing."""


def rounded(value: Any, name: str = "") -> Any:
    """A figure, or all of those in a tree of mappings and sequences, rounded to be written.

    Integers and what is no number stay as they are; a float stays a float. To round twice
    changes nothing. ``name`` is the figure's; in a mapping each has its key.
    """
    if isinstance(value, Mapping):
        return {key: rounded(each, str(key)) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each, name) for each in value]
    if not isinstance(value, float) or not isfinite(value) or not value:
        return value
    return round(value, _decimals(value, name))


def _decimals(value: float, name: str) -> int:
    before_point = floor(log10(abs(value))) + 1
    if name == "seconds":
        return max(SECONDS_DECIMALS, SECONDS_DIGITS - before_point)
    if name in MEASURED:
        return max(0, MEASURED_DIGITS - before_point)
    return max(DECIMALS, DIGITS - before_point)


METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class Metrics:
    """A run's lines of metrics, in a file that several threads append to.

    They go to TensorBoard's files as well, if it is installed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / METRICS
        self._lock = threading.Lock()
        self._closed = False
        self.lines: list[dict[str, Any]] = []
        self._board: Any = None

    def open(self, samples: int) -> None:
        """Continue the file, without what an interrupted run wrote after this many samples."""
        self.lines = [line for line in read_metrics(self._folder) if line["samples"] <= samples]
        write_whole(self.path, "".join(files.written(line) + "\n" for line in self.lines))
        self._board = _open_board(self._folder / TENSORBOARD, samples)

    def append(self, kind: str, values: Mapping[str, Any]) -> None:
        """Add a line of ``kind``; ``values`` has ``samples``."""
        line = rounded({"kind": kind, **values})
        with self._lock:
            if self._closed:  # an evaluation that ends after a suspended run
                return
            self.lines.append(line)
            append(self.path, files.written(line) + "\n")
            if self._board is None:
                return
            for name, value in values.items():
                if isinstance(value, (int, float)) and name != "samples":
                    self._board.add_scalar(f"{kind}/{name}", value, values["samples"])

    def has(self, kind: str, samples: int) -> bool:
        """Whether there is a line of ``kind`` at this place of the run, as after a resume."""
        return any(line["kind"] == kind and line["samples"] == samples for line in self.lines)

    def close(self) -> None:
        """Write out what is buffered, and take no more."""
        with self._lock:
            self._closed = True
            if self._board is not None:
                self._board.close()


def _open_board(folder: Path, samples: int) -> Any:
    """TensorBoard's writer for the run from ``samples`` on; None if it is not installed."""
    if extras.missing("tensorboard"):
        return None
    check_own_folder(folder)
    from torch.utils.tensorboard import SummaryWriter  # slow, and only rank 0 needs it

    return SummaryWriter(str(folder), purge_step=samples)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics; a last line cut off by a crash is left out.

    Raises:
        UserError: the file cannot be read.
    """
    path = folder / METRICS
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: the metrics cannot be read ({error}). Remove the file, or use another copy "
            "of the run folder."
        ) from error
    lines = []
    for text in texts:
        try:
            line = files.read(text)
        except ValueError:
            break
        if not isinstance(line, dict) or not {"kind", "samples"} <= line.keys():
            break
        lines.append(line)
    return lines
