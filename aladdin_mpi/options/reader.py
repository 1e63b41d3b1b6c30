"""The option reader: a pydantic model from the command line and TOML files, ``--help``, errors.

Three layers make up a configuration, each over the one before: the model's
defaults, a TOML file, the command line. Knows no field of any model.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import math
import re
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from aladdin_mpi.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Model = TypeVar("Model", bound=BaseModel)
Argv = Sequence[str] | None
FieldPath = tuple[str, ...]
"""Field names from the outer model inwards, such as ``("aladdin", "pi")``."""

LARGEST_WHOLE = 10**13
"""Of seeds, samples and counts: times a million it is still a number of 64 bits."""
HELP_WIDTH = 100
ANSWERED_AT_ONCE = ("-h", "--help", "--help-all", "--version")
"""Options that print something and exit."""


# -- declarations -------------------------------------------------------------------
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
        return text.replace("KEY=VALUE", self.metavar) if self.is_mapping else text

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


def current_name(model: type[BaseModel], name: str) -> str:
    """Return the name of the field of ``model`` that was called ``name`` in a former release."""
    fields = model.model_fields.items()
    return next((now for now, info in fields if extra(info).get("formerly") == name), name)


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


# -- what the user gave, and a model of it --------------------------------------------
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


# -- the command line -----------------------------------------------------------------
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
    for item in items:
        if "=" not in item:
            raise UserError(
                f"{leaf.flag}: expected {leaf.metavar}, got {item!r}; "
                f"write for example {leaf.flag} 0=2"
            )
    return dict(item.split("=", 1) for item in items)


# -- TOML -------------------------------------------------------------------------------
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


# -- errors -----------------------------------------------------------------------------
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
