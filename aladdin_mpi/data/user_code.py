"""Models and datasets that the user specifies as ``package.module:function``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.settings import did_you_mean

BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def import_function(option: str, spec: str) -> Callable[..., Any]:
    """Import the function ``package.module:function`` in ``spec``, the value of ``option``.

    Raises:
        UserError: the module or function does not exist.
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
    """Call ``function`` with those of ``arguments`` for which it has parameters.

    ``option`` and ``spec`` are for messages; ``always`` are also passed to a ``**`` parameter.

    Raises:
        UserError: it requires other arguments.
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
