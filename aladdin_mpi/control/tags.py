"""The tags of all messages above the transport, in one place so that none is used twice."""

from __future__ import annotations

from enum import IntEnum, unique

COORDINATOR = 0
"""The rank that keeps the budget and the metrics."""


@unique
class Tag(IntEnum):
    """The subject of a message."""

    GRADIENT = 1  # worker to server: a header, then buckets
    MODEL = 2  # server to worker: a header, then a bucket
    DRAW = 3  # to the coordinator: a request for a sample lease, with a report
    GRANT = 4  # its answer
    NODE_TICKET = 25  # leader of a node to its other workers: a part of the node's samples
    SNAPSHOT = 5  # from rank 0: a request for a part of the model
    SHARD = 6  # its answer: one bucket in a frame
    EVALUATE = 23  # from rank 0, and from worker to worker: a piece of the model to evaluate
    EVALUATED = 24  # worker to rank 0: sums over its part of the test data
    BARRIER = 12  # to rank 0: this rank has arrived; its answer: all have
    LOCAL_GRADIENT = 9  # worker to the leading worker of its host: a bucket
    LOCAL_MODEL = 10  # the other way
    SAMPLE = 15  # from rank 0: a request for a sample of the model
    SAMPLED = 16  # its answer
    INPUTS = 17  # first worker to rank 0: inputs of the module
    FIGURES = 18  # worker to rank 0: figures of the user's loop
    AMONG_WORKERS = 19  # worker to worker: a value of the user's loop, to be added up
    SKIPPED = 22  # worker to rank 0: an image that cannot be read
    PROBE = 34  # of a probe of the cluster: bytes that are only timed
    SETUP = 7  # before training: what all ranks must agree on
    REPORT = 8  # after training: totals for the summary
    SUSPEND = 11  # to the coordinator: the signal after which the run is saved and ends
    ALIVE = 13  # a heartbeat to rank 0 or its standby, or an answer of rank 0
    EXCLUDED = 14  # from rank 0, to all: a rank that is excluded from the run
    REFUSAL = 20  # to rank 0: something was refused
    WHOLE = 21  # between worker and server: a difference was lost, send the whole bucket
    DEPUTY = 26  # rank 0 to its standby: its state of the run
    JOIN = 27  # between two groups, to the first rank of the next: what this rank brings
    MEMBERS = 28  # its answer: the members
    STATE = 29  # in a new group, to rank 0: this rank's state in the former one
    MIRROR = 31  # server to its replica's rank: a bucket's length, then the bucket
    COMING = 33  # between two groups, to the first rank of the next: this rank lives and will join
    SPARES_GO = 30  # to spare ranks: the run has ended without them
    SPARES_CALLED = 32  # to spare ranks: a group is revoked, and these ranks are excluded
    REDUCE_SCATTER = 40  # worker to worker: a part of a bucket, for its owner to add
    ALL_GATHER = 41  # worker to worker: a part of a bucket, summed
    STEPS = 42  # worker to rank 0, after a failure: number of steps it has summed
    STEPS_OF_ALL = 43  # its answer: the numbers of all
    SUMS = 44  # worker to worker: the sums of a step that the other lacks
    PUSH = 50  # worker to worker, push-sum: a weight, then a model in buckets
    GOSSIP = 51  # worker to worker: the buckets' weights, then a model; or nothing: the end
    GOSSIP_ENDED = 52  # to oneself: every worker's end has arrived
    AVERAGE = 53  # worker to worker: a model in buckets, to be averaged
    AVERAGED = 54  # its answer: the other model as it was before


_GENERATIONS = 1000


def of_generation(number: int) -> tuple[int, int]:
    """Return the tags of parts and sums after ``number`` regroupings: older may be in flight."""
    return _GENERATIONS + 2 * number, _GENERATIONS + 2 * number + 1


SEALED = frozenset(
    {Tag.GRADIENT, Tag.MODEL, Tag.LOCAL_GRADIENT, Tag.LOCAL_MODEL}
    | {Tag.PUSH, Tag.GOSSIP, Tag.AVERAGE, Tag.AVERAGED}
)
"""Those of gradients and models, and of their headers: they have checksums on request."""
