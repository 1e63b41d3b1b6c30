"""Cores near a GPU, on made-up machines: who is bound where, and who is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
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
    deal,
    near,
    split,
)
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.wrapper import TransportWrapper
from tests.launch import ROOT
from tests.virtual_lab import lab, run

MACHINES = {
    # Two EPYC 7402 in four domains each; GPUs 0 to 3 are on the domains 3, 1, 7, 5.
    "JUWELS Booster": (
        96,
        {
            "0000:03:00.0": "18-23,66-71",
            "0000:44:00.0": "6-11,54-59",
            "0000:84:00.0": "42-47,90-95",
            "0000:c4:00.0": "30-35,78-83",
        },
    ),
    # One EPYC 7763; the other way round.
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
    """Made-up folders of the system: each GPU's near cores, and each core's hyperthreads."""
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
    """A host with one worker for each GPU, and servers before them."""
    every = tuple(range(cores))
    serving = [RankPlace(rank, 0, (), every) for rank in range(servers)]
    return serving + [
        RankPlace(servers + number, 0, near(address, root), every)
        for number, address in enumerate(gpus)
    ]


def bound(ranks: list[RankPlace], root: Path) -> dict[int, str]:
    """What each rank is bound to."""
    return {
        rank: as_cpulist(split(share.cores, share.parts, root)[share.place])
        for rank, share in deal(ranks).items()
    }


@pytest.mark.parametrize("name", MACHINES)
def test_each_worker_gets_the_cores_near_its_gpu(name: str, tmp_path: Path) -> None:
    cores, gpus = MACHINES[name]
    found = bound(places(tree(tmp_path, gpus), list(gpus), cores), tmp_path)
    assert found == dict(enumerate(gpus.values(), start=1))


def test_workers_whose_gpus_are_near_the_same_cores_divide_them(tmp_path: Path) -> None:
    tree(tmp_path, AURORA, *(f"{core},{core + 104}" for core in range(104)))
    found = bound(places(tmp_path, list(AURORA), 208), tmp_path)
    assert list(found.values()) == [
        *("0-16,104-120", "17-33,121-137", "34-51,138-155"),
        *("52-68,156-172", "69-85,173-189", "86-103,190-207"),
    ]


def test_one_list_for_all_gpus(tmp_path: Path) -> None:
    gpus = {f"0000:{bus}:00.0": "0-15" for bus in ("01", "02", "03", "04")}
    tree(tmp_path, gpus, *(f"{core},{core + 8}" for core in range(8)))
    assert bound(places(tmp_path, list(gpus), 16), tmp_path) == {
        **{1: "0-1,8-9", 2: "2-3,10-11"},
        **{3: "4-5,12-13", 4: "6-7,14-15"},
    }


def test_sockets_that_are_numbered_in_turn(tmp_path: Path) -> None:
    """As many machines have it: one socket's cores are even, and no two are neighbours."""
    even, odd = "0,2,4,6,8,10,12,14", "1,3,5,7,9,11,13,15"
    gpus = {"0000:01:00.0": even, "0000:02:00.0": even, "0000:81:00.0": odd, "0000:82:00.0": odd}
    tree(tmp_path, gpus, *(f"{core},{core + 8}" for core in range(8)))
    assert list(bound(places(tmp_path, list(gpus), 16), tmp_path).values()) == [
        *("0,2,8,10", "4,6,12,14"),
        *("1,3,9,11", "5,7,13,15"),
    ]


def test_hyperthreads_that_are_neighbours_stay_together(tmp_path: Path) -> None:
    tree(tmp_path, {}, "0-3", "4-7", "8-11", "12-15", "16-19")
    shown = [as_cpulist(part) for part in split(range(20), 3, tmp_path)]
    assert shown == ["0-3", "4-11", "12-19"]
    assert [as_cpulist(part) for part in split(range(4), 2, tmp_path)] == ["0-1", "2-3"]


def test_only_cores_of_the_job_count(tmp_path: Path) -> None:
    cores, gpus = MACHINES["JUWELS Booster"]
    job = tuple(range(48))  # without hyperthreads
    ranks = [p._replace(allowed=job) for p in places(tree(tmp_path, gpus), list(gpus), cores)]
    assert list(bound(ranks, tmp_path).values()) == ["18-23", "6-11", "42-47", "30-35"]


def test_hosts_are_dealt_one_by_one(tmp_path: Path) -> None:
    cores, gpus = MACHINES["Perlmutter"]
    one = places(tree(tmp_path, gpus), list(gpus), cores, servers=0)
    other = [place._replace(rank=place.rank + 4, host=1) for place in one]
    found = bound([*one, *other], tmp_path)
    assert list(found.values()) == [*gpus.values()] * 2


def test_a_launcher_that_has_bound_is_obeyed(tmp_path: Path) -> None:
    cores, gpus = MACHINES["JUWELS Booster"]
    ranks = places(tree(tmp_path, gpus), list(gpus), cores)
    ranks[2] = ranks[2]._replace(allowed=(0, 1, 2))
    assert deal(ranks) == {}


def test_without_a_word_from_the_system_nobody_is_bound(tmp_path: Path) -> None:
    tree(tmp_path, {"0000:03:00.0": "", "0000:44:00.0": "not a list"})
    addresses = ["0000:03:00.0", "0000:44:00.0", "0000:99:00.0"]
    assert deal(places(tmp_path, addresses, 8)) == {}
    assert near(None, tmp_path) == ()


def test_a_worker_alone_keeps_all_cores(tmp_path: Path) -> None:
    cores, gpus = MACHINES["Perlmutter"]
    assert deal(places(tree(tmp_path, gpus), list(gpus)[:1], cores)) == {}


def test_more_workers_than_cores(tmp_path: Path) -> None:
    tree(tmp_path, {"0000:03:00.0": "0"})
    assert bound(places(tmp_path, ["0000:03:00.0"] * 2, 4), tmp_path) == {1: "", 2: "0"}


def test_how_cores_lie_to_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, {"0000:03:00.0": "0-3", "0000:44:00.0": ""})
    addresses = [None, "0000:03:00.0", "0000:44:00.0"]
    monkeypatch.setattr(placement, "bus_address", lambda device: addresses[device.index])
    gpu = torch.device("cuda", 1)
    found = [placement.nearness(gpu, each, tmp_path) for each in ([1, 2], [4, 5], [3, 4], [])]
    assert found == ["near", "far", "", ""]
    assert placement.nearness(torch.device("cuda", 0), [1], tmp_path) == ""
    assert placement.nearness(torch.device("cuda", 2), [1], tmp_path) == ""


@pytest.mark.parametrize("text", ["", "3", "0-3", "0-3,8,10-11"])
def test_lists_of_cores(text: str) -> None:
    assert as_cpulist(cpulist(text)) == text


def test_the_address_is_as_the_system_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {"pci_domain_id": 1, "pci_bus_id": 0xC4, "pci_device_id": 0}
    module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(**told))
    monkeypatch.setattr(accelerator, "_module", lambda name: module)
    assert accelerator.bus_address(torch.device("cuda", 0)) == "0001:c4:00.0"
    told["pci_bus_id"] = None  # an older torch
    assert accelerator.bus_address(torch.device("cuda", 0)) is None
    assert accelerator.bus_address(torch.device("cpu")) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no processes")
def test_a_rank_binds_itself_to_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the device's address to the system's call, with three ranks that tell each other."""
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


def test_a_system_that_forbids_binding_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    placement.bind((10_000,))
    placement.bind(())
    assert torch.get_num_threads() == before


BIND = """
import os, threading, time, torch
from aladdin_mpi.run.near_cores import bind

found = {}
event = threading.Event()


def wait():
    event.wait(10)
    found["thread"] = os.sched_getaffinity(0)


thread = threading.Thread(target=wait)
thread.start()
torch.set_num_threads(8)
first = min(os.sched_getaffinity(0))
bind((first,))
event.set()
thread.join()
assert os.sched_getaffinity(0) == found["thread"] == {first}, found
assert torch.get_num_threads() == 1
print("bound")
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no processes")
def test_all_threads_are_bound() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BIND], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "bound\n", done.stderr
