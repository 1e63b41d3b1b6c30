"""A place in a network where backward tells of the errors that come by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Listen(torch.autograd.Function):
    """The identity; backward hands over what comes by."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Tensor, hear: Callable[[Tensor], None]) -> Tensor:
        """``hear`` is called with the errors of ``output``; see torch.autograd.Function."""
        ctx.mark_dirty(output)  # in place, so that what follows may be in place as well
        ctx.hear = hear
        return output

    @staticmethod
    def backward(ctx: Any, errors: Tensor) -> tuple[Tensor, None, None]:
        """Pass them on."""
        ctx.hear(errors)
        return errors, None, None
