"""A warm process runs a program in the same way as a new process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import warm

SURROUNDINGS = Path(__file__).parent / "programs" / "print_surroundings.py"
SLEEPS = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
print(os.getpid(), flush=True)
time.sleep(60)
"""


def start(folder: Path, program: str | Path, **env: str) -> subprocess.Popen[str]:
    """Start a program, or a script given as text."""
    if isinstance(program, str):
        (folder / "script.py").write_text(program)
        program = folder / "script.py"
    surroundings = {**os.environ, **env}
    command = [warm.python(), str(program), "a", "b c"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=surroundings, cwd=folder, text=True, stdin=pipe, stdout=pipe, stderr=pipe
    )


def test_warm_process_runs_script_as_python_does(tmp_path: Path) -> None:
    process = start(tmp_path, SURROUNDINGS, GIVEN="one")
    out, err = process.communicate("an error", timeout=60)
    names = f"__main__ {SURROUNDINGS} ['a', 'b c'] one 7 {tmp_path}"
    assert out.splitlines() == [names, "True False False"]
    assert (process.returncode, err) == (1, "an error\n")


def test_warm_process_reports_errors_and_runs_modules(tmp_path: Path) -> None:
    process = start(tmp_path, "raise ValueError('no')")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.endswith("ValueError: no\n")
    command = [warm.python(), "-m", "aladdin_mpi.train", "--version"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert completed.returncode == 0 and completed.stdout.startswith("aladdin_mpi")


def test_warm_client_forwards_signals_and_exit_status(tmp_path: Path) -> None:
    for sent, status in ((signal.SIGUSR1, 75), (signal.SIGTERM, -signal.SIGTERM)):
        process = start(tmp_path, SLEEPS)
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(sent)
        assert process.wait(60) == status
    process = start(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert process.wait(60) == -signal.SIGKILL


def test_warm_process_ends_with_its_client(tmp_path: Path) -> None:
    process = start(tmp_path, SLEEPS)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    end = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.long
def test_warm_server_ends_with_the_test_run(tmp_path: Path) -> None:
    text = "from tests import warm; print(warm.python())"
    env = {name: value for name, value in os.environ.items() if name != warm.SHARED}
    command = [sys.executable, "-c", text]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    address = str(Path(completed.stdout.strip()).with_name("socket"))
    end = time.monotonic() + 60
    while any(address in line for line in Path("/proc/net/unix").read_text().splitlines()):
        assert time.monotonic() < end, "the server still listens"
        time.sleep(0.2)


def test_warm_server_survives_clients_killed_at_once(tmp_path: Path) -> None:
    for number in range(20):
        process = start(tmp_path, SLEEPS)
        time.sleep(number / 500)  # before, while or after the program starts
        process.kill()
    test_warm_client_forwards_signals_and_exit_status(tmp_path)
