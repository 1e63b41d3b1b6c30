"""Settings that a user gives for the fields of an option model, and errors in them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.fields import FieldPath, Leaf, leaves, shown

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
    excluding = {(name,) for name in getattr(model, "ALTERNATIVES", ())}
    if any(path in excluding and setting.value is not None for path, setting in upper.items()):
        lower = {path: setting for path, setting in lower.items() if path not in excluding}
    return lower | upper


def as_values(settings: Settings) -> dict[str, Any]:
    """Return the values by field, those of an inner model as a dict."""
    values: dict[str, Any] = {}
    for path, setting in settings.items():
        place = values
        for name in path[:-1]:
            place[name] = place = dict(place.get(name, {}))
        place[path[-1]] = setting.value
    return values


def build(model: type[Model], settings: Settings) -> Model:
    """Return the model with these settings over its defaults.

    Raises:
        UserError: with one line for each bad value.
    """
    try:
        built = model.model_validate(as_values(settings))
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


# -- errors -----------------------------------------------------------------------------
def _explain(error: ValidationError, model: type[BaseModel], settings: Settings) -> str:
    """Return one line for each field at fault, and for each rule between fields."""
    lines: dict[Any, str] = {}
    for item in error.errors(include_url=False):
        leaf = _leaf_at(model, item["loc"])
        reason = item.get("ctx", {}).get("error")
        if item["type"] == "extra_forbidden":
            text = _unknown(model, item["loc"])
        elif leaf is None and item["type"] == "model_type":
            text = _expected_dict(model, item)
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


def _expected_dict(model: type[BaseModel], item: Any) -> str:
    """Return the error on a value in place of the options of an inner model."""
    name = str(item["loc"][0])
    example = next(as_argument(path) for path in leaves(model) if path[0] == name)
    return f"{name}: expected a dict, got {shown(item['input'])}; write for example {example}"


def _unknown(model: type[BaseModel], location: Sequence[int | str]) -> str:
    """Return the error on an unknown setting, in terms of function arguments."""
    names = [str(part) for part in location]
    known = {name: name for name in model.model_fields}
    for path in leaves(model):
        if len(path) > 1:
            known.setdefault("_".join(path), as_argument(path))
    near = difflib.get_close_matches("_".join(names), known, n=1)
    hint = f"did you mean {known[near[0]]}?" if near else "docs/reference/options.md lists all"
    return f"{'.'.join(names)}: no such option; {hint}"


def _leaf_at(model: type[BaseModel], location: Sequence[int | str]) -> Leaf | None:
    known = leaves(model)
    paths = (tuple(location[:end]) for end in range(1, len(location) + 1))
    return next((known[path] for path in paths if path in known), None)  # type: ignore[index]


def _complaint(leaf: Leaf, item: Any) -> str:
    came, keys = item["input"], item["loc"][len(leaf.path) :]
    where = f" for {keys[0]}" if leaf.is_mapping and keys and keys[-1] != "[key]" else ""
    got = repr(came) if isinstance(came, str) else shown(came)
    if leaf.has_parts and isinstance(came, list | tuple):
        got = ":".join(map(shown, came))
    default = leaf.default_text
    hint = did_you_mean(str(came), leaf.choices) or f"leave it out for the default: {default}"
    if leaf.is_mapping and isinstance(came, str) and not keys:
        hint = "give a table, such as {0 = 10}"
    return f"expected {leaf.expected}, got {got}{where}; {hint}".rstrip("; ")


def _named_by_origin(text: str, model: type[BaseModel], settings: Settings) -> str:
    """Replace options by the keys of the files that set them, but not in the remedy."""
    origins = {
        leaf.flag: settings[leaf.path].origin
        for leaf in leaves(model).values()
        if leaf.path in settings
    }
    remedy = re.search(r"[;.] ", text)
    end = remedy.start() if remedy else len(text)
    fault = re.sub(r"--[a-z][a-z-]*", lambda found: origins.get(found[0], found[0]), text[:end])
    return fault + text[end:]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"did you mean --batch-size? "`` when something is close to ``word``."""
    known = list(known)
    begin = [name for name in known if word and name.startswith(word)]
    close = begin[:3] or difflib.get_close_matches(word, known, n=1)
    return f"did you mean {' or '.join(close)}? " if close else ""
