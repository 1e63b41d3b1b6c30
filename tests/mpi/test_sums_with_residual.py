"""Quantised sums and sums of low rank over MPI ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aladdin_mpi.transport.mpi.engine import MpiTransport
from tests.sums_lab import conserves_values


@pytest.fixture(scope="module")
def transport() -> Iterator[MpiTransport]:
    transport = MpiTransport(timeout=60.0)
    yield transport
    transport.close()


@pytest.mark.parametrize("kind", ["int8", "int4", "int2", "powersgd"])
def test_applied_sums_and_residuals_equal_all_summands_over_mpi(
    transport: MpiTransport, kind: str
) -> None:
    assert conserves_values(transport, kind) > 1e-3
