"""Evaluation of the global model: beside training, never inside it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from aladdin_mpi.data.loading import global_generators_kept
from aladdin_mpi.model.replica import Replica
from aladdin_mpi.process.guard import no_exit
from aladdin_mpi.run.divided_evaluation import DividedEvaluation
from aladdin_mpi.run.measurement import Evaluate

Record = Callable[[dict[str, Any], Mapping[str, float]], None]
"""Takes what is known of the moment of a copy, and what was measured."""


class Evaluator:
    """Measures copies of the global model, in a thread of its own over MPI.

    In virtual time an evaluation takes no time, and is made on the spot. Over MPI one
    that is due while another still runs is left out.

    Args:
        module: as at the start; it is copied.
        evaluate: the measurement.
        threaded: whether to measure in a thread.
        divided: has the workers measure; this rank does where they cannot.
    """

    def __init__(
        self,
        module: nn.Module,
        evaluate: Evaluate,
        threaded: bool,
        divided: DividedEvaluation | None = None,
    ) -> None:
        self.module = copy.deepcopy(module).cpu()
        self._replica = Replica(self.module)
        self._evaluate = evaluate
        self._threaded = threaded
        self._divided = divided
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether an evaluation is under way."""
        divided = self._divided is not None and self._divided.busy
        return divided or (self._thread is not None and self._thread.is_alive())

    def submit(self, vector: Tensor, moment: dict[str, Any], record: Record) -> None:
        """Evaluate a copy of the model taken at ``moment``; ``record`` is called with both."""
        if self._divided is None:
            self._measure_alone(vector, moment, record)
            return
        self._divided.begin(
            vector,
            lambda figures: record(moment, figures),
            lambda: self._measure_alone(vector, moment, record),
        )

    def _measure_alone(self, vector: Tensor, moment: dict[str, Any], record: Record) -> None:
        if not self._threaded:
            self._run(vector, moment, record)
            return
        self._thread = threading.Thread(
            target=self._run, args=(vector, moment, record), name="evaluation", daemon=True
        )
        self._thread.start()

    def _run(self, vector: Tensor, moment: dict[str, Any], record: Record) -> None:
        record(moment, self.measure(vector))

    def measure(self, vector: Tensor) -> Mapping[str, float]:
        """Measure the model with the parameters ``vector`` now."""
        self._replica.set(vector)
        # Beside a thread that trains, putting them back would repeat what that has drawn.
        with no_exit(), nullcontext() if self._threaded else global_generators_kept():
            return self._evaluate(self.module)

    def wait(self) -> None:
        """Wait for the evaluation under way."""
        if self._thread is not None:
            self._thread.join()
