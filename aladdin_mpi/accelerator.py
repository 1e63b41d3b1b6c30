"""Accelerators: their devices, streams and events. No other module calls a device API.

All calls go through torch's module for the type of device: ``torch.cuda`` (CUDA and ROCm),
``torch.xpu``, or that of a custom backend.

A thread that has not selected a device uses the first one, and would create a context there that
costs hundreds of MB. So every function selects its device first (:func:`enter`).
"""

from __future__ import annotations

import mmap
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HOST = ("cpu", "meta")
"""Device types that are not accelerators."""
BUS = Path("/sys/bus/pci/devices")
NVIDIA = "0x10de"
GPU_MAKERS = (NVIDIA, "0x1002", "0x8086")
LEAST_REGISTERED = 1 << 20
"""Bytes; for smaller buffers, rounding up wastes little memory."""
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_MASKS = (*_VISIBLE, "ZE_AFFINITY_MASK")


def kind() -> str | None:
    """Return the type of this machine's accelerators, such as "cuda"; None if it has none."""
    if hasattr(torch, "accelerator"):
        current = torch.accelerator.current_accelerator()
        name = None if current is None else current.type
    else:  # torch below 2.6
        name = "cuda"
    if name is None:
        return None
    module = _module(name)
    return name if hasattr(module, "Stream") and module.device_count() else None


def count() -> int:
    """Return the number of accelerators that torch can use."""
    name = kind()
    return 0 if name is None else int(_module(name).device_count())


def on_the_bus(bus: Path = BUS) -> int:
    """Return the number of GPUs on the PCI bus, whether torch can use them or not.

    For AMD and Intel, only compute devices count, because many processors have integrated graphics.
    """
    return sum(_is_gpu(device) for device in bus.glob("*"))


def _is_gpu(device: Path) -> bool:
    try:
        vendor, kind_of_device = ((device / name).read_text() for name in ("vendor", "class"))
    except OSError:
        return False
    if vendor.strip() not in GPU_MAKERS or not kind_of_device.startswith("0x03"):
        return False
    return vendor.strip() == NVIDIA or not kind_of_device.startswith("0x0300")


def are_hidden() -> bool:
    """Return whether the user or the batch system hides all GPUs from this process."""
    return any(os.environ.get(name, "0").strip() in ("", "-1") for name in _VISIBLE)


def is_accelerator(device: torch.device) -> bool:
    """Return whether ``device`` has memory and streams separate from the host's."""
    return device.type not in HOST


def identity(device: torch.device) -> str:
    """Return an identifier that is unique on the host: each task may call its device cuda:0."""
    uuid = getattr(_properties(device), "uuid", None)
    if uuid is not None:
        return str(uuid)
    masks = [os.environ[name] for name in _MASKS if name in os.environ]  # torch below 2.4
    return "/".join([*masks, str(device.index)])


def bus_address(device: torch.device) -> str | None:
    """Return the PCI address in the system's notation, "0000:03:00.0"; None if unknown."""
    if not is_accelerator(device):
        return None
    properties = _properties(device)
    bus = getattr(properties, "pci_bus_id", None)
    if not isinstance(bus, int):
        return None
    domain = getattr(properties, "pci_domain_id", 0)
    return f"{domain:04x}:{bus:02x}:{getattr(properties, 'pci_device_id', 0):02x}.0"


def enter(device: torch.device) -> None:
    """Make ``device`` current in this thread; do nothing if it is not an accelerator."""
    if not is_accelerator(device):
        return
    module = _module(device.type)
    if module.current_device() != device.index:
        module.set_device(device)


class _Pages(mmap.mmap):
    """Host memory registered with the device's driver, which allows asynchronous copies."""

    runtime: Any = None
    address: int = 0

    def __del__(self) -> None:
        if self.runtime is not None:
            with suppress(Exception):  # at the program's end the driver may be unloaded already
                self.runtime.cudaHostUnregister(self.address)


def pinned(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a zeroed vector of pinned host memory, for asynchronous copies with ``device``.

    It has exactly ``numel`` elements; torch's pinned allocator rounds up to a power of two.
    """
    nbytes = numel * dtype.itemsize
    runtime = getattr(_module(device.type), "cudart", None)
    if runtime is not None and nbytes >= LEAST_REGISTERED:
        enter(device)
        pages = _Pages(-1, nbytes)
        memory = torch.frombuffer(pages, dtype=dtype, count=numel)
        address = memory.data_ptr()
        if int(runtime().cudaHostRegister(address, nbytes, 0)) == 0:
            pages.runtime, pages.address = runtime(), address
            return memory
    return torch.zeros(numel, dtype=dtype, pin_memory=True)


def configure(device: torch.device, tf32: bool, benchmark: bool) -> None:
    """Enable faster arithmetic on an accelerator; settings that are False remain unchanged.

    Args:
        device: a CPU is ignored.
        tf32: use TF32 (10-bit mantissa) in products of fp32 matrices.
        benchmark: let cuDNN benchmark its convolution algorithms.
    """
    if not is_accelerator(device):
        return
    if tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    if benchmark:
        torch.backends.cudnn.benchmark = True


def random_state(device: torch.device) -> Tensor | None:
    """Return the state of the device's random number generator; None for a CPU."""
    if not is_accelerator(device):
        return None
    enter(device)
    state: Tensor = _module(device.type).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: Tensor | None) -> None:
    """Restore a :func:`random_state`; do nothing if it or the device is not an accelerator's."""
    if state is not None and is_accelerator(device):
        enter(device)
        _module(device.type).set_rng_state(state, device)


class Stopwatch:
    """Timestamps in a device's stream of work; on a CPU, the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._module = _module(device.type) if is_accelerator(device) else None
        self._device = device

    def stamp(self) -> Any:
        """Return a timestamp for :meth:`between`, without waiting for the device."""
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> None:
        """Wait until the device has reached all timestamps."""
        if self._module is not None:
            self._module.synchronize(self._device)

    def between(self, first: Any, last: Any) -> float:
        """Return the seconds between two timestamps that the device has reached."""
        if self._module is None:
            return float(last - first)
        return float(first.elapsed_time(last)) / 1e3


class CopyEvent:
    """The completion of an asynchronous copy; any thread may query it."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event = event
        self._device = device

    def query(self) -> bool:
        """Return whether the copy is complete."""
        enter(self._device)
        return bool(self._event.query())

    def hold(self) -> None:
        """Make work that is submitted to the device from now on wait for the copy."""
        enter(self._device)
        _module(self._device.type).current_stream(self._device).wait_event(self._event)


class CopyStream:
    """Copies between a device and pinned memory, with a separate stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        enter(device)
        self._device = device
        self._module = _module(device.type)
        self._stream = self._module.Stream(device)
        self._way_in = self._module.Stream(device)

    def copy(self, source: Tensor, target: Tensor) -> CopyEvent:
        """Start a copy that follows the work submitted so far, and return its event.

        Do not use ``target`` before the event is complete. ``source`` may be released: its memory
        is not reused before then.
        """
        enter(self._device)
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._stream.record_event()
        self._keep(source)
        return CopyEvent(event, self._device)

    def _keep(self, source: Tensor) -> None:
        source.record_stream(self._stream)

    def fetch(self, source: Tensor, after: CopyEvent | None = None) -> tuple[Tensor, CopyEvent]:
        """Start copying ``source`` from pinned memory to the device; return the copy and its event.

        Work that is submitted to the device from now on waits for the copy. Do not change
        ``source`` before the event is complete. ``after`` is the event of a copy to ``source``.
        """
        enter(self._device)
        computing = self._module.current_stream(self._device)
        with self._module.stream(self._way_in):
            if after is not None:
                after.hold()
            # Allocate on this stream: memory freed on the compute stream may still be in use there.
            target = torch.empty_like(source, device=self._device)
            target.copy_(source, non_blocking=True)
            event = CopyEvent(self._way_in.record_event(), self._device)
        event.hold()
        target.record_stream(computing)
        return target, event


def _module(name: str) -> Any:
    """Return torch's module for a type of device."""
    return getattr(torch, name)


def _properties(device: torch.device) -> Any:
    """Return torch's properties of a device; None if the backend has no such function."""
    describe = getattr(_module(device.type), "get_device_properties", None)
    return None if describe is None else describe(device)
