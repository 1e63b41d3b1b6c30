"""What algorithms read of a run's options."""

from __future__ import annotations

from typing import Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict


class RunSettings(Protocol):
    """The run's options as far as algorithms read them; their own stand beside these."""

    algorithm: str
    seed: int
    servers: int
    momentum: float
    bucket_mb: float
    shard_mb: float
    sharding: Literal["memory", "layer"]
    compression: Literal["none", "dgc"]
    wire: Literal["auto", "fp32", "bf16", "int8", "int4"]
    checksum: bool
    node_sums: bool
    clip: float | None
    max_loss: float | None
    wait_free: bool
    allow_resize: bool
    quiet: bool

    @property
    def step_size(self) -> int:
        """Samples of a worker's step."""
        ...


class OwnOptions(BaseModel):
    """An algorithm's own options; its docstring heads them in ``--help``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Own = TypeVar("Own", bound=OwnOptions)


def own(run: RunSettings, kind: type[Own]) -> Own:
    """An algorithm's own options, among those of the run."""
    return next(value for value in vars(run).values() if type(value) is kind)
