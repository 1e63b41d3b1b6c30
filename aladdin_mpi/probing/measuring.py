"""The command where a cluster is measured: agree, measure, tell, write."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from functools import partial

from aladdin_mpi.control.exchange import agree
from aladdin_mpi.errors import LostError, WaitTimeoutError
from aladdin_mpi.probing.cluster_file import check, check_free, rendered, write
from aladdin_mpi.probing.describing import tell_written
from aladdin_mpi.probing.measure import measure
from aladdin_mpi.probing.measured_cluster import sections, told
from aladdin_mpi.probing.options import ProbeOptions
from aladdin_mpi.probing.steps import Task, make_task, time_steps
from aladdin_mpi.run.device import choose_device
from aladdin_mpi.run.placement import tell_placement
from aladdin_mpi.transport.base import Transport


def measure_cluster(options: ProbeOptions, transport: Transport, cores: int) -> None:
    """Measure the cluster, print what was found, and write its file at the end.

    Args:
        options: what was typed.
        transport: over MPI; all ranks call it.
        cores: of this rank's host.

    Raises:
        UserError: at rank 0: the file is there already, or there is no such model.
        RefusedError: at the other ranks, then.
        LostError: a rank does not answer.
    """
    task = agree(transport, lambda: _prepare(options, transport))
    was_chosen = options.device != "auto"
    tell_placement(transport, task.device, 0, quiet=True, was_chosen=was_chosen)
    steps = partial(time_steps, transport, task)
    try:
        found = measure(transport, steps, options.seconds, cores)
    except WaitTimeoutError as error:
        raise _lost(error, transport) from None
    if transport.rank:
        return
    ranks = f"{transport.size} rank{'s' * (transport.size > 1)}"
    day = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    model = f"{options.model}, batches of {options.batch_size}, {options.precision}"
    model += f" on {task.device.type}"
    text = rendered(f"Measured by {ranks} with {model}, {day}.", sections(found))
    check(text, str(options.out))
    for line in told(found):
        print(line)
    tell_written(write(options.out, text, options.overwrite), options)


def _prepare(options: ProbeOptions, transport: Transport) -> Task:
    if transport.rank == 0:
        check_free(options.out, options.overwrite)
    return make_task(options, choose_device(options.device, transport, 0))


def _lost(error: WaitTimeoutError, transport: Transport) -> LostError:
    """Which rank keeps this one waiting, and on which host it is."""
    waited, _, _ = str(error).partition(": that rank")
    named = re.search(r"rank (\d+), tag", waited)
    where = f" on host {transport.host_name(int(named[1]))}" if named else ""
    return LostError(
        f"{waited}{where}: that rank hangs, has died, or its step takes very long; start the probe "
        "without its host, or give it more time with --seconds"
    )
