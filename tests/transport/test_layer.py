"""A transport on top of another one changes nothing but what its class says."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.mpi.engine import MpiTransport
from aladdin_mpi.transport.virtual.engine import VirtualTransport
from aladdin_mpi.transport.wrapper import TransportWrapper

ENGINES = (MpiTransport, VirtualTransport)
BY_OTHERS = {"isend_numbers", "on_numbers", "wait", "wait_set"}
"""Engines have faster forms of these. A layer makes them of isend, on_message and wait_any, which
it may change, as a group does with tags."""
METHODS = sorted(
    name
    for name in dir(Transport)
    if not name.startswith("_") and any(name in vars(engine) for engine in ENGINES)
)


class Recorder:
    """Stands in for an engine and records what is asked of it."""

    rank, size, hosts, engine, traffic = 0, 1, (0,), "virtual", None
    models_time = needs_memory = shares_process = survives = progresses = meets = False

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        if isinstance(getattr(Transport, name, None), property):
            self.asked.append((name,))
            return None
        return lambda *arguments: self.asked.append((name, *arguments))


@pytest.mark.parametrize("name", [name for name in METHODS if name not in BY_OTHERS])
def test_layer_forwards_methods_of_engines(name: str) -> None:
    recorder = Recorder()
    layer = TransportWrapper(recorder)  # type: ignore[arg-type]
    attribute = getattr(layer, name)
    arguments: tuple[object, ...] = ()
    if callable(attribute):
        arguments = tuple(object() for _ in inspect.signature(attribute).parameters)
        attribute(*arguments)
    assert recorder.asked == [(name, *arguments)]
