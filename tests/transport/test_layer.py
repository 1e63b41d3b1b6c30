"""A wrapper behaves as its transport, except for the methods that its class overrides."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aladdin_mpi.transport.base import (
    Clock,
    Collectives,
    FailureDetector,
    PointToPoint,
    Request,
    Transport,
)
from aladdin_mpi.transport.mpi.engine import MpiTransport
from aladdin_mpi.transport.virtual.engine import VirtualTransport
from aladdin_mpi.transport.wrapper import DATA, TransportWrapper
from tests.virtual_lab import lab, run

PROTOCOLS = (PointToPoint, Collectives, Clock, FailureDetector)
ENGINES = (MpiTransport, VirtualTransport)
PRIMITIVES = sorted(Transport.__abstractmethods__)
DERIVED = {"wait", "wait_set"}
"""Methods built on primitives that a wrapper may change, as a group does with tags."""


def public(kind: type) -> set[str]:
    return {
        name
        for name, value in vars(kind).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }


def test_transport_is_four_small_protocols() -> None:
    methods = [name for kind in (*PROTOCOLS, Transport) for name in sorted(public(kind))]
    assert len(methods) == len(set(methods)) <= 25
    assert {*methods} == {*PRIMITIVES} | DERIVED
    assert Transport.__bases__ == PROTOCOLS


@pytest.mark.parametrize("engine", ENGINES)
def test_engine_implements_every_primitive(engine: type[Transport]) -> None:
    assert not engine.__abstractmethods__
    for name in PRIMITIVES:
        declared, own = getattr(Transport, name), getattr(engine, name)
        assert isinstance(own, property) == isinstance(declared, property)
        if not isinstance(declared, property):
            assert parameters(own) == parameters(declared)


def parameters(method: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(method).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


class Recorder:
    """Records the calls of an engine's methods, and returns a distinct object from each."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = []
        self.answers = {name: object() for name in (*PRIMITIVES, *DATA)}

    def __getattr__(self, name: str) -> Any:
        answer = self.answers[name]
        if name in DATA:
            return answer
        if isinstance(getattr(Transport, name), property):
            self.calls.append((name, (), {}))
            return answer

        def call(*arguments: object, **options: object) -> object:
            self.calls.append((name, arguments, options))
            return answer

        return call


def use(transport: Any, name: str) -> object:
    """Read a property, or call a method with an object for each parameter."""
    declared = getattr(Transport, name)
    if isinstance(declared, property):
        return getattr(transport, name)
    given = list(inspect.signature(declared).parameters.values())[1:]
    options = {each.name: each.name for each in given if each.kind is each.KEYWORD_ONLY}
    arguments = [each.name for each in given if each.name not in options]
    return getattr(transport, name)(*arguments, **options)


@pytest.mark.parametrize("name", PRIMITIVES)
def test_wrapped_and_bare_transport_are_called_alike(name: str) -> None:
    bare, inner = Recorder(), Recorder()
    wrapped = TransportWrapper(inner)  # type: ignore[arg-type]
    assert use(bare, name) is bare.answers[name]
    assert use(wrapped, name) is inner.answers[name]
    assert bare.calls == inner.calls and len(inner.calls) == 1


@pytest.mark.parametrize("name", DATA)
def test_wrapped_transport_has_the_attributes_of_the_bare_one(name: str) -> None:
    inner = Recorder()
    assert getattr(TransportWrapper(inner), name) is inner.answers[name]  # type: ignore[arg-type]


def test_wrapper_subclass_changes_one_method_and_its_dependents() -> None:
    class Counting(TransportWrapper):
        waits = 0

        def wait_any(self, requests: Any, timeout: float | None = None) -> int:
            self.waits += 1
            return super().wait_any(requests, timeout)

    inner = Recorder()
    wrapped = Counting(inner)  # type: ignore[arg-type]
    first, second = Request("first"), Request("second")
    wrapped.wait(first, second)
    assert inner.calls == [("wait_any", ([each], None), {}) for each in (first, second)]
    requests = wrapped.wait_set()
    requests.put(7, first)
    inner.answers["wait_any"] = 0
    assert requests.wait() == 7 and wrapped.waits == 3


def test_wrapper_exposes_engine_specific_attributes() -> None:
    def main(transport: VirtualTransport) -> Any:
        wrapped = TransportWrapper(transport)
        return wrapped.carried(), wrapped.simulation is transport

    assert all(result[1] for result in run(2, main, lab(2)))


def traffic_of(wrap: Callable[[Transport], Transport]) -> Any:
    """Use each protocol over the virtual engine, and return what every rank observed."""

    def main(bare: VirtualTransport) -> Any:
        transport = wrap(bare)
        peer = 1 - transport.rank
        handled: list[Any] = []
        transport.on_message(5, 16, lambda *message: handled.append(message), as_numbers=True)
        received = torch.empty(4)
        receive = transport.irecv(received, peer, 3)
        transport.wait(transport.isend(torch.full((4,), 1.0 + bare.rank), peer, 3), receive)
        transport.wait(transport.isend((1.5, 2.0), peer, 5))
        total = torch.ones(3)
        transport.wait(transport.iallreduce(total), transport.ibarrier())
        transport.sleep(until=1.0)
        observed = transport.failed, transport.excluded, transport.is_revoked(without=1)
        return handled, received.tolist(), total.tolist(), transport.now(), observed

    return run(2, main, lab(2))


def test_wrapped_run_equals_bare_run() -> None:
    bare = traffic_of(lambda transport: transport)
    assert bare == traffic_of(TransportWrapper)
    assert bare[0][:3] == ([(1, (1.5, 2.0))], [2.0] * 4, [2.0] * 3)
