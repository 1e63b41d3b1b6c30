"""Calibration of the simulator by measurements of the network lab."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import calibration, harness
from benchmarks.lab import Lab

REASON = Lab.available()
needs_lab = pytest.mark.skipif(REASON is not None, reason=REASON or "")


def line(nbytes: int, one: float, each: float) -> dict[str, Any]:
    rate = 8e-6 * nbytes / each
    return {
        "path": "between hosts",
        "bytes": nbytes,
        "one, ms": one,
        "each, ms": each,
        "each, Gbit/s": rate,
    }


def test_calibration_fits_latency_overhead_and_rate() -> None:
    # 4 MB in 32 ms are 1 Gbit/s, at which 1 MB takes 8 ms.
    table = [line(8, 0.1, 0.01), line(1_000_000, 8.7, 8.02), line(4_000_000, 33.0, 32.0)]
    result = calibration.constants(table, "between hosts")
    assert result == {
        "rate, Gbit/s": pytest.approx(1.0),
        "latency, us": pytest.approx(700.0),
        "overhead, us": pytest.approx(20.0),
    }


def test_message_program_accepts_single_repeat() -> None:
    words = ["--bytes", "8", "1000", "--count", "3", "--repeats", "1"]
    completed = harness.run_here(2, ["-m", "benchmarks.programs.messages", *words], timeout=60)
    small, large = harness.json_printed(completed)
    assert (small["bytes"], large["bytes"]) == (8, 1000)
    assert all(record["one"] > 0 and record["each"] > 0 for record in (small, large))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(280)
@needs_lab
def test_calibration_runs_in_network_lab(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibration.main(["--repeats", "3", "--save", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "calibration.json").read_text())["rows"]
    expected = [(path, nbytes) for path in calibration.PATHS for nbytes in calibration.SIZES]
    expected += [(calibration.CROWD, nbytes) for nbytes in calibration.CROWD_SIZES]
    assert [(r["path"], r["bytes"]) for r in rows] == expected
    # Each byte that leaves a host is counted once, and a link carries no more than its rate.
    assert all(0.2 < r["each, Gbit/s"] < 1.0 for r in rows if r["path"] == calibration.CROWD)
    # 4 MB at 1 Gbit/s take 32 ms, minus what the lab's token buckets and sockets absorb at once.
    assert all(
        r["one, ms"] > 25 for r in rows if (r["path"], r["bytes"]) == ("between hosts", 4_000_000)
    )
    out = capsys.readouterr().out
    assert "- between hosts: rate, Gbit/s" in out
