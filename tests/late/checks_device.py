"""Checks of the delayed-copy test device, run in a separate process by test_late.py."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from aladdin_mpi import accelerator
from aladdin_mpi.optimizers.from_torch import TorchOptimizer
from tests.late.device import KIND, runtime

DEVICE = torch.device(KIND, 2)
LONG = 50_000
"""Longest duration of a copy or a kernel in microseconds, so that a missing wait shows."""
TRIES = 10


@pytest.fixture(autouse=True)
def at_rest() -> Iterator[None]:
    torch.get_device_module(DEVICE).set_device(DEVICE)
    runtime.set_delays(500, 0)
    runtime.forget()
    yield
    torch.accelerator.synchronize(DEVICE)


def test_torch_recognises_the_device() -> None:
    assert torch.accelerator.current_accelerator() == torch.device(KIND)
    assert torch.accelerator.device_count() == runtime.DEVICES == 4
    values = torch.arange(6.0).to(DEVICE) * 2 + 1
    assert values.device == DEVICE
    assert values.cpu().tolist() == [1, 3, 5, 7, 9, 11]
    assert values.sum().item() == 36


def test_host_runs_ahead_of_the_device() -> None:
    values = torch.zeros(10, device=DEVICE)
    runtime.set_delays(0, LONG)
    for _ in range(3):
        values.add_(1)
    fresh = values * 2
    torch.add(values, 1, out=values)
    event = torch.accelerator.current_stream(DEVICE).record_event()
    assert not event.query()
    event.synchronize()
    runtime.set_delays(0, 0)
    assert (fresh.cpu() == 6).all() and (values.cpu() == 4).all()
    assert runtime.counts()["kernels"] >= 5


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def test_network_has_the_gradients_of_the_cpu() -> None:
    here = network()
    there = copy.deepcopy(here).to(DEVICE)
    images, labels = torch.randn(5, 1, 8, 8), torch.arange(5)
    for module, device in ((here, torch.device("cpu")), (there, DEVICE)):
        nn.functional.cross_entropy(module(images.to(device)), labels.to(device)).backward()
    for mine, other in zip(here.parameters(), there.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        assert torch.equal(mine.grad, other.grad.cpu())
    assert "operators that the host waits for" not in runtime.counts()


def copied(waits: bool) -> list[float]:
    """Return values copied on a side stream while the next kernel changes them."""
    values = torch.arange(4.0).to(DEVICE)
    target = torch.zeros(4, pin_memory=True)
    side = torch.Stream(DEVICE)
    present = torch.accelerator.current_stream(DEVICE)
    runtime.set_delays(LONG, 0)
    side.wait_stream(present)
    with side:
        target.copy_(values, non_blocking=True)
        event = side.record_event()
    assert not event.query() and target.tolist() == [0, 0, 0, 0]
    if waits:
        present.wait_event(event)
    values.add_(100)
    event.synchronize()
    return target.tolist()


def test_missing_wait_shows_as_a_race() -> None:
    assert copied(waits=False) == [100, 101, 102, 103]
    assert copied(waits=True) == [0, 1, 2, 3]


def read_back(delays: tuple[int, int], waits: bool) -> list[float]:
    """Return ones that are copied to pinned memory, which contained nines, and back."""
    copies, values = accelerator.CopyStream(DEVICE), torch.zeros(4, device=DEVICE)
    pinned = torch.full((4,), 9.0, pin_memory=True)
    runtime.set_delays(*delays)
    values.add_(1)
    event = copies.copy(values, pinned)
    found: list[float] = copies.fetch(pinned, event if waits else None)[0].tolist()
    return found


@pytest.mark.parametrize("delays", [(LONG, 0), (0, LONG)], ids=["copies", "kernels"])
def test_fetch_waits_for_the_copy_that_fills_its_source(delays: tuple[int, int]) -> None:
    assert all(read_back(delays, waits=True) == [1] * 4 for _ in range(TRIES))
    assert any(read_back(delays, waits=False) == [9] * 4 for _ in range(TRIES))


def copied_from_a_temporary(records: bool) -> list[float]:
    values = torch.arange(4.0).to(DEVICE)
    target = torch.zeros(4, pin_memory=True)
    side = torch.Stream(DEVICE)
    temporary = values + 1
    runtime.set_delays(LONG, 0)
    side.wait_stream(torch.accelerator.current_stream(DEVICE))
    with side:
        target.copy_(temporary, non_blocking=True)
        event = side.record_event()
    if records:
        temporary.record_stream(side)
    del temporary
    event.synchronize()
    return target.tolist()


def test_freed_memory_is_overwritten_unless_its_stream_is_recorded() -> None:
    assert all(value != value for value in copied_from_a_temporary(records=False))  # NaN
    assert copied_from_a_temporary(records=True) == [1, 2, 3, 4]


def test_memory_in_use_by_a_copy_is_tracked() -> None:
    values = torch.arange(4.0).to(DEVICE)
    pinned = torch.ones(4, pin_memory=True)
    assert pinned.is_pinned() and not torch.ones(4).is_pinned()
    where = pinned.data_ptr(), pinned.nbytes
    runtime.set_delays(LONG, 0)
    pinned.copy_(values, non_blocking=True)
    assert runtime.uses_of(*where) == 2
    torch.accelerator.synchronize(DEVICE)
    values.copy_(pinned, non_blocking=True)
    assert runtime.uses_of(*where) == 1
    torch.accelerator.synchronize(DEVICE)
    assert runtime.uses_of(*where) == 0


def test_operations_that_stall_the_host_are_counted() -> None:
    values = torch.arange(4.0).to(DEVICE)
    runtime.forget()
    values.sum().item()
    values.cpu()
    values.copy_(torch.ones(4), non_blocking=True)
    counts = runtime.counts()
    assert counts["items"] == 1
    assert counts["blocking copies to the host"] == 1
    assert counts["pageable copies to a device"] == 1


def test_touched_devices_are_tracked() -> None:
    torch.zeros(3, device=DEVICE).add_(1)
    assert runtime.touched() == [2]
    torch.zeros(3, device=torch.device(KIND, 1))
    assert runtime.touched() == [1, 2]


def test_memory_of_device_and_host_is_counted() -> None:
    before, _, pinned_before, _ = runtime.memory_used()
    held = torch.zeros(1000, device=DEVICE), torch.zeros(5000, pin_memory=True)
    now, most, pinned, _ = runtime.memory_used()
    assert now - before == 4096 and most >= now and pinned - pinned_before == 32768
    del held
    assert runtime.memory_used()[0] == before


def test_pinned_memory_has_the_requested_size() -> None:
    now, _ = runtime.memory_used()[2:]
    numel = 5 * 2**18 + 1000  # slightly more than 5 MiB: rounded up they would be 8
    buffer = accelerator.pinned(numel, torch.float32, DEVICE)
    assert buffer.is_pinned() and not buffer.any()
    assert runtime.memory_used()[2] - now == 4 * numel
    part = buffer[1000:]
    del buffer
    fetched, _ = accelerator.CopyStream(DEVICE).fetch(part.fill_(3.0))
    assert runtime.memory_used()[2] - now == 4 * numel  # part of it is still in use
    del part
    assert runtime.memory_used()[2] == now
    assert (fetched == 3).all().item()


def test_small_pinned_buffer_is_allocated_by_torch() -> None:
    small = accelerator.pinned(1000, torch.bfloat16, DEVICE)
    assert small.is_pinned() and not small.any()


def adamw_of(model: nn.Module, x: torch.Tensor) -> TorchOptimizer:
    return TorchOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model, x)


def test_inherited_optimizer_state_moves_to_the_device() -> None:
    """Whether it is used at once, or after another checkpoint."""
    moments = []
    for saves in (0, 1, 2):
        model = nn.Linear(3, 2).to(DEVICE)
        nn.init.constant_(model.weight, 0.5)
        nn.init.constant_(model.bias, 0.5)

        x = torch.full((8,), 0.5, device=DEVICE)
        optimizer, whole = adamw_of(model, x), slice(0, 8)
        optimizer.descend(whole, torch.arange(8.0).to(DEVICE), x, 1.0)
        for number in range(saves):
            stored = io.BytesIO()
            torch.save(optimizer.state_dict(), stored)
            stored.seek(0)
            state = torch.load(stored, map_location="cpu", weights_only=True)
            optimizer = adamw_of(model, x)
            (optimizer.load_state_dict if number else optimizer.inherit)(state)
        for part in (slice(0, 5), slice(5, 8)) if saves else (whole,):
            optimizer.descend(part, torch.ones(8, device=DEVICE)[part], x[part], 1.0)
        moments.append(x.cpu().tolist())
    assert moments[0] == moments[1] == moments[2]
