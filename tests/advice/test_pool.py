"""Process pool for simulations: cancellation, early exit and killed processes."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import closing
from typing import Any

import pytest

from aladdin_mpi.advice.timed_run import Processes
from aladdin_mpi.errors import UserError


@pytest.mark.long
def test_pool_exit_cancels_remaining_calls_without_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool's internal threads raise no error either: it would end the program."""
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    before = set(threading.enumerate())
    with closing(Processes(2)) as pool:
        assert pool.submit(pow, 2, 10).result(timeout=60) == 1024
        running = [pool.submit(time.sleep, 100) for _ in range(2)]
        waiting = [pool.submit(time.sleep, 100) for _ in range(6)]
        assert all(future.cancel() for future in waiting[::2])
        assert not any(future.cancel() for future in running)
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=60)
    assert told == []


@pytest.mark.long
def test_pool_runs_calls_after_a_cancelled_one() -> None:
    with closing(Processes(1)) as pool:
        first = pool.submit(time.sleep, 0.2)
        second, third = pool.submit(pow, 2, 2), pool.submit(pow, 3, 2)
        assert second.cancel()
        assert third.result(timeout=60) == 9
        assert first.done()


@pytest.mark.long
def test_killed_pool_process_is_one_error(caplog: pytest.LogCaptureFixture) -> None:
    with closing(Processes(1)) as pool:
        killed = pool.submit(signal.raise_signal, signal.SIGKILL)
        pool.submit(pow, 2, 2)
        with pytest.raises(UserError, match=r"\bkilled\b.*--jobs"):
            killed.result(timeout=60)
    assert not caplog.records
