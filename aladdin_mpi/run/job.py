"""The ranks of this job and their devices, which are known before a run is built."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from aladdin_mpi import accelerator
from aladdin_mpi.control.exchange import all_or_none
from aladdin_mpi.data.loader_processes import is_loader_process
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import Algorithm, find_algorithm
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.process import guard, startup
from aladdin_mpi.process.launcher import LAUNCHED_WORKERS
from aladdin_mpi.run.ending import complete_due_run
from aladdin_mpi.run.script import simulated_rank, typed_options
from aladdin_mpi.transport.base import Transport


def choose_device(wanted: str, transport: Transport | Job, servers: int) -> torch.device:
    """Return a worker's device: a GPU by its index on the host, if any; servers use the CPU.

    A task that sees only its own GPU takes that one. If a host has more workers than GPUs, they
    share them, and :mod:`aladdin_mpi.run.placement` warns.

    In a simulation all ranks share one process and its first GPU.

    Args:
        transport: has this rank's host.
        wanted: ``auto``, ``cpu``, ``gpu``, or torch's name for a type of GPU.
        servers: number of server ranks, the first ones.

    Raises:
        UserError: a GPU is requested and this worker's host has none of that type.
    """
    if transport.rank < servers or wanted == "cpu":
        return torch.device("cpu")
    kind, gpus = accelerator.kind(), accelerator.count()
    if kind is None and wanted == "auto":
        return torch.device("cpu")
    if kind is None or wanted not in ("auto", "gpu", kind):
        raise UserError(
            f"--device {wanted}: expected a GPU on every host with workers, found "
            f"{'none here' if kind is None else f'one called {kind}'}; check "
            "CUDA_VISIBLE_DEVICES and the driver, or use --device cpu"
        )
    place = list(transport.hosts[servers : transport.rank]).count(transport.host)
    device = torch.device(kind, 0 if transport.shares_process else place % gpus)
    accelerator.enter(device)
    return device


TIMEOUT: float = RunOptions.model_fields["timeout"].default


@dataclass
class Job:
    """This rank's place among all ranks of the job.

    Attributes:
        hosts: for every rank the number of its host.
        servers: number of server ranks, the first ones.
        shares_process: whether all ranks are simulated in this process.
        wait: waits for all ranks, before the run.
    """

    rank: int
    hosts: Sequence[int]
    servers: int
    shares_process: bool
    wait: Callable[[], object]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which cannot wait: a simulated rank cannot be pickled."""
        return {**vars(self), "wait": None}

    @property
    def host(self) -> int:
        """The number of this rank's host."""
        return self.hosts[self.rank]

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.hosts) - self.servers

    @property
    def index(self) -> int:
        """The number of this rank if servers follow the workers, so that 0 is the first worker."""
        return (self.rank - self.servers) % len(self.hosts)

    @property
    def index_on_host(self) -> int:
        """The number of this rank on its host, in the same order; not 0 for a server."""
        hosts = [*self.hosts[self.servers :], *self.hosts[: self.servers]]
        return max(hosts[: self.index].count(self.host), self.rank < self.servers)

    @property
    def is_first(self) -> bool:
        """Whether this is the first worker."""
        return self.index == 0

    @property
    def is_first_of_host(self) -> bool:
        """Whether this is the first worker on its host."""
        return self.index_on_host == 0

    def device(self, wanted: str) -> torch.device:
        """Return the device that a run will choose for this rank."""
        return choose_device(wanted, self, self.servers)


def find_job(settings: Mapping[str, Any]) -> Job:
    """Return the place of this rank for a run with these settings. Every rank calls it.

    Raises:
        UserError: unknown algorithm.
    """
    transport: Transport | None = settings.get("transport")
    typed = typed_options() if transport is None else None
    if typed is not None:  # the command line overrides the script
        settings = {**settings, **{path[0]: setting.value for path, setting in typed.items()}}
    simulated = simulated_rank() if transport is None else None
    if simulated is not None:
        transport = simulated.transport
        if transport is None:  # the script only runs to determine its options
            return Job(0, [0], 0, shares_process=True, wait=lambda: None)
    if transport is not None:
        return Job(
            transport.rank,
            transport.hosts,
            0 if transport.size == 1 else _servers(settings),
            transport.shares_process,
            partial(all_or_none, transport, lambda: None),
        )
    complete_due_run()  # servers take part in the following only afterwards
    start_mpi(float(settings.get("timeout", TIMEOUT)))
    from aladdin_mpi.transport.mpi import world

    rank, size = world.place()
    startup.expect(startup.RANKS_MEET, least=startup.MEETING_LEAST)
    names = world.hosts()
    startup.end()
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    servers = 0 if size == 1 else _servers(settings)  # one process trains alone
    return Job(
        rank,
        [numbers[name] for name in names],
        servers,
        shares_process=False,
        wait=partial(everyones, None),
    )


def check_launched(algorithm: Algorithm, options: RunOptions, ranks: int) -> None:
    """Check the number of workers in a job of :func:`aladdin_mpi.launch` or a batch script.

    Raises:
        UserError: of ``ranks``, the run would have another number of workers.
    """
    launched = os.environ.get(LAUNCHED_WORKERS)
    servers = options.servers if algorithm.has_servers else 0
    if launched is not None and ranks - servers != int(launched):
        raise UserError(
            f"{algorithm.name} would train with {servers} servers and {ranks - servers} workers, "
            f"but the job was started for {launched} workers. Pass servers={servers} to launch(), "
            "or the algorithm and its number of servers to the batch script, as options."
        )


def everyones(fact: Any) -> list[Any]:
    """Return all ranks' facts in rank order, after :func:`find_job` and outside of a run."""
    from aladdin_mpi.transport.mpi import world

    return world.everyones(fact)


def start_mpi(timeout: float) -> None:
    """Start MPI on this rank, if it has not started, and install handlers of errors and signals.

    Raises:
        UserError: this process loads data for a rank.
    """
    if is_loader_process():
        raise UserError(
            "DataParallel was made in a process that loads data, because that process imports "
            'the main file. Put the training code under if __name__ == "__main__":, or use '
            "--loader-start-method fork."
        )
    guard.check_current_folder()
    startup.begin()
    startup.expect(startup.MPI_STARTS, timeout, startup.MEETING_LEAST)
    from aladdin_mpi.transport.mpi import world  # noqa: F401

    guard.install()
    guard.note_suspend_signals()


def _servers(settings: Mapping[str, Any]) -> int:
    fields = RunOptions.model_fields
    name, servers = (settings.get(each, fields[each].default) for each in ("algorithm", "servers"))
    return int(servers) if find_algorithm(str(name)).has_servers else 0
