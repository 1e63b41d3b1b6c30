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
from aladdin_mpi.options.fields import nested, option, shown

AUTO = "auto"
"""Value of ``--resume``: the run in ``--run-dir``, if it can be resumed."""
OWN_DATA = "own"
"""The data set of a custom training loop."""
SIZE_PREFIX = "size:"
"""``--model size:MB`` names a model by the size of its parameters alone, for timed computing."""
LENGTHS = ("epochs", "samples", "steps")
"""Alternative options for the length of a run."""
DEFAULT_EPOCHS = 30.0
"""The default length of a run."""
SHUFFLE_BUFFER = 4096
"""Samples."""

FORWARD_SHARE = 1 / 3
"""Share of a step's time that is the forward pass; the rest is backward."""
QUANTISED_BITS = {"int8": 8, "int4": 4}
"""Bits of the quantised wires, which use error feedback."""
SUM_BITS = {**QUANTISED_BITS, "int2": 2}
"""Bits of the quantised wires of sums over all workers."""

SGD_RATE, OTHER_RATE = 0.01, 0.001
SGD_DECAY = 1e-4
OWN_DECAY = {"adamw": 0.01, "muon": 0.1}
"""Default weight decay of torch's optimizers, if it is not 0."""

Precision = Literal["fp32", "bf16", "fp16"]
Wire = Literal["auto", "fp32", "bf16", "int8", "int4", "int2"]
Augment = Literal[
    "auto", "none", "crop-flip", "imagenet", "autoaugment", "randaugment", "trivialaugment"
]
Worker = NonNegativeInt
Factor = Annotated[float, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Jitter = Annotated[float, Field(ge=0, le=10)]
ShapePoint = Annotated[tuple[Share, Share], Parts]
"""A share of the gradient and of backward's time; also as ``"0.1:0.5"``."""

NEVER = "never"
_INTERVAL = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)(samples?|epochs?|min|s)?")


@dataclass(frozen=True)
class CheckpointInterval:
    """Interval between checkpoints, in one unit; all None: only the final one is written."""

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
        "share of the values of each weight matrix or kernel that is sent",
        "SHARE",
        details="vectors such as biases are sent whole; 1: no compression",
    )
    warmup_epochs: NonNegativeInt = option(
        4,
        "epochs in which the share decreases to --dgc-ratio",
        "EPOCHS",
        details="exponentially, by default 25, 6.3, 1.6, 0.4 and then 0.1 percent",
    )
    clip: PositiveFloat | None = option(
        None,
        "clipping threshold of the sum of all workers' gradients (L2 norm)",
        "NORM",
        default_text="no clipping",
        details="each of n workers clips its gradient to NORM/sqrt(n), each bucket by its share",
    )
    sample: PositiveShare = option(
        0.01, "share of the values sampled to estimate the selection threshold", "SHARE"
    )

    def ratio_at(self, samples: int, epoch: int) -> float:
        """Return the share of values that is sent.

        It decreases exponentially with each epoch, as in section 3.3 of the paper.

        Args:
            samples: samples processed by all workers so far.
            epoch: samples of one epoch.
        """
        passed = min(samples // max(1, epoch), self.warmup_epochs)
        return self.ratio ** ((passed + 1) / (self.warmup_epochs + 1))


class PowersgdOptions(BaseModel):
    """For --compression powersgd (Vogels et al., NeurIPS 2019)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rank: PositiveInt = option(
        2,
        "rank of the approximation of each weight matrix or kernel",
        "RANK",
        details="those that it would not make smaller, such as biases, are sent whole",
    )


run_option = partial(option, group="run")
data_option = partial(option, group="data")
optimisation_option = partial(option, group="optimisation")
communication_option = partial(option, group="communication")
computing_option = partial(option, group="computing")
output_option = partial(option, group="output")


class GeneralOptions(BaseModel):
    """Options of both training and simulation, except those of single algorithms."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    ALTERNATIVES: ClassVar = LENGTHS

    # -- run
    algorithm: str = run_option(
        "aladdin-ahead", "algorithm", details="--help NAME lists its own options", common=True
    )
    model: str = run_option("digits", "built-in model, or package.module:function", common=True)
    epochs: PositiveFloat | None = run_option(
        None,
        "length of the run in epochs",
        "EPOCHS",
        default_text=f"{DEFAULT_EPOCHS:g}",
        common=True,
        details="an epoch is one pass over the training data by all workers together",
    )
    samples: PositiveInt | None = run_option(
        None, "length of the run in samples of all workers, instead of --epochs", "SAMPLES"
    )
    steps: PositiveInt | None = run_option(
        None,
        "length of the run in steps, instead of --epochs",
        "STEPS",
        details="a step is one batch (or --accumulate batches) per worker; asynchronous algorithms "
        "process as many samples in total",
    )
    servers: PositiveInt = run_option(
        1,
        "number of parameter servers",
        "RANKS",
        common=True,
        details="ignored by algorithms without servers",
    )
    island: PositiveInt | Literal["node"] = run_option(
        1,
        "number of workers of a host that act as one worker",
        "WORKERS",
        details="they divide each step's samples, the gradient and the algorithm's vectors among "
        "themselves; node: all workers of a host",
    )
    node_sums: bool = run_option(
        False,
        "the workers of a host act as one, through its first worker",
        details="as --island node, which uses all of a host's ranks",
    )
    node_size: PositiveInt | None = run_option(
        None,
        "largest number of workers aggregated into one",
        "WORKERS",
        default_text="all of a host",
        details="requires --node-sums; for hosts that combine several machines",
    )
    seed: NonNegativeInt = run_option(0, "random seed", common=True)
    device: Literal["auto", "cpu", "gpu", "cuda", "xpu"] = run_option(
        "auto",
        "device of the workers",
        details="auto: a GPU if available; gpu: any GPU; cuda: NVIDIA or AMD; xpu: Intel",
        common=True,
    )
    bind_cores: Literal["auto", "off"] = run_option(
        "auto",
        "binding of each worker to the cores next to its GPU",
        details="auto: if several workers of a host have a GPU and the launcher assigned the same "
        "cores to all of them",
    )
    timeout: PositiveFloat = run_option(
        1800.0, "longest wait for another rank before the run fails", "SECONDS"
    )
    worker_timeout: NonNegativeFloat = run_option(
        60.0,
        "time without a heartbeat after which a rank is excluded",
        "SECONDS",
        details="the run ends instead if the algorithm needs every rank; 0: never",
    )

    min_workers: PositiveInt = run_option(
        1,
        "smallest number of workers with which the run continues",
        "WORKERS",
        details="if failures leave fewer, it is saved and exits with status 75",
    )

    # -- data
    dataset: str = data_option(
        "digits", "built-in data set, or package.module:function", common=True
    )
    data_dir: Path | None = data_option(
        None, "folder of the data set, if it needs one", "FOLDER", common=True
    )
    stage: Path | None = data_option(
        None,
        "local folder to which each host copies --data-dir before training",
        "FOLDER",
        details="unchanged files are not copied again",
    )
    shuffle_buffer: PositiveInt = data_option(
        SHUFFLE_BUFFER,
        "size of the shuffle buffer, for --dataset shards",
        "SAMPLES",
        details="samples move by fewer places than this; 1: samples keep their order in the shard",
    )
    download: bool = data_option(False, "download the data set if it is missing", common=True)
    loader_workers: NonNegativeInt = data_option(
        0, "loader processes per worker; 0: the worker loads its data", "PROCESSES", common=True
    )
    loader_start_method: Literal["auto", "fork", "forkserver", "spawn"] = data_option(
        "auto",
        "start method of loader processes",
        details="auto: forkserver if MPI or a device is in use and the program allows it, "
        "otherwise fork",
    )
    cache: Literal["auto", "on", "off"] = data_option(
        "auto", "caching of decoded images in memory; auto: if they fit"
    )
    image_size: PositiveInt | None = data_option(
        None,
        "side length of the images passed to the model",
        "PIXELS",
        default_text="the data set's, 224 for folders of large or unequal images",
    )
    augment: Augment = data_option(
        "auto",
        "augmentation of training images",
        details="auto: that of the data set, for folders crop-flip if images are small and of one "
        "size, otherwise imagenet; crop-flip: random crop and flip; imagenet: random resized "
        "crop and flip; autoaugment, randaugment, trivialaugment: auto, then this policy of "
        "torchvision",
    )
    corrupt_images: Literal["stop", "skip"] = data_option(
        "stop",
        "handling of unreadable images, for imagefolder and shards",
        details="stop: end the run; skip: report each once, train on the next image instead, and "
        "omit it from the test set",
    )
    check_images: bool = data_option(
        False,
        "read all images of an imagefolder before training",
        details="reports unreadable ones; the work is shared by all ranks and --loader-workers",
    )

    # -- optimisation
    batch_size: PositiveInt = optimisation_option(
        32, "batch size per worker", "SAMPLES", common=True
    )
    optimizer: str = optimisation_option(
        "sgd",
        "sgd, another torch optimizer, or package.module:class",
        "NAME",
        common=True,
        details="torch's names are in lower case, such as adamw",
    )
    optimizer_options: dict[str, float] = optimisation_option(
        {},
        "further arguments of the optimizer, such as beta1=0.9 eps=1e-8",
        "NAME=VALUE",
    )
    accumulate: PositiveInt = optimisation_option(
        1, "batches per step, over which gradients are accumulated", "BATCHES", common=True
    )
    lr: PositiveFloat = optimisation_option(
        SGD_RATE,
        "learning rate, before --lr-scaling",
        "RATE",
        default_text=f"{SGD_RATE:g} for sgd, else {OTHER_RATE:g}",
        common=True,
    )
    lr_scaling: Literal["linear", "sqrt", "none"] = optimisation_option(
        "linear",
        "factor on --lr: number of workers, its square root, or 1",
        default_text="linear for sgd, else none",
        common=True,
    )
    lr_factors: dict[str, NonNegativeFloat] = optimisation_option(
        {},
        "factors on the learning rate by parameter name, such as head.*=10",
        "PATTERN=FACTOR",
    )
    decay_factors: dict[str, NonNegativeFloat] = optimisation_option(
        {},
        "factors on the weight decay by parameter name, such as *.bias=0",
        "PATTERN=FACTOR",
    )
    clip: PositiveFloat | None = optimisation_option(
        None,
        "gradient clipping threshold (global norm)",
        "NORM",
        default_text="no clipping",
        details="ar-sgd clips the mean of all workers, aladdin-ahead each bucket by its share, "
        "others each worker's gradient, which is then sent after backward",
        common=True,
    )
    lr_schedule: Literal["constant", "step", "cosine"] = optimisation_option(
        "cosine", "learning-rate schedule after warm-up", common=True
    )
    warmup_epochs: NonNegativeFloat = optimisation_option(
        1.0, "length of the linear warm-up of the learning rate", "EPOCHS", common=True
    )
    lr_steps: tuple[PositiveFloat, ...] = optimisation_option(
        (),
        "epochs at which the learning rate is multiplied by --lr-decay",
        "EPOCHS",
        details="requires --lr-schedule step",
    )
    lr_decay: PositiveFloat = optimisation_option(
        0.1, "factor on the learning rate at each of --lr-steps", "FACTOR"
    )
    momentum: Fraction = optimisation_option(0.9, "momentum of SGD", "FACTOR", common=True)
    nesterov: bool = optimisation_option(
        False, "Nesterov momentum", details="eamsgd always uses it"
    )
    weight_decay: NonNegativeFloat = optimisation_option(
        SGD_DECAY,
        "weight decay (L2 for sgd)",
        "FACTOR",
        default_text=f"{SGD_DECAY:g} for sgd, else torch's",
        common=True,
        details="other optimizers apply it in their own form",
    )
    max_loss: PositiveFloat | None = optimisation_option(
        None,
        "loss above which the gradient of a batch is rejected",
        "LOSS",
        default_text="non-finite gradients only",
        details="gradients are then sent after backward",
    )
    precision: Precision = optimisation_option(
        "fp32",
        "precision of forward and backward (autocast)",
        details="fp16 uses a loss scale shared by all workers",
        common=True,
    )
    tf32: bool = optimisation_option(
        False, "TF32 for fp32 matrix products and convolutions on GPUs"
    )
    cudnn_benchmark: bool = optimisation_option(
        False,
        "cuDNN's search for the fastest convolutions",
        details="useful if input sizes rarely change; results are not reproducible",
    )
    channels_last: bool = optimisation_option(False, "channels-last memory format of images")
    bn_batches: NonNegativeInt = optimisation_option(
        100,
        "training batches used to recalibrate batch norm for evaluation",
        "BATCHES",
    )

    # -- communication
    bucket_mb: PositiveFloat = communication_option(
        4.0,
        "largest bucket of parameters or gradients, sent as one message",
        "MB",
        default_text="4, or 16 if a worker has a GPU",
        details="1 MB is 10^6 bytes",
    )
    shard_mb: PositiveFloat = communication_option(
        16.0,
        "largest contiguous part of the parameters on one server",
        "MB",
        details="1 MB is 10^6 bytes",
    )
    wait_free: bool = communication_option(
        True,
        "wait-free backpropagation: send each bucket as backward completes it",
        details="otherwise send all after backward",
    )
    sharding: Literal["memory", "layer"] = communication_option(
        "memory",
        "division of the parameters among servers",
        details="memory: equal parts, regardless of layer boundaries; layer: whole layers",
    )
    compression: Literal["none", "dgc", "powersgd"] = communication_option(
        "none",
        "compression of gradients",
        details="dgc: deep gradient compression, for algorithms that send gradients; powersgd: "
        "approximation of low rank, for ar-sgd, local-sgd and diloco",
    )
    checksum: bool = communication_option(
        False, "checksums on gradients and models; damaged messages are rejected"
    )
    wire: Wire = communication_option(
        "auto",
        "number format of messages",
        details="int8, int4: quantised in blocks, for algorithms with servers and for ar-sgd, "
        "local-sgd and diloco; int2: three values, for these three; error feedback compensates "
        "for the rounding, and servers send models as differences; auto: int8 for aladdin-ahead "
        "(int4 while links are saturated), fp32 for others; fp32 keeps float64 models in float64",
        common=True,
    )

    # -- computing
    compute: Literal["real", "timed"] = computing_option(
        "real",
        "real: train; timed: only model time and message sizes",
        details="timed steps compute nothing and take --compute-time",
    )
    compute_time: PositiveFloat | None = computing_option(
        None, "time of one step, for --compute timed", "SECONDS"
    )
    jitter: Jitter = computing_option(
        0.0, "standard deviation of the logarithm of step times", "FRACTION"
    )
    slowdown: dict[Worker, Factor] = computing_option(
        {},
        "slowdown factors of workers, counted from 0, such as 0=10",
        "WORKER=FACTOR",
        details="factors are 1 or more",
    )
    forward_share: Fraction = computing_option(
        FORWARD_SHARE,
        "share of a timed step that is the forward pass",
        "FRACTION",
        default_text="1/3",
    )
    backward_shape: tuple[ShapePoint, ...] = computing_option(
        (),
        "progress of backward in timed steps, such as 0.1:0.5",
        "GRADIENT:TIME",
        default_text="proportional",
        details="here the first tenth of the gradient, from the last layer on, is "
        "complete after half of backward's time",
    )

    # -- output
    run_dir: Path | None = output_option(
        None,
        "folder for the results",
        "FOLDER",
        default_text="runs/ALGORITHM-MODEL-DATASET-TIME",
        common=True,
    )
    overwrite: bool = output_option(
        False, "replace the results in an existing --run-dir", common=True
    )
    spares: NonNegativeInt = run_option(
        0,
        "number of spare ranks (the last N) that replace failed ones",
        "RANKS",
        details="requires an MPI that survives failures (mpirun --with-ft ulfm)",
    )
    replicate_every: NonNegativeInt = run_option(
        64,
        "updates of a server's bucket between two replications",
        "UPDATES",
        formerly="mirror_every",
        details="with mpirun --with-ft ulfm a replica on another rank restores a failed server's "
        "momentum or centre; 0: none",
    )
    resume: Literal["auto"] | Path | None = output_option(
        None,
        "run folder to resume from its last checkpoint",
        "FOLDER",
        details="auto: --run-dir if it has a checkpoint, otherwise start the run",
        common=True,
    )
    join: Path | None = output_option(
        None,
        "run folder of another job, whose run this job takes over",
        "FOLDER",
        details="the other job saves the run and ends; this one resumes it with its own ranks",
    )
    allow_resize: bool = output_option(
        False,
        "allow --resume with a new number of workers, --servers or --island",
        details="all workers start from the checkpoint's global model",
    )
    checkpoint_every: Interval = output_option(
        None,
        "time between checkpoints, such as 5000, 2epochs, 10min or never",
        "INTERVAL",
        default_text="10min over MPI, never in simulation",
        details="units: samples (default), epochs, min, s; a final one is always written",
        common=True,
    )
    model_format: Literal["pt", "dcp"] = output_option(
        "pt",
        "format of the trained model",
        details="pt: model.pt, which torch.load reads; dcp: the folder model, which "
        "torch.distributed.checkpoint reads, written by each rank of an island if FSDP has divided "
        "the model",
    )
    eval_every: NonNegativeFloat = output_option(
        1.0, "epochs between evaluations; 0: only at the end", "EPOCHS", common=True
    )
    evaluate_on: Literal["auto", "rank-0", "workers"] = output_option(
        "auto",
        "ranks that evaluate",
        details="rank-0: on its CPU; workers: each takes an equal share of the test set, on its "
        "device; auto: workers if all of them have a GPU",
    )
    log_every: PositiveInt | None = output_option(
        None,
        "samples between two lines of metrics",
        "SAMPLES",
        default_text="once an epoch",
        common=True,
    )
    progress: Literal["auto", "live", "lines"] = output_option(
        "auto",
        "progress display",
        details="live: one line, redrawn; lines: a new line every few seconds; auto: live on "
        "a terminal, also under mpirun on rank 0's host",
    )
    quiet: bool = output_option(False, "print no progress")

    dgc: DgcOptions = nested(DgcOptions)
    powersgd: PowersgdOptions = nested(PowersgdOptions)

    @field_validator("data_dir", "run_dir", "resume", mode="before")
    @classmethod
    def _check_path(cls, value: Any) -> Any:
        if value == "":  # from an unset variable; it would mean the current folder
            raise ValueError("expected a path, got ''; name a folder, or leave it out")
        return value

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        """Fill in the default length, and the default rates of optimizers other than SGD."""
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
    def island_flag(self) -> str:
        """The option by which several workers act as one; empty without one."""
        return "--node-sums" if self.node_sums else "--island" if self.island != 1 else ""

    @property
    def island_size(self) -> int | None:
        """The largest number of workers that act as one; None: all of a host."""
        if self.node_sums:
            return self.node_size
        return None if self.island == "node" else self.island

    @property
    def step_size(self) -> int:
        """Samples of one worker's step."""
        return self.batch_size * self.accumulate

    @model_validator(mode="after")
    def _check_together(self) -> GeneralOptions:
        for message in self._conflicts():
            raise ValueError(message)
        return self

    def _conflicts(self) -> Iterator[str]:
        """Yield an error message for each invalid combination of options."""
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
        if self.island != 1 and self.node_sums:
            yield (
                "--island cannot be combined with --node-sums, which is --island node. Leave "
                "--node-sums out."
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
