"""Check the package on a machine with a GPU: results and memory.

    tools/gpu-check.sh
    python -m benchmarks.gpu_check --device test --only equality

Writes report.md and report.json, which grow row by row. Exit status 1: a row failed.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from aladdin_mpi.errors import UserError
from benchmarks import harness
from benchmarks.bounds import positive
from benchmarks.gpu_check.device import TEST, obstacle
from benchmarks.gpu_check.parts import PARTS
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.rows import SKIP, Row
from benchmarks.gpu_check.runner import Runner
from benchmarks.machine import machine

LIMIT = 480.0
ROOM = 8 * 2**30
"""Bytes available to the run folders."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check and return the exit status.

    Raises:
        UserError: no accelerator or no mpirun was found.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(argv)
    problem = obstacle(args.device)
    if problem is not None:
        raise UserError(f"--device {args.device}: {problem}")
    signal.signal(signal.SIGTERM, _stop)
    args.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "benchmarks.gpu_check", *argv])
    report = Report(args.out, command, machine())
    with (
        tempfile.TemporaryDirectory(prefix="gpu-check-", dir=_memory()) as scratch,
        (args.out / "log.txt").open("w") as log,
    ):
        runner = Runner(args.device, Path(scratch), args.out.resolve(), log, report.add)
        _run_parts(runner, report, args)
    print(f"{report.summary()}\nwritten: {args.out / 'report.md'}")
    return 1 if report.failed else 0


def _stop(number: int, frame: FrameType | None) -> None:
    """End as after an error, so that the running program is ended too."""
    raise SystemExit(128 + number)


def _memory() -> str | None:
    """Return a folder in memory with space for checkpoints, to avoid slow disks; None: none."""
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free >= ROOM:
        return str(shared)
    return None


def _run_parts(runner: Runner, report: Report, args: argparse.Namespace) -> None:
    """Run the selected parts; on the test device a part may use all the time that is left."""
    end = time.monotonic() + args.limit
    parts = {part.name: part for part in PARTS}
    for part in [parts[name] for name in args.only or parts]:
        left = end - time.monotonic()
        if left <= 0:
            report.add(Row(part.name, "all", SKIP, note="no time left"))
            continue
        runner.run(part, left if args.device == TEST else min(left, part.limit))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    names = [part.name for part in PARTS]
    add("--device", choices=["gpu", TEST], default="gpu", help="test: delayed-copy test device")
    add(
        "--only",
        choices=names,
        nargs="+",
        metavar="PART",
        help=f"in this order, of {', '.join(names)}",
    )
    add("--out", type=Path, default=Path("gpu-check"), help="folder for the report")
    add("--limit", type=positive, default=LIMIT, help="longest duration, in seconds")
    return parser


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
