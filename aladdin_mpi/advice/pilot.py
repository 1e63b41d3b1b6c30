"""What a sample teaches on the user's own task: short virtual runs with real gradients."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

from aladdin_mpi.advice import learning
from aladdin_mpi.advice.candidates import ground, plain
from aladdin_mpi.advice.learning import BASE, EXACT, Curve, Share
from aladdin_mpi.advice.options import Request
from aladdin_mpi.advice.pool import workers_of
from aladdin_mpi.errors import UserError

LINES = 40
"""Lines of metrics of a run, from which its loss is read."""


class Pilot:
    """Runs of all algorithms, each on the request's cluster.

    Args:
        names: of algorithms.
        tell: called with a few words when something has been done, and what is left to do.

    Raises:
        UserError: synchronous SGD has not got anywhere, so there is nothing to compare with.
    """

    def __init__(
        self, request: Request, names: Sequence[str], tell: Callable[[str, int, int], None]
    ) -> None:
        self._steps = int(request.options.pilot or 0)
        self._workers = request.simulated({}).workers
        curves: dict[str, Curve] = {}
        with workers_of(request.jobs) as pool:
            asked = list(dict.fromkeys([BASE, *(name for name in names if name not in EXACT)]))
            futures = {pool.submit(real_run, self._options(request, name)): name for name in asked}
            for done, future in enumerate(as_completed(futures), start=1):
                curves[futures[future]] = future.result()
                tell(f"pilot: {futures[future]}", done, len(asked))
        base = learning.mean_curve([curves[BASE]])
        if len(base) < LINES // 4 or base[-1][1] >= base[0][1]:
            raise UserError(
                f"--pilot {self._steps}: expected the loss of {BASE} to fall in so many steps, got "
                "none that has; give more steps, or another --lr"
            )
        self._shares = {
            name: learning.credited(
                [learning.taught(learning.mean_curve([found]), base)], converged=False
            )[0]
            for name, found in curves.items()
        }

    def _options(self, request: Request, name: str) -> dict[str, Any]:
        options, on = request.options, ground(request.simulated({}), 1.0)
        rate = {} if options.lr is None else {"lr": options.lr}
        whole = options.batch_size * self._workers
        asked = request.simulated(
            {
                "compute": "real",
                "model": options.model,
                "dataset": options.dataset,
                "data_dir": options.data_dir,
                "batch_size": options.batch_size,
                "samples": whole * self._steps,
                "log_every": whole * max(1, self._steps // LINES),
                "eval_every": 0,
                "seed": options.seed,
                "quiet": True,
                **rate,
                **plain(name, on).fields,
            }
        )
        return asked.model_dump(mode="json")

    def share(self, algorithm: str) -> Share:
        """What a sample teaches with an algorithm."""
        if algorithm in EXACT:
            return Share(1.0)
        source = f"pilot of {self._steps} steps, 1 seed"
        if self._shares[algorithm] == learning.MOST:
            source += f", capped at {learning.MOST:.2f}"
        return Share(self._shares[algorithm], source, is_sure=self._steps >= 5 * LINES)


def real_run(options: dict[str, Any]) -> Curve:
    """The training loss of a virtual run with real gradients, in this process."""
    from aladdin_mpi.options.run import SimulateOptions
    from aladdin_mpi.run.simulator import simulate

    with tempfile.TemporaryDirectory(prefix="aladdin-pilot-") as folder:
        run = Path(folder) / "run"
        simulate(SimulateOptions.model_validate({**options, "run_dir": run}))
        return learning.curve(run)
