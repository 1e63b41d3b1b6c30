"""The fields of option models: how they are declared, named and described."""

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
    unit: str | None = None,
    *,
    details: str | None = None,
    common: bool = False,
    group: str | None = None,
    default_text: str | None = None,
    most: float | None = None,
    formerly: str | None = None,
    **constraints: Any,
) -> Any:
    """Declare a field of a model together with its help.

    Args:
        default: the field's default.
        description: a noun phrase, short enough for one line of ``--help``.
        unit: the placeholder of the value in the help (``--timeout SECONDS``).
        details: further help, for ``--help-all``.
        common: part of the page of ``--help`` itself, with the options that most runs need.
        group: the heading that the option is listed under.
        default_text: replaces the default in the help, if the plain value would mislead.
        most: the largest value in a file of an inner model (:func:`nested`).
        formerly: the field's name in the previous release, which is still accepted.
        **constraints: of pydantic's fields.
    """
    about = {
        "unit": unit,
        "details": details,
        "common": common or None,
        "group": group,
        "default_text": default_text,
        "most": most,
        "formerly": formerly,
    }
    extra: JsonDict = {name: value for name, value in about.items() if value is not None}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def nested(
    model: type[BaseModel], *, prefix: bool = True, file: bool = False, outer: Sequence[str] = ()
) -> Any:
    """Declare a field that holds another model.

    Its options are called ``--<field>-<name>``, or ``--<name>`` without
    ``prefix``; with ``file`` the option ``--<field> FILE`` reads them from TOML, and
    ``outer`` names fields of the outer model that such a file may hold too.
    """
    extra: JsonDict = {"prefix": prefix, "file": file, "outer": list(outer)}
    return Field(default_factory=model, json_schema_extra=extra)


@dataclass(frozen=True)
class Leaf:
    """A field that takes a value, as against one that is a model."""

    path: FieldPath
    info: FieldInfo
    flag: str
    """The option on the command line, such as ``--aladdin-pi``."""

    @property
    def former_flag(self) -> str | None:
        """The option's spelling in the previous release, if it has changed."""
        former = extra(self.info).get("formerly")
        return former and self.flag.removesuffix(kebab(self.path[-1])) + kebab(former)

    @property
    def key(self) -> str:
        """The key in a TOML file, such as ``aladdin.pi``."""
        return dotted(self.path)

    @property
    def plain_type(self) -> Any:
        """The type without ``None`` and metadata: ``int`` for ``int | None``."""
        kinds = [kind for kind in _members(self.info.annotation) if kind is not type(None)]
        return _bare(kinds[0]) if len(kinds) == 1 else Union[tuple(kinds)]  # noqa: UP007

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
        literals = [kind for kind in _members(self.plain_type) if get_origin(kind) is Literal]
        return tuple(str(word) for kind in literals for word in get_args(kind))

    @property
    def metavar(self) -> str:
        """The placeholder of the value in ``--help``."""
        unit = extra(self.info).get("unit")
        if self.choices:
            return "{" + ",".join(([unit] if unit else []) + list(self.choices)) + "}"
        kinds = {int: "N", float: "X", Path: "PATH"}
        return unit or ("KEY=VALUE" if self.is_mapping else kinds.get(self.plain_type, "NAME"))

    @property
    def expected(self) -> str:
        """A description of valid values."""
        members = [kind for kind in _members(self.info.annotation) if kind is not type(None)]
        text = ", or ".join(_expected(kind, self.info.metadata) for kind in members)
        if self.has_parts:
            return text.replace("a list, each item ", f"a list of {self.metavar}, each ")
        return text.replace("KEY=VALUE", self.metavar) if self.is_mapping else text

    @property
    def has_parts(self) -> bool:
        """Whether each item of a list has several parts, with colons between them."""
        return self.is_list and ":" in self.metavar

    @property
    def is_common(self) -> bool:
        """Whether the page of ``--help`` itself has it."""
        return bool(extra(self.info).get("common"))

    @property
    def short_help(self) -> str:
        """The description, with the default if there is one."""
        default = self.default_text
        text = str(self.info.description)
        return text if default in ("none", "off") else f"{text} (default: {default})"

    @property
    def meaning(self) -> str:
        """The description with its details."""
        details = extra(self.info).get("details")
        return f"{self.info.description}; {details}" if details else str(self.info.description)

    @property
    def help(self) -> str:
        """The same with the default."""
        return f"{self.meaning} (default: {self.default_text})"

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
            yield Leaf((*path, name), info, "--" + "-".join(map(kebab, (*prefix, name))))


@cache
def _current_names(model: type[BaseModel]) -> dict[str, str]:
    fields = model.model_fields.items()
    return {former: now for now, info in fields if (former := extra(info).get("formerly"))}


def current_name(model: type[BaseModel], name: str) -> str:
    """Return the name of the field of ``model`` that was called ``name`` in a former release."""
    return _current_names(model).get(name, name)


def with_current_names(model: type[BaseModel], table: dict[str, Any]) -> dict[str, Any]:
    """Return stored options with the former names of fields replaced by the current ones."""
    renamed = {}
    for key, value in table.items():
        name = current_name(model, key)
        inner = submodel(model.model_fields[name]) if name in model.model_fields else None
        is_table = inner is not None and isinstance(value, dict)
        renamed[name] = with_current_names(inner, value) if inner and is_table else value
    return renamed


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
        return ",".join(map(shown, value))
    return str(value)


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _constraints(annotated: Any) -> list[Any]:
    """The metadata of an ``Annotated`` type, those in a ``Field`` among them."""
    return [each for item in get_args(annotated)[1:] for each in getattr(item, "metadata", [item])]


def _expected(kind: Any, metadata: Sequence[Any] = ()) -> str:
    """Return in words what a value of the type ``kind`` within its bounds is."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _expected(args[0], _constraints(kind))
    if origin is Literal:
        return " or ".join(map(str, args))
    if origin is tuple and Ellipsis not in args:
        return ", then ".join(map(_expected, args))
    if origin in (list, tuple):
        return f"a list, each item {_expected(args[0])}"
    if origin is dict:
        return f"KEY=VALUE, the key {_expected(args[0])}, the value {_expected(args[1])}"
    words = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path"}
    bounds = {"ge": "{} or more", "gt": "more than {}", "le": "at most {}", "lt": "below {}"}
    found = [
        "1 or more" if (kind, name, value) == (int, "gt", 0) else text.format(f"{value:g}")
        for name, text in bounds.items()
        for item in metadata
        if (value := getattr(item, name, None)) is not None
    ]
    return words.get(kind, "a text") + (" of " + " and ".join(found) if found else "")
