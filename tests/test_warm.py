"""A warm process runs a program as a new one would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests import warm

SCRIPT = """
import os, sys
from beside import VALUE
print(__name__, __file__, sys.argv[1:], os.environ.get("GIVEN"), VALUE, os.getcwd())
print(*(name in sys.modules for name in ("torch", "mpi4py", "aladdin_mpi.train")))
assert "aladdin_mpi.transport.mpi.library" not in sys.modules  # reads the environment
import pickle
class Here: pass
assert isinstance(pickle.loads(pickle.dumps(Here())), Here)
sys.exit(sys.stdin.read().strip() or 0)
"""
SLEEPS = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
print(os.getpid(), flush=True)
time.sleep(60)
"""


def start(folder: Path, text: str, **env: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(text)
    surroundings = {**os.environ, **env}
    command = [warm.python(), str(folder / "script.py"), "a", "b c"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=surroundings, cwd=folder, text=True, stdin=pipe, stdout=pipe, stderr=pipe
    )


def test_as_python_itself(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7")
    process = start(tmp_path, SCRIPT, GIVEN="one")
    out, err = process.communicate("an error", timeout=60)
    names = f"__main__ {tmp_path / 'script.py'} ['a', 'b c'] one 7 {tmp_path}"
    assert out.splitlines() == [names, "True False False"]
    assert (process.returncode, err) == (1, "an error\n")


def test_errors_and_modules(tmp_path: Path) -> None:
    process = start(tmp_path, "raise ValueError('no')")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.endswith("ValueError: no\n")
    command = [warm.python(), "-m", "aladdin_mpi.train", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("aladdin_mpi")


def test_signals_go_both_ways(tmp_path: Path) -> None:
    for sent, status in ((signal.SIGUSR1, 75), (signal.SIGTERM, -signal.SIGTERM)):
        process = start(tmp_path, SLEEPS)
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(sent)
        assert process.wait(60) == status
    process = start(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert process.wait(60) == -signal.SIGKILL


def test_it_ends_with_the_one_who_asked(tmp_path: Path) -> None:
    process = start(tmp_path, SLEEPS)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    end = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_server_ends_with_the_tests(tmp_path: Path) -> None:
    text = "from tests import warm; print(warm.python())"
    env = {name: value for name, value in os.environ.items() if name != warm.SHARED}
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    address = str(Path(done.stdout.strip()).with_name("socket"))
    end = time.monotonic() + 60
    while any(address in line for line in Path("/proc/net/unix").read_text().splitlines()):
        assert time.monotonic() < end, "the server still listens"
        time.sleep(0.2)


def test_others_that_leave_at_once_do_no_harm(tmp_path: Path) -> None:
    for number in range(20):
        process = start(tmp_path, SLEEPS)
        time.sleep(number / 500)  # before, while or after the program starts
        process.kill()
    test_signals_go_both_ways(tmp_path)
