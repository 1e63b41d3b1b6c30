"""Compare rules for training over slow links: real gradients in virtual time.

    python -m benchmarks.outer --out runs/outer --data-dir cifar10 --check --save
    python -m benchmarks.outer --out runs/outer --parts speeds --rules diloco aladdin-ahead
    python -m benchmarks.outer --out runs/outer --quick

Links carry 1/10 to 1/200 of an fp32 gradient per step; workers are equal, slower, or pause. Every
rule is tuned with the same plan (benchmarks/outer_rules.py). Rerun the same command to resume:
finished runs are kept in the folder `--out`.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, get_args

from benchmarks import harness, quick
from benchmarks.bounds import folder, whole
from benchmarks.cell_store import CellStore
from benchmarks.harness import Findings
from benchmarks.machine import machine
from benchmarks.outer_cells import BATCH, Cell, Run, carry_out, taught, time_to
from benchmarks.outer_plot import draw
from benchmarks.outer_rules import (
    AVERAGING,
    DILOCO,
    LADDER,
    MARGIN,
    OURS,
    STREAMING,
    WIRES,
    Aim,
    Rule,
    rules,
    target,
    tune,
    without_slowest,
)

EQUAL_AND_SLOW = ("equal", "slow 10")
PARTS = {
    "race": [Cell(speeds=each) for each in ("equal", "slow 10", "pauses")],
    "speeds": [Cell(speeds=each) for each in ("equal", "slow 3", "slow 10", "three", "pauses")],
    "workers": [Cell(workers=n, speeds=each) for n in (4, 16) for each in EQUAL_AND_SLOW],
    "links": [Cell(link=link, speeds=each) for link in (10, 200) for each in EQUAL_AND_SLOW],
    "long": [Cell(speeds=each, steps=1000) for each in EQUAL_AND_SLOW],
    "pictures": [Cell("resnet20", speeds=each) for each in EQUAL_AND_SLOW],
}
PLOTTED = PARTS["race"]
REDUCED = [Cell(workers=2, speeds=each, steps=10) for each in EQUAL_AND_SLOW]
SEEDS = 3
FASTER, WAITING = 1.5, 0.01
BEHIND_STREAMING, BEHIND_AVERAGING = 0.01, 0.02
WITHOUT = "without the slow worker"
QUICK = {"rules": ["ar-sgd", "aladdin-ahead"], "seeds": 1, "parts": [], "untuned": True}

TITLE = "Training over slow links"
NOTES = f"""\
gpt: a character-level GPT of 110,400 parameters on the sources of Python's standard library, AdamW
(beta 0.8 and 0.99, decay 0.05), batches of {BATCH["gpt"]} windows of 64 characters, gradients
clipped to a norm of 1; loss in nats per character. resnet20: CIFAR-10 at 16 x 16 pixels, SGD with
Nesterov momentum, batches of {BATCH["resnet20"]}. The rate rises during 5 % of the samples and
falls to 2 % of the peak along half a cosine. Losses are those of the global model on fixed held-out
samples: mean and standard deviation over the seeds after equal samples of all workers.

Time is in steps of an ordinary worker; a worker's link carries 1/"link" of an fp32 gradient per
step in each direction, with a latency of half a step; step times vary by 3 %; computing on messages
takes no time. `aladdin-local`, `aladdin-ahead` and `async-diloco` also use a server on another host
with a fast link. Workers of the other rules sum fp32 values in a ring and exchange quantised ones
directly, which takes 1.75 times the values with 8 workers. Speeds: one worker is 3 or 10 times
slower; three: 1, 2, 3, 1, ... times slower; pauses: after 100 steps on average each worker
pauses for 30 (both exponential; also while it waits). Waiting: share of the workers' time until all
samples are granted; what follows is in the time. Sent and received: bytes of a worker per step
relative to an fp32 gradient.

Every rule is tuned with seed 0, for the time to the target, a loss, and for the loss at equal
samples; for the latter, of the settings whose bytes fit the link (up to {MARGIN:g} times). The plan
is in benchmarks/outer_rules.py. Times to larger losses, such as target + 0.1, are those of the same
runs. Rows "{WITHOUT}" have one worker less and the same samples in all. Rules that
advance in rounds learn the same in every cell with the same number of workers: their losses are
measured with equal workers and links of 1/50, and only their times in each cell.

Bars, with all workers: `{OURS}` needs at most 1/{FASTER:g} of the best DiLoCo variant's time to the
target, and to each of the larger losses, if workers are unequal or pause, and at most its time
otherwise; it waits less than {WAITING:.0%}; and after equal samples its loss is at most
{BEHIND_STREAMING:g} above that of Streaming DiLoCo, and {BEHIND_AVERAGING:g} above that of
synchronous averaging, with settings that send at most {MARGIN:g} times what it sends or the link
carries."""


@dataclass(frozen=True)
class Result:
    """A rule in a cell: the runs of all seeds with a setting that was tuned for ``aims``."""

    cell: Cell
    rule: str
    aims: tuple[Aim, ...]
    run: Run
    figures: Sequence[Mapping[str, Any]]

    def mean(self, key: str) -> float:
        """Return the mean of a figure over the seeds; nan if a run has diverged."""
        return mean(float("nan") if f[key] is None else f[key] for f in self.figures)

    def time_to_target(self, more: float = 0.0) -> float | None:
        """Return the mean time to the target plus ``more``; None unless all seeds reach it."""
        times = [time_to(f["curve"], target(self.cell) + more) for f in self.figures]
        reached = [time for time in times if time is not None]
        return mean(reached) if len(reached) == len(times) else None


class Runs:
    """Finished runs, and new ones; may be called by several threads."""

    def __init__(self, out: Path | None, data: Path | None, commit: object) -> None:
        self._store, self._data, self._commit = CellStore(out), data, commit
        self._lock = threading.Lock()

    def __call__(self, run: Run) -> Mapping[str, Any]:
        """Return a run's figures, from the store if it is finished."""
        with self._lock:
            entry = self._store.get(run)
        if entry is not None:
            return dict(entry["figures"])
        if (teacher := run.teacher) is not None:
            learned = self(teacher)
            figures = taught(learned, carry_out(run, self._data, timed=True))
        else:
            figures = carry_out(run, self._data)
        with self._lock:
            self._store.put(run, figures, self._commit)
        print(f"{figures['loss']}, {figures['seconds']:.0f} steps: {run.key}", file=sys.stderr)
        return figures


def results_of(
    rule: Rule, cells: Iterable[Cell], args: argparse.Namespace, runs: Runs
) -> list[Result]:
    """Return the results of a rule in all cells, tuning it first."""
    found = []
    for cell in cells:
        variants = {rule.name: cell}
        fewer = without_slowest(cell)
        if fewer is not None and rule.name in DILOCO:
            variants[f"{rule.name}, {WITHOUT}"] = fewer
        for name, where in variants.items():
            points: dict[Run, list[Aim]] = {}
            for aim in get_args(Aim):
                point = rule.first(cell.task) if args.untuned else tune(rule, where, aim, runs)
                points.setdefault(rule.run(where, point, 0), []).append(aim)
            for run, aims in points.items():
                figures = [runs(replace(run, seed=seed)) for seed in range(args.seeds)]
                found.append(Result(cell, name, tuple(aims), run, figures))
    return found


def row(result: Result) -> dict[str, Any]:
    """Return a row of the table."""
    cell, losses = result.cell, [f["loss"] for f in result.figures]
    words = [f"{name.lstrip('-')} {value}" for name, value in result.run.options]
    return {
        "task": cell.task,
        "workers": cell.workers,
        "link": cell.link,
        "speeds": cell.speeds,
        "steps": cell.steps,
        "rule": result.rule,
        "tuned for": " and ".join(result.aims),
        "peak rate": result.run.peak,
        "setting": ", ".join(words),
        "seeds": len(losses),
        "loss": round(result.mean("loss"), 4),
        "sd": round(stdev(losses), 4) if len(losses) > 1 and None not in losses else None,
        "target": target(cell),
        **{
            f"time to target{f' + {more:g}' if more else ''}": result.time_to_target(more)
            for more in LADDER
        },
        "time of all samples": result.mean("seconds"),
        "waiting, %": 100 * result.mean("waiting"),
        "sent": result.mean("sent"),
        "received": result.mean("received"),
    }


def missed(results: Sequence[Result]) -> list[str]:
    """Return a description of each bar that was missed."""
    found = []
    for cell in dict.fromkeys(result.cell for result in results):
        where = f"{cell.task}, {cell.workers} workers, 1/{cell.link}, {cell.speeds}, {cell.steps}"
        for text in _missed_in([result for result in results if result.cell == cell]):
            found.append(f"{where}: {text}")
    return found


def _missed_in(results: Sequence[Result]) -> Iterable[str]:
    timed = {result.rule: result for result in results if "time" in result.aims}
    sampled = {result.rule: result for result in results if "loss" in result.aims}
    if OURS not in timed:
        return
    ours, own = timed[OURS], sampled[OURS].mean("loss")
    rivals = [result for result in results if result.rule in DILOCO]
    factor = 1.0 if ours.cell.is_even else FASTER
    for more in LADDER:
        times = [time for rival in rivals if (time := rival.time_to_target(more)) is not None]
        mine = ours.time_to_target(more)
        if times and (mine is None or mine * factor > min(times)):
            loss = target(ours.cell) + more
            yield f"{mine} steps to {loss:g}, expected at most {min(times) / factor:.0f}"
    if (waiting := ours.mean("waiting")) >= WAITING:
        yield f"workers wait {waiting:.1%} of the time, expected less than {WAITING:.0%}"
    most = MARGIN * max(1 / ours.cell.link, sampled[OURS].mean("sent"))
    for names, margin in (((STREAMING,), BEHIND_STREAMING), (AVERAGING, BEHIND_AVERAGING)):
        losses = [
            result.mean("loss")
            for result in results
            if result.rule in names and result.mean("sent") <= most
        ]
        if losses and not own <= min(losses) + margin:
            yield f"a loss of {own:.4f}, expected at most {min(losses) + margin:.4f} ({names[0]})"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = quick.parse(_parser(), argv, QUICK)
    facts = machine()
    cells = [cell for part in args.parts for cell in PARTS[part]] or REDUCED
    runs, known = Runs(args.out, args.data_dir, facts.get("commit")), rules(args.wires)
    with ThreadPoolExecutor(args.jobs) as pool:
        of_rules = pool.map(
            lambda name: results_of(known[name], dict.fromkeys(cells), args, runs), args.rules
        )
        results = [result for found in of_rules for result in found]
    results.sort(key=lambda result: cells.index(result.cell))
    table = [row(result) for result in results]
    findings = Findings(TITLE, table, NOTES, missed(results))
    status = harness.publish("outer", argv, args, facts, findings)
    if args.save is not None:
        panels = {
            cell: {
                r.rule: r.figures
                for r in results
                if r.cell == r.run.cell == cell and "time" in r.aims
            }
            for cell in PLOTTED
        }
        draw({cell: curves for cell, curves in panels.items() if curves}, args.save / "outer.png")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = harness.make_parser("outer", (__doc__ or "").splitlines()[0])
    add, names = parser.add_argument, list(rules())
    add("--out", type=folder, metavar="FOLDER", help="folder for finished runs")
    add("--data-dir", type=folder, help="CIFAR-10 as folders of images, for the part pictures")
    add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts to run")
    add("--rules", nargs="+", choices=names, default=names, metavar="RULE", help="rules to run")
    add("--wires", nargs="+", default=list(WIRES), help="formats of messages to try")
    add("--seeds", type=whole(), default=SEEDS, help="number of runs with the tuned setting")
    add("--untuned", action="store_true", help="take each rule's first setting")
    add("--jobs", type=whole(), default=1, help="number of rules to run at the same time")
    return parser


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
