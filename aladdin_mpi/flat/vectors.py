"""Operations on flat vectors, which also run on phantoms without memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain
from math import isfinite

import torch
from torch import Tensor, nn

from aladdin_mpi.errors import UserError

BLOCK = 1 << 17
"""Values of a block, of which two fit into the cache of a core (512 KB each in fp32)."""


@cache
def sizes(length: int, dtype: torch.dtype) -> Tensor:
    """A vector of sizes alone, for all who need one: there is nothing in it to be changed."""
    return torch.empty(length, dtype=dtype, device="meta")


def cut(x: Tensor, start: int, stop: int) -> Tensor:
    """``x[start:stop]``, in a third of the time where there are no values."""
    return sizes(stop - start, x.dtype) if x.is_meta else x[start:stop]


def add(x: Tensor, y: Tensor, alpha: float = 1.0) -> None:
    """``x <- x + alpha y``, in place."""
    if not x.is_meta:
        x.add_(y, alpha=alpha)


def copy(x: Tensor, y: Tensor) -> None:
    """``x <- y``."""
    if not x.is_meta:
        x.copy_(y)


def scale(x: Tensor, factor: float) -> None:
    """``x <- factor x``, in place."""
    if not x.is_meta:
        x.mul_(factor)


def clear(x: Tensor) -> None:
    """``x <- 0``, whatever it held."""
    if not x.is_meta:
        x.zero_()


def clip_norm(x: Tensor, largest: float) -> None:
    """Scale ``x`` down to an L2 norm of ``largest`` if it has more, in place.

    As torch.nn.utils.clip_grad_norm_ does, without waiting for a device.
    """
    if not x.is_meta:
        x.mul_((largest / (torch.linalg.vector_norm(x) + 1e-6)).clamp_(max=1.0))


def lerp(x: Tensor, y: Tensor, weight: float) -> None:
    """``x <- (1 - weight) x + weight y``, in place; ``y`` may be of another dtype or device."""
    if not x.is_meta:
        x.lerp_(y.to(x.device, x.dtype), weight)


def host_vector(like: Tensor) -> Tensor:
    """A zeroed vector like ``like``, in the host's memory where it has any."""
    if like.is_meta:
        return sizes(like.numel(), like.dtype)
    return torch.zeros_like(like, device="cpu")


def blocks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Vectors of one length, part by part: several passes over a part read memory once.

    On other devices than CPUs they come as wholes.
    """
    if vectors[0].device.type != "cpu":
        return iter([vectors])
    return zip(*(vector.split(BLOCK) for vector in vectors), strict=True)


def is_finite(x: Tensor) -> bool:
    """Whether all of ``x``, and its sum, are finite; costs one reading of it.

    Sums in fp32 at least. The sum is infinite too for finite values that no training has.
    ``meta`` tensors count as finite.
    """
    if x.is_meta or _squares(x):
        return True
    # The squares of values above 1e16 may be infinite where their sum is not.
    return isfinite(total(x).item())


def total(x: Tensor) -> Tensor:
    """The sum of ``x``, in fp32 at least."""
    return x.sum(dtype=full(x.dtype))


def full(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that values of ``dtype`` are added and sent in: float32 or float64."""
    return torch.promote_types(dtype, torch.float32)


def _squares(x: Tensor) -> bool:
    """Whether the sum of the squares is finite: no value is infinite then, and none is NaN.

    A product of BLAS, which is as fast as the memory.
    """
    if x.dtype != torch.float32 or x.device.type != "cpu" or not x.is_contiguous():
        return False
    flat = x.view(-1)
    return isfinite(torch.dot(flat, flat).item())


def add_if_finite(x: Tensor, y: Tensor) -> bool:
    """``x <- x + y`` in place; whether the result :func:`is_finite`.

    The result is looked at part by part while the cache holds it, so that memory is read
    once. If it is not finite, ``x`` is of no use any more; ``y`` is left as it is.
    """
    sound = True
    for part, other in blocks(x, y):
        part.add_(other)
        sound = sound and _squares(part)
    return sound or is_finite(x)


def check_module(module: nn.Module, needs_values: bool) -> None:
    """Look at a module before it is moved to its device.

    Args:
        module: the user's.
        needs_values: otherwise sizes are enough, as with timed computing.

    Raises:
        UserError: names the first parameter or buffer that is not ready to be trained.
    """
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise UserError(
                f"model: expected parameters whose sizes are known, got the lazy {name}; call "
                "the model once with a batch before training"
            )
        if needs_values and tensor.is_meta:
            raise UserError(
                f"model: expected parameters and buffers with values, got {name} on the device "
                "meta; use model.to_empty(device='cpu') and initialise them, or create the model "
                "on the CPU"
            )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not _is_dense(parameter):
            raise UserError(
                "model: expected trainable parameters with memory of their own for each value, "
                f"got {name}, which is {_describe(parameter)}; copy it, for example "
                "nn.Parameter(values.contiguous())"
            )


def _is_dense(tensor: Tensor) -> bool:
    """Whether its values lie side by side, in whatever order of the dimensions, each once."""
    if tensor.layout != torch.strided:
        return False
    expected = 1
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(each for each in sizes if each[1] != 1):
        if stride != expected:
            return not tensor.numel()
        expected *= size
    return True


def _describe(tensor: Tensor) -> str:
    if tensor.layout != torch.strided:
        return f"of the layout {tensor.layout}".replace("torch.", "")
    return f"a view of shape {list(tensor.shape)} with strides {list(tensor.stride())}"
