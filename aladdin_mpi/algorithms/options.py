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


class AspOptions(BaseModel):
    """For --algorithm asp (Dean et al., NIPS 2012)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    momentum: Literal["server", "worker"] = Field(
        "worker",
        description="where momentum and weight decay are added: to the gradients as they arrive "
        "at the server, or at each worker before it sends",
    )
    normalize: Literal["workers", "none"] = Field(
        "workers",
        description="what a gradient is divided by at the server: the number of workers, or "
        "nothing",
    )


class ShatOptions(AspOptions):
    """For --algorithm shat (Ko et al., Applied Sciences 12, 292, 2022)."""

    log: Literal["e", "2"] = Field(
        "2", description="base of the logarithm in alpha = 1 - n/(c log n)"
    )
    self_update: bool = Field(
        True, description="a worker applies its gradient to its own model before it blends"
    )


class SspOptions(AspOptions):
    """For --algorithm ssp (Ho et al., NIPS 2013)."""

    bound: int = Field(
        3,
        ge=0,
        description="steps that a worker may be ahead of the slowest",
        json_schema_extra={"unit": "STEPS"},
    )
    pull: Literal["always", "on-bound"] = Field(
        "always",
        description="when a worker takes the server's model: after every step (Ho et al.), or "
        "only when it has gone bound + 1 steps without (Ko et al., IPDPS 2021)",
    )
    self_update: Literal["workers", "none"] = Field(
        "none",
        description="with --ssp-pull on-bound: what a worker divides its gradient by when it "
        "applies it to its own model: the number of workers, or nothing",
    )


class EasgdOptions(BaseModel):
    """For --algorithm easgd and eamsgd (Zhang, Choromanska, LeCun; NeurIPS 2015)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tau: int = Field(
        2,
        ge=1,
        description="steps of a worker between two exchanges with the centre",
        json_schema_extra={"unit": "STEPS"},
    )
    alpha: Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] = Field(
        "auto",
        description="how far a worker and the centre move towards each other; auto: 0.9 divided "
        "by the number of workers",
        json_schema_extra={"unit": "WEIGHT"},
    )


class BspOptions(BaseModel):
    """For --algorithm bsp."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    host_first: bool = Field(
        False,
        description="add up the gradients of a host's workers on the host; one worker of each "
        "host talks to the servers",
    )
