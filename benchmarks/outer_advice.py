"""Measure sample efficiency over slow links, for `aladdin_mpi.advise`: real gradients.

    python -m benchmarks.outer_advice --out runs/outer                # finished runs are kept there
    python -m benchmarks.outer_advice --out runs/outer --save --write

`--write` writes aladdin_mpi/advice/slow_links.toml.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import tomli_w

from aladdin_mpi.advice.candidates import ADAPTIVE, ROUND_OPTIONS, Candidate
from aladdin_mpi.advice.learning import SLOW_WORKERS, EfficiencyRow, credited, mean_curve, taught
from benchmarks import harness, quick
from benchmarks.bounds import whole
from benchmarks.harness import Findings
from benchmarks.machine import machine
from benchmarks.outer import Runs
from benchmarks.outer_cells import Cell, Run

FILE = Path(__file__).parent.parent / "aladdin_mpi" / "advice" / "slow_links.toml"
LINKS = (10, 50, 200)
ROUNDS = (8, 32, 64)
PEAK, LOW_PEAK = 6e-3, 3e-3
SLOW = 10
"""Number of a setting from which on the lower peak rate is tried as well, with seed 0."""
LINK = 50
"""The link of the settings whose messages do not depend on it."""
STEPS = 200
QUICK = {"seeds": 1, "settings": ["ar-sgd int4"], "steps": 10}

TITLE = "Sample efficiency over slow links"
NOTES = f"""\
The GPT, the links and the schedule of benchmarks.outer, with {SLOW_WORKERS} equal workers; the peak
rate is {PEAK:g}, or {LOW_PEAK:g} if number is at least {SLOW} and seed 0 is better with it. Sample
efficiency: samples that ar-sgd needs for the held-out loss that it has after 70 % of them, or for
the setting's last loss if that is larger, over those that the setting needs. number: steps per
round, or the steps that a link takes for an fp32 gradient, for algorithms that send less over
slower links."""
HEAD = """\
# Sample efficiency over slow links relative to synchronous SGD (ar-sgd), of a small GPT with 8
# workers: samples that ar-sgd needs for the held-out loss that it has after 70 % of them, over
# those that the setting needs; for the setting's last loss, if it does not get there. By steps per
# round, or by the steps that a link takes for an fp32 gradient. Capped at 1, as the runs do not
# converge.
# low and high: of the seeds; steps: the length of the runs. From
#     python -m benchmarks.outer_advice --out runs/outer --save --write

"""


@dataclass(frozen=True)
class SlowSetting:
    """A setting of an algorithm, by its key in the table and its number there."""

    key: str
    number: int
    run: Run


def settings(steps: int) -> list[SlowSetting]:
    """Return the settings, with runs of seed 0."""
    cell = Cell(workers=SLOW_WORKERS, link=LINK, steps=steps)

    def run(algorithm: str, options: Mapping[str, Any], link: int = LINK) -> Run:
        words = iter(Candidate(algorithm, 0, False, tuple(options.items())).words[2:])
        named = tuple(zip(words, words, strict=True))
        return Run(replace(cell, link=link), algorithm, named, PEAK, 0)

    found = [
        SlowSetting(f"ar-sgd {wire}", 1, run("ar-sgd", {"wire": wire})) for wire in ("int8", "int4")
    ]
    found += [
        SlowSetting(algorithm, rounds, run(algorithm, options(rounds)))
        for algorithm, options in ROUND_OPTIONS.items()
        for rounds in ROUNDS
    ]
    found += [
        SlowSetting(algorithm, link, run(algorithm, {}, link))
        for algorithm in ADAPTIVE
        for link in LINKS
    ]
    return found


def efficiency(
    setting: SlowSetting, seeds: int, runs: Callable[[Run], Mapping[str, Any]]
) -> tuple[EfficiencyRow, list[float]]:
    """Return a setting's row of the table, and the last losses of its seeds."""
    base, chosen = Run(replace(setting.run.cell, link=LINK), "ar-sgd", (), PEAK, 0), setting.run
    if setting.number >= SLOW:
        lower = replace(chosen, peak=LOW_PEAK)
        chosen = min(chosen, lower, key=lambda run: runs(run)["loss"] or inf)
    shares, losses = [], []
    for seed in range(seeds):
        mine, reference = (runs(replace(run, seed=seed)) for run in (chosen, base))
        curves = (
            mean_curve([[(line["samples"], line["test_loss"]) for line in figures["curve"]]])
            for figures in (mine, reference)
        )
        shares.append(taught(*curves))
        losses.append(mine["loss"])
    found = [round(share, 3) for share in credited(shares, converged=False)]
    steps = setting.run.cell.steps
    row = EfficiencyRow(round(fmean(found), 3), min(found), max(found), seeds, steps, False)
    return row, losses


def written(rows: Mapping[SlowSetting, EfficiencyRow]) -> str:
    """Return the text of the file."""
    found: dict[str, dict[str, Any]] = {}
    for setting, row in rows.items():
        found.setdefault(setting.key, {})[str(setting.number)] = asdict(row)
    return HEAD + tomli_w.dumps(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = quick.parse(_parser(), argv, QUICK)
    facts = machine()
    runs = Runs(args.out, None, facts.get("commit"))
    chosen = [s for s in settings(args.steps) if not args.settings or s.key in args.settings]
    with ThreadPoolExecutor(args.jobs) as pool:
        found = list(pool.map(lambda setting: efficiency(setting, args.seeds, runs), chosen))
    rows = [
        {
            "setting": setting.key,
            "number": setting.number,
            "seeds": args.seeds,
            "loss": round(fmean(losses), 4),
            "sd": round(stdev(losses), 4) if len(losses) > 1 else None,
            "sample efficiency": row.share,
            "low": row.low,
            "high": row.high,
        }
        for setting, (row, losses) in zip(chosen, found, strict=True)
    ]
    if args.write:
        FILE.write_text(written(dict(zip(chosen, (row for row, _ in found), strict=True))))
    return harness.publish("outer_advice", argv, args, facts, Findings(TITLE, rows, NOTES))


def _parser() -> argparse.ArgumentParser:
    parser = harness.make_parser("outer_advice", (__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, metavar="FOLDER", help="folder for the finished runs")
    add("--seeds", type=whole(1), default=3, help="number of runs of each setting")
    add("--jobs", type=whole(1), default=2, help="number of simultaneous runs")
    add("--steps", type=whole(10), default=STEPS, help="steps of every worker")
    add("--settings", nargs="+", metavar="NAME", help="names in the table; default: all")
    add("--write", action="store_true", help=f"write {FILE.name}")
    return parser


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
