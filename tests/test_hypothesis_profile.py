"""Hypothesis tests pass on a machine of any speed: see tests/conftest.py."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st


def slowly(value: int, seconds: float) -> int:
    time.sleep(seconds)
    return value


@settings(max_examples=7)
@given(st.integers().map(lambda value: slowly(value, 0.2)))
def test_hypothesis_profile_allows_slow_inputs(value: int) -> None:
    assert isinstance(value, int)


@settings(max_examples=1)
@given(st.integers())
def test_hypothesis_profile_allows_slow_tests(value: int) -> None:
    assert slowly(value, 0.3) == value
