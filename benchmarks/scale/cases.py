"""The cases: curves over the number of workers, each of one algorithm on one cluster."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aladdin_mpi.options.algorithms import ALGORITHMS, find_algorithm
from aladdin_mpi.options.run import SimulateOptions, parse
from benchmarks.cells import WORKLOADS as TENTHS
from benchmarks.spread import spread

WORKERS_PER_HOST = 8
LOCAL_GBIT = 1600.0
"""Gbit/s inside a host: 200 for each of eight workers, as with a PCIe 4.0 slot of 16 lanes."""
JITTER = 0.05
"""Standard deviation of a step's time relative to its mean, as on shared machines. In the IPDPS
study's cluster it was 1.3 % (`benchmarks.ipdps_paper.JITTER`), which favours algorithms that wait
for the slowest worker."""
LINKS = (10.0, 25.0, 100.0, 200.0)
SERVERS = (1, 4, 16, 64)
USUAL_LINK, USUAL_SERVERS = 100.0, 16
WORKERS = (8, 16, 32, 64, 128, 256, 512, 1024)
HOST_FIRST = "bsp, host first"
ALL_TO_ALL_WORKERS = 128
"""Largest number of workers of `multistep`: all send to all, n^2 messages per bucket."""


@dataclass(frozen=True)
class Workload:
    """A network at full size.

    Args:
        megabytes: megabytes of parameters in fp32.
        seconds: duration of a worker's step on the ALADDIN study's cluster.
        batch: samples of a step there (Ko et al., CIKM 2021, section 5.1).
        message_mb: largest message; a gradient has about 12 to 16.
    """

    name: str
    megabytes: float
    seconds: float
    batch: int
    message_mb: float


def _whole(key: str, batch: int, message_mb: float) -> Workload:
    tenth = TENTHS[key]
    return Workload(tenth.name, 10 * tenth.megabytes, tenth.seconds, batch, message_mb)


WORKLOADS = {"resnet50": _whole("resnet50", 128, 8.0), "vgg16": _whole("vgg16", 96, 40.0)}


@dataclass(frozen=True)
class Phase:
    """The measured steps of a worker: ``window`` of them after ``warm_up``.

    The window contains whole periods of the algorithm, such as ALADDIN's pi steps.
    """

    warm_up: int
    window: int

    @property
    def steps(self) -> int:
        """Steps of each worker in the run."""
        return self.warm_up + self.window + 1

    def longer(self, times: int) -> Phase:
        """Return a phase whose window and warm-up are longer by this factor."""
        return Phase(self.warm_up * times, self.window * times)


PHASES = {
    "aladdin": Phase(4, 8),  # pi = 4
    "easgd": Phase(4, 4),  # tau = 2
    "eamsgd": Phase(4, 4),
    "ssp": Phase(4, 8),  # a bound of 3
    "gosgd": Phase(4, 8),
    "local-sgd": Phase(8, 8),  # H = 8
    "ashl": Phase(13, 16),  # five steps of profiling, then exchanges about every eight
    "adsp": Phase(20, 20),  # nothing is sent in the first ten; check periods of ten
}
PHASE = Phase(3, 4)


@dataclass(frozen=True)
class Curve:
    """One algorithm on one kind of cluster.

    Args:
        algorithm: an algorithm of the registry, or :data:`HOST_FIRST`.
        servers: largest number of servers, one per host; 0: the algorithm has none.
        gbit: rate of a host's link in each direction.
        workers: the numbers of workers, ascending.
    """

    algorithm: str
    workload: str
    servers: int
    gbit: float
    workers: tuple[int, ...] = field(default=WORKERS, compare=False)

    @property
    def cases(self) -> Iterator[Case]:
        """Return one case for each number of workers."""
        for workers in self.workers:
            # So that cases that are equal on few hosts run once.
            servers = min(self.servers, _hosts(workers))
            yield Case(self.algorithm, self.workload, workers, servers, self.gbit)

    @property
    def model(self) -> Workload:
        """The network."""
        return WORKLOADS[self.workload]


def _hosts(workers: int) -> int:
    return -(-workers // WORKERS_PER_HOST)


@dataclass(frozen=True)
class Case:
    """A point of a curve, with ``times`` as many steps as usual."""

    algorithm: str
    workload: str
    workers: int
    servers: int
    gbit: float
    times: int = 1
    seed: int = 0

    @property
    def model(self) -> Workload:
        """The network."""
        return WORKLOADS[self.workload]

    @property
    def name(self) -> str:
        """The algorithm's name in the registry."""
        return "bsp" if self.algorithm == HOST_FIRST else self.algorithm

    @property
    def hosts(self) -> int:
        """The number of hosts, with eight workers each."""
        return _hosts(self.workers)

    @property
    def phase(self) -> Phase:
        """The measured steps."""
        if self.name in ("sgp", "osgp"):  # the whole cycle of the algorithm's graph
            phase = Phase(3, max(4, (self.workers - 1).bit_length()))
        else:
            phase = PHASES.get(self.name, PHASE)
        return phase.longer(self.times)

    @property
    def digest(self) -> str:
        """A digest of all options and steps, which identifies stored points of the same run."""
        told = json.dumps([*self.words, self.phase.warm_up, self.phase.window])
        return hashlib.sha256(told.encode()).hexdigest()[:12]

    def options(self, run_dir: Path) -> SimulateOptions:
        """Return the options of `aladdin_mpi.simulate`."""
        words = [*self.words, "--run-dir", str(run_dir), "--quiet"]
        return parse(SimulateOptions, words, "benchmarks.large", "")

    @property
    def words(self) -> list[str]:
        """Return the options in which runs differ, or that a new version may change."""
        model = self.model
        values: dict[str, object] = {
            "--algorithm": self.name,
            "--model": f"size:{model.megabytes:g}",
            "--compute": "timed",
            "--compute-time": model.seconds,
            "--jitter": JITTER,
            "--samples": self.workers * self.phase.steps * model.batch,
            "--batch-size": model.batch,
            "--workers": self.workers,
            "--hosts": self.hosts,
            "--placement": spread(self.servers),
            "--bandwidth-gbit": self.gbit,
            "--local-bandwidth-gbit": LOCAL_GBIT,
            "--bucket-mb": model.message_mb,
            "--shard-mb": model.message_mb,
            "--seed": self.seed,
        }
        if self.servers:
            values["--servers"] = self.servers
        words = [str(word) for pair in values.items() for word in pair]
        words += ["--bsp-host-first"] if self.algorithm == HOST_FIRST else []
        words += ["--multistep-exchange", "gradients"] if self.name == "multistep" else []
        return words


def curve(
    algorithm: str, workload: str, gbit: float, servers: int, workers: Sequence[int] = WORKERS
) -> Curve:
    """Return a curve over these numbers of workers, as far as they can be simulated."""
    name = "bsp" if algorithm == HOST_FIRST else algorithm
    limit = ALL_TO_ALL_WORKERS if name == "multistep" else max(workers)
    numbers = tuple(n for n in sorted(set(workers)) if n <= limit)
    return Curve(
        algorithm, workload, servers if find_algorithm(name).has_servers else 0, gbit, numbers
    )


OVER_SERVERS = ("aladdin", "asp", HOST_FIRST)
OVER_LINKS = ("aladdin", "asp", "ar-sgd", "sgp", "ad-psgd", "gosgd")


def all_algorithms() -> list[str]:
    """Return the algorithms of the registry, and BSP's other form."""
    names = list(ALGORITHMS)
    names.insert(names.index("bsp") + 1, HOST_FIRST)
    return names


def study(
    workloads: Sequence[str],
    workers: Sequence[int],
    algorithms: Collection[str],
    servers: Sequence[int] = SERVERS,
    links: Sequence[float] = LINKS,
) -> list[Curve]:
    """Return the curves of these algorithms, by default those of the full run.

    First one of each with the usual servers and link; then, for some of them, one for each of the
    other ``servers`` and ``links``.
    """
    curves: dict[Curve, None] = {}
    for workload in workloads:
        for name in filter(algorithms.__contains__, all_algorithms()):
            curves[curve(name, workload, USUAL_LINK, USUAL_SERVERS, workers)] = None
    for workload in workloads:
        for name in filter(algorithms.__contains__, OVER_SERVERS):
            for number in servers:
                curves[curve(name, workload, USUAL_LINK, number, workers)] = None
        for name in filter(algorithms.__contains__, OVER_LINKS):
            for gbit in links:
                curves[curve(name, workload, gbit, USUAL_SERVERS, workers)] = None
    return [line for line in curves if line.workers]
