"""The benchmark of where a worker's time goes."""

from __future__ import annotations

import pytest

from benchmarks import breakdown


def test_who_waits() -> None:
    """A synchronous worker waits for messages and for others; ALADDIN's does not."""
    waits = breakdown.row("resnet50", "ar-sgd", [4])
    assert 1 < waits["4 workers"] < waits["4, at the end"] < 60
    asymmetric = breakdown.row("resnet50", "aladdin", [4])
    assert asymmetric["4 workers"] < 0.1
    assert breakdown.missed([waits, asymmetric]) == []
    (text,) = breakdown.missed([{**asymmetric, "4 workers": 2.0}])
    assert text.startswith("ResNet-50: a worker of aladdin waits 2.0 % of the time (4 workers)")


def test_algorithms_are_checked_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception, match="--algorithms: expected some of bsp"):
        breakdown.main(["--algorithms", "no-such"])
    assert "done" not in capsys.readouterr().err
