"""The adviser's sample efficiencies equal those of the stored runs."""

from __future__ import annotations

from benchmarks import learned


def test_adviser_has_sample_efficiencies_of_kept_runs() -> None:
    assert learned.FILE.read_text(encoding="utf-8") == learned.written()
