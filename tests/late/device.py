"""Register the delayed-copy test device with torch on import: ``torch.device("late", 2)``."""

from __future__ import annotations

import importlib.util
import types
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from tests.late.build import NAME, library

KIND = "late"


states = [torch.zeros(1, dtype=torch.uint8) for _ in range(16)]
"""Placeholder for the devices' random states, which nothing uses."""


def _load() -> Any:
    spec = importlib.util.spec_from_file_location(NAME, library())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _module() -> types.ModuleType:
    """Return the module ``torch.late``, the counterpart of ``torch.cuda``."""
    module: Any = types.ModuleType(f"torch.{KIND}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: runtime.DEVICES
    module.current_device = runtime.current_device
    module.set_device = _set_device
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device: states[device.index].clone()
    module.set_rng_state = lambda state, device: states[device.index].copy_(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.cudart = _Runtime
    module.Stream, module.Event = torch.Stream, torch.Event
    module.current_stream = lambda device=None: torch.accelerator.current_stream(device)
    module.stream = _on
    return module


class _Runtime:
    """The functions of CUDA's runtime that the package uses."""

    @staticmethod
    def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
        runtime.register_host(address, nbytes)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        runtime.unregister_host(address)
        return 0


def _set_device(device: torch.device | int) -> None:
    runtime.set_device(device if isinstance(device, int) else device.index)


def _on(stream: torch.Stream) -> AbstractContextManager[Any]:
    return stream


rename_privateuse1_backend(KIND)
runtime: Any = _load()
torch._register_device_module(KIND, _module())
generate_methods_for_privateuse1_backend()
