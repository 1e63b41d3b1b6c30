"""The command lines of what is recommended, which run as they are pasted.

A value that only the user knows is a placeholder below :data:`UNKNOWN`.
"""

from __future__ import annotations

import shlex

from aladdin_mpi.advice.candidates import Candidate, Ground
from aladdin_mpi.advice.options import AdviseOptions

UNKNOWN = "/path/to"
STEPS = 100
"""Length of a timed run of a model that is known by its size alone."""


def mpirun(candidate: Candidate, on: Ground, options: AdviseOptions) -> str:
    """For Open MPI, in an allocation of the cluster's hosts.

    Ranks are mapped to the hosts in turn, so that each has its share of workers, and there may be
    more of them than slots, as servers come on top. Servers are the first ranks; unless they are
    spread over the hosts, ranks are numbered host by host.
    """
    numbering = [] if candidate.spread else ["--rank-by", "slot"]
    ranks = candidate.servers + on.workers
    return shlex.join(
        [
            *("mpirun", "--map-by", "node:OVERSUBSCRIBE", *numbering, "-np", str(ranks)),
            *("python", "-m", "aladdin_mpi.train"),
            *_words(candidate, on, options),
        ]
    )


def sbatch(candidate: Candidate, on: Ground, options: AdviseOptions) -> str:
    """For Slurm, with the package's batch script; empty where hosts have different workers."""
    counts = set(on.on_host)
    if len(counts) > 1:
        return ""
    setting = "SPREAD_SERVERS=yes " if candidate.spread else ""
    each = counts.pop()
    resources = [f"--nodes={on.hosts}", f"--gpus-per-node={each}", f"--ntasks-per-node={each}"]
    words = ["sbatch", *resources, "slurm/train.sbatch", *_words(candidate, on, options)]
    return setting + shlex.join(words)


def remarks(options: AdviseOptions) -> list[str]:
    """What to know before pasting a command line, in sentences."""
    found = []
    if _is_size(options):
        found.append(
            f"{options.model} has no gradients, so these runs only time the messages of {STEPS} "
            "steps; name your --model and --dataset to train."
        )
    elif any(word.startswith(UNKNOWN) for word in _data(options)):
        found.append(
            f"Replace {UNKNOWN}/{options.dataset} with the folder that holds train/CLASS and "
            "val/CLASS."
        )
    return found


def _words(candidate: Candidate, on: Ground, options: AdviseOptions) -> list[str]:
    batch = ["--batch-size", str(options.batch_size)]
    if _is_size(options):
        timed = ["--compute", "timed", "--compute-time", f"{on.step:g}", "--steps", str(STEPS)]
        return [*candidate.words, "--model", options.model, *batch, *timed]
    rate = [] if options.lr is None else ["--lr", f"{options.lr:g}"]
    return [*candidate.words, "--model", options.model, *_data(options), *batch, *rate]


def _is_size(options: AdviseOptions) -> bool:
    # Imported here because it takes a second to import torch.
    from aladdin_mpi.run.trainer import SIZE_PREFIX

    return options.model.startswith(SIZE_PREFIX)


def _data(options: AdviseOptions) -> list[str]:
    """The data set as training takes it: ``imagenet`` is known by its sizes alone."""
    from aladdin_mpi.data.builtin_sets import VISION_SETS

    folder = [] if options.data_dir is None else ["--data-dir", str(options.data_dir)]
    if options.dataset == "imagenet":
        return ["--dataset", "imagefolder", *(folder or ["--data-dir", f"{UNKNOWN}/imagenet"])]
    download = ["--download"] if options.dataset in VISION_SETS else []
    return ["--dataset", options.dataset, *folder, *download]
