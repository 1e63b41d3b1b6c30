"""Benchmark of the breakdown of a worker's time."""

from __future__ import annotations

import pytest

from aladdin_mpi.errors import UserError
from benchmarks import breakdown


def test_breakdown_shows_synchronous_worker_waiting() -> None:
    """A synchronous worker waits for messages and for other workers; ALADDIN's does not."""
    waits = breakdown.row("resnet50", "ar-sgd", [4])
    assert 1 < waits["4 workers"] < waits["4, at the end"] < 60
    asymmetric = breakdown.row("resnet50", "aladdin", [4])
    assert asymmetric["4 workers"] < 0.1
    assert breakdown.missed([waits, asymmetric]) == []
    (text,) = breakdown.missed([{**asymmetric, "4 workers": 2.0}])
    assert all(part in text for part in ("ResNet-50", "aladdin", "2.0 %", "4 workers"))


def test_breakdown_checks_algorithms_before_running(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"--algorithms: .*bsp.*'no-such'"):
        breakdown.main(["--algorithms", "no-such"])
    assert "done" not in capsys.readouterr().err
