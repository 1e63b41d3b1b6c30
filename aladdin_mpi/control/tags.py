"""The tags of all messages above the transport, in one place so that none is used twice."""

from __future__ import annotations

from enum import IntEnum, unique

COORDINATOR = 0
"""The rank that keeps the budget and the books."""


@unique
class Tag(IntEnum):
    """What a message is about."""

    GRADIENT = 1
    """Worker to server: a header, then buckets."""
    MODEL = 2
    """Server to worker: a header, then a bucket."""
    DRAW = 3
    """To the coordinator of the budget."""
    GRANT = 4
    """Its answer."""
    NODE_TICKET = 25
    """Leader of a node to its other workers: a part of the node's samples."""
    SNAPSHOT = 5
    """From rank 0: send me your part of the model."""
    SHARD = 6
    """The answer: one bucket in a frame."""
    EVALUATE = 23
    """From rank 0, and from worker to worker: a piece of the model that is to be measured."""
    EVALUATED = 24
    """Worker to rank 0: sums over its part of the test data."""
    BARRIER = 12
    """To rank 0: I am here; and its answer: all are."""
    LOCAL_GRADIENT = 9
    """Worker to the leading worker of its host: a bucket."""
    LOCAL_MODEL = 10
    """The other way."""
    SAMPLE = 15
    """From rank 0: send me a sample of your model."""
    SAMPLED = 16
    """The answer."""
    INPUTS = 17
    """From the first worker, to rank 0: what the module was called with."""
    FIGURES = 18
    """Worker to rank 0: figures of the user's loop."""
    AMONG_WORKERS = 19
    """Worker to worker: a value of the user's loop, to be added up."""
    SKIPPED = 22
    """Worker to rank 0: an image that cannot be read."""
    PROBE = 34
    """Of a probe of the cluster: bytes that are only timed."""
    SETUP = 7
    """Before training: what all ranks must agree on."""
    REPORT = 8
    """After training: totals for the summary."""
    SUSPEND = 11
    """To the coordinator: the number of a signal after which the run is to be saved and to end."""
    ALIVE = 13
    """A sign of life: to rank 0, its answer, and to the rank that watches rank 0."""
    EXCLUDED = 14
    """From rank 0, to all: a rank that is excluded from the run."""
    REFUSAL = 20
    """To rank 0: something was refused."""
    WHOLE = 21
    """Worker to server, or server to worker: a difference was lost, send the bucket as a whole."""
    DEPUTY = 26
    """Rank 0 to its deputy: what it alone knows of the run."""
    JOIN = 27
    """Between two groups, to the first rank of the next one: what this rank brings."""
    MEMBERS = 28
    """Its answer: who is in it."""
    STATE = 29
    """In a new group, to rank 0: this rank's state in the former one."""
    MIRROR = 31
    """Server to the rank that keeps its mirror: a bucket's length, then the bucket."""
    COMING = 33
    """Between two groups, to the first rank of the next one: I live, and come when I can."""
    SPARES_GO = 30
    """To spare ranks: the run has ended without them."""
    SPARES_CALLED = 32
    """To spare ranks: a group has come apart, and these ranks are excluded."""
    REDUCE_SCATTER = 40
    """Worker to worker: a part of a bucket, for its owner to add."""
    ALL_GATHER = 41
    """Worker to worker: a part of a bucket, summed."""
    STEPS = 42
    """Worker to rank 0, after a death: how many steps it has summed."""
    STEPS_OF_ALL = 43
    """Its answer: what all have told."""
    SUMS = 44
    """Worker to worker: the sums of a step that the other lacks."""
    PUSH = 50
    """Worker to worker, push-sum: a weight, then a model in buckets."""
    GOSSIP = 51
    """Worker to worker: the buckets' weights, then a model in buckets; or nothing: the end."""
    GOSSIP_ENDED = 52
    """To oneself: every worker's end has come."""
    AVERAGE = 53
    """Worker to worker: a model in buckets, to be averaged."""
    AVERAGED = 54
    """The answer: the other model as it was before."""


_GENERATIONS = 1000


def of_generation(number: int) -> tuple[int, int]:
    """The tags of parts and sums after ``number`` regroupings: earlier ones may be on their way."""
    return _GENERATIONS + 2 * number, _GENERATIONS + 2 * number + 1


SEALED = frozenset(
    {
        Tag.GRADIENT,
        Tag.MODEL,
        Tag.LOCAL_GRADIENT,
        Tag.LOCAL_MODEL,
        Tag.PUSH,
        Tag.GOSSIP,
        Tag.AVERAGE,
        Tag.AVERAGED,
    }
)
"""Those of gradients and models, and what announces them: they have checksums if asked for."""
