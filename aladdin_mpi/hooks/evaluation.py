"""The evaluations of a run: their schedule, measurement and lines of metrics."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aladdin_mpi.control.budget import WorkerReport
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.data.loading import global_generators_kept
from aladdin_mpi.flat.replica import Replica
from aladdin_mpi.flat.vectors import full
from aladdin_mpi.hooks.divided_evaluation import DividedEvaluation, is_divided
from aladdin_mpi.hooks.measurement import (
    BatchNormRecalibrator,
    Evaluate,
    Figures,
    Measurement,
    copy_buffers,
)
from aladdin_mpi.hooks.recorder import Metrics
from aladdin_mpi.hooks.variance import model_variance
from aladdin_mpi.process.guard import no_exit
from aladdin_mpi.session.context import Context, share_buffers, share_frozen
from aladdin_mpi.session.coordinator import Coordinator, RunEnd, RunHook
from aladdin_mpi.session.plan import Plan
from aladdin_mpi.worker.role import Role

FRAME_BYTES = 16
"""Header of a piece's values: its number and their weight."""


class Snapshots:
    """Copies of the global model, collected at rank 0 while training continues.

    A rank that holds a part of the model answers a request in the message handler, so that its
    training is not interrupted. In a simulation this takes no bandwidth.
    """

    def __init__(self, context: Context, role: Role) -> None:
        self._transport = transport = context.transport
        self._pieces = context.pieces
        self._role = role
        self._numel = context.whole.numel
        self._dtype = dtype = full(context.whole.parameters.dtype)
        self._projections = context.projections  # a copy may be a mean of several models
        self._device = context.whole.parameters.device
        self._mine = [
            number for number, piece in enumerate(self._pieces) if transport.rank in piece.holders
        ]
        self._on_copy: Callable[[Tensor], None] = lambda vector: None
        self._vector = torch.empty(0)
        self._weights: list[float] = []
        self._missing: set[tuple[int, int]] = set()
        transport.on_failure(self._lose)
        transport.exclude_from_traffic(Tag.SNAPSHOT, Tag.SHARD)
        self._others = {rank for piece in self._pieces for rank in piece.holders} - {0}
        if self._others:
            transport.on_message(Tag.SNAPSHOT, 1, self._answer)
            if transport.rank == 0:
                largest = max(piece.bucket.numel for piece in self._pieces)
                most = FRAME_BYTES + dtype.itemsize * largest
                transport.on_message(Tag.SHARD, most, self._collect)

    @property
    def busy(self) -> bool:
        """Whether a copy is being collected."""
        return bool(self._missing)

    def take(self, on_copy: Callable[[Tensor], None]) -> None:
        """Start to collect a copy at rank 0; ``on_copy`` is called with it (flat, on the CPU)."""
        self._on_copy = on_copy
        self._vector = torch.zeros(self._numel, dtype=self._dtype)
        self._weights = [0.0] * len(self._pieces)
        failed = self._transport.failed
        self._missing = {
            (rank, number)
            for number, piece in enumerate(self._pieces)
            for rank in piece.holders
            if rank not in failed
        }
        for rank in sorted(self._others - failed):
            self._transport.isend(torch.zeros(1, dtype=torch.uint8), rank, Tag.SNAPSHOT)
        self._role.when_whole(self._add_mine)

    def _add_mine(self) -> None:
        for number in self._mine:
            bucket = self._pieces[number].bucket
            self._add(0, number, self._role.weight(bucket), self._role.part(bucket))

    def _lose(self, rank: int) -> None:
        """Drop the part of a failed rank, which may complete the copy."""
        lost = {key for key in self._missing if key[0] == rank}
        if lost:
            self._missing -= lost
            self._finish()

    def _answer(self, source: int, message: Tensor) -> None:
        for number in self._mine:
            bucket = self._pieces[number].bucket
            head = torch.tensor([number, self._role.weight(bucket)], dtype=torch.float64)
            values = self._role.part(bucket).detach().to("cpu", self._dtype)
            frame = torch.cat([head.view(torch.uint8), values.view(torch.uint8)])
            self._transport.isend(frame, source, Tag.SHARD)

    def _collect(self, source: int, message: Tensor) -> None:
        number, weight = message[:FRAME_BYTES].clone().view(torch.float64).tolist()
        values = message[FRAME_BYTES:].clone().view(self._dtype)
        self._add(source, int(number), weight, values)

    def _add(self, source: int, number: int, weight: float, values: Tensor) -> None:
        piece = self._pieces[number]
        mine = self._vector[piece.part]
        if len(piece.holders) == 1:
            mine.copy_(values)
        elif weight:
            # A running mean is exact if all values are equal.
            self._weights[number] += weight
            mine.lerp_(values.to(mine.device, mine.dtype), weight / self._weights[number])
        self._missing.discard((source, number))
        self._finish()

    def _finish(self) -> None:
        if not self._missing:
            self._projections.apply(self._vector, self._device)
            self._on_copy(self._vector)


class Evaluations(RunHook):
    """A hook that measures copies of the model during training, and the trained model.

    Over MPI, rank 0 measures in a separate thread, and an evaluation that is due while another one
    runs is skipped. In a simulation, evaluations take no time.

    Args:
        role: this rank's.
        metrics: at rank 0, opened before by another hook.
        evaluate: measures a module; None disables evaluations. Unless it is a
            :class:`.Measurement`, batch-norm statistics are estimated before it is called.
        after: called when this rank has measured a model.
    """

    def __init__(
        self,
        context: Context,
        plan: Plan,
        role: Role,
        metrics: Metrics | None,
        evaluate: Evaluate | None,
        after: Callable[[], None],
    ) -> None:
        self._context = context
        self._transport = context.transport
        self._after = after
        self._role = role
        self._evaluate = evaluate if context.is_real else None
        self._recalibrator: BatchNormRecalibrator | None = None
        self._divided: DividedEvaluation | None = None
        if not isinstance(self._evaluate, Measurement):
            self._recalibrator = BatchNormRecalibrator(context) if context.is_real else None
        elif is_divided(context):
            self._divided = DividedEvaluation(context, self._evaluate, after)
        self._variance = model_variance(context, role)
        self._snapshots = Snapshots(context, role)
        self._metrics = metrics
        self._copy: tuple[nn.Module, Replica] | None = None
        """Copy of the module on the CPU of rank 0, for evaluations there."""
        self._thread: threading.Thread | None = None
        self._lines: dict[int, dict[str, Any]] = {}
        self._lines_lock = threading.Lock()
        self._every = self._next = plan.eval_every
        self._measuring: int | None = None
        """Samples drawn at the start of the evaluation in progress."""
        self._measured: Figures = {}
        """Figures of the last evaluation; not in checkpoints."""
        self._final_variance: float | None = None
        self._final_figures: Figures | None = None
        """Figures of the trained model measured by the workers, if they share evaluations."""

    @property
    def are_divided(self) -> bool:
        """Whether the workers share each evaluation."""
        return self._divided is not None

    @property
    def busy(self) -> bool:
        """Whether an evaluation is in progress."""
        divided = self._divided is not None and self._divided.busy
        return divided or (self._thread is not None and self._thread.is_alive())

    def on_start(self) -> None:
        """Start recording inputs for batch-norm statistics."""
        if self._recalibrator is not None:
            self._recalibrator.open()

    def on_begin(self, run: Coordinator) -> None:
        """Schedule the next evaluation of a resumed run.

        It is due at once if an evaluation was interrupted. A run that was evaluated at its end, and
        is now longer, continues with the next interval.
        """
        assert self._metrics is not None
        due, drawn = self._measuring, run.budget.drawn
        if due is not None and not self._metrics.has("eval", due):
            self._next = due
        elif self._every and self._metrics.has("eval", drawn):
            self._next = max(self._next, self._due_after(drawn))
        self._measuring = None
        if self._evaluate is not None:  # not earlier, as this copies the model
            self.copy_module()

    def copy_module(self) -> None:
        """Make the copy of the model that rank 0 measures."""
        module = copy.deepcopy(self._context.module).cpu()
        self._copy = module, Replica(module)

    def _due_after(self, drawn: int) -> int:
        return (drawn // self._every + 1) * self._every

    # -- during training ----------------------------------------------------------
    def on_report(self, run: Coordinator, report: WorkerReport) -> None:
        """Start an evaluation if one is due."""
        drawn = run.budget.drawn
        if self._every and self._next <= drawn < run.plan.total:
            self._next = self._due_after(drawn)
            if self._evaluate is not None and not (self.busy or self._snapshots.busy):
                self._begin(run)

    def _begin(self, run: Coordinator) -> None:
        moment, before = run.moment(), run.gradients
        self._measuring = samples = moment["samples"]

        def record(figures: Figures) -> None:
            self._take_figures(moment, figures, run.gradients - before)

        def measure(vector: Tensor) -> None:
            alone = partial(self._measure_alone, vector, record)
            if self._divided is None:
                alone()
            else:
                self._divided.begin(vector, record, give_up=alone)

        self._variance.take(samples, self._take_variance)
        self._snapshots.take(measure)

    def _measure_alone(self, vector: Tensor, record: Callable[[Figures], None]) -> None:
        def run() -> None:
            record(self._measure(vector))

        if self._transport.models_time:
            run()
        else:
            self._thread = threading.Thread(target=run, name="evaluation", daemon=True)
            self._thread.start()

    def _measure(self, vector: Tensor) -> Figures:
        """Measure the model with the parameters ``vector`` on this rank."""
        assert self._copy is not None and self._evaluate is not None
        module, replica = self._copy
        copy_buffers(self._context, self._context.module, module)
        replica.set(vector)
        # Restoring generators next to a training thread would repeat that thread's numbers.
        kept = global_generators_kept() if self._transport.models_time else nullcontext()
        with no_exit(), kept:
            if self._recalibrator is not None:
                self._recalibrator.reestimate(module)
                module.eval()
            memory = [parameter.data_ptr() for parameter in module.parameters()]
            with torch.no_grad():
                figures = self._evaluate(module)
            if memory != [parameter.data_ptr() for parameter in module.parameters()]:
                # It was moved to another device, and its parameters are no longer in the replica.
                self._copy = module.cpu(), Replica(module)
            self._after()
        return figures

    def _take_figures(self, moment: dict[str, Any], measured: Figures, gradients: int) -> None:
        """Record an evaluation of the model at ``moment``, which ended ``gradients`` later."""
        self._measured = measured
        figures = {**moment, **measured, "gradients_meanwhile": gradients}
        self._complete(moment["samples"], figures)

    def _take_variance(self, samples: int, value: float | None) -> None:
        self._complete(samples, {"model_variance": value})

    def _complete(self, samples: int, figures: dict[str, Any]) -> None:
        """Write a line when both its parts are available; over MPI two threads supply them."""
        with self._lines_lock:
            line = self._lines.setdefault(samples, {})
            line |= figures
            if not {"model_variance", "gradients_meanwhile"} <= line.keys():
                return
            del self._lines[samples]
            variance = line.pop("model_variance")
            assert self._metrics is not None
            self._metrics.append("eval", {**line, "model_variance": variance})
            if self._measuring == samples:
                self._measuring = None

    def on_end(self, ending: RunEnd) -> None:
        """Stop evaluations, unless the run is completed and its model is yet to be measured."""
        if ending is RunEnd.COMPLETED:
            return
        self.close()
        if self._recalibrator is not None and ending is not RunEnd.SUSPENDED:
            self._recalibrator.close()
        if ending is RunEnd.CLOSED:
            self._wait()  # the process continues without the run

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Stop sending results of measurements in progress."""
        if self._divided is not None:
            self._divided.close()

    def figures(self) -> Mapping[str, float]:
        """Return the figures of the last evaluation."""
        return self._measured

    def state_dict(self) -> dict[str, Any]:
        """Return the samples of the next evaluation, and of the one in progress."""
        return {"next_eval": self._next, "measuring": self._measuring}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; earlier versions shared ``next`` with the training log."""
        self._next = state["next_eval"] if "next_eval" in state else state["next"][1]
        self._measuring = state["measuring"]

    # -- at the end of the run: every rank calls these in this order ----------------
    def note_variance(self) -> None:
        """Measure the variance among the workers' models, while they still differ."""
        if self._context.is_real:
            self._final_variance = self._variance.at_end()

    def complete_statistics(self) -> None:
        """Complete the inputs for batch-norm statistics, and share the first worker's state."""
        if self._recalibrator is not None:
            self._recalibrator.complete()
        if self._context.is_real:
            share_frozen(self._context, self._context.servers)
            share_buffers(self._context, self._context.servers)

    def measure_divided(self, model: Tensor | None) -> None:
        """Let the workers measure the trained model, if they share evaluations."""
        if self._divided is not None and model is not None:
            self._final_figures = self._divided.at_end(model, self._context.options.timeout)

    def measure(self, run: Coordinator, model: Tensor | None) -> Figures:
        """Return the trained model's figures at rank 0, and update the module's buffers."""
        module, figures = self._context.module, self._final_figures
        if model is None or (self._copy is None and figures is None):
            if self._recalibrator is not None:
                self._recalibrator.reestimate(module)
            return {}
        self._wait()
        with self._transport.atomic():
            self._variance.give_up()  # do not wait for workers' answers any more
        if figures is None:
            assert self._copy is not None
            figures = self._measure(model)
            copy_buffers(self._context, self._copy[0], module)
        self.record_final(run, figures)
        return figures

    def record_final(self, run: Coordinator, figures: Figures) -> None:
        """Write the line of the trained model, unless it has been written."""
        drawn = run.budget.drawn
        assert self._metrics is not None
        if not self._metrics.has("eval", drawn):
            self._take_variance(drawn, self._final_variance)
            self._take_figures(run.moment(), figures, 0)

    def share_statistics(self) -> None:
        """Send the buffers of rank 0's module to every rank."""
        if self._recalibrator is not None:
            share_buffers(self._context, 0)
