"""Start the benchmarks' programs in warm processes: no speed is judged here."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _warm(warm_python: None) -> None:
    """See ``warm_python``."""
