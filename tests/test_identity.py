"""Processes are killed by their identity, of which the id is only a part."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from aladdin_mpi.process.identity import ProcessIdentity, stat_fields


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def identity(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    own = ProcessIdentity.own()
    assert own is not None and own.pid == os.getpid()
    return ProcessIdentity(own.namespace, process.pid, int(stat_fields(process.pid)[19]))


def test_stopped_process_is_seen_and_killed(sleeper: subprocess.Popen[bytes]) -> None:
    target = identity(sleeper)
    assert not target.is_stopped()
    sleeper.send_signal(signal.SIGSTOP)
    end = time.monotonic() + 20
    while not target.is_stopped():
        assert time.monotonic() < end
        time.sleep(0.01)
    target.kill()
    assert sleeper.wait(20) == -signal.SIGKILL
    target.kill()  # has ended, and its id may belong to another process


@pytest.mark.parametrize("difference", [{"start": 1}, {"namespace": 1}])
def test_other_process_with_the_same_id_is_not_killed(
    sleeper: subprocess.Popen[bytes], difference: dict[str, int]
) -> None:
    other = replace(identity(sleeper), **difference)
    sleeper.send_signal(signal.SIGSTOP)
    other.kill()
    assert not other.is_stopped()
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.3)
