"""What a module's parameters must be, so that they can be parts of one flat vector."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

from aladdin_mpi.errors import UserError


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
                f"model: expected parameters whose sizes are known, got the lazy {name}; call the "
                "model once with a batch before it is trained"
            )
        if needs_values and tensor.is_meta:
            raise UserError(
                f"model: expected parameters and buffers with values, got {name} on the device "
                "meta; use model.to_empty(device='cpu') and initialise them, or make the model on "
                "the CPU"
            )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not _is_dense(parameter):
            raise UserError(
                f"model: expected trainable parameters with memory of their own for each value, "
                f"got {name}, which is {_described(parameter)}; make it of a copy, such as "
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


def _described(tensor: Tensor) -> str:
    if tensor.layout != torch.strided:
        return f"of the layout {tensor.layout}".replace("torch.", "")
    return f"a view of shape {list(tensor.shape)} with strides {list(tensor.stride())}"
