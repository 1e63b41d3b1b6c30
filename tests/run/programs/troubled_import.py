"""A module whose import raises an exception on rank 1."""

from __future__ import annotations

from tests.run.programs.troubled_models import RANK, fail, good

__all__ = ["good"]

if RANK == "1":
    fail("in an import")
