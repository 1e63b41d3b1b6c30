"""Devices on a machine that has none, and who is given which."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aladdin_mpi import accelerator
from aladdin_mpi.allreduce.choose import _are_apart
from aladdin_mpi.errors import UserError
from aladdin_mpi.run.job import choose_device
from tests.launch import ROOT


class FakeModule:
    """Torch's module of a kind of devices, of which there are four."""

    Stream = object

    def __init__(self) -> None:
        self.present = 0

    def device_count(self) -> int:
        return 4

    def current_device(self) -> int:
        return self.present

    def set_device(self, device: torch.device) -> None:
        self.present = device.index


class Ranks:
    """What :func:`choose_device` asks of a transport."""

    def __init__(self, rank: int, hosts: str, shares_process: bool = False) -> None:
        self.rank, self.hosts, self.host = rank, list(hosts), hosts[rank]
        self.shares_process = shares_process


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    module = FakeModule()
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda")
    monkeypatch.setattr(accelerator, "_module", lambda name: module)
    return module


def chosen(wanted: str, *ranks: Any, servers: int = 0, **more: Any) -> str:
    return str(choose_device(wanted, Ranks(*ranks, **more), servers))  # type: ignore[arg-type]


def test_no_other_file_knows_a_kind_of_device() -> None:
    files = [
        path.name
        for path in (ROOT / "aladdin_mpi").rglob("*.py")
        if any(text in path.read_text() for text in ("torch.cuda", "torch.xpu", "torch.accel"))
    ]
    assert files == ["accelerator.py"]


def test_a_worker_takes_the_gpu_of_its_place_on_its_host(four: FakeModule) -> None:
    assert chosen("auto", 0, "aab", servers=1) == "cpu"
    assert chosen("gpu", 1, "aab", servers=1) == "cuda:0"
    assert chosen("cuda", 3, "aaab") == "cuda:0"
    assert chosen("auto", 2, "aaab") == "cuda:2"
    assert four.present == 2  # and nothing touches the first one
    assert chosen("auto", 5, "aaaaaa") == "cuda:1"
    assert chosen("auto", 2, "aaab", shares_process=True) == "cuda:0"
    assert chosen("cpu", 2, "aaab") == "cpu"


def test_a_gpu_that_is_not_there_is_named(
    four: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"--device xpu: expected a GPU .* found one called cuda"):
        chosen("xpu", 0, "a")
    monkeypatch.setattr(accelerator, "kind", lambda: None)
    assert chosen("auto", 0, "a") == "cpu"
    for wanted in ("gpu", "cuda"):
        with pytest.raises(UserError, match=rf"--device {wanted}: expected .* found none here"):
            chosen(wanted, 0, "a")


def test_a_machine_without_any() -> None:
    if accelerator.kind() is not None:
        pytest.skip("this machine has an accelerator")
    assert accelerator.count() == 0
    assert not accelerator.is_accelerator(torch.device("cpu"))
    accelerator.enter(torch.device("cpu"))


def test_gpus_on_the_bus(tmp_path: Path) -> None:
    found = [("0x10de", "0x030200"), ("0x10de", "0x030000"), ("0x10de", "0x040300")]
    found += [("0x1002", "0x038000"), ("0x1002", "0x030000"), ("0x8086", "0x060000")]
    for number, (vendor, kind) in enumerate(found):
        device = tmp_path / f"0000:0{number}:00.0"
        device.mkdir()
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    (tmp_path / "without a class").mkdir()
    assert accelerator.on_the_bus(tmp_path) == 3  # no sound, no graphics of a processor
    assert accelerator.on_the_bus(tmp_path / "none") == 0


def test_gpus_are_told_apart_by_what_they_are() -> None:
    """Each task may see its own GPU alone, and call it number 0."""
    assert _are_apart([["a", "GPU-1"], ["a", "GPU-2"], ["b", "GPU-1"]])
    assert not _are_apart([["a", "GPU-1"], ["a", "GPU-1"]])
    assert not _are_apart([["a", "GPU-1"], None])


def test_without_a_number_of_its_own_a_gpu_is_what_the_task_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace())
    monkeypatch.setattr(accelerator, "_module", lambda name: module)
    found = set()
    for tile in ("0", "1"):
        monkeypatch.setenv("ZE_AFFINITY_MASK", tile)
        found.add(accelerator.identity(torch.device("xpu", 0)))
    assert len(found) == 2


def test_a_stopwatch_asks_the_device_when_it_is_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events tell milliseconds; nothing but ``finish`` waits for it."""
    waited: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            assert not waited

        def elapsed_time(self, last: Event) -> float:
            assert waited
            return 250.0

    fake = SimpleNamespace(Event=Event, synchronize=waited.append)
    monkeypatch.setattr(accelerator, "_module", lambda name: fake)
    device = torch.device("cuda:0")
    watch = accelerator.Stopwatch(device)
    first, last = watch.stamp(), watch.stamp()
    watch.finish()
    assert waited == [device]
    assert watch.between(first, last) == 0.25


def test_of_a_cpu_the_host_s_clock_counts() -> None:
    watch = accelerator.Stopwatch(torch.device("cpu"))
    first, last = watch.stamp(), watch.stamp()
    watch.finish()
    assert 0 <= watch.between(first, last) < 60
