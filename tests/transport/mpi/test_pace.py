"""Polling frequency of a rank."""

from __future__ import annotations

import os

import pytest

from aladdin_mpi.errors import UserError
from aladdin_mpi.transport.mpi.progress import (
    CORES,
    LONG_NAP,
    SHARE,
    SHORT_NAP,
    SPINS,
    PollBackoff,
    cores_of_host,
)
from tests.launch import run_ranks


def test_wait_spins_first_with_a_core_per_rank() -> None:
    pace = PollBackoff(ranks=4, cores=4)
    assert not pace.shares
    assert [pace.nap(turn, 0.0) for turn in range(SPINS + 1)] == [0.0] * (SPINS + 1)
    assert 0 < pace.nap(SPINS + 1, 0.0) < pace.nap(SPINS + 2, 0.0) < SHORT_NAP
    assert pace.nap(10_000, 0.001) == SHORT_NAP
    assert pace.nap(10_000, 1.0) == LONG_NAP


def test_wait_on_shared_cores_never_spins_and_backs_off_by_an_eighth() -> None:
    pace = PollBackoff(ranks=5, cores=4)
    assert pace.shares
    assert pace.nap(0, 0.0) > 0
    for quiet in (0.002, 0.008, 0.016):
        assert pace.nap(0, quiet) == pytest.approx(SHARE * quiet)
    assert pace.nap(0, 100.0) == pace.nap(0, 1.0) <= 0.002


@pytest.mark.parametrize("ranks", [1, 100])
def test_background_polling_slows_down_without_progress(ranks: int) -> None:
    pace = PollBackoff(ranks, cores=2)
    assert pace.background(0.0) < pace.background(1.0) < 0.005


def test_idle_polling_interval_is_an_eighth_of_quiet_time() -> None:
    pace = PollBackoff(ranks=2, cores=2)
    assert pace.background(0.0, is_idle=True) == pace.background(0.0)
    for quiet in (0.008, 0.016):
        assert pace.background(quiet, is_idle=True) == pytest.approx(SHARE * quiet)
    assert pace.background(60.0, is_idle=True) == 0.004
    shared = PollBackoff(ranks=3, cores=2)
    assert shared.background(0.0, is_idle=True) == shared.background(0.0)
    assert shared.background(60.0, is_idle=True) == 0.008


def test_cores_variable_overrides_core_count_of_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CORES, raising=False)
    assert cores_of_host() == os.cpu_count()
    monkeypatch.setenv(CORES, "3")
    assert cores_of_host() == 3


@pytest.mark.parametrize("text", ["0", "-1", "two", ""])
def test_invalid_core_count_error_names_variable(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CORES, text)
    with pytest.raises(UserError, match=f"{CORES}: expected the number of cores .*{text!r}"):
        cores_of_host()


@pytest.mark.parametrize("mpirun", [[], ["--with-ft", "ulfm"]])
def test_invalid_core_count_is_reported_once_over_mpi(mpirun: list[str]) -> None:
    train = ["-m", "aladdin_mpi.train", "--epochs", "0.1"]
    done = run_ranks(3, train, env={CORES: "two"}, mpirun=mpirun, check=False)
    assert done.returncode == 2
    assert done.stderr.count(f"{CORES}: expected the number of cores") == 1
    assert "Traceback" not in done.stderr
