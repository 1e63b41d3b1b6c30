"""The run's checkpoints: written between its segments, and taken up when it is resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from aladdin_mpi.control.exchange import all_or_none, broadcast, gather
from aladdin_mpi.data.sampler import Period
from aladdin_mpi.errors import UserError
from aladdin_mpi.optimizers.sgd import LearningRate
from aladdin_mpi.options.run import RESUME_FIELDS, agreed
from aladdin_mpi.run.checkpoint import CheckpointStore
from aladdin_mpi.run.context import Context, collect_model, make_layout
from aladdin_mpi.run.coordinator import Coordinator, RunHook, SegmentEnd
from aladdin_mpi.run.plan import Origin, Plan
from aladdin_mpi.run.resizing import StateAssembly, share, taken, tell
from aladdin_mpi.run.session import Session


class Checkpoints(RunHook):
    """Saves the run after each segment. Every rank writes its part.

    Args:
        optimizer: describes the optimizer; a run that resumes the checkpoint must share it.
        folder: of the run.
    """

    def __init__(self, context: Context, plan: Plan, optimizer: str, folder: Path) -> None:
        facts = agreed(context.options)
        option = {name: facts[name] for name in facts if name not in RESUME_FIELDS}
        transport = context.transport
        self._transport = transport
        self._store = CheckpointStore(folder)
        self._about = {
            "ranks": transport.size,
            "engine": transport.engine,
            "option": option,
            "optimizer": optimizer,
        }
        self._plan = plan
        self._saved: int | None = None

    def on_settled(self, end: SegmentEnd, run: Coordinator | None) -> None:
        """Save the run, unless it has not moved since. Closed, it may hold a part of a step.

        Raises:
            UserError: a rank cannot write its part; raised at rank 0.
            RefusedError: the same, on the other ranks.
        """
        if end.drawn != self._saved and end.closed_by is None:
            self._save(end, run)
            self._saved = end.drawn

    def _save(self, end: SegmentEnd, run: Coordinator | None) -> None:
        """Write a checkpoint, unless the last one is better."""
        transport, store, drawn, state = self._transport, self._store, end.drawn, end.state()
        doubts = gather(transport, end.doubt(state))
        doubt = broadcast(transport, next(filter(None, doubts), ""))
        if doubt:
            if run is not None:
                run.ledger.checkpoint_skipped(drawn, doubt)
            return  # the last checkpoint stays: it is sound
        origin = end.origin.as_json(self._plan.schedule_step)
        about = {**self._about, "moment": end.moment, **origin}

        def first(step: Callable[[], None]) -> None:
            all_or_none(transport, lambda: step() if transport.rank == 0 else None)

        try:
            first(lambda: store.begin(drawn))
            entry = all_or_none(transport, lambda: store.write(drawn, transport.rank, state))
            entries = gather(transport, entry)
            first(lambda: store.commit(drawn, entries, about))
        except UserError:  # at rank 0, when every rank has tried
            store.discard(drawn)
            raise

    # -- resuming ---------------------------------------------------------------------------
    def resume(self, session: Session, lr: LearningRate) -> None:
        """Take up the last checkpoint. Every rank calls it.

        Args:
            session: as it was made; its origin has written the checkpoint.
            lr: of the run that goes on.

        Raises:
            UserError: the checkpoint does not fit this run, or is damaged; raised at rank 0.
            RefusedError: the same, on the other ranks.
        """
        context, origin = session.context, session.origin
        may_differ = context.options.allow_resize
        same = (origin.workers, origin.servers) == (context.workers, context.servers)
        if not same and (may_differ or origin.fits(context.servers, context.workers)):
            with session.uncounted():
                self._resize(session, lr)
        else:
            state = all_or_none(self._transport, lambda: self._load(may_differ))
            session.restore(state)
            with session.uncounted():
                _revive(session, state is None)
        self._saved = session.began_at

    def _load(self, resizes: bool) -> dict[str, Any] | None:
        """Read and check this rank's part of the last checkpoint; None: it has none."""
        state = self._store.load(self._transport.rank, self._about, resizes)
        if state is not None and state["drawn"] > self._plan.total:
            raise UserError(
                f"--resume: expected a run at least as long as it was, {state['drawn']} samples, "
                f"got a length of {self._plan.total}; give more --epochs, --samples or --steps, or "
                "leave them out"
            )
        return state

    def _resize(self, session: Session, lr: LearningRate) -> None:
        """Take up a checkpoint of other numbers of workers and servers."""
        context, origin, transport = session.context, session.origin, self._transport
        first = transport.rank == 0
        state = all_or_none(transport, lambda: self._load(resizes=True) if first else None)
        options, algorithm, replica = context.options, context.algorithm, context.replica
        layout = make_layout(options, algorithm, replica, origin.servers, origin.workers)
        parts = StateAssembly(
            self._store.part, algorithm, origin, layout, session.role, replica.parameters
        )
        merged = all_or_none(transport, lambda: parts.merged() if first else None)
        if merged is not None and state is not None:
            merged.granted = state["keeper"].get("granted", ())[origin.servers :]
        merged = share(transport, merged)
        past = (*origin.past, Period(taken(merged)))
        begun = context.servers, context.workers
        now = Origin(context.workers, context.servers, past, origin.schedule_step, begun)
        session.resize(state, merged, now)
        all_or_none(transport, lambda: self._take_local(session, origin))
        if first and not options.quiet:
            tell(algorithm, origin, now, lr)

    def _take_local(self, session: Session, origin: Origin) -> None:
        """Take up what the former worker of this number had; a new one has buffers alone."""
        if session.context.is_server:
            return
        worker = self._transport.rank - session.context.servers
        is_new = worker >= origin.workers
        part = self._store.part(origin.servers + (0 if is_new else worker))
        if part is None:
            return
        if is_new:
            session.local.share_buffers(part["local"])
        else:
            session.local.load_state_dict(part["local"])


def _revive(session: Session, is_new: bool) -> None:
    """Give the global model to workers that had failed when the checkpoint was written."""
    context, role, replica = session.context, session.role, session.context.replica
    new = broadcast(context.transport, gather(context.transport, is_new))
    common: dict[str, Any] = broadcast(context.transport, role.common())
    if is_new:
        role.join(common)
    if not any(new) or not context.is_real:
        return
    mine = replica.parameters.clone()
    collect_model(context, role, without=[rank for rank, was_lost in enumerate(new) if was_lost])
    if not is_new:
        replica.parameters.copy_(mine)
