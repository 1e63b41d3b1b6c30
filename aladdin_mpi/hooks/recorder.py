"""Output of rank 0 during training: metrics.jsonl and TensorBoard."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import floor, isfinite, log10
from pathlib import Path
from typing import Any

from aladdin_mpi.errors import DISK_FULL, UserError
from aladdin_mpi.process import extras, files, guard
from aladdin_mpi.process.files import append, check_own_folder, write_whole

DIGITS = 9
"""Significant digits of a figure: enough to distinguish any two fp32 numbers, ..."""
DECIMALS = 6
"""... and at least this many decimals, which preserves large numbers such as timestamps."""
SECONDS_DECIMALS = 6
SECONDS_DIGITS = 4
"""Minimum for times and durations, as simulated runs may last only microseconds."""
MEASURED_DIGITS = 7
MEASURED = frozenset({"samples_per_second", "bytes_sent_per_step"})
"""Quotients with few meaningful digits."""


def rounded(value: Any, name: str = "") -> Any:
    """Return a figure, or a tree of mappings and sequences of figures, rounded for output.

    Integers and other objects are unchanged; a float remains a float. Rounding is idempotent.
    ``name`` is that of the figure; in a mapping, the key is.
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
    """A run's lines of metrics, in a file to which several threads append.

    They are also written for TensorBoard, if it is installed. While the disk is full, lines are
    kept in memory, and TensorBoard's are lost.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / METRICS
        self._lock = threading.Lock()
        self._closed = False
        self._is_behind = False
        self.lines: list[dict[str, Any]] = []
        self._board: Any = None

    def open(self, samples: int) -> None:
        """Continue the file, without lines of an interrupted run after this many samples."""
        self.lines = [line for line in read_metrics(self._folder) if line["samples"] <= samples]
        self._write_all()
        self._board = _open_board(self._folder / TENSORBOARD, samples)

    def append(self, kind: str, values: Mapping[str, Any]) -> None:
        """Add a line of ``kind``; ``values`` has ``samples``."""
        line = rounded({"kind": kind, **values})
        with self._lock:
            if self._closed:  # an evaluation that ends after a suspended run
                return
            self.lines.append(line)
            with self._outliving_full_disk():
                if self._is_behind:
                    self._write_all()
                else:
                    append(self.path, files.written(line) + "\n")
                self._show(kind, values)

    def _write_all(self) -> None:
        write_whole(self.path, "".join(files.written(line) + "\n" for line in self.lines))
        self._is_behind = False

    def _show(self, kind: str, values: Mapping[str, Any]) -> None:
        """Pass figures to TensorBoard, whose writer raises the errors of earlier calls."""
        for name, value in values.items() if self._board is not None else ():
            if isinstance(value, (int, float)) and name != "samples":
                self._board.add_scalar(f"{kind}/{name}", value, values["samples"])

    @contextmanager
    def _outliving_full_disk(self) -> Iterator[None]:
        """Continue after an error of a full disk: write all lines again as soon as possible."""
        try:
            yield
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            if not self._is_behind:
                text = f"{self.path}: {error.strerror}; free space to have all metrics written"
                guard.warn([text])
            self._is_behind, self._board = True, None

    def has(self, kind: str, samples: int) -> bool:
        """Return whether a line of ``kind`` exists at this number of samples, as after a resume."""
        return any(line["kind"] == kind and line["samples"] == samples for line in self.lines)

    def close(self) -> None:
        """Flush buffers, and ignore later lines."""
        with self._lock:
            self._closed = True
            if self._is_behind:
                self._write_all()
            with self._outliving_full_disk():
                if self._board is not None:
                    self._board.close()


def _open_board(folder: Path, samples: int) -> Any:
    """Return TensorBoard's writer for the run after ``samples``; None if not installed."""
    if extras.missing("tensorboard"):
        return None
    check_own_folder(folder)
    from torch.utils.tensorboard import SummaryWriter  # slow, and only rank 0 needs it

    return SummaryWriter(str(folder), purge_step=samples)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics, without a last line truncated by a crash.

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
