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

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.general import QUANTISED_BITS, GeneralOptions, PositiveShare, Share
from aladdin_mpi.options.reader import option

ENTRY_POINTS = "aladdin_mpi.algorithms"
VARIABLE = "ALADDIN_MPI_ALGORITHMS"

Holder = Literal["servers", "first", "all"]
Optimizers = Literal["any", "by-value", "sgd"]
"""Every one; those that treat each value alike, since models are cut; momentum SGD alone."""
Clips = Literal["own", "mean", "parts"]
AlphaRule = Literal["theory", "since-last", "literal"]
"""How ALADDIN's server chooses the weight that a worker gives to the global model."""
Allreduce = Literal["auto", "ring", "mpi", "horovod", "torch"]
FAULT_TOLERANT_ALLREDUCES = ("auto", "ring", "mpi")
"""The all-reduces that may stand for sums which outlast the failure of ranks."""
FROM_WEIGHTED_MEAN = "they begin from the weighted mean of all models, with equal weights"
FROM_CENTRE = "what the workers' own models were ahead of the centre is dropped"


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


def declare(algorithm: Algorithm) -> None:
    """Make an algorithm known: from then on its name can be given for ``--algorithm``.

    Raises:
        ValueError: there is another of this name.
    """
    if algorithm.name in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm.name}: expected a new name, got one that is taken")
    ALGORITHMS[algorithm.name] = algorithm


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

    pi: PositiveInt = option(
        4, "gradients that a worker sends between two models sent back to it", "GRADIENTS"
    )
    alpha: Share | AlphaRule = option(
        "theory",
        "weight of the global model when a worker blends it into its own: a number from 0 to 1, "
        "or a rule; with n workers, theory: 1-1/sqrt(n*pi); since-last: 1-1/sqrt(c), c the "
        "gradients at the server since its last model for this worker; literal: the same, c since "
        "its last model for any worker, as printed",
        "WEIGHT",
    )
    normalize: Literal["count", "workers", "none"] = option(
        "workers",
        "what accumulated gradients are divided by: their count, the number of workers, or nothing",
    )
    trigger: Literal["accumulate", "drop"] = option(
        "accumulate",
        "whether the gradient that triggers an update is added to it, or dropped as the paper "
        "prints it",
    )
    momentum: Literal["worker", "split"] = option(
        "worker",
        "worker: workers send steps that contain their momentum, and the server adds them "
        "plainly; split: workers send raw gradients, and both keep a momentum of their own",
    )
    lookahead: NonNegativeFloat = option(
        0.0,
        "steps of its own momentum by which a worker moves the global model on before it blends "
        "it in, for what other workers are about to add to it; 0: not, as in the paper",
        "STEPS",
    )
    self_update: bool = option(
        True,
        "a worker applies its gradient to its own model at once; otherwise its model stays as it "
        "is until the global one comes",
    )
    lazy: bool = option(
        True, "the global model is updated when a worker is sent it; otherwise by every gradient"
    )
    ring: PositiveInt = option(
        2,
        "gradients of a worker on the wire at once; more are summed until one is free",
        "GRADIENTS",
    )


def _check_lookahead(run: GeneralOptions) -> None:
    """A worker that looks ahead needs a momentum to do so with."""
    steps = own(run, AladdinOptions).lookahead
    if steps and not run.momentum:
        raise UserError(
            f"--aladdin-lookahead: expected 0 with --momentum 0, got {steps:g}: a worker looks "
            "ahead along its momentum; leave the option out, or set --momentum"
        )


ALADDIN = Algorithm(
    "aladdin",
    AladdinOptions,
    has_servers=True,
    node_sums=True,
    compresses=True,
    quantises=True,
    optimizers="by-value",
    check=_check_lookahead,
)


class AladdinAheadOptions(OwnOptions):
    """For --algorithm aladdin-ahead."""

    pi: PositiveInt | Literal["auto"] = option(
        "auto",
        "gradients that a worker sends between two models sent back to it; auto: one, and more "
        "where the links have no room",
        "GRADIENTS",
    )
    weight: Share | Literal["auto"] = option(
        "auto",
        "what a worker's own gradient stands for of everybody's, until a model holds it; auto: "
        "half its age in rounds, between 1/2 and 1",
        "WEIGHT",
    )
    lookahead: NonNegativeFloat = option(
        1.0,
        "rounds of the workers by which a gradient is computed ahead of the model, along the "
        "momentum of all",
        "ROUNDS",
    )
    send: Share | Literal["auto"] = option(
        "auto",
        "share of a worker's next gradient that has reached a server when it sends this worker "
        "its models; auto: as late as they still arrive in time",
        "SHARE",
    )
    ring: PositiveInt = option(
        2,
        "gradients of a worker on the wire at once; more are summed until one is free",
        "GRADIENTS",
    )


ALADDIN_AHEAD = Algorithm(
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


class BspOptions(OwnOptions):
    """For --algorithm bsp."""

    host_first: bool = option(
        False,
        "add up the gradients of a host's workers on the host; one worker of each host talks to "
        "the servers",
    )
    group: PositiveInt | None = option(
        None,
        "with --bsp-host-first: most workers that are added up together, where a host is several "
        "machines in one, such as containers or sockets",
        "WORKERS",
        default_text="all of a host",
    )


def _check_host_first(run: GeneralOptions) -> None:
    """The workers of a host add up whole gradients."""
    if not own(run, BspOptions).host_first:
        return
    whole = "which adds up whole gradients"
    for flag, is_given, why in (
        ("--node-sums", run.node_sums, "which adds up on the host too; leave"),
        (f"--compression {run.compression}", run.compression != "none", f"{whole}; leave"),
        (f"--wire {run.wire}", run.wire in QUANTISED_BITS, f"{whole}; use --wire bf16, or leave"),
    ):
        if is_given:
            raise UserError(f"{flag}: expected without --bsp-host-first, {why} one of the two out")


BSP = Algorithm(
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


class AspOptions(OwnOptions):
    """For --algorithm asp (Dean et al., NIPS 2012)."""

    momentum: Literal["server", "worker"] = option(
        "worker",
        "where momentum and weight decay are added: to the gradients as they arrive at the "
        "server, or at each worker before it sends",
    )
    normalize: Literal["workers", "none"] = option(
        "workers",
        "what a gradient is divided by at the server: the number of workers that have not failed, "
        "or nothing",
    )


ASP = Algorithm(
    "asp",
    AspOptions,
    has_servers=True,
    node_sums=True,
    compresses=True,
    quantises=True,
    optimizers="by-value",
)


class SspOptions(AspOptions):
    """For --algorithm ssp (Ho et al., NIPS 2013)."""

    bound: NonNegativeInt = option(3, "steps that a worker may be ahead of the slowest", "STEPS")
    pull: Literal["always", "on-bound"] = option(
        "always",
        "when a worker takes the server's model: after every step (Ho et al.), or only when it "
        "has gone bound + 1 steps without (Ko et al., IPDPS 2021)",
    )
    self_update: Literal["workers", "none"] = option(
        "none",
        "with --ssp-pull on-bound: what a worker divides its gradient by when it applies it to "
        "its own model: the number of workers, or nothing",
    )
    coalesce: bool = option(
        True,
        "with --ssp-pull on-bound: add a gradient to the next one while the last is still on the "
        "wire; otherwise wait until it has gone",
    )


SSP = Algorithm(
    "ssp", SspOptions, has_servers=True, compresses=True, quantises=True, optimizers="by-value"
)


class ShatOptions(AspOptions):
    """For --algorithm shat (Ko et al., Applied Sciences 12, 292, 2022)."""

    log: Literal["e", "2"] = option("e", "base of the logarithm in alpha = 1 - n/(c log n)")
    self_update: bool = option(
        True, "a worker applies its gradient to its own model before it blends"
    )


SHAT = Algorithm(
    "shat", ShatOptions, has_servers=True, compresses=True, quantises=True, optimizers="by-value"
)


class EasgdOptions(OwnOptions):
    """For --algorithm easgd and eamsgd (Zhang, Choromanska, LeCun; NeurIPS 2015)."""

    tau: PositiveInt = option(2, "steps of a worker between two exchanges with the centre", "STEPS")
    alpha: Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] = option(
        "auto",
        "how far a worker and the centre move towards each other; auto: 0.9 divided by the number "
        "of workers",
        "WEIGHT",
    )
    exchange: Literal["after", "before"] = option(
        "after",
        "when a worker meets the centre: after every tau-th step; or before the step that "
        "follows, along the gradient at the model before the exchange, as in the paper",
    )


EASGD = Algorithm(
    "easgd", EasgdOptions, has_servers=True, has_centre=True, quantises=True, on_resize=FROM_CENTRE
)
EAMSGD = Algorithm(
    "eamsgd",
    EasgdOptions,
    options_of="easgd",
    has_servers=True,
    has_centre=True,
    quantises=True,
    optimizers="sgd",
    steps_unused=True,
    on_resize=FROM_CENTRE,
)


class ArSgdOptions(OwnOptions):
    """For --algorithm ar-sgd."""

    allreduce: Allreduce = option(
        "auto",
        "what sums the gradients: messages around a ring, MPI's own all-reduce, Horovod "
        "(installed by make horovod), or torch.distributed (gloo, or NCCL on GPUs); auto: NCCL "
        "where each rank has a GPU to itself, and not where the others go on after a worker's "
        "death; else the ring between hosts, and MPI's own on one",
    )


AR_SGD = Algorithm(
    "ar-sgd",
    ArSgdOptions,
    node_sums=True,
    lockstep=True,
    holder="first",
    compresses=True,
    needs_all=lambda run: (
        run.compression != "none"
        or own(run, ArSgdOptions).allreduce not in FAULT_TOLERANT_ALLREDUCES
    ),
    collective=True,
    clips="mean",
    takes_writes=True,
)


class LocalSgdOptions(OwnOptions):
    """For --algorithm local-sgd (Stich, ICLR 2019; Lin et al., ICLR 2020)."""

    steps: PositiveInt = option(
        8, "local steps of a worker between two averages of all models", "STEPS"
    )
    post: NonNegativeInt = option(
        0,
        "first samples of the run, all workers together, in which models are averaged after every "
        "step (post-local SGD); 0: none",
        "SAMPLES",
    )
    allreduce: Allreduce = option("auto", "what sums the models, as --ar-sgd-allreduce")


LOCAL_SGD = Algorithm(
    "local-sgd",
    LocalSgdOptions,
    node_sums=True,
    lockstep=True,
    holder="all",
    needs_all=lambda run: own(run, LocalSgdOptions).allreduce not in FAULT_TOLERANT_ALLREDUCES,
    collective=True,
)


class GoSgdOptions(OwnOptions):
    """For --algorithm gosgd (Blot et al., 2016)."""

    p: PositiveShare = option(
        0.01, "probability that a worker sends its model to another one after a step", "PROBABILITY"
    )


GOSGD = Algorithm(
    "gosgd", GoSgdOptions, holder="all", least_workers=2, on_resize=FROM_WEIGHTED_MEAN
)


class AdPsgdOptions(OwnOptions):
    """For --algorithm ad-psgd (Lian et al., ICML 2018)."""

    graph: Literal["random", "exponential"] = option(
        "random",
        "whom an active worker averages with: a passive one drawn by chance, or those 0, 1, 2, 4, "
        "... further, in turn",
    )


AD_PSGD = Algorithm(
    "ad-psgd",
    AdPsgdOptions,
    holder="all",
    least_workers=2,
    on_resize="they begin from the mean of all models",
)


class SgpOptions(OwnOptions):
    """For --algorithm sgp (Assran et al., ICML 2019)."""

    graph: Literal["exponential", "ring"] = option(
        "exponential",
        "whom a worker sends to: 1, 2, 4, ... workers further, in turn, or always the next",
    )


SGP = Algorithm(
    "sgp",
    SgpOptions,
    node_sums=True,
    lockstep=True,
    holder="all",
    least_workers=2,
    on_resize=FROM_WEIGHTED_MEAN,
)


class OsgpOptions(SgpOptions):
    """For --algorithm osgp (Assran et al., ICML 2019)."""

    tau: PositiveInt = option(1, "steps that a message may take before it is waited for", "STEPS")
    order: Literal["add-first", "push-first"] = option(
        "add-first",
        "what a worker does after a step: add the messages of earlier steps that have come, then "
        "send; or send, then add",
    )
    optimize: Literal["model", "numerator"] = option(
        "model",
        "what the optimizer, and so the weight decay, is applied to: the model z that gradients "
        "are computed at, or the push-sum's numerator x = w z, as in the authors' code",
    )


OSGP = Algorithm(
    "osgp",
    OsgpOptions,
    node_sums=True,
    lockstep=True,
    holder="all",
    least_workers=2,
    on_resize=FROM_WEIGHTED_MEAN,
)


class MultistepOptions(OwnOptions):
    """For --algorithm multistep (Lee et al., MLHPC 2018)."""

    exchange: Literal["auto", "gradients", "activations"] = option(
        "auto",
        "what is exchanged for the gradients of fully connected layers: gradients, activations "
        "and errors, or whichever are fewer values; auto: gradients if --clip, --max-loss or "
        "--no-wait-free is given",
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


MULTISTEP = Algorithm(
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


class AshlOptions(OwnOptions):
    """For --algorithm ashl (IEEE Transactions on Computers, 2024)."""

    profile: int = option(
        5, "first iterations of each worker, in which it measures its times", "STEPS", ge=2
    )
    coarse_steps: PositiveInt = option(
        8,
        "local steps of the slowest worker between two exchanges in the coarse stage; faster ones "
        "take more",
        "STEPS",
    )
    fine_steps: PositiveInt = option(2, "the same in the fine stage", "STEPS")
    coarse_rate: PositiveShare = option(
        1.0,
        "share of its values that the slowest worker pushes in the coarse stage; others push more "
        "where that costs them no time",
        "SHARE",
    )
    fine_rate: PositiveShare = option(0.1, "the same in the fine stage", "SHARE")
    bound: NonNegativeInt = option(
        3, "exchanges that a worker may be ahead of the slowest in the fine stage", "EXCHANGES"
    )
    loss: NonNegativeFloat = option(
        0.3, "training loss of all workers at which the fine stage begins", "LOSS"
    )
    stage: Literal["auto", "coarse", "fine"] = option(
        "auto",
        "auto: coarse, then fine when --ashl-loss is reached; or one of them throughout. Timed "
        "computing has no loss: with auto it stays coarse",
    )
    error_feedback: bool = option(
        False, "add values that were not pushed to the next push, not drop them"
    )


ASHL = Algorithm(
    "ashl",
    AshlOptions,
    has_servers=True,
    quantises=True,
    on_resize="the workers are measured for a new plan",
)


class AdspOptions(OwnOptions):
    """For --algorithm adsp (Hu, Wang, Wu; AAAI 2020)."""

    period: PositiveFloat | Literal["auto"] = option(
        "auto",
        "check period Gamma, in which every worker should commit equally often; 60 in the paper; "
        "auto: 10 mean steps",
        "SECONDS",
    )
    min_interval: PositiveFloat | Literal["auto"] = option(
        "auto",
        "least time between two commits of a worker; 10 in the paper; auto: a sixth of the check "
        "period",
        "SECONDS",
    )
    epoch: PositiveFloat | Literal["auto"] = option(
        "auto",
        "time between two searches of the commit rate; 1000 in the paper; auto: 16.7 check periods",
        "SECONDS",
    )
    loss_rise: PositiveFloat = option(
        0.3,
        "a rise of the training loss by this share from one check to the next also starts a search",
        "SHARE",
    )
    end_loss: PositiveFloat | Literal["auto"] = option(
        "auto",
        "the search looks for the rate at which the training loss would get there first; auto: "
        "half of what it is when the search begins",
        "LOSS",
    )


ADSP = Algorithm(
    "adsp",
    AdspOptions,
    has_servers=True,
    quantises=True,
    on_resize="the rate of commits is searched anew",
)

ALGORITHMS: dict[str, Algorithm] = {
    each.name: each for each in tuple(globals().values()) if isinstance(each, Algorithm)
}
"""Every algorithm that has been declared, those of this file first."""
