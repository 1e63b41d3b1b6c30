"""The state of the package ``accelerate``, of which each rank is a process that trains alone."""

from __future__ import annotations

import os

import torch
from accelerate.state import AcceleratorState, PartialState


def single_process(device: torch.device) -> PartialState:
    """Return accelerate's state of a process that trains alone on ``device``.

    Otherwise accelerate would take the launcher's variables for those of ``torch.distributed``.
    """
    changed = {"ACCELERATE_TORCH_DEVICE": str(device), "LOCAL_RANK": "-1"}
    before = {name: os.environ.get(name) for name in changed}
    # As transformers does; accelerate has no public method for a new state.
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.update(changed)
    try:
        return PartialState()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
