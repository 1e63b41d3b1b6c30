"""The two engines that run a cell: MPI in the network lab, and the simulator.

The simulated network's parameters are the same for every cell (`LINKS`), except for the rate. None
of them is fitted to a training run.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import SimulateOptions, parse
from benchmarks.busy import BusyCores
from benchmarks.cells import Cell, row
from benchmarks.lab import Lab
from benchmarks.resting import resting
from benchmarks.spread import spread

GOODPUT = 1448 / 1514
"""Payload share of a lab link's rate, which counts Ethernet frames of 1514 bytes with 1448 bytes of
a message; `benchmarks.progress` measures 0.958 with messages of 50 MB."""
LINKS = {
    "--latency-us": 600.0,
    "--message-overhead-us": 20.0,
    "--local-latency-us": 600.0,
    "--local-bandwidth-gbit": 20.0,
    "--sharing": "tcp",
}
"""Other parameters of the lab's network. They were set before the first cell was run and have not
been fitted since, except for how messages share links, which was set later from traces of messages
alone (`benchmarks.sharing`). The latency is that of a message that is announced first: three trips
with a polling rank at each end. `benchmarks.calibration` measures half of it and more Gbit/s inside
a host; between hosts the shaped link's burst hides it. With evenly shared links, 77 of the 88 cells
that `benchmarks.agreement` had without `osgp` were within 5 % with its values, and 81 with these.
"""
HOROVOD_ENVIRONMENT = {
    "OMPI_MCA_coll": "^han",
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
}
"""Settings of the baseline: the fastest all-reduce in the lab, Open MPI's ring. The hierarchical
one (han) sends pieces of 64 KiB and took five times as long, Open MPI's default 1.2 times."""
START_SECONDS = 15.0
"""Seconds of an MPI run before its first and after its last step, on two cores."""
_LIMIT = 300.0
STOLEN = 0.05
"""Largest share of its cores that the machine may lose over any ten seconds of an MPI run: other
virtual machines of the same host took up to half of them for minutes."""
TRIES = 3


class Engine(ExitStack, ABC):
    """Runs cells; a context manager that closes what it has opened."""

    name: str

    def run(self, cell: Cell) -> dict[str, Any]:
        """Train once and return the figures of :func:`benchmarks.cells.row`.

        Raises:
            UserError: the run failed; contains its output.
        """
        with tempfile.TemporaryDirectory(prefix="cell-") as folder:
            run_dir = Path(folder) / "run"
            more = self._train(cell, run_dir)
            return {**_read(cell, run_dir), **more}

    @abstractmethod
    def _train(self, cell: Cell, run_dir: Path) -> Mapping[str, Any]:
        """Train into ``run_dir`` and return further figures of the row."""


class VirtualEngine(Engine):
    """`aladdin_mpi.simulate` with a model of the lab's network, in this process."""

    name = "virtual"

    def _train(self, cell: Cell, run_dir: Path) -> Mapping[str, Any]:
        from aladdin_mpi.run.trainer import simulate

        words = [*cell.options(run_dir), *cluster_options(cell)]
        simulate(parse(SimulateOptions, words, "aladdin_mpi.simulate", ""))
        return {}


def cluster_options(cell: Cell) -> list[str]:
    """Return the options of `aladdin_mpi.simulate` that model the lab."""
    values: dict[str, object] = {
        "--workers": cell.workers,
        "--hosts": cell.hosts,
        "--placement": spread(cell.servers),
        "--bandwidth-gbit": cell.rate_gbit * GOODPUT,
        **LINKS,
    }
    return [word for name, value in values.items() for word in (name, str(value))]


class LabEngine(Engine):
    """`aladdin_mpi.train` over MPI in the network lab, kept for cells with equal networks."""

    name = "real"

    def __init__(self) -> None:
        super().__init__()
        self._lab: Lab | None = None
        self._resting: dict[str, str] | None = None

    def run(self, cell: Cell) -> dict[str, Any]:
        """As :meth:`Engine.run`; repeat up to `TRIES` times if other machines took cores."""
        found = []
        for _ in range(TRIES):
            found.append(super().run(cell))
            if (found[-1]["stolen"] or 0.0) <= STOLEN:
                break
        return min(found, key=lambda figures: figures["stolen"] or 0.0)

    def _train(self, cell: Cell, run_dir: Path) -> Mapping[str, Any]:
        lab = self._lab_for(cell)
        args = ["-m", "aladdin_mpi.train", *cell.options(run_dir), *cell.mpi_extra]
        environment = self._for_horovod() if "horovod" in cell.mpi_extra else {}
        before = lab.bytes_sent()
        with BusyCores() as busy:
            limit = _LIMIT + 4 * cell.seconds
            done = lab.run(cell.placement, args, timeout=limit, env=environment)
        if done.returncode != 0:
            raise UserError(f"{cell.describe()}: the run failed:\n{done.stdout}{done.stderr}")
        return {
            "cores busy": busy.cores,
            "stolen": busy.stolen,
            "sent between hosts, MB": (lab.bytes_sent() - before) / 1e6,
        }

    def _for_horovod(self) -> dict[str, str]:
        if self._resting is None:
            folder = self.enter_context(tempfile.TemporaryDirectory(prefix="resting-"))
            self._resting = resting(Path(folder))
        return {**HOROVOD_ENVIRONMENT, **self._resting}

    def _lab_for(self, cell: Cell) -> Lab:
        lab = self._lab
        if lab is None or (lab.hosts, lab.rate_gbit) != (cell.hosts, cell.rate_gbit):
            self.close()
            self._lab = self._resting = None  # in case the next one cannot be built
            self._lab = lab = self.enter_context(Lab(cell.hosts, cell.rate_gbit))
        return lab


def _read(cell: Cell, run_dir: Path) -> dict[str, Any]:
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    with contextlib.closing((run_dir / "metrics.jsonl").open(encoding="utf-8")) as lines:
        metrics = [json.loads(line) for line in lines]
    return row(cell, summary, metrics)
