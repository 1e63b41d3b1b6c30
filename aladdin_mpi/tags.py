"""The tags of all messages above the transport, in one place so that none is used twice."""

from __future__ import annotations

from enum import IntEnum


class Tag(IntEnum):
    """What a message is about."""

    GRADIENT = 1
    """Worker to server: a header, then buckets."""
    MODEL = 2
    """Server to worker: a header, then a bucket."""
    DRAW = 3
    """To the keeper of the budget."""
    GRANT = 4
    """Its answer."""
    SNAPSHOT = 5
    """From rank 0: send me your part of the model."""
    SHARD = 6
    """The answer: one bucket in a frame."""
    LOCAL_GRADIENT = 9
    """Worker to the leading worker of its host: a bucket."""
    LOCAL_MODEL = 10
    """The other way."""
    SETUP = 7
    """Before training: what all ranks must agree on."""
    REPORT = 8
    """After training: totals for the summary."""
    SUSPEND = 11
    """To the keeper: the number of a signal after which the run is to be saved and to end."""
    REDUCE_SCATTER = 40
    """Worker to worker: a part of a bucket, for its owner to add."""
    ALL_GATHER = 41
    """Worker to worker: a part of a bucket, summed."""
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
