"""Base class of transports that forward to another and change a part of it."""

from __future__ import annotations

from abc import update_abstractmethods
from collections.abc import Callable
from functools import cache, wraps
from inspect import get_annotations
from operator import attrgetter
from typing import Any

from aladdin_mpi.transport.base import Transport

DATA = sorted({name for kind in Transport.__mro__ for name in get_annotations(kind)})
"""The attributes of a transport, which do not change."""


class TransportWrapper(Transport):
    """A transport that forwards everything to ``inner``; subclasses override methods.

    Primitives that a class does not override become bound methods of ``inner`` on its instances,
    which saves a call for each layer. Methods built on primitives, such as ``wait``, come from
    :class:`Transport` and use the subclass's primitives.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        for name in [*DATA, *_unchanged(type(self))]:
            setattr(self, name, getattr(inner, name))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only one engine has."""
        return getattr(self.inner, name)


def _forward(name: str) -> Callable[..., Any] | property:
    """Return a primitive that forwards to the inner transport's."""
    declared = getattr(Transport, name)
    if isinstance(declared, property):
        return property(attrgetter(f"inner.{name}"), doc=declared.__doc__)

    @wraps(declared, updated=())
    def forward(self: TransportWrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return forward


@cache
def _unchanged(kind: type[TransportWrapper]) -> list[str]:
    """Return the methods that a class does not override, so that calls can bypass it."""
    return [
        name
        for name in sorted(Transport.__abstractmethods__)
        if getattr(kind, name) is vars(TransportWrapper)[name]
        and not isinstance(vars(TransportWrapper)[name], property)
    ]


for _name in Transport.__abstractmethods__:
    setattr(TransportWrapper, _name, _forward(_name))
update_abstractmethods(TransportWrapper)
