"""Compare training on the delayed-copy test device with the CPU; run by test_late.py.

Arguments: the folder for the runs, and one of ``CHECKS``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from mpi4py import MPI

# isort: split
import torch
from torch import nn
from torch.utils.data import Subset

from aladdin_mpi import DataParallel, accelerator, load_dataset
from aladdin_mpi.allreduce import compressed, messages
from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.data import loading
from aladdin_mpi.exchange import worker_mailbox
from aladdin_mpi.hooks.measurement import Measurement, reestimate_batch_norm
from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.run import trainer
from aladdin_mpi.transport.mpi.engine import MpiTransport
from benchmarks.gpu_check.profile import STALLS
from benchmarks.gpu_check.refusal import REFUSED_STEPS, train_with_refused
from benchmarks.gpu_check.training import DETERMINISTIC as EQUAL
from benchmarks.gpu_check.training import WORLD, losses, make, network, parameters
from tests.late import guarded
from tests.late.device import runtime, states

COPIES, KERNELS = 4000, 100
"""Longest delays in microseconds."""
LATE_COPIES, LATE_KERNELS = (20_000, 100), (0, 2000)
"""Delays that reveal a mistake, whatever else the cores do."""
LATE_AT_ONE = (60_000 if WORLD.rank == 0 else 100, 100)
"""Rank 0 copies slowly: its neighbour's model arrives and changes its own long before the copy."""

SUMMED_BY = {"ar-sgd": "Iallreduce", "ar-sgd ring": "ring", "multistep": "Ialltoall"}
"""Operation that starts a sum: the first message of a ring, or a collective of MPI."""
OTHER_DELAYS = [(200, 0), (10_000, 0), (500, 1000)]
"""Short copies, long copies, slow kernels."""
FEW_EQUAL = ("ar-sgd", "bsp int8", "local-sgd", "multistep")
"""A sum, quantised gradients to servers, averages, and layers; the other runs take a minute."""
WITH_OTHER_DELAYS = ("ar-sgd", "bsp bf16", "bsp dgc", "sgp")
RESUMED = ("ar-sgd dgc", "bsp", "multistep", "sgp")
FEW_BITS: dict[str, dict[str, Any]] = {
    "aladdin-ahead fp32": {"wire": "fp32"},
    "aladdin-ahead int4": {"wire": "int4"},
    "asp clip": {"clip": 1.0},
}
TRIES = 3
"""Runs, one of which has to reveal a mistake: on a busy machine, messages may be late too."""
WARM_UP = 4
"""Steps in which an algorithm may still query the model."""


DIGITS = load_dataset("digits")
EVALUATED: dict[str, Any] = {
    "evaluate": Measurement(
        lambda module: reestimate_batch_norm(module, _first_images(module)),
        lambda module, part, parts: trainer.test_sums(module, DIGITS, part, parts, 64),
        trainer.test_figures,
    )
}


own: set[int] = set()
"""Devices that this rank has used: a previous run may still access them."""


def _first_images(module: nn.Module) -> Iterator[Any]:
    device = next(module.parameters()).device
    for images, _ in loading.train_batches_for_statistics(DIGITS.train, 32, 2, 0):
        yield (images.to(device),), {}


def train(folder: str, device: str, name: str, options: dict[str, Any]) -> torch.Tensor:
    """Train and return the parameters."""
    module = network()
    run = make(module, folder, device, name, **options)
    runtime.forget()
    for _ in losses(run, module):
        pass
    if accelerator.is_accelerator(run.device):
        own.add(run.device.index)
    others = set(runtime.touched()) - own
    expect(not others, f"{name}: {run.device} is this rank's, and {others} were touched")
    return parameters(module)


def expect(is_so: bool, what: str) -> None:
    """End the job with a message if the condition is false."""
    if not is_so:
        print(f"rank {WORLD.rank}: {what}", file=sys.stderr, flush=True)
        WORLD.Abort(1)


def anywhere(flag: bool) -> bool:
    return bool(WORLD.allreduce(int(flag), MPI.MAX))


def check_equal(
    folder: str, names: Iterable[str] = EQUAL, with_other_delays: Container[str] = WITH_OTHER_DELAYS
) -> None:
    for name in names:
        options = EQUAL[name]
        expected = train(folder, "cpu", name, options)
        delays = OTHER_DELAYS if name in with_other_delays else []
        for copies, kernels in [(COPIES, KERNELS), *delays]:
            runtime.set_delays(copies, kernels, WORLD.rank)
            result = train(folder, "gpu", name, options)
            where = f"{name}, copies {copies} us, kernels {kernels} us"
            error = (result - expected).abs().max().item()
            expect(torch.equal(result, expected), f"{where}: differs from the CPU's by {error}")
            expect(not guarded.too_early, f"{where}: handed over too early: {guarded.too_early}")
        runtime.set_delays(COPIES, KERNELS, WORLD.rank)


def check_few_equal(folder: str) -> None:
    check_equal(folder, FEW_EQUAL, ())


def check_resume(folder: str) -> None:
    """Check that a resumed run equals the uninterrupted one."""
    for name in RESUMED:
        options = EQUAL[name]
        whole, half = 16 * 24, 16 * 12  # complete rounds of two workers, and of three
        results = []
        for device in ("cpu", "gpu"):
            module = network()
            run = make(module, folder, device, name, samples=whole, **options)
            set_random_state(run, 7)
            for _ in losses(run, module):
                pass
            results.append(parameters(module))
            where = f"{folder}/{name.replace(' ', '-')}-{device}-half"
            module = network()
            short = make(module, folder, device, name, samples=half, run_dir=where, **options)
            set_random_state(short, 9)
            for _ in losses(short, module):
                pass
            module = network()
            last = make(module, folder, device, name, samples=whole, resume=where, **options)
            set_random_state(last, 5)
            for _ in losses(last, module):
                pass
            results.append(parameters(module))
            if last.device.type != "cpu" and not last.is_server:
                state = int(states[last.device.index])
                expect(state == 9, f"{name}: the device's random numbers are at {state}, not at 9")
        errors = [(result - results[0]).abs().max().item() for result in results]
        expect(not any(errors), f"{name}: CPU, resumed there, device, resumed there: {errors}")
        expect(not guarded.too_early, f"{name}: handed over too early: {guarded.too_early}")


def check_refused(folder: str) -> None:
    """Check that a non-finite gradient is refused, which the device reports a step later."""
    for name in ("bsp", "ar-sgd", "ar-sgd whole"):
        options = {"wait_free": "whole" not in name}
        expected, _ = train_with_refused(folder, "cpu", name, **options)
        result, refused = train_with_refused(folder, "gpu", name, **options)
        expect(all(bool(each.isfinite().all()) for each in result.values()), f"{name}: not finite")
        for key, value in expected.items():
            expect(torch.equal(result[key], value), f"{name}: {key} differs from the CPU's")
        if WORLD.rank == 0:
            expect(refused == len(REFUSED_STEPS), f"{name}: {refused} refused")


def set_random_state(run: DataParallel, number: int) -> None:
    if run.device.type != "cpu":
        states[run.device.index].fill_(number)


def check_budget(folder: str) -> None:
    """Check that a step does not wait for the device."""
    runtime.set_delays(500, 0, WORLD.rank)
    names: dict[str, dict[str, Any]] = {name: {} for name in sorted(ALGORITHMS)}
    names |= EQUAL | FEW_BITS
    for name, options in names.items():
        module = network()
        run = make(module, folder, "gpu", name, samples=16 * 9 * WORLD.size, **options)
        begun: list[dict[str, int]] = []
        for _ in losses(run, module):
            begun.append(runtime.counts())
        if len(begun) > WARM_UP + 1:
            first, last = begun[WARM_UP], begun[-1]
            stalls = {what: last[what] - first.get(what, 0) for what in STALLS if what in last}
            stalls = {what: count for what, count in stalls.items() if count}
            expect(not stalls, f"{name}: in {len(begun) - 1 - WARM_UP} steps {stalls}")
        steps = WORLD.allreduce(len(begun), MPI.MAX)
        expect(steps > WARM_UP + 1, f"{name}: no rank has made more than {steps} steps")


def check_ahead(folder: str) -> None:
    """Check that with slow kernels the device is still computing when the host ends a step.

    On busy cores the host may be slow itself: it then has to be ahead of slower kernels.
    """
    for name in ("aladdin", "aladdin-ahead"):
        is_ahead: list[bool] = []
        for kernels in (1500, 6000, 24_000):
            runtime.set_delays(100, kernels, WORLD.rank)
            is_ahead = steps_ahead(folder, name)
            has_waited = sum(is_ahead) < len(is_ahead) - 1
            if not WORLD.allreduce(has_waited, MPI.LOR):
                break
        else:
            expect(not has_waited, f"{name}: the host has waited: {is_ahead}")


def steps_ahead(folder: str, name: str) -> list[bool]:
    """Return for each step whether its kernels still ran when the next began; empty on servers."""
    module = network()
    run = make(module, folder, "gpu", name)
    is_ahead = []
    computed: list[Any] = []
    for _ in losses(run, module):
        is_ahead += [not event.query() for event in computed]
        computed = [torch.accelerator.current_stream().record_event()]
    return [] if run.is_server else is_ahead


def check_sums(folder: str) -> None:
    """Check that sums begin while the device computes, also if the host only waits for it."""
    runtime.set_delays(100, 6000, WORLD.rank)
    for name, collective in SUMMED_BY.items():
        early, every = max(sums_begun(folder, name, collective))
        expect(2 * early >= every > 1, f"{name}: {early} of {every} sums began during backward")
        with replaced(MpiTransport, "when_happened", lambda self, event, action: None):
            # On busy cores the host is late in some steps, when the copies have already ended.
            early, every = min(sums_begun(folder, name, collective))
        expect(early == 0, f"{name}: {early} of {every} sums began without being seen to")


def sums_begun(folder: str, name: str, collective: str) -> list[tuple[int, int]]:
    """Return how many sums of each step began before the device ended it, and how many did."""
    begun: list[str] = []
    begin = MpiTransport._collective
    advance = messages._Sum.begin

    def watched(self: MpiTransport, kind: str, *given: Any, **kw: Any) -> Any:
        begun.append(kind)
        return begin(self, kind, *given, **kw)

    def watched_ring(self: messages._Sum) -> None:
        steps = self.steps._steps

        def noted() -> Iterator[Any]:
            begun.append("ring")
            yield from steps

        self.steps._steps = noted()
        advance(self)

    module = network()
    run = make(module, folder, "gpu", name, **EQUAL[name])
    steps = []
    few: Any = Subset(cast(Any, load_dataset("digits").train), range(480))
    with (
        replaced(MpiTransport, "_collective", watched),
        replaced(messages._Sum, "begin", watched_ring),
    ):
        for images, labels in run.batches(few):
            begun.clear()
            nn.functional.cross_entropy(module(images), labels).backward()
            computed = torch.accelerator.current_stream().record_event()
            while not computed.query():
                time.sleep(1e-3)
            early = begun.count(collective)
            run.step()
            steps.append((early, begun.count(collective)))
    return steps


def check_all(folder: str) -> None:
    """Run every algorithm; a run whose counters do not balance ends with an error."""
    for name in sorted(ALGORITHMS):
        result = train(folder, "gpu", name, {})
        expect(bool(result.isfinite().all()), f"{name}: not finite")
        expect(not guarded.too_early, f"{name}: handed over too early: {guarded.too_early}")


def check_evaluation(folder: str) -> None:
    """Check that an evaluation in parts on the workers' devices equals that of rank 0."""
    for name in ("ar-sgd", "bsp"):
        evaluations, models = [], []
        for device in ("cpu", "gpu"):
            module = network()
            module.insert(1, nn.BatchNorm2d(4))
            run = make(module, folder, device, name, eval_every=0.1, **EVALUATED)
            runtime.forget()
            for _ in losses(run, module):
                pass
            if run.device.type != "cpu":
                own.add(run.device.index)
                expect(set(runtime.touched()) <= own, f"{name}: touched {runtime.touched()}")
            models.append(module.state_dict())
            if WORLD.rank == 0:
                assert run.run_dir is not None
                lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
                evaluations.append([json.loads(line) for line in lines if '"eval"' in line])
                is_divided = run._ready().evaluations.are_divided
                expect(is_divided == (device == "gpu"), f"{name}, {device}: {is_divided}")
        if WORLD.rank == 0:
            for key, value in models[0].items():
                other = models[1][key].cpu()
                expect(torch.allclose(value.cpu(), other, rtol=1e-5), f"{name}: {key} differs")
            alone, shared = (lines[-1] for lines in evaluations)
            expect(len(evaluations[1]) > 1, f"{name}: {evaluations[1]}")
            for key in ("test_accuracy", "test_loss"):
                error = abs(alone[key] - shared[key])
                expect(error < 1e-5, f"{name}: {key}: {alone[key]} and {shared[key]}")


# -- planted mistakes ----------------------------------------------------------------------
@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def copy_at_once(self: accelerator.CopyStream, source: torch.Tensor, target: torch.Tensor) -> Any:
    """Replace :meth:`CopyStream.copy` without waiting for the kernels that compute ``source``."""
    with self._module.stream(self._stream):
        target.copy_(source, non_blocking=True)
        return accelerator.CopyEvent(self._stream.record_event(), self._device)


@contextmanager
def copies_that_hold_nothing() -> Iterator[None]:
    """Let the device continue while it copies to the host."""
    copy = accelerator.CopyStream.copy

    def loose(self: Any, source: torch.Tensor, target: torch.Tensor) -> Any:
        event = copy(self, source, target)
        event.hold = lambda: None  # type: ignore[method-assign]
        return event

    with replaced(accelerator.CopyStream, "copy", loose):
        yield


def fetch_at_once(self: DenseWire, message: torch.Tensor) -> Any:
    """Replace :meth:`DenseWire.fetch` and let the device continue."""
    if self._copies is None:
        return message, None
    with replaced(accelerator.CopyEvent, "hold", lambda self: None):
        return self._copies.fetch(message)


DEFECTS: dict[str, tuple[str, tuple[int, int], Callable[[], Any]]] = {
    "no wait for the stream": (
        "bsp",
        LATE_KERNELS,
        lambda: replaced(accelerator.CopyStream, "copy", copy_at_once),
    ),
    "a send without its event": (
        "bsp",
        LATE_COPIES,
        lambda: replaced(accelerator.CopyEvent, "query", lambda self: True),
    ),
    "a sum before its event": (
        "ar-sgd",
        LATE_COPIES,
        lambda: replaced(compressed.Queued, "is_ready", True),
    ),
    "a ring before its event": (
        "ar-sgd ring",
        LATE_COPIES,
        lambda: replaced(messages._Sum, "begin", lambda self: self.steps.advance()),
    ),
    "direct messages before their event": (
        "ar-sgd bf16",
        LATE_COPIES,
        lambda: replaced(messages._Sum, "begin", lambda self: self.steps.advance()),
    ),
    "a temporary that is not kept": (
        "bsp dgc",
        LATE_COPIES,
        lambda: replaced(accelerator.CopyStream, "_keep", lambda self, source: None),
    ),
    "a model that changes while it is copied": (
        "sgp",
        LATE_AT_ONE,
        copies_that_hold_nothing,
    ),
    "a model that is read before it has arrived": (
        "bsp",
        LATE_COPIES,
        lambda: replaced(DenseWire, "fetch", fetch_at_once),
    ),
    "a model received into memory that a copy reads": (
        "bsp",
        LATE_COPIES,
        lambda: replaced(
            worker_mailbox._Inbox, "repost", lambda self, count, after=None: self._repost(count)
        ),
    ),
}


def check_defects(folder: str) -> None:
    for defect, (name, delays, plant) in DEFECTS.items():
        runtime.set_delays(*delays, WORLD.rank)
        expected = train(folder, "gpu", name, EQUAL[name])
        expect(not guarded.too_early, f"before {defect}: {guarded.too_early}")
        differs = was_told = False
        for _ in range(TRIES):
            with plant():
                result = train(folder, "gpu", name, EQUAL[name])
            differs = anywhere(not torch.equal(result, expected))
            was_told = anywhere(bool(guarded.too_early))
            guarded.too_early.clear()
            if differs or was_told:
                break
        expect(differs or was_told, f"{defect}: not found")
        if WORLD.rank == 0:
            print(f"found: {defect}: differs {differs}, told {was_told}", flush=True)


runtime.set_delays(COPIES, KERNELS, WORLD.rank)
accelerator.LEAST_REGISTERED = 1 << 12  # these models are small
guarded.install()
CHECKS = {
    "equal": check_equal,
    "few-equal": check_few_equal,
    "resume": check_resume,
    "refused": check_refused,
    "budget": check_budget,
    "ahead": check_ahead,
    "sums": check_sums,
    "evaluation": check_evaluation,
    "all": check_all,
    "defects": check_defects,
}
CHECKS[sys.argv[2]](sys.argv[1])
if WORLD.rank == 0:
    print("done", flush=True)
