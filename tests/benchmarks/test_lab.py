"""The network lab: it is what it says, and nothing of it stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aladdin_mpi.errors import UserError
from benchmarks import netns
from benchmarks.lab import Lab

ROOT = Path(__file__).resolve().parents[2]
REASON = Lab.available()

pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
    pytest.mark.timeout(120),
]

TRIES = 10
WHERE = """
import json, os, socket
from mpi4py import MPI
world = MPI.COMM_WORLD
inside = world.Split_type(MPI.COMM_TYPE_SHARED).size
facts = [socket.gethostname(), inside, os.environ.get("GREETING"), os.environ["OMP_NUM_THREADS"]]
world.Barrier()
facts = world.gather(facts)
if world.rank == 0:
    print(json.dumps(facts))
"""

# Ranks that ignore every polite request to end.
STUBBORN = """
import signal, time
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
time.sleep(100)
"""

# A program that runs a lab, as a benchmark does. Handlers are set because a test run in the
# background of a shell hands on an ignored SIGINT, and one under nohup an ignored SIGHUP.
OWNER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from benchmarks.lab import Lab
with Lab(hosts=2) as lab:
    print(lab.name, flush=True)
    lab.run(4, ["-c", sys.argv[1]], timeout=100)
"""

# Arguments: bytes to take, number of senders. Prints the first and the last moment.
RECEIVE = """
import socket, sys, threading, time
def take(connection):
    left = int(sys.argv[1])
    while left:
        left -= len(connection.recv(min(left, 1 << 16))) or sys.exit("cut off")
server = socket.create_server(("", 5001))
print("ready", flush=True)
connections = [server.accept()[0] for _ in range(int(sys.argv[2]))]
threads = [threading.Thread(target=take, args=[c]) for c in connections]
start = time.monotonic()
for t in threads: t.start()
for c in connections: c.sendall(b"x")
for t in threads: t.join()
print(start, time.monotonic())
"""

# Arguments: bytes to send to each, addresses. Sends to all at once when each has said go.
SEND = """
import socket, sys, threading
connections = [socket.create_connection((a, 5001), timeout=20) for a in sys.argv[2:]]
def give(connection):
    connection.recv(1)
    connection.sendall(bytes(int(sys.argv[1])))
threads = [threading.Thread(target=give, args=[c]) for c in connections]
for t in threads: t.start()
for t in threads: t.join()
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(hosts=3, rate_gbit=0.1) as built:
        yield built


def remains(name: str) -> list[str]:
    """Everything of a lab that is still on this machine."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    found = [line for line in listed.stdout.splitlines() if name in line]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:  # a rank's environment holds the name of mpirun's host
            words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if name.encode() in words:
            found.append(f"process {entry.name}")
    for folder in (str(netns.STATE), "/dev/shm", tempfile.gettempdir()):
        found += [str(path) for path in Path(folder).glob(f"*{name}*")]
    return found


def machine_links() -> list[str]:
    """The interfaces of the machine's own network."""
    links = subprocess.run(["ip", "-j", "link"], capture_output=True, text=True, check=True)
    return sorted(link["ifname"] for link in json.loads(links.stdout))


def seconds_to_receive(lab: Lab, senders: list[int], receivers: list[int], size: int) -> float:
    """From the first byte to the last, each sender giving `size` bytes to each receiver."""

    def python(host: int, code: str, *args: str) -> subprocess.Popen[str]:
        command = lab.host_command(host, [sys.executable, "-c", code, *args])
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    taking = [python(host, RECEIVE, str(size), str(len(senders))) for host in receivers]
    for process in taking:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    addresses = [lab.address(host) for host in receivers]
    giving = [python(host, SEND, str(size), *addresses) for host in senders]
    moments = [process.communicate(timeout=30)[0].split() for process in taking]
    for process in giving:
        assert process.wait(timeout=30) == 0
    return max(float(end) for _, end in moments) - min(float(start) for start, _ in moments)


@pytest.mark.parametrize(
    ("senders", "receivers"),
    [([0], [1]), ([0], [1, 2]), ([1, 2], [0])],
    ids=["one-to-one", "outgoing", "incoming"],
)
def test_rate_is_what_it_says(lab: Lab, senders: list[int], receivers: list[int]) -> None:
    flows = len(senders) * len(receivers)
    size = 6_000_000 // flows
    # Other loads on the machine can make any one try slower; nothing may ever make it faster.
    shares = []
    for _ in range(TRIES):
        seconds = seconds_to_receive(lab, senders, receivers, size)
        shares.append(size * flows * 8 / seconds / 1e9 / lab.rate_gbit)
        if shares[-1] > 0.7:
            break
    assert max(shares) > 0.7, shares
    assert max(shares) < 1.1, shares


def test_ranks_go_cyclically_over_the_hosts(lab: Lab) -> None:
    done = lab.run(7, ["-c", WHERE], timeout=60, env={"GREETING": "a b,c;d='e'"})
    assert done.returncode == 0, done.stderr
    expected = [[lab.host_name(r % 3), 3 if r % 3 == 0 else 2] for r in range(7)]
    assert json.loads(done.stdout) == [[*facts, "a b,c;d='e'", "1"] for facts in expected]


def test_ranks_go_where_they_are_put(lab: Lab) -> None:
    placement = [2, 0, 0, 1, 2]
    done = lab.run(placement, ["-c", WHERE], timeout=60)
    assert done.returncode == 0, done.stderr
    assert [facts[0] for facts in json.loads(done.stdout)] == [lab.host_name(h) for h in placement]


def test_the_checkout_can_be_imported_and_the_status_comes_back(lab: Lab, tmp_path: Path) -> None:
    code = f"import os; os.chdir({str(tmp_path)!r}); import aladdin_mpi.errors; raise SystemExit(3)"
    assert lab.run(1, ["-c", code], timeout=60).returncode == 3


@pytest.mark.parametrize("named", [True, False], ids=["address", "no address"])
def test_torch_s_sums_between_hosts_whose_names_lead_nowhere(
    lab: Lab, tmp_path: Path, named: bool
) -> None:
    words = ["--algorithm", "ar-sgd", "--ar-sgd-allreduce", "torch", "--model", "size:0.1"]
    words += ["--compute", "timed", "--compute-time", "0.01", "--samples", "64", "--quiet"]
    given = {"MASTER_ADDR": lab.address(0), "GLOO_SOCKET_IFNAME": netns.INTERFACE}
    run_dir = tmp_path / "run"
    args = ["-m", "aladdin_mpi.train", *words, "--run-dir", str(run_dir)]
    done = lab.run(2, args, timeout=100, env=given if named else {})
    if named:
        assert done.returncode == 0, done.stderr
        summary = json.loads((run_dir / "summary.json").read_text())
        assert summary["samples"] == 64
        return
    assert done.returncode != 0
    assert done.stderr.count("has no address") == 1, done.stderr
    assert "aladdin_mpi: error" in done.stderr and "MASTER_ADDR" in done.stderr


def test_bad_arguments_are_refused(lab: Lab) -> None:
    with pytest.raises(UserError, match="hosts: expected 1 to 250, got 0"):
        Lab(hosts=0)
    with pytest.raises(UserError, match="rate_gbit"):
        Lab(hosts=2, rate_gbit=0.0)
    with pytest.raises(UserError, match="ranks: expected hosts 0 to 2, got 3"):
        lab.mpirun_command([0, 3], ["true"])
    with pytest.raises(UserError, match="ranks: expected at least one"):
        lab.mpirun_command(0, ["true"])
    with pytest.raises(UserError, match="not built"):
        Lab(hosts=2).host_command(0, ["true"])


def test_two_labs_at_once_do_not_meet(lab: Lab) -> None:
    with Lab(hosts=2) as other:
        assert other.name != lab.name
        done = other.run(2, ["-c", WHERE], timeout=60)
        assert [facts[0] for facts in json.loads(done.stdout)] == [
            other.host_name(0),
            other.host_name(1),
        ]
    assert lab.run(2, ["-c", WHERE], timeout=60).returncode == 0


def test_nothing_is_left_after_use() -> None:
    links = machine_links()
    with Lab(hosts=2) as lab:
        name = lab.name
        assert lab.run(2, ["-c", WHERE], timeout=60).returncode == 0
        sleep = lab.host_command(1, ["sh", "-c", "echo inside; exec sleep 100"])
        sleeper = subprocess.Popen(sleep, stdout=subprocess.PIPE, text=True)
        assert sleeper.stdout is not None
        # Who comes in during the removal, behind the polite signal, gets SIGKILL.
        assert sleeper.stdout.readline() == "inside\n"
        assert len(netns.namespaces(name)) == 3
        assert machine_links() == links
    assert sleeper.wait(timeout=10) == -signal.SIGTERM
    assert remains(name) == []
    assert machine_links() == links


def test_nothing_is_left_after_an_exception() -> None:
    with pytest.raises(RuntimeError, match="of the benchmark"), Lab(hosts=2) as lab:
        name = lab.name
        raise RuntimeError("of the benchmark")
    assert remains(name) == []


def test_a_lab_that_cannot_be_finished_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []

    def fail(namespace: str, *rest: object) -> None:
        names.append(namespace)
        raise UserError("no more hosts")

    monkeypatch.setattr(netns, "add_host", fail)
    with pytest.raises(UserError, match="no more hosts"), Lab(hosts=2):
        pass
    assert names
    assert remains(names[0].partition("-")[0]) == []


@pytest.mark.long
def test_a_run_that_takes_too_long_is_ended(lab: Lab) -> None:
    code = STUBBORN.replace("time.sleep", "print('late', flush=True); time.sleep")
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        lab.run(3, ["-c", code], timeout=20)  # time enough to start, also on a busy machine
    assert "late" in str(caught.value.output)
    assert netns.processes(netns.namespaces(lab.name)) == []
    assert lab.run(3, ["-c", WHERE], timeout=60).returncode == 0


def start_owner() -> tuple[subprocess.Popen[str], str]:
    """Start a process that runs a lab; return it and the lab's name, with its ranks running."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, STUBBORN],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert owner.stdout is not None
    name = owner.stdout.readline().strip()
    deadline = time.monotonic() + 30
    while len(list(Path("/dev/shm").glob(f"*{name}-*"))) < 4:  # each rank has passed MPI_Init
        assert time.monotonic() < deadline, "the ranks did not start"
        assert owner.poll() is None
        time.sleep(0.1)
    return owner, name


@pytest.mark.parametrize(
    ("signum", "status"),
    [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_nothing_is_left_after_a_signal(signum: int, status: int) -> None:
    owner, name = start_owner()
    owner.send_signal(signum)
    time.sleep(0.1)
    owner.send_signal(signum)  # the impatient second one must not stop the removal
    assert owner.wait(timeout=30) == status
    assert remains(name) == []


@pytest.mark.parametrize("remedy", ["clean", "next lab"])
def test_what_sigkill_leaves_is_removed_later(lab: Lab, remedy: str) -> None:
    owner, name = start_owner()
    ranks = [line for line in remains(name) if line.startswith("process")]
    assert len(ranks) >= 4 + 2 + 1  # and two daemons and mpirun
    owner.kill()
    owner.wait(timeout=30)
    assert len(netns.namespaces(name)) == 3
    assert remains(name) != []
    if remedy == "clean":
        clean = [sys.executable, "-m", "benchmarks.lab", "--clean"]
        done = subprocess.run(clean, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert f"removed: {name}" in done.stdout
        assert lab.name in done.stdout.partition("in use:")[2]
    else:
        with Lab(hosts=1):
            pass
    assert remains(name) == []
    assert len(netns.namespaces(lab.name)) == 4  # that of a living process stays


def test_an_id_that_is_used_again_does_not_protect_a_lab() -> None:
    with netns.locked():
        folder = netns.STATE / "aladdin0test"
        folder.mkdir()
        (folder / "owner").write_text(f"{os.getpid()} 1", encoding="ascii")
        assert netns.labs()["aladdin0test"] is False
        assert "aladdin0test" in netns.remove_stale()
        assert not folder.exists()


def command_line(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.lab", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_command_line_runs_on_host_0_and_passes_the_status_on() -> None:
    done = command_line("--hosts", "2", "--", "sh", "-c", "hostname; exit 7")
    assert done.returncode == 7, done.stderr
    assert done.stdout.endswith("-h0\n")
    assert remains(done.stdout.strip().partition("-")[0]) == []


def test_command_line_runs_over_mpi() -> None:
    done = command_line("--hosts", "2", "--np", "3", "--", sys.executable, "-c", WHERE)
    assert done.returncode == 0, done.stderr
    assert [facts[0][-3:] for facts in json.loads(done.stdout)] == ["-h0", "-h1", "-h0"]


def test_command_line_names_what_is_wrong() -> None:
    assert "expected a command" in command_line("--hosts", "2").stderr
    refused = command_line("--hosts", "0", "--", "true")
    assert (refused.returncode, refused.stderr) == (2, "error: hosts: expected 1 to 250, got 0\n")
