"""The command lines of what is recommended, to be copied."""

from __future__ import annotations

import shlex

from aladdin_mpi.advice.candidates import Candidate, Ground
from aladdin_mpi.advice.options import AdviseOptions


def mpirun(candidate: Candidate, on: Ground, options: AdviseOptions) -> str:
    """For Open MPI."""
    ranks = candidate.servers + on.workers
    return shlex.join(
        [
            "mpirun",
            "-np",
            str(ranks),
            "python",
            "-m",
            "aladdin_mpi.train",
            *_words(candidate, options),
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
    words = ["sbatch", *resources, "slurm/train.sbatch", *_words(candidate, options)]
    return setting + shlex.join(words)


def _words(candidate: Candidate, options: AdviseOptions) -> list[str]:
    return [
        *candidate.words,
        *("--model", options.model, "--dataset", options.dataset),
        *("--batch-size", str(options.batch_size)),
    ]
