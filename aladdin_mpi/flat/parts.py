"""Parts of a module that are stepped one after another in each batch, as the models of a GAN."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from aladdin_mpi.errors import UserError

Outside = Sequence[frozenset[int]]
"""For each part, the trainable parameters outside it, by their numbers in flat order."""
WHOLE: Outside = (frozenset(),)
"""A module without parts."""


def outside_parts(module: nn.Module, parts: Sequence[str]) -> Outside:
    """Return the parameters outside each part.

    Args:
        module: the whole module.
        parts: names of submodules, in the order of their steps; empty: the whole module.

    Raises:
        UserError: the parts do not divide the module's trainable parameters among them.
    """
    if not parts:
        return WHOLE
    _check_names(module, parts)
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad][::-1]
    inside: list[frozenset[int]] = []
    for part in parts:
        own = set(module.get_submodule(part).parameters())
        inside.append(frozenset(n for n, (_, p) in enumerate(trained) if p in own))
        if not inside[-1]:
            raise UserError(
                f"parts: {part!r} has no parameters that require a gradient. Leave it out, or "
                "unfreeze some."
            )
    for number, (name, _) in reversed(list(enumerate(trained))):
        owners = [part for part, own in zip(parts, inside, strict=True) if number in own]
        if len(owners) != 1:
            where = " and ".join(map(repr, owners)) or "none of them"
            raise UserError(
                f"parts: expected each parameter of the model in one part, got {name} in {where}; "
                "name submodules that share no parameters and together contain all of them"
            )
    every = frozenset(range(len(trained)))
    return tuple(every - own for own in inside)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` has wrapped, or ``module`` itself.

    The wrapper adds ``_orig_mod.`` to all names, and a copy of it would compile again. Torch has no
    public access to what it wraps.
    """
    original = getattr(module, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else module


def _check_names(module: nn.Module, parts: Sequence[str]) -> None:
    names = [name for name, _ in module.named_modules() if name]
    unknown = [part for part in parts if part not in names]
    if isinstance(parts, str) or unknown or len(set(parts)) < len(parts):
        children = ", ".join(repr(name) for name, _ in module.named_children())
        raise UserError(
            "parts: expected a list of names of submodules, each once, got "
            f"{parts if isinstance(parts, str) else list(parts)!r}; the model's are {children}"
        )
