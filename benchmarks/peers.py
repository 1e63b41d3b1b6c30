"""Compare AR-SGD with its peers in the same run: a training step, and the sum of a gradient alone.

    python -m benchmarks.peers --save --check
    python -m benchmarks.peers --optimizer adamw --loop alone mpi torch DDP --sum --save --check
    python -m benchmarks.peers --quick

A step is compared with torch's DistributedDataParallel over gloo, with and without its PowerSGD
hook, and with Horovod's DistributedOptimizer; the sum with one call of mpi4py, torch.distributed
and Horovod for the whole gradient. All ranks are on this machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from aladdin_mpi.allreduce import horovod
from benchmarks import harness, quick
from benchmarks.bounds import positive, whole
from benchmarks.machine import machine

PROGRAM = "benchmarks.programs.peers"
BAR = 1.05
"""Longest time of our best backend, as a multiple of the best peer's."""
OURS = ("mpi", "horovod", "torch")
"""Backends of ``--ar-sgd-allreduce``."""
PEERS = {
    "step": ("DDP", "hvd optimizer"),
    "sum": ("Allreduce", "all_reduce", "hvd allreduce"),
}
COMPRESSED = {"ours": "dgc", "peer": "DDP PowerSGD"}
"""Contenders that do not send the whole gradient; they are compared separately."""
ALONE = "alone"
NEEDS_HOROVOD = ("horovod", "hvd optimizer", "hvd allreduce")
MEGABYTES = {"resnet56": 3.4, "vgg16_bn_cifar": 58.9}
"""Sizes of the default models' parameters, in fp32."""

Record = Mapping[str, Any]
NOTES = """\
All contenders alternate in one run. Figures are medians over repeats of the mean step of one turn,
on the slowest rank, without the last step, which ends a run. A step: forward, backward, sum and
update on a fixed batch, as in Horovod's synthetic benchmark. mpi, horovod and torch: AR-SGD through
the public interface with that `--ar-sgd-allreduce` and everything else that training includes.
alone: the same loop in plain torch without a sum, on all ranks at the same time. DDP: torch's
DistributedDataParallel over gloo, gradients as views of its buckets. hvd optimizer: Horovod's
DistributedOptimizer. The sum: of a vector, ours in buckets of 4 MB, the others in one call:
mpi4py's Allreduce, torch.distributed's all_reduce over gloo, and Horovod's. Ratio: our best over
the best peer. Contenders that leave values out, dgc (AR-SGD with deep gradient compression) and DDP
PowerSGD (rank 1), have a separate ratio."""
QUICK = {
    "ranks": [2],
    "model": ["digits"],
    "megabytes": [1.0],
    "steps": 2,
    "sums": 2,
    "batch": 2,
    "repeats": 1,
}


def measure(args: argparse.Namespace, ranks: int) -> list[Record]:
    """Return all records of the program with this number of ranks."""
    options = {
        "--loop": [name for name in args.loop if _present(name)],
        "--model": args.model,
        "--batch": [args.batch],
        "--steps": [args.steps],
        "--optimizer": [args.optimizer],
        "--sum": [name for name in args.sum if _present(name)],
        "--megabytes": args.megabytes,
        "--bucket-mb": [args.bucket_mb],
        "--sums": [args.sums],
        "--repeats": [args.repeats],
    }
    words = [word for name, values in options.items() for word in (name, *map(str, values))]
    done = harness.run_here(ranks, ["-m", PROGRAM, *words], args.limit)
    records: list[Record] = harness.json_printed(done)
    return records


def _present(name: str) -> bool:
    return name not in NEEDS_HOROVOD or horovod.library() is not None


def rows(records: Sequence[Record], ranks: int) -> list[dict[str, Any]]:
    """Return the table for one number of ranks: a row for each model and for each size."""
    found = []
    for what, size in dict.fromkeys((r["what"], r["size"]) for r in records):
        mine = [r for r in records if (r["what"], r["size"]) == (what, size)]
        times = {
            who: median(r["seconds"] for r in mine if r["who"] == who)
            for who in dict.fromkeys(r["who"] for r in mine)
        }
        row: dict[str, Any] = {"ranks": ranks, "what": what, "size": size}
        row |= {f"{who}, ms": 1e3 * seconds for who, seconds in times.items()}
        found.append(row | _verdict(what, times))
    return found


def _verdict(what: str, times: Mapping[str, float]) -> dict[str, Any]:
    """Return our best, the best peer, and their ratio."""
    ours = [who for who in OURS if who in times]
    peers = [who for who in PEERS[what] if who in times]
    found: dict[str, Any] = {}
    if ours and peers:
        best, peer = min(ours, key=times.__getitem__), min(peers, key=times.__getitem__)
        found |= {"best of ours": best, "best peer": peer, "ratio": times[best] / times[peer]}
    if what == "step" and set(COMPRESSED.values()) <= times.keys():
        found["compressed ratio"] = times[COMPRESSED["ours"]] / times[COMPRESSED["peer"]]
    return found


def missed(table: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a description of each row that exceeds the bar."""
    found = []
    for row in table:
        case = f"{row['what']}, {row['size']}, {row['ranks']} ranks"
        if row.get("ratio", 0.0) > BAR:
            found.append(
                f"{case}: {row['best of ours']} takes {row['ratio']:.2f} of the time of "
                f"{row['best peer']}, expected at most {BAR:g}"
            )
        if row.get("compressed ratio", 0.0) > BAR:
            found.append(
                f"{case}: {COMPRESSED['ours']} takes {row['compressed ratio']:.2f} of the time of "
                f"{COMPRESSED['peer']}, expected at most {BAR:g}"
            )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser("peers", "Compare AR-SGD with its peers.")
    add = parser.add_argument
    loops = [ALONE, *OURS, *PEERS["step"], *COMPRESSED.values()]
    sums = [*OURS, *PEERS["sum"]]
    add("--ranks", type=whole(2), nargs="+", default=[2, 4], help="numbers of ranks")
    add(
        "--loop",
        nargs="*",
        choices=loops,
        default=loops,
        help="contenders whose steps are measured",
    )
    add("--model", nargs="*", default=list(MEGABYTES), help="image models of aladdin_mpi.train")
    add("--batch", type=whole(), default=8, help="samples per rank and step")
    add("--steps", type=whole(), default=10, help="steps in one measurement")
    add("--optimizer", choices=["sgd", "adamw"], default="sgd", help="optimizer of all steps")
    add("--sum", nargs="*", choices=sums, default=sums, help="contenders whose sums are measured")
    add(
        "--megabytes",
        type=positive,
        nargs="*",
        default=list(MEGABYTES.values()),
        help="sizes of sums in MB",
    )
    add("--bucket-mb", type=positive, default=4.0, help="size of our buckets in MB")
    add("--sums", type=whole(), default=10, help="sums in one measurement")
    add("--repeats", type=whole(), default=7, help="number of turns of which the median is taken")
    add("--limit", type=positive, default=1800.0, help="time limit of a run in s")
    args = quick.parse(parser, argv, QUICK)
    facts = machine()
    table = [row for ranks in args.ranks for row in rows(measure(args, ranks), ranks)]
    title, case = "AR-SGD and its peers", ""
    if args.optimizer != "sgd":
        title, case = f"{title}, with {args.optimizer}", args.optimizer
    found = harness.Findings(title, table, NOTES, missed(table))
    return harness.publish("peers", argv, args, facts, found, case)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
