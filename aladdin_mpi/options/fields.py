"""What a pydantic model says of its fields, in the words of the command line and of TOML."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Field
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

FieldPath = tuple[str, ...]
"""Field names from the outer model inwards, such as ``("aladdin", "pi")``."""


def option(
    default: Any,
    description: str,
    *,
    unit: str | None = None,
    group: str | None = None,
    default_text: str | None = None,
    **constraints: Any,
) -> Any:
    """Declare a field of a model together with what ``--help`` says of it.

    ``unit`` stands for the value in the help (``--timeout SECONDS``), ``group``
    is the heading it is listed under, and ``default_text`` replaces the default
    where the plain value would not tell the user what happens.
    """
    texts = {"unit": unit, "group": group, "default_text": default_text}
    extra: JsonDict = {name: text for name, text in texts.items() if text is not None}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def nested(
    model: type[BaseModel],
    *,
    prefix: bool = True,
    file: bool = False,
    beside: Sequence[str] = (),
) -> Any:
    """Declare a field that is a model with defaults of its own.

    Its options are called ``--<field>-<name>``, or ``--<name>`` without
    ``prefix``; with ``file`` the option ``--<field> FILE`` reads them from TOML, and
    ``beside`` names fields of the outer model that such a file may hold too.
    """
    extra: JsonDict = {"prefix": prefix, "file": file, "beside": list(beside)}
    return Field(default_factory=model, json_schema_extra=extra)


@dataclass(frozen=True)
class Leaf:
    """A field that takes a value, as against one that is a model."""

    path: FieldPath
    info: FieldInfo
    flag: str
    """The option on the command line, such as ``--aladdin-pi``."""

    @property
    def key(self) -> str:
        """The key in a TOML file, such as ``aladdin.pi``."""
        return dotted(self.path)

    @property
    def plain_type(self) -> Any:
        """The type without ``None``: ``int`` for ``int | None``."""
        members = [m for m in _members(self.info.annotation) if m is not type(None)]
        return members[0] if len(members) == 1 else Union[tuple(members)]  # noqa: UP007

    @property
    def optional(self) -> bool:
        """Whether ``None`` is a value."""
        return type(None) in _members(self.info.annotation)

    @property
    def is_bool(self) -> bool:
        """Whether it is a switch."""
        return self.plain_type is bool

    @property
    def is_mapping(self) -> bool:
        """Whether it takes pairs, ``KEY=VALUE``."""
        return get_origin(self.plain_type) is dict

    @property
    def is_list(self) -> bool:
        """Whether it takes several values."""
        return get_origin(self.plain_type) in (list, tuple)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words it accepts, of all the ``Literal`` members of its type."""
        return tuple(str(c) for m in _members(self.plain_type) for c in _literal(m))

    @property
    def expected(self) -> str:
        """What a value has to be, in words."""
        text = expected(self.plain_type, self.info.metadata)
        return text.replace("KEY=VALUE", extra(self.info).get("unit", "KEY=VALUE"))

    @property
    def default_text(self) -> str:
        """The default, as ``--help`` shows it."""
        default = self.info.get_default(call_default_factory=True, validated_data={})
        return extra(self.info).get("default_text") or shown(default)


def extra(info: FieldInfo) -> dict[str, Any]:
    """Return what :func:`option` or :func:`nested` attached to a field."""
    found = info.json_schema_extra
    return found if isinstance(found, dict) else {}


def kebab(name: str) -> str:
    """Return ``batch-size`` for ``batch_size``."""
    return name.replace("_", "-")


def dotted(path: Sequence[str]) -> str:
    """Return ``aladdin.alpha`` for the path of a field, as TOML writes it."""
    return ".".join(kebab(name) for name in path)


def submodel(info: FieldInfo) -> type[BaseModel] | None:
    """Return the model that a field holds, if it holds one."""
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


@cache
def leaves(model: type[BaseModel]) -> dict[FieldPath, Leaf]:
    """Return every field of ``model`` and of the models in it that takes a value."""
    return {leaf.path: leaf for leaf in _walk(model, (), ())}


def _walk(model: type[BaseModel], path: FieldPath, prefix: FieldPath) -> Iterator[Leaf]:
    for name, info in model.model_fields.items():
        inner = submodel(info)
        if inner is not None:
            words = (*prefix, name) if extra(info).get("prefix", True) else prefix
            yield from _walk(inner, (*path, name), words)
        else:
            flag = "--" + "-".join(kebab(word) for word in (*prefix, name))
            yield Leaf((*path, name), info, flag)


def shown(value: Any) -> str:
    """Return ``value`` as a user would write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value in ([], {}, ()):
        return "none"
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, dict):
        return ",".join(f"{key}={shown(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ",".join(shown(item) for item in value)
    return str(value)


def expected(kind: Any, metadata: Sequence[Any] = ()) -> str:
    """Return in words what a value of the type ``kind`` within its bounds is."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return expected(args[0], [n for m in args[1:] for n in getattr(m, "metadata", [m])])
    if origin is Literal:
        return " or ".join(str(word) for word in args)
    if origin in (Union, types.UnionType):
        return ", or ".join(expected(member, metadata) for member in args)
    if origin is tuple and Ellipsis not in args:
        return ", then ".join(expected(member) for member in args)
    if origin in (list, tuple):
        return f"a list, each item {expected(args[0])}"
    if origin is dict:
        return f"KEY=VALUE, the key {expected(args[0])}, the value {expected(args[1])}"
    words = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path"}
    return words.get(kind, "a text") + _bounds(metadata)


def _bounds(metadata: Sequence[Any]) -> str:
    """Return ``" of 0 or more and below 1"`` for the bounds among pydantic's metadata."""
    words = {"ge": "{} or more", "gt": "more than {}", "le": "at most {}", "lt": "below {}"}
    found = [
        text.format(f"{getattr(item, name):g}")
        for name, text in words.items()
        for item in metadata
        if getattr(item, name, None) is not None
    ]
    return " of " + " and ".join(found) if found else ""


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _literal(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()
