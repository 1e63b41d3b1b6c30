"""Placement of ranks on hosts, devices and cores, printed because a bad one only costs speed."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from aladdin_mpi.accelerator import (
    BUS,
    are_hidden,
    bus_address,
    identity,
    is_accelerator,
    on_the_bus,
)
from aladdin_mpi.control.exchange import broadcast, gather
from aladdin_mpi.process import console, guard
from aladdin_mpi.transport.base import Transport

THREADS = Path("/proc/self/task")
CPUS = Path("/sys/devices/system/cpu")


class RankPlace(NamedTuple):
    """A rank's place; ``near`` are the cores near its GPU, ``allowed`` those it may use."""

    rank: int
    host: int
    near: tuple[int, ...]
    allowed: tuple[int, ...]


class CoreShare(NamedTuple):
    """A rank's share of ``cores``: number ``place`` of ``parts`` equal parts."""

    cores: tuple[int, ...]
    place: int
    parts: int


def bind_to_near(
    transport: Transport, device: torch.device, bus: Path = BUS, cpus: Path = CPUS
) -> None:
    """Bind this process to cores near ``device``, unless it has none or the launcher has bound it.

    All ranks call it.
    """
    if transport.shares_process or not hasattr(os, "sched_getaffinity"):
        return
    allowed = as_cpulist(sorted(os.sched_getaffinity(0)))
    mine = transport.rank, transport.host, as_cpulist(near(bus_address(device), bus)), allowed
    places = [
        RankPlace(rank, host, cpulist(near_cores), cpulist(cores))
        for rank, host, near_cores, cores in filter(None, gather(transport, mine))
    ]
    shares = {
        str(rank): (as_cpulist(share.cores), share.place, share.parts)
        for rank, share in share_cores(places).items()
    }
    share = broadcast(transport, shares).get(str(transport.rank))
    if share is not None:
        cores, place, parts = share
        bind(split(cpulist(cores), parts, cpus)[place])


def near(address: str | None, bus: Path = BUS) -> tuple[int, ...]:
    """Return the cores near the device at a PCI address, "0000:03:00.0"; empty if unknown."""
    if address is None:
        return ()
    try:
        return cpulist((bus / address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return ()


def nearness(device: torch.device, cores: Sequence[int], bus: Path = BUS) -> str:
    """Return "near" or "far" if all ``cores`` are so to ``device``; "" if mixed or unknown."""
    wanted = set(near(bus_address(device), bus))
    if not wanted or not cores:
        return ""
    return "near" if wanted.issuperset(cores) else "far" if wanted.isdisjoint(cores) else ""


def cpulist(text: str) -> tuple[int, ...]:
    """Return the cores in a list such as "18-23,66-71"."""
    cores: list[int] = []
    for part in text.strip().split(",") if text.strip() else []:
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return tuple(cores)


def as_cpulist(cores: Sequence[int]) -> str:
    """Return cores in ascending order as a list such as "18-23,66-71"."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def share_cores(places: Sequence[RankPlace]) -> dict[int, CoreShare]:
    """Return the share of cores of each rank that is to be bound."""
    shares: dict[int, CoreShare] = {}
    for host in {place.host for place in places}:
        shares |= _share_on_host([place for place in places if place.host == host])
    return shares


def _share_on_host(places: Sequence[RankPlace]) -> dict[int, CoreShare]:
    if len({place.allowed for place in places}) > 1:
        return {}  # the launcher has bound the ranks
    sharing: dict[tuple[int, ...], list[int]] = {}
    for place in places:
        cores = tuple(core for core in place.near if core in place.allowed)
        sharing.setdefault(cores, []).append(place.rank)
    bound = {cores: ranks for cores, ranks in sharing.items() if cores}
    if sum(map(len, bound.values())) < 2:
        return {}  # a single rank has no other to be separated from
    return {
        rank: CoreShare(cores, place, len(ranks))
        for cores, ranks in bound.items()
        for place, rank in enumerate(ranks)
    }


def split(cores: Sequence[int], count: int, cpus: Path = CPUS) -> list[tuple[int, ...]]:
    """Split into equal parts; hyperthreads of a core stay together if there are enough cores."""
    whole: dict[tuple[int, ...], list[int]] = {}
    for core in cores:
        whole.setdefault(siblings(core, cpus), []).append(core)
    pieces = list(whole.values()) if len(whole) >= count else [[core] for core in cores]
    cuts = [len(pieces) * i // count for i in range(count + 1)]
    return [
        tuple(sorted(core for piece in pieces[first:last] for core in piece))
        for first, last in pairwise(cuts)
    ]


def siblings(core: int, cpus: Path = CPUS) -> tuple[int, ...]:
    """Return the hyperthreads that share a core with ``core``; only ``core`` if unknown.

    They cannot be derived from the numbers: siblings may be far apart (0 and 64) or neighbours.
    """
    try:
        return cpulist((cpus / f"cpu{core}" / "topology" / "thread_siblings_list").read_text())
    except (OSError, ValueError):
        return (core,)


def bind(cores: Sequence[int]) -> None:
    """Bind all threads of this process, including existing ones.

    Do nothing without ``cores``, or if the system forbids binding, as in some containers.
    """
    if not cores:
        return
    for thread in THREADS.iterdir() if THREADS.is_dir() else []:
        with suppress(OSError):  # the thread has ended, or binding is forbidden
            os.sched_setaffinity(int(thread.name), cores)
    if os.sched_getaffinity(0) <= set(cores) and torch.get_num_threads() > len(cores):
        torch.set_num_threads(len(cores))


LONG = 32
"""More ranks than these are listed by host, with identical hosts in one line."""


def print_placement(
    transport: Transport,
    device: torch.device,
    servers: int,
    quiet: bool = False,
    was_chosen: bool = True,
    spares: int = 0,
) -> None:
    """Print each surviving rank's place at rank 0; warn of shared or idle GPUs and distant cores.

    All ranks call it. A simulation has one process and can only warn of idle GPUs.

    Args:
        transport: among all ranks.
        device: this rank's.
        servers: number of server ranks, the first ones.
        quiet: only warn.
        was_chosen: the user has requested this device.
        spares: number of spare ranks, the last ones.
    """
    if transport.shares_process:
        # The last rank, a worker or a spare, stands for all of them.
        if transport.rank == transport.size - 1:
            guard.warn(idle_gpus([place(transport.rank, device, servers, was_chosen)]))
        return
    mine = place(transport.rank, device, servers, was_chosen)
    if transport.rank >= transport.size - spares:
        mine["role"] = "spare"
    facts = list(filter(None, gather(transport, mine)))
    if facts and not quiet:
        lines = by_rank(facts) if len(facts) <= LONG else by_host(facts)
        console.say("\n".join(lines), sys.stdout)
    guard.warn([*shared_gpus(facts), *idle_gpus(facts), *far_cores(facts)])


def place(rank: int, device: torch.device, servers: int, was_chosen: bool = True) -> dict[str, Any]:
    """Return this rank's host, role, device and cores, for the other ranks."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    fell_back = not (rank < servers or was_chosen or is_accelerator(device) or are_hidden())
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "role": "server" if rank < servers else "worker",
        "device": str(device),
        "gpu": identity(device) if is_accelerator(device) else None,
        "idle_gpus": on_the_bus() if fell_back else 0,
        "cores": cores,
        "nearness": nearness(device, cores),
    }


def by_rank(facts: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each rank."""
    distance = {"near": "near its GPU", "far": "far from its GPU", "": ""}
    table = [
        [f"rank {f['rank']}", f["host"], f["role"], f["device"], _cores(f), distance[f["nearness"]]]
        for f in facts
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def by_host(facts: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each kind of host: the number of such hosts and the ranks on one."""
    hosts: dict[str, list[dict[str, Any]]] = {}
    for fact in facts:
        hosts.setdefault(fact["host"], []).append(fact)
    kinds: dict[str, list[str]] = {}
    for host, ranks in hosts.items():
        kinds.setdefault(_kind(ranks), []).append(host)
    return [f"{len(facts)} ranks on {len(hosts)} hosts:"] + [
        f"  {_span(names)}: {kind}" for kind, names in kinds.items()
    ]


def _kind(ranks: Sequence[dict[str, Any]]) -> str:
    parts = []
    for role in ("server", "worker", "spare"):
        those = [fact for fact in ranks if fact["role"] == role]
        if those:
            devices = ", ".join(dict.fromkeys(fact["device"] for fact in those))
            counts = sorted({len(fact["cores"]) for fact in those})
            cores = " or ".join(map(str, counts))
            plural = "s" * (len(those) > 1)
            near = ", near their GPUs" * all(fact["nearness"] == "near" for fact in those)
            parts.append(f"{len(those)} {role}{plural} on {devices}, {cores} cores each{near}")
    return "; ".join(parts)


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} hosts, {names[0]} to {names[-1]}"


def shared_gpus(facts: Iterable[dict[str, Any]]) -> list[str]:
    """Return a warning for each GPU that several workers share; spare ranks do not count."""
    users: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for fact in facts:
        if fact["gpu"] is not None and fact["role"] != "spare":
            users.setdefault((fact["host"], fact["gpu"]), []).append(fact)
    return [
        f"ranks {', '.join(str(f['rank']) for f in those)} share {those[0]['device']} of "
        f"{host}: start fewer workers there, or let each task see all GPUs of its node "
        "(docs/troubleshooting.md)"
        for (host, _), those in users.items()
        if len(those) > 1
    ]


def idle_gpus(facts: Iterable[dict[str, Any]]) -> list[str]:
    """Return a warning if workers use the CPU on hosts that have GPUs."""
    hosts = {fact["host"]: fact["idle_gpus"] for fact in facts if fact["idle_gpus"]}
    if not hosts:
        return []
    where = f"{_span(list(hosts))} with {max(hosts.values())} GPUs"
    return [
        f"workers compute on the CPU of {where}, which torch cannot use: check the driver, the "
        "installed torch, and whether the job was given GPUs (docs/troubleshooting.md); pass "
        "--device cpu if the CPU is intended"
    ]


def far_cores(facts: Iterable[dict[str, Any]]) -> list[str]:
    """Return a warning if workers are bound to cores far from their GPUs."""
    far = [fact for fact in facts if fact["nearness"] == "far"]
    if not far:
        return []
    hosts = list(dict.fromkeys(fact["host"] for fact in far))
    return [
        f"workers on {_span(hosts)} ({len(far)} in all) are bound to cores far from their GPUs: "
        "let the launcher bind no cores (srun --cpu-bind=none, mpirun --bind-to none), so that "
        "the program binds each worker to cores near its GPU"
    ]


def _cores(fact: dict[str, Any]) -> str:
    """Return a text such as ``cores 0-7,16``."""
    cores = fact["cores"]
    return f"core{'s' * (len(cores) > 1)} {as_cpulist(cores)}" if cores else ""
