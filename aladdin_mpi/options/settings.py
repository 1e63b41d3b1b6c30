"""What the user gave, where it stands, and a checked model or a clear error from it."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError, create_model

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.fields import (
    FieldPath,
    Leaf,
    dotted,
    extra,
    kebab,
    leaves,
    shown,
    submodel,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Model = TypeVar("Model", bound=BaseModel)

LARGEST_WHOLE = 10**13
"""Of seeds, samples and counts: times a million it is still a number of 64 bits."""


@dataclass(frozen=True)
class Setting:
    """A value that the user gave, and how to name the place where it stands."""

    value: Any
    origin: str
    """``--batch-size``, or ``batch-size in run.toml``."""


Settings = dict[FieldPath, Setting]


def overlay(model: type[BaseModel], lower: Settings, upper: Settings) -> Settings:
    """Return ``upper`` over ``lower``.

    Of the fields that the model lists in ``ALTERNATIVES`` as excluding each
    other, one given in ``upper`` also takes the place of the others in ``lower``.
    """
    kept = dict(lower)
    chosen = {path[0] for path, setting in upper.items() if setting.value is not None}
    for group in getattr(model, "ALTERNATIVES", ()):
        if chosen.intersection(group):
            kept = {path: s for path, s in kept.items() if path not in [(n,) for n in group]}
    return kept | upper


def build(model: type[Model], settings: Settings) -> Model:
    """Return the model with these settings over its defaults.

    Raises:
        UserError: with one line for each bad value.
    """
    values: dict[str, Any] = {}
    for path, setting in settings.items():
        place = values
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = setting.value
    try:
        built = model.model_validate(values)
    except ValidationError as error:
        raise UserError(_explain(error, model, settings)) from None
    _check_whole_numbers(model, settings, built)
    return built


def _check_whole_numbers(model: type[BaseModel], settings: Settings, built: BaseModel) -> None:
    """Refuse whole numbers that torch and messages have no room for."""
    for path, setting in settings.items():
        value: Any = built
        for name in path:
            value = getattr(value, name, None)
        if isinstance(value, int) and value > LARGEST_WHOLE and path in leaves(model):
            raise UserError(
                f"{setting.origin}: expected a whole number of at most {LARGEST_WHOLE:g}, got one "
                f"of {len(str(value))} digits; give a smaller one"
            )


# -- TOML -----------------------------------------------------------------------
def read_toml(model: type[BaseModel], file: Path, named_by: str) -> Settings:
    """Return the settings in a TOML file.

    Keys are spelt ``batch-size`` or ``batch_size``; the fields of an inner model
    stand in a table. ``named_by`` is the option that names the file.

    Raises:
        UserError: the file cannot be read, is not TOML, or has an unknown key.
    """
    settings: Settings = {}
    _collect(model, _table(file, named_by), (), str(file), settings)
    return settings


def read_part(model: type[BaseModel], name: str, file: Path, named_by: str) -> Settings:
    """Return the settings in a TOML file of the inner model ``name``.

    Among them those fields of ``model`` that such a file may hold too. Raises as
    :func:`read_toml` does, and also

    Raises:
        UserError: a figure is so large that it must be in another unit.
    """
    return _as_part(model, name, _table(file, named_by), str(file))


def parse_part(model: type[BaseModel], name: str, text: str, file: str) -> Settings:
    """As :func:`read_part`, of a file's text. ``file`` names it in errors."""
    return _as_part(model, name, tomllib.loads(text), file)


def _as_part(model: type[BaseModel], name: str, table: dict[str, Any], file: str) -> Settings:
    beside = extra(model.model_fields[name]).get("beside", [])
    found: Settings = {}
    _collect(_in_file(model, name), table, (), file, found)
    inner = submodel(model.model_fields[name])
    assert inner is not None
    for path, setting in found.items():
        if path[0] not in beside:
            _check_size(leaves(inner)[path], setting)
    return {path if path[0] in beside else (name, *path): s for path, s in found.items()}


@cache
def _in_file(model: type[BaseModel], name: str) -> type[BaseModel]:
    """What a file of the inner model ``name`` may hold."""
    own = model.model_fields
    beside: Any = {each: (own[each].annotation, own[each]) for each in extra(own[name])["beside"]}
    inner: Any = submodel(own[name])
    return create_model(f"{name}_file", __base__=inner, **beside)


def _check_size(leaf: Leaf, setting: Setting) -> None:
    most = extra(leaf.info).get("most")
    value = setting.value
    figures = value.values() if isinstance(value, dict) else [value]
    for figure in figures:
        if most is not None and isinstance(figure, int | float) and figure > most:
            unit = str(extra(leaf.info)["unit"]).rpartition("=")[2].capitalize()
            raise UserError(
                f"{setting.origin}: expected at most {most:g}, as it is in {unit}, got "
                f"{figure:g}; convert it"
            )


def _table(file: Path, named_by: str) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{named_by}: expected a TOML file, got {str(file)!r} ({error.strerror}); "
            "check the path"
        ) from None
    except ValueError as error:  # also of numbers of thousands of digits
        raise UserError(f"{named_by}: {file} is not valid TOML: {error}") from None


def _collect(
    model: type[BaseModel], table: dict[str, Any], path: FieldPath, file: str, settings: Settings
) -> None:
    for key, value in table.items():
        name = key.replace("-", "_")
        origin = f"{dotted((*path, name))} in {file}"
        if name not in model.model_fields:
            known = [kebab(field) for field in model.model_fields]
            raise UserError(
                f"{origin}: no such key; {did_you_mean(kebab(name), known)}known here: "
                f"{', '.join(known)}"
            )
        if name != key and name in table:
            raise UserError(f"{origin}: given twice, as {key} and as {name}; keep one of them")
        inner = submodel(model.model_fields[name])
        if inner is None:
            _check_switch(leaves(model)[(name,)], value, origin)
            settings[(*path, name)] = Setting(value, origin)
        elif isinstance(value, dict):
            _collect(inner, value, (*path, name), file, settings)
        else:
            raise UserError(
                f"{origin}: expected a table, got {value!r}; write [{dotted((*path, name))}]"
            )


def _check_switch(leaf: Leaf, value: Any, origin: str) -> None:
    """Refuse ``epochs = true`` and ``download = 1``, which pydantic would convert."""
    if isinstance(value, bool) != leaf.is_bool:
        came = str(value).lower() if isinstance(value, bool) else repr(value)
        raise UserError(
            f"{origin}: expected {leaf.expected}, got {came}; "
            f"leave it out for the default: {leaf.default_text}"
        )


def to_toml(options: BaseModel) -> str:
    """Return a complete TOML file that reads back to an equal model.

    Fields that are ``None`` are left out, since TOML has no word for it.
    """
    return tomli_w.dumps(_kebab_keys(options, options.model_dump(mode="json", exclude_none=True)))


def _kebab_keys(model: BaseModel, values: dict[str, Any]) -> dict[str, Any]:
    table = {}
    for name, value in values.items():
        inner = getattr(model, name)
        table[kebab(name)] = _kebab_keys(inner, value) if isinstance(inner, BaseModel) else value
    return table


# -- errors -----------------------------------------------------------------------
def _explain(error: ValidationError, model: type[BaseModel], settings: Settings) -> str:
    """Return one line for each field at fault, and for each rule between fields."""
    lines: dict[Any, str] = {}
    for item in error.errors(include_url=False):
        leaf = _leaf_at(model, item["loc"])
        reason = item.get("ctx", {}).get("error")
        if item["type"] == "extra_forbidden":
            text = _unknown(model, item["loc"])
        elif leaf is None:
            text = _named_by_origin(str(reason or item["msg"]), model, settings)
        else:
            origin = settings[leaf.path].origin if leaf.path in settings else leaf.flag
            text = f"{origin}: {reason or _complaint(leaf, item)}"
        lines.setdefault(leaf.path if leaf else text, text)
    return "\n".join(lines.values())


def as_argument(path: Sequence[str]) -> str:
    """A setting as an argument of a function: ``lr``, or ``aladdin={'pi': ...}``."""
    return path[0] if len(path) == 1 else f"{path[0]}={{'{'.'.join(path[1:])}': ...}}"


def _unknown(model: type[BaseModel], location: Sequence[int | str]) -> str:
    """What is wrong with a setting that does not exist, as arguments of a function have it."""
    names = [str(part) for part in location]
    known = {name: name for name in model.model_fields}
    for path in leaves(model):
        if len(path) > 1:
            known.setdefault("_".join(path), as_argument(path))
    near = difflib.get_close_matches("_".join(names), known, n=1)
    hint = f"did you mean {known[near[0]]}?" if near else "docs/running.md has them all"
    return f"{'.'.join(names)}: no such option; {hint}"


def _leaf_at(model: type[BaseModel], location: Sequence[int | str]) -> Leaf | None:
    known = leaves(model)
    paths = (tuple(location[:end]) for end in range(1, len(location) + 1))
    return next((known[path] for path in paths if path in known), None)  # type: ignore[index]


def _complaint(leaf: Leaf, item: Any) -> str:
    came, keys = item["input"], item["loc"][len(leaf.path) :]
    where = f" for {keys[0]}" if leaf.is_mapping and keys and keys[-1] != "[key]" else ""
    got = repr(came) if isinstance(came, str) else shown(came)
    default = leaf.default_text
    hint = did_you_mean(str(came), leaf.choices) or f"leave it out for the default: {default}"
    return f"expected {leaf.expected}, got {got}{where}; {hint}".rstrip("; ")


def _named_by_origin(text: str, model: type[BaseModel], settings: Settings) -> str:
    """Replace options by the keys of the files that set them, but not in the remedy."""
    origins = {
        leaf.flag: settings[leaf.path].origin
        for leaf in leaves(model).values()
        if leaf.path in settings
    }
    fault, semicolon, remedy = text.partition(";")
    fault = re.sub(r"--[a-z][a-z-]*", lambda found: origins.get(found[0], found[0]), fault)
    return fault + semicolon + remedy


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"did you mean --batch-size? "`` when something is close to ``word``."""
    known = list(known)
    begin = [name for name in known if word and name.startswith(word)]
    close = begin[:3] or difflib.get_close_matches(word, known, n=1)
    return f"did you mean {' or '.join(close)}? " if close else ""
