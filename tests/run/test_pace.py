"""Times at which a modelled step completes the parts of its gradient."""

from __future__ import annotations

import pytest

from aladdin_mpi.options.general import FORWARD_SHARE
from aladdin_mpi.worker.step import StepTimeModel, interpolated


def test_gradient_pace_without_measured_backward_is_proportional() -> None:
    pace = StepTimeModel()
    assert [pace.completed(share) for share in (0.0, 0.3, 1.0)] == [
        FORWARD_SHARE,
        FORWARD_SHARE + (1 - FORWARD_SHARE) * 0.3,
        FORWARD_SHARE + (1 - FORWARD_SHARE) * 1.0,
    ]


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, 0.1), (0.25, 0.2), (0.5, 0.3), (0.75, 0.3), (0.9, 0.3), (0.95, 0.65), (1.0, 1.0)],
)
def test_gradient_pace_interpolates_between_measured_points(share: float, expected: float) -> None:
    shape = [(0.0, 0.1), (0.5, 0.3), (0.9, 0.3)]
    assert interpolated(shape, share) == pytest.approx(expected)
    assert StepTimeModel(forward=0.5, backward=shape).completed(share) == pytest.approx(
        0.5 + expected / 2
    )
