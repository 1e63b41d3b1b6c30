"""Whether an algorithm suits the other options and the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS, Algorithm, find_algorithm
from aladdin_mpi.options.general import QUANTISED_BITS, GeneralOptions


def place_of_momentum(algorithm: Algorithm, options: GeneralOptions) -> str:
    """Return the side that adds momentum by the algorithm's options; by default the worker."""
    return str(getattr(getattr(options, algorithm.group, None), "momentum", "worker"))


def _servers_step(algorithm: Algorithm, options: GeneralOptions) -> bool:
    """Whether the servers' optimizers step along gradients."""
    return algorithm.server_steps or place_of_momentum(algorithm, options) != "worker"


def marks_unused(algorithm: Algorithm, options: GeneralOptions) -> bool:
    """Return whether gradients tell other ranks which parameters they do not reach."""
    is_summed = algorithm.holder == "first" or options.node_sums
    return is_summed or _servers_step(algorithm, options)


def steps_unused(algorithm: Algorithm, options: GeneralOptions) -> bool:
    """Return whether parameters that no worker's batch uses are stepped with a gradient of zero.

    Quantised gradients have no sign of zero, which would mark these parameters for other ranks
    (:mod:`aladdin_mpi.flat.unused`).
    """
    is_quantised = algorithm.wire(options) in QUANTISED_BITS
    return algorithm.steps_unused or (is_quantised and _servers_step(algorithm, options))


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
    name, compression, wire = algorithm.name, options.compression, options.wire
    compresses, quantises = compression != "none", wire in QUANTISED_BITS
    if compresses and not algorithm.compresses:
        yield (
            f"--compression {compression} requires an algorithm that sends gradients "
            f"({_able(lambda each: each.compresses)}); {name} does not. Leave the option out."
        )
    place = place_of_momentum(algorithm, options)
    if compresses and place != "worker":  # compressed are steps with the worker's momentum
        yield (
            f"--compression {compression} cannot be combined with --{name}-momentum {place}. "
            "Leave one out."
        )
    if wire == "bf16" and not algorithm.whole_models:
        yield (
            f"--wire bf16 cannot be combined with {name}, which needs small differences between "
            "models that bf16 rounds away. Use --wire int8, which also sends less."
        )
    if quantises and not algorithm.quantises:
        yield (
            f"--wire {wire} requires an algorithm that sends gradients to servers "
            f"({_able(lambda each: each.quantises)}); {name} does not. Use --wire bf16."
        )
    if quantises and compresses:
        yield (
            f"--wire {wire} cannot be combined with --compression {compression}. Use --wire "
            "bf16, or leave one out."
        )
    if options.node_sums and not algorithm.node_sums:
        yield (
            "--node-sums requires an algorithm that supports per-node aggregation "
            f"({_able(lambda each: each.node_sums)}); {name} does not. Leave the option out."
        )
    in_collective = f"which {name} sends in a collective of all workers"
    for flag, is_given, why in (
        ("--max-loss", options.max_loss is not None, "which checks the loss of each worker"),
        (f"--compression {compression}", compresses and algorithm.collective, in_collective),
        ("--allow-resize", options.allow_resize, "as each node is one worker"),
    ):
        if options.node_sums and is_given:
            yield f"--node-sums cannot be combined with {flag}, {why}. Leave one out."
    if options.checksum and algorithm.collective:
        yield (
            "--checksum requires an algorithm that sends messages from rank to rank "
            f"({_able(lambda each: not each.collective)}); {name} uses the collectives of a "
            "library. Leave the option out."
        )


def _able(has_trait: Callable[[Algorithm], bool]) -> str:
    """The names of the algorithms that a trait is true of."""
    return ", ".join(sorted(each.name for each in ALGORITHMS.values() if has_trait(each)))
