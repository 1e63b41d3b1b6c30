"""Find commands in a program's output, and check them as if they were pasted into a shell.

A check parses the options with the command's parser, and makes the checks that the command makes
before it starts work.
"""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

from aladdin_mpi import slurm
from aladdin_mpi.options.algorithms import find_algorithm
from aladdin_mpi.options.checks import checked_algorithm
from aladdin_mpi.options.run import SimulateOptions, TrainOptions, check_cluster, parse
from aladdin_mpi.probing.options import read as read_probe
from aladdin_mpi.run import trainer

PLACEHOLDER = re.compile(r"/path/to/\w+")
COMMAND = re.compile(r"(?:^|: )\s*((?:\w+=\S* )*(?:mpirun|sbatch|python -m) .*)$", re.MULTILINE)
INLINE = re.compile(r"`((?:mpirun|sbatch|python -m) [^`]*)`")
TRAIN_SCRIPT = "slurm/train.sbatch"


def commands_in(text: str) -> list[str]:
    """Return the command lines in a text; those within a sentence are marked by backticks."""
    return [*INLINE.findall(text), *COMMAND.findall(text)]


def check(command: str, images: Path) -> None:
    """Check that a command line is accepted; ``images`` replaces a placeholder for a folder.

    Raises:
        UserError, AssertionError: the command line is rejected.
    """
    words = shlex.split(PLACEHOLDER.sub(shlex.quote(str(images)), command))
    while "=" in words[0]:
        del words[0]
    if words[0] == "sbatch":
        script = words.index(TRAIN_SCRIPT)
        settings = dict(word.split("=") for word in words[1:script])
        assert settings["--gpus-per-node"] == settings["--ntasks-per-node"]
        workers = int(settings["--nodes"]) * int(settings["--gpus-per-node"])
        _check_train(words[script + 1 :], workers=workers)
        return
    ranks = 1
    if words[0] == "mpirun":
        start = words.index("python")
        ranks = int(words[words.index("-np") + 1])
        words = words[start:]
    assert words[:2] == ["python", "-m"], command
    module, options = words[2], words[3:]
    if module == "aladdin_mpi.train":
        _check_train(options, ranks=ranks)
    elif module == "aladdin_mpi.simulate":
        simulated = parse(SimulateOptions, options, module, "")
        servers = simulated.servers if find_algorithm(simulated.algorithm).has_servers else 0
        check_cluster(simulated, simulated.workers + servers)
        checked_algorithm(simulated, simulated.workers + servers)
    elif module == "aladdin_mpi.probe":
        read_probe(options)
    elif module == "aladdin_mpi.slurm":
        slurm._parser().parse_args(options)
    else:
        raise AssertionError(f"{module}: no check for this command")


def _check_train(words: list[str], ranks: int | None = None, workers: int = 0) -> None:
    options = parse(TrainOptions, words, "aladdin_mpi.train", "")
    servers = options.servers if find_algorithm(options.algorithm).has_servers else 0
    size = ranks or workers + servers
    checked_algorithm(options, size)
    if options.compute == "timed":
        trainer._sizes(options, size)
    elif options.dataset == "cifar10":
        assert options.download  # there may be no network to load them with
    else:
        _load(options.model, options.dataset, options.data_dir)


@cache
def _load(model: str, dataset: str, data_dir: Path | None) -> None:
    """Load the data and build the model as every rank does before training."""
    words = {"model": model, "dataset": dataset, "data_dir": data_dir}
    trainer._prepare(TrainOptions.model_validate(words), None)
