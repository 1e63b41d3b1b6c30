"""Modules that are loaded when they are first used, not when they are imported."""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_UNTOUCHED = {"__class__", "__dict__", "__file__", "__loader__", "__name__", "__path__", "__spec__"}
"""What may be asked for without loading: the import system does with every module it finds."""


def defer(name: str) -> None:
    """Let ``import name`` cost nothing until an attribute of the module is used.

    For commands, which read their options before what takes seconds: files that declare options
    also import torch. ``from name import ...`` and ``import name.inner`` still load it. Nothing
    is done if it is loaded, or not installed.

    As :class:`importlib.util.LazyLoader`, whose modules the import statement itself loads before
    Python 3.12.
    """
    spec = None if name in sys.modules else find_spec(name)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    module.__class__ = _Deferred
    sys.modules[name] = module


class _Deferred(ModuleType):
    """A module that has not been loaded; once it is, it is an ordinary one."""

    def __getattribute__(self, name: str) -> Any:
        if name in _UNTOUCHED:
            return super().__getattribute__(name)
        _load(self)
        return getattr(self, name)


def _load(module: ModuleType) -> None:
    spec = module.__spec__
    assert spec is not None and spec.loader is not None
    module.__class__ = ModuleType
    spec.loader.exec_module(module)
