"""Binding of ranks to the cores near their GPUs, on emulated machines."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aladdin_mpi import accelerator
from aladdin_mpi.run import placement
from aladdin_mpi.run.placement import (
    RankPlace,
    as_cpulist,
    bind_to_near,
    cpulist,
    near,
    share_cores,
    split,
)
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.wrapper import TransportWrapper
from tests.run.program_runs import run_alone
from tests.virtual_lab import lab, run

MACHINES = {
    # Two EPYC 7402 in four domains each; GPUs 0 to 3 are in the domains 3, 1, 7, 5.
    "JUWELS Booster": (
        96,
        {
            "0000:03:00.0": "18-23,66-71",
            "0000:44:00.0": "6-11,54-59",
            "0000:84:00.0": "42-47,90-95",
            "0000:c4:00.0": "30-35,78-83",
        },
    ),
    # One EPYC 7763; its GPUs are numbered in the opposite order.
    "Perlmutter": (
        128,
        {
            "0000:03:00.0": "48-63,112-127",
            "0000:41:00.0": "32-47,96-111",
            "0000:82:00.0": "16-31,80-95",
            "0000:c1:00.0": "0-15,64-79",
        },
    ),
}
AURORA = {
    # Two sockets with three GPUs each, and a list for each socket.
    **{f"0000:{bus}:00.0": "0-51,104-155" for bus in ("18", "42", "6c")},
    **{f"0001:{bus}:00.0": "52-103,156-207" for bus in ("18", "42", "6c")},
}


def tree(root: Path, gpus: dict[str, str], *cores: str) -> Path:
    """Write emulated system folders with each GPU's near cores, and each core's hyperthreads."""
    for address, cpus in gpus.items():
        (root / address).mkdir()
        (root / address / "local_cpulist").write_text(cpus + "\n")
    for threads in cores:
        for number in cpulist(threads):
            folder = root / f"cpu{number}" / "topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(threads + "\n")
    return root


def places(root: Path, gpus: list[str], cores: int, servers: int = 1) -> list[RankPlace]:
    """Return a host with one worker for each GPU, and servers before them."""
    every = tuple(range(cores))
    serving = [RankPlace(rank, 0, (), every) for rank in range(servers)]
    return serving + [
        RankPlace(servers + number, 0, near(address, root), every)
        for number, address in enumerate(gpus)
    ]


def bound(ranks: list[RankPlace], root: Path) -> dict[int, str]:
    """Return the cores to which each rank is bound."""
    return {
        rank: as_cpulist(split(share.cores, share.parts, root)[share.place])
        for rank, share in share_cores(ranks).items()
    }


@pytest.mark.parametrize("name", MACHINES)
def test_each_worker_is_bound_to_the_cores_near_its_gpu(name: str, tmp_path: Path) -> None:
    cores, gpus = MACHINES[name]
    cores_by_rank = bound(places(tree(tmp_path, gpus), list(gpus), cores), tmp_path)
    assert cores_by_rank == dict(enumerate(gpus.values(), start=1))


def test_workers_with_gpus_near_the_same_cores_share_them_evenly(tmp_path: Path) -> None:
    tree(tmp_path, AURORA, *(f"{core},{core + 104}" for core in range(104)))
    cores_by_rank = bound(places(tmp_path, list(AURORA), 208), tmp_path)
    assert list(cores_by_rank.values()) == [
        *("0-16,104-120", "17-33,121-137", "34-51,138-155"),
        *("52-68,156-172", "69-85,173-189", "86-103,190-207"),
    ]


def test_workers_divide_one_core_list_shared_by_all_gpus(tmp_path: Path) -> None:
    gpus = {f"0000:{bus}:00.0": "0-15" for bus in ("01", "02", "03", "04")}
    tree(tmp_path, gpus, *(f"{core},{core + 8}" for core in range(8)))
    assert bound(places(tmp_path, list(gpus), 16), tmp_path) == {
        **{1: "0-1,8-9", 2: "2-3,10-11"},
        **{3: "4-5,12-13", 4: "6-7,14-15"},
    }


def test_workers_divide_cores_of_sockets_with_alternating_numbers(tmp_path: Path) -> None:
    """As on many machines: the cores of one socket have even numbers, so none are adjacent."""
    even, odd = "0,2,4,6,8,10,12,14", "1,3,5,7,9,11,13,15"
    gpus = {"0000:01:00.0": even, "0000:02:00.0": even, "0000:81:00.0": odd, "0000:82:00.0": odd}
    tree(tmp_path, gpus, *(f"{core},{core + 8}" for core in range(8)))
    assert list(bound(places(tmp_path, list(gpus), 16), tmp_path).values()) == [
        *("0,2,8,10", "4,6,12,14"),
        *("1,3,9,11", "5,7,13,15"),
    ]


def test_split_keeps_adjacent_hyperthreads_together(tmp_path: Path) -> None:
    tree(tmp_path, {}, "0-3", "4-7", "8-11", "12-15", "16-19")
    shown = [as_cpulist(part) for part in split(range(20), 3, tmp_path)]
    assert shown == ["0-3", "4-11", "12-19"]
    assert [as_cpulist(part) for part in split(range(4), 2, tmp_path)] == ["0-1", "2-3"]


def test_binding_uses_only_the_cores_of_the_job(tmp_path: Path) -> None:
    cores, gpus = MACHINES["JUWELS Booster"]
    job = tuple(range(48))  # without hyperthreads
    ranks = [p._replace(allowed=job) for p in places(tree(tmp_path, gpus), list(gpus), cores)]
    assert list(bound(ranks, tmp_path).values()) == ["18-23", "6-11", "42-47", "30-35"]


def test_cores_are_divided_separately_on_each_host(tmp_path: Path) -> None:
    cores, gpus = MACHINES["Perlmutter"]
    one = places(tree(tmp_path, gpus), list(gpus), cores, servers=0)
    other = [place._replace(rank=place.rank + 4, host=1) for place in one]
    cores_by_rank = bound([*one, *other], tmp_path)
    assert list(cores_by_rank.values()) == [*gpus.values()] * 2


def test_binding_by_the_launcher_is_kept(tmp_path: Path) -> None:
    cores, gpus = MACHINES["JUWELS Booster"]
    ranks = places(tree(tmp_path, gpus), list(gpus), cores)
    ranks[2] = ranks[2]._replace(allowed=(0, 1, 2))
    assert share_cores(ranks) == {}


def test_ranks_stay_unbound_if_the_system_lists_no_near_cores(tmp_path: Path) -> None:
    tree(tmp_path, {"0000:03:00.0": "", "0000:44:00.0": "not a list"})
    addresses = ["0000:03:00.0", "0000:44:00.0", "0000:99:00.0"]
    assert share_cores(places(tmp_path, addresses, 8)) == {}
    assert near(None, tmp_path) == ()


def test_single_worker_keeps_all_cores(tmp_path: Path) -> None:
    cores, gpus = MACHINES["Perlmutter"]
    assert share_cores(places(tree(tmp_path, gpus), list(gpus)[:1], cores)) == {}


def test_worker_without_dedicated_core_stays_unbound(tmp_path: Path) -> None:
    tree(tmp_path, {"0000:03:00.0": "0"})
    assert bound(places(tmp_path, ["0000:03:00.0"] * 2, 4), tmp_path) == {1: "", 2: "0"}


def test_nearness_reports_whether_rank_is_bound_near_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(tmp_path, {"0000:03:00.0": "0-3", "0000:44:00.0": ""})
    addresses = [None, "0000:03:00.0", "0000:44:00.0"]
    monkeypatch.setattr(placement, "bus_address", lambda device: addresses[device.index])
    gpu = torch.device("cuda", 1)
    nearness = [placement.nearness(gpu, each, tmp_path) for each in ([1, 2], [4, 5], [3, 4], [])]
    assert nearness == ["near", "far", "", ""]
    assert placement.nearness(torch.device("cuda", 0), [1], tmp_path) == ""
    assert placement.nearness(torch.device("cuda", 2), [1], tmp_path) == ""


@pytest.mark.parametrize("text", ["", "3", "0-3", "0-3,8,10-11"])
def test_core_list_round_trips_through_text(text: str) -> None:
    assert as_cpulist(cpulist(text)) == text


def test_bus_address_of_a_gpu_has_the_format_of_sysfs(monkeypatch: pytest.MonkeyPatch) -> None:
    properties: dict[str, Any] = {"pci_domain_id": 1, "pci_bus_id": 0xC4, "pci_device_id": 0}
    module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(**properties))
    monkeypatch.setattr(accelerator, "_module", lambda name: module)
    assert accelerator.bus_address(torch.device("cuda", 0)) == "0001:c4:00.0"
    properties["pci_bus_id"] = None  # an older version of torch
    assert accelerator.bus_address(torch.device("cuda", 0)) is None
    assert accelerator.bus_address(torch.device("cpu")) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no processes")
def test_rank_binds_itself_to_its_part_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the device's address to the system call, with three ranks."""
    gpus = {"0000:01:00.0": "0-7", "0000:02:00.0": "0-7"}
    tree(tmp_path, gpus, *(f"{core},{core + 4}" for core in range(4)))
    addresses = dict(zip((1, 2), gpus, strict=True))
    calls: list[list[int]] = []
    monkeypatch.setattr(placement, "bus_address", lambda device: addresses.get(device.index))
    monkeypatch.setattr(placement, "bind", lambda cores: calls.append(list(cores)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    def rank(transport: Transport) -> None:
        layer = TransportWrapper(transport)
        layer.shares_process = False  # as over MPI
        bind_to_near(layer, torch.device("cuda", transport.rank), tmp_path, tmp_path)

    run(3, rank, lab(1))
    assert sorted(calls) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_run_continues_if_core_binding_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    placement.bind((10_000,))
    placement.bind(())
    assert torch.get_num_threads() == before


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no processes")
def test_binding_covers_all_threads_of_the_process(tmp_path: Path) -> None:
    completed = run_alone(tmp_path, "bound_threads")
    assert completed.stdout == "bound\n", completed.stderr
