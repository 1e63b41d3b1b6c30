"""The tags of all messages above the transport, in one place to keep them unique."""

from __future__ import annotations

from enum import IntEnum, unique

COORDINATOR = 0
"""The rank that manages the budget and the metrics."""


@unique
class Tag(IntEnum):
    """The subject of a message."""

    GRADIENT = 1  # worker to server: a header, then buckets
    MODEL = 2  # server to worker: a header, then a bucket
    DRAW = 3  # to the coordinator: a request for a sample lease, with a report
    GRANT = 4  # answer to DRAW: the lease
    ISLAND_LEASE = 25  # first member of an island to the others: the island's lease
    SNAPSHOT = 5  # from rank 0: a request for a part of the model
    SHARD = 6  # answer to SNAPSHOT: one bucket in a frame
    EVALUATE = 23  # from rank 0, and between workers: a piece of the model to evaluate
    EVALUATED = 24  # worker to rank 0: sums over its part of the test data
    BARRIER = 12  # to rank 0: this rank has arrived; its answer: all have
    LOCAL_GRADIENT = 9  # member of an island to the owner of a lane: a piece of a bucket
    LOCAL_MODEL = 10  # owner of a lane to the other members: a piece of a bucket
    LOCAL_NORM = 37  # between owners of an island's lanes: a sum of squares
    SAMPLE = 15  # from rank 0: a request for a sample of the model
    SAMPLED = 16  # answer to SAMPLE
    INPUTS = 17  # first worker to rank 0: inputs of the module
    FIGURES = 18  # worker to rank 0: metrics logged by the training loop
    AMONG_WORKERS = 19  # between workers: a call of run.reduce(), with its place in the loop
    SUMMANDS = 35  # between workers: the tensor of such a call
    SUM_READY = 36  # to the rank itself: the calls of all workers have arrived
    SKIPPED = 22  # worker to rank 0: an unreadable image
    PROBE = 34  # in a probe of the cluster: bytes that are only timed
    SETUP = 7  # before training: facts that all ranks must agree on
    REPORT = 8  # after training: totals for the summary
    SUSPEND = 11  # to the coordinator: the signal after which the run is saved and ends
    HEARTBEAT = 13  # to rank 0 or its standby, or an answer of rank 0
    EXCLUDED = 14  # from rank 0, to all: a rank that is excluded from the run
    REFUSAL = 20  # to rank 0: a refused gradient or message
    WHOLE = 21  # between worker and server: a difference was lost, send the whole bucket
    STANDBY = 26  # rank 0 to its standby: its state of the run
    JOIN = 27  # between two groups, to the first rank of the next: state to be merged
    MEMBERS = 28  # answer to JOIN: the members
    STATE = 29  # in a new group, to rank 0: this rank's state in the previous one
    REPLICA = 31  # server to its replica's rank: a bucket's length, then the bucket
    COMING = 33  # between two groups, to the first rank of the next: this rank will join
    SPARES_GO = 30  # to spare ranks: the run has ended without them
    SPARES_CALLED = 32  # to spare ranks: a group is revoked, and these ranks are excluded
    STEPS = 42  # worker to rank 0, after a failure: number of steps it has summed
    STEPS_OF_ALL = 43  # answer to STEPS: the numbers of all
    SUMS = 44  # between workers: the sums of a step that the other lacks
    PUSH = 50  # between workers, push-sum: a weight, then a model in buckets
    GOSSIP = 51  # between workers: the buckets' weights, then a model; empty: the end
    GOSSIP_ENDED = 52  # to the rank itself: every worker's end has arrived
    AVERAGE = 53  # between workers: a model in buckets, to be averaged
    AVERAGED = 54  # answer to AVERAGE: the other model before averaging


_INCARNATIONS = 10_000
_TAGS_OF_ONE = 100


def of_incarnation(tag: Tag, incarnation: int) -> int:
    """Return the tag of messages with a rank that has returned ``incarnation`` times.

    Messages from before its exclusion may still arrive.
    """
    return _INCARNATIONS + _TAGS_OF_ONE * (incarnation % _TAGS_OF_ONE) + tag if incarnation else tag


SEALED = frozenset(
    {Tag.GRADIENT, Tag.MODEL, Tag.LOCAL_GRADIENT, Tag.LOCAL_MODEL}
    | {Tag.PUSH, Tag.GOSSIP, Tag.AVERAGE, Tag.AVERAGED}
)
"""Tags of gradients and models, with their headers, which have checksums on request."""
