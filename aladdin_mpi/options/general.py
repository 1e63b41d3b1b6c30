"""The options of every run, each with its type, range, unit and default."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from aladdin_mpi.options.cluster import Parts
from aladdin_mpi.options.reader import nested, option, shown

AUTO = "auto"
"""As the value of ``--resume``: the run in ``--run-dir``, if there is one to go on with."""
OWN_DATA = "own"
"""The data set of a training loop of one's own."""
LENGTHS = ("epochs", "samples", "steps")
"""Each says how long a run is."""
DEFAULT_EPOCHS = 30.0
"""The length of a run when none of them is given."""
SHUFFLE_BUFFER = 4096
"""Samples."""

FORWARD_SHARE = 1 / 3
"""Of a step's time: the forward pass, the rest is backward."""
QUANTISED_BITS = {"int8": 8, "int4": 4}
"""The wires that round to so many bits, and send later what that has lost."""

SGD_RATE, OTHER_RATE = 0.01, 0.001
SGD_DECAY = 1e-4
OWN_DECAY = {"adamw": 0.01, "muon": 0.1}
"""The weight decay that torch's optimizers have by default, if it is not 0."""

Precision = Literal["fp32", "bf16", "fp16"]
Wire = Literal["auto", "fp32", "bf16", "int8", "int4"]
Augment = Literal[
    "auto", "none", "crop-flip", "imagenet", "autoaugment", "randaugment", "trivialaugment"
]
Worker = NonNegativeInt
Factor = Annotated[float, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
ShapePoint = Annotated[tuple[Share, Share], Parts]
"""A share of the gradient and of backward's time; also as ``"0.1:0.5"``."""

NEVER = "never"
_INTERVAL = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)(samples?|epochs?|min|s)?")


@dataclass(frozen=True)
class CheckpointInterval:
    """How much passes between two checkpoints, in one of the units; in none: there are none."""

    samples: int | None = None
    epochs: float | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, given: object) -> CheckpointInterval:
        """Read ``50000``, ``50000samples``, ``0.5epochs``, ``10min``, ``90s`` or ``never``.

        Raises:
            ValueError: the text has another form, or the amount is not above 0.
        """
        if isinstance(given, cls):
            return given
        if given == NEVER:
            return cls()
        found = _INTERVAL.fullmatch(str(given).replace(" ", ""))
        amount, unit = (float(found[1]), found[2] or "samples") if found else (0.0, "")
        if 0 < amount < math.inf:
            if unit.startswith("epoch"):
                return cls(epochs=amount)
            if unit in ("min", "s"):
                return cls(seconds=amount * (60 if unit == "min" else 1))
            if amount.is_integer():
                return cls(samples=int(amount))
        raise ValueError(
            "expected N, Nsamples, Nepochs, Nmin or Ns with N above 0 (whole for samples), or "
            f"never, got {str(given)!r}; write for example 50000, 0.5epochs or 10min"
        )

    def __str__(self) -> str:
        """Return the text that :meth:`parse` reads."""
        if self.samples is not None:
            return f"{self.samples}samples"
        if self.epochs is not None:
            return f"{self.epochs!r}epochs"
        return NEVER if self.seconds is None else f"{self.seconds!r}s"


Interval = Annotated[
    CheckpointInterval | None,
    BeforeValidator(lambda given: None if given is None else CheckpointInterval.parse(given)),
    PlainSerializer(lambda interval: None if interval is None else str(interval)),
]
"""An optional interval as a field: read from text, written as text."""


class DgcOptions(BaseModel):
    """For --compression dgc (Lin et al., ICLR 2018)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    ratio: PositiveShare = option(
        0.001,
        "share of the values of each matrix or kernel that a gradient sends; biases and other "
        "vectors are sent whole; 1: everything is sent, as without compression",
        "SHARE",
    )
    warmup_epochs: NonNegativeInt = option(
        4,
        "epochs in which the share falls to --dgc-ratio, by one factor each epoch: 25, 6.3, 1.6 "
        "and 0.4 percent on the way to 0.1",
        "EPOCHS",
    )
    clip: PositiveFloat | None = option(
        None,
        "largest L2 norm of the sum of all workers' gradients; with n workers each clips its own "
        "to 1/sqrt(n) of it, every bucket to its share",
        "NORM",
        default_text="gradients are not clipped",
    )
    sample: PositiveShare = option(
        0.01, "share of the values from which the threshold is estimated", "SHARE"
    )

    def ratio_at(self, samples: int, epoch: int) -> float:
        """The share of values that is sent.

        It falls exponentially, by one step an epoch, as in section 3.3 of the paper.

        Args:
            samples: drawn by all workers so far.
            epoch: samples of one epoch.
        """
        passed = min(samples // max(1, epoch), self.warmup_epochs)
        return self.ratio ** ((passed + 1) / (self.warmup_epochs + 1))


run_option = partial(option, group="run")
data_option = partial(option, group="data")
optimisation_option = partial(option, group="optimisation")
communication_option = partial(option, group="communication")
computing_option = partial(option, group="computing")
output_option = partial(option, group="output")


class GeneralOptions(BaseModel):
    """What training and simulating have in common, but for options of single algorithms."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    ALTERNATIVES: ClassVar = LENGTHS

    # -- run
    algorithm: str = run_option("aladdin-ahead", "name of the algorithm")
    model: str = run_option("digits", "name of the model, or package.module:function")
    epochs: PositiveFloat | None = run_option(
        None,
        "length of the run in passes over the training data, all workers together",
        "EPOCHS",
        default_text=f"{DEFAULT_EPOCHS:g}, unless --samples or --steps is given",
    )
    samples: PositiveInt | None = run_option(
        None, "length of the run in samples, all workers together, instead of --epochs", "SAMPLES"
    )
    steps: PositiveInt | None = run_option(
        None,
        "length of the run in steps, instead of --epochs; a step is a batch of every worker, or "
        "as many as --accumulate says: a round of a synchronous algorithm, and of others as many "
        "samples",
        "STEPS",
    )
    servers: PositiveInt = run_option(1, "parameter servers, for algorithms that have one", "RANKS")
    node_sums: bool = run_option(
        False,
        "the workers of a host make one step together: their gradients are added up on the host, "
        "and for the algorithm they are one worker, so that one message leaves the host and one "
        "model comes to it",
    )
    node_size: PositiveInt | None = run_option(
        None,
        "with --node-sums: most workers that are one, where a host has several nodes, such as "
        "containers",
        "WORKERS",
        default_text="all of a host",
    )
    seed: NonNegativeInt = run_option(0, "seed of everything that is drawn by chance")
    device: Literal["auto", "cpu", "gpu", "cuda", "xpu"] = run_option(
        "auto",
        "where workers compute; auto: on a GPU if there is one; gpu: on one of whatever kind, "
        "which cuda (also AMD's) and xpu (Intel's) name",
    )
    bind_cores: Literal["auto", "off"] = run_option(
        "auto",
        "bind each worker to cores near its GPU, where several workers of a host have one and the "
        "launcher has left all of them the same cores",
    )
    timeout: PositiveFloat = run_option(1800.0, "longest wait for another rank", "SECONDS")
    worker_timeout: NonNegativeFloat = run_option(
        60.0,
        "time without a heartbeat before a rank is excluded, or the run ends if the algorithm "
        "needs every rank; 0: never",
        "SECONDS",
    )

    # -- data
    dataset: str = data_option("digits", "name of the data set, or package.module:function")
    data_dir: Path | None = data_option(
        None, "folder of the data set, for those that need one", "FOLDER"
    )
    stage: Path | None = data_option(
        None,
        "folder on each host's own disk that --data-dir is copied to before training, once for "
        "each host; what is there already is not copied again",
        "FOLDER",
    )
    shuffle_buffer: PositiveInt = data_option(
        SHUFFLE_BUFFER,
        "of shards: places by which a sample may be moved out of its shard's order, as by a "
        "shuffle buffer of this size; 1: by none",
        "SAMPLES",
    )
    download: bool = data_option(False, "fetch the data set if it is not there")
    loader_workers: NonNegativeInt = data_option(
        0, "processes that load data, for each worker; 0: the worker itself", "PROCESSES"
    )
    loader_start_method: Literal["auto", "fork", "forkserver", "spawn"] = data_option(
        "auto",
        "how these processes are started; auto: by forkserver where MPI or a device is in use, if "
        "the program allows it, else by fork",
    )
    cache: Literal["auto", "on", "off"] = data_option(
        "auto", "keep decoded data in memory; auto: if it fits"
    )
    image_size: PositiveInt | None = data_option(
        None,
        "side of the images that the model is given",
        "PIXELS",
        default_text="that of the data set, 224 for folders of images that are large or differ",
    )
    augment: Augment = data_option(
        "auto",
        "of training images; auto: as the data set has it, in a folder crop-flip for small images "
        "of one size, else imagenet; crop-flip: random crop and mirror; imagenet: random part, "
        "scaled, and mirror; autoaugment, randaugment, trivialaugment: torchvision's policies, on "
        "top of auto",
    )
    corrupt_images: Literal["stop", "skip"] = data_option(
        "stop",
        "of --dataset imagefolder and shards: end the run at an image that cannot be read; or "
        "name it once, train on the next one instead, and leave it out of the test",
    )
    check_images: bool = data_option(
        False,
        "of --dataset imagefolder: read all images before training and name those that cannot be "
        "read; the ranks share the work, and each shares its part among its --loader-workers",
    )

    # -- optimisation
    batch_size: PositiveInt = optimisation_option(32, "batch of one worker's step", "SAMPLES")
    optimizer: str = optimisation_option(
        "sgd",
        "sgd, with momentum; another of torch's in small letters, such as adamw; or "
        "package.module:class",
        "NAME",
    )
    optimizer_options: dict[str, float] = optimisation_option(
        {},
        "what else the optimizer takes, such as beta1=0.9 eps=1e-8 amsgrad=1; several, apart by "
        "commas or spaces",
        "NAME=VALUE",
    )
    accumulate: PositiveInt = optimisation_option(
        1, "batches of one worker whose gradients are added up to one step", "BATCHES"
    )
    lr: PositiveFloat = optimisation_option(
        SGD_RATE,
        "learning rate for the batch of one worker, before --lr-scaling",
        "RATE",
        default_text=f"{SGD_RATE:g} for sgd, {OTHER_RATE:g} for others",
    )
    lr_scaling: Literal["linear", "sqrt", "none"] = optimisation_option(
        "linear",
        "multiply the learning rate by the number of workers, its square root, or nothing",
        default_text="linear for sgd, none for others",
    )
    lr_factors: dict[str, NonNegativeFloat] = optimisation_option(
        {},
        "multiply the learning rate of parameters whose names match a pattern, such as head.*=10; "
        "several, apart by commas or spaces",
        "PATTERN=FACTOR",
    )
    decay_factors: dict[str, NonNegativeFloat] = optimisation_option(
        {},
        "multiply the weight decay of parameters whose names match a pattern, such as *.bias=0",
        "PATTERN=FACTOR",
    )
    clip: PositiveFloat | None = optimisation_option(
        None,
        "largest norm of a gradient: of the workers' mean for ar-sgd, of each part by its share "
        "for aladdin-ahead, else of each worker's own, which is then sent when backward is over",
        "NORM",
        default_text="gradients are not clipped",
    )
    lr_schedule: Literal["constant", "step", "cosine"] = optimisation_option(
        "cosine", "how the learning rate goes on after the warm-up"
    )
    warmup_epochs: NonNegativeFloat = optimisation_option(
        1.0, "linear rise of the learning rate", "EPOCHS"
    )
    lr_steps: tuple[PositiveFloat, ...] = optimisation_option(
        (),
        "with --lr-schedule step: when the learning rate is multiplied by --lr-decay; several, "
        "apart by commas or spaces",
        "EPOCHS",
    )
    lr_decay: PositiveFloat = optimisation_option(0.1, "factor at each of --lr-steps", "FACTOR")
    momentum: Fraction = optimisation_option(0.9, "momentum of SGD", "FACTOR")
    nesterov: bool = optimisation_option(False, "Nesterov's form of the momentum")
    weight_decay: NonNegativeFloat = optimisation_option(
        SGD_DECAY,
        "weight decay: L2 for sgd, else as the optimizer has it",
        "FACTOR",
        default_text=f"{SGD_DECAY:g} for sgd, else the optimizer's own",
    )
    max_loss: PositiveFloat | None = optimisation_option(
        None,
        "refuse the gradient of a batch whose loss is larger; gradients are then sent when "
        "backward is over, as the loss is not known before",
        "LOSS",
        default_text="only gradients that are not finite are refused",
    )
    precision: Precision = optimisation_option(
        "fp32",
        "of the forward and backward pass; bf16, fp16: autocast, for fp16 with a loss scale that "
        "all workers share",
    )
    tf32: bool = optimisation_option(
        False, "let GPUs multiply fp32 matrices and convolve with ten bits of mantissa (TF32)"
    )
    cudnn_benchmark: bool = optimisation_option(
        False,
        "let cuDNN try out which of its convolutions is fastest, for inputs of a few sizes; the "
        "result is then not the same every time",
    )
    channels_last: bool = optimisation_option(False, "store images channels-last")
    bn_batches: NonNegativeInt = optimisation_option(
        100,
        "training batches that re-estimate the batch-norm statistics before an evaluation",
        "BATCHES",
    )

    # -- communication
    bucket_mb: PositiveFloat = communication_option(
        4.0,
        "largest message, in MB of 10^6 bytes",
        "MB",
        default_text="4, or 16 where a worker has a GPU",
    )
    shard_mb: PositiveFloat = communication_option(
        16.0, "largest piece of the parameters given to one server, in MB of 10^6 bytes", "MB"
    )
    wait_free: bool = communication_option(
        True,
        "send each part of a gradient as soon as backward has completed it (wait-free "
        "backpropagation), not all when backward is over",
    )
    sharding: Literal["memory", "layer"] = communication_option(
        "memory",
        "how the parameters are dealt to the servers: in equal pieces whatever the layers' "
        "boundaries, or whole layers",
    )
    compression: Literal["none", "dgc"] = communication_option(
        "none", "of gradients, for algorithms that send them; dgc: deep gradient compression"
    )
    checksum: bool = communication_option(
        False, "send a checksum with every gradient and model, and refuse those that arrive damaged"
    )
    wire: Wire = communication_option(
        "auto",
        "number format of what is sent; int8, int4: in blocks with a scale each, for algorithms "
        "with servers; gradients make up for their rounding, and models are sent as differences; "
        "auto: int8 for aladdin-ahead, and int4 where links are full; fp32 for all others; fp32 "
        "sends models in float64 in float64",
    )

    # -- computing
    compute: Literal["real", "timed"] = computing_option(
        "real",
        "timed: time passes and messages of the right size are sent, but nothing is calculated",
    )
    compute_time: PositiveFloat | None = computing_option(
        None, "time of one step of a worker, for --compute timed", "SECONDS"
    )
    jitter: NonNegativeFloat = computing_option(
        0.0, "relative standard deviation of the time of a step (log-normal)", "FRACTION"
    )
    slowdown: dict[Worker, Factor] = computing_option(
        {},
        "make workers, counted from 0, slower by a factor of 1 or more; several, apart by commas "
        "or spaces",
        "WORKER=FACTOR",
    )
    forward_share: Fraction = computing_option(
        FORWARD_SHARE,
        "share of a timed step that is the forward pass",
        "FRACTION",
        default_text="a third",
    )
    backward_shape: tuple[ShapePoint, ...] = computing_option(
        (),
        "of timed steps: shares of the gradient, last layer first, with the shares of backward's "
        "time after which they are there, such as 0.1:0.5; several, apart by commas or spaces",
        "GRADIENT:TIME",
        default_text="in proportion",
    )

    # -- output
    run_dir: Path | None = output_option(
        None, "folder for the results", "FOLDER", default_text="runs/ALGORITHM-MODEL-DATASET-TIME"
    )
    overwrite: bool = output_option(False, "replace the results in an existing --run-dir")
    spares: NonNegativeInt = run_option(
        0,
        "ranks more, the last ones, that wait and take the place of a rank that is lost; MPI has "
        "to survive deaths (mpirun --with-ft ulfm)",
        "RANKS",
    )
    replicate_every: NonNegativeInt = run_option(
        64,
        "with --with-ft ulfm: updates of a bucket at a server between two copies to another rank, "
        "from which a failed server's momentum or centre is restored; 0: no copies",
        "UPDATES",
        formerly="mirror_every",
    )
    resume: Literal["auto"] | Path | None = output_option(
        None,
        "go on with the run in this folder from its last checkpoint; auto: with the one in "
        "--run-dir if it has a checkpoint, and start it if not",
        "FOLDER",
    )
    allow_resize: bool = output_option(
        False,
        "with --resume: go on with another number of workers, or of --servers, than the "
        "checkpoint has; the workers begin from its global model",
    )
    checkpoint_every: Interval = output_option(
        None,
        "time between checkpoints: N or Nsamples, Nepochs, Nmin, Ns, or never; there is always "
        "one at the end",
        "INTERVAL",
        default_text="10min over MPI, never in virtual time",
    )
    eval_every: NonNegativeFloat = output_option(
        1.0, "time between evaluations; 0: only at the end", "EPOCHS"
    )
    evaluate_on: Literal["auto", "rank-0", "workers"] = output_option(
        "auto",
        "rank-0: on its CPU; workers: each measures an equal part of the test set, on its device; "
        "auto: workers if all of them have a GPU",
    )
    log_every: PositiveInt | None = output_option(
        None, "samples between two lines of metrics", "SAMPLES", default_text="once an epoch"
    )
    progress: Literal["auto", "live", "lines"] = output_option(
        "auto",
        "live: one line that is redrawn; lines: a line every few seconds; auto: live on a "
        "terminal, also behind mpirun on the host of rank 0",
    )
    quiet: bool = output_option(False, "print no progress")

    dgc: DgcOptions = nested(DgcOptions)

    @field_validator("data_dir", "run_dir", "resume", mode="before")
    @classmethod
    def _check_path(cls, value: Any) -> Any:
        if value == "":  # as of an unset variable; it would be the present folder
            raise ValueError("expected a path, got ''; name a folder, or leave it out")
        return value

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        """The length of a run that is given none, and the rates of another optimizer than SGD."""
        if not isinstance(values, dict):
            return values
        if all(values.get(name) is None for name in LENGTHS):
            values = {**values, "epochs": DEFAULT_EPOCHS}
        name = values.get("optimizer", "sgd")
        if name == "sgd":
            return values
        decay = OWN_DECAY.get(str(name), 0.0)
        return {"lr": OTHER_RATE, "weight_decay": decay, "lr_scaling": "none", **values}

    @property
    def step_size(self) -> int:
        """Samples of a worker's step."""
        return self.batch_size * self.accumulate

    @model_validator(mode="after")
    def _check_together(self) -> GeneralOptions:
        for message in self._conflicts():
            raise ValueError(message)
        return self

    def _conflicts(self) -> Iterator[str]:
        """What does not go together, and the remedy."""
        lengths = [f"--{name}" for name in LENGTHS if getattr(self, name) is not None]
        if len(lengths) > 1:
            yield f"{' and '.join(lengths)} cannot be combined. Keep one of them."
        if self.lr_schedule == "step" and not self.lr_steps:
            yield "--lr-schedule step requires --lr-steps. Add for example --lr-steps 15,25."
        if self.lr_schedule != "step" and self.lr_steps:
            yield (
                f"--lr-steps requires the step schedule, not {self.lr_schedule}. Add "
                "--lr-schedule step, or leave --lr-steps out."
            )
        if list(self.lr_steps) != sorted(set(self.lr_steps)):
            given = shown(self.lr_steps)
            yield f"--lr-steps: expected epochs in increasing order, got {given}; sort them"
        if not all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(self.backward_shape)):
            yield (
                "--backward-shape: expected points that increase in both the gradient and the "
                f"time, got {' '.join(f'{g:g}:{t:g}' for g, t in self.backward_shape)}; sort them"
            )
        if self.nesterov and self.momentum == 0:
            yield (
                "--nesterov requires a momentum above 0. Add --momentum 0.9, or leave --nesterov "
                "out."
            )
        if self.node_size is not None and not self.node_sums:
            yield "--node-size requires --node-sums. Add --node-sums, or leave --node-size out."
        if self.stage is not None and self.data_dir is None:
            yield "--stage requires --data-dir. Add --data-dir FOLDER, or leave --stage out."
        if self.resume == AUTO and self.run_dir is None:
            yield "--resume auto requires --run-dir. Add --run-dir FOLDER."
        if self.resume == AUTO and self.overwrite:
            yield "--resume auto cannot be combined with --overwrite. Leave one out."
        buffer = self.shuffle_buffer
        for flag, is_given, sets in (
            ("--corrupt-images skip", self.corrupt_images == "skip", ("imagefolder", "shards")),
            ("--check-images", self.check_images, ("imagefolder",)),
            (f"--shuffle-buffer {buffer}", buffer != SHUFFLE_BUFFER, ("shards",)),
        ):
            if is_given and self.dataset not in sets:
                yield (
                    f"{flag} requires the data set {' or '.join(sets)}, not {self.dataset}. "
                    "Leave the option out."
                )
        if self.allow_resize and self.resume is None:
            yield (
                "--allow-resize requires --resume. Add --resume FOLDER, or leave --allow-resize "
                "out."
            )
