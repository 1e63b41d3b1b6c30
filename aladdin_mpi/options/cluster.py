"""The simulated cluster: hosts, links, failures and pauses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    model_validator,
)

from aladdin_mpi.options.fields import option

Host = NonNegativeInt
Parts = BeforeValidator(lambda value: value.split(":") if isinstance(value, str) else value)
"""Splits a text with colons into a tuple."""
Pause = Annotated[tuple[NonNegativeInt, NonNegativeFloat, NonNegativeFloat], Parts]
"""A rank, the start of its pause and its length in simulated seconds; also as ``"3:10:2.5"``."""

FASTEST_GBIT, LONGEST_US, FASTEST_GBYTE = 1e5, 1e8, 1e5
"""Larger values in a file are assumed to be in a wrong unit: 100 Tbit/s, 100 s, 100 TB/s."""

cluster_option = partial(option, group="cluster")


class Cluster(BaseModel):
    """Hosts connected by one switch, which is never the bottleneck.

    On an idle network, a message between two hosts takes ``message_overhead + latency + bytes /
    bandwidth``; within a host the local figures apply. Only hosts in ``links`` have another
    bandwidth; between two hosts the slower link counts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    hosts: PositiveInt = cluster_option(1, "number of hosts", "HOSTS", common=True)
    placement: Literal["cyclic", "block", "workers", "spread"] = cluster_option(
        "cyclic",
        "placement of ranks on hosts",
        details="cyclic: in turn; block: host by host; workers: workers in blocks, servers on host "
        "0, as in slurm/train.sbatch; spread: workers in blocks, servers on the hosts in turn, "
        "as with its SPREAD_SERVERS=yes",
    )
    worker_hosts: tuple[Host, ...] = cluster_option(
        (),
        "host of each worker, counted from 0, instead of --placement",
        "HOST",
        details="servers are on host 0, or on the hosts in turn with --placement spread",
    )
    bandwidth_gbit: PositiveFloat = cluster_option(
        10.0,
        "bandwidth of each host's link in each direction",
        "GBIT/S",
        most=FASTEST_GBIT,
        common=True,
    )
    links: dict[Host, PositiveFloat] = cluster_option(
        {},
        "bandwidth of single hosts, counted from 0, such as 0=1",
        "HOST=GBIT/S",
        most=FASTEST_GBIT,
    )
    latency_us: NonNegativeFloat = cluster_option(
        50.0, "one-way latency between hosts", "MICROSECONDS", most=LONGEST_US, common=True
    )
    local_bandwidth_gbit: PositiveFloat = cluster_option(
        100.0, "bandwidth within a host", "GBIT/S", most=FASTEST_GBIT
    )
    local_latency_us: NonNegativeFloat = cluster_option(
        5.0, "latency within a host", "MICROSECONDS", most=LONGEST_US
    )
    message_overhead_us: NonNegativeFloat = cluster_option(
        5.0,
        "fixed time for which each message occupies a link",
        "MICROSECONDS",
        most=LONGEST_US,
    )
    sharing: Literal["even", "tcp"] = cluster_option(
        "even",
        "sharing of a link between concurrent messages",
        details="even: equal shares; tcp: unequal shares as measured with Open MPI over TCP, with "
        "retransmissions after 0.2 s (benchmarks/README.md)",
    )
    memory_gbyte: NonNegativeFloat = cluster_option(
        0.0,
        "memory bandwidth of one process; 0: unlimited",
        "GBYTE/S",
        most=FASTEST_GBYTE,
        details="limits servers and host leaders when they add gradients and copy models",
    )
    handling_us: NonNegativeFloat = cluster_option(
        0.0,
        "fixed time for which each message occupies a server",
        "MICROSECONDS",
        most=LONGEST_US,
    )
    delay_us: NonNegativeFloat = cluster_option(
        0.0,
        "mean random additional delay per message",
        "MICROSECONDS",
        details="reorders messages between different pairs of ranks",
    )
    failures: dict[NonNegativeInt, NonNegativeFloat] = cluster_option(
        {},
        "simulated times at which ranks fail, such as 3=12.5",
        "RANK=SECONDS",
        formerly="deaths",
        common=True,
    )
    pauses: tuple[Pause, ...] = cluster_option(
        (),
        "pauses of ranks: rank, start and length in simulated time",
        "RANK:START:SECONDS",
        details="a paused rank neither computes nor communicates",
    )

    _servers: int = PrivateAttr(0)

    @model_validator(mode="after")
    def _check_hosts(self) -> Cluster:
        for flag, named in (("--links", self.links), ("--worker-hosts", self.worker_hosts)):
            if named and max(named) >= self.hosts:
                raise ValueError(
                    f"{flag}: expected hosts from 0 to {self.hosts - 1}, got host {max(named)}; "
                    f"name another, or add --hosts {max(named) + 1}"
                )
        return self

    def placed(self, servers: int) -> Cluster:
        """Return the cluster for a run whose first ``servers`` ranks are servers."""
        cluster = self.model_copy()
        cluster._servers = servers
        return cluster

    def host_of(self, rank: int, size: int) -> int:
        """Return the host, counted from 0, of ``rank`` among ``size`` ranks."""
        if self.worker_hosts or self.placement in ("workers", "spread"):
            worker = rank - self._servers
            if worker < 0:
                return rank % self.hosts if self.placement == "spread" else 0
            if self.worker_hosts:
                return self.worker_hosts[worker]
            return worker // -(-(size - self._servers) // self.hosts)
        if self.placement == "cyclic":
            return rank % self.hosts
        return rank // -(-size // self.hosts)

    def link_gbit(self, host: int) -> float:
        """Return the bandwidth of a host's link in Gbit/s, in each direction."""
        return self.links.get(host, self.bandwidth_gbit)

    def handling(self, nbytes: int) -> float:
        """Return the seconds to handle a message that moves ``nbytes`` in memory."""
        moving = nbytes / (self.memory_gbyte * 1e9) if self.memory_gbyte else 0.0
        return moving + self.handling_us * 1e-6

    def pauses_of(self, rank: int) -> Pauses:
        """Return the pauses of ``rank``."""
        return Pauses([(start, start + length) for r, start, length in self.pauses if r == rank])


class Pauses:
    """The pauses of one rank, as intervals of simulated seconds in chronological order."""

    __slots__ = ("spans",)

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        self.spans: list[tuple[float, float]] = []
        for start, end in sorted(spans):
            if self.spans and start <= self.spans[-1][1]:
                self.spans[-1] = (self.spans[-1][0], max(end, self.spans[-1][1]))
            else:
                self.spans.append((start, end))

    def resumed(self, time: float) -> float:
        """Return ``time``, or the end of the pause that it falls into."""
        for start, end in self.spans:
            if start <= time < end:
                return end
        return time

    def stretched(self, start: float, seconds: float) -> float:
        """Return the end of a computation of ``seconds`` that begins at ``start``."""
        end = start + seconds
        for first, last in self.spans:
            if last > start and first < end:
                end += last - max(first, start)
        return self.resumed(end)
