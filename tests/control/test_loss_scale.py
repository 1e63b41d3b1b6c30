from __future__ import annotations

from aladdin_mpi.control.budget import FIRST_EXPONENT, LARGEST_EXPONENT, PATIENCE, LossScale


def test_loss_scale_is_halved_once_for_all_steps_that_used_it() -> None:
    scale = LossScale()
    assert scale.overflowed(sample=100, drawn=160)
    assert scale.exponent == FIRST_EXPONENT - 1
    for sample in (100, 120, 159):  # leased before
        assert not scale.overflowed(sample, drawn=200)
    assert scale.exponent == FIRST_EXPONENT - 1
    assert scale.overflowed(sample=160, drawn=240)
    assert scale.exponent == FIRST_EXPONENT - 2


def test_loss_scale_is_doubled_after_many_steps_without_an_overflow() -> None:
    scale = LossScale()
    for _ in range(PATIENCE - 1):
        scale.count()
    assert scale.exponent == FIRST_EXPONENT
    scale.overflowed(0, 10)
    for _ in range(PATIENCE - 1):
        scale.count()
    assert scale.exponent == FIRST_EXPONENT - 1
    scale.count()
    assert scale.exponent == FIRST_EXPONENT


def test_loss_scale_stays_in_its_range() -> None:
    scale = LossScale()
    for _ in range(PATIENCE * 20):
        scale.count()
    assert scale.exponent == LARGEST_EXPONENT
    for drawn in range(1, 100):
        scale.overflowed(drawn, drawn)
    assert scale.exponent == 0


def test_loss_scale_resumes_from_its_state() -> None:
    scale, other = LossScale(), LossScale()
    scale.count()
    scale.overflowed(5, 9)
    other.load_state_dict(scale.state_dict())
    assert (other.exponent, other.steps, other.since) == (FIRST_EXPONENT - 1, 0, 9)
