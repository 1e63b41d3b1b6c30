"""From a pydantic model to a command: its options, ``--help`` and what was typed.

Three layers make up a configuration, each over the one before: the model's
defaults, a TOML file, the command line. Knows no field of any model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.fields import Leaf, extra, kebab, leaves, submodel
from aladdin_mpi.options.settings import (
    Setting,
    Settings,
    did_you_mean,
    overlay,
    read_part,
    read_toml,
)

Argv = Sequence[str] | None

HELP_WIDTH = 100
ANSWERED_AT_ONCE = ("-h", "--help", "--version")
"""Options that print something and exit."""


def read(model: type[BaseModel], argv: Argv, prog: str, description: str) -> Settings:
    """Return what the user gave, on the command line and in the files named there.

    ``argv`` is the command line without the program's name; ``None`` takes the
    process's own. ``--help`` and ``--version`` print and raise ``SystemExit(0)``.

    Raises:
        UserError: an option or a key is unknown, or a file cannot be read.
    """
    given = _arguments(model, make_parser(model, prog, description), argv)
    settings: Settings = {}
    if "config" in given:
        settings = read_toml(model, Path(given.pop("config")), "--config")
    for name, info in model.model_fields.items():
        if submodel(info) is not None and name in given:
            settings |= read_part(model, name, Path(given.pop(name)), f"--{kebab(name)}")
    typed = {
        leaf.path: Setting(_typed_value(leaf, given[leaf.key]), leaf.flag)
        for leaf in leaves(model).values()
        if leaf.key in given
    }
    return overlay(model, settings, typed)


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, indent_increment=2, max_help_position=30, width=HELP_WIDTH)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Break lines at spaces only, so that ``--lr-decay`` stays whole."""
        return textwrap.wrap(text, width, break_on_hyphens=False)


def make_parser(model: type[BaseModel], prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with one option for every field of ``model``."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [options]",
        description=description,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        exit_on_error=False,
        add_help=False,
    )
    general = parser.add_argument_group("general")
    *asking, telling = ANSWERED_AT_ONCE
    general.add_argument(*asking, action="help", help="show this text and exit")
    version = f"{prog} {_version()}"
    general.add_argument(telling, action="version", version=version, help="show it and exit")
    general.add_argument(
        "--config", metavar="FILE", help="TOML file of options, overridden by those typed here"
    )
    _add_options(parser, model)
    return parser


def _add_options(parser: argparse.ArgumentParser, model: type[BaseModel]) -> None:
    groups: dict[str, Any] = {}
    for leaf in leaves(model).values():
        owner = leaf.path[0]
        inner = submodel(model.model_fields[owner])
        title = owner if inner else extra(leaf.info).get("group", "options")
        if title not in groups:
            about = (inner.__doc__ or "").split("\n\n")[0] if inner else None
            groups[title] = parser.add_argument_group(title, about)
            if extra(model.model_fields[owner]).get("file"):
                flag, text = f"--{kebab(owner)}", _file_help(model, owner)
                groups[title].add_argument(flag, metavar="FILE", help=text)
        groups[title].add_argument(leaf.flag, dest=leaf.key, **_argument(leaf))


def _file_help(model: type[BaseModel], owner: str) -> str:
    beside = extra(model.model_fields[owner]).get("beside", [])
    named = ", ".join(f"--{kebab(name)}" for name in beside)
    return "TOML file of the options below" + (f", and of {named}" if named else "")


def _argument(leaf: Leaf) -> dict[str, Any]:
    text = f"{leaf.info.description} (default: {leaf.default_text})".replace("%", "%%")
    if leaf.is_bool:
        return {"help": text, "action": argparse.BooleanOptionalAction}
    several = {"nargs": "+", "action": "extend"} if leaf.is_mapping or leaf.is_list else {}
    return {"help": text, "metavar": _metavar(leaf), **several}


def _metavar(leaf: Leaf) -> str:
    unit = extra(leaf.info).get("unit")
    if leaf.choices:
        return "{" + ",".join(([unit] if unit else []) + list(leaf.choices)) + "}"
    kinds = {int: "N", float: "X", Path: "PATH"}
    return unit or ("KEY=VALUE" if leaf.is_mapping else kinds.get(leaf.plain_type, "NAME"))


def _arguments(model: type[BaseModel], parser: argparse.ArgumentParser, argv: Argv) -> Any:
    """Return what was typed, by TOML key; argparse's errors put in this project's form."""
    try:
        found, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(_malformed(model, error)) from None
    if rest:
        word = rest[0].split("=")[0]
        if not word.startswith("-"):
            raise UserError(
                f"{word!r}: expected an option such as --name; see python -m {parser.prog} --help"
            )
        known = [flag for action in parser._actions for flag in action.option_strings]
        raise UserError(
            f"{word}: no such option; {did_you_mean(word, known)}see python -m {parser.prog} --help"
        )
    return vars(found)


def _malformed(model: type[BaseModel], error: argparse.ArgumentError) -> str:
    """Explain a missing value, or one given to an option that takes none."""
    flag = str(error.argument_name).split("/")[0]
    leaf = next((leaf for leaf in leaves(model).values() if leaf.flag == flag), None)
    if leaf is None:
        return f"{flag}: {error.message}"
    if leaf.is_bool:
        return f"{flag}: expected no value, got one; write {flag} or --no-{flag[2:]}"
    return f"{flag}: expected {leaf.expected}, got nothing; write {flag}={_metavar(leaf)}"


def _typed_value(leaf: Leaf, given: Any) -> Any:
    """Return what was typed for ``leaf`` in the shape in which TOML would give it."""
    if given == "none" and leaf.optional:
        return None
    if not (leaf.is_list or leaf.is_mapping):
        return given
    whole = extra(leaf.info).get("whole")  # texts that may hold commas
    items = [item for word in given for item in ([word] if whole else word.split(",")) if item]
    if items == ["none"]:
        items = []
    if leaf.is_list:
        return items
    for item in items:
        if "=" not in item:
            raise UserError(
                f"{leaf.flag}: expected {_metavar(leaf)}, got {item!r}; "
                f"write for example {leaf.flag} 0=2"
            )
    return dict(item.split("=", 1) for item in items)


def _version() -> str:
    try:
        return importlib.metadata.version("aladdin_mpi")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
