"""Cores near a rank's GPU, from what the system says of it.

A GPU hangs on one of the processor's memory domains, and what the host sends it from another one
takes longer. Which GPU is near which cores differs from machine to machine (on JUWELS Booster GPUs
0 to 3 are on domains 3, 1, 7 and 5), so the system is asked: ``local_cpulist`` of the GPU's address
on the PCI bus.

Only where the launcher leaves it to the program: several workers of a host have GPUs, and all ranks
there may use the same cores.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from aladdin_mpi.accelerator import BUS, bus_address
from aladdin_mpi.control.exchange import broadcast, gather
from aladdin_mpi.transport.base import Transport

THREADS = Path("/proc/self/task")
CPUS = Path("/sys/devices/system/cpu")


class Place(NamedTuple):
    """What one rank says of itself: ``near`` are the cores near its GPU, ``allowed`` all of its."""

    rank: int
    host: int
    near: tuple[int, ...]
    allowed: tuple[int, ...]


class Share(NamedTuple):
    """What a rank is bound to: the part ``place`` of ``parts`` equal ones of ``cores``."""

    cores: tuple[int, ...]
    place: int
    parts: int


def bind_to_near(
    transport: Transport, device: torch.device, bus: Path = BUS, cpus: Path = CPUS
) -> None:
    """Bind this process to cores near ``device``, unless that is none or the launcher has bound it.

    All ranks call it.
    """
    if transport.shares_process or not hasattr(os, "sched_getaffinity"):
        return
    allowed = as_cpulist(sorted(os.sched_getaffinity(0)))
    mine = transport.rank, transport.host, as_cpulist(near(bus_address(device), bus)), allowed
    told = [_place(each) for each in gather(transport, mine)]
    dealt = {
        str(rank): (as_cpulist(share.cores), share.place, share.parts)
        for rank, share in deal(told).items()
    }
    share = broadcast(transport, dealt).get(str(transport.rank))
    if share is not None:
        cores, place, parts = share
        bind(split(cpulist(cores), parts, cpus)[place])


def _place(told: Sequence[Any]) -> Place:
    rank, host, near_cores, allowed = told
    return Place(rank, host, cpulist(near_cores), cpulist(allowed))


def near(address: str | None, bus: Path = BUS) -> tuple[int, ...]:
    """The cores near the device at an address such as "0000:03:00.0"; none: nobody knows."""
    if address is None:
        return ()
    try:
        return cpulist((bus / address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return ()


def nearness(device: torch.device, cores: Sequence[int], bus: Path = BUS) -> str:
    """How ``cores`` lie to ``device``: "near", "far", or "" for some of both or nobody knows."""
    wanted = set(near(bus_address(device), bus))
    if not wanted or not cores:
        return ""
    return "near" if wanted.issuperset(cores) else "far" if wanted.isdisjoint(cores) else ""


def cpulist(text: str) -> tuple[int, ...]:
    """The cores of a list such as "18-23,66-71"."""
    found: list[int] = []
    for part in text.strip().split(",") if text.strip() else []:
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def as_cpulist(cores: Sequence[int]) -> str:
    """The inverse of :func:`cpulist`, for numbers in order."""
    return ",".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in _runs(cores))


def deal(places: Sequence[Place]) -> dict[int, Share]:
    """Who is bound to what; ranks that are left alone are not in it."""
    found: dict[int, Share] = {}
    for host in {place.host for place in places}:
        found |= _deal_on_host([place for place in places if place.host == host])
    return found


def _deal_on_host(places: Sequence[Place]) -> dict[int, Share]:
    if len({place.allowed for place in places}) > 1:
        return {}  # the launcher has dealt the cores
    sharing: dict[tuple[int, ...], list[int]] = {}
    for place in places:
        cores = tuple(core for core in place.near if core in place.allowed)
        sharing.setdefault(cores, []).append(place.rank)
    bound = {cores: ranks for cores, ranks in sharing.items() if cores}
    if sum(map(len, bound.values())) < 2:
        return {}  # nobody to keep apart from
    return {
        rank: Share(cores, place, len(ranks))
        for cores, ranks in bound.items()
        for place, rank in enumerate(ranks)
    }


def split(cores: Sequence[int], count: int, cpus: Path = CPUS) -> list[tuple[int, ...]]:
    """Equal parts; hyperthreads of one core stay together, if there are enough cores for that."""
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
    """The hyperthreads of the core that ``core`` is one of; itself alone where nobody knows.

    Their numbers may be far apart (0 and 64) or neighbours, as may the cores of a socket (0, 2, 4):
    numbers alone do not tell.
    """
    try:
        return cpulist((cpus / f"cpu{core}" / "topology" / "thread_siblings_list").read_text())
    except (OSError, ValueError):
        return (core,)


def _runs(cores: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return runs


def bind(cores: Sequence[int]) -> None:
    """Bind all threads of this process, those that there are already too.

    Where the system forbids it, as some containers do, or there are no ``cores``, nothing is done.
    """
    if not cores:
        return
    for thread in THREADS.iterdir() if THREADS.is_dir() else []:
        with suppress(OSError):  # it has ended meanwhile, or may not be bound
            os.sched_setaffinity(int(thread.name), cores)
    if os.sched_getaffinity(0) <= set(cores) and torch.get_num_threads() > len(cores):
        torch.set_num_threads(len(cores))
