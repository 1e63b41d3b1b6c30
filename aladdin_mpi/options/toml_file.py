"""Settings in TOML files."""

from __future__ import annotations

import math
import sys
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, create_model

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.fields import (
    FieldPath,
    Leaf,
    current_name,
    dotted,
    extra,
    kebab,
    leaves,
    submodel,
)
from aladdin_mpi.options.settings import Setting, Settings, did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(model: type[BaseModel], file: Path, named_by: str) -> Settings:
    """Return the settings in a TOML file.

    Keys are spelt ``batch-size`` or ``batch_size``; the fields of an inner model
    stand in a table. ``named_by`` is the option that names the file.

    Raises:
        UserError: the file cannot be read, is not TOML, or has an unknown key.
    """
    return _collected(model, _table(file, named_by), (), str(file))


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
    settings: Settings = {}
    in_file = _in_file(model, name)
    for path, setting in _collected(in_file, table, (), file).items():
        is_outer = path[0] in extra(model.model_fields[name])["outer"]
        if not is_outer:
            _check_size(leaves(in_file)[path], setting)
        settings[path if is_outer else (name, *path)] = setting
    return settings


@cache
def _in_file(model: type[BaseModel], name: str) -> type[BaseModel]:
    """Return the model of a file of the inner model ``name``."""
    own = model.model_fields
    outer: Any = {each: (own[each].annotation, own[each]) for each in extra(own[name])["outer"]}
    inner: Any = submodel(own[name])
    return create_model(f"{name}_file", __base__=inner, **outer)


def _check_size(leaf: Leaf, setting: Setting) -> None:
    most = extra(leaf.info).get("most", math.inf)
    for figure in setting.value.values() if isinstance(setting.value, dict) else [setting.value]:
        if isinstance(figure, int | float) and figure > most:
            unit = leaf.metavar.rpartition("=")[2].capitalize()
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


def _collected(
    model: type[BaseModel], table: dict[str, Any], path: FieldPath, file: str
) -> Settings:
    settings: Settings = {}
    spelt: dict[str, str] = {}
    for key, value in table.items():
        name = current_name(model, key.replace("-", "_"))
        origin = f"{dotted((*path, name))} in {file}"
        if name not in model.model_fields:
            known = [kebab(field) for field in model.model_fields]
            raise UserError(
                f"{origin}: no such key; {did_you_mean(kebab(name), known)}known here: "
                f"{', '.join(known)}"
            )
        if name in spelt:
            raise UserError(
                f"{origin}: given twice, as {spelt[name]} and as {key}; keep one of them"
            )
        spelt[name] = key
        inner = submodel(model.model_fields[name])
        if inner is None:
            _check_switch(leaves(model)[(name,)], value, origin)
            settings[(*path, name)] = Setting(value, origin)
        elif isinstance(value, dict):
            settings |= _collected(inner, value, (*path, name), file)
        else:
            raise UserError(
                f"{origin}: expected a table, got {value!r}; write [{dotted((*path, name))}]"
            )
    return settings


def _check_switch(leaf: Leaf, value: Any, origin: str) -> None:
    """Refuse ``epochs = true`` and ``download = 1``, which pydantic would convert."""
    if isinstance(value, bool) != leaf.is_bool:
        came = str(value).lower() if isinstance(value, bool) else repr(value)
        raise UserError(
            f"{origin}: expected {leaf.expected}, got {came}; "
            f"leave it out for the default: {leaf.default_text}"
        )


def to_toml(options: BaseModel, only_set: bool = False) -> str:
    """Return a TOML file that reads back to an equal model.

    It is complete, or with ``only_set`` contains the fields that were set.
    Fields that are ``None`` are left out, since TOML has no word for it.
    """
    values = options.model_dump(mode="json", exclude_none=True, exclude_unset=only_set)
    return tomli_w.dumps(_kebab_keys(options, values))


def _kebab_keys(model: BaseModel, values: dict[str, Any]) -> dict[str, Any]:
    table = {}
    for name, value in values.items():
        inner = getattr(model, name)
        table[kebab(name)] = _kebab_keys(inner, value) if isinstance(inner, BaseModel) else value
    return table
