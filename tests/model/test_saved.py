"""State of an object in a checkpoint, and merging of the states of several ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.state import (
    FIRST,
    HELD_BACK,
    LARGEST,
    MEAN,
    RESTART,
    SMALLEST,
    TOTAL,
    MergedPart,
    MergedState,
    Rule,
    Stateful,
    merge,
    numbers,
    saved,
)
from aladdin_mpi.optimizers.base import INHERITED
from tests.messages import naming


class Owner(Stateful):
    SAVED = saved("draws")

    def __init__(self, seed: int) -> None:
        self.draws = random.Random(seed)


@pytest.mark.parametrize("is_old", [False, True])
def test_saved_random_generator_continues_its_sequence(is_old: bool) -> None:
    owner, other = Owner(1), Owner(2)
    owner.draws.gauss(0.0, 1.0)  # which keeps a second number
    state = owner.state_dict()
    if is_old:  # as in older checkpoints
        state = {"draws": owner.draws.getstate()}
    other.load_state_dict(state)
    assert [other.draws.gauss(0.0, 1.0) for _ in range(3)] == [
        owner.draws.gauss(0.0, 1.0) for _ in range(3)
    ]


class Codec:
    """A component with a separate state, part of which is held back."""

    def __init__(self, left: Tensor | None = None) -> None:
        self.left = left

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.left = state["left"]

    def scale_held_back(self, factor: float) -> None:
        if self.left is not None:
            self.left.mul_(factor)


class Link(Stateful):
    SAVED = saved("count", merge=TOTAL) | saved(codec="_codec", merge=HELD_BACK)

    def __init__(self, count: int, left: Sequence[float] | None = None) -> None:
        self.count = count
        self._codec = Codec(None if left is None else torch.tensor(left))


class Component(Stateful):
    SAVED = (
        saved("mean", "shards", merge=MEAN)
        | saved("steps", merge=FIRST)
        | saved("most", merge=LARGEST)
        | saved("least", merge=SMALLEST)
        | saved("own", "link", inner="link.count")
    )

    def __init__(self, value: float, left: Sequence[float] | None = None) -> None:
        self.mean = torch.tensor([value, 1.0])
        self.shards = {0: torch.tensor([value]), 1: torch.tensor([2 * value])}
        self.steps = self.most = self.least = int(value)
        self.own = torch.tensor([value])
        self.link = Link(int(value), left)


def merged_state(states: Sequence[dict[str, Any]], owner: type[Stateful]) -> MergedState:
    merged: dict[str, Any] | None = None
    counts: list[dict[str, float] | None] = []
    for count, state in enumerate(states, start=1):
        counts.append(numbers(state))
        merged = merge(owner.SAVED, merged, state, count)
    return MergedState(torch.zeros(0), merged or {}, counts=counts)


def test_state_keys_name_attributes_parts_and_components() -> None:
    state = Component(3.0, [1.0]).state_dict()
    assert list(state) == ["mean", "shards", "steps", "most", "least", "own", "link", "inner"]
    assert state["link"] == {"count": 3, "codec": {"left": torch.tensor([1.0])}}
    assert state["inner"] == 3


def test_tensors_are_loaded_in_place() -> None:
    component, other = Component(1.0), Component(2.0)
    mean, shard = other.mean, other.shards[0]
    other.load_state_dict(component.state_dict())
    assert mean is other.mean and shard is other.shards[0]
    assert other.mean.tolist() == [1.0, 1.0]
    assert [shard.item() for shard in other.shards.values()] == [1.0, 2.0]
    assert (other.steps, other.link.count) == (1, 1)


def test_new_rank_initialises_each_field_by_its_rule() -> None:
    states = [Component(float(value), [value, 0.0]).state_dict() for value in (2, 4, 9)]
    states = [{**state, "steps": 7 + place} for place, state in enumerate(states)]
    merged = merged_state(states, Component)
    new = [Component(100.0) for _ in range(2)]
    for worker, component in enumerate(new):
        component.take_merged(MergedPart(merged, worker, workers=2, held_back=3 / 2))
        assert component.mean.tolist() == [5.0, 1.0]
        assert component.shards[1].tolist() == [10.0]
        assert (component.steps, component.most, component.least) == (7, 9, 2)
        assert component.own.tolist() == [100.0]
        assert component.link._codec.left is not None
        assert component.link._codec.left[0].item() == pytest.approx(5.0 * 3 / 2)
        merged.worker["link"]["codec"]["left"] = torch.tensor([5.0, 0.0])  # each rank has its own
    assert [component.link.count for component in new] == [2 + 9, 4]


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        (FIRST, (3, 1, 2), 3),
        (LARGEST, (3, 1, 4), 4),
        (SMALLEST, (3, 1, 2), 1),
        (TOTAL, (3, 1, 2), 3),
        (MEAN, (3, 1, 2), 3),  # only tensors have a mean
        (MEAN, ([1.0], [2.0], [6.0]), [3.0]),
        (MEAN, (None, [3.0], None), [1.0]),
        (MEAN, ([3.0], None, [6.0]), [3.0]),
        (HELD_BACK, ([3.0], [3.0], [6.0]), [4.0]),
        (RESTART, ([3.0], [3.0], [6.0]), [4.0]),
    ],
)
def test_merge_rule_combines_values_of_three_ranks(rule: Rule, values: Any, expected: Any) -> None:
    """A list stands for a tensor, and None for a tensor of zeros."""
    tensors = [torch.tensor(each) if isinstance(each, list) else each for each in values]
    merged = tensors[0]
    for count, new in enumerate(tensors[1:], start=2):
        merged = rule.put(merged, new, count, "")
    assert merged == (pytest.approx(expected) if isinstance(expected, list) else expected)


def test_merged_mean_of_equal_tensors_is_exact() -> None:
    values = torch.rand(100)
    merged = values.clone()
    for count in range(2, 8):
        merged = MEAN.put(merged, values.clone(), count, "")
    assert torch.equal(merged, values)


def test_merge_requires_equal_integers() -> None:
    one, other = torch.tensor([1, 0]), torch.tensor([2, 0])
    assert torch.equal(MEAN.put(one, one.clone(), 2, "codes"), one)
    with pytest.raises(UserError, match=naming("'codes'", "torch.int64", "--allow-resize")):
        MEAN.put(one, other, 2, "codes")


def test_optimizer_keeps_largest_number_of_steps() -> None:
    one, other = (
        {"values": [{"step": torch.tensor(step), "average": torch.tensor([step])}]}
        for step in (2.0, 6.0)
    )
    ((values,),) = INHERITED.put(one, other, 2, "").values()
    assert (values["step"].item(), values["average"].item()) == (6.0, 4.0)


def test_merge_ignores_missing_parts_of_worker_without_a_step() -> None:
    assert MEAN.put([1, 2], [3], 2, "") == [1, 2]
    assert MEAN.put([], [{"a": 1}], 2, "") == [{"a": 1}]


def test_merged_counters_keep_their_sum_for_any_number_of_ranks() -> None:
    merged = MergedState(torch.zeros(0), {}, counts=[{"n": 5}, None, {"n": 7}, {"n": 1}])
    assert merged.total("n") == 13
    assert merged.survivors == 3
    for workers in range(1, 7):
        assert sum(merged.carried("n", worker, workers) for worker in range(workers)) == 13
    assert merged.carried("other", 0, 1) == 0


def test_messages_of_workers_with_different_compression_are_merged() -> None:
    """Components drop them, so any of them will do; means of other states are as before."""
    states = [
        {"outbox": {"former": {"messages": [torch.ones(size)]}}, "codec": {"left": torch.ones(2)}}
        for size in (3299, 1675, 3299)
    ]
    merged = None
    for count, state in enumerate(states, start=1):
        merged = merge(saved("outbox", "codec"), merged, state, count)
    assert merged is not None
    assert len(merged["outbox"]["former"]["messages"][0]) == 3299
    assert merged["codec"]["left"].tolist() == [1, 1]
