"""The one place that knows accelerators: their devices, streams and events.

Everything goes through torch's module of the device's kind, ``torch.cuda`` for CUDA and ROCm,
``torch.xpu``, or that of a backend of one's own, so that all of them take the same way.

A thread that has not chosen a device has the first one, and would make a context there that costs
hundreds of MB: so whatever is done with a device here chooses it first (:func:`enter`).
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
"""Kinds of devices that are none."""
BUS = Path("/sys/bus/pci/devices")
NVIDIA = "0x10de"
GPU_MAKERS = (NVIDIA, "0x1002", "0x8086")
LEAST_REGISTERED = 1 << 20
"""Bytes; what rounding adds to less is little."""
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_MASKS = (*_VISIBLE, "ZE_AFFINITY_MASK")


def kind() -> str | None:
    """What this machine's accelerators are called, such as "cuda"; None: it has none."""
    if hasattr(torch, "accelerator"):
        found = torch.accelerator.current_accelerator()
        name = None if found is None else found.type
    else:  # torch below 2.6
        name = "cuda"
    if name is None:
        return None
    module = _module(name)
    return name if hasattr(module, "Stream") and module.device_count() else None


def count() -> int:
    """How many there are here."""
    name = kind()
    return 0 if name is None else int(_module(name).device_count())


def on_the_bus(bus: Path = BUS) -> int:
    """How many GPUs the system knows, whether torch can use them or not.

    Of NVIDIA all; of AMD and Intel those that are for computing, since their graphics are in many
    processors.
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
    """Whether the user, or the batch system, shows this process none of them."""
    return any(os.environ.get(name, "0").strip() in ("", "-1") for name in _VISIBLE)


def is_accelerator(device: torch.device) -> bool:
    """Whether ``device`` has memory and streams of its own."""
    return device.type not in HOST


def identity(device: torch.device) -> str:
    """What tells a device from the others of its host: two tasks may both call theirs cuda:0."""
    uuid = getattr(_properties(device), "uuid", None)
    if uuid is not None:
        return str(uuid)
    seen = [os.environ[name] for name in _MASKS if name in os.environ]  # torch below 2.4
    return "/".join([*seen, str(device.index)])


def bus_address(device: torch.device) -> str | None:
    """Where an accelerator is on the PCI bus, as the system writes it; None: torch does not say."""
    if not is_accelerator(device):
        return None
    found = _properties(device)
    bus = getattr(found, "pci_bus_id", None)
    if not isinstance(bus, int):
        return None
    domain = getattr(found, "pci_domain_id", 0)
    return f"{domain:04x}:{bus:02x}:{getattr(found, 'pci_device_id', 0):02x}.0"


def enter(device: torch.device) -> None:
    """Make ``device`` the one of this thread; nothing if it is no accelerator."""
    if not is_accelerator(device):
        return
    module = _module(device.type)
    if module.current_device() != device.index:
        module.set_device(device)


class _Pages(mmap.mmap):
    """Memory of the host that the device's driver knows, so that it copies there by itself."""

    runtime: Any = None
    address: int = 0

    def __del__(self) -> None:
        if self.runtime is not None:
            with suppress(Exception):  # at the program's end the driver may have gone before
                self.runtime.cudaHostUnregister(self.address)


def pinned(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed vector of host memory, from and to which copies of ``device`` go on by themselves.

    As long as was asked for: torch's own would be rounded up to a power of two.
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
    """How exactly an accelerator computes; what is not asked for stays as it is.

    Args:
        device: nothing is done for a CPU.
        tf32: products of fp32 matrices may have ten bits of mantissa.
        benchmark: cuDNN tries out its convolutions.
    """
    if not is_accelerator(device):
        return
    if tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    if benchmark:
        torch.backends.cudnn.benchmark = True


def random_state(device: torch.device) -> Tensor | None:
    """Where the device's random numbers have come to; None if it is no accelerator."""
    if not is_accelerator(device):
        return None
    enter(device)
    state: Tensor = _module(device.type).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: Tensor | None) -> None:
    """Let them go on from a :func:`random_state`; one of another kind of device is left."""
    if state is not None and is_accelerator(device):
        enter(device)
        _module(device.type).set_rng_state(state, device)


class Stopwatch:
    """Moments in what a device computes, in its own order; of a CPU the host's."""

    def __init__(self, device: torch.device) -> None:
        self._module = _module(device.type) if is_accelerator(device) else None
        self._device = device

    def stamp(self) -> Any:
        """This moment, as one that :meth:`between` takes; the host does not wait for the device."""
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> None:
        """Wait until all that was stamped is over."""
        if self._module is not None:
            self._module.synchronize(self._device)

    def between(self, first: Any, last: Any) -> float:
        """Seconds from one stamp to another; both are over."""
        if self._module is None:
            return float(last - first)
        return float(first.elapsed_time(last)) / 1e3


class CopyEvent:
    """A copy that may be under way; any thread may ask about it."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event = event
        self._device = device

    def query(self) -> bool:
        """Whether the copy is over."""
        enter(self._device)
        return bool(self._event.query())

    def hold(self) -> None:
        """Let what is computed on the device from now on come after the copy."""
        enter(self._device)
        _module(self._device.type).current_stream(self._device).wait_event(self._event)


class CopyStream:
    """Copies between a device and pinned memory, each way on a stream beside the computing's."""

    def __init__(self, device: torch.device) -> None:
        enter(device)
        self._device = device
        self._module = _module(device.type)
        self._stream = self._module.Stream(device)
        self._way_in = self._module.Stream(device)

    def copy(self, source: Tensor, target: Tensor) -> CopyEvent:
        """Copy when what has been computed until now is there; does not wait for it.

        ``target`` is to be left alone until the event has happened. ``source`` may be let go: its
        memory is not given to others before.
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

    def fetch(self, source: Tensor) -> tuple[Tensor, CopyEvent]:
        """``source``, in pinned memory, as it comes to the device; does not wait for it.

        What is computed on the device from now on comes after the copy. ``source`` is to be left
        alone until the event has happened.
        """
        enter(self._device)
        computing = self._module.current_stream(self._device)
        with self._module.stream(self._way_in):
            # Memory of this stream: the computing may still use any of its own.
            target = torch.empty_like(source, device=self._device)
            target.copy_(source, non_blocking=True)
            event = CopyEvent(self._way_in.record_event(), self._device)
        event.hold()
        target.record_stream(computing)
        return target, event


def _module(name: str) -> Any:
    """Torch's module of a kind of devices."""
    return getattr(torch, name)


def _properties(device: torch.device) -> Any:
    """What torch knows of a device; None where it does not say."""
    describe = getattr(_module(device.type), "get_device_properties", None)
    return None if describe is None else describe(device)
