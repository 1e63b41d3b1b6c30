"""The algorithms by name: their options, and what the options have to know of each.

The code of an algorithm is in :mod:`aladdin_mpi.algorithms`, which imports this. Algorithms of
other packages are added by entry points of the group ``aladdin_mpi.algorithms``, and by the
modules that ``ALADDIN_MPI_ALGORITHMS`` names, separated by commas.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.general import QUANTISED_BITS, GeneralOptions

ENTRY_POINTS = "aladdin_mpi.algorithms"
VARIABLE = "ALADDIN_MPI_ALGORITHMS"

Holder = Literal["servers", "first", "all"]
Optimizers = Literal["any", "by-value", "sgd"]
"""Every one; those that treat each value alike, since models are cut; momentum SGD alone."""
Clips = Literal["own", "mean", "parts"]
AlphaRule = Literal["theory", "since-last", "literal"]
"""How ALADDIN's server chooses the weight that a worker gives to the global model."""
OUTLAST_DEATHS = ("auto", "ring", "mpi")
"""The all-reduces that may stand for sums which outlast the failure of ranks."""


class OwnOptions(BaseModel):
    """An algorithm's own options; its docstring heads them in ``--help``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Own = TypeVar("Own", bound=OwnOptions)


def own(run: GeneralOptions, kind: type[Own]) -> Own:
    """Return an algorithm's own options, among those of the run."""
    return next(value for value in vars(run).values() if type(value) is kind)


@dataclass(frozen=True)
class Algorithm:
    """What the options and the run have to know of an algorithm.

    Attributes:
        options: its own, a field of the run's that is named as the algorithm.
        options_of: the algorithm after which that field is named, if that is another.
        has_servers: whether there are parameter servers.
        lockstep: all workers take the same number of steps, in rounds.
        holder: who holds the global model: the servers, each its buckets; every worker
            the same, of which the first is asked; or all workers, whose weighted mean
            it is (the consensus).
        has_centre: the servers' model is another than the workers', who are only drawn to it.
        least_workers: the smallest number of workers for which it makes sense.
        compresses: its gradients can be sent compressed.
        few_bits: its gradients and models can be sent in few bits.
        whole_models: models go whole in bf16, which the algorithm can do with.
        auto_wire: what ``--wire auto`` is, at first where it adapts.
        node_sums: whether a node can be one of its workers.
        needs_all: whether, with these options, it cannot go on without every worker.
        collective: its gradients or models travel in collectives, which have no checksums.
        optimizers: those that it can do with.
        clips: see :class:`aladdin_mpi.worker.worker.Worker`.
        server_steps: the servers' optimizers step along gradients, unless these are compressed;
            where an option ``momentum`` of the algorithm says so, that counts.
        steps_unused: parameters that a batch does not use are stepped with a gradient of zero.
        takes_writes: what a script writes into its model after a step takes part in training, if
            every worker writes the same.
        check: raises :class:`UserError` for options that do not go together.
        on_resize: what the user is told where the number of workers changes.
    """

    name: str
    options: type[OwnOptions] | None = None
    options_of: str = ""
    has_servers: bool = False
    lockstep: bool = False
    holder: Holder = "servers"
    has_centre: bool = False
    least_workers: int = 1
    compresses: bool = False
    quantises: bool = False
    whole_models: bool = True
    auto_wire: str = "fp32"
    node_sums: bool = False
    needs_all: Callable[[GeneralOptions], bool] = lambda run: False
    collective: bool = False
    optimizers: Optimizers = "any"
    clips: Clips = "own"
    server_steps: bool = False
    steps_unused: bool = False
    takes_writes: bool = False
    check: Callable[[GeneralOptions], None] = lambda run: None
    on_resize: str = ""

    @property
    def group(self) -> str:
        """The field of the run's options that holds the algorithm's own."""
        return (self.options_of or self.name).replace("-", "_")

    def wire(self, options: GeneralOptions) -> str:
        """Return the format of what is sent."""
        return self.auto_wire if options.wire == "auto" else options.wire

    def holders(self, server: int, ranks: int) -> range:
        """Return the ranks whose values make up the global model's, of a bucket of ``server``."""
        if self.holder == "servers":
            return range(server, server + 1)
        return range(1 if self.holder == "first" else ranks)


ALGORITHMS: dict[str, Algorithm] = {}
"""Every algorithm that has been declared."""


def declare(algorithm: Algorithm) -> Algorithm:
    """Make an algorithm known: from then on its name can be given for ``--algorithm``.

    Raises:
        ValueError: there is another of this name.
    """
    if algorithm.name in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm.name}: expected a new name, got one that is taken")
    ALGORITHMS[algorithm.name] = algorithm
    return algorithm


def find_algorithm(name: str) -> Algorithm:
    """Return the algorithm called ``name``.

    Raises:
        UserError: there is none.
    """
    if name not in ALGORITHMS:
        close = get_close_matches(name, ALGORITHMS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(
            f"--algorithm: expected one of {', '.join(sorted(ALGORITHMS))}, got {name!r}{hint}"
        )
    return ALGORITHMS[name]


def load_plugins() -> None:
    """Import the modules of other packages that register algorithms.

    Raises:
        UserError: a module that ``ALADDIN_MPI_ALGORITHMS`` names cannot be imported.
    """
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()
    for name in filter(None, os.environ.get(VARIABLE, "").split(",")):
        try:
            import_module(name)
        except ImportError as error:
            raise UserError(
                f"{VARIABLE}: expected modules that register algorithms, got {name!r} ({error}); "
                "add its folder to PYTHONPATH, or unset the variable"
            ) from None


class AladdinOptions(OwnOptions):
    """For --algorithm aladdin (Ko et al., CIKM 2021)."""

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


def _check_lookahead(run: GeneralOptions) -> None:
    """A worker that looks ahead needs a momentum to do so with."""
    steps = own(run, AladdinOptions).lookahead
    if steps and not run.momentum:
        raise UserError(
            f"--aladdin-lookahead: expected 0 with --momentum 0, got {steps:g}: a worker looks "
            "ahead along its momentum; leave the option out, or set --momentum"
        )


ALADDIN = declare(
    Algorithm(
        "aladdin",
        AladdinOptions,
        has_servers=True,
        node_sums=True,
        compresses=True,
        quantises=True,
        optimizers="by-value",
        check=_check_lookahead,
    )
)


class AladdinAheadOptions(OwnOptions):
    """For --algorithm aladdin-ahead."""

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


ALADDIN_AHEAD = declare(
    Algorithm(
        "aladdin-ahead",
        AladdinAheadOptions,
        has_servers=True,
        node_sums=True,
        quantises=True,
        whole_models=False,
        auto_wire="int8",
        clips="parts",
        optimizers="by-value",
        on_resize="the workers' tracks begin anew",
    )
)


class BspOptions(OwnOptions):
    """For --algorithm bsp."""

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


def _check_host_first(run: GeneralOptions) -> None:
    """The workers of a host add up whole gradients."""
    if not own(run, BspOptions).host_first:
        return
    if run.node_sums:
        raise UserError(
            "--node-sums: expected without --bsp-host-first, which adds up on the host too; leave "
            "one of the two out"
        )
    if run.compression != "none":
        raise UserError(
            f"--compression {run.compression}: expected without --bsp-host-first, which adds up "
            "whole gradients; leave one of the two out"
        )
    if run.wire in QUANTISED_BITS:
        raise UserError(
            f"--wire {run.wire}: expected without --bsp-host-first, which adds up whole "
            "gradients; use --wire bf16, or leave one of the two out"
        )


BSP = declare(
    Algorithm(
        "bsp",
        BspOptions,
        has_servers=True,
        node_sums=True,
        lockstep=True,
        compresses=True,
        quantises=True,
        server_steps=True,
        needs_all=lambda run: own(run, BspOptions).host_first,
        optimizers="by-value",
        check=_check_host_first,
    )
)


class AspOptions(OwnOptions):
    """For --algorithm asp (Dean et al., NIPS 2012)."""

    momentum: Literal["server", "worker"] = Field(
        "worker",
        description="where momentum and weight decay are added: to the gradients as they arrive "
        "at the server, or at each worker before it sends",
    )
    normalize: Literal["workers", "none"] = Field(
        "workers",
        description="what a gradient is divided by at the server: the number of workers that have "
        "not failed, or nothing",
    )


ASP = declare(
    Algorithm(
        "asp",
        AspOptions,
        has_servers=True,
        node_sums=True,
        compresses=True,
        quantises=True,
        optimizers="by-value",
    )
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


SSP = declare(
    Algorithm(
        "ssp",
        SspOptions,
        has_servers=True,
        compresses=True,
        quantises=True,
        optimizers="by-value",
    )
)


class ShatOptions(AspOptions):
    """For --algorithm shat (Ko et al., Applied Sciences 12, 292, 2022)."""

    log: Literal["e", "2"] = Field(
        "e", description="base of the logarithm in alpha = 1 - n/(c log n)"
    )
    self_update: bool = Field(
        True, description="a worker applies its gradient to its own model before it blends"
    )


SHAT = declare(
    Algorithm(
        "shat",
        ShatOptions,
        has_servers=True,
        compresses=True,
        quantises=True,
        optimizers="by-value",
    )
)


class EasgdOptions(OwnOptions):
    """For --algorithm easgd and eamsgd (Zhang, Choromanska, LeCun; NeurIPS 2015)."""

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
    exchange: Literal["after", "before"] = Field(
        "after",
        description="when a worker meets the centre: after every tau-th step; or before the step "
        "that follows, along the gradient at the model before the exchange, as in the paper",
    )


EASGD = declare(
    Algorithm(
        "easgd",
        EasgdOptions,
        has_servers=True,
        has_centre=True,
        quantises=True,
        on_resize="what the workers' own models were ahead of the centre is dropped",
    )
)
EAMSGD = declare(
    Algorithm(
        "eamsgd",
        EasgdOptions,
        options_of="easgd",
        has_servers=True,
        has_centre=True,
        quantises=True,
        optimizers="sgd",
        steps_unused=True,
        on_resize="what the workers' own models were ahead of the centre is dropped",
    )
)


class ArSgdOptions(OwnOptions):
    """For --algorithm ar-sgd."""

    allreduce: Literal["auto", "ring", "mpi", "horovod", "torch"] = Field(
        "auto",
        description="what sums the gradients: messages around a ring, MPI's own all-reduce, "
        "Horovod (installed by make horovod), or torch.distributed (gloo, or NCCL on GPUs); auto: "
        "NCCL where each rank has a GPU to itself, and not where the others go on after a worker's "
        "death; else the ring between hosts, and MPI's own on one",
    )


AR_SGD = declare(
    Algorithm(
        "ar-sgd",
        ArSgdOptions,
        node_sums=True,
        lockstep=True,
        holder="first",
        compresses=True,
        needs_all=lambda run: (
            run.compression != "none" or own(run, ArSgdOptions).allreduce not in OUTLAST_DEATHS
        ),
        collective=True,
        clips="mean",
        takes_writes=True,
    )
)


class LocalSgdOptions(OwnOptions):
    """For --algorithm local-sgd (Stich, ICLR 2019; Lin et al., ICLR 2020)."""

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
    allreduce: Literal["auto", "ring", "mpi", "horovod", "torch"] = Field(
        "auto", description="what sums the models, as --ar-sgd-allreduce"
    )


LOCAL_SGD = declare(
    Algorithm(
        "local-sgd",
        LocalSgdOptions,
        node_sums=True,
        lockstep=True,
        holder="all",
        needs_all=lambda run: own(run, LocalSgdOptions).allreduce not in OUTLAST_DEATHS,
        collective=True,
    )
)


class GoSgdOptions(OwnOptions):
    """For --algorithm gosgd (Blot et al., 2016)."""

    p: float = Field(
        0.01,
        gt=0,
        le=1,
        description="probability that a worker sends its model to another one after a step",
        json_schema_extra={"unit": "PROBABILITY"},
    )


GOSGD = declare(
    Algorithm(
        "gosgd",
        GoSgdOptions,
        holder="all",
        least_workers=2,
        on_resize="they begin from the weighted mean of all models, with equal weights",
    )
)


class AdPsgdOptions(OwnOptions):
    """For --algorithm ad-psgd (Lian et al., ICML 2018)."""

    graph: Literal["random", "exponential"] = Field(
        "random",
        description="whom an active worker averages with: a passive one drawn by chance, or those "
        "0, 1, 2, 4, ... further, in turn",
    )


AD_PSGD = declare(
    Algorithm(
        "ad-psgd",
        AdPsgdOptions,
        holder="all",
        least_workers=2,
        on_resize="they begin from the mean of all models",
    )
)


class SgpOptions(OwnOptions):
    """For --algorithm sgp (Assran et al., ICML 2019)."""

    graph: Literal["exponential", "ring"] = Field(
        "exponential",
        description="whom a worker sends to: 1, 2, 4, ... workers further, in turn, or always the "
        "next",
    )


SGP = declare(
    Algorithm(
        "sgp",
        SgpOptions,
        node_sums=True,
        lockstep=True,
        holder="all",
        least_workers=2,
        on_resize="they begin from the weighted mean of all models, with equal weights",
    )
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
    optimize: Literal["model", "numerator"] = Field(
        "model",
        description="what the optimizer, and so the weight decay, is applied to: the model z that "
        "gradients are computed at, or the push-sum's numerator x = w z, as in the authors' code",
    )


OSGP = declare(
    Algorithm(
        "osgp",
        OsgpOptions,
        node_sums=True,
        lockstep=True,
        holder="all",
        least_workers=2,
        on_resize="they begin from the weighted mean of all models, with equal weights",
    )
)


class MultistepOptions(OwnOptions):
    """For --algorithm multistep (Lee et al., MLHPC 2018)."""

    exchange: Literal["auto", "gradients", "activations"] = Field(
        "auto",
        description="what is exchanged for the gradients of fully connected layers: gradients, "
        "activations and errors, or whichever are fewer values; auto: gradients if --clip, "
        "--max-loss or --no-wait-free is given",
    )


def whole_gradient_options(options: GeneralOptions) -> list[str]:
    """Return the options that act on a whole gradient before any of it may be sent.

    Activations leave during the forward pass, and errors do not pass through the gradient.
    """
    return [
        message
        for message, is_given in (
            ("cannot be combined with --clip", options.clip is not None),
            ("cannot be combined with --max-loss", options.max_loss is not None),
            ("requires --wait-free", not options.wait_free),
        )
        if is_given
    ]


def check_exchange(options: GeneralOptions) -> None:
    """Check that the other options allow ``--multistep-exchange activations``.

    Raises:
        UserError: one of them needs the whole gradient before it is sent.
    """
    conflicts = whole_gradient_options(options)
    if conflicts and own(options, MultistepOptions).exchange == "activations":
        raise UserError(
            f"--multistep-exchange activations {conflicts[0]}: activations are sent before the "
            "whole gradient is known. Use --multistep-exchange auto."
        )


MULTISTEP = declare(
    Algorithm(
        "multistep",
        MultistepOptions,
        lockstep=True,
        holder="first",
        needs_all=lambda run: True,
        collective=True,
        optimizers="sgd",
        steps_unused=True,
        check=check_exchange,
    )
)


class AshlOptions(OwnOptions):
    """For --algorithm ashl (IEEE Transactions on Computers, 2024)."""

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


ASHL = declare(
    Algorithm(
        "ashl",
        AshlOptions,
        has_servers=True,
        quantises=True,
        on_resize="the workers are measured for a new plan",
    )
)


class AdspOptions(OwnOptions):
    """For --algorithm adsp (Hu, Wang, Wu; AAAI 2020)."""

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


ADSP = declare(
    Algorithm(
        "adsp",
        AdspOptions,
        has_servers=True,
        quantises=True,
        on_resize="the rate of commits is searched anew",
    )
)
