"""Hooks on the user's modules that copies of these modules do not have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_REDUCE = "__reduce_ex__"


class ModuleHook:
    """A hook that acts on one module only.

    Some modules, such as those of ``torch.fx``, copy their hooks themselves. In such a copy the
    hook is replaced by a function of the standard library that does nothing, so that the copy can
    be loaded without this package.

    Args:
        module: the module to act on.
        call: called as torch calls a hook.
        before_copy: called before the module is copied or pickled; it may remove the hook.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        before_copy: Callable[[], None] | None = None,
    ) -> None:
        self._module = module
        self._call = call
        self.before_copy = before_copy

    def __call__(self, module: nn.Module, *arguments: Any) -> Any:
        """Call the function, unless the module is another one that has taken over the hook."""
        return self._call(module, *arguments) if module is self._module else None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle a function that does nothing."""
        return getattr, (nullcontext(), "__exit__")


class Hooks:
    """Hooks of a run on modules, which are removed together.

    A copy of such a module, whether by ``copy``, ``pickle`` or ``torch.save``, has none of them.
    """

    def __init__(self) -> None:
        self._added: list[tuple[nn.Module, RemovableHandle]] = []

    def add(
        self,
        module: nn.Module,
        register: Callable[..., RemovableHandle],
        call: Callable[..., Any],
        before_copy: Callable[[], None] | None = None,
        **how: Any,
    ) -> None:
        """Add a hook.

        Args:
            module: the module to act on.
            register: a method of ``module``, such as ``module.register_forward_hook``.
            call: see :class:`ModuleHook`.
            before_copy: see there.
            how: further arguments of ``register``.
        """
        self._added.append((module, register(ModuleHook(module, call, before_copy), **how)))
        # copy and pickle ask the object itself before its class. In __dict__, because modules
        # may store attributes elsewhere.
        module.__dict__[_REDUCE] = partial(_reduce, module)

    def remove(self) -> None:
        """Remove all of them."""
        for module, handle in self._added:
            handle.remove()
            if not _of_runs(module.__dict__):
                module.__dict__.pop(_REDUCE, None)
        self._added.clear()


def _of_runs(state: dict[str, Any]) -> dict[int, ModuleHook]:
    """The hooks of runs among the attributes of a module, by their numbers."""
    return {
        number: hook
        for name, held in state.items()
        if name.endswith("_hooks") and isinstance(held, dict)
        for number, hook in held.items()
        if isinstance(hook, ModuleHook)
    }


def _reduce(module: nn.Module, protocol: Any) -> Any:
    """Replace ``module.__reduce_ex__``: reduce the module without the hooks of runs."""
    for hook in _of_runs(module.__dict__).values():
        if hook.before_copy is not None:
            hook.before_copy()
    reduced = type(module).__reduce_ex__(module, protocol)
    if isinstance(reduced, str):
        return reduced
    function, arguments, *states = reduced
    return (function, tuple(map(_without_hooks, arguments)), *map(_without_hooks, states))


def _without_hooks(state: Any) -> Any:
    """Return the attributes of a module without the hooks of runs; anything else as it is."""
    if isinstance(state, tuple):  # of a class with slots: (__dict__, slots)
        return tuple(map(_without_hooks, state))
    if not isinstance(state, dict):
        return state
    numbers = _of_runs(state).keys()
    kept = {name: value for name, value in state.items() if name != _REDUCE}
    # _forward_hooks_with_kwargs and the like have the numbers of hooks as well.
    for name, held in kept.items():
        if "_hooks" in name and isinstance(held, dict) and not numbers.isdisjoint(held):
            kept[name] = type(held)((n, each) for n, each in held.items() if n not in numbers)
    return kept
