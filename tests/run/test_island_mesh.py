"""The mesh of an island, without GPUs."""

from __future__ import annotations

import pytest
import torch

from aladdin_mpi.run.island_mesh import _shared
from tests.messages import check_names


@pytest.mark.parametrize(
    ("identities", "reporters"),
    [
        (["cpu"] * 4, []),
        (["a", "b"] * 2, []),
        (["a"] * 4, [0, 2]),
        (["a", "b", "a", "a"], [2]),
    ],
)
def test_members_that_share_a_gpu_are_refused(identities: list[str], reporters: list[int]) -> None:
    """By the first of them; members of different islands are on other hosts, or share one."""
    groups = [[0, 1], [0, 1], [2, 3], [2, 3]]
    device = torch.device("cuda", 0)  # the name on every rank that sees one GPU only
    problems = {rank: _shared(rank, groups[rank], identities, device) for rank in range(4)}
    assert [rank for rank, problem in problems.items() if problem] == reporters
    for rank in reporters:
        check_names(problems[rank], "island_mesh()", f"ranks {rank}, {rank + 1}", "cuda:0", "cpu")
