"""Operations on flat vectors, which also accept vectors without memory (``meta``)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cache
from itertools import chain
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from aladdin_mpi.errors import UserError

BLOCK = 1 << 17
"""Number of values of a block; two blocks fit into a core's cache (512 KB each in fp32)."""


@cache
def sizes(length: int, dtype: torch.dtype) -> Tensor:
    """Return a ``meta`` vector, which has a size but no values; cached, as it cannot be changed."""
    return torch.empty(length, dtype=dtype, device="meta")


def cut(x: Tensor, start: int, stop: int) -> Tensor:
    """Return ``x[start:stop]``; for ``meta`` tensors in a third of the time of slicing."""
    return sizes(stop - start, x.dtype) if x.is_meta else x[start:stop]


def add(x: Tensor, y: Tensor, alpha: float = 1.0) -> None:
    """Compute ``x <- x + alpha y``, in place."""
    if not x.is_meta:
        x.add_(y, alpha=alpha)


def copy(x: Tensor, y: Tensor) -> None:
    """Compute ``x <- y``, in place."""
    if not x.is_meta:
        x.copy_(y)


def scale(x: Tensor, factor: float) -> None:
    """Compute ``x <- factor x``, in place."""
    if not x.is_meta:
        x.mul_(factor)


def clear(x: Tensor) -> None:
    """Compute ``x <- 0``, in place."""
    if not x.is_meta:
        x.zero_()


def clip_norm(x: Tensor, largest: float) -> None:
    """Scale ``x`` to an L2 norm of at most ``largest``, in place.

    Like torch.nn.utils.clip_grad_norm_, but without waiting for a device.
    """
    if not x.is_meta:
        x.mul_((largest / (torch.linalg.vector_norm(x) + 1e-6)).clamp_(max=1.0))


def lerp(x: Tensor, y: Tensor, weight: float) -> None:
    """Compute ``x <- (1 - weight) x + weight y``, in place; dtypes and devices may differ."""
    if not x.is_meta:
        x.lerp_(y.to(x.device, x.dtype), weight)


def host_vector(like: Tensor) -> Tensor:
    """Return a zeroed vector like ``like``, in host memory unless it is ``meta``."""
    if like.is_meta:
        return sizes(like.numel(), like.dtype)
    return torch.zeros_like(like, device="cpu")


def blocks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield vectors of one length in parts, so that several passes read memory only once.

    On devices other than CPUs each vector is one part.
    """
    if vectors[0].device.type != "cpu":
        return iter([vectors])
    return zip(*(vector.split(BLOCK) for vector in vectors), strict=True)


def is_finite(x: Tensor) -> bool:
    """Return whether all of ``x``, and its sum, are finite; reads ``x`` once.

    Sums in fp32 at least. The sum may be infinite for finite values, but only for values beyond
    those of any training. ``meta`` tensors count as finite.
    """
    if x.is_meta or _squares(x):
        return True
    # The squares of values above 1e16 may be infinite although their sum is not.
    return isfinite(total(x).item())


def total(x: Tensor) -> Tensor:
    """Return the sum of ``x``, in fp32 at least."""
    return x.sum(dtype=full(x.dtype))


def checksum(x: Tensor) -> int:
    """Return a CRC-32 of the values' bytes."""
    content: Any = x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(content)


def full(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are added and sent: float32 or float64."""
    return torch.promote_types(dtype, torch.float32)


def _squares(x: Tensor) -> bool:
    """Return whether the sum of squares is finite, which excludes infinite values and NaN.

    Uses a dot product of BLAS, which is as fast as the memory.
    """
    if x.dtype != torch.float32 or x.device.type != "cpu" or not x.is_contiguous():
        return False
    flat = x.view(-1)
    return isfinite(torch.dot(flat, flat).item())


def add_if_finite(x: Tensor, y: Tensor) -> bool:
    """Compute ``x <- x + y`` in place; return whether the result :func:`is_finite`.

    Each part is checked while it is cached, so that memory is read once. If the result is not
    finite, ``x`` is unusable; ``y`` is unchanged.
    """
    finite = True
    for part, other in blocks(x, y):
        part.add_(other)
        finite = finite and _squares(part)
    return finite or is_finite(x)


def check_module(module: nn.Module, needs_values: bool) -> None:
    """Check a module before it is moved to its device.

    Args:
        module: the user's module.
        needs_values: whether sizes alone are insufficient, as they are for simulations.

    Raises:
        UserError: names the first parameter or buffer that cannot be trained.
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
    """Return whether the values are contiguous, in any order of dimensions, each stored once."""
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
