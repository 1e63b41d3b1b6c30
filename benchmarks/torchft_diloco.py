"""Compare DiLoCo with that of torchft over slow links: speed, bytes and loss.

    python -m benchmarks.torchft_diloco --python torchft-env/bin/python --save --check
    python -m benchmarks.torchft_diloco --python torchft-env/bin/python --quick

Four hosts of the network lab (requires root). torchft is in a separate environment:

    python -m venv torchft-env && torchft-env/bin/pip install torch numpy torchft==0.2.0

Without `--python`, torchft is left out unless this environment has it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from aladdin_mpi.errors import UserError
from benchmarks import harness, quick
from benchmarks.bounds import positive, share, whole
from benchmarks.lab import Lab
from benchmarks.machine import machine
from benchmarks.programs.diloco_task import HELD_OUT, INTERFACE, LAYERS, Plan

HOSTS = 4
PORT = 29510
"""Port of torchft's lighthouse on host 0."""
OURS, PEER = "aladdin_mpi", "torchft"
FASTER, SAME_LOSS = 1.05, 0.02
"""Longest time of our step relative to torchft's; largest loss above torchft's, in nats."""
INSTALL = (
    "Make an environment with: python -m venv torchft-env && "
    "torchft-env/bin/pip install torch numpy torchft==0.2.0"
)
_VERSIONS = """\
import importlib.metadata, torch, torchft
print(f"torchft {importlib.metadata.version('torchft')} with torch {torch.__version__}")"""
TITLE = "DiLoCo of this project and of torchft"
NOTES = f"""\
One worker on each of {HOSTS} hosts of the network lab. Both libraries train the same multilayer
perceptron from the same values on the same batches in fp32, with torch's AdamW as the inner
optimizer and SGD with Nesterov momentum (rate 0.7, momentum 0.9) as the outer one. Labels are those
of a fixed random network; no sample is used twice. They run in turn; figures are medians over
the repeats, and steps/s also the smallest and largest repeat.

Steps/s: inner steps of the slowest worker. CPU ms per step: of all threads of a worker, on average.
MB per step: bytes that a worker's host sends, with headers, from the counters of its network
interface. All over the same inner steps, without the first and last `--steps`. Loss: on {HELD_OUT}
held-out samples, in nats, of the mean of the workers' models after all steps.

{OURS}: `--algorithm diloco` through `DataParallel`, over MPI. {PEER}: its `DiLoCo` over gloo, one
process per replica group, the lighthouse on host 0. With fragments, {PEER} starts a sum `--overlap`
steps before the fragment is due and applies it when due; {OURS} starts it when due. Fragments are
whole layers in {PEER}, and parts of equal bytes in {OURS}.

Bars: at most {FASTER:g} of {PEER}'s time per step, and a loss at most {SAME_LOSS:g} above its."""
QUICK = {
    "width": 64,
    "steps": 8,
    "rounds": 1,
    "repeats": 1,
    "overlap": 1,
    "rate": 1.0,
}

Record = Mapping[str, float]


def plans(args: argparse.Namespace) -> dict[str, Plan]:
    """Return the settings to compare, by name.

    Raises:
        UserError: the number of fragments or the overlap does not fit the model or the steps.
    """
    if LAYERS % args.fragments:
        raise UserError(f"--fragments {args.fragments} must divide the model's {LAYERS} layers")
    if args.steps % args.fragments:
        raise UserError(f"--steps {args.steps} must be a multiple of --fragments {args.fragments}")
    if args.overlap >= args.steps // args.fragments:
        raise UserError(
            f"--overlap {args.overlap} must be less than the {args.steps // args.fragments} steps "
            "between two fragments"
        )
    common = {"width": args.width, "batch": args.batch, "rate": args.lr}
    common |= {"steps": args.steps, "rounds": args.rounds}
    return {
        "whole model": Plan(**common, fragments=1, overlap=0, blend=0.0),
        f"{args.fragments} fragments": Plan(
            **common, fragments=args.fragments, overlap=args.overlap, blend=args.blend
        ),
    }


def find_peer(given: Path | None) -> tuple[Path, str] | None:
    """Return the Python that has torchft, and the versions there.

    Without ``given``, it is this one, or None if torchft is not installed.

    Raises:
        UserError: the given one cannot import torchft.
    """
    python = Path(given or sys.executable).absolute()
    try:
        command = [str(python), "-c", _VERSIONS]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        problem = done.stderr.strip().splitlines()[-1:] if done.returncode else None
    except OSError as error:
        problem = [str(error)]
    if problem is None:
        return python, done.stdout.strip()
    if given is None:
        print(f"torchft is left out: it is not installed here. {INSTALL}", file=sys.stderr)
        return None
    raise UserError(f"--python {given} cannot import torchft: {' '.join(problem)}. {INSTALL}")


def run_ours(lab: Lab, plan: Plan, folder: Path, limit: float) -> None:
    """Train with this project.

    Raises:
        UserError: the run failed; contains its output.
    """
    words = ["-m", "benchmarks.programs.diloco_here", plan.to_json(), str(folder)]
    done = lab.run(HOSTS, words, limit)
    if done.returncode:
        raise UserError(f"{OURS} failed with status {done.returncode}:\n{done.stdout}{done.stderr}")


def run_torchft(python: Path, lab: Lab, plan: Plan, folder: Path, limit: float) -> None:
    """Train with torchft.

    Raises:
        UserError: a worker failed; contains its output.
        subprocess.TimeoutExpired: it took longer than ``limit`` seconds.
    """
    deadline = time.monotonic() + limit
    serve = [str(python.parent / "torchft_lighthouse"), "--bind", f"[::]:{PORT}"]
    serve += ["--min_replicas", str(HOSTS)]
    program = [str(python), "-m", "benchmarks.programs.diloco_torchft", plan.to_json(), str(folder)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_running(lab.host_command(0, serve), folder / "lighthouse"))
        workers = []
        for host in range(HOSTS):
            words = [str(host), str(HOSTS), lab.address(host), f"http://{lab.address(0)}:{PORT}"]
            command = lab.host_command(host, [*program, *words])
            workers.append(stack.enter_context(_running(command, folder / f"worker{host}")))
        for host, worker in enumerate(workers):
            if status := worker.wait(max(0.1, deadline - time.monotonic())):
                text = (folder / f"worker{host}").read_text(errors="replace")
                raise UserError(f"{PEER}: worker {host} failed with status {status}:\n{text}")


@contextlib.contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in the block, and end it there."""
    env = harness.environment() | {"GLOO_SOCKET_IFNAME": INTERFACE, "NO_COLOR": "1"}
    # This project's workers keep freed memory too.
    env |= {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measure(args: argparse.Namespace, peer: tuple[Path, str] | None) -> list[dict[str, Any]]:
    """Return a record of every run: what was run, and the records of its workers."""
    libraries: dict[str, Callable[[Lab, Plan, Path, float], None]] = {OURS: run_ours}
    if peer is not None:
        libraries[PEER] = partial(run_torchft, peer[0])
    records = []
    for turn in range(args.repeats):
        for setting, plan in plans(args).items():
            for library, train in libraries.items():
                print(f"turn {turn + 1}: {library}, {setting}", file=sys.stderr, flush=True)
                with (
                    Lab(HOSTS, args.rate) as lab,
                    tempfile.TemporaryDirectory(prefix="torchft-diloco-") as name,
                ):
                    train(lab, plan, Path(name), args.limit)
                    workers = read_records(Path(name))
                records.append({"setting": setting, "library": library, "workers": workers})
    return records


def read_records(folder: Path) -> list[Record]:
    """Return the records that the workers have written, by rank."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(HOSTS)]


def rows(records: Sequence[Mapping[str, Any]], measured: int) -> list[dict[str, Any]]:
    """Return the table from runs of ``measured`` measured steps."""
    found = []
    for setting, library in dict.fromkeys((r["setting"], r["library"]) for r in records):
        runs = [r["workers"] for r in records if (r["setting"], r["library"]) == (setting, library)]
        speeds = [measured / max(w["seconds"] for w in workers) for workers in runs]
        cpu = [mean(w["cpu"] for w in workers) / measured * 1e3 for workers in runs]
        sent = [mean(w["sent"] for w in workers) / measured / 1e6 for workers in runs]
        row = {"setting": setting, "library": library, "steps/s": median(speeds)}
        row |= {"smallest": min(speeds), "largest": max(speeds)}
        row |= {"CPU ms per step": median(cpu), "MB per step": median(sent)}
        found.append(row | {"loss": median(workers[0]["loss"] for workers in runs)})
    return found


def missed(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a description of each bar that was missed."""
    found = []
    by_name = {(row["setting"], row["library"]): row for row in table}
    for setting in dict.fromkeys(row["setting"] for row in table):
        ours, peer = by_name[setting, OURS], by_name.get((setting, PEER))
        if peer is None:
            continue
        ratio, gap = peer["steps/s"] / ours["steps/s"], ours["loss"] - peer["loss"]
        if ratio > FASTER:
            found.append(
                f"{setting}: a step takes {ratio:.2f} of {PEER}'s time, expected at most {FASTER:g}"
            )
        if not gap <= SAME_LOSS:
            found.append(
                f"{setting}: a loss {gap:.3f} above {PEER}'s, expected at most {SAME_LOSS:g}"
            )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser("torchft_diloco", (__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--python", type=Path, metavar="PATH", help="Python of an environment with torchft")
    add("--rate", type=positive, default=0.1, help="rate of each host's link in Gbit/s")
    add("--width", type=whole(), default=1024, help="units of each of the four hidden layers")
    add("--batch", type=whole(), default=32, help="samples of a worker's step")
    add("--lr", type=positive, default=1e-3, help="learning rate of the inner AdamW")
    add("--steps", type=whole(2), default=32, help="inner steps between two outer steps")
    add("--rounds", type=whole(), default=8, help="how many times these steps are measured")
    add("--fragments", type=whole(2), default=4, help="fragments in the second setting")
    add("--overlap", type=whole(0), default=5, help="steps during which a fragment is summed")
    add("--blend", type=share, default=0.5, help="weight of a worker's own fragment")
    add("--repeats", type=whole(), default=3, help="runs of which the median is taken")
    add("--limit", type=positive, default=600.0, help="time limit of a run in s")
    args = quick.parse(parser, argv, QUICK)
    plans(args)
    facts = machine()
    peer = find_peer(args.python)
    records = measure(args, peer)
    table = rows(records, args.steps * args.rounds)
    notes = NOTES if peer is None else f"{NOTES}\n\nPeer: {peer[1]}."
    found = harness.Findings(TITLE, table, notes, missed(table))
    return harness.publish("torchft_diloco", argv, args, facts, found)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
