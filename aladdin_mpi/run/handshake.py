"""Agreement checks before training: ranks that disagree never start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from aladdin_mpi.accelerator import is_accelerator
from aladdin_mpi.control.exchange import all_or_none, broadcast, gather
from aladdin_mpi.errors import LostError, UserError
from aladdin_mpi.options.run import RunOptions, agreed, differences
from aladdin_mpi.session.context import versions
from aladdin_mpi.transport.base import Transport

GPU_BUCKET_MB = 16.0
"""Each bucket costs host time in Python: with 24 buckets of 4 MB a GPU waited (docs/gpus.md)."""
Options = TypeVar("Options", bound=RunOptions)


def with_bucket_size(transport: Transport, options: Options, device: torch.device) -> Options:
    """Return ``options`` with the bucket size for the devices of all ranks.

    All ranks call it. A size set by the user has precedence. Simulations keep the default, since
    their workers need not be this machine's.
    """
    if transport.models_time or "bucket_mb" in options.model_fields_set:
        return options
    if broadcast(transport, any(gather(transport, is_accelerator(device)))):
        return options.model_copy(update={"bucket_mb": GPU_BUCKET_MB})
    return options


def check_agreement(
    transport: Transport,
    options: RunOptions,
    parameters: list[str],
    data: Mapping[str, Any],
    first_worker: int,
    optimizer: str,
    state: str,
) -> None:
    """Check that every rank has rank 0's options, parameters, optimizer, its state and versions.

    Parameters are compared by shape and memory layout, as the flat vector is in memory order.
    The data are compared with those of the first surviving worker: a server does not read them.

    Raises:
        UserError: at rank 0, with the differences of each rank.
        RefusedError: at the others.
        LostError: at rank 0, every worker has failed.
    """
    mine = json.dumps(
        {
            "option": agreed(options),
            "optimizer": {"groups": optimizer, "state": state},
            "parameter": {str(i): described for i, described in enumerate(parameters)},
            "version": versions(),
        }
    )
    first = broadcast(transport, mine)
    everyone = gather(transport, dict(data))
    reference = broadcast(transport, everyone and _first_surviving(everyone[first_worker:]))
    expected = {name: reference[name] for name in data}
    all_or_none(transport, lambda: _compare(first, mine, expected, data))


def _first_surviving(facts: list[Any]) -> Any:
    """Return the facts of the first surviving worker.

    Raises:
        LostError: every worker has failed.
    """
    first = next((each for each in facts if each is not None), None)
    if first is None:
        raise LostError("every worker failed before training began")
    return first


def _compare(first: str, mine: str, expected: dict[str, Any], data: Mapping[str, Any]) -> None:
    changes = [] if mine == first else differences(json.loads(first), json.loads(mine))
    others = differences(expected, data)
    if others and not any(line.startswith("option.") for line in changes):
        # The data are the likelier cause: shapes of parameters may depend on them.
        raise UserError(
            f"the training data differ from worker 0's (its value first): {'; '.join(others)}. "
            "Pass every worker the same data set."
        )
    if changes:
        more = f" and {len(changes) - 5} more" if len(changes) > 5 else ""
        raise UserError(
            f"differs from rank 0 (rank 0's value first): {'; '.join(changes[:5])}{more}. Start "
            "every rank with the same options, code and environment (docs/troubleshooting.md)."
        )
