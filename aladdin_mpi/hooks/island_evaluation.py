"""Evaluation of a model that FSDP has divided: on the first island, between two segments.

No rank has the whole model, so the island's members measure it together. Training waits for
them, after the checkpoint of the segment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aladdin_mpi.control.budget import WorkerReport
from aladdin_mpi.control.exchange import broadcast, gather
from aladdin_mpi.data.loading import global_generators_kept
from aladdin_mpi.flat.replica import Replica
from aladdin_mpi.flat.shards import group_of, reshard
from aladdin_mpi.hooks.evaluation import Evaluations
from aladdin_mpi.hooks.measurement import Figures, in_eval_mode
from aladdin_mpi.process.guard import no_exit
from aladdin_mpi.session.context import collect_model, measuring_island, share_buffers
from aladdin_mpi.session.coordinator import Coordinator, SegmentEnd


class IslandEvaluations(Evaluations):
    """Evaluations of a sharded model; every rank takes part in each."""

    def copy_module(self) -> None:
        """Do nothing: the model itself is measured."""

    def on_report(self, run: Coordinator, report: WorkerReport) -> None:
        """End the segment if an evaluation is due."""
        is_due = bool(self._every) and self._next <= run.budget.drawn < run.plan.total
        if is_due and self._evaluate is not None:
            run.budget.stop()

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
        buffers = [buffer.clone() for buffer in self._context.module.buffers()]
        collect_model(self._context, self._role)
        figures = self._measure_together()
        replica.set(own)
        for buffer, before in zip(self._context.module.buffers(), buffers, strict=True):
            buffer.copy_(before)
        if run is not None:
            self._next = self._due_after(end.drawn)
            self._take_variance(end.drawn, variance)
            self._take_figures(run.moment(), figures, 0)

    def _measure_together(self) -> Figures:
        """Return at rank 0 the figures of the model; every rank calls it.

        The module's batch norms have the statistics of this model afterwards on this island, unless
        the first one, which has the recorded calls, has failed.
        """
        transport, module, figures = self._context.transport, self._context.module, None
        island = measuring_island(self._context)
        if transport.rank in island:
            with no_exit(), global_generators_kept(), in_eval_mode(module), torch.no_grad():
                if self._recalibrator is not None and island[0] == self._context.servers:
                    self._recalibrator.share_calls(group_of(module))
                    self._recalibrator.reestimate(module)
                if self._evaluate is not None:
                    figures = dict(self._evaluate(module))
            reshard(module)
        return next(filter(None, gather(transport, figures)), {})

    def measure_divided(self, model: Tensor | None) -> None:
        """Measure the trained model on the first island, and share its statistics."""
        self._final_figures = self._measure_together()
        if self._recalibrator is not None:
            share_buffers(self._context, self._context.servers)

    def measure(self, run: Coordinator, model: Tensor | None) -> Figures:
        """Return the trained model's figures at rank 0, and record them."""
        if self._evaluate is None or not self._final_figures:
            return {}
        self.record_final(run, self._final_figures)
        return self._final_figures
