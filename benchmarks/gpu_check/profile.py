"""Host stalls, launches and overlap of each algorithm, from the profile of one worker.

Runs under mpirun with three ranks; the argument is a folder for the runs. On the delayed-copy test
device its counters report stalls and launches, and no figures are drawn.
"""

from __future__ import annotations

import gzip
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from aladdin_mpi import DataParallel, accelerator
from aladdin_mpi.options.algorithms import ALGORITHMS
from benchmarks.gpu_check import picture, rows, trace
from benchmarks.gpu_check.device import is_test_device, report_folder
from benchmarks.gpu_check.memory import GUIDE
from benchmarks.gpu_check.rows import SKIP, Row
from benchmarks.gpu_check.training import DGC, WORLD
from benchmarks.gpu_check.workloads import Repeated

PART = "profile"
CASES: dict[str, dict[str, Any]] = {
    **{name: {} for name in sorted(ALGORITHMS)},
    "aladdin-ahead fp32": {"wire": "fp32"},
    "ar-sgd bf16": {"wire": "bf16"},
    "ar-sgd dgc": DGC,
}
PICTURED = ("aladdin-ahead", "ar-sgd", "bsp", "local-sgd", "sgp")
"""One algorithm of each family: asynchronous, all-reduce, server, periodic averaging, gossip."""
LAYERS, FEATURES = 6, 1000
BATCH = 16 if is_test_device() else 2048
FIRST, LAST = (8, 12) if is_test_device() else (16, 20)
"""Profiled steps, after the first rounds of aladdin-ahead: from the first up to the last, which is
not included."""
STEPS = 4 * LAST
"""Steps per worker; asynchronous workers share them dynamically."""
STALLS = (
    "items",
    "operators that the host waits for",
    "blocking copies to the host",
    "blocking copies to a device",
    "pageable copies to a device",
    "waits for a stream",
    "waits for a device",
    "waits for an event",
)
"""Counters of the test device for operations that keep the host from issuing work."""
LAUNCHES = ("kernels", "copies on a device", "copies to a device", "copies to the host")
"""Counters of the test device for work that the host issues."""
LEAST_OVERLAP = 0.5
"""Smallest share of the gradient copies' time during backward; the last buckets follow it."""
PHASES = ("forward", "backward", "run.step")


@dataclass
class Observed:
    """Figures of one worker over the profiled steps.

    Args:
        steps: number of profiled steps; 0: the worker has not reached them.
        buckets: number of messages of a model.
        stalls: waits of the host, by kind.
        launches: kernels, copies and fills.
        overlap: share of the copies to the host during the backward pass; None: not measured.
        copies: number of copies to the host.
    """

    steps: int = 0
    buckets: int = 0
    stalls: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    overlap: float | None = None
    copies: int = 0


def network() -> nn.Module:
    """Return a network of six million parameters."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(FEATURES, FEATURES), nn.ReLU())]
    return nn.Sequential(*layers)


class _Watch:
    """Profiles the steps from ``FIRST`` to ``LAST`` on one rank."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._path = folder / f"{name.replace(' ', '-')}.json"
        self._profile: Any = None
        self._counts: Counter[str] = Counter()
        self._step = 0
        self.observed = Observed()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch one step of the loop."""
        if self._step == FIRST:
            self._begin()
        with record_function(f"step {self._step}"):
            yield
        self._step += 1
        if self._step == LAST:
            self._end()

    def _begin(self) -> None:
        if is_test_device():
            self._counts = _counts()
        else:
            self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self._profile.__enter__()

    def _end(self) -> None:
        self.observed.steps = LAST - FIRST
        if is_test_device():
            found = _counts()
            found.subtract(self._counts)
            self.observed.stalls = Counter({key: found[key] for key in STALLS if found[key]})
            self.observed.launches = sum(found[key] for key in LAUNCHES)
            return
        self._profile.__exit__(None, None, None)
        self._profile.export_chrome_trace(str(self._path))
        self._read(trace.read(self._path))
        if self._name in PICTURED:
            self._keep()

    def _read(self, spans: list[trace.Span]) -> None:
        steps = [trace.labelled(spans, f"step {number}")[0] for number in range(FIRST, LAST)]
        window = steps[0].begin, steps[-1].end
        observed = self.observed
        observed.stalls = trace.stalls(spans, window)
        observed.launches = trace.launches(spans, window)
        backward = (
            trace.computed(spans, (each.begin, each.end))
            for each in trace.labelled(spans, "backward")
        )
        windows = [each for each in backward if each is not None]
        copies = [span for span in trace.done_for(spans, window) if span.is_copy_to_host]
        observed.copies = len(copies)
        observed.overlap = trace.share_within(copies, windows)
        if self._name in PICTURED:
            self._draw(spans, steps[1])

    def _draw(self, spans: list[trace.Span], step: trace.Span) -> None:
        work = trace.done_for(spans, (step.begin, step.end))
        end = max([step.end, *(span.end for span in work)])
        visible = [
            span
            for span in spans
            if span.end > step.begin
            and span.begin < end
            and (span.category in trace.WORK or _is_phase(span))
        ]
        path = report_folder() / f"profile-{self._name}.png"
        picture.draw(f"{self._name}: one step of a worker", visible, (step.begin, end), path)

    def _keep(self) -> None:
        packed = report_folder() / f"profile-{self._name}.json.gz"
        with self._path.open("rb") as source, gzip.open(packed, "wb") as target:
            shutil.copyfileobj(source, target)


def _is_phase(span: trace.Span) -> bool:
    return span.category == trace.LABEL and span.name in PHASES


def _counts() -> Counter[str]:
    from tests.late.device import runtime

    return Counter(runtime.counts())


def observe(folder: Path, name: str, options: dict[str, Any]) -> Observed:
    """Return one worker's figures in the profiled steps of a run."""
    module = network()
    run = DataParallel(
        module,
        algorithm=name.split()[0],
        device="gpu",
        steps=STEPS,
        batch_size=BATCH,
        lr=0.001,
        bucket_mb=4.0,
        run_dir=folder / name.replace(" ", "-"),
        quiet=True,
        overwrite=True,
        **options,
    )
    watch = _Watch(name, folder)
    steps = STEPS * WORLD.size
    batch = torch.randn(BATCH, FEATURES), torch.zeros(BATCH, dtype=torch.long)
    there = batch[0].to(run.device), batch[1].to(run.device)
    is_watched = WORLD.rank == WORLD.size - 1
    for inputs, labels in run.batches(Repeated(there, steps)):
        with watch.step() if is_watched else nullcontext():
            with record_function("forward"):
                loss = nn.functional.cross_entropy(module(inputs), labels)
            with record_function("backward"):
                loss.backward()
            with record_function("run.step"):
                run.step(loss)
    assert run._rank is not None
    watch.observed.buckets = len(run._rank.context.layout.buckets)
    return watch.observed


def plain_launches(folder: Path) -> float:
    """Return the launches of a step of the network without a run or an optimizer."""
    device = torch.device(accelerator.kind() or "cpu", 0)
    module = network().to(device)
    inputs = torch.randn(BATCH, FEATURES).to(device)
    labels = torch.zeros(BATCH, dtype=torch.long).to(device)
    watch = _Watch("plain", folder)
    for _ in range(LAST):
        module.zero_grad()
        with watch.step():
            nn.functional.cross_entropy(module(inputs), labels).backward()
    return watch.observed.launches / watch.observed.steps


def guide_launches(text: str) -> dict[str, float]:
    """Return the guide's largest number of launches for a bucket by case, or for "others"."""
    section = text.partition("## Launches")[2].partition("\n## ")[0]
    found = re.findall(r"^\| (.+?) \| (\d+) \|$", section, re.MULTILINE)
    names = {re.sub("[`,]", "", name).lower(): float(most) for name, most in found}
    return {name.removesuffix(" int8"): most for name, most in names.items()}


def report(name: str, observed: Observed, plain: float) -> None:
    """Print the rows of a case."""
    if not observed.steps:
        rows.report(PART, name, False, note=f"the worker has made fewer than {LAST} steps")
        return
    kinds = ", ".join(f"{count} {what}" for what, count in sorted(observed.stalls.items()))
    passed = not observed.stalls
    rows.report(PART, f"{name}: host stalls", passed, f"{kinds or 0} in {observed.steps} steps")
    _report_launches(name, observed, plain)
    if is_test_device():
        rows.print_row(Row(PART, f"{name}: overlap", SKIP, note="needs a GPU"))
    elif observed.overlap is not None:
        _report_overlap(name, observed)


def _report_launches(name: str, observed: Observed, plain: float) -> None:
    extra = observed.launches / observed.steps - plain
    each = extra / observed.buckets
    table = guide_launches(GUIDE.read_text())
    bound = table.get(name, table["others"])
    figures = f"{each:.1f} for each of {observed.buckets} buckets, {extra:.0f} a step"
    rows.report(PART, f"{name}: launches", each <= bound, figures, f"at most {bound:.0f} a bucket")


def _report_overlap(name: str, observed: Observed) -> None:
    assert observed.overlap is not None
    figures = f"{observed.overlap:.0%} of the copies to the host are during the backward pass"
    by_bucket = observed.copies >= observed.steps * observed.buckets > observed.steps
    note = f"at least {LEAST_OVERLAP:.0%}" if by_bucket else "sends no gradient bucket by bucket"
    passed = not by_bucket or observed.overlap >= LEAST_OVERLAP
    rows.report(PART, f"{name}: overlap", passed, figures, note)


def main() -> None:
    """Profile every case."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    plain = plain_launches(folder) if WORLD.rank == WORLD.size - 1 else 0.0
    for name, options in CASES.items():
        found = WORLD.gather((observe(folder, name, options), plain), root=0)
        if found is not None:
            report(name, *found[-1])


if __name__ == "__main__":
    main()
