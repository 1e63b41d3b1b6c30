"""Evaluation of a model that FSDP has divided: on the first island, between two segments.

No rank has the whole model, so its members measure it together. Training waits meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from aladdin_mpi.control.budget import WorkerReport
from aladdin_mpi.control.exchange import broadcast, gather
from aladdin_mpi.data.loading import global_generators_kept
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.replica import Replica
from aladdin_mpi.hooks.evaluation import Evaluations
from aladdin_mpi.hooks.measurement import Evaluate, Figures, batch_norms
from aladdin_mpi.hooks.recorder import Metrics
from aladdin_mpi.process.guard import no_exit
from aladdin_mpi.session.context import Context, collect_model
from aladdin_mpi.session.coordinator import Coordinator, SegmentEnd
from aladdin_mpi.session.plan import Plan
from aladdin_mpi.worker.role import Role


class IslandEvaluations(Evaluations):
    """Evaluations of a sharded model; every rank takes part in each.

    Raises:
        UserError: the model has batch norms, whose statistics no rank can estimate alone.
    """

    def __init__(
        self,
        context: Context,
        plan: Plan,
        role: Role,
        metrics: Metrics | None,
        evaluate: Evaluate | None,
    ) -> None:
        if context.options.bn_batches and batch_norms(context.module):
            raise UserError(
                "model: its parameters are divided by FSDP, and the statistics of its batch norms "
                "cannot be estimated again from the first worker's batches. Pass bn_batches=0 to "
                "keep each worker's own, or use another norm, such as GroupNorm."
            )
        super().__init__(context, plan, role, metrics, evaluate, lambda: None)
        self._role = role
        self._first = context.islands.members[0]

    def copy_module(self) -> None:
        """Do nothing: the model itself is measured."""

    def on_report(self, run: Coordinator, report: WorkerReport) -> None:
        """Do nothing: evaluations end a segment."""

    def on_settled(self, end: SegmentEnd, run: Coordinator | None) -> None:
        """Measure the global model if an evaluation is due."""
        if end.ends_run or end.lost is not None or self._evaluate is None:
            return
        is_due = run is not None and bool(self._every) and self._next <= end.drawn
        if not broadcast(self._context.transport, is_due):
            return
        replica = self._context.whole
        assert isinstance(replica, Replica)
        variance, own = self._variance.at_end(), replica.parameters.clone()
        collect_model(self._context, self._role)
        figures = self._measure_together()
        replica.set(own)
        if run is not None:
            self._next = self._due_after(end.drawn)
            self._take_variance(end.drawn, variance)
            self._take_figures(run.moment(), figures, 0)

    def _measure_together(self) -> Figures:
        """Return at rank 0 the figures of the model; every rank calls it."""
        transport, figures = self._context.transport, None
        if transport.rank in self._first and self._evaluate is not None:
            module = self._context.module
            with no_exit(), global_generators_kept(), _in_eval_mode(module), torch.no_grad():
                figures = dict(self._evaluate(module))
        return next(filter(None, gather(transport, figures)), {})

    def measure_divided(self, model: Tensor | None) -> None:
        """Measure the trained model on the first island."""
        if self._evaluate is not None:
            self._final_figures = self._measure_together()


@contextmanager
def _in_eval_mode(module: nn.Module) -> Iterator[None]:
    modes = {each: each.training for each in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for each, mode in modes.items():
            each.training = mode
