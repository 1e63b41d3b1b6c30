"""Network lab: rates, placement, isolation and cleanup."""

from __future__ import annotations

import json
import os
import re
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
PROGRAMS = Path(__file__).parent / "programs"
COLD = "-u"
"""An option of Python that excludes warm processes (``tests/warm.py``)."""
WHERE = [COLD, str(PROGRAMS / "where.py")]
STUBBORN = PROGRAMS / "stubborn.py"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(hosts=3, rate_gbit=0.1) as built:
        yield built


def remains(name: str) -> list[str]:
    """Return everything of a lab that still exists on this machine."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    result = [line for line in listed.stdout.splitlines() if name in line]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:  # a rank's environment contains the name of mpirun's host
            words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if name.encode() in words:
            result.append(f"process {entry.name}")
    for folder in (str(netns.STATE), "/dev/shm", tempfile.gettempdir()):
        result += [str(path) for path in Path(folder).glob(f"*{name}*")]
    return result


def machine_links() -> list[str]:
    """Return the machine's own network interfaces."""
    links = subprocess.run(["ip", "-j", "link"], capture_output=True, text=True, check=True)
    return sorted(link["ifname"] for link in json.loads(links.stdout))


def seconds_to_receive(lab: Lab, senders: list[int], receivers: list[int], size: int) -> float:
    """Return the time of the transfer if each sender sends `size` bytes to each receiver."""

    def python(host: int, program: str, *args: str) -> subprocess.Popen[str]:
        words = [sys.executable, COLD, str(PROGRAMS / program), *args]
        command = lab.host_command(host, words)
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    taking = [python(host, "receive.py", str(size), str(len(senders))) for host in receivers]
    for process in taking:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    addresses = [lab.address(host) for host in receivers]
    giving = [python(host, "send.py", str(size), *addresses) for host in senders]
    moments = [process.communicate(timeout=30)[0].split() for process in taking]
    for process in giving:
        assert process.wait(timeout=30) == 0
    return max(float(end) for _, end in moments) - min(float(start) for start, _ in moments)


@pytest.mark.parametrize(
    ("senders", "receivers"),
    [([0], [1]), ([0], [1, 2]), ([1, 2], [0])],
    ids=["one-to-one", "outgoing", "incoming"],
)
def test_lab_limits_link_rate(lab: Lab, senders: list[int], receivers: list[int]) -> None:
    flows = len(senders) * len(receivers)
    size = 6_000_000 // flows
    # Other loads can slow down any attempt, but nothing may exceed the rate.
    shares = []
    for _ in range(TRIES):
        seconds = seconds_to_receive(lab, senders, receivers, size)
        shares.append(size * flows * 8 / seconds / 1e9 / lab.rate_gbit)
        if shares[-1] > 0.7:
            break
    assert max(shares) > 0.7, shares
    assert max(shares) < 1.1, shares


def test_lab_places_ranks_cyclically(lab: Lab) -> None:
    completed = lab.run(7, WHERE, timeout=60, env={"GREETING": "a b,c;d='e'"})
    assert completed.returncode == 0, completed.stderr
    expected = [[lab.host_name(r % 3), 3 if r % 3 == 0 else 2] for r in range(7)]
    assert json.loads(completed.stdout) == [[*facts, "a b,c;d='e'", "1"] for facts in expected]


def test_lab_places_ranks_as_requested(lab: Lab) -> None:
    placement = [2, 0, 0, 1, 2]
    completed = lab.run(placement, WHERE, timeout=60)
    assert completed.returncode == 0, completed.stderr
    assert [facts[0] for facts in json.loads(completed.stdout)] == [
        lab.host_name(h) for h in placement
    ]


def test_lab_run_imports_checkout_and_returns_status(lab: Lab, tmp_path: Path) -> None:
    code = f"import os; os.chdir({str(tmp_path)!r}); import aladdin_mpi.errors; raise SystemExit(3)"
    assert lab.run(1, ["-c", code], timeout=60).returncode == 3


@pytest.mark.parametrize("named", [True, False], ids=["address", "no address"])
def test_torch_allreduce_without_host_addresses_requires_master_addr(
    lab: Lab, tmp_path: Path, named: bool
) -> None:
    words = ["--algorithm", "ar-sgd", "--ar-sgd-allreduce", "torch", "--model", "size:0.1"]
    words += ["--compute", "timed", "--compute-time", "0.01", "--samples", "64", "--quiet"]
    given = {"MASTER_ADDR": lab.address(0), "GLOO_SOCKET_IFNAME": netns.INTERFACE}
    run_dir = tmp_path / "run"
    args = ["-m", "aladdin_mpi.train", *words, "--run-dir", str(run_dir)]
    completed = lab.run(2, args, timeout=100, env=given if named else {})
    if named:
        assert completed.returncode == 0, completed.stderr
        summary = json.loads((run_dir / "summary.json").read_text())
        assert summary["samples"] == 64
        return
    assert completed.returncode != 0
    errors = re.findall(r"aladdin_mpi: error: .*\bMASTER_ADDR\b", completed.stderr)
    assert len(errors) == 1, completed.stderr


def test_lab_rejects_invalid_arguments(lab: Lab) -> None:
    with pytest.raises(UserError, match=r"^hosts: .*\b1 to 250\b.*\b0\b"):
        Lab(hosts=0)
    with pytest.raises(UserError, match=r"^rate_gbit: .*\b0\.0\b"):
        Lab(hosts=2, rate_gbit=0.0)
    with pytest.raises(UserError, match=r"^ranks: .*\b0 to 2\b.*\b3\b"):
        lab.mpirun_command([0, 3], ["true"])
    with pytest.raises(UserError, match=r"^ranks: .*\b0$"):
        lab.mpirun_command(0, ["true"])
    with pytest.raises(UserError, match=r"with Lab\("):
        Lab(hosts=2).host_command(0, ["true"])


def test_concurrent_labs_are_isolated(lab: Lab) -> None:
    with Lab(hosts=2) as other:
        assert other.name != lab.name
        completed = other.run(2, WHERE, timeout=60)
        assert [facts[0] for facts in json.loads(completed.stdout)] == [
            other.host_name(0),
            other.host_name(1),
        ]
    assert lab.run(2, WHERE, timeout=60).returncode == 0


def test_lab_removes_all_resources_after_use() -> None:
    links = machine_links()
    with Lab(hosts=2) as lab:
        name = lab.name
        assert lab.run(2, WHERE, timeout=60).returncode == 0
        sleep = lab.host_command(1, ["sh", "-c", "echo inside; exec sleep 100"])
        sleeper = subprocess.Popen(sleep, stdout=subprocess.PIPE, text=True)
        assert sleeper.stdout is not None
        # A process that starts during the removal, after SIGTERM, receives SIGKILL.
        assert sleeper.stdout.readline() == "inside\n"
        assert len(netns.namespaces(name)) == 3
        assert machine_links() == links
    assert sleeper.wait(timeout=10) == -signal.SIGTERM
    assert remains(name) == []
    assert machine_links() == links


def test_lab_removes_all_resources_after_exception() -> None:
    with pytest.raises(RuntimeError, match="of the benchmark"), Lab(hosts=2) as lab:
        name = lab.name
        raise RuntimeError("of the benchmark")
    assert remains(name) == []


def test_incomplete_lab_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_lab_run_is_killed_after_timeout(lab: Lab) -> None:
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        lab.run(
            3, [COLD, str(STUBBORN)], timeout=20
        )  # enough time to start, even on a busy machine
    assert "late" in str(caught.value.output)
    assert netns.processes(netns.namespaces(lab.name)) == []
    assert lab.run(3, WHERE, timeout=60).returncode == 0


def start_owner() -> tuple[subprocess.Popen[str], str]:
    """Start a process that runs a lab; return it and the lab's name once its ranks are running."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen(
        [sys.executable, COLD, str(PROGRAMS / "lab_owner.py"), str(STUBBORN)],
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("signum", "status"),
    [
        pytest.param(signal.SIGINT, -signal.SIGINT, marks=pytest.mark.long),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.long),
    ],
)
def test_lab_removes_all_resources_after_signal(signum: int, status: int) -> None:
    owner, name = start_owner()
    owner.send_signal(signum)
    time.sleep(0.1)
    owner.send_signal(signum)  # a second signal must not stop the removal
    assert owner.wait(timeout=30) == status
    assert remains(name) == []


@pytest.mark.long
@pytest.mark.parametrize("remedy", ["clean", pytest.param("next lab", marks=pytest.mark.long)])
def test_lab_of_killed_owner_is_removed_later(lab: Lab, remedy: str) -> None:
    owner, name = start_owner()
    ranks = [line for line in remains(name) if line.startswith("process")]
    assert len(ranks) >= 4 + 2 + 1  # and two daemons and mpirun
    owner.kill()
    owner.wait(timeout=30)
    assert len(netns.namespaces(name)) == 3
    assert remains(name) != []
    if remedy == "clean":
        clean = [sys.executable, "-m", "benchmarks.lab", "--clean"]
        completed = subprocess.run(clean, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert f"removed: {name}" in completed.stdout
        assert lab.name in completed.stdout.partition("in use:")[2]
    else:
        with Lab(hosts=1):
            pass
    assert remains(name) == []
    assert len(netns.namespaces(lab.name)) == 4  # the lab of a running process is kept


def test_reused_process_id_does_not_protect_lab() -> None:
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


def test_lab_command_runs_on_host_0_and_returns_status() -> None:
    completed = command_line("--hosts", "2", "--", "sh", "-c", "hostname; exit 7")
    assert completed.returncode == 7, completed.stderr
    assert completed.stdout.endswith("-h0\n")
    assert remains(completed.stdout.strip().partition("-")[0]) == []


def test_lab_command_runs_over_mpi() -> None:
    completed = command_line("--hosts", "2", "--np", "3", "--", sys.executable, *WHERE)
    assert completed.returncode == 0, completed.stderr
    assert [facts[0][-3:] for facts in json.loads(completed.stdout)] == ["-h0", "-h1", "-h0"]


def test_lab_command_names_invalid_argument() -> None:
    assert re.search(r"error: .*\bcommand\b.*--clean\b", command_line("--hosts", "2").stderr)
    refused = command_line("--hosts", "0", "--", "true")
    assert refused.returncode == 2
    assert re.fullmatch(r"error: hosts: .*\b1 to 250\b.*\b0\n", refused.stderr)
