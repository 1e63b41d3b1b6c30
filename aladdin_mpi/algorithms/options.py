"""The options of single algorithms, one model for each that has any."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

AlphaRule = Literal["theory", "since-last", "literal"]
"""How ALADDIN's server chooses the weight that a worker gives to the global model."""


class AladdinOptions(BaseModel):
    """For --algorithm aladdin (Ko et al., CIKM 2021)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    pi: int = Field(
        4,
        ge=1,
        description="gradients that a worker sends between two models sent back to it",
        json_schema_extra={"unit": "GRADIENTS"},
    )
    alpha: Annotated[float, Field(ge=0, le=1)] | AlphaRule = Field(
        "theory",
        description="weight of the global model when a worker blends it into its own: a number "
        "from 0 to 1, or a rule; with n workers, theory: 1-1/sqrt(n*pi); since-last: 1-1/sqrt(c), "
        "c the gradients at the server since its last model for this worker; literal: the same, c "
        "since its last model for any worker, as printed",
        json_schema_extra={"unit": "WEIGHT"},
    )
    normalize: Literal["count", "workers", "none"] = Field(
        "workers",
        description="what accumulated gradients are divided by: their count, the number of "
        "workers, or nothing",
    )
    trigger: Literal["accumulate", "drop"] = Field(
        "accumulate",
        description="whether the gradient that triggers an update is added to it, or dropped as "
        "the paper prints it",
    )
    momentum: Literal["worker", "split"] = Field(
        "worker",
        description="worker: workers send steps that contain their momentum, and the server adds "
        "them plainly; split: workers send raw gradients, and both keep a momentum of their own",
    )
    ring: int = Field(
        2,
        ge=1,
        description="gradients of a worker on the wire at once; more are summed until one is free",
        json_schema_extra={"unit": "GRADIENTS"},
    )
