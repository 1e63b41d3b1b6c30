"""The cluster that the virtual engine models: hosts, links, and what goes wrong on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _split_pause(value: Any) -> Any:
    return value.split(":") if isinstance(value, str) else value


Rank = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Pause = Annotated[tuple[Rank, Seconds, Seconds], BeforeValidator(_split_pause)]
"""A rank, the start of its pause and its length in virtual seconds; also as ``"3:10:2.5"``."""


def _field(default: Any, description: str, unit: str | None = None, **constraints: Any) -> Any:
    texts: dict[str, Any] = {"group": "cluster"} | ({"unit": unit} if unit else {})
    return Field(default, description=description, json_schema_extra=texts, **constraints)


class Cluster(BaseModel):
    """A cluster of equal hosts behind one switch that is never the bottleneck.

    An idle network takes ``message_overhead + latency + bytes / bandwidth`` for a
    message between two hosts, and the same with the local figures inside a host.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: int = _field(1, "hosts of the cluster", "HOSTS", ge=1)
    placement: Literal["cyclic", "block"] = _field(
        "cyclic", "how ranks fill the hosts: in turn (cyclic), or one host after the other (block)"
    )
    bandwidth_gbit: float = _field(
        10.0, "bandwidth of each host's link, each way", "GBIT/S", gt=0, allow_inf_nan=False
    )
    latency_us: float = _field(
        50.0, "latency between two hosts", "MICROSECONDS", ge=0, allow_inf_nan=False
    )
    local_bandwidth_gbit: float = _field(
        100.0, "bandwidth of the path inside a host", "GBIT/S", gt=0, allow_inf_nan=False
    )
    local_latency_us: float = _field(
        5.0, "latency inside a host", "MICROSECONDS", ge=0, allow_inf_nan=False
    )
    message_overhead_us: float = _field(
        5.0,
        "time that each message occupies every link on its way on top of its bytes",
        "MICROSECONDS",
        ge=0,
        allow_inf_nan=False,
    )
    memory_gbyte: float = _field(
        0.0,
        "memory bandwidth of one process, which servers, and leaders of a host, need to add up "
        "gradients and to copy models; 0: that takes no time",
        "GBYTE/S",
        ge=0,
        allow_inf_nan=False,
    )
    handling_us: float = _field(
        0.0,
        "time that a server needs for each message that it takes in or sends, on top of its bytes",
        "MICROSECONDS",
        ge=0,
        allow_inf_nan=False,
    )
    delay_us: float = _field(
        0.0,
        "mean of an additional random delay of each message; "
        "it reorders messages of different pairs of ranks",
        "MICROSECONDS",
        ge=0,
        allow_inf_nan=False,
    )
    deaths: dict[Rank, Seconds] = _field(
        {}, "ranks that die, with the virtual time of their death in seconds", "RANK=SECONDS"
    )
    pauses: tuple[Pause, ...] = _field(
        (),
        "pauses of ranks: rank, start and length in virtual seconds; "
        "computing and messages of the rank stand still",
        "RANK:START:SECONDS",
    )

    def host_of(self, rank: int, size: int) -> int:
        """Return the host, counted from 0, of ``rank`` among ``size`` ranks."""
        if self.placement == "cyclic":
            return rank % self.hosts
        return rank // -(-size // self.hosts)

    def handling(self, nbytes: int) -> float:
        """Seconds in which a process handles a message for which ``nbytes`` move in memory."""
        moving = nbytes / (self.memory_gbyte * 1e9) if self.memory_gbyte else 0.0
        return moving + self.handling_us * 1e-6

    def pauses_of(self, rank: int) -> Pauses:
        """Return the pauses of ``rank``."""
        return Pauses([(start, start + length) for r, start, length in self.pauses if r == rank])


class Pauses:
    """The pauses of one rank, as spans of virtual seconds in order of time."""

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
        """Return when computing of ``seconds`` ends that begins at ``start``."""
        end = start + seconds
        for first, last in self.spans:
            if last > start and first < end:
                end += last - max(first, start)
        return self.resumed(end)
