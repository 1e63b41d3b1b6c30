"""The option reader: a pydantic model from the command line and TOML files, and ``--help``.

Three layers make up a configuration, each over the one before: the model's
defaults, a TOML file, the command line. Knows no field of any model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.fields import Leaf, extra, kebab, leaves, submodel
from aladdin_mpi.options.settings import Setting, Settings, did_you_mean, overlay
from aladdin_mpi.options.toml_file import read_part, read_toml

Argv = Sequence[str] | None

HELP_WIDTH = 100
ANSWERED_AT_ONCE = ("-h", "--help", "--help-all", "--version")
"""Options that print something and exit."""


class CommandLine(NamedTuple):
    """The words of a command line, ``[SCRIPT.py] [options] [-- arguments of the script]``."""

    script: Path | None
    options: list[str]
    arguments: list[str]


def divided(argv: Argv) -> CommandLine:
    """Return the parts of a command line; ``None`` takes the process's own."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or not words[0].endswith(".py"):
        return CommandLine(None, words, [])
    end = words.index("--") if "--" in words else len(words)
    return CommandLine(Path(words[0]), words[1:end], words[end + 1 :])


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
    for leaf in leaves(model).values():
        if leaf.key in given and leaf.former_flag in given:
            raise UserError(f"{leaf.former_flag} is the former name of {leaf.flag}; keep one")
    typed = {
        leaf.path: Setting(_typed_value(leaf, given[name]), flag)
        for leaf in leaves(model).values()
        for name, flag in ((leaf.former_flag, leaf.former_flag), (leaf.key, leaf.flag))
        if flag and name in given
    }
    return overlay(model, settings, typed)


def renamed_flags(model: type[BaseModel], given: Settings) -> dict[str, str]:
    """Return the former spellings on a command line, with the current one of each."""
    return {
        leaf.former_flag: leaf.flag
        for leaf in leaves(model).values()
        if leaf.former_flag and leaf.path in given and given[leaf.path].origin == leaf.former_flag
    }


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, indent_increment=2, max_help_position=30, width=HELP_WIDTH)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Break lines at spaces only, so that ``--lr-decay`` stays whole."""
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0][2:]}"
        return super()._format_action_invocation(action)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return f"{action.metavar} ..." if action.nargs == "+" else str(action.metavar)


class _Help(argparse.Action):
    """Prints the help on a topic and exits."""

    def __init__(self, *args: Any, model: type[BaseModel], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._model = model

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> None:
        """Raises ``SystemExit(0)``."""
        topic = ALL if self.nargs == 0 else values
        print(help_page(self._model, parser.prog, str(parser.description), topic), end="")
        parser.exit()


ALL = "all"


def help_page(model: type[BaseModel], prog: str, description: str, topic: str | None) -> str:
    """Return the page of ``--help TOPIC``.

    Args:
        model: of the options.
        prog: the program's name.
        description: of the program.
        topic: the name of a group of options, or one of the model's ``TOPICS``, which maps
            further names to groups; ``"all"``: every option; None: those that most runs need, or
            all if none is marked as such.

    Raises:
        UserError: there is no such topic.
    """
    every = option_groups(model)
    common = {
        title: (about, chosen)
        for title, (about, group) in every.items()
        if (chosen := [leaf for leaf in group if leaf.is_common])
    }
    if topic == ALL or (topic is None and not common):
        return _parser(model, prog, description, every).format_help()
    if topic is None:
        parser = _parser(model, prog, description, common, is_short=True)
        parser.epilog = (
            f"--help-all lists all {len(leaves(model))} options, --help TOPIC those of a group or "
            f"an algorithm: {', '.join(every)}."
        )
        return parser.format_help()
    title = getattr(model, "TOPICS", {}).get(topic, topic)
    if title not in every:
        hint = did_you_mean(topic, every)
        raise UserError(f"--help: expected one of {', '.join(every)}, got {topic!r}; {hint}")
    return _parser(model, prog, description, {title: every[title]}).format_help()


def make_parser(model: type[BaseModel], prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with one option for every field of ``model``."""
    return _parser(model, prog, description, option_groups(model))


def option_groups(model: type[BaseModel]) -> dict[str, tuple[str, list[Leaf]]]:
    """Return the options by the heading they are listed under, each with the text below it."""
    groups: dict[str, tuple[str, list[Leaf]]] = {}
    for leaf in leaves(model).values():
        inner = submodel(model.model_fields[leaf.path[0]])
        about = (inner.__doc__ or "").split("\n\n")[0] if inner else ""
        groups.setdefault(_title(model, leaf), (about, []))[1].append(leaf)
    return groups


def _title(model: type[BaseModel], leaf: Leaf) -> str:
    """The heading that an option is listed under."""
    owner = leaf.path[0]
    is_inner = submodel(model.model_fields[owner]) is not None
    return kebab(owner) if is_inner else str(extra(leaf.info).get("group", "options"))


def _parser(
    model: type[BaseModel],
    prog: str,
    description: str,
    groups: dict[str, tuple[str, list[Leaf]]],
    is_short: bool = False,
) -> argparse.ArgumentParser:
    """Return a parser of some groups of options; ``is_short``: its help has no details."""
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
    _add_general(model, parser)
    for title, (about, group) in groups.items():
        section = parser.add_argument_group(title, None if is_short else about)
        owner = group[0].path[0]
        if extra(model.model_fields[owner]).get("file"):
            text = _file_help(model, owner)
            section.add_argument(f"--{kebab(owner)}", metavar="FILE", help=text)
        for leaf in group:
            how = _argument(leaf, is_short)
            section.add_argument(leaf.flag, dest=leaf.key, **how)
            if leaf.former_flag:
                hidden = how | {"help": argparse.SUPPRESS}
                section.add_argument(leaf.former_flag, dest=leaf.former_flag, **hidden)
    return parser


def _add_general(model: type[BaseModel], parser: argparse.ArgumentParser) -> None:
    try:
        version = importlib.metadata.version("aladdin_mpi")
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed)"
    general = parser.add_argument_group("general")
    how: dict[str, Any] = {"action": _Help, "model": model}
    text = "help on the options that most runs need, or on a topic"
    general.add_argument("-h", "--help", nargs="?", metavar="[TOPIC]", help=text, **how)
    general.add_argument("--help-all", nargs=0, help="help on all options", **how)
    line = f"{parser.prog} {version}"
    general.add_argument("--version", action="version", version=line, help="version")
    text = "TOML file of options, which those on the command line override"
    general.add_argument("--config", metavar="FILE", help=text)


def _file_help(model: type[BaseModel], owner: str) -> str:
    outer = extra(model.model_fields[owner]).get("outer", [])
    named = ", ".join(f"--{kebab(name)}" for name in outer)
    return "TOML file of the options below" + (f", and of {named}" if named else "")


def _argument(leaf: Leaf, is_short: bool) -> dict[str, Any]:
    text = (leaf.short_help if is_short else leaf.help).replace("%", "%%")
    if leaf.is_bool:
        return {"help": text, "action": argparse.BooleanOptionalAction}
    several = {"nargs": "+", "action": "extend"} if leaf.is_mapping or leaf.is_list else {}
    return {"help": text, "metavar": leaf.metavar, **several}


def _arguments(model: type[BaseModel], parser: argparse.ArgumentParser, argv: Argv) -> Any:
    """Return what was typed, by TOML key; argparse's errors put in this project's form."""
    try:
        found, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(_malformed(model, error)) from None
    if not rest:
        return vars(found)
    word, see = rest[0].split("=")[0], f"see python -m {parser.prog} --help"
    if not word.startswith("-"):
        raise UserError(f"{word!r}: expected an option such as --name; {see}")
    known = [flag for action in parser._actions for flag in action.option_strings]
    raise UserError(f"{word}: no such option; {did_you_mean(word, known)}{see}")


def _malformed(model: type[BaseModel], error: argparse.ArgumentError) -> str:
    """Explain a missing value, or one given to an option that takes none."""
    flag = str(error.argument_name).split("/")[0]
    leaf = next((leaf for leaf in leaves(model).values() if leaf.flag == flag), None)
    if leaf is None:
        return f"{flag}: {error.message}"
    if leaf.is_bool:
        return f"{flag}: expected no value, got one; write {flag} or --no-{flag[2:]}"
    return f"{flag}: expected {leaf.expected}, got nothing; write {flag}={leaf.metavar}"


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
    pairs: dict[str, str] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator:
            key = item if get_args(leaf.plain_type)[0] is str else "0"
            raise UserError(
                f"{leaf.flag}: expected {leaf.metavar}, got {item!r}; "
                f"write for example {leaf.flag} {key}=2"
            )
        if key in pairs:
            raise UserError(f"{leaf.flag}: {key} is given twice; keep one")
        pairs[key] = value
    return pairs
