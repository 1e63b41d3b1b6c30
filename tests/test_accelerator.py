"""Selection of devices and their assignment to ranks, on a machine without any."""

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
    """Torch's module for a device type, with four devices."""

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
    """The part of a transport that :func:`choose_device` uses."""

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


def test_only_accelerator_module_names_kinds_of_devices() -> None:
    files = [
        path.name
        for path in (ROOT / "aladdin_mpi").rglob("*.py")
        if any(text in path.read_text() for text in ("torch.cuda", "torch.xpu", "torch.accel"))
    ]
    assert files == ["accelerator.py"]


def test_worker_uses_gpu_of_its_local_rank(four: FakeModule) -> None:
    assert chosen("auto", 0, "aab", servers=1) == "cpu"
    assert chosen("gpu", 1, "aab", servers=1) == "cuda:0"
    assert chosen("cuda", 3, "aaab") == "cuda:0"
    assert chosen("auto", 2, "aaab") == "cuda:2"
    assert four.present == 2  # and the first device is not used
    assert chosen("auto", 5, "aaaaaa") == "cuda:1"
    assert chosen("auto", 2, "aaab", shares_process=True) == "cuda:0"
    assert chosen("cpu", 2, "aaab") == "cpu"


def test_missing_gpu_error_names_device_option(
    four: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"--device xpu: .*\bcuda\b"):
        chosen("xpu", 0, "a")
    monkeypatch.setattr(accelerator, "kind", lambda: None)
    assert chosen("auto", 0, "a") == "cpu"
    for wanted in ("gpu", "cuda"):
        with pytest.raises(UserError, match=rf"--device {wanted}: .*\bnone\b"):
            chosen(wanted, 0, "a")


def test_accelerator_count_is_zero_without_accelerator() -> None:
    if accelerator.kind() is not None:
        pytest.skip("this machine has an accelerator")
    assert accelerator.count() == 0
    assert not accelerator.is_accelerator(torch.device("cpu"))
    accelerator.enter(torch.device("cpu"))


def test_on_the_bus_counts_gpus(tmp_path: Path) -> None:
    result = [("0x10de", "0x030200"), ("0x10de", "0x030000"), ("0x10de", "0x040300")]
    result += [("0x1002", "0x038000"), ("0x1002", "0x030000"), ("0x8086", "0x060000")]
    for number, (vendor, kind) in enumerate(result):
        device = tmp_path / f"0000:0{number}:00.0"
        device.mkdir()
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    (tmp_path / "without a class").mkdir()
    assert accelerator.on_the_bus(tmp_path) == 3  # no sound, no integrated graphics
    assert accelerator.on_the_bus(tmp_path / "none") == 0


def test_gpus_are_distinguished_by_identity() -> None:
    """Each task may see only its GPU, and number it 0."""
    assert _are_apart([["a", "GPU-1"], ["a", "GPU-2"], ["b", "GPU-1"]])
    assert not _are_apart([["a", "GPU-1"], ["a", "GPU-1"]])
    assert not _are_apart([["a", "GPU-1"], None])


def test_gpu_identity_falls_back_to_affinity_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace())
    monkeypatch.setattr(accelerator, "_module", lambda name: module)
    result = set()
    for tile in ("0", "1"):
        monkeypatch.setenv("ZE_AFFINITY_MASK", tile)
        result.add(accelerator.identity(torch.device("xpu", 0)))
    assert len(result) == 2


def test_stopwatch_synchronises_device_only_in_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events measure milliseconds; only ``finish`` waits for it."""
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


def test_stopwatch_uses_host_clock_for_cpu() -> None:
    watch = accelerator.Stopwatch(torch.device("cpu"))
    first, last = watch.stamp(), watch.stamp()
    watch.finish()
    assert 0 <= watch.between(first, last) < 60
