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
from aladdin_mpi.run.near_cores import Place, as_cpulist, cpulist, deal, near, split
from tests.launch import ROOT

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
SHARED = {
    # Two sockets with three GPUs each.
    **{f"0000:{bus}:00.0": "0-51,104-155" for bus in ("18", "42", "6c")},
    **{f"0001:{bus}:00.0": "52-103,156-207" for bus in ("18", "42", "6c")},
}


def tree(root: Path, gpus: dict[str, str]) -> Path:
    for address, cores in gpus.items():
        (root / address).mkdir()
        (root / address / "local_cpulist").write_text(cores + "\n")
    return root


def places(root: Path, gpus: list[str], cores: int, servers: int = 1) -> list[Place]:
    """A host with one worker for each GPU, and servers before them."""
    every = tuple(range(cores))
    serving = [Place(rank, 0, (), every) for rank in range(servers)]
    return serving + [
        Place(servers + number, 0, near(address, root), every)
        for number, address in enumerate(gpus)
    ]


@pytest.mark.parametrize("name", MACHINES)
def test_each_worker_gets_the_cores_near_its_gpu(name: str, tmp_path: Path) -> None:
    cores, gpus = MACHINES[name]
    found = deal(places(tree(tmp_path, gpus), list(gpus), cores))
    assert {rank: as_cpulist(each) for rank, each in found.items()} == dict(
        enumerate(gpus.values(), start=1)
    )


def test_workers_whose_gpus_are_near_the_same_cores_divide_them(tmp_path: Path) -> None:
    found = deal(places(tree(tmp_path, SHARED), list(SHARED), 208))
    shown = [as_cpulist(found[rank]) for rank in range(1, 7)]
    assert shown[:3] == ["0-16,104-120", "17-33,121-137", "34-51,138-155"]
    assert shown[3:] == ["52-68,156-172", "69-85,173-189", "86-103,190-207"]
    assert sorted(core for cores in found.values() for core in cores) == list(range(208))


def test_only_cores_of_the_job_count(tmp_path: Path) -> None:
    cores, gpus = MACHINES["JUWELS Booster"]
    job = tuple(range(48))  # without hyperthreads
    ranks = [p._replace(allowed=job) for p in places(tree(tmp_path, gpus), list(gpus), cores)]
    assert [as_cpulist(each) for each in deal(ranks).values()] == [
        "18-23",
        "6-11",
        "42-47",
        "30-35",
    ]


def test_hosts_are_dealt_one_by_one(tmp_path: Path) -> None:
    cores, gpus = MACHINES["Perlmutter"]
    one = places(tree(tmp_path, gpus), list(gpus), cores, servers=0)
    other = [place._replace(rank=place.rank + 4, host=1) for place in one]
    found = deal([*one, *other])
    assert all(found[rank] == found[rank + 4] for rank in range(4))


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
    assert split((0,), 2) == [(), (0,)]
    found = deal(places(tree(tmp_path, {"0000:03:00.0": "0"}), ["0000:03:00.0"] * 2, 4))
    assert found == {2: (0,)}


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
