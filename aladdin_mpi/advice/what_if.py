"""Changes of a cluster or a run, of which each is tried by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import SimulateOptions

KNOWN = "bandwidth latency step servers workers slowdown"


@dataclass(frozen=True)
class Change:
    """One change.

    Attributes:
        text: as it was asked for.
        fields: of a simulation's options, with dots for those within.
        servers: their number; None: as it is.
        workers: likewise; the hosts grow with them.
    """

    text: str
    fields: dict[str, Any]
    servers: int | None = None
    workers: int | None = None


def changes(asked: Sequence[str], base: SimulateOptions) -> tuple[Change, ...]:
    """What ``--what-if`` asks for.

    Raises:
        UserError: one is not known, or its value bad.
    """
    return tuple(_change(text, base) for text in asked)


def _change(text: str, base: SimulateOptions) -> Change:
    name, found, value = text.partition("=")
    if not found or name not in KNOWN.split():
        raise UserError(
            f"--what-if: expected NAME=VALUE with one of {KNOWN}, got {text!r}; write for example "
            "bandwidth=100"
        )
    if name == "slowdown":
        worker, _, factor = value.partition("=")
        slow = int(_number(text, worker, whole=True, least=0))
        if slow >= base.workers:
            raise UserError(
                f"--what-if {text}: expected a worker from 0 to {base.workers - 1}, got {slow}; "
                "name another"
            )
        return Change(text, {"slowdown": {**base.slowdown, slow: _number(text, factor, least=1)}})
    if name in ("servers", "workers"):
        count = int(_number(text, value, whole=True, least=1))
        return Change(text, {}, **{name: count})
    number = _number(text, value, least=0 if name == "latency" else 1e-9)
    field = {
        "bandwidth": "cluster.bandwidth_gbit",
        "latency": "cluster.latency_us",
        "step": "compute_time",
    }[name]
    return Change(text, {field: number})


def _number(text: str, value: str, least: float, whole: bool = False) -> float:
    kind: Callable[[str], float] = int if whole else float
    try:
        number = kind(value)
    except ValueError:
        number = float("nan")
    if not least <= number < float("inf"):
        what = "a whole number" if whole else "a number"
        raise UserError(
            f"--what-if {text}: expected {what} of {least:g} or more, got {value!r}; write for "
            "example bandwidth=100 servers=4 slowdown=0=10"
        )
    return number


def grown(base: SimulateOptions, workers: int) -> dict[str, Any]:
    """Fields of a cluster with so many workers, as many on each host, and no host of its own kind.

    Links and slow-downs of single hosts and workers stay, as far as there still are such.
    """
    cluster = base.cluster
    on_host = -(-base.workers // cluster.hosts)
    hosts = -(-workers // on_host)
    return {
        "workers": workers,
        "cluster.hosts": hosts,
        "cluster.worker_hosts": (),
        "cluster.links": {host: rate for host, rate in cluster.links.items() if host < hosts},
        "slowdown": {worker: f for worker, f in base.slowdown.items() if worker < workers},
    }
