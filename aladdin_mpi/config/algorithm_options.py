"""The options of single algorithms, one model for each that has any."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

SHARED = {"eamsgd": "easgd"}
"""Algorithms that take the options of another."""


def group_of(algorithm: str) -> str:
    """The field of the run's options that holds an algorithm's own, if it has any."""
    return SHARED.get(algorithm, algorithm).replace("-", "_")


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
    lookahead: float = Field(
        0.0,
        ge=0,
        description="steps of its own momentum by which a worker moves the global model on before "
        "it blends it in, for what other workers are about to add to it; 0: not, as in the paper",
        json_schema_extra={"unit": "STEPS"},
    )
    self_update: bool = Field(
        True,
        description="a worker applies its gradient to its own model at once; otherwise its model "
        "stays as it is until the global one comes",
    )
    lazy: bool = Field(
        True,
        description="the global model is updated when a worker is sent it; otherwise by every "
        "gradient",
    )
    ring: int = Field(
        2,
        ge=1,
        description="gradients of a worker on the wire at once; more are summed until one is free",
        json_schema_extra={"unit": "GRADIENTS"},
    )


class AladdinAheadOptions(BaseModel):
    """For --algorithm aladdin-ahead."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    pi: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="gradients that a worker sends between two models sent back to it; auto: one, "
        "and more where the links have no room",
        json_schema_extra={"unit": "GRADIENTS"},
    )

    weight: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = Field(
        "auto",
        description="what a worker's own gradient stands for of everybody's, until a model holds "
        "it; auto: half its age in rounds, between 1/2 and 1",
        json_schema_extra={"unit": "WEIGHT"},
    )
    lookahead: float = Field(
        1.0,
        ge=0,
        description="rounds of the workers by which a gradient is computed ahead of the model, "
        "along the momentum of all",
        json_schema_extra={"unit": "ROUNDS"},
    )
    send: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = Field(
        "auto",
        description="share of a worker's next gradient that has reached a server when it sends "
        "this worker its models; auto: as late as they still arrive in time",
        json_schema_extra={"unit": "SHARE"},
    )
    ring: int = Field(
        2,
        ge=1,
        description="gradients of a worker on the wire at once; more are summed until one is free",
        json_schema_extra={"unit": "GRADIENTS"},
    )


class ArSgdOptions(BaseModel):
    """For --algorithm ar-sgd."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    allreduce: Literal["auto", "mpi", "horovod", "torch"] = Field(
        "auto",
        description="what sums the gradients: MPI, Horovod (installed by make horovod), or "
        "torch.distributed (gloo, or NCCL on GPUs); auto: NCCL where each rank has a GPU to "
        "itself, else MPI",
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
        "e", description="base of the logarithm in alpha = 1 - n/(c log n)"
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
    coalesce: bool = Field(
        True,
        description="with --ssp-pull on-bound: add a gradient to the next one while the last is "
        "still on the wire; otherwise wait until it has gone",
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
    group: int | None = Field(
        None,
        ge=1,
        description="with --bsp-host-first: most workers that are added up together, where a host "
        "is several machines in one, such as containers or sockets",
        json_schema_extra={"unit": "WORKERS", "default_text": "all of a host"},
    )


class SgpOptions(BaseModel):
    """For --algorithm sgp (Assran et al., ICML 2019)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    graph: Literal["exponential", "ring"] = Field(
        "exponential",
        description="whom a worker sends to: 1, 2, 4, ... workers further, in turn, or always the "
        "next",
    )


class OsgpOptions(SgpOptions):
    """For --algorithm osgp (Assran et al., ICML 2019)."""

    tau: int = Field(
        1,
        ge=1,
        description="steps that a message may take before it is waited for",
        json_schema_extra={"unit": "STEPS"},
    )
    order: Literal["add-first", "push-first"] = Field(
        "add-first",
        description="what a worker does after a step: add the messages of earlier steps that have "
        "come, then send; or send, then add",
    )


class GoSgdOptions(BaseModel):
    """For --algorithm gosgd (Blot et al., 2016)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    p: float = Field(
        0.01,
        gt=0,
        le=1,
        description="probability that a worker sends its model to another one after a step",
        json_schema_extra={"unit": "PROBABILITY"},
    )


class AdPsgdOptions(BaseModel):
    """For --algorithm ad-psgd (Lian et al., ICML 2018)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    graph: Literal["random", "exponential"] = Field(
        "random",
        description="whom an active worker averages with: a passive one drawn by chance, or those "
        "0, 1, 2, 4, ... further, in turn",
    )


class LocalSgdOptions(BaseModel):
    """For --algorithm local-sgd (Stich, ICLR 2019; Lin et al., ICLR 2020)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    steps: int = Field(
        8,
        ge=1,
        description="local steps of a worker between two averages of all models",
        json_schema_extra={"unit": "STEPS"},
    )
    post: int = Field(
        0,
        ge=0,
        description="first samples of the run, all workers together, in which models are averaged "
        "after every step (post-local SGD); 0: none",
        json_schema_extra={"unit": "SAMPLES"},
    )
    allreduce: Literal["auto", "mpi", "horovod", "torch"] = Field(
        "auto", description="what sums the models, as --ar-sgd-allreduce"
    )


class MultistepOptions(BaseModel):
    """For --algorithm multistep (Lee et al., MLHPC 2018)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    exchange: Literal["auto", "gradients", "activations"] = Field(
        "auto",
        description="how the gradients of fully connected layers come together: as gradients, as "
        "activations and errors, or as activations and errors where those are fewer values",
    )


class AshlOptions(BaseModel):
    """For --algorithm ashl (IEEE Transactions on Computers, 2024)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    profile: int = Field(
        5,
        ge=2,
        description="first iterations of each worker, in which it measures its times",
        json_schema_extra={"unit": "STEPS"},
    )
    coarse_steps: int = Field(
        8,
        ge=1,
        description="local steps of the slowest worker between two exchanges in the coarse stage; "
        "faster ones take more",
        json_schema_extra={"unit": "STEPS"},
    )
    fine_steps: int = Field(
        2,
        ge=1,
        description="the same in the fine stage",
        json_schema_extra={"unit": "STEPS"},
    )
    coarse_rate: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of its values that the slowest worker pushes in the coarse stage; "
        "others push more where that costs them no time",
        json_schema_extra={"unit": "SHARE"},
    )
    fine_rate: float = Field(
        0.1,
        gt=0,
        le=1,
        description="the same in the fine stage",
        json_schema_extra={"unit": "SHARE"},
    )
    bound: int = Field(
        3,
        ge=0,
        description="exchanges that a worker may be ahead of the slowest in the fine stage",
        json_schema_extra={"unit": "EXCHANGES"},
    )
    loss: float = Field(
        0.3,
        ge=0,
        description="training loss of all workers at which the fine stage begins",
        json_schema_extra={"unit": "LOSS"},
    )
    stage: Literal["auto", "coarse", "fine"] = Field(
        "auto",
        description="auto: coarse, then fine when --ashl-loss is reached; or one of them "
        "throughout. Timed computing has no loss: with auto it stays coarse",
    )
    error_feedback: bool = Field(
        False, description="add values that were not pushed to the next push, not drop them"
    )


class AdspOptions(BaseModel):
    """For --algorithm adsp (Hu, Wang, Wu; AAAI 2020)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    period: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="check period Gamma, in which every worker should commit equally often; 60 in "
        "the paper; auto: 10 mean steps",
        json_schema_extra={"unit": "SECONDS"},
    )
    min_interval: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="least time between two commits of a worker; 10 in the paper; auto: a sixth "
        "of the check period",
        json_schema_extra={"unit": "SECONDS"},
    )
    epoch: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="time between two searches of the commit rate; 1000 in the paper; auto: 16.7 "
        "check periods",
        json_schema_extra={"unit": "SECONDS"},
    )
    loss_rise: float = Field(
        0.3,
        gt=0,
        description="a rise of the training loss by this share from one check to the next also "
        "starts a search",
        json_schema_extra={"unit": "SHARE"},
    )
    end_loss: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="the search looks for the rate at which the training loss would get there "
        "first; auto: half of what it is when the search begins",
        json_schema_extra={"unit": "LOSS"},
    )
