"""Whether an algorithm suits the other options and the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS, Algorithm, find_algorithm
from aladdin_mpi.options.general import QUANTISED_BITS, SUM_BITS, GeneralOptions


def place_of_momentum(algorithm: Algorithm, options: GeneralOptions) -> str:
    """Return the side that adds momentum by the algorithm's options; by default the worker."""
    return str(getattr(getattr(options, algorithm.group, None), "momentum", "worker"))


def _servers_step(algorithm: Algorithm, options: GeneralOptions) -> bool:
    """Whether the servers' optimizers step along gradients."""
    return algorithm.server_steps or place_of_momentum(algorithm, options) != "worker"


def marks_unused(algorithm: Algorithm, options: GeneralOptions) -> bool:
    """Return whether gradients tell other ranks which parameters they do not reach."""
    is_summed = algorithm.holder == "first" or options.island_flag
    return bool(is_summed) or _servers_step(algorithm, options)


def steps_unused(algorithm: Algorithm, options: GeneralOptions) -> bool:
    """Return whether parameters that no worker's batch uses are stepped with a gradient of zero.

    Quantised gradients, and those of low rank, have no sign of zero, which would mark these
    parameters for other ranks (:mod:`aladdin_mpi.flat.unused`).
    """
    loses_marks = algorithm.wire(options) in SUM_BITS or options.compression == "powersgd"
    steps_along = algorithm.all_reduces == "gradients" or _servers_step(algorithm, options)
    return algorithm.steps_unused or (loses_marks and steps_along)


def check_ranks(algorithm: Algorithm, size: int, servers: int) -> None:
    """Check that ``size`` ranks are enough, and the servers not too many.

    Raises:
        UserError: with the number of ranks needed.
    """
    servers = servers if algorithm.has_servers else 0
    workers = size - servers
    least = algorithm.least_workers
    if workers < least:
        those = "one worker" if least == 1 else f"{least} workers"
        needed = f" (--servers {servers} and {those})" if servers else ""
        alone = "; if mpirun started several, see docs/troubleshooting.md" if size == 1 else ""
        raise UserError(
            f"--algorithm {algorithm.name}: expected at least {servers + least} ranks{needed}, "
            f"got {size}; start it with mpirun -np {servers + least} or more, or simulate it "
            f"with --workers {least} or more{alone}"
        )
    if servers > workers:
        raise UserError(
            f"--servers: expected at most as many servers as workers, got {servers} servers and "
            f"{workers} worker{'s' if workers > 1 else ''}; with {size} ranks use --servers "
            f"{size // 2} or fewer, or start it with mpirun -np {2 * servers} or more; simulated, "
            f"use --servers {workers} or fewer, or --workers {servers} or more"
        )


def checked_algorithm(options: GeneralOptions, size: int) -> Algorithm:
    """The algorithm that the options name, if it and they suit each other and ``size`` ranks.

    Raises:
        UserError: they do not.
    """
    algorithm = find_algorithm(options.algorithm)
    check_ranks(algorithm, size, options.servers)
    for conflict in _conflicts(algorithm, options):
        raise UserError(conflict)
    algorithm.check(options)
    return algorithm


def _conflicts(algorithm: Algorithm, options: GeneralOptions) -> Iterator[str]:
    """Why the algorithm does not suit the other options, with the remedy."""
    name, compression = algorithm.name, options.compression
    yield from _compression_conflicts(algorithm, options)
    yield from _wire_conflicts(algorithm, options)
    island = options.island_flag
    if island and not algorithm.islands:
        yield (
            f"{island} requires an algorithm whose workers can be islands "
            f"({_able(lambda each: each.islands)}); those of {name} cannot. Leave the option out."
        )
    in_collective = f"which {name} sends in a collective of all workers"
    for flag, is_given, why in (
        ("--max-loss", options.max_loss is not None, "which checks the loss of each worker"),
        ("--compression dgc", compression == "dgc" and algorithm.collective, in_collective),
    ):
        if island and is_given:
            yield f"{island} cannot be combined with {flag}, {why}. Leave one out."
    if options.checksum and algorithm.collective:
        yield (
            "--checksum requires an algorithm that sends messages from rank to rank "
            f"({_able(lambda each: not each.collective)}); {name} uses the collectives of a "
            "library. Leave the option out."
        )


def _compression_conflicts(algorithm: Algorithm, options: GeneralOptions) -> Iterator[str]:
    """Why the algorithm does not suit ``--compression``, with the remedy."""
    name, compression = algorithm.name, options.compression
    if compression == "dgc" and not algorithm.compresses:
        yield (
            "--compression dgc requires an algorithm that sends gradients "
            f"({_able(lambda each: each.compresses)}); {name} does not. Leave the option out."
        )
    if compression == "powersgd" and algorithm.all_reduces is None:
        remedy = "Use --compression dgc" if algorithm.compresses else "Leave the option out"
        yield (
            "--compression powersgd requires an algorithm that sums over all workers "
            f"({_able(_all_reduces)}); {name} does not. {remedy}."
        )
    if compression == "powersgd" and options.wire not in ("auto", "fp32"):
        yield (
            f"--wire {options.wire} cannot be combined with --compression powersgd, whose factors "
            "are sent in fp32. Leave one out."
        )
    place = place_of_momentum(algorithm, options)
    if compression != "none" and place != "worker":  # what is compressed includes the momentum
        yield (
            f"--compression {compression} cannot be combined with --{name}-momentum {place}. "
            "Leave one out."
        )


def _wire_conflicts(algorithm: Algorithm, options: GeneralOptions) -> Iterator[str]:
    """Why the algorithm does not suit ``--wire``, with the remedy."""
    name, wire = algorithm.name, options.wire
    if wire not in ("auto", "fp32") and algorithm.has_fixed_format:
        yield (
            f"--wire {wire} cannot be combined with {name}, which has a fixed message format. "
            "Leave the option out."
        )
        return
    if wire == "bf16" and not algorithm.whole_models:
        yield (
            f"--wire bf16 cannot be combined with {name}, which needs small differences between "
            "models that bf16 rounds away. Use --wire int8, which also sends less."
        )
    if wire not in SUM_BITS:
        return
    if wire not in QUANTISED_BITS and algorithm.all_reduces is None:
        yield (
            f"--wire {wire} requires an algorithm that sums over all workers "
            f"({_able(_all_reduces)}); {name} does not. Use --wire "
            f"{'int4' if algorithm.quantises else 'bf16'}."
        )
    if not (algorithm.quantises or algorithm.all_reduces):
        able = _able(lambda each: each.quantises or _all_reduces(each))
        yield (
            f"--wire {wire} requires an algorithm with servers or with sums over all workers "
            f"({able}); {name} has neither. Use --wire bf16."
        )
    if options.compression != "none":
        yield (
            f"--wire {wire} cannot be combined with --compression {options.compression}. Use "
            "--wire bf16, or leave one out."
        )
    library = str(getattr(getattr(options, algorithm.group, None), "allreduce", "auto"))
    if algorithm.all_reduces and library != "auto":
        yield (
            f"--wire {wire} cannot be combined with --{name}-allreduce {library}, which adds the "
            f"values it sends. Leave --{name}-allreduce out, or use --wire bf16."
        )


def _all_reduces(algorithm: Algorithm) -> bool:
    return algorithm.all_reduces is not None


def _able(has_trait: Callable[[Algorithm], bool]) -> str:
    """The names of the algorithms that a trait is true of."""
    return ", ".join(sorted(each.name for each in ALGORITHMS.values() if has_trait(each)))
