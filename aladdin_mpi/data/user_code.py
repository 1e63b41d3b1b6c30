"""Models and data sets that the user names as ``package.module:function``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

from aladdin_mpi.errors import UserError

BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint, with a space after it, if something similar to ``name`` is known."""
    close = get_close_matches(name, list(known))
    return f"did you mean {' or '.join(close)}? " if close else ""


def import_function(option: str, spec: str) -> Callable[..., Any]:
    """Import ``spec``, written ``package.module:function``, which ``option`` has named.

    Raises:
        UserError: if there is no such module or function.
    """
    module_name, _, function_name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{option} {spec}: cannot import {module_name} ({error}). Run from the folder that "
            "contains it, or add that folder to PYTHONPATH."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = (name for name in vars(module) if callable(getattr(module, name)))
        hint = did_you_mean(function_name, names)
        text = f"{option} {spec}: {module_name} has no function {function_name!r}; {hint}"
        raise UserError(text.rstrip("; "))
    return function


def call_with_accepted(
    option: str,
    spec: str,
    function: Callable[..., Any],
    arguments: dict[str, Any],
    always: frozenset[str] = frozenset(),
) -> Any:
    """Call ``function`` with those of ``arguments`` that it has a parameter for.

    Args:
        option: the option that named it, for messages.
        spec: its name there.
        function: the function.
        arguments: by name.
        always: names that are passed to a ``**`` parameter too.

    Raises:
        UserError: it requires an argument that is not among them.
    """
    parameters = inspect.signature(function).parameters.values()
    accepted = {each.name for each in parameters if each.kind in BY_NAME}
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        accepted |= always
    required = [p for p in parameters if p.default is p.empty and p.kind not in ANY_NUMBER]
    if unknown := [p.name for p in required if p.kind not in BY_NAME or p.name not in arguments]:
        raise UserError(
            f"{option} {spec}: expected a function that can be called with any of "
            f"{', '.join(arguments)} by name, got one that also needs {', '.join(unknown)}; give "
            "these a default"
        )
    return function(**{name: value for name, value in arguments.items() if name in accepted})
