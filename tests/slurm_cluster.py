"""A real Slurm cluster on one Linux machine: two to four nodes in network namespaces.

    python -m tests.slurm_cluster up --nodes 3
    python -m tests.slurm_cluster run sbatch slurm/train.sbatch --epochs 3
    python -m tests.slurm_cluster run squeue
    python -m tests.slurm_cluster down

munged, slurmctld and one slurmd per node run in a separate network, with separate configuration,
key and folders below /run: another Slurm on this machine is not affected, and several of these
clusters can run at the same time. Every node sees the machine's files; `shared` is a folder that
is removed with the cluster. Each node except the first declares two GPUs, which Slurm only counts:
they do not exist.

A cluster consists of the namespaces of a network lab (benchmarks/netns.py), which also removes the
remains of a killed cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aladdin_mpi.errors import UserError
from benchmarks import netns

NAME = "aladdin-slurm"
"""Name of the command line's cluster."""
NETWORK = "10.214.0"
SERVER = f"{NETWORK}.254"
NODES = range(2, 5)
CPUS = 16
"""Resources that a node declares; jobs should wait for nothing but nodes."""
GPUS = 2
START_SECONDS = 60.0
PACKAGES = "slurm-wlm munge libpmix2 libpmix-dev"
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")

_CONF = """\
ClusterName=aladdin
SlurmctldHost={server}({address})
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
# Two nodes with one folder for temporary files would disturb each other's PMIx.
TmpFS={folder}/tmp-%n
SwitchType=switch/none
MpiDefault=pmix
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# The nodes have as many CPUs as is said below, whatever the machine has.
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=2
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=10
KillWait=10
BatchStartTimeout=20
{nodes}
PartitionName=all Default=YES Nodes={all} MaxTime=60 State=UP
PartitionName=cpu Nodes={first} MaxTime=60 State=UP
PartitionName=gpu Nodes={others} MaxTime=60 State=UP
"""


@functools.cache
def why_unavailable() -> str | None:
    """Return the reason why no Slurm can be started on this machine, or None."""
    reason = netns.why_unavailable()
    if reason is not None:
        return reason.replace("the network lab", "a Slurm test cluster")
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"a Slurm test cluster requires the command '{tool}': apt-get install {PACKAGES}"
    load = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libpmix.so')"]  # as srun does
    if subprocess.run(load, capture_output=True).returncode != 0:
        return f"a Slurm test cluster requires the library libpmix.so: apt-get install {PACKAGES}"
    return None


@dataclass(frozen=True)
class SlurmCluster:
    """A running cluster, and the commands to use it.

    Args:
        name: name of its network lab.
        size: number of nodes.
    """

    name: str
    size: int

    @property
    def folder(self) -> Path:
        """Configuration, logs and spool folders."""
        return netns.STATE / self.name

    @property
    def shared(self) -> Path:
        """A folder for runs; it is removed with the cluster."""
        return self.folder / "shared"

    @property
    def hosts(self) -> list[str]:
        """The nodes' names; the first has no GPU."""
        return [f"{self.name}-n{index}" for index in range(self.size)]

    @property
    def server(self) -> str:
        """The namespace from which jobs are submitted."""
        return f"{self.name}-switch"

    def inside(self, host: str, program: Sequence[object]) -> list[str]:
        """Return the command that runs ``program`` on a node, or on ``server``."""
        enter = ["nsenter", f"--net={netns.NAMESPACES / host}", "unshare", "--uts"]
        named = ["sh", "-c", 'hostname "$0" && exec "$@"', host]
        return [
            *enter,
            *named,
            "env",
            f"SLURM_CONF={self.folder / 'slurm.conf'}",
            *map(str, program),
        ]

    def run(
        self,
        *program: object,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command such as ``squeue`` in the namespace from which jobs are submitted.

        Raises:
            UserError: the command failed, with ``check``.
        """
        completed = subprocess.run(
            self.inside(self.server, program),
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
        )
        if check and completed.returncode != 0:
            raise UserError(
                f"'{program[0]}' failed: {completed.stderr.strip() or completed.stdout.strip()}"
            )
        return completed

    def start(self, host: str, *program: object) -> subprocess.Popen[bytes]:
        """Start a daemon on a node; it outlives this process."""
        return subprocess.Popen(
            self.inside(host, program),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def start_node(self, host: str) -> None:
        """Start a node's slurmd."""
        self.start(host, "slurmd", "-D", "-N", host)

    def kill_node(self, host: str) -> None:
        """Make a node fail: cut its link, then end its slurmd and all processes there."""
        netns.run_tool("ip", "-n", host, "link", "set", netns.INTERFACE, "down")
        for pid in netns.processes([host]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def revive_node(self, host: str) -> None:
        """Restore a failed node, as after a reboot: without the files of its processes."""
        shutil.rmtree(self.folder / f"spool-{host}")
        shutil.rmtree(self.folder / f"tmp-{host}")
        (self.folder / f"tmp-{host}").mkdir()
        netns.run_tool("ip", "-n", host, "link", "set", netns.INTERFACE, "up")
        self.start_node(host)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until every node can take a job.

        Raises:
            UserError: a node is not ready in time.
        """
        end = time.monotonic() + START_SECONDS
        while True:
            seen = self.run("sinfo", "-h", "-N", "-p", "all", "-o", "%N %T", check=False)
            states = dict(line.split() for line in seen.stdout.splitlines())
            if set(states) == set(self.hosts) and set(states.values()) <= {"idle", "mixed"}:
                return
            if time.monotonic() > end:
                raise UserError(f"Slurm: not ready in {START_SECONDS:g} s: {states or seen.stderr}")
            time.sleep(0.1)


def up(nodes: int, name: str | None = None) -> SlurmCluster:
    """Start a cluster; a running cluster called ``name`` is not changed.

    Args:
        nodes: 2 to 4.
        name: None: a new cluster, which ends with this process.

    Raises:
        UserError: Slurm is unavailable on this machine, or a daemon does not start.
    """
    reason = why_unavailable()
    if reason is not None:
        raise UserError(reason)
    if nodes not in NODES:
        raise UserError(f"--nodes: expected {NODES[0]} to {NODES[-1]}, got {nodes}")
    with netns.locked():
        netns.remove_stale()
        if name is not None and name in netns.labs():
            return find(name)
        if name is None:
            cluster = SlurmCluster(netns.claim_name(), nodes)
        else:
            netns.claim(name)
            cluster = SlurmCluster(name, nodes)
        try:
            controller = _build(cluster)
            cluster.wait_ready()
        except BaseException:
            netns.remove(cluster.name)
            raise
        if name is not None:
            netns.own(name, controller)
    return cluster


def find(name: str) -> SlurmCluster:
    """Return the cluster of this name. Raises UserError if it is not running."""
    if not netns.labs().get(name, False):
        raise UserError(f"no cluster is up; start it: python -m {__spec__.name} up")
    return SlurmCluster(
        name, sum("-n" in each.removeprefix(name) for each in netns.namespaces(name))
    )


def down(name: str) -> bool:
    """Remove a cluster and all of its processes; return False if it does not exist."""
    if not netns.STATE.is_dir():
        return False
    with netns.locked():
        there = name in netns.labs() or bool(netns.namespaces(name))
        if there:
            netns.remove(name)
    return there


@contextlib.contextmanager
def cluster(nodes: int) -> Iterator[SlurmCluster]:
    """Yield a separate cluster for a ``with`` block."""
    made = up(nodes)
    try:
        yield made
    finally:
        down(made.name)


def _build(cluster: SlurmCluster) -> int:
    """Create the network and start the daemons; return slurmctld's process."""
    netns.add_switch(cluster.server, f"{SERVER}/24")
    for index, host in enumerate(cluster.hosts):
        address = f"{NETWORK}.{index + 1}/24"
        netns.add_host(host, cluster.server, f"n{index}", address, gbit=10.0)
    _write_files(cluster)
    cluster.start(cluster.server, *_munged(cluster.folder))
    _wait_for(cluster.folder / "munge.socket")
    controller = cluster.start(cluster.server, "slurmctld", "-D", "-c")
    for host in cluster.hosts:
        cluster.start_node(host)
    return controller.pid


def _write_files(cluster: SlurmCluster) -> None:
    folder, hosts = cluster.folder, cluster.hosts
    for name in ("shared", "state", *(f"tmp-{host}" for host in hosts)):
        (folder / name).mkdir()
    key = os.open(folder / "munge.key", os.O_CREAT | os.O_WRONLY, mode=0o400)
    with open(key, "wb") as file:
        file.write(os.urandom(1024))
    nodes = "\n".join(
        f"NodeName={host} NodeAddr={NETWORK}.{index + 1} CPUs={CPUS} "
        f"{f'Gres=gpu:{GPUS} ' if index else ''}State=UNKNOWN"
        for index, host in enumerate(hosts)
    )
    conf = _CONF.format(
        server=cluster.server,
        address=SERVER,
        folder=folder,
        nodes=nodes,
        all=",".join(hosts),
        first=hosts[0],
        others=",".join(hosts[1:]),
    )
    (folder / "slurm.conf").write_text(conf, encoding="ascii")
    for index in range(GPUS):
        (folder / f"gpu{index}").touch()
    gpus = f"NodeName={','.join(hosts[1:])} Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n"
    (folder / "gres.conf").write_text(gpus, encoding="ascii")


def _munged(folder: Path) -> list[str]:
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log"}
    files["seed-file"] = "seed"
    # Forced, because it rejects folders that do not belong to root.
    named = [f"--{option}={folder}/munge.{end}" for option, end in files.items()]
    return ["munged", "--foreground", "--force", *named]


def _wait_for(path: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            raise UserError(f"Slurm: {path} did not appear in {START_SECONDS:g} s")
        time.sleep(0.02)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.slurm_cluster", description="A real Slurm on this machine."
    )
    actions = parser.add_subparsers(dest="action", required=True)
    start = actions.add_parser("up", help="start it; harmless if it is up")
    start.add_argument("--nodes", type=int, default=2, help="2 to 4 (default: 2)")
    actions.add_parser("down", help="remove it and all that runs on it; harmless if it is not up")
    inside = actions.add_parser("run", help="run sbatch, squeue ... there")
    inside.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = _parser().parse_args(argv)
    try:
        if args.action == "down":
            print("Slurm: removed" if down(NAME) else "Slurm: nothing to remove")
            return 0
        if args.action == "run":
            result = find(NAME)
            return subprocess.call(result.inside(result.server, args.command or ["sinfo"]))
        made = up(args.nodes, NAME)
        print(f"Slurm: {made.size} nodes are up: {' '.join(made.hosts)}")
        print(f"a folder for runs: {made.shared}; configuration and logs: {made.folder}")
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
