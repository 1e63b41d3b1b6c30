"""Whether an algorithm suits the other options and the number of ranks."""

from __future__ import annotations

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS, Algorithm, find_algorithm
from aladdin_mpi.options.general import QUANTISED_BITS, GeneralOptions


def place_of_momentum(algorithm: Algorithm, options: GeneralOptions) -> str:
    """Where the algorithm's options have momentum added; the worker if they do not say."""
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


def check_compression(algorithm: Algorithm, options: GeneralOptions) -> None:
    """Check that ``--compression`` suits the algorithm and its options.

    Raises:
        UserError: it sends no gradients, or not such as can be compressed.
    """
    if options.compression == "none":
        return
    if not algorithm.compresses:
        able = ", ".join(sorted(a.name for a in ALGORITHMS.values() if a.compresses))
        raise UserError(
            f"--compression {options.compression}: expected an algorithm that sends gradients "
            f"({able}), got {algorithm.name}; leave the option out"
        )
    # Compressed are steps that hold the worker's own momentum.
    place = place_of_momentum(algorithm, options)
    if place != "worker":
        raise UserError(
            f"--compression {options.compression}: expected --{algorithm.name}-momentum worker, "
            f"got {place}; leave one of the two out"
        )


def check_wire(algorithm: Algorithm, options: GeneralOptions) -> None:
    """Check that ``--wire`` suits the algorithm and its options.

    Raises:
        UserError: in few bits are only gradients to servers, and their models, and only those
            that are not compressed otherwise.
    """
    if options.wire == "bf16" and not algorithm.whole_models:
        raise UserError(
            f"--wire bf16: expected a wire that keeps the differences of models for "
            f"{algorithm.name}, got one that rounds whole models; use --wire int8, which sends less"
        )
    if options.wire not in QUANTISED_BITS:
        return
    if not algorithm.quantises:
        able = ", ".join(sorted(a.name for a in ALGORITHMS.values() if a.quantises))
        raise UserError(
            f"--wire {options.wire}: expected an algorithm that sends gradients to servers "
            f"({able}), got {algorithm.name}; use --wire bf16"
        )
    if options.compression != "none":
        raise UserError(
            f"--wire {options.wire}: expected without --compression {options.compression}, whose "
            "values are few; use --wire bf16, or leave one of the two out"
        )


def check_node_sums(algorithm: Algorithm, options: GeneralOptions) -> None:
    """Check that ``--node-sums`` suits the algorithm and its options.

    Raises:
        UserError: it has not been shown to, or an option needs each worker's own gradient.
    """
    if not options.node_sums:
        return
    if not algorithm.node_sums:
        able = ", ".join(sorted(a.name for a in ALGORITHMS.values() if a.node_sums))
        raise UserError(
            f"--node-sums: expected an algorithm whose worker can be a node ({able}), got "
            f"{algorithm.name}; leave the option out"
        )
    for flag, is_given, why in (
        ("--max-loss", options.max_loss is not None, "which looks at each worker's loss"),
        (
            f"--compression {options.compression}",
            options.compression != "none" and algorithm.collective,
            f"which {algorithm.name} sends in a collective of all workers",
        ),
        ("--allow-resize", options.allow_resize, "as workers are nodes then"),
    ):
        if is_given:
            raise UserError(
                f"--node-sums: expected without {flag}, {why}; leave one of the two out"
            )


def check_checksum(algorithm: Algorithm, options: GeneralOptions) -> None:
    """Check that ``--checksum`` suits the algorithm.

    Raises:
        UserError: what it sends goes by collectives.
    """
    if options.checksum and algorithm.collective:
        able = ", ".join(sorted(a.name for a in ALGORITHMS.values() if not a.collective))
        raise UserError(
            f"--checksum: expected an algorithm that sends messages from rank to rank ({able}), "
            f"got {algorithm.name}, whose sums are made by a library; leave the option out"
        )


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
        beside = f", for --servers {servers} and {those}" if servers else ""
        raise UserError(
            f"--algorithm {algorithm.name}: expected at least {servers + least} ranks{beside}, got "
            f"{size}; start it with mpirun -np {servers + least} or more, or simulate it with "
            f"--workers {least} or more"
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
    check_compression(algorithm, options)
    check_wire(algorithm, options)
    check_node_sums(algorithm, options)
    check_checksum(algorithm, options)
    algorithm.check(options)
    return algorithm
