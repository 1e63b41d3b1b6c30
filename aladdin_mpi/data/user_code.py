"""Models and data sets that the user names as ``package.module:function``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from aladdin_mpi.errors import UserError

BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def import_function(option: str, spec: str) -> Callable[..., Any]:
    """Return what ``spec``, written ``package.module:function``, names.

    Args:
        option: the option it came from, for messages.
        spec: the name.

    Raises:
        UserError: if there is no such module or function.
    """
    module_name, _, function_name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{option} {spec}: cannot import {module_name} ({error}); run from the folder that "
            "holds it, or add that folder to PYTHONPATH"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name in vars(module) if callable(getattr(module, name))]
        close = get_close_matches(function_name, names)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise UserError(f"{option} {spec}: {module_name} has no function {function_name!r}{hint}")
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
        function: what to call.
        arguments: what may be passed, by name.
        always: those names that are passed to a ``**`` parameter too.

    Raises:
        UserError: it needs something else.
    """
    parameters = inspect.signature(function).parameters.values()
    accepted = {each.name for each in parameters if each.kind in BY_NAME}
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        accepted |= always
    if unknown := [each.name for each in parameters if _needs_more(each, arguments)]:
        raise UserError(
            f"{option} {spec}: expected a function that can be called with any of "
            f"{', '.join(arguments)} by name, got one that also needs {', '.join(unknown)}; give "
            "these a default"
        )
    return function(**{name: value for name, value in arguments.items() if name in accepted})


def _needs_more(parameter: inspect.Parameter, arguments: dict[str, Any]) -> bool:
    """Whether a parameter has to be given and cannot be."""
    if parameter.default is not parameter.empty or parameter.kind in ANY_NUMBER:
        return False
    return parameter.kind not in BY_NAME or parameter.name not in arguments
