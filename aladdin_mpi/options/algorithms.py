"""The algorithms by name: their options and properties.

Their code is in :mod:`aladdin_mpi.algorithms`, which imports this module. Other packages add
algorithms by entry points of the group ``aladdin_mpi.algorithms``, or by the modules that
``ALADDIN_MPI_ALGORITHMS`` names, separated by commas.
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
from aladdin_mpi.options.fields import option
from aladdin_mpi.options.general import (
    QUANTISED_BITS,
    SUM_BITS,
    Fraction,
    GeneralOptions,
    PositiveShare,
    Share,
)

ENTRY_POINTS = "aladdin_mpi.algorithms"
VARIABLE = "ALADDIN_MPI_ALGORITHMS"

Holder = Literal["servers", "first", "all"]
Optimizers = Literal["any", "by-value", "sgd"]
"""All; those that treat each value alike, since models are split; momentum SGD only."""
Clips = Literal["own", "mean", "parts"]
Summed = Literal["gradients", "progress"]
AlphaRule = Literal["theory", "since-last", "literal"]
"""Rules by which ALADDIN's server chooses a worker's weight of the global model."""
Allreduce = Literal["auto", "ring", "mpi", "horovod", "torch"]
FAULT_TOLERANT_ALLREDUCES = ("auto", "ring", "mpi")
"""The all-reduces that may stand for sums which outlast the failure of ranks."""
FROM_WEIGHTED_MEAN = "they start from the weighted mean of all models, with equal weights"
FROM_CENTRE = "the differences of the workers' models from the centre are dropped"


class OwnOptions(BaseModel):
    """Base of an algorithm's own options; the docstring is their heading in ``--help``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Own = TypeVar("Own", bound=OwnOptions)


def own(run: GeneralOptions, kind: type[Own]) -> Own:
    """Return the options of type ``kind``, an algorithm's own, from those of the run."""
    return next(value for value in vars(run).values() if type(value) is kind)


@dataclass(frozen=True)
class Algorithm:
    """Properties of an algorithm that the options and the run depend on.

    Attributes:
        options: its own options, in the field of the run's options named after the algorithm.
        options_of: the algorithm after which that field is named, if it is another.
        has_servers: whether it uses parameter servers.
        lockstep: all workers take the same number of steps, in rounds.
        round_steps: number of such rounds between two exchanges, with these options, if a
            checkpoint between them changes the result.
        holder: location of the global model. "servers": each server has its buckets; "first":
            every worker has the same model, and the first one's is used; "all": the weighted
            mean of all workers' models (the consensus).
        has_centre: workers have their own models, which are drawn to the servers' model.
        least_workers: smallest number of workers that it requires.
        compresses: gradients can be compressed by deep gradient compression.
        quantises: gradients and models can be quantised.
        all_reduces: summand of its all-reduces, which can be quantised or approximated by a low
            rank: gradients, or differences of models; None: these cannot.
        whole_models: the algorithm tolerates models that are sent rounded to bf16.
        auto_wire: the format of ``--wire auto``; the initial one if it adapts.
        islands: a worker can be an island of several ranks.
        needs_all: whether, with these options, it cannot continue without every worker.
        collective: gradients or models are sent in collectives, which have no checksums.
        optimizers: supported optimizers.
        is_nesterov: its momentum is Nesterov's, also without ``--nesterov``.
        clips: see :class:`aladdin_mpi.worker.worker.Worker`.
        server_steps: the servers' optimizers step along gradients, unless these are compressed;
            an option ``momentum`` of the algorithm takes precedence.
        steps_unused: parameters that a batch does not use are stepped with a gradient of zero.
        takes_writes: values that a script writes into its model after a step remain, if every
            worker writes the same.
        bounds_staleness: without rounds, a worker may wait for the steps of a slower one.
        check: raises :class:`UserError` for options that cannot be combined.
        on_resize: message to the user when the number of workers changes.
    """

    name: str
    options: type[OwnOptions] | None = None
    options_of: str = ""
    has_servers: bool = False
    lockstep: bool = False
    round_steps: Callable[[GeneralOptions], int] = lambda run: 1
    holder: Holder = "servers"
    has_centre: bool = False
    least_workers: int = 1
    compresses: bool = False
    quantises: bool = False
    all_reduces: Summed | None = None
    whole_models: bool = True
    auto_wire: str = "fp32"
    islands: bool = False
    needs_all: Callable[[GeneralOptions], bool] = lambda run: False
    collective: bool = False
    optimizers: Optimizers = "any"
    is_nesterov: bool = False
    clips: Clips = "own"
    server_steps: bool = False
    steps_unused: bool = False
    takes_writes: bool = False
    bounds_staleness: bool = False
    check: Callable[[GeneralOptions], None] = lambda run: None
    on_resize: str = ""

    @property
    def averages_gradients(self) -> bool:
        """Whether every step is made with the mean of all workers' gradients."""
        return self.lockstep and self.holder != "all" and self.all_reduces != "progress"

    @property
    def has_fixed_format(self) -> bool:
        """Whether ``--wire`` cannot change the format of its messages."""
        return not (self.whole_models or self.quantises)

    @property
    def group(self) -> str:
        """The field of the run's options that contains the algorithm's own."""
        return (self.options_of or self.name).replace("-", "_")

    def wire(self, options: GeneralOptions) -> str:
        """Return the number format of messages."""
        return self.auto_wire if options.wire == "auto" else options.wire

    def holders(self, server: int, ranks: int) -> range:
        """Return the ranks whose values make up the global model in a bucket of ``server``."""
        if self.holder == "servers":
            return range(server, server + 1)
        return range(1 if self.holder == "first" else ranks)


def declare(algorithm: Algorithm) -> None:
    """Register an algorithm, whose name can then be passed as ``--algorithm``.

    Raises:
        ValueError: the name is already registered.
    """
    if algorithm.name in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm.name}: expected a new name, got one that is taken")
    ALGORITHMS[algorithm.name] = algorithm


def find_algorithm(name: str, flag: str = "--algorithm") -> Algorithm:
    """Return the algorithm called ``name``, as the option ``flag`` requests.

    Raises:
        UserError: no algorithm has this name.
    """
    if name not in ALGORITHMS:
        close = get_close_matches(name, ALGORITHMS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(
            f"{flag}: expected one of {', '.join(sorted(ALGORITHMS))}, got {name!r}{hint}"
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

    pi: PositiveInt = option(4, "gradients that a worker sends per model it receives", "GRADIENTS")
    alpha: Share | AlphaRule = option(
        "theory",
        "weight of the global model when a worker blends it into its own",
        "WEIGHT",
        details="a number from 0 to 1, or a rule; theory: 1-1/sqrt(n*pi) with n workers; "
        "since-last: 1-1/sqrt(c), where c gradients have arrived since the server's last model "
        "for this worker; literal: the same since its last model for any worker, as printed in "
        "the paper",
    )
    normalize: Literal["count", "workers", "none"] = option(
        "workers",
        "divisor of accumulated gradients: their count, the workers, or none",
    )
    trigger: Literal["accumulate", "drop"] = option(
        "accumulate",
        "handling of the gradient that triggers an update",
        details="accumulate: add it first; drop: discard it, as printed in the paper",
    )
    momentum: Literal["worker", "split"] = option(
        "worker",
        "location of the momentum",
        details="worker: workers send steps that include it, and the server adds them; split: "
        "workers send raw gradients, and the server and each worker have their own momentum",
    )
    lookahead: NonNegativeFloat = option(
        0.0,
        "steps by which a worker moves a received model along its momentum",
        "STEPS",
        details="anticipates gradients of other workers that are in flight; 0: none, as in the "
        "paper",
    )
    self_update: bool = option(
        True,
        "apply a worker's gradient to its own model immediately",
        details="otherwise its model changes only when the global one arrives",
    )
    lazy: bool = option(
        True,
        "update the global model only when it is sent to a worker",
        details="otherwise on every gradient",
    )
    ring: PositiveInt = option(
        2,
        "gradients of a worker in flight at once; further ones are summed",
        "GRADIENTS",
    )


def _check_lookahead(run: GeneralOptions) -> None:
    """Check that a worker that looks ahead has a momentum."""
    steps = own(run, AladdinOptions).lookahead
    if steps and not run.momentum:
        raise UserError(
            "--aladdin-lookahead requires a momentum above 0, along which workers look ahead. "
            "Set --momentum, or leave --aladdin-lookahead out."
        )


ALADDIN = Algorithm(
    "aladdin",
    AladdinOptions,
    has_servers=True,
    islands=True,
    compresses=True,
    quantises=True,
    optimizers="by-value",
    check=_check_lookahead,
)


class AladdinAheadOptions(OwnOptions):
    """For --algorithm aladdin-ahead."""

    pi: PositiveInt | Literal["auto"] = option(
        "auto",
        "gradients that a worker sends per model it receives",
        "GRADIENTS",
        details="auto: 1, or more while links are saturated",
    )
    weight: Share | Literal["auto"] = option(
        "auto",
        "weight of a worker's own gradient until a model includes it",
        "WEIGHT",
        details="as a share of all workers' gradients; auto: half its age in rounds, between 1/2 "
        "and 1",
    )
    lookahead: NonNegativeFloat | Literal["auto"] = option(
        "auto",
        "rounds by which gradients are computed ahead of the model",
        "ROUNDS",
        details="extrapolated along the global momentum; a round is one gradient per worker; "
        "auto: 1, or 3 if the optimizer's momentum is an average, as Adam's",
    )
    send: Share | Literal["auto"] = option(
        "auto",
        "share of a worker's next gradient after which models are sent to it",
        "SHARE",
        details="auto: as late as possible for models to arrive in time",
    )
    sync_rounds: NonNegativeInt = option(
        10,
        "rounds at the start of the run in which workers wait for each other",
        "ROUNDS",
        details="each at most as long as its step took, until the global momentum is known",
    )
    ring: PositiveInt = option(
        2,
        "gradients of a worker in flight at once; further ones are summed",
        "GRADIENTS",
    )


ALADDIN_AHEAD = Algorithm(
    "aladdin-ahead",
    AladdinAheadOptions,
    has_servers=True,
    islands=True,
    quantises=True,
    whole_models=False,
    auto_wire="int8",
    clips="parts",
    optimizers="by-value",
    on_resize="the workers' tracks are reset",
)


class AladdinLocalOptions(OwnOptions):
    """For --algorithm aladdin-local, for links that cannot carry a gradient per step."""

    share: PositiveShare | Literal["auto"] = option(
        "auto",
        "share of the model's values in each message",
        "SHARE",
        details="the signs of the largest; 0.5 and more sends 1 to 2 bits per value; auto: as "
        "much as the link carries during a step",
    )
    keep: Share = option(
        0.5,
        "share of own steps that stays after the global model includes them",
        "SHARE",
        details="until it includes the next ones, as other workers' steps are still under way",
    )
    mix: Share = option(
        0.3,
        "weight of the global model's movement in the optimizer's momentum",
        "WEIGHT",
        details="for SGD with momentum, Adam and AdamW; other optimizers ignore it",
    )


ALADDIN_LOCAL = Algorithm(
    "aladdin-local",
    AladdinLocalOptions,
    has_servers=True,
    islands=True,
    whole_models=False,
    on_resize="the steps that the servers lack are averaged",
)


class BspOptions(OwnOptions):
    """For --algorithm bsp."""

    host_first: bool = option(
        False,
        "add gradients on each host first",
        details="one worker of each host communicates with the servers",
    )
    group: PositiveInt | None = option(
        None,
        "largest number of workers aggregated into one",
        "WORKERS",
        default_text="all of a host",
        details="requires --bsp-host-first; for hosts with several sockets or machines",
    )


def _check_host_first(run: GeneralOptions) -> None:
    """Check that ``host_first``, which adds whole gradients, fits the other options."""
    if not own(run, BspOptions).host_first:
        return
    whole = "which sums whole gradients"
    island = run.island_flag
    for flag, is_given, why in (
        (island, bool(island), "which already sums gradients on the host. Leave"),
        (f"--compression {run.compression}", run.compression != "none", f"{whole}. Leave"),
        (f"--wire {run.wire}", run.wire in QUANTISED_BITS, f"{whole}. Use --wire bf16, or leave"),
    ):
        if is_given:
            raise UserError(f"{flag} cannot be combined with --bsp-host-first, {why} one out.")


BSP = Algorithm(
    "bsp",
    BspOptions,
    has_servers=True,
    islands=True,
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
        "location of momentum and weight decay",
        details="server: applied when gradients arrive; worker: before they are sent",
    )
    normalize: Literal["workers", "none"] = option(
        "workers",
        "divisor of gradients at the server: surviving workers, or none",
    )


ASP = Algorithm(
    "asp",
    AspOptions,
    has_servers=True,
    islands=True,
    compresses=True,
    quantises=True,
    optimizers="by-value",
)


class SspOptions(AspOptions):
    """For --algorithm ssp (Ho et al., NIPS 2013)."""

    bound: NonNegativeInt = option(3, "steps that a worker may be ahead of the slowest", "STEPS")
    pull: Literal["always", "on-bound"] = option(
        "always",
        "time at which a worker fetches the server's model",
        details="always: after every step (Ho et al.); on-bound: after bound + 1 steps without a "
        "fetch (Ko et al., IPDPS 2021)",
    )
    self_update: Literal["workers", "none"] = option(
        "none",
        "divisor of a worker's gradient for its own model",
        details="used with --ssp-pull on-bound",
    )
    coalesce: bool = option(
        True,
        "sum gradients while the previous one is in flight",
        details="used with --ssp-pull on-bound; otherwise the worker waits",
    )


SSP = Algorithm(
    "ssp",
    SspOptions,
    has_servers=True,
    compresses=True,
    quantises=True,
    optimizers="by-value",
    bounds_staleness=True,
)


class ShatOptions(AspOptions):
    """For --algorithm shat (Ko et al., Applied Sciences 12, 292, 2022)."""

    log: Literal["e", "2"] = option("e", "base of the logarithm in alpha = 1 - n/(c log n)")
    self_update: bool = option(True, "apply a worker's gradient to its own model before blending")


SHAT = Algorithm(
    "shat", ShatOptions, has_servers=True, compresses=True, quantises=True, optimizers="by-value"
)


class EasgdOptions(OwnOptions):
    """For --algorithm easgd and eamsgd (Zhang, Choromanska, LeCun; NeurIPS 2015)."""

    tau: PositiveInt = option(2, "steps of a worker between exchanges with the centre", "STEPS")
    alpha: Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] = option(
        "auto",
        "moving rate of a worker and the centre towards each other",
        "WEIGHT",
        details="auto: 0.9 divided by the number of workers",
    )
    exchange: Literal["after", "before"] = option(
        "after",
        "exchange after every tau-th step, or before the next one",
        details="before: the next gradient is that of the model before the exchange, as in the "
        "paper",
    )


EASGD = Algorithm(
    "easgd",
    EasgdOptions,
    has_servers=True,
    has_centre=True,
    islands=True,
    quantises=True,
    on_resize=FROM_CENTRE,
)
EAMSGD = Algorithm(
    "eamsgd",
    EasgdOptions,
    options_of="easgd",
    has_servers=True,
    has_centre=True,
    quantises=True,
    optimizers="sgd",
    is_nesterov=True,
    steps_unused=True,
    on_resize=FROM_CENTRE,
)


class ArSgdOptions(OwnOptions):
    """For --algorithm ar-sgd."""

    allreduce: Allreduce = option(
        "auto",
        "all-reduce implementation",
        details="ring: messages around a ring; mpi: MPI's own; horovod: requires make horovod; "
        "torch: torch.distributed (gloo, or NCCL on GPUs); auto: NCCL if each rank has its own "
        "GPU and MPI does not survive failures, otherwise ring, or mpi on a single host",
    )


def _sums_need_all(run: GeneralOptions, allreduce: Allreduce) -> bool:
    """Return whether sums cannot be repeated after a failure: residuals have changed already."""
    has_residuals = run.compression != "none" or run.wire in SUM_BITS
    return has_residuals or allreduce not in FAULT_TOLERANT_ALLREDUCES


AR_SGD = Algorithm(
    "ar-sgd",
    ArSgdOptions,
    islands=True,
    lockstep=True,
    holder="first",
    compresses=True,
    all_reduces="gradients",
    needs_all=lambda run: _sums_need_all(run, own(run, ArSgdOptions).allreduce),
    collective=True,
    clips="mean",
    takes_writes=True,
)


class LocalSgdOptions(OwnOptions):
    """For --algorithm local-sgd (Stich, ICLR 2019; Lin et al., ICLR 2020)."""

    steps: PositiveInt = option(
        8, "local steps of a worker between averages of all models", "STEPS"
    )
    post: NonNegativeInt = option(
        0,
        "average after every step during the first samples of the run",
        "SAMPLES",
        details="counted over all workers (post-local SGD); 0: never",
    )
    allreduce: Allreduce = option("auto", "all-reduce implementation, as --ar-sgd-allreduce")


LOCAL_SGD = Algorithm(
    "local-sgd",
    LocalSgdOptions,
    islands=True,
    lockstep=True,
    holder="all",
    all_reduces="progress",
    needs_all=lambda run: _sums_need_all(run, own(run, LocalSgdOptions).allreduce),
    collective=True,
)


class DilocoOptions(OwnOptions):
    """For --algorithm diloco (Douillard et al., 2023; with fragments Streaming DiLoCo, 2025)."""

    steps: PositiveInt = option(30, "inner steps of a worker between two outer steps", "STEPS")
    outer_lr: PositiveFloat = option(
        0.7, "learning rate of the outer optimizer", "RATE", details="1 with momentum 0: local SGD"
    )
    outer_momentum: Fraction = option(0.9, "Nesterov momentum of the outer optimizer", "FACTOR")
    fragments: PositiveInt = option(
        1,
        "parts of the model, of equal bytes, that are synchronised in turn",
        "FRAGMENTS",
        details="each once in --diloco-steps, which must be a multiple of it",
    )
    overlap: NonNegativeInt = option(
        0,
        "steps that workers continue while a fragment is summed",
        "STEPS",
        details="at most the steps between two fragments; with --diloco-blend 0, these steps are "
        "lost in the fragment",
    )
    blend: Share = option(
        0.0,
        "weight of a worker's own fragment when it receives the global one",
        "WEIGHT",
        details="0: replaced by the global one",
    )
    allreduce: Allreduce = option("auto", "all-reduce implementation, as --ar-sgd-allreduce")


def _check_fragments(run: GeneralOptions) -> None:
    """Check that fragments divide the steps, and that one is summed at a time."""
    options = own(run, DilocoOptions)
    steps, number = options.steps, options.fragments
    if steps % number:
        below, above = steps // number * number, -(-steps // number) * number
        near = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"--diloco-steps {steps} must be a multiple of --diloco-fragments {number}. Use "
            f"--diloco-steps {near}."
        )
    if options.overlap > steps // number:
        raise UserError(
            f"--diloco-overlap {options.overlap} requires as many steps between two fragments, "
            f"which are {steps // number} with --diloco-steps {steps} and --diloco-fragments "
            f"{number}. Use --diloco-overlap {steps // number} or less."
        )
    if options.overlap == steps and not options.blend:
        raise UserError(
            f"--diloco-overlap {steps} with --diloco-blend 0 replaces the steps of every round by "
            f"those of the one before. Use --diloco-overlap {steps - 1} or less, or a larger "
            "--diloco-blend."
        )


DILOCO = Algorithm(
    "diloco",
    DilocoOptions,
    islands=True,
    lockstep=True,
    round_steps=lambda run: own(run, DilocoOptions).steps,
    holder="first",
    all_reduces="progress",
    needs_all=lambda run: _sums_need_all(run, own(run, DilocoOptions).allreduce),
    collective=True,
    check=_check_fragments,
    on_resize="the outer momentum is kept",
)


class AsyncDilocoOptions(OwnOptions):
    """For --algorithm async-diloco (Liu et al., 2024)."""

    steps: PositiveInt = option(
        30, "inner steps of the fastest worker between two exchanges", "STEPS"
    )
    dynamic: bool = option(
        True,
        "fewer inner steps for slower workers, in proportion to their speed",
        details="otherwise every worker takes --async-diloco-steps",
    )
    outer_lr: PositiveFloat = option(0.7, "learning rate of the outer optimizer", "RATE")
    outer_momentum: Fraction = option(0.9, "Nesterov momentum of the outer optimizer", "FACTOR")
    buffer: PositiveInt | Literal["auto"] = option(
        "auto",
        "workers' differences between two uses of the outer momentum",
        "DIFFERENCES",
        details="N in the paper; auto: the number of surviving workers",
    )
    spread: Share = option(
        0.0,
        "share of the momentum that is spread evenly over these differences",
        "SHARE",
        details="c N in the paper; 0: all of it is used once",
    )
    grace: NonNegativeFloat = option(
        0.0,
        "longest time that a server waits for differences after the first one",
        "SECONDS",
        details="it then answers all of them with the same model",
    )
    weights: Literal["equal", "samples", "samples-per-step"] = option(
        "equal",
        "weight of a difference",
        details="samples: its number of samples; samples-per-step: that times the samples per "
        "step (Decoupled DiLoCo); both relative to the workers' mean",
    )


ASYNC_DILOCO = Algorithm(
    "async-diloco",
    AsyncDilocoOptions,
    has_servers=True,
    islands=True,
    quantises=True,
    on_resize="the outer momentum is kept, and the workers are measured again",
)


class GoSgdOptions(OwnOptions):
    """For --algorithm gosgd (Blot et al., 2016)."""

    p: PositiveShare = option(
        0.01, "probability that a worker sends its model to another after a step", "PROBABILITY"
    )


GOSGD = Algorithm(
    "gosgd", GoSgdOptions, holder="all", least_workers=2, on_resize=FROM_WEIGHTED_MEAN
)


class AdPsgdOptions(OwnOptions):
    """For --algorithm ad-psgd (Lian et al., ICML 2018)."""

    graph: Literal["random", "exponential"] = option(
        "random",
        "choice of an active worker's passive partner",
        details="random: at random; exponential: those at distances 0, 1, 2, 4, ..., in turn",
    )


AD_PSGD = Algorithm(
    "ad-psgd",
    AdPsgdOptions,
    holder="all",
    least_workers=2,
    on_resize="they start from the mean of all models",
)


class SgpOptions(OwnOptions):
    """For --algorithm sgp (Assran et al., ICML 2019)."""

    graph: Literal["exponential", "ring"] = option(
        "exponential",
        "choice of the worker that a worker sends to",
        details="exponential: those at distances 1, 2, 4, ..., in turn; ring: the next one",
    )


SGP = Algorithm(
    "sgp",
    SgpOptions,
    islands=True,
    lockstep=True,
    holder="all",
    least_workers=2,
    on_resize=FROM_WEIGHTED_MEAN,
)


class OsgpOptions(SgpOptions):
    """For --algorithm osgp (Assran et al., ICML 2019)."""

    tau: PositiveInt = option(
        1, "steps that a message may take before a worker waits for it", "STEPS"
    )
    order: Literal["add-first", "push-first"] = option(
        "add-first",
        "order after a step: add received messages, then send; or the reverse",
    )
    optimize: Literal["model", "numerator"] = option(
        "model",
        "variable that the optimizer and weight decay are applied to",
        details="model: z, at which gradients are computed; numerator: x = w z of the push-sum, as "
        "in the authors' code",
    )


OSGP = Algorithm(
    "osgp",
    OsgpOptions,
    islands=True,
    lockstep=True,
    holder="all",
    least_workers=2,
    on_resize=FROM_WEIGHTED_MEAN,
)


class MultistepOptions(OwnOptions):
    """For --algorithm multistep (Lee et al., MLHPC 2018)."""

    exchange: Literal["auto", "gradients", "activations"] = option(
        "auto",
        "data exchanged for fully connected layers",
        details="activations: inputs, with the errors of the outputs; auto: the smaller of both, "
        "but gradients with --clip, --max-loss or --no-wait-free",
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
        5, "initial steps in which each worker's times are measured", "STEPS", ge=2
    )
    coarse_steps: PositiveInt = option(
        8,
        "local steps of the slowest worker per exchange, coarse stage",
        "STEPS",
        details="faster workers take more",
    )
    fine_steps: PositiveInt = option(
        2, "local steps of the slowest worker per exchange, fine stage", "STEPS"
    )
    coarse_rate: PositiveShare = option(
        1.0,
        "share of values that the slowest worker pushes, coarse stage",
        "SHARE",
        details="faster workers push more if that takes no additional time",
    )
    fine_rate: PositiveShare = option(
        0.1, "share of values that the slowest worker pushes, fine stage", "SHARE"
    )
    bound: NonNegativeInt = option(
        3, "exchanges that a worker may be ahead of the slowest, fine stage", "EXCHANGES"
    )
    loss: NonNegativeFloat = option(
        0.3, "training loss of all workers at which the fine stage begins", "LOSS"
    )
    stage: Literal["auto", "coarse", "fine"] = option(
        "auto",
        "stage of the training",
        details="auto: coarse until --ashl-loss is reached, then fine; coarse, fine: only that "
        "stage; timed computing has no loss and stays coarse",
    )
    error_feedback: bool = option(False, "add values that were not pushed to the next push")


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
        "check period, in which all workers should commit equally often",
        "SECONDS",
        details="Gamma in the paper, which uses 60; auto: 10 mean steps",
    )
    min_interval: PositiveFloat | Literal["auto"] = option(
        "auto",
        "shortest time between two commits of a worker",
        "SECONDS",
        details="10 in the paper; auto: 1/6 of the check period",
    )
    epoch: PositiveFloat | Literal["auto"] = option(
        "auto",
        "time between two searches for the commit rate",
        "SECONDS",
        details="1000 in the paper; auto: 16.7 check periods",
    )
    loss_rise: PositiveFloat = option(
        0.3,
        "relative rise of the loss between checks that starts a search",
        "SHARE",
    )
    end_loss: PositiveFloat | Literal["auto"] = option(
        "auto",
        "training loss that the best commit rate would reach first",
        "LOSS",
        details="auto: half of the loss at the start of the search",
    )


ADSP = Algorithm(
    "adsp",
    AdspOptions,
    has_servers=True,
    quantises=True,
    on_resize="the commit rate is searched again",
)

ALGORITHMS: dict[str, Algorithm] = {
    each.name: each for each in tuple(globals().values()) if isinstance(each, Algorithm)
}
"""All registered algorithms, those of this file first."""
