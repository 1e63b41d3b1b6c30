"""Parts of the check: the programs that they run and their time limits."""

from __future__ import annotations

from dataclasses import dataclass

from aladdin_mpi.errors import SUSPENDED_STATUS


@dataclass(frozen=True)
class Job:
    """One program under mpirun.

    Args:
        ranks: number of MPI ranks.
        module: program below ``benchmarks.gpu_check``.
        options: options of mpirun.
        arguments: the program's arguments, after its folder.
        status: exit status of a successful job.
    """

    ranks: int
    module: str
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    status: int = 0


def _suspension(name: str) -> tuple[Job, Job]:
    stopped = Job(3, "suspension", arguments=(name, "stop"), status=SUSPENDED_STATUS)
    return stopped, Job(3, "suspension", arguments=(name, "resume"))


@dataclass(frozen=True)
class Part:
    """A group of rows.

    Args:
        name: as in ``--only``.
        limit: time limit on a machine with a GPU, in seconds.
        jobs: programs, run in sequence.
    """

    name: str
    limit: float
    jobs: tuple[Job, ...]


PARTS = (
    Part(
        "equality",
        180.0,
        (Job(1, "kernels"), Job(2, "equality"), Job(3, "equality"), Job(4, "islands")),
    ),
    Part("memory", 90.0, (Job(3, "memory"), Job(4, "memory"))),
    Part(
        "recovery",
        90.0,
        (
            Job(3, "refusal"),
            *_suspension("bsp"),
            *_suspension("aladdin-ahead"),
            Job(3, "survival", ("--with-ft", "ulfm")),
        ),
    ),
    Part("settings", 90.0, (Job(1, "settings"), Job(2, "settings"))),
    Part("profile", 90.0, (Job(3, "profile"),)),
    Part("speed", 420.0, (Job(2, "speed"), Job(1, "speed"))),
)
"""Parts in order of importance: a check that is cut short has run the first ones."""
