"""The network lab's namespaces, links and processes on the machine, and their removal.

A lab called NAME is the set of network namespaces NAME-switch, NAME-h0, NAME-h1 ... and the folder
STATE/NAME, which is created first and removed last. Nothing is added to the machine's own network,
so its firewall and addresses do not affect a lab, and a lab does not affect them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_network
from pathlib import Path

from aladdin_mpi.errors import UserError
from aladdin_mpi.process.identity import stat_fields

STATE = Path("/run/aladdin-lab")
NAMESPACES = Path("/run/netns")
INTERFACE = "eth0"
CONGESTION = "cubic"
"""TCP congestion control: the default of Linux, whatever the machine's administrator has set."""
QUEUE_SECONDS = 0.002
QUEUE_BYTES = 250_000
"""A link's queue: the larger of these bytes and these seconds at its rate. A switch of 10 Gbit/s
has 2.5 MB. With a queue of 50 ms short messages waited that long, and a round of `bsp` took 8 %
longer."""

# In a separate mount namespace, so that the trial leaves nothing.
_TRIAL = f"""mkdir -p {NAMESPACES} && mount -t tmpfs none {NAMESPACES} && ip netns add trial &&
ip link add v0 type veth peer name {INTERFACE} netns trial &&
ip link add switch type bridge && ip link set v0 master switch &&
tc qdisc replace dev v0 root tbf rate 1gbit burst 256kb latency 50ms"""


@functools.cache
def why_unavailable() -> str | None:
    """Return why no lab can be built on this machine, or None if it can."""
    if sys.platform != "linux":
        return f"the network lab needs Linux, not {sys.platform}"
    if os.geteuid() != 0:
        return "the network lab needs root, to create network namespaces"
    for tool in ("ip", "tc", "nsenter", "unshare", "hostname"):
        if shutil.which(tool) is None:
            remedy = "install iproute2 and util-linux, or add /usr/sbin to PATH"
            return f"the network lab needs the command '{tool}': {remedy}"
    trial = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "sh", "-c", f"hostname trial && {_TRIAL}"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    if trial.returncode != 0:
        return f"this machine does not allow a network lab: {trial.stderr.strip()}"
    return None


def run_tool(*command: str) -> None:
    """Run `ip` or `tc`.

    Raises:
        UserError: the command failed; the message contains its output.
    """
    # In a new session: Ctrl-C on the terminal must not interrupt a removal.
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode != 0:
        raise UserError(f"network lab: '{' '.join(command)}' failed: {done.stderr.strip()}")


def limit_rate(namespace: str, device: str, gbit: float) -> None:
    """Limit `device` of `namespace` to `gbit` Gbit/s of sent data."""
    # 2 ms of traffic may leave at once (256 KB at 1 Gbit/s), so that short messages at low
    # rates are slowed down as well. A full-sized packet must always fit.
    burst = max(16_000, int(256_000 * gbit))
    queue = max(QUEUE_BYTES, int(QUEUE_SECONDS * gbit * 1e9 / 8))
    limit = ["rate", f"{int(gbit * 1e9)}bit", "burst", str(burst), "limit", str(burst + queue)]
    run_tool("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *limit)


def bytes_sent(namespace: str, device: str) -> int:
    """Return the bytes that `device` of `namespace` has sent, including headers."""
    shown = subprocess.run(
        ["ip", "-n", namespace, "-s", "-j", "link", "show", "dev", device],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])


def add_switch(namespace: str, address: str) -> None:
    """Create the namespace with the bridge 'switch', with `address` (as a.b.c.d/n) on it."""
    run_tool("ip", "netns", "add", namespace)
    run_tool("ip", "-n", namespace, "link", "set", "lo", "up")
    run_tool("ip", "-n", namespace, "link", "add", "switch", "type", "bridge")
    run_tool("ip", "-n", namespace, "addr", "add", address, "dev", "switch")
    run_tool("ip", "-n", namespace, "link", "set", "switch", "up")


def add_host(namespace: str, switch: str, port: str, address: str, gbit: float) -> None:
    """Create a host and its link to `port` of the switch, `gbit` Gbit/s in each direction."""
    run_tool("ip", "netns", "add", namespace)
    run_tool("ip", "-n", namespace, "link", "set", "lo", "up")
    peer = ["peer", "name", INTERFACE, "netns", namespace]
    run_tool("ip", "-n", switch, "link", "add", port, "type", "veth", *peer)
    run_tool("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
    run_tool("ip", "-n", namespace, "addr", "add", address, "dev", INTERFACE)
    run_tool("ip", "-n", namespace, "link", "set", INTERFACE, "up")
    # Set on the route: a namespace may not choose an algorithm that is restricted outside.
    route = [str(ip_network(address, strict=False)), "dev", INTERFACE, "congctl", CONGESTION]
    run_tool("ip", "-n", namespace, "route", "replace", *route)
    limit_rate(namespace, INTERFACE, gbit)  # data that the host sends
    limit_rate(switch, port, gbit)  # data that the host receives


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Prevent other processes from building or removing labs in this block."""
    STATE.mkdir(mode=0o700, exist_ok=True)
    with open(STATE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def claim_name() -> str:
    """Reserve a lab name that contains this process's id. The caller holds the lock."""
    for letter in string.ascii_lowercase:
        name = f"aladdin{os.getpid()}{letter}"
        with contextlib.suppress(FileExistsError):
            claim(name)
            return name
    raise UserError("network lab: 26 labs are open in this process: close some first")


def claim(name: str) -> None:
    """Reserve this lab name. The caller holds the lock.

    Raises:
        FileExistsError: there is such a lab.
    """
    (STATE / name).mkdir(mode=0o700)
    own(name, os.getpid())


def own(name: str, pid: int) -> None:
    """Keep a lab until its removal, or until this process has ended and another lab is built."""
    owner = f"{pid} {_start_time(pid)}"
    (STATE / name / "owner").write_text(owner, encoding="ascii")


def labs() -> dict[str, bool]:
    """Return every lab on this machine, and whether the process that built it still runs."""
    return {path.name: _owner_lives(path) for path in sorted(STATE.glob("*")) if path.is_dir()}


def namespaces(lab: str) -> list[str]:
    """Return the network namespaces of a lab, the switch's last."""
    return sorted(path.name for path in NAMESPACES.glob(f"{lab}-*"))


def processes(spaces: list[str]) -> list[int]:
    """Return the ids of the processes in the given network namespaces."""
    inodes = set()
    for space in spaces:
        with contextlib.suppress(OSError):
            inodes.add(os.stat(NAMESPACES / space).st_ino)
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # the process has just ended
            if entry.name.isdigit() and os.stat(entry / "ns" / "net").st_ino in inodes:
                found.append(int(entry.name))
    return found


def stop_processes(lab: str) -> None:
    """End every process of a lab, mpirun first because it cleans up.

    Raises:
        UserError: a process still exists after about ten seconds of SIGKILL.
    """
    spaces = namespaces(lab)
    _signal_until_gone(signal.SIGTERM, lambda: processes([f"{lab}-switch"]), seconds=2.0)
    _signal_until_gone(signal.SIGTERM, lambda: processes(spaces), seconds=2.0)
    for _ in range(20):  # read again: a process may have started another one
        if not processes(spaces):
            return
        _signal_until_gone(signal.SIGKILL, lambda: processes(spaces), seconds=0.5)
    raise UserError(f"network lab {lab}: cannot end the processes {processes(spaces)}")


def remove(lab: str) -> None:
    """Remove a lab, its processes and its files; missing parts are ignored.

    Raises:
        UserError: a process could not be ended, or a namespace could not be removed.
    """
    stop_processes(lab)
    for space in namespaces(lab):
        run_tool("ip", "netns", "delete", space)
    # Files that killed MPI processes leave; their names contain the host's name.
    for folder in ("/dev/shm", tempfile.gettempdir()):
        for path in Path(folder).glob(f"*.{lab}-*"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    shutil.rmtree(STATE / lab, ignore_errors=True)


def remove_stale() -> list[str]:
    """Remove the labs whose process has ended; return their names. The caller holds the lock."""
    stale = [lab for lab, alive in labs().items() if not alive]
    for lab in stale:
        remove(lab)
    return stale


def _signal_until_gone(signum: int, find: Callable[[], list[int]], seconds: float) -> None:
    pids = find()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
    deadline = time.monotonic() + seconds
    while pids and time.monotonic() < deadline:
        time.sleep(0.02)
        pids = find()


def _owner_lives(folder: Path) -> bool:
    try:
        pid, started = (folder / "owner").read_text(encoding="ascii").split()
    except (OSError, ValueError):  # killed between creating the folder and writing the file
        return False
    return _start_time(int(pid)) == started  # the id alone may have been reused


def _start_time(pid: int) -> str | None:
    """Return a process's start in clock ticks since boot; None if it has ended."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
