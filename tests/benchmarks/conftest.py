"""Programs that benchmarks start are warm: here no speed is judged."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _warm(warm_python: None) -> None:
    """See ``warm_python``."""
