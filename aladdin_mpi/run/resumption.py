"""How a rank takes up the last checkpoint of its run."""

from __future__ import annotations

from dataclasses import dataclass

from aladdin_mpi.control.exchange import agree, broadcast, gather
from aladdin_mpi.data.sampler import Period
from aladdin_mpi.roles.role import Role
from aladdin_mpi.run.checkpoint import CheckpointStore
from aladdin_mpi.run.context import Context, make_layout
from aladdin_mpi.run.local_state import LocalState
from aladdin_mpi.run.model_exchange import collect_model
from aladdin_mpi.run.origin import Origin
from aladdin_mpi.run.resizing import Assembly, share, tell
from aladdin_mpi.run.schedule import LearningRate
from aladdin_mpi.run.segments import Segments


@dataclass(frozen=True)
class Resumption:
    """What takes up a checkpoint.

    Attributes:
        store: where it is.
        origin: who wrote it.
        lr: of the run that goes on.
    """

    context: Context
    role: Role
    local: LocalState
    segments: Segments
    store: CheckpointStore
    origin: Origin
    lr: LearningRate


def go_on(of: Resumption) -> None:
    """Take up the last checkpoint. Every rank calls it.

    Raises:
        UserError, RefusedError: the checkpoint does not fit this run, or is damaged.
    """
    before, now = (of.origin.workers, of.origin.servers), (of.context.workers, of.context.servers)
    servers, workers = of.context.servers, of.context.workers
    resizes = of.context.options.allow_resize or of.origin.fits(servers, workers)
    if resizes and before != now:
        with of.segments.uncounted():
            resize(of)
        return
    may_differ = of.context.options.allow_resize
    state = agree(of.context.transport, lambda: of.segments.load(may_differ))
    of.segments.restore(state)
    with of.segments.uncounted():
        _revive(of.context, of.role, state is None)


def resize(of: Resumption) -> None:
    """From a checkpoint of other numbers of workers and servers."""
    context, origin, transport = of.context, of.origin, of.context.transport
    first = transport.rank == 0
    state = agree(transport, lambda: of.segments.load(resizes=True) if first else None)
    options, algorithm, replica = context.options, context.algorithm, context.replica
    layout = make_layout(options, algorithm, replica, origin.servers, origin.workers)
    parts = Assembly(of.store.part, algorithm, options, origin, layout, replica)
    former = agree(transport, lambda: parts.former(context.workers) if first else None)
    if former is not None and state is not None:
        former.granted = state["keeper"].get("granted", ())[origin.servers :]
    former = share(transport, former)
    past = (*origin.past, Period(former.taken))
    begun = context.servers, context.workers
    now = Origin(context.workers, context.servers, past, origin.schedule_step, begun)
    of.segments.resize(state, former, now)
    agree(transport, lambda: _take_local(of))
    if first and not options.quiet:
        tell(algorithm, origin, now, of.lr)


def _take_local(of: Resumption) -> None:
    """What the former worker of this number had of its own; a new one has buffers alone."""
    if of.context.is_server:
        return
    worker = of.context.transport.rank - of.context.servers
    own = worker < of.origin.workers
    part = of.store.part(of.origin.servers + (worker if own else 0))
    if part is not None and own:
        of.local.load_state_dict(part["local"])
    elif part is not None:
        of.local.share_buffers(part["local"])


def _revive(context: Context, role: Role, is_new: bool) -> None:
    """Give the global model to workers that had failed when the checkpoint was written."""
    transport, replica = context.transport, context.replica
    new = broadcast(transport, gather(transport, is_new))
    common = broadcast(transport, role.common())
    if is_new:
        role.join(common)
    if not any(new) or not context.is_real:
        return
    mine = replica.parameters.clone()
    collect_model(context, role, without=[rank for rank, was_lost in enumerate(new) if was_lost])
    if not is_new:
        replica.parameters.copy_(mine)
